"""A run's folder has one writer: a second one is told who it is, and a dead one does not hold the folder for ever."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from meshpar.checkpoints import CheckpointManager
from meshpar.checkpoints.steps.lease import LEASE_NAME, Lease
from meshpar.core.errors import CheckpointError
from meshpar.process.leftovers import host_name
from meshpar.testing import on_ranks
from tests.checkpoints.test_commit import linear
from tests.support.patience import patient

HOLD = """
import sys
from pathlib import Path
from meshpar.checkpoints.steps.lease import Lease
Lease(Path(sys.argv[1])).take()
print("taken", flush=True)
input()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    script = folder / "hold.py"
    script.write_text(HOLD)
    command = [sys.executable, "-m", "tests.support.script", str(script), str(folder)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "taken\n"
    return other


def test_a_second_job_is_told_who_writes_the_folder_and_gets_it_when_that_one_is_killed(tmp_path: Path) -> None:
    with hold(tmp_path) as other, CheckpointManager(tmp_path) as manager:
        message = rf"is written by another job: process {other.pid} on .* since 2.*; end that job"
        with pytest.raises(CheckpointError, match=message):
            manager.own()
        with CheckpointManager(tmp_path / "other") as free:
            free.own()
        other.kill()
        other.wait()
        manager.own()
        manager.save(1, linear())
        assert (tmp_path / LEASE_NAME).exists()
    assert not (tmp_path / LEASE_NAME).exists(), "given up at the end"


def elsewhere(folder: Path, count: int = 0) -> None:
    lease = {"host": "elsewhere", "process": 1, "id": "x", "since": "then", "count": count}
    (folder / LEASE_NAME).write_text(json.dumps(lease))


def test_a_holder_on_another_host_lives_while_its_count_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(tmp_path)
    counts = iter(range(1, 100))
    monkeypatch.setattr("meshpar.checkpoints.steps.lease.time.sleep", lambda _: elsewhere(tmp_path, next(counts)))
    with pytest.raises(CheckpointError, match="process 1 on elsewhere since then"):
        Lease(tmp_path).take()
    monkeypatch.undo()
    lease = Lease(tmp_path, dead_s=0.0)
    lease.take()
    lease.check()
    elsewhere(tmp_path)  # whose host was cut off, and which came back
    message = "process 1 on elsewhere since then, which took it while this job gave no sign of life"
    with pytest.raises(CheckpointError, match=message):
        lease.check()
    lease.release()
    assert json.loads((tmp_path / LEASE_NAME).read_text())["host"] == "elsewhere", "only its own is removed"


def test_a_relative_folder_is_owned_and_written_from_another_working_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("run") as manager:
        manager.own()
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        manager.save(1, linear())
        assert manager.steps() == [1] and not any(Path.cwd().iterdir())
        assert manager._writer._lease is not None
        (tmp_path / "run" / LEASE_NAME).unlink()
        message = r"run/\.writer is gone, by which this job owns the folder: the folder"
        with pytest.raises(CheckpointError, match=message):
            manager._writer._lease.check()


def test_of_two_that_replace_a_dead_holder_in_one_moment_one_is_told(tmp_path, monkeypatch) -> None:
    dead = {"host": host_name(), "process": 2**22 + 1, "id": "dead", "since": "then", "count": 0}
    (tmp_path / LEASE_NAME).write_text(json.dumps(dead))
    monkeypatch.setattr("meshpar.checkpoints.steps.lease.time.sleep", lambda _: elsewhere(tmp_path))
    with pytest.raises(CheckpointError, match="process 1 on elsewhere since then, which took it"):
        Lease(tmp_path).take()


def test_a_pod_of_the_same_name_is_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that replaces one on a lost node has its name, and cannot see whether its process lives."""
    pod, name = ["pid:[4026532001]"], socket.gethostname()
    monkeypatch.setattr("meshpar.process.leftovers.os.readlink", lambda _: pod[0])
    first = Lease(tmp_path, beat_s=0.01)
    first.take()
    pod[0] = "pid:[4026532002]"
    with pytest.raises(CheckpointError, match=rf"is written by another job: process \d+ on {name}_"):
        Lease(tmp_path, beat_s=0.01, dead_s=60).take()
    first.release()
    pod[0] = "pid:[4026531836]"
    assert host_name() == name, "outside of containers"


def test_a_holder_counts_while_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = threading.Event(), Lease._write

    def seen(self: Lease, count: int, tag: str | None) -> None:
        write(self, count, tag)
        if count == 3:
            written.set()

    monkeypatch.setattr(Lease, "_write", seen)
    lease = Lease(tmp_path, beat_s=0.001)
    lease.take()
    assert written.wait(patient(60))
    lease.release()
    assert not any(tmp_path.iterdir()) and not lease._thread.is_alive()


@on_ranks(2)
def own_together(root: str) -> None:
    with CheckpointManager(Path(root) / "own") as manager:
        manager.own()
        manager.own()
    with (
        CheckpointManager(root, timeout_s=patient(30)) as manager,
        pytest.raises(CheckpointError, match="is written by another job"),
    ):
        manager.own()
    assert dist.is_initialized()


def test_every_rank_is_told_of_the_other_job(tmp_path: Path) -> None:
    with hold(tmp_path) as other:
        own_together(str(tmp_path))
        other.kill()
