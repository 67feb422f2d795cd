"""Drawn loops over stages, a sample; ``benchmarks/fuzz_pipelines.py`` runs thousands."""

import fuzz_pipelines as fuzz
import fuzz_pool
import pytest
from fuzz_after_apply import FAULTS
from pipeline_habits import HABITS

SEEDS = range(24)
KEPT = {
    "exact": {
        "pp=2": ["penalty_of_head", "hook_normed", "hook_on_head", "not_cleared", "mask", "fails_on_one_rank"],
        "pp=2,dp_shard=2": ["norm_by_whole", "clip_each"],
    },
    "refused": {
        "pp=2": [
            *("hook_sums", "hook_after_sums", "zero_in_loss", "none_in_loss", "data_in_loss", "normal", "reset"),
            *("noise_of_a_shape", "norm_by_lists", "penalty_of_embed", "penalty_of_one", "not_called", "of_the_head"),
        ],
        "pp=2,tp=2": ["penalty", "norm_by_items", "norm_stacked"],
        "pp=2,dp_shard=2": ["penalty", "norm_by_numpy"],
    },
}
"""What was wrong, raw or hung once, and what is near it: verdict -> plan -> habits."""


@pytest.fixture(scope="module")
def pool():
    pool = fuzz_pool.Pool(size=4, timeout_s=60.0)
    yield pool
    pool.close()


def test_a_seed_draws_the_same_script_every_time_and_each_compiles():
    for seed in range(500):
        text = fuzz.source(fuzz.draw(seed))
        assert text == fuzz.source(fuzz.draw(seed))
        assert "@" not in text.replace("@staticmethod", "").replace("@torch.no_grad", "")
        compile(text, f"seed {seed}", "exec")


def test_the_sample_equals_one_process_or_is_refused(pool):
    faults = {}
    for seed in SEEDS:
        outcome = fuzz.run(fuzz.draw(seed), pool)
        if outcome.kind in (*FAULTS, "broken"):
            faults[seed] = f"{outcome.kind}: {outcome.text}"
    assert not faults, "\n".join(
        f"python benchmarks/fuzz_pipelines.py --seeds {seed}: {text}" for seed, text in faults.items()
    )


def test_what_was_wrong_raw_or_hung_once_is_exact_or_refused(pool):
    got, expected = {}, {}
    plain = {**fuzz.draw(0), "virtual": 1, "schedule": "1f1b", "blocks": 4, "micro": 3, "kinds": []}
    for kind, plans in KEPT.items():
        for mesh, habits in plans.items():
            for name in habits:
                drawn = {"name": name, "when": HABITS[name].when[0], "k": 1, "p": "blocks.0.up.weight", "m": "head"}
                outcome = fuzz.run({**plain, "mesh": mesh, "habits": [drawn]}, pool)
                expected[mesh, name] = kind
                got[mesh, name] = kind if outcome.kind == kind else f"{outcome.kind}: {outcome.text}"
    assert got == expected


def test_a_failing_case_shrinks_to_the_habits_and_stages_that_make_it_fail():
    spec = next(spec for spec in map(fuzz.draw, range(1000)) if len(spec["habits"]) == 4 and "," in spec["mesh"])
    wanted = spec["habits"][2]
    small = fuzz.shrink(spec, lambda case: wanted in case["habits"])
    assert (small["habits"], small["mesh"], small["kinds"], small["virtual"]) == ([wanted], "pp=2", [], 1)
