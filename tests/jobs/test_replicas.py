"""Replicas are lost and come back: each token counts once; ``benchmarks/replicas.py`` draws more faults."""

import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import replicas as lab
import torch
import torch.distributed as dist

from meshpar import (
    FullyShard,
    HybridShard,
    LaunchError,
    MeshError,
    MeshSpec,
    PipelineParallel,
    Plan,
    PlanError,
    forecast,
)
from meshpar.checkpoints import read_manifest
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, ReplicaError
from meshpar.forecasting import Batch, Hardware
from meshpar.forecasting.search import search
from meshpar.launchers.agent.failures import exit_code
from meshpar.launchers.agent.replicas import _Replica, _serve_lighthouse, divide_replicas
from meshpar.launchers.commands.inspecting import check_recipe, describe_recipe
from meshpar.launchers.commands.launch import run_work as run
from meshpar.launchers.commands.train import division_of
from meshpar.launchers.jobs import checks
from meshpar.launchers.jobs.reports import Elected
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.testing import on_ranks
from meshpar.training import Batches, CausalLM, Lighthouse, LoaderSettings, Replicas, Schedule, Trainer, TrainSettings
from meshpar.training import lighthouse as rendezvous
from meshpar.training.metrics import JsonLines
from meshpar.training.order import Interleave
from meshpar.training.quorum import Quorum, QuorumMember
from meshpar.training.stop import StopRequest
from tests.support import patience
from tests.support.hosts import Hosts, Unavailable
from tests.support.models_for_parity import transformer
from tests.support.object_store import free_ports
from tests.support.tiers import daily

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="pip install 'meshpar[replicas]'")


class Numbers:
    """Sample i is i; ``FILLER`` is -1."""

    fingerprint = "numbers"

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitems__(self, indices):
        return {"labels": torch.tensor(indices)}


def batches(count=23, **options):
    return Batches(Numbers(count), micro_batch=2, **options)


def rows(micro_batches):
    return [int(row) for batch in micro_batches for row in batch["labels"] if row >= 0]


def test_samples_of_a_lost_replica_come_again_and_each_counts_once_an_epoch():
    """A plain job finishes the epoch."""
    data, seen = batches(47, accumulate=2), []
    for flags in ([True, True], [True, False, True], [False], [True, True, False]):
        shares = [rows(data.share(number, len(flags))) for number in range(len(flags))]
        seen += [row for share, counted in zip(shares, flags) if counted for row in share]
        data.count(flags)
    position = json.loads(json.dumps(data.state_dict()))
    assert position["returned"] and data.epoch == 0
    plain = [batches(47, data_rank=rank, data_size=2) for rank in range(2)]
    for record in plain:
        record.load_state_dict(position)
        seen += [row for step in record.one_epoch() for row in rows(step)]
    assert sorted(seen) == list(range(47))
    assert plain[0].position() == {"epoch": 1, "samples": 0}


def test_the_whole_order_is_the_plain_jobs_where_nothing_is_lost():
    data, plain = batches(), [batches(data_rank=rank, data_size=3) for rank in range(3)]
    for steps in zip(*(record.one_epoch() for record in plain)):
        assert [rows(data.share(number, 3)) for number in range(3)] == [rows(step) for step in steps]
        data.count([True] * 3)
    assert data.epoch == 1


def member(name, step, sum, *, waits=False, failures=0):
    return QuorumMember(name=name, store="", step=step, sum=sum, waits=waits, failures=failures)


def test_a_quorum_goes_on_from_the_newest_sum():
    """Of two steps of one number that of the later group counts."""
    a, b, c = member("a", 5, (1, 0)), member("b", 5, (2, 0)), member("c", 4, (1, 0), waits=True)
    quorum = Quorum(number=3, members=(a, b, c))
    assert quorum.best == b.state and quorum.ready == (a, b, c)  # c was left behind: it copies, and completes nothing
    waiting = (member("a", 4, (1, 0), waits=True, failures=2), member("b", 4, (1, 0)), member("c", -1, (0, 0)))
    quorum = Quorum(number=3, members=waiting)
    assert quorum.ready == waiting[:1] and quorum.key == (3, 2)  # a alone has gradients of this step
    older = QuorumMember(**{**dataclasses.asdict(b), "name": "0", "life": 4})
    assert Quorum(number=3, members=(older, a, b)).leader == older


@on_ranks(2)
def test_what_cannot_be_lost_is_refused_by_name():
    with torch.device("meta"):
        module = lab.model()
    module.norm = torch.nn.Sequential(module.norm, torch.nn.BatchNorm1d(4, device="meta"))
    par = Plan("dp_replicate=2,dp_shard=1", [HybridShard(whole=("norm.1.*",))]).apply(module)
    optimizer = torch.optim.SGD(par.module.parameters())
    mixed = Numbers(8)
    mixed.mix = Interleave(sizes=(4, 4), weights=(1.0, 1.0), epochs=(1, 1))
    data = batches(loader=LoaderSettings(workers=1)), Batches(mixed, micro_batch=1), batches(grow={4: 8})
    message = ""
    for override in data:
        with pytest.raises(PlanError) as raised:
            Replicas(par, optimizer, override)
        message += str(raised.value)
    norm = "norm.1 (BatchNorm1d) uses statistics of the whole batch"
    for reason in ("dp_replicate=2 inside", norm, "workers=1", "a mix of sources", "the batch grows"):
        assert reason in message
    par = Plan("dp_replicate=1,dp_shard=2", [HybridShard(optimizer="world")]).apply(lab.model())
    with pytest.raises(PlanError, match=r"its whole state; use HybridShard\(optimizer='replica'\), with more shards"):
        Replicas(par, optimizer, batches())
    par = Plan("dp_replicate=1,dp_shard=2", [HybridShard(optimizer="replica")]).apply(lab.model())
    with pytest.raises(ReplicaError, match="meshpar run --elastic=replicas"):
        Replicas(par, optimizer, batches())


def test_a_job_is_divided_into_replicas():
    found = divide_replicas(MeshSpec("dp_replicate=4,dp_shard=2"), 2, 1)
    assert (found.count, list(found.here), found.ranks, str(found.mesh)) == (4, [2, 3], 2, "dp_replicate=1,dp_shard=2")
    for node, (replica, place) in enumerate(itertools.product(range(2), range(3))):
        found = divide_replicas(MeshSpec("dp_replicate=2,dp_shard=6"), 6, node)
        assert (list(found.here), found.node, found.nodes, found.ranks, found.ranks_here) == ([replica], place, 3, 6, 2)
    for replicas, nodes in ((3, 2), (4, 6), (2, 3)):
        message = f"{replicas} replicas on {nodes} nodes; expected whole .* a multiple or a divisor of {nodes}"
        with pytest.raises(LaunchError, match=message):
            divide_replicas(MeshSpec(f"dp_replicate={replicas},dp_shard=2"), nodes, 0)
    assert exit_code(ReplicaError("")) == 75


def test_replicas_of_one_node_have_devices_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    division, devices = divide_replicas(MeshSpec("dp_replicate=4,dp_shard=4"), 2, 1), []
    for number in division.here:
        made = _Replica(number, division, tmp_path, "", tmp_path, 0, tmp_path)
        for rank in range(division.ranks_here):
            for name, value in {**made._environment, "LOCAL_RANK": str(rank)}.items():
                monkeypatch.setenv(name, value)
            devices.append(runtime.device("cuda").index)
    assert devices == list(range(8))


def test_all_ranks_of_a_node_need_a_device(tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(lab.RECIPE)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(checks, "default_device_type", lambda: "cuda")
    with pytest.raises(PlanError, match="4 ranks need a cuda device each, and this machine has 3"):
        words = ["device=cuda", "mesh=dp_replicate=2,dp_shard=2"]
        run(str(tmp_path / "job.yaml"), words, {"nproc": "4"}, elastic="replicas")


def test_replicas_of_an_open_mesh_are_over_the_ranks_of_all_nodes(tmp_path):
    (tmp_path / "job.yaml").write_text(lab.RECIPE)
    recipe = load_recipe(str(tmp_path / "job.yaml"), ["mesh=dp_replicate=-1,dp_shard=2"])
    found = division_of(recipe, {"nodes": "2", "nproc": "4", "node_rank": 1})
    assert (found.count, list(found.here), found.ranks) == (4, [2, 3], 2)
    with pytest.raises(MeshError, match="got 12"):
        division_of(recipe.model_copy(update={"mesh": "dp_replicate=2,dp_shard=2"}), {"nodes": "2", "nproc": "6"})


def test_a_recipe_that_cannot_lose_replicas_is_refused_before_a_process_starts(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(lab.RECIPE)
    with pytest.raises(PlanError, match="profile: false") as raised:
        run(str(path), ["profile=true", "data.workers=2", "mesh=dp_replicate=2,dp_shard=2"], {}, elastic="replicas")
    assert "data.workers: 0" in str(raised.value)
    for what, place, words, match in (
        ("script.py", {}, [], "starts recipes; .* is a script"),
        ("job.yaml", {"nodes": "1:2"}, [], "two kinds of elastic jobs"),
        ("job.yaml", {"nodes": "2"}, [], "--head .*HOST:PORT"),
        ("job.yaml", {"rejoin_s": 3}, [], "does not support --rejoin-s"),
        ("job.yaml", {}, ["mesh=dp_shard=2"], "has one replica"),
    ):
        (tmp_path / what).touch()
        with pytest.raises(LaunchError, match=match):
            run(str(tmp_path / what), words, place, elastic="replicas")
    with pytest.raises(LaunchError, match="expected replicas"):
        run(str(path), [], {}, elastic="nodes")


def uneven(layers=2):
    """Return the plan of a replica of two ranks, and a model that they cannot share evenly."""
    with torch.device("meta"):
        return Plan("dp_replicate=1,dp_shard=2", [HybridShard()]), transformer(vocab_size=97, layers=layers)


def test_a_replica_is_described_and_forecast_with_its_whole_state():
    """A replica holds what its plan holds as a job of its own, and a step adds one sum of the gradients."""
    plan, module = uneven()
    made = forecast(plan, module, Batch(sequence=8), hardware="h100", replicas=3)
    described, alone = (plan.describe(uneven()[1], replicas=count) for count in (3, 1))
    assert described == alone
    held = [made.trace.exact[name] for name in ("parameters", "gradients", "optimizer")]
    assert held == [described.parameter_bytes, described.gradient_bytes, described.optimizer_bytes]
    assert made.world_size == 6 and dict(made.mesh.axes) == {"dp_replicate": 3, "dp_shard": 2}
    sums = [sent for _, sent in made.trace.collectives() if (sent.axis, sent.ranks) == ("dp_replicate", 3)]
    assert sum(sent.size for sent in sums) == described.gradient_bytes
    assert {sent.kind for sent in sums} == {"all_reduce"}
    with pytest.raises(PlanError, match="dp_replicate=2 inside of one replica"):
        Plan("dp_replicate=2,dp_shard=2", [HybridShard()]).describe(module, replicas=2)
    with pytest.raises(PlanError, match="and a replica that comes back copies all layers"):
        Plan("pp=2", [PipelineParallel()]).describe(module, replicas=2)
    world = Plan("dp_replicate=1,dp_shard=2", [HybridShard(optimizer="world")])
    with pytest.raises(PlanError, match=r"use HybridShard\(optimizer='replica'\)"):
        world.describe(module, replicas=3)
    with pytest.raises(PlanError, match=r"use HybridShard\(optimizer='replica'\)"):
        forecast(world, module, Batch(sequence=8), hardware="h100", replicas=3)


def test_a_search_keeps_replicas_that_may_be_lost_inside_of_nodes_and_whole():
    model, node = uneven(layers=5)[1], dataclasses.replace(Hardware.load("h100"), node=2)
    asked = {"recompute": ("none",), "micro_batches": (1,), "elastic": True}
    found = search(model, model.meshpar_layout(), Batch(sequence=8), node, 6, top=1, **asked)
    settings = [candidate.settings for candidate in found.fitting]
    assert settings and all(one.replicas > 1 and one.job().size <= 2 and not one.world for one in settings)
    assert found.best[0].world_size == 6 and found.best[0].mesh.axes == settings[0].mesh().axes
    with pytest.raises(MeshparError, match="2 ranks are one replica, in nodes of 2"):
        search(model, model.meshpar_layout(), Batch(sequence=8), node, 2, **asked)


STDLIB = """
device: cpu
model: {dim: 32, layers: 2, heads: 2, hidden: 48, max_positions: 64}
data: {source: stdlib, sequence_length: 64, micro_batch: 2}
training: {steps: 10}
"""


def test_the_commands_know_elastic_replicas_of_a_recipe(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(STDLIB)
    words = ["mesh=dp_replicate=3,dp_shard=2", "passes=[HybridShard]"]
    assert "dp_replicate=1,dp_shard=2" in describe_recipe(str(path), words, elastic="replicas")
    assert "fits 3 replicas of 2 ranks" in check_recipe(str(path), words, elastic="replicas")
    world = [words[0], "passes=[{HybridShard: {optimizer: world}}]"]
    assert "dp_replicate+dp_shard" in describe_recipe(str(path), world), "one job splits parameters over both axes"
    for refuses in (check_recipe, describe_recipe):
        with pytest.raises(PlanError, match=r"use HybridShard\(optimizer='replica'\), with more shards"):
            refuses(str(path), world, elastic="replicas")
    with pytest.raises(LaunchError, match="expected replicas"):
        describe_recipe(str(path), words, elastic="nodes")


def small(lighthouse, data, *, sparse=False, **options):
    """Return one replica of one rank."""
    par = Plan("dp_shard=1", []).apply(torch.nn.Embedding(lab.VOCAB, 4))
    par.module.sparse = sparse  # which a plan refuses
    optimizer = torch.optim.SGD(par.module.parameters(), lr=0.1)
    return Replicas(par, optimizer, data, lighthouse=f"http://127.0.0.1:{lighthouse.port}", **options)


@pytest.mark.parametrize(("head", "listens"), [("", "0100007F"), ("localhost:{}", "0" * 32)])
def test_the_lighthouse_of_one_machine_listens_on_that_machine_alone(head, listens):
    with ExitStack() as stack:
        port = int(_serve_lighthouse(stack, head.format(*free_ports(1)), 1.0).rpartition(":")[2] or 0)
        tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
        rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
        listening = [row[1] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
        hosts = {address.partition(":")[0] for address in listening}
        assert hosts == {listens}, "a head is where other machines connect"


@on_ranks(1)
def test_what_never_succeeds_ends_with_its_error():
    lighthouse = Lighthouse(patience_s=1.0)
    with small(lighthouse, batches(), sparse=True, name="0", replicas=1, patience_s=1.0) as replicas:
        replicas.begin()
        replicas.par.module(torch.tensor([1])).sum().backward()
        with pytest.raises(ReplicaError, match=r"failed 12 times in a row .* after step 0.*RuntimeError: .*[Ss]parse"):
            replicas.reduce(1)
    lighthouse.close()
    for options in ({"replicas": 2}, {"same": "lr 2"}):
        patience_s = patience.patient(4.0)
        lighthouse = Lighthouse(patience_s=patience_s)
        torch.manual_seed(0)
        first = small(
            lighthouse, batches(), name="0", replicas=2, same=options.get("same") and "lr 1", patience_s=patience_s
        )
        torch.manual_seed(0)
        data = batches(replicas=2) if "replicas" in options else batches()
        with (
            first,
            small(lighthouse, data, name="1", replicas=2, same=options.get("same"), patience_s=patience_s) as second,
        ):
            with ThreadPoolExecutor(2) as pool:
                errors = [future.exception() for future in [pool.submit(replica.begin) for replica in (first, second)]]
            different = "differ in the position in the data, the batch or the settings"
            assert all(different in str(error) for error in errors)
        lighthouse.close()


@on_ranks(1)
def test_replicas_that_wait_for_another_give_it_up_at_once():
    """If each went by its own clock, they could try to meet in turns, for ever."""
    lighthouse = Lighthouse(patience_s=4.0)
    members = []
    for name in ("0", "1"):
        torch.manual_seed(0)
        members.append(small(lighthouse, batches(), name=name, replicas=3, patience_s=4.0))

    def begin(replica):
        time.sleep(1.5 * members.index(replica))  # half of the time that each waits
        began = time.monotonic()
        replica.begin()
        return time.monotonic() - began

    with pytest.MonkeyPatch.context() as patch, members[0], members[1], ThreadPoolExecutor(2) as pool:
        patch.setattr(rendezvous, "_ALONE_S", 3.0)
        patch.setattr(rendezvous, "_CONNECT_S", 0.5)
        waited = list(pool.map(begin, members))
    assert max(waited) < patience.patient(10.0)
    lighthouse.close()


@on_ranks(1)
def test_the_last_samples_of_an_epoch_are_shared_anew_when_their_replica_is_lost():
    """The other one has nothing but fillers, of which it makes no step: two samples are one replica's share."""
    lighthouse = Lighthouse(patience_s=1.0)
    torch.manual_seed(0)
    first = small(lighthouse, batches(2), name="0", replicas=2, patience_s=1.0)
    torch.manual_seed(0)
    with small(lighthouse, batches(2), name="1", replicas=2, patience_s=1.0) as second:
        with ThreadPoolExecutor(2) as pool:
            assert [rows(batch) for batch in pool.map(Replicas.begin, (first, second))] in ([[0, 1], []], [[1, 0], []])
        first.close()
        before = second.par.module.weight.detach().clone()
        second.par.module(torch.tensor([1])).sum().backward()
        assert second.reduce(0) is None and second.step == 0
        second.optimizer.step()
        assert torch.equal(second.par.module.weight, before)
        assert sorted(rows(second.begin())) == [0, 1]
        second.par.module(torch.tensor([1])).sum().backward()
        assert second.reduce(2) is not None and second.data.epoch == second.step == 1
    lighthouse.close()


@on_ranks(2, fresh="changes bounds in seconds")
def test_all_ranks_wait_for_the_lighthouse():
    """Its host may start later: also those ranks wait that do not ask it."""
    rendezvous._ALONE_S, rendezvous._CONNECT_S = 0.0, 0.2  # so long the other rank waits for the one that asks
    par = Plan("dp_shard=2", [FullyShard()]).apply(lab.model())
    optimizer = torch.optim.SGD(par.module.parameters())
    with pytest.raises(ReplicaError, match="does not answer"):
        Replicas(par, optimizer, batches(), lighthouse="http://127.0.0.1:9", patience_s=1.5, wait_s=4.0)


@on_ranks(2)
def test_a_stop_request_ends_the_wait_for_other_replicas():
    """Every rank leaves, whichever of the signals' reasons it has."""
    lighthouse = Lighthouse() if dist.get_rank() == 0 else None
    address = [lighthouse and f"http://127.0.0.1:{lighthouse.port}"]
    dist.broadcast_object_list(address)
    par, saves = lab.parallel(2), Saves()
    data = Batches(lab.Rows(16), micro_batch=2, data_rank=par.data_rank, data_size=2)
    optimizer, stop = lab.optimizer_of(par.module), StopRequest()
    trainer = Trainer(par, CausalLM(), data, optimizer, Schedule(), TrainSettings(steps=2), checkpointer=saves)
    if dist.get_rank() == 0:
        stop.request("SIGTERM")
    began = time.monotonic()
    with Replicas(par, optimizer, data, state=trainer, lighthouse=address[0], name="0", replicas=2) as trainer.replicas:
        outcome = trainer.run(stop)
    assert (outcome.stopped, outcome.steps, saves.steps) == ("SIGTERM", 0, [])
    assert time.monotonic() - began < patience.patient(15)


class Watched:
    """Notes in validation what another replica would get, while this one is not heard."""

    trainer, sent, moved = None, None, ()

    def loss(self, model, batch):
        if not model.training:
            membership = self.trainer.replicas._rendezvous._membership
            self.sent, self.moved = self.trainer.state_dict()["tokens"], (*self.moved, membership._moved)
            membership.fresh = False
        return CausalLM().loss(model, batch)

    def tokens(self, batch):
        return CausalLM().tokens(batch)


class Saves:
    def __init__(self):
        self.steps, self.amended = [], []

    def save(self, step, par, optimizer, extra):
        self.steps.append(step)

    def amend(self, step, extra):
        self.amended.append(step)

    def wait(self, *, copied=False): ...


@on_ranks(1)
def test_a_long_validation_costs_no_checkpoint():
    """The heartbeats go on from batch to batch, and the last checkpoint is written also after a time without them."""
    lighthouse = Lighthouse()
    par = lab.parallel(1)
    data, held = (Batches(lab.Rows(16), micro_batch=2, seed=seed) for seed in (0, None))
    optimizer, objective, saves = lab.optimizer_of(par.module), Watched(), Saves()
    settings = TrainSettings(steps=2, log_every=100, validate_every=1, checkpoint_every=1)
    trainer = Trainer(par, objective, data, optimizer, Schedule(steps=2), settings, validation=held, checkpointer=saves)
    address, objective.trainer = f"http://127.0.0.1:{lighthouse.port}", trainer
    with Replicas(par, optimizer, data, state=trainer, lighthouse=address, name="0", replicas=1) as trainer.replicas:
        trainer.run()
    assert saves.steps == [1, 2]  # before their validations
    assert saves.amended == [2]  # after step 1 the others may have gone on
    assert len(set(objective.moved)) == len(objective.moved) == 16
    steps = itertools.islice(Batches(lab.Rows(16), micro_batch=2, seed=0), 2)
    assert objective.sent == trainer.reports.tokens == sum(objective.tokens(batch) for step in steps for batch in step)
    trainer.reports.meter.add(5, {"loss": torch.ones(())})
    # as a replica does that was dropped: the others have told these tokens
    trainer.load_state_dict(trainer.state_dict())
    assert not trainer.reports.meter.used


def test_a_replica_that_leads_again_opens_its_files_again(tmp_path):
    """Another one has written in between, to a new file of that name."""
    here, there = (SimpleNamespace(leads=True, term=1, step=1, counted=()) for _ in range(2))
    file = tmp_path / "m.jsonl"
    mine, other = (Elected(replica, lambda step: [JsonLines(file, step=step)]) for replica in (here, there))
    mine.report({"step": 1})
    other.report({"step": 2})  # this one stood still
    other.close()
    here.term, here.step = 2, 3
    mine.report({"step": 4})
    mine.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 4]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_replica_that_dies_in_backward_costs_a_step(tmp_path):
    """The survivor completes the step alone, within seconds; the other one comes back, and they end bitwise equal."""
    with lab.Lab(tmp_path, replicas=2, ranks=1, rows=160, pause_s=0.02) as job:
        job.wait(lambda: job.steps() >= 3, 90)
        job.wait_for(1, "backward")
        job.signal(1, signal.SIGKILL)
        at, began = job.steps(), time.monotonic()
        job.wait(lambda: job.steps() > at, lab.LONGEST_S)
        assert time.monotonic() - began < patience.patient(15)
        job.finish()
    found = lab.check(tmp_path, 160)
    changes = [(lost, joined) for _, lost, joined in sorted(found["changes"], key=str)]
    assert changes in ([(1, 1)], [(0, 1), (1, 0)], [(1, 0), (0, 1)])


FAULTS = int(os.environ.get("MESHPAR_REPLICA_FAULTS", "0"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("replicas", "ranks", "faults"),
    [(3, 1, 8), pytest.param(3, 1, 20, marks=pytest.mark.nightly), pytest.param(2, 2, 20, marks=pytest.mark.long)],
)
def test_faults_at_random_instants_lose_and_double_nothing(tmp_path, replicas, ranks, faults):
    found = lab.run(tmp_path, faults=FAULTS or faults, seed=1, replicas=replicas, ranks=ranks)
    assert sum(lost for _, lost, _ in found["changes"]) >= (FAULTS or faults) // 3
    assert sorted(found["recovery_s"])[len(found["recovery_s"]) // 2] < patience.patient(10)


EPOCH, SHARDED = ["training.steps=null", "training.epochs=1", "data.micro_batch=4"], ["passes=[HybridShard]"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("more", daily([EPOCH + SHARDED, SHARDED], EPOCH + SHARDED, ids="".join))
def test_a_recipe_goes_on_while_a_replica_is_lost(tmp_path, more):
    """The one that reports is killed: another one does, and tells each step once."""
    seconds, outputs = lab.killed_recipe(tmp_path, ["--elastic", "replicas"], "out/logs/replica-0", overrides=more)
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    left = next(record["replicas"] for record in records if "replicas" in record)
    assert left in (1, 2) and "lost 0" in outputs, outputs  # 2: it was back before the others had a step without it
    trained = [record for record in records if "train/loss" in record]
    steps, rates = [record["step"] for record in trained], [record["lr"] for record in trained]
    assert steps == list(range(1, len(steps) + 1)), outputs
    if "training.epochs=1" in more:
        assert trained[-1]["epoch"] == 1 and f"step {steps[-1]}/{steps[-1]}  loss" in outputs, outputs
        assert all(before > after for before, after in itertools.pairwise(rates)) and 0 < rates[-1] < 1e-6, rates
    else:
        assert len(steps) == 150
    assert (tmp_path / "out/checkpoints/latest").resolve().name.endswith(str(len(steps)))
    table = read_manifest(tmp_path / "out/checkpoints/latest").optimizer
    assert table["state"].keys() == {name for group in table["groups"] for name in group["params"]}
    assert seconds < patience.patient(15)


class ByHand:
    """A job of four nodes of one rank each, whose commands are given one by one."""

    def __init__(self, folder, replicas, steps):
        self.folder, self.until = folder, functools.partial(patience.until, seconds=180, every=0.1, report=self.told)
        mesh = f"mesh: dp_replicate={replicas},dp_shard={4 // replicas}"
        recipe = lab.RECIPE.replace("mesh: dp_replicate=2,dp_shard=1", mesh).replace("steps: 150", f"steps: {steps}")
        (folder / "job.yaml").write_text(recipe)
        lines = (f"{number} times {number} is {number * number}.\n" for number in range(3000))
        (folder / "text.txt").write_text("".join(lines))

    def start(self, node, placed=list):
        """``placed``: command -> the command on the node's host."""
        head = ["--nodes", "4", "--node-rank", str(node), "--head", str(self.folder / "head")]
        command = [sys.executable, "-m", "meshpar.launchers", "run", "--elastic", "replicas", *head, "job.yaml"]
        with (self.folder / f"told-{node}").open("a") as file:
            return subprocess.Popen(placed(command), cwd=self.folder, stdout=file, stderr=subprocess.STDOUT)

    def told(self, *nodes):
        return "".join((self.folder / f"told-{node}").read_text() for node in nodes or range(4))

    def records(self):
        path = self.folder / "out/metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self):
        return [record["step"] for record in self.records() if "train/loss" in record]

    def replicas(self):
        return [record["replicas"] for record in self.records() if "replicas" in record]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("replicas", [4, 2])
def test_four_hosts_by_hand(tmp_path, replicas):
    """Lost hosts start again by the same command, also the lighthouse's; two replicas have two hosts each."""
    steps = 1800
    job = ByHand(tmp_path, replicas, steps)
    try:
        with Hosts(4) as hosts:

            def started(node):
                return job.start(node, functools.partial(hosts.command, f"n{node + 1}"))

            nodes = [started(node) for node in range(4)]
            job.until(lambda: len(job.records()) > 20)
            hosts.kill("n3")
            job.until(lambda: job.replicas()[-1:] == [replicas - 1])
            if replicas == 2:
                job.until(lambda: "waiting for node 2 of replica 1" in job.told(3))
            nodes[2] = started(2)
            job.until(lambda: job.replicas()[-2:] == [replicas - 1, replicas])
            if replicas == 2:
                hosts.cut("n4")
                job.until(
                    lambda: "lost node 3 of replica 1" in job.told(2) and "lost node 2 of replica 1" in job.told(3)
                )
                job.until(lambda: job.replicas()[-1:] == [1])
                hosts.cut("n4", cut=False)
                job.until(lambda: job.replicas()[-2:] == [1, 2])
            hosts.kill("n1")
            job.until(lambda: "waits for the lighthouse of node 0" in job.told(3))
            if replicas == 2:
                job.until(lambda: "waiting for node 0 of replica 0" in job.told(1))
            nodes[0] = started(0)
            assert [node.wait(600) for node in nodes] == [0] * 4, job.told()
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert job.steps() == list(range(1, steps + 1))
    assert "resuming after step" in job.told()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_replicas_of_two_nodes_restart_after_a_lost_rank_and_stop_with_a_checkpoint(tmp_path):
    """One node of each replica gets the signal."""
    job = ByHand(tmp_path, 2, 5000)
    nodes = [job.start(node) for node in range(4)]
    try:
        job.until(lambda: len(job.steps()) > 10)
        os.kill(lab.rank_of(tmp_path / "out/logs/replica-1"), signal.SIGKILL)
        job.until(lambda: job.replicas()[-2:] == [1, 2])
        at = len(job.steps())
        job.until(lambda: len(job.steps()) > at + 10)
        for node in nodes[1:3]:
            node.send_signal(signal.SIGTERM)
        assert [node.wait(patience.patient(60)) for node in nodes] == [128 + signal.SIGTERM] * 4, job.told()
    finally:
        for node in nodes:
            node.kill()
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < 5000
    assert (tmp_path / "out/checkpoints/latest").resolve().name.endswith(str(len(steps))), job.told()
