"""The simulation's own processes: they read jobs, and write traces or the error that one of them met."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from meshpar._torch.simulated_device import load_collectives
from meshpar.core.errors import MeshparError
from meshpar.forecasting import device
from meshpar.forecasting.simulate import read_jobs, run


def main(places: Sequence[Path]) -> int:
    """Answer the jobs of each place, the first in this process; return the first exit code that is not 0."""
    load_collectives()  # before processes are forked: every simulation needs them
    gc.freeze()  # FSDP2 collects garbage for every unit, and nothing loaded so far is any
    forked = list[int]()
    for where in places[1:]:
        if not (process := os.fork()):
            answer(where)
            os._exit(0)
        forked.append(process)
    answer(places[0])
    return next((code for other in forked if (code := os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))), 0)


def answer(where: Path) -> None:
    """Run the jobs pickled at ``where``.jobs; append each trace, or the error of one, to ``where``.traces."""
    threading.Thread(target=_end_with_who_asked, daemon=True).start()
    with where.with_suffix(".traces").open("wb") as traces:
        try:
            jobs = read_jobs(where)
            device.install()
            for job in jobs:
                pickle.dump(run(job), traces)
                traces.flush()
        except MeshparError as error:
            pickle.dump(error, traces)
        except Exception as error:  # noqa: BLE001  whatever a model raises is handed to who asked
            lines = traceback.format_exc().splitlines()[-12:]
            message = f"the simulated step failed: {type(error).__name__}: {error}\n" + "\n".join(lines)
            pickle.dump(MeshparError(message), traces)


def _end_with_who_asked() -> None:
    """End this process when the one that asked is gone, however it went: its end of the pipe closes."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
