"""The tensor-parallel style of an embedding over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar._torch import assert_async
from meshpar.passes.installed import set_forward
from meshpar.passes.local import empty_problems, local, replaced_problems, shard_parameter
from meshpar.passes.tensor.context import Context, Style


@final
@dataclass(frozen=True, slots=True)
class Vocabulary(Style):
    """An embedding split by rows: each rank looks up the tokens that it holds, and the results are summed."""

    splits = splits_positions = stands_alone = True

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        if not isinstance(module, nn.Embedding):
            yield f"{name} is a {type(module).__name__}, and no Embedding to split by rows; leave it out of the table"
        elif module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            yield f"{name} uses max_norm, sparse or scale_grad_by_freq, which rows on several ranks cannot; turn them off"
        else:
            if not _is_scaled(module):
                yield from replaced_problems(name, module, nn.Embedding)
            yield from empty_problems(name, "rows", module.num_embeddings, size)

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        shard_parameter(module, "weight", 0, context)

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        assert isinstance(module, nn.Embedding)
        rows = -(-module.num_embeddings // context.size)
        start = rows * context.rank
        held = min(rows, module.num_embeddings - start)
        padding = module.padding_idx

        def lookup(tokens: Tensor) -> Tensor:
            assert_async(((tokens >= 0) & (tokens < module.num_embeddings)).all(), "a token is outside of the vocabulary")
            weight = local(module.weight)
            here = (tokens >= start) & (tokens < start + held)
            index = torch.where(here, tokens - start, 0)
            found = F.embedding(index, weight)
            if padding is not None:
                found = torch.where((tokens == padding)[..., None], found.detach(), found)
            return context.leave(found * here[..., None])

        set_forward(module, _with_scale(module, lookup) if _is_scaled(module) else lookup, reads_parameters=True)


def _is_scaled(module: nn.Module) -> bool:
    """Tell transformers' scaled embeddings (Gemma's), whose forward is known: a lookup times ``embed_scale``."""
    return getattr(module, "embed_scale", None) is not None and type(module).__module__.startswith("transformers.")


def _with_scale(module: Any, lookup: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(tokens: Tensor) -> Tensor:
        scale = module.embed_scale
        return lookup(tokens) * (scale.to(module.weight.dtype) if isinstance(scale, Tensor) else scale)

    return forward
