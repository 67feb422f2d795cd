"""Faults beside a small job, as a table: ``python -m tests.support.faults FOLDER [NAME ...]``."""

import asyncio
import ctypes
import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import torch._dynamo  # or each job would load it
import torch.distributed as dist

import meshpar
from meshpar import FullyShard, Plan
from meshpar.checkpoints import CheckpointManager
from meshpar.launchers.agent.watchdog import Watchdog
from meshpar.launchers.jobs.job import Saver
from meshpar.models import Transformer, TransformerConfig
from meshpar.process.waiting import exit_code_of
from meshpar.testing import whole
from meshpar.training import (
    AdamWSettings,
    Batches,
    CausalLM,
    Samples,
    Schedule,
    Trackers,
    TrainSettings,
    build_adamw,
    generate,
    log_likelihoods,
    send_to_trackers,
    validating,
    write_tokens,
)
from meshpar.training.loop import Trainer
from meshpar.training.samples import PackedTokens

STEPS, EVERY, AT = 6, 2, 4
"""Each second step is due: it is saved, then validated and evaluated. Faults come beside step 4."""
VOCAB = 32
HERE = "tests.support.faults"
GOES_ON, STOPPED, FAILED, KILLED, STALLED = 0, 143, 1, 137, 75


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and how the job ends with it.

    Attributes:
        ends: exit codes of the ranks that are right; of two ranks, those of either.
        evaluation, loss: called in the evaluation, and in each validation batch, beside step 4.
        start: called before the training, with the run's folder.
        tracker: how the tracker behaves.
        ranks: number of ranks.
        least: the step that must be there at least.
        settings: of the training.
        background: save in the background.
        small_disk: the run's folder is a file system of its own, of 96 MiB; such a fault is left out where it cannot be
            mounted.
    """

    ends: Sequence[int] = (GOES_ON,)
    evaluation: Callable[[Any], Any] | None = None
    loss: Callable[[int], object] | None = None
    start: Callable[[Path], object] | None = None
    tracker: str = ""
    ranks: int = 1
    least: int = AT
    settings: Mapping[str, Any] = field(default_factory=dict)
    background: bool = False
    small_disk: bool = False


# What evaluations do


def forward(par: Any, times: int = 2) -> None:
    with torch.no_grad():
        for _ in range(times):
            par.module(input_ids=torch.ones(1, 4, dtype=torch.int64))


def raises(error: BaseException) -> Callable[[Any], Any]:
    def evaluation(par: Any) -> Any:
        forward(par)
        raise error

    return evaluation


def returns(value: Any) -> Callable[[Any], Any]:
    return lambda par: value


def leaves(act: Callable[[], object]) -> Callable[[Any], Any]:
    def evaluation(par: Any) -> Any:
        forward(par)
        act()
        return {"x": 1.0}

    return evaluation


def on_rank(rank: int, act: Callable[[], object], *, then: Callable[[Any], object] = forward) -> Callable[[Any], Any]:
    def evaluation(par: Any) -> Any:
        forward(par)
        if dist.get_rank() == rank:
            act()
        then(par)
        return {"x": 1.0}

    return evaluation


def throw(error: BaseException) -> None:
    raise error


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def hang() -> None:
    """Sleep for ever, and hear nothing."""
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def in_forward(par: Any) -> Any:
    """Raise on one rank inside of a forward, after two, by which ranks know what they gather in it."""
    forward(par)
    block = par.module.layers[1]
    handle = block.register_forward_pre_hook(
        lambda *_: throw(RuntimeError("no memory")) if dist.get_rank() == dist.get_world_size() - 1 else None
    )
    try:
        forward(par)
    finally:
        handle.remove()


def in_other_modes(par: Any) -> Any:
    par.module.eval()
    torch.manual_seed(7)
    torch.rand(5)
    raise KeyError("question 7")


def signalled(act: Callable[[Any], object], number: int = signal.SIGTERM, rank: int = 0) -> Callable[[Any], Any]:
    def evaluation(par: Any) -> Any:
        if dist.get_rank() == rank:
            kill(number)
        act(par)
        return {"x": 1.0}

    return evaluation


def asks_all(act: Callable[[Any], object]) -> Callable[[Any], Any]:
    def evaluation(par: Any) -> Any:
        kill(signal.SIGTERM)
        act(par)

    return evaluation


class Letters:
    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % (VOCAB - 1) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(96 + token) for token in ids)


def samples(par: Any) -> Any:
    return Samples(Letters(), prompts=["ab", "c"], tokens=200)(par)


# Trackers


@final
class Board:
    """A tracker that misbehaves from the third record on."""

    def __init__(self, run: Any, *, how: str = "", ends: str = "") -> None:
        self.how, self.ends = how, ends
        if how == "does not begin" or (how == "begins with SystemExit" and run.step < 1):
            raise SystemExit(3) if "Exit" in how else ConnectionError("no route")

    def send(self, records: Sequence[Mapping[str, float]]) -> None:
        if self.how == "hangs":
            hang()
        if self.how == "refuses":
            raise ConnectionError("400")
        if self.how == "raises SystemExit":
            sys.exit(3)
        if self.how == "refuses one" and any(record["step"] == 3 for record in records):
            raise ValueError("a name of more than 250 characters")

    def close(self, ended: str) -> None:
        if self.how == "does not end":
            hang()
        if self.how == "ends with SystemExit":
            sys.exit(3)


@final
class Broken:
    """A reporter that raises an error."""

    def report(self, record: Mapping[str, float]) -> None:
        raise RuntimeError("a terminal is gone")

    def note(self, text: str) -> None:
        raise RuntimeError("a terminal is gone")

    def close(self, ended: str) -> None: ...


@final
class Kills:
    """A reporter that asks the run to stop right after the evaluation beside step 4."""

    def report(self, record: Mapping[str, float]) -> None:
        if record["step"] == AT and "eval/mine/x" in record:
            kill(signal.SIGTERM)

    def note(self, text: str) -> None: ...

    def close(self, ended: str) -> None: ...


# Disks, and signals at a write


def at_event(number: int, act: Callable[[], object], *, once: bool = False, after: int = AT) -> Callable[[Path], None]:
    """Act at the ``number``-th change of a file in the run's folder while ``after`` is the newest step begun."""

    def start(folder: Path) -> None:
        seen = 0

        def heard(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            writes = event in ("os.mkdir", "os.rename", "os.remove") or (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if not writes or not str(arguments[0]).startswith(str(folder)) or NOW[0] < after:
                return
            seen += 1
            if seen == number or (seen > number and not once):
                act()

        sys.addaudithook(heard)

    return start


SMALL_BYTES = 96 << 20
NOW = [0]
"""The step that is being trained, or whose checkpoint is being written."""


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fill_disk(folder: Path) -> None:
    """Fill the small disk after step 3, but for some KiB."""
    assert shutil.disk_usage(folder).total <= SMALL_BYTES, "this is not the small disk"

    def fill() -> None:
        while NOW[0] < AT - 1:
            time.sleep(0.005)
        free = shutil.disk_usage(folder).free
        with (folder.parent / "ballast").open("wb") as file:
            file.write(bytes(max(0, free - (8 << 10))))

    threading.Thread(target=fill, daemon=True).start()


def no_metrics(folder: Path) -> None:
    """Let the disk refuse each line of ``metrics.jsonl`` from now on."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), JOB[0].reporters[0]._lines._file.fileno())


JOB: list[Any] = []


def last_step(number: int) -> Callable[[Path], None]:
    """Let the watchdog or a signal come when a step is trained."""

    def start(folder: Path) -> None:
        JOB[0].optimizer.register_step_post_hook(lambda *_: kill(number) if JOB[0].step == AT - 1 else None)

    return start


def hangs_watched(par: Any) -> None:
    """Hang beside a watchdog."""
    store = dist.HashStore()
    dog = Watchdog(1.0, store, lambda: JOB[0].step, rank=0, world_size=1, moves=lambda: JOB[0].moves, answer_s=0.2)
    dog.__enter__()
    hang()


SHORT = {"grace_s": 0.5, "silent_s": 30.0}
STOPS = {"ends": (STOPPED,), "settings": SHORT}
C_SLEEP = ctypes.CDLL(None).sleep

FAULTS: dict[str, Fault] = {
    "none": Fault(),
    "evaluation raises": Fault(evaluation=raises(ConnectionError("no route"))),
    "evaluation raises SystemExit": Fault(evaluation=raises(SystemExit(2))),
    "evaluation raises MemoryError": Fault(evaluation=raises(MemoryError())),
    "evaluation raises StopIteration": Fault(evaluation=raises(StopIteration())),
    "evaluation raises in a forward": Fault(evaluation=in_forward),
    "evaluation raises in other modes": Fault(evaluation=in_other_modes),
    "evaluation raises, on_error: stop": Fault(
        evaluation=raises(ConnectionError("no route")), settings={"on_error": "stop"}, ends=(FAILED,)
    ),
    "evaluation raises CancelledError": Fault(evaluation=raises(asyncio.CancelledError())),
    "evaluation changes the folder": Fault(evaluation=leaves(lambda: os.chdir("/"))),
    "evaluation turns gradients off": Fault(evaluation=leaves(lambda: torch.set_grad_enabled(False))),
    "evaluation ignores SIGTERM": Fault(
        evaluation=leaves(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)),
        start=lambda folder: setattr(JOB[0], "reporters", (*JOB[0].reporters, Kills())),
        **STOPS,
    ),
    "evaluation returns None": Fault(evaluation=returns(None)),
    "evaluation returns a tensor": Fault(evaluation=returns(torch.tensor(1.0))),
    "evaluation returns a list": Fault(evaluation=returns([1.0])),
    "evaluation returns a text": Fault(evaluation=returns("good")),
    "evaluation returns a vector": Fault(evaluation=returns({"x": torch.ones(3)})),
    "evaluation returns None by name": Fault(evaluation=returns({"x": None})),
    "evaluation returns NaN": Fault(evaluation=returns({"x": float("nan")})),
    "evaluation returns what is no number": Fault(evaluation=returns({"x": object(), 3: 1})),
    "evaluation hears SIGTERM": Fault(evaluation=signalled(lambda par: forward(par, 1000)), **STOPS),
    "evaluation hears SIGINT": Fault(
        evaluation=signalled(lambda par: forward(par, 1000), signal.SIGINT), ends=(130,), settings=SHORT
    ),
    "evaluation hears SIGHUP": Fault(
        evaluation=signalled(lambda par: forward(par, 1000), signal.SIGHUP), ends=(129,), settings=SHORT
    ),
    "evaluation hears SIGUSR1": Fault(
        evaluation=signalled(lambda par: forward(par, 1000), signal.SIGUSR1), ends=(138,), settings=SHORT
    ),
    "samples hear SIGTERM": Fault(evaluation=signalled(samples), **STOPS),
    "log-likelihoods hear SIGTERM": Fault(
        evaluation=signalled(lambda par: log_likelihoods(par, [([1, 2], [3])] * 4000, batch=1)), **STOPS
    ),
    "generation hears SIGTERM": Fault(
        evaluation=signalled(lambda par: generate(par, [[1, 2]] * 4000, tokens=2, batch=1)), **STOPS
    ),
    "evaluation sleeps after SIGTERM": Fault(evaluation=signalled(lambda par: time.sleep(600)), **STOPS),
    "evaluation hangs after SIGTERM": Fault(evaluation=signalled(lambda par: hang()), **STOPS),
    "evaluation hangs in C after SIGTERM": Fault(
        evaluation=signalled(lambda par: [C_SLEEP(60) for _ in range(9)]), **STOPS
    ),
    "evaluation hangs beside a save in the background": Fault(
        evaluation=signalled(lambda par: hang()), background=True, **STOPS
    ),
    "evaluation hangs": Fault(evaluation=hangs_watched, settings={"silent_s": 0.5}, ends=(STALLED,)),
    "evaluation is killed": Fault(evaluation=lambda par: kill(signal.SIGKILL), ends=(KILLED,)),
    "evaluation ends the process": Fault(evaluation=lambda par: os._exit(7), ends=(7,)),
    "evaluation raises beside a save in the background": Fault(
        evaluation=raises(ConnectionError("no route")), background=True
    ),
    "validation raises": Fault(loss=lambda batch: throw(OSError("shard 3 cannot be read")) if batch == 1 else None),
    "validation raises, on_error: stop": Fault(
        loss=lambda batch: throw(OSError("gone")), settings={"on_error": "stop"}, ends=(FAILED,)
    ),
    "validation hears SIGTERM": Fault(loss=lambda batch: kill(signal.SIGTERM) if batch == 1 else None, **STOPS),
    "validation sleeps after SIGTERM": Fault(
        loss=lambda batch: (kill(signal.SIGTERM), time.sleep(600)) if batch == 0 else None, **STOPS
    ),
    "validation is killed": Fault(loss=lambda batch: kill(signal.SIGKILL), ends=(KILLED,)),
    "one rank raises before a forward": Fault(ranks=2, evaluation=on_rank(1, lambda: throw(OSError("gone")))),
    "rank 0 raises before a forward": Fault(ranks=2, evaluation=on_rank(0, lambda: throw(OSError("gone")))),
    "one rank raises after the last forward": Fault(
        ranks=2, evaluation=on_rank(1, lambda: throw(OSError("gone")), then=lambda par: None)
    ),
    "one rank raises SystemExit": Fault(ranks=2, evaluation=on_rank(1, lambda: sys.exit(4))),
    "one rank raises in a forward": Fault(ranks=2, evaluation=in_forward),
    "one rank returns None": Fault(ranks=2, evaluation=lambda par: {"x": 1.0} if dist.get_rank() else None),
    "one rank raises in a validation": Fault(
        ranks=2, start=lambda folder: JOB[0].validation.refuse(1), loss=lambda batch: None
    ),
    "one rank hears SIGTERM": Fault(
        ranks=2, evaluation=signalled(lambda par: forward(par, 1000), rank=1), ends=(STOPPED,), settings=SHORT
    ),
    "one rank hangs after SIGTERM": Fault(
        ranks=2,
        evaluation=asks_all(lambda par: hang() if dist.get_rank() else forward(par)),
        ends=(STOPPED, FAILED),
        settings=SHORT,
    ),
    "one rank is killed": Fault(
        ranks=2, evaluation=on_rank(1, lambda: kill(signal.SIGKILL)), ends=(KILLED, FAILED, 134, 139)
    ),
    "tracker refuses everything": Fault(tracker="refuses"),
    "tracker refuses one record": Fault(tracker="refuses one"),
    "tracker does not begin": Fault(tracker="does not begin"),
    "tracker begins with SystemExit": Fault(tracker="begins with SystemExit"),
    "tracker raises SystemExit": Fault(tracker="raises SystemExit"),
    "tracker hangs": Fault(tracker="hangs"),
    "tracker does not end": Fault(tracker="does not end"),
    "tracker ends with SystemExit": Fault(tracker="ends with SystemExit"),
    "reporter raises": Fault(start=lambda folder: setattr(JOB[0], "reporters", (*JOB[0].reporters, Broken()))),
    "metrics.jsonl is on a full disk": Fault(start=no_metrics),
    "a disk is full": Fault(start=fill_disk, ends=(FAILED,), least=EVERY, small_disk=True),
    **{
        f"write {number} finds a full disk": Fault(start=at_event(number, full), ends=(FAILED, GOES_ON), least=EVERY)
        for number in range(1, 9)
    },
    **{
        f"write {number} is refused once": Fault(
            start=at_event(number, full, once=True), ends=(FAILED, GOES_ON), least=EVERY
        )
        for number in range(1, 9, 3)
    },
    **{
        f"SIGKILL at write {number}": Fault(
            start=at_event(number, lambda: kill(signal.SIGKILL)), ends=(KILLED,), least=EVERY
        )
        for number in (2, 5, 8, 11, 14)
    },
    **{
        f"SIGTERM at write {number}": Fault(
            start=at_event(number, lambda: kill(signal.SIGTERM), once=True), ends=(STOPPED,), least=AT
        )
        for number in (1, 6, 12)
    },
    "SIGTERM in a step": Fault(start=last_step(signal.SIGTERM), ends=(STOPPED,)),
    "SIGKILL after a step": Fault(start=last_step(signal.SIGKILL), ends=(KILLED,), least=EVERY),
}
"""By name."""


@final
class Held:
    """Validation batches, of which one rank cannot read the second."""

    def __init__(self, data: Batches) -> None:
        self.data, self.refused = data, -1

    def refuse(self, rank: int) -> None:
        self.refused = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def one_epoch(self) -> Any:
        for number, batches in enumerate(self.data.one_epoch()):
            if number == 1 and dist.get_rank() == self.refused and JOB[0].step == AT:
                raise OSError("shard 3 cannot be read")
            yield batches


@final
class Losses:
    """The objective: a validation beside step 4 has a fault."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault, self.batch = fault, 0

    def tokens(self, batch: Any) -> int:
        return CausalLM().tokens(batch)

    def loss(self, model: Any, batch: Any) -> Any:
        NOW[0] = JOB[0].step + model.training
        if not model.training and JOB[0].step == AT and self.fault is not None and self.fault.loss is not None:
            self.batch += 1
            self.fault.loss(self.batch - 1)
        return CausalLM().loss(model, batch)


def train(folder: Path, fault: Fault | None, ranks: int, *, keep: int | None = 2) -> int:
    """Train, or resume, and return the exit code; write the digests of the restored step and of the end."""
    torch.set_num_threads(1)
    send_to_trackers._RETRY_S = send_to_trackers._PAUSE_S = 0.02
    send_to_trackers.PATIENCE_S = send_to_trackers._CLOSE_S = 0.3
    validating._LAST_S, validating._LOOK_S = 0.3, 0.05
    with meshpar.distributed("cpu", timeout_s=60):
        config = TransformerConfig(
            vocab_size=VOCAB, dim=8, layers=2, heads=2, kv_heads=2, hidden=12, max_positions=256, dropout=0.1
        )
        with torch.device("meta"):
            model = Transformer(config)
        plan = Plan("dp_shard=2", [FullyShard()], guards="off") if ranks > 1 else Plan("", guards="off")
        par = plan.apply(model, device_type="cpu").materialize(seed=0)
        optimizer = build_adamw(par.module, AdamWSettings(eps=1e-3))
        ids = np.cumsum(np.arange(200) % 2 + 1) % (VOCAB - 1)
        name = f"tokens{dist.get_rank()}.bin"
        data = PackedTokens(write_tokens(folder / name, [ids], vocab_size=VOCAB, eos_id=VOCAB - 1), 8)
        part = {"micro_batch": 2, "data_rank": par.data_rank, "data_size": par.data_size}
        background = fault is not None and fault.background
        settings = {} if fault is None else fault.settings
        with CheckpointManager(folder / "run/checkpoints", keep=keep, best="val/loss", async_=background) as manager:
            trainer = Trainer(
                par,
                Losses(fault),
                Batches(data, seed=3, **part),
                optimizer,
                Schedule(name="cosine", lr=1e-2, steps=STEPS),
                TrainSettings(
                    steps=STEPS, log_every=1, validate_every=EVERY, validate_steps=3, checkpoint_every=EVERY, **settings
                ),
                validation=Held(Batches(data, seed=None, **part)),
                checkpointer=Saver(manager, par, "val/loss"),
                evaluations={"mine": lambda par: evaluated(par, trainer, fault)},
            )
            JOB[:] = [trainer]
            newest = manager.latest()
            if newest is not None:
                restored = manager.restore(par, optimizer, fallback=True)
                trainer.load_state_dict(restored.extra)
            note(folder, "restored", trainer.step, digest(par, optimizer))
            if dist.get_rank() == 0:
                how = "" if fault is None else fault.tracker
                board = Trackers(folder / "run", {f"{HERE}.Board": {"how": how}}, step=trainer.step)
                trainer.reports.reporters = (board,)
            if fault is not None and fault.start is not None:
                fault.start(folder / "run")
            try:
                stopped = trainer.run().stopped
            finally:
                for reporter in trainer.reports.reporters:
                    reporter.close(trainer.ended)
            note(folder, "ended", trainer.step, digest(par, optimizer))
    return exit_code_of(stopped)


def evaluated(par: Any, trainer: Trainer, fault: Fault | None) -> Any:
    if fault is not None and fault.evaluation is not None and trainer.step == AT:
        return fault.evaluation(par)
    forward(par)
    return {"x": trainer.step / 2}


def digest(par: Any, optimizer: torch.optim.Optimizer) -> str:
    made = hashlib.sha256()
    for parameter in par.module.parameters():
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
            made.update(whole(tensor).detach().numpy().tobytes())
    return made.hexdigest()


def note(folder: Path, name: str, step: int, value: str) -> None:
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps([step, value]))


def noted(folder: Path, name: str) -> tuple[int, str]:
    step, value = json.loads((folder / f"{name}.json").read_text())
    return step, value


def run(folder: Path, fault: Fault | None, ranks: int, **more: Any) -> list[int]:
    """Train in processes of their own, and return their exit codes."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks_of: list[int] = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            code = FAILED
            try:
                log = os.open(folder / f"log{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                logging.basicConfig(stream=sys.stderr)
                if ranks > 1:
                    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
                code = train(folder, fault, ranks, **more)
            except BaseException:
                logging.exception("this rank failed")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        ranks_of.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks_of]
    return [128 - status if status < 0 else status for status in statuses]


def numbers(folder: Path, name: str) -> list[tuple[int, float]]:
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[name]) for row in rows if name in row]


def wrong(root: Path, name: str) -> list[str]:
    """Return what is wrong after a fault."""
    fault = FAULTS[name]
    right, folder = root / f"right{fault.ranks}", root / name.replace(" ", "_").replace(":", "")
    if not right.exists():
        for keep in range(EVERY, STEPS + 1, EVERY):  # each step's digest, as a job that resumes from it finds it
            codes = run(right, None, fault.ranks, keep=None) if keep == EVERY else [0]
            shutil.copytree(right / "run", right / f"{keep}/run")
            for later in range(keep + EVERY, STEPS + 1, EVERY):
                shutil.rmtree(right / f"{keep}/run/checkpoints/step-{later:08}")
            codes += run(right / f"{keep}", None, fault.ranks)
            assert not any(codes), codes
    folder.mkdir(parents=True)
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "faults", str(folder)]
    if fault.small_disk and subprocess.run(mounting, capture_output=True).returncode:
        sys.stdout.write(f"{name}: left out, because nothing can be mounted here\n")
        return []
    try:
        return compare(folder, right, name, fault)
    finally:
        if fault.small_disk:
            subprocess.run(["umount", str(folder)], check=True)


def compare(folder: Path, right: Path, name: str, fault: Fault) -> list[str]:
    found, codes = list[str](), run(folder, fault, fault.ranks)
    if not set(codes) <= set(fault.ends) or (GOES_ON not in fault.ends and set(codes) == {GOES_ON}):
        found.append(f"it ended with {codes}, expected {list(fault.ends)}")
    (folder / "ballast").unlink(missing_ok=True)
    if any(run(folder, None, fault.ranks)):
        return [*found, "it does not resume"]
    step, restored = noted(folder, "restored")
    if step < fault.least or restored != noted(right / f"{step}", "restored")[1]:
        found.append(f"step {step} is restored, expected {fault.least} at least, with the same bits")
    if noted(folder, "ended") != noted(right, "ended"):
        found.append("the end differs")
    for key in ("train/loss", "val/loss"):
        lost = {(AT, key)} if "validation" in name else set()
        a, b = numbers(folder, key), numbers(right, key)
        if "metrics.jsonl" not in name and [one for one in a if (one[0], key) not in lost] != [
            one for one in b if (one[0], key) not in lost
        ]:
            found.append(f"{key}: {a}, expected {b}")
    return found


def main() -> int:
    folder, *names = sys.argv[1:]
    failed, began = 0, time.monotonic()
    for name in names or [name for name in FAULTS if name != "none"]:
        start = time.monotonic()
        found = wrong(Path(folder), name)
        failed += bool(found)
        sys.stdout.write(f"{name}: {'; '.join(found) or 'right'} ({time.monotonic() - start:.1f} s)\n")
        sys.stdout.flush()
    count = len(names) or len(FAULTS) - 1
    sys.stdout.write(f"{count} faults, {failed} wrong, {time.monotonic() - began:.0f} s\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
