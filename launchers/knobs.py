"""The names that guides to FSDP1, Hugging Face's Trainer and accelerate use, in meshpar's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

ALIASES = ("fsdp", "FSDP", "FullyShardedDataParallel")
"""Names of a pass under which ``sharding_strategy`` alone says which pass it is."""

SHARDING = ("FullyShard", "HybridShard", "Replicate")

_STRATEGIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "FULL_SHARD": ("FullyShard", {}),
    "SHARD_GRAD_OP": ("FullyShard", {"reshard_after_forward": False}),
    "NO_SHARD": ("Replicate", {}),
    "HYBRID_SHARD": ("HybridShard", {}),
    "HYBRID_SHARD_ZERO2": ("HybridShard", {"reshard_after_forward": False}),
}
_NUMBERED = dict(enumerate(_STRATEGIES, 1))  # accelerate's numbers


@final
@dataclass(slots=True)
class Translation:
    """A pass as written in old names, in new ones.

    Attributes:
        name: of the pass.
        options: in meshpar's names.
        before: passes to put before it, as a recipe writes them.
        notes: what became of each old name.
        problems: old names that have no meaning here: option -> why.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    before: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def translate(name: str, options: Mapping[str, Any]) -> Translation:
    """Return a sharding pass with its old knobs translated; other passes and new names come back as they are."""
    result = Translation("FullyShard" if name in ALIASES else name)
    if result.name not in SHARDING:
        result.options = dict(options)
        return result
    written = {key.removeprefix("fsdp_") if isinstance(key, str) else key: value for key, value in options.items()}
    if "sharding_strategy" in written:
        _strategy(result, written.pop("sharding_strategy"))
    for key, value in written.items():
        if key in _NO_EFFECT:
            result.notes.append(f"{key}: has no effect: {_NO_EFFECT[key]}")
        elif key in _KNOBS:
            _apply(result, key, value)
        else:
            result.options[key] = value
    return result


def trainer_options(words: Any, config: Any) -> dict[str, Any]:
    """Return the options of the pass ``fsdp`` that a Trainer's ``fsdp: full_shard auto_wrap`` and ``fsdp_config: {...}`` mean.

    Raises:
        ValueError: a word or the config is none of Trainer's.
    """
    if config is not None and not isinstance(config, Mapping):
        raise ValueError(f"fsdp_config is a mapping, got {config!r}")
    options: dict[str, Any] = dict(config or {})
    for word in words.split() if isinstance(words, str) else [words] if words is True else words or []:
        if word is True or word in ("auto_wrap", ""):
            continue
        if word == "offload":
            options["offload_params"] = True
        elif str(word).upper() in _STRATEGIES:
            options["sharding_strategy"] = str(word).upper()
        else:
            raise ValueError(f"fsdp: {word!r} is not known; there are {', '.join(map(str.lower, _STRATEGIES))}, offload, auto_wrap")
    return options


def _strategy(result: Translation, value: Any) -> None:
    text = _NUMBERED.get(value, "") if isinstance(value, int) else str(value).upper().rpartition(".")[2].lstrip("_")
    if text not in _STRATEGIES:
        result.problems["sharding_strategy"] = f"expected one of {', '.join(_STRATEGIES)}, got {value!r}"
        return
    result.name, options = _STRATEGIES[text]
    result.options |= options
    result.notes.append(f"sharding_strategy: {value} became {_written(result.name, options)}")


def _apply(result: Translation, key: str, value: Any) -> None:
    try:
        options, note = _KNOBS[key](value)
    except ValueError as error:
        result.problems[key] = str(error)
        return
    if result.name == "Replicate" and not set(options) <= _PRECISION:
        result.notes.append(f"{key}: has no effect: nothing is sharded")
        return
    before = options.pop("before", None)
    if before is not None:
        result.before.append(before)
    result.options |= options
    result.notes.append(f"{key}: {value} {note or 'became ' + _listed(options)}")


_PRECISION = {"param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs"}

_NO_EFFECT = {
    "limit_all_gathers": "FSDP2 frees gathered parameters in stream order and needs no limit",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "flatten_parameters": "FSDP2 never flattens: it shards each parameter by itself",
    "device_id": "each rank takes the device of its local rank",
    "sync_module_states": "initial weights are the same on every rank by construction, and the ranks compare them at the start",
    "cpu_ram_efficient_loading": "models are built on the meta device, and each rank reads its own part of the weights",
    "keep_low_precision_grads": "gradients are kept in the parameters' dtype",
    "version": "it is always FSDP2",
}


def _prefetch_backward(value: Any) -> tuple[dict[str, Any], str]:
    name = str(value).upper().rpartition(".")[2].removeprefix("BACKWARD_")
    depths = {"PRE": 1, "POST": 0, "NONE": 0, "NO_PREFETCH": 0}
    if name not in depths:
        raise ValueError(f"expected PRE, POST or nothing, got {value!r}")
    return {"prefetch_backward": depths[name]}, ""


def _prefetch_forward(value: Any) -> tuple[dict[str, Any], str]:
    return {"prefetch_forward": int(_truth(value))}, ""


def _offload(value: Any) -> tuple[dict[str, Any], str]:
    wanted = value.get("offload_params", False) if isinstance(value, Mapping) else value
    return ({"offload": "cpu"}, "") if _truth(wanted) else ({}, "is the default")


def _precision(value: Any) -> tuple[dict[str, Any], str]:
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in (*_PRECISION, "cast_root_forward_inputs", "keep_low_precision_grads")]
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; there are: {', '.join(sorted(_PRECISION))}")
        return {key: each for key, each in value.items() if key in _PRECISION}, ""
    dtypes = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
    if str(value).lower() in ("no", "false", "none", "fp32", "float32"):
        return {}, "is the default"
    if str(value).lower() not in dtypes:
        raise ValueError(f"expected bf16, fp16, no, or the dtypes one by one, got {value!r}")
    dtype = dtypes[str(value).lower()]
    return {"param_dtype": dtype, "reduce_dtype": dtype}, ""


def _wrap_policy(value: Any) -> tuple[dict[str, Any], str]:
    if str(value).upper() not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
        raise ValueError(f"expected TRANSFORMER_BASED_WRAP or SIZE_BASED_WRAP, got {value!r}; units come from the model's layout")
    return {}, "is the default: units are the model's blocks (blocks and min_params change them)"


def _classes(value: Any) -> tuple[dict[str, Any], str]:
    names = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
        raise ValueError(f"expected class names, got {value!r}")
    return {"blocks": names}, ""


def _min_params(value: Any) -> tuple[dict[str, Any], str]:
    return {"min_params": int(value)}, ""


def _state_dict_type(value: Any) -> tuple[dict[str, Any], str]:
    name = str(value).upper().rpartition(".")[2]
    if name == "SHARDED_STATE_DICT":
        return {}, "is the default"
    if name == "FULL_STATE_DICT":
        return {}, "has no effect: checkpoints are sharded, and `meshpar export` writes one whole copy from any of them"
    raise ValueError(f"{value} is refused: a local state dict can be read on the same mesh only; checkpoints are sharded ones")


def _recompute(value: Any) -> tuple[dict[str, Any], str]:
    return ({"before": "ActivationCheckpoint"}, "became the pass ActivationCheckpoint") if _truth(value) else ({}, "is the default")


def _truth(value: Any) -> bool:
    if value in (True, "true", "True"):
        return True
    if value in (False, None, "false", "False"):
        return False
    raise ValueError(f"expected true or false, got {value!r}")


_KNOBS: Mapping[str, Callable[[Any], tuple[dict[str, Any], str]]] = {
    "backward_prefetch": _prefetch_backward,
    "backward_prefetch_policy": _prefetch_backward,
    "forward_prefetch": _prefetch_forward,
    "cpu_offload": _offload,
    "offload_params": _offload,
    "mixed_precision": _precision,
    "mixed_precision_policy": _precision,
    "auto_wrap_policy": _wrap_policy,
    "transformer_layer_cls_to_wrap": _classes,
    "min_num_params": _min_params,
    "state_dict_type": _state_dict_type,
    "activation_checkpointing": _recompute,
    "gradient_checkpointing": _recompute,
}


def _written(name: str, options: Mapping[str, Any]) -> str:
    return f"{name}({_listed(options)})"


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())
