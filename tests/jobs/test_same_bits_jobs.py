"""A recipe with `same_bits: true` that moves from mesh to mesh trains like one that stays, bit by bit."""

import json
from pathlib import Path

import pytest

from meshpar.launchers.commands.train import train_recipe
from tests.support.tiers import daily

RECIPE = """
name: job
device: cpu
same_bits: true
model: {dim: 32, layers: 4, heads: 4, hidden: 48, max_positions: 64}
data: {source: stdlib, vocab_size: 512, sequence_length: 64, micro_batch: 2, accumulate: 8, validation_fraction: 0.01}
optimizer: {lr: 1e-2}
schedule: {name: cosine, warmup_steps: 2, steps: 9}
training:
  {steps: 9, log_every: 1, digest_every: 1, validate_every: 3, validate_steps: 8, tensorboard: false, forecast: false}
checkpoint: {every: 3}
"""
MEASURED = ("time", "tokens_per_second", "memory_gib")
MOVES = {
    "data-axes-and-stages": ("", ("dp_shard=4", "dp_replicate=2,dp_shard=2", "pp=2,dp_shard=2"), ()),
    "features": (
        "dp_shard=1,tp=1",
        ("dp_shard=4,tp=1", "dp_shard=2,tp=2", "dp_shard=1,tp=4"),
        ("passes=[{TensorParallel: {parts: 4}}, FullyShard]",),
    ),
}


def train(recipe: Path, name: str, ranks: int, *overrides: str) -> None:
    cache = f"data.cache={recipe.parent / 'cache'}"
    assert (
        train_recipe(str(recipe), [f"output={recipe.parent / name}", cache, *overrides], nproc=ranks, quiet=True) == 0
    )


def metrics(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


@pytest.mark.parametrize("moves", daily(MOVES, "data-axes-and-stages"))
def test_a_run_that_moves_has_the_bits_of_one_that_stays(moves: str, tmp_path: Path) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text(RECIPE)
    alone, meshes, overrides = MOVES[moves]
    train(recipe, "stays", 1, f"mesh={alone}", *overrides)
    for number, mesh in enumerate(meshes, 1):
        train(recipe, "moves", 4, f"mesh={mesh}", f"training.steps={3 * number}", *overrides)
    stays, moves = metrics(tmp_path / "stays"), metrics(tmp_path / "moves")
    assert {line["step"] for line in stays} == set(range(10))
    assert [line for line in moves if line not in stays] == []
    assert [line for line in stays if line not in moves] == []
