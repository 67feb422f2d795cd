"""Test that a model computes the same on parts of a sequence as on the whole: in the first forward, before anybody
trusts it.

Names cannot tell whether something else than attention mixes positions, or counts them itself. So the beginning of the
first batch runs twice without gradients: whole on every rank, as the model was written, and split over the ranks. Where
the results differ, a block of each kind runs once more with attention cut, so that no position sees another, and one
position made NaN: whatever brings a NaN to another position is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar._torch.pytree import tree_map
from meshpar.core.errors import MeshparError, ParallelError, first_line
from meshpar.core.patterns import class_name, kind_of
from meshpar.passes.installed import in_its_own_place, installed
from meshpar.passes.positions.exchange import Exchange
from meshpar.passes.untouched import CannotKeep, untouched
from meshpar.step.pytrees import leaves
from meshpar.trials.blocks import as_evaluated, off, quiet

log = logging.getLogger(__name__)

TOLERANCE, HALF_TOLERANCE = 1e-3, 0.2
"""How far the results may be off, relative to the largest: of float32, and of 16 bits, in which a router may choose
otherwise.
"""
_LONGEST = 256
_UNTRIED = "whether parts of a sequence compute what the whole does was not tried"
_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
_REMEDY = (
    "only attention exchanges positions, through transformers' attention interface or in the modules of "
    "ModelLayout.attention, which call meshpar.attention: use a mesh without cp for this model, or name the module, "
    "ContextParallel(mixers=(...)), so that each rank computes it on whole sequences; Plan(..., verify=False) skips "
    "this test"
)


@final
class MixingTest:
    """Tries a module whose positions are split.

    Args:
        module: the outermost module.
        exchange: how its attention exchanges positions.
        blocks: the repeated blocks by name.
    """

    def __init__(self, module: nn.Module, exchange: Exchange, blocks: Sequence[str]) -> None:
        self._module, self._exchange, self._blocks = module, exchange, blocks
        self._seen: set[torch.dtype] = set()

    @torch.no_grad()
    def run(self, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
        """Compare the beginning of a batch, split and whole.

        Args:
            forward: the module's computation.
            args: its positional arguments, this rank's part.
            kwargs: its keyword arguments.

        Raises:
            ParallelError: on every rank of the axis; names the module that mixes positions, where it is found.

        Collective: every rank calls it.
        """
        length = next(
            (leaf.shape[1] for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim > 1), None
        )
        if length is None:
            return
        short, part = self._beginning(length, args, kwargs)
        forward = partial(self._untouched, forward)
        blocks = [self._module.get_submodule(name) for name in self._blocks]
        why = ""
        try:
            with untouched(self._module, *short, *part):
                pass
        except CannotKeep as error:
            why = str(error)
        if self._agree(bool(why)):
            log.warning("%s: %s", _UNTRIED, why or "another rank cannot put back what the model does")
            return
        with in_its_own_place(self._module), as_evaluated(self._module, blocks) as self._seen:
            try:
                with self._exchange.unsplit():
                    want = _hidden(forward(*short[0], **short[1]))
            except _ERRORS as error:
                _unless_out_of_memory(error)
                log.warning("%s: %s: %s", _UNTRIED, type(error).__name__, first_line(error))
                return
            try:
                have = _hidden(forward(*part[0], **part[1]))
            except MeshparError:
                raise
            except _ERRORS as error:
                _unless_out_of_memory(error)
                self._agree(True)
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise ParallelError(
                    f"the model does not run on a part of the positions ({reason}); {_REMEDY}"
                ) from error
            if want is None or have is None:
                log.warning("%s: the model returned no tensor with positions", _UNTRIED)
                return
            self._count_alike(forward, short[0], short[1], want)
            mine = want.index_select(1, self._exchange.rows(want.shape[1], want.device))
            size = off(mine, have, 0.0)
            if size > self._tolerance(have):
                self._agree(True)
                raise ParallelError(
                    f"{self._culprit(forward, *part)}, of which each rank has a part (off by {size:.1e}); {_REMEDY}"
                )
            if self._agree(False):
                raise ParallelError(f"{self._culprit(forward, *part)}, of which each rank has a part; {_REMEDY}")

    def _untouched(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with untouched(self._module, args, kwargs):
            return forward(*args, **kwargs)

    def _count_alike(self, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], want: Tensor) -> None:
        """Refuse a model that, without positions, counts otherwise than 0, 1, 2, ... as it does without a plan."""
        ids = kwargs.get("position_ids")
        if ids is None or not torch.equal(ids, torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)):
            return
        try:
            with self._exchange.unsplit():
                counted = _hidden(
                    forward(*args, **{name: argument for name, argument in kwargs.items() if name != "position_ids"})
                )
        except (*_ERRORS, MeshparError) as error:
            _unless_out_of_memory(error)
            return  # it needs them
        if counted is not None and off(counted, want, 0.0) > self._tolerance(want):
            raise ParallelError(
                f"{class_name(self._module)} computes other values without position_ids than with the 0, 1, 2, ... of "
                "par.split, so it counts its positions itself; put its positions into the batch as position_ids, or "
                "use a mesh without cp"
            )

    def _tolerance(self, output: Tensor) -> float:
        return TOLERANCE if self._dtype(output) in (torch.float32, torch.float64) else HALF_TOLERANCE

    def _beginning(self, length: int, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the beginning of the whole batch, and this rank's part of it."""
        exchange, whole = self._exchange, length * self._exchange.size
        step = 2 * exchange.size
        end = min(whole, _LONGEST) // step * step or whole
        alike: list[bool] = []

        def joined(value: object) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.ndim < 2 or value.shape[1] != length:
                return value.detach().clone()
            every = exchange.values(value, 1)
            first, *others = (exchange.rows(whole, every.device, rank) for rank in range(exchange.size))
            alike.append(
                all(torch.equal(every.index_select(1, first), every.index_select(1, other)) for other in others)
            )
            return every[:, :end].clone()

        short = tree_map(joined, (args, dict(kwargs)))
        if alike and all(alike):
            raise MeshparError(
                "every rank got the same positions, which are not this rank's part; call the model with "
                "par.split(batch)"
            )

        def own(value: object) -> Any:
            split = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == end
            return (
                value.index_select(1, exchange.rows(end, value.device))
                if split and isinstance(value, Tensor)
                else value
            )

        return short, tree_map(own, short)

    def _agree(self, wrong: bool) -> bool:
        """Return whether any rank of the axis found something wrong, so that all of them stop."""
        device = next((parameter.device for parameter in self._module.parameters()), torch.device("cpu"))
        return bool(self._exchange.stacked(torch.tensor([[wrong]], device=device)).any())

    def _dtype(self, output: Tensor) -> torch.dtype:
        """Return the narrowest dtype in which the model computes, down to 16 bits."""
        if any(
            (known := installed(child)) is not None and known.product is not None for child in self._module.modules()
        ):
            return torch.bfloat16  # float8's products, whose scale is that of all positions of a tensor
        held = {parameter.dtype for parameter in self._module.parameters() if parameter.is_floating_point()} | {
            output.dtype,
            *self._seen,
        }
        return min(held, key=lambda dtype: torch.finfo(dtype).bits)

    def _culprit(self, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> str:
        """Return what mixes positions, in words."""
        found: list[str] = []
        with ExitStack() as stack:
            for name in _one_of_each_kind(self._module, self._blocks):
                unit = self._module.get_submodule(name)
                stack.callback(unit.register_forward_pre_hook(self._tries(name, found), with_kwargs=True).remove)
            forward(*args, **kwargs)
        if not found:
            return f"{class_name(self._module)} mixes positions, or counts them itself"
        return f"{found[0]} ({class_name(self._module.get_submodule(found[0]))}) mixes positions"

    def _tries(self, name: str, found: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            length = next(
                (leaf.shape[1] for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim > 2), None
            )
            if length is None or found:
                return
            try:
                found.extend(self._mixing(name, module, args, kwargs, length))
            except _ERRORS as error:
                log.debug("%s does not run with attention cut: %s", name, error)

        return hook

    def _mixing(self, name: str, unit: nn.Module, args: Any, kwargs: Any, length: int) -> list[str]:
        """Return the modules in ``unit`` that carry one position into another, the first and innermost first."""
        found: list[str] = []

        def look(inner: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: object, output: object) -> None:
                if any(_spread(leaf, length) for leaf in leaves(output)):
                    found.append(inner)

            return hook

        def spoil(value: object) -> Any:
            if callable(getattr(value, "update", None)):
                return None  # a cache of keys and values, which this run must not fill
            if not (
                isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 and value.shape[1] == length
            ):
                return value
            spoiled = value.detach().clone()
            spoiled[:, length // 2] = float("nan")
            return spoiled

        with ExitStack() as stack:
            for inner, child in unit.named_modules():
                stack.callback(child.register_forward_hook(look(f"{name}.{inner}" if inner else name)).remove)
            self._exchange.cut.append(True)
            stack.callback(self._exchange.cut.clear)
            stack.enter_context(quiet(unit, autocast=True))
            output = unit.forward(*tree_map(spoil, args), **tree_map(spoil, kwargs))
        return (found or [name]) if any(_spread(leaf, length, inside=False) for leaf in leaves(output)) else []


def _hidden(output: object) -> Tensor | None:
    """Return the first floating-point output that has positions: logits (B, L, V)."""
    parts = output if isinstance(output, Tensor | tuple | list | Mapping) else vars(output)
    found = next(
        (leaf for leaf in leaves(parts) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1),
        None,
    )
    return found.to_local() if isinstance(found, DTensor) else found


def _unless_out_of_memory(error: BaseException) -> None:
    if isinstance(error, torch.OutOfMemoryError):
        raise error


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
    kinds: dict[Any, str] = {}
    for place, name in enumerate(blocks):
        kinds.setdefault(kind_of(module.get_submodule(name), place), name)
    yield from kinds.values()
    around = {name.rsplit(".", depth)[0] for name in blocks for depth in range(1, name.count(".") + 1)}

    def beside(owner: nn.Module, prefix: str) -> Iterator[str]:
        for inner, child in owner.named_children():
            full = f"{prefix}.{inner}" if prefix else inner
            if full in around:
                yield from beside(child, full)
            elif full not in blocks:
                yield full

    yield from beside(module, "")


def mixing_test(module: nn.Module, blocks: Sequence[str]) -> MixingTest | None:
    """Return the test for modules other than attention that mix positions; None if attention exchanges none."""
    known = installed(module)
    if known is None or known.exchange is None:
        return None
    return MixingTest(module, known.exchange, blocks)
