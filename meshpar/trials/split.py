"""The trial of a split of features: one block of each kind, whole and split, on what the first forward gave it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshpar._torch.calls import uncompiled
from meshpar._torch.in_parts import TensorInParts, parts_of
from meshpar._torch.tensors import tree_leaves
from meshpar.core.errors import ParallelError
from meshpar.core.patterns import kind_of
from meshpar.passes.data.batch_norm import has_batch_norm
from meshpar.passes.data.whole_parameters import strides
from meshpar.passes.tensor.collectives import gather_values, join_chunks, take_chunk
from meshpar.passes.tensor.context import Context
from meshpar.passes.tensor.random import digest as random_state
from meshpar.passes.tensor.random import is_dropout
from meshpar.step.inner_calls import undo_changes
from meshpar.tensors.digests import digest, leaves, tensors_in
from meshpar.tensors.placements import local_tensor, part_like
from meshpar.trials.copies import CannotCopy, Cut, WholeReads, largest, undisturbed, widen
from meshpar.trials.engine import (
    TOLERANCE,
    BlockRun,
    Difference,
    Inputs,
    Verification,
    device_of,
    measure,
    noise,
    trained,
)

INPUTS = 1 << 26
"""Elements of a block's inputs, whole along the sequence, beyond which its first samples are tried; one may have 2x,
beyond which its first positions are tried.
"""
_TILE = 128
"""Positions are cut to a multiple of these, which attention by blocks or chunks may want."""
_COPY_TOLERANCE = 0.2
"""How far a copy, in float32, may be off from the block, which may compute in 8 bits."""
_MASKED = 8
_FAILED, _OUT_OF_MEMORY = 1, 2
_SAME, _LOOKED_AT = 1e-2, 1 << 20
_SHORTER = "compare it on a shorter batch by par.verify(batch), or by plan.prove(module, batch) before a launch"


_Outcome = tuple[list[Tensor], list[Tensor], dict[str, Tensor]]
"""The outputs of a block, the gradients that they get, and those of parameters and inputs."""


@final
class SplitTest:
    """Tries one block of each kind of a split module; ``kept`` puts back what copies share, around each run."""

    def __init__(
        self,
        module: nn.Module,
        context: Context,
        blocks: Sequence[str],
        whole: Callable[[str], Tensor],
        kept: Callable[[Iterable[nn.Module]], AbstractContextManager[None]] = undisturbed,
    ) -> None:
        self._module, self._context, self._whole, self._kept = module, context, whole, kept
        self._units: dict[str, Any] = {
            name: module.get_submodule(name) for name in _one_of_each_kind(module, context, blocks)
        }
        self._inputs, self._returned = dict[str, Inputs](), list[Difference]()

    @property
    def _device(self) -> torch.device:
        return device_of(self._module)

    def eagerly(self) -> AbstractContextManager[None]:
        """Run the chosen blocks uncompiled; a forward and its backward belong inside together."""
        return uncompiled(self._units.values())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Remember what the chosen blocks are called with while the module runs."""
        with ExitStack() as stack:
            for name, unit in self._units.items():
                before, after = self._remember(name)
                handles = [unit.register_forward_pre_hook(before, with_kwargs=True), unit.register_forward_hook(after)]
                for inner, child in unit.named_modules():
                    if self._context.random is not None and is_dropout(child) and child.training:
                        handles.append(child.register_forward_hook(self._remember_mask(name, inner)))
                for handle in handles:
                    stack.callback(handle.remove)
            yield

    def returned(self, output: object) -> None:
        """Remember which trained outputs are a rank's part and no DTensor. Every rank of the axis calls it."""
        self._returned.clear()
        for number, leaf in enumerate(leaves(output)):
            leaf = parts_of(leaf)[0]
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.requires_grad and leaf.numel():
                x = leaf.detach().reshape(-1)[:_LOOKED_AT].double()
                mark = x @ torch.arange(len(x), device=x.device, dtype=x.dtype).cos()
                norms, marks = gather_values(torch.stack([x.norm(), mark])[None], self._context.group).T
                size = float((marks.max() - marks.min()) / norms.max())
                if size > _SAME:
                    what = f"returns other values on each rank (output {number})"
                    self._returned.append(Difference(module="", what=what, size=size))

    def _remember(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return hooks before and after a block's first call."""
        states: list[Tensor] = []

        def before(module: nn.Module, args: object, kwargs: object) -> None:
            if name not in self._inputs:
                self._inputs[name] = self._short(args, kwargs, whole=not (name and self._context.sequence_parallel))
                states.append(random_state(self._device))

        def after(module: nn.Module, args: object, output: object) -> None:
            if states and not self._inputs[name].why:
                drew = bool(random_state(self._device) != states.pop())
                depends = drew or self._inputs[name].shortened or (module.training and has_batch_norm(module))
                if not depends:
                    self._inputs[name].outputs = [leaf.detach().clone() for leaf in trained(output)]

        return before, after

    def _short(self, args: Any, kwargs: Any, *, whole: bool) -> Inputs:
        """Return a copy of a block's inputs, or of their first samples. Every rank of the axis calls it."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        rows = next((len(tensor) for tensor in tensors if tensor.ndim > 1), 1)
        samples = sum(tensor.numel() for tensor in tensors if tensor.ndim > 1 and len(tensor) == rows)
        counts = torch.tensor([[sum(map(Tensor.numel, tensors)) - samples, samples]], device=self._device)
        counts = gather_values(counts, self._context.group).amax(0) * (1 if whole else self._context.size)
        fixed, samples = map(int, counts)
        inputs, chosen = Inputs(args, kwargs, rows), max(1, min(rows, rows * INPUTS // max(1, fixed + samples)))
        if (elements := fixed + samples * chosen // max(1, rows)) > 2 * INPUTS:
            sequences = [tensor for tensor in tensors if tensor.ndim == (3 if tensor.is_floating_point() else 2)]
            if not sequences:
                limit = f"expected at most {2 * INPUTS:,}; {_SHORTER}"
                return Inputs(why=f"its input has {elements:,} elements in one sample, {limit}")
            length = sequences[0].shape[1]
            positions = max(1, length * INPUTS // elements)
            inputs = inputs.shorten(length, max(positions // _TILE * _TILE, min(positions, _TILE)))
        return inputs.first(chosen)

    def _remember_mask(self, name: str, inner: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            masks = self._inputs.setdefault(name, Inputs()).masks
            if inner not in masks and isinstance(output, Tensor) and not isinstance(output, TensorInParts):
                x = args[0].detach()
                zeros = (output.detach() == 0) & (x != 0)
                # equal constants may be of different parts
                masked = int(zeros.sum()) if bool((x != x.flatten()[0]).any()) else 0
                masks[inner] = (digest(x), digest(zeros), masked)

        return hook

    def run(self) -> Verification:
        """Try the watched blocks. The ranks of the tensor axis, and those that share its parameters, call it."""
        start, tried, skipped = time.perf_counter(), dict[str, float](), dict[str, str]()
        differences = [*self._returned]
        for name in sorted(self._inputs):
            inputs = self._inputs.pop(name)
            differences += _compare_masks(name, inputs, self._context)
            if inputs.why:
                skipped[name] = inputs.why
            if not inputs.args and not inputs.kwargs:
                continue
            try:
                sizes, off_by = self._try(name, inputs)
                if off_by > _COPY_TOLERANCE:
                    skipped[name] = (
                        f"its copy computes other values than it did (off by {off_by:.1e}): a hook on it, or something "
                        "that it shares with others, changes them"
                    )
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
            differences += [Difference(module=name, what=what, size=size) for size, what in worst]
        took = time.perf_counter() - start
        return Verification(modules=tried, differences=tuple(differences), skipped=skipped, seconds=took)

    def _try(self, name: str, inputs: Inputs) -> tuple[dict[str, float], float]:
        """Return the differences between the split block and the whole one, and of the copy from the block itself."""
        unit, context = self._units[name], self._context
        parameters = dict(unit.named_parameters())
        cuts = {inner: _cut_of(parameter, context) for inner, parameter in parameters.items()}
        self._refuse_split_inputs(name, inputs)
        parts = dict[str, Tensor]()
        for inner, cut in cuts.items():
            whole = widen(self._whole(f"{name}.{inner}" if name else inner).detach())
            parts[inner] = whole.clone() if cut is None else take_chunk(whole, *cut, context.group)
            del whole
        while True:
            code, failure, outcome = self._run_whole(name, parts, cuts, inputs)
            if code != _OUT_OF_MEMORY or inputs.rows < 2:
                break
            inputs = inputs.first(inputs.rows // 2)
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(failure or "another rank of the axis is out of memory")
        if code:
            shorter = f" with its first positions alone; {_SHORTER}" if inputs.shortened else ""
            raise _NotTried((failure or "it does not run unsplit on another rank of the axis") + shorter)
        for inner, parameter in parameters.items():
            parts[inner] = _as_split(parameter, parts[inner], cuts[inner], context)
        with closing(BlockRun(unit, parts, (inputs.args, inputs.kwargs))) as split, self._kept(unit.modules()):
            outputs = split.outputs()
            return self._compare(name, outcome, split, outputs), inputs.off_by(outputs)

    def _run_whole(
        self, name: str, parts: Mapping[str, Tensor], cuts: Mapping[str, Cut | None], inputs: Inputs
    ) -> tuple[int, str, _Outcome]:
        """Run a block as it was written: return an error's code, the same on all ranks, its text, and the results."""
        expected, cotangents, gradients, code, failure = list[Tensor](), list[Tensor](), dict[str, Tensor](), 0, ""
        unit, reads = self._units[name], WholeReads(self._context)
        whole_inputs = _join_inputs(name, inputs, self._context)
        # around the backward, too, in which a model may recompute
        try:
            with ExitStack() as stack:
                whole = stack.enter_context(closing(BlockRun(unit, parts, whole_inputs)))
                reads.cuts.update({whole.parameters[inner]: cut for inner, cut in cuts.items() if cut})
                undo_changes(whole.block)
                for context in (self._kept(unit.modules()), reads.of(whole.block)):
                    stack.enter_context(context)
                expected = whole.outputs()
                cotangents = [noise(want.shape, seed).to(want) for seed, want in enumerate(expected)]
                gradients = whole.gradients(expected, cotangents)
            expected = [tensor.detach() for tensor in expected]
        except CannotCopy as error:
            failure, code = str(error), _FAILED
        # training meets the block's own errors, where a loop may catch them
        except Exception as error:  # noqa: BLE001
            failure = f"it does not run unsplit: {type(error).__name__}: {error}".splitlines()[0]
            code = _OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else _FAILED
        code = reads.failed_elsewhere or int(largest(code, self._device, self._context.group))
        return code, failure, (expected, cotangents, gradients)

    def _refuse_split_inputs(self, name: str, inputs: Inputs) -> None:
        """Refuse inputs beside hidden states that differ between ranks, such as an earlier layer's keys."""
        hidden = [*inputs.args[:1], *(inputs.kwargs.get(argument) for argument in self._context.inputs)]
        heads = _local_inputs(name, self._context)
        tensors = tensors_in((inputs.args, {key: value for key, value in inputs.kwargs.items() if key not in heads}))
        digests = [digest(tensor) for tensor in tensors if all(tensor is not state for state in hidden)]
        if digests:
            table = gather_values(torch.stack(digests)[None], self._context.group)
            if not bool((table == table[0]).all()):
                raise _NotTried("its input is another layer's part of heads or features")

    def _compare(self, name: str, outcome: _Outcome, split: BlockRun, outputs: list[Tensor]) -> dict[str, float]:
        expected, cotangents, wanted = outcome
        context, sizes = self._context, dict[str, float]()
        if len(expected) != len(outputs):
            return {f"it returns {len(outputs)} tensors instead of {len(expected)}": 1.0}
        dims = [_split_dim(have, want) for have, want in zip(outputs, expected)]
        outputs = [
            torch.cat(have.parts, dim) if isinstance(have, TensorInParts) and dim is not None else parts_of(have)[0]
            for have, dim in zip(outputs, dims)
        ]
        for number, (have, want, dim) in enumerate(zip(outputs, expected, dims)):
            local = have.to_local() if isinstance(have, DTensor) else have
            whole = local if dim is None else join_chunks(local.detach(), dim, want.shape[dim], context.group)
            sizes[f"output {number}" if len(outputs) > 1 else "output"] = measure(want, whole)
        parts = [_part_of(*pair, context) for pair in zip(cotangents, outputs, dims)]
        is_no_part = any(local_tensor(part).shape != local_tensor(have).shape for part, have in zip(parts, outputs))
        if largest(is_no_part, self._device, context.group):
            shapes = f"{tuple(outputs[0].shape)}, which is no rank's part of {tuple(expected[0].shape)}"
            return {f"it returns {shapes}": 1.0}
        gradients = split.gradients(outputs, parts)
        sizes_here = (float(tensor.abs().max()) for tensor in wanted.values() if tensor.numel())
        typical = largest(max(sizes_here, default=0.0), self._device, context.group)
        for inner, want in wanted.items():
            gradient: Any = gradients[inner]
            if isinstance(gradient, DTensor):
                if inner in split.parameters:
                    # of which each rank has its part of both
                    parameter: Any = split.parameters[inner]
                    gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
                elif isinstance(placement := gradient.placements[0], Shard):
                    want = want.chunk(context.size, placement.dim)[context.rank]
                gradient = gradient.to_local()
            elif name and context.sequence_parallel and gradient.shape != want.shape:
                want = want.chunk(context.size, 1)[context.rank]
            sizes[f"gradient of {inner}"] = measure(want, gradient, TOLERANCE * typical)
        return sizes


class _NotTried(Exception):
    """A block that cannot be tried."""


def _compare_masks(name: str, inputs: Inputs, context: Context) -> Iterator[Difference]:
    """Yield dropouts whose masks are alike on ranks with different parts, or differ on ranks with the same."""
    for inner, (x, zeros, count) in sorted(inputs.masks.items()):
        table = gather_values(torch.stack([x, zeros, torch.full_like(x, count)])[None], context.group)
        same_input, same_mask = (bool((table[:, column] == table[0, column]).all()) for column in (0, 1))
        if int(table[:, 2].min()) >= _MASKED and same_input != same_mask:
            what = "draws other masks on ranks with the same values"
            if same_mask:
                what = "draws the same mask for parts of different ranks"
            yield Difference(module=f"{name}.{inner}", what=what, size=1.0)


def _cut_of(parameter: object, context: Context) -> Cut | None:
    """Return the dim along which the tensor axis splits a parameter, and its whole length."""
    if not isinstance(parameter, DTensor):
        return None
    axis = (parameter.device_mesh.mesh_dim_names or ()).index((context.mesh.mesh_dim_names or ("",))[0])
    placement = parameter.placements[axis]
    return (placement.dim, parameter.shape[placement.dim]) if isinstance(placement, Shard) else None


def _as_split(parameter: object, part: Tensor, cut: Cut | None, context: Context) -> Tensor:
    """Return this rank's part as a parameter that the tensor axis splits."""
    if not isinstance(parameter, DTensor):
        return part
    shape, placement = parameter.shape, Shard(cut[0]) if cut else Replicate()
    return DTensor.from_local(part, context.mesh, [placement], run_check=False, shape=shape, stride=strides(shape))


def _local_inputs(name: str, context: Context) -> set[str]:
    prefix = f"{name}." if name else ""
    regions = (region for at, region in context.regions.items() if at == name or at.startswith(prefix))
    return {argument for region in regions for argument in region.local_inputs}


def _join_inputs(name: str, inputs: Inputs, context: Context) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of one process: whole along the sequence, with all heads where ranks have some."""
    args, kwargs = list(inputs.args), dict(inputs.kwargs)
    whole: list[tuple[Any, Any]] = [(kwargs, key) for key in sorted(_local_inputs(name, context).intersection(kwargs))]
    if name and context.sequence_parallel:
        named = [(kwargs, key) for key in context.inputs if isinstance(kwargs.get(key), Tensor)]
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_floating_point():
            whole.append((args, 0))
        elif named and kwargs[named[0][1]].is_floating_point():
            whole.append(named[0])
    for arguments, key in whole:
        if isinstance(x := arguments[key], Tensor):
            arguments[key] = gather_values(x.detach(), context.group, 1).requires_grad_(x.requires_grad)
    return tuple(args), kwargs


def _split_dim(have: Tensor, want: Tensor) -> int | None:
    """Return the dim along which an output of the split block is a part of the whole one's."""
    if isinstance(have, DTensor):
        placement = have.placements[0]
        return placement.dim if isinstance(placement, Shard) else None
    differing = [dim for dim, (part, length) in enumerate(zip(have.shape, want.shape)) if part != length]
    return differing[0] if len(differing) == 1 and have.ndim == want.ndim else None


def _part_of(cotangent: Tensor, have: Tensor, dim: int | None, context: Context) -> Tensor:
    """Return the part of a whole output's gradient that this rank's output gets."""
    if dim is None:
        return cotangent
    part = cotangent.chunk(context.size, dim)[context.rank].contiguous()
    return part_like(part, have) if isinstance(have, DTensor) else part


def _one_of_each_kind(module: nn.Module, context: Context, blocks: Sequence[str]) -> Iterator[str]:
    """Yield one block of each kind, embeddings and heads, or the model if other styles stand outside and it can run."""

    def contains(outer: str, inner: str) -> bool:
        return inner == outer or inner.startswith(f"{outer}.")

    outside = [
        name for name in context.styles if not any(contains(block, name) or contains(name, block) for block in blocks)
    ]
    alone = [name for name in outside if context.styles[name].stands_alone]
    if len(alone) < len(outside) and not any(getattr(part, "stands_in", False) for part in module.modules()):
        yield ""
        return
    kinds: dict[Any, str] = {}
    for number, name in enumerate(blocks):
        styled = {inner[len(name) + 1 :]: style for inner, style in context.styles.items() if contains(name, inner)}
        if styled:
            kinds.setdefault(kind_of(module.get_submodule(name), number, styled), name)
    yield from kinds.values()
    yield from alone
