"""Save, commit, verify, restore, import, export."""

from meshpar.checkpoints.safetensors import Safetensors

__all__ = ["Safetensors"]
