"""Host memory to which an asynchronous save copies its parts, so that training can continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

import torch
from torch import Tensor

from meshpar.checkpoints.writing import Part

_PIECE_BYTES = 16 << 20


@final
class Stager:
    """Buffers that are reused from save to save, so that memory is allocated and pinned once.

    One save at a time: the next :meth:`stage` overwrites the parts of a save.

    Args:
        threads: number of threads that copy from host memory; one core does not reach the memory's bandwidth.
    """

    def __init__(self, threads: int = 2) -> None:
        self._threads = threads
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def stage(self, parts: Sequence[Part], device: torch.device, ready: torch.Event | None = None) -> list[Part]:
        """Copy parts to the host; on return all parts are copied.

        Args:
            parts: the parts to copy.
            device: the device of the parts.
            ready: an event of ``device``, after which the parts have their final values; None on the CPU.
        """
        buffers = {part.key: self._buffer(part) for part in parts}
        self._buffers = buffers  # those of tensors that are gone are let go
        if ready is None:
            self._copy(parts)
        else:
            stream = torch.Stream(device)
            stream.wait_event(ready)
            with stream:
                self._copy(parts)
            stream.synchronize()
        return [Part(part.name, part.offsets, buffers[part.key]) for part in parts]

    def _copy(self, parts: Sequence[Part]) -> None:
        def copy(pair: tuple[Tensor, Tensor]) -> None:
            with torch.no_grad():
                pair[0].copy_(pair[1], non_blocking=True)

        pairs = [(self._buffers[part.key], part.tensor) for part in parts]
        for pair in pairs:
            if not pair[1].is_cpu:
                copy(pair)  # on the stream that is current on this thread
        with ThreadPoolExecutor(self._threads, thread_name_prefix="meshpar-stage") as pool:
            list(pool.map(copy, (piece for pair in pairs if pair[1].is_cpu for piece in _pieces(*pair))))

    def _buffer(self, part: Part) -> Tensor:
        kept = self._buffers.get(part.key)
        if kept is not None and kept.shape == part.tensor.shape and kept.dtype == part.tensor.dtype:
            return kept
        return torch.empty(part.tensor.shape, dtype=part.tensor.dtype, pin_memory=part.tensor.is_cuda)


def _pieces(out: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split a large tensor, so that the threads have equal work."""
    rows = max(1, _PIECE_BYTES // max(1, tensor[:1].nbytes)) if tensor.ndim else 1
    if tensor.nbytes <= _PIECE_BYTES or len(tensor) <= rows:
        yield out, tensor
    else:
        yield from zip(out.split(rows), tensor.split(rows))


def ready_event(device: torch.device) -> torch.Event | None:
    """Return an event after all work given to ``device`` so far; None on the CPU, where work is done when it is given."""
    if device.type in ("cpu", "meta"):
        return None
    event = torch.Event(device)
    event.record()
    return event
