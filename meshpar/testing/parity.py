"""Train under a plan and in one process, and compare everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Facts, Guards, Pass
from meshpar.core.registry import layout_for
from meshpar.core.resolved import resolve
from meshpar.losses.token_loss import IGNORE_INDEX, token_loss
from meshpar.parallelized import Parallelized
from meshpar.passes.data.batch_norm import has_batch_norm
from meshpar.plan import Plan
from meshpar.step.forward import Run
from meshpar.step.moment import Guarded, Moment
from meshpar.tensors.placements import whole_tensor


@final
@dataclass(slots=True)
class Record:
    """Hold the results of a training run: whole tensors, on the CPU.

    Attributes:
        losses: the loss of each step.
        norms: the gradient norm of each step.
        gradients: name -> gradient of the first step (None where there is none).
        weights: name -> value after the last step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


LossSum = Callable[[nn.Module, Any], tuple[Tensor, int]]
"""``(model, batch) -> (summed loss, number of tokens counted)``."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def token_loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the summed token loss of ``{"input_ids": (B, L), "labels": (B, L) aligned}`` and its number of tokens."""
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return token_loss(model(**inputs).logits, labels, reduction="sum"), int((labels != IGNORE_INDEX).sum())


def train_steps(
    par: Parallelized,
    steps: Sequence[Sequence[Any]],
    *,
    loss_sum: LossSum = token_loss_sum,
    max_norm: float = float("inf"),
    lr: float = 1e-2,
    eps: float = 1e-3,
    optimizer: torch.optim.Optimizer | None = None,
) -> Record:
    """Train with AdamW on global batches; every rank takes its own part. Collective.

    Args:
        par: the parallel module.
        steps: for each step micro-batches, each a sequence of ``n`` x data-size batches, of which data rank r takes
            every ``data_size``-th from r. What counts are the ``labels`` of a mapping that are not -100, else one. With
            batch norm a rank's parts of a micro-batch are joined along dim 0 (tensors, or mappings, lists and tuples of
            them) for one forward, so that its statistics are those of all samples on every mesh.
        loss_sum: the loss, summed over what it counts.
        max_norm: gradients are clipped to this norm.
        lr: AdamW's learning rate.
        eps: AdamW's, large on purpose: a gradient that is zero by theory (a bias before a softmax) is divided by its
            own size, which would blow rounding noise up to a full step.
        optimizer: instead of a new AdamW.

    Returns:
        The losses (token means over everything), norms, first gradients and last weights.
    """
    record = Record()
    if optimizer is None:
        fused = all(parameter.is_floating_point() for parameter in par.module.parameters())
        optimizer = torch.optim.AdamW(par.module.parameters(), lr=lr, eps=eps, weight_decay=0.01, fused=fused)
    for number, micro_batches in enumerate(steps):
        indices = range(par.data_rank, max(map(len, micro_batches)), par.data_size)
        parts = [[par.split(micro[index]) for index in indices if index < len(micro)] for micro in micro_batches]
        scale = par.token_scale(sum(_count(batch) for micro in parts for batch in micro))
        if has_batch_norm(par.module):
            parts = [[_joined(micro)] if micro else [] for micro in parts]
        total = torch.zeros((), device=par.device)
        for micro in par.accumulate(parts):
            # One forward and one backward a micro-batch: FSDP2 reduces once for each backward.
            loss = torch.stack([loss_sum(par.module, batch)[0] for batch in micro]).sum() * scale
            loss.backward()
            total += loss.detach()
        if number == 0:
            record.gradients = {name: whole(p.grad) for name, p in par.module.named_parameters() if p.grad is not None}
        record.norms.append(float(par.clip_grad_norm_(max_norm)))
        record.losses.append(float(par.data_sum(total.clone()) / par.loss_size))
        optimizer.step()
        optimizer.zero_grad()
    record.weights = {name: whole(parameter) for name, parameter in par.module.named_parameters()}
    return record


def _joined(parts: Sequence[Any]) -> object:
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(pieces) for pieces in zip(*parts, strict=True))
    return torch.cat(list(parts))


def _count(batch: object) -> int:
    return int((batch["labels"] != IGNORE_INDEX).sum()) if isinstance(batch, Mapping) and "labels" in batch else 1


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on the CPU, whatever its placements. Collective."""
    return whole_tensor(tensor).cpu().clone()


def assert_parity(
    build: Callable[[], nn.Module],
    mesh: str | MeshSpec,
    passes: Sequence[Pass],
    steps: Sequence[Sequence[Any]],
    *,
    layout: ModelLayout | None = None,
    seed: int = 0,
    tolerance: float = 1e-5,
    loss_sum: LossSum = token_loss_sum,
    max_norm: float = 1.0,
    expected: Record | None = None,
    alone: Sequence[Pass] = (),
    optimizer: MakeOptimizer | None = None,
    guards: Guards = "always",
) -> Parallelized:
    """Assert that training under a plan equals training in one process on the concatenated batches. Collective.

    Both runs start from the weights of ``seed``. Rank 0 runs the one process, without the plan's passes. Loss and
    gradient norm of every step, every gradient of the first step and every weight after the last must agree.

    Args:
        build: makes the model; called twice, on the meta device, so modules need ``reset_parameters``.
        mesh: mesh of the whole world.
        passes: the plan.
        steps: see :func:`train_steps`.
        layout: the model's description; None asks the module.
        seed: of the initial weights.
        tolerance: relative to each tensor's largest absolute value.
        loss_sum: the loss.
        max_norm: gradients are clipped to this norm, so clipping is also compared.
        alone: passes without axes that the one process also applies, because they change the training itself.
        optimizer: makes the optimizer of each run from its parameters; None: the AdamW of :func:`train_steps`.
        expected: result of :func:`one_process` for the same model and steps; None: runs it.
        guards: as :class:`meshpar.Plan` takes it.

    Returns:
        The parallel module after training.

    Raises:
        AssertionError: naming what differs and by how much.
    """
    trained: Any = {"loss_sum": loss_sum, "max_norm": max_norm}
    if expected is None:
        expected = one_process(build, steps, layout=layout, seed=seed, passes=alone, optimizer=optimizer, **trained)
    with torch.device("meta"):
        module = build()
    par = Plan(mesh, passes, guards=guards).apply(module, layout).materialize(seed=seed)
    got = train_steps(par, steps, optimizer=optimizer and optimizer(par.module.parameters()), **trained)
    verdict = [""]
    if dist.get_rank() == 0:
        try:
            assert_records_match(expected, got, tolerance)
        except AssertionError as error:
            verdict = [str(error)]
    dist.broadcast_object_list(verdict)
    if verdict[0]:
        raise AssertionError(verdict[0])
    return par


def one_process(
    build: Callable[[], nn.Module],
    steps: Sequence[Sequence[Any]],
    *,
    layout: ModelLayout | None = None,
    seed: int = 0,
    loss_sum: LossSum = token_loss_sum,
    max_norm: float = 1.0,
    passes: Sequence[Pass] = (),
    optimizer: MakeOptimizer | None = None,
) -> Record:
    """Train in one process on rank 0, with ``passes`` without axes; other ranks get an empty record, an at once."""
    if dist.get_rank() != 0:
        return Record()
    par = _alone(build, layout, seed, passes)
    chosen = optimizer and optimizer(par.module.parameters())
    return train_steps(par, steps, loss_sum=loss_sum, max_norm=max_norm, optimizer=chosen)


def _alone(
    build: Callable[[], nn.Module], layout: ModelLayout | None, seed: int, passes: Sequence[Pass] = ()
) -> Parallelized:
    """Return the model in this process, with ``passes`` without axes, on a mesh that nobody shares."""
    with torch.device("meta"):
        module = build()
    full_layout, facts, moments = layout or layout_for(module), Facts(), list[Moment]()
    for pass_ in passes:
        if pass_.axes:
            raise MeshparError(
                f"{pass_.name} works over {', '.join(pass_.axes)}, which one process does not have; leave it out of "
                "alone="
            )
        installed = pass_.install(module, full_layout, None, facts)  # type: ignore[arg-type]
        if installed is not None:
            facts.add(installed.facts)
            moments += installed.moments
    return in_this_process(module, full_layout, facts, moments).materialize(seed=seed)


def in_this_process(
    module: nn.Module, layout: ModelLayout, facts: Facts | None = None, moments: Sequence[Moment] = ()
) -> Parallelized:
    """Return a module on a mesh that nobody shares, whatever other ranks this process has."""
    lonely = MeshSpec()
    meshes: Any = {lonely: None}
    alone = Guarded(
        module=module,
        resolved=resolve((), lonely, module, layout),
        meshes=meshes,
        device=torch.device("cpu"),
        replaced=(),
        lengths=set(),
        guards="off",
        facts=facts or Facts(),
        units=Units(module),
    )
    return Parallelized(Run(alone, moments), Plan(lonely))


def assert_records_match(expected: Record, got: Record, tolerance: float = 1e-5) -> None:
    """Raise AssertionError, worst first, unless two runs agree to ``tolerance`` of each tensor's largest value."""
    differences: list[tuple[float, str]] = []

    def compare(name: str, want: Tensor, have: Tensor, floor: float) -> None:
        if want.shape != have.shape:
            differences.append((float("inf"), f"{name}: shape {tuple(have.shape)}, expected {tuple(want.shape)}"))
            return
        error = float((want.double() - have.double()).abs().max()) if want.numel() else 0.0
        scale = max(float(want.double().abs().max()) if want.numel() else 0.0, floor)
        if not error <= tolerance * scale:
            part = error / scale
            differences.append((part, f"{name}: off by {error:.2e}, {part:.1e} of its largest value {scale:.2e}"))

    for name, have in (("losses", got.losses), ("norms", got.norms)):
        compare(name, torch.tensor(getattr(expected, name)), torch.tensor(have), 0.0)
    # A gradient that is zero by theory holds rounding noise only; it is compared with the size of others.
    typical = max((float(grad.abs().max()) for grad in expected.gradients.values()), default=0.0)
    for kind, floor in (("gradients", 1e-3 * typical), ("weights", 0.0)):
        want, have = getattr(expected, kind), getattr(got, kind)
        if set(want) != set(have):
            differences.append((float("inf"), f"{kind}: names differ, {sorted(set(want) ^ set(have))}"))
        for name in sorted(set(want) & set(have)):
            compare(f"{kind[:-1]} of {name}", want[name], have[name], floor)
    if differences:
        listed = "\n  ".join(text for _, text in sorted(differences, reverse=True)[:20])
        count = f"{len(differences)} differences from one process"
        raise AssertionError(f"{count} (tolerance {tolerance:.0e}):\n  {listed}")


def random_tokens(vocab: int, batch: int, length: int, *, seed: int, ignored: float = 0.0) -> dict[str, Tensor]:
    """Return a random batch: ``input_ids`` and aligned ``labels`` (B, L), a part of them ``ignored``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (batch, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < ignored] = IGNORE_INDEX
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def token_steps(
    vocab: int,
    *,
    steps: int = 3,
    micro_batches: int = 1,
    parts: int = 8,
    batch: int = 1,
    length: int = 16,
    uneven: bool = True,
) -> list[list[list[dict[str, Tensor]]]]:
    """Return steps for :func:`train_steps`: ``parts`` batches a micro-batch (any data size that divides it)."""

    def draw(step: int, micro: int, part: int) -> dict[str, Tensor]:
        ignored, seed = (part % 3) * 0.25 if uneven else 0.0, (step * 31 + micro) * 101 + part
        return random_tokens(vocab, batch, length, seed=seed, ignored=ignored)

    micros = range(micro_batches)
    return [[[draw(step, micro, part) for part in range(parts)] for micro in micros] for step in range(steps)]
