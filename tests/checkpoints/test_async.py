"""Asynchronous saves: what is committed is the moment of save(), and what goes wrong is heard."""

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import meshpar
from meshpar.checkpoints import CheckpointManager, read_manifest
from meshpar.checkpoints.format.writing import write_parts
from meshpar.checkpoints.steps.background import Stager
from meshpar.core.errors import CheckpointError
from meshpar.testing import on_ranks
from tests.checkpoints.test_commit import Job, impatient, linear, saved, stepped
from tests.checkpoints.test_manager import full, go_on, parallelized
from tests.support.patience import patient


class Gate:
    """Holds a function's calls until it is opened, and counts how many run at once."""

    def __init__(self, monkeypatch, where: str, function) -> None:
        self.now = self.most = self.done = 0
        self.open = threading.Event()
        self.reached = threading.Event()

        def gated(*args: Any, **kwargs: Any) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            self.reached.set()
            assert self.open.wait(patient(60))
            result = function(*args, **kwargs)
            self.now -= 1
            self.done += 1
            return result

        monkeypatch.setattr(where, gated)


def staging(monkeypatch) -> Gate:
    return Gate(monkeypatch, "meshpar.checkpoints.steps.background.Stager.stage", Stager.stage)


def writing(monkeypatch) -> Gate:
    return Gate(monkeypatch, "meshpar.checkpoints.steps.saving.write_parts", write_parts)


def step_of(job: Job, optimizer: torch.optim.Optimizer) -> None:
    job.module(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_the_next_step_waits_for_staging_and_for_nothing_more(tmp_path, monkeypatch):
    stages, writes = staging(monkeypatch), writing(monkeypatch)
    job = linear(1)
    optimizer = stepped(job)
    with CheckpointManager(tmp_path, async_=True) as manager:
        want = [{name: value.clone() for name, value in job.module.state_dict().items()}]
        manager.save(1, job, optimizer, extra={"at": 1})
        job.module(torch.ones(1, 3)).sum().backward()
        assert not stages.done, "saving returns before anything is copied"
        step = threading.Thread(target=optimizer.step)
        step.start()
        assert stages.reached.wait(patient(60))
        assert torch.equal(job.module.weight, want[0]["weight"]), "the step waits until all is copied"
        stages.open.set()
        step.join(patient(60))
        assert not step.is_alive() and stages.done == 1 and not writes.done, "and not until it is written"
        assert not torch.equal(job.module.weight, want[0]["weight"]) and manager.steps() == []
        want.append({name: value.clone() for name, value in job.module.state_dict().items()})
        writes.open.set()
        manager.save(2, job, optimizer, extra={"at": 2})
        assert manager.steps() == [1], "one save at a time"
        step_of(job, optimizer)
    assert manager.steps() == [1, 2] and writes.most == 1
    for number in (1, 2):
        again = linear(5)
        assert CheckpointManager(tmp_path).restore(again, step=number, verify="full").extra == {"at": number}
        assert all(torch.equal(again.module.state_dict()[name], value) for name, value in want[number - 1].items())


def test_buffers_and_random_state_are_those_of_the_moment(tmp_path, monkeypatch):
    stages = staging(monkeypatch)
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2))
    module.register_buffer("seen", torch.zeros(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with CheckpointManager(tmp_path, async_=True) as manager:
        manager.save(1, Job(module), optimizer)
        want = torch.rand(3)
        module.seen += 1  # as a forward pass does to running statistics
        stages.open.set()
    assert manager.restore(Job(module)).random == "restored"
    assert module.seen.tolist() == [0, 0] and torch.equal(torch.rand(3), want)


def test_the_step_of_an_optimizer_that_save_did_not_receive_waits_for_staging_too(tmp_path, monkeypatch):
    stages = staging(monkeypatch)
    job = linear(1)
    other = torch.optim.SGD([job.module.bias], lr=1.0)
    with CheckpointManager(tmp_path, async_=True) as manager:
        manager.save(1, job, torch.optim.SGD([job.module.weight], lr=1.0))
        job.module(torch.ones(1, 3)).sum().backward()
        step = threading.Thread(target=other.step)
        step.start()
        assert stages.reached.wait(patient(60))
        assert torch.equal(job.module.bias, linear(1).module.bias)
        stages.open.set()
        step.join(patient(60))
    again = linear(2)
    manager.restore(again)
    assert torch.equal(again.module.bias, linear(1).module.bias) and not torch.equal(job.module.bias, again.module.bias)


def test_a_parameter_that_is_changed_before_it_is_copied_fails_the_save_by_name(tmp_path, monkeypatch):
    stages = staging(monkeypatch)
    job = linear(1)
    manager = CheckpointManager(tmp_path, async_=True)
    manager.save(1, job, stepped(job))
    with torch.no_grad():
        job.module.bias.clamp_(0, 0)
    stages.open.set()
    with pytest.raises(CheckpointError, match=r"model\.bias.*before_step\(\)"):
        manager.close()
    assert manager.steps() == []


@pytest.mark.parametrize(
    "change",
    [lambda weight: weight.data.mul_(2), lambda weight: weight.detach().numpy().__imul__(2)],
    ids=["through data", "through numpy"],
)
def test_a_change_that_torch_does_not_count_fails_the_save_by_name(tmp_path, monkeypatch, change):
    stages = staging(monkeypatch)
    job = linear(1)
    manager = CheckpointManager(tmp_path, async_=True)
    manager.save(1, job, stepped(job))
    before = job.module.weight._version
    change(job.module.weight)
    assert job.module.weight._version == before
    stages.open.set()
    with pytest.raises(CheckpointError, match=r"model\.weight.*before_step\(\)"):
        manager.close()
    assert manager.steps() == []


def test_values_that_compare_with_nothing_are_not_taken_for_changed(tmp_path):
    job = linear(1)
    with torch.no_grad():
        job.module.weight.fill_(torch.nan)
    with CheckpointManager(tmp_path, async_=True) as manager:
        manager.save(1, job, torch.optim.SGD(job.module.parameters(), lr=0.1))
    assert manager.steps() == [1]


def test_memory_that_replaces_that_of_a_parameter_does_not_enter_the_save(tmp_path, monkeypatch):
    stages = staging(monkeypatch)
    job = linear(1)
    with CheckpointManager(tmp_path, async_=True) as manager:
        manager.save(1, job, stepped(job))
        want = job.module.weight.detach().clone()
        nn.utils.vector_to_parameters(
            torch.zeros(sum(parameter.numel() for parameter in job.module.parameters())), job.module.parameters()
        )
        assert not job.module.weight.any()
        stages.open.set()
    manager.restore(job)
    assert torch.equal(job.module.weight, want)


CHANGES = {"in place": lambda weight: weight.mul_(2), "in a list": lambda weight: torch._foreach_mul_([weight], 2.0)}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_a_change_of_a_shard_before_it_is_copied_fails_the_save_on_every_rank(tmp_path, change):
    par, optimizer = parallelized("dp_shard=2", [meshpar.FullyShard()], seed=1)
    manager = CheckpointManager(tmp_path, async_=True, timeout_s=patient(30))
    original, changed = Stager.stage, threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stager, "stage", lambda self, *args: changed.wait(patient(60)) and original(self, *args))
        manager.save(1, par, optimizer)
        with torch.no_grad():
            CHANGES[change](next(par.module.parameters()))
        changed.set()
        with pytest.raises(CheckpointError, match=r"tensors were changed while the save in the background copied them"):
            manager.close()
    assert manager.steps() == []
    manager.save(2, par, optimizer)
    manager.before_step()
    with torch.no_grad():
        CHANGES[change](next(par.module.parameters()))
    manager.close()
    assert manager.steps() == [2]


def test_without_an_optimizer_save_waits_for_staging_itself(tmp_path, monkeypatch):
    stages = staging(monkeypatch)
    job = linear(1)
    with CheckpointManager(tmp_path, async_=True) as manager:
        save = threading.Thread(target=lambda: manager.save(1, job))
        save.start()
        assert stages.reached.wait(patient(60)) and save.is_alive()
        stages.open.set()
        save.join(patient(60))
        assert not save.is_alive() and stages.done == 1
        nn.init.zeros_(job.module.weight)
    again = linear(2)
    manager.restore(again)
    assert torch.equal(again.module.weight, linear(1).module.weight)


def test_host_memory_is_allocated_once_and_has_the_bytes_of_the_parts(tmp_path):
    job = linear(1)
    optimizer = stepped(job)
    with CheckpointManager(tmp_path, async_=True) as manager:
        manager.save(1, job, optimizer)
        manager.wait()
        kept = manager._stager._slabs[False].memory
        parts = sum(
            -(-math.prod(entry["shape"]) * getattr(torch, entry["dtype"]).itemsize // 64) * 64
            for entry in tensors_of(tmp_path)
        )
        assert parts <= kept.nbytes <= parts + 64 * 256 and not manager._stager._slabs[True].memory.nbytes
        manager.save(2, job, optimizer)
        manager.wait()
        assert manager._stager._slabs[False].memory is kept
        manager.save(3, linear(1), None)
        manager.wait()
        assert manager._stager._slabs[False].memory.nbytes < kept.nbytes, "memory of parts that are gone is given back"


def tensors_of(root: Path) -> list[Any]:
    return list(read_manifest(root / "step-00000001").tensors.values())


@pytest.mark.parametrize("where", ["step", "save", "close", "wait", "restore"])
def test_an_error_in_the_background_is_raised_where_the_run_comes_by_next(tmp_path, monkeypatch, where):
    job = linear(1)
    optimizer = stepped(job)
    manager = CheckpointManager(tmp_path, async_=True)
    manager.save(1, job, optimizer)
    manager.wait()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshpar.checkpoints.steps.saving.write_parts", fail)
    manager.save(2, job, optimizer)
    manager._background._thread.join()
    acts = {
        "step": optimizer.step,
        "save": lambda: manager.save(3, job, optimizer),
        "close": manager.close,
        "wait": manager.wait,
        "restore": lambda: manager.restore(job, optimizer),
    }
    message = r"a save in the background failed: writing step 2 failed on 1 of 1 ranks:\n.*No space left"
    with pytest.raises(CheckpointError, match=message):
        acts[where]()
    assert manager.steps() == [1] and not manager.ignored()
    monkeypatch.undo()
    manager.save(4, job, optimizer)
    manager.close()
    assert manager.steps() == [1, 4], "told once, and then all is well again"


def test_the_error_on_its_way_out_is_not_hidden(tmp_path, monkeypatch, caplog):
    job = linear(1)
    monkeypatch.setattr("meshpar.checkpoints.steps.saving.write_parts", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(KeyError):
        with CheckpointManager(tmp_path, async_=True) as manager:
            manager.save(1, job, stepped(job))
            raise KeyError
    assert "ZeroDivisionError" in caplog.text


def test_nothing_outlives_close(tmp_path):
    before, hooks = set(threading.enumerate()), dict(_global_optimizer_pre_hooks)
    job = linear(1)
    optimizer = stepped(job)
    manager = CheckpointManager(tmp_path, async_=True)
    manager.save(1, job, optimizer)
    manager.close()
    assert set(threading.enumerate()) == before and dict(_global_optimizer_pre_hooks) == hooks
    assert manager.steps() == [1] and not manager.ignored()


@on_ranks(4)
def test_training_that_went_on_during_a_save_resumes_bitwise_from_it(tmp_path):
    hybrid = "dp_shard=2,tp=2", [meshpar.TensorParallel(), meshpar.FullyShard()]
    par, optimizer = parallelized(*hybrid, seed=1)
    with CheckpointManager(tmp_path, async_=True, timeout_s=patient(30)) as manager:
        for step in range(1, 4):
            go_on(par, optimizer)
            manager.save(step, par, optimizer, extra={"step": step})
        want = go_on(par, optimizer)  # while the last save is under way
    values = {name: full(tensor) for name, tensor in par.module.state_dict().items()}
    par, optimizer = parallelized(*hybrid, seed=2)
    assert CheckpointManager(tmp_path).restore(par, optimizer, verify="full").step == 3
    assert go_on(par, optimizer) == want
    for name, tensor in par.module.state_dict().items():
        assert torch.equal(full(tensor), values[name]), name


@on_ranks(2)
def test_an_error_of_staging_on_one_rank_fails_all_at_once(tmp_path):
    with (
        pytest.MonkeyPatch.context() as patch,
        CheckpointManager(tmp_path, async_=True, timeout_s=patient(120)) as manager,
    ):
        job = linear(1)
        optimizer = stepped(job)
        manager.save(1, job, optimizer)
        manager.wait()
        if dist.get_rank() == 1:
            patch.setattr("meshpar.checkpoints.steps.background.Stager.stage", lambda *_: torch.empty(1 << 60))
        began = time.monotonic()
        manager.save(2, job, optimizer)
        with pytest.raises(CheckpointError, match=r"failed on 1 of 2 ranks:\n.*rank 1: RuntimeError: .*memory"):
            manager.wait()
        assert time.monotonic() - began < patient(60)
        dist.barrier()
        assert manager.steps() == [1] and not manager.ignored()
        dist.barrier()
        patch.undo()
        manager.save(3, job, optimizer)
    assert manager.steps() == [1, 3]


@on_ranks(2, fresh="leaves a collective of its checkpoints unfinished")
def test_ranks_that_missed_each_other_meet_again_at_the_next_save(tmp_path):
    root = tmp_path / "run"
    manager = saved(root, 1)
    impatient(manager)
    store = dist.FileStore(f"{root}.store", 2)
    if dist.get_rank() == 1:
        store.wait(["rank 0 has given up"])
    with pytest.raises(CheckpointError, match="lost the others, or waited longer than"):
        manager.save(2, linear(2))
    store.set("rank 0 has given up", "")
    dist.barrier()
    manager.save(2, linear(2))
    assert manager.steps() == [1, 2] and not [path for path in Path(root).iterdir() if "tmp" in path.name]
