"""Test that a split block computes what the block computes: on a batch, one block of each kind, before anybody trusts
it.

Names cannot tell whether the code between two projections survives the split: it may take a standard deviation over
features, mix positions, or scale a weight. So the block runs twice on the same input in float32 or wider, without
random numbers: once as its author wrote it, with whole weights, and once split; outputs and gradients are compared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshpar._torch.pytree import tree_leaves, tree_map
from meshpar.core.errors import ParallelError
from meshpar.core.patterns import kind_of
from meshpar.passes.applied import applied
from meshpar.passes.data.whole_parameters import strides
from meshpar.passes.installed import as_written
from meshpar.passes.tensor.collectives import gather_values
from meshpar.passes.tensor.context import Context
from meshpar.passes.tensor.random import is_dropout
from meshpar.passes.untouched import CannotKeep, untouched
from meshpar.step.placements import local_tensor, whole_tensor
from meshpar.step.pytrees import leaves
from meshpar.step.rank_digests import digest
from meshpar.trials.blocks import (
    Run,
    gathered,
    holding,
    joined,
    local_slice,
    noise,
    off,
    plain_products,
    quiet,
    slice_like,
    wide,
)
from meshpar.trials.gathered_reads import Cut, WholeReads, share

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""How far a split block may be off, relative to the largest value: far above float32's rounding, far below what a
wrong split does.
"""
INPUTS = 1 << 26
"""Elements of a block's inputs, whole along the sequence, beyond which its first samples are tried; one may have
twice as many.
"""
_MASKED = 8
_FAILED, _OUT_OF_MEMORY = 1, 2
_SAME, _LOOKED_AT = 1e-2, 1 << 20
_SHORTER = "compare it on a shorter batch by par.verify(batch), or by plan.prove(module, batch) before a launch"


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


@final
@dataclass(slots=True)
class _Seen:
    """The inputs of one call of a block, or why they were not kept, and its dropout masks."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    masks: dict[str, tuple[Tensor, Tensor, int]] = field(default_factory=dict)
    why: str = ""

    def half(self) -> _Seen:
        """Return the first half of the samples."""

        def cut(value: object) -> Any:
            samples = isinstance(value, Tensor) and value.ndim > 1 and len(value) == self.rows
            return value[: self.rows // 2] if samples and isinstance(value, Tensor) else value

        return _Seen(tree_map(cut, self.args), tree_map(cut, self.kwargs), self.rows // 2)

    def objects(self) -> list[Any]:
        """Return what a run shares with the inputs: each run has copies of their tensors."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if not isinstance(leaf, Tensor)]


@final
class SplitTest:
    """Tries one block of each kind of a split module.

    Args:
        module: the outermost module.
        context: what its styles share.
        blocks: the repeated blocks by name.
        whole: returns a parameter's whole value, given its name.
        kept: puts back what can be reached from what it is given, when a run is over.
    """

    def __init__(
        self,
        module: nn.Module,
        context: Context,
        blocks: Sequence[str],
        whole: Callable[[str], Tensor],
        kept: Callable[..., AbstractContextManager[None]] = untouched,
    ) -> None:
        self._module, self._context, self._whole, self._kept = module, context, whole, kept
        self._units = list(_one_of_each_kind(module, context, blocks))
        self._seen: dict[str, _Seen] = {}
        self._returned: list[Difference] = []

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Run the chosen blocks as they are written, so that hooks on compiled ones do not have them compiled again.

        A forward and its backward belong inside together: a recomputation must do what the forward did.
        """
        units: list[Any] = [self._module.get_submodule(name) for name in self._units]
        compiled = [unit._compiled_call_impl for unit in units]
        for unit in units:
            unit._compiled_call_impl = None
        try:
            yield
        finally:
            for unit, was in zip(units, compiled):
                unit._compiled_call_impl = was

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Remember what the chosen blocks are called with while the module runs."""
        with ExitStack() as stack:
            for name in self._units:
                unit: Any = self._module.get_submodule(name)
                handles = [unit.register_forward_pre_hook(self._remember(name), with_kwargs=True)]
                if self._context.random is not None:
                    draws = [
                        (inner, child) for inner, child in unit.named_modules() if is_dropout(child) and child.training
                    ]
                    handles += [child.register_forward_hook(self._remember_mask(name, inner)) for inner, child in draws]
                for handle in handles:
                    stack.callback(handle.remove)
            yield

    def returned(self, output: object) -> None:
        """Remember which trained tensors of the module's output are a rank's part, and are not said to be one by being
        a DTensor.

        Collective over the tensor axis.
        """
        self._returned.clear()
        for place, leaf in enumerate(leaves(output)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.requires_grad and leaf.numel():
                x = leaf.detach().reshape(-1)[:_LOOKED_AT].double()
                mine = torch.stack([x.norm(), x @ torch.arange(len(x), device=x.device, dtype=x.dtype).cos()])
                norms, marks = gather_values(mine[None], self._context.group).T
                size = float((marks.max() - marks.min()) / norms.max())
                if size > _SAME:
                    self._returned.append(
                        Difference(module="", what=f"returns other values on each rank (output {place})", size=size)
                    )

    def _remember(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, kwargs: object) -> None:
            if name not in self._seen:
                self._seen[name] = self._short(args, kwargs, whole=not (name and self._context.sequence_parallel))

        return hook

    def _short(self, args: Any, kwargs: Any, *, whole: bool) -> _Seen:
        """Return a copy of a block's inputs, of their first samples if they are large.

        Collective over the tensor axis, whose ranks may have parts of different lengths.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        rows = next((len(tensor) for tensor in tensors if tensor.ndim > 1), 1)
        others, samples = (
            sum(tensor.numel() for tensor in tensors if (tensor.ndim > 1 and len(tensor) == rows) == cut)
            for cut in (False, True)
        )
        counts = torch.tensor([[others, samples]], device=self._device())
        others, samples = (
            int(most) * (1 if whole else self._context.size)
            for most in gather_values(counts, self._context.group).amax(0)
        )
        keep = max(1, min(rows, rows * INPUTS // max(1, others + samples)))
        if (held := others + samples * keep // max(1, rows)) > 2 * INPUTS:
            return _Seen(
                why=f"its input has {held:,} elements in one sample, expected at most {2 * INPUTS:,}; {_SHORTER}"
            )

        def copied(value: object) -> Any:
            cut = isinstance(value, Tensor) and value.ndim > 1 and len(value) == rows
            return _copy(value[:keep] if cut and isinstance(value, Tensor) else value)

        return _Seen(tree_map(copied, args), tree_map(copied, kwargs), keep)

    def _remember_mask(self, name: str, inner: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen = self._seen.setdefault(name, _Seen())
            if inner not in seen.masks and isinstance(output, Tensor):
                x = args[0].detach()
                zeros = (output.detach() == 0) & (x != 0)
                # equal constants may be of different parts
                masked = int(zeros.sum()) if bool((x != x.flatten()[0]).any()) else 0
                seen.masks[inner] = (digest(x), digest(zeros), masked)

        return hook

    def run(self) -> Verification:
        """Try the blocks that were watched.

        Collective: the ranks of the tensor axis, and those that share its parameters, call it.
        """
        start, tried, skipped, found = time.perf_counter(), dict[str, float](), dict[str, str](), [*self._returned]
        for name in sorted(self._seen):
            seen = self._seen.pop(name)
            found += self._masks_agree(name, seen)
            if seen.why:
                skipped[name] = seen.why
            if not seen.args and not seen.kwargs:
                continue
            try:
                sizes = self._try(name, seen)
            except _NotTried as error:
                skipped[name] = str(error)
                continue
            except torch.OutOfMemoryError as error:
                raise ParallelError(
                    f"{name or 'the model'} cannot be compared with its split in the memory that is free; pass "
                    "Plan(..., verify=False) after plan.prove(module, batch) of a small model"
                ) from error
            tried[name] = max(sizes.values(), default=0.0)
            worst = sorted(((size, what) for what, size in sizes.items() if not size <= TOLERANCE), reverse=True)
            found += [Difference(module=name, what=what, size=size) for size, what in worst]
        return Verification(
            modules=tried, differences=tuple(found), skipped=skipped, seconds=time.perf_counter() - start
        )

    def _masks_agree(self, name: str, seen: _Seen) -> Iterator[Difference]:
        """Yield dropouts whose masks are alike on ranks with different parts, or differ on ranks with the same."""
        for inner, (x, zeros, count) in sorted(seen.masks.items()):
            table = gather_values(torch.stack([x, zeros, torch.full_like(x, count)])[None], self._context.group)
            if int(table[:, 2].min()) < _MASKED:
                continue
            same_input, same_mask = (bool((table[:, column] == table[0, column]).all()) for column in (0, 1))
            if same_input != same_mask:
                what = (
                    "draws the same mask for parts of different ranks"
                    if same_mask
                    else "draws other masks on ranks with the same values"
                )
                yield Difference(module=f"{name}.{inner}", what=what, size=1.0)

    def _try(self, name: str, seen: _Seen) -> dict[str, float]:
        unit, context = self._module.get_submodule(name), self._context
        names = {inner: f"{name}.{inner}" if name else inner for inner, _ in unit.named_parameters()}
        cuts = {inner: self._cut(self._parameter(full)) for inner, full in names.items()}
        self._refuse_split_inputs(seen, self._local_inputs(name))
        parts = dict[str, Tensor]()
        for inner, full in names.items():
            whole, cut = wide(self._whole(full).detach()), cuts[inner]
            parts[inner] = whole.clone() if cut is None else share(whole, cut[0], context)
            del whole
        split = bool(name) and context.sequence_parallel

        with quiet(unit):
            code, failed, outcome = self._alone(name, unit, parts, cuts, seen)
            while code == _OUT_OF_MEMORY and seen.rows > 1:
                seen = seen.half()
                code, failed, outcome = self._alone(name, unit, parts, cuts, seen)
            if code == _OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(failed or "another rank of the axis is out of memory")
            if code:
                raise _NotTried(failed or "it does not run unsplit on another rank of the axis")
            for inner, full in names.items():
                parts[inner] = self._as_split(self._parameter(full), parts[inner], cuts[inner])
            both = Run(parts, (seen.args, seen.kwargs))
            with self._kept(unit, *seen.objects()), holding(unit, both.parameters), plain_products(unit):
                return self._compare(*outcome, both, both.outputs(unit), split)

    def _alone(
        self, name: str, unit: nn.Module, parts: Mapping[str, Tensor], cuts: Mapping[str, Cut | None], seen: _Seen
    ) -> tuple[int, str, tuple[list[Tensor], list[Tensor], dict[str, Tensor]]]:
        """Run a block as it was written.

        Returns:
            0, or how it failed, the same on all ranks of the axis; why it failed on this one; the outputs, the
            gradients given to them, and those of parameters and inputs: of a split parameter this rank's part.
        """
        expected, cotangents, wanted, code, failed = list[Tensor](), list[Tensor](), dict[str, Tensor](), 0, ""
        hidden = bool(name) and self._context.sequence_parallel
        alone = Run(parts, self._gathered(seen, self._local_inputs(name), hidden=hidden))
        reads = WholeReads(self._context, {alone.parameters[inner]: cut for inner, cut in cuts.items() if cut})
        try:  # around the backward, too, in which a model may recompute
            with self._kept(unit, *seen.objects()), holding(unit, alone.parameters), reads.of(unit), as_written(unit):
                expected = alone.outputs(unit)
                cotangents = [noise(want, place) for place, want in enumerate(expected)]
                wanted = alone.gradients(expected, cotangents)
        except CannotKeep as error:
            failed, code = str(error), _FAILED
        # training meets the block's own errors, where a loop may catch them
        except Exception as error:  # noqa: BLE001
            failed = f"it does not run unsplit: {type(error).__name__}: {error}".splitlines()[0]
            code = _OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else _FAILED
        return reads.failed_elsewhere or reads.worst(code, self._device()), failed, (expected, cotangents, wanted)

    def _refuse_split_inputs(self, seen: _Seen, heads: set[str]) -> None:
        """Refuse inputs beside hidden states that differ between ranks, such as an earlier layer's keys."""
        hidden = [
            seen.args[0] if seen.args else None,
            *(seen.kwargs.get(argument) for argument in self._context.inputs),
        ]
        others = list(leaves((seen.args, {key: value for key, value in seen.kwargs.items() if key not in heads})))
        given = [other for other in others if isinstance(other, Tensor) and not any(other is known for known in hidden)]
        if given:
            table = gather_values(torch.stack([digest(tensor) for tensor in given])[None], self._context.group)
            if not bool((table == table[0]).all()):
                raise _NotTried("its input is another layer's part of heads or features")

    def _compare(
        self,
        expected: list[Tensor],
        cotangents: list[Tensor],
        wanted: dict[str, Tensor],
        both: Run,
        got: list[Tensor],
        split: bool,
    ) -> dict[str, float]:
        context, sizes = self._context, dict[str, float]()
        if len(expected) != len(got):
            return {f"it returns {len(got)} tensors instead of {len(expected)}": 1.0}
        pairs = [(want, *joined(have, want, context)) for want, have in zip(expected, got)]
        for place, (want, have, _) in enumerate(pairs):
            sizes[f"output {place}" if len(pairs) > 1 else "output"] = off(want, have, 0.0)
        mine = [
            slice_like(cotangent, have, dim, context) for cotangent, have, (_, _, dim) in zip(cotangents, got, pairs)
        ]
        if self._anywhere(any(local_tensor(part).shape != local_tensor(have).shape for part, have in zip(mine, got))):
            return {f"it returns {tuple(got[0].shape)}, which is no rank's part of {tuple(expected[0].shape)}": 1.0}
        had = both.gradients(got, mine)
        largest = max((float(tensor.abs().max()) for tensor in wanted.values() if tensor.numel()), default=0.0)
        typical = float(gather_values(torch.tensor([largest], device=self._device()), context.group).max())
        for name, want in wanted.items():
            have = had[name]
            if isinstance(have, DTensor):
                if name in both.parameters:  # of which each rank has its part of both
                    part: Any = both.parameters[name]
                    have = have.redistribute(part.device_mesh, part.placements)
                else:
                    want = local_slice(want, have, context)
                have = have.to_local()
            elif split and have.shape != want.shape:
                want = slice_like(want, have, 1, context)
            sizes[f"gradient of {name}"] = off(want, have, TOLERANCE * typical)
        return sizes

    def _anywhere(self, true: bool) -> bool:
        """Return whether something is true on any rank of the axis. Collective over it."""
        return bool(gather_values(torch.tensor([true], device=self._device()), self._context.group).any())

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._module.parameters()), torch.device("cpu"))

    def _parameter(self, name: str) -> Any:
        return self._module.get_parameter(name)

    def _cut(self, parameter: object) -> Cut | None:
        """Return the dim along which the tensor axis splits a parameter, and its whole length."""
        if not isinstance(parameter, DTensor):
            return None
        axis = (parameter.device_mesh.mesh_dim_names or ()).index((self._context.mesh.mesh_dim_names or ("",))[0])
        placement = parameter.placements[axis]
        return (placement.dim, parameter.shape[placement.dim]) if isinstance(placement, Shard) else None

    def _as_split(self, parameter: object, part: Tensor, cut: Cut | None) -> Tensor:
        """Return this rank's part as a parameter that the tensor axis splits."""
        if not isinstance(parameter, DTensor):
            return part
        shape, placement = parameter.shape, Shard(cut[0]) if cut else Replicate()
        return DTensor.from_local(
            part, self._context.mesh, [placement], run_check=False, shape=shape, stride=strides(shape)
        )

    def _local_inputs(self, name: str) -> set[str]:
        prefix = f"{name}." if name else ""
        regions = (region for at, region in self._context.regions.items() if at == name or at.startswith(prefix))
        return {argument for region in regions for argument in region.local_inputs}

    def _gathered(self, seen: _Seen, heads: set[str], *, hidden: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of one process: whole along the sequence, with all heads where ranks have some."""
        args, kwargs, group = list(seen.args), dict(seen.kwargs), self._context.group
        for key in heads.intersection(kwargs):
            if isinstance(kwargs[key], Tensor):
                kwargs[key] = gathered(kwargs[key], 1, group)
        if hidden:
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                args[0] = gathered(args[0], 1, group)
            else:
                named = next(
                    (argument for argument in self._context.inputs if isinstance(kwargs.get(argument), Tensor)), None
                )
                if named is not None and kwargs[named].is_floating_point():
                    kwargs[named] = gathered(kwargs[named], 1, group)
        return tuple(args), kwargs


class _NotTried(Exception):
    """A block that cannot be tried."""


def verified(verification: Verification) -> Verification:
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


def of_stages(parts: Sequence[Verification]) -> Verification:
    """Return one verification of those of stages."""
    return Verification(
        modules={name: size for part in parts for name, size in part.modules.items()},
        differences=tuple(difference for part in parts for difference in part.differences),
        skipped={name: why for part in parts for name, why in part.skipped.items()},
        seconds=max(part.seconds for part in parts),
    )


def _one_of_each_kind(module: nn.Module, context: Context, blocks: Sequence[str]) -> Iterator[str]:
    """Yield the modules to try: one block of each kind, embeddings and heads beside them, or the model where other
    styles stand outside. A stage cannot run the model: there its blocks, embeddings and heads are tried.
    """
    outside = [
        name
        for name in context.styles
        if not _contains(blocks, name) and not any(block.startswith(f"{name}.") for block in blocks)
    ]
    alone = [name for name in outside if context.styles[name].stands_alone]
    if len(alone) < len(outside) and applied(module).layers is None:
        yield ""
        return
    kinds: dict[Any, str] = {}
    for place, name in enumerate(blocks):
        if styled := [inner for inner in context.styles if inner == name or inner.startswith(f"{name}.")]:
            inside = {inner[len(name) + 1 :]: context.styles[inner] for inner in styled}
            kinds.setdefault(kind_of(module.get_submodule(name), place, inside), name)
    yield from kinds.values()
    yield from alone


def _contains(blocks: Sequence[str], name: str) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def _copy(value: object) -> Any:
    if callable(getattr(value, "update", None)):
        return None  # a cache of keys and values, which a block would fill again
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def call(module: nn.Module, batch: object) -> Any:
    """Return ``module`` called with a batch: keywords of a mapping, arguments of a list or tuple, or the one value."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, list | tuple) else module(batch)


def run(module: nn.Module, batch: object) -> None:
    """Call a module as :func:`call` does, and return nothing."""
    call(module, batch)


def split_test(module: nn.Module, blocks: Sequence[str], device: torch.device) -> SplitTest | None:
    """Return the test that compares split blocks with unsplit blocks; None if no features are split.

    Args:
        module: the outermost module, on which the passes ran.
        blocks: names of the repeated blocks.
        device: of this rank.
    """
    split = applied(module).split
    if split is None or split.size == 1:
        return None

    def whole(name: str) -> Tensor:
        return whole_tensor(module.get_parameter(name)).to(device)

    return SplitTest(module, split, blocks, whole)
