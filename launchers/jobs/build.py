"""The parts of a job, made from a recipe, and the forecast of a job."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshpar.core import registry, runtime
from meshpar.core.errors import LaunchError, MeshError, RecipeError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, default_device_type, is_auto
from meshpar.core.patterns import find_modules
from meshpar.forecasting.api import forecast
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.report import Forecast
from meshpar.forecasting.step import Batch, ObjectiveLoss
from meshpar.launchers.jobs import datasets
from meshpar.launchers.jobs.models import HEAD_OF, DataFacts, build_transformers, refuse_endless
from meshpar.launchers.recipes import sections
from meshpar.launchers.recipes.loading import folder_problems
from meshpar.launchers.recipes.recipe import Recipe, has_keyword, make_own, make_passes, wants_teacher
from meshpar.launchers.recipes.schema import build
from meshpar.launchers.recipes.sections import Model, OptimizerSection, Own, OwnOptimizer
from meshpar.models import GPT2, Transformer
from meshpar.models.gpt2 import GPT2Config
from meshpar.optim.matrices import parameter_groups
from meshpar.parallelized import Parallelized
from meshpar.plan import Plan
from meshpar.state.averaging import Averaged
from meshpar.training.adamw_and_schedules import AdamWSettings, Schedule, build_adamw, scale_rates, scaled_rate
from meshpar.training.evaluation import Evaluation, Harness, MultipleChoice, Samples, check_whole
from meshpar.training.lora import add_adapters
from meshpar.training.objectives import Objective, freeze
from meshpar.training.send_to_trackers import usable
from meshpar.training.settings import TrainSettings


def device_type(recipe: Recipe) -> str:
    return default_device_type() if recipe.device == "auto" else recipe.device


def plan_of(recipe: Recipe) -> Plan:
    passes = make_passes(recipe.passes, recipe.find)
    return Plan(recipe.mesh, passes, guards=recipe.guards, same_bits=recipe.same_bits)


def world_size_of(recipe: Recipe) -> int:
    """Return the default number of ranks on this machine: the mesh's, or one per accelerator."""
    devices = 1 if runtime.on_host(device_type(recipe)) else torch.accelerator.device_count()
    if is_auto(recipe.mesh):
        return devices
    sizes = MeshSpec(recipe.mesh).axes.values()
    ranks = math.prod(size for size in sizes if size != -1)
    return ranks * max(1, devices // ranks) if -1 in sizes else ranks


def build_shape(recipe: Recipe) -> nn.Module:
    """Return the model on the meta device; the data is looked at only where the model takes its vocabulary from it."""
    return build_model(recipe, vocabulary_for(recipe, recipe.model))


def teacher_shape(recipe: Recipe) -> nn.Module:
    assert recipe.teacher is not None
    return build_teacher(recipe, vocabulary_for(recipe, recipe.teacher.model))


def vocabulary_for(recipe: Recipe, section: Any) -> int:  # noqa: ANN401 - one of the sections of models
    """Return the data's vocabulary if a model's section takes it from there, else 0, which fits every model."""
    if isinstance(section, Own):
        factory = recipe.find(registry.MODEL, section.class_)
        wants = "vocab_size" not in section.keywords and has_keyword(factory, "vocab_size")
    else:
        wants = section.kind == "transformer" and section.preset is None and section.vocab_size is None
    return datasets.vocab_size_of(recipe) if wants else 0


def build_model(recipe: Recipe, vocab_size: int, facts: DataFacts | None = None) -> nn.Module:
    """Return the model on the meta device; raises RecipeError if the data needs more tokens or positions."""
    model = _model(recipe, recipe.model, vocab_size, facts or DataFacts())
    if recipe.dtype != "float32":
        exact = (child for name in registry.layout_for(model).fp32 for _, child in find_modules(model, name))
        fp32 = {id(parameter) for child in exact for parameter in child.parameters()}
        for parameter in model.parameters():  # not module.to(), which also rounds buffers, such as RoPE's frequencies
            if id(parameter) not in fp32:
                parameter.data = parameter.data.to(getattr(torch, recipe.dtype))
    return model


def layout_of(recipe: Recipe, model: nn.Module) -> ModelLayout | None:
    """Put the recipe's adapters into ``model`` and return its layout; None: the model's own."""
    settings = recipe.adapters()
    return None if settings is None else add_adapters(model, settings)


def build_teacher(recipe: Recipe, vocab_size: int, facts: DataFacts | None = None) -> nn.Module:
    assert recipe.teacher is not None
    return freeze(_model(recipe, recipe.teacher.model, vocab_size, facts or DataFacts()), recipe.teacher.dtype)


def _model(recipe: Recipe, section: Model, vocab_size: int, facts: DataFacts) -> nn.Module:
    model: nn.Module
    if section.kind == "huggingface":
        refuse_endless(section.config)
        examples = datasets.examples_of(recipe)
        head, trust = section.head or HEAD_OF[examples], recipe.classes.trusted
        model = build_transformers(section.config, head, facts, trust=trust)
        config: Any = model.config
        text = config.get_text_config()
        _check_room(recipe, vocab_size, text.vocab_size, getattr(text, "max_position_embeddings", None))
        return model
    if isinstance(section, Own):
        kind, keywords = recipe.find(registry.MODEL, section.class_), section.keywords
        takes = "vocab_size" not in keywords and has_keyword(kind, "vocab_size")
        size = {"vocab_size": sections.rounded_vocabulary(vocab_size)} if takes else {}
        with torch.device("meta"):
            model = make_own(kind, keywords, **size)
        return model
    if datasets.examples_of(recipe) != "tokens":
        raise RecipeError(
            f"model: {section.kind} predicts the next token; for the objective {recipe.training.objective} write "
            "kind: huggingface"
        )
    shape = sections.model_config(section, vocab_size)
    refuse_endless(dataclasses.asdict(shape))
    positions = shape.n_positions if isinstance(shape, GPT2Config) else shape.max_positions
    _check_room(recipe, vocab_size, shape.vocab_size, positions)
    with torch.device("meta"):
        return GPT2(shape) if isinstance(shape, GPT2Config) else Transformer(shape)


def schedule_of(recipe: Recipe, data_size: int) -> Schedule:
    lr = scaled_rate(recipe.optimizer.lr, recipe.optimizer.scale_lr, data_size)
    return build(Schedule, recipe.schedule, lr=lr)


def settings_of(recipe: Recipe) -> TrainSettings:
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
        optimizer = own_optimizer(kind, {**section.keywords, "lr": section.lr}, module)
    else:
        optimizer = build_adamw(module, build(AdamWSettings, section))
    if section.rates or section.layer_decay is not None:
        scale_rates(optimizer, module, section.rates, layer_decay=section.layer_decay)
    return optimizer


def own_optimizer(
    kind: type[torch.optim.Optimizer], keywords: Mapping[str, Any], module: nn.Module
) -> torch.optim.Optimizer:
    """Return a class's optimizer; vectors do not decay. Classes of :mod:`meshpar.optim` sort parameters themselves."""
    sorts = getattr(kind, "takes_module", False)
    groups = module if sorts else parameter_groups(module, keywords.get("weight_decay"))
    optimizer: torch.optim.Optimizer = make_own(kind, keywords, groups)
    return optimizer


def make_objective(factory: Any, options: Mapping[str, Any], teacher: nn.Module | None = None) -> Objective:  # noqa: ANN401
    """Return the objective of a plugin or a class; raises MeshparError where it refuses its options."""
    objective: Objective = make_own(factory, options, **({"teacher": teacher} if wants_teacher(factory) else {}))
    return objective


def objective_of(recipe: Recipe, teacher: nn.Module | None = None) -> Objective:
    factory = recipe.find(registry.OBJECTIVE, recipe.training.objective)
    return make_objective(factory, recipe.training.objective_options, teacher)


def teacher_plan_of(recipe: Recipe) -> Plan:
    assert recipe.teacher is not None
    return Plan(recipe.teacher.mesh, make_passes(recipe.teacher.passes, recipe.find), guards=recipe.guards)


def averages_of(recipe: Recipe, par: Parallelized) -> dict[str, Averaged]:
    return {name: par.averaged(**dict(section)) for name, section in recipe.averages.items()}


def evaluations_of(recipe: Recipe, par: Parallelized, tokenizer: object) -> dict[str, Evaluation]:
    """Return the evaluations, by name; raises MeshparError where one cannot be made, or does not fit the mesh."""
    if recipe.evaluations and tokenizer is None:
        raise RecipeError(f"{recipe.where('evaluations')}: the run has no tokenizer; name one with data.tokenizer")
    evaluations = {
        name: usable(recipe.find(registry.EVALUATION, name))(tokenizer, **options)
        for name, options in recipe.evaluations.items()
    }
    if any(isinstance(evaluation, MultipleChoice | Samples | Harness) for evaluation in evaluations.values()):
        check_whole(par)
    return evaluations


def wants_scaler(recipe: Recipe) -> bool:
    """Return whether the loss is to be scaled: as the recipe says, else where a pass computes in float16."""
    if recipe.training.loss_scaling is not None:
        return recipe.training.loss_scaling
    return any(options.get("param_dtype") == "float16" for written in recipe.passes for options in written.values())


def _check_room(recipe: Recipe, vocab_size: int, model_vocab: int, positions: int | None) -> None:
    if vocab_size > model_vocab:
        text = f"the data has {vocab_size} different tokens and the model's vocab_size is {model_vocab}; raise it"
        raise RecipeError(text)
    length = recipe.data.sequence_length
    if positions is not None and length > positions:
        raise RecipeError(
            f"data.sequence_length is {length} and the model has {positions} positions; lower it, or raise the number "
            "of positions"
        )


def deal(recipe: Recipe, mesh: MeshSpec) -> Recipe:
    """Return a recipe whose numbers of micro-batches are of one data rank, where ``same_bits`` counts all ranks'."""
    if not recipe.same_bits:
        return recipe
    if problems := list(dealing_problems(recipe, mesh)):
        raise RecipeError("; ".join(f"{recipe.where(field)}: {text}" for field, text in problems))
    ranks, steps = _data_ranks(mesh), recipe.training.validate_steps
    data = recipe.data.model_copy(update={"accumulate": recipe.data.accumulate // ranks})
    training = recipe.training.model_copy(update={"validate_steps": steps and steps // ranks})
    return recipe.model_copy(update={"data": data, "training": training})


def dealing_problems(recipe: Recipe, mesh: MeshSpec) -> Iterator[tuple[str, str]]:
    """Yield fields and texts: which micro-batches cannot be dealt to the data ranks under ``same_bits``."""
    ranks, data, training = _data_ranks(mesh), recipe.data, recipe.training
    counts = {"data.accumulate": data.accumulate, "training.validate_steps": training.validate_steps or 0}
    for field, count in counts.items() if recipe.same_bits else ():
        if count % ranks:
            yield (
                field,
                f"same_bits deals {count} micro-batches to {ranks} data ranks, which do not divide them; use "
                f"{field}={ranks * -(-count // ranks)}",
            )


def _data_ranks(mesh: MeshSpec) -> int:
    return math.prod(mesh.axes.get(axis, 1) for axis in ("dp_replicate", "dp_shard"))


def batch_of(recipe: Recipe, plan: Plan, ranks: int) -> Batch:
    """Return what a data rank of ``plan`` on so many ranks trains on in a step, with samples of full length."""
    data = (deal(recipe, plan.resolve(ranks)) if recipe.same_bits else recipe).data
    return Batch(
        sequence=datasets.sequence_of(recipe),
        micro_batch=data.micro_batch,
        accumulate=data.accumulate,
        examples=datasets.examples_of(recipe),
        target=data.target_length,
        reduce_each=recipe.training.reduce_each,
        documents=datasets.several_documents(recipe),
    )


def forecast_job(
    recipe: Recipe, hardware: Hardware | str, ranks: int, *, plan: Plan | None = None, **options: Any
) -> Forecast:
    """Forecast a recipe's step, or that of another ``plan``; ``options`` are those of :func:`meshpar.forecast`."""
    model = build_shape(recipe)
    layout = layout_of(recipe, model)
    teacher: tuple[Plan, nn.Module] | None = None
    if recipe.teacher is not None:
        if missing := list(folder_problems(recipe.teacher.model)):
            raise RecipeError(f"teacher.model.{missing[0]}; train and export the teacher first")
        teacher = teacher_plan_of(recipe), teacher_shape(recipe)
    return forecast(
        plan or plan_of(recipe),
        model,
        batch_of(recipe, plan or plan_of(recipe), ranks),
        hardware=hardware,
        world_size=ranks,
        layout=layout,
        loss=ObjectiveLoss(objective_of(recipe, None if teacher is None else teacher[1])),
        teacher=teacher,
        optimizer=optimizer_of(recipe) if isinstance(recipe.optimizer, Own) else None,
        **options,
    )


def fit_recipe(recipe: Recipe, world_size: int, whole: int) -> Recipe:
    """Return an elastic job's recipe on what is left of ``whole`` ranks (0: all), with the nearest global batch."""
    if whole in (0, world_size):
        return recipe
    before, now = _fit_mesh(recipe.mesh, whole, world_size)
    old = recipe.data
    # same_bits counts the micro-batches of all data ranks
    ranks_before, ranks_now = (1, 1) if recipe.same_bits else (_data_ranks(before), _data_ranks(now))
    batch = old.micro_batch * old.accumulate * ranks_before
    samples = max(1, round(batch / ranks_now))  # of a data rank, in micro-batches that are none larger
    micro_batch = max(size for size in range(1, old.micro_batch + 1) if samples % size == 0)
    data = old.model_copy(update={"micro_batch": micro_batch, "accumulate": samples // micro_batch})
    fitted = samples * ranks_now
    changed = f"{fitted} in all instead of {batch}, which {ranks_now} ranks do not divide"
    batch_text = f"{batch} in all as before" if fitted == batch else changed
    note = (
        f"{world_size} of {whole} ranks are left: mesh {now}, a step of {data.accumulate} x {micro_batch} a data rank "
        f"instead of {old.accumulate} x {old.micro_batch}: {batch_text}"
    )
    teacher = recipe.teacher
    if teacher is not None:
        teacher = teacher.model_copy(update={"mesh": str(_fit_mesh(teacher.mesh, whole, world_size)[1])})
    return recipe.model_copy(update={"mesh": str(now), "data": data, "teacher": teacher}).noting([*recipe.notes, note])


def _fit_mesh(text: str, whole: int, left: int) -> tuple[MeshSpec, MeshSpec]:
    """Return the mesh of ``text`` on all ranks of the job, and on the remaining ranks."""
    spec = MeshSpec.placed(text, whole, runtime.ranks_per_node() or left)
    try:
        return spec, spec.shrunk(left)
    except MeshError as error:
        raise LaunchError(f"{left} of the job's {whole} ranks are left: {error}") from error
