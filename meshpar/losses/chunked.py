"""The token loss, log-probabilities and entropies of a large vocabulary, a few positions at a time.

No rank ever holds all logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor

from meshpar._torch.fsdp import output_dtype
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.patterns import class_name, matches
from meshpar.losses.token_loss import IGNORE_INDEX, reduction_of, token_loss
from meshpar.passes.pipeline.stand_ins import StandIn
from meshpar.step.forward import layout_of
from meshpar.step.inner_calls import Step, in_place_of, installed, own_forward

CHUNK = 1024
"""Positions whose logits are held at once, unless told: enough for a matrix product to run at its full speed."""
LEAST = 256
"""Positions of a chunk at least; otherwise it is an eighth of a batch, up to CHUNK."""
LARGE_LOGITS = 1 << 28
"""Bytes of logits in float32 from which chunks are worth it: 256 MiB."""


def chunked_token_loss(
    model: nn.Module,
    inputs: Mapping[str, Any],
    labels_BL: Tensor,
    *,
    head: nn.Module | None = None,
    chunk: int = CHUNK,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Run ``model`` and return the loss of :func:`meshpar.token_loss`, without ever holding all logits.

    While the model runs, its head computes the loss and the gradients of ``chunk`` positions at a time, instead of all
    logits. Under tensor parallelism the head's style decides whether the logits of a chunk are gathered or split over
    the vocabulary. (The idea is from Liger's fused linear cross entropy, arXiv 2410.10989.)

    Args:
        model: returns an output whose ``.logits`` are the unchanged output of ``head``.
        inputs: the keyword arguments of the model.
        labels_BL: as for :func:`meshpar.token_loss`.
        head: the module in ``model`` that makes logits (B, L, V) of hidden states (B, L, D); None: the one that
            :func:`head_of` finds.
        chunk: positions at a time; 0: all logits at once, as without chunks.
        ignore_index: the label of positions that do not count.
        reduction: as for :func:`meshpar.token_loss`.
        z_loss: as for :func:`meshpar.token_loss`.

    Raises:
        MeshparError: the model has no such output, or changes its logits after the head (by a scale or a cap, say).

    Collective as the model and the head are.
    """
    if chunk < 0:
        raise MeshparError(f"chunk={chunk} must be 0 (all logits at once), or a number of positions")
    if chunk == 0:
        logits = model(**inputs).logits
        return token_loss(logits, labels_BL, ignore_index=ignore_index, reduction=reduction, z_loss=z_loss)
    reduced = reduction_of(reduction, labels_BL, ignore_index)

    def loss(finish: Step, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        def of_chunk(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
            return token_loss(finish(logits_nV), labels_n, reduction="sum", ignore_index=ignore_index, z_loss=z_loss)

        labels = labels_BL.flatten().split(chunk)
        return _Chunked.apply(of_chunk, torch.is_grad_enabled(), labels, hidden_ND, weight_VD, bias_V)

    return reduced(run_with(model, inputs, labels_BL, head, loss))


_Compute = Callable[[Step, Tensor, Tensor, Tensor | None], Tensor]
"""Makes a result of what the head does after its product, hidden states, weight and bias."""


def run_with(
    model: nn.Module, inputs: Mapping[str, Any], labels_BL: Tensor, head: nn.Module | None, compute: _Compute
) -> Tensor:
    """Return what ``compute`` makes of hidden states (N, D) while ``model`` runs, in place of its logits."""
    losses, head = list[Tensor](), head or head_of(model)
    if isinstance(head, StandIn):
        model(**inputs)  # ends with the stage
        raise AssertionError("another stage has the head")
    prepare, finish = around_the_product(head)

    def forward(hidden: Tensor) -> Tensor:
        if losses:
            raise MeshparError(
                "the head was called twice in one forward; its loss cannot be computed in chunks: use chunk=0"
            )
        hidden = prepare(hidden)
        if hidden.shape[:-1] != labels_BL.shape:
            raise MeshparError(
                f"the head got hidden states of {tuple(hidden.shape[:-1])} for labels of {tuple(labels_BL.shape)}; "
                "use chunk=0"
            )
        hidden, weight, bias = (_computed_with(tensor) for tensor in (hidden, head.weight, head.bias))
        losses.append(compute(finish, hidden.flatten(0, -2), weight, bias))
        return losses[0]

    with in_place_of(head, forward):
        output = model(**inputs)
    if not losses or getattr(output, "logits", None) is not losses[0]:
        changes = "changes its logits after the head, or casts them (output_dtype)"
        what = changes if losses else "never calls the head it was given"
        raise MeshparError(
            f"{class_name(model)} {what}, so its loss cannot be computed in chunks; use chunk=0 (all logits at once)"
        )
    return losses[0]


def head_of(model: nn.Module) -> nn.Module:
    """Return the module that makes the logits, which the model or its layout names."""
    ask: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    output = ask() if callable(ask) else None
    if output is None:
        named = [pattern for pattern, style in layout_of(model).tensor.styles.items() if style == "head"]
        every = [*model.named_modules()]  # that of another stage among them
        output = next((child for pattern in named for name, child in every if matches(pattern, name)), None)
    if output is None:
        raise MeshparError(
            f"{class_name(model)} does not say which module makes its logits; name it (head=), give it the style "
            "'head' in meshpar_layout(), or use chunk=0 (all logits at once)"
        )
    return output


def chunk_for(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Return the chunk for a batch: 0 (all logits at once) where these are small, or chunks not known to be exact."""
    # Chunks hold the gradient of the head's weight (V, D) in float32 and ten bytes for each of a chunk's logits; whole
    # logits (N, V) take sixteen bytes each. So chunks pay where N is well above D.
    positions, layout = batch["labels"].numel(), layout_of(model)
    head = dict(model.named_modules()).get(layout.head) if layout.head else None
    if (
        not isinstance(head, nn.Linear)
        or positions * head.out_features * 4 < LARGE_LOGITS
        or positions < head.in_features + 2.5 * CHUNK
    ):
        return 0
    try:
        around_the_product(head)
    except MeshparError:
        return 0
    exact = own_forward(model) is None and output_dtype(model) in (None, torch.float32)
    return min(CHUNK, max(LEAST, positions // 8)) if exact else 0


def around_the_product(head: nn.Module) -> tuple[Step, Step]:
    """Return what a head does before and after its one matrix product."""
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and own_forward(head) is None:
        record = installed(head)
        if record is None or record.forward is None:
            return _nothing, _nothing
        if record.around is not None:  # set by the tensor-parallel style of a head
            return record.around
    raise MeshparError(
        f"the head is a {class_name(head)} with a forward of its own, expected a linear layer; use chunk=0"
    )


def _computed_with(x: Any) -> Any:  # noqa: ANN401 - a tensor, or None where there is none
    """Return what a product takes of ``x``: this rank's part, in autocast's dtype where that is on."""
    x = x.to_local() if isinstance(x, DTensor) else x
    if x is None or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _nothing(x: Tensor) -> Tensor:
    return x


class _Chunked(torch.autograd.Function):
    """Loss and gradients together, chunk by chunk; backward only multiplies by what comes from above."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, loss_of: Callable[..., Tensor], trains: bool, labels: Sequence[Tensor], *layer: Any
    ) -> Tensor:
        hidden_ND, weight_VD, bias_V = layer
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        grads, start = Gradients(hidden_ND, weight_VD, bias_V) if trains else None, 0
        for labels_n in labels:
            rows = slice(start, start := start + len(labels_n))
            logits_nV = F.linear(hidden_ND[rows], weight_VD, bias_V).requires_grad_(trains)
            with torch.set_grad_enabled(trains):
                loss = loss_of(logits_nV, labels_n)
            total += loss.detach()
            if grads is not None:
                grads.add(rows, torch.autograd.grad(loss, logits_nV)[0])
            del logits_nV, loss  # before the next chunk's
        if grads is not None:
            ctx.save_for_backward(grads.hidden_ND, grads.weight_VD, grads.bias_V)  # type: ignore[arg-type]
            ctx.dtypes = [None if x is None else x.dtype for x in layer]  # type: ignore[attr-defined]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In place: a second backward through the same graph is an error of autograd's, as it is for any graph that was
        # freed.
        saved = zip(ctx.saved_tensors, ctx.dtypes)  # type: ignore[attr-defined]
        gradients = (None if gradient is None else gradient.mul_(upstream).to(dtype) for gradient, dtype in saved)
        return None, None, None, *gradients


@final
class Gradients:
    """Sums over chunks of the gradients of hidden states, weight and bias; those of parameters in float32 or wider."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> None:
        self._inputs = (hidden_ND, weight_VD)
        self.hidden_ND = torch.empty_like(hidden_ND)
        sums = torch.promote_types(weight_VD.dtype, torch.float32)
        self.weight_VD = torch.zeros_like(weight_VD, dtype=sums) if weight_VD.requires_grad else None
        self.bias_V = torch.zeros_like(bias_V, dtype=sums) if bias_V is not None and bias_V.requires_grad else None

    def add(self, part: slice, grad_nV: Tensor) -> None:
        """Add what the logits of one chunk give."""
        hidden_ND, weight_VD = self._inputs
        torch.mm(grad_nV, weight_VD, out=self.hidden_ND[part])
        if self.weight_VD is not None:
            if weight_VD.dtype == self.weight_VD.dtype:
                self.weight_VD.addmm_(grad_nV.t(), hidden_ND[part])
            else:
                self.weight_VD.add_(grad_nV.t() @ hidden_ND[part])
        if self.bias_V is not None:
            self.bias_V.add_(grad_nV.sum(0, dtype=self.bias_V.dtype))


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
    counted_N = labels_N != ignore_index
    index_N = torch.where(counted_N, labels_N, 0)

    def compute(finish: Step, hidden_ND: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if runtime.queues(weight.device):
            rows = min(chunk, max(FULL_SPEED, LARGE_LOGITS // (4 * len(weight))))
        else:
            rows = min(chunk, max(16, len(labels_N) // 64))
        return _TokenLogProbs.apply((finish, rows, scale), index_N, counted_N, hidden_ND, weight, bias)

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    both_2N = run_with(model, inputs, labels_BL, head, compute)
    return TokenLogProbs(*(row.view(labels_BL.shape) for row in both_2N.unbind()))


class _TokenLogProbs(torch.autograd.Function):
    """Keeps of each position its inputs, largest score, logarithm of the sum beside it, and entropy."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, how: tuple[Step, int, float], index_N: Tensor, counted_N: Tensor, *layer: Any
    ) -> Tensor:
        (finish, chunk, scale), (hidden_ND, weight_VD, bias_V) = how, layer
        parts = []
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            scores_nV, first, group = _scores(finish(F.linear(hidden_ND[rows], weight_VD, bias_V)), scale)
            parts.append(_values(scores_nV, index_N[rows], first, group))
        values_4N = torch.cat(parts, 1) if parts else hidden_ND.new_zeros(4, 0).float()
        ctx.save_for_backward(index_N, counted_N, values_4N[1:], *layer)
        ctx.how = how  # type: ignore[attr-defined]
        return values_4N[::3] * counted_N

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, upstream_2N: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        index_N, counted_N, (top_N, total_N, entropy_N), hidden_ND, weight_VD, bias_V = saved
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
            here_n, index_n = _here(index_N[rows], first, grad_nV.shape[-1])
            grad_nV.scatter_add_(1, index_n[:, None], (upstream_2N[0, rows] * here_n)[:, None])
            grads.add(rows, torch.autograd.grad(local, logits_nV, grad_nV.view(local.shape).to(local.dtype))[0])
            del logits_nV, finished, local, grad_nV, logs_nV, scores_nV
        pairs = zip((grads.hidden_ND, grads.weight_VD, grads.bias_V), (hidden_ND, weight_VD, bias_V))
        gradients = (None if grad is None or like is None else grad.to(like.dtype) for grad, like in pairs)
        return *(None,) * 3, *gradients


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
