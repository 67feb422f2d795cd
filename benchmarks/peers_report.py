"""The table and the drawing of what benchmarks/peers.py measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOKENS = 512  # of a data rank in a step
AGREE = 1e-4
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
COLOURS = {"torch by hand": "#888888", "meshpar": "#d62728"}
WIDTH, ROW, LEFT, SPAN = 760, 17, 250, 430


def table(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a plan's table, in Markdown."""
    data_ranks = result["ranks"] // (2 if "TP" in result["plan"] else 1)
    yield f"**{result['plan']}**"
    yield ""
    yield (
        "| | step, ms | tokens/s | of torch by hand (middle half of the rounds) | peak MiB a rank | start to first "
        "step, s | parameters here | loss |"
    )
    yield "|---|---:|---:|---|---:|---:|---:|---|"
    for name, one in result["peers"].items():
        if "error" in one:
            yield f"| {name} | | | does not run: {_short(one['error'])} | | | | |"
            continue
        step = statistics.median(one["seconds"])
        ratios = one.get("ratios", [])
        ratio = "{1:.3f} ({0:.3f} to {2:.3f})".format(*_quarters(ratios)) if ratios else ""
        startup = statistics.median(one["startups"])
        held = f"{one['share']:.0%}" + ("" if one["split"] else ", not sharded")
        note = f" ({_short(one['note'])})" if one["note"] else ""
        loss = "" if "apart" not in one else "equal" if one["apart"] <= AGREE else f"differs by {one['apart']:.1e}"
        yield (
            f"| {name}{note} | {step * 1e3:.1f} | {TOKENS * data_ranks / step:,.0f} | {ratio} | "
            f"{one['rss'] / 2**20:.0f} | {startup:.1f} | {held} | {loss} |"
        )
    yield ""


def write(source: Path, page: Path, drawing: Path) -> None:
    """Put the tables into ``page``, between its marks, and draw ``drawing``."""
    known = json.loads(source.read_text())
    lines, machine = list[str](), None
    for result in known["plans"].values():
        if result["machine"] != machine:
            machine = result["machine"]
            versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("cpu", "date"))
            lines += [f"Measured {machine['date']} on {machine['cpu']}; {versions}.", ""]
        lines += table(result)
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"{END}{after}")
    drawing.write_text(draw(known["plans"]))


def draw(plans: dict[str, Any]) -> str:
    """Return bars of each peer's step relative to torch by hand, with the middle half of the rounds."""
    rows: list[tuple[str, str, list[float]]] = []
    for plan, result in plans.items():
        rows.append(("plan", plan, []))
        rows += [
            ("peer", name, one["ratios"]) for name, one in result["peers"].items() if "ratios" in one and one["split"]
        ]
    most = max((_quarters(ratios)[-1] for _, _, ratios in rows if ratios), default=1.0)
    scale = SPAN / most
    height = ROW * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<line x1="{LEFT + scale:.1f}" y1="8" x2="{LEFT + scale:.1f}" y2="{height - 30}" '
        'stroke="#888" stroke-dasharray="4"/>',
    ]
    for place, (kind, name, ratios) in enumerate(rows):
        y = 12 + ROW * place
        if kind == "plan":
            parts.append(f'<text x="12" y="{y + 9}" font-weight="bold">{name}</text>')
            continue
        lower, middle, upper = _quarters(ratios)
        low, high = LEFT + lower * scale, LEFT + upper * scale
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 9}" text-anchor="end">{name}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{middle * scale:.1f}" height="{ROW - 6}" '
            f'fill="{COLOURS.get(name, "#9ecae1")}"/>',
            f'<line x1="{low:.1f}" y1="{y + 5}" x2="{high:.1f}" y2="{y + 5}" stroke="#333"/>',
            f'<text x="{max(high, LEFT + middle * scale) + 6:.1f}" y="{y + 9}" fill="#555">{middle:.2f}</text>',
        ]
    parts.append(
        f'<text x="{WIDTH / 2}" y="{height - 8}" text-anchor="middle" fill="#555">'
        "seconds of a step, torch by hand = 1; line: middle half of the rounds; peers that shard</text></svg>"
    )
    return "\n".join(parts) + "\n"


def _quarters(ratios: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    lower, middle, upper = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return lower, middle, upper


def _short(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line.replace("|", "/")[:200]
