"""Foreign keys, each translated, without effect, or refused, and what the values of transformers' TrainingArguments
mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from meshpar.launchers.recipes.yamlfile import Document, Place

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
_OPTIMIZERS = {"adamw_torch": False, "adamw_torch_fused": True, "adamw_hf": False}


@final
@dataclass(slots=True)
class Translated:
    """A recipe's data on the way from foreign keys to meshpar's.

    Attributes:
        data: the recipe's mapping, filled in place.
        document: for messages.
        problems: takes one line for each fault.
        notes: what became of each key.
        fsdp: options of the sharding pass, in the old names that :mod:`meshpar.launchers.converters.translate` reads.
        before: passes to put before the sharding one.
        strategy: the sharding strategy where a key says it.
        known: what keys say to one another, such as ``eval_strategy`` to ``eval_steps``.
        key: the present one.
        written: fields that keys have set.
    """

    data: dict[str, Any]
    document: Document
    problems: list[str]
    notes: list[str] = field(default_factory=list)
    fsdp: dict[str, Any] = field(default_factory=dict)
    before: list[Any] = field(default_factory=list)
    strategy: str = ""
    known: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    written: set[str] = field(default_factory=set)

    def put(self, path: str, value: object) -> None:
        """Set a field of the recipe (``optimizer.lr``) because of the present key; a field that the recipe writes
        itself is a conflict.
        """
        *sections, name = path.split(".")
        target = self.data
        for section in sections:
            inner = target.get(section)
            target[section] = dict(inner) if isinstance(inner, Mapping) else {}
            target = target[section]
        if name in target and path not in self.written and target[name] != value:
            self.refuse(self.key, f"the recipe says {path}: {target[name]} as well; keep one")
            return
        target[name] = value
        self.written.add(path)

    def has(self, path: str) -> bool:
        """Tell whether the recipe, or a key before, set a field."""
        target: Any = self.data
        for part in path.split("."):
            if not isinstance(target, Mapping) or part not in target:
                return False
            target = target[part]
        return True

    def note(self, key: str, text: str) -> None:
        """Tell what became of a key."""
        self.notes.append(f"{key}: {text}")

    def refuse(self, key: str, reason: str, place: Place = ()) -> None:
        """Refuse a key."""
        self.problems.append(f"{self.document.where((*place, key))}: {reason}")


Handler = Callable[[Any, Translated], str | None]
"""Takes a key's value, puts it where it belongs and returns what became of it (None: told already); raises
ValueError to refuse it.
"""


@final
@dataclass(frozen=True, slots=True)
class Keys:
    """A table of foreign keys.

    Attributes:
        handlers: keys that are translated.
        no_effect: keys that need nothing here -> why.
        refused: keys that cannot be had -> (the values that ask for nothing, why).
    """

    handlers: Mapping[str, Handler]
    no_effect: Mapping[str, str]
    refused: Mapping[str, tuple[tuple[Any, ...], str]]

    def __iter__(self) -> Iterator[str]:
        yield from (*self.handlers, *self.no_effect, *self.refused)

    def __contains__(self, key: object) -> bool:
        return key in self.handlers or key in self.no_effect or key in self.refused

    def take(self, key: str, value: object, result: Translated, place: Place = ()) -> None:
        """Do with one key what the table says."""
        result.key = key
        if key in self.no_effect:
            result.note(key, f"has no effect: {self.no_effect[key]}")
        elif key in self.refused:
            harmless, reason = self.refused[key]
            if value is None or any(
                value == default and isinstance(value, bool) == isinstance(default, bool) for default in harmless
            ):
                result.note(key, "has no effect: this value is the default")
            else:
                result.refuse(key, f"{value!r} is refused: {reason}", place)
        elif value is None:
            result.note(key, "has no effect: null is the default")
        else:
            try:
                note = self.handlers[key](value, result)
            except ValueError as error:
                result.refuse(key, str(error), place)
            except TypeError:
                result.refuse(key, f"cannot read {value!r}", place)
            else:
                if note is not None:
                    result.note(key, note)


def to(path: str, check: Callable[[Any], Any] = lambda value: value) -> Handler:
    """Return the handler that writes a key's value to one field."""

    def handler(value: object, result: Translated) -> str | None:
        wanted = check(value)
        result.put(path, wanted)
        return f"{value} became {path}: {_plain(wanted)}"

    return handler


def whole(value: object) -> int:
    """Return an integer from 1; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer() or value < 1:
        raise ValueError(f"expected an integer from 1, got {value!r}")
    return int(value)


def truth(value: object) -> bool:
    """Return true or false, also from text; raises ValueError for anything else."""
    if isinstance(value, str) and value.lower() in ("true", "yes"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "no"):
        return False
    if value in (True, False, None):
        return bool(value)
    raise ValueError(f"expected true or false, got {value!r}")


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def model_name(value: Any, result: Translated) -> str:
    """Take ``model_name_or_path``, which Trainer's scripts read beside their TrainingArguments."""
    result.put("model.kind", "huggingface")
    result.put("model.weights", str(value))
    return f"{value} became model: {{kind: huggingface, weights: {value}}}"


def epochs(value: Any, result: Translated) -> str:
    """Take ``num_train_epochs``: whole passes, unless ``max_steps`` counts."""
    if (result.known.get("max_steps") or -1) > 0:
        return "has no effect: max_steps says how long"
    result.put("training.epochs", whole(value))
    return f"{value} became training.epochs: {int(value)}"


def max_steps(value: Any, result: Translated) -> str:
    """Take ``max_steps``; Trainer writes -1 for none."""
    if value <= 0:
        return "has no effect: it is the default"
    result.put("training.steps", whole(value))
    return f"{value} became training.steps: {value}"


def clip(value: Any, result: Translated) -> str:
    """Take ``max_grad_norm``; 0 only measures."""
    wanted = None if not value else float(value)
    result.put("training.clip", wanted)
    return f"{value} became training.clip: {wanted or 'null: the norm is only measured'}"


def beta(place: int) -> Any:
    """Return the handler of ``adam_beta1`` (place 0) or ``adam_beta2`` (1)."""

    def handler(value: Any, result: Translated) -> str:
        betas = list(result.known.setdefault("betas", [0.9, 0.999]))
        betas[place] = float(value)
        result.known["betas"] = betas
        result.put("optimizer.betas", betas)
        return f"{value} became optimizer.betas: {betas}"

    return handler


def scheduler(value: object, result: Translated) -> str:
    """Take ``lr_scheduler_type``."""
    if value not in _SCHEDULES:
        raise ValueError(f"{value!r} is refused: there are {', '.join(_SCHEDULES)}, and schedule.name: step")
    result.put("schedule.name", _SCHEDULES[str(value)])
    return f"{value} became schedule.name: {_SCHEDULES[str(value)]}"


def scheduler_options(value: object, result: Translated) -> str:
    """Take ``lr_scheduler_kwargs``."""
    if not value:
        return "has no effect: it is empty"
    if not isinstance(value, Mapping):
        raise ValueError(f"expected min_lr or min_lr_rate, got {value!r}")
    for key, setting in value.items():
        if key == "min_lr_rate":
            result.put("schedule.min_ratio", float(setting))
        elif key == "min_lr":
            result.put("schedule.min_ratio", float(setting) / float(result.known.get("learning_rate") or 5e-5))
        else:
            raise ValueError(
                f"{key} is refused: of the options of a schedule there are min_lr and min_lr_rate; see the section "
                "schedule"
            )
    return f"{value} became schedule.min_ratio: {result.data['schedule']['min_ratio']:g}"


def warmup_steps(value: Any, result: Translated) -> str:
    """Take ``warmup_steps``: steps, or below 1 a part of the run."""
    if not value:
        return "has no effect: it is the default"
    if isinstance(value, float) and 0 < value < 1:
        return _warmup_share(value, result)
    result.put("schedule.warmup_steps", whole(value))
    return f"{value} became schedule.warmup_steps: {int(value)}"


def warmup_ratio(value: Any, result: Translated) -> str:
    """Take ``warmup_ratio``."""
    if not value or result.known.get("warmup_steps"):
        return f"has no effect: {'warmup_steps counts' if value else 'it is the default'}"
    return _warmup_share(value, result)


def _warmup_share(value: Any, result: Translated) -> str:
    result.put("schedule.warmup_ratio", float(value))
    return f"{value} became schedule.warmup_ratio: {float(value):g}"


def optim(value: object, result: Translated) -> str:
    """Take ``optim``."""
    if value not in _OPTIMIZERS:
        raise ValueError(f"{value!r} is refused: the optimizer is AdamW (adamw_torch, adamw_torch_fused)")
    result.put("optimizer.fused", _OPTIMIZERS[str(value)])
    return f"{value} became optimizer.fused: {str(_OPTIMIZERS[str(value)]).lower()}"


def every(kind: str, path: str) -> Any:
    """Return the handler of ``eval_strategy`` or ``save_strategy``."""

    def handler(value: object, result: Translated) -> str:
        text = _strategy(value)
        if text == "no":
            result.put(path, None)
            return f"{text} became {path}: null" + (" (at the end only)" if kind == "save" else "")
        if text == "best":
            raise ValueError(
                "'best' is refused: write save_strategy: epoch or steps; checkpoint.best keeps the best of them"
            )
        steps = result.known.get(f"{kind}_steps") or result.known.get("logging_steps") or 500
        if text == "steps" and isinstance(steps, float) and 0 < steps < 1:
            return "steps, whose number is refused"  # at its own key
        every = "epoch" if text == "epoch" else count(steps)
        if text not in ("epoch", "steps"):
            raise ValueError(f"expected no, steps or epoch, got {value!r}")
        result.put(path, every)
        return f"{text} became {path}: {every}"

    return handler


def steps_of(kind: str, path: str) -> Any:
    """Return the handler of ``eval_steps`` or ``save_steps``."""

    def handler(value: object, result: Translated) -> str:
        names = ("eval_strategy", "evaluation_strategy") if kind == "eval" else ("save_strategy",)
        said = [result.known[name] for name in names if name in result.known]
        strategy = _strategy(said[0]) if said else "no" if kind == "eval" else "steps"
        if strategy != "steps":
            return f"has no effect: {kind}_strategy is {strategy}"
        result.put(path, count(value))
        return f"{value} became {path}: {count(value)}"

    return handler


def _strategy(value: object) -> str:
    """Return ``no``, ``steps`` or ``epoch`` as text: YAML reads ``no`` and ``yes`` without quotes as false and true."""
    return {False: "no", True: "steps"}[value] if isinstance(value, bool) else str(value)


def count(value: object) -> int:
    """Return a number of steps; a part of the run is refused."""
    if isinstance(value, float) and 0 < value < 1:
        raise ValueError(f"{value} is refused: a part of the run; write the number of steps")
    return whole(value)


def switch(turn_on: Callable[[Translated], str]) -> Handler:
    """Return the handler of a key that is true or false, where false is the default."""

    def handler(value: object, result: Translated) -> str:
        return turn_on(result) if truth(value) else "has no effect: it is the default"

    return handler


@switch
def best(result: Translated) -> str:
    """Take ``load_best_model_at_end`` with its metric."""
    metric = str(result.known.get("metric_for_best_model") or "loss").removeprefix("eval_")
    greater = result.known.get("greater_is_better")
    sign = "+" if (not metric.endswith("loss") if greater is None else truth(greater)) else ""
    result.put("checkpoint.best", f"{sign}val/{metric}")
    return f"became checkpoint.best: {sign}val/{metric}; `meshpar export --best {sign}val/{metric}` exports it"


def precision(name: str) -> Any:
    """Return the handler of ``bf16`` or ``fp16``."""

    @switch
    def handler(result: Translated) -> str:
        result.fsdp["mixed_precision"] = name
        return f"became mixed_precision: {name} of the data-parallel pass"

    return handler


@switch
def recompute(result: Translated) -> str:
    """Take ``gradient_checkpointing``."""
    if "ActivationCheckpoint" not in result.before:
        result.before.insert(0, "ActivationCheckpoint")
    return "became the pass ActivationCheckpoint"


@switch
def compile(result: Translated) -> str:
    """Take ``torch_compile``."""
    result.before.append("Compile")
    return "became the pass Compile"


@switch
def cpu(result: Translated) -> str:
    """Take ``no_cuda``, ``use_cpu``."""
    result.put("device", "cpu")
    return "became device: cpu"


def report_to(value: Any, result: Translated) -> str:
    """Take ``report_to``: the trackers that meshpar has."""
    names = [value] if isinstance(value, str) else list(value or ["none"])
    result.put("training.tensorboard", bool({"tensorboard", "all"} & set(names)))
    known = sorted({"wandb", "trackio", "mlflow"} & set(names))
    if known:
        result.put("trackers", {name: {} for name in known})
    others = sorted(set(names) - {"tensorboard", "all", "none", *known})
    more = f" and trackers: {', '.join(known)}" if known else ""
    more += f"; {', '.join(others)} not: metrics.jsonl holds every number" if others else ""
    return f"became training.tensorboard: {str(result.data['training']['tensorboard']).lower()}{more}"


def resume(value: object, result: Translated) -> str:
    """Take ``resume_from_checkpoint``."""
    wanted = "auto" if value in (True, "true", "True") else str(value)
    if value in (False, "false"):
        return (
            "has no effect: a run resumes from its own newest checkpoint; set checkpoint.resume: never to refuse this"
        )
    result.put("checkpoint.resume", wanted)
    return f"became checkpoint.resume: {wanted}"


def run_name(value: object, result: Translated) -> str:
    """Take ``run_name``."""
    if result.has("name"):
        return "has no effect: the recipe has a name"
    result.put("name", str(value))
    return f"became name: {value}"


def sampling(value: object, result: Translated) -> str:
    """Take ``train_sampling_strategy``."""
    if value not in ("random", "sequential"):
        raise ValueError(f"{value!r} is refused: an epoch's order is random or that of the data (data.shuffle)")
    result.put("data.shuffle", value == "random")
    return f"became data.shuffle: {str(value == 'random').lower()}"
