"""Weights for a module that was built on the meta device: from a seed, the same on every mesh, or from a source."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.modules import persistent_buffers
from meshpar.core import runtime
from meshpar.core.errors import LayoutError
from meshpar.core.layout import ModelLayout
from meshpar.core.patterns import class_name, covers, matches, suggestion, tied_names
from meshpar.exchange.rank_digests import check_equal
from meshpar.passes.elsewhere import tensors_elsewhere
from meshpar.passes.tensor import random
from meshpar.step.run import run_of
from meshpar.tensors.placements import held_by_this_rank, local_tensor
from meshpar.weights import Mapped, WeightSource, dtypes_of

_NONE = 1 << 30  # of the numbers of tied tensors that differ
_TILE_BYTES = 4 << 20  # of tied tensors that are compared: nothing more than that is held beside a rank's part


def without_memory(module: nn.Module) -> set[str]:
    """Return the names of the parameters and buffers that are on the meta device, tied ones under every name."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name for name, tensor in tensors if tensor.is_meta}


def check_weights(tensors: Mapping[str, Tensor], what: str, guards: Sequence[str] = ()) -> None:
    """Check that all ranks hand in the same tensors, called ``what``, and the same ``guards``. Collective."""
    weights = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    check_equal(
        weights,
        dict.fromkeys(weights, [0] * dist.get_world_size()),
        what,
        guards=guards,
        remedy="call torch.manual_seed(0) on every rank before building the module, or build it under "
        'torch.device("meta") and call par.materialize(seed=0)',
    )


def allocate(module: nn.Module, device: torch.device, parameter_device: torch.device) -> None:
    """Give meta tensors memory, keeping ties; parameters that data ranks keep whole are on ``device``."""
    ties = tied_names(module)
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = torch.empty_like(buffer, device=device)

    # As nn.Module.to_empty, except for tensors that have their values.
    def home(tensor: Tensor) -> torch.device:
        return device if "_meshpar_whole" in vars(tensor) else parameter_device

    module._apply(lambda tensor: torch.empty_like(tensor, device=home(tensor)) if tensor.is_meta else tensor)
    retie(module, ties)


def retie(module: nn.Module, groups: list[tuple[str, ...]]) -> None:
    """Make the names of each group one parameter again: the first's."""
    for owner, *others in groups:
        parameter = module.get_parameter(owner)
        for name in others:
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent)._parameters[leaf] = parameter


@torch.no_grad()
def from_seed(module: nn.Module, layout: ModelLayout, seed: int, device: torch.device, missing: set[str]) -> None:
    """Fill the ``missing`` tensors with what one process would have drawn, and keep this rank's part.

    Each module draws whole tensors by a generator of ``seed`` and its name: neither mesh nor order of modules counts.
    """
    done: set[int] = set()
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        own = {
            key: value
            for key, value in child._parameters.items()
            if value is not None and id(value) not in done and prefix + key in missing
        }
        buffers = {key for key in child._buffers if prefix + key in missing}
        if not own and not buffers:
            continue
        done.update(map(id, own.values()))
        with _whole_parameters(child, device) as whole, random.forked(device):
            random.seed(device, random.mix(seed, zlib.crc32(name.encode())))
            _run(name, child, layout, whole, buffers)
            for key, parameter in own.items():
                local_tensor(parameter).copy_(whole[key][held_by_this_rank(parameter)])


@torch.no_grad()
def from_source(
    module: nn.Module,
    layout: ModelLayout,
    source: WeightSource,
    device: torch.device,
    missing: set[str],
    *,
    ignore: Collection[str] = (),
    cast: bool = False,
) -> None:
    """Read this rank's part of every parameter and persistent buffer from ``source``.

    Raises LayoutError, on all ranks alike, listing all that does not fit before anything is read, or ties that differ.
    """
    fit = compared(module, layout, source, ignore=ignore, cast=cast)
    if fit.problems:
        raise LayoutError("\n  ".join(["these weights do not fit this model:", *fit.problems, *fit.remedies]))
    _rebuild(module, layout, device, missing, fit.rebuilt)
    held, wanted = fit.held, {name: tensor for name, tensor in state(module) if name not in fit.rebuilt}
    twice = [(name, other) for name in wanted for other in held[name][1:]]
    differing = [twice.index((name, other)) for name in wanted for other in _read(fit.source, held[name], wanted[name])]
    divided = bool(tensors_elsewhere(run_of(module)))  # another rank has other tensors, and both ends of ties
    found = _agreed(min(differing, default=_NONE)) if twice or divided else _NONE
    if found < _NONE:
        name, other = twice[found] if found < len(twice) else ("a tensor", "another one")
        raise LayoutError(
            f"{held.get(name, [name])[0]} and {other} are one tensor in this model and differ in these weights; build "
            "the model untied, or choose one: ignore=[...] leaves the other unread"
        )


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """How weights fit a model: the names that hold each tensor, those that modules rebuild, problems and remedies."""

    source: WeightSource
    held: Mapping[str, list[str]]
    rebuilt: set[str]
    problems: list[str]
    remedies: list[str]


def compared(
    module: nn.Module, layout: ModelLayout, source: WeightSource, *, ignore: Collection[str] = (), cast: bool = False
) -> Fit:
    """Compare weights with a model, which may be on the meta device, by names, shapes and dtypes alone."""
    wanted: dict[str, Tensor] = dict(state(module))
    ties = {name: group for group in tied_names(module) for name in group}
    names = {name: (name, *(other for other in ties.get(name, ()) if other != name)) for name in wanted}
    offered = set(source.shapes())
    if any(not offered.intersection(group) for group in names.values()):
        source = layout.weights.view(source)
    named = _told_names(source)
    covered = {
        pattern: {name for name in named if covers(pattern, name) or covers(pattern, named[name])} for pattern in ignore
    }
    ignored = set[str]().union(*covered.values())
    problems = [
        f"ignore: {pattern!r} matches no tensor of these weights; {suggestion(pattern, named.values())}"
        for pattern, found in covered.items()
        if not found
    ]
    held = {
        name: [other for other in group if other in named and other not in ignored] for name, group in names.items()
    }
    rebuilt = {name for name in wanted if not held[name] and any(matches(pattern, name) for pattern in layout.rebuilt)}
    problems += _misfits(
        {name: tensor for name, tensor in wanted.items() if name not in rebuilt}, held, source, cast=cast
    )
    known = ignored.union(*held.values(), _not_stored(module), tensors_elsewhere(run_of(module)))
    unexpected = [
        f"unexpected: {named[name]} {tuple(shape)}"
        for name, shape in source.shapes().items()
        if name not in known and not _harmless(name, named[name], layout)
    ]
    remedies = []
    if problems or unexpected:
        remedies = ["ignore=[...], in a recipe model.ignore, leaves unexpected tensors unread"] if unexpected else []
        nested = (
            full[: -len(name)]
            for name in wanted
            if not held[name]
            for full in named.values()
            if full.endswith(f".{name}")
        )
        if prefix := next(nested, None):
            remedies = [
                f"these weights' names begin with {prefix!r}: DistributedCheckpoint and TorchWeights take "
                f"prefix={prefix!r}"
            ]
    return Fit(source, held, rebuilt, [*problems, *unexpected], remedies)


def _told_names(source: WeightSource) -> dict[str, str]:
    """Return the names of tensors in ``source`` -> in the files, for those that come whole from one there."""
    origin = source.origin if isinstance(source, Mapped) else lambda name: name
    return {name: origin(name) or name for name in source.shapes()}


def _misfits(
    wanted: Mapping[str, Tensor], held: Mapping[str, list[str]], source: WeightSource, *, cast: bool
) -> list[str]:
    """Return what is missing, and what has another shape, or a dtype that the model's cannot stand for."""
    shapes, problems = source.shapes(), []
    dtypes = dtypes_of(source)
    for name, tensor in wanted.items():
        if not held[name]:
            problems.append(f"missing: {name} {tuple(tensor.shape)}")
        for stored in held[name]:
            if tuple(shapes[stored]) != tuple(tensor.shape):
                problems.append(f"shape of {stored}: expected {tuple(tensor.shape)}, got {tuple(shapes[stored])}")
            elif not cast and not _converts(dtypes.get(stored, tensor.dtype), tensor.dtype):
                problems.append(
                    f"dtype of {stored}: expected {tensor.dtype}, got {dtypes[stored]}, whose values may need scales "
                    "that are stored beside them; give weights in a wider floating-point dtype, or cast=True to take "
                    "the bare values"
                )
    return problems


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether values of one dtype mean the same in another: not float8's, nor integers as floats."""
    scaled = any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in (stored, wanted))
    kinds = {(dtype.is_floating_point, dtype.is_complex) for dtype in (stored, wanted)}
    return stored == wanted or (not scaled and len(kinds) == 1)


def _not_stored(module: nn.Module) -> set[str]:
    """Return the names of the buffers that no file needs to hold, because the modules compute them; old files may."""
    return {name for name, _ in module.named_buffers(remove_duplicate=False)} - {name for name, _ in state(module)}


def _harmless(name: str, stored: str, layout: ModelLayout) -> bool:
    """Return whether the layout knows of a tensor in files that the model has no use for."""
    return any(matches(pattern, name) for pattern in layout.rebuilt) or any(
        re.search(pattern, candidate) for pattern in layout.ignored for candidate in (name, stored)
    )


def _read(source: WeightSource, names: list[str], tensor: Tensor) -> list[str]:
    """Read this rank's part of a tensor; return the other names under which it is stored with other values."""
    index, out = held_by_this_rank(tensor), local_tensor(tensor)
    if not out.numel() and out.ndim:
        return []
    source.read(names[0], index, out)
    return [
        other
        for other in names[1:]
        if not all(_same(part, _part(source, other, at, part)) for at, part in _by_rows(index, out))
    ]


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, also where they are no numbers."""
    return torch.equal(
        *(tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other))
    )


def _agreed(place: int) -> int:
    """Return the least of all ranks' numbers."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return place
    least = torch.tensor(place)
    dist.all_reduce(least, dist.ReduceOp.MIN, runtime.hosts())
    return int(least)


def _by_rows(index: tuple[slice, ...], out: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield the place and the values of pieces of at most some MiB, of a tensor whose place is ``index``."""
    if not out.ndim:
        yield index, out
        return
    step = max(1, len(out) * _TILE_BYTES // out.nbytes)
    for first, part in zip(range(0, len(out), step), out.split(step)):
        begin = index[0].start + first
        yield (slice(begin, begin + len(part)), *index[1:]), part


def _part(source: WeightSource, name: str, index: tuple[slice, ...], like: Tensor) -> Tensor:
    part = torch.empty_like(like)
    source.read(name, index, part)
    return part


def state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers by name, tied ones once."""
    yield from module.named_parameters()
    for prefix, child in module.named_modules():
        for name, buffer in persistent_buffers(child):
            yield f"{prefix}.{name}" if prefix else name, buffer


def _rebuild(
    module: nn.Module, layout: ModelLayout, device: torch.device, missing: set[str], rebuilt: set[str]
) -> None:
    """Let modules fill what no file holds: ``missing`` buffers, and the parameters in ``rebuilt``."""
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        persistent = dict(persistent_buffers(child))
        buffers = {key for key in child._buffers if key not in persistent and prefix + key in missing}
        own = {key: value for key, value in child._parameters.items() if value is not None and prefix + key in rebuilt}
        if buffers or own:
            with _whole_parameters(child, device) as whole:
                _run(name, child, layout, whole, buffers)
                for key, parameter in own.items():
                    local_tensor(parameter).copy_(whole[key][held_by_this_rank(parameter)])


def _run(name: str, child: nn.Module, layout: ModelLayout, whole: dict[str, Tensor], buffers: set[str]) -> None:
    """Initialise one module's own tensors, and see that its parameters and ``buffers`` were really written."""
    before = {
        key: (buffer, buffer._version)
        for key, buffer in child._buffers.items()
        if key in buffers and buffer is not None
    }
    for tensor in whole.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    versions = {key: tensor._version for key, tensor in whole.items()}
    init = layout.init or own_init(child)
    if init is not None:
        init(child)
    missed = [
        key for key, tensor in whole.items() if child._parameters[key] is tensor and _untouched(tensor, versions[key])
    ]
    missed += [
        key for key, (buffer, version) in before.items() if child._buffers[key] is buffer and buffer._version == version
    ]
    if missed:
        raise LayoutError(
            f"{name or class_name(child)} ({class_name(child)}) has no initialisation for {', '.join(missed)}; give "
            "the class a reset_parameters() that fills them, or pass ModelLayout(init=...), or build the model with "
            "weights instead of on meta"
        )
    whole.update({key: value for key, value in child._parameters.items() if key in whole and value is not None})


def own_init(child: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return the module's own initialisation; torch's attention calls it ``_reset_parameters``."""
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(child, method, None)):
            return lambda module: getattr(module, method)()
    return None


def _untouched(tensor: Tensor, version: int) -> bool:
    """Return whether nobody wrote ``tensor``, not even through ``.data``, which leaves its version as it was."""
    if tensor._version != version:
        return False
    return not tensor.is_floating_point() or bool(tensor.isnan().all())


@contextmanager
def _whole_parameters(child: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Let a module own whole plain parameters for a while instead of its shards."""
    kept = dict(child._parameters)
    whole: dict[str, Tensor] = {}
    for key, parameter in kept.items():
        if parameter is not None:
            fresh = nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device=device),
                requires_grad=parameter.requires_grad,
            )
            child._parameters[key] = fresh
            whole[key] = fresh
    try:
        yield whole
    finally:
        child._parameters.update(kept)
