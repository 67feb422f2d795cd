"""Run one rank of the doctor: ``python -m meshpar.launchers.doctor.rank mesh=auto folder=runs``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from meshpar.core import runtime
from meshpar.core.mesh import MeshSpec, default_device_type
from meshpar.launchers.agent.failures import watched
from meshpar.launchers.doctor.devices import health_findings, product, product_findings
from meshpar.launchers.doctor.examine import Folder, Meeting, Report, examine
from meshpar.launchers.doctor.measure import measured_profile
from meshpar.launchers.doctor.report import placement_findings, price_of_sharding, report_text

WAIT_S = 60.0
"""Seconds within which all ranks must connect."""

MEASURE_S = 60.0
"""Seconds without progress after which the measurement ends with the names of the ranks that did not arrive."""


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
    """Examine the machines outside a process group, and measure a profile if all hosts can connect."""
    device = runtime.device(kind)
    meeting = Meeting(wait_s)
    report = examined(meeting, spec, device, folder)
    if any(finding.severs for finding in report.findings):
        return report, ""
    with runtime.distributed(kind, timeout_s=MEASURE_S * 2):
        report = computed(report, device)
        return report, measured_profile(report.facts, device) if profile else ""


def examined(meeting: Meeting, spec: MeshSpec, device: torch.device, folder: Folder | None) -> Report:
    """Examine machines and placement. Keep ``meeting``, whose store may be rank 0's, until the group is closed."""
    report = examine(meeting, device, folder)
    hosts = [fact["host"] for fact in report.facts]
    price = price_of_sharding(spec, hosts)
    findings = (*report.findings, *health_findings(report.facts), *placement_findings(spec, hosts))
    return replace(report, findings=findings, notes=() if price is None else (price,))


def computed(report: Report, device: torch.device) -> Report:
    """Let accelerators compute a product each, and add findings of differing results or speeds. Collective."""
    if not runtime.queues(device):
        return report
    products: list[tuple[float, str]] = [(0.0, "")] * runtime.world_size()
    with watched(MEASURE_S, lambda: 0):
        dist.all_gather_object(products, product(device), runtime.hosts())
    return replace(report, findings=(*report.findings, *product_findings(report.facts, products)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
