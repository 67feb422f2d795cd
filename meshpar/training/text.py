"""Read text from files, folders and globs: plain, JSON lines, CSV, Parquet, Arrow, also packed; or the standard library's source."""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import importlib
import io
import json
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast, final

from meshpar.errors import RecipeError
from meshpar.homes import expanded
from meshpar.imports import need

STDLIB = "stdlib"
UNPLAIN = (".parquet", ".arrow")
"""Suffixes of tables that are not text."""
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".csv", *UNPLAIN)
TABLES = (".jsonl", ".csv", *UNPLAIN)
SUFFIXES: dict[str, tuple[str, ...]] = {"jsonl": (".jsonl",), "csv": (".csv",), "parquet": UNPLAIN, "chat": TABLES}
"""Suffixes of the files of each kind of source, where it reads some alone."""
_ROWS = 1024  # of a table at a time
_LONGEST_CELL = 1 << 30  # characters; the csv module's own limit is for tables of numbers
PACKED = (".gz", ".zst")
_UNREAD = {".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}
_SURROGATE = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
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

    Attributes:
        inputs: files, globs (``**`` crosses folders), folders (all .txt, .md, .rst, .py, .jsonl, .csv, .parquet and .arrow files in them,
            also with .gz or .zst behind; of a folder that ``datasets`` saved its data files) or ``stdlib``, the source of Python's standard
            library without its tests and code tables.
        field: key of the text in a line of a ``.jsonl`` file, or its column in a ``.csv``, ``.parquet`` or ``.arrow`` file.
        separator: text that divides a file of text into documents; None: a file is one document.
        suffixes: those of the files to read: of a folder the others are left out, and elsewhere refused; empty: all.
    """

    inputs: tuple[str, ...]
    field: str = "text"
    separator: str | None = None
    suffixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.inputs, str) or not self.inputs:
            raise RecipeError(f"inputs must be a tuple of files, globs, folders or {STDLIB!r}, got {self.inputs!r}")
        if self.separator == "":
            raise RecipeError("separator is empty; drop it to make each file one document")

    def files(self) -> list[Path]:
        """Return the files without repetition, sorted within each input.

        Raises:
            RecipeError: an input matches no file, or one that is not to be read.
        """
        files: dict[Path, None] = {}
        for text in self.inputs:
            found, suffixes = _expand(text, self.suffixes or _TEXT_SUFFIXES), ", ".join(self.suffixes or _TEXT_SUFFIXES)
            if not found:
                raise RecipeError(f"input {text!r} matches no file; expected a file, a glob, or a folder with {suffixes} files")
            if self.suffixes and text != STDLIB:
                for path in found:
                    if kind_of(path) not in self.suffixes:
                        raise RecipeError(f"{path} does not end in {suffixes}; rename it, or write another source (files: text)")
            files.update(dict.fromkeys(found))
        return list(files)

    def documents(self) -> Iterator[str]:
        """Yield every document that is not blank.

        Raises:
            RecipeError: a file is not UTF-8, or a line is not JSON with the field.
        """
        for path in self.files():
            documents = _column(path, self.field) if is_table(path) else map("".join, _streams(path, self.separator))
            yield from (document for document in documents if document.strip())

    def pieces(self, size: int) -> Iterator[tuple[str, bool]]:
        """Yield the documents in pieces of about ``size`` characters, each with whether it ends its document; memory stays bounded.

        Raises:
            RecipeError: see :meth:`documents`.
        """
        for path in self.files():
            if is_table(path):
                for document in _column(path, self.field):
                    if document.strip():
                        yield from cut(iter([document]), size)
                continue
            for stream in _streams(path, self.separator):
                yield from cut(stream, size)

    def fingerprint(self) -> str:
        """Return a hash of the files' names, sizes and times and of the settings."""
        lines = [f"{self.field}\0{self.separator}"]
        for path in self.files():
            stat = path.stat()
            lines.append(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _expand(text: str, suffixes: Sequence[str]) -> list[Path]:
    if text == STDLIB:
        return standard_library()
    path = expanded(Path(text))
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
        raise RecipeError(f"{path} is a folder of datasets with several splits ({splits}); name one of them: {path}/train")
    if (state := path / "state.json").is_file():  # the files of a dataset; a folder also holds what datasets caches
        return [path / each["filename"] for each in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if kind_of(each) in suffixes and each.is_file())
    if path.is_file():
        return [path]
    return sorted(Path(each) for each in glob.glob(str(path), recursive=True) if Path(each).is_file())


def standard_library_root() -> Path:
    """Return the folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def standard_library() -> list[Path]:
    """Return the files of the standard library's source, without its tests and code tables, sorted."""
    root, found = standard_library_root(), []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        # config-3.x-platform holds a file that is made for this machine alone
        if not _NOT_SOURCE.intersection(folders) and not any(folder.startswith("config-") for folder in folders):
            found.append(path)
    return sorted(found)


def kind_of(path: Path) -> str:
    """Return a file's suffix, without ``.gz`` and ``.zst``."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def is_table(path: Path) -> bool:
    """Tell whether a file has records with names: JSON lines or CSV."""
    return kind_of(path) in TABLES


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, also one packed by gzip or zstd; raises RecipeError for other packers, and for damage found while it is read."""
    if (tool := _UNREAD.get(path.suffix)) is not None:
        raise RecipeError(f"{path} is packed by something else than gzip or zstd; unpack it first ({tool} {path.name})")
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    damage: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    if path.suffix == ".zst":
        opener, more = _zstd(path)
        damage += (more,)
    try:
        with cast("IO[bytes]", opener(path, "rb")) as file:
            yield file
    except damage as error:
        raise RecipeError(f"{path} cannot be unpacked: {error}; it is damaged, or not packed as its name says") from error


def _zstd(path: Path) -> tuple[Callable[..., Any], type[Exception]]:
    """Return what opens a file packed by zstd, and its error."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            library = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        return library.open, library.ZstdError
    raise RecipeError(f"{path} is packed by zstd, which needs Python 3.14 or a package: pip install backports.zstd, or unpack it")


def _streams(path: Path, separator: str | None) -> Iterator[Iterator[str]]:
    """Yield the documents of a file of text, each as a stream that is read before the next one."""
    if separator is None:
        yield _read(path)
        return
    rest = ""
    for part in _read(path):
        *whole, rest = (rest + part).split(separator)
        yield from (iter([each]) for each in whole)
    yield iter([rest])


def _read(path: Path) -> Iterator[str]:
    try:
        with _opened(path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig")
            yield from iter(lambda: text.read(_AT_ONCE), "")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text ({error.reason}); convert it or remove it from the inputs") from error


def cut(document: Iterator[str], size: int) -> Iterator[tuple[str, bool]]:
    """Yield a document in pieces of ``size`` characters or some more, each with whether it is the last one; nothing of a blank document.

    Pieces end where a line does. Without one in eight times ``size`` they end before a space, and without one in 64 KiB anywhere.
    """
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
    least, far, most = start + size, start + 8 * size, start + max(8 * size, _UNCUT)
    if found := _LINE_END.search(text, least, far):
        return found.end()
    if len(text) < far:
        return None
    if found := _SPACE.search(text, least, most):
        return found.start()
    return most if len(text) >= most else None


def records_of(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each record; memory stays bounded.

    Args:
        path: JSON lines, CSV, Parquet or Arrow (its stream format, which ``datasets`` writes, or its file format).
        columns: the columns of Parquet or Arrow to read; None: all.

    Raises:
        RecipeError: a line or a file is none of these.
    """
    if kind_of(path) in UNPLAIN:
        yield from _arrow_rows(path, columns)
        return
    with _opened(path) as file:
        if kind_of(path) == ".csv":
            yield from _rows(path, file)
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                if _SURROGATE.search(line):
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise RecipeError(f"{path}:{number} has half of a surrogate pair ({error.object[error.start]!a}); remove it") from error
            except RecursionError as error:
                raise RecipeError(f"{path}:{number} is nested too deeply; remove the line") from error
            except UnicodeDecodeError as error:
                raise RecipeError(
                    f"{path}:{number} is not UTF-8 text (byte {error.start} of the line: {error.reason}); convert it"
                ) from error
            except ValueError as error:
                raise RecipeError(f"{path}:{number} is not JSON: {error}; write one object a line, or remove the line") from error
            yield number, record


def _rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, dict[str, str]]]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise RecipeError(f"{path}:{reader.line_num} has another number of cells than the first line, which names the columns")
            yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text behind line {reader.line_num} ({error.reason}); convert it") from error
    except csv.Error as error:
        raise RecipeError(f"{path}:{reader.line_num + 1} is not CSV: {error}") from error


def _arrow_rows(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    arrow, number = need("pyarrow", extra="arrow"), 0
    try:
        with ExitStack() as stack:
            if path.suffix == ".parquet":
                file = stack.enter_context(need("pyarrow.parquet", extra="arrow").ParquetFile(path, memory_map=True))
                names = [each for each in columns or file.schema_arrow.names if each in file.schema_arrow.names]
                batches = file.iter_batches(batch_size=_ROWS, columns=names)
            else:
                source = stack.enter_context(arrow.memory_map(str(path)))
                batches = _arrow_batches(arrow, source, path)
            for batch in batches:
                kept = batch if columns is None else batch.select([each for each in columns if each in batch.schema.names])
                for start in range(0, kept.num_rows, _ROWS):
                    for record in kept.slice(start, _ROWS).to_pylist():
                        number += 1
                        yield number, record
    except (arrow.ArrowInvalid, OSError) as error:
        raise RecipeError(f"{path} cannot be read as {path.suffix[1:]}: {error}; it is damaged, or not what its name says") from error


def _arrow_batches(arrow: Any, source: Any, path: Path) -> Iterator[Any]:  # noqa: ANN401 - pyarrow has no types
    """Yield the record batches of Arrow's stream format or file format."""
    try:
        batches = arrow.ipc.open_stream(source)
    except arrow.ArrowInvalid:
        source.seek(0)
        file = arrow.ipc.open_file(source)
        yield from (file.get_batch(place) for place in range(file.num_record_batches))
        return
    yield from batches
    source.seek(source.tell() - len(_ARROW_END))
    if source.read(len(_ARROW_END)) != _ARROW_END:
        raise RecipeError(f"{path} ends without Arrow's end of a stream: it was cut, and rows are missing; copy or write it again")


def _column(path: Path, field: str) -> Iterator[str]:
    for number, record in records_of(path, [field]):
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            keys = sorted(record) if isinstance(record, dict) else type(record).__name__
            keys = sorted(next(records_of(path))[1]) if kind_of(path) in UNPLAIN else keys
            raise RecipeError(
                f"{path}:{number} has no text under {field!r}; it has {keys}: name the key with data.field, or remove the record"
            )
        yield record[field]
