"""meshpar run: exit codes, one traceback, logs, restarts, and nothing left running."""

import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing import PContext

from meshpar import LaunchError, ParallelError
from meshpar.launchers.agent import check_in, failures
from meshpar.launchers.agent.check_in import check_in_nodes
from meshpar.launchers.agent.failures import Failure, error_file, first_error, forget_left, recorded
from meshpar.launchers.agent.local import (
    Placement,
    Shown,
    _config,
    _identify_start,
    _patient,
    _set_environment,
    from_kubeflow,
    place_ranks,
)
from meshpar.launchers.agent.meeting import free_port
from meshpar.launchers.agent.terms import NO_USE, RankTask, at_work
from meshpar.launchers.commands.train import _ranks_here
from meshpar.launchers.jobs.job import _new_steps_noted
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.process import waiting
from tests.support.patience import patient, until

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "meshpar.launchers", "run"]


def run(
    folder: Path, script: str, *options: str, arguments: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(script)
    return command(folder, *RUN, *options, "job.py", *arguments, **variables)


def command(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=150)


def run_script(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with the folder as its first argument."""
    (folder / "script.py").write_text(text)
    path = str(folder / "script.py")
    return command(ROOT, sys.executable, "-m", "tests.support.script", path, str(folder), *arguments)


def start(folder: Path, script: str, *options: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "job.py").write_text(script)
    words = [*RUN, *options, "job.py"]
    return subprocess.Popen(words, cwd=folder, env=os.environ | variables, stderr=subprocess.PIPE, text=True)


def logs(folder: Path) -> dict[str, str]:
    (start,) = (folder / "runs" / "job" / "logs").iterdir()
    return {path.name: path.read_text() for path in sorted(start.glob("*.log"))}


def test_a_script_runs_on_its_ranks_with_a_log_file_each(tmp_path: Path) -> None:
    script = (
        "import os, sys, multiprocessing\n"
        "def square(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(square, [7]))\n"
        "    print('I am', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:], file=sys.stderr)\n"
    )
    done = run(tmp_path, script, "--nproc", "2", arguments=("--lr", "3"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[49]\nI am 0 of 2 ['--lr', '3']\n", "rank 0 is shown"
    assert logs(tmp_path) == {f"rank-{n}.log": f"[49]\nI am {n} of 2 ['--lr', '3']\n" for n in range(2)}


def test_on_a_terminal_rank_0_keeps_it_and_its_log_has_the_lines(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import sys\nprint(sys.stdout.isatty(), end=' there\\n')\nsys.stdout.write('\\x1b[2Kmoving\\r')\n"
    )
    ours, theirs = os.openpty()
    process = subprocess.Popen([*RUN, "--nproc", "1", "job.py"], cwd=tmp_path, stdout=theirs, stderr=theirs)
    assert process.wait(timeout=90) == 0
    expected, shown = b"True there\r\n\x1b[2Kmoving\r", b""
    while len(shown) < len(expected):  # a terminal may hand it over in parts
        shown += os.read(ours, 1000)
    assert shown == expected
    assert logs(tmp_path) == {"rank-0.log": "True there\n"}


def test_the_first_failing_rank_is_shown_and_no_other(tmp_path: Path) -> None:
    script = (
        "import glob, os, time\n"
        f"deadline = time.monotonic() + {patient(600)}\n"
        "while os.environ['RANK'] != '2' and not glob.glob('runs/job/logs/*/rank-2.error.json') and time.monotonic() "
        "< deadline: time.sleep(0.01)\n"
        "raise ValueError('only ' + os.environ['RANK'])\n"
    )
    done = run(tmp_path, script, "--nproc", "3")
    assert done.returncode == 1
    first = "meshpar: rank 2 failed with ValueError: only 2\nTraceback (most recent call last):\n"
    assert done.stderr.startswith(f'{first}  File "job.py", line 4')
    assert done.stderr.count("Traceback") == 1
    assert "only 0" not in done.stderr and "elastic" not in done.stderr


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("sys.exit('no data for me')", "meshpar: rank 1 failed with SystemExit: no data for me\n"),
        pytest.param("sys.exit(3)", "meshpar: rank 1 failed with SystemExit: 3\n", marks=pytest.mark.long),
        pytest.param("os._exit(4)", "meshpar: rank 1 ended itself with os._exit(4)\n", marks=pytest.mark.long),
        pytest.param("os._exit(0)", "meshpar: rank 1 ended itself with os._exit(0)\n", marks=pytest.mark.long),
        ("sys.exit()", "meshpar: rank 1 ended itself with sys.exit(0)\n"),
        pytest.param(
            "raise BaseException('x')", "meshpar: rank 1 failed with BaseException: x\n", marks=pytest.mark.long
        ),
        ("ctypes.CDLL(None)._exit(5)", "meshpar: rank 1 ended with exit code 5 and without a Python error"),
    ],
)
def test_a_rank_that_ends_without_an_exception_is_named_and_not_its_victim(tmp_path, end, message) -> None:
    script = (
        "import ctypes, glob, os, sys, time, torch.distributed as dist, meshpar\n"
        "with meshpar.distributed('cpu'):\n"
        f"    if dist.get_rank() == 1: {end}\n"
        "    dist.barrier()\n"
    )
    done = run(tmp_path, script, "--nproc", "2")
    assert done.returncode == 1 and done.stderr.startswith(message)
    if end in ("os._exit(0)", "sys.exit()"):
        assert "\nThen rank 0 failed with" in done.stderr, "alone it is no failure"
    if "CDLL" not in end:
        assert 'File "job.py", line 3' in done.stderr


@pytest.mark.parametrize(
    ("fills", "message"),
    [
        (
            "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
            "OutOfMemoryError: CUDA out of memory.",
        ),
        ("torch.empty(1 << 60)", "RuntimeError: "),
    ],
)
def test_a_full_memory_comes_with_what_to_do(tmp_path: Path, fills: str, message: str) -> None:
    done = run(tmp_path, f"import torch\n{fills}\n", "--nproc", "1")
    assert done.returncode == 1 and f"rank 0 failed with {message}" in done.stderr
    assert "memory is full; use a smaller data.micro_batch" in done.stderr.splitlines()[-1]


def test_a_full_disk_of_logs_ends_no_job_and_hides_no_error(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "x"
    logs.mkdir(parents=True)
    for name in ("rank-1.log", "rank-1.error.tmp"):  # rank 0's log is read as well, and this device never ends
        (logs / name).symlink_to("/dev/full")
    script = (
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    for _ in range(3): print('a line' * 9999)\n"
        "    if len(sys.argv) > 1: raise ValueError('the cause')\n"
    )
    options = ("--nproc", "2", "--logs", "logs", "--run-id", "x")
    assert run(tmp_path, script, *options).returncode == 0
    failed = run(tmp_path, script, *options, arguments=("fail",))
    assert failed.stderr.startswith("meshpar: rank 1 failed with ValueError: the cause\n")


def test_output_that_nobody_takes_ends_no_job(tmp_path: Path) -> None:
    path, taken = tmp_path / "log", ["", OSError(errno.ENOSPC, "full"), BrokenPipeError()]
    path.touch()
    show = Shown(path, Mock(write=Mock(side_effect=taken)))
    for _ in taken:
        path.write_text(path.read_text() + "a line\n")
        show._copy()


def test_a_character_that_is_written_in_two_parts_is_shown_whole(tmp_path: Path) -> None:
    path, shown = tmp_path / "log", io.StringIO()
    show = Shown(path, shown)
    for part in ("é".encode()[:1], "é\n".encode()[1:]):
        with path.open("ab") as file:
            file.write(part)
        show._copy()
    assert shown.getvalue() == "é\n"


def test_restarts_run_the_ranks_again(tmp_path: Path) -> None:
    script = (
        "import os, torch, torch.distributed as dist, meshpar\n"
        "with meshpar.distributed('cpu'):\n"
        "    total = torch.ones(1); dist.all_reduce(total)\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] != '1' and dist.get_rank() == 1: raise RuntimeError('again')\n"
        "    dist.barrier()\n"
        "    if dist.get_rank() == 0: print('done by', int(total), 'at', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    done = run(tmp_path, script, "--nproc", "2", "--restarts", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done by 2 at 1\n")


@pytest.mark.long
def test_two_groups_of_one_process_meet_apart(tmp_path: Path) -> None:
    script = (
        "import torch, torch.distributed as dist, meshpar\n"
        "for _ in range(3):\n"
        "    with meshpar.distributed('cpu'):\n"
        "        total = torch.ones(1); dist.all_reduce(total)\n"
        "        if dist.get_rank() == 0: print(int(total))\n"
    )
    done = run(tmp_path, script, "--nproc", "2")
    assert (done.returncode, done.stdout) == (0, "2\n2\n2\n"), done.stderr


def test_a_script_that_does_not_listen_is_no_job_that_stopped_in_time(tmp_path: Path) -> None:
    deaf = "open(f'{os.environ[\"RANK\"]}', 'w').close()\nwhile True: time.sleep(0.1)\n"
    listening = (
        "def save(*_):\n    open('saved', 'w').close(); sys.exit(128 + signal.SIGUSR1)\n"
        "signal.signal(signal.SIGUSR1, save)\n" + deaf
    )
    codes = []
    for number, script in enumerate((deaf, listening)):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = start(folder, "import os, signal, sys, time\n" + script, "--nproc", "2")
        until(lambda folder=folder: all((folder / name).exists() for name in "01"))
        process.send_signal(signal.SIGUSR1)
        _, output = process.communicate(timeout=90)
        codes.append(process.returncode)
        assert ("the script has no handler for it" in output) == (script is deaf), output
        assert (folder / "saved").exists() == (script is listening)
    assert codes == [1, 138]


def test_control_c_ends_all_ranks(tmp_path: Path) -> None:
    script = "import os, time\nopen(os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    process = start(tmp_path, script, "--nproc", "2")
    until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"))
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=60)
    assert process.returncode in (130, 1), output
    assert "Traceback" not in output or output.count("Traceback") == 1
    assert not [pid for pid in ((tmp_path / name).read_text() for name in "01") if Path(f"/proc/{pid}").exists()]


def test_a_rank_whose_launcher_ended_before_it_asked_for_its_end_ends_too(tmp_path: Path) -> None:
    launcher = """if True:
        import os, sys
        from pathlib import Path
        from meshpar.launchers.agent.terms import RankTask, read_task
        from meshpar.launchers.jobs.worker import end_with_parent

        RankTask(logs=Path(sys.argv[1]), scratch=Path(sys.argv[1])).write()
        launcher = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == launcher:
            pass
        end_with_parent(read_task(Path(sys.argv[1])).launcher)
        print("it trains on")
    """
    done = run_script(launcher, tmp_path)
    assert done.stdout == "" and re.fullmatch(r"the launcher, process \d+, ended while this rank .*\n", done.stderr)


def runs(pid: int) -> bool:
    """Return whether a process runs: it is there, and no zombie that nobody has waited for."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.nightly
def test_a_launcher_that_is_killed_while_its_ranks_import_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    launcher = """if True:
        import os, subprocess, sys
        from pathlib import Path
        from meshpar.launchers.agent.terms import RankTask

        here = Path.cwd()
        RankTask(logs=here / "logs", scratch=here, kind="script", what="job.py").write()
        worker = [sys.executable, "-m", "meshpar.launchers.jobs.worker", str(here / "logs"), str(here)]
        print(subprocess.Popen(worker, stdout=subprocess.DEVNULL).pid, flush=True)
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", launcher],
        cwd=tmp_path,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    until(lambda: not runs(int(done.stdout)), 60)
    assert not (tmp_path / "ran").exists()


def test_an_interrupt_of_a_recipe_is_one_line_and_waits_for_no_thread(tmp_path: Path) -> None:
    script = """if True:
        import sys, threading, time
        from pathlib import Path
        from types import SimpleNamespace
        from meshpar.launchers.jobs import worker

        def tokenises(task):
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise KeyboardInterrupt

        worker.run_recipe, worker.end_with_parent = tokenises, lambda launcher: None
        logs = Path(sys.argv[1], "logs")
        worker._run(SimpleNamespace(kind="recipe", logs=logs, terminal=False, launcher=0), int(sys.argv[2]))
    """
    for rank, lines in (("0", ["interrupted by SIGINT: nothing was saved since the last checkpoint"]), ("1", [])):
        assert run_script(script, tmp_path, rank).returncode == 130
        assert (tmp_path / f"logs/rank-{rank}.log").read_text().splitlines() == lines


def test_ranks_that_leave_without_an_error_fail_nothing_by_themselves(tmp_path: Path) -> None:
    left, failed = (Failure(rank=rank, host=socket.gethostname(), kind=kind, message="0", trace="x", seconds=at)
                    for rank, kind, at in ((1, "sys.exit", 5.0), (0, "ValueError", 4.0)))  # fmt: skip
    for outcome in (left, failed):
        error_file(tmp_path, outcome.rank).write_text(json.dumps(asdict(outcome)))
    assert str(first_error(tmp_path, {0: 1})).startswith("rank 0 failed with ValueError"), "the other one left later"
    error_file(tmp_path, 0).unlink()
    assert recorded(tmp_path) == [] and error_file(tmp_path, 1).exists(), "after a signal: no failure"
    (gone := error_file(tmp_path, 2)).symlink_to("nowhere")  # as one that another host's launcher forgets meanwhile
    forget_left(tmp_path)
    assert list(tmp_path.iterdir()) == [gone]


def test_ranks_that_stop_as_asked_end_with_the_signals_code_also_when_one_is_ended_on_its_way_out(tmp_path) -> None:
    script = "import os, sys, time\nif os.environ['RANK'] == '0':\n    sys.exit(138)\ntime.sleep(120)\n"
    done = run(tmp_path, script, "--nproc", "2")
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
    assert not done.stderr


def test_torch_2_11_gives_ranks_time_after_a_signal_and_none_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PContext.close, "__defaults__", PContext.close.__defaults__)  # which comes back
    given: list[object] = []
    agent: Any = None
    shutdown = _patient(lambda *_: given.append(PContext.close.__defaults__))
    shutdown(agent)
    shutdown(agent, signal.SIGTERM)
    shutdown(agent)
    assert given == [(None, 30), (None, 600), (None, 30)]


def test_what_no_restart_heals_has_its_own_exit_code(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: {dim: 32, layers: 2, heads: 2, hidden: 48}\ntraining: {stepz: 5}\n")
    done = command(tmp_path, *RUN, "job.yaml")
    assert done.returncode == NO_USE
    assert "unknown key; nearest: steps" in done.stderr


RECIPE = """\
name: job
device: cpu
model: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 32, dropout: 0.0}
data: {source: files, paths: [text.md], cache: cache, sequence_length: 32, micro_batch: 2}
training: {steps: 3, log_every: 1, tensorboard: false}
"""


def run_recipe(folder: Path, *options: str, more: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(RECIPE + more)
    (folder / "text.md").write_text((Path(__file__).parents[2] / "README.md").read_text())
    return command(folder, *RUN, *options, "job.yaml", **{"OMP_NUM_THREADS": "1", **variables})


def test_a_job_without_a_step_is_not_started_a_third_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "job" / "metrics.jsonl").mkdir(parents=True)  # the ranks need a file there
    restarted = run_recipe(tmp_path, "--restarts", "5")
    (log,) = (tmp_path / "runs" / "job" / "logs").glob("*/rank-0.log")
    assert restarted.returncode == NO_USE, log.read_text()
    assert "the job's last 2 starts made no new step, so it is not started again" in restarted.stderr

    monkeypatch.setenv("MESHPAR_JOB_ID", "7")  # as a batch script sets it
    logs = tmp_path / "runs" / "job" / "logs"
    failures.note_start(logs / "7-0")
    second = run_recipe(tmp_path, "--run-id", "7-1")
    assert second.returncode == NO_USE and (logs / "7-1" / "no-restart").exists()
    assert "IsADirectoryError" in second.stderr and "not started again" in second.stderr


def test_a_failure_that_repeats_at_one_step_is_not_retried_to_the_end(tmp_path: Path) -> None:
    """The second step's gradient is not finite, in each start; the first step is new in the first start alone."""
    done = run_recipe(tmp_path, "--restarts", "9", more="optimizer: {lr: 1e30}\nschedule: {warmup_steps: 0}\n")
    (log,) = (tmp_path / "runs" / "job" / "logs").glob("*/rank-0.log")
    assert done.returncode == NO_USE and "made no new step" in done.stderr, done.stderr
    assert (log.read_text().count("step 1/3"), failures.MOST_STARTS) == (3, 2)


@pytest.mark.parametrize(("below", "noted"), [(None, 7), (RuntimeError("Connection closed by peer"), -1)])
def test_a_lost_peer_is_no_failure_that_repeats(tmp_path: Path, below: Exception | None, noted: int) -> None:
    task = RankTask(logs=tmp_path, scratch=tmp_path)
    with pytest.raises(ParallelError), at_work(task), _new_steps_noted(Mock(step=7)):
        raise ParallelError("failed") from below
    assert failures.last_failed_at(tmp_path) == noted


def test_a_step_gives_a_job_new_starts(tmp_path: Path) -> None:
    failures.note_start(tmp_path / "a")
    failures.note_start(tmp_path / "a")  # ranks that start again as a node joins
    failures.made_step(tmp_path / "a")
    done = run_recipe(tmp_path, "--run-id", "x")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "runs" / "job" / "logs").glob("*.no-step")), "the first step removes the note"


OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_inside_torchrun_it_is_one_of_its_ranks(tmp_path: Path) -> None:
    script = "import os, sys\nprint(os.environ['RANK'], os.getppid(), sys.argv[1:])\n"
    done = run(tmp_path, script, arguments=("x",), **OF_TORCHRUN | {"RANK": "5"})
    assert (done.returncode, done.stdout) == (0, f"5 {os.getpid()} ['x']\n")
    assert not (tmp_path / "runs").exists()


def test_a_node_that_does_not_come_is_named_within_the_bound() -> None:
    head, wait_s = f"127.0.0.1:{free_port()}", float(round(patient(3)))

    def come(node: int) -> str:
        with pytest.raises(LaunchError) as raised, check_in_nodes(head, node, 3, "", wait_s):
            pass
        return str(raised.value)

    began = time.monotonic()
    with ThreadPoolExecutor() as pool:  # processes would have to be equally quick to start
        outputs = list(pool.map(come, (0, 2)))
    here = socket.gethostname()
    message = f"these nodes did not connect to {head} within {wait_s:g} s: 1; connected: 0 ({here}), 2 ({here})"
    assert outputs == [message] * 2
    assert time.monotonic() - began < patient(20)


def test_the_command_ends_where_a_node_does_not_come(tmp_path: Path) -> None:
    head = f"127.0.0.1:{free_port()}"
    place = ("--nodes", "2", "--nproc", "1", "--head", head, "--wait", "1", "--node-rank", "0")
    done = command(tmp_path, *RUN[:-1], "doctor", *place)
    assert done.returncode == 1
    assert f"these nodes did not connect to {head} within 1 s: 1; connected: 0 (" in done.stderr


def test_a_wait_says_for_whom_and_ends_at_control_c(monkeypatch, capfd) -> None:
    monkeypatch.setattr(waiting, "EVERY_S", 0.0)
    head, ends = f"127.0.0.1:{free_port()}", threading.Event()

    def interrupt(_: float) -> None:
        ends.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting.time, "sleep", interrupt)
    for node, whom in ((0, f"nodes 1, 2 to connect to {head}"), (1, f"node 0 at {head} (")):
        ends.clear()
        with pytest.raises(KeyboardInterrupt), check_in_nodes(head, node, 3, "", 900.0):
            pass
        output = capfd.readouterr().err
        assert ends.is_set() and f"meshpar: waiting for {whom}" in output and " of 900 s\n" in output


def test_nodes_of_an_elastic_job_say_for_whom_they_wait(monkeypatch, capfd) -> None:
    monkeypatch.setattr(waiting, "EVERY_S", 0.0)
    started: list[int] = []
    monkeypatch.setattr(check_in, "children", lambda: started)
    head = f"127.0.0.1:{free_port()}"
    with pytest.raises(LaunchError, match=f"node 0 does not answer at {head} within 1 s"):
        with _identify_start(Placement(ranks=1, nodes=3, least_nodes=2, node_rank=1, head=head, meeting_s=1)):
            pass
    assert f"meshpar: waiting for node 0 at {head} (" in capfd.readouterr().err
    message = ""
    with _identify_start(Placement(ranks=1, nodes=3, least_nodes=2, node_rank=0, head=head)):
        while "meshpar: waiting for 2 to 3 nodes to join at" not in message:
            message += capfd.readouterr().err
        started.append(1)
        while any(thread.name == "meshpar-joining" for thread in threading.enumerate()):
            time.sleep(0.01)


def test_ranks_are_bound_to_numa_nodes_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _config(Placement(ranks=1), "x").numa_options is None
    monkeypatch.setenv("MESHPAR_NUMA_BINDING", "node")
    assert _config(Placement(ranks=1), "x").numa_options.affinity_mode.value == "node"
    monkeypatch.setenv("MESHPAR_NUMA_BINDING", "nodes")
    with pytest.raises(LaunchError, match="MESHPAR_NUMA_BINDING is 'nodes'; expected one of node, socket"):
        _config(Placement(ranks=1), "x")


def test_ranks_with_a_gpu_each_are_bound_and_their_memory_grows_unless_somebody_says_otherwise(monkeypatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MESHPAR_NUMA_BINDING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(os.cpu_count() or 1)))
    assert _config(Placement(ranks=8), "x").numa_options.affinity_mode.value == "node"
    assert _config(Placement(ranks=4), "x").numa_options is None, "the GPU of a rank is not known"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    bound = _config(Placement(ranks=8), "x").numa_options
    assert os.cpu_count() == 1 or bound is None, "a scheduler has bound the job"
    os.environ["MESHPAR_NUMA_BINDING"] = "off"
    assert _config(Placement(ranks=8), "x").numa_options is None
    _set_environment(Placement(ranks=8))
    assert os.environ.pop("PYTORCH_ALLOC_CONF") == "expandable_segments:True"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:512"
    _set_environment(Placement(ranks=8))
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_of_several_srun_tasks_the_first_to_fail_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    open('failed', 'w').close()\n"
        "    raise ValueError('on purpose')\n"
        "while not os.path.exists('failed'): time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
        "raise RuntimeError('Connection closed by peer')\n"
    )
    common = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost",
              "SLURM_STEP_TASKS_PER_NODE": "3"}  # fmt: skip
    tasks = [
        subprocess.Popen(
            [*RUN, "job.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(3)
    ]  # fmt: skip
    outputs = [task.communicate(timeout=90)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [1, 1, 1]
    assert ["Traceback" in output for output in outputs] == [False, True, False]
    first = f"meshpar: rank 1 on {socket.gethostname()} failed first, with ValueError: on purpose\n"
    assert outputs[0].endswith(f"{first}then this one, rank 0, with RuntimeError\n")


def test_options_that_start_ranks_are_refused_in_a_rank(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    head = f"127.0.0.1:{free_port()}"
    for words, code in (
        (["run", "--nproc", "2", "job.py"], 1),
        (["doctor", "--nproc", "2"], 1),
        (["run", "job.py"], 0),
        (["run", "--nproc", "2", "--nodes", "1", "--node-rank", "0", "--head", head, "job.py"], 0),
    ):
        done = command(tmp_path, *RUN[:-1], *words, **OF_TORCHRUN)
        said = "--nproc: this is already one of 8 ranks that torchrun or srun started" in done.stderr
        assert (done.returncode, said) == (code, code == 1), done.stderr


def test_a_rank_that_ignores_sigterm_does_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    script = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: open('asked', 'w').close())\n"
        "open('pid.new', 'w').write(str(os.getpid())); os.rename('pid.new', 'pid')\n"
        "while True: time.sleep(60)\n"
    )
    process = start(tmp_path, script, "--nproc", "1", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    until((tmp_path / "pid").exists)
    rank = Path("/proc") / (tmp_path / "pid").read_text()
    process.kill()
    process.wait()
    until(lambda: not rank.exists())
    assert (tmp_path / "asked").exists(), "it had its time to save"


def test_nodes_without_an_id_agree_on_one(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os\nprint(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    head = f"127.0.0.1:{free_port()}"
    command = [*RUN, "--nodes", "2", "--nproc", "1", "--head", head]
    both = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), "job.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        for node in (1, 0)
    ]
    assert [process.communicate(timeout=90)[0] for process in both] == ["", "0 of 2\n"]
    assert [process.returncode for process in both] == [0, 0]
    assert logs(tmp_path) == {"rank-0.log": "0 of 2\n", "rank-1.log": "1 of 2\n"}


def test_placements() -> None:
    assert place_ranks({"nproc": "4"}) == Placement(ranks=4)
    assert place_ranks({"nproc": 2, "nodes": "1:3", "head": "a:1"}) == Placement(
        ranks=2, nodes=3, least_nodes=1, head="a:1"
    )
    kubeflow = {"NNODES": "2", "NPROC_PER_NODE": "4", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "3"}
    assert place_ranks(from_kubeflow(kubeflow)) == Placement(ranks=4, nodes=2, least_nodes=2, node_rank=1, head="a:3")


@pytest.mark.parametrize(
    ("mesh", "ranks"), [("auto", 1), ("dp_shard=-1", 1), ("dp_shard=-1,tp=2", 2), ("dp_shard=8", 4)]
)
def test_a_mesh_for_any_number_of_nodes_has_the_ranks_of_one_on_each(mesh: str, ranks: int) -> None:
    assert _ranks_here(load_recipe("quickstart", [f"mesh='{mesh}'", "device=cpu"]), 2) == ranks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": "2"}, "2 nodes require --head HOST:PORT"),
        ({"nodes": "2", "head": "n1"}, "--head is 'n1'; expected HOST:PORT"),
        ({"nodes": "2", "head": "n1:5", "node_rank": 2}, "each of 2 nodes requires its own: --node-rank from 0 to 1"),
        ({"nodes": "2", "head": "n1:5", "node_rank": 0, "restarts": 1}, "requires --nodes MIN:MAX"),
        ({"nodes": "3:2"}, "--nodes is '3:2'; expected a number, or MIN:MAX"),
        ({"nproc": "many"}, "--nproc is 'many'"),
    ],
)
def test_placements_that_cannot_be(given: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message.replace("(", r"\(")):
        place_ranks({"nproc": "1", **given})
