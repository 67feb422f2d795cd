"""The loop and its parts: schedules, AdamW's groups, the scaler, metrics, stopping, and resuming bit for bit."""

import copy
import io
import json
import math
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from meshpar import FullyShard, MeshparError, Parallelized, PipelineParallel, Plan, RecipeError, TensorParallel
from meshpar.models import Transformer, TransformerConfig
from meshpar.passes.tensor.random import mix
from meshpar.tensors.placements import local_tensor
from meshpar.testing import on_ranks, whole
from meshpar.training.adamw_and_schedules import AdamWSettings, LossScaler, Schedule, build_adamw, scaled_rate
from meshpar.training.data import Batches
from meshpar.training.loop import Trainer
from meshpar.training.metrics import Console, JsonLines, Meter, peak_flops
from meshpar.training.objectives import CausalLM
from meshpar.training.samples import PackedTokens
from meshpar.training.settings import TrainSettings
from meshpar.training.step import Skips
from meshpar.training.stop import StopRequest
from meshpar.training.tokens import write_tokens
from tests.support.tiers import daily

VOCAB = 64


CONFIG = TransformerConfig(vocab_size=VOCAB, dim=16, layers=2, heads=2, kv_heads=2, hidden=24, max_positions=32)


def parallel(mesh: str = "", passes: list[Any] | None = None, dropout: float = 0.0) -> Parallelized:
    with torch.device("meta"):
        model = Transformer(replace(CONFIG, dropout=dropout))
    return Plan(mesh, passes or []).apply(model, device_type="cpu").materialize(seed=0)


def packed(folder: Path, tokens: int = 330, length: int = 8) -> PackedTokens:
    """Return tokens that follow a rule: after i comes i + 1 or i + 2, in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.cumsum(np.arange(tokens) % 2 + 1) % (VOCAB - 1)
    file = write_tokens(folder / f"rank{dist.get_rank()}.bin", [ids], vocab_size=VOCAB, eos_id=VOCAB - 1)
    return PackedTokens(file, length)


class Kept:
    """A checkpointer that keeps copies in memory."""

    def __init__(self, saved: Any = None) -> None:
        self.steps: dict[int, tuple[Any, Any, dict[str, Any]]] = {}
        self.resumed = saved

    def save(self, step: int, par: Parallelized, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> None:
        assert json.loads(json.dumps(extra)) == extra  # plain data
        self.steps[step] = (copy.deepcopy(par.module.state_dict()), copy.deepcopy(optimizer.state_dict()), extra)

    def amend(self, step: int, extra: dict[str, Any]) -> None:
        self.steps[step] = (*self.steps.get(step, self.resumed)[:2], extra)

    def wait(self, *, copied: bool = False) -> None: ...


class Records:
    """A reporter that keeps what it is told, and does something at a step."""

    def __init__(self, **at_step: Any) -> None:
        self.records: list[Mapping[str, float]] = []
        self.notes: list[str] = []
        self.at_step = {int(name.removeprefix("step")): action for name, action in at_step.items()}

    def report(self, record: Mapping[str, float]) -> None:
        self.records.append(record)
        self.at_step.get(int(record["step"]), lambda: None)()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self, ended: str) -> None: ...


def trainer(
    par: Parallelized, samples: PackedTokens, *, steps: int | None = 6, micro: int = 2, accumulate: int = 2, **more: Any
) -> Trainer:
    place = {"data_rank": par.data_rank, "data_size": par.data_size}
    data = Batches(samples, micro_batch=micro, accumulate=accumulate, seed=3, **place)
    names = ("validation", "checkpointer", "reporters", "scaler", "objective", "schedule", "evaluations")
    parts = {name: more.pop(name) for name in names if name in more}
    settings = TrainSettings(**{"steps": steps, "log_every": 1, "seed": 11} | more)
    optimizer = build_adamw(par.module, AdamWSettings(eps=1e-3))
    usual = Schedule(name="cosine", lr=1e-2, steps=6, warmup_steps=2, min_ratio=0.2)
    objective, schedule = parts.pop("objective", CausalLM()), parts.pop("schedule", usual)
    return Trainer(par, objective, data, optimizer, schedule, settings, **parts)


def weights(par: Parallelized) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in par.module.named_parameters()}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# schedules


def test_schedules_reach_their_marks() -> None:
    linear = Schedule(name="linear", lr=1.0, steps=10, min_ratio=0.1)
    assert [linear.rate(0), linear.rate(5), linear.rate(10), linear.rate(99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    cosine = Schedule(name="cosine", lr=2.0, steps=10, min_ratio=0.5)
    assert [cosine.rate(0), cosine.rate(5), cosine.rate(10)] == pytest.approx([2.0, 1.5, 1.0])
    step = Schedule(name="step", lr=1.0, steps=9, step_every=3, gamma=0.5)
    assert [step.rate(i) for i in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    wsd = Schedule(name="wsd", lr=1.0, steps=10, decay_fraction=0.2)
    assert [wsd.factor(i) for i in (0, 7, 8, 9, 10)] == pytest.approx([1, 1, 1, 0.5, 0])
    assert Schedule(name="constant", lr=3.0, steps=5).rate(4) == 3.0


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "step", "wsd"])
def test_warm_up_grows_to_the_peak(name: str) -> None:
    schedule = Schedule(name=name, lr=1.0, steps=20, warmup_steps=4)
    assert [schedule.factor(i) for i in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_run_of_wsd_decays_from_any_of_its_checkpoints() -> None:
    stable = Schedule(name="wsd", lr=1.0, steps=1000, warmup_steps=10, decay_steps=100)
    early = Schedule(name="wsd", lr=1.0, steps=250, warmup_steps=10, decay_steps=50)
    assert [early.rate(step) for step in range(200)] == [stable.rate(step) for step in range(200)]
    assert stable.rate(890) == 1.0 and early.rate(225) == pytest.approx(0.5) and early.rate(250) == pytest.approx(0.0)


def test_a_schedule_sets_every_group_also_a_tensor_rate() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": torch.tensor(5.0)}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    assert Schedule(name="linear", lr=1.0, steps=2).apply(optimizer, 1) == 0.5
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]


def test_wrong_schedules_are_named() -> None:
    with pytest.raises(RecipeError, match=r"no schedule 'cosin'; nearest: cosine.*; lr must be above 0, got -1"):
        Schedule(name="cosin", lr=-1)
    with pytest.raises(RecipeError, match="warmup_steps must be from 0 to steps, got 9 of 5"):
        Schedule(steps=5, warmup_steps=9)
    with pytest.raises(RecipeError, match=r"warmup_steps must be from 0 to steps, got 9 of 5 steps"):
        Schedule(warmup_steps=9).over(5)


def test_rates_scale_with_the_data_ranks() -> None:
    assert [scaled_rate(0.1, mode, 16) for mode in ("none", "linear", "sqrt")] == pytest.approx([0.1, 1.6, 0.4])
    with pytest.raises(RecipeError, match="one of none, linear, sqrt; got 'square'"):
        scaled_rate(0.1, "square", 2)


# optimizer


def test_norms_and_biases_do_not_decay(one_process: None) -> None:
    par = parallel()
    optimizer = build_adamw(par.module, AdamWSettings(weight_decay=0.3, fused=None))
    groups = [(part["weight_decay"], parameter) for part in optimizer.param_groups for parameter in part["params"]]
    assert {(decay, parameter.ndim >= 2) for decay, parameter in groups} == {(0.3, True), (0.0, False)}
    assert len(groups) == len(list(par.module.parameters()))
    assert optimizer.defaults["fused"]
    for parameter in par.module.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(RecipeError, match="nothing to train"):
        build_adamw(par.module, AdamWSettings())


@on_ranks(2)
def test_fused_adamw_takes_split_and_whole_parameters_together() -> None:
    par, alone = parallel("tp=2", [TensorParallel()]), as_one_process(parallel("tp=2", [TensorParallel()]))
    assert {type(parameter.data) for parameter in par.module.parameters()} == {DTensor}
    for network in (par.module, alone):
        optimizer = build_adamw(network, AdamWSettings(fused=True))
        for parameter in network.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(whole(par.module.get_parameter(name)), parameter.detach())


def as_one_process(source: Parallelized) -> torch.nn.Module:
    """Return a model with the same weights, on this rank alone."""
    model = Transformer(CONFIG)
    model.load_state_dict({name: whole(tensor) for name, tensor in source.module.state_dict().items()})
    return model


# the loop


def test_the_loop_equals_one_written_by_hand(one_process: None, tmp_path: Path) -> None:
    samples = packed(tmp_path)
    par = parallel()
    records = Records()
    outcome = trainer(par, samples, reporters=[records], clip=0.5, norms=("layers.*",)).run()
    assert (outcome.steps, outcome.stopped) == (6, None)

    hand = parallel()
    optimizer = build_adamw(hand.module, AdamWSettings(eps=1e-3))
    schedule = Schedule(name="cosine", lr=1e-2, steps=6, warmup_steps=2, min_ratio=0.2)
    losses, norms, of_a_layer, tokens_seen = [], [], [], 0
    for step, batches in zip(range(6), Batches(samples, micro_batch=2, accumulate=2, seed=3)):
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        total, tokens_seen = 0.0, tokens_seen + tokens
        for batch in batches:
            logits = hand.module(input_ids=batch["input_ids"]).logits.flatten(0, 1)
            loss = cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        losses.append(total)
        layer = [parameter.grad for parameter in hand.module.layers[1].parameters()]
        of_a_layer.append(torch.nn.utils.get_total_norm(layer).item())
        norms.append(torch.nn.utils.clip_grad_norm_(hand.module.parameters(), 0.5).item())
        for part in optimizer.param_groups:
            part["lr"] = schedule.rate(step)
        optimizer.step()
        optimizer.zero_grad()
    for name, expected in {"train/loss": losses, "grad_norm": norms, "grad_norm/layers.1": of_a_layer}.items():
        assert [record[name] for record in records.records] == pytest.approx(expected, rel=1e-5)
    for name, value in weights(hand).items():
        torch.testing.assert_close(weights(par)[name], value, rtol=1e-4, atol=1e-6)
    last = records.records[-1]
    assert (last["tokens"], last["lr"]) == (tokens_seen, schedule.rate(5))
    assert last["tokens_per_second"] > 0 and last["memory_gib"] > 0


def test_the_loss_falls_and_is_validated(one_process: None, tmp_path: Path) -> None:
    samples = packed(tmp_path)
    par, records = parallel(), Records()
    validation = Batches(samples, micro_batch=4, seed=None)
    every: dict[str, Any] = {"validate_every": "epoch", "log_every": 7}
    run = trainer(par, samples, steps=None, epochs=5, validation=validation, reporters=[records], **every)
    before = run.validate()["loss"]
    outcome = run.run()
    held = [record for record in records.records if "val/loss" in record]
    # 42 samples, 4 a step: 11 steps an epoch; the last step of the run is validated once
    assert [record["step"] for record in held] == [11, 22, 33, 44, 55]
    assert held[-1]["val/loss"] < held[0]["val/loss"] < before and outcome.values["val/loss"] == held[-1]["val/loss"]
    assert par.module.training
    assert [record["step"] for record in records.records if "train/loss" in record] == [7, 14, 21, 28, 35, 42, 49, 55]


def test_validation_is_the_mean_over_all_tokens(one_process: None, tmp_path: Path) -> None:
    samples = packed(tmp_path, tokens=60)
    par = parallel(dropout=0.5)
    run = trainer(par, samples, validation=Batches(samples, micro_batch=3, seed=None))
    batch = samples.__getitems__(range(len(samples)))
    par.module.eval()
    with torch.no_grad():
        logits = par.module(input_ids=batch["input_ids"]).logits
    expected = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    before = run.validations.moves
    assert run.validate() == run.validate() == {"loss": pytest.approx(float(expected), rel=1e-5)}
    assert run.validations.moves == before + 2 * -(-len(samples) // 3), "every batch counts as a move"


def resumed(par: Parallelized, saved: tuple[Any, Any, dict[str, Any]], samples: PackedTokens, **more: Any) -> Trainer:
    run = trainer(par, samples, **more)
    model, optimizer, extra = saved
    par.module.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.load_state_dict(extra)
    return run


def check_resume(folder: Path, mesh: str, passes: list[Any]) -> None:
    samples, kept = packed(folder), Kept()
    whole_run = parallel(mesh, passes, dropout=0.2)
    trainer(whole_run, samples, steps=13, checkpointer=kept, checkpoint_every=9).run()
    assert sorted(kept.steps) == [9, 13]
    again, records = parallel(mesh, passes, dropout=0.2), Records()
    outcome = resumed(again, kept.steps[9], samples, steps=13, reporters=[records]).run()
    assert outcome.steps == 13 and [record["step"] for record in records.records] == [10, 11, 12, 13]
    assert records.records[-1]["tokens"] == kept.steps[13][2]["tokens"]
    assert_equal(weights(again), weights(whole_run))


@on_ranks(2)
def test_stages_resume_bitwise_with_dropout(tmp_path: Path) -> None:
    check_resume(tmp_path, "pp=2", [PipelineParallel()])


@on_ranks(2)
def test_stages_train_and_validate_as_one_process(tmp_path: Path) -> None:
    samples, records = packed(tmp_path), {}
    for mesh, passes in (("pp=2", [PipelineParallel()]), ("tp=2", [TensorParallel(sequence_parallel=False)])):
        par, kept = parallel(mesh, passes), Records()
        held = Batches(samples, micro_batch=4, seed=None)
        run = trainer(par, samples, steps=3, clip=0.5, validation=held, check_replicas_every=2, reporters=[kept])
        run.run()
        records[mesh] = [{name: record[name] for name in NAMED if name in record} for record in kept.records]
        every: list[Any] = [None, None]
        dist.all_gather_object(every, weights(par))
        records[mesh].append(every[0] | every[1])
    *found, last = records["pp=2"]
    *expected, whole_weights = records["tp=2"]
    assert found == [pytest.approx(record, rel=1e-5) for record in expected] and len(found) == 4
    for name, value in whole_weights.items():
        torch.testing.assert_close(last[name], value, rtol=1e-4, atol=1e-6)


NAMED = ("train/loss", "val/loss", "grad_norm", "step", "tokens", "lr")


def test_resuming_is_bitwise_with_dropout(one_process: None, tmp_path: Path) -> None:
    check_resume(tmp_path, "", [])


@pytest.mark.parametrize("warm", daily([{"warmup_steps": 7}, {"warmup_ratio": 0.3}], {"warmup_ratio": 0.3}, ids=str))
def test_an_epoch_goes_on_with_another_batch_at_the_same_rate(one_process, tmp_path, warm) -> None:
    """The learning rate is a function of the samples that were used, whatever their steps; each epoch is used up."""
    samples, schedule = packed(tmp_path), Schedule(name="linear", lr=1e-2, **warm)

    def train(saved: Any = None, **more: Any) -> tuple[Trainer, dict[int, float], dict[int, Any]]:
        par, kept, records = parallel(), Kept(), Records()
        more = {"steps": None, "epochs": 2, "checkpointer": kept, "reporters": [records], "checkpoint_every": 4} | more
        more |= {"schedule": schedule}
        run = trainer(par, samples, **more) if saved is None else resumed(par, saved, samples, **more)
        rates, size, epoch = {}, run.data.global_batch, len(samples)
        at, step = (run.data.epoch * epoch + run.data.position()["samples"], run.step)
        run.run()
        for record in records.records:
            rates[at] = record["lr"]
            at = min(at + size, (at // epoch + 1) * epoch)
        assert at == 2 * epoch and records.records[-1]["step"] == run.step == run.total_steps == step + len(rates)
        return run, rates, kept.steps

    whole, rates, steps = train()  # 42 samples, 4 a step: 11 steps an epoch
    assert whole.step == 22 and list(rates.values()) == [schedule.over(22).rate(step) for step in range(22)]
    for step, micro in ((4, 4), (12, 4), (4, 1), (12, 1), (8, 3)):
        again, later, more = train(steps[step], micro=micro)
        assert all(later[at] == pytest.approx(rates[at]) for at in later.keys() & rates.keys())
        assert len(later.keys() & rates.keys()) > 1
        assert list(later.values()) == [whole.course.planned.rate(at // 42 * 11 + at % 42 / 4) for at in later]
        assert again.course.planned == whole.course.planned
    # and once more, with the first batch again
    last, later, _ = train(more[12], micro=2)
    assert all(later[at] == pytest.approx(rates[at]) for at in later.keys() & rates.keys())
    assert last.course.planned == whole.course.planned
    # as it was saved before a state told its batch
    model, optimizer, extra = steps[8]
    _, later, _ = train((model, optimizer, {name: value for name, value in extra.items() if name != "batch"}))
    assert later == {at: rate for at, rate in rates.items() if at >= 32}


def test_steps_that_were_asked_for_are_steps_in_any_batch(one_process: None, tmp_path: Path) -> None:
    samples, kept, records = packed(tmp_path), Kept(), Records()
    whole = trainer(parallel(), samples, steps=10, epochs=3, checkpointer=kept, checkpoint_every=4)
    whole.run()
    again = resumed(parallel(), kept.steps[4], samples, steps=10, epochs=3, micro=4, reporters=[records])
    assert again.total_steps == 10 and again.run().steps == 10
    assert [record["lr"] for record in records.records] == [whole.course.planned.rate(step) for step in range(4, 10)]


@on_ranks(2)
def test_resuming_on_two_ranks_is_bitwise_and_one_rank_stops_both() -> None:
    with tempfile.TemporaryDirectory() as name:
        check_resume(Path(name), "dp_shard=2", [FullyShard()])
        check_ranks_must_agree(Path(name))
        check_one_rank_stops_all(Path(name))
        first, second = (parallel("dp_shard=2", [FullyShard()]) for _ in range(2))
        check_stop_in_validation(Path(name), first, second, late=1)
        check_two_ranks_match_one(Path(name))


LONG_STEPS = [(reshard, reduce_each) for reshard in (True, False) for reduce_each in (True, False)]


@pytest.mark.parametrize(("reshard", "reduce_each"), daily(LONG_STEPS, (True, False)))
@on_ranks(2)
def test_a_stop_in_a_long_step_leaves_its_micro_batches(tmp_path: Path, reshard: bool, reduce_each: bool) -> None:
    """The state before the step is saved; the next start repeats it."""
    passes = [FullyShard(reshard_after_forward=reshard)]
    samples, (whole, part) = packed(tmp_path), (parallel("dp_shard=2", passes, dropout=0.2) for _ in range(2))
    more: dict[str, Any] = {"micro": 1, "accumulate": 6, "steps": 3, "reduce_each": reduce_each}
    trainer(whole, samples, **more).run()
    kept = Kept()
    asking = Asking(8 if dist.get_rank() else 99, trains=True)
    run = trainer(part, samples, checkpointer=kept, objective=asking, **more)
    outcome = run.run()
    assert (outcome.stopped, outcome.steps, sorted(kept.steps)) == ("SIGHUP", 1, [1])
    for again in (part, parallel("dp_shard=2", passes, dropout=0.2)):
        assert resumed(again, copy.deepcopy(kept.steps[1]), samples, **more).run().steps == 3
        assert_equal(weights(again), weights(whole))


def check_ranks_must_agree(folder: Path) -> None:
    par = parallel("dp_shard=2", [FullyShard()])
    samples = packed(folder / "odd", tokens=200 + dist.get_rank())
    message = r"what the ranks were given differ .*\n.*training data: rank 0 against ranks \[1\]"
    with pytest.raises(MeshparError, match=message):
        trainer(par, samples).run()


def check_one_rank_stops_all(folder: Path) -> None:
    par, kept, stop = parallel("dp_shard=2", [FullyShard()]), Kept(), StopRequest()
    reporters = [Records(step3=lambda: stop.request("enough"))] if dist.get_rank() == 1 else []
    outcome = trainer(par, packed(folder), steps=50, checkpointer=kept, reporters=reporters).run(stop)
    assert outcome.steps in (3, 4) and sorted(kept.steps) == [outcome.steps]  # heard after the step, or within the next
    assert outcome.stopped == ("enough" if dist.get_rank() == 1 else "another rank was asked to stop")


def check_two_ranks_match_one(folder: Path) -> None:
    """The same global batches: two ranks of two samples, and one process (its own mesh) of four."""
    samples, records = packed(folder), Records()
    trainer(parallel("dp_shard=2", [FullyShard()]), samples, steps=12, micro=2, accumulate=1, reporters=[records]).run()
    losses = [record["train/loss"] for record in records.records]
    tokens = [record["tokens"] for record in records.records]
    both: list[Any] = [None, None]
    dist.all_gather_object(both, (losses, tokens))
    assert both[0] == both[1]
    assert tokens[10] == 329  # the epoch's last step is not full: 42 samples, the last of one token, 4 a step
    expected = alone_losses(samples)
    assert losses == pytest.approx(expected, rel=1e-5)


def alone_losses(samples: PackedTokens) -> list[float]:
    torch.manual_seed(0)
    model = as_one_process(parallel("dp_shard=2", [FullyShard()]))
    optimizer = build_adamw(model, AdamWSettings(eps=1e-3))
    schedule = Schedule(name="cosine", lr=1e-2, steps=6, warmup_steps=2, min_ratio=0.2)
    losses = []
    for step, (batch,) in zip(range(12), Batches(samples, micro_batch=4, seed=3)):
        loss, tokens, _ = CausalLM().loss(model, batch)
        (loss / tokens).backward()
        losses.append(float(loss / tokens))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        schedule.apply(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return losses


# stopping


def test_sigterm_finishes_the_step_saves_and_stops(one_process: None, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    kept, records = Kept(), Records(step3=lambda: os.kill(os.getpid(), signal.SIGTERM))
    outcome = trainer(parallel(), packed(tmp_path), checkpointer=kept, reporters=[records], steps=100).run()
    assert (outcome.steps, outcome.stopped) == (3, "SIGTERM")
    assert sorted(kept.steps) == [3] and kept.steps[3][2]["step"] == 3
    assert records.notes == ["asked to stop (SIGTERM) after step 3", "checkpoint of step 3 saved"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


class Asking:
    """A causal objective that asks for a stop in the n-th batch of validations, or of training."""

    def __init__(self, batch: int, *, trains: bool = False) -> None:
        self.left, self.trains = batch, trains

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        return CausalLM().tokens(batch)

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        self.left -= model.training is self.trains
        if not self.left and model.training is self.trains:
            os.kill(os.getpid(), signal.SIGHUP)
        return CausalLM().loss(model, batch)


def check_stop_in_validation(folder: Path, par: Parallelized, last: Parallelized, late: int) -> None:
    """The step is saved, and the next start makes up for the validation."""
    samples = packed(folder)

    def train(par: Parallelized, saved: Any = None, batch: int = 99) -> tuple[Any, Kept, Records]:
        kept, records = Kept(saved), Records()
        held = Batches(samples, micro_batch=1, data_rank=par.data_rank, data_size=par.data_size, seed=None)
        more: dict[str, Any] = {
            "steps": 4, "validate_every": 2, "validation": held, "checkpointer": kept, "reporters": [records],
            "objective": Asking(batch if dist.get_rank() == dist.get_world_size() - 1 else 99),
        }  # fmt: skip
        run = resumed(par, saved, samples, **more) if saved else trainer(par, samples, **more)
        return run.run(), kept, records

    _, whole, expected = train(par)
    outcome, kept, records = train(par := last, batch=3)
    assert (outcome.stopped, outcome.steps, sorted(kept.steps)) == ("SIGHUP", 2, [2])
    assert records.notes[0] == "asked to stop (SIGHUP) after step 2, during its validation"
    assert par.module.training and not any("val/loss" in record for record in records.records)
    found, saved = records.records, kept.steps
    # in the same validation, in the last one, and in that again
    for batch, steps in ((1, [2]), (30 * late, [2, 4]), (1, [4])):
        outcome, kept, records = train(par, saved[max(saved)], batch)
        assert (outcome.stopped, sorted(kept.steps)) == ("SIGHUP", steps)
        found, saved = found + records.records, saved | kept.steps
    outcome, kept, records = train(par, saved[4])
    assert outcome.stopped is None and sorted(kept.steps) == [4]
    found += records.records
    names = ("step", "train/loss", "val/loss")
    got, want = ([[record.get(name) for name in names] for record in each] for each in (found, expected.records))
    assert got == want
    assert kept.steps[4][2] == whole.steps[4][2]


@on_ranks(2)
def test_stages_ask_for_a_stop_as_often_whatever_the_micro_batches(tmp_path: Path) -> None:
    samples, asked, agreed = packed(tmp_path), [], StopRequest.agreed

    def counted(stop: StopRequest) -> bool:
        asked[-1] += 1
        return agreed(stop)

    for accumulate in (2, 6):
        asked.append(0)
        run = trainer(parallel("pp=2", [PipelineParallel()]), samples, micro=1, accumulate=accumulate, steps=2)
        with mock.patch.object(StopRequest, "agreed", counted):
            run.run()
    assert asked[0] == asked[1] > 0


def test_a_stop_in_validation_saves_and_the_next_start_makes_up_for_it(one_process: None, tmp_path: Path) -> None:
    check_stop_in_validation(tmp_path, parallel(), parallel(), 2)


def test_a_second_sigint_interrupts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, passed on by a launcher
        assert stop.agreed() and stop.reason == "SIGINT"
        monkeypatch.setattr("meshpar.training.stop._SAME_S", -1.0)
        os.kill(os.getpid(), signal.SIGINT)


# what is not finite


@on_ranks(2)
def test_evaluations_are_made_with_each_validation_also_without_validation_data(tmp_path: Path) -> None:
    par = parallel("dp_shard=2", [FullyShard()])
    heard, seen = Records(), list[Any]()

    def evaluation(par: Parallelized) -> dict[str, Any]:
        seen.append(par.module.training)
        return {"choice": 0.5, "text": "hello"}

    made = trainer(par, packed(tmp_path), reporters=[heard], validate_every=4, evaluations={"mine": evaluation})
    values = made.run().values
    assert len(seen) == 2
    assert [record["step"] for record in heard.records if "eval/mine/choice" in record] == [4, 6]
    assert "step 4, mine: 'text' -> 'hello'" in heard.notes
    assert values["eval/mine/choice"] == made.state_dict()["metrics"]["eval/mine/choice"] == 0.5


class Poisoned:
    """A causal objective whose loss is not a number in some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.seen = steps, 0

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        return CausalLM().tokens(batch)

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        loss, tokens, metrics = CausalLM().loss(model, batch)
        self.seen += 1
        return loss * (math.nan if self.seen in self.steps else 1.0), tokens, metrics


def test_a_loss_that_is_not_finite_names_its_step_and_saves_nothing(one_process: None, tmp_path: Path) -> None:
    par, kept = parallel(), Kept()
    run = trainer(par, packed(tmp_path), objective=Poisoned(4), accumulate=1, checkpointer=kept, log_every=10)
    with pytest.raises(MeshparError, match="gradient norm of step 4 is not finite"):
        run.run()
    assert kept.steps == {}
    assert all(bool(parameter.isfinite().all()) for parameter in par.module.parameters())


def test_an_accelerator_is_read_only_when_a_record_is_due(one_process: None, tmp_path: Path) -> None:
    skips = Skips(TrainSettings(steps=4), None, torch.device("cpu"))
    for step, norm in enumerate((1.0, math.nan, 1.0, math.inf)):
        skips.mark(step, torch.tensor(norm))
    with pytest.raises(MeshparError, match="step 2 is not finite"):
        skips.check(int(skips.first_bad))


class Spiked(Poisoned):
    """Large gradients in some steps."""

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        loss, tokens, metrics = CausalLM().loss(model, batch)
        self.seen += 1
        return loss * (1e3 if self.seen in self.steps else 1.0), tokens, metrics


def test_spikes_of_the_gradient_are_skipped_counted_and_resumed(one_process: None, tmp_path: Path) -> None:
    samples, kept, records = packed(tmp_path), Kept(), Records()
    more: dict[str, Any] = {"steps": 27, "accumulate": 1, "skip_spikes": 10.0, "checkpoint_every": 22}
    whole_run = parallel()
    run = trainer(whole_run, samples, objective=Spiked(5, 24), checkpointer=kept, reporters=[records], **more)
    run.run()
    assert [record.get("skipped") for record in records.records if "lr" in record][-3:] == [1, 1, 1]
    assert run._work.skips.count == 1, "the spike before there are 20 norms is trained"
    part = parallel()
    again = resumed(part, kept.steps[22], samples, objective=Spiked(2), **more)
    again.run()
    assert again._work.skips.count == 1
    assert_equal(weights(whole_run), weights(part))
    with pytest.raises(RecipeError, match="skip_spikes must be above 1"):
        TrainSettings(steps=1, skip_spikes=0.5)


def test_steps_that_are_not_finite_can_be_skipped(one_process: None, tmp_path: Path) -> None:
    par, records = parallel(), Records()
    run = trainer(par, packed(tmp_path), objective=Poisoned(2, 3), accumulate=1, nonfinite="skip", reporters=[records])
    assert run.run().steps == 6
    assert run._work.skips.count == 2 and all(math.isfinite(record["train/loss"]) for record in records.records)
    assert [record["step"] for record in records.records] == [1, 4, 5, 6]
    assert all(bool(parameter.isfinite().all()) for parameter in par.module.parameters())
    always: dict[str, Any] = {"objective": Poisoned(*range(100)), "nonfinite": "skip"}
    with pytest.raises(MeshparError, match="51 steps in a row"):
        trainer(parallel(), packed(tmp_path), accumulate=1, steps=99, **always).run()


def test_the_scaler_changes_nothing_but_skips_overflows(one_process: None, tmp_path: Path) -> None:
    plain, scaled = parallel(), parallel()
    trainer(plain, packed(tmp_path)).run()
    scaler = LossScaler(scale=2.0**14, interval=4)
    trainer(scaled, packed(tmp_path), scaler=scaler).run()
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(scaled)[name], value, rtol=1e-4, atol=1e-6)
    assert (scaler.scale, scaler.skipped) == (2.0**15, 0)
    assert not scaler.update(math.inf)
    assert (scaler.scale, scaler.skipped) == (2.0**14, 1)
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()


@on_ranks(4)
def test_an_overflow_on_the_shards_of_one_rank_is_skipped_by_all() -> None:
    """``torch.amp.GradScaler`` would look at each rank's own shards, and the others would step."""
    with tempfile.TemporaryDirectory() as folder:
        passes = [TensorParallel(), FullyShard(param_dtype=torch.float16, reduce_dtype=torch.float32)]
        par, records, scaler = parallel("dp_shard=2,tp=2", passes), Records(), LossScaler(scale=2.0**10)
        shards = {name: local_tensor(parameter) for name, parameter in par.module.named_parameters()}
        seen: dict[int, dict[str, torch.Tensor]] = {}

        def overflow(norm: float) -> bool:
            seen[run.step] = {name: shard.clone() for name, shard in shards.items()}
            return good(norm)

        good, scaler.update = scaler.update, overflow
        run = trainer(par, packed(Path(folder)), accumulate=1, scaler=scaler, reporters=[records], steps=4)

        def spoil(parameter: torch.Tensor) -> None:
            if run.step == 2 and dist.get_rank() == 3:
                local_tensor(parameter.grad).fill_(math.inf)

        handle = list(par.module.parameters())[-1].register_post_accumulate_grad_hook(spoil)
        run.run()
        handle.remove()
        assert [record["step"] for record in records.records] == [1, 2, 4]
        assert (run._work.skips.count, scaler.skipped, scaler.scale) == (1, 1, 2.0**9)
        assert all(torch.equal(seen[2][name], seen[3][name]) for name in shards)  # no shard of any rank moved
        assert not all(torch.equal(seen[1][name], seen[2][name]) for name in shards)
        assert all(bool(shard.isfinite().all()) for shard in shards.values())


@pytest.mark.parametrize("dtype", daily([torch.bfloat16, torch.float16], torch.bfloat16))
@on_ranks(2)
def test_half_precision_keeps_masters_in_float32(dtype: torch.dtype) -> None:
    """Updates too small for the dtype that computes add up."""
    with tempfile.TemporaryDirectory() as folder:
        losses = {}
        for computed in (torch.float32, dtype):
            sharding, records = FullyShard(param_dtype=computed, reduce_dtype=torch.float32), Records()
            par = parallel("dp_shard=2", [sharding])
            before = weights(par)
            schedule = Schedule(name="constant", lr=1e-7, steps=6, warmup_steps=0)
            scaler = LossScaler() if dtype == torch.float16 else None
            more = {"reporters": [records], "scaler": scaler, "schedule": schedule}
            run = trainer(par, packed(Path(folder)), accumulate=1, **more)
            run.run()
            moved = weights(par)
            moments = [value for state in run.optimizer.state.values() for value in state.values()]
            assert {tensor.dtype for tensor in (*par.module.parameters(), *moments)} == {torch.float32}
            losses[computed] = [record["train/loss"] for record in records.records]
        moves = torch.cat([(moved[name] - before[name]).flatten() for name in before])
        same = torch.cat([(moved[name].to(dtype) == before[name].to(dtype)).flatten() for name in before])
        assert float((moves != 0).float().mean()) > 0.8 and float(same.float().mean()) > 0.9
        torch.testing.assert_close(losses[dtype], losses[torch.float32], rtol=2e-2, atol=0.0)


def test_random_state_of_a_step_needs_only_seed_and_step(one_process: None, tmp_path: Path) -> None:
    run = trainer(parallel(dropout=0.3), packed(tmp_path))
    run.step = 5
    torch.manual_seed(123)
    run._make_step(iter(run.data))
    after = torch.random.get_rng_state()
    expected = trainer(parallel(dropout=0.3), packed(tmp_path))
    expected.step = 5
    expected._make_step(iter(expected.data))
    assert torch.equal(torch.random.get_rng_state(), after)
    assert mix(11, 5) != mix(11, 6)


def test_settings_are_checked_together() -> None:
    message = r"length of the training.*log_every must be an integer from 1, got 0; clip must be above 0"
    with pytest.raises(RecipeError, match=message):
        TrainSettings(log_every=0, clip=-1)
    with pytest.raises(RecipeError, match=r"^validate_every must be an integer from 1 or 'epoch' or None, got 0$"):
        TrainSettings(steps=1, validate_every=0)
    with pytest.raises(RecipeError, match=r"^lr must be above 0, got 0; weight_decay must be from 0, got -1$"):
        AdamWSettings(lr=0, weight_decay=-1)
    assert TrainSettings(steps=1, validate_every="epoch", clip=None).checkpoint_every is None
    assert TrainSettings(steps=10, epochs=2).total_steps(3) == 6
    assert TrainSettings(steps=4, epochs=2).total_steps(3) == 4


# metrics


@on_ranks(2)
def test_a_report_is_joined_over_the_ranks() -> None:
    par = parallel("dp_shard=2", [FullyShard()])
    meter, rank = Meter(par), dist.get_rank()
    for _ in range(2):
        meter.add(5 + rank, {"loss": torch.tensor(10.0 * (rank + 1)), "aux": torch.tensor(float(rank))})
    meter.begin({}, {})
    record = meter.read()
    assert record is not None
    assert record["train/loss"] == pytest.approx(60 / 22) and record["train/aux"] == pytest.approx(2 / 22)
    assert record["tokens"] == 22
    every: list[Any] = [None, None]
    dist.all_gather_object(every, record["memory_gib"])
    assert every[0] == every[1] > 0
    assert not meter.used


def test_time_of_validation_does_not_count(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 100.0, 101.0, 101.0])
    monkeypatch.setattr("meshpar.training.metrics.time.perf_counter", lambda: next(clock))
    meter = Meter(parallel())
    with meter.paused():
        pass
    meter.add(50, {"loss": torch.tensor(1.0)})
    meter.begin({"step": 1}, {})
    record = meter.read()
    assert record is not None and record["tokens_per_second"] == 25.0 and meter.read() is None


@contextmanager
def named_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[torch.device]:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda device: name)
        yield torch.device("cuda")


def test_peaks_are_found_by_the_longest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA A10G": 70e12, "Quadro": None,
    }  # fmt: skip
    for name, peak in names.items():
        with named_gpu(monkeypatch, name) as device:
            assert peak_flops(device) == peak
    assert peak_flops(torch.device("cpu")) is None


def test_json_lines_drop_what_a_lost_run_wrote(tmp_path: Path) -> None:
    file = tmp_path / "run/metrics.jsonl"
    first = JsonLines(file)
    for step in (1, 2, 3):
        first.report({"step": step, "train/loss": math.nan if step == 2 else 1.0})
    first.close()
    with file.open("a") as crashed:
        crashed.write('{"step": 4, "tr')
    second = JsonLines(file, step=2)
    second.report({"step": 3, "train/loss": 0.5})
    second.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 1.0), (2, None), (3, 0.5)]
    JsonLines(file).close()  # a start from nothing
    aside = [json.loads(line)["step"] for line in file.with_suffix(".abandoned.jsonl").read_text().splitlines()]
    assert (file.read_text(), aside) == ("", [3, 1, 2, 3])


def test_json_lines_that_cannot_be_rewritten_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    torn = b'{"step": 1}\nnot a record \xff\n' + b"[" * 100_000 + b'\n{"step": 2}\n'
    file.write_bytes(torn)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        JsonLines(file, step=1)
    assert file.read_bytes() == torn
    monkeypatch.undo()
    JsonLines(file, step=1).close()
    assert file.read_text() == '{"step": 1}\n'


def test_the_console_writes_plain_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    console = Console(100, step=90, file=file)
    figures = {"train/loss": 1.25, "lr": 3e-4, "grad_norm": 0.5, "tokens_per_second": 12345.6, "epoch": 0}
    console.report({"step": 95, **figures})
    console.report({"step": 95, "eval/choice/accuracy": 0.5, "eval/choice/margin": 1.23456})
    console.note("checkpoint of step 95 saved")
    console.close()
    line, found, note = file.getvalue().splitlines()
    assert found == "step  95/100  choice/accuracy 0.5  choice/margin 1.235"
    assert line.startswith("step  95/100  loss 1.2500  lr 3.00e-04  norm 0.5  12,346 tok/s  eta 0:00:0")
    assert note == "checkpoint of step 95 saved"


def test_the_console_moves_a_line_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    console = Console(10, file=file)
    for name, value in {"train/loss": 1.25, "val/loss": 1.5, "eval/choice/accuracy": 0.5, "eval/acc[/x]": 0.5}.items():
        console.report({"step": 5, name: value})
    console.close()
    for words in ("acc[/x] 0.5", "5/10", "step 5: val 1.5000", "step 5: choice/accuracy 0.5"):
        assert words in file.getvalue()
