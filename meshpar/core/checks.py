"""Problems of a plan that are known before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from meshpar._torch.tensors import gradient_hooks
from meshpar.core import registry
from meshpar.core.errors import LayoutError, MeshError, PlanError, shown
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, check_mesh
from meshpar.core.passes import Guards, Pass, Role, Stage, axes_of, held_mesh, seen_mesh, unaveraged
from meshpar.core.patterns import class_name

LARGE_PARAMETER = 1 << 24
"""Elements from which a parameter that every rank would hold whole is a problem: 64 MiB in float32."""


def problems_of(
    passes: Sequence[object],
    module: nn.Module,
    layout: ModelLayout | None,
    mesh: MeshSpec | None,
    of_parts: Callable[[nn.Module], Iterable[str]] = lambda module: (),
) -> Iterator[str]:
    """Yield every problem of passes for a model; ``of_parts``: those of a model that sees a part of a batch."""
    yield from _shape_problems(passes)
    real_passes = [pass_ for pass_ in passes if isinstance(pass_, Pass)]
    if len(real_passes) == len(passes):
        ordered = sorted(real_passes, key=lambda pass_: pass_.stage)
        if [pass_.stage for pass_ in real_passes] != [pass_.stage for pass_ in ordered]:
            yield f"passes are out of order ({arrows(real_passes)}); write {arrows(ordered)}"
        if mesh is not None:
            yield from _axis_problems(real_passes, mesh)
            for pass_ in real_passes:
                yield from pass_.conflicts(real_passes, mesh)
    if mesh is not None and layout is not None:
        yield from _content_problems(real_passes, module, layout, mesh, of_parts)


def check_arguments(mesh: object, passes: object, guards: object) -> None:
    """Raise for arguments of another kind than a plan takes: a pass that stands alone, text, a dict."""
    check_mesh(mesh)
    if isinstance(passes, str) or not isinstance(passes, Iterable):
        kind = passes if isinstance(passes, type) else type(passes)
        example = f"{kind.__name__}()" if issubclass(kind, Pass) else _example()
        raise PlanError(
            [f"a plan's passes are {shown(passes)}; expected a list of passes: write Plan({str(mesh)!r}, [{example}])"]
        )
    if guards not in (settings := get_args(Guards)):
        raise PlanError(
            [f"guards={guards!r} is not known; expected one of {', '.join(map(repr, settings))}: write guards='first'"]
        )


def checked_layout(layout: object) -> ModelLayout:
    if not isinstance(layout, ModelLayout):
        raise LayoutError(
            f"the layout is {shown(layout)} of type {type(layout).__name__}; expected a ModelLayout: write "
            "ModelLayout(blocks=('layers.*',), ...)"
        )
    return layout


def _shape_problems(passes: Sequence[object]) -> Iterator[str]:
    """Yield objects that are no passes."""
    for pass_ in passes:
        if isinstance(pass_, type):
            yield f"{pass_.__name__} is a class, not a pass; expected an object: write {pass_.__name__}()"
        elif not isinstance(pass_, Pass):
            kind = type(pass_).__name__
            yield (
                f"{shown(pass_)} is not a pass: {kind} does not inherit meshpar.Pass; write an object of a pass, such "
                f"as {_example()}"
            )


def arrows(passes: Sequence[object]) -> str:
    return " -> ".join(pass_.name if isinstance(pass_, Pass) else shown(pass_) for pass_ in passes)


def _axis_problems(passes: Sequence[Pass], mesh: MeshSpec) -> Iterator[str]:
    """Yield axes that are absent, claimed twice, or claimed by nobody."""
    claimed: dict[str, str] = {}
    for pass_ in passes:
        for axis in pass_.axes:
            if axis not in mesh.axes:
                has = ", ".join(f"{name}={size}" for name, size in mesh.axes.items()) or "no axes"
                yield (
                    f"{pass_.name} needs axis {axis!r}, which the mesh ({has}) lacks; add {axis}=... to the mesh or "
                    f"drop {pass_.name}"
                )
            elif axis in claimed:
                yield f"axis {axis!r} is claimed by {claimed[axis]} and by {pass_.name}; keep one of them"
            else:
                claimed[axis] = pass_.name
    if alone := unaveraged(passes, mesh):
        yield (
            f"nothing averages gradients over {', '.join(alone)}; add {_example()} to the passes and "
            f"{_sharded_axis()}=1 to the mesh"
        )
    else:
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
    """Name the installed pass that claims ``axis`` and few others; where none does, the axes of passes."""
    passes = _installed()
    fitting = [kind for kind in passes if axis in kind.roles]
    if fitting:
        return f"add {min(fitting, key=lambda kind: len(kind.roles)).__name__}() or drop {axis} from the mesh"
    axes = ", ".join(dict.fromkeys(name for kind in passes for name in kind.roles))
    return (
        f"no installed pass works on {axis} (installed ones work on {axes}): drop it, or install or write a pass for it"
    )


def _installed() -> list[type[Pass]]:
    kinds = [registry.plugin(registry.PASSES, name) for name in registry.names(registry.PASSES)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Pass)]


def _sharding() -> list[type[Pass]]:
    """Return the installed passes that split parameters over data axes, those of the fewest axes first."""
    kinds = [kind for kind in _installed() if kind.stage == Stage.DATA and kind.shards is not Pass.shards]
    return sorted(kinds, key=lambda kind: len(kind.roles))


def _sharders() -> list[str]:
    return [f"{kind.__name__}()" for kind in _sharding()]


def _example() -> str:
    return next(iter(_sharders()), "a pass()")


def _sharded_axis() -> str:
    return next((axis for kind in _sharding() for axis in kind.roles), "a data axis")


def _content_problems(
    passes: Sequence[Pass],
    module: nn.Module,
    layout: ModelLayout,
    mesh: MeshSpec,
    of_parts: Callable[[nn.Module], Iterable[str]],
) -> Iterator[str]:
    """Yield what the passes find on this model, ties that are none, and large parameters that nothing splits."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if split := [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]:
        yield (
            f"the module is already parallelized ({split[0]} is a DTensor); apply a plan once, to a module as it was "
            "built"
        )
        return
    yield from _module_problems(module) if passes else ()
    ready = [pass_ for pass_ in passes if all(axis in mesh.axes for axis in pass_.axes)]
    with suppress(MeshError):  # which _axis_problems tells
        parameter_mesh = held_mesh(passes, mesh)
        for pass_ in ready:
            yield from pass_.problems(module, layout, seen_mesh(pass_, passes, mesh))
        if any(parameter_mesh.axes[axis] > 1 for axis in axes_of(ready, parameter_mesh, Role.SAMPLES)):
            yield from of_parts(module)
            yield from filter(None, [layout.experts.balance_refusal])
    hooked = [name for name, parameter in parameters.items() if gradient_hooks(parameter)]
    if hooked and any(pass_.shards(module, layout) for pass_ in ready):
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
    """Yield modules that no pass can place or reduce: without shapes, not of Python, with own gradients."""
    for name, child in module.named_modules():
        if any(isinstance(parameter, UninitializedParameter) for parameter in child._parameters.values()):
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
                f"{name} has sparse gradients, which no pass reduces; build it with sparse=False. SGD without momentum "
                "then trains alike; AdamW also moves rows that a batch does not have, which SparseAdam leaves"
            )
        elif isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
            yield (
                f"{name} has max_norm={child.max_norm:g}, which writes into its weight in each forward, on every rank "
                "the rows of its own samples; build it with max_norm=None and, after each step, scale the rows: with "
                "torch.no_grad(): weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1))"
            )


def _divided_problems(passes: Sequence[Pass], module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
    """Yield trained parameters that a pass divides over samples and no data pass shards or reduces."""
    trained = {name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    data = [pass_ for pass_ in passes if pass_.stage == Stage.DATA]
    sharded = {name for pass_ in data for name in pass_.shards(module, layout)}
    for pass_ in passes:
        axes = [] if pass_ in data else [axis for axis in axes_of([pass_], mesh, Role.SAMPLES) if mesh.axes[axis] > 1]
        missing = sorted(pass_.shards(module, layout) & trained - sharded) if axes and data else []
        if missing:
            yield (
                f"{pass_.name} divides {missing[0]} over {', '.join(axes)}, and {data[0].name} keeps it whole, so that "
                f"nothing averages its gradient; use {' or '.join(_sharders())} with {_sharded_axis()}, and leave it "
                "out of whole=(...)"
            )


def _unsharded_problems(
    passes: Sequence[Pass],
    module: nn.Module,
    layout: ModelLayout,
    mesh: MeshSpec,
    parameters: Mapping[str, torch.Tensor],
) -> Iterator[str]:
    sharders = [pass_ for pass_ in passes if any(seen_mesh(pass_, passes, mesh).axes[axis] > 1 for axis in pass_.axes)]
    split = {name for sharder in sharders for name in sharder.shards(module, layout)}
    if not split:
        return
    accounted = split.union(*(pass_.keeps(module, layout) for pass_ in passes))
    for name, parameter in parameters.items():
        if name not in accounted and parameter.numel() >= LARGE_PARAMETER:
            shape = " x ".join(map(str, parameter.shape))
            yield (
                f"{name} ({shape}, {parameter.numel() * parameter.element_size() / 2**20:.0f} MiB) is split by no "
                "pass, so every rank would hold it whole; give its module a style in the tensor-parallel table, or "
                f"add {' or '.join(_sharders())}"
            )
