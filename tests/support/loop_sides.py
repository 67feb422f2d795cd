"""The two runs of a habit: one process on the whole batch, and a plan's ranks on their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from meshpar import (
    FullyShard,
    HybridShard,
    ModelLayout,
    PipelineParallel,
    Plan,
    Replicate,
    StagesLayout,
    TensorParallel,
)
from meshpar.passes.pipeline.stand_ins import Elsewhere
from meshpar.testing import whole
from tests.support.comparison import distance

PLANS = {
    "Replicate": ("dp_replicate=2", lambda: [Replicate()]),
    "FSDP": ("dp_shard=2", lambda: [FullyShard()]),
    "HSDP": ("dp_replicate=2,dp_shard=2", lambda: [HybridShard()]),
    "TP": ("tp=2", lambda: [TensorParallel()]),
    "FSDP x TP": ("dp_shard=2,tp=2", lambda: [TensorParallel(), FullyShard()]),
    "PP": ("pp=2", lambda: [PipelineParallel()]),
}
"""The columns of the table: title -> mesh and passes."""
WITH = " with guards="
"""Between the title of a plan and when its guards compare; they always do where a title has no such end."""
ROWS, FEATURES, DIM, CLASSES = 8, 6, 8, 3


def ranks_of(title: str) -> int:
    return 4 if "," in PLANS[title.partition(WITH)[0]][0] else 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between an input and an output layer: split, sharded and whole parameters under every plan."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, DIM)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(2))
        self.head = nn.Linear(DIM, CLASSES)

    def make_block(self) -> nn.Module:
        return Block()

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


LAYOUT = ModelLayout(blocks=("blocks.*",), tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})


class Side:
    """One run of a habit and its notes; ``world`` and ``parts`` are the plan's on both sides."""

    def __init__(self, title: str, *, alone: bool) -> None:
        self.title, _, guards = title.partition(WITH)
        self.alone, self.guards = alone, guards or "always"
        self.rank, self.world = 0 if alone else dist.get_rank(), ranks_of(title)
        self.parts = {"TP": 1, "PP": 1, "HSDP": 4}.get(self.title, 2)
        self.par = None
        self._applied = {}
        self.notes: list[tuple[str, Tensor, bool]] = []
        torch.manual_seed(0)

    # What a habit builds

    def net(self, build=Net) -> nn.Module:
        """A plain module in float64, the same on both sides and on every rank."""
        torch.manual_seed(1)
        return build().double()

    def apply(self, module: nn.Module, layout: ModelLayout = LAYOUT) -> nn.Module:
        """The module that the loop trains; on the parallel side also ``self.par``, that of the last call."""
        if self.alone:
            return module
        mesh, passes = PLANS[self.title]
        if self.title == "PP" and isinstance(module, Net):  # by which the plan finds what runs when
            weight = module.embed.weight
            example = torch.zeros(2, weight.shape[1], dtype=weight.dtype)
            layout = replace(layout, stages=StagesLayout(example=example))
        self.par = Plan(mesh, passes(), guards=self.guards).apply(module, layout)
        self._applied[self.par.module] = self.par
        return self.par.module

    def batches(self, count: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
        """This side's part of ``count`` batches of eight rows."""
        for seed in range(count):
            x, y = batch(seed)
            yield self.part(x), self.part(y)

    def steps(self, net: nn.Module, optimizer, count: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
        """This side's part of batches, with an optimizer's step after each; then keep the weights."""
        for x, y in self.batches(count):
            yield x, y
            optimizer.step()
            optimizer.zero_grad()
        self.weights(net)

    def part(self, rows: Tensor) -> Tensor:
        """This data rank's rows; alone, all of them."""
        return rows if self.alone else rows[self.par.data_rank :: self.par.data_size]

    # What meshpar adds to a loop

    def backward(
        self,
        net: nn.Module,
        loss: Callable[..., Tensor],
        *rows: Tensor,
        micro_batches: int = 2,
        between: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Run forward, ``between`` and backward on rows, over stages by ``par.backward``; return the loss."""
        if self.alone or self.title != "PP":
            value = loss(*rows)
            between()
            value.backward()
            return value
        between()

        def micro_loss(module: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
            value = loss(*batch) / micro_batches
            return value, {"loss": value.detach()}  # the total itself is float32

        parts = list(zip(*(tensor.chunk(micro_batches) for tensor in rows), strict=True))
        return self._applied[net].backward(parts, micro_loss)[1]["loss"]

    def output(self, net: nn.Module, x: Tensor) -> Tensor:
        """What the module returns, which over stages is ``par.forward(micro_batches, function)``."""
        if self.alone or self.title != "PP":
            return net(x)
        return torch.cat(self._applied[net].forward(x.chunk(2), lambda module, rows: module(rows)))

    def accumulate(self, micro_batches: Iterable) -> Iterable:
        return micro_batches if self.alone else self.par.accumulate(micro_batches)

    def clip(self, module: nn.Module, bound: float) -> None:
        norm = nn.utils.clip_grad_norm_(module.parameters(), bound) if self.alone else self.par.clip_grad_norm_(bound)
        self.note("norm", norm)

    # What is compared

    def note(self, label: str, value: Tensor | float) -> None:
        """Keep a value that every rank of the plan has whole, or in shards."""
        self.notes.append((label, whole(torch.as_tensor(value)), False))

    def note_rows(self, label: str, rows: Tensor) -> None:
        """Keep values of this rank's rows of the batch, unless another stage computes them."""
        if isinstance(rows, Elsewhere):
            return
        self.notes.append((label, whole(rows), True))

    def loss(self, loss: Tensor) -> None:
        """Keep a mean over this part's rows, as the mean over all rows."""
        self.note("loss", loss if self.alone else self.par.data_sum(whole(loss)) / self.par.data_size)

    def gradients(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.note(f"gradient of {name}", torch.zeros(()) if parameter.grad is None else parameter.grad)

    def weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.note(name, parameter)
        for name, buffer in module.named_buffers():
            self.note(name, buffer)

    def difference(self, expected: Side, tolerance: float) -> str | None:
        """Return what differs most from one process, if by more than ``tolerance``. Collective over stages."""
        notes = expected.notes
        if self.title == "PP":
            every, mine = [None] * self.world, _numbered(self.notes)
            dist.all_gather_object(every, list(mine))
            wanted, found = _numbered(notes), set().union(*every)
            if found != set(wanted):
                return f"stages noted other values than one process: {sorted(found ^ set(wanted))[:3]}"
            notes = [wanted[key] for key in mine]
        elif [label for label, *_ in self.notes] != [label for label, *_ in notes]:
            return f"{len(self.notes)} values where one process has {len(notes)}"
        worst = (0.0, "")
        floor = 1e-3 * max(
            (float(want.abs().max()) for label, want, _ in expected.notes if label.startswith("gradient")), default=0.0
        )
        for (label, have, rows), (_, want, _) in zip(self.notes, notes):
            want = want[self.par.data_rank :: self.par.data_size] if rows else want
            if want.shape != have.shape:
                return f"{label}: shape {tuple(have.shape)}, expected {tuple(want.shape)}"
            want, have = (
                tensor.double().nan_to_num(7e7, posinf=torch.inf, neginf=-torch.inf) for tensor in (want, have)
            )
            error = distance(want, have, floor if label.startswith("gradient") else 0.0)
            worst = max(worst, (error, f"{label} off by {error:.0e} of its largest value"))
        return worst[1] if worst[0] > tolerance else None


def _numbered(notes: list[tuple[str, Tensor, bool]]) -> dict[tuple[str, int], tuple[str, Tensor, bool]]:
    """Notes by their labels, and by how many of the same label came before."""
    found: dict[tuple[str, int], tuple[str, Tensor, bool]] = {}
    for note in notes:
        found[note[0], sum(label == note[0] for label, _ in found)] = note
    return found


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return tuple(torch.randn(ROWS, size, generator=generator, dtype=torch.float64) for size in (FEATURES, CLASSES))


def train(
    side: Side,
    net: nn.Module,
    optimizer,
    *,
    forward=None,
    before_step=None,
    after_step=None,
    steps: int = 3,
    micro_batches: int = 2,
) -> None:
    """The plainest loop, with a place for a habit; stages cut a batch into ``micro_batches``."""
    forward = net if forward is None else forward
    for number, (x, y) in enumerate(side.batches(steps)):
        loss = side.backward(net, lambda x, y: mse_loss(forward(x), y), x, y, micro_batches=micro_batches)
        side.loss(loss)
        if number == 0:
            side.gradients(net)
        if before_step is not None:
            before_step(x)
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(x)
    side.weights(net)


def sgd(net: nn.Module, lr: float = 0.1, **options) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=lr, **options)


def adamw(net: nn.Module, lr: float = 1e-2, **options) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        net.parameters(), lr=lr, eps=1e-3, **options
    )  # a large eps: AdamW blows up a zero's rounding noise
