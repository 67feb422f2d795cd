"""What cannot have the same bits on every mesh, known before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Pass, Role, axes_of, seen_mesh
from meshpar.passes.data.batch_norm import batch_norms


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
