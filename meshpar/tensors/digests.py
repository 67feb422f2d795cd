"""Digests of tensors and of nested values, and what is nested in these: equal bytes have equal digests."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar._torch.in_parts import TensorInParts
from meshpar.tensors.placements import held_by_this_rank, local_tensor

FACTOR = 6364136223846793005
"""By which a digest is multiplied before the next is added, in wrapping 64-bit arithmetic."""
_CHUNK = 1 << 18  # words of 8 bytes
_PRIME = 1_000_003
_MIXES = ((33, FACTOR), (29, 1442695040888963407), (32, 1))  # a word's bits reach all others
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of a tensor's bytes and their order as a 0-dim int64 tensor on its device.

    A polynomial hash in wrapping 64-bit arithmetic (Rabin and Karp 1987).
    """
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    elif data.storage_offset() % 8:
        data = data.clone()  # a part that begins in the middle of a word cannot be read by words
    words = data.view(torch.int64)
    result = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    powers = torch.arange(1, min(_CHUNK, max(1, words.numel())) + 1, device=tensor.device, dtype=torch.int64)
    powers.mul_(_PRIME).bitwise_or_(1)
    powers.mul_(powers * powers)
    for chunk in words.split(_CHUNK) if words.numel() else ():  # two chunks of memory at a time, 4 MiB
        mixed = (chunk >> 29).bitwise_xor_(chunk).mul_(powers[: chunk.numel()]).sum()
        result = result * FACTOR + mixed + 1442695040888963407
    return result


def digest_of_several(tensors: Iterable[Tensor]) -> Tensor:
    """Return one 64-bit digest of several tensors in their order, 0-dim int64 in host memory."""
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for tensor in tensors:
        total = total * FACTOR + digest(tensor).cpu()
    return total


def digest_of_elements(tensor: Tensor, name: str) -> Tensor:
    """Return the sum of hashes of this rank's elements, their bits and places; parts add up to the whole."""
    part, box = local_tensor(tensor).resolve_conj().resolve_neg(), held_by_this_rank(tensor)
    shape: tuple[int, ...] = tensor.shape
    if part.is_complex():
        part, shape, box = torch.view_as_real(part), (*shape, 2), (*box, slice(0, 2))
    bits = part.contiguous().reshape(-1).view(_INTEGERS[part.element_size()])
    total, sizes = torch.full((), zlib.crc32(name.encode()), dtype=torch.int64, device=part.device), part.shape
    key = total * FACTOR
    total = total * (not any(span.start for span in box))  # an empty tensor counts, too: by its name, once
    for start in range(0, bits.numel(), _CHUNK):
        rest = torch.arange(start, min(start + _CHUNK, bits.numel()), device=part.device)
        index, stride = torch.zeros_like(rest), 1
        for size, whole, span in zip(reversed(sizes), reversed(shape), reversed(box), strict=True):
            index.add_(rest.remainder(size).add_(span.start), alpha=stride)
            rest, stride = rest.div(size, rounding_mode="floor"), stride * whole
        mixed = bits[start : start + _CHUNK].to(torch.int64) + index * _PRIME + key
        for shift, odd in _MIXES:
            mixed = (mixed ^ (mixed >> shift)) * odd
        total = total + mixed.sum()
    return total


def digest_of(values: object, device: torch.device) -> Tensor:
    """Return a 64-bit digest of the tensors, but for DTensors, and plain values nested in ``values``."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in leaves(values):
        if isinstance(leaf, DTensor):
            continue
        if isinstance(leaf, Tensor):
            total = total * FACTOR + zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            total = total * FACTOR + digest(leaf).to(device)
        elif isinstance(leaf, int | float | str):
            total = total * FACTOR + zlib.crc32(repr(leaf).encode())
    return total


def tensors_in(values: object, *, objects: bool = False) -> list[Tensor]:
    """Return the tensors among the :func:`leaves` of values."""
    return [leaf for leaf in leaves(values, objects=objects) if isinstance(leaf, Tensor)]


def leaves(values: object, *, objects: bool = False, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield what is in lists, tuples, mappings and dataclasses, in order; with ``objects`` in their attributes, too."""
    if id(values) in around:
        return
    values_inside: Iterable[Any]
    if objects and isinstance(values, TensorInParts):
        yield from values.parts
        return
    if isinstance(values, Tensor | str | nn.Module | type):
        yield values
        return
    if isinstance(values, Mapping):
        values_inside = values.values()
    elif isinstance(values, list | tuple):
        values_inside = values
    elif is_dataclass(values):
        values_inside = [getattr(values, field.name) for field in fields(values)]
    elif objects and hasattr(values, "__dict__"):
        values_inside = vars(values).values()
    else:
        yield values
        return
    around = (*around, id(values))
    for part in values_inside:
        if type(part) is Tensor:
            yield part
        else:
            yield from leaves(part, objects=objects, around=around)
