"""Where a train step waits for the device, or for other hosts: at the places listed here and no others."""

import contextlib
import functools
from unittest import mock

import pytest
import torch

import meshpar.forecasting.device as device
from meshpar import (
    ActivationCheckpoint,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    PipelineParallel,
    Plan,
    TensorParallel,
)
from meshpar.core import runtime
from meshpar.passes.experts.routing import Assumed, Routing
from meshpar.passes.pipeline.messages import Header
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.positions.parallel import selected
from meshpar.passes.tensor import random
from meshpar.training.adamw_and_schedules import AdamWSettings, LossScaler, Schedule, build_adamw
from meshpar.training.loop import Trainer
from meshpar.training.objectives import CausalLM
from meshpar.training.settings import TrainSettings
from tests.accelerator.races import Races
from tests.accelerator.simulated import allocate, alone, install, simulated
from tests.accelerator.waits import Waits
from tests.support.models_for_parity import gpt2, on_meta, transformer
from tests.support.tiers import daily

HOSTS = {"exchange.ranks.Largest.__init__ (hosts)": 1}
"""The one exchange of the hosts in a step begins here, runs beside the next step, and is read after it."""
BF16 = {"param_dtype": torch.bfloat16}
STEPS = {
    "dense": (transformer, "dp_replicate=2,dp_shard=2,tp=2", [TensorParallel(), HybridShard(**BF16)], {}),
    "fused": (gpt2, "dp_shard=4,tp=2", [TensorParallel(), ActivationCheckpoint(), FullyShard(**BF16)], {}),
    "positions": (transformer, "dp_shard=4,cp=2", [ContextParallel(), FullyShard(**BF16)], {}),
    "host": (
        transformer,
        "dp_shard=4,tp=2",
        [TensorParallel(), FullyShard(**BF16, offload="cpu", whole=("norm.weight",))],
        {
            # the optimizer runs on the host, which needs the gradients
            "_fsdp_param_group.FSDPParamGroup.finalize_backward": 20,
            "tensors.placements.clip_grad_norms_": 1,  # and the factor by which they are clipped
        },
    ),
    "experts": (
        functools.partial(transformer, experts=8, expert_hidden=16, qk_norm=True),
        "dp_shard=2,ep=4",
        [ExpertParallel(), ActivationCheckpoint(), FullyShard(**BF16)],
        {
            "passes.host_reads.beside": 2 * 2
        },  # of each layer and micro-batch, for how many rows arrive: A11; not again in recomputation
    ),
    "float16": (
        transformer,
        "dp_shard=8",
        [FullyShard(param_dtype=torch.float16)],
        {"training.step.Skips.allows": 1},  # whether the step counts decides the next one's scale
    ),
}
"""Model, mesh, passes -> the places, and how often a step of two micro-batches waits there."""
WAITS_OF_STAGES = {
    # as many micro-batches of one shape; whether a stage failed
    "passes.pipeline.messages.StageMessages.exchanged (hosts)": 2,
    "training.experts.ExpertLoad.take": 2,  # the report, which stages exchange
}
LONG_AGO = "passes.host_reads.beside"
"""Where the host looks at a copy that began a micro-batch or a step ago."""
STAGES = transformer, "pp=2,dp_shard=4", [PipelineParallel(), FullyShard(**BF16)]


class Data:
    def __init__(self):
        self.samples, self.epoch, self.global_batch = self, 0, 8

    def __len__(self):
        return 72

    def position(self):
        return {"epoch": 0, "samples": 1}

    def state_dict(self):
        return self.position()


class Watched(Routing):
    """The real routing, whose waits count, and then equal numbers of rows in the place of those that it reads."""

    __slots__ = ()

    def exchanged(self, counts, rows, rank):
        Routing.exchanged(self, counts, rows, rank)
        return Assumed().exchanged(counts, rows, rank)


def waits_of(build, mesh, passes, *, rank=0, half=False, fused=True):
    """Where the second step of a training loop waits, and which streams race in it, with a report that is not read."""
    model = on_meta(build)
    with simulated(8, as_rank=rank):
        with mock.patch.object(Routing, "simulated", lambda self: Watched()):
            par = allocate(Plan(mesh, passes).apply(model, device_type=device.NAME))
        if (layers := par.run.find(Layers)) is not None:
            header = Header(-1, 0, 0, ((torch.bfloat16, (2, 16, model.config.dim)),))
            layers.edges.transfers.supposed, layers._form = (
                {None: header},
                (True, torch.float32, [("loss", (), torch.float32)]),
            )
            layers.gather = lambda mine: [mine, mine]
        optimizer = build_adamw(par.module, AdamWSettings(fused=fused))
        schedule, scaler = Schedule(name="constant", lr=1e-3, steps=9), LossScaler() if half else None
        trainer = Trainer(par, CausalLM(), Data(), optimizer, schedule, TrainSettings(steps=9), scaler=scaler)
        tensor = torch.ones(2, 16, dtype=torch.int64, device="cpu")
        for watch in (contextlib.nullcontext(), races := Races()):
            with Waits() as waits, watch, mock.patch.object(runtime, "among_real_ranks", lambda run: run()):
                trainer._train_step([{"input_ids": tensor, "labels": tensor}] * 2, 0.0)
                trainer.step += 1
                trainer._report()
        return dict(waits.places) | races.found


DAILY = ("dense",)
OTHERS = tuple(name for name in STEPS if name not in DAILY)


@pytest.mark.parametrize("names", daily([(DAILY,), (OTHERS,)], (DAILY,), ids=lambda case: ", ".join(*case)))
@alone
def test_a_step_waits_at_the_listed_places_alone_and_its_streams_do_not_race(names):
    install().manual_seed = lambda value: None
    CausalLM.tokens = lambda self, batch: 32  # counted on the host, before the batch is moved
    found = {name: waits_of(*STEPS[name][:3], half=name == "float16", fused=name != "host") for name in names}
    assert found == {name: HOSTS | STEPS[name][-1] for name in found}, found


@pytest.mark.parametrize(
    ("rank", "looks"),
    [
        pytest.param(0, 1, id="the first stage looks at the inputs of the step before"),
        pytest.param(4, 3, id="the last stage also at the header of each micro-batch before"),
    ],
)
@alone
def test_a_steady_step_of_a_stage_waits_for_no_device(rank, looks):
    install().manual_seed = lambda value: None
    random._equal = lambda one, other: True  # states of generators, which have no values here
    CausalLM.tokens = lambda self, batch: 32
    found = waits_of(*STAGES, rank=rank)
    assert found == {**HOSTS, **WAITS_OF_STAGES, LONG_AGO: looks}, found


def test_a_split_batch_stays_in_page_locked_memory(monkeypatch):
    pinned, empty = [], torch.empty
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.dtype == torch.int64)
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **more: pinned.append(pin_memory) or empty(*size, **more)
    )
    batch = {"input_ids": torch.arange(12).view(2, 6), "weights": torch.ones(2, 6), "count": torch.tensor(3)}
    part = selected(batch, torch.tensor([0, 5]), 1)
    assert part["input_ids"].tolist() == [[0, 5], [6, 11]] and part["weights"].shape == (2, 2) and part["count"] == 3
    assert pinned == [True]
