"""Texts with targets or labels, from JSON lines or CSV, or from the source of Python's standard library."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from meshpar.core.errors import RecipeError
from meshpar.training.tables import TABLES, Reading, records_of
from meshpar.training.text import STDLIB, TextSource, standard_library, standard_library_root

TextPair = tuple[str, str]
"""An input text, and a target text or a label."""

_FORMAT = 1
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)", re.DOTALL)
_LEAST_WORDS, _MOST_WORDS = 3, 24
_CLASSES, _LEAST_LINE = 12, 20
_NO_CODE = "pydoc_data"  # the text of pydoc's help pages


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSource:
    """Distinct records, in the same order on every rank.

    Attributes:
        inputs: ``.jsonl`` and ``.csv`` files, also with ``.gz`` behind, folders and globs; or ``stdlib`` alone.
        kind: ``pairs`` or ``labels``. Pairs of ``stdlib`` are the source of every documented function with the first
            sentence of its docstring. Labels of ``stdlib`` are lines of code with their module or package, of the
            largest twelve.
        field: key of the input text in a line of JSON.
        output_field: key of the target text or of the label (text, an integer, true or false).
        reading: whether to skip rows without both, and what reading found.
    """

    inputs: tuple[str, ...]
    kind: Literal["pairs", "labels"]
    field: str = "text"
    output_field: str = "target"
    reading: Reading = dataclasses.field(default_factory=Reading, compare=False)

    def records(self) -> Iterator[TextPair]:
        """Yield every record once.

        Raises:
            RecipeError: a line is not JSON with both fields.
        """
        seen: set[bytes] = set()
        for record in self._all():
            digest = hashlib.blake2b("\0".join(record).encode(), digest_size=16).digest()
            if digest not in seen and record[0].strip():
                seen.add(digest)
                yield record

    def documents(self) -> Iterator[str]:
        """Yield the inputs and targets, on which a tokenizer is trained."""
        for text, output in self.records():
            yield text
            if self.kind == "pairs":
                yield output

    def fingerprint(self) -> str:
        """Return a hash of the files' names, sizes and times and of the settings."""
        files = TextSource(inputs=self.inputs, suffixes=TABLES).fingerprint()
        skips = "\0skip" if self.reading.skip else ""
        return hashlib.sha256(
            f"{_FORMAT}\0{self.kind}\0{self.field}\0{self.output_field}\0{files}{skips}".encode()
        ).hexdigest()

    def files(self) -> list[Path]:
        """Return the files; raises RecipeError if an input matches no file."""
        return TextSource(inputs=self.inputs, suffixes=TABLES).files()

    def _all(self) -> Iterator[TextPair]:
        self.reading.begin()
        if self.inputs == (STDLIB,):
            yield from documented_functions() if self.kind == "pairs" else lines_of_modules()
            return
        for path in self.files():
            yield from self._table(path)

    def _table(self, path: Path) -> Iterator[TextPair]:
        for number, entry in records_of(path, [self.field, self.output_field], self.reading):
            try:
                pair = self._pair(entry, f"{path}:{number}")
            except RecipeError as error:
                self.reading.refuse(error)
                continue
            yield pair

    def _pair(self, entry: object, place: str) -> TextPair:
        keys = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        text, output = (entry.get(key) if isinstance(entry, dict) else None for key in (self.field, self.output_field))
        if not isinstance(text, str):
            raise RecipeError(f"{place} has no text under {self.field!r}; it has {keys}; name the key with data.field")
        if not isinstance(output, str if self.kind == "pairs" else (str, int)):
            wanted, name = ("text", "target_field") if self.kind == "pairs" else ("label", "label_field")
            raise RecipeError(
                f"{place} has no {wanted} under {self.output_field!r}; it has {keys}; name the key with data.{name}"
            )
        self.reading.leave([name for name in keys if name not in (self.field, self.output_field)], place)
        return text, str(output)


def documented_functions() -> Iterator[TextPair]:
    """Yield the source of every documented function of the standard library, without its docstring, and the
    docstring's first sentence.
    """
    for path in standard_library():
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and len(node.body) > 1:
                sentence = first_sentence(ast.get_docstring(node) or "")
                if sentence:
                    yield _without_docstring(node, lines), sentence


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring on one line; empty if its length is unusual."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    found = _SENTENCE.match(paragraph)
    sentence = found[1] if found else paragraph
    return sentence if _LEAST_WORDS <= len(sentence.split()) <= _MOST_WORDS else ""


def lines_of_modules() -> Iterator[TextPair]:
    """Yield lines of code of the largest modules and packages of the standard library, each with the module's name.

    Lines that occur in several modules are left out.
    """
    root, homes = standard_library_root(), dict[str, set[str]]()
    for path in standard_library():
        module = path.relative_to(root).parts[0].removesuffix(".py")
        for line in path.read_text(encoding="utf-8").splitlines():
            text = line.strip()
            if len(text) >= _LEAST_LINE and not text.startswith("#") and module != _NO_CODE:
                homes.setdefault(text, set()).add(module)
    only = {text: next(iter(modules)) for text, modules in homes.items() if len(modules) == 1}
    counts = Counter(only.values())
    largest = sorted(counts, key=lambda module: (-counts[module], module))[:_CLASSES]
    yield from ((text, module) for text, module in only.items() if module in largest)


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    first, second = node.body[0], node.body[1]
    body = (
        lines[node.lineno - 1 : first.lineno - 1]
        + lines[min(first.end_lineno or 0, second.lineno - 1) : node.end_lineno]
    )
    margin = " " * node.col_offset
    return "".join(line.removeprefix(margin) for line in body).rstrip()
