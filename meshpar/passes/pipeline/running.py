"""Run a step over stages: actions in the order of the schedule, agreement on micro-batches and errors, and sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.groups import all_gather
from meshpar._torch.tensors import tensor_leaves, tree_map_only
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.losses.token_loss import Form, Found, Totals
from meshpar.passes.pipeline.edges import Edges
from meshpar.passes.pipeline.messages import LostError, StageMessages, Transfers
from meshpar.passes.pipeline.portion import Portion
from meshpar.passes.pipeline.schedule import Action, actions
from meshpar.passes.pipeline.stage_checks import StageErrors, StageInputs, StageTies
from meshpar.step.moment import HandsOn
from meshpar.tensors.digests import digest_of_several

Micro = TypeVar("Micro")
_WINDOW = 16  # micro-batches for each stage on which the stages of an evaluation agree at a time


@final
class Layers(HandsOn):
    """This rank's layers of one module, and the exchange with the ranks that have the others."""

    def __init__(
        self, portion: Portion, schedule: str, shared: dict[str, tuple[int, ...]], buffers: Sequence[str] = ()
    ) -> None:
        self.portion, self._schedule, self.rank, self.ranks = portion, schedule, portion.rank, portion.ranks
        self._errors = StageErrors(portion, self._acting)
        self.edges = Edges(portion, self._acting, self._fail)
        self.ties = StageTies(portion, shared, self._messages)
        self._inputs = StageInputs(self.edges, self.gather, buffers)
        # micro-batches of this step, of an evaluation before those now agreed on (-1: a step), and whether a forward of
        # the step that runs has ended
        self._count, self._before, self.goes_on = 0, 0, False
        # of the tensors of each micro-batch on which the stages have agreed: their shapes, and numbers and versions
        self._agreed = list[tuple[Any, dict[int, tuple[int, int]]]]()
        self._action: Action | None = None  # that runs
        self._form: Form = (False, torch.float32, [])  # of the last totals
        # gets each action of a step before it runs
        self.begins: Callable[[Action], object] = lambda action: None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that have the stages."""
        return self.portion.group

    @property
    def _transfers(self) -> Transfers:
        return self.edges.transfers

    @property
    def _messages(self) -> StageMessages:
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
    def gradients_are_parts(self) -> bool:
        """A backward leaves gradients that the step goes on to add to: those of other micro-batches or stages."""
        return self._count > 1 or bool(self.ties.shared)

    @property
    def ends_loss(self) -> bool:
        """The loss that runs ends with the module's call, on all stages but the last."""
        return self.edges.runs and self.edges.turn.stage < self.portion.last

    def handed_on(self, output: object) -> object:
        turn = self.edges.turn
        return turn.left if self.edges.runs and turn.stage < self.portion.last else output

    def counted_elsewhere(self) -> set[int]:
        """Return the numbers of the parameters that the norm over all stages counts on another stage."""
        elsewhere = [name for name, ranks in self.ties.shared.items() if ranks[0] != self.rank]
        return {id(self.portion.module.get_parameter(name)) for name in elsewhere}

    def backward(
        self,
        micro_batches: Iterable[Micro],
        loss: Callable[[nn.Module, Micro], Found],
        reduces: Callable[[bool], None],
        abandon: Callable[[], None],
        totals: Totals,
        counted: Callable[[int], object] = bool,
    ) -> None:
        """Run forwards and backwards of all micro-batches by the schedule; ``totals`` gets the sums. Collective."""
        # ``reduces`` learns before each backward whether it is the last, ``counted`` the number of micro-batches;
        # ``abandon`` is called where an error ends the step
        running = dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]]()
        self._transfers.use(totals.loss.device)
        self._begin_step(-1)
        batches = self._agree(micro_batches)
        counted(len(batches))
        before = self.ties.set_aside()
        self._inputs.begin()
        todo = actions(self._schedule, self.rank, self.ranks, len(batches), len(self.portion.chunks))
        try:
            for count, action in enumerate(todo, 1):
                self.begins(action)
                if action.kind == "F":
                    self._run_forward(action, partial(self._lose, batches[action.number], loss, totals))
                    running[action.chunk, action.number] = self.edges.turn.arrived, self.edges.turn.left
                else:
                    self._action = action
                    arrived, left = running.pop((action.chunk, action.number))
                    self.edges.begin_back(action.chunk, action.number, arrived, left)
                    reduces(count == len(todo))
                    self._try(self.edges.backward, self.edges.pass_back)
            self._messages.settle_all()
            self._try(self._errors.counts.refuse, bool)
            used = self._share(totals)
        except BaseException:
            abandon()
            raise
        finally:
            self.edges.hands_back()
        self.ties.add_up(before, used)
        self._action = None
        self._errors.counts.trust()

    def _begin_step(self, before: int) -> None:
        self._before, self._action, self.goes_on = before, None, False
        self._errors.begin()
        self._transfers.begin_step()

    def _agree(self, micro_batches: Iterable[Micro]) -> list[Micro]:
        """Return the next micro-batches; refuse those that differ, and errors since the last ones. Collective."""
        batches, self.edges.inputs = list[Micro](), [[] for _ in self.portion.chunks]
        try:
            batches += micro_batches if self._errors.error is None else ()
        except Exception as error:  # noqa: BLE001 - the data of a user
            self._fail(error)
        self._count = len(batches)
        every_leaf = [tensor_leaves(batch) for batch in batches]
        shapes = [tuple([tuple(leaf.shape) for leaf in leaves]) for leaves in every_leaf]
        # beside a device the bytes there are not compared
        self._agreed = [
            (form, {} if self._transfers.late else _versions(leaves))
            for form, leaves in zip(shapes, every_leaf, strict=True)
        ]
        number = 0
        if self._transfers.supposed is None and self._errors.error is None:
            digest = _digest(chain.from_iterable(every_leaf), waits=not self._transfers.late)
            number = hash((len(batches), digest, *shapes))
        every = torch.empty(self.ranks, dtype=torch.int64, device="cpu")
        numbers = torch.tensor([number], device="cpu")
        self._messages.exchanged(all_gather, every, numbers, group=self._messages.hosts)
        if self._transfers.supposed is not None:
            return batches  # numbers of simulated ranks cannot be read
        if self._errors.error is not None or every.tolist() != [number] * self.ranks:
            self._refuse(list(map(_digest, every_leaf)))
        return batches

    def _refuse(self, digests: Sequence[int]) -> None:
        """Raise this stage's error, or what another's was, or how micro-batches differ. Collective over the stages."""
        error, cause = self._errors.error, self._errors.cause
        self._transfers.failed = True  # the step, on all stages
        self._begin_step(self._before)
        self._errors.counts.doubt()
        every = self.gather((cause, digests))
        if error is not None and cause:
            raise error
        if elsewhere := next((text for text, _ in every if text), ""):
            raise MeshparError(
                f"another stage of pp failed, and this one stopped at the end of the step: {elsewhere}. Correct what "
                "failed there; gradients are incomplete, so call optimizer.zero_grad() before the next step"
            )
        stages = [stage for _, stage in every]
        counts = list(map(len, stages))
        other = next((stage for stage in range(self.ranks) if stages[stage] != stages[0]), self.ranks - 1)
        if counts[other] != counts[0]:
            what = f"{counts[0]} micro-batches in stage 0, and {counts[other]} in stage {other}"
        else:
            pairs = enumerate(zip(stages[0], stages[other], strict=True), max(self._before, 0))
            number = next((number for number, (one, two) in pairs if one != two), 0)
            what = f"stage 0 and stage {other} have different micro-batches (number {number})"
        raise MeshparError(f"{what}; give all ranks of pp the same micro-batches, those of par.data_rank")

    def _try(self, run: Callable[[], object], pass_over: Callable[[], object]) -> None:
        """Run an action; after an error exchange what it has yet to, so that other stages do not wait until the end."""
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
        totals.close()
        has = self.rank == self.ranks - 1
        form = totals.form() if has else self._form
        inputs = self._inputs.digests(totals.loss)  # the others' losses are 0
        flags = [float(form != self._form), float(self._errors.error is not None), *self.ties.used()]
        noted = [totals.loss, *(torch.full_like(totals.loss, flag) for flag in flags), *inputs]
        row = torch.stack([number.double() for number in noted])
        numbers = row.new_empty(self.ranks * len(row))
        self._messages.exchanged(all_gather, numbers, row, group=self.group)
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
        _, _, values = self._form
        if values:
            if not has:
                flat = flat.new_empty(sum(math.prod(shape) for _, shape, _ in values))
            dist.broadcast(flat, group=self.group, group_src=self.ranks - 1)
        totals.take(numbers[:, 0].sum(), self._form, flat)
        return used if self._transfers.supposed is None else [True] * len(used)

    def _flags(self, flags: list[float], numbers: Tensor) -> list[bool]:
        """Return of each flag whether a stage has it: from the ``numbers`` of all, or by the hosts beside a device."""
        every = numbers[:, 1 : 1 + len(flags)]
        if self._transfers.late:
            every = torch.empty(self.ranks * len(flags), device="cpu")
            self._messages.exchanged(all_gather, every, torch.tensor(flags, device="cpu"), group=self._messages.hosts)
            every = every.view(self.ranks, -1)
        return [False] * len(flags) if self._transfers.supposed is not None else every.bool().any(0).tolist()

    @torch.no_grad()
    def forward(
        self,
        micro_batches: Iterable[Micro],
        function: Callable[[nn.Module, Micro], Any],
        device: torch.device,
        counted: Callable[[int], object] = bool,
    ) -> list[Any]:
        """Run forwards alone; return what ``function`` returns for each micro-batch. Collective over the stages."""
        values, last = list[Any](), len(self.portion.chunks) - 1
        batches_left = iter(micro_batches)
        self._transfers.use(device)
        self._begin_step(0)

        def run(batch: Micro) -> None:
            value = self.edges.forward(function, batch)
            values.extend([value] if self.edges.turn.chunk == last else [])

        try:
            while batches := self._agree(islice(batches_left, _WINDOW * self.ranks)):
                counted(len(batches))
                numbered = iter(enumerate(batches))
                while group := list(islice(numbered, self.ranks if last else 1)):
                    for chunk in range(last + 1):
                        for number, batch in group:
                            self._run_forward(Action("F", number, chunk), partial(run, batch))
                self._try(self._errors.counts.refuse, bool)
                self._before += len(batches)
            counted(0)
            self._messages.settle_all()
        finally:
            self.edges.hands_back()
        self._action = None
        shared = [tree_map_only(Tensor, Tensor.cpu, values)]
        dist.broadcast_object_list(shared, group=self.group, group_src=self.ranks - 1, device=device)
        return tree_map_only(Tensor, partial(Tensor.to, device=device), shared[0])

    def gather(self, value: Any) -> list[Any]:
        """Return what each stage has, the first stage's first. Collective over the stages."""
        every = [None] * self.ranks
        dist.all_gather_object(every, value, group=self.group)
        return every

    def _run_forward(self, action: Action, run: Callable[[], object]) -> None:
        """Run a forward, which leaves what it took and what it has handed on."""
        self._action = action
        self.edges.begin(action.chunk, action.number, *self._agreed[action.number])
        self._try(run, self.edges.pass_forth)


def _versions(leaves: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
    """Return by ``id`` the number and the version of each tensor that counts its versions."""
    return {id(leaf): (number, leaf._version) for number, leaf in enumerate(leaves) if not leaf.is_inference()}


def _digest(leaves: Iterable[Tensor], *, waits: bool = True) -> int:
    """Return a number that differs where tensors have other bytes; ``waits``: also on a device."""
    kinds = dict[Any, list[Tensor]]()
    for leaf in leaves:
        if waits or runtime.on_host(leaf.device):
            kinds.setdefault((leaf.device, leaf.dtype), []).append(leaf.detach().reshape(-1))
    return int(digest_of_several(map(torch.cat, kinds.values())))
