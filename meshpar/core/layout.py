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
    """Describe a model to the passes. Patterns are those of :mod:`meshpar.core.patterns`.

    >>> from meshpar import ModelLayout
    >>> layout = ModelLayout(blocks=("layers.*",), tensor={"layers.*.up": "colwise", "layers.*.down": "rowwise"})

    Attributes:
        blocks: patterns of the repeated modules (``layers.*``): the unit of sharding, recomputation and compilation.
            The outermost unit holds everything outside the blocks.
        tensor: module pattern -> tensor-parallel style: text (see :class:`meshpar.TensorParallel`) or a
            :class:`meshpar.passes.Style`.
        heads: module pattern of a ``colwise`` projection -> number of heads in its output features. The tensor axis
            must divide this number, so that no head is cut.
        copied_heads: patterns of ``heads`` whose heads several ranks may share if the tensor axis is a multiple of
            their number (keys and values of grouped-query attention). The result is exact.
        head_ratio: attribute of the module around those projections that holds the number of query heads per key head.
            Each rank sets it to the ratio of its own heads. Empty: the module derives the ratio from its tensors.
        head: name of the linear layer that makes the logits, if ``output.logits`` is the unchanged output of this
            layer. The loss may then be computed in chunks. Empty: not known.
        tied: groups of names of one parameter, the owner first (``("embed.weight", "head.weight")``).
        fp32: patterns of modules that compute in float32 under mixed precision.
        dropout: the model draws random numbers in training without torch's dropout modules.
        init: fills the parameters and buffers of one module in place. Defaults to the module's ``reset_parameters``.
        rebuilt: patterns of parameters and persistent buffers that files may lack, because the initialisation computes
            them.
        ignored: regular expressions for names of stored tensors that are not loaded (``rotary_emb\\.inv_freq``), as in
            transformers' ``_keys_to_ignore_on_load_unexpected``.
        weights: names and shapes of the model <-> those of its published form on Hugging Face.
        config: contents of the ``config.json`` of an export. Empty: the model has no published form.
        attention: patterns of the modules that call :func:`meshpar.attention` or :func:`meshpar.attention_mask`, for
            :class:`meshpar.ContextParallel`.
        mixers: patterns of modules that mix positions in another way (custom attention, a recurrence, a convolution
            over positions): under :class:`meshpar.ContextParallel` each rank computes them on the whole sequence.
        experts: patterns of modules with stacked experts, for :class:`meshpar.ExpertParallel`. The first dim of their
            parameters is the number of experts. Their forward accepts (hidden states (N, D), chosen experts (N, K),
            their weights (N, K)) and returns (N, D). If the module stores its number of experts, the attribute is
            ``num_experts``, ``n_experts`` or ``num_local_experts`` (also ``routed``, ``total``).
        experts_in_order: those of ``experts`` whose forward accepts rows (R, D) in the order of experts, with a list of
            the number of rows of each expert; or rows alone, equally many for each expert. Rows of zeros must give
            zeros and zero gradients, and are not sent.
        routers: patterns of the modules whose output, or its first part, is the routers' logits (N, E), in the order of
            ``experts``.
        router_bias: patterns of the buffers or frozen parameters (E,) that routers add to choose experts but not to
            weigh them, in the order of ``experts``. ``training.balance_rate`` changes them.
        exchange: exchanges positions in the attention of a model that does not call :func:`meshpar.attention`; called
            with the model and a :class:`meshpar.passes.positions.exchange.Exchange`.
        counts_positions: the model derives the positions of its tokens itself, so ``par.split`` adds no
            ``position_ids``.
        carries: patterns of blocks, and of modules before them, whose results later blocks use beside the value that
            passes from block to block: an embedding that each block adds again, a skip over blocks.
        example: inputs of a forward by which :class:`meshpar.PipelineParallel` finds what runs when, if they are not
            token ids alone: keyword arguments as a mapping, arguments as a list or tuple, or the one argument. Shapes
            and dtypes of tensors are used, values are not.
        hidden_inputs: keyword names of the hidden states that a ``region`` receives.
        refusals: technique (``"tp"``, ``"cp"``, ``"cp without mixers"``, ``"ep"``, ``"documents"``, ``"recompute"``,
            ``"balance"``) -> reason why the model does not support it, and the remedy.
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
    attention: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    experts_in_order: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    router_bias: tuple[str, ...] = ()
    exchange: Callable[[nn.Module, Any], None] | None = None
    counts_positions: bool = False
    carries: tuple[str, ...] = ()
    example: Any = field(default=None, compare=False, repr=False)
    hidden_inputs: tuple[str, ...] = ("hidden_states",)
    refusals: Mapping[str, str] = field(default_factory=dict)
