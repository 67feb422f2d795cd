"""The messages of stages: values forth, their gradients back; and the errors that end a wait for them.

Values travel in one message where their form is known, with a header that tells of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar._torch.groups import default_store, open_groups, share_timeout
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, first_line
from meshpar.passes.host_reads import beside
from meshpar.passes.pipeline.cuts import Result
from meshpar.passes.pipeline.portion import Portion, Turn
from meshpar.passes.pipeline.stand_ins import MOST_SHAPES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 6
_FORM = 2 + _MOST_DIMS  # numbers that say what a value is
FAILED = -2  # in the place of a width
Forms = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # of values: their dtypes and shapes
FORTH, BACK = 0, 1  # tags of messages, of which two ranks may exchange both kinds in one direction
TAGGED = ("gloo", "fake")  # backends that keep messages of different tags apart
# where the ranks' store says which rank failed, and no other one of its stage
FAILED_ALONE = "meshpar/failed alone"


class LostError(MeshparError):
    """Raised where the rank of another stage has ended or does not come: nothing can be exchanged any more."""


@final
@dataclass(frozen=True, slots=True)
class Header:
    """The numbers that travel with the values of a micro-batch from one stage."""

    # of further values of a block, which do not travel; -1: a block returns the value alone; FAILED: none comes
    width: int
    number: int
    stage: int
    forms: Forms

    @staticmethod
    def size(values: int) -> int:
        """Return how many numbers tell of so many values."""
        return 3 + values * _FORM

    def tensor(self, values: int, device: torch.device) -> Tensor:
        """Return the numbers that tell of so many values; nothing waits for the device."""
        numbers = _numbers(self, values)
        return numbers if runtime.on_host(device) else numbers.pin_memory().to(device, non_blocking=True)

    @staticmethod
    @lru_cache(512)
    def of_numbers(*numbers: int) -> Header:
        """Return the header of :meth:`tensor`, the same in each step."""
        width, number, stage, *rest = numbers
        every = (rest[at : at + _FORM] for at in range(0, len(rest), _FORM))
        return Header(width, number, stage, tuple((DTYPES[kind], tuple(sizes[:dims])) for kind, dims, *sizes in every))

    def check(self, number: int, stage: int) -> None:
        """Refuse the values of another micro-batch or stage than these."""
        if (self.number, self.stage) != (number, stage):
            raise MeshparError(
                f"values of micro-batch {self.number} came from stage {self.stage}, expected those of micro-batch "
                f"{number} from stage {stage}; install the same version of meshpar on all ranks of pp"
            )

    def keep(self, headers: dict[object, Header], form: object) -> None:
        """Join the headers of other forms; both ends of a cut forget those where they have become too many."""
        if form not in headers and len(headers) >= MOST_SHAPES:
            headers.clear()
        headers[form] = self

    def room(self, device: torch.device) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return room for values of these forms in one message, the values in it, and the numbers behind them."""
        spans, end = _spans(self.forms)
        whole = torch.empty(end + 8 * self.size(len(spans)), dtype=torch.uint8, device=device)
        values = [whole[span].view(dtype).view(shape).detach() for span, (dtype, shape) in zip(spans, self.forms)]
        return whole, values, whole[end:].view(torch.int64)


@lru_cache(512)
def _numbers(header: Header, values: int) -> Tensor:
    """Return a header in host memory, the same in each step; nobody writes into it."""
    row = [header.width, header.number, header.stage]
    for dtype, shape in header.forms:
        row += [DTYPES.index(dtype), len(shape), *shape, *[0] * (_MOST_DIMS - len(shape))]
    return torch.tensor(row + [0] * (header.size(values) - len(row)), device="cpu")


@lru_cache
def _spans(forms: Forms) -> tuple[list[slice], int]:
    """Return where values of these forms are in a message, and where they end."""
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in forms]
    # kernels read aligned values faster
    *begins, end = accumulate((-(-size // 256) * 256 for size in sizes), initial=0)
    return [slice(begin, begin + size) for begin, size in zip(begins, sizes)], end


@final
class StageMessages:
    """The messages of one rank, which has ``chunks`` stages; ``doing`` returns which runs, in which action."""

    def __init__(self, group: dist.ProcessGroup, chunks: int, doing: Callable[[], str]) -> None:
        self._chunks, self._doing = chunks, doing
        self._coming = deque[tuple[dist.Work, str]]()  # calls that receive, and what the watchdog says of them
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        # ``hosts``: the group of what hosts know, without a wait for a device
        self._lanes, self.hosts = _lanes(group)
        self.sent: dict[int, list[list[tuple[dist.Work, Tensor]]]] = {FORTH: [], BACK: []}

    def exchanged(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what an exchange with other stages returns; raise LostError if a rank has ended or does not come."""
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            raise _lost(self._doing() or f"stage {self._rank}", error) from error

    def waits(self) -> str:
        """Return for which message of which stage this rank waits, in which action; other threads may call this."""
        # on an accelerator the host goes on and waits where it reads a value, so that the message itself is asked
        return next((said for work, said in tuple(self._coming) if not work.is_completed()), "")

    def receive(self, into: Tensor, stage: int, tag: int) -> None:
        """Wait for a message from a stage."""
        sender, said = stage % self._ranks, f"{self._doing() or f'stage {self._rank}'}, waits for stage {stage}"
        try:
            work: Any = dist.irecv(into, group=self._lanes[tag, sender], group_src=sender, tag=tag)
            while self._coming and self._coming[0][0].is_completed():
                self._coming.popleft()
            self._coming.append((work, said))
            work.wait()
        except RuntimeError as error:
            raise _lost(said, error) from error

    def send(self, values: Sequence[Tensor], stage: int, tag: int) -> None:
        """Begin to send a stage one message, in parts."""
        works, lane = list[tuple[dist.Work, Tensor]](), self._lanes[tag, self._rank]
        for value in values:
            work = self.exchanged(dist.isend, value, group=lane, group_dst=stage % self._ranks, tag=tag)
            assert work is not None, "this rank is in the group"
            works.append((work, value))
        for parts in self.sent[tag]:  # what the other rank has taken is let go; its place in the order stays
            if all(work.is_completed() for work, _ in parts):
                parts.clear()
        self.sent[tag].append(works)
        # A neighbour is behind by as many micro-batches as there are stages. A gradient it takes before it needs
        # anything else of this rank, unless each has several stages.
        self._settle(tag, 1 if tag == BACK and self._chunks == 1 else (self._ranks + 1) * self._chunks)

    def settle_first(self, tag: int) -> None:
        """Wait until the first of the messages that are on their way has arrived."""
        self._settle(tag, max(0, len(self.sent[tag]) - 1))

    def settle_all(self) -> None:
        """Wait until all messages have arrived."""
        for tag in self.sent:
            self._settle(tag, 0)

    def _settle(self, tag: int, most: int) -> None:
        """Wait until at most so many messages are on their way."""
        sent = self.sent[tag]
        while len(sent) > most:
            for work, _ in sent.pop(0):
                self.exchanged(work.wait)


def _lanes(group: dist.ProcessGroup) -> tuple[dict[tuple[int, int], dist.ProcessGroup], dist.ProcessGroup]:
    """Return the groups of messages by tag and sender, and the group of the hosts. Collective over the group."""
    ranks = dist.get_process_group_ranks(group)
    edges = list(product((FORTH, BACK), range(len(ranks))))
    if dist.get_backend(group) in TAGGED:
        return dict.fromkeys(edges, group), group
    # NCCL runs what a rank exchanges in a group in the order of its calls, whatever the tags and the other ranks. Along
    # the ring of stages two senders share a group only where neither sends to the other: in each group a rank has one
    # kind of call and one other rank, and no message waits behind one that is none of its own.
    groups, lanes = dict[tuple[int, int], Any](), dict[tuple[int, int], dist.ProcessGroup]()
    # torch names a group by its ranks and the number of groups that this rank has: without a number in common, the
    # ranks would wait for one another under different names.
    counts = [0] * len(ranks)
    dist.all_gather_object(counts, len(open_groups()), group=group)
    lacking = range(max(counts) - counts[dist.get_rank(group)])
    alone: list[Any] = [
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True) for _ in lacking
    ]
    for tag, sender in edges:
        color = 2 if sender and sender == len(ranks) - 1 and sender % 2 == 0 else sender % 2
        if (tag, color) not in groups:
            title = f"pp {'back' if tag == BACK else 'forth'} {color}"
            groups[tag, color] = dist.new_group(ranks, use_local_synchronization=True, group_desc=title)
        lanes[tag, sender] = groups[tag, color]
    hosts: Any = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="pp hosts")
    for one in alone:
        dist.destroy_process_group(one)
    share_timeout([*groups.values(), hosts])
    # NCCL's first call of two ranks in a group returns when both have called: they do so here, in one order.
    rank, first = dist.get_rank(group), torch.zeros(1, device=runtime.device())
    for (tag, sender), lane in lanes.items():
        receiver = (sender + (1 if tag == FORTH else -1)) % len(ranks)
        if rank == sender:
            dist.send(first, group=lane, group_dst=receiver)
        elif rank == receiver:
            dist.recv(first, group=lane, group_src=sender)
    return lanes, hosts


def _lost(where: str, error: RuntimeError) -> LostError:
    return LostError(
        failed_alone()
        or f"{where}: the rank of another stage of pp has ended, or did not come in time; correct what the first error "
        f"of all ranks says, and start the job again. The exchange ended with: {first_line(error)}"
    )


def failed_alone() -> str:
    """Return what the rank that failed alone has told; empty where none did, or the store has ended."""
    with suppress(RuntimeError):
        store = default_store()
        return store.get(FAILED_ALONE).decode() if store.check([FAILED_ALONE]) else ""
    return ""


class FailedBeforeError(Exception):
    """Raised in a micro-batch that an error ended on an earlier stage, which tells of it at the end of the step."""


@final
class Transfers:
    """The values and gradients that this rank's stages exchange; ``fail`` gets errors that end an action."""

    def __init__(self, portion: Portion, doing: Callable[[], str], fail: Callable[[Exception], None]) -> None:
        self._chunks, self._carried, self._fail = portion.chunks, portion.carried, fail
        self.messages = StageMessages(portion.group, len(portion.chunks), doing)
        # ``late``: numbers behind values are read one micro-batch later, so that the host waits for no device; then
        # messages of a known form are exchanged whatever fails, with zeros in the place of values
        self.device, self.late, self.failed = torch.device("cpu"), False, False
        # Headers of the last values that came and went in each chunk for a micro-batch of one form.
        self._got, self._given = ([dict[object, Header]() for _ in portion.chunks] for _ in range(2))
        self._announced: Header | None = None  # whose values have yet to come
        self._unread = list[tuple[int, int, Callable[[], Tensor]]]()  # numbers behind values: micro-batch and stage
        # headers of what a simulated rank gets, by their results, as the stages before have filled them
        self.supposed: dict[Result | None, Header] | None = None

    def use(self, device: torch.device) -> None:
        """Exchange values of a device."""
        self.device, self.late = device, not runtime.over_hosts(device)

    def begin_step(self) -> None:
        """Begin a step or an evaluation, and forget what a failed one left."""
        if self.failed:
            self._unread.clear()
        self.failed = False

    def receive(self, turn: Turn) -> None:
        """Receive what the stage before hands on; its header comes behind values of a known form, or else before."""
        results, numbers = (None, *self._chunks[turn.chunk].takes), torch.Tensor()
        expected, header, values = self._got[turn.chunk].get(turn.form), self._announced, list[Tensor]()
        if self.supposed is not None:
            first = self.supposed[None]
            expected = replace(first, forms=tuple(self.supposed.get(result, first).forms[0] for result in results))
        if header is None:
            if expected is None:
                numbers = torch.empty(Header.size(len(results)), dtype=torch.int64, device=self.device)
                self.messages.receive(numbers, turn.stage - 1, FORTH)
            else:
                whole, values, numbers = expected.room(self.device)
                self.messages.receive(whole, turn.stage - 1, FORTH)
            if expected is not None and self.late:
                header = expected
                with beside(self.device) as to_host:
                    self._unread.append((turn.number, turn.stage - 1, to_host(numbers)))
            else:
                header = expected if self.supposed is not None and expected else Header.of_numbers(*numbers.tolist())
                if header.width == FAILED:
                    turn.takes, error = False, FailedBeforeError()
                    self._fail(error)
                    raise error
                if expected is None or header.forms != expected.forms:
                    # noted, so that no values are read as a header where there is no memory for them
                    self._announced = header
        if self._announced is not None:
            values = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in header.forms]
            for value in values:
                self.messages.receive(value, turn.stage - 1, FORTH)
        self._announced, turn.takes = None, False
        header.keep(self._got[turn.chunk], turn.form)
        self._carried.dtype, self._carried.width = header.forms[0][0], header.width
        turn.arrived = [value.requires_grad_() for value in values] if torch.is_grad_enabled() else values
        if self.late and header is expected:
            self._read(1)
        elif self.supposed is None and not self.failed:  # with what has come noted: its gradients go back
            header.check(turn.number, turn.stage - 1)

    def _read(self, most: int) -> None:
        """Read the numbers of what came, but for the last ``most``; raise FailedBeforeError where one says so."""
        while len(self._unread) > most:
            number, stage, read = self._unread.pop(0)
            numbers = read()
            if self.failed or self.supposed is not None:
                continue
            header = Header.of_numbers(*numbers.tolist())
            if header.width == FAILED:
                error = FailedBeforeError()
                self._fail(error)
                raise error
            header.check(number, stage)

    def send(self, turn: Turn, values: Sequence[Tensor] | None) -> None:
        """Send to the next stage the value of a block and what goes with it; None: an error came before them."""
        gives = self._chunks[turn.chunk].gives
        forms = tuple((value.dtype, tuple(value.shape)) for value in values or ())
        header = Header(FAILED if values is None else self._carried.width, turn.number, turn.stage, forms)
        expected = self._given[turn.chunk].get(turn.form)
        if self.supposed is not None:
            expected, pairs = header, zip((None, *gives), forms, strict=True)
            self.supposed |= {result: replace(header, forms=(form,)) for result, form in pairs}
        if self.late and expected is not None:
            self._send_known(expected, header, turn, values)
            return
        numbers = header.tensor(1 + len(gives), self.device)
        parts = [numbers, *(values or ())]
        if expected is not None:
            whole, rooms, behind = expected.room(self.device)
            behind.copy_(numbers)
            parts[0] = whole  # where the next stage takes another form, it learns behind it what follows
            if forms == expected.forms:
                for room, value in zip(rooms, values or (), strict=True):
                    room.copy_(value)
                parts = [whole]
        parts = [part.contiguous() for part in parts]
        if values is not None:  # behind all that needs memory: the next stage keeps what it has got
            header.keep(self._given[turn.chunk], turn.form)
        self.messages.send(parts, turn.stage + 1, FORTH)
        turn.sends = False

    def _send_known(self, expected: Header, header: Header, turn: Turn, values: Sequence[Tensor] | None) -> None:
        """Send values of a known form; after an error zeros, for which gradients come like for the others."""
        if values is not None and header.forms != expected.forms:
            shapes = (", ".join(str(shape) for _, shape in forms) for forms in (header.forms, expected.forms))
            raise MeshparError(
                "what stage {} hands on has the shapes {}, expected {} as for earlier inputs of the same shapes, which "
                "the next stage takes without a wait for its device; pad to shapes that follow from those of the "
                "inputs, or use a mesh without pp".format(turn.stage, *shapes)
            )
        whole, rooms, behind = expected.room(self.device)
        if values is None:
            whole.zero_()
            turn.left = [torch.zeros_like(room) for room in rooms]
        for room, value in zip(rooms, values or (), strict=values is not None):
            room.copy_(value)
        behind.copy_(header.tensor(len(rooms), self.device))
        self.messages.send([whole], turn.stage + 1, FORTH)
        turn.sends = False

    def receive_back(self, turn: Turn) -> list[Tensor]:
        """Receive the gradients of what was handed on."""
        grads = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in turn.left]
        for grad in grads:
            self.messages.receive(grad, turn.stage + 1, BACK)
        turn.takes = False
        return grads

    def send_back(self, turn: Turn) -> None:
        """Send the gradients of what had arrived; zeros where it has none."""
        back = [torch.zeros_like(value) if value.grad is None else value.grad for value in turn.arrived]
        self.messages.send([grad.contiguous() for grad in back], turn.stage - 1, BACK)
        turn.sends = False
