"""MeshSpec: names and sizes of mesh axes, as data."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.errors import MeshError, shown

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""The known axes, outermost first: the last ones talk most, so their ranks sit closest."""

MAX_AXES = 6

AUTO = re.compile(r"auto((?:\s*,\s*[A-Za-z_]\w*\s*=\s*\d+)*)")
"""The texts that leave the mesh to the topology, see :meth:`MeshSpec.auto`: ``auto``, ``auto,tp=4``."""


def is_auto(text: str) -> bool:
    """Return whether a mesh's text is ``auto``, or ``auto,tp=4``: the launcher's nodes then decide the axes."""
    return AUTO.fullmatch(text.strip()) is not None


@final
class MeshSpec:
    """Name the axes of a mesh and their sizes, outermost first. One size may be -1: it is inferred from the world size.

    ``MeshSpec("dp_replicate=2,dp_shard=-1,tp=4")`` and ``MeshSpec(dp_replicate=2, dp_shard=-1, tp=4)`` are equal. Known
    axes are sorted into the canonical order: ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``ep``, ``tp``. Axes with
    other names come before them, in the order written, and a pass must claim them.

    >>> from meshpar import MeshSpec
    >>> MeshSpec("tp=4,dp_shard=-1").resolve(32)
    MeshSpec('dp_shard=8,tp=4')

    Attributes:
        axes: name -> size.
        ranks_per_node: number of ranks on a node (torchrun's local world size). None: not known.

    Raises:
        MeshError: the text cannot be read, a name repeats, a size is not a positive number or -1, or two sizes are -1.
    """

    __slots__ = ("axes", "ranks_per_node")
    axes: Mapping[str, int]
    ranks_per_node: int | None

    def __init__(
        self, text: str | Mapping[str, int] | None = None, *, ranks_per_node: int | None = None, **axes: int
    ) -> None:
        if text is not None and axes:
            raise MeshError(f"a mesh is given as text or as keywords, got both {text!r} and {axes}; keep one")
        written = _parse(text) if isinstance(text, str) else dict(text if text is not None else axes)
        _validate(written, ranks_per_node)
        strangers = [name for name in written if name not in AXES]
        ordered = {name: written[name] for name in (*strangers, *AXES) if name in written}
        object.__setattr__(self, "axes", MappingProxyType(ordered))
        object.__setattr__(self, "ranks_per_node", ranks_per_node)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a MeshSpec does not change; make a new one instead of setting {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return partial(MeshSpec, ranks_per_node=self.ranks_per_node), (dict(self.axes),)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes.items())

    def __repr__(self) -> str:
        return f"MeshSpec({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshSpec) and (self.axes, self.ranks_per_node) == (other.axes, other.ranks_per_node)

    def __hash__(self) -> int:
        return hash((tuple(self.axes.items()), self.ranks_per_node))

    @classmethod
    def auto(cls, world_size: int, ranks_per_node: int, text: str = "auto") -> MeshSpec:
        """Return the hybrid mesh for nodes: replicas across nodes; shards, and the axes of ``text``, inside a node.

        Args:
            world_size: number of ranks.
            ranks_per_node: number of ranks on a node.
            text: ``auto``, or with axes inside a node: ``auto,cp=2,tp=4``.

        Raises:
            MeshError: the text cannot be read, the nodes are not all full, or the axes do not divide a node.
        """
        match = AUTO.fullmatch(text.strip())
        node_axes = None if match is None else _parse(match[1])
        if node_axes is None or not {"dp_replicate", "dp_shard"}.isdisjoint(node_axes):
            raise MeshError(
                f"cannot read mesh {text!r}; write 'auto', 'auto,tp=4' or sizes like 'dp_replicate=2,dp_shard=-1'"
            )
        if world_size % ranks_per_node:
            raise MeshError(
                f"{world_size} ranks do not fill nodes of {ranks_per_node}; use whole nodes, or write the mesh out"
            )
        shards = ranks_per_node
        for axis, size in node_axes.items():
            if not size or shards % size:
                within = (
                    f"a node of {ranks_per_node} ranks"
                    if shards == ranks_per_node
                    else f"the {shards} ranks of a node that are left"
                )
                raise MeshError(f"{axis}={size} does not divide {within}; {sizes_text(axis, shards)}")
            shards //= size
        axes = {"dp_replicate": world_size // ranks_per_node, "dp_shard": shards}
        return cls(axes | {axis: size for axis, size in node_axes.items() if size > 1}, ranks_per_node=ranks_per_node)

    @classmethod
    def placed(cls, text: str, world_size: int, ranks_per_node: int) -> MeshSpec:
        """Return the resolved mesh of a text on nodes: ``auto`` and ``auto,tp=4`` as in :meth:`auto`, an empty text as
        all shards.

        Raises:
            MeshError: it does not fit.
        """
        if is_auto(text):
            return cls.auto(world_size, ranks_per_node, text)
        return cls(text.strip() or "dp_shard=-1", ranks_per_node=ranks_per_node).resolve(world_size)

    @property
    def size(self) -> int:
        """Number of ranks of the mesh, which must be resolved."""
        assert -1 not in self.axes.values(), "resolve() first"
        return math.prod(self.axes.values())

    def resolve(self, world_size: int) -> MeshSpec:
        """Return the spec for ``world_size`` ranks, with -1 replaced by a size.

        Raises:
            MeshError: the sizes do not multiply to ``world_size``.
        """
        sized = math.prod(size for size in self.axes.values() if size != -1)
        open_axis = next((name for name, size in self.axes.items() if size == -1), None)
        if open_axis is not None and world_size % sized:
            raise MeshError(
                f"mesh {self} infers {open_axis!r}, but {world_size} ranks cannot be divided by the {sized} "
                f"of the other axes; change one of them or start a multiple of {sized} ranks"
            )
        if open_axis is None and sized != world_size:
            raise MeshError(
                f"mesh {self} needs {sized} ranks, got {world_size}; start {sized} (torchrun --nproc-per-node), or "
                "change one axis, or set it to -1"
            )
        axes = {name: world_size // sized if size == -1 else size for name, size in self.axes.items()}
        return MeshSpec(axes, ranks_per_node=self.ranks_per_node)

    def shrunk(self, world_size: int) -> MeshSpec:
        """Return this mesh for another number of ranks. Only ``dp_replicate`` and ``dp_shard`` change, no other axis.

        ``dp_shard`` keeps its size if possible, and ``dp_replicate`` gets the remaining ranks. If ``dp_shard`` is -1,
        ``dp_replicate`` keeps its size.

        Raises:
            MeshError: ``world_size`` is not a multiple of the other axes, or the mesh has no data axis.
        """
        data = [name for name in ("dp_replicate", "dp_shard") if name in self.axes]
        stay = {name: size for name, size in self.axes.items() if name not in data}
        if -1 in stay.values():
            raise MeshError(f"mesh {self} infers the size of an axis that is not a data axis; give its size")
        fixed = math.prod(stay.values())
        if world_size < 1 or world_size % fixed or (not data and world_size != fixed):
            fixed_text = ",".join(f"{name}={size}" for name, size in stay.items()) or "it"
            needed = f"a multiple of {fixed}" if data else f"exactly {fixed}"
            raise MeshError(f"mesh {self} cannot run on {world_size} ranks: {fixed_text} needs {needed}")
        rest = world_size // fixed
        sizes = {data[0]: rest} if len(data) == 1 else {}
        if len(data) == 2:
            first, second = (
                ("dp_replicate", "dp_shard") if self.axes["dp_shard"] == -1 else ("dp_shard", "dp_replicate")
            )
            keeps = max(number for number in range(1, rest + 1) if rest % number == 0 and number <= self.axes[first])
            sizes = {first: keeps, second: rest // keeps}
        return MeshSpec(
            {name: sizes.get(name, size) for name, size in self.axes.items()}, ranks_per_node=self.ranks_per_node
        )

    def folded(self, axis: str, behind: Collection[str]) -> MeshSpec:
        """Return this mesh with the axes ``behind`` an axis as a part of it. Every rank keeps its number.

        Raises:
            MeshError: one of ``behind`` is not directly behind ``axis``.
        """
        names = [name for name, size in self.axes.items() if size > 1 or name == axis]
        first = names.index(axis) + 1
        if set(names[first : first + len(behind)]) != set(behind):
            raise MeshError(
                f"mesh {self} has {', '.join(behind)} apart from {axis!r}, whose ranks they divide further; name them "
                "'cp'"
            )
        size = math.prod(self.axes[name] for name in (axis, *behind))
        axes = {name: size if name == axis else old_size for name, old_size in self.axes.items() if name not in behind}
        return MeshSpec(axes, ranks_per_node=self.ranks_per_node)

    def spans_nodes(self, axis: str) -> bool:
        """Return whether a group of ``axis`` has ranks on several nodes. False if ``ranks_per_node`` is not known."""
        if self.ranks_per_node is None:
            return False
        names = list(self.axes)
        inner = math.prod(self.axes[name] for name in names[names.index(axis) :])
        return self.axes[axis] > 1 and (inner > self.ranks_per_node or self.ranks_per_node % inner != 0)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the ranks of each group that differ on ``axes`` alone, sorted by the first rank. Resolve the spec."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            elsewhere = tuple(index for axis, index in self.coordinates(rank).items() if axis not in axes)
            groups.setdefault(elsewhere, []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def build(self, device_type: str, *, own: bool = False) -> DeviceMesh:
        """Return the DeviceMesh of a resolved spec. Ranks are numbered row-major over the axes.

        A spec without axes is the mesh of one process: it gets one axis of size 1. Every axis inherits the time-out of
        the open process group.

        Args:
            device_type: type of the devices.
            own: an axis of all ranks gets a group of its own, too, and not the default one.

        Collective: every rank calls it.
        """
        return _built(device_type, tuple((self.axes or {"dp_shard": 1}).items()), own=own)

    @contextmanager
    def opened(self, device_type: str) -> Iterator[DeviceMesh]:
        """Build the DeviceMesh for the block, and close the groups that were opened in it, unless an error ends the
        block.

        Collective: every rank enters and leaves it.
        """
        from meshpar._torch.groups import open_groups

        before = set(open_groups())
        yield self.build(device_type)
        for group in open_groups():  # in the order in which all ranks made them
            if group not in before:
                dist.destroy_process_group(group)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` on every axis."""
        index: dict[str, int] = {}
        for name in reversed(list(self.axes)):
            rank, index[name] = divmod(rank, self.axes[name])
        return {name: index[name] for name in self.axes}

    def index(self, coordinates: Mapping[str, int], axes: Iterable[str]) -> int:
        """Return the index of the rank at ``coordinates`` among those that differ on ``axes``, outermost first."""
        return reduce(lambda index, axis: index * self.axes[axis] + coordinates[axis], axes, 0)


def _built(device_type: str, axes: tuple[tuple[str, int], ...], *, own: bool) -> DeviceMesh:
    from meshpar._torch.dtensor import forget_meshes, tell_apart
    from meshpar._torch.groups import share_timeout

    forget_meshes()
    names, sizes = zip(*axes)
    backends: Any = dict.fromkeys(names, dist.get_backend()) if own else None
    mesh = device_mesh.init_device_mesh(device_type, sizes, mesh_dim_names=names, backend_override=backends)
    vars(mesh)["_meshpar_own"] = own
    tell_apart(mesh)
    share_timeout(map(mesh.get_group, names))
    return mesh


def check_mesh(mesh: object) -> None:
    """Raise MeshError for a mesh of another kind than a plan takes."""
    if not isinstance(mesh, MeshSpec | str):
        raise MeshError(
            f"a plan's mesh is {shown(mesh)} of type {type(mesh).__name__}; expected text such as 'dp_shard=2,tp=4', "
            "or a MeshSpec: write Plan('dp_shard=2', [...]) or Plan(MeshSpec(dp_shard=2), [...])"
        )


def divisors(number: int) -> list[int]:
    """Return the first eight divisors of ``number`` above 1, smallest first."""
    return [divisor for divisor in range(2, number + 1) if number % divisor == 0][:8]


def sizes_text(axis: str, number: int) -> str:
    """Return which sizes of an axis divide ``number``, as a remedy: ``use tp=2 or 4``."""
    *first, last = [str(divisor) for divisor in divisors(number)] or [""]
    return f"use {axis}={', '.join(first)}{' or ' if first else ''}{last}" if last else f"drop {axis} from the mesh"


def default_device_type() -> str:
    """Return the accelerator's device type where there is one, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def _parse(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(-?\d+)", part)
        if match is None:
            raise MeshError(f"cannot read {part!r} in mesh {text!r}; write it like 'dp_replicate=2,dp_shard=-1,tp=4'")
        if match[1] in sizes:
            raise MeshError(f"axis {match[1]!r} appears twice in mesh {text!r}; keep one")
        sizes[match[1]] = int(match[2])
    return sizes


def _validate(axes: dict[str, int], ranks_per_node: int | None) -> None:
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise MeshError(f"axis {name!r} has size {size!r}; a size is a positive integer, or -1 for what is left")
        if not name.isidentifier():
            raise MeshError(f"axis name {name!r} is not an identifier; use letters, digits and '_'")
    if list(axes.values()).count(-1) > 1:
        raise MeshError(
            f"only one axis may be -1, got {[name for name, size in axes.items() if size == -1]}; give the sizes of "
            "the others"
        )
    if len(axes) > MAX_AXES:
        raise MeshError(f"a mesh has at most {MAX_AXES} axes, got {len(axes)}: {list(axes)}; drop those of size 1")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise MeshError(f"ranks_per_node is {ranks_per_node}; it is a positive integer")
