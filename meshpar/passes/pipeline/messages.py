"""The messages of stages: values forth, their gradients back; and the errors that end a wait for them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar._torch.groups import default_store, open_groups, share_timeout
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, first_line
from meshpar.passes.pipeline.stand_ins import MOST_SHAPES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 6
_FORM = 2 + _MOST_DIMS  # numbers that say what a value is
FAILED = -2  # in the place of a width
Forms = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # of values: their dtypes and shapes
FORTH, BACK = 0, 1  # tags of messages, of which two ranks may exchange both kinds in one direction
TAGGED = ("gloo", "fake")  # backends that keep messages of different tags apart
_ALIKE_S = 10.0  # in which an error comes on all ranks of a stage, if it does
_ALONE = "meshpar/failed alone"  # where the ranks' store says which rank failed, and no other one of its stage


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
        or f"{where}: the rank of another stage of pp has ended, or did not come in time; the first error of all ranks "
        f"is the cause. The exchange ended with: {first_line(error)}"
    )


def failed_alone() -> str:
    """Return what the rank that failed alone has told; empty where none did, or the store has ended."""
    with suppress(RuntimeError):
        store = default_store()
        return store.get(_ALONE).decode() if store.check([_ALONE]) else ""
    return ""


def forget_alone() -> None:
    """Forget what this rank has told, because it goes on."""
    with suppress(RuntimeError):
        default_store().delete_key(_ALONE)


def tell_alone(cause: str) -> str:
    """Tell the other ranks that this one failed alone, for when its end breaks their exchanges; return the text."""
    said = (
        f"rank {dist.get_rank()} failed alone in {cause}; the other ranks of its stage wait for it; correct what "
        "failed there, and start the job again"
    )
    with suppress(RuntimeError):  # the store has ended with its process
        default_store().set(_ALONE, said)
    return said


def all_fail(where: str, ranks: int) -> bool:
    """Return whether so many ranks fail at the same place within seconds."""
    if ranks == 1:
        return True
    with suppress(RuntimeError):
        store, until = default_store(), time.monotonic() + _ALIKE_S
        failed = f"meshpar/failed/{ranks} ranks/{where}"  # plans over other numbers of stages count for themselves
        count, pause = store.add(failed, 1), 0.02
        needed = count + -count % ranks
        while store.add(failed, 0) < needed:
            if time.monotonic() > until:
                if store.add(failed, -1) < needed - 1:  # the next failure there counts from the beginning
                    return False
                store.add(failed, 1)  # the last one came just now
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)
        return True
    return False
