"""Read text from files, folders, globs, JSON lines, or the source of Python's standard library."""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from meshpar.errors import RecipeError

STDLIB = "stdlib"
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
# encodings has tables of code points, an eighth of all the text, from which a model learns to write tables
_NOT_SOURCE = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Text as documents, in the same order on every rank.

    Attributes:
        inputs: files, globs (``**`` crosses folders), folders (all .txt, .md, .rst, .py and .jsonl files in them) or ``stdlib``, the
            source of Python's standard library without its tests and code tables.
        field: key of the text in a line of a ``.jsonl`` file.
        separator: text that divides a file (not .jsonl) into documents; None: a file is one document.
    """

    inputs: tuple[str, ...]
    field: str = "text"
    separator: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.inputs, str) or not self.inputs:
            raise RecipeError(f"inputs must be a tuple of files, globs, folders or {STDLIB!r}, got {self.inputs!r}")
        if self.separator == "":
            raise RecipeError("separator is empty; drop it to make each file one document")

    def files(self) -> list[Path]:
        """Return the files without repetition, sorted within each input.

        Raises:
            RecipeError: an input matches no file.
        """
        files: dict[Path, None] = {}
        for text in self.inputs:
            found = _expand(text)
            if not found:
                raise RecipeError(
                    f"input {text!r} matches no file; expected a file, a glob, or a folder with {', '.join(_TEXT_SUFFIXES)} files"
                )
            files.update(dict.fromkeys(found))
        return list(files)

    def documents(self) -> Iterator[str]:
        """Yield every document that is not blank.

        Raises:
            RecipeError: a file is not UTF-8, or a line is not JSON with the field.
        """
        for path in self.files():
            documents = _json_lines(path, self.field) if path.suffix == ".jsonl" else _text(path, self.separator)
            yield from (document for document in documents if document.strip())

    def fingerprint(self) -> str:
        """Return a hash of the files' names, sizes and times and of the settings."""
        lines = [f"{self.field}\0{self.separator}"]
        for path in self.files():
            stat = path.stat()
            lines.append(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _expand(text: str) -> list[Path]:
    if text == STDLIB:
        return standard_library()
    path = Path(text).expanduser()
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.suffix in _TEXT_SUFFIXES and each.is_file())
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


def _text(path: Path, separator: str | None) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} is not UTF-8 text (byte {error.start}: {error.reason}); convert it or remove it from the inputs"
        ) from error
    return [text] if separator is None else text.split(separator)


def json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each line's number and value; raises RecipeError if a line is not JSON in UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise RecipeError(
                    f"{path}:{number} is not UTF-8 text (byte {error.start} of the line: {error.reason}); convert it"
                ) from error
            except ValueError as error:
                raise RecipeError(f"{path}:{number} is not JSON: {error}") from error


def _json_lines(path: Path, field: str) -> Iterator[str]:
    for number, record in json_values(path):
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            keys = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise RecipeError(f"{path}:{number} has no text under {field!r}; it has {keys}")
        yield record[field]
