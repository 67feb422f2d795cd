"""The tensor-parallel table of a transformers model, from the model's own ``tp_plan``.

What meshpar's styles cover runs in them; the rest keeps transformers' own style objects, on the same axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from meshpar.loss import token_loss
from meshpar.passes.context import Context
from meshpar.passes.styles import Colwise, Region

_OURS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "grad_sum",
}

# Verified to compute everything from position_ids once they are given, which sequence parallelism needs: transformers otherwise
# reads the sequence's length from the embeddings, and these are then split along it.
_SEQUENCE_PARALLEL = ("llama", "mistral", "qwen2", "qwen3")


def tensor_table(model: Any) -> dict[str, Any]:
    """Return module pattern -> style; empty where transformers gives the model no ``tp_plan``."""
    if model.config.model_type == "gpt2":
        return _gpt2_table(model)
    plan = _matching_plan(model)
    if not plan:
        return {}
    table: dict[str, Any] = {pattern: _OURS[style] for pattern, style in plan.items() if style in _OURS and _is_module(model, pattern)}
    table |= _transformers_styles(model, {pattern: style for pattern, style in plan.items() if pattern not in table})
    table |= _ends(model)
    table |= dict.fromkeys(_regions(model, table), "region")
    return table | _between_regions(model, table)


def head_counts(model: Any, table: Mapping[str, Any]) -> dict[str, int]:
    """Return pattern of a projection -> how many heads its output features hold."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(groups, int):
        return {}
    holds = {"q_proj": heads, "q_b_proj": heads, "kv_b_proj": heads, "k_proj": groups, "v_proj": groups, "c_attn": heads}
    split = [pattern for pattern, style in table.items() if style in ("colwise", "packed_colwise:3")]
    return {pattern: holds[last] for pattern in split if (last := pattern.rpartition(".")[2]) in holds}


def generic(name: str) -> str:
    """Return a name with ``*`` for its numbers: ``layers.3.mlp`` -> ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersStyle:
    """A style of transformers' own registry behind meshpar's protocol.

    Attributes:
        module_style: the registry's name for the module's forward; None: only parameters of it are split.
        parameter_styles: parameter name -> the registry's name for how it is split.
        config: the text model's config, which one of the styles reads.
    """

    module_style: str | None
    parameter_styles: Mapping[str, str]
    config: Any

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        """Yield the styles that this version of transformers lacks, and those whose shards are not contiguous."""
        for style in {self.module_style, *self.parameter_styles.values()} - {None, *_registry().keys()}:
            yield f"{name}: its tp_plan names the style {style!r}, which the installed transformers does not have; install another version"
        for parameter, style in self.parameter_styles.items():
            if style in ("packed_colwise", "packed_rowwise"):
                yield (
                    f"{name}.{parameter} is split by transformers' {style}, in two halves interleaved over the ranks; meshpar reads "
                    f"and writes contiguous shards: leave it whole over tp: TensorParallel(styles={{{generic(name)!r}: None}})"
                )

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Split the parameters as transformers does, keeping tied ones tied."""
        for parameter, style in self.parameter_styles.items():
            before = module._parameters.get(parameter)
            if before is None:
                continue
            if id(before) in context.sharded:
                module._parameters[parameter] = context.sharded[id(before)]
                continue
            _registry()[style].validate_param(module, parameter, context.mesh, parameter_name=f"{name}.{parameter}")
            _registry()[style].shard_param(module, parameter, context.mesh)
            after = module._parameters[parameter]
            if isinstance(after, nn.Parameter) and after is not before:
                context.sharded[id(before)] = context.sharded[id(after)] = after

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        """Install transformers' forward around the module's."""
        if self.module_style is None:
            return
        if self.module_style == "mla_kv_a_proj":
            # transformers' own driver does the same: this style reads how many of the features carry rotary positions.
            module.config = self.config
        _registry()[self.module_style].install_forward(module, context.mesh)


@final
@dataclass(frozen=True, slots=True)
class FullPositions:
    """On the base model, under sequence parallelism: give it the whole sequence's positions.

    Without ``position_ids`` it would count them from its embeddings, of which this rank holds a part.
    """

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        """Nothing can be wrong."""
        return iter(())

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Nothing is split."""

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        """Fill in ``position_ids``."""

        def fill(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            tokens = args[0] if args else kwargs.get("input_ids")
            if kwargs.get("attention_mask") is not None:
                raise ValueError(
                    f"{name} got an attention_mask, which transformers lays over its embeddings' length, and under sequence parallelism "
                    "these are split; pack the batch instead of padding it, or use TensorParallel(sequence_parallel=False)"
                )
            if tokens is None or kwargs.get("position_ids") is not None:
                return None
            return args, kwargs | {"position_ids": torch.arange(tokens.shape[1], device=tokens.device)[None]}

        if context.sequence_parallel:
            module.register_forward_pre_hook(fill, with_kwargs=True)


@final
@dataclass(frozen=True, slots=True)
class GPT2Attention:
    """A region around transformers' GPT-2 attention, which cuts its fused projection by a width that it keeps itself."""

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        """Nothing beyond what its projections check."""
        return iter(())

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Make the width this rank's, and make the region known before anything inside is installed."""
        module.split_size = module.embed_dim // context.mesh.size()  # type: ignore[operator, assignment]
        context.regions[name] = Region()

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        """Install the region."""
        context.regions[name].install(name, module, context)


@final
@dataclass(frozen=True, slots=True)
class Head:
    """The output projection; where its logits stay split over the vocabulary, the model's own loss learns to take them.

    Attributes:
        model: the whole model, whose ``loss_function`` is replaced under loss parallelism.
        gather: what the ``head`` style says of its output.
    """

    model: Any = field(default=None, repr=False, compare=False)
    gather: str = "loss"

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        """Yield what the head style finds."""
        return Colwise(gather=self.gather).problems(name, module, size)

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Split the output features."""
        Colwise(gather=self.gather).shard(name, module, context)

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        """Install the head style, and the loss."""
        Colwise(gather=self.gather).install(name, module, context)
        if context.loss_parallel:
            self.model.loss_function = _split_loss(self.model.loss_function)


def _split_loss(whole_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return transformers' causal loss for logits split over the vocabulary; ``whole_loss`` takes the others."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int | None = None, **options: Any) -> torch.Tensor:
        if not isinstance(logits, DTensor):
            return whole_loss(logits=logits, labels=labels, vocab_size=vocab_size, **options)
        ignored, count = options.get("ignore_index", -100), options.get("num_items_in_batch")
        shifted = options.get("shift_labels")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        if count is None:
            return token_loss(logits, shifted, ignore_index=ignored)
        return token_loss(logits, shifted, ignore_index=ignored, reduction="sum") / count

    return loss


def _gpt2_table(model: Any) -> dict[str, Any]:
    prefix = "" if model.base_model is model else model.base_model_prefix + "."
    if model.config.add_cross_attention:
        return {}
    table: dict[str, Any] = {
        f"{prefix}h.*.attn": GPT2Attention(),
        f"{prefix}h.*.attn.c_attn": "packed_colwise:3",
        f"{prefix}h.*.attn.c_proj": "rowwise",
        f"{prefix}h.*.mlp": "region",
        f"{prefix}h.*.mlp.c_fc": "colwise",
        f"{prefix}h.*.mlp.c_proj": "rowwise",
    }
    return table | _ends(model)


def _matching_plan(model: Any) -> dict[str, str]:
    """Return the plan's entries that name something of this model; a plan is written for every variant of an architecture."""
    names = {generic(name) for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}
    return {pattern: style for pattern, style in (model.tp_plan or {}).items() if pattern in names}


def _is_module(model: nn.Module, pattern: str) -> bool:
    return any(generic(name) == pattern for name, _ in model.named_modules())


def _transformers_styles(model: Any, plan: Mapping[str, str]) -> dict[str, TransformersStyle]:
    """Join the entries for a module and for its parameters to one style for each module."""
    styles: dict[str, TransformersStyle] = {}
    for name, module in model.named_modules():
        pattern = generic(name)
        own = [parameter for parameter, _ in module.named_parameters(recurse=False)]
        chosen = {parameter: plan.get(f"{pattern}.{parameter}", plan.get(pattern)) for parameter in own}
        parameters = {parameter: style for parameter, style in chosen.items() if style is not None}
        if pattern in plan or parameters:
            styles[pattern] = TransformersStyle(
                module_style=plan.get(pattern), parameter_styles=parameters, config=model.config.get_text_config()
            )
    return styles


def _ends(model: Any) -> dict[str, Any]:
    """Return the styles of the token embedding and of the head, the largest parameters; a plan may leave them out."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    modules = list(model.named_modules())
    ends: dict[str, Any] = {name: "vocab" for name, module in modules if module is inputs and isinstance(module, nn.Embedding)}
    return ends | {name: Head(model) for name, module in modules if module is outputs and isinstance(module, nn.Linear)}


def _regions(model: nn.Module, table: Mapping[str, Any]) -> list[str]:
    """Return the modules all of whose parameters are split by feature or by head, from two projections or more that share an input."""
    candidates: dict[str, bool] = {}
    for name, module in model.named_modules():
        own = [
            table.get(generic(f"{name}.{inner}")) for inner, child in module.named_modules() if any(True for _ in child.parameters(False))
        ]
        styles = [table.get(generic(f"{name}.{child}")) for child, _ in module.named_children()]
        fits = all(style in ("colwise", "rowwise", "grad_sum") for style in own) and "rowwise" in styles
        if styles.count("colwise") > 1:
            candidates[generic(name)] = fits and candidates.get(generic(name), True)
    return [pattern for pattern, fits in candidates.items() if fits]


def _between_regions(model: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the styles that sequence parallelism adds: the norms outside of the regions, and the base model's positions."""
    # A sliding window needs a mask, which transformers makes as long as the embeddings.
    if model.config.model_type not in _SEQUENCE_PARALLEL or getattr(model.config, "sliding_window", None):
        return {}
    rest = {generic(name): module for name, module in model.named_modules() if any(True for _ in module.parameters(False))}
    rest = {pattern: module for pattern, module in rest.items() if pattern not in table}
    if not all(re.search("(RMS|Layer)Norm$", type(module).__name__) for module in rest.values()):
        return {}
    return dict.fromkeys(rest, "sequence") | {model.base_model_prefix: FullPositions()}


def _registry() -> Any:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    return ALL_PARALLEL_STYLES
