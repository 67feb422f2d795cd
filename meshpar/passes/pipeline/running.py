"""Run a stage: the model's own forward, with what comes from the stage before and what goes to the stage behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshpar._torch.calls import eager, enter_by
from meshpar._torch.groups import all_gather, share_timeout
from meshpar.core.errors import MeshparError
from meshpar.loss import Found, Totals
from meshpar.passes.installed import set_forward
from meshpar.passes.pipeline.schedule import Action, actions
from meshpar.passes.pipeline.stand_ins import BlockStandIn, Carried, TailStandIn
from meshpar.placements import local_tensor
from meshpar.replicas import digest_of_several

Micro = TypeVar("Micro")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 6
_HEADER = 7  # numbers before the sizes
_FORM = 3  # of them, the first say with the sizes what a value is
_FORTH, _BACK = 0, 1  # tags of messages, of which two ranks may exchange both kinds in one direction
TAGGED = ("gloo", "fake")  # backends that keep messages of different tags apart


class _StageEndsError(BaseException):
    """Leave a loss function whose module has handed its value to the next stage; no error, and nothing to catch."""


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks of one rank that follow one another.

    Attributes:
        blocks: modules, in the order of their calls.
        before: the stand-in of the block before the first of them, in whose place the value comes that another stage
            hands on: what the model computes between two blocks is then computed by the second one's stage.
    """

    blocks: tuple[nn.Module, ...]
    before: nn.Module | None


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
        self._lanes = _lanes(group, both_ways=self.ranks == 2 and len(chunks) > 1)
        self._runs, self._device, self._chunk = False, torch.device("cpu"), 0
        self._number = self._count = self._calls = self._digest = 0
        self._arrived: Tensor | None = None
        self._left: Tensor | None = None
        self._header: list[int] = []
        self._key: Any = None  # the form of the micro-batch that runs in training
        self._digests: list[int] = []
        # Headers of the last values that this rank has sent and got of micro-batches of one form.
        self._known: dict[bool, dict[Any, list[int]]] = {True: {}, False: {}}
        self._action: Action | None = None  # that runs
        self._awaited = ""  # the stage whose message this rank waits for
        self._form: tuple[bool, list[tuple[str, tuple[int, ...], torch.dtype]]] = (False, [])  # of the last totals
        # On their way by their tags, the first that was sent first.
        self._sent: dict[int, list[list[tuple[dist.Work, Tensor]]]] = {_FORTH: [], _BACK: []}
        self.begins: Callable[[Action], object] = lambda action: None
        self.supposed: list[int] | None = None  # the header of what a simulated rank gets, as the first stage fills it

    @property
    def _stage(self) -> int:
        """The stage that runs: the number of stages before it."""
        return self._chunk * self.ranks + self.rank

    @property
    def _begins(self) -> bool:
        """The first blocks run."""
        return self._stage == 0

    @property
    def _ends(self) -> bool:
        """The last blocks run, and the loss."""
        return self._stage == self.ranks * len(self._chunks) - 1

    def doing(self) -> str:
        """Return which stage of this rank runs or waits for which, in which action; nothing outside of a step."""
        action = self._action
        if action is None:
            return ""
        kind = "forward" if action.kind == "F" else "backward"
        return f"stage {self._stage}, {kind} of micro-batch {action.number} of {self._count}{self._awaited}"

    def counted_elsewhere(self) -> set[int]:
        """Return the numbers of the parameters that the norm over all stages counts on another stage."""
        return {id(self._module.get_parameter(name)) for name, ranks in self.shared.items() if ranks[0] != self.rank}

    def backward(
        self,
        micro_batches: Iterable[Micro],
        loss: Callable[[nn.Module, Micro], Found],
        reduces: Callable[[bool], None],
        totals: Totals,
    ) -> None:
        """Run forwards and backwards of all micro-batches by the schedule.

        Args:
            micro_batches: of one step, the same on all stages.
            loss: ``(module, micro_batch) -> loss``, or with values to report.
            reduces: is called before each backward: whether it is the last, in which gradients are reduced.
            totals: gets the sums, on all stages.

        Collective over the stages.
        """
        batches, running = list(micro_batches), dict[tuple[int, int], tuple[Tensor | None, Tensor]]()
        self._count, self._device = len(batches), totals.loss.device
        self._agree(batches)
        before = self._set_aside()
        todo = actions(self._schedule, self.rank, self.ranks, len(batches), len(self._chunks))
        for place, action in enumerate(todo, 1):
            self._chunk, self._action = action.chunk, action
            self.begins(action)
            if action.kind == "F":
                self._number = action.number
                value = self._forward(batches[action.number], loss, self._digests[action.number])
                left = (value[0] if isinstance(value, tuple) else value) if self._ends else self._left
                if not isinstance(left, Tensor):
                    raise MeshparError(
                        f"loss(module, micro_batch) returned a {type(value).__name__} and called the module "
                        f"{self._calls} times; call it once and return a scalar tensor, "
                        "or one and values to report"
                    )
                if self._ends:
                    totals.add(value)
                running[action.chunk, action.number] = self._arrived, left
            else:
                reduces(place == len(todo))
                self._backward(*running.pop((action.chunk, action.number)))
        self._settle_all()
        self._add_shared(before)
        self._share(totals)
        self._action = None

    def _agree(self, batches: Sequence[Any]) -> None:
        """Refuse micro-batches of a step that differ between stages. Collective over the stages."""
        if self.supposed is None:
            self._digests = [_digest(batch) for batch in batches]
            forms = [[*leaf.shape] for batch in batches for leaf in _tensors(batch)]
            mine = hash((len(batches), *self._digests, *map(tuple, forms)))
        else:
            self._digests, mine = [0] * len(batches), 0
        every = torch.empty(self.ranks, dtype=torch.int64, device=self._device)
        all_gather(every, torch.tensor([mine], device=self._device), group=self.group)
        if self.supposed is not None or every.tolist() == [mine] * self.ranks:
            return
        stages = self.gathered(self._digests)
        counts = [len(digests) for digests in stages]
        other = next((stage for stage in range(self.ranks) if stages[stage] != stages[0]), self.ranks - 1)
        if counts[other] != counts[0]:
            what = f"{counts[0]} micro-batches in stage 0, and {counts[other]} in stage {other}"
        else:
            pairs = enumerate(zip(stages[0], stages[other], strict=True))
            number = next((place for place, (one, two) in pairs if one != two), 0)
            what = f"stage 0 and stage {other} have different micro-batches (number {number})"
        raise MeshparError(f"{what}; give all ranks of pp the same micro-batches, those of par.data_rank")

    def _share(self, totals: Totals) -> None:
        """Give all stages the sums of the last one."""
        has = self.rank == self.ranks - 1
        form = totals.form() if has else self._form
        both = torch.stack([totals.loss, totals.loss.new_tensor(float(form != self._form))])
        dist.broadcast(both, group=self.group, group_src=self.ranks - 1)
        loss, changed = both
        if self.supposed is None and changed:
            forms = [form]
            dist.broadcast_object_list(forms, group=self.group, group_src=self.ranks - 1, device=self._device)
            self._form = forms[0]
        flat = totals.flat()
        if self._form[1]:
            if not has:
                flat = flat.new_empty(sum(math.prod(shape) for _, shape, _ in self._form[1]))
            dist.broadcast(flat, group=self.group, group_src=self.ranks - 1)
        totals.take(loss, self._form, flat)

    @torch.no_grad()
    def forward(
        self, micro_batches: Iterable[Micro], function: Callable[[nn.Module, Micro], Any], device: torch.device
    ) -> list[Any]:
        """Run forwards alone; return what ``function`` returns for each micro-batch, on all stages.

        Collective over the stages.
        """
        found = list[Any]()
        self._count, self._device = -1, device
        numbered, last = enumerate(micro_batches), len(self._chunks) - 1
        while group := list(islice(numbered, self.ranks if last else 1)):
            for self._chunk in range(last + 1):
                for self._number, batch in group:
                    result = self._forward(batch, function, None)
                    found += [result] if self._chunk == last else []
        self._settle_all()
        found = tree_map_only(Tensor, Tensor.cpu, found)
        dist.broadcast_object_list(found, group=self.group, group_src=self.ranks - 1, device=device)
        return tree_map_only(Tensor, partial(Tensor.to, device=device), found)

    def gathered(self, mine: Any) -> list[Any]:
        """Return what each stage has, the first stage's first. Collective over the stages."""
        every = [None] * self.ranks
        dist.all_gather_object(every, mine, group=self.group)
        return every

    def _forward(self, batch: Micro, function: Callable[[nn.Module, Micro], Any], digest: int | None) -> Any:
        """Run a micro-batch forward; ``digest``: of one on which the stages have agreed."""
        self._arrived, self._left, self._calls, self._key = None, None, 0, None
        if digest is not None:
            modes = self._module.training, torch.is_autocast_enabled(self._device.type)
            self._key = self._chunk, modes, tuple((leaf.shape, leaf.dtype) for leaf in _tensors(batch))
        self._digest = _digest(batch) if digest is None else digest
        with self._running():
            try:
                return function(self._module, batch)
            except _StageEndsError:
                return None

    def _backward(self, arrived: Tensor | None, left: Tensor) -> None:
        grad = None
        if not self._ends:
            grad = torch.empty_like(left, memory_format=torch.contiguous_format)
            self._receive(grad, self.rank + 1, _BACK)
            self._settle(_FORTH, max(0, len(self._sent[_FORTH]) - 1))  # the value came there, and those before it
        if left.requires_grad:
            torch.autograd.backward([left], None if grad is None else [grad])
        if arrived is not None:
            back = torch.zeros_like(arrived) if arrived.grad is None else arrived.grad
            self._send([back.contiguous()], self.rank - 1, _BACK)

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
                if not self._runs or self._ends or self._left is None:
                    raise
                return self._left.detach()

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
            if not self._ends:
                raise _StageEndsError
            return output

        enter_by(module, enter)
        for place, chunk in enumerate(self._chunks):
            if chunk.before is not None:
                chunk.before.register_forward_hook(partial(self._take, place))
            if place < len(self._chunks) - 1 or self.rank < self.ranks - 1:
                chunk.blocks[-1].register_forward_hook(self._hand_on)
            for block in chunk.blocks if len(self._chunks) > 1 else ():
                self._only_in(place, block, BlockStandIn(self._carried, block))
        for child in self._tail if len(self._chunks) > 1 else ():
            self._only_in(len(self._chunks) - 1, child, TailStandIn())

    def _only_in(self, chunk: int, child: nn.Module, otherwise: nn.Module) -> None:
        """Let a stand-in answer a module's calls in forwards of other chunks; nothing gathers its weights then."""
        inner: Any = child._compiled_call_impl or child._call_impl  # type: ignore[attr-defined]
        child._compiled_call_impl = None  # type: ignore[assignment]

        def enter(*args: Any, **kwargs: Any) -> Any:
            return (otherwise.forward if self._runs and self._chunk != chunk else inner)(*args, **kwargs)

        enter_by(child, enter)

    def _begin(self) -> None:
        """Learn the form of the value that comes, before the stand-ins of earlier blocks run."""
        if self._begins:
            return
        if self.supposed is not None:
            self._header = self.supposed
        elif self._expected() is None:
            header = torch.empty(_HEADER + _MOST_DIMS, dtype=torch.int64, device=self._device)
            self._receive(header, self.rank - 1, _FORTH)
            self._header = self._checked(header.tolist())
        else:
            self._header = self._known[False][self._key]
        self._carried.dtype, self._carried.width = _DTYPES[self._header[0]], self._header[1]

    def _expected(self, *, sent: bool = False) -> list[int] | None:
        """Return the header of the last value, ``sent`` or taken, of a micro-batch of this form; None: there was none,
        and a header travels before the value.
        """
        return None if self._key is None else self._known[sent].get(self._key)

    def _checked(self, header: list[int]) -> list[int]:
        """Return a header; refuse one of another micro-batch than this one."""
        number, count, digest, stage = header[_FORM:_HEADER]
        if (number, count, stage) != (self._number, self._count, self._stage - 1):
            raise MeshparError(
                f"stage {stage} is at micro-batch {number} of {count}, and stage {self._stage} at "
                f"{self._number} of {self._count}; give all ranks of pp the same micro-batches, those of par.data_rank"
            )
        if digest != self._digest:
            raise MeshparError(
                f"stage {stage} and stage {self._stage} have different micro-batches (number {number}); give all "
                "ranks of pp the same ones, those of par.data_rank"
            )
        return header

    @eager
    def _take(self, chunk: int, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return what the stage before has handed on, as the stand-in of its last block returns it."""
        if not self._runs or self._chunk != chunk:
            return output
        arrived = None
        if self.supposed is not None or self._expected() is not None:  # the header comes behind the value
            size = _nbytes(self._header)
            whole = torch.empty(_up(size) + 8 * len(self._header), dtype=torch.uint8, device=args[0].device)
            self._receive(whole, self.rank - 1, _FORTH)
            header = self._header
            if self.supposed is None:
                header = self._checked(whole[_up(size) :].view(torch.int64).tolist())
            if _form(header) == _form(self._header):
                arrived = whole[:size].view(_DTYPES[header[0]]).view(_shape(header)).detach()
            elif header[:2] != self._header[:2]:
                raise MeshparError(
                    f"what passes between blocks is {_DTYPES[header[0]]} and was {_DTYPES[self._header[0]]} for "
                    "micro-batches of this form; let a model compute in one dtype"
                )
            self._header = header
        if arrived is None:
            arrived = torch.empty(_shape(self._header), dtype=self._carried.dtype, device=args[0].device)
            self._receive(arrived, self.rank - 1, _FORTH)
        if self._key is not None:
            self._known[False][self._key] = self._header
        if torch.is_grad_enabled():
            self._arrived = arrived.requires_grad_()
        return (arrived, *output[1:]) if isinstance(output, tuple) else arrived

    @eager
    def _hand_on(self, block: nn.Module, args: object, output: Any) -> None:
        if not self._runs:
            return
        value = output[0] if isinstance(output, tuple | list) else output
        self._left, data = value, value.detach().contiguous()
        self._carried.width = width = len(output) - 1 if isinstance(output, tuple | list) else -1
        known = [self._number, self._count, self._digest, self._stage]
        header = [_DTYPES.index(data.dtype), width, data.ndim, *known, *data.shape]
        header += [0] * (_HEADER + _MOST_DIMS - len(header))
        if self.supposed is not None:
            self.supposed[:] = header
        numbers, before = torch.tensor(header, device=self._device), self._expected(sent=True)
        before = header if self.supposed is not None else before
        if before is None:
            values = [numbers, data]
        elif _form(before) == _form(header):
            values = [_packed(data, numbers)]
        else:  # the next stage takes another form, and learns behind it that a value of this one follows
            values = [_packed(data.new_empty(_shape(before), dtype=_DTYPES[before[0]]), numbers), data]
        if self._key is not None:
            self._known[True][self._key] = header
        self._send(values, self.rank + 1, _FORTH)

    def _receive(self, into: Tensor, sender: int, tag: int) -> None:
        sender %= self.ranks
        self._awaited = f", waits for stage {self._stage + (1 if tag == _BACK else -1)}"
        dist.recv(into, group=self._lane(tag, sender), group_src=sender, tag=tag)
        self._awaited = ""

    def _lane(self, tag: int, sender: int) -> dist.ProcessGroup:
        return self._lanes[tag, sender] if (tag, sender) in self._lanes else self._lanes[tag, 0]

    def _send(self, values: Sequence[Tensor], to: int, tag: int) -> None:
        """Begin to send one message, in one or two parts."""
        works = list[tuple[dist.Work, Tensor]]()
        for value in values:
            work = dist.isend(value, group=self._lane(tag, self.rank), group_dst=to % self.ranks, tag=tag)
            assert work is not None, "this rank is in the group"
            works.append((work, value))
        self._sent[tag].append(works)
        # A neighbour is behind by as many micro-batches as there are stages. A gradient it takes before it needs
        # anything else of this rank, unless each has several stages.
        several = (self.ranks + 1) * len(self._chunks)
        self._settle(tag, 1 if tag == _BACK and len(self._chunks) == 1 else several)

    def _settle(self, tag: int, most: int) -> None:
        """Wait until at most so many of the messages that this rank has sent are on their way."""
        sent = self._sent[tag]
        while len(sent) > most:
            for work, _ in sent.pop(0):
                work.wait()

    def _settle_all(self) -> None:
        for tag in self._sent:
            self._settle(tag, 0)

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
            to, back = (_FORTH, _BACK) if self.rank < other else (_BACK, _FORTH)
            self._send([mine.contiguous()], other, to)
            self._receive(theirs, other, back)
            self._settle_all()
            first, second = (mine, theirs) if self.rank < other else (theirs, mine)
            mine.copy_(first + second)
            if name in before:
                parameter.grad += before[name]


def _tensors(batch: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _digest(batch: object) -> int:
    return int(digest_of_several(_tensors(batch)))


def _form(header: Sequence[int]) -> tuple[int, ...]:
    return *header[:_FORM], *_shape(header)


def _shape(header: Sequence[int]) -> list[int]:
    return list(header[_HEADER : _HEADER + header[2]])


def _nbytes(header: Sequence[int]) -> int:
    return math.prod(_shape(header)) * _DTYPES[header[0]].itemsize


def _up(size: int) -> int:
    """Return the next number of bytes at which a header may begin."""
    return -(-size // 8) * 8


def _packed(value: Tensor, header: Tensor) -> Tensor:
    """Return the bytes of a value and the header behind it."""
    whole = torch.empty(_up(value.nbytes) + header.nbytes, dtype=torch.uint8, device=value.device)
    whole[: value.nbytes].view(value.dtype).view(value.shape).copy_(value)
    whole[_up(value.nbytes) :].view(header.dtype).copy_(header)
    return whole


def _lanes(group: dist.ProcessGroup, *, both_ways: bool) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Return the groups by which each kind of message travels, by its tag and sender; sender 0 stands for all.

    NCCL runs what two ranks exchange in a group in the order of their calls, whatever the tags: a rank that sends its
    next value before it takes a gradient would wait for a rank that sends the gradient first.

    Args:
        group: the ranks that have the stages.
        both_ways: two ranks send each other values and gradients.

    Collective over the group.
    """
    kinds = [(tag, sender) for tag in (_FORTH, _BACK) for sender in range(1 + both_ways)]
    if dist.get_backend(group) in TAGGED:
        return dict.fromkeys(kinds, group)
    ranks, found = dist.get_process_group_ranks(group), dict[tuple[int, int], dist.ProcessGroup]()
    for tag, sender in kinds:
        title = f"pp {'back' if tag == _BACK else 'forth'}" + (f" from {sender}" if both_ways else "")
        made: Any = dist.new_group(ranks, use_local_synchronization=True, group_desc=title)
        found[tag, sender] = made
    share_timeout(found.values())
    return found


def refused() -> MeshparError:
    """Return the error for a call of the module that no stage can run alone."""
    return MeshparError(
        "the module is called, and this rank has a part of its layers; run a step by par.backward(micro_batches, loss) "
        "and an evaluation by par.forward(micro_batches, function)"
    )
