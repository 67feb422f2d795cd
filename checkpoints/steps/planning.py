"""Which rank writes which part of a step: divided by rank 0, and kept while no rank's tensors change."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar.checkpoints.format.dcp import check_cover
from meshpar.checkpoints.format.writing import Group, Layout, Ledger, TensorPart, WriteReport, pack, unpack
from meshpar.checkpoints.steps.ranks import SavingRanks
from meshpar.core.errors import CheckpointError
from meshpar.tensors.placements import held_by_this_rank, local_tensor
from meshpar.weights.rules import Spans

Share = Sequence[Sequence[int]]  # the parts that a rank writes: of each of its Alike, positions in the list of names
# of a box, the ranks that have it: (rank, position of its Alike, first name there)
_Claims = list[tuple[int, int, int]]


class Alike(NamedTuple):
    """Tensors that are divided alike, of the same whole ``shape``, and the box of each that one rank has."""

    packed: bytes  # their names, compressed: rank 0 receives them from every rank, and compares them as one
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        return unpack(self.packed)

    @property
    def spans(self) -> Spans:
        return tuple((offset, offset + size) for offset, size in zip(self.offsets, self.sizes))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The state of one rank that is saved; ``extra`` is plain data that all ranks have alike."""

    alike: Sequence[Alike]
    tied: Sequence[Sequence[str]]
    optimizer: Mapping[str, Any] | None
    rank_extra: Any
    extra: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The division, on rank 0, and the tied names of all ranks."""

    token: str
    groups: Sequence[Group]
    tied: Sequence[Sequence[str]]


@final
@dataclass(frozen=True, slots=True)
class _Greeting:
    """Data that each rank sends in every save."""

    token: str | None  # of the plan that the rank keeps; None: it keeps none for these tensors
    table: str | None  # digest of the names in the optimizer's table; None: no table
    rank_extra: Any
    extra: Mapping[str, str]  # digests of what all ranks must have alike, by name


@final
class Planning:
    """The plan of a rank's last save, known by a token; all plan again if the token of any rank differs."""

    def __init__(self) -> None:
        self._digest, self._token = "", ""
        self._share: Share = ()
        self._agreed: Agreed | None = None  # on rank 0
        self._ledger: Ledger | None = None  # on rank 0, after a save of this plan

    def agree(
        self,
        ranks: SavingRanks,
        step: str,
        describe: Callable[[], Described],
        settle: Callable[[Agreed, Sequence[Mapping[str, Any]], Sequence[Any]], None],
    ) -> list[tuple[Alike, Sequence[int]]]:
        """Return the parts that this rank writes; on rank 0 ``settle`` gets the division. Collective."""
        described: list[Described] = []
        extras: list[Any] = []

        def greet() -> _Greeting:
            described.append(describe())
            return self._greet(described[0], ranks)

        def ask(greetings: Sequence[_Greeting]) -> tuple[bool, Sequence[int]] | None:
            """Return whether all ranks plan again, and which ranks' optimizer tables differ; None: neither."""
            extras.extend(greeting.rank_extra for greeting in greetings)
            _refuse_other_extras([greeting.extra for greeting in greetings])
            last_first = reversed(list(enumerate(greetings)))
            first = {greeting.table: rank for rank, greeting in last_first if greeting.table is not None}
            token = None if self._agreed is None else self._agreed.token
            replan = token is None or any(greeting.token != token for greeting in greetings)
            if replan or set(first.values()) - {0}:
                return replan, sorted(first.values())
            assert self._agreed is not None
            settle(self._agreed, _tables({0: described[0].optimizer}), extras)
            return None

        question = ranks.agree(step, greet, ask)
        if question is not None:
            replan, asked_ranks = question

            def answer() -> tuple[Sequence[Alike], Sequence[Sequence[str]], Mapping[str, Any] | None]:
                """Return what rank 0 lacks, without its own table: all ranks' messages have one length."""
                table = described[0].optimizer if ranks.rank in asked_ranks and ranks.rank > 0 else None
                return (described[0].alike, described[0].tied, table) if replan else ((), (), table)

            answers = ranks.collect(step, answer)

            def divided() -> Sequence[tuple[str, Share] | None]:
                shares: Sequence[Share] = ()
                if replan:
                    groups, shares = divide([alike for alike, _, _ in answers])
                    tied = sorted({tuple(group) for _, ties, _ in answers for group in ties})
                    self._ledger = None
                    self._agreed = Agreed(token=secrets.token_hex(8), groups=groups, tied=tied)
                assert self._agreed is not None
                tables = {rank: table for rank, (_, _, table) in enumerate(answers)} | {0: described[0].optimizer}
                settle(self._agreed, _tables(tables), extras)
                return [(self._agreed.token, share) for share in shares] or [None] * ranks.size

            if (plan := ranks.spread(step, divided)) is not None:
                self.keep(plan, described[0], ranks)
        return list(zip(described[0].alike, self._share, strict=True))

    def keep(self, plan: tuple[str, Share], described: Described, ranks: SavingRanks) -> None:
        """Keep a plan's token and this rank's share, for as long as ``described`` and the ranks stay as they are."""
        (self._token, self._share), self._digest = plan, _digest(described, ranks)

    def ledger_of(self, reports: Sequence[WriteReport], layouts: Sequence[Layout] = ()) -> Ledger | None:
        """Return the ledger of reported files, by their layouts; without them the last save's, if it fits."""
        if layouts:
            assert self._agreed is not None
            self._ledger = Ledger(self._agreed.groups, layouts, self._agreed.tied)
        return self._ledger if self._ledger is not None and self._ledger.fits(reports) else None

    def _greet(self, described: Described, ranks: SavingRanks) -> _Greeting:
        token = self._token if self._digest == _digest(described, ranks) else None
        extra = {name: _hash(json.dumps(value, sort_keys=True)) for name, value in described.extra.items()}
        names = None  # of ranks with equal names the first one's table is saved
        if (table := described.optimizer) is not None:
            groups = [(group["params"], group.get("optimizer")) for group in table["groups"]]
            names = _hash([table["class"], groups, [(name, list(state)) for name, state in table["state"].items()]])
        return _Greeting(token, names, described.rank_extra, extra)


def _refuse_other_extras(extras: Sequence[Mapping[str, str]]) -> None:
    """Raise an error if ranks gave a save different data, of which rank 0's would be restored on all of them."""
    for rank, extra in enumerate(extras):
        if names := sorted(name for name in extras[0].keys() | extra if extras[0].get(name) != extra.get(name)):
            raise CheckpointError(
                f"extra={{{', '.join(map(repr, names))}: ...}} is another on rank {rank} than on rank 0, whose values "
                "all ranks would restore; pass what differs between ranks, such as the schedule of the parameter "
                "groups that a stage of pp has, as rank_extra"
            )


def _tables(tables: Mapping[int, Mapping[str, Any] | None]) -> list[Mapping[str, Any]]:
    return [table for _, table in sorted(tables.items()) if table is not None]


def _digest(described: Described, ranks: SavingRanks) -> str:
    """Return a hash of all that the division depends on."""
    return _hash([ranks.rank, ranks.size, [tuple(entry) for entry in described.alike], described.tied])


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def alike(tensors: Mapping[str, Tensor]) -> list[Alike]:
    """Return this rank's parts of tensors; raises CheckpointError for a shard that its placements do not give."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        local = local_tensor(tensor)
        groups.setdefault((tensor.shape, local.dtype, local.shape, placed), []).append(name)
    parts = []
    for (shape, dtype, local_shape, _), names in groups.items():
        index = held_by_this_rank(tensors[names[0]])
        sizes = tuple(span.stop - span.start for span in index)
        if sizes != tuple(local_shape):
            raise CheckpointError(
                f"{names[0]}: this rank has a shard of {tuple(local_shape)}; expected {sizes} of {tuple(shape)}"
            )
        if math.prod(sizes) or not math.prod(shape):
            parts.append(Alike(pack(names), tuple(shape), dtype, tuple(span.start for span in index), sizes))
    return parts


def parts_of(share: Iterable[tuple[Alike, Sequence[int]]], tensors: Mapping[str, Tensor]) -> list[TensorPart]:
    """Return the parts of ``tensors`` that the plan assigns to this rank."""
    named = ((alike.names, alike.offsets, positions) for alike, positions in share)
    return [
        TensorPart(names[position], offsets, local_tensor(tensors[names[position]]))
        for names, offsets, positions in named
        for position in positions
    ]


def divide(said: Sequence[Sequence[Alike]]) -> tuple[list[Group], list[Share]]:
    """Divide the parts of all ranks so that each is written once; return the groups, and each rank's equal share."""
    loads = [0] * len(said)
    shares: list[list[list[int]]] = [[[] for _ in boxes_of_rank] for boxes_of_rank in said]
    groups, work = [], []
    for names, holders in _claims(said):
        if len({(holder.shape, holder.dtype) for holder in holders}) > 1:
            kinds = {
                f"{box.shape}, {str(box.dtype).removeprefix('torch.')}": claims[0][0] for box, claims in holders.items()
            }
            seen = " and ".join(f"{kind} on rank {rank}" for kind, rank in kinds.items())
            raise CheckpointError(
                f"{names[0]} differs between ranks: {seen}; expected the same shape and dtype on every rank"
            )
        boxes = sorted(holders.items(), key=lambda pair: pair[0].offsets)
        first = boxes[0][0]
        check_cover(names[0], first.shape, [box.spans for box, _ in boxes])
        groups.append(Group(names, first.shape, first.dtype, tuple((box.offsets, box.sizes) for box, _ in boxes)))
        work += [(math.prod(box.sizes) * box.dtype.itemsize, len(names), claims) for box, claims in boxes]
    for size, count, claims in sorted(work, key=lambda entry: -entry[0]):  # the largest first: the others fill the gaps
        for number in range(count):
            rank, at, start = claims[0] if len(claims) == 1 else min(claims, key=lambda claim: loads[claim[0]])
            shares[rank][at].append(start + number)
            loads[rank] += size
    return groups, [[_short(claim) for claim in share] for share in shares]


def _claims(said: Sequence[Sequence[Alike]]) -> list[tuple[list[str], dict[Alike, _Claims]]]:
    """Return names, and for each box the ranks that have it."""
    together: dict[bytes, dict[Alike, _Claims]] = {}
    names: dict[bytes, list[str]] = {}
    for rank, report in enumerate(said):
        for at, part in enumerate(report):
            if part.packed not in names:
                names[part.packed] = part.names
            together.setdefault(part.packed, {}).setdefault(part._replace(packed=b""), []).append((rank, at, 0))
    counts = Counter(name for group in names.values() for name in group)
    claims_of, alone = [], dict[str, dict[Alike, _Claims]]()
    for packed, boxes in together.items():
        if all(counts[name] == 1 for name in names[packed]):
            claims_of.append((names[packed], boxes))
            continue
        for number, name in enumerate(names[packed]):  # ranks have different sets of tensors
            for box, claims in boxes.items():
                alone.setdefault(name, {}).setdefault(box, []).extend((rank, at, number) for rank, at, _ in claims)
    return [*claims_of, *(([name], boxes) for name, boxes in alone.items())]


def _short(positions: list[int]) -> Sequence[int]:
    """Return positions as a range, which is short to send, where they are one."""
    positions = sorted(positions)
    run = range(positions[0], positions[-1] + 1) if positions else range(0)
    return run if len(run) == len(positions) else positions
