"""Classes of the user's own in a recipe are checked, described, forecast and trained as meshpar's own."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshpar.launchers.cli import app
from meshpar.launchers.recipes.loading import load_recipe

CODE = '''
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, dim: int, vocab_size: int, layers: int = 2, rate: float = 0.5, kind: "Missing" = None):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(layers))
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.head(x))

class Counting(torch.utils.data.Dataset):
    vocab_size = 100

    def __init__(self, size: int, sequence_length: int):
        self.size, self.length = size, sequence_length

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        ids = (torch.arange(self.length + 1) + index) % self.vocab_size
        return {"input_ids": ids[:-1], "labels": ids[1:]}

class NoLabels(Counting):
    def __getitem__(self, index):
        return {"input_ids": torch.arange(4)}

class Signs(torch.optim.Optimizer):
    """Sign descent with one moment."""

    def __init__(self, params, lr: float, weight_decay: float = 0.0, momentum: float = 0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p)
                state["moment"].lerp_(p.grad, 1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(state["moment"].sign(), alpha=-group["lr"])

class ByNorm(torch.optim.SGD):
    """Divides each step by the norm of all gradients here."""

    def __init__(self, params, lr: float, weight_decay: float = 0.0):
        super().__init__(params, lr=lr, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = sum(p.grad.norm() for p in held)
        for p in held:
            p.sub_(p.grad * self.param_groups[0]["lr"] / size)

@dataclass
class Halved:
    factor: float = 0.5

    def tokens(self, batch):
        return int((batch["labels"] >= 0).sum())

    def loss(self, model, batch):
        logits = model(batch["input_ids"]).logits.flatten(0, 1)
        loss = nn.functional.cross_entropy(logits.float(), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
        return self.factor * loss, (batch["labels"] >= 0).sum(), {}

def number(dim: int):
    return dim

class Strict(Model):
    def __init__(self, dim: int, vocab_size: int):
        raise KeyError("no such table")
'''
RECIPE = """\
device: cpu
model:
  class: my_parts.Model
  dim: 32
data:
  dataset: {class: my_parts.Counting, size: 90}
  sequence_length: 16
  micro_batch: 4
  validation_fraction: 0.1
optimizer:
  class: my_parts.Signs
  lr: 3e-3
  weight_decay: 0.1
training:
  steps: 8
  log_every: 4
  tensorboard: false
  objective: my_parts.Halved
  objective_options: {factor: 0.25}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_parts", "broken_parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_parts.py").write_text(CODE)
    (tmp_path / "code" / "broken_parts.py").write_text("import math\n\n1 / 0\n")
    (tmp_path / "code" / "job.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, *arguments: str) -> Result:
    """Run a command on the recipe; one that only looks needs ``--trust`` for classes of the user's own."""
    trust = [] if command == "train" else ["--trust"]
    return CliRunner().invoke(app, [command, "code/job.yaml", *trust, *arguments], catch_exceptions=False)


def test_own_classes_are_checked_described_and_forecast(folder: Path) -> None:
    assert "fits 2 ranks" in run("check", "mesh=dp_shard=2").stdout
    described = run("describe", "mesh=dp_shard=2").stdout
    assert "layers.0..1 (x2)" in described and "128 x 32" in described  # the data's 100 tokens, rounded up
    assert "optimizer state of unknown size" in described
    done = run("plan", "mesh=dp_shard=2", "--json", "plan.json")
    assert done.exit_code == 0, done.output
    forecast = json.loads((folder / "plan.json").read_text())[0]
    assert forecast["rank_bytes"]["optimizer"] == forecast["rank_bytes"]["parameters"], (
        "one moment, where AdamW has two"
    )
    assert forecast["batch"]["sequence"] == 16


def test_own_classes_train_on_ranks_and_resume_from_the_resolved_recipe(folder: Path) -> None:
    done = run("train", "mesh=dp_shard=2", "--quiet")
    assert done.exit_code == 0, done.output
    code = folder / "code" / "my_parts.py"
    names = ("Model", "Signs", "Counting", "Halved")
    assert f"imports {', '.join(f'my_parts.{name}' for name in names)} from {code}\n" in done.stderr
    records = [json.loads(line) for line in (folder / "runs/job/metrics.jsonl").read_text().splitlines()]
    assert {4, 8} <= {record["step"] for record in records} and any("val/loss" in record for record in records)
    resolved = folder / "runs/job/recipe.yaml"
    assert f"code: {folder / 'code'}" in resolved.read_text()
    assert load_recipe(resolved) == load_recipe("code/job.yaml", ["mesh=dp_shard=2"])
    again = CliRunner().invoke(
        app, ["train", str(resolved), "training.steps=10", "mesh=''", "passes=[]", "data.micro_batch=8"]
    )
    assert again.exit_code == 0, again.output


WRONG = {
    "model.class=my_partz.Model": "model.class: there is no module my_partz; put it next to the recipe",
    "model.class=my_parts.Modell": "model.class: my_parts has no Modell; nearest: Model",
    "model.class=broken_parts.Model": "model.class: broken_parts cannot be imported: ZeroDivisionError: division by zero (",
    "model.class=Model": "model.class: 'Model' is no import path; expected package.module.Name",
    "model.dimm=3": "model.dimm: unknown key; nearest: dim",
    "model.dim=wide": "model.dim: expected an integer, got 'wide'",
    "model.rate=[1]": "model.rate: expected a number, got [1]",
    "model={class: my_parts.Model}": "model.dim: missing; expected an integer",
    "model={class: my_parts.number, dim: 3}": "model.class: my_parts.number is a function; expected a subclass of "
    "torch.nn.Module",
    "model.class=my_parts.Strict": "model.class: Strict cannot be made with these keywords: KeyError: 'no such table'",
    "data.dataset.sise=3": "data.dataset.sise: unknown key; nearest: size",
    "data.dataset.class=my_parts.NoLabels": "data.dataset.class: my_parts.NoLabels(size=90, sequence_length=16): sample 0 "
    "is a dict of",
    "data.dataset={class: my_parts.number, dim: 3}": "data.dataset.class: my_parts.number is a function; expected a class "
    "with __len__ and __getitem__",
    "data.source=files": "data.source: a dataset of your own is written dataset:",
    "data.paths=[a]": "data.paths: a dataset of your own reads its files itself",
    "optimizer={class: my_parts.Signs}": "optimizer.lr: missing; expected a number",
    "optimizer.momentun=1": "optimizer.momentun: unknown key; nearest: momentum",
    "optimizer={class: my_parts.Counting, size: 3, sequence_length: 2, lr: 1}": "optimizer.class: my_parts.Counting is a "
    "class; expected a subclass of torch.optim.Optimizer",
    "mesh=pp=2; passes=[PipelineParallel]; optimizer={class: my_parts.ByNorm, lr: 1}": "optimizer.class: the step that "
    "ByNorm makes of one parameter depends on all others",
    "training.objective=my_parts.Halve": "training.objective: my_parts has no Halve; nearest: Halved",
    "training.objective_options.facto=1": "training.objective_options.facto: unknown key; nearest: factor",
    "training.objective_options={size: 1, sequence_length: 2}; training.objective=my_parts.Counting": "training.objective: "
    "my_parts.Counting is a class; expected a class with tokens and loss",
    "passes=[my_parts.NoPass]": "passes.0: my_parts has no NoPass",
}
"""Overrides, divided by ``;``, and what is said of the last of them."""


@pytest.mark.parametrize("overrides", WRONG)
def test_what_is_wrong_with_an_own_class_is_told_with_its_place(folder: Path, overrides: str) -> None:
    done = run("check", *overrides.split("; "))
    assert (done.exit_code, done.stdout) == (78, "")
    assert WRONG[overrides] in done.stderr and f"override {overrides.split('; ')[-1]!r}: " in done.stderr
    assert "Traceback" not in done.stderr
