"""Run a step over stages: forwards and backwards in the order of the schedule, the agreement of the stages on their
micro-batches and errors, and the sums that all of them get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.groups import all_gather
from meshpar._torch.pytree import tree_map_only
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.losses.token_loss import Found, Totals
from meshpar.passes.pipeline.edges import Edges
from meshpar.passes.pipeline.messages import LostError, Messages
from meshpar.passes.pipeline.portion import Portion
from meshpar.passes.pipeline.schedule import Action, actions
from meshpar.passes.pipeline.stage_checks import StageErrors, StageInputs, StageTies
from meshpar.passes.pipeline.stand_ins import tensors
from meshpar.passes.pipeline.transfers import Transfers
from meshpar.tensors.digests import digest_of_several

Micro = TypeVar("Micro")
_EXACT = (1 << 48) - 1
_WINDOW = 16  # micro-batches for each stage on which the stages of an evaluation agree at a time


@final
class Layers:
    """This rank's layers of one module, and the exchange with the ranks that have the others.

    Args:
        portion: of the model, on this rank.
        schedule: see :func:`meshpar.passes.pipeline.schedule.actions`.
        shared: parameters that several stages have -> the ranks of the group that do.
        buffers: persistent ones that all stages have.

    Attributes:
        portion: as above.
        rank: of this rank among those that have the stages.
        ranks: their number.
        edges: what the stages take and hand on.
        begins: is called with each action of a backward before it runs.
        goes_on: a forward of the step that runs has ended.
    """

    def __init__(
        self, portion: Portion, schedule: str, shared: dict[str, tuple[int, ...]], buffers: Sequence[str] = ()
    ) -> None:
        self.portion, self._schedule, self.rank, self.ranks = portion, schedule, portion.rank, portion.ranks
        self._errors = StageErrors(self._acting, portion.rank, portion.ranks)
        self.edges = Edges(portion, self._acting, self._fail)
        self._ties = StageTies(portion, shared, self._messages)
        self._inputs = StageInputs(self.edges, self.gathered, buffers)
        self._count, self._before, self.goes_on = 0, 0, False
        self._shapes = list[Any]()  # of the tensors of each micro-batch on which the stages have agreed
        self._action: Action | None = None  # that runs
        self._form: tuple[bool, list[tuple[str, tuple[int, ...], torch.dtype]]] = (False, [])  # of the last totals
        self.begins: Callable[[Action], object] = lambda action: None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that have the stages."""
        return self.portion.group

    @property
    def line(self) -> tuple[str, ...]:
        """The names of all blocks of the model."""
        return self.portion.line

    @property
    def _transfers(self) -> Transfers:
        return self.edges.transfers

    @property
    def _messages(self) -> Messages:
        return self.edges.transfers.messages

    def _fail(self, error: Exception) -> None:
        """Remember the first error of this stage, after which its ranks pass over the rest of the step."""
        if self._errors.error is None:
            self._transfers.failed = True
            self._errors.fail(error)

    def doing(self) -> str:
        """Return which stage of this rank runs or waits for which, in which action; nothing outside of a step."""
        return self._messages.waits() or self._acting()

    def _acting(self) -> str:
        """Return which stage of this rank runs, in which action."""
        if (action := self._action) is None:
            return ""
        kind = "forward" if action.kind == "F" else "backward"
        step, number = self._before < 0, self._before + action.number
        of = f"{action.number} of {self._count}" if step else f"{number}, without gradients"
        return f"stage {self.edges.turn.stage}, {kind} of micro-batch {of}"

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters that other stages have, too -> the ranks of the group that do."""
        return self._ties.shared

    @property
    def gradients_are_parts(self) -> bool:
        """A backward leaves gradients that the step goes on to add to: those of other micro-batches or stages."""
        return self._count > 1 or bool(self.shared)

    def counted_elsewhere(self) -> set[int]:
        """Return the numbers of the parameters that the norm over all stages counts on another stage."""
        elsewhere = [name for name, ranks in self.shared.items() if ranks[0] != self.rank]
        return {id(self.portion.module.get_parameter(name)) for name in elsewhere}

    def backward(
        self,
        micro_batches: Iterable[Micro],
        loss: Callable[[nn.Module, Micro], Found],
        reduces: Callable[[bool], None],
        abandon: Callable[[], None],
        totals: Totals,
        counted: Callable[[int], object] = bool,
        leaves: Callable[[list[Tensor]], object] = bool,
    ) -> None:
        """Run forwards and backwards of all micro-batches by the schedule.

        Args:
            micro_batches: of one step, the same on all stages.
            loss: ``(module, micro_batch) -> loss``, or with values to report.
            reduces: is called before each backward: whether it is the last, in which gradients are reduced.
            abandon: is called where an error ends the step after it has begun.
            totals: gets the sums, on all stages.
            counted: is called with the number of micro-batches, on which the stages have agreed.
            leaves: is called with what each forward hands on to the next stage, where its backward begins.

        Collective over the stages.
        """
        self._transfers.device, running = totals.loss.device, dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]]()
        self._begin_step(-1)
        batches = self._agree(micro_batches)
        counted(len(batches))
        before = self._ties.set_aside()
        self._inputs.begin()
        todo = actions(self._schedule, self.rank, self.ranks, len(batches), len(self.portion.chunks))
        try:
            for place, action in enumerate(todo, 1):
                self.begins(action)
                if action.kind == "F":
                    self._forth(action, partial(self._lose, batches[action.number], loss, totals))
                    turn = self.edges.turn
                    running[action.chunk, action.number] = turn.arrived, turn.left
                    if turn.stage < self.portion.last:
                        leaves(turn.left)
                else:
                    reduces(place == len(todo))
                    self._back(action, *running.pop((action.chunk, action.number)))
            self._messages.settle_all()
            used = self._share(totals)
        except BaseException:
            abandon()
            raise
        self._ties.add_up(before, used)
        self._action = None

    def _begin_step(self, before: int) -> None:
        self._before, self._action, self.goes_on = before, None, False
        self._errors.begin()
        self._transfers.begin_step()

    def _agree(self, micro_batches: Iterable[Micro]) -> list[Micro]:
        """Return the next micro-batches; refuse those that differ between stages.

        Raises:
            MeshparError: they differ, or an error ended an action on another stage since the stages agreed last.
            Exception: an error ended an action on this one, or came from ``micro_batches``.

        Collective over the stages.
        """
        batches, self.edges.inputs = list[Micro](), [[] for _ in self.portion.chunks]
        try:
            batches += micro_batches if self._errors.error is None else ()
        except Exception as error:  # noqa: BLE001 - the data of a user
            self._fail(error)
        self._count = len(batches)
        self._shapes = [tuple(tuple(leaf.shape) for leaf in tensors(batch)) for batch in batches]
        mine = 0
        if self._transfers.supposed is None and self._errors.error is None:
            mine = hash((len(batches), _digest(batches, waits=not self._transfers.late), *self._shapes))
        every = torch.empty(self.ranks, dtype=torch.int64, device="cpu")
        own = torch.tensor([mine], device="cpu")
        self._messages.exchanged(all_gather, every, own, group=self._messages.hosts)
        if self._transfers.supposed is not None:
            return batches  # numbers of simulated ranks cannot be read
        if self._errors.error is not None or every.tolist() != [mine] * self.ranks:
            self._refuse([_digest(batch) for batch in batches])
        return batches

    def _refuse(self, digests: Sequence[int]) -> None:
        """Raise this stage's error, or what another's was, or how micro-batches differ. Collective over the stages."""
        own, cause = self._errors.error, self._errors.cause
        self._transfers.failed = True  # the step, on all stages
        self._begin_step(self._before)
        every = self.gathered((cause, digests))
        if own is not None and cause:
            raise own
        if found := next((text for text, _ in every if text), ""):
            raise MeshparError(
                f"another stage of pp failed, and this one stopped at the end of the step: {found}. Correct what "
                "failed there; gradients are incomplete, so call optimizer.zero_grad() before the next step"
            )
        stages = [known for _, known in every]
        counts = list(map(len, stages))
        other = next((stage for stage in range(self.ranks) if stages[stage] != stages[0]), self.ranks - 1)
        if counts[other] != counts[0]:
            what = f"{counts[0]} micro-batches in stage 0, and {counts[other]} in stage {other}"
        else:
            pairs = enumerate(zip(stages[0], stages[other], strict=True), max(self._before, 0))
            number = next((place for place, (one, two) in pairs if one != two), 0)
            what = f"stage 0 and stage {other} have different micro-batches (number {number})"
        raise MeshparError(f"{what}; give all ranks of pp the same micro-batches, those of par.data_rank")

    def _try(self, run: Callable[[], object], pass_over: Callable[[], object]) -> None:
        """Run an action. Where an error ends it, or ended one before it, exchange what the action has yet to: so the
        other stages do not wait, and learn of the error at the end of the step.
        """
        try:
            if self._errors.error is None:
                run()
        except LostError:
            raise
        except Exception as error:
            if self._transfers.supposed is not None:  # nobody waits for a simulated rank
                raise
            self._fail(error)
        if self._errors.error is not None:
            pass_over()

    def _lose(self, batch: Micro, loss: Callable[[nn.Module, Micro], Found], totals: Totals) -> None:
        """Run a forward of training, whose last stage keeps the loss as what leaves it."""
        edges, turn = self.edges, self.edges.turn
        value = edges.forward(loss, batch)
        if turn.stage == self.portion.last:
            turn.left = [value[0] if isinstance(value, tuple) else value]
        if not edges.calls or not turn.left or not isinstance(turn.left[0], Tensor):
            raise MeshparError(
                f"loss(module, micro_batch) returned a {type(value).__name__} and called the module {edges.calls} "
                "times; call it once and return a scalar tensor, or one and values to report"
            )
        if turn.stage == self.portion.last:
            totals.add(value)
        self.goes_on = True

    def _share(self, totals: Totals) -> list[bool]:
        """Give all stages the sums of the last one; return of each shared parameter whether a stage has used it."""
        has = self.rank == self.ranks - 1
        form = totals.form() if has else self._form
        inputs = self._inputs.digests(totals.loss)  # the others' losses are 0
        flags = [float(form != self._form), float(self._errors.error is not None), *self._ties.used()]
        noted = [totals.loss, *(torch.full_like(totals.loss, flag) for flag in flags), *inputs]
        mine = torch.stack([number.double() for number in noted])
        numbers = mine.new_empty(self.ranks * len(mine))
        self._messages.exchanged(all_gather, numbers, mine, group=self.group)
        numbers = numbers.view(self.ranks, -1)
        changed, failed, *used = self._flags(flags, numbers)
        if failed:
            self._refuse(())
        self._inputs.compare(numbers[:, 1 + len(flags) :])
        if changed:
            forms = [form]
            device = self._transfers.device
            dist.broadcast_object_list(forms, group=self.group, group_src=self.ranks - 1, device=device)
            self._form = forms[0]
        flat = totals.flat()
        if self._form[1]:
            if not has:
                flat = flat.new_empty(sum(math.prod(shape) for _, shape, _ in self._form[1]))
            dist.broadcast(flat, group=self.group, group_src=self.ranks - 1)
        totals.take(numbers[:, 0].sum().to(totals.loss.dtype), self._form, flat)
        return used if self._transfers.supposed is None else [True] * len(used)

    def _flags(self, mine: list[float], numbers: Tensor) -> list[bool]:
        """Return of each flag whether a stage has it: from the ``numbers`` of all, or by the hosts beside a device."""
        every = numbers[:, 1 : 1 + len(mine)]
        if self._transfers.late:
            every = torch.empty(self.ranks * len(mine), device="cpu")
            self._messages.exchanged(all_gather, every, torch.tensor(mine, device="cpu"), group=self._messages.hosts)
            every = every.view(self.ranks, -1)
        return [False] * len(mine) if self._transfers.supposed is not None else every.bool().any(0).tolist()

    @torch.no_grad()
    def forward(
        self,
        micro_batches: Iterable[Micro],
        function: Callable[[nn.Module, Micro], Any],
        device: torch.device,
        counted: Callable[[int], object] = bool,
    ) -> list[Any]:
        """Run forwards alone; return what ``function`` returns for each micro-batch, on all stages.

        Collective over the stages.
        """
        found, last = list[Any](), len(self.portion.chunks) - 1
        self._transfers.device, given = device, (batch for batch in micro_batches)
        self._begin_step(0)

        def run(batch: Micro) -> None:
            value = self.edges.forward(function, batch)
            found.extend([value] if self.edges.turn.chunk == last else [])

        while batches := self._agree(islice(given, _WINDOW * self.ranks)):
            counted(len(batches))
            numbered = iter(enumerate(batches))
            while group := list(islice(numbered, self.ranks if last else 1)):
                for chunk in range(last + 1):
                    for number, batch in group:
                        self._forth(Action("F", number, chunk), partial(run, batch))
            self._before += len(batches)
        counted(0)
        self._messages.settle_all()
        self._action = None
        found = tree_map_only(Tensor, Tensor.cpu, found)
        values = [found]
        dist.broadcast_object_list(values, group=self.group, group_src=self.ranks - 1, device=device)
        return tree_map_only(Tensor, partial(Tensor.to, device=device), values[0])

    def gathered(self, mine: Any) -> list[Any]:
        """Return what each stage has, the first stage's first. Collective over the stages."""
        every = [None] * self.ranks
        dist.all_gather_object(every, mine, group=self.group)
        return every

    def _forth(self, action: Action, run: Callable[[], object]) -> None:
        """Run a forward, which leaves what it took and what it has handed on."""
        self._action = action
        self.edges.begin(action.chunk, action.number, self._shapes[action.number])
        self._try(run, self.edges.pass_forth)

    def _back(self, action: Action, arrived: list[Tensor], left: list[Tensor]) -> None:
        """Run a backward of what a forward took and handed on."""
        self._action = action
        self.edges.begin_back(action.chunk, action.number, arrived, left)
        self._try(self.edges.backward, self.edges.pass_back)


def _digest(batches: object, *, waits: bool = True) -> int:
    """Return a number that differs where tensors in ``batches`` have other bytes: one look for each kind.

    Args:
        batches: nested values.
        waits: also read those on a device.
    """
    kinds = dict[Any, list[Tensor]]()
    for leaf in tensors(batches):
        if waits or runtime.on_host(leaf.device):
            kinds.setdefault((leaf.device, leaf.dtype), []).append(leaf.detach().reshape(-1))
    return int(digest_of_several(map(torch.cat, kinds.values())))
