"""Tests of accelerators: facts of NVIDIA's management library about each, and a product that each computes."""

from __future__ import annotations

import hashlib
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from meshpar.core import runtime
from meshpar.launchers.doctor.checks import Facts, Finding, Found, ranks_text

T = TypeVar("T")

SLOW = 0.9
"""A device that computes slower than the median of its kind by this factor is a finding: every step waits for it."""
_SIZE, _CALLS = 8192, 20
_HELD_BACK = {0x8: "hardware slowdown", 0x20: "temperature (software)", 0x40: "temperature", 0x80: "power brake"}
"""Bits of NVML's clock event reasons that say that a device is not well; the others are idle clocks and limits that
somebody set.
"""


def health(identity: str | None) -> dict[str, Any] | None:
    """Return what NVML says of the device with a UUID; None without nvidia-ml-py, a driver or such a device."""
    if identity is None:
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(identity if identity.startswith("GPU-") else f"GPU-{identity}")
    except nvml.NVMLError:
        return None

    def asked(question: Callable[..., T], *arguments: object) -> T | None:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:  # this kind of device has no such thing
            return None

    rows = asked(nvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
    links = [asked(nvml.nvmlDeviceGetNvLinkState, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    return {
        "uncorrected": asked(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        or 0,
        "rows_pending": bool(rows[2]),
        "rows_failed": bool(rows[3]),
        "held_back": asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0,
        "links_up": sum(link == 1 for link in links),
        "width": asked(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        "most_width": asked(nvml.nvmlDeviceGetMaxPcieLinkWidth),
    }


def health_findings(found: Found) -> Iterator[Finding]:
    """Yield what NVML found on the ranks' devices."""
    known = [(fact, fact["device"]["health"]) for fact in found if fact["device"].get("health")]

    def those(bad: Callable[[dict[str, Any]], object]) -> list[Facts]:
        return [fact for fact, health in known if bad(health)]

    swap = "drain the node, reset or replace the device, and look at its Xid errors (dmesg | grep Xid)"
    if bad := those(lambda health: health["uncorrected"]):
        yield Finding(
            what="devices have uncorrected memory errors since the driver was loaded", where=ranks_text(bad), do=swap
        )
    if bad := those(lambda health: health["rows_failed"]):
        yield Finding(what="devices cannot replace rows of their memory any more", where=ranks_text(bad), do=swap)
    if bad := those(lambda health: health["rows_pending"]):
        yield Finding(
            what="devices wait for a reset to replace rows of their memory",
            where=ranks_text(bad),
            do="reset the devices",
        )
    for bit, reason in _HELD_BACK.items():
        if bad := [fact for fact, health in known if health["held_back"] & bit]:
            yield Finding(
                what=f"clocks of devices are held back: {reason}",
                where=ranks_text(bad),
                do="check cooling and power of the host (nvidia-smi -q -d PERFORMANCE)",
            )
    most = max((health["links_up"] for _, health in known), default=0)
    if bad := those(lambda health: health["links_up"] < most):
        yield Finding(
            what=f"NVLinks are down: other devices have {most}",
            where=ranks_text(bad),
            do="check the links (nvidia-smi nvlink -s)",
        )
    if bad := those(lambda health: (health["width"] or 0) < (health["most_width"] or 0)):
        yield Finding(
            what="PCIe links are narrower than they can be",
            where=ranks_text(bad),
            do="seat the device anew, check its riser",
        )


def product(device: torch.device, size: int = _SIZE) -> tuple[float, str]:
    """Return a matrix product's operations per second, and a digest of its result: equal on devices of a kind."""
    ramp = torch.arange(size * size, dtype=torch.int32, device=device).view(size, size) % 251
    one = (ramp.float() / 251 - 0.5).to(torch.bfloat16)
    result = one @ one.t()
    _wait(device)
    start = time.perf_counter()
    for _ in range(_CALLS):
        torch.mm(one, one.t(), out=result)
    _wait(device)
    rate = 2 * size**3 * _CALLS / (time.perf_counter() - start)
    return rate, hashlib.blake2b(result.view(torch.uint8).cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _wait(device: torch.device) -> None:
    if runtime.queues(device):
        torch.accelerator.synchronize(device)


def product_findings(found: Found, products: list[tuple[float, str]]) -> Iterator[Finding]:
    """Yield devices that compute another result than most of their kind, or are slower."""
    for kind in dict.fromkeys(fact["device"]["kind"] for fact in found):
        alike = [(fact, *made) for fact, made in zip(found, products, strict=True) if fact["device"]["kind"] == kind]
        usual = statistics.mode(digest for _, _, digest in alike)
        if bad := [fact for fact, _, digest in alike if digest != usual]:
            yield Finding(
                what=f"devices of the kind {kind} compute another product than the others",
                where=ranks_text(bad),
                do="drain the node: these devices would train wrong weights without an error",
            )
        middle = statistics.median(rate for _, rate, _ in alike)
        if slow := [(fact, rate) for fact, rate, _ in alike if rate < SLOW * middle]:
            yield Finding(
                what=f"devices compute slower than the others of their kind, which reach {middle / 1e12:.0f} TFLOP/s",
                where="; ".join(f"{ranks_text([fact])}: {rate / 1e12:.0f}" for fact, rate in slow[:8]),
                do="check clocks, temperature and other processes there (nvidia-smi); every step waits for the "
                "slowest device",
            )
