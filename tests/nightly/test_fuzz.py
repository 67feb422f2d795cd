"""Random models, plans and loops against one process, a sample; ``benchmarks/fuzz.py`` runs thousands."""

from queue import SimpleQueue

import fuzz
import fuzz_draw
import fuzz_pool
import fuzz_script
import fuzz_shrink
import pytest

SEEDS = range(24)

WRONG = """
REFUSED, TOLERANCE, FLOOR = False, 1e-9, 1e-6
import torch
from meshpar import MeshparError
Alone, apply = "alone", "apply"
def train(how):
    return {"loss": torch.tensor(1.0 if how == "alone" else {value})}
def differences(expected, got, tolerance, floor):
    return [] if expected == got else ["loss: off"]
"""


@pytest.fixture(scope="module")
def pools():
    pools: SimpleQueue[fuzz_pool.Pool] = SimpleQueue()
    pools.put(fuzz_pool.Pool(timeout_s=60.0))
    yield pools
    pools.get().close()


def test_a_seed_draws_the_same_case_every_time():
    assert [fuzz_draw.draw(seed) for seed in range(20)] == [fuzz_draw.draw(seed) for seed in range(20)]


def test_every_case_is_a_script():
    for seed in range(300):
        for options in ({"batch_norm": True}, {"same_bits": True}):
            compile(fuzz_script.source(fuzz_draw.draw(seed, **options)), f"seed {seed}", "exec")


@pytest.mark.parametrize("same_bits", [False, True])
def test_the_sample_equals_one_process_or_is_refused(pools, same_bits):
    faults, option = {}, " --same-bits" * same_bits
    for seed in SEEDS:
        outcome = fuzz.run(fuzz_draw.draw(seed, same_bits=same_bits), pools)
        if outcome.kind in fuzz.FAULTS:
            faults[seed] = f"{outcome.kind}: {outcome.text}"
    assert not faults, "\n".join(f"fuzz.py --only {seed}{option}: {text}" for seed, text in faults.items())


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("1.0", "exact"),
        ("2.0", "wrong"),
        ("1 / 0", "raw"),
        ("(_ for _ in ()).throw(MeshparError('no; use two'))", "refused"),
        ("(_ for _ in ()).throw(MeshparError('no'))", "raw"),
        ("__import__('os')._exit(3)", "raw"),
    ],
)
def test_the_classes_tell_outcomes_apart(pools, value, kind):
    pool = pools.get()
    try:
        assert pool.run(WRONG.replace("{value}", value), 2).kind == kind
    finally:
        pools.put(pool)


def test_a_rank_that_waits_alone_hangs():
    pool = fuzz_pool.Pool(size=2, timeout_s=6.0)
    try:
        waits = "float(torch.distributed.get_rank() or __import__('time').sleep(60) or 1)"
        assert pool.run(WRONG.replace("{value}", waits), 2).kind == "hang"
        assert pool.run(WRONG.replace("{value}", "1.0"), 2).kind == "exact"  # others have taken their places
    finally:
        pool.close()


def test_a_failing_case_shrinks_to_what_makes_it_fail():
    spec = next(
        spec
        for spec in map(fuzz_draw.draw, range(1000))
        if spec["model"]["counter"] == "block" and len(spec["passes"]) > 1
    )
    small = fuzz_shrink.shrink(spec, lambda drawn: drawn["model"]["counter"] == "block")
    assert small["model"]["counter"] == "block" and small["loop"]["habits"] == [] and small["model"]["layers"] == 1
    assert fuzz_script.ranks(small) == 2 and len(small["passes"]) == 1
