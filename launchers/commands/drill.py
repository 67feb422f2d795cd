"""``meshpar doctor --drill``: kill a replica of a short test job on the real machines, and report how long the
recovery takes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, final

from meshpar.core.errors import LaunchError, MeshparError
from meshpar.launchers.agent.check_in import Waiting, children
from meshpar.launchers.agent.replicas import Division, launch_replicas
from meshpar.launchers.commands.placing import adopted, node_range, said
from meshpar.launchers.commands.train import division_of
from meshpar.launchers.recipes.loading import load_recipe

_FIRST = 50  # steps before the loss
_RECIPE = """\
model: {dim: 32, layers: 2, heads: 2, hidden: 64, max_positions: 64}
data: {source: files, paths: [text.txt], sequence_length: 64, micro_batch: 2, cache: cache}
optimizer: {lr: 1e-3}
training: {steps: 1000000, log_every: 50}
"""


def run_drill(
    mesh: str, placement: Mapping[str, object], *, folder: Path | None, profile: Path | None, part_s: float
) -> int:
    """Run the drill and return the exit code: 0 if the others went on and the lost replica came back, 1 if not.

    Each node runs it. The last replica is killed, which is never on node 0 of several nodes.

    Args:
        mesh: of the test job, with ``dp_replicate`` of 2 or more.
        placement: the given options of ``nproc``, ``nodes``, ``node_rank`` and ``head``.
        folder: a folder that all nodes share, in which the job has a folder of its own; None on one node: a temporary
            one.
        profile: see :func:`meshpar.launchers.commands.run.run_doctor`; None.
        part_s: seconds within which the job must start, lose the replica, and have it back.

    Raises:
        LaunchError: the options do not fit, or no replica ran.
    """
    given = said(placement)
    if profile is not None:
        raise LaunchError("--drill and --profile are two examinations; give one of them")
    if adopted(given, placement) is not None:
        raise LaunchError(
            "--drill starts ranks itself: run it once on each node, with --nodes, --node-rank and --folder"
        )
    nodes, node = node_range(str(given.get("nodes", 1)))[1], given.get("node_rank", 0)
    if nodes > 1 and folder is None:
        raise LaunchError(f"--drill on {nodes} nodes requires --folder, a folder that all of them share")
    with tempfile.TemporaryDirectory(prefix="meshpar-") as own:
        source = Path(own, "drill.yaml")
        source.write_text(_RECIPE, encoding="utf-8")
        recipe = load_recipe(str(source), [f"mesh={mesh}"])
    division = division_of(recipe, given)
    job = (
        folder or Path(tempfile.mkdtemp(prefix="meshpar-"))
    ).absolute() / "meshpar-drill"  # made anew: no name that a run may have
    data = recipe.data.model_copy(update={"paths": (str(job / "text.txt"),), "cache": str(job / "cache")})
    recipe = recipe.model_copy(update={"output": str(job), "data": data})
    if not node:
        shutil.rmtree(job, ignore_errors=True)
        job.mkdir(parents=True)
        (job / "text.txt").write_text(
            "".join(f"{number} times {number} is {number * number}.\n" for number in range(3000))
        )
        print(
            f"drill: {division.count} replicas, each on {division.mesh}; replica {division.count - 1} will be killed",
            flush=True,
        )
    drill = _Drill(job, division, part_s)
    head = given.get("head") or (f"{job}.lighthouse" if nodes > 1 else "")  # beside the folder, which node 0 makes anew
    try:
        with drill:
            code = launch_replicas(recipe, division, head, node, None, None, quiet=True)
    except MeshparError:
        if not drill.over:
            raise
    if not drill.over:
        return code
    if drill.missing:
        raise LaunchError(
            f"no {drill.missing} within {part_s:.0f} s; see the logs in {job / 'logs'}, and give more time with --wait"
        )
    if not node:
        print("\n".join(drill.report))
    if folder is None:
        shutil.rmtree(job.parent)
    return 0


def parts(records: Sequence[Mapping[str, Any]], replicas: int) -> Sequence[Mapping[str, Any]]:
    """Return, as far as they are there, the records of all replicas after the first steps, of the loss, and of the
    return.
    """
    found: list[Mapping[str, Any]] = []
    now = replicas
    for record in records:
        now, changed = record.get("replicas", now), "replicas" in record
        # A replica that is back before the others miss it is lost and returned in one change.
        happened = (now == replicas and not changed and record["step"] >= _FIRST, changed, changed and now == replicas)
        while len(found) < len(happened) and happened[len(found)]:
            found.append(record)
    return found


@final
class _Drill:
    """Follow the job on this node, kill the last replica if it runs here, and end the job; a context manager.

    Attributes:
        over: whether this has ended the job.
        missing: the part that did not happen in time; empty otherwise.
        report: lines for a person, once all parts have happened.
    """

    def __init__(self, job: Path, division: Division, part_s: float) -> None:
        """``job``: its folder, which every node sees."""
        self._job, self._division, self._part_s = job, division, part_s
        self._before = self._metrics()  # an earlier drill's, where node 0 has not removed it yet
        self._ended = Event()
        self._thread = Thread(target=self._follow, daemon=True)
        self.over, self.missing = False, ""
        self.report: Sequence[str] = ()

    def __enter__(self) -> _Drill:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        last = self._division.count - 1
        for number, part in enumerate(
            ("step of all replicas", "step without the killed replica", "step with the returned replica")
        ):
            waiting = Waiting(self._part_s)
            while len(found := parts(self._records(), self._division.count)) <= number:
                if self._ended.wait(0.1):
                    return
                if not waiting.more(f"a {part}"):
                    self.missing = part
                    break
            if self.missing:
                break
            if not number and last in self._division.here:
                print(
                    f"killed the ranks of replica {last}: processes {', '.join(map(str, self._kill(last)))}", flush=True
                )
        else:
            self.report = _told(*found[1:])
        self.over = True
        os.kill(os.getpid(), signal.SIGTERM)  # launch_replicas passes it on

    def _records(self) -> Sequence[Mapping[str, Any]]:
        text = self._metrics()
        return (
            () if text == self._before else [json.loads(line) for line in text.split("\n")[:-1]]
        )  # the last one may be half written

    def _metrics(self) -> str:
        with suppress(OSError):
            return (self._job / "metrics.jsonl").read_text(encoding="utf-8")
        return ""

    def _kill(self, replica: int) -> Sequence[int]:
        """Kill the ranks of a replica and return their processes; its launcher stays, and starts them again."""
        found = [rank for pid in children(self._job / "logs" / f"replica-{replica}") for rank in children(of=pid)]
        for rank in found:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        return found


def _told(lost: Mapping[str, Any], back: Mapping[str, Any]) -> Sequence[str]:
    """Return the report on the records of the loss and of the return."""
    lines = [f"lost: after step {lost['step']}; the others waited {lost['replicas/seconds']:.1f} s, then continued"]
    if back is lost:
        return [*lines, "back: with the same step"]
    later, waited = back["time"] - lost["time"], back["replicas/seconds"]
    return [
        *lines,
        f"back: after step {back['step']}, {later:.1f} s later; the others waited {waited:.1f} s while it copied "
        "their state",
    ]
