"""A sample of drawn loops that change a parallel module; ``benchmarks/fuzz_after_apply.py`` runs thousands."""

import fuzz_after_apply as fuzz
import fuzz_pool
import pytest

SEEDS = range(12)
KEPT = {
    "exact": {
        "dp_shard=2": [
            *(
                "new_data head.weight",
                "average_swapped_by_data",
                "normal head.bias",
                "noise blocks.0.up.weight",
                "dropped table.weight",
            ),
            *(
                "all_reset", "mean head.weight", "part_of_it head.weight", "empty", "slice", "backward_fails",
                "gradient_noise",
            ),
        ],
        "dp_shard=2,tp=2": ["loaded_plain_assigned", "transposed"],
    },
    "refused": {
        "dp_shard=2": [
            *(
                "new_data_of_one_process head.weight",
                "first_row head.weight",
                "first_row_of_data head.bias",
                "flat_element head.weight",
            ),
            *(
                "masked head.weight",
                "numpy head.weight",
                "orthogonal table.weight",
                "frozen_between head.weight",
                "tied_before",
            ),
            *(
                "between_forward_and_backward head.weight",
                "backward_fails_uncleared",
                "backward_fails_at_the_end",
                "another_class",
            ),
        ],
        "tp=2": [
            "between_forward_and_backward head.weight",
            "in_a_gradient_hook",
            "backward_fails_uncleared",
            "new_forward_of_a_block",
        ],
        "dp_shard=2,tp=2": ["in_a_gradient_hook", "spectral_norm", "weight_itself"],
    },
}  # fmt: skip
"""What was wrong, or raw, once: verdict -> plan -> habits, each with its parameter."""


def test_a_seed_draws_the_same_script_every_time_and_each_compiles():
    for seed in range(200):
        text = fuzz.source(fuzz.draw(seed))
        assert text == fuzz.source(fuzz.draw(seed))
        assert "@" not in text.replace("@staticmethod", "").replace("@torch", "").replace(" @ ", "")
        compile(text, f"seed {seed}", "exec")


@pytest.fixture(scope="module")
def pool():
    pool = fuzz_pool.Pool(size=4, timeout_s=60.0)
    yield pool
    pool.close()


def test_the_sample_equals_one_process_or_is_refused(pool):
    faults = {}
    for seed in SEEDS:
        outcome = fuzz.run(fuzz.draw(seed), pool)
        if outcome.kind in fuzz.FAULTS:
            faults[seed] = f"{outcome.kind}: {outcome.text}"
    assert not faults, "\n".join(
        f"python benchmarks/fuzz_after_apply.py --seeds {seed}: {text}" for seed, text in faults.items()
    )


def test_what_was_wrong_or_raw_once_is_exact_or_refused(pool):
    got, expected = {}, {}
    for kind, plans in KEPT.items():
        for mesh, habits in plans.items():
            for habit in habits:
                name, _, parameter = habit.partition(" ")
                drawn = {
                    "name": name,
                    "when": fuzz.habits.HABITS[name].when[0],
                    "k": 0,
                    "p": parameter or "head.weight",
                    "m": "head",
                }
                outcome = fuzz.run({**fuzz.draw(0), "mesh": mesh, "habits": [drawn]}, pool)
                expected[mesh, habit] = kind
                got[mesh, habit] = kind if outcome.kind == kind else f"{outcome.kind}: {outcome.text}"
    assert got == expected


def test_what_fails_in_one_process_must_fail_on_ranks(pool):
    spec = {
        **fuzz.draw(0),
        "habits": [{"name": "forward_fails", "when": "True", "k": 0, "p": "head.weight", "m": "head"}],
    }
    text = fuzz.source(spec).replace("except ValueError", "except KeyError")
    assert pool.run(text, 2).kind == "alike"
    assert (
        pool.run(text.replace("par = apply(model)", "par = apply(model); assert apply is not Alone"), 2).kind == "alike"
    )
    loses = text.replace("raise ValueError", "pass").replace(
        "par = apply(model)", "par = apply(model); assert apply is not Alone"
    )
    assert pool.run(loses, 2).kind == "wrong"


def test_a_failing_case_shrinks_to_the_habits_that_make_it_fail():
    spec = next(spec for spec in map(fuzz.draw, range(1000)) if len(spec["habits"]) == 4)
    wanted = spec["habits"][2]
    assert fuzz.shrink(spec, lambda spec_: wanted in spec_["habits"])["habits"] == [wanted]
