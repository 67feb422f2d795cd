"""`meshpar plan --script` prints what ranks hold of a script's models: what they hold where the script trains."""

import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import lightning  # noqa: F401 - before what it wraps is looked at
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from meshpar import MeshparError, Plan
from meshpar.launchers.cli import app
from meshpar.launchers.commands.scripts import run_to_mesh
from meshpar.process.preview import is_preview
from meshpar.testing import launch
from tests.support.tiers import daily
from tests.support.trainers import prepare_process

# Lightning's imports wrap it; ranks run other tests, too
torch.compile = getattr(torch.compile, "__wrapped__", torch.compile)

EXAMPLES = Path(__file__).parents[2] / "examples"


class Applied(BaseException):
    """Ends a script where its ranks have put a model on the mesh."""


def check_holdings(script, arguments, table):
    """Run a script on this rank to where its model is on the mesh, and compare what this rank holds."""
    apply, held = Plan.apply, []

    def stop(*args, **options):
        held.append(apply(*args, **options).describe())
        raise Applied

    prepare_process()
    with (
        mock.patch.object(Plan, "apply", stop),
        mock.patch.object(sys, "argv", [script, *arguments]),
        pytest.raises(Applied),
    ):
        runpy.run_path(script, run_name="__main__")
    assert str(held[0]) in table


def plan(*words):
    prepare_process()
    return CliRunner().invoke(app, ["plan", "--script", *map(str, words)], catch_exceptions=False)


@pytest.mark.parametrize("mesh", daily(["dp_shard=2", "tp=2", "dp_shard=2,tp=2"], "dp_shard=2"))
@pytest.mark.parametrize("script", ["trainer_on_mesh.py", "accelerate_on_mesh.py", "lightning_on_mesh.py"])
def test_a_scripts_ranks_hold_what_its_preview_prints(script, mesh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    shown = plan(EXAMPLES / script, "--", mesh)
    assert shown.exit_code == 0, shown.output
    assert dict(os.environ) == before, "what runs next is none of a job's ranks"
    launch(__name__, "check_holdings", 4 if "," in mesh else 2, (str(EXAMPLES / script), [mesh], shown.output))
    without_batches = "no forecast of a step: the script names no batches" in shown.output
    assert without_batches == ("lightning" in script)
    assert ("tokens/s" in shown.output) != without_batches
    assert not dist.is_initialized()
    assert not is_preview()


SEVERAL = """
import sys

import torch
from torch import nn

import meshpar
from meshpar.integrations.{library} import {name}

plan = meshpar.Plan("dp_shard=-1", [meshpar.FullyShard()])
"""
ACCELERATE = """
accelerator = Accelerator(plan={"text": plan, "image": "tp=2"}, layout={"image": meshpar.ModelLayout(tensor={"0": "colwise"})})
assert accelerator.num_processes == int(sys.argv[1])
accelerator.prepare(nn.Sequential(nn.Linear(8, 4)), nn.Sequential(nn.Linear(8, 2)))
"""
LIGHTNING = """
from lightning import LightningModule, Trainer

class Two(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.text, self.image = nn.Sequential(nn.Linear(8, 4)), nn.Sequential(nn.Linear(8, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

    def training_step(self, batch):
        raise AssertionError("trained")

strategy = MeshparStrategy({"text": plan, "image": plan})
trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Two(), torch.utils.data.DataLoader(torch.ones(8, 8)))
"""
FABRIC = """
from lightning import Fabric

fabric = Fabric(strategy=MeshparFabricStrategy(plan), devices=2, accelerator="cpu")
fabric.launch()
fabric.setup(nn.Sequential(nn.Linear(8, 4)))
"""
LOOP = """
with meshpar.distributed("cpu"):
    plan.apply(nn.Sequential(nn.Linear(8, 4)))
"""


def written(folder, text, library="accelerate", name="Accelerator"):
    script = folder / "train.py"
    script.write_text(SEVERAL.format(library=library, name=name) + text)
    return script


def test_every_model_of_a_script_is_shown(tmp_path):
    text = ACCELERATE.replace('"tp=2"', "plan")
    names = [model.name for model in seen(written(tmp_path, text), "8", node=8)]
    assert names == ["text", "image"]
    trainer = written(tmp_path, LIGHTNING, "lightning", "MeshparStrategy")
    assert [model.name for model in seen(trainer, node=4)] == ["text", "image"]
    assert len(seen(written(tmp_path, FABRIC, "lightning", "MeshparFabricStrategy"), node=4)) == 1
    assert len(seen(written(tmp_path, LOOP), node=4)) == 1


def seen(script, *arguments, node, ranks=None):
    prepare_process()
    return run_to_mesh(script, arguments, ranks, node)


def test_the_models_of_a_preference_trainer_are_shown(tmp_path):
    example = """
from trl import DPOConfig, DPOTrainer
from datasets import Dataset
from tests.support.trainers import arguments, llama, tokenizer

rows = [{"prompt": "w1 w2", "chosen": "w3", "rejected": "w4"}] * 8
with meshpar.distributed("cpu"):
    settings = arguments(sys.argv[1], "dp_shard=2", DPOConfig, max_length=16)
    on_mesh(DPOTrainer)(
        llama(), llama(seed=1), settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
        plan=meshpar.Plan("dp_shard=2", [meshpar.FullyShard()]),
    )
"""
    pytest.importorskip("trl")
    models = seen(written(tmp_path, example, "transformers", "on_mesh"), str(tmp_path), node=8)
    assert [(model.name, model.plan.frozen) for model in models] == [("model", False), ("ref_model", True)]


def test_the_ranks_of_a_preview_are_those_of_the_mesh_or_as_asked(tmp_path):
    script = written(tmp_path, LOOP)
    assert "dp_shard=-1" in plan(script, "--nodes", "2", "--gpus-per-node", "4").output
    text = re.search(r"this rank stores (\d+) bytes of parameters", plan(script, "--gpus-per-node", "2").output)
    assert int(text[1]) == (8 * 4 + 4) * 4 // 2
    fixed = written(tmp_path, LOOP.replace("plan.apply", 'meshpar.Plan("dp_shard=2", [meshpar.FullyShard()]).apply'))
    assert plan(fixed).exit_code == 0
    assert plan(fixed, "--nodes", "1").exit_code != 0, "the mesh has 2 ranks and a node 8"


def test_a_script_that_puts_no_model_on_a_mesh_is_told_so(tmp_path):
    """And one that does: the remedy passes the arguments with which it trains."""
    text = f"if sys.argv[1:] != ['train']:\n    sys.exit('usage: train')\n{LOOP}"
    script = written(tmp_path, text)
    with pytest.raises(MeshparError, match="ended with 'usage: train' and put no model on a mesh"):
        seen(script, node=2)
    assert len(seen(script, "train", node=2)) == 1
    with pytest.raises(MeshparError, match="is no file; pass the script that you train with: --script train"):
        seen(tmp_path / "other.py", node=2)
    assert seen(written(tmp_path, LOOP), node=2)
    argv, path = list(sys.argv), list(sys.path)
    with pytest.raises(ZeroDivisionError):
        seen(written(tmp_path, "1 / 0"), node=2)
    assert (sys.argv, sys.path) == (argv, path)
    assert not is_preview()


def test_what_a_preview_cannot_do_is_refused(tmp_path):
    script = written(tmp_path, LOOP)
    assert "--search, --elastic and --trust are for recipes; drop them" in plan(script, "--search").output
    assert plan(script).exit_code == 0
    without = CliRunner().invoke(app, ["plan"], terminal_width=200)
    assert "give a recipe, a shape's name, or --script train.py" in without.output
    own_class = LOOP.replace("nn.Sequential(nn.Linear(8, 4))", "Own(8, 4)") + "\n"
    text = f"class Own(nn.Linear):\n    pass\n\n\nloaded = [torch.zeros(1, 8)]\n{own_class}"
    assert "no forecast of a step: the script names no batches" in plan(written(tmp_path, text)).output
    text = f"class Own(nn.Sequential):\n    pass\n{PREPARED}"
    assert "no forecast of a step: the script defines the model's classes" in plan(written(tmp_path, text)).output
    imported = text.replace("class Own(nn.Sequential):\n    pass", "from torch.nn import Sequential as Own")
    assert "the script defines" not in plan(written(tmp_path, imported)).output


PREPARED = """
accelerator = Accelerator(plan=plan)
accelerator.prepare(Own(nn.Linear(8, 4)), torch.utils.data.DataLoader(torch.ones(8, 8)))
"""
