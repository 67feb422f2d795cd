"""The ranks of a parallel module: which samples and positions each has, and what they sum."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_module_registration_hook

from meshpar._torch.calls import Undo, while_lives
from meshpar._torch.groups import share_timeout
from meshpar.core.errors import MeshparError
from meshpar.core.passes import Pass, Role
from meshpar.passes.data.instead_of_fsdp2 import ReplicaShards
from meshpar.passes.positions.parallel import positions, selected, with_positions
from meshpar.passes.tensor import random
from meshpar.passes.tensor.collectives import gather_partial
from meshpar.same_bits.trees import SameBits, sum_over, tree_sum
from meshpar.step.forward import Run

Values = TypeVar("Values")


_COMPILED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def watch_compiled() -> Undo:
    """Remember what ``torch.compile(module)`` returns."""

    def keep(owner: nn.Module, name: str, child: nn.Module | None) -> None:
        if name == "_orig_mod" and child is not None:
            _COMPILED[child] = weakref.ref(owner)

    handle = register_module_module_registration_hook(keep)

    def undo() -> bool:
        handle.remove()
        return True

    return undo


def compiled_form(module: nn.Module) -> nn.Module:
    """Return what ``torch.compile(module)`` returned and somebody still has, else the module."""
    reference = _COMPILED.get(module)
    form = reference() if reference is not None else None
    return module if form is None else form


class Planned(Protocol):
    """The part of :class:`meshpar.Plan` that a parallel module uses."""

    @property
    def passes(self) -> tuple[Pass, ...]: ...


class ModuleOnMesh:
    """A module to which a plan was applied, and this rank's place on the mesh."""

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
        """Index of this rank's batch, below ``data_size``; ranks that differ on other axes alone get the same batch."""
        return self.spec.index(self._place, self.data_axes)

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks with different samples, in the order of ``data_rank``, that share this one's place on other axes.

        Exchange values of your own there (``dist.all_gather(parts, features, group=par.data_group)``): the ranks of the
        world also have copies of a sample. Collective where it is read first: every rank reads it.
        """
        self.run.agree("par.data_group")
        group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in self.spec.groups(*self.data_axes)])
        share_timeout([group])
        return cast("dist.ProcessGroup", group)

    @property
    def loss_size(self) -> int:
        """Number of losses, of other samples or positions: :meth:`data_sum` adds over them, gradients are averaged."""
        return math.prod(self.resolved.held.axes[axis] for axis in self.resolved.averaged)

    @property
    def loss_rank(self) -> int:
        """Index of this rank's loss, below ``loss_size``."""
        axes = (axis for axis in self.spec.axes if axis in self.data_axes or axis not in self.resolved.held.axes)
        return self.spec.index(self._place, axes)

    def groups(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Yield this rank's process groups with their axes; one over data and positions has the data axis's name."""
        for mesh in self.run.meshes.values():
            yield from ((axis, mesh.get_group(axis)) for axis in mesh.mesh_dim_names or ())
        if (shards := self.run.find(ReplicaShards)) is not None:
            yield from shards.groups

    def reshard(self) -> None:
        """Free gathered parameters: the module's are then this rank's shards, until the next forward gathers."""
        self.run.reshard()

    def split(self, batch: Values, dim: int = 1) -> Values:
        """Return this rank's positions of a batch, where a pass splits positions; else the batch itself.

        Every tensor with a ``dim`` is split along it, in mappings, lists and tuples, too. A model that takes
        ``position_ids`` gets those of this rank's positions. Split labels that are aligned with the positions, and
        compute the loss from the logits: a model that shifts labels itself would lose one at the end of each part.

        Args:
            batch: the whole batch of this data rank, the same on every rank that shares it.
            dim: the dimension of positions: 1 for (B, L) tensors.

        Raises:
            MeshparError: the batch differs between ranks, its tensors in length, or the ranks do not divide the length.

        Collective in the first calls: every rank calls it.
        """
        if not self._splitters:
            return batch
        for moment in self.run.moments:
            moment.before_split(batch)
        tensors = with_positions(batch, dim)
        own_positions = torch.arange(tensors[0].shape[dim])
        for splitter, axis in self._splitters:
            size, index = self.spec.axes[axis], self._place[axis]
            own_positions = own_positions[positions(splitter, len(own_positions), axis, size, index)]
        if dim == 1:
            self.run.lengths.add(len(own_positions))
        part = selected(batch, own_positions, dim)
        counts = (
            self.layout.attention.counts_positions
            or "position_ids" not in inspect.signature(self.module.forward).parameters
        )
        if isinstance(part, dict) and "position_ids" not in part and not counts:
            part["position_ids"] = own_positions.to(tensors[0].device, non_blocking=True)[None].expand(
                tensors[0].shape[0], -1
            )
        return cast("Values", part)

    def manual_seed(self, seed: int) -> None:
        """Seed this rank's random state for training: others where samples or positions differ, else the same.

        Stages of ``pp`` draw alike in ``loss``, and each its own numbers in the forward. Inside split layers each rank
        derives a state of its own, so that dropout differs between shards; under sequence parallelism it has one
        everywhere. Under ``same_bits`` all ranks have the same, and a forward derives its own by the number of its
        micro-batch.
        """
        if self.run.find(SameBits) is not None:
            random.seed(self.device, seed)
            return
        differing = [axis for pass_ in self.plan.passes if pass_.splits_sequence for axis in pass_.axes]
        differing += [axis for _, axis in self._splitters]
        random.seed(self.device, random.mix(seed, self.data_rank, *(self._place[axis] for axis in differing)))

    def token_scale(self, tokens: int | Tensor) -> Tensor:
        """Return the factor from this rank's summed loss to the mean over all tokens of all ranks.

        ``(loss_sum * par.token_scale(tokens)).backward()`` gives the gradient of that mean: the factor is
        ``loss_size``, over which gradients are averaged, divided by the number of tokens of all ranks.

        Args:
            tokens: number of tokens that count on this rank, over all micro-batches of the step.

        Returns:
            A float32 scalar on this rank's device, the same on every rank.

        Collective: every rank calls it.
        """
        return self.begin_token_scale(tokens)()

    def begin_token_scale(self, tokens: int | Tensor) -> Callable[[], Tensor]:
        """Start :meth:`token_scale`; return what waits for it, so that work overlaps. Collective, both of them."""
        self.run.agree("par.token_scale")
        by_tree = self.run.find(SameBits) is not None
        # float64 counts more than 2**24 tokens
        count = torch.zeros((), dtype=torch.float64 if by_tree else None, device=self.device) + tokens
        first, *other_axes = self.resolved.averaged or (None,)
        work = None if first is None else dist.all_reduce(count, group=self._held_on.get_group(first), async_op=True)

        def finish() -> Tensor:
            if work is not None:
                work.wait()
            for axis in other_axes:
                dist.all_reduce(count, group=self._held_on.get_group(axis))
            scale = self.loss_size / count.clamp(min=1.0)
            return scale.float() if by_tree else scale

        return finish

    def data_sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over samples and positions, in place, and return it. Collective: every rank calls it."""
        return self._reduce(values, dist.ReduceOp.SUM, "par.data_sum")

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of a value that each micro-batch of each data rank has, such as its loss.

        ``par.data_sum(sum(parts))``; under ``Plan(same_bits=True)`` in the order in which gradients are summed.

        Args:
            parts: this rank's values, tensors of one shape, in the order of its micro-batches; every rank has as many.

        Collective: every rank calls it.
        """
        if self.run.find(SameBits) is None:
            return self.data_sum(reduce(torch.add, parts))
        return tree_sum(self._reduce(torch.stack(list(parts)).to(self.device), dist.ReduceOp.SUM, "par.total"))

    def data_max(self, values: Tensor) -> Tensor:
        """Take the largest ``values`` of all samples and positions, in place, and return it.

        Element by element, as for the longest sequence of a batch. Collective: every rank calls it.
        """
        return self._reduce(values, dist.ReduceOp.MAX, "par.data_max")

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType, place: str) -> Tensor:
        """Reduce ``values`` over samples and positions, in place."""
        self.run.agree(place)
        reduced = values.to(self.device)
        if operation == dist.ReduceOp.SUM and self.run.find(SameBits) is not None:
            reduced = self._sum_by_tree(reduced)
        else:
            for axis in self.resolved.averaged:
                dist.all_reduce(reduced, operation, self._held_on.get_group(axis))
        return values if reduced is values else values.copy_(reduced)

    def _sum_by_tree(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over samples in the order of the tree."""
        return reduce(sum_over, map(self._held_on.get_group, reversed(self.resolved.averaged)), values)

    def gather(self, values: Tensor, dim: int = 0, *, uneven: bool = False) -> Tensor:
        """Return the ``values`` of all data ranks joined along ``dim``, in the order of samples, with gradients.

        ``loss = contrast(par.gather(features))`` is the loss of one process over the whole batch, such as CLIP's with
        its negatives, and its gradients are that process's: each rank's ``values`` get the gradients of all ranks'
        losses, and meshpar averages gradients over ranks. A loss of this rank's rows alone against all columns is
        right, too: the loss is then the mean of the ranks' losses. Ranks of ``tp``, ``cp`` and ``pp`` join nothing.

        Args:
            values: a plain tensor, such as features (B, D) of this rank's samples.
            dim: the dimension of samples.
            uneven: ranks may have different numbers of samples, as in a last batch: they exchange the numbers before,
                for which the host waits.

        Returns:
            The joined tensor, the same on all data ranks; ``values`` itself where there is one.

        Raises:
            MeshparError: ranks have different numbers of samples, and not ``uneven``.

        Collective: every rank calls it.
        """
        length, dim = values.shape[dim], dim % values.ndim
        if not all(self.run.agree("par.gather", [0 if uneven else length])):
            raise MeshparError(
                f"data ranks give par.gather different numbers of samples, this one {length}; drop the incomplete last "
                "batch, or pass uneven=True"
            )
        if not uneven:
            return self._join(values, dim)
        lengths = self._join(torch.tensor([length], device=self.device), 0).tolist()
        longest = max(lengths)
        padded = functional.pad(values, [0, 0] * (values.ndim - 1 - dim) + [0, longest - length])
        parts = self._join(padded, dim).unflatten(dim, (len(lengths), longest)).unbind(dim)
        return torch.cat([part.narrow(dim, 0, count) for part, count in zip(parts, lengths, strict=True)], dim)

    def _join(self, values: Tensor, dim: int) -> Tensor:
        """Join the data ranks' ``values``, innermost axis first; the gradient is summed over them."""
        for axis in reversed(self.data_axes):
            if self.spec.axes[axis] > 1:
                values = gather_partial(values, dim, self.mesh.get_group(axis))
        return values
