"""Find and prepare the data of a recipe, and make batches from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

from meshpar import registry
from meshpar.errors import RecipeError
from meshpar.launchers.jobs.transformers_models import DataFacts
from meshpar.launchers.recipes.objective import OBJECTIVES
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.parallelized import Parallelized
from meshpar.training.data import Batches, LoaderSettings, PackedTokens, Samples
from meshpar.training.examples import ExampleFile, ExampleSplit, prepare_examples
from meshpar.training.padding import LabelledExamples, PairedExamples
from meshpar.training.records import RecordSource
from meshpar.training.text import STDLIB, TextSource
from meshpar.training.tokenizer import TextTokenizer, load_tokenizer
from meshpar.training.tokens import TokenFile, TokenSplit, prepare_tokenizer, prepare_tokens, split_tokens

_LOOKED_AT, _LINES_READ = 1 << 20, 100


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The prepared data of a run.

    Attributes:
        split: training and validation files: tokens, or examples if the objective requires these.
        tokenizer: the tokenizer; None if the data is a token file without one.
    """

    split: TokenSplit | ExampleSplit
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
        if isinstance(file, TokenFile):
            return DataFacts(eos_id=file.eos_id, pad_id=file.eos_id)
        return DataFacts(eos_id=file.eos_id, pad_id=file.pad_id, classes=file.classes)


def examples_of(recipe: Recipe) -> str:
    """Return the kind of examples of the recipe's objective: ``tokens``, ``pairs`` or ``labels``."""
    if recipe.training.objective not in registry.names(OBJECTIVES):
        return "tokens"
    return str(getattr(registry.plugin(OBJECTIVES, recipe.training.objective), "examples", "tokens"))


def vocab_size_of(recipe: Recipe) -> int:
    """Return the vocabulary of a recipe's data without preparing it."""
    data = recipe.data
    if data.source == "tokens":
        return TokenFile.open(Path(data.paths[0]).expanduser()).vocab_size
    if data.tokenizer in (None, "bytes"):
        return 257
    return data.vocab_size if data.tokenizer == "bpe" else load_tokenizer(str(data.tokenizer), eos=data.eos).vocab_size


def prepare_data(recipe: Recipe) -> Data:
    """Return the tokenizer and the data. The first process prepares both and stores them in ``data.cache``."""
    data = recipe.data
    cache = Path(data.cache).expanduser()
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
    train = Batches(
        samples(recipe, data.split.train, par),
        accumulate=section.accumulate,
        seed=recipe.seed if section.shuffle else None,
        loader=loader,
        **place,
    )
    if data.split.validation is None:
        return train, None
    # The order is drawn once and equal at every validation, so that its first validate_steps are a fair sample.
    return train, Batches(samples(recipe, data.split.validation, par), seed=recipe.seed, **place)


def samples(recipe: Recipe, file: TokenFile | ExampleFile, par: Parallelized) -> Samples:
    """Return the samples of one file."""
    section = recipe.data
    if isinstance(file, TokenFile):
        return PackedTokens(file, section.sequence_length)
    if file.classes:
        return LabelledExamples(file, length=section.sequence_length)
    start = par.layout.config.get("decoder_start_token_id")
    return PairedExamples(
        file, length=section.sequence_length, target_length=section.target_length, start_id=file.pad_id if start is None else start
    )


def data_problems(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the data's files, before anything is prepared; of lines of JSON and of tokens, the beginning is read."""
    source = recipe.data.source
    if source != "stdlib":
        for path in (*recipe.data.paths, *recipe.data.validation_paths):
            try:
                if source == "tokens":
                    file = TokenFile.open(Path(path).expanduser())
                    file.check_ids(file.ids()[:_LOOKED_AT])
                elif _source(recipe, (path,)).files() and source in ("jsonl", "csv"):
                    deque(islice(_source(recipe, (path,)).documents(), _LINES_READ), maxlen=0)
            except RecipeError as error:
                yield f"{recipe.where('data.paths')}: {error}"


def _source(recipe: Recipe, inputs: tuple[str, ...]) -> TextSource | RecordSource:
    section = recipe.data
    match examples_of(recipe):
        case "pairs":
            return RecordSource(inputs=inputs, kind="pairs", field=section.field, output_field=section.target_field)
        case "labels":
            return RecordSource(inputs=inputs, kind="labels", field=section.field, output_field=section.label_field)
    return TextSource(inputs=inputs, field=section.field, separator=section.separator)
