"""Drawn loops that change a parallel module after plan.apply, a sample; ``benchmarks/fuzz_after_apply.py`` runs thousands."""

from __future__ import annotations

import fuzz_after_apply as fuzz
import fuzz_pool
import pytest

from tests.support.patience import patient

SEEDS = range(10)


def test_a_seed_draws_the_same_script_every_time_and_each_compiles():
    for seed in range(200):
        text = fuzz.source(fuzz.draw(seed))
        assert text == fuzz.source(fuzz.draw(seed)) and "@" not in text.replace("@staticmethod", "").replace("@torch", "").replace(
            " @ ", ""
        )
        compile(text, f"seed {seed}", "exec")


@pytest.fixture(scope="module")
def pool():
    pool = fuzz_pool.Pool(size=4, timeout_s=patient(60.0))
    yield pool
    pool.close()


def test_the_sample_equals_one_process_or_is_refused(pool):
    faults = {}
    for seed in SEEDS:
        outcome = fuzz.run(fuzz.draw(seed), pool)
        if outcome.kind in fuzz.FAULTS:
            faults[seed] = f"{outcome.kind}: {outcome.text}"
    assert not faults, "\n".join(f"python benchmarks/fuzz_after_apply.py --seeds {seed}: {text}" for seed, text in faults.items())


def test_what_fails_in_one_process_must_fail_on_ranks(pool):
    spec = {**fuzz.draw(0), "habits": [{"name": "forward_fails", "when": "True", "k": 0, "p": "head.weight", "m": "head"}]}
    text = fuzz.source(spec).replace("except ValueError", "except KeyError")
    assert pool.run(text, 2).kind == "alike"
    assert pool.run(text.replace("par = apply(model)", "par = apply(model); assert apply is not Alone"), 2).kind == "alike"
    loses = text.replace("raise ValueError", "pass").replace("par = apply(model)", "par = apply(model); assert apply is not Alone")
    assert pool.run(loses, 2).kind == "wrong"


def test_a_failing_case_shrinks_to_the_habits_that_make_it_fail():
    spec = next(spec for spec in map(fuzz.draw, range(1000)) if len(spec["habits"]) == 4)
    wanted = spec["habits"][2]
    assert fuzz.shrink(spec, lambda each: wanted in each["habits"])["habits"] == [wanted]
