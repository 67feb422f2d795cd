"""Trying a split without processes: each rank of the axis is a thread with a copy of the module, and numbers are
real.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshpar.core import runtime
from meshpar.passes.tensor.collectives import Meeting, SimulatedGroup
from meshpar.passes.tensor.context import Context
from meshpar.passes.untouched import CannotKeep, untouched
from meshpar.step.explain import Explanation
from meshpar.trials.split import SplitTest, Verification, call

Install = Callable[[nn.Module, Any, Any, int], Context | None]
"""``(module, mesh, group, rank) -> context``: splits ``module`` as one rank of the axis holds it."""


def prove(
    module: nn.Module, install: Install, axis: str, size: int, blocks: Sequence[str], batch: object, *, plan_text: str
) -> Verification:
    """Split copies of ``module`` for ``size`` ranks of ``axis`` and try one block of each kind on ``batch``.

    Args:
        module: with values, on the CPU; it stays as it is, and ``size`` copies are made.
        install: splits one copy.
        axis: the axis's name.
        size: its number of ranks.
        blocks: names of the repeated blocks.
        batch: as :meth:`meshpar.Parallelized.verify` takes it.
        plan_text: how messages call the plan.

    Raises:
        Whatever a rank raises first.
    """
    with runtime.simulated(size):
        mesh = torch.distributed.init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))
        meeting = Meeting(size)
        copies = [copy.deepcopy(module).eval() for _ in range(size)]
        groups = [SimulatedGroup(meeting, rank) for rank in range(size)]
        contexts = [
            context for rank in range(size) if (context := install(copies[rank], mesh, groups[rank], rank)) is not None
        ]
        if not contexts:
            why = f"the pass that splits axis {axis!r} cannot be tried without processes (Pass.split)"
            return Verification(modules={}, differences=(), skipped={"": why}, seconds=0.0)
        outcomes: list[Verification | BaseException | None] = [None] * size

        def run(rank: int) -> None:
            try:
                whole = lambda name: module.get_parameter(name).detach()  # noqa: E731
                test = SplitTest(copies[rank], contexts[rank], blocks, whole, kept=lambda *_: nullcontext())
                with test.watch(), torch.enable_grad():
                    explanation = Explanation(copies[rank], plan_text, splits_features=True, unit_pass=None)
                    explanation.told(call, (copies[rank], batch), {})
                outcomes[rank] = test.run()
            except BaseException as error:  # noqa: BLE001  handed to the caller below
                outcomes[rank] = error
                meeting.abort()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        with ExitStack() as stack:
            with suppress(CannotKeep):
                stack.enter_context(untouched(*copies))  # the threads share what hooks and functions hold
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in sorted(errors, key=lambda raised: isinstance(raised, threading.BrokenBarrierError)):
        raise error
    first, *others = (outcome for outcome in outcomes if isinstance(outcome, Verification))
    more = [difference for other in others for difference in other.differences if difference not in first.differences]
    return replace(first, differences=(*first.differences, *more))
