"""Run a task of a SLURM step as a rank: convert srun's variables to torchrun's."""

from __future__ import annotations

import os
import re

from meshpar.errors import LaunchError

_PORTS, _FIRST_PORT = 10_000, 20_000


def adopt() -> str:
    """Set RANK, WORLD_SIZE and the others from srun's variables, and return an id of this start of the step.

    Does nothing outside a step of several tasks, or under torchrun, and returns an empty text.

    Raises:
        LaunchError: a variable is missing or the node list cannot be read.
    """
    known = os.environ
    if "RANK" in known or "SLURM_PROCID" not in known or "SLURM_STEP_ID" not in known or int(known.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return ""
    try:
        nodes = known["SLURM_STEP_NODELIST"]
        per_node = known["SLURM_STEP_TASKS_PER_NODE"]
        job = int(known["SLURM_JOB_ID"]) + int(known["SLURM_STEP_ID"])
        values = {
            "RANK": known["SLURM_PROCID"],
            "WORLD_SIZE": known["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": known["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": re.split(r"[(,]", per_node)[0],
            "MASTER_ADDR": first_node(nodes),
            "MASTER_PORT": str(_FIRST_PORT + job % _PORTS),
        }
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"this is a task of a SLURM step, but {error} is missing or cannot be read; start it with srun, or with torchrun"
        ) from error
    for name, value in values.items():
        os.environ.setdefault(name, value)
    return f"{known['SLURM_JOB_ID']}.{known['SLURM_STEP_ID']}-{known.get('SLURM_RESTART_COUNT', '0')}"


def first_node(text: str) -> str:
    """Return the first host of a SLURM node list: ``n[01-04,7],m1`` -> ``n01``, ``rack[1-2]n[3,5]`` -> ``rack1n3``."""
    head = re.match(r"(?:[^\[\],]|\[\d[^\[\]]*\])+(?=,|$)", text)
    if head is None:
        raise LaunchError(f"cannot read SLURM node list {text!r}")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head[0])
