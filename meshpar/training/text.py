"""Read text from files, folders and globs: plain, packed, or a column of a table; or the standard library's source."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import io
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from meshpar.core.errors import RecipeError
from meshpar.process.homes import expanded
from meshpar.training.tables import TABLES, UNPLAIN, Reading, as_lines, column, is_table, kind_of, open_file

STDLIB = "stdlib"
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".csv", *UNPLAIN)
SUFFIXES: dict[str, tuple[str, ...]] = {"jsonl": (".jsonl",), "csv": (".csv",), "parquet": UNPLAIN, "chat": TABLES}
"""Suffixes of the files of each kind of source, where it reads some alone."""
_AT_ONCE = 1 << 16  # characters of text at a time
# A cut behind such an end of a line, or before such a space, changes no id of a byte-level BPE.
# re finds what begins with one letter ten times as fast as what begins by looking back.
_LINE_END, _SPACE = re.compile(r"\n(?<=\S\n)(?=\S)"), re.compile(r" (?=\S)")
_UNCUT = 1 << 16  # characters without a space, at least, before a text is cut between two letters
# encodings has tables of code points, an eighth of all the text, from which a model learns to write tables
_NOT_SOURCE = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Text as documents, in the same order on every rank.

    ``inputs`` are files, globs, folders or ``stdlib``, the source of Python's standard library without its tests and
    code tables; ``separator`` divides a file of text into documents; ``suffixes`` are those of the files to read.
    """

    inputs: tuple[str, ...]
    field: str = "text"
    separator: str | None = None
    suffixes: tuple[str, ...] = ()
    reading: Reading = dataclasses.field(default_factory=Reading, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.inputs, str) or not self.inputs:
            raise RecipeError(f"inputs must be a tuple of files, globs, folders or {STDLIB!r}, got {self.inputs!r}")
        if self.separator == "":
            raise RecipeError("separator is empty; drop it to make each file one document")

    def files(self) -> list[Path]:
        """Return the files without repetition, sorted within each input."""
        files: dict[Path, None] = {}
        for text in self.inputs:
            paths, suffixes = _expand(text, self.suffixes or _TEXT_SUFFIXES), ", ".join(self.suffixes or _TEXT_SUFFIXES)
            if not paths:
                hint = "".join(as_lines(path) for path in _expand(text, (".json",))[:1])
                raise RecipeError(
                    f"input {text!r} matches no file; expected a file, a glob, or a folder with {suffixes} files{hint}"
                )
            if self.suffixes and text != STDLIB:
                for path in paths:
                    if kind_of(path) not in self.suffixes:
                        other = as_lines(path) or "; rename it, or write another source (files: text)"
                        raise RecipeError(f"{path} does not end in {suffixes}{other}")
            files.update(dict.fromkeys(paths))
        return list(files)

    def documents(self) -> Iterator[str]:
        """Yield every document that is not blank."""
        self.reading.begin()
        for path in self.files():
            documents = (
                column(path, self.field, self.reading)
                if is_table(path)
                else map("".join, _streams(path, self.separator))
            )
            yield from (document for document in documents if document.strip())

    def pieces(self, size: int) -> Iterator[tuple[str, bool]]:
        """Yield the documents in pieces of about ``size`` characters, each with whether it ends its document."""
        self.reading.begin()
        for path in self.files():
            if is_table(path):
                for document in column(path, self.field, self.reading):
                    if document.strip():
                        yield from cut(iter([document]), size)
                continue
            for stream in _streams(path, self.separator):
                yield from cut(stream, size)

    def fingerprint(self) -> str:
        """Return a hash of the files' names, sizes and times and of the settings."""
        lines = [f"{self.field}\0{self.separator}", *(["skip"] if self.reading.skip else [])]
        for path in self.files():
            stat = path.stat()
            lines.append(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _expand(text: str, suffixes: Sequence[str]) -> list[Path]:
    if text == STDLIB:
        return standard_library()
    path = expanded(Path(text))
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise RecipeError(
            f"{path} is a folder of datasets with several splits ({splits}); name one of them: {path}/train"
        )
    if (state := path / "state.json").is_file():  # the files of a dataset; a folder also holds what datasets caches
        names = [str(file["filename"]) for file in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
        if outside := [name for name in names if Path(name).name != name]:
            raise RecipeError(f"{state} names a file outside of its folder: {outside[0]!r}; expected files beside it")
        return [path / name for name in names]
    if path.is_dir():
        return sorted(entry for entry in path.rglob("*") if kind_of(entry) in suffixes and entry.is_file())
    if path.is_file():
        return [path]
    return sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())


def standard_library_root() -> Path:
    """Return the folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def standard_library() -> list[Path]:
    """Return the files of the standard library's source, without its tests and code tables, sorted."""
    root, files = standard_library_root(), []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        # config-3.x-platform holds a file that is made for this machine alone
        if not _NOT_SOURCE.intersection(folders) and not any(folder.startswith("config-") for folder in folders):
            files.append(path)
    return sorted(files)


def _streams(path: Path, separator: str | None) -> Iterator[Iterator[str]]:
    """Yield the documents of a file of text, each as a stream that is read before the next one."""
    if separator is None:
        yield _read(path)
        return
    rest = ""
    for part in _read(path):
        *whole, rest = (rest + part).split(separator)
        yield from (iter([document]) for document in whole)
    yield iter([rest])


def _read(path: Path) -> Iterator[str]:
    try:
        with open_file(path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig")
            yield from iter(lambda: text.read(_AT_ONCE), "")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} is not UTF-8 text ({error.reason}); convert it or remove it from the inputs"
        ) from error


def cut(document: Iterator[str], size: int) -> Iterator[tuple[str, bool]]:
    """Yield a document in pieces of ``size`` characters or more, and whether each is the last; cut at line ends."""
    rest, begun = "", False
    for part in document:
        rest, start = rest + part, 0
        while len(rest) - start >= 2 * size and (end := _cut_at(rest, start, size)) is not None:
            yield rest[start:end], False
            start, begun = end, True
        rest = rest[start:]
    if begun or rest.strip():
        yield rest, True


def _cut_at(text: str, start: int, size: int) -> int | None:
    least, far, farthest = start + size, start + 8 * size, start + max(8 * size, _UNCUT)
    if match := _LINE_END.search(text, least, far):
        return match.end()
    if len(text) < far:
        return None
    if match := _SPACE.search(text, least, farthest):
        return match.start()
    return farthest if len(text) >= farthest else None
