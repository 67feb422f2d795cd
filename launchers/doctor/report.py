"""Where the axes of a mesh lie on hosts and what that costs, and a report as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from meshpar.core.mesh import MeshSpec
from meshpar.launchers.doctor.checks import Facts, Finding
from meshpar.launchers.doctor.examine import Report, summary
from meshpar.state.drawing import table


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSpan:
    """One axis of a mesh on hosts.

    Attributes:
        axis, size: name and size of the axis.
        groups: the ranks of each group.
        hosts: the hosts of each group.
    """

    axis: str
    size: int
    groups: tuple[tuple[int, ...], ...]
    hosts: tuple[tuple[str, ...], ...]

    @property
    def most(self) -> int:
        """The number of hosts that the widest group spans."""
        return max(len(host) for host in self.hosts)


def spans(spec: MeshSpec, hosts: Sequence[str]) -> list[AxisSpan]:
    """Return the hosts of each axis of size > 1; ``hosts`` has each rank's host."""
    found = []
    for axis, size in spec.axes.items():
        if size > 1:
            groups = spec.groups(axis)
            on = tuple(tuple(dict.fromkeys(hosts[rank] for rank in group)) for group in groups)
            found.append(AxisSpan(axis=axis, size=size, groups=tuple(groups), hosts=on))
    return found


def placement_findings(spec: MeshSpec, hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield each axis that spans hosts but should not: tp, ep, cp always, dp_shard under dp_replicate."""
    names = list(dict.fromkeys(hosts))
    if len(names) < 2:
        return
    smallest = min(hosts.count(name) for name in names)
    should = [axis for axis in ("dp_shard", "cp", "ep", "tp") if spec.axes.get(axis, 1) > 1]
    if spec.axes.get("dp_replicate", 1) == 1 and "dp_shard" in should:
        should.remove("dp_shard")  # shards over all ranks: a choice, with a price
    for span in spans(spec, hosts):
        if span.axis not in should or span.most == 1:
            continue
        inner = math.prod(
            size for axis, size in spec.axes.items() if list(spec.axes).index(axis) >= list(spec.axes).index(span.axis)
        )
        worst = next(place for place, host in enumerate(span.hosts) if len(host) == span.most)
        group = ", ".join(f"{rank} ({hosts[rank]})" for rank in span.groups[worst][:8])
        if inner > smallest:
            do = f"make {span.axis} and the axes inside it at most {smallest} together: a host has no more ranks"
        else:
            do = (
                "number the ranks host by host: --node-rank in the order of the hosts, all ranks of a host in one "
                "launcher " + ("(SLURM: --distribution=block)")
            )
        yield Finding(
            what=f"axis {span.axis} (size {span.size}) should be inside a host and spans {span.most}",
            where=f"{sum(len(host) > 1 for host in span.hosts)} of {len(span.groups)} groups, such as ranks {group}",
            do=do,
        )


def price_of_sharding(spec: MeshSpec, hosts: Sequence[str]) -> str | None:
    """Return a note if hybrid sharding would keep all-gathers inside of a host; None otherwise."""
    names = list(dict.fromkeys(hosts))
    shard = spec.axes.get("dp_shard", 1)
    if len(names) < 2 or shard == 1 or spec.axes.get("dp_replicate", 1) > 1 or shard % len(names):
        return None
    if all(len(host) == 1 for span in spans(spec, hosts) if span.axis == "dp_shard" for host in span.hosts):
        return None
    better = MeshSpec({**spec.axes, "dp_replicate": len(names), "dp_shard": shard // len(names)})
    return (
        f"shards span {len(names)} hosts, so every all-gather crosses them; if the model fits, {better} keeps "
        "all-gathers inside a host"
    )


_ROWS = 64


def report_text(report: Report, spec: MeshSpec) -> str:
    """Return the report as text: ranks, axes, findings."""
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
        [str(fact["rank"]), fact["host"], f"{fact['device']['name']} {fact['device']['kind']}".strip()]
        + [str(spec.coordinates(fact["rank"])[axis]) for axis in axes]
        for fact in facts[:_ROWS]
    ]
    yield from table(head, rows)
    if len(facts) > _ROWS:
        yield f"... and {len(facts) - _ROWS} ranks more"


def _axes(report: Report, spec: MeshSpec) -> Iterator[str]:
    found = spans(spec, [fact["host"] for fact in report.facts])
    if not found:
        return
    yield ""
    rows = [[f"{span.axis}={span.size}", "one host" if span.most == 1 else f"{span.most} hosts"] for span in found]
    yield from table(["axis", "a group spans"], rows)
