"""Host memory to which an asynchronous save copies its parts, so that training can continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from meshpar.checkpoints.format.writing import Part
from meshpar.core import runtime
from meshpar.state.page_locked import Slab, starts

_PIECE_BYTES = 16 << 20
_SAMPLES = 64  # elements of a part, about


@final
class Stager:
    """Memory that is reused from save to save, so that it is allocated and pinned once.

    It has the bytes of a save's parts, each rounded up to 64: one slab for the parts on an accelerator, which is
    pinned, and one for those in host memory. One save at a time: the next :meth:`stage` overwrites the parts of a save.

    Args:
        threads: number of threads that copy from host memory; one core does not reach the memory's bandwidth.
    """

    def __init__(self, threads: int = 2) -> None:
        self._threads = threads
        self._slabs = {pin: Slab(0, pin=pin) for pin in (False, True)}

    def stage(self, parts: Sequence[Part], device: torch.device, ready: torch.Event | None = None) -> list[Part]:
        """Copy parts to the host; on return all parts are copied.

        Args:
            parts: the parts to copy.
            device: the device of the parts.
            ready: an event of ``device``, after which the parts have their final values; None on the CPU.
        """
        runtime.make_current(device)  # of this thread, which pins memory by it
        room = self._room([part.tensor for part in parts])
        with beside(device, ready):
            self._copy(list(zip(room, [part.tensor for part in parts])))
        return [Part(part.name, part.offsets, memory) for part, memory in zip(parts, room)]

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        def copy(pair: tuple[Tensor, Tensor]) -> None:
            with torch.no_grad():
                pair[0].copy_(pair[1], non_blocking=True)

        for pair in pairs:
            if not pair[1].is_cpu:
                copy(pair)  # on the stream that is current on this thread
        with ThreadPoolExecutor(self._threads, thread_name_prefix="meshpar-stage") as pool:
            list(pool.map(copy, (piece for pair in pairs if pair[1].is_cpu for piece in _pieces(*pair))))

    def _room(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return memory for copies of tensors."""
        room: dict[int, Tensor] = {}
        for pin in list(self._slabs):
            mine = [(at, tensor) for at, tensor in enumerate(tensors) if tensor.is_cpu != pin]
            ends = starts(tensor.nbytes for _, tensor in mine)
            if self._slabs[pin].memory.nbytes != ends[-1]:
                self._slabs[pin] = Slab(0, pin=pin)  # the one that is too large or too small goes first
                self._slabs[pin] = Slab(ends[-1], pin=pin)
            for (at, tensor), start in zip(mine, ends):
                room[at] = self._slabs[pin].memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return [room[at] for at in range(len(tensors))]


@final
class Samples:
    """Some bytes of each part, which tell later whether it was written. Nothing waits for a device when they are taken.

    Attributes:
        parts: the samples; one tensor for each device on which there are parts.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        devices = [part.tensor.device for part in parts]
        self._groups = [
            [at for at, other in enumerate(devices) if other == device] for device in dict.fromkeys(devices)
        ]
        self._names = [part.name for part in parts]
        self.parts = self.of(parts)

    def of(self, parts: Sequence[Part]) -> list[Part]:
        """Return samples of the same parts at a later time, or of copies of them."""
        return [Part("", (), torch.cat([_sample(parts[at].tensor) for at in group])) for group in self._groups]

    def changed(self, before: Sequence[Part], after: Sequence[Part], parts: Sequence[Part]) -> list[str]:
        """Return the names of the parts, given as well, whose samples differ; the samples are in host memory."""
        found = []
        for group, one, other in zip(self._groups, before, after, strict=True):
            if not torch.equal(one.tensor, other.tensor):
                sizes = [_sample(parts[at].tensor).numel() for at in group]
                pairs = zip(group, one.tensor.split(sizes), other.tensor.split(sizes))
                found += [self._names[at] for at, was, now in pairs if not torch.equal(was, now)]
        return found


def _sample(tensor: Tensor) -> Tensor:
    """Return bytes of some elements, which a write through ``.data``, without a version, rarely leaves equal."""
    per_axis = max(1, round(_SAMPLES ** (1 / max(1, tensor.ndim))))
    few = tensor.detach()[tuple(slice(None, None, max(1, size // per_axis)) for size in tensor.shape)]
    few = few.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return few.flatten().view(torch.uint8)


@contextmanager
def beside(device: torch.device, ready: torch.Event | None) -> Iterator[None]:
    """Run work on a stream of its own, after an event of ``device``; on return it is done. None: in place, as on the
    CPU.
    """
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
    """Return an event after all work given to ``device`` so far; None on the CPU, where work is done when it is
    given.
    """
    if not runtime.queues(device):
        return None
    event = torch.Event(device)
    event.record()
    return event
