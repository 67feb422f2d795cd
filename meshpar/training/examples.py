"""Examples: a text with a target text or a label, tokenized once into memory-mapped arrays."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from meshpar.core.errors import RecipeError
from meshpar.process.imports import need
from meshpar.process.leftovers import build_once
from meshpar.training.order import held_out
from meshpar.training.text import (
    STDLIB,
    TABLES,
    Reading,
    TextSource,
    records_of,
    standard_library,
    standard_library_root,
    warn_of,
)
from meshpar.training.tokenizer import TextTokenizer, batch_items

if TYPE_CHECKING:
    import numpy as np

TextPair = tuple[str, str]
"""An input text, and a target text or a label."""

_RECORDS_FORMAT, _FORMAT = 1, 2
_BATCH = 1024
_ABOUT = "examples.json"
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)", re.DOTALL)
_LEAST_WORDS, _MOST_WORDS = 3, 24
_CLASSES, _LEAST_LINE = 12, 20
_NO_CODE = "pydoc_data"  # the text of pydoc's help pages


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSource:
    """Distinct records, in the same order on every rank, of tables or of ``stdlib``; fields are keys of a record."""

    inputs: tuple[str, ...]
    kind: Literal["pairs", "labels"]
    field: str = "text"
    output_field: str = "target"
    reading: Reading = dataclasses.field(default_factory=Reading, compare=False)

    def records(self) -> Iterator[TextPair]:
        """Yield every record once."""
        self.reading.begin()
        if self.inputs == (STDLIB,):
            records = documented_functions() if self.kind == "pairs" else lines_of_modules()
        else:
            records = self._of_tables()
        seen: set[bytes] = set()
        for record in records:
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
        parts = (
            _RECORDS_FORMAT,
            self.kind,
            self.field,
            self.output_field,
            files,
            *(["skip"] if self.reading.skip else []),
        )
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()

    def files(self) -> list[Path]:
        """Return the files; raises RecipeError if an input matches no file."""
        return TextSource(inputs=self.inputs, suffixes=TABLES).files()

    def _of_tables(self) -> Iterator[TextPair]:
        for path in self.files():
            for number, entry in records_of(path, [self.field, self.output_field], self.reading):
                try:
                    pair = self._pair(entry, f"{path}:{number}")
                except RecipeError as error:
                    self.reading.refuse(error)
                else:
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
    """Yield the source of every documented function of the standard library, and its docstring's first sentence."""
    for path in standard_library():
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and len(node.body) > 1:
                sentence = first_sentence(ast.get_docstring(node) or "")
                if sentence:
                    first, second = node.body[0], node.body[1]
                    body = lines[node.lineno - 1 : first.lineno - 1]
                    body += lines[min(first.end_lineno or 0, second.lineno - 1) : node.end_lineno]
                    margin = " " * node.col_offset
                    yield "".join(line.removeprefix(margin) for line in body).rstrip(), sentence


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring on one line; empty if its length is unusual."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    match = _SENTENCE.match(paragraph)
    sentence = match[1] if match else paragraph
    return sentence if _LEAST_WORDS <= len(sentence.split()) <= _MOST_WORDS else ""


def lines_of_modules() -> Iterator[TextPair]:
    """Yield lines of code that one module alone has, of the standard library's largest modules, with its name."""
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleFile:
    """Describe examples on the disk: the ids of all inputs with the end of each, and the same for all outputs.

    Attributes:
        folder: folder of the arrays and a description.
        count: number of examples.
        classes: names of the labels, in the order of their numbers; empty for target texts.
        vocab_size: ids of texts are in ``range(vocab_size)``.
        eos_id, pad_id: ids of the end of a text, and of what fills the shorter rows of a batch.
        fingerprint: hash of the examples.
        notes: what a person must know of the data.
    """

    folder: Path
    count: int
    classes: tuple[str, ...]
    vocab_size: int
    eos_id: int
    pad_id: int
    fingerprint: str
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: Path) -> ExampleFile:
        """Read the description of a folder written by :func:`prepare_examples`."""
        fields = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        lists = {name: tuple(fields.get(name, ())) for name in ("classes", "notes")}
        return cls(folder=folder, **{**fields, **lists})

    @functools.cache  # noqa: B019 - one file a process, by its fingerprint
    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all inputs (``input``) or outputs (``output``) and their ends, memory-mapped."""
        numpy = need("numpy")
        ids, ends = (numpy.load(self.folder / f"{file}.npy", mmap_mode="r") for file in (name, f"{name}_ends"))
        return ids, ends

    def row(self, name: str, index: int) -> np.ndarray:
        """Return the ids of one input or output."""
        ids, ends = self.column(name)
        return ids[int(ends[index - 1]) if index else 0 : int(ends[index])]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSplit:
    """Hold the examples of a run; ``validation`` is None without validation data."""

    train: ExampleFile
    validation: ExampleFile | None


def prepare_examples(
    source: RecordSource,
    tokenizer: TextTokenizer,
    cache: str | Path,
    *,
    validation: RecordSource | None = None,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> ExampleSplit:
    """Tokenize records once; ``validation``: separate records, or a part of the source's, chosen by ``seed``."""
    parts = (source.fingerprint(), None if validation is None else validation.fingerprint(), tokenizer.fingerprint())
    key = hashlib.sha256(repr((_FORMAT, parts, source.kind, validation_fraction, seed)).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        _write_all(folder, source, validation, tokenizer, validation_fraction, seed)

    folder = build_once(Path(cache) / f"examples-{key}", build)
    has_validation, train = (folder / "validation").is_dir(), ExampleFile.open(folder / "train")
    warn_of(train.notes)
    return ExampleSplit(train=train, validation=ExampleFile.open(folder / "validation") if has_validation else None)


def _write_all(
    folder: Path,
    source: RecordSource,
    validation: RecordSource | None,
    tokenizer: TextTokenizer,
    fraction: float,
    seed: int,
) -> None:
    count, classes = _count_records(source)
    if not count or (source.kind == "labels" and len(classes) < 2):
        what = f"{count} records" + (f" of {len(classes)} classes" if count else "")
        notes = "".join(f"; {note}" for note in source.reading.notes())
        raise RecipeError(
            f"{', '.join(source.inputs)} give {what}; give some{', of two classes at least' if count else ''}{notes}"
        )
    about: dict[str, Any] = {name: getattr(tokenizer, name) for name in ("vocab_size", "eos_id", "pad_id")}
    about["classes"] = classes
    is_held_out = held_out(count, fraction, seed) if fraction else None
    names = ["train", *(["validation"] if validation is not None or fraction else [])]
    with ExitStack() as stack:
        writers = [stack.enter_context(_Writer(folder / name, about)) for name in names]
        for number, part in _encode_records(source, classes, tokenizer):
            writers[0 if is_held_out is None else int(is_held_out[number])].add(*part)
        if validation is not None:
            if strange := sorted(set(_count_records(validation)[1]) - set(classes)):
                problem = f"the validation data has labels that the training data lacks: {', '.join(strange[:5])}"
                raise RecipeError(problem)
            for _, part in _encode_records(validation, classes, tokenizer):
                writers[1].add(*part)
        about["notes"] = [note for records in (source, validation) if records for note in records.reading.notes()]


def _count_records(source: RecordSource) -> tuple[int, list[str]]:
    """Return the number of records and the names of the labels; nothing else of them is held."""
    count, classes = 0, set[str]()
    for _, output in source.records():
        count += 1
        if source.kind == "labels":
            classes.add(output)
    return count, sorted(classes)


def _encode_records(
    source: RecordSource, classes: Sequence[str], tokenizer: TextTokenizer
) -> Iterator[tuple[int, tuple[Sequence[int], Sequence[int]]]]:
    """Yield each record's place and the ids of its input and output."""
    numbers, count = {name: number for number, name in enumerate(classes)}, 0
    for part in batch_items(source.records(), _BATCH):
        inputs = tokenizer.encode_inputs([text for text, _ in part], begin=bool(classes))
        written = [output for _, output in part]
        outputs = [[numbers[label]] for label in written] if classes else tokenizer.encode_inputs(written, begin=False)
        yield from enumerate(zip(inputs, outputs), count)
        count += len(part)


@final
class _Writer(AbstractContextManager["_Writer"]):
    """Append the ids of examples to the files of a folder."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        folder.mkdir()
        self._folder, self._about, self._count = folder, about, 0
        self._columns = [
            (_Array(folder / f"{name}.npy", "<u4"), _Array(folder / f"{name}_ends.npy", "<i8"))
            for name in ("input", "output")
        ]

    def add(self, *rows: Sequence[int]) -> None:
        """Append the ids of an input and of its output."""
        for (ids, ends), row in zip(self._columns, rows, strict=True):
            ids.add(row)
            ends.add([ids.size])
        self._count += 1

    def __exit__(self, *_: object) -> None:
        digest = hashlib.sha256(b"".join(array.close() for column in self._columns for array in column))
        fields = {"count": self._count, **self._about, "fingerprint": digest.hexdigest()}
        (self._folder / _ABOUT).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


@final
class _Array:
    """A .npy file of one dim that grows."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._file, self._dtype, self.size, self._digest = path.open("wb"), dtype, 0, hashlib.sha256()
        self._head()

    def add(self, values: Sequence[int]) -> None:
        data = need("numpy").array(values, dtype=self._dtype).data
        self._digest.update(data)
        self._file.write(data)
        self.size += len(values)

    def close(self) -> bytes:
        """Complete the file and return the digest of its values."""
        self._file.seek(0)
        self._head()
        self._file.close()
        return self._digest.digest()

    def _head(self) -> None:
        # numpy leaves room for a longer shape, so that both heads have one length
        shape = {"descr": self._dtype, "fortran_order": False, "shape": (self.size,)}
        need("numpy").lib.format.write_array_header_1_0(self._file, shape)
