"""accelerate's Accelerator on a mesh: its class with one more argument, ``plan=``."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, final

import accelerate
import torch
import torch.distributed as dist
from accelerate.accelerator import Accelerator as PlainAccelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DataLoaderConfiguration,
    InitProcessGroupKwargs,
    convert_file_size_to_int,
    parse_flag_from_env,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import meshpar
from meshpar import MeshparError, Parallelized
from meshpar.checkpoints import CheckpointManager
from meshpar.integrations._data_ranks import DataRankAccelerator, DataRanks
from meshpar.integrations._shared import (
    AnyLayout,
    AnyPlan,
    Plans,
    ReplacedParameters,
    apply_plan,
    export_into,
    find_managers,
    place_average,
    save_whole,
    whole_averages,
    whole_states,
)
from meshpar.process.preview import EndOfPreview, is_preview

__all__ = ["Accelerator"]

_OTHER_ENGINES = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "torch_tp_plugin": "",
}
"""Arguments of accelerate's that place a model on the ranks -> what `accelerate launch` sets for them."""


@final
class Accelerator(DataRankAccelerator):
    """Run a script that is written for accelerate on a mesh: accelerate's class with one more argument.

    >>> accelerator = Accelerator(plan=Plan("dp_shard=2", [FullyShard()]))  # doctest: +SKIP

    Pass models, optimizers, loaders and schedulers to :meth:`prepare` as before. ``num_processes`` and
    ``process_index`` count the ranks with different samples: ranks of ``tp`` get the same batches. ``is_main_process``
    is true on one rank. What is not listed here is as in accelerate.

    Args:
        args: the arguments of ``accelerate.Accelerator``.
        plan: the plan of every model, or a mesh's text (``"dp_shard=2"``) for the passes that it usually wants; or
            name -> plan, in the order in which models are prepared. A checkpoint has a folder of each name.
        layout: the description of the models that have none of their own, or name -> description.
        options: the arguments of ``accelerate.Accelerator``, by name.

    Raises:
        MeshparError: on every rank: an argument that accelerate does not have, or that places models itself.

    Collective: every rank makes one.
    """

    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    step: int  # accelerate's count of micro-batches

    def __init__(self, *args: Any, plan: AnyPlan, layout: AnyLayout = None, **options: Any) -> None:
        signature = inspect.signature(PlainAccelerator.__init__).parameters
        options |= dict(zip(list(signature)[1:], args, strict=False))
        _check_options(options, list(signature)[1:])
        self._plans = Plans(plan, layout)
        timeout = _open_group(options)
        self._data = DataRanks.of(self._plans.all, timeout)
        if self._data.size != dist.get_world_size():
            options["dataloader_config"] = _read_on_each_rank(options.get("dataloader_config"))
        super().__init__(**options)
        if self.state.num_processes != dist.get_world_size():
            raise MeshparError(
                f"accelerate counts {self.state.num_processes} processes, and the process group has "
                f"{dist.get_world_size()}; start the script with torchrun, accelerate launch or meshpar run, and make "
                "the Accelerator before anything else of accelerate's"
            )
        self._replaced, self._schedules = ReplacedParameters(), {}
        self._on_mesh: dict[nn.Module, Parallelized] = {}
        self._names: dict[nn.Module, str] = {}
        self._prepared: dict[nn.Module, nn.Module] = {}
        self._averages: list[Any] = []
        self._has_hooks, self._states = False, list[dict[str, Any]]()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Put models on the mesh, and give their optimizers, loaders and schedulers what they need there.

        Optimizers that were made before get the parameters of the mesh by name, in the same groups. An average of a
        model's parameters that keeps them in ``shadow_params`` (diffusers' ``EMAModel``) is divided as the model is.

        Raises:
            PlanError: lists every problem of a plan, before a model changes.
            MeshparError: on every rank: an optimizer that cannot be moved, a model without a plan or without weights,
                an average of no model on the mesh.

        Collective: every rank calls it with the same.
        """
        optimizers = [item for item in args if _is_plain_optimizer(item)]
        modules = [item for item in args if isinstance(item, nn.Module)]
        if modules and is_preview():
            batch = next((batch for item in args if isinstance(item, DataLoader) for batch in item), None)
            models = [self._plans.numbered(number, module) for number, module in enumerate(modules, len(self._names))]
            steps = self.gradient_accumulation_steps
            raise EndOfPreview(*(dataclasses.replace(model, batch=batch, micro_batches=steps) for model in models))
        for module in modules:
            self._replaced.note(module)
        with self._replaced.moving(optimizers, self._on_mesh):
            for module in modules:
                self.prepare_model(module)
        for item in args:
            if hasattr(item, "shadow_params"):
                place_average(item, self._pars)
                self._averages.append(item)
        return super().prepare(*args, device_placement=device_placement)

    @property
    def _pars(self) -> list[Parallelized]:
        return [self._on_mesh[module] for module in self._names]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Apply the next plan to a model; with ``evaluation_mode`` leave it whole on this rank, as accelerate does.

        Collective: every rank calls it.
        """
        if model in self._on_mesh:
            return self._prepared.get(model, model)
        if evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        planned = self._plans.numbered(len(self._names), model)
        if any(tensor.is_meta for tensor in model.parameters()):
            raise MeshparError(
                f"the model {planned.name!r} ({type(model).__name__}) is on the meta device; expected weights: build "
                "it with values before accelerator.prepare, without init_empty_weights()"
            )
        self._replaced.note(model)
        # accelerate's autocast and compiler come around the model's own forward, and meshpar around those
        prepared = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        par = apply_plan(planned, self.device)
        self._on_mesh |= dict.fromkeys((model, prepared), par)
        self._prepared[model] = prepared
        self._names[model] = planned.name
        save_whole(par)
        # as DistributedDataParallel has it
        vars(model)["no_sync"] = partial(self.no_sync, model)
        return prepared

    def parallelized(self, model: nn.Module) -> Parallelized:
        """Return what the plan made of a prepared model, for what accelerate has no word for."""
        par = self._on_mesh.get(model)
        if par is None:
            raise MeshparError(
                f"{type(model).__name__} is on no mesh; expected a model that accelerator.prepare returned: pass it "
                "to prepare first"
            )
        return par

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Give an optimizer the parameters of the mesh, by name. Models come before it."""
        if _is_plain_optimizer(optimizer):
            with self._replaced.moving([optimizer], self._on_mesh):
                pass
        prepared: Any = super().prepare_optimizer(optimizer, device_placement=False)
        return prepared

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep the gradients of the block on this rank; the first backward after it reduces them, too."""
        return self.parallelized(model).no_sync()

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip by one norm over the mesh: of whole models, or of a part of their parameters.

        Collective: every rank calls it.
        """
        members = {id(tensor): tensor for tensor in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        rest, pars = {key for key, tensor in members.items() if tensor.requires_grad}, list[Parallelized]()
        for par in self._pars:
            trained = {id(tensor) for tensor in par.module.parameters() if tensor.requires_grad}
            if trained and trained <= rest:
                rest -= trained
                pars.append(par)
        if rest or not pars:
            clip: Any = super().clip_grad_norm_
            return clip(list(members.values()), max_norm, norm_type)
        self.unscale_gradients()
        if len(pars) == 1:
            return pars[0].clip_grad_norm_(max_norm, norm_type)
        norms = [par.clip_grad_norm_(math.inf, norm_type) for par in pars]
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if (scale := max_norm / (float(norm) + 1e-6)) < 1:
            for tensor in members.values():
                if tensor.grad is not None:
                    tensor.grad.mul_(scale)
        return norm

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model itself, which is on the mesh; its forward keeps its precision."""
        return super().unwrap_model(model, keep_torch_compile=keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return whole tensors in host memory on rank 0, and an empty dict elsewhere. Collective."""
        return self.parallelized(model).state_dict(full=True) if model in self._on_mesh else model.state_dict()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Export a model's weights to a folder, without gathering the model. Collective: every rank calls it."""
        if not safe_serialization:
            raise MeshparError("save_model got safe_serialization=False; expected True: weights are safetensors")
        size = convert_file_size_to_int(max_shard_size)
        export_into(self.parallelized(model), Path(save_directory), max_shard_size=size)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Save a checkpoint that any other mesh loads: models and optimizers by meshpar, the rest by accelerate.

        Each model is a step of ``CheckpointManager`` in a folder of its name. Hooks that are registered for saving get
        the models with whole weights on rank 0. Collective: every rank calls it.

        Returns:
            The checkpoint's folder.
        """
        _refuse_options("save_state", options)
        with whole_states(self._pars if self._has_hooks else []) as self._states, self._without_models():
            folder = super().save_state(output_dir, safe_serialization)
        counts = {"step": self.step, "num_processes": self.num_processes, "ranks": self._data.first_ranks}
        for manager, par, optimizers in self._managers(folder, self._optimizers):
            manager.save(0, par, optimizers, extra=counts, replace=True)
        return os.fspath(folder)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Load a checkpoint of :meth:`save_state`, of any mesh. Collective: every rank calls it.

        Raises:
            CheckpointError: on every rank: lists everything that does not fit.
        """
        _refuse_options("load_state", options)
        counts: dict[str, Any] = {}
        state: Any = self.state
        rank, optimizers = dist.get_rank(), self._optimizers

        def restore(_: object, folder: str) -> None:
            for manager, par, trained_by in self._managers(folder, optimizers):
                counts.update(manager.restore(par, trained_by).extra)
            if counts.get("num_processes") == self.num_processes:
                # whose random state accelerate loads
                state.process_index = counts["ranks"][self.process_index]

        fresh = {schedule: dict(vars(schedule)) for schedule in self._schedules}
        with self._without_models():
            handle = super().register_load_state_pre_hook(restore)
            try:
                super().load_state(input_dir, load_kwargs)
            finally:
                handle.remove()
                state.process_index = rank
        self.step = counts.get("step", self.step)
        if self._names and self.step_scheduler_with_optimizer and not self.split_batches:
            for schedule, attributes in fresh.items():
                _count_again(schedule, attributes, counts["num_processes"], self.num_processes)

    @contextmanager
    def _without_models(self) -> Iterator[None]:
        """Let accelerate save and load all but models and optimizers in the block, with averages whole on rank 0."""
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            with whole_averages(self._averages, self._pars):
                yield
        finally:
            self._models, self._optimizers = models, optimizers

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Let a hook see the models, whose whole weights rank 0 has, and their states in :meth:`save_state`."""
        self._has_hooks = True
        return super().register_save_state_pre_hook(lambda _, __, folder: hook([*self._names], [*self._states], folder))

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Let a hook see the models in :meth:`load_state`, before meshpar loads them."""
        return super().register_load_state_pre_hook(lambda _, folder: hook([*self._names], folder))

    def _managers(
        self, folder: str | Path, optimizers: list[AcceleratedOptimizer]
    ) -> Iterator[tuple[CheckpointManager, Parallelized, dict[str, Optimizer] | None]]:
        """Yield of each model the manager of its folder, the model, and its optimizers by number."""
        numbered = {str(number): prepared.optimizer for number, prepared in enumerate(optimizers)}
        return find_managers(Path(folder), dict(zip(self._names.values(), self._pars, strict=True)), numbered)

    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared, and free its memory."""
        self._replaced = ReplacedParameters()
        for record in (self._on_mesh, self._names, self._prepared, self._schedules, self._averages):
            record.clear()
        return super().free_memory(*objects)


def __getattr__(name: str) -> Any:
    """Return accelerate's own, so that a script changes one import."""
    return getattr(accelerate, name)


def _check_options(options: Mapping[str, Any], names: list[str]) -> None:
    """Refuse arguments that accelerate does not have, and those by which it would place models itself."""
    for name in options.keys() - set(names):
        close = difflib.get_close_matches(name, names, n=3) or names
        raise MeshparError(f"Accelerator has no argument {name!r}; expected one such as {', '.join(close)}")
    sources = [f"the argument {name}" for name in _OTHER_ENGINES if options.get(name) is not None]
    variables = sorted(set(_OTHER_ENGINES.values()) - {""})
    sources += [f"{name}, as accelerate launch set it" for name in variables if parse_flag_from_env(name)]
    for source in sources:
        raise MeshparError(
            f"Accelerator got a plan and {source}, which places models by another engine; expected the plan alone: "
            "drop the other, and write its axes into the plan's mesh"
        )
    if options.get("mixed_precision") == "fp8":
        raise MeshparError(
            "Accelerator got mixed_precision='fp8'; expected 'no', 'bf16' or 'fp16': add the pass Float8() to the plan"
        )


def _refuse_options(method: str, options: Mapping[str, Any]) -> None:
    if options:
        raise MeshparError(f"{method} got {', '.join(options)}; expected no options of other engines: leave them out")


def _open_group(options: dict[str, Any]) -> timedelta:
    """Open the process group that accelerate then finds; return its timeout."""
    handlers = [part for part in options.get("kwargs_handlers") or () if isinstance(part, InitProcessGroupKwargs)]
    timeout = next((handler.timeout for handler in handlers if handler.timeout), timedelta(minutes=10))
    # accelerate takes ranks without an accelerator for jobs of one process each, unless it is told
    options["cpu"] = bool(
        options.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    )
    meshpar.init("cpu" if options["cpu"] else None, timeout_s=timeout.total_seconds())
    return timeout


def _read_on_each_rank(configuration: Any) -> Any:
    """Return a configuration by which every rank reads its batches: accelerate can send them to all ranks alone."""
    if configuration is None:
        configuration = DataLoaderConfiguration()
    if configuration.dispatch_batches:
        raise MeshparError(
            "dispatch_batches=True sends other batches to each rank, and ranks of tp compute one batch together; use "
            "DataLoaderConfiguration(dispatch_batches=False)"
        )
    return dataclasses.replace(configuration, dispatch_batches=False)


def _count_again(schedule: LRScheduler, fresh: Mapping[str, Any], before: int, now: int) -> None:
    """Let a restored schedule count for ``now`` data ranks, as the script made it, what it counted for others."""
    parts = [part for value in fresh.values() for part in (value if isinstance(value, list) else [value])]
    if before != now and any(isinstance(part, LRScheduler) for part in parts):
        raise MeshparError(
            f"{type(schedule).__name__} counts the steps of {before} data ranks in schedules of its own; expected "
            f"{before} data ranks, got {now}: use a mesh with as many"
        )
    for name, value in fresh.items() if before != now else ():
        count = getattr(schedule, name)
        if name == "last_epoch":
            setattr(schedule, name, count * now // before)
        elif name == "_step_count":
            setattr(schedule, name, (count - 1) * now // before + 1)
        elif name not in ("base_lrs", "_last_lr"):
            setattr(schedule, name, value)


def _is_plain_optimizer(item: object) -> bool:
    return isinstance(item, Optimizer) and not isinstance(item, AcceleratedOptimizer)
