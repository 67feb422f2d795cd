"""Functions of torch that the simulation needs and torch has not made public: the one place of the forecast that names
them.

Only the simulation's own process calls these, but for :func:`hidden_propagation`.

- ``_setup_privateuseone_for_python_backend``: a device whose streams are written in Python (pytorch/pytorch#155101). It
  goes when torch offers simulated devices, or a public form of this.
- ``FakeTensorMode.avoid_device_init``: otherwise ``torch.tensor(x, device=...)`` would be made on the device that does
  not exist.
- ``ShardingPropagator._propagate_tensor_meta_non_cached``: DTensor runs operators on fake tensors of the global size to
  learn shapes; nothing of that is allocated, so the recorder must not see it.
- ``_chunk_with_empty``: FSDP2 makes a view for every rank's chunk and uses one; with thousands of ranks that takes
  minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from meshpar._torch.autograd import in_backward
from meshpar.core import runtime
from meshpar.core.guards import Guard
from meshpar.guards.agreement import Agreement
from meshpar.guards.losses import Losses
from meshpar.parallelized import Parallelized
from meshpar.passes.applied import applied
from meshpar.passes.experts.routing import Routing
from meshpar.step.meeting import Meeting
from meshpar.step.rank_digests import Largest

__all__ = ["FakeTensor", "Settled", "fake_mode", "hidden_propagation", "register_device", "settle"]


def register_device(name: str, module: object) -> None:
    """Let torch know the simulated device ``name``, driven by ``module``, and the fake process group serve it; once
    a process.
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, backend_module=module)
    with runtime.simulated(1):  # loads the fake backend
        pass
    dist.Backend.backend_capability["fake"].append(name)
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign, assignment]
    _outside_fake_mode(DeviceMesh, "__init__", "__getitem__", "_flatten", "_concatenate")
    _outside_fake_mode(device_mesh, "init_device_mesh")
    _make_chunks_lazy()


def fake_mode() -> FakeTensorMode:
    """Return the mode under which tensors have shapes, dtypes and devices but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def settle(par: Parallelized) -> None:
    """Let the ranks compare what they compare after the first steps, and look at nothing."""
    if par.cycle is None:
        return
    par.cycle.first_runs.split = None
    par.cycle.placed.record()
    on_cpu = par.cycle.guards == "always" and runtime.over_hosts(par.device)
    watching: list[Guard] = []
    for guard in par.cycle.watching:
        if isinstance(guard, Losses):
            watching.append(SentLosses(list(guard.groups.values()) if on_cpu else [], par.device))
        elif isinstance(guard, Agreement):
            par.cycle.agreement = settled = Settled(par, guard, on_cpu=on_cpu)
            watching.append(settled)
        else:
            watching.append(guard)
    par.cycle.watching = tuple(watching)
    applied(par.module).routing = Assumed(applied(par.module).routing.skew)


@final
class Assumed(Routing):
    """As many rows for the busiest rank, which this one is, as its skew says; the others' share the rest equally."""

    __slots__ = ()

    def filled(self, rows: Tensor, count: int) -> Tensor:
        """Return as many rows as one expert would have."""
        return torch.arange(len(rows) // count, device=rows.device)

    def sizes(self, numbers: Tensor, held: int) -> list[int]:
        """Return equal numbers of rows."""
        rows = len(numbers)
        return [rows * (place + 1) // held - rows * place // held for place in range(held)]

    def exchanged(self, counts: Tensor, rows: int, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return what the skew says, and no choice that is no expert."""
        size = counts.shape[1]
        mine_of, others = round(rows * self.skew / size), size - 1
        rest = rows - mine_of
        sent = [rest * (place + 1) // others - rest * place // others for place in range(others)]
        sent.insert(rank, mine_of)
        return sent, [mine_of] * size, []


@final
class Settled(Guard):
    """The comparisons of a step after the first ones, which send what they send and look at nothing.

    Args:
        par: the model.
        real: the comparisons of a job.
        on_cpu: ranks compute on CPUs, where looking does not wait for a device, so that more is looked at.
    """

    def __init__(self, par: Parallelized, real: Agreement, *, on_cpu: bool) -> None:
        self._par, self._real, self._on_cpu = par, real, on_cpu

    def _send(self, numbers: int, groups: Sequence[dist.ProcessGroup]) -> None:
        for group in groups if self._on_cpu else ():
            _exchange(numbers, torch.int64, group, self._par.device)

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Send the digests of a batch, where they are looked at."""
        if torch.is_grad_enabled():
            self._send(2 * self._real.numbers(), self._real.same_groups())

    def whole(self, batch: object) -> None:
        """Send the digest of a batch that is split by positions, where it is looked at."""
        self._send(2, self._real.split_groups())

    def begin(self, *, draws: bool) -> None:
        """Send nothing."""

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Send where a rank is, where it is looked at."""
        if self._on_cpu and self._real.hosts.size() > 1:
            _exchange(2 * (1 + Meeting.NUMBERS), torch.int64, self._real.hosts, self._par.device)
        return [True] * len(numbers)

    def before_unit(self, name: str, unit: nn.Module) -> None:
        """Send the marks of a unit, where they are looked at: of the first one where the others are predicted."""
        if not (self._real.ordered or (name and self._real.predicts)) and not in_backward():
            self.meet(name)

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Send that a backward begins, where it is looked at."""
        if self._on_cpu and self._real.differs and reaches():
            self.meet("a backward")

    def before_micro_batch(self, left: int) -> None:
        """Send how far a rank is, where it is looked at."""
        self.meet("a micro-batch")

    def before_step(self, optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
        """Send the digest of an optimizer's settings, where it is looked at."""
        if trains:
            self.meet("a step")

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Send which parameters have a gradient; simulated ranks all use the same. Beside an accelerator the hosts
        send it meanwhile.
        """
        if self._on_cpu and self._real.differs:
            count = 1 + sum(1 for _ in self._par.module.parameters())
            _exchange(2 * count, torch.int64, self._real.hosts, self._par.device)
        for parameter in unused:
            parameter.grad = None


@final
class SentLosses(Guard):
    """The losses of backwards, which are sent on a CPU and not looked at.

    Args:
        groups: those whose ranks compare losses.
        device: where numbers are exchanged.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._groups, self._device = groups, device

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Send a loss and its negation."""
        for group in self._groups if self._groups and reaches() else ():
            _exchange(2, torch.float64, group, self._device)


def _exchange(count: int, dtype: torch.dtype, group: Any, device: torch.device) -> None:
    """Send numbers as ranks on CPUs do."""
    Largest(torch.empty(count, dtype=dtype, device=device), group).read()


@contextmanager
def hidden_propagation(hide: Callable[[], Any]) -> Iterator[None]:
    """While DTensor works out shapes, be inside ``hide()``."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    inner = getattr(ShardingPropagator, name)

    def hidden(*args: Any, **kwargs: Any) -> Any:
        with hide():
            return inner(*args, **kwargs)

    setattr(ShardingPropagator, name, hidden)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, inner)


def _outside_fake_mode(owner: Any, *names: str) -> None:
    """Let methods that compute rank numbers with real tensors do so."""
    for name in names:
        inner = getattr(owner, name, None)
        if inner is None:
            continue

        def outside(*args: Any, _inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return _inner(*args, **kwargs)

        setattr(owner, name, outside)


@final
class _Chunks(Sequence[Tensor]):
    """The chunks of ``_chunk_with_empty``, each made when it is read."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self.tensor, self.ranks, self.dim = tensor, count, dim

    def __len__(self) -> int:
        return self.ranks

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(self.ranks))]
        if not 0 <= index < self.ranks:
            raise IndexError(index)
        size = self.tensor.size(self.dim)
        chunk = -(-size // self.ranks)
        start = min(chunk * index, size)
        return self.tensor.narrow(self.dim, start, min(chunk, size - start))


def _make_chunks_lazy() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_param

    def lazily(tensor: Tensor, num_chunks: int, dim: int) -> _Chunks:
        return _Chunks(tensor, num_chunks, dim)

    for module in (_fsdp_common, _fsdp_param, _fsdp_collectives):
        if hasattr(module, "_chunk_with_empty"):
            setattr(module, "_chunk_with_empty", lazily)  # noqa: B010
