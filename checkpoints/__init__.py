"""Save, commit, verify, restore, import, export."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshpar.checkpoints.export import export_safetensors, write_safetensors
    from meshpar.checkpoints.manager import CheckpointManager
    from meshpar.checkpoints.manifest import Manifest, read_manifest
    from meshpar.checkpoints.module import export_module
    from meshpar.checkpoints.restoring import RestoredState
    from meshpar.checkpoints.safetensors import Safetensors
    from meshpar.checkpoints.steps import open_step

__all__ = [
    "CheckpointManager",
    "Manifest",
    "RestoredState",
    "Safetensors",
    "export_module",
    "export_safetensors",
    "open_step",
    "read_manifest",
    "write_safetensors",
]

_HOMES = {
    "CheckpointManager": "manager",
    "Manifest": "manifest",
    "RestoredState": "restoring",
    "Safetensors": "safetensors",
    "export_module": "module",
    "export_safetensors": "export",
    "open_step": "steps",
    "read_manifest": "manifest",
    "write_safetensors": "export",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used (PEP 562): an export needs torch's tensors, and must not wait for torch.distributed.
    if name not in _HOMES:
        raise AttributeError(f"module 'meshpar.checkpoints' has no attribute {name!r}")
    value = getattr(import_module(f"meshpar.checkpoints.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
