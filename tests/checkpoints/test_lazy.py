"""Views that torch resolves on reading come back equal, and what is no array is refused."""

import pytest
import torch
from torch import nn

from meshpar import FullyShard, ModelLayout, Plan, Replicate
from meshpar.checkpoints import CheckpointManager
from meshpar.core.errors import CheckpointError
from meshpar.testing import on_ranks
from tests.checkpoints.test_commit import Job

LARGE = 600_000  # complex numbers: more than a tile


class Views(nn.Module):
    """Parameters and buffers that are conjugated, negated or transposed views, also larger than a tile."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, 2, generator=made).view(torch.complex64).squeeze(-1)

        self.weight = nn.Parameter(draw(4, 3))
        self.conjugate = nn.Parameter(draw(4, 3).conj())
        self.register_buffer("scalar", draw(1)[0].conj())
        self.register_buffer("negative", draw(5).conj().imag)
        self.register_buffer("rows", torch.view_as_real(draw(4, 3).resolve_conj()).contiguous())
        self.register_buffer("both", draw(6).conj()._neg_view())
        self.register_buffer("crossed", draw(3, 4).conj().t())
        self.register_buffer("large", draw(LARGE).conj())


def values(module):
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}
    return {name: tensor.clone().resolve_conj().resolve_neg() for name, tensor in whole.items()}


@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
@on_ranks(2)
def test_conjugate_and_negative_views_come_back_as_they_were(tmp_path, later):
    module, other = Views(0), Views(1)
    assert module.conjugate.is_conj() and module.negative.is_neg() and module.both.is_neg()
    want = values(module)
    par = Plan("dp_replicate=2", [Replicate()]).apply(module, ModelLayout())
    with CheckpointManager(tmp_path, async_=later) as manager:
        manager.save(1, par)
    for mesh, passes in (("dp_replicate=2", [Replicate()]), ("dp_shard=2", [FullyShard()])):
        again = Plan(mesh, passes).apply(other, ModelLayout())
        CheckpointManager(tmp_path).restore(again, verify="full")
        for name, tensor in values(again.module).items():
            torch.testing.assert_close(tensor, want[name], rtol=0, atol=0, msg=name)
        again.check_replicas()
        other = Views(2)


class Scaled(torch.Tensor):
    """A tensor made of two others, as quantised weights are: bytes and scales."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale)
        plain = [argument.data_ * argument.scale if isinstance(argument, cls) else argument for argument in args]
        return func(*plain, **(kwargs or {}))


class Marked(torch.Tensor):
    """A subclass that only adds methods; its memory is its values."""


def scaled():
    return Scaled(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.5))


ODD = {
    r"weight \(Scaled\)": lambda: nn.ParameterDict({"weight": nn.Parameter(scaled(), requires_grad=False)}),
    r"weight \(layout sparse_coo\)": lambda: with_buffer(torch.eye(3).to_sparse()),
    r"weight \(quantized, quint8\)": lambda: with_buffer(
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    ),
}


def with_buffer(tensor):
    module = nn.Linear(2, 2)
    del module.weight
    module.register_buffer("weight", tensor)
    return module


@pytest.mark.parametrize("message", ODD)
def test_what_is_no_array_is_refused_by_name(tmp_path, message):
    job = Job(ODD[message]())
    with pytest.raises(CheckpointError, match=f"a checkpoint stores dense tensors; got {message}; dequantize"):
        CheckpointManager(tmp_path).save(1, job)
    assert CheckpointManager(tmp_path).steps() == []


def test_optimizer_state_that_is_no_array_is_refused_by_name(tmp_path):
    job = Job(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(job.module.parameters(), lr=0.1)
    optimizer.state[job.module.weight]["exp_avg"] = scaled()
    with pytest.raises(CheckpointError, match=r"got the optimizer's 'exp_avg' of weight \(Scaled\)"):
        CheckpointManager(tmp_path).save(1, job, optimizer)


def test_subclasses_with_memory_of_their_own_are_arrays(tmp_path):
    job = Job(with_buffer(torch.arange(6.0).as_subclass(Marked)))
    CheckpointManager(tmp_path).save(1, job)
    again = Job(with_buffer(torch.zeros(6)))
    CheckpointManager(tmp_path).restore(again, random=False)
    assert torch.equal(again.module.weight, torch.arange(6.0))
