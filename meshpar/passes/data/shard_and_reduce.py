"""FullyShard, HybridShard and Replicate: FSDP2, which averages the gradients of a unit at the end of its backward.

Other gradients are averaged or summed in ``whole_parameters.py``, ``instead_of_fsdp2.py``,
``step/backward.py`` and the backward of ``passes/tensor/collectives.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshpar._torch import BEFORE_2_13
from meshpar._torch.fsdp import replicate
from meshpar._torch.groups import flattened
from meshpar._torch.tensors import held_part
from meshpar._torch.units import is_shard
from meshpar.core import runtime
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, divisors
from meshpar.core.passes import Facts, Installed, Pass, Role, Stage, block_problems, find_blocks, unmatched
from meshpar.core.patterns import covers, find_modules, suggestion
from meshpar.passes.data.instead_of_fsdp2 import ReplicaShards, exchange_directly, sum_in_place, sum_replicas_by_tree
from meshpar.passes.data.whole_parameters import WholeParameters, kept_whole
from meshpar.passes.experts.routing import DividedModules
from meshpar.passes.pipeline.running import Layers
from meshpar.same_bits.trees import SameBits
from meshpar.step.gathered_weights import Gathering

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The arguments of every data-parallel pass; each pass describes them."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    blocks: tuple[str, ...] | None = None
    whole: tuple[str, ...] | Literal["frozen"] = ()

    def policy(
        self, param_dtype: torch.dtype | None, output_dtype: torch.dtype | None, cast_inputs: bool
    ) -> MixedPrecisionPolicy:
        """Return a policy whose reduction is in the dtype of the computation unless ``reduce_dtype`` says otherwise."""
        # FSDP2's own default is that up to torch 2.14, and the dtype of the stored parameters since
        return MixedPrecisionPolicy(param_dtype, self.reduce_dtype or param_dtype, output_dtype, cast_inputs)

    def inner(self) -> MixedPrecisionPolicy:
        """Return the policy of a unit inside the model."""
        return self.policy(self.param_dtype, None, self.cast_forward_inputs)

    def outer(self) -> MixedPrecisionPolicy:
        """Return the policy of the outermost unit, which alone casts the output."""
        return self.policy(self.param_dtype, self.output_dtype, self.cast_forward_inputs)

    def kept(self) -> MixedPrecisionPolicy:
        """Return the policy of a module in float32 among others that are not: its output goes back to their dtype."""
        return self.policy(torch.float32, self.param_dtype, True)

    ends_from: ClassVar[float] = math.inf
    """Parameters from which an embedding or a head is a unit of its own, reduced while others are in their backward."""

    def units(
        self, module: nn.Module, layout: ModelLayout, min_params: int = 0
    ) -> list[tuple[nn.Module, MixedPrecisionPolicy, str]]:
        """Return (module, policy, name) of the units, innermost first; the last is the whole model with the rest."""
        order = {name: number for number, (name, _) in enumerate(module.named_modules())}
        blocks = find_blocks(module, layout, self.blocks)
        large = {name: block for name, block in blocks if sum(p.numel() for p in block.parameters()) >= min_params}
        single: dict[str, nn.Module] = {}
        if self.param_dtype not in (None, torch.float32):
            pairs = (pair for pattern in layout.fp32 for pair in find_modules(module, pattern))
            single = {name: child for name, child in pairs if any(True for _ in child.parameters())}
        in_blocks = {child for block in large.values() for child in block.modules()}
        ends = {name: module.get_submodule(name) for name in large_ends(module, layout, self.ends_from)}
        large |= {name: child for name, child in ends.items() if child not in in_blocks}
        chosen = {name: child for name, child in {**large, **single}.items() if child is not module}
        inner = sorted(chosen.items(), key=lambda item: (-item[0].count("."), order[item[0]]))
        return [
            *((child, self.kept() if name in single else self.inner(), name) for name, child in inner),
            (module, self.outer(), ""),
        ]

    def keeps(self, module: nn.Module, layout: ModelLayout) -> set[str]:
        return set(kept_whole(module, self.whole)) if self.whole else set()

    def keep_whole(
        self, module: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...], facts: Facts
    ) -> tuple[set[nn.Parameter], Installed]:
        """Take out the parameters that every rank keeps whole; return them, and what averages their gradients."""
        for parameter in module.parameters():
            part = held_part(parameter)
            # which FSDP2 cannot split
            if not part.is_contiguous() and 0 not in part.stride() and not is_shard(parameter):
                part.data = part.data.contiguous()
        names, earlier = list(kept_whole(module, self.whole)), facts.find(WholeParameters)
        whole = earlier or WholeParameters(module, mesh, axes, by_tree=facts.find(SameBits) is not None)
        if names or earlier is not None:
            whole.take(names)
        new = [whole] if names and earlier is None else []
        return {module.get_parameter(name) for name in names}, Installed(moments=new, facts=new)

    def bits_problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        # A rank adds up its micro-batches in the dtype of stored gradients, and ranks theirs in that of the reduction.
        reduced = self.reduce_dtype or self.param_dtype
        stored = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
        if reduced is not None and (other := stored - {reduced}):
            yield (
                f"{type(self).__name__} reduces gradients in {reduced} and stores them in {min(map(str, other))}, so "
                f"that same_bits cannot hold; use reduce_dtype={min(map(str, other))}"
            )

    def common_problems(self, module: nn.Module, layout: ModelLayout, min_params: int = 0) -> Iterator[str]:
        """Yield the dtypes that are none, patterns that match nothing, and what the units mix."""
        owner = type(self).__name__
        yield from block_problems(owner, module, layout, self.blocks, required=False)
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        for pattern in () if self.whole == "frozen" else self.whole:
            if not any(covers(pattern, name) for name in names):
                close = suggestion(pattern, [*names, *(name for name, _ in module.named_modules())])
                yield f"{owner}(whole=...) {pattern!r} matches no parameter; {close}"
        for field in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            value = getattr(self, field)
            if value is not None and value not in FLOATS:
                yield f"{owner}({field}={value}) is not a floating dtype; use one of {', '.join(map(str, FLOATS))}"
        whole = set(kept_whole(module, self.whole))
        integers = {name for name, parameter in module.named_parameters() if not parameter.is_floating_point()}
        if BEFORE_2_13 and (sharded := sorted(integers - whole)):
            yield (
                f"{owner}: {', '.join(sharded)} are parameters of integers, which torch {torch.__version__} cannot "
                f"shard; use torch 2.13 or newer, register them as buffers, or use {owner}(whole={sharded})"
            )
        units = [(name, unit) for unit, _, name in self.units(module, layout, min_params)]
        yield from unit_content_problems(units, module, whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharding(Precision):
    """The arguments of FullyShard and HybridShard, which describe them and claim the axes."""

    axes: ClassVar[tuple[str, ...]]

    ends_from = 1 << 27
    reshard_after_forward: bool | int = True
    offload: Literal["cpu"] | None = None
    prefetch_forward: int = 0
    prefetch_backward: int = 1
    min_params: int = 0

    @property
    def keeps_on_host(self) -> bool:
        """Parameters, gradients and optimizer state live in host memory."""
        return self.offload == "cpu"

    @property
    def blocks_ahead(self) -> int:
        """Largest number of blocks whose parameters are gathered before they are used."""
        return self.prefetch_forward + self.prefetch_backward

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        owner, shards = type(self).__name__, mesh.axes["dp_shard"]
        yield from self.common_problems(module, layout, self.min_params)
        keep = self.reshard_after_forward
        if not isinstance(keep, bool) and not (1 < keep < shards and shards % keep == 0):
            fits = [divisor for divisor in divisors(shards) if divisor < shards] or "no number"
            yield (
                f"{owner}(reshard_after_forward={keep}) must be a divisor of dp_shard={shards}, between 1 and "
                f"{shards}; use {fits}"
            )
        if self.offload not in (None, "cpu"):
            yield f"{owner}(offload={self.offload!r}) is not known; use 'cpu' or None"
        if self.prefetch_forward < 0 or self.prefetch_backward < 0:
            yield (
                f"{owner}: prefetch depths are 0 or more, got forward {self.prefetch_forward}, backward "
                f"{self.prefetch_backward}"
            )
        for pattern in layout.fp32:
            if not any(find_modules(module, pattern)):
                yield unmatched(f"layout.fp32 pattern {pattern!r}", pattern, module)

    def shards(self, module: nn.Module, layout: ModelLayout) -> set[str]:
        whole = {id(parameter) for parameter in kept_whole(module, self.whole).values()}
        named = module.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if id(parameter) not in whole}

    def shard(
        self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh, facts: Facts, *, splits_replicas: bool = False
    ) -> Installed:
        """Apply ``fully_shard`` unit by unit, the outermost last; ``splits_replicas``: over both axes as one."""
        cast_buffers(module, self.buffer_dtype)
        axes = self.axes
        ignored, installed = self.keep_whole(module, mesh, axes, facts)
        pins = not runtime.on_host(mesh.device_type)
        common: dict[str, Any] = {
            "mesh": flattened(mesh[axes]) if splits_replicas else mesh[axes],
            "offload_policy": CPUOffloadPolicy(pin_memory=pins) if self.offload == "cpu" else OffloadPolicy(),
            "ignored_params": ignored,
        }
        keep, layers, experts = self.reshard_after_forward, facts.find(Layers), facts.find(DividedModules)
        meshes = {} if experts is None else experts.meshes
        divided = self._shard_divided(module, layout, meshes, common)
        *inner, (_, outer, _) = self.units(module, layout, self.min_params)
        # What runs last in forward is first in backward, and a gradient of an embedding needs no weights.
        outermost, ends = keep if not isinstance(keep, bool) else False, large_ends(module, layout, self.ends_from)
        units = [
            fully_shard(unit, reshard_after_forward=outermost if name in ends else keep, mp_policy=policy, **common)
            for unit, policy, name in sorted(inner, key=lambda one: ends.get(one[2], 0))
            if unit not in divided  # blocks=(...) may name what is divided
        ]
        fully_shard(module, reshard_after_forward=outermost, mp_policy=outer, **common)
        by_tree = facts.find(SameBits) is not None
        if by_tree or runtime.over_hosts(mesh.device_type):
            exchange_directly(module, mesh.device_type, by_tree=by_tree)
        self._prefetch(units, by_order=layers is None)
        slices = [ReplicaShards(module, mesh, meshes, *axes, by_tree=by_tree)] if splits_replicas else []
        if by_tree and len(axes) > 1 and not splits_replicas:
            sum_replicas_by_tree(module, mesh.get_group(axes[0]))
        goes_on = None if layers is None else partial(getattr, layers, "goes_on")
        gathering = Gathering(keep is False, slices[0] if slices else None, goes_on)
        return Installed(moments=installed.moments, facts=[*installed.facts, *slices, gathering])

    def _shard_divided(
        self, module: nn.Module, layout: ModelLayout, meshes: Mapping[nn.Module, DeviceMesh], common: dict[str, Any]
    ) -> set[FSDPModule]:
        """Shard what an axis of samples divides over the data axes alone, each module a unit."""
        # it computes in the dtype in which it would as a part of the unit around it, which has cast the inputs
        units = set[FSDPModule]()
        keep = self.reshard_after_forward if isinstance(self.reshard_after_forward, bool) else True
        single = {child for pattern in layout.fp32 for _, child in find_modules(module, pattern)}
        within = {inner for child in single for inner in child.modules()}
        axes = self.axes
        for unit, mesh in meshes.items():
            dtype = torch.float32 if unit in within and self.param_dtype is not None else self.param_dtype
            policy = self.policy(dtype, None, False)
            make = partial(fully_shard, reshard_after_forward=keep, mp_policy=policy, **common)
            units.update(make(child) for child in unit.children() if any(True for _ in child.parameters()))
            data_mesh = mesh[axes] if common["mesh"].ndim == len(axes) else flattened(mesh[axes])
            policy = self.kept() if unit in single and self.param_dtype is not None else policy
            make = partial(fully_shard, reshard_after_forward=keep, mp_policy=policy, **{**common, "mesh": data_mesh})
            units.add(make(unit))
        return units

    def _prefetch(self, units: list[FSDPModule], *, by_order: bool) -> None:
        """Set what is gathered ahead: FSDP2's own choice follows forwards, and fails for several before a backward."""
        for number, unit in enumerate(units):
            if self.prefetch_forward:
                unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + self.prefetch_forward])
            if self.prefetch_backward != 1 or not by_order:
                ahead = units[max(0, number - self.prefetch_backward) : number][::-1]
                # an empty list means FSDP2's own choice; the unit itself, which is gathered already, means none
                unit.set_modules_to_backward_prefetch(ahead or [unit])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard(_Sharding, Pass):  # type: ignore[override]
    """Shard every parameter over ``dp_shard``, whose ranks get different data (FSDP2; ZeRO-3, arXiv 1910.02054).

    Parameters and optimizer state keep the dtype of the model: build the model in float32 for float32 master weights.

    >>> import torch
    >>> from meshpar import FullyShard, Plan
    >>> print(Plan("dp_shard=8", [FullyShard(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)]))
    dp_shard=8 [FullyShard]

    Args:
        param_dtype: dtype of gathered parameters and of the computation. Defaults to the dtype of the parameters.
        reduce_dtype: dtype in which gradients are reduced. Defaults to ``param_dtype``.
        output_dtype: dtype of the outermost module's floating-point outputs. Defaults to no cast.
        cast_forward_inputs: cast floating-point inputs to ``param_dtype``, as FSDP2 does. Timesteps and positions are
            rounded, too (998.39 to 1000 in bfloat16): pass integers, or cast inputs in the model and set False.
        buffer_dtype: dtype of floating-point buffers. Defaults to no cast.
        blocks: name patterns or class names of the units. Defaults to the layout's blocks. An embedding or a head of
            2^27 parameters or more is a unit of its own where the layout names it (``vocab``, ``head``) and it is not
            tied.
        whole: patterns of parameters, or of modules for all of theirs, that every rank stores whole, in their own dtype
            (``("logit_scale", "vision")``), or ``"frozen"``: those that are not trained, such as the weights under
            adapters; nothing gathers them. Scalars are always whole. Their gradients are averaged at the end of each
            backward.
        reshard_after_forward: True (ZeRO-3): free gathered parameters after forward and gather them again in backward.
            False (ZeRO-2): keep gathered parameters until the backward; those of ``module.eval()`` serve all forwards
            until somebody writes a parameter, or ``module.train()``. A number: reshard to groups of this many adjacent
            ranks (a node). The outermost unit, large embeddings and heads keep their parameters, unless this is a
            number.
        offload: ``"cpu"`` stores parameters, gradients and optimizer state in host memory, pinned for an accelerator.
        prefetch_forward: number of units that forward gathers ahead, beyond FSDP2's own overlap.
        prefetch_backward: number of units that backward gathers ahead: 1 is FSDP2's default, 0 gathers none ahead.
        min_params: merge blocks with fewer parameters than this into the unit around them.
    """

    name = "FullyShard"
    stage = Stage.DATA
    roles = MappingProxyType({"dp_shard": Role.SAMPLES})

    def install(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh, facts: Facts) -> Installed:
        return self.shard(module, layout, mesh, facts)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HybridShard(_Sharding, Pass):  # type: ignore[override]
    """Shard parameters over ``dp_shard`` and replicate the shards over ``dp_replicate`` (FSDP2 on a 2-D mesh).

    Put ``dp_shard`` inside a node and ``dp_replicate`` across nodes, as ``MeshSpec.auto`` does. All-gathers then stay
    inside the nodes, and one all-reduce of gradient shards crosses the nodes.

    ``optimizer="world"`` splits parameters, gradients and optimizer state over all ranks of both axes. Each rank trains
    one slice of its shard, and keeps the shard itself in ``param_dtype`` only. A reduce-scatter in backward and an
    all-gather of the slices in the next forward send the bytes of the all-reduce. The results are the same.

    Parameters and optimizer state keep the dtype of the model: build the model in float32 for float32 master weights.

    >>> from meshpar import HybridShard, Plan
    >>> print(Plan("dp_replicate=4,dp_shard=8", [HybridShard()]))
    dp_replicate=4,dp_shard=8 [HybridShard]

    The other options are those of :class:`FullyShard`.

    Args:
        optimizer: ``"replica"``: each replica has the whole optimizer state. ``"world"``: the replicas share the
            optimizer state, gradients and parameters. With ``par.accumulate(reduce_each=True)``, each micro-batch is
            then also reduced over ``dp_replicate``, into slices. With ``offload="cpu"``, the shard in ``param_dtype``
            stays on the device. Replicas that may be lost (:class:`meshpar.training.Replicas`) require ``"replica"``.
    """

    optimizer: Literal["replica", "world"] = "replica"

    name = "HybridShard"
    stage = Stage.DATA
    roles = MappingProxyType({"dp_replicate": Role.SAMPLES, "dp_shard": Role.SAMPLES})

    @property
    def divides_optimizer(self) -> bool:  # type: ignore[override]
        """Optimizer state is divided over replicas."""
        return self.optimizer == "world"

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        yield from _Sharding.problems(self, module, layout, mesh)
        if self.optimizer not in ("replica", "world"):
            yield f"{self.name}(optimizer={self.optimizer!r}) is not known; use 'replica' or 'world'"
        if self.optimizer == "world" and not isinstance(self.reshard_after_forward, bool):
            yield (
                f"{self.name}(optimizer='world', reshard_after_forward={self.reshard_after_forward}) reshards to "
                "parts of a replica, whose shards are kept as they are; use reshard_after_forward=True or False"
            )

    def warnings(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if mesh.spans_nodes("dp_shard"):
            yield (
                f"axis 'dp_shard' (size {mesh.axes['dp_shard']}) spans nodes of {mesh.ranks_per_node} ranks, so every "
                f"gather crosses them; hybrid sharding is meant to keep it inside: dp_shard={mesh.ranks_per_node} or "
                "a divisor"
            )

    def install(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh, facts: Facts) -> Installed:
        splits = self.optimizer == "world" and mesh[self.axes[0]].size() > 1
        return self.shard(module, layout, mesh, facts, splits_replicas=splits)


def cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the floating buffers to ``dtype``; None leaves them as they are."""
    if dtype is None:
        return
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)


def large_ends(module: nn.Module, layout: ModelLayout, least: float) -> dict[str, int]:
    """Return the untied embeddings (-> -1) and heads (-> 1) of ``least`` parameters or more that the layout names."""
    sides = {pattern: {"vocab": -1, "head": 1}.get(str(style), 0) for pattern, style in layout.tensor.styles.items()}
    sides |= {layout.head: 1} if layout.head else {}
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    ends = dict[str, int]()
    for pattern, side in sides.items():
        for name, child in find_modules(module, pattern) if side else ():
            parameters = [] if any(True for _ in child.children()) else list(child.parameters())
            untied = all(uses[id(parameter)] == 1 for parameter in parameters)
            if parameters and untied and sum(parameter.numel() for parameter in parameters) >= least:
                ends[name] = side
    return ends


def unit_content_problems(units: list[tuple[str, nn.Module]], module: nn.Module, whole: set[str]) -> Iterator[str]:
    """Yield units with several dtypes, and tied parameters in two units; those in ``whole`` are in none."""
    unit_of = dict[int, str]()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for unit_name, unit in units:
        dtypes = dict[torch.dtype, str]()
        for parameter in unit.parameters():
            managed = parameter.requires_grad and names[id(parameter)] not in whole
            if unit_of.setdefault(id(parameter), unit_name) == unit_name and managed:
                dtypes.setdefault(parameter.dtype, names[id(parameter)])
        if len(dtypes) > 1:
            listed = ", ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
            yield (
                f"unit {unit_name or '(the outermost)'!r} mixes dtypes: {listed}; FSDP2 needs one dtype a unit: cast "
                "the model, or give the odd ones a unit"
            )
    titles, homes, places = {id(unit): title for title, unit in units}, {"": ""}, dict[int, dict[str, str]]()
    for name, child in module.named_modules(remove_duplicate=False):
        homes[name] = titles.get(id(child), homes[name.rpartition(".")[0]])
        for leaf, parameter in child.named_parameters(recurse=False):
            places.setdefault(id(parameter), {})[f"{name}.{leaf}" if name else leaf] = homes[name]
    for group in places.values():
        if len(set(group.values())) > 1 and not whole.intersection(group):
            listed = ", ".join(f"{name} in {home or '(the outermost)'!r}" for name, home in group.items())
            yield (
                f"tied parameters would land in two units: {listed}; take both out of the blocks, so that the "
                "outermost unit holds them"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate(Precision, Pass):
    """Replicate the model over ``dp_replicate`` (DDP). Gradients are averaged block by block while backward runs.

    Composes with :class:`TensorParallel`. For replicas of a sharded model use :class:`HybridShard`.

    Parameters and optimizer state keep the dtype of the model: build the model in float32 for float32 master weights.

    >>> from meshpar import Plan, Replicate
    >>> print(Plan("dp_replicate=4", [Replicate()]))
    dp_replicate=4 [Replicate]

    ``param_dtype``, ``reduce_dtype``, ``output_dtype``, ``cast_forward_inputs``, ``buffer_dtype``, ``blocks`` and
    ``whole`` are those of :class:`FullyShard`.
    """

    name = "Replicate"
    stage = Stage.DATA
    roles = MappingProxyType({"dp_replicate": Role.SAMPLES})

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        yield from self.common_problems(module, layout)
        if mesh.axes.get("dp_shard", 1) > 1:
            yield (
                "Replicate keeps whole replicas and cannot be combined with dp_shard; use HybridShard() for replicas "
                "of a sharded model"
            )

    def install(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh, facts: Facts) -> Installed:
        cast_buffers(module, self.buffer_dtype)
        ignored, installed = self.keep_whole(module, mesh, self.axes, facts)
        for unit, policy, _ in self.units(module, layout):
            replicate(unit, mesh=mesh["dp_replicate"], mp_policy=policy, ignored_params=ignored)
        if runtime.over_hosts(mesh.device_type):
            sum_in_place(module)
        if facts.find(SameBits) is not None:
            sum_replicas_by_tree(module, mesh.get_group("dp_replicate"))
        return installed
