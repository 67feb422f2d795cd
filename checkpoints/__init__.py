"""Save, commit, verify, restore, import, export."""

from meshpar.checkpoints.export import export_safetensors, write_safetensors
from meshpar.checkpoints.manager import CheckpointManager
from meshpar.checkpoints.restoring import RestoredState
from meshpar.checkpoints.safetensors import Safetensors

__all__ = ["CheckpointManager", "RestoredState", "Safetensors", "export_safetensors", "write_safetensors"]
