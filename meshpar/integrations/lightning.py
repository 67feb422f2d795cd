"""Lightning on a mesh: ``MeshparStrategy`` is a Trainer's strategy, ``MeshparFabricStrategy`` Fabric's."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from meshpar import MeshparError, ModelLayout, Parallelized, Plan, Role, WeightSource
from meshpar.checkpoints import CheckpointManager
from meshpar.integrations._shared import ReplacedParameters, apply_plan, layout_of, place
from meshpar.process.preview import EndOfPreview, PlannedModel, is_preview

__all__ = ["AveragedWeights", "MeshparFabricStrategy", "MeshparStrategy"]

Plans = Plan | Mapping[str, Plan]
Layouts = ModelLayout | Mapping[str, ModelLayout] | None
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_PRECISIONS = ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed")
_REST = "lightning-{}.pt"
"""The file of a folder of shards that has all but the tensors of modules and optimizers, by step."""


@final
class _Accumulation:
    """``par.accumulate``, where a trainer says of each micro-batch when it begins whether it is a step's last."""

    def __init__(self, par: Parallelized) -> None:
        self._par, self._more = par, False
        self._steps: Any = None

    def begin(self, *, last: bool) -> None:
        self._more = not last
        if self._steps is None and self._more:
            self._steps = self._par.accumulate(self._until_last())
        if self._steps is not None:
            next(self._steps)

    def end(self) -> None:
        if self._steps is not None and not self._more:
            next(self._steps, None)
            self._steps = None

    def leave(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps = None

    def _until_last(self) -> Iterator[None]:
        yield
        while self._more:
            yield


class _OnMesh:
    """Parts of both strategies: apply plans; reduce, gather and sample by data ranks; save and load shards."""

    root_device: torch.device
    is_global_zero: bool
    barrier: Callable[[], None]
    broadcast: Callable[[str], str]
    checkpoint_io: Any
    parallel_devices: Any
    num_nodes: int

    def _begin(self, plan: Plans, layout: Layouts, seed: int, weights: WeightSource | None, *, shards: bool) -> None:
        plans = plan if isinstance(plan, Mapping) else {"": plan}
        if not plans or not all(isinstance(value, Plan) for value in plans.values()):
            raise MeshparError(f"plan is {plan!r}; pass a meshpar.Plan, such as Plan('dp_shard=2', [FullyShard()])")
        passes = [pass_ for value in plans.values() for pass_ in value.passes]
        for axis, role in (item for pass_ in passes for item in pass_.roles.items()):
            if role is Role.LAYERS:
                raise MeshparError(
                    f"the plan divides layers over {axis}, and Lightning's steps call the whole module; use another "
                    "axis"
                )
        self._plans, self._layout, self._seed, self._weights, self._shards = plans, layout, seed, weights, shards
        self._placed: dict[nn.Module, Parallelized] = {}
        self._micro_batches: dict[nn.Module, _Accumulation] = {}
        self._blocked = False

    def _configure_launcher(self) -> None:
        """Start a process for each device; for a preview none."""
        if is_preview():
            self.parallel_devices, self.num_nodes = self.parallel_devices[:1], 1
        lightnings: Any = super()
        lightnings._configure_launcher()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments by which samplers give this rank its samples: ranks of ``tp`` get the same."""
        plan, size, rank = next(iter(self._plans.values())), 1, 0
        spec = plan.resolve(dist.get_world_size())
        for axis, index in spec.coordinates(dist.get_rank()).items():
            if any(pass_.roles.get(axis) is Role.SAMPLES for pass_ in plan.passes):
                size, rank = size * spec.axes[axis], rank * spec.axes[axis] + index
        return {"num_replicas": size, "rank": rank}

    @property
    def _par(self) -> Parallelized:
        return next(iter(self._placed.values()))

    def _apply(self, module: nn.Module, plan: Plan, layout: ModelLayout | None) -> Parallelized:
        """Apply a plan to a module, and fill what is on the meta device."""
        if not self._placed:  # gloo's threads could abort a process that leaves its group open
            atexit.unregister(_close)
            atexit.register(_close)
        par = apply_plan(plan, module, layout, self.root_device)
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            par.materialize(seed=self._seed if self._weights is None else None, weights=self._weights)
        self._placed[module], self._micro_batches[module] = par, _Accumulation(par)
        return par

    def _begin_last(self) -> None:
        for micro_batches in () if self._blocked else self._micro_batches.values():
            micro_batches.begin(last=True)

    def _end_micro_batch(self) -> None:
        for micro_batches in self._micro_batches.values():
            micro_batches.end()

    @contextmanager
    def _block(self, modules: Iterator[nn.Module]) -> Iterator[None]:
        """Leave gradients unreduced in the block."""
        for module in modules:
            self._micro_batches[module].begin(last=False)
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

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

    def _gathered(self, gather: Callable[..., Any], tensor: Tensor, group: Any, sync_grads: bool) -> Any:
        """Stack the tensors of all data ranks in the order of samples. Another group is Lightning's."""
        if group not in (None, dist.group.WORLD) or not self._placed:
            return gather(tensor, group, sync_grads)
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

    def _place_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with whole tensors placed as the parameters are."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        states = {
            number: {
                key: value if key == "step" else place(self._par, parameters[number], value)
                for key, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return {**state, "state": states}

    def _averages(self, par: Parallelized) -> dict[str, Any]:
        return {}

    def _parts(self, path: Path, state: Mapping[str, Any]) -> Iterator[tuple[CheckpointManager, Parallelized, Any]]:
        """Yield of each module of a state the manager of its folder, what the plan made of it, and its optimizers."""
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        for name, module in state.items():
            if isinstance(module, nn.Module) and module in self._placed:
                keys = [key for key, optimizer in optimizers.items() if _trains(optimizer, module)]
                with CheckpointManager(path / name, keep=1) as manager:
                    yield manager, self._placed[module], {key: optimizers.pop(key) for key in keys} or None
        if optimizers:
            raise MeshparError(f"{next(iter(optimizers))} trains no module of this checkpoint; save its module, too")

    def _save_shards(self, path: Path, step: int, state: Mapping[str, Any], rest: Any) -> None:
        """Save a folder: each rank its shards of modules and optimizers, rank 0 the rest."""
        if self.is_global_zero:
            if path.is_file():
                path.unlink()
            self.checkpoint_io.save_checkpoint(rest, path / _REST.format(step))
        self.barrier()
        for manager, par, optimizers in self._parts(path, state):
            manager.save(step, par, optimizers, averages=self._averages(par), replace=True)
        for old in path.glob(_REST.format("*")) if self.is_global_zero else ():
            if old.name != _REST.format(step):
                old.unlink()

    def _load_shards(self, path: Path, state: Mapping[str, Any], weights_only: bool | None) -> dict[str, Any]:
        """Load a folder of any mesh into modules and optimizers, and return the rest."""
        step = 0
        for manager, par, optimizers in self._parts(path, state):
            step = manager.restore(par, optimizers, averages=self._averages(par), random=False).step
        return dict(self.checkpoint_io.load_checkpoint(path / _REST.format(step), weights_only=weights_only))


class MeshparStrategy(_OnMesh, DDPStrategy):
    """Train a LightningModule on any mesh: ``Trainer(strategy=MeshparStrategy(plan), devices=2)``.

    The plan is applied to the one child of the LightningModule that has all parameters, else to the LightningModule,
    whose steps then run as calls of it. ``parallelized`` has what ``plan.apply`` returned, by name.

    >>> strategy = MeshparStrategy(Plan("dp_shard=2", [FullyShard()]))          # doctest: +SKIP
    >>> Trainer(strategy=strategy, devices=2, accelerator="cpu").fit(module)    # doctest: +SKIP

    Args:
        plan: the plan, or plans of several modules by name: ``{"generator": plan, "critic": plan}``, which manual
            optimization requires.
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

    # set by Trainer(sync_batchnorm=True)
    _layer_sync: Any = None

    def __init__(
        self,
        plan: Plans,
        layout: Layouts = None,
        *,
        seed: int = 0,
        weights: WeightSource | None = None,
        save_distributed_checkpoint: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        DDPStrategy.__init__(self, timeout=timedelta(seconds=timeout_s))
        self._begin(plan, layout, seed, weights, shards=save_distributed_checkpoint)
        self._one_plan, self._restored = not isinstance(plan, Mapping), False
        self.parallelized: dict[str, Parallelized] = {}

    def setup(self, trainer: Trainer) -> None:
        """Apply the plans, and build the optimizers."""
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        plans = {_one_child(module): self._plans[""]} if self._one_plan else self._plans
        if problems := list(self._problems(trainer, module, plans)):
            raise MeshparError("\n  ".join(["this LightningModule does not train on a mesh:", *problems]))
        if not all(module.get_submodule(name) in self._placed for name in plans):
            self.model = self.precision_plugin.convert_module(module)
            self._place(module, plans)
        self.optimizers, self.lr_scheduler_configs = list[Optimizer](), list[Any]()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                optimizer.register_load_state_dict_pre_hook(self._place_state)
        self.setup_precision_plugin()

    def _problems(self, trainer: Any, module: LightningModule, plans: Mapping[str, Plan]) -> Iterator[str]:
        """Yield what cannot work on a mesh, one line each."""
        names = dict(module.named_modules())
        yield from (
            f"plan= names {name!r}, which the LightningModule has not; name one of its modules"
            for name in plans
            if name not in names
        )
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if loose := [name for name in trained if not any(_is_in(name, planned) for planned in plans)]:
            yield f"no plan averages the gradients of {loose[0]}; name its module in plan=, too"
        if not module.automatic_optimization and "" in plans:
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

    def _place(self, module: LightningModule, plans: Mapping[str, Plan]) -> None:
        """Apply the plans, and move what is in none of them to the device."""
        for part in (self._placed, self._micro_batches, self.parallelized):
            part.clear()
        models = [
            PlannedModel(name=name, plan=plan, module=module.get_submodule(name), layout=layout_of(self._layout, name))
            for name, plan in plans.items()
        ]
        if is_preview():
            raise EndOfPreview(*models)
        for model in models:
            self.parallelized[model.name] = self._apply(model.module, model.plan, model.layout)
        for name, child in module.named_children():
            if not any(_is_in(planned, name) or _is_in(name, planned) for planned in plans):
                child.to(self.root_device)
        for step in _STEPS if "" in plans else ():
            if getattr(type(module), step) is not getattr(LightningModule, step):
                self._par.register_method(step)
        for child in module.modules():
            if isinstance(child, Metric) and child.process_group is None and self._par.data_size < self.world_size:
                child.process_group = self._par.data_group

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module; outside of ``block_backward_sync`` its backward is the last of a step."""
        self._begin_last()
        return super().training_step(*args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Leave gradients unreduced in the block."""
        return self._block(iter(self._placed))

    def post_backward(self, closure_loss: Tensor) -> None:
        """End a step after its last backward."""
        self._end_micro_batch()

    def on_exception(self, exception: BaseException) -> None:
        """Leave the step that an error ended, so that the module can be trained further."""
        for micro_batches in self._micro_batches.values():
            micro_batches.leave()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a metric over samples and positions."""
        return self._reduced(super().reduce, tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack the tensors of all data ranks, with gradients if ``sync_grads``."""
        return self._gathered(super().all_gather, tensor, group, sync_grads)

    def teardown(self) -> None:
        """Leave the module on its mesh, so that it can be tested or trained further."""
        parts: Any = self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io
        for part in parts:
            part.teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded when the plans are applied."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizers get whole state, unless shards of it were restored with the module."""
        return not self._restored

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
        parts = self._state(optimizers=checkpoint.pop("optimizer_states", None) is not None)
        path = Path(self.broadcast(str(filepath)))
        self._save_shards(path, checkpoint["global_step"], parts, checkpoint | {"state_dict": state})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of shards of any mesh, or one file."""
        path = Path(self.broadcast(str(checkpoint_path)))
        self._restored = path.is_dir()
        if self._restored:
            return self._load_shards(path, self._state(optimizers=True), weights_only)
        return super().load_checkpoint(path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole tensors; after a folder of shards, those that are in no plan."""
        assert self.lightning_module is not None
        missing, unexpected = self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)
        missing = [name for name in missing if not (self._restored and self._is_placed(name))]
        if strict and (missing or unexpected):
            raise MeshparError(f"the checkpoint does not fit the module: missing {missing}, unexpected {unexpected}")

    def _is_placed(self, name: str) -> bool:
        return any(_is_in(name, planned) for planned in self.parallelized)

    def _state(self, *, optimizers: bool) -> dict[str, Any]:
        """Return the modules on the mesh and the optimizers by the names of their folders and states."""
        state: dict[str, Any] = {name or "module": par.module for name, par in self.parallelized.items()}
        return state | {f"optimizer_{number}": value for number, value in enumerate(self.optimizers) if optimizers}

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
        plan: the plan of every model.
        layout: description of the models. Defaults to each one's own, then to the registered layouts.
        seed: draws the weights of a model of ``fabric.init_module(empty_init=True)``.
        weights: fills it instead, such as ``meshpar.checkpoints.Safetensors(folder)``.
        save_distributed_checkpoint: ``fabric.save`` writes a folder of shards, which any mesh loads. False: one file,
            as of one process. ``fabric.load`` reads both, whatever this says.
        timeout_s: bound in seconds on every collective.

    Raises:
        MeshparError: for what cannot work, by name.
    """

    def __init__(
        self,
        plan: Plan,
        layout: ModelLayout | None = None,
        *,
        seed: int = 0,
        weights: WeightSource | None = None,
        save_distributed_checkpoint: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        FabricDDPStrategy.__init__(self, timeout=timedelta(seconds=timeout_s))
        self._begin(plan, layout, seed, weights, shards=save_distributed_checkpoint)
        self._backward_sync_control: Any = self  # which it asks for no_backward_sync

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
        assert not isinstance(self._layout, Mapping)
        return self._apply(module, self._plans[""], self._layout).module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer load the state of one process, too."""
        optimizer.register_load_state_dict_pre_hook(self._place_state)
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
        return self._block(iter([module])) if enabled else nullcontext()

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward; outside of ``no_backward_sync`` it is the last of a step."""
        self._begin_last()
        super().backward(tensor, module, *args, **kwargs)
        self._end_micro_batch()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over samples and positions."""
        return self._reduced(super().all_reduce, tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack the tensors of all data ranks, with gradients if ``sync_grads``."""
        return self._gathered(super().all_gather, tensor, group, sync_grads)

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
        values = {key: state[key] for key in self._others(state)}
        rest = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in values.items()}
        self._save_shards(Path(self.broadcast(str(path))), 0, state, rest)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder of shards of any mesh, or one file."""
        path = Path(self.broadcast(str(path)))
        if not path.is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        rest = self._load_shards(path, state, weights_only)
        if strict and (lost := [key for key in self._others(state) if key not in rest]):
            raise MeshparError(f"the checkpoint {path} has no {lost[0]!r}; pass strict=False")
        for key in [key for key in self._others(state) if key in rest]:
            if hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(rest.pop(key))
            else:
                state[key] = rest.pop(key)
        return rest

    def _others(self, state: Mapping[str, Any]) -> list[str]:
        """Return the keys of what are no modules on the mesh and no optimizers."""
        placed = set(map(id, self._placed))
        return [key for key, value in state.items() if id(value) not in placed and not isinstance(value, Optimizer)]


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


def _trains(optimizer: Optimizer, module: nn.Module) -> bool:
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in parameters for parameter in module.parameters())


def _is_in(name: str, planned: str) -> bool:
    return not planned or name == planned or name.startswith(f"{planned}.")


def _close() -> None:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
