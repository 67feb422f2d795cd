"""``forecast``: from a plan, a model and a batch to bytes, collectives and seconds, for one kind of hardware."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import meshpar.forecasting.staged as staged
from meshpar.core.errors import MeshparError, PlanError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.registry import layout_for
from meshpar.forecasting.cost import cost
from meshpar.forecasting.extrapolate import deepened
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.lints import lints
from meshpar.forecasting.report import Forecast, with_unit
from meshpar.forecasting.simulate import Depths, Simulation, simulate, stages_of
from meshpar.forecasting.step import Batch, Loss, summed_token_loss
from meshpar.forecasting.trace import Trace
from meshpar.plan import Plan, lost_replica_problems

Simulate = Callable[[Sequence[Simulation]], list[Trace]]
_PROBES = 2  # blocks of the smaller of two probes: a first and a last one


def forecast(
    plan: Plan,
    model: nn.Module,
    batch: Batch | Mapping[str, Tensor],
    *,
    hardware: Hardware | str | Path,
    world_size: int | None = None,
    layout: ModelLayout | None = None,
    loss: Loss = summed_token_loss,
    teacher: tuple[Plan, nn.Module] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    depth: Literal["probes", "all"] = "probes",
    device: Literal["cuda", "cpu"] = "cuda",
    replicas: int = 1,
) -> Forecast:
    """Forecast memory, collectives and step time of ``plan`` without running it.

    Another process applies the real passes to ``model`` in a simulated process group and replays one step.

    >>> print(forecast(plan, model, Batch(sequence=8192), hardware="h100"))  # doctest: +SKIP

    Args:
        plan: the plan to forecast.
        model: the model on the meta device; it is not changed.
        batch: the batch of a data rank; a dict of tensors is one micro-batch of their shapes.
        hardware: a profile, the name of one (``"h100"``) or its YAML file.
        world_size: number of ranks; None: the size of the mesh.
        layout: the model's layout; None: the module's own.
        loss: ``(model, batch) -> summed loss``, importable by name, for the tensors of :meth:`Batch.tensors`.
        teacher: the plan and module of a frozen model on the meta device that ``loss`` holds.
        optimizer: makes the module's optimizer, importable by name; None: AdamW.
        depth: ``"probes"`` replays two and three blocks and extrapolates; ``"all"`` replays every block.
        device: device type whose attention kernels and allocator are simulated.
        replicas: number of :class:`meshpar.training.Replicas`, each a job with this plan; 1: no such job.

    Raises:
        PlanError: the problems that :meth:`meshpar.Plan.check` finds.
        MeshparError: the step fails, or the model cannot be sent to another process.
    """
    profile = hardware if isinstance(hardware, Hardware) else Hardware.load(hardware)
    described = layout or layout_for(model)
    if world_size is None:
        if not isinstance(plan.mesh, MeshSpec) or -1 in plan.mesh.axes.values():
            raise MeshparError(f"mesh {str(plan.mesh)!r} does not say how many ranks there are; give world_size=")
        world_size = plan.mesh.size
    plan = on_nodes(plan, profile, world_size)
    spec = plan.check(model, described, world_size)
    if replicas > 1 and (problems := list(lost_replica_problems(plan.passes, spec, model))):
        raise PlanError(problems)
    job = Simulation(
        plan=Plan(spec, plan.passes, same_bits=plan.same_bits),
        model=model,
        layout=layout,
        batch=Batch.of(batch),
        world_size=world_size,
        loss=loss,
        teacher=teacher,
        optimizer=optimizer,
        device=device,
        replicas=replicas,
    )
    trace, replayed = trace_of(job, described, depth)
    return evaluated(trace, profile, job, replayed)


def evaluated(trace: Trace, profile: Hardware, job: Simulation, replayed: str) -> Forecast:
    """Return the forecast of a trace on a profile."""
    memory, timed, ranks = trace.memory(), cost(trace, profile), job.world_size * job.replicas
    replicas = f", each of {job.replicas} replicas" if job.replicas > 1 else ""
    return Forecast(
        title=f"{type(job.model).__name__}, {with_unit(trace.parameters)} parameters, on {ranks} x {profile.name}: "
        f"{job.plan}{replicas}",
        mesh=job.mesh,
        hardware=profile,
        batch=job.batch,
        world_size=ranks,
        trace=trace,
        memory=memory,
        cost=timed,
        lints=lints(trace, timed, profile),
        replayed=replayed,
    )


def on_nodes(plan: Plan, profile: Hardware, world_size: int) -> Plan:
    """Return the plan on nodes of the profile's size, from which an ``auto`` mesh derives its axes."""
    if isinstance(plan.mesh, MeshSpec):
        mesh = MeshSpec(plan.mesh.axes, ranks_per_node=plan.mesh.ranks_per_node or profile.node)
    else:
        mesh = MeshSpec.auto(world_size, min(profile.node, world_size), plan.mesh)
    return Plan(mesh, plan.passes, same_bits=plan.same_bits)


def trace_of(job: Simulation, layout: ModelLayout, depth: str = "probes") -> tuple[Trace, str]:
    """Return the trace of ``job`` at its whole depth, and whether it was replayed or extrapolated from probes."""
    depths = None
    if depth == "probes":
        with suppress(MeshparError):  # of blocks that differ
            depths = Depths(job.model, layout)
    try:
        return next(traces_of([job], layout, depths, partial(simulate, workers=2)))
    except MeshparError:
        if stages_of(job.plan) == 1:
            raise
        return simulate([job])[0], "all"  # stages of a few blocks may be refused where those of the job are not


def traces_of(
    jobs: Sequence[Simulation], layout: ModelLayout, depths: Depths | None, run: Simulate
) -> Iterator[tuple[Trace, str]]:
    """Yield what :func:`trace_of` returns for each job; ``run`` simulates the probes of all together."""
    probed = [_few_blocks(job, layout, depths) for job in jobs]
    traces = iter(run([few for some, _ in probed for few in some]) if jobs else [])
    for job, (some, join) in zip(jobs, probed):
        few = [next(traces) for _ in some]
        if len(few) == 1:
            yield few[0], "all"
            continue
        try:
            yield join(*few), "probes"
        except MeshparError:
            yield run([job])[0], "all"


def _few_blocks(
    job: Simulation, layout: ModelLayout, depths: Depths | None
) -> tuple[list[Simulation], Callable[[Trace, Trace], Trace]]:
    """Return two jobs of a few blocks, or the job itself if that saves nothing, and what joins two traces."""
    if depths is not None and stages_of(job.plan) > 1 and job.replicas == 1:
        with suppress(MeshparError):
            shape = staged.shape_of(job, layout)
            return staged.probes(job, depths), lambda few, more: staged.Stages(few, more).joined(shape)
    blocks = 0 if depths is None else depths.blocks
    return [job] if depths is None else probes(job, depths), lambda few, more: deepened(few, more, blocks)


def probes(job: Simulation, depths: Depths) -> list[Simulation]:
    """Return two jobs of few blocks to extrapolate from, or ``job`` alone if that saves nothing, as with buckets."""
    period = math.lcm(*(pass_.period for pass_ in job.plan.passes))
    ahead = max((pass_.blocks_ahead for pass_ in job.plan.passes), default=1)
    first = _PROBES + max(0, ahead - 1)
    first += (depths.blocks - first) % period
    if depths.blocks <= first + period or job.replicas > 1 or stages_of(job.plan) > 1:
        return [job]
    return [replace(job, model=depths.shallow(count)) for count in (first, first + period)]
