"""Plan: a mesh and passes; check, apply, describe."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from meshpar import _torch
from meshpar.core import registry, runtime
from meshpar.core.description import Description, describe
from meshpar.core.errors import LayoutError, MeshError, MeshparError, PlanError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, default_device_type
from meshpar.core.parallelized import Parallelized
from meshpar.core.passes import Pass, Role, Stage, axes_of, find_blocks, held_mesh, seen_mesh
from meshpar.core.patterns import class_name
from meshpar.exact.agreement import Agreement
from meshpar.exact.cycle import Cycle
from meshpar.exact.explain import Explanation
from meshpar.exact.losses import Losses
from meshpar.exact.proving import prove
from meshpar.exact.verify import Verification, verified
from meshpar.passes.applied import applied
from meshpar.passes.batch_norm import batch_norm_problems, synchronize_batch_norm
from meshpar.passes.local import keep_unpacked
from meshpar.passes.random import draws_random
from meshpar.state.full import refuse_copies
from meshpar.state.initialize import check_weights, state, tied_names
from meshpar.state.shares import plan_problems

log = logging.getLogger(__name__)

LARGE_PARAMETER = 1 << 24
"""Elements from which a parameter that every rank would hold whole is a problem: 64 MiB in float32."""


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
    """

    mesh: MeshSpec | str
    passes: tuple[Pass, ...]
    verify: bool

    def __init__(self, mesh: MeshSpec | str = "", passes: Sequence[Pass] = (), *, verify: bool = True) -> None:
        _check_arguments(mesh, passes)
        object.__setattr__(self, "verify", verify)
        object.__setattr__(
            self, "mesh", mesh if isinstance(mesh, MeshSpec) or mesh.strip().startswith("auto") else MeshSpec(mesh)
        )
        object.__setattr__(self, "passes", tuple(passes))

    def __str__(self) -> str:
        return f"{str(self.mesh) or 'one process'} [{_arrows(self.passes)}]"

    def resolve(self, world_size: int) -> MeshSpec:
        """Return the mesh with all sizes, for ``world_size`` ranks and the launcher's number of ranks per node.

        Raises:
            MeshError: the sizes do not fit ``world_size``.
        """
        per_node = self.mesh.ranks_per_node if isinstance(self.mesh, MeshSpec) else None
        per_node = per_node or runtime.ranks_per_node()
        if isinstance(self.mesh, MeshSpec):
            return MeshSpec(self.mesh.axes, ranks_per_node=per_node).resolve(world_size)
        return MeshSpec.auto(world_size, min(per_node or world_size, world_size), self.mesh)

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
        return self._checked(module, layout, world_size)[0]

    def _checked(
        self, module: nn.Module, layout: ModelLayout | None, world_size: int | None
    ) -> tuple[MeshSpec, ModelLayout]:
        world_size = runtime.world_size() if world_size is None else world_size
        problems: list[str] = []
        mesh: MeshSpec | None = None
        try:
            mesh = self.resolve(world_size)
        except MeshError as error:
            problems.append(str(error))
        try:
            layout = registry.layout_for(module) if layout is None else _checked_layout(layout)
        except LayoutError as error:
            problems.append(str(error))
            layout = None
        problems += _shape_problems(self.passes)
        passes = [each for each in self.passes if isinstance(each, Pass)]
        if len(passes) == len(self.passes):
            problems += _order_problems(passes)
            problems += [] if mesh is None else _axis_problems(passes, mesh)
        if mesh is not None and layout is not None:
            problems += _content_problems(passes, module, layout, mesh)
        if problems:
            raise PlanError(problems)
        assert mesh is not None and layout is not None
        return mesh, layout

    def machine_problems(self, device_type: str) -> list[str]:
        """Return what this machine lacks to run a rank of the plan on a device of this type. :meth:`check` ignores
        the machine.
        """
        return [problem for each in self.passes for problem in each.machine_problems(device_type)]

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
        if not dist.is_initialized():
            raise MeshparError("no process group is open; wrap the job in `with meshpar.distributed():`")
        spec, layout = self._checked(module, layout, dist.get_world_size())
        held = held_mesh(self.passes, spec)
        for each in self.passes if dist.get_rank() == 0 else ():
            for warning in each.warnings(module, layout, seen_mesh(each, self.passes, spec)):
                log.warning("%s", warning)
        simulated = runtime.is_simulated()
        kind = device_type or ("cpu" if simulated or dist.get_backend() == "gloo" else default_device_type())
        if not simulated and (lacking := self.machine_problems(kind)):
            raise PlanError(lacking)
        device = runtime.device(kind)
        runtime.make_current(device)
        if not simulated:
            check_weights(dict(state(module)), "the weights handed to apply")
        seen = [spec, held, *(seen_mesh(each, self.passes, spec) for each in self.passes)]
        meshes = {each: each.build(kind) for each in dict.fromkeys(seen)}
        mesh, held_on = meshes[spec], meshes[held]
        data_axes = axes_of(self.passes, held, Role.SAMPLES)
        applied(module).layout, applied(module).verify = layout, self.verify and not simulated
        replaced = self.run_passes(module, layout, spec, meshes, device)
        data = next((each for each in self.passes if each.stage == Stage.DATA), None)
        splits_features = any(spec.axes[axis] > 1 for axis in axes_of(self.passes, spec, Role.FEATURES))
        explanation = Explanation(
            module, str(self), splits_features=splits_features, unit_pass=None if data is None else data.name
        )
        same = [axis for axis, size in held.axes.items() if size > 1 and axis not in data_axes]
        cycle = Cycle(module, explanation, replaced, same)
        refuse_copies(module)
        par = Parallelized(module, mesh, spec, self, layout, device, cycle, meshes=meshes)
        reduced = [axis for axis in data_axes if held.axes[axis] > 1]
        split = {
            axis: mesh.get_group(axis) for axis in axes_of(self.passes, spec, Role.POSITIONS) if spec.axes[axis] > 1
        }
        cycle.splits_positions = bool(split)
        cycle.losses = Losses(
            {} if self._splits_sequence(spec) else {axis: held_on.get_group(axis) for axis in same}, device
        )
        cycle.agreement = Agreement(module, held_on, reduced, same, split, device)
        self.guard(par)
        return par

    def guard(self, par: Parallelized) -> None:
        """Guard the modules that ``par`` has now: their calls, and their first forward and backward."""
        module, layout, cycle = par.module, par.layout, par.cycle
        assert cycle is not None and cycle.agreement is not None
        parts, enter = (
            dict([*_parts(module), *find_blocks(module, layout)]),
            "call the module, or a method by par.register_method(name)",
        )
        sequence_parallel = self._splits_sequence(par.spec)
        if sequence_parallel:
            why = (
                f"it would treat this rank's positions as the whole sequence; {enter}, or use "
                "TensorParallel(sequence_parallel=False)"
            )
            cycle.only_inside(parts, why)
        elif any(each.stage == Stage.DATA for each in self.passes):
            why = f"its weights are gathered with those of a larger unit; {enter}, or name it in the pass's blocks"
            cycle.only_inside({name: part for name, part in parts.items() if not isinstance(part, FSDPModule)}, why)
        cycle.explain_calls(part for part in parts.values() if any(True for _ in part.children()))
        if self.verify and not runtime.is_simulated():
            cycle.split_test, cycle.mixing_test = par.split_test(), par.mixing_test()
        cycle.agreement.begin(draws=(layout.dropout or draws_random(module)) and not sequence_parallel)

    def _splits_sequence(self, spec: MeshSpec) -> bool:
        return any(each.splits_sequence and any(spec.axes[axis] > 1 for axis in each.axes) for each in self.passes)

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
        spec, layout = self._checked(module, layout, self._size(world_size))
        blocks = [name for name, _ in find_blocks(module, layout)]
        told = Verification(modules={}, differences=(), skipped={}, seconds=0.0)
        for each in self.passes:
            for axis in axes_of([each], spec, Role.FEATURES):
                if spec.axes[axis] > 1:
                    told = verified(
                        prove(
                            module,
                            partial(_split_copy, each, layout),
                            axis,
                            spec.axes[axis],
                            blocks,
                            batch,
                            plan_text=str(self),
                        )
                    )
        return told

    def _size(self, world_size: int | None) -> int:
        """Return a number of ranks: as given, else of the mesh, else of this job."""
        if world_size is not None:
            return world_size
        sized = isinstance(self.mesh, MeshSpec) and -1 not in self.mesh.axes.values()
        return self.mesh.size if sized and isinstance(self.mesh, MeshSpec) else runtime.world_size()

    def run_passes(
        self,
        module: nn.Module,
        layout: ModelLayout,
        spec: MeshSpec,
        meshes: Mapping[MeshSpec, Any],
        device: torch.device,
    ) -> list[torch.Tensor]:
        """Run the passes; return the parameters that they replaced and somebody else still holds, such as an
        optimizer.
        """
        built_on_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        held = held_mesh(self.passes, spec)
        data_axes = axes_of(self.passes, held, Role.SAMPLES)
        if data_axes or any(each.stage == Stage.RECOMPUTE for each in self.passes):
            synchronize_batch_norm(module, meshes[held], data_axes)
        keep_unpacked(module)
        before = [weakref.ref(each) for each in module.parameters()]
        names, ties = [name for name, _ in module.named_parameters()], tied_names(module)
        for each in self.passes:
            with _torch.parts_only():
                each.apply(module, layout, meshes[seen_mesh(each, self.passes, spec)])
            if (now := [name for name, _ in module.named_parameters()]) != names:
                changed = sorted(set(now) ^ set(names))[:6]
                raise MeshparError(f"{each.name} changed the names of parameters, which a pass must keep: {changed}")
            if tied_names(module) != ties:
                raise MeshparError(f"{each.name} untied tied parameters: expected {ties}, got {tied_names(module)}")
        elsewhere = any(each.device != device for each in (*module.parameters(), *module.buffers()))
        if elsewhere and not built_on_meta and not any(each.stage == Stage.DATA for each in self.passes):
            module.to(device)
        kept = {id(each) for each in module.parameters()}
        return [old for one in before if (old := one()) is not None and id(old) not in kept]

    def describe(
        self,
        module: nn.Module,
        layout: ModelLayout | None = None,
        *,
        world_size: int | None = None,
        replicas: int = 1,
        optimizer_copies: int = 2,
    ) -> Description:
        """Return what the rank with the most parameters would store, block by block. See :meth:`Parallelized.describe`.

        Applies the passes to ``module`` in this one process. The module must be on the meta device and cannot be used
        afterwards.

        Args:
            module: the model.
            layout: description of the model. Defaults to the module's own, then to the registered layouts.
            world_size: number of ranks. Defaults to the size of the mesh, or the ranks of this job.
            replicas: number of replicas of :class:`meshpar.training.Replicas`, each a job of its own with this plan.
            optimizer_copies: as :class:`meshpar.training.Replicas` takes it.

        Raises:
            PlanError: problems that :meth:`check` finds.
        """
        size = self._size(world_size)
        spec = self.check(module, layout, size)
        if replicas > 1 and (problems := list(plan_problems(spec, module, optimizer_copies))):
            raise PlanError(problems)
        divides = any(each.divides_optimizer for each in self.passes)
        with runtime.simulated(size):
            par = self.apply(module, layout, device_type="cpu")
            return describe(module, par.layout, str(self), replicas if divides else 1, optimizer_copies)


def _split_copy(each: Pass, layout: ModelLayout, module: nn.Module, mesh: Any, group: Any, rank: int) -> Any:
    return each.split(module, layout, mesh, group, rank)


def _parts(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the outermost one calls, also those in its lists."""
    for inner, child in module.named_children():
        full = f"{name}.{inner}" if name else inner
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child, full)
        elif any(True for _ in child.parameters()):
            yield full, child


def _check_arguments(mesh: object, passes: object) -> None:
    """Raise for a mesh and passes of another kind than a plan takes: a pass that stands alone, text, a dict."""
    if not isinstance(mesh, MeshSpec | str):
        raise MeshError(
            f"a plan's mesh is {_shown(mesh)} of type {type(mesh).__name__}; expected text such as 'dp_shard=2,tp=4', "
            "or a MeshSpec: write Plan('dp_shard=2', [...]) or Plan(MeshSpec(dp_shard=2), [...])"
        )
    if isinstance(passes, str) or not isinstance(passes, Iterable):
        kind = passes if isinstance(passes, type) else type(passes)
        inside = f"{kind.__name__}()" if issubclass(kind, Pass) else "FullyShard()"
        raise PlanError(
            [f"a plan's passes are {_shown(passes)}; expected a list of passes: write Plan({str(mesh)!r}, [{inside}])"]
        )


def _checked_layout(layout: object) -> ModelLayout:
    if not isinstance(layout, ModelLayout):
        raise LayoutError(
            f"the layout is {_shown(layout)} of type {type(layout).__name__}; expected a ModelLayout: write "
            "ModelLayout(blocks=('layers.*',), ...)"
        )
    return layout


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shape_problems(passes: Sequence[object]) -> Iterator[str]:
    """Yield objects that are no passes."""
    for each in passes:
        if isinstance(each, type):
            yield f"{each.__name__} is a class, not a pass; expected an object: write {each.__name__}()"
        elif not isinstance(each, Pass):
            kind = type(each).__name__
            yield (
                f"{_shown(each)} is not a pass: {kind} does not inherit meshpar.Pass; write an object of a pass, such "
                "as FullyShard()"
            )


def _order_problems(passes: Sequence[Pass]) -> Iterator[str]:
    ordered = sorted(passes, key=lambda each: each.stage)
    if [each.stage for each in passes] != [each.stage for each in ordered]:
        yield f"passes are out of order ({_arrows(passes)}); write {_arrows(ordered)}"


def _arrows(passes: Sequence[object]) -> str:
    return " -> ".join(each.name if isinstance(each, Pass) else _shown(each) for each in passes)


def _axis_problems(passes: Sequence[Pass], mesh: MeshSpec) -> Iterator[str]:
    """Yield axes that are absent, claimed twice, or claimed by nobody."""
    claimed: dict[str, str] = {}
    for each in passes:
        for axis in each.axes:
            if axis not in mesh.axes:
                has = ", ".join(f"{name}={size}" for name, size in mesh.axes.items()) or "no axes"
                yield (
                    f"{each.name} needs axis {axis!r}, which the mesh ({has}) lacks; add {axis}=... to the mesh or "
                    f"drop {each.name}"
                )
            elif axis in claimed:
                yield f"axis {axis!r} is claimed by {claimed[axis]} and by {each.name}; keep one of them"
            else:
                claimed[axis] = each.name
            if each.roles[axis] == Role.LAYERS and mesh.axes.get(axis, 1) > 1:
                yield (
                    f"{each.name} gives axis {axis!r} the role LAYERS, for which there are no stages yet; use an axis "
                    "of another role"
                )
    try:
        held_mesh(passes, mesh)
    except MeshError as error:
        yield str(error)
    for axis, size in mesh.axes.items():
        if size > 1 and axis not in claimed:
            yield (
                f"axis {axis!r} (size {size}) is claimed by no pass, so its ranks would repeat one another's work; "
                f"{_remedy(axis)}"
            )


def _remedy(axis: str) -> str:
    """Name the installed pass that claims ``axis`` and as few others as possible; where there is none, the axes that
    some pass claims.
    """
    kinds = [registry.plugin("meshpar.passes", name) for name in registry.names("meshpar.passes")]
    passes = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Pass)]
    fitting = [kind for kind in passes if axis in kind.roles]
    if fitting:
        return f"add {min(fitting, key=lambda kind: len(kind.roles)).__name__}() or drop {axis} from the mesh"
    known = ", ".join(dict.fromkeys(name for kind in passes for name in kind.roles))
    return (
        f"no installed pass works on {axis} (installed ones work on {known}): drop it, or install or write a pass for "
        "it"
    )


def _content_problems(passes: Sequence[Pass], module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
    """Yield what the passes find on this model, ties that are none, and large parameters that nothing splits."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if split := [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]:
        yield (
            f"the module is already parallelized ({split[0]} is a DTensor); apply a plan once, to a module as it was "
            "built"
        )
        return
    yield from _module_problems(module)
    ready = [each for each in passes if all(axis in mesh.axes for axis in each.axes)]
    with suppress(MeshError):  # which _axis_problems tells
        held = held_mesh(passes, mesh)
        for each in ready:
            yield from each.problems(module, layout, seen_mesh(each, passes, mesh))
        if any(held.axes[axis] > 1 for axis in axes_of(ready, held, Role.SAMPLES)):
            yield from batch_norm_problems(module)
            yield from [layout.refusals["balance"]] if "balance" in layout.refusals else []
    hooked = [name for name, each in parameters.items() if each._backward_hooks or each._post_accumulate_grad_hooks]
    if hooked and any(each.shards(module, layout) for each in ready):
        yield (
            f"{hooked[0]} has a hook on its gradient, which the shards that replace it would not have; register hooks "
            "after plan.apply, on the parameters of par.module"
        )
    for group in layout.tied:
        absent = [name for name in group if name not in parameters]
        if absent:
            yield f"layout.tied names {absent[0]!r}, which the model does not have"
        elif len({id(parameters[name]) for name in group}) > 1:
            yield (
                f"layout.tied says that {' and '.join(group)} are one tensor, but the model has separate tensors; tie "
                "them or drop the entry"
            )
    with suppress(MeshError):
        yield from _unsharded_problems(ready, module, layout, mesh, parameters)
    yield from _divided_problems(ready, module, layout, mesh)


def _module_problems(module: nn.Module) -> Iterator[str]:
    """Yield modules that cannot be placed: without shapes, not of Python, or with gradients and writes that no pass
    reduces.
    """
    for name, child in module.named_modules():
        if any(isinstance(each, UninitializedParameter) for each in child._parameters.values()):
            yield (
                f"{name} is a {class_name(child)} without a shape yet; run one forward on a CPU before plan.apply, or "
                "write the module with its sizes"
            )
        elif isinstance(child, torch.jit.ScriptModule):
            yield (
                f"{name} is a TorchScript module, whose parameters and forward cannot be replaced; use the Python "
                "module from which it was scripted"
            )
        elif isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            yield (
                f"{name} has sparse gradients, which no pass reduces; build it with sparse=False, and train it with "
                "an optimizer for dense gradients (SparseAdam is AdamW without decay on the rows of a batch)"
            )
        elif isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
            yield (
                f"{name} has max_norm={child.max_norm:g}, which writes into its weight in each forward, on every rank "
                "the rows of its own samples; build it with max_norm=None and, after each step, scale the rows: with "
                "torch.no_grad(): weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1))"
            )


def _divided_problems(passes: Sequence[Pass], module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
    """Yield parameters that a pass divides over samples and that the data pass does not shard: nothing would reduce
    their gradients.
    """
    data = [each for each in passes if each.stage == Stage.DATA]
    sharded = {name for each in data for name in each.shards(module, layout)}
    for each in passes:
        axes = [] if each in data else [axis for axis in axes_of([each], mesh, Role.SAMPLES) if mesh.axes[axis] > 1]
        missing = sorted(each.shards(module, layout) - sharded) if axes and data else []
        if missing:
            yield (
                f"{each.name} divides {missing[0]} over {', '.join(axes)}, and {data[0].name} keeps it whole, so that "
                "nothing averages its gradient; use FullyShard() or HybridShard() with dp_shard, and leave it out of "
                "whole=(...)"
            )


def _unsharded_problems(
    passes: Sequence[Pass],
    module: nn.Module,
    layout: ModelLayout,
    mesh: MeshSpec,
    parameters: Mapping[str, torch.Tensor],
) -> Iterator[str]:
    sharders = [each for each in passes if any(seen_mesh(each, passes, mesh).axes[axis] > 1 for axis in each.axes)]
    split = {name for each in sharders for name in each.shards(module, layout)}
    if not split:
        return
    for name, parameter in parameters.items():
        if name not in split and parameter.numel() >= LARGE_PARAMETER:
            shape = " x ".join(map(str, parameter.shape))
            yield (
                f"{name} ({shape}, {parameter.numel() * parameter.element_size() / 2**20:.0f} MiB) is split by no "
                "pass, so every rank would hold it whole; give its module a style in the tensor-parallel table, or "
                "add FullyShard() or HybridShard()"
            )
