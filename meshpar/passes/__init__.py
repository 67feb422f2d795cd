"""The passes: one technique each, a subclass of ``Pass`` (``core/passes.py``).

A new one is imported here and in ``meshpar``, and named in the entry points of ``pyproject.toml``; a
stranger's needs the entry point alone. ``passes_for`` says which a mesh usually wants.
"""

import re

from meshpar.core.mesh import MeshSpec, is_auto
from meshpar.core.passes import Pass, Role, Stage
from meshpar.passes.compile import Compile
from meshpar.passes.data.shard_and_reduce import FullyShard, HybridShard, Replicate
from meshpar.passes.experts.parallel import ExpertParallel
from meshpar.passes.float8 import Float8
from meshpar.passes.pipeline.parallel import PipelineParallel
from meshpar.passes.positions.parallel import ContextParallel
from meshpar.passes.recompute import ActivationCheckpoint
from meshpar.passes.tensor.context import Style
from meshpar.passes.tensor.parallel import TensorParallel

__all__ = [
    "ActivationCheckpoint", "Compile", "ContextParallel", "ExpertParallel", "Float8", "FullyShard", "HybridShard",
    "Pass", "PipelineParallel", "Replicate", "Role", "Stage", "Style", "TensorParallel",
]  # fmt: skip

_BY_AXIS: dict[str, type[Pass]] = {
    "pp": PipelineParallel, "ep": ExpertParallel, "cp": ContextParallel, "tp": TensorParallel,
}  # fmt: skip
"""Axis -> the pass that works on it, in the order in which passes apply."""


def passes_for(mesh: MeshSpec | str) -> list[Pass]:
    """Return the passes that a mesh usually wants, one for each of its axes, in their order and without options.

    Two data axes are sharded inside and replicated outside, by HybridShard. Change the list as you like: replace a
    pass by one with options, or add recomputation before the last one.

    >>> ", ".join(each.name for each in passes_for("dp_shard=4,tp=2"))
    'TensorParallel, FullyShard'

    Args:
        mesh: a mesh or its text, such as ``"dp_replicate=2,dp_shard=-1"`` or ``"auto"``.

    Raises:
        MeshError: the text is no mesh.
    """
    if isinstance(mesh, str) and is_auto(mesh):
        axes = {"dp_replicate", "dp_shard", *(axis for axis in _BY_AXIS if re.search(rf"\b{axis}\b", mesh))}
    else:
        axes = set((mesh if isinstance(mesh, MeshSpec) else MeshSpec(mesh)).axes)
    passes = [kind() for axis, kind in _BY_AXIS.items() if axis in axes]
    if data := axes & {"dp_shard", "dp_replicate"}:
        passes.append(HybridShard() if len(data) > 1 else FullyShard() if "dp_shard" in data else Replicate())
    return passes
