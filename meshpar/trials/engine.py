"""The engine of trials: what a pass divides computes what the author wrote, found out before anybody trusts it.

Names cannot tell whether code survives a split: it may take a standard deviation over features, mix positions, choose
among all experts, or let documents see each other. So a trial computes both, and compares. There are four: of features
(``split``), of positions (``positions``), of experts (``experts``), and of documents (``meshpar.training.documents``).
Each says what it records and what must be equal; the rest is here, in ``copies`` and in ``gathered_reads``.

1. **Record.** The first forward is the user's own, and it runs once. Hooks keep copies of what one block of each kind
   is called with: its first samples where inputs are large. Experts are tried on noise of the same shapes, positions on
   the beginning of the first batch, documents on a few tokens.
2. **Compute.** Nothing runs on the state of the user's module. A block is copied (``copies.copy_block``): attributes,
   buffers and what functions hold are the copy's, parameters are fresh leaves, hooks are left out. One copy computes as
   its author wrote it, with whole weights, each gathered while it is read, so that no rank holds a whole block
   (``gathered_reads``). The other computes as the passes left it, with this rank's parts. Both are in evaluation mode
   and in float32 or wider, start from the same random states, and get noise as the gradients that come. They are made
   when they are tried, of the block as it is then: a forward or an attribute that somebody replaced after
   ``plan.apply`` is in them, so that what is tried is what trains. What needs the whole model (positions, documents,
   ``par.verify``, which finds the inputs of blocks) runs it on a copy of its state (``copies.copied_state``), because
   FSDP2 gathers by hooks.
3. **Compare.** Outputs and gradients, each joined over the ranks or cut to this rank's part, relative to the largest
   value; the narrowest dtype in which a model computes decides how far they may be off.
4. **Agree.** A rank never raises alone: whether a block could not be copied, failed or ran out of memory is exchanged
   first, and every rank of the axis goes the same way.
5. **Report.** A difference is an error that names the module, its size and the remedy. What could not be tried is named
   in a warning: a block that cannot be copied, or that does not run unsplit.

``plan.prove`` uses the same engine without processes: each rank of the axis is a thread with a copy of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.calls import uncompiled
from meshpar._torch.pytree import tree_leaves, tree_map
from meshpar._torch.recompute import set_recomputed
from meshpar.core.errors import ParallelError
from meshpar.passes.tensor.collectives import gather_values
from meshpar.step.forwards import installed
from meshpar.tensors.pytrees import leaves
from meshpar.trials.copies import copy_block, free, widen

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""How far a result in float32 may be off, relative to the largest value: far above rounding, far below what a wrong
split does.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which a split block differs from the whole one.

    Attributes:
        module: the block.
        what: the output or the gradient that differs.
        size: the largest difference over the largest value.
    """

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
        tried = [f"{name}: {size:.1e}" for name, size in self.modules.items()]
        return "\n".join(
            [f"split as written, largest difference ({self.seconds:.1f} s):", *tried, *map(str, self.differences)]
        )


NOTHING = Verification(modules={}, differences=(), skipped={}, seconds=0.0)


def report(verification: Verification) -> Verification:
    """Return a verification that found nothing; log what could not be tried.

    Raises:
        ParallelError: naming the modules, the size of the differences and what to look at.
    """
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
    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point() and tensor.requires_grad]


def call_with(module: nn.Module, batch: object) -> Any:
    """Return ``module`` called with a batch: keywords of a mapping, arguments of a list or tuple, or the one value."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, list | tuple) else module(batch)


@contextmanager
def as_evaluated(module: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[set[torch.dtype]]:
    """Let a module run without random numbers, recomputation and compiled blocks.

    Yields:
        The dtypes in which it computes: those of its parameters, float8 where products have it, and, as it runs, those
        of what ``blocks`` are called with.
    """
    modules = list(module.modules())
    training = [child for child in modules if child.training]
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if any((changes := installed(child)) is not None and changes.product is not None for child in modules):
        dtypes.add(torch.float8_e4m3fn)

    def look(block: nn.Module, args: object) -> None:
        dtypes.update(leaf.dtype for leaf in leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point())

    handles = [block.register_forward_pre_hook(look) for block in blocks]
    with uncompiled(modules):
        for child in modules:
            child.training = False
            set_recomputed(child, False)
        try:
            yield dtypes
        finally:
            for child in modules:
                set_recomputed(child, True)
            for child in training:
                child.training = True
            for handle in handles:
                handle.remove()


def is_narrow(dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether one of the dtypes has fewer than 32 bits."""
    return any(torch.finfo(dtype).bits < 32 for dtype in dtypes)


def on_any_rank(true: bool, device: torch.device, group: Any) -> bool:
    """Return whether something is true on any rank of a group. Collective over it."""
    return bool(gather_values(torch.tensor([true], device=device), group).any())


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def noise(shape: Sequence[int], seed: int) -> Tensor:
    """Return normal random numbers, the same on every rank and device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measure(want: Tensor, have: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference over the largest value, or over ``floor`` where that is larger; infinity for other
    shapes and what is not a number.
    """
    if want.shape != have.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    error = (want.detach().double() - have.detach().double()).abs().max()
    size = float(error) / max(float(want.detach().double().abs().max()), floor, 1e-30)
    return size if size == size else float("inf")
