"""The keys of accelerate's YAML (1.15, FSDP versions 1 and 2), and where the mesh comes from when nobody writes one."""

from __future__ import annotations

from collections.abc import Mapping

from meshpar.launchers.converters import trainer_values as values
from meshpar.launchers.converters.keys import Keys, Translated, whole

_LAUNCHER = "the launcher's: give it to torchrun, srun or `meshpar launch`"
DEEPSPEED = "DeepSpeed is another engine; its stages 2 and 3 are FullyShard(reshard_after_forward=False) and FullyShard()"
_TPU = "TPUs are not supported"


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
    backend = str((value or {}).get("dynamo_backend", "NO")).upper() if isinstance(value, Mapping) else str(value or "NO").upper()
    if backend == "NO":
        return "has no effect: it is the default"
    if backend != "INDUCTOR":
        raise ValueError(f"the backend {backend} is refused: the pass Compile takes torch's own, INDUCTOR")
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
                f"{name}: {size} is refused: there is no context parallelism; TensorParallel(sequence_parallel=True) splits activations"
            )
    axes = {name: sizes.get(f"{name}_size") for name in ("dp_replicate", "dp_shard", "tp")}
    result.known["axes"] = {name: whole(size) for name, size in axes.items() if size not in (None, 1)}
    mesh = ",".join(f"{name}={size}" for name, size in result.known["axes"].items())
    rest = [name for name in sizes if name not in ("dp_replicate_size", "dp_shard_size", "tp_size")]
    return f"became mesh: {mesh or 'one process'}" + (f"; {', '.join(rest)} have no effect: context parallelism is off" if rest else "")


def _fp8(value: object, result: Translated) -> str:
    backend = str((value or {}).get("backend", "AO")) if isinstance(value, Mapping) else str(value)
    if backend.upper() != "AO":
        raise ValueError(f"the backend {backend} is refused: the pass Float8 computes with torchao; write backend: AO")
    return "has no effect: the pass Float8 has options of its own (recipe, skip)"


PARALLELISM = (
    "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy", "sp_size", "sp_backend", "sp_seq_length",
    "sp_seq_length_is_variable", "sp_attn_implementation", "tp_handler", "cp_handler", "sp_handler",
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
        "compute_environment": (("LOCAL_MACHINE",), "the job runs where it is started; `meshpar launch` renders SLURM and Kubernetes"),
        "debug": (("", False, []), "an error inside a collective already names its module, placements and remedy"),
        "downcast_bf16": (("no", False), _TPU),
        "deepspeed_config": (({},), DEEPSPEED),
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
        hybrid = f"dp_replicate={nodes},dp_shard={ranks // nodes}" if ranks and nodes > 1 and ranks % nodes == 0 else "auto"
        mesh, why = hybrid, "hybrid sharding: shards inside a node, replicas across"
    else:
        mesh, why = f"dp_shard={ranks or -1}", "full sharding"
    result.data["mesh"] = mesh
    result.note("mesh", f"{mesh} ({why})")
