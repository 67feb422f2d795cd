"""Pipeline parallelism: loss, gradients, norm and weights are one process's, whatever a stage holds."""

import os
import re
import socket
import threading
from contextlib import nullcontext, suppress
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather

from meshpar import (
    ActivationCheckpoint,
    CheckpointError,
    Compile,
    ContextParallel,
    ExpertParallel,
    Float8,
    FullyShard,
    HybridShard,
    MeshparError,
    ModelLayout,
    PipelineParallel,
    Plan,
    PlanError,
    Replicate,
    TensorParallel,
)
from meshpar._torch.fsdp import param_groups
from meshpar._torch.groups import collective_counts
from meshpar.checkpoints import CheckpointManager
from meshpar.optim import Muon
from meshpar.passes.pipeline import parallel, stage_checks
from meshpar.passes.pipeline.cuts import even_cuts, examine
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.pipeline.schedule import SCHEDULES, Action, actions
from meshpar.tensors.placements import whole_tensor
from meshpar.testing import RankFailure, launch, on_ranks, token_loss_sum
from meshpar.training import AdamWSettings, LoRA, add_adapters, build_adamw
from tests.support.comparison import assert_gradients, gradients
from tests.support.models_for_parity import VOCAB, huggingface, on_meta, transformer
from tests.support.patience import patient, until
from tests.support.stages import MODELS, Crossing, Plain, assert_as_one_process, batches, scaled_loss
from tests.support.tiers import daily

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
TWO_STAGES = [(name, schedule) for name in MODELS for schedule in SCHEDULES]


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "schedule"), daily(TWO_STAGES, ("Camembert", "1f1b"), ("Gemma2", "1f1b"), ("CTRL", "gpipe"))
)
def test_two_stages_train_as_one_process(name, schedule):
    assert_as_one_process(MODELS[name], "pp=2", [PipelineParallel(schedule=schedule)])


COMBINATIONS = {
    "interleaved": ("pp=2,dp_shard=2", lambda: [ActivationCheckpoint(), FullyShard()], 2),
    "interleaved over four, tied": ("pp=4", list, 1),
    "interleaved and compiled": ("pp=2,dp_shard=2", lambda: [Compile(), FullyShard()], 2),
    "interleaved with TP": ("pp=2,tp=2", lambda: [TensorParallel()], 1),
    "FSDP": ("pp=2,dp_shard=2", lambda: [FullyShard()], 2),
    "FSDP, gathered once": ("pp=2,dp_shard=2", lambda: [FullyShard(reshard_after_forward=False)], 2),
    "HSDP, gathered once": ("pp=2,dp_replicate=2,dp_shard=1", lambda: [HybridShard(reshard_after_forward=False)], 2),
    "interleaved, gathered once": ("pp=2,dp_shard=2", lambda: [FullyShard(reshard_after_forward=False)], 2),
    "compiled, recomputed, gathered once": (
        "pp=2,dp_shard=2",
        lambda: [ActivationCheckpoint(), Compile(), FullyShard(reshard_after_forward=False)],
        2,
    ),
    "experts, gathered once": (
        "pp=2,dp_shard=1,ep=2",
        lambda: [ExpertParallel(), FullyShard(reshard_after_forward=False)],
        2,
    ),
    "FSDP, tied": ("pp=2,dp_shard=2", lambda: [FullyShard()], 2),
    "recomputation": ("pp=2,dp_shard=2", lambda: [ActivationCheckpoint(), FullyShard()], 2),
    "selective recomputation": ("pp=4", lambda: [ActivationCheckpoint(mode="selective")], 1),
    "replicas": ("pp=2,dp_replicate=2", lambda: [Replicate()], 2),
    "TP": ("pp=2,tp=2", lambda: [TensorParallel()], 1),
    "TP, tied": ("pp=2,tp=2", lambda: [TensorParallel()], 1),
    "TP, a head with a bias of its own": ("pp=2,tp=2", lambda: [TensorParallel()], 1),
    "TP without sequences": ("pp=2,tp=2", lambda: [TensorParallel(sequence_parallel=False)], 1),
    "CP": ("pp=2,dp_shard=1,cp=2", lambda: [ContextParallel(), FullyShard()], 1),
    "four stages": ("pp=4", list, 1),
    "compiled blocks": ("pp=2,dp_shard=2", lambda: [Compile(), FullyShard()], 2),
    "experts": ("pp=2,dp_shard=1,ep=2", lambda: [ExpertParallel(), FullyShard()], 2),
}


@on_ranks(4)
@pytest.mark.parametrize("name", daily(COMBINATIONS, "FSDP, tied", "TP, a head with a bias of its own"))
def test_stages_with_other_passes_train_as_one_process(name):
    mesh, others, data_ranks = COMBINATIONS[name]
    kinds = {"tied": "tied Llama", "experts": "Qwen3Moe", "a head": "Camembert"}
    make = MODELS[next((made for kind, made in kinds.items() if kind in name), "Llama")]
    if "interleaved" in name:
        make = partial(
            huggingface, "Llama", num_hidden_layers=9 if mesh == "pp=4" else 5, tie_word_embeddings="tied" in name
        )
    virtual = 2 if "interleaved" in name else 1
    assert_as_one_process(make, mesh, [PipelineParallel(virtual=virtual), *others()], data_ranks)


@on_ranks(4)
def test_a_stage_gathers_once_a_step_where_forwards_leave_weights_gathered_and_refuses_writes_between():
    made, grads = {}, {}
    for reshard in (True, False):
        torch.manual_seed(0)
        plan = Plan("pp=2,dp_shard=2", [PipelineParallel(), FullyShard(reshard_after_forward=reshard)])
        par = plan.apply(Plain())
        loss = scaled_loss(par.token_scale(1))
        with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=foreach_all_gather) as gathers:
            for _ in range(2):  # the first step tries out more
                gathers.reset_mock()
                par.module.zero_grad()
                par.backward(batches(par.data_rank), loss)
        made[reshard], grads[reshard] = gathers.call_count, gradients(par.module)
        par.module.zero_grad()
    units = [group for child in par.module.modules() if isinstance(child, FSDPModule) for group in param_groups(child)]
    assert made[False] == len(units) and made[True] >= 4 * len(units)
    torch.testing.assert_close(grads[False], grads[True], **CLOSE)

    def writes(module, batch):
        with torch.no_grad():
            next(module.parameters()).mul_(0.5)
        return loss(module, batch)

    with pytest.raises(MeshparError, match="was written between two micro-batches of a step"):
        par.backward(batches(par.data_rank), writes)
    par.module.zero_grad()
    par.backward(batches(par.data_rank), loss)


class Sees(torch.nn.Module):
    """A language model with a tower for images, which texts do not call."""

    def __init__(self):
        super().__init__()
        self.tower = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))
        self.text = huggingface("Llama")
        self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32)])  # of the tower

    def forward(self, input_ids, image=None):
        embedded = self.text.model.embed_tokens(input_ids)
        if image is not None:
            embedded = embedded + self.layers[0](self.tower(image))
        return self.text(inputs_embeds=embedded)


@on_ranks(2)
def test_a_tower_that_texts_do_not_call_stays_on_the_first_stage_and_refuses_to_run():
    assert_as_one_process(Sees, "pp=2", [PipelineParallel()])
    par = Plan("pp=2", [PipelineParallel()]).apply(Sees())
    assert bool(list(par.module.tower.parameters())) == (dist.get_rank() == 0)
    with pytest.raises(MeshparError, match=r"does not call LayerNorm, and this batch calls it"):
        par.module.tower(torch.ones(1, 4, 32))


CROSSING = {
    "cut by hand": {"stages": (1, 5)},
    "all forwards first": {"schedule": "gpipe"},
    "interleaved": {"virtual": 2},
}


@on_ranks(2)
@pytest.mark.parametrize("name", daily(CROSSING, "interleaved"))
def test_results_that_the_layout_names_cross_cuts(name):
    assert_as_one_process(Crossing, "pp=2", [PipelineParallel(**CROSSING[name])])


CROSSING_OF_FOUR = {
    "alone": ("pp=4", list, 1, 1),
    "recomputed FSDP": ("pp=2,dp_shard=2", lambda: [ActivationCheckpoint(), FullyShard()], 2, 1),
    "compiled FSDP": ("pp=2,dp_shard=2", lambda: [Compile(), FullyShard()], 2, 2),
    "replicas": ("pp=2,dp_replicate=2", lambda: [Replicate()], 2, 1),
}


@on_ranks(4)
@pytest.mark.parametrize("name", daily(CROSSING_OF_FOUR, "recomputed FSDP"))
def test_results_that_the_layout_names_cross_cuts_of_several_ranks(name):
    mesh, others, data_ranks, virtual = CROSSING_OF_FOUR[name]
    assert_as_one_process(Crossing, mesh, [PipelineParallel(virtual=virtual), *others()], data_ranks)


def test_what_crosses_a_cut_is_sent_where_it_is_needed():
    anatomy, problems = examine(model := Crossing(), model.meshpar_layout())
    assert not problems
    crossing = [[(result.module, result.place) for result in results] for results in anatomy.carried]
    first, begun = ("layers.0", 1), ("embed", 0)
    assert crossing == [
        [begun, first],
        [begun, ("layers.0", 0), first],
        [begun, ("layers.0", 0), first, ("layers.1", 0)],
        [begun, ("layers.0", 0), first, ("layers.1", 0)],
        [begun, ("layers.0", 0), first],
    ]


class Skips(torch.nn.Module):
    """Blocks of linear layers, the last of which sees the result of the first."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.skips, self.head, self.needs = "block", None, False

    def forward(self, ids):
        embedded = self.embed(ids)
        if self.needs:
            self.layers[0].reset_parameters()
            self.needs = False  # as models that choose a kind of attention in their first forward
        first = hidden = self.layers[0](embedded)
        for layer in self.layers[1:]:
            hidden = layer(hidden).tanh()
        hidden = hidden + {"block": first, "embedding": embedded, "": 0}[self.skips]
        return hidden if self.head is None else self.head(hidden)


def test_models_that_hand_on_more_than_one_value_are_refused():
    plan, model = Plan("pp=2", [PipelineParallel()]), Skips()
    tied = torch.nn.Linear(8, VOCAB, bias=False)
    tied.weight = model.embed.weight  # which the output may use, but not what the embedding returns
    for skips, uses, head in (("block", "layers.0", None), ("embedding", "embed", None), ("embedding", "embed", tied)):
        model.skips, model.head = skips, head
        for frozen in (False, True):
            model.requires_grad_(not frozen)
            with pytest.raises(PlanError, match=f"uses results of {uses} beside what each block hands to the next one"):
                plan.check(model, world_size=2)
    model.skips, model.needs = "", True
    with pytest.raises(
        PlanError, match=r"needs more of the blocks before layers\.3 than their result \(AttributeError: 'BlockStandIn'"
    ):
        plan.check(model, world_size=2)


@pytest.mark.parametrize(("costs", "stages", "firsts"), [((1, 1, 1, 1), 2, [0, 2]), ((1, 1, 1, 5), 2, [0, 3])])
def test_the_dearest_stage_costs_least(costs, stages, firsts):
    assert even_cuts(costs, stages) == firsts


def test_costs_count_experts_that_run_attention_and_the_head():
    def costs(**options):
        model = on_meta(lambda: transformer(layers=3, **options))
        anatomy, problems = examine(model, model.meshpar_layout())
        assert not problems and anatomy.costs[0] >= anatomy.costs[1]
        return anatomy.costs

    def head(found):
        return (found[2] - found[1]) / found[1]

    wide = {"dim": 512, "heads": 8, "kv_heads": 8, "hidden": 1536}
    assert head(costs(**wide, vocab_size=65536)) == pytest.approx(16 * head(costs(**wide, vocab_size=4096)), rel=0.15)
    two, four = (costs(**wide, qk_norm=True, experts=count, experts_per_token=2)[1] for count in (8, 16))
    assert four == pytest.approx(two, rel=0.05), "as many experts run"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_no_order_waits_for_itself(schedule, chunks):
    for ranks, micro_batches in ((2, 1), (2, 5), (3, 2), (4, 9), (5, 7), (8, 17)):
        todo = [actions(schedule, rank, ranks, micro_batches, chunks) for rank in range(ranks)]
        last, done, left = ranks * chunks - 1, set(), [*todo]
        while any(left):
            before = len(done)
            for rank, waiting in enumerate(left):
                while waiting:
                    stage = waiting[0].chunk * ranks + rank
                    kind, number = waiting[0].kind, waiting[0].number
                    needs = {("F", number, stage - 1)} if kind == "F" and stage else set()
                    needs |= {("F", number, stage), ("B", number, stage + 1)} if kind == "B" else set()
                    if kind == "B" and chunks == 1 and rank and number:  # one gradient may be on its way at a time
                        ahead = todo[rank - 1]
                        begun = ahead[: ahead.index(Action("B", number - 1))]
                        needs |= {(action.kind, action.number, rank - 1) for action in begun}
                    if needs - done - {("B", number, last + 1)}:
                        break
                    done.add((kind, number, stage))
                    waiting = waiting[1:]
                left[rank] = waiting
            assert len(done) > before, (ranks, micro_batches)
        assert len(done) == 2 * ranks * chunks * micro_batches


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_every_micro_batch_goes_forth_and_back_in_order(schedule, micro_batches):
    for rank in range(3):
        found = actions(schedule, rank, 3, micro_batches)
        for kind in "FB":
            assert [action.number for action in found if action.kind == kind] == list(range(micro_batches))
        live = [sum(1 if action.kind == "F" else -1 for action in found[:end]) for end in range(len(found) + 1)]
        assert min(live) == 0 and max(live) == min(micro_batches, micro_batches if schedule == "gpipe" else 3 - rank)


@on_ranks(2)
def test_a_stage_alone_is_refused_and_a_model_is_examined_once():
    with mock.patch.object(parallel, "examine", wraps=examine) as examined:
        par = Plan("pp=2", [PipelineParallel()]).apply(Plain())
    assert examined.call_count == 1 and par.module not in parallel._EXAMINED
    mine = batches(0)
    remedy = r"run a step by par\.backward\(micro_batches, loss\)"
    with pytest.raises(MeshparError, match=remedy):
        par.module(mine[0]["input_ids"])
    with pytest.raises(MeshparError, match=remedy):
        list(par.accumulate(mine))
    losses = par.forward(mine, lambda module, batch: float(token_loss_sum(module, batch)[0]))
    torch.manual_seed(0)
    assert len(losses) == len(mine) and all(loss > 0 for loss in losses)


@on_ranks(2)
def test_steps_of_several_backwards_add_up():
    """A tied embedding is on both stages, and has the sum of both from the backward before."""

    def trained(*parts):
        torch.manual_seed(0)
        par = Plan("pp=2", [PipelineParallel()]).apply(Plain(tied=True))
        for part in parts:
            par.backward(part, scaled_loss(0.1))
        return gradients(par.module)

    mine = batches(0)
    torch.testing.assert_close(trained(mine[:2], mine[2:]), trained(mine))


@pytest.mark.nightly
@on_ranks(4)
def test_verify_tries_the_split_of_every_stage():
    def written(*names):
        torch.manual_seed(0)
        par = Plan("pp=2,tp=2", [PipelineParallel(), TensorParallel()], verify=False).apply(MODELS["Llama"]())
        for name, child in par.module.named_modules():
            if name in names:
                forward = child.forward
                child.forward = lambda x, forward=forward: forward(x) * x.std()  # of a part of the features
        return par

    batch = {"input_ids": batches(0)[0]["input_ids"]}
    found = written().verify(batch)
    assert found.modules and not found.differences
    second = "model.layers.2.mlp.down_proj"
    with pytest.raises(MeshparError, match=r"model\.layers\.2: "):
        written(second).verify(batch)


@pytest.mark.nightly
@on_ranks(2, fresh="opens groups")
@pytest.mark.parametrize("virtual", [1, 2])
def test_backends_without_tags_get_a_group_for_each_kind_of_message(monkeypatch, virtual):
    monkeypatch.setattr("meshpar.passes.pipeline.messages.TAGGED", ())
    if dist.get_rank() == 0:  # groups of some ranks, as others make them
        dist.new_group([0], use_local_synchronization=True)
    make = partial(huggingface, "Llama", num_hidden_layers=4)
    assert_as_one_process(make, "pp=2", [PipelineParallel(virtual=virtual)])
    titles = {title.partition(" (")[0] for title in collective_counts()}
    assert titles >= {f"pp {kind} {sender}" for kind in ("forth", "back") for sender in (0, 1)}


@on_ranks(2)
@pytest.mark.parametrize("virtual", daily((1, 2), 1))
def test_losses_inside_the_model_are_those_of_one_process(virtual):
    make, mine = partial(huggingface, "Llama", num_hidden_layers=4, tie_word_embeddings=True), batches(0)
    torch.manual_seed(0)
    par = Plan("pp=2,dp_shard=1", [PipelineParallel(virtual=virtual), FullyShard()]).apply(make())
    total = par.backward(mine, lambda module, batch: module(**batch).loss)
    torch.manual_seed(0)
    alone, expected = make(), 0.0
    for batch in mine:
        loss = alone(**batch).loss
        loss.backward()
        expected += float(loss.detach())
    torch.testing.assert_close(float(total), expected, rtol=1e-5, atol=0)
    assert_gradients(par.module, alone, **CLOSE)


@on_ranks(2)
def test_frozen_stages_send_no_gradient_and_train_as_one_process():
    def make():
        model = Plain()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.3" in name or "head" in name)
        return model

    torch.manual_seed(0)
    par = Plan("pp=2", [PipelineParallel()]).apply(make())
    par.backward(batches(0), scaled_loss(0.01))
    torch.manual_seed(0)
    alone = make()
    for batch in batches(0):
        scaled_loss(0.01)(alone, batch).backward()
    assert_gradients(par.module, alone, **CLOSE)


@pytest.mark.nightly
@on_ranks(2)
def test_muon_trains_stages_as_one_process():
    torch.manual_seed(0)
    par = Plan("pp=2", [PipelineParallel()]).apply(MODELS["Llama"]())
    torch.manual_seed(0)
    alone = MODELS["Llama"]()
    optimizer, other = Muon(par.module, lr=1e-2), Muon(alone, lr=1e-2)
    for _ in range(2):
        par.backward(batches(0), scaled_loss(0.01))
        for batch in batches(0):
            scaled_loss(0.01)(alone, batch).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    for name, parameter in par.module.named_parameters():
        torch.testing.assert_close(parameter, alone.get_parameter(name), rtol=1e-5, atol=1e-5, msg=name)


@on_ranks(2)
def test_ranks_that_cut_differently_are_told():
    torch.manual_seed(0)
    model = Plain()
    with pytest.raises(MeshparError, match=r"rank 0 cuts 4 blocks at \[0, 1\], and rank 1 cuts 4 at \[0, 2\]"):
        Plan("pp=2", [PipelineParallel(stages=(2, 2) if dist.get_rank() else (1, 3))]).apply(model)


@on_ranks(2)
def test_hooks_run_where_their_module_does_in_each_backward_and_their_errors_are_told():
    torch.manual_seed(0)
    par, seen, backwards = Plan("pp=2", [PipelineParallel(stages=(2, 2))]).apply(Plain()), [], []
    hook = par.module.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    for block in par.run.find(Layers).edges.portion.chunks[0].blocks:
        block.register_full_backward_hook(lambda *given: backwards.append(given))
    par.backward(batches(0), scaled_loss(0.1))
    assert (len(seen), len(backwards)) == (4 * dist.get_rank(), 2 * 4)
    hook.remove()
    par.module.zero_grad()

    def fail(module, args, output):
        raise KeyError("no such value")

    par.module.norm.register_forward_hook(fail)
    error, match = MeshparError, "another stage of pp failed.*stage 1, forward of micro-batch 0 of 4: "
    if dist.get_rank():
        error, match = KeyError, "no such value"
    with pytest.raises(error, match=match):
        par.backward(batches(0), scaled_loss(0.1))


@on_ranks(2)
def test_errors_of_hooks_around_the_blocks_are_told_and_those_of_an_embedding_get_values_on_the_first_stage_alone():
    torch.manual_seed(0)
    par, seen = Plan("pp=2", [PipelineParallel()]).apply(MODELS["Llama"]()), []
    par.module.model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(output.detach()))

    def fail(module, args, output):
        assert dist.get_rank(), "the disk is full"

    par.module.model.register_forward_hook(fail)
    error, match = AssertionError, "the disk is full"
    if dist.get_rank():
        error = MeshparError
        match = "another stage of pp failed.*stage 0, forward of micro-batch 0 of 4: AssertionError: the disk is full"
    with pytest.raises(error, match=match):
        par.backward(batches(0), scaled_loss(0.1))
    assert seen
    for value in seen:
        with pytest.raises(MeshparError, match="a hook has kept") if dist.get_rank() else nullcontext():
            assert value.isfinite().all()


@on_ranks(2)
def test_different_micro_batches_of_a_step_or_an_evaluation_are_told():
    par, rank = Plan("pp=2", [PipelineParallel()]).apply(Plain()), dist.get_rank()
    other, fewer = (
        r"stage 0 and stage 1 have different micro-batches \(number %s\)",
        ("3 micro-batches in stage 0, and 2 in stage 1; give all ranks of pp the same"),
    )
    evaluate = partial(par.forward, function=lambda module, batch: float(token_loss_sum(module, batch)[0]))
    for run, mine, message in (
        (partial(par.backward, loss=scaled_loss(1.0)), batches(0)[:1] + batches(rank)[1:], other % 1),
        (partial(par.backward, loss=scaled_loss(1.0)), batches(0)[: 3 - rank], fewer),
        (evaluate, batches(0) * 9 + batches(rank), other % 36),
        (evaluate, batches(0)[: 3 - rank], fewer),
    ):
        with pytest.raises(MeshparError, match=message):
            run(mine)


def given(micro_batches):
    yield from micro_batches[:2]
    raise KeyError("no more data")


def failing(par, place):
    """Run a step in which one stage fails: in its data, its loss, a block, a hook of a backward, or an evaluation."""
    layers, mine = par.run.find(Layers), batches(0)
    last, calls, hooks, stage = layers.rank == layers.ranks - 1, [], [], FAILED[place][0]

    def loss(module, batch):
        calls.append(batch)
        if last and len(calls) == 3 and place in ("loss", "evaluation"):
            raise KeyError("a label is missing")
        return token_loss_sum(module, batch)[0] * 0.1

    def fail(module, *args):
        calls.append(module)
        if len(calls) > (3 if stage else 1):  # gradients of later micro-batches still come to the first stage
            raise KeyError("a block is at fault")

    if layers.rank == stage and place in ("block", "backward", "first backward"):
        block = layers.edges.portion.chunks[-1].blocks[0]
        hooks = [block.register_forward_pre_hook(fail) if place == "block" else block.register_full_backward_hook(fail)]
    try:
        if place == "evaluation":
            par.forward(mine, loss)
        else:
            par.backward(given(mine) if place == "data" and not layers.rank else mine, loss)
    finally:
        for hook in hooks:
            hook.remove()


FAILED = {
    "data": (0, "stage 0, its micro-batches: KeyError: 'no more data'"),
    "loss": (-1, r"stage \d, forward of micro-batch \d of 4: KeyError: 'a label is missing'"),
    "block": (1, r"stage \d, forward of micro-batch \d of 4: KeyError: 'a block is at fault'"),
    "backward": (1, r"stage \d, backward of micro-batch \d of 4: KeyError: 'a block is at fault'"),
    "first backward": (0, r"stage \d, backward of micro-batch \d of 4: KeyError: 'a block is at fault'"),
    "evaluation": (-1, r"stage \d, forward of micro-batch \d, without gradients: KeyError: 'a label is missing'"),
}


def assert_an_error_is_told(mesh, passes, virtual=1):
    """A step fails on one stage: it raises its own error, the others say which, and the next step is exact."""

    def trained(par):
        par.backward(batches(par.data_rank), scaled_loss(0.1))
        found = gradients(par.module)
        par.module.zero_grad()
        return found

    torch.manual_seed(0)
    layers = 4 if mesh == "pp=2" else 8
    make = partial(Plain, layers, tied=True)
    par = Plan(mesh, [PipelineParallel(virtual=virtual), *passes]).apply(make())
    expected, layers = trained(par), par.run.find(Layers)
    for place, (stage, message) in FAILED.items():
        error, match = (MeshparError, f"another stage of pp failed.*{message}")
        if layers.rank == stage % layers.ranks:
            error, match = KeyError, message.rpartition("KeyError: ")[2]
        with pytest.raises(error, match=match):
            failing(par, place)
        if place in ("loss", "block"):
            with pytest.raises(MeshparError, match=r"gradients are incomplete; call optimizer\.zero_grad\(\)"):
                torch.optim.SGD(par.module.parameters()).step()
        par.module.zero_grad()
        for name, grad in trained(par).items():
            assert torch.equal(grad, expected[name]), (place, name)


@on_ranks(2)
def test_an_error_on_one_stage_is_told_on_all_and_the_next_step_is_exact():
    assert_an_error_is_told("pp=2", [])


@pytest.mark.nightly
@on_ranks(4)
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("mesh", ["pp=4", "pp=2,dp_shard=2"])
def test_an_error_on_one_of_several_stages_is_told(mesh, virtual):
    assert_an_error_is_told(mesh, [FullyShard()] if "dp" in mesh else [], virtual)


def ended_stage(said, ends=True):
    def loss(module, batch):
        return os._exit(1) if ends and dist.get_rank() else scaled_loss(0.1)(module, batch)

    try:
        Plan("pp=2", [PipelineParallel()]).apply(Plain()).backward(batches(0), loss)
    except MeshparError as error:
        said.write_text(str(error))


def test_a_stage_that_has_ended_is_told(tmp_path):
    with pytest.raises(RankFailure, match="rank 1 ended without a message"):
        launch(__name__, "ended_stage", 2, (tmp_path / "said",), fresh="ends a rank")
    text = (tmp_path / "said").read_text()  # in a receive, or in a send to it
    said = r"stage 0, \w+ of micro-batch \d of 4(, waits for stage 1)?: the rank of another stage of pp has ended"
    assert re.search(said, text), text
    launch(__name__, "ended_stage", 2, (tmp_path / "said of the job that is started again", False))
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


def close_connections():
    """Let the peers of this process see what they see when a process ends."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.getpeername()
                one.shutdown(socket.SHUT_RDWR)


def failed_alone(folder):
    par, calls = Plan("pp=2,dp_shard=2", [PipelineParallel(), FullyShard()]).apply(Plain()), []

    def loss(module, batch):
        calls.append(batch)
        if dist.get_rank() == 3 and len(calls) == 2:
            raise KeyError("a label is missing")
        return scaled_loss(0.1)(module, batch)

    try:
        with mock.patch.object(stage_checks, "_ALIKE_S", 0.5):
            par.backward(batches(par.data_rank), loss)
    except Exception as error:
        (folder / f"{dist.get_rank()}.part").write_text(f"{error} {getattr(error, '__notes__', '')}")
        (folder / f"{dist.get_rank()}.part").rename(folder / f"{dist.get_rank()}")
    close_connections()
    until(lambda: len(list(folder.glob("?"))) == 4, 20)


def test_an_error_on_one_rank_of_a_stage_is_told_on_all(tmp_path):
    with suppress(RankFailure):
        launch(__name__, "failed_alone", 4, (tmp_path,), timeout_s=patient(40), fresh="closes its connections")
    said = {int(found.name): found.read_text() for found in tmp_path.iterdir()}
    assert said.keys() == {0, 1, 2, 3}
    assert "'a label is missing'" in said[3]
    for text in said.values():
        assert "rank 3 failed alone in stage 1, forward of micro-batch 1 of 4" in text


class Cut(torch.nn.Module):
    """Blocks with a function between them, on some of the rows: micro-batches of one form, values of others."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids, rows=4):
        hidden = self.embed(ids).tanh().flatten(0, 1)[:rows]
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


@on_ranks(2)
@pytest.mark.parametrize("virtual", [1, 2])
def test_what_a_model_computes_between_blocks_is_its_own_for_values_of_any_form(virtual):
    torch.manual_seed(0)
    alone = Cut()
    torch.manual_seed(0)
    layout = ModelLayout(blocks=("layers.*",))
    par = Plan("pp=2", [PipelineParallel(virtual=virtual)]).apply(Cut(), layout)
    mine = [{"ids": torch.full((2, 8), rows), "rows": rows} for rows in (3, 3, 9, 3, 5)]
    for _ in range(2):
        total = par.backward(mine, lambda module, batch: module(**batch).square().sum())
        losses = [alone(**batch).square().sum() for batch in mine]
        sum(losses).backward()
        torch.testing.assert_close(total, sum(losses).detach())
    assert_gradients(par.module, alone)


class WrittenBetween(Cut):
    """Write into what blocks return."""

    def forward(self, ids, rows=4):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh_()
        return self.head(hidden)


@on_ranks(2)
def test_models_that_write_into_what_their_blocks_return_are_refused():
    par = Plan("pp=2", [PipelineParallel()]).apply(WrittenBetween(), ModelLayout(blocks=("layers.*",)))
    mine = [{"ids": torch.full((2, 8), 3)}] * 4
    said = "writes into what a block returns" + (".*torch says: .*(in-place|written-to)" if dist.get_rank() else "")
    for run in (par.forward, par.backward):
        with pytest.raises(MeshparError, match=said):
            run(mine, lambda module, batch: module(**batch).square().sum())
        par.module.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_no_message_that_has_arrived(tied):
    """In 1F1B the first of two stages has at most two values on their way, and none at the end."""
    par = Plan("pp=2", [PipelineParallel()]).apply(Plain(tied=tied))
    layers, held = par.run.find(Layers), []
    sent = layers.edges.transfers.messages.sent
    layers.begins = lambda action: held.append(max(map(len, sent.values())))
    par.backward(batches(0, number=7), scaled_loss(0.1))
    assert max(held) == (1 if dist.get_rank() else 2) and not any(sent.values())
    par.forward(batches(0), scaled_loss(0.1))
    assert not any(sent.values())


@pytest.mark.parametrize("mesh", daily(["pp=2,dp_shard=1", "pp=2,dp_shard=2"], "pp=2,dp_shard=1"))
@on_ranks("mesh")
def test_whole_state_is_gathered_and_loaded_over_stages(mesh):
    def built(seed):
        torch.manual_seed(seed)
        return Plain(tied=True)

    def parallel(seed):
        return Plan(mesh, [PipelineParallel(), FullyShard()]).apply(built(seed))

    expected, par = built(0).state_dict(), parallel(0)
    for everywhere in (True, False):
        found = par.state_dict(full=True, everywhere=everywhere)
        assert set(found) == (set(expected) if everywhere or dist.get_rank() == 0 else set())
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    for from_rank_0 in (True, False):
        other = parallel(1)
        other.load_state_dict({} if from_rank_0 and dist.get_rank() else expected, from_rank_0=from_rank_0)
        for name, parameter in other.module.named_parameters():
            assert torch.equal(whole_tensor(parameter), expected[name]), name
    with pytest.raises(MeshparError, match=r"missing: norm\.weight"):
        par.load_state_dict({name: value for name, value in expected.items() if name != "norm.weight"})


PLANS = {
    "pp": ("pp=4", lambda: [PipelineParallel()]),
    "pp and FSDP": ("pp=2,dp_shard=2", lambda: [PipelineParallel(), FullyShard()]),
    "pp and TP": ("pp=2,tp=2", lambda: [PipelineParallel(), TensorParallel()]),
    "FSDP and TP": ("dp_shard=2,tp=2", lambda: [TensorParallel(), FullyShard()]),
    "two stages": ("pp=2", lambda: [PipelineParallel()]),
    "two shards": ("dp_shard=2", lambda: [FullyShard()]),
}
RESTORED = (
    (2, "two shards", "two stages"),
    (2, "two stages", "two shards"),
    (4, "pp", "FSDP and TP"),
    (4, "FSDP and TP", "pp and FSDP"),
    (4, "pp and FSDP", "pp and TP"),
)


@pytest.mark.parametrize(("ranks", "saved", "restored"), daily(RESTORED, *RESTORED[:2]))
@on_ranks("ranks")
def test_checkpoints_load_on_other_stages_bitwise(tmp_path, ranks, saved, restored):
    def built(name):
        mesh, passes = PLANS[name]
        par = Plan(mesh, passes()).apply(Plain())
        return par, torch.optim.AdamW(par.module.parameters(), lr=1e-2, fused=True)

    def state(par, optimizer):
        return {
            name: [whole_tensor(value).clone() for value in (parameter, optimizer.state[parameter]["exp_avg"])]
            for name, parameter in par.module.named_parameters()
        }

    torch.manual_seed(0)
    par, optimizer = built(saved)
    par.backward(batches(par.data_rank), scaled_loss(par.token_scale(40)))
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, par, optimizer)
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, state(par, optimizer))
        torch.manual_seed(1)
        par, optimizer = built(restored)
        manager.restore(par, optimizer)
    for name, values in state(par, optimizer).items():
        expected = next(rank[name] for rank in every if name in rank)
        assert all(torch.equal(value, other) for value, other in zip(values, expected, strict=True)), name


@on_ranks(2)
def test_stages_resume_with_the_options_of_each_parameter(tmp_path):
    """The first stage has its embedding first, which decays; the second one a norm, which does not."""
    torch.manual_seed(0)
    par = Plan("pp=2", [PipelineParallel()]).apply(transformer(layers=2))
    optimizer = build_adamw(par.module, AdamWSettings(weight_decay=0.1))
    par.backward([{"input_ids": batches(0)[0]["input_ids"]}], lambda module, batch: module(**batch).logits.sum())
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, par, optimizer)
        manager.restore(par, optimizer)
    for group in optimizer.param_groups:
        assert all(group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0) for parameter in group["params"])


@pytest.mark.nightly
@on_ranks(8)
@pytest.mark.parametrize("mesh", ["pp=2,dp_replicate=2,dp_shard=2", "pp=2,dp_shard=2,tp=2"])
def test_stages_of_hybrid_meshes_train_as_one_process(mesh):
    passes = [TensorParallel(), FullyShard()] if "tp" in mesh else [HybridShard()]
    assert_as_one_process(MODELS["Llama"], mesh, [PipelineParallel(), *passes], 2 if "tp" in mesh else 4)


@pytest.mark.nightly
@on_ranks(8)
def test_stages_whose_replicas_divide_the_optimizer_train_as_one_process():
    passes = [PipelineParallel(), HybridShard(optimizer="world")]
    assert_as_one_process(MODELS["Llama"], "pp=2,dp_replicate=2,dp_shard=2", passes, 4)


@pytest.mark.parametrize("mesh", daily(["pp=2,dp_shard=1", "pp=2,dp_shard=2"], "pp=2,dp_shard=1"))
@on_ranks("mesh")
def test_gradients_reduced_in_each_backward_are_those_of_one_process(mesh):
    def trained(**options):
        torch.manual_seed(0)
        par = Plan(mesh, [PipelineParallel(), FullyShard()]).apply(Plain(tied=True))
        par.backward(batches(par.data_rank), scaled_loss(0.1), **options)
        return gradients(par.module)

    torch.testing.assert_close(trained(reduce_each=True), trained(), **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("virtual", daily((1, 2), 1))
def test_adapters_train_as_one_process(virtual):
    pytest.importorskip("peft")

    def made():
        torch.manual_seed(0)
        model = huggingface("Llama", num_hidden_layers=4)
        layout = add_adapters(model, LoRA(rank=4, targets=("q_proj", "down_proj")))
        draw = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(generator=draw)
        return model, layout

    par = Plan("pp=2", [PipelineParallel(virtual=virtual)]).apply(*made())
    alone, _ = made()
    par.backward(batches(0), scaled_loss(0.01))
    for batch in batches(0):
        scaled_loss(0.01)(alone, batch).backward()
    assert sum("lora" in name for name, _ in par.module.named_parameters()) == 8
    assert_gradients(par.module, alone, **CLOSE)
    with pytest.raises(CheckpointError, match="has adapters, and pp divides its layers"):
        par.published()


@on_ranks(2)
def test_dropout_differs_between_stages_and_is_the_same_in_a_recomputation():
    def trained(*others):
        torch.manual_seed(0)
        par = Plan("pp=2", [PipelineParallel(), *others]).apply(transformer(layers=4, dropout=0.3))
        par.manual_seed(5)
        masks = list[torch.Tensor]()
        drop = par.module.layers[2 * dist.get_rank()].mlp_drop
        drop.register_forward_hook(lambda module, args, output: masks.append((output == 0).detach()))
        total = par.backward([{"input_ids": batches(0)[0]["input_ids"]}] * 2, lambda module, batch: (
            module(**batch).logits.square().mean()))  # fmt: skip
        return float(total), gradients(par.module), masks

    total, expected, masks = trained()
    again, recomputed, _ = trained(ActivationCheckpoint())
    assert total == again and not torch.equal(masks[0], masks[1])
    torch.testing.assert_close(recomputed, expected, rtol=0, atol=0)
    others = [None, None]
    dist.all_gather_object(others, masks[0])
    assert not torch.equal(*others)


@on_ranks(2)
def test_a_rank_says_for_which_stage_it_waits_and_in_which_action(tmp_path):
    par = Plan("pp=2", [PipelineParallel()]).apply(Plain())
    layers, said = par.run.find(Layers), tmp_path / "said"

    def look():
        until(lambda: "waits" in layers.doing())
        said.write_text(layers.doing())

    def loss(module, batch):
        if dist.get_rank() == 0:
            until(said.exists)  # so that the other stage waits
        return scaled_loss(0.1)(module, batch)

    watching = threading.Thread(target=look)
    if dist.get_rank():
        watching.start()
    par.backward(batches(0)[:2], loss)
    assert layers.doing() == ""
    if dist.get_rank():
        watching.join()
        assert said.read_text() == "stage 1, forward of micro-batch 0 of 2, waits for stage 0"


@pytest.mark.nightly
@on_ranks(2)
def test_products_in_float8_are_those_without_stages():
    def trained(mesh, *passes):
        torch.manual_seed(0)
        par = Plan(mesh, passes).apply(MODELS["Llama"]())
        return par.backward(batches(0), scaled_loss(0.01)), par.module  # the same on both ranks

    float8 = Float8(recipe="rowwise_with_gw_hp", emulate=True)
    total, found = trained("pp=2", PipelineParallel(), float8)
    whole, expected = trained("dp_replicate=2", float8, Replicate())
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=0)
    assert_gradients(found, expected, **CLOSE)
