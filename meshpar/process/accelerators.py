"""Peak speeds of accelerators."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float8": 1979e12}

PEAK_FLOPS: Mapping[str, Mapping[str, float]] = {
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "A10": {"bfloat16": 125e12},
    "A10G": {"bfloat16": 70e12},
    "A30": {"bfloat16": 165e12},
    "A40": {"bfloat16": 149.7e12},
    "L4": {"bfloat16": 121e12},
    "L40": {"bfloat16": 181e12},
    "L40S": {"bfloat16": 362e12},
    "H100": _HOPPER,
    "H100 PCIe": {"bfloat16": 756e12},
    "H100 NVL": {"bfloat16": 835e12},
    "H200": _HOPPER,
    "GH200": _HOPPER,
    "B200": {"bfloat16": 2250e12, "float16": 2250e12, "float32": 80e12, "float8": 4500e12},
    "RTX 3090": {"bfloat16": 71e12},
    "RTX 4090": {"bfloat16": 165.2e12},
    "MI250X": {"bfloat16": 383e12},
    "MI300X": {"bfloat16": 1307.4e12},
    "MI325X": {"bfloat16": 1307.4e12},
}
"""Name -> dtype -> FLOP/s of one device, dense with float32 accumulation, from the vendors' data sheets."""


def peak_flops(device: torch.device) -> float | None:
    """Return the device's bfloat16 peak in FLOP/s, by the longest name that matches; None if unknown, as for a CPU."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    fitting = [name for name in PEAK_FLOPS if set(name.split()) <= set(words)]
    return PEAK_FLOPS[max(fitting, key=len)]["bfloat16"] if fitting else None
