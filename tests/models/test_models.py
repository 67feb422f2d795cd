"""The reference models against transformers' own, on equal weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshpar.core import patterns
from meshpar.models import GPT2, PRESETS, GPT2Config, RopeScaling, Transformer, TransformerConfig

transformers = pytest.importorskip("transformers")

SMALL = TransformerConfig(vocab_size=96, dim=32, layers=2, heads=4, hidden=48, max_positions=64)
SMALL_GPT2 = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4)
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied": True},
    "gqa": {"kv_heads": 2},
    "one_kv_head": {"kv_heads": 1},
    "wide_heads": {"head_dim": 16, "kv_heads": 2},
    "qk_norm": {"qk_norm": True},
    "qk_norm_tied_gqa": {"qk_norm": True, "tied": True, "kv_heads": 2},
    "rope_scaling": {"rope_scaling": RopeScaling(factor=8.0, original_positions=16), "rope_theta": 500.0},
}


def small(name: str) -> Transformer:
    fields = {field: getattr(SMALL, field) for field in TransformerConfig.__dataclass_fields__}
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**(fields | VARIANTS[name])))


def ids_and_labels(vocab_size: int, length: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def make_norms_uneven(model: nn.Module) -> None:
    """Move norms off one and biases off zero, so that a swapped or skipped one shows."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def transformers_model(model: Transformer | GPT2) -> nn.Module:
    """Build transformers' model from the layout's config.json with ``model``'s weights."""
    layout = model.meshpar_layout()
    config = dict(layout.config)
    hf_config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    state = {layout.weights.theirs(name)[0]: tensor for name, tensor in model.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    return theirs.eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_transformer_equals_transformers_llama_or_qwen3(name: str) -> None:
    ours = small(name)
    make_norms_uneven(ours)
    theirs = transformers_model(ours)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if ours.config.qk_norm else "LlamaForCausalLM")
    ids, labels = ids_and_labels(96)
    loss, logits = ours(input_ids=ids, labels=labels)
    expected = theirs(input_ids=ids, labels=labels)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.loss.backward()
    weights = ours.meshpar_layout().weights
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[weights.theirs(name)[0]], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_and_gpt2_lm_head_model_exchange_state_dicts_and_agree(tied: bool) -> None:
    torch.manual_seed(0)
    ours = GPT2(GPT2Config(**({f: getattr(SMALL_GPT2, f) for f in GPT2Config.__dataclass_fields__} | {"tied": tied})))
    make_norms_uneven(ours)
    theirs = transformers_model(ours)
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    ids, labels = ids_and_labels(97)
    loss, logits = ours(ids, labels)
    expected = theirs(input_ids=ids, labels=labels)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
    back = GPT2(ours.config)
    back.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(back(ids).logits, logits, rtol=0, atol=0)


def test_gpt2_has_the_124m_models_parameters_and_names() -> None:
    with torch.device("meta"):
        ours, untied = GPT2(GPT2Config()), GPT2(GPT2Config(tied=False))
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    assert sum(parameter.numel() for parameter in ours.parameters()) == 124_439_808
    assert sum(parameter.numel() for parameter in untied.parameters()) == 124_439_808 + 50_257 * 768
    assert {n: t.shape for n, t in ours.state_dict().items()} == {n: t.shape for n, t in theirs.state_dict().items()}


def test_presets_have_the_published_parameter_counts() -> None:
    published = {
        "tiny": 0.00098, "124m": 0.1236, "llama-1b": 1.2358, "llama-8b": 8.0303, "llama-70b": 70.5537,
        "llama-405b": 405.8534, "qwen3-30b-a3b": 30.5321,
    }  # fmt: skip
    for preset, billions in published.items():
        with torch.device("meta"):
            model = Transformer(TransformerConfig.preset(preset))
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count / 1e9 == pytest.approx(billions, abs=6e-5), preset


def test_presets_take_changes_and_refuse_unknown_names() -> None:
    assert set(PRESETS) == {"tiny", "124m", "llama-1b", "llama-8b", "llama-70b", "llama-405b", "qwen3-30b-a3b"}
    assert TransformerConfig.preset("tiny", dropout=0.1).dropout == 0.1
    with pytest.raises(ValueError, match="no Transformer shape is called 'llama-9b'; there are tiny, 124m"):
        TransformerConfig.preset("llama-9b")


def test_transformer_config_names_what_does_not_fit() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"layers": 0}, "layers is 0, expected at least 1"),
        ({"head_dim": 7}, "a head has 7 channels"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ]
    for fields, message in wrong:
        with pytest.raises(ValueError, match=message):
            TransformerConfig(**fields)


MODELS: list[Any] = [small("qk_norm_tied_gqa"), small("gqa"), GPT2(SMALL_GPT2)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_every_tensor_is_initialised_by_its_own_module(model: nn.Module) -> None:
    """Drawn module by module, in any order, with a generator per module, from nothing: what materialize does."""

    def drawn(order: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            fresh = type(model)(model.config)
        fresh.to_empty(device="cpu")
        for tensor in (*fresh.parameters(), *fresh.buffers()):
            tensor.data.fill_(float("nan"))
        for name, module in list(fresh.named_modules())[::order]:
            if next(module.parameters(recurse=False), None) is not None:
                torch.manual_seed(sum(name.encode()))
                module.reset_parameters()
        return fresh.state_dict()

    forwards, backwards = drawn(1), drawn(-1)
    assert all(tensor.isfinite().all() for tensor in forwards.values())
    assert all(torch.equal(forwards[name], backwards[name]) for name in forwards)
    residual = next(
        tensor for name, tensor in forwards.items() if name.endswith(("0.attn.o.weight", "0.attn.c_proj.weight"))
    )
    assert residual.std().item() == pytest.approx(0.02 / 2, rel=0.15)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_every_pattern_of_a_layout_matches(model: Any) -> None:
    layout = model.meshpar_layout()
    for pattern in (*layout.blocks, *layout.tensor.styles, *layout.tensor.heads):
        assert list(patterns.find_modules(model, pattern)), pattern
    covered = {name for pattern in layout.tensor.styles for name, _ in patterns.find_modules(model, pattern)}
    missing = [
        name
        for name, module in model.named_modules()
        if name not in covered and next(module.parameters(recurse=False), None) is not None
    ]
    assert not missing
    names = dict(model.named_parameters(remove_duplicate=False))
    assert all(names[name] is names[group[0]] for group in layout.tied for name in group)


def test_dropout_acts_in_training_alone_and_is_declared() -> None:
    torch.manual_seed(0)
    for model in (
        Transformer(TransformerConfig.preset("tiny", dropout=0.5)),
        GPT2(GPT2Config(n_embd=64, n_layer=2, n_head=2, dropout=0.5)),
    ):
        ids, _ = ids_and_labels(96)
        assert model.meshpar_layout().dropout
        assert not torch.equal(model(ids).logits, model(ids).logits)
        model.eval()
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    for model in (small("llama"), GPT2(SMALL_GPT2)):
        with pytest.raises(ValueError, match="the sequence has 65 positions; expected at most"):
            model(torch.zeros(1, 65, dtype=torch.int64))


def test_position_ids_shift_what_the_positions_see() -> None:
    model = small("llama")
    ids, _ = ids_and_labels(96)
    shifted = torch.arange(24)[None] + 5
    # Rotary positions are relative: a shift of all of them changes nothing, stretching them does.
    torch.testing.assert_close(model(ids, position_ids=shifted).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(ids, position_ids=2 * shifted).logits, model(ids).logits, atol=1e-5)


def test_outputs_are_found_by_pytree() -> None:
    ids, labels = ids_and_labels(96)
    leaves = torch.utils._pytree.tree_leaves(small("llama")(ids, labels))
    assert [leaf.shape for leaf in leaves] == [(), (2, 24, 96)]


def test_bfloat16_keeps_positions_exact() -> None:
    """Angles are computed in float32 whatever the model's dtype: bfloat16 cannot tell position 257 from 256."""
    layer, x = small("llama").bfloat16().layers[0], torch.randn(1, 2, 32, dtype=torch.bfloat16)
    first, second = (layer(x, torch.tensor([[0, position]]), None) for position in (256, 257))
    assert not torch.equal(first[:, 1], second[:, 1])
