"""Run one rank of the doctor: ``python -m meshpar.launchers.doctor.rank mesh=auto folder=runs``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from meshpar.core import runtime
from meshpar.core.mesh import MeshSpec, default_device_type
from meshpar.launchers.agent.failures import watched
from meshpar.launchers.doctor.checks import Finding
from meshpar.launchers.doctor.devices import health_findings, product, product_findings
from meshpar.launchers.doctor.examine import Folder, Meeting, Report, examine
from meshpar.launchers.doctor.measure import measure, measured_profile
from meshpar.launchers.doctor.report import placement_findings, price_of_sharding, rate_text, report_text, spans

WAIT_S = 60.0
"""Seconds within which all ranks must connect."""

MEASURE_S = 60.0
"""Seconds without progress after which the measurement ends with the names of the ranks that did not arrive."""

SLOW_LINK = 10.0
"""A pair of ranks on two hosts that is slower than the fastest such pair by this factor is a finding."""

LEAST_RATE = 12.5e6
"""Bytes a second (100 Mbit/s) between two hosts below which no network is as intended."""

TRIES = 3
"""Number of measurements in a row that a speed must fail to be a finding, because other work may hold up one or two."""

UNEVEN = 2.0
"""An axis between hosts that is faster than one inside hosts by this factor is a finding."""


def main(arguments: Sequence[str]) -> int:
    """Examine and print the report on rank 0; return 1 if there are findings, unless the launcher reads them from a
    file.

    Args:
        arguments: ``mesh=TEXT``, ``wait=SECONDS``, ``folder=PATH`` (checkpoints), ``profile=PATH`` (hardware profile to
            write), ``findings=PATH`` (the launcher's file).
    """
    given = dict(argument.split("=", 1) for argument in arguments)
    spec = mesh_of(given.get("mesh", "auto"))
    folder = Folder(path=Path(given["folder"])) if "folder" in given else None
    report, profile = look(
        spec, default_device_type(), folder, wait_s=float(given.get("wait", WAIT_S)), profile="profile" in given
    )
    if runtime.is_main():
        print(report_text(report, spec), flush=True)
        if profile:
            Path(given["profile"]).write_text(profile, encoding="utf-8")
            print(f"profile: {given['profile']}")
    wanted = given.get("findings")
    if report.findings and wanted is not None:
        Path(wanted).touch()
    return 1 if report.findings and wanted is None else 0


def mesh_of(text: str) -> MeshSpec:
    """Return the mesh of ``text`` on the launcher's ranks."""
    world = runtime.world_size()
    return MeshSpec.placed(text, world, runtime.ranks_per_node() or world)


def look(
    spec: MeshSpec, kind: str, folder: Folder | None, *, wait_s: float = WAIT_S, profile: bool = False
) -> tuple[Report, str]:
    """Examine the machines, measure the mesh if the hosts can connect, and return the report and a hardware profile's
    text.

    Every rank calls it, outside a process group.

    Args:
        spec: the resolved mesh.
        kind: device type.
        folder: the folder of checkpoints to check; None: none.
        wait_s: seconds within which all ranks must connect.
        profile: also measure a hardware profile.

    Raises:
        LaunchError: ranks did not connect.
    """
    device = runtime.device(kind)
    meeting = Meeting(wait_s)
    report = examined(meeting, spec, device, folder)
    if any(finding.severs for finding in report.findings):
        return replace(
            report, notes=(*report.notes, "speeds were not measured, because the ranks cannot connect to each other")
        ), ""
    with runtime.distributed(kind, timeout_s=MEASURE_S * 2):
        report = measured(report, spec, device)
        return report, measured_profile(report.facts, device) if profile else ""


def examined(meeting: Meeting, spec: MeshSpec, device: torch.device, folder: Folder | None) -> Report:
    """Examine the machines and the placement of the mesh, without measuring speeds.

    The meeting's store may be rank 0's own: keep ``meeting`` until the process group is closed.

    Raises:
        LaunchError: ranks did not connect.
    """
    report = examine(meeting, device, folder)
    hosts = [fact["host"] for fact in report.facts]
    price = price_of_sharding(spec, hosts)
    findings = (*report.findings, *health_findings(report.facts), *placement_findings(spec, hosts))
    return replace(report, findings=findings, notes=() if price is None else (price,))


def measured(report: Report, spec: MeshSpec, device: torch.device) -> Report:
    """Measure the mesh's axes, again where they are slow, and return the report with their speeds. Collective: every
    rank calls it.

    Accelerators also compute a product each, whose results and speeds are compared.
    """
    slow, odd = list[Finding](), list[Finding]()
    if runtime.queues(device):
        products: list[tuple[float, str]] = [(0.0, "")] * runtime.world_size()
        dist.all_gather_object(products, product(device), runtime.hosts())
        odd = list(product_findings(report.facts, products))
    with spec.opened(device.type) as mesh:
        for _ in range(TRIES):
            with watched(MEASURE_S, lambda: 0):
                speeds, pairs = measure(mesh, device)
            report = replace(report, speeds=tuple(speeds), pairs=tuple(pairs))
            slow = [
                *_speed_findings(report, spec),
                *_link_findings(report),
            ]  # the same on every rank, as the speeds are
            if not slow:
                break
    return replace(report, findings=(*report.findings, *odd, *slow))


def _link_findings(report: Report) -> Iterator[Finding]:
    """Yield a finding for the links between hosts that are far slower than others, or than any network."""
    hosts = [fact["host"] for fact in report.facts]
    best: dict[tuple[str, str], float] = {}
    for pair in report.pairs:
        link = hosts[pair.first], hosts[pair.second]
        best[link] = max(pair.rate, best.get(link, 0.0))
    links = sorted((rate, *link) for link, rate in best.items() if link[0] != link[1])
    fastest = max((rate for rate, *_ in links), default=0.0)
    slow = [other for other in links if other[0] < max(LEAST_RATE, fastest / SLOW_LINK)]
    if slow:
        yield Finding(
            what=f"links between hosts are slow: the slowest reaches {rate_text(slow[0][0])}, the fastest of all "
            f"{rate_text(fastest)}",
            where="; ".join(f"{first} to {second}: {rate_text(rate)}" for rate, first, second in slow[:8]),
            do="check cable, port and speed of the link (ethtool), and which interface the collectives use "
            "(NCCL_SOCKET_IFNAME)",
        )


def _speed_findings(report: Report, spec: MeshSpec) -> Iterator[Finding]:
    """Yield a finding for each axis inside hosts that is slower than an axis between hosts."""
    hosts = [fact["host"] for fact in report.facts]
    gathers = {speed.axis: speed for speed in report.speeds if speed.operation == "all_gather"}
    across = {span.axis: span for span in spans(spec, hosts) if span.most > 1}
    fastest_across = max((gathers[axis].bus for axis in across), default=0.0)
    for axis, speed in gathers.items():
        if axis not in across and fastest_across > UNEVEN * speed.bus:
            yield Finding(
                what=f"axis {axis}, inside hosts, reaches {rate_text(speed.bus)}; one between hosts reaches "
                f"{rate_text(fastest_across)}",
                where=f"every group of {axis}; the slowest counts",
                do="check whether peer access or shared memory is off (NCCL_P2P_DISABLE, NCCL_SHM_DISABLE), or a "
                "link is down (nvidia-smi topo -m)",
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
