"""Compare a checkpoint's files with the CRC-32 of its manifest, and name the tensors in which bytes differ."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

from meshpar.checkpoints.format.dcp import METADATA_NAME, DistributedCheckpoint
from meshpar.checkpoints.format.manifest import MODEL, Manifest, SavedPart
from meshpar.checkpoints.storage.checksums import combine_sums, crc32
from meshpar.checkpoints.storage.files import BLOCK_BYTES, Readable
from meshpar.checkpoints.storage.place import Place, PlaceLike, place
from meshpar.core.errors import CheckpointError, StoreError

Verify = Literal["none", "size", "full"]
_NamedPart = tuple[str, SavedPart]


def verify_files(folder: PlaceLike, manifest: Manifest, level: Verify, names: Iterable[str] | None = None) -> None:
    """Compare the files of a checkpoint with its manifest.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        level: ``"none"``; ``"size"``: compare the size of every file; ``"full"``: also every byte.
        names: the files to compare; None: all files, and with ``"full"`` also torch's metadata with the manifest.

    Raises:
        CheckpointError: names every file that differs, and the tensors in it that differ.
    """
    if level not in ("none", "size", "full"):
        raise CheckpointError(f"verify is {level!r}; expected 'none', 'size' or 'full'")
    if level == "none":
        return
    files, sums = manifest.files_in(place(folder)), Sums(manifest) if level == "full" else None
    parts: dict[str, list[tuple[str, SavedPart]]] = {}
    for entry in _chunks(manifest) if level == "full" else ():
        parts.setdefault(entry[1].file, []).append(entry)
    problems: list[str] = []
    for name in manifest.files if names is None else names:
        full = level == "full" or name == METADATA_NAME
        differences = _problems(files / name, manifest.files[name], parts.get(name, ()), sums, full=full)
        problems += [f"{name}: {difference}" for difference in differences]
    if not problems and level == "full" and names is None:
        problems += _disagreements(DistributedCheckpoint(files), manifest)
    _raise_for(place(folder), problems)


def open_verified(
    folder: Place, manifest: Manifest, level: Verify, names: Iterable[str] | None = None, *, whole: bool = True
) -> DistributedCheckpoint:
    """Return a step's tensors after :func:`verify_files`; not ``whole``: the caller verifies what ``"full"`` asks."""
    verify_files(folder, manifest, level if whole or level != "full" else "size", names)
    source = DistributedCheckpoint(manifest.files_in(folder), checked=level != "none", sums=Sums(manifest))
    _raise_for(folder, list(_disagreements(source, manifest) if level != "none" else ()))
    return source


def _raise_for(folder: Place, problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointError("\n  ".join([f"{folder} is damaged; restore an earlier step:", *problems]))


@final
class Sums:
    """The CRC-32 of each part's archive: from the table at the end of its file, or a manifest of version 1."""

    def __init__(self, manifest: Manifest) -> None:
        self._files = manifest.files
        self._at: dict[str, dict[int, int | None]] = {}  # of each file: position of a part -> its checksum, if known
        for entry in manifest.tensors.values():
            for _, _, file, position, _, *checksum in entry["chunks"]:
                self._at.setdefault(file, {})[position] = checksum[0] if checksum else None

    def __call__(self, file: Readable, chunk: SavedPart) -> int | None:
        """Return the checksum of a part in its open file, None if the manifest has no such part."""
        sums = self._at.get(chunk.file, {})
        if sums.get(chunk.position, 0) is None:
            size = min(file.size, 4 * len(sums))
            table = file.bytes(file.size - size, size)
            if (actual := crc32(table)) != (expected := self._files[chunk.file].get("sums")):
                text = f"the checksums at the end of the file: {_sums(expected, actual)}"
                raise CheckpointError(f"{text}: it is of another step, or changed")
            values = struct.unpack(f"<{size // 4}I", table[: size // 4 * 4])
            sums = self._at[chunk.file] = {**sums, **dict(zip(sorted(sums), values))}
        return sums.get(chunk.position)


def _chunks(manifest: Manifest) -> Iterator[tuple[str, SavedPart]]:
    for name, entry in manifest.tensors.items():
        for offsets, shape, file, position, length, *_ in entry["chunks"]:
            yield name, SavedPart(tuple(offsets), tuple(shape), file, position, length)


def _problems(
    path: Place, expected: Mapping[str, Any], parts: Iterable[_NamedPart], sums: Sums | None, *, full: bool
) -> Iterator[str]:
    try:
        size = path.size()
        if size != expected["size"]:
            lost = [f"{name} at {chunk.offsets}" for name, chunk in parts if chunk.position + chunk.length > size]
            text = f"; lost: (parts of) {', '.join(lost[:10])}" if lost else ""
            yield f"expected {expected['size']} bytes, found {size}{text}"
        elif full:
            parts = sorted(parts, key=lambda part: part[1].position)
            yield from _differing(path.reader(links=False), expected, parts, sums)
    except OSError as error:
        yield str(error.strerror)
    except StoreError:
        raise
    except CheckpointError as error:
        yield str(error)


def _differing(
    file: Readable, expected: Mapping[str, Any], parts: list[_NamedPart], sums: Sums | None
) -> Iterator[str]:
    """Yield the differences in one file, which is read once."""
    run, position, whole, differs = file.run(0, file.size), 0, 0, False
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max(1, file.size))))
    digest = hashlib.sha256() if "sha256" in expected else None

    def sum_to(stop: int) -> int:
        """Read up to ``stop``; return the CRC-32 of what was read."""
        nonlocal position, whole
        start, checksum = position, 0
        while position < stop:
            block = buffer[: min(len(buffer), stop - position)]
            run.fill(block, position)
            checksum = crc32(block, checksum)
            if digest is not None:
                digest.update(block)
            position += len(block)
        whole = combine_sums(whole, checksum, position - start)
        return checksum

    for name, chunk in parts:
        saved = sums(file, chunk) if sums is not None else None
        sum_to(chunk.position)
        stop = chunk.position + chunk.length
        if (actual := sum_to(stop)) != saved:
            differs = True
            yield f"{name} at {chunk.offsets}, bytes {chunk.position} to {stop}: {_sums(saved, actual)}"
    sum_to(file.size)
    sha256 = None if digest is None else digest.hexdigest()
    if not differs and whole != expected["crc32"]:
        yield _sums(expected["crc32"], whole)
    elif not differs and sha256 != expected.get("sha256"):
        yield f"expected the SHA-256 {expected['sha256']}, found {sha256}"


def _sums(expected: int | None, actual: int) -> str:
    return f"expected the CRC-32 {'of a manifest' if expected is None else f'{expected:08x}'}, found {actual:08x}"


def _disagreements(source: DistributedCheckpoint, manifest: Manifest) -> Iterator[str]:
    """Yield the parts on which torch's metadata and the manifest disagree."""
    listed = {(name, chunk) for name, chunk in _chunks(manifest) if 0 not in chunk.shape}
    tied = {MODEL + group[0]: group[1:] for group in manifest.tied}
    ties = [(MODEL + name, chunk) for first, chunk in listed for name in tied.get(first, ())]
    listed |= {(name, chunk) for name, chunk in ties if name in source.tensors}
    stored = {(name, chunk) for name, tensor in source.tensors.items() for chunk in tensor.chunks}
    for name, chunk in sorted(listed ^ stored, key=str):
        where = "only the manifest" if (name, chunk) in listed else f"only {METADATA_NAME}"
        span = f"bytes {chunk.position} to {chunk.position + chunk.length} of {chunk.file}"
        yield f"{METADATA_NAME}: {where} has {name} at {chunk.offsets}, {span}"
