"""Host memory into which an asynchronous save copies what it will write, so that training may go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from meshpar.checkpoints.writing import Part


@final
class Stager:
    """Buffers that are kept from one save to the next: memory is allocated, and pinned, once.

    One save at a time: the parts of a save are overwritten by the next :meth:`stage`.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def stage(self, parts: Sequence[Part], device: torch.device, ready: Any = None) -> list[Part]:
        """Copy parts to the host; on return all is copied.

        Args:
            parts: what to copy.
            device: where they lie.
            ready: an event of ``device``, after which they hold what is to be saved; None on the CPU.
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
        with torch.no_grad():
            for part in parts:
                self._buffers[part.key].copy_(part.tensor, non_blocking=True)

    def _buffer(self, part: Part) -> Tensor:
        kept = self._buffers.get(part.key)
        if kept is not None and kept.shape == part.tensor.shape and kept.dtype == part.tensor.dtype:
            return kept
        return torch.empty(part.tensor.shape, dtype=part.tensor.dtype, pin_memory=part.tensor.is_cuda)


def ready_event(device: torch.device) -> Any:
    """Return an event after all work given to ``device`` so far; None on the CPU, where work is done when it is given."""
    if device.type in ("cpu", "meta"):
        return None
    event = torch.Event(device)
    event.record()
    return event
