"""Put the keys of Trainer and accelerate that a recipe holds, and the options of FSDP1's sharding pass, in meshpar's
terms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from meshpar.homes import expanded
from meshpar.launchers.converters.tables import ACCELERATE, DEFAULTS, TRAINER, choose_mesh
from meshpar.launchers.converters.values import Translated, truth
from meshpar.launchers.recipes.named import SHARDING, Translation, default_passes
from meshpar.launchers.recipes.yamlfile import Document, Place

ALIASES = ("fsdp", "FSDP", "FullyShardedDataParallel")
"""Names of a pass under which ``sharding_strategy`` alone says which pass it is."""

_STRATEGIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "FULL_SHARD": ("FullyShard", {}),
    "SHARD_GRAD_OP": ("FullyShard", {"reshard_after_forward": False}),
    "NO_SHARD": ("Replicate", {}),
    "HYBRID_SHARD": ("HybridShard", {}),
    "HYBRID_SHARD_ZERO2": ("HybridShard", {"reshard_after_forward": False}),
}
_NUMBERED = dict(enumerate(_STRATEGIES, 1))  # accelerate's numbers


def translate(name: str, options: Mapping[str, Any]) -> Translation:
    """Return a sharding pass with its old knobs translated; other passes and new names come back as they are."""
    result = Translation("FullyShard" if name in ALIASES else name)
    if result.name not in SHARDING:
        result.options = dict(options)
        return result
    written = _short_names(options)
    if "sharding_strategy" in written:
        _strategy(result, written.pop("sharding_strategy"))
    for key, value in written.items():
        if key in _REFUSED and value not in (None, False, "", {}, []):
            result.problems[key] = f"{value!r} is refused: {_REFUSED[key]}"
        elif key in _NO_EFFECT or key in _REFUSED:
            result.notes.append(f"{key}: has no effect: {_NO_EFFECT.get(key, 'this value is the default')}")
        elif key in _KNOBS:
            _apply(result, key, value)
        elif key == "reshard_after_forward" and name in ALIASES:
            _apply(result, key, {"true": True, "false": False}.get(str(value).lower(), value))
        else:
            result.options[key] = value
    return result


def strategy_of(options: Mapping[str, Any]) -> str:
    """Return the sharding strategy that options in old names say, empty where they say none."""
    value = _short_names(options).get("sharding_strategy")
    return _strategy_name(value) if value is not None else ""


def _short_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without the prefix ``fsdp_``, and with FSDP1's second name for a strategy in accelerate as
    ``sharding_strategy``.
    """
    written = {key.removeprefix("fsdp_") if isinstance(key, str) else key: value for key, value in options.items()}
    if "sharding_strategy" not in written and str(written.get("reshard_after_forward")).upper() in _STRATEGIES:
        written["sharding_strategy"] = written.pop("reshard_after_forward")
    return written


def trainer_options(words: Any, config: Any) -> dict[str, Any]:
    """Return the options of the pass ``fsdp`` that a Trainer's ``fsdp: full_shard auto_wrap`` and ``fsdp_config:
    {...}`` mean.

    Raises:
        ValueError: a word or the config is none of Trainer's.
    """
    if isinstance(config, str) and expanded(Path(config)).is_file():
        config = json.loads(expanded(Path(config)).read_text(encoding="utf-8"))
    if config is not None and not isinstance(config, Mapping):
        raise ValueError(f"fsdp_config is {config!r}; expected a mapping or a JSON file")
    options: dict[str, Any] = dict(config or {})
    for word in words.split() if isinstance(words, str) else [words] if words is True else words or []:
        if word is True or word in ("auto_wrap", ""):
            continue
        if word == "offload":
            options["offload_params"] = True
        elif str(word).upper() in _STRATEGIES:
            options["sharding_strategy"] = str(word).upper()
        else:
            raise ValueError(
                f"fsdp: {word!r} is not known; there are {', '.join(map(str.lower, _STRATEGIES))}, offload, auto_wrap"
            )
    return options


def _strategy_name(value: object) -> str:
    number = value if isinstance(value, int) else int(value) if isinstance(value, str) and value.isdigit() else None
    return _NUMBERED.get(number, "") if number is not None else str(value).upper().rpartition(".")[2].lstrip("_")


def _strategy(result: Translation, value: object) -> None:
    text = _strategy_name(value)
    if text not in _STRATEGIES:
        result.problems["sharding_strategy"] = f"expected one of {', '.join(_STRATEGIES)}, got {value!r}"
        return
    result.name, options = _STRATEGIES[text]
    result.options |= options
    result.notes.append(f"sharding_strategy: {value} became {result.name}({_listed(options)})")


def _apply(result: Translation, key: str, value: object) -> None:
    try:
        options, note = _KNOBS[key](value) if key in _KNOBS else ({key: value}, "")
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
    "sync_module_states": (
        "initial weights are the same on every rank by construction, and the ranks compare them at the start"
    ),
    "cpu_ram_efficient_loading": "models are built on the meta device, and each rank reads its own part of the weights",
    "keep_low_precision_grads": "gradients are kept in the parameters' dtype",
    "version": "it is always FSDP2",
    "state_dict_config": "checkpoints are sharded and written as they lie; export streams one copy",
    "optim_state_dict_config": "checkpoints are sharded and written as they lie",
    "param_init_fn": "models are built on the meta device and filled by their own initialisation, or from weights",
}

_REFUSED = {
    "ignored_modules": "FSDP2 reduces no gradients of what it ignores; freeze the modules, or leave them out of blocks",
    "activation_checkpointing_offload": (
        "saved activations stay on the device; offload: cpu moves parameters and optimizer state"
    ),
    "xla": "TPUs are not supported",
    "xla_fsdp_v2": "TPUs are not supported",
    "xla_fsdp_settings": "TPUs are not supported",
    "xla_fsdp_grad_ckpt": "TPUs are not supported",
}


def _prefetch_backward(value: object) -> tuple[dict[str, Any], str]:
    name = str(value).upper().rpartition(".")[2].removeprefix("BACKWARD_")
    depths = {"PRE": 1, "POST": 0, "NONE": 0, "NO_PREFETCH": 0}
    if name not in depths:
        raise ValueError(f"expected PRE, POST or nothing, got {value!r}")
    return {"prefetch_backward": depths[name]}, ""


def _prefetch_forward(value: object) -> tuple[dict[str, Any], str]:
    return {"prefetch_forward": int(truth(value))}, ""


def _offload(value: object) -> tuple[dict[str, Any], str]:
    wanted = value.get("offload_params", False) if isinstance(value, Mapping) else value
    return ({"offload": "cpu"}, "") if truth(wanted) else ({}, "is the default")


def _precision(value: object) -> tuple[dict[str, Any], str]:
    if isinstance(value, Mapping):
        unknown = [
            key for key in value if key not in (*_PRECISION, "cast_root_forward_inputs", "keep_low_precision_grads")
        ]
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; there are: {', '.join(sorted(_PRECISION))}")
        return {key: setting for key, setting in value.items() if key in _PRECISION}, ""
    dtypes = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
    if str(value).lower() in ("no", "false", "none", "fp32", "float32"):
        return {}, "is the default"
    if str(value).lower() not in dtypes:
        raise ValueError(f"expected bf16, fp16, no, or the dtypes one by one, got {value!r}")
    dtype = dtypes[str(value).lower()]
    return {"param_dtype": dtype, "reduce_dtype": dtype}, ""


def _wrap_policy(value: object) -> tuple[dict[str, Any], str]:
    if str(value).upper() == "NO_WRAP":
        return {"blocks": []}, "became blocks=[]: the whole model is one unit"
    if str(value).upper() not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
        raise ValueError(
            f"expected TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP, got {value!r}; units come from the model's "
            "layout"
        )
    return {}, "is the default: units are the model's blocks (blocks and min_params change them)"


def _classes(value: object) -> tuple[dict[str, Any], str]:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"expected class names, got {value!r}")
    return {"blocks": names}, ""


def _min_params(value: Any) -> tuple[dict[str, Any], str]:
    return {"min_params": int(value)}, ""


def _state_dict_type(value: object) -> tuple[dict[str, Any], str]:
    name = str(value).upper().rpartition(".")[2]
    if name == "SHARDED_STATE_DICT":
        return {}, "is the default"
    if name == "FULL_STATE_DICT":
        return {}, "has no effect: checkpoints are sharded, and `meshpar export` writes one whole copy from any of them"
    raise ValueError(
        f"{value} is refused: a local state dict can be read on the same mesh only; checkpoints are sharded ones"
    )


def _recompute(value: object) -> tuple[dict[str, Any], str]:
    return (
        ({"before": "ActivationCheckpoint"}, "became the pass ActivationCheckpoint")
        if truth(value)
        else ({}, "is the default")
    )


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
    "transformer_cls_names_to_wrap": _classes,
    "min_num_params": _min_params,
    "state_dict_type": _state_dict_type,
    "activation_checkpointing": _recompute,
    "gradient_checkpointing": _recompute,
}


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


@final
class HuggingFace:
    """The keys of Trainer and accelerate, and the names of options that FSDP1 and both of them use."""

    @staticmethod
    def keys(data: dict[str, Any], document: Document, problems: list[str], at: Place = ()) -> list[str]:
        """See :meth:`meshpar.launchers.recipes.named.Converter.keys`."""
        result = Translated(data, document, problems)
        trainer = {key: data[key] for key in TRAINER if key in data}
        accelerate = {key: data[key] for key in ACCELERATE if key in data}
        words, config = data.pop("fsdp", None), data.pop("fsdp_config", None)
        if not trainer and not accelerate and words is None and config is None:
            return []
        for key in (*trainer, *accelerate):
            del data[key]
        result.known |= trainer
        for table, found in ((TRAINER, trainer), (ACCELERATE, accelerate)):
            for key, value in found.items():
                table.take(key, value, result, at)
        if trainer and not at:
            _fill_defaults(result)
        _put_passes(result, words, config, at)
        return result.notes

    options = staticmethod(translate)


def _fill_defaults(result: Translated) -> None:
    """Let what no key says be as Trainer has it."""
    filled = []
    for path, value in DEFAULTS.items():
        if not result.has(path):
            result.put(path, value)
            filled.append(f"{path}: {'nothing' if value is None else value}")
    if not result.has("training.epochs") and not result.has("training.steps"):
        result.put("training.epochs", 3)
        filled.append("training.epochs: 3")
    if filled:
        result.note("Trainer's defaults", ", ".join(filled))


def _put_passes(result: Translated, words: object, config: object, at: Place) -> None:
    """Write the passes and the mesh that the keys mean."""
    try:
        options = trainer_options(words, config)
        written = strategy_of(options)
    except ValueError as error:
        result.refuse("fsdp", str(error), at)
        return
    wanted = words not in (None, False, "", []) or config is not None or result.known.get("kind") == "fsdp"
    passes = result.data.get("passes")
    own = passes if isinstance(passes, list) else []
    axes = result.known.get("axes", {})
    if not wanted and (own or result.data.get("mesh") or result.known.get("kind") == "no"):
        _put_precision(result, own, at)
        return
    options |= result.fsdp
    both = {"dp_replicate", "dp_shard"} <= set(axes)
    result.strategy = written or ("HYBRID_SHARD" if both else "FULL_SHARD" if wanted else "NO_SHARD")
    if not wanted or both:
        options["sharding_strategy"] = result.strategy
    if axes and not {"dp_replicate", "dp_shard"} & set(axes):
        result.data["passes"] = ["TensorParallel", *result.before, *own]
    else:
        result.data["passes"] = [*(["TensorParallel"] if "tp" in axes else []), *result.before, *own, {"fsdp": options}]
    choose_mesh(result)


def _put_precision(result: Translated, own: list[Any], at: Place) -> None:
    """Leave the recipe's own passes as they are; those that its mesh calls for get what the keys add."""
    mesh = str(result.data.get("mesh") or "")
    passes = [*own] if own else [dict(pass_) for pass_ in default_passes(mesh)]
    names = [next(iter(pass_)) if isinstance(pass_, Mapping) else pass_ for pass_ in passes]
    place = next((number for number, name in enumerate(names) if name in SHARDING), None)
    if result.fsdp and place is None:
        result.refuse(
            "bf16" if "bf16" in result.known else "mixed_precision",
            "mixed precision needs a data-parallel pass: give a mesh",
            at,
        )
        return
    if place is None:
        place = len(passes)
    elif result.fsdp:
        options = passes[place][names[place]] if isinstance(passes[place], Mapping) else {}
        passes[place] = {names[place]: {**(options or {}), **result.fsdp}}
    result.data["passes"] = [
        *passes[:place],
        *(pass_ for pass_ in result.before if pass_ not in names),
        *passes[place:],
    ]
