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

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.parallelized import Parallelized
from meshpar.placements import held_by_this_rank, local_gradient, local_tensor, placed_like, shard_dim
from meshpar.state.full import BLOCKS
from meshpar.training.optimizer import parameter_groups

BLOCK = 256
"""Consecutive numbers of a row that share a scale."""
SMALLEST = 4096
"""Elements of the smallest parameter whose moments are small; those of others, and of vectors, are in float32."""
_CHUNK = 1 << 16  # elements whose moments are in float32 at a time: what stays in a core's cache
_MOMENTS = ("exp_avg", "exp_avg_sq")
_DTYPES = {"8bit": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32}


@final
class SmallAdamW(torch.optim.Optimizer):
    """AdamW with moments in 8 bits or in bfloat16, which have the same bits on every mesh for the same gradients.

    Parameters with two dims or more and 4,096 elements or more, counted over all shards, have small moments. In 8 bits,
    256 consecutive numbers of a row share a scale, their largest, and each is the nearest of 256 values that are dense
    around zero (dynamic tree quantisation, Dettmers et al. 2022, arXiv 2110.02861). Ranks that hold parts of one block
    exchange its largest number, all blocks in one exchange a step. A step computes in float32.

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
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
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
            raise MeshparError(
                "SmallAdamW: expected lr >= 0, eps > 0, weight_decay >= 0 and betas from 0 to 1; got "
                f"{lr}, {eps}, {weight_decay}, {tuple(betas)}"
            )
        module = module if isinstance(module, nn.Module) else module.module
        self._codes_of = functools.cache(_Codes)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        common = {"lr": lr, "betas": tuple(betas), "eps": eps, "states": states, "stochastic": stochastic, "seed": seed}
        super().__init__([{**group, **common} for group in parameter_groups(module, weight_decay)], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step, after ``closure``, if given, computed the loss and gradients again. Collective over the ranks
        that hold parts of a row.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        work = [
            _Parameter(parameter, group, self.state[parameter], self._names.get(id(parameter), ""), self._codes_of)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for update in work:
            update.begin()
        _share_largest([update for update in work if update.cut])
        for update in work:
            update.step()
        return loss


@final
@dataclass
class _Parameter:
    """One parameter in one step: this rank's part of it, as rows.

    Attributes:
        cut: axes of the mesh that divide its blocks.
        largest: of a parameter with ``cut``: the largest number of each block of both moments, over those axes.
    """

    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    name: str
    codes_of: Callable[..., _Codes]
    kind: str = "float32"
    cut: list[int] = field(default_factory=list)
    largest: list[Tensor] | None = None

    def __post_init__(self) -> None:
        parameter = self.parameter
        if parameter.ndim > 1 and parameter.numel() >= SMALLEST:
            self.kind = self.group["states"]
        if self.kind == "8bit" and isinstance(parameter, DTensor):
            last, sizes, placed = parameter.ndim - 1, parameter.device_mesh.shape, enumerate(parameter.placements)
            self.cut = [axis for axis, placement in placed if shard_dim(placement) == last and sizes[axis] > 1]

    def begin(self) -> None:
        """Make the state, count the step, and find the largest numbers of blocks that others hold parts of."""
        if "exp_avg" not in self.state:
            self._make()
        self.state["step"] += 1
        self._grad = self._rows(local_gradient(self.parameter).contiguous())
        held = held_by_this_rank(self.parameter) or (slice(0, 1),)
        self._leading, self._columns = held[:-1], held[-1]
        if self.cut:
            self.largest = [torch.zeros_like(self._blocks(key)) for key in _MOMENTS]
            for rows in self._chunks():
                for largest, moment in zip(self.largest, self._moments(rows)):
                    largest[rows] = self._largest_of(moment)

    def step(self) -> None:
        """Update the parameter and its moments."""
        lr, (beta1, beta2), count = float(self.group["lr"]), self.group["betas"], self.state["step"]
        first, second = 1 - beta1**count, math.sqrt(1 - beta2**count)
        values = self._rows(local_tensor(self.parameter))
        for rows in self._chunks():
            moments = self._moments(rows)
            part = values[rows].to(torch.float32, copy=True)
            part.mul_(1 - lr * self.group["weight_decay"])
            part.sub_(moments[0].div(moments[1].sqrt().div_(second).add_(self.group["eps"])).mul_(lr / first))
            values[rows] = self._rounded(part, values.dtype, "parameter", rows)
            for number, (key, moment) in enumerate(zip(_MOMENTS, moments)):
                stored = self._rows(local_tensor(self.state[key]))
                if self.kind != "8bit":
                    stored[rows] = self._rounded(moment, stored.dtype, key, rows)
                    continue
                scales = self._largest_of(moment) if self.largest is None else self.largest[number][rows]
                self._blocks(key)[rows] = scales
                stored[rows] = self._coded(moment, scales, key, rows)
        for key, largest in zip(_MOMENTS, self.largest or ()):  # a rank without columns has them, too
            self._blocks(key).copy_(largest)

    def _make(self) -> None:
        self.state["step"] = 0
        for key in _MOMENTS:
            self.state[key] = torch.zeros_like(self.parameter, dtype=_DTYPES[self.kind])
            if self.kind == "8bit":
                local_tensor(self.state[key]).fill_(_tree(key == "exp_avg").index(0.0))
                *rows, columns = self.parameter.shape
                scales = torch.zeros(*rows, -(-columns // BLOCK), device=local_tensor(self.parameter).device)
                if isinstance(self.parameter, DTensor):
                    scales = placed_like(scales, self.parameter, {self.parameter.ndim - 1})
                self.state[key + BLOCKS] = scales

    def _rows(self, part: Tensor) -> Tensor:
        return part.view(math.prod(part.shape[:-1]), part.shape[-1] if part.ndim else 1)

    def _blocks(self, key: str) -> Tensor:
        return self._rows(local_tensor(self.state[key + BLOCKS]))

    def _chunks(self) -> Iterator[slice]:
        """Yield rows of this rank's part a few at a time."""
        part = self._rows(local_tensor(self.parameter))
        few = max(1, (_CHUNK if runtime.on_host(part.device) else 256 * _CHUNK) // max(1, part.shape[1]))
        yield from (slice(start, start + few) for start in range(0, len(part) if part.numel() else 0, few))

    def _moments(self, rows: slice) -> list[Tensor]:
        """Return the moments after this step, in float32, by operations that round once, each alone."""
        grad = self._grad[rows].to(torch.float32)
        beta1, beta2 = self.group["betas"]
        first = self._read("exp_avg", rows).mul_(beta1).add_(grad.mul(1 - beta1))
        return [first, self._read("exp_avg_sq", rows).mul_(beta2).add_(grad.mul(grad).mul_(1 - beta2))]

    def _read(self, key: str, rows: slice) -> Tensor:
        stored = self._rows(local_tensor(self.state[key]))[rows]
        if self.kind != "8bit":
            return stored.to(torch.float32, copy=True)
        return self._codes(key).values[stored.to(torch.int32)].mul_(self._spread(self._blocks(key)[rows]))

    def _largest_of(self, moment: Tensor) -> Tensor:
        """Return the largest absolute number of each block of whole rows, (rows, blocks); 0 for what others hold."""
        found = moment.new_zeros(len(moment), self.state["exp_avg" + BLOCKS].shape[-1])
        first, start = divmod(self._columns.start, BLOCK)
        whole = nn.functional.pad(moment.abs(), (start, -self._columns.stop % BLOCK))
        found[:, first : first + whole.shape[1] // BLOCK] = whole.view(len(moment), -1, BLOCK).amax(2)
        return found

    def _coded(self, moment: Tensor, scales: Tensor, key: str, rows: slice) -> Tensor:
        codes = self._codes(key)
        scaled = moment.div(self._spread(scales).clamp_(min=torch.finfo(torch.float32).tiny))
        if not self.group["stochastic"]:
            return codes.smaller(scaled, middles=True).to(torch.uint8)  # the nearest; of two, the smaller
        below = codes.smaller(scaled, middles=False).sub_(1).clamp_(0, len(codes.values) - 2)  # has a next one
        low, high = codes.values[below], codes.values[below + 1]
        chance = self._bits(key, rows).bitwise_and_((1 << 24) - 1).to(torch.float32).mul_(2.0**-24)
        return below.add_(chance < (scaled - low).div_(high - low)).to(torch.uint8)

    def _rounded(self, values: Tensor, dtype: torch.dtype, key: str, rows: slice) -> Tensor:
        if dtype != torch.bfloat16 or not self.group["stochastic"]:
            return values.to(dtype)
        bits = values.view(torch.int32)
        added = bits.add(self._bits(key, rows).bitwise_and_(0xFFFF).to(torch.int32)).bitwise_and_(-65536)
        return torch.where(values.isfinite(), added.view(torch.float32), values).to(dtype)

    def _spread(self, scales: Tensor) -> Tensor:
        """Return the scale of each number, (rows, columns), of the blocks' scales (rows, blocks)."""
        start, end = self._columns.start, self._columns.stop
        held = scales[:, start // BLOCK : -(-end // BLOCK)].repeat_interleave(BLOCK, 1)
        return held[:, start % BLOCK :][:, : end - start]

    def _codes(self, key: str) -> _Codes:
        return self.codes_of(key == "exp_avg", local_tensor(self.parameter).device)

    def _bits(self, key: str, rows: slice) -> Tensor:
        """Return 64 random bits for each number of some rows, a function of the seed, the step, the name, and the place
        in the whole (SplitMix64; Steele et al. 2014).
        """
        text = f"{self.group['seed']} {self.state['step']} {key} {self.name}".encode()
        start = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
        device = local_tensor(self.parameter).device
        index = torch.zeros((), dtype=torch.int64, device=device)
        for place, size in zip(self._leading, self.parameter.shape):
            index = index.unsqueeze(-1) * size + torch.arange(place.start, place.stop, device=device)
        index = index.reshape(-1, 1)[rows] * (self.parameter.shape[-1] if self.parameter.ndim else 1)
        index = index + torch.arange(self._columns.start, self._columns.stop, device=device)
        mixed = index.mul_(-0x61C8864680B583EB).add_(start)  # SplitMix64's constants, as signed numbers
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            mixed = mixed.bitwise_xor_((mixed >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)
        return mixed


@final
class _Codes:
    """The values of a byte.

    Attributes:
        values: all 256, ascending.
    """

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


def _share_largest(parameters: Sequence[_Parameter]) -> None:
    """Join the largest numbers of blocks that several ranks hold parts of, one exchange for each axis."""
    by_group: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        assert isinstance(parameter.parameter, DTensor) and parameter.largest is not None
        for axis in parameter.cut:
            by_group.setdefault(parameter.parameter.device_mesh.get_group(axis), []).extend(parameter.largest)
    for group, largest in by_group.items():
        joined = torch.cat([part.reshape(-1) for part in largest])
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
        for part, values in zip(largest, joined.split([part.numel() for part in largest])):
            part.copy_(values.view_as(part))


@functools.cache
def _tree(signed: bool) -> tuple[float, ...]:
    """Return the values of dynamic tree quantisation: decades down to 1e-7, the larger ones divided more finely."""
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        ends = [0.1 + 0.9 * number / count for number in range(count + 1)]
        middles = [(low + high) / 2 * 10.0 ** (decade - 6) for low, high in itertools.pairwise(ends)]
        found += middles if not signed else [sign * middle for middle in middles for sign in (-1, 1)]
    return tuple(sorted(found))
