"""Optimizer state that is divided over replicas, and what travels so that all stay one state.

Every replica has all gradients, makes the step of the parameters whose state it holds
(:mod:`meshpar.state.optimizer_shares`), and gets the new values of the others.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from meshpar.core.errors import MeshparError
from meshpar.leaves import leaves
from meshpar.placements import local_tensor
from meshpar.same_values import digest_of_several
from meshpar.state.full import mark_divided, restore_by
from meshpar.state.optimizer_shares import Routes, assigned, first_shares, held_of, routes, sizes_of
from meshpar.training.quorum import Peers
from meshpar.training.summed import buckets
from meshpar.training.wire import Part, received, send

_TAG = 1
_NONE = torch.iinfo(torch.int64).min
_TRIALS = 3  # steps: some optimizers couple parameters from the second step on


@final
class Divided:
    """This replica's part of the state of an optimizer, whose every step it completes with the values that others
    computed.

    Args:
        optimizer: one that :func:`check_separable` accepts.
        copies: number of replicas that hold the state of each parameter.
        module: has the parameters, in an order that is the same in all replicas, however the optimizer groups them.

    Attributes:
        whole: all parameters, a bit each.
        holds: the parameters whose state is here.
        sent: bytes that this rank sent in the last exchange of values.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copies: int, module: nn.Module) -> None:
        self._optimizer, self._copies = optimizer, copies
        places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
        held = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
        ]
        self.parameters: list[Tensor] = sorted(held, key=lambda parameter: places.get(id(parameter), len(places)))
        self._sizes = sizes_of(self.parameters)
        self.whole = self.holds = self._first = (1 << len(self.parameters)) - 1
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._known: tuple[tuple[int, ...], int, list[tuple[int, int, list[list[Tensor]]]]] | None = None
        self.sent = 0

    # A step

    def set_aside(self) -> bool:
        """Hide the gradients whose parameters others train, so that the optimizer skips these; return whether there are
        gradients at all.

        Raises:
            MeshparError: the optimizer has got parameters since.
        """
        given = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if strange := [tuple(parameter.shape) for parameter in given if id(parameter) not in self._numbers]:
            raise MeshparError(
                f"the optimizer trains {len(strange)} parameters that it did not when Replicas was made (shapes "
                f"{strange[:5]}), and their state is not divided; add and unfreeze parameters before"
            )
        self._aside = [
            (parameter, parameter.grad) for parameter in given if not self.holds >> self._numbers[id(parameter)] & 1
        ]
        for parameter, _ in self._aside:
            parameter.grad = None
        return bool(given)

    def put_back(self) -> None:
        """Restore what :meth:`set_aside` has hidden."""
        for parameter, grad in self._aside:
            parameter.grad = grad
        self._aside = []

    @torch.no_grad()
    def exchange(self, group: Peers, place: int, held: Sequence[int]) -> None:
        """Get the values of all parameters from replicas that hold their state.

        Args:
            group: of this rank's peers.
            place: of this replica in it.
            held: what each replica of the group holds, together all.

        Raises:
            RuntimeError: one of them failed.
        """
        self.sent = 0
        buckets = self._buckets(place, tuple(held))
        for turn in range(max((len(parts) for *_, parts in buckets), default=0)):
            works, arriving = [], []
            for source, to, parts in buckets:
                if turn >= len(parts):
                    continue
                values = [local_tensor(parameter) for parameter in parts[turn]]
                if source == place:
                    flat = torch.cat([tensor.reshape(-1) for tensor in values]).cpu()
                    works.append((group.send([flat], to, _TAG), flat))
                    self.sent += flat.numel() * flat.element_size()
                else:
                    flat = torch.empty(sum(tensor.numel() for tensor in values), dtype=values[0].dtype)
                    works.append((group.recv([flat], source, _TAG), flat))
                    arriving.append((values, flat))
            for work, _ in works:
                work.wait()
            for values, flat in arriving:
                for value, part in zip(values, flat.split([tensor.numel() for tensor in values]), strict=True):
                    value.copy_(part.view(value.shape))

    def _buckets(self, place: int, held: tuple[int, ...]) -> list[tuple[int, int, list[list[Tensor]]]]:
        """Return (source, destination, parameters of one message after another) of what this replica sends and gets."""
        if self._known is None or self._known[:2] != (held, place):
            found = routes(self._sizes, held, [self.whole] * len(held))
            mine = {
                ends: [self.parameters[number] for number in numbers]
                for ends, numbers in found.items()
                if place in ends
            }
            # A rank may have no part of a parameter.
            parts = {
                ends: (parameter for parameter in some if local_tensor(parameter).numel())
                for ends, some in mine.items()
            }
            self._known = held, place, [(*ends, list(buckets(some))) for ends, some in parts.items()]
        return self._known[2]

    def traffic(self, place: int, held: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that this rank of replica ``place`` sends and gets in an exchange of values, see
        :meth:`exchange`.
        """
        found = routes(self._sizes, held, [self.whole] * len(held))
        sizes = [local_tensor(parameter).nbytes for parameter in self.parameters]
        sent, got = (
            sum(sizes[number] for ends, numbers in found.items() if ends[end] == place for number in numbers)
            for end in (0, 1)
        )
        return sent, got

    # State

    def shares(self, held: Sequence[int]) -> list[int]:
        """Return what each replica is to hold, of replicas that hold so much now."""
        return assigned(self._sizes, held, self._copies)

    def nbytes(self, share: int) -> int:
        """Return the bytes of the optimizer state of some parameters that this rank has."""
        states = (self._optimizer.state.get(parameter, {}) for parameter in held_of(share, self.parameters))
        return sum(local_tensor(leaf).nbytes for state in states for leaf in leaves(state) if isinstance(leaf, Tensor))

    def send_shares(self, group: Peers, place: int, held: Sequence[int], shares: Sequence[int]) -> None:
        """Send state to replicas that are to hold it and do not; this one keeps what it has until :meth:`keep`.

        Raises:
            RuntimeError: a replica failed.
        """
        self._send(group, place, routes(self._sizes, held, shares))

    def gather(self, group: Peers, place: int, held: Sequence[int], to: int) -> None:
        """Send state to the replica ``to``, which has all until :meth:`keep`: what it does not hold in host memory.

        Raises:
            RuntimeError: a replica failed.
        """
        self._send(
            group,
            place,
            routes(self._sizes, held, [self.whole * (number == to) for number in range(len(held))]),
            on_host=True,
        )
        if place == to:
            mark_divided(self._optimizer, "")

    def _send(self, group: Peers, place: int, found: Routes, *, on_host: bool = False) -> None:
        for (source, to), numbers in found.items():
            if source == place:
                send(
                    group,
                    to,
                    {number: dict(self._optimizer.state.get(self.parameters[number], {})) for number in numbers},
                )
            elif to == place:
                for number, values in received(group, source, on_host=on_host).items():
                    parameter = self.parameters[number]
                    self._optimizer.state[parameter] = {
                        key: value.on(parameter.device_mesh) if isinstance(value, Part) else value
                        for key, value in values.items()
                    }

    def keep(self, share: int) -> None:
        """Drop all state but that of some parameters, a bit each."""
        for number, parameter in enumerate(self.parameters):
            if not share >> number & 1:
                self._optimizer.state.pop(parameter, None)
        self._note(share)
        restore_by(self._optimizer, None)

    def expect_restore(self, place: int, count: int) -> None:
        """Let a restore of a checkpoint read the first share of replica ``place`` of ``count`` alone, until
        :meth:`keep`.
        """
        self._first = first_shares(self.parameters, count, self._copies)[place]
        restore_by(self._optimizer, self._restored)

    def _restored(self, whole: bool) -> list[Tensor]:
        self._note(self.whole if whole else self._first)
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return [
            parameter
            for parameter in held
            if (number := self._numbers.get(id(parameter))) is None or self.holds >> number & 1
        ]

    def _note(self, share: int) -> None:
        self.holds = share
        why = (
            "other replicas hold a part of the optimizer's state; save and read it inside of `with replicas.saving() "
            "as writes:`"
        )
        mark_divided(self._optimizer, "" if share == self.whole else why)

    def options(self) -> dict[str, Any]:
        """Return the optimizer's ``state_dict()`` without state."""
        numbers = iter(range(sum(len(group["params"]) for group in self._optimizer.param_groups)))
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]} for group in self._optimizer.param_groups
        ]
        return {"state": {}, "param_groups": groups}

    def digests(self, share: int) -> Tensor:
        """Return 2 x number of parameters: after a maximum over replicas, the rows are each other's inverse where
        holders agree.

        Args:
            share: the parameters whose state to look at, a bit each.
        """
        rows = torch.full((2, len(self.parameters)), _NONE)
        for number, parameter in enumerate(self.parameters):
            if share >> number & 1:
                values = leaves(self._optimizer.state.get(parameter, {}))
                total = digest_of_several(local_tensor(value) for value in values if isinstance(value, Tensor))
                rows[:, number] = torch.stack([total, ~total])
        return rows


def check_separable(optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer's step of a parameter is the same whether others are stepped or not, on small tensors.

    Raises:
        MeshparError: it is not, or the optimizer cannot be tried.
    """
    name = type(optimizer).__name__
    remedy = "use AdamW or SGD, or HybridShard(optimizer='replica')"
    try:
        together, alone = (_tried(optimizer, alone=by_itself) for by_itself in (False, True))
    except Exception as error:
        raise MeshparError(
            f"{name} cannot be tried on a few numbers ({type(error).__name__}: {error}), which shows whether its "
            f"state can be divided over replicas; {remedy}"
        ) from error
    if not together:
        raise MeshparError(
            f"{name} trains no parameter that requires a gradient, so there is no optimizer state to divide over "
            "replicas"
        )
    if not all(map(torch.equal, together, alone)):
        raise MeshparError(
            f"the step that {name} makes of one parameter depends on others, so that its state cannot be divided over "
            f"replicas; {remedy}"
        )


def _tried(optimizer: torch.optim.Optimizer, *, alone: bool) -> list[Tensor]:
    """Return the values of one small tensor of each group after some steps, with a second one in each group or
    ``alone``.
    """
    other: Any = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name not in vars(other) and not callable(value):  # schedules wrap methods of the optimizer's own
            setattr(other, name, copy.copy(value))
    other.state, other.param_groups = defaultdict(dict), []
    draw = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        return torch.randn((4,) * like.ndim, generator=draw, dtype=torch.float64).to(
            "cpu" if like.is_meta else like.device, like.dtype
        )

    for group in optimizer.param_groups:
        first = next((parameter for parameter in group["params"] if parameter.requires_grad), None)
        if first is not None:
            options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            other.param_groups.append({**options, "params": [nn.Parameter(drawn(first)) for _ in range(2)]})
    for _ in range(_TRIALS):
        for group in other.param_groups:
            for number, parameter in enumerate(group["params"]):
                grad = drawn(parameter)
                parameter.grad = None if number and alone else grad
        cast("Any", type(other)).step(other)
    return [group["params"][0].detach() for group in other.param_groups]
