"""A save in the background: its thread, whose errors the next step, save or close raises, and its copies."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshpar.checkpoints.format.writing import TensorPart
from meshpar.core import runtime
from meshpar.core.errors import CheckpointError
from meshpar.process.waiting import loads_wait, reads_of
from meshpar.state.offloading import Slab, starts

_log = logging.getLogger("meshpar.checkpoints")


@final
class Background:
    """One save in flight, on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._staged = threading.Event()
        self._lock, self._after = threading.RLock(), list[Callable[[], object]]()
        self._writes = False
        self._failure: BaseException | None = None
        self._loads = list[Any]()  # hooks of the module that is saved
        self._hook: Any = None  # of every optimizer: one that the save did not receive may train the same parameters

    def start(
        self, stage: Callable[[], None], finish: Callable[[], object], *, trains: bool, module: nn.Module, what: str
    ) -> None:
        """Run ``stage``, for which optimizers' steps (this call: not ``trains``) and moves wait, then ``finish``."""
        self.wait()
        read = reads_of(module).begin(what, beside=True)
        self._loads = loads_wait(module)
        self._staged.clear()
        self._after, self._writes = [], True
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.before_step())
            atexit.register(self._log_at_exit)

        def work() -> None:
            try:
                stage()
                read()
                self._staged.set()
                finish()
                with self._lock:
                    while self._after:
                        self._after.pop(0)()
                    self._writes = False
            # raised again on the main thread by before_step, wait or close
            except BaseException as error:  # noqa: BLE001
                self._failure = error
            finally:
                read()
                self._staged.set()
                self._writes = False

        self._thread = threading.Thread(target=work, name="meshpar-save")
        self._thread.start()
        if not trains:
            self._staged.wait()

    def before_step(self) -> None:
        """Wait until the save in flight has copied its tensors; raise the error of a save that has failed."""
        if self._thread is None:
            return
        self._staged.wait()
        if not self._thread.is_alive() or self._failure is not None:
            self.wait()

    def then(self, act: Callable[[], object]) -> None:
        """Run ``act`` once the save in flight is committed, on its thread; now without one, never after a failed."""
        with self._lock:
            if self._writes:
                self._after.append(act)
            elif self._failure is None:
                act()

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            while self._loads:
                self._loads.pop().remove()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"a save in the background failed: {failure}") from failure

    def close(self) -> None:
        """Wait for the save in flight, and remove the hook."""
        try:
            self.wait()
        finally:
            if self._hook is not None:
                self._hook.remove()
                atexit.unregister(self._log_at_exit)
            self._hook = None

    def _log_at_exit(self) -> None:
        """Log the error that nothing raised: a save whose program has ended fails without threads."""
        if self._failure is not None:
            text = "the last save in the background is lost: %s; call close() of the CheckpointManager at the end"
            _log.error(text, self._failure)


_PIECE_BYTES = 16 << 20
_SAMPLES = 64  # elements of a part, about


@final
class Stager:
    """Host memory for the parts of one save, reused by the next one: pinned for those of a device."""

    def __init__(self, threads: int = 2) -> None:
        self._threads = threads
        self._slabs = {pin: Slab(0, pin=pin) for pin in (False, True)}

    def stage(
        self, parts: Sequence[TensorPart], device: torch.device, ready: torch.Event | None = None
    ) -> list[TensorPart]:
        """Copy parts of a ``device`` to the host, after its event ``ready``; None on the CPU."""
        runtime.make_current(device)  # of this thread, which pins memory by it
        pairs = list(zip(self._room([part.tensor for part in parts]), [part.tensor for part in parts]))

        def copy(pair: tuple[Tensor, Tensor]) -> None:
            with torch.no_grad():
                pair[0].copy_(pair[1], non_blocking=True)

        with own_stream(device, ready):
            for pair in pairs:
                if not pair[1].is_cpu:
                    copy(pair)  # on the stream that is current on this thread
            with ThreadPoolExecutor(self._threads, thread_name_prefix="meshpar-stage") as pool:
                list(pool.map(copy, (piece for pair in pairs if pair[1].is_cpu for piece in _pieces(*pair))))
        return [TensorPart(part.name, part.offsets, memory) for part, (memory, _) in zip(parts, pairs)]

    def _room(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        room: dict[int, Tensor] = {}
        for pin in list(self._slabs):
            on_slab = [(at, tensor) for at, tensor in enumerate(tensors) if tensor.is_cpu != pin]
            ends = starts(tensor.nbytes for _, tensor in on_slab)
            if self._slabs[pin].memory.nbytes != ends[-1]:
                self._slabs[pin] = Slab(0, pin=pin)  # the one that is too large or too small goes first
                self._slabs[pin] = Slab(ends[-1], pin=pin)
            for (at, tensor), start in zip(on_slab, ends):
                room[at] = self._slabs[pin].memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return [room[at] for at in range(len(tensors))]


@final
class PartSamples:
    """Some bytes of each part, a tensor a device, and its count of changes, to know later whether it was written."""

    def __init__(self, parts: Sequence[TensorPart], wholes: Sequence[Tensor] = ()) -> None:
        by_device: dict[torch.device, list[int]] = {}
        for at, part in enumerate(parts):
            by_device.setdefault(part.tensor.device, []).append(at)
        self._groups = list(by_device.values())
        self._names = [part.name for part in parts]
        tensors = [*((part.name, part.tensor) for part in parts), *zip(self._names, wholes)]
        self._versions = [(name, tensor, _version(tensor)) for name, tensor in tensors]
        self.parts = self.of(parts)

    def of(self, parts: Sequence[TensorPart]) -> list[TensorPart]:
        """Return samples of the same parts at a later time, or of copies of them."""
        return [TensorPart("", (), torch.cat([_sample(parts[at].tensor) for at in group])) for group in self._groups]

    def written(
        self, before: Sequence[TensorPart], after: Sequence[TensorPart], parts: Sequence[TensorPart]
    ) -> list[str]:
        """Return the names of the parts, given as well, whose samples or versions differ; samples are on the host."""
        names = []
        for group, earlier, later in zip(self._groups, before, after, strict=True):
            if not torch.equal(earlier.tensor, later.tensor):
                sizes = [_sample(parts[at].tensor).numel() for at in group]
                pairs = zip(group, earlier.tensor.split(sizes), later.tensor.split(sizes))
                names += [self._names[at] for at, was, now in pairs if not torch.equal(was, now)]
        names += [name for name, tensor, version in self._versions if _version(tensor) != version]
        return list(dict.fromkeys(names))


def _version(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor."""
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor:
    """Return bytes of some elements, which a write through ``.data``, without a version, rarely leaves equal."""
    per_axis = max(1, round(_SAMPLES ** (1 / max(1, tensor.ndim))))
    few = tensor.detach()[tuple(slice(None, None, max(1, size // per_axis)) for size in tensor.shape)]
    few = few.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return few.flatten().view(torch.uint8)


@contextmanager
def own_stream(device: torch.device, ready: torch.Event | None) -> Iterator[None]:
    """Run work on a stream of its own after an event of ``device``, and finish it; None: in place, as on the CPU."""
    if ready is None:
        yield
        return
    stream = torch.Stream(device)
    stream.wait_event(ready)
    with stream:
        yield
    stream.synchronize()


def _pieces(out: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split a large tensor, so that the threads have equal work."""
    rows = max(1, _PIECE_BYTES // max(1, tensor[:1].nbytes)) if tensor.ndim else 1
    if tensor.nbytes <= _PIECE_BYTES or len(tensor) <= rows:
        yield out, tensor
    else:
        yield from zip(out.split(rows), tensor.split(rows))


def ready_event(device: torch.device) -> torch.Event | None:
    """Return an event after all work given to ``device`` so far; None on the CPU, which does work at once."""
    if not runtime.queues(device):
        return None
    event = torch.Event(device)
    event.record()
    return event
