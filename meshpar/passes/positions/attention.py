"""Attention that a plan can split by positions: what a model calls in place of ``scaled_dot_product_attention``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar._torch.calls import as_one_operator
from meshpar.core.errors import MeshparError
from meshpar.passes.positions.parallel import BLOCK, Exchange, run_by_run
from meshpar.step.inner_calls import installed

NO_POSITIONS = (
    "the model got no position_ids, and each rank has a part of the positions; call the model with par.split(batch), "
    "a mapping"
)
_FLEX = ("cuda",)
"""Devices that train through torch's flex attention, which skips blocks that no query sees."""
_LEAST_CHANNELS = 16  # of a head, for flex attention's kernels
_TILE = 128


@final
@dataclass(frozen=True, slots=True)
class Mask:
    """Which positions each query sees, made in pieces where the whole would be (length, length).

    Attributes:
        documents: (B or 1, L) int64, the number of each position's document.
        window: number of positions that a query sees; None: all of its document.
        dtype: of a mask that is added to the scores; None: bool.
        blocks: torch's BlockMask of this rank's queries, for flex attention; None where it does not serve the device.
    """

    documents: Tensor
    window: int | None = None
    dtype: torch.dtype | None = None
    blocks: Any = None

    def first(self, rows: int, positions: int) -> Mask:
        """Return the mask of the first rows and positions, made piece by piece on every device."""
        return replace(self, documents=self.documents[:rows, :positions], blocks=None)

    def __call__(self, queries: range, keys: int) -> Tensor:
        """Return the mask of consecutive queries and the first ``keys`` keys: (B or 1, 1, queries, keys)."""
        rows = torch.arange(queries.start, queries.stop, device=self.documents.device)
        sees = _sees(self.documents, rows, keys, self.window)
        return sees if self.dtype is None else added(sees, self.dtype)


def exchange_of(module: nn.Module) -> Exchange | None:
    """Return how the ranks of a plan exchange this module's positions; None where each rank has all of them."""
    changes = installed(module)
    return None if changes is None or changes.exchange is None or changes.exchange.alone else changes.exchange


def attention_mask(
    module: nn.Module, position_ids: Tensor | None, *, window: int | None = None, dtype: torch.dtype | None = None
) -> Tensor | Mask | None:
    """Return the mask of the positions that each query attends to: its own document's, up to itself.

    A document begins at each position that does not follow the position before it in its row. Call this function once
    in a forward, and pass the result to every :func:`attention`.

    Args:
        module: the model, ``self``. Under :class:`ContextParallel` each rank has a part of the positions, and the mask
            is for this part.
        position_ids: (B, L) or (1, L) int64, restarting at 0 with each document; None: one document, 0 .. L-1.
        window: number of positions that a query attends to, including its own; None: all of its document.
        dtype: dtype of the hidden states, for a mask that is added to the scores. From a bool mask, torch makes such a
            mask in every layer and keeps it for backward; this mask is shared by all layers.

    Returns:
        (B or 1, 1, queries, keys): bool, True where a query sees a key, or 0 and -inf in ``dtype``. None for plain
        causal attention. For more than 1,024 queries, an object that builds the mask piece by piece in
        :func:`attention`; on CUDA with the block mask of flex attention.

    Raises:
        MeshparError: no ``position_ids``, and this rank has a part of the positions, or there is a ``window``.

    Collective where a plan splits positions: every rank calls it.
    """
    exchange = exchange_of(module)
    if position_ids is None:
        if exchange is not None:
            raise MeshparError(NO_POSITIONS)
        if window is not None:
            raise MeshparError(
                "attention_mask with a window needs position_ids; hand over torch.arange(length)[None] where there "
                "are none"
            )
        return None
    numbers = documents(position_ids if exchange is None else exchange.values(position_ids, 1))
    queries = _queries(numbers, exchange)
    if len(queries) > BLOCK:
        blocks = block_mask(numbers, queries, window) if numbers.device.type in _FLEX else None
        return Mask(numbers, window, dtype, blocks)
    sees = _sees(numbers, queries, numbers.shape[1], window)
    return sees if dtype is None else added(sees, dtype)


def documents(position_ids: Tensor) -> Tensor:
    """Return the number of each position's document in its row, (B, L) int64, of whole ``position_ids`` (B, L)."""
    begins = F.pad((position_ids[:, 1:] != position_ids[:, :-1] + 1).long(), (1, 0))
    return begins.cumsum(1)


def causal_mask(
    documents: Tensor, exchange: Exchange | None, *, window: int | None = None, causal: bool = True
) -> Tensor:
    """Return the mask of :func:`attention_mask` for whole rows of ``documents`` (B, L), or without causality."""
    return _sees(documents, _queries(documents, exchange), documents.shape[1], window, causal=causal)


def _queries(documents: Tensor, exchange: Exchange | None) -> Tensor:
    """Return the positions whose queries this rank has."""
    length, device = documents.shape[1], documents.device
    if exchange is None or exchange.transport == "heads":
        return torch.arange(length, device=device)
    return exchange.rows(length, device)


def _sees(documents: Tensor, queries: Tensor, keys: int, window: int | None, *, causal: bool = True) -> Tensor:
    """Return which of the first ``keys`` positions these queries see: (B, 1, queries, keys) bool."""
    places = torch.arange(keys, device=documents.device)
    sees = documents[:, queries, None] == documents[:, None, :keys]
    if causal:
        sees &= queries[:, None] >= places[None]
    if window is not None:
        sees &= queries[:, None] - places[None] < window
    return sees[:, None]


def added(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as numbers that are added to the scores."""
    return torch.full(sees.shape, float("-inf"), dtype=dtype, device=sees.device).masked_fill_(sees, 0.0)


# torch's, loaded where it is used
def block_mask(documents: Tensor, queries: Tensor, window: int | None) -> Any:
    """Return the mask of these queries (M,) as torch's BlockMask, without ever making a (length, length) matrix."""
    from torch.nn.attention.flex_attention import BlockMask

    length = documents.shape[1]

    def edges(places: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.arange(0, len(places), _TILE, device=places.device)
        return places[first], places[(first + _TILE - 1).clamp(max=len(places) - 1)]

    first_query, last_query = edges(queries)
    first_key, last_key = edges(torch.arange(length, device=documents.device))
    some = (first_key <= last_query[:, None]) & (documents[:, None, last_key] >= documents[:, first_query, None])
    whole = (last_key <= first_query[:, None]) & (documents[:, None, first_key] == documents[:, last_query, None])
    if window is not None:
        some &= first_query[:, None] - last_key < window
        whole &= last_query[:, None] - first_key < window
    whole[:, :, -1] &= length % _TILE == 0  # a block that is not full is looked at pair by pair
    whole[:, -1] &= len(queries) % _TILE == 0

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        chosen = blocks[:, None]
        return chosen.sum(-1).int(), chosen.int().argsort(stable=True, dim=-1, descending=True).int()

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = queries[query]
        row = row if len(documents) > 1 else torch.zeros_like(row)
        seen = (documents[row, position] == documents[row, key]) & (position >= key)
        return seen if window is None else seen & (position - key < window)

    return BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(whole), BLOCK_SIZE=_TILE, mask_mod=sees, seq_lengths=(len(queries), length)
    )


def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return as_one_operator(_flex())


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
    """Attend causally over the positions of every rank, like :func:`torch.nn.functional.scaled_dot_product_attention`.

    Args:
        module: the module that attends, ``self``; ``AttentionLayout.modules`` names it.
        q: queries (B, H, L, C).
        k: keys (B, G, L, C). G divides H.
        v: values (B, G, L, C).
        mask: from :func:`attention_mask`; None: plain causal attention.
        dropout: probability; pass 0 outside of training.
        scale: of the products; None: 1 / sqrt(C).

    Returns:
        (B, H, L, C).

    Raises:
        MeshparError: this rank has a part of the positions, and there is no mask; or heads that the axis does not
            divide.

    Collective where a plan splits positions: every rank calls it.
    """

    # a Tensor, torch's BlockMask or None
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if mask is not None and not isinstance(mask, Tensor):
            flex = _flex() if torch.compiler.is_compiling() else _compiled_flex()
            return flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )

    exchange = exchange_of(module)
    length = q.shape[2] * (1 if exchange is None else exchange.size)
    if isinstance(mask, Mask) and mask.documents.shape[1] != length:
        raise MeshparError(
            f"attention over {length} positions got the mask of {mask.documents.shape[1]}; make one for this sequence"
        )
    sees: Any = mask
    if isinstance(mask, Mask) and not dropout and min(q.shape[-1], v.shape[-1]) >= _LEAST_CHANNELS:
        sees = mask if mask.blocks is None else mask.blocks
    if exchange is not None:
        return exchange.attend(attend, q, k, v, sees)
    return run_by_run(attend, q, k, v, sees, [range(length)]) if isinstance(sees, Mask) else attend(q, k, v, sees)
