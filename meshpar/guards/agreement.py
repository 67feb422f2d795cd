"""Compare ranks: batches, random states and losses of those that share samples, gradients of those that keep copies."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshpar._torch.autograd import in_backward
from meshpar._torch.tensors import BatchNorm
from meshpar._torch.units import Units
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, ParallelError
from meshpar.core.passes import Role
from meshpar.exchange.ranks import Largest, Looks, Ranks, same, stages_of
from meshpar.passes.experts.routing import DividedModules
from meshpar.passes.tensor import random
from meshpar.passes.tensor.random import draws_random
from meshpar.state.initialize import state
from meshpar.step.moment import Guard, Guarded
from meshpar.tensors.digests import digest, digest_of
from meshpar.tensors.placements import local_tensor, sharded_axes

_SAME_BATCH = (
    "they compute one sample together, so pass par.data_rank and par.data_size to the sampler: "
    "DistributedSampler(data, num_replicas=par.data_size, rank=par.data_rank)"
)


@final
class Agreement(Guard):
    """The comparisons between the ranks of one parallel module while it trains."""

    def __init__(self, guarded: Guarded) -> None:
        module, resolved = guarded.module, guarded.resolved
        self._guarded, self._always = guarded, guarded.guards == "always"
        held_mesh, whole_mesh = guarded.meshes[resolved.held], guarded.meshes[resolved.spec]
        self._data = {axis: held_mesh.get_group(axis) for axis in resolved.reduced}
        self._same = {axis: held_mesh.get_group(axis) for axis in resolved.same}
        # ranks with the same samples and positions
        self._alike = {} if resolved.splits_sequence else self._same
        # ranks with different positions of the same samples
        self._split = {axis: whole_mesh.get_group(axis) for axis in resolved.divided(Role.POSITIONS)}
        # ranks whose blocks draw the same random numbers outside of what is split
        self._draws = (resolved.layout.dropout or draws_random(module)) and not resolved.splits_sequence
        stages = stages_of(resolved)
        # Stages keep their units in one order. Else ranks whose forwards call the same units each time need not meet
        # before each unit on a CPU, where ranks that exchange more inside of a unit compute the same there.
        self._ordered = bool(stages)
        self._predicts = self._always and bool(self._data) and not stages and _predictable(guarded)
        self._order: UnitOrder | None = None
        self._looks = Looks(always=self._always)
        ranks = guarded.facts.find(Ranks)
        assert ranks is not None, "every plan with guards has them"
        self._ranks = ranks

    def agree(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Check that all ranks are at one place, each time on a CPU, else at first and in evaluation. Collective."""
        if self._looks.now(place, self._guarded.device) or (self._always and not self._guarded.module.training):
            return self._ranks.meet(place, numbers)
        return [True] * len(numbers)

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare arguments where gradients are wanted, and expect the units to come. Collective over ``same``."""
        device = self._guarded.device
        if torch.is_grad_enabled() and self._same and self._looks.now("the batch of a forward", device):
            numbers = [digest_of((args, kwargs), device)]
            if self._draws and self._guarded.module.training:
                state_here = runtime.among_real_ranks(partial(random.digest, device))
                numbers.append(numbers[0] if state_here is None else state_here)
            for axis, group in self._same.items():
                agree = same(torch.stack(numbers), [group])
                if not agree[0]:
                    raise MeshparError(f"ranks of {axis} got different batches; {_SAME_BATCH}")
                if not all(agree):
                    raise MeshparError(
                        f"ranks of {axis} have different random states, and the model draws random numbers where they "
                        "must be the same; call par.manual_seed(seed) before training"
                    )
        if self._predicts and self._order is None and runtime.over_hosts(device):
            self._order = UnitOrder(self._guarded.units.gather)
        if self._order is not None:
            self._order.begin((torch.is_grad_enabled(), self._guarded.module.training))

    def before_split(self, batch: object) -> None:
        """Compare the batches of ``par.split``: on a CPU each time, else at first. Collective over positions."""
        if not self._looks.now("the batch of par.split", self._guarded.device):
            return
        for axis, group in self._split.items():
            if not all(same(digest_of(batch, self._guarded.device)[None], [group])):
                raise MeshparError(f"ranks of {axis} split different batches; {_SAME_BATCH}")

    def after_forward(self, output: object) -> None:
        """End a forward. Collective where this rank has called fewer units than before, which is refused."""
        if self._order is not None and self._order.end():
            self._ranks.meet("the end of a forward that leaves out blocks")

    def after_error(self) -> None:
        """End a forward in which an error was raised: gather what other ranks may wait for."""
        if self._order is not None:
            self._order.end(failed=True)

    def before_unit(self, name: str, unit: nn.Module) -> None:
        """Check that all ranks call one unit: on a CPU each time, or once a forward if predicted. Collective."""
        if not self._data or in_backward():
            return
        order, numbers, predicted = self._order, list[int](), list[nn.Module]()
        if order is not None:
            predicted = list(order.prediction)
            numbers = [_number_of(predicted, self._guarded.units)] if predicted else [0]
            if order.expects(unit):
                return
        elif not (self._looks.first(name) if self._ordered else self._looks.now(name, self._guarded.device)):
            return
        meeting_place = f"the forward of {name}" if name else "a forward of the module"
        trained = zlib.crc32(self._guarded.units.trained(unit).encode())
        alike, *same_prediction = self._ranks.meet(meeting_place, [trained, *numbers])
        if order is not None and predicted and all(same_prediction):
            order.follow(predicted)
        if not alike:
            raise MeshparError(
                f"data ranks train different parameters in {name or 'the outermost block'}: requires_grad differs; "
                "set it alike on every rank"
            )

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Check that data ranks begin a backward together, and ranks with the same positions from one loss."""
        device = self._guarded.device
        if self._data and self._looks.next("a backward", device) and reaches():
            self._ranks.meet("a backward")
        if self._alike and self._looks.next("a loss", device) and reaches():
            self._looks.first("a loss")
            compare_losses(roots, self._alike, device)

    def before_micro_batch(self, left: int) -> None:
        """Check that all ranks are equally far in their step. Collective."""
        if not all(self.agree("a micro-batch of par.accumulate", [left])):
            here = ("has none", "is at its last", "has more")[left]
            raise MeshparError(
                f"ranks have different numbers of micro-batches in one step (this rank {here}), so that some would "
                "wait forever; pass the same number to par.accumulate on every rank, for instance by dropping the "
                "rest of an epoch"
            )
        self._ranks.counted(left)

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        """Compare settings of the module's optimizer: on a CPU each time, else at first, then by counts. Collective."""
        if not trains:
            return
        listed = [
            f"{key}={_plain(value)}"
            for group in optimizer.param_groups
            for key, value in sorted(group.items())
            if isinstance(value, int | float | str | tuple | Tensor)
        ]
        number = zlib.crc32(" ".join(listed).encode())
        if not all(self.agree("an optimizer's step", [number])):
            raise MeshparError(
                f"ranks step {type(optimizer).__name__} with different settings, this rank with "
                f"{', '.join(dict.fromkeys(listed))}; set them alike on every rank: give a schedule that reads a loss "
                "the mean over all ranks, par.data_sum(loss) / par.loss_size"
            )
        self._ranks.counted(number)

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Compare gradients and buffers of which ranks have copies, after the first backwards. Collective."""
        if self._looks.first("a backward"):
            check_copies(self._guarded.module, self._same, self._guarded.device.type)
            if self._data:
                self._same_buffers()

    def _same_buffers(self) -> None:
        """Check that data ranks hold the same persistent buffers; a forward may compute them from its part."""
        buffers = {name: tensor for name, tensor in state(self._guarded.module) if not isinstance(tensor, nn.Parameter)}
        if not buffers:
            return
        digests = torch.stack([digest(buffer).to(self._guarded.device) for buffer in buffers.values()])
        agree = same(digests, self._data.values())
        if odd := [name for name, equal in zip(buffers, agree) if not equal]:
            raise MeshparError(
                f"data ranks hold different values of the buffers {', '.join(odd[:6])}, each computed from its own "
                "part of the batch, while one process computes them from the whole; sum their input over the ranks "
                "(par.data_sum), or register the buffers with persistent=False where ranks may differ; or calibrate "
                "observers of quantization before plan.apply, and then module.apply(disable_observer)"
            )


_ROUNDINGS, _QUEUED_ROUNDINGS = 64, 1024
"""How far losses may differ, in units of their dtype's rounding: an accelerator adds in another order each time."""
_LEAST = 1e-2
"""How large a loss counts at least: one whose terms cancel to about zero has the rounding of its terms."""


def compare_losses(roots: Iterable[object], groups: Mapping[str, dist.ProcessGroup], device: torch.device) -> None:
    """Compare what a backward is about to start from on ranks of the same positions. Collective over ``groups``."""
    plain = [
        root.detach()
        for root in roots
        if isinstance(root, Tensor) and not isinstance(root, DTensor) and root.numel() == 1
    ]
    kind = max((loss.dtype for loss in plain), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    total = torch.zeros((), device=device, dtype=torch.float64)
    for loss in plain:
        total += loss.reshape(()).to(device, torch.float64).nan_to_num(-1e300)
    allowed = torch.finfo(kind).eps * (_QUEUED_ROUNDINGS if runtime.queues(device) else _ROUNDINGS)
    for axis, group in groups.items():
        exchanged = Largest(torch.stack([total, -total]), group).read()
        high, negated = runtime.among_real_ranks(exchanged.tolist) or (0.0, 0.0)
        low = -negated
        if high != low and not high - low <= allowed * max(abs(high), abs(low), _LEAST):
            raise ParallelError(
                f"ranks of {axis} compute the same samples together, but their backward starts from different "
                f"losses: from {low:.6g} to {high:.6g}, here {total.item():.6g}. Give collectives of your own in "
                "a loss or a hook group=par.data_group, whose ranks have different samples. Where a value made "
                "inside of a split module entered the loss by another way than the module's output (an attribute, "
                "a list, a hook), each rank has that of its own heads or features; leave that module and the "
                "layers in it whole, TensorParallel(styles={'blocks.*.attn': None}), or draw random numbers of the "
                "loss alike on these ranks"
            )


_RELATIVE, _FLOOR = 1e-2, 1e-4


def check_copies(module: nn.Module, groups: Mapping[str, dist.ProcessGroup], device_type: str) -> None:
    """Check that what the ranks of each axis keep whole has one gradient there. Collective over the axes."""
    for axis, group in groups.items():
        if odd := differing_gradients(module, axis, group, device_type):
            raise MeshparError(
                f"ranks of {axis} have different gradients for parameters that each keeps whole: "
                f"{', '.join(odd[:6])}; give collectives of your own in a loss or a hook group=par.data_group, whose "
                "ranks have different samples; where such a module sees a slice of the heads or features, give it the "
                "style 'grad_sum' in the layout's tensor-parallel table; where it draws random numbers, draw them from "
                "a generator with the same seed on these ranks"
            )


def differing_gradients(module: nn.Module, axis: str, group: dist.ProcessGroup, device_type: str) -> list[str]:
    """Return whole parameters whose gradients' norms differ over ``group`` by more than rounding. Collective."""
    whole_parameters = [
        (name, p) for name, p in module.named_parameters() if p.requires_grad and axis not in sharded_axes(p)
    ]
    if not whole_parameters:
        return []
    parts = [local_tensor(p).new_zeros(1) if p.grad is None else local_tensor(p.grad) for _, p in whole_parameters]
    norms = torch.stack([torch.linalg.vector_norm(part.float()).to(device_type) for part in parts])
    largest, negated = Largest(torch.cat([norms, -norms]), group).read().view(2, -1)
    odd = (largest + negated) > _RELATIVE * largest + _FLOOR * largest.max()
    return [name for (name, _), differs in zip(whole_parameters, odd.tolist(), strict=True) if differs]


def _predictable(guarded: Guarded) -> bool:
    """Return whether ranks that exchange more than weights in a forward call the same units: only those of ``tp``."""
    resolved, module = guarded.resolved, guarded.module
    divided = guarded.facts.find(DividedModules) is not None or resolved.divided(Role.POSITIONS)
    norms = any(isinstance(child, BatchNorm) for child in module.modules())
    return not divided and not resolved.splits_sequence and not norms


def _number_of(predicted: Sequence[nn.Module], units: Units) -> int:
    """Return a digest of the units that a forward will call, and of the parameters that are trained in each."""
    numbers: dict[Any, int] = {unit: number for number, unit in enumerate(units.modules)}
    trained = "".join(f"{number}:{units.trained(unit)} " for unit, number in numbers.items())
    return 1 + zlib.crc32(f"{[numbers[unit] for unit in predicted]} {trained}".encode())


def _plain(value: object) -> object:
    """Return an optimizer's setting as all ranks print it, without reading a tensor on a device."""
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    if isinstance(value, Tensor):
        return "..." if runtime.queues(value.device) else value.tolist()
    return value


Kind = tuple[bool, bool]
"""Two flags of a forward: it wants gradients; the module trains."""


@final
@dataclass(slots=True)
class _Habit:
    """The units of the last forwards of one kind, how many called them, and how many must before they are predicted."""

    order: tuple[nn.Module, ...] = ()
    times: int = 0
    needed: int = 2


@final
class UnitOrder:
    """The order in which forwards of one module call its units; ``gather`` gathers and frees one, as a forward does."""

    def __init__(self, gather: Callable[[nn.Module], None]) -> None:
        self._gather = gather
        self._habits: dict[Kind, _Habit] = {}
        self._habit: _Habit | None = None  # of the forward that runs
        self._called: list[nn.Module] = []
        self._expected: Sequence[nn.Module] | None = None
        # Simulated ranks call the units that all of them expect.
        self._foreseen = runtime.among_real_ranks(lambda: False) is None

    def begin(self, kind: Kind) -> None:
        """Begin a forward of the outermost module."""
        self._habit, self._expected = self._habits.setdefault(kind, _Habit()), None
        self._called.clear()

    @property
    def prediction(self) -> Sequence[nn.Module]:
        """The units that the forward that begins will call; empty where they are not known, or one has been called."""
        habit = self._habit
        return () if habit is None or self._called or habit.times < habit.needed else habit.order

    def follow(self, order: Sequence[nn.Module]) -> None:
        """Expect these units, as all ranks do; the forward that runs has called none yet."""
        self._expected = order

    def expects(self, unit: nn.Module) -> bool:
        """Return whether all ranks call this unit now, as predicted; else gather the predicted rest, collectively."""
        if self._habit is None:  # a unit is called from outside of the module
            return False
        number = len(self._called)
        self._called.append(unit)
        if self._expected is None:
            return self._foreseen and number > 0
        if number < len(self._expected) and self._expected[number] is unit:
            return True
        self._leave(number)
        return False

    def end(self, *, failed: bool = False) -> bool:
        """End a forward; return whether ranks must meet, because it called too few units. Collective where it did."""
        habit, number = self._habit, len(self._called)
        short = habit is not None and self._expected is not None and number < len(self._expected)
        if short:
            self._leave(number)
        if habit is not None and not failed:
            order = tuple(self._called)
            habit.order, habit.times = order, habit.times + 1 if order == habit.order else 1
        self._habit = self._expected = None
        return short

    def _leave(self, number: int) -> None:
        """Gather what other ranks still expect from a number on, and predict later from now on."""
        habit, expected, self._expected = self._habit, self._expected, None
        assert habit is not None and expected is not None, "only a predicted order can be left"
        habit.times, habit.needed = 0, 2 * habit.needed
        for unit in expected[number:]:
            self._gather(unit)
