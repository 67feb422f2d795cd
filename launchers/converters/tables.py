"""The keys of transformers' TrainingArguments (5.23, and earlier ones) and of accelerate's YAML (1.15, FSDP versions 1
and 2).

Keys that both have, ``debug``, ``parallelism_config`` and ``use_cpu``, are in accelerate's table.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshpar.launchers.converters import values
from meshpar.launchers.converters.values import Keys, Translated, to, truth, whole

_LAUNCHER = "the launcher's: give it to torchrun, srun or `meshpar launch`"
_DEEPSPEED = (
    "DeepSpeed is another engine; its stages 2 and 3 are FullyShard(reshard_after_forward=False) and FullyShard()"
)
_TPU = "TPUs are not supported"
DEFAULTS = {
    "data.micro_batch": 8,
    "optimizer.lr": 5e-5,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.weight_decay": 0.0,
    "schedule.name": "linear",
    "training.log_every": 500,
    "checkpoint.every": 500,
    "checkpoint.keep": None,
}
"""Trainer's defaults that differ from a recipe's."""

_OPT = "AdamW has no such options here; they are lr, betas, eps, weight_decay and fused, in the section optimizer"
_HUB = "training uploads nothing; publishing is a command of its own: `meshpar export RUN DST --push OWNER/NAME`"
_FIXED = "it is always so"
_DDP = "gradients are averaged by FSDP2's replicate, which has no such setting"
_EVAL = "validation sums the loss and the objective's numbers on the device, and gathers no predictions"

TRAINER = Keys(
    handlers={
        "model_name_or_path": values.model_name,
        "max_steps": values.max_steps,
        "num_train_epochs": values.epochs,
        "output_dir": to("output", str),
        "per_device_train_batch_size": to("data.micro_batch", whole),
        "per_gpu_train_batch_size": to("data.micro_batch", whole),
        "gradient_accumulation_steps": to("data.accumulate", whole),
        "learning_rate": to("optimizer.lr", float),
        "weight_decay": to("optimizer.weight_decay", float),
        "adam_beta1": values.beta(0),
        "adam_beta2": values.beta(1),
        "adam_epsilon": to("optimizer.eps", float),
        "max_grad_norm": values.clip,
        "lr_scheduler_type": values.scheduler,
        "lr_scheduler_kwargs": values.scheduler_options,
        "warmup_steps": values.warmup_steps,
        "warmup_ratio": values.warmup_ratio,
        "optim": values.optim,
        "bf16": values.precision("bf16"),
        "fp16": values.precision("fp16"),
        "gradient_checkpointing": values.recompute,
        "activation_checkpointing": values.recompute,
        "torch_compile": values.compile,
        "no_cuda": values.cpu,
        "logging_steps": to("training.log_every", values.count),
        "eval_strategy": values.every("eval", "training.validate_every"),
        "evaluation_strategy": values.every("eval", "training.validate_every"),
        "eval_steps": values.steps_of("eval", "training.validate_every"),
        "save_strategy": values.every("save", "checkpoint.every"),
        "save_steps": values.steps_of("save", "checkpoint.every"),
        "save_total_limit": to("checkpoint.keep", whole),
        "load_best_model_at_end": values.best,
        "report_to": values.report_to,
        "resume_from_checkpoint": values.resume,
        "run_name": values.run_name,
        "dataloader_num_workers": to("data.workers", int),
        "dataloader_pin_memory": to("data.pin_memory", truth),
        "dataloader_persistent_workers": to("data.persistent_workers", truth),
        "dataloader_prefetch_factor": to("data.prefetch", whole),
        "train_sampling_strategy": values.sampling,
    },
    no_effect={
        "average_tokens_across_devices": "the loss is always the mean over all tokens of all ranks",
        "use_cache": "models train without a key/value cache",
        "torch_empty_cache_steps": "the allocator keeps its blocks",
        "logging_strategy": "numbers are reported every training.log_every steps",
        "logging_first_step": "numbers are reported every training.log_every steps",
        "logging_dir": "TensorBoard's files are in the run's folder",
        "log_on_each_node": "one rank writes",
        "logging_nan_inf_filter": (
            "a loss that is not finite stops the run, or is skipped with training.nonfinite: skip"
        ),
        "include_num_input_tokens_seen": "tokens are always counted",
        "include_tokens_per_second": "it is always reported",
        "log_level": "the console shows progress; --quiet leaves the recipe out",
        "log_level_replica": "one rank writes",
        "disable_tqdm": "a terminal shows a progress line, a file plain lines",
        "project": "it configures a tracker's service",
        "trackio_space_id": "it configures a tracker's service",
        "trackio_bucket_id": "it configures a tracker's service",
        "trackio_static_space_id": "it configures a tracker's service",
        "per_device_eval_batch_size": "validation uses data.micro_batch",
        "per_gpu_eval_batch_size": "validation uses data.micro_batch",
        "prediction_loss_only": _EVAL,
        "eval_do_concat_batches": _EVAL,
        "eval_use_gather_object": _EVAL,
        "eval_accumulation_steps": _EVAL,
        "include_for_metrics": _EVAL,
        "include_inputs_for_metrics": _EVAL,
        "batch_eval_metrics": _EVAL,
        "bf16_full_eval": "validation computes as training does",
        "fp16_full_eval": "validation computes as training does",
        "metric_for_best_model": "only load_best_model_at_end uses it",
        "greater_is_better": "only load_best_model_at_end uses it",
        "save_on_each_node": "a checkpoint is one folder that all nodes share",
        "save_safetensors": "checkpoints are torch's distributed format; `meshpar export` writes safetensors",
        "overwrite_output_dir": "checkpoint.resume sets what happens to a folder that contains a run",
        "enable_jit_checkpoint": "SIGTERM always finishes the step, saves and stops",
        "restore_callback_states_from_checkpoint": "there are no callbacks; the loop's own state is always restored",
        "push_to_hub": _HUB,
        "hub_token": _HUB,
        "hub_private_repo": _HUB,
        "hub_model_id": _HUB,
        "hub_strategy": _HUB,
        "hub_always_push": _HUB,
        "hub_revision": _HUB,
        "dataloader_drop_last": (
            "the last batch of an epoch is filled up with samples that do not count: none is left out"
        ),
        "dataloader_in_order": _FIXED,
        "dataloader_multiprocessing_context": "workers come from a forkserver",
        "remove_unused_columns": "data.field, data.target_field and data.label_field name the columns to read",
        "label_names": "data.label_field names the label",
        "length_column_name": "lengths are measured",
        "gradient_checkpointing_kwargs": "recomputation is always non-reentrant",
        "activation_checkpointing_kwargs": "recomputation is always non-reentrant",
        "torch_compile_backend": "the pass Compile uses torch's default",
        "torch_compile_mode": "the pass Compile uses torch's default",
        "ddp_find_unused_parameters": "parameters without a gradient are named at the first step",
        "ddp_bucket_cap_mb": _DDP,
        "ddp_broadcast_buffers": _DDP,
        "ddp_static_graph": _DDP,
        "ddp_backend": "gloo for CPU tensors, and the device's own backend",
        "ddp_timeout": "the runtime sets the timeout",
        "skip_memory_metrics": "the memory in use is always reported",
        "do_train": "the command says what is done",
        "do_eval": "training.validate_every says when",
        "do_predict": "there is no prediction; `meshpar generate` completes texts",
        "local_rank": "the launcher sets it",
        "fp16_backend": "mixed precision is always FSDP2's",
        "half_precision_backend": "mixed precision is always FSDP2's",
        "fp16_opt_level": "mixed precision is always FSDP2's",
        "liger_kernel_config": "only use_liger_kernel uses it",
    },
    refused={
        "optim_args": (("", {}), _OPT),
        "optim_target_modules": (([],), _OPT),
        "label_smoothing_factor": (
            (0, 0.0),
            "the token loss has no smoothing; write an objective of your own, as a plugin",
        ),
        "tf32": (
            (False,),
            "set torch.set_float32_matmul_precision in your own program; a recipe computes in param_dtype",
        ),
        "use_liger_kernel": ((False,), "meshpar replaces no kernels; the pass Compile fuses"),
        "neftune_noise_alpha": ((0, 0.0), "embeddings get no noise"),
        "auto_find_batch_size": (
            (False,),
            "start with `meshpar train --find-batch-size`, which tries before it trains",
        ),
        "eval_delay": ((0, 0.0), "validation begins with training"),
        "eval_on_start": (
            (False,),
            "validation begins after the first steps; `training.validate_every: 1` shows the beginning",
        ),
        "save_only_model": (
            (False,),
            "a run cannot resume from a checkpoint without the optimizer; `meshpar export` writes the model alone",
        ),
        "ignore_data_skip": ((False,), "a resumed run uses each sample of the epoch once"),
        "full_determinism": ((False,), "set torch.use_deterministic_algorithms in your own program"),
        "data_seed": ((), "one seed orders the data and draws the weights"),
        "accelerator_config": (
            ({}, ""),
            "write its keys in meshpar's terms: data.shuffle, data.accumulate, data.workers",
        ),
        "deepspeed": ((), _DEEPSPEED),
        "group_by_length": ((False,), "batches are padded to their longest row, in the drawn order"),
        "past_index": ((-1,), "models that carry a state from batch to batch are not trained"),
        "tpu_num_cores": ((), _TPU),
        "jit_mode_eval": ((False,), "there is no such mode"),
        "use_mps_device": ((), "write device: mps"),
    },
)
"""Every key, in the order in which they are taken."""


def _distributed(value: object, result: Translated) -> str | None:
    kinds = {"FSDP": "fsdp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "MULTI_XPU": "ddp", "MULTI_HPU": "ddp", "NO": "no"}
    if str(value) not in kinds:
        raise ValueError(f"{value} is refused: there are {', '.join(kinds)}")
    result.known["kind"] = kinds[str(value)]
    if str(value) == "MULTI_CPU":
        result.put("device", "cpu")
    became = {"fsdp": "the sharding pass of fsdp_config", "ddp": "the pass Replicate", "no": "one process"}
    return f"{value} became {became[result.known['kind']]}"


def _precision(value: object, result: Translated) -> str:
    if str(value) == "fp8":
        result.before.insert(0, "Float8")  # before recomputation and compilation
        result.fsdp["mixed_precision"] = "bf16"
        return "fp8 became the pass Float8 and mixed_precision: bf16 of the data-parallel pass"
    if str(value).lower() in ("no", "false", "none"):
        return "has no effect: it is the default"
    result.fsdp["mixed_precision"] = str(value)
    return f"became mixed_precision: {value} of the data-parallel pass"


def _processes(value: object, result: Translated) -> str:
    result.known["ranks"] = whole(value)
    return f"{value} became the mesh's size"


def _machines(value: object, result: Translated) -> str:
    result.known["nodes"] = whole(value)
    return f"{value} became the mesh's nodes: replicas across them, where sharding is hybrid"


def _compile(value: object, result: Translated) -> str:
    backend = (
        str((value or {}).get("dynamo_backend", "NO")).upper()
        if isinstance(value, Mapping)
        else str(value or "NO").upper()
    )
    if backend == "NO":
        return "has no effect: it is the default"
    if backend != "INDUCTOR":
        raise ValueError(f"the backend {backend} is refused: the pass Compile uses torch's default, INDUCTOR")
    result.before.append("Compile")
    return "became the pass Compile"


def _parallelism(value: object, result: Translated) -> str:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected dp_replicate_size, dp_shard_size and tp_size, got {value!r}")
    sizes = {str(key).removeprefix("parallelism_config_"): size for key, size in value.items()}
    for name, size in sizes.items():
        if name not in PARALLELISM:
            raise ValueError(f"{name} is not known; there are {', '.join(PARALLELISM)}")
        if name in ("cp_size", "sp_size") and size not in (None, 1):
            raise ValueError(
                f"{name}: {size} is refused: accelerate's context parallelism is not translated; remove it and add "
                f"cp={size} to the mesh, which splits sequences by the pass ContextParallel"
            )
    axes = {name: sizes.get(f"{name}_size") for name in ("dp_replicate", "dp_shard", "tp")}
    result.known["axes"] = {name: whole(size) for name, size in axes.items() if size not in (None, 1)}
    mesh = ",".join(f"{name}={size}" for name, size in result.known["axes"].items())
    rest = [name for name in sizes if name not in ("dp_replicate_size", "dp_shard_size", "tp_size")]
    return f"became mesh: {mesh or 'one process'}" + (
        f"; {', '.join(rest)} have no effect: context parallelism is off" if rest else ""
    )


def _fp8(value: object, result: Translated) -> str:
    backend = str((value or {}).get("backend", "AO")) if isinstance(value, Mapping) else str(value)
    if backend.upper() != "AO":
        raise ValueError(f"the backend {backend} is refused: the pass Float8 computes with torchao; write backend: AO")
    return "has no effect: the pass Float8 has options of its own (recipe, skip)"


PARALLELISM = (
    "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy", "sp_size",
    "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation", "tp_handler", "cp_handler",
    "sp_handler",
)  # fmt: skip
"""The keys under ``parallelism_config``, with or without that prefix."""

ACCELERATE = Keys(
    handlers={
        "distributed_type": _distributed,
        "mixed_precision": _precision,
        "num_processes": _processes,
        "num_machines": _machines,
        "use_cpu": values.cpu,
        "fp8_config": _fp8,
        "dynamo_config": _compile,
        "parallelism_config": _parallelism,
    },
    no_effect={
        "machine_rank": _LAUNCHER,
        "main_process_ip": _LAUNCHER,
        "main_process_port": _LAUNCHER,
        "rdzv_backend": _LAUNCHER,
        "same_network": _LAUNCHER,
        "gpu_ids": "set CUDA_VISIBLE_DEVICES; each rank takes the device of its local rank",
        "main_training_function": "the recipe is what runs",
        "enable_cpu_affinity": _LAUNCHER,
    },
    refused={
        "compute_environment": (
            ("LOCAL_MACHINE",),
            "the job runs where it is started; `meshpar launch` renders SLURM and Kubernetes",
        ),
        "debug": (("", False, []), "an error inside a collective already names its module, placements and remedy"),
        "downcast_bf16": (("no", False), _TPU),
        "deepspeed_config": (({},), _DEEPSPEED),
        "megatron_lm_config": (({},), "Megatron-LM is another engine; TensorParallel and FullyShard do its part"),
        "mpirun_config": (({},), "start the ranks with torchrun, srun or `meshpar launch`"),
        "command_file": (("",), _TPU),
        "commands": (("", []), _TPU),
        "tpu_name": (("",), _TPU),
        "tpu_zone": (("",), _TPU),
        "tpu_use_cluster": ((False,), _TPU),
        "tpu_use_sudo": ((False,), _TPU),
        "tpu_vm": (("", []), _TPU),
        "tpu_env": (("", [], {}), _TPU),
    },
)  # fmt: skip
"""Every key of the top level but ``fsdp_config``."""


def choose_mesh(result: Translated) -> None:
    """Write the mesh that the keys mean, where the recipe has none."""
    if result.data.get("mesh"):
        return
    ranks, nodes, axes = result.known.get("ranks"), result.known.get("nodes", 1), result.known.get("axes", {})
    if axes:
        mesh, why = ",".join(f"{name}={size}" for name, size in axes.items()), "parallelism_config"
    elif result.strategy == "NO_SHARD":
        mesh, why = f"dp_replicate={ranks or -1}", "whole copies"
    elif result.strategy.startswith("HYBRID"):
        hybrid = (
            f"dp_replicate={nodes},dp_shard={ranks // nodes}" if ranks and nodes > 1 and ranks % nodes == 0 else "auto"
        )
        mesh, why = hybrid, "hybrid sharding: shards inside a node, replicas across"
    else:
        mesh, why = f"dp_shard={ranks or -1}", "full sharding"
    result.data["mesh"] = mesh
    result.note("mesh", f"{mesh} ({why})")
