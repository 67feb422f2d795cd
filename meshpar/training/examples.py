"""Examples: a text with a target text or a label, as ids in memory-mapped arrays, prepared once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from meshpar.errors import RecipeError
from meshpar.extras import need
from meshpar.training.once import build_once
from meshpar.training.records import RecordSource, TextPair
from meshpar.training.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import numpy as np

_FORMAT = 1
_BATCH = 4096
_ABOUT = "examples.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleFile:
    """Examples on the disk: the concatenated ids of all inputs with the end of each, and the same for all outputs.

    Attributes:
        folder: folder of ``input.npy``, ``input_ends.npy``, ``output.npy``, ``output_ends.npy`` and a description.
        count: number of examples.
        classes: names of the labels, in the order of their numbers; empty for target texts.
        vocab_size: ids of texts are in ``range(vocab_size)``.
        eos_id: id of the end of a text.
        pad_id: id that fills the shorter rows of a batch.
        fingerprint: hash of the examples.
    """

    folder: Path
    count: int
    classes: tuple[str, ...]
    vocab_size: int
    eos_id: int
    pad_id: int
    fingerprint: str

    @classmethod
    def open(cls, folder: Path) -> ExampleFile:
        """Read the description of a folder written by :func:`prepare_examples`."""
        fields = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        return cls(folder=folder, **{**fields, "classes": tuple(fields["classes"])})

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all inputs (``input``) or outputs (``output``) and their ends, memory-mapped and read-only."""
        numpy = need("numpy")
        ids, ends = (numpy.load(self.folder / f"{each}.npy", mmap_mode="r") for each in (name, f"{name}_ends"))
        return ids, ends

    def row(self, name: str, index: int) -> np.ndarray:
        """Return the ids of one input or output."""
        ids, ends = self.column(name)
        return ids[ends[index - 1] if index else 0 : ends[index]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSplit:
    """The examples of a run; ``validation`` is None without validation data."""

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
        cache: a folder that at least the ranks of one machine share. Folder names in it are hashes of everything they depend on.
        validation: separate records for validation; their labels must be among the source's. None: none.
        validation_fraction: instead, this part of the source's records (at least one), chosen by ``seed``.
        seed: seed of the choice of records.

    Raises:
        RecipeError: there are no records or unknown labels, both ``validation`` and a fraction are given, or the fraction is not in 0 to 1.
    """
    if not 0.0 <= validation_fraction < 1.0 or (validation is not None and validation_fraction):
        raise RecipeError(
            f"expected either a validation source, or a fraction of at least 0 and below 1; got {validation} and {validation_fraction}"
        )
    parts = (source.fingerprint(), None if validation is None else validation.fingerprint(), tokenizer.fingerprint())
    key = hashlib.sha256(repr((_FORMAT, parts, source.kind, validation_fraction, seed)).encode()).hexdigest()[:16]
    folder = build_once(
        Path(cache) / f"examples-{key}", lambda made: _write_all(made, source, validation, tokenizer, validation_fraction, seed)
    )
    held = (folder / "validation").is_dir()
    return ExampleSplit(train=ExampleFile.open(folder / "train"), validation=ExampleFile.open(folder / "validation") if held else None)


def _write_all(
    folder: Path, source: RecordSource, validation: RecordSource | None, tokenizer: TextTokenizer, fraction: float, seed: int
) -> None:
    records = list(source.records())
    classes = sorted({output for _, output in records}) if source.kind == "labels" else []
    if not records or (source.kind == "labels" and len(classes) < 2):
        what = f"{len(records)} records" + (f" of {len(classes)} classes" if records else "")
        raise RecipeError(f"{', '.join(source.inputs)} give {what}; give some{', of two classes at least' if records else ''}")
    held: list[TextPair] = []
    if validation is not None:
        held = list(validation.records())
        if strange := sorted({output for _, output in held} - set(classes)) if classes else []:
            raise RecipeError(f"the validation data has labels that the training data lacks: {', '.join(strange[:5])}")
    elif fraction:
        chosen = _chosen(len(records), fraction, seed)
        held = [record for place, record in enumerate(records) if place in chosen]
        records = [record for place, record in enumerate(records) if place not in chosen]
    for name, part in (("train", records), ("validation", held)):
        if part:
            (folder / name).mkdir()
            _write(folder / name, part, source, classes, tokenizer)


def _chosen(count: int, fraction: float, seed: int) -> set[int]:
    numpy = need("numpy")
    order = numpy.argsort(numpy.random.Philox(seed).random_raw(count), kind="stable")
    return set(order[: min(count - 1, max(1, round(count * fraction)))].tolist())


def _write(folder: Path, records: Sequence[TextPair], source: RecordSource, classes: Sequence[str], tokenizer: TextTokenizer) -> None:
    digest = hashlib.sha256()
    numbers: Mapping[str, int] = {name: number for number, name in enumerate(classes)}
    columns: dict[str, list[list[int]]] = {"input": [], "output": []}
    for part in _batched(records):
        columns["input"] += tokenizer.encode_inputs([text for text, _ in part], begin=bool(classes))
        if classes:
            columns["output"] += [[numbers[output]] for _, output in part]
        else:
            columns["output"] += tokenizer.encode_inputs([output for _, output in part], begin=False)
    for name, rows in columns.items():
        digest.update(_save_rows(folder, name, rows))
    about: dict[str, Any] = {
        "count": len(records),
        "classes": list(classes),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "fingerprint": digest.hexdigest(),
    }
    (folder / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _save_rows(folder: Path, name: str, rows: Sequence[Sequence[int]]) -> bytes:
    numpy = need("numpy")
    ends = numpy.cumsum([len(row) for row in rows], dtype=numpy.int64)
    ids = numpy.fromiter((id_ for row in rows for id_ in row), dtype=numpy.uint32, count=int(ends[-1]))
    numpy.save(folder / f"{name}.npy", ids)
    numpy.save(folder / f"{name}_ends.npy", ends)
    return hashlib.sha256(ids.tobytes() + ends.tobytes()).digest()


def _batched(records: Sequence[TextPair]) -> Iterator[list[TextPair]]:
    rest = iter(records)
    while part := list(islice(rest, _BATCH)):
        yield part
