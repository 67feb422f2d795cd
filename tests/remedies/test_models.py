"""Rows of `models`: see `tests/remedies/rows.py`."""

from __future__ import annotations

import pytest
import torch
import transformers

from meshpar import ActivationCheckpoint, ContextParallel, ExpertParallel, FullyShard, ModelLayout, TensorParallel
from meshpar.models import GPT2Config, Transformer, TransformerConfig
from meshpar.models.huggingface import layout_for
from meshpar.models.huggingface_styles import FullPositions
from meshpar.passes.tensor.context import Context
from tests.remedies.plans import problems
from tests.remedies.rows import Row, alone
from tests.support.models_for_parity import VOCAB, huggingface

UNTRIED = 9

CP, EP = [ContextParallel(), FullyShard()], [ExpertParallel(), FullyShard()]
CP_MESH, EP_MESH, FSDP_MESH = "dp_shard=1,cp=2", "dp_shard=1,ep=2", "dp_shard=2"


def llama(**options):
    with torch.device("meta"):
        return huggingface("Llama", **options)


def checked(mesh, passes, module):
    return problems(mesh, passes, module, layout_for(module))


def on_fsdp(module):
    """The problems of a mesh without the axis that a model cannot have."""
    return checked(FSDP_MESH, [FullyShard()], module)


def switch():
    sizes = dict(vocab_size=32, d_model=32, d_kv=8, d_ff=32, num_heads=4, num_layers=2, num_sparse_encoder_layers=2)
    with torch.device("meta"):
        return transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**sizes))


def t5():
    sizes = dict(vocab_size=32, d_model=32, d_kv=8, d_ff=32, num_heads=4, num_layers=2)
    with torch.device("meta"):
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def reformer():
    config = transformers.ReformerConfig(
        attn_layers=["local", "local"],
        hidden_size=32,
        feed_forward_size=32,
        num_attention_heads=2,
        attention_head_size=16,
        axial_pos_embds=True,
        axial_pos_shape=[4, 8],
        axial_pos_embds_dim=[16, 16],
        max_position_embeddings=32,
        vocab_size=32,
        is_decoder=True,
    )
    with torch.device("meta"):
        return transformers.ReformerModelWithLMHead(config)


def mamba():
    with torch.device("meta"):
        return transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, use_cache=False)
        )


def stablelm():
    with torch.device("meta"):
        return huggingface("StableLm")


def turned(kind):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0} if kind != "default" else None
    return llama(**({"rope_parameters": rope} if rope else {}))


def mixture(**options):
    with torch.device("meta"):
        return huggingface("Mixtral", num_local_experts=4, num_experts_per_tok=2, **options)


def length(count, **limits):
    model = Transformer(
        TransformerConfig(**dict(vocab_size=16, dim=16, layers=1, heads=2, hidden=16, max_positions=8) | limits)
    )
    return tuple(model(torch.zeros(1, count, dtype=torch.int64)).logits.shape)


def config(**options):
    return TransformerConfig(**dict(vocab_size=16, dim=32, layers=1, heads=4, hidden=16) | options).dim


def padded(*, mask, sequence_parallel=True):
    """The shape of the logits of a batch, with a mask of padding or without."""
    model = huggingface("Llama")
    context = Context(
        mesh=None,
        group=None,
        rank=0,
        root=model,
        sequence_parallel=sequence_parallel,
        loss_parallel=False,
        random=None,
        inputs=(),
    )
    FullPositions().install("model", model.model, context)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    return tuple(model(input_ids=ids, **({"attention_mask": torch.ones_like(ids)} if mask else {})).logits.shape)


ROWS = [
    Row(
        "{} got an attention_mask; transformers applies it to the embeddings",
        lambda: padded(mask=True),
        {
            "pack the batch instead of padding it": lambda: padded(mask=False),
            "use TensorParallel(sequence_parallel=False)": lambda: padded(mask=True, sequence_parallel=False),
        },
        result=(1, 8, VOCAB),
    ),
    Row(
        "n_head ({}) does not divide n_embd ({})",
        lambda: GPT2Config(n_embd=30, n_head=4),
        {"choose n_embd as a multiple of n_head": lambda: GPT2Config(n_embd=32, n_head=4).n_embd},
        result=32,
    ),
    Row(
        "heads ({}) does not divide dim ({}); set head_dim, or change heads",
        lambda: config(heads=5),
        {"set head_dim": lambda: config(heads=5, head_dim=8), "change heads": lambda: config(heads=2)},
        result=32,
    ),
    Row(
        "kv_heads ({}) does not divide heads ({})",
        lambda: config(kv_heads=3),
        {"choose a divisor": lambda: config(kv_heads=2)},
        result=32,
    ),
    Row(
        "experts is {} and qk_norm is False",
        lambda: config(experts=4),
        {"set qk_norm=True": lambda: config(experts=4, qk_norm=True)},
        result=32,
    ),
    Row(
        "the sequence has {} positions; expected at most {}",
        lambda: length(9),
        {"shorten it": lambda: length(8)[1:]},
        result=(8, 16),
    ),
    Row(
        "or raise the limit in the model's config",
        lambda: length(9),
        {"raise the limit in the model's config": lambda: length(9, max_positions=16)},
        result=(1, 9, 16),
    ),
    Row(
        "transformers gives {} no tp_plan",
        lambda: checked("tp=2", [TensorParallel()], stablelm()),
        {
            "drop TensorParallel": lambda: on_fsdp(stablelm()),
            "pass a ModelLayout with a tensor table to apply": lambda: problems(
                "tp=2",
                [TensorParallel()],
                stablelm(),
                ModelLayout(
                    blocks=("model.layers.*",),
                    tensor={
                        "model.layers.*.mlp.gate_proj": "colwise",
                        "model.layers.*.mlp.up_proj": "colwise",
                        "model.layers.*.mlp.down_proj": "rowwise",
                    },
                ),
            ),
        },
    ),
    Row(
        "{} adds a balance loss of each rank's own tokens to its loss",
        lambda: on_fsdp(mixture(output_router_logits=True)),
        {
            "set model.config.output_router_logits = False and training.balance_loss": lambda: on_fsdp(
                mixture(output_router_logits=False)
            )
        },
    ),
    Row(
        "{} has a key/value cache (config.use_cache)",
        lambda: checked(FSDP_MESH, [ActivationCheckpoint(), FullyShard()], llama(use_cache=True)),
        {
            "set model.config.use_cache = False": lambda: checked(
                FSDP_MESH, [ActivationCheckpoint(), FullyShard()], llama(use_cache=False)
            )
        },
    ),
    Row(
        "{} attends by {}, and ContextParallel serves 'sdpa' and 'eager'",
        lambda: checked(CP_MESH, CP, llama(attn_implementation="flex_attention")),
        {
            "build the model with attn_implementation='sdpa'": lambda: checked(
                CP_MESH, CP, llama(attn_implementation="sdpa")
            )
        },
    ),
    Row(
        "{} attends from one sequence to another, and ContextParallel splits one",
        lambda: checked(CP_MESH, CP, t5()),
        {"use a mesh without cp": lambda: on_fsdp(t5())},
    ),
    Row(
        "{} has embeddings of places for one length alone (axial_pos_embds)",
        lambda: checked(CP_MESH, CP, reformer()),
        {"use a mesh without cp": lambda: on_fsdp(reformer())},
    ),
    Row(
        "{} turns its positions by the longest that it sees",
        lambda: checked(CP_MESH, CP, turned("dynamic")),
        {"use a mesh without cp": lambda: on_fsdp(turned("dynamic"))},
    ),
    Row(
        "{} takes no position_ids, and ContextParallel gives each rank positions of its own",
        lambda: checked(CP_MESH, CP, mamba()),
        {
            "use a mesh without cp": lambda: on_fsdp(mamba()),
            "name what mixes positions, ContextParallel(mixers=(...))": lambda: checked(
                CP_MESH, [ContextParallel(mixers=("backbone.layers.*.mixer",)), FullyShard()], mamba()
            ),
        },
    ),
    Row(
        "{} is a list of modules, and each of their parameters is one expert's",
        lambda: checked(EP_MESH, EP, switch()),
        {
            "use a mesh without ep": lambda: on_fsdp(switch()),
            "stack them in one module that is called with": lambda: checked(EP_MESH, EP, mixture()),
        },
    ),
    Row(
        "{} has no experts to divide",
        lambda: checked(EP_MESH, EP, llama()),
        {"drop ExpertParallel and ep from the mesh": lambda: checked("dp_shard=1", [FullyShard()], llama())},
    ),
]


@pytest.mark.parametrize("row", alone(ROWS))
def test_the_printed_remedy_helps(row):
    row.run()
