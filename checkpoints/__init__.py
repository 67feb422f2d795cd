"""Save, commit, verify, restore, import, export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.imports import lazily

if TYPE_CHECKING:
    from meshpar.checkpoints.dcp import DistributedCheckpoint
    from meshpar.checkpoints.export import export_safetensors
    from meshpar.checkpoints.foreign import TorchWeights
    from meshpar.checkpoints.gguf import export_gguf
    from meshpar.checkpoints.importing import import_safetensors
    from meshpar.checkpoints.inspecting import diff_steps, list_steps, pin_step, prune_steps, remove_step, show_step, verify_step
    from meshpar.checkpoints.manager import CheckpointManager
    from meshpar.checkpoints.manifest import Manifest, read_manifest
    from meshpar.checkpoints.module import export_module
    from meshpar.checkpoints.restoring import RestoredState
    from meshpar.checkpoints.safetensors import Safetensors
    from meshpar.checkpoints.steps import open_step
    from meshpar.checkpoints.verify import verify_files

__all__ = [
    "CheckpointManager",
    "DistributedCheckpoint",
    "Manifest",
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
    "CheckpointManager": "manager",
    "DistributedCheckpoint": "dcp",
    "Manifest": "manifest",
    "RestoredState": "restoring",
    "Safetensors": "safetensors",
    "TorchWeights": "foreign",
    "diff_steps": "inspecting",
    "export_gguf": "gguf",
    "export_module": "module",
    "export_safetensors": "export",
    "import_safetensors": "importing",
    "list_steps": "inspecting",
    "open_step": "steps",
    "pin_step": "inspecting",
    "prune_steps": "inspecting",
    "read_manifest": "manifest",
    "remove_step": "inspecting",
    "show_step": "inspecting",
    "verify_files": "verify",
    "verify_step": "inspecting",
}

# An export needs torch's tensors, and must not wait for torch.distributed.
__getattr__, __dir__ = lazily(__name__, _HOMES)
