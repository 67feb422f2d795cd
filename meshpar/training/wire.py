"""Nested values on their way from one replica to another: every rank sends its parts of the tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshpar.core import runtime
from meshpar.step.placements import local_tensor
from meshpar.training.quorum import Peers


@final
class Part:
    """A part of a DTensor on its way, with the shape, the stride and the placements of the whole."""

    def __init__(
        self, tensor: Tensor, shape: torch.Size, stride: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> None:
        self.tensor, self._shape, self._stride, self._placements = tensor, shape, stride, placements

    def on(self, mesh: DeviceMesh) -> Tensor:
        """Return the DTensor on the receiver's mesh, in the memory in which the part is."""
        if self.tensor.device.type == mesh.device_type:
            return self._of(self.tensor, mesh)
        # from_local would move it
        held = torch.empty_like(self._of(self.tensor.to(mesh.device_type), mesh), device=self.tensor.device)
        local_tensor(held).copy_(self.tensor)
        return held

    def _of(self, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(
            tensor, mesh, self._placements, run_check=False, shape=self._shape, stride=self._stride
        )


class _Packed(pickle.Pickler):
    """Pickles nested values without their tensors, of which it keeps this rank's parts."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if not isinstance(value, Tensor):
            return None
        part = local_tensor(value).detach()
        self.tensors.append(part)
        whole = (value.shape, value.stride(), value.placements) if isinstance(value, DTensor) else None
        return whole, part.shape, part.dtype, part.device.type


class _Unpacked(pickle.Unpickler):
    """Unpickles what :class:`_Packed` has pickled; the tensors come one after another."""

    def __init__(self, file: io.BytesIO, receive: Callable[[Tensor], object]) -> None:
        super().__init__(file)
        self._receive = receive

    def persistent_load(self, reference: tuple[Any, torch.Size, torch.dtype, str]) -> object:
        whole, shape, dtype, device = reference
        value = torch.empty(shape, dtype=dtype)
        self._receive(value)
        value = value if runtime.on_host(device) else value.to(device)
        return value if whole is None else Part(value, *whole)


def send(group: Peers, to: int, held: dict[Any, Any]) -> None:
    """Send nested values: first what they are, then tensor after tensor."""
    packed = _Packed(file := io.BytesIO())
    packed.dump(held)
    header = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    for tensor in (torch.tensor([header.numel()]), header, *packed.tensors):
        if tensor.numel():
            group.send([tensor.contiguous().cpu()], to, 0).wait()


def received(group: Peers, source: int) -> dict[Any, Any]:
    """Return what :func:`send` sends; parts of DTensors as :class:`Part`."""

    def receive(into: Tensor) -> None:
        if into.numel():
            group.recv([into], source, 0).wait()

    receive(size := torch.zeros(1, dtype=torch.int64))
    receive(header := torch.empty(int(size), dtype=torch.uint8))
    return cast("dict[Any, Any]", _Unpacked(io.BytesIO(bytes(header.tolist())), receive).load())
