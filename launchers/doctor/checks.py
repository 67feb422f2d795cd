"""Checks of all ranks' facts and of a mesh's placement on hosts, which yield findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from meshpar.core.mesh import MeshSpec

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Settings that may differ between the ranks of a host, and must be alike between hosts."""
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

Facts = Mapping[str, Any]
Found = Sequence[Facts]

GIB = 2**30
CLOCK_S = 2.0
SHM = 1 * GIB
FEW_FILES, FILES, FILES_A_RANK = 1024, 4096, 4
"""Open files that a process needs: with 16 ranks at most, with more, and for each rank of gloo's groups."""


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, the ranks or hosts that have it, and a remedy; ``severs``: until then ranks cannot connect."""

    what: str
    where: str
    do: str
    severs: bool = False

    def __str__(self) -> str:
        return f"{self.what}\n    where: {self.where}\n    do:    {self.do}"


def all_findings(found: Found) -> list[Finding]:
    checks = [_versions, _devices, _settings, _visible, _interfaces, _names, _infiniband, _clocks, _limits]
    return [finding for check in checks for finding in check(found)]


def hosts_of(found: Found) -> list[str]:
    return list(_by_host(found))


def ranks_text(found: Found) -> str:
    """Return ``ranks 0, 1 (n1), 2 (n2)``, shortened if there are many."""
    by_host = {host: [fact["rank"] for fact in members] for host, members in _by_host(found).items()}
    parts = [
        f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''} ({host})"
        for host, ranks in by_host.items()
    ]
    more = f" and {len(parts) - 8} hosts more" if len(parts) > 8 else ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(parts[:8])}{more}"


def _by_host(found: Found) -> dict[str, list[Facts]]:
    return _groups(found, lambda fact: fact["host"])


def _groups(found: Found, of: Callable[[Facts], Any]) -> dict[Any, list[Facts]]:
    groups: dict[Any, list[Facts]] = {}
    for fact in found:
        groups.setdefault(of(fact), []).append(fact)
    return groups


def _differ(found: Found, of: Callable[[Facts], Any]) -> str:
    """Return ``X on ranks ...; Y on ranks ...``; empty if all are equal."""
    texts = [f"{value} on {ranks_text(members)}" for value, members in _groups(found, of).items()]
    return "; ".join(texts) if len(texts) > 1 else ""


def _fact(kind: str, name: str, missing: str | None) -> Callable[[Facts], Any]:
    return lambda fact: fact[kind].get(name, missing)


def _versions(found: Found) -> Iterator[Finding]:
    for name in sorted({name for fact in found for name in fact["versions"]}):
        if where := _differ(found, _fact("versions", name, "none")):
            yield Finding(f"versions of {name} differ", where, f"install the same {name} on every node")


def _devices(found: Found) -> Iterator[Finding]:
    if where := _differ(found, lambda fact: fact["device"]["kind"]):
        yield Finding("devices differ", where, "use nodes of one kind: every step waits for the slowest device")
    for (host, device), members in _groups(found, lambda fact: (fact["host"], fact["device"]["id"])).items():
        if device is not None and len(members) > 1:
            do = "start at most one rank per device (--nproc), and check that CUDA_VISIBLE_DEVICES hides none"
            yield Finding(f"{len(members)} ranks share one device of {host}", ranks_text(members), do)


def _settings(found: Found) -> Iterator[Finding]:
    for name in sorted({name for fact in found for name in fact["settings"]}):
        if where := _differ(found, _fact("settings", name, "unset")):
            do = "set the same value on every node, or unset it on all"
            yield Finding(f"{name} differs between ranks", where, do)


def _visible(found: Found) -> Iterator[Finding]:
    hosts = _by_host(found)
    for name in VISIBLE:
        values = {
            host: "; ".join(fact["visible"].get(name, "unset") for fact in members) for host, members in hosts.items()
        }
        if len(set(values.values())) > 1:
            where = ", ".join(f"{host}: {value}" for host, value in list(values.items())[:8])
            yield Finding(f"{name} differs between hosts", where, "let every host show the same devices to its ranks")


def _interfaces(found: Found) -> Iterator[Finding]:
    hosts = _by_host(found)
    chosen_by = [(name, host, members) for name in INTERFACES for host, members in hosts.items()]
    for name, host, members in chosen_by:
        for value in _groups(members, _fact("settings", name, None)):
            if value is None:
                continue
            there = members[0]["interfaces"]
            chosen = [fact for interface, fact in there.items() if _chosen(value, interface)]
            names, outward = sorted(there), sorted(name for name, fact in there.items() if not fact["loopback"])
            if not chosen:
                what, where = "names no interface", f"{host}, which has {', '.join(names)}"
                do = "set it to one of these"
            elif len(hosts) > 1 and all(fact["loopback"] for fact in chosen):
                what, where = "is the loopback interface, which reaches no other host", host
                do = f"set it to one that does: {', '.join(outward) or 'none here'}"
            elif not any(fact["up"] and fact["address"] for fact in chosen):
                what, where = "is down or has no address", host
                do = f"bring it up, or choose another of {', '.join(names)}"
            else:
                continue
            yield Finding(f"{name}={value} {what}", where, do, severs=True)


def _chosen(value: str, interface: str) -> bool:
    """Return whether NCCL (or gloo) selects an interface: ``eth`` a prefix, ``=eth0`` exact, ``^lo`` excluded."""
    names = value.lstrip("^=").split(",")
    if value.startswith("^"):
        return not any(interface.startswith(name) for name in names)
    return any(interface == name if value.startswith("=") else interface.startswith(name) for name in names)


def _names(found: Found) -> Iterator[Finding]:
    for host, members in _by_host(found).items() if len(hosts_of(found)) > 1 else ():
        address, settings = members[0]["address"], members[0]["settings"]
        if address is None and "GLOO_SOCKET_IFNAME" not in settings:
            do = "add it to DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME"
            yield Finding("the host's own name has no address", host, do)
        elif (address or "").startswith("127.") and "GLOO_SOCKET_IFNAME" not in settings:
            what = f"the host's own name resolves to {address}, which gloo would send to the other hosts"
            do = (
                "set GLOO_SOCKET_IFNAME to the interface of the network, or remove the name's 127.x entry from "
                "/etc/hosts"
            )
            yield Finding(what, host, do)


def _infiniband(found: Found) -> Iterator[Finding]:
    hosts = [members[0] for members in _by_host(found).values()]
    ports = {fact["host"]: _used_ports(fact) for fact in hosts}
    rates = {host: ", ".join(f"{port['port']} {port['rate']}" for port in used) for host, used in ports.items()}
    if where := _differ(hosts, lambda fact: rates[fact["host"]] or "no port"):
        do = "use nodes with the same links: collectives wait for the slowest"
        yield Finding("InfiniBand ports differ between hosts", where, do)
    for host, used in ports.items():
        if down := ", ".join(port["port"] for port in used if "ACTIVE" not in port["state"]):
            do = "check cables and subnet manager (ibstat), or exclude the ports with NCCL_IB_HCA"
            yield Finding(f"InfiniBand ports that are not active: {down}", host, do)


def _used_ports(fact: Facts) -> list[Mapping[str, str]]:
    """Return the InfiniBand ports that NCCL_IB_HCA selects: by prefix, after ``=`` exactly, after ``^`` all others."""
    text = fact["settings"].get("NCCL_IB_HCA", "")
    excludes, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    named = [name.strip().replace(":", "/") for name in text.lstrip("^=").split(",") if name.strip()]

    def is_named(port: str) -> bool:
        device = port.partition("/")[0]
        return any(
            port == name or device == name if exact or "/" in name else device.startswith(name) for name in named
        )

    return [port for port in fact["infiniband"] if not named or is_named(port["port"]) is not excludes]


def _clocks(found: Found) -> Iterator[Finding]:
    times = sorted(fact["clock"] for fact in found if "clock" in fact)
    if times and times[-1] - times[0] > CLOCK_S:
        middle = times[len(times) // 2]
        off = [fact for fact in found if abs(fact["clock"] - middle) > CLOCK_S / 2]
        do = "run chrony or ntpd: otherwise logs of hosts cannot be ordered, and locks on shared file systems fail"
        where = "; ".join(f"{fact['host']} {fact['clock'] - middle:+.1f} s" for fact in _one_a_host(off))
        yield Finding(f"clocks are {times[-1] - times[0]:.1f} s apart", where, do)


def _one_a_host(found: Found) -> list[Facts]:
    return list({fact["host"]: fact for fact in found}.values())


def _limits(found: Found) -> Iterator[Finding]:
    low = [fact for fact in _one_a_host(found) if fact["infiniband"] and fact["locked_memory"] not in (-1, 2**64 - 1)]
    if low:
        where = "; ".join(f"{fact['host']}: {fact['locked_memory'] / GIB:.2f} GiB" for fact in low)
        do = "set it unlimited: ulimit -l unlimited (limits.conf, or LimitMEMLOCK of slurmd's unit)"
        yield Finding("locked memory is limited, and InfiniBand registers more", where, do)
    needed = FEW_FILES if len(found) <= 16 else max(FILES, FEW_FILES + FILES_A_RANK * len(found))
    few = [fact for fact in _one_a_host(found) if 0 < fact["open_files"] < needed]
    if few:
        what = f"the limit of open files is low: {len(found)} ranks need {needed} in a process"
        where = "; ".join(f"{fact['host']}: {fact['open_files']}" for fact in few)
        yield Finding(what, where, f"raise it: ulimit -n {max(65536, 2 * needed)}")
    free = {fact["host"]: 0 if fact["shm"] is None else fact["shm"]["free"] for fact in _one_a_host(found)}
    if where := "; ".join(f"{host}: {size / GIB:.2f} GiB free" for host, size in free.items() if size < SHM):
        what = "little free space in /dev/shm, which NCCL and data workers use"
        do = "enlarge it (docker --shm-size=16g; Kubernetes: an emptyDir of medium Memory), or delete files there"
        yield Finding(what, where, do)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSpan:
    """One axis of a mesh on hosts: the ranks and the hosts of each of its groups."""

    axis: str
    size: int
    groups: tuple[tuple[int, ...], ...]
    hosts: tuple[tuple[str, ...], ...]

    @property
    def most(self) -> int:
        return max(len(host) for host in self.hosts)


def spans(spec: MeshSpec, hosts: Sequence[str]) -> list[AxisSpan]:
    """Return the hosts of each axis of size > 1; ``hosts`` has each rank's host."""
    spanned = []
    for axis in [axis for axis, size in spec.axes.items() if size > 1]:
        groups = tuple(spec.groups(axis))
        on = tuple(tuple(dict.fromkeys(hosts[rank] for rank in group)) for group in groups)
        spanned.append(AxisSpan(axis=axis, size=spec.axes[axis], groups=groups, hosts=on))
    return spanned


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
        axes = list(spec.axes)
        inner = math.prod(spec.axes[axis] for axis in axes[axes.index(span.axis) :])
        worst = next(number for number, on in enumerate(span.hosts) if len(on) == span.most)
        group = ", ".join(f"{rank} ({hosts[rank]})" for rank in span.groups[worst][:8])
        if inner > smallest:
            do = f"make {span.axis} and the axes inside it at most {smallest} together: a host has no more ranks"
        else:
            do = (
                "number the ranks host by host: --node-rank in the order of the hosts, all ranks of a host in one "
                "launcher (SLURM: --distribution=block)"
            )
        what = f"axis {span.axis} (size {span.size}) should be inside a host and spans {span.most}"
        crossing = sum(len(on) > 1 for on in span.hosts)
        yield Finding(what, f"{crossing} of {len(span.groups)} groups, such as ranks {group}", do)


def price_of_sharding(spec: MeshSpec, hosts: Sequence[str]) -> str | None:
    """Return a note if hybrid sharding would keep all-gathers inside of a host; None otherwise."""
    names = list(dict.fromkeys(hosts))
    shard = spec.axes.get("dp_shard", 1)
    if len(names) < 2 or shard == 1 or spec.axes.get("dp_replicate", 1) > 1 or shard % len(names):
        return None
    if all(len(host) == 1 for span in spans(spec, hosts) if span.axis == "dp_shard" for host in span.hosts):
        return None
    better = MeshSpec({**spec.axes, "dp_replicate": len(names), "dp_shard": shard // len(names)})
    crossing = f"shards span {len(names)} hosts, so every all-gather crosses them"
    return f"{crossing}; if the model fits, {better} keeps all-gathers inside a host"
