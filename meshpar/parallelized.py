"""Parallelized: a module that trains on a mesh, and what needs the mesh."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshpar import _torch, initialize
from meshpar.description import Description, describe
from meshpar.errors import MeshparError
from meshpar.guards import reshard
from meshpar.layout import ModelLayout
from meshpar.mesh import MeshSpec
from meshpar.passes import random
from meshpar.passes.base import Stage
from meshpar.patterns import class_name
from meshpar.placements import local_tensor, sharded_axes
from meshpar.replicas import check_equal
from meshpar.weights import WeightSource

if TYPE_CHECKING:
    from meshpar.plan import Plan

Batch = TypeVar("Batch")
FIRST_STEPS = 2


@final
class Parallelized:
    """The same module, its mesh and its plan; made by :meth:`meshpar.Plan.apply`.

    Attributes:
        module: the module that was handed in; its names and ``state_dict`` keys are untouched.
        mesh: the DeviceMesh, with the plan's axes by name.
        spec: the mesh as data, resolved.
        plan: the plan that made it.
        layout: the model's description.
        device: this rank's device.
        data_axes: the axes whose ranks see different data.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, spec: MeshSpec, plan: Plan, layout: ModelLayout, device: torch.device
    ) -> None:
        self.module, self.mesh, self.spec, self.plan, self.layout, self.device = module, mesh, spec, plan, layout, device
        self.data_axes = tuple(axis for axis in spec.axes if any(axis in each.axes for each in plan.passes if each.stage == Stage.DATA))
        self._place = spec.coordinates(dist.get_rank())
        self._steps_checked = 0

    @property
    def data_size(self) -> int:
        """How many different batches the ranks see at a time."""
        return math.prod(self.spec.axes[axis] for axis in self.data_axes)

    @property
    def data_rank(self) -> int:
        """Which of the ``data_size`` batches this rank sees; the ranks of the other axes see the same one."""
        place = 0
        for axis in self.data_axes:
            place = place * self.spec.axes[axis] + self._place[axis]
        return place

    def materialize(self, *, seed: int | None = None, weights: WeightSource | None = None) -> Parallelized:
        """Give what was built on meta its memory and values, and return self. A part that had values keeps them under ``seed``.

        Args:
            seed: draw the initial weights; for a seed they are the same on every mesh, bit for bit (CPU and GPU draw different ones).
            weights: read them, each rank its own part, by the module's names or those of ``layout.weights``.

        Raises:
            MeshparError: neither or both given; weights that do not fit, all of them named.
            LayoutError: a module that has no initialisation.
        """
        if (seed is None) == (weights is None):
            raise MeshparError(f"materialize takes either seed= or weights=, got seed={seed} and weights={weights}")
        reshard(self.module)
        missing = initialize.without_memory(self.module)
        if seed is not None and not missing:
            raise MeshparError("the module has its weights already, and a seed would replace them; build it on meta to draw new ones")
        offload = any(getattr(each, "offload", None) == "cpu" for each in self.plan.passes)
        initialize.allocate(self.module, self.device, torch.device("cpu") if offload else self.device)
        if weights is not None:
            initialize.from_source(self.module, self.layout, weights, self.device, missing)
        else:
            assert seed is not None
            initialize.from_seed(self.module, self.layout, seed, self.device, missing)
        return self

    def manual_seed(self, seed: int) -> None:
        """Seed this rank's random state for training: data ranks differ, and the ranks of the other axes agree where activations do.

        Inside a tensor-parallel region each rank's state is derived from the one that they share, so that dropout differs across
        shards. Under sequence parallelism the ranks hold different positions everywhere, and so differ from the start.
        """
        differing = [axis for each in self.plan.passes if getattr(each, "sequence_parallel", False) for axis in each.axes]
        random.seed(self.device, random.mix(seed, self.data_rank, *(self._place[axis] for axis in differing)))

    def accumulate(self, micro_batches: Iterable[Batch], *, reduce_each: bool = False) -> Iterator[Batch]:
        """Yield micro-batches of one optimizer step; gradients are reduced after the last one's backward only.

        ``for micro in par.accumulate(batches): (loss(micro) / len(batches)).backward()``

        Args:
            micro_batches: any iterable; every rank must hand in as many.
            reduce_each: reduce-scatter after every micro-batch, which keeps gradients sharded (hybrid sharding still crosses
                ``dp_replicate`` once, at the last).
        """
        units = [unit for unit in (self.module,) if hasattr(unit, "set_requires_gradient_sync")]
        waiting: list[Batch] = []

        def reduce(last: bool) -> None:
            for unit in units:
                unit.set_requires_gradient_sync(last or reduce_each)  # type: ignore[operator]
                if "dp_replicate" in self.data_axes and "dp_shard" in self.data_axes:
                    unit.set_requires_all_reduce(last)  # type: ignore[operator]

        whole = False
        try:
            for batch in micro_batches:
                if waiting:
                    reduce(last=False)
                    yield waiting.pop()
                waiting.append(batch)
            reduce(last=True)
            yield from waiting
            whole = True
        finally:
            reduce(last=True)
            if not whole:
                # Unreduced gradients of a step that was left would be added to the next one's, where zero_grad does not see them.
                _torch.drop_unreduced_gradients(self.module)

    def token_scale(self, tokens: int | Tensor) -> Tensor:
        """Return the factor that turns this rank's summed loss into its share of the mean over all tokens of all ranks.

        ``(loss_sum * par.token_scale(tokens)).backward()``, with ``tokens`` counted over all micro-batches of the step, gives the gradient
        of the global token mean: the reduction over the data axes averages, so the factor is data size / global tokens.

        Args:
            tokens: how many tokens count on this rank in the whole step.

        Returns:
            A float32 scalar on this rank's device, equal on every rank.

        Collective: every rank calls it.
        """
        count = torch.zeros((), device=self.device) + tokens
        return self.data_size / self.data_sum(count).clamp(min=1.0)

    def data_sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the data axes, in place, and return it. Collective: every rank calls it."""
        for axis in self.data_axes:
            dist.all_reduce(values, group=self.mesh.get_group(axis))
        return values

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their joint norm is at most ``max_norm``.

        Right across parameters on different axes: each rank takes the norm of its shards, and one small all-reduce an axis joins
        them; what is replicated counts once. Nothing waits for the device.

        Args:
            max_norm: the bound; ``inf`` only measures.
            norm_type: 2, or any p >= 1, or ``inf``.

        Returns:
            The norm before clipping, a float32 scalar on this rank's device, equal on every rank.

        Collective: every rank calls it.
        """
        reshard(self.module)
        self._check_gradients_agree()
        parts: dict[frozenset[str], list[Tensor]] = {}
        for parameter in self.module.parameters():
            if (grad := _whole_gradient(parameter)) is not None:
                parts.setdefault(frozenset(sharded_axes(grad)), []).append(local_tensor(grad))
        # A rank may have no gradient where another has: every rank joins the same reductions all the same.
        kinds = {frozenset(sharded_axes(parameter)) for parameter in self.module.parameters() if parameter.requires_grad}
        total = self._join({axes: _power(parts.get(axes, []), norm_type, self.device) for axes in kinds | set(parts)}, norm_type)
        norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
        if not math.isinf(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for grads in parts.values():
                for device, together in _by_device(grads).items():
                    torch._foreach_mul_(together, scale.to(device))
        return norm

    def _check_gradients_agree(self) -> None:
        """See that all data ranks have gradients for the same parameters.

        Where one lacks what another has, FSDP2 has joined gradients of different parameters without a word. Reading the answer waits for
        the device, so an accelerator is asked in the first steps only.
        """
        if self.device.type != "cpu" and self._steps_checked >= FIRST_STEPS:
            return
        self._steps_checked += 1
        trained = [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        without = [name for name, parameter in trained if parameter.grad is None]
        mark = zlib.crc32("\n".join(without).encode())
        marks = torch.tensor([mark, -mark], dtype=torch.int64, device=self.device)
        for axis in self.data_axes:
            dist.all_reduce(marks, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
        if int(marks[0]) != -int(marks[1]):
            raise MeshparError(
                f"data ranks have gradients for different parameters; here these have none: {', '.join(without[:6]) or '(all have one)'}; "
                "let every rank use every parameter in each step, e.g. by adding 0 * parameter.sum() to the loss where one is skipped"
            )

    def _join(self, powers: dict[frozenset[str], Tensor], norm_type: float) -> Tensor:
        """Join the powers of norms, keyed by the axes over which their gradients are split, axis by axis, innermost first."""
        largest = math.isinf(norm_type)
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        for axis in reversed(list(self.spec.axes)):
            keys = sorted((key for key in powers if axis in key), key=sorted)
            if not keys:
                continue
            vector = torch.stack([powers.pop(key) for key in keys])
            dist.all_reduce(vector, op, group=self.mesh.get_group(axis))
            for key, value in zip(keys, vector.unbind(), strict=True):
                rest = key - {axis}
                known = powers.get(rest)
                powers[rest] = value if known is None else torch.maximum(known, value) if largest else known + value
        return powers.get(frozenset(), torch.zeros((), device=self.device))

    def check_replicas(self) -> None:
        """See that ranks which must hold the same parameters and buffers do, bit for bit, by a hash.

        Raises:
            MeshparError: on every rank, naming the parameters and the ranks that differ.

        Collective: every rank calls it.
        """
        reshard(self.module)
        state = dict(initialize.state(self.module))
        tensors = {name: local_tensor(tensor) for name, tensor in state.items()}
        groups = {}
        places = [self.spec.coordinates(rank) for rank in range(self.spec.size)]
        for name, tensor in state.items():
            split = sharded_axes(tensor)
            groups[name] = [hash(tuple(place[axis] for axis in split)) for place in places]
        check_equal(tensors, groups, self.device, "parameters or buffers")

    def describe(self) -> Description:
        """Return what this rank holds: a table that prints itself, with bytes a rank by block and the totals."""
        reshard(self.module)
        return describe(self.module, self.layout, str(self.plan))

    def __repr__(self) -> str:
        return f"Parallelized({class_name(self.module)}, {self.plan})"


def _whole_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient with partial sums reduced."""
    grad: Any = parameter.grad
    if isinstance(grad, DTensor) and any(isinstance(each, Partial) for each in grad.placements):
        parameter.grad = grad.redistribute(placements=[Replicate() if isinstance(each, Partial) else each for each in grad.placements])
    return parameter.grad


def _power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return sum |g|^p over ``grads`` (their maximum for p = inf), in float32."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    norms = [norm for together in _by_device(grads).values() for norm in torch._foreach_norm(together, norm_type, dtype=torch.float32)]
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups
