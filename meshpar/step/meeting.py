"""Small exchanges of all ranks, which tell where each rank is in its loop."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar.core import runtime
from meshpar.core.errors import MeshparError, first_line, line_of_user
from meshpar.core.patterns import class_name
from meshpar.step.rank_digests import FACTOR, Largest

_NUMBERS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Of the models that all ranks of a default group made together: a rank may simulate others alone, or have made some
in another group.
"""


def models_made() -> int:
    """Return the number of models that all ranks of the open process group have made together."""
    return 0 if dist.group.WORLD is None else _NUMBERS.get(dist.group.WORLD, 0)


def own_group(number: int, ranks: tuple[int, ...] | None = None) -> dist.ProcessGroup:
    """Return a new group of all or some ranks for one model's exchanges through the hosts. Collective: every rank calls
    it.
    """
    return runtime.new_host_group(f"meshpar model {number}" + (f", ranks {ranks}" if ranks else ""), ranks=ranks)


def count_models_anew() -> None:
    """Forget the models that were made; for processes in which one job follows another. Every rank calls it."""
    _NUMBERS.clear()


def next_number() -> int:
    """Return the number of a model that all ranks make now, from 0."""
    number = models_made()
    if dist.group.WORLD is not None:
        _NUMBERS[dist.group.WORLD] = number + 1
    return number


@final
class Meeting:
    """Small exchanges of the ranks that have the same layers, through the hosts; each tells where its rank is.

    Every exchange has the same size and is a maximum, so that ranks at different places learn of it, whatever they came
    for.

    Args:
        model: the name of the module's class.
        number: of the model among those of this process, equal on all ranks: models of one class differ by it.
        own: a group for this model alone.
        stage: the group of this rank's stage; None: all ranks have all layers.
    """

    NUMBERS = 2

    def __init__(
        self, model: str, number: int, own: dist.ProcessGroup | None = None, stage: dist.ProcessGroup | None = None
    ) -> None:
        self._model, self.own, self._stage = f"{number} {model}", own, stage
        self._history = 0

    @classmethod
    def of(cls, module: nn.Module, stages: Sequence[Sequence[int]] = ()) -> Meeting:
        """Return the exchanges of a module to which a plan was applied last. Collective: every rank calls it.

        Args:
            module: the outermost one.
            stages: the ranks of each, where ranks have other layers.
        """
        number = models_made() - 1
        own = stage = None
        if stages:
            groups = [own_group(number, tuple(ranks)) for ranks in stages]
            stage = next(group for group, ranks in zip(groups, stages, strict=True) if dist.get_rank() in ranks)
        elif number > 0 and dist.get_world_size() > 1 and not runtime.is_simulated():
            own = own_group(number)
        return cls(class_name(module), number, own, stage)

    def exchange(self) -> tuple[list[dist.ProcessGroup], torch.device]:
        """Return the group of all ranks' exchanges, and their device."""
        return [self.hosts], torch.device("cpu")

    def counted(self, number: int) -> int:
        """Take a number into the digest of all that this rank has counted, and return the digest."""
        self._history = (self._history * FACTOR + number + 1) % (1 << 62)
        return self._history

    @property
    def hosts(self) -> dist.ProcessGroup:
        """The group of the exchanges: all models' in the main thread, which sees when ranks call them in different
        orders; in another one the model's own, where it has one.
        """
        if self._stage is not None:
            return self._stage
        here = threading.current_thread() is threading.main_thread()
        return runtime.hosts() if here or self.own is None else self.own

    def _tag(self, place: str) -> int:
        return zlib.crc32(f"{self._model} {place}".encode())

    def _all_places(self, place: str) -> str:
        """Return where this rank is, and the others that are elsewhere, each with the line of the user's code."""
        here = f"{place} (model {self._model}, {line_of_user()})"
        ranks = dist.get_process_group_ranks(self.hosts)
        places: list[Any] = [here] * len(ranks)
        with suppress(RuntimeError):  # of a rank that met this one by another exchange
            dist.all_gather_object(places, here, self.hosts)
        others = {said: rank for rank, said in reversed(list(zip(ranks, places, strict=True))) if said != here}
        return ", ".join([f"this rank is at {here}", *(f"rank {rank} at {said}" for said, rank in others.items())])

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """See :meth:`meshpar.guards.agreement.Agreement.meet`."""
        if self.hosts.size() == 1:
            return [True] * len(numbers)
        tag = self._tag(place)
        mine = torch.tensor([tag, *numbers, *[0] * (self.NUMBERS - len(numbers))], device="cpu")
        try:
            here, *agree = _spans(mine, self.hosts)
        except RuntimeError as error:
            raise MeshparError(
                f"this rank is at {place} ({line_of_user()}), and the other ranks did not come there in time; call the "
                "module equally often on every rank, in training and in evaluation. The wait ended with: "
                f"{first_line(error)}"
            ) from error
        if here[0] != here[1]:  # on every rank alike, so that they can say more
            raise MeshparError(
                f"ranks are at different places of their loops: {self._all_places(place)}. Run the same calls in the "
                "same order on every rank: as many batches, steps and sums, also in evaluation. Call every block on "
                "every rank, because data ranks gather and reduce a block together, or make a skipped part one block "
                "with its neighbours (blocks=...)"
            )
        return [high == low for high, low in agree[: len(numbers)]]


@final
class Later:
    """Compare which gradients each rank has after a backward: exchanged beside other work, read by :meth:`check`.

    Args:
        meeting: of the ranks.
        trained: names and parameters.
        marks: of each parameter 0 without a gradient here, 1 with zeros for others' gradients, 2 with a gradient.
    """

    def __init__(self, meeting: Meeting, trained: Sequence[tuple[str, nn.Parameter]], marks: Sequence[int]) -> None:
        self._trained, self._marks = trained, marks
        mine = torch.tensor([meeting.counted(len(marks)), *marks], device="cpu")
        self._both = Largest(torch.cat([mine, -mine]), meeting.hosts)

    def check(self) -> list[int]:
        """Wait for the exchange, and return the largest mark of each parameter.

        Raises:
            MeshparError: on every rank alike.
        """
        (most_counted, *most), (least_counted, *least) = self._both.read().view(2, -1).tolist()
        if any(high and not -low for high, low in zip(most, least)):
            without = [
                name
                for (name, parameter), mark in zip(self._trained, self._marks)
                if parameter.requires_grad and not mark
            ]
            raise MeshparError(
                "data ranks have gradients for different parameters; here these have none: "
                f"{', '.join(without[:6]) or '(all have one)'}; call the same blocks on every rank; to leave out a "
                "block, multiply its output by 0 instead of skipping it"
            )
        if most_counted != -least_counted:
            raise MeshparError(
                "ranks took different steps: other settings of an optimizer (a learning rate that follows a rank's "
                "own loss), or another number of steps; step on every rank alike"
            )
        return most


def _spans(mine: Tensor, hosts: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Return of each number the largest and the least of all ranks."""
    most, least = Largest(torch.cat([mine, -mine]), hosts).read().view(2, -1).tolist()
    return [(high, -low) for high, low in zip(most, least)]
