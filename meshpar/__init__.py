"""meshpar: composable parallelism on PyTorch's DeviceMesh.

A plain module, a mesh and a list of passes; the same module comes back, training on that mesh, equal to one process.
"""

from meshpar.errors import CheckpointError, LaunchError, LayoutError, MeshError, MeshparError, ParallelError, PlanError, RecipeError
from meshpar.layout import ModelLayout
from meshpar.loss import token_loss
from meshpar.mesh import MeshSpec
from meshpar.parallelized import Parallelized
from meshpar.passes import ActivationCheckpoint, Compile, FullyShard, HybridShard, Pass, Replicate, Stage, TensorParallel
from meshpar.plan import Plan
from meshpar.runtime import distributed
from meshpar.weights import WeightMap, WeightSource

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpoint",
    "CheckpointError",
    "Compile",
    "FullyShard",
    "HybridShard",
    "LaunchError",
    "LayoutError",
    "MeshError",
    "MeshSpec",
    "MeshparError",
    "ModelLayout",
    "ParallelError",
    "Parallelized",
    "Pass",
    "Plan",
    "PlanError",
    "RecipeError",
    "Replicate",
    "Stage",
    "TensorParallel",
    "WeightMap",
    "WeightSource",
    "__version__",
    "distributed",
    "token_loss",
]
