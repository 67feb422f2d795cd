"""The state that all replicas have in common: copied to those that lack it, and compared."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar.core.errors import MeshparError
from meshpar.core.waiting import reads_of
from meshpar.parallelized import Parallelized
from meshpar.state.initialize import state as tensors_of
from meshpar.step.placements import local_tensor
from meshpar.step.pytrees import leaves
from meshpar.step.rank_digests import digest_of_several
from meshpar.training.data import Batches
from meshpar.training.quorum import Peers, Quorum
from meshpar.training.wire import Part, received, send


class Stateful(Protocol):
    """State that a replica sends to another beside its weights and optimizer: plain data, such as a trainer's."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@final
class Replicated:
    """Weights, buffers, optimizer and position in the data of this rank of a replica.

    Args:
        par: the parallel module.
        optimizer: its optimizer.
        data: the batches.
        state: what is copied beside module and optimizer, with the position of ``data``.
        same: what all replicas must be given alike; its ``repr`` is compared.
    """

    def __init__(
        self, par: Parallelized, optimizer: torch.optim.Optimizer, data: Batches, state: Stateful, same: object
    ) -> None:
        self._par, self._optimizer, self._data, self._state = par, optimizer, data, state
        self._same = same

    def copied(self, group: Peers, quorum: Quorum, name: str) -> dict[str, Any]:
        """Send the newest state to the replicas that have an older one; return what replica ``name`` has received, if
        it is one of them.

        Raises:
            RuntimeError: a replica failed.
        """
        members, best, held = quorum.ready, quorum.best, dict[str, Any]()
        sources = [number for number, member in enumerate(members) if member.state == best]
        behind = [number for number, member in enumerate(members) if member.state != best]
        for turn, number in enumerate(behind):
            source = sources[turn % len(sources)]
            if name == members[source].name:
                send(group, number, self._held())
            elif name == members[number].name:
                held = received(group, source)
        return held

    def _held(self) -> dict[str, Any]:
        self._par.reshard()
        module = [local_tensor(tensor).detach() for _, tensor in tensors_of(self._par.module)]
        optimizer = self._optimizer.state_dict()
        return {
            "module": module,
            "optimizer": {**optimizer, "state": dict(optimizer["state"])},
            "state": self._state.state_dict(),
        }

    @torch.no_grad()
    def take(self, held: dict[str, Any]) -> None:
        """Take over what :meth:`copied` has returned."""
        reads_of(self._par.module).wait("taking over another replica's state")
        self._par.reshard()
        for (_, tensor), value in zip(tensors_of(self._par.module), held["module"], strict=True):
            local_tensor(tensor).copy_(value)
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for number, values in held["optimizer"]["state"].items():
            for name, value in values.items():
                if isinstance(value, Part):
                    values[name] = value.on(parameters[number].device_mesh)
        self._optimizer.load_state_dict(held["optimizer"])
        self._state.load_state_dict(held["state"])
        self._optimizer.zero_grad(set_to_none=True)

    def compare(self, group: Peers, step: int) -> None:
        """Compare the hashes of what all members of a group have.

        Args:
            group: of this rank's peers.
            step: in messages.

        Raises:
            MeshparError: they differ.
            RuntimeError: a member failed.
        """
        total = digest_of_several(local_tensor(leaf) for leaf in leaves(self._held()) if isinstance(leaf, Tensor))
        given = repr((self._data.state_dict(), self._data.global_batch, self._same))
        plain = int.from_bytes(hashlib.sha256(given.encode()).digest()[:8], signed=True)
        both = torch.tensor([int(total), ~int(total), plain, ~plain])
        group.allreduce([both], dist.ReduceOp.MAX).wait()
        if int(both[2]) != ~int(both[3]):
            raise MeshparError(
                f"replicas differ in the position in the data, the batch or the settings after step {step}; this one "
                f"has {given}; start all of them from the same recipe"
            )
        if int(both[0]) != ~int(both[1]):
            raise MeshparError(
                f"replicas have different weights or optimizer states after step {step}; start all of them from the "
                "same seed or the same checkpoint, and change no weights of one replica alone"
            )
