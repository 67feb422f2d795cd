"""Examine two hosts again and again: does the doctor find nothing where nothing is wrong, and a slow link in either
direction?

    python benchmarks/doctor.py [--runs 200] [--slow 5] [--nproc 1]

The hosts are network namespaces of this machine (Linux, root). ``--slow`` examinations more have one direction of the
link shaped to 110 Mbit/s, about 50 times slower than it is; first that from n1, then that from n2. Exits with 1 after a
false alarm or a link not found.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.hosts import Hosts
from tests.support.patience import patient

HEAD = "n1:29412"
LONGEST_S = 300.0


def examine(hosts: Hosts, folder: Path, nproc: int) -> tuple[int, str]:
    """Return the exit status and the output of the doctor's first host."""
    command = [
        "env",
        "OMP_NUM_THREADS=1",
        sys.executable,
        "-m",
        "meshpar.launchers",
        "doctor",
        "--nodes",
        "2",
        "--nproc",
        str(nproc),
    ]
    started = [
        subprocess.Popen(
            hosts.command(name, [*command, "--head", HEAD, "--node-rank", str(number)]),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, name in enumerate(("n1", "n2"))
    ]
    try:
        outputs = [process.communicate(timeout=patient(LONGEST_S))[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return started[0].returncode, outputs[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="of hosts that nothing is wrong with")
    parser.add_argument("--slow", type=int, default=5, help="of each direction of a slow link")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of a host")
    options = parser.parse_args()
    alarms, missed, took = 0, 0, []
    with Hosts(2) as hosts, TemporaryDirectory() as folder:
        for number in range(options.runs):
            began = time.monotonic()
            status, outputs = examine(hosts, Path(folder), options.nproc)
            took.append(time.monotonic() - began)
            if status:
                alarms += 1
                print(f"run {number}: status {status}\n{outputs}", flush=True)
            if number % 10 == 9:
                print(f"{number + 1} of {options.runs}: {alarms} false alarms", flush=True)
        for slow, other in (("n1", "n2"), ("n2", "n1")):
            hosts.shape("110mbit", slow)
            for number in range(options.slow):
                status, outputs = examine(hosts, Path(folder), options.nproc)
                if status != 1 or not re.search(
                    rf"links between hosts are slow: .*\n +where: {slow} to {other}: ", outputs
                ):
                    missed += 1
                    print(f"slow from {slow}, run {number}: status {status}\n{outputs}", flush=True)
            hosts.shape(None)
    median = f", {statistics.median(took):.1f} s each" if took else ""
    print(
        f"{options.runs} runs on healthy hosts{median}: {alarms} false alarms; {2 * options.slow} with a slow link: "
        f"{missed} missed"
    )
    sys.exit(1 if alarms or missed else 0)


if __name__ == "__main__":
    main()
