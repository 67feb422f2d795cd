"""Float8 through torchao: refused where it cannot run, and by emulation the same on a mesh as in one process."""

import importlib.util
import re

import pytest
import torch

import meshpar
from meshpar import Float8, FullyShard, Plan, PlanError, Replicate, TensorParallel
from meshpar.step.inner_calls import installed
from meshpar.tensors.placements import local_tensor
from meshpar.testing import on_ranks
from tests.support.comparison import gradients
from tests.support.models_for_parity import VOCAB, transformer

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (the extra float8)"
)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformer(dim=64, hidden=64, heads=4, kv_heads=4)


def batch() -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))


def losses_of(module: torch.nn.Module, ids: torch.Tensor, scale: float) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(
        module(input_ids=ids).logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum"
    )
    (loss * scale).backward()
    return loss.detach()


def alone(recipe: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Float8 without a mesh: the pass itself, on the module."""
    module = model()
    layout = module.meshpar_layout()
    Float8(recipe=recipe, emulate=True).apply(module, layout, None)  # type: ignore[arg-type]
    return losses_of(module, batch(), 1 / 4), gradients(module)


def test_it_is_refused_where_it_runs_with_what_hardware_or_torchao_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(device_type: str, emulate: bool = False) -> str:
        (problem,) = Plan("", [Float8(emulate=emulate)]).machine_problems(device_type)
        return problem

    assert re.search(r"compute capability 8\.9 .* there is none here; .* emulate=True", lacking("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert "A100 has 8.0" in lacking("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'meshpar[float8]'" in lacking("cuda")
    assert "pip install 'meshpar[float8]'" in lacking("cpu", emulate=True)


@on_ranks(1)
def test_a_machine_without_it_refuses_to_apply_but_not_to_check() -> None:
    module = model()
    plan = Plan("", [Float8()])
    plan.check(module, world_size=1)
    with pytest.raises(PlanError, match="needs an NVIDIA GPU"):
        plan.apply(module)
    assert all(installed(child) is None for child in module.modules())


@needs_torchao
@on_ranks(2)
def test_a_layer_whose_part_float8_cannot_hold_stays_as_it_is() -> None:
    torch.manual_seed(0)
    module = transformer(dim=64, hidden=48, heads=4, kv_heads=4)  # 24 of the hidden features a rank
    Plan("tp=2", [TensorParallel(), Float8(emulate=True)]).apply(module)
    held = {
        name.split(".")[2] for name, child in module.named_modules() if (known := installed(child)) and known.product
    }
    assert held == {"attn"}, "and not mlp"


@needs_torchao
def test_tokens_that_16_does_not_divide_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8 import float8_ops

    padded: list[tuple[int, ...]] = []
    pad = float8_ops.pad_tensor_for_matmul
    monkeypatch.setattr(
        float8_ops,
        "pad_tensor_for_matmul",
        lambda tensor, dims: padded.append(tuple(tensor.shape)) or pad(tensor, dims),
    )
    module = model()
    Float8(emulate=True).apply(module, module.meshpar_layout(), None)  # type: ignore[arg-type]
    losses_of(module, batch(), 1 / 4)
    assert not padded
    losses_of(module, batch()[:3, :15], 1 / 4)
    assert any(45 in shape for shape in padded)


@needs_torchao
def test_it_computes_in_eight_bits_and_near_to_full_precision() -> None:
    module = model()
    exact = losses_of(module, batch(), 1 / 4)
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        loss, _ = alone(recipe)
        assert 0 < abs(float(loss - exact)) < 0.01 * float(exact), recipe


@needs_torchao
@on_ranks(2)
def test_on_shards_of_data_it_is_what_one_process_computes() -> None:
    loss, expected = alone("rowwise_with_gw_hp")
    par = Plan("dp_shard=2", [Float8(recipe="rowwise_with_gw_hp", emulate=True), FullyShard()]).apply(model())
    mine = losses_of(par.module, batch().chunk(2)[par.data_rank], 2 / 4)
    assert torch.allclose(par.data_sum(mine), loss, rtol=1e-6)
    for name, gradient in gradients(par.module).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max())), name


@needs_torchao
@on_ranks(4)
def test_shards_of_data_change_nothing_under_tensor_parallelism() -> None:
    found = []
    for mesh, data in (("dp_replicate=2,tp=2", Replicate()), ("dp_shard=2,tp=2", FullyShard())):
        par = Plan(mesh, [TensorParallel(), Float8(recipe="rowwise_with_gw_hp", emulate=True), data]).apply(model())
        mine = losses_of(par.module, batch().chunk(2)[par.data_rank], 2 / 4)
        found.append((par.data_sum(mine), gradients(par.module)))
    (loss, expected), (again, got) = found
    plain = model()
    losses_of(plain, batch(), 1 / 4)
    exact = gradients(plain)
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=0.0)
    for name, gradient in got.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max())), name
        assert (gradient - exact[name]).norm() < 0.1 * exact[name].norm(), name


@needs_torchao
@on_ranks(2)
def test_under_tensor_parallelism_it_differs_by_its_own_rounding() -> None:
    torch.manual_seed(0)
    plain = model()
    losses_of(plain, batch(), 1 / 4)
    exact, (loss, _) = gradients(plain), alone("rowwise")
    par = Plan("tp=2", [TensorParallel(), Float8(recipe="rowwise", emulate=True)]).apply(model())
    split = losses_of(par.module, batch(), 1 / 4)
    assert abs(float(split - loss)) < 2e-3 * float(loss)
    for name, gradient in gradients(par.module).items():
        assert (gradient - exact[name]).norm() < 0.1 * exact[name].norm(), name
    assert all(local_tensor(parameter).dtype == torch.float32 for parameter in par.module.parameters())
    assert [name for name, _ in par.module.named_parameters()] == [name for name, _ in model().named_parameters()]
    assert meshpar.Float8 is Float8
