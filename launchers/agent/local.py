"""Start the ranks of this machine with torch's elastic agent in this process, and report how they ended."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.numa.binding import AffinityMode, NumaOptions

from meshpar.core.errors import LaunchError, MeshparError, RepeatedFailureError
from meshpar.launchers import environment
from meshpar.launchers.agent.check_in import checked_in, children, reach_head, told_while_joining
from meshpar.launchers.agent.failures import (
    IN_VAIN,
    exit_code,
    first_error,
    forget_left,
    in_vain,
    record_kills,
    recorded,
)
from meshpar.launchers.agent.rank_logs import Shown, log_file, start_id
from meshpar.launchers.agent.terms import (
    COMPLETE,
    MEETING_S,
    NO_RESTART,
    NO_USE,
    OTHERS_S,
    SHUTDOWN_S,
    STOPPED,
    RankTask,
    at_work,
)
from meshpar.process.signals import STOPPING, heard, put_back

if TYPE_CHECKING:
    from meshpar.launchers.recipes.recipe import Recipe  # loads all that a job may use, which a script does without

_SHUTDOWN_AFTER_FAILURE_S = 30  # torch's own


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Describe the ranks of this node and the other nodes of the job.

    Attributes:
        ranks: number of ranks on this node.
        nodes: largest number of nodes of the job.
        least_nodes: smallest number of nodes of an elastic job; equal to ``nodes`` in any other job.
        node_rank: number of this node, from 0. Ranks are numbered in this order. None in an elastic job, which has no
            such order.
        head: ``host:port`` on node 0, to which all nodes connect; empty for one node.
        restarts: how many times the ranks restart after a failure. It is 0 in a job of several fixed nodes, which
            cannot restart together: there the scheduler restarts the whole job.
        run_id: id of this start, equal on all nodes and different for each start of the job.
        meeting_s: seconds within which all nodes must connect.
        rejoin_s: for an elastic job: seconds without an answer after which a node is lost, and then seconds in which
            others may join.
    """

    ranks: int
    nodes: int = 1
    least_nodes: int = 1
    node_rank: int | None = None
    head: str = ""
    restarts: int = 0
    run_id: str = ""
    meeting_s: int = MEETING_S
    rejoin_s: int = 15

    def __post_init__(self) -> None:
        if self.nodes == 1:
            return
        if not self.head:
            raise LaunchError(f"{self.nodes} nodes require --head HOST:PORT, a free port of node 0")
        if ":" not in self.head or not self.head.rpartition(":")[2].isdigit():
            raise LaunchError(f"--head is {self.head!r}; expected HOST:PORT, a free port of node 0")
        if self.elastic:
            return
        if self.node_rank is None or not 0 <= self.node_rank < self.nodes:
            wanted = f"--node-rank from 0 to {self.nodes - 1}"
            raise LaunchError(f"node rank is {self.node_rank}; each of {self.nodes} nodes requires its own: {wanted}")
        if self.restarts:
            raise LaunchError(
                "--restarts in a job of several nodes requires --nodes MIN:MAX (elastic); otherwise the scheduler "
                "restarts the job"
            )

    @property
    def elastic(self) -> bool:
        """True where the job continues with fewer nodes when some are lost."""
        return self.least_nodes < self.nodes


def _patient(shutdown: Callable[..., None]) -> Callable[..., None]:
    """Return the agent's way to end ranks, with as much time after a signal as torch 2.13 asks for."""

    def ended(agent: LocalElasticAgent, *signals: signal.Signals) -> None:
        PContext.close.__defaults__ = (None, SHUTDOWN_S if signals else _SHUTDOWN_AFTER_FAILURE_S)
        shutdown(agent, *signals)

    return ended


if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:
    LocalElasticAgent._shutdown = _patient(LocalElasticAgent._shutdown)  # type: ignore[method-assign]


def launch_local(recipe: Recipe, ranks: int) -> int:
    """Run a recipe on ``ranks`` processes of this machine, see :func:`launch_recipe`."""
    return launch_recipe(recipe, Placement(ranks=ranks))


def launch_recipe(recipe: Recipe, placement: Placement, logs: Path | None = None) -> int:
    """Run a recipe's ranks on this node, see :func:`launch`."""
    return launch({"kind": "recipe", "recipe": recipe.sent()}, placement, logs or recipe.folder / "logs", sys.stderr)


def launch(work: Mapping[str, Any], placement: Placement, logs: Path, console: TextIO) -> int:
    """Run this node's ranks until they end; return 0, or 128 + the signal that stopped them."""
    with tempfile.TemporaryDirectory(prefix="meshpar-") as folder, _signals_restored(), ExitStack() as stack:
        placement = stack.enter_context(_identified(placement))
        logs = (logs / placement.run_id).absolute()
        logs.mkdir(parents=True, exist_ok=True)
        terminal = console.isatty() and placement.nodes == 1
        _set_environment(placement)
        task = RankTask(
            logs=logs,
            scratch=Path(folder),
            terminal=terminal,
            most_ranks=placement.nodes * placement.ranks if placement.elastic else 0,
            **work,
        )
        stack.enter_context(at_work(task)).write()
        config = _config(placement, folder)
        if not terminal and not placement.node_rank:
            stack.enter_context(Shown(log_file(logs, 0), console))
        try:
            elastic_launch(config, sys.executable)("-m", "meshpar.launchers.jobs.worker", str(logs), folder)
        except ChildFailedError as failed:
            _ignore_signals()
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            stopped = STOPPED & set(codes.values())
            if stopped and set(codes.values()) <= STOPPED | {
                -signal.SIGTERM
            }:  # the agent ends the others when one has gone
                if in_vain(logs):
                    (logs / NO_RESTART).touch()
                return max(stopped)
            record_kills(logs, codes)
            if placement.nodes > 1:
                time.sleep(OTHERS_S)
            raise _noted(first_error(logs, codes), logs) from None
        except SignalException as stop:
            _ignore_signals()
            _end_ranks(logs)
            if recorded(logs):
                raise _noted(first_error(logs, {}), logs) from None
            return 128 + int(stop.sigval)
    forget_left(logs)
    (logs / COMPLETE).touch()
    return 0


@contextmanager
def _identified(placement: Placement) -> Iterator[Placement]:
    """Yield the placement with the start's id, equal on all nodes; fixed nodes first connect to agree on one."""
    if placement.nodes == 1:
        yield replace(placement, run_id=placement.run_id or start_id())
        return
    if placement.elastic:
        reach_head(placement.head, placement.node_rank, placement.meeting_s)
        with told_while_joining(placement.head, f"{placement.least_nodes} to {placement.nodes}", placement.meeting_s):
            yield replace(placement, run_id=placement.run_id or "elastic")
        return
    assert placement.node_rank is not None
    with checked_in(
        placement.head, placement.node_rank, placement.nodes, placement.run_id, placement.meeting_s
    ) as run_id:
        yield replace(placement, run_id=run_id)


def _noted(error: MeshparError, logs: Path) -> MeshparError:
    """Write a marker file for the scheduler if another start is useless: it may see another node's exit code."""
    if in_vain(logs) and exit_code(error) != NO_USE:
        error = RepeatedFailureError(f"{error}\n{IN_VAIN}")
    if exit_code(error) == NO_USE:
        (logs / NO_RESTART).touch()
    return error


def _config(placement: Placement, folder: str) -> LaunchConfig:
    """Return the agent's settings; ``folder`` receives the agent's own files."""
    meeting: dict[str, Any]
    if placement.nodes == 1:
        meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    elif placement.elastic:
        configs = {
            "join_timeout": placement.meeting_s,
            "last_call_timeout": placement.rejoin_s,
            "keep_alive_interval": -(-placement.rejoin_s // 3),
            "keep_alive_max_attempt": 3,
        }
        if placement.node_rank is not None:
            configs["is_host"] = int(placement.node_rank == 0)
        meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": placement.head, "rdzv_configs": configs}
    else:
        # c10d's rendezvous sorts host names as text; the static one keeps the order of the nodes, which is the mesh's.
        configs = {"rank": placement.node_rank or 0, "timeout": placement.meeting_s}
        meeting = {"rdzv_backend": "static", "rdzv_endpoint": placement.head, "rdzv_configs": configs}
    return LaunchConfig(
        **_numa(placement.ranks),
        min_nodes=placement.least_nodes if placement.elastic else placement.nodes,
        max_nodes=placement.nodes,
        nproc_per_node=placement.ranks,
        run_id=placement.run_id,
        max_restarts=placement.restarts,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        signals_to_handle=",".join(signal_.name for signal_ in heard()),
        **meeting,
    )


def _numa(ranks: int) -> dict[str, Any]:
    """Return torchrun's --numa-binding: as the environment sets it, or by node if each rank has its own GPU."""
    mode = environment.numa_binding()
    if not mode:
        whole = (
            sys.platform == "linux"
            and len(os.sched_getaffinity(0)) == os.cpu_count()
            and shutil.which("numactl") is not None
        )
        if (
            not whole
            or environment.shares_devices()
            or not torch.cuda.is_available()
            or torch.cuda.device_count() != ranks
        ):
            return {}
        return {"numa_options": NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)}
    modes = [affinity.value for affinity in AffinityMode]
    if mode not in (*modes, "off"):
        raise LaunchError(f"MESHPAR_NUMA_BINDING is {mode!r}; expected one of {', '.join(modes)}, off")
    return {} if mode == "off" else {"numa_options": NumaOptions(affinity_mode=AffinityMode(mode))}


def _set_environment(placement: Placement) -> None:
    """Set the environment that the ranks inherit, where the user has not."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    suggested = {
        # "Gloo connectFullMesh failed": with torch 2.13's default, restarted ranks reuse the failed ranks' TCPStore,
        # read stale addresses there and fail every time. With this setting each start makes a new store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(max(1, cores // placement.ranks)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
    }
    if torch.cuda.is_available() and not environment.allocator():
        # Blocks of gathered parameters and of activations differ in size: segments of fixed size fragment.
        suggested["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    environment.suggest(suggested)
    # torch's own reports of a failure would repeat the rank's error, which the caller prints once.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        put_back(before)


def _ignore_signals() -> None:
    """Ignore signals after the ranks ended, so that a scheduler which ends the job now does not cut off the report."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _end_ranks(mark: Path) -> None:
    """Kill ranks, which have ``mark`` in their command lines, that did not stop in time."""
    for child in children(mark):
        with suppress(OSError):  # it may be gone by now
            os.kill(child, signal.SIGKILL)
