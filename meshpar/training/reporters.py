"""Reporters of a run: ``metrics.jsonl``, and the console, a progress bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TextIO, cast, final

from meshpar.process.imports import need
from meshpar.process.leftovers import write_durably
from meshpar.process.signals import Lenient

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

Metrics = Mapping[str, float]
Ended = Literal["complete", "stopped", "failed"]
"""How a run ended: with all its steps, by a stop request, after which it can be resumed, or by an error."""

_SHOWN = (
    ("train/loss", "loss {:.4f}"),
    ("train/accuracy", "accuracy {:.1%}"),
    ("val/loss", "val {:.4f}"),
    ("val/accuracy", "accuracy {:.1%}"),
    ("val/cross_entropy", "cross entropy {:.4f}"),
    ("lr", "lr {:.2e}"),
    ("grad_norm", "norm {:.3g}"),
    ("experts/least", "experts {:,.0f}"),
    ("experts/most", "to {:,.0f} tok"),
    ("experts/balance", "balance {:.2f}"),
    ("experts/entropy", "router {:.2f}"),
    ("experts/dropped", "dropped {:.1%}"),
    ("tokens_per_second", "{:,.0f} {unit}/s"),
    ("mfu", "mfu {:.1%}"),
    ("memory_gib", "{:.2f} GiB"),
)
_EVALUATIONS = "eval/"


class Reporter(Protocol):
    """Receive records, on one rank only."""

    def report(self, record: Metrics) -> None:
        """Receive a record: ``step`` (completed steps), and values by name."""

    def note(self, text: str) -> None:
        """Receive a line of text about the run."""

    def close(self, ended: Ended) -> None:
        """Flush and close; ``ended``: how the run ended."""


_MOST_UNWRITTEN = 16 << 20  # bytes
_AS_READ = "surrogateescape"  # bytes that are no text are written as they were read


@final
class JsonLines:
    """Write ``metrics.jsonl``: one record per line, with the time."""

    def __init__(self, path: str | Path, *, step: int = 0) -> None:
        """Open the file to append; lines of steps after ``step`` move to ``metrics.abandoned.jsonl``."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _lines(path)
        counted = [line for line in lines if _step_of(line) <= step]
        if len(counted) < len(lines):
            with path.with_suffix(".abandoned.jsonl").open("a", encoding="utf-8", errors=_AS_READ) as aside:
                aside.writelines(line for line in lines if _step_of(line) > step)
                os.fsync(aside.fileno())
        if path.is_file() and path.read_bytes() != (written := "".join(counted).encode(errors=_AS_READ)):
            write_durably(path, written)
        self._file = path.open("ab", buffering=0)
        self._unwritten, self._warned = b"", False
        # of a validation that is made again, because the run ended before the checkpoint had its result
        self._step, self._known = step, [_values(line) for line in counted if _step_of(line) == step]

    def report(self, record: Metrics) -> None:
        """Write a line; values that JSON cannot store (nan, inf) become null. A full disk's lines are written later."""
        plain = {name: value if math.isfinite(value) else None for name, value in record.items()}
        line = json.dumps({**plain, "time": round(time.time(), 3)}) + "\n"
        if record.get("step") == self._step and (names := _values(line)) and names in self._known:
            return
        self._unwritten = self._unwritten[-_MOST_UNWRITTEN:] + line.encode()
        if (error := self._write()) is not None and not self._warned:
            self._warned = True
            log.warning("%s: %s; training continues, and the lines are written later", self._file.name, error)

    def _write(self) -> OSError | None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            return error
        return None

    def note(self, text: str) -> None:
        """Ignore the text: the file has numbers only."""

    def close(self, ended: Ended = "complete") -> None:
        """Write what a full disk refused, if it does not any more, and close the file."""
        if (error := self._write()) is not None:
            log.warning(
                "%s: %s; its last %d records are lost; free space before the next start",
                self._file.name,
                error,
                self._unwritten.count(b"\n"),
            )
        self._file.close()


def _values(line: str) -> list[str]:
    """Return the names of a line's validation; a line of another kind has none."""
    try:
        return [name for name in json.loads(line) if name.startswith(("val/", "eval/"))]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return []


def _step_of(line: str) -> float:
    """Return the step of a line; infinity if the line has none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


def _lines(path: Path) -> list[str]:
    # a line without its end was cut off by a crash
    text = path.read_text(encoding="utf-8", errors=_AS_READ) if path.is_file() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


@final
class Console:
    """Print a run's records and the remaining time."""

    def __init__(
        self, steps: int | Callable[[], int], *, step: int = 0, file: TextIO | None = None, unit: str = "tok"
    ) -> None:
        """Start the output of a run of ``steps`` (a function, if they may change) after ``step`` of them."""
        self._file, self._unit = Lenient(file or sys.stderr), unit
        self._total = steps if callable(steps) else lambda: steps
        self._first = step
        self._start = time.monotonic()
        self._progress: Progress | None = None
        if self._file.isatty():
            self._progress = _progress(cast("TextIO", self._file))
            self._task = self._progress.add_task("", total=self._total(), completed=step)
            self._progress.start()

    def report(self, record: Metrics) -> None:
        """Print a record."""
        text, step = self._text(record), int(record["step"])
        if not text:
            return
        if self._progress is None:
            eta = f"  eta {self._left(step)}" if "train/loss" in record else ""
            total = self._total()
            self._write(f"step {step:>{len(str(total))}}/{total}  {text}{eta}")
        elif any(name.startswith(("val/", _EVALUATIONS)) for name in record):
            self._progress.console.print(f"step {step}: {text}", highlight=False, markup=False)
        else:
            self._progress.update(self._task, completed=step, total=self._total(), description=text)

    def note(self, text: str) -> None:
        """Print a line of text."""
        if self._progress is None:
            self._write(text)
        else:
            self._progress.console.print(text, highlight=False, markup=False)

    def close(self, ended: Ended = "complete") -> None:
        """Stop the progress bar."""
        if self._progress is not None:
            self._progress.stop()

    def _text(self, record: Metrics) -> str:
        shown = [form.format(record[name], unit=self._unit) for name, form in _SHOWN if name in record]
        numbers = {name.removeprefix(_EVALUATIONS): record[name] for name in record if name.startswith(_EVALUATIONS)}
        return "  ".join([*shown, *(f"{name} {value:.4g}" for name, value in numbers.items())])

    def _left(self, step: int) -> str:
        done = step - self._first
        if done <= 0:
            return "?"
        return str(timedelta(seconds=round((time.monotonic() - self._start) / done * max(0, self._total() - step))))

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def _progress(file: TextIO) -> Progress:
    rich, console = need("rich.progress"), need("rich.console")
    return rich.Progress(
        rich.MofNCompleteColumn(),
        rich.BarColumn(bar_width=24),
        rich.TextColumn("{task.description}", markup=False),
        rich.TimeElapsedColumn(),
        rich.TextColumn("eta"),
        rich.TimeRemainingColumn(elapsed_when_finished=False),
        console=console.Console(file=file),
    )
