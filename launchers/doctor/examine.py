"""One rank of the doctor: examine machines without a collective, then compute and measure, and report."""

from __future__ import annotations

import fcntl
import platform
import resource
import shutil
import socket
import struct
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

import meshpar
from meshpar.core import runtime
from meshpar.core.errors import LaunchError
from meshpar.core.mesh import MeshSpec, default_device_type
from meshpar.launchers.agent.check_in import RollCall, unreached
from meshpar.launchers.agent.failures import watch_progress
from meshpar.launchers.doctor import checks
from meshpar.launchers.doctor.checks import GIB, VISIBLE, Facts, Finding, all_findings, hosts_of, ranks_text, spans
from meshpar.launchers.doctor.devices import health, health_findings, measured_profile, product, product_findings
from meshpar.state.drawing import table

WAIT_S = 60.0
"""Seconds within which all ranks must connect."""
MEASURE_S = 60.0
"""Seconds without progress after which the measurement ends with the names of the ranks that did not arrive."""
_ROWS = 64
SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "FI_", "UCX_", "OMP_")

_ADDRESS, _FLAGS = 0x8915, 0x8913  # SIOCGIFADDR, SIOCGIFFLAGS: linux/sockios.h
_UP, _LOOPBACK = 0x1, 0x8
CONNECT_S = 3.0
_NEIGHBOURS = 8  # hosts that each host connects to, at most


def meet(wait_s: float, name: str = "doctor") -> RollCall:
    """Connect all ranks within ``wait_s`` seconds, to exchange facts. Raises LaunchError."""
    rank, head = runtime.rank(), runtime.settings("MASTER_")
    if rank and {"MASTER_ADDR", "MASTER_PORT"} <= head.keys():  # in Python, so that Ctrl-C ends the wait
        unreached(head["MASTER_ADDR"], int(head["MASTER_PORT"]), wait_s, "rank 0")
    try:
        store = runtime.meeting_store(name, timeout_s=wait_s)
    except dist.DistError as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise LaunchError(
            f"rank 0 does not answer at {head.get('MASTER_ADDR')}:{head.get('MASTER_PORT')} within {wait_s:.0f} "
            "s; check that its node runs, that its name resolves to the same address here, and that the port is "
            f"open ({reason})"
        ) from error
    return RollCall(store, rank, runtime.world_size(), wait_s, lambda values: _explain(values, wait_s))


def _explain(values: Sequence[Any], wait_s: float) -> str:
    connected = [fact for fact in values if isinstance(fact, Mapping)]
    per_node = next((fact["ranks_per_node"] for fact in connected if fact.get("ranks_per_node")), None)
    hosts = {fact["rank"] // per_node: fact["host"] for fact in connected} if per_node else {}
    missing = []
    for rank in (rank for rank, value in enumerate(values) if value is None):
        node = rank // per_node if per_node else None
        absent = "" if node is None else f" (on node {node}, of which no rank connected)"
        missing.append(f"{rank} (on {hosts[node]})" if node in hosts else f"{rank}{absent}")
    return (
        f"ranks did not connect within {wait_s:.0f} s: {', '.join(missing)}; check that their nodes run, read their "
        "logs, and check that they reach rank 0's port"
    )


def collect(device: torch.device) -> dict[str, Any]:
    """Return the facts of this rank's machine, without communication."""
    host, address, shm = socket.gethostname(), None, Path("/dev/shm")
    with suppress(OSError):  # the name has no address
        address = socket.gethostbyname(host)
    described, versions = _device(device)
    return {
        "rank": runtime.rank(),
        "ranks_per_node": runtime.ranks_per_node(),
        "host": host,
        "device": described,
        "versions": versions,
        "settings": runtime.settings(*SETTINGS),
        "visible": runtime.settings(*VISIBLE),
        "interfaces": dict(_network()),
        "address": address,
        "infiniband": list(_infiniband_ports()),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shm": {"free": shutil.disk_usage(shm).free} if shm.is_dir() else None,
    }


def _device(device: torch.device) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a device is, and the versions of what it runs on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "meshpar": meshpar.__version__}
    kind: dict[str, Any] = {"kind": platform.processor() or platform.machine(), "id": None, "memory": None}
    if device.type == "cuda":
        from torch.cuda import nccl

        cuda = torch.cuda.get_device_properties(device)
        kind = {"kind": cuda.name, "id": str(cuda.uuid), "memory": cuda.total_memory}
        driver = Path("/proc/driver/nvidia/version")
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl.version()))}
        versions["driver"] = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "unknown"
    return {"name": str(device), **kind}, versions


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


def _infiniband_ports() -> Iterator[dict[str, str]]:
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        files = {name: port / name for name in ("state", "rate")}
        values = {name: file.read_text("utf-8").strip() if file.exists() else "?" for name, file in files.items()}
        yield {"port": f"{port.parts[-3]}/{port.name}", **values}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The folder of checkpoints, and the bytes that they require (0: unknown)."""

    path: Path
    bytes: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The facts of each rank, the faults, and remarks that are no faults."""

    facts: tuple[Facts, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def examine(roll: RollCall, device: torch.device, folder: Folder | None) -> Examination:
    """Examine all machines by exchanges with bounded waits, without a collective. Every rank calls it."""
    here = collect(device)
    here["device"]["health"] = health(here["device"]["id"])
    facts = roll.gather("facts", here)
    now = time.time()  # all ranks have just read the same answer; a slow file system below would look like a clock
    firsts = {fact["host"]: fact["rank"] for fact in reversed(facts)}
    speaks = roll.member in firsts.values()
    token = None if folder is None or roll.member else _leave_token(folder.path)
    with ExitStack() as stack:
        address = _listen(stack) if speaks else None
        met = roll.gather("met", {"time": now, "listens": address, "token": token})
        for fact, other in zip(facts, met):
            fact["clock"] = other["time"]
        failed = _unreached(roll.member, firsts, met) if speaks else []
        look = _looked(folder.path, met[0]["token"]) if folder is not None and speaks else None
        seen = roll.gather("seen", {"unreached": failed, "folder": look})
    roll.part()
    if folder is not None and token is not None:
        (folder.path / token["name"]).unlink(missing_ok=True)
    findings = [*all_findings(facts), *_connection_findings(facts, seen)]
    if folder is not None:
        findings += _folder_findings(facts, folder, met[0]["token"], [look["folder"] for look in seen])
    return Examination(facts=tuple(facts), findings=tuple(findings))


def _listen(stack: ExitStack) -> list[Any]:
    """Open a port for other hosts to connect to, at the address from which this host reaches rank 0's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        head = runtime.settings("MASTER_")
        with suppress(OSError):  # it stays 127.0.0.1, which the others then cannot reach and say so
            asking.connect((head["MASTER_ADDR"], int(head["MASTER_PORT"])))
        address = asking.getsockname()[0]
    address = address if address != "0.0.0.0" else "127.0.0.1"
    return [address, stack.enter_context(socket.create_server((address, 0), backlog=64)).getsockname()[1]]


def _unreached(rank: int, firsts: dict[str, int], met: Sequence[dict[str, Any]]) -> list[list[Any]]:
    hosts = list(firsts.items())
    here = next(number for number, (_, first) in enumerate(hosts) if first == rank)
    ring = (hosts[here + 1 :] + hosts[:here])[:_NEIGHBOURS]
    failed = []
    for host, first in ring:
        address, port = met[first]["listens"]
        try:
            socket.create_connection((address, port), timeout=CONNECT_S).close()
        except OSError as error:
            failed.append([host, f"{address}:{port}", str(error)])
    return failed


def _connection_findings(facts: Sequence[Facts], seen: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    failed = [(fact["host"], *other) for fact, look in zip(facts, seen) for other in look["unreached"]]
    if failed:
        where = "; ".join(f"{here} to {there} at {address}: {why}" for here, there, address, why in failed[:8])
        do = (
            "open all ports between the nodes (the operating system chooses the ports of collectives), and check "
            "routes and host names"
        )
        yield Finding("hosts that cannot connect to each other", where, do, severs=True)


def _leave_token(path: Path) -> dict[str, str]:
    """Write a file that the other hosts look for; return its name, and an error if there is one."""
    name = f".doctor-{uuid.uuid4().hex[:12]}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name, encoding="utf-8")
    except OSError as error:
        return {"name": name, "error": str(error)}
    return {"name": name}


def _looked(path: Path, token: dict[str, str]) -> dict[str, Any]:
    look: dict[str, Any] = {"shared": (path / token["name"]).exists(), "error": None, "free": None}
    probe = path / f"{token['name']}-{socket.gethostname()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("", encoding="utf-8")
        probe.unlink()
        look["free"] = shutil.disk_usage(path).free
    except OSError as error:
        look["error"] = str(error)
    return look


def _folder_findings(
    facts: Sequence[Facts], folder: Folder, token: dict[str, str], seen: Sequence[dict[str, Any] | None]
) -> Iterator[Finding]:
    looked = [(fact["host"], look) for fact, look in zip(facts, seen) if look is not None]
    failed = [(host, look["error"]) for host, look in looked if look["error"]]
    if failed:
        where = "; ".join(f"{host}: {error}" for host, error in failed)
        do = "mount it there, correct its owner and mode, or choose another output"
        yield Finding(f"the checkpoint folder {folder.path} cannot be written", where, do)
    apart = [host for host, look in looked if not look["shared"] and not look["error"]]
    if apart and "error" not in token:
        what = f"the checkpoint folder {folder.path} is not shared: a file written by {facts[0]['host']} is missing"
        do = "put the output on a file system that all nodes mount; otherwise checkpoints cannot be restored"
        yield Finding(what, ", ".join(apart), do)
    low = [(host, look["free"]) for host, look in looked if look["free"] is not None and look["free"] < folder.bytes]
    if low:
        what = f"too little free space for the checkpoints, which take about {folder.bytes / GIB:.1f} GiB"
        where = "; ".join(f"{host}: {free / GIB:.1f} GiB free in {folder.path}" for host, free in low)
        do = "keep fewer checkpoints (checkpoint.keep), free some space, or choose another output"
        yield Finding(what, where, do)


def main(arguments: Sequence[str]) -> int:
    """Examine by ``mesh=TEXT wait=SECONDS folder=PATH profile=PATH findings=PATH``, and return the exit code."""
    options = dict(argument.split("=", 1) for argument in arguments)
    spec, kind = mesh_of(options.get("mesh", "auto")), default_device_type()
    folder = Folder(path=Path(options["folder"])) if "folder" in options else None
    device, profile = runtime.device(kind), ""
    roll = meet(float(options.get("wait", WAIT_S)))
    report = examine_all(roll, spec, device, folder)
    if not any(finding.severs for finding in report.findings):
        with runtime.distributed(kind, timeout_s=MEASURE_S * 2):
            report = compare_products(report, device)
            profile = measured_profile(report.facts, device) if "profile" in options else ""
    if runtime.is_main():
        print("\n".join(report_lines(report, spec)), flush=True)
        if profile:
            Path(options["profile"]).write_text(profile, encoding="utf-8")
            print(f"profile: {options['profile']}")
    if report.findings and "findings" in options:
        Path(options["findings"]).touch()
    return 1 if report.findings and "findings" not in options else 0


def mesh_of(text: str) -> MeshSpec:
    """Return the mesh of ``text`` on the launcher's ranks."""
    world = runtime.world_size()
    return MeshSpec.placed(text, world, runtime.ranks_per_node() or world)


def examine_all(roll: RollCall, spec: MeshSpec, device: torch.device, folder: Folder | None) -> Examination:
    """Examine machines and placement. Keep ``roll``, whose store may be rank 0's, until the group is closed."""
    report = examine(roll, device, folder)
    hosts = [fact["host"] for fact in report.facts]
    price = checks.price_of_sharding(spec, hosts)
    findings = (*report.findings, *health_findings(report.facts), *checks.placement_findings(spec, hosts))
    return replace(report, findings=findings, notes=() if price is None else (price,))


def compare_products(report: Examination, device: torch.device) -> Examination:
    """Let accelerators compute a product each, and add findings of differing results or speeds. Collective."""
    if not runtime.queues(device):
        return report
    products: list[tuple[float, str]] = [(0.0, "")] * runtime.world_size()
    with watch_progress(MEASURE_S, lambda: 0):
        dist.all_gather_object(products, product(device), runtime.hosts())
    return replace(report, findings=(*report.findings, *product_findings(report.facts, products)))


def report_lines(report: Examination, spec: MeshSpec) -> Iterator[str]:
    """Yield the machines, the ranks, the axes, notes and findings."""
    facts, first, axes = report.facts, report.facts[0], list(spec.axes)
    hosts = len(hosts_of(facts))
    counted = f"{len(facts)} rank{'s' if len(facts) > 1 else ''} on {hosts} host{'s' if hosts > 1 else ''}"
    yield f"{counted}: {ranks_text(facts)}"
    yield ", ".join(f"{name} {value}" for name, value in first["versions"].items())
    if settings := [f"{name}={value}" for name, value in first["settings"].items()]:
        yield f"settings of rank 0: {' '.join(settings)}"
    if ports := [f"{port['port']} {port['rate']} ({port['state']})" for port in first["infiniband"]]:
        yield f"InfiniBand of {first['host']}: {', '.join(ports)}"
    rows = [
        [str(fact["rank"]), fact["host"], f"{fact['device']['name']} {fact['device']['kind']}".strip()]
        + [str(spec.coordinates(fact["rank"])[axis]) for axis in axes]
        for fact in facts[:_ROWS]
    ]
    yield from ("", *table(["rank", "host", "device", *axes], rows))
    if len(facts) > _ROWS:
        yield f"... and {len(facts) - _ROWS} ranks more"
    widths = spans(spec, [fact["host"] for fact in facts])
    rows = [[f"{span.axis}={span.size}", "one host" if span.most == 1 else f"{span.most} hosts"] for span in widths]
    yield from ("", *table(["axis", "a group spans"], rows)) if rows else ()
    yield ""
    yield from (f"note: {note}" for note in report.notes)
    yield findings_text(report.findings)


def findings_text(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{number:>2}. {finding}" for number, finding in enumerate(findings, 1)) or "nothing is wrong"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
