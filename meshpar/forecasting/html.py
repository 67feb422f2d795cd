"""A forecast as one HTML file that needs no network: drawings are inline SVG, colours are the page's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from meshpar.forecasting.cost import ERROR_RANGE
from meshpar.forecasting.hardware import reserved_range
from meshpar.forecasting.ranking import Ranking, group_title
from meshpar.forecasting.report import GIB, Forecast, reserved_text, rows, with_unit
from meshpar.forecasting.trace import HELD
from meshpar.state.drawing import mesh_svg

_HUES = ("#2f5d8a", "#4f8fc0", "#123a5e", "#8aa6bd", "#c9d3db", "#e0a030", "#5aa469", "#93c47d", "#b5544d", "#a89bb9")
_COLOURS = dict(zip(HELD, _HUES, strict=True))
_LANES = {"compute": "#2f5d8a", "gather": "#e0a030", "gather-copy": "#f0cf8f"}
_LANES |= {"reduce": "#b5544d", "replicate": "#8e5ea2"}
_BOXES = {"forward": "#2f5d8a", "backward": "#5aa469"}
_WIDTH, _POINTS, _SHOWN = 1000, 700, 20


def page(forecasts: Sequence[Forecast], ranking: Ranking | None = None) -> str:
    """Return the page: the first forecast in full, the memory of all side by side, and what a search found."""
    first = forecasts[0]
    exposed = [f"{axis} {_time(seconds)}" for axis, seconds in first.cost.exposed.items() if seconds > 5e-5]
    waits = f"<small>compute waits for: {', '.join(exposed) or 'nothing'}. Below, a few blocks of backward:</small>"
    backward = [span for span in first.cost.spans if span.phase == "backward"]
    start, end = (backward[0].start, backward[-1].end) if backward else (0.0, first.cost.seconds)
    middle, width = (start + end) / 2, 3 * (end - start) / max(3, first.trace.depth)  # of three blocks
    whole = _timeline(first, 0.0, first.cost.seconds)
    sections = {
        "Memory of the fullest rank at its peak": _stacks(forecasts),
        "Memory over the step": _curve(first),
        "Streams over the step": whole + waits + _timeline(first, middle - width / 2, middle + width / 2),
        "Schedule of the stages": _schedule(first) if first.trace.stages else "",
        "Mesh": _mesh(first),
        "Collectives of a step": _collectives(first),
        "What would help": _lints(first),
        "Settings that fit or may fit": "" if ranking is None else _ranking(ranking),
    }
    body = "".join(f"<h2>{title}</h2>{section}" for title, section in sections.items() if section)
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>meshpar plan</title><style>{_STYLE}</style>"
    return f"{head}<body><h1>{escape(first.title)}</h1>{_figures(first)}{body}</body></html>"


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1040px;margin:32px auto;padding:0 20px;color:#1d2a35;background:#fff}
h1{font-size:19px;font-weight:600;margin:0 0 12px}h2{font-size:16px;margin:32px 0 8px}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
td,th{padding:3px 14px 3px 0;text-align:left;
border-bottom:1px solid #e3e8ec}td.n,th.n{text-align:right}
.f{display:flex;gap:28px;flex-wrap:wrap}.f div{min-width:110px}
.f b{display:block;font-size:22px;font-weight:600}.f span,small,.k{color:#5b6b78;font-size:13px}.bad{color:#b5544d}
.k i{display:inline-block;width:11px;height:11px;margin:0 5px 0 14px;border-radius:2px;vertical-align:-1px}
svg{display:block;max-width:100%;height:auto}text{font:12px system-ui,sans-serif;fill:#5b6b78}"""


def _figures(forecast: Forecast) -> str:
    timed = forecast.cost
    least, slowest = forecast.seconds
    verdict = "fits" if forecast.fits else f"<span class=bad>{forecast.verdict}</span>"
    figures = [
        (f"{forecast.memory.peak / GIB:.2f} GiB", f"peak, {reserved_text(forecast)}: {verdict}"),
        (_time(timed.seconds), f"step, {_time(least)} to {_time(slowest)} (± {ERROR_RANGE:.0%})"),
        (f"{timed.tokens_per_second:,.0f}", f"tokens/s, {timed.tokens_per_second / forecast.world_size:,.0f} a rank"),
        (f"{timed.mfu:.1%}", "MFU"),
    ]
    exact = f"parameters, {forecast.trace.exact['parameters'] / GIB:.3f} GiB of them a rank"
    figures.append((with_unit(forecast.trace.parameters), exact))
    cells = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in figures)
    return f"<div class=f>{cells}</div>"


def _stacks(forecasts: Sequence[Forecast]) -> str:
    """Draw one bar for each plan, cut by what holds the memory."""
    room = forecasts[0].hardware.room
    largest = max([room, *(forecast.memory.peak for forecast in forecasts)])
    scale, drawn = 900 / largest, []
    for number, forecast in enumerate(forecasts):
        top, x = number * 46, 0.0
        speed = f"{forecast.cost.tokens_per_second:,.0f} tokens/s"
        said = f"{forecast.mesh}, micro-batch {forecast.batch.micro_batch}, {speed}"
        drawn.append(f"<text x=0 y={top + 12}>{escape(said)}</text>")
        for name in HELD:
            size = forecast.memory.held.get(name, 0)
            title = f"<title>{name}: {size / GIB:.2f} GiB</title>"
            drawn.append(
                f"<rect x={x:.1f} y={top + 17} width={size * scale:.1f} height=20 fill={_COLOURS[name]}>{title}</rect>"
            )
            x += size * scale
        drawn.append(f"<text x={x + 6:.1f} y={top + 32}>{forecast.memory.peak / GIB:.1f} GiB</text>")
    height = len(forecasts) * 46
    drawn.append(
        f'<line x1={room * scale:.1f} x2={room * scale:.1f} y1=0 y2={height} stroke="#b5544d" stroke-dasharray="4 3"/>'
    )
    names = [name for name in HELD if any(forecast.memory.held.get(name) for forecast in forecasts)]
    keys = f"<div class=k>{_keys(_COLOURS, names)}; dashed: what tensors can have</div>"
    return f"<svg viewBox='0 0 {_WIDTH} {height}'>{''.join(drawn)}</svg>{keys}"


def _keys(colours: Mapping[str, str], names: Iterable[str]) -> str:
    return "".join(f'<i style="background:{colours[name]}"></i>{name}' for name in names)


def _curve(forecast: Forecast) -> str:
    """Draw what is held over the step, the highest of each stretch of time, with the phases beneath."""
    ends, curve = forecast.cost.ends, forecast.memory.curve[1:]
    total, peak = forecast.cost.seconds, forecast.memory.peak
    highest = [0] * (_POINTS + 1)
    issued = 0.0
    for end, size in zip(ends, curve, strict=True):
        issued = max(issued, end)
        at = min(_POINTS, int(issued / total * _POINTS))
        highest[at] = max(highest[at], size)
    points, last = [f"0,{200 - 190 * forecast.memory.curve[0] / peak:.1f}"], forecast.memory.curve[0]
    for at, size in enumerate(highest):
        last = size or last
        points.append(f"{at * _WIDTH / _POINTS:.1f},{200 - 190 * last / peak:.1f}")
    area = f"<polygon points='0,200 {' '.join(points)} {_WIDTH},200' fill='#4f8fc0' fill-opacity=.35 stroke='#2f5d8a'/>"
    phases, first = "", 0
    for phase in forecast.trace.phases:
        x = f"{(ends[first - 1] if first else 0.0) * _WIDTH / total:.0f}"
        first += len(phase.events)
        if phase.name not in ("start", "optimizer"):
            line = f'<line x1={x} x2={x} y1=0 y2=204 stroke="#c9d3db"/>'
            phases += f"<text x={x} y=216>{phase.name}</text>{line}"
    return f"<svg viewBox='0 0 {_WIDTH} 222'>{area}{phases}<text x=4 y=14>{peak / GIB:.2f} GiB</text></svg>"


def _timeline(forecast: Forecast, start: float, end: float) -> str:
    """Draw what each stream does from ``start`` to ``end``; spans that touch are one."""
    scale = 880 / (end - start)
    lanes: dict[str, list[tuple[float, float, str]]] = {span.lane: [] for span in forecast.cost.spans}
    for span in forecast.cost.spans:
        if span.end <= start or span.start >= end:
            continue
        x = (max(span.start, start) - start) * scale
        width = (min(span.end, end) - start) * scale - x
        drawn = lanes[span.lane]
        if drawn and x - (drawn[-1][0] + drawn[-1][1]) < 0.4:
            drawn[-1] = (drawn[-1][0], x + width - drawn[-1][0], drawn[-1][2])
        else:
            drawn.append((x, width, span.name))
    parts = []
    for number, (name, drawn) in enumerate(lanes.items()):
        top, colour = number * 26, _LANES.get(name, "#5aa469")
        parts.append(f"<text x=0 y={top + 15}>{escape(name)}</text>")
        for x, width, what in drawn:
            box = f"<rect x={120 + x:.1f} y={top + 3} width={max(width, 0.3):.1f} height=17 fill={colour}>"
            parts.append(f"{box}<title>{escape(what)}</title></rect>")
    return f"<svg viewBox='0 0 {_WIDTH} {len(lanes) * 26 + 6}'>{''.join(parts)}</svg>"


def _schedule(forecast: Forecast) -> str:
    """Draw a row for each stage, with a box for each forward and backward of a micro-batch."""
    scale, parts = 930 / forecast.cost.seconds, []
    for stage, (trace, timed) in enumerate(zip(forecast.trace.stages, forecast.cost.stages, strict=True)):
        at, numbers, top = 0, Counter[str](), stage * 30
        parts.append(f"<text x=0 y={top + 18}>stage {stage}</text>")
        for phase in trace.phases:
            kinds = ["" if event.collective is None else event.collective.kind for event in phase.events]
            ends, start = timed.ends[at : at + len(kinds)], timed.ends[at - 1] if at else 0.0
            at += len(kinds)
            if phase.name not in _BOXES or not ends:
                continue
            begun = [end for end, kind in zip(ends, kinds) if kind == "recv"]
            done = max([start, *(end for end, kind in zip(ends, kinds) if kind not in ("send", "broadcast"))])
            x, width = (begun[-1] if begun else start) * scale, (done - (begun[-1] if begun else start)) * scale
            number = str(numbers[phase.name]) if numbers[phase.name] < forecast.batch.accumulate else ""
            numbers[phase.name] += 1
            parts.append(
                f"<rect x={70 + x:.1f} y={top + 3} width={max(width, 0.3):.1f} height=22 stroke=#fff "
                f"fill={_BOXES[phase.name]}><title>{phase.name} {number}</title></rect>"
            )
            if width > 12:
                parts.append(f"<text x={70 + x + width / 2 - 3:.1f} y={top + 18} style='fill:#fff'>{number}</text>")
    keys = f"<div class=k>{_keys(_BOXES, _BOXES)}</div>"
    return f"<svg viewBox='0 0 {_WIDTH} {stage * 30 + 34}'>{''.join(parts)}</svg>{keys}"


def _mesh(forecast: Forecast) -> str:
    """Draw where the ranks sit, axis by axis."""
    node = min(forecast.hardware.node, forecast.world_size)
    if forecast.world_size % node:
        return f"<small>{escape(str(forecast.mesh))} does not fill nodes of {node}</small>"
    return (
        f"{mesh_svg(forecast.mesh, node)}<small>One colour: a group of the axis. Red: it crosses the network.</small>"
    )


def _collectives(forecast: Forecast) -> str:
    head = "<th>phase<th>kind<th>axis<th class=n>count<th class=n>MiB each<th>dtype<th>where<th class=n>ms together"
    body = ""
    for row in rows(forecast):
        sizes = f"<td class=n>{row['count']:,}<td class=n>{row['bytes'] / 2**20:,.3f}<td>{row['dtype']}"
        where = f"<td>{row['where']}<td class=n>{row['seconds'] * 1e3:,.2f}"
        body += f"<tr><td>{row['phase']}<td>{row['kind']}<td>{row['axis']}={row['ranks']}{sizes}{where}</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _lints(forecast: Forecast) -> str:
    items = ""
    for lint in forecast.lints:
        price = _time(lint.seconds) if lint.seconds else f"{lint.size / GIB:.2f} GiB"
        items += f"<li><b>{lint.name}</b>, {price}: {escape(lint.text)}</li>"
    return f"<ul>{items}</ul>" if items else "<p>Nothing was found.</p>"


def _ranking(ranking: Ranking) -> str:
    head = "<tr><th>settings<th class=n>tokens/s<th class=n>peak GiB<th class=n>reserved GiB<th></tr>"
    body = ""
    for number, group in enumerate(ranking.groups[:3]):
        body += f"<tr><th colspan=5>{escape(group_title(ranking.groups, number))}</tr>"
        for candidate in group[:_SHOWN]:
            least, largest = (size / GIB for size in reserved_range(candidate.peak))
            speed = f"<td class=n>{candidate.tokens_per_second:,.0f}<td class=n>{candidate.peak / GIB:.1f}"
            room = f"<td class=n>{least:.0f} to {largest:.0f}<td>{candidate.verdict}"
            body += f"<tr><td>{escape(str(candidate.settings))}{speed}{room}</tr>"
    closest = sorted(ranking.out, key=lambda candidate: candidate.peak)[:_SHOWN]
    out = "".join(f"<tr><td>{escape(str(lost.settings))}<td>{escape(lost.problem)}</tr>" for lost in closest)
    rest = f"<h2>Settings that do not ({len(ranking.out)}), the nearest to fitting first</h2><table>{out}</table>"
    return f"<table>{head}{body}</table>{rest if out else ''}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
