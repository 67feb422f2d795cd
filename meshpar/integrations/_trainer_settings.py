"""Settings of TrainingArguments and of a plan with which a trainer on a mesh would not train as one process."""

# Where transformers is not installed, pyright reads this file in its place.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from transformers import TrainingArguments

from meshpar import MeshparError, Plan, Role
from meshpar.integrations._data_ranks import find_axis


class _Setting(NamedTuple):
    """The values of one of TrainingArguments that a mesh takes, and what to do instead of the others."""

    expected: tuple[object, ...]
    remedy: str


_BY_ELEMENT = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
_NO_DDP = _Setting((None,), "drop it, because no module is wrapped in DistributedDataParallel")
_IN_PLAN = "drop it, and let the plan's passes divide the model"
_KEEPS_WEIGHTS = _Setting((False,), "use bf16=True, which rounds no weight")
_SETTINGS = {
    "fsdp": _Setting((None, "", False, []), _IN_PLAN),
    "deepspeed": _Setting((None,), _IN_PLAN),
    "parallelism_config": _Setting((None,), _IN_PLAN),
    "optim": _Setting(_BY_ELEMENT, "use one of them: their step on a shard is that on the whole tensor"),
    "optim_target_modules": _Setting((None,), "drop it, because its optimizers factor whole matrices"),
    "average_tokens_across_devices": _Setting((True,), "set it, so that each token counts once on any mesh"),
    "fp16": _Setting((False,), "set bf16=True instead"),
    "fp16_full_eval": _KEEPS_WEIGHTS,
    "bf16_full_eval": _KEEPS_WEIGHTS,
    "use_liger_kernel": _Setting((False, None), "drop it, because it replaces modules that passes have divided"),
    "auto_find_batch_size": _Setting((False,), "set per_device_train_batch_size: one rank alone may lack memory"),
    "train_sampling_strategy": _Setting(("random", "sequential"), "use one of these"),
    "accelerator_config.split_batches": _Setting((False,), "set per_device_train_batch_size to a data rank's samples"),
    "push_to_hub": _Setting((False,), "call save_model, and upload the folder"),
    "save_on_each_node": _Setting((False,), "write output_dir to a file system that all nodes share"),
    "enable_jit_checkpoint": _Setting((False,), "drop it, because its signal reaches ranks in different steps"),
    "debug": _Setting(([], "", None), "drop it, because it reads parameters, of which a rank has a part"),
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _Setting((None, False), _NO_DDP.remedy),
    "ddp_static_graph": _NO_DDP,
    "predict_with_generate": _Setting((False, None), "drop it, and generate after training"),
    "batch_sampler": _Setting(("batch_sampler",), "drop it, because others choose among the samples of one rank"),
    "vllm_mode": _Setting(("server",), "set it, and start `vllm serve`, because no rank has whole weights"),
    "sync_ref_model": _Setting((False, None), "drop it, because the reference model is frozen on the mesh"),
}
"""Of TrainingArguments, those of which some values would train in other ways than one process."""


def check_plan(plan: Plan) -> None:
    """Refuse a plan that divides sequences."""
    if not dist.is_initialized():
        raise MeshparError("no process group is open; wrap the script in `with meshpar.distributed():`")
    if (axis := find_axis(plan, Role.POSITIONS)) is not None:
        raise MeshparError(
            f"axis {axis!r} divides sequences, and Trainer's batches and losses are of whole ones; expected axes of "
            f"samples, features and layers: use a mesh without {axis}, or a loop of your own with par.split"
        )


def check_arguments(arguments: TrainingArguments) -> None:
    """Refuse the settings with which a mesh would not train as one process."""
    nested = vars(arguments.accelerator_config).items()
    settings = vars(arguments) | {f"accelerator_config.{name}": value for name, value in nested}
    if not settings.get("use_vllm"):
        settings.pop("vllm_mode", None)
    for name, setting in _SETTINGS.items():
        value = settings.get(name, setting.expected[0])
        value = getattr(value, "value", value)
        if value not in setting.expected:
            expected = " or ".join(map(repr, setting.expected[-3:] if name != "optim" else setting.expected))
            raise MeshparError(f"{name} is {value!r}; on a mesh expected {expected}: {setting.remedy}")
