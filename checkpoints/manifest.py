"""``meshpar.json``: what is in a committed checkpoint beside the tensors. A folder without it is not a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from meshpar.errors import CheckpointError

MANIFEST_NAME = "meshpar.json"
FORMAT = "meshpar-checkpoint"
VERSION = 1
Verify = Literal["none", "size", "full"]
_BLOCK_BYTES = 4 << 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The plain data of one checkpoint.

    Attributes:
        step: the optimizer steps taken.
        saved_at: when, UTC, ISO 8601.
        files: file name -> {"size": bytes, "crc32": checksum}.
        mesh: axis name -> size.
        world_size: how many ranks saved it.
        device: type of the device that it was saved from.
        plan: the plan as text.
        tensors: checkpoint name -> {"dtype", "shape"}.
        tied: groups of the model's names that are one tensor.
        weights: the rules from our names to the published ones, see :meth:`meshpar.weights.WeightMap.to_json`.
        config: the published model's ``config.json``.
        optimizer: groups, options and each parameter's keys; None where no optimizer was saved.
        seed: rank 0's seed.
        extra: what the caller added.
        rank_extra: what each rank added.
        metrics: name -> value, by which the best step is told.
        versions: "torch" and "meshpar".
    """

    step: int
    saved_at: str
    files: Mapping[str, Mapping[str, int]]
    mesh: Mapping[str, int]
    world_size: int
    device: str
    plan: str
    tensors: Mapping[str, Mapping[str, Any]]
    tied: Sequence[Sequence[str]] = ()
    weights: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    rank_extra: Sequence[Any] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the file's text, an entry a line."""
        entries = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()) + "\n}\n"


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; raises CheckpointError where the folder holds none that this version can read."""
    path = folder / MANIFEST_NAME
    try:
        data = json.loads(path.read_text())
        kind, version = data.pop("format"), data.pop("version")
        if kind != FORMAT or version > VERSION:
            raise CheckpointError(
                f"{path} has the format {kind!r}, version {version}; this meshpar reads {FORMAT!r} up to version {VERSION}"
            )
        return Manifest(**data)
    except FileNotFoundError as error:
        reason = "no such folder" if not folder.is_dir() else f"it has no {MANIFEST_NAME}, so it was never committed"
        raise CheckpointError(f"{folder} is not a checkpoint: {reason}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def verify_files(folder: Path, manifest: Manifest, level: Verify, names: Iterable[str] | None = None) -> None:
    """Compare the files with the manifest.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        level: ``"size"``: every file is there and has its size; ``"full"``: and its checksum; ``"none"``.
        names: the files to look at; None: all.

    Raises:
        CheckpointError: naming every file that differs.
    """
    if level not in ("none", "size", "full"):
        raise CheckpointError(f"verify must be 'none', 'size' or 'full', got {level!r}")
    if level == "none":
        return
    looked = (
        (name, _problem(folder / name, manifest.files[name], full=level == "full")) for name in (manifest.files if names is None else names)
    )
    if problems := [f"{name}: {problem}" for name, problem in looked if problem]:
        raise CheckpointError("\n  ".join([f"{folder} is damaged; restore an earlier step:", *problems]))


def _problem(path: Path, expected: Mapping[str, int], *, full: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            return f"expected {expected['size']} bytes, found {size}"
        if full and (found := file_crc32(path)) != expected["crc32"]:
            return f"expected the CRC-32 {expected['crc32']:08x}, found {found:08x}"
    except OSError as error:
        return str(error.strerror)
    return None


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    block = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum = zlib.crc32(memoryview(block)[:count], checksum)
    return checksum


def fsync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that it has either its old contents or the new, and is on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)
