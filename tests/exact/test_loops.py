"""Every habit of a training loop is exact or refused under every plan, as docs/loops.md says."""

import pytest

from meshpar._torch import BEFORE_2_13
from tests.support.loop_habits import CONTROLS, HABITS
from tests.support.loop_sides import PLANS
from tests.support.loop_table import PAGE, columns_of, differences, page, run_plan, weaker_of

SLOW = ("compiled_eager", "compiled_aot", "generating")


QUICK = [name for name in HABITS if name not in SLOW]


SAMPLES = [
    pytest.param(title, QUICK[first::24], id=f"{title}-{first}", marks=[] if first < 2 else [pytest.mark.nightly])
    for first, title in enumerate(["FSDP", "TP", "TP", "FSDP", "TP", "FSDP"] * 4)
]
"""A part of the habits each; by day one under each of two plans."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("title", "names"), SAMPLES)
def test_a_sample_of_habits_under_two_plans_is_exact_or_refused_as_the_page_says(title, names):
    holds(title, names)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", PLANS)
def test_every_habit_is_exact_or_refused_as_the_page_says(title):
    holds(title, QUICK)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", PLANS)
def test_slow_habits_are_exact_or_refused_as_the_page_says(title):
    holds(title, [name for name in HABITS if name in SLOW])


def holds(title, names):
    documented = columns_of(PAGE.read_text(encoding="utf-8"))[title]
    names = [name for name in names if not (BEFORE_2_13 and name == "lbfgs")]  # refused under more plans there
    found = differences(title, run_plan(title, names), documented)
    assert not found, "\n".join([f"{len(found)} cells; `python docs/write_loops.py` rewrites the page:", *found])


def test_the_page_is_what_the_run_writes():
    text = PAGE.read_text(encoding="utf-8")
    assert page(columns_of(text), weaker_of(text)) == text
    assert all(set(column) == set(HABITS) for column in columns_of(text).values())
    assert len({habit.title for habit in HABITS.values()}) == len(HABITS)


def test_the_run_tells_faults_apart_and_goes_on_after_them():
    outcomes = run_plan("Replicate", CONTROLS)
    kinds = {name.removeprefix("control_"): outcome.kind for name, outcome in outcomes.items()}
    assert kinds == {"wrong": "wrong", "raw": "raw", "refused_on_one_rank": "wrong", "hang": "hang", "exact": "exact"}
    assert [line.partition(":")[0] for line in differences("Replicate", outcomes, outcomes)] == [
        f"control_{name} under Replicate" for name in ("wrong", "raw", "refused_on_one_rank", "hang")
    ]
