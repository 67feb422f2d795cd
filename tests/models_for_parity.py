"""Small models, of which parity tests make many."""

from __future__ import annotations

from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig

VOCAB = 96


def transformer(**options):
    return Transformer(TransformerConfig(**dict(vocab_size=VOCAB, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, max_positions=64) | options))


def gpt2(**options):
    return GPT2(GPT2Config(**dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4) | options))


def huggingface(name, **options):
    import transformers

    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = getattr(transformers, f"{name}Config")(**sizes, max_position_embeddings=64, head_dim=8, use_cache=False, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def huggingface_gpt2(**options):
    import transformers

    sizes = dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False, **options))
