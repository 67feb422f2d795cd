"""What is claimed of every model: training, evaluation, checkpoints and exports equal one process."""

import contextlib
import faulthandler
import importlib
import json
import logging
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshpar
from meshpar import FullyShard, HybridShard, Plan, Replicate, TensorParallel
from meshpar.checkpoints import CheckpointManager, export_safetensors
from meshpar.testing import whole
from tests.nightly.strangers import vision_operators
from tests.nightly.strangers.models import STRANGERS, Batch, Stranger
from tests.support.comparison import apart

STEPS = 3
WEIGHT = 1e-3
"""Weights below this are held against it: a bias whose gradient is zero by theory holds rounding noise alone."""
SECONDS = 120.0
"""For a case, its model alone in one process included."""
SAMPLES = 8

Blocks = tuple[str, ...] | None
MESHES: dict[str, tuple[int, str, Callable[[Blocks], list[meshpar.Pass]]]] = {
    "FSDP": (2, "dp_shard=2", lambda blocks: [FullyShard(blocks=blocks)]),
    "Replicate": (2, "dp_replicate=2", lambda blocks: [Replicate(blocks=blocks)]),
    "HSDP": (4, "dp_replicate=2,dp_shard=2", lambda blocks: [HybridShard(blocks=blocks)]),
    "TP": (2, "tp=2", lambda blocks: [TensorParallel()]),
    "FSDP x TP": (4, "dp_shard=2,tp=2", lambda blocks: [TensorParallel(), FullyShard(blocks=blocks)]),
}
"""name -> ranks, mesh, passes by a stranger's blocks."""

ELSEWHERE = {"FSDP": "Replicate", "Replicate": "FSDP", "TP": "FSDP", "HSDP": "FSDP over 4", "FSDP x TP": "FSDP over 4"}
"""The mesh that goes on with what another one saved; it needs no layout."""
MESHES["FSDP over 4"] = (4, "dp_shard=4", lambda blocks: [FullyShard(blocks=blocks)])


@dataclass(slots=True)
class Trace:
    """What training leaves, whole and by step, and what was inferred before each step."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    inferred: list[Tensor] = field(default_factory=list)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # AdamW divides a gradient by its own size: a large eps keeps rounding noise where the gradient is zero by theory
    # from becoming a step.
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2, eps=1e-3
    )


def inferred(
    stranger: Stranger, model: nn.Module, mode: Callable[[], contextlib.AbstractContextManager[object]]
) -> Tensor:
    """Return what the model says of a few samples in evaluation."""
    model.eval()
    try:
        with mode():
            return stranger.inferred(model, stranger.fed(99, 3)).detach().clone()
    finally:
        model.train()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@cache
def alone(name: str) -> Trace:
    """Return what one process leaves on the whole batches; plain torch alone."""
    stranger, trace = STRANGERS[name], Trace()
    model = stranger.made(0)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        trace.inferred.append(inferred(stranger, model, torch.no_grad))
        loss = stranger.loss_of(model, stranger.fed(step, SAMPLES))
        loss.backward()
        trace.losses.append(loss.detach())
        trace.gradients.append(
            {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}
        )
        trace.norms.append(
            torch.nn.utils.get_total_norm(
                [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            )
        )
        optimizer.step()
        optimizer.zero_grad()
        trace.weights.append(
            {key: tensor.detach().clone() for key, tensor in (*model.named_parameters(), *model.named_buffers())}
        )
    trace.inferred.append(inferred(stranger, model, torch.no_grad))
    return trace


def applied(stranger: Stranger, mesh: str, seed: int = 0) -> meshpar.Parallelized:
    """Return the model on a mesh in the two lines of the README, with a layout for tensor parallelism alone."""
    _, text, passes = MESHES[mesh]
    model = stranger.made(seed)
    return Plan(text, passes(stranger.blocks)).apply(model, stranger.layout if "tp" in text else None)


def part(par: meshpar.Parallelized, batch: Batch) -> Batch:
    return {name: value[par.data_rank :: par.data_size] for name, value in batch.items()}


def trained(
    stranger: Stranger,
    par: meshpar.Parallelized,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int],
    mode: Callable[[], contextlib.AbstractContextManager[object]] | None = None,
) -> Trace:
    """Train for ``steps``, each data rank on its part of the batch, evaluating before each step under ``mode``."""
    trace = Trace()
    for step in steps:
        if mode is not None:
            trace.inferred.append(inferred(stranger, par.module, mode))
        loss = stranger.loss_of(par.module, part(par, stranger.fed(step, SAMPLES)))
        loss.backward()
        trace.losses.append(par.data_sum(loss.detach().clone()) / par.data_size)
        trace.gradients.append(
            {
                key: whole(parameter.grad)
                for key, parameter in par.module.named_parameters()
                if parameter.grad is not None
            }
        )
        trace.norms.append(par.clip_grad_norm_(math.inf))
        optimizer.step()
        optimizer.zero_grad()
        trace.weights.append(state_of(par.module))
    if mode is not None:
        trace.inferred.append(inferred(stranger, par.module, mode))
    return trace


# ---------------------------------------------------------------------------------------------------------- comparisons


def differences(expected: Trace, got: Trace, tolerance: float) -> Iterator[str]:
    """Yield in words what differs by more than ``tolerance`` of a tensor's largest value."""
    yield from compared("loss", expected.losses, got.losses, tolerance)
    yield from compared("norm", expected.norms, got.norms, tolerance)
    for step, (want, have) in enumerate(zip(expected.gradients, got.gradients, strict=True)):
        largest = max(float(tensor.abs().max()) for tensor in want.values())
        yield from compared_by_name(f"gradient in step {step}", want, have, tolerance, floor=1e-3 * largest)
    for step, (want, have) in enumerate(zip(expected.weights, got.weights, strict=True)):
        yield from compared_by_name(f"after step {step}", want, have, tolerance, floor=WEIGHT)


def compared(what: str, want: Sequence[Tensor], have: Sequence[Tensor], tolerance: float) -> Iterator[str]:
    assert len(want) == len(have), f"{len(have)} of {what}, expected {len(want)}"
    for step, (one, other) in enumerate(zip(want, have)):
        yield from apart(f"{what} in step {step}", one, other, tolerance)


def compared_by_name(
    what: str, want: Mapping[str, Tensor], have: Mapping[str, Tensor], tolerance: float, floor: float = 0.0
) -> Iterator[str]:
    if want.keys() != have.keys():
        yield (
            f"{what}: expected {sorted(want.keys() - have.keys())} too, and got {sorted(have.keys() - want.keys())} "
            "besides"
        )
    for name in want.keys() & have.keys():
        yield from apart(f"{name} {what}", want[name], have[name], tolerance, floor)


def check(found: Iterable[str]) -> None:
    """Raise with everything that differs."""
    listed = list(found)
    assert not listed, f"{len(listed)} differences from one process: " + "; ".join(listed[:8])


# --------------------------------------------------------------------------------------------------------------- claims


def trains(name: str, mesh: str, folder: Path) -> None:
    """Three steps: loss, every gradient, norm, weights and buffers."""
    stranger = STRANGERS[name]
    par = applied(stranger, mesh)
    check(differences(alone(name), trained(stranger, par, optimizer_of(par.module), range(STEPS)), stranger.tolerance))
    par.check_replicas()


def evaluates(name: str, mesh: str, mode: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    stranger, expected = STRANGERS[name], alone(name)
    par = applied(stranger, mesh)
    got = trained(stranger, par, optimizer_of(par.module), range(STEPS), mode)
    check(compared("inferred", expected.inferred, got.inferred, stranger.tolerance))
    check(differences(expected, got, stranger.tolerance))


def evaluates_without_grad(name: str, mesh: str, folder: Path) -> None:
    """Evaluation before, between and after steps under ``no_grad``, and the training around it."""
    evaluates(name, mesh, torch.no_grad)


def evaluates_in_inference_mode(name: str, mesh: str, folder: Path) -> None:
    """The same under ``inference_mode``."""
    evaluates(name, mesh, torch.inference_mode)


def goes_on_elsewhere(name: str, mesh: str, folder: Path) -> None:
    """Save a step on one mesh, restore it on another into other weights, and make the remaining steps."""
    stranger, expected = STRANGERS[name], alone(name)
    par = applied(stranger, mesh)
    optimizer = optimizer_of(par.module)
    trained(stranger, par, optimizer, [0])
    with CheckpointManager(folder / "checkpoints") as manager:
        manager.save(1, par, optimizer)
        other = applied(stranger, ELSEWHERE[mesh], seed=1)
        optimizer = optimizer_of(other.module)
        manager.restore(other, optimizer)
    check(
        compared_by_name("as restored", expected.weights[0], state_of(other.module), stranger.tolerance, floor=WEIGHT)
    )
    remaining = Trace(
        *(list(getattr(expected, attribute))[1:] for attribute in ("losses", "norms", "gradients", "weights"))
    )
    check(differences(remaining, trained(stranger, other, optimizer, range(1, STEPS)), stranger.tolerance))


def exports(name: str, mesh: str, folder: Path) -> None:
    """A step, saved and exported; a plain module loads the files and infers what one process infers after that step."""
    from safetensors.torch import load_file

    stranger = STRANGERS[name]
    par = applied(stranger, mesh)
    optimizer = optimizer_of(par.module)
    trained(stranger, par, optimizer, [0])
    with CheckpointManager(folder / "to export") as manager:
        manager.save(1, par, optimizer)
    plain = stranger.made(2)
    if dist.get_rank() == 0:
        export_safetensors(folder / "to export", folder / "exported")
        found = {
            key: tensor
            for file in (folder / "exported").glob("*.safetensors")
            for key, tensor in load_file(file).items()
        }
        report = plain.load_state_dict(found, strict=False)
        assert not report.unexpected_keys, f"the export has {report.unexpected_keys}, which the module lacks"
        shared = {id(tensor): key for key, tensor in plain.state_dict(keep_vars=True).items() if key in found}
        absent = [key for key in report.missing_keys if id(plain.state_dict(keep_vars=True)[key]) not in shared]
        assert not absent, f"the export lacks {absent}"
        got = inferred(stranger, plain, torch.no_grad)
        check(apart("inferred after the export", alone(name).inferred[1], got, stranger.tolerance))


CLAIMS: dict[str, Callable[[str, str, Path], None]] = {
    claim.__name__: claim
    for claim in (trains, evaluates_without_grad, evaluates_in_inference_mode, goes_on_elsewhere, exports)
}


# ------------------------------------------------------------------------------------------------------------ in a rank


def run_cases(cases: Sequence[tuple[str, str, str]], folder: str) -> None:
    """Check cases (claim, model, mesh) in one process group and note each result; an error ends its own case."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    vision_operators.declared()
    for needs in sorted({STRANGERS[name].needs for _, name, _ in cases} - {""}):
        importlib.import_module(needs)  # which takes longer than any case
    for number, (claim, name, mesh) in enumerate(cases):
        report = Path(folder) / f"{number}.json"
        if dist.get_rank() == 0:
            report.write_text(json.dumps("began"))
        faulthandler.dump_traceback_later(
            SECONDS, exit=True
        )  # a rank that waits for others that went another way ends with its group
        outputs = _told(claim, name, mesh, Path(folder) / str(number))
        every: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(every, outputs)
        if dist.get_rank() == 0:
            report.write_text(
                json.dumps(next((f"rank {rank}: {error}" for rank, error in enumerate(every) if error), ""))
            )
    faulthandler.cancel_dump_traceback_later()


def _told(claim: str, name: str, mesh: str, folder: Path) -> str:
    try:
        CLAIMS[claim](name, mesh, folder)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames[-6:])
        )
        return f"{type(error).__name__}: {str(error)[:1500]}\n  at {where}"
    return ""
