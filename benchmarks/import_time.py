"""What starting costs: ``import meshpar`` over ``import torch``, ``meshpar --help``, and ``meshpar run`` beside
``torchrun``.

python benchmarks/import_time.py [--repeats 15]

Medians of interleaved fresh processes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

CODE = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    return float(
        subprocess.run(
            [sys.executable, "-c", CODE.format(statement)], capture_output=True, text=True, check=True
        ).stdout
    )


def command(name: str, *arguments: str, folder: str = ".") -> float:
    start = time.perf_counter()
    subprocess.run([str(Path(sys.executable).parent / name), *arguments], capture_output=True, check=True, cwd=folder)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    after, help_, run, ratios = [], [], [], []
    with TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text("import torch\n")
        for _ in range(repeats):
            # Within one process, so that the noise of loading torch itself cancels.
            after.append(seconds("import torch; start = time.perf_counter(); import meshpar"))
            help_.append(command("meshpar", "--help"))
            run.append(command("meshpar", "run", "--nproc", "2", "job.py", folder=folder))
            ratios.append(run[-1] / command("torchrun", "--nproc-per-node", "2", "job.py", folder=folder))
    print(f"import meshpar over import torch: {statistics.median(after) * 1e3:.1f} ms (median of {repeats})")
    print(f"meshpar --help: {statistics.median(help_) * 1e3:.0f} ms (median of {repeats})")
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"meshpar run of `import torch`, 2 ranks: {statistics.median(run):.2f} s, {middle:.2f} ({low:.2f} to "
        f"{high:.2f}) of torchrun's"
    )


if __name__ == "__main__":
    main()
