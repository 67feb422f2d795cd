"""The simulation's own process: reads jobs, writes traces or the error that one of them met."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from pathlib import Path

from meshpar.errors import MeshparError


def main(where: Path) -> None:
    """Run the jobs pickled at ``where``.jobs, count them in the length of ``where``.done, leave the answer at ``where``.traces."""
    import meshpar.forecasting.device as device
    from meshpar.forecasting.simulate import Simulation, read_jobs, run
    from meshpar.forecasting.trace import Trace

    def counted(job: Simulation) -> Trace:
        trace = run(job)
        with where.with_suffix(".done").open("ab") as done:
            done.write(b".")
        return trace

    answer: object
    try:
        jobs = read_jobs(where)
        device.install()
        answer = [counted(job) for job in jobs]
    except MeshparError as error:
        answer = error
    except Exception as error:  # noqa: BLE001  whatever a model raises is handed to who asked
        lines = traceback.format_exc().splitlines()
        answer = MeshparError(f"the simulated step failed: {type(error).__name__}: {error}\n" + "\n".join(lines[-12:]))
    temporary = where.with_suffix(".part")
    temporary.write_bytes(pickle.dumps(answer))
    temporary.rename(where.with_suffix(".traces"))


def _end_with_who_asked() -> None:
    """End this process when the one that asked is gone, however it went: its end of the pipe closes."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_who_asked, daemon=True).start()
    main(Path(sys.argv[1]))
