"""Checks of a job's facts before a rank starts, which read the beginning of each file of data."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, final

import torch

from meshpar.checkpoints.storage.place import place
from meshpar.core import registry, runtime
from meshpar.core.errors import CheckpointError, LayoutError, MeshparError, PlanError, RecipeError, brief
from meshpar.core.mesh import default_device_type
from meshpar.core.passes import Role, axes_of
from meshpar.core.patterns import suggestion
from meshpar.guards.optimizers import check_separable
from meshpar.launchers.jobs import build, datasets
from meshpar.launchers.jobs.models import weights_problems
from meshpar.launchers.jobs.profile import LEAST as PROFILED
from meshpar.launchers.recipes.loading import folder_problems
from meshpar.launchers.recipes.recipe import Recipe, UntrustedError
from meshpar.launchers.recipes.sections import DataSection, Own, OwnOptimizer
from meshpar.plan import lost_replica_problems
from meshpar.process.imports import expanded
from meshpar.training.adamw_and_schedules import check_elementwise
from meshpar.training.chat import ChatSource
from meshpar.training.documents import takes_positions, untaken
from meshpar.training.experts import balance_problems
from meshpar.training.objectives import teacher_problems
from meshpar.training.samples import tokenizers_problem
from meshpar.training.send_to_trackers import usable
from meshpar.training.text import PACKED, UNPLAIN, TextSource, kind_of
from meshpar.training.tokenizer import train_bpe
from meshpar.training.tokens import TokenFile, training_texts

Problems = Iterator[tuple[str, str]]
"""Fields of a recipe, each with what is wrong with it."""

_TOKENS_READ, _PIECE, _PIECES_READ = 1 << 20, 1 << 13, 100
_TRIED = 1 << 20  # characters on which a BPE is tried, in about a second


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The facts that the checks of a job read; ``vocab_size`` 1 fits every model."""

    recipe: Recipe
    ranks: int
    replica: bool
    unseen: frozenset[object]
    vocab_size: int = 1
    no_vocabulary: str = ""

    def sees(self, *headings: str) -> bool:
        return self.unseen.isdisjoint(headings)


def check_job(recipe: Recipe, world_size: int, *, replica: bool = False) -> list[str]:
    """Return every problem that shows before a rank starts, except of classes that may not be imported."""
    try:
        recipe = datasets.with_local_data(recipe)
    except (CheckpointError, RecipeError) as error:
        return [f"{recipe.where('data.paths')}: {error}"]
    unseen = frozenset(heading for heading, *_ in recipe.classes.unseen)
    facts = JobFacts(recipe=recipe, ranks=world_size, replica=replica, unseen=unseen)
    if facts.sees("data", "training"):
        try:
            if recipe.data.dataset is None:
                facts = replace(facts, vocab_size=datasets.vocab_size_of(recipe))
            elif facts.sees("model"):
                facts = replace(facts, vocab_size=build.vocabulary_for(recipe, recipe.model) or 1)
        except RecipeError as error:
            facts = replace(facts, no_vocabulary=str(error))
    problems = [problem for check in _CHECKS for problem in check(facts)]
    problems += replica_problems(recipe) if replica else ()
    return [f"{recipe.where(field)}: {text}" for field, text in problems]


def machine_problems(recipe: Recipe, ranks: int) -> list[str]:
    kind, here = build.device_type(recipe), default_device_type()
    problems = build.plan_of(recipe).machine_problems(kind)
    if kind != here and not runtime.on_host(kind):
        problems.append(
            f"{recipe.where('device')}: {kind} is not available on this machine, which has {here}; write device: "
            f"{here}, or auto"
        )
    elif not runtime.on_host(kind) and ranks > (devices := torch.accelerator.device_count()):
        problems.append(
            f"{recipe.where('mesh')}: {ranks} ranks need a {kind} device each, and this machine has {devices}; start "
            "fewer (--nproc)"
        )
    return problems


def _data(facts: JobFacts) -> Problems:
    if not facts.sees("data", "training"):
        return
    recipe, texts = facts.recipe, list[str]()
    for field, text in _file_problems(recipe):
        texts.append(text)
        yield field, text
    if facts.no_vocabulary and not any(text.endswith(facts.no_vocabulary) for text in texts):
        fields = {"tokens": "data.paths", "dataset": "data.dataset"}
        yield fields.get(recipe.data.source, "data.tokenizer"), facts.no_vocabulary


def replica_problems(recipe: Recipe) -> Problems:
    """Yield what ``--elastic=replicas`` does not support in a recipe; plan and data have checks of their own."""
    if recipe.teacher is not None:
        yield "teacher", "--elastic=replicas does not support a teacher; remove one of the two"
    if recipe.training.balance_rate or recipe.training.balance_loss:
        yield (
            "training",
            "--elastic=replicas sums gradients over replicas, but not the counts of chosen experts; set balance_rate "
            "and balance_loss to 0",
        )
    if recipe.kept != recipe.folder:
        yield "output", f"--elastic=replicas requires an output folder that every node sees, got {recipe.output}"
    if recipe.averages:
        yield (
            "averages",
            "--elastic=replicas sends weights and optimizer to a replica that joins, and no averages; remove averages",
        )
    if recipe.same_bits:
        yield "same_bits", "--elastic=replicas sums gradients of replicas as they come; set same_bits: false"
    if recipe.profile:
        yield "profile", "--elastic=replicas writes no profile; set profile: false"
    if recipe.data.workers:
        yield "data.workers", "--elastic=replicas reads data in the training process; set data.workers: 0"


def _folders(facts: JobFacts) -> Problems:
    for field, text in (("output", facts.recipe.output), ("data.cache", facts.recipe.data.cache)):
        try:
            there = expanded(place(text))
            if there.mounted:
                folder = Path(str(there)).absolute()
                while not folder.exists():
                    folder = folder.parent
                if not folder.is_dir():
                    yield field, f"{folder} is a file; expected a folder, or a path where one can be made"
                elif not os.access(folder, os.W_OK | os.X_OK):
                    yield field, f"{folder} is not writable; correct its mode, or choose another folder"
            elif field == "data.cache":
                yield field, f"{there} is a URL; expected a folder on this machine, where copies of the data are kept"
            else:
                next(there.iterdir(), None)  # the store answers, and knows us
        except MeshparError as error:
            yield field, str(error)


def _named(facts: JobFacts) -> Problems:
    """Yield settings that name a missing checkpoint, metric or profile window; not on resume."""
    recipe = facts.recipe
    resume, steps = recipe.checkpoint.resume, recipe.training.steps
    if resume not in ("auto", "never") and not expanded(place(resume)).exists():
        yield "checkpoint.resume", f"there is no {resume}; expected auto, never, or the folder of a step or of a run"
    best = (recipe.checkpoint.best or "").removeprefix("+")
    if best.startswith("val/") and not recipe.data.validates:
        how = "set data.validation_fraction or data.validation_paths"
        yield "checkpoint.best", f"no validation measures {best}; {how}"
    if recipe.profile and steps is not None and steps < PROFILED:
        how = "raise it, or set profile: off"
        yield "profile", f"a profile requires {PROFILED} steps, and training.steps is {steps}; {how}"


def _plugins(facts: JobFacts) -> Problems:
    recipe = facts.recipe
    named = [("trackers", registry.TRACKER, name) for name in recipe.trackers]
    named += [("evaluations", registry.EVALUATION, name) for name in recipe.evaluations]
    for heading, kind, name in named:
        try:
            usable(recipe.find(kind, name))
        except UntrustedError:
            continue
        except MeshparError as error:
            yield heading, str(error)
    if not all(recipe.evaluations.get("samples", {}).get("prompts", ())):
        yield "evaluations.samples.prompts", "a prompt is empty, and has no token; give each prompt a text"


def _objective(facts: JobFacts) -> Problems:
    if not facts.sees("training"):
        return
    name, installed = facts.recipe.training.objective, registry.names(registry.OBJECTIVES)
    if "." not in name and name not in installed:
        yield "training.objective", f"no objective {name!r} is installed; {suggestion(name, installed)}"
    elif facts.recipe.teacher is None:
        try:
            build.objective_of(facts.recipe)
        except MeshparError as error:
            yield "training.objective", str(error)


def _plan(facts: JobFacts) -> Problems:
    recipe, training = facts.recipe, facts.recipe.training
    if not facts.sees("data", "training", "model", "passes"):
        return
    try:
        model, plan = build.build_model(recipe, facts.vocab_size), build.plan_of(recipe)
        adapted = build.layout_of(recipe, model)
        layout = adapted or registry.layout_for(model)
        weights = weights_problems(model, layout, recipe.model, adapters=recipe.lora is not None)
        yield from (("model.weights", text) for text in weights)
        spec = plan.check(model, adapted, world_size=facts.ranks)
        yield from build.dealing_problems(recipe, spec)
        lost = lost_replica_problems(plan.passes, spec, model) if facts.replica else ()
        yield from (("mesh", text) for text in lost)
        balance = balance_problems(model, layout, training.balance_rate, training.balance_loss)
        yield from (("training", text) for text in balance)
        if datasets.separates(recipe) and not takes_positions(model):
            yield "data.documents", untaken(model)
        mesh, length = plan.resolve(facts.ranks), recipe.data.sequence_length
        axes = axes_of(plan.passes, mesh, Role.POSITIONS)
        size = math.prod(mesh.axes[axis] for axis in axes)
        if length % size:
            how = f"use a data.sequence_length that is a multiple of {size}"
            yield "mesh", f"{', '.join(axes)}={size} does not divide {length} positions; {how}"
        if facts.sees("optimizer"):
            shards = spec.size > 1 and any(pass_.shards(model, layout) for pass_ in plan.passes)
            stages = any(spec.axes[axis] > 1 for axis in axes_of(plan.passes, spec, Role.LAYERS))
            yield from _optimizer_problems(recipe, model, shards=shards, stages=stages)
        if recipe.teacher is not None and facts.sees("teacher"):
            yield from _teacher_problems(recipe, facts.vocab_size, facts.ranks)
    except PlanError as error:
        yield from (("mesh", text) for text in error.problems)
    except (RecipeError, LayoutError) as error:
        yield "model.class" if isinstance(recipe.model, Own) else "model", str(error)


def _teacher_problems(recipe: Recipe, vocab_size: int, ranks: int) -> Problems:
    assert recipe.teacher is not None
    missing = [text.partition(": ") for text in folder_problems(recipe.teacher.model)]
    for field, _, text in missing:
        yield f"teacher.model.{field}", f"{text}; train and export the teacher first"
    if not missing:
        teacher = build.build_teacher(recipe, vocab_size)
        problems = teacher_problems(build.teacher_plan_of(recipe), teacher, build.plan_of(recipe), ranks)
        yield from (("teacher", text) for text in problems)
        weights = weights_problems(teacher, registry.layout_for(teacher), recipe.teacher.model)
        yield from (("teacher.model.weights", text) for text in weights)


def _optimizer_problems(recipe: Recipe, model: torch.nn.Module, *, shards: bool, stages: bool) -> Problems:
    """Yield what an optimizer lacks for a plan that shards parameters, or has them on ``stages``."""
    section = recipe.optimizer
    try:
        optimizer = build.optimizer_of(recipe)(model)
        exact = getattr(type(optimizer), "takes_module", False) or isinstance(optimizer, torch.optim.Adafactor)
        if isinstance(section, OwnOptimizer) and shards and not exact:
            kind = recipe.find(registry.OPTIMIZER, section.class_)
            check_elementwise(functools.partial(build.own_optimizer, kind, {**section.keywords, "lr": section.lr}))
        if stages:
            check_separable(optimizer)
    except MeshparError as error:
        yield "optimizer.class" if isinstance(section, OwnOptimizer) else "optimizer", str(error)


_CHECKS: tuple[Callable[[JobFacts], Problems], ...] = (_data, _folders, _named, _plugins, _plan, _objective)


def data_notes(recipe: Recipe) -> list[str]:
    """Return notes on the data, such as fields that nothing reads, from the beginning of each file."""
    notes = dict[str, None]()
    for section in datasets.parts_of(recipe.data).values() if recipe.data.source != "dataset" else ():
        for path in (*section.paths, *section.validation_paths) if section.source not in ("stdlib", "tokens") else ():
            notes |= dict.fromkeys(_look_at(recipe, section, path)[1])
    return list(notes)


def untried(recipe: Recipe) -> Iterator[str]:
    """Yield what a check does not know of the data, because all of it would have to be read."""
    if datasets.examples_of(recipe) == "labels":
        yield "the labels of the data are counted when the job starts, which checks the size of the model's head then"
    if short := _short_vocabulary(recipe, whole=False):
        yield (
            f"only the beginning of the text was tried, and {short.partition(':')[0]}; the job reads all of it when "
            "it starts"
        )


def _file_problems(recipe: Recipe) -> Problems:
    for name in ("dataset", "validation_dataset"):
        if (dataset := getattr(recipe.data, name)) is not None:
            try:
                datasets.own_samples(recipe, dataset)
            except MeshparError as error:
                yield f"data.{name}.class", str(error)
    if recipe.data.source == "dataset":
        return
    tokens, tokenizers, all_read = 0, dict[str, tuple[int, int]](), True
    parts = datasets.parts_of(recipe.data)
    for number, (name, section) in enumerate(parts.items()):
        at = f"data.mix.{number}" if recipe.data.mix else "data"
        for path in (*section.paths, *section.validation_paths) if section.source != "stdlib" else ():
            trained = path in section.paths
            try:
                count = _look_at(recipe, section, path)[0]
                tokens += count if trained else 0
                if recipe.data.mix and name not in tokenizers:
                    file = TokenFile.open(expanded(Path(path))) if section.source == "tokens" else None
                    tokenizer = file or datasets.named_tokenizer(recipe.data)
                    if tokenizer is not None:
                        tokenizers[name] = tokenizer.vocab_size, tokenizer.eos_id
            except (RecipeError, OSError) as error:
                tokens, all_read = sys.maxsize, False
                text = str(error) if isinstance(error, RecipeError) else f"{path} cannot be read: {brief(error)}"
                yield f"{at}.{'paths' if trained else 'validation_paths'}", text
    if problem := tokenizers_problem(tokenizers):
        yield "data.mix", problem
    if all_read and (short := _short_vocabulary(recipe, whole=True)):
        yield "data.vocab_size", short
    if all(part.source != "stdlib" for part in parts.values()) and datasets.examples_of(recipe) == "tokens":
        samples = max(0, tokens - 1) // recipe.data.sequence_length + 1
        if few := datasets.filling_problem(recipe, samples):
            yield "data.micro_batch", few


def _look_at(recipe: Recipe, section: DataSection, path: str) -> tuple[int, tuple[str, ...]]:
    """Read the beginning of a file: return how many tokens it has at most, and notes; raises RecipeError."""
    if section.source == "tokens":
        file = TokenFile.open(expanded(Path(path)))
        file.check_ids(file.ids()[:_TOKENS_READ])
        return file.tokens, ()
    tokenizer = datasets.named_tokenizer(recipe.data) if section.source == "chat" else None
    text = datasets.source_of(recipe, section, (path,), tokenizer)
    if isinstance(text, ChatSource):
        datasets.check_template(recipe, text.template, tokenizer)
    read: Iterator[Any] = text.pieces(_PIECE) if isinstance(text, TextSource) else text.documents()
    deque(islice(read, _PIECES_READ), maxlen=0)
    files = text.files()
    plain = all(kind_of(file) not in UNPLAIN and file.suffix not in PACKED for file in files)
    # a byte is at least one token, with an end a document
    size = sum(file.stat().st_size + 1 for file in files) if plain and section.source != "chat" else sys.maxsize
    return size, tuple(text.reading.notes())


def _short_vocabulary(recipe: Recipe, *, whole: bool) -> str:
    """Return why a BPE of a text, ``whole`` or its beginning, has too few ids; else nothing."""
    texts = [part for part in datasets.parts_of(recipe.data).values() if part.source != "tokens"]
    if recipe.data.tokenizer != "bpe" or not texts:
        return ""
    template, rest, read = datasets.named_template(texts), _TRIED, list[str]()
    sources = (datasets.source_of(recipe, source, datasets.inputs_of(source)) for source in texts)
    pieces = chain.from_iterable(map(training_texts, sources))
    while rest > 0 and (text := next(pieces, None)) is not None:
        read.append(text[:rest])
        rest -= len(text)
    if whole != (rest > 0):
        return ""
    try:
        train_bpe(read, recipe.data.vocab_size, () if template is None else template.special)
    except RecipeError as error:
        return str(error)
    return ""
