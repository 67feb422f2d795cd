"""Parallelized: a module that trains on a mesh, and the operations that need the mesh.

A call of ``par.module`` does not come here: it goes through ``step/run.py``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, final, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshpar._torch.groups import share_timeout
from meshpar._torch.patches import while_lives
from meshpar.core import registry
from meshpar.core.errors import MeshparError
from meshpar.core.passes import Pass, Role, unmatched
from meshpar.core.patterns import class_name, matches, modules_around
from meshpar.core.waiting import reads_of
from meshpar.losses.log_probs import TokenLogProbs, token_log_probs
from meshpar.losses.token_loss import Found as Losses
from meshpar.losses.token_loss import Totals
from meshpar.passes.data.replica_shards import ReplicaShards
from meshpar.passes.elsewhere import tensors_elsewhere
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.positions.batches import positions, selected, with_positions
from meshpar.passes.tensor import random
from meshpar.state import initialize
from meshpar.state.averaging import Averaged, Decay, averages_of
from meshpar.state.description import Description, describe
from meshpar.state.full import gather_state, scatter_state
from meshpar.state.offloading import on_the_host
from meshpar.step.calls import compiled_form, watch_compiled
from meshpar.step.forwards import evaluating
from meshpar.step.gathered_weights import Gathering
from meshpar.step.placements import clip_grad_norms_, like, whole
from meshpar.step.rank_digests import check_replicas
from meshpar.step.run import Run
from meshpar.trials.copies import CannotCopy, copied_state
from meshpar.trials.engine import NOTHING, Verification, call_with, join_stages, report
from meshpar.trials.split import split_test
from meshpar.weights import WeightSource

Micro = TypeVar("Micro")
Values = TypeVar("Values")
Found = TypeVar("Found")


class Planned(Protocol):
    """The part of :class:`meshpar.Plan` that a parallel module uses."""

    @property
    def passes(self) -> tuple[Pass, ...]: ...


@final
class Parallelized:
    """Train a module on a mesh. :meth:`meshpar.Plan.apply` returns this object.

    Attributes:
        module: the module that was passed to ``apply``. Its parameter names and ``state_dict`` keys are unchanged.
        mesh: the DeviceMesh with the plan's axes.
        spec: the resolved mesh as data.
        plan: the plan.
        resolved: the plan for this model and number of ranks.
        layout: the description of the model.
        device: the device of this rank.
        data_axes: the axes whose ranks get different data.
        run: what happens around every forward, backward and step, and what the passes know.
    """

    def __init__(self, run: Run, plan: Planned) -> None:
        self.run, self.plan, self.module, self.resolved, self.device = run, plan, run.module, run.resolved, run.device
        module, resolved = run.module, run.resolved
        self.mesh, self.spec, self.layout = run.meshes[resolved.spec], resolved.spec, resolved.layout
        self.data_axes = resolved.roles[Role.SAMPLES]
        self._held_on = run.meshes[resolved.held]
        self._place = resolved.spec.coordinates(dist.get_rank())
        while_lives(module, "compiled", watch_compiled)
        divided = resolved.divided(Role.POSITIONS)
        self._splitters = [(pass_, axis) for pass_ in plan.passes for axis in divided if axis in pass_.axes]

    @property
    def data_size(self) -> int:
        """Number of different batches that the ranks get at a time."""
        return math.prod(self.spec.axes[axis] for axis in self.data_axes)

    @property
    def data_rank(self) -> int:
        """Index of this rank's batch, from 0 to ``data_size`` - 1. Ranks that differ only on other axes get the same
        batch.
        """
        return self._index(self.data_axes)

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks with different samples, in the order of ``data_rank``: those that differ from this one on
        ``data_axes`` alone, and share its place on every other axis (``cp``, ``tp``, ``pp``).

        Exchange values of your own there (``dist.all_gather(parts, features, group=par.data_group)``): the ranks of the
        world also have copies of a sample. Collective where it is read first: every rank reads it.
        """
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank in range(dist.get_world_size()):
            place = self.spec.coordinates(rank)
            ranks.setdefault(tuple(place[axis] for axis in place if axis not in self.data_axes), []).append(rank)
        self.run.agree("par.data_group")
        group, _ = dist.new_subgroups_by_enumeration(list(ranks.values()))
        share_timeout([group])
        return cast("dist.ProcessGroup", group)

    @property
    def loss_size(self) -> int:
        """Number of different losses that the ranks have at a time: of different samples, or of different positions of
        the same samples.

        Gradients are averaged over these ranks, and :meth:`data_sum` sums over them.
        """
        return math.prod(self.resolved.held.axes[axis] for axis in self.resolved.averaged)

    @property
    def loss_rank(self) -> int:
        """Index of this rank's loss, from 0 to ``loss_size`` - 1."""
        held = self.resolved.held.axes
        return self._index(axis for axis in self.spec.axes if axis in self.data_axes or axis not in held)

    def _index(self, axes: Iterable[str]) -> int:
        """Return the index of this rank among those that differ on ``axes``, outermost first."""
        index = 0
        for axis in axes:
            index = index * self.spec.axes[axis] + self._place[axis]
        return index

    def groups(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Yield this rank's process groups with their axes. A group over a data axis and over positions has the data
        axis's name.
        """
        for mesh in self.run.meshes.values():
            yield from ((axis, mesh.get_group(axis)) for axis in mesh.mesh_dim_names or ())
        if (shards := self.run.find(ReplicaShards)) is not None:
            yield from shards.groups

    def split(self, batch: Values, dim: int = 1) -> Values:
        """Return this rank's positions of a batch, where a pass splits positions; else the batch itself.

        Every tensor with a ``dim`` is split along it, in mappings, lists and tuples, too. A mapping for a model that
        takes ``position_ids`` gets those of this rank's positions. Split labels that are aligned with the positions,
        and compute the loss from the logits: a model that shifts labels itself would lose one at the end of each part.

        Args:
            batch: the whole batch of this data rank, the same on every rank that shares it.
            dim: the dimension of positions: 1 for (B, L) tensors.

        Raises:
            MeshparError: tensors of different lengths, a length that the ranks do not divide, or ranks with different
                batches.

        Collective in the first calls: every rank calls it.
        """
        if not self._splitters:
            return batch
        for moment in self.run.moments:
            moment.before_split(batch)
        tensors = with_positions(batch, dim)
        mine = torch.arange(tensors[0].shape[dim])
        for splitter, axis in self._splitters:
            mine = mine[positions(splitter, len(mine), axis, self.spec.axes[axis], self._place[axis])]
        if dim == 1:
            self.run.lengths.add(len(mine))
        part = selected(batch, mine, dim)
        counts = (
            self.layout.attention.counts_positions
            or "position_ids" not in inspect.signature(self.module.forward).parameters
        )
        if isinstance(part, dict) and "position_ids" not in part and not counts:
            part["position_ids"] = mine.to(tensors[0].device, non_blocking=True)[None].expand(tensors[0].shape[0], -1)
        return cast("Values", part)

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
    ) -> Parallelized:
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
            initialize.from_source(self.module, self.layout, weights, self.device, missing, ignore=ignore, cast=cast)
        else:
            assert seed is not None
            initialize.from_seed(self.module, self.layout, seed, self.device, missing)
        return self

    def manual_seed(self, seed: int) -> None:
        """Seed this rank's random state for training. Ranks with different samples or positions get different states,
        others the same.

        Stages of ``pp`` draw alike in ``loss``, and each its own numbers in the forward. Inside split layers each rank
        derives a state of its own from the shared state, so that dropout differs between shards. Under sequence
        parallelism the ranks compute different positions everywhere and get different states.
        """
        differing = [axis for pass_ in self.plan.passes if pass_.splits_sequence for axis in pass_.axes]
        differing += [axis for _, axis in self._splitters]
        random.seed(self.device, random.mix(seed, self.data_rank, *(self._place[axis] for axis in differing)))

    def accumulate(self, micro_batches: Iterable[Micro], *, reduce_each: bool = False) -> Iterator[Micro]:
        """Yield the micro-batches of one optimizer step. Gradients are reduced once, in the backward of the last
        micro-batch.

        ``for micro in par.accumulate(batches): (loss(micro) / len(batches)).backward()``

        Args:
            micro_batches: any iterable. Every rank must pass the same number.
            reduce_each: reduce-scatter after every micro-batch, which keeps gradients sharded. Hybrid sharding still
                reduces over ``dp_replicate`` once, except with ``optimizer="world"``, which then keeps slices of the
                shards only.
        """
        if axes := self.resolved.divided(Role.LAYERS):
            raise MeshparError(
                f"par.accumulate needs every layer on every rank, and {axes[0]} divides them; run a step by "
                "par.backward(micro_batches, loss)"
            )
        waiting: list[Micro] = []
        reduce = partial(self._reduces, reduce_each)
        whole = False
        try:
            for batch in micro_batches:
                if waiting:
                    self._agree_on_rest(2)
                    reduce(last=False)
                    yield waiting.pop()
                waiting.append(batch)
            self._agree_on_rest(len(waiting))
            reduce(last=True)
            yield from waiting
            whole = True
        finally:
            reduce(last=True)
            if not whole:
                self.run.leave_step()

    def _abandon(self, reduces: Callable[[bool], None]) -> None:
        """Leave a step in which ranks have different parts of the gradients."""
        reduces(True)
        self.run.leave_step(by_error=True)

    def _reduces(self, always: bool, last: bool) -> None:
        """Let the next backward reduce gradients where it is the last of a step, or ``always``."""
        self.run.backward.reducing = last or always
        if hasattr(self.module, "set_requires_gradient_sync"):
            self.module.set_requires_gradient_sync(last or always)  # type: ignore[operator]
            if self.resolved.hybrid:
                self.module.set_requires_all_reduce(last)  # type: ignore[operator]
            if (gathering := self.run.find(Gathering)) is not None and gathering.once_a_step:
                self.module.set_reshard_after_backward(last)  # type: ignore[operator]

    @overload
    def backward(
        self, micro_batches: Iterable[Micro], loss: Callable[[nn.Module, Micro], Tensor], *, reduce_each: bool = False
    ) -> Tensor: ...

    @overload
    def backward(
        self,
        micro_batches: Iterable[Micro],
        loss: Callable[[nn.Module, Micro], tuple[Tensor, Mapping[str, Tensor]]],
        *,
        reduce_each: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    def backward(
        self, micro_batches: Iterable[Micro], loss: Callable[[nn.Module, Micro], Losses], *, reduce_each: bool = False
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Run the forwards and backwards of one optimizer step, on any mesh, and return the sum of the losses.

        ``total = par.backward(micro_batches, lambda module, batch: loss_sum(module, batch) * scale)`` is the loop over
        :meth:`accumulate`. Where a pass divides layers, it is the one way to train: a stage's part of ``loss`` ends
        where its last block has run.

        Args:
            micro_batches: any iterable; every rank passes the same number, and ranks that share samples the same.
            loss: ``(module, micro_batch) -> scalar``, of which the gradient is computed; or ``(scalar, values)`` with
                tensors to report by name. ``module`` is ``par.module``, or what ``torch.compile(par.module)`` returned.
            reduce_each: see :meth:`accumulate`.

        Returns:
            The sum of this rank's losses over the micro-batches, a scalar; the same on the ranks that share samples.
            Where ``loss`` returns values, too: ``(sum, sums of the values by name)``.

        Collective: every rank calls it.
        """
        totals, module = Totals(self.device), self._called()
        if (stage := self.run.find(Layers)) is not None:
            reduces = partial(self._reduces, reduce_each)
            stage.backward(
                micro_batches,
                loss,
                reduces,
                partial(self._abandon, reduces),
                totals,
                partial(self._agree_on_count, "par.backward"),
            )
        else:
            for batch in self.accumulate(micro_batches, reduce_each=reduce_each):
                totals.add(loss(module, batch)).backward()  # type: ignore[no-untyped-call]
        return totals.returned()

    def forward(self, micro_batches: Iterable[Micro], function: Callable[[nn.Module, Micro], Found]) -> list[Found]:
        """Evaluate: return ``function(module, micro_batch)`` of each micro-batch, without gradients, on any mesh.

        Args:
            micro_batches: any iterable; ranks that share samples pass the same.
            function: what it returns travels between the stages where a pass divides layers: return little.

        Collective: every rank calls it.
        """
        module = self._called()
        if (stage := self.run.find(Layers)) is not None:
            return stage.forward(micro_batches, function, self.device, partial(self._agree_on_count, "par.forward"))
        with torch.no_grad():
            return [function(module, batch) for batch in micro_batches]

    def _called(self) -> nn.Module:
        """Return the module, or what ``torch.compile(module)`` made of it, for functions that call it."""
        module, axes = compiled_form(self.module), self.resolved.divided(Role.LAYERS)
        if axes and module is not self.module:
            raise MeshparError(
                f"the stages of {axes[0]} do not run torch.compile(par.module); compile blocks, Compile() in the plan"
            )
        return module

    def _agree_on_count(self, place: str, count: int) -> None:
        """Check that the data ranks of a stage run as many micro-batches."""
        if not all(self.run.agree(place, [count])):
            raise MeshparError(
                f"data ranks give {place} different numbers of micro-batches, this one {count}, so that some would "
                "wait forever; give it the same number on every rank, for instance by dropping the rest of an epoch"
            )

    def _agree_on_rest(self, left: int) -> None:
        for moment in self.run.moments:
            moment.before_micro_batch(left)

    def token_scale(self, tokens: int | Tensor) -> Tensor:
        """Return the factor from this rank's summed loss to the mean over all tokens of all ranks.

        ``(loss_sum * par.token_scale(tokens)).backward()`` gives the gradient of the global token mean. The factor is
        ``loss_size`` divided by the number of tokens of all ranks, because gradients are averaged over these ranks.

        Args:
            tokens: number of tokens that count on this rank, over all micro-batches of the step.

        Returns:
            A float32 scalar on this rank's device, the same on every rank.

        Collective: every rank calls it.
        """
        return self.begin_token_scale(tokens)()

    def begin_token_scale(self, tokens: int | Tensor) -> Callable[[], Tensor]:
        """Start :meth:`token_scale` and return a function that waits for the result, so that other work can overlap the
        exchange.

        Collective: every rank calls it, and the returned function.
        """
        self.run.agree("par.token_scale")
        count = torch.zeros((), device=self.device) + tokens
        first, *others = self.resolved.averaged or (None,)
        work = None if first is None else dist.all_reduce(count, group=self._held_on.get_group(first), async_op=True)

        def finish() -> Tensor:
            if work is not None:
                work.wait()
            for axis in others:
                dist.all_reduce(count, group=self._held_on.get_group(axis))
            return self.loss_size / count.clamp(min=1.0)

        return finish

    def data_sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over samples and positions, in place, and return it. Collective: every rank calls it."""
        self.run.agree("par.data_sum")
        summed = values.to(self.device)
        for axis in self.resolved.averaged:
            dist.all_reduce(summed, group=self._held_on.get_group(axis))
        return values if summed is values else values.copy_(summed)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their joint norm is at most ``max_norm``.

        Each rank computes the norm of its shards, and one small all-reduce for each axis joins the norms. A replicated
        gradient counts once. The host does not wait for the device.

        Args:
            max_norm: largest norm. ``inf`` measures the norm and scales nothing.
            norm_type: 2, any p >= 1, or ``inf``.

        Returns:
            The norm before clipping: a scalar on this rank's device, the same on every rank, in float32, or float64 for
            a model with float64 parameters.

        Raises:
            MeshparError: the gradients of a step are not reduced yet.

        Collective: every rank calls it.
        """
        return self.clip_grad_norms_(max_norm, norm_type=norm_type)[""]

    @torch.no_grad()
    def clip_grad_norms_(
        self, max_norm: float, modules: Sequence[str] = (), *, norm_type: float = 2.0
    ) -> dict[str, Tensor]:
        """Clip as :meth:`clip_grad_norm_` does, and return the norms of modules as well, in the same exchange.

        >>> par.clip_grad_norms_(1.0, ["embed", "layers.*"])  # doctest: +SKIP
        {'': tensor(2.1), 'embed': tensor(0.4), 'layers.0': tensor(1.3), 'layers.1': tensor(1.6)}

        Args:
            max_norm: as for :meth:`clip_grad_norm_`, as is ``norm_type``; also what is raised.
            modules: patterns of modules, or of parameters. A parameter counts for the innermost that one matches.

        Returns:
            Name of a module -> its norm before clipping; that of the whole model has the name ``""``.

        Raises:
            MeshparError: also where a pattern matches nothing.
        """
        if not self.run.backward.reducing:
            raise MeshparError(
                "clip_grad_norm_ is called between the micro-batches of par.accumulate, whose gradients are reduced "
                "in the last one; clip after the loop"
            )
        reads_of(self.module).check("par.clip_grad_norm_()")
        self.reshard()
        places: Mapping[str, str] = {}
        if modules:  # in the same order on every stage
            own = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
            others = [name for name, tensor in tensors_elsewhere(self.run).items() if isinstance(tensor, nn.Parameter)]
            places = modules_around(tuple(sorted({*own, *others})), tuple(modules))
            if lost := [one for one in modules if not any(matches(one, place) for place in places.values())]:
                raise MeshparError(unmatched(f"module {lost[0]!r}", lost[0], self.module))
        row = {name: number for number, name in enumerate(["", *dict.fromkeys(places.values())])}
        own_row = {id(one): row[places[name]] for name, one in self.module.named_parameters() if name in places}
        groups = {axis: self._held_on.get_group(axis) for axis in self.resolved.held.axes}
        norms = clip_grad_norms_(
            self.module.parameters(), groups, max_norm, norm_type, self.device, self.run.find(Layers), own_row, len(row)
        )
        return dict(zip(row, norms.unbind(), strict=True))

    def verify(self, batch: object) -> Verification:
        """Compare one split block of each kind with the unsplit block on a batch. The first forward runs this test
        automatically.

        A block runs twice on the same input, in float32 or wider: as its author wrote it, with whole weights, and
        split. Outputs and gradients are compared. At most one block is gathered at a time. The module does not change.

        Args:
            batch: keyword arguments of the forward as a mapping, its arguments as a list or tuple, or its one argument.

        Returns:
            The modules that were compared, with the largest difference of each. Empty if no features are split.

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
        return report(verification if stage is None else join_stages(stage.gathered(verification)))

    def like(self, tensor: Tensor, values: Any) -> Tensor:  # noqa: ANN401 - what torch.as_tensor takes
        """Place a mask, noise or a value as a parameter or its gradient is placed, so that operators take both.

        ``parameter.grad.mul_(par.like(parameter, mask))``

        Args:
            tensor: a parameter, a gradient or what was computed from them, on any mesh or in one process.
            values: a whole tensor, an array or a number, the same on every rank, that expands to the shape of
                ``tensor``. Its dtype stays.

        Returns:
            A tensor of its own: this rank's part as a DTensor, or a plain tensor where ``tensor`` is plain.
        """
        return like(tensor, values)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole of a parameter, a gradient or what was computed from them; a plain tensor as it is.

        Where gradients are enabled they reach ``tensor`` as by ``tensor.full_tensor()``. The result may share memory
        with ``tensor``: clone what you keep. ``tensor.copy_(par.like(tensor, whole))`` writes it back.

        Collective where ``tensor`` is divided: every rank that holds a part of it calls it.
        """
        found = whole(tensor)
        plain: Callable[[], Tensor] | None = getattr(found, "meshpar_plain", None)  # of a stage: see its guard
        return found if plain is None else plain()

    def register_method(self, name: str) -> None:
        """Let ``module.name(...)`` run like a call of the module: with gathered weights and the plan's checks.

        ``encode``, ``decode``, ``embed``, ``encode_*``, ``decode_*``, ``forward_*`` and ``get_*_features`` are
        registered already, and ``module.forward(...)`` is a call of the module, with its hooks.

        Raises:
            MeshparError: the module has no such method.
        """
        self.run.calls.register_method(name)

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
        """Return a sharded moving average of the parameters: exponential, Karras' power form, or a plain mean. See
        :class:`meshpar.state.averaging.Averaged`, whose arguments are the ``options``.
        """
        return Averaged(self, decay, **options)

    def token_log_probs(self, batch: Mapping[str, Any], *, temperature: float = 1.0, **options: Any) -> TokenLogProbs:
        """Return the log-probability of each label of ``batch`` and the entropy of each position, with gradients.

        Values are those of one process, on every mesh, and no rank holds all logits. Where positions are split, pass a
        part of :meth:`split`: values are of these positions. Where layers are divided, call it in the ``loss`` of
        :meth:`backward`; a call under ``torch.no_grad()`` gives all stages the values. See
        :func:`meshpar.losses.log_probs.token_log_probs`, whose other arguments are the ``options``.

        Args:
            batch: the keyword arguments of the module, and ``labels`` (B, L): the token that each position predicts,
                -100 where none counts.
            temperature: logits are divided by it.

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

    def offloaded(self, optimizer: Optimizer | Collection[Optimizer] = ()) -> AbstractContextManager[None]:
        """Give the memory of parameters, buffers, gradients, moving averages and the optimizers' state to others for a
        ``with`` block, such as an engine on the same device; their values are in host memory, page-locked beside an
        accelerator, and come back bit for bit.

        Waits for a save in the background, which reads them.

        Raises:
            MeshparError: at the end, where the device has no memory for the values. They stay in host memory: free the
                device's memory, then run ``with par.offloaded(): pass``.
        """
        self.reshard()
        module, given = self.module, [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
        tensors += averages_of(module)
        if (shards := self.run.find(ReplicaShards)) is not None:
            tensors += shards.held()
        states = [state for one in given for state in one.state.values()]
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
        """Return the weights as a stream of whole tensors under their published names, for an inference engine. See
        :class:`meshpar.checkpoints.Published`, which takes the ``options``, too.

        Collective where a pass divides layers: every rank calls it.
        """
        stream = registry.plugin(registry.STREAMS, "published")
        return stream(self, dtype, bucket, adapters, averaged, **options)

    def reshard(self) -> None:
        """Free gathered parameters, so that the module's parameters are this rank's shards. The next forward gathers
        again.
        """
        self.run.reshard()

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
