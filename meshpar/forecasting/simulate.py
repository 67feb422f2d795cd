"""A training step of one rank out of thousands: the real passes on a model without memory, in a process of its own."""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from typing import Any, BinaryIO, Literal, final, overload

import torch
from torch import nn

import meshpar.forecasting.device as device
from meshpar._torch.simulated_device import fake_mode
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Role, find_blocks
from meshpar.core.patterns import kind_of
from meshpar.forecasting.recorder import Recorder
from meshpar.forecasting.step import Batch, Loss, axis_groups, record_step, summed_token_loss
from meshpar.forecasting.trace import Trace, all_reduce
from meshpar.optim.matrices import parameter_groups
from meshpar.passes.pipeline.messages import Header
from meshpar.passes.pipeline.running import Layers
from meshpar.plan import Plan
from meshpar.state import initialize
from meshpar.tensors.placements import buckets, local_tensor, summed_in

ALLOCATOR_ROUNDING = 512  # bytes to which torch's CUDA allocator rounds every request
ONE_BY_ONE = "forecast its plans one by one"
"""The remedy where a few blocks do not represent a model: a forecast then simulates all of them."""
PROCESS = "meshpar-forecast"
"""The name of a simulation's process, from before it imports the script that asked for the forecast."""
_LOOK_S = 0.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A step to simulate, of ``rank`` (0 holds the largest part); ``loss`` and ``optimizer`` are importable by name."""

    plan: Plan
    model: nn.Module
    layout: ModelLayout | None = None
    batch: Batch
    world_size: int
    rank: int = 0
    device: Literal["cuda", "cpu"] = "cuda"
    loss: Loss = summed_token_loss
    teacher: tuple[Plan, nn.Module] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    replicas: int = 1

    @property
    def mesh(self) -> MeshSpec:
        """The mesh of the whole job, replicas outermost."""
        inner = self.plan.mesh
        assert isinstance(inner, MeshSpec)
        if self.replicas == 1:
            return inner
        return MeshSpec({**inner.axes, "dp_replicate": self.replicas}, ranks_per_node=inner.ranks_per_node)


@overload
def simulate(
    jobs: Sequence[Simulation], *, workers: int = 1, progress: Callable[[int, int], None] | None = None
) -> list[Trace]: ...


@overload
def simulate(
    jobs: Sequence[Simulation], *, workers: int, progress: Callable[[int, int], None] | None, until: float | None
) -> list[Trace | None]: ...


def simulate(
    jobs: Sequence[Simulation],
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
    until: float | None = None,
) -> Any:
    """Return the traces of ``jobs``, simulated in ``workers`` processes; ``progress`` gets the jobs done and in all.

    At ``until`` (of ``time.monotonic()``) those that are not done are None.
    """
    if not jobs or (until is not None and time.monotonic() >= until):
        return [None] * len(jobs)
    share = min(max(1, workers), len(jobs))
    # ProcessPoolExecutor's workers would import the caller's script, and the interpreter would wait for them
    with tempfile.TemporaryDirectory(prefix="meshpar-forecast-") as folder, ExitStack() as stack:
        places = [Path(folder) / str(number) for number in range(share)]
        for number, where in enumerate(places):
            _send(jobs[number::share], where)
            where.with_suffix(".traces").touch()
        answers = [_Answer(stack.enter_context(where.with_suffix(".traces").open("rb"))) for where in places]
        # On Linux the workers are forked from one, which loads torch and the passes once.
        running = [_start(some) for some in ([places] if sys.platform == "linux" else [[where] for where in places])]
        for process in running:
            stack.callback(_end, process)
        while True:
            ended = [process.poll() for process in running]
            done = sum(len(answer.read()) for answer in answers)
            if None not in ended or (until is not None and time.monotonic() >= until):
                break
            if progress is not None:
                progress(done, len(jobs))
            time.sleep(_LOOK_S)
        if done < len(jobs) and None not in ended:
            raise _without_answer(places, ended)
        traces: list[Trace | None] = [None] * len(jobs)
        for number, answer in enumerate(answers):
            traces[number : number + share * len(answer.traces) : share] = answer.traces
    return traces


def _send(jobs: Sequence[Simulation], where: Path) -> None:
    if multiprocessing.current_process().name == PROCESS:
        raise MeshparError(
            "the forecast imports the script that defines this model, and the script asks for a forecast as it is "
            'imported; put what it does under if __name__ == "__main__":'
        )
    try:
        # Each for itself: jobs share models, and a simulation changes its own.
        sent = [pickle.dumps(job) for job in jobs]
        where.with_suffix(".jobs").write_bytes(pickle.dumps((_preparation(sent), sent)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise MeshparError(
            f"the forecast runs in a process of its own, to which this plan or model cannot be sent: {error}; define "
            "classes and functions at the top of a module, and build the model on the meta device"
        ) from error


def _start(places: Sequence[Path]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "meshpar.forecasting.worker", *map(str, places)]
    # The pipe is never written to: it ends with this process, and the simulation with it.
    with places[0].with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors)


def _preparation(sent: Sequence[bytes]) -> dict[str, Any]:
    """Return the data with which another process can unpickle ``sent``, as multiprocessing's spawn does."""
    data = {key: value for key, value in spawn.get_preparation_data(PROCESS).items() if key != "authkey"}
    # Then nothing needs the script itself, and it need not be guarded.
    if not any(b"__main__" in payload for payload in sent):
        data = {key: value for key, value in data.items() if not key.startswith("init_main")}
    return data


def read_jobs(where: Path) -> Iterator[Simulation]:
    """Return the jobs that were sent to this process, each when it is its turn. Only the worker calls it."""
    preparation, jobs = pickle.loads(where.with_suffix(".jobs").read_bytes())
    spawn.prepare(preparation)
    return map(pickle.loads, jobs)


@final
class _Answer:
    """The traces that a worker writes one after the other."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.traces: list[Trace] = []

    def read(self) -> list[Trace]:
        """Return the traces until now; raises the error of one."""
        while True:
            start = self._file.tell()
            try:
                result = pickle.load(self._file)
            except (EOFError, pickle.UnpicklingError):  # that one is being written
                self._file.seek(start)
                return self.traces
            if isinstance(result, Exception):
                raise result
            self.traces.append(result)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.kill()
    process.wait()


def _without_answer(places: Sequence[Path], ended: Sequence[int | None]) -> MeshparError:
    files = [file for path in places if (file := path.with_suffix(".err")).exists()]
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    code = f"exit code {max((code or 0 for code in ended), key=abs)}"
    return MeshparError(f"the simulation ended without an answer, {code}: " + "\n".join(lines[-15:]))


@final
class Depths:
    """Copies of a meta model with the first few blocks of its one list of like blocks, each made once."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        self._model, self._made = model, dict[int, nn.Module]()
        self._path, self.blocks = like_blocks(model, layout)

    def shallow(self, depth: int) -> nn.Module:
        """Return the copy that keeps ``depth`` blocks; raises MeshparError where the model has fewer."""
        if depth > self.blocks:
            raise MeshparError(f"{self._path} has {self.blocks} blocks, cannot keep {depth}")
        if depth not in self._made:
            whole: Any = self._model.get_submodule(self._path)
            later = whole[depth:]
            shallow = copy.deepcopy(self._model, {id(other): nn.Identity() for other in later})
            del shallow.get_submodule(self._path)[depth:]  # type: ignore[operator]
            self._made[depth] = shallow
        return self._made[depth]


def like_blocks(model: nn.Module, layout: ModelLayout) -> tuple[str, int]:
    """Return name and length of the list of the model's blocks; raises MeshparError for several lists or kinds."""
    blocks = find_blocks(model, layout)
    lists = sorted({name.rpartition(".")[0] for name, _ in blocks})
    if len(lists) != 1 or not isinstance(model.get_submodule(lists[0]), nn.ModuleList):
        where = f"blocks are in {lists or 'no list'}"
        raise MeshparError(f"{where}; only those of one nn.ModuleList can be extrapolated: {ONE_BY_ONE}")
    if (kinds := len({kind_of(block) for _, block in blocks})) > 1:
        what = f"the blocks of {lists[0]} are of {kinds} kinds"
        raise MeshparError(f"{what}, so a few do not represent the rest: {ONE_BY_ONE}")
    return lists[0], len(blocks)


def run(job: Simulation) -> Trace:
    """Simulate in this process, on which :func:`meshpar.forecasting.device.install` was called: the worker's."""
    stages = stages_of(job.plan)
    if stages == 1:
        return _run(job, {})
    stride, forms, traces = job.world_size // stages, dict[Any, Header](), list[Trace]()
    for stage in range(stages):
        of_stage = replace(job, rank=stage * stride + job.rank % stride, model=copy.deepcopy(job.model))
        traces.append(_run(of_stage, forms))
    return replace(max(traces, key=lambda trace: trace.memory().peak), stages=tuple(traces))


def stages_of(plan: Plan) -> int:
    """Return over how many ranks a plan divides layers."""
    axes = [axis for pass_ in plan.passes for axis, role in pass_.roles.items() if role is Role.LAYERS]
    assert isinstance(plan.mesh, MeshSpec)
    return math.prod(plan.mesh.axes.get(axis, 1) for axis in axes)


def _run(job: Simulation, forms: dict[Any, Header]) -> Trace:
    """Simulate one rank. ``forms``: of what stages send each other, which earlier stages find and later ones get."""
    # Inductor does not run on tensors without memory, so eager memory stands in for compiled.
    uncompiled = [pass_ for pass_ in job.plan.passes if not pass_.compiles]
    plan = Plan(job.plan.mesh, uncompiled, same_bits=job.plan.same_bits)
    compiled = len(uncompiled) < len(job.plan.passes)
    with (
        # An error in a thread that autograd keeps for a device written in Python ends the process without a word.
        torch.autograd.set_multithreading_enabled(False),
        runtime.simulated(job.world_size, as_rank=job.rank, stands_for=job.device),
        fake_mode(),
        device.kernels_of(job.device, documents=job.batch.documents),
    ):
        par = plan.apply(job.model, job.layout, device_type=device.NAME)
        if (layers := par.run.find(Layers)) is not None:
            layers.edges.transfers.supposed = forms
        frozen = [] if job.teacher is None else [job.teacher[0].apply(job.teacher[1], device_type=device.NAME)]
        for parallel in (par, *frozen):
            with parallel.run.moving():
                initialize.allocate(parallel.module, parallel.device, parallel.home)
        par.module.train()
        make = job.optimizer or (lambda module: torch.optim.AdamW(parameter_groups(module, 0.1), fused=True))
        optimizer = make(par.module)
        for parameter in par.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # which makes its state
        optimizer.zero_grad(set_to_none=True)
        device.begin(None)
        rounding = ALLOCATOR_ROUNDING if job.device == "cuda" else 1
        recorder = Recorder(axis_groups(par), current_stream=lambda: device.Stream.current, rounding=rounding)
        device.begin(recorder)
        batches = [job.batch.tensors(par.device) for _ in range(job.batch.accumulate)]
        reduce = (lambda: None) if job.replicas == 1 else partial(_sum_over_replicas, job, par.module, recorder)
        teachers, each = [teacher.module for teacher in frozen], job.batch.reduce_each
        trace = record_step(
            par, optimizer, batches, loss=job.loss, reduce_each=each, reduce=reduce, beside=teachers, recorder=recorder
        )
        device.begin(None)
    return replace(trace, compiled=compiled, axes=dict(job.mesh.axes), data_size=trace.data_size * job.replicas)


def _sum_over_replicas(job: Simulation, module: nn.Module, recorder: Recorder) -> None:
    """Add up the gradients, as replicas that may be lost do."""
    for bucket in buckets(parameter for parameter in module.parameters() if parameter.grad is not None):
        dtype = summed_in(bucket[0].dtype)
        size = sum(local_tensor(parameter).numel() for parameter in bucket) * dtype.itemsize
        kind = str(dtype).removeprefix("torch.")
        recorder.send(all_reduce("dp_replicate", job.replicas, job.world_size, size, kind))
