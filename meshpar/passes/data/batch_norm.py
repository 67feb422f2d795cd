"""Batch norm whose statistics cover the batches of all data ranks; what every plan prepares in a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.lazy import LazyModuleMixin

from meshpar._torch.calls import assert_async
from meshpar._torch.tensors import BatchNorm
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Stage
from meshpar.core.resolved import Resolved
from meshpar.passes.tensor.collectives import gather_partial
from meshpar.step.inner_calls import installed, own_forward, set_forward

RECOMPUTED: ContextVar[bool] = ContextVar("RECOMPUTED", default=False)
"""True where a pass computes once more what was computed, and counted, before."""


def batch_norm_problems(module: nn.Module) -> Iterator[str]:
    """Yield the batch norms whose statistics :func:`synchronize_batch_norm` cannot take over several ranks."""
    for name, child in batch_norms(module):
        title = f"{name or 'the outermost module'} ({type(child).__name__})"
        if isinstance(child, LazyModuleMixin):
            yield (
                f"{title} has no number of features yet; run one forward before the plan is applied, or build it with "
                "its num_features"
            )
        elif not _has_torchs_forward(child):
            yield (
                f"{title} is a batch norm with a forward of its own, which would compute statistics of one data "
                "rank's part of the batch; use torch's BatchNorm and move the rest of that forward to a separate "
                "module, or use a norm that does not work across the batch"
            )


def synchronize_batch_norm(module: nn.Module, mesh: DeviceMesh, axes: Sequence[str]) -> None:
    """Compute the batch statistics of every batch norm of ``module`` over all ranks of ``axes``, in place.

    In float32, or float64 for float64 inputs; ranks may have different numbers of samples. The backward of the exchange
    sums over the ranks, whose losses all depend on the statistics; the data passes average. torch.nn.SyncBatchNorm
    (torch/nn/modules/_functions.py) reduces the same sums, by kernels of accelerators alone. Variances are combined as
    by Chan, Golub and LeVeque (1979), which does not cancel where the mean is large. It can be differentiated twice.
    """
    groups = [mesh.get_group(axis) for axis in axes if mesh[axis].size() > 1]
    for _, child in batch_norms(module):
        forward = installed(child)
        replaced = forward is not None and forward.forward is not None
        if _has_torchs_forward(child) and not isinstance(child, LazyModuleMixin) and not replaced:
            _set_forward(child, groups)


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a part of ``module`` computes statistics of all samples of a forward."""
    return any(True for _ in batch_norms(module))


def batch_norms(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the batch norms of ``module`` by name."""
    return ((name, child) for name, child in module.named_modules() if isinstance(child, BatchNorm))


def _has_torchs_forward(child: nn.Module) -> bool:
    return own_forward(child) is None and type(child).forward in (BatchNorm.forward, nn.SyncBatchNorm.forward)


def _set_forward(norm: Any, groups: Sequence[dist.ProcessGroup]) -> None:
    def forward(input: Tensor) -> Tensor:
        norm._check_input_dim(input)
        running: list[Any] = [norm.running_mean, norm.running_var]
        if not norm.training and running[0] is not None:
            return _native(norm, input, running, training=False)
        tracked = norm.track_running_stats and running[0] is not None
        if not groups and not tracked:
            return _native(norm, input, [None, None], training=True)
        count = norm.num_batches_tracked + 1 if tracked else 1
        momentum = 1.0 / count if norm.momentum is None else norm.momentum
        if not groups:
            updated = [statistic.clone() for statistic in running]
            output = _native(norm, input, updated, training=True, momentum=float(momentum))
            _keep([*running, norm.num_batches_tracked], [*updated, count])
            return output
        statistics = _statistics(input, groups)
        if tracked:  # before anything more is saved for backward, at which a recomputation may stop
            values = (statistics.mean, statistics.squares / (statistics.values - 1))
            updated = [
                statistic + (value.detach().to(statistic.dtype) - statistic) * momentum
                for statistic, value in zip(running, values, strict=True)
            ]
            _keep([*running, norm.num_batches_tracked], [*updated, count])
        return _normalize(norm, input, statistics)

    set_forward(norm, forward)


@torch.library.custom_op("meshpar::keep_statistics", mutates_args={"buffers"})
def _keep(buffers: list[Tensor], values: list[Tensor]) -> None:
    """Write running statistics, unless a recomputation asks; an operator, for graphs without a break."""
    if not RECOMPUTED.get():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def _native(norm: Any, x: Tensor, running: list[Any], *, training: bool, momentum: float = 0.0) -> Tensor:
    """Return torch's own batch norm of this rank's samples."""
    mean, variance = running
    # Mixed precision gathers weights in a dtype that torch's kernels do not take beside running statistics in float32.
    affine = (norm.weight, norm.bias)
    weight, bias = (tensor if tensor is None or mean is None else tensor.to(mean.dtype) for tensor in affine)
    return F.batch_norm(x, mean, variance, weight, bias, training, momentum, norm.eps)


class _Statistics(NamedTuple):
    """One batch by channel: this rank's mean and centered values; all ranks' count, mean and squares."""

    own_mean: Tensor
    centered: Tensor
    values: Tensor
    mean: Tensor
    squares: Tensor


def _statistics(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> _Statistics:
    dims = [dim for dim in range(x.ndim) if dim != 1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = wide.new_tensor([x.numel() // max(1, x.shape[1])])
    own_mean = wide.sum(dims) / count.clamp(min=1.0)
    centered = wide - own_mean.view(_by_channel(x))
    mean, squares = own_mean, centered.square().sum(dims)
    for group in groups:
        count, mean, squares = _join(count, mean, squares, group)
    assert_async(
        count[0] > 1,
        "batch norm needs more than one value per channel in the batch of all data ranks; this batch has fewer",
    )
    return _Statistics(own_mean, centered, count, mean, squares)


def _normalize(norm: Any, x: Tensor, statistics: _Statistics) -> Tensor:
    """Return ``x`` normalized by the statistics of all ranks."""
    scale = torch.rsqrt(statistics.squares / statistics.values + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    # Centered by this rank's own mean, which is near the common one, so that nothing cancels and one activation is kept
    # for backward.
    shift = (statistics.own_mean - statistics.mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    shape = _by_channel(x)
    return torch.addcmul(shift.view(shape), statistics.centered, scale.view(shape)).to(x.dtype)


def _by_channel(x: Tensor) -> list[int]:
    return [-1 if dim == 1 else 1 for dim in range(x.ndim)]


def _join(count: Tensor, mean: Tensor, squares: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Join the ranks' counts, means and sums of squared distances from them; the result is the same on every rank."""
    rows = gather_partial(torch.cat([count, mean, squares])[None], 0, group)
    counts, means, all_squares = rows.split([1, len(mean), len(mean)], 1)
    total = counts.sum(0)
    joint_mean = (counts * means).sum(0) / total.clamp(min=1.0)
    return total, joint_mean, (all_squares + counts * (means - joint_mean).square()).sum(0)


def prepare(module: nn.Module, resolved: Resolved, meshes: Mapping[MeshSpec, DeviceMesh]) -> None:
    """Let batch norm see the whole batch, once where blocks are recomputed; keep recurrent layers' weights apart."""
    if resolved.averaged or any(pass_.stage == Stage.RECOMPUTE for pass_ in resolved.passes):
        synchronize_batch_norm(module, meshes[resolved.held], resolved.averaged)
    for child in module.modules():
        if isinstance(child, nn.RNNBase):  # on CUDA it would move them side by side into memory of its own
            child.flatten_parameters = _leave_weights  # type: ignore[method-assign]


def _leave_weights() -> None:
    """Leave weights in the memory where they are, where gathers write them."""
