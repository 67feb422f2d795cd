"""Metrics of a run: every rank measures, one small all-reduce per report combines, one rank writes; and the peak
speeds of accelerators.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, final

import torch
from torch import nn

from meshpar.losses.token_loss import IGNORE_INDEX
from meshpar.passes.elsewhere import all_parameters
from meshpar.process.leftovers import write_durably

log = logging.getLogger(__name__)

_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float8": 1979e12}

PEAK_FLOPS: Mapping[str, Mapping[str, float]] = {
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "A10": {"bfloat16": 125e12},
    "A10G": {"bfloat16": 70e12},
    "A30": {"bfloat16": 165e12},
    "A40": {"bfloat16": 149.7e12},
    "L4": {"bfloat16": 121e12},
    "L40": {"bfloat16": 181e12},
    "L40S": {"bfloat16": 362e12},
    "H100": _HOPPER,
    "H100 PCIe": {"bfloat16": 756e12},
    "H100 NVL": {"bfloat16": 835e12},
    "H200": _HOPPER,
    "GH200": _HOPPER,
    "B200": {"bfloat16": 2250e12, "float16": 2250e12, "float32": 80e12, "float8": 4500e12},
    "RTX 3090": {"bfloat16": 71e12},
    "RTX 4090": {"bfloat16": 165.2e12},
    "MI250X": {"bfloat16": 383e12},
    "MI300X": {"bfloat16": 1307.4e12},
    "MI325X": {"bfloat16": 1307.4e12},
}
"""Name -> dtype -> FLOP/s of one device, dense with float32 accumulation, from the vendors' data sheets."""
Metrics = Mapping[str, float]
Ended = Literal["complete", "stopped", "failed"]
"""How a run ended: with all its steps, by a stop request, after which it can be resumed, or by an error."""


def peak_flops(device: torch.device) -> float | None:
    """Return the device's bfloat16 peak in FLOP/s, by the longest name that matches; None if unknown, as for a CPU."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    fitting = [name for name in PEAK_FLOPS if set(name.split()) <= set(words)]
    return PEAK_FLOPS[max(fitting, key=len)]["bfloat16"] if fitting else None


def flops_per_token(module: nn.Module) -> float:
    """Return the training FLOPs of a token as 6 x parameters (Kaplan et al., 2020), without those of attention
    itself.
    """
    return 6.0 * sum(parameter.numel() for parameter in all_parameters(module) if parameter.requires_grad)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated memory on an accelerator, resident memory of the process on
    a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Mesh(Protocol):
    """The part of :class:`meshpar.Parallelized` that a meter uses."""

    @property
    def device(self) -> torch.device: ...
    @property
    def loss_rank(self) -> int: ...
    @property
    def loss_size(self) -> int: ...

    def data_sum(self, values: torch.Tensor) -> torch.Tensor: ...


def means(widths: Mapping[str, int], values: Sequence[float], tokens: float) -> dict[str, float]:
    """Return means by name; a name without tokens is left out.

    Args:
        widths: name -> how many of ``values`` it has: 1, a sum over all tokens; 2, a sum and the number of its own
            tokens.
        values: the sums of all ranks, in the order of ``widths``.
        tokens: number of all tokens.
    """
    found, place = dict[str, float](), 0
    for name, width in widths.items():
        count = tokens if width == 1 else values[place + 1]
        found |= {name: values[place] / count} if count else {}
        place += width
    return found


def losses_of(
    names: Sequence[str], losses: Sequence[torch.Tensor], labels_BL: torch.Tensor, source_B: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return ``loss/<name>`` of each source: its summed loss and the number of its tokens, (2,) float32.

    Args:
        names: of the sources.
        losses: of every token, from :func:`meshpar.losses.token_loss.token_losses`; nothing is returned if they are
            not those of all labels, once.
        labels_BL: the labels, -100 where none counts.
        source_B: the number of each sample's source.
    """
    if sum(loss.numel() for loss in losses) != labels_BL.numel():
        return {}
    rows_BL = torch.cat([loss.reshape(-1) for loss in losses]).view(labels_BL.shape)
    rows_B2 = torch.stack([rows_BL.sum(1), (labels_BL != IGNORE_INDEX).sum(1)], 1)
    sums = rows_B2.new_zeros(len(names), 2).index_add_(0, source_B, rows_B2)
    return {f"loss/{name}": total for name, total in zip(names, sums, strict=True)}


@final
class Meter:
    """Accumulate sums on the device between reports; only a report waits for the device."""

    def __init__(self, par: Mesh, *, flops_per_token: float | None = None, world_size: int = 1) -> None:
        """Start the measurement.

        Args:
            par: the parallel module, over whose ranks a report is summed.
            flops_per_token: training FLOPs of a token, for MFU; None: no MFU.
            world_size: number of devices.
        """
        self._par = par
        peak = peak_flops(par.device)
        self._flops = flops_per_token / (peak * world_size) if peak and flops_per_token else None
        self._dtype = torch.float32 if par.device.type == "mps" else torch.float64
        self._tokens, self._sums = 0, dict[str, torch.Tensor]()
        self._start = time.perf_counter()

    def add(self, loss_sum: torch.Tensor, tokens: int, sums: Mapping[str, torch.Tensor]) -> None:
        """Add this rank's values of a step, without waiting for the device."""
        self._tokens += tokens
        for name, value in {"loss": loss_sum, **sums}.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def forget(self) -> None:
        """Drop the values that were added since the last report."""
        self._tokens, self._sums = 0, {}

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

    def begin(self, *more: torch.Tensor) -> Reading:
        """Sum the ranks' values since the last report, and start their copy to the host.

        Collective: every rank calls it. One all-reduce has the sums, and one element for each rank's memory, of which
        the largest counts.

        Args:
            more: scalars that are equal on every rank, to read with the sums.
        """
        par, widths = self._par, {name: total.numel() for name, total in self._sums.items()}
        count = sum(widths.values())
        vector = torch.zeros(1 + count + par.loss_size, dtype=self._dtype, device=par.device)
        vector[0] = self._tokens
        vector[1 : 1 + count] = torch.cat([total.reshape(-1).to(self._dtype) for total in self._sums.values()])
        vector[1 + count + par.loss_rank] = peak_memory(par.device)
        joined = torch.cat([par.data_sum(vector), *(value.reshape(1).to(self._dtype) for value in more)])
        self._tokens, self._sums = 0, {}
        return Reading(self, widths, to_host(joined), len(more))

    def record(self, widths: Mapping[str, int], values: list[float]) -> dict[str, float]:
        """Return means over all tokens of all data ranks, tokens a second, MFU and memory (GiB), and restart the
        clock.
        """
        tokens, *rest = values
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        record = {f"train/{name}": value for name, value in means(widths, rest, tokens).items()}
        record |= {
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "memory_gib": max(rest[sum(widths.values()) :]) / 2**30,
        }
        if self._flops is not None:
            record["mfu"] = tokens / seconds * self._flops
        return record


@final
class Reading:
    """A report that is being copied to the host. Read it after the next step was submitted, so that the device never
    waits.
    """

    def __init__(self, meter: Meter, widths: Mapping[str, int], values: Callable[[], torch.Tensor], more: int) -> None:
        self._meter, self._widths, self._values, self._more = meter, widths, values, more

    def read(self) -> tuple[dict[str, float], list[float]]:
        """Wait for the values and return the record and the additional scalars."""
        values = self._values().tolist()
        cut = len(values) - self._more
        return self._meter.record(self._widths, values[:cut]), values[cut:]


def to_host(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy ``values`` to the host; return a function that waits for this copy, but not for later work of
    the device.
    """
    if values.device.type != "cuda":
        return lambda: values
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> torch.Tensor:
        done.synchronize()
        return there

    return wait


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
        """Open the file to append.

        Lines of steps after ``step``, from a run that ended after its last checkpoint, move to
        ``metrics.abandoned.jsonl`` beside the file. Every line is complete in one of the two files at all times.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _lines(path)
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            with path.with_suffix(".abandoned.jsonl").open("a", encoding="utf-8", errors=_AS_READ) as aside:
                aside.writelines(line for line in lines if _step_of(line) > step)
                os.fsync(aside.fileno())
        if path.is_file() and path.read_bytes() != (written := "".join(kept).encode(errors=_AS_READ)):
            write_durably(path, written)
        self._file = path.open("ab", buffering=0)
        self._unwritten, self._warned = b"", False
        # of a validation that is made again, because the run ended before the checkpoint had its result
        self._step, self._known = step, [_values(line) for line in kept if _step_of(line) == step]

    def report(self, record: Metrics) -> None:
        """Write a line; values that JSON cannot store (nan, inf) become null. Lines that a full disk refuses are
        written with a later one.
        """
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
