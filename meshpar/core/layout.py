"""ModelLayout: what a model tells the passes, as data: what concerns all of them, and a value for each technique."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, final

from torch import nn

from meshpar.weights import WeightMap


@final
@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Describe a model to :class:`meshpar.TensorParallel`.

    Attributes:
        styles: module pattern -> tensor-parallel style: text (see :class:`meshpar.TensorParallel`) or a
            :class:`meshpar.passes.Style`.
        heads: module pattern of a ``colwise`` projection -> number of heads in its output features. The tensor axis
            must divide this number, so that no head is cut.
        copied_heads: patterns of ``heads`` whose heads several ranks may share if the tensor axis is a multiple of
            their number (keys and values of grouped-query attention). The result is exact.
        head_ratio: attribute of the module around those projections that holds the number of query heads per key head.
            Each rank sets it to the ratio of its own heads. Empty: the module derives the ratio from its tensors.
        hidden_inputs: keyword names of the hidden states that a ``region`` receives.
        refusal: reason why the model cannot be split, and the remedy.
    """

    styles: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    heads: Mapping[str, int] = field(default_factory=dict)
    copied_heads: tuple[str, ...] = ()
    head_ratio: str = ""
    hidden_inputs: tuple[str, ...] = ("hidden_states",)
    refusal: str = ""


@final
@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Describe a model to :class:`meshpar.ContextParallel`, and to packed documents.

    Attributes:
        modules: patterns of the modules that call :func:`meshpar.attention` or :func:`meshpar.attention_mask`.
        mixers: patterns of modules that mix positions in another way (custom attention, a recurrence, a convolution
            over positions): each rank computes them on the whole sequence.
        exchange: exchanges positions in the attention of a model that does not call :func:`meshpar.attention`; called
            with the model and a :class:`meshpar.passes.positions.parallel.Exchange`.
        counts_positions: the model derives the positions of its tokens itself, so ``par.split`` adds no
            ``position_ids``.
        refusal: reason why the model's positions cannot be split, and the remedy.
        mixers_refusal: the same, unless ``ContextParallel(mixers=...)`` names what mixes positions.
        documents_refusal: reason why the model does not keep packed documents apart.
    """

    modules: tuple[str, ...] = ()
    _: KW_ONLY
    mixers: tuple[str, ...] = ()
    exchange: Callable[[nn.Module, Any], None] | None = None
    counts_positions: bool = False
    refusal: str = ""
    mixers_refusal: str = ""
    documents_refusal: str = ""


@final
@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """Describe a model to :class:`meshpar.ExpertParallel` and to the balance of its experts.

    Attributes:
        modules: patterns of modules with stacked experts. The first dim of their parameters is the number of experts.
            Their forward accepts (hidden states (N, D), chosen experts (N, K), their weights (N, K)) and returns
            (N, D). If the module stores its number of experts, the attribute is ``num_experts``, ``n_experts`` or
            ``num_local_experts`` (also ``routed``, ``total``).
        in_order: those of ``modules`` whose forward accepts rows (R, D) in the order of experts, with a list of the
            number of rows of each expert; or rows alone, equally many for each expert. Rows of zeros must give zeros
            and zero gradients, and are not sent.
        routers: patterns of the modules whose output, or its first part, is the routers' logits (N, E), in the order of
            ``modules``.
        router_bias: patterns of the buffers or frozen parameters (E,) that routers add to choose experts but not to
            weigh them, in the order of ``modules``. ``training.balance_rate`` changes them.
        refusal: reason why the experts cannot be divided, and the remedy.
        balance_refusal: reason why the model's own balance loss is not that of all ranks, and the remedy.
    """

    modules: tuple[str, ...] = ()
    _: KW_ONLY
    in_order: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    router_bias: tuple[str, ...] = ()
    refusal: str = ""
    balance_refusal: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StagesLayout:
    """Describe a model to :class:`meshpar.PipelineParallel`.

    Attributes:
        carries: patterns of blocks, and of modules before them, whose results later blocks use beside the value that
            passes from block to block: an embedding that each block adds again, a skip over blocks.
        example: inputs of a forward by which the pass finds what runs when, if they are not token ids alone: keyword
            arguments as a mapping, arguments as a list or tuple, or the one argument. Shapes and dtypes of tensors are
            used, values are not.
    """

    carries: tuple[str, ...] = ()
    example: Any = field(default=None, compare=False, repr=False)


_TENSOR, _STAGES, _WEIGHTS = TensorLayout(), StagesLayout(), WeightMap()


@final
@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class ModelLayout:
    """Describe a model to the passes. Patterns are those of :mod:`meshpar.core.patterns`.

    >>> from meshpar import ModelLayout
    >>> layout = ModelLayout(blocks=("layers.*",), tensor={"layers.*.up": "colwise", "layers.*.down": "rowwise"})

    Attributes:
        blocks: patterns of the repeated modules (``layers.*``): the unit of sharding, recomputation and compilation.
            The outermost unit holds everything outside the blocks, but for large embeddings and heads.
        tensor: a :class:`TensorLayout`, or its ``styles`` alone.
        attention: an :class:`AttentionLayout`, or its ``modules`` alone.
        experts: an :class:`ExpertsLayout`, or its ``modules`` alone.
        stages: a :class:`StagesLayout`.
        tied: groups of names of one parameter, the owner first (``("embed.weight", "head.weight")``).
        fp32: patterns of modules that compute in float32 under mixed precision.
        init: fills the parameters and buffers of one module in place. Defaults to the module's ``reset_parameters``.
        head: name of the linear layer that makes the logits, if ``output.logits`` is the unchanged output of this
            layer. The loss may then be computed in chunks. Empty: not known.
        dropout: the model draws random numbers in training without torch's dropout modules.
        weights: names and shapes of the model <-> those of its published form on Hugging Face.
        config: contents of the ``config.json`` of an export. Empty: the model has no published form.
        rebuilt: patterns of parameters and persistent buffers that files may lack, because the initialisation computes
            them.
        ignored: regular expressions for names of stored tensors that are not loaded (``rotary_emb\\.inv_freq``), as in
            transformers' ``_keys_to_ignore_on_load_unexpected``.
        recompute_refusal: reason why the model does not support recomputation, and the remedy.
    """

    blocks: tuple[str, ...]
    tensor: TensorLayout
    attention: AttentionLayout
    experts: ExpertsLayout
    stages: StagesLayout
    tied: tuple[tuple[str, ...], ...]
    fp32: tuple[str, ...]
    init: Callable[[nn.Module], None] | None
    head: str
    dropout: bool
    weights: WeightMap
    config: Mapping[str, Any]
    rebuilt: tuple[str, ...]
    ignored: tuple[str, ...]
    recompute_refusal: str

    def __init__(
        self,
        *,
        blocks: tuple[str, ...] = (),
        tensor: TensorLayout | Mapping[str, Any] = _TENSOR,
        attention: AttentionLayout | tuple[str, ...] = (),
        experts: ExpertsLayout | tuple[str, ...] = (),
        stages: StagesLayout = _STAGES,
        tied: tuple[tuple[str, ...], ...] = (),
        fp32: tuple[str, ...] = (),
        init: Callable[[nn.Module], None] | None = None,
        head: str = "",
        dropout: bool = False,
        weights: WeightMap = _WEIGHTS,
        config: Mapping[str, Any] | None = None,
        rebuilt: tuple[str, ...] = (),
        ignored: tuple[str, ...] = (),
        recompute_refusal: str = "",
    ) -> None:
        values = locals() | {
            "tensor": tensor if isinstance(tensor, TensorLayout) else TensorLayout(tensor),
            "attention": attention if isinstance(attention, AttentionLayout) else AttentionLayout(attention),
            "experts": experts if isinstance(experts, ExpertsLayout) else ExpertsLayout(experts),
            "config": {} if config is None else config,
        }
        for attribute in fields(self):
            object.__setattr__(self, attribute.name, values[attribute.name])
