"""A forecast: what it holds, its text and its JSON, and how far a job's first steps are from it."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

from meshpar.core.mesh import MeshSpec
from meshpar.forecasting.cost import ERROR_RANGE, Cost, placement, sending_time
from meshpar.forecasting.hardware import Hardware, Verdict, reserved_range
from meshpar.forecasting.lints import Lint
from meshpar.forecasting.step import Batch
from meshpar.forecasting.trace import Collective, StepMemory, Trace
from meshpar.process.imports import need

if TYPE_CHECKING:
    from rich.table import Table

GIB = 1 << 30
_WIDTH = 118
MEMORY_RANGE = 0.10
"""Part of the forecast's peak by which a device's count may differ: fragments, activations saved by compilation."""


def with_unit(count: int) -> str:
    """Return a number of parameters with its unit: ``8.03B``, ``124.44M``, ``12.35K``."""
    unit, size = next(((unit, size) for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)) if count >= size), ("", 1))
    return f"{count / size:.2f}{unit}" if unit else str(count)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Report the forecast of a plan; ``str()`` returns the report.

    Attributes:
        title: the model, the plan and the ranks.
        mesh: axis -> size.
        hardware: the hardware profile.
        batch: the batch of a data rank.
        world_size: number of ranks.
        trace: trace of the rank with the most memory; ``trace.stages`` has those of all stages.
        memory: memory of this rank over the step.
        cost: time of the step.
        lints: avoidable costs, the largest first.
        replayed: ``"all"``: every block was replayed; ``"probes"``: a few blocks.
    """

    title: str
    mesh: MeshSpec
    hardware: Hardware
    batch: Batch
    world_size: int
    trace: Trace
    memory: StepMemory
    cost: Cost
    lints: tuple[Lint, ...]
    replayed: str

    @property
    def verdict(self) -> Verdict:
        """``fits``, ``may fit`` or ``does not fit``: the device memory compared with what an allocator reserves."""
        return self.hardware.verdict(self.memory.peak)

    @property
    def fits(self) -> bool:
        """The device memory has room for the most that an allocator reserves."""
        return self.verdict == "fits"

    @property
    def seconds(self) -> tuple[float, float]:
        """Least and most seconds of the step."""
        return self.cost.seconds * (1 - ERROR_RANGE), self.cost.seconds * (1 + ERROR_RANGE)

    def __str__(self) -> str:
        return text(self)


def text(forecast: Forecast) -> str:
    """Return the report of one forecast for a terminal."""
    screen = need("rich.console").Console(file=io.StringIO(), width=_WIDTH, force_terminal=False)
    screen.print(forecast.title, highlight=False)
    how = "every block replayed" if forecast.replayed == "all" else "extrapolated from a few blocks"
    verdict = forecast.verdict if forecast.fits else forecast.verdict.upper()
    peak = f"peak {forecast.memory.peak / GIB:.2f} GiB ({how}), {reserved_text(forecast)}: {verdict}"
    screen.print(peak, highlight=False)
    screen.print(_memory(forecast))
    screen.print(_collectives(forecast))
    screen.print(_time(forecast))
    if forecast.trace.stages:
        screen.print(_stages(forecast))
    for lint in forecast.lints:
        price = f"{lint.seconds * 1e3:,.1f} ms" if lint.seconds else f"{lint.size / GIB:,.2f} GiB"
        screen.print(f"- {lint.name} ({price}): {lint.text}", highlight=False, markup=False)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def as_data(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast as JSON-able data; sizes in bytes, times in seconds."""
    trace, timed, memory = forecast.trace, forecast.cost, forecast.memory
    reserved, speed = list(reserved_range(memory.peak)), timed.tokens_per_second
    step = {"seconds": timed.seconds, "range": list(forecast.seconds), "tokens_per_second": speed}
    step |= {"tokens_per_second_per_rank": speed / forecast.world_size, "mfu": timed.mfu, "idle": timed.idle}
    step |= {"computing": dict(timed.computing), "exposed": dict(timed.exposed)}
    lints = [asdict(lint) for lint in forecast.lints]
    return {
        "title": forecast.title,
        "mesh": dict(forecast.mesh.axes),
        "world_size": forecast.world_size,
        "hardware": forecast.hardware.name,
        "batch": {name: getattr(forecast.batch, name) for name in ("sequence", "micro_batch", "accumulate")},
        "replayed": forecast.replayed,
        "parameters": trace.parameters,
        "rank_bytes": dict(trace.exact),
        "fits": forecast.fits,
        "verdict": forecast.verdict,
        "peak": {"bytes": memory.peak, "held": dict(memory.held), "event": memory.event, "reserved": reserved},
        "memory": {"bytes": forecast.hardware.memory, "reserved": forecast.hardware.reserved},
        "collectives": rows(forecast),
        "stages": stage_rows(forecast),
        "flops": {"all": trace.flops(), "without_recomputation": trace.flops(recomputed=False)},
        "step": step,
        "lints": [{"bytes": lint.pop("size"), **lint} for lint in lints],
    }


def rows(forecast: Forecast) -> list[dict[str, Any]]:
    """Return like collectives joined: phase, kind, axis, how many, bytes of each, where, and their seconds together."""
    data = []
    for (phase, sent), count in Counter(forecast.trace.collectives()).items():
        seconds = count * sending_time(sent, forecast.hardware)
        row = {"phase": phase, "kind": sent.kind, "axis": sent.axis, "ranks": sent.ranks, "count": count}
        row |= {"bytes": sent.size, "dtype": sent.dtype, "where": _where(sent, forecast), "seconds": seconds}
        data.append(row)
    return data


def stage_rows(forecast: Forecast) -> list[dict[str, Any]]:
    """Return what each stage holds, computes, sends and waits for (``waiting``: the bubble); none without stages."""
    stages = list[dict[str, Any]]()
    for trace, timed in zip(forecast.trace.stages, forecast.cost.stages, strict=True):
        messages, memory = [sent for _, sent in trace.collectives() if sent.peer >= 0], trace.memory()
        row: dict[str, Any] = {"blocks": trace.depth, "bytes": memory.peak, "micro_batches": trace.live()}
        row["activations"] = memory.held.get("activations", 0)
        row["sent"] = sum(message.size for message in messages if message.kind == "send")
        row["computing"] = sum(timed.computing.values())
        row["waiting"] = timed.exposed.get(messages[0].axis, 0.0)
        stages.append(row)
    return stages


def _stages(forecast: Forecast) -> Table:
    """Return a row for each stage, with marks at the fullest and at the one that computes for longest."""
    data, seconds = stage_rows(forecast), forecast.cost.seconds
    idle = sum(row["waiting"] for row in data) / len(data) / seconds
    largest = {
        "fullest": max(data, key=lambda row: row["bytes"]),
        "slowest": max(data, key=lambda row: row["computing"]),
    }
    lines = (
        f"{stage}|{row['blocks']}|{row['bytes'] / GIB:.3f}|{row['activations'] / GIB:.3f}|{row['micro_batches']}|"
        f"{row['sent'] / 2**20:,.3f}|{row['computing'] * 1e3:,.1f}|{row['waiting'] * 1e3:,.1f}|"
        f"{', '.join(word for word, marked in largest.items() if row is marked)}"
        for stage, row in enumerate(data)
    )
    columns = ">stage|>blocks|>peak GiB|>activations GiB|>of micro-batches|>sent MiB|>ms|>waits ms|"
    return _table(f"Stages: one waits for another for {idle:.1%} of a step on average", columns, lines)


def _where(sent: Collective, forecast: Forecast) -> str:
    on_node, nodes = placement(sent, forecast.hardware)
    return "in a node" if nodes == 1 else f"{nodes} nodes" if on_node == 1 else f"{nodes} nodes of {on_node}"


def reserved_text(forecast: Forecast) -> str:
    """Return the memory that an allocator reserves, and how much there is."""
    least, largest = (f"{size / GIB:.1f}" for size in reserved_range(forecast.memory.peak))
    return f"for which an allocator reserves {least} to {largest} GiB of {forecast.hardware.room / GIB:.1f}"


def _table(title: str, columns: str, lines: Iterable[str]) -> Table:
    """Return a table of what is between bars; a column with ``>`` is aligned to the right."""
    names = columns.split("|")
    table: Table = need("rich.table").Table(title=title, title_justify="left", show_header=any(names))
    for name in names:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    for line in lines:
        table.add_row(*line.split("|"))
    return table


def _memory(forecast: Forecast) -> Table:
    peak, holders = forecast.memory.peak, sorted(forecast.memory.held.items(), key=lambda item: -item[1])
    lines = (
        f"{name}|{size / GIB:.3f}|{'█' * round(50 * size / peak)}" for name, size in holders if size >= 1e-4 * peak
    )
    return _table("Memory of the fullest rank at its peak", "held by|>GiB|", lines)


def _collectives(forecast: Forecast) -> Table:
    lines = (
        f"{row['phase']}|{row['kind']}|{row['axis']}={row['ranks']}|{row['count']:,}|"
        f"{format(row['bytes'] / 2**20, ',.3f') if row['bytes'] > 1024 else '< 0.001'}|"
        f"{row['dtype']}|{row['where']}|{row['seconds'] * 1e3:,.2f}"
        for row in rows(forecast)
    )
    return _table("Collectives of a step", "phase|kind|axis|>count|>MiB each|dtype|where|>ms together", lines)


def _time(forecast: Forecast) -> Table:
    timed, (least, slowest) = forecast.cost, (seconds * 1e3 for seconds in forecast.seconds)
    model, done = (forecast.trace.flops(recomputed=recomputed) / 1e12 for recomputed in (False, True))
    again = f"; {done:,.2f} TFLOP with recomputation" if done > model else ""
    figures = {
        "step": f"{timed.seconds * 1e3:,.1f} ms, {least:,.1f} to {slowest:,.1f} (± {ERROR_RANGE:.0%})",
        "tokens/s": f"{timed.tokens_per_second:,.0f}, {timed.tokens_per_second / forecast.world_size:,.0f} a rank",
        "MFU": f"{timed.mfu:.1%} ({model:,.2f} TFLOP a rank{again})",
    }
    figures |= {f"computing: {kind}": f"{seconds * 1e3:,.1f} ms" for kind, seconds in timed.computing.items()}
    figures |= {f"waiting for {axis}": f"{seconds * 1e3:,.1f} ms" for axis, seconds in timed.exposed.items()}
    figures |= {"waiting for the host": f"{timed.idle * 1e3:,.1f} ms"} if timed.idle > 0 else {}
    lines = (f"{name}|{figure}" for name, figure in figures.items())
    return _table("Time of a step", "|", lines)


class Feedback(NamedTuple):
    """Forecast against measured: lines to print, and warnings where they differ by more than the forecast allows."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]


def feedback(forecast: Forecast, *, peak: int | None, seconds: float) -> Feedback:
    """Compare a forecast with the fullest rank's peak bytes (None: not counted) and the seconds of a warm step."""
    planned, warnings = forecast.cost.seconds, []
    times = seconds / planned
    lines = [f"step: forecast {planned * 1e3:,.1f} ms, measured {seconds * 1e3:,.1f} ms ({times - 1:+.1%})"]
    if abs(times - 1) > ERROR_RANGE:
        slower = "the profile is of another machine, the data loader delays the step, or a link is slow"
        cause = slower if seconds > planned else "the profile is of a slower machine"
        warnings.append(f"a step takes {times:.2f} times the forecast for {forecast.hardware.name}: {cause}")
    if peak is not None:
        expected, times = forecast.memory.peak, peak / forecast.memory.peak
        sizes = f"forecast {expected / GIB:,.2f} GiB, measured {peak / GIB:,.2f} GiB"
        lines.append(f"peak memory: {sizes} ({times - 1:+.1%})")
        if abs(times - 1) > MEMORY_RANGE:
            cause = "the model or its batch differs from the plan"
            warnings.append(f"peak memory is {times:.2f} times the forecast: {cause}")
    return Feedback(lines=tuple(lines), warnings=tuple(warnings))
