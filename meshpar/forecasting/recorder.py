"""The recorder: a dispatch mode that writes down a training step, simulated or real, and changes nothing in it.

It sees every operator below autograd and DTensor: what is allocated, freed, computed and sent, and on which stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshpar._torch.operator_costs as operators
from meshpar._torch.operator_costs import Fusion
from meshpar._torch.simulated_device import FakeTensor, TorchDispatchMode, find_group, hidden_propagation
from meshpar._torch.tensors import held_part, memory_of, tree_leaves
from meshpar.core.errors import MeshparError
from meshpar.forecasting.trace import Collective, Event, Kind, Phase

_PLAIN = {Tensor, nn.Parameter, nn.Buffer, FakeTensor}


@final
@dataclass(slots=True, kw_only=True)
class Storage:
    """A watched piece of memory: its holder (empty: not known yet), and where in the step it was made and died."""

    size: int
    holder: str
    stream: str
    phase: int
    recomputed: bool
    outside: bool
    after_blocks: bool
    reference: Any
    died: int = -1
    resized: bool = False


def classify(storage: Storage, phases: Sequence[tuple[str, int]]) -> str:
    """Classify an unclaimed storage (activation, gathered weights, temporary) by its lifetime."""
    if storage.resized or storage.stream != "compute":
        return "gathered"
    name, *_ = phases[storage.phase]
    # The head runs behind the blocks in forward, and before them in backward.
    if storage.outside and (name, storage.after_blocks) in (("forward", True), ("backward", False)):
        return "logits and loss"
    if name == "backward" and storage.recomputed:
        return "recomputed"
    ends = phases[storage.phase + 1][1] if storage.phase + 1 < len(phases) else None
    outlives = storage.died < 0 or (ends is not None and storage.died >= ends)
    return "activations" if name == "forward" and outlives else "temporaries"


@final
class StorageLog:
    """The storages that a step allocates, resizes and frees, with sizes rounded up as an allocator does."""

    def __init__(self, events: Sequence[object], phases: Sequence[tuple[str, int]], rounding: int) -> None:
        self._events, self._phases, self._rounding = events, phases, rounding
        self._storages: list[Storage] = []
        self._alive: dict[int, int] = {}
        self._changes: list[tuple[int, int, int]] = []

    def watch(self, storage: torch.UntypedStorage, **facts: Any) -> Storage | None:
        """Return what is noted of a storage, None of one that is known. ``facts``: fields of :class:`Storage`."""
        key = memory_of(storage)
        if key in self._alive:
            self.resize(storage)
            return None
        reference = weakref.ref(storage, lambda _: self._free(key))
        size, self._alive[key] = self._rounded(storage), len(self._storages)
        self._storages.append(Storage(size=size, phase=len(self._phases) - 1, reference=reference, **facts))
        self._change(self._alive[key], size)
        return self._storages[-1]

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Note the bytes that a known storage has now."""
        number = self._alive.get(memory_of(storage), -1)
        if number >= 0 and (change := self._rounded(storage) - self._storages[number].size):
            self._storages[number].resized = True
            self._storages[number].size += change
            self._change(number, change)

    def claim(self, storage: torch.UntypedStorage, holder: str) -> None:
        """Say whose a known storage is."""
        if (number := self._alive.get(memory_of(storage))) is not None:
            self._storages[number].holder = holder

    def changes(self) -> list[tuple[tuple[str, int], ...]]:
        """Return the changes before each event, and those behind the last one, as (holder, bytes)."""
        lines: list[list[tuple[str, int]]] = [[] for _ in range(len(self._events) + 1)]
        holders = [storage.holder or classify(storage, self._phases) for storage in self._storages]
        for event, number, change in self._changes:
            line, holder = lines[event], holders[number]
            if line and line[-1][0] == holder and (line[-1][1] > 0) == (change > 0):
                change += line.pop()[1]
            line.append((holder, change))
        return list(map(tuple, lines))

    def _free(self, key: int) -> None:
        number = self._alive.pop(key)
        self._storages[number].died = len(self._events)
        self._change(number, -self._storages[number].size)

    def _change(self, number: int, change: int) -> None:
        if self._phases and change:
            self._changes.append((len(self._events), number, change))

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._rounding) * self._rounding


@final
class Recorder(TorchDispatchMode):
    """Record what happens inside ``with recorder:``; ``axes`` maps names of process groups to axes of the mesh."""

    def __init__(
        self, axes: Mapping[str, str], *, current_stream: Callable[[], Any] | None = None, rounding: int = 1
    ) -> None:
        super().__init__()
        self.axes, self.current_stream = dict(axes), current_stream
        self.events: list[Event] = []
        self.phases: list[tuple[str, int]] = []
        self.scope, self.recomputing, self.in_blocks = "", False, False
        self._memory = StorageLog(self.events, self.phases, rounding)
        self._pending: dict[int, int] = {}
        self._waited_for: dict[tuple[str, str], int] = {}
        self._hidden = 0
        self._fusion = Fusion()
        self._patches = ExitStack()

    def phase(self, name: str) -> None:
        """Count what follows as the phase ``name``; the gradients of the phase before are known."""
        self._fuse()
        self.phases.append((name, len(self.events)))
        self.scope, self.in_blocks = "", False

    def enter(self, scope: str) -> None:
        """Count what follows as work of the block ``scope``; an empty name: of no block."""
        self._fuse()
        self.scope = scope
        self.in_blocks = self.in_blocks or bool(scope)

    def hold(self, tensors: Iterator[Tensor], holder: str) -> int:
        """Count ``tensors`` as there already, held by ``holder``; returns their bytes, of each storage once."""
        return sum(storage.size for tensor in tensors if (storage := self._watch(tensor, holder)) is not None)

    def name_gradients(self, module: nn.Module) -> None:
        """Say that what the parameters now have as gradients is gradients."""
        for parameter in module.parameters():
            if parameter.grad is not None:
                self._memory.claim(held_part(parameter.grad).untyped_storage(), "gradients")

    def send(self, collective: Collective) -> None:
        """Record a collective that does not go through a process group of the mesh, and for which this rank waits."""
        self._fuse()
        self._append("collective", collective.kind, collective=collective)

    def wait(self, stream: str, target: int) -> None:
        """Record that a simulated stream waits for an event, unless it waited for it or a later one of that stream."""
        if target >= len(self.events):
            return
        key = stream, self.events[target].stream
        if target > self._waited_for.get(key, -1):
            self._waited_for[key] = target
            self.events.append(Event(kind="wait", name="wait", stream=stream, scope=self.scope, target=target))

    def finished(self) -> tuple[Phase, ...]:
        """Return what was recorded."""
        self._fuse()
        changes = self._memory.changes()
        if changes[-1]:
            self.events.append(Event(kind="compute", name="end"))
        events = [replace(event, memory=line) if line else event for event, line in zip(self.events, changes)]
        ends = [start for _, start in self.phases[1:]] + [len(events)]
        return tuple(Phase(name=name, events=tuple(events[start:end])) for (name, start), end in zip(self.phases, ends))

    def __enter__(self) -> Recorder:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._memory.resize(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._patches.callback(setattr, torch.UntypedStorage, "resize_", resize)
        self._patches.enter_context(hidden_propagation(self.hidden))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Record nothing inside of this context."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor: its own operators come back here
        if self._hidden or func.namespace == "profiler":
            return func(*args, **kwargs)
        if func is operators.functional.wait_tensor.default:
            return self._waited(func, args[0])
        # FSDP2's operators are written in Python: those in them are not more work.
        with self.hidden() if func.namespace == "fsdp" else nullcontext():
            result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs or any(output.device.type != "meta" for output in outputs):  # else shapes are looked for
            self._record(func, args, kwargs, outputs)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        if func in operators.COLLECTIVES:
            self._fuse()
            self._collective(func, args, outputs)
            return
        if func.namespace in ("c10d", "_c10d_functional"):
            raise MeshparError(
                f"the forecast does not know the collective {func}; it would be missing from the plan: report it"
            )
        fresh = [output for output in outputs if output.device.type != "meta" and self._watch(output)]
        if operators.is_view(func) and not fresh:
            return
        shape = operators.matrix_shape(func, args, kwargs)
        moved = operators.moved_bytes(func, args, kwargs, outputs)
        if shape or func.namespace == "fsdp" or not self.scope:
            self._fuse()
        elif moved:
            self._fusion.add(args, kwargs, outputs)
        work = {"flops": operators.floating_point(func, shape), "moved": moved, "shape": shape}
        work |= {
            "fused": 0 if self._fusion.open and moved else moved,
            "dtype": operators.computing_dtype(func, outputs),
        }
        self._append("compute", operators.name_of(func), recomputed=self.recomputing, **work)

    def _collective(self, func: Any, args: Any, outputs: list[Tensor]) -> None:
        group = find_group(func, args)
        ranks = dist.get_process_group_ranks(group)
        size, dtype = operators.sent(func, args, outputs)
        for output in outputs:
            self._watch(output)
        kind = operators.COLLECTIVES[func]
        collective = Collective(
            kind=kind,
            axis=self.axes.get(group.group_name, f"world of {len(ranks)}"),
            ranks=len(ranks),
            stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
            size=size,
            dtype=str(dtype).removeprefix("torch."),
            **({"peer": args[2], "tag": args[3]} if kind in ("send", "recv") else {}),
        )
        deferred = func.namespace == "_c10d_functional"
        if deferred:
            self._pending[memory_of(outputs[0])] = len(self.events)
        issued: Kind = "async" if deferred else "collective"
        self._append(issued, operators.name_of(func), recomputed=self.recomputing, collective=collective)

    def _waited(self, func: Any, tensor: Tensor) -> Tensor:
        target = self._pending.pop(memory_of(tensor), None)
        if target is not None:
            self._append("wait", "wait", target=target)
        if isinstance(tensor, FakeTensor):
            return tensor  # the operator would allocate its result anew under fake tensors, which no device does
        return func(tensor)

    def _append(self, kind: Kind, name: str, **values: Any) -> None:
        if self.current_stream is not None and kind != "wait":
            self.current_stream().last = len(self.events)
        self.events.append(Event(kind=kind, name=name, stream=self._stream(), scope=self.scope, **values))

    def _stream(self) -> str:
        return "compute" if self.current_stream is None else self.current_stream().name

    def _fuse(self) -> None:
        if moved := self._fusion.close():
            numbers = reversed(range(len(self.events)))
            last = next(at for at in numbers if self.events[at].moved and not self.events[at].shape)
            self.events[last] = replace(self.events[last], fused=moved)

    def _watch(self, tensor: Tensor, holder: str = "") -> Storage | None:
        """Note the storage of ``tensor``; None: it is known."""
        where = {"stream": self._stream(), "outside": not self.scope, "after_blocks": self.in_blocks}
        return self._memory.watch(tensor.untyped_storage(), holder=holder, recomputed=self.recomputing, **where)
