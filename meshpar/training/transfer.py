"""Copy batches to the device."""

from __future__ import annotations

from typing import final

import torch

from meshpar.training.data import TensorBatch


@final
class Transfer:
    """Copy batches to a device.

    A GPU copies on a separate stream. The host runs ahead of the device, so the copy of a step's batch overlaps with the step before (from
    page-locked memory; from other memory the host waits for the copy).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: TensorBatch) -> TensorBatch:
        """Return the batch on the device, for the device's current stream."""
        if self._stream is None:
            return {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
        current.wait_stream(self._stream)
        for tensor in moved.values():
            tensor.record_stream(current)  # or its memory could be given away while the step reads it
        return moved
