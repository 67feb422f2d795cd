"""What one forward runs through: files, functions and lines of meshpar under FSDP x TP on four ranks, guards on.

    python benchmarks/forward_trace.py [--functions]

Traces the third forward of a small transformer, on rank 0. Lines are those of code of the functions that ran, without
their docstrings; ``--functions`` prints the functions, too, in the order in which they were entered.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

import torch
import torch.distributed as dist

import meshpar
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import launch

SHAPE = TransformerConfig(vocab_size=64, dim=16, layers=2, heads=2, hidden=32, max_positions=16)
ROOMS = [str(Path(meshpar.__file__).parent.parent / room) + "/" for room in ("meshpar", "models", "checkpoints")]


def rank_main(out: str) -> None:
    """Write the functions that a steady forward enters, on rank 0, in their order."""
    passes = [meshpar.TensorParallel(), meshpar.FullyShard()]
    par = meshpar.Plan("dp_shard=2,tp=2", passes, guards="always").apply(Transformer(SHAPE))
    optimizer, ids = torch.optim.AdamW(par.module.parameters()), torch.zeros(1, 8, dtype=torch.int64)
    entered: dict[CodeType, None] = {}

    def see(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(tuple(ROOMS)):
            entered.setdefault(frame.f_code)

    for step in range(3):
        if step == 2:
            sys.setprofile(see)
        logits = par.module(ids).logits
        sys.setprofile(None)
        logits.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        functions = [(code.co_filename, code.co_qualname, lines_of(code)) for code in entered]
        Path(out).write_text(json.dumps(functions))


def lines_of(code: CodeType) -> int:
    """Return the lines of a function but for its docstring and what is blank."""
    if code.co_name.startswith("<"):  # inside of another function
        return 0
    text = textwrap.dedent(inspect.getsource(code))
    function = ast.parse(text).body[0]
    docstring = ast.get_docstring(function, clean=False) if isinstance(function, ast.FunctionDef) else None
    return sum(bool(line.strip()) for line in text.splitlines()) - len(docstring.split("\n") if docstring else ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="print each function that ran")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        out = Path(folder) / "functions.json"
        launch("forward_trace", "rank_main", 4, (str(out),), timeout_s=300.0, fresh="a benchmark")
        functions = json.loads(out.read_text())
    if options.functions:
        root = Path(meshpar.__file__).parent.parent
        print(*(f"{Path(file).relative_to(root)}: {name} {lines}" for file, name, lines in functions), sep="\n")
    files, lines = {file for file, *_ in functions}, sum(lines for *_, lines in functions)
    print(f"one forward: {len(files)} files, {len(functions)} functions, {lines:,} lines of code")


if __name__ == "__main__":
    main()
