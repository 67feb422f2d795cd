"""Whether anything but attention mixes positions that a plan splits: tried in the first forward, before anybody trusts it.

Names cannot tell. So one block of each kind, and each part beside the blocks, runs once more on what it got, with attention cut: no
position sees another. One position of the input is made NaN. Wherever a NaN comes out elsewhere, something has carried it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from meshpar.errors import ParallelError
from meshpar.exact.agreement import leaves
from meshpar.exact.trial import quiet
from meshpar.passes.exchange import Exchange
from meshpar.patterns import class_name


@final
class MixingTest:
    """Tries the parts of a module whose positions are split.

    Args:
        module: the outermost module.
        exchange: how its attention exchanges positions.
        blocks: the repeated blocks by name.
    """

    def __init__(self, module: nn.Module, exchange: Exchange, blocks: Sequence[str]) -> None:
        self._module, self._exchange = module, exchange
        self._units = list(_one_of_each_kind(module, blocks))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Try the chosen parts while the module runs, each when it is called.

        Raises:
            ParallelError: on every rank; names the module that mixes positions.
        """
        with ExitStack() as stack:
            for name in self._units:
                unit = self._module.get_submodule(name)
                stack.callback(unit.register_forward_pre_hook(self._tries(name), with_kwargs=True).remove)
            yield

    def _tries(self, name: str) -> Callable[..., None]:
        tried: list[bool] = []

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            length = _length((args, kwargs))
            if tried or length is None:
                return
            tried.append(True)
            try:
                culprit = self._mixing(name, module, args, kwargs, length)
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
                raise ParallelError(
                    f"{name} ({class_name(module)}) does not run on a part of the positions ({type(error).__name__}: "
                    f"{str(error).splitlines()[0]}); it needs attention that goes through transformers' attention interface "
                    "or meshpar.attention: use a mesh without cp for this model; Plan(..., verify=False) skips this test"
                ) from error
            if culprit is not None:
                raise ParallelError(
                    f"{culprit} ({class_name(self._module.get_submodule(culprit))}) mixes positions, of which each rank has a part; "
                    "they are exchanged in attention alone (transformers' attention interface, or meshpar.attention): use a "
                    "mesh without cp for this model; Plan(..., verify=False) skips this test"
                )

        return hook

    @torch.no_grad()
    def _mixing(self, name: str, unit: nn.Module, args: Any, kwargs: Any, length: int) -> str | None:
        """Return the first module in ``unit`` that carries one position into another."""
        found = list[str]()

        def look(inner: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: object, output: object) -> None:
                if not found and any(_spread(each, length) for each in leaves(output)):
                    found.append(inner)

            return hook

        def spoil(value: object) -> Any:
            if callable(getattr(value, "update", None)):
                return None  # a cache of keys and values, which this run must not fill
            if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 and value.shape[1] == length):
                return value
            spoiled = value.detach().clone()
            spoiled[:, length // 2] = float("nan")
            return spoiled

        with ExitStack() as stack:
            for inner, child in unit.named_modules():
                full = f"{name}.{inner}" if inner else name
                stack.callback(child.register_forward_hook(look(full)).remove)
            self._exchange.cut.append(True)
            stack.callback(self._exchange.cut.clear)
            stack.enter_context(quiet(unit, autocast=True))
            output = unit.forward(*tree_map(spoil, args), **tree_map(spoil, kwargs))
        if not any(_spread(each, length, inside=False) for each in leaves(output)):
            return None
        return found[0] if found else name


def _length(values: object) -> int | None:
    """Return the length of the first hidden states (B, L, ...) in ``values``."""
    return next((each.shape[1] for each in leaves(values) if isinstance(each, Tensor) and each.is_floating_point() and each.ndim > 2), None)


def _spread(value: object, length: int, *, inside: bool = True) -> bool:
    """Return whether several positions are NaN, in (B, L, ...) or (B * L, D); ``inside`` a block also in (B, D, L) with some padding."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return False
    if value.shape[1] == length:
        dim = 1
    elif value.ndim == 2 and value.shape[0] and not value.shape[0] % length:
        return _spread(value.unflatten(0, (-1, length)), length)
    elif inside and value.ndim == 3 and length <= value.shape[2] < 2 * length:
        dim = 2
    else:
        return False
    return int(value.isnan().movedim(dim, 0).flatten(1).any(1).sum()) > 1


def _one_of_each_kind(module: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Yield one block of each kind, and the outermost modules beside the blocks."""
    kinds: dict[Any, str] = {}
    for name in blocks:
        block = module.get_submodule(name)
        settings = tuple((inner, class_name(child), getattr(child, "is_sliding", None)) for inner, child in block.named_modules())
        kinds.setdefault(settings, name)
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
