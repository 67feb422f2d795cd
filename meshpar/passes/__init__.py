"""The passes: one technique each, a subclass of ``Pass`` (``core/passes.py``).

A new one is imported here and in ``meshpar``, and named in the entry points of ``pyproject.toml``; ``usual.py`` says
which a mesh usually wants. A stranger's needs the entry point alone.
"""

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
