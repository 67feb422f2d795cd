"""Run a step over stages: forwards and backwards in the order of the schedule, the agreement of the stages on their
micro-batches and errors, and the sums that all of them get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice, zip_longest
from typing import Any, NoReturn, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.groups import all_gather
from meshpar._torch.pytree import tree_map_only
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, brief
from meshpar.exchange.ranks import Looks
from meshpar.losses.token_loss import Found, Totals
from meshpar.passes.host_reads import beside
from meshpar.passes.pipeline.edges import Edges, FailedBeforeError, Portion, digest_of
from meshpar.passes.pipeline.messages import BACK, FORTH, LostError, all_fail, failed_alone, forget_alone, tell_alone
from meshpar.passes.pipeline.schedule import Action, actions
from meshpar.passes.pipeline.stand_ins import tensors
from meshpar.tensors.digests import digest_of_several
from meshpar.tensors.placements import local_tensor

Micro = TypeVar("Micro")
_EXACT = (1 << 48) - 1
_WINDOW = 16  # micro-batches for each stage on which the stages of an evaluation agree at a time


@final
class Layers:
    """This rank's layers of one module, and the exchange with the ranks that have the others.

    Args:
        portion: of the model, on this rank.
        schedule: see :func:`meshpar.passes.pipeline.schedule.actions`.
        shared: parameters that other stages have, too -> the ranks of the group that do.
        buffers: persistent ones that all stages have.

    Attributes:
        line: names of all blocks of the model.
        edges: what the stages take and hand on.
        begins: is called with each action of a backward before it runs.
        goes_on: a forward of the step that runs has ended.
    """

    def __init__(
        self, portion: Portion, schedule: str, shared: dict[str, tuple[int, ...]], buffers: Sequence[str] = ()
    ) -> None:
        self._module, self._chunks, self._schedule = portion.module, len(portion.chunks), schedule
        self.group, self.line, self.shared = portion.group, portion.line, shared
        self.edges = Edges(portion, self._acting, self._fail)
        self.rank, self.ranks, self._messages = self.edges.rank, self.edges.ranks, self.edges.messages
        self._count = self._before = 0
        self._shapes = list[Any]()  # of the tensors of each micro-batch on which the stages have agreed
        self.goes_on = False
        self._error: Exception | None = None  # ended an action of this step, of which the other stages do not know yet
        self._cause = ""  # where and what it was, where it is this stage's own
        self._told = False  # the other ranks that this one failed alone
        self._action: Action | None = None  # that runs
        self._looks = Looks()
        self._buffers, self._unwritten = buffers, dict[str, tuple[int, int]]()
        # Digests of the inputs of the step before, which are not read yet.
        self._later: tuple[Callable[[], Tensor], list[list[Tensor]]] | None = None
        self._form: tuple[bool, list[tuple[str, tuple[int, ...], torch.dtype]]] = (False, [])  # of the last totals
        self.begins: Callable[[Action], object] = lambda action: None

    def doing(self) -> str:
        """Return which stage of this rank runs or waits for which, in which action; nothing outside of a step."""
        return self._messages.waits() or self._acting()

    def _acting(self) -> str:
        """Return which stage of this rank runs, in which action."""
        if (action := self._action) is None:
            return ""
        kind = "forward" if action.kind == "F" else "backward"
        of = (
            f"{self._before + action.number}, without gradients"
            if self._before >= 0
            else f"{action.number} of {self._count}"
        )
        return f"stage {self.edges.stage}, {kind} of micro-batch {of}"

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
        counted: Callable[[int], object] = bool,
    ) -> None:
        """Run forwards and backwards of all micro-batches by the schedule.

        Args:
            micro_batches: of one step, the same on all stages.
            loss: ``(module, micro_batch) -> loss``, or with values to report.
            reduces: is called before each backward: whether it is the last, in which gradients are reduced.
            abandon: is called where an error ends the step after it has begun.
            totals: gets the sums, on all stages.
            counted: is called with the number of micro-batches, on which the stages have agreed.

        Collective over the stages.
        """
        self.edges.device, running = totals.loss.device, dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]]()
        self._begin_step(-1)
        batches = self._agree(micro_batches)
        counted(len(batches))
        before = self._set_aside()
        self._unwritten = self._buffer_versions()
        todo = actions(self._schedule, self.rank, self.ranks, len(batches), self._chunks)
        try:
            for place, action in enumerate(todo, 1):
                self.begins(action)
                if action.kind == "F":
                    self._forth(action, partial(self._lose, batches[action.number], loss, totals))
                    running[action.chunk, action.number] = self.edges.arrived, self.edges.left
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
        self._before, self._cause, self._action, self.goes_on = before, "", None, False
        self._error = None
        self.edges.begin_step()
        if self._told:
            forget_alone()
            self._told = False

    def _agree(self, micro_batches: Iterable[Micro]) -> list[Micro]:
        """Return the next micro-batches; refuse those that differ between stages.

        Raises:
            MeshparError: they differ, or an error ended an action on another stage since the stages agreed last.
            Exception: an error ended an action on this one, or came from ``micro_batches``.

        Collective over the stages.
        """
        batches, self.edges.inputs = list[Micro](), [[] for _ in range(self._chunks)]
        try:
            batches += micro_batches if self._error is None else ()
        except Exception as error:  # noqa: BLE001 - the data of a user
            self._fail(error)
        self._count = len(batches)
        self._shapes = [tuple(tuple(leaf.shape) for leaf in tensors(batch)) for batch in batches]
        mine = 0
        if self.edges.supposed is None and self._error is None:
            mine = hash((len(batches), _digest(batches, waits=not self.edges.late), *self._shapes))
        every = torch.empty(self.ranks, dtype=torch.int64, device="cpu")
        own = torch.tensor([mine], device="cpu")
        self._messages.exchanged(all_gather, every, own, group=self._messages.hosts)
        if self.edges.supposed is None and (self._error is not None or every.tolist() != [mine] * self.ranks):
            self._refuse([_digest(batch) for batch in batches])
        return batches

    def _refuse(self, digests: Sequence[int]) -> None:
        """Raise this stage's error, or what another's was, or how micro-batches differ. Collective over the stages."""
        own, cause = self._error, self._cause
        self.edges.failed = True  # the step, on all stages
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
        self._error, self.edges.failed = error, True
        if isinstance(error, FailedBeforeError):
            return
        where = self._acting() or f"stage {self.rank}, its micro-batches"
        self._cause = f"{where}: {brief(error)}"
        if alone := failed_alone():
            raise MeshparError(alone) from error
        if not all_fail(where, dist.get_world_size() // self.ranks):
            self._told = True
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
            if self.edges.supposed is not None:  # nobody waits for a simulated rank
                raise
            self._fail(error)
        if self._error is not None:
            pass_over()

    def _lose(self, batch: Micro, loss: Callable[[nn.Module, Micro], Found], totals: Totals) -> None:
        """Run a forward of training, whose last stage keeps the loss as what leaves it."""
        edges = self.edges
        value = edges.forward(loss, batch)
        if edges.stage == edges.last:
            edges.left = [value[0] if isinstance(value, tuple) else value]
        if not edges.calls or not edges.left or not isinstance(edges.left[0], Tensor):
            raise MeshparError(
                f"loss(module, micro_batch) returned a {type(value).__name__} and called the module {edges.calls} "
                "times; call it once and return a scalar tensor, or one and values to report"
            )
        if edges.stage == edges.last:
            totals.add(value)
        self.goes_on = True

    def _share(self, totals: Totals) -> None:
        """Give all stages the sums of the last one."""
        has = self.rank == self.ranks - 1
        form = totals.form() if has else self._form
        # Digests of 48 bits are exact in float64. The others' losses are 0.
        inputs = [torch.stack(given).sum() & _EXACT for given in self.edges.inputs if given]
        inputs += [inputs[0]] * (self._chunks - len(inputs)) if inputs else [totals.loss] * self._chunks
        inputs.append(self._digest_of_written())
        flags = [float(form != self._form), float(self._error is not None)]
        noted = [totals.loss, *(torch.full_like(totals.loss, flag) for flag in flags), *inputs]
        mine = torch.stack([number.double() for number in noted])
        numbers = mine.new_empty(self.ranks * len(mine))
        self._messages.exchanged(all_gather, numbers, mine, group=self.group)
        numbers = numbers.view(self.ranks, -1)
        changed, failed = self._flags(flags, numbers)
        if failed:
            self._refuse(())
        self._compare_inputs(numbers[:, 1 + len(flags) :])
        if changed:
            forms = [form]
            dist.broadcast_object_list(forms, group=self.group, group_src=self.ranks - 1, device=self.edges.device)
            self._form = forms[0]
        flat = totals.flat()
        if self._form[1]:
            if not has:
                flat = flat.new_empty(sum(math.prod(shape) for _, shape, _ in self._form[1]))
            dist.broadcast(flat, group=self.group, group_src=self.ranks - 1)
        totals.take(numbers[:, 0].sum().to(totals.loss.dtype), self._form, flat)

    def _flags(self, mine: list[float], numbers: Tensor) -> list[bool]:
        """Return of each flag whether a stage has it: from the ``numbers`` of all, or by the hosts beside a device."""
        every = numbers[:, 1 : 1 + len(mine)]
        if self.edges.late:
            every = torch.empty(self.ranks * len(mine), device="cpu")
            self._messages.exchanged(all_gather, every, torch.tensor(mine, device="cpu"), group=self._messages.hosts)
            every = every.view(self.ranks, -1)
        return [False] * len(mine) if self.edges.supposed is not None else every.bool().any(0).tolist()

    def _compare_inputs(self, digests: Tensor) -> None:
        """Compare ``loss``'s inputs on each stage, (stages, chunks): now, or one step later beside a device."""
        read, given = (lambda: digests), self.edges.inputs
        if self.edges.late and not self._looks.first("inputs"):
            with beside(self.edges.device) as to_host:
                later = to_host(digests), given
            if self._later is None:
                self._later = later
                return
            (read, given), self._later = self._later, later
        every = read()
        if self.edges.supposed is not None:
            return
        if (written := set(every[:, -1].tolist())) != {0.0} and (len(written) > 1 or self._chunks > 1):
            self._refuse_written()
        if len(set(every[:, :-1].flatten().tolist())) > 1:
            self._refuse_inputs(given)

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        """Return what changes where a buffer of all stages is written into."""
        buffers = {name: self._module.get_buffer(name) for name in self._buffers}
        return {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}

    def _digest_of_written(self) -> Tensor:
        """Return a number for the buffers of all stages that this step has written into; 0: none."""
        now = self._buffer_versions()
        written = [self._module.get_buffer(name) for name in now if now[name] != self._unwritten[name]]
        return (
            (digest_of(written, self.edges.device) & _EXACT) + 1
            if written
            else torch.zeros((), dtype=torch.int64, device=self.edges.device)
        )

    def _refuse_written(self) -> NoReturn:
        """Raise an error for buffers of all stages that differ between them. Collective over the stages."""
        now = self._buffer_versions()
        every = self.gathered({name: now[name] != self._unwritten[name] for name in now})
        names = sorted({name for stage in every for name, written in stage.items() if written})
        raise MeshparError(
            f"the forward writes into the buffers {', '.join(names)}, which each stage of pp would fill from values of "
            "its own, with virtual= once for each of its stages; put the buffer into a module with parameters behind "
            "the blocks, or register it with persistent=False where stages may differ"
        )

    def _refuse_inputs(self, given: Sequence[Sequence[Tensor]]) -> NoReturn:
        """Raise an error for micro-batches in which stages got other arguments. Collective over the stages."""
        every = self.gathered([list(map(int, digests)) for digests in given])
        first = every[0][0]
        rank, number = next(
            (rank, number)
            for rank, chunks in enumerate(every)
            for digests in chunks
            for number, (one, two) in enumerate(zip_longest(first, digests))
            if one != two
        )
        raise MeshparError(
            f"loss gave the module other inputs on rank {rank} of pp than on rank 0, in micro-batch {number}: loss "
            "runs on every stage, and draws masks or noise from the random state, which differs; call "
            "par.manual_seed(seed) before the step"
        )

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
        found, last = list[Any](), self._chunks - 1
        self.edges.device, given = device, (batch for batch in micro_batches)
        self._begin_step(0)

        def run(batch: Micro) -> None:
            value = self.edges.forward(function, batch)
            found.extend([value] if self.edges.chunk == last else [])

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
        values = [found]  # of no micro-batch, too
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

    def _set_aside(self) -> dict[str, Tensor | None]:
        """Take away the gradients that shared parameters have from before, which are sums over stages already."""
        kept = dict[str, Tensor | None]()
        for name in self.shared:
            parameter = self._module.get_parameter(name)
            kept[name], parameter.grad = parameter.grad, None
        return kept

    @torch.no_grad()
    def _add_shared(self, before: dict[str, Tensor | None]) -> None:
        """Add up the gradients of parameters that the two ends or all ranks have: each saw its own uses alone."""
        self.edges.chunk = 0
        # the first stage is behind the last one in the ring of their messages
        other, to, back = (self.edges.last, BACK, FORTH) if self.rank == 0 else (0, FORTH, BACK)
        for name, kept in before.items():
            parameter = self._module.get_parameter(name)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = local_tensor(parameter.grad)
            if len(self.shared[name]) > 2:
                total = mine.contiguous()
                self._messages.exchanged(dist.all_reduce, total, group=self.group)
                mine.copy_(total)
            else:
                theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
                self._messages.send([mine.contiguous()], other, to)
                self._messages.receive(theirs, other, back)
                self._messages.settle_all()
                mine += theirs
            if kept is not None:
                parameter.grad += kept


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
