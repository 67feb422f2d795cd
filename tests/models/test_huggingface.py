"""The Hugging Face adapter: what it reads from transformers' models, without running them on a mesh."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshpar import ActivationCheckpoint, FullyShard, TensorParallel
from meshpar.core import patterns
from meshpar.core.errors import LayoutError
from meshpar.core.mesh import MeshSpec
from meshpar.models.huggingface import from_config, layout_for
from meshpar.models.huggingface.styles import FullPositions, Head
from meshpar.passes.tensor.parts import Experts, Parts
from meshpar.passes.tensor.styles import Region
from meshpar.process.imports import quiet_imports
from meshpar.testing import assert_parity, on_ranks, token_steps
from tests.support.tiers import daily

transformers = pytest.importorskip("transformers")

DECODER = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MIXTRAL = DECODER | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
INKLING = DECODER | {
    "model_type": "inkling_text", "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
LAYER = "model.layers.*"
LLAMA_TABLE = {
    "model": FullPositions(), "model.embed_tokens": "vocab", f"{LAYER}.input_layernorm": "sequence",
    f"{LAYER}.self_attn": "region", f"{LAYER}.self_attn.q_proj": "colwise", f"{LAYER}.self_attn.k_proj": "colwise",
    f"{LAYER}.self_attn.v_proj": "colwise", f"{LAYER}.self_attn.o_proj": "rowwise",
    f"{LAYER}.post_attention_layernorm": "sequence", f"{LAYER}.mlp": "region", f"{LAYER}.mlp.gate_proj": "colwise",
    f"{LAYER}.mlp.up_proj": "colwise", f"{LAYER}.mlp.down_proj": "rowwise", "model.norm": "sequence",
    "lm_head": Head(),
}  # fmt: skip
QWEN3_TABLE = LLAMA_TABLE | {f"{LAYER}.self_attn.q_norm": "grad_sum", f"{LAYER}.self_attn.k_norm": "grad_sum"}
GPT2_TABLE = {
    "transformer.wte": "vocab",
    "transformer.h.*.attn": "region:split_size",
    "transformer.h.*.attn.c_attn": "packed_colwise:3",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp": "region",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": Head(),
}


def layout_of(model: nn.Module) -> Any:
    layout = layout_for(model)
    assert layout is not None
    return layout


def refusals(layout: Any) -> list[str]:
    attention = layout.attention
    return [
        *filter(None, (layout.tensor.refusal, layout.experts.balance_refusal, layout.recompute_refusal)),
        *filter(None, (attention.refusal, attention.mixers_refusal, attention.documents_refusal)),
    ]


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    return GPT2 | changes if model_type == "gpt2" else DECODER | {"model_type": model_type} | changes


@pytest.mark.parametrize(
    ("model_type", "table", "blocks"),
    [("llama", LLAMA_TABLE, LAYER), ("qwen3", QWEN3_TABLE, LAYER), ("gpt2", GPT2_TABLE, "transformer.h.*")],
)
@pytest.mark.parametrize("tied", [True, False])
def test_layout_is_read_from_the_model(model_type: str, table: dict[str, Any], blocks: str, tied: bool) -> None:
    model = from_config(config(model_type, tie_word_embeddings=tied))
    layout = layout_of(model)
    assert layout.blocks == (blocks,)
    assert layout.tensor.styles == table
    embedding = "transformer.wte.weight" if model_type == "gpt2" else "model.embed_tokens.weight"
    assert layout.tied == (((embedding, "lm_head.weight"),) if tied else ())
    for pattern in (*layout.blocks, *layout.tensor.styles, *layout.tensor.heads):
        assert list(patterns.find_modules(model, pattern)), pattern
    assert not refusals(layout)
    assert not layout.fp32
    assert layout.dropout == (model_type == "gpt2")


def test_head_counts_come_from_the_config() -> None:
    attention = f"{LAYER}.self_attn"
    llama = layout_of(from_config(config("llama"))).tensor.heads
    assert llama == {f"{attention}.q_proj": 4, f"{attention}.k_proj": 2, f"{attention}.v_proj": 2}
    assert layout_of(from_config(config("gpt2"))).tensor.heads == {"transformer.h.*.attn.c_attn": 4}


def test_dropout_is_read_from_the_config() -> None:
    assert layout_of(from_config(config("llama", attention_dropout=0.1))).dropout
    assert not layout_of(from_config(config("gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))).dropout


def test_experts_are_spread_whole_or_split_inside() -> None:
    layout = layout_of(from_config(MIXTRAL))
    inside = Parts(dims={"gate_up_proj": (1, 2), "down_proj": (-1, 1)}, sums=True)
    assert layout.tensor.styles[f"{LAYER}.mlp.experts"] == Experts(otherwise=inside)
    # The router reads the same hidden states whole: a region would sum its gradient over the axis once too often.
    assert f"{LAYER}.mlp" not in layout.tensor.styles
    assert layout.tensor.styles[f"{LAYER}.self_attn"] == "region"
    assert "sequence" not in layout.tensor.styles.values()


def test_gate_and_up_of_experts_are_two_projections_whatever_the_plan_calls_them() -> None:
    if INKLING["model_type"] not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip("this release of transformers has no Inkling")
    inside = Parts(dims={"gate_up_proj": (1, 2), "down_proj": (-1, 1)}, sums=True)
    layout = layout_of(from_config(INKLING))
    assert layout.tensor.styles[f"{LAYER}.mlp.experts"] == Experts(otherwise=inside)


def test_a_sum_over_what_is_whole_is_refused() -> None:
    whole = dict.fromkeys((f"{LAYER}.self_attn", *(f"{LAYER}.self_attn.{letter}_proj" for letter in "qkvo")))
    model = from_config(config("qwen3"))
    problems = list(TensorParallel(styles=whole).problems(model, layout_of(model), MeshSpec("tp=2")))
    assert [problem.partition(" sums its gradient")[0] for problem in problems] == [
        "model.layers.0.self_attn.q_norm",
        "model.layers.0.self_attn.k_norm",
    ]
    norms = dict.fromkeys((f"{LAYER}.self_attn.q_norm", f"{LAYER}.self_attn.k_norm"))
    assert not list(TensorParallel(styles=whole | norms).problems(model, layout_of(model), MeshSpec("tp=2")))


def test_what_a_plan_leaves_whole_is_told() -> None:
    attention = dict.fromkeys((f"{LAYER}.self_attn", *(f"{LAYER}.self_attn.{letter}_proj" for letter in "qkvo")))
    model = from_config(config("llama", intermediate_size=8, vocab_size=32))
    assert not list(TensorParallel().warnings(model, layout_of(model), MeshSpec("tp=2")))
    (warning,) = TensorParallel(styles=attention).warnings(model, layout_of(model), MeshSpec("tp=2"))
    assert warning.startswith(
        "tensor parallelism leaves 64% of the parameters whole on every rank of tp, the largest "
        "model.layers.0.self_attn"
    )
    layout = layout_of(model)
    others = {name: style for name, style in layout.tensor.styles.items() if ".self_attn" not in name}
    meant = replace(layout, tensor={**others, f"{LAYER}.self_attn": None})
    assert not list(TensorParallel().warnings(model, meant, MeshSpec("tp=2"))), "the layout says so"


def test_what_other_packages_warn_of_at_import_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torchao")
    with quiet_imports():
        logger.warning("Failed to load a file")
        logger.error("an error")
    logger.warning("later")
    assert [record.message for record in caplog.records] == ["an error", "later"]


def test_models_whose_masks_count_positions_leave_sequence_parallelism_out() -> None:
    assert "sequence" in layout_of(from_config(config("mistral", sliding_window=None))).tensor.styles.values()
    assert "sequence" not in layout_of(from_config(config("mistral", sliding_window=8))).tensor.styles.values()
    assert "sequence" not in layout_of(from_config(config("gpt2"))).tensor.styles.values()


def test_experts_that_no_split_fits_are_refused() -> None:
    model = from_config(MIXTRAL | {"intermediate_size": 50})
    style = layout_of(model).tensor.styles[f"{LAYER}.mlp.experts"]
    module = model.get_submodule("model.layers.0.mlp.experts")
    assert not list(style.problems("experts", module, 2)), "whole experts need not divide inside"
    first, *inside = style.problems("experts", module, 3)
    assert first == "experts has 4 experts, which tp=3 does not divide; use tp=2 or 4"
    assert (
        inside[0]
        == "experts.gate_up_proj has 2 parts of 50 in dim 1, which tp=3 does not divide; use tp=2, 5, 10, 25 or 50"
    )


def test_an_unknown_style_is_refused_by_name() -> None:
    model = from_config(config("llama"))
    model._tp_plan |= {f"{LAYER}.mlp.up_proj": "diagonal"}
    (problem,) = TensorParallel().problems(model, layout_of(model), MeshSpec("tp=2"))
    assert problem.endswith("(and 1 more like it)")
    assert problem.startswith(
        "model.layers.0.mlp.up_proj: its tp_plan has the style 'diagonal', which meshpar does not support"
    )


def test_parameters_among_split_projections_need_a_style() -> None:
    model = from_config(config("llama"))
    model.model.layers[0].self_attn.temperature = nn.Parameter(torch.ones(4, device="meta"))
    (problem,) = TensorParallel().problems(model, layout_of(model), MeshSpec("tp=2"))
    assert problem.startswith("model.layers.0.self_attn.temperature (4,) has no style among projections")
    assert f"TensorParallel(styles={{'{LAYER}.self_attn.k_proj': None, " in problem


def test_a_model_without_a_plan_says_so() -> None:
    model = from_config(
        {"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    )
    layout = layout_of(model)
    assert layout.blocks == ("backbone.layers.*",)
    assert "transformers gives MambaForCausalLM no tp_plan" in layout.tensor.refusal


def test_a_verified_structure_takes_the_place_of_a_plan() -> None:
    layout = layout_of(from_config(config("opt", ffn_dim=48, word_embed_proj_dim=32)))
    layer = "model.decoder.layers.*"
    assert layout.tensor.styles == {
        f"{layer}.self_attn": Region(("position_bias",), counts=("num_heads",)),
        **dict.fromkeys((f"{layer}.self_attn.{letter}_proj" for letter in "qkv"), "colwise"),
        f"{layer}.self_attn.out_proj": "rowwise",
        f"{layer}.fc1": "colwise",
        f"{layer}.fc2": "rowwise",
        "model.decoder.embed_tokens": "vocab",
        "lm_head": Head(),
    }
    assert not refusals(layout)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "mixtral", "llama3_rope"])
def test_init_fills_every_parameter_and_buffer_after_to_empty(model_type: str) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    rope = {"rope_parameters": scaling | {"original_max_position_embeddings": 16}}
    values = {"mixtral": MIXTRAL, "llama3_rope": config("llama", **rope)}.get(model_type) or config(model_type)
    model = from_config(values)
    init = layout_of(model).init
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan"))
    for module in reversed(list(model.modules())):
        init(module)
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    real = type(model)(model.config)
    expected = dict(real.named_buffers())
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())
    drawn = {name: parameter.std().item() for name, parameter in real.named_parameters() if parameter.numel() > 1000}
    for name, parameter in model.named_parameters():
        if parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(drawn[name], rel=0.15), name
    assert not any(hasattr(tensor, "_is_hf_initialized") for tensor in (*model.parameters(), *model.buffers()))


def test_from_config_reads_a_folder_and_the_layout_publishes_the_same(tmp_path: Path) -> None:
    first = from_config(config("qwen3", tie_word_embeddings=True))
    (tmp_path / "config.json").write_text(json.dumps(layout_of(first).config))
    second = from_config(tmp_path)
    assert type(second) is type(first)
    assert layout_of(second).config == layout_of(first).config
    assert {n: p.shape for n, p in second.named_parameters()} == {n: p.shape for n, p in first.named_parameters()}
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in second.parameters())
    assert layout_of(second).config["architectures"] == ["Qwen3ForCausalLM"]
    assert second.config._attn_implementation == "sdpa"


def test_from_config_names_what_is_missing() -> None:
    with pytest.raises(LayoutError, match=r"config.json with a model_type, got the keys \['hidden_size'\]"):
        from_config({"hidden_size": 3})


def test_other_modules_have_no_layout_here() -> None:
    assert layout_for(nn.Linear(2, 2)) is None


# Latent attention and fused or gathered projections, which only transformers' own styles know.
MLA = {
    "first_k_dense_replace": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
ON_A_MESH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": (
        config("deepseek_v3", head_dim=4, num_key_value_heads=4, n_group=1, topk_group=1, n_routed_experts=4) | MLA,
        {},
    ),
    "glm4": (config("glm4", pad_token_id=0), {"loss_parallel": True}),
    "mixtral": (MIXTRAL, {}),
    "mixtral_inside": (MIXTRAL | {"num_local_experts": 3}, {}),
    "mistral": (config("mistral", sliding_window=None), {"sequence_parallel": True}),
    "qwen2": (
        {key: value for key, value in config("qwen2").items() if key != "head_dim"},
        {"sequence_parallel": True, "loss_parallel": True},
    ),
}


@pytest.mark.parametrize("name", daily(ON_A_MESH, "deepseek_v3"))
@on_ranks(4, timeout_s=170)
def test_adapted_models_match_one_process(name: str) -> None:
    values, options = ON_A_MESH[name]
    passes = [TensorParallel(**options), ActivationCheckpoint(), FullyShard()]
    # Qwen2's biases start at zero: two AdamW steps are their whole value, so the rounding of a gradient's sum shows
    # (1.2e-5 of it). In float64 the gradients of these models agree to 1e-11.
    assert_parity(
        lambda: from_config(values), "dp_shard=2,tp=2", passes, token_steps(96, steps=2, parts=2), tolerance=3e-5
    )
