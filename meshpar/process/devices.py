"""The speed of this machine's devices, as their makers state it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float8": 1979e12}

# fmt: off
_BFLOAT16_TERA = {
    "A10": 125, "A10G": 70, "A30": 165, "A40": 149.7, "L4": 121, "L40": 181, "L40S": 362, "H100 PCIe": 756,
    "H100 NVL": 835, "RTX 3090": 71, "RTX 4090": 165.2, "MI250X": 383, "MI300X": 1307.4, "MI325X": 1307.4,
}
# fmt: on
PEAK_FLOPS: Mapping[str, Mapping[str, float]] = {
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "B200": {"bfloat16": 2250e12, "float16": 2250e12, "float32": 80e12, "float8": 4500e12},
    **dict.fromkeys(("H100", "H200", "GH200"), _HOPPER),
    **{name: {"bfloat16": tera * 1e12} for name, tera in _BFLOAT16_TERA.items()},
}
"""Name -> dtype -> FLOP/s of one device, dense with float32 accumulation, from the vendors' data sheets."""


def peak_flops(device: torch.device) -> float | None:
    """Return the device's bfloat16 peak in FLOP/s, by the longest name that matches; None if unknown, as for a CPU."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    fitting = [name for name in PEAK_FLOPS if set(name.split()) <= set(words)]
    return PEAK_FLOPS[max(fitting, key=len)]["bfloat16"] if fitting else None
