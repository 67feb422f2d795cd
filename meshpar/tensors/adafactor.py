"""Adafactor on sharded parameters: torch's own step, on parts of tensors whose norms and means are those of the
whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshpar.core.errors import MeshparError
from meshpar.tensors.placements import local_tensor, placed_like, shard_dim, undivided


@final
class Part:
    """This rank's part of a tensor with the operations of torch's Adafactor; shape, norms and means are the whole's."""

    def __init__(self, local: Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        self.local, self._shape = local, torch.Size(shape)
        self._mesh, self._placements = mesh, tuple(placements)

    @classmethod
    def of(cls, tensor: Tensor | None) -> Any:
        """Return this rank's part of a DTensor; a plain tensor is its own part."""
        return (
            cls(local_tensor(tensor), tensor.shape, tensor.device_mesh, tensor.placements)
            if isinstance(tensor, DTensor)
            else tensor
        )

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Let ``torch.norm(part)`` and, from torch 2.14 on, ``torch.linalg.vector_norm(part)`` be ``part.norm()``."""
        is_norm = function in (torch.norm, torch.linalg.vector_norm) and isinstance(args[0], cls)
        return args[0].norm(*args[1:], **(kwargs or {})) if is_norm else NotImplemented

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def dim(self) -> int:
        return len(self._shape)

    def numel(self) -> int:
        return self._shape.numel()

    def size(self, dim: int) -> int:
        return self._shape[dim]

    def norm(self, p: object = 2, dim: int | None = None, keepdim: bool = False, **others: object) -> Any:
        """Return the 2-norm of the whole tensor, or of its vectors along ``dim``. Collective over its axes."""
        if p not in (2, "fro") or keepdim != (dim is not None) or any(other is not None for other in others.values()):
            raise NotImplementedError(
                f"norm(p={p}, dim={dim}, keepdim={keepdim}, {others}) of a part is none that Adafactor computes"
            )
        squares = torch.linalg.vector_norm(self.local, 2, dim, keepdim, dtype=self._wide()).square_()
        dims = range(self.dim()) if dim is None else (dim % self.dim(),)
        norm = self._over_ranks(squares, dims).sqrt_().to(self.dtype)
        return norm if dim is None else self._along(norm, dim)

    def mean(self, dim: int, *, keepdim: bool) -> Part:
        """Return the means of the whole tensor along ``dim``. Collective over the axes that divide it."""
        total = self.local.sum(dim, keepdim=keepdim, dtype=self._wide())
        return self._along(self._over_ranks(total, (dim % self.dim(),)).div_(self.size(dim)).to(self.dtype), dim)

    def __matmul__(self, row: Part) -> Part:
        """Return the outer product of a column and a row; each axis divides one of them at most, or both alike."""
        placements = [
            row_placement if shard_dim(column_placement) is None else column_placement
            for column_placement, row_placement in zip(self._placements, row._placements, strict=True)
        ]
        return Part(self.local @ row.local, (*self._shape[:-1], row._shape[-1]), self._mesh, placements)

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def _over_ranks(self, sums: Tensor, dims: Sequence[int]) -> Tensor:
        """Add up sums along ``dims`` over the axes that divide these."""
        # offloaded parameters are on the host, where an accelerator's groups cannot reduce
        total = sums.to(self._mesh.device_type)
        for axis, placement in enumerate(self._placements):
            if shard_dim(placement) in dims and self._mesh.size(axis) > 1:
                dist.all_reduce(total, group=self._mesh.get_group(axis))
        return total.to(sums.device)

    def _along(self, local: Tensor, dim: int) -> Part:
        shape = [1 if axis == dim % self.dim() else size for axis, size in enumerate(self._shape)]
        return Part(local, shape, self._mesh, undivided(self._placements, {dim % self.dim()}))


def _elementwise(name: str) -> Callable[..., Part]:
    def compute(self: Part, *args: Any, **kwargs: Any) -> Part:
        parts = (argument.local if isinstance(argument, Part) else argument for argument in args)
        return Part(getattr(self.local, name)(*parts, **kwargs), self._shape, self._mesh, self._placements)

    return compute


for _name in ("__neg__", "__mul__", "add_", "mul_", "div_", "lerp_", "square_", "rsqrt_", "clamp_", "clone"):
    setattr(Part, _name, _elementwise(_name))


def adafactor_by_parts(parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the parts of a parameter, its gradient and its state's factors; MeshparError for another's state."""
    if not isinstance(parameter, DTensor):
        return parameter, grad, state
    # sums that tensor parallelism left partial
    if isinstance(grad, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    for key, reduced in (
        ("row_var", {parameter.ndim - 1}),
        ("col_var", {parameter.ndim - 2}),
        ("variance", set[int]()),
    ):
        if key in state:
            shape = tuple(1 if dim in reduced else size for dim, size in enumerate(parameter.shape))
            if state[key].shape != shape:
                raise MeshparError(
                    f"Adafactor's {key} has shape {tuple(state[key].shape)}, and of a parameter of shape "
                    f"{tuple(parameter.shape)} it has {shape}; restore the optimizer by CheckpointManager, or load "
                    "the state of an Adafactor of this model"
                )
            state[key] = placed_like(state[key], parameter, reduced)
    return Part.of(parameter), Part.of(grad), {key: Part.of(value) for key, value in state.items()}
