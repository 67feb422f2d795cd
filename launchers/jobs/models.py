"""Build models of transformers for an objective, and give a model its first weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from meshpar.checkpoints.format.weights import weights_in
from meshpar.checkpoints.steps.importing import config_beside
from meshpar.core.errors import MeshparError, RecipeError, brief
from meshpar.core.layout import ModelLayout
from meshpar.core.patterns import covers, suggestion
from meshpar.launchers.recipes.recipe import UntrustedError
from meshpar.launchers.recipes.sections import Model
from meshpar.models.huggingface import for_training, foreign_attention
from meshpar.parallelized import Parallelized
from meshpar.process.imports import expanded, need, quiet_imports
from meshpar.state import initialize
from meshpar.training.lora import WithAdapters
from meshpar.weights import TypedSource

_HEADS = {
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}
HEAD_OF = {"tokens": "causal_lm", "pairs": "seq2seq_lm", "labels": "sequence_classification"}
"""Kind of an objective's examples -> head of the model."""
_MOST = {
    r"(^|_)(layer|expert|depth|block)s?$": 10_000,
    r"(size|dim|heads?|hidden|positions?|embeddings|channels|width|inner)$": 1 << 27,
}
"""Largest values by the end of a name: layers are modules to build, and products of sizes are counted in 64 bits."""
_TOLD = 8  # tensors that do not fit, before the others are counted


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Values of the data that a model's config needs: ids of the end of a text and of padding, names of the labels."""

    eos_id: int | None = None
    pad_id: int | None = None
    classes: tuple[str, ...] = ()


def refuse_endless(config: Mapping[str, Any] | str) -> None:
    """Raise RecipeError if a config, or the one in a folder, has more layers or larger sizes than can be built."""
    if not isinstance(config, Mapping):
        try:
            config = config_beside(expanded(Path(config)))
        except (OSError, MeshparError):
            return  # transformers says why
    for name, value in config.items():
        if isinstance(value, Mapping):
            refuse_endless(value)
        numbers = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]
        for kind, limit in _MOST.items():
            if re.search(kind, str(name)) and max(numbers, default=0) > limit:
                raise RecipeError(f"model: {name} is {max(numbers)}, expected at most {limit:,}")


@quiet_imports()
def build_transformers(
    source: Mapping[str, Any] | str, head: str, facts: DataFacts, *, trust: bool = False
) -> nn.Module:
    """Build a model of transformers on the meta device in float32, from a config's contents or folder."""
    transformers: Any = need("transformers", extra="transformers", raises=RecipeError)
    auto_config = transformers.AutoConfig
    with _refused():
        if isinstance(source, Mapping):
            ids = {} if facts.eos_id is None else {"eos_token_id": facts.eos_id, "pad_token_id": facts.pad_id}
            ids |= {"decoder_start_token_id": facts.pad_id or 0} if head == "seq2seq_lm" else {}
            values = {**ids, **source}
            config = auto_config.for_model(values.pop("model_type"), **values)
        else:
            folder = str(expanded(Path(source)))
            config = auto_config.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    named = None if trust else foreign_attention(config)
    if named is not None:
        raise UntrustedError(
            f"this command loads no code that a config names, got attn_implementation {named!r}, expected eager, sdpa, "
            "flex_attention or an installed flash_attention; if you trust it, add --trust"
        )
    if head == "sequence_classification" and facts.classes:
        config.id2label = dict(enumerate(facts.classes))
        config.label2id = {name: number for number, name in enumerate(facts.classes)}
    auto = getattr(transformers, _HEADS[head])
    if type(config) not in auto._model_mapping:
        raise RecipeError(f"transformers has no {head} for model_type {config.model_type!r}")
    if isinstance(source, Mapping):
        _refuse_unknown(source, auto_config.for_model(config.model_type), auto._model_mapping[type(config)])
    with _refused():
        return for_training(auto, config)


# a config of transformers
def _refuse_unknown(fields: Mapping[str, Any], known: Any, model: Any) -> None:  # noqa: ANN401
    """Refuse fields that the config's class and the model's module do not name, which transformers ignores."""
    module = inspect.getmodule(model[0] if isinstance(model, tuple) else model)
    # Some models read fields that their config does not declare.
    words = set(re.findall(r"\w+", "" if module is None else inspect.getsource(module)))
    strange = [name for name in fields if not name.startswith("_") and name not in words]
    strange = [name for name in strange if not (hasattr(known, name) or hasattr(known, f"_{name}"))]
    if strange:
        listed = "; ".join(f"{name} ({suggestion(name, known.to_dict())})" for name in strange)
        raise RecipeError(
            f"config: transformers has no such field of {known.model_type}: {listed}; correct its name, or leave it out"
        )


@contextmanager
def _refused() -> Iterator[None]:
    """Convert an error of transformers about a config's values, which its classes check differently."""
    try:
        yield
    except Exception as error:
        raise RecipeError(f"config: transformers cannot use these values: {brief(error)}") from error


def with_weights(par: Parallelized, section: Model, seed: int, *, adapters: bool = False) -> Parallelized:
    """Give a parallel model, with or without adapters, the first weights of its section, and return it."""
    if section.weights is None:
        return par.materialize(seed=seed)
    source, new = _first_weights(par.module, section, seed, adapters=adapters)
    par.materialize(weights=source, ignore=section.ignore)
    if new:
        initialize.from_seed(par.module, par.layout, seed, par.device, new)
    return par


def weights_problems(module: nn.Module, layout: ModelLayout, section: Model, *, adapters: bool = False) -> list[str]:
    """Return why ranks could not read a section's weights, by the headers of the files alone."""
    if section.weights is None or not expanded(section.weights).exists():
        return []  # a folder that is missing is told by folder_problems
    try:
        source, _ = _first_weights(module, section, 0, adapters=adapters)
        fit = initialize.compared(module, layout, source, ignore=section.ignore)
    except (MeshparError, OSError) as error:
        return [str(error) if isinstance(error, MeshparError) else brief(error)]
    problems = [*fit.problems[:_TOLD]]
    problems += [f"and {len(fit.problems) - _TOLD} more like these"] if len(fit.problems) > _TOLD else []
    return [*problems[:-1], *("; ".join([problem, *fit.remedies]) for problem in problems[-1:])]


def _first_weights(module: nn.Module, section: Model, seed: int, *, adapters: bool) -> tuple[TypedSource, set[str]]:
    """Return a section's weights, and the names of parameters that are drawn from the seed instead."""
    assert section.weights is not None
    source: TypedSource = weights_in(expanded(section.weights))
    if adapters:
        return WithAdapters(source, module, seed=seed), set()
    patterns = getattr(section, "new", ())
    shapes = {name: tuple(tensor.shape) for name, tensor in initialize.state(module)} if patterns else {}
    for pattern in patterns:
        if not any(covers(pattern, name) for name in shapes):
            raise RecipeError(f"model.new: {pattern!r} matches no parameter; {suggestion(pattern, shapes)}")
    new = {name: shape for name, shape in shapes.items() if any(covers(pattern, name) for pattern in patterns)}
    return _Without(source, new) if new else source, set(new)


@final
class _Without:
    """A source of weights with zeros for some names."""

    def __init__(self, source: TypedSource, new: Mapping[str, tuple[int, ...]]) -> None:
        self._source, self._new = source, new

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self._source.shapes(), **self._new}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: dtype for name, dtype in self._source.dtypes().items() if name not in self._new}

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        if name in self._new:
            out.zero_()
        else:
            self._source.read(name, index, out)
