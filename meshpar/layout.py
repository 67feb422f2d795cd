"""ModelLayout: what a model tells the passes, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from meshpar.weights import WeightMap


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A model described, so that no pass has to probe it. Patterns are those of :mod:`meshpar.patterns`.

    Attributes:
        blocks: patterns of the repeated modules (``layers.*``): the unit of sharding, of recomputation and of compilation.
            A part of a model that no block covers falls to the outermost unit.
        tensor: module pattern -> tensor-parallel style, see :class:`meshpar.TensorParallel` for the styles. A value that
            is not text is a :class:`meshpar.passes.Style` of the model's own.
        heads: module pattern of a ``colwise`` projection -> how many heads its output features hold; the tensor axis must
            divide it, so that no head is cut in two.
        copied_heads: those patterns of ``heads`` whose projection may be computed by several ranks where the axis is a multiple of its
            heads (keys and values of grouped-query attention): ranks then share a head, exactly.
        head_ratio: attribute of the module around those projections that holds the number of query heads per key head. Each rank sets
            it to the ratio of its own heads. Empty: the module derives the ratio from its tensors.
        head: name of the linear layer that makes the logits, where the model's ``output.logits`` is that layer's output, unchanged:
            the loss may then be computed in chunks. Empty: not known.
        tied: groups of parameter names that are one tensor, the owner first (``("embed.weight", "head.weight")``).
        fp32: patterns of modules that keep computing in float32 under mixed precision.
        dropout: True when the model draws random numbers in training, so that random state must follow the axes.
        init: fills the parameters and buffers that one module owns itself, in place; None: the module's own
            ``reset_parameters``.
        rebuilt: patterns of parameters and persistent buffers that files need not hold, because the initialisation computes them.
        ignored: regular expressions, searched for in stored names, of tensors that files may hold and the model has no use for
            (``rotary_emb\\.inv_freq``), as transformers' ``_keys_to_ignore_on_load_unexpected``.
        weights: the model's names and shapes <-> those of its published form (Hugging Face's).
        config: the contents of ``config.json`` that an export needs; empty where there is no such form.
        hidden_inputs: keyword names under which a ``region`` may receive its hidden states.
        refusals: technique (``"tp"``, ``"recompute"``) -> why this model cannot take it and what would work.
    """

    blocks: tuple[str, ...] = ()
    tensor: Mapping[str, Any] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    copied_heads: tuple[str, ...] = ()
    head_ratio: str = ""
    head: str = ""
    tied: tuple[tuple[str, ...], ...] = ()
    fp32: tuple[str, ...] = ()
    dropout: bool = False
    init: Callable[[nn.Module], None] | None = None
    rebuilt: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    weights: WeightMap = field(default_factory=WeightMap)
    config: Mapping[str, Any] = field(default_factory=dict)
    hidden_inputs: tuple[str, ...] = ("hidden_states",)
    refusals: Mapping[str, str] = field(default_factory=dict)
