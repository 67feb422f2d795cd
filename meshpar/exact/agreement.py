"""Compare ranks: the batch and the random state of those that work on one sample together, the gradients of those
that keep one copy.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshpar._torch.units import Units
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, first_line
from meshpar.exact.schedule import Schedule
from meshpar.passes import random
from meshpar.passes.unused import Unused
from meshpar.placements import local_tensor, sharded_axes
from meshpar.replicas import FACTOR, Looks, digest, same
from meshpar.state.initialize import state

_RELATIVE, _FLOOR = 1e-2, 1e-4
_SAME_BATCH = (
    "they compute one sample together, so pass par.data_rank and par.data_size to the sampler: "
    "DistributedSampler(data, num_replicas=par.data_size, rank=par.data_rank)"
)
PLACES = (
    "a forward of the module",
    "the end of a forward that leaves out blocks",
    "a backward",
    "a micro-batch of par.accumulate",
    "an optimizer's step",
    "par.token_scale",
    "par.data_sum",
    "par.adopt",
    "par.check_replicas",
    "par.state_dict(full=True)",
)
"""Where ranks meet, besides the forwards of blocks: a message can name these places of other ranks, too."""
_NUMBERS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Of the models that all ranks of a default group made together: a rank may simulate others alone, or have made some
in another group.
"""


@final
class Agreement:
    """The comparisons between the ranks of one parallel module while it trains.

    Args:
        module: the module.
        mesh: its mesh.
        data_axes: the axes whose ranks see different samples.
        same_axes: those whose ranks must see the same.
        split: axis -> process group, where ranks see different positions of the same samples.
        device: where numbers are exchanged.
        always: compare in every step; False: in the first ones.
        predicts: a unit's forward exchanges nothing with other ranks but its weights, so that ranks whose forwards
            call the same units each time need not meet before each unit.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        data_axes: Sequence[str],
        same_axes: Sequence[str],
        split: Mapping[str, dist.ProcessGroup],
        device: torch.device,
        *,
        always: bool = True,
        predicts: bool = False,
    ) -> None:
        self._always = always
        self.predicts = predicts and always and bool(data_axes) and not runtime.queues(device)
        self._schedule: Schedule | None = None
        self._module, self._mesh, self._device, self._draws = module, mesh, device, False
        self._data_axes, self._same_axes = tuple(data_axes), tuple(same_axes)
        self._split = split
        self._batches, self._wholes, self._looks = (Looks(always=always) for _ in range(3))
        self._backwards = 0
        self._meeting = Meeting.of(module)
        self._unused = Unused(module, self._meeting.exchange if data_axes and dist.get_world_size() > 1 else None)
        self._later: Later | None = None

    def begin(self, *, draws: bool) -> None:
        """Compare as in the first steps; the ranks of ``same_axes`` draw the same random numbers outside of what is
        split.

        Collective where the last backward's comparison is not looked at yet.
        """
        if self._later is not None:
            later, self._later = self._later, None
            later.check()
        self._draws, self._backwards = draws, 0
        if self._schedule is not None:
            self._schedule.forget()
        self._batches, self._wholes, self._looks = (Looks(always=self._always) for _ in range(3))

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

    def batch(self, inputs: object) -> None:
        """Compare the arguments of a forward on ranks of ``same_axes``: every time on a CPU, on an accelerator the
        first times.

        Raises:
            MeshparError: on every rank of the axis alike.

        Collective over ``same_axes``.
        """
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

    def begin_forward(self, units: Units) -> None:
        """Begin a forward of the module, whose units are called next."""
        if self.predicts and self._schedule is None:
            self._schedule = Schedule(units.gather)
        if self._schedule is not None:
            self._schedule.begin((torch.is_grad_enabled(), self._module.training))

    def end_forward(self) -> None:
        """End a forward of the module.

        Raises:
            MeshparError: on every rank alike, where this one called fewer units than the others.

        Collective where this rank has called fewer units than before.
        """
        if self._schedule is not None and self._schedule.end():
            self._meeting.meet("the end of a forward that leaves out blocks")

    def fail_forward(self) -> None:
        """End a forward in which an error was raised: gather what other ranks may wait for."""
        if self._schedule is not None:
            self._schedule.fail()

    def unit(self, name: str, unit: nn.Module, units: Units) -> None:
        """Check that all ranks call one unit together.

        Every time on a CPU, or once a forward where all call the same units in each; beside an accelerator the first
        times.

        Args:
            name: of the unit.
            unit: about to be gathered.
            units: of the module.

        Raises:
            MeshparError: on every rank alike.

        Collective: every rank calls it.
        """
        if not self._data_axes:
            return
        schedule, numbers, predicted = self._schedule, list[int](), list[nn.Module]()
        if schedule is not None:
            predicted = list(schedule.prediction)
            numbers = [_number_of(predicted, units)] if predicted else [0]
            if schedule.expects(unit):
                return
        elif not self._looks.now(name, self._device):
            return
        place = f"the forward of {name}" if name else "a forward of the module"
        alike, *same_prediction = self._meeting.meet(place, [zlib.crc32(units.trained(unit).encode()), *numbers])
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

    @property
    def meets_before_backward(self) -> bool:
        """Data ranks meet before the next backward: every time on a CPU, beside an accelerator the first times."""
        always = self._always and not runtime.queues(self._device)
        return self.differs and (always or self._backwards < Looks.FIRST)

    def backward(self) -> None:
        """Check that all ranks begin a backward together: collectives of a unit that one still calls would pair up
        with this one's.
        """
        self._meeting.meet("a backward")

    def micro_batches(self, left: int) -> None:
        """Check that all ranks are equally far in their step: 0 without a micro-batch in it here, 1 before the last
        one, 2 before others.

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

    def settings(self, optimizer: Optimizer) -> None:
        """Compare an optimizer's settings, such as its learning rate, before its step.

        Every time on a CPU. Beside an accelerator the first times; then they travel with what the next backward
        exchanges.

        Raises:
            MeshparError: on every rank alike, or where the others do not step in time.

        Collective: every rank calls it.
        """
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
        """Check that data ranks hold the same persistent buffers, which a forward may have computed from this rank's
        part of the batch.
        """
        buffers = {name: tensor for name, tensor in state(self._module) if not isinstance(tensor, nn.Parameter)}
        if not buffers:
            return
        agree = same(torch.stack([digest(buffer).to(self._device) for buffer in buffers.values()]), self.data_groups())
        if odd := [name for name, equal in zip(buffers, agree) if not equal]:
            raise MeshparError(
                f"data ranks hold different values of the buffers {', '.join(odd[:6])}, each computed from its own "
                "part of the batch, while one process computes them from the whole; sum their input over the ranks "
                "(par.data_sum), or, where ranks may differ, register the buffers with persistent=False"
            )


def models_made() -> int:
    """Return the number of models that all ranks of the open process group have made together."""
    return 0 if dist.group.WORLD is None else _NUMBERS.get(dist.group.WORLD, 0)


def own_group(number: int) -> dist.ProcessGroup:
    """Return a new group of all ranks for one model's exchanges through the hosts. Collective: every rank calls it."""
    return runtime.new_host_group(f"meshpar model {number}")


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
    """Small exchanges of all ranks, through the hosts where a process group joins them; each tells where its rank is.

    Every exchange has the same size and is a maximum, so that ranks at different places learn of it, whatever they came
    for.

    Args:
        model: the name of the module's class.
        number: of the model among those of this process, equal on all ranks: models of one class differ by it.
        own: a group for this model alone.
    """

    NUMBERS = 2

    def __init__(self, model: str, number: int, own: dist.ProcessGroup | None = None) -> None:
        self._model, self.own = f"{number} {model}", own
        self._places = {self._tag(place): place for place in PLACES}
        self._history = 0

    @classmethod
    def of(cls, module: nn.Module) -> Meeting:
        """Return the exchanges of a module to which a plan was applied last. Collective: every rank calls it."""
        number = models_made() - 1
        alone = number > 0 and dist.get_world_size() > 1 and not runtime.is_simulated()
        return cls(type(module).__name__, number, own_group(number) if alone else None)

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
        here = threading.current_thread() is threading.main_thread()
        return runtime.hosts() if here or self.own is None else self.own

    def _tag(self, place: str) -> int:
        return zlib.crc32(f"{self._model} {place}".encode())

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """See :meth:`Agreement.meet`."""
        if dist.get_world_size() == 1:
            return [True] * len(numbers)
        tag = self._tag(place)
        self._places[tag] = place
        mine = torch.tensor([tag, *numbers, *[0] * (self.NUMBERS - len(numbers))], device="cpu")
        try:
            here, *agree = _spans(mine, self.hosts)
        except RuntimeError as error:
            raise MeshparError(
                f"this rank is at {place}, and the other ranks did not come there in time: every rank must call the "
                f"module, and train and evaluate with it, equally often. The wait ended with: {first_line(error)}"
            ) from error
        if here[0] != here[1]:
            other = next((self._places[number] for number in here if number != tag and number in self._places), None)
            raise MeshparError(
                f"ranks are at different places of their loops: this rank is at {place}, another one at "
                f"{other or 'another place, or with another model'}. Every rank must run the same calls in the same "
                "order: as many batches (also in evaluation: drop or pad the rest), steps and sums. All data ranks "
                "gather and reduce a block together: call every block on every rank, or make a skipped part one block "
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
        self._both, self._work = torch.cat([mine, -mine]), None
        if dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._both, dist.ReduceOp.MAX, meeting.hosts, async_op=True)

    def check(self) -> list[int]:
        """Wait for the exchange, and return the largest mark of each parameter.

        Raises:
            MeshparError: on every rank alike.
        """
        if self._work is not None:
            self._work.wait()
        (most_counted, *most), (least_counted, *least) = self._both.view(2, -1).tolist()
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


def _number_of(predicted: Sequence[nn.Module], units: Units) -> int:
    """Return a digest of the units that a forward will call, and of the parameters that are trained in each."""
    modules: list[nn.Module] = [*units.modules]
    places = {unit: place for place, unit in enumerate(modules)}
    trained = "".join(f"{place}:{units.trained(unit)} " for unit, place in places.items())
    return 1 + zlib.crc32(f"{[places[unit] for unit in predicted]} {trained}".encode())


def _plain(value: object) -> object:
    """Return an optimizer's setting as all ranks print it; reading a tensor on a device would wait, and the device
    is each rank's own.
    """
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    if isinstance(value, Tensor):
        return "..." if runtime.queues(value.device) else value.tolist()
    return value


def _spans(mine: Tensor, hosts: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Return of each number the largest and the least of all ranks."""
    both = torch.cat([mine, -mine])
    dist.all_reduce(both, dist.ReduceOp.MAX, hosts)
    most, least = both.view(2, -1).tolist()
    return [(high, -low) for high, low in zip(most, least)]


def check_copies(module: nn.Module, mesh: DeviceMesh, axes: Sequence[str]) -> None:
    """Check that what the ranks of each axis keep whole has one gradient there.

    Raises:
        MeshparError: on every rank alike, naming the parameters.

    Collective over the axes.
    """
    for axis in axes:
        if odd := differing_gradients(module, axis, mesh.get_group(axis), mesh.device_type):
            raise MeshparError(
                f"ranks of {axis} have different gradients for parameters that each keeps whole: "
                f"{', '.join(odd[:6])}; where such a module sees a slice of the heads or features, give it the style "
                "'grad_sum' in the layout's tensor-parallel table; where it draws random numbers, draw them from a "
                "generator with the same seed on these ranks"
            )


def differing_gradients(module: nn.Module, axis: str, group: dist.ProcessGroup, device_type: str) -> list[str]:
    """Return the names of parameters that every rank of ``axis`` keeps whole and whose gradients have different norms
    there.

    A replicated parameter that sees a slice of the heads or features has a part of its gradient on each rank. A
    gradient that is zero in theory, and so is rounding noise, does not count.

    Collective over ``group``, the ranks of ``axis``, on a device of ``device_type``; parameters may be on the host.
    """
    kept = [(name, p) for name, p in module.named_parameters() if p.requires_grad and axis not in sharded_axes(p)]
    if not kept:
        return []
    norms = torch.stack([_norm(parameter).to(device_type) for _, parameter in kept])
    most, least = norms.clone(), norms.neg()
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    dist.all_reduce(least, dist.ReduceOp.MAX, group)
    odd = (most + least) > _RELATIVE * most + _FLOOR * most.max()
    return [name for (name, _), differs in zip(kept, odd.tolist(), strict=True) if differs]


def _norm(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros((), device=local_tensor(parameter).device)
    return torch.linalg.vector_norm(local_tensor(parameter.grad).float())


def digest_of(values: object, device: torch.device) -> Tensor:
    """Return a 64-bit digest of the tensors and plain values in ``values``, nested as they may be; DTensors are left
    out.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in leaves(values):
        if isinstance(leaf, DTensor):
            continue
        if isinstance(leaf, Tensor):
            total = total * FACTOR + zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            total = total * FACTOR + digest(leaf).to(device)
        elif isinstance(leaf, int | float | str):
            total = total * FACTOR + zlib.crc32(repr(leaf).encode())
    return total


def leaves(values: object, *, objects: bool = False, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield what is in lists, tuples, mappings and dataclasses, in order; with ``objects``, in attributes of other
    objects, too.

    An object that is ``around`` itself (``around`` has the ids of objects) is not entered again.
    """
    if id(values) in around:
        return
    inside: Iterable[Any]
    if isinstance(values, Tensor | str | nn.Module | type):
        yield values
        return
    if isinstance(values, Mapping):
        inside = values.values()
    elif isinstance(values, list | tuple):
        inside = values
    elif is_dataclass(values):
        inside = [getattr(values, field.name) for field in fields(values)]
    elif objects and hasattr(values, "__dict__"):
        inside = vars(values).values()
    else:
        yield values
        return
    for part in inside:
        yield from leaves(part, objects=objects, around=(*around, id(values)))
