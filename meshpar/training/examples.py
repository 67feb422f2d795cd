"""Examples: a text with a target text or a label, as ids in memory-mapped arrays, prepared once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from meshpar.core.errors import RecipeError
from meshpar.process.build_once import build_once
from meshpar.process.imports import need
from meshpar.training.order import check_held_out, held_out
from meshpar.training.records import RecordSource
from meshpar.training.tables import warn_of
from meshpar.training.tokenizer import TextTokenizer, batched

if TYPE_CHECKING:
    import numpy as np

_FORMAT = 2
_BATCH = 1024
_ABOUT = "examples.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleFile:
    """Describe examples on the disk: the concatenated ids of all inputs with the end of each, and the same for all
    outputs.

    Attributes:
        folder: folder of ``input.npy``, ``input_ends.npy``, ``output.npy``, ``output_ends.npy`` and a description.
        count: number of examples.
        classes: names of the labels, in the order of their numbers; empty for target texts.
        vocab_size: ids of texts are in ``range(vocab_size)``.
        eos_id: id of the end of a text.
        pad_id: id that fills the shorter rows of a batch.
        fingerprint: hash of the examples.
        notes: as for :class:`meshpar.training.tokens.TokenFile`.
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

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all inputs (``input``) or outputs (``output``) and their ends, memory-mapped and
        read-only.
        """
        numpy = need("numpy")
        ids, ends = (numpy.load(self.folder / f"{file}.npy", mmap_mode="r") for file in (name, f"{name}_ends"))
        return ids, ends

    def row(self, name: str, index: int) -> np.ndarray:
        """Return the ids of one input or output."""
        ids, ends = self.column(name)
        return ids[ends[index - 1] if index else 0 : ends[index]]


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
    """Tokenize records once and return their files. Every rank may call it; later runs find the files in ``cache``.

    Args:
        source: the records.
        tokenizer: converts texts to ids.
        cache: a folder that at least the ranks of one machine share. Folder names in it are hashes of everything they
            depend on.
        validation: separate records for validation; their labels must be among the source's. None: none.
        validation_fraction: instead, this part of the source's records (at least one), chosen by ``seed``.
        seed: seed of the choice of records.

    Raises:
        RecipeError: there are no records or unknown labels, both ``validation`` and a fraction are given, or the
            fraction is not in 0 to 1.
    """
    check_held_out(validation, validation_fraction)
    parts = (source.fingerprint(), None if validation is None else validation.fingerprint(), tokenizer.fingerprint())
    key = hashlib.sha256(repr((_FORMAT, parts, source.kind, validation_fraction, seed)).encode()).hexdigest()[:16]
    folder = build_once(
        Path(cache) / f"examples-{key}",
        lambda made: _write_all(made, source, validation, tokenizer, validation_fraction, seed),
    )
    held, train = (folder / "validation").is_dir(), ExampleFile.open(folder / "train")
    warn_of(train.notes)
    return ExampleSplit(train=train, validation=ExampleFile.open(folder / "validation") if held else None)


def _write_all(
    folder: Path,
    source: RecordSource,
    validation: RecordSource | None,
    tokenizer: TextTokenizer,
    fraction: float,
    seed: int,
) -> None:
    count, classes = _counted(source)
    if not count or (source.kind == "labels" and len(classes) < 2):
        what = f"{count} records" + (f" of {len(classes)} classes" if count else "")
        found = "".join(f"; {note}" for note in source.reading.notes())
        raise RecipeError(
            f"{', '.join(source.inputs)} give {what}; give some{', of two classes at least' if count else ''}{found}"
        )
    about: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "classes": classes,
    }
    held = held_out(count, fraction, seed) if fraction else None
    names = ["train", *(["validation"] if validation is not None or fraction else [])]
    with ExitStack() as stack:
        writers = [stack.enter_context(_Writer(folder / name, about)) for name in names]
        for place, part in _encoded(source, classes, tokenizer):
            writers[0 if held is None else int(held[place])].add(*part)
        if validation is not None:
            if strange := sorted(set(_counted(validation)[1]) - set(classes)):
                raise RecipeError(
                    f"the validation data has labels that the training data lacks: {', '.join(strange[:5])}"
                )
            for _, part in _encoded(validation, classes, tokenizer):
                writers[1].add(*part)
        about["notes"] = [
            note for samples in (source, validation) if samples is not None for note in samples.reading.notes()
        ]


def _counted(source: RecordSource) -> tuple[int, list[str]]:
    """Return the number of records and the names of the labels; nothing else of them is held."""
    count, classes = 0, set[str]()
    for _, output in source.records():
        count += 1
        if source.kind == "labels":
            classes.add(output)
    return count, sorted(classes)


def _encoded(
    source: RecordSource, classes: Sequence[str], tokenizer: TextTokenizer
) -> Iterator[tuple[int, tuple[Sequence[int], Sequence[int]]]]:
    """Yield each record's place and the ids of its input and output."""
    numbers, place = {name: number for number, name in enumerate(classes)}, 0
    for part in batched(source.records(), _BATCH):
        inputs = tokenizer.encode_inputs([text for text, _ in part], begin=bool(classes))
        written = [output for _, output in part]
        outputs = [[numbers[label]] for label in written] if classes else tokenizer.encode_inputs(written, begin=False)
        yield from enumerate(zip(inputs, outputs), place)
        place += len(part)


@final
class _Writer:
    """Append the ids of examples to the files of a folder."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        folder.mkdir()
        self._folder, self._about, self._count = folder, about, 0
        self._columns = [
            (_Array(folder / f"{name}.npy", "<u4"), _Array(folder / f"{name}_ends.npy", "<i8"))
            for name in ("input", "output")
        ]

    def __enter__(self) -> Self:
        return self

    def add(self, *rows: Sequence[int]) -> None:
        """Append the ids of an input and of its output."""
        for (ids, ends), row in zip(self._columns, rows, strict=True):
            ids.add(row)
            ends.add([ids.size])
        self._count += 1

    def __exit__(self, *_: object) -> None:
        digest = hashlib.sha256()
        for ids, ends in self._columns:
            digest.update(ids.close() + ends.close())
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
