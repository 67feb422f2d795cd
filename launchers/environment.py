"""The launchers' one reader of the environment. It loads no torch, which a script's rank may do without."""

from __future__ import annotations

import os
from collections.abc import Mapping

from meshpar.core.errors import LaunchError


def rank() -> int:
    """Return this process's rank, as torch's agent sets it."""
    return int(os.environ["RANK"])


def world_size() -> int:
    """Return the number of ranks of the job, as torch's agent sets it."""
    return int(os.environ["WORLD_SIZE"])


def starts_again() -> bool:
    """Return whether torch's agent starts the ranks again when one of them fails."""
    return os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"


def restart() -> int:
    """Return how often torch's agent has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def shutdown_s(otherwise: float) -> float:
    """Return the seconds between a signal to the ranks and SIGKILL."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", otherwise))


def series() -> str:
    """Return the scheduler's id of the job, which its starts share; empty without a scheduler that sets one."""
    return os.environ.get("MESHPAR_JOB_ID", "")


def numa_binding() -> str:
    """Return the mode in which the user wants ranks bound to NUMA nodes; empty: as the machine suggests."""
    return os.environ.get("MESHPAR_NUMA_BINDING", "")


def shares_devices() -> bool:
    """Return whether this launcher has some of the node's devices, and other replicas the others."""
    return "MESHPAR_FIRST_DEVICE" in os.environ


def threads() -> str:
    """Return the number of threads of a rank, empty unless the user sets it."""
    return os.environ.get("OMP_NUM_THREADS", "")


def allocator() -> str:
    """Return the settings of the device's allocator under torch's older name; empty unless the user sets them."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def kubeflow() -> dict[str, str]:
    """Return Kubeflow's variables, which have the names of torchrun's options, without their prefix."""
    return {name.removeprefix("PET_"): value for name, value in os.environ.items() if name.startswith("PET_")}


def srun() -> Mapping[str, str]:
    """Return the variables of a step of several srun tasks; empty outside of one, and under torchrun."""
    known = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
    if "RANK" in os.environ or not {"SLURM_PROCID", "SLURM_STEP_ID"} <= known.keys():
        return {}
    tasks = known.get("SLURM_STEP_NUM_TASKS", "1")
    if not tasks.isdigit():
        raise LaunchError(f"SLURM_STEP_NUM_TASKS is {tasks!r}; expected the number of tasks of this step")
    return known if int(tasks) > 1 else {}


def inherited(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is started, with ``changes``."""
    return {**os.environ, **changes}


def suggest(values: Mapping[str, str]) -> None:
    """Set variables that nobody has set, for this process and those that it starts."""
    for name, value in values.items():
        os.environ.setdefault(name, value)
