"""The trial of positions: the beginning of the first batch, whole and split; a NaN shows what mixes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar._torch.tensors import tree_map
from meshpar.core.errors import MeshparError, ParallelError, first_line
from meshpar.core.patterns import class_name, kind_of
from meshpar.passes.positions.parallel import Exchange
from meshpar.tensors.digests import leaves, tensors_in
from meshpar.trials.copies import CannotCopy, copied_state, copy_block, free, largest
from meshpar.trials.engine import TOLERANCE, as_evaluated, device_of, is_narrow, measure

log = logging.getLogger(__name__)

HALF_TOLERANCE = 0.2
"""How far the results may be off in 16 bits, in which a router may choose otherwise."""
_LONGEST = 256
_UNTRIED = "whether parts of a sequence compute what the whole does was not tried"
_REMEDY = (
    "only attention exchanges positions, through transformers' attention interface or in the modules of "
    "ModelLayout.attention, which call meshpar.attention: use a mesh without cp for this model, or name the module, "
    "ContextParallel(mixers=(...)), so that each rank computes it on whole sequences; Plan(..., verify=False) skips "
    "this test"
)

Batch = tuple[Any, Mapping[str, Any]]
"""Positional and keyword arguments."""
Compute = Callable[[Batch], Tensor | Exception | None]
"""Returns a model's hidden states for a batch, None where it returns none, or its error."""


@final
class MixingTest:
    """Tries a module whose positions are split, and whose attention exchanges them."""

    def __init__(self, module: nn.Module, exchange: Exchange, blocks: Sequence[str]) -> None:
        self._module, self._exchange, self._blocks = module, exchange, blocks
        self._dtypes: set[torch.dtype] = set()

    @torch.no_grad()
    def run(self, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
        """Compare the beginning of a batch, of which this rank has a part, split and whole. Every rank calls it."""
        length = _length((args, kwargs), 2)
        if length is None:
            return
        whole, part = self._beginning(length, args, kwargs)
        why = ""
        try:
            with copied_state(self._module, (whole, part)):
                pass
        except CannotCopy as error:
            why = str(error)
        if self._any(bool(why)):
            log.warning("%s: %s", _UNTRIED, why or "another rank cannot copy what the model holds")
            return

        def compute(batch: Batch) -> Tensor | Exception | None:
            try:
                with copied_state(self._module, batch) as (args, kwargs):
                    return _hidden(forward(*args, **kwargs))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, MeshparError) as error:
                return error

        blocks = map(self._module.get_submodule, self._blocks)
        with as_evaluated(self._module, blocks) as self._dtypes:
            self._compare(compute, whole, part)

    def _compare(self, compute: Compute, whole: Batch, part: Batch) -> None:
        with self._exchange.unsplit():
            want = compute(whole)
        if isinstance(want, Exception):
            log.warning("%s: %s: %s", _UNTRIED, type(want).__name__, first_line(want))
            return
        have = compute(part)
        if isinstance(have, MeshparError):
            raise have
        if isinstance(have, Exception):
            self._any(True)
            reason = f"{type(have).__name__}: {first_line(have)}"
            raise ParallelError(f"the model does not run on a part of the positions ({reason}); {_REMEDY}") from have
        if want is None or have is None:
            log.warning("%s: the model returned no tensor with positions", _UNTRIED)
            return
        self._count_alike(compute, whole, want)
        size = measure(want.index_select(1, self._exchange.rows(want.shape[1], want.device)), have)
        differs = size > self._tolerance(have)
        if self._any(differs):
            amount = f" (off by {size:.1e})" if differs else ""
            raise ParallelError(f"{self._culprit(compute, part)}, of which each rank has a part{amount}; {_REMEDY}")

    def _count_alike(self, compute: Compute, whole: Batch, want: Tensor) -> None:
        """Refuse a model that, without positions, counts otherwise than 0, 1, 2, ... as it does without a plan."""
        args, kwargs = whole
        ids = kwargs.get("position_ids")
        if ids is None or not torch.equal(ids, torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)):
            return
        with self._exchange.unsplit():
            counted = compute((args, {name: value for name, value in kwargs.items() if name != "position_ids"}))
        # an error: it needs them
        if isinstance(counted, Tensor) and measure(counted, want) > self._tolerance(want):
            raise ParallelError(
                f"{class_name(self._module)} computes other values without position_ids than with the 0, 1, 2, ... of "
                "par.split, so it counts its positions itself; put its positions into the batch as position_ids, or "
                "use a mesh without cp"
            )

    def _tolerance(self, output: Tensor) -> float:
        return HALF_TOLERANCE if is_narrow({*self._dtypes, output.dtype}) else TOLERANCE

    def _beginning(self, length: int, args: Any, kwargs: Mapping[str, Any]) -> tuple[Batch, Batch]:
        """Return the beginning of the whole batch, and this rank's part of it."""
        exchange, whole = self._exchange, length * self._exchange.size
        step = 2 * exchange.size
        end = min(whole, _LONGEST) // step * step or whole
        alike: list[bool] = []

        def join(value: object) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.ndim < 2 or value.shape[1] != length:
                return value.detach().clone()
            joined = exchange.values(value, 1)
            first, *other_parts = (
                joined[:, exchange.rows(whole, joined.device, rank)] for rank in range(exchange.size)
            )
            alike.append(all(torch.equal(first, other) for other in other_parts))
            return joined[:, :end].clone()

        def cut(value: object) -> Any:
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == end:
                return value.index_select(1, exchange.rows(end, value.device))
            return value

        short = tree_map(join, (args, dict(kwargs)))
        if alike and all(alike):
            raise MeshparError(
                "every rank got the same positions, which are not this rank's part; call the model with "
                "par.split(batch)"
            )
        return short, tree_map(cut, short)

    def _any(self, wrong: bool) -> bool:
        """Return whether something is wrong on any rank of the axis, so that all of them stop."""
        return largest(wrong, device_of(self._module), self._exchange.group) > 0

    def _culprit(self, compute: Compute, part: Batch) -> str:
        """Return what mixes positions, in words."""
        mixing: list[str] = []

        def look(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            length = _length((args, kwargs), 3)
            if length is not None and not mixing:
                try:
                    mixing.extend(self._mixing(name, module, args, kwargs, length))
                except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
                    log.debug("%s does not run with attention cut: %s", name, error)

        with ExitStack() as stack:
            for name in _one_of_each_kind(self._module, self._blocks):
                unit = self._module.get_submodule(name)
                stack.callback(unit.register_forward_pre_hook(partial(look, name), with_kwargs=True).remove)
            compute(part)
        if not mixing:
            return f"{class_name(self._module)} mixes positions, or counts them itself"
        return f"{mixing[0]} ({class_name(self._module.get_submodule(mixing[0]))}) mixes positions"

    def _mixing(self, name: str, unit: nn.Module, args: Any, kwargs: Any, length: int) -> list[str]:
        """Return the modules in ``unit`` that carry one position into another, the first and innermost first."""
        mixing: list[str] = []

        def look(inner: str, module: nn.Module, args: object, output: object) -> None:
            if any(_spread(leaf, length) for leaf in leaves(output)):
                mixing.append(inner)

        def spoil(value: object) -> Any:
            if callable(getattr(value, "update", None)):
                # a cache of keys and values, which this run must not fill
                return None
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 and value.shape[1] == length:
                value = value.detach().clone()
                value[:, length // 2] = float("nan")
            return value

        copied, (args, kwargs) = copy_block(unit, {}, (tree_map(spoil, args), tree_map(spoil, kwargs)))
        for inner, child in copied.named_modules():
            child.register_forward_hook(partial(look, f"{name}.{inner}" if inner else name))
        self._exchange.cut.append(True)
        try:
            output = copied.forward(*args, **kwargs)
        finally:
            self._exchange.cut.clear()
            free(copied)
        return (mixing or [name]) if any(_spread(leaf, length, inside=False) for leaf in leaves(output)) else []


def _length(batch: object, dims: int) -> int | None:
    """Return the number of positions of the first tensor with so many dims."""
    return next((tensor.shape[1] for tensor in tensors_in(batch) if tensor.ndim >= dims), None)


def _hidden(output: object) -> Tensor | None:
    """Return the first floating-point output that has positions: logits (B, L, V)."""
    parts = output if isinstance(output, Tensor | tuple | list | Mapping) else vars(output)
    hidden = next((tensor for tensor in tensors_in(parts) if tensor.is_floating_point() and tensor.ndim > 1), None)
    return hidden.to_local() if isinstance(hidden, DTensor) else hidden


def _spread(value: object, length: int, *, inside: bool = True) -> bool:
    """Return whether a position but the middle is NaN in (B, L, ...); ``inside`` also (B * L, D), (B, D, L + some)."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return False
    if value.shape[1] == length:
        dirty = value.isnan().movedim(1, 0).flatten(1).any(1)
        return bool(dirty.any()) and bool(dirty.sum() > dirty[length // 2])
    if value.ndim == 2 and value.shape[0] and not value.shape[0] % length:
        return _spread(value.unflatten(0, (-1, length)), length)
    if inside and value.ndim == 3 and length <= value.shape[2] < 2 * length:
        return int(value.isnan().flatten(0, 1).any(0).sum()) > 1
    return False


def _one_of_each_kind(module: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Yield one block of each kind, and the outermost modules beside the blocks."""
    numbered = reversed([*enumerate(blocks)])
    yield from {kind_of(module.get_submodule(name), number): name for number, name in numbered}.values()
    around = {name.rsplit(".", depth)[0] for name in blocks for depth in range(1, name.count(".") + 1)}
    for name, _ in module.named_modules():
        if name and name.rpartition(".")[0] in {"", *around} and name not in {*around, *blocks}:
            yield name
