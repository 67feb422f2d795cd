"""The protocol of passes: what a pass declares, and in which order passes apply."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.errors import MeshError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.patterns import class_name, find_modules, is_called, suggestion


class Stage(enum.IntEnum):
    """Declare when a pass applies, relative to other passes.

    Layers are divided first: the other passes see those that a rank computes. Whole experts are divided before tensor
    parallelism splits the features of each expert. Passes over positions wrap modules before tensor parallelism splits
    their features. Tensor parallelism decides what a layer computes, so it applies before all passes that wrap the
    layer. Data parallelism shards the parameters as the other passes left them, so it applies last.
    """

    LAYERS = -1
    EXPERTS = 0
    POSITIONS = 1
    TENSOR = 2
    PRECISION = 3
    RECOMPUTE = 4
    COMPILE = 5
    DATA = 6


class Role(enum.Enum):
    """Declare the difference between the ranks of an axis. The core derives batches, seeds, reductions and checks from
    the roles.

    - ``SAMPLES``: each rank gets different samples; gradients are averaged over the axis, and random state differs.
    - ``POSITIONS``: each rank gets different positions of the same samples, from :meth:`meshpar.Parallelized.split`.
      Gradients are averaged over the axis, and random state differs.
    - ``FEATURES``: each rank gets the same samples and computes a different part of a layer; random state agrees where
      activations are whole, and a parameter that every rank keeps whole must get one gradient.
    - ``LAYERS``: each rank computes different layers.
    """

    SAMPLES = "samples"
    POSITIONS = "positions"
    FEATURES = "features"
    LAYERS = "layers"


Guards = Literal["always", "first", "off"]
"""``always``: guards compare in every step, beside an accelerator in the first ones and then without waiting.
``first``: they exchange in the first steps, and then compare only what costs no exchange. ``off``: the passes run
alone.
"""


Fact = TypeVar("Fact")


@final
class Facts:
    """The facts of one plan: when its ``guards`` compare, and what passes install, for which others ask by type."""

    def __init__(self, guards: Guards = "off") -> None:
        self.guards = guards
        self._facts: list[object] = []

    def add(self, facts: Iterable[object]) -> None:
        """Take facts in."""
        self._facts += facts

    def find(self, kind: type[Fact]) -> Fact | None:
        """Return the fact of a type, the latest of several; None where no pass has installed one."""
        for fact in reversed(self._facts):
            if isinstance(fact, kind):
                return fact
        return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The moments and facts that a pass has put on a module.

    Attributes:
        moments: mechanisms around the module's calls, backwards and steps (:class:`meshpar.step.moment.Moment`).
        facts: that others may ask for by type.
        outermost: called last of all, to wrap the module's call outside of all moments.
    """

    moments: Sequence[Any] = ()
    facts: Sequence[object] = ()
    outermost: Sequence[Callable[[], None]] = ()


class Pass:
    """Define a technique of your own: inherit this class, override defaults, and define ``apply``.

    >>> class Double(Pass):
    ...     name, stage = "Double", Stage.TENSOR
    ...
    ...     def apply(self, module, layout, mesh):
    ...         module.register_forward_hook(lambda module, args, output: 2 * output)

    ``Plan(mesh, [Double()])`` runs it; an entry point of the group ``meshpar.passes`` lets recipes name it.

    Attributes:
        name: name of the pass in messages.
        stage: when the pass applies: a :class:`Stage` or its number.
        roles: mesh axis -> role: the difference between its ranks. The pass claims these axes: each must be in the
            mesh, and no other pass may claim it.
        splits_sequence: activations between layers are split along the sequence over the pass's axis. The axis's ranks
            then draw different random numbers everywhere, and a block cannot be called alone.
        works_without_axes: the pass also computes its way where the mesh lacks its axes, which then have size 1.
        computes_in_parts: what the pass computes also runs on the equal parts of ``TensorParallel(parts=...)``.
        divides_optimizer: optimizer state is divided over replicas, so that none of them may be lost.
        keeps_on_host: parameters, gradients and optimizer state live in host memory.
        compiles: the pass changes the speed of a step, but not its values. The forecast replays a step without it.
        period: number of blocks after which the treatment of blocks repeats. The forecast replays at least one period.
        blocks_ahead: largest number of blocks whose parameters are gathered before they are used.
    """

    __slots__ = ()

    name: str
    stage: int
    roles: Mapping[str, Role] = MappingProxyType({})
    splits_sequence: bool = False
    works_without_axes: bool = False
    computes_in_parts: bool = True
    divides_optimizer: bool = False
    keeps_on_host: bool = False
    compiles: bool = False
    period: int = 1
    blocks_ahead: int = 1

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if missing := [attribute for attribute in ("name", "stage") if attribute not in dir(cls)] + (
            ["apply"] if cls.apply is Pass.apply and cls.install is Pass.install else []
        ):
            raise TypeError(
                f"{cls.__name__} inherits Pass and does not define {', '.join(missing)}; see help(meshpar.Pass)"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the pass claims."""
        return tuple(self.roles)

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        """Yield every reason why the pass cannot apply, one line each. Pure: reads names and shapes alone."""
        return iter(())

    def bits_problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        """Yield why results of ``Plan(same_bits=True)`` have other bits on ``mesh`` than in one process. Pure.

        By default a pass on an axis of several ranks does not keep them, and one without axes does.
        """
        for axis in self.axes:
            if mesh.axes[axis] > 1:
                yield (
                    f"{self.name} does not keep the bits of one process on {axis}={mesh.axes[axis]}; use {axis}=1, or "
                    "drop same_bits"
                )

    def warnings(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        """Yield avoidable costs of the pass in this plan, one line each. Pure."""
        return iter(())

    def conflicts(self, passes: Sequence[Pass], mesh: MeshSpec) -> Iterator[str]:
        """Yield why the pass cannot apply together with others of ``passes``, one line each. Pure."""
        return iter(())

    def machine_problems(self, device_type: str) -> Iterator[str]:
        """Yield what this machine lacks to run a rank on a type of device; checks and forecasts do not ask."""
        return iter(())

    def shards(self, module: nn.Module, layout: ModelLayout) -> set[str]:
        """Return the names of the parameters that the pass splits over its axes. Pure."""
        return set()

    def keeps(self, module: nn.Module, layout: ModelLayout) -> set[str]:
        """Return the names of the parameters that every rank keeps whole because a user asked for it. Pure."""
        return set()

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> Installed | None:
        """Change ``module`` in place and keep the name of every parameter; return what is installed besides, if
        anything. Collective: every rank calls it.

        Args:
            module: the model.
            layout: description of the model.
            mesh: mesh with the plan's axes by name. Only a pass with a ``POSITIONS`` axis sees such axes: for the
                others they are a part of the data axis before them, so data passes also average gradients over
                positions. The same applies to ``SAMPLES`` axes of passes before ``Stage.DATA``.
        """
        raise NotImplementedError

    def install(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh, facts: Facts) -> Installed | None:
        """Do what :meth:`apply` does with the ``facts`` of the passes before; override the one or the other."""
        return self.apply(module, layout, mesh)

    def positions(self, length: int, size: int, index: int) -> Tensor:
        """Return the positions of a sequence that one rank of a ``POSITIONS`` axis gets, (``length`` / ``size``) int64,
        in its order.

        By default the ranks get consecutive parts. Every position belongs to one rank, and all ranks get the same
        number.

        Args:
            length: of the whole sequence, a multiple of ``size``.
            size: number of ranks.
            index: of the rank, from 0.
        """
        part = length // size
        return torch.arange(index * part, (index + 1) * part)

    def split(self, module: nn.Module, layout: ModelLayout, axis: DeviceMesh, group: Any, rank: int) -> Any:
        """Do what ``apply`` does for one simulated ``rank`` of a ``FEATURES`` axis, with collectives on ``group``.

        Returns:
            What the pass's parts share; None where the pass cannot be tried without processes.
        """
        return None


def axes_of(passes: Iterable[Pass], mesh: MeshSpec, *roles: Role) -> tuple[str, ...]:
    """Return the axes of a resolved mesh, outermost first, to which a pass gives one of these roles."""
    claimed = {axis for pass_ in passes for axis, role in pass_.roles.items() if role in roles}
    return tuple(axis for axis in mesh.axes if axis in claimed)


def held_mesh(passes: Iterable[Pass], mesh: MeshSpec, *, apart: Iterable[str] = ()) -> MeshSpec:
    """Return the mesh that holds parameters; axes of samples and positions that no data pass claims join its axis."""
    data, within = _data_axes(list(passes), mesh)
    if not within:
        return mesh
    if not data:
        raise MeshError(f"nothing averages gradients over {', '.join(within)}; add a pass that holds parameters there")
    return mesh.folded(data[-1], [axis for axis in within if axis not in apart])


def unaveraged(passes: Iterable[Pass], mesh: MeshSpec) -> list[str]:
    """Return the axes of samples and positions over which no pass averages gradients."""
    data, within = _data_axes(list(passes), mesh)
    return [] if data else within


def _data_axes(passes: list[Pass], mesh: MeshSpec) -> tuple[tuple[str, ...], list[str]]:
    """Return the axes over which data passes hold parameters, and the other axes whose ranks get other gradients."""
    data = axes_of([pass_ for pass_ in passes if pass_.stage == Stage.DATA], mesh, Role.SAMPLES)
    differing = axes_of(passes, mesh, Role.POSITIONS, Role.SAMPLES)
    return data, [axis for axis in differing if mesh.axes[axis] > 1 and axis not in data]


def seen_mesh(pass_: Pass, passes: Iterable[Pass], mesh: MeshSpec) -> MeshSpec:
    """Return the mesh that a pass sees: the plan's if it splits positions, else that of its parameters."""
    if Role.POSITIONS in pass_.roles.values():
        return mesh
    return held_mesh(passes, mesh, apart=() if pass_.stage == Stage.DATA else pass_.roles)


def find_blocks(
    module: nn.Module, layout: ModelLayout, override: tuple[str, ...] | None = None
) -> list[tuple[str, nn.Module]]:
    """Return the blocks, innermost first, by the layout's patterns or ``override``, which may name a class."""
    blocks: dict[str, nn.Module] = {}
    for pattern in override if override is not None else layout.blocks:
        blocks.update(_matching(module, pattern))
    return sorted(blocks.items(), key=lambda item: -item[0].count("."))


def block_problems(
    owner: str,
    module: nn.Module,
    layout: ModelLayout,
    override: tuple[str, ...] | None = None,
    *,
    required: bool = True,
) -> Iterator[str]:
    """Yield patterns of blocks that match nothing, and missing ``required`` ones; ``owner``: the pass."""
    source = "layout block" if override is None else f"{owner}(blocks=...)"
    for pattern in override if override is not None else layout.blocks:
        matching = _matching(module, pattern)
        if not matching:
            yield unmatched(f"{source} {pattern!r}", pattern, module)
        for name, child in matching.items():
            if not is_called(child):
                kind = type(child).__name__
                yield (
                    f"{source} {pattern!r} matches {name}, a {kind}, which is never called; name the modules in it: "
                    f"'{name}.*'"
                )
    if required and override is None and not layout.blocks:
        yield (
            f"{owner} works block by block, but the layout names no blocks; give ModelLayout(blocks=...) or "
            f"{owner}(blocks=...)"
        )


def unmatched(what: str, pattern: str, module: nn.Module) -> str:
    """Return the message for a pattern that matches no module."""
    return (
        f"{what} matches no module; use a name of the model; "
        f"{suggestion(pattern, (name for name, _ in module.named_modules()))}"
    )


def _matching(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    by_name = dict(find_modules(module, pattern))
    return by_name or {name: child for name, child in module.named_modules() if class_name(child) == pattern}
