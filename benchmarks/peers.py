"""meshpar beside its peers: the same model, data, mesh, precision and optimizer, step by step in turn, in one run.

    pip install 'meshpar[train,transformers,bench]'
    python benchmarks/peers.py [--plan NAME ...] [--peer NAME ...] [--rounds 5] [--steps 3] [--starts 3]
                               [--out docs/peers.json]
    python benchmarks/peers.py --report docs/peers.json docs/speed.md docs/peers.svg

Every peer is a group of gloo processes of its own on this machine's CPUs, one thread each, started one after the other;
then the peers take their turns, while the others sleep. All are started several times, and "torch by hand" runs twice:
what lies between the two is the noise. Measured: the seconds of a step (the slowest rank's, over a turn), each round's
ratio to torch by hand, seconds from the start of the processes to the end of the first step, and the largest resident
memory of a rank. The losses of all are compared. A peer that does not run is reported with what it said. The report
puts the table into a page and draws it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.patience import patient

RANKS_OF = {"FSDP, 2 ranks": 2, "FSDP, 4 ranks": 4, "HSDP, 2 x 2": 4, "FSDP x TP, 2 x 2": 4, "DDP, 2 ranks": 2}
HAND, AGAIN = "torch by hand", "torch by hand, once more"
PEERS = (
    HAND, AGAIN, "meshpar", "meshpar, loop by hand", "meshpar, loop by hand, guards off", "accelerate",
    "accelerate, made to shard", "transformers DistributedConfig", "Lightning Fabric", "torchtitan",
)  # fmt: skip
SCRIPT = Path(__file__).with_name("peer_ranks.py")
PATIENCE_S = 180.0
MEMORY = {"MALLOC_TRIM_THRESHOLD_": 1 << 30, "MALLOC_MMAP_THRESHOLD_": 1 << 25}
"""glibc keeps what a step frees for the next. By itself it gives more or less of it back, by what the process did
before: 1,300 to 4,800 page faults a step were seen of the loop by hand, 6,200 to 7,500 of meshpar's, which holds less
memory."""
VERSIONS = ("torch", "transformers", "accelerate", "lightning", "torchtitan")


class PeerFailed(Exception):
    """A peer's own words."""


class Peer:
    """A group of rank processes that take commands."""

    def __init__(self, name: str, plan: str, folder: Path) -> None:
        """Start the ranks and wait for their first step."""
        self.name, self._log = name, folder / f"{name.replace(' ', '-')}.log"
        start = time.perf_counter()
        self._ranks = [
            self._start(rank, RANKS_OF[plan], plan, folder, port)
            for port in [_free_port()]
            for rank in range(RANKS_OF[plan])
        ]
        try:
            self.first = self._answers()
        except PeerFailed:
            self.end()
            raise
        self.startup = time.perf_counter() - start

    def turn(self, steps: int) -> list[dict[str, Any]]:
        """Let every rank do ``steps`` steps and return what each says."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        return self._answers()

    def end(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def _start(self, rank: int, world: int, plan: str, folder: Path, port: int) -> subprocess.Popen[str]:
        places = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "NODE_RANK": 0,
            "GROUP_RANK": 0,
        }
        launched = {
            "TORCHELASTIC_RUN_ID": "peers",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        environment = os.environ | {name: str(value) for name, value in (places | launched | MEMORY).items()}
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), self.name, plan, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log.open("a"), text=True, env=environment,
        )  # fmt: skip

    def _answers(self) -> list[dict[str, Any]]:
        limit_s = patient(PATIENCE_S)
        deadline = time.monotonic() + limit_s
        waiting = {rank.stdout: place for place, rank in enumerate(self._ranks)}
        answers: dict[int, dict[str, Any]] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerFailed(f"no answer within {limit_s:.0f} s; its log ends: {self._last_words()}")
            for stream in ready:
                line = stream.readline()
                answer = json.loads(line) if line else {"error": self._last_words()}
                if "error" in answer:
                    raise PeerFailed(answer["error"])
                answers[waiting.pop(stream)] = answer
        return [answers[place] for place in sorted(answers)]

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "ended without a word"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def measure(plan: str, names: Sequence[str], rounds: int, steps: int, starts: int) -> dict[str, Any]:
    """Return what each peer did under a plan."""
    found: dict[str, Any] = {name: {"seconds": [], "losses": [], "startups": [], "rss": 0} for name in names}
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(SCRIPT), "prepare", folder], check=True)
        for start in range(starts):
            peers = _start_all(plan, names if start % 2 == 0 else names[::-1], found, Path(folder))
            try:
                for number in range(rounds + 1):  # the first is to warm up
                    # Every other round goes backwards, so that no peer always follows the same one.
                    for name in list(peers) if number % 2 else list(peers)[::-1]:
                        _take_turn(found, peers, name, steps, keep=number > 0)
            finally:
                for peer in peers.values():
                    peer.end()
    return {
        "plan": plan,
        "ranks": RANKS_OF[plan],
        "steps": steps,
        "peers": {name: _summary(found[name], found) for name in names},
    }


def _start_all(plan: str, names: Sequence[str], found: dict[str, Any], folder: Path) -> dict[str, Peer]:
    peers: dict[str, Peer] = {}
    for name in names:
        if "error" in found[name]:
            continue
        try:
            peers[name] = peer = Peer(name, plan, folder)
        except PeerFailed as error:
            found[name]["error"] = str(error)
            print(f"{plan}: {name} does not run: {error}", flush=True)
            continue
        first = peer.first[0]
        found[name] |= {key: first[key] for key in ("split", "parameters", "note")} | {
            "share": max(x["share"] for x in peer.first)
        }
        found[name]["startups"].append(peer.startup)
        found[name]["losses"] += first["losses"]
    return peers


def _take_turn(found: dict[str, Any], peers: dict[str, Peer], name: str, steps: int, *, keep: bool) -> None:
    try:
        answers = peers[name].turn(steps)
    except PeerFailed as error:
        found[name]["error"] = str(error)
        peers.pop(name).end()
        return
    found[name]["losses"] += answers[0]["losses"]
    found[name]["rss"] = max(found[name]["rss"], *(answer["rss"] for answer in answers))
    if keep:
        found[name]["seconds"].append(max(answer["seconds"] for answer in answers) / steps)


def _summary(one: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    if "error" in one:
        return {"error": one["error"]}
    hand = found.get(HAND, {})
    kept = {key: one[key] for key in ("split", "parameters", "share", "note", "rss", "startups", "seconds", "losses")}
    if not hand.get("seconds"):
        return kept
    ratios = [mine / theirs for mine, theirs in zip(one["seconds"], hand["seconds"], strict=True)]
    apart = max(abs(mine - theirs) for mine, theirs in zip(one["losses"], hand["losses"], strict=True))
    return kept | {"ratios": ratios, "apart": apart}


def machine() -> dict[str, str]:
    """Return what was measured on, and when."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    found = {
        "cpu": f"{os.cpu_count()} x {model or platform.processor()}",
        "python": platform.python_version(),
        "date": time.strftime("%F"),
    }
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="append", choices=list(RANKS_OF))
    parser.add_argument("--peer", action="append", choices=PEERS)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each after each start")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    parser.add_argument("--starts", type=int, default=3, help="how often each is started")
    parser.add_argument("--out", type=Path, default=Path("docs/peers.json"))
    parser.add_argument("--report", nargs=3, type=Path, metavar=("JSON", "PAGE", "SVG"))
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import peers_report

    if options.report:
        peers_report.write(*options.report)
        return
    known = json.loads(options.out.read_text()) if options.out.is_file() else {"plans": {}}
    for plan in options.plan or list(RANKS_OF):
        result = measure(plan, options.peer or PEERS, options.rounds, options.steps, options.starts)
        print("\n".join(peers_report.table(result)), flush=True)
        known["plans"][plan] = {"machine": machine(), **result}
        options.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
