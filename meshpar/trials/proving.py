"""Trying a split without processes: each rank of the axis is a thread with a copy of the module."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshpar.core import runtime
from meshpar.core.passes import Pass
from meshpar.core.resolved import Resolved
from meshpar.guards.explain import Explanation
from meshpar.passes.tensor.collectives import SimulatedGroup, SimulatedRanks
from meshpar.passes.tensor.context import Context
from meshpar.step.inner_calls import Calls
from meshpar.trials.copies import CannotCopy, copy_block, free, undisturbed
from meshpar.trials.engine import NOTHING, Verification, call_with
from meshpar.trials.split import SplitTest


def prove(
    module: nn.Module, pass_: Pass, resolved: Resolved, axis: str, batch: object, *, plan_text: str
) -> Verification:
    """Let a pass split copies of ``module``, on the CPU, for the ranks of ``axis``, and try a block of each kind."""
    size = resolved.spec.axes[axis]
    with runtime.simulated(size), ExitStack() as stack:
        mesh = torch.distributed.init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))
        ranks = SimulatedRanks(size)
        try:
            copies = [_copy(module, batch) for _ in range(size)]
        except CannotCopy as error:
            return replace(NOTHING, skipped={"": str(error)})
        for copied, _ in copies:
            stack.callback(free, copied)
        installed = (
            pass_.split(copied, resolved.layout, mesh, SimulatedGroup(ranks, rank), rank)
            for rank, (copied, _) in enumerate(copies)
        )
        contexts: list[Context] = [context for context in installed if context is not None]
        if not contexts:
            why = f"the pass that splits axis {axis!r} cannot be tried without processes (Pass.split)"
            return replace(NOTHING, skipped={"": why})

        def read_whole(name: str) -> Tensor:
            return module.get_parameter(name).detach()

        def run(rank: int) -> Verification:
            copied, context = copies[rank][0], contexts[rank]
            try:
                test = SplitTest(copied, context, resolved.blocks, read_whole, kept=lambda *_: nullcontext())
                with test.watch(), torch.enable_grad():
                    explain = Explanation(copied, plan_text, features=context, unit_pass=None).explained
                    Calls(copied, explain).explained(call_with, copies[rank], {})
                return test.run()
            except BaseException:
                ranks.barrier.abort()
                raise

        with undisturbed(module.modules()), ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for raised in sorted(filter(None, errors), key=lambda raised: isinstance(raised, threading.BrokenBarrierError)):
        raise raised
    first, *other_ranks = (future.result() for future in futures)
    more = [
        difference for other in other_ranks for difference in other.differences if difference not in first.differences
    ]
    return replace(first, differences=(*first.differences, *more))


def _copy(module: nn.Module, batch: object) -> tuple[nn.Module, Any]:
    """Return a copy of a module that shares the memory of its parameters, and one of a batch."""
    parameters: dict[Tensor, Tensor] = {
        parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    return copy_block(module, parameters, batch)
