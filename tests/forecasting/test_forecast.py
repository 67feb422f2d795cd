"""The forecast: closed forms, probes scaled to full depth, time of trace and hardware, what a plan pays for."""

import functools
import importlib.util
import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshpar
import meshpar.forecasting.staged as staged
from meshpar import (
    ActivationCheckpoint,
    Float8,
    FullyShard,
    HybridShard,
    PipelineParallel,
    Plan,
    PlanError,
    TensorParallel,
)
from meshpar.core.errors import MeshparError
from meshpar.core.mesh import MeshSpec
from meshpar.forecasting import Batch, Hardware, Trace, cost, forecast
from meshpar.forecasting import search as search_module
from meshpar.forecasting.api import evaluated, probes
from meshpar.forecasting.cost import placement, sending_time
from meshpar.forecasting.extrapolate import deepened, widened
from meshpar.forecasting.hardware import RESERVED_RANGE, profiles
from meshpar.forecasting.html import page
from meshpar.forecasting.lints import lints
from meshpar.forecasting.ranking import Candidate, Ranking, Settings, alike, ranking_text
from meshpar.forecasting.report import as_data, feedback, text, with_unit
from meshpar.forecasting.simulate import Depths, Simulation, simulate
from meshpar.forecasting.trace import Collective, Event, Phase
from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig
from tests.support.models_for_parity import Masked, on_meta
from tests.support.patience import until
from tests.support.tiers import daily

SMALL = TransformerConfig(vocab_size=512, dim=64, layers=5, heads=4, kv_heads=2, hidden=96, max_positions=64)
SP = TensorParallel(sequence_parallel=True, loss_parallel=True)
BF16 = {"param_dtype": torch.bfloat16}
COUNTS = {"llama-8b": 8_030_261_248, "llama-70b": 70_553_706_496, "llama-405b": 405_853_388_800}


def transformer(config):
    return on_meta(lambda: Transformer(config))


def job(config, mesh, passes, **batch):
    spec = MeshSpec(mesh)
    return Simulation(
        plan=Plan(spec, passes),
        model=transformer(config),
        batch=Batch(**{"sequence": 64} | batch),
        world_size=spec.size,
    )


def bytes_of_a_rank(model, tp, shards):
    """Float32 bytes of the first rank: TP splits what its table says, FSDP dim 0 of the rest, rounded up."""
    total = 0
    for name, parameter in model.named_parameters():
        rows, rest = parameter.shape[0], parameter.numel() // parameter.shape[0]
        if name.endswith(("attn.o.weight", "mlp.down.weight")):
            rest //= tp
        elif "norm" not in name:
            rows //= tp
        total += -(-rows // shards) * rest * 4
    return total


def probes_of(name):
    big = job(TransformerConfig.preset(name), "dp_shard=48,tp=8", [SP, ActivationCheckpoint(), FullyShard(**BF16)])
    return {
        (name, place): probe for place, probe in enumerate(probes(big, Depths(big.model, big.model.meshpar_layout())))
    }


def at_depths(name, depths):
    """Return simulations of one step of a model of five blocks, and of its first ones."""
    made = {
        "recomputed": job(SMALL, "dp_replicate=2,dp_shard=2,tp=2", [SP, ActivationCheckpoint(), HybridShard(**BF16)]),
        "kept": job(SMALL, "dp_shard=4", [FullyShard(reshard_after_forward=False)], accumulate=2),
    }[name]
    shorter = Depths(made.model, made.model.meshpar_layout())
    return {
        (name, depth): made if depth == SMALL.layers else replace(made, model=shorter.shallow(depth))
        for depth in depths
    }


def of_gpt2(layers):
    model = on_meta(lambda: GPT2(GPT2Config(n_layer=layers)))
    return Simulation(plan=Plan("dp_shard=4", [FullyShard()]), model=model, batch=Batch(sequence=64), world_size=4)


@functools.cache
def more_traces():
    """The simulations that are made at night alone."""
    jobs = probes_of("llama-8b") | probes_of("llama-70b") | at_depths("kept", (2, 5)) | {("gpt2", 12): of_gpt2(12)}
    jobs["alone"] = job(
        replace(SMALL, layers=2),
        "tp=2",
        [TensorParallel(sequence_parallel=True, styles={"layers.*.attn": None, "layers.*.mlp": None})],
    )
    jobs["padded"] = job(replace(SMALL, layers=2), "dp_shard=48", [FullyShard(**BF16)])
    jobs["masked"] = Simulation(
        plan=Plan("dp_shard=2", [FullyShard(**BF16)]), model=on_meta(Masked), batch=Batch(sequence=2048), world_size=2
    )
    if importlib.util.find_spec("torchao") is not None:
        jobs |= {
            name: job(SMALL, "dp_shard=2", [*more, FullyShard(**BF16)])
            for name, more in {"eight": [Float8()], "sixteen": []}.items()
        }
    return dict(zip(jobs, simulate(list(jobs.values()), workers=2)))


@functools.cache
def traces():
    """The simulations of each run of this file, in one pool of workers."""
    jobs = at_depths("recomputed", (2, 3, 5)) | at_depths("kept", (3,)) | {("gpt2", 3): of_gpt2(3)}
    wide = [
        (size, job(replace(SMALL, layers=2), "dp_shard=2", [FullyShard(**BF16)], micro_batch=size))
        for size in (1, 2, 5)
    ]
    jobs |= {("wide", size): replace(made, device="cpu") for size, made in wide}  # whose allocator does not round
    jobs["logits"] = job(replace(SMALL, vocab_size=2048), "tp=2", [TensorParallel(sequence_parallel=True)])
    jobs |= probes_of("llama-405b")
    counts = []
    found = simulate(list(jobs.values()), workers=2, progress=lambda *counted: counts.append(counted))
    done = [done_so_far for done_so_far, _ in counts]
    assert {total for _, total in counts} == {len(jobs)} and done == sorted(done) and len(set(done)) > 2
    return dict(zip(jobs, found))


def test_a_batch_of_tensors_forecasts_like_its_shape():
    ids = torch.zeros(2, 64, dtype=torch.int64)
    plan, model = Plan("dp_shard=2", [FullyShard()]), transformer(replace(SMALL, layers=2))
    given = meshpar.forecast(plan, model, {"input_ids": ids, "labels": ids}, hardware="h100")
    assert given.batch == Batch(sequence=64, micro_batch=2)
    assert given.trace.parameters == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(MeshparError, match=r"needs input_ids of \(batch, length\), got none"):
        meshpar.forecast(plan, model, {"pixels": ids}, hardware="h100")


def test_the_partial_sums_of_same_bits_count():
    peaks = {}
    for same_bits in (False, True):
        model = transformer(replace(SMALL, layers=2))
        plan, batch = (
            Plan("dp_shard=2", [FullyShard()], same_bits=same_bits),
            Batch(sequence=8, accumulate=4, reduce_each=True),
        )
        peaks[same_bits] = forecast(plan, model, batch, hardware="h100", depth="all").memory.peak
    shards = sum(-(-one.shape[0] // 2) * one[0].numel() * 4 for one in model.parameters())
    # the last of four micro-batches finds the sum of two and that of one, in the place of the sum of three, and adds one
    assert shards <= peaks[True] - peaks[False] <= 2 * shards


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed (the extra float8)")
@pytest.mark.long
def test_float8_products_count_at_their_own_speed():
    eight, sixteen = more_traces()["eight"], more_traces()["sixteen"]
    assert eight.flops() == sixteen.flops()
    products = [event for _, event in eight.events() if event.name == "_scaled_mm"]
    assert len(products) == 3 * 7 * SMALL.layers, "forward and two gradients of each layer's seven"
    assert {event.dtype for event in products} == {"float8"}
    h100 = Hardware.load("h100")
    assert h100.flops("float8") == 2 * h100.flops("bfloat16") + 1e12
    with pytest.raises(MeshparError, match="a100 has no speed for float8"):
        cost(eight, Hardware.load("a100"))


@pytest.mark.parametrize(("layers", "count"), daily([(3, 60_648_960), (12, 124_439_808)], (3, 60_648_960)))
def test_gpt2_on_four_ranks_holds_the_closed_form(layers, count):
    trace = (traces() if layers == 3 else more_traces())["gpt2", layers]
    exact, model = trace.exact, of_gpt2(layers).model
    held = sum(-(-p.shape[0] // 4) * (p.numel() // p.shape[0]) * 4 for p in model.parameters())
    assert trace.parameters == count
    assert (exact["parameters"], exact["gradients"], exact["optimizer"]) == (held, held, 2 * held)


@pytest.mark.parametrize("name", daily(COUNTS, "llama-405b"))
def test_llama_shapes_hold_the_closed_form(name):
    few, more = ((traces() if name == "llama-405b" else more_traces())[name, place] for place in (0, 1))
    config = TransformerConfig.preset(name)
    trace = deepened(few, more, config.layers)
    held = bytes_of_a_rank(transformer(config), 8, 48)
    assert trace.parameters == COUNTS[name]
    assert (trace.exact["parameters"], trace.exact["gradients"], trace.exact["optimizer"]) == (held, held, 2 * held)


@pytest.mark.nightly
def test_qwen3_experts_hold_the_closed_form():
    from meshpar.models.huggingface import from_config

    config = {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "tie_word_embeddings": False,
    }  # fmt: skip
    layer = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2 * 128 + 2 * 2048 + 128 * 2048 + 128 * 3 * 2048 * 768
    described = Plan("dp_shard=64", [FullyShard()]).describe(from_config(config), world_size=64)
    assert described.parameters == 2 * 151_936 * 2048 + 48 * layer + 2048 == 30_532_122_624
    assert described.parameter_bytes == 4 * described.parameters // 64


def test_a_step_of_experts_counts_the_chosen_ones():
    from meshpar.models.huggingface import from_config

    config = {
        "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    found = meshpar.forecast(
        Plan("dp_shard=8", [FullyShard(**BF16)]), from_config(config), Batch(sequence=256), hardware="h100"
    )
    products = [event for _, event in found.trace.events() if event.name == "_grouped_mm"]
    assert sum(event.flops for event in products) == 3 * (
        3 * 2 * 256 * 2 * 3 * 64 * 32
    )  # backward is two products for each forward
    kinds = {event.name for _, event in found.trace.events() if "scaled_dot_product" in event.name}
    assert kinds == {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}


@pytest.mark.parametrize("name", daily(["recomputed", "kept"], "recomputed"))
def test_probes_tell_the_full_depth_to_the_byte(name):
    known = traces() if name == "recomputed" else traces() | more_traces()
    extrapolated, replayed = deepened(known[name, 2], known[name, 3], 5), known[name, 5]
    assert extrapolated.collectives() == replayed.collectives()
    assert (extrapolated.exact, extrapolated.held, extrapolated.parameters) == (
        replayed.exact,
        replayed.held,
        replayed.parameters,
    )
    assert extrapolated.flops() == replayed.flops()
    one, other = extrapolated.memory(), replayed.memory()
    assert (one.peak, one.held, one.end, len(one.curve)) == (other.peak, other.held, other.end, len(other.curve))
    hardware = Hardware.load("h100")
    assert cost(extrapolated, hardware).seconds == pytest.approx(cost(replayed, hardware).seconds, rel=1e-3)


def test_one_sample_and_two_tell_five():
    extrapolated, replayed = widened(traces()["wide", 1], traces()["wide", 2], 5), traces()["wide", 5]
    assert extrapolated.collectives() == replayed.collectives() and extrapolated.flops() == replayed.flops()
    assert extrapolated.memory().peak == replayed.memory().peak


def test_a_trace_survives_json():
    trace = traces()["recomputed", 3]
    assert Trace.from_json(trace.to_json()) == trace


def test_recomputation_and_full_attention_count_as_the_formula_says():
    trace, config = traces()["recomputed", 5], SMALL
    matrices = sum(p.numel() for n, p in transformer(config).named_parameters() if p.ndim == 2 and n != "embed.weight")
    attention = 4 * 64 * 64 * config.dim * config.layers
    forward = 2 * matrices * 64 + attention
    assert (
        trace.flops(recomputed=False) * 2 == 3 * forward + attention // 2
    )  # flash attention's backward does five products for two
    assert trace.flops() > trace.flops(recomputed=False)


def test_overlapped_communication_costs_nothing_and_exposed_its_time():
    sent = Collective(kind="all_gather", axis="dp_shard", ranks=16, stride=1, size=1 << 30, dtype="bfloat16")
    work = Event(kind="compute", name="mm", flops=10**15, moved=1, shape=(1, 8192, 8192, 8192), dtype="bfloat16")
    gather = Event(kind="collective", name="all_gather", stream="gather", collective=sent)
    hardware, took = Hardware.load("h100"), sending_time(sent, Hardware.load("h100"))

    def seconds(*events):
        phases = (Phase(name="forward", events=events),)
        empty = {"parameters": 0}
        return cost(
            Trace(axes={}, depth=1, tokens=1, data_size=1, held={}, exact=empty, parameters=1, phases=phases), hardware
        )

    alone = seconds(work).seconds
    hidden = seconds(gather, work, Event(kind="wait", name="wait", target=0))
    exposed = seconds(gather, Event(kind="wait", name="wait", target=0), work)
    assert hidden.seconds == pytest.approx(alone, rel=1e-3) and sum(hidden.exposed.values()) == 0.0
    assert exposed.seconds == pytest.approx(alone + took, rel=1e-3)
    assert exposed.exposed["dp_shard"] == pytest.approx(took, rel=1e-2)


def stages_of(micro_batches, mute=False):
    """Return a trace of two stages in 1F1B order, whose forwards and backwards take equally long."""

    def message(kind, peer, tag):
        sent = Collective(kind=kind, axis="pp", ranks=2, stride=1, size=8, dtype="float32", peer=peer, tag=tag)
        return Event(kind="collective", name=kind, collective=sent)

    def stage(number, names):
        other = 1 - number
        work = Event(kind="compute", name="mm", flops=10**15, moved=1, shape=(1, 8192, 8192, 8192), dtype="bfloat16")
        parts = {
            (0, "F"): (work, *(() if mute else (message("send", other, 0),))),
            (0, "B"): (message("recv", other, 1), work),
            (1, "F"): (message("recv", other, 0), work),
            (1, "B"): (work, message("send", other, 1)),
        }
        phases = tuple(
            Phase(name={"F": "forward", "B": "backward"}[name], events=parts[number, name]) for name in names
        )
        return Trace(
            axes={"pp": 2}, depth=1, tokens=micro_batches, data_size=1, held={"parameters": 8 - number}, exact={"parameters": 0},
            parameters=1, phases=phases,
        )  # fmt: skip

    stages = stage(0, "F" + "FB" * (micro_batches - 1) + "B"), stage(1, "FB" * micro_batches)
    return replace(stages[0], stages=stages)


def test_simulated_stages_send_what_others_receive():
    (trace,) = simulate([job(SMALL, "pp=2,dp_shard=2", [PipelineParallel(stages=(3, 2)), FullyShard()], accumulate=3)])
    sent = [
        [(one.tag, one.size) for _, one in stage.collectives() if one.kind == kind]
        for stage in trace.stages
        for kind in ("send", "recv")
    ]
    assert len(sent[0]) == len(sent[2]) == 3
    assert sent[0] == sent[3] and sent[2] == sent[1]
    assert cost(trace, Hardware.load("h100")).seconds > 0


def test_stages_wait_for_one_another():
    hardware, trace = Hardware.load("h100"), stages_of(5)
    one = cost(trace.stages[0], hardware).computing["matmul"] / 10
    timed = cost(trace, hardware)
    assert timed.seconds == pytest.approx((5 + 2 - 1) * 2 * one, rel=1e-3)
    for stage in timed.stages:
        assert stage.exposed["pp"] == pytest.approx(2 * one, rel=1e-2) or stage is timed.stages[1]
    assert [stage.live() for stage in trace.stages] == [2, 1] and timed.ends == timed.stages[0].ends
    assert Trace.from_json(trace.to_json()) == trace
    with pytest.raises(MeshparError, match="a message is missing"):
        cost(stages_of(5, mute=True), hardware)
    shape = MeshSpec("pp=2")
    simulation = Simulation(
        plan=Plan(shape, []), model=transformer(SMALL), batch=Batch(sequence=1, accumulate=5), world_size=2
    )
    report = evaluated(trace, hardware, simulation, "all")
    assert [row["micro_batches"] for row in as_data(report)["stages"]] == [2, 1]
    assert "one waits for another for" in text(report)
    assert page([report]).count("<title>backward") == 10


WIDE = replace(SMALL, vocab_size=16_000, dim=2048, layers=10, heads=16, kv_heads=4, hidden=5632, max_positions=2048)


@pytest.mark.nightly
def test_three_short_stages_tell_those_of_another_mesh():
    passes = [PipelineParallel(stages=(3, 3, 2, 2)), FullyShard(**BF16)]
    made = job(WIDE, "pp=4,dp_shard=2", passes, sequence=2048, accumulate=6)
    layout, hardware = made.model.meshpar_layout(), Hardware.load("h100")
    wider = replace(made, plan=Plan(MeshSpec("pp=4,dp_shard=4"), passes), world_size=16)
    few, more, whole = simulate([*staged.probes(wider, Depths(made.model, layout)), made], workers=2)
    known, shape = staged.Stages(few, more), staged.shape_of(made, layout)
    joined = known.joined(shape)
    for stage, simulated in zip(joined.stages, whole.stages, strict=True):
        for one in (stage, simulated):
            assert one.parameters == sum(parameter.numel() for parameter in made.model.parameters())
        assert [what(event) for _, event in stage.events()] == [what(event) for _, event in simulated.events()]
        assert (stage.flops(), stage.live()) == (simulated.flops(), simulated.live())
    assert cost(joined, hardware).seconds == pytest.approx(cost(whole, hardware).seconds, rel=0.01)
    estimate = known.joined(shape, known.estimates(hardware, lambda trace: search_module.on_mesh(trace, 1, 2)))
    for stage, simulated in zip(estimate.stages, whole.stages, strict=True):
        assert stage.memory().peak == pytest.approx(simulated.memory().peak, rel=0.03)
    assert cost(estimate, hardware).tokens_per_second == pytest.approx(
        cost(whole, hardware).tokens_per_second, rel=0.03
    )


def what(event):
    """Return what an event is, apart from sizes that depend on the ranks of data."""
    sent = event.collective
    return event.kind, event.name, event.flops, sent and (sent.kind, sent.axis, sent.peer, sent.tag)


@pytest.mark.nightly
def test_a_search_over_stages_estimates_what_a_forecast_of_the_plan_says():
    model, hardware = transformer(replace(WIDE, layers=12)), replace(Hardware.load("h100"), node=2)
    batch, layout = Batch(sequence=2048, accumulate=4), model.meshpar_layout()
    found = search_module.search(
        model, layout, batch, hardware, 8, recompute=("full",), micro_batches=(1,), stages=(2, 4), top=0
    )
    for stages in (2, 4):
        best = next(candidate for candidate in found.fitting if candidate.settings.stages == stages)
        plan = Plan(best.settings.mesh(), best.settings.passes())
        alone = forecast(plan, model, replace(batch, accumulate=4 * stages), hardware=hardware, depth="all")
        assert best.tokens_per_second == pytest.approx(alone.cost.tokens_per_second, rel=0.05), str(best.settings)
        assert best.peak == pytest.approx(alone.memory.peak, rel=0.05), str(best.settings)


def made_up(jobs):
    """Traces in which experts that are divided compute a tenth of the time."""
    meshes = [(dict(simulation.plan.mesh.axes), simulation.batch.micro_batch) for simulation in jobs]
    work = [
        Event(kind="compute", name="mm", flops=10**11 if "ep" in axes else 10**12, shape=(1, 64, 64, 64))
        for axes, _ in meshes
    ]
    return [
        Trace(
            axes=axes, depth=2, tokens=64 * samples, data_size=math.prod(size for axis, size in axes.items() if axis != "tp"),
            held={}, exact={}, parameters=1, phases=(Phase(name="forward", events=(event,)),),
        )
        for (axes, samples), event in zip(meshes, work)
    ]  # fmt: skip


def searched(experts, **options):
    model = transformer(replace(SMALL, experts=experts, qk_norm=True))
    node = replace(Hardware.load("h100"), node=6)
    asked = {"recompute": ("none",), "micro_batches": (1, 2), **options}
    return search_module.search(model, model.meshpar_layout(), Batch(sequence=64), node, 6, **asked)


def test_a_search_tries_ep_for_mixtures(monkeypatch):
    heard = []

    def traced(jobs, workers, progress, until=None):
        progress(len(jobs), len(jobs))
        return made_up(jobs)

    monkeypatch.setattr(search_module, "simulate", traced)
    for experts, mesh in ((6, {"dp_shard": 3, "ep": 2}), (0, {"dp_shard": 6})):
        found = searched(experts, progress=lambda *counts: heard.append(counts))
        assert found.fitting[0].settings.mesh().axes == found.best[0].mesh.axes == mesh
        assert found.fitting[0].tokens_per_second == pytest.approx(found.best[0].cost.tokens_per_second)
        assert found.simulated == found.wanted and "time was up" not in ranking_text(found)
    assert {what for what, *_ in heard} == {"meshes of data and tp", "ep=2", "ep=3", "ep=6", "the best"}


def test_a_search_whose_time_is_up_ranks_what_it_has_simulated(monkeypatch):
    """And replays the best of it; with more time it finds a faster one."""
    limits = []

    def traced(jobs, workers, progress, until=None):
        if until is None:  # the best
            return made_up(jobs)
        limits.append(until)
        return made_up(jobs) if len(limits) <= 2 else [None] * len(jobs)  # micro-batches of 1

    monkeypatch.setattr(search_module, "simulate", traced)
    before = time.monotonic()
    found = searched(6, seconds=40.0)
    assert len(set(limits)) == 1 and 0 < limits[0] - before - 30.0 < 5.0, "a quarter is for the best"
    assert len(found.best) == 1 and found.best[0].mesh.axes == {"dp_shard": 6}
    assert {candidate.settings.micro_batch for candidate in found.fitting} == {1}
    assert 0 < found.simulated < found.wanted
    assert f"up after {found.simulated} of {found.wanted} steps to simulate" in ranking_text(found)
    monkeypatch.setattr(search_module, "simulate", lambda jobs, until=None, **_: [None] * len(jobs))
    with pytest.raises(MeshparError, match=r"no setting fits of 0 of \d+ steps .* in 40 seconds; give the search more"):
        searched(6, seconds=40.0)
    monkeypatch.setattr(search_module, "simulate", lambda jobs, until=None, **_: made_up(jobs))
    assert searched(6, seconds=400.0).best[0].mesh.axes == {"dp_shard": 3, "ep": 2}


def test_a_simulation_ends_at_its_time_with_the_traces_that_it_has(monkeypatch):
    jobs, clock = [job(replace(SMALL, layers=2), "dp_shard=2", [FullyShard()])] * 40, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def advance(done, total):
        clock[0] = 10.0 * done

    traces = simulate(jobs, workers=1, progress=advance, until=5.0)
    done = [trace for trace in traces if trace is not None]
    assert 0 < len(done) < 40 and traces[: len(done)] == done
    assert simulate(jobs, workers=1, progress=None, until=5.0) == [None] * 40, "none is begun"


def test_groups_lie_where_rank_order_puts_them():
    hardware = Hardware.load("h100")
    sent = Collective(kind="all_reduce", axis="x", ranks=8, stride=1, size=1, dtype="float32")
    assert placement(sent, hardware) == (8, 1)
    assert placement(replace(sent, stride=8), hardware) == (1, 8)
    assert placement(replace(sent, ranks=16, stride=2), hardware) == (4, 4)


def found(name):
    """The lints of a trace by name, on a card small enough for these models to matter."""
    small = replace(Hardware.load("h100"), memory=2e7)
    trace = (traces() if name in traces() else more_traces())[name]
    return {lint.name: lint for lint in lints(trace, cost(trace, small), small)}


def test_float32_is_the_first_lever():
    name, lint = next(iter(found(("gpt2", 3)).items()))
    assert name == "float32"
    assert lint.text.startswith("100% of the operations are in float32, which h100 computes at 1/")
    assert lint.seconds == max(other.seconds for other in found(("gpt2", 3)).values()) > 0
    assert "float32" not in found(("recomputed", 3))


@pytest.mark.nightly
def test_projections_that_prepare_their_own_input_are_told_with_their_cost():
    lint = found("alone")["redundant tensor-parallel collectives"]
    assert "5 all-gathers a block" in lint.text and lint.seconds > 0
    assert "redundant tensor-parallel collectives" not in found(("recomputed", 3))


@pytest.mark.nightly
def test_padding_is_told_with_its_part_of_what_is_gathered():
    lint = found("padded")["padding"]
    held, real = (
        48 * bytes_of_a_rank(transformer(replace(SMALL, layers=2)), 1, 48),
        4 * more_traces()["padded"].parameters,
    )
    assert lint.text.startswith(f"{held / real - 1:.0%} of what dp_shard=48 gathers is padding")
    assert lint.size == (held - real) // 48 and lint.seconds > 0
    assert "padding" not in found(("recomputed", 3)) and "padding" not in found(("kept", 3))


def test_logits_that_every_rank_holds_are_told_with_what_splitting_them_saves():
    lint = found("logits")["replicated logits"]
    assert lint.size == traces()["logits"].memory().held["logits and loss"] // 2 >= 64 * 2048 * 4
    assert "loss_parallel=True" in lint.text and "replicated logits" not in found(("recomputed", 3))


def test_attention_that_is_not_flash_is_told_with_the_scores_it_holds():
    lint = found(("kept", 3))["attention is not flash"]
    assert "plain attention" in lint.text and lint.seconds > 0 and lint.size >= 4 * 64 * 64 * SMALL.heads
    assert "attention is not flash" not in found(("recomputed", 3))


@pytest.mark.nightly
def test_a_mask_built_in_memory_is_told_with_its_bytes():
    lint = found("masked")["materialised mask"]
    assert "2048 x 2048" in lint.text and lint.size >= 2048 * 2048
    assert "materialised mask" not in found(("kept", 3))


def test_communication_that_computing_waits_for_is_told_by_axis():
    lint = found(("recomputed", 3))["exposed communication"]
    assert lint.seconds in cost(traces()["recomputed", 3], replace(Hardware.load("h100"), memory=2e7)).exposed.values()


def test_reports_hold_the_same_figures():
    simulated = job(SMALL, "dp_replicate=2,dp_shard=2,tp=2", [SP, ActivationCheckpoint(), HybridShard(**BF16)])
    whole = evaluated(traces()["recomputed", 5], Hardware.load("h200"), simulated, "all")
    data = json.loads(json.dumps(as_data(whole)))
    assert data["peak"]["bytes"] == sum(data["peak"]["held"].values()) == whole.memory.peak
    assert sum(row["count"] for row in data["collectives"]) == len(whole.trace.collectives())
    assert "all_gather" in text(whole) and "waiting for" in text(whole)
    drawn = page([whole])
    assert drawn.count("<svg") == 5 and "http" not in drawn.replace("http://www.w3.org", "")


def test_feedback_warns_where_forecast_and_job_part():
    simulated = job(SMALL, "dp_replicate=2,dp_shard=2,tp=2", [SP, ActivationCheckpoint(), HybridShard(**BF16)])
    plan = evaluated(traces()["recomputed", 5], Hardware.load("h100"), simulated, "all")
    near = feedback(plan, peak=plan.memory.peak, seconds=plan.cost.seconds * 1.1)
    far = feedback(plan, peak=2 * plan.memory.peak, seconds=plan.cost.seconds * 3)
    assert not near.warnings and "+10.0%" in near.lines[0]
    assert "3.00 times" in far.warnings[0] and "2.00 times" in far.warnings[1]


def test_a_verdict_counts_what_allocators_reserved_in_published_runs():
    table = (Path(__file__).parents[2] / "docs" / "forecast.md").read_text()
    runs = re.findall(
        r"^\|.*\| ([\d.]+) \| ([\d.]+) \| -[\d.]+% \|$", table.partition("**[KempnerForge MFU]")[0], re.MULTILINE
    )
    runs += re.findall(
        r"^\|.*\| ([\d.]+) \| ([\d.]+) \| -[\d.]+% \|$", table.partition("**[torchtitan H200]")[2], re.MULTILINE
    )
    ratios = sorted(float(reserved) / float(peak) for reserved, peak in runs)
    assert len(ratios) == 10 and (round(ratios[0], 2), round(ratios[-1], 2)) == RESERVED_RANGE
    hardware = replace(Hardware.load("h100"), memory=104.0, reserved=4.0)
    assert [hardware.verdict(peak) for peak in (74, 75, 93, 94)] == ["fits", "may fit", "may fit", "does not fit"]


def test_a_ranking_groups_what_the_forecast_cannot_tell_apart():
    common = {"replicas": 1, "shards": 8, "tp": 1, "reshard": True, "recompute": "full", "beside": (), "fixed": {}}

    def candidate(size, speed, verdict, problem=""):
        settings = Settings(micro_batch=size, **common)
        return Candidate(settings=settings, tokens_per_second=speed, peak=50 << 30, verdict=verdict, problem=problem)

    found = [
        candidate(1, 84.0, "fits"),
        candidate(2, 86.0, "fits"),
        candidate(4, 100.0, "may fit"),
        candidate(8, 80.0, "may fit"),
    ]
    groups = alike(found)
    assert [[candidate_.settings.micro_batch for candidate_ in group] for group in groups] == [[2, 4], [1, 8]]
    output = ranking_text(
        Ranking(best=(), groups=groups, out=(candidate(16, 0.0, "does not fit", "needs 90 to 114 GiB of 75"),))
    )
    assert output.startswith(
        "2 settings fit, 2 may fit, 1 do not (an allocator reserves 1.07 to 1.35 times the peak of tensors)"
    )
    assert "the fastest, 2 settings within 15%, the error of the forecast: it cannot tell which is faster" in output
    assert "16% to 20% slower, 2 settings that it cannot tell apart:" in output
    assert "100 tokens/s    50.0 GiB, reserved   54 to 68 GiB  may fit  dp_shard=8; micro-batch 4" in output


def test_every_profile_reads_and_a_wrong_one_says_what_is_wrong(tmp_path):
    assert {"a100", "b200", "h100", "h200"} <= set(profiles())
    assert all(math.isfinite(Hardware.load(name).flops("bfloat16")) for name in profiles())
    wrong = tmp_path / "mine.yaml"
    wrong.write_text("name: mine\nspeed: 3\n")
    with pytest.raises(MeshparError, match=r"unknown field speed.*missing field attention_backward"):
        Hardware.load(wrong)
    with pytest.raises(MeshparError, match="nearest: h100"):
        Hardware.load("h10")
    text = profiles()["h100"].read_text()
    wrong.write_text(re.sub(r"(?m)^reserved:.*", "reserved: 1.0e12", text))
    with pytest.raises(MeshparError, match=r"reserved is 1e\+12 bytes of a memory of .*; expected a part of it"):
        Hardware.load(wrong)


def test_a_plan_that_cannot_run_is_refused_before_anything_is_simulated():
    with pytest.raises(PlanError, match="tp=3"):
        forecast(Plan("tp=3", [TensorParallel()]), transformer(SMALL), Batch(sequence=64), hardware="h100")


def run_script(script):
    command = [sys.executable, "-m", "tests.support.script", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_simulation_ends_with_the_process_that_asked(tmp_path):
    script = tmp_path / "asks.py"
    script.write_text("""
import os, signal, subprocess, time, torch, meshpar
class Endless(torch.nn.Linear):
    def forward(self, x):
        time.sleep(10_000)
if __name__ == "__main__":
    start = subprocess.Popen
    def started(*args, **options):
        process = start(*args, **options)
        while b"meshpar.forecasting.worker" not in open(f"/proc/{process.pid}/cmdline", "rb").read():
            time.sleep(0.001)
        print(process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    subprocess.Popen = started
    meshpar.forecast(
        meshpar.Plan("dp_shard=2", [meshpar.FullyShard()]),
        Endless(4, 4, device="meta"),
        meshpar.forecasting.Batch(sequence=8),
        hardware="h100",
        layout=meshpar.ModelLayout(),
    )
""")
    done = run_script(script)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until(lambda: not running(done.stdout.strip()), report=lambda: "the simulation goes on without who asked")


def running(pid):
    try:
        return "State:\tZ" not in (Path("/proc") / pid / "status").read_text()
    except OSError:
        return False


@pytest.mark.nightly
def test_an_optimizer_that_a_script_defines_is_forecast(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("""
import torch, meshpar
from meshpar.models import Transformer, TransformerConfig
def optimizer(module):
    return torch.optim.SGD(module.parameters(), lr=1.0)
if __name__ == "__main__":
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=64, dim=32, layers=1, heads=2, kv_heads=2, hidden=32, max_positions=8))
    plan = meshpar.Plan("dp_shard=2", [meshpar.FullyShard()])
    alone = meshpar.forecast(plan, model, meshpar.forecasting.Batch(sequence=8), hardware="h100", optimizer=optimizer)
    print(alone.memory.held.get("optimizer", 0))
""")
    done = run_script(script)
    assert done.stdout.split() == ["0"], done.stderr


def test_an_automatic_mesh_is_forecast_on_nodes_of_the_hardware():
    plan, model = Plan("auto", [HybridShard()]), transformer(SMALL)
    made_forecast = forecast(plan, model, Batch(sequence=64), hardware="h100", world_size=16)
    assert dict(made_forecast.mesh.axes) == {"dp_replicate": 2, "dp_shard": 8}
    for mesh in ("auto", "dp_replicate=2,dp_shard=-1"):
        with pytest.raises(MeshparError, match="does not say how many ranks there are; give world_size="):
            forecast(Plan(mesh, plan.passes), model, Batch(sequence=64), hardware="h100")


SCRIPT = """
import torch, meshpar
from torch import nn
class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
def loss(model, batch):
    return model(batch["input_ids"][..., None].float().expand(-1, -1, 32)).sum()
def main():
    with torch.device("meta"):
        model = Mine()
    print(meshpar.forecast(meshpar.Plan("dp_shard=2", [meshpar.FullyShard()]), model, meshpar.forecasting.Batch(sequence=8), hardware="h100",
                           loss=loss).trace.parameters)
"""


def test_a_model_that_a_script_defines_is_forecast(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT + 'if __name__ == "__main__":\n    main()\n')
    done = run_script(script)
    assert done.stdout.split() == [str(3 * (32 * 32 + 32))], done.stderr


@pytest.mark.nightly
def test_a_script_that_forecasts_when_it_is_imported_is_told(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT + "main()\n")
    done = run_script(script)
    assert done.returncode and 'put what it does under if __name__ == "__main__"' in done.stderr
    script.write_text(SCRIPT + 'if __name__ == "__main__":\n    main()\n')
    assert run_script(script).stdout.split() == [str(3 * (32 * 32 + 32))]


@pytest.mark.parametrize(
    ("count", "written"), [(8_030_261_248, "8.03B"), (124_439_808, "124.44M"), (12_345, "12.35K"), (96, "96")]
)
def test_a_small_model_is_not_of_zero_billions(count: int, written: str) -> None:
    assert with_unit(count) == written
