"""The parts of a job, made from a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from meshpar import registry
from meshpar.errors import LayoutError, PlanError, RecipeError
from meshpar.launchers.recipe import Recipe, model_config
from meshpar.launchers.techniques import make_passes
from meshpar.mesh import MeshSpec, default_device_type
from meshpar.models import GPT2, Transformer
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.huggingface import from_config
from meshpar.parallelized import Parallelized
from meshpar.plan import Plan
from meshpar.training.data import Batches, LoaderSettings, PackedTokens
from meshpar.training.optimizer import AdamWSettings
from meshpar.training.schedule import Schedule, scaled_rate
from meshpar.training.settings import TrainSettings
from meshpar.training.text import TextSource
from meshpar.training.tokenizer import TextTokenizer, load_tokenizer
from meshpar.training.tokens import TokenFile, TokenSplit, prepare_tokenizer, prepare_tokens, split_tokens


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data of a run, ready to read; ``tokenizer`` is None where only tokens are known."""

    tokens: TokenSplit
    tokenizer: TextTokenizer | None


def device_type(recipe: Recipe) -> str:
    """Return the device type that a recipe trains on."""
    return default_device_type() if recipe.device == "auto" else recipe.device


def plan_of(recipe: Recipe) -> Plan:
    """Return the plan."""
    return Plan(recipe.mesh, make_passes(recipe.passes))


def world_size_of(recipe: Recipe) -> int:
    """Return how many ranks a recipe wants on this machine where nobody says: its mesh's, or an accelerator each."""
    devices = 1 if device_type(recipe) == "cpu" else torch.accelerator.device_count()
    if recipe.mesh.strip().startswith("auto"):
        return devices
    sizes = MeshSpec(recipe.mesh).axes.values()
    known = math.prod(size for size in sizes if size != -1)
    return known * max(1, devices // known) if -1 in sizes else known


def vocab_size_of(recipe: Recipe) -> int:
    """Return the vocabulary of a recipe's data without preparing it."""
    data = recipe.data
    if data.source == "tokens":
        return TokenFile.open(Path(data.paths[0]).expanduser()).vocab_size
    if data.tokenizer in (None, "bytes"):
        return 257
    return data.vocab_size if data.tokenizer == "bpe" else load_tokenizer(str(data.tokenizer), eos=data.eos).vocab_size


def build_shape(recipe: Recipe) -> nn.Module:
    """Return the model on the meta device; the data is looked at only where the model takes its vocabulary from it."""
    section: Any = recipe.model
    own = section.kind != "transformer" or section.preset is not None or section.vocab_size is not None
    return build_model(recipe, 0 if own else vocab_size_of(recipe))


def build_model(recipe: Recipe, vocab_size: int) -> nn.Module:
    """Return the model on the meta device.

    Args:
        recipe: says which.
        vocab_size: of the data.

    Raises:
        RecipeError: the model has fewer tokens or positions than the data needs.
    """
    section: Any = recipe.model
    if section.kind == "huggingface":
        model = from_config(section.config)
        config: Any = model.config
        _check_room(recipe, vocab_size, config.get_text_config().vocab_size, getattr(config, "max_position_embeddings", None))
        return model
    shape = model_config(section, vocab_size)
    positions = shape.n_positions if isinstance(shape, GPT2Config) else shape.max_positions
    _check_room(recipe, vocab_size, shape.vocab_size, positions)
    with torch.device("meta"):
        return GPT2(shape) if isinstance(shape, GPT2Config) else Transformer(shape)


def prepare_data(recipe: Recipe) -> Data:
    """Return the tokenizer and the tokens, prepared once by whichever process comes first and kept in ``data.cache``."""
    data = recipe.data
    cache = Path(data.cache).expanduser()
    if data.source == "tokens":
        whole = TokenFile.open(Path(data.paths[0]).expanduser())
        split = split_tokens(whole, cache, fraction=data.validation_fraction, seed=recipe.seed)
        if data.validation_paths:
            split = TokenSplit(train=whole, validation=TokenFile.open(Path(data.validation_paths[0]).expanduser()))
        return Data(tokens=split, tokenizer=None if data.tokenizer is None else load_tokenizer(data.tokenizer, eos=data.eos))
    source = _source(recipe, ("stdlib",) if data.source == "stdlib" else data.paths)
    tokenizer = prepare_tokenizer(data.tokenizer or "bytes", source, cache, vocab_size=data.vocab_size)
    if data.eos is not None and data.tokenizer not in (None, "bytes", "bpe"):
        tokenizer = load_tokenizer(data.tokenizer, eos=data.eos)
    validation = _source(recipe, data.validation_paths) if data.validation_paths else None
    tokens = prepare_tokens(source, tokenizer, cache, validation=validation, validation_fraction=data.validation_fraction, seed=recipe.seed)
    return Data(tokens=tokens, tokenizer=tokenizer)


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
        PackedTokens(data.tokens.train, section.sequence_length),
        accumulate=section.accumulate,
        seed=recipe.seed if section.shuffle else None,
        loader=loader,
        **place,
    )
    if data.tokens.validation is None:
        return train, None
    # In an order drawn once, the same at every validation: its first part, where validate_steps bounds it, is then a fair sample.
    return train, Batches(PackedTokens(data.tokens.validation, section.sequence_length), seed=recipe.seed, **place)


def schedule_of(recipe: Recipe, settings: TrainSettings, train: Batches, data_size: int) -> Schedule:
    """Return the learning rate over the run."""
    section = recipe.schedule
    return Schedule(
        name=section.name,
        lr=scaled_rate(recipe.optimizer.lr, recipe.optimizer.scale_lr, data_size),
        steps=section.steps or settings.total_steps(train.steps_per_epoch),
        warmup_steps=section.warmup_steps,
        min_ratio=section.min_ratio,
        step_every=section.step_every,
        gamma=section.gamma,
        decay_fraction=section.decay_fraction,
    )


def settings_of(recipe: Recipe) -> TrainSettings:
    """Return how long to train, and what to do how often."""
    section = recipe.training
    return TrainSettings(
        steps=section.steps,
        epochs=section.epochs,
        clip=section.clip,
        log_every=section.log_every,
        validate_every=section.validate_every,
        validate_steps=section.validate_steps,
        checkpoint_every=recipe.checkpoint.every,
        check_replicas_every=section.check_replicas_every,
        nonfinite=section.nonfinite,
        reduce_each=section.reduce_each,
        seed=recipe.seed,
    )


def adamw_of(recipe: Recipe) -> AdamWSettings:
    """Return AdamW's settings."""
    section = recipe.optimizer
    return AdamWSettings(lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay, fused=section.fused)


def objective_of(recipe: Recipe) -> Any:
    """Return the objective, found by entry point."""
    found = registry.plugin("meshpar.objectives", recipe.training.objective)
    return found() if isinstance(found, type) else found


def wants_scaler(recipe: Recipe) -> bool:
    """Tell whether the loss is to be scaled: as the recipe says, else where a pass computes in float16."""
    if recipe.training.loss_scaling is not None:
        return recipe.training.loss_scaling
    return any(options.get("param_dtype") == "float16" for written in recipe.passes for options in written.values())


def check_job(recipe: Recipe, world_size: int) -> list[str]:
    """Return every problem that shows before a rank is started: of the plan on the model, and of the data's files."""
    problems: list[str] = []
    try:
        vocab_size = vocab_size_of(recipe)
    except RecipeError as error:
        problems.append(f"data: {error}")
        vocab_size = 0
    if recipe.data.source in ("files", "jsonl"):
        for path in (*recipe.data.paths, *recipe.data.validation_paths):
            try:
                _source(recipe, (path,)).files()
            except RecipeError as error:
                problems.append(f"data: {error}")
    try:
        plan_of(recipe).check(build_model(recipe, vocab_size), world_size=world_size)
    except PlanError as error:
        problems += error.problems
    except (RecipeError, LayoutError) as error:
        problems.append(str(error))
    if recipe.training.objective not in registry.names("meshpar.objectives"):
        known = ", ".join(registry.names("meshpar.objectives"))
        problems.append(f"training.objective: no objective {recipe.training.objective!r} is installed; there are: {known}")
    return problems


def machine_problems(recipe: Recipe, ranks: int) -> list[str]:
    """Return what this machine lacks to run ``ranks`` ranks of a recipe."""
    kind, here = device_type(recipe), default_device_type()
    if kind == "cpu":
        return []
    if kind != here:
        return [f"device: {kind} is not available on this machine, which has {here}; write device: {here}, or auto"]
    devices = torch.accelerator.device_count()
    return [f"{ranks} ranks want a {kind} device each, and this machine has {devices}; start fewer (--nproc)"] if ranks > devices else []


def _source(recipe: Recipe, inputs: tuple[str, ...]) -> TextSource:
    return TextSource(inputs=inputs, field=recipe.data.field, separator=recipe.data.separator)


def _check_room(recipe: Recipe, vocab_size: int, model_vocab: int, positions: int | None) -> None:
    if vocab_size > model_vocab:
        raise RecipeError(f"the data has {vocab_size} different tokens and the model a vocab_size of {model_vocab}; raise the model's")
    length = recipe.data.sequence_length
    if positions is not None and length > positions:
        raise RecipeError(f"data.sequence_length is {length} and the model has {positions} positions; shorten it, or give the model more")
