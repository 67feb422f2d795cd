"""Small models, of which parity tests make many, and weights in memory."""

from types import SimpleNamespace

import torch
from torch import nn

from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig

VOCAB = 96


def on_meta(build):
    with torch.device("meta"):
        return build()


def transformer(**options):
    return Transformer(
        TransformerConfig(
            **dict(vocab_size=VOCAB, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, max_positions=64) | options
        )
    )


def gpt2(**options):
    return GPT2(GPT2Config(**dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4) | options))


def huggingface(name, **options):
    import transformers

    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    options = sizes | dict(max_position_embeddings=64, head_dim=8, use_cache=False) | options
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def huggingface_gpt2(**options):
    import transformers

    sizes = dict(
        vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | options, use_cache=False))


def t5():
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
            dropout_rate=0.0, use_cache=False,
        )
    )  # fmt: skip


class MaskedAttention(nn.Module):
    """Attention under a mask that is built in memory, as in many hand-written models."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device, dtype=torch.bool).tril()
        return x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )


class Masked(nn.Module):
    def __init__(self, vocab=VOCAB, dim=32, layers=2, heads=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(MaskedAttention(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.head(x))


class Given:
    """Tensors in memory as a source of weights."""

    def __init__(self, tensors):
        self.tensors = tensors

    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def dtypes(self):
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def read(self, name, index, out):
        out.copy_(self.tensors[name][index])
