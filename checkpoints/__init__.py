"""Save, commit, verify, restore, import, export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.imports import lazily

if TYPE_CHECKING:
    from meshpar.checkpoints.export.gguf import export_gguf
    from meshpar.checkpoints.export.live import Published
    from meshpar.checkpoints.export.module import export_module
    from meshpar.checkpoints.export.safetensors import export_safetensors
    from meshpar.checkpoints.format.dcp import DistributedCheckpoint
    from meshpar.checkpoints.format.foreign import TorchWeights
    from meshpar.checkpoints.format.manifest import Manifest, read_manifest
    from meshpar.checkpoints.format.safetensors import Safetensors
    from meshpar.checkpoints.format.verify import verify_files
    from meshpar.checkpoints.steps.importing import import_safetensors
    from meshpar.checkpoints.steps.inspecting import (
        diff_steps,
        list_steps,
        pin_step,
        prune_steps,
        remove_step,
        show_step,
        verify_step,
    )
    from meshpar.checkpoints.steps.manager import CheckpointManager
    from meshpar.checkpoints.steps.restoring import RestoredState
    from meshpar.checkpoints.steps.steps import open_step

__all__ = [
    "CheckpointManager",
    "DistributedCheckpoint",
    "Manifest",
    "Published",
    "RestoredState",
    "Safetensors",
    "TorchWeights",
    "diff_steps",
    "export_gguf",
    "export_module",
    "export_safetensors",
    "import_safetensors",
    "list_steps",
    "open_step",
    "pin_step",
    "prune_steps",
    "read_manifest",
    "remove_step",
    "show_step",
    "verify_files",
    "verify_step",
]

_HOMES = {
    "CheckpointManager": "steps.manager",
    "DistributedCheckpoint": "format.dcp",
    "Manifest": "format.manifest",
    "Published": "export.live",
    "RestoredState": "steps.restoring",
    "Safetensors": "format.safetensors",
    "TorchWeights": "format.foreign",
    "diff_steps": "steps.inspecting",
    "export_gguf": "export.gguf",
    "export_module": "export.module",
    "export_safetensors": "export.safetensors",
    "import_safetensors": "steps.importing",
    "list_steps": "steps.inspecting",
    "open_step": "steps.steps",
    "pin_step": "steps.inspecting",
    "prune_steps": "steps.inspecting",
    "read_manifest": "format.manifest",
    "remove_step": "steps.inspecting",
    "show_step": "steps.inspecting",
    "verify_files": "format.verify",
    "verify_step": "steps.inspecting",
}

# An export needs torch's tensors, and must not wait for torch.distributed.
__getattr__, __dir__ = lazily(__name__, _HOMES)
