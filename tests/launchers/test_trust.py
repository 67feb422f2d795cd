"""Recipes, launch files and configs are data: a command that only looks imports and calls nothing they name."""

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from meshpar import CheckpointError, LayoutError, Plan, RecipeError, distributed
from meshpar.checkpoints import CheckpointManager
from meshpar.checkpoints.storage.place import Place, place
from meshpar.core.errors import MeshparError
from meshpar.forecasting.hardware import Hardware, profiles
from meshpar.launchers import export_run, load_recipe
from meshpar.launchers.cli import app
from meshpar.launchers.commands import publishing
from meshpar.launchers.export import beside
from meshpar.launchers.recipes.yamlfile import apply_overrides, parse_document, to_yaml
from meshpar.models import Transformer, TransformerConfig
from meshpar.models.huggingface import from_config
from meshpar.training.text import TextSource

EVIL = "from pathlib import Path\nPath({}).touch()\n"
BASE = """\
device: cpu
model: {dim: 16, layers: 1, heads: 2, hidden: 16, max_positions: 32}
data: {source: stdlib, sequence_length: 16, micro_batch: 2, cache: cache}
optimizer: {lr: 1e-3}
training: {steps: 5}
"""
SHAPE = "{dim: 16, layers: 1, heads: 2, hidden: 16, weights: teacher}"
FIELDS = {
    "pass": ["passes=[NAME]"],
    "pass with options": ["passes=[NAME: {args: [touch, owned]}]"],
    "pass of a teacher": [
        "training.objective=distillation",
        f"teacher={{model: {SHAPE}, passes: [NAME: {{args: [touch, owned]}}]}}",
    ],
    "model": ["model={class: NAME, args: [touch, owned]}"],
    "teacher": [
        "training.objective=distillation",
        "teacher={model: {class: NAME, args: [touch, owned], weights: teacher}}",
    ],
    "optimizer": ["optimizer={class: NAME, lr: 1, args: [touch, owned]}"],
    "dataset": ["data={dataset: {class: NAME, args: [touch, owned]}}"],
    "validation dataset": [
        "data={dataset: {class: NAME, args: [touch, owned]}, validation_dataset: {class: NAME, args: [touch, owned]}}"
    ],
    "objective": ["training.objective=NAME", "training.objective_options={args: [touch, owned]}"],
    "tracker": ["trackers={NAME: {args: [touch, owned]}}"],
    "evaluation": ["evaluations={NAME: {args: [touch, owned]}}", "training.validate_every=5"],
}
"""Every field that may name a class, with NAME for the class."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module that leaves a file when it is imported; nothing in it is imported, and no path added."""
    for name in ("evil.py", "configuration_evil.py"):
        (tmp_path / name).write_text(EVIL.format(repr(str(tmp_path / "owned"))))
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    assert not (tmp_path / "owned").exists() and not {"evil", "this"} & {*sys.modules} and sys.path == path


def recipe(name: str, *changes: str) -> Path:
    """Write a recipe whose changed fields name a class."""
    document = parse_document(BASE, "job.yaml")
    apply_overrides(document, [change.replace("NAME", name) for change in changes])
    Path("job.yaml").write_text(to_yaml(document.data))
    return Path("job.yaml")


def run(*arguments: str | Path, answer: str = "") -> Result:
    return CliRunner().invoke(app, [str(word) for word in arguments], input=answer)


def write_weights(name: str, config: dict[str, Any]) -> None:
    """Write a file of a folder of weights, which has a tokenizer's file."""
    Path("weights").mkdir(exist_ok=True)
    Path("weights/tokenizer.json").touch()
    Path(f"weights/{name}.json").write_text(json.dumps(config))


def needs_trust(done: Result, name: str) -> bool:
    return done.exit_code == 78 and name in done.stderr and "add --trust" in done.stderr


@pytest.mark.parametrize("field", FIELDS)
def test_a_command_that_only_looks_imports_nothing_that_a_recipe_names(folder: Path, field: str) -> None:
    recipe("evil.Thing", *FIELDS[field])
    checked = run("check", "job.yaml")
    assert checked.exit_code == 0 and "job.yaml: no problem found without its own classes" in checked.stdout, checked
    assert "evil.Thing" in checked.stdout and f"the code in {folder}, add --trust" in checked.stdout
    converted = run("convert", "job.yaml")
    assert converted.exit_code == 0 and "evil.Thing" in converted.stdout and f"code: {folder}" in converted.stdout
    described = run("describe", "job.yaml")
    assert described.exit_code in (0, 78) and "Traceback" not in described.output
    if "teacher" not in field and field not in ("optimizer", "tracker", "evaluation", "dataset", "validation dataset"):
        assert needs_trust(described, "evil.Thing") and "job.yaml:" in described.stderr
    if field not in ("tracker", "evaluation", "teacher", "pass of a teacher"):
        assert needs_trust(run("plan", "job.yaml"), "evil.Thing")


def test_a_forecast_makes_no_tracker_and_no_evaluation(folder: Path) -> None:
    recipe("evil.Thing", *FIELDS["tracker"], *FIELDS["evaluation"])
    assert run("plan", "job.yaml", "mesh=dp_shard=2").exit_code == 0


@pytest.mark.parametrize("name", ["subprocess.Popen", "os.system", "os.environ"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_job_calls_no_class_of_another_kind(folder, monkeypatch, field, name) -> None:
    monkeypatch.setattr("meshpar.launchers.recipes.loading.make_importable", lambda folder: None)
    what = {"Popen": "a class", "system": "a builtin_function_or_method", "environ": "a _Environ"}[name.split(".")[1]]
    with pytest.raises(RecipeError, match=rf": {name} is {what}; expected a (sub)?class"):
        load_recipe(recipe(name, *FIELDS[field]), trust=True)


def saved(run: Place, text: str) -> Place:
    """Save a step of a run, with a recipe beside it as somebody else may have written it."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=64, dim=16, layers=1, heads=2, hidden=16, max_positions=32))
    with distributed("cpu"), CheckpointManager(run / "checkpoints") as manager:
        par = Plan("", []).apply(model).materialize(seed=0)
        step = manager.save(1, par, torch.optim.AdamW(par.module.parameters()))
    (run / "recipe.yaml").write_durably(text.encode())
    return step


EVERY = [change for name, changes in FIELDS.items() if name not in ("pass", "dataset") for change in changes]


@pytest.mark.parametrize("name", ["evil.Thing", "subprocess.Popen"])
def test_the_recipe_of_a_run_is_read_as_data_by_an_export(folder: Path, name: str) -> None:
    text = recipe(name, *EVERY).read_text()
    step = saved(place(folder / "run"), text + "lora: {rank: 4}\n")
    assert beside(step).config["model_type"] == "llama"
    for more in ([], ["--push", "me/model", "--dry-run"]):
        done = run("export", "run", f"out{len(more)}", *more)
        assert done.exit_code == 0 and Path(f"out{len(more)}", "model.safetensors").is_file(), done.output
    assert "not a run that trained adapters" in run("export", "run", "alone", "--adapters").stderr
    for command in (["ls", "run"], ["show", "run"], ["verify", "run"], ["diff", "run", "run"], ["pin", "run"]):
        assert run("checkpoints", *command).exit_code == 0
    Path("run/recipe.yaml").write_text("model: {weights: old}\nlora: {rank: many}\n")
    with pytest.raises(CheckpointError, match=r"recipe.yaml:\d+: lora.rank: expected an integer"):
        beside(step)


@pytest.mark.nightly
def test_the_recipe_of_a_run_in_a_store_is_read_as_data_by_an_export(folder: Path, bucket: str) -> None:
    for name in ("evil.Thing", "subprocess.Popen"):
        saved(place(f"{bucket}/{name}"), recipe(name, *EVERY).read_text())
        export_run(f"{bucket}/{name}", folder / name)
        assert (folder / name / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "this.c"}, "no plugin 'this.c' in meshpar.launchers"),
        ({"target": "evil.Thing"}, "no plugin 'evil.Thing' in meshpar.launchers"),
        ({"target": ["slurm"]}, "cannot read"),
        ({"file": "../job.yaml"}, "got '../job.yaml', expected the name of a file in the same folder"),
        ({"file": "/etc/passwd"}, "got '/etc/passwd', expected the name of a file in the same folder"),
        ({"options": [3]}, "cannot read"),
        ({"options": ["context=evil"]}, "kubernetes has no such option"),
    ],
)
def test_a_launch_file_names_a_registered_target_and_a_file_beside_it(folder, monkeypatch, changes, message) -> None:
    launch = folder / "runs" / "job" / "launches" / "001"
    launch.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "kubectl").write_text('#!/bin/sh\ntouch "$0.owned"\n')
    (folder / "bin" / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    note = {"target": "kubernetes", "options": [], "file": "job.yaml", "label": "job-001", "submitted": "job-001"}
    (launch / "launch.json").write_text(json.dumps({**note, **changes}))
    for command in (["ls"], ["status", launch], ["logs", launch], ["cancel", launch]):
        done = run("jobs", *command)
        assert done.exit_code == 1 and message in done.stderr and "Traceback" not in done.output, done
    assert not list((folder / "bin").glob("*.owned"))


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(5)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"job.yaml is not YAML: aliases \(\*name\) are not read; write the value out"),
        ("a: " + "[" * 3000, "job.yaml is not YAML: more than 32 levels"),
        ("a: [" + "1," * 20_000 + "]", "job.yaml is not YAML: more than 10,000 values"),
        ("# a line\n" * 40_000, "job.yaml is no recipe: it has more than 262,144 characters"),
        ("a: " + "9" * 5000, "job.yaml is not YAML: Exceeds the limit"),
        ("a: !!timestamp 2020-99-99", "job.yaml is not YAML: month must be in 1..12"),
        ("a: \x00", "job.yaml is not YAML: unacceptable character"),
    ],
    ids=["aliases", "levels", "values", "characters", "digits", "date", "control"],
)
def test_the_work_of_reading_a_recipe_is_bounded(folder: Path, text: str, message: str) -> None:
    Path("job.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe("job.yaml")


def test_other_files_name_no_files_elsewhere_and_hold_no_aliases(folder: Path) -> None:
    Path("state.json").write_text(json.dumps({"_data_files": [{"filename": "../elsewhere.arrow"}]}))
    with pytest.raises(RecipeError, match=r"state.json names a file outside of its folder: '../elsewhere.arrow'"):
        TextSource(inputs=(str(folder),)).files()
    for text, message in ((BOMB, "has aliases"), ("[" * 3000, "has more than 4 levels"), ("a: [", "is not YAML")):
        Path("profile.yaml").write_text(text)
        with pytest.raises(MeshparError, match=f"hardware profile profile.yaml {message}"):
            Hardware.load("profile.yaml")


def test_a_file_without_its_aliases_is_read(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"aliases \(\*name\) are not read; write the value out"):
        parse_document("a: &x 1\nb: *x", "job.yaml")
    assert parse_document("a: 1\nb: 1", "job.yaml").data == {"a": 1, "b": 1}
    known = (profiles()["h100"]).read_text()
    Path("profile.yaml").write_text(f"{known}\nname: &speed fast\nsources: *speed\n")
    with pytest.raises(MeshparError, match=r"has aliases \(\*name\); write the values out"):
        Hardware.load("profile.yaml")
    Path("profile.yaml").write_text(Path("profile.yaml").read_text().replace("*speed", "speed"))
    assert Hardware.load("profile.yaml").sources == "speed"


def test_no_config_of_transformers_brings_code(folder: Path) -> None:
    own = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "configuration_evil.Evil"}
    write_weights("config", {"model_type": "evil", "auto_map": own})
    (folder / "configuration_evil.py").rename(folder / "weights" / "configuration_evil.py")
    for command in (["check"], ["check", "--trust"], ["describe"], ["plan"]):
        recipe("", "model={kind: huggingface, config: weights}")
        done = run(*command, "job.yaml", answer="y\n")
        assert done.exit_code == 78 and "contains custom code" in done.stderr, done
    done = run("generate", "weights", "text", answer="y\n")
    assert done.exit_code and "contains custom code" in done.stderr
    write_weights("config", {"model_type": "llama"})
    adapters = {"base_model_name_or_path": ".", "megatron_config": {"a": 1}, "megatron_core": "evil"}
    said = "names a module to import (megatron_core); remove megatron_config"
    write_weights("adapter_config", adapters)
    assert said in run("generate", "weights", "text").stderr
    (folder / "weights" / "config.json").unlink()
    assert said in run("generate", "weights", "text").stderr
    del adapters["megatron_config"]
    write_weights("adapter_config", adapters)
    assert said not in run("generate", "weights", "text").stderr


def test_generate_asks_no_other_host_for_the_weights_below_adapters(folder, monkeypatch) -> None:
    asked = []

    def connect(self: socket.socket, address: Any) -> None:
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address) or [])
    adapters = {"base_model_name_or_path": "evil-owner/evil-name", "peft_type": "LORA"}
    write_weights("adapter_config", adapters)
    done = run("generate", "weights", "text")
    said = "names weights that are no folder here, and nothing is downloaded: "
    assert done.exit_code and f"{said}'evil-owner/evil-name'; write their folder into base_model" in done.stderr, done
    adapters["base_model_name_or_path"] = str(folder)
    write_weights("adapter_config", adapters)
    assert said not in run("generate", "weights", "text").stderr and not asked


@pytest.mark.parametrize("name", ["hub/kernel", "flash_attention_2", "paged|flash_attention_3"])
def test_no_config_of_transformers_loads_a_kernel_that_is_not_installed(folder: Path, name: str) -> None:
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = {"model_type": "llama", "attn_implementation": name, **shape}
    recipe("", f"model={{kind: huggingface, config: {json.dumps(config)}}}")
    for command in ("check", "describe", "plan"):
        assert needs_trust(run(command, "job.yaml"), name)
    assert "loads no code" not in run("check", "--trust", "job.yaml").stderr
    write_weights("config", config)
    said = f"has attn_implementation {name!r}, expected eager, sdpa"
    assert said in run("generate", "weights", "text").stderr
    for load in (from_config, lambda source: publishing._load(source, source)):
        with pytest.raises(LayoutError, match=re.escape(said)):
            load(folder / "weights")
    with pytest.raises(LayoutError, match=re.escape(said)):
        from_config({"model_type": "gemma3", "attn_implementation": {"text_config": name}})
    for own in ("eager", "sdpa", "flex_attention"):
        from_config({**config, "attn_implementation": own})


@pytest.mark.parametrize(
    "model",
    [
        "{kind: gpt2, n_layer: 50000000}",
        "{layers: 50000000}",
        "{kind: huggingface, config: {model_type: llama, num_hidden_layers: 50000000}}",
        "{kind: huggingface, config: weights}",
    ],
)
def test_a_model_of_endless_layers_is_refused_before_it_is_built(folder: Path, model: str) -> None:
    write_weights("config", {"model_type": "gemma3", "text_config": {"num_hidden_layers": 50_000_000}})
    recipe("", f"model={model}")
    for command in ("check", "describe", "plan"):
        done = run(command, "job.yaml")
        assert done.exit_code == 78 and "is 50000000, expected at most 10,000" in done.stderr, done


def test_a_model_of_sizes_that_no_tensor_has_is_refused(folder: Path) -> None:
    recipe("", "model={dim: 2147483648}")
    done = run("check", "job.yaml")
    assert done.exit_code == 78 and "dim is 2147483648, expected at most 134,217,728" in done.stderr, done


def test_a_key_of_a_recipe_reaches_no_terminal_as_a_command(folder: Path) -> None:
    Path("job.yaml").write_text(BASE + '"a\\e[2Jb": 1\n')
    done = run("check", "job.yaml")
    assert done.exit_code == 78 and r"a\x1b[2Jb" in done.stderr and "\x1b" not in done.output, done
