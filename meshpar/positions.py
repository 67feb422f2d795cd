"""Attention that a plan can split by positions: what a model calls instead of ``scaled_dot_product_attention`` and ``is_causal``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar.errors import MeshparError
from meshpar.passes.exchange import BLOCK, Exchange, run_by_run
from meshpar.passes.installed import installed


@final
@dataclass(frozen=True, slots=True)
class Mask:
    """Which positions each query sees, made piece by piece where the whole would be a matrix of the sequence's length squared.

    Attributes:
        documents: (B or 1, L) int64, the number of each position's document.
        window: number of positions that a query sees; None: all of its document.
        dtype: of a mask that is added to the scores; None: bool.
    """

    documents: Tensor
    window: int | None = None
    dtype: torch.dtype | None = None

    def __call__(self, queries: range, keys: int) -> Tensor:
        """Return the mask of consecutive queries and the first ``keys`` keys: (B or 1, 1, queries, keys)."""
        rows = torch.arange(queries.start, queries.stop, device=self.documents.device)
        sees = _sees(self.documents, rows, keys, self.window)
        return sees if self.dtype is None else added(sees, self.dtype)


def exchange_of(module: nn.Module) -> Exchange | None:
    """Return how the ranks of a plan exchange this module's positions; None where each rank has all of them."""
    known = installed(module)
    return None if known is None or known.exchange is None or known.exchange.alone else known.exchange


def attention_mask(
    module: nn.Module, position_ids: Tensor | None, *, window: int | None = None, dtype: torch.dtype | None = None
) -> Tensor | Mask | None:
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
        (B or 1, 1, queries, keys): bool, True where a query sees a key, or 0 and -inf in ``dtype``. None for plain causal attention. For
        more than 1,024 queries, what makes such a mask piece by piece while :func:`attention` goes through them.

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
    found = documents(position_ids if exchange is None else exchange.values(position_ids, 1))
    if found.shape[1] // (exchange.size if exchange is not None and exchange.transport == "gather" else 1) > BLOCK:
        return Mask(found, window, dtype)
    sees = causal_mask(found, exchange, window=window)
    return sees if dtype is None else added(sees, dtype)


def documents(position_ids: Tensor) -> Tensor:
    """Return the number of each position's document in its row, (B, L) int64, from whole rows of ``position_ids`` (B, L)."""
    begins = F.pad((position_ids[:, 1:] != position_ids[:, :-1] + 1).long(), (1, 0))
    return begins.cumsum(1)


def causal_mask(documents: Tensor, exchange: Exchange | None, *, window: int | None = None, causal: bool = True) -> Tensor:
    """Return the mask of :func:`attention_mask` for whole rows of ``documents`` (B, L); not ``causal``: later positions, too."""
    length, device = documents.shape[1], documents.device
    whole = exchange is None or exchange.transport == "heads"
    queries = torch.arange(length, device=device) if exchange is None or whole else exchange.rows(length, device)
    return _sees(documents, queries, length, window, causal=causal)


def _sees(documents: Tensor, queries: Tensor, keys: int, window: int | None, *, causal: bool = True) -> Tensor:
    """Return which of the first ``keys`` positions these queries see: (B, 1, queries, keys) bool."""
    each = torch.arange(keys, device=documents.device)
    sees = documents[:, queries, None] == documents[:, None, :keys]
    if causal:
        sees = sees & (queries[:, None] >= each[None])
    if window is not None:
        sees = sees & (queries[:, None] - each[None] < window)
    return sees[:, None]


def added(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as numbers that are added to the scores."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))


def attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Mask | None = None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
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
    length = q.shape[2] * (1 if exchange is None else exchange.size)
    if isinstance(mask, Mask) and mask.documents.shape[1] != length:
        raise MeshparError(f"attention over {length} positions got the mask of {mask.documents.shape[1]}; make one for this sequence")
    if exchange is not None:
        return exchange.attend(attend, q, k, v, mask)
    return run_by_run(attend, q, k, v, mask, [range(length)]) if isinstance(mask, Mask) else attend(q, k, v, mask)
