"""Accesses of one memory by two unordered streams, found by the event handler of torch's CUDA sanitizer."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import _sanitizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import meshpar.forecasting.device as device
from tests.accelerator.waits import _crosses, _non_blocking, _on_device, place

HOST = 1
_EMPTY = re.compile(r"aten::(new_)?empty")
_MAKE_WORK = (
    "allreduce", "allgather", "_allgather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "alltoall", "alltoall_base", "all_to_all_single", "broadcast",
    "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip


class _Arguments(_sanitizer.ArgumentHandler):
    """The parts of memory that one operator reads and writes."""

    def __init__(self, known: dict[int, StorageWeakRef]) -> None:
        super().__init__()
        self._known = known

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if not isinstance(value, Tensor) or value.device.type == "meta" or value.layout != torch.strided:
            return
        storage = value.untyped_storage()
        # as long as there is one, no other memory gets its number
        self._known.setdefault(storage._cdata, StorageWeakRef(storage))
        if is_write:
            self.dataptrs_written.add(storage._cdata)
        elif not metadata_only:
            self.dataptrs_read.add(storage._cdata)
        self.tensor_aliases.setdefault(storage._cdata, []).append(name or "output")


class Races(TorchDispatchMode):
    """Count races by their two operators and their callers; each group and the host are queues of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}
        self.handler = _sanitizer.EventHandler()
        self._known: dict[int, StorageWeakRef] = {}
        self._numbers: dict[Any, int] = {"host": HOST}
        self._kept: list[Any] = []  # whose ids are numbers
        self._results: dict[int, object] = {}  # by storage
        self._works: dict[int, object] = {}
        self._last: object = None
        self._of_hosts: list[object] = []
        self._undo: list[Callable[[], None]] = []

    def number(self, storage: Any) -> int:
        """Return the number of a stream, of an event or of a queue."""
        key = storage if isinstance(storage, str) else id(storage)
        if key not in self._numbers:
            self._kept.append(storage)
            self._numbers[key] = len(self._numbers) + 1
        return self._numbers[key]

    def __enter__(self) -> Self:
        stream, event, number, handler = device.Stream, device.StreamEvent, self.number, self.handler

        def wait_stream(one: Any, other: Any) -> None:
            self._ordered(number(other), number(one))

        def record(recorded: Any, on: Any = None) -> None:
            handler._handle_event_record(number(recorded), number(on or stream.current))

        self._around(stream, "wait_stream", wait_stream)
        self._around(stream, "wait_event", lambda one, other: handler._handle_event_wait(number(other), number(one)))
        self._around(stream, "synchronize", lambda one: handler._handle_stream_synchronization(number(one)))
        self._around(event, "record", record)
        self._around(event, "synchronize", lambda one: handler._handle_event_synchronization(number(one)))
        inner = stream.record_event

        def record_event(one: Any, recorded: Any = None) -> Any:
            recorded = inner(one, recorded)
            record(recorded, one)
            return recorded

        self._replace(stream, "record_event", record_event)
        for kind in (kind for kind in (dist.Work, *dist.Work.__subclasses__()) if "wait" in vars(kind)):
            self._around(kind, "wait", lambda work, *_: self._take(work))
        for name in filter(vars(dist.ProcessGroup).__contains__, _MAKE_WORK):
            self._replace(dist.ProcessGroup, name, self._making_work(getattr(dist.ProcessGroup, name)))
        empty: Any = SimpleNamespace(extract=lambda *_, **__: [])
        self._replace(_sanitizer, "traceback", SimpleNamespace(StackSummary=empty, walk_stack=lambda _: []))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for undo in reversed(self._undo):
            undo()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner)[name]  # not what getattr makes of it
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _around(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        inner = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            return inner(*args, **kwargs)

        self._replace(owner, name, run)

    def _making_work(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._last = None
            work = inner(*args, **kwargs)
            if self._last is not None:
                self._kept.append(work)
                self._works[id(work)], self._last = self._last, None
            return work

        return run

    def _take(self, work: Any) -> None:
        if (event := self._works.get(id(work))) is not None:
            self.handler._handle_event_wait(self.number(event), self._here())
            if event in self._of_hosts:
                self.handler._handle_event_synchronization(self.number(event))

    def _here(self) -> int:
        return self.number(device.Stream.current)

    def _ordered(self, first: int, then: int) -> None:
        event = self.number(object())
        self.handler._handle_event_record(event, first)
        self.handler._handle_event_wait(event, then)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        arguments = _Arguments(self._known)
        empty = _EMPTY.match(func._schema.name) is not None
        sends = space in ("c10d", "_c10d_functional") and name != "wait_tensor"
        if space == "c10d":  # whose schemas do not say what is written: the first argument
            torch.utils._pytree.tree_map_(lambda argument: arguments._handle_argument(argument, True, False), args[0])
            torch.utils._pytree.tree_map_(lambda argument: arguments._handle_argument(argument, False, False), args[1:])
        else:
            arguments.parse_inputs(func._schema, args, kwargs, is_factory=empty)
        outputs = func(*args, **kwargs)
        if space != "c10d":
            arguments.parse_outputs(func._schema, outputs, is_factory=empty)
        given = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs, outputs)) if isinstance(leaf, Tensor)]
        on_device = any(map(_on_device, given))
        if space == "prim":  # asks about a tensor, not for its values
            return outputs
        if name == "wait_tensor":
            if (event := self._results.pop(args[0].untyped_storage()._cdata, None)) is not None:
                self.handler._handle_event_wait(self.number(event), self._here())
            return outputs
        asynchronous = space == "_c10d_functional" or (space == "c10d" and _option(func, args, kwargs, "async_op"))
        here = self._here() if on_device else HOST
        if sends and asynchronous:
            queue = self.number(f"{'device' if on_device else 'hosts'} {_group(args, kwargs)}")
            self._ordered(here, queue)
            here = queue
        if on_device:
            self._ordered(HOST, here)  # the host has done what comes before
        self._launch(here, func, arguments)
        if sends and asynchronous:
            event = object()
            self.handler._handle_event_record(self.number(event), here)
            self._last = event
            if not on_device:
                self._of_hosts.append(event)
            if space == "_c10d_functional":
                for leaf in torch.utils._pytree.tree_leaves(outputs):
                    self._results[leaf.untyped_storage()._cdata] = event
        waits = _crosses(name, args, kwargs) and not _non_blocking(name, args, kwargs)
        if on_device and (waits or name == "_local_scalar_dense"):
            self.handler._handle_stream_synchronization(here)
        return outputs

    def _launch(self, here: int, func: Any, arguments: _Arguments) -> None:
        read, written = arguments.dataptrs_read - arguments.dataptrs_written, arguments.dataptrs_written
        text = f"{func._schema.name} in {place()}"
        for error in self.handler._handle_kernel_launch(
            here, read, written, arguments.outputs, text, arguments.tensor_aliases
        ):
            key = f"{error.current_access.operator} races with {error.previous_access.operator}"
            self.found[key] = self.found.get(key, 0) + 1


def _option(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return what an operator got for the argument ``name``."""
    found = {argument.name: argument.default_value for argument in func._schema.arguments}
    found |= {argument.name: value for argument, value in _sanitizer.zip_arguments(func._schema, args, kwargs)}
    return found.get(name)


def _group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the name of the process group that an operator got, or of the object."""
    given = [*args, *kwargs.values()]
    names = [one for one in given if isinstance(one, str) and one not in ("sum", "avg", "max", "min")]
    objects = [one for one in given if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())]
    return dist.ProcessGroup.unbox(objects[-1]).group_name if objects else names[-1]
