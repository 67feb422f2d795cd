"""The job of several replicas, each a job of its own, to which this process belongs: as the launcher tells it."""

from __future__ import annotations

import os

from meshpar.core import runtime


def lighthouse() -> str:
    """Return the address of the lighthouse that puts replicas together, ``http://host:port``; empty where there is
    none.
    """
    return runtime.settings("TORCHFT_LIGHTHOUSE").get("TORCHFT_LIGHTHOUSE", "")


def replica() -> tuple[str, int]:
    """Return the name of this replica of an elastic job, and the number of replicas of the whole job, 0 in any other
    job.
    """
    known = runtime.settings("MESHPAR_REPLICA")
    return known.get("MESHPAR_REPLICA", str(os.getpid())), runtime.number("MESHPAR_REPLICAS", 0)
