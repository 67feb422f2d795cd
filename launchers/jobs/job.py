"""Run a training job on one rank: build everything from a recipe, train, save."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
import torch.distributed as dist

from meshpar.checkpoints import CheckpointManager, open_step, read_manifest
from meshpar.checkpoints.export.published import published_model
from meshpar.checkpoints.format.manifest import step_name, step_of
from meshpar.checkpoints.steps.state import Checkpointable as Saved
from meshpar.checkpoints.steps.steps import CHECKPOINTS, checkpoints_in, warn_only
from meshpar.checkpoints.storage.place import Place, carried, fetched, place
from meshpar.core import runtime
from meshpar.core.errors import CheckpointError, MeshparError, PreflightError, RecipeError, StoreError
from meshpar.launchers.agent.failures import failed_at, last_failed_at, made_step, watch_progress
from meshpar.launchers.agent.stacks import answer_requests, note_progress
from meshpar.launchers.agent.terms import MEETING_S, task
from meshpar.launchers.doctor import examine
from meshpar.launchers.jobs import build, datasets, reports
from meshpar.launchers.jobs.models import with_weights
from meshpar.launchers.jobs.profile import LEAST as PROFILED
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.parallelized import Parallelized
from meshpar.passes.pipeline.running import Layers
from meshpar.process.imports import expanded
from meshpar.process.leftovers import write_durably
from meshpar.state.averaging import Averaged
from meshpar.training.adamw_and_schedules import HasModes, LossScaler
from meshpar.training.elastic import Replicas
from meshpar.training.lighthouse import this_replica
from meshpar.training.loop import Trainer
from meshpar.training.lora import Adapters
from meshpar.training.metrics import flops_per_token
from meshpar.training.send_to_trackers import METRICS, SENT
from meshpar.training.settings import Outcome
from meshpar.training.stop import StopRequest

log = logging.getLogger(__name__)

TOKENIZER, RECIPE, TENSORBOARD, PROFILE = "tokenizer", "recipe.yaml", "tensorboard", "profile"
"""Names of files and folders in a run's folder."""


def run_job(recipe: Recipe) -> Outcome:
    """Train a recipe. Every rank of the job calls it, or one process alone."""
    kind = build.device_type(recipe)
    # Before the process group opens: one rank prepares, the others wait for its lock, without a time-out.
    written, recipe = recipe, datasets.with_local_data(recipe)
    data = datasets.prepare_data(recipe)
    with contextlib.ExitStack() as outer:
        if task() is None:  # no launcher of meshpar's has started this rank, and it answers in a folder of its own
            outer.enter_context(answer_requests(recipe.folder / "logs" / "direct", runtime.rank()))
        outer.enter_context(open_job(recipe, data, kind))
        model = build.build_model(recipe, data.vocab_size, data.facts)
        par = build.plan_of(recipe).apply(model, build.layout_of(recipe, model), device_type=kind)
        par = with_weights(par, recipe.model, recipe.seed, adapters=recipe.lora is not None)
        recipe = build.deal(recipe, par.spec)
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
        with contextlib.ExitStack() as stop, manager, contextlib.ExitStack() as stack:
            if this_replica()[1]:
                same, wait_s = (recipe.optimizer, recipe.training), recipe.patience
                replicas = Replicas(par, trainer.optimizer, trainer.data, state=trainer, same=same, patience_s=wait_s)
                trainer.replicas = stack.enter_context(replicas)
            else:
                manager.own()  # of replicas, their launcher
            joined = trainer.replicas is not None and trainer.replicas.join()
            come_from = "the other replicas" if joined else _resume(recipe, manager, saved, trainer, origin)
            if trainer.replicas is not None:
                trainer.replicas.step = trainer.step
            if recipe.profile and trainer.total_steps - trainer.step >= PROFILED:
                # loads the profiler and the forecast's recorder, which other jobs do without
                from meshpar.launchers.jobs.profile import Profiled

                profiled: Any = Profiled(trainer.data, par, trainer.optimizer, recipe.folder / PROFILE)
                trainer.data = profiled
            if runtime.is_main():
                _begin_reports(recipe, written, data, trainer, come_from, stack)
            layers = par.run.find(Layers)

            def progress() -> str:
                doing = "" if layers is None else layers.doing()
                return f"{trainer.step} ({doing})" if doing else str(trainer.step)

            note_progress(progress)
            with watch_progress(recipe.watchdog, progress, lambda: (trainer.validations.moves, manager.writes)):
                # to the end of the checkpoints that are written in the background
                outcome = trainer.run(stop.enter_context(StopRequest()))
                if saving.best and runtime.is_main():
                    manager.wait()
                    _tell_best(manager, saving.best, trainer)
                return outcome


def _tell_best(manager: CheckpointManager, best: str, trainer: Trainer) -> None:
    with warn_only("the best step is not told"):
        if (step := manager.best()) is not None:
            folder = manager.root / step_name(step)
            value = read_manifest(folder).metrics[best.removeprefix("+")]
            trainer.reports.note(f"best step: {step}, {best.removeprefix('+')} {value:.4f}, in {folder}")


@contextlib.contextmanager
def open_job(recipe: Recipe, data: datasets.Data, kind: str) -> Iterator[torch.device]:
    """Open the process group, after the doctor: ``warn`` prints its findings, ``fail`` raises PreflightError."""
    timeout_s = patience_s(recipe)
    if recipe.preflight == "off" or not runtime.launched() or runtime.world_size() == 1:
        with runtime.distributed(kind, timeout_s=timeout_s) as device:
            yield device
        return
    roll = examine.meet(MEETING_S, "preflight")  # held to the end: its store may be rank 0's own
    folder = None
    if recipe.kept.mounted:  # no node mounts a store
        model = build.build_model(recipe, data.vocab_size, data.facts)
        # AdamW: a parameter and its two moments, in float32
        size = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
        size *= (recipe.checkpoint.keep or 1) + 1
        folder = examine.Folder(path=recipe.folder.absolute() / CHECKPOINTS, bytes=size)
    report = examine.examine_all(roll, examine.mesh_of(recipe.mesh), runtime.device(kind), folder)
    _tell(recipe, report)
    with runtime.distributed(kind, timeout_s=timeout_s) as device:
        _tell(recipe, examine.compare_products(dataclasses.replace(report, findings=()), device))
        yield device


def patience_s(recipe: Recipe) -> float:
    """Return the time-out of collectives: longer than the watchdog's, which names the missing ranks."""
    if this_replica()[1]:
        return recipe.patience + 10.0  # the other replicas go on by then
    return max(runtime.DEFAULT_TIMEOUT_S, (recipe.watchdog or 0.0) + 120.0)


def _tell(recipe: Recipe, report: examine.Examination) -> None:
    if not report.findings:
        return
    text = f"preflight found {len(report.findings)}:\n{examine.findings_text(report.findings)}"
    if recipe.preflight == "fail":
        raise PreflightError(text)
    if runtime.is_main():
        print(text, file=sys.stderr)


def _trainer(
    recipe: Recipe, data: datasets.Data, kind: str, par: Parallelized, manager: CheckpointManager, saved: Saved
) -> tuple[Trainer, Mapping[str, Any]]:
    """Return the trainer, which has no reporters yet, and the origin of its data, which is saved with each step."""
    teacher, optimizer = None, build.optimizer_of(recipe)(par.module)
    if recipe.teacher is not None:
        frozen = build.build_teacher(recipe, data.vocab_size, data.facts)
        sharded = build.teacher_plan_of(recipe).apply(frozen, device_type=kind)
        teacher = with_weights(sharded, recipe.teacher.model, recipe.seed).module
    train, validation = datasets.batches(recipe, data, par)
    origin = [datasets.origin_of(recipe, train.global_batch)]
    dist.broadcast_object_list(origin, group=runtime.hosts())  # copies of a file on other nodes have other times
    replicas = this_replica()[1]
    saver = Saver(
        manager, saved, recipe.checkpoint.best, origin[0], before=lambda: _keep(recipe, METRICS, TENSORBOARD, SENT)
    )
    trainer = Trainer(
        par,
        build.objective_of(recipe, teacher),
        train,
        optimizer,
        build.schedule_of(recipe, par.data_size * (replicas or 1)),
        build.settings_of(recipe),
        validation=validation,
        checkpointer=saver,
        scaler=LossScaler() if build.wants_scaler(recipe) else None,
        # of all replicas, on the devices of one
        flops_per_token=None if replicas else flops_per_token(par.module),
        averages=build.averages_of(recipe, par),
        validated=recipe.validation.weights,
        evaluations=build.evaluations_of(recipe, par, data.tokenizer),
    )
    return trainer, origin[0]


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
        """``saved``: the model, or its adapters; ``best``: as the recipe's; ``before``: called before each save."""
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
        extra, metrics = self._noted(step, extra)
        self._before()
        # An existing step is a damaged one, before which the run resumed.
        saved = self._manager.save(step, self._saved, optimizer, extra, metrics, averages=averages, replace=True)
        if isinstance(optimizer, HasModes):
            self._manager.before_step()  # it changes the parameters when training continues
        return saved

    def amend(self, step: int, extra: dict[str, Any]) -> None:
        self._manager.amend(step, *self._noted(step, extra))

    def wait(self, *, copied: bool = False) -> None:
        (self._manager.before_step if copied else self._manager.wait)()

    def _noted(self, step: int, extra: dict[str, Any]) -> tuple[dict[str, Any], Mapping[str, float]]:
        metrics = {name: value for name, value in extra["metrics"].items() if math.isfinite(value)}
        if self._best and self._best not in metrics and not extra["owes"] and runtime.is_main():
            text = "checkpoint.best: step %d has no %s and cannot be it; it has %s"
            log.warning(text, step, self._best, ", ".join(metrics) or "none")
        return extra if self._origin is None else {**extra, "origin": self._origin}, metrics


def _resume(recipe: Recipe, manager: CheckpointManager, par: Saved, trainer: Trainer, origin: Mapping[str, Any]) -> str:
    """Restore the checkpoint that the recipe selects, and describe it; empty for a new run."""
    wanted, latest = recipe.checkpoint.resume, manager.latest()
    if wanted == "never" and latest is not None:
        raise RecipeError(
            f"checkpoint.resume is never, but {manager.root} holds step {latest}; choose another output, delete it, or "
            "set resume: auto"
        )
    source, step = manager, latest
    if latest is None and wanted not in ("auto", "never"):
        source, step = _elsewhere(expanded(place(wanted)))
    if step is None:
        return ""
    if (folder := _model_only(source, step)) is not None:
        return _begin_from(folder, recipe, trainer, own_step=None if latest is None else step)
    # Only an automatic choice may fall back to an older step; a requested step is restored or is an error.
    ours = source is manager
    restored = source.restore(par, trainer.optimizer, None if ours else step, averages=trainer.averages, fallback=ours)
    before = restored.extra.get("origin")
    differ = [] if before is None else datasets.changes(before, origin, recipe.checkpoint.allow)
    allows, samples = bool(recipe.checkpoint.allow), trainer.data.samples
    if allows and not differ and datasets.same_but_documents(restored.extra["data"]["data"], samples):
        restored.extra["data"]["data"] = samples.fingerprint
    older = {} if before is None else {"batch": before["batch"]}  # a state had none of its own at first
    try:
        trainer.load_state_dict({**older, **restored.extra})
    except RecipeError as error:
        if not differ:
            raise
        documents = any(difference.startswith("data.documents ") for difference in differ)
        allowed = ", set checkpoint.allow: [data.documents]" if documents else ""
        raise RecipeError(
            f"{recipe.where('data')}: the checkpoint {restored.folder} was saved with other data: "
            f"{'; '.join(differ)}; restore the files and settings that changed{allowed}, or start a new run in "
            "another output folder"
        ) from error
    text = f"{restored.folder}{'' if restored.same_mesh else ', saved on another mesh'}"
    return text if before is None else f"{text}{_other_batch(recipe, before['batch'], trainer)}"


def _other_batch(recipe: Recipe, before: int, trainer: Trainer) -> str:
    """Return a warning if a step has another number of samples than before the resume; else nothing."""
    now, steps = trainer.data.global_batch, trainer.total_steps - trainer.step
    if before == now:
        return ""
    ranks = now // (recipe.data.micro_batch * recipe.data.accumulate)
    per_rank, rest = divmod(before, ranks)
    sizes = [size for size in range(1, min(per_rank, recipe.data.micro_batch) + 1) if per_rank % size == 0]
    accumulate = per_rank // sizes[-1] * (ranks if recipe.same_bits else 1)
    keep = "" if rest else f"; to keep it, set data.micro_batch={sizes[-1]} data.accumulate={accumulate}"
    if trainer.course.follows_samples and trainer.settings.epochs is not None:
        instead = trainer.data.steps_until(trainer.settings.epochs, before)
        then = f"{steps:,} steps are left instead of {instead:,}, and the learning rate follows the samples"
    else:
        had, has = f"{steps * before:,}", f"{steps * now:,}"
        then = f"the {steps:,} steps that are left of training.steps have {has} samples instead of {had}"
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
    step = manager.latest() if step is None else step
    if step is None:
        raise RecipeError(f"checkpoint.resume: {path} holds no committed step; give a step's folder or a run's folder")
    return manager, step


def _begin_folder(recipe: Recipe, data: datasets.Data) -> None:
    recipe.folder.mkdir(parents=True, exist_ok=True)
    write_durably(recipe.folder / RECIPE, recipe.to_yaml())
    if data.tokenizer is not None:
        data.tokenizer.save(recipe.folder / TOKENIZER)
    carried([recipe.folder / RECIPE, recipe.folder / TOKENIZER], recipe.kept)


def _begin_reports(
    recipe: Recipe, written: Recipe, data: datasets.Data, trainer: Trainer, come_from: str, stack: contextlib.ExitStack
) -> None:
    """Fill the run's folder, and give the trainer its reporters, which ``stack`` closes; on rank 0."""
    steps = trainer.total_steps - trainer.step
    # the recipe of a complete run stays the one that made it
    if (trainer.replicas is None or trainer.replicas.leads) and (steps > 0 or not come_from):
        _begin_folder(written, data)
    if recipe.kept != recipe.folder:
        _take_up(recipe)
        stack.callback(_keep, recipe, METRICS, TENSORBOARD, SENT)
    stack.enter_context(_new_steps_noted(trainer))
    reports.add_reporters(recipe, trainer.par, trainer, stack)
    reports.print_summary(recipe, trainer.par, trainer, come_from)
    if recipe.profile and steps < PROFILED:
        trainer.reports.reporters[0].note(f"no profile: it requires {PROFILED} steps, and {steps} are left")


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
    lines = stored.read_text(encoding="utf-8")
    if not ours.startswith(lines):
        same = {*lines.splitlines(keepends=True)}
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
