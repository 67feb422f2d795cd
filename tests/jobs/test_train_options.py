"""Around a run: the largest micro-batch, the forecast beside the first steps, the objective's options."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshpar import LaunchError, MeshparError, RecipeError
from meshpar.core import registry
from meshpar.core.errors import FullMemoryError
from meshpar.launchers.commands.train import find_batch_size
from meshpar.launchers.jobs import checks, reports
from meshpar.launchers.jobs.build import make_objective
from meshpar.launchers.jobs.job import Saver
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.launchers.recipes.recipe import Recipe
from tests.support.patience import patient, until


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    return load_recipe("quickstart", [f"output={tmp_path}", "data.micro_batch=6", "data.accumulate=4", *overrides])


def machine(gib_a_sample: float, limit: float = float("inf")) -> Any:
    """A run that needs memory by its micro-batch, and dies where that is more than ``limit`` GiB."""
    tried = []

    def run(recipe: Recipe) -> int:
        size = recipe.data.micro_batch
        tried.append(size)
        assert recipe.data.accumulate == 1 and recipe.training.steps == 3 and recipe.checkpoint.best is None
        if size * gib_a_sample > limit:
            raise FullMemoryError("rank 0 failed with OutOfMemoryError: CUDA out of memory")
        recipe.folder.mkdir(exist_ok=True)
        (recipe.folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "memory_gib": size * gib_a_sample}) + "\n")
        return 0

    return run, tried


def test_the_largest_micro_batch_keeps_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, tried = machine(1.0)
    found = find_batch_size(recipe(tmp_path), run, 9 << 30)
    assert (found.data.micro_batch, found.data.accumulate) == (8, 3)
    assert len(tried) <= 4 and 8 in tried
    output = capsys.readouterr().err
    assert "12: 12.00 GiB a rank, too much" in output
    assert "found: data.micro_batch=8 data.accumulate=3, 24 samples per data rank and step, as before" in output
    assert found.training == recipe(tmp_path).training


def test_micro_batches_of_one_and_of_all_are_tried(tmp_path: Path) -> None:
    for gib_a_sample, fits in ((1.0, 1), (0.01, 24)):
        run, _ = machine(gib_a_sample)
        found = find_batch_size(recipe(tmp_path), run, int(1.5 * 2**30))
        assert (found.data.micro_batch, found.data.accumulate) == (fits, 24 // fits)


def test_an_accelerator_is_tried_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshpar.launchers.jobs.build.device_type", lambda recipe: "cuda")
    run, _ = machine(1.0, limit=5.0)
    assert find_batch_size(recipe(tmp_path), run, None).data.micro_batch == 4


def test_where_nothing_fits_or_nothing_is_said(tmp_path: Path) -> None:
    run, _ = machine(3.0)
    with pytest.raises(RecipeError, match="on a CPU needs --memory 4GiB"):
        find_batch_size(recipe(tmp_path), run, None)

    def broken(recipe: Recipe) -> int:
        raise LaunchError("rank 0 failed with KeyError: 'x'")

    with pytest.raises(LaunchError, match="KeyError"):
        find_batch_size(recipe(tmp_path), broken, 1 << 30)
    tried: list[Recipe] = []
    with pytest.raises(SystemExit, match="143"):  # a trial that a signal stopped is the last one
        find_batch_size(recipe(tmp_path), lambda candidate: tried.append(candidate) or 143, 1 << 30)
    assert len(tried) == 1


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def report(self, record: Any) -> None: ...
    def close(self, ended: str) -> None: ...


RECORD = {"step": 1, "tokens_per_second": 1000.0, "memory_gib": 2.0}


def wait_for_forecast(seconds: float) -> None:
    """Wait until the reporter's own thread is done."""
    until(lambda: not any(thread.is_alive() and thread.name == "forecast" for thread in threading.enumerate()), seconds)


def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forecast: Any, records: int = 4) -> list[str]:
    monkeypatch.setattr("meshpar.launchers.jobs.build.forecast", forecast)
    console = Notes()
    reporter = reports.ForecastFeedback(recipe(tmp_path), "h100", console)
    wait_for_forecast(60)
    for _ in range(records):
        reporter.report(RECORD)
    reporter.close()
    return console.notes


def test_a_profile_named_in_the_recipe_makes_a_real_forecast_on_a_cpu(tmp_path: Path) -> None:
    console = Notes()
    named = recipe(tmp_path, "mesh=dp_shard=1", "training.forecast=h100")
    (reporter,) = reports.forecast_feedback(named, torch.device("cpu"), console)
    wait_for_forecast(150)
    for _ in range(4):
        reporter.report(RECORD)
    assert len(console.notes) == 2, console.notes
    line, warning = console.notes  # bytes of the process are no tensors' bytes: time alone is compared
    assert line.startswith("forecast: step: forecast ") and " ms, measured " in line
    assert warning.startswith("warning: a step takes ") and "forecast for h100" in warning


def made(seconds: float, peak_gib: float) -> Any:
    peak = int(peak_gib * 2**30)
    parts = {"trace": {"data_size": 2}, "batch": {"tokens": 500}, "hardware": {"name": "h100"}}
    parts |= {"cost": {"seconds": seconds}, "memory": {"peak": peak}}
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in parts.items()})


def test_forecast_and_fact_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = reported(tmp_path, monkeypatch, lambda *_, **__: made(1.0, 2.0))
    assert notes == [
        "forecast: step: forecast 1,000.0 ms, measured 1,000.0 ms (+0.0%)",
        "forecast: peak memory: forecast 2.00 GiB, measured 2.00 GiB (+0.0%)",
    ]


def test_where_they_part_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = reported(tmp_path, monkeypatch, lambda *_, **__: made(0.25, 1.0))
    assert [note.split(":")[0] for note in notes] == ["forecast", "forecast", "warning", "warning"]


def test_a_forecast_that_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MeshparError("no such model\nmore")

    assert reported(tmp_path, monkeypatch, fails) == ["no forecast to compare with: no such model more"]
    assert reported(tmp_path, monkeypatch, fails, records=2) == []  # the first steps are not warm


def test_a_cpu_and_other_objectives_are_not_forecast(tmp_path: Path) -> None:
    assert reports.forecast_feedback(recipe(tmp_path), torch.device("cpu"), Notes()) == []


def test_profiles_are_found_by_the_devices_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert reports.profile_of(torch.device("cuda", 0)) == "h200"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    assert reports.profile_of(torch.device("cuda", 0)) is None
    off = recipe(tmp_path, "training.forecast=false")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert reports.forecast_feedback(off, torch.device("cuda", 0), Notes()) == []


def test_options_of_an_objective_are_checked() -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe("qwen3_moe_distillation", ["training.objective_options={temprature: 2, weight: high}"])
    assert "temprature: unknown key; nearest: temperature" in str(raised.value)
    assert "weight: expected a number, got 'high'" in str(raised.value)
    with pytest.raises(RecipeError, match=r"training\.objective_options\.temperature: must be greater than 0, got 0"):
        load_recipe("qwen3_moe_distillation", ["training.objective_options={temperature: 0}"])
    with pytest.raises(RecipeError, match=r"training\.objective_options\.x: unknown key"):
        load_recipe("quickstart", ["training.objective_options={x: 1}"])
    with pytest.raises(RecipeError, match="causal_lm uses no teacher"):
        load_recipe("quickstart", ["teacher={model: {dim: 32, heads: 2}}"])
    assert make_objective(registry.plugin(registry.OBJECTIVES, "seq2seq"), {}).examples == "pairs"


def test_a_model_must_suit_its_objective(tmp_path: Path) -> None:

    wrong = recipe(tmp_path, "training.objective=seq2seq")
    assert any("for the objective seq2seq write kind: huggingface" in line for line in checks.check_job(wrong, 2))
    with pytest.raises(RecipeError, match="the objective seq2seq learns from stdlib, jsonl, csv or parquet"):
        recipe(tmp_path, "training.objective=seq2seq", "data.source=files", "data.paths=[a.txt]")
    pytest.importorskip("transformers")
    strange = recipe(tmp_path, "training.objective=seq2seq", "model={kind: huggingface, config: {model_type: qwen3}}")
    assert any("transformers has no seq2seq_lm for model_type 'qwen3'" in line for line in checks.check_job(strange, 2))


def test_a_pretrained_encoder_gets_a_new_head(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import meshpar
    from meshpar import Plan
    from meshpar.launchers.jobs.models import with_weights

    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "pretrained")
    source = transformers.BertForMaskedLM.from_pretrained(tmp_path / "pretrained").state_dict()
    new = ("classifier.*", "bert.pooler.dense.*")
    section = SimpleNamespace(weights=tmp_path / "pretrained", new=new, ignore=("cls",))
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config)
    with meshpar.distributed("cpu"):
        with pytest.raises(MeshparError, match=r"unexpected: cls\.predictions"):
            with_weights(Plan().apply(model), SimpleNamespace(weights=tmp_path / "pretrained", new=new, ignore=()), 0)
        with torch.device("meta"):
            model = transformers.BertForSequenceClassification(config)
        par = with_weights(Plan().apply(model), section, 0)
        with torch.device("meta"):
            other = transformers.BertForSequenceClassification(config)
        with pytest.raises(RecipeError, match=r"model.new: 'clasifier.\*' matches no parameter"):
            misspelt = SimpleNamespace(weights=tmp_path / "pretrained", new=("clasifier.*",), ignore=())
            with_weights(Plan().apply(other), misspelt, 0)
    held = par.module.state_dict()
    read = [name for name in held if not name.startswith(("classifier", "bert.pooler"))]
    assert all(torch.equal(held[name], source[name]) for name in read)
    assert float(held["classifier.weight"].std()) == pytest.approx(0.02, rel=0.5) and not held["classifier.bias"].any()


def test_a_node_that_fails_stops_the_others() -> None:
    import subprocess
    import sys

    from meshpar.launchers.agent import replicas

    waiting = "import time; time.sleep(60)"
    running = [subprocess.Popen([sys.executable, "-c", code]) for code in ("raise SystemExit(3)", waiting)]
    start = time.monotonic()
    assert replicas.await_all(running) == [3, -15]
    assert time.monotonic() - start < patient(30)


def test_a_step_without_the_metric_of_the_best_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Manager:
        def save(self, *args: object, **more: object) -> None:
            assert args[-1] == {"val/loss": 1.0}

    manager: Any = Manager()
    for best, owes in (("val/loss", []), ("+val/los", ["val/"]), ("+val/los", [])):
        extra = {"owes": owes, "metrics": {"val/loss": 1.0, "val/other": float("nan")}}
        Saver(manager, None, best).save(4, None, None, extra)  # type: ignore[arg-type]
    (warning,) = caplog.records
    assert warning.getMessage() == "checkpoint.best: step 4 has no val/los and cannot be it; it has val/loss"
