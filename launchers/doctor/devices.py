"""Accelerators: what NVML says of each, a product that each computes, and a measured hardware profile."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshpar._torch.groups import all_gather
from meshpar.core import runtime
from meshpar.core.mesh import MeshSpec
from meshpar.forecasting.hardware import Hardware
from meshpar.launchers.doctor.checks import Facts, Finding, Found, hosts_of, ranks_text
from meshpar.launchers.recipes.yamlfile import to_yaml

T = TypeVar("T")

SLOW = 0.9
"""A device that computes slower than the median of its kind by this factor is a finding: every step waits for it."""
_SIZE, _CALLS = 8192, 20
_HELD_BACK = {0x8: "hardware slowdown", 0x20: "temperature (software)", 0x40: "temperature", 0x80: "power brake"}
"""Bits of NVML's clock event reasons that say that a device is not well."""


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

    def ask(question: Callable[..., T], *arguments: object) -> T | None:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:  # this kind of device has no such thing
            return None

    rows = ask(nvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
    links = [ask(nvml.nvmlDeviceGetNvLinkState, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    return {
        "uncorrected": ask(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        or 0,
        "rows_pending": bool(rows[2]),
        "rows_failed": bool(rows[3]),
        "held_back": ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0,
        "links_up": sum(link == 1 for link in links),
        "width": ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        "most_width": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
    }


def health_findings(found: Found) -> Iterator[Finding]:
    devices = [(fact, fact["device"]["health"]) for fact in found if fact["device"].get("health")]
    most_links = max((health["links_up"] for _, health in devices), default=0)
    swap = "drain the node, reset or replace the device, and look at its Xid errors (dmesg | grep Xid)"
    cool = "check cooling and power of the host (nvidia-smi -q -d PERFORMANCE)"
    faults: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
        ("devices have uncorrected memory errors since the driver was loaded", lambda bad: bad["uncorrected"], swap),
        ("devices cannot replace rows of their memory any more", lambda bad: bad["rows_failed"], swap),
        (
            "devices wait for a reset to replace rows of their memory",
            lambda bad: bad["rows_pending"],
            "reset the devices",
        ),
        *(
            (f"clocks of devices are held back: {reason}", lambda bad, bit=bit: bad["held_back"] & bit, cool)
            for bit, reason in _HELD_BACK.items()
        ),
        (
            f"NVLinks are down: other devices have {most_links}",
            lambda bad: bad["links_up"] < most_links,
            "check the links (nvidia-smi nvlink -s)",
        ),
        (
            "PCIe links are narrower than they can be",
            lambda bad: (bad["width"] or 0) < (bad["most_width"] or 0),
            "seat the device anew, check its riser",
        ),
    ]
    for what, is_bad, do in faults:
        if bad := [fact for fact, health in devices if is_bad(health)]:
            yield Finding(what, ranks_text(bad), do)


def product(device: torch.device, size: int = _SIZE) -> tuple[float, str]:
    """Return a matrix product's operations per second, and a digest of its result: equal on devices of a kind."""
    ramp = torch.arange(size * size, dtype=torch.int32, device=device).view(size, size) % 251
    matrix = (ramp.float() / 251 - 0.5).to(torch.bfloat16)
    result = matrix @ matrix.t()
    _wait(device)
    start = time.perf_counter()
    for _ in range(_CALLS):
        torch.mm(matrix, matrix.t(), out=result)
    _wait(device)
    rate = 2 * size**3 * _CALLS / (time.perf_counter() - start)
    return rate, hashlib.blake2b(result.view(torch.uint8).cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _wait(device: torch.device) -> None:
    if runtime.queues(device):
        torch.accelerator.synchronize(device)


def product_findings(found: Found, products: list[tuple[float, str]]) -> Iterator[Finding]:
    """Yield devices that compute another result than most of their kind, or are slower."""
    for kind in dict.fromkeys(fact["device"]["kind"] for fact in found):
        pairs = zip(found, products, strict=True)
        alike = [(fact, *result) for fact, result in pairs if fact["device"]["kind"] == kind]
        usual = statistics.mode(digest for _, _, digest in alike)
        if bad := [fact for fact, _, digest in alike if digest != usual]:
            what = f"devices of the kind {kind} compute another product than the others"
            do = "drain the node: these devices would train wrong weights without an error"
            yield Finding(what, ranks_text(bad), do)
        middle = statistics.median(rate for _, rate, _ in alike)
        if slow := [(fact, rate) for fact, rate, _ in alike if rate < SLOW * middle]:
            what = f"devices compute slower than the others of their kind, which reach {middle / 1e12:.0f} TFLOP/s"
            where = "; ".join(f"{ranks_text([fact])}: {rate / 1e12:.0f}" for fact, rate in slow[:8])
            advice = "check clocks, temperature and other processes there (nvidia-smi)"
            yield Finding(what, where, f"{advice}; every step waits for the slowest device")


FIRST_BYTES, ENOUGH_S, REPEATS = 1 << 18, 0.02, 5
MOST_BYTES = {"cpu": 1 << 24}
_MOST_BYTES = 1 << 28  # on an accelerator
_LONG_S, _SHORT_S = 0.5, 0.05
_CONTENTION = 0.4
"""Not measured: what accelerators with a profile of their own were fitted to (docs/forecast.md)."""
_DTYPES = ("float32", "bfloat16", "float16")


def _gathered_rate(group: dist.ProcessGroup, size: int, device: torch.device) -> float:
    """Return the bytes a second that a rank sends in an all-gather, in the slowest group of an axis."""
    count, limit = FIRST_BYTES // 4, MOST_BYTES.get(device.type, _MOST_BYTES)
    while True:
        whole = torch.zeros(-(-count // size) * size, device=device)
        part = torch.zeros(whole.numel() // size, device=device)
        run = partial(all_gather, whole, part, group)
        # Other work may delay one call: a tensor is large enough when none of several calls is quick.
        if count * 8 * 4 > limit or all(_slowest(_timed(run, device), device) >= ENOUGH_S for _ in range(REPEATS)):
            break
        count *= 8
    seconds = _slowest(min(_timed(run, device) for _ in range(REPEATS)), device)
    return (size - 1) / size * count * 4 / seconds


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call that all ranks start together."""
    dist.barrier()
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    if runtime.world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def measured_profile(facts: Sequence[Facts], device: torch.device) -> str:
    """Measure the profile and return its YAML. Collective; all ranks compute at once, the slowest counts."""
    hosts = len(hosts_of(facts))
    per_host = len(facts) // hosts
    memory = _memory(device, per_host)
    values: dict[str, Any] = {
        "name": re.sub(r"[^a-z0-9]+", "-", str(facts[0]["device"]["kind"]).lower()).strip("-") + "-measured",
        **_computing(device),
        **memory,
        "clock": 1.0,
        "node": per_host,
        **_links(hosts, per_host, device, memory["memory_bandwidth"]),
        "contention": _CONTENTION if runtime.queues(device) else 0.0,
        "switched": True,
    }
    hardware = Hardware.of(values, "the measured profile")
    fields = asdict(hardware) | {"peak": dict(hardware.peak)}
    return to_yaml({name: _rounded(value) for name, value in fields.items()})


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _computing(device: torch.device) -> dict[str, Any]:
    """Measure matrix products by dtype and size, attention, and the overhead of an operator."""
    sizes = (256, 1024, 4096, 8192) if runtime.queues(device) else (256, 512, 1024, 2048)
    rates: dict[str, dict[int, float]] = {dtype: {} for dtype in _DTYPES}
    for dtype in _DTYPES:
        for size in sizes:
            rates[dtype][size] = rate = _product_rate(size, dtype, device)
            if 2 * size**3 / rate > _SHORT_S:  # CPUs without half precision take seconds for what comes next
                break
    peak = {dtype: max(by_size.values()) for dtype, by_size in rates.items()}
    main = "bfloat16" if runtime.queues(device) else "float32"
    matmul = min(1.0, _product_rate(max(rates[main]), main, device, _LONG_S) / peak[main])
    # rate(s) = peak x matmul x (s / (s + tile)) ** 2, the forecast's own form for a square product
    share = min(1.0, rates[main][sizes[0]] / (peak[main] * matmul))
    tile = sizes[0] * (share**-0.5 - 1)
    forward, backward = _attention(main, device)
    tiny = torch.zeros(8, device=device)
    launch = _slowest(_seconds(lambda: tiny.add_(1), device, _SHORT_S), device)
    return {
        "peak": peak,
        "matmul": matmul,
        "tile": tile,
        "attention_forward": min(1.0, forward / peak[main]),
        "attention_backward": min(1.0, backward / peak[main]),
        "launch": launch if runtime.queues(device) else 0.0,
        "host": launch,
    }


def _product_rate(size: int, dtype: str, device: torch.device, least_s: float = _SHORT_S) -> float:
    a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    return 2 * size**3 / _slowest(_seconds(partial(torch.mm, a, a, out=torch.empty_like(a)), device, least_s), device)


def _attention(dtype: str, device: torch.device) -> tuple[float, float]:
    """Return operations a second of causal attention, forward and backward, counted as the forecast does."""
    heads, length, dim = (32, 4096, 128) if runtime.queues(device) else (4, 512, 64)
    query, key, value = (
        torch.randn(1, heads, length, dim, device=device).to(getattr(torch, dtype)).requires_grad_() for _ in range(3)
    )
    flops = 0.5 * 4 * heads * length**2 * dim

    forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    alone = _slowest(_seconds(forward, device, _SHORT_S), device)
    together = _slowest(_seconds(lambda: forward().sum().backward(), device, _SHORT_S), device)
    return flops / alone, 2.5 * flops / max(together - alone, alone / 10)


def _memory(device: torch.device, per_host: int) -> dict[str, float]:
    size = (1 << 29) if runtime.queues(device) else (1 << 26)
    a, b = (torch.ones(size // 4, device=device) for _ in range(2))
    copied = 2 * size / _slowest(_seconds(lambda: a.copy_(b), device, _SHORT_S), device)
    added = 3 * size / _slowest(_seconds(lambda: torch.add(a, b, out=a), device, _SHORT_S), device)
    if not runtime.queues(device):
        total, taken = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / per_host, 0.0
    else:
        free, whole = torch.cuda.mem_get_info(device)
        total, taken = float(whole), float(whole - free - torch.cuda.memory_reserved(device))
    best = max(copied, added)
    return {
        "memory": total,
        "reserved": max(0.0, taken),
        "memory_bandwidth": best,
        "memory_fraction": min(copied, added) / best,
    }


def _links(hosts: int, per_host: int, device: torch.device, inside_a_rank: float) -> dict[str, Any]:
    with MeshSpec.auto(hosts * per_host, per_host).opened(device.type) as mesh:
        axes = [axis for axis in ("dp_shard", "dp_replicate") if mesh[axis].size() > 1]
        speeds = {axis: _gathered_rate(mesh.get_group(axis), mesh[axis].size(), device) for axis in axes}
        wait = {axis: _latency(mesh.get_group(axis), device) for axis in axes}
    in_host, across = speeds.get("dp_shard"), speeds.get("dp_replicate")
    made_by = f"meshpar doctor --profile on {hosts} x {per_host} {device.type}, torch {torch.__version__}"
    sources = [f"{made_by}, {time.strftime('%Y-%m-%d')}"]
    if in_host is None and across is None:
        sources.append("one rank: no link was measured; the link values are those of memory; start more ranks")
    elif in_host is None:
        sources.append("one rank per host: links inside a host were not measured; their values are the network's")
    elif across is None:
        sources.append("one host: the network was not measured; its values are those of links inside the host")
    rates = [*speeds.values()] or [inside_a_rank]
    latency = list(wait.values()) or [0.0]
    return {
        "node_bandwidth": rates[0] if in_host is None else in_host,
        "network_bandwidth": rates[0] if across is None else across,
        "node_fraction": 1.0,
        "network_fraction": 1.0,
        "node_latency": wait.get("dp_shard", latency[0]),
        "network_latency": wait.get("dp_replicate", latency[0]),
        "sources": "; ".join(sources),
    }


def _latency(group: dist.ProcessGroup, device: torch.device) -> float:
    element = torch.zeros(1, device=device)
    for calls in (5, 20):  # the first ones warm up
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(element, group=group)
        _wait(device)
    return (time.perf_counter() - start) / 20


def _seconds(run: Callable[[], object], device: torch.device, least_s: float) -> float:
    """Return the mean seconds of a call, over as many calls as take ``least_s``."""
    run()
    _wait(device)
    calls, start = 0, time.perf_counter()
    at_once = 10 if runtime.queues(device) else 1
    while time.perf_counter() - start < least_s:
        for _ in range(at_once):
            run()
        _wait(device)
        calls += at_once
    return (time.perf_counter() - start) / calls
