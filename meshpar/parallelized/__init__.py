"""Parallelized: a module that trains on a mesh, its weights (allocate, fill, read, load, average, move and publish
them), and the operations that need the mesh, ``steps.py`` and ``ranks.py``.

A call of ``par.module`` does not come here: it goes through ``step/forward.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshpar.core import registry
from meshpar.core.errors import MeshparError
from meshpar.core.passes import Role
from meshpar.core.patterns import class_name
from meshpar.exchange.ranks import check_replicas
from meshpar.losses.chunked import TokenLogProbs, token_log_probs
from meshpar.parallelized.ranks import ModuleOnMesh
from meshpar.parallelized.steps import TrainingSteps
from meshpar.passes.data.instead_of_fsdp2 import ReplicaShards
from meshpar.passes.pipeline.running import Layers
from meshpar.process.waiting import reads_of
from meshpar.state import initialize
from meshpar.state.averaging import Averaged, Decay, averages_of
from meshpar.state.description import Description, describe
from meshpar.state.full import gather_state, scatter_state
from meshpar.state.offloading import on_the_host
from meshpar.tensors.digests import digest_of_elements
from meshpar.tensors.placements import like, sharded_axes, whole
from meshpar.trials import split_test
from meshpar.trials.copies import CannotCopy, copied_state
from meshpar.trials.engine import NOTHING, Verification, call_with, join_stages, report, untrained
from meshpar.weights import WeightSource


class ModuleWeights(ModuleOnMesh):
    """A module whose weights are read and written as those of one process."""

    @property
    def home(self) -> torch.device:
        """The device whose memory holds the parameters between steps: the host's where a pass keeps them there."""
        return torch.device("cpu") if any(pass_.keeps_on_host for pass_ in self.plan.passes) else self.device

    def materialize(
        self,
        *,
        seed: int | None = None,
        weights: WeightSource | None = None,
        ignore: Collection[str] = (),
        cast: bool = False,
    ) -> Self:
        """Allocate parameters and buffers that are on the meta device, fill them, and return self.

        Args:
            seed: draw initial weights. A seed gives the same weights on every mesh, bit for bit, on one type of device.
                Parts of the module that have values keep them.
            weights: read weights, each rank its part, by the names of the module or of ``layout.weights``.
                Floating-point values are converted to the model's dtype.
            ignore: patterns of tensors, or of modules, in ``weights`` to leave out (``lm_head``).
            cast: also convert float8 and integer values to other dtypes, without scales that the files may contain.

        Raises:
            MeshparError: neither or both of ``seed`` and ``weights`` are given, or the weights do not fit: lists
                missing and unexpected tensors, other shapes and dtypes.
            LayoutError: a module has no initialisation.
        """
        if (seed is None) == (weights is None):
            raise MeshparError(f"materialize requires either seed= or weights=, got seed={seed} and weights={weights}")
        if isinstance(weights, (str, Path)):
            raise MeshparError(
                "weights is a path; expected an object that reads it: "
                f"meshpar.checkpoints.Safetensors({str(weights)!r})"
            )
        if seed is not None and (ignore or cast):
            raise MeshparError(
                f"ignore= and cast= require weights=, and a seed was given; got ignore={list(ignore)} and cast={cast}"
            )
        reads_of(self.module).wait("par.materialize()")
        missing = initialize.without_memory(self.module)
        if seed is not None and not missing:
            raise MeshparError(
                "the module has its weights already, and a seed would replace them; build it on meta to draw new ones"
            )
        with self.run.moving():
            initialize.allocate(self.module, self.device, self.home)
        if weights is not None:
            fit = initialize.compared(self.module, self.layout, weights, ignore=ignore, cast=cast)
            initialize.from_source(self.module, self.layout, fit, self.device, missing)
        else:
            assert seed is not None
            initialize.from_seed(self.module, self.layout, seed, self.device, missing)
        return self

    def like(self, tensor: Tensor, values: Any) -> Tensor:  # noqa: ANN401 - what torch.as_tensor takes
        """Place a mask, noise or a value as a parameter or its gradient is placed, so that operators take both.

        ``parameter.grad.mul_(par.like(parameter, mask))``

        Args:
            tensor: a parameter, a gradient or what was computed from them, on any mesh or in one process.
            values: a whole tensor, an array or a number, the same on every rank, that expands to the shape of
                ``tensor``; or a parameter of another module, such as the student of a teacher.

        Returns:
            A tensor of its own, of the dtype of ``values``: this rank's part as a DTensor, or plain as ``tensor`` is.

        Collective where ``values`` is divided in another way than ``tensor``.
        """
        return like(tensor, values)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole of a parameter, a gradient or what was computed from them; a plain tensor as it is.

        Where gradients are enabled they reach ``tensor`` as by ``tensor.full_tensor()``. The result may share memory
        with ``tensor``: clone what you keep. ``tensor.copy_(par.like(tensor, whole))`` writes it back.

        Collective where ``tensor`` is divided: every rank that holds a part of it calls it.
        """
        gathered = whole(tensor)
        plain: Callable[[], Tensor] | None = getattr(gathered, "meshpar_plain", None)  # of a stage: see its guard
        return gathered if plain is None else plain()

    def state_dict(self, *, full: bool = False, everywhere: bool = False) -> dict[str, Any]:
        """Return the module's state: this rank's shards as DTensors, or whole tensors in host memory.

        Args:
            full: gather whole tensors to rank 0, one at a time. The other ranks get an empty dict.
            everywhere: with ``full``: gather to every rank.

        Collective where ``full``: every rank calls it.
        """
        reads_of(self.module).check("par.state_dict()")
        if not full:
            return dict(self.module.state_dict())
        self.run.agree("par.state_dict(full=True)")
        return gather_state(self.module, everywhere=everywhere)

    def load_state_dict(self, state: Mapping[str, Any], *, from_rank_0: bool = False, strict: bool = True) -> None:
        """Copy whole tensors (or DTensors) into the module by name, each rank its part.

        Args:
            state: name -> whole tensor, as in the ``state_dict()`` of a plain module.
            from_rank_0: only rank 0 has ``state`` and sends one tensor at a time. The other ranks may pass anything.
            strict: raise an error for missing and unexpected names.

        Raises:
            MeshparError: on every rank, with everything that does not fit. Nothing is copied.

        Collective where ``from_rank_0``: every rank calls it.
        """
        reads_of(self.module).wait("par.load_state_dict()")
        scatter_state(self.module, state, self.device, from_rank_0=from_rank_0, strict=strict)

    def averaged(self, decay: Decay | None = None, **options: Any) -> Averaged:
        """Return a moving average of the parameters: :class:`meshpar.state.averaging.Averaged` with ``options``."""
        return Averaged(self, decay, **options)

    def offloaded(self, optimizer: Optimizer | Collection[Optimizer] = ()) -> AbstractContextManager[None]:
        """Free the device's memory for a ``with`` block, such as for an engine on the same device.

        Parameters, buffers, gradients, moving averages and the optimizers' state are in host memory meanwhile,
        page-locked on an accelerator's host, and come back bit for bit. Waits for a save in the background, which reads
        them.

        Raises:
            MeshparError: at the end, where the device has no memory for the values. They stay in host memory: free the
                device's memory, then run ``with par.offloaded(): pass``.
        """
        self.reshard()
        module, optimizers = self.module, [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
        tensors += averages_of(module)
        if (shards := self.run.find(ReplicaShards)) is not None:
            tensors += shards.held()
        states = [state for optimizer_here in optimizers for state in optimizer_here.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return on_the_host(module, tensors, self.device)

    def published(
        self,
        dtype: torch.dtype | None = None,
        bucket: int | str = "256MiB",
        adapters: str = "merged",
        averaged: Averaged | None = None,
        **options: Any,
    ) -> Any:  # noqa: ANN401 - of a floor above
        """Return a stream of whole tensors by published names: :class:`meshpar.checkpoints.Published` with ``options``.

        Collective where a pass divides layers: every rank calls it.
        """
        stream = registry.plugin(registry.STREAMS, "published")
        return stream(self, dtype, bucket, adapters, averaged, **options)

    def check_replicas(self) -> None:
        """Compare hashes of the parameters and buffers that must be equal, bit for bit, on several ranks.

        Raises:
            MeshparError: on every rank; names the tensors and the ranks that differ.

        Collective: every rank calls it.
        """
        reads_of(self.module).check("par.check_replicas()")
        self.reshard()
        self.run.agree("par.check_replicas")
        state, layers = dict(initialize.state(self.module)), self.resolved.divided(Role.LAYERS)
        check_replicas(state, self.resolved.held, other_names=bool(layers))

    def digest(self) -> int:
        """Return a number, below 2**52, made of the bits of all parameters: equal on every mesh for equal weights.

        ``meshpar train`` writes it with ``training.digest_every``. A difference by chance has the odds 2**-52.

        Collective: every rank calls it.
        """
        reads_of(self.module).check("par.digest()")
        self.reshard()
        self.run.agree("par.digest")
        groups = {axis: self._held_on.get_group(axis) for axis in self.resolved.held.axes}
        layers = self.run.find(Layers)
        elsewhere = set[int]() if layers is None else layers.counted_elsewhere()
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for name, parameter in self.module.named_parameters():
            apart = (*self.resolved.divided(Role.LAYERS), *sharded_axes(parameter))
            first = not any(group.rank() for axis, group in groups.items() if axis not in apart)
            if first and id(parameter) not in elsewhere:
                total += digest_of_elements(parameter, name).to(self.device)
        for group in groups.values():
            dist.all_reduce(total, group=group)
        return int(total) % 2**52


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

        with self.run.without_trials(), untrained(self.module.modules()), ExitStack() as stack:
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
