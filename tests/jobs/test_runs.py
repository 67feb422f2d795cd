"""``meshpar runs`` and ``meshpar compare``: what runs have done, and the first step and tensor in which two differ."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshpar.launchers.agent.failures import record
from meshpar.launchers.cli import app
from meshpar.process.leftovers import this_process

RECIPE = """\
name: job
device: cpu
model: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 32, dropout: 0.0}
data: {source: files, paths: [text.txt], cache: cache, sequence_length: 32, micro_batch: 2}
optimizer: {lr: 1e-2}
schedule: {steps: 6}
checkpoint: {every: 2, keep: null}
training: {steps: 6, log_every: 1, digest_every: 2, tensorboard: false}
"""


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 1, done.output
    return done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(folder: Path, *records: dict[str, Any], recipe: str = "", more: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"time": 10.0, **each}) + "\n" for each in records) + more)
    if recipe:
        (folder / "recipe.yaml").write_text(recipe)
    return folder


def losses(*values: float | None) -> list[dict[str, Any]]:
    return [{"step": step, "train/loss": value} for step, value in enumerate(values, 1)]


def test_a_resumed_run_is_the_run_that_was_not_stopped_and_another_seed_is_not(folder: Path) -> None:
    (folder / "job.yaml").write_text(RECIPE)
    (folder / "text.txt").write_text("".join(f"{a} + {b} = {a + b}\n\n" for a in range(60) for b in range(20)))
    for words in (["output=runs/whole"], ["output=runs/resumed", "training.steps=3"], ["output=runs/resumed"]):
        run("train", "job.yaml", "--quiet", *words)
    run("train", "job.yaml", "--quiet", "output=runs/other", "seed=1")

    table = run("runs").splitlines()
    assert table[0].split() == ["RUN", "LAST", "RECORD", "(UTC)", "STEP", "LOSS", "VAL", "PER", "SECOND", "STATE"]
    assert [(line.split()[0], line.split()[3], line.split()[-1]) for line in table[1:]] == [
        (name, "6/6", "complete") for name in ("whole", "resumed", "other")
    ]
    assert run("runs", "runs/whole").splitlines()[1].startswith("whole ")

    same = run("compare", "runs/whole", "runs/resumed", "--deep")
    assert "values are the same in every bit in 7 steps, up to 6" in same, "the weights' digest at step 0, too"
    assert same.endswith("checkpoints do not differ: every tensor of 2, 4, 6 is the same in every bit\n")
    assert "recipe: " not in same and "\n  runs/whole    █" in same and "\n  runs/resumed  █" in same, "falling losses"

    different = run("compare", "runs/whole", "runs/other", "--deep")
    assert "recipe: seed: 0 and 1\n" in different
    digests = [json.loads(line) for line in Path("runs/whole/metrics.jsonl").read_text().splitlines()]
    first = f"{next(line['weights/digest'] for line in digests if 'weights/digest' in line):013x}"
    assert f"the first step that differs is 0, the first that both have: weights/digest {first} and " in different
    assert "checkpoints differ at step 2, the first that both have saved, in " in different
    assert "; the first is model.embed.weight: " in different


def test_the_first_step_that_differs_and_by_how_much(folder: Path) -> None:
    write_run(folder / "runs/a", *losses(3.0, 2.0, None, 1.0))
    write_run(folder / "runs/b", *losses(3.0, 2.0, None, 1.0001), recipe=RECIPE)
    compared = run("compare", "runs/a", "runs/b")
    assert "the first step that differs is 4, the same up to step 3: train/loss 1.0 and 1.0001\n" in compared
    assert "1.0e-04 at step 4" in compared
    assert "same within 0.001 in 4 steps" in run("compare", "runs/a", "runs/b", "--tolerance", "1e-3")
    write_run(folder / "runs/nan", *losses(3.0, None))
    assert "differs is 2, the same up to step 1: train/loss 2.0 and None" in run("compare", "runs/a", "runs/nan")
    write_run(folder / "more/a", {"step": 1, "train/loss": 3.0, "val/loss": 2.0}, {"step": 2, "train/loss": 2.0})
    (folder / "more/a/recipe.yaml").write_text("{")
    compared = run("compare", "runs/a", "more/a")
    assert "only in more/a: val/loss\n" in compared and "\n  runs/a  █" in compared and "\n  more/a  █" in compared
    write_run(folder / "runs/later", {"step": 9, "train/loss": 1.0})
    assert "no step has a record in both runs" in run("compare", "runs/a", "runs/later")


def test_what_is_no_run_or_no_record_is_told_or_left_out(folder: Path) -> None:
    assert "no runs in runs; expected runs/NAME/metrics.jsonl" in refused("runs")
    write_run(
        folder / "runs/a", *losses(3.0), more='{"step": 2, "tr\nnull\n[]\n{"step": null}\n{"a": 1}\n{"step": 1e999}'
    )
    assert run("runs").splitlines()[1].split()[3:5] == ["1", "3"]
    assert "runs/b has no metrics.jsonl" in refused("compare", "runs/a", "runs/b")
    write_run(folder / "runs/\x1b[2Jred", {"step": 1, "train/\x1b[2J": 2.0})
    assert "\x1b" not in run("runs") + run("compare", "runs/a", "runs/\x1b[2Jred")
    assert "have saved no step in common; expected two runs with" in refused("compare", "runs/a", "runs/a", "--deep")


def test_numbers_that_no_run_writes_are_told_as_none(folder: Path) -> None:
    strange = [json.dumps({"step": step, "train/loss": 1.0, "val/loss": 10**400, "time": 1e300}) for step in (1, 2)]
    lines = [*strange, '{"step": 3, "train/loss": NaN, "val/loss": Infinity, "time": NaN}']
    for name in ("a", "b"):
        write_run(folder / "runs" / name, recipe="training: {steps: many, epochs: [1]}\n", more="\n".join(lines))
    assert run("runs").splitlines()[1].split() == ["a", "-", "3/many", "1", "-", "-", "stopped"]
    assert "no step differs" in run("compare", "runs/a", "runs/b")


def test_runs_that_live_stopped_failed_or_wait_in_a_queue(folder: Path) -> None:
    def state(name: str) -> str:
        (line,) = [line for line in run("runs").splitlines() if line.startswith(f"{name} ")]
        return line.split("  ")[-1].strip()

    stopped = write_run(folder / "runs/stopped", *losses(3.0, 2.0), recipe=RECIPE)
    assert state("stopped") == "stopped"
    record(make_logs(stopped), 1, ValueError("of  the\nuser"))
    assert state("stopped") == "failed: rank 1: ValueError: of the user"

    lives = write_run(folder / "runs/lives", *losses(3.0, 2.0), recipe=RECIPE)
    (lives / "checkpoints").mkdir()
    holder = {**this_process(), "since": "now", "count": 1}
    lease = lives / "checkpoints" / lease_name()
    lease.write_text(json.dumps(holder))
    assert state("lives") == "running"
    lease.write_text(json.dumps({**holder, "host": "elsewhere"}))
    assert state("lives") == "running", "its last sign is new"
    os.utime(lease, (time.time() - 100, time.time() - 100))
    began = time.monotonic()
    assert state("lives") == "stopped"
    assert time.monotonic() - began < 20, "a list does not wait for signs of other hosts"

    write_run(folder / "runs/script", *losses(3.0))
    assert state("script") == "-"
    launch = folder / "runs/queued/launches/001"
    launch.mkdir(parents=True)
    note = {"target": "slurm", "options": [], "file": "job.sbatch", "label": "queued"}
    (launch / "launch.json").write_text(json.dumps(note))
    assert state("queued") in ("no record", "slurm: ?")


def test_a_damaged_launch_is_named_in_its_row_and_the_others_are_shown(folder: Path) -> None:
    write_run(folder / "runs/a", *losses(3.0))
    note = json.dumps({"target": "skypilot", "options": [], "file": "job.yaml", "label": "b"})
    for name, text in (("b", note), ("c", "{")):
        launch = folder / "runs" / name / "launches/001"
        launch.mkdir(parents=True)
        (launch / "launch.json").write_text(text)
    rows = {line.split()[0]: line for line in run("runs").splitlines()}
    assert rows["c"].endswith("  launch 001 is damaged") and {"a", "b"} < rows.keys()
    assert "note: cannot read runs/c/launches/001/launch.json" in run("runs")
    assert "cannot read runs/c/launches/001/launch.json" in refused("jobs", "status", "runs/c")


def make_logs(run_folder: Path) -> Path:
    logs = run_folder / "logs/start"
    logs.mkdir(parents=True)
    return logs


def lease_name() -> str:
    from meshpar.checkpoints.steps.lease import LEASE_NAME

    return LEASE_NAME


def test_an_epoch_ends_a_run_of_epochs(folder: Path) -> None:
    recipe = RECIPE.replace("{steps: 6, log", "{epochs: 2, log")
    write_run(folder / "runs/a", {"step": 5, "epoch": 2}, recipe=recipe)
    write_run(folder / "runs/b", {"step": 5, "epoch": 1}, recipe=recipe)
    assert [line.split()[-1] for line in run("runs").splitlines()[1:]] == ["complete", "stopped"]
