"""One rank of a job that :mod:`meshpar.launchers.local` started: ``python -m meshpar.launchers.worker RECIPE``."""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
import traceback
from pathlib import Path

from meshpar.launchers.startup import quick_imports

with quick_imports():
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    from meshpar.launchers.job import run_job
    from meshpar.launchers.recipe import load_recipe

_SET_DEATH_SIGNAL = 1  # linux/prctl.h: PR_SET_PDEATHSIG


class Reporter(ErrorHandler):
    """Writes an error to the launcher's file, with a time that tells which rank's came first."""

    def record_exception(self, e: BaseException) -> None:
        """Write the error that is being handled."""
        path = self._get_error_file_path()
        if path is not None:
            more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time())), "seconds": time.time()}
            Path(path).write_text(
                json.dumps({"message": {"message": str(e), "kind": type(e).__name__, "extraInfo": more}}), encoding="utf-8"
            )


def main() -> int:
    """Run the job; an error goes to the launcher, which shows the first one of all ranks and no other."""
    reporter = Reporter()
    reporter.initialize()
    _end_with_launcher()
    try:
        run_job(load_recipe(sys.argv[1]))
    except Exception as error:  # noqa: BLE001  whatever ended this rank is handed to the launcher
        reporter.record_exception(error)
        return 1
    return 0


def _end_with_launcher() -> None:
    """Let the kernel send SIGTERM (checkpoint and stop) when the launcher dies without a word."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
