"""Metrics of a run: every rank measures, one all-reduce per report combines, the reporters of one rank publish them, in
``metrics.jsonl`` and on the console: a progress bar on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO, cast, final

import torch
from torch import nn

from meshpar.core.errors import brief
from meshpar.parallelized import Parallelized
from meshpar.passes.pipeline.portion import all_parameters
from meshpar.process.devices import peak_flops
from meshpar.process.imports import need
from meshpar.process.leftovers import write_durably
from meshpar.process.waiting import Lenient

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
DIGEST = "weights/digest"


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
        # a line without its end was cut off by a crash
        text = path.read_text(encoding="utf-8", errors=_AS_READ) if path.is_file() else ""
        lines = [(*_parse_line(line), line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        counted = [line for line_step, _, line in lines if line_step <= step]
        if len(counted) < len(lines):
            with path.with_suffix(".abandoned.jsonl").open("a", encoding="utf-8", errors=_AS_READ) as aside:
                aside.writelines(line for line_step, _, line in lines if line_step > step)
                os.fsync(aside.fileno())
        if path.is_file() and path.read_bytes() != (written := "".join(counted).encode(errors=_AS_READ)):
            write_durably(path, written)
        self._file = path.open("ab", buffering=0)
        self._unwritten, self._warned = b"", False
        # of a validation that is made again, because the run ended before the checkpoint had its result
        self._step, self._validated = step, [names for line_step, names, _ in lines if line_step == step]

    def report(self, record: Metrics) -> None:
        """Write a line; values that JSON cannot store (nan, inf) become null. A full disk's lines are written later."""
        plain = {name: value if math.isfinite(value) else None for name, value in record.items()}
        line = json.dumps({**plain, "time": round(time.time(), 3)}) + "\n"
        if record.get("step") == self._step and (names := _parse_line(line)[1]) and names in self._validated:
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
            text = "%s: %s; its last %d records are lost; free space before the next start"
            log.warning(text, self._file.name, error, self._unwritten.count(b"\n"))
        self._file.close()


def _parse_line(line: str) -> tuple[float, list[str]]:
    """Return the step of a line, infinity if it has none, and the names of its validation's values."""
    try:
        record = json.loads(line)
        return float(record["step"]), [name for name in record if name.startswith(("val/", _EVALUATIONS))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return math.inf, []


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
            rich, console = need("rich.progress"), need("rich.console")
            columns = [rich.MofNCompleteColumn(), rich.BarColumn(bar_width=24)]
            columns += [rich.TextColumn("{task.description}", markup=False), rich.TimeElapsedColumn()]
            columns += [rich.TextColumn("eta"), rich.TimeRemainingColumn(elapsed_when_finished=False)]
            self._progress = progress = rich.Progress(
                *columns, console=console.Console(file=cast("TextIO", self._file))
            )
            self._task = progress.add_task("", total=self._total(), completed=step)
            progress.start()

    def report(self, record: Metrics) -> None:
        """Print a record."""
        step = int(record["step"])
        texts = [form.format(record[name], unit=self._unit) for name, form in _SHOWN if name in record]
        numbers = {name.removeprefix(_EVALUATIONS): record[name] for name in record if name.startswith(_EVALUATIONS)}
        numbers |= {name: record[name] for name in record if re.fullmatch(r"val/.+/loss", name)}
        text = "  ".join([*texts, *(f"{name} {value:.4g}" for name, value in numbers.items())])
        if not text:
            return
        if self._progress is None:
            eta = f"  eta {self._left(step)}" if "train/loss" in record else ""
            total = self._total()
            self.note(f"step {step:>{len(str(total))}}/{total}  {text}{eta}")
        elif any(name.startswith(("val/", _EVALUATIONS)) for name in record):
            self.note(f"step {step}: {text}")
        else:
            self._progress.update(self._task, completed=step, total=self._total(), description=text)

    def note(self, text: str) -> None:
        """Print a line of text."""
        if self._progress is None:
            self._file.write(text + "\n")
            self._file.flush()
        else:
            self._progress.console.print(text, highlight=False, markup=False)

    def close(self, ended: Ended = "complete") -> None:
        """Stop the progress bar."""
        if self._progress is not None:
            self._progress.stop()

    def _left(self, step: int) -> str:
        done = step - self._first
        if done <= 0:
            return "?"
        return str(timedelta(seconds=round((time.monotonic() - self._start) / done * max(0, self._total() - step))))


def flops_per_token(module: nn.Module) -> float:
    """Return the training FLOPs of a token, 6 x parameters (Kaplan et al., 2020), without those of attention."""
    return 6.0 * sum(parameter.numel() for parameter in all_parameters(module) if parameter.requires_grad)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on an accelerator, resident of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def means(widths: Mapping[str, int], values: Sequence[float], tokens: float) -> dict[str, float]:
    """Return means by name: of a sum over all ``tokens`` (width 1), or of a sum and its own count (2), if not 0."""
    named, start = dict[str, float](), 0
    for name, width in widths.items():
        count = tokens if width == 1 else values[start + 1]
        named |= {name: values[start] / count} if count else {}
        start += width
    return named


@final
class Meter:
    """Accumulate sums on the device between reports; only :meth:`read` waits for the device."""

    def __init__(self, par: Parallelized, *, flops_per_token: float | None = None, world_size: int = 1) -> None:
        """``flops_per_token``: of training, for MFU on ``world_size`` devices; None: no MFU."""
        self._par = par
        peak = peak_flops(par.device)
        self._flops = flops_per_token / (peak * world_size) if peak and flops_per_token else None
        self._dtype = torch.float32 if par.device.type == "mps" else torch.float64
        self._tokens, self._sums = 0, dict[str, torch.Tensor]()
        self._start = time.perf_counter()
        self._pending: Callable[[], dict[str, float]] | None = None

    def add(self, tokens: int, sums: Mapping[str, torch.Tensor]) -> None:
        """Add this rank's values of a step, without waiting for the device."""
        self._tokens += tokens
        for name, value in sums.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def forget(self) -> None:
        """Drop the report that was not read, and the values that were added since."""
        self._tokens, self._sums, self._pending = 0, {}, None

    @property
    def used(self) -> bool:
        """True after values were added since the last report."""
        return bool(self._sums)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the ``with`` block from the report."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def begin(self, numbers: Mapping[str, float], more: Mapping[str, torch.Tensor]) -> None:
        """Sum the ranks' values, and copy them to the host with ``more``, equal on every rank. Collective."""
        par, widths = self._par, {name: total.numel() for name, total in self._sums.items()}
        count = sum(widths.values())
        vector = torch.zeros(1 + count + par.loss_size, dtype=self._dtype, device=par.device)
        vector[0] = self._tokens
        vector[1 : 1 + count] = torch.cat([total.reshape(-1).to(self._dtype) for total in self._sums.values()])
        vector[1 + count + par.loss_rank] = peak_memory(par.device)
        scalars = (value.reshape(1).to(self._dtype) for value in more.values())
        read = _begin_copy(torch.cat([par.data_sum(vector), *scalars]))
        self._tokens, self._sums = 0, {}

        def record() -> dict[str, float]:
            values = read().tolist()
            tokens, now = values[0], time.perf_counter()
            seconds, self._start = now - self._start, now
            measured = {f"train/{name}": value for name, value in means(widths, values[1:], tokens).items()}
            memory_gib = max(values[1 + count : len(vector)]) / 2**30
            measured |= {"tokens": tokens, "tokens_per_second": tokens / seconds, "memory_gib": memory_gib}
            if self._flops is not None:
                measured["mfu"] = tokens / seconds * self._flops
            return {**numbers, **measured, **dict(zip(more, values[len(vector) :], strict=True))}

        self._pending = record

    def read(self) -> dict[str, float] | None:
        """Wait for the values that the last :meth:`begin` summed, and return the record; None: it was read."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending()


def _begin_copy(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy ``values`` to the host; return a function that waits for this copy alone."""
    if values.device.type != "cuda":
        return lambda: values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> torch.Tensor:
        done.synchronize()
        return copy

    return wait


@final
class Reports:
    """Publish a run's records and notes through the reporters of one rank; an error of a reporter ends no training."""

    def __init__(self, reporters: Sequence[Reporter], meter: Meter) -> None:
        self.reporters, self.meter, self.tokens = tuple(reporters), meter, 0
        self.values: dict[str, float] = {}
        self._counts_steps, self._failed = False, set[int]()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        metrics = {name: value for name, value in self.values.items() if name.startswith(("train/", "val/", "eval/"))}
        return {"tokens": self.tokens, "metrics": metrics}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, without what was measured since the last report."""
        self.tokens, self.values = state["tokens"], dict(state["metrics"])
        self.meter.forget()

    def count(self, tokens: int | None) -> None:
        """Count the tokens of a step, where they are known before its record is read; None: they are not."""
        if tokens is not None:
            self.tokens, self._counts_steps = self.tokens + tokens, True

    def read(self) -> dict[str, float] | None:
        """Return the record that the meter has summed, with the tokens of the whole run; None: it was read."""
        record = self.meter.read()
        if record is not None:
            self.tokens += 0 if self._counts_steps else int(record["tokens"])
            record["tokens"] = self.tokens
        return record

    def forget(self, prefixes: Sequence[str]) -> None:
        """Drop the values whose names begin so."""
        self.values = {name: value for name, value in self.values.items() if not name.startswith(tuple(prefixes))}

    def publish(self, record: Mapping[str, float]) -> None:
        """Send a record."""
        self.values |= record
        self._send(lambda reporter: reporter.report(record))

    def digest(self, par: Parallelized, step: int, every: int | None) -> None:
        """Send a digest of the weights where one is due: every so many steps. Collective."""
        if every is not None and step % every == 0:
            with self.meter.paused():
                self.publish({"step": step, DIGEST: par.digest()})

    def note(self, text: str) -> None:
        """Send a line of text."""
        self._send(lambda reporter: reporter.note(text))

    def _send(self, act: Callable[[Reporter], object]) -> None:
        for reporter in self.reporters:
            try:
                act(reporter)
            except Exception as error:  # noqa: BLE001 - the other ranks have no reporters, and train on
                if id(reporter) not in self._failed:
                    log.warning("%s raised %s; training continues", type(reporter).__name__, brief(error))
                self._failed.add(id(reporter))
