"""meshpar: composable parallelism on PyTorch's DeviceMesh.

A plain module, a mesh and a list of passes; the same module comes back, training on that mesh, equal to one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.process.imports import lazily

if TYPE_CHECKING:
    from meshpar.core.errors import (
        CheckpointError,
        LaunchError,
        LayoutError,
        MeshError,
        MeshparError,
        ParallelError,
        PlanError,
        PreflightError,
        RecipeError,
    )
    from meshpar.core.layout import AttentionLayout, ExpertsLayout, ModelLayout, StagesLayout, TensorLayout
    from meshpar.core.mesh import MeshSpec
    from meshpar.core.passes import Installed
    from meshpar.core.patterns import covers, matches
    from meshpar.core.runtime import distributed, init, is_main, print0
    from meshpar.forecasting.api import forecast
    from meshpar.losses.chunked import chunked_token_loss
    from meshpar.losses.token_loss import token_loss
    from meshpar.parallelized import Parallelized
    from meshpar.passes import (
        ActivationCheckpoint,
        Compile,
        ContextParallel,
        ExpertParallel,
        Float8,
        FullyShard,
        HybridShard,
        Pass,
        PipelineParallel,
        Replicate,
        Role,
        Stage,
        TensorParallel,
        passes_for,
    )
    from meshpar.passes.positions.attention import attention, attention_mask
    from meshpar.plan import Plan
    from meshpar.step.moment import Guard, Guarded, Moment
    from meshpar.weights import WeightMap, WeightSource

__version__ = "0.1.0"
"""The version of the package."""

__all__ = [
    "ActivationCheckpoint", "AttentionLayout", "CheckpointError", "Compile", "ContextParallel", "ExpertParallel",
    "ExpertsLayout", "Float8", "FullyShard", "Guard", "Guarded", "HybridShard", "Installed", "LaunchError",
    "LayoutError", "MeshError", "MeshSpec", "MeshparError", "ModelLayout", "Moment", "ParallelError", "Parallelized",
    "Pass", "PipelineParallel", "Plan", "PlanError", "PreflightError", "RecipeError", "Replicate", "Role", "Stage",
    "StagesLayout", "TensorLayout", "TensorParallel", "WeightMap", "WeightSource", "__version__", "attention",
    "attention_mask", "chunked_token_loss", "covers", "distributed", "forecast", "init", "is_main", "matches",
    "passes_for", "print0", "token_loss",
]  # fmt: skip

_PASSES = [
    *("ActivationCheckpoint", "Compile", "ContextParallel", "ExpertParallel", "Float8", "FullyShard", "HybridShard"),
    *("Pass", "PipelineParallel", "Replicate", "Role", "Stage", "TensorParallel", "passes_for"),
]
_HOMES = {
    "core.errors": [name for name in __all__ if name.endswith("Error")],
    "core.layout": ("AttentionLayout", "ExpertsLayout", "ModelLayout", "StagesLayout", "TensorLayout"),
    "core.mesh": ("MeshSpec",), "core.passes": ("Installed",), "core.patterns": ("covers", "matches"),
    "core.runtime": ("distributed", "init", "is_main", "print0"), "forecasting.api": ("forecast",),
    "losses.chunked": ("chunked_token_loss",), "losses.token_loss": ("token_loss",), "parallelized": ("Parallelized",),
    "passes": _PASSES, "plan": ("Plan",), "step.moment": ("Guard", "Guarded", "Moment"),
    "passes.positions.attention": ("attention", "attention_mask"),
    "weights": ("WeightMap", "WeightSource"),
}  # fmt: skip

# The command line's help must not wait for torch.
__getattr__, __dir__ = lazily(__name__, _HOMES)
