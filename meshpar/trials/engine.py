"""The engine of trials: whether what a pass divides computes what the author wrote (docs/development.md)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.autograd import set_recomputed
from meshpar._torch.calls import uncompiled
from meshpar._torch.in_parts import parts_of
from meshpar._torch.tensors import tree_leaves, tree_map
from meshpar.core.errors import ParallelError
from meshpar.passes.positions.attention import Mask
from meshpar.step.inner_calls import installed
from meshpar.tensors.digests import tensors_in
from meshpar.tensors.placements import local_tensor
from meshpar.trials.copies import copy_block, free, widen

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""How far a result in float32 may be off, relative to the largest value: far above rounding."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An output or gradient (``what``) in which a split block is off by ``size``, relative to the largest value."""

    module: str
    what: str
    size: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of one trial.

    Attributes:
        modules: the blocks that were tried, one of each kind -> the largest relative difference found in each.
        differences: what was beyond the tolerance; empty where the split is right.
        skipped: blocks that could not be tried -> why.
        seconds: how long it took.
    """

    modules: Mapping[str, float]
    differences: tuple[Difference, ...]
    skipped: Mapping[str, str]
    seconds: float

    def __str__(self) -> str:
        title = f"split as written, largest difference ({self.seconds:.1f} s):"
        sizes = [f"{name}: {size:.1e}" for name, size in self.modules.items()]
        return "\n".join([title, *sizes, *map(str, self.differences)])


NOTHING = Verification(modules={}, differences=(), skipped={}, seconds=0.0)


def report(verification: Verification) -> Verification:
    """Return a verification that found nothing; log what could not be tried; raise for differences."""
    for name, why in verification.skipped.items():
        log.warning("the split of %s was not verified: %s", name or "the model", why)
    if verification.differences:
        listed = "\n  ".join(
            f"{difference.module or 'the model'}: {difference.what}, off by {difference.size:.1e}"
            for difference in verification.differences[:8]
        )
        raise ParallelError(
            f"these modules compute other values split over ranks than whole:\n  {listed}\n"
            "check their styles in the layout's tensor-parallel table: a module between two projections that works "
            "across features or heads cannot be split ('colwise_gather' joins the features before it, 'head' those of "
            "the model's output; {pattern: None} leaves it whole); a whole module that sees a part needs 'grad_sum'; "
            "a whole module that sees whole features needs None; a module that mixes positions does not work under "
            "sequence_parallel; a forward that was replaced after plan.apply belongs before it; Plan(..., "
            "verify=False) skips this test"
        )
    return verification


def join_stages(parts: Sequence[Verification]) -> Verification:
    """Return one verification of those of stages."""
    return Verification(
        modules={name: size for part in parts for name, size in part.modules.items()},
        differences=tuple(difference for part in parts for difference in part.differences),
        skipped={name: why for part in parts for name, why in part.skipped.items()},
        seconds=max(part.seconds for part in parts),
    )


@final
@dataclass(slots=True)
class Inputs:
    """The inputs of a block's first call, or why they were not kept; its dropout masks; outputs to reproduce."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    outputs: list[Tensor] | None = None
    masks: dict[str, tuple[Tensor, Tensor, int]] = field(default_factory=dict)
    why: str = ""
    shortened: bool = False

    def first(self, rows: int) -> Inputs:
        """Return copies of the first ``rows`` samples."""

        def copy(value: object) -> Any:
            if isinstance(value, Mask):
                return value if rows >= self.rows else value.first(rows, value.documents.shape[1])
            if not isinstance(value, Tensor):
                # a cache of keys and values, which a block would fill again
                return None if callable(getattr(value, "update", None)) else value
            part = value[:rows] if value.ndim > 1 and len(value) == self.rows else value
            return part.detach().clone().requires_grad_(value.requires_grad)

        return Inputs(tree_map(copy, self.args), tree_map(copy, self.kwargs), rows, shortened=self.shortened)

    def shorten(self, length: int, positions: int) -> Inputs:
        """Return the first ``positions`` of ``length`` ones; of masks and tables with several times as many, alike."""

        def cut(value: object) -> Any:
            if isinstance(value, Mask):
                return value.first(self.rows, value.documents.shape[1] // length * positions)
            if isinstance(value, Tensor):
                # the last dim of (B, L, D) is that of features
                for dim in range(value.ndim - (value.ndim == 3)):
                    if not value.shape[dim] % length:
                        value = value.narrow(dim, 0, value.shape[dim] // length * positions)
            return value

        return Inputs(tree_map(cut, self.args), tree_map(cut, self.kwargs), self.rows, shortened=True)

    def off_by(self, outputs: Sequence[Tensor]) -> float:
        """Return how far a copy's outputs are from what the block returned, of which the copy got some samples."""
        if self.outputs is None or len(self.outputs) != len(outputs):
            return 0.0
        parts = [[local_tensor(parts_of(tensor)[0]) for tensor in tensors] for tensors in (self.outputs, outputs)]
        return max((measure(want[: len(have)], have) for want, have in zip(*parts) if want.ndim > 1), default=0.0)


@final
class BlockRun:
    """One run of a copy of a block: fresh leaves for parameters and inputs, outputs, gradients."""

    def __init__(
        self, block: nn.Module, parameters: Mapping[str, Tensor], inputs: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> None:
        self.parameters = {
            name: parameter.detach().requires_grad_(parameter.is_floating_point())
            for name, parameter in parameters.items()
        }
        self._trained: list[Tensor] = []
        inputs = tree_map(self._leaf, inputs)
        replaced: dict[Tensor, Tensor] = {leaf: leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        replaced |= {parameter: self.parameters[name] for name, parameter in block.named_parameters()}
        replaced |= {buffer: widen(buffer.detach()).clone() for buffer in block.buffers()}
        self.block, (self._args, self._kwargs) = copy_block(block, replaced, inputs)
        for child in self.block.modules():
            # float8's rounding differs between a part and the whole
            if (changes := installed(child)) is not None:
                changes.product = None

    def _leaf(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        leaf = widen(value.detach()).clone()
        if value.requires_grad and value.is_floating_point():
            self._trained.append(leaf.requires_grad_())
        return leaf

    def close(self) -> None:
        """Free the copy."""
        free(self.block)

    def outputs(self) -> list[Tensor]:
        """Run the copy, and return what it computes and trains."""
        device = next((parameter.device.type for parameter in self.parameters.values()), "cpu")
        with torch.enable_grad(), torch.amp.autocast(device, enabled=False):
            output = self.block.forward(*self._args, **self._kwargs)
        return trained(output)

    def gradients(self, outputs: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        """Return the gradients of parameters and inputs by name."""
        named = {**self.parameters, **{f"input {number}": tensor for number, tensor in enumerate(self._trained)}}
        # all leaves are fresh, and torch.autograd.grad does not run through a model's own reentrant checkpoint
        if outputs:
            torch.autograd.backward(outputs, cotangents)
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in named.items()
        }


def trained(output: object) -> list[Tensor]:
    """Return the tensors of an output through which gradients come."""
    return [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]


def call_with(module: nn.Module, batch: object) -> Any:
    """Return ``module`` called with a batch: keywords of a mapping, arguments of a list or tuple, or the one value."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, list | tuple) else module(batch)


@contextmanager
def untrained(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules in evaluation mode without a call of their ``train``, which may merge adapters into weights."""
    training = [child for child in modules if child.training]
    for child in training:
        child.training = False
    try:
        yield
    finally:
        for child in training:
            child.training = True


@contextmanager
def as_evaluated(module: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[set[torch.dtype]]:
    """Let a module run without random numbers, recomputation and compiled blocks; yield the dtypes it computes in."""
    modules = list(module.modules())
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if any((changes := installed(child)) is not None and changes.product is not None for child in modules):
        dtypes.add(torch.float8_e4m3fn)

    def look(block: nn.Module, args: object) -> None:
        dtypes.update(tensor.dtype for tensor in tensors_in(args) if tensor.is_floating_point())

    handles = [block.register_forward_pre_hook(look) for block in blocks]
    with uncompiled(modules), untrained(modules):
        for child in modules:
            set_recomputed(child, False)
        try:
            yield dtypes
        finally:
            for child in modules:
                set_recomputed(child, True)
            for handle in handles:
                handle.remove()


def is_narrow(dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether one of the dtypes has fewer than 32 bits."""
    return any(torch.finfo(dtype).bits < 32 for dtype in dtypes)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def noise(shape: Sequence[int], seed: int) -> Tensor:
    """Return normal random numbers, the same on every rank and device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measure(want: Tensor, have: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference over the largest value (at least ``floor``); infinity for NaN and other shapes."""
    if want.shape != have.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    error = (want.detach().double() - have.detach().double()).abs().max()
    size = float(error) / max(float(want.detach().double().abs().max()), floor, 1e-30)
    return size if size == size else float("inf")
