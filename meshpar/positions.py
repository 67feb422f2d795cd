"""Attention that a plan can split by positions: what a model calls instead of ``scaled_dot_product_attention`` and ``is_causal``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar.errors import MeshparError
from meshpar.passes.exchange import Exchange
from meshpar.passes.installed import installed


def exchange_of(module: nn.Module) -> Exchange | None:
    """Return how the ranks of a plan exchange this module's positions; None where each rank has all of them."""
    known = installed(module)
    return None if known is None or known.exchange is None or known.exchange.alone else known.exchange


def attention_mask(
    module: nn.Module, position_ids: Tensor | None, *, window: int | None = None, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Return which positions each query sees: its own document's, up to itself.

    A document begins wherever a position is not the one after the position before it in its row. Call this once in a forward, and hand
    the result to every :func:`attention`.

    Args:
        module: the model, ``self``. Under :class:`ContextParallel` each rank has a part of the positions, and the mask is for this part.
        position_ids: (B, L) or (1, L) int64, restarting at 0 with each document; None: one document, 0 .. L-1.
        window: number of positions that a query sees, its own included; None: all of its document.
        dtype: of the hidden states, for a mask that is added to the scores. Torch makes such a mask of a bool one in every layer, and keeps
            it for backward; one made here is shared by all layers.

    Returns:
        (B or 1, 1, queries, keys): bool, True where a query sees a key, or 0 and -inf in ``dtype``. None for plain causal attention.

    Raises:
        MeshparError: no ``position_ids``, and this rank has a part of the positions, or there is a ``window``.

    Collective where a plan splits positions: every rank calls it.
    """
    exchange = exchange_of(module)
    if position_ids is None:
        if exchange is not None:
            raise MeshparError(
                "the model got no position_ids, and each rank has a part of the positions; call the model with par.split(batch), a mapping"
            )
        if window is not None:
            raise MeshparError("attention_mask with a window needs position_ids; hand over torch.arange(length)[None] where there are none")
        return None
    ids = position_ids if exchange is None else exchange.values(position_ids, 1)
    sees = causal_mask(documents(ids), exchange, window=window)
    return sees if dtype is None else added(sees, dtype)


def documents(position_ids: Tensor) -> Tensor:
    """Return the number of each position's document in its row, (B, L) int64, from whole rows of ``position_ids`` (B, L)."""
    begins = F.pad((position_ids[:, 1:] != position_ids[:, :-1] + 1).long(), (1, 0))
    return begins.cumsum(1)


def causal_mask(documents: Tensor, exchange: Exchange | None, *, window: int | None = None, causal: bool = True) -> Tensor:
    """Return the mask of :func:`attention_mask` for whole rows of ``documents`` (B, L); not ``causal``: later positions, too."""
    length, device = documents.shape[1], documents.device
    keys = torch.arange(length, device=device)
    queries = keys if exchange is None or exchange.transport == "heads" else exchange.rows(length, device)
    sees = documents[:, queries, None] == documents[:, None, :]
    if causal:
        sees = sees & (queries[:, None] >= keys[None])
    if window is not None:
        sees = sees & (queries[:, None] - keys[None] < window)
    return sees[:, None]


def added(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as numbers that are added to the scores."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))


def attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attend causally, as :func:`torch.nn.functional.scaled_dot_product_attention` does, over the positions of every rank.

    Args:
        module: the module that attends, ``self``; ``ModelLayout.attention`` names it.
        q: queries (B, H, L, C).
        k: keys (B, G, L, C). G divides H.
        v: values (B, G, L, C).
        mask: from :func:`attention_mask`; None: plain causal attention.
        dropout: probability; pass 0 outside of training.
        scale: of the products; None: 1 / sqrt(C).

    Returns:
        (B, H, L, C).

    Raises:
        MeshparError: this rank has a part of the positions, and there is no mask; or heads that the axis does not divide.

    Collective where a plan splits positions: every rank calls it.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped)

    exchange = exchange_of(module)
    return attend(q, k, v, mask) if exchange is None else exchange.attend(attend, q, k, v, mask)
