"""Metrics of a run: every rank measures, one small all-reduce per report combines, one rank publishes."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from meshpar.core.errors import brief
from meshpar.parallelized import Parallelized
from meshpar.passes.elsewhere import all_parameters
from meshpar.process.accelerators import peak_flops
from meshpar.training.reporters import Reporter

log = logging.getLogger(__name__)


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

    def begin(self, known: Mapping[str, float], more: Mapping[str, torch.Tensor]) -> None:
        """Sum the ranks' values since the last report, and start their copy to the host. Collective: one all-reduce.

        ``known``: further numbers of the record; ``more``: scalars that are equal on every rank, to read with the sums.
        """
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
            further = dict(zip(more, values[len(vector) :], strict=True))
            return {**known, **self._record(widths, values[: len(vector)]), **further}

        self._pending = record

    def read(self) -> dict[str, float] | None:
        """Wait for the values that the last :meth:`begin` summed, and return the record; None: it was read."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending()

    def _record(self, widths: Mapping[str, int], values: list[float]) -> dict[str, float]:
        """Return means over all tokens of all data ranks, tokens a second, MFU and memory (GiB); restart the clock."""
        tokens, *sums = values
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        record = {f"train/{name}": value for name, value in means(widths, sums, tokens).items()}
        record |= {
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "memory_gib": max(sums[sum(widths.values()) :]) / 2**30,
        }
        if self._flops is not None:
            record["mfu"] = tokens / seconds * self._flops
        return record


def _begin_copy(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy ``values`` to the host; return a function that waits for this copy alone."""
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
