"""A step is whole or it is not there: failures, kills, retention, damage, and checkpoints that do not fit."""

import errno
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from meshpar.checkpoints import (
    CheckpointManager,
    export_safetensors,
    import_safetensors,
    list_steps,
    prune_steps,
    read_manifest,
    show_step,
    verify_step,
)
from meshpar.core.errors import CheckpointError
from meshpar.core.layout import ModelLayout
from meshpar.process.leftovers import on_the_way
from meshpar.testing import on_ranks
from tests.support.patience import patient


class Mesh:
    """The mesh of one process, as far as a checkpoint wants to know."""

    mesh_dim_names, shape = ("dp_shard",), (1,)


@dataclass
class Job:
    module: nn.Module
    mesh: Any = field(default_factory=Mesh)
    layout: ModelLayout = field(default_factory=ModelLayout)
    plan: object = "a plan"
    device: torch.device = torch.device("cpu")
    seed: int | None = None

    def manual_seed(self, seed: int) -> None:
        self.seed = seed


def linear(seed: int = 0, **options) -> Job:
    torch.manual_seed(seed)
    return Job(nn.Linear(3, 2, **options))


def stepped(job: Job, make=torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer = make(job.module.parameters(), lr=0.1)
    job.module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def saved(root: Path, *steps: int, **options: Any) -> CheckpointManager:
    """A manager that has saved these steps, each from its number as the seed."""
    manager = CheckpointManager(root, **options)
    for step in steps:
        manager.save(step, linear(step))
    return manager


def impatient(manager: CheckpointManager) -> None:
    """Let the ranks that have met wait 2 seconds for each other; those that meet anew wait as long as before."""
    manager._open_ranks._timeout = timedelta(seconds=2)


# Failure on one rank


@on_ranks(3)
def test_a_failure_on_one_rank_fails_all_with_one_message_and_leaves_the_last_step(tmp_path):
    manager = saved(tmp_path, 1, timeout_s=patient(20))
    broken = linear(2)
    if dist.get_rank() == 1:
        broken.module.register_buffer("bad", torch.empty(2, device="meta"))
    for save in (
        lambda: manager.save(2, broken),
        lambda: manager.save(2, linear(2), rank_extra=object() if dist.get_rank() == 2 else 0),
    ):
        messages: list[Any] = [None] * 3
        with pytest.raises(CheckpointError) as raised:
            save()
        dist.all_gather_object(messages, str(raised.value))
        assert len(set(messages)) == 1 and "failed on 1 of 3 ranks" in messages[0], messages
        assert manager.steps() == [1] and not manager.ignored()
        dist.barrier()
    manager.save(2, linear(2))
    other = linear(3, bias=dist.get_rank() != 1)
    before = other.module.weight.detach().clone()
    with pytest.raises(CheckpointError, match="does not fit this job"):
        manager.restore(other if dist.get_rank() == 1 else Job(nn.Linear(3, 3)))
    assert torch.equal(other.module.weight, before)
    assert manager.restore(linear(3)).step == 2


@on_ranks(3, fresh="ends a rank")
def test_a_rank_that_does_not_come_fails_the_others_in_bounded_time(tmp_path):
    root = tmp_path / "run"
    manager = saved(root, 1)
    impatient(manager)
    store = dist.FileStore(f"{root}.store", 3)
    if dist.get_rank() != 1:
        with pytest.raises(CheckpointError, match=r"lost the others, or waited longer than .*: rank 1 has ended, or"):
            manager.save(2, linear(2))
        assert manager.steps() == [1]
        store.set(f"rank {dist.get_rank()} has given up", "")
    else:
        store.wait(["rank 0 has given up", "rank 2 has given up"])


# Commit


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2, best="loss")
    for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0, 2.5], 1):
        manager.save(step, linear(), metrics={"loss": loss})
    assert manager.steps() == [2, 4, 5] and manager.best() == 2 and manager.latest() == 5
    assert CheckpointManager(tmp_path, best="+loss").best() == 5
    assert (tmp_path / "LATEST").read_text() == "step-00000005\n"
    assert os.readlink(tmp_path / "latest") == "step-00000005"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "LATEST", "latest", "step-00000002", "step-00000004", "step-00000005",
    ]  # fmt: skip


@pytest.mark.parametrize("async_", [False, True])
def test_values_known_after_a_save_decide_about_the_best_step(tmp_path, async_):
    with CheckpointManager(tmp_path, keep=1, best="loss", async_=async_) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 0.5], 1):
            manager.save(step, linear(), extra={"owes": True})
            manager.amend(step, {"owes": False}, {"loss": loss})
            manager.wait()
            assert manager.best() == (step if step in (1, 2, 4) else 2)
            # no step is deleted before its successor has values
            assert manager.steps() == ([2, 3] if step == 3 else [step])
    manifest = read_manifest(tmp_path / "step-00000004")
    assert (manifest.extra, manifest.metrics) == ({"owes": False}, {"loss": 0.5})
    restored = CheckpointManager(tmp_path).restore(linear())
    assert restored.extra == {"owes": False}


def test_a_step_stays_as_it_was_where_its_values_cannot_be_written(tmp_path, monkeypatch, caplog):
    manager = CheckpointManager(tmp_path)
    manager.save(1, linear(), extra={"owes": True})
    before = (tmp_path / "step-00000001/meshpar.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        manager.amend(1, {"owes": False}, {"loss": 1.0})
    assert (tmp_path / "step-00000001/meshpar.json").read_bytes() == before
    assert "step 1 is saved, but without the values" in caplog.text
    assert [path.name for path in (tmp_path / "step-00000001").glob("*meshpar.json*")] == ["meshpar.json"]


def test_a_step_saved_after_going_back_stays_and_later_ones_do_not_count(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (5, 6, 3, 2, 4):
        manager.save(step, linear())
    # 2 and 3 were kept, then 3 and 4; whoever went back may want what lies ahead
    assert manager.steps() == [3, 4, 5, 6]


def test_a_damaged_step_does_not_count_as_kept(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2)
    manager.save(1, linear())
    manager.save(2, linear())
    (tmp_path / "step-00000002" / "meshpar.json").write_text("{")
    manager.save(3, linear())
    assert manager.steps() == [1, 3]


def test_a_damaged_manifest_is_passed_over_when_the_best_is_sought(tmp_path, caplog):
    manager = CheckpointManager(tmp_path, keep=1, best="loss")
    for step in (1, 2):
        manager.save(step, linear(), metrics={"loss": step})
    manifest = tmp_path / "step-00000001" / "meshpar.json"
    text = manifest.read_text()
    manifest.write_text("{")
    manager.save(3, linear(), metrics={"loss": 3.0})
    assert manager.best() == 2 and manager.steps() == [1, 2, 3], "what cannot be compared may be the best, and stays"
    assert "step 1 is left out of the comparison by loss: " in caplog.text
    assert "meshpar.json cannot be read" in caplog.text
    manifest.write_text(text)
    manager.save(4, linear(), metrics={"loss": 3.0})
    assert manager.steps() == [1, 4]


@pytest.mark.parametrize(
    "where", ["storage.disk.DiskPath.flush", "steps.steps.Steps._mark_latest", "steps.steps.Steps.retain"]
)
def test_what_fails_after_the_commit_does_not_fail_the_save(tmp_path, monkeypatch, caplog, where):
    manager = saved(tmp_path, 1)

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"meshpar.checkpoints.{where}", fail)
    assert manager.save(2, linear(2)).is_dir()
    assert manager.steps() == [1, 2] and not manager.ignored()
    assert "step 2 is committed, but" in caplog.text and "No space left on device" in caplog.text
    monkeypatch.undo()
    assert manager.restore(linear()).step == 2


def test_a_replacement_that_cannot_take_its_place_leaves_the_old_step(tmp_path, monkeypatch):
    manager = saved(tmp_path, 1)
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if ".tmp-" in path.name:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        manager.save(1, linear(2), replace=True)
    monkeypatch.undo()
    restored = linear(3)
    assert manager.restore(restored).step == 1 and not manager.ignored()
    assert torch.equal(restored.module.weight, linear(1).module.weight)


def test_a_step_is_not_saved_over_unless_told(tmp_path):
    manager = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="step 1 is already saved"):
        manager.save(1, linear(2))
    manager.save(1, linear(2), replace=True)
    restored = linear(3)
    manager.restore(restored)
    assert torch.equal(restored.module.weight, linear(2).module.weight)
    assert manager.steps() == [1] and not manager.ignored()


def test_a_step_whose_replacement_died_comes_back(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, linear(1)).rename(tmp_path / "step-00000001.old-elsewhere-1-abcdef01")
    (tmp_path / "step-00000002.tmp-elsewhere-1-abcdef01").mkdir()
    (tmp_path / "step-00000009").mkdir()
    assert manager.latest() == 1 and len(manager.ignored()) == 2
    restored = linear(3)
    assert manager.restore(restored, verify="full").step == 1
    assert torch.equal(restored.module.weight, linear(1).module.weight)
    for path in (tmp_path, tmp_path / "step-00000001"):
        assert verify_step(path).startswith(str(tmp_path / "step-00000001.old-elsewhere-1-abcdef01"))
    assert "(in step-00000001.old-elsewhere-1-abcdef01: its replacement is running or did not finish)" in list_steps(
        tmp_path
    )
    with pytest.raises(CheckpointError, match="step 1 is already saved"):
        import_safetensors(save_weights(tmp_path), tmp_path, step=1)
    assert manager.ignored().keys() == {tmp_path / "step-00000002.tmp-elsewhere-1-abcdef01", tmp_path / "step-00000009"}
    manager.save(3, linear())
    assert manager.steps() == [1, 3] and list(manager.ignored()) == [tmp_path / "step-00000009"]
    with pytest.raises(CheckpointError, match="step 9 cannot be saved: something that is not a checkpoint is in"):
        manager.save(9, linear())


def test_a_folder_without_committed_steps_says_what_is_there(tmp_path):
    (tmp_path / "step-00000002.tmp-elsewhere-1-abcdef01").mkdir()
    (tmp_path / "step-00000009").mkdir()
    with pytest.raises(CheckpointError, match=r"(?s)no committed step.*step-00000009: it has no meshpar.json"):
        CheckpointManager(tmp_path).restore(linear())


def test_an_old_step_that_is_half_removed_does_not_come_back(tmp_path, monkeypatch):
    manager = saved(tmp_path, 1)

    def fail(folder: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shutil.rmtree", fail)
    manager.save(1, linear(2), replace=True)
    manager.save(2, linear(2))
    (tmp_path / "step-00000001").rename(tmp_path / "gone")
    assert manager.steps() == [2]
    monkeypatch.undo()
    manager.save(3, linear(3))
    assert manager.steps() == [2, 3] and not manager.ignored()


@pytest.mark.parametrize(
    "clean", [lambda root: prune_steps(root, 3), lambda root: import_safetensors(save_weights(root), root, step=7)]
)
def test_only_the_run_itself_removes_what_another_host_left_lately(tmp_path, clean):
    manager = saved(tmp_path, 1)
    live, dead, here = (
        tmp_path / f"step-00000002.tmp-{host}-abcdef01"
        for host in ("a-1", "b-1", f"{socket.gethostname()}-{2**22 + 1}")
    )
    for path in (live, dead, here):
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"12")
    for path in (dead / "__0_0.distcp", dead, live):
        os.utime(path, (time.time() - 7 * 3600,) * 2)
    clean(tmp_path)
    assert list(manager.ignored()) == [live], "it is written to, on a host whose processes are not seen from here"
    manager.save(2, linear(2))
    assert not manager.ignored()


def save_weights(folder: Path) -> Path:
    safetensors.torch.save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_a_leftover_whose_pid_belongs_to_another_process_by_now_is_removed(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, linear())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as live:
        theirs = on_the_way(tmp_path / "step-00000002", "tmp", process=live.pid)
        reused = theirs.with_name(theirs.name.rpartition("-")[0] + "-abcdef0123456789")
        for path in (theirs, reused):
            path.mkdir()
        manager.save(3, linear())
        assert manager.ignored().keys() == {theirs}
        live.communicate(b"\n")
    manager.save(4, linear())
    assert not manager.ignored()


def test_every_and_wrong_arguments():
    manager = CheckpointManager("x", every=10)
    assert [step for step in range(1, 31) if manager.due(step)] == [10, 20, 30] and not CheckpointManager("x").due(10)
    with pytest.raises(CheckpointError, match="keep must be at least 1"):
        CheckpointManager("x", keep=0)


def test_extra_must_be_plain_data_and_nothing_is_left_when_it_is_not(tmp_path):
    with pytest.raises(CheckpointError, match=r"extra\.a must be plain data"):
        CheckpointManager(tmp_path).save(1, linear(), extra={"a": {1, 2}})
    assert not any(tmp_path.iterdir())


def test_the_state_of_every_schedule_comes_back_as_it_was(tmp_path):
    job = linear()
    optimizer = torch.optim.SGD(job.module.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 3], gamma=0.1)
    optimizer.step()
    schedule.step()
    manager = CheckpointManager(tmp_path)
    manager.save(1, job, optimizer, extra={"schedule": schedule.state_dict()}, rank_extra={0: {7: "seven"}})
    restored = manager.restore(job, optimizer)
    again = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9])
    again.load_state_dict(restored.extra["schedule"])
    assert again.state_dict() == schedule.state_dict() and list(again.milestones.elements()) == [2, 2, 3]
    assert restored.rank_extra == {0: {7: "seven"}}


def test_a_dict_with_keys_that_json_has_not_is_refused_by_its_keys(tmp_path):
    with pytest.raises(CheckpointError, match=r"extra\.a must be plain data .*, got a dict with keys of bool, str"):
        CheckpointManager(tmp_path).save(1, linear(), extra={"a": {True: 1, "x": 2}})


def test_a_disk_too_full_is_noticed_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(CheckpointError, match="GB free; this step needs"):
        CheckpointManager(tmp_path).save(1, linear())
    assert not any(tmp_path.iterdir())


# Restore


def test_all_that_does_not_fit_is_told_at_once_and_nothing_changed(tmp_path):
    manager = CheckpointManager(tmp_path)
    saved = nn.ModuleDict(
        {"same": nn.Linear(2, 2), "wide": nn.Linear(2, 3, bias=False), "low": nn.Linear(1, 1, bias=False).bfloat16()}
    )
    saved["gone"] = nn.Linear(1, 1, bias=False)
    job = Job(saved)
    manager.save(1, job, torch.optim.SGD(saved.parameters(), lr=0.1))
    other = Job(
        nn.ModuleDict(
            {
                "same": nn.Linear(2, 2),
                "wide": nn.Linear(2, 4, bias=False),
                "low": nn.Linear(1, 1, bias=False),
                "new": nn.Linear(1, 1),
            }
        )
    )
    before = {name: value.clone() for name, value in other.module.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        manager.restore(other, torch.optim.AdamW(other.module.parameters()))
    for line in (
        "wrong shape: model.wide.weight is (4, 2) here and (3, 2) in the checkpoint",
        "wrong dtype: model.low.weight is torch.float32 here and torch.bfloat16 in the checkpoint; cast=True converts "
        "it",
        "missing: model.new.weight, (1, 1)",
        "missing: model.new.bias, (1,)",
        "unexpected: model.gone.weight",
        "optimizer: trained only here: new.bias, new.weight",
        "optimizer: trained only in the checkpoint: gone.weight",
        "optimizer: AdamW here and SGD in the checkpoint, for low.weight, same.bias, same.weight, wide.weight",
    ):
        assert line in str(raised.value)
    assert all(torch.equal(before[name], value) for name, value in other.module.state_dict().items())


def test_cast_and_partial_are_explicit(tmp_path):
    manager = CheckpointManager(tmp_path)
    job = linear(1)
    manager.save(1, job)
    low = Job(nn.Linear(3, 2, bias=False).bfloat16())
    with pytest.raises(CheckpointError, match="wrong dtype"):
        manager.restore(low, partial=True)
    with pytest.raises(CheckpointError, match=r"restore\(\.\.\., partial=True\) restores what fits"):
        manager.restore(low, cast=True)
    assert manager.restore(low, cast=True, partial=True).skipped == ("unexpected: model.bias",)
    assert torch.equal(low.module.weight, job.module.weight.bfloat16())


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("make", "moment"), [(torch.optim.AdamW, "exp_avg"), (torch.optim.Adafactor, "row_var")])
@pytest.mark.parametrize(("saved", "here"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_cast_converts_the_moments_with_their_parameters(tmp_path, saved, here, make, moment, foreach):
    job = linear(1, dtype=saved)
    optimizer = make(job.module.parameters(), foreach=foreach)
    job.module(torch.ones(1, 3, dtype=saved)).sum().backward()
    optimizer.step()
    CheckpointManager(tmp_path).save(1, job, optimizer)
    other = linear(2, dtype=here)
    restored = make(other.module.parameters(), foreach=foreach)
    CheckpointManager(tmp_path).restore(other, restored, cast=True)
    was, now = optimizer.state[job.module.weight], restored.state[other.module.weight]
    assert torch.equal(now[moment], was[moment].to(here)) and now["step"].dtype == torch.float32
    other.module(torch.ones(1, 3, dtype=here)).sum().backward()
    restored.step()


def test_random_state_goes_on_where_it_was(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, linear())
    want = torch.rand(3), random.random()
    torch.manual_seed(9)
    assert manager.restore(linear(5)).random == "restored"
    assert torch.equal(torch.rand(3), want[0]) and random.random() == want[1]
    state = torch.get_rng_state()
    assert manager.restore(Job(nn.Linear(3, 2)), random=False).random == "kept"
    assert not torch.equal(torch.get_rng_state(), state), "building the module drew numbers"


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.LBFGS]
)
def test_optimizers_of_all_sorts_go_on_bitwise(tmp_path, make):
    manager = CheckpointManager(tmp_path)
    job = linear(1)
    options = {"momentum": 0.5} if make is torch.optim.SGD else {}
    optimizer = make(job.module.parameters(), lr=0.1, **options)

    def loss():
        optimizer.zero_grad()
        value = (job.module(torch.ones(1, 3)) ** 2).sum()
        value.backward()
        return value

    optimizer.step(loss)
    if make is torch.optim.LBFGS:  # keeps lists of tensors
        with pytest.raises(CheckpointError, match="must be plain data"):
            manager.save(1, job, optimizer)
        return
    manager.save(1, job, optimizer)
    optimizer.step(loss)
    want = job.module.weight.detach().clone()
    job = linear(2)
    optimizer = make(job.module.parameters(), lr=0.3, **options)
    manager.restore(job, optimizer)
    optimizer.step(loss)
    assert torch.equal(job.module.weight, want)


def two_optimizers(job: Job, lr: float) -> dict[str, torch.optim.Optimizer]:
    return {"muon": torch.optim.Muon([job.module.weight], lr=lr), "adamw": torch.optim.AdamW([job.module.bias], lr=lr)}


@pytest.mark.parametrize("async_", [False, True])
def test_several_optimizers_go_on_bitwise(tmp_path, async_):
    def step(job, optimizers):
        job.module(torch.ones(1, 3)).square().sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    job = linear(1)
    optimizers = two_optimizers(job, 0.1)
    step(job, optimizers)
    with CheckpointManager(tmp_path, async_=async_) as manager:
        folder = manager.save(1, job, optimizers)
        step(job, optimizers)
    assert "muon: Muon, adamw: AdamW" in show_step(folder)
    again = linear(2)
    restored = two_optimizers(again, 0.3)
    CheckpointManager(tmp_path).restore(again, restored)
    step(again, restored)
    assert all(torch.equal(*pair) for pair in zip(again.module.parameters(), job.module.parameters()))


def test_optimizers_are_compared_by_parameter_and_their_names_are_labels(tmp_path):
    job = linear(1)
    manager = CheckpointManager(tmp_path)
    manager.save(1, job, two_optimizers(job, 0.1))
    with pytest.raises(CheckpointError, match=r"optimizer: AdamW here and Muon in the checkpoint, for weight\n"):
        manager.restore(job, torch.optim.AdamW(job.module.parameters()))
    manager.save(2, job, stepped(job))
    split = {"one": torch.optim.AdamW([job.module.weight]), "two": torch.optim.AdamW([job.module.bias])}
    manager.restore(job, split)
    assert split["two"].param_groups[0]["lr"] == 0.1 and "exp_avg" in split["two"].state[job.module.bias]


def test_optimizers_without_names_or_of_the_same_parameter_are_refused(tmp_path):
    job = linear(1)
    one, other = torch.optim.SGD(job.module.parameters()), torch.optim.SGD([job.module.bias])
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer is a list; expected .* several by name"):
        manager.save(1, job, [one, other])
    with pytest.raises(CheckpointError, match=r"two optimizers train bias; expected one"):
        manager.save(1, job, {"one": one, "other": other})


def test_a_learning_rate_in_a_tensor_is_set_in_place(tmp_path):
    job = linear()
    CheckpointManager(tmp_path).save(1, job, torch.optim.AdamW(job.module.parameters(), lr=0.25))
    rate = torch.tensor(0.0)
    optimizer = torch.optim.AdamW(job.module.parameters(), lr=rate)
    CheckpointManager(tmp_path).restore(job, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0.25


def test_state_of_parameters_without_updates_is_none_after_restore(tmp_path):
    job = linear(1)
    CheckpointManager(tmp_path).save(1, job, torch.optim.AdamW(job.module.parameters()))
    optimizer = stepped(job)
    CheckpointManager(tmp_path).restore(job, optimizer)
    assert not optimizer.state


# Damage


@pytest.mark.parametrize("level", ["size", "full"])
def test_damage_is_named(tmp_path, level):
    manager = CheckpointManager(tmp_path)
    folder = manager.save(1, linear())
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=rf"__0_0.distcp: expected {len(data)} bytes, found {len(data) - 1}"):
        manager.restore(linear(), verify=level)
    file.write_bytes(data)
    if level == "full":
        _, _, name, start, length = read_manifest(folder).tensors["model.weight"]["chunks"][0]
        where = start + length // 2
        text = (folder / name).read_bytes()
        (folder / name).write_bytes(text[:where] + bytes([text[where] ^ 1]) + text[where + 1 :])
        with pytest.raises(CheckpointError, match=rf"{name}: model\.weight at .*expected the CRC-32"):
            manager.restore(linear(), verify="full")
        with pytest.raises(CheckpointError, match=rf"{name}: the part of .model\.weight. .*expected the CRC-32"):
            export_safetensors(folder, tmp_path / "hf", verify="full")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: No such file"):
        manager.restore(linear(), verify=level)


def test_a_link_that_others_left_for_a_file_that_is_written_whole_is_not_followed(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("as it was")
    folder.mkdir()
    (folder / ".LATEST.new").symlink_to(victim)
    with CheckpointManager(folder) as manager:
        manager.save(1, linear())
    assert victim.read_text() == "as it was" and not (folder / "LATEST").is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == [".LATEST.new", "LATEST", "latest", "step-00000001"]
