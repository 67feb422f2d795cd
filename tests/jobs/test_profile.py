"""Profiles: through the command line on two processes, and what the summary makes of a trace."""

import gc
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

import meshpar
from meshpar._torch.groups import default_store, gloo_threads, group_title
from meshpar.core import runtime
from meshpar.core.mesh import MeshSpec
from meshpar.launchers.jobs.profile import LEAST, STEPS, WARM, Page, Profiled, Times, times_of
from meshpar.testing import on_ranks
from tests.support.patience import patient, until

RECIPE = """\
name: job
mesh: dp_shard=2
device: cpu
model: {dim: 32, layers: 2, heads: 2, hidden: 64, max_positions: 64, dropout: 0.0}
data: {source: files, sequence_length: 64, micro_batch: 4}
training: {steps: 9, log_every: 1, tensorboard: false}
"""


@pytest.mark.long
def test_a_job_profiles_itself_and_trains_as_without(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(
        "".join(f"def add_{a}_{b}():\n    return {a} + {b}\n\n" for a in range(60) for b in range(30))
    )
    (tmp_path / "job.yaml").write_text(RECIPE)
    losses = {}
    for name, profile in {"with": "on", "without": "off"}.items():
        more = [f"output={tmp_path / name}", f"data.paths=[{tmp_path / 'text.txt'}]"]
        more += [f"data.cache={tmp_path / 'cache'}", f"profile={profile}"]
        command = [sys.executable, "-m", "meshpar.launchers", "train", str(tmp_path / "job.yaml"), *more, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [record["train/loss"] for record in records if "train/loss" in record]
    few = [*more, f"output={tmp_path / 'with'}", "profile=on", "training.steps=10"]  # of which 9 are done
    command = [*command[:4], str(tmp_path / "job.yaml"), *few]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert "no profile: it requires 8 steps, and 1 are left" in done.stderr
    assert losses["with"] == losses["without"] and len(losses["with"]) == 9
    assert not (tmp_path / "without" / "profile").exists()
    trace = json.loads((tmp_path / "with" / "profile" / "trace.json").read_text())
    spans = [event.get("name") for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert spans.count("data") == 3
    page = (tmp_path / "with" / "profile" / "summary.md").read_text()
    names = ("compute", "exposed communication, dp_shard", "waiting for data", "gaps", "| 1 |", "What it suggests")
    assert all(name in page for name in names), page
    # Adam's two moments, half of them here: the recorder counts what is there.
    rows = re.findall(r"^\| (\w[\w ]*) \| ([\d.]+) \| \d+% \|$", page, re.MULTILINE)
    sizes = {name: float(size) for name, size in rows}
    assert sizes["optimizer"] == pytest.approx(2 * sizes["parameters"], rel=0.1) and sizes["activations"] > 0, page


@on_ranks(4, fresh="counts the threads of all groups")
def test_gloos_threads_are_their_groups_also_when_others_start_in_between(tmp_path: Path) -> None:
    stopped = threading.Event()

    def busy() -> None:
        while not stopped.is_set():
            other = threading.Thread(target=time.sleep, args=(0.001,))
            other.start()
            other.join()

    beside = threading.Thread(target=busy)
    beside.start()
    mesh = MeshSpec("dp_shard=2,tp=2").build("cpu")
    stopped.set()
    beside.join()
    until(lambda: len(gloo_threads()) >= 6, 10)  # a thread takes its name when it first runs
    known = gloo_threads()
    titles = {group_title(mesh.get_group(axis)): axis for axis in ("dp_shard", "tp")}
    threads = {number: titles.get(title, "") for number, title in known.items()}
    assert sorted(threads.values()) == ["", "", "dp_shard", "dp_shard", "tp", "tp"]
    for axis in ("dp_shard", "tp", None):
        with profiler(activities=[ProfilerActivity.CPU]) as tracer:
            works = [
                dist.all_reduce(torch.ones(1), group=mesh.get_group(axis) if axis else None, async_op=True)
                for _ in range(20)
            ]
            for work in works:
                work.wait()
        path = tmp_path / f"{axis}-{dist.get_rank()}.json"
        tracer.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
        assert sum(traceevent["name"] == "gloo:all_reduce" for traceevent in trace["traceEvents"]) == 20
        assert set(times_of(trace, threads).communication) == ({axis} if axis else set())


@on_ranks(2)
def test_the_end_of_an_exchange_that_outlasts_the_profile_is_in_its_events(tmp_path: Path) -> None:
    """Torch frees events when a profile stops, and an exchange in flight would write its end into freed memory."""
    par = meshpar.Plan("dp_shard=2", [meshpar.FullyShard()]).apply(nn.Sequential(nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(par.module.parameters())
    group, store = runtime.new_host_group("late"), default_store()
    first, late = dist.get_rank() == 0, WARM + STEPS - 1
    batches: Any = [[] for _ in range(LEAST)]
    works = []
    for step, _ in enumerate(Profiled(batches, par, optimizer, tmp_path / "profile")):
        if step == late + 1 and first:
            store.set("the last profiled step is over", "")
        elif step == late + 1:
            store.wait(["the last profiled step is over"])
        if step == late + (not first):
            works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(50)]
        if step == late + 1:
            for work in works:
                work.wait()
    if first:
        events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
        spans = [traceevent["dur"] for traceevent in events if traceevent["name"] == "gloo:all_reduce"]
        assert len(spans) == 50 and all(spans)
        assert not [one for one in gc.get_objects() if type(one) is torch.autograd.profiler.profile]


@pytest.mark.nightly
def test_a_profiled_job_with_tensorboard_ends_twenty_times_of_twenty(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 500)
    (tmp_path / "job.yaml").write_text(RECIPE.replace("steps: 9", "steps: 12").replace("false", "true"))
    paths = [f"data.paths=[{tmp_path / 'text.txt'}]", f"data.cache={tmp_path / 'cache'}"]
    command = [sys.executable, "-m", "meshpar.launchers", "train", str(tmp_path / "job.yaml"), "--quiet", *paths]
    for number in range(20):
        more = ["profile=on", f"output={tmp_path / str(number)}"]
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=patient(60))
        assert done.returncode == 0, f"{number}: {done.stderr}"


def event(category: str, name: str, start: float, length: float, thread: int = 1, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": thread, "args": args}


def test_of_a_gpu_the_kernels_count_and_groups_have_names() -> None:
    gather = {"Process Group Description": "mesh_dp_shard"}
    trace = {
        "traceEvents": [
            event("kernel", "gemm", 0, 100),
            event("kernel", "ncclDevKernel_AllGather", 50, 100, 2, **gather),
            event("kernel", "ncclDevKernel_AllReduce", 300, 50, 2, **{"Process Group Description": "mesh_tp"}),
            event("cpu_op", "aten::mm", 0, 400),
            event("user_annotation", "data", 360, 20),
            event("kernel", "adam", 390, 10),
        ]
    }
    times = times_of(trace)
    assert times.total == pytest.approx(400e-6) and times.compute == pytest.approx(110e-6)
    assert times.communication == {"dp_shard": pytest.approx(100e-6), "tp": pytest.approx(50e-6)}
    assert times.exposed == {"dp_shard": pytest.approx(50e-6), "tp": pytest.approx(50e-6)}
    assert times.data == pytest.approx(20e-6) and times.idle == pytest.approx(400e-6 - 110e-6 - 50e-6 - 50e-6 - 20e-6)


def test_on_a_cpu_gloos_threads_tell_the_axes_where_all_are_known() -> None:
    trace = {
        "traceEvents": [
            event("cpu_op", "aten::mm", 0, 100, 10),
            event("user_annotation", "gloo:all_gather", 100, 10, 20),
            event("user_annotation", "gloo:all_gather", 120, 10, 21),
            event("user_annotation", "gloo:all_reduce", 90, 20, 33),
            event("user_annotation", "gloo:barrier", 200, 20, 35),
        ]
    }
    threads = {20: "dp_shard", 21: "dp_shard", 33: "tp", 34: "tp", 35: ""}
    assert times_of(trace, threads).communication == {"dp_shard": pytest.approx(20e-6), "tp": pytest.approx(20e-6)}
    assert set(times_of(trace, {20: "dp_shard", 33: "tp"}).communication) == {"all axes"}


def test_the_page_suggests_what_the_times_say() -> None:
    times = Times(total=1.0, compute=0.5, communication={"tp": 0.3}, exposed={"tp": 0.2}, data=0.1, idle=0.2)
    ranks = [{"seconds": 0.1, "data": 0.0, "memory": 1.0}, {"seconds": 0.2, "data": 0.0, "memory": 1.0}]
    text = str(Page(title="t", steps=2, times=times, ranks=ranks, holders={"activations": 9, "parameters": 1}))
    for wanted in ("waits for tp", "data.workers", "Compile", "2.00 times", "ActivationCheckpoint"):
        assert wanted in text, wanted
    page = Page(title="t", steps=2, times=times, ranks=ranks, unseen="`memory.pickle` shows it")
    assert "Memory at its peak: `memory.pickle` shows it" in str(page)
    quiet = Times(total=1.0, compute=1.0, communication={}, exposed={}, data=0.0, idle=0.0)
    assert "nothing stands out" in str(Page(title="t", steps=2, times=quiet, ranks=ranks[:1]))
