"""Find what is wrong with the data of a recipe before anything is prepared: the beginning of each file is read."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, final

from meshpar.core.errors import MeshparError, RecipeError, brief
from meshpar.launchers.jobs.datasets import (
    check_template,
    examples_of,
    filling_problem,
    inputs_of,
    named_template,
    own_samples,
    parts_of,
    source_of,
)
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.sections import DataSection
from meshpar.process.homes import expanded
from meshpar.training.chat import ChatSource
from meshpar.training.samples import tokenizers_problem
from meshpar.training.tables import PACKED, UNPLAIN, kind_of
from meshpar.training.text import TextSource
from meshpar.training.tokenizer import TextTokenizer, byte_tokenizer, load_tokenizer, train_bpe
from meshpar.training.tokens import TokenFile, training_texts

_LOOKED_AT, _PIECE, _PIECES_READ = 1 << 20, 1 << 13, 100
_TRIED = 1 << 20  # characters on which a BPE is tried, in about a second


def data_notes(recipe: Recipe) -> list[str]:
    """Return notes on the data, such as fields that nothing reads, from the beginning of each file."""
    found = dict[str, None]()
    for section in parts_of(recipe.data).values() if recipe.data.source != "dataset" else ():
        for path in (*section.paths, *section.validation_paths) if section.source not in ("stdlib", "tokens") else ():
            found |= dict.fromkeys(_looked_at(recipe, section, path).notes)
    return list(found)


def data_problems(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the data's files, before anything is prepared; the beginning of each is read."""
    most, kinds, all_read = 0, dict[str, tuple[int, int]](), True
    for name in ("dataset", "validation_dataset"):
        if (own := getattr(recipe.data, name)) is not None:
            try:
                own_samples(recipe, own)
            except MeshparError as error:
                yield f"{recipe.where(f'data.{name}.class')}: {error}"
    if recipe.data.source == "dataset":
        return
    for number, (name, section) in enumerate(parts_of(recipe.data).items()):
        at = f"data.mix.{number}" if recipe.data.mix else "data"
        for path in (*section.paths, *section.validation_paths) if section.source != "stdlib" else ():
            trained = path in section.paths
            where = recipe.where(f"{at}.paths" if trained else f"{at}.validation_paths")
            try:
                size = _looked_at(recipe, section, path).tokens
                most += size if trained else 0
                if name not in kinds and (made_by := _made_by(recipe, section, path)) is not None:
                    kinds[name] = made_by
            except (RecipeError, OSError) as error:
                most, all_read = sys.maxsize, False
                reason = error if isinstance(error, RecipeError) else f"{path} cannot be read: {brief(error)}"
                yield f"{where}: {reason}"
    if problem := tokenizers_problem(kinds):
        yield f"{recipe.where('data.mix')}: {problem}"
    if all_read and (short := _short_vocabulary(recipe, whole=True)):
        yield f"{recipe.where('data.vocab_size')}: {short}"
    if (
        all(section.source != "stdlib" for section in parts_of(recipe.data).values())
        and examples_of(recipe) == "tokens"
    ):
        few = filling_problem(recipe, max(0, most - 1) // recipe.data.sequence_length + 1)
        if few:
            yield f"{recipe.where('data.micro_batch')}: {few}"


def _made_by(recipe: Recipe, section: DataSection, path: str) -> tuple[int, int] | None:
    """Return the vocabulary and the end of text of one source of a mixture; None where they are not known yet."""
    if not recipe.data.mix:
        return None
    known = TokenFile.open(expanded(Path(path))) if section.source == "tokens" else _known_tokenizer(recipe)
    return None if known is None else (known.vocab_size, known.eos_id)


@final
@dataclass(frozen=True, slots=True)
class _Look:
    """A look at the beginning of a file: how many tokens it has at most, and what a person must know."""

    tokens: int
    notes: tuple[str, ...] = ()


def _looked_at(recipe: Recipe, section: DataSection, path: str) -> _Look:
    """Read the beginning of a file; raises RecipeError for what is wrong in it."""
    if section.source == "tokens":
        file = TokenFile.open(expanded(Path(path)))
        file.check_ids(file.ids()[:_LOOKED_AT])
        return _Look(file.tokens)
    text = source_of(recipe, section, (path,), _known_tokenizer(recipe) if section.source == "chat" else None)
    if isinstance(text, ChatSource):
        check_template(recipe, text.template, _known_tokenizer(recipe))
    read: Iterator[Any] = text.pieces(_PIECE) if isinstance(text, TextSource) else text.documents()
    deque(islice(read, _PIECES_READ), maxlen=0)
    files = text.files()
    plain = section.source != "chat" and all(
        kind_of(one_file) not in UNPLAIN and one_file.suffix not in PACKED for one_file in files
    )
    # a byte is at least one token, with an end a document
    most = sum(one_file.stat().st_size + 1 for one_file in files) if plain else sys.maxsize
    return _Look(most, tuple(text.reading.notes()))


def untried(recipe: Recipe) -> Iterator[str]:
    """Yield what a check does not know of the data, because all of it would have to be read."""
    if examples_of(recipe) == "labels":
        yield "the labels of the data are counted when the job starts, which checks the size of the model's head then"
    if short := _short_vocabulary(recipe, whole=False):
        yield (
            f"only the beginning of the text was tried, and {short.partition(':')[0]}; the job reads all of it when "
            "it starts"
        )


def _short_vocabulary(recipe: Recipe, *, whole: bool) -> str:
    """Return why a BPE of a text, ``whole`` or its beginning, has too few ids; else nothing."""
    texts = [part for part in parts_of(recipe.data).values() if part.source != "tokens"]
    if recipe.data.tokenizer != "bpe" or not texts:
        return ""
    named, left, read = named_template(texts), _TRIED, list[str]()
    pieces = chain.from_iterable(training_texts(source_of(recipe, source, inputs_of(source))) for source in texts)
    while left > 0 and (text := next(pieces, None)) is not None:
        read.append(text[:left])
        left -= len(text)
    if whole != (left > 0):
        return ""
    try:
        train_bpe(read, recipe.data.vocab_size, () if named is None else named.special)
    except RecipeError as error:
        return str(error)
    return ""


def _known_tokenizer(recipe: Recipe) -> TextTokenizer | None:
    """Return the tokenizer of text before it is prepared; None for one that is made of the text."""
    name = recipe.data.tokenizer
    if name in (None, "bytes"):
        return byte_tokenizer()
    return None if name == "bpe" else load_tokenizer(str(name), eos=recipe.data.eos)
