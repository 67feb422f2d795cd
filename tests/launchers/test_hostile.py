"""Files of strangers are read or refused; ``benchmarks/fuzz_hostile.py --seeds 0:2000`` is the whole."""

from collections.abc import Iterator
from pathlib import Path

import fuzz_hostile as fuzz
import pytest
from fuzz_hostile_draw import Case, Mutation, draw, shrink


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with fuzz.real_files() as base:
        yield base


def faults(base: Path, seeds: range) -> str:
    found = []
    for seed in seeds:
        outcome = fuzz.run(draw(seed), base)
        if outcome.kind in fuzz.FAULTS:
            found.append(f"python benchmarks/fuzz_hostile.py --seeds {seed}: {outcome.kind}: {outcome.text}")
    return "\n".join(found)


def test_hostile_files_are_read_or_refused(base: Path) -> None:
    assert not faults(base, range(8))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_many_hostile_files_are_read_or_refused(base: Path, first: int) -> None:
    assert not faults(base, range(first, first + 250))


@pytest.mark.parametrize("kind", fuzz.COMMANDS)
def test_the_real_files_are_read(base: Path, kind: str) -> None:
    outcome = fuzz.run(Case(kind, "job.yaml", ()), base)
    assert outcome.kind == ("refused" if kind == "launch" else "read"), outcome


def test_what_a_file_must_not_do_is_noticed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command, fault in (
        (["run", "script.py"], "ran"),
        (["export", "runs/small", "../outside/export"], "wrote"),
        (["checkpoints", "ls", "no-such-folder"], "refused"),
    ):
        (base / "script.py").write_text("")
        monkeypatch.setitem(fuzz.COMMANDS, "launch", [command])
        assert fuzz.run(Case("launch", "job.yaml", ()), base).kind == fault
    (base / "script.py").unlink()


def test_a_case_shrinks_to_the_change_that_makes_it_fail() -> None:
    case = next(case for case in map(draw, range(1000)) if len(case.mutations) == 3)
    assert shrink(case, lambda other: case.mutations[1] in other.mutations).mutations == (case.mutations[1],)
    assert isinstance(case.mutations[0], Mutation) and draw(7) == draw(7)
