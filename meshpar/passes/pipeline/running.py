"""Run a stage: the model's own forward, with what comes from the stage before and what goes to the stage behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshpar._torch.calls import eager, enter_by
from meshpar._torch.groups import all_gather
from meshpar.core.errors import MeshparError, brief
from meshpar.loss import Found, Totals
from meshpar.passes.installed import set_forward
from meshpar.passes.pipeline.cuts import Result
from meshpar.passes.pipeline.messages import (
    BACK,
    DTYPES,
    FAILED,
    FORTH,
    HEADER_SIZE,
    LostError,
    Messages,
    all_fail,
    failed_alone,
    form_of,
    header_of,
    origin_of,
    packed,
    room_for,
    shape_of,
    tell_alone,
    unpacked,
)
from meshpar.passes.pipeline.schedule import Action, actions
from meshpar.passes.pipeline.stand_ins import BlockStandIn, Carried, TailStandIn, tensors, with_result
from meshpar.placements import local_tensor
from meshpar.same_values import digest_of_several

Micro = TypeVar("Micro")
_WINDOW = 16  # micro-batches for each stage on which the stages of an evaluation agree at a time


class _StageEndsError(BaseException):
    """Leave a loss function whose module has handed its value to the next stage; no error, and nothing to catch."""


class _FailedBeforeError(Exception):
    """Raised in a micro-batch that an error ended on an earlier stage, which tells of it at the end of the step."""


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks of one rank that follow one another.

    Attributes:
        blocks: modules, in the order of their calls.
        before: the stand-in of the block before the first of them, in whose place the value comes that another stage
            hands on: what the model computes between two blocks is then computed by the second one's stage.
        takes: what comes beside that value.
        gives: what goes to the next stage beside the value of the last block.
    """

    blocks: tuple[nn.Module, ...]
    before: nn.Module | None
    takes: tuple[Result, ...]
    gives: tuple[Result, ...]


@final
class Layers:
    """This rank's layers of one module, and the exchange with the ranks that have the others.

    Args:
        module: the outermost module.
        chunks: of this rank's blocks: stage ``chunk * ranks + rank`` of the model.
        tail: this rank's modules behind the last block.
        group: the ranks that have the stages.
        schedule: see :func:`meshpar.passes.pipeline.schedule.actions`.
        carried: the form of the value that passes from block to block, which the stand-ins return.
        shared: parameters that other stages have, too -> the ranks of the group that do.

    Attributes:
        begins: is called with each action of a backward before it runs.
        supposed: of a simulated rank.
    """

    def __init__(
        self,
        module: nn.Module,
        chunks: Sequence[Chunk],
        tail: Sequence[nn.Module],
        group: dist.ProcessGroup,
        schedule: str,
        carried: Carried,
        shared: dict[str, tuple[int, ...]],
    ) -> None:
        self._module, self._chunks, self._tail, self._schedule = module, chunks, tail, schedule
        self.group, self._carried, self.shared = group, carried, shared
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._messages = Messages(group, len(chunks), self.doing)
        self._runs, self._device = False, torch.device("cpu")
        self._count = self._calls = self._before = 0
        self._arrived = list[Tensor]()  # the value that the stage before has handed on, and what came beside it
        self._left = list[Tensor]()  # likewise to the next stage; the loss on the last one
        self._results = dict[Result, Tensor]()  # of the forward that runs, which later stages need
        self._header: list[int] = []
        self._forms: list[Any] = []  # of the micro-batches on which the stages have agreed
        self._key: Any = None  # the form of the one that runs
        self.goes_on = False  # a forward of the step that runs has ended
        self._takes = self._sends = False  # the action that runs has something to receive, to send
        self._error: Exception | None = None  # ended an action of this step, of which the other stages do not know yet
        self._cause = ""  # where and what it was, where it is this stage's own
        # Headers of the last values that this rank has sent and got of micro-batches of one form, by their results.
        self._known: dict[bool, dict[Any, list[int]]] = {True: {}, False: {}}
        self._action: Action | None = None  # that runs
        self._form: tuple[bool, list[tuple[str, tuple[int, ...], torch.dtype]]] = (False, [])  # of the last totals
        self.begins: Callable[[Action], object] = lambda action: None
        # Headers of what a simulated rank gets, by their results, as the stages before have filled them.
        self.supposed: dict[Result | None, list[int]] | None = None

    @property
    def _chunk(self) -> int:
        """The chunk that runs."""
        return 0 if self._action is None else self._action.chunk

    @property
    def _number(self) -> int:
        """The micro-batch that runs."""
        return 0 if self._action is None else self._action.number

    @property
    def _stage(self) -> int:
        """The stage that runs: the number of stages before it."""
        return self._chunk * self.ranks + self.rank

    @property
    def _is_first(self) -> bool:
        """The first blocks run."""
        return self._stage == 0

    @property
    def _is_last(self) -> bool:
        """The last blocks run, and the loss."""
        return self._stage == self.ranks * len(self._chunks) - 1

    def doing(self) -> str:
        """Return which stage of this rank runs or waits for which, in which action; nothing outside of a step."""
        if (action := self._action) is None:
            return ""
        kind = "forward" if action.kind == "F" else "backward"
        of = (
            f"{self._before + action.number}, without gradients"
            if self._before >= 0
            else f"{action.number} of {self._count}"
        )
        return f"stage {self._stage}, {kind} of micro-batch {of}{self._messages.awaited}"

    def counted_elsewhere(self) -> set[int]:
        """Return the numbers of the parameters that the norm over all stages counts on another stage."""
        return {id(self._module.get_parameter(name)) for name, ranks in self.shared.items() if ranks[0] != self.rank}

    def backward(
        self,
        micro_batches: Iterable[Micro],
        loss: Callable[[nn.Module, Micro], Found],
        reduces: Callable[[bool], None],
        abandon: Callable[[], None],
        totals: Totals,
    ) -> None:
        """Run forwards and backwards of all micro-batches by the schedule.

        Args:
            micro_batches: of one step, the same on all stages.
            loss: ``(module, micro_batch) -> loss``, or with values to report.
            reduces: is called before each backward: whether it is the last, in which gradients are reduced.
            abandon: is called where an error ends the step after it has begun.
            totals: gets the sums, on all stages.

        Collective over the stages.
        """
        self._device, running = totals.loss.device, dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]]()
        self._begin_step(-1)
        batches = self._agree(micro_batches)
        before = self._set_aside()
        todo = actions(self._schedule, self.rank, self.ranks, len(batches), len(self._chunks))
        try:
            for place, action in enumerate(todo, 1):
                self.begins(action)
                if action.kind == "F":
                    self._forth(action, partial(self._lose, batches[action.number], loss, totals))
                    running[action.chunk, action.number] = self._arrived, self._left
                else:
                    reduces(place == len(todo))
                    self._back(action, *running.pop((action.chunk, action.number)))
            self._messages.settle_all()
            self._share(totals)
        except BaseException:
            abandon()
            raise
        self._add_shared(before)
        self._action = None

    def _begin_step(self, before: int) -> None:
        self._before, self._error, self._cause, self._action = before, None, "", None
        self.goes_on = False

    def _agree(self, micro_batches: Iterable[Micro]) -> list[Micro]:
        """Return the next micro-batches; refuse those that differ between stages.

        Raises:
            MeshparError: they differ, or an error ended an action on another stage since the stages agreed last.
            Exception: an error ended an action on this one, or came from ``micro_batches``.

        Collective over the stages.
        """
        batches = list[Micro]()
        try:
            batches += micro_batches if self._error is None else ()
        except Exception as error:  # noqa: BLE001 - the data of a user
            self._fail(error)
        self._count = len(batches)
        self._forms = [tuple((leaf.shape, leaf.dtype) for leaf in tensors(batch)) for batch in batches]
        mine = 0
        if self.supposed is None and self._error is None:
            sizes = [[tuple(shape) for shape, _ in form] for form in self._forms]
            mine = hash((len(batches), _digest(batches), *map(tuple, sizes)))
        every = torch.empty(self.ranks, dtype=torch.int64, device=self._device)
        self._messages.exchanged(all_gather, every, torch.tensor([mine], device=self._device), group=self.group)
        if self.supposed is None and (self._error is not None or every.tolist() != [mine] * self.ranks):
            self._refuse([_digest(batch) for batch in batches])
        return batches

    def _refuse(self, digests: Sequence[int]) -> None:
        """Raise the error that ended an action on this stage; on the others what it was, or how their micro-batches
        differ. Collective over the stages.
        """
        own, cause = self._error, self._cause
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

    def _fail(self, error: Exception) -> None:
        """Remember the first error of this stage, after which its ranks pass over the rest of the step.

        Raises:
            Exception: ``error``, where other ranks of the stage run on: nothing but the end of this process ends their
                waits. The ranks' store has the text for them.
            MeshparError: a rank that failed alone is the cause.
        """
        if self._error is not None:
            return
        where = self.doing() or f"stage {self.rank}, its micro-batches"
        self._error, self._cause = error, f"{where}: {brief(error)}"
        if alone := failed_alone():
            raise MeshparError(alone) from error
        if not all_fail(where, dist.get_world_size() // self.ranks):
            error.add_note(tell_alone(self._cause))
            raise error

    def _try(self, run: Callable[[], object], pass_over: Callable[[], object]) -> None:
        """Run an action. Where an error ends it, or ended one before it, exchange what the action has yet to: so the
        other stages do not wait, and learn of the error at the end of the step.
        """
        try:
            if self._error is None:
                run()
        except LostError:
            raise
        except Exception as error:
            if self.supposed is not None:  # nobody waits for a simulated rank
                raise
            self._fail(error)
        if self._error is not None:
            pass_over()

    def _lose(self, batch: Micro, loss: Callable[[nn.Module, Micro], Found], totals: Totals) -> None:
        """Run a forward of training, whose last stage keeps the loss as what leaves it."""
        value = self._forward(batch, loss)
        left = [value[0] if isinstance(value, tuple) else value] if self._is_last else self._left
        if not left or not isinstance(left[0], Tensor):
            raise MeshparError(
                f"loss(module, micro_batch) returned a {type(value).__name__} and called the module {self._calls} "
                "times; call it once and return a scalar tensor, or one and values to report"
            )
        if self._is_last:
            totals.add(value)
        self._left, self.goes_on = left, True

    def _share(self, totals: Totals) -> None:
        """Give all stages the sums of the last one."""
        has = self.rank == self.ranks - 1
        form = totals.form() if has else self._form
        # The others' losses are 0.
        numbers = totals.loss.new_tensor([float(form != self._form), float(self._error is not None)])
        numbers = torch.cat([totals.loss[None], numbers])
        self._messages.exchanged(dist.all_reduce, numbers, group=self.group)
        if self.supposed is None:
            _, changed, failed = numbers.tolist()
            if failed:
                self._refuse(())
            if changed:
                forms = [form]
                dist.broadcast_object_list(forms, group=self.group, group_src=self.ranks - 1, device=self._device)
                self._form = forms[0]
        flat = totals.flat()
        if self._form[1]:
            if not has:
                flat = flat.new_empty(sum(math.prod(shape) for _, shape, _ in self._form[1]))
            dist.broadcast(flat, group=self.group, group_src=self.ranks - 1)
        totals.take(numbers[0], self._form, flat)

    @torch.no_grad()
    def forward(
        self, micro_batches: Iterable[Micro], function: Callable[[nn.Module, Micro], Any], device: torch.device
    ) -> list[Any]:
        """Run forwards alone; return what ``function`` returns for each micro-batch, on all stages.

        Collective over the stages.
        """
        found, last = list[Any](), len(self._chunks) - 1
        self._device, given = device, (batch for batch in micro_batches)
        self._begin_step(0)

        def run(batch: Micro) -> None:
            value = self._forward(batch, function)
            found.extend([value] if self._chunk == last else [])

        while batches := self._agree(islice(given, _WINDOW * self.ranks)):
            numbered = iter(enumerate(batches))
            while group := list(islice(numbered, self.ranks if last else 1)):
                for chunk in range(last + 1):
                    for number, batch in group:
                        self._forth(Action("F", number, chunk), partial(run, batch))
            self._before += len(batches)
        self._messages.settle_all()
        self._action = None
        found = tree_map_only(Tensor, Tensor.cpu, found)
        dist.broadcast_object_list(found, group=self.group, group_src=self.ranks - 1, device=device)
        return tree_map_only(Tensor, partial(Tensor.to, device=device), found)

    def gathered(self, mine: Any) -> list[Any]:
        """Return what each stage has, the first stage's first. Collective over the stages."""
        every = [None] * self.ranks
        dist.all_gather_object(every, mine, group=self.group)
        return every

    def _forth(self, action: Action, run: Callable[[], object]) -> None:
        """Run a forward, which leaves what it took and what it has handed on."""
        self._action, self._arrived, self._left, self._results = action, [], [], {}
        self._header, self._calls = [], 0
        modes = self._module.training, torch.is_autocast_enabled(self._device.type)
        self._key = action.chunk, modes, self._forms[action.number]
        self._takes, self._sends = not self._is_first, not self._is_last
        self._try(run, self._pass_forth)

    def _pass_forth(self) -> None:
        if self._takes:
            with suppress(_FailedBeforeError):
                self._arrive()
        if self._sends:
            self._send_values(None)

    def _forward(self, batch: Micro, function: Callable[[nn.Module, Micro], Any]) -> Any:
        with self._running():
            try:
                return function(self._module, batch)
            except _StageEndsError:
                return None

    def _back(self, action: Action, arrived: list[Tensor], left: list[Tensor]) -> None:
        """Run a backward of what a forward took and handed on; a micro-batch that failed has handed on nothing, for
        which no gradient comes.
        """
        self._action = action
        self._takes, self._sends = bool(left) and not self._is_last, bool(arrived)
        self._try(partial(self._backward, arrived, left), partial(self._pass_back, arrived, left))

    def _pass_back(self, arrived: list[Tensor], left: list[Tensor]) -> None:
        if self._takes:
            self._take_gradients(left)
        if self._sends:
            self._messages.send([torch.zeros_like(value).contiguous() for value in arrived], self._stage - 1, BACK)

    def _take_gradients(self, left: list[Tensor]) -> list[Tensor]:
        grads = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in left]
        for grad in grads:
            self._messages.receive(grad, self._stage + 1, BACK)
        self._takes = False
        return grads

    def _backward(self, arrived: list[Tensor], left: list[Tensor]) -> None:
        grads: Sequence[Tensor | None] = [None] * len(left)
        if self._takes:
            grads = self._take_gradients(left)
            self._messages.settle_first(FORTH)  # the value came there, and those before it
        if trained := [(value, grad) for value, grad in zip(left, grads, strict=True) if value.requires_grad]:
            torch.autograd.backward([value for value, _ in trained], [grad for _, grad in trained])
        if arrived:
            back = [torch.zeros_like(value) if value.grad is None else value.grad for value in arrived]
            self._messages.send([grad.contiguous() for grad in back], self._stage - 1, BACK)
            self._sends = False

    @contextmanager
    def _running(self) -> Any:
        self._runs, self._carried.device = True, self._device
        try:
            yield
        finally:
            self._runs, self._carried.device = False, None

    def end_early(self) -> None:
        """Let the model fail where it computes with stand-ins behind the value that is handed on: a loss inside it
        finds no logits there. Other passes see the forward return.
        """
        forward = self._module.forward

        def until_handed_on(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except Exception:
                if not self._runs or self._is_last or not self._left or self._error is not None:
                    raise
                return self._left[0].detach()

        set_forward(self._module, until_handed_on)

    def install(self) -> None:
        """Put the exchange around what the passes behind this one, and the guards, have put on the module."""
        module: Any = self._module
        inner = module._call_impl

        def enter(*args: Any, **kwargs: Any) -> Any:
            if not self._runs:
                raise refused()
            self._calls += 1
            if self._calls > 1:
                raise MeshparError(
                    "the module is called twice for one micro-batch, and stages hand on one value of each; join the "
                    "inputs of both calls along the samples"
                )
            self._begin()
            output = inner(*args, **kwargs)
            if not self._is_last:
                raise _StageEndsError
            return output

        enter_by(module, enter)
        blocks = {block for chunk in self._chunks for block in chunk.blocks}
        for child in module.modules():
            if child is not module and child not in blocks and blocks.intersection(child.modules()):
                self._tells_of_hooks(child)
        for place, chunk in enumerate(self._chunks):
            if chunk.before is not None:
                chunk.before.register_forward_hook(partial(self._take, place))
            for block in chunk.blocks if len(self._chunks) > 1 else ():
                self._only_in(place, block, BlockStandIn(self._carried, block))
        crossing = dict.fromkeys(result for chunk in self._chunks for result in (*chunk.takes, *chunk.gives))
        for name in dict.fromkeys(result.module for result in crossing):
            self._carries(module.get_submodule(name), [result for result in crossing if result.module == name])
        for place, chunk in enumerate(self._chunks):
            if place < len(self._chunks) - 1 or self.rank < self.ranks - 1:
                self._hands_on(place, chunk.blocks[-1])
        for child in self._tail if len(self._chunks) > 1 else ():
            self._only_in(len(self._chunks) - 1, child, TailStandIn())
        for child in self._module.modules():
            if isinstance(child, TailStandIn):  # its hooks run on the last stage, which tells of their errors
                self._only_in(-1, child, child)

    def _tells_of_hooks(self, parent: nn.Module) -> None:
        """Remember an error of a module's forward hooks, which would look like one of what runs on stand-ins."""
        inner, ran = _calls_of(parent), list[bool]()
        parent.register_forward_hook(lambda *_: ran.append(True), prepend=True)

        def enter(*args: Any, **kwargs: Any) -> Any:
            ran.clear()
            try:
                return inner(*args, **kwargs)
            except Exception as error:
                if self._runs and ran:
                    self._fail(error)
                raise

        enter_by(parent, enter)

    def _carries(self, child: nn.Module, results: Sequence[Result]) -> None:
        """Keep results of a module for later stages, or return those that earlier ones have sent."""
        inner, writes = _calls_of(child), getattr(child, "written", False)

        @eager
        def carried(output: Any) -> Any:
            chunk, came = self._chunks[self._chunk], dict[int, Tensor]()
            values = output if isinstance(output, tuple | list) else [output]
            for result in results:
                if result in chunk.takes:
                    value = self._results[result] = self._arrive()[1 + chunk.takes.index(result)]
                    came[result.place] = value.clone() if writes else value
                elif result in chunk.gives and result.place < len(values) and isinstance(values[result.place], Tensor):
                    self._results[result] = values[result.place]
            return with_result(output, came)

        def enter(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            return carried(output) if self._runs else output

        enter_by(child, enter)

    def _hands_on(self, chunk: int, block: nn.Module) -> None:
        """Send what a block returns, with its hooks, of which those of a backward need all of its call."""
        inner = _calls_of(block)

        def enter(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            if self._runs and self._chunk == chunk:
                self._hand_on(output)
            return output

        enter_by(block, enter)

    def _only_in(self, chunk: int, child: nn.Module, otherwise: nn.Module) -> None:
        """Let a stand-in answer a module's calls in forwards of other chunks; nothing gathers its weights then."""
        inner = _calls_of(child)

        def enter(*args: Any, **kwargs: Any) -> Any:
            return (otherwise.forward if self._runs and self._chunk != chunk else inner)(*args, **kwargs)

        enter_by(child, enter)

    def _begin(self) -> None:
        """Learn the form of the value that comes, before the stand-ins of earlier blocks run."""
        if not self._is_first:
            self._header = self._announced(None)
            self._carried.dtype, self._carried.width = DTYPES[self._header[0]], self._header[1]

    def _announced(self, result: Result | None) -> list[int]:
        """Return the header of the value that comes next; it comes before the first value of a form."""
        known = self._expected(result)
        if known is None:
            header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self._device)
            self._messages.receive(header, self._stage - 1, FORTH)
            known = self._checked(header.tolist())
        return known

    def _expected(self, result: Result | None, *, sent: bool = False) -> list[int] | None:
        """Return the header of the last value, ``sent`` or taken, of a micro-batch of this form; None: there was none,
        and a header travels before the value.
        """
        if self.supposed is not None:
            return self.supposed.get(result, self.supposed[None])
        return self._known[sent].get((self._key, result))

    def _checked(self, header: list[int]) -> list[int]:
        """Return a header; raise an error where it says that an error came before the value."""
        if header[0] == FAILED:
            error = _FailedBeforeError()
            self._takes, self._error = False, self._error or error
            raise error
        assert origin_of(header) == (self._number, self._stage - 1), "values come in the order of the schedule"
        return header

    def _arrive(self) -> list[Tensor]:
        """Return what the stage before hands on, received where it is asked for first."""
        if self._arrived:
            return self._arrived
        taken, headers = list[Tensor](), list[tuple[list[int], list[int]]]()
        for result in (None, *self._chunks[self._chunk].takes):
            known = self._announced(result) if result or not self._header else self._header
            taken.append(self._value(result, known))
            headers.append((known, self._known[False][self._key, result]))
        self._takes = False
        self._arrived = [value.requires_grad_() for value in taken] if torch.is_grad_enabled() else taken
        for before, header in headers:
            if header[:2] != before[:2]:
                raise MeshparError(
                    f"what passes between blocks is {DTYPES[header[0]]} and was {DTYPES[before[0]]} for micro-batches "
                    "of this form; let a model compute in one dtype"
                )
        return self._arrived

    def _value(self, result: Result | None, known: list[int]) -> Tensor:
        """Receive a value whose header is expected to be ``known``."""
        header, arrived = known, None
        if self._expected(result) is not None:  # the header comes behind the value
            whole = room_for(known, self._device)
            self._messages.receive(whole, self._stage - 1, FORTH)
            value, behind = unpacked(whole, known)
            if self.supposed is None:
                header = self._checked(behind.tolist())
            if form_of(header) == form_of(known):
                arrived = value
        if arrived is None:
            arrived = torch.empty(shape_of(header), dtype=DTYPES[header[0]], device=self._device)
            self._messages.receive(arrived, self._stage - 1, FORTH)
        self._known[False][self._key, result] = header
        return arrived

    @eager
    def _take(self, chunk: int, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return what the stage before has handed on, as the stand-in of its last block returns it."""
        if not self._runs or self._chunk != chunk:
            return output
        return with_result(output, {0: self._arrive()[0]})

    @eager
    def _hand_on(self, output: Any) -> None:
        value = output[0] if isinstance(output, tuple | list) else output
        gives = self._chunks[self._chunk].gives
        if lacking := [result for result in gives if result not in self._results]:
            raise MeshparError(
                f"{lacking[0].module} has not returned what ModelLayout.carries says, a tensor that later blocks use, "
                "in this micro-batch; use a mesh without pp for it"
            )
        self._left, self._carried.width = [value], len(output) - 1 if isinstance(output, tuple | list) else -1
        self._left += [self._results[result] for result in gives]
        self._send_values([one.detach().contiguous() for one in self._left])

    def _send_values(self, values: Sequence[Tensor] | None) -> None:
        """Send to the next stage the value of a block and what goes with it; None: an error came before them."""
        parts = list[Tensor]()
        for result, value in zip((None, *self._chunks[self._chunk].gives), [None] if values is None else values):
            parts += self._parts(result, value)
        self._messages.send(parts, self._stage + 1, FORTH)
        self._sends = False

    def _parts(self, result: Result | None, value: Tensor | None) -> list[Tensor]:
        """Return the messages that carry a value; None: an error came before it."""
        header = header_of(value, self._carried.width, self._number, self._stage)
        if self.supposed is not None:
            self.supposed[result] = header
        numbers, rest = torch.tensor(header, device=self._device), [] if value is None else [value]
        before = self._expected(result, sent=True)
        if value is not None:
            self._known[True][self._key, result] = header
        if before is None:
            return [numbers, *rest]
        if value is not None and form_of(before) == form_of(header):
            return [packed(value, numbers)]
        # The next stage takes another form, and learns behind it what follows.
        return [packed(torch.empty(shape_of(before), dtype=DTYPES[before[0]], device=self._device), numbers), *rest]

    def _set_aside(self) -> dict[str, Tensor]:
        """Take away the gradients that shared parameters have from before, which are sums over stages already."""
        kept = dict[str, Tensor]()
        for name in self.shared:
            parameter = self._module.get_parameter(name)
            if parameter.grad is not None:
                kept[name], parameter.grad = parameter.grad, None
        return kept

    @torch.no_grad()
    def _add_shared(self, before: dict[str, Tensor]) -> None:
        """Add up the gradients of parameters that several stages have: each saw its own uses alone."""
        for name, ranks in self.shared.items():
            parameter = self._module.get_parameter(name)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = local_tensor(parameter.grad)
            (other,) = (rank for rank in ranks if rank != self.rank)
            theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
            to, back = (FORTH, BACK) if self.rank < other else (BACK, FORTH)
            stage = other + (other > 0) * self.ranks * (len(self._chunks) - 1)  # the last one, or the first
            self._messages.send([mine.contiguous()], stage, to)
            self._messages.receive(theirs, stage, back)
            self._messages.settle_all()
            first, second = (mine, theirs) if self.rank < other else (theirs, mine)
            mine.copy_(first + second)
            if name in before:
                parameter.grad += before[name]


def _calls_of(module: Any) -> Callable[..., Any]:
    """Return what runs a module's calls, to be put into another call."""
    inner: Callable[..., Any] = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = None
    return inner


def _digest(batches: object) -> int:
    """Return a number that differs where tensors in ``batches`` have other bytes: one look for each kind."""
    kinds = dict[Any, list[Tensor]]()
    for leaf in tensors(batches):
        kinds.setdefault((leaf.device, leaf.dtype), []).append(leaf.detach().reshape(-1))
    return int(digest_of_several(map(torch.cat, kinds.values())))


def refused() -> MeshparError:
    """Return the error for a call of the module that no stage can run alone."""
    return MeshparError(
        "the module is called, and this rank has a part of its layers; run a step by par.backward(micro_batches, loss) "
        "and an evaluation by par.forward(micro_batches, function)"
    )
