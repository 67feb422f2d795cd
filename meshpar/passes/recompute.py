"""ActivationCheckpoint: drop activations in forward and compute them again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshpar._torch.autograd import checkpoint, ignore_profiler_marks, in_checkpoint, recompute_again
from meshpar._torch.calls import eager, while_lives
from meshpar._torch.tensors import BatchNorm, call_hooks
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Facts, Installed, Pass, Stage, block_problems, find_blocks
from meshpar.passes.data.batch_norm import RECOMPUTED
from meshpar.passes.experts.routing import DividedModules
from meshpar.passes.host_reads import read_once, with_variables

Contexts = Callable[[], tuple[Callable[[], AbstractContextManager[Any]], ...]]
"""Returns what makes the contexts of one forward of a block and of its recomputation."""
SAVED_BY_SELECTIVE = (
    *("scaled_dot_product", "flash_attention", "flex_attention", "inductor_compiled_code"),
    *("all_to_all", "reduce_scatter", "all_reduce"),
)
"""Pieces of names of the operators whose results selective recomputation keeps, always: attention, also as compiled by
itself, and what crosses the network."""


@final
@dataclass(frozen=True, slots=True)
class Recomputed:
    """A fact: the blocks whose forward runs once more in backward; if ``selective``, torch lets one backward do so."""

    blocks: Sequence[nn.Module]
    selective: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpoint(Pass):
    """Free activations of blocks in forward and recompute them in backward (arXiv 1604.06174).

    >>> from meshpar import ActivationCheckpoint, FullyShard, Plan
    >>> print(Plan("dp_shard=8", [ActivationCheckpoint(mode="selective"), FullyShard()]))
    dp_shard=8 [ActivationCheckpoint -> FullyShard]

    Args:
        mode: ``"full"`` keeps the input of each block. ``"selective"`` also keeps the results of attention, of
            collectives and of every second matrix product (arXiv 2205.05198, section 5, as torchtitan does).
        every: recompute every n-th block, starting with the first.
        policy: a policy for single operators, ``(ctx, op, *args, **kwargs) -> CheckpointPolicy``. It replaces ``mode``.
        blocks: name patterns or class names of the modules to recompute. Defaults to the layout's blocks.
    """

    mode: Literal["full", "selective"] = "full"
    every: int = 1
    policy: Callable[..., CheckpointPolicy] | None = None
    blocks: tuple[str, ...] | None = None

    name = "ActivationCheckpoint"
    stage = Stage.RECOMPUTE

    @property
    def period(self) -> int:  # type: ignore[override]
        return self.every

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        yield from block_problems(self.name, module, layout, self.blocks)
        if layout.recompute_refusal:
            yield layout.recompute_refusal
        if self.mode not in ("full", "selective"):
            yield f"ActivationCheckpoint(mode={self.mode!r}) is not known; use 'full' or 'selective', or give a policy"
        for name, block in find_blocks(module, layout, self.blocks):
            if call_hooks(block):
                yield (
                    f"{name} has forward hooks, which recomputation would run a second time; register them on a "
                    "module around or in it"
                )
        if self.every < 1:
            yield f"ActivationCheckpoint(every={self.every}) must be 1 or more"

    def install(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh, facts: Facts) -> Installed:
        earlier, divided = facts.find(Recomputed), facts.find(DividedModules)
        blocks = [] if earlier is None else list(earlier.blocks)
        while_lives(module, "profiler marks", ignore_profiler_marks)
        while_lives(module, "recomputation", recompute_again)
        # Random states come first: outside of what selective recomputation records and expects again.
        common: list[Contexts] = [_in_its_context]
        if not runtime.on_host(mesh.device_type):
            common.append(partial(_draw_alike, mesh.device_type))
        if self.policy is not None:
            common.append(partial(_keep_results, partial(create_selective_checkpoint_contexts, self.policy)))
        elif self.mode == "selective":
            common.append(partial(_keep_results, _selective_contexts))
        for number, (_, block) in enumerate(find_blocks(module, layout, self.blocks)):
            if number % self.every == 0 and block not in blocks:
                blocks.append(block)
                contexts, children = list(common), set(block.modules())
                if divided is not None and not children.isdisjoint(divided.meshes):
                    contexts.append(read_once)
                if any(isinstance(child, BatchNorm) for child in children):
                    contexts.append(_count_once)
                checkpoint(block, preserve_rng_state=True, context_fn=partial(_together, contexts))
        selective = self.policy is not None or self.mode == "selective" or (earlier is not None and earlier.selective)
        return Installed(facts=[Recomputed(blocks, selective)])


@eager  # as all that runs around a compiled block
def _together(contexts: Sequence[Contexts]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of one block's forward and of its recomputation, each of which is several."""
    forward, again = zip(*(make() for make in contexts), strict=True)
    return _EnteredAgain(forward), _EnteredAgain(again)


@final
class _EnteredAgain:
    """Several contexts, made and entered once more for each backward through one forward."""

    def __init__(self, makers: Sequence[Callable[[], AbstractContextManager[Any]]]) -> None:
        self._makers, self._entered = makers, list[ExitStack]()

    @eager
    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    @eager
    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _count_once() -> Any:
    """Let batch norms leave their running statistics alone when a block is recomputed."""
    if in_checkpoint():
        raise MeshparError(
            "both the model (torch.utils.checkpoint) and the plan (ActivationCheckpoint) recompute a block, so its "
            "batch norms would count a batch less often than in one process; remove one of the two"
        )
    return nullcontext, partial(with_variables, {RECOMPUTED: True})


def _in_its_context() -> Any:
    """Let a recomputation find the forward's context variables: an accelerator's backward runs in another thread."""
    return nullcontext, partial(with_variables, copy_context())


def _draw_alike(device_type: str) -> Any:
    """Let a block draw the same random numbers twice: torch does so for devices of positional tensors alone."""
    module = torch.get_device_module(device_type)
    return nullcontext, partial(_with_random_state, module, module.get_rng_state())


@contextmanager
def _with_random_state(module: Any, state: torch.Tensor) -> Iterator[None]:
    before = module.get_rng_state()
    module.set_rng_state(state)
    try:
        yield
    finally:
        module.set_rng_state(before)


def _keep_results(make: Callable[[], Any]) -> Any:
    """Let selective recomputation use results of the forward; ``make`` returns both contexts."""
    forward, again = make()
    return lambda: forward, lambda: again


def _selective_contexts() -> Any:
    """Return the contexts of one block's forward and recomputation, each counting its own matrix products."""
    products = {False: 0, True: 0}

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if any(piece in str(op) for piece in SAVED_BY_SELECTIVE):
            return CheckpointPolicy.MUST_SAVE
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            products[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if products[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
