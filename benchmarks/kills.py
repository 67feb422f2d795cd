"""Hundreds of kill -9 over whole jobs: is any number lost or doubled, any export wrong, any file of the user's gone?

    python benchmarks/kills.py [--kills 300] [--steps 120] [--seed 0] [--storage disk] [--mesh moves]
                               [--folder DIR] [--seconds S]

One job trains undisturbed. Then the same job is started again and again, and each time killed at a random moment: a
rank, the launcher, or all at once. It writes metrics and TensorBoard's events, validates, saves often and keeps two
steps and the best; beside it a loop exports the newest step over and over, and is killed as well. A job that comes to
its end is compared with the undisturbed one, and the next begins. Exits with 1 where anything differs. With --folder
and --seconds a call kills for that time, and the next goes on with the same jobs, as after one more kill. With
``--mesh moves`` the job has ``same_bits``, each life has another mesh, and the undisturbed one stays in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reliability import leftovers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshpar.checkpoints import CheckpointManager
from meshpar.launchers import export_run
from tests.support import object_store
from tests.support.patience import patient, until

RECIPE = """\
mesh: dp_shard=2
device: cpu
model: {dim: 32, layers: 2, heads: 4, hidden: 64, max_positions: 64, dropout: 0.1}
data: {source: files, paths: [text.txt], sequence_length: 64, micro_batch: 4, accumulate: 2, validation_fraction: 0.1, cache: cache}
optimizer: {lr: 1e-3}
training: {steps: 120, log_every: 1, validate_every: 10, validate_steps: 2}
checkpoint: {every: 5, keep: 2, best: val/loss}
"""
PARTS = "{TensorParallel: {parts: 4}}, FullyShard]"
MOVES = (
    ("mesh=dp_shard=4", f"passes=[{PARTS}"),
    ("mesh=dp_shard=2,tp=2", f"passes=[{PARTS}"),
    ("mesh=pp=2,dp_shard=1", f"passes=[PipelineParallel, {PARTS}"),
)
"""What the lives of a job that moves have in turn."""
MESHPAR = [sys.executable, "-m", "meshpar.launchers"]
WHOM = ("a rank", "a rank", "the launcher", "all")
MINE = ("notes.txt", "checkpoints/notes.txt", "checkpoints/mine/weights.bin", "tensorboard/notes.txt", "logs/notes.txt")
LONGEST_S = 120.0
STORE = [""]  # what stands before an output: nothing, or the URL of a bucket


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*MESHPAR, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def train(*overrides: str) -> subprocess.Popen[str]:
    return started("train", "job.yaml", *overrides, "--quiet")


def here(output: str) -> str:
    """Return the folder on this machine of a job."""
    return output if output == "undisturbed" else f"{STORE[0].replace('s3://', 'runs/s3/')}{output}"


def killed(process: subprocess.Popen[str], whom: str, draw: random.Random) -> None:
    """Kill part of a job and wait until all of it is gone."""
    with contextlib.suppress(OSError):
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if whom == "all":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(int(draw.choice(ranks)) if whom == "a rank" and ranks else process.pid, signal.SIGKILL)
    process.wait(patient(LONGEST_S))
    until(
        lambda: all(process_group(leftover) != process.pid for leftover in leftovers(Path("job.yaml"))),
        LONGEST_S,
        every=0.05,
        report=lambda: f"{whom} was killed, and others run on",
    )


def process_group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def life(output: str, draw: random.Random, lines: list[str], overrides: Sequence[str]) -> bool:
    """Start the job and kill it at a random moment, of its start or of its steps; tell whether it came to its end."""
    process = train(f"output={STORE[0]}{output}", *overrides)
    stepping = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step"):
                stepping.set()

    reader = threading.Thread(target=read)
    reader.start()
    if draw.random() < 0.8:
        while not stepping.wait(0.1) and process.poll() is None:
            pass
        wait = draw.uniform(0, 4)
    else:
        wait = draw.uniform(0, 10)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait)
    ended = process.poll() == 0
    if not ended:
        whom = draw.choice(WHOM)
        killed(process, whom, draw)
        KILLS[whom] += 1
    reader.join()
    return ended


KILLS: Counter[str] = Counter()
NOTES = Path("kills.json")


class Exporter(threading.Thread):
    """Exports the newest step over and over; some exports are killed, every other must be one of the undisturbed
    job's steps.
    """

    def __init__(self, output: str, right: dict[str, int], seed: int) -> None:
        super().__init__()
        self.output, self.right, self.draw = output, right, random.Random(seed)
        self.over = threading.Event()
        self.wrong: list[str] = []
        self.done = 0

    def run(self) -> None:
        while not self.over.wait(self.draw.uniform(0, 3)):
            if not CheckpointManager(f"{STORE[0]}{self.output}/checkpoints").steps():
                continue
            target = Path("exports", f"{self.draw.randrange(2)}")
            process = started("export", f"{STORE[0]}{self.output}", str(target), "--overwrite")
            try:
                output, _ = process.communicate(
                    timeout=self.draw.uniform(0, 5) if self.draw.random() < 0.3 else patient(LONGEST_S)
                )
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                KILLS["an export"] += 1
                continue
            self.done += 1
            if process.returncode != 0:
                self.wrong.append(f"an export failed: {output}")
            elif digest(target) not in self.right:
                self.wrong.append(f"{target} is no step of the undisturbed job")


def digest(export: Path) -> str:
    return hashlib.sha256((export / "model.safetensors").read_bytes()).hexdigest()


def numbers(output: str) -> list[tuple[int, str, float]]:
    """Every loss in ``metrics.jsonl``, in order: step, name, value."""
    rows = map(json.loads, Path(here(output), "metrics.jsonl").read_text().splitlines())
    return [(row["step"], key, row[key]) for row in rows for key in ("train/loss", "val/loss") if key in row]


def drawn(output: str) -> set[tuple[int, str, float]]:
    """Every loss that TensorBoard shows; a point that it would show twice is there twice with two values, or it is
    not there.
    """
    events = EventAccumulator(f"{here(output)}/tensorboard", size_guidance={"scalars": 0}).Reload()
    found = [(point.step, key, point.value) for key in ("train/loss", "val/loss") for point in events.Scalars(key)]
    if len(found) != len({(step, key) for step, key, _ in found}):
        raise ValueError("TensorBoard shows a step twice")
    return set(found)


def compare(output: str, lines: list[str]) -> list[str]:
    """Return what differs from the undisturbed job, what the console said and no file has, and files of the user's
    that are gone.
    """
    right, found = numbers("undisturbed"), numbers(output)
    wrong = (
        []
        if found == right
        else [f"metrics.jsonl: {sorted(set(found) ^ set(right))[:4]}, {len(found)} of {len(right)} numbers"]
    )
    steps = {(step, f"{value:.4f}") for step, key, value in found if key == "train/loss"}
    said = {
        (int(step), loss) for step, loss in re.findall(r"^step (\d+)/\d+  loss (\S+)", "".join(lines), re.MULTILINE)
    }
    wrong += [f"the console told of {step}, the file does not" for step in sorted(said - steps)[:4]]
    shown = {(step, key, round(value, 5)) for step, key, value in drawn(output)}
    wrong += [
        f"TensorBoard: {difference}"
        for difference in sorted(shown ^ {(step, key, round(value, 5)) for step, key, value in drawn("undisturbed")})[
            :4
        ]
    ]
    wrong += [f"the user's {name} is gone or changed" for name in MINE if not mine(Path(here(output), name))]
    subprocess.run([*MESHPAR, "export", f"{STORE[0]}{output}", f"exports/{output}"], check=True, capture_output=True)
    if digest(Path("exports", output)) != digest(Path("exports/undisturbed")):
        wrong.append("the last weights differ")
    return [f"{output}: {problem}" for problem in wrong]


def mine(path: Path) -> bool:
    return path.exists() and path.read_text() == str(path)


def prepare(mesh: str, steps: int) -> dict[str, str]:
    """Train undisturbed, and return the step of each of its exports, by digest."""
    draw = random.Random(0)
    pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(4000)]
    Path("text.txt").write_text("".join(f"def add_{a}_{b}():\n    return {a} + {b}\n\n" for a, b in pairs))
    recipe = RECIPE.replace("dp_shard=2\n", "pp=2\npasses: [PipelineParallel]\n" if mesh == "pp=2" else "dp_shard=2\n")
    if mesh == "moves":
        # accumulate and validate_steps count the micro-batches of all data ranks
        recipe = recipe.replace("dp_shard=2\n", f"dp_shard=1\npasses: [{PARTS}\nsame_bits: true\n")
        recipe = recipe.replace("accumulate: 2", "accumulate: 4").replace("validate_steps: 2", "validate_steps: 4")
    Path("job.yaml").write_text(recipe.replace("steps: 120", f"steps: {steps}"))
    undisturbed = train(
        "output=undisturbed", "checkpoint.keep=null", "checkpoint.every=1"
    )  # a launcher's death saves at any step
    output, _ = undisturbed.communicate()
    if undisturbed.returncode:
        raise RuntimeError(output)
    right = {}
    for step in sorted(Path("undisturbed/checkpoints").glob("step-*")):
        target = Path("exports", step.name if step.name != f"step-{steps:08}" else "undisturbed")
        export_run(step, target)
        right[digest(target)] = step.name
    return right


def killing(notes: dict[str, Any], kills: int, seed: int, until: float, moves: Sequence[Sequence[str]]) -> None:
    """Kill jobs until there were ``kills``, or time is over; ``notes`` is where the last call stopped, and where
    this one does.
    """
    began, before = time.monotonic(), notes["seconds"]
    while notes["kills"] < kills or notes["lines"]:  # the last job comes to its end
        output, lines = f"job{notes['jobs']}", notes["lines"]
        draw = random.Random(f"{seed} {notes['jobs']} {notes['kills']}")
        for name in MINE if not lines else ():
            Path(here(output), name).parent.mkdir(parents=True, exist_ok=True)
            Path(here(output), name).write_text(str(Path(here(output), name)))
        exporter = Exporter(output, notes["right"], draw.randrange(1 << 30))
        exporter.start()
        ended = False
        while not ended and time.monotonic() < until:
            ended = life(output, draw, lines, moves[KILLS.total() % len(moves)])
            notes |= {"kinds": dict(KILLS), "kills": KILLS.total(), "seconds": before + time.monotonic() - began}
            NOTES.write_text(json.dumps(notes))
            print(
                f"\r{KILLS.total()} kills, {len(notes['wrong'])} wrong, {notes['seconds']:.0f} s ", end="", flush=True
            )
        exporter.over.set()
        exporter.join()
        notes["exports"] += exporter.done
        notes["wrong"] += exporter.wrong
        if ended:
            found = compare(output, lines)
            print(
                f"\n{output}: {notes['exports']} exports ended so far, {len(exporter.wrong + found)} wrong", flush=True
            )
            notes |= {"wrong": notes["wrong"] + found, "jobs": notes["jobs"] + 1, "lines": []}
        NOTES.write_text(json.dumps(notes))
        if not ended:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--steps", type=int, default=120, help="of a job")
    parser.add_argument(
        "--storage", choices=("disk", "s3"), default="disk", help="of the jobs; the undisturbed one is on the disk"
    )
    parser.add_argument("--mesh", choices=("dp_shard=2", "pp=2", "moves"), default="dp_shard=2", help="of the jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to keep what was done; default: a temporary one"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no life of a job after so long")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each restart that it hides
    until = time.monotonic() + options.seconds
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(TemporaryDirectory(prefix="meshpar-kills-")))
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(contextlib.chdir(folder))
        if not NOTES.exists():
            right = prepare(options.mesh, options.steps)
            NOTES.write_text(
                json.dumps(dict(right=right, kinds={}, kills=0, jobs=0, exports=0, wrong=[], lines=[], seconds=0.0))
            )
            print(f"undisturbed: {len(right)} steps", flush=True)
        notes = json.loads(NOTES.read_text())
        KILLS.update(notes["kinds"])
        if options.storage == "s3":
            object_store.use(stack.enter_context(object_store.served(Path("seaweedfs").absolute())))
            STORE[0] = f"{object_store.bucket('kills')}/"
        killing(notes, options.kills, options.seed, until, MOVES if options.mesh == "moves" else [()])
    kinds = ", ".join(f"{count} of {whom}" for whom, count in sorted(KILLS.items()))
    print(*notes["wrong"], sep="\n", end="\n" * bool(notes["wrong"]))
    print(
        f"\n{KILLS.total()} kills ({kinds}) of {notes['jobs']} jobs that ended, {notes['exports']} exports, in "
        f"{notes['seconds']:.0f} s: {len(notes['wrong'])} wrong"
    )
    return 1 if notes["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
