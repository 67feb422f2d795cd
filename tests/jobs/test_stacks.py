"""``meshpar stacks``: every rank's stack, step and last collective, while the job runs or hangs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from meshpar.launchers.agent.stacks import answer_requests
from meshpar.launchers.cli import app
from tests.support.patience import patient, until
from tests.support.warm import ranks_of

RECIPE = """\
name: job
mesh: dp_shard=2
device: cpu
model: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 32, dropout: 0.0}
data: {source: files, paths: [text.md], cache: cache, sequence_length: 32, micro_batch: 2}
optimizer: {lr: 1e-3}
training: {steps: 100000, log_every: 1, tensorboard: false}
"""
SCRIPT = """\
import time, torch, torch.distributed as dist
import meshpar

def skip_it():
    time.sleep(600)

with meshpar.distributed("cpu"):
    dist.all_reduce(torch.ones(1))
    open("ready", "a").close()
    if dist.get_rank() == 1:
        skip_it()
    dist.all_reduce(torch.ones(1))
"""


def stacks(*words: str | Path) -> str:
    done = CliRunner().invoke(app, ["stacks", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "meshpar.launchers", *words]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_ranks_of_a_recipe_answer_also_where_one_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(RECIPE)
    (tmp_path / "text.md").write_text((Path(__file__).parents[2] / "README.md").read_text() * 20)
    run = tmp_path / "runs/job"
    with running(tmp_path, "run", "job.yaml") as process:
        metrics = run / "metrics.jsonl"
        until(lambda: process.poll() is not None or (metrics.exists() and "\n" in metrics.read_text()), 200)
        assert process.poll() is None
        until(lambda: "in _train_step" in stacks(run, "--wait", str(patient(20))), 60)
        shown = stacks(run, "--wait", str(patient(20)))
        for rank in (0, 1):
            assert f"rank {rank} on " in shown
        assert "step not known" not in shown and "last collective of each group: " in shown
        assert "  MainThread:\n" in shown and "meshpar-watchdog" not in shown
        assert "meshpar-watchdog" in stacks(run, "--wait", str(patient(20)), "--threads")

        stopped = ranks_of(process.pid)[1]
        os.kill(stopped, signal.SIGSTOP)
        wait = round(patient(5))
        shown = stacks(run, "--wait", str(wait))
        silent = f"rank 1 on {os.uname().nodename} (process {stopped}) does not answer within {wait} s: it is stopped"
        assert silent in shown
        assert "ranks 0:\n  MainThread:\n" in shown
        os.kill(stopped, signal.SIGCONT)
        (log,) = run.glob("logs/*/rank-1.log")

        def wrote_its_stacks_in_a_step() -> bool:
            os.kill(stopped, signal.SIGUSR2)
            return "in _train_step" in log.read_text()

        until(wrote_its_stacks_in_a_step, 60, every=0.5)
        assert process.poll() is None, "it trains on"


def test_a_script_that_hangs_in_a_collective_is_told_with_the_rank_that_does_not_come(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with running(tmp_path, "run", "--nproc", "2", "script.py") as process:
        until(lambda: process.poll() is not None or (tmp_path / "ready").exists(), 200)

        def waits() -> bool:
            shown = stacks(tmp_path / "runs/script", "--wait", str(patient(20)))
            return "ranks that did not arrive at gloo:all_reduce, number 2 of " in shown and "in skip_it" in shown

        until(waits, 60)
        assert process.poll() is None


def test_files_that_are_no_answers_are_left_out(tmp_path: Path) -> None:
    logs = tmp_path / "logs/direct"
    with answer_requests(logs, 0):
        for number, text in enumerate(("", "[]", "{", '{"rank": "x"}', '{"rank": 5, "groups": 1}'), 1):
            (logs / f"rank-{number}.stacks.json").write_text(text)
        (logs / "rank-6.stacks.json").symlink_to(logs / "rank-0.stacks.json")
        shown = stacks(tmp_path)
        assert "rank 0 on " in shown and shown.count(" on ") == 1


def test_a_run_that_has_ended_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    with answer_requests(tmp_path / "logs/direct", 0):
        assert "test_stacks.py" in stacks(tmp_path, "--threads"), "in one process, too"
    assert not (tmp_path / "logs/direct").exists()
    done = CliRunner().invoke(app, ["stacks", str(tmp_path)])
    assert (
        done.exit_code == 1 and "has no rank that answers; expected the folder of a run that trains now" in done.stderr
    )
