"""Facts of a rank's machine, as plain data."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import meshpar
from meshpar import runtime

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
        "versions": _versions(device),
        "settings": runtime.settings(*SETTINGS),
        "visible": runtime.settings(*VISIBLE),
        "interfaces": dict(_interfaces()),
        "address": _resolved(host),
        "infiniband": list(_infiniband()),
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


def _versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "meshpar": meshpar.__version__}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        from torch.cuda import nccl

        found["nccl"] = ".".join(map(str, nccl.version()))
        driver = Path("/proc/driver/nvidia/version")
        found["driver"] = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "unknown"
    return found


def _interfaces() -> Iterator[tuple[str, dict[str, Any]]]:
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


def _infiniband() -> Iterator[dict[str, str]]:
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        read = {name: (port / name).read_text(encoding="utf-8").strip() for name in ("state", "rate") if (port / name).exists()}
        yield {"port": f"{port.parts[-3]}/{port.name}", "state": read.get("state", "?"), "rate": read.get("rate", "?")}


def _room(folder: Path) -> dict[str, int] | None:
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    return {"total": usage.total, "free": usage.free}
