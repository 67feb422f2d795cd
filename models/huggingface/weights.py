"""The stored form of a transformers model as a WeightMap.

transformers' conversion runs once without memory; offsets and strides of its views say what part each tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshpar.core.errors import LayoutError
from meshpar.models.huggingface.tensor import generic
from meshpar.state.initialize import state
from meshpar.weights import Fuse, Rename, Split, Transpose, Unstack, WeightMap


def weight_map(model: Any) -> WeightMap:
    """Return the map to what ``save_pretrained`` writes; what does not consist of parts keeps its own name."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return WeightMap()  # transformers before 5 stores what is in memory
    ours = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state(model)}
    with _Views() as views:
        stored = revert_weight_conversion(model, dict(ours))
    conversion = _Conversion(ours, stored, views.joined)
    sets = [*_by_pattern(conversion.parts(), _split), *_by_pattern(conversion.fused(), _fuse)]
    return WeightMap(tuple(rule for rules in sets for rule in rules if _is_read_back(rules)))


def _is_read_back(rules: Sequence[Any]) -> bool:
    """Return whether a checkpoint, which keeps the rules as data, can read them: its own names are better than none."""
    try:
        WeightMap.from_json(WeightMap(tuple(rules)).to_json())
    except LayoutError:
        return False
    return True


class _Views(TorchFunctionMode):
    """Keep transformers' conversions views of the original tensors, and record the concatenated ones."""

    def __init__(self) -> None:
        self.joined: dict[int, tuple[Tensor, list[Tensor], int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.cat:
            dim = kwargs["dim"] if kwargs and "dim" in kwargs else (args[1] if len(args) > 1 else 0)
            self.joined[_storage(result)] = (result, list(args[0]), dim)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _StoredPart(NamedTuple):
    """A stored tensor as a part of one of ours: starts and sizes along our dims (size 0: one, and the dim is gone)."""

    name: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    transposed: bool


class _Conversion(NamedTuple):
    """The conversion's tensors by our and by their names, and by storage what each was joined of along which dim."""

    own: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]
    joined: Mapping[int, tuple[Tensor, list[Tensor], int]]

    def parts(self) -> dict[str, list[_StoredPart]]:
        """Return our name -> the stored tensors that make it up, without ours that are stored as something else."""
        base = {_storage(tensor): name for name, tensor in self.own.items()}
        parts: dict[str, list[_StoredPart | None]] = {}
        for name, tensor in self.stored.items():
            if (ours := base.get(_storage(tensor))) is not None:
                parts.setdefault(ours, []).append(_part(name, tensor, self.own[ours]))
        whole = {
            ours: [part for part in stored if part is not None] for ours, stored in parts.items() if None not in stored
        }
        sizes = {ours: sum(self.stored[part.name].numel() for part in stored) for ours, stored in whole.items()}
        return {ours: stored for ours, stored in whole.items() if sizes[ours] == self.own[ours].numel()}

    def fused(self) -> dict[str, tuple[list[str], list[int], int]]:
        """Return their name -> (our names that it joins, their lengths, the dim)."""
        base = {id(tensor): name for name, tensor in self.own.items()}
        fused = {}
        for name, tensor in self.stored.items():
            _, inputs, dim = self.joined.get(_storage(tensor), (tensor, [], 0))
            names = [base[id(part)] for part in inputs if id(part) in base]
            if len(names) > 1 and len(names) == len(inputs) and tensor.is_contiguous():
                fused[name] = (names, [part.shape[dim] for part in inputs], dim)
        return fused


def _part(name: str, tensor: Tensor, whole: Tensor) -> _StoredPart | None:
    """Read from offset and strides which part of the contiguous ``whole`` a view is; None where it is no block."""
    strides, offset, starts = whole.stride(), tensor.storage_offset(), []
    for stride in strides:
        starts.append(offset // stride)
        offset %= stride
    sizes = [0] * whole.ndim
    order = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        free = [dim for dim, length in enumerate(strides) if length == stride and not sizes[dim]]
        fits = [dim for dim in free if size <= whole.shape[dim]]
        if not fits or not size:
            return None
        # Of dims with one stride (one of them has length one) the first of the right length is meant.
        dim = next((at for at in fits if whole.shape[at] == size), fits[0])
        sizes[dim] = size
        order.append(dim)
    transposed = len(order) > 1 and order == [*sorted(order)[:-2], *sorted(order)[:-3:-1]]
    return _StoredPart(name, tuple(starts), tuple(sizes), transposed) if transposed or order == sorted(order) else None


def _by_pattern(tensors: Mapping[str, Any], make: Callable[[str, Any, int], list[Any] | None]) -> list[list[Any]]:
    """Return the rules of all tensors, one set for all layers where these are alike."""
    sets: dict[str, list[Any]] = {}
    for name, value in tensors.items():
        rules, pattern = make(name, value, sum(part.isdigit() for part in name.split("."))), generic(name)
        if rules is None or sets.setdefault(pattern, rules) != rules:
            sets[pattern] = []
    return list(sets.values())


def _split(ours: str, parts: Sequence[_StoredPart], stars: int) -> list[Any] | None:
    """Return the rules that split one of our tensors; None if no rule fits its parts."""
    names = [_starred(ours, part.name, stars) for part in parts]
    pattern = generic(ours)
    if None in names:
        return None
    if len(parts) == 1 and all(parts[0].sizes):
        if parts[0].transposed:
            return [Transpose(pattern, str(names[0]))]
        return [] if names[0] == pattern else [Rename(pattern, str(names[0]))]
    if all(part.sizes[0] for part in parts):
        cut = _cut_dim(parts)
        if cut is None or parts[0].transposed:
            return None
        return [Split(pattern, tuple(map(str, names)), cut, tuple(part.sizes[cut] for part in parts))]
    return _unstack(pattern, parts, [str(name) for name in names])


def _unstack(pattern: str, parts: Sequence[_StoredPart], names: Sequence[str]) -> list[Any] | None:
    """Return the rules for experts: split fused features, transpose the features, then one tensor per expert."""
    groups: dict[tuple[int, ...], list[tuple[_StoredPart, str]]] = {}
    for part, name in zip(parts, names, strict=True):
        groups.setdefault(part.starts[1:], []).append((part, name))
    firsts = [group[0][0] for _, group in sorted(groups.items())]
    for group in groups.values():
        # A part is one expert, in their order.
        if [(part.starts[0], part.sizes[0]) for part, _ in group] != [(number, 0) for number in range(len(group))]:
            return None
    halves = [pattern] if len(groups) == 1 else [f"{pattern}:{number}" for number in range(len(groups))]
    rules: list[Any] = []
    if len(groups) > 1:
        cut = _cut_dim(firsts)
        if cut is None:
            return None
        rules.append(Split(pattern, tuple(halves), cut, tuple(first.sizes[cut] for first in firsts)))
    for half, (_, group) in zip(halves, sorted(groups.items()), strict=True):
        if group[0][0].transposed:
            rules.append(Transpose(half, f"{half}:t"))
            half = f"{half}:t"
        rules.append(Unstack(half, tuple(name for _, name in group)))
    return rules


def _cut_dim(parts: Sequence[_StoredPart]) -> int | None:
    """Return the only dim along which the parts differ, if they are contiguous along it; None otherwise."""
    dims = [dim for dim in range(len(parts[0].sizes)) if len({part.starts[dim] for part in parts}) > 1]
    if len(dims) != 1:
        return None
    ends = [0, *(part.starts[dims[0]] + part.sizes[dims[0]] for part in parts)]
    return dims[0] if all(part.starts[dims[0]] == end for part, end in zip(parts, ends)) else None


def _fuse(theirs: str, joined: tuple[list[str], list[int], int], stars: int) -> list[Any] | None:
    ours, lengths, dim = joined
    names = [_starred(theirs, name, stars) for name in ours]
    return None if None in names else [Fuse(tuple(map(str, names)), generic(theirs), dim, tuple(lengths))]


def _starred(like: str, name: str, stars: int) -> str | None:
    """Return ``name`` with ``*`` for its first numbers, which must be those of ``like``; None where they are others."""
    numbers = [part for part in like.split(".") if part.isdigit()]
    parts = name.split(".")
    places = [at for at, part in enumerate(parts) if part.isdigit()][:stars]
    if [parts[at] for at in places] != numbers:
        return None
    return ".".join("*" if at in places else part for at, part in enumerate(parts))
