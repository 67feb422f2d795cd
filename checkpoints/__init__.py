"""Save, commit, verify, restore, import, export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.process.imports import lazily

if TYPE_CHECKING:
    from meshpar.checkpoints.export.gguf import export_gguf
    from meshpar.checkpoints.export.live import Published, export_module
    from meshpar.checkpoints.export.published import Digest
    from meshpar.checkpoints.export.safetensors import export_safetensors
    from meshpar.checkpoints.format.dcp import DistributedCheckpoint
    from meshpar.checkpoints.format.manifest import Manifest, read_manifest
    from meshpar.checkpoints.format.verify import verify_files
    from meshpar.checkpoints.format.weights import Safetensors, TorchWeights
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
    "CheckpointManager", "Digest", "DistributedCheckpoint", "Manifest", "Published", "RestoredState", "Safetensors",
    "TorchWeights", "diff_steps", "export_gguf", "export_module", "export_safetensors", "import_safetensors",
    "list_steps", "open_step", "pin_step", "prune_steps", "read_manifest", "remove_step", "show_step", "verify_files",
    "verify_step",
]  # fmt: skip

_TOOLS = ("diff_steps", "list_steps", "pin_step", "prune_steps", "remove_step", "show_step", "verify_step")
_HOMES = {
    "export.gguf": ("export_gguf",), "export.live": ("Published", "export_module"), "export.published": ("Digest",),
    "export.safetensors": ("export_safetensors",), "format.dcp": ("DistributedCheckpoint",),
    "format.manifest": ("Manifest", "read_manifest"), "format.verify": ("verify_files",),
    "format.weights": ("Safetensors", "TorchWeights"), "steps.importing": ("import_safetensors",),
    "steps.inspecting": _TOOLS, "steps.manager": ("CheckpointManager",), "steps.restoring": ("RestoredState",),
    "steps.steps": ("open_step",),
}  # fmt: skip

# An export needs torch's tensors, and must not wait for torch.distributed.
__getattr__, __dir__ = lazily(__name__, _HOMES)
