"""Compare ranks: the batch and the random state of those that work on one sample together, the gradients of those
that keep one copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshpar._torch.autograd import in_backward
from meshpar._torch.units import Units
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.guards import Guard
from meshpar.guards.kept_gradients import check_copies
from meshpar.passes.data.unused_gradients import Unused
from meshpar.passes.tensor import random
from meshpar.state.initialize import state
from meshpar.step.meeting import Later, Meeting
from meshpar.step.pytrees import digest_of
from meshpar.step.rank_digests import Looks, digest, same
from meshpar.step.unit_order import Schedule

_SAME_BATCH = (
    "they compute one sample together, so pass par.data_rank and par.data_size to the sampler: "
    "DistributedSampler(data, num_replicas=par.data_size, rank=par.data_rank)"
)


@final
class Agreement(Guard):
    """The comparisons between the ranks of one parallel module while it trains.

    Args:
        module: the module.
        units: of the module.
        mesh: its mesh.
        data_axes: the axes whose ranks see different samples.
        same_axes: those whose ranks must see the same.
        split: axis -> process group, where ranks see different positions of the same samples.
        device: where numbers are exchanged.
        always: compare in every step; False: in the first ones.
        predicts: ranks that exchange more than weights inside of a unit compute the same there, so that ranks whose
            forwards call the same units each time need not meet before each unit on a CPU.
        stages: the ranks of each, where ranks have other layers: then stages keep their units in one order.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Units,
        mesh: DeviceMesh,
        data_axes: Sequence[str],
        same_axes: Sequence[str],
        split: Mapping[str, dist.ProcessGroup],
        device: torch.device,
        *,
        always: bool = True,
        predicts: bool = False,
        stages: Sequence[Sequence[int]] = (),
    ) -> None:
        self._always = always
        self.predicts, self.ordered = predicts and always and bool(data_axes) and not stages, bool(stages)
        self._schedule: Schedule | None = None
        self._module, self._units, self._mesh, self._device, self._draws = module, units, mesh, device, False
        self._data_axes, self._same_axes = tuple(data_axes), tuple(same_axes)
        self._split = split
        self._batches, self._wholes, self._looks = (Looks(always=always) for _ in range(3))
        self._backwards = 0
        self._meeting = Meeting.of(module, stages)
        self._unused = Unused(module, self._meeting.exchange if data_axes and dist.get_world_size() > 1 else None)
        self._later: Later | None = None

    @property
    def hosts(self) -> dist.ProcessGroup:
        """The group of the exchanges of all ranks that have the same layers."""
        return self._meeting.hosts

    def begin(self, *, draws: bool) -> None:
        """Let the ranks of ``same_axes`` draw the same random numbers outside of what is split, if any ``draws``."""
        self._draws = draws

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Check that all ranks are at the same place of their loop before they exchange something there; the error
        names the places.

        Each time on a CPU; beside an accelerator the first times, and while the module evaluates.

        Args:
            place: of this rank, as a message names it.
            numbers: up to two, to compare.

        Returns:
            Of each number whether all ranks have the same.

        Raises:
            MeshparError: on every rank alike, or where the others do not come in time.

        Collective: every rank calls it.
        """
        if self._looks.now(place, self._device) or (self._always and not self._module.training):
            return self._meeting.meet(place, numbers)
        return [True] * len(numbers)

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the arguments of a forward whose gradients are wanted, and expect the units that it calls.

        Raises:
            MeshparError: on every rank of an axis alike.

        Collective over ``same_axes``.
        """
        if torch.is_grad_enabled():
            self._batch((args, kwargs))
        if self.predicts and self._schedule is None and not runtime.queues(self._device):
            self._schedule = Schedule(self._units.gather)
        if self._schedule is not None:
            self._schedule.begin((torch.is_grad_enabled(), self._module.training))

    def _batch(self, inputs: object) -> None:
        """Compare a forward's arguments on ranks of ``same_axes``: always on a CPU, on an accelerator at first."""
        if not self._same_axes or not self._batches.now("", self._device):
            return
        numbers = [digest_of(inputs, self._device), *([random.digest(self._device)] if self.numbers() == 2 else [])]
        for axis, group in zip(self._same_axes, self.same_groups(), strict=True):
            agree = same(torch.stack(numbers), [group])
            if not agree[0]:
                raise MeshparError(f"ranks of {axis} got different batches; {_SAME_BATCH}")
            if not all(agree):
                raise MeshparError(
                    f"ranks of {axis} have different random states, and the model draws random numbers where they "
                    "must be the same; call par.manual_seed(seed) before training"
                )

    def whole(self, batch: object) -> None:
        """Compare the batches of ``par.split`` on ranks that share samples: every time on a CPU, on an accelerator the
        first times.

        Raises:
            MeshparError: on every rank of the axis alike.

        Collective over the axes of positions.
        """
        if not self._wholes.now("", self._device):
            return
        for axis, group in self._split.items():
            if not all(same(digest_of(batch, self._device)[None], [group])):
                raise MeshparError(f"ranks of {axis} split different batches; {_SAME_BATCH}")

    def after_forward(self, output: object) -> None:
        """End a forward of the module.

        Raises:
            MeshparError: on every rank alike, where this one called fewer units than the others.

        Collective where this rank has called fewer units than before.
        """
        if self._schedule is not None and self._schedule.end():
            self._meeting.meet("the end of a forward that leaves out blocks")

    def after_error(self) -> None:
        """End a forward in which an error was raised: gather what other ranks may wait for."""
        if self._schedule is not None:
            self._schedule.fail()

    def before_unit(self, name: str, unit: nn.Module) -> None:
        """Check that all ranks call one unit together.

        Every time on a CPU, or once a forward where all call the same units in each; beside an accelerator the first
        times.

        Args:
            name: of the unit.
            unit: about to be gathered; in a backward, which all ranks run, they do not meet.

        Raises:
            MeshparError: on every rank alike.

        Collective: every rank calls it.
        """
        if not self._data_axes or in_backward():
            return
        schedule, numbers, predicted = self._schedule, list[int](), list[nn.Module]()
        if schedule is not None:
            predicted = list(schedule.prediction)
            numbers = [_number_of(predicted, self._units)] if predicted else [0]
            if schedule.expects(unit):
                return
        elif not (self._looks.first(name) if self.ordered else self._looks.now(name, self._device)):
            return
        place = f"the forward of {name}" if name else "a forward of the module"
        alike, *same_prediction = self._meeting.meet(place, [zlib.crc32(self._units.trained(unit).encode()), *numbers])
        if schedule is not None and predicted and all(same_prediction):
            schedule.follow(predicted)
        if not alike:
            raise MeshparError(
                f"data ranks train different parameters in {name or 'the outermost block'}: requires_grad differs; "
                "set it alike on every rank"
            )

    @property
    def differs(self) -> bool:
        """Some ranks have different samples."""
        return bool(self._data_axes)

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Check that all data ranks begin a backward together: collectives of a unit that one still calls would pair up
        with this one's. Every time on a CPU, beside an accelerator the first times.
        """
        always = self._always and not runtime.queues(self._device)
        if self.differs and (always or self._backwards < Looks.FIRST) and reaches():
            self._meeting.meet("a backward")

    def before_micro_batch(self, left: int) -> None:
        """Check that all ranks are equally far in their step.

        Raises:
            MeshparError: on every rank alike, or where the others do not come in time.

        Collective: every rank calls it.
        """
        if not all(self.meet("a micro-batch of par.accumulate", [left])):
            here = ("has none", "is at its last", "has more")[left]
            raise MeshparError(
                f"ranks have different numbers of micro-batches in one step (this rank {here}), so that some would "
                "wait forever; pass the same number to par.accumulate on every rank, for instance by dropping the "
                "rest of an epoch"
            )
        self._meeting.counted(left)

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        """Compare the settings of an optimizer of the module, such as its learning rate, before its step.

        Every time on a CPU. Beside an accelerator the first times; then they travel with what the next backward
        exchanges.

        Raises:
            MeshparError: on every rank alike, or where the others do not step in time.

        Collective: every rank calls it.
        """
        if not trains:
            return
        listed = [
            f"{key}={_plain(value)}"
            for group in optimizer.param_groups
            for key, value in sorted(group.items())
            if isinstance(value, int | float | str | tuple | Tensor)
        ]
        number = zlib.crc32(" ".join(listed).encode())
        if not all(self.meet("an optimizer's step", [number])):
            raise MeshparError(
                f"ranks step {type(optimizer).__name__} with different settings, this rank with "
                f"{', '.join(dict.fromkeys(listed))}; set them alike on every rank: give a schedule that reads a loss "
                "the mean over all ranks, par.data_sum(loss) / par.loss_size"
            )
        self._meeting.counted(number)

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Compare which gradients a backward left: on a CPU every time.

        Beside an accelerator the first times, and where a rank did not use a parameter; else the exchange runs beside
        the next step, after which it is looked at.

        Args:
            unused: parameters that this rank did not use, and whose gradient counts as zero; those that no rank used
                lose it.

        Raises:
            MeshparError: on every rank that takes part alike.

        Collective over the mesh.
        """
        first = self._backwards < Looks.FIRST
        if self._backwards == 0:
            check_copies(self._module, self._mesh, self._same_axes)
        self._backwards += 1
        if self._later is not None:
            later, self._later = self._later, None
            later.check()
        if not self._data_axes:
            for parameter in unused:
                parameter.grad = None
            return
        if not first and not self._always:
            self._unused.drop(unused)
            return
        self._same_parameters(unused, look=first or not runtime.queues(self._device))
        if first:
            self._same_buffers()

    def numbers(self) -> int:
        """Return how many numbers of a batch the ranks of ``same_axes`` compare."""
        return 2 if self._draws and self._module.training else 1

    def same_groups(self) -> list[dist.ProcessGroup]:
        """Return this rank's groups of ``same_axes``."""
        return [self._mesh.get_group(axis) for axis in self._same_axes]

    def split_groups(self) -> list[dist.ProcessGroup]:
        """Return this rank's groups whose ranks see different positions of the same samples."""
        return list(self._split.values())

    def data_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups that join the data ranks, one for each axis."""
        return [self._mesh.get_group(axis) for axis in self._data_axes]

    def _same_parameters(self, unused: list[nn.Parameter], *, look: bool) -> None:
        """Check that all data ranks have gradients for the same parameters, and drop the zeros of those that no rank
        used.

        Parameters that a rank did not use count as zero in the reduction. On a rank whose backward did not reach the
        unit at all, FSDP2 would join gradients of different parameters without an error.
        """
        zeros = {id(parameter) for parameter in unused}
        trained = list(self._module.named_parameters())
        marks = [0 if parameter.grad is None else 1 if id(parameter) in zeros else 2 for _, parameter in trained]
        later = Later(self._meeting, trained, marks)
        if look or unused:
            for (_, parameter), mark in zip(trained, later.check()):
                if mark == 1:
                    parameter.grad = None
        else:
            self._later = later

    def _same_buffers(self) -> None:
        """Check that data ranks hold the same persistent buffers; a forward may compute them from its part."""
        buffers = {name: tensor for name, tensor in state(self._module) if not isinstance(tensor, nn.Parameter)}
        if not buffers:
            return
        agree = same(torch.stack([digest(buffer).to(self._device) for buffer in buffers.values()]), self.data_groups())
        if odd := [name for name, equal in zip(buffers, agree) if not equal]:
            raise MeshparError(
                f"data ranks hold different values of the buffers {', '.join(odd[:6])}, each computed from its own "
                "part of the batch, while one process computes them from the whole; sum their input over the ranks "
                "(par.data_sum), or register the buffers with persistent=False where ranks may differ; or calibrate "
                "observers of quantization before plan.apply, and then module.apply(disable_observer)"
            )


def _number_of(predicted: Sequence[nn.Module], units: Units) -> int:
    """Return a digest of the units that a forward will call, and of the parameters that are trained in each."""
    modules: list[nn.Module] = [*units.modules]
    places = {unit: place for place, unit in enumerate(modules)}
    trained = "".join(f"{place}:{units.trained(unit)} " for unit, place in places.items())
    return 1 + zlib.crc32(f"{[places[unit] for unit in predicted]} {trained}".encode())


def _plain(value: object) -> object:
    """Return an optimizer's setting as all ranks print it, without reading a tensor on a device."""
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    if isinstance(value, Tensor):
        return "..." if runtime.queues(value.device) else value.tolist()
    return value
