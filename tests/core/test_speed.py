"""A step compiles nothing twice and does not hold the host."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import meshpar
from meshpar import ActivationCheckpoint, Compile, FullyShard, Plan, TensorParallel
from meshpar.testing import on_ranks
from meshpar.training.metrics import Meter
from tests.support.models_for_parity import VOCAB, gpt2, huggingface, transformer
from tests.support.tiers import daily


def graphs(make: functools.partial[torch.nn.Module], mesh: str, passes: list[object]) -> int:
    """Return how many graphs three steps of a model of four blocks compile."""
    torch._dynamo.reset()
    counters.clear()
    par = Plan(mesh, passes).apply(make().train())
    ids = torch.randint(0, VOCAB, (2, 16))
    for _ in range(3):
        par.module(input_ids=ids).logits.float().sum().backward()
        par.module.zero_grad(set_to_none=True)
    return int(counters["stats"]["unique_graphs"])


MODELS = {
    "transformer": functools.partial(transformer, layers=4),
    "gpt2": functools.partial(gpt2, n_layer=4),
    "llama": functools.partial(huggingface, "Llama"),
}
EAGER = Compile(backend="aot_eager")


BLOCKS = {"dp_shard=2": [ActivationCheckpoint(), EAGER, FullyShard()], "tp=2": [TensorParallel(), EAGER]}


@on_ranks(2)
@pytest.mark.parametrize("mesh", daily(BLOCKS, "dp_shard=2"))
def test_like_blocks_are_compiled_once(mesh: str) -> None:
    assert graphs(MODELS["transformer"], mesh, BLOCKS[mesh]) == 1


@pytest.mark.parametrize("name", daily(["gpt2", "llama"]))
def test_like_blocks_of_other_models_are_compiled_once(name: str) -> None:
    with meshpar.distributed("cpu"):
        assert graphs(MODELS[name], "", [EAGER]) == 1


def test_a_report_is_read_later_than_it_is_begun() -> None:
    class Alone:
        device, loss_rank, loss_size = torch.device("cpu"), 0, 1

        def data_sum(self, values: torch.Tensor) -> torch.Tensor:
            return values

    meter = Meter(Alone())
    meter.add(4, {"loss": torch.tensor(8.0)})
    meter.begin({"step": 1}, {"norm": torch.tensor(3.0)})
    meter.add(4, {"loss": torch.tensor(100.0)})
    record = meter.read()
    assert (record["train/loss"], record["norm"], record["step"]) == (2.0, 3.0, 1)
    meter.begin({}, {})
    assert meter.read()["train/loss"] == 25.0


@pytest.mark.long
def test_the_gpu_benchmark_runs_in_small_on_a_cpu() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    command = [
        sys.executable, str(script), "--smoke", "--case", "llama-1b", "--who", "meshpar", "--who", "torch by hand",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| llama-1b")]
    assert len(rows) == 2 and all("%" in row for row in rows), done.stdout + done.stderr[-2000:]


@pytest.mark.long
def test_the_plan_shows_what_recomputation_saves_and_costs() -> None:
    passes = "passes=[{ActivationCheckpoint: {mode: selective}}, FullyShard]"
    command = [
        sys.executable, "-m", "meshpar.launchers", "plan", "124m", "model.layers=2", "mesh=dp_shard=-1",
        "data.micro_batch=16", passes,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    found = re.search(
        r"recomputation saves ([\d.]+) GiB of a peak of ([\d.]+) and costs ([\d.,]+) ms a step", done.stdout
    )
    assert found, done.stdout + done.stderr
    saved, peak, cost = map(float, found.groups())
    assert 0 < saved < peak and cost > 0, found[0]
