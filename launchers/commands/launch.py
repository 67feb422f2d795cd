"""``meshpar run``, ``launch``, ``jobs``, ``doctor``, ``mesh``; the command line calls :func:`register`."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand

from meshpar.core.errors import LaunchError
from meshpar.launchers.commands import Commands
from meshpar.process.imports import quick_imports

_DOCTOR = "meshpar.launchers.doctor.examine"
_PASS_ON = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def register(app: Commands) -> None:
    """Add the commands to ``app``."""
    app.command(context_settings=_PASS_ON)(run)
    app.command(cls=_OfTarget)(launch)
    group = Commands(no_args_is_help=True, help="List launched jobs, print their state and output, cancel them.")
    for name, command in (("ls", jobs_ls), ("status", jobs_status), ("logs", jobs_logs), ("cancel", jobs_cancel)):
        group.command(name)(command)
    app.add_typer(group, name="jobs")
    app.command()(doctor)
    app.command()(mesh)


class _OfTarget(TyperCommand):
    """``meshpar launch TARGET --help`` also lists the target's options."""

    # click's, or the one inside of newer typer
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        ctx.meta["words"] = list(args)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - the same
        from meshpar.core import registry

        for name in registry.names(registry.LAUNCHERS):
            if name in ctx.meta.get("words", ()):
                doc = inspect.getdoc(registry.plugin(registry.LAUNCHERS, name)) or ""
                options = doc.partition("Attributes:")[2].strip("\n")
                formatter.write(f"\nOptions of {name}, as -o KEY=VALUE:\n{options}\n")


_ARGUMENTS = "The recipe's KEY=VALUE, or the script's arguments, after -- if they look like options."
What = Annotated[str, Argument(metavar="SCRIPT_OR_RECIPE", help="A .py file, a YAML file, or the name of a recipe.")]
Arguments = Annotated[list[str] | None, Argument(metavar="[ARGS]...", help=_ARGUMENTS, show_default=False)]
Ranks = Annotated[str | None, Option(help="Ranks on this node; default: the recipe's mesh, or one per accelerator.")]
Nodes = Annotated[str | None, Option(help="Number of nodes; MIN:MAX: continue with fewer nodes when some are lost.")]
NodeRank = Annotated[int | None, Option(help="Number of this node, from 0, in whose order ranks are numbered.", min=0)]
Head = Annotated[str | None, Option(help="HOST:PORT of node 0; for replicas also a FOLDER/FILE that all nodes see.")]
Module = Annotated[bool, Option("-m", "--module", help="SCRIPT_OR_RECIPE is a module's name.")]


def run(
    what: What,
    arguments: Arguments = None,
    nproc: Ranks = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    head: Head = None,
    restarts: Annotated[int | None, Option(help="Number of restarts of failed ranks.", min=0)] = None,
    elastic: Annotated[str | None, Option(help="replicas: a lost one (dp_replicate) costs the others a step.")] = None,
    rejoin_s: Annotated[int | None, Option(help="With MIN:MAX: seconds until a silent node is lost.", min=1)] = None,
    wait: Annotated[int | None, Option(help="Seconds for all nodes to connect; default: 900.", min=1)] = None,
    run_id: Annotated[
        str | None, Option(help="Id of this start: equal on all nodes, different for each start.")
    ] = None,
    logs: Annotated[Path | None, Option(help="Folder of logs, one per rank; default: runs/NAME/logs.")] = None,
    module: Module = False,
) -> int:
    """Run a script or a recipe on ranks of this node.

    Starts the ranks with torch's elastic agent. Inside torchrun or srun, the process becomes one of their ranks.
    """
    placement = {
        "nproc": nproc, "nodes": nodes, "node_rank": node_rank, "head": head, "restarts": restarts,
        "rejoin_s": rejoin_s, "meeting_s": wait, "run_id": run_id,
    }  # fmt: skip
    return run_work(what, arguments or [], placement, module=module, logs=logs, elastic=elastic)


def run_work(
    what: str,
    arguments: Sequence[str],
    placement: Mapping[str, object],
    *,
    module: bool = False,
    logs: Path | None = None,
    elastic: str | None = None,
) -> int:
    """Run a script, module or recipe on ranks of this node, or as the rank that this process is."""
    with quick_imports():
        from meshpar.core import runtime
        from meshpar.launchers.agent import failures, local, terms
        from meshpar.launchers.jobs.worker import run_code

    kind = "module" if module else "script" if what.endswith(".py") else "recipe"
    if kind == "script" and not Path(what).is_file():
        raise LaunchError(f"there is no file {what}; give the path of a script, -m MODULE, or a recipe")
    options = {**local.from_kubeflow(terms.kubeflow()), **local.drop_unset(placement)}
    if kind == "recipe":
        # loads all that a job may use, which a script does without
        from meshpar.launchers.commands.train import run_recipe

        return run_recipe(what, arguments, options, placement, logs, elastic)
    if elastic is not None:
        raise LaunchError(
            f"--elastic starts recipes; {what} is a {kind}: start one job for each replica, with TORCHFT_LIGHTHOUSE, "
            "and use meshpar.training.Replicas in its loop"
        )
    logs = logs or Path("runs") / (Path(what).stem if kind == "script" else what.rpartition(".")[2]) / "logs"
    if (step := local.adopt_rank(options, placement)) is not None:
        with failures.tell_first(logs, runtime.rank(), step):
            return run_code(kind, what, arguments)
    return local.launch(
        {"kind": kind, "what": what, "arguments": tuple(arguments)}, local.place_ranks(options), logs, sys.stdout
    )


def launch(
    target: Annotated[
        str, Argument(help="slurm, kubernetes, trainjob, skypilot, or another plugin of meshpar.launchers.")
    ],
    what: What,
    arguments: Arguments = None,
    nodes: Annotated[int, Option(help="Number of nodes.", min=1)] = 1,
    gpus_per_node: Annotated[int, Option(help="Accelerators per node; 0: run on CPUs, with --nproc.", min=0)] = 8,
    nproc: Annotated[int | None, Option(help="Ranks per node; default: one per accelerator.", min=1)] = None,
    mesh: Annotated[
        str | None,
        Option(help="Mesh, instead of the recipe's. auto (or auto,tp=8): shards inside a node, replicas across nodes."),
    ] = None,
    elastic: Annotated[
        str,
        Option(help="nodes: restart on fewer nodes when some are lost. replicas: a lost one costs the others a step."),
    ] = "",
    preflight: Annotated[str | None, Option(help="Effect of the doctor's findings: warn, fail, off.")] = None,
    option: Annotated[
        list[str] | None, Option("-o", "--option", help="An option of the target: -o partition=gpu")
    ] = None,
    submit: Annotated[bool, Option("--submit", help="Submit the job.")] = False,
    module: Module = False,
    check: Annotated[str | None, Option(metavar="ARGS", help="First run the script here: --check=--dry-run")] = None,
) -> None:
    """Render a script or a recipe as a job of SLURM, Kubernetes, ...

    Writes the job file, the mesh, the resolved recipe and the command to a folder of this launch in the run's folder.
    """
    with quick_imports():
        from meshpar.launchers.targets.launching import LaunchRequest, launch_job

    asked = LaunchRequest(target, what, arguments or [], nodes=nodes, gpus_per_node=gpus_per_node, nproc=nproc)
    asked = replace(asked, mesh=mesh, elastic=elastic, preflight=preflight, options=option or [], submit=submit)
    print(launch_job(replace(asked, module=module, check=check)))


Root = Annotated[Path, Argument(help="Folder with the folders of runs.")]
Launch = Annotated[Path, Argument(help="A run's folder (its newest launch), or a launch's: runs/NAME/launches/001.")]


def jobs_ls(root: Root = Path("runs")) -> None:
    """List the launches of all runs, with the state of their jobs."""
    from meshpar.launchers.targets.launching import list_jobs

    print(list_jobs(root))


def jobs_status(launch: Launch) -> None:
    """Print the state of a job, and its engine's description of the job."""
    from meshpar.launchers.targets.launching import job_status

    print(job_status(launch))


def jobs_logs(
    launch: Launch, follow: Annotated[bool, Option("-f", "--follow", help="Print new output until Ctrl-C.")] = False
) -> int:
    """Print the output of a job."""
    from meshpar.launchers.targets.launching import show_logs

    return show_logs(launch, follow=follow)


def jobs_cancel(launch: Launch) -> None:
    """Cancel a job."""
    from meshpar.launchers.targets.launching import cancel_job

    print(cancel_job(launch))


def doctor(
    mesh: Annotated[str, Option(help="Mesh to check; auto: shards inside a node, replicas across nodes.")] = "auto",
    folder: Annotated[
        Path | None, Option(help="Checkpoint folder to check: shared by all hosts, and writable.")
    ] = None,
    profile: Annotated[Path | None, Option(help="File for a measured profile for `meshpar plan --hardware`.")] = None,
    wait: Annotated[float, Option(help="Seconds within which all ranks must connect.", min=1)] = 60.0,
    nproc: Ranks = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    head: Head = None,
) -> int:
    """Check the machines and the network before training.

    Under torchrun or srun, the command uses their ranks. Otherwise it starts its own ranks, like meshpar run.
    """
    with quick_imports():
        from meshpar.launchers.agent import local
        from meshpar.launchers.jobs.worker import run_code

    placement = {"nproc": nproc, "nodes": nodes, "node_rank": node_rank, "head": head}
    arguments = [f"mesh={mesh}", f"wait={wait}"]
    arguments += [f"folder={folder.absolute()}"] if folder is not None else []
    arguments += [f"profile={profile.absolute()}"] if profile is not None else []
    options = local.drop_unset(placement)
    if local.adopt_rank(options, placement) is not None:
        return run_code("module", _DOCTOR, arguments)
    with tempfile.TemporaryDirectory(prefix="meshpar-doctor-") as logs:
        # Rank 0 prints the report; the exit code of findings is no failure of a rank.
        findings = Path(logs) / "findings"
        work = {"kind": "module", "what": _DOCTOR, "arguments": (*arguments, f"findings={findings}")}
        try:
            code = local.launch(work, local.place_ranks({**options, "meeting_s": int(wait)}), Path(logs), sys.stdout)
        except LaunchError as error:
            raise LaunchError(f"the doctor could not finish: {error}") from error
        return 1 if findings.exists() else code


def mesh(
    text: Annotated[str, Argument(metavar="MESH", help="dp_replicate=2,dp_shard=4,tp=2")],
    nodes: Annotated[int, Option(help="Number of nodes.", min=1)] = 1,
    svg: Annotated[Path | None, Option(help="Also write the drawing to this SVG file.")] = None,
) -> None:
    """Draw a mesh: the node of each rank, the groups of each axis, and the axes that cross nodes."""
    from meshpar.core.errors import MeshError
    from meshpar.core.mesh import MeshSpec
    from meshpar.state.drawing import mesh_svg, mesh_text

    spec = MeshSpec(text)
    if -1 in spec.axes.values():
        raise MeshError(f"mesh {spec} has an axis of size -1; give every size to draw it")
    if spec.size % nodes:
        raise MeshError(f"{spec.size} ranks do not divide evenly among {nodes} nodes; change the mesh or --nodes")
    print(mesh_text(spec, spec.size // nodes))
    if svg is not None:
        svg.write_text(mesh_svg(spec, spec.size // nodes), encoding="utf-8")
        print(f"\ndrawing: {svg}")
