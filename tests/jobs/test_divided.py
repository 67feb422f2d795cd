"""Optimizer state that is divided over replicas: every step is one process's, and a lost replica takes nothing
along.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import replicas as lab
import torch
import torch.distributed as dist

from meshpar import HybridShard, Plan, PlanError, forecast
from meshpar._torch import BEFORE_2_13
from meshpar.checkpoints import CheckpointManager, DistributedCheckpoint, read_manifest
from meshpar.core.errors import LaunchError, MeshparError, ReplicaError
from meshpar.forecasting import Batch, Hardware
from meshpar.forecasting.hardware import RESERVED_RANGE
from meshpar.forecasting.search import search
from meshpar.launchers.commands.inspecting import check_recipe, describe_recipe
from meshpar.passes import Pass, Stage
from meshpar.placements import local_tensor
from meshpar.state.optimizer_shares import assigned, routes
from meshpar.testing import on_ranks, token_loss_sum
from meshpar.training import Batches, Lighthouse, Replicas, elastic
from meshpar.training.divided_optimizer import check_separable
from meshpar.training.optimizer import AdamWSettings, build_adamw
from meshpar.training.quorum import Member, Quorum
from tests.support.models_for_parity import transformer
from tests.support.patience import patient

needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="pip install 'meshpar[replicas]'")
ROWS = 47
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


class Divides(Pass):
    """A stranger's pass, by whose declaration replicas divide optimizer state."""

    name, stage, divides_optimizer = "Divides", Stage.DATA, True

    def apply(self, module, layout, mesh):
        pass


class Numbers:
    """Sample i is i."""

    fingerprint = "numbers"

    def __len__(self):
        return ROWS

    def __getitems__(self, indices):
        return {"labels": torch.tensor(indices)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = torch.nn.Embedding(ROWS, 4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.seldom = torch.nn.Linear(8, 8)  # a replica may have no gradient of it
        self.inner = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        self.double()

    def forward(self, rows):
        hidden = self.up(self.table(rows)).tanh()
        hidden = torch.cat([hidden[rows < 40], *([self.seldom(hidden[rows >= 40])] if (rows >= 40).any() else [])])
        return self.down(self.inner(hidden).tanh()).square().sum()


class Job:
    """Some replicas in this process, each in a thread, and what they counted."""

    def __init__(self, count, optimizer="AdamW", copies=2, frozen=""):
        self.frozen, self.patience_s = frozen, patient(4.0)
        self.lighthouse = Lighthouse(patience_s=self.patience_s, dead_s=patient(6.0))
        self.make, self.copies, self.count, self.counted = OPTIMIZERS[optimizer], copies, count, []
        self.replicas = [self.new(str(number)) for number in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for replica in self.replicas:
            replica.close()
        self.lighthouse.close()

    def net(self):
        net = Net()
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(not self.frozen or not name.startswith(self.frozen))
        return net

    def new(self, name):
        par = Plan("dp_shard=1", [Divides()]).apply(self.net())
        optimizer = self.make(par.module.parameters())
        data, address = Batches(Numbers(), micro_batch=3, seed=0), f"http://127.0.0.1:{self.lighthouse.port}"
        options = {
            "lighthouse": address,
            "name": name,
            "replicas": self.count,
            "patience_s": self.patience_s,
            "optimizer_copies": self.copies,
        }
        return Replicas(par, optimizer, data, **options)

    def all(self, act, replicas=None):
        """Run a method of every replica at once, and return the results, or raise what the first one raised."""
        chosen = self.replicas if replicas is None else replicas
        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(act, chosen))

    def errors(self, act):
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            return [future.exception() for future in [pool.submit(act, replica) for replica in self.replicas]]

    def reduced(self, replica):
        """Go through a step up to the sum that counts."""
        (batch,) = replica.begin()
        rows = batch["labels"][batch["labels"] >= 0]
        (replica.par.module(rows) / max(1, len(rows))).backward()
        return rows.tolist(), replica.reduce(len(rows)) is not None

    def stepped(self, replica):
        rows, counts = self.reduced(replica)
        replica.optimizer.step()
        replica.optimizer.zero_grad()
        return rows, counts

    def train(self, steps):
        """Make as many steps that count."""
        while steps:
            found = self.all(self.stepped)
            assert len({counts for _, counts in found}) == 1
            if found[0][1]:
                self.counted.append([row for rows, _ in found for row in rows])
                steps -= 1

    def check(self):
        """Compare all replicas with one process on the samples that counted."""
        net = self.net()
        optimizer = self.make(net.parameters())
        for rows in self.counted:
            (net(torch.tensor(rows)) / len(rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for replica in self.replicas:
            for (name, one), other in zip(net.named_parameters(), replica.par.module.parameters(), strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-12), name
        seen = set()
        for replica in self.replicas:
            for one, other in zip(net.parameters(), replica.par.module.parameters(), strict=True):
                state = replica.optimizer.state.get(other, {})
                seen |= {id(one)} if state else set()
                for key, value in state.items():
                    assert value is optimizer.state[one][key] or torch.allclose(
                        value, optimizer.state[one][key], rtol=0, atol=1e-12
                    ), key
        assert len(seen) == sum(parameter.requires_grad for parameter in net.parameters())

    def lose(self, *numbers):
        for replica in [self.replicas[number] for number in numbers]:
            replica.close()
        self.replicas = [replica for number, replica in enumerate(self.replicas) if number not in numbers]


def nbytes(replica):
    return sum(
        value.nbytes for state in replica.optimizer.state.values() for key, value in state.items() if key != "step"
    )


@pytest.mark.parametrize(("count", "copies"), [(2, 1), (3, 1), (3, 2), (5, 2), (8, 3), (2, 5)])
def test_state_is_divided_evenly_and_moves_little(count, copies):
    draw = random.Random(count)
    sizes = [draw.choice([10, 100, 1000, 4000]) for _ in range(80)]
    everything = (1 << len(sizes)) - 1

    def load(share):
        return sum(size for number, size in enumerate(sizes) if share >> number & 1)

    found = assigned(sizes, [everything] * count, copies)
    kept = min(copies, count)
    assert all(sum(share >> number & 1 for share in found) == kept for number in range(len(sizes)))
    assert max(map(load, found)) <= 1.02 * kept * sum(sizes) / count
    joined = assigned(sizes, [*found, 0], copies)
    assert max(map(load, joined)) <= 1.1 * min(copies, count + 1) * sum(sizes) / (count + 1)
    moved = sum(sizes[number] for numbers in routes(sizes, [*found, 0], joined).values() for number in numbers)
    assert moved <= 1.2 * load(joined[-1])
    assert assigned(sizes, found, copies) == found


def test_values_come_from_the_holder_with_the_least_to_send():
    assert routes([4, 4, 2], [0b111, 0b111, 0], [0b111] * 3) == {(0, 2): [0, 2], (1, 2): [1]}


def member(name, step, holds, **options):
    return Member(
        name=name,
        store="",
        step=step,
        sum=options.pop("sum", (1, 0)),
        waits=options.pop("waits", False),
        failures=0,
        holds=holds,
        **options,
    )


def test_a_state_counts_if_its_members_hold_all_of_it():
    """A sum that only some have got counts for nothing if these cannot make its step; a state that cannot be made
    whole is behind.
    """
    summed, waits = member("a", 6, 0b011, phase="summed", sum=(2, 0)), member("b", 5, 0b110, waits=True)
    quorum = Quorum(number=2, members=(summed, waits), whole=0b111)
    assert not quorum.covered and not quorum.lost and quorum.waiting == ()
    both = dataclasses.replace(
        quorum, members=(dataclasses.replace(summed, step=5, sum=(1, 0), phase="", waits=True), waits)
    )
    assert both.covered and both.ready == both.members == both.waiting
    assert dataclasses.replace(both, members=both.members[:1]).lost
    old, new = member("a", 9, 0b011), (member("b", 4, 0b111), member("c", 4, 0b111))
    assert Quorum(number=3, members=(old, *new), whole=0b111).newest == new
    late = Quorum(number=4, members=(member("a", 5, 0b011, waits=True), member("b", 5, 0b111)), whole=0b111)
    assert late.waiting == () and late.ready == late.members  # all share the samples of the step anew
    assert (
        Quorum(number=1, members=(old, *new)).newest == (old,) and Quorum(number=1, members=(summed,)).covered
    )  # nothing is divided


class Coupled(torch.optim.SGD):
    def step(self, closure=None):
        trained = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        norm = sum(parameter.grad.norm() for parameter in trained)
        for parameter in trained:
            parameter.data.sub_(parameter.grad / norm)


def test_an_optimizer_that_couples_parameters_is_refused():
    net = Net()
    for name in (
        "AdamW",
        "SGD",
        "Adam",
        "RMSprop",
        "NAdam",
        "RAdam",
        "Adadelta",
        "Adamax",
        "ASGD",
        "Rprop",
        "Adafactor",
    ):
        check_separable(getattr(torch.optim, name)(net.parameters(), lr=1e-3))
    with pytest.raises(MeshparError, match="Adagrad cannot be tried") if BEFORE_2_13 else nullcontext():
        check_separable(torch.optim.Adagrad(net.parameters(), lr=1e-3))
    scheduled = torch.optim.SGD(net.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    check_separable(scheduled)
    assert all(map(torch.equal, before, net.parameters())) and not scheduled.state
    with pytest.raises(MeshparError, match="step that Coupled makes of one parameter depends on others"):
        check_separable(Coupled(net.parameters(), lr=1e-3))
    with pytest.raises(MeshparError, match=r"LBFGS cannot be tried .*closure"):
        check_separable(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(MeshparError, match="trains no parameter"):
        check_separable(torch.optim.SGD([torch.zeros(2)]))


@needs_torchft
@on_ranks(1)
@pytest.mark.parametrize(
    ("count", "copies", "optimizer"),
    [(2, 2, "AdamW"), (2, 1, "SGD"), (3, 2, "AdamW"), (3, 2, "SGD"), (3, 1, "Adafactor")],
)
def test_divided_replicas_match_one_process(count, copies, optimizer):
    with Job(count, optimizer, copies) as job:
        job.train(5)
        job.check()
        if optimizer != "Adafactor":
            whole = sum(parameter.nbytes for parameter in Net().parameters()) * (2 if optimizer == "AdamW" else 1)
            assert sum(map(nbytes, job.replicas)) == copies * whole
            assert (
                max(map(nbytes, job.replicas)) <= 1.15 * whole * copies / count
            )  # whole parameters, of which the largest is 40%


@needs_torchft
@on_ranks(1)
def test_a_step_that_all_skip_changes_nothing():
    """As after an overflow in float16; and parameters that are not trained travel to nobody."""
    with Job(3, frozen="table") as job:
        job.train(2)
        job.all(job.reduced)
        for replica in job.replicas:
            replica.optimizer.zero_grad()
        job.train(2)
        job.check()
        assert {replica.optimizer_sent for replica in job.replicas} <= set(
            range(sum(parameter.nbytes for parameter in Net().parameters()) // 3)
        )


@needs_torchft
@on_ranks(1)
@pytest.mark.parametrize("where", ["forward", "before the exchange", "in the exchange", "after the exchange"])
def test_a_replica_that_is_lost_takes_no_state_along(where):
    """The others complete the step, hold its state twice again, and a new replica gets its share of it."""
    with Job(3) as job:
        job.train(2)
        victim = job.replicas[2]

        def step(replica):
            if replica is not victim:
                return job.stepped(replica)
            if where == "forward":
                replica.begin()
                replica.close()
                return [], False
            exchange, divided = replica._divided.exchange, replica._divided

            def breaks(*args):
                if where == "after the exchange":
                    exchange(*args)
                replica.close()
                raise ReplicaError("lost")

            divided.exchange = breaks
            found = job.reduced(replica)
            if where == "before the exchange":
                replica.close()
            else:
                with pytest.raises(ReplicaError, match="lost"):
                    replica.optimizer.step()
            return found

        found = job.all(step)
        assert found[0][1] and found[1][1]
        job.counted.append([row for rows, counts in found if counts for row in rows])
        job.lose(2)
        job.check()
        job.train(2)
        job.check()
        assert all(replica.optimizer.state.keys() == set(replica.par.module.parameters()) for replica in job.replicas)
        job.replicas.append(job.new("3"))
        *found, joined = job.all(lambda replica: replica.join() if replica is job.replicas[2] else job.stepped(replica))
        assert joined
        job.counted.append([row for rows, _ in found for row in rows])
        job.train(2)
        job.check()
        assert [replica.slots for replica in job.replicas] == [3, 3, 3]
        assert sum(map(nbytes, job.replicas)) == 4 * sum(parameter.nbytes for parameter in Net().parameters())


@needs_torchft
@on_ranks(1)
@pytest.mark.parametrize(("copies", "lost"), [(1, 1), (2, 2)])
def test_state_whose_copies_are_all_lost_ends_the_job(copies, lost):
    with Job(3, copies=copies) as job:
        job.train(2)
        job.lose(*range(3 - lost, 3))
        for error in job.errors(job.stepped):
            assert isinstance(error, ReplicaError) and "was lost with the replicas that held it" in str(error)


@needs_torchft
@on_ranks(1)
def test_a_checkpoint_has_all_optimizer_state(tmp_path):
    """It is whole while one replica saves it, loads into one process bitwise, and back into replicas, which go on as
    one process does.
    """
    with Job(3) as job:
        job.train(3)
        manager = CheckpointManager(tmp_path)
        known = {}
        for replica in job.replicas:
            for number, parameter in enumerate(replica.par.module.parameters()):
                for key, value in replica.optimizer.state.get(parameter, {}).items():
                    assert torch.equal(known.setdefault((number, key), value.clone()), value)

        def save(replica):
            before = nbytes(replica)
            with replica.saving() as writes:
                if writes:
                    manager.save(3, replica.par, replica.optimizer, {"data": replica.data.state_dict()})
            assert nbytes(replica) == before
            return writes

        assert sorted(job.all(save)) == [False, False, True]
        with pytest.raises(MeshparError, match=r"inside of `with replicas\.saving"):
            manager.save(4, job.replicas[0].par, job.replicas[0].optimizer)
        with pytest.raises(MeshparError, match=r"inside of `with replicas\.saving"):
            job.replicas[0].optimizer.state_dict()
        par = Plan("dp_shard=1", []).apply(Net())
        optimizer = job.make(par.module.parameters())
        manager.restore(par, optimizer)
        for number, parameter in enumerate(par.module.parameters()):
            for key, value in optimizer.state[parameter].items():
                assert torch.equal(value, known[number, key])
        counted = job.counted
    with Job(3) as job:
        for replica in job.replicas:
            replica.data.load_state_dict(manager.restore(replica.par, replica.optimizer).extra["data"])
            replica.step = 3
        job.counted = counted
        job.train(2)
        job.check()
        assert sum(map(nbytes, job.replicas)) == 4 * sum(parameter.nbytes for parameter in Net().parameters())


def saved(job, manager, step):
    """Save a step of all replicas."""

    def save(replica):
        with replica.saving() as writes:
            if writes:
                manager.save(step, replica.par, replica.optimizer, {"data": replica.data.state_dict(), "step": step})

    job.all(save)


def restored(job, manager, **options):
    """Let all replicas find that nobody has a state, and restore; return the bytes of optimizer state that each has
    read.
    """
    assert job.all(Replicas.join) == [False] * len(job.replicas)
    found, inner = [], DistributedCheckpoint.read

    def read(source, name, index, out):
        found[-1] += out.nbytes if name.startswith("optimizer.") and out.ndim else 0
        inner(source, name, index, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedCheckpoint, "read", read)
        for replica in job.replicas:
            found.append(0)
            extra = manager.restore(replica.par, replica.optimizer, **options).extra
            replica.data.load_state_dict(extra["data"])
            replica.step = extra["step"]
    return found


@needs_torchft
@on_ranks(1)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_restore_reads_the_share_that_a_replica_holds(tmp_path, copies):
    manager, whole = CheckpointManager(tmp_path), 2 * sum(parameter.nbytes for parameter in Net().parameters())
    with Job(3, copies=copies) as job:
        job.train(3)
        saved(job, manager, 3)
        counted = job.counted
    with Job(3, copies=copies) as job:
        read = restored(job, manager)
        assert (
            read == list(map(nbytes, job.replicas))
            and sum(read) == copies * whole
            and max(read) <= 1.15 * whole * copies / 3
        )
        with pytest.raises(MeshparError, match="other replicas hold a part"):
            manager.save(4, job.replicas[0].par, job.replicas[0].optimizer)
        job.counted = counted
        job.train(2)
        job.check()
        assert read == list(map(nbytes, job.replicas)), "nothing had to move"
    with Job(3, copies=copies) as job, pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "_MOST_S", patient(1.0))
        job.lose(2)
        assert restored(job, manager) == [whole] * 2, "a replica that is awaited may come and read no share"


@needs_torchft
@on_ranks(1)
def test_replicas_that_have_restored_wait_for_the_share_of_one_that_starts_again(tmp_path):
    """The others need what it is about to read; if they ended, it would miss theirs in turn, and so on for ever."""
    manager = CheckpointManager(tmp_path)
    with Job(3, copies=1) as job:
        job.train(2)
        saved(job, manager, 2)
        counted = job.counted
    with Job(3, copies=1) as job:
        restored(job, manager)
        job.lose(2)
        again = job.new("2")
        job.replicas.append(again)

        def enter(replica):
            if replica is again:
                time.sleep(1)
                assert not replica.join()
                time.sleep(1)
                replica.data.load_state_dict(manager.restore(replica.par, replica.optimizer).extra["data"])
                replica.step = 2
            return job.stepped(replica)

        found = job.all(enter)
        job.counted = [*counted, [row for rows, counts in found if counts for row in rows]]
        job.train(1)
        job.check()


@needs_torchft
@on_ranks(1)
def test_replicas_that_fall_back_read_all_so_that_the_others_can_join_them(tmp_path):
    """A part of the newest step is damaged, which its two holders see and the third does not: the older step is the
    job's.
    """
    manager = CheckpointManager(tmp_path)
    with Job(3) as job:
        job.train(2)
        saved(job, manager, 2)
        counted = list(job.counted)
        job.train(2)
        saved(job, manager, 4)
    manifest = read_manifest(tmp_path / "step-00000004")
    ((_, _, file, position, length),) = manifest.tensors["optimizer.down.weight.exp_avg"]["chunks"]
    with (manifest.files_in(tmp_path / "step-00000004") / file).open("r+b") as stream:
        stream.seek(position + length // 2)
        (value,) = stream.read(1)
        stream.seek(position + length // 2)
        stream.write(bytes([value ^ 1]))
    with Job(3) as job, pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "_MOST_S", patient(3.0))  # the two wait for the third
        whole = 2 * sum(parameter.nbytes for parameter in Net().parameters())
        restored(job, manager, fallback=True)
        assert sorted(replica.step for replica in job.replicas) == [2, 2, 4]
        ahead = next(number for number, replica in enumerate(job.replicas) if replica.step == 4)
        assert [nbytes(replica) == whole for replica in job.replicas] == [replica.step == 2 for replica in job.replicas]

        def enter(replica):
            if replica is not job.replicas[ahead]:
                return job.stepped(replica)
            with pytest.raises(ReplicaError, match="the other replicas have resumed from a checkpoint before step 4"):
                replica.begin()
            replica.close()
            return [], False

        found = job.all(enter)
        job.counted = [*counted, [row for rows, counts in found if counts for row in rows]]
        job.lose(ahead)
        job.train(1)
        job.check()


@needs_torchft
@on_ranks(1)
def test_what_would_differ_from_one_process_is_refused():
    with Job(2, copies=1) as job:
        job.train(1)

        def wrong(replica):
            replica.par.module(torch.tensor([1])).backward()
            with pytest.raises(MeshparError, match="gradients that the replicas have not added up"):
                replica.optimizer.step()
            with pytest.raises(MeshparError, match="got a closure"):
                replica.optimizer.step(lambda: 0.0)
            replica.optimizer.zero_grad()
            late = torch.nn.Parameter(torch.zeros(2))
            replica.optimizer.add_param_group({"params": [late]})
            late.grad = torch.ones(2)
            with pytest.raises(MeshparError, match=r"trains 1 parameters that it did not .*\(2,\)"):
                replica.optimizer.step()

        for replica in job.replicas:  # not at once: a step unwinds what any backward of this process has left
            wrong(replica)
        with pytest.raises(PlanError, match="optimizer_copies=0"):
            Replicas(job.replicas[0].par, job.replicas[0].optimizer, job.replicas[0].data, optimizer_copies=0)


@needs_torchft
@on_ranks(1)
def test_replicas_that_save_together_stop_together():
    """All are asked to within a step: they stop after the same one. One that is asked alone leaves without a save,
    and the others go on.
    """
    with Job(2) as job:
        stops = []
        for asked in ([True, False], [True, True], [True, True]):
            job.train(1)
            stops.append([replica.stops(asks) for replica, asks in zip(job.replicas, asked)])
        assert stops == [[False, False], [False, False], [True, True]]
    with Job(2) as job:
        stops = []
        for _ in range(3):
            job.train(1)
            stops.append([replica.stops(asks) for replica, asks in zip(job.replicas, (True, False))])
        assert stops == [[False, False], [False, False], [True, False]]
        with job.replicas[0].saving() as writes:
            assert not writes


def adamw(module):
    return build_adamw(module, AdamWSettings(lr=1e-3))


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)


def uneven(optimizer="world", layers=2):
    """Return the plan of a replica of two ranks, and a model that they cannot share evenly."""
    with torch.device("meta"):
        return Plan("dp_replicate=1,dp_shard=2", [HybridShard(optimizer=optimizer)]), transformer(
            vocab_size=97, layers=layers
        )


def bytes_of(tensors):
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


@on_ranks(6, fresh="opens other process groups")
def note_bytes(folder, make, copies, port):
    """Train three replicas of two ranks, and write down what each rank holds and exchanges."""
    rank = dist.get_rank()
    replica, inside = divmod(rank, 2)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store-{replica}", 2), rank=inside, world_size=2)
    plan, module = uneven()
    par = plan.apply(module).materialize(seed=0)
    optimizer = make(par.module)
    data = Batches(lab.Rows(32), micro_batch=2, data_rank=par.data_rank, data_size=par.data_size, seed=0)
    options = {
        "lighthouse": f"http://127.0.0.1:{port}",
        "name": str(replica),
        "replicas": 3,
        "optimizer_copies": copies,
    }
    with Replicas(par, optimizer, data, **options) as replicas:
        for _ in range(2):
            (batch,) = replicas.begin()
            loss_sum, tokens = token_loss_sum(par.module, batch)
            (loss_sum * par.token_scale(tokens)).backward()
            replicas.reduce(tokens)
            optimizer.step()
            gradients = bytes_of(parameter.grad for parameter in par.module.parameters())
            optimizer.zero_grad()
        parameters, sent = bytes_of(par.module.parameters()), replicas.optimizer_sent
        got = bytes_of(parameter for parameter in par.module.parameters() if not optimizer.state.get(parameter))
        state = [value for states in optimizer.state.values() for value in states.values() if value.ndim]
        held = {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": bytes_of(state),
            "exchanged": max(sent, got),
        }
    Path(folder, f"held-{rank}").write_text(json.dumps(held))


@needs_torchft
@pytest.mark.parametrize(("make", "copies"), [(adamw, 2), (adamw, 1), (sgd, 2)])
def test_ranks_hold_and_exchange_the_bytes_that_were_forecast(tmp_path, make, copies):
    """Three replicas of two ranks: describe and the forecast tell what the fullest rank holds, to the byte."""
    lighthouse = Lighthouse(patience_s=20.0)
    try:
        note_bytes(str(tmp_path), make, copies, lighthouse.port)
    finally:
        lighthouse.close()
    ranks = [json.loads(path.read_text()) for path in tmp_path.glob("held-*")]
    fullest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    plan, module = uneven()
    made = forecast(
        plan, module, Batch(sequence=8), hardware="h100", replicas=3, optimizer_copies=copies, optimizer=make
    )
    sent = [collective.size for _, collective in made.trace.collectives() if collective.kind == "send"]
    assert dict(made.trace.exact) | {"exchanged": sum(sent)} == fullest | {"buffers": 0}
    assert made.world_size == 6 and dict(made.mesh.axes) == {"dp_replicate": 3, "dp_shard": 2}
    summed = [
        collective.size
        for _, collective in made.trace.collectives()
        if (collective.axis, collective.ranks, collective.kind) == ("dp_replicate", 3, "all_reduce")
    ]
    assert sum(summed) == fullest["gradients"]
    if make is adamw:
        description = plan.describe(module, replicas=3, optimizer_copies=copies)
        assert [description.parameter_bytes, description.gradient_bytes, description.optimizer_bytes] == list(
            fullest.values()
        )[:3]
        assert f"the largest of 3 replicas' shares, {copies} of which hold" in str(description)


def test_a_search_lets_replicas_divide_state_that_does_not_fit():
    """Replicas inside of nodes; the optimizer is divided where a whole one does not fit, and the best of these is
    replayed.
    """
    model = uneven(layers=5)[1]
    node = Hardware.load("h100")
    node = dataclasses.replace(
        node, node=2, memory=node.reserved + RESERVED_RANGE[0] * 580_000
    )  # a replica with all state takes 582,144 bytes at least
    asked = {"recompute": ("none",), "micro_batches": (1,), "optimizer_copies": 2}
    found = search(model, model.meshpar_layout(), Batch(sequence=8), node, 6, top=1, **asked)
    assert all(
        candidate.settings.world and candidate.settings.replicas > 1 and candidate.settings.job().size <= 2
        for candidate in found.fitting
    )
    (best,), settings = found.best, found.fitting[0].settings
    assert best.world_size == 6 and best.mesh.axes == settings.mesh().axes
    description = Plan(settings.job(), settings.passes()).describe(uneven(layers=5)[1], replicas=settings.replicas)
    assert best.trace.exact["optimizer"] == description.optimizer_bytes < 2 * description.parameter_bytes
    with pytest.raises(MeshparError, match="2 ranks are one replica, in nodes of 2"):
        search(model, model.meshpar_layout(), Batch(sequence=8), node, 2, **asked)


def test_undivided_replicas_hold_all_optimizer_state():
    plan, module = uneven("replica")
    description, one = (plan.describe(uneven()[1], replicas=count) for count in (3, 1))
    assert description.optimizer_bytes == one.optimizer_bytes and "replicas" not in str(description)
    with pytest.raises(PlanError, match="dp_replicate=2 inside of one replica"):
        Plan("dp_replicate=2,dp_shard=2", [HybridShard()]).describe(module, replicas=2)


RECIPE = """
mesh: dp_replicate=3,dp_shard=2
passes: [{HybridShard: {optimizer: world}}]
device: cpu
model: {dim: 32, layers: 2, heads: 2, hidden: 48, max_positions: 64}
data: {source: stdlib, sequence_length: 64, micro_batch: 2}
training: {steps: 10}
"""


def test_the_commands_know_elastic_replicas_of_a_recipe(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(RECIPE)
    output = describe_recipe(str(path), ["optimizer_copies=1"], elastic="replicas")
    assert "the largest of 3 replicas' shares, 1 of which hold" in output and "dp_replicate=1,dp_shard=2" in output
    assert "dp_replicate+dp_shard" in describe_recipe(str(path)), "one job splits parameters over both axes"
    assert "fits 3 replicas of 2 ranks" in check_recipe(str(path), elastic="replicas")
    coupled = ["optimizer={class: tests.jobs.test_divided.Coupled, lr: 1e-3}"]
    for mode in (None, "replicas"):
        with pytest.raises(PlanError, match="step of Coupled on a whole tensor differs from its step on two parts"):
            check_recipe(str(path), coupled, elastic=mode, trust=True)
    with pytest.raises(PlanError, match="--elastic=replicas reads data in the training process"):
        check_recipe(str(path), ["data.workers=1"], elastic="replicas")
    with pytest.raises(LaunchError, match="has one replica"):
        check_recipe(str(path), ["mesh=dp_shard=2", "passes=[FullyShard]"], elastic="replicas")
    with pytest.raises(LaunchError, match="expected replicas"):
        describe_recipe(str(path), elastic="nodes")


FAULTS = 3


@needs_torchft
@pytest.mark.timeout(900)
@pytest.mark.parametrize("copies", [2, pytest.param(1, marks=pytest.mark.long)])
def test_faults_at_random_instants_leave_divided_state_exact(tmp_path, copies):
    found = lab.run(tmp_path, faults=FAULTS, seed=5, replicas=3, ranks=1, optimizer="world", copies=copies)
    assert found["steps"] > FAULTS
