"""One block run by itself, split and whole: fresh leaves, no random numbers, no sharding, and its outputs side by
side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from meshpar._torch.pytree import tree_map
from meshpar._torch.recompute import set_recomputed
from meshpar.passes.installed import in_its_own_place, installed
from meshpar.passes.tensor.collectives import gather_values
from meshpar.passes.tensor.context import Context
from meshpar.step.placements import part_like
from meshpar.step.pytrees import leaves


@final
class Run:
    """One run of a block: fresh leaves for parameters and inputs, outputs, gradients."""

    def __init__(self, parameters: Mapping[str, Tensor], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.parameters = {
            name: parameter.detach().requires_grad_(parameter.is_floating_point())
            for name, parameter in parameters.items()
        }
        self.inputs: list[Tensor] = []
        self._args, self._kwargs = tree_map(self._leaf, inputs)

    def _leaf(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        fresh = wide(value.detach()).clone()
        if value.requires_grad and value.is_floating_point():
            self.inputs.append(fresh.requires_grad_())
        return fresh

    def outputs(self, unit: nn.Module) -> list[Tensor]:
        with torch.enable_grad():
            output = unit.forward(*self._args, **self._kwargs)
        return [
            leaf
            for leaf in leaves(output)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad
        ]

    def gradients(self, outputs: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        named = {**self.parameters, **{f"input {place}": tensor for place, tensor in enumerate(self.inputs)}}
        # all leaves are fresh, and torch.autograd.grad does not run through a model's own reentrant checkpoint
        if outputs:
            torch.autograd.backward(outputs, cotangents)
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in named.items()
        }


@contextmanager
def holding(unit: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module compute with other parameters, under every name that one has."""
    by_id = {id(parameter): parameters[name] for name, parameter in unit.named_parameters()}
    places = [
        (child._parameters, key, value)
        for child in unit.modules()
        for key, value in child._parameters.items()
        if id(value) in by_id
    ]
    try:
        for owner, key, value in places:
            owner[key] = by_id[id(value)]  # type: ignore[assignment]
        yield
    finally:
        for owner, key, value in places:
            owner[key] = value


@contextmanager
def quiet(unit: nn.Module, *, autocast: bool = False) -> Iterator[None]:
    """Let a block run without random numbers, sharding, rounding of its buffers and autocast, and put back what it
    changed of itself.
    """
    modules = list(unit.modules())
    training = [child.training for child in modules]
    buffers = [
        (child._buffers, key, value) for child in modules for key, value in child._buffers.items() if value is not None
    ]
    hooks = [
        (child, child._forward_pre_hooks, child._forward_hooks) for child in modules if isinstance(child, FSDPModule)
    ]
    try:
        for child in modules:
            child.training = False
        for owner, key, value in buffers:
            owner[key] = wide(value).clone()
        for child in modules:
            set_recomputed(child, False)
        for child, _, _ in hooks:
            child._forward_pre_hooks, child._forward_hooks = (
                type(child._forward_pre_hooks)(),
                type(child._forward_hooks)(),
            )
        with (
            in_its_own_place(unit),
            nullcontext() if autocast else torch.amp.autocast(_device_type(unit), enabled=False),
        ):
            yield
    finally:
        for child, was in zip(modules, training):
            child.training = was
        for owner, key, value in buffers:
            owner[key] = value
        for child in modules:
            set_recomputed(child, True)
        for child, before, after in hooks:
            child._forward_pre_hooks, child._forward_hooks = before, after


@contextmanager
def as_evaluated(module: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[set[torch.dtype]]:
    """Let a module run without random numbers, recomputation and compiled blocks; yield the dtypes of what
    ``blocks`` are called with.
    """
    modules: list[Any] = list(module.modules())
    before = [(child.training, child._compiled_call_impl) for child in modules]
    seen: set[torch.dtype] = set()

    def look(block: nn.Module, args: object) -> None:
        seen.update(leaf.dtype for leaf in leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point())

    handles = [block.register_forward_pre_hook(look) for block in blocks]
    for child in modules:
        child.training, child._compiled_call_impl = False, None
        set_recomputed(child, False)
    try:
        yield seen
    finally:
        for child, (training, compiled) in zip(modules, before, strict=True):
            child.training, child._compiled_call_impl = training, compiled
            set_recomputed(child, True)
        for handle in handles:
            handle.remove()


@contextmanager
def plain_products(unit: nn.Module) -> Iterator[None]:
    """Let linear layers multiply as torch does: float8's rounding differs between a part and the whole."""
    held = [
        (known, known.product)
        for child in unit.modules()
        if (known := installed(child)) is not None and known.product is not None
    ]
    try:
        for known, _ in held:
            known.product = None
        yield
    finally:
        for known, product in held:
            known.product = product


def _device_type(unit: nn.Module) -> str:
    return next((parameter.device.type for parameter in unit.parameters()), "cpu")


def wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32)) if value.is_floating_point() else value


def gathered(x: Tensor, dim: int, group: Any) -> Tensor:
    return gather_values(x.detach(), group, dim).requires_grad_(x.requires_grad)


def joined(have: Tensor, want: Tensor, context: Context) -> tuple[Tensor, int | None]:
    """Return an output of the split block joined to the whole one's shape, and the dim along which it was split."""
    if isinstance(have, DTensor):
        placement = have.placements[0]
        dim = placement.dim if isinstance(placement, Shard) else None
        return _joined_along(have.to_local(), want, dim, context), dim
    differing = [dim for dim, (a, b) in enumerate(zip(have.shape, want.shape)) if a != b]
    dim = differing[0] if len(differing) == 1 and have.ndim == want.ndim else None
    return _joined_along(have, want, dim, context), dim


def _joined_along(have: Tensor, want: Tensor, dim: int | None, context: Context) -> Tensor:
    if dim is None:
        return have
    size, width = want.shape[dim], -(-want.shape[dim] // context.size)
    short = width - have.shape[dim]
    if short:
        have = torch.cat([have, have.new_zeros(*have.shape[:dim], short, *have.shape[dim + 1 :])], dim)
    return gather_values(have.detach(), context.group, dim).narrow(dim, 0, size)


def slice_like(whole: Tensor, part: Tensor, dim: int | None, context: Context) -> Tensor:
    """Return this rank's chunk of ``whole`` along ``dim``, as ``part`` is one, a DTensor where that is one."""
    if dim is None:
        return whole
    mine = whole.chunk(context.size, dim)[context.rank].contiguous()
    return part_like(mine, part) if isinstance(part, DTensor) else mine


def local_slice(whole: Tensor, part: DTensor, context: Context) -> Tensor:
    placement = part.placements[0]
    return whole.chunk(context.size, placement.dim)[context.rank] if isinstance(placement, Shard) else whole


def noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.device, like.dtype)


def off(want: Tensor, have: Tensor, floor: float) -> float:
    """Return the largest difference over the largest value; a tensor that holds rounding noise is measured by
    ``floor`` / TOLERANCE.
    """
    if want.shape != have.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    error = (want.detach().double() - have.detach().double()).abs().max()
    scale = max(float(want.detach().double().abs().max()), floor, 1e-30)
    size = float(error) / scale
    return size if size == size else float("inf")
