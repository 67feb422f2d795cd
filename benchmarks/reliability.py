"""Many runs of a 4-process job in a row: is every exit status right, and is anything left running?

    python benchmarks/reliability.py [--runs 100] [--first 0] [--doctor]

Each run is ``meshpar run --nproc 4`` on a small sharded model. Three of five end well; the others fail on purpose: an
exception on one rank (exit code 1), a rank killed (1), a rank that leaves with a code of its own (1), SIGTERM to the
launcher (143). Exits with 1 when a status was wrong or a process was left.

With ``--doctor`` each run is ``meshpar doctor`` on two hosts (network namespaces) of two ranks each, where nothing is
wrong: a finding is a false alarm.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.hosts import Hosts
from tests.support.patience import patient

JOB = """
import os, signal, sys, time
import torch, torch.distributed as dist, meshpar
from meshpar.models import Transformer, TransformerConfig

mode, bad = sys.argv[1], int(sys.argv[2])
with meshpar.distributed("cpu"):
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=64, dim=32, layers=2, heads=2, hidden=64, max_positions=16))
    plan = meshpar.Plan("dp_replicate=2,dp_shard=2", [meshpar.HybridShard()])
    par = plan.apply(model, device_type="cpu").materialize(seed=0)
    optimizer = torch.optim.AdamW(par.module.parameters())
    for step in range(5):
        ids = torch.randint(0, 64, (2, 16))
        par.module(input_ids=ids, labels=ids).loss.backward()
        par.clip_grad_norm_(1.0)
        optimizer.step(); optimizer.zero_grad()
        if step == 3 and dist.get_rank() == bad:
            if mode == "raise": raise ValueError("on purpose")
            if mode == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if mode == "exit": os._exit(3)
        if step == 3 and mode == "term":
            open("ready", "w").close()
            time.sleep(60)
"""
MODES = ("ok", "raise", "ok", "kill", "ok", "exit", "ok", "term", "ok", "ok")
RIGHT = {"ok": 0, "raise": 1, "kill": 1, "exit": 1, "term": 128 + signal.SIGTERM}


def one(folder: Path, number: int) -> str:
    """Run once; return what was wrong, or nothing."""
    mode = MODES[number % len(MODES)]
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "meshpar.launchers",
        "run",
        "--nproc",
        "4",
        "--logs",
        str(folder / "logs"),
        "job.py",
    ]
    process = subprocess.Popen(
        [*command, mode, str(number % 4)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if mode == "term":
        while not ready.exists() and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
    try:
        output, _ = process.communicate(timeout=patient(120))
    except subprocess.TimeoutExpired:
        process.kill()
        return f"run {number} ({mode}) did not end in 120 s"
    left = leftovers(folder)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if process.returncode != RIGHT[mode]:
        return f"run {number} ({mode}) ended with {process.returncode}, not {RIGHT[mode]}:\n{output}"
    return f"run {number} ({mode}) left {len(left)} processes" if left else ""


def examined(hosts: Hosts, folder: Path, number: int) -> str:
    """Run the doctor once; return what it found, or nothing."""
    command = [
        sys.executable,
        "-m",
        "meshpar.launchers",
        "doctor",
        "--nodes",
        "2",
        "--nproc",
        "2",
        "--head",
        f"n1:{29000 + number % 1000}",
    ]
    started = [
        subprocess.Popen(
            hosts.command(name, [*command, "--node-rank", str(node), "--folder", str(folder)]),
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node, name in enumerate(hosts.names)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=patient(180))[0] for process in started]
    return "" if not any(process.returncode for process in started) else f"run {number}:\n{''.join(outputs)}"


def leftovers(folder: Path) -> list[int]:
    """Return processes whose command line names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(folder) in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--doctor", action="store_true", help="run the doctor on two hosts; requires root")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wrong, counts, began = [], Counter[str](), time.monotonic()
    with (
        TemporaryDirectory(prefix="meshpar-reliability-") as name,
        Hosts(2) if options.doctor else nullcontext() as hosts,
    ):
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        for number in range(options.first, options.first + options.runs):
            found = one(folder, number) if hosts is None else examined(hosts, folder, number)
            counts[MODES[number % len(MODES)] if hosts is None else "doctor"] += 1
            if found:
                wrong.append(found)
                print(found, flush=True)
            if sum(counts.values()) % 10 == 0:
                print(f"{sum(counts.values())} runs, {len(wrong)} wrong, {time.monotonic() - began:.0f} s", flush=True)
    kinds = ", ".join(f"{count} {mode}" for mode, count in sorted(counts.items()))
    print(f"{options.runs} runs of 4 processes ({kinds}) in {time.monotonic() - began:.0f} s: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
