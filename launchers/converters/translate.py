"""Put the keys of Trainer and accelerate that a recipe holds in meshpar's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from meshpar.launchers.converters.accelerate import ACCELERATE, choose_mesh
from meshpar.launchers.converters.keys import Translated
from meshpar.launchers.converters.knobs import strategy_of, trainer_options, translate
from meshpar.launchers.converters.trainer import DEFAULTS, TRAINER
from meshpar.launchers.recipes.techniques import SHARDING, default_passes
from meshpar.launchers.recipes.yamlfile import Document, Place


@final
class HuggingFace:
    """The keys of Trainer and accelerate, and the names of options that FSDP1 and both of them use."""

    @staticmethod
    def keys(data: dict[str, Any], document: Document, problems: list[str], at: Place = ()) -> list[str]:
        """See :meth:`meshpar.launchers.recipes.converting.Converter.keys`."""
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
    passes = [*own] if own else [dict(each) for each in default_passes(mesh)]
    names = [next(iter(each)) if isinstance(each, Mapping) else each for each in passes]
    place = next((number for number, name in enumerate(names) if name in SHARDING), None)
    if result.fsdp and place is None:
        result.refuse(
            "bf16" if "bf16" in result.known else "mixed_precision", "mixed precision needs a data-parallel pass: give a mesh", at
        )
        return
    if place is None:
        place = len(passes)
    elif result.fsdp:
        options = passes[place][names[place]] if isinstance(passes[place], Mapping) else {}
        passes[place] = {names[place]: {**(options or {}), **result.fsdp}}
    result.data["passes"] = [*passes[:place], *(each for each in result.before if each not in names), *passes[place:]]
