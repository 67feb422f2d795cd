"""The token loss of a large vocabulary, a few positions at a time: no rank ever holds all logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor

from meshpar._torch.fsdp import output_dtype
from meshpar.core.errors import MeshparError
from meshpar.core.patterns import class_name, matches
from meshpar.losses.token_loss import IGNORE_INDEX, reduction_of, token_loss
from meshpar.passes.pipeline.stand_ins import StandIn
from meshpar.step.calls import Step, in_place_of, installed, own_forward
from meshpar.step.run import layout_of

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


def run_with(
    model: nn.Module,
    inputs: Mapping[str, Any],
    labels_BL: Tensor,
    head: nn.Module | None,
    compute: Callable[[Step, Tensor, Tensor, Tensor | None], Tensor],
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
        what = (
            "never calls the head it was given"
            if not losses
            else "changes its logits after the head, or casts them (output_dtype)"
        )
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
    """Return the chunk for a batch: 0 (all logits at once) where these are small, or chunks not known to be exact.

    Chunks hold the gradient of the head's weight (V, D) in float32 and ten bytes for each of a chunk's logits; whole
    logits (N, V) take sixteen bytes each. So chunks pay where N is well above D.
    """
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
        ctx: FunctionCtx,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        trains: bool,
        labels: Sequence[Tensor],
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
    ) -> Tensor:
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
            inputs = (hidden_ND, weight_VD, bias_V)
            ctx.dtypes = [None if x is None else x.dtype for x in inputs]  # type: ignore[attr-defined]
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
