"""The layout of a transformers model, and models for training."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from meshpar.core.errors import LayoutError
from meshpar.core.layout import ExpertsLayout, ModelLayout, StagesLayout
from meshpar.core.patterns import find_modules, tied_names
from meshpar.core.registry import untied
from meshpar.models.huggingface.exchange import attention_layout
from meshpar.models.huggingface.tensor import generic, tensor_layout
from meshpar.models.huggingface.weights import weight_map
from meshpar.process.imports import need, quiet_imports

# Verified to take rows in the order of experts.
_IN_ORDER = ("Llama4TextExperts", "JetMoeParallelExperts")
_LOGITS = re.compile(r"logits(_[A-Z]+)?$")


def layout_for(module: nn.Module) -> ModelLayout | None:
    """Return the layout of a transformers model; None for any other module. See ``docs/architectures.md``."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is None or not isinstance(module, loaded.PreTrainedModel):
        return None
    model: Any = module
    cached = (
        f"{type(model).__name__} has a key/value cache (config.use_cache), which recomputation would fill twice; "
        "set model.config.use_cache = False"
    )
    return ModelLayout(
        blocks=_blocks(model),
        tensor=tensor_layout(model),
        attention=attention_layout(model),
        experts=_experts_layout(model),
        stages=StagesLayout(carries=("**",), example=_example(model)),
        head=head_of_logits(model),
        tied=tuple(tied_names(model)),
        fp32=_fp32(model),
        dropout=_has_dropout(model),
        init=_WeightInitialiser(model),
        rebuilt=tuple(sorted(model._keys_to_ignore_on_save or ())),
        ignored=_ignored(model),
        weights=weight_map(model),
        config=_published_config(model),
        recompute_refusal=cached if getattr(model.config, "use_cache", False) else "",
    )


@quiet_imports()
def from_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> nn.Module:
    """Build transformers' causal language model for a config, on the meta device, in float32, without a cache.

    ``source`` has the contents of a ``config.json``, or is a folder that contains one; nothing is downloaded.

    Raises:
        LayoutError: transformers is missing, the config has no ``model_type``, or its attention is code of the Hub.
    """
    transformers: Any = need("transformers", extra="transformers", raises=LayoutError)
    if isinstance(source, Mapping):
        values = dict(source)
        if "model_type" not in values:
            raise LayoutError(
                f"expected the contents of a config.json with a model_type, got the keys {sorted(values)}"
            )
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    else:
        load = transformers.AutoConfig.from_pretrained
        config = load(os.fspath(source), local_files_only=True, trust_remote_code=False)
    check_attention(config)
    return for_training(transformers.AutoModelForCausalLM, config)


def check_attention(config: Any) -> None:
    """Raise LayoutError if a config names an attention that is not installed: transformers may load it as code."""
    if (name := foreign_attention(config)) is not None:
        raise LayoutError(
            f"the config has attn_implementation {name!r}, expected eager, sdpa, flex_attention or an installed "
            "flash_attention: others are code of the Hugging Face Hub"
        )


def foreign_attention(config: Any) -> str | None:
    """Return the name of an attention in a config, or in one inside it, that is neither torch's nor installed."""
    from transformers import utils

    names = {"None", "eager", "sdpa", "flex_attention"}
    installed = (version for version in (2, 3, 4) if getattr(utils, f"is_flash_attn_{version}_available", bool)())
    names.update(f"flash_attention_{version}" for version in installed)
    name = str(getattr(config, "_attn_implementation", None))
    if name.removeprefix("paged|") not in names:
        return name
    parts = (getattr(config, part, None) for part in getattr(config, "sub_configs", ()))
    return next(filter(None, map(foreign_attention, parts)), None)


def for_training(auto: Any, config: Any) -> nn.Module:
    """Return an Auto class's float32 meta model without a key/value cache, whose published setting an export keeps."""
    published = config.to_diff_dict().get("use_cache")
    config.use_cache = False
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.meshpar_use_cache = published
    return model


def _example(model: Any) -> dict[str, torch.Tensor] | None:
    """Return the inputs of a forward of a model of images; None for one of token ids."""
    size = getattr(model.config, "image_size", None)
    if model.main_input_name != "pixel_values" or size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    return {"pixel_values": torch.zeros(2, getattr(model.config, "num_channels", 3), *sides, dtype=model.dtype)}


def _blocks(model: Any) -> tuple[str, ...]:
    """Return the patterns of the outermost repeated layers."""
    whole, named, alike = set(model._no_split_modules or ()), list[str](), list[str]()
    for name, module in model.named_modules():
        kinds = {type(child) for child in module} if isinstance(module, nn.ModuleList) else set()
        if not kinds or any(issubclass(kind, nn.ModuleList) for kind in kinds):
            continue
        named += [name] if any(kind.__name__ in whole for kind in kinds) else []
        alike += [name] if len(kinds) == 1 and any(True for _ in module.parameters()) else []
    chosen = named or alike
    outermost = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
    patterns = dict.fromkeys(f"{generic(name)}.*" for name in outermost if _is_called(model, name))
    return tuple(untied(model, (name for pattern in patterns for name, _ in find_modules(model, pattern))))


def _is_called(model: nn.Module, name: str) -> bool:
    """Return whether the model calls the layers of a list as modules, so that FSDP2's hooks run, and no methods."""
    layers, owner = model.get_submodule(name), type(model.get_submodule(name.rpartition(".")[0]))
    source = inspect.getsource(owner) if owner.__module__.startswith("transformers.") else ""
    reversible = any(hasattr(layer, "backward_pass") for layer in layers.children())
    return not re.search(r"\blayer\w*\.forward\(", source) and not reversible


def _ignored(model: Any) -> tuple[str, ...]:
    """Return the patterns of tensors in files that transformers ignores, also those that it adds for buffers."""
    buffers = [name for name, _ in model.named_buffers()]
    added = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    patterns = {pattern for end, pattern in added.items() if any(name.endswith(end) for name in buffers)}
    patterns.add(r"\.attn(ention)?\.masked_bias$")  # a number that transformers stored once, with causal masks
    return tuple(sorted(patterns.union(model._keys_to_ignore_on_load_unexpected or ())))


def _fp32(model: Any) -> tuple[str, ...]:
    pieces = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    if not pieces:
        return ()
    wanted = re.compile(rf"(^|\.)({'|'.join(pieces)})(\.|$)")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if wanted.search(name)]
    return tuple(dict.fromkeys(generic(name.rpartition(".")[0]) for name in names))


def _has_dropout(model: Any) -> bool:
    """Return whether a language model of this config, without a classifier, draws random numbers in training."""
    values = model.config.get_text_config().to_dict().items()
    names = re.compile("(?!summary|classifier|pooler).*(dropout|pdrop|layerdrop)")
    return any(names.match(name) and isinstance(value, int | float) and value > 0 for name, value in values)


_UNPUBLISHED = ("_name_or_path", "transformers_version", "use_cache")


def _published_config(model: Any) -> dict[str, Any]:
    values = json.loads(model.config.to_json_string(use_diff=False))
    # A plain class name even when FSDP has swapped the module's class for one of its own.
    kinds = type(model).__mro__
    base = next(kind for kind in kinds if kind.__module__.startswith("transformers.") or "FSDP" not in kind.__name__)
    cache = getattr(model, "meshpar_use_cache", values.get("use_cache"))
    values |= {"architectures": [base.__name__], "_name_or_path": None, "transformers_version": None}
    values["use_cache"] = cache
    return {key: value for key, value in values.items() if value is not None or key not in _UNPUBLISHED}


@final
class _WeightInitialiser:
    """Initialise a module's own tensors by ``_init_weights``; a class, because a forecast sends it to its process."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parents = {child: parent for parent in model.modules() for child in parent.children()}
        self._owners: dict[nn.Module, Any] = {}
        # The innermost pretrained model around a module knows it; modules come from the outside to the inside.
        for owner in model.modules():
            if hasattr(owner, "_init_weights"):
                self._owners |= dict.fromkeys(owner.modules(), owner)

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        tensors = {**module._parameters, **module._buffers}
        versions = {name: (tensor, tensor._version) for name, tensor in tensors.items() if tensor is not None}
        drawing, around = module, self._parents.get(module)
        while True:
            with _writing_only(tuple(tensor for tensor, _ in versions.values()), drawing):
                self._owners.get(drawing, self._model)._init_weights(drawing)
            # Some parents draw a child's weight again, smaller (GPT-2's residual projections), and some models fill
            # what no parent does.
            if around is None or (drawing is not module and not _unwritten(module, versions)):
                break
            drawing, around = around, self._parents.get(around)
        _as_constructed(module, _unwritten(module, versions))


def _unwritten(module: nn.Module, versions: Mapping[str, tuple[torch.Tensor, int]]) -> list[str]:
    """Return the names of those of the module's own tensors that are still the same tensors, never written."""
    now = {**module._parameters, **module._buffers}
    return [name for name, (value, count) in versions.items() if now.get(name) is value and value._version == count]


def _as_constructed(module: nn.Module, names: list[str]) -> None:
    """Fill the module's own tensors that no ``_init_weights`` fills as its constructor does, where that is known."""
    arguments = inspect.signature(type(module)).parameters.values() if names else ()
    needed = [argument for argument in arguments if argument.kind < 2 and argument.default is argument.empty]
    fresh: Any = type(module)() if names and not needed else None
    for name in names:
        tensor = getattr(module, name)
        if name == "bias":
            tensor.zero_()
        elif type(module).__name__ == "Conv1D":
            nn.init.normal_(tensor, std=0.02)
        elif fresh is not None and getattr(getattr(fresh, name, None), "shape", None) == tensor.shape:
            tensor.copy_(getattr(fresh, name))


@contextmanager
def _writing_only(tensors: Any, module: nn.Module) -> Iterator[None]:
    """Let initialisers inside ``module`` write ``tensors`` alone: they pass over what is flagged as initialised."""
    wanted = {id(tensor) for tensor in tensors}
    every = [*module.parameters(), *module.buffers()]
    for tensor in every:
        tensor._is_hf_initialized = id(tensor) not in wanted  # type: ignore[attr-defined, union-attr]
    try:
        yield
    finally:
        for tensor in every:
            del tensor._is_hf_initialized  # type: ignore[attr-defined, union-attr]


def head_of_logits(model: Any) -> str:
    """Return the layer that transformers' own forward calls for its ``logits``, once; else "": a scale may follow."""
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
    setting = [node for node in ast.walk(tree) if _sets_logits(node)]
    node = setting[0] if len(setting) == 1 else None
    call = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) == f"self.{head}"


def _sets_logits(node: ast.AST) -> bool:
    """Tell an assignment to ``logits``, also under its name with dims (``logits_BLV``), or to a part of it."""
    targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = (inner.id for target in targets if target for inner in ast.walk(target) if isinstance(inner, ast.Name))
    return any(map(_LOGITS.match, names))


def _experts_layout(model: Any) -> ExpertsLayout:
    """Return what :class:`meshpar.ExpertParallel` needs to know of a transformers model."""
    stacked = {name: module for name, module in model.named_modules() if _has_stacked_experts(module)}
    in_order = (name for name, module in stacked.items() if type(module).__name__ in _IN_ORDER)
    names = ("e_score_correction_bias", "expert_bias")  # buffers that choose experts and do not weigh them
    biases = (name for name, _ in model.named_buffers() if name.rpartition(".")[2] in names)
    balance_refusal = (
        f"{type(model).__name__} adds a balance loss of each rank's own tokens to its loss "
        "(config.output_router_logits), which is not that of all; set model.config.output_router_logits = False "
        "and training.balance_loss"
    )
    adds_loss = getattr(model.config.get_text_config(), "output_router_logits", False)
    return ExpertsLayout(
        _patterns(stacked),
        in_order=_patterns(in_order),
        routers=_routers(model),
        router_bias=_patterns(biases),
        refusal=_experts_refusal(model, stacked),
        balance_refusal=balance_refusal if adds_loss else "",
    )


def _patterns(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(generic, names)))


def _experts_refusal(model: nn.Module, stacked: Iterable[str]) -> str:
    """Return why a model's experts cannot be divided; empty where some can."""
    if adapted := next((name for name in stacked if name.endswith(".base_layer")), None):
        return (
            f"{adapted} is below peft's own adapters, which add to whole weights; add adapters that ranks can divide "
            "by meshpar.training.add_adapters(model, LoRA(parameters=...)), or use a mesh without ep"
        )
    if any(True for _ in stacked):
        return ""
    name = type(model).__name__
    for holder in model.modules():
        parameters = list(holder.named_parameters(recurse=False)) if "Expert" in type(holder).__name__ else []
        if shapes := ", ".join(f"{leaf} {tuple(parameter.shape)}" for leaf, parameter in parameters):
            return (
                f"{name} holds its experts as {shapes} in {type(holder).__name__}, and ExpertParallel divides "
                "parameters whose first dim counts experts, of the module that is called with (hidden states, chosen "
                "experts, weights); use a mesh without ep"
            )
    lists = (at for at, child in model.named_modules() if isinstance(child, nn.ModuleList | nn.ModuleDict))
    if listed := next((at for at in lists if at.endswith("experts")), None):
        return (
            f"{listed} is a list of modules, and each of their parameters is one expert's, of which a rank would hold "
            "all or nothing; stack them in one module that is called with (hidden states, chosen experts, weights), "
            "or use a mesh without ep"
        )
    return f"{name} has no experts to divide; drop ExpertParallel and ep from the mesh"


def _routers(model: Any) -> tuple[str, ...]:
    """Return the patterns of the modules whose first output transformers records as the routers' logits."""
    recorded = (getattr(holder, "_can_record_outputs", None) for holder in (model, model.base_model))
    recorder: Any = (next(filter(None, recorded), None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    if kind is None or recorder.index != 0:
        return ()
    return _patterns(name for name, module in model.named_modules() if isinstance(module, kind))


def _has_stacked_experts(module: nn.Module) -> bool:
    counts = {len(parameter) if parameter.ndim > 1 else 0 for parameter in module.parameters(recurse=False)}
    takes_experts = type(module).__name__ in _IN_ORDER or len(inspect.signature(module.forward).parameters) == 3
    return takes_experts and counts == {vars(module).get("num_experts")}
