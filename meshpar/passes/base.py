"""The protocol of a pass, and the order in which passes stand."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.layout import ModelLayout
from meshpar.mesh import MeshSpec
from meshpar.patterns import find_modules, is_called, nearest


class Stage(enum.IntEnum):
    """When a pass applies.

    Tensor parallelism decides what a layer computes, so it comes before anything that wraps the layer; data parallelism shards
    whatever the others left, so it comes last.
    """

    TENSOR = 1
    RECOMPUTE = 2
    COMPILE = 3
    DATA = 4


@runtime_checkable
class Pass(Protocol):
    """One technique. Any object with these members is one; nothing has to be inherited or imported.

    Attributes:
        name: how messages call it.
        stage: when it applies (a :class:`Stage` or its number).
        axes: the mesh axes it claims; each must be in the mesh, and no other pass may claim it. The ranks of an axis that a
            ``Stage.DATA`` pass claims get different data.

    Three more members are asked for where they exist: ``warnings(module, layout, mesh) -> Iterator[str]``;
    ``machine_problems(device_type) -> Iterator[str]``, what the machine lacks that runs a rank, which a plan may be checked and forecast
    without; and ``shards(module, layout) -> set[str]``, the names of the parameters that it splits.
    """

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> int: ...
    @property
    def axes(self) -> tuple[str, ...]: ...

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        """Yield what is wrong, one line each. Pure: looks at names and shapes, touches nothing, and no rank talks to another."""

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> None:
        """Work in place and keep every parameter's name. ``mesh`` has the plan's axes by name. Collective: every rank calls it."""


@runtime_checkable
class Splits(Protocol):
    """A pass that splits features over its one axis, and can do so for one simulated rank."""

    @property
    def axes(self) -> tuple[str, ...]: ...

    def split(self, module: nn.Module, layout: ModelLayout, axis: DeviceMesh, group: Any, rank: int) -> Any:
        """Split ``module`` in place as ``rank`` of ``axis`` holds it, with collectives on ``group``; return what its styles share."""


def find_blocks(module: nn.Module, layout: ModelLayout, override: tuple[str, ...] | None = None) -> list[tuple[str, nn.Module]]:
    """Return the model's blocks, innermost first, each once: those of ``layout.blocks`` or of a pass's own ``override``.

    A pattern without a dot that names a class (``T5Block``) stands for every module of that class.
    """
    found: dict[str, nn.Module] = {}
    for pattern in override if override is not None else layout.blocks:
        found.update(_matching(module, pattern))
    return sorted(found.items(), key=lambda item: -item[0].count("."))


def block_problems(
    owner: str, module: nn.Module, layout: ModelLayout, override: tuple[str, ...] | None = None, *, required: bool = True
) -> Iterator[str]:
    """Yield the patterns of blocks that match nothing, and their absence where they are ``required``; ``owner`` is the pass that asks."""
    source = "layout block" if override is None else f"{owner}(blocks=...)"
    for pattern in override if override is not None else layout.blocks:
        found = _matching(module, pattern)
        if not found:
            yield unmatched(f"{source} {pattern!r}", pattern, module)
        for name, child in found.items():
            if not is_called(child):
                kind = type(child).__name__
                yield f"{source} {pattern!r} matches {name}, a {kind}, which is never called itself; name what is in it: '{name}.*'"
    if required and override is None and not layout.blocks:
        yield f"{owner} works block by block and the layout names none; give ModelLayout(blocks=...) or {owner}(blocks=...)"


def unmatched(what: str, pattern: str, module: nn.Module) -> str:
    """Return the message for a pattern that matches no module."""
    near = nearest(pattern, (name for name, _ in module.named_modules()))
    return f"{what} matches no module" + (f"; nearest names: {', '.join(near)}" if near else "")


def _matching(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    by_name = dict(find_modules(module, pattern))
    return by_name or {name: child for name, child in module.named_modules() if type(child).__name__ == pattern}
