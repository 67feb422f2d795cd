"""Where ranks run: by the command line, Kubeflow's variables, or another launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypedDict, cast

from meshpar.core import runtime
from meshpar.core.errors import LaunchError
from meshpar.launchers.agent.failures import first_told
from meshpar.launchers.agent.local import Placement
from meshpar.launchers.agent.starting import adopt_srun


class _Options(TypedDict, total=False):
    """The fields of a :class:`Placement`, as the command line has them."""

    node_rank: int
    head: str
    restarts: int
    rejoin_s: int
    meeting_s: int
    run_id: str


class Given(_Options, total=False):
    """The options of the command line on where ranks run; options that were not given are absent."""

    nproc: str
    nodes: str


def adopted(given: Given, placement: Mapping[str, object]) -> str | None:
    """Return None unless another launcher started this rank; then srun's step, empty under torchrun."""
    if "nodes" in given:
        return None
    step = adopt_srun()
    if not runtime.launched():
        return None
    refuse_placement(placement)
    return step


def first_error_of(logs: Path, step: str) -> AbstractContextManager[None]:
    """Report the first error of all ranks of a step of srun; torchrun does so itself."""
    return first_told(logs / step, runtime.rank()) if step else nullcontext()


def said(placement: Mapping[str, object]) -> Given:
    """Return what was said of a placement."""
    return cast("Given", {name: value for name, value in placement.items() if value is not None})


def refuse_placement(placement: Mapping[str, object]) -> None:
    """Raise LaunchError if options that start ranks are given to a process that is a rank already."""
    names = ", ".join("--" + {"meeting_s": "wait"}.get(name, name).replace("_", "-") for name in said(placement))
    if names:
        raise LaunchError(
            f"{names}: this is already one of {runtime.world_size()} ranks that torchrun or srun started; leave "
            f"{names} out; to start ranks from one process on each node, also pass --nodes, --node-rank and --head"
        )


def from_kubeflow(options: Mapping[str, str]) -> Given:
    """Return the placement from Kubeflow's variables, see :func:`meshpar.launchers.environment.kubeflow`."""
    found: Given = {}
    if "NNODES" in options:
        found["nodes"] = options["NNODES"]
    if "NPROC_PER_NODE" in options:
        found["nproc"] = options["NPROC_PER_NODE"]
    if "NODE_RANK" in options:
        found["node_rank"] = int(options["NODE_RANK"])
    if "MASTER_ADDR" in options:
        found["head"] = f"{options['MASTER_ADDR']}:{options.get('MASTER_PORT', '29500')}"
    return found


def placed(given: Given, ranks_here: Callable[[int], int] | None = None) -> Placement:
    """Return the placement; ``ranks_here``: nodes -> ranks on this one by default; None: one per accelerator."""
    least, most = node_range(str(given.get("nodes", 1)))
    ranks = ranks_on_node(given, most, ranks_here)
    names = (
        {"restarts", "run_id"} if most == 1 else {"node_rank", "head", "restarts", "rejoin_s", "meeting_s", "run_id"}
    )
    more = cast("_Options", {name: value for name, value in given.items() if name in names})
    return Placement(ranks=ranks, nodes=most, least_nodes=least, **more)


def ranks_on_node(given: Given, nodes: int, ranks_here: Callable[[int], int] | None = None) -> int:
    """Return the number of ranks on this one of ``nodes`` nodes; for the rest see :func:`placed`."""
    nproc = str(given.get("nproc", "auto"))
    if nproc.isdigit() and int(nproc):
        return int(nproc)
    if nproc in ("auto", "gpu", "cpu"):
        return ranks_here(nodes) if ranks_here else accelerators()
    raise LaunchError(f"--nproc is {nproc!r}; expected a number of ranks on each node, or auto")


def node_range(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes of ``--nodes N`` or ``--nodes MIN:MAX``."""
    least, _, most = text.partition(":")
    if not least.isdigit() or not (most or least).isdigit() or not 1 <= int(least) <= int(most or least):
        raise LaunchError(
            f"--nodes is {text!r}; expected a number, or MIN:MAX for a job that continues with fewer nodes"
        )
    return int(least), int(most or least)


def accelerators() -> int:
    """Return the number of accelerators of this machine, 1 where there is none."""
    import torch

    return max(1, torch.accelerator.device_count())
