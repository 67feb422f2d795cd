"""Find and prepare the data of a recipe, and make batches from it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

from meshpar import registry
from meshpar.errors import MeshparError, RecipeError, brief
from meshpar.launchers.jobs.transformers_models import DataFacts
from meshpar.launchers.recipes.own import has_keyword, make_own, objective_factory
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.sections import Own
from meshpar.parallelized import Parallelized
from meshpar.training.data import Batches, LoaderSettings, MappedSamples, PackedTokens, Samples
from meshpar.training.examples import ExampleFile, ExampleSplit, prepare_examples
from meshpar.training.padding import LabelledExamples, PairedExamples
from meshpar.training.records import RecordSource
from meshpar.training.text import PACKED, STDLIB, TextSource
from meshpar.training.tokenizer import TextTokenizer, load_tokenizer
from meshpar.training.tokens import TokenFile, TokenSplit, prepare_tokenizer, prepare_tokens, split_tokens

_BEFORE = {"data.documents": "joined"}
"""Settings of runs that were saved before there was a choice."""
_LOOKED_AT, _PIECE, _PIECES_READ = 1 << 20, 1 << 13, 100


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MappedSplit:
    """The samples of a user's own datasets; ``validation`` is None without validation data."""

    train: MappedSamples
    validation: MappedSamples | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The prepared data of a run.

    Attributes:
        split: training and validation files: tokens, or examples if the objective requires these; or samples of the user's own.
        tokenizer: the tokenizer; None if the data is a token file, or samples, without one.
    """

    split: TokenSplit | ExampleSplit | MappedSplit
    tokenizer: TextTokenizer | None

    @property
    def tokens(self) -> TokenSplit:
        """The files of packed text."""
        assert isinstance(self.split, TokenSplit)
        return self.split

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id is smaller."""
        return self.split.train.vocab_size

    @property
    def facts(self) -> DataFacts:
        """Values of the data that a model's config needs."""
        file = self.split.train
        if isinstance(file, MappedSamples):
            return DataFacts()
        if isinstance(file, TokenFile):
            return DataFacts(eos_id=file.eos_id, pad_id=file.eos_id)
        return DataFacts(eos_id=file.eos_id, pad_id=file.pad_id, classes=file.classes)


def examples_of(recipe: Recipe) -> str:
    """Return the kind of examples of the recipe's objective: ``tokens``, ``pairs`` or ``labels``."""
    try:
        return str(getattr(objective_factory(recipe.training.objective), "examples", "tokens"))
    except MeshparError:  # told by the checks of the recipe
        return "tokens"


def separates(recipe: Recipe) -> bool:
    """Return whether the samples may have several documents that must not see each other."""
    return recipe.data.documents == "separate" and recipe.data.source != "dataset" and examples_of(recipe) == "tokens"


def vocab_size_of(recipe: Recipe) -> int:
    """Return the vocabulary of a recipe's data without preparing it."""
    data = recipe.data
    if data.dataset is not None:
        known = own_samples(recipe, data.dataset).vocab_size
        if not known and data.tokenizer is None:
            raise RecipeError(
                f"{data.dataset.class_} has no vocab_size, and the model takes its vocabulary from the data; write model.vocab_size"
            )
        return known or load_tokenizer(str(data.tokenizer), eos=data.eos).vocab_size
    if data.source == "tokens":
        return TokenFile.open(Path(data.paths[0]).expanduser()).vocab_size
    if data.tokenizer in (None, "bytes"):
        return 257
    return data.vocab_size if data.tokenizer == "bpe" else load_tokenizer(str(data.tokenizer), eos=data.eos).vocab_size


def prepare_data(recipe: Recipe) -> Data:
    """Return the tokenizer and the data. The first process prepares both and stores them in ``data.cache``."""
    data = recipe.data
    cache = Path(data.cache).expanduser()
    if data.dataset is not None:
        train, held = own_samples(recipe, data.dataset).split(data.validation_fraction, recipe.seed)
        held = held if data.validation_dataset is None else own_samples(recipe, data.validation_dataset)
        named = None if data.tokenizer is None else load_tokenizer(data.tokenizer, eos=data.eos)
        return Data(split=MappedSplit(train=train, validation=held), tokenizer=named)
    if data.source == "tokens":
        whole = TokenFile.open(Path(data.paths[0]).expanduser())
        split = split_tokens(whole, cache, fraction=data.validation_fraction, seed=recipe.seed)
        if data.validation_paths:
            split = TokenSplit(train=whole, validation=TokenFile.open(Path(data.validation_paths[0]).expanduser()))
        return Data(split=split, tokenizer=None if data.tokenizer is None else load_tokenizer(data.tokenizer, eos=data.eos))
    source: Any = _source(recipe, (STDLIB,) if data.source == "stdlib" else data.paths)
    tokenizer = prepare_tokenizer(data.tokenizer or "bytes", source, cache, vocab_size=data.vocab_size)
    if data.eos is not None and data.tokenizer not in (None, "bytes", "bpe"):
        tokenizer = load_tokenizer(data.tokenizer, eos=data.eos)
    validation: Any = _source(recipe, data.validation_paths) if data.validation_paths else None
    prepare: Any = prepare_tokens if examples_of(recipe) == "tokens" else prepare_examples
    split = prepare(source, tokenizer, cache, validation=validation, validation_fraction=data.validation_fraction, seed=recipe.seed)
    return Data(split=split, tokenizer=tokenizer)


def origin_of(recipe: Recipe, batch: int) -> dict[str, Any]:
    """Return what a run's samples are made of, for a checkpoint: a resume with other data then says what has changed.

    Args:
        recipe: of the run.
        batch: samples of all ranks in a step.
    """
    data = recipe.data
    names = (
        "tokenizer",
        "eos",
        "sequence_length",
        "target_length",
        "field",
        "target_field",
        "label_field",
        "separator",
        "validation_fraction",
        "documents",
    )
    settings = {f"data.{name}": getattr(data, name) for name in names} | {"seed": recipe.seed}
    if data.source == "tokens":
        files = [Path(path).expanduser() for path in data.paths]
    else:
        files = [] if data.source in ("stdlib", "dataset") else TextSource(inputs=data.paths).files()
    stats = {str(path): path.stat() for path in files}
    return {"settings": settings, "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}, "batch": batch}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str] = ()) -> list[str]:
    """Return how two origins of :func:`origin_of` differ, one text each; batches and settings that are ``allowed`` to differ aside."""
    old, new = _BEFORE | before["settings"], now["settings"]
    found = [f"{name} was {old[name]!r} and is {new[name]!r}" for name in new if name in old and name not in allowed and old[name] != new[name]]
    old, new = before["files"], now["files"]
    found += [f"{name} is gone from data.paths" for name in old if name not in new]
    found += [f"{name} was not in data.paths" for name in new if name not in old]
    for name in old.keys() & new.keys():
        sizes = f"it had {old[name][0]:,} bytes and has {new[name][0]:,}" if old[name][0] != new[name][0] else "it was written since"
        found += [f"{name} has changed ({sizes})"] if list(old[name]) != list(new[name]) else []
    return found


def batches(recipe: Recipe, data: Data, par: Parallelized) -> tuple[Batches, Batches | None]:
    """Return training and validation batches of this data rank."""
    section = recipe.data
    loader = LoaderSettings(
        workers=section.workers,
        pin_memory=par.device.type != "cpu" if section.pin_memory is None else section.pin_memory,
        persistent_workers=section.persistent_workers,
        prefetch=section.prefetch,
    )
    place: dict[str, Any] = {"micro_batch": section.micro_batch, "data_rank": par.data_rank, "data_size": par.data_size}
    found = samples(recipe, data.split.train, par)
    if too_few := _too_few(recipe, len(found)):
        raise RecipeError(f"{recipe.where('data.micro_batch')}: {too_few}")
    train = Batches(
        found,
        accumulate=section.accumulate,
        seed=recipe.seed if section.shuffle else None,
        loader=loader,
        **place,
    )
    if data.split.validation is None:
        return train, None
    # The order is drawn once and equal at every validation, so that its first validate_steps are a fair sample.
    return train, Batches(samples(recipe, data.split.validation, par), seed=recipe.seed, **place)


def own_samples(recipe: Recipe, section: Own) -> MappedSamples:
    """Return the samples of a user's own dataset; a keyword ``sequence_length`` that is not written is the recipe's.

    Raises:
        RecipeError: it cannot be made, or is no such dataset.
    """
    factory, given = registry.imported(section.class_), {}
    if "sequence_length" not in section.keywords and has_keyword(factory, "sequence_length"):
        given["sequence_length"] = recipe.data.sequence_length
    dataset = make_own(factory, section.keywords, **given)
    name = f"{section.class_}({', '.join(f'{key}={value!r}' for key, value in (section.keywords | given).items())})"
    try:
        return MappedSamples(dataset, name)
    except MeshparError:
        raise
    except Exception as error:  # the code of a user
        raise RecipeError(f"{name}: sample 0 cannot be read: {brief(error)}") from error


def sequence_of(recipe: Recipe) -> int:
    """Return the tokens of a sample: those of a user's own dataset are looked at."""
    if recipe.data.dataset is None:
        return recipe.data.sequence_length
    first = own_samples(recipe, recipe.data.dataset).first
    return len(first["input_ids"]) if "input_ids" in first else recipe.data.sequence_length


def samples(recipe: Recipe, file: TokenFile | ExampleFile | MappedSamples, par: Parallelized) -> Samples:
    """Return the samples of one file."""
    section = recipe.data
    if isinstance(file, MappedSamples):
        return file
    if isinstance(file, TokenFile):
        return PackedTokens(file, section.sequence_length, documents=section.documents)
    if file.classes:
        return LabelledExamples(file, length=section.sequence_length)
    start = par.layout.config.get("decoder_start_token_id")
    return PairedExamples(
        file, length=section.sequence_length, target_length=section.target_length, start_id=file.pad_id if start is None else start
    )


def data_problems(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the data's files, before anything is prepared; the beginning of each is read."""
    source, most = recipe.data.source, 0
    for name in ("dataset", "validation_dataset"):
        if (own := getattr(recipe.data, name)) is not None:
            try:
                own_samples(recipe, own)
            except MeshparError as error:
                yield f"{recipe.where(f'data.{name}.class')}: {error}"
    if source not in ("stdlib", "dataset"):
        for path in (*recipe.data.paths, *recipe.data.validation_paths):
            try:
                if source == "tokens":
                    file = TokenFile.open(Path(path).expanduser())
                    file.check_ids(file.ids()[:_LOOKED_AT])
                    most += file.tokens if path in recipe.data.paths else 0
                    continue
                files = _source(recipe, (path,)).files()
                plain = all(each.suffix not in PACKED for each in files)  # a byte is at least one token, with an end for each document
                most += (sum(each.stat().st_size + 1 for each in files) if plain else sys.maxsize) if path in recipe.data.paths else 0
                text = _source(recipe, (path,))
                read: Iterator[Any] = text.pieces(_PIECE) if isinstance(text, TextSource) else text.documents()
                deque(islice(read, _PIECES_READ), maxlen=0)
            except RecipeError as error:
                most = sys.maxsize
                yield f"{recipe.where('data.paths' if path in recipe.data.paths else 'data.validation_paths')}: {error}"
            except OSError as error:
                yield f"{recipe.where('data.paths')}: {path} cannot be read: {brief(error)}"
        few = _too_few(recipe, max(0, most - 1) // recipe.data.sequence_length + 1) if examples_of(recipe) == "tokens" else ""
        if few:
            yield f"{recipe.where('data.micro_batch')}: {few}"


def _too_few(recipe: Recipe, most: int) -> str:
    """Return what is wrong if the data has no more samples than these and they fill no micro-batch; else nothing."""
    section = recipe.data
    if most >= section.micro_batch:
        return ""
    length = f" of {section.sequence_length} tokens" if examples_of(recipe) == "tokens" else ""
    return f"a micro-batch has {section.micro_batch} samples{length}, and all the training data gives {most}; lower it, or give more data"


def _source(recipe: Recipe, inputs: tuple[str, ...]) -> TextSource | RecordSource:
    section = recipe.data
    match examples_of(recipe):
        case "pairs":
            return RecordSource(inputs=inputs, kind="pairs", field=section.field, output_field=section.target_field)
        case "labels":
            return RecordSource(inputs=inputs, kind="labels", field=section.field, output_field=section.label_field)
    return TextSource(inputs=inputs, field=section.field, separator=section.separator)
