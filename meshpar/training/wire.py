"""Nested values on their way from one replica to another: every rank sends its parts of the tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar.placements import local_tensor
from meshpar.training.quorum import Peers


@final
class Part:
    """A part of a DTensor on its way."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return the DTensor of a part as ``parameter`` is split, in the memory in which the part is."""
    if not isinstance(parameter, DTensor):
        return part
    if part.device.type != parameter.device_mesh.device_type:  # from_local would move it
        held = torch.empty_like(parameter, dtype=part.dtype, device=part.device, requires_grad=False)
        local_tensor(held).copy_(part)
        return held
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class _Packed(pickle.Pickler):
    """Pickles nested values without their tensors, of which it keeps this rank's parts."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: object) -> tuple[bool, torch.Size, torch.dtype, str] | None:
        if not isinstance(value, Tensor):
            return None
        part = local_tensor(value).detach()
        self.tensors.append(part)
        return isinstance(value, DTensor), part.shape, part.dtype, part.device.type


class _Unpacked(pickle.Unpickler):
    """Unpickles what :class:`_Packed` has pickled; the tensors come one after another."""

    def __init__(self, file: io.BytesIO, receive: Callable[[Tensor], object], *, on_host: bool) -> None:
        super().__init__(file)
        self._receive, self._on_host = receive, on_host

    def persistent_load(self, told: tuple[bool, torch.Size, torch.dtype, str]) -> object:
        split, shape, dtype, device = told
        value = torch.empty(shape, dtype=dtype)
        self._receive(value)
        value = value if self._on_host or device == "cpu" else value.to(device)
        return Part(value) if split else value


def send(group: Peers, to: int, held: dict[Any, Any]) -> None:
    """Send nested values: first what they are, then tensor after tensor."""
    packed = _Packed(file := io.BytesIO())
    packed.dump(held)
    header = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    for each in (torch.tensor([header.numel()]), header, *packed.tensors):
        if each.numel():
            group.send([each.contiguous().cpu()], to, 0).wait()


def received(group: Peers, source: int, *, on_host: bool = False) -> dict[Any, Any]:
    """Return what :func:`send` sends; parts of DTensors as :class:`Part`.

    Args:
        group, source: who sends.
        on_host: leave all tensors in host memory, instead of the memory in which the sender has them.
    """

    def receive(into: Tensor) -> None:
        if into.numel():
            group.recv([into], source, 0).wait()

    receive(size := torch.zeros(1, dtype=torch.int64))
    receive(header := torch.empty(int(size), dtype=torch.uint8))
    return cast("dict[Any, Any]", _Unpacked(io.BytesIO(bytes(header.tolist())), receive, on_host=on_host).load())
