"""Files of strangers, drawn by mutation of real ones, under the commands that read them.

    python benchmarks/fuzz_hostile.py [--seeds 0:2000] [--kind recipe] [--shrink]

A draw changes one to three things of a recipe, a launch file, a manifest, a safetensors file, its index or the metadata
of a distributed checkpoint: bits, huge numbers, deep nesting, names that lead out, import paths, wrong types, keys
twice, links and pipes in the place of files. Commands then read it, each draw in a process of its own, with a bound on
its memory. Each must succeed or raise a MeshparError, in bounded time and memory. Nothing that a file names may be
imported, run, connected to, or written outside of the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fuzz_hostile_draw import CANARY, STEP, Case, draw, plant, shrink

FAULTS = ("ran", "wrote", "raised", "slow", "memory", "died")
RECIPE = """\
name: small
device: cpu
mesh: dp_shard=2
model: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 32}
data: {source: stdlib, sequence_length: 32, micro_batch: 2}
optimizer: {lr: 1e-3}
trackers: {tensorboard: {}}
evaluations: {samples: {prompts: [once]}}
training: {steps: 3, objective: causal_lm, tensorboard: false}
"""
MOST_S, MOST_BYTES = 2.0, 256 << 20
_ROOM_BYTES = 1 << 30  # of addresses above what the process has, so that what asks for more fails at once
_LIMIT_S = 120  # after which a draw counts as a hang
_MAKE_LIMIT_S = 300  # for the real files, which a new process makes
_ENGINES = {"squeue", "sacct", "scontrol", "scancel", "kubectl", "sky"}  # `meshpar jobs` asks them, by fixed commands
COMMANDS: dict[str, list[list[str]]] = {
    "recipe": [["check", "job.yaml"], ["describe", "job.yaml"], ["export", "runs/small", "out"]],
    "launch": [["jobs", "ls", "runs"], ["jobs", "status", "runs/small"], ["jobs", "cancel", "runs/small"]],
    "manifest": [["checkpoints", "ls", "runs/small"], ["checkpoints", "show", "runs/small"],
                 ["checkpoints", "verify", "runs/small"], ["export", "runs/small", "out"]],
    "metadata": [["checkpoints", "show", STEP], ["checkpoints", "verify", STEP], ["export", STEP, "out"]],
    "safetensors": [["import", "hf", "in"]],
    "index": [["import", "hf", "in"]],
}  # fmt: skip


class Outcome(NamedTuple):
    """What a case came to: ``read``, ``refused`` or one of FAULTS."""

    kind: str
    text: str = ""
    seconds: float = 0.0
    nbytes: int = 0


def make_base(folder: Path) -> None:
    """Write the real files: a run with two steps, its recipe and a launch, and published weights in two files."""
    import torch

    import meshpar
    from meshpar.checkpoints import CheckpointManager, export_safetensors
    from meshpar.models import Transformer, TransformerConfig

    (folder / "job.yaml").write_text(RECIPE)
    with meshpar.distributed("cpu"):
        config = TransformerConfig(vocab_size=64, dim=16, layers=1, heads=2, hidden=32, max_positions=32)
        par = meshpar.Plan("", []).apply(Transformer(config))
        optimizer = torch.optim.AdamW(par.module.parameters())
        with CheckpointManager(folder / "runs/small/checkpoints") as manager:
            for step in (1, 2):
                manager.save(
                    step, par, optimizer, extra={"step": step, "data": {"epoch": 0}}, metrics={"val/loss": 1.0}
                )
    (folder / "runs/small/recipe.yaml").write_text(RECIPE)
    export_safetensors(folder / STEP, folder / "hf", max_shard_size=8000)
    launch = folder / "runs/small/launches/001"
    launch.mkdir(parents=True)
    launched = {
        "target": "kubernetes",
        "options": ["claim=runs"],
        "file": "job.yaml",
        "label": "small-001",
        "submitted": "ok",
    }
    (launch / "launch.json").write_text(json.dumps(launched))
    (launch / "job.yaml").write_text("kind: Job\nmetadata: {name: small-001}\n")
    (folder / f"{CANARY}.py").write_text(f"open({str(folder.parent / 'outside/ran')!r}, 'w')\nclass Run: pass\n")


class _Watched:
    """Notes what a process does that no file may have it do."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.on = folder, False
        self.seen: list[tuple[str, str]] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(arguments[2], int) else 0
            if writes:
                self._written(event, arguments[0])
        elif event in ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"):
            self._written(event, arguments[1 if event == "os.symlink" else 0])
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect",
                       "socket.bind", "pty.spawn"):  # fmt: skip
            words = arguments[1] if event == "subprocess.Popen" else [str(arguments)]
            if os.path.basename(str(words[0])) not in _ENGINES or any(".." in str(word) for word in words):
                self.seen.append(("ran", f"{event} {arguments[:2]}"))
        elif event == "import" and str(arguments[0]).partition(".")[0] in (CANARY, "this"):
            self.seen.append(("ran", f"import {arguments[0]}"))

    def _written(self, event: str, path: Any) -> None:
        text = os.path.realpath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        if text and not Path(text).is_relative_to(self.folder) and not text.startswith(("/dev/null", "/proc/self")):
            self.seen.append(("wrote", f"{event} {text}"))


def run(case: Case, base: Path) -> Outcome:
    """Return what the commands make of a case, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as root:
        folder = Path(root, "work")
        shutil.copytree(base, folder)
        (Path(root) / "outside").mkdir()
        plant(case, folder)
        reads, writes = os.pipe()
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.close(reads)
                outcome = _answer(case, folder)
                os.write(writes, json.dumps(outcome)[:60_000].encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writes)
        with os.fdopen(reads, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        if list((Path(root) / "outside").iterdir()) or {entry.name for entry in Path(root).iterdir()} != {
            "work",
            "outside",
        }:
            return Outcome("wrote", "there are new files outside of the folder")
        try:
            return Outcome(*json.loads(said))
        except ValueError:
            return Outcome("died", f"the process ended with {os.waitstatus_to_exitcode(status)}")


def _status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _answer(case: Case, folder: Path) -> Outcome:
    """Run the commands of a case's kind; returns the first fault, else how the last one ended."""
    from typer.testing import CliRunner

    from meshpar.launchers.cli import app

    os.chdir(folder)
    os.environ |= {"TMPDIR": str(folder), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / ".cache")}
    tempfile.tempdir, sys.dont_write_bytecode = str(folder), True
    watched = _Watched(folder)
    signal.alarm(_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _ROOM_BYTES,) * 2)
    outcome = Outcome("read")
    for command in COMMANDS[case.kind]:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        before, began = _status("VmRSS"), time.process_time()
        watched.on = True
        with contextlib.redirect_stderr(io.StringIO()):
            done = CliRunner().invoke(app, command)
        watched.on = False
        seconds, taken = time.process_time() - began, _status("VmHWM") - before
        shown = f"meshpar {' '.join(command)}"
        if watched.seen:
            return Outcome(watched.seen[0][0], f"{shown}: {watched.seen[0][1]}", seconds, taken)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            frames = "".join(traceback.format_tb(done.exception.__traceback__, limit=-4))
            said = f"{type(done.exception).__name__}: {str(done.exception)[:200]}"
            return Outcome("raised", f"{shown}: {said}\n{frames}", seconds, taken)
        if seconds > MOST_S * _speed():
            return Outcome("slow", f"{shown}: {seconds:.1f} s, {done.output[:300]}", seconds, taken)
        if taken > MOST_BYTES:
            return Outcome("memory", f"{shown}: {taken >> 20} MiB, {done.output[:300]}", seconds, taken)
        kind = "refused" if done.exit_code or outcome.kind == "refused" else "read"
        outcome = Outcome(kind, done.output[:300], max(seconds, outcome.seconds), max(taken, outcome.nbytes))
    return outcome


@functools.cache
def _speed() -> float:
    """Return how many times as long as on the machine of the bound a piece of work takes, in processor time."""
    began = time.process_time()
    sum(range(4_000_000))
    return max(1.0, (time.process_time() - began) / 0.1)


def warm() -> None:
    """Import what the commands import, once for all processes."""
    import torch

    import meshpar.launchers.cli
    import meshpar.launchers.commands.publishing
    import meshpar.launchers.commands.train
    import meshpar.launchers.targets.kubernetes
    import meshpar.launchers.targets.launching
    import meshpar.launchers.targets.skypilot
    import meshpar.launchers.targets.slurm
    import meshpar.training.evaluation  # noqa: F401

    torch.set_num_threads(1)
    _speed()


@contextlib.contextmanager
def real_files() -> Iterator[Path]:
    """Make the real files in a new process: a fork of one that computed on threads can wait for them for ever."""
    with tempfile.TemporaryDirectory(prefix="hostile-base-") as root:
        base = Path(root, "work")
        base.mkdir()
        subprocess.run([sys.executable, __file__, "--make", str(base)], check=True, timeout=_MAKE_LIMIT_S)
        warm()
        yield base


def fails_as(kind: str, base: Path, case: Case) -> bool:
    """Return whether a case ends in this way."""
    return run(case, base).kind == kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200")
    parser.add_argument("--kind", choices=COMMANDS)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="only write the real files there")
    options = parser.parse_args()
    if options.make:
        make_base(options.make)
        return 0
    first, _, last = options.seeds.partition(":")
    counts: dict[str, int] = {}
    with real_files() as base:
        for seed in range(int(first), int(last or int(first) + 1)):
            case = draw(seed, (options.kind,) if options.kind else tuple(COMMANDS))
            outcome = run(case, base)
            counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
            if outcome.kind in FAULTS:
                case = shrink(case, partial(fails_as, outcome.kind, base)) if options.shrink else case
                used = f"{outcome.seconds:.1f} s, {outcome.nbytes >> 20} MiB"
                print(f"seed {seed}: {outcome.kind} ({used}) {case}\n{outcome.text}\n", flush=True)
    print(counts)
    return int(any(kind in FAULTS for kind in counts))


if __name__ == "__main__":
    raise SystemExit(main())
