"""What importing costs: ``import meshpar`` over ``import torch``, and ``meshpar --help``; medians of interleaved fresh processes.

python benchmarks/import_time.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

CODE = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    return float(subprocess.run([sys.executable, "-c", CODE.format(statement)], capture_output=True, text=True, check=True).stdout)


def command(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([str(Path(sys.executable).parent / "meshpar"), *arguments], capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    after, help_ = [], []
    for _ in range(repeats):
        # Within one process, so that the noise of loading torch itself cancels.
        after.append(seconds("import torch; start = time.perf_counter(); import meshpar"))
        help_.append(command(["--help"]))
    print(f"import meshpar over import torch: {statistics.median(after) * 1e3:.1f} ms (median of {repeats})")
    print(f"meshpar --help: {statistics.median(help_) * 1e3:.0f} ms (median of {repeats})")


if __name__ == "__main__":
    main()
