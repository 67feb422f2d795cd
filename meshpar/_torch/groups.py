"""Process groups and their collectives.

- ``collective_ops``: the collectives as operators, which keep their names; their wrappers are renamed between releases
  (torch 2.13 deprecates ``all_gather_tensor``, which 2.11 has alone). They go when the wrappers are public.
- ``all_gather``, ``reduce_scatter``: of one tensor, have other names since torch 2.13.
- ``flattened``: FSDP2 takes one axis to shard over; flattening several is private.
- ``open_groups``, ``collective_counts``, ``last_collectives``, ``default_store``: process groups, their numbers of
  collectives, the flight recorder (gloo's in memory since torch 2.13); private without a public form.
- ``share_gloo_device``: gloo's devices, of which every group takes a new one, are options without a public name.
- ``gloo_threads``: a trace names the thread that ran a collective, and gloo does not say whose it is.
- ``share_timeout``, ``shared_timeout``, ``bound``: a mesh's groups do not take the time-out of the group that they are
  made in; ``set_timeout`` is public since torch 2.14.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of all ranks from which this one was taken."""
    return mesh._get_root_mesh()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one axis over all ranks of a mesh, named after its axes: ``"dp_replicate+dp_shard"``."""
    separate = root_of(mesh).__dict__.get("_meshpar_own", False)
    flat = mesh._flatten("+".join(mesh.mesh_dim_names or ()), dist.get_backend() if separate else None)
    share_timeout([flat.get_group()])
    return flat


collective_ops = torch.ops._c10d_functional
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


EXCHANGES: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many exchanges by messages the ranks of a group have begun, which torch does not count."""


def collective_counts() -> dict[str, int]:
    """Return how many collectives and exchanges by messages this rank's groups have begun, by their title."""
    if not dist.is_initialized():
        return {}
    counts = dict[str, int]()
    for group in open_groups():
        # A backend without numbers (fake, mpi), and a group that another thread closes meanwhile.
        with suppress(RuntimeError, KeyError, ValueError):
            title = group_title(group)
            counts[title] = counts.get(title, 0) + group._get_sequence_number_for_group()
            if number := EXCHANGES.get(group, 0):
                counts[f"messages of {title}"] = counts.get(f"messages of {title}", 0) + number
    return counts


def share_gloo_device(are_lazy: Callable[[], bool]) -> None:
    """Let the gloo groups that this process opens from now on share one device, but for those that connect lazily.

    Each has one of its own otherwise, whose thread wakes a hundred times a second, whether anything is sent or not.
    """
    kind: Any = dist.ProcessGroupGloo
    make, device = kind.__init__, kind.create_default_device()

    def make_on_device(self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = kind._Options()
        options._devices, options._timeout = [device], timeout
        # lazy groups of one device wait for one another
        make(self, store, rank, size, timeout if are_lazy() else options)

    kind.__init__ = make_on_device


def gloo_threads() -> dict[int, str]:
    """Return the threads that run gloo's collectives, by number, and their groups' titles; empty if not known."""
    # Each group starts threads of its own, as many as every other and before the next group's. Linux tells their names.
    threads = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().strip() == "pt_gloo_runloop":
                # when it was started
                threads.append((int((task / "stat").read_text().rsplit(")", 1)[1].split()[19]), int(task.name)))
    groups = [group for group, (backend, _) in dist.distributed_c10d._world.pg_map.items() if "gloo" in str(backend)]
    per_group, rest = divmod(len(threads), len(groups)) if groups else (0, 1)
    if rest or not per_group:
        return {}
    return {number: group_title(groups[index // per_group]) for index, (_, number) in enumerate(sorted(threads))}


def shared_timeout() -> timedelta | None:
    """Return the default group's bound on collectives; None where it has none, as a simulated one."""
    world: Any = dist.group.WORLD
    with suppress(IndexError, RuntimeError):  # a group of no device; a backend without options
        return getattr(getattr(world._get_backend(world._device_types[0]), "options", None), "_timeout", None)
    return None


def share_timeout(groups: Iterable[Any]) -> None:
    """Give groups the default group's bound on collectives; torch gives a mesh's groups 10 or 30 minutes."""
    timeout = shared_timeout()
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public since torch 2.14
    if timeout is not None:
        for group in groups:
            set_timeout(timeout, group)


def default_store() -> dist.Store:
    """Return the store in which the ranks of the default group met; ValueError where no group is open."""
    return dist.distributed_c10d._get_default_store()


def open_groups() -> list[Any]:
    """Return the process groups of this rank that are open."""
    return list(dist.distributed_c10d._world.pg_map)


def bound(group: Any, seconds: float) -> None:
    """Bound every collective of a backend that was made without a process group."""
    group._set_default_timeout(timedelta(seconds=seconds))


def last_collectives() -> dict[str, tuple[int, str]]:
    """Return the number and the name, with the calling line if known, of each group's last collective."""
    counts, names = collective_counts(), dict[str, str]()
    for group in open_groups() if counts else ():
        with suppress(KeyError, ValueError):
            names[group.group_name] = group_title(group)
    last = {name: (number, "a collective") for name, number in counts.items()}
    for backend in ("fr", "nccl"):  # gloo's record, and NCCL's, which only a torch with NCCL has
        home = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
        dump = getattr(home, f"_dump_{backend}_trace_json", None)
        for entry in json.loads(dump()).get("entries", []) if dump is not None else []:
            name = names.get(entry["process_group"][0])
            if name in counts and not entry.get("is_p2p") and entry["collective_seq_id"] == counts[name]:
                last[name] = (counts[name], entry["profiling_name"])
    return last


def group_title(group: Any) -> str:
    """Return what a process group is called: its axis and its ranks."""
    ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
    named = group.group_desc not in ("", "undefined")
    return f"{group.group_desc.removeprefix('mesh_') if named else f'group {group.group_name}'} (ranks {ranks})"
