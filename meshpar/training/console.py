"""Progress output: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO, cast, final

from meshpar.process.imports import need
from meshpar.process.signals import Lenient
from meshpar.training.metrics import Ended, Metrics

if TYPE_CHECKING:
    from rich.progress import Progress

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


@final
class Console:
    """Print a run's records and the remaining time."""

    def __init__(
        self, steps: int | Callable[[], int], *, step: int = 0, file: TextIO | None = None, unit: str = "tok"
    ) -> None:
        """Start the output.

        Args:
            steps: number of steps of the whole run, or a function that returns it, if it may change.
            step: number of completed steps.
            file: output stream; None: standard error.
            unit: unit of the throughput: ``tok`` or ``examples``.
        """
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
            left = f"  eta {self._left(step)}" if "train/loss" in record else ""
            total = self._total()
            self._write(f"step {step:>{len(str(total))}}/{total}  {text}{left}")
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
        found = {name.removeprefix(_EVALUATIONS): record[name] for name in record if name.startswith(_EVALUATIONS)}
        return "  ".join([*shown, *(f"{name} {value:.4g}" for name, value in found.items())])

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
