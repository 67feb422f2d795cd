"""Parts of the reference models: output, leaf modules, and a mixture of experts in place of a feed-forward layer.

Shape suffixes: N tokens, D model, E experts, K experts of a token, R = N x K rows, F hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar.losses.token_loss import IGNORE_INDEX, token_loss


@final
class ModelOutput(NamedTuple):
    """Return the loss and the logits of a forward pass, as a named tuple, in which FSDP2 finds the tensors.

    Attributes:
        loss: mean over the counted tokens, 0-dim float32; None without labels.
        logits: (B, L, V); under a loss-parallel head a DTensor of that shape, sharded over V.
    """

    loss: Tensor | None
    logits: Tensor


def next_token_loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the mean loss of predicting ``labels[:, i + 1]`` at position ``i``, as transformers does."""
    # Moving the labels rather than the logits saves a copy of the largest tensor of the model.
    next_BL = F.pad(labels_BL[:, 1:], (0, 1), value=IGNORE_INDEX)
    return token_loss(logits_BLV, next_BL, reduction="mean")


class Linear(nn.Linear):
    """``nn.Linear`` with weights drawn from a normal distribution of standard deviation ``std``, and a bias of zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, std: float = 0.02) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` whose rows are initialised from a normal distribution of standard deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def positions_of(input_ids_BL: Tensor, limit: int) -> Tensor:
    """Return the positions 0 .. L-1 as (1, L) int64; raises ValueError if L is larger than ``limit``."""
    length = input_ids_BL.shape[1]
    if length > limit:
        raise ValueError(
            f"the sequence has {length} positions; expected at most {limit}: shorten it, or raise the limit in the "
            "model's config"
        )
    return torch.arange(length, device=input_ids_BL.device)[None]


def published(kind: str, architecture: str, *, tied: bool) -> dict[str, Any]:
    """Return what the published configs of all reference models have."""
    names = {"model_type": kind, "architectures": [architecture], "bos_token_id": None, "eos_token_id": None}
    return names | {"initializer_range": 0.02, "tie_word_embeddings": tied, "dtype": "float32"}


@final
class Mixture(nn.Module):
    """A router and its experts: each token is the weighted sum of the ``top`` experts that its router prefers.

    With a ``shared`` layer for every token the router scores by sigmoids, and ``bias`` (E,) chooses experts, weighing
    none (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Training moves it without gradients.
    """

    bias: Tensor | None

    def __init__(
        self, dim: int, hidden: int, experts: int, top: int, std: float, shared: nn.Module | None, scale: float
    ) -> None:
        super().__init__()
        self.top, self.scale = top, scale
        self.router = Linear(dim, experts)
        self.experts = StackedExperts(dim, hidden, experts, std)
        self.shared = shared
        self.register_buffer("bias", None if shared is None else torch.zeros(experts))

    def reset_parameters(self) -> None:
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the update of the residual stream, (B, L, D)."""
        x_ND = x_BLD.flatten(0, 1)
        logits_NE = self.router(x_ND)
        if self.bias is None:
            weights_NK, chosen_NK = logits_NE.softmax(-1, dtype=torch.float32).topk(self.top, -1)
        else:
            scores_NE = logits_NE.float().sigmoid()
            chosen_NK = (scores_NE.detach() + self.bias).topk(self.top, -1).indices
            weights_NK = scores_NE.gather(1, chosen_NK)
        weights_NK = self.scale * weights_NK / weights_NK.sum(-1, keepdim=True)
        y_BLD = self.experts(x_ND, chosen_NK, weights_NK.to(x_ND.dtype)).view_as(x_BLD)
        return y_BLD if self.shared is None else y_BLD + self.shared(x_BLD)


@final
class StackedExperts(nn.Module):
    """SwiGLU layers, stacked; it reads their number from its weights, of which a rank may hold a part."""

    def __init__(self, dim: int, hidden: int, experts: int, residual_std: float) -> None:
        super().__init__()
        self.residual_std = residual_std
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, std in ((self.gate, 0.02), (self.up, 0.02), (self.down, self.residual_std)):
            nn.init.normal_(weight, std=std)

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return each token's weighted sum over its chosen experts, (N, D)."""
        count, slots = len(self.gate), chosen_NK.shape[1]
        expert_R = chosen_NK.flatten()
        order_R = expert_R.argsort(stable=True)
        zeros_E = torch.zeros(count, dtype=torch.int64, device=x_ND.device)
        rows_E = zeros_E.index_add_(0, expert_R, torch.ones_like(expert_R))
        x_RD = x_ND.index_select(0, order_R // slots)
        h_RF = F.silu(products(x_RD, self.gate, rows_E)) * products(x_RD, self.up, rows_E)
        y_RD = products(h_RF, self.down, rows_E) * weights_NK.flatten()[order_R, None]
        place_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        return y_RD.index_select(0, place_R).unflatten(0, (-1, slots)).sum(1)


def products(x_RD: Tensor, weight_EFD: Tensor, rows_E: Tensor) -> Tensor:
    """Return (R, F): consecutive rows, ``rows_E`` (int64) of each expert, times its weight; grouped where torch can."""
    sizes = (x_RD.shape[1] * x_RD.element_size(), weight_EFD.shape[1] * x_RD.element_size())
    # torch.compile knows the shape of a grouped product in bfloat16 alone.
    grouped = x_RD.dtype == torch.bfloat16 if torch.compiler.is_compiling() else x_RD.dtype != torch.float64
    if grouped and not any(size % 16 for size in sizes):
        return F.grouped_mm(x_RD, weight_EFD.transpose(1, 2), offs=rows_E.cumsum(0).to(torch.int32))
    parts = x_RD.split(rows_E.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weight_EFD, strict=True)])
