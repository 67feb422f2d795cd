"""``meshpar runs`` and ``meshpar compare``: the runs of a folder, and where two runs differ."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from meshpar.checkpoints.steps.inspecting import first_difference
from meshpar.checkpoints.steps.lease import is_written
from meshpar.checkpoints.steps.steps import CHECKPOINTS
from meshpar.core.errors import LaunchError, RecipeError
from meshpar.launchers.agent.failures import error_file, recorded
from meshpar.launchers.jobs.job import RECIPE
from meshpar.launchers.recipes.yamlfile import read_document
from meshpar.launchers.targets.launching import ask_states, find_launches
from meshpar.state.drawing import table
from meshpar.training.metrics import DIGEST
from meshpar.training.send_to_trackers import METRICS

_MEASURED = ("time", "tokens_per_second", "memory_gib", "mfu", "replicas/seconds")
"""Values that differ between two starts of the same run."""
_CURVES = ("train/loss", "val/loss", "tokens_per_second")
Pairs = Mapping[int, tuple[float | None, float | None]]
"""The values of two runs by step."""
_BLOCKS, _WIDTH, _LONGEST = "▁▂▃▄▅▆▇█", 64, 60


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """The records of a run's folder: its values by metric and step, and the fields of its recipe."""

    folder: Path
    values: Mapping[str, Mapping[int, float | None]]
    recipe: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> RunRecords:
        values: dict[str, dict[int, float | None]] = {}
        for record in _records(folder / METRICS):
            for name, value in record.items():
                values.setdefault(name, {})[int(record["step"])] = value
        recipe: Mapping[str, Any] = {}
        with suppress(RecipeError):  # of a script, or damaged
            recipe = read_document(folder / RECIPE).data
        return cls(folder=folder, values=values, recipe=dict(_fields(recipe)))

    def last(self, name: str) -> float | None:
        """Return the last value of a metric that is a number."""
        return next((value for value in reversed([*self.values.get(name, {}).values()]) if value is not None), None)

    @property
    def step(self) -> int:
        return max(self.values.get("step", ()), default=0)

    def state(self) -> str:
        """Return whether the run's process lives, has made all steps, or how it ended."""
        limits = [self.recipe.get(f"training.{name}") for name in ("steps", "epochs")]
        steps, epochs = (count if isinstance(count, int | float) and count else math.inf for count in limits)
        if is_written(self.folder / CHECKPOINTS, patient=False):
            return "running"
        if self.step >= steps or (self.last("epoch") or 0) >= epochs:
            return "complete"
        for logs in sorted((self.folder / "logs").glob("*/"), key=lambda path: path.stat().st_mtime)[-1:]:
            for failure in recorded(logs):
                if error_file(logs, failure.rank).stat().st_mtime >= (self.last("time") or 0):
                    why = " ".join(f"rank {failure.rank}: {failure.kind}: {failure.message}".split())
                    return f"failed: {why if len(why) <= _LONGEST else why[:_LONGEST] + '...'}"
        return "stopped" if self.recipe else "-"


def list_runs(root: Path) -> str:
    """Return a table of the runs in ``root``, or of the run ``root``: the one with the last record comes last."""
    depths = ("", "*/", "*/*/", "*/*/*/")  # not all of it: checkpoints have many files
    damaged = dict[Path, LaunchError]()
    # of each run the newest
    launches = {job.folder.parents[1]: (name, target, job) for name, target, job in find_launches(root, damaged)}
    states, notes = ask_states(list(launches.values()))
    notes += [f"note: {error}" for error in damaged.values()]
    unread = {folder.parents[1]: folder.name for folder in damaged}
    folders = {path.parent.absolute() for depth in depths for path in root.glob(f"{depth}{METRICS}")}
    runs = [RunRecords.read(folder) for folder in sorted(folders | launches.keys() | unread.keys())]
    if not runs:
        raise LaunchError(f"no runs in {root}; expected {root}/NAME/{METRICS}, which `meshpar train` writes")
    rows = []
    for run in sorted(runs, key=lambda run: run.last("time") or math.inf):
        target, _, job = launches.get(run.folder, ("", None, None))
        engine = states[job.folder][1] if job is not None else ""
        steps, name = run.recipe.get("training.steps"), str(run.folder.relative_to(root.absolute()))
        name = root.absolute().name if name == "." else name
        numbers = (_number(run.last(metric)) for metric in ("train/loss", "val/loss", "tokens_per_second"))
        state = f"{target}: {engine}" if engine else run.state() if run.values else "no record"
        if run.folder in unread and (job is None or job.folder.name < unread[run.folder]):
            state = f"launch {unread[run.folder]} is damaged"
        rows.append((name, _clock(run.last("time")), f"{run.step}{f'/{steps}' if steps else ''}", *numbers, state))
    return "\n".join([*table(("RUN", "LAST RECORD (UTC)", "STEP", "LOSS", "VAL", "PER SECOND", "STATE"), rows), *notes])


def compare_runs(one: Path, other: Path, *, tolerance: float = 0.0, deep: bool = False) -> str:
    """Return what two runs have set and measured, their curves, and the first step in which their records differ.

    ``tolerance``: largest relative difference that is none; ``deep``: look into the steps that both have saved, too.
    """
    for folder in (one, other):
        if not (folder / METRICS).is_file():
            raise LaunchError(f"{folder} has no {METRICS}; expected the folder of a run, such as runs/NAME")
    runs = RunRecords.read(one), RunRecords.read(other)
    names = [name for name in runs[0].values if name in runs[1].values and name not in ("step", *_MEASURED)]
    values = {name: [run.values[name] for run in runs] for name in names}
    pairs = {name: {step: (was[step], now[step]) for step in was if step in now} for name, (was, now) in values.items()}
    rows = [("last record (UTC)", *(_clock(run.last("time")) for run in runs), "")]
    rows += [("step", *(f"{run.step}, {run.state()}" for run in runs), "")]
    rows += [(name, *(_shown(name, run.last(name)) for run in runs), _largest(pairs[name])) for name in names]
    rows += [(name, *(_shown(name, run.last(name)) for run in runs), "") for name in _MEASURED[1:3]]
    lines = table(("last value", str(one), str(other), "largest relative difference"), rows)
    keys = dict.fromkeys((*runs[0].recipe, *runs[1].recipe))
    settings = {key: [run.recipe.get(key) for run in runs] for key in keys if key != "output"}
    changed = [f"recipe: {key}: {was} and {now}" for key, (was, now) in settings.items() if was != now]
    shown = {*names, "step", *_MEASURED}
    changed += [f"only in {run.folder}: {name}" for run in runs for name in run.values if name not in shown]
    lines += ["", *changed] if changed else []
    for name in _CURVES:
        lines += _curves(name, {str(run.folder): run.values[name] for run in runs if name in run.values})
    lines += ["", _first_step(pairs, tolerance)]
    return "\n".join([*lines, *([first_difference(one, other)] if deep else [])])


def _first_step(pairs: Mapping[str, Pairs], tolerance: float) -> str:
    """Return the first step in which records of two runs differ, and in what."""
    steps = sorted({step for values in pairs.values() for step in values})
    if not steps:
        return "no step has a record in both runs; expected two with the same training.log_every"
    same = None
    for step in steps:
        now = {name: values[step] for name, values in pairs.items() if step in values}
        apart = [
            f"{name} {' and '.join(_shown(name, value, repr) for value in values)}"
            for name, values in now.items()
            if _difference(*values) > tolerance and not (name == DIGEST and tolerance)
        ]
        if apart:
            before = "the first that both have" if same is None else f"the same up to step {same}"
            return f"the first step that differs is {step}, {before}: {'; '.join(apart)}"
        same = step
    within = f"within {tolerance:g}" if tolerance else "in every bit"
    return f"no step differs: {len(pairs)} values are the same {within} in {len(steps)} steps, up to {steps[-1]}"


def _largest(pairs: Pairs) -> str:
    """Return the largest relative difference of a metric, and its step."""
    apart = {step: _difference(*values) for step, values in pairs.items()}
    step = max(apart, key=apart.__getitem__, default=None)
    return "" if step is None else f"{apart[step]:.1e} at step {step}" if apart[step] else "0"


def _difference(was: float | None, now: float | None) -> float:
    """Return the relative difference of two values; None is a value that is not finite."""
    if was == now:
        return 0.0
    return math.inf if was is None or now is None else abs(was - now) / max(abs(was), abs(now))


def _curves(name: str, curves: Mapping[str, Mapping[int, float | None]]) -> list[str]:
    """Return a line of blocks for each run, on one scale of steps and values; nothing where no run has two values."""
    finite = {run: {step: value for step, value in curve.items() if value is not None} for run, curve in curves.items()}
    steps = [step for curve in finite.values() for step in curve]
    if len(set(steps)) < 2:
        return []
    values = [value for curve in finite.values() for value in curve.values()]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    lines = ["", f"{name}, {_number(low)} to {_number(high)}, steps {first} to {last}"]
    for run, curve in finite.items():
        row, width = [" "] * _WIDTH, max(map(len, finite))
        for step, value in curve.items():
            start, level = (step - first) * (_WIDTH - 1) // (last - first), (value - low) / ((high - low) or 1.0)
            row[start:] = [_BLOCKS[round(level * (len(_BLOCKS) - 1))]] * (_WIDTH - start)
        ends = (max(curve) - first) * (_WIDTH - 1) // (last - first) + 1 if curve else 0
        lines.append(f"  {run.ljust(width)}  {''.join(row[:ends])}".rstrip())
    return lines


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a line that is none, as one cut off by a crash, is left out."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
        yield {
            name: _finite(value) for name, value in record.items() if value is None or isinstance(value, int | float)
        }


def _finite(value: float | None) -> float | None:
    with suppress(OverflowError):  # of a whole number that no float holds
        return value if value is not None and math.isfinite(value) else None
    return None


def _fields(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a recipe by their dotted keys."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _clock(seconds: float | None) -> str:
    with suppress(ValueError, OverflowError, OSError):  # of a time that no calendar has
        return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    return "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}" if abs(value) < 1000 else f"{value:,.0f}"


def _shown(name: str, value: float | None, form: Callable[[float | None], str] = _number) -> str:
    return f"{int(value):013x}" if name == DIGEST and value is not None else form(value)
