"""Run a training job on one rank: build everything from a recipe, train, save."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from meshpar.checkpoints import CheckpointManager, open_step, read_manifest
from meshpar.checkpoints.export.published import published_model
from meshpar.checkpoints.format.manifest import step_name, step_of
from meshpar.checkpoints.steps.commit import warn_only
from meshpar.checkpoints.steps.state import Checkpointable as Saved
from meshpar.checkpoints.steps.steps import CHECKPOINTS, checkpoints_in
from meshpar.checkpoints.storage.place import Place, place
from meshpar.checkpoints.storage.transfer import carried, fetched
from meshpar.core import registry, runtime
from meshpar.core.errors import CheckpointError, MeshparError, RecipeError, StoreError
from meshpar.launchers.agent.failures import failed_at, last_failed_at, made_step, watched
from meshpar.launchers.agent.terms import task
from meshpar.launchers.jobs import build, datasets
from meshpar.launchers.jobs.elastic import Elected
from meshpar.launchers.jobs.forecasting import forecast_feedback
from meshpar.launchers.jobs.models import with_weights
from meshpar.launchers.jobs.preflight import opened, patience_s
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.parallelized import Parallelized
from meshpar.passes.elsewhere import all_parameters
from meshpar.passes.pipeline.running import Layers
from meshpar.process.homes import expanded
from meshpar.process.leftovers import write_durably
from meshpar.state.averaging import Averaged
from meshpar.training import elastic_job
from meshpar.training.console import Console
from meshpar.training.data import Batches
from meshpar.training.elastic import Replicas
from meshpar.training.elementwise import HasModes
from meshpar.training.loop import Trainer
from meshpar.training.lora import Adapters
from meshpar.training.metrics import Reporter, flops_per_token
from meshpar.training.optimizer import LossScaler
from meshpar.training.profile import LEAST as PROFILED
from meshpar.training.settings import Outcome
from meshpar.training.stop import StopRequest
from meshpar.training.tracking import METRICS, SENT, Trackers, facts_of

log = logging.getLogger(__name__)

TOKENIZER, RECIPE, TENSORBOARD = "tokenizer", "recipe.yaml", "tensorboard"
"""Names of files and folders in a run's folder."""
PROFILE = "profile"
"""The folder of a profile in a run's folder, with ``profile: true``."""


def run_job(recipe: Recipe) -> Outcome:
    """Train a recipe. Every rank of the job calls it, or one process alone."""
    kind = build.device_type(recipe)
    # Before the process group opens: one rank prepares, the others wait for its lock, without a time-out.
    given, recipe = recipe, build.with_local_data(recipe)
    data = datasets.prepare_data(recipe)
    with opened(recipe, data, kind):
        par = _parallelize(recipe, data, kind)
        saved: Saved = par if recipe.lora is None else Adapters(par)
        saving = recipe.checkpoint
        manager = CheckpointManager(
            recipe.kept / CHECKPOINTS,
            keep=saving.keep,
            best=saving.best,
            async_=saving.background,
            timeout_s=patience_s(recipe),
            staging=saving.staging,
        )
        trainer, origin = _trainer(recipe, data, kind, par, manager, saved)
        with contextlib.ExitStack() as heard, manager, contextlib.ExitStack() as stack:
            if elastic_job.replica()[1]:
                trainer.replicas = stack.enter_context(_replicas(recipe, par, trainer))
            else:
                manager.own()  # of replicas, their launcher
            if trainer.replicas is not None and trainer.replicas.join():
                come_from = "the other replicas"
            else:
                come_from = _resume(recipe, manager, saved, trainer, origin)
            if trainer.replicas is not None:
                trainer.replicas.step = trainer.step
            left = trainer.total_steps - trainer.step
            if recipe.profile and left >= PROFILED:
                trainer.data = _profiled(trainer.data, par, trainer.optimizer, recipe.folder / PROFILE)
            if runtime.is_main():
                leads = trainer.replicas is None or trainer.replicas.leads
                if leads and (left > 0 or not come_from):  # the recipe of a complete run stays the one that made it
                    _begin_folder(given, data)
                if recipe.kept != recipe.folder:
                    _take_up(recipe)
                    stack.callback(_keep, recipe, METRICS, TENSORBOARD, SENT)
                stack.enter_context(_new_steps_noted(trainer))
                _report(recipe, par, trainer, stack)
                _tell(recipe, par, trainer, come_from)
                if recipe.profile and left < PROFILED:
                    trainer.reporters[0].note(f"no profile: it requires {PROFILED} steps, and {left} are left")
            here = functools.partial(_where, trainer)
            with watched(recipe.watchdog, here, lambda: (trainer.moves, manager.writes)):
                # to the end of the checkpoints that are written in the background
                return trainer.run(heard.enter_context(StopRequest()))


def _where(trainer: Trainer) -> str:
    """Return the step, and where layers are divided what this rank's stage does in it."""
    layers = trainer.par.run.find(Layers)
    doing = "" if layers is None else layers.doing()
    return f"{trainer.step} ({doing})" if doing else str(trainer.step)


def _trainer(
    recipe: Recipe, data: datasets.Data, kind: str, par: Parallelized, manager: CheckpointManager, saved: Saved
) -> tuple[Trainer, Mapping[str, Any]]:
    """Return the trainer, which has no reporters yet, and what its checkpoints say that they were made of."""
    optimizer = build.optimizer_of(recipe)(par.module)
    train, validation = datasets.batches(recipe, data, par)
    made_of = [datasets.origin_of(recipe, train.global_batch)]
    dist.broadcast_object_list(made_of, group=runtime.hosts())  # copies of a file on other nodes have other times
    settings = build.settings_of(recipe)
    replicas = elastic_job.replica()[1]
    trainer = Trainer(
        par,
        build.objective_of(recipe, _teacher(recipe, data, kind)),
        train,
        optimizer,
        build.schedule_of(recipe, par.data_size * (replicas or 1)),
        settings,
        validation=validation,
        checkpointer=Saver(
            manager, saved, recipe.checkpoint.best, made_of[0], before=lambda: _keep(recipe, METRICS, TENSORBOARD, SENT)
        ),
        scaler=LossScaler() if build.wants_scaler(recipe) else None,
        flops_per_token=None if replicas else flops_per_token(par.module),  # of all replicas, on the devices of one
        averages=build.averages_of(recipe, par),
        validated=recipe.validation.weights,
        evaluations=build.evaluations_of(recipe, par, data.tokenizer),
    )
    return trainer, made_of[0]


def _replicas(recipe: Recipe, par: Parallelized, trainer: Trainer) -> Replicas:
    return Replicas(
        par,
        trainer.optimizer,
        trainer.data,
        state=trainer,
        same=(recipe.optimizer, recipe.training),
        patience_s=recipe.patience,
    )


def _report(recipe: Recipe, par: Parallelized, trainer: Trainer, stack: contextlib.ExitStack) -> None:
    """Give the trainer of rank 0 its reporters, which ``stack`` closes: of replicas, those of the one that leads."""
    if trainer.replicas is not None:
        trainer.reporters = (Elected(trainer.replicas, functools.partial(_reporters, recipe, trainer)),)
    else:
        reporters = _reporters(recipe, trainer, trainer.step)
        trainer.reporters = (*reporters, *forecast_feedback(recipe, par.device, reporters[0]))
    for reporter in trainer.reporters:
        stack.callback(_close, reporter, trainer)


def _close(reporter: Reporter, trainer: Trainer) -> None:
    """Close a reporter by how the training has ended, which is known where it is called."""
    reporter.close(trainer.ended)


# stands in for Batches
def _profiled(data: Batches, par: Parallelized, optimizer: torch.optim.Optimizer, folder: Path) -> Any:  # noqa: ANN401
    # loads the profiler and the forecast's recorder, which other jobs do without
    from meshpar.training.profile import Profiled

    return Profiled(data, par, optimizer, folder)


@final
class Saver:
    """The trainer's checkpointer: saves with the last metrics, so that the manager can keep the best step."""

    def __init__(
        self,
        manager: CheckpointManager,
        saved: Saved,
        best: str | None = None,
        origin: Mapping[str, Any] | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """``saved``: the whole model, or its adapters; ``best``: the metric whose best step is kept; ``origin``: of the
        data; ``before``: called before each save."""
        self._manager, self._saved, self._best = manager, saved, (best or "").removeprefix("+")
        self._origin, self._before = origin, before

    def save(
        self,
        step: int,
        par: Parallelized,
        optimizer: torch.optim.Optimizer,
        extra: dict[str, Any],
        *,
        averages: Mapping[str, Averaged] | None = None,
    ) -> object:
        """Save and commit. Collective."""
        extra, metrics = self._noted(step, extra)
        self._before()
        # An existing step is a damaged one, before which the run resumed.
        saved = self._manager.save(step, self._saved, optimizer, extra, metrics, averages=averages, replace=True)
        if isinstance(optimizer, HasModes):
            self._manager.before_step()  # it changes the parameters when training continues
        return saved

    def amend(self, step: int, extra: dict[str, Any]) -> None:
        """Add what a validation has found to a saved step."""
        self._manager.amend(step, *self._noted(step, extra))

    def wait(self, *, copied: bool = False) -> None:
        """Wait for a save in the background, or until it has copied the parameters."""
        (self._manager.before_step if copied else self._manager.wait)()

    def _noted(self, step: int, extra: dict[str, Any]) -> tuple[dict[str, Any], Mapping[str, float]]:
        """Return what a step is saved with, and its metrics."""
        metrics = {name: value for name, value in extra["metrics"].items() if math.isfinite(value)}
        if self._best and self._best not in metrics and not extra["owes"] and runtime.is_main():
            log.warning(
                "checkpoint.best: step %d has no %s and cannot be it; it has %s",
                step,
                self._best,
                ", ".join(metrics) or "none",
            )
        return extra if self._origin is None else {**extra, "origin": self._origin}, metrics


def _parallelize(recipe: Recipe, data: datasets.Data, kind: str) -> Parallelized:
    """Return the model on the mesh, with its first weights."""
    model = build.build_model(recipe, data.vocab_size, data.facts)
    layout = build.layout_of(recipe, model)
    par = build.plan_of(recipe).apply(model, layout, device_type=kind)
    return with_weights(par, recipe.model, recipe.seed, adapters=recipe.lora is not None)


def _teacher(recipe: Recipe, data: datasets.Data, kind: str) -> nn.Module | None:
    """Return the frozen teacher, sharded by its own plan over the same ranks; None if the recipe has none."""
    if recipe.teacher is None:
        return None
    model = build.build_teacher(recipe, data.vocab_size, data.facts)
    par = build.teacher_plan_of(recipe).apply(model, device_type=kind)
    return with_weights(par, recipe.teacher.model, recipe.seed).module


def _resume(recipe: Recipe, manager: CheckpointManager, par: Saved, trainer: Trainer, origin: Mapping[str, Any]) -> str:
    """Restore the checkpoint that the recipe selects, and describe it; empty for a new run."""
    wanted, own = recipe.checkpoint.resume, manager.latest()
    if wanted == "never" and own is not None:
        raise RecipeError(
            f"checkpoint.resume is never, but {manager.root} holds step {own}; choose another output, delete it, or "
            "set resume: auto"
        )
    source, step = manager, own
    if own is None and wanted not in ("auto", "never"):
        source, step = _elsewhere(expanded(place(wanted)))
    if step is None:
        return ""
    if (folder := _model_only(source, step)) is not None:
        return _begin_from(folder, recipe, trainer, own_step=None if own is None else step)
    # Only an automatic choice may fall back to an older step; a requested step is restored or is an error.
    restored = source.restore(
        par,
        trainer.optimizer,
        None if source is manager else step,
        averages=trainer.averages,
        fallback=source is manager,
    )
    before = restored.extra.get("origin")
    differ = [] if before is None else datasets.changes(before, origin, recipe.checkpoint.allow)
    if (
        recipe.checkpoint.allow
        and not differ
        and datasets.same_but_documents(restored.extra["data"]["data"], trainer.data.samples)
    ):
        restored.extra["data"]["data"] = trainer.data.samples.fingerprint
    older = {} if before is None else {"batch": before["batch"]}  # a state had none of its own at first
    try:
        trainer.load_state_dict({**older, **restored.extra})
    except RecipeError as error:
        if not differ:
            raise
        allowed = (
            ""
            if not any(difference.startswith("data.documents ") for difference in differ)
            else ", set checkpoint.allow: [data.documents]"
        )
        raise RecipeError(
            f"{recipe.where('data')}: the checkpoint {restored.folder} was saved with other data: "
            f"{'; '.join(differ)}; restore the files and settings that changed{allowed}, or start a new run in "
            "another output folder"
        ) from error
    text = f"{restored.folder}{'' if restored.same_mesh else ', saved on another mesh'}"
    return text if before is None else f"{text}{_other_batch(recipe, before['batch'], trainer)}"


def _other_batch(recipe: Recipe, before: int, trainer: Trainer) -> str:
    """Return a warning if a step has another number of samples than before the resume; else nothing."""
    now, left = trainer.data.global_batch, trainer.total_steps - trainer.step
    if before == now:
        return ""
    ranks = now // (recipe.data.micro_batch * recipe.data.accumulate)
    per_rank, rest = divmod(before, ranks)
    sizes = [size for size in range(1, min(per_rank, recipe.data.micro_batch) + 1) if per_rank % size == 0]
    keep = "" if rest else f"; to keep it, set data.micro_batch={sizes[-1]} data.accumulate={per_rank // sizes[-1]}"
    if trainer.follows_samples and trainer.settings.epochs is not None:
        instead = trainer.data.steps_until(trainer.settings.epochs, before)
        then = f"{left:,} steps are left instead of {instead:,}, and the learning rate follows the samples"
    else:
        then = (
            f"the {left:,} steps that are left of training.steps have {left * now:,} samples instead of "
            f"{left * before:,}"
        )
    return (
        f"\nWARNING: a step had {before:,} samples before and has {now:,} from now on, on {ranks} data ranks{keep}; "
        f"{then}"
    )


def _model_only(source: CheckpointManager, step: int) -> Place | None:
    """Return the folder of a step that contains a model alone, as ``meshpar import`` writes it; None for any other."""
    try:
        folder = open_step(source.root / step_name(step))
        manifest = read_manifest(folder)
    except StoreError:
        raise
    except CheckpointError:
        return None  # restore raises the error, or falls back to the step before
    return folder if manifest.optimizer is None and not manifest.extra else None


def _begin_from(folder: Place, recipe: Recipe, trainer: Trainer, own_step: int | None) -> str:
    """Read the first weights from a step that contains a model alone, and describe their origin."""
    if recipe.lora is not None:
        raise RecipeError(
            f"{folder} contains a model without adapters; export it (`meshpar export`) and set model.weights to the "
            "export"
        )
    if own_step:
        raise RecipeError(
            f"{folder} contains only a model, so the run would begin at step 0, and step {own_step} would remain the "
            "newest; import it as step 0, or into another folder and set checkpoint.resume to that"
        )
    trainer.par.materialize(weights=published_model(folder), ignore=recipe.model.ignore)
    return f"{folder}, which contains only a model"


def _elsewhere(path: Place) -> tuple[CheckpointManager, int]:
    """Return the manager and the step of a path: a step's folder, ``latest``, or a run's folder."""
    path = checkpoints_in(path)
    step = step_of(path.resolve().name)
    manager = CheckpointManager(path if step is None else path.resolve().parent)
    found = manager.latest() if step is None else step
    if found is None:
        raise RecipeError(f"checkpoint.resume: {path} holds no committed step; give a step's folder or a run's folder")
    return manager, found


def _begin_folder(recipe: Recipe, data: datasets.Data) -> None:
    """Write the recipe and the tokenizer to the run's folder."""
    recipe.folder.mkdir(parents=True, exist_ok=True)
    write_durably(recipe.folder / RECIPE, recipe.to_yaml())
    if data.tokenizer is not None:
        data.tokenizer.save(recipe.folder / TOKENIZER)
    carried([recipe.folder / RECIPE, recipe.folder / TOKENIZER], recipe.kept)


def _keep(recipe: Recipe, *names: str) -> None:
    """Copy files of this machine's folder to the run's store; losing them ends no training."""
    if runtime.is_main():
        with warn_only(f"cannot copy {', '.join(names)} to {recipe.kept}"):
            carried([recipe.folder / name for name in names], recipe.kept)


def _take_up(recipe: Recipe) -> None:
    """Get the metrics of a run that another machine began from its store; other lines are set aside."""
    here = recipe.folder / METRICS
    if not (recipe.kept / METRICS).exists():
        return
    here.parent.mkdir(parents=True, exist_ok=True)
    ours, stored = here.read_text(encoding="utf-8") if here.exists() else "", fetched(recipe.kept / METRICS)
    known = stored.read_text(encoding="utf-8")
    if not ours.startswith(known):
        same = {*known.splitlines(keepends=True)}
        with here.with_suffix(".abandoned.jsonl").open("a", encoding="utf-8") as aside:
            aside.writelines(line for line in ours.splitlines(keepends=True) if line not in same)
        write_durably(here, stored.read_bytes())
        if (recipe.kept / SENT).exists():
            shutil.copytree(fetched(recipe.kept / SENT), recipe.folder / SENT, dirs_exist_ok=True)


@contextlib.contextmanager
def _new_steps_noted(trainer: Trainer) -> Iterator[None]:
    """Note the first new step for the launcher, which does not start jobs without new steps for ever."""
    if (assigned := task()) is None:
        yield
        return
    logs, once = assigned.logs, functools.cache(made_step)
    last = last_failed_at(logs)
    trainer.optimizer.register_step_post_hook(lambda *_: once(logs) if trainer.step > last else None)
    try:
        yield
    except MeshparError as error:
        # of training itself, such as a loss that is not finite; a lost peer or a store has an error below it
        if error.__cause__ is None:
            failed_at(logs, trainer.step)
        raise


def _reporters(recipe: Recipe, trainer: Trainer, step: int) -> tuple[Reporter, ...]:
    boards: dict[str, dict[str, Any]] = {"tensorboard": {}} if recipe.training.tensorboard else {}
    facts = {"recipe": recipe.plain(), **facts_of(trainer.par)}
    unit = getattr(recipe.find(registry.OBJECTIVE, recipe.training.objective), "unit", "tok")
    return (
        Console(lambda: trainer.total_steps, step=step, unit=unit),
        Trackers(
            recipe.folder,
            {**boards, **recipe.trackers},
            step=step,
            name=recipe.name,
            facts=facts,
            code=recipe.code or ".",
        ),
    )


def _sequences(recipe: Recipe, batch: int) -> str:
    packed = build.examples_of(recipe) == "tokens"
    return f"sequences = {batch * recipe.data.sequence_length:,} tokens" if packed else "examples"


def _tell(recipe: Recipe, par: Parallelized, trainer: Trainer, come_from: str) -> None:
    """Print a summary of the run."""
    data, schedule, settings = trainer.data, trainer.planned, trainer.settings
    every = all_parameters(par.module)
    parameters = sum(parameter.numel() for parameter in every)
    trained = sum(parameter.numel() for parameter in every if parameter.requires_grad)
    part = f", {trained:,} of them trained," if trained < parameters else ""
    batch = data.global_batch
    ranks = par.data_size * (elastic_job.replica()[1] or 1)
    passes = "".join(f", {pass_.name}" for pass_ in par.plan.passes)
    lines = [
        f"{parameters:,} parameters{part} on {str(par.spec) or 'one process'} ({par.device.type}){passes}",
        f"{data.samples}, {data.steps_per_epoch:,} steps an epoch; a step: {batch:,} {_sequences(recipe, batch)} "
        f"({recipe.data.micro_batch} x {recipe.data.accumulate} micro-batches x {ranks} data ranks)",
        f"peak learning rate {schedule.lr:g} (scale_lr: {recipe.optimizer.scale_lr}), {schedule.name} over "
        f"{schedule.steps:,} "
        f"steps{f' of {trainer.batch:,} samples' if trainer.follows_samples and trainer.batch != batch else ''}",
    ]
    if trainer.complete and not trainer.owes:
        kind = "steps" if settings.steps is not None and trainer.step >= settings.steps else "epochs"
        lines.append(
            f"all {getattr(settings, kind)} {kind} are done already, after step {trainer.step}; raise training.{kind} "
            "to continue"
        )
    elif come_from:
        lines += f"resuming after step {trainer.step} from {come_from}".split("\n")
    for reporter in trainer.reporters[:1]:
        for line in lines:
            reporter.note(line)
