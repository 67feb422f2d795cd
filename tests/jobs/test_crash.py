"""kill -9 of any rank while saving loses no committed step; ``MESHPAR_CRASH_KILLS=200`` is the long run."""

import faulthandler
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshpar import testing
from meshpar.checkpoints import CheckpointManager, verify_step
from meshpar.checkpoints.format.dcp import DistributedCheckpoint
from meshpar.checkpoints.format.manifest import read_manifest
from meshpar.checkpoints.steps import steps as removal
from meshpar.checkpoints.storage import objects
from meshpar.checkpoints.storage.place import Place, place
from meshpar.core.errors import CheckpointError
from tests.checkpoints.test_commit import Job
from tests.support.patience import patient, until
from tests.support.stores import Store

KILLS = int(os.environ.get("MESHPAR_CRASH_KILLS", "4"))
RANKS = 3
TIMEOUT_S = 20.0
LONGEST_WAIT_S = 30.0
ROWS, COLUMNS, TENSORS = 96, 512, 8
AIMED = 0.75  # share of the kills in a store that wait until the rank uploads a file
UPLOADING: list[bool] = []  # whether a kill came during an upload of its rank
HIT: list[bool] = []  # whether a kill left an unfinished folder behind


class Filled(nn.Module):
    """Every element of every tensor is the step, so that a mixture of two steps shows."""

    def __init__(self, mesh) -> None:
        super().__init__()
        for number in range(TENSORS):
            tensor = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(number % 2)])
            self.register_parameter(f"w{number}", nn.Parameter(tensor))

    def set_to(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.to_local().fill_(step)


def rank_main(rank: int, port: int, root: str, first: int, mode: str, report: str, cloud: Store | None) -> None:
    """Save step after step until killed, or until a save fails because another rank was."""
    if cloud is not None:
        cloud.use()
        if cloud.scheme != "s3":  # which takes no smaller pieces than a file of this test
            objects._UPLOAD_BYTES = 64 << 10  # several requests for each file
        note_uploads(Path(f"{report}.{rank}"))
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=patient(TIMEOUT_S)))
    bound = timedelta(seconds=patient(TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=bound)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    module = Filled(mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    keep = 1 if mode == "retention" else 3
    manager = CheckpointManager(root, keep=keep, async_=mode == "async", timeout_s=patient(TIMEOUT_S))
    log = Path(f"{report}.{rank}")
    if mode == "retention":  # let removal take long enough to be hit
        removal.remove = lambda folder, remove=removal.remove: (time.sleep(0.03), remove(folder), time.sleep(0.01))
    for step in itertools.count(first):
        module.set_to(step)
        note(log, "begin", step)
        try:
            manager.save(step, Job(module, mesh=mesh), optimizer, extra={"step": step})
            if mode == "async":
                time.sleep(0.002)
            manager.before_step()
        except CheckpointError as error:
            note(log, "failed", str(error))
            os._exit(3)
        note(log, "saved", step if mode != "async" else step - 1)


def note(log: Path, kind: str, value: str | int) -> None:
    with log.open("a") as file:
        file.write(f"{json.dumps([kind, value])}\n")


def note_uploads(log: Path) -> None:
    """Write into this rank's report when an upload begins and when it ends."""

    @contextmanager
    def noted(self: objects.ObjectPath, expected_bytes: int = 0, *, writing=objects.ObjectPath.writing) -> Iterator:
        note(log, "upload", self.name)
        try:
            with writing(self, expected_bytes) as write:
                yield write
        finally:
            note(log, "uploaded", self.name)

    objects.ObjectPath.writing = noted


def uploads(report: str, rank: int) -> int:
    """Return how many uploads of a rank are under way."""
    return len(reported(report, rank, "upload")) - len(reported(report, rank, "uploaded"))


def reported(report: str, rank: int, kind: str) -> list:
    log = Path(f"{report}.{rank}")
    lines = [line for line in log.read_text().splitlines() if line.endswith("]")] if log.exists() else []
    return [value for what, value in map(json.loads, lines) if what == kind]


def check_steps(root: Place) -> None:
    """Assert that every committed step is whole, byte for byte, and of one moment."""
    for step in CheckpointManager(root).steps():
        folder = root / f"step-{step:08d}"
        verify_step(folder)
        assert read_manifest(folder).extra == {"step": step}
        source = DistributedCheckpoint(folder)
        for name, shape in source.shapes().items():
            if name.startswith("model."):
                whole = torch.empty(shape)
                source.read(name, (), whole)
                assert torch.equal(whole, torch.full(shape, float(step))), (step, name)


def kill_one(
    root: Place, mode: str, number: int, generator: random.Random, scratch: Path, cloud: Store | None
) -> float:
    """Start the ranks, kill one at a random moment, and return how long the others took to notice."""
    manager = CheckpointManager(root)
    before = manager.steps()
    first, report = (manager.latest() or 0) + 1, str(scratch / f"report-{number}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing.PRELOAD)
    # As torchrun has it: where the ranks meet is in no rank's hands (a rank killed while it writes to a FileStore can
    # spoil it).
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, str(root), first, mode, report, cloud)
    ranks = [context.Process(target=rank_main, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        # The first save of a run makes the group, the folder and the first link; the others do not.
        settled = 0 if mode == "first" else 2
        until(lambda: len(reported(report, 0, "begin")) > settled, 60, every=0.001)
        time.sleep(generator.random() * (0.15 if mode == "first" else 0.1) * (1 if cloud is None else 4))
        victim = generator.randrange(RANKS)
        if cloud is not None and generator.random() < AIMED:
            until(lambda: uploads(report, victim), 60, every=0.001)
            time.sleep(generator.random() * 0.02)
        UPLOADING.append(uploads(report, victim) > 0)
        os.kill(ranks[victim].pid, signal.SIGKILL)
        began = time.monotonic()
        for process in ranks:
            process.join(patient(LONGEST_WAIT_S))
        waited = time.monotonic() - began
        for process in ranks:
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)
        assert all(process.exitcode is not None for process in ranks), f"survivors of kill {number} ({mode}) still wait"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    steps = manager.steps()
    HIT.append(bool(manager.ignored()))
    saved = max((step for rank in range(RANKS) for step in reported(report, rank, "saved") if step >= first), default=0)
    newest = max(steps, default=0)
    assert newest >= max(saved, max(before, default=0)), f"kill {number} ({mode}) lost step {saved}: {steps}"
    check_steps(root)
    return waited


@pytest.mark.timeout(60 + 15 * KILLS)
@pytest.mark.parametrize("storage", ["disk", "store"])
def test_kill_9_of_any_rank_at_any_moment_loses_and_mixes_nothing(tmp_path, storage, request):
    cloud = request.getfixturevalue("store") if storage == "store" else None
    home: Place = tmp_path if cloud is None else place(request.getfixturevalue("bucket"))
    generator = random.Random(int(os.environ.get("MESHPAR_CRASH_SEED", "0")))
    modes = ("first", "later", "async", "retention")
    waits = []
    kills = KILLS if cloud is None or KILLS > 4 else 2  # of the sample, the store has the two that upload longest
    for number in range(kills):
        mode = modes[(number + (0 if cloud is None else 1)) % len(modes)]
        root = home / (f"first-{number}" if mode == "first" else mode)
        waits.append(kill_one(root, mode, number, generator, tmp_path, cloud))
    assert max(waits) < LONGEST_WAIT_S
    hit = f"{sum(UPLOADING)} of them during an upload, {sum(HIT)} left an unfinished folder"
    print(f"{kills} kills, {hit}; survivors waited {max(waits):.1f} s at most")  # noqa: T201
    HIT.clear()
    UPLOADING.clear()
    for mode in modes[1:]:
        if (home / mode).is_dir():
            steps = CheckpointManager(home / mode)
            steps._steps.reap()
            assert not steps.ignored(), "leftovers of the dead are removed"
