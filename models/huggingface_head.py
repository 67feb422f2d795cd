"""Which layer of a transformers model makes its logits, read from transformers' own code."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from torch import nn

_LOGITS = re.compile(r"logits(_[A-Z]+)?$")


def head_of_logits(model: Any) -> str:
    """Return the name of the layer whose output is the model's ``logits``, unchanged; empty where a scale or a cap may come after it.

    The forward of a class of transformers' own assigns ``logits`` once, from a call of its output embeddings.
    """
    head = model.get_output_embeddings()
    name = next((name for name, child in model.named_modules() if child is head), "")
    if not isinstance(head, nn.Linear) or not name or not type(model).__module__.startswith("transformers."):
        return ""
    return name if _assigned_once(inspect.unwrap(type(model).forward), name) else ""


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
