"""Train a small model with trackers that work or fail in different ways, and compare losses and step times.

    python benchmarks/trackers.py [--steps 240] [--rounds 3] [--only wandb]

A tracker works, or fails from a third of the steps on, until training has ended; then the cause is removed and the run
is started again, with no step left, which sends the rest. Causes: a server that is killed (MLflow's own), a full disk
(a small tmpfs, which requires root), a wrong key, a tracker that never answers. Cases need `tensorboard`, `wandb`,
`trackio` and `mlflow` with its server, each where installed.

Two trainers, one without trackers, run in turn on the first core: 40 steps of one, then 40 of the other; the one that
waits is stopped, with all its threads (SIGSTOP). Servers, and all processes that a tracker starts, are pinned to the
last core (os.sched_setaffinity), as a server on another machine takes no core of the training. A ratio is that of the
mean steps of two neighbouring blocks of 40, so that a send once a second counts; its median and quartiles are printed.
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import importlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from meshpar import Plan, distributed
from meshpar.models import PRESETS, Transformer
from meshpar.training import (
    AdamWSettings,
    Batches,
    CausalLM,
    PackedTokens,
    Schedule,
    TrackedRun,
    Trackers,
    Trainer,
    TrainSettings,
    build_adamw,
    write_tokens,
)

KEY = "right"
LOSS = "train/loss"
BLOCK = 40  # steps, about a second
CORES = sorted(os.sched_getaffinity(0))


class Case:
    """A tracker that works.

    Attributes:
        folder: of the run.
        trackers: as a recipe has them.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.trackers = folder, dict[str, dict[str, Any]]()

    def fail(self) -> None:
        """Make the tracker fail from now on."""

    def repair(self) -> None:
        """Remove the cause."""

    def arrived(self) -> int:
        """Return how many steps the tracker has a loss of."""
        return 0


class Hanging:
    """A tracker that never answers while ``hangs``."""

    hangs, got = False, set[float]()

    def __init__(self, run: TrackedRun) -> None: ...

    def send(self, records: Any) -> None:
        """Take records, or wait for an hour."""
        if Hanging.hangs:
            time.sleep(3600)
        Hanging.got |= {record["step"] for record in records}

    def close(self, ended: str) -> None: ...


class Hangs(Case):
    """A tracker that hangs."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.trackers = folder, {f"{__name__}.Hanging": {}}
        Hanging.hangs, Hanging.got = False, set()

    def fail(self) -> None:
        Hanging.hangs = True

    def repair(self) -> None:
        Hanging.hangs = False

    def arrived(self) -> int:
        return len(Hanging.got)


class Disk:
    """A small file system, which another file can fill."""

    def __init__(self, folder: Path, stack: ExitStack, *, size: str = "4m") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
        self.ballast = folder / "ballast"

    def fill(self, room: int = 0) -> None:
        """Leave so many bytes."""
        with suppress(OSError), self.ballast.open("wb", buffering=0) as file:
            while shutil.disk_usage(self.ballast.parent).free > room:
                file.write(bytes(4096))

    def free(self) -> None:
        """Take the other file away."""
        self.ballast.unlink()


class Board(Case):
    """TensorBoard."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.trackers = folder, {"tensorboard": {}}

    def arrived(self) -> int:
        kind = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
        events = kind(str(self.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        return len({event.step for event in events.Scalars(LOSS)}) if LOSS in events.Tags()["scalars"] else 0


class FullBoard(Board):
    """TensorBoard, whose disk is full."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self.disk = Disk(folder / "tensorboard", stack)
        self.fail, self.repair = self.disk.fill, self.disk.free  # type: ignore[method-assign]


class WandB(Case):
    """Weights & Biases, offline."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.trackers = folder, {"wandb": {"mode": "offline"}}

    def arrived(self) -> int:
        record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
        steps = set[float]()
        for path in (self.folder / "wandb").glob("*run-*/*.wandb"):
            for data in records_in(path.read_bytes()):
                items = record.FromString(data).history.item
                values = {(item.nested_key or [item.key])[0]: item.value_json for item in items}
                steps |= {float(values["step"])} if LOSS in values else set()
        return len(steps)


def records_in(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file of W&B, which has LevelDB's format after 7 bytes: blocks of 32 KiB, and in front of
    each part of a record 4 bytes of checksum, 2 of length and 1 of kind.
    """
    place, found = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        found += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4) and place <= len(data):  # whole, or the last part
            yield found
            found = b""


class FullWandB(WandB):
    """Weights & Biases, offline, whose disk is full but for 1 MiB: what its own process still has in memory."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self.disk = Disk(folder / "wandb", stack, size="64m")
        self.repair = self.disk.free  # type: ignore[method-assign]

    def fail(self) -> None:
        self.disk.fill(1 << 20)


class LockedWandB(WandB):
    """Weights & Biases online with a key that it does not know, and without a network; then offline."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self.trackers["wandb"] = {"mode": "online"}

    def repair(self) -> None:
        self.trackers["wandb"] = {"mode": "offline"}


class Trackio(Case):
    """Trackio on this machine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.home, self.trackers = folder, folder / "trackio", {"trackio": {}}
        os.environ["TRACKIO_DIR"] = str(self.home)

    def arrived(self) -> int:
        steps = set[int]()
        for path in self.home.glob("*.db"):
            with sqlite3.connect(path) as store:
                steps |= {step for (step,) in store.execute("SELECT step FROM metrics")}
        return len(steps)


class FullTrackio(Trackio):
    """Trackio, whose disk is full but for 1 MiB."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self.disk = Disk(self.home, stack, size="64m")
        self.repair = self.disk.free  # type: ignore[method-assign]

    def fail(self) -> None:
        self.disk.fill(1 << 20)


class MLflow(Case):
    """MLflow's own server."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.home, self.port = folder, folder / "server", free_port()
        self.home.mkdir(parents=True, exist_ok=True)
        self.trackers = {"mlflow": {"uri": f"http://127.0.0.1:{self.port}"}}
        os.environ |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_TRACKING_TOKEN": KEY}
        self.serve()
        stack.callback(self.kill)

    def serve(self) -> None:
        """Start the server, and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.home}/db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            self.server = apart(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        until(lambda: answers(self.port))

    def kill(self) -> None:
        """End the server at once."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()

    def arrived(self) -> int:
        client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self.trackers["mlflow"]["uri"])
        known = client.get_experiment_by_name("meshpar")
        found = client.search_runs([known.experiment_id]) if known else []
        assert len(found) < 2
        return len({one.step for run in found for one in client.get_metric_history(run.info.run_id, LOSS)})


class KilledMLflow(MLflow):
    """MLflow's own server, which is killed."""

    def fail(self) -> None:
        self.kill()

    def repair(self) -> None:
        self.serve()


class FullMLflow(MLflow):
    """MLflow's own server, whose disk is full."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.disk = Disk(folder / "server", stack)
        super().__init__(folder, stack)

    def fail(self) -> None:
        self.disk.fill()

    def repair(self) -> None:
        self.disk.free()


class LockedMLflow(MLflow):
    """MLflow's own server behind another that asks for a key."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        port = free_port()
        command = [sys.executable, __file__, "--gate", str(port), str(self.port)]
        gate = apart(subprocess.Popen(command, start_new_session=True))
        stack.callback(os.killpg, gate.pid, signal.SIGKILL)
        until(lambda: answers(port))
        self.trackers = {"mlflow": {"uri": f"http://127.0.0.1:{port}"}}
        os.environ["MLFLOW_TRACKING_TOKEN"] = "wrong"

    def repair(self) -> None:
        os.environ["MLFLOW_TRACKING_TOKEN"] = KEY


def gate(port: int, behind: int) -> None:
    """Hand requests with the right key on to another port; answer others with 401."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, found = 401, b"wrong key"
            if self.headers.get("Authorization") == f"Bearer {KEY}":
                there = http.client.HTTPConnection("127.0.0.1", behind)
                kept = {name: value for name, value in self.headers.items() if name not in ("Host", "Authorization")}
                there.request(self.command, self.path, body, kept)
                answer = there.getresponse()
                status, found = answer.status, answer.read()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        do_GET = do_POST = do_PATCH = do_PUT = answer

        def log_message(self, *_: object) -> None: ...

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def apart(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Pin a process that has just begun to the last core, and with it all that it starts."""
    os.sched_setaffinity(process.pid, CORES[-1:])
    return process


def move_children(pid: int) -> None:
    """Pin all processes below one to the last core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with suppress(OSError):
                for thread in Path(f"/proc/{child}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), CORES[-1:])
                move_children(int(child))


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(port: int) -> bool:
    """Tell whether somebody listens."""
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def until(true: Callable[[], bool], seconds: float = 90.0) -> bool:
    """Wait until something is true; return whether it is."""
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.2)
    return found


@contextmanager
def warnings_of_trackers() -> Iterator[list[str]]:
    """Collect the warnings of trackers."""
    found = list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.extend([record.getMessage()] if record.getMessage().startswith("tracker ") else [])

    handler, logger = Handler(logging.WARNING), logging.getLogger("meshpar")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def train(case: Case, steps: int) -> tuple[list[float], list[float]]:
    """Train, and stop this process after each block of steps; return the losses, and the mean time of a step of each
    block while the tracker fails, in milliseconds.
    """
    with distributed("cpu"):
        tokens = write_tokens(case.folder / "tokens.bin", [range(1, 200)] * 40, vocab_size=512, eos_id=0)
        with torch.device("meta"):
            model = Transformer(PRESETS["tiny"])
        par = Plan().apply(model).materialize(seed=0)
        batches = Batches(PackedTokens(tokens, 64), micro_batch=2, data_rank=0, data_size=1, seed=1)
        times, losses = [list[float]()], list[float]()
        fails_at = steps // 3 // BLOCK * BLOCK

        class Clock:
            def report(self, record: Any) -> None:
                losses.append(record[LOSS])
                times[-1].append(time.perf_counter())
                if len(losses) == fails_at:
                    began = [case.folder / "trackers" / f"{name}.json" for name in case.trackers]
                    until(lambda: all(marker.exists() for marker in began), 30.0)  # the imports are over
                    time.sleep(2.0 * bool(case.trackers))
                    move_children(os.getpid())
                    case.fail()
                if len(losses) % BLOCK == 0:
                    os.kill(os.getpid(), signal.SIGSTOP)
                    times.append([])

            def note(self, text: str) -> None: ...

            def close(self, ended: str) -> None: ...

        board = Trackers(case.folder, case.trackers)
        settings = TrainSettings(steps=steps, log_every=1)
        optimizer = build_adamw(par.module, AdamWSettings(lr=1e-3))
        Trainer(par, CausalLM(), batches, optimizer, Schedule(lr=1e-3), settings, reporters=[Clock(), board]).run()
        board.close()
    blocks = [block for block in times[fails_at // BLOCK :] if len(block) == BLOCK]
    return losses, [1000 * (block[-1] - block[0]) / (BLOCK - 1) for block in blocks]


def child(name: str, steps: int) -> None:
    """Train one case, remove the cause, start again, and print what was found."""
    os.sched_setaffinity(0, CORES[:1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, ExitStack() as stack:
        folder = Path(place) / "run"
        folder.mkdir()
        case = cases()[name](folder, stack)
        with warnings_of_trackers() as warned:
            losses, blocks = train(case, steps)
        case.repair()
        before = case.arrived()
        for _ in range(3 if case.trackers else 0):
            Trackers(folder, case.trackers, step=steps).close()
            if until(lambda: case.arrived() == steps, 10.0):
                break
        found = {"losses": losses, "blocks": blocks, "warned": warned, "sent": [before, case.arrived()]}
    print(json.dumps(found))


def in_turn(names: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Train cases in turn, a block of steps each; return what each has found."""
    command = [sys.executable, __file__, "--steps", str(steps), "--child"]
    started = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in names]
    left = list(started)
    for process in started:  # to the end of the first block of each
        os.waitpid(process.pid, os.WUNTRACED)
    while left:
        for process in list(left):
            os.kill(process.pid, signal.SIGCONT)
            if not os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]):
                left.remove(process)
    outputs = [process.communicate()[0] for process in started]
    # Trackio prints, too
    return [json.loads(output[output.rindex('{"losses"') :].splitlines()[0]) for output in outputs]


def cases() -> dict[str, type[Case]]:
    """Return the cases that can run here, by name."""
    found: dict[str, type[Case]] = {"none": Case, "none again": Case, "own, hangs": Hangs}
    root = os.geteuid() == 0
    if importlib.util.find_spec("tensorboard"):
        found |= {"TensorBoard": Board} | ({"TensorBoard, disk full": FullBoard} if root else {})
    if importlib.util.find_spec("wandb"):
        found |= {"W&B offline": WandB} | ({"W&B offline, disk full": FullWandB} if root else {})
        found |= {"W&B online, bad key": LockedWandB}
    if importlib.util.find_spec("trackio"):
        found |= {"Trackio": Trackio} | ({"Trackio, disk full": FullTrackio} if root else {})
    if importlib.util.find_spec("mlflow") and importlib.util.find_spec("flask"):
        found |= {"MLflow": MLflow, "MLflow, server killed": KilledMLflow, "MLflow, bad key": LockedMLflow}
        found |= {"MLflow, server's disk full": FullMLflow} if root else {}
    return found


def main() -> None:
    """Read the arguments."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=240)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--gate", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_SILENT": "true"}
    if asked.gate:
        gate(*asked.gate)
    elif asked.child:
        child(asked.child, asked.steps)
    else:
        table(asked.only, asked.steps, asked.rounds)


def table(only: str, steps: int, rounds: int) -> None:
    """Print a row for each case."""
    print(f"cores {CORES[0]} (training) and {CORES[-1]} (servers), steps {steps}, rounds {rounds}")
    print("| tracker | step without, with, ms | ratio | quartiles | losses | warnings | steps sent at the end, later |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in (name for name in cases() if name != "none" and only.lower() in name.lower()):
        pairs, rows = list[tuple[float, float]](), set[str]()
        for _ in range(rounds):
            without, found = in_turn(["none", name], steps)
            pairs += zip(without["blocks"], found["blocks"], strict=True)
            equal = "equal" if found["losses"] == without["losses"] else "DIFFER"
            sent = f"{found['sent'][0]}, {found['sent'][1]} of {steps}" if name != "none again" else ""
            rows.add(f"{equal} | {len(found['warned'])} | {sent}")
            print(f"{name}: {[one[:160] for one in found['warned']]}", file=sys.stderr, flush=True)
        ratios = sorted(after / before for before, after in pairs)
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = ", ".join(f"{statistics.median(column):.1f}" for column in zip(*pairs, strict=True))
        print(
            f"| {name} | {medians} | {middle:.3f} | {low:.2f} to {high:.2f} | {'; '.join(sorted(rows))} |", flush=True
        )


if __name__ == "__main__":
    main()
