"""Exchanges of replicas: they add up gradients, and copy and compare the state."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.parallelized import Parallelized
from meshpar.process.waiting import reads_of
from meshpar.state.initialize import state as tensors_of
from meshpar.tensors.digests import digest_of_several, leaves
from meshpar.tensors.placements import buckets, local_tensor, summed_in
from meshpar.training.data import Batches
from meshpar.training.lighthouse import Peers
from meshpar.training.quorum import Quorum


@final
class Summed:
    """The weighted sum of all members' gradients; this replica's gradients stay as they are until :meth:`commit`."""

    def __init__(self, group: Peers, module: nn.Module, slot: int, slots: int, numbers: Tensor) -> None:
        """Add up over ``group`` gradients and ``numbers`` (tokens first); RuntimeError if a member failed."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        has_grad = torch.tensor([float(parameter.grad is not None) for parameter in trained], dtype=torch.float64)
        slotted = torch.zeros(slots, dtype=torch.float64)
        slotted[slot] = 1.0
        vector = torch.cat([slotted, numbers, has_grad])
        group.allreduce([vector]).wait()
        counted, self.totals, graded = vector.split([slots, len(numbers), len(trained)])
        self.counted = [bool(count) for count in counted]
        weight = float(numbers[0] / self.totals[0]) if self.totals[0] else 0.0
        self._flats: list[tuple[list[Tensor], Tensor]] = []
        works = []
        for bucket in buckets(parameter for parameter, count in zip(trained, graded, strict=True) if count):
            parts = (_gradient(parameter).reshape(-1).to("cpu", summed_in(parameter.dtype)) for parameter in bucket)
            flat = torch.cat([*parts]).mul_(weight)
            works.append(group.allreduce([flat]))
            self._flats.append((bucket, flat))
        for work in works:
            work.wait()

    def commit(self) -> None:
        """Replace the gradients of this replica by those of all."""
        for bucket, flat in self._flats:
            parts = flat.split([local_tensor(parameter).numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = local_tensor(parameter.grad)
                grad.copy_(part.view(grad.shape))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(local_tensor(parameter)) if parameter.grad is None else local_tensor(parameter.grad)


class Stateful(Protocol):
    """State that a replica sends to another beside its weights and optimizer: plain data, such as a trainer's."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@final
class Replicated:
    """Weights, buffers, optimizer and position in the data of this rank of a replica."""

    def __init__(
        self, par: Parallelized, optimizer: torch.optim.Optimizer, data: Batches, state: Stateful, same: object
    ) -> None:
        self._par, self._optimizer, self._data, self._state = par, optimizer, data, state
        self._same = same

    def synchronize(self, group: Peers, quorum: Quorum, name: str) -> dict[str, Any]:
        """Send the newest state to the replicas that lack it; return what replica ``name`` received."""
        members, best, state = quorum.ready, quorum.best, dict[str, Any]()
        sources = [number for number, member in enumerate(members) if member.state == best]
        behind = [number for number, member in enumerate(members) if member.state != best]
        for turn, number in enumerate(behind):
            source = sources[turn % len(sources)]
            if name == members[source].name:
                send(group, number, self._whole_state())
            elif name == members[number].name:
                state = receive(group, source)
        return state

    def _whole_state(self) -> dict[str, Any]:
        self._par.reshard()
        module = [local_tensor(tensor).detach() for _, tensor in tensors_of(self._par.module)]
        optimizer = dict(self._optimizer.state_dict())
        optimizer["state"] = dict(optimizer["state"])
        return {"module": module, "optimizer": optimizer, "state": self._state.state_dict()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`synchronize` has returned."""
        reads_of(self._par.module).wait("taking over another replica's state")
        self._par.reshard()
        for (_, tensor), value in zip(tensors_of(self._par.module), state["module"], strict=True):
            local_tensor(tensor).copy_(value)
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for number, values in state["optimizer"]["state"].items():
            for name, value in values.items():
                if isinstance(value, SentPart):
                    values[name] = value.on(parameters[number].device_mesh)
        self._optimizer.load_state_dict(state["optimizer"])
        self._state.load_state_dict(state["state"])
        self._optimizer.zero_grad(set_to_none=True)

    def compare(self, group: Peers, step: int) -> None:
        """Raise MeshparError if the members' states after ``step`` differ by hash, RuntimeError if a member failed."""
        tensors = (leaf for leaf in leaves(self._whole_state()) if isinstance(leaf, Tensor))
        total = digest_of_several(map(local_tensor, tensors))
        settings = repr((self._data.state_dict(), self._data.global_batch, self._same))
        plain = int.from_bytes(hashlib.sha256(settings.encode()).digest()[:8], signed=True)
        digests = torch.tensor([int(total), ~int(total), plain, ~plain])
        group.allreduce([digests], dist.ReduceOp.MAX).wait()
        if int(digests[2]) != ~int(digests[3]):
            raise MeshparError(
                f"replicas differ in the position in the data, the batch or the settings after step {step}; this one "
                f"has {settings}; start all of them from the same recipe"
            )
        if int(digests[0]) != ~int(digests[1]):
            raise MeshparError(
                f"replicas have different weights or optimizer states after step {step}; start all of them from the "
                "same seed or the same checkpoint, and change no weights of one replica alone"
            )


@final
@dataclass(frozen=True, slots=True)
class SentPart:
    """A part of a DTensor on its way, with the shape, the stride and the placements of the whole."""

    tensor: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]

    def on(self, mesh: DeviceMesh) -> Tensor:
        """Return the DTensor on the receiver's mesh, in the memory in which the part is."""
        if self.tensor.device.type == mesh.device_type:
            return self._of(self.tensor, mesh)
        # from_local would move it
        placed = torch.empty_like(self._of(self.tensor.to(mesh.device_type), mesh), device=self.tensor.device)
        local_tensor(placed).copy_(self.tensor)
        return placed

    def _of(self, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(tensor, mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)


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
        return value if whole is None else SentPart(value, *whole)


def send(group: Peers, to: int, values: dict[Any, Any]) -> None:
    """Send nested values: first what they are, then tensor after tensor."""
    packed = _Packed(file := io.BytesIO())
    packed.dump(values)
    header = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    for tensor in (torch.tensor([header.numel()]), header, *packed.tensors):
        if tensor.numel():
            group.send([tensor.contiguous().cpu()], to, 0).wait()


def receive(group: Peers, source: int) -> dict[Any, Any]:
    """Return what :func:`send` sends; parts of DTensors as :class:`SentPart`."""

    def fill(into: Tensor) -> None:
        if into.numel():
            group.recv([into], source, 0).wait()

    fill(size := torch.zeros(1, dtype=torch.int64))
    fill(header := torch.empty(int(size), dtype=torch.uint8))
    return cast("dict[Any, Any]", _Unpacked(io.BytesIO(bytes(header.tolist())), fill).load())
