"""Whether a model's loss can be computed in chunks, told from its code before it runs."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshpar import _torch
from meshpar.chunked import CHUNK, around_the_product, head_of
from meshpar.errors import MeshparError
from meshpar.passes.installed import own_forward
from meshpar.patterns import find_modules

LEAST = 256
"""Positions of a chunk at least; otherwise it is an eighth of a batch, up to CHUNK, so that the memory is a fraction."""

_LOGITS = re.compile(r"logits(_[A-Z]+)?$")
LARGE_LOGITS = 1 << 28
"""Bytes of logits in float32 from which chunks are worth it: 256 MiB."""


def chunk_for(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Return the chunk for a batch: 0 (all logits at once) where these are small, or where chunks are not known to be exact.

    Chunks make the gradient of the head's weight (V, D) in float32 while the model still runs forward, and hold about ten bytes for each of
    a chunk's logits; the whole logits (N, V) and what becomes of them take eight bytes each. So they pay where N is well above D.

    Exact means that ``output.logits`` is what the head returns: the forward assigns ``logits`` once, from a call of the head, and no
    policy casts the output. Models that scale or cap their logits do not read so. Nothing runs, and nothing is read from a device.
    """
    try:
        head = head_of(model)
        around_the_product(head)
    except MeshparError:
        return 0
    assert isinstance(head, nn.Linear)
    positions = batch["labels"].numel()
    if positions * head.out_features * 4 < LARGE_LOGITS or positions < head.in_features + 2.5 * CHUNK:
        return 0
    name = next((name for name, child in find_modules(model, "*") if child is head), None)
    exact = name is not None and assigns_logits_once(model, name) and _torch.output_dtype(model) in (None, torch.float32)
    return min(CHUNK, max(LEAST, positions // 8)) if exact else 0


def assigns_logits_once(model: nn.Module, head: str) -> bool:
    """Tell whether the model's forward sets ``logits`` by calling ``self.<head>`` and never otherwise."""
    if own_forward(model) is not None:  # somebody's wrapper, which may do anything to the output
        return False
    forward: Any = inspect.unwrap(model.forward)
    return _assigned_once(getattr(forward, "__func__", forward), head)


@functools.cache
def _assigned_once(forward: Callable[..., Any], head: str) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # written where no source is kept
        return False
    values = [_value(node) for node in ast.walk(tree) if _sets_logits(node)]
    call = values[0] if len(values) == 1 else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) == f"self.{head}"


def _sets_logits(node: ast.AST) -> bool:
    """Tell an assignment to ``logits``, also under its name with dims (``logits_BLV``), or to a part of it."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(_LOGITS.match(each.id) for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name))


def _value(node: ast.AST) -> ast.AST | None:
    return getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
