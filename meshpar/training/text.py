"""Read text and records from files, folders and globs, also packed: plain text, JSON lines, CSV, Parquet and Arrow; or
the standard library's source; and say what of them was not used.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import glob
import gzip
import hashlib
import importlib
import io
import json
import logging
import re
import shlex
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast, final

from meshpar.core import runtime
from meshpar.core.errors import RecipeError
from meshpar.process.imports import expanded, need

log = logging.getLogger(__name__)

UNPLAIN = (".parquet", ".arrow")
"""Suffixes of tables that are not text."""
TABLES = (".jsonl", ".csv", *UNPLAIN)
_ROWS = 1024  # of a table at a time
_LONGEST_CELL = 1 << 30  # characters; the csv module's own limit is for tables of numbers
PACKED = (".gz", ".zst")
_UNREAD = {".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}
_SURROGATE = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"


@final
@dataclass(slots=True)
class Reading:
    """A rule for rows that cannot be used (``skip``; else the first is an error), and the last reading's findings."""

    skip: bool = False
    rows: int = 0
    skipped: int = 0
    first: str = ""
    unused: dict[str, str] = dataclasses.field(default_factory=dict)
    # conversations whose template rewrites earlier turns, and their answers, each a sample
    divided: int = 0
    answers: int = 0

    def begin(self) -> None:
        """Forget what an earlier reading found."""
        self.rows, self.skipped, self.first, self.divided, self.answers = 0, 0, "", 0, 0
        self.unused.clear()

    def refuse(self, error: RecipeError) -> None:
        """Raise the error of a row, or count the row."""
        if not self.skip:
            raise error
        self.skipped, self.first = self.skipped + 1, self.first or str(error)

    def leave(self, names: Iterable[str], place: str) -> None:
        """Note fields that nothing reads."""
        for name in names:
            self.unused.setdefault(name, place)

    def notes(self) -> Iterator[str]:
        """Yield what a person must know of the last reading: a line about unused fields, and one about skipped rows."""
        if self.unused:
            first_place = next(iter(self.unused.values()))
            yield (
                "nothing reads these fields of the data, so they are not trained on: "
                f"{', '.join(sorted(self.unused))} (first in {first_place})"
            )
        if self.divided:
            yield (
                f"the chat template rewrites earlier turns, as it leaves out earlier thoughts, in {self.divided:,} "
                f"conversations: each of their {self.answers:,} answers is a document, with the turns before it"
            )
        if self.skipped:
            yield (
                f"skipped {self.skipped:,} of {self.rows:,} rows of the data (data.bad_rows=skip); the first: "
                f"{self.first}"
            )


def warn_of(notes: Iterable[str]) -> None:
    """Log what a person must know of the data, at every start, on one rank."""
    for note in notes if runtime.is_main() else ():
        log.warning("%s", note)


def kind_of(path: Path) -> str:
    """Return a file's suffix, without ``.gz`` and ``.zst``."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, also one packed by gzip or zstd; raises RecipeError for other packers, and for damage."""
    if (tool := _UNREAD.get(path.suffix)) is not None:
        raise RecipeError(f"{path} is packed by something else than gzip or zstd; unpack it first ({tool} {path.name})")
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    damage: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    if path.suffix == ".zst":
        try:
            library = importlib.import_module("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
        except ModuleNotFoundError as error:
            raise RecipeError(
                f"{path} is packed by zstd, which needs Python 3.14 or a package: pip install backports.zstd, or "
                "unpack it"
            ) from error
        opener, damage = library.open, (*damage, library.ZstdError)
    try:
        with cast("IO[bytes]", opener(path, "rb")) as file:
            yield file
    except damage as error:
        problem = f"{path} cannot be unpacked: {error}; it is damaged, or not packed as its name says"
        raise RecipeError(problem) from error


def records_of(
    path: Path, columns: Sequence[str] | None = None, reading: Reading | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each record, some in memory at a time; of Parquet and Arrow only ``columns``."""
    reading = reading or Reading()
    if kind_of(path) in UNPLAIN:
        records: Iterator[tuple[int, Any]] = _arrow_rows(path, columns, reading)
    else:
        records = _lines(path, reading) if kind_of(path) != ".csv" else _rows(path, reading)
    for record in records:
        reading.rows += 1
        yield record


def _lines(path: Path, reading: Reading) -> Iterator[tuple[int, Any]]:
    with open_file(path) as file:
        begun = False
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = _record(path, number, line)
            except RecipeError as error:
                if not begun and (hint := as_lines(path)):
                    raise RecipeError(f"{path} is not JSON lines{hint}") from error
                reading.rows += 1
                reading.refuse(error)
                continue
            if not begun and isinstance(record, list):
                problem = f"{path} is not JSON lines{as_lines(path) or '; it is a JSON array: write one object a line'}"
                raise RecipeError(problem)
            begun = True
            yield number, record


def _record(path: Path, number: int, line: bytes) -> Any:  # noqa: ANN401 - of JSON
    """Return the value of a line; files that begin with a byte order mark may have been joined."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
        if _SURROGATE.search(line):
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        problem = f"{path}:{number} has half of a surrogate pair ({error.object[error.start]!a}); remove it"
        raise RecipeError(problem) from error
    except RecursionError as error:
        raise RecipeError(f"{path}:{number} is nested too deeply; remove the line") from error
    except UnicodeDecodeError as error:
        problem = f"{path}:{number} is not UTF-8 text (byte {error.start} of the line: {error.reason}); convert it"
        raise RecipeError(problem) from error
    except ValueError as error:
        problem = f"{path}:{number} is not JSON: {error}; write one object a line, or remove the line"
        raise RecipeError(problem) from error
    return record


def as_lines(path: Path) -> str:
    """Return how to convert a file that is one JSON array, or JSON lines under another name; empty for other files."""
    if path.suffix not in (".json", ".jsonl") or not path.is_file():
        return ""
    with path.open("rb") as file:
        begin = file.read(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    lines = path.with_suffix(".jsonl") if path.suffix == ".json" else path.with_name(f"{path.stem}-lines.jsonl")
    if begin == b"[":
        source = f"open({str(path)!r}, encoding='utf-8-sig')"
        code = f"import json; [print(json.dumps(each)) for each in json.load({source})]"
        return f'; it is one JSON array: write one object a line with: python -c "{code}" > {shlex.quote(str(lines))}'
    return (
        f"; if it has one object a line, rename it to {lines.name}" if begin == b"{" and path.suffix == ".json" else ""
    )


def _rows(path: Path, reading: Reading) -> Iterator[tuple[int, dict[str, str]]]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    with open_file(path) as file:
        reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
        try:
            for row in reader:
                if None not in row and None not in row.values():
                    yield reader.line_num, row
                    continue
                reading.rows += 1
                problem = "another number of cells than the first line, which names the columns"
                reading.refuse(RecipeError(f"{path}:{reader.line_num} has {problem}"))
        except UnicodeDecodeError as error:
            problem = f"{path} is not UTF-8 text behind line {reader.line_num} ({error.reason}); convert it"
            raise RecipeError(problem) from error
        except csv.Error as error:
            raise RecipeError(f"{path}:{reader.line_num + 1} is not CSV: {error}") from error


def _arrow_rows(path: Path, columns: Sequence[str] | None, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    arrow, number = need("pyarrow", extra="arrow"), 0
    try:
        with ExitStack() as stack:
            if path.suffix == ".parquet":
                file = stack.enter_context(need("pyarrow.parquet", extra="arrow").ParquetFile(path, memory_map=True))
                every = file.schema_arrow.names
                batches = file.iter_batches(
                    batch_size=_ROWS, columns=[name for name in columns or every if name in every]
                )
            else:
                source = stack.enter_context(arrow.memory_map(str(path)))
                every, batches = None, _arrow_batches(arrow, source, path)
            for batch in batches:
                every = every or batch.schema.names
                if columns is not None:
                    batch = batch.select([name for name in columns if name in batch.schema.names])
                    reading.leave([name for name in every if name not in columns], str(path))
                for start in range(0, batch.num_rows, _ROWS):
                    for record in batch.slice(start, _ROWS).to_pylist():
                        number += 1
                        yield number, record
    except (arrow.ArrowInvalid, OSError) as error:
        problem = f"{path} cannot be read as {path.suffix[1:]}: {error}; it is damaged, or not what its name says"
        raise RecipeError(problem) from error


def _arrow_batches(arrow: Any, source: Any, path: Path) -> Iterator[Any]:  # noqa: ANN401 - pyarrow has no types
    """Yield the record batches of Arrow's stream format or file format."""
    try:
        batches = arrow.ipc.open_stream(source)
    except arrow.ArrowInvalid:
        source.seek(0)
        file = arrow.ipc.open_file(source)
        yield from (file.get_batch(number) for number in range(file.num_record_batches))
        return
    yield from batches
    source.seek(source.tell() - len(_ARROW_END))
    if source.read(len(_ARROW_END)) != _ARROW_END:
        raise RecipeError(
            f"{path} ends without Arrow's end of a stream: it was cut, and rows are missing; copy or write it again"
        )


def column(path: Path, name: str, reading: Reading) -> Iterator[str]:
    """Yield the texts of a table's column; raises RecipeError, unless ``reading`` skips, for a row without one."""
    for number, record in records_of(path, [name], reading):
        if not isinstance(record, dict) or not isinstance(record.get(name), str):
            keys = sorted(record) if isinstance(record, dict) else type(record).__name__
            keys = sorted(next(records_of(path))[1]) if kind_of(path) in UNPLAIN else keys
            reading.refuse(
                RecipeError(
                    f"{path}:{number} has no text under {name!r}; it has {keys}: name the key with data.field, remove "
                    "the record, or skip such records with data.bad_rows: skip"
                )
            )
            continue
        reading.leave((key for key in record if key != name), f"{path}:{number}")
        yield record[name]


STDLIB = "stdlib"
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".csv", *UNPLAIN)
SUFFIXES: dict[str, tuple[str, ...]] = {"jsonl": (".jsonl",), "csv": (".csv",), "parquet": UNPLAIN, "chat": TABLES}
"""Suffixes of the files of each kind of source, where it reads some alone."""
_AT_ONCE = 1 << 16  # characters of text at a time
# A cut behind such an end of a line, or before such a space, changes no id of a byte-level BPE.
# re finds what begins with one letter ten times as fast as what begins by looking back.
_LINE_END, _SPACE = re.compile(r"\n(?<=\S\n)(?=\S)"), re.compile(r" (?=\S)")
_UNCUT = 1 << 16  # characters without a space, at least, before a text is cut between two letters
# encodings has tables of code points, an eighth of all the text, from which a model learns to write tables;
# config-3.x-platform holds a file that is made for this machine alone
_NOT_SOURCE = re.compile(r"(test|tests|idle_test|encodings|site-packages|dist-packages|__pycache__)$|config-")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Text as documents, in the same order on every rank, of files, globs, folders or ``stdlib``."""

    # ``separator`` divides a file of text into documents; ``suffixes`` are those of the files to read.

    inputs: tuple[str, ...]
    field: str = "text"
    separator: str | None = None
    suffixes: tuple[str, ...] = ()
    reading: Reading = dataclasses.field(default_factory=Reading, compare=False)

    def __post_init__(self) -> None:
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
        return filter(str.strip, map("".join, self._streams()))

    def pieces(self, size: int) -> Iterator[tuple[str, bool]]:
        """Yield the documents in pieces of about ``size`` characters, each with whether it ends its document."""
        for stream in self._streams():
            yield from cut(stream, size)

    def _streams(self) -> Iterator[Iterator[str]]:
        """Yield the documents, each as a stream that is read before the next one."""
        self.reading.begin()
        for path in self.files():
            if kind_of(path) in TABLES:
                yield from (iter([document]) for document in column(path, self.field, self.reading))
            elif self.separator is None:
                yield _read(path)
            else:
                rest = ""
                for part in _read(path):
                    *whole, rest = (rest + part).split(self.separator)
                    yield from (iter([document]) for document in whole)
                yield iter([rest])

    def fingerprint(self) -> str:
        """Return a hash of the files' names, sizes and times and of the settings."""
        lines = [f"{self.field}\0{self.separator}", *(["skip"] if self.reading.skip else [])]
        stats = ((path, path.stat()) for path in self.files())
        lines += [f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}" for path, stat in stats]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _expand(text: str, suffixes: Sequence[str]) -> list[Path]:
    if text == STDLIB:
        return standard_library()
    path = expanded(Path(text))
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        problem = f"{path} is a folder of datasets with several splits ({splits}); name one of them: {path}/train"
        raise RecipeError(problem)
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
    root = standard_library_root()
    files = [(path, path.relative_to(root).parts[:-1]) for path in sorted(root.rglob("*.py"))]
    return [path for path, folders in files if not any(map(_NOT_SOURCE.match, folders))]


def _read(path: Path) -> Iterator[str]:
    try:
        with open_file(path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig")
            yield from iter(lambda: text.read(_AT_ONCE), "")
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8 text ({error.reason}); convert it or remove it from the inputs"
        raise RecipeError(problem) from error


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
