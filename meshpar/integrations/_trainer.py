"""transformers' Trainer on the mesh of a plan: the class from which ``on_mesh`` makes others."""

# Where transformers is not installed, pyright reads this file in its place.
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import has_length, seed_worker

from meshpar import MeshparError, Parallelized, Plan, Role
from meshpar.checkpoints import CheckpointManager
from meshpar.integrations._data_ranks import DataRankAccelerator, DataRanks, find_axis
from meshpar.integrations._shared import apply_plan, as_plan, export_into
from meshpar.integrations._trainer_settings import check_arguments, check_plan
from meshpar.process.preview import EndOfPreview, PlannedModel, is_preview
from meshpar.training import Adapters


class _AcceleratorOnMesh(DataRankAccelerator):
    """accelerate's Accelerator, whose processes are the data ranks of a parallel module."""

    par: Parallelized

    @classmethod
    def take_over(cls, accelerator: Any, par: Parallelized) -> None:
        """Let Trainer's accelerator, which it has made, count and exchange over the data ranks of ``par``."""
        accelerator.__class__ = cls
        accelerator.par, accelerator._schedules = par, {}
        accelerator._data = DataRanks(size=par.data_size, rank=par.data_rank, group=par.data_group)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        return cast("nn.Module", super().prepare_model(model, device_placement=False, evaluation_mode=True))

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        seed = data_loader.worker_init_fn
        if isinstance(seed, functools.partial) and seed.func is seed_worker:
            data_loader.worker_init_fn = functools.partial(seed, rank=self.process_index)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()  # par.accumulate says which backward reduces

    def clip_grad_norm_(self, parameters: object, max_norm: float, norm_type: float = 2) -> Tensor:
        return self.par.clip_grad_norm_(max_norm, norm_type)


class _MicroBatches(list[Any]):
    """The micro-batches of one step; the backward of the last one reduces the gradients of all."""

    def __init__(self, batches: list[Any], par: Parallelized) -> None:
        super().__init__(batches)
        self._par = par

    def __iter__(self) -> Iterator[Any]:
        return self._par.accumulate(list[Any](super().__iter__()))


class TrainerOnMesh(Trainer):
    """The methods of trainers of :func:`on_mesh` that differ from Trainer's."""

    accelerator: _AcceleratorOnMesh
    args: Any
    lr_scheduler: Any
    model: Any
    optimizer: Any
    _compared = ""
    """What samples a trainer compares over all ranks, and by what."""

    def __init__(self, *args: Any, plan: Plan | str, **kwargs: Any) -> None:
        bound = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        plan = as_plan(plan)
        check_plan(plan)
        if isinstance(arguments := bound.get("args"), TrainingArguments):
            check_arguments(arguments)
        if any(bound.get("optimizers") or ()):
            raise MeshparError(
                "optimizers has an optimizer or a schedule of the whole model's parameters; expected none: choose them "
                "by optim= and lr_scheduler_type=, pass optimizer_cls_and_kwargs=, or override create_optimizer"
            )
        compared = self._compared if bound.get("reward_funcs") is None else "prompts, whose completions"
        if compared and (axis := find_axis(plan, Role.FEATURES)) is not None:
            raise MeshparError(
                f"axis {axis!r} has ranks with the same {compared} {type(self).__name__} would count twice; expected "
                "axes of samples: use a mesh of dp_replicate and dp_shard"
            )
        self._plan, self._par, self._same_mesh = plan, cast("Parallelized", None), False
        self._stage_axis, self._waiting = self._axis_of_layers(plan), list[Any]()
        super().__init__(*args, **kwargs)
        check_arguments(self.args)
        self.args.accelerator_config.dispatch_batches = False
        self.accelerator.dataloader_config.dispatch_batches = False  # rank 0 would read for other ranks
        self._divide(self.model)
        if (reference := self._reference) is not None:
            reference.plan.apply(reference.module)
        if (engine := getattr(self, "vllm_generation", None)) is not None:
            _publish_to(engine, self.model, self._par)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    @property
    def _reference(self) -> PlannedModel | None:
        """The model that TRL compares with, which no step trains."""
        plan, module = self._plan, getattr(self, "ref_model", None)
        frozen = Plan(plan.mesh, plan.passes, verify=plan.verify, guards=plan.guards, frozen=True)
        return PlannedModel(name="ref_model", plan=frozen, module=module) if isinstance(module, nn.Module) else None

    def _end_preview(self, module: nn.Module) -> NoReturn:
        """Show the models, and the batches of a step."""
        batch = None if self.train_dataset is None else next(iter(self.get_train_dataloader()), None)
        steps = self.args.gradient_accumulation_steps
        model = PlannedModel(name="model", plan=self._plan, module=module, batch=batch, micro_batches=steps)
        raise EndOfPreview(model, *filter(None, [self._reference]))

    def _axis_of_layers(self, plan: Plan) -> str | None:
        """Return the axis that divides layers, and refuse trainers whose own loss reads every layer's values."""
        axis = find_axis(plan, Role.LAYERS)
        if axis is not None and super().compute_loss.__func__ is not Trainer.compute_loss:  # type: ignore[attr-defined]
            raise MeshparError(
                f"axis {axis!r} divides layers, and {type(self).__name__} computes a loss and metrics of its own on "
                "every rank, which has some of the layers; expected a loss of Trainer's: use compute_loss_func= with "
                f"Trainer, or a mesh without {axis}"
            )
        return axis

    def _divide(self, model: nn.Module) -> nn.Module:
        """Apply the plan to a model, of peft's to the model inside, and let the accelerator count its data ranks."""
        base: Any = cast(Any, model).get_base_model() if isinstance(model, PeftModel) else model
        if base is not model and (axis := find_axis(self._plan, Role.FEATURES)) is not None:
            raise MeshparError(
                f"axis {axis!r} splits layers by features, and peft's adapters add to whole layers; expected axes of "
                f"samples: use a mesh without {axis}, or add adapters by meshpar.training.add_adapters in a loop"
            )
        if self.args.torch_compile and (axis := find_axis(self._plan, Role.FEATURES)) is not None:
            raise MeshparError(
                f"torch_compile is True, and axis {axis!r} splits layers by features, whose exchanges are not traced "
                "through a whole model; expected False on this mesh: drop torch_compile"
            )
        if is_preview():
            self._end_preview(base)
        self._par = apply_plan(PlannedModel(name="model", plan=self._plan, module=base), self.args.device)
        if self._par.data_size > 1 and hasattr(base, "generate"):
            base.generate = functools.partial(base.generate, synced_gpus=True)  # ranks end with the longest sequence
        divided = set(map(id, base.parameters()))
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        outside = [name for name, parameter in trained.items() if id(parameter) not in divided]
        if outside:
            raise MeshparError(
                f"{outside[0]} and {len(outside) - 1} other trained parameters are outside of the model that peft "
                "wraps, so that no pass reduces their gradients; expected adapters inside of layers, such as LoRA"
            )
        _AcceleratorOnMesh.take_over(self.accelerator, self._par)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the plan places this rank's part."""

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise MeshparError(
            "hyperparameter_search draws the settings on one rank; expected the same on every rank: start one job for "
            "each setting"
        )

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        return model if self._par is None else self._divide(model)

    # Batches

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return int(args.train_batch_size * args.gradient_accumulation_steps * self._par.data_size)

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)
        self._check_samples(dataset, description, batch_size)
        return loader

    def _check_samples(self, dataset: Any, description: str, batch_size: int) -> None:
        """Refuse samples of which data ranks would repeat or share some in other ways than one process."""
        ranks = self.accelerator.num_processes
        if ranks > 1 and not has_length(dataset):
            raise MeshparError(
                f"{description}: the dataset has no length, so that {ranks} data ranks cannot share its last samples "
                "as one process would use them; expected a length: load it without streaming, or use a mesh of tp alone"
            )
        samples = len(dataset) if ranks > 1 else 0
        if not self._weighs_tokens and not self.args.dataloader_drop_last and samples % (batch_size * ranks):
            raise MeshparError(
                f"{description}: {samples} samples do not fill batches of {batch_size} on {ranks} data ranks, and "
                f"{type(self).__name__} averages over the samples of a rank, repeated ones too; expected a multiple of "
                f"{batch_size * ranks}, or dataloader_drop_last=True"
            )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        batches, items = super().get_batch_samples(map(self._without_repeats, epoch_iterator), num_batches, device)
        return batches if self._stage_axis else _MicroBatches(batches, self._par), items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        items = super()._get_num_items_in_batch(batch_samples, device)
        labels = [batch["labels"] for batch in batch_samples if isinstance(batch, Mapping) and "labels" in batch]
        of_tokens = all(_has_tokens(part) and not part.is_floating_point() for part in labels)
        # Trainer multiplies a loss that takes the number of labels by the number of ranks; a mean over samples is right
        # on ranks with as many, where it takes none.
        counted = of_tokens and items is not None
        counted = counted or (not self._weighs_tokens and not any(map(_has_tokens, labels)))
        if labels and self._par.data_size > 1 and self.compute_loss_func is None and not counted:
            raise MeshparError(
                f"{type(self.model).__name__} averages its loss over the labels of a rank, because it gets no number "
                "of the labels on all ranks, or does not divide by it; expected labels of tokens, and a forward with "
                "**kwargs that hands num_items_in_batch to its loss: pass compute_loss_func="
            )
        return items

    @property
    def _weighs_tokens(self) -> bool:
        """True where the loss is a sum divided by the number of items of all ranks."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def _without_repeats(self, batch: Any) -> Any:
        """Take the samples that fill up the last batch of an epoch out of the loss: their labels do not count."""
        state: Any = self.accelerator.gradient_state
        if not (state.end_of_dataloader and state.remainder > 0 and isinstance(batch, Mapping)):
            return batch
        masked = dict(batch)
        for name in (*self.label_names, "shift_labels"):
            if isinstance(labels := masked.get(name), Tensor) and labels.ndim:
                samples = state.active_dataloader.total_batch_size
                if len(labels) * self._par.data_size != samples and self._par.data_size > 1:
                    raise MeshparError(
                        f"the last batch of an epoch repeats samples, and the collator joined {samples} samples of all "
                        f"ranks into {len(labels)} rows on each; expected a row for each sample: set "
                        "dataloader_drop_last=True"
                    )
                real = max(0, state.remainder - self._par.data_rank * len(labels))
                masked[name] = labels.clone()
                masked[name][real:] = LabelSmoother.ignore_index
        return masked

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        # loaders take their order from the process's seed, which is another on each data rank from here on
        loaders = self.accelerator.dataloader_config
        loaders.data_seed = torch.initial_seed() if loaders.data_seed is None else loaders.data_seed
        self._par.manual_seed(self.args.seed)
        return prepared

    def floating_point_ops(self, inputs: Any) -> int:
        stages = self._par.spec.axes[self._stage_axis] if self._stage_axis else 1
        return int(super().floating_point_ops(inputs) * self._par.data_size * stages / self.args.world_size)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the accelerator clips gradients on all meshes

    # Forward and backward

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run a micro-batch; where layers are divided, all micro-batches of the step in the call of the last one."""
        if not self._stage_axis:
            return super().training_step(model, inputs, num_items_in_batch)
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        steps = 1 if self._weighs_tokens and num_items_in_batch is not None else len(batches)

        def loss_of(module: nn.Module, batch: Any) -> Tensor:
            with self.compute_loss_context_manager():
                loss = self.compute_loss(module, dict(batch), num_items_in_batch=num_items_in_batch)
            return loss / steps

        model.train()
        return self._par.backward(batches, loss_of).detach()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if num_items_in_batch is None and not self.model.training:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
        )

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step, inputs = super().prediction_step, self._without_repeats(inputs)
        if self._stage_axis:
            returned = self._par.forward([inputs], lambda module, batch: step(module, batch, *args, **kwargs))[0]
        else:
            returned = step(model, inputs, *args, **kwargs)
        loss, logits, labels = returned
        if loss is not None:
            loss = self.accelerator.reduce(loss.detach(), "mean")
        return loss, logits, labels

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Export the model for ``from_pretrained``, of peft the adapters; every rank calls it."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if _internal_call:
            optimizer = None if self.args.save_only_model else self.optimizer.optimizer
            with CheckpointManager(folder, keep=None) as checkpoints:
                checkpoints.save(self.state.global_step, self._saved(), optimizer, replace=True)
        else:
            self._export(folder)
        if self.args.should_save:
            reads = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if reads is not None:
                reads.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        self.accelerator.wait_for_everyone()

    def _export(self, folder: Path) -> None:
        if isinstance(self.model, PeftModel):
            _export_adapters(self.model, self._par, folder, writes=self.args.should_save)
        else:
            export_into(self._par, folder)

    def _saved(self) -> Any:
        return Adapters(self._par) if isinstance(self.model, PeftModel) else self._par

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if has_step(resume_from_checkpoint):
            return  # read with the optimizer, which is not made yet
        if isinstance(self.model, PeftModel):
            raise MeshparError(
                f"{resume_from_checkpoint} has adapters of one process; expected a checkpoint of a trainer on a mesh: "
                "load them by PeftModel.from_pretrained(model, folder, is_trainable=True), and train that model"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._same_mesh = False
        if checkpoint is None or not has_step(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        with CheckpointManager(checkpoint, keep=None) as checkpoints:
            restored = checkpoints.restore(self._saved(), self.optimizer.optimizer, random=False)
        self._same_mesh = restored.same_mesh
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._same_mesh:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None:  # ranks have other parts of a sample
            self._par.manual_seed(self.args.seed + self.state.global_step)

    def _load_best_model(self) -> None:
        with CheckpointManager(str(self.state.best_model_checkpoint), keep=None) as checkpoints:
            checkpoints.restore(self._saved(), random=False)


def _publish_to(engine: Any, model: Any, par: Parallelized) -> None:
    """Let TRL's engine send vLLM whole weights of the mesh, adapters of LoRA added."""
    stream, adapters = par.published(), getattr(model, "peft_config", {})
    has_other_kinds = any(config.peft_type != "LORA" or config.fan_in_fan_out for config in adapters.values())
    leftover_names = [item.name for item in stream.metadata() if "lora_" in item.name or "modules_to_save" in item.name]
    if has_other_kinds or leftover_names:
        raise MeshparError(
            f"use_vllm is True, and the adapters {', '.join(adapters)} are no part of the weights that vLLM gets "
            f"({', '.join(leftover_names[:2])}); expected no adapters, or one adapter of LoRA in linear layers, "
            "without use_dora, lora_bias and modules_to_save: pass such an adapter, or drop use_vllm"
        )

    def send() -> None:
        weights = ((name.replace(".base_layer", ""), tensor) for name, tensor in stream)
        if dist.get_rank() == stream.to:
            metadata = [
                (name.replace(".base_layer", ""), str(dtype).removeprefix("torch."), list(shape))
                for name, dtype, shape in stream.metadata()
            ]
            engine.vllm_client.update_named_params(metadata, weights)
            engine.vllm_client.reset_prefix_cache()
        else:
            deque(weights, maxlen=0)

    engine.sync_weights = send


def _export_adapters(model: Any, par: Parallelized, folder: Path, *, writes: bool) -> None:
    """Write the adapters of peft's model on one rank; every rank calls it."""
    state = model.state_dict()
    adapters = {
        id(value)
        for adapter in model.peft_config
        for value in get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter).values()
    }
    whole = {name: par.whole(value).cpu() for name, value in state.items() if id(value) in adapters}
    if writes:
        model.save_pretrained(folder, state_dict=state | whole)


def has_step(folder: str) -> bool:
    """Return whether a folder is a checkpoint of a trainer on a mesh."""
    return bool(CheckpointManager(folder).steps())


def _has_tokens(labels: object) -> bool:
    return isinstance(labels, Tensor) and labels.ndim > 1
