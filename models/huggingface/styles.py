"""Tensor-parallel styles that transformers' models need, and the table of architectures without a ``tp_plan``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar.losses.token_loss import IGNORE_INDEX, token_loss
from meshpar.passes.data.whole_parameters import features_of
from meshpar.passes.tensor.collectives import copy_to
from meshpar.passes.tensor.context import Context, Style
from meshpar.passes.tensor.parts import FeatureTable
from meshpar.passes.tensor.styles import Colwise, Region
from meshpar.step.inner_calls import set_forward

_QUERIES = ("q", "query", "q_proj", "q_lin")
_KEYS = ("k", "key", "k_proj", "k_lin")
_VALUES = ("v", "value", "v_proj", "v_lin")
_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_COUNTS = (*_HEADS, "inner_dim", "all_head_size", "split_size", "dim")
_OUTPUTS = ("o", "o_proj", "out_proj", "out_lin", "output", "dense")
# Names of the projections into and out of a feed-forward layer, relative to the module that holds both.
_FEED_FORWARDS = (
    (("fc1",), "fc2"),
    (("wi",), "wo"),
    (("wi_0", "wi_1"), "wo"),
    (("lin1",), "lin2"),
    (("intermediate.dense",), "output.dense"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
)

VERIFIED: tuple[str, ...] = (
    *("bart", "bert", "bert-generation", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom"),
    *("camembert", "codegen", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra"),
    *("encoder-decoder", "ernie", "falcon", "fnet", "fuyu", "git", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox_japanese", "gptj", "gte", "jina_embeddings_v3", "layoutlm", "longt5", "m2m_100", "marian", "mbart"),
    *("megatron-bert", "mobilebert", "modernvbert", "mra", "mt5", "nllb-moe", "nomic_bert", "openai-gpt", "opt"),
    *("pegasus", "persimmon", "plbart", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "tapas", "umt5", "whisper", "xlm", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod", "yoso", "zamba", "zamba2"),
)
"""Architectures whose table from here was exact under every plan of ``benchmarks/architectures.py``."""


@final
@dataclass(frozen=True, slots=True)
class Refused(Style):
    """An entry that no style carries out; it says so when the plan is checked."""

    reason: str

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        yield f"{name}: {self.reason}"


@final
@dataclass(frozen=True, slots=True)
class LatentKeys(Style):
    """Latent attention's joint projection, whose last ``rotary`` features are the rotary key (DeepSeek-V2, 2405.04434).

    The rotary part goes directly to this rank's heads, so its gradient is summed here; the rest's by its projection.
    """

    rotary: Mapping[str, int]

    sums_gradients = True

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        inner, group, width = module.forward, context.group, self.rotary[name]

        def forward(x: Tensor) -> Tensor:
            y = inner(x)
            rest, rotary = y.split([y.shape[-1] - width, width], dim=-1)
            return torch.cat([rest, copy_to(rotary, group)], dim=-1)

        set_forward(module, forward)


@final
@dataclass(frozen=True, slots=True)
class FullPositions(Style):
    """On the base model, under sequence parallelism: give it the positions of the whole sequence, not of its part."""

    computes_in_parts = True

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        def fill(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tokens = args[0] if args else kwargs.get("input_ids")
            if kwargs.get("attention_mask") is not None:
                raise ValueError(
                    f"{name} got an attention_mask; transformers applies it to the embeddings, which sequence "
                    "parallelism splits; pack the batch instead of padding it, or use "
                    "TensorParallel(sequence_parallel=False)"
                )
            if tokens is None or kwargs.get("position_ids") is not None:
                return None
            return args, kwargs | {"position_ids": torch.arange(tokens.shape[1], device=tokens.device)[None]}

        if context.sequence_parallel:
            module.register_forward_pre_hook(fill, with_kwargs=True)


@final
@dataclass(frozen=True, slots=True)
class Head(Style):
    """The output projection; where logits stay split over the vocabulary, ``model.loss_function`` takes them."""

    model: Any = field(default=None, repr=False, compare=False)
    gather: str = "loss"

    splits = stands_alone = computes_in_parts = True

    @property
    def splits_logits(self) -> bool:  # type: ignore[override]
        return self.gather == "loss"

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        return Colwise(gather=self.gather).problems(name, module, size)

    def split_dims(self, module: nn.Module) -> Mapping[str, int]:
        return Colwise().split_dims(module)

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        Colwise(gather=self.gather).install(name, module, context)
        if context.loss_parallel:
            self.model.loss_function = _split_loss(self.model.loss_function)


def _split_loss(whole_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return transformers' causal loss for logits split over the vocabulary; ``whole_loss`` takes whole ones."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int | None = None, **options: Any) -> torch.Tensor:
        if not isinstance(logits, DTensor):
            return whole_loss(logits=logits, labels=labels, vocab_size=vocab_size, **options)
        ignored, count = options.get("ignore_index", IGNORE_INDEX), options.get("num_items_in_batch")
        shifted = options.get("shift_labels")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        if count is None:
            return token_loss(logits, shifted, ignore_index=ignored)
        return token_loss(logits, shifted, ignore_index=ignored, reduction="sum") / count

    return loss


def structural_table(model: Any) -> dict[str, Any]:
    """Return module name -> style for a verified architecture's attentions and feed-forward layers, else nothing."""
    if model.config.model_type not in VERIFIED:
        return {}
    table: dict[str, Any] = {}
    for name, module in model.named_modules():
        table |= dict(_attention(model, name, module))
        table |= dict(_feed_forward(name, module))
    return table


def _attention(model: nn.Module, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    children = dict(module.named_children())
    sizes = {child_name: features_of(child) or (0, 0) for child_name, child in children.items()}
    chosen = [next((leaf for leaf in leaves if leaf in children), "") for leaves in (_QUERIES, _KEYS, _VALUES)]
    if "" in chosen or any(features_of(children[child_name]) is None for child_name in chosen):
        return
    width = sizes[chosen[0]][1]
    output = next((child_name for child_name in _OUTPUTS if sizes.get(child_name, (0, 0))[0] == width), None)
    embeddings = {child_name: child for child_name, child in children.items() if isinstance(child, nn.Embedding)}
    counts = {attribute: value for attribute in _COUNTS if isinstance(value := vars(module).get(attribute), int)}
    heads = next((counts[attribute] for attribute in _HEADS if attribute in counts), None)
    tables = [child_name for child_name, child in embeddings.items() if child.embedding_dim == heads]
    if {inner.partition(".")[0] for inner, _ in module.named_parameters()} - {*chosen, *tables, output}:
        return  # a norm or a residual of its own inside (ALBERT's): its input is not only the projections'
    parent = name.rpartition(".")[0]
    outer = f"{parent}.output.dense" if parent else "output.dense"
    if output is None and (features_of(_module(model, outer)) or (0, 0))[0] != width:
        return
    yield outer if output is None else f"{name}.{output}", "rowwise"
    yield name, Region(("position_bias",), counts=tuple(counts))
    yield from ((f"{name}.{child_name}", "colwise") for child_name in chosen)
    yield from ((f"{name}.{table}", FeatureTable(gather=False)) for table in tables)


def _feed_forward(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    for inward, outward in _FEED_FORWARDS:
        ends = [features_of(_module(module, child_name)) for child_name in (*inward, outward)]
        *first, last = ends
        if last is not None and all(shape == (last[1], last[0]) for shape in first) and last[0] != last[1]:
            yield from ((f"{prefix}{child_name}", "colwise") for child_name in inward)
            yield f"{prefix}{outward}", "rowwise"
            only = {inner.rpartition(".")[0] for inner, _ in module.named_parameters()} == {*inward, outward}
            # A second input may be a residual (BLOOM's), which is added to what is whole again.
            if name and only and len(inspect.signature(module.forward).parameters) == 1:
                yield name, "region"  # what is drawn inside (dropout) differs from rank to rank


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return nn.Identity()
