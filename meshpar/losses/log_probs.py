"""Log-probabilities and entropies of tokens, a few positions at a time: no rank ever holds all logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.losses.chunked import CHUNK, LARGE_LOGITS, Gradients, run_with
from meshpar.losses.token_loss import IGNORE_INDEX
from meshpar.step.calls import Step

FULL_SPEED = 512
"""Positions of a chunk with which a matrix product runs at a device's full speed: fewer wait for the head's weight."""


class TokenLogProbs(NamedTuple):
    """Values of each position, (B, L) in float32, 0 where a label does not count.

    Attributes:
        log_probs: log-probability of the label.
        entropy: of the distribution over the vocabulary.
    """

    log_probs: Tensor
    entropy: Tensor


def token_log_probs(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    head: nn.Module | None = None,
    chunk: int = CHUNK,
    ignore_index: int = IGNORE_INDEX,
) -> TokenLogProbs:
    """Run ``model`` and return the log-probability of each label and the entropy of each position, with gradients.

    The logits of at most ``chunk`` positions exist at a time, in forward and in backward, which computes them again:
    on a CPU a 64th of the batch at a time, on an accelerator 512 positions or more, as many as fit into 256 MiB of
    float32. Over a split vocabulary three numbers of each position cross the axis. See
    :meth:`meshpar.Parallelized.token_log_probs`.

    Args:
        model: as for :func:`meshpar.chunked_token_loss`, as are ``head`` and ``ignore_index``.
        batch: the keyword arguments of the model, and ``labels`` (B, L): the token that each position predicts.
        temperature: logits are divided by it.
        head: the module that makes logits.
        chunk: positions at a time, at most.
        ignore_index: the label of positions that do not count.

    Raises:
        MeshparError: no labels, a temperature that is not positive, or a model whose logits are not its head's output.
    """
    if "labels" not in batch:
        raise MeshparError(f"the batch has {', '.join(batch) or 'nothing'}; expected labels, too: (B, L) token ids")
    if not temperature > 0 or chunk < 1:
        raise MeshparError(f"temperature={temperature} and chunk={chunk} must be positive")
    labels_BL: Tensor = batch["labels"]
    scale, labels_N = 1.0 / temperature, labels_BL.flatten()

    def compute(finish: Step, hidden_ND: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if runtime.queues(weight.device):
            rows = min(chunk, max(FULL_SPEED, LARGE_LOGITS // (4 * len(weight))))
        else:
            rows = min(chunk, max(16, len(labels_N) // 64))
        return _TokenLogProbs.apply(finish, rows, ignore_index, scale, labels_N, hidden_ND, weight, bias)

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    both_2N = run_with(model, inputs, labels_BL, head, compute)
    return TokenLogProbs(*(row.view(labels_BL.shape) for row in both_2N.unbind()))


class _TokenLogProbs(torch.autograd.Function):
    """Keeps of each position its inputs, largest score, logarithm of the sum beside it, and entropy."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        finish: Step,
        chunk: int,
        ignore_index: int,
        scale: float,
        labels_N: Tensor,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
    ) -> Tensor:
        counted_N = labels_N != ignore_index
        parts = []
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            scores_nV, first, group = _scores(finish(F.linear(hidden_ND[rows], weight_VD, bias_V)), scale)
            parts.append(_values(scores_nV, torch.where(counted_N, labels_N, 0)[rows], first, group))
        values_4N = torch.cat(parts, 1) if parts else hidden_ND.new_zeros(4, 0).float()
        ctx.save_for_backward(labels_N, counted_N, values_4N[1:], hidden_ND, weight_VD, bias_V)  # type: ignore[arg-type]
        ctx.how = (finish, chunk, scale)  # type: ignore[attr-defined]
        return values_4N[::3] * counted_N

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, upstream_2N: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        labels_N, counted_N, (top_N, total_N, entropy_N), hidden_ND, weight_VD, bias_V = saved
        finish, chunk, scale = ctx.how  # type: ignore[attr-defined]
        grads = Gradients(hidden_ND, weight_VD, bias_V)
        upstream_2N = upstream_2N * counted_N * scale
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            logits_nV = F.linear(hidden_ND[rows], weight_VD, bias_V).requires_grad_()
            with torch.enable_grad():
                finished = finish(logits_nV)
                local = finished.to_local() if isinstance(finished, DTensor) else finished
            scores_nV, first, _ = _scores(finished.detach(), scale)
            logs_nV = scores_nV.sub_(top_N[rows, None]).sub_(total_N[rows, None])
            probs_nV = logs_nV.exp()
            # d entropy = -p (log p + entropy), d log p of the label = 1 - p there and -p elsewhere
            grad_nV = logs_nV.add_(entropy_N[rows, None]).mul_(-upstream_2N[1, rows, None])
            grad_nV.sub_(upstream_2N[0, rows, None]).mul_(probs_nV)
            del probs_nV
            here_n, index_n = _here(torch.where(counted_N, labels_N, 0)[rows], first, grad_nV.shape[-1])
            grad_nV.scatter_add_(1, index_n[:, None], (upstream_2N[0, rows] * here_n)[:, None])
            grads.add(rows, torch.autograd.grad(local, logits_nV, grad_nV.view(local.shape).to(local.dtype))[0])
            del logits_nV, finished, local, grad_nV, logs_nV, scores_nV
        pairs = zip((grads.hidden_ND, grads.weight_VD, grads.bias_V), (hidden_ND, weight_VD, bias_V))
        gradients = (None if grad is None or like is None else grad.to(like.dtype) for grad, like in pairs)
        return *(None,) * 5, *gradients


def _scores(logits: Tensor, scale: float) -> tuple[Tensor, int, dist.ProcessGroup | None]:
    """Return new float32 logits times ``scale``, the first id of this rank's vocabulary, and its axis."""
    if not isinstance(logits, DTensor):
        return logits.detach().float().mul(scale), 0, None
    mesh = logits.device_mesh
    rows = -(-logits.shape[-1] // mesh.size())
    return logits.to_local().detach().float().mul(scale), mesh.get_local_rank() * rows, mesh.get_group()


def _here(labels_n: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return whether this rank has each label, and the label's place among its vocabulary."""
    return (labels_n >= first) & (labels_n < first + width), (labels_n - first).clamp(0, width - 1)


def _values(scores_nV: Tensor, labels_n: Tensor, first: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return log-probability, largest score, log of the sum of exponentials, entropy: (4, n); overwrites scores."""
    top_n = scores_nV.amax(-1)
    if group is not None:
        dist.all_reduce(top_n, dist.ReduceOp.MAX, group)
    here_n, index_n = _here(labels_n, first, scores_nV.shape[-1])
    scores_nV.sub_(top_n[:, None])
    chosen_n = scores_nV.gather(1, index_n[:, None])[:, 0] * here_n
    powers_nV = scores_nV.exp()
    sums_3n = torch.stack([powers_nV.sum(-1), powers_nV.mul_(scores_nV).sum(-1), chosen_n])
    if group is not None:
        dist.all_reduce(sums_3n, group=group)
    total_n = sums_3n[0].log()
    # The largest score is never added and taken away again, which would round to its size.
    return torch.stack([sums_3n[2] - total_n, top_n, total_n, total_n - sums_3n[1] / sums_3n[0]])
