"""Which of a transformers model's embeddings and heads are split over the vocabulary."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from torch import nn

from meshpar.models.huggingface_styles import Head
from meshpar.passes.tensor.parts import Parts


def generic(name: str) -> str:
    """Return a name with ``*`` for its numbers: ``layers.3.mlp`` -> ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def vocabulary_styles(model: Any, table: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the styles of token embeddings and of the head, the largest parameters, and the names of those that stay whole.

    A plan may leave them out. Tied ones are split together or not at all; what is read outside of its own module stays whole.
    """
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    ends: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (module is inputs or table.get(generic(name)) == "vocab"):
            ends[name] = "vocab"
        elif isinstance(module, nn.Linear) and module is outputs:
            ends[name] = Head(model)
    weights = {id(model.get_submodule(name).weight) for name in ends}
    sharing = {name: each for name, each in model.named_modules() if id(getattr(each, "weight", None)) in weights}
    whole = {id(each.weight) for name, each in sharing.items() if not _splittable(model, name, each)}
    for name, each in sharing.items():
        ends.setdefault(name, "vocab" if isinstance(each, nn.Embedding) else "colwise_gather")
    kept = {generic(name) for name, each in sharing.items() if id(each.weight) in whole}
    split = {name: style for name, style in ends.items() if generic(name) not in kept}
    biases = [_tied_biases(model, name) for name, style in split.items() if isinstance(style, Head)]
    return {generic(name): style for each in (split, *biases) for name, style in each.items()}, kept


def _tied_biases(model: nn.Module, head: str) -> dict[str, Any]:
    """Return the styles of modules that have the head's bias as their own parameter, too (BERT's predictions)."""
    bias = getattr(model.get_submodule(head), "bias", None)
    owners = (name.rpartition(".") for name, each in model.named_parameters(remove_duplicate=False) if bias is not None and each is bias)
    return {owner: Parts(dims={leaf: (0, 1)}) for owner, _, leaf in owners if owner != head}


def _splittable(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Return whether a vocabulary's weight is used only in its own module, by a forward that a split style can replace."""
    if isinstance(module, nn.Embedding):
        plain = type(module).forward is nn.Embedding.forward or getattr(module, "embed_scale", None) is not None
    else:
        plain = type(module).forward is nn.Linear.forward
    return plain and not _read_outside(model, name)


def _read_outside(model: nn.Module, name: str) -> bool:
    """Return whether the source of a module around ``name`` reads its weight directly."""
    *outer, leaf = name.split(".")
    reads = re.compile(rf"\b{re.escape(leaf)}\.weight\b")
    around = [model, *(model.get_submodule(".".join(outer[: n + 1])) for n in range(len(outer)))]
    kinds = {kind for module in around for kind in type(module).__mro__ if kind.__module__.startswith("transformers.models")}
    functions = [
        each for kind in kinds for key, each in vars(kind).items() if isinstance(each, FunctionType) and not _ABOUT_WEIGHTS.match(key)
    ]
    return any(reads.search(inspect.getsource(each)) for each in functions)


_ABOUT_WEIGHTS = re.compile("__init__|tie_|_tie|_?init_|get_|set_|resize|_resize|post_init|save|load")
