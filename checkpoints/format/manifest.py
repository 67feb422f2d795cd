"""``meshpar.json``: the plain data of a committed checkpoint. A folder without this file is not a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from meshpar.checkpoints.storage.checksums import crc32
from meshpar.checkpoints.storage.files import inside
from meshpar.checkpoints.storage.place import Place, PlaceLike, by_storage, place
from meshpar.core.errors import CheckpointError, brief
from meshpar.weights.rules import Spans

MANIFEST_NAME = "meshpar.json"
MODEL = "model."  # prefix of the module's tensors in a checkpoint
AVERAGES = "averages."  # prefix of the averages' tensors, before the name of the average and of the tensor
RANDOM = "random."  # prefix of the ranks' random states
FORMAT = "meshpar-checkpoint"
VERSION = 2
# The only key of an object that encodes a dict with keys of int, or a Counter.
_INTEGER_KEYS, _COUNTER = ("__integer_keys__", "__counter__")
_STEP = re.compile(r"step-(\d+)")
_SEAL = re.compile(rb'"crc32": "([0-9a-f]{8})"\n}\n')


class SavedPart(NamedTuple):
    """One saved part of a tensor: the box at ``offsets``, and position and length of its archive in bytes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int
    length: int

    @property
    def spans(self) -> Spans:
        return tuple((offset, offset + size) for offset, size in zip(self.offsets, self.shape))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Describe one checkpoint as plain data.

    Attributes:
        step: number of the step.
        saved_at: time of the save, UTC, ISO 8601.
        files: file name -> {"size": bytes, "crc32": checksum}, and "sha256" if that was requested; of a file with
            tensors also "sums": the CRC-32 of the table at its end, which has the CRC-32 of each part's archive in the
            order of the file, 4 bytes a part, little-endian.
        mesh: axis name -> size.
        world_size: number of ranks that saved it.
        device: type of the device from which it was saved.
        plan: the plan as text.
        tensors: checkpoint name -> {"dtype", "shape", "chunks"}; a chunk is [offsets, shape, file, position, length];
            version 1 of the format also has its crc32 there, and no tables.
        tied: groups of names in the model that are one tensor.
        weights: the rules from our names to the published ones, see :meth:`meshpar.weights.WeightMap.to_json`.
        config: the published model's ``config.json``.
        optimizer: class (of several: class of each name), groups, options and each parameter's keys; None if no
            optimizer was saved.
        seed: rank 0's seed.
        extra: ``save(extra=)`` of rank 0.
        rank_extra: ``save(rank_extra=)`` of each rank.
        metrics: name -> value, from which the best step is chosen.
        versions: versions of "torch" and "meshpar".
        averages: name -> numbers of updates and calls of the average.
        parts: the folder with the files, inside of the step's; empty: the step's own. In an object store two saves of
            one step have two folders, and the manifest, created once, chooses.
    """

    step: int
    saved_at: str
    files: Mapping[str, Mapping[str, Any]]
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
    averages: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parts: str = ""

    def files_in(self, folder: Place) -> Place:
        """Return the folder with the files of the step in ``folder``."""
        return folder / self.parts if self.parts else folder

    def to_json(self) -> str:
        """Return the file's text, one entry per line; the last entry is the CRC-32 of all lines before it."""
        entries = {"format": FORMAT, "version": VERSION} | {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if entry.name not in ("averages", "parts") or getattr(self, entry.name)
        }
        texts = {
            key: value.text if isinstance(value, Encoded) else json.dumps(_encoded(value))
            for key, value in entries.items()
        }
        text = "{\n" + "".join(f"{json.dumps(key)}: {value},\n" for key, value in texts.items())
        return f'{text}"crc32": "{crc32(text.encode()):08x}"\n}}\n'


def read_manifest(folder: PlaceLike) -> Manifest:
    """Read a checkpoint's manifest; raises CheckpointError if it is missing, damaged, or of a newer version."""
    folder = place(folder)
    path = folder / MANIFEST_NAME
    try:
        if (text := path.read_small()) is None:
            reason = f"it has no {MANIFEST_NAME}, so it was never committed" if folder.is_dir() else "no such folder"
            raise CheckpointError(f"{folder} is not a checkpoint of a run: {reason}{remedy(folder)}")
        seal = _SEAL.search(text, max(0, len(text) - 32))
        data = json.loads(text, object_hook=_decoded)
        kind, version = data.pop("format"), data.pop("version")
        if kind != FORMAT or version > VERSION:
            raise CheckpointError(
                f"{path} has the format {kind!r}, version {version}; this meshpar reads {FORMAT!r} up to version "
                f"{VERSION}"
            )
        if seal is None or seal.end() != len(text) or crc32(text[: seal.start()]) != int(data.pop("crc32"), 16):
            raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
        if wrong := [name for name, kind in _KINDS.items() if name in data and not _is(data[name], kind)]:
            raise ValueError(f"values of other types in {', '.join(wrong)}")
        manifest = Manifest(**data)
        files_of_parts = {chunk[2] for entry in manifest.tensors.values() for chunk in entry["chunks"]}
        for name in {*manifest.files, *filter(None, [manifest.parts]), *files_of_parts}:
            inside(name, of=path)
        if (named := step_of(folder.name.partition(".")[0])) not in (None, manifest.step):
            raise CheckpointError(
                f"{folder} is named step {named} and contains step {manifest.step}: it was renamed or replaced; rename "
                "it back"
            )
        return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: expected {FORMAT!r} as JSON, got {brief(error)}; restore another step, with "
            "restore(step=...) or restore(fallback=True)"
        ) from error


# A type; [kind], {str: kind}: a list, a dict of these; {"key": kind}: a dict (or list) with at least these keys; (kind,
# ...): one of these.
_CHUNK = {0: [int], 1: [int], 2: str, 3: int, 4: int}  # of a list
_KINDS: Mapping[str, Any] = {
    "step": int, "saved_at": str, "files": {str: {"size": int, "crc32": int}},
    "mesh": {str: int}, "world_size": int, "device": str, "plan": str,
    "tensors": {str: {"dtype": str, "shape": [int], "chunks": [_CHUNK]}}, "tied": [[str]],
    "weights": [dict], "config": dict,
    "optimizer": (None, {"class": (str, {str: str}), "groups": [{"params": [str], "options": dict}],
                         "state": {str: dict}}),
    "seed": int, "extra": dict, "rank_extra": list, "metrics": {str: (int, float, None)}, "versions": {str: str},
    "averages": {str: {"updates": int, "calls": int}}, "parts": str,
}  # fmt: skip


def _is(value: object, kind: Any) -> bool:  # noqa: ANN401 - a type, or types in a list, dict or tuple
    if isinstance(kind, tuple):
        return any(_is(value, option) for option in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is(element, kind[0]) for element in value)
    if isinstance(kind, dict):
        entries = dict(enumerate(value)) if isinstance(value, list) and 0 in kind else value
        if not isinstance(entries, dict):
            return False
        if str in kind:
            return all(isinstance(key, str) and _is(element, kind[str]) for key, element in entries.items())
        return all(key in entries and _is(entries[key], wanted) for key, wanted in kind.items())
    if kind is None or (kind is int and isinstance(value, bool)):
        return kind is None and value is None
    return isinstance(value, kind)


@final
class Encoded(Mapping[str, Any]):
    """A mapping that is JSON already; it is parsed when an entry is read."""

    def __init__(self, text: str) -> None:
        self.text = text

    @functools.cached_property
    def _entries(self) -> dict[str, Any]:
        return json.loads(self.text)

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - plain data
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _encoded(value: object) -> Any:  # noqa: ANN401 - plain data
    if isinstance(value, (list, tuple)):
        return [_encoded(element) for element in value]
    if not isinstance(value, Mapping):
        return value
    entries = {str(key): _encoded(element) for key, element in value.items()}
    if all(isinstance(key, str) for key in value):
        return entries
    return {_COUNTER if isinstance(value, Counter) else _INTEGER_KEYS: entries}


def _decoded(entry: dict[str, Any]) -> dict[Any, Any]:
    """Return the mapping of which :func:`_encoded` made a JSON object."""
    if len(entry) == 1 and (kind := next(iter(entry))) in (_INTEGER_KEYS, _COUNTER):
        return (Counter if kind == _COUNTER else dict)({int(key): value for key, value in entry[kind].items()})
    return entry


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step whose folder has this name; None for any other name."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


# the folder, in a checkpoint of accelerate's FSDP, with {"model": ...} as a distributed checkpoint
ACCELERATE = "pytorch_model_fsdp_0"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_PICKLES = tuple(f"*{suffix}" for suffix in PICKLED)
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
    ("*.distcp",): (
        "it has parts of a distributed checkpoint of torch: read the folder with .metadata by "
        "DistributedCheckpoint(folder)"
    ),
    ("*.safetensors",): "it has safetensors: read them by Safetensors(path), or convert them by meshpar import",
    _PICKLES: "it has files of torch.save: read them by TorchWeights(path), or convert them by meshpar import",
}


def remedy(path: PlaceLike) -> str:
    """Return ``; it is a ... checkpoint: ...`` for a file or folder of a known format, otherwise an empty text."""

    def of_disk(path: Path) -> str:
        folder = path if path.is_dir() else path.parent
        for patterns, text in _FORMATS.items():
            files = (file for pattern in patterns for file in folder.glob(pattern))
            if any(path.is_dir() or file == path for file in files):
                return f"; {text}"
        return ""

    return by_storage(path, disk=of_disk, store=lambda _: "")  # in a store each pattern is a listing


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in an order that is the same from every mesh: by parts, numbers as numbers."""

    def parts(name: str) -> list[str | int]:
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]

    return sorted(names, key=parts)
