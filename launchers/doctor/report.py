"""Format a report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshpar.launchers.doctor.checks import Facts, Finding
from meshpar.launchers.doctor.examine import Report, summary
from meshpar.launchers.doctor.placement import spans
from meshpar.mesh import MeshSpec

_ROWS = 64


def report_text(report: Report, spec: MeshSpec) -> str:
    """Return the report as text: ranks, axes, speeds, findings."""
    parts = [summary(report.facts), *_versions(report.facts), "", *_ranks(report.facts, spec), *_axes(report, spec), ""]
    parts += [f"note: {note}" for note in report.notes]
    return "\n".join([*parts, findings_text(report.findings)])


def findings_text(findings: Sequence[Finding]) -> str:
    """Return the findings as a numbered list."""
    if not findings:
        return "nothing is wrong"
    return "\n".join(f"{number:>2}. {finding}" for number, finding in enumerate(findings, 1))


def _versions(facts: Sequence[Facts]) -> Iterator[str]:
    first = facts[0]
    yield ", ".join(f"{name} {value}" for name, value in first["versions"].items())
    settings = [f"{name}={value}" for name, value in first["settings"].items()]
    if settings:
        yield f"settings of rank 0: {' '.join(settings)}"
    ports = [f"{port['port']} {port['rate']} ({port['state']})" for port in first["infiniband"]]
    if ports:
        yield f"InfiniBand of {first['host']}: {', '.join(ports)}"


def _ranks(facts: Sequence[Facts], spec: MeshSpec) -> Iterator[str]:
    axes = list(spec.axes)
    head = ["rank", "host", "device", *axes]
    rows = [
        [str(each["rank"]), each["host"], f"{each['device']['name']} {each['device']['kind']}".strip()]
        + [str(spec.coordinates(each["rank"])[axis]) for axis in axes]
        for each in facts[:_ROWS]
    ]
    yield from table(head, rows)
    if len(facts) > _ROWS:
        yield f"... and {len(facts) - _ROWS} ranks more"


def _axes(report: Report, spec: MeshSpec) -> Iterator[str]:
    found = spans(spec, [each["host"] for each in report.facts])
    if not found:
        return
    yield ""
    rows: list[list[str]] = []
    for span in found:
        hosts = "one host" if span.most == 1 else f"{span.most} hosts"
        speeds = [each for each in report.speeds if each.axis == span.axis]
        pair = next((each for each in report.pairs if each.axis == span.axis), None)
        slow = "" if pair is None else f"{pair.first}-{pair.second} {rate_text(pair.rate)}"
        rows += [
            [
                f"{span.axis}={span.size}",
                hosts,
                each.operation,
                size_text(each.bytes),
                f"{each.seconds * 1e3:.2f} ms",
                rate_text(each.bus),
                slow,
            ]
            for each in speeds
        ]
        if not speeds:
            rows.append([f"{span.axis}={span.size}", hosts, "", "", "", "", ""])
    yield from table(["axis", "a group spans", "collective", "bytes", "time", "bus", "slowest pair"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def rate_text(rate: float) -> str:
    """Return bytes a second as GB/s."""
    return f"{rate / 1e9:.3g} GB/s"


def size_text(size: int) -> str:
    """Return a number of bytes in MiB or KiB."""
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"
