"""The hosts that each axis of a mesh spans, and findings on axes that should be inside one host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from meshpar.launchers.doctor.checks import Finding
from meshpar.mesh import MeshSpec


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
        return max(len(each) for each in self.hosts)


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
    """Yield a finding for each axis that spans hosts and should not: tp, ep and cp always, dp_shard beside dp_replicate."""
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
        inner = math.prod(size for axis, size in spec.axes.items() if list(spec.axes).index(axis) >= list(spec.axes).index(span.axis))
        worst = next(place for place, each in enumerate(span.hosts) if len(each) == span.most)
        group = ", ".join(f"{rank} ({hosts[rank]})" for rank in span.groups[worst][:8])
        if inner > smallest:
            do = f"make {span.axis} and the axes inside it at most {smallest} together: a host has no more ranks"
        else:
            do = "number the ranks host by host: --node-rank in the order of the hosts, all ranks of a host in one launcher " + (
                "(SLURM: --distribution=block)"
            )
        yield Finding(
            what=f"axis {span.axis} (size {span.size}) should be inside a host and spans {span.most}",
            where=f"{sum(len(each) > 1 for each in span.hosts)} of {len(span.groups)} groups, such as ranks {group}",
            do=do,
        )


def price_of_sharding(spec: MeshSpec, hosts: Sequence[str]) -> str | None:
    """Return a note if shards span hosts and hybrid sharding would keep their all-gathers inside a host; None otherwise."""
    names = list(dict.fromkeys(hosts))
    shard = spec.axes.get("dp_shard", 1)
    if len(names) < 2 or shard == 1 or spec.axes.get("dp_replicate", 1) > 1 or shard % len(names):
        return None
    if all(len(each) == 1 for span in spans(spec, hosts) if span.axis == "dp_shard" for each in span.hosts):
        return None
    better = MeshSpec({**spec.axes, "dp_replicate": len(names), "dp_shard": shard // len(names)})
    return f"shards span {len(names)} hosts, so every all-gather crosses them; if the model fits, {better} keeps all-gathers inside a host"
