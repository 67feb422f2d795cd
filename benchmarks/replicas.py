"""Lose replicas at random instants: is any token lost or counted twice, any loss wrong, and how long does a loss cost?

    python benchmarks/replicas.py [--faults 200] [--seed 0] [--replicas 3] [--ranks 2] [--hosts] [--cost]

A loop of one's own trains in several replicas of several ranks, and is hurt again and again: SIGKILL, SIGSTOP, and with
``--hosts`` (root) a cut link, of one replica or of two shortly after another, in each phase of a step. Lost replicas
are started again. In the end every loss is compared with one process's on the samples that counted, the replicas with
one another, and the samples with the data. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshpar import FullyShard, Plan, Replicate
from meshpar.checkpoints import CheckpointManager
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import PRELOAD, token_loss_sum
from meshpar.training import Batches, Lighthouse, Replicas

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.patience import until

VOCAB, LENGTH, BATCH = 64, 8, 2
PHASES = ("join", "begin", "forward", "backward", "reduce", "step", "save", "validate")
SELDOM = ("save", "validate")
VALIDATE_EVERY = 5
LONGEST_S = 30.0
os.environ.setdefault("RUST_LOG", "error")  # before the server of forks loads torchft
_NEW_NETWORK = 0x40000000  # linux/sched.h: CLONE_NEWNET


class Rows:
    """Random rows; ``fingerprint`` names them."""

    fingerprint = "rows"

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        rows = torch.stack(
            [
                torch.randint(VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(max(0, index)))
                for index in indices
            ]
        )
        labels = rows[:, 1:].clone()
        labels[[index < 0 for index in indices]] = -100
        labels[:, : 1 + max(indices) % 3] = -100  # rows, and so replicas, count different numbers of tokens
        return {"input_ids": rows[:, :-1], "labels": labels}


def model() -> torch.nn.Module:
    """Return a small model in float64: rounding is that of its norms and loss alone, and stays small over thousands
    of steps.
    """
    return Transformer(
        TransformerConfig(vocab_size=VOCAB, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, max_positions=64)
    ).double()


def parallel(ranks: int) -> Any:
    with torch.device("meta"):
        module = model()
    return Plan(f"dp_shard={ranks}", [FullyShard()]).apply(module).materialize(seed=0)


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    # At 1e-3 the rows are learnt by heart after a thousand steps, and one process then differs from itself: weights
    # changed by 1e-15 at the beginning change a loss by 2e-5 after 1,200 steps, and by 0.1 after 2,100. At 1e-4 they
    # change none of 2,000 losses.
    return torch.optim.AdamW(module.parameters(), lr=1e-4, eps=1e-3)


def digest(par: Any, optimizer: torch.optim.Optimizer) -> str:
    """Hash the whole weights and this rank's moments."""
    hashed = hashlib.sha256()
    for _, value in sorted(par.state_dict(full=True, everywhere=True).items()):
        hashed.update(value.numpy().tobytes())
    for value in optimizer.state_dict()["state"].values():
        hashed.update(local(value["exp_avg"]).numpy().tobytes())
    return hashed.hexdigest()


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def rank_main(job: dict[str, Any], replica: int, life: int, rank: int, phase: Any) -> None:
    """Train as one rank of one replica, until the last epoch ends."""
    torch.set_num_threads(1)
    if job["namespaces"]:
        with open(f"/run/netns/{job['namespaces'][replica]}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    folder, ranks = Path(job["folder"]), job["ranks"]
    log = os.open(folder / f"log-{replica}-{life}-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = dist.FileStore(str(folder / f"store-{replica}-{life}"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=job["patience_s"])
    )
    par = parallel(ranks)
    optimizer = optimizer_of(par.module)
    samples = Rows(job["rows"])
    data = Batches(samples, micro_batch=BATCH, data_rank=par.data_rank, data_size=par.data_size, seed=0)
    checkpoints = CheckpointManager(folder / "checkpoints", keep=2, timeout_s=job["patience_s"])

    def at(name: str) -> None:
        phase.value = PHASES.index(name)
        time.sleep(job["pause_s"])

    report = folder / f"steps-{replica}-{life}.jsonl"
    options = {"lighthouse": job["lighthouse"], "replicas": job["replicas"], "patience_s": job["patience_s"]}
    with Replicas(par, optimizer, data, name=str(replica), **options) as replicas:
        at("join")
        if not replicas.join():
            if checkpoints.latest() is not None:
                extra = checkpoints.restore(par, optimizer).extra
                data.load_state_dict(extra["data"])
                replicas.step = extra["step"]
            if rank == 0:
                (folder / f"begun-{replica}-{life}.json").write_text(
                    json.dumps({"step": replicas.step, "at": time.time()})
                )
        while data.epoch < job["epochs"] and data.epoch < last_epoch(folder):
            at("begin")
            (batch,) = replicas.begin()
            shares = [rows_of(data, number) for number in range(replicas.slots)]
            epoch = data.epoch
            at("forward")
            loss_sum, tokens = token_loss_sum(par.module, batch)
            scaled = (
                loss_sum * par.loss_size / par.data_sum(torch.tensor(float(tokens), dtype=torch.float64)).clamp(min=1)
            )
            at("backward")
            scaled.backward()
            at("reduce")
            done = replicas.reduce(tokens, loss_sum)
            at("step")
            optimizer.step()
            optimizer.zero_grad()
            for change in replicas.changes:
                print(f"{time.time():.2f} {change}", flush=True)
            if rank == 0 and done is not None:
                rows = [row for share, counted in zip(shares, replicas.counted) if counted for row in share]
                changes = [[change.seconds, len(change.lost), len(change.joined)] for change in replicas.changes]
                line = {
                    "step": replicas.step,
                    "loss": float(done[1] / done[0]),
                    "rows": rows,
                    "epoch": epoch,
                    "at": time.time(),
                }
                with report.open("a") as file:
                    file.write(json.dumps(line | {"sum": replicas.sum, "changes": changes}) + "\n")
            replicas.changes.clear()
            if done is not None and replicas.step % VALIDATE_EVERY == 0:
                for first in range(0, 2 * BATCH, BATCH):
                    at("validate")
                    with torch.no_grad():
                        token_loss_sum(par.module, samples.__getitems__(range(first, first + BATCH)))
                    replicas.alive()
            due = done is not None and job["save_every"] and replicas.step % job["save_every"] == 0
            if due and replicas.writes():
                at("save")
                extra = {"data": data.state_dict(), "step": replicas.step}
                checkpoints.save(replicas.step, par, optimizer, extra, replace=True)
    found = digest(par, optimizer)
    if rank == 0:
        torch.save(par.state_dict(full=True), folder / f"weights-{replica}.pt")
    else:
        par.state_dict(full=True)
    (folder / f"end-{replica}-{rank}").write_text(found)
    os._exit(0)  # the others may be gone, for whom gloo's threads would wait


def last_epoch(folder: Path) -> float:
    """Return the number of epochs after which the job ends, as soon as somebody has written it."""
    path = folder / "last"
    return int(path.read_text() or 10**6) if path.exists() else 10**6


def rows_of(data: Batches, number: int) -> list[int]:
    """Return the samples of one replica's share of the step."""
    sampler = data._sampler
    return sampler.at(sampler.places(number * data.global_batch, data.global_batch))


class Lab:
    """A job of several replicas on this machine, whose lost replicas are started again; a context manager.

    Args:
        folder: for stores, logs and checkpoints.
        replicas: number of replicas.
        ranks: number of ranks of each.
        options: further settings of :func:`rank_main`.
    """

    def __init__(self, folder: Path, *, replicas: int, ranks: int, **options: Any) -> None:
        defaults = dict(epochs=1, rows=256, pause_s=0.0, patience_s=4.0, save_every=0, namespaces=[], lighthouse="")
        self.job = defaults | options | dict(folder=str(folder), replicas=replicas, ranks=ranks)
        self.folder, self.restarts = folder, True
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [*PRELOAD, "meshpar.models", "meshpar.checkpoints", "torchft.coordination"]
        )
        self._phases = [self._context.Value("i", 0, lock=False) for _ in range(replicas)]
        self._ranks: dict[int, list[Any]] = {}
        self._lives = dict.fromkeys(range(replicas), 0)
        self.ended: set[int] = set()

    def __enter__(self) -> Lab:
        self._lighthouse = None
        if not self.job["lighthouse"]:
            self._lighthouse = Lighthouse(patience_s=self.job["patience_s"])
            self.job["lighthouse"] = f"http://127.0.0.1:{self._lighthouse.port}"
        for replica in self._lives:
            self.start(replica)
        return self

    def __exit__(self, *error: object) -> None:
        for ranks in self._ranks.values():
            for rank in ranks:
                rank.kill()
                rank.join()
        if self._lighthouse is not None:
            self._lighthouse.close()

    def start(self, replica: int) -> None:
        life, self._lives[replica] = self._lives[replica], self._lives[replica] + 1
        phase = self._phases[replica]
        self._ranks[replica] = [
            self._context.Process(target=rank_main, args=(self.job, replica, life, rank, phase), daemon=True)
            for rank in range(self.job["ranks"])
        ]
        for process in self._ranks[replica]:
            process.start()

    def tend(self) -> None:
        """End what is left of a replica that lost a rank, and start it again, as an agent does."""
        for replica, ranks in self._ranks.items():
            codes = [rank.exitcode for rank in ranks]
            if replica in self.ended or all(code is None for code in codes):
                continue
            if any(code not in (None, 0) for code in codes):
                for rank in ranks:
                    rank.kill()
                    rank.join()
                if self.restarts:
                    self.start(replica)
                else:
                    self.ended.add(replica)
            elif all(code == 0 for code in codes):
                self.ended.add(replica)

    def wait(self, true: Callable[[], bool], limit_s: float) -> None:
        """Wait for something to happen, at most ``limit_s`` seconds of a quiet machine.

        Raises:
            AssertionError: it did not; the message has the newest lines of all logs.
        """

        def tended() -> bool:
            self.tend()
            return true()

        until(tended, limit_s, report=self._newest_lines)

    def _newest_lines(self) -> str:
        logs = sorted(self.folder.glob("log-*"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in logs[-2 * len(self._lives) :])

    def steps(self) -> int:
        """Return the newest step that any replica has committed."""
        newest = [path.read_text().splitlines()[:-1] or [""] for path in self.folder.glob("steps-*.jsonl")]
        return max((int(lines[-1].split(",")[0].rpartition(" ")[2]) for lines in newest if lines[-1]), default=0)

    def whole(self, since: float = 0.0) -> bool:
        """Return whether all replicas have committed a step since then, by their newest lives."""
        for replica, lives in self._lives.items():
            path = self.folder / f"steps-{replica}-{lives - 1}.jsonl"
            lines = path.read_text().splitlines()[:-1] if path.exists() else []
            if not lines or json.loads(lines[-1])["at"] <= since:
                return False
        return True

    def epoch(self) -> int:
        """Return the newest epoch."""
        return max(line["epoch"] for lines in histories(self.folder).values() for line in lines[-1:])

    def phase(self, replica: int) -> str:
        """Return where in its step a replica is."""
        return PHASES[self._phases[replica].value]

    def wait_for(self, replica: int, phase: str, limit_s: float = LONGEST_S) -> None:
        """Wait until a replica is in a phase of its step."""
        self.wait(lambda: self._phases[replica].value == PHASES.index(phase) or replica in self.ended, limit_s)

    def signal(self, replica: int, number: int, ranks: slice = slice(None)) -> None:
        """Send a signal to ranks of a replica."""
        for process in self._ranks[replica][ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def finish(self, limit_s: float = LONGEST_S) -> None:
        """Wait until every replica has come to the end; a step may take ``limit_s``."""
        seen = -1
        while len(self.ended) < len(self._lives):
            before = seen
            self.wait(lambda before=before: self.steps() > before or len(self.ended) == len(self._lives), limit_s)
            seen = self.steps()


def histories(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each life of each replica has committed."""
    found = {}
    for path in sorted(folder.glob("steps-*.jsonl")):
        text = path.read_text()
        found[path.stem] = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return found


def check(folder: Path, rows: int) -> dict[str, Any]:
    """Compare a job that has ended with one process and with the data, and return its history.

    Raises:
        AssertionError: a token is lost or counted twice, a loss differs, or replicas differ.
    """
    steps: dict[int, dict[str, Any]] = {}
    lives, begun = histories(folder), [json.loads(path.read_text()) for path in folder.glob("begun-*.json")]
    for lines in lives.values():
        for line in lines:
            if line["step"] not in steps or line["sum"] > steps[line["step"]]["sum"]:
                steps[line["step"]] = line
    overruled = 0
    for name, lines in lives.items():
        # A step before which all have started again from a checkpoint is undone.
        lines = [
            line
            for line in lines
            if not any(line["at"] < record["at"] and line["step"] > record["step"] for record in begun)
        ]
        # A step of which the others did not hear in time is overruled: its replica copies their state and makes their
        # next step.
        agrees = [all(line[field] == steps[line["step"]][field] for field in ("loss", "rows", "sum")) for line in lines]
        overruled += agrees.count(False)
        for line, one, then in zip(lines, agrees, agrees[1:]):
            assert one or then, f"{name} went on by itself after step {line['step']}, which the others made without it"
    assert sorted(steps) == list(range(1, len(steps) + 1)), "a step is missing"
    for epoch in {line["epoch"] for line in steps.values()}:
        counted = sorted(row for line in steps.values() for row in line["rows"] if line["epoch"] == epoch)
        assert counted == list(range(rows)), f"epoch {epoch}: samples were lost or counted twice"
    digests = {path.read_text() for path in folder.glob("end-*")}
    assert digests, "no replica came to the end"
    by_rank = [{path.read_text() for path in folder.glob(f"end-*-{rank}")} for rank in range(8)]
    assert all(len(distinct) <= 1 for distinct in by_rank), "replicas differ in the end"
    compared_with_one_process(folder, [steps[number] for number in sorted(steps)])
    restored = sum(record["step"] > 0 for record in begun)
    return {"steps": len(steps), "overruled": overruled, "changes": changes_of(lives), "restored": restored}


def changes_of(lives: dict[str, list[dict[str, Any]]]) -> list[tuple[float, int, int]]:
    """Return each change of membership once, as the slowest replica saw it: seconds, replicas lost, replicas joined."""
    found: dict[int, tuple[float, int, int]] = {}
    for lines in lives.values():
        for line in lines:
            for seconds, lost, joined in line["changes"]:
                found[line["step"]] = max(found.get(line["step"], (0.0, 0, 0)), (seconds, lost, joined))
    return list(found.values())


def compared_with_one_process(folder: Path, steps: list[dict[str, Any]]) -> None:
    """Train in this process on the samples that counted in each step, and compare losses and the weights in the end."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        one = model()
    with own_group():
        par = Plan("dp_shard=1", []).apply(one).materialize(seed=0)
        optimizer, samples = optimizer_of(par.module), Rows(1)
        for line in steps:
            parts = [
                token_loss_sum(par.module, samples.__getitems__(line["rows"][at : at + BATCH]))
                for at in range(0, len(line["rows"]), BATCH)
            ]
            loss = sum(part_loss for part_loss, _ in parts) / max(1, sum(tokens for _, tokens in parts))
            assert abs(float(loss.detach()) - line["loss"]) < 2e-6, (
                f"step {line['step']}: loss {line['loss']}, in one process {float(loss.detach())}"
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for path in folder.glob("weights-*.pt"):
            for name, value in torch.load(path).items():
                assert torch.allclose(value, par.module.get_parameter(name), rtol=0, atol=2e-6), (
                    f"{name} differs from one process in the end"
                )


@contextlib.contextmanager
def own_group() -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def hurt(lab: Lab, draw: random.Random, hosts: Any = None) -> tuple[str, float]:
    """Hurt one replica in a drawn phase, or two of three shortly after one another, and wait until all are there
    again.
    """
    replicas, patience_s = list(range(lab.job["replicas"])), lab.job["patience_s"]
    victims = draw.sample(replicas, 2 if len(replicas) > 2 and draw.random() < 0.25 else 1)
    phases = [candidate for candidate in PHASES if candidate != "save" or lab.job["save_every"]]
    blows, struck = [], 0.0
    for turn, victim in enumerate(victims):
        phase, kind = (
            draw.choice(phases),
            draw.choice(["kill", "kill a rank", "stop", *(["cut"] if hosts is not None else [])]),
        )
        if turn:
            time.sleep(draw.uniform(0, patience_s))  # while the others recover, or the first one joins
        elif phase == "join":
            lab.signal(victim, signal.SIGKILL)
            lab.wait_for(victim, phase)
            time.sleep(draw.uniform(0, 2))  # while the others let it in, or it copies their state
        elif phase in SELDOM:
            lab.wait(
                lambda phase=phase: any(lab.phase(replica) == phase for replica in replicas) or bool(lab.ended),
                LONGEST_S,
            )
            victim = next((replica for replica in (victim, *replicas) if lab.phase(replica) == phase), victim)
        else:
            lab.wait_for(victim, phase)
        struck = struck or time.time()
        blows.append(f"{kind} {victim} in {phase if not turn else 'recovery'}")
        if kind.startswith("kill"):
            lab.signal(
                victim, signal.SIGKILL, slice(None) if kind == "kill" else slice(draw.randrange(lab.job["ranks"]), None)
            )
            continue
        back_s = draw.choice([0.5, patience_s + 3])
        off, on = (lambda v: lab.signal(v, signal.SIGSTOP), lambda v: lab.signal(v, signal.SIGCONT))
        if kind == "cut":
            off, on = (lambda v: hosts.cut(hosts.names[v]), lambda v: hosts.cut(hosts.names[v], cut=False))
        off(victim)
        back = time.monotonic() + back_s
        lab.wait(lambda back=back: time.monotonic() > back, back_s + 5)
        on(victim)
    mended = time.time()
    lab.wait(lambda: lab.whole(mended) or bool(lab.ended), 2 * LONGEST_S)
    return ", ".join(blows), struck


def run(
    folder: Path, *, faults: int, seed: int, replicas: int, ranks: int, hosts: Any = None, **options: Any
) -> dict[str, Any]:
    """Hurt a job so many times, let it come to its end, and check it.

    Raises:
        AssertionError: what is wrong.
    """
    draw, struck, events = random.Random(seed), [], []
    options = dict(rows=256, pause_s=0.02, save_every=7, epochs=10**6) | options
    if hosts is not None:
        options["namespaces"] = [hosts.namespace(name) for name in hosts.names]
    with Lab(folder, replicas=replicas, ranks=ranks, **options) as lab:
        lab.wait(lab.whole, 4 * LONGEST_S)
        for _ in range(faults):
            what, at = hurt(lab, draw, hosts)
            events.append(what)
            struck.append(at)
            print(f"{len(events)}: {what}; step {lab.steps()}", flush=True)
        (folder / "last.new").write_text(str(lab.epoch() + 2))
        (folder / "last.new").replace(folder / "last")
        lab.finish(2 * LONGEST_S)
    found = check(folder, options["rows"])
    times = sorted(
        line["at"]
        for lines in histories(folder).values()
        for line in lines
        if any(lost for _, lost, _ in line["changes"])
    )
    found["recovery_s"] = [
        min(after) for at in struck if (after := [time_ - at for time_ in times if 0 < time_ - at < 2 * LONGEST_S])
    ]
    return found


RECIPE = """\
mesh: dp_replicate=2,dp_shard=1
device: cpu
patience: 5
output: out
model: {dim: 32, layers: 2, heads: 2, hidden: 64, max_positions: 64}
data: {source: files, paths: [text.txt], sequence_length: 64, micro_batch: 2, validation_fraction: 0.1, cache: cache}
optimizer: {lr: 1e-3}
training: {steps: 150, log_every: 1, validate_every: 60, validate_steps: 2}
checkpoint: {every: 40}
"""


def rank_of(logs: Path) -> int:
    """Return the process of a rank that writes to a folder of logs."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if "meshpar.launchers.jobs.worker" in words and any(word.startswith(str(logs)) for word in words):
                return int(path.parent.name)
    raise AssertionError(f"no rank writes to {logs}")


def killed_recipe(folder: Path, words: list[str], logs: str, overrides: Sequence[str] = ()) -> tuple[float, str]:
    """Run a small recipe and kill a rank after its 20th line of metrics. Each wait is bounded in seconds of a quiet
    machine.

    Returns:
        Seconds from the kill to the next step that was not made before, and the job's output.
    """
    (folder / "text.txt").write_text(
        "".join(f"{number} times {number} is {number * number}.\n" for number in range(3000))
    )
    (folder / "job.yaml").write_text(RECIPE)
    log, metrics = folder / "told", folder / "out/metrics.jsonl"
    with log.open("w") as file:
        command = [sys.executable, "-m", "meshpar.launchers", "run", *words, "job.yaml", *overrides]
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
    try:
        until(
            lambda: (metrics.exists() and metrics.read_text().count("\n") > 20) or process.poll() is not None,
            report=log.read_text,
        )
        assert process.poll() is None, log.read_text()
        os.kill(rank_of(folder / logs), signal.SIGKILL)
        at = time.time()
        until(lambda: process.poll() is not None, report=log.read_text)
        assert process.returncode == 0, log.read_text()
    finally:
        process.terminate()
    lines = [json.loads(line) for path in folder.glob("out/metrics*.jsonl") for line in path.read_text().splitlines()]
    before = max(line["step"] for line in lines if line["time"] < at)
    return min(line["time"] for line in lines if line["step"] > before) - at, log.read_text()


def timed_main(folder: str, name: str, rank: int, lighthouse: str, steps: int, way: dict[str, Any]) -> None:
    """Time steps of replicas of one rank: as one job (no ``lighthouse``), or as replicas that may be lost."""
    torch.set_num_threads(1)
    count = way["replicas"]
    world = 1 if lighthouse else count
    store = dist.FileStore(f"{folder}/{name}-{rank if lighthouse else 0}", world)
    dist.init_process_group("gloo", store=store, rank=0 if lighthouse else rank, world_size=world)
    with torch.device("meta"):
        module = Transformer(
            TransformerConfig(vocab_size=1024, dim=256, layers=4, heads=4, kv_heads=4, hidden=1024, max_positions=128)
        )
    par = Plan(f"dp_replicate={world}", [Replicate()]).apply(module).materialize(seed=0)
    optimizer, seconds = optimizer_of(par.module), []
    batch = {"input_ids": torch.randint(1024, (4, 128)), "labels": torch.randint(1024, (4, 128))}
    with contextlib.ExitStack() as stack:
        replicas = None
        if lighthouse:
            data = Batches(Rows(10**6), micro_batch=4, seed=0)
            options = {"lighthouse": lighthouse, "name": str(rank), "replicas": count}
            replicas = stack.enter_context(Replicas(par, optimizer, data, **options))
        for _ in range(steps):
            began = time.perf_counter()
            if replicas is not None:
                replicas.begin()
            loss_sum, tokens = token_loss_sum(par.module, batch)
            (loss_sum * par.token_scale(tokens)).backward()
            if replicas is not None:
                replicas.reduce(tokens)
            par.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        time.sleep(1.0)  # the others may still need this one
    Path(folder, f"{name}-{rank}.json").write_text(json.dumps(seconds[3:]))
    os._exit(0)


def cost(folder: Path, ways: Sequence[dict[str, Any]], *, blocks: int = 3, steps: int = 18) -> list[float]:
    """Return the median seconds of a step in several ways, in blocks that take turns."""
    context, found = multiprocessing.get_context("forkserver"), [list[float]() for _ in ways]
    context.set_forkserver_preload([*PRELOAD, "meshpar.models", "meshpar.checkpoints", "torchft.coordination"])
    for block in range(len(ways) * blocks):
        way = ways[block % len(ways)]
        served = Lighthouse() if way["lost"] else None
        address = "" if served is None else f"http://127.0.0.1:{served.port}"
        ranks = range(way["replicas"])
        started = [
            context.Process(target=timed_main, args=(str(folder), str(block), rank, address, steps, way))
            for rank in ranks
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if served is not None:
            served.close()
        found[block % len(ways)] += json.loads((folder / f"{block}-0.json").read_text())
    return [statistics.median(seconds) for seconds in found]


def tell_cost() -> None:
    """Measure what a step costs when nothing fails, and print it."""
    with tempfile.TemporaryDirectory(prefix="replicas-") as name:
        plain, elastic = cost(Path(name), [{"replicas": 2, "lost": False}, {"replicas": 2, "lost": True}])
    text = f"{1000 * plain:.1f} ms as one job, {1000 * elastic:.1f} ms where one may be lost: {elastic / plain:.3f}"
    print(f"a step of two replicas: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--hosts", action="store_true", help="each replica on a host of its own, whose link is cut, too; needs root"
    )
    parser.add_argument("--cost", action="store_true", help="only measure what a step costs when nothing fails")
    arguments = parser.parse_args()
    if arguments.cost:
        tell_cost()
        return 0
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder, hosts, served = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replicas-"))), None, {}
        if arguments.hosts:
            from tests.support.hosts import Hosts

            hosts = stack.enter_context(Hosts(arguments.replicas))
            lighthouse = Lighthouse(host="[::]", patience_s=4.0)
            stack.callback(lighthouse.close)
            served["lighthouse"] = f"http://{hosts.address('ctl')}:{lighthouse.port}"
        sizes = {"replicas": arguments.replicas, "ranks": arguments.ranks}
        try:
            found = run(folder, faults=arguments.faults, seed=arguments.seed, hosts=hosts, **sizes, **served)
        except AssertionError as error:
            print(f"WRONG, seed {arguments.seed}: {error}")
            return 1
        ways = {
            "--elastic replicas": (["--elastic", "replicas"], "out/logs/replica-0"),
            "--restarts 1": (["--restarts", "1"], "out/logs"),
        }
        for number, (name, (words, logs)) in enumerate(ways.items()):
            (other := folder / f"recipe-{number}").mkdir()
            print(
                f"a recipe with {name}, a rank killed: {killed_recipe(other, words, logs)[0]:.1f} s to the next new "
                "step"
            )
    lost = found["recovery_s"] or [float("nan")]
    print(
        f"{arguments.faults} faults of {arguments.replicas} replicas x {arguments.ranks} ranks in "
        f"{time.monotonic() - began:.0f} s, {found['steps']} steps, {found['overruled']} of which a lost replica "
        f"alone had committed, {found['restored']} starts from a checkpoint: 0 wrong\n"
        f"recovery, fault to the others' next step: median {statistics.median(lost):.1f} s, longest {max(lost):.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
