"""Weights from files: what the model lacks, and what would lose its meaning, is refused unless it is asked for."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import meshpar
from meshpar import MeshparError, Parallelized, Plan
from meshpar.core.layout import ModelLayout
from meshpar.core.registry import layout_for
from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig
from meshpar.state import initialize
from meshpar.testing import on_ranks
from tests.support.models_for_parity import Given, on_meta

QWEN3 = TransformerConfig(vocab_size=32, dim=16, layers=3, heads=4, kv_heads=2, hidden=24, qk_norm=True, tied=False)


pytestmark = pytest.mark.usefixtures("one_process")


def parallel(make, layout: ModelLayout | None = None) -> Parallelized:
    model = on_meta(make)
    return Plan().apply(model, layout)


def published(module: nn.Module) -> dict[str, torch.Tensor]:
    view = module.meshpar_layout().weights.publish(Given(module.state_dict()))
    made = {name: torch.empty(shape) for name, shape in view.shapes().items()}
    for name, tensor in made.items():
        view.read(name, (), tensor)
    return made


def test_tensors_that_the_model_lacks_are_all_named_and_nothing_is_read():
    source = Given(published(Transformer(QWEN3)))
    source.read = None  # type: ignore[assignment]
    par = parallel(lambda: Transformer(replace(QWEN3, layers=1, qk_norm=False)))
    with pytest.raises(MeshparError, match="do not fit this model") as raised:
        par.materialize(weights=source)
    lines = str(raised.value).splitlines()
    assert "  unexpected: model.layers.0.self_attn.q_norm.weight (4,)" in lines
    assert "  unexpected: model.layers.2.mlp.down_proj.weight (16, 24)" in lines
    assert len([line for line in lines if "unexpected:" in line]) == 2 + 2 * 11 and "ignore=" in lines[-1]


def test_what_is_ignored_is_named_tensor_by_tensor_or_by_its_module():
    whole = Transformer(QWEN3)
    source = Given(published(whole))
    par = parallel(lambda: Transformer(replace(QWEN3, layers=1, qk_norm=False)))
    par.materialize(weights=source, ignore=["model.layers.*.self_attn.?_norm.weight", "model.layers.[12]"])
    for name, tensor in par.module.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])


def test_a_path_in_the_place_of_weights_is_told_what_reads_it():
    with pytest.raises(
        MeshparError, match=r"weights is a path; expected an object that reads it: .*Safetensors\('s3://bucket/hf'\)"
    ):
        parallel(lambda: nn.Linear(2, 2)).materialize(weights="s3://bucket/hf")


def test_a_pattern_that_fits_nothing_and_one_that_takes_what_is_needed_are_told():
    source = Given(nn.Linear(2, 2).state_dict())
    with pytest.raises(MeshparError, match=r"ignore: 'wieght' matches no tensor of these weights; nearest: weight"):
        parallel(lambda: nn.Linear(2, 2)).materialize(weights=source, ignore=["wieght"])
    with pytest.raises(MeshparError, match=r"missing: bias \(2,\)"):
        parallel(lambda: nn.Linear(2, 2)).materialize(weights=source, ignore=["bias"])


def test_quantised_weights_do_not_load_without_their_scales():
    ours = nn.Linear(2, 2, bias=False)
    low = {"weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    with pytest.raises(MeshparError) as raised:
        parallel(lambda: nn.Linear(2, 2, bias=False)).materialize(
            weights=Given(low | {"weight_scale_inv": torch.ones(1)})
        )
    assert "dtype of weight: expected torch.float32, got torch.float8_e4m3fn" in str(raised.value)
    assert "unexpected: weight_scale_inv (1,)" in str(raised.value) and "cast=True" in str(raised.value)
    for dtype in (torch.int8, torch.uint8, torch.complex64):
        with pytest.raises(MeshparError, match=f"expected torch.float32, got {dtype}"):
            parallel(lambda: nn.Linear(2, 2, bias=False)).materialize(
                weights=Given({"weight": torch.ones(2, 2).to(dtype)})
            )
    par = parallel(lambda: nn.Linear(2, 2, bias=False)).materialize(weights=Given(low), cast=True)
    assert torch.equal(par.module.weight, torch.ones(2, 2))
    for dtype in (torch.float64, torch.bfloat16):
        par = parallel(lambda: nn.Linear(2, 2, bias=False)).materialize(
            weights=Given({"weight": ours.weight.detach().to(dtype)})
        )
        assert torch.equal(par.module.weight, ours.weight.to(dtype).float())


def test_tied_tensors_are_compared_to_the_last_row_in_little_memory(monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []

    class Told(Given):
        def read(self, name, index, out):
            read.append(out.numel())
            super().read(name, index, out)

    monkeypatch.setattr(initialize, "_TILE_BYTES", 5 * 16 * 4)
    tied = replace(QWEN3, tied=True)
    weights = published(Transformer(tied))
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    parallel(lambda: Transformer(tied)).materialize(weights=Told(both))
    assert (read.count(5 * 16), read.count(2 * 16)) == (6, 1), "32 rows, five at a time"
    both["lm_head.weight"][31, 15] += 1
    with pytest.raises(MeshparError, match="differ in these weights"):
        parallel(lambda: Transformer(tied)).materialize(weights=Given(both))


def test_a_tied_tensor_may_come_under_each_of_its_names_but_with_one_value():
    tied = replace(QWEN3, tied=True)
    weights = published(Transformer(tied))
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    par = parallel(lambda: Transformer(tied)).materialize(weights=Given(both))
    assert torch.equal(par.module.head.weight, both["lm_head.weight"])
    both["lm_head.weight"][3, 3] += 1
    with pytest.raises(
        MeshparError, match=r"embed.weight and head.weight are one tensor in this model and differ in these weights"
    ):
        parallel(lambda: Transformer(tied)).materialize(weights=Given(both))
    par = parallel(lambda: Transformer(tied)).materialize(weights=Given(both), ignore=["lm_head"])
    assert torch.equal(par.module.head.weight, weights["model.embed_tokens.weight"])
    par = parallel(lambda: Transformer(replace(QWEN3, tied=False))).materialize(weights=Given(both))
    assert torch.equal(par.module.head.weight, both["lm_head.weight"])
    both["lm_head.weight"] = torch.ones(3, 3)
    with pytest.raises(MeshparError, match=r"shape of head.weight: expected \(32, 16\), got \(3, 3\)"):
        parallel(lambda: Transformer(tied)).materialize(weights=Given(both))


def test_what_is_no_number_is_the_same_where_its_bits_are():
    tied = replace(QWEN3, tied=True)
    weights = published(Transformer(tied))
    weights["model.embed_tokens.weight"][1, 1] = torch.nan
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    parallel(lambda: Transformer(tied)).materialize(weights=Given(both))


@on_ranks(2)
def test_tied_tensors_that_differ_on_one_ranks_part_are_refused_by_all():
    tied = replace(QWEN3, tied=True)
    torch.manual_seed(0)
    weights = published(Transformer(tied))
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    both["lm_head.weight"][31, 15] += 1
    model = on_meta(lambda: Transformer(tied))
    par = Plan("dp_shard=2", [meshpar.FullyShard()]).apply(model)
    with pytest.raises(MeshparError, match=r"embed\.weight and head\.weight are one tensor"):
        par.materialize(weights=Given(both))


def test_what_the_model_computes_itself_may_be_in_the_files():
    llama = TransformerConfig(vocab_size=32, dim=16, layers=1, heads=4, hidden=24)
    old = published(Transformer(llama)) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    parallel(lambda: Transformer(llama)).materialize(weights=Given(old))
    gpt2 = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=4)
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    parallel(lambda: GPT2(gpt2)).materialize(weights=Given(GPT2(gpt2).state_dict() | masks))

    class Positions(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("place", torch.arange(2), persistent=False)

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "place"):
                self.place.copy_(torch.arange(2))

    par = parallel(Positions).materialize(weights=Given(nn.Linear(2, 2).state_dict() | {"place": torch.zeros(2)}))
    assert par.module.place.tolist() == [0, 1]


def test_transformers_models_take_what_transformers_ignores():
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    for config, old in (
        (transformers.LlamaConfig(**sizes), "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (transformers.GPTNeoXConfig(**sizes), "gpt_neox.layers.0.attention.masked_bias"),
        (transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32), "transformer.h.0.attn.masked_bias"),
    ):
        weights = transformers.AutoModelForCausalLM.from_config(config).state_dict()
        make = lambda config=config: transformers.AutoModelForCausalLM.from_config(config)  # noqa: E731
        parallel(make).materialize(weights=Given(weights | {old: torch.ones(2)}))
        with pytest.raises(MeshparError, match=r"unexpected: other\.weight"):
            parallel(make).materialize(weights=Given(weights | {"other.weight": torch.ones(2)}))
        assert layout_for(parallel(make).module).ignored


def test_a_source_of_training_state_gives_its_model():
    model = nn.Linear(2, 2)
    state = model.state_dict() | {
        "optimizer.state.weight.exp_avg": torch.ones(2, 2),
        "optimizer.state.bias.step": torch.ones(()),
    }
    with pytest.raises(MeshparError, match=r"unexpected: optimizer\.state"):
        parallel(lambda: nn.Linear(2, 2)).materialize(weights=Given(state))
    par = parallel(lambda: nn.Linear(2, 2)).materialize(weights=Given(state), ignore=["optimizer"])
    assert torch.equal(par.module.weight, model.weight)


def test_a_seed_has_nothing_to_ignore():
    with pytest.raises(MeshparError, match="ignore= and cast= require weights="):
        parallel(lambda: nn.Linear(2, 2)).materialize(seed=0, ignore=["bias"])
