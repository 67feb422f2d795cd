"""Plan: a mesh and passes; check, apply, describe, and prove a split without processes."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.calls import while_lives
from meshpar._torch.units import Units
from meshpar.core import registry, runtime
from meshpar.core.checks import arrows, check_arguments, checked_layout, problems_of
from meshpar.core.errors import LayoutError, MeshError, MeshparError, PlanError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, default_device_type
from meshpar.core.passes import Facts, Guards, Pass, Role
from meshpar.core.resolved import Resolved, resolve, run_passes
from meshpar.exchange.ranks import next_number
from meshpar.guards import make_run
from meshpar.guards.explain import Explanation
from meshpar.parallelized import Parallelized
from meshpar.passes.data.batch_norm import batch_norm_problems, batch_norms, prepare
from meshpar.passes.tensor.collectives import SimulatedGroup, SimulatedRanks
from meshpar.passes.tensor.context import Context
from meshpar.process.preview import EndOfPreview, PlannedModel, is_preview, planned_ranks
from meshpar.same_bits.limits import RUNS, bits_problems, fix_kernels
from meshpar.same_bits.trees import SameBits
from meshpar.state.description import Description, describe
from meshpar.state.initialize import check_weights
from meshpar.step.inner_calls import Calls
from meshpar.step.moment import Guarded
from meshpar.trials.copies import CannotCopy, copy_block, free, undisturbed
from meshpar.trials.engine import NOTHING, Verification, call_with, report
from meshpar.trials.split import SplitTest

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True, init=False)
class Plan:
    """Combine a mesh and a list of passes, in the order in which they apply.

    >>> from meshpar import FullyShard, Plan, TensorParallel
    >>> plan = Plan("dp_shard=4,tp=2", [TensorParallel(), FullyShard()])
    >>> print(plan.resolve(8))
    dp_shard=4,tp=2

    Args:
        mesh: a :class:`MeshSpec`, its text, or ``"auto"`` (``"auto,tp=4"``): shards inside a node and replicas across
            nodes, from the launcher's number of ranks per node.
        passes: objects of :class:`meshpar.Pass`. Their order is checked and never rearranged.
        verify: compare one block of each kind with the unsplit block in the first forward, if a pass splits features
            (see :meth:`Parallelized.verify`), and one module of experts of each kind with the undivided one.
        guards: when ranks compare what must be alike. ``"always"``: in every step; beside an accelerator in the first
            steps, later without waiting. ``"first"``: in the first steps, later only what costs no exchange. ``"off"``:
            never, and no first forward tries the split; the passes run alone, and a loop that is not one process's
            trains something else, or hangs, without an error.
        same_bits: loss, gradients, norm and weights have the same bits on every mesh whose step has the same
            micro-batches: sums over them follow one order. Micro-batch j of data rank r of d is number j x d + r. Loop
            over ``par.accumulate`` or call ``par.backward``, which reduce each micro-batch.
        frozen: the module is used and never trained, such as a reference or a reward model: ``apply`` takes its
            parameters out of autograd, so that a rank holds its part of them and nothing else.
    """

    mesh: MeshSpec | str
    passes: tuple[Pass, ...]
    verify: bool
    guards: Guards
    frozen: bool
    same_bits: bool

    def __init__(
        self,
        mesh: MeshSpec | str = "",
        passes: Sequence[Pass] = (),
        *,
        verify: bool = True,
        guards: Guards = "always",
        frozen: bool = False,
        same_bits: bool = False,
    ) -> None:
        check_arguments(mesh, passes, guards)
        object.__setattr__(self, "guards", guards)
        object.__setattr__(self, "verify", verify)
        object.__setattr__(self, "frozen", frozen)
        object.__setattr__(self, "same_bits", same_bits)
        object.__setattr__(
            self, "mesh", mesh if isinstance(mesh, MeshSpec) or mesh.strip().startswith("auto") else MeshSpec(mesh)
        )
        object.__setattr__(self, "passes", tuple(passes))

    def __str__(self) -> str:
        return f"{str(self.mesh) or 'one process'} [{arrows(self.passes)}]"

    def resolve(self, world_size: int) -> MeshSpec:
        """Return the mesh with all sizes, for ``world_size`` ranks; raises MeshError where these do not fit."""
        world_size = planned_ranks(self._mesh_size, world_size)
        per_node = self.mesh.ranks_per_node if isinstance(self.mesh, MeshSpec) else None
        per_node = per_node or runtime.ranks_per_node()
        if isinstance(self.mesh, MeshSpec):
            spec = MeshSpec(self.mesh.axes, ranks_per_node=per_node).resolve(world_size)
        else:
            spec = MeshSpec.auto(world_size, min(per_node or world_size, world_size), self.mesh)
        passes = [pass_ for pass_ in self.passes if isinstance(pass_, Pass) and pass_.works_without_axes]
        alone = {axis: 1 for pass_ in passes for axis in pass_.axes}
        return MeshSpec(alone | dict(spec.axes), ranks_per_node=spec.ranks_per_node) if alone else spec

    def check(self, module: nn.Module, layout: ModelLayout | None = None, world_size: int | None = None) -> MeshSpec:
        """Check the plan for a model and return the resolved mesh.

        Pure: allocates no weight and communicates with no rank. Every rank finds the same problems.

        Args:
            module: the model. The meta device is enough.
            layout: description of the model. Defaults to the module's own, then to the registered layouts.
            world_size: number of ranks. Defaults to the ranks of this job.

        Raises:
            PlanError: lists every problem.
        """
        return self.checked(module, layout, world_size).spec

    def checked(self, module: nn.Module, layout: ModelLayout | None, world_size: int | None) -> Resolved:
        """Check the plan for a model and return all that follows from it. See :meth:`check`."""
        world_size = runtime.world_size() if world_size is None else world_size
        problems: list[str] = []
        spec: MeshSpec | None = None
        try:
            spec = self.resolve(world_size)
        except MeshError as error:
            problems.append(str(error))
        try:
            layout = registry.layout_for(module) if layout is None else checked_layout(layout)
        except LayoutError as error:
            problems.append(str(error))
            layout = None
        problems += problems_of(self.passes, module, layout, spec, batch_norm_problems)
        if self.same_bits and spec is not None and layout is not None and not problems:
            problems += bits_problems(self.passes, module, layout, spec)
        if problems:
            raise PlanError(problems)
        assert spec is not None and layout is not None
        return resolve(self.passes, spec, module, layout)

    def machine_problems(self, device_type: str) -> list[str]:
        """Return what this machine, which :meth:`check` ignores, lacks to run a rank on a device of this type."""
        return [problem for pass_ in self.passes for problem in pass_.machine_problems(device_type)]

    def apply(
        self, module: nn.Module, layout: ModelLayout | None = None, *, device_type: str | None = None
    ) -> Parallelized:
        """Apply the passes to ``module`` in place and return it with its mesh.

        A module with weights keeps these weights, and each rank stores its part. ``apply`` frees each whole parameter
        when its part is made: at the peak a rank holds one whole model, the largest parameter once more (or 4 MiB). A
        module on the meta device gets weights from :meth:`Parallelized.materialize`. Build the optimizer afterwards.

        Args:
            module: the model, the same on every rank.
            layout: description of the model. Defaults to the module's own, then to the registered layouts.
            device_type: type of the device to train on. Defaults to the accelerator of the process group, or the CPU.

        Raises:
            PlanError: problems that :meth:`check` or :meth:`machine_problems` find, before the module changes.
            MeshparError: ranks pass different weights, or a pass renames or unties parameters.

        Collective: every rank calls it, inside :func:`meshpar.distributed`.
        """
        if is_preview():
            raise EndOfPreview(PlannedModel(name="model", plan=self, module=module, layout=layout))
        if not dist.is_initialized():
            raise MeshparError("no process group is open; wrap the job in `with meshpar.distributed():`")
        resolved = self.checked(module, layout, dist.get_world_size())
        device = self._device(module, resolved, device_type)
        if self.frozen:
            module.requires_grad_(False)
        # models that share process groups could use them in different orders
        has_groups = next_number() > 0
        meshes = {spec: spec.build(device.type, own=has_groups) for spec in resolved.meshes}
        verify = self.guards != "off" and bool(runtime.among_real_ranks(lambda: self.verify))
        facts = Facts(self.guards)
        if self.same_bits:
            facts.add([SameBits(math.prod(resolved.held.axes[axis] for axis in resolved.averaged))])
        start = partial(prepare, module, resolved, meshes) if self.passes else None
        installed, replaced = run_passes(module, resolved, meshes, device, facts, start)
        guarded = Guarded(
            module=module,
            resolved=resolved,
            meshes=meshes,
            device=device,
            replaced=tuple(map(weakref.ref, replaced)),
            lengths=set(),
            guards=self.guards,
            facts=facts,
            units=Units(module),
        )
        run = make_run(guarded, installed, title=str(self), verify=verify)
        if self.same_bits:
            runtime.among_real_ranks(lambda: while_lives(run, "kernels", partial(fix_kernels, device.type)))
            RUNS.add(run)
        return Parallelized(run, self)

    def _device(self, module: nn.Module, resolved: Resolved, device_type: str | None) -> torch.device:
        """Return this rank's device, made current; raise for what the machine lacks or weights that differ."""
        for pass_, seen in zip(resolved.passes, resolved.seen, strict=True) if dist.get_rank() == 0 else ():
            for warning in pass_.warnings(module, resolved.layout, seen):
                log.warning("%s", warning)
        kind = device_type or ("cpu" if dist.get_backend() in ("gloo", "fake") else default_device_type())
        if lacking := runtime.among_real_ranks(partial(self.machine_problems, kind)):
            raise PlanError(lacking)
        device = runtime.device(kind)
        runtime.make_current(device)
        if self.guards != "off":
            runtime.among_real_ranks(partial(check_weights, module, registry.offered(registry.GUARDS)))
        return device

    def prove(
        self, module: nn.Module, batch: Any, layout: ModelLayout | None = None, *, world_size: int | None = None
    ) -> Verification:
        """Compare the split model with the unsplit model in this one process, before a launch.

        Each rank of an axis that splits features is a thread with a copy of the module. Use a small model with the
        settings of the real one. :meth:`Parallelized.verify` describes the comparison.

        Args:
            module: the model with weights, on the CPU. It is not changed.
            batch: keyword arguments of the forward as a mapping, its arguments as a list or tuple, or its one argument.
            layout: description of the model. Defaults to the module's own, then to the registered layouts.
            world_size: number of ranks. Defaults to the size of the mesh, or the ranks of this job.

        Raises:
            PlanError: problems that :meth:`check` finds.
            ParallelError: names the modules that differ, the size of the difference and the style to check.
        """
        resolved = self.checked(module, layout, self._size(world_size))
        verification = NOTHING
        for pass_ in self.passes:
            for axis in resolved.divided(Role.FEATURES):
                if pass_.roles.get(axis) == Role.FEATURES:
                    verification = report(_prove(module, pass_, resolved, axis, batch, plan_text=str(self)))
        return verification

    def _size(self, world_size: int | None) -> int:
        """Return a number of ranks: as given, else of the mesh, else of this job."""
        return self._mesh_size or runtime.world_size() if world_size is None else world_size

    @property
    def _mesh_size(self) -> int | None:
        """The number of ranks of the mesh, None where it does not say."""
        sized = isinstance(self.mesh, MeshSpec) and -1 not in self.mesh.axes.values()
        return self.mesh.size if sized and isinstance(self.mesh, MeshSpec) else None

    def describe(
        self, module: nn.Module, layout: ModelLayout | None = None, *, world_size: int | None = None, replicas: int = 1
    ) -> Description:
        """Return what the rank with the most parameters would store, block by block. See :meth:`Parallelized.describe`.

        Applies the passes in this one process to ``module``, which is on the meta device and cannot be used afterwards.

        Args:
            module: the model.
            layout: description of the model. Defaults to the module's own, then to the registered layouts.
            world_size: number of ranks. Defaults to the size of the mesh, or the ranks of this job.
            replicas: number of replicas of :class:`meshpar.training.Replicas`, each a job of its own with this plan.

        Raises:
            PlanError: problems that :meth:`check` finds.
        """
        size = self._size(world_size)
        spec = self.check(module, layout, size)
        if replicas > 1 and (problems := list(lost_replica_problems(self.passes, spec, module))):
            raise PlanError(problems)
        with runtime.simulated(size):
            par = self.apply(module, layout, device_type="cpu")
            return describe(module, par.layout, str(self))


def _prove(
    module: nn.Module, pass_: Pass, resolved: Resolved, axis: str, batch: object, *, plan_text: str
) -> Verification:
    """Let a pass split copies of ``module``, on the CPU, for the ranks of ``axis``, and try a block of each kind."""
    size = resolved.spec.axes[axis]
    with runtime.simulated(size), ExitStack() as stack:
        mesh = torch.distributed.init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))
        ranks = SimulatedRanks(size)
        try:
            copies = [_copy_for_a_rank(module, batch) for _ in range(size)]
        except CannotCopy as error:
            return replace(NOTHING, skipped={"": str(error)})
        for copied, _ in copies:
            stack.callback(free, copied)
        installed = (
            pass_.split(copied, resolved.layout, mesh, SimulatedGroup(ranks, rank), rank)
            for rank, (copied, _) in enumerate(copies)
        )
        contexts: list[Context] = [context for context in installed if context is not None]
        if not contexts:
            why = f"the pass that splits axis {axis!r} cannot be tried without processes (Pass.split)"
            return replace(NOTHING, skipped={"": why})

        def read_whole(name: str) -> Tensor:
            return module.get_parameter(name).detach()

        def run(rank: int) -> Verification:
            copied, context = copies[rank][0], contexts[rank]
            try:
                test = SplitTest(copied, context, resolved.blocks, read_whole, kept=lambda *_: nullcontext())
                with test.watch(), torch.enable_grad():
                    explain = Explanation(copied, plan_text, features=context, unit_pass=None).explained
                    Calls(copied, explain).explained(call_with, copies[rank], {})
                return test.run()
            except BaseException:
                ranks.barrier.abort()
                raise

        with undisturbed(module.modules()), ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for raised in sorted(filter(None, errors), key=lambda raised: isinstance(raised, threading.BrokenBarrierError)):
        raise raised
    first, *other_ranks = (future.result() for future in futures)
    more = [
        difference for other in other_ranks for difference in other.differences if difference not in first.differences
    ]
    return replace(first, differences=(*first.differences, *more))


def _copy_for_a_rank(module: nn.Module, batch: object) -> tuple[nn.Module, Any]:
    """Return a copy of a module that shares the memory of its parameters, and one of a batch."""
    parameters: dict[Tensor, Tensor] = {
        parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    return copy_block(module, parameters, batch)


def lost_replica_problems(passes: Sequence[Pass], spec: MeshSpec, module: nn.Module) -> Iterator[str]:
    """Yield why the replicas of a plan, each a job of its own, cannot be lost and replaced, one line each."""
    if (replicas := spec.axes.get("dp_replicate", 1)) > 1:
        yield (
            f"the mesh has dp_replicate={replicas} inside of one replica; write dp_replicate=1: each replica is a job "
            "of its own"
        )
    if (stages := spec.axes.get("pp", 1)) > 1:
        yield f"the mesh has pp={stages}, and a replica that comes back copies all layers; drop pp from the mesh"
    for pass_ in passes:
        if pass_.divides_optimizer:
            yield (
                f"{pass_.name} divides the optimizer state over replicas, and each replica that may be lost holds its "
                "whole state; use HybridShard(optimizer='replica'), with more shards (dp_shard) if memory is short"
            )
    for name, child in batch_norms(module):
        yield (
            f"{name} ({type(child).__name__}) uses statistics of the whole batch, and a replica sees a part of it; use "
            "another norm"
        )
