"""Parallelized: a module that trains on a mesh, and the operations that need the mesh, a subject a file.

A call of ``par.module`` does not come here: it goes through ``step/forward.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, final

import torch
from torch import nn

from meshpar.core.patterns import class_name
from meshpar.losses.chunked import TokenLogProbs, token_log_probs
from meshpar.parallelized.steps import TrainingSteps
from meshpar.parallelized.weights import ModuleWeights
from meshpar.passes.pipeline.running import Layers
from meshpar.state.description import Description, describe
from meshpar.step.inner_calls import evaluating
from meshpar.trials.copies import CannotCopy, copied_state
from meshpar.trials.engine import NOTHING, Verification, call_with, join_stages, report
from meshpar.trials.split import split_test


@final
class Parallelized(TrainingSteps, ModuleWeights):
    """Train a module on a mesh. :meth:`meshpar.Plan.apply` returns this object.

    Attributes:
        module: the module that was passed to ``apply``, with the same parameter names and ``state_dict`` keys.
        mesh: the DeviceMesh with the plan's axes.
        spec: the resolved mesh as data.
        plan: the plan.
        resolved: the plan for this model and number of ranks.
        layout: the description of the model.
        device: the device of this rank.
        data_axes: the axes whose ranks get different data.
        run: what happens around every forward, backward and step, and what the passes know.
    """

    def verify(self, batch: object) -> Verification:
        """Compare one split block of each kind with the unsplit block on a batch, as the first forward does by itself.

        A block runs twice on the same input, in float32 or wider: as its author wrote it, with whole weights, at most
        one block's at a time, and split. The module does not change.

        Args:
            batch: keyword arguments of the forward as a mapping, its arguments as a list or tuple, or its one argument.

        Returns:
            The modules that were compared, with the largest difference of each; empty if no features are split.

        Raises:
            ParallelError: names the modules that differ, the size of the difference and the style to check.

        Collective: every rank calls it.
        """
        test, stage = split_test(self.module, self.resolved.blocks, self.device, self.run.facts), self.run.find(Layers)
        if test is None:
            return NOTHING

        def run_alone(module: nn.Module, part: object) -> None:
            call_with(module, part)

        with self.run.without_trials(), evaluating(self.module), ExitStack() as stack:
            # a module that cannot be copied runs as in a forward of the user's own
            with suppress(CannotCopy):
                batch = stack.enter_context(copied_state(self.module, batch))
            with test.eagerly(), test.watch(), torch.enable_grad():
                if stage is None:
                    test.returned(call_with(self.module, batch))
                else:
                    stage.forward([batch], run_alone, self.device)
        self.reshard()
        with self.run.calls.inside():
            verification = test.run()
        return report(verification if stage is None else join_stages(stage.gather(verification)))

    def register_method(self, name: str) -> None:
        """Let ``module.name(...)`` run like a call of the module: with gathered weights and the plan's checks.

        ``encode``, ``decode``, ``embed``, ``encode_*``, ``decode_*``, ``forward_*`` and ``get_*_features`` are
        registered already, and ``module.forward(...)`` is a call of the module, with its hooks.

        Raises:
            MeshparError: the module has no such method.
        """
        self.run.calls.register_method(name)

    def token_log_probs(self, batch: Mapping[str, Any], *, temperature: float = 1.0, **options: Any) -> TokenLogProbs:
        """Return the log-probability of each label of ``batch`` and the entropy of each position, with gradients.

        Values are those of one process, on every mesh, and no rank holds all logits. Where positions are split, pass a
        part of :meth:`split`: values are of these positions. Where layers are divided, call it in the ``loss`` of
        :meth:`backward`; a call under ``torch.no_grad()`` gives all stages the values.

        Args:
            batch: the keyword arguments of the module, and ``labels`` (B, L): the token that each position predicts,
                -100 where none counts.
            temperature: logits are divided by it.
            options: other arguments of :func:`meshpar.losses.chunked.token_log_probs`.

        Returns:
            ``log_probs`` and ``entropy``, (B, L) in float32.

        Collective: every rank calls it.
        """

        def compute(module: nn.Module, given: Mapping[str, Any]) -> TokenLogProbs:
            return token_log_probs(module, given, temperature=temperature, **options)

        layers = self.run.find(Layers)
        if layers is not None and not layers.edges.runs and not torch.is_grad_enabled():
            return self.forward([batch], compute)[0]
        return compute(self.module, batch)

    def describe(self) -> Description:
        """Return a table of the parameters that this rank stores, with bytes by block and totals. ``print`` shows it.

        After every call of a loop, this rank's tensors take these bytes: gradients from a backward to ``zero_grad``,
        optimizer state from the first step. Beside them live at most 256 bytes, 16 bytes for each parameter, and the
        padding of each part to the largest rank's. :class:`meshpar.testing.Memory` asserts it. Three states need more:

        - between a forward and its backward, and from an error in a backward to the next forward: activations and
          gathered units;
        - during ``apply`` on a module with weights: one whole model and its largest parameter (at least 4 MiB);
        - with ``CheckpointManager(async_=True)``: a copy of what this rank saves, in host memory, until the manager is
          closed.
        """
        self.reshard()
        return describe(self.module, self.layout, str(self.plan))

    def __repr__(self) -> str:
        return f"Parallelized({class_name(self.module)}, {self.plan})"
