"""Where ranks run, and torch's elastic agent in this process, which starts and ends the ranks of this machine."""

from __future__ import annotations

import codecs
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
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

from meshpar.core import runtime
from meshpar.core.errors import LaunchError, MeshparError, RepeatedFailureError
from meshpar.launchers.agent import failures, terms
from meshpar.launchers.agent.check_in import announce_joining, check_in_nodes, children, reach_head
from meshpar.launchers.agent.terms import MEETING_S, RankTask, at_work, log_file, start_id
from meshpar.process.waiting import STOPPING, heard, put_back

if TYPE_CHECKING:
    from meshpar.launchers.recipes.recipe import Recipe  # loads all that a job may use, which a script does without

_SHUTDOWN_AFTER_FAILURE_S = 30  # torch's own


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The ranks of this node and the other nodes of the job, as the options of ``meshpar run`` say."""

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
        return self.least_nodes < self.nodes


Given = Mapping[str, Any]
"""The options of the command line on where ranks run: fields of a :class:`Placement`, ``nproc`` and ``nodes``."""


def adopt_rank(given: Given, placement: Mapping[str, object]) -> str | None:
    """Return None unless another launcher started this rank, which starts none; then srun's step, or an empty text."""
    if "nodes" in given:
        return None
    step = terms.adopt_srun()
    if not runtime.launched():
        return None
    names = ", ".join("--" + {"meeting_s": "wait"}.get(name, name).replace("_", "-") for name in drop_unset(placement))
    if names:
        raise LaunchError(
            f"{names}: this is already one of {runtime.world_size()} ranks that torchrun or srun started; leave "
            f"{names} out; to start ranks from one process on each node, also pass --nodes, --node-rank and --head"
        )
    return step


def drop_unset(placement: Mapping[str, object]) -> Given:
    return {name: value for name, value in placement.items() if value is not None}


def from_kubeflow(options: Mapping[str, str]) -> Given:
    """Return the placement from Kubeflow's variables, see :func:`meshpar.launchers.agent.terms.kubeflow`."""
    names = {"NNODES": "nodes", "NPROC_PER_NODE": "nproc", "NODE_RANK": "node_rank"}
    placement: dict[str, Any] = {name: options[key] for key, name in names.items() if key in options}
    if "node_rank" in placement:
        placement["node_rank"] = int(placement["node_rank"])
    if "MASTER_ADDR" in options:
        placement["head"] = f"{options['MASTER_ADDR']}:{options.get('MASTER_PORT', '29500')}"
    return placement


def place_ranks(given: Given, ranks_here: Callable[[int], int] | None = None) -> Placement:
    """Return the placement; ``ranks_here``: nodes -> ranks on this one by default; None: one per accelerator."""
    least, nodes = node_range(str(given.get("nodes", 1)))
    ranks = ranks_on_node(given, nodes, ranks_here)
    names = {"restarts", "run_id"} if nodes == 1 else given.keys() - {"nproc", "nodes"}
    more = {name: value for name, value in given.items() if name in names}
    return Placement(ranks=ranks, nodes=nodes, least_nodes=least, **more)


def ranks_on_node(given: Given, nodes: int, ranks_here: Callable[[int], int] | None = None) -> int:
    """Return the number of ranks on this one of ``nodes`` nodes; for the rest see :func:`place_ranks`."""
    nproc = str(given.get("nproc", "auto"))
    if nproc.isdigit() and int(nproc):
        return int(nproc)
    if nproc in ("auto", "gpu", "cpu"):
        return ranks_here(nodes) if ranks_here else accelerators()
    raise LaunchError(f"--nproc is {nproc!r}; expected a number of ranks on each node, or auto")


def node_range(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes of ``--nodes N`` or ``--nodes MIN:MAX``."""
    least, _, largest = text.partition(":")
    largest = largest or least
    if not least.isdigit() or not largest.isdigit() or not 1 <= int(least) <= int(largest):
        raise LaunchError(
            f"--nodes is {text!r}; expected a number, or MIN:MAX for a job that continues with fewer nodes"
        )
    return int(least), int(largest)


def accelerators() -> int:
    return max(1, torch.accelerator.device_count())


def _patient(shutdown: Callable[..., None]) -> Callable[..., None]:
    """Return the agent's way to end ranks, with as much time after a signal as torch 2.13 asks for."""

    def ended(agent: LocalElasticAgent, *signals: signal.Signals) -> None:
        PContext.close.__defaults__ = (None, terms.SHUTDOWN_S if signals else _SHUTDOWN_AFTER_FAILURE_S)
        shutdown(agent, *signals)

    return ended


if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:
    LocalElasticAgent._shutdown = _patient(LocalElasticAgent._shutdown)  # type: ignore[method-assign]


@final
class Shown:
    """Copy a file to a stream as it grows. A context manager; its exit copies the rest."""

    def __init__(self, path: Path, to: TextIO) -> None:
        self._path, self._to = path, to
        self._position = path.stat().st_size if path.exists() else 0
        # a character may be written in two parts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="meshpar-log", daemon=True)

    def __enter__(self) -> Shown:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(0.1):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        self._position += len(text)
        if text:
            with suppress(OSError):  # `meshpar run ... | head`, or a full disk: the log has every line
                self._to.write(self._decoder.decode(text))
                self._to.flush()


def launch_local(recipe: Recipe, ranks: int) -> int:
    return launch_recipe(recipe, Placement(ranks=ranks))


def launch_recipe(recipe: Recipe, placement: Placement, logs: Path | None = None) -> int:
    return launch({"recipe": recipe.sent()}, placement, logs or recipe.folder / "logs", sys.stderr)


def launch(work: Mapping[str, Any], placement: Placement, logs: Path, console: TextIO) -> int:
    """Run this node's ranks until they end; return 0, or 128 + the signal that stopped them."""
    with tempfile.TemporaryDirectory(prefix="meshpar-") as folder, ExitStack() as stack:
        stack.callback(put_back, {number: signal.getsignal(number) for number in STOPPING})
        placement = stack.enter_context(_identify_start(placement))
        logs = (logs / placement.run_id).absolute()
        logs.mkdir(parents=True, exist_ok=True)
        terminal = console.isatty() and placement.nodes == 1
        _set_environment(placement)
        most_ranks = placement.nodes * placement.ranks if placement.elastic else 0
        task = RankTask(logs=logs, scratch=Path(folder), terminal=terminal, most_ranks=most_ranks, **work)
        stack.enter_context(at_work(task)).write()
        config = _config(placement, folder)
        if not terminal and not placement.node_rank:
            stack.enter_context(Shown(log_file(logs, 0), console))
        try:
            elastic_launch(config, sys.executable)("-m", "meshpar.launchers.jobs.worker", str(logs), folder)
        except ChildFailedError as failed:
            _ignore_signals()
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            stopped = terms.STOPPED & set(codes.values())
            # the agent ends the others when one has gone
            if stopped and set(codes.values()) <= terms.STOPPED | {-signal.SIGTERM}:
                if failures.in_vain(logs):
                    (logs / terms.NO_RESTART).touch()
                return max(stopped)
            failures.record_kills(logs, codes)
            if placement.nodes > 1:
                time.sleep(terms.OTHERS_S)
            raise _mark_useless(failures.first_error(logs, codes), logs) from None
        except SignalException as stop:
            _ignore_signals()
            for child in children(logs):  # after a second signal, or where ranks did not stop in time
                with suppress(OSError):  # it may be gone by now
                    os.kill(child, signal.SIGKILL)
            if failures.recorded(logs):
                raise _mark_useless(failures.first_error(logs, {}), logs) from None
            return 128 + int(stop.sigval)
    failures.forget_left(logs)
    (logs / terms.COMPLETE).touch()
    return 0


@contextmanager
def _identify_start(placement: Placement) -> Iterator[Placement]:
    """Yield the placement with the start's id, equal on all nodes; fixed nodes first connect to agree on one."""
    if placement.nodes == 1:
        yield replace(placement, run_id=placement.run_id or start_id())
        return
    if placement.elastic:
        reach_head(placement.head, placement.node_rank, placement.meeting_s)
        with announce_joining(placement.head, f"{placement.least_nodes} to {placement.nodes}", placement.meeting_s):
            yield replace(placement, run_id=placement.run_id or "elastic")
        return
    assert placement.node_rank is not None
    nodes, wait_s = placement.nodes, placement.meeting_s
    with check_in_nodes(placement.head, placement.node_rank, nodes, placement.run_id, wait_s) as run_id:
        yield replace(placement, run_id=run_id)


def _mark_useless(error: MeshparError, logs: Path) -> MeshparError:
    """Write a marker file for the scheduler if another start is useless: it may see another node's exit code."""
    if failures.in_vain(logs) and failures.exit_code(error) != terms.NO_USE:
        error = RepeatedFailureError(f"{error}\n{failures.IN_VAIN}")
    if failures.exit_code(error) == terms.NO_USE:
        (logs / terms.NO_RESTART).touch()
    return error


def _config(placement: Placement, folder: str) -> LaunchConfig:
    """Return the agent's settings; ``folder`` receives the agent's own files."""
    meeting: dict[str, Any]
    if placement.nodes == 1:
        meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    elif placement.elastic:
        bounds = {"join_timeout": placement.meeting_s, "last_call_timeout": placement.rejoin_s}
        configs = {**bounds, "keep_alive_interval": -(-placement.rejoin_s // 3), "keep_alive_max_attempt": 3}
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
    mode = terms.setting("MESHPAR_NUMA_BINDING")
    if not mode:
        # numactl would refuse to leave the part of the CPUs that a scheduler gives
        whole = sys.platform == "linux" and len(os.sched_getaffinity(0)) == os.cpu_count()
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not whole or shutil.which("numactl") is None or terms.setting("MESHPAR_FIRST_DEVICE") or devices != ranks:
            return {}
        return {"numa_options": NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)}
    modes = [affinity.value for affinity in AffinityMode]
    if mode not in (*modes, "off"):
        raise LaunchError(f"MESHPAR_NUMA_BINDING is {mode!r}; expected one of {', '.join(modes)}, off")
    return {} if mode == "off" else {"numa_options": NumaOptions(affinity_mode=AffinityMode(mode))}


def _set_environment(placement: Placement) -> None:
    """Set the environment that the ranks inherit, where the user has not."""
    suggested = {
        # "Gloo connectFullMesh failed": with torch 2.13's default, restarted ranks reuse the failed ranks' TCPStore,
        # read stale addresses there and fail every time. With this setting each start makes a new store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(terms.threads(placement.ranks)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(terms.SHUTDOWN_S),
    }
    if torch.cuda.is_available() and not terms.setting("PYTORCH_CUDA_ALLOC_CONF"):
        # Blocks of gathered parameters and of activations differ in size: segments of fixed size fragment.
        suggested["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    terms.suggest(suggested)
    # torch's own reports of a failure would repeat the rank's error, which the caller prints once.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _ignore_signals() -> None:
    """Ignore signals after the ranks ended, so that a scheduler which ends the job now does not cut off the report."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
