"""Run the habits of loops under a plan, and write what came of each as a table: docs/loops.md."""

import gc
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from meshpar import MeshparError
from meshpar.testing import RankFailure, launch
from tests.support.loop_habits import CONTROLS, HABITS, Habit
from tests.support.loop_sides import PLANS, WITH, Side, ranks_of
from tests.support.patience import patient

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
ALLOWED = ("exact", "refused", "torch")
TORCHS_OWN = {"penalty": r"got mixed torch\.Tensor and DTensor", "setting": r"got mixed torch\.Tensor and DTensor"}
"""Habits that hand DTensors to torch alone -> the error with which torch refuses them."""
TOLD = "another stage of pp failed"
"""How a stage begins that tells of another's error."""
LAUNCH_S = 500.0
WEAKER_S = 12.0
"""A habit that runs without guards may hang, which nobody waits long for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a habit: ``exact``, ``refused``, ``torch`` (its own error), ``wrong``, ``raw``, ``hang``."""

    kind: str
    message: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


def run_plan(title: str, names: Iterable[str] | None = None) -> dict[str, Outcome]:
    """Run habits under a plan, with another launch after one that may have left ranks out of step."""
    waiting, found = list(names or HABITS), {}
    while waiting:
        with tempfile.TemporaryDirectory(prefix="meshpar-loops-") as folder:
            failure = ""
            try:
                arguments = (title, waiting, folder)
                launch(__name__, "run_habits", ranks_of(title), arguments, timeout_s=LAUNCH_S, fresh="a habit may hang")
            except RankFailure as error:
                failure = str(error)
            reports = [_read(Path(folder, str(rank))) for rank in range(ranks_of(title))]
        begun = [name for name in waiting if any(name in report for report in reports)]
        if not begun:
            raise RankFailure(f"no habit ran under {title}: {failure}")
        for name in begun:
            found[name] = _joined([report.get(name) or Outcome(kind="hang") for report in reports])
        waiting = [name for name in waiting if name not in begun]
    return found


def _read(path: Path) -> dict[str, Outcome]:
    """A rank's outcomes; a habit that it began and did not end is a hang."""
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return {name: Outcome(**outcome) for name, outcome in lines}


def _joined(outcomes: list[Outcome]) -> Outcome:
    """One outcome of all ranks: theirs where they agree, and otherwise a fault."""
    kinds = {outcome.kind for outcome in outcomes}
    slowest = max(outcome.seconds for outcome in outcomes)
    if len(kinds) == 1:
        first = min(outcomes, key=lambda outcome: (outcome.message.startswith(TOLD), outcome.message))
        return Outcome(kind=first.kind, message=first.message, seconds=slowest)
    kind = next(kind for kind in ("hang", "raw", "wrong", "refused") if kind in kinds)
    listed = "; ".join(f"rank {rank} {outcome}" for rank, outcome in enumerate(outcomes))
    return Outcome(kind="wrong" if kind == "refused" else kind, message=listed, seconds=slowest)


def run_habits(title: str, names: list[str], folder: str) -> None:
    """Run habits on this rank until ranks may be out of step; outcomes go into this rank's file in ``folder``."""
    with Path(folder, str(dist.get_rank())).open("a", buffering=1) as file:
        for name in names:
            report = lambda outcome, name=name: file.write(json.dumps([name, asdict(outcome)]) + "\n")  # noqa: E731
            report(Outcome(kind="hang"))  # until the next line says what else
            limit_s = WEAKER_S if WITH in title else _habit(name).limit_s
            timer = threading.Timer(patient(limit_s), os._exit, (0,))
            timer.daemon = True
            timer.start()
            outcome = _run(title, name)
            report(outcome)
            timer.cancel()  # a rank that waits for one that hangs must not end first, which would free that one
            outcomes = _of_all_ranks(folder, name)
            torch._dynamo.reset()
            gc.collect()
            if len({(one.kind, one.message if one.kind in ("raw", "torch") else "") for one in outcomes}) > 1:
                return


def _of_all_ranks(folder: str, name: str) -> list[Outcome]:
    """Every rank's outcome, awaited through their files: a collective might meet one that the habit left behind."""
    files = [Path(folder, str(rank)) for rank in range(dist.get_world_size())]
    while True:
        outcomes = [_read(file).get(name) for file in files]
        if all(outcome is not None and outcome.kind != "hang" for outcome in outcomes):
            return outcomes
        time.sleep(0.005)


def _habit(name: str) -> Habit:
    return HABITS.get(name) or CONTROLS[name]


def _run(title: str, name: str) -> Outcome:
    habit, began = _habit(name), time.monotonic()
    try:
        if not habit.refused:
            alone = Side(title, alone=True)
            habit.run(alone)
            torch._dynamo.reset()
            began = time.monotonic()
        side = Side(title, alone=False)
        habit.run(side)
        difference = "it ran to its end" if habit.refused else side.difference(alone, habit.tolerance)
    except MeshparError as error:
        return Outcome(kind="refused", message=_told(error), seconds=time.monotonic() - began)
    except Exception as error:
        text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        return Outcome(
            kind="torch" if re.search(TORCHS_OWN.get(name, "$^"), text) else "raw",
            message=text,
            seconds=time.monotonic() - began,
        )
    return Outcome(
        kind="exact" if difference is None else "wrong", message=difference or "", seconds=time.monotonic() - began
    )


def _told(error: MeshparError) -> str:
    """Return a message's first line, or a plan's one problem, and its remedy."""
    problems = getattr(error, "problems", ())
    first, *others = (problems[0] if len(problems) == 1 else str(error)).splitlines()
    if first.endswith(":") and others:
        first = f"{first} {others[0].strip()}"
    remedy = next((line.strip() for line in others if line.strip().startswith("remedy:")), "")
    return f"{first}; {remedy}" if remedy else first


# The page

UNKNOWN = Outcome(kind="unknown", message="not run yet")
HEAD = """# What a training loop may do

Find the habit of your loop: each row is common code of PyTorch loops, and each column a plan.

- `exact`: loss, gradients and weights equal those of one process on the concatenated batch (float64,
  to 1e-9, unless the row names another dtype).
- `refused`: meshpar raises a `MeshparError` on every rank; the number leads to [the
  message](#messages).
- `torch`: torch itself raises the error, before any value is wrong.

Under `PP` (`pp=2`, [stages](pipeline.md)) the lines from forward to backward are
`par.backward(micro_batches, loss)`, with two micro-batches where the habit allows it. All other lines of
a loop run as they are. A loop that calls the module itself is refused with this remedy.

`python docs/write_loops.py` runs every cell and writes this page.
[tests/exact/test_loops.py](../tests/exact/test_loops.py) runs the cells again and compares. The code of each row
is a function in [tests/support/loop_habits.py](../tests/support/loop_habits.py).

Not compared between ranks, so keep them right yourself: labels of ranks of `tp` (ranks of one sample
need the same labels), samples of data ranks (pass `par.data_rank` to the sampler), and
`torch.nn.utils.clip_grad_norm_` between micro-batches (`par.clip_grad_norm_` refuses it).

`nn.init`, `randn_like` and other random writes into parameters after `apply` draw what one process
draws, from the same seed on every rank; they are refused where the ranks' random states differ.
`parameter.data = parameter.data * 0.9` is exact. A write into a row (`parameter[0] = 0`), and an
operator that torch cannot run on shards, are refused. Change `whole = par.whole(parameter)` on every
rank and write it back, under `torch.no_grad()`, by `parameter.copy_(par.like(parameter, whole))`.
`par.like(parameter, values)` places a mask, noise or a value beside a parameter or its gradient.

`python benchmarks/fuzz_after_apply.py --seeds 0:1000` draws loops from 300 such habits, on the plans
of the table without `PP`, and compares each with one process.
"""


WEAKER = {f"{plan}{WITH}{guards}": (plan, guards) for plan in ("FSDP", "TP") for guards in ("first", "off")}
"""The columns of the second table."""
SECTION = """## With other guards

The table above holds with `Plan(guards="always")`. Here are the habits that it refuses under FSDP and
TP, with `"first"` and `"off"`. `first` refuses what differs in the first steps, as here; a loop that
begins to differ later is not compared, and trains something else or hangs. `off` compares
nothing, and refuses copies, files that one process could not read, and wrappers around the module.

- `error`: another error than meshpar's, on some ranks or all.
- `wrong`: it trains something else, without an error. `hang`: ranks wait for each other.
"""
KINDS = {
    "exact": "exact", "refused": "refused", "torch": "error", "raw": "error", "wrong": "**wrong**",
    "hang": "**hang**",
}  # fmt: skip
QUICK = [name for name in HABITS if name not in ("compiled_eager", "compiled_aot", "generating")]


def refused_habits(columns: Mapping[str, Mapping[str, Outcome]], plan: str) -> list[str]:
    """The habits of the second table under a plan."""
    return [name for name in QUICK if columns[plan].get(name, UNKNOWN).kind == "refused"]


def _weaker_lines(columns: Mapping[str, Mapping[str, Outcome]], weaker: Mapping[str, Mapping[str, str]]) -> list[str]:
    heads = [f"{plan}, `{guards}`" for plan, guards in WEAKER.values()]
    lines = [SECTION, f"| habit | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    refused = {plan: refused_habits(columns, plan) for plan, _ in WEAKER.values()}
    for name in QUICK:
        cells = [
            weaker.get(title, {}).get(name, "-") if name in refused[plan] else "-"
            for title, (plan, _) in WEAKER.items()
        ]
        if any(name in known for known in refused.values()):
            lines.append(f"| {HABITS[name].title} | {' | '.join(cells)} |")
    return lines


def weaker_of(text: str) -> dict[str, dict[str, str]]:
    """The cells of the second table that a page has: column -> habit -> what came of it."""
    titles = {habit.title: name for name, habit in HABITS.items()}
    found: dict[str, dict[str, str]] = {title: {} for title in WEAKER}
    for line in text.partition(SECTION)[2].partition("## Messages")[0].splitlines():
        title, *cells = [part.strip() for part in line.strip("|").split(" | ")]
        if line.startswith("| ") and title in titles:
            for column, cell in zip(WEAKER, cells, strict=True):
                found[column][titles[title]] = cell
    return found


def page(columns: Mapping[str, Mapping[str, Outcome]], weaker: Mapping[str, Mapping[str, str]]) -> str:
    """The page for the outcomes of each plan, and for those with other guards."""
    numbers: dict[str, int] = {}

    def cell(outcome: Outcome) -> str:
        if outcome.kind == "exact":
            return "exact"
        number = numbers.setdefault(outcome.message, len(numbers) + 1)
        return f"{outcome.kind if outcome.kind in ALLOWED else f'**{outcome.kind}**'} [{number}](#messages)"

    lines = [HEAD, f"| habit | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    group = ""
    for name, habit in HABITS.items():
        if habit.group != group:
            group = habit.group
            lines.append(f"| **{group}** |{'  |' * len(columns)}")
        lines.append(
            f"| {habit.title} | {' | '.join(cell(column.get(name, UNKNOWN)) for column in columns.values())} |"
        )
    lines += ["", *_weaker_lines(columns, weaker)]
    lines += ["", "## Messages", "", *(f"{number}. {_escaped(message)}" for message, number in numbers.items()), ""]
    return "\n".join(lines)


def _escaped(message: str) -> str:
    return re.sub(r"([*_<>|\[\]])", r"\\\1", message)


def columns_of(text: str) -> dict[str, dict[str, Outcome]]:
    """The outcomes that a page says: plan -> habit -> outcome."""
    messages = {
        number: re.sub(r"\\([*_<>|\[\]])", r"\1", message)
        for number, message in re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE)
    }
    titles = {habit.title: name for name, habit in HABITS.items()}
    found: dict[str, dict[str, Outcome]] = {title: {} for title in PLANS}
    for line in text.partition(SECTION)[0].splitlines():
        title, *cells = [part.strip() for part in line.strip("|").split(" | ")]
        if not line.startswith("| ") or title not in titles:
            continue
        for plan, cell in zip(PLANS, cells, strict=True):
            kind, _, number = re.fullmatch(r"\W*(\w+)\W*( \[(\d+)\].*)?", cell).groups()
            found[plan][titles[title]] = Outcome(kind=kind, message=messages[number] if number else "")
    return found


def _said(outcome: Outcome) -> tuple[str, str]:
    return (
        outcome.kind,
        "" if outcome.kind == "torch" else outcome.message,
    )  # whose words change from release to release


def differences(title: str, outcomes: Mapping[str, Outcome], documented: Mapping[str, Outcome]) -> list[str]:
    """What a run under a plan found that no loop may meet, or that the page does not say."""
    found = []
    for name, outcome in outcomes.items():
        where = f"{name} under {title}"
        if outcome.kind not in ALLOWED:
            found.append(f"{where}: {outcome}")
        elif name not in documented or _said(documented[name]) != _said(outcome):
            found.append(f"{where}: {outcome}\n    docs/loops.md says: {documented.get(name, 'nothing')}")
    return found
