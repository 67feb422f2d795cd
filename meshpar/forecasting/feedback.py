"""The forecast held against what a job measures in its first steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from meshpar.forecasting.cost import ERROR_RANGE
from meshpar.forecasting.report import Forecast

MEMORY_RANGE = 0.10
"""Part of the forecast's peak by which a device's own count may differ: its allocator keeps fragments, compilation saves activations."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Forecast against measured.

    Attributes:
        lines: what to print, one line each.
        warnings: where they part by more than the forecast allows for.
    """

    lines: tuple[str, ...]
    warnings: tuple[str, ...]


def feedback(forecast: Forecast, *, peak: int | None, seconds: float) -> Feedback:
    """Hold measurements against the forecast.

    Args:
        forecast: of the job.
        peak: bytes of tensors that the fullest rank allocated at most; None where the device does not count them.
        seconds: of a step, warm.
    """
    planned, lines, warnings = forecast.cost.seconds, [], []
    lines.append(f"step: forecast {planned * 1e3:,.1f} ms, measured {seconds * 1e3:,.1f} ms ({seconds / planned - 1:+.1%})")
    if abs(seconds / planned - 1) > ERROR_RANGE:
        slower = "the profile is another machine's, the data loader holds the step up, or a link is slow"
        cause = slower if seconds > planned else "the profile is of a slower machine"
        warnings.append(f"a step takes {seconds / planned:.2f} times what was forecast for {forecast.hardware.name}: {cause}")
    if peak is not None:
        expected = forecast.memory.peak
        lines.append(f"peak memory: forecast {expected / 2**30:,.2f} GiB, measured {peak / 2**30:,.2f} GiB ({peak / expected - 1:+.1%})")
        if abs(peak / expected - 1) > MEMORY_RANGE:
            warnings.append(f"peak memory is {peak / expected:.2f} times what was forecast: the model or its batch is not what was planned")
    return Feedback(lines=tuple(lines), warnings=tuple(warnings))
