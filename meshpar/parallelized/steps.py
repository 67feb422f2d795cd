"""The steps of a parallel module: micro-batches, forwards and backwards, and the norm of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TypeVar, overload

import torch
from torch import Tensor, nn

from meshpar.core.errors import MeshparError
from meshpar.core.passes import Role, unmatched
from meshpar.core.patterns import matches
from meshpar.losses.token_loss import Found as Losses
from meshpar.losses.token_loss import Totals
from meshpar.parallelized.ranks import ModuleOnMesh, compiled_form
from meshpar.passes.pipeline.portion import all_parameters, tensors_elsewhere
from meshpar.passes.pipeline.running import Layers
from meshpar.process.waiting import reads_of
from meshpar.same_bits.gradients import TreeOfGradients
from meshpar.same_bits.trees import SameBits, tree_sum
from meshpar.step.gathered_weights import Gathering
from meshpar.tensors.placements import clip_grad_norms_

Micro = TypeVar("Micro")
Found = TypeVar("Found")


class TrainingSteps(ModuleOnMesh):
    """A module that trains and evaluates micro-batches."""

    def accumulate(self, micro_batches: Iterable[Micro], *, reduce_each: bool = False) -> Iterator[Micro]:
        """Yield the micro-batches of one optimizer step; the backward of the last one reduces the gradients of all.

        ``for micro in par.accumulate(batches): (loss(micro) / len(batches)).backward()``

        Args:
            micro_batches: any iterable. Every rank must pass the same number.
            reduce_each: reduce-scatter after every micro-batch, which keeps gradients sharded. Hybrid sharding still
                reduces over ``dp_replicate`` once, except with ``optimizer="world"``, which then keeps slices of the
                shards only.
        """
        self._need_layers("par.accumulate")
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
            if (tree := self.run.find(TreeOfGradients)) is not None:
                tree.before_micro_batch(0)
        finally:
            reduce(last=True)
            if not whole:
                self.run.leave_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of the block's backward on this rank; the first backward after it reduces them, too.

        Until then they are in no parameter's ``grad``, and ``zero_grad()`` does not clear them: end each step with a
        backward outside of the block. For a trainer that learns of each micro-batch, when it comes, whether it is the
        last of a step. :meth:`accumulate` does the same for all micro-batches of a step.

        Collective: every rank enters it.
        """
        self._need_layers("par.no_sync")
        whole = False
        self._agree_on_rest(2)
        self._reduces(always=False, last=False)
        try:
            yield
            self._agree_on_rest(1)
            whole = True
        finally:
            self._reduces(always=False, last=True)
            if not whole:
                self.run.leave_step()

    def _need_layers(self, method: str) -> None:
        if axes := self.resolved.divided(Role.LAYERS):
            raise MeshparError(
                f"{method} needs every layer on every rank, and {axes[0]} divides them; run a step by "
                "par.backward(micro_batches, loss)"
            )

    def _abandon(self, reduces: Callable[[bool], None]) -> None:
        """Leave a step in which ranks have different parts of the gradients."""
        reduces(True)
        self.run.leave_step(by_error=True)

    def _reduces(self, always: bool, last: bool) -> None:
        """Let the next backward reduce gradients where it is the last of a step, or ``always``."""
        always = always or self.run.find(SameBits) is not None
        self.run.backward.reducing = last or always
        if hasattr(self.module, "set_requires_gradient_sync"):
            self.module.set_requires_gradient_sync(last or always)  # type: ignore[operator]
            if self.resolved.hybrid:
                self.module.set_requires_all_reduce(last or self.run.find(SameBits) is not None)  # type: ignore[operator]
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
        :meth:`accumulate`, and the one way to train where a pass divides layers: a stage's part of ``loss`` ends where
        its last block has run.

        Args:
            micro_batches: any iterable; every rank passes the same number, and ranks that share samples the same.
            loss: ``(module, micro_batch) -> scalar``, of which the gradient is computed; or ``(scalar, values)`` with
                tensors to report by name. ``module`` is ``par.module``, or what ``torch.compile(par.module)`` returned.
            reduce_each: see :meth:`accumulate`.

        Returns:
            The sum of this rank's losses, a scalar, the same on ranks that share samples; or ``(sum, sums of values)``.
            Under ``same_bits`` the mean over ranks of these sums, so that :meth:`data_sum` gives the same bits.

        Collective: every rank calls it.
        """
        tree, module = self.run.find(TreeOfGradients), self._called()
        # the mean over ranks of the sums over micro-batches
        mean = None if tree is None else lambda rows: tree_sum(self._sum_by_tree(rows)) / self.loss_size
        totals = Totals(self.device, mean)
        if (stage := self.run.find(Layers)) is not None:

            def reduces(last: bool) -> None:
                self._reduces(reduce_each, last)
                if tree is not None:
                    tree.before_micro_batch(1 if last else 2)

            stage.backward(
                micro_batches,
                loss,
                reduces,
                partial(self._abandon, partial(self._reduces, reduce_each)),
                totals,
                partial(self._agree_on_count, "par.backward"),
            )
            if tree is not None:
                tree.before_micro_batch(0)
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

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their joint norm, in which a replicated one counts once, is at most ``max_norm``.

        Args:
            max_norm: largest norm. ``inf`` measures the norm and scales nothing.
            norm_type: 2, any p >= 1, or ``inf``.

        Returns:
            The norm before clipping: a scalar on this rank's device, the same on every rank, in float32, or float64 for
            a model with float64 parameters.

        Raises:
            MeshparError: the gradients of a step are not reduced yet.

        Collective: every rank calls it, for one small all-reduce for each axis. The host does not wait for the device.
        """
        return self.clip_grad_norms_(max_norm, norm_type=norm_type)[""]

    def _counted_for(self, modules: Sequence[str]) -> Mapping[str, str]:
        """Return for which module each parameter counts, in the same order on every stage."""
        names = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        elsewhere = tensors_elsewhere(self.run).items()
        names |= {name for name, tensor in elsewhere if isinstance(tensor, nn.Parameter)}
        places = _modules_around(tuple(sorted(names)), tuple(modules))
        for pattern in modules:
            if not any(matches(pattern, around) for around in places.values()):
                raise MeshparError(unmatched(f"module {pattern!r}", pattern, self.module))
        return places

    @torch.no_grad()
    def clip_grad_norms_(
        self, max_norm: float, modules: Sequence[str] = (), *, norm_type: float = 2.0
    ) -> dict[str, Tensor]:
        """Clip as :meth:`clip_grad_norm_` does, and return the norms of modules as well, in the same exchange.

        >>> par.clip_grad_norms_(1.0, ["embed", "layers.*"])  # doctest: +SKIP
        {'': tensor(2.1), 'embed': tensor(0.4), 'layers.0': tensor(1.3), 'layers.1': tensor(1.6)}

        Args:
            max_norm: as for :meth:`clip_grad_norm_`, as is ``norm_type``.
            modules: patterns of modules, or of parameters. A parameter counts for the innermost that one matches.

        Returns:
            Name of a module -> its norm before clipping; that of the whole model has the name ``""``.

        Raises:
            MeshparError: a pattern matches nothing, or the gradients of a step are not reduced yet.

        Collective: every rank calls it.
        """
        tree = self.run.find(TreeOfGradients)
        if not self.run.backward.reducing or (tree is not None and tree.left):
            raise MeshparError(
                "clip_grad_norm_ is called between the micro-batches of par.accumulate, whose gradients are reduced "
                "in the last one; clip after the loop"
            )
        reads_of(self.module).check("par.clip_grad_norm_()")
        self.reshard()
        places = self._counted_for(modules) if modules else {}
        row = {name: number for number, name in enumerate(["", *dict.fromkeys(places.values())])}
        named = {**tensors_elsewhere(self.run), **dict(self.module.named_parameters())}
        rows = {id(named[name]): row[place] for name, place in places.items() if name in named}
        groups = {axis: self._held_on.get_group(axis) for axis in self.resolved.held.axes}
        layers = self.run.find(Layers)
        elements = 0 if tree is None else sum(parameter.numel() for parameter in all_parameters(self.module))
        stages = None if layers is None else (layers.group, layers.counted_elsewhere())
        parameters = self.module.parameters()
        norms = clip_grad_norms_(parameters, groups, max_norm, norm_type, self.device, stages, rows, len(row), elements)
        return dict(zip(row, norms.unbind(), strict=True))


@lru_cache(maxsize=16)
def _modules_around(names: tuple[str, ...], patterns: tuple[str, ...]) -> dict[str, str]:
    """Return by name the innermost module around it, or itself, that one of ``patterns`` matches."""
    innermost = dict[str, str]()
    for name in names:
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        if matching := [prefix for prefix in around if any(matches(pattern, prefix) for pattern in patterns)]:
            innermost[name] = matching[-1]
    return innermost
