"""The watchdog: a job that stands still ends within a bound, and names who did not arrive."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshpar import testing
from meshpar._torch import groups
from meshpar.checkpoints import CheckpointManager
from meshpar.core import runtime
from meshpar.core.mesh import MeshSpec
from meshpar.launchers.agent import watchdog
from meshpar.launchers.agent.failures import record, record_stall, recorded
from meshpar.launchers.agent.terms import RETRY
from meshpar.launchers.agent.watchdog import Watchdog, verdict_of
from meshpar.launchers.jobs.job import open_job
from meshpar.launchers.recipes.loading import load_recipe
from tests.checkpoints.test_commit import linear
from tests.support.patience import patient, until
from tests.support.warm import ranks_of

RANKS = 3
STEP = 5
BOUND_S = 3.0


def rank_main(rank: int, port: int, mode: str, folder: str) -> None:
    torch.set_num_threads(1)

    def store() -> dist.TCPStore:
        bound = timedelta(seconds=patient(30))
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=bound, wait_for_workers=False)

    meeting = {"store": dist.PrefixStore("group", store()), "timeout": timedelta(seconds=patient(60))}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, **meeting)
    group = MeshSpec(f"dp_shard={RANKS}").build("cpu").get_group()
    steps, moves = [0], [0]
    with open(os.path.join(folder, f"rank-{rank}"), "w") as file:
        options = dict(moves=lambda: moves[0], rank=rank, world_size=RANKS, file=file, answer_s=5.0)
        with Watchdog(BOUND_S, store(), lambda: steps[0], **options):
            for step in range(20):
                steps[0] = step
                for _ in range(40 if step == STEP and mode == "write" else 0):
                    time.sleep(BOUND_S / 20)
                    moves[0] += 1
                if step == STEP and mode == f"skip {rank}":
                    time.sleep(60)
                if step == STEP and mode == f"stop {rank}":
                    os.kill(os.getpid(), signal.SIGSTOP)
                try:
                    dist.all_reduce(torch.ones(1), group=group)
                    dist.barrier(group=group)
                except RuntimeError:  # another rank has left already
                    time.sleep(60)
    os._exit(0)


def ended(mode: str, folder: Path) -> tuple[list[int | None], list[str], float]:
    """Run the ranks; return their exit codes, what each wrote, and how long it took."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing.PRELOAD)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tasks = [(rank, server.port, mode, str(folder)) for rank in range(RANKS)]
    ranks = [context.Process(target=rank_main, args=task, daemon=True) for task in tasks]
    try:
        for process in ranks:
            process.start()
        began = time.monotonic()  # the first start waits for the server, which loads torch and transformers
        for process in ranks:
            process.join(patient(60))
        texts = [(folder / f"rank-{n}").read_text() for n in range(RANKS)]
        return [rank.exitcode for rank in ranks], texts, time.monotonic() - began
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize("stopped", [pytest.param(1, marks=pytest.mark.long), 0])
def test_a_rank_that_is_stopped_is_named_and_the_others_leave(stopped: int, tmp_path: Path) -> None:
    codes, texts, seconds = ended(f"stop {stopped}", tmp_path)
    assert codes == [-signal.SIGKILL if rank == stopped else RETRY for rank in range(RANKS)]
    assert seconds < patient(40)
    for rank in set(range(RANKS)) - {stopped}:
        assert f"ranks that do not answer, stopped or dead or their host is lost: {stopped} (" in texts[rank]
        assert f"step {STEP}; last collective" in texts[rank]
        assert "default_pg (ranks 0, 1, 2): gloo:all_reduce (number " in texts[rank]
        assert "in all_reduce" in texts[rank] and "in rank_main" in texts[rank], "stacks"


def test_a_rank_that_skips_a_collective_is_named_with_the_collective(tmp_path: Path) -> None:
    codes, texts, _ = ended("skip 2", tmp_path)
    assert codes == [RETRY] * RANKS
    late = r"ranks that did not arrive at gloo:all_reduce, number \d+ of default_pg \(ranks 0, 1, 2\): 2"
    assert re.search(late, texts[0]), texts[0]
    assert "time.sleep" in texts[2] or "in rank_main" in texts[2]


@pytest.mark.parametrize("mode", ["none", "write"])
def test_a_job_that_moves_is_left_alone(mode: str, tmp_path: Path) -> None:
    codes, texts, _ = ended(mode, tmp_path)
    assert codes == [0] * RANKS
    assert texts == [""] * RANKS


def breaks(which: str) -> None:
    """Stand still beside a watchdog of which something fails."""

    def fails(*_: object) -> int:
        raise ValueError("a probe of the program")

    options: dict[str, Any] = {"on_stall": fails} if which == "on_stall" else {}
    options |= {"moves": fails} if which == "probe" else {}
    if which == "last":
        watchdog.last_collectives = fails
    with open("/dev/full" if which == "file" else os.devnull, "w") as file:
        with Watchdog(0.2, dist.HashStore(), lambda: 0, rank=0, world_size=1, answer_s=0.2, file=file, **options):
            time.sleep(120)


def test_whatever_fails_in_the_watchdog_the_job_ends() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing.PRELOAD)
    ranks = [context.Process(target=breaks, args=(name,)) for name in ("file", "on_stall", "probe", "last")]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(patient(20))
        process.kill()
    assert [process.exitcode for process in ranks] == [RETRY] * len(ranks)


@testing.on_ranks(2)
def test_a_group_that_is_closed_while_collectives_are_counted_is_left_out() -> None:
    closed, other = dist.new_group(), dist.new_group()
    listed = groups.open_groups()
    dist.destroy_process_group(closed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "open_groups", lambda: listed)
        assert groups.group_title(other) in groups.collective_counts() and groups.last_collectives()
    dist.destroy_process_group(other)


class Counting:
    """A store in memory that counts requests, as TCPStore has them."""

    def __init__(self) -> None:
        self.requests, self._held, self._changed = 0, dict[str, bytes](), threading.Condition()

    def __getattr__(self, name: str) -> Any:
        def asked(key: Any, *more: Any) -> Any:
            with self._changed:
                self.requests += 1
                return getattr(self, f"_{name}")(key, *more)

        return asked

    def _set(self, key: str, value: str) -> None:
        self._held[key] = value.encode()
        self._changed.notify_all()

    def _get(self, key: str) -> bytes:
        return self._held[key]

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._held for key in keys)

    def _append(self, key: str, value: str) -> None:
        self._held[key] = self._held.get(key, b"") + value.encode()

    def _add(self, key: str, value: int) -> int:
        self._held[key] = str(int(self._held.get(key, b"0")) + value).encode()
        return int(self._held[key])

    def _wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self._changed.wait_for(lambda: self._check(keys), timeout.total_seconds()):
            raise dist.DistStoreError("timeout")


def test_a_verdict_takes_a_few_requests_of_each_of_1024_ranks() -> None:
    store, ranks = Counting(), 1024
    said: dict[int, tuple[str, bool]] = {}

    def answer(rank: int) -> None:
        watchdog = Watchdog(600.0, store, lambda: 7, rank=rank, world_size=ranks, answer_s=600.0)
        where = {"rank": rank, "step": "7", "groups": {"world": [9, "gloo:barrier"]}, "host": "a"}
        said[rank] = watchdog._ask(where)

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {sure for _, sure in said.values()} == {True}
    assert "every rank answers and none is behind" in said[0][0] and "rank 1023 at step 7" in said[0][0]
    assert store.requests < 12 * ranks


def test_the_verdict_when_nobody_is_behind() -> None:
    answers = {rank: {"step": "3", "groups": {"default_pg (ranks 0, 1)": [7, "gloo:barrier"]}} for rank in range(2)}
    assert "none is behind in a collective (rank 0 at step 3, rank 1 at step 3)" in verdict_of(answers, [], {})


def test_writing_counts_as_a_move(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        before = manager.writes
        manager.save(1, linear())
        assert manager.writes > before


def test_the_group_waits_longer_than_the_watchdog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(RECIPE)
    data: Any = None  # what preflight looks at, which is off
    bounds = []

    @contextmanager
    def distributed(kind: str, *, timeout_s: float) -> Iterator[torch.device]:
        bounds.append(timeout_s)
        yield torch.device(kind)

    monkeypatch.setattr(runtime, "distributed", distributed)
    for seconds in (2.0, 600.0, 1800.0, None):
        recipe = load_recipe(tmp_path / "job.yaml", [f"watchdog={'null' if seconds is None else seconds}"])
        with open_job(recipe, data, "cpu"):
            pass
    assert bounds == [600.0, 720.0, 1920.0, 600.0]


def test_a_verdict_without_the_others_stands_after_what_came_before_it(tmp_path: Path) -> None:
    record(tmp_path, 0, ValueError("the first"))
    record_stall(tmp_path, 1, "the store does not answer", cause=False)
    assert [failure.rank for failure in recorded(tmp_path)] == [0, 1]
    record_stall(tmp_path, 2, "rank 0 did not arrive")
    assert recorded(tmp_path)[0].rank == 2


RECIPE = """\
name: job
mesh: dp_shard=2
device: cpu
watchdog: 10
model: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 32, dropout: 0.0}
data: {source: files, paths: [text.md], cache: cache, sequence_length: 32, micro_batch: 2}
optimizer: {lr: 1e-3}
training: {steps: 200, log_every: 1, tensorboard: false}
checkpoint: {every: 20}
"""


def test_a_stalled_run_ends_and_its_restart_goes_on(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(RECIPE)
    (tmp_path / "text.md").write_text((Path(__file__).parents[2] / "README.md").read_text() * 20)
    command = [sys.executable, "-m", "meshpar.launchers", "run", "--restarts", "1", "job.yaml"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        metrics = tmp_path / "runs" / "job" / "metrics.jsonl"
        until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 30), 150)
        assert process.poll() is None
        os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
        _, output = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    assert "ranks that do not answer, stopped or dead or their host is lost: 1 (" in output
    assert "resuming after step" in output
    steps = [line["step"] for line in map(json.loads, metrics.read_text().splitlines()) if "train/loss" in line]
    assert steps[-1] == 200
