"""The tensor-parallel table of a transformers model: its ``tp_plan`` in meshpar's styles, and the vocabulary's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn

from meshpar.core.layout import TensorLayout
from meshpar.core.patterns import find_modules
from meshpar.models.huggingface.styles import FullPositions, Head, LatentKeys, Refused, structural_table
from meshpar.passes.data.whole_parameters import features_of
from meshpar.passes.tensor.parts import Experts, FeatureTable, Parts, Shared

_OURS: dict[str, Any] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), "rowwise_split"),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), "colwise_gather"),
    "embedding_rowwise": "vocab",
    "embedding_colwise": FeatureTable(),
    "replicated_with_grad_allreduce": "grad_sum",
    "moe_identity_expert": Shared(),
}
_LEAVE_WHOLE = "leave it whole: TensorParallel(styles={pattern: None})"
_DISPATCH = "ep_dispatch_experts"
_OWN_PARAMETERS = ("moe_tp_experts", "all_reduce", "local_params")
# The activation between projections, applied to this rank's features.
_ACTIVATION = re.compile("act|act_fn|activation|activation_fn|hidden_act")
_HEAD_NORM = re.compile("(q|k|v|query|key|value)_?(layer)?norm")

# Verified to compute everything from position_ids, where transformers may read the length of split embeddings.
_SEQUENCE_PARALLEL = ("llama", "mistral", "qwen2", "qwen3")


def generic(name: str) -> str:
    """Return a name with ``*`` for its numbers: ``layers.3.mlp`` -> ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def vocabulary_styles(model: Any, table: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the styles of embeddings and head, and the names that stay whole; tied ones are split together."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    ends: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (module is inputs or table.get(generic(name)) == "vocab"):
            ends[name] = "vocab"
        elif isinstance(module, nn.Linear) and module is outputs:
            ends[name] = Head(model)
    weights = {id(model.get_submodule(name).weight) for name in ends}
    sharing = {name: child for name, child in model.named_modules() if id(getattr(child, "weight", None)) in weights}
    whole = {id(child.weight) for name, child in sharing.items() if not _splittable(model, name, child)}
    for name, child in sharing.items():
        ends.setdefault(name, "vocab" if isinstance(child, nn.Embedding) else "colwise_gather")
    unsplit = {generic(name) for name, child in sharing.items() if id(child.weight) in whole}
    split = {name: style for name, style in ends.items() if generic(name) not in unsplit}
    biases = [_tied_biases(model, name) for name, style in split.items() if isinstance(style, Head)]
    return {generic(name): style for pattern in (split, *biases) for name, style in pattern.items()}, unsplit


def _tied_biases(model: nn.Module, head: str) -> dict[str, Any]:
    """Return the styles of modules that have the head's bias as their own parameter, too (BERT's predictions)."""
    bias, named = getattr(model.get_submodule(head), "bias", None), model.named_parameters(remove_duplicate=False)
    owners = (name.rpartition(".") for name, parameter in named if parameter is bias)
    return {owner: Parts(dims={leaf: (0, 1)}) for owner, _, leaf in owners if owner != head}


def _splittable(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Return whether a weight is used only in its own module, by a forward that a split style can replace."""
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
    kinds = {kind for module in around for kind in type(module).__mro__}
    theirs = (vars(kind).items() for kind in kinds if kind.__module__.startswith("transformers.models"))
    methods = (value for items in theirs for key, value in items if not _ABOUT_WEIGHTS.match(key))
    return any(isinstance(value, FunctionType) and reads.search(inspect.getsource(value)) for value in methods)


_ABOUT_WEIGHTS = re.compile("__init__|tie_|_tie|_?init_|get_|set_|resize|_resize|post_init|save|load")


def tensor_layout(model: Any) -> TensorLayout:
    """Return what :class:`meshpar.TensorParallel` needs to know of a transformers model."""
    table = _table(model)
    heads = _head_counts(model, table)
    refusal = (
        f"transformers gives {type(model).__name__} no tp_plan, so nothing says how to split it; drop "
        "TensorParallel, or pass a ModelLayout with a tensor table to apply"
    )
    copied = _copied_heads(model, heads)
    refusal = "" if table else refusal
    return TensorLayout(table, heads=heads, copied_heads=copied, head_ratio=HEAD_RATIO, refusal=refusal)


def _table(model: Any) -> dict[str, Any]:
    """Return module pattern -> style; empty if the model has no ``tp_plan`` and its structure is not verified."""
    if model.config.model_type == "gpt2":
        return _gpt2_table(model)
    # A plan is for all variants of an architecture, and may name what this model lacks.
    names = {generic(name) for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}
    plan = {pattern: style for pattern, style in (model.tp_plan or {}).items() if pattern in names}
    table = {} if plan else {generic(name): style for name, style in structural_table(model).items()}
    if not plan and not table:
        return {}
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # The module with most own parameters stands for all of its pattern: some layers lack an optional one.
        fullest = modules.get(generic(name))
        if fullest is None or _own_count(module) > _own_count(fullest):
            modules[generic(name)] = module
    for pattern, style in plan.items():
        if pattern in modules and style == "mla_kv_a_proj":
            table[pattern] = LatentKeys(_rotary_widths(model, pattern))
        elif pattern in modules and style not in (*_OWN_PARAMETERS, "replicate"):
            table[pattern] = _OURS.get(style) or _unknown(style)
    # Modules that compute with parameters of their own which the plan splits.
    owners = [pattern for pattern, style in plan.items() if style in _OWN_PARAMETERS and pattern in modules]
    owners += [pattern.rpartition(".")[0] for pattern in plan if pattern not in modules]
    table |= {owner: _with_own(modules[owner], owner, plan) for owner in dict.fromkeys(owners)}
    # Experts that transformers spreads whole over ranks, by its expert-parallel plan.
    spread = (pattern for pattern, style in (getattr(model, "ep_plan", None) or {}).items() if style == _DISPATCH)
    for pattern in spread:
        if pattern in modules and pattern not in table and _takes_whole_experts(modules[pattern]):
            table[pattern] = Experts()
    ends, whole = vocabulary_styles(model, table)
    table = {pattern: style for pattern, style in table.items() if style != "vocab" and pattern not in whole} | ends
    table |= dict.fromkeys(_on_slices(modules, table), "grad_sum")
    table |= dict.fromkeys(_regions(model, table), "region")
    table = dict(_without_sparse(model, table))
    return table | _between_regions(model, table)


def _head_counts(model: Any, table: Mapping[str, Any]) -> dict[str, int]:
    """Return pattern of a projection -> number of heads in its output features."""
    counts: dict[str, dict[str, int]] = {}
    for name, module in model.named_modules():
        for child, _ in module.named_children():
            pattern = generic(f"{name}.{child}")
            split = table.get(pattern) in ("colwise", "packed_colwise:3")
            if split and (heads := _heads_of(model.config, module, child)):
                counts.setdefault(pattern, {})[f"{name}.{child}"] = heads
    alike, differing = dict[str, int](), dict[str, int]()
    for pattern, of_names in counts.items():
        if len(set(of_names.values())) == 1:
            alike[pattern] = next(iter(of_names.values()))
        else:
            differing |= of_names
    return alike | differing


HEAD_RATIO = "num_key_value_groups"  # the attribute in which an attention keeps its number of query heads per key head


def _copied_heads(model: nn.Module, heads: Mapping[str, int]) -> tuple[str, ...]:
    """Return the projections to key and value heads which ranks may share: their attention knows its ratio of heads."""
    copied = []
    for pattern in heads:
        owners = (model.get_submodule(name.rpartition(".")[0]) for name, _ in find_modules(model, pattern))
        if pattern.rpartition(".")[2] in ("k_proj", "v_proj") and all(HEAD_RATIO in vars(owner) for owner in owners):
            copied.append(pattern)
    return tuple(copied)


def _heads_of(config: object, attention: nn.Module, child: str) -> int | None:
    """Return the number of heads in a projection, from the attention's attributes, or else from the config."""
    keys, ratio = _key_heads(attention), vars(attention).get(HEAD_RATIO)
    if child in ("k_proj", "v_proj"):
        return keys or _first(config, attention, ("num_key_value_heads", "num_kv_heads", "num_attention_heads"))
    if child not in ("q_proj", "q_b_proj", "kv_b_proj", "c_attn"):
        return None
    if keys and isinstance(ratio, int):
        return keys * ratio
    return _first(config, attention, ("num_heads", "num_attention_heads", "n_heads"))


def _key_heads(attention: nn.Module) -> int | None:
    """Return the heads that the key projection's features make up: layers of one model may differ in it."""
    width, keys = vars(attention).get("head_dim"), features_of(getattr(attention, "k_proj", attention))
    return keys[1] // width if isinstance(width, int) and width and keys and keys[1] % width == 0 else None


def _first(config: Any, attention: nn.Module, names: tuple[str, ...]) -> int | None:
    # A config whose layers differ refuses to be read as a whole; each layer's attention then holds its own.
    for source in (attention, getattr(attention, "config", None), config.get_text_config()):
        for name in names:
            value = _read(source, name)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _read(source: object, name: str) -> Any:
    try:
        return getattr(source, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None


def _gpt2_table(model: Any) -> dict[str, Any]:
    prefix = "" if model.base_model is model else model.base_model_prefix + "."
    if model.config.add_cross_attention:
        return {}
    table: dict[str, Any] = {
        f"{prefix}h.*.attn": "region:split_size",
        f"{prefix}h.*.attn.c_attn": "packed_colwise:3",
        f"{prefix}h.*.attn.c_proj": "rowwise",
        f"{prefix}h.*.mlp": "region",
        f"{prefix}h.*.mlp.c_fc": "colwise",
        f"{prefix}h.*.mlp.c_proj": "rowwise",
    }
    return table | vocabulary_styles(model, table)[0]


def _without_sparse(model: nn.Module, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the table without modules that compute across features between two projections (Gemma 3n's top-k)."""
    sparse = {name for name, module in model.named_modules() if (vars(module).get("activation_sparsity") or 0.0) > 0.0}
    for pattern, style in table.items():
        names = [name for name, _ in find_modules(model, pattern)]
        dense = [name for name in names if name not in sparse and name.rpartition(".")[0] not in sparse]
        yield from [(pattern, style)] if len(dense) == len(names) else [(name, style) for name in dense]


def _own_count(module: nn.Module) -> int:
    return sum(parameter is not None for parameter in module._parameters.values())


def _unknown(style: str) -> Refused:
    return Refused(f"its tp_plan has the style {style!r}, which meshpar does not support; {_LEAVE_WHOLE}")


def _with_own(module: nn.Module, owner: str, plan: Mapping[str, str]) -> Any:
    """Return the style of a module that computes with parameters of its own."""
    style, dims, added = plan.get(owner), {}, []
    planned = {
        name: (parameter, plan.get(f"{owner}.{name}")) for name, parameter in module.named_parameters(recurse=False)
    }
    # Inkling's plan calls gate and up, which stand one after the other, a single projection.
    halves = vars(module).get("is_concatenated", False) and {
        2 * parameter.shape[-1] for parameter, how in planned.values() if how == "rowwise" and parameter.ndim == 3
    }
    for name, (parameter, how) in planned.items():
        bias = name.endswith("bias") and parameter.ndim < 3
        if how == "rowwise" and bias:
            added.append(name)
        elif how in ("colwise", "packed_colwise"):
            dim = -1 if bias or parameter.ndim == 1 else parameter.ndim - 2
            dims[name] = (dim, 2 if how == "packed_colwise" or halves == {parameter.shape[dim]} else 1)
        elif how in ("rowwise", "packed_rowwise"):
            dims[name] = (-1, 2 if how == "packed_rowwise" else 1)
        elif how not in (None, "replicate"):
            return _unknown(str(how))
    sums = style in ("moe_tp_experts", "all_reduce")
    inner = [grandchild for child, grandchild in module.named_children() if f"{owner}.{child}" in plan]
    if sums and any(True for grandchild in inner for _ in grandchild.parameters()):
        return Refused("it sums over parts of its children and of its own parameters; " + _LEAVE_WHOLE)
    parts = Parts(dims=dims, added=tuple(added), sums=sums)
    return Experts(otherwise=parts) if style == "moe_tp_experts" and _takes_whole_experts(module) else parts


def _takes_whole_experts(module: nn.Module) -> bool:
    """Return whether experts know chosen numbers beyond theirs, as transformers' own expert parallelism needs."""
    alike = len({len(parameter) for parameter in module.parameters(recurse=False)}) == 1
    return alike and {"num_experts", "_is_expert_parallel"} <= vars(module).keys()


def _rotary_widths(model: Any, pattern: str) -> dict[str, int]:
    widths, common = {}, _read(model.config.get_text_config(), "qk_rope_head_dim")
    for name, _ in find_modules(model, pattern):
        width = _read(model.get_submodule(name.rpartition(".")[0]), "qk_rope_head_dim")
        widths[name] = width if isinstance(width, int) else common
    return widths


def _on_slices(modules: Mapping[str, nn.Module], table: Mapping[str, Any]) -> Iterator[str]:
    """Yield modules that a plan forgets and that see this rank's slice: activations with parameters, norms of heads."""
    split = {pattern.rpartition(".")[0] for pattern, style in table.items() if style == "colwise"}
    for pattern, module in modules.items():
        parent, _, leaf = pattern.rpartition(".")
        if pattern in table or parent not in split or not any(True for _ in module.parameters()):
            continue
        width = vars(modules[parent]).get("head_dim")
        of_heads = _HEAD_NORM.fullmatch(leaf) and all(parameter.shape == (width,) for parameter in module.parameters())
        if _ACTIVATION.fullmatch(leaf) or of_heads:
            yield pattern


def _regions(model: nn.Module, table: Mapping[str, Any]) -> list[str]:
    """Return the modules whose parameters are all split, by feature or head, from projections that share an input."""
    fitting: dict[str, list[str]] = {}
    every: dict[str, int] = {}
    for name, module in model.named_modules():
        pattern = generic(name)
        every[pattern] = every.get(pattern, 0) + 1
        holders = (inner for inner, child in module.named_modules() if any(True for _ in child.parameters(False)))
        inner_styles = [table.get(generic(f"{name}.{inner}")) for inner in holders]
        styles = [table.get(generic(f"{name}.{child}")) for child, _ in module.named_children()]
        fits = all(style in ("colwise", "rowwise", "grad_sum") for style in inner_styles) and "rowwise" in styles
        if fits and styles.count("colwise") > 1 and pattern not in table:
            fitting.setdefault(pattern, []).append(name)
    # Where some layers have something else under the same name (experts), the others are named one by one.
    named = ([pattern] if len(names) == every[pattern] else names for pattern, names in fitting.items())
    return [name for names in named for name in names]


def _between_regions(model: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what sequence parallelism adds: styles of the norms outside of regions, and the base model's positions."""
    # A sliding window needs a mask, which transformers makes as long as the embeddings.
    if model.config.model_type not in _SEQUENCE_PARALLEL or getattr(model.config, "sliding_window", None):
        return {}
    modules = {generic(name): module for name, module in model.named_modules() if _own_count(module)}
    rest = {pattern: module for pattern, module in modules.items() if pattern not in table}
    if not all(re.search("(RMS|Layer)Norm$", type(module).__name__) for module in rest.values()):
        return {}
    return dict.fromkeys(rest, "sequence") | {model.base_model_prefix: FullPositions()}
