"""Facts of a rank's machine, and checks of all ranks' facts, which yield findings."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

import meshpar
from meshpar.core import runtime

SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "FI_", "UCX_", "OMP_")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Settings that may differ between the ranks of a host, and must be alike between hosts."""
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

_ADDRESS, _FLAGS = 0x8915, 0x8913  # SIOCGIFADDR, SIOCGIFFLAGS: linux/sockios.h
_UP, _LOOPBACK = 0x1, 0x8


def collect(device: torch.device) -> dict[str, Any]:
    """Return the facts of this rank's machine, without communication."""
    host = socket.gethostname()
    return {
        "rank": runtime.rank(),
        "local_rank": runtime.local_rank(),
        "ranks_per_node": runtime.ranks_per_node(),
        "host": host,
        "pid": os.getpid(),
        "device": _device(device),
        "versions": _installed(device),
        "settings": runtime.settings(*SETTINGS),
        "visible": runtime.settings(*VISIBLE),
        "interfaces": dict(_network()),
        "address": _resolved(host),
        "infiniband": list(_infiniband_ports()),
        "time": time.time(),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shm": _room(Path("/dev/shm")),
    }


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": str(device), "kind": platform.processor() or platform.machine(), "id": None, "memory": None}
    found = torch.cuda.get_device_properties(device)
    return {"name": str(device), "kind": found.name, "id": str(found.uuid), "memory": found.total_memory}


def _installed(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "meshpar": meshpar.__version__}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        from torch.cuda import nccl

        found["nccl"] = ".".join(map(str, nccl.version()))
        driver = Path("/proc/driver/nvidia/version")
        found["driver"] = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "unknown"
    return found


def _network() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the network interfaces, as the kernel reports them: a container's /sys may be its host's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            flags = struct.unpack("H", fcntl.ioctl(asking, _FLAGS, request)[16:18])[0]
            try:
                address = socket.inet_ntoa(fcntl.ioctl(asking, _ADDRESS, request)[20:24])
            except OSError:  # it has none
                address = None
            yield name, {"up": bool(flags & _UP), "loopback": bool(flags & _LOOPBACK), "address": address}


def _resolved(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _infiniband_ports() -> Iterator[dict[str, str]]:
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        read = {
            name: (port / name).read_text(encoding="utf-8").strip()
            for name in ("state", "rate")
            if (port / name).exists()
        }
        yield {"port": f"{port.parts[-3]}/{port.name}", "state": read.get("state", "?"), "rate": read.get("rate", "?")}


def _room(folder: Path) -> dict[str, int] | None:
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    return {"total": usage.total, "free": usage.free}


Facts = Mapping[str, Any]
Found = Sequence[Facts]

GIB = 2**30
CLOCK_S = 2.0
SHM = 1 * GIB
FEW_FILES, FILES, FILES_A_RANK = 1024, 4096, 4
"""Open files that a process needs: with 16 ranks at most, with more, and for each rank, because gloo's groups and
rank 0's stores grow.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault of the machines or of the placement.

    Attributes:
        what: the fault.
        where: the ranks and hosts that have it.
        do: the remedy.
        severs: ranks cannot talk to each other until it is mended.
    """

    what: str
    where: str
    do: str
    severs: bool = False

    def __str__(self) -> str:
        return f"{self.what}\n    where: {self.where}\n    do:    {self.do}"


def all_findings(found: Found) -> list[Finding]:
    """Return the findings on the machines; ``found`` has each rank's facts, in the order of ranks."""
    checks: tuple[Callable[[Found], Iterator[Finding]], ...] = (
        _versions, _devices, _settings, _visible, _interfaces, _names, _infiniband, _clocks, _limits, _shm,
    )  # fmt: skip
    return [finding for check in checks for finding in check(found)]


def hosts_of(found: Found) -> list[str]:
    """Return the host names, in the order of their first ranks."""
    return list(dict.fromkeys(fact["host"] for fact in found))


def ranks_text(found: Found) -> str:
    """Return ``ranks 0, 1 (n1), 2 (n2)``, shortened if there are many."""
    by_host: dict[str, list[int]] = {}
    for fact in found:
        by_host.setdefault(fact["host"], []).append(fact["rank"])
    parts = [f"{_numbers(ranks)} ({host})" for host, ranks in by_host.items()]
    more = f" and {len(parts) - 8} hosts more" if len(parts) > 8 else ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(parts[:8])}{more}"


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:8]))}, ..."


def _groups(found: Found, of: Callable[[Facts], Any]) -> dict[Any, list[Facts]]:
    groups: dict[Any, list[Facts]] = {}
    for fact in found:
        groups.setdefault(of(fact), []).append(fact)
    return groups


def _differ(found: Found, of: Callable[[Facts], Any]) -> str:
    """Return ``X on ranks ...; Y on ranks ...``; empty if all are equal."""
    groups = _groups(found, of)
    return (
        "" if len(groups) < 2 else "; ".join(f"{value} on {ranks_text(members)}" for value, members in groups.items())
    )


def _of(kind: str, name: str, missing: str) -> Callable[[Facts], Any]:
    """Return a function that reads one named fact of a rank."""
    return lambda fact: fact[kind].get(name, missing)


def _host_and_setting(name: str) -> Callable[[Facts], Any]:
    return lambda fact: (fact["host"], fact["settings"].get(name))


def _versions(found: Found) -> Iterator[Finding]:
    for name in sorted({name for fact in found for name in fact["versions"]}):
        where = _differ(found, _of("versions", name, "none"))
        if where:
            yield Finding(what=f"versions of {name} differ", where=where, do=f"install the same {name} on every node")


def _devices(found: Found) -> Iterator[Finding]:
    where = _differ(found, lambda fact: fact["device"]["kind"])
    if where:
        yield Finding(
            what="devices differ", where=where, do="use nodes of one kind: every step waits for the slowest device"
        )
    for (host, device), members in _groups(found, lambda fact: (fact["host"], fact["device"]["id"])).items():
        if device is not None and len(members) > 1:
            yield Finding(
                what=f"{len(members)} ranks share one device of {host}",
                where=ranks_text(members),
                do="start at most one rank per device (--nproc), and check that CUDA_VISIBLE_DEVICES hides none",
            )


def _settings(found: Found) -> Iterator[Finding]:
    for name in sorted({name for fact in found for name in fact["settings"]}):
        where = _differ(found, _of("settings", name, "unset"))
        if where:
            yield Finding(
                what=f"{name} differs between ranks",
                where=where,
                do="set the same value on every node, or unset it on all",
            )


def _visible(found: Found) -> Iterator[Finding]:
    hosts = _groups(found, lambda fact: fact["host"])
    for name in VISIBLE:
        values = {
            host: "; ".join(fact["visible"].get(name, "unset") for fact in members) for host, members in hosts.items()
        }
        if len(set(values.values())) > 1:
            yield Finding(
                what=f"{name} differs between hosts",
                where=", ".join(f"{host}: {value}" for host, value in list(values.items())[:8]),
                do="let every host show the same devices to its ranks",
            )


def _interfaces(found: Found) -> Iterator[Finding]:
    several = len(hosts_of(found)) > 1
    for name in INTERFACES:
        for (host, value), members in _groups(found, _host_and_setting(name)).items():
            if value is None:
                continue
            there = members[0]["interfaces"]
            chosen = {interface: fact for interface, fact in there.items() if _chosen(value, interface)}
            known = ", ".join(sorted(there))
            outward = (
                ", ".join(sorted(interface for interface, fact in there.items() if not fact["loopback"])) or "none here"
            )
            if not chosen:
                what, where, do = "names no interface", f"{host}, which has {known}", "set it to one of these"
            elif several and all(fact["loopback"] for fact in chosen.values()):
                what, where, do = (
                    "is the loopback interface, which reaches no other host",
                    host,
                    f"set it to one that does: {outward}",
                )
            elif not any(fact["up"] and fact["address"] for fact in chosen.values()):
                what, where, do = "is down or has no address", host, f"bring it up, or choose another of {known}"
            else:
                continue
            yield Finding(what=f"{name}={value} {what}", where=where, do=do, severs=True)


def _chosen(value: str, interface: str) -> bool:
    """Return whether NCCL (or gloo) selects an interface: ``eth`` a prefix, ``=eth0`` exact, ``^lo`` excluded."""
    names = value.lstrip("^=").split(",")
    if value.startswith("^"):
        return not any(interface.startswith(name) for name in names)
    return any(interface == name if value.startswith("=") else interface.startswith(name) for name in names)


def _names(found: Found) -> Iterator[Finding]:
    if len(hosts_of(found)) < 2:
        return
    for host, members in _groups(found, lambda fact: fact["host"]).items():
        first = members[0]
        if first["address"] is None and "GLOO_SOCKET_IFNAME" not in first["settings"]:
            yield Finding(
                what="the host's own name has no address",
                where=host,
                do="add it to DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME",
            )
        elif (first["address"] or "").startswith("127.") and "GLOO_SOCKET_IFNAME" not in first["settings"]:
            yield Finding(
                what=f"the host's own name resolves to {first['address']}, which gloo would send to the other hosts",
                where=host,
                do="set GLOO_SOCKET_IFNAME to the interface of the network, or remove the name's 127.x entry from "
                "/etc/hosts",
            )


def _infiniband(found: Found) -> Iterator[Finding]:
    first = [members[0] for members in _groups(found, lambda fact: fact["host"]).values()]
    where = _differ(
        first, lambda fact: ", ".join(f"{port['port']} {port['rate']}" for port in _used_ports(fact)) or "no port"
    )
    if where:
        yield Finding(
            what="InfiniBand ports differ between hosts",
            where=where,
            do="use nodes with the same links: collectives wait for the slowest",
        )
    for fact in first:
        down = [port["port"] for port in _used_ports(fact) if "ACTIVE" not in port["state"]]
        if down:
            yield Finding(
                what=f"InfiniBand ports that are not active: {', '.join(down)}",
                where=fact["host"],
                do="check cables and subnet manager (ibstat), or exclude the ports with NCCL_IB_HCA",
            )


def _used_ports(fact: Facts) -> list[Mapping[str, str]]:
    """Return the InfiniBand ports that NCCL_IB_HCA selects: a list of DEVICE or DEVICE:PORT, each the beginning of a
    name, after ``=`` the whole name, and after ``^`` what is excluded.
    """
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
        yield Finding(
            what=f"clocks are {times[-1] - times[0]:.1f} s apart",
            where="; ".join(f"{fact['host']} {fact['clock'] - middle:+.1f} s" for fact in _one_a_host(off)),
            do="run chrony or ntpd: otherwise logs of different hosts cannot be ordered, and locks on shared file "
            "systems fail",
        )


def _one_a_host(found: Found) -> list[Facts]:
    return list({fact["host"]: fact for fact in found}.values())


def _limits(found: Found) -> Iterator[Finding]:
    low = [fact for fact in _one_a_host(found) if fact["infiniband"] and fact["locked_memory"] not in (-1, 2**64 - 1)]
    if low:
        yield Finding(
            what="locked memory is limited, and InfiniBand registers more",
            where="; ".join(f"{fact['host']}: {fact['locked_memory'] / GIB:.2f} GiB" for fact in low),
            do="set it unlimited: ulimit -l unlimited (limits.conf, or LimitMEMLOCK of slurmd's unit)",
        )
    needed = FEW_FILES if len(found) <= 16 else max(FILES, FEW_FILES + FILES_A_RANK * len(found))
    few = [fact for fact in _one_a_host(found) if 0 < fact["open_files"] < needed]
    if few:
        yield Finding(
            what=f"the limit of open files is low: {len(found)} ranks need {needed} in a process",
            where="; ".join(f"{fact['host']}: {fact['open_files']}" for fact in few),
            do=f"raise it: ulimit -n {max(65536, 2 * needed)}",
        )


def _shm(found: Found) -> Iterator[Finding]:
    low = [fact for fact in _one_a_host(found) if fact["shm"] is None or fact["shm"]["free"] < SHM]
    if low:
        sizes = [
            f"{fact['host']}: {0 if fact['shm'] is None else fact['shm']['free'] / GIB:.2f} GiB free" for fact in low
        ]
        yield Finding(
            what="little free space in /dev/shm, which NCCL and data workers use",
            where="; ".join(sizes),
            do="enlarge it (docker --shm-size=16g; Kubernetes: an emptyDir of medium Memory), or delete files there",
        )
