"""The values in arguments and results, nested as they may be, and a digest of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar.step.rank_digests import FACTOR, digest


def digest_of(values: object, device: torch.device) -> Tensor:
    """Return a 64-bit digest of the tensors and plain values in ``values``, nested as they may be; DTensors are left
    out.
    """
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


def leaves(values: object, *, objects: bool = False, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield what is in lists, tuples, mappings and dataclasses, in order; with ``objects``, in attributes of other
    objects, too.

    An object that is ``around`` itself (``around`` has the ids of objects) is not entered again.
    """
    if id(values) in around:
        return
    inside: Iterable[Any]
    if isinstance(values, Tensor | str | nn.Module | type):
        yield values
        return
    if isinstance(values, Mapping):
        inside = values.values()
    elif isinstance(values, list | tuple):
        inside = values
    elif is_dataclass(values):
        inside = [getattr(values, field.name) for field in fields(values)]
    elif objects and hasattr(values, "__dict__"):
        inside = vars(values).values()
    else:
        yield values
        return
    for part in inside:
        yield from leaves(part, objects=objects, around=(*around, id(values)))
