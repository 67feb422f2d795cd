"""Lightning on a mesh: ``MeshparStrategy`` is a Trainer's strategy, ``MeshparFabricStrategy`` Fabric's."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from meshpar import MeshparError, Parallelized, Role, WeightSource
from meshpar.core.runtime import close_group
from meshpar.integrations._shared import (
    AnyLayout,
    AnyPlan,
    Plans,
    ReplacedParameters,
    apply_plan,
    find_managers,
    number_samples,
)
from meshpar.process.preview import EndOfPreview, PlannedModel, is_preview
from meshpar.state.full import place_optimizer_state

__all__ = ["AveragedWeights", "MeshparFabricStrategy", "MeshparStrategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_PRECISIONS = ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed")
_REST = "lightning-{}.pt"
"""The file of a folder of shards that has all but the tensors of modules and optimizers, by step."""


class _OnMesh:
    """Parts of both strategies: apply plans; reduce, gather and sample by data ranks; save and load shards."""

    root_device: torch.device
    is_global_zero: bool
    barrier: Callable[[], None]
    parallel_devices: Any
    num_nodes: int

    def __init__(
        self,
        plan: AnyPlan,
        layout: AnyLayout = None,
        *,
        seed: int = 0,
        weights: WeightSource | None = None,
        save_distributed_checkpoint: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        lightnings: Any = super()
        lightnings.__init__(timeout=timedelta(seconds=timeout_s))
        self._plans, self._seed, self._weights = Plans(plan, layout), seed, weights
        for axis, role in (item for plan in self._plans.all for pass_ in plan.passes for item in pass_.roles.items()):
            if role is Role.LAYERS:
                raise MeshparError(
                    f"the plan divides layers over {axis}, and Lightning's steps call the whole module; use another "
                    "axis"
                )
        self._shards = save_distributed_checkpoint
        self._backward_sync_control = self  # which Fabric asks for no_backward_sync
        self._placed: dict[nn.Module, Parallelized] = {}

    def _configure_launcher(self) -> None:
        """Start a process for each device; for a preview none."""
        if is_preview():
            self.parallel_devices, self.num_nodes = self.parallel_devices[:1], 1
        lightnings: Any = super()
        lightnings._configure_launcher()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments by which samplers give this rank its samples: ranks of ``tp`` get the same."""
        numbers = number_samples(self._plans.all[0])
        return {"num_replicas": max(numbers) + 1, "rank": numbers[dist.get_rank()]}

    @property
    def _par(self) -> Parallelized:
        return next(iter(self._placed.values()))

    def _apply(self, model: PlannedModel) -> Parallelized:
        """Apply a plan to a module, and fill what is on the meta device."""
        if not self._placed:  # gloo's threads could abort a process that leaves its group open
            atexit.unregister(close_group)
            atexit.register(close_group)
        par = self._placed[model.module] = apply_plan(model, self.root_device)
        if any(tensor.is_meta for tensor in (*par.module.parameters(), *par.module.buffers())):
            par.materialize(seed=self._seed if self._weights is None else None, weights=self._weights)
        return par

    @contextmanager
    def _no_sync(self, pars: Iterable[Parallelized]) -> Iterator[None]:
        """Leave gradients unreduced in the block."""
        with ExitStack() as stack:
            for par in pars:
                stack.enter_context(par.no_sync())
            yield

    def _reduced(self, reduce: Callable[..., Any], tensor: Any, group: Any, operation: Any) -> Any:
        """Reduce over samples and positions, in place: ranks of ``tp`` have one value. Another group is Lightning's."""
        if not isinstance(tensor, Tensor) or not self._placed or group not in (None, dist.group.WORLD):
            return reduce(tensor, group, operation)
        name = str(operation or "sum").rpartition(".")[2].lower()
        if name == "max":
            return self._par.data_max(tensor)
        if name == "min":
            return tensor.copy_(-self._par.data_max(-tensor))
        if name not in ("mean", "avg", "sum"):
            raise MeshparError(f"reduce_op is {operation!r}; expected 'mean', 'sum', 'max' or 'min'")
        total = self._par.data_sum(tensor)
        return total if name == "sum" else total.copy_(total / self._par.loss_size)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack the tensors of all data ranks, with gradients if ``sync_grads``. Another group is Lightning's."""
        if group not in (None, dist.group.WORLD) or not self._placed:
            lightnings: Any = super()
            return lightnings.all_gather(tensor, group, sync_grads)
        return self._par.gather((tensor if sync_grads else tensor.detach())[None])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any of them, decide so."""
        value = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(value, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(value)

    def _whole(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a state with whole tensors in host memory, on rank 0."""
        whole: dict[Any, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                gathered = self._par.whole(value.detach())
                value = gathered.cpu() if self.is_global_zero else None
            whole[key] = self._whole(value) if isinstance(value, dict) else value
        return whole if self.is_global_zero else {}

    def _averages(self, par: Parallelized) -> dict[str, Any]:
        return {}

    def _save_shards(
        self,
        path: Path,
        step: int,
        pars: Mapping[str, Parallelized],
        optimizers: Mapping[str, Optimizer],
        save_rest: Callable[[Path], None],
    ) -> None:
        """Save a folder: each rank its shards of modules and optimizers, rank 0 the rest."""
        rest = path / _REST.format(step)
        if self.is_global_zero and path.is_file():
            path.unlink()
        save_rest(rest)
        self.barrier()
        for manager, par, trained_by in find_managers(path, pars, optimizers):
            manager.save(step, par, trained_by, averages=self._averages(par), replace=True)
        for old in set(path.glob(_REST.format("*"))) - {rest} if self.is_global_zero else ():
            old.unlink()

    def _load_shards(self, path: Path, pars: Mapping[str, Parallelized], optimizers: Mapping[str, Optimizer]) -> Path:
        """Load a folder of any mesh into modules and optimizers, and return the file of the rest."""
        step = 0
        for manager, par, trained_by in find_managers(path, pars, optimizers):
            step = manager.restore(par, trained_by, averages=self._averages(par), random=False).step
        return path / _REST.format(step)


class MeshparStrategy(_OnMesh, DDPStrategy):
    """Train a LightningModule on any mesh: ``Trainer(strategy=MeshparStrategy(plan), devices=2)``.

    The plan is applied to the one child of the LightningModule that has all parameters, else to the LightningModule,
    whose steps then run as calls of it. ``parallelized`` has what ``plan.apply`` returned, by name.

    >>> strategy = MeshparStrategy(Plan("dp_shard=2", [FullyShard()]))          # doctest: +SKIP
    >>> Trainer(strategy=strategy, devices=2, accelerator="cpu").fit(module)    # doctest: +SKIP

    Args:
        plan: the plan, or a mesh's text (``"dp_shard=2"``) for the passes that it usually wants; or plans of several
            modules by name: ``{"generator": plan, "critic": plan}``, which manual optimization requires.
        layout: description of the model, or of several by name. Defaults to the module's own, then to the registered
            layouts.
        seed: draws the weights of what is on the meta device, as by ``torch.device("meta")`` in ``configure_model``.
        weights: fills it instead, such as ``meshpar.checkpoints.Safetensors(folder)``.
        save_distributed_checkpoint: a checkpoint is a folder of shards, which any mesh restores. False: one file, as of
            one process. Both are read, whatever this says.
        timeout_s: bound in seconds on every collective.

    Raises:
        MeshparError: for what cannot work, by name, when training begins.
    """

    parallelized: Mapping[str, Parallelized] = MappingProxyType({})
    # set by Trainer(sync_batchnorm=True)
    _layer_sync: Any = None

    def setup(self, trainer: Trainer) -> None:
        """Apply the plans, and build the optimizers."""
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        names = [_one_child(module)] if self._plans.of_every else list(self._plans.by_name)
        if problems := list(self._problems(trainer, module, names)):
            raise MeshparError("\n  ".join(["this LightningModule does not train on a mesh:", *problems]))
        if not all(module.get_submodule(name) in self._placed for name in names):
            self.model = self.precision_plugin.convert_module(module)
            self._place(module, names)
        self.optimizers, self.lr_scheduler_configs = list[Optimizer](), list[Any]()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                optimizer.register_load_state_dict_post_hook(place_optimizer_state)
        self.setup_precision_plugin()

    def _problems(self, trainer: Any, module: LightningModule, names: list[str]) -> Iterator[str]:
        """Yield what cannot work on a mesh, one line each."""
        for name in names:
            if name not in dict(module.named_modules()):
                yield f"plan= names {name!r}, which the LightningModule has not; name one of its modules"
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if loose := [name for name in trained if not any(_is_in(name, planned) for planned in names)]:
            yield f"no plan averages the gradients of {loose[0]}; name its module in plan=, too"
        if not module.automatic_optimization and "" in names:
            yield (
                "manual optimization steps inside of training_step, which is a call of the whole LightningModule here; "
                "pass plan={'generator': plan, 'critic': plan} with the names of its modules"
            )
        if self._layer_sync is not None:
            yield "batch norms see the whole batch on every mesh; drop sync_batchnorm=True"
        if trainer.precision not in _PRECISIONS:
            yield f"precision is {trainer.precision!r}; expected one of {', '.join(_PRECISIONS)}"
        if not self._placed and not set(_STEPS).isdisjoint(vars(module)):
            yield "the steps of the LightningModule are replaced, as torch.compile does; pass it as it is"
        for callback in trainer.callbacks:
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
                yield f"{type(callback).__name__} copies the module, which a mesh does not allow; use AveragedWeights"

    def _place(self, module: LightningModule, names: list[str]) -> None:
        """Apply the plans, and move what is in none of them to the device."""
        models = [self._plans.named(name, module.get_submodule(name)) for name in names]
        if is_preview():
            raise EndOfPreview(*models)
        self._placed.clear()
        self.parallelized = {model.name: self._apply(model) for model in models}
        for name, child in module.named_children():
            if not any(_is_in(planned, name) or _is_in(name, planned) for planned in names):
                child.to(self.root_device)
        for step in _STEPS if "" in names else ():
            if getattr(type(module), step) is not getattr(LightningModule, step):
                self._par.register_method(step)
        for child in module.modules():
            if isinstance(child, Metric) and child.process_group is None and self._par.data_size < self.world_size:
                child.process_group = self._par.data_group

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Leave gradients unreduced in the block."""
        return self._no_sync(self._placed.values())

    def on_exception(self, exception: BaseException) -> None:
        """Leave the step that an error ended, so that the module can be trained further."""
        for par in self._placed.values() if self.optimizers else ():
            par.run.leave_step()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a metric over samples and positions."""
        return self._reduced(super().reduce, tensor, group, reduce_op)

    def teardown(self) -> None:
        """Leave the module on its mesh, so that it can be tested or trained further."""
        parts: Any = self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io
        for part in parts:
            part.teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded when the plans are applied."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the shards of the module's state, or whole tensors on rank 0."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        return state if self._shards else self._whole(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return whole state on rank 0; nothing where shards are saved."""
        return {} if self._shards else self._whole(optimizer.state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder of shards, or one file."""
        if not self._shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise MeshparError("a folder of shards takes no storage_options; drop them from save_checkpoint")
        state = {name: value for name, value in checkpoint["state_dict"].items() if not self._is_placed(name)}
        pars, optimizers = self._parts()
        if checkpoint.pop("optimizer_states", None) is None:
            optimizers = {}
        save_rest = partial(super().save_checkpoint, checkpoint | {"state_dict": state})
        self._save_shards(Path(self.broadcast(str(filepath))), checkpoint["global_step"], pars, optimizers, save_rest)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of shards of any mesh, or one file."""
        path = Path(self.broadcast(str(checkpoint_path)))
        if not path.is_dir():
            return super().load_checkpoint(path, weights_only)
        rest = super().load_checkpoint(self._load_shards(path, *self._parts()), weights_only)
        assert self.lightning_module is not None
        restored = {name: value for name, value in self.lightning_module.state_dict().items() if self._is_placed(name)}
        return {**rest, "state_dict": restored | rest["state_dict"], "optimizer_states": []}

    def _is_placed(self, name: str) -> bool:
        return any(_is_in(name, planned) for planned in self.parallelized)

    def _parts(self) -> tuple[dict[str, Parallelized], dict[str, Optimizer]]:
        """Return the modules on the mesh and the optimizers by the names of their folders and states."""
        optimizers = {f"optimizer_{number}": optimizer for number, optimizer in enumerate(self.optimizers)}
        return {name or "module": par for name, par in self.parallelized.items()}, optimizers

    def _averages(self, par: Parallelized) -> dict[str, Any]:
        """Return the moving averages of a module, by the position of their callback."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        averages = [callback.averages for callback in trainer.callbacks if isinstance(callback, AveragedWeights)]
        return {f"average_{n}": values[par.module] for n, values in enumerate(averages) if par.module in values}


class MeshparFabricStrategy(_OnMesh, FabricDDPStrategy):
    """Train on any mesh with Fabric: ``Fabric(strategy=MeshparFabricStrategy(plan), devices=2)``.

    ``fabric.setup`` applies the plan to each model, and moves the optimizers that were made before to its parameters.
    ``parallelized`` has what ``plan.apply`` returned, by model (``model.module`` of what ``setup`` returned).

    Args:
        plan: the plan of every model, or a mesh's text (``"dp_shard=2"``) for the passes that it usually wants; or
            name -> plan, in the order of ``fabric.setup``.
        layout: description of the models, or name -> description. Defaults to each one's own, then to the registered
            layouts.
        seed: draws the weights of a model of ``fabric.init_module(empty_init=True)``.
        weights: fills it instead, such as ``meshpar.checkpoints.Safetensors(folder)``.
        save_distributed_checkpoint: ``fabric.save`` writes a folder of shards, which any mesh loads. False: one file,
            as of one process. ``fabric.load`` reads both, whatever this says.
        timeout_s: bound in seconds on every collective.

    Raises:
        MeshparError: for what cannot work, by name.
    """

    @property
    def parallelized(self) -> Mapping[nn.Module, Parallelized]:
        """The result of ``plan.apply``, by model."""
        return self._placed

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Build a model of the precision, with ``empty_init`` on the meta device."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else nullcontext())
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Leave a model where it is: the plan moves each rank's part."""

    def setup_module(self, module: nn.Module) -> Any:
        """Apply the plan to a model."""
        if (precision := str(self.precision.precision)) not in _PRECISIONS:
            raise MeshparError(f"precision is {precision!r}; expected one of {', '.join(_PRECISIONS)}")
        return self._apply(self._plans.numbered(len(self._placed), module)).module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer load the state of one process, too."""
        optimizer.register_load_state_dict_post_hook(place_optimizer_state)
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Apply the plan to a model, and move its optimizers to the new parameters."""
        replaced = ReplacedParameters()
        replaced.note(module)
        with replaced.moving(optimizers, self._placed):
            self.setup_module(module)
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Leave gradients unreduced in the block."""
        return self._no_sync([self._placed[module]]) if enabled else nullcontext()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over samples and positions."""
        return self._reduced(super().all_reduce, tensor, group, reduce_op)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole tensors, on rank 0."""
        return self._whole(module.state_dict())

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return whole state, on rank 0."""
        return self._whole(optimizer.state_dict())

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a folder of shards, or one file."""
        if not self._shards:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if storage_options is not None or filter:
            raise MeshparError(
                "a folder of shards takes no storage_options and no filter; pass save_distributed_checkpoint=False"
            )
        pars, optimizers, rest = self._divide(state)
        save_rest = partial(super().save_checkpoint, state=rest)
        self._save_shards(Path(self.broadcast(str(path))), 0, pars, optimizers, save_rest)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder of shards of any mesh, or one file."""
        path = Path(self.broadcast(str(path)))
        if not path.is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        pars, optimizers, rest = self._divide(state)
        unused = super().load_checkpoint(self._load_shards(path, pars, optimizers), rest, strict, weights_only)
        state.update(rest)
        return unused

    def _divide(self, state: Mapping[str, Any]) -> tuple[dict[str, Parallelized], dict[str, Optimizer], dict[str, Any]]:
        """Divide a state into modules on the mesh, optimizers and the rest."""
        modules = {key: value for key, value in state.items() if isinstance(value, nn.Module) and value in self._placed}
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        rest = {key: value for key, value in state.items() if key not in modules and key not in optimizers}
        return {key: self._placed[module] for key, module in modules.items()}, optimizers, rest


class AveragedWeights(Callback):
    """Average the weights of training, validate the average, and end with it: in ``Trainer(callbacks=...)``.

    Each rank averages its own shards. Checkpoints have the average beside the weights.

    Args:
        decay: weight of the previous average, 0 to 1, or a function of the number of updates.
        options: those of ``par.averaged``: ``power``, ``every``, ``after``, ``device``, ``dtype``, ``buffers``.

    Attributes:
        averages: the average of each module that a plan was applied to, while it is trained.
    """

    def __init__(self, decay: float | Callable[[int], float] | None = None, **options: Any) -> None:
        self._decay, self._options, self._step, self._swapped = decay, options, 0, ExitStack()
        self.averages: dict[nn.Module, Any] = {}
        self._strategy: MeshparStrategy | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the averages."""
        if not isinstance(trainer.strategy, MeshparStrategy):
            raise MeshparError("AveragedWeights needs strategy=MeshparStrategy(plan); without it use WeightAveraging")
        self._strategy, self._step = trainer.strategy, trainer.global_step
        pars = trainer.strategy.parallelized.values()
        self.averages = {par.module: par.averaged(self._decay, **self._options) for par in pars}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Average after each step of the optimizer."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            for average in self.averages.values():
                average.update()

    def on_validation_start(self, *_: Any) -> None:
        """Validate the average."""
        for average in self.averages.values():
            self._swapped.enter_context(average.swapped())

    def on_validation_end(self, *_: Any) -> None:
        """Train the weights further."""
        self._swapped.close()

    def on_exception(self, *_: Any) -> None:
        """Give the module its weights back."""
        self._swapped.close()

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """End with the average as the module's weights."""
        for par in trainer.strategy.parallelized.values():
            par.load_state_dict(self.averages.pop(par.module).state_dict()["averages"], strict=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as whole tensors, for a checkpoint of one file; a folder has their shards."""
        if self._strategy is None or self._strategy._shards:
            return {}
        states = [average.state_dict() for average in self.averages.values()]
        return {str(number): self._strategy._whole(state) for number, state in enumerate(states)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the averages of a checkpoint of one file."""
        for average, state in zip(self.averages.values(), state_dict.values(), strict=False):
            average.load_state_dict(state)


def _one_child(module: nn.Module) -> str:
    """Return the name of the one child that has all parameters; empty where there is none."""
    names = {name.partition(".")[0] if "." in name else "" for name, _ in module.named_parameters()}
    return names.pop() if len(names) == 1 else ""


def _is_in(name: str, planned: str) -> bool:
    return not planned or name == planned or name.startswith(f"{planned}.")
