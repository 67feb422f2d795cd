"""Memory that a parallel module lends comes back with its values, bit for bit."""

import gc
import time

import pytest
import torch
from torch import nn

import meshpar.forecasting.device as device
from meshpar import FullyShard, HybridShard, MeshparError, Plan, Replicate, TensorParallel
from meshpar.checkpoints import CheckpointManager
from meshpar.checkpoints.steps.background import Stager
from meshpar.passes.data.instead_of_fsdp2 import ReplicaShards
from meshpar.process.waiting import reads_of
from meshpar.tensors.placements import local_tensor
from meshpar.testing import on_ranks
from tests.accelerator.simulated import allocate, alone, install, simulated
from tests.support.models_for_parity import VOCAB, on_meta, transformer

PLANS = {
    "dp_shard=2": [FullyShard()],
    "tp=2": [TensorParallel()],
    "dp_replicate=2": [Replicate()],
    "dp_replicate=2,dp_shard=1": [HybridShard(optimizer="world")],
}


def step(par, optimizer, seed):
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(seed))
    par.module(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_a_lent_module_trains_on_as_if_nothing_had_been() -> None:
    for mesh, passes in PLANS.items():
        ends = []
        for lent in (False, True):
            torch.manual_seed(0)
            par = Plan(mesh, passes).apply(transformer(layers=1, tied=True))
            optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2)
            step(par, optimizer, 1)
            average = par.averaged(0.5)
            step(par, optimizer, 3)
            average.update()
            for _ in range(2 * lent):
                sizes = [local_tensor(parameter).untyped_storage().nbytes() for parameter in par.module.parameters()]
                averages = average.state_dict()["averages"].values()
                with par.offloaded(optimizer):
                    kept = [*averages, *(gathered.held() if (gathered := par.run.find(ReplicaShards)) else ())]
                    assert not any(local_tensor(tensor).untyped_storage().nbytes() for tensor in kept)
                    held = [local_tensor(parameter).untyped_storage() for parameter in par.module.parameters()]
                    states = [value for state in optimizer.state.values() for value in state.values()]
                    assert not any(storage.nbytes() for storage in held)
                    assert not any(local_tensor(state).untyped_storage().nbytes() for state in states if state.ndim)
                    with pytest.raises(MeshparError, match=r"inside of par\.offloaded"):
                        par.module(torch.zeros(1, 2, dtype=torch.long))
                assert sizes == [
                    local_tensor(parameter).untyped_storage().nbytes() for parameter in par.module.parameters()
                ]
            step(par, optimizer, 2)
            average.update()
            par.reshard()
            ends.append(shards(par.module.parameters(), average.state_dict()["averages"].values()))
        assert all(torch.equal(one, other) for one, other in zip(*ends))


def trained():
    """Return a small parallel module, its optimizer after a step, and an average."""
    torch.manual_seed(0)
    par = Plan("dp_shard=2", [FullyShard()]).apply(transformer(layers=1))
    optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2)
    step(par, optimizer, 1)
    return par, optimizer, par.averaged(0.5)


def shards(*held):
    """Return copies of this rank's parts."""
    return [local_tensor(tensor).detach().clone() for tensors in held for tensor in tensors]


@on_ranks(2)
def test_what_changes_parameters_waits_for_a_save_in_the_background(tmp_path):
    par, optimizer, average = trained()
    stage, state = Stager.stage, par.state_dict(full=True, everywhere=True)
    other = {name: value + 1 if value.is_floating_point() else value for name, value in state.items()}
    averaged = {"averages": {name: value + 2 for name, value in average.state_dict()["averages"].items()}, "updates": 3}

    def lends():
        with par.offloaded(optimizer):
            time.sleep(0.3)

    def restores():
        with CheckpointManager(tmp_path / "before") as another:
            another.restore(par, optimizer, averages={"ema": average})

    def updates():
        with torch.no_grad():
            average.updates = 1
            average.update()

    changes = {
        "offloaded": lends,
        "swapped": lambda: average.swapped().__enter__(),
        "load_state_dict": lambda: par.load_state_dict(other),
        "load_state_dict of the module": lambda: par.module.load_state_dict(dict(other)),
        "load_state_dict of a part": lambda: par.module.norm.load_state_dict(
            {"weight": par.module.norm.weight.detach() + 1}
        ),
        "restore": restores,
        "update of an average": updates,
        "load_state_dict of an average": lambda: average.load_state_dict(averaged),
    }
    with CheckpointManager(tmp_path / "before") as before:
        before.save(1, par, optimizer, averages={"ema": average})
    fresh = trained()  # into which each save is restored
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stager, "stage", lambda *given: time.sleep(0.15) or stage(*given))
        for name, change in changes.items():
            par, optimizer, average = trained()
            step(par, optimizer, 2)
            at_save = shards(par.module.parameters(), average.state_dict()["averages"].values())
            manager = CheckpointManager(tmp_path / name, async_=True)
            manager.save(1, par, optimizer, averages={"ema": average})
            change()
            manager.close()  # fails where the save has seen other values
            manager.restore(fresh[0], fresh[1], averages={"ema": fresh[2]})
            restored = shards(fresh[0].module.parameters(), fresh[2].state_dict()["averages"].values())
            assert all(map(torch.equal, at_save, restored)), name


@on_ranks(1, fresh="a wrong order ends the process by SIGSEGV")
def test_memory_is_lent_beside_a_save_in_the_background(tmp_path):
    par = Plan("", []).apply(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))))
    optimizer = torch.optim.AdamW(par.module.parameters())
    par.module(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path, async_=True, keep=1) as manager:
        for number in range(3):
            manager.save(number, par, optimizer)
            with par.offloaded(optimizer):
                for use in (optimizer.step, lambda: par.module.load_state_dict(par.module.state_dict())):
                    with pytest.raises(MeshparError, match=r"inside of par\.offloaded"):
                        use()
        before = shards(par.module.parameters())
        manager.restore(par, optimizer, 2)
    assert all(map(torch.equal, before, shards(par.module.parameters())))


@on_ranks(2)
def test_what_would_use_lent_memory_is_refused(tmp_path):
    (par, optimizer, average) = trained()
    plain = Plan("dp_replicate=2", [Replicate()]).apply(nn.Sequential(nn.Linear(4, 4)))
    ids = torch.zeros(1, 2, dtype=torch.long)
    state = par.state_dict(full=True, everywhere=True)
    uses = [
        lambda: par.module(ids),
        optimizer.step,
        average.update,
        lambda: average.swapped().__enter__(),
        average.state_dict,
        par.averaged,
        lambda: next(iter(par.published())),
        lambda: CheckpointManager(tmp_path).save(1, par, optimizer),
        lambda: par.load_state_dict(state),
        lambda: par.module.load_state_dict(state),
        lambda: par.offloaded().__enter__(),
        lambda: par.state_dict(full=True),
        par.state_dict,
        par.module.state_dict,
        par.module.get_submodule("layers.0").state_dict,
        lambda: par.module.get_submodule("layers.0")(torch.zeros(1, 2, 32)),
        par.check_replicas,
        lambda: par.clip_grad_norm_(1.0),
        lambda: plain.state_dict(full=True),
        lambda: plain.module.forward(torch.zeros(1, 4)),
        plain.module[0].state_dict,
    ]
    with par.offloaded(optimizer), plain.offloaded():
        for use in uses:
            with pytest.raises(
                MeshparError,
                match=r"inside of par\.offloaded\(\), where its parameters have no memory; call it after the block",
            ):
                use()
    step(par, optimizer, 2)
    CheckpointManager(tmp_path).save(1, par, optimizer)


@on_ranks(2)
def test_a_return_that_fails_keeps_the_only_copy_and_can_be_tried_again(tmp_path):
    par, optimizer, average = trained()
    before = shards(par.module.parameters(), (value["exp_avg"] for value in optimizer.state.values()))
    resize, left = torch.UntypedStorage.resize_, [3]

    def full(storage, size):
        left[0] -= bool(size)
        if size and left[0] < 0:
            raise RuntimeError("out of memory")
        return resize(storage, size)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(
            MeshparError,
            match=r"par\.offloaded\(\) cannot take its memory back, and [\d,]+ bytes stay in host memory \(out of memory\); "
            r"free the device's memory, then run `with par\.offloaded\(\): pass`, which tries again",
        ),
        par.offloaded(optimizer),
    ):
        patch.setattr(torch.UntypedStorage, "resize_", full)
    for use in (lambda: par.module(torch.zeros(1, 2, dtype=torch.long)), optimizer.step, average.update):
        with pytest.raises(MeshparError, match=r"after par\.offloaded\(\) had failed to take memory back"):
            use()
    with par.offloaded():
        pass
    after = shards(par.module.parameters(), (value["exp_avg"] for value in optimizer.state.values()))
    assert all(map(torch.equal, before, after))
    step(par, optimizer, 2)


@on_ranks(2)
def test_an_open_stream_of_weights_holds_off_who_changes_them():
    par, optimizer, average = trained()
    for number in (1, 2):
        stream = iter(par.published())
        next(stream)
        for change in (lambda: par.offloaded().__enter__(), lambda: average.swapped().__enter__()):
            with pytest.raises(
                MeshparError,
                match=r"version 1 of par\.published\(\) still reads; read it to its end, or close it, before",
            ):
                change()
        if number == 1:
            for _ in stream:
                pass
        else:
            stream.close()
        with par.offloaded(optimizer):
            pass


def test_a_wait_for_a_read_that_does_not_end_is_bounded_and_names_it(monkeypatch, capfd):
    monkeypatch.setattr("meshpar.process.waiting.READS_S", 0.2)
    monkeypatch.setattr("meshpar.process.waiting.EVERY_S", 0.0)
    module = nn.Linear(1, 1)
    end = reads_of(module).begin("the save of step 3 in the background", beside=True)
    with pytest.raises(MeshparError, match=r"swapped\(\) waited 0 s for the save of step 3 in the background"):
        reads_of(module).wait("swapped()")
    assert "meshpar: waiting for the save of step 3 in the background, which reads" in capfd.readouterr().err
    end()
    reads_of(module).wait("swapped()")


class Alive:
    """Counts the bytes of all tensors on the simulated device, whose storages have no memory to resize."""

    def __init__(self, patch):
        self.resized = {}
        patch.setattr(torch.UntypedStorage, "resize_", lambda *given: self.resize(*given))

    def resize(self, storage, size):
        self.resized[storage._cdata] = storage, size
        return storage

    def bytes(self):
        gc.collect()
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == device.NAME]
        storages = {one._cdata: one for one in (local_tensor(tensor).untyped_storage() for tensor in tensors)}
        return sum(self.resized.get(key, (storage, storage.nbytes()))[1] for key, storage in storages.items())


@alone
def test_no_byte_stays_on_the_device_but_of_others() -> None:
    install().empty_cache = lambda: None
    with simulated(4), pytest.MonkeyPatch.context() as patch:
        alive = Alive(patch)
        model = on_meta(transformer)
        passes = [HybridShard(optimizer="world")]
        par = allocate(Plan("dp_replicate=2,dp_shard=2", passes).apply(model, device_type=device.NAME))
        optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2)
        average = par.averaged(0.5)
        ids = torch.zeros(2, 8, dtype=torch.long, device=par.device)
        par.module(ids, labels=ids).loss.backward()
        optimizer.step()
        average.update()
        par.reshard()
        optimizer.zero_grad()
        other, gathered = torch.empty(1000, dtype=torch.uint8, device=par.device), par.run.find(ReplicaShards)
        before = alive.bytes()
        parameters = sum(local_tensor(parameter).nbytes for parameter in par.module.parameters())
        assert before >= 4 * parameters + sum(shard.nbytes for shard in gathered.held()) > 4 * parameters
        with par.offloaded(optimizer):
            assert alive.bytes() == other.nbytes + ids.nbytes
        assert alive.bytes() == before
