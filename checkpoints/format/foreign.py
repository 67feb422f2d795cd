"""Formats of other programs: files of ``torch.save`` as a source of weights, and the names of formats that are not
read.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch

from meshpar.checkpoints.storage.place import Place, PlaceLike, either, entries, place
from meshpar.checkpoints.storage.transfer import fetched
from meshpar.core.errors import CheckpointError, brief
from meshpar.core.patterns import suggestion

ACCELERATE = "pytorch_model_fsdp_0"
"""The folder, in a checkpoint of accelerate's FSDP, with ``{"model": ...}`` as a distributed checkpoint."""
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_FORMATS = {  # the files by which a format is known -> the remedy
    (f"{ACCELERATE}/.metadata",): (
        f"it is a checkpoint of accelerate's FSDP: read it by DistributedCheckpoint(folder / '{ACCELERATE}', "
        "prefix='model.'), or convert it by meshpar import with --config FOLDER, which has the model's config.json"
    ),
    ("pytorch_model_fsdp*_rank*.bin",): (
        "it has a file for each rank of accelerate's FSDP, which only these ranks can read: save it with the "
        "state_dict_type SHARDED_STATE_DICT"
    ),
    ("zero_to_fp32.py", "*_model_states.pt", "global_step*/*_model_states.pt"): (
        "it is a DeepSpeed checkpoint: convert it by its zero_to_fp32.py with --safe_serialization"
    ),
    ("latest_checkpointed_iteration.txt", "mp_rank_*/model_optim_rng.pt", "common.pt"): (
        "it is a Megatron checkpoint: convert it to Hugging Face's format, such as by Megatron-Bridge"
    ),
    (".metadata",): "it is a distributed checkpoint of torch: read it by DistributedCheckpoint(folder)",
    ("*.distcp",): "it has parts of a distributed checkpoint of torch: read the folder with .metadata by "
    "DistributedCheckpoint(folder)",
    ("*.safetensors",): "it has safetensors: read them by Safetensors(path), or convert them by meshpar import",
    tuple(
        f"*{suffix}" for suffix in PICKLED
    ): "it has files of torch.save: read them by TorchWeights(path), or convert them by meshpar import",
}


def remedy(path: PlaceLike) -> str:
    """Return ``; it is a ... checkpoint: ...`` for a file or folder of a known format, otherwise an empty text."""
    return either(path, disk=_remedy, store=lambda _: "")  # in a store each pattern is a listing


def _remedy(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    for patterns, text in _FORMATS.items():
        files = (file for pattern in patterns for file in folder.glob(pattern))
        if any(path.is_dir() or file == path for file in files):
            return f"; {text}"
    return ""


def sharded_by_accelerate(path: Place) -> Place | None:
    """Return the distributed checkpoint in one of accelerate's FSDP or in its folder of weights; None without one."""
    folder = path if path.name == ACCELERATE else path / ACCELERATE
    return folder if (folder / ".metadata").is_file() else None


def is_pickled(path: Place) -> bool:
    """Return whether weights are in files of ``torch.save``, and not in safetensors."""
    return path.suffix in PICKLED or (path.is_dir() and not any(path.glob("*.safetensors*")) and bool(_files(path)))


@final
class TorchWeights:
    """Read the tensors of files of ``torch.save`` as a WeightSource, by torch's weights-only loader, which runs no
    code.

    >>> par.materialize(weights=TorchWeights("model.pt", prefix="model."))  # doctest: +SKIP

    Args:
        path: a file (``.pt``, ``.pth``, ``.bin``, ``.ckpt``), or a folder of these. Those of a store are copied to a
            temporary folder of this process, because torch maps them.
        prefix: only tensors whose name begins with it, without it. Nested dicts have dotted names.

    Raises:
        CheckpointError: a file is damaged, contains other objects than plain data and tensors, or no such tensor.
    """

    def __init__(self, path: PlaceLike, *, prefix: str = "") -> None:
        self._path, self._tensors = place(path), dict[str, torch.Tensor]()
        if self._path.is_dir() and (other := remedy(self._path)) and TorchWeights.__name__ not in other:
            raise CheckpointError(f"{self._path} is not a folder of torch.save{other}")
        for file in _files(self._path) if self._path.is_dir() else [self._path]:
            for name, tensor in _flat(_loaded(fetched(file))).items():
                if name in self._tensors:
                    raise CheckpointError(
                        f"{name!r} is in {file} and in another file of {self._path}; remove one of them"
                    )
                self._tensors[name] = tensor
        self._tensors = {
            name.removeprefix(prefix): tensor for name, tensor in self._tensors.items() if name.startswith(prefix)
        }
        if not self._tensors:
            which = f" whose names begin with {prefix!r}" if prefix else ""
            raise CheckpointError(f"{self._path} has no tensors{which}")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return every tensor's name and dtype."""
        return {name: tensor.dtype for name, tensor in self._tensors.items()}

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no tensor {name!r}; {suggestion(name, self._tensors)}")
        out.copy_(self._tensors[name][index])


def _files(folder: Place) -> list[Place]:
    """Return the files with weights: those that transformers writes, otherwise all."""
    return entries(folder, "pytorch_model*.bin") or [entry for entry in entries(folder) if entry.suffix in PICKLED]


def _loaded(file: Path) -> object:
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}")
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # torch's format before 1.6 cannot be mapped
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} contains other objects than tensors and plain data, which could run code, or is damaged; load "
            f"the file where you trust it, and save the state_dict alone: {brief(error)}"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} is not a complete file of torch.save: {brief(error)}") from error


def _flat(value: object, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    entries = value.items() if isinstance(value, Mapping) else ()
    return {
        key: tensor
        for outer_key, inner in entries
        for key, tensor in _flat(inner, f"{name}.{outer_key}" if name else str(outer_key)).items()
    }
