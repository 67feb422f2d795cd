"""Where a checkpoint or an export goes, and which step it is, is checked before anything is touched."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import meshpar
from meshpar import CheckpointError, MeshparError, Plan, Replicate
from meshpar.checkpoints import (
    CheckpointManager,
    DistributedCheckpoint,
    export_safetensors,
    import_safetensors,
    list_steps,
    open_step,
    prune_steps,
)
from meshpar.checkpoints.steps import restoring
from meshpar.testing import on_ranks
from tests.support.patience import patient


def linear():
    with meshpar.distributed("cpu"):
        return Plan("", []).apply(nn.Linear(2, 2))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    manager = CheckpointManager(tmp_path / "checkpoints")
    for step in (1, 2):
        manager.save(step, linear())
    return tmp_path


@pytest.mark.parametrize("target", ["", "checkpoints", "checkpoints/step-00000002", "checkpoints/step-00000002/hf"])
def test_an_export_does_not_replace_what_it_reads(run: Path, target: str) -> None:
    before = sorted(run.rglob("*"))
    with pytest.raises(CheckpointError, match="choose a folder beside it"):
        export_safetensors(run / "checkpoints", run / target, overwrite=True)
    assert sorted(run.rglob("*")) == before
    assert export_safetensors(run / "checkpoints", run / "hf", overwrite=True).is_dir()


def test_a_url_that_names_no_store_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    for made in (
        lambda: CheckpointManager("ftp://bucket/run"),
        lambda: export_safetensors(run / "checkpoints", "hf://bucket/hf"),
        lambda: open_step("http://bucket/run"),
        lambda: import_safetensors("hf://org/model", run / "imported"),
        lambda: DistributedCheckpoint("hdfs://bucket/run"),
    ):
        message = r"is a URL that is not supported; expected a folder, file:///folder, or s3://bucket/key"
        with pytest.raises(CheckpointError, match=message):
            made()
    with pytest.raises(CheckpointError, match="is a URL; expected a path of a file system"):
        CheckpointManager("s3://bucket/run", async_=True, staging="s3://bucket/staging")
    assert open_step(f"file://{run}/checkpoints") == open_step(run / "checkpoints")
    for name in ("obstore", "obstore.store"):  # also where other tests have loaded it
        monkeypatch.setitem(sys.modules, name, None)
    for made in (
        lambda: CheckpointManager("s3://bucket/run").steps(),
        lambda: list_steps("gs://b/run"),
        lambda: prune_steps("az://b/run", 1),
    ):
        with pytest.raises(MeshparError, match=r"not installed: pip install 'meshpar\[object-store\]'"):
            made()
    assert not list(run.glob("*:"))


def test_a_step_that_was_exchanged_is_not_taken_for_another(run: Path) -> None:
    steps = run / "checkpoints"
    (steps / "step-00000002").rename(steps / "two")
    (steps / "step-00000001").rename(steps / "step-00000002")
    (steps / "two").rename(steps / "step-00000001")
    with pytest.raises(CheckpointError, match="is named step 2 and contains step 1"):
        CheckpointManager(steps).restore(linear(), step=2)
    with pytest.raises(CheckpointError, match="is named step 2 and contains step 1"):
        export_safetensors(steps, run / "hf")


@pytest.mark.parametrize("step", [-1, 1.5, True])
def test_a_number_that_is_no_step_is_refused(tmp_path: Path, step: float) -> None:
    with pytest.raises(CheckpointError, match="expected an integer of 0 or more"):
        CheckpointManager(tmp_path).save(step, linear())  # type: ignore[arg-type]


@on_ranks(2)
def test_ranks_that_restore_different_steps_are_told(tmp_path: Path) -> None:
    par = Plan("dp_replicate=2", [Replicate()]).apply(nn.Linear(2, 2))
    manager = CheckpointManager(tmp_path, timeout_s=patient(30))
    for step in (1, 2):
        manager.save(step, par)
    with pytest.raises(CheckpointError, match=r"restore\(\) got step=1 on rank 0 and 2 on rank 1; pass the same"):
        manager.restore(par, step=dist.get_rank() + 1)
    read = restoring.read_manifest
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:  # as where each host has a disk of its own at the same path
            patch.setattr(restoring, "read_manifest", lambda folder: replace(read(folder), seed=7))
        with pytest.raises(CheckpointError, match=r"not the same step on rank 0 and on rank 1"):
            manager.restore(par)
    assert manager.restore(par).step == 2
    assert manager.restore(par, step=1).step == 1


@on_ranks(2)
def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    par = Plan("dp_replicate=2", [Replicate()]).apply(nn.Linear(2, 2).requires_grad_())
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match="this rank saves step 4, rank 0 step 3"):
        manager.save(3 + dist.get_rank(), par)
    assert manager.steps() == []
    manager.save(3, par)
    assert manager.steps() == [3]
