"""Where the order of sums is not enough: plans that are refused, kernels of torch, and its norms of shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.utils.deterministic as filling
from torch import Tensor, nn

from meshpar._torch.calls import Undo, set_attribute, undo_all
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Pass, Role, axes_of, seen_mesh
from meshpar.passes.data.batch_norm import batch_norms
from meshpar.tensors.placements import sharded_axes

RUNS = weakref.WeakSet[object]()
"""The runs under ``same_bits``."""


def bits_problems(passes: Sequence[Pass], module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
    """Yield why a plan cannot keep the bits of one process, one line each."""
    for axis in axes_of(passes, mesh, Role.SAMPLES):
        size = mesh.axes[axis]
        if size & (size - 1):
            below = 1 << (size.bit_length() - 1)
            yield (
                f"same_bits adds up samples in the order of a binary tree, and {axis}={size} is no power of two; use "
                f"{axis}={below} or {axis}={2 * below}"
            )
    for pass_ in passes:
        if all(axis in mesh.axes for axis in pass_.axes):
            yield from pass_.bits_problems(module, layout, seen_mesh(pass_, passes, mesh))
    for name, child in batch_norms(module):
        yield (
            f"{name} ({type(child).__name__}) computes statistics of all samples of a forward, whose number follows "
            "the mesh under same_bits; use a norm that does not work across the batch"
        )


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


def refuse_norms_of_shards(gradients: Iterable[Tensor]) -> None:
    """Refuse gradients whose squares torch would add up shard by shard, while a run needs the same bits."""
    if RUNS and any(map(sharded_axes, gradients)):
        raise MeshparError(
            "torch.nn.utils.clip_grad_norm_ adds up the squares of each rank's shards, so that the last bits of the "
            "norm follow the mesh; under same_bits call par.clip_grad_norm_(max_norm)"
        )
