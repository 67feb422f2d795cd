"""A training step under the recorder, the same in the simulation and in a real job, so that both can be compared."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshpar._torch.tensors import held_part, tree_leaves
from meshpar.core.errors import MeshparError
from meshpar.core.passes import find_blocks
from meshpar.forecasting.recorder import Recorder
from meshpar.forecasting.trace import HELD, Trace
from meshpar.losses.token_loss import token_loss
from meshpar.parallelized import Parallelized
from meshpar.passes.data.instead_of_fsdp2 import ReplicaShards
from meshpar.passes.pipeline.portion import all_parameters
from meshpar.passes.pipeline.running import Layers
from meshpar.step.forward import fact_of
from meshpar.tensors.placements import local_tensor

_Batches = Sequence[Mapping[str, Tensor]]


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
        examples: ``tokens`` of packed text, ``pairs`` of a text and its target, or a text with one of ``labels``.
        target: tokens of a pair's target.
        reduce_each: gradients are reduced after every micro-batch.
        documents: a packed sample has several documents: the model gets ``position_ids``, and attends by a mask.
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
        if self.examples not in (kinds := self._labels()):
            raise MeshparError(f"Batch(examples={self.examples!r}) is not known; use one of {', '.join(kinds)}")

    @classmethod
    def of(cls, batch: Batch | Mapping[str, Tensor]) -> Batch:
        """Return a batch's shape; a mapping is one micro-batch with ``input_ids`` (B, L), else MeshparError."""
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
        return math.prod(self._labels()[self.examples]) * self.micro_batch * self.accumulate

    def _labels(self) -> dict[str, tuple[int, ...]]:
        """Return kind of examples -> shape of the labels of one sample."""
        return {"tokens": (self.sequence,), "pairs": (self.target,), "labels": ()}

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return one micro-batch as a model takes it, int64 without meaning: (B, L), targets (B, T), labels (B)."""
        sizes: dict[str, tuple[int, ...]] = {"input_ids": (self.micro_batch, self.sequence)}
        if self.examples != "tokens":
            sizes["attention_mask"] = sizes["input_ids"]
        if self.documents:
            sizes["position_ids"] = sizes["input_ids"]
        if self.examples == "pairs":
            sizes["decoder_input_ids"] = (self.micro_batch, self.target)
        sizes["labels"] = (self.micro_batch, *self._labels()[self.examples])
        return {name: torch.empty(size, dtype=torch.int64, device=device) for name, size in sizes.items()}


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
    optimizer: Optimizer,
    batches: _Batches,
    *,
    loss: Loss = summed_token_loss,
    clip: float = 1.0,
    reduce_each: bool = False,
    reduce: Callable[[], object] = lambda: None,
    beside: Sequence[nn.Module] = (),
    recorder: Recorder | None = None,
    parameters: int | None = None,
) -> Trace:
    """Run one training step on ``par`` and return its trace. Collective: every rank calls it.

    Take the third step or a later one of a real job: the first allocates the optimizer's state, and the first two
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
    """
    recorder = recorder or Recorder(axis_groups(par, beside))
    gc.collect()
    held_bytes, exact = hold_state(recorder, par, optimizer, batches, beside)
    tokens = sum(batch["labels"].numel() for batch in batches)

    def step() -> None:
        scale = par.token_scale(torch.full((), tokens, dtype=torch.float32, device=par.device))
        parts = (par.split(batch) for batch in batches)
        if (layers := par.run.find(Layers)) is not None:
            layers.begins = lambda action: recorder.phase({"F": "forward", "B": "backward"}[action.kind])
            par.backward(parts, lambda module, batch: loss(module, batch) * scale, reduce_each=reduce_each)
        for batch in par.accumulate(parts, reduce_each=reduce_each) if layers is None else ():
            recorder.phase("forward")
            value = loss(par.module, batch) * scale
            recorder.phase("backward")
            value.backward()
            del value
        recorder.name_gradients(par.module)
        grads = [parameter.grad for parameter in par.module.parameters() if parameter.grad is not None]
        exact["gradients"] = sum(local_tensor(grad).nbytes for grad in grads)
        del grads
        reduce()
        recorder.phase("optimizer")
        par.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    collects = gc.isenabled()
    gc.disable()  # the collector would free memory at moments of its own
    try:
        with _scopes(recorder, par), recorder:
            recorder.phase("start")
            step()
            phases = recorder.finished()
    finally:
        if collects:
            gc.enable()
    whole = all_parameters(par.module)  # those of other stages included
    return Trace(
        axes=dict(par.spec.axes),
        depth=len(find_blocks(par.module, par.layout)),
        tokens=tokens,
        data_size=par.data_size,
        held=held_bytes,
        exact=exact,
        parameters=sum(parameter.numel() for parameter in whole) if parameters is None else parameters,
        phases=phases,
        compiled=any(pass_.compiles for pass_ in par.plan.passes),
    )


def axis_groups(par: Parallelized, beside: Sequence[nn.Module] = ()) -> dict[str, str]:
    """Return the names of the process groups of ``par``, and of parallel modules beside it -> their axes."""
    axes: dict[str, str] = {group.group_name: axis for axis, group in par.groups()}
    parallel = (parameter for module in beside for parameter in module.parameters() if isinstance(parameter, DTensor))
    for mesh in dict.fromkeys(parameter.device_mesh for parameter in parallel):
        for axis in mesh.mesh_dim_names or ():
            axes.setdefault(mesh.get_group(axis).group_name, axis)
    return axes


def hold_state(
    recorder: Recorder, par: Parallelized, optimizer: Optimizer, batches: _Batches, beside: Sequence[nn.Module]
) -> tuple[dict[str, int], dict[str, int]]:
    """Tell the recorder what is there before the step; returns bytes as allocated, and to the byte."""
    modules = (par.module, *beside)
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    values.sort(key=lambda value: not value.ndim)  # counters last
    parameters: list[Tensor] = [parameter for module in modules for parameter in module.parameters()]
    facts = (fact_of(module, ReplicaShards) for module in modules)
    parameters += (tensor for shards in facts if shards for tensor in shards.tensors())
    parts = {"parameters": parameters, "optimizer": values, "buffers": list(par.module.buffers())}
    exact = {name: sum(local_tensor(tensor).nbytes for tensor in tensors) for name, tensors in parts.items()}
    exact["optimizer"] -= sum(local_tensor(value).nbytes for value in values if not value.ndim)
    parts["inputs"] = [tensor for batch in batches for tensor in batch.values()]
    held_bytes = {name: recorder.hold(map(held_part, tensors), name) for name, tensors in parts.items()}
    return {name: held_bytes.get(name, 0) for name in HELD}, exact | {"gradients": 0}


@contextmanager
def _scopes(recorder: Recorder, par: Parallelized) -> Iterator[None]:
    """Let the recorder know in which block the step is, forward, backward and recomputing."""

    def begin(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.recomputing = recorder.phases[-1][0] == "backward"
        recorder.enter(name)
        if not recorder.recomputing:
            _at_gradient((args, kwargs), lambda: recorder.enter(""))  # the last thing that a block's backward makes

    def end(name: str, _: nn.Module, args: Any, output: Any) -> None:
        if recorder.phases[-1][0] == "backward":
            recorder.recomputing = False
            return
        recorder.enter("")
        _at_gradient(output, lambda: recorder.enter(name))

    with ExitStack() as stack:
        for name, block in find_blocks(par.module, par.layout):
            stack.callback(block.register_forward_pre_hook(partial(begin, name), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(partial(end, name), always_call=True).remove)
        yield


def _at_gradient(values: object, then: Callable[[], None]) -> None:
    """Call ``then`` when backward reaches the first of the tensors that has a gradient."""
    tensor = next((leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
    if tensor is not None:
        tensor.register_hook(lambda _: then())
