"""``meshpar run``: a script or a recipe on the ranks of this node."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypedDict, cast

from meshpar import runtime
from meshpar.errors import LaunchError
from meshpar.launchers.agent import slurm
from meshpar.launchers.agent.failures import first_told
from meshpar.launchers.agent.local import Placement, launch, launch_recipe
from meshpar.launchers.agent.replicas import divided, launch_replicas
from meshpar.launchers.commands.train import check, run_as_rank, show
from meshpar.launchers.jobs import build
from meshpar.launchers.jobs.elected import replica_problems
from meshpar.launchers.jobs.worker import end_with_parent, run_code
from meshpar.launchers.recipes.recipe import Recipe, load_recipe
from meshpar.mesh import MeshSpec


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


def run(
    what: str,
    arguments: Sequence[str],
    placement: Mapping[str, object],
    *,
    module: bool = False,
    logs: Path | None = None,
    elastic: str | None = None,
) -> int:
    """Run a script, a module or a recipe, and return the exit code.

    If this process is already a rank (of torchrun, or of an srun with one task per rank), it runs as that rank. Otherwise torch's elastic
    agent starts the ranks in this process.

    Args:
        what: a file ending in ``.py``, a module's name, or a recipe.
        arguments: of the script; overrides of the recipe.
        placement: the given options of a :class:`Placement`. Kubeflow's variables
            (``PET_*``) set the others.
        module: whether ``what`` is a module's name.
        logs: the folder of logs; None: ``logs`` in the recipe's output folder, or ``runs/<script>/logs``.
        elastic: ``"replicas"``: each replica of a recipe's mesh is a job of its own, see :mod:`meshpar.launchers.agent.replicas`.

    Raises:
        MeshparError: the first failing rank's error.
    """
    kind = "module" if module else "script" if what.endswith(".py") else "recipe"
    if kind == "script" and not Path(what).is_file():
        raise LaunchError(f"there is no file {what}; give the path of a script, -m MODULE, or a recipe")
    given: Given = {**from_kubeflow(os.environ), **said(placement)}
    if elastic is not None:
        return _run_replicas(kind, what, arguments, given, logs, elastic)
    if "nodes" not in given:
        step = slurm.adopt()
        if runtime.launched():
            refuse_placement(placement)
            return _as_rank(kind, what, arguments, logs, step)
    if kind == "recipe":
        recipe = load_recipe(what, arguments)
        place = placed(given, recipe)
        check(recipe, place.ranks * place.nodes, build.machine_problems(recipe, place.ranks))
        if runtime.replica()[1]:
            end_with_parent()
        elif not place.node_rank:
            show(recipe)
        return launch_recipe(recipe, place, logs)
    return launch([kind, what, *arguments], placed(given, None), logs or _script_logs(kind, what), sys.stdout)


def _run_replicas(kind: str, what: str, arguments: Sequence[str], given: Given, logs: Path | None, elastic: str) -> int:
    """Run this node's replicas of a recipe."""
    if elastic != "replicas":
        raise LaunchError(f"--elastic is {elastic!r}; expected replicas (--nodes MIN:MAX is the job that restarts on fewer nodes)")
    if kind != "recipe":
        raise LaunchError(
            f"--elastic=replicas starts recipes; {what} is a {kind}: start one job for each replica, with TORCHFT_LIGHTHOUSE, and use "
            "meshpar.training.Replicas in its loop"
        )
    if odd := [f"--{name.replace('_', '-')}" for name in ("rejoin_s", "run_id", "meeting_s") if name in given]:
        raise LaunchError(f"--elastic=replicas does not take {', '.join(odd)}; set patience in the recipe instead")
    least, nodes = _nodes(str(given.get("nodes", 1)))
    if least != nodes:
        raise LaunchError("--elastic=replicas and --nodes MIN:MAX are two kinds of elastic jobs; give --nodes a number")
    head, node_rank = given.get("head", ""), given.get("node_rank", 0)
    if nodes > 1 and not (head or runtime.lighthouse()):
        raise LaunchError(f"{nodes} nodes require --head HOST:PORT, a free port of node 0, where the replicas' lighthouse listens")
    recipe = load_recipe(what, arguments)
    mesh = MeshSpec.placed(recipe.mesh, build.world_size_of(recipe), build.world_size_of(recipe) // nodes)
    division = divided(mesh, nodes, node_rank)
    one = recipe.model_copy(update={"mesh": str(division.mesh)})
    check(one, division.ranks, [*build.machine_problems(one, division.ranks), *replica_problems(recipe)])
    if not node_rank:
        show(recipe)
    return launch_replicas(recipe, division, head, node_rank, given.get("restarts"), logs)


def said(placement: Mapping[str, object]) -> Given:
    """Return what was said of a placement."""
    return cast("Given", {name: value for name, value in placement.items() if value is not None})


def refuse_placement(placement: Mapping[str, object]) -> None:
    """Raise LaunchError if options that start ranks are given to a process that is a rank already."""
    names = ", ".join("--" + {"meeting_s": "wait"}.get(name, name).replace("_", "-") for name in said(placement))
    if names:
        raise LaunchError(
            f"{names}: this is already one of {runtime.world_size()} ranks that torchrun or srun started; leave the option out, or, "
            "to start ranks from one process on each node, also pass --nodes, --node-rank and --head"
        )


def from_kubeflow(environment: Mapping[str, str]) -> Given:
    """Return the placement from Kubeflow's ``PET_`` variables, which have torchrun's options."""
    found: Given = {}
    if "PET_NNODES" in environment:
        found["nodes"] = environment["PET_NNODES"]
    if "PET_NPROC_PER_NODE" in environment:
        found["nproc"] = environment["PET_NPROC_PER_NODE"]
    if "PET_NODE_RANK" in environment:
        found["node_rank"] = int(environment["PET_NODE_RANK"])
    if "PET_MASTER_ADDR" in environment:
        found["head"] = f"{environment['PET_MASTER_ADDR']}:{environment.get('PET_MASTER_PORT', '29500')}"
    return found


def placed(given: Given, recipe: Recipe | None) -> Placement:
    """Return the placement from the given options, a recipe's mesh and this machine's accelerators.

    Raises:
        LaunchError: a number cannot be read.
    """
    least, most = _nodes(str(given.get("nodes", 1)))
    nproc = str(given.get("nproc", "auto"))
    if nproc.isdigit() and int(nproc):
        ranks = int(nproc)
    elif nproc in ("auto", "gpu", "cpu"):
        ranks = _ranks_here(recipe, most)
    else:
        raise LaunchError(f"--nproc is {nproc!r}; expected a number of ranks on each node, or auto")
    names = {"restarts", "run_id"} if most == 1 else {"node_rank", "head", "restarts", "rejoin_s", "meeting_s", "run_id"}
    more = cast("_Options", {name: value for name, value in given.items() if name in names})
    return Placement(ranks=ranks, nodes=most, least_nodes=least, **more)


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdigit() or not (most or least).isdigit() or not 1 <= int(least) <= int(most or least):
        raise LaunchError(f"--nodes is {text!r}; expected a number, or MIN:MAX for a job that continues with fewer nodes")
    return int(least), int(most or least)


def _ranks_here(recipe: Recipe | None, nodes: int) -> int:
    import torch

    devices = max(1, torch.accelerator.device_count())
    if recipe is None:
        return devices
    if nodes == 1:
        return build.world_size_of(recipe)
    if build.device_type(recipe) != "cpu":
        return devices
    world = build.world_size_of(recipe)
    if world % nodes:
        raise LaunchError(f"the mesh {recipe.mesh} has {world} ranks, which {nodes} nodes cannot share evenly; give --nproc")
    return world // nodes


def _as_rank(kind: str, what: str, arguments: Sequence[str], logs: Path | None, step: str) -> int:
    recipe = load_recipe(what, arguments) if kind == "recipe" else None
    folder = logs or (_script_logs(kind, what) if recipe is None else recipe.folder / "logs")
    with first_told(folder / step, runtime.rank()) if step else nullcontext():
        if recipe is None:
            return run_code(kind, what, arguments)
        if runtime.is_main():
            show(recipe)
        return run_as_rank(recipe) or 0


def _script_logs(kind: str, what: str) -> Path:
    return Path("runs") / (Path(what).stem if kind == "script" else what.rpartition(".")[2]) / "logs"
