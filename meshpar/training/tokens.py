"""Token files: ids in a memory-mapped ``.bin`` with a ``.json`` beside it, prepared once from text."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from meshpar.core.errors import RecipeError
from meshpar.process.imports import expanded, need
from meshpar.process.leftovers import build_once
from meshpar.training.order import held_out
from meshpar.training.text import TextSource, warn_of
from meshpar.training.tokenizer import Piece, TextTokenizer, byte_tokenizer, load_tokenizer, train_bpe

if TYPE_CHECKING:
    import numpy as np

    from meshpar.training.chat import ChatSource

_FORMAT = 2
_BATCH = 3 << 18  # characters that are tokenized at once: the tokenizer holds about 100 bytes for each id of them
# characters: longer documents are cut, so that all cores work and memory stays bounded
_PIECE, _LONG_PIECE = (1 << 10, 1 << 17)
_SCANNED = 1 << 22  # ids
BEGINS, COUNTS = 1, 2
"""Marks of an id: it begins a document; it counts as a label."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """Describe a file of token ids: the documents one after another, each followed by ``eos_id``.

    Attributes:
        path: the ``.bin`` file: little-endian ``dtype``, no header. The other fields are in the ``.json`` next to it.
        dtype: ``uint16`` or ``uint32``.
        tokens, documents: number of ids, and of documents.
        vocab_size: ids are in ``range(vocab_size)``.
        eos_id: id that ends a document.
        fingerprint: SHA-256 of the ids; empty if the ``.json`` has none.
        marked: there is a ``.marks`` file with a byte for each id: ``BEGINS`` a document, ``COUNTS`` as a label.
            Without it each ``eos_id`` ends a document, and every id counts.
        notes: what a person must know of the data, such as skipped rows.
    """

    path: Path
    dtype: str
    tokens: int
    documents: int
    vocab_size: int
    eos_id: int
    fingerprint: str = ""
    marked: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """Read the description of a token file; raises RecipeError if the two are missing or do not match."""
        path = Path(path)
        sidecar = path.with_suffix(".json")
        if not path.is_file() or not sidecar.is_file():
            raise RecipeError(
                f"{path} or the .json beside it is missing; expected a .bin of ids and a .json with dtype, tokens, "
                "vocab_size and eos_id"
            )
        try:
            fields = json.loads(sidecar.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RecipeError(f"{sidecar} is not JSON: {error}") from error
        missing = [name for name in ("dtype", "vocab_size", "eos_id") if name not in fields]
        if missing or fields["dtype"] not in ("uint16", "uint32"):
            raise RecipeError(f"{sidecar} has {fields}; expected dtype (uint16 or uint32), vocab_size and eos_id")
        size, width = path.stat().st_size, 2 if fields["dtype"] == "uint16" else 4
        marks = path.with_suffix(".marks")
        if size % width or fields.get("tokens", size // width) != size // width:
            raise RecipeError(
                f"{path} has {size} bytes, which is not {fields.get('tokens', 'a number of')} tokens of "
                f"{fields['dtype']}"
            )
        if fields.get("marked") and (not marks.is_file() or marks.stat().st_size != size // width):
            problem = f"{marks} is missing or has not {size // width} bytes, one for each id of {path}; copy it"
            raise RecipeError(problem)
        more = {"documents": 0, "fingerprint": "", "marked": False} | fields
        names = ("dtype", "vocab_size", "eos_id", "documents", "fingerprint", "marked")
        notes = tuple(fields.get("notes", ()))
        return cls(path=path, tokens=size // width, notes=notes, **{name: more[name] for name in names})

    def check_ids(self, ids: np.ndarray) -> None:
        """Raise RecipeError if ids of this file are outside its vocabulary."""
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise RecipeError(
                f"{self.path} has id {int(ids.max())} and a vocab_size of {self.vocab_size} in the .json beside it; "
                "correct it, or write the tokens again with their own tokenizer"
            )

    def ids(self) -> np.ndarray:
        """Return the ids, memory-mapped and read-only."""
        numpy = need("numpy")
        if self.tokens == 0:
            return numpy.zeros(0, dtype=self.dtype)
        return numpy.memmap(self.path, dtype=numpy.dtype(self.dtype).newbyteorder("<"), mode="r")

    def marks(self) -> np.ndarray | None:
        """Return the marks of the ids, uint8, memory-mapped and read-only; None where there are none."""
        if not self.marked or not self.tokens:
            return None
        return need("numpy").memmap(self.path.with_suffix(".marks"), dtype="uint8", mode="r")

    def check_labels(self) -> None:
        """Raise RecipeError if no id of this file counts as a label."""
        if self.marked and self.tokens and not any((part & COUNTS).any() for part in self._scan()):
            problem = f"no token of {self.path} counts as a label, so nothing would be learned from it; give more data"
            raise RecipeError(problem)

    def has_several_documents(self) -> bool:
        """Return whether the ids have several documents, whatever ``documents`` says: text may hold ``eos``."""
        return any(((ends > 0) & (ends < self.tokens)).any() for ends in self._ends())

    def document_ends(self) -> np.ndarray:
        """Return the place behind the last id of each document, int64."""
        numpy = need("numpy")
        ends = numpy.concatenate([numpy.zeros(0, dtype=numpy.int64), *self._ends()])
        ends = ends[ends > 0]
        return ends if ends.size and ends[-1] == self.tokens else numpy.append(ends, self.tokens)

    def _ends(self) -> Iterator[np.ndarray]:
        """Yield the places where documents end: where the next one begins, by the marks, or behind each end id."""
        numpy, start = need("numpy"), 0
        for part in self._scan():
            if self.marked:
                yield numpy.flatnonzero(part & BEGINS) + start
            else:
                yield numpy.flatnonzero(part == self.eos_id) + start + 1
            start += part.size

    def _scan(self) -> Iterator[np.ndarray]:
        """Yield marks, or ids without marks, in parts: a whole mapped file would count as this process's."""
        numpy = need("numpy")
        path, dtype = (self.path.with_suffix(".marks"), "uint8") if self.marked else (self.path, self.dtype)
        with path.open("rb") as file:
            while (part := numpy.fromfile(file, numpy.dtype(dtype).newbyteorder("<"), _SCANNED)).size:
                yield part

    def save(self) -> None:
        """Write the description beside the ids."""
        fields = {name: value for name, value in asdict(self).items() if name != "path"}
        self.path.with_suffix(".json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSplit:
    """The token files of a run; ``validation`` is None without validation data."""

    train: TokenFile
    validation: TokenFile | None


def prepare_tokenizer(
    name: str,
    sources: Sequence[Any],
    cache: str | Path,
    *,
    vocab_size: int = 4096,
    special: Sequence[str] = (),
    eos: str | None = None,
    template: str | None = None,
) -> TextTokenizer:
    """Return ``bytes``, ``bpe``, trained once on ``sources``, or a folder's tokenizer, the same on every rank."""
    if name == "bytes":
        return byte_tokenizer(template)
    if name != "bpe":
        if not expanded(Path(name)).is_dir():
            raise RecipeError(f"tokenizer {name!r} is neither 'bytes', 'bpe' nor a folder with a tokenizer.json")
        return load_tokenizer(name, eos=eos, template=template)
    if not sources:
        problem = "tokenizer 'bpe' is trained on text, and the input is tokens; give the tokenizer's folder instead"
        raise RecipeError(problem)
    key = _key("bpe", *(source.fingerprint() for source in sources), vocab_size, *special)

    def build(folder: Path) -> None:
        train_bpe(chain.from_iterable(map(training_texts, sources)), vocab_size, special).save(folder)

    return load_tokenizer(build_once(Path(cache) / f"tokenizer-{key}", build), eos=eos, template=template)


def training_texts(source: Any) -> Iterator[str]:  # noqa: ANN401 - of texts or of records
    """Yield the texts of a source on which a tokenizer is trained."""
    return (text for text, _ in source.pieces(_LONG_PIECE)) if isinstance(source, TextSource) else source.documents()


def prepare_tokens(
    source: TextSource | ChatSource,
    tokenizer: TextTokenizer,
    cache: str | Path,
    *,
    validation: TextSource | ChatSource | None = None,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> TokenSplit:
    """Tokenize text once, on any rank; ``validation``: separate text, or a part of the source's, chosen by ``seed``."""
    whole = _tokenize_once(source, tokenizer, Path(cache))
    if validation is not None:
        return TokenSplit(train=whole, validation=_tokenize_once(validation, tokenizer, Path(cache)))
    return split_tokens(whole, cache, fraction=validation_fraction, seed=seed)


def split_tokens(whole: TokenFile, cache: str | Path, *, fraction: float, seed: int = 0) -> TokenSplit:
    """Split a token file into training and validation by document; a single document gives its end for validation."""
    if not fraction:
        return TokenSplit(train=whole, validation=None)
    stat = whole.path.stat()
    identity = whole.fingerprint or f"{whole.path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    key = _key("split", identity, whole.eos_id, whole.vocab_size, fraction, seed)
    folder = build_once(Path(cache) / f"split-{key}", lambda target: _write_split(whole, target, fraction, seed))
    return TokenSplit(train=TokenFile.open(folder / "train.bin"), validation=TokenFile.open(folder / "validation.bin"))


def write_tokens(
    path: str | Path, documents: Iterable[Sequence[int] | np.ndarray], *, vocab_size: int, eos_id: int
) -> TokenFile:
    """Write documents (including their end ids) as a token file and return it."""
    pieces = ((document, True, None) for document in documents)
    return _write_pieces(Path(path), pieces, vocab_size=vocab_size, eos_id=eos_id)


def _write_pieces(path: Path, pieces: Iterable[Piece], *, vocab_size: int, eos_id: int) -> TokenFile:
    """Write documents in pieces; marks as well, if the pieces say which ids count."""
    numpy = need("numpy")
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    digest, count, tokens, last, ended, marked = hashlib.sha256(dtype.encode()), 0, 0, eos_id, True, False
    with ExitStack() as stack:
        file, marks = stack.enter_context(path.open("wb")), None
        for piece, ends, counted in pieces:
            ids = numpy.asarray(piece)
            low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
            if low < 0 or high >= vocab_size:
                raise RecipeError(
                    f"a document has id {low if low < 0 else high}; expected ids of 0 to {vocab_size - 1}, the "
                    "size of the vocabulary"
                )
            data = ids.astype(numpy.dtype(dtype).newbyteorder("<")).data
            digest.update(data)
            file.write(data)
            if counted is not None:
                marks, marked = marks or stack.enter_context(path.with_suffix(".marks").open("wb")), True
                mark = counted.astype(numpy.uint8) * COUNTS
                mark[:1] |= BEGINS if ended else 0
                digest.update(mark.data)
                marks.write(mark.data)
            if ids.size:
                tokens, ended, last = tokens + ids.size, ends, int(ids[-1])
            count += ends if counted is not None else numpy.count_nonzero(ids == eos_id)
    if not marked and tokens and last != eos_id:
        count += 1
    sizes: dict[str, Any] = {"tokens": tokens, "documents": int(count), "vocab_size": vocab_size}
    written = TokenFile(path=path, dtype=dtype, eos_id=eos_id, fingerprint=digest.hexdigest(), marked=marked, **sizes)
    written.save()
    return written


def _tokenize_once(source: TextSource | ChatSource, tokenizer: TextTokenizer, cache: Path) -> TokenFile:
    def build(folder: Path) -> None:
        pieces = _token_pieces(source, tokenizer) if isinstance(source, TextSource) else source.token_pieces(tokenizer)
        written = _write_pieces(folder / "tokens.bin", pieces, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
        if written.tokens < 2:
            notes = "".join(f"; {note}" for note in source.reading.notes())
            raise RecipeError(
                f"the text of {', '.join(source.inputs)} has {written.tokens} tokens; expected at least 2: give more "
                f"text{notes}"
            )
        written.check_labels()
        replace(written, notes=tuple(source.reading.notes())).save()

    key = _key("tokens", source.fingerprint(), tokenizer.fingerprint())
    tokens = TokenFile.open(build_once(cache / f"tokens-{key}", build) / "tokens.bin")
    warn_of(tokens.notes)
    return tokens


def _token_pieces(source: TextSource, tokenizer: TextTokenizer) -> Iterator[Piece]:
    """Yield the ids of the documents in pieces, each with whether it ends its document; the last piece has the end."""
    numpy = need("numpy")
    end = numpy.array([tokenizer.eos_id], dtype=numpy.uint32)
    ends: deque[list[bool]] = deque()

    def batches() -> Iterator[list[str]]:
        for batch in _batch_pieces(source.pieces(_PIECE if tokenizer.splits_between_words else _LONG_PIECE)):
            ends.append([last for _, last in batch])
            yield [text for text, _ in batch]

    for encoded in tokenizer.encode_ahead(batches()):
        # One array for all that ends no document: thousands of small writes would take as long as tokenizing.
        together: list[Any] = []
        for ids, last in zip(encoded, ends.popleft()):
            together += [ids, end] if last else [ids]
            if last:
                yield numpy.concatenate(together), True, None
                together = []
        if together:
            yield numpy.concatenate(together), False, None


def _batch_pieces(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size > _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_split(whole: TokenFile, folder: Path, fraction: float, seed: int) -> None:
    """Write the documents to train on and those held out; of a single document the last part is held out."""
    numpy = need("numpy")
    ids, marks, ends = whole.ids(), whole.marks(), whole.document_ends()
    if ends.size == 1:
        cut = ids.size - max(2, round(ids.size * fraction))
        if cut < 2:
            raise RecipeError(
                f"{whole.tokens} tokens are too few to reserve {fraction:g} of them for validation; give more text"
            )
        ends, chosen = numpy.array([cut, ids.size]), numpy.array([False, True])
    else:
        chosen = held_out(ends.size, fraction, seed)
    starts = [0, *ends[:-1].tolist()]
    for name, wanted in (("train", False), ("validation", True)):
        documents = ((start, end) for start, end, is_held in zip(starts, ends.tolist(), chosen) if is_held == wanted)
        parts = (
            (ids[at:to], to == end, None if marks is None else (marks[at:to] & COUNTS) > 0)
            for start, end in documents
            for at in range(start, end, _SCANNED)
            for to in (min(at + _SCANNED, end),)
        )
        _write_pieces(folder / f"{name}.bin", parts, vocab_size=whole.vocab_size, eos_id=whole.eos_id).check_labels()


def _key(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, (_FORMAT, *parts))).encode()).hexdigest()[:16]
