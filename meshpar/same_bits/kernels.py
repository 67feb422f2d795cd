"""The same kernels in every run: deterministic ones on accelerators, and one thread on CPUs."""

from __future__ import annotations

import torch
import torch.utils.deterministic as filling

from meshpar._torch.calls import Undo, set_attribute, undo_all
from meshpar.core import runtime


def fix_kernels(device_type: str) -> Undo:
    """Let torch compute in this process by kernels that give the same bits each time."""
    if runtime.on_host(device_type):
        # reductions are divided among threads, of which a rank has as many as the launcher gives it
        threads = torch.get_num_threads()
        torch.set_num_threads(1)

        def put_back() -> bool:
            if torch.get_num_threads() == 1:
                torch.set_num_threads(threads)
            return True

        return put_back
    runtime.reproduce_products()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)

    def allow() -> bool:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        return True

    # Memory that nobody has written is no input of a kernel.
    return undo_all([set_attribute(filling, "fill_uninitialized_memory", False), allow])
