"""The record of a save: ranks report what they wrote, rank 0 writes ``.metadata`` and makes the manifest.

The places of parts in files follow from the plan, and are equal in all saves of one plan. Rank 0 keeps them. The
checksums of parts are in the files, so that a rank reports only size and checksums of each file.
"""

from __future__ import annotations

import datetime
import functools
import gc
import hashlib
import itertools
import json
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch

from meshpar import __version__
from meshpar.checkpoints.format.dcp import METADATA_NAME, tensors_in
from meshpar.checkpoints.format.manifest import MODEL, Encoded, Manifest, SavedPart
from meshpar.checkpoints.format.writing import Group, WrittenFile, check_written, metadata_bytes
from meshpar.checkpoints.storage.checksums import crc32
from meshpar.checkpoints.storage.place import Place

try:
    from isal.isal_zlib import decompress
except ImportError:  # optional, in the extra "train"
    from zlib import decompress


class Layout(NamedTuple):
    """The files of one rank and their parts, one after another; short to send."""

    files: tuple[tuple[str, int], ...]  # name of each, and number of its parts
    names: bytes  # the tensor of each part, packed
    kinds: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]  # (offsets, shape, length in bytes) of parts
    kind: bytes  # position in `kinds` of each part, an array of "I"

    @property
    def digest(self) -> str:
        """A hash of all of it."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()

    def parts(self) -> Iterator[tuple[str, SavedPart]]:
        """Yield the tensor of each part, and its place, in the order of the files."""
        parts = zip(map(sys.intern, unpack(self.names)), array("I", self.kind), strict=True)
        for file, count in self.files:
            position = 0
            for name, kind in itertools.islice(parts, count):
                offsets, shape, length = self.kinds[kind]
                yield name, SavedPart(offsets, shape, file, position, length)
                position += length


class Report(NamedTuple):
    """Data that each rank sends in every save."""

    layout: str  # digest of the rank's layout
    # size, CRC-32, CRC-32 of the table of checksums, and SHA-256 of each file
    files: tuple[tuple[int, int, int | None, str | None], ...]


def layout_of(files: Sequence[WrittenFile]) -> Layout:
    """Return the layout of one rank's files."""
    parts = [part for file in files for part in file.parts]
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = {}
    kind = array("I", (kinds.setdefault((part.offsets, part.shape, part.length), len(kinds)) for _, part in parts))
    names = pack([name for name, _ in parts])
    return Layout(tuple((file.name, len(file.parts)) for file in files), names, tuple(kinds), kind.tobytes())


def report_of(files: Sequence[WrittenFile], layout: Layout) -> Report:
    """Return the report of one rank."""
    return Report(layout.digest, tuple((file.size, file.crc32, file.sums, file.sha256) for file in files))


@final
class Ledger:
    """All that ``.metadata`` and the manifest have of the parts: the same in every save of one plan (``groups``).

    ``.metadata`` is made once, and read as a reader will. A later save writes the same bytes. ``tied``: groups of names
    in the model that are one tensor. Raises CheckpointError if the written parts differ from the plan.
    """

    def __init__(self, groups: Sequence[Group], layouts: Sequence[Layout], tied: Sequence[Sequence[str]]) -> None:
        with _uncollected():
            self._make(groups, layouts, tied)

    def _make(self, groups: Sequence[Group], layouts: Sequence[Layout], tied: Sequence[Sequence[str]]) -> None:
        self._layouts = [layout.digest for layout in layouts]
        self._files = [name for layout in layouts for name, _ in layout.files]
        parts = [part for layout in layouts for part in layout.parts()]
        check_written(groups, parts)
        saved = {name for group in groups for name in group.names}
        names = {MODEL + other: MODEL + group[0] for group in tied for other in group[1:] if MODEL + other not in saved}
        metadata = metadata_bytes(groups, parts, names)
        read = tensors_in(metadata, METADATA_NAME)
        chunks: dict[str, list[str]] = {name: [] for name in read if name not in names}
        for name, part in parts:
            chunks[name].append(
                f"{_box(part.offsets, part.shape)}, {_quoted(part.file)}, {part.position}, {part.length}]"
            )
        entries = (
            f'{_quoted(name)}: {{"dtype": {_quoted(str(read[name].dtype).removeprefix("torch."))}, '
            f'"shape": {json.dumps(read[name].shape)}, "chunks": [{", ".join(chunk)}]}}'
            for name, chunk in chunks.items()
        )
        self._metadata, self._tensors = (
            zlib.compress(data, 1) for data in (metadata, f"{{{', '.join(entries)}}}".encode())
        )

    def fits(self, reports: Sequence[Report]) -> bool:
        """Return whether the ranks' layouts are those of this ledger."""
        return self._layouts == [report.layout for report in reports]

    def write(self, folder: Place, reports: Sequence[Report], entries: Mapping[str, Any]) -> Manifest:
        """Write torch's metadata into the folder and return the manifest of a save; ``entries`` are its plain data."""
        metadata = decompress(self._metadata)
        with (folder / METADATA_NAME).writing() as put:
            put(metadata)
        files = dict(zip(self._files, (file for report in reports for file in report.files), strict=True))
        files[METADATA_NAME] = (len(metadata), crc32(metadata), None, None)
        return Manifest(
            saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files={
                name: {"size": size, "crc32": checksum}
                | ({"sums": sums} if sums is not None else {})
                | ({"sha256": sha256} if sha256 else {})
                for name, (size, checksum, sums, sha256) in sorted(files.items())
            },
            tensors=Encoded(decompress(self._tensors).decode()),
            versions={"torch": torch.__version__, "meshpar": __version__},
            **entries,
        )


def pack(names: Sequence[str]) -> bytes:
    """Return names, compressed."""
    return zlib.compress(json.dumps(list(names)).encode())


def unpack(packed: bytes) -> list[str]:
    """Return the names of which :func:`pack` made bytes."""
    return json.loads(zlib.decompress(packed))


def make_manifest(
    folder: Place, groups: Sequence[Group], files: Sequence[WrittenFile], entries: Mapping[str, Any]
) -> Manifest:
    """Write torch's metadata into the folder; return the manifest of files that this process wrote alone."""
    layout = layout_of(files)
    return Ledger(groups, [layout], entries.get("tied", ())).write(folder, [report_of(files, layout)], entries)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let Python not look for cycles among millions of new objects that hold none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.lru_cache(1 << 16)
def _box(offsets: tuple[int, ...], shape: tuple[int, ...]) -> str:
    return json.dumps([offsets, shape])[:-1]


@functools.lru_cache(1 << 16)
def _quoted(text: str) -> str:
    return json.dumps(text)
