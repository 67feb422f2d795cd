"""Runs in an object store: committed once, restored on any mesh, and equal to a disk's."""

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import meshpar
from meshpar import WeightMap
from meshpar.checkpoints import (
    CheckpointManager,
    DistributedCheckpoint,
    Safetensors,
    TorchWeights,
    export_gguf,
    export_module,
    export_safetensors,
    import_safetensors,
    list_steps,
    open_step,
    pin_step,
    prune_steps,
    read_manifest,
    remove_step,
    verify_step,
)
from meshpar.checkpoints.storage import objects
from meshpar.checkpoints.storage.place import Place, copy_file, fetched, place
from meshpar.core.errors import CheckpointError, StoreError
from meshpar.launchers import export_run
from meshpar.launchers.cli import app
from meshpar.launchers.jobs.job import _take_up
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.models import Transformer, TransformerConfig
from meshpar.process.leftovers import host_name
from meshpar.testing import on_ranks
from tests.checkpoints.test_commit import Job, linear
from tests.support import object_store
from tests.support.stores import Store

obstore = pytest.importorskip("obstore", reason="the extra object-store is not installed")


def parallel(mesh: str, seed: int) -> meshpar.Parallelized:
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=96, dim=32, layers=2, heads=2, hidden=64, max_positions=16))
    passes = [meshpar.TensorParallel()] if "tp" in mesh else [meshpar.FullyShard()]
    return meshpar.Plan(mesh, passes).apply(model, device_type="cpu").materialize(seed=seed)


def trained(par: meshpar.Parallelized) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(par.module.parameters())
    ids = torch.arange(32).view(2, 16)
    par.module(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return optimizer


@on_ranks(2)
def save_twice(store: Store, roots: list[str], mesh: str) -> None:
    store.use()
    par = parallel(mesh, seed=0)
    optimizer = trained(par)
    for root in roots:
        with CheckpointManager(root, keep=2) as manager:
            manager.own()
            for step in (1, 2, 3):
                manager.save(step, par, optimizer, extra={"step": step})
            assert manager.steps() == [2, 3]
            manager.save(3, par, optimizer, extra={"step": 3}, replace=True)


@on_ranks(2)
def restore_both(store: Store, roots: list[str], mesh: str) -> None:
    store.use()
    found = []
    for root in roots:
        par = parallel(mesh, seed=1)
        optimizer = torch.optim.AdamW(par.module.parameters())
        restored = CheckpointManager(root).restore(par, optimizer, verify="full")
        assert restored.extra == {"step": 3}
        found.append(par.state_dict(full=True, everywhere=True))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("store", ["s3", "az", "gs"], indirect=True)
def test_a_run_is_saved_and_restored_on_another_mesh_as_on_a_disk(store, bucket, tmp_path):
    roots = [f"{bucket}/run/checkpoints", str(tmp_path)]
    save_twice(store, roots, "dp_shard=2")
    restore_both(store, roots, "tp=2")
    assert "is whole" in verify_step(roots[0]) and "step-00000001" not in list_steps(roots[0])
    exported = [export_safetensors(root, tmp_path / f"hf-{number}") for number, root in enumerate(roots)]
    assert (exported[0] / "model.safetensors").read_bytes() == (exported[1] / "model.safetensors").read_bytes()


def test_values_are_added_to_a_step_of_a_store_at_once(bucket):
    manager = CheckpointManager(f"{bucket}/amended", keep=1, best="loss")
    for step, loss in ((1, 1.0), (2, 2.0), (3, 0.5)):
        manager.save(step, linear(), extra={"owes": True})
        manager.amend(step, {"owes": False}, {"loss": loss})
        assert manager.steps() == ([1, 2] if step == 2 else [step]) and manager.best() == (1 if step == 2 else step)
    assert manager.restore(linear()).extra == {"owes": False}


RECIPE = """\
device: cpu
model: {dim: 32, layers: 1, heads: 2, hidden: 64, max_positions: 32, dropout: 0.1}
data: {source: files, sequence_length: 32, micro_batch: 4, validation_fraction: 0.1, cache: cache}
optimizer: {lr: 1e-3}
schedule: {steps: 8}
training: {log_every: 1, validate_every: 4, validate_steps: 1}
checkpoint: {every: 2, keep: 2, best: val/loss}
"""


def meshpar_in(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "meshpar.launchers", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(file: Path) -> list[tuple[int, float]]:
    rows = map(json.loads, file.read_text().splitlines())
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


def test_a_recipe_trains_resumes_and_exports_from_urls_alone_as_on_a_disk(bucket, tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("".join(f"def f{n}():\n    return {n * n}\n\n" for n in range(400)))
    (place(bucket) / "data" / "text.txt").write_durably((tmp_path / "text.txt").read_bytes())
    run, train = f"{bucket}/runs/one", ("train", "job.yaml", "--quiet")
    meshpar_in(tmp_path, *train, "data.paths=[text.txt]", "output=disk", "training.steps=8")
    urls = (*train, f"data.paths=[{bucket}/data/text.txt]", f"output={run}")
    meshpar_in(tmp_path, *urls, "training.steps=4")
    shutil.rmtree(tmp_path / "runs")  # another machine goes on
    resumed = meshpar_in(tmp_path, *urls, "training.steps=8")
    assert f"resuming after step 4 from {run}/checkpoints/step-00000004" in resumed
    local = tmp_path / "runs" / Path(run.replace("://", "/"))
    assert losses(local / "metrics.jsonl") == losses(tmp_path / "disk" / "metrics.jsonl")
    assert len(losses(local / "metrics.jsonl")) == 8
    # nothing is on this machine alone
    assert (local / "metrics.jsonl").read_bytes() == place(f"{run}/metrics.jsonl").read_small()
    monkeypatch.chdir(tmp_path)
    whole = (local / "metrics.jsonl").read_text()
    recipe = load_recipe("job.yaml", [f"output={run}", "training.steps=8", "data.paths=[text.txt]"])
    for here, aside in (("first\n" + whole[:300], "first\n" + whole[:300].splitlines()[-1]), (whole + "newer\n", "")):
        (local / "metrics.jsonl").write_text(here)
        (local / "metrics.abandoned.jsonl").write_text("")
        _take_up(recipe)  # of the machine that ran the first steps, or the last ones
        assert (local / "metrics.jsonl").read_text() == (here if not aside else whole)
        assert (local / "metrics.abandoned.jsonl").read_text() == aside
    export_run(run, f"{bucket}/hf")
    export_run(tmp_path / "disk", tmp_path / "hf")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert place(f"{bucket}/hf/{name}").read_small() == (tmp_path / "hf" / name).read_bytes(), name
    with pytest.raises(CheckpointError, match="already exists and is not empty"):
        export_run(run, f"{bucket}/hf")
    refused = CliRunner().invoke(app, ["export", run, "pushed", "--push", "me/model"])
    assert "--watch, --push and --measure work on a disk; export without them" in refused.stderr
    for words, said in (
        ("ls", "val/loss"), ("verify", "is whole"), ("pin", "is pinned"), ("rm", "is pinned"), ("prune", "6, 8"),
    ):  # fmt: skip
        options = ["--keep", "1", "--best", "val/loss"] if words == "prune" else []
        target = f"{run}/checkpoints/step-00000006" if words in ("pin", "rm") else run
        assert said in CliRunner().invoke(app, ["checkpoints", words, target, *options]).output, words
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if object_store.SECRET.encode() in path.read_bytes()]
    same = f"{bucket}/imported"
    import_safetensors(f"{bucket}/hf", same)
    published, ours = Safetensors(f"{bucket}/hf"), DistributedCheckpoint(open_step(same), prefix="model.")
    assert published.shapes() == ours.shapes() and len(ours.shapes()) > 5
    for name, shape in ours.shapes().items():
        left, right = torch.empty(shape), torch.empty(shape)
        published.read(name, (), left)
        ours.read(name, (slice(0, shape[0]),), right)
        assert torch.equal(left, right), name


def test_what_other_libraries_read_and_write_is_read_and_written_at_urls_as_on_a_disk(bucket, tmp_path):
    torch.save({"model": {"a": torch.arange(6.0).view(2, 3)}}, tmp_path / "weights.pt")
    copy_file(tmp_path / "weights.pt", place(f"{bucket}/weights/weights.pt"))
    for url in (f"{bucket}/weights", f"{bucket}/weights/weights.pt"):
        TorchWeights(url, prefix="model.").read("a", (slice(0, 2), slice(1, 3)), out := torch.empty(2, 2))
        assert out.tolist() == [[1, 2], [4, 5]]
    with pytest.raises(CheckpointError, match=rf"there is no {bucket}/absent\.pt"):
        TorchWeights(f"{bucket}/absent.pt")
    with meshpar.distributed("cpu"):
        par = parallel("dp_shard=1", seed=0)
        folders = (
            f".hf/module.tmp-{host}-4194304-0123456789abcdef/step-00000000" for host in (host_name(), "elsewhere")
        )
        dead, living = (place(f"{bucket}/{folder}") for folder in folders)
        for folder in (dead, living):
            (folder / "x").write_durably(b"")
        for home in (tmp_path, place(bucket)):
            export_module(par, home / "hf")
            config = {**json.loads((tmp_path / "hf" / "config.json").read_text()), "vocab_size": 96}
            export_gguf(Safetensors(home / "hf"), home / "gguf", "f16", config=config)
        for name in ("hf/model.safetensors", "hf/config.json", "gguf/model-f16.gguf"):
            stored = functools.reduce(lambda folder, part: folder / part, name.split("/"), place(bucket))
            assert stored.read_small() == (tmp_path / name).read_bytes(), name
        stored, local = ({path.name for path in home.iterdir()} for home in (place(f"{bucket}/hf"), tmp_path / "hf"))
        assert stored == local
        assert [path.name for path in place(f"{bucket}/.hf").iterdir()] == [living.parent.name]
        with pytest.raises(CheckpointError, match="already exists and is not empty"):
            export_module(par, f"{bucket}/hf")


class Filled(torch.nn.Module):
    """Every element is one number, so that a mixture of two saves shows."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = torch.nn.ParameterList(torch.full((64, 64), value) for _ in range(4))


def value_of(folder: Place) -> float:
    """Return the number that the step is full of, after a check of every byte."""
    verify_step(folder)
    source = DistributedCheckpoint(folder)
    values = set()
    for name in (tensor for tensor in source.tensors if tensor.startswith("model.")):
        whole = torch.empty(source.shapes()[name])
        source.read(name, (), whole)
        values |= set(whole.unique().tolist())
    (value,) = values
    return value


@pytest.mark.parametrize("store", ["s3", "az", "gs"], indirect=True)
def test_of_two_writers_one_wins_each_step_and_the_other_is_told(bucket):
    messages, together = [], threading.Barrier(2)

    def write(number: int) -> None:
        manager = CheckpointManager(f"{bucket}/run", keep=None)
        job = Job(Filled(float(number)))
        for step in range(6):
            together.wait()
            try:
                manager.save(step, job)
                messages.append((step, number, ""))
            except CheckpointError as error:
                messages.append((step, number, str(error)))

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in range(6):
        (winner,) = [number for at, number, error in messages if at == step and not error]
        (loser,) = [error for at, _, error in messages if at == step and error]
        assert value_of(place(f"{bucket}/run/step-{step:08d}")) == winner
        assert "another writer committed step" in loser or "is already saved" in loser
    assert any("another writer committed step" in error for *_, error in messages)


@pytest.mark.parametrize("when", ["before a save", "while files are written", "at the commit"])
def test_a_deposed_writer_commits_nothing(bucket, when, monkeypatch):
    root = place(f"{bucket}/run")
    with CheckpointManager(root) as manager:
        manager.own()
        manager.save(1, Job(Filled(1.0)))

        def depose(*_: object) -> None:
            now = json.loads(lease.read_text())
            lease.write_durably(json.dumps({**now, "host": "another", "process": 7, "id": "00000000"}).encode())
            other = CheckpointManager(root)
            if when == "at the commit":
                other.save(2, Job(Filled(2.0)))

        lease = root / ".writer"
        if when == "before a save":
            depose()
        elif when == "while files are written":
            manager._settings = replace(manager._settings, on_write=depose)
        else:
            commit = manager._steps.commit
            monkeypatch.setattr(manager._steps, "commit", lambda *given: (depose(), commit(*given))[1])
        expected = "another writer committed step 2" if when == "at the commit" else "process 7 on another"
        with pytest.raises(CheckpointError, match=expected):
            manager.save(2, Job(Filled(1.0)))
    steps = CheckpointManager(root).steps()
    assert [value_of(root / f"step-{step:08d}") for step in steps] == ([1.0, 2.0] if when == "at the commit" else [1.0])
    lease.unlink()


def test_a_save_that_stages_to_a_disk_uploads_beside_training_and_leaves_nothing(bucket, tmp_path):
    names = (f"step-00000007.{kind}-{host_name()}-4194304-0123456789abcdef" for kind in ("tmp", "old"))
    dead, replaced = (tmp_path / name for name in names)
    dead.mkdir()
    replaced.mkdir()
    with CheckpointManager(f"{bucket}/run", async_=True, staging=tmp_path) as manager:
        module = Filled(1.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        for step in (1, 2):
            manager.save(step, Job(module), optimizer)
            manager.before_step()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1.0)  # while the files of the step before are uploaded
    assert [value_of(place(f"{bucket}/run/step-{step:08d}")) for step in (1, 2)] == [1.0, 2.0]
    # a step that may be the only one; neither this job's files nor those of a dead one
    assert list(tmp_path.iterdir()) == [replaced]


def test_what_a_dead_save_left_goes_and_what_a_live_one_writes_stays(bucket, monkeypatch):
    root, job = place(f"{bucket}/run"), Job(Filled(1.0))
    CheckpointManager(root).save(1, job)
    for step, host, process in ((1, host_name(), 1 << 22), (2, host_name(), 1 << 22), (2, "elsewhere", 7)):
        leftover = f"step-{step:08d}.tmp-{host}-{process}-0123456789abcdef"
        (root / f"step-{step:08d}" / leftover / "__0_0.distcp").write_durably(b"half")
    assert list_steps(root).count("of a save or a removal") == 3
    with monkeypatch.context() as context:
        now = time.time() + 7 * 3600
        context.setattr(time, "time", lambda: now)  # a host whose clock is wrong
        prune_steps(root, keep=3)
    (left,) = [str(path) for path, why in CheckpointManager(root).ignored().items() if "of a save" in why]
    assert "elsewhere-7" in left and value_of(root / "step-00000001") == 1.0
    living = root / "step-00000001" / "step-00000001.tmp-elsewhere-7-0123456789abcdef" / "__0_0.distcp"
    living.write_durably(b"half")
    pin_step(root / "step-00000001")
    with pytest.raises(CheckpointError, match="is pinned"):
        remove_step(root / "step-00000001")
    pin_step(root / "step-00000001", pinned=False)
    assert "left: none" in remove_step(root / "step-00000001")
    assert list((root / "step-00000001").iterdir()) == [living.parent] and living.is_file(), "its writer may commit it"


FAULTS = int(os.environ.get("MESHPAR_FAULTS", "10"))
LANES = max(1, min(8, FAULTS // 15))
BOUND_S = 360.0  # of one operation: three attempts of 90 s, and 30 s of silence each


class Drawn(torch.nn.Module):
    """Weights that tell the step, in files of several pieces."""

    def __init__(self, step: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(step)
        self.w = torch.nn.ParameterList(torch.rand(1200, 1200, generator=draw) for _ in range(2))


def last_good(root: Place, committed: int) -> int:
    """Assert that the newest step restores bit for bit, and that it is none before ``committed``; return it."""
    job = Job(Drawn(0))
    step = CheckpointManager(root).restore(job, random=False).step
    right, state = Drawn(step).state_dict(), job.module.state_dict()
    assert step >= committed and all(torch.equal(state[name], right[name]) for name in state), (step, committed)
    return step


def under_failures(
    root: Place, proxy: object_store.FaultyProxy, rate: float, faults: int
) -> list[tuple[str, bool, Counter[str], float]]:
    """Save, restore and export until so many requests failed; return (operation, end, failures, seconds)."""
    committed, exported, found, hf = 0, 0, [], root.parent / "hf"
    for step in itertools.count(1):
        for name, act in (
            ("save", lambda step=step: CheckpointManager(root, keep=2).save(step, Job(Drawn(step)))),
            ("restore", lambda: CheckpointManager(root).restore(Job(Drawn(0)), random=False)),
            ("export", lambda: export_safetensors(root, hf, weights=WeightMap(), config={"a": 1}, overwrite=True)),
        ):
            if proxy.injected.total() >= faults:
                return found
            if not committed and name != "save":
                continue  # the first save failed
            began, before, ended, proxy.rate = time.monotonic(), proxy.injected.copy(), True, rate
            try:
                act()
            except CheckpointError as error:
                ended = False
                assert str(root.parent) in str(error) and len(str(error)) < 2000 and proxy.injected != before, error
            proxy.rate = 0.0
            found.append((name, ended, proxy.injected - before, time.monotonic() - began))
            if committed or ended:
                newest = last_good(root, step if name == "save" and ended else committed)
                committed = max(committed, newest)
            # this export, or the one before that could not be replaced
            if name == "export" and (hf / "config.json").is_file():
                source = Safetensors(hf)
                whole = {key: torch.empty(shape) for key, shape in source.shapes().items()}
                for key, out in whole.items():
                    source.read(key, (), out)
                states = {at: Drawn(at).state_dict() for at in {newest, exported}}
                fits = [at for at in states if all(torch.equal(whole[key], w) for key, w in states[at].items())]
                assert fits == [newest] if ended else fits, (fits, newest, exported)
                exported = fits[0]
    raise AssertionError


@pytest.mark.timeout(180 + 3 * FAULTS)
def test_failures_of_the_store_end_in_success_or_in_one_error_and_lose_nothing(store, bucket, monkeypatch):
    faults, long = object_store.FAULTS, FAULTS > 100
    if not long:
        monkeypatch.setattr(objects, "CLIENT", {**objects.CLIENT, "read_timeout": timedelta(seconds=3)})
        retry = {**objects.RETRY, "max_retries": 3, "retry_timeout": timedelta(seconds=20)}
        monkeypatch.setattr(objects, "RETRY", retry)
    monkeypatch.setattr(objects, "_UPLOAD_BYTES", 5 << 20)  # the least that S3 takes: two pieces of a file
    monkeypatch.setattr(objects, "_PIECE_BYTES", 1 << 20)
    seed, lanes = int(os.environ.get("MESHPAR_FAULTS_SEED", "0")), []
    for number in range(LANES):  # side by side, each with a bucket and a proxy of its own
        proxy = object_store.FaultyProxy(store.port, seed=LANES * seed + number, stall_s=60.0 if long else 4.0)
        root = place(f"{store.bucket(f'{bucket[5:]}-{number}')}/run")
        proxy.faults = (*faults[:-2] * 5, faults[-2], *faults[-1:] * 2)
        with monkeypatch.context() as context:
            for name, value in store.environment(proxy.port).items():
                context.setenv(name, value)
            objects._store(root.root, os.getpid())  # opened with this environment
        lanes.append((root, proxy))
    rate, each = 0.12 if long else 0.06, -(-FAULTS // LANES)
    with ThreadPoolExecutor(LANES) as pool:
        found = list(itertools.chain(*pool.map(lambda lane: under_failures(*lane, rate, each), lanes)))
    for _, proxy in lanes:
        proxy.close()
    objects._store.cache_clear()
    table = [f"{'failure':12} injected  in operations that ended well  in an error"]
    for fault in faults:
        good, bad = (sum(injected[fault] for _, ended, injected, _ in found if ended is well) for well in (True, False))
        table.append(f"{fault:12} {good + bad:8}  {good:29}  {bad:11}")
    counts, longest = Counter((name, ended) for name, ended, _, _ in found), max(seconds for *_, seconds in found)
    names = ("save", "restore", "export")
    ends = ", ".join(f"{name} {counts[name, True]} well and {counts[name, False]} in an error" for name in names)
    failures = sum(injected.total() for _, _, injected, _ in found)
    print("\n".join([*table, f"{failures} failures: {ends}; the longest {longest:.1f} s"]))  # noqa: T201
    assert longest < BOUND_S and sum(count for (_, ended), count in counts.items() if ended) > 1


@pytest.mark.parametrize("damage", ["cut short", "manifest cut"])
def test_damage_in_a_store_is_found_named_and_passed_over(bucket, damage):
    root = place(f"{bucket}/run")
    manager = CheckpointManager(root)
    for step in (1, 2):
        manager.save(step, Job(Filled(float(step))))
    newer = root / "step-00000002"
    part = read_manifest(newer).files_in(newer) / "__0_0.distcp"
    if damage == "cut short":
        part.write_durably(part.read_small()[:-1000])
    else:
        (newer / "meshpar.json").write_durably((newer / "meshpar.json").read_small()[:-100])
    named = "meshpar.json" if damage == "manifest cut" else "__0_0.distcp"
    with pytest.raises(CheckpointError, match=named):
        verify_step(newer)
    job = Job(Filled(0.0))
    restored = manager.restore(job, fallback=True)
    assert restored.step == 1
    assert named in restored.passed_over[0]
    assert all((parameter == 1.0).all() for parameter in job.module.parameters())
    manager.save(2, Job(Filled(2.0)), replace=True)
    assert value_of(newer) == 2.0
    # which folder was the step's is lost with its manifest, so that its files stay until this process has ended
    if damage != "manifest cut":
        assert len(list(newer.iterdir())) == 2


def test_a_store_that_refuses_is_no_damage_that_is_passed_over(store, bucket, monkeypatch):
    if not store.wrong:
        pytest.skip("this server asks for no credentials")
    manager = CheckpointManager(f"{bucket}/run")
    for step in (1, 2):
        manager.save(step, Job(Filled(float(step))))
    get, wrong = obstore.get, store.wrong

    def expired(store: Any, key: str, **options: Any) -> Any:
        if "step-00000002" in key and key.endswith(".distcp"):
            for name, value in wrong.items():
                patch.setenv(name, value)
            store = obstore.store.from_url(bucket, client_options={"allow_http": True})
        return get(store, key, **options)

    message = r"__0_\d.distcp failed: the store answered 403 .*check the credentials in the store's usual environment"
    with monkeypatch.context() as patch, pytest.raises(StoreError, match=message):
        patch.setattr(obstore, "get", expired)
        manager.restore(Job(Filled(0.0)), fallback=True)
    assert manager.restore(Job(Filled(0.0)), fallback=True).step == 2, "with the right credentials"


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_who_may_only_read_reads_and_is_told_that_nothing_was_deleted(bucket, monkeypatch):
    root = place(f"{bucket}/run")
    for step in (1, 2):
        CheckpointManager(root).save(step, Job(Filled(float(step))))
    for name, value in object_store.READER.items():
        monkeypatch.setenv(name, value)
    objects._store.cache_clear()
    assert "is whole" in verify_step(root)
    first = root / "step-00000001"
    for act in (lambda: prune_steps(root, keep=1), lambda: remove_step(first), lambda: pin_step(first)):
        message = r"/step-00000001/.*AccessDenied.*check the credentials in the store's usual environment"
        with pytest.raises(StoreError, match=message):
            act()
    assert CheckpointManager(root).steps() == [1, 2]
    objects._store.cache_clear()


def test_missing_and_damaged_credentials_are_named_as_such(monkeypatch):
    for name in (variable for variable in os.environ if variable.startswith(("AWS_", "AZURE_", "GOOGLE_"))):
        monkeypatch.delenv(name)
    monkeypatch.setattr(objects, "RETRY", {**objects.RETRY, "max_retries": 0})
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # where a machine's role would be asked for
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "{}")
    urls = ["s3://of-no-one/run", "az://of-no-one/run", "gs://of-no-one/run"]
    for url in urls:
        with pytest.raises(StoreError, match="check the credentials in the store's usual environment"):
            CheckpointManager(url).steps()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64")
    message = r"Invalid Access Key: .*check the credentials in the store's usual environment"
    with pytest.raises(StoreError, match=message):
        CheckpointManager(urls[1]).steps()


@pytest.mark.parametrize("url", ["s3://KEY:SECRET@bucket/run", "s3://bucket?SECRET/run", "az://bucket/run?sig=SECRET"])
def test_a_url_with_credentials_is_refused_and_not_repeated(url):
    with pytest.raises(CheckpointError, match="credentials come from the environment") as caught:
        place(url)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("key", ["../run", "runs/../../run", "./run", "runs//run", "runs\\run", "run\n"])
def test_a_key_that_stores_or_disks_change_is_refused(key):
    with pytest.raises(CheckpointError, match="is not a key that all stores keep"):
        place(f"s3://bucket/{key}")
    with pytest.raises(CheckpointError, match="not supported"):
        place("s3:///run")


def test_a_save_whose_program_ended_without_close_is_told_as_lost(tmp_path):
    program = """
import time
from concurrent.futures import ThreadPoolExecutor
from torch import nn
from meshpar.checkpoints.steps.background import Background
work = [lambda: time.sleep(0.5), lambda: ThreadPoolExecutor(1).submit(print)]
background = Background()
background.start(*work, trains=True, module=nn.Linear(1, 1), what="a save")
"""
    ended = []
    for way in ("", "background.close()"):
        (tmp_path / "script.py").write_text(program + way)
        command = [sys.executable, "-m", "tests.support.script", str(tmp_path / "script.py")]
        ended.append(subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2]))
    lost, closed = ended
    assert "save in the background is lost" in lost.stderr and "call close()" in lost.stderr
    assert closed.returncode == 0 and not closed.stderr


def test_an_object_that_is_replaced_is_not_read_as_a_mixture(bucket):
    path = place(f"{bucket}/weights")
    path.write_durably(bytes(40 << 20))
    file, block = objects.ReadObject(path), memoryview(bytearray(1 << 20))
    run = file.run(0, file.size)
    run.fill(block, 0)
    path.write_durably(b"1" * (40 << 20))
    with pytest.raises(StoreError, match="/weights was replaced while it was read"):
        for start in range(0, file.size, len(block)):
            run.fill(block, start)
            assert not any(block)
    again = objects.ReadObject(path)
    assert again.bytes(0, again.size) == b"1" * (40 << 20)


def test_data_is_copied_once_with_what_belongs_to_it_and_again_when_it_has_changed(bucket, tmp_path):
    data = place(f"{bucket}/data")
    for name in ("tokens.bin", "tokens.json", "other.json", "folder/a.txt", "folder/deep/b.txt"):
        functools.reduce(lambda folder, part: folder / part, name.split("/"), data).write_durably(name.encode())
    tokens = fetched(data / "tokens.bin", tmp_path, (".json", ".marks"))
    assert sorted(path.name for path in tokens.parent.iterdir()) == ["tokens.bin", "tokens.json"]
    assert fetched(data / "tokens.bin", tmp_path, (".json", ".marks")) == tokens and tokens.read_text() == "tokens.bin"
    folder = fetched(data / "folder", tmp_path)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.txt")} == {"a.txt", "deep/b.txt"}
    (data / "tokens.bin").write_durably(b"others")
    assert fetched(data / "tokens.bin", tmp_path, (".json",)).read_text() == "others"
    assert tokens.read_text() == "tokens.bin"
    # a bucket alone
    assert (fetched(place(bucket), tmp_path) / "data" / "folder" / "a.txt").read_text() == "folder/a.txt"
    with pytest.raises(CheckpointError, match=f"there is no {bucket}/data/absent$"):
        fetched(data / "absent", tmp_path)
    with pytest.raises(CheckpointError, match="a URL is no pattern"):
        fetched(data / "*.bin", tmp_path)
