"""Does the suite notice when a collective, a sum of gradients or a reshard is gone? Each is taken out in turn, and tests must fail.

    python benchmarks/mutations.py                      every mutation, resumed from its JSON; about a minute each
    python benchmarks/mutations.py --list               what would be taken out
    python benchmarks/mutations.py --only collectives   those in files whose name contains a word

A mutation replaces one call by its first argument (``reduce_from(x, group)`` by ``x``), or leaves out a call that stands alone
(``context.join()``), in a copy of the checkout. A mutation that no test notices is printed as SURVIVED: a line that was not needed, or a
test that is missing. Exits with 1 where one survived.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("meshpar/passes/**/*.py", "meshpar/exact/*.py", "meshpar/parallelized.py")
NAMES = {
    "_all_reduce", "_all_gather", "_reduce_scatter", "_all_to_all", "all_reduce", "copy_to", "copy_weight", "reduce_from",
    "gather_partial", "reduce_scatter", "gather_replicated", "split_replicated", "regroup", "sum_gradients", "enter", "leave", "part",
    "join", "join_after", "reshard", "reduce", "drop_unreduced_gradients", "make_ready", "all_gather_into_tensor", "reduce_scatter_tensor",
}  # fmt: skip
TESTS = (
    "tests/test_traps.py",
    "tests/test_verify.py",
    "tests/test_passes.py",
    "tests/test_parity.py",
    "tests/test_cycle.py",
    "tests/test_batch_norm.py",
    "tests/test_loops.py",
    "tests/test_huggingface.py",
    "tests/test_context.py",
    "tests/test_experts.py",
    "tests/test_world.py",
)
OWN_TESTS = {"exchange": "context"}
"""File -> word in the name of its tests, where that is another."""


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
        for path in sorted(ROOT.glob(pattern)):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and _name(node) in NAMES and not _joins_text(node):
                    yield Mutation(str(path.relative_to(ROOT)), node.lineno, node.col_offset, ast.unparse(node)[:90])


def _name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def _joins_text(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant)


class _Without(ast.NodeTransformer):
    """The source without one call: its first argument instead, or nothing where the call stands alone."""

    def __init__(self, mutation: Mutation) -> None:
        self.mutation = mutation

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (self.mutation.line, self.mutation.column)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if self._is_it(node.value) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node) and _name(node) in NAMES:
            return node.args[0] if node.args else ast.copy_location(ast.Constant(None), node)
        return node


def survives(mutation: Mutation, copy: Path) -> bool:
    """Run the tests with one call gone; tell whether all of them pass."""
    source = (ROOT / mutation.path).read_text()
    target = copy / mutation.path
    target.write_text(ast.unparse(_Without(mutation).visit(ast.parse(source))))
    try:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        stem = OWN_TESTS.get(Path(mutation.path).stem, Path(mutation.path).stem)
        for test in sorted(TESTS, key=lambda each: stem not in each):  # the file's own tests first
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--timeout", "60", "-p", "no:cacheprovider", test]
            if subprocess.run(command, cwd=copy, env=environment, capture_output=True).returncode in (1, 2):  # failed; stopped at a failure
                return False
        return True
    finally:
        target.write_text(source)


def checkout(folder: Path) -> Path:
    """Return a copy of this checkout in ``folder`` whose tests import the copy."""
    copy = folder / "checkout"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "runs"))
    (copy / "conftest.py").write_text("import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\n")
    return copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--json", type=Path, default=Path("runs/mutations.json"), help="what is known already")
    args = parser.parse_args()
    chosen = [each for each in mutations() if args.only in each.path]
    if args.list:
        print(*chosen, sep="\n")
        return 0
    known: dict[str, str] = json.loads(args.json.read_text()) if args.json.exists() else {}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = checkout(Path(folder))
        for mutation in chosen:
            if str(mutation) not in known:
                known[str(mutation)] = "SURVIVED" if survives(mutation, copy) else "noticed"
                args.json.write_text(json.dumps(known, indent=1))
            print(f"{known[str(mutation)]:8} {mutation}", flush=True)
    return int("SURVIVED" in {known[str(each)] for each in chosen})


if __name__ == "__main__":
    sys.exit(main())
