"""Does the suite notice when a collective, a sum of gradients or a reshard is gone? Each is taken out in turn, and
tests must fail.

    python benchmarks/mutations.py                      every mutation, resumed from its JSON; seconds to minutes each
    python benchmarks/mutations.py --list               what would be taken out
    python benchmarks/mutations.py --only collectives   those in files whose name contains a word
    python benchmarks/mutations.py --only pipeline --tests tests/passes/pipeline/test_parallel.py   by some of the tests

A mutation replaces one call by its first argument (``reduce_from(x, group)`` by ``x``), or leaves out a call that
stands alone (``context.join()``), in a copy of the checkout. The tests run once with every call marked, which tells the
tests that come by each call; then each mutation is tried by its own, the quickest first. A mutation that no test
notices is printed as SURVIVED: a line that was not needed, or a test that is missing. Exits with 1 where one survived.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILES = tuple(
    f"meshpar/{name}" for name in ("passes/**/*.py", "step/*.py", "guards/*.py", "trials/*.py", "parallelized/*.py")
)
NAMES = {
    "_all_reduce", "_all_gather", "_reduce_scatter", "_all_to_all", "all_reduce", "copy_to", "copy_weight",
    "reduce_from", "gather_partial", "reduce_scatter", "gather_replicated", "split_replicated", "own_parts",
    "sum_gradients", "enter", "leave", "part", "join", "join_after", "reshard", "reduce", "drop_unreduced_gradients",
    "make_ready", "all_gather_into_tensor", "reduce_scatter_tensor", "recv", "isend", "broadcast",
    "broadcast_object_list", "all_gather_object", "add_up", "_share", "_meet", "exchanged", "send", "receive",
    "gather", "_hand_on", "_gradients", "set_aside", "_compare_cuts", "all_fail", "settle_first", "settle_all",
}  # fmt: skip
TESTS = (
    "tests/passes/test_traps.py",
    "tests/trials/test_split.py",
    "tests/passes/test_passes.py",
    "tests/testing/test_parity.py",
    "tests/step/test_cycle.py",
    "tests/passes/data/test_batch_norm.py",
    "tests/exact/test_loops.py",
    "tests/models/test_huggingface.py",
    "tests/passes/positions/test_parallel.py",
    "tests/passes/experts/test_parallel.py",
    "tests/passes/data/test_instead_of_fsdp2.py",
    "tests/passes/pipeline/test_parallel.py",
    "tests/nightly/test_forecast_replay.py",
)
MARKS = """
import os, time
_last = {}

def hit(name):
    now = time.time()
    if now - _last.get(name, 0.0) > 0.2:
        _last[name] = now
        with open(os.environ["HITS"] + ".calls", "a") as file:
            file.write(f"{now} {name}\\n")
"""
"""A module that notes when a call is reached, for each worker of the tests in a file of its own."""
CONFTEST = """
import os, pathlib, sys, time
import pytest
sys.path.insert(0, os.path.dirname(__file__))
os.environ["HITS"] = str(pathlib.Path(__file__).with_name(os.environ.get("PYTEST_XDIST_WORKER", "gw")))

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    began = time.time()
    yield
    with open(os.environ["HITS"] + ".tests", "a") as file:
        file.write(f"{began} {time.time()} {item.nodeid}\\n")
"""
"""Makes tests import the copy, and notes when each one ran."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One call that is taken out."""

    path: str
    line: int
    column: int
    call: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.call}"


def mutations() -> Iterator[Mutation]:
    """Yield every call of one of ``NAMES`` in ``FILES``."""
    for pattern in FILES:
        for path in sorted((ROOT / "meshpar").glob(pattern)):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and _name(node) in NAMES and not _joins_text(node):
                    yield Mutation(str(path.relative_to(ROOT)), node.lineno, node.col_offset, ast.unparse(node)[:90])


def _name(node: ast.Call) -> str:
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )


def _joins_text(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant)


class _Without(ast.NodeTransformer):
    """The source without one call: its first argument instead, or nothing where the call stands alone."""

    def __init__(self, mutation: Mutation) -> None:
        self.mutation = mutation

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (
            self.mutation.line,
            self.mutation.column,
        )

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if self._is_it(node.value) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node) and _name(node) in NAMES:
            return node.args[0] if node.args else ast.copy_location(ast.Constant(None), node)
        return node


class _Marked(ast.NodeTransformer):
    """The source with a mark before each call that is taken out later."""

    def __init__(self, mutations: Mapping[tuple[int, int], Mutation]) -> None:
        self.mutations = mutations

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if (node.lineno, node.col_offset) not in self.mutations or _name(node) not in NAMES:
            return node
        mark = ast.parse(
            f"__import__('marks').hit({str(self.mutations[node.lineno, node.col_offset])!r})", mode="eval"
        ).body
        return ast.Subscript(ast.Tuple([mark, node], ast.Load()), ast.Constant(1), ast.Load())


def reached(chosen: Sequence[Mutation], copy: Path, tests: Sequence[str] = TESTS) -> dict[str, list[str]]:
    """Run the tests once with every call marked; return the tests that come by each call, the quickest first."""
    for path in {mutation.path for mutation in chosen}:
        here = {(mutation.line, mutation.column): mutation for mutation in chosen if mutation.path == path}
        (copy / path).write_text(
            ast.unparse(ast.fix_missing_locations(_Marked(here).visit(ast.parse((ROOT / path).read_text()))))
        )
    (copy / "marks.py").write_text(MARKS)
    _pytest(copy, "-n", "2", *tests)
    for path in {mutation.path for mutation in chosen}:
        (copy / path).write_text((ROOT / path).read_text())
    found: dict[str, set[tuple[float, str]]] = {str(mutation): set() for mutation in chosen}
    for log in copy.glob("*.tests"):
        tests = [
            (float(began), float(ended), name)
            for began, ended, name in (line.split(" ", 2) for line in log.read_text().splitlines())
        ]
        calls = log.with_suffix(".calls")
        for line in calls.read_text().splitlines() if calls.exists() else ():
            when, call = line.split(" ", 1)
            found[call] |= {(ended - began, name) for began, ended, name in tests if began <= float(when) <= ended}
    return {call: [name for _, name in sorted(tests)] for call, tests in found.items()}


def survives(mutation: Mutation, tests: Sequence[str], copy: Path, seconds: int) -> bool:
    """Run ``tests`` with one call gone, each for at most ``seconds``; tell whether all pass.

    What fails must pass with the call in place: a busy machine fails, too.
    """
    source = (ROOT / mutation.path).read_text()
    target = copy / mutation.path
    left = list(tests)
    while left:
        target.write_text(ast.unparse(_Without(mutation).visit(ast.parse(source))))
        failed = _pytest(copy, "-x", "--timeout", str(seconds), *left)
        target.write_text(source)
        if not failed:
            return True
        if not _pytest(copy, failed):  # it passes with the call in place
            return False
        left = left[left.index(failed) + 1 :] if failed in left else []
    return True


def _pytest(copy: Path, *tests: str) -> str:
    """Return the name of the first test that fails."""
    # The server that ranks are forked from begins with this path, and would import the installed checkout otherwise.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "120", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    named = [
        line.split(" ", 1)[1].split(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    if not named and done.returncode not in (0, 5):  # neither passed, nor all in the long form
        raise RuntimeError(
            f"pytest ended with {done.returncode} on {' '.join(tests)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return named[0] if named else ""


def checkout(folder: Path) -> Path:
    """Return a copy of this checkout in ``folder`` whose tests import the copy."""
    copy = folder / "checkout"
    shutil.copytree(
        ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "runs")
    )
    (copy / "conftest.py").write_text(CONFTEST)
    return copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files of tests; all by default")
    parser.add_argument("--seconds", type=int, default=120, help="longest test of a mutation: some make ranks wait")
    parser.add_argument("--json", type=Path, default=Path("runs/mutations.json"), help="what is known already")
    args = parser.parse_args()
    chosen = [mutation for mutation in mutations() if args.only in mutation.path]
    if args.list:
        print(*chosen, sep="\n")
        return 0
    record: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {"tests": {}, "known": {}}
    known: dict[str, str] = record["known"]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = checkout(Path(folder))
        if not all(str(mutation) in record["tests"] for mutation in chosen):
            record["tests"] |= reached(chosen, copy, args.tests)
        for mutation in chosen:
            if str(mutation) not in known:
                known[str(mutation)] = (
                    "SURVIVED" if survives(mutation, record["tests"][str(mutation)], copy, args.seconds) else "noticed"
                )
            args.json.write_text(json.dumps(record, indent=1))
            print(f"{known[str(mutation)]:8} {len(record['tests'][str(mutation)]):3} tests  {mutation}", flush=True)
    return int("SURVIVED" in {known[str(mutation)] for mutation in chosen})


if __name__ == "__main__":
    sys.exit(main())
