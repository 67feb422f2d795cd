"""Trying a split without processes: each rank of the axis is a thread with a copy of the module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshpar.core import runtime
from meshpar.guards.explain import Explanation
from meshpar.passes.tensor.collectives import Meeting, SimulatedGroup
from meshpar.passes.tensor.context import Context
from meshpar.trials.copies import CannotCopy, copy_block, free, undisturbed
from meshpar.trials.engine import NOTHING, Verification, call_with
from meshpar.trials.split import SplitTest

Install = Callable[[nn.Module, Any, Any, int], Context | None]
"""``(module, mesh, group, rank) -> context``: splits ``module`` as one rank of the axis holds it."""


def prove(
    module: nn.Module, install: Install, axis: str, size: int, blocks: Sequence[str], batch: object, *, plan_text: str
) -> Verification:
    """Split copies of ``module``, on the CPU, for ``size`` ranks of ``axis``, and try a block of each kind."""
    with runtime.simulated(size), ExitStack() as stack:
        mesh = torch.distributed.init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))
        meeting = Meeting(size)
        try:
            copies = [_copy(module, batch) for _ in range(size)]
        except CannotCopy as error:
            return replace(NOTHING, skipped={"": str(error)})
        for copied, _ in copies:
            stack.callback(free, copied)
        groups = [SimulatedGroup(meeting, rank) for rank in range(size)]
        contexts = [
            context
            for rank in range(size)
            if (context := install(copies[rank][0], mesh, groups[rank], rank)) is not None
        ]
        if not contexts:
            why = f"the pass that splits axis {axis!r} cannot be tried without processes (Pass.split)"
            return replace(NOTHING, skipped={"": why})
        outcomes: list[Verification | BaseException | None] = [None] * size

        def run(rank: int) -> None:
            try:
                whole = lambda name: module.get_parameter(name).detach()  # noqa: E731
                test = SplitTest(copies[rank][0], contexts[rank], blocks, whole, kept=lambda *_: nullcontext())
                with test.watch(), torch.enable_grad():
                    explanation = Explanation(copies[rank][0], plan_text, features=contexts[rank], unit_pass=None)
                    explanation.told(call_with, copies[rank], {})
                outcomes[rank] = test.run()
            except BaseException as error:  # noqa: BLE001  handed to the caller below
                outcomes[rank] = error
                meeting.abort()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        with undisturbed(module.modules()):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for raised in sorted(errors, key=lambda raised: isinstance(raised, threading.BrokenBarrierError)):
        raise raised
    first, *others = (outcome for outcome in outcomes if isinstance(outcome, Verification))
    more = [difference for other in others for difference in other.differences if difference not in first.differences]
    return replace(first, differences=(*first.differences, *more))


def _copy(module: nn.Module, batch: object) -> tuple[nn.Module, Any]:
    """Return a copy of a module that shares the memory of its parameters, and one of a batch."""
    parameters: dict[Tensor, Tensor] = {
        parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    return copy_block(module, parameters, batch)
