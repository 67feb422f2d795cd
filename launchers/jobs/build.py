"""The parts of a job, made from a recipe."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshpar.checkpoints.storage.place import place
from meshpar.core import registry, runtime
from meshpar.core.errors import CheckpointError, LayoutError, MeshparError, PlanError, RecipeError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, default_device_type, is_auto
from meshpar.core.passes import Role, axes_of
from meshpar.core.patterns import find_modules, suggestion
from meshpar.core.registry import layout_for
from meshpar.launchers.jobs.data_checks import data_problems
from meshpar.launchers.jobs.datasets import examples_of, separates, vocab_size_of, with_local_data
from meshpar.launchers.jobs.elastic import replica_problems
from meshpar.launchers.jobs.models import HEAD_OF, DataFacts, build_transformers, refuse_endless, weights_problems
from meshpar.launchers.recipes.conflicts import folder_problems
from meshpar.launchers.recipes.named import UntrustedError, has_keyword, make_objective, make_own, make_passes
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.schema import build
from meshpar.launchers.recipes.sections import (
    Model,
    OptimizerSection,
    Own,
    OwnOptimizer,
    model_config,
    rounded_vocabulary,
)
from meshpar.models import GPT2, Transformer
from meshpar.models.gpt2 import GPT2Config
from meshpar.parallelized import Parallelized
from meshpar.plan import Plan, lost_replica_problems
from meshpar.process.homes import expanded
from meshpar.state.averaging import Averaged
from meshpar.training.documents import takes_positions, untaken
from meshpar.training.elementwise import check_elementwise
from meshpar.training.evaluation import Evaluation, Harness, MultipleChoice, Samples
from meshpar.training.experts import balance_problems
from meshpar.training.generating import check_whole
from meshpar.training.lora import add_adapters
from meshpar.training.objectives import Objective, freeze, teacher_problems
from meshpar.training.optimizer import AdamWSettings, Schedule, build_adamw, parameter_groups, scale_rates, scaled_rate
from meshpar.training.profile import LEAST as PROFILED
from meshpar.training.settings import TrainSettings
from meshpar.training.tracking import usable
from meshpar.trials.separable import check_separable


def device_type(recipe: Recipe) -> str:
    """Return the device type that a recipe trains on."""
    return default_device_type() if recipe.device == "auto" else recipe.device


def plan_of(recipe: Recipe) -> Plan:
    """Return the plan."""
    return Plan(recipe.mesh, make_passes(recipe.passes, recipe.find))


def world_size_of(recipe: Recipe) -> int:
    """Return how many ranks a recipe wants on this machine where nobody says: its mesh's, or an accelerator each."""
    devices = 1 if runtime.on_host(device_type(recipe)) else torch.accelerator.device_count()
    if is_auto(recipe.mesh):
        return devices
    sizes = MeshSpec(recipe.mesh).axes.values()
    known = math.prod(size for size in sizes if size != -1)
    return known * max(1, devices // known) if -1 in sizes else known


def build_shape(recipe: Recipe) -> nn.Module:
    """Return the model on the meta device; the data is looked at only where the model takes its vocabulary from it."""
    return build_model(recipe, _vocabulary_for(recipe, recipe.model))


def teacher_shape(recipe: Recipe) -> nn.Module:
    """Return the frozen teacher as :func:`build_shape` returns the model."""
    assert recipe.teacher is not None
    return build_teacher(recipe, _vocabulary_for(recipe, recipe.teacher.model))


def _vocabulary_for(recipe: Recipe, section: Any) -> int:  # noqa: ANN401 - one of the sections of models
    """Return the data's vocabulary if a model's section takes it from there, else 0, which fits every model."""
    if isinstance(section, Own):
        factory = recipe.find(registry.MODEL, section.class_)
        wants = "vocab_size" not in section.keywords and has_keyword(factory, "vocab_size")
    else:
        wants = section.kind == "transformer" and section.preset is None and section.vocab_size is None
    return vocab_size_of(recipe) if wants else 0


def build_model(recipe: Recipe, vocab_size: int, facts: DataFacts | None = None) -> nn.Module:
    """Return the model on the meta device; raises RecipeError if the data needs more tokens or positions."""
    model = _model(recipe, recipe.model, vocab_size, facts or DataFacts())
    if recipe.dtype != "float32":
        kept = {
            id(parameter)
            for pattern in layout_for(model).fp32
            for _, child in find_modules(model, pattern)
            for parameter in child.parameters()
        }
        for parameter in model.parameters():  # not module.to(), which also rounds buffers, such as RoPE's frequencies
            if id(parameter) not in kept:
                parameter.data = parameter.data.to(getattr(torch, recipe.dtype))
    return model


def layout_of(recipe: Recipe, model: nn.Module) -> ModelLayout | None:
    """Put the recipe's adapters into ``model`` and return its layout; None: the model's own."""
    settings = recipe.adapters()
    return None if settings is None else add_adapters(model, settings)


def build_teacher(recipe: Recipe, vocab_size: int, facts: DataFacts | None = None) -> nn.Module:
    """Return the frozen teacher on the meta device."""
    assert recipe.teacher is not None
    return freeze(_model(recipe, recipe.teacher.model, vocab_size, facts or DataFacts()), recipe.teacher.dtype)


def _model(recipe: Recipe, section: Model, vocab_size: int, facts: DataFacts) -> nn.Module:
    if section.kind == "huggingface":
        refuse_endless(section.config)
        examples = examples_of(recipe)
        head, trust = section.head or HEAD_OF[examples], recipe.classes.trusted
        model = build_transformers(section.config, head, facts, trust=trust)
        config: Any = model.config
        text = config.get_text_config()
        _check_room(recipe, vocab_size, text.vocab_size, getattr(text, "max_position_embeddings", None))
        return model
    if isinstance(section, Own):
        return _own_model(recipe.find(registry.MODEL, section.class_), section.keywords, vocab_size)
    if examples_of(recipe) != "tokens":
        raise RecipeError(
            f"model: {section.kind} predicts the next token; for the objective {recipe.training.objective} write "
            "kind: huggingface"
        )
    shape = model_config(section, vocab_size)
    refuse_endless(dataclasses.asdict(shape))
    positions = shape.n_positions if isinstance(shape, GPT2Config) else shape.max_positions
    _check_room(recipe, vocab_size, shape.vocab_size, positions)
    with torch.device("meta"):
        return GPT2(shape) if isinstance(shape, GPT2Config) else Transformer(shape)


def _own_model(kind: type, keywords: Mapping[str, Any], vocab_size: int) -> nn.Module:
    """Return a model of the user's own class; an unwritten ``vocab_size`` is the data's, rounded up."""
    takes = "vocab_size" not in keywords and has_keyword(kind, "vocab_size")
    with torch.device("meta"):
        model: nn.Module = make_own(kind, keywords, **({"vocab_size": rounded_vocabulary(vocab_size)} if takes else {}))
    return model


def schedule_of(recipe: Recipe, data_size: int) -> Schedule:
    """Return the learning rate over the run of ``data_size`` data ranks."""
    lr = scaled_rate(recipe.optimizer.lr, recipe.optimizer.scale_lr, data_size)
    return build(Schedule, recipe.schedule, lr=lr)


def settings_of(recipe: Recipe) -> TrainSettings:
    """Return how long to train, and what to do how often."""
    bounds = recipe.validation.model_dump(exclude={"weights"})
    return build(TrainSettings, recipe.training, checkpoint_every=recipe.checkpoint.every, seed=recipe.seed, **bounds)


def optimizer_of(recipe: Recipe) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return what makes the optimizer of a module, with its rates; it can be sent to another process."""
    section = recipe.optimizer
    kind = recipe.find(registry.OPTIMIZER, section.class_) if isinstance(section, OwnOptimizer) else None
    return functools.partial(_optimizer, section, kind)


def _optimizer(
    section: OptimizerSection | OwnOptimizer, kind: type[torch.optim.Optimizer] | None, module: nn.Module
) -> torch.optim.Optimizer:
    if isinstance(section, OwnOptimizer):
        assert kind is not None
        made = own_optimizer(kind, {**section.keywords, "lr": section.lr}, module)
    else:
        made = build_adamw(module, build(AdamWSettings, section))
    if section.rates or section.layer_decay is not None:
        scale_rates(made, module, section.rates, layer_decay=section.layer_decay)
    return made


def own_optimizer(
    kind: type[torch.optim.Optimizer], keywords: Mapping[str, Any], module: nn.Module
) -> torch.optim.Optimizer:
    """Return a class's optimizer; vectors do not decay. Classes of :mod:`meshpar.optim` sort parameters themselves."""
    whole = getattr(kind, "takes_module", False)
    given = module if whole else parameter_groups(module, keywords.get("weight_decay"))
    made: torch.optim.Optimizer = make_own(kind, keywords, given)
    return made


def objective_of(recipe: Recipe, teacher: nn.Module | None = None) -> Objective:
    """Return the objective, found by entry point."""
    factory = recipe.find(registry.OBJECTIVE, recipe.training.objective)
    return make_objective(factory, recipe.training.objective_options, teacher)


def teacher_plan_of(recipe: Recipe) -> Plan:
    """Return the teacher's plan."""
    assert recipe.teacher is not None
    return Plan(recipe.teacher.mesh, make_passes(recipe.teacher.passes, recipe.find))


def averages_of(recipe: Recipe, par: Parallelized) -> dict[str, Averaged]:
    """Return the averages of the weights, by name."""
    return {name: par.averaged(**dict(section)) for name, section in recipe.averages.items()}


def evaluations_of(recipe: Recipe, par: Parallelized, tokenizer: object) -> dict[str, Evaluation]:
    """Return the evaluations, by name; raises MeshparError where one cannot be made, or does not fit the mesh."""
    if recipe.evaluations and tokenizer is None:
        raise RecipeError(f"{recipe.where('evaluations')}: the run has no tokenizer; name one with data.tokenizer")
    made = {
        name: usable(recipe.find(registry.EVALUATION, name))(tokenizer, **options)
        for name, options in recipe.evaluations.items()
    }
    if any(isinstance(evaluation, MultipleChoice | Samples | Harness) for evaluation in made.values()):
        check_whole(par)
    return made


def wants_scaler(recipe: Recipe) -> bool:
    """Return whether the loss is to be scaled: as the recipe says, else where a pass computes in float16."""
    if recipe.training.loss_scaling is not None:
        return recipe.training.loss_scaling
    return any(options.get("param_dtype") == "float16" for written in recipe.passes for options in written.values())


def check_job(recipe: Recipe, world_size: int, *, replica: bool = False) -> list[str]:
    """Return every problem that shows before a rank is started: of the plan on the model, and of the data's files. What
    needs a class that may not be imported (:attr:`Classes.unseen`) is left out.

    Args:
        recipe: the job's.
        world_size: number of its ranks.
        replica: the job is one of several replicas (``--elastic=replicas``).
    """
    try:
        recipe = with_local_data(recipe)
    except (CheckpointError, RecipeError) as error:
        return [f"{recipe.where('data.paths')}: {error}"]
    unseen = {place[0] for place in recipe.classes.unseen}
    read = not unseen & {"data", "training"}
    texts, found = list(data_problems(recipe)) if read else [], list[_Problem]()
    vocab_size = 1  # which fits every model
    try:
        if recipe.data.dataset is None and read:
            vocab_size = vocab_size_of(recipe)
        elif read and "model" not in unseen:
            vocab_size = _vocabulary_for(recipe, recipe.model) or 1
    except RecipeError as error:
        field = {"tokens": "data.paths", "dataset": "data.dataset"}.get(recipe.data.source, "data.tokenizer")
        found += [] if any(text.endswith(str(error)) for text in texts) else [(field, str(error))]
    found += [*_unwritable(recipe), *_unmeasured(recipe), *_plugin_problems(recipe)]
    texts += replica_problems(recipe) if replica else ()
    if read and not unseen & {"model", "passes"}:
        found += _plan_problems(recipe, vocab_size, world_size, unseen, replica=replica)
    found += _objective_problems(recipe) if "training" not in unseen else ()
    return [*texts, *(f"{recipe.where(field)}: {text}" for field, text in found)]


_Problem = tuple[str, str]
"""A field of a recipe, and what is wrong with it."""


def _plan_problems(
    recipe: Recipe, vocab_size: int, world_size: int, unseen: Collection[object], *, replica: bool
) -> Iterator[_Problem]:
    """Yield the problems of the plan on the model, and of the teacher's and the optimizer; ``unseen`` are headings with
    a class that may not be imported.
    """
    try:
        model, plan, training = build_model(recipe, vocab_size), plan_of(recipe), recipe.training
        layout = layout_of(recipe, model)
        known = layout or layout_for(model)
        weights = weights_problems(model, known, recipe.model, adapters=recipe.lora is not None)
        yield from (("model.weights", text) for text in weights)
        spec = plan.check(model, layout, world_size=world_size)
        yield from (("mesh", text) for text in (lost_replica_problems(plan.passes, spec, model) if replica else ()))
        balance = balance_problems(model, known, training.balance_rate, training.balance_loss)
        yield from (("training", text) for text in balance)
        if separates(recipe) and not takes_positions(model):
            yield "data.documents", untaken(model)
        yield from _uneven(recipe, plan, world_size)
        if "optimizer" not in unseen:
            yield from _optimizer_problems(
                recipe,
                model,
                shards=spec.size > 1 and any(pass_.shards(model, known) for pass_ in plan.passes),
                stages=any(spec.axes[axis] > 1 for axis in axes_of(plan.passes, spec, Role.LAYERS)),
            )
        if recipe.teacher is None or "teacher" in unseen:
            return
        missing = [text.partition(": ") for text in folder_problems(recipe.teacher.model)]
        for field, _, text in missing:
            yield f"teacher.model.{field}", f"{text}; train and export the teacher first"
        if not missing:
            teacher = build_teacher(recipe, vocab_size)
            problems = teacher_problems(teacher_plan_of(recipe), teacher, plan_of(recipe), world_size)
            yield from (("teacher", text) for text in problems)
            weights = weights_problems(teacher, layout_for(teacher), recipe.teacher.model)
            yield from (("teacher.model.weights", text) for text in weights)
    except PlanError as error:
        yield from (("mesh", text) for text in error.problems)
    except (RecipeError, LayoutError) as error:
        yield "model.class" if isinstance(recipe.model, Own) else "model", str(error)


def _plugin_problems(recipe: Recipe) -> Iterator[_Problem]:
    named = [("trackers", registry.TRACKER, name) for name in recipe.trackers]
    for heading, kind, name in (*named, *(("evaluations", registry.EVALUATION, name) for name in recipe.evaluations)):
        try:
            usable(recipe.find(kind, name))
        except UntrustedError:
            continue
        except MeshparError as error:
            yield heading, str(error)
    if not all(recipe.evaluations.get("samples", {}).get("prompts", ())):
        yield "evaluations.samples.prompts", "a prompt is empty, and has no token; give each prompt a text"


def _uneven(recipe: Recipe, plan: Plan, world_size: int) -> Iterator[_Problem]:
    """Yield that the ranks which split positions do not divide a sequence."""
    mesh, length = plan.resolve(world_size), recipe.data.sequence_length
    axes = axes_of(plan.passes, mesh, Role.POSITIONS)
    size = math.prod(mesh.axes[axis] for axis in axes)
    if length % size:
        how = f"use a data.sequence_length that is a multiple of {size}"
        yield "mesh", f"{', '.join(axes)}={size} does not divide {length} positions; {how}"


def _objective_problems(recipe: Recipe) -> Iterator[_Problem]:
    name, known = recipe.training.objective, registry.names(registry.OBJECTIVES)
    if "." not in name and name not in known:
        yield "training.objective", f"no objective {name!r} is installed; {suggestion(name, known)}"
    elif recipe.teacher is None:
        try:
            objective_of(recipe)
        except MeshparError as error:
            yield "training.objective", str(error)


def _optimizer_problems(recipe: Recipe, model: nn.Module, *, shards: bool, stages: bool) -> Iterator[_Problem]:
    """Yield what is wrong with an optimizer's options, and what one of the user's lacks for a plan that shards
    parameters, or has them on ``stages``.
    """
    section = recipe.optimizer
    try:
        optimizer = optimizer_of(recipe)(model)
        known = getattr(type(optimizer), "takes_module", False) or isinstance(optimizer, torch.optim.Adafactor)
        if isinstance(section, OwnOptimizer) and shards and not known:
            kind = recipe.find(registry.OPTIMIZER, section.class_)
            check_elementwise(functools.partial(own_optimizer, kind, {**section.keywords, "lr": section.lr}))
        if stages:
            check_separable(optimizer)
    except MeshparError as error:
        yield "optimizer.class" if isinstance(section, OwnOptimizer) else "optimizer", str(error)


def _unwritable(recipe: Recipe) -> Iterator[_Problem]:
    """Yield the folders that a run writes to and cannot."""
    for field, text in (("output", recipe.output), ("data.cache", recipe.data.cache)):
        try:
            there = expanded(place(text))
            if there.mounted:
                problem = _unwritable_folder(Path(str(there)))
            elif field == "data.cache":
                problem = f"{there} is a URL; expected a folder on this machine, where copies of the data are kept"
            else:
                next(there.iterdir(), None)  # the store answers, and knows us
                problem = None
        except MeshparError as error:
            problem = str(error)
        if problem is not None:
            yield field, problem


def _unwritable_folder(folder: Path) -> str | None:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        return f"{there} is a file; expected a folder, or a path where one can be made"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} is not writable; correct its mode, or choose another folder"
    return None


def _unmeasured(recipe: Recipe) -> Iterator[_Problem]:
    """Yield settings that name a missing checkpoint, metric or profile window; not on resume."""
    resume = recipe.checkpoint.resume
    if resume not in ("auto", "never") and not expanded(place(resume)).exists():
        yield "checkpoint.resume", f"there is no {resume}; expected auto, never, or the folder of a step or of a run"
    best, data, steps = (recipe.checkpoint.best or "").removeprefix("+"), recipe.data, recipe.training.steps
    if best.startswith("val/") and not data.validates:
        how = "set data.validation_fraction or data.validation_paths"
        yield "checkpoint.best", f"no validation measures {best}; {how}"
    if recipe.profile and steps is not None and steps < PROFILED:
        how = "raise it, or set profile: off"
        yield "profile", f"a profile requires {PROFILED} steps, and training.steps is {steps}; {how}"


def machine_problems(recipe: Recipe, ranks: int) -> list[str]:
    """Return what this machine lacks to run ``ranks`` ranks of a recipe."""
    kind, here = device_type(recipe), default_device_type()
    problems = plan_of(recipe).machine_problems(kind)
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


def _check_room(recipe: Recipe, vocab_size: int, model_vocab: int, positions: int | None) -> None:
    if vocab_size > model_vocab:
        raise RecipeError(
            f"the data has {vocab_size} different tokens and the model's vocab_size is {model_vocab}; raise it"
        )
    length = recipe.data.sequence_length
    if positions is not None and length > positions:
        raise RecipeError(
            f"data.sequence_length is {length} and the model has {positions} positions; lower it, or raise the number "
            "of positions"
        )
