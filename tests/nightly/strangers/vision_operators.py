"""torchvision built for CUDA beside a torch for the CPU: without its operators nothing that imports it works."""

import importlib.util
from functools import cache
from pathlib import Path

import torch


@cache
def loadable() -> bool:
    """Tell whether torchvision is absent, or its operators can be loaded."""
    found = importlib.util.find_spec("torchvision")
    try:
        for library in Path(found.origin).parent.glob("_C*.so") if found is not None and found.origin else ():
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


@cache
def declared() -> torch.library.Library | None:
    """Declare the two operators without kernels where they cannot be loaded, as long as the result lives."""
    if loadable():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
