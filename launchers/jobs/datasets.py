"""Find and prepare the data of a recipe, and make batches from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from meshpar.checkpoints.storage.place import fetched, place
from meshpar.core import registry, runtime
from meshpar.core.errors import MeshparError, RecipeError, brief
from meshpar.launchers.jobs.models import DataFacts
from meshpar.launchers.recipes.recipe import Recipe, UntrustedError, has_keyword, make_own
from meshpar.launchers.recipes.sections import DataSection, Own, mixed_names
from meshpar.parallelized import Parallelized
from meshpar.process.imports import expanded
from meshpar.training.chat import ChatSource
from meshpar.training.data import Batches, LoaderSettings, SampleSet
from meshpar.training.examples import ExampleFile, ExampleSplit, RecordSource, prepare_examples
from meshpar.training.lighthouse import this_replica
from meshpar.training.samples import LabelledExamples, MappedSamples, MixedSamples, PackedTokens, PairedExamples
from meshpar.training.template import ChatTemplate, chat_template
from meshpar.training.text import STDLIB, SUFFIXES, Reading, TextSource
from meshpar.training.tokenizer import END_OF_TEXT, TextTokenizer, byte_tokenizer, load_tokenizer
from meshpar.training.tokens import TokenFile, TokenSplit, prepare_tokenizer, prepare_tokens, split_tokens

_BEFORE: dict[str, Any] = {"data.documents": "joined", "data.packing": "cut", "data.bad_rows": "refuse"}
_BEFORE |= {"data.template": None, "data.mix": []}
"""Settings of runs that were saved before there was a choice."""
_ORIGIN = (
    *("source", "tokenizer", "eos", "sequence_length", "target_length", "field", "target_field", "label_field"),
    *("separator", "validation_fraction", "documents", "packing", "template", "bad_rows"),
)
"""The fields of ``data`` that decide on the samples."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MappedSplit:
    train: MappedSamples
    validation: MappedSamples | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSplit:
    """The token files of each source of a mixture, by name."""

    parts: Mapping[str, TokenSplit]

    @property
    def train(self) -> TokenFile:
        return max((part.train for part in self.parts.values()), key=lambda file: file.vocab_size)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The prepared data of a run, and its tokenizer, which token files and samples of the user's own may lack."""

    split: TokenSplit | ExampleSplit | MappedSplit | MixedSplit
    tokenizer: TextTokenizer | None

    @property
    def tokens(self) -> TokenSplit:
        assert isinstance(self.split, TokenSplit)
        return self.split

    @property
    def vocab_size(self) -> int:
        return self.split.train.vocab_size

    @property
    def facts(self) -> DataFacts:
        file = self.split.train
        if isinstance(file, MappedSamples):
            return DataFacts()
        if isinstance(file, TokenFile):
            return DataFacts(eos_id=file.eos_id, pad_id=file.eos_id)
        return DataFacts(eos_id=file.eos_id, pad_id=file.pad_id, classes=file.classes)


def examples_of(recipe: Recipe) -> Literal["tokens", "pairs", "labels"]:
    """Return the kind of examples of the recipe's objective: ``tokens``, ``pairs`` or ``labels``."""
    try:
        factory = recipe.find(registry.OBJECTIVE, recipe.training.objective)
        examples: Literal["tokens", "pairs", "labels"] = getattr(factory, "examples", "tokens")
        return examples
    except UntrustedError:
        raise
    except MeshparError:  # told by the checks of the recipe
        return "tokens"


def separates(recipe: Recipe) -> bool:
    """Return whether the samples may have several documents that must not see each other."""
    return recipe.data.documents == "separate" and recipe.data.source != "dataset" and examples_of(recipe) == "tokens"


def several_documents(recipe: Recipe) -> bool:
    """Return whether a forecast takes each sample for several documents: records are short, files are not."""
    short = {part.source for part in parts_of(recipe.data).values()} & {"chat", "jsonl", "csv", "parquet"}
    return separates(recipe) and (bool(short) or recipe.data.packing == "best_fit")


def vocab_size_of(recipe: Recipe) -> int:
    data = recipe.data
    if data.dataset is not None:
        size = own_samples(recipe, data.dataset).vocab_size
        if not size and data.tokenizer is None:
            raise RecipeError(
                f"{data.dataset.class_} has no vocab_size, and the model takes its vocabulary from the data; write "
                "model.vocab_size"
            )
        return size or load_tokenizer(str(data.tokenizer), eos=data.eos).vocab_size
    parts = parts_of(data).values()
    if all(part.source == "tokens" for part in parts):
        return max(TokenFile.open(expanded(Path(part.paths[0]))).vocab_size for part in parts)
    tokenizer = named_tokenizer(data)
    return data.vocab_size if tokenizer is None else tokenizer.vocab_size


def named_tokenizer(data: DataSection) -> TextTokenizer | None:
    """Return the tokenizer of text before it is prepared; None for one that is made of the text."""
    if data.tokenizer in (None, "bytes"):
        return byte_tokenizer()
    return None if data.tokenizer == "bpe" else load_tokenizer(str(data.tokenizer), eos=data.eos)


def parts_of(data: DataSection) -> dict[str, DataSection]:
    """Return a mixture's sources by name, each as a section of its own; without a mixture the section itself."""
    if not data.mix:
        return {"": data}
    parts = {}
    for name, part in zip(mixed_names(data), data.mix, strict=True):
        fields = {**part.given(), "source": part.source, "mix": ()}
        shared = {key: value for key, value in fields.items() if key in DataSection.model_fields}
        parts[name] = data.model_copy(update=shared)
    return parts


def with_local_data(recipe: Recipe) -> Recipe:
    """Return a recipe whose data is on this disk: what ``data.paths`` names by URL is copied once to the cache."""
    data = recipe.data

    def local(source: str, paths: Sequence[str]) -> tuple[str, ...]:
        suffixes = (".json", ".marks") if source == "tokens" else ()
        return tuple(
            path if place(path).mounted else str(fetched(path, expanded(Path(data.cache)) / "fetched", suffixes))
            for path in paths
        )

    def moved(section: Any) -> dict[str, Any]:  # noqa: ANN401 - of the data, or of a part of a mixture
        return {name: local(section.source, getattr(section, name)) for name in ("paths", "validation_paths")}

    mix = tuple(part.model_copy(update=moved(part)) for part in data.mix)
    return recipe.model_copy(update={"data": data.model_copy(update={**moved(data), "mix": mix})})


def prepare_data(recipe: Recipe) -> Data:
    """Return the tokenizer and the data. The first process prepares both and stores them in ``data.cache``."""
    data = recipe.data
    cache = expanded(Path(data.cache))
    if data.dataset is not None:
        train, rest = own_samples(recipe, data.dataset).split(data.validation_fraction, recipe.seed)
        rest = rest if data.validation_dataset is None else own_samples(recipe, data.validation_dataset)
        named = None if data.tokenizer is None else load_tokenizer(data.tokenizer, eos=data.eos)
        return Data(split=MappedSplit(train=train, validation=rest), tokenizer=named)
    parts = parts_of(data)
    texts = [part for part in parts.values() if part.source != "tokens"]
    tokenizer = _tokenizer(recipe, texts, cache)
    if examples_of(recipe) != "tokens":
        assert tokenizer is not None
        source: Any = source_of(recipe, data, inputs_of(data))
        validation: Any = source_of(recipe, data, data.validation_paths) if data.validation_paths else None
        seed, fraction = recipe.seed, data.validation_fraction
        examples = prepare_examples(
            source, tokenizer, cache, validation=validation, validation_fraction=fraction, seed=seed
        )
        return Data(split=examples, tokenizer=tokenizer)
    splits = {name: _split(recipe, part, tokenizer, cache) for name, part in parts.items()}
    return Data(split=MixedSplit(parts=splits) if data.mix else splits[""], tokenizer=tokenizer)


def _tokenizer(recipe: Recipe, texts: Sequence[DataSection], cache: Path) -> TextTokenizer | None:
    """Return the tokenizer of the sources that are text; None where none is, and no tokenizer is named."""
    data, name = recipe.data, recipe.data.tokenizer
    if not texts:
        return None if name is None else load_tokenizer(name, eos=data.eos)
    named = named_template(texts)
    template = None if named is None else named.text
    if name in (None, "bytes", "bpe"):
        sources = [source_of(recipe, source, inputs_of(source)) for source in texts] if name == "bpe" else []
        special, end = ((), None) if named is None else (named.special, named.end)
        size, eos = data.vocab_size, data.eos or end
        return prepare_tokenizer(
            name or "bytes", sources, cache, vocab_size=size, special=special, eos=eos, template=template
        )
    return load_tokenizer(name, eos=data.eos, template=template)


def named_template(texts: Sequence[DataSection]) -> ChatTemplate | None:
    """Return the template that the recipe names for its conversations; None where it names none."""
    chats = [source for source in texts if source.source == "chat"]
    named = next((source.template for source in chats if source.template is not None), None)
    return None if named is None else chat_template(named, None)


def _split(recipe: Recipe, section: DataSection, tokenizer: TextTokenizer | None, cache: Path) -> TokenSplit:
    if section.source == "tokens":
        whole = TokenFile.open(expanded(Path(section.paths[0])))
        if section.validation_paths:
            return TokenSplit(train=whole, validation=TokenFile.open(expanded(Path(section.validation_paths[0]))))
        return split_tokens(whole, cache, fraction=section.validation_fraction, seed=recipe.seed)
    assert tokenizer is not None
    source: Any = source_of(recipe, section, inputs_of(section), tokenizer)
    if isinstance(source, ChatSource):
        check_template(recipe, source.template, tokenizer)
    paths = section.validation_paths
    validation: Any = source_of(recipe, section, paths, tokenizer) if paths else None
    fraction = 0.0 if validation is not None else section.validation_fraction
    return prepare_tokens(
        source, tokenizer, cache, validation=validation, validation_fraction=fraction, seed=recipe.seed
    )


def inputs_of(section: DataSection) -> tuple[str, ...]:
    return (STDLIB,) if section.source == "stdlib" else section.paths


def origin_of(recipe: Recipe, batch: int) -> dict[str, Any]:
    """Return what the samples are made of, ``batch`` in a step: on resume, :func:`changes` names the differences."""
    data = recipe.data
    settings = {f"data.{name}": getattr(data, name) for name in _ORIGIN} | {"seed": recipe.seed}
    settings["data.mix"] = [part.model_dump(mode="json") for part in data.mix]
    files: list[Path] = []
    for part in parts_of(data).values():
        if part.source == "tokens":
            binary = [expanded(Path(path)) for path in part.paths]
            every = [file for path in binary for file in (path, path.with_suffix(".json"), path.with_suffix(".marks"))]
            files += [file for file in every if file.is_file()]
        elif part.source not in ("stdlib", "dataset") and part.paths != (STDLIB,):
            files += TextSource(inputs=part.paths, suffixes=SUFFIXES.get(part.source, ())).files()
    stats = {str(path): path.stat() for path in files}
    sizes = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    return {"settings": settings, "files": sizes, "batch": batch}


def same_but_documents(fingerprint: str, now: SampleSet) -> bool:
    """Return whether a saved fingerprint is that of the samples now, with either choice of ``data.documents``."""
    if not isinstance(now, (PackedTokens, MixedSamples)):
        return fingerprint == now.fingerprint
    return fingerprint in (now.fingerprint_of("separate"), now.fingerprint_of("joined"))


def changes(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str] = ()) -> list[str]:
    """Return how two origins differ, one text each, apart from batches and ``allowed`` settings."""
    old, new = _BEFORE | before["settings"], now["settings"]
    compared = [name for name in new if name in old and name not in allowed]
    differences = [f"{name} was {old[name]!r} and is {new[name]!r}" for name in compared if old[name] != new[name]]
    old, new = before["files"], now["files"]
    differences += [f"{name} is missing from data.paths" for name in old if name not in new]
    differences += [f"{name} was not in data.paths" for name in new if name not in old]
    for name in old.keys() & new.keys():
        had, has = old[name][0], new[name][0]
        sizes = f"it had {had:,} bytes and has {has:,}" if had != has else "modified since the save"
        differences += [f"{name} has changed ({sizes})"] if list(old[name]) != list(new[name]) else []
    return differences


def batches(recipe: Recipe, data: Data, par: Parallelized) -> tuple[Batches, Batches | None]:
    section = recipe.data
    loader = LoaderSettings(
        workers=section.workers,
        pin_memory=not runtime.on_host(par.device) if section.pin_memory is None else section.pin_memory,
        persistent_workers=section.persistent_workers,
        prefetch=section.prefetch,
    )
    share: dict[str, Any] = {"micro_batch": section.micro_batch, "data_rank": par.data_rank, "data_size": par.data_size}
    trained, validated = sample_sets(recipe, data, par.layout.config.get("decoder_start_token_id"))
    if too_few := filling_problem(recipe, len(trained)):
        raise RecipeError(f"{recipe.where('data.micro_batch')}: {too_few}")
    # The order is drawn once and equal at every validation, so that its first validate_steps are a fair sample.
    validation = None if validated is None else Batches(validated, seed=recipe.seed, **share)
    train = Batches(
        trained,
        accumulate=section.accumulate,
        grow=section.grow,
        seed=recipe.seed if section.shuffle else None,
        loader=loader,
        replicas=this_replica()[1] or 1,
        **share,
    )
    mix, steps = getattr(train.samples, "mix", None), recipe.training.steps
    if mix is not None and mix.total is not None and steps is not None and steps > train.steps_per_epoch:
        raise RecipeError(
            f"{recipe.where('training.steps')}: the epochs of the sources in data.mix give {train.steps_per_epoch:,} "
            f"steps, and training.steps is {steps:,}; lower it, or raise their epochs"
        )
    return train, validation


def sample_sets(recipe: Recipe, data: Data, start: int | None = None) -> tuple[SampleSet, SampleSet | None]:
    """Return the samples of the training and of the validation; ``start``: the token with which targets begin."""
    split = data.split
    if not isinstance(split, MixedSplit):
        validated = None if split.validation is None else samples(recipe, split.validation, start)
        return samples(recipe, split.train, start), validated
    parts = {name: part.validation for name, part in split.parts.items() if part.validation is not None}
    trained = _mixed(recipe, {name: part.train for name, part in split.parts.items()})
    return trained, _mixed(recipe, parts, once=True) if parts else None


def _mixed(recipe: Recipe, files: Mapping[str, TokenFile], *, once: bool = False) -> MixedSamples:
    """Return the samples of several sources; ``once``: all of each, one time."""
    mix = {name: part for name, part in zip(parts_of(recipe.data), recipe.data.mix, strict=True) if name in files}
    parts = {name: packed(recipe, file) for name, file in files.items()}
    for name, part in parts.items():
        if not len(part):
            raise RecipeError(f"{recipe.where('data.mix')}: {name} has no sample; give it more text")
    weights = [float(len(part)) if once else mix[name].weight for name, part in parts.items()]
    return MixedSamples(parts, weights, [1 if once else mix[name].epochs for name in parts])


def packed(recipe: Recipe, file: TokenFile) -> PackedTokens:
    section = recipe.data
    return PackedTokens(file, section.sequence_length, documents=section.documents, packing=section.packing)


def own_samples(recipe: Recipe, section: Own) -> MappedSamples:
    """Return the samples of a user's own dataset; raises RecipeError if it cannot be made or read."""
    factory, keywords = recipe.find(registry.DATASET, section.class_), section.keywords
    takes = "sequence_length" not in keywords and has_keyword(factory, "sequence_length")
    length = {"sequence_length": recipe.data.sequence_length} if takes else {}
    dataset = make_own(factory, keywords, **length)
    name = f"{section.class_}({', '.join(f'{key}={value!r}' for key, value in (keywords | length).items())})"
    try:
        return MappedSamples(dataset, name)
    except MeshparError:
        raise
    except Exception as error:  # the code of a user
        raise RecipeError(f"{name}: sample 0 cannot be read: {brief(error)}") from error


def sequence_of(recipe: Recipe) -> int:
    if recipe.data.dataset is None:
        return recipe.data.sequence_length
    first = own_samples(recipe, recipe.data.dataset).first
    return len(first["input_ids"]) if "input_ids" in first else recipe.data.sequence_length


def samples(recipe: Recipe, file: TokenFile | ExampleFile | MappedSamples, start: int | None) -> SampleSet:
    section = recipe.data
    if isinstance(file, MappedSamples):
        return file
    if isinstance(file, TokenFile):
        return packed(recipe, file)
    if file.classes:
        return LabelledExamples(file, length=section.sequence_length)
    start = file.pad_id if start is None else start
    length, target_length = section.sequence_length, section.target_length
    return PairedExamples(file, length=length, target_length=target_length, start_id=start)


def check_template(recipe: Recipe, template: ChatTemplate, tokenizer: TextTokenizer | None) -> None:
    """Refuse a chat template that does not fit the tokenizer; None: a BPE that is still to be made."""
    if tokenizer is None:
        template.check(recipe.data.eos or template.end or END_OF_TEXT, None)
    else:
        template.check(tokenizer.eos, tokenizer.fast.token_to_id)


def filling_problem(recipe: Recipe, most: int) -> str:
    """Return what is wrong if the data has no more samples than these and they fill no micro-batch; else nothing."""
    section = recipe.data
    if most >= section.micro_batch:
        return ""
    length = f" of {section.sequence_length} tokens" if examples_of(recipe) == "tokens" else ""
    return (
        f"a micro-batch has {section.micro_batch} samples{length}, and the training data has only {most}; lower "
        "data.micro_batch, or give more data"
    )


def source_of(
    recipe: Recipe, section: DataSection, inputs: tuple[str, ...], tokenizer: TextTokenizer | None = None
) -> TextSource | RecordSource | ChatSource:
    """Return the reader of files, or of the standard library's text, in the format that a section names."""
    reading = Reading(skip=section.bad_rows == "skip")
    kind, field = examples_of(recipe), section.field
    if kind != "tokens":
        other = section.target_field if kind == "pairs" else section.label_field
        return RecordSource(inputs=inputs, kind=kind, field=field, output_field=other, reading=reading)
    if section.source == "chat":
        return ChatSource(inputs=inputs, template=chat_template(section.template, tokenizer), reading=reading)
    separator, suffixes = section.separator, SUFFIXES.get(section.source, ())
    return TextSource(inputs=inputs, field=field, separator=separator, suffixes=suffixes, reading=reading)
