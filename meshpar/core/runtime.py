"""The process group as a context manager; the only reader of torchrun's environment."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshpar.core.errors import LaunchError, note, seen_at
from meshpar.core.mesh import default_device_type

DEFAULT_TIMEOUT_S = 600.0


def rank() -> int:
    """Return this process's rank: the process group's where there is one, else the launcher's, else 0."""
    return dist.get_rank() if dist.is_initialized() else number("RANK", 0)


def world_size() -> int:
    """Return the number of ranks: the process group's where there is one, else the launcher's, else 1."""
    return dist.get_world_size() if dist.is_initialized() else number("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return this process's rank on its node, 0 outside a launcher."""
    return number("LOCAL_RANK", 0)


def ranks_per_node() -> int | None:
    """Return how many ranks the launcher started on each node, None outside a launcher."""
    return number("LOCAL_WORLD_SIZE", 0) or None


def is_main() -> bool:
    """Return whether this is rank 0, the one that writes and prints."""
    return rank() == 0


def print0(*values: object) -> None:
    """Print on rank 0 alone, at once: the other ranks print nothing."""
    if is_main():
        print(*values, flush=True)  # noqa: T201 - what it is for


def launched() -> bool:
    """Return whether torchrun (or another launcher that speaks its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def device(device_type: str | None = None) -> torch.device:
    """Return this rank's device: the open process group's, else that of its local rank; LaunchError without one."""
    kind = device_type or default_device_type()
    if on_host(kind):
        return torch.device(kind)
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and bound.type == kind:
        return bound  # type: ignore[no-any-return]
    index, count = number("MESHPAR_FIRST_DEVICE", 0) + local_rank(), torch.accelerator.device_count()
    if 1 < count <= index:
        raise LaunchError(
            f"local rank {index} has no {kind} device of its own: this node has {count}; start at most {count} ranks "
            "on a node, or let each rank see one device alone (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1)"
        )
    return torch.device(kind, index if count > 1 else 0)


def on_host(device: torch.device | str) -> bool:
    """Return whether a device computes in host memory, without copies and pinning, by the host's generator."""
    return (torch.device(device) if isinstance(device, str) else device).type in ("cpu", "meta")


def queues(device: torch.device | str) -> bool:
    """Return whether work on a device is queued, as on an accelerator: the host waits where it reads a value."""
    return not on_host(device)


def over_hosts(device: torch.device | str) -> bool:
    """Return whether ranks exchange by gloo on a device, or on the one that a simulated one stands for."""
    return not queues(_SIMULATED.get() or device)


def make_current(here: torch.device) -> None:
    """Compute on ``here`` from now on: FSDP2 and NCCL work on the current device, at first the first."""
    if not on_host(here):
        torch.get_device_module(here).set_device(here)


def number(name: str, default: int) -> int:
    """Return a whole number that a launcher sets in the environment; ``default`` where it does not."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise LaunchError(f"environment variable {name} is {text!r}; expected an integer, as torchrun sets it")
    return int(text)


@contextmanager
def distributed(device_type: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[torch.device]:
    """Open a process group for the block: torchrun's ranks, or a world of this one process, and close it at the end.

    Collective: every rank enters and leaves it. A group that is already open is used and stays open. Without a ``with``
    block, after ``meshpar.distributed().__enter__()``, the group lives as long as the process. After success the
    ranks meet in a barrier, collect garbage and close the group, in this order: gloo's threads could otherwise abort
    the interpreter at exit.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...; None: the accelerator where there is one.
        timeout_s: bound in seconds on every collective of the group and of a plan's mesh made in it.

    Yields:
        This rank's device.

    Raises:
        LaunchError: a launcher's variables are incomplete.
    """
    here = device(device_type)
    make_current(here)
    if dist.is_initialized():
        yield here
        return
    _open_group(here, timeout_s)
    hosts()
    lost = False
    try:
        yield here
        dist.barrier()
    except GeneratorExit as error:  # without a caller's traceback: nobody has the object of an entered block any more
        lost = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if lost:
            atexit.register(close_group)
        raise
    except BaseException as error:
        seen_at(error)  # without the group the other ranks fail
        note(error)
        raise
    finally:
        if not lost:
            close_group()


def init(device_type: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> torch.device:
    """Open a process group for a script without a ``main()``, as :func:`distributed` does; return this rank's device.

    The group lives as long as the process and is closed at its end. One that is open already is used and stays open.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...; None: the accelerator where there is one.
        timeout_s: bound in seconds on every collective of the group and of a plan's mesh made in it.

    Raises:
        LaunchError: a launcher's variables are incomplete.

    Collective: every rank calls it.
    """
    here = device(device_type)
    make_current(here)
    if not dist.is_initialized():
        _open_group(here, timeout_s)
        hosts()
        atexit.register(_leave)
    return here


_LEAVES_S = 30.0
"""Seconds that a process of :func:`init` waits at its end for others, which may use the store that rank 0 serves."""


def _leave() -> None:
    """Close the group of :func:`init` when all ranks have come to their end, or this one ends by an error."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        with suppress(RuntimeError):
            dist.monitored_barrier(hosts(), timedelta(seconds=_LEAVES_S))
    close_group()


def close_group() -> None:
    """Close the process group, if one is open, after what garbage still holds of it: gloo's threads could abort."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _open_group(here: torch.device, timeout_s: float) -> None:
    backend = dist.get_default_backend_for_device(here)
    if backend == dist.Backend.GLOO and not on_host(here):
        backend = f"cpu:gloo,{here.type}:gloo"
    # With its device known, the group connects at once, and a mesh splits its axes from it; alone, so that no axis
    # connects the hosts.
    bound = None if dist.Backend.GLOO in backend or on_host(here) else here
    if bound is not None:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # NCCL's record of collectives, which the watchdog reads
    # Not env://: for a second group torch would write and read addresses under the keys of the first.
    store = meeting_store("group", timeout_s=timeout_s) if launched() else dist.HashStore()
    ranks, timeout = (rank(), world_size()) if launched() else (0, 1), timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=ranks[0], world_size=ranks[1], timeout=timeout, device_id=bound)


_HOSTS = "meshpar hosts"
_LAZILY = "TORCH_GLOO_LAZY_INIT"
"""Read by torch when it makes a group. Without it each rank opens a socket to every other one, in each group."""


def hosts() -> dist.ProcessGroup:
    """Return the group for tensors in host memory of all ranks. Collective where it is called first."""
    world = dist.group.WORLD
    if world is None:
        raise LaunchError("no process group is open; wrap the job in `with meshpar.distributed():`")
    if is_simulated() or "cpu:gloo" in dist.get_backend_config().split(","):
        return world
    from meshpar._torch.groups import open_groups

    group_of_hosts = next(
        (group for group in open_groups() if group.group_desc == _HOSTS and group.size() == world.size()), None
    )
    return group_of_hosts or new_host_group(_HOSTS)


def new_host_group(name: str, timeout_s: float | None = None, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Return a new group for tensors in host memory; ranks connect when they first exchange something. Collective."""
    from meshpar._torch.groups import shared_timeout

    bound = shared_timeout() if timeout_s is None else timedelta(seconds=timeout_s)
    with connecting_lazily():
        backend = None if is_simulated() else "gloo"
        new_group: Any = dist.new_group(ranks, backend=backend, group_desc=name, timeout=bound)
    return new_group


def connects_lazily() -> bool:
    """Return whether each two ranks of a gloo group made now connect when they first exchange something."""
    return _LAZILY in os.environ


@contextmanager
def connecting_lazily() -> Iterator[None]:
    """Let each two ranks of the gloo groups that are made in the block connect when they first exchange something."""
    was_set = connects_lazily()
    os.environ.setdefault(_LAZILY, "1")
    try:
        yield
    finally:
        if not was_set:
            os.environ.pop(_LAZILY, None)


def meeting_store(name: str, *, timeout_s: float) -> dist.Store:
    """Return an own connection, with own keys, to the launcher's store. Every rank calls it equally often."""
    if not launched():
        raise LaunchError("no launcher connects the ranks; start with meshpar run, torchrun or srun")
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise LaunchError(
            f"RANK and WORLD_SIZE are set but {missing} are not; start the job with torchrun, or set them"
        )
    address, port = os.environ["MASTER_ADDR"], number("MASTER_PORT", 0)
    if rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _server(address, port)
    store = dist.TCPStore(address, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    start = f"meshpar/{name}/{number('TORCHELASTIC_RESTART_COUNT', 0)}"
    return dist.PrefixStore(f"{start}/{store.add(f'{start}/meetings of {rank()}', 1)}", store)


@functools.cache
def _server(address: str, port: int) -> dist.TCPStore:
    """Serve the store where the ranks meet until this process ends: between two groups others still read it."""
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def quiet(variable: str) -> None:
    """Let a library that reads ``variable`` log errors alone, unless somebody has set it."""
    os.environ.setdefault(variable, "error")


def settings(*prefixes: str) -> dict[str, str]:
    """Return the environment's settings whose names begin with one of ``prefixes``."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


@contextmanager
def simulated(size: int, *, as_rank: int = 0, stands_for: str = "") -> Iterator[None]:
    """Hold a fake process group of ``size`` ranks open, whose values are garbage, for devices of a type."""
    from meshpar._torch.simulated_device import fake_store

    if dist.is_initialized():
        raise LaunchError("a process group is open already; simulate in a process of its own")
    dist.init_process_group("fake", store=fake_store(), rank=as_rank, world_size=size)
    before = _SIMULATED.set(stands_for)
    try:
        yield
    finally:
        _SIMULATED.reset(before)
        dist.destroy_process_group()


Result = TypeVar("Result")

_SIMULATED = ContextVar[str | None]("simulated", default=None)
"""The type of device that simulated ones stand for, empty for themselves; None where ranks are real."""


def reproduce_products() -> None:
    """Let cuBLAS compute a product in the same way each time, unless the environment says how; before the first."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def standing_in(part: Any) -> Any:  # noqa: ANN401 - of the type of ``part``
    """Return ``part``, or where ranks are simulated what stands in for it (``part.simulated()``)."""
    return part.simulated() if is_simulated() else part


def among_real_ranks(run: Callable[[], Result]) -> Result | None:
    """Return ``run()``, which talks to other ranks or looks at this machine; where ranks are simulated None."""
    return None if is_simulated() else run()


def is_simulated() -> bool:
    """Return whether ranks are simulated: none can be compared with another, and another machine will train."""
    return _SIMULATED.get() is not None


@contextmanager
def kept_environment() -> Iterator[None]:
    """Give this process's environment back as it was before the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
