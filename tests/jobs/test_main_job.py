"""The main job by the command line: train, stop by signal, resume on this mesh and another, export, load."""

import contextlib
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from typer.testing import CliRunner

from meshpar import CheckpointError, MeshparError, RecipeError
from meshpar.checkpoints import read_manifest
from meshpar.launchers.cli import app
from meshpar.launchers.commands.train import launch
from meshpar.launchers.export import export_run
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.testing import on_ranks
from meshpar.training.adamw_and_schedules import Schedule
from meshpar.training.stop import StopRequest
from meshpar.training.tokenizer import byte_tokenizer
from meshpar.training.tokens import write_tokens
from tests.support.patience import patient, until
from tests.support.tiers import daily
from tests.support.warm import ranks_of

STEPS = 60
RECIPE = """\
name: job
mesh: dp_shard=2
device: cpu
model: {dim: 32, layers: 2, heads: 2, hidden: 64, max_positions: 64, dropout: 0.0}
data: {source: files, sequence_length: 64, micro_batch: 4, accumulate: 2, validation_fraction: 0.1}
optimizer: {lr: 1e-3, eps: 1e-4}
training: {steps: 60, log_every: 1, validate_steps: 2, tensorboard: false}
"""


def text(lines: int = 4000) -> str:
    numbers = np.random.default_rng(0).integers(0, 50, size=(lines, 2)).tolist()
    return "".join(f"def add_{a}_{b}():\n    return {a} + {b}\n\n" for a, b in numbers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("job")
    (made / "text.txt").write_text(text())
    (made / "job.yaml").write_text(RECIPE)
    return made


def command(folder: Path, output: str, *overrides: str) -> list[str]:
    data = [f"data.paths=[{folder / 'text.txt'}]", f"data.cache={folder / 'cache'}"]
    recipe = [str(folder / "job.yaml"), f"output={folder / output}", *data, *overrides]
    return [sys.executable, "-m", "meshpar.launchers", "train", *recipe, "--quiet"]


def start(folder: Path, output: str, *overrides: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    words = [*before, *command(folder, output, *overrides)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> str:
    _, output = process.communicate(timeout=150)
    assert process.returncode == 0, output
    return output


def run(folder: Path, output: str, *overrides: str) -> str:
    return finish(start(folder, output, *overrides))


@contextlib.contextmanager
def running(
    folder: Path, output: str, *overrides: str, until_step: int, before: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start a run in a session of its own and wait until it reports a step."""
    process = start(folder, output, *overrides, before=before)
    try:
        wait_for_step(process, until_step)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if line.startswith("step") and int(line.split()[1].partition("/")[0]) >= step:
            return
    pytest.fail(f"the run ended before step {step}:\n{seen}")


def rest_of(process: subprocess.Popen[str]) -> str:
    """Return a run's remaining output; communicate() would lose lines that Python has buffered."""
    assert process.stderr is not None
    too_long = threading.Timer(patient(90), os.killpg, (process.pid, signal.SIGKILL))
    too_long.start()
    try:
        rest = process.stderr.read()
        process.wait()
    finally:
        too_long.cancel()
    return rest


def stop(process: subprocess.Popen[str]) -> str:
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.send_signal(signal.SIGTERM)
    rest = rest_of(process)
    assert process.returncode == 128 + signal.SIGTERM, rest
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()], "ranks were left running"
    assert "Traceback" not in rest
    return rest


def kill_launcher(folder: Path, output: str, *, until_step: int) -> None:
    """End a run's launcher without a word; its ranks write a checkpoint and go."""
    before = set((folder / output / "checkpoints").glob("step-*"))
    with running(folder, output, until_step=until_step) as process:
        ranks = ranks_of(process.pid)
        process.kill()
        until(lambda: not [rank for rank in ranks if Path(f"/proc/{rank}").exists()])
    assert set((folder / output / "checkpoints").glob("step-*")) - before


def weights(folder: Path, output: str) -> dict[str, torch.Tensor]:
    exported = export_run(folder / output, folder / f"{output}-export", overwrite=True)
    return load_file(exported / "model.safetensors")


def assert_near(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert float((tensor - got[name]).abs().max()) <= 1e-5 * float(tensor.abs().max()), name


@pytest.mark.timeout(300)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(folder: Path) -> None:
    whole = start(folder, "whole")  # beside the rest, to save time
    with running(folder, "stopped", until_step=5, before=["nohup"]) as process:
        for pid in (process.pid, *ranks_of(process.pid)):  # as when the terminal is closed
            os.kill(pid, signal.SIGHUP)
        wait_for_step(process, 10)
        output = stop(process)
    assert "asked to stop (SIGTERM)" in output
    assert "saved" in output
    (step,) = sorted((folder / "stopped" / "checkpoints").glob("step-*"))
    assert 10 <= int(step.name.removeprefix("step-")) < STEPS
    subprocess.run(["cp", "-r", folder / "stopped", folder / "moved"], check=True)
    moved = start(folder, "moved", "mesh=tp=2", "data.micro_batch=8")
    kill_launcher(folder, "stopped", until_step=int(step.name.removeprefix("step-")) + 3)
    assert "resuming after step" in run(folder, "stopped")
    finish(whole)
    assert "saved on another mesh" in finish(moved)
    expected, got = weights(folder, "whole"), weights(folder, "stopped")
    assert sorted(expected) == sorted(got)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert [record["step"] for record in metrics(folder / "stopped")] == list(range(1, STEPS + 1))
    assert_near(expected, weights(folder, "moved"))


@pytest.mark.nightly
def test_stages_train_resume_and_export_what_other_meshes_do(folder: Path) -> None:
    few = ["training.steps=6", "checkpoint.every=3", "model.tied=true"]
    staged = [*few, "mesh=pp=2,dp_shard=2", "passes=[PipelineParallel, FullyShard]"]
    run(folder, "sharded", *few)
    run(folder, "stages", *staged)
    run(folder, "again", *staged, "training.steps=3", "schedule.steps=6")
    assert "resuming after step 3" in run(folder, "again", *staged)
    expected, got, again = (weights(folder, output) for output in ("sharded", "stages", "again"))
    assert sorted(expected) == sorted(got)
    assert all(torch.equal(got[name], again[name]) for name in expected)
    assert_near(expected, got)


OWN_TERMINAL = """\
import fcntl, runpy, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("meshpar.launchers", run_name="__main__", alter_sys=True)
"""


def test_a_terminal_that_is_closed_during_validation_stops_the_run_with_a_checkpoint(folder: Path) -> None:
    """A validation of minutes does not hold a stop up, and a terminal that is gone loses lines, not the run."""
    shown = []
    terminal, end = pty.openpty()
    (folder / "own.py").write_text(OWN_TERMINAL)
    long = ["data.validation_fraction=0.9", "data.micro_batch=1"]
    long += ["training.validate_steps=null", "training.validate_every=5"]
    words = [sys.executable, "-m", "tests.support.script", folder / "own.py", *command(folder, "closed", *long)[3:]]
    streams = {"stdin": end, "stdout": end, "stderr": end}
    process = subprocess.Popen(words, start_new_session=True, cwd=Path(__file__).parents[2], **streams)
    os.close(end)

    def at_step_five() -> bool:
        while select.select([terminal], [], [], 0)[0]:
            shown.append(os.read(terminal, 1 << 16).decode())
        assert process.poll() is None, "".join(shown)
        return (folder / "closed" / "metrics.jsonl").exists() and len(metrics(folder / "closed")) == 5

    try:
        until(at_step_five, report=lambda: "".join(shown))
        os.close(terminal)
        assert process.wait(60) == 128 + signal.SIGHUP
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    lines = (folder / "closed" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5 and not any("val/loss" in line for line in lines)
    assert read_manifest(folder / "closed" / "checkpoints" / "step-00000005").extra["owes"] == ["val/"]


@pytest.mark.nightly
def test_an_interrupt_of_one_rank_that_tokenises_is_one_line(folder: Path) -> None:
    (folder / "much.txt").write_text(text() * 500)
    more = ["mesh=", f"data.paths=[{folder / 'much.txt'}]", f"data.cache={folder / 'much'}"]
    process = start(folder, "interrupted", *more)
    try:
        until(lambda: (folder / "much").is_dir() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        output = rest_of(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (process.returncode, output.splitlines()[-1:]) == (130, ["meshpar: interrupted"]), output
    assert "Traceback" not in output
    assert not (folder / "interrupted" / "checkpoints").exists()


def test_the_export_is_the_model_that_was_trained(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not (folder / "whole").is_dir():
        run(folder, "whole")
    exported = export_run(folder / "whole", folder / "for-transformers", max_shard_size="20KB")
    assert len(list(exported.glob("*.safetensors"))) > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    sentence = "def add_1_2():\n    return 1 + 2\n"
    ids = torch.tensor([tokenizer(sentence)["input_ids"]])
    assert ids.tolist()[0] == byte_tokenizer().encode(sentence)
    assert theirs.config.eos_token_id == tokenizer.eos_token_id == byte_tokenizer().eos_id

    from meshpar.launchers.jobs import build
    from meshpar.models import Transformer

    recipe = load_recipe(folder / "whole" / "recipe.yaml")
    shape = build.build_model(recipe, 257).config  # type: ignore[union-attr]
    ours = Transformer(shape).eval()  # type: ignore[arg-type]
    names = {theirs_: ours_ for ours_, theirs_ in _published(shape)}
    ours.load_state_dict({names[name]: tensor for name, tensor in weights(folder, "whole").items()})
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, ours(input_ids=ids).logits, rtol=0, atol=1e-5)
        loss = theirs(input_ids=ids, labels=ids).loss
    assert loss < 5.2, "it has learned nothing"


def _published(shape: object) -> list[tuple[str, str]]:
    from meshpar.models.transformer_config import _published_names

    names = _published_names(shape)  # type: ignore[arg-type]
    return [(ours.replace("*", str(n)), theirs.replace("*", str(n))) for ours, theirs in names for n in range(2)]


def test_a_killed_rank_ends_the_job_with_one_message(folder: Path) -> None:
    with running(folder, "killed", "training.steps=100000", until_step=2) as process:
        ranks = ranks_of(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        rest = rest_of(process)
        assert process.returncode == 1
        assert [line for line in rest.splitlines() if line.startswith("meshpar:")] == [
            "meshpar: rank 1 was ended by SIGKILL; a person or a scheduler does this, or the kernel when memory runs "
            "out"
        ]
        assert "Traceback" not in rest
        assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


@on_ranks(2, fresh="changes handlers of signals")
def test_a_signal_that_one_rank_gets_is_the_reason_of_all() -> None:
    for mine in ({1: signal.SIGUSR1}, {0: signal.SIGINT}, {1: signal.SIGHUP}, {0: signal.SIGINT, 1: signal.SIGUSR1}):
        with StopRequest() as stop:
            assert not stop.agreed()
            if dist.get_rank() in mine:
                os.kill(os.getpid(), mine[dist.get_rank()])
            while not stop.agreed():
                pass
            assert stop.reason == max(mine.values()).name


def small(folder: Path, output: str, *overrides: str) -> Recipe:
    """A recipe of one rank and three steps."""
    common = ["mesh=", f"output={folder / output}", f"data.paths=[{folder / 'text.txt'}]"]
    common += [f"data.cache={folder / 'cache'}", "training.steps=3", "checkpoint.every=2"]
    return load_recipe(folder / "job.yaml", [*common, *overrides])


def train(recipe: Recipe, ranks: int = 1) -> Recipe:
    assert launch(recipe, ranks, quiet=True) == 0
    return recipe


def losses(recipe: Recipe, name: str = "train/loss") -> list[float]:
    return [record[name] for record in records(recipe.folder) if name in record]


def test_text_json_lines_and_tokens_train_alike(folder: Path) -> None:
    documents = text().split("\n\n")
    documents = [document for document in documents if document.strip()]
    (folder / "text.jsonl").write_text("".join(json.dumps({"body": document}) + "\n" for document in documents))
    tokenizer = byte_tokenizer()
    ids = [[*tokenizer.encode(document), tokenizer.eos_id] for document in documents]
    write_tokens(folder / "text.bin", ids, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    tokenizer.save(folder / "bytes")
    sources = {
        "files": ['data.separator="\\n\\n"'],
        "jsonl": [f"data.paths=[{folder / 'text.jsonl'}]", "data.field=body"],
        "tokens": [f"data.paths=[{folder / 'text.bin'}]", f"data.tokenizer={folder / 'bytes'}"],
    }
    found = {}
    for source, overrides in sources.items():
        recipe = train(small(folder, f"from-{source}", f"data.source={source}", "data.micro_batch=8", *overrides))
        found[source] = losses(recipe)
        assert (recipe.folder / "tokenizer" / "tokenizer.json").is_file()
    assert found["files"] == found["jsonl"] == found["tokens"]


def test_a_loss_that_is_not_finite_ends_the_run(folder: Path) -> None:
    with pytest.raises(MeshparError, match="gradient norm of step 2 is not finite"):
        train(small(folder, "diverged", "optimizer.lr=1e30"))
    assert not (folder / "diverged" / "checkpoints").exists()


def test_resume_never_and_resume_from_elsewhere(folder: Path) -> None:
    steps = train(small(folder, "first")).folder / "checkpoints"
    for name, source in (("run", folder / "first"), ("step", steps / "step-00000002"), ("link", steps / "latest")):
        recipe = train(small(folder, name, f"checkpoint.resume={source}", "training.steps=5"))
        assert len(losses(recipe)) == (3 if name == "step" else 2)
    with pytest.raises(MeshparError, match=r"there is no .*nowhere; expected auto, never"):
        train(small(folder, "other", f"checkpoint.resume={folder / 'nowhere'}"))


def test_the_best_step_by_validation_loss_stays(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    often = ["training.steps=6", "training.validate_every=1", "checkpoint={every: 1, keep: 1, best: val/loss}"]
    recipe = train(small(folder, "best", *often, "optimizer.lr=0.3", "training.nonfinite=skip"))
    values = {record["step"]: record["val/loss"] for record in records(recipe.folder) if "val/loss" in record}
    best = min(values, key=lambda step: values[step])
    kept = sorted(int(path.name.removeprefix("step-")) for path in (recipe.folder / "checkpoints").glob("step-*"))
    assert kept == sorted({best, 6})
    listed = CliRunner().invoke(app, ["checkpoints", "ls", str(recipe.folder)]).stdout.splitlines()
    assert [line.split()[0] for line in listed if "best val/loss" in line] == [str(best)]
    assert f"best step: {best}, val/loss {values[best]:.4f}, in " in capfd.readouterr().err


GROWN = {
    "dp_shard=2": ("[FullyShard]", 2), "pp=2": ("[PipelineParallel]", 1), "tp=2": ("[TensorParallel]", 1),
    "dp_replicate=2": ("[Replicate]", 2), "pp=2,dp_shard=2": ("[PipelineParallel, FullyShard]", 2),
}  # fmt: skip


@pytest.mark.parametrize("mesh", daily(GROWN, "dp_shard=2", "pp=2"))
def test_a_growing_batch_and_rates_by_depth_are_those_of_one_process(folder: Path, mesh: str) -> None:
    passes, data_ranks = GROWN[mesh]

    def grown(output: str, ranks: int, *overrides: str, steps: int = 5) -> Recipe:
        made = small(
            folder, output, "data.micro_batch=2", "data.grow={16: 16, 40: 32}", "optimizer.rates={embed: 0.1, layers.*.mlp: 2.0}",
            "optimizer.layer_decay=0.5", f"training.steps={steps}", "schedule.steps=5", "checkpoint.every=1", "checkpoint.keep=null", *overrides,
        )  # fmt: skip
        done = (folder / output / "checkpoints" / f"step-{steps:08}").is_dir()
        return made if done else train(made, ranks)

    def samples(recipe: Recipe) -> list[int]:
        steps = sorted((recipe.folder / "checkpoints").glob("step-*"))
        return [read_manifest(step).extra["data"]["samples"] for step in steps]

    alone = grown("growing", 1, "data.accumulate=4")
    parallel = (f"mesh={mesh!r}", f"passes={passes}", f"data.accumulate={4 // data_ranks}")
    name, ranks = f"growing-{mesh}", math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
    grown(name, ranks, *parallel, steps=3)  # and resumes between two sizes
    divided = grown(name, ranks, *parallel)
    assert samples(divided) == samples(alone) == [8, 16, 32, 48, 80]
    np.testing.assert_allclose(losses(divided), losses(alone), rtol=1e-5)
    expected, got = weights(folder, "growing"), weights(folder, name)
    plain = weights(folder, grown("unrated", 1, "data.accumulate=4", "optimizer={lr: 1e-3, eps: 1e-4}").folder.name)
    assert_near(expected, got)
    assert any(not torch.equal(plain[key], tensor) for key, tensor in expected.items())


def test_averages_are_validated_resumed_on_another_mesh_and_exported(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    average = [
        "averages={ema: {decay: 0.5}, mean: {power: 0, after: 1, device: cpu}}",
        "validation.weights=[ema, trained]",
    ]
    average += ["training.validate_every=2", "optimizer.lr=0.01", "schedule.name=constant"]
    whole = train(small(folder, "ema-whole", *average, "training.steps=4"))
    for steps, ranks, mesh in ((2, 1, ""), (4, 2, "tp=2")):
        part = train(small(folder, "ema-parts", *average, f"training.steps={steps}", f"mesh={mesh!r}"), ranks)
    exports = {}
    for run_, weights_ in (("ema-whole", "ema"), ("ema-parts", "ema"), ("ema-parts", "mean"), ("ema-parts", "trained")):
        exported = export_run(folder / run_, folder / f"{run_}-{weights_}", weights=weights_)
        exports[run_, weights_] = transformers.AutoModelForCausalLM.from_pretrained(exported).state_dict()
    for name, value in exports["ema-whole", "ema"].items():
        torch.testing.assert_close(exports["ema-parts", "ema"][name], value, rtol=0, atol=1e-5)
    first = next(iter(exports["ema-parts", "ema"]))
    assert not torch.equal(exports["ema-parts", "ema"][first], exports["ema-parts", "trained"][first])
    assert not torch.equal(exports["ema-parts", "ema"][first], exports["ema-parts", "mean"][first])
    expected, got = (losses(recipe, "val/loss") for recipe in (whole, part))
    assert len(expected) == 2 and expected == pytest.approx(got, abs=1e-5)
    plain = losses(part, "val/trained/loss")
    assert len(plain) == 2 and plain == pytest.approx(losses(whole, "val/trained/loss"), abs=1e-5)
    assert plain != pytest.approx(expected, abs=1e-3), "of other weights"
    alone = train(small(folder, "ema-alone", *average, "training.steps=4", "validation.weights=trained"))
    assert losses(alone, "val/loss") == pytest.approx(plain, abs=1e-5)
    with pytest.raises(CheckpointError, match="step 4: there is no average 'averaged': there are ema, mean; name one"):
        export_run(folder / "ema-parts", folder / "none", weights="averaged")
    with pytest.raises(RecipeError, match=r"validation\.weights: there is no average 'averaged'"):
        small(folder, "none", "averages={}", "validation.weights=averaged")


def test_weights_of_an_export_are_a_beginning(folder: Path) -> None:
    if not (folder / "first").is_dir():
        pytest.skip("needs the run of another test")
    export_run(folder / "first", folder / "first-export", overwrite=True)
    config = f"model={{kind: huggingface, config: {folder / 'first-export'}, weights: {folder / 'first-export'}}}"
    train(small(folder, "tuned", config, "optimizer.lr=1e-9"))
    expected, got = weights(folder, "first"), weights(folder, "tuned")
    assert sorted(expected) == sorted(got)
    assert all(float((expected[name] - got[name]).abs().max()) < 1e-5 for name in expected)


def test_an_imported_model_is_a_beginning_in_the_runs_folder_and_elsewhere(folder: Path) -> None:
    train(small(folder, "source"))
    expected = weights(folder, "source")

    def imported(to: str, *options: str) -> None:
        words = ["import", str(folder / "source-export"), str(folder / to / "checkpoints"), "--dtype", "bfloat16"]
        done = CliRunner().invoke(app, [*words, *options])
        assert done.exit_code == 0, done.output

    imported("own")
    imported("imported", "--step", "7")
    for name, resume in (("own", "auto"), ("elsewhere", folder / "imported")):
        recipe = train(small(folder, name, f"checkpoint.resume={resume}", "optimizer.lr=1e-9"))
        assert len(losses(recipe)) == 3, "from step 0"
        got = weights(folder, name)
        assert all(float((got[name] - expected[name].bfloat16().float()).abs().max()) < 1e-6 for name in expected)


TWO = """\
from meshpar.launchers.jobs.job import run_job
from meshpar.launchers.recipes.loading import load_recipe

for number in (1, 2):
    wanted = ["data.paths=[text.txt]", f"output=two-{number}", "training.steps=2", "preflight=warn"]
    assert run_job(load_recipe("job.yaml", wanted)).steps == 2
"""


@pytest.mark.long
def test_two_jobs_run_one_after_another_in_the_ranks_of_one_torchrun(folder: Path) -> None:
    (folder / "two.py").write_text(TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "two.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / "two-2" / "checkpoints" / "step-00000002").is_dir()


def by_command(*overrides: str) -> Any:
    """Train one rank by the command in this folder, on a.txt and b.txt."""
    Path("job.yaml").write_text(RECIPE)
    for name in ("a.txt", "b.txt"):
        if not Path(name).exists():
            Path(name).write_text(text(200))
    wanted = ["data.paths=[a.txt, b.txt]", "mesh=''", "passes=[]", *overrides]
    return CliRunner().invoke(app, ["train", "job.yaml", "--quiet", *wanted])


def test_a_resume_with_other_data_or_another_batch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert by_command("training.steps=2").exit_code == 0
    kept = Path("runs/job/recipe.yaml").read_bytes()
    assert by_command("training.steps=2", "training.log_every=2").exit_code == 0
    assert Path("runs/job/recipe.yaml").read_bytes() == kept, "a complete run keeps the recipe that made it"
    assert "WARNING" not in by_command("training.steps=3", "data.micro_batch=2", "data.accumulate=4").stderr
    done = by_command("training.steps=4", "data.micro_batch=2")
    assert "WARNING: a step had 8 samples before and has 4 from now on, on 1 data ranks" in done.stderr
    kept = "to keep it, set data.micro_batch=2 data.accumulate=4; the 1 steps that are left of training.steps have 4"
    assert kept in done.stderr
    with Path("b.txt").open("a") as file:  # which is trained on, as a.txt is for validation
        file.write("more\n")
    other = by_command("training.steps=5")
    assert other.exit_code == 78
    assert re.search(r"data: the checkpoint .* other data: b.txt has changed \(it had [\d,]+ bytes", other.stderr)


def test_an_epoch_that_began_on_one_rank_ends_on_two(folder: Path) -> None:
    """Each sample has the learning rate that it has in a run without a stop."""
    epoch = ["mesh=''", "passes=[]", "training.steps=null", "training.epochs=1", "data.micro_batch=8"]
    epoch += ["schedule.warmup_steps=60"]
    with running(folder, "grown", *epoch, until_step=20) as process:
        process.send_signal(signal.SIGTERM)
        rest = rest_of(process)
        assert process.returncode == 128 + signal.SIGTERM, rest
    begun = len(metrics(folder / "grown"))
    assert [record["step"] for record in metrics(folder / "grown")] == list(range(1, begun + 1)) and begun < 60
    grown = run(folder, "grown", *epoch, "mesh=dp_shard=2", "passes=null")
    left = len(metrics(folder / "grown")) - begun
    size = int(re.findall(r"cosine over (\d+) steps of 16 samples", grown)[0])
    assert left == math.ceil((size - begun) / 2)
    assert "WARNING: a step had 16 samples before and has 32 from now on, on 2 data ranks; to keep it, set" in grown
    assert "data.micro_batch=8 data" in grown
    assert f"; {left} steps are left instead of {size - begun}, and the learning rate follows the samples" in grown
    assert f"step {begun + left}/{begun + left}  loss" in grown
    schedule = Schedule(lr=1e-3, warmup_steps=60).over(size)
    places = [*range(begun), *(begun + 2 * step for step in range(left))]
    assert [record["lr"] for record in metrics(folder / "grown")] == [schedule.rate(at) for at in places]
    done = CliRunner().invoke(app, command(folder, "grown", *epoch)[3:])
    assert (done.exit_code, metrics(folder / "grown")[begun + left :]) == (0, [])
    assert f"all 1 epochs are done already, after step {begun + left}; raise training.epochs to continue" in done.stderr
    assert "resuming" not in done.stderr


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def metrics(output: Path) -> list[dict[str, Any]]:
    """Return the records of steps."""
    return [record for record in records(output) if "train/loss" in record]


def test_a_run_of_joined_documents_goes_on_with_separate_ones_only_if_told(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert by_command("training.steps=2", "data.documents=joined").exit_code == 0
    refused = by_command("training.steps=3")
    assert refused.exit_code == 78
    assert "data.documents was 'joined' and is 'separate'; restore the files and settings" in refused.stderr
    assert "set checkpoint.allow: [data.documents]" in refused.stderr
    done = by_command("training.steps=3", "checkpoint.allow=[data.documents]")
    assert done.exit_code == 0, done.stderr
    assert by_command("training.steps=4").exit_code == 0, "from here on the run's documents are separate"
    with Path("a.txt").open("a") as file:
        file.write("more\n")
    allowed = ["data.documents=joined", "checkpoint.allow=[data.documents]"]
    assert "a.txt has changed" in by_command("training.steps=5", *allowed).stderr


def test_a_mixture_with_conversations_trains_resumes_and_reports_each_source(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": said, "n": place}) + "\n" for place in range(60)))
    Path("text.txt").write_text(text(400))
    Path("job.yaml").write_text(
        RECIPE.partition("data:")[0]
        + "data:\n  sequence_length: 32\n  micro_batch: 2\n  cache: cache\n  tokenizer: bpe\n  vocab_size: 260\n  "
        "packing: best_fit\n  validation_fraction: 0.1\n  mix:\n"
        + "    - {name: prose, source: files, paths: [text.txt], weight: 0.7}\n"
        + "    - {name: talk, source: chat, paths: [chat.jsonl], template: chatml, weight: 0.3, epochs: 2}\n"
        + "training: {steps: 6, log_every: 1, validate_every: 3, tensorboard: false}\n"
    )

    def mixed(*overrides: str, mesh: str = "dp_shard=2") -> Recipe:
        recipe = load_recipe("job.yaml", [f"mesh='{mesh}'", "passes=auto", *overrides])
        return train(recipe, 2 if mesh else 1)

    whole = mixed("output=whole", "checkpoint.every=3")
    mixed("output=parts", "training.steps=3", "schedule.steps=6")
    parts = mixed("output=parts", "data.micro_batch=4", mesh="")
    for name in ("train/loss/prose", "train/loss/talk", "val/loss/prose", "val/loss/talk"):
        have, want = (losses(recipe, name) for recipe in (parts, whole))
        assert want and have == pytest.approx(want, rel=1e-4), name
