"""A process with a simulated accelerator: tensors without values; streams and generators are Python's."""

import functools
import gc
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, ParamSpec

import torch

import meshpar.forecasting.device as device
from meshpar import Guard
from meshpar._torch.simulated_device import fake_mode
from meshpar.core import runtime
from meshpar.parallelized import Parallelized
from meshpar.state import initialize
from meshpar.testing import PRELOAD

P = ParamSpec("P")
TIMEOUT_S = 120.0


def alone(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test in a process of its own, forked with torch loaded: a simulated device changes torch for good."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from tests.support.patience import patient

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_main, args=(test.__module__, test.__qualname__, args, kwargs, theirs), daemon=True
        )
        process.start()
        theirs.close()
        try:
            assert ours.poll(patient(TIMEOUT_S)), f"{test.__name__} did not end in time"
            failure = ours.recv()
        except EOFError:
            process.join()
            failure = f"{test.__name__} ended without a message, exit code {process.exitcode}"
        finally:
            process.kill()
            process.join()
        assert failure is None, failure

    return run


def _main(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], report: Connection) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    try:
        test = getattr(importlib.import_module(module), name)
        test.__wrapped__(*args, **kwargs)
        report.send(None)
    except BaseException:
        report.send(traceback.format_exc())
    os._exit(0)


@functools.cache
def install() -> Any:
    """Return the module of the simulated device, ``torch.simgpu``."""
    device.install()
    return torch.get_device_module(device.NAME)


@contextmanager
def simulated(world_size: int, *, as_rank: int = 0) -> Iterator[None]:
    """Be one of ``world_size`` ranks on the simulated device, after the first comparisons of a job."""
    install()
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign, assignment]
    # One thread: torch ends the process at an error in a thread that autograd keeps for a device written in Python.
    single = torch.autograd.set_multithreading_enabled(False)
    with single, runtime.simulated(world_size, as_rank=as_rank), fake_mode(), device.kernels_of("cuda"):
        yield


def allocate(par: Parallelized) -> Parallelized:
    """Give a module on the meta device memory without values."""
    initialize.allocate(par.module, par.device, par.home)
    return par


def without_guards(par: Parallelized) -> Parallelized:
    """Leave out what compares values, which there are none of."""
    par.run.moments = [moment for moment in par.run.moments if not isinstance(moment, Guard)]
    return par
