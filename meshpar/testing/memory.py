"""The memory that tensors of a rank take, compared with the description of its plan."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, final

from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshpar._torch.tensors import memory_of
from meshpar.parallelized import Parallelized
from meshpar.passes.data.instead_of_fsdp2 import ReplicaShards
from meshpar.tensors.placements import local_index, local_tensor

Result = TypeVar("Result")

_BESIDE, _BESIDE_EACH = 256, 16  # bytes that may live beside what is described: at all, and for each parameter
_GOES_S = 2.0  # how long a thread that has ended a collective may still hold its tensors


def storages() -> dict[int, tuple[int, Tensor]]:
    """Return the bytes of each storage of this process, garbage included, and a tensor in it, by its number."""
    by_number: dict[int, tuple[int, Tensor]] = {}
    seen: set[int] = set()
    waiting: list[Any] = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        # Nothing in Python may refer to them, and then the collector does not know them.
        related = (tensor.grad if tensor.is_leaf else None, tensor._base)
        waiting += [other for other in related if other is not None]
        if tensor.is_meta or isinstance(tensor, DTensor):  # its part here is a tensor of its own
            continue
        storage = tensor.untyped_storage()
        try:
            has_memory = storage.nbytes() and storage.data_ptr()
        except RuntimeError:  # a stand-in that tracing left behind (FakeTensor, FunctionalTensor) has no bytes
            continue
        if has_memory:
            by_number.setdefault(memory_of(storage), (storage.nbytes(), tensor))
    return by_number


def measure_memory(run: Callable[[], Result]) -> tuple[Result, int, int]:
    """Run something; return its result, the peak bytes of host memory that its tensors take, and those that are left.

    >>> import torch
    >>> _, peak, left = measure_memory(lambda: torch.ones(1000).sum().item())
    >>> peak >= 4000 > left
    True
    """
    recorded: Any = profile(profile_memory=True)
    with recorded:
        result = run()
    events = (event for event in recorded.kineto_results.events() if event.name() == "[memory]")
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return result, peak, total


@final
class Memory:
    """Compare the tensors that this rank holds with its plan's description, after any verb.

    Every storage counts once, garbage too. Make the object before the module: what is there by then does not count.

    >>> memory = Memory()                                                       # doctest: +SKIP
    >>> par = plan.apply(model)                                                 # doctest: +SKIP
    >>> memory.check(par, "apply")                                              # doctest: +SKIP
    """

    def __init__(self) -> None:
        gc.collect()
        self._before = storages()  # kept, so that no number is given again

    def live(self) -> dict[int, tuple[int, Tensor]]:
        """Return the bytes of each storage that came since, and a tensor in it, by the storage's number."""
        return {number: storage for number, storage in storages().items() if number not in self._before}

    def check(
        self,
        par: Parallelized,
        after: str,
        optimizer: Optimizer | None = None,
        *,
        also: Iterable[Tensor] = (),
        beside: int = 0,
    ) -> None:
        """Assert that this rank holds what ``par.describe()`` says, and nothing else.

        Each kind may be as large as on the fullest rank, to which torch pads. 256 bytes may live beside them, and 16
        for each parameter: an optimizer's counts, and what ranks compare.

        Args:
            par: the parallel module.
            after: the verb, for the message.
            optimizer: whose state counts.
            also: tensors that the caller holds.
            beside: bytes of other tensors that may be there.

        Raises:
            AssertionError: names what is there and should not be, or is not there.
        """
        parameters = list(par.module.parameters())
        kinds = {**_kinds(par, parameters, optimizer), "others": list(also)}
        sizes_by_kind: dict[str, dict[int, int]] = {}
        for kind, tensors in kinds.items():
            there = {tensor.untyped_storage() for tensor in map(local_tensor, tensors) if not tensor.is_meta}
            sizes_by_kind[kind] = {
                memory_of(storage): storage.nbytes()
                for storage in there
                if not any(memory_of(storage) in sizes for sizes in sizes_by_kind.values())
            }
        described = {number for sizes in sizes_by_kind.values() for number in sizes}
        # Before the description, for which gathered weights go.
        undescribed = self._undescribed(described, beside + _BESIDE + _BESIDE_EACH * len(parameters))
        problems = []
        for kind, expected in _described(par, kinds).items():
            size, room = sum(sizes_by_kind[kind].values()), sum(map(_padding, kinds[kind]))
            if kinds[kind] and not expected <= size <= expected + room:
                problems.append(f"{kind}: {size:,} bytes, expected {expected:,} and at most {room:,} of padding")
        if undescribed:
            total, count = sum(nbytes for nbytes, _ in undescribed), len(undescribed)
            listed = ", ".join(f"{shape} {nbytes:,}" for nbytes, shape in undescribed[:8])
            problems.append(f"{count} tensors that the description does not know, {total:,} bytes: {listed}")
        assert not problems, f"after {after}:\n  " + "\n  ".join(problems)

    def _undescribed(self, named: set[int], allowed: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return bytes and shapes of tensors in storages not ``named``, largest first; none up to ``allowed``."""
        until = time.monotonic() + _GOES_S
        while True:
            storages_left = [storage for number, storage in self.live().items() if number not in named]
            undescribed = [(nbytes, tuple(tensor.shape)) for nbytes, tensor in storages_left]
            del storages_left
            if sum(nbytes for nbytes, _ in undescribed) <= allowed:
                return []
            if time.monotonic() > until:
                return sorted(undescribed, reverse=True)
            time.sleep(0.01)


def _kinds(par: Parallelized, parameters: list[nn.Parameter], optimizer: Optimizer | None) -> dict[str, list[Tensor]]:
    """Return what the description knows of."""
    state = [] if optimizer is None else [value for slots in optimizer.state.values() for value in slots.values()]
    shards = par.run.find(ReplicaShards)
    return {
        "parameters": list(parameters),
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer state": [value for value in state if isinstance(value, Tensor) and value.ndim],
        "buffers": list(par.module.buffers()),
        "shards": [] if shards is None else shards.held(),
    }


def _described(par: Parallelized, kinds: Mapping[str, Sequence[Tensor]]) -> dict[str, int]:
    """Return the bytes of each kind that the description says."""
    described = par.describe()
    if all(parameter.is_meta for parameter in kinds["parameters"]):
        return dict.fromkeys(kinds, 0)
    trained = [parameter for parameter in kinds["parameters"] if parameter.requires_grad]
    some = sum(local_tensor(gradient).nbytes for gradient in kinds["gradients"])  # where an error ended the backward
    gradients = described.gradient_bytes if len(kinds["gradients"]) == len(trained) else some
    sizes = (described.parameter_bytes, gradients, described.optimizer_bytes or 0, described.buffer_bytes)
    return dict(zip(kinds, (*sizes, described.shard_bytes)))


def _padding(tensor: Tensor) -> int:
    """Return how many bytes more the fullest rank stores."""
    if not isinstance(tensor, DTensor):
        return 0
    fullest = local_index(tensor.shape, tensor.placements, tensor.device_mesh.shape, [0] * tensor.device_mesh.ndim)
    count = math.prod(part.stop - part.start for part in fullest)
    return (count - local_tensor(tensor).numel()) * tensor.element_size()
