"""SmallAdamW: AdamW whose moments take one or two bytes a number, with the same bits on every mesh."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar._torch.tensors import foreach_add_, foreach_copy_
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.optim.matrices import parameter_groups
from meshpar.parallelized import Parallelized
from meshpar.state.full import BLOCKS
from meshpar.tensors.placements import held_by_this_rank, local_gradient, local_tensor, placed_like, shard_dim

BLOCK = 256  # consecutive numbers of a row that share a scale
SMALLEST = 4096
"""Elements of the smallest parameter whose moments are small; those of others, and of vectors, are in float32."""
_CHUNK = 1 << 16  # elements whose moments are in float32 at a time: what stays in a core's cache
_Chunk = list[tuple[int, slice]]  # numbers of parameters, and some rows of each
_MOMENTS = ("exp_avg", "exp_avg_sq")
_DTYPES = {"8bit": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32}


@final
class SmallAdamW(torch.optim.Optimizer):
    """AdamW with moments in 8 bits or in bfloat16, which have the same bits on every mesh for the same gradients.

    Parameters with two dims or more and 4,096 elements or more, counted over all shards, have small moments. In 8 bits,
    256 consecutive numbers of a row share a scale, their largest, and each is the nearest of 256 values that are dense
    around zero (dynamic tree quantisation, Dettmers et al. 2022, arXiv 2110.02861). Ranks that hold parts of one block
    exchange its largest number, all blocks in one exchange a step. A step computes in float32, some elements at a time,
    with up to 25 bytes for each, 52 with ``stochastic``: 65,536 on a CPU; on an accelerator a parameter's, at most 16.8
    million, or those of several parameters of the same columns, as many as the largest has or a million.

    >>> from torch import nn
    >>> from meshpar.optim import SmallAdamW
    >>> layer = nn.Linear(64, 64)
    >>> optimizer = SmallAdamW(layer, lr=1e-3)
    >>> layer(layer.weight).sum().backward(); optimizer.step()
    >>> state = optimizer.state[layer.weight]
    >>> state["exp_avg"].dtype
    torch.uint8

    Args:
        module: the parallel module or its ``Parallelized``; build the optimizer after ``plan.apply``.
        lr: as in ``torch.optim.AdamW``.
        betas: as in ``torch.optim.AdamW``.
        eps: as in ``torch.optim.AdamW``.
        weight_decay: decoupled decay of parameters with two dims or more.
        states: ``"8bit"`` or ``"bfloat16"``.
        stochastic: round up or down by chance, in proportion to the distance; parameters in bfloat16 too. The bits
            follow from seed, step, the parameter's name and the place in the whole parameter, so that every mesh and
            every restart draws the same. Take it with a decay above 0.99 and bfloat16, which else rounds the increments
            of the second moment away.
        seed: of ``stochastic``.

    Raises:
        MeshparError: an option is not known, or no parameter requires a gradient.
    """

    takes_module = True

    def __init__(
        self,
        module: nn.Module | Parallelized,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        states: Literal["8bit", "bfloat16"] = "8bit",
        stochastic: bool = False,
        seed: int = 0,
    ) -> None:
        if states not in ("8bit", "bfloat16"):
            raise MeshparError(f"SmallAdamW: states must be '8bit' or 'bfloat16', got {states!r}")
        if not (lr >= 0 and eps > 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            wanted = "expected lr >= 0, eps > 0, weight_decay >= 0 and betas from 0 to 1"
            raise MeshparError(f"SmallAdamW: {wanted}; got {lr}, {eps}, {weight_decay}, {tuple(betas)}")
        module = module if isinstance(module, nn.Module) else module.module
        self._codes_of = functools.cache(_Codes)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        common = {"lr": lr, "betas": tuple(betas), "eps": eps, "states": states, "stochastic": stochastic, "seed": seed}
        super().__init__([{**group, **common} for group in parameter_groups(module, weight_decay)], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step, after ``closure``, if given. Collective over the ranks that hold parts of a row."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        together: dict[tuple[Any, ...], _Rows] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._add(parameter, group, together)
        cut = [rows for rows in together.values() if rows.cut]
        for rows in cut:
            rows.find_largest()
        _share_largest(cut)
        for rows in together.values():
            rows.step()
        return loss

    def _add(self, parameter: Tensor, group: dict[str, Any], together: dict[tuple[Any, ...], _Rows]) -> None:
        """Count the step of a parameter, and put its rows below those of others with the same columns."""
        state, cut, placed = self.state[parameter], list[dist.ProcessGroup](), None
        kind = group["states"] if parameter.ndim > 1 and parameter.numel() >= SMALLEST else "float32"
        if "exp_avg" not in state:
            state |= _zeros(parameter, kind)
        state["step"] += 1
        if kind == "8bit" and isinstance(parameter, DTensor):
            mesh, placed, last = parameter.device_mesh, parameter.placements, parameter.ndim - 1
            split = (axis for axis, how in enumerate(placed) if shard_dim(how) == last)
            cut = [mesh.get_group(axis) for axis in split if mesh.shape[axis] > 1]
        *leading, columns = held_by_this_rank(parameter) or (slice(0, 1),)
        tensors = {"parameter": parameter, "grad": local_gradient(parameter).contiguous(), **state}
        tensors.pop("step")
        parts = {key: value.to_local() if isinstance(value, DTensor) else value for key, value in tensors.items()}
        part, width = parts["parameter"], parameter.shape[-1] if parameter.ndim else 1
        options = (id(group), kind, state["step"], parameter.ndim == 1, part.dtype, parts["exp_avg"].dtype, part.device)
        # with placements, so that ranks that exchange the largest of blocks have those of the same rows
        alike = (*options, width, columns.start, columns.stop, placed if cut else None, *cut)
        if alike not in together:
            together[alike] = _Rows(group, kind, state["step"], width, columns, cut, self._codes_of)
        rows, runs, done = together[alike], _runs(leading, parameter.shape), 0
        for first, count in runs:
            rows.names.append(self._names.get(id(parameter), ""))
            rows.first.append(first)
            for key, part in parts.items():
                flat = part if part.ndim in (1, 2) else part.view(part.shape[:-1].numel(), part.shape[-1:].numel())
                rows.parts.setdefault(key, []).append(flat if len(runs) == 1 else flat[done : done + count])
            done += count


@final
@dataclass
class _Rows:
    """Rows of parameters with the same columns, one below another, in one step; ``cut``: groups that divide blocks."""

    group: dict[str, Any]
    kind: str
    count: int
    width: int
    columns: slice
    cut: list[dist.ProcessGroup]
    codes_of: Callable[..., _Codes]
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    largest: Tensor | None = None

    def find_largest(self) -> None:
        """Find the largest numbers of this rank's part of each block."""
        blocks, done = self.parts["exp_avg" + BLOCKS], 0
        self.largest = blocks[0].new_zeros(len(_MOMENTS), sum(map(len, blocks)), blocks[0].shape[1])
        for chunk in self._chunks():
            moments = self._moments(chunk)
            for largest, moment in zip(self.largest, moments):
                largest[done : done + len(moment)] = self._largest_of(moment)
            done += len(moments[0])

    def step(self) -> None:
        """Update the parameters and their moments."""
        lr, (beta1, beta2), done = float(self.group["lr"]), self.group["betas"], 0
        first, second = 1 - beta1**self.count, math.sqrt(1 - beta2**self.count)
        for chunk in self._chunks():
            moments = self._moments(chunk)
            part = self._join("parameter", chunk).to(torch.float32)
            part.mul_(1 - lr * self.group["weight_decay"])
            part.sub_(moments[0].div(moments[1].sqrt().div_(second).add_(self.group["eps"])).mul_(lr / first))
            self._write("parameter", chunk, self._round(part, "parameter", chunk))
            for number, (key, moment) in enumerate(zip(_MOMENTS, moments)):
                if self.kind != "8bit":
                    self._write(key, chunk, self._round(moment, key, chunk))
                    continue
                scales = self._largest_of(moment) if self.largest is None else self.largest[number, done:][: len(part)]
                self._write(key + BLOCKS, chunk, scales)
                self._write(key, chunk, self._encode(moment, scales, key, chunk))
            done += len(part)
        for key, largest in () if self.largest is None else zip(_MOMENTS, self.largest):
            blocks = self.parts[key + BLOCKS]  # a rank without columns has them, too
            foreach_copy_(blocks, largest.split([*map(len, blocks)]))

    def _chunks(self) -> Iterator[_Chunk]:
        """Yield rows of this rank's parts a few at a time."""
        parts = self.parts["parameter"]
        elements = min(256, max(16, *(part.numel() // _CHUNK for part in parts))) * _CHUNK
        elements = elements if runtime.queues(parts[0].device) else _CHUNK
        few = max(1, elements // max(1, self.columns.stop - self.columns.start))
        chunk, room = list[tuple[int, slice]](), few
        for number, part in enumerate(parts):
            start, end = 0, (len(part) if part.ndim > 1 else 1) if part.numel() else 0
            while start < end:
                stop = min(end, start + room)
                chunk.append((number, slice(start, stop)))
                room, start = room - (stop - start), stop
                if not room:
                    yield chunk
                    chunk, room = [], few
        if chunk:
            yield chunk

    def _of(self, key: str, chunk: _Chunk) -> list[Tensor]:
        """Return the memory of rows, parameter by parameter."""
        chosen = ((self.parts[key][number], rows) for number, rows in chunk)
        return [part if part.ndim == 1 or rows == slice(0, len(part)) else part[rows] for part, rows in chosen]

    def _join(self, key: str, chunk: _Chunk) -> Tensor:
        """Return a copy of rows."""
        joined = torch.cat(self._of(key, chunk))
        return joined if joined.ndim > 1 else joined.view(len(chunk), -1)

    def _write(self, key: str, chunk: _Chunk, values: Tensor) -> None:
        parts = self._of(key, chunk)
        foreach_copy_(parts, values.unbind() if parts[0].ndim == 1 else values.split([*map(len, parts)]))

    def _moments(self, chunk: _Chunk) -> list[Tensor]:
        """Return the moments after this step, in float32, by operations that round once, each alone."""
        grad = self._join("grad", chunk).to(torch.float32)
        beta1, beta2 = self.group["betas"]
        first = self._read("exp_avg", chunk).mul_(beta1).add_(grad.mul(1 - beta1))
        return [first, self._read("exp_avg_sq", chunk).mul_(beta2).add_(grad.mul_(grad).mul_(1 - beta2))]

    def _read(self, key: str, chunk: _Chunk) -> Tensor:
        stored = self._join(key, chunk)
        if self.kind != "8bit":
            return stored.to(torch.float32)
        scales = self._join(key + BLOCKS, chunk)
        return self._codes(key).values[stored.to(torch.int32)].mul_(self._spread(scales))

    def _largest_of(self, moment: Tensor) -> Tensor:
        """Return the largest absolute number of each block of whole rows, (rows, blocks); 0 for what others hold."""
        largest = moment.new_zeros(len(moment), -(-self.width // BLOCK))
        first, start = divmod(self.columns.start, BLOCK)
        whole = nn.functional.pad(moment.abs(), (start, -self.columns.stop % BLOCK))
        largest[:, first : first + whole.shape[1] // BLOCK] = whole.view(len(moment), -1, BLOCK).amax(2)
        return largest

    def _encode(self, moment: Tensor, scales: Tensor, key: str, chunk: _Chunk) -> Tensor:
        codes = self._codes(key)
        scaled = moment.div(self._spread(scales).clamp_(min=torch.finfo(torch.float32).tiny))
        if not self.group["stochastic"]:
            return codes.smaller(scaled, middles=True).to(torch.uint8)  # the nearest; of two, the smaller
        below = codes.smaller(scaled, middles=False).sub_(1).clamp_(0, len(codes.values) - 2)  # has a next one
        low, high = codes.values[below], codes.values[below + 1]
        chance = self._bits(key, chunk).bitwise_and_((1 << 24) - 1).to(torch.float32).mul_(2.0**-24)
        return below.add_(chance < (scaled - low).div_(high - low)).to(torch.uint8)

    def _round(self, values: Tensor, key: str, chunk: _Chunk) -> Tensor:
        dtype = self.parts[key][0].dtype
        if dtype != torch.bfloat16 or not self.group["stochastic"]:
            return values.to(dtype)
        bits = values.view(torch.int32)
        added = bits.add(self._bits(key, chunk).bitwise_and_(0xFFFF).to(torch.int32)).bitwise_and_(-65536)
        return torch.where(values.isfinite(), added.view(torch.float32), values).to(dtype)

    def _spread(self, scales: Tensor) -> Tensor:
        """Return the scale of each number, (rows, columns), of the blocks' scales (rows, blocks)."""
        start, end = self.columns.start, self.columns.stop
        scales_here = scales[:, start // BLOCK : -(-end // BLOCK)].repeat_interleave(BLOCK, 1)
        return scales_here[:, start % BLOCK :][:, : end - start]

    def _codes(self, key: str) -> _Codes:
        return self.codes_of(key == "exp_avg", self.parts["parameter"][0].device)

    def _bits(self, key: str, chunk: _Chunk) -> Tensor:
        """Return 64 random bits a number from seed, step, name and place (SplitMix64; Steele et al. 2014)."""
        factor, starts, done = -0x61C8864680B583EB, list[int](), 0  # SplitMix64's constants, as signed numbers
        for number, rows in chunk:
            text = f"{self.group['seed']} {self.count} {key} {self.names[number]}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            start = seed + (self.first[number] + rows.start - done) * self.width * factor
            starts.append((start + (1 << 63)) % (1 << 64) - (1 << 63))
            done += rows.stop - rows.start
        device = self.parts["parameter"][0].device
        index = torch.arange(done, device=device).mul_(self.width).mul_(factor)
        foreach_add_(index.split([rows.stop - rows.start for _, rows in chunk]), starts)
        mixed = index[:, None] + torch.arange(self.columns.start, self.columns.stop, device=device).mul_(factor)
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            mixed = mixed.bitwise_xor_((mixed >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)
        return mixed


@final
class _Codes:
    """The 256 ``values`` of a byte, ascending."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        self.values = torch.tensor(_tree(signed), dtype=torch.float32, device=device)
        middles = (self.values[1:] + self.values[:-1]) / 2
        end = self.values.new_tensor([math.inf])
        self._bounds = torch.cat([self.values, end]), torch.cat([middles, end])
        # The smallest number of each upper half of a float's bits. No two bounds share an upper half.
        halves = torch.arange(1 << 16, dtype=torch.int32, device=device).sub_(1 << 15)
        smallest = halves.mul(1 << 16).bitwise_or_(torch.where(halves < 0, 0xFFFF, 0)).view(torch.float32)
        self._first = [torch.bucketize(smallest, bounds, out_int32=True) for bounds in self._bounds]

    def smaller(self, numbers: Tensor, *, middles: bool) -> Tensor:
        """Return how many values, or middles of two, are smaller than each number, ten times as fast as a search."""
        first = self._first[middles][(numbers.view(torch.int32) >> 16).add_(1 << 15)]
        return first.add_(self._bounds[middles][first] < numbers)


def _share_largest(cut: Sequence[_Rows]) -> None:
    """Join the largest numbers of blocks that several ranks hold parts of, one exchange for each axis."""
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    for rows in cut:
        assert rows.largest is not None
        for group in rows.cut:
            by_group.setdefault(group, []).append(rows.largest)
    for group, largest in by_group.items():
        joined = torch.cat([part.flatten() for part in largest])
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
        for part, values in zip(largest, joined.split([part.numel() for part in largest])):
            part.copy_(values.view_as(part))


def _runs(leading: Sequence[slice], shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and number of consecutive rows of the whole, of a slice of each dim before the last."""
    runs = [(0, 1)]
    for span, size in zip(leading, shape):
        rows = span.stop - span.start
        if rows == size:
            runs = [(first * size, count * size) for first, count in runs]
        else:
            runs = [((first + row) * size + span.start, rows) for first, count in runs for row in range(count)]
    return runs or [(0, 0)]


def _zeros(parameter: Tensor, kind: str) -> dict[str, Any]:
    """Return the state before the first step."""
    state: dict[str, Any] = {"step": 0, **{key: torch.zeros_like(parameter, dtype=_DTYPES[kind]) for key in _MOMENTS}}
    for key in _MOMENTS if kind == "8bit" else ():
        local_tensor(state[key]).fill_(_tree(key == "exp_avg").index(0.0))
        *rows, columns = parameter.shape
        scales = torch.zeros(*rows, -(-columns // BLOCK), device=local_tensor(parameter).device)
        if isinstance(parameter, DTensor):
            scales = placed_like(scales, parameter, {parameter.ndim - 1})
        state[key + BLOCKS] = scales
    return state


@functools.cache
def _tree(signed: bool) -> tuple[float, ...]:
    """Return the values of dynamic tree quantisation: decades down to 1e-7, the larger ones divided more finely."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        ends = [0.1 + 0.9 * number / count for number in range(count + 1)]
        middles = [(low + high) / 2 * 10.0 ** (decade - 6) for low, high in itertools.pairwise(ends)]
        values += middles if not signed else [sign * middle for middle in middles for sign in (-1, 1)]
    return tuple(sorted(values))
