"""A training step under the recorder: the same one in the simulation and in a real job, so that plan and fact can be
compared.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar._torch.pytree import tree_leaves
from meshpar.core.errors import MeshparError
from meshpar.core.passes import find_blocks
from meshpar.forecasting.recorder import Recorder
from meshpar.forecasting.trace import HELD, Trace
from meshpar.losses.token_loss import token_loss
from meshpar.parallelized import Parallelized
from meshpar.passes.applied import applied
from meshpar.step.placements import local_tensor
from meshpar.training.objectives import EXAMPLES


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Describe the samples of one data rank in a step.

    >>> from meshpar.forecasting import Batch
    >>> Batch(sequence=8192, micro_batch=2).tokens
    16384

    Attributes:
        sequence: tokens of a sample.
        micro_batch: samples in one forward pass.
        accumulate: micro-batches in a step.
        examples: the kind of a sample: ``tokens`` of packed text, ``pairs`` of a text and its target, or a text with
            one of ``labels``.
        target: tokens of a pair's target.
        reduce_each: gradients are reduced after every micro-batch.
        documents: a sample of packed text has several documents: the model gets ``position_ids``, and attends by a
            mask.
    """

    sequence: int
    micro_batch: int = 1
    accumulate: int = 1
    examples: str = "tokens"
    target: int = 1
    reduce_each: bool = False
    documents: bool = False

    def __post_init__(self) -> None:
        for name in ("sequence", "micro_batch", "accumulate", "target"):
            if getattr(self, name) < 1:
                raise MeshparError(f"Batch({name}={getattr(self, name)}) must be 1 or more")
        if self.examples not in EXAMPLES:
            raise MeshparError(f"Batch(examples={self.examples!r}) is not known; use one of {', '.join(EXAMPLES)}")

    @classmethod
    def of(cls, batch: Batch | Mapping[str, Tensor]) -> Batch:
        """Return the shape of a batch; a mapping is one micro-batch with ``input_ids`` (B, L), as a model takes it.

        Raises:
            MeshparError: the mapping has no such tensor.
        """
        if isinstance(batch, Batch):
            return batch
        ids = batch.get("input_ids")
        if ids is None or ids.dim() != 2:
            got = "none" if ids is None else f"one of {tuple(ids.shape)}"
            raise MeshparError(
                f"a batch to forecast needs input_ids of (batch, length), got {got}; or give Batch(sequence=...)"
            )
        return cls(sequence=ids.shape[1], micro_batch=ids.shape[0], documents="position_ids" in batch)

    @property
    def tokens(self) -> int:
        """Counted labels of a data rank in a step: tokens, or one a sample."""
        return (
            {"tokens": self.sequence, "pairs": self.target, "labels": 1}[self.examples]
            * self.micro_batch
            * self.accumulate
        )

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return one micro-batch, as a model takes it, with values of no meaning: int64, (B, L), targets (B, T),
        labels of texts (B).
        """
        sizes = {"input_ids": (self.micro_batch, self.sequence)}
        if self.examples != "tokens":
            sizes["attention_mask"] = sizes["input_ids"]
        if self.documents:
            sizes["position_ids"] = sizes["input_ids"]
        if self.examples == "pairs":
            sizes["decoder_input_ids"] = (self.micro_batch, self.target)
        labels = {"tokens": (self.sequence,), "pairs": (self.target,), "labels": ()}[self.examples]
        made = {name: torch.empty(size, dtype=torch.int64, device=device) for name, size in sizes.items()}
        return made | {"labels": torch.empty((self.micro_batch, *labels), dtype=torch.int64, device=device)}


Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
"""``(model, batch) -> loss summed over the labels``; the batch has the names and shapes of :meth:`Batch.tensors`."""


def summed_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the causal objective's loss, as ``meshpar train`` computes it."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return token_loss(model(**inputs).logits, batch["labels"], reduction="sum")


@final
@dataclass(frozen=True, slots=True)
class ObjectiveLoss:
    """The loss of a training objective, to be replayed as the job will compute it."""

    objective: Any

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss."""
        return self.objective.loss(model, batch)[0]


def record_step(
    par: Parallelized,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    loss: Loss = summed_token_loss,
    clip: float = 1.0,
    reduce_each: bool = False,
    reduce: Callable[[], object] = lambda: None,
    beside: Sequence[nn.Module] = (),
    recorder: Recorder | None = None,
    parameters: int | None = None,
) -> Trace:
    """Run one training step on ``par`` and return its trace.

    Take the third step or a later one of a real job: the first also allocates the optimizer's state, and the first two
    compare more between ranks.

    Args:
        par: the model, materialized.
        optimizer: over its parameters, with its state in place.
        batches: the micro-batches, with ``input_ids`` and ``labels``, (B, L) int64 on the model's device.
        loss: the loss, summed over the labels.
        clip: gradients are clipped to this norm.
        reduce_each: gradients are reduced after every micro-batch.
        reduce: called after the last backward; adds gradients up over replicas that are jobs of their own.
        beside: other modules whose parameters are in memory: a teacher.
        recorder: None: one for a real device.
        parameters: of the whole model; None: counted.

    Collective: every rank calls it.
    """
    recorder = recorder or Recorder(axis_groups(par, beside))
    gc.collect()
    held, exact = hold_state(recorder, par, optimizer, batches, beside)
    with _collector_off(), _scopes(recorder, par), recorder:
        recorder.phase("start")
        _step(par, optimizer, batches, loss, clip, recorder, exact, reduce, reduce_each=reduce_each)
        phases = recorder.finished()
    tokens = sum(batch["labels"].numel() for batch in batches)
    return Trace(
        axes=dict(par.spec.axes),
        depth=len(find_blocks(par.module, par.layout)),
        tokens=tokens,
        data_size=par.data_size,
        held=held,
        exact=exact,
        parameters=_parameters(par.module) if parameters is None else parameters,
        phases=phases,
        compiled=any(pass_.compiles for pass_ in par.plan.passes),
    )


def _parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module, those of other stages included."""
    elsewhere = {id(one): one for one in applied(module).elsewhere.values() if isinstance(one, nn.Parameter)}
    return sum(parameter.numel() for parameter in (*module.parameters(), *elsewhere.values()))


def _step(
    par: Parallelized,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, Tensor]],
    loss: Loss,
    clip: float,
    recorder: Recorder,
    exact: dict[str, int],
    reduce: Callable[[], object],
    *,
    reduce_each: bool,
) -> None:
    tokens = sum(batch["labels"].numel() for batch in batches)
    scale = par.token_scale(torch.full((), tokens, dtype=torch.float32, device=par.device))
    mine = (par.split(whole_batch) for whole_batch in batches)
    if (layers := applied(par.module).layers) is not None:
        layers.begins = lambda action: recorder.phase({"F": "forward", "B": "backward"}[action.kind])
        par.backward(mine, lambda module, batch: loss(module, batch) * scale, reduce_each=reduce_each)
    for batch in par.accumulate(mine, reduce_each=reduce_each) if layers is None else ():
        recorder.phase("forward")
        value = loss(par.module, batch) * scale
        recorder.phase("backward")
        value.backward()
        del value
    recorder.name_gradients(par.module)
    exact["gradients"] = sum(
        local_tensor(parameter.grad).nbytes for parameter in par.module.parameters() if parameter.grad is not None
    )
    reduce()
    recorder.phase("optimizer")
    par.clip_grad_norm_(clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def axis_groups(par: Parallelized, beside: Sequence[nn.Module] = ()) -> dict[str, str]:
    """Return the names of the process groups of ``par``, and of parallel modules beside it -> their axes."""
    known: dict[str, str] = {group.group_name: axis for axis, group in par.groups()}
    held = (parameter for module in beside for parameter in module.parameters() if isinstance(parameter, DTensor))
    for mesh in dict.fromkeys(parameter.device_mesh for parameter in held):
        for axis in mesh.mesh_dim_names or ():
            known.setdefault(mesh.get_group(axis).group_name, axis)
    return known


def hold_state(
    recorder: Recorder,
    par: Parallelized,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, Tensor]],
    beside: Sequence[nn.Module],
) -> tuple[dict[str, int], dict[str, int]]:
    """Tell the recorder what is there before the step; returns bytes as allocated, and to the byte."""
    state = [
        value
        for states in optimizer.state.values()
        for value in states.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    counters = [
        value
        for states in optimizer.state.values()
        for value in states.values()
        if isinstance(value, Tensor) and not value.ndim
    ]
    gathered = [
        tensor
        for module in (par.module, *beside)
        if (kept := applied(module).replica_shards)
        for tensor in kept.tensors()
    ]
    parts: dict[str, list[Tensor]] = {
        "parameters": [
            *(_stored(parameter) for module in (par.module, *beside) for parameter in module.parameters()),
            *gathered,
        ],
        "optimizer": [_stored(tensor) for tensor in (*state, *counters)],
        "buffers": [_stored(buffer) for buffer in par.module.buffers()],
        "inputs": [tensor for batch in batches for tensor in batch.values()],
    }
    held = {name: recorder.hold(iter(tensors), name) for name, tensors in parts.items()}
    exact = {
        "parameters": sum(
            local_tensor(parameter).nbytes for module in (par.module, *beside) for parameter in module.parameters()
        )
        + sum(tensor.nbytes for tensor in gathered),
        "gradients": 0,
        "optimizer": sum(local_tensor(tensor).nbytes for tensor in state),
        "buffers": sum(local_tensor(buffer).nbytes for buffer in par.module.buffers()),
    }
    return {name: held.get(name, 0) for name in HELD}, exact


def _stored(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@contextmanager
def _scopes(recorder: Recorder, par: Parallelized) -> Iterator[None]:
    """Let the recorder know in which block the step is, forward, backward and recomputing."""
    handles = []
    for name, block in find_blocks(par.module, par.layout):
        handles.append(block.register_forward_pre_hook(_Enter(recorder, name), with_kwargs=True))
        handles.append(block.register_forward_hook(_Leave(recorder, name), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@final
@dataclass(frozen=True, slots=True)
class _Enter:
    recorder: Recorder
    name: str

    def __call__(self, module: nn.Module, args: object, kwargs: object) -> None:
        recorder, name = self.recorder, self.name
        if recorder.phases[-1][0] == "backward":
            recorder.recomputing = True
            recorder.enter(name)
            return
        recorder.enter(name)
        _at_gradient((args, kwargs), lambda: recorder.enter(""))  # the last thing that a block's backward makes


@final
@dataclass(frozen=True, slots=True)
class _Leave:
    recorder: Recorder
    name: str

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        recorder, name = self.recorder, self.name
        if recorder.phases[-1][0] == "backward":
            recorder.recomputing = False
            return
        recorder.enter("")
        _at_gradient(output, lambda: recorder.enter(name))


def _at_gradient(values: object, then: Callable[[], None]) -> None:
    """Call ``then`` when backward reaches the first of the tensors that has a gradient."""
    tensor = next((leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
    if tensor is not None:
        tensor.register_hook(lambda _: then())


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep Python's cycle collector from freeing memory at moments of its own."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
