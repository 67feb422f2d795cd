"""What checkpoints cost beside a plain file: save, asynchronous stall, restore, export and import, time and memory.

    python benchmarks/checkpoint.py [--storage disk] [--only saves exports] [--layers 6 14] [--rounds 5] [--folder DIR]
    [--seconds S]

Every figure is the median of interleaved rounds. Beside ours stand torch's own DCP, its Hugging Face consolidation, and
accelerate's merge. Restores are cold (the page cache is told to drop the files); exports run warm in processes of their
own, and their CPU time counts from the call, without ``import torch``, which every one of them pays. Before each run,
and before ``cp``, as much memory as it will fill was in use a moment ago: a virtual machine's host takes free memory
back within seconds, and giving it out again costs several times what writing to it does. With --storage s3 a server on
loopback (SeaweedFS) keeps the checkpoints, and the figures stand beside the store library's own calls that move the
same bytes with the same parallelism. With --folder and --seconds a call does as much as fits in that time, and the next
goes on where it stopped. With --only, the rows of these stages alone. ``cp`` does not bring its copy to the disk, as
exports do: their wall time stands beside that of ``cp`` and fsync, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ZEROS = bytes(512 << 10)
BLOCK = bytearray(512 << 10)
KEEPS_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}  # from step to step, as an accelerator's allocator does
TOKENS = 32  # of a training step
# reads in each round: single ones take up to twice as long, where the pages that they fill are new to the machine
READS = 3
BOUNDS = {
    "save, wall / raw write and fsync": 1.5,
    "save, extra MiB a rank": 64,
    "async stall, training loop / raw write": 0.08,
    "restore, wall / cold raw read": 1.3,
    "bytes read on 4 ranks / bytes saved by 2": 1.05,
    "export fp32, CPU / cp": 1.15,
    "export fp32 verified, CPU / cp": 1.4,
    "export bf16, CPU / cp": 1.2,
    "export fp32, wall / cp and fsync": 1.3,
    "export, extra MiB": 64,
    "import, extra MiB": 64,
}
STAGES = ("saves", "training", "restores", "ranks", "exports")
STORE_BOUNDS = {
    "save, wall / bare multipart": 1.3,
    "restore, wall / bare range reads": 1.3,
    "save, extra MiB a rank": 256,
    "restore, extra MiB a rank": 256,
    "async stall, wall / raw write and fsync": 0.15,
    "bytes read on 4 ranks / bytes saved by 2": 1.05,
}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def reset_peak() -> int:
    """Forget the highest memory use so far; return the present one, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def drop_cache(folder: Path) -> None:
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def level(folder: Path) -> None:
    """Bring free memory to one state before a run: twice the size of ``folder``'s raw file was in use until now."""
    size = (folder / "raw" / "file").stat().st_size
    warm = [folder / "warm-0", folder / "warm-1"]
    for path in warm:
        with path.open("wb", buffering=0) as file:
            for _ in range(size // len(ZEROS)):
                file.write(ZEROS)
    os.sync()
    for path in warm:
        path.unlink()


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    wall, cpu = time.perf_counter(), cpu_s()
    act()
    return time.perf_counter() - wall, cpu_s() - cpu


# The job


def make_job(layers: int, mesh: str = "dp_shard=-1", seed: int = 0) -> Any:
    import torch

    import meshpar
    from meshpar.models import Transformer, TransformerConfig

    with torch.device("meta"):
        model = Transformer(
            TransformerConfig(vocab_size=32000, dim=1536, layers=layers, heads=12, hidden=6144, tied=False)
        )
    return meshpar.Plan(mesh, [meshpar.FullyShard()]).apply(model).materialize(seed=seed)


def state_of(par: Any) -> dict[str, Any]:
    from meshpar.tensors.placements import local_tensor

    return {name: local_tensor(tensor) for name, tensor in par.module.state_dict().items()}


# Saves, in one process


class Notes(dict[str, list[float]]):
    """Figures by name, one a round."""

    def add(self, name: str, value: float) -> None:
        self.setdefault(name, []).append(value)

    def time(self, name: str, act: Callable[[], object]) -> None:
        wall, cpu = timed(act)
        self.add(name, wall)
        self.add(f"{name}, cpu", cpu)


def saves(folder: str, layers: str, rounds: str) -> Notes:
    import torch
    import torch.distributed.checkpoint as dcp

    import meshpar
    from meshpar.checkpoints import CheckpointManager

    root, found = Path(folder), Notes()
    with meshpar.distributed("cpu"):
        par = make_job(int(layers))
        state = state_of(par)
        optimizer = torch.optim.SGD(par.module.parameters(), lr=0.0)
        manager, later = CheckpointManager(root / "ours"), CheckpointManager(root / "async", async_=True)
        base = reset_peak()
        manager.save(1, par)
        found.add("save, extra", status_bytes("VmHWM") - base)
        base = reset_peak()
        dcp.save(dict(state), checkpoint_id=root / "stock", no_dist=True)
        found.add("stock save, extra", status_bytes("VmHWM") - base)

        def stall() -> None:
            later.save(1, par, optimizer)
            later.before_step()

        found.time("first async stall", stall)  # allocates what the others reuse
        later.wait()
        stager, copies = stock_stager(), Copies(state)

        pending: list[Any] = []
        (root / "raw").mkdir()
        raw_write(root / "raw" / "file", state)

        def measure(name: str, target: str, act: Callable[[], object]) -> None:
            shutil.rmtree(root / target, ignore_errors=True)  # what lies there would be removed on the clock
            if "stall" in name:  # it fills no new memory
                os.sync()
                time.sleep(1)  # the file system is done with what was removed
            else:
                level(root)
            found.time(name, act)

        for _ in range(int(rounds)):
            measure("raw write", "raw-again", lambda: raw_write(root / "raw-again", state))
            (root / "raw-again").unlink()
            measure("save", "ours", lambda: manager.save(1, par))
            measure("async stall", "async", stall)
            later.wait()
            measure("stall of one copy", "raw-again", copies.run)  # no folder of its own
            measure("stock save", "stock", lambda: dcp.save(dict(state), checkpoint_id=root / "stock", no_dist=True))
            measure(
                "stock async stall",
                "stock-async",
                lambda: pending.append(stock_async(state, root / "stock-async", stager)),
            )
            pending.pop().result()
        copies.close()
        later.close()
        stager.close()
        for name in ("stock", "async", "stock-async"):
            shutil.rmtree(root / name)
        dcp.save({"model": dict(state)}, checkpoint_id=root / "stock", no_dist=True)  # what the others convert from
    return found


class Copies:
    """One copy in memory of the bytes that a save copies, by as many threads: no stall that waits for the copy can
    be shorter.
    """

    def __init__(self, state: dict[str, Any], threads: int = 2) -> None:
        import torch

        pairs = [(torch.zeros_like(tensor).flatten(), tensor.detach().flatten()) for tensor in state.values()]
        self._shares = [
            [(out.chunk(threads)[at], tensor.chunk(threads)[at]) for out, tensor in pairs] for at in range(threads)
        ]
        self._pool = ThreadPoolExecutor(threads)

    def run(self) -> None:
        list(self._pool.map(lambda share: [out.copy_(tensor) for out, tensor in share], self._shares))

    def close(self) -> None:
        self._pool.shutdown()


def training(folder: str, layers: str, rounds: str) -> Notes:
    """Note what a save in the background takes from a training step (forward, backward, optimizer), beside steps
    without one.
    """
    import torch

    import meshpar
    from meshpar.checkpoints import CheckpointManager

    root, found, tokens = Path(folder), Notes(), torch.randint(32000, (1, TOKENS))
    with meshpar.distributed("cpu"), CheckpointManager(root / "async", async_=True) as later:
        par = make_job(int(layers))
        optimizer, number = torch.optim.SGD(par.module.parameters(), lr=0.0), itertools.count()

        def step(save: bool) -> dict[str, float]:
            os.sync()
            times = [time.perf_counter()]
            for act in (
                lambda: later.save(next(number), par, optimizer) if save else None,
                lambda: par.module(tokens, labels=tokens).loss.backward(),
                later.before_step,  # as the optimizer does: what it waits for
                optimizer.step,
            ):
                act()
                times.append(time.perf_counter())
            # what earlier saves wrote stays: who frees memory here finds it slow, as the host has taken it back
            later.wait()
            return {"all": times[-1] - times[0], "blocked": times[1] - times[0] + times[3] - times[2]}

        for _ in range(2):
            step(save=True)  # allocates what the others reuse
        for turn in range(int(rounds)):
            found.time("raw write", lambda: raw_write(root / "raw-again", state_of(par)))
            (root / "raw-again").unlink()
            for name, threads in (("one thread", 1), ("all cores", os.cpu_count() or 1)):
                torch.set_num_threads(threads)
                with_save, without = (
                    [step(save) for save in (True, False)] if turn % 2 else [step(save) for save in (False, True)][::-1]
                )
                found.add(f"{name}, blocked", with_save["blocked"])
                found.add(f"{name}, longer", with_save["all"] - without["all"])
                found.add(f"{name}, step", without["all"])
    return found


def raw_write(path: Path, state: dict[str, Any]) -> None:
    from meshpar.checkpoints.storage.files import BLOCK_BYTES, memory_of, write_all

    with path.open("wb", buffering=0) as file:
        for tensor in state.values():
            memory = memory_of(tensor.detach())
            for start in range(0, len(memory), BLOCK_BYTES):
                write_all(file.fileno(), memory[start : start + BLOCK_BYTES])
        os.fsync(file.fileno())


def stock_stager() -> Any:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    plain = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    return DefaultStager(plain)


def stock_async(state: dict[str, Any], folder: Path, stager: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    handle = dcp.async_save(dict(state), checkpoint_id=folder, async_stager=stager, no_dist=True)
    return getattr(handle, "upload_completion", handle)


# Restores


def restores(folder: str, layers: str, rounds: str) -> Notes:
    import torch.distributed.checkpoint as dcp

    import meshpar
    from meshpar.checkpoints import CheckpointManager

    root, found = Path(folder), Notes()
    with meshpar.distributed("cpu"):
        par = make_job(int(layers), seed=1)
        state = state_of(par)
        manager = CheckpointManager(root / "ours")
        acts: list[tuple[str, Callable[[], object]]] = [
            ("raw read", lambda: raw_read(root / "raw" / "file", state)),
            ("restore", lambda: manager.restore(par)),
            ("stock restore", lambda: dcp.load({"model": dict(state)}, checkpoint_id=root / "stock", no_dist=True)),
        ]
        for number in range(READS * int(rounds)):
            for name, act in acts if number % 2 else acts[::-1]:
                drop_cache(root)
                level(root)
                found.time(name, act)
    return found


def raw_read(path: Path, state: dict[str, Any]) -> None:
    from meshpar.checkpoints.storage.disk import ReadFile

    file, position = ReadFile(path), 0
    for tensor in state.values():
        file.into(tensor.detach(), position)
        position += tensor.nbytes


def save_on_two(folder: str, layers: str) -> None:
    import torch.distributed.checkpoint as dcp

    from meshpar.checkpoints import CheckpointManager

    par = make_job(int(layers))
    CheckpointManager(Path(folder) / "two").save(1, par)
    dcp.save(dict(par.module.state_dict()), checkpoint_id=Path(folder) / "two-stock")


def read_on_four(folder: str, layers: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from meshpar.checkpoints import CheckpointManager

    par = make_job(int(layers), seed=1)
    root, counts = Path(folder), {}
    for name, load in (
        ("ours", lambda: CheckpointManager(root / "two").restore(par, random=False)),
        ("stock", lambda: dcp.load(dict(par.module.state_dict()), checkpoint_id=root / "two-stock")),
    ):
        dist.barrier()
        before = bytes_read()
        load()
        count = torch.tensor(bytes_read() - before)
        dist.all_reduce(count)
        counts[name] = int(count)
    if dist.get_rank() == 0:
        saved = sum(file.stat().st_size for file in (root / "two").rglob("*.distcp"))
        (root / "read.json").write_text(json.dumps({name: count / saved for name, count in counts.items()}))


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


# In an object store, in one process, and on ranks


def stored(folder: str, layers: str, rounds: str) -> Notes:
    import obstore.store
    import torch

    import meshpar
    from meshpar.checkpoints import CheckpointManager
    from meshpar.checkpoints.storage.files import BLOCK_BYTES, memory_of

    root, found, bucket = Path(folder), Notes(), "s3://benchmark"
    bare = obstore.store.from_url(bucket, client_options={"allow_http": True})
    with meshpar.distributed("cpu"):
        par = make_job(int(layers))
        optimizer = torch.optim.SGD(par.module.parameters(), lr=0.0)
        tensors = [memory_of(tensor.detach()) for tensor in state_of(par).values()]
        halves: list[list[memoryview]] = [[], []]  # as the manager divides a rank's parts among two files
        for tensor in sorted(tensors, key=len, reverse=True):
            min(halves, key=lambda half: sum(map(len, half))).append(tensor)
        manager, later = (
            CheckpointManager(f"{bucket}/ours", keep=None),
            CheckpointManager(f"{bucket}/async", keep=None, async_=True),
        )
        puts = [0]  # every put writes new keys, as every save does

        def put(number: int) -> None:
            with obstore.open_writer(
                bare, f"bare/{puts[0]}-{number}", buffer_size=8 << 20, max_concurrency=4
            ) as writer:
                for memory in halves[number]:
                    for start in range(0, len(memory), BLOCK_BYTES):
                        writer.write(bytes(memory[start : start + BLOCK_BYTES]))

        def get(number: int) -> None:
            position = 0
            for memory in halves[number]:
                for start in range(0, len(memory), 16 << 20):
                    stop = min(len(memory), start + (16 << 20))
                    cuts = [*range(position + start, position + stop, 4 << 20), position + stop]
                    pieces = obstore.get_ranges(
                        bare, f"bare/{puts[0]}-{number}", starts=cuts[:-1], ends=cuts[1:], coalesce=0
                    )
                    for at, piece in zip(cuts, pieces):
                        memory[at - position : at - position + len(piece)] = memoryview(piece)
                position += len(memory)

        def both(act: Callable[[int], None]) -> Callable[[], object]:
            def run() -> None:
                with ThreadPoolExecutor(2) as pool:
                    list(pool.map(act, range(2)))

            return run

        def stall(step: int) -> None:
            later.save(step, par, optimizer)
            later.before_step()

        later.save(0, par, optimizer)  # allocates what the others reuse
        later.wait()
        for name, act in (("save", lambda: manager.save(1, par)), ("restore", lambda: manager.restore(par))):
            base = reset_peak()
            act()
            found.add(f"{name}, extra", status_bytes("VmHWM") - base)
        for step in range(2, 2 + int(rounds)):
            puts[0] = step
            found.time("raw write", lambda: raw_write(root / "raw", state_of(par)))
            (root / "raw").unlink()
            acts = [("bare put", both(put)), ("save", lambda step=step: manager.save(step, par))]
            for name, act in acts if step % 2 else acts[::-1]:
                found.time(name, act)
            acts = [("bare get", both(get)), ("restore", lambda: manager.restore(par))]
            for name, act in acts if step % 2 else acts[::-1]:
                found.time(name, act)
            found.time("async stall", lambda step=step: stall(step))
            later.wait()
        later.close()
    found.add("bytes", sum(map(len, tensors)))
    return found


def save_stored(folder: str, layers: str, port: str) -> None:
    from meshpar.checkpoints import CheckpointManager
    from tests.support import object_store

    object_store.use(int(port))
    CheckpointManager("s3://benchmark/two").save(1, make_job(int(layers)))


def read_stored(folder: str, layers: str, port: str) -> None:
    import obstore
    import torch
    import torch.distributed as dist

    from meshpar.checkpoints import CheckpointManager, read_manifest
    from tests.support import object_store

    object_store.use(int(port))
    par, got, manager = make_job(int(layers), seed=1), [0], CheckpointManager("s3://benchmark/two")
    get = obstore.get

    def counted(*given: Any, **options: Any) -> Any:
        found = get(*given, **options)
        got[0] += found.range[1] - found.range[0]
        return found

    obstore.get = counted
    manager.restore(par, random=False)
    count = torch.tensor(got[0])
    dist.all_reduce(count)
    if dist.get_rank() == 0:
        files = read_manifest(manager.root / "step-00000001").files
        saved = sum(file["size"] for name, file in files.items() if name.endswith(".distcp"))
        (Path(folder) / "read.json").write_text(json.dumps({"ours": int(count) / saved}))


def measure_stored(layers: int, rounds: int, folder: Path) -> dict[str, float]:
    from meshpar.testing import launch

    for place in (HERE.parent, HERE.parent.parent):
        sys.path.insert(0, str(place))
    from tests.support import object_store

    with object_store.served(folder / "seaweedfs") as port:
        object_store.use(port)
        object_store.bucket("benchmark")
        found = in_process("stored", str(folder), str(layers), str(rounds))
        if "failed" in found:
            raise SystemExit(found["failed"])
        for name, count in (("save_stored", 2), ("read_stored", 4)):
            launch("checkpoint", name, count, (str(folder), str(layers), str(port)), timeout_s=300)
    median = {key: statistics.median(values) for key, values in found.items()}
    return {
        "GB": median["bytes"] / 1e9,
        "bare multipart, s": median["bare put"],
        "bare range reads, s": median["bare get"],
        "save, wall / bare multipart": median["save"] / median["bare put"],
        "  in CPU time": median["save, cpu"] / median["bare put, cpu"],
        "restore, wall / bare range reads": median["restore"] / median["bare get"],
        "  in CPU time of the bare reads": median["restore, cpu"] / median["bare get, cpu"],
        "async stall, wall / raw write and fsync": median["async stall"] / median["raw write"],
        "save, extra MiB a rank": median["save, extra"] / (1 << 20),
        "restore, extra MiB a rank": median["restore, extra"] / (1 << 20),
        "bytes read on 4 ranks / bytes saved by 2": json.loads((folder / "read.json").read_text())["ours"],
    }


# Exports, each in a process of its own


def prepared(folder: Path) -> int:
    """Remove what earlier exports left, level the memory, and return what this process has now, in bytes."""
    for name in ("copy", "hf", "hf-stock", "hf-accelerate", "imported"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for kept in ("ours", "stock", "hf-kept", "hf-sharded"):
        for file in (folder / kept).rglob("*"):
            if file.is_file():
                in_cache(file)
    level(folder)
    return reset_peak()


def in_cache(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.readinto(BLOCK):
            pass


def export(folder: str, dtype: str, verify: str) -> dict[str, float]:
    import torch

    from meshpar import WeightMap
    from meshpar.checkpoints import export_safetensors

    target = Path(folder) / "hf"
    base = prepared(Path(folder))
    kind = None if dtype == "-" else getattr(torch, dtype)
    wall, cpu = timed(
        lambda: export_safetensors(Path(folder) / "ours", target, kind, weights=WeightMap(), verify=verify)
    )
    return {"wall": wall, "cpu": cpu, "extra": status_bytes("VmHWM") - base}


def import_(folder: str) -> dict[str, float]:
    import torch  # noqa: F401

    from meshpar.checkpoints import import_safetensors

    base = prepared(Path(folder))
    wall, cpu = timed(lambda: import_safetensors(Path(folder) / "hf-kept", Path(folder) / "imported"))
    return {"wall": wall, "cpu": cpu, "extra": status_bytes("VmHWM") - base}


def consolidate(folder: str) -> dict[str, float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    sharded = Path(folder) / "hf-sharded"
    if not sharded.exists():
        state = _load_state_dict_from_keys("model", checkpoint_id=str(Path(folder) / "stock"))["model"]
        writer = dcp.HuggingFaceStorageWriter(
            str(sharded), save_distributed=True, fqn_to_index_mapping=dict.fromkeys(state, 1)
        )
        dcp.save(state, storage_writer=writer, no_dist=True)
        del state
    names = json.loads((Path(folder) / "names.json").read_text())
    base = prepared(Path(folder))
    target = Path(folder) / "hf-stock"
    target.mkdir()
    wall, cpu = timed(
        lambda: consolidate_safetensors_files(str(sharded), str(target), fqn_to_index_mapping=dict.fromkeys(names, 1))
    )
    return {"wall": wall, "cpu": cpu, "extra": status_bytes("VmHWM") - base}


def merge(folder: str) -> dict[str, float]:
    from accelerate.utils import merge_fsdp_weights

    target = Path(folder) / "hf-accelerate"
    base = prepared(Path(folder))
    wall, cpu = timed(lambda: merge_fsdp_weights(str(Path(folder) / "stock"), str(target)))
    return {"wall": wall, "cpu": cpu, "extra": status_bytes("VmHWM") - base}


def made(folder: str, layers: str) -> dict[str, list[float]]:
    """Save what exports read."""
    import meshpar
    from meshpar.checkpoints import CheckpointManager

    root = Path(folder)
    with meshpar.distributed("cpu"):
        par = make_job(int(layers))
        CheckpointManager(root / "ours").save(1, par)
        (root / "raw").mkdir()
        raw_write(root / "raw" / "file", state_of(par))
    return {}


def copy(folder: str) -> dict[str, float]:
    """``cp`` of the files that the export reads; ``durable`` is its wall time with the fsync that an export does."""
    target = Path(folder) / "copy"
    prepared(Path(folder))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.perf_counter()
    subprocess.run(["cp", "-rL", str(Path(folder) / "ours" / "latest"), str(target)], check=True)
    plain = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for file in target.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    durable = time.perf_counter() - wall
    return {
        "wall": plain,
        "durable": durable,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "extra": 0.0,
    }


EXPORTS: dict[str, tuple[str, ...]] = {
    "cp": ("copy",),
    "export fp32": ("export", "-", "none"),
    "export fp32 verified": ("export", "-", "full"),
    "export bf16": ("export", "bfloat16", "none"),
    "import": ("import_",),
    "stock consolidation": ("consolidate",),
    "accelerate merge": ("merge",),
}


def in_process(name: str, *arguments: str) -> Any:
    """Run a function of this file in a fresh process and return what it returns."""
    done = subprocess.run(
        [sys.executable, str(HERE), "--run", name, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(KEEPS_MEMORY if name == "training" else {})},
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


# The whole


def stages(layers: int, rounds: int, folder: Path, only: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is measured, one after another, by names."""
    if "saves" not in only:
        yield "made", lambda: in_process("made", str(folder), str(layers))
    for name in ("saves", "training", "restores"):
        if name in only:
            yield name, lambda name=name: in_process(name, str(folder), str(layers), str(rounds))
    if "ranks" in only:
        yield "ranks", lambda: ranks(folder, layers)
    if "exports" in only:
        others = len(only) == len(STAGES)
        for number in range(rounds):
            yield f"exports {number}", lambda number=number: exports(folder, number, others=others)


def ranks(folder: Path, layers: int) -> dict[str, float]:
    from meshpar.testing import launch

    sys.path.insert(0, str(HERE.parent))
    for name, count in (("save_on_two", 2), ("read_on_four", 4)):
        launch("checkpoint", name, count, (str(folder), str(layers)), timeout_s=300)
    for name in ("two", "two-stock"):
        shutil.rmtree(folder / name)
    return json.loads((folder / "read.json").read_text())


def exports(folder: Path, number: int, *, others: bool) -> dict[str, dict[str, float]]:
    """Return the figures of one round; ``others``: with imports and other libraries."""
    from meshpar.checkpoints import open_step, read_manifest

    if number == 0 and others:
        tensors = read_manifest(open_step(folder / "ours")).tensors
        (folder / "names.json").write_text(
            json.dumps([tensor.removeprefix("model.") for tensor in tensors if tensor.startswith("model.")])
        )
        in_process("export", str(folder), "-", "none")
        (folder / "hf").rename(folder / "hf-kept")  # to be imported
    found = {}
    for name, (function, *arguments) in EXPORTS.items():
        ours = name == "cp" or name.startswith("export")
        if ours or (others and (number < 2 or name == "import")):  # the stock ones are slow, and far from any bound
            found[name] = copy(str(folder)) if name == "cp" else in_process(function, str(folder), *arguments)
    return found


def measure(layers: int, rounds: int, folder: Path, until: float, only: Sequence[str]) -> dict[str, float] | None:
    """Go through the stages that are not in the folder's notes; None where time is over before the last."""
    notes = folder / f"notes-{layers}.json"
    found = json.loads(notes.read_text()) if notes.exists() else {}
    for name, act in stages(layers, rounds, folder, only):
        if name not in found:
            if time.monotonic() > until:
                return None
            found[name] = act()
            if "failed" in found[name]:
                raise SystemExit(f"{name}: {found[name]['failed']}")
            notes.write_text(json.dumps(found))
    return figures(found, rounds, (folder / "raw" / "file").stat().st_size)


def figures(found: dict[str, Any], rounds: int, size: int) -> dict[str, float]:
    median = {
        key: statistics.median(values) for name in ("saves", "restores") for key, values in found.get(name, {}).items()
    }
    rows = {"GB": size / 1e9}
    if "saves" in found:
        rows |= save_figures(median)
    if "training" in found:
        rows |= training_figures({key: statistics.median(values) for key, values in found["training"].items()})
    if "restores" in found:
        rows |= {
            "cold raw read, s": median["raw read"],
            "restore, wall / cold raw read": median["restore"] / median["raw read"],
            "  stock DCP, load": median["stock restore"] / median["raw read"],
        }
    if "ranks" in found:
        rows |= {
            "bytes read on 4 ranks / bytes saved by 2": found["ranks"]["ours"],
            "  stock DCP, bytes": found["ranks"]["stock"],
        }
    runs = [found[f"exports {number}"] for number in range(rounds) if f"exports {number}" in found]
    return rows | (export_figures(runs) if runs else {})


def save_figures(median: dict[str, float]) -> dict[str, float]:
    mib = 1 << 20
    return {
        "raw write and fsync, s": median["raw write"],
        "save, wall / raw write and fsync": median["save"] / median["raw write"],
        "  in CPU time": median["save, cpu"] / median["raw write, cpu"],
        "  stock DCP, wall": median["stock save"] / median["raw write"],
        "save, extra MiB a rank": median["save, extra"] / mib,
        "  stock DCP, extra MiB": median["stock save, extra"] / mib,
        "async stall, optimizer at once / raw write": median["async stall"] / median["raw write"],
        "  / one copy in memory, as many threads": median["async stall"] / median["stall of one copy"],
        "  first save / raw write": median["first async stall"] / median["raw write"],
        "  stock DCP / raw write": median["stock async stall"] / median["raw write"],
    }


def training_figures(median: dict[str, float]) -> dict[str, float]:
    raw = median["raw write"]
    return {
        "training step on one core, s": median["one thread, step"],
        "training step on all cores, s": median["all cores, step"],
        "async stall, training loop / raw write": median["one thread, blocked"] / raw,
        "  on all cores": median["all cores, blocked"] / raw,
        "  whole step longer, one core / raw write": median["one thread, longer"] / raw,
        "  whole step longer, all cores / raw write": median["all cores, longer"] / raw,
    }


def export_figures(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    def of(name: str, key: str) -> float:
        runs = [one_round[name] for one_round in rounds if name in one_round]
        values = [run[key] for run in runs if key in run]
        if runs and not values:
            print(f"  {name}: {runs[-1].get('failed')}")
        return statistics.median(values) if values else float("nan")

    cp, mib = of("cp", "cpu"), 1 << 20
    rows = {
        "cp, CPU s": cp,
        "cp, wall s": of("cp", "wall"),
        "cp and fsync, wall s": of("cp", "durable"),
        "export fp32, CPU / cp": of("export fp32", "cpu") / cp,
        "export fp32 verified, CPU / cp": of("export fp32 verified", "cpu") / cp,
        "export bf16, CPU / cp": of("export bf16", "cpu") / cp,
        "export fp32, wall / cp and fsync": of("export fp32", "wall") / of("cp", "durable"),
        "  cp without fsync": of("export fp32", "wall") / of("cp", "wall"),
        "export, extra MiB": max(of(name, "extra") for name in ("export fp32", "export fp32 verified", "export bf16"))
        / mib,
    }
    if "import" in rounds[0]:
        rows |= {
            "import, CPU / cp": of("import", "cpu") / cp,
            "  HF consolidation, CPU / cp": of("stock consolidation", "cpu") / cp,
            "  accelerate merge, CPU / cp": of("accelerate merge", "cpu") / cp,
            "import, extra MiB": of("import", "extra") / mib,
            "  HF consolidation, extra MiB": of("stock consolidation", "extra") / mib,
            "  accelerate merge, extra MiB": of("accelerate merge", "extra") / mib,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", choices=("disk", "s3"), default="disk")
    parser.add_argument("--only", choices=STAGES, nargs="+", default=STAGES, help="measure these alone (on disk)")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[6, 14], help="of 37.7 million weights each, beside 98 million"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where to write and to keep what was measured; default: a temporary one",
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so long")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there too")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        warnings.simplefilter("ignore")
        print(json.dumps(globals()[options.run[0]](*options.run[1:])))
        return
    if "restores" in options.only and "saves" not in options.only:
        parser.error("restores read what saves wrote; use --only saves restores")
    columns: list[dict[str, float]] = []
    until = time.monotonic() + options.seconds
    for layers in options.layers:
        with tempfile.TemporaryDirectory(prefix="meshpar-benchmark-") as temporary:
            folder = Path(temporary) if options.folder is None else options.folder / f"layers-{layers}"
            folder.mkdir(parents=True, exist_ok=True)
            stored = options.storage == "s3"
            column = (
                measure_stored(layers, options.rounds, folder)
                if stored
                else measure(layers, options.rounds, folder, until, options.only)
            )
        if column is None:
            print(f"stopped after {options.seconds:.0f} s; the same command goes on")
            return
        columns.append(column)
    print(f"{'':44}{'':>9}" + "bound")
    for name in columns[0]:
        bound = (STORE_BOUNDS if options.storage == "s3" else BOUNDS).get(name)
        values = [column[name] for column in columns]
        verdict = (
            ""
            if bound is None
            else f"{bound:8}  {'holds' if all(value <= bound for value in values) else 'DOES NOT HOLD'}"
        )
        print(f"{name:44}" + "".join(f"{value:10.3f}" for value in values) + verdict)
    if options.json:
        options.json.write_text(json.dumps(columns, indent=1) + "\n")


if __name__ == "__main__":
    main()
