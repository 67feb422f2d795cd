"""Random models, plans and loops against one process: exact, refused with a remedy, or a fault.

    python benchmarks/fuzz.py --count 2000 --out fuzz.json      2,000 plans from seed 0
    python benchmarks/fuzz.py --only 17                          one seed, with what went wrong
    python benchmarks/fuzz.py --only 17 --print                  the seed's script, without running it
    python benchmarks/fuzz.py --count 200 --shrink failing/      a script for the smallest case of each fault
    python benchmarks/fuzz.py --without deepcopy loop.clip=par   leave out what is known to fail
    python benchmarks/fuzz.py --same-bits                        Plan(same_bits=True), compared bit by bit

Each seed draws a model, a mesh with passes, a layout and a loop with habits (``fuzz_draw.py``), which become a script
(``fuzz_script.py``). The script's loop runs in one process and on gloo ranks, in float64; losses, gradients, norms,
evaluations and weights must agree to 1e-9 of each tensor's largest value. Classes: exact; refused (a MeshparError that
says what to do); wrong; raw (any other exception, or a refusal without a remedy); hang. Exits with 1 on any wrong, raw
or hang.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import fuzz_draw
import fuzz_script
import fuzz_shrink
from fuzz_pool import Outcome, Pool

FAULTS = ("wrong", "raw", "hang", "broken")


def main() -> int:
    """Run the seeds and print what became of them."""
    args = _arguments()
    seeds = args.only or list(range(args.first, args.first + args.count))
    if args.print:
        print(*(fuzz_script.source(_drawn(args, seed)) for seed in seeds), sep="\n")
        return 0
    pools: SimpleQueue[Pool] = SimpleQueue()
    for _ in range(args.jobs):
        pools.put(Pool(timeout_s=args.timeout))
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    try:
        for result in _outcomes(args, seeds, pools):
            results.append(result)
            _report(result, verbose=bool(args.only) or args.verbose)
            if len(results) % 50 == 0:
                print(f"[{time.monotonic() - began:5.0f} s] {_summary(results)}", flush=True)
        _save(args, results)
        if args.shrink:
            _shrink(results, Path(args.shrink), pools)
    finally:
        while not pools.empty():
            pools.get().close()
        _save(args, results)
    _causes(results)
    print(_summary(results))
    return int(any(result["kind"] in FAULTS for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", "--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many seeds")
    parser.add_argument("--only", type=int, nargs="+", help="these seeds alone")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a case hangs")
    parser.add_argument("--without", nargs="+", default=[], help="habits, or path=value of features, to leave out")
    parser.add_argument("--batch-norm", action="store_true", help="draw batch normalisation, too")
    parser.add_argument("--same-bits", action="store_true", help="compare with one process in this mode, bit by bit")
    parser.add_argument("--out", help="write every failing case and the counts as JSON")
    parser.add_argument("--shrink", help="write a script for the smallest case of each fault into this folder")
    parser.add_argument("--print", action="store_true", help="print the scripts and run nothing")
    parser.add_argument("--verbose", action="store_true", help="print a line for every case")
    return parser.parse_args()


def _drawn(args: argparse.Namespace, seed: int) -> fuzz_draw.Spec:
    spec = fuzz_draw.draw(seed, without=args.without, batch_norm=args.batch_norm, same_bits=args.same_bits)
    for path, _, value in (name.partition("=") for name in args.without if "=" in name):
        try:
            if str(fuzz_shrink.get(spec, path)) == value:
                spec = fuzz_shrink.put(spec, path, fuzz_shrink.PLAIN[path])
        except KeyError:
            continue
    return spec


def _outcomes(args: argparse.Namespace, seeds: list[int], pools: SimpleQueue[Pool]) -> Iterator[dict[str, Any]]:
    def one(seed: int) -> dict[str, Any]:
        spec = _drawn(args, seed)
        outcome = run(spec, pools)
        said = {"text": outcome.text, "trace": outcome.trace, "seconds": round(outcome.seconds, 2)}
        return {"seed": seed, "kind": outcome.kind, "cause": outcome.cause, **said, "spec": spec}

    with ThreadPoolExecutor(args.jobs) as threads:
        yield from threads.map(one, seeds)


def run(spec: fuzz_draw.Spec, pools: SimpleQueue[Pool]) -> Outcome:
    """Run one case on a free pool."""
    pool = pools.get()
    try:
        return pool.run(fuzz_script.source(spec), fuzz_script.ranks(spec))
    finally:
        pools.put(pool)


def _report(result: dict[str, Any], *, verbose: bool) -> None:
    spec = result["spec"]
    if result["kind"] not in FAULTS and not verbose:
        return
    mesh = ",".join(f"{axis}={size}" for axis, size in spec["mesh"].items())
    about = f"{mesh} {[pass_['name'] for pass_ in spec['passes']]} {spec['loop']['habits']} {result['cause']}"
    print(f"{result['seed']:6} {result['kind']:8} {result['seconds']:5.1f} s  {about}", flush=True)
    if verbose and result["kind"] in FAULTS:
        print(result["text"], result["trace"], sep="\n")


def _summary(results: list[dict[str, Any]]) -> str:
    counts = Counter(result["kind"] for result in results)
    text = (
        f"{len(results)} plans: {counts['exact']} exact, {counts['refused']} refused, {counts['wrong']} wrong, "
        f"{counts['raw']} raw errors, {counts['hang']} hangs"
    )
    return text + (f", {counts['broken']} that fail in one process" if counts["broken"] else "")


def _save(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    if args.out:
        failing = [result for result in results if result["kind"] in FAULTS]
        counts = Counter(f"{result['kind']}: {_about(result)}" for result in results if result["kind"] != "exact")
        data = {
            "summary": _summary(results),
            "counts": counts,
            "seeds": [result["seed"] for result in failing],
            "failing": failing,
        }
        Path(args.out).write_text(json.dumps(data, indent=1) + "\n")


def _causes(results: list[dict[str, Any]]) -> None:
    """Print what was refused and what failed, by cause."""
    causes = Counter((result["kind"], _about(result)) for result in results if result["kind"] != "exact")
    for (kind, cause), count in sorted(causes.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"{count:6} {kind:8} {cause}")


def _about(result: dict[str, Any]) -> str:
    """Return a name for a cause: its text, for a plan's problems the first of them, for other values the habits."""
    if result["kind"] in ("wrong", "hang"):
        return " + ".join(result["spec"]["loop"]["habits"]) or "no habit"
    lines = result["text"].splitlines()
    if result["kind"] == "raw" and lines[0].startswith("refused without"):
        return "refused without a remedy"
    return result["cause"] if len(lines) < 2 or "in this plan" not in lines[0] else fuzz_shrink.without_names(lines[1])


def _shrink(results: list[dict[str, Any]], folder: Path, pools: SimpleQueue[Pool]) -> None:
    """Write a script for the smallest case of each cause."""
    folder.mkdir(parents=True, exist_ok=True)
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for result in results:
        if result["kind"] in ("wrong", "raw", "hang"):
            first.setdefault((result["kind"], _about(result)), result)
    for (kind, about), result in first.items():

        def fails(spec: fuzz_draw.Spec, found: dict[str, Any] = result, kind: str = kind) -> bool:
            outcome = run(spec, pools)
            return outcome.kind == kind and (kind in ("wrong", "hang") or outcome.cause == found["cause"])

        small = fuzz_shrink.shrink(result["spec"], fails)
        outcome = run(small, pools)
        path = folder / f"seed_{result['seed']}_{kind}.py"
        path.write_text(
            fuzz_script.source(small, f"Seed {result['seed']}, {kind}: {' '.join(outcome.text.split())[:300]}")
        )
        print(f"{path}: {kind}, {about}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
