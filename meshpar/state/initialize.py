"""Weights for a module that was built on the meta device: from a seed, the same on every mesh, or from a source."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.tensors import persistent_buffers
from meshpar.core import runtime
from meshpar.core.errors import LayoutError
from meshpar.core.layout import ModelLayout
from meshpar.core.patterns import class_name, covers, matches, suggestion, tied_names
from meshpar.exchange.ranks import check_equal
from meshpar.passes.pipeline.portion import tensors_elsewhere
from meshpar.passes.tensor import random
from meshpar.step.forward import run_of
from meshpar.tensors.placements import held_by_this_rank, local_tensor
from meshpar.weights import Mapped, WeightSource, dtypes_of

_NONE = 1 << 30  # of the numbers of tied tensors that differ
_TILE_BYTES = 4 << 20  # of tied tensors that are compared: nothing more than that is held beside a rank's part


def without_memory(module: nn.Module) -> set[str]:
    """Return the names of the parameters and buffers that are on the meta device, tied ones under every name."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name for name, tensor in tensors if tensor.is_meta}


def check_weights(module: nn.Module, guards: Sequence[str]) -> None:
    """Check that all ranks hand modules with the same weights to apply, and have the same ``guards``. Collective."""
    weights = {name: tensor for name, tensor in state(module) if not tensor.is_meta}
    check_equal(
        weights,
        dict.fromkeys(weights, [0] * dist.get_world_size()),
        "the weights handed to apply",
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
    def fill(tensor: Tensor) -> Tensor:
        home = device if "_meshpar_whole" in vars(tensor) else parameter_device
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor

    module._apply(fill)
    for owner, *names in ties:
        for name in names:
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent)._parameters[leaf] = module.get_parameter(owner)


@torch.no_grad()
def from_seed(module: nn.Module, layout: ModelLayout, seed: int, device: torch.device, missing: set[str]) -> None:
    """Fill the ``missing`` tensors with what one process would have drawn, and keep this rank's part."""
    devices, kind = ([], "cuda") if runtime.on_host(device) else ([device], device.type)
    with torch.random.fork_rng(devices, device_type=kind):
        _initialise(module, layout, device, missing, seed)


@torch.no_grad()
def from_source(module: nn.Module, layout: ModelLayout, fit: Fit, device: torch.device, missing: set[str]) -> None:
    """Read this rank's part of all state; all ranks raise LayoutError for what does not fit, before they read."""
    if fit.problems:
        raise LayoutError("\n  ".join(["these weights do not fit this model:", *fit.problems, *fit.remedies]))
    every = dict(state(module))
    computed = {name for name, _ in module.named_buffers(remove_duplicate=False)} - every.keys()
    _initialise(module, layout, device, fit.rebuilt | (missing & computed), None)
    stored, wanted = fit.stored, {name: tensor for name, tensor in every.items() if name not in fit.rebuilt}
    twice = [(name, other) for name in wanted for other in stored[name][1:]]
    unlike = [(name, other) for name in wanted for other in _read(fit.source, stored[name], wanted[name])]
    divided = bool(tensors_elsewhere(run_of(module)))  # another rank has other tensors, and both ends of ties
    first = _agree(min(map(twice.index, unlike), default=_NONE)) if twice or divided else _NONE
    if first < _NONE:
        name, other = twice[first] if first < len(twice) else ("a tensor", "another one")
        raise LayoutError(
            f"{stored.get(name, [name])[0]} and {other} are one tensor in this model and differ in these weights; "
            "build the model untied, or choose one: ignore=[...] leaves the other unread"
        )


class Fit(NamedTuple):
    """How weights fit a model: the names that hold each tensor, those that modules rebuild, problems and remedies."""

    source: WeightSource
    stored: Mapping[str, list[str]]
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
    shapes, origin = source.shapes(), source.origin if isinstance(source, Mapped) else lambda name: name
    in_files = {name: origin(name) or name for name in shapes}
    problems, ignored = list[str](), set[str]()
    for pattern in ignore:
        covered = {name for name in in_files if covers(pattern, name) or covers(pattern, in_files[name])}
        ignored |= covered
        if not covered:
            near = suggestion(pattern, in_files.values())
            problems.append(f"ignore: {pattern!r} matches no tensor of these weights; {near}")
    offered = in_files.keys() - ignored
    stored = {name: [other for other in group if other in offered] for name, group in names.items()}
    rebuilt = {
        name for name in wanted if not stored[name] and any(matches(pattern, name) for pattern in layout.rebuilt)
    }
    dtypes = dtypes_of(source)
    for name, tensor in wanted.items():
        offers = {other: (tuple(shapes[other]), dtypes.get(other, tensor.dtype)) for other in stored[name]}
        problems += _misfits(name, tensor, offers, cast=cast) if name not in rebuilt else ()
    # Buffers that modules compute: no file needs to hold them, and old ones may.
    computed = {name for name, _ in module.named_buffers(remove_duplicate=False)} - wanted.keys()
    used = ignored.union(*stored.values(), computed, tensors_elsewhere(run_of(module)))
    unexpected = [
        f"unexpected: {in_files[name]} {tuple(shape)}"
        for name, shape in shapes.items()
        if name not in used and not _is_harmless(name, in_files[name], layout)
    ]
    remedies = ["ignore=[...], in a recipe model.ignore, leaves unexpected tensors unread"] if unexpected else []
    for name in [name for name in wanted if not stored[name]] if problems or unexpected else ():
        if full := next((full for full in in_files.values() if full.endswith(f".{name}")), None):
            prefix = repr(full[: -len(name)])
            takers = f"DistributedCheckpoint and TorchWeights take prefix={prefix}"
            remedies = [f"these weights' names begin with {prefix}: {takers}"]
            break
    return Fit(source, stored, rebuilt, [*problems, *unexpected], remedies)


def _misfits(
    name: str, tensor: Tensor, offers: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, cast: bool
) -> Iterator[str]:
    """Yield whether a tensor is missing, or has another shape, or a dtype that the model's cannot stand for."""
    if not offers:
        yield f"missing: {name} {tuple(tensor.shape)}"
    for other, (shape, dtype) in offers.items():
        if shape != tuple(tensor.shape):
            yield f"shape of {other}: expected {tuple(tensor.shape)}, got {shape}"
        elif not cast and not _converts(dtype, tensor.dtype):
            yield (
                f"dtype of {other}: expected {tensor.dtype}, got {dtype}, whose values may need scales that are stored "
                "beside them; give weights in a wider floating-point dtype, or cast=True to take the bare values"
            )


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether values of one dtype mean the same in another: not float8's, nor integers as floats."""
    scaled = any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in (stored, wanted))
    kinds = {(dtype.is_floating_point, dtype.is_complex) for dtype in (stored, wanted)}
    return stored == wanted or (not scaled and len(kinds) == 1)


def _is_harmless(name: str, stored: str, layout: ModelLayout) -> bool:
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
    tiles = [(index, out)]
    if out.ndim:
        step = max(1, len(out) * _TILE_BYTES // out.nbytes)
        rows = [(index[0].start + first, part) for first, part in zip(range(0, len(out), step), out.split(step))]
        tiles = [((slice(begin, begin + len(part)), *index[1:]), part) for begin, part in rows]
    return [other for other in names[1:] if not all(_is_read(source, other, at, part) for at, part in tiles)]


def _is_read(source: WeightSource, name: str, index: tuple[slice, ...], values: Tensor) -> bool:
    """Return whether a part of a source has the same bits as ``values``, also where they are no numbers."""
    part = torch.empty_like(values)
    source.read(name, index, part)
    plain = (tensor.resolve_conj().resolve_neg().reshape(-1).contiguous() for tensor in (values, part))
    return torch.equal(*(tensor.view(torch.uint8) for tensor in plain))


def _agree(number: int) -> int:
    """Return the least of all ranks' numbers."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    least = torch.tensor(number)
    dist.all_reduce(least, dist.ReduceOp.MIN, runtime.hosts())
    return int(least)


def state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers by name, tied ones once."""
    yield from module.named_parameters()
    for prefix, child in module.named_modules():
        for name, buffer in persistent_buffers(child):
            yield f"{prefix}.{name}" if prefix else name, buffer


def _initialise(
    module: nn.Module, layout: ModelLayout, device: torch.device, names: set[str], seed: int | None
) -> None:
    """Let modules write their parameters and buffers with these ``names``, tied ones once; keep this rank's parts."""
    done: set[int] = set()
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        named = {key: value for key, value in child._parameters.items() if prefix + key in names}
        shards = {key: value for key, value in named.items() if value is not None and id(value) not in done}
        buffers = {key: value for key, value in child._buffers.items() if prefix + key in names and value is not None}
        done.update(map(id, shards.values()))
        if not shards and not buffers:
            continue
        # of the module's name: neither the mesh nor the order of modules counts
        if seed is not None:
            random.seed(device, random.mix(seed, zlib.crc32(name.encode())))
        with _whole_parameters(child, device) as whole:
            before = whole | buffers
            versions = {key: tensor._version for key, tensor in before.items()}
            if (init := layout.init or own_init(child)) is not None:
                init(child)
            now = child._parameters | child._buffers
            same = [key for key, value in before.items() if now[key] is value and value._version == versions[key]]
            # A parameter that was written through .data keeps its version; its NaN are gone.
            written = {key for key in same if before[key].is_floating_point() and not before[key].isnan().all()}
            if missed := [key for key in same if key in buffers or key not in written]:
                raise LayoutError(
                    f"{name or class_name(child)} ({class_name(child)}) has no initialisation for {', '.join(missed)}; "
                    "give the class a reset_parameters() that fills them, or pass ModelLayout(init=...), or build the "
                    "model with weights instead of on meta"
                )
            for key, shard in shards.items():
                local_tensor(shard).copy_(child.get_parameter(key)[held_by_this_rank(shard)])


def own_init(child: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return the module's own initialisation; torch's attention calls it ``_reset_parameters``."""
    names = [name for name in ("reset_parameters", "_reset_parameters") if callable(getattr(child, name, None))]
    return methodcaller(names[0]) if names else None


@contextmanager
def _whole_parameters(child: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Let a module own whole plain parameters, NaN where they can be, for a while instead of its shards."""
    shards = dict(child._parameters)
    whole: dict[str, Tensor] = {}
    for key, shard in shards.items():
        if shard is not None:
            values = torch.empty(shard.shape, dtype=shard.dtype, device=device)
            values = values.fill_(torch.nan) if values.is_floating_point() else values
            child._parameters[key] = whole[key] = nn.Parameter(values, requires_grad=shard.requires_grad)
    try:
        yield whole
    finally:
        child._parameters.update(shards)
