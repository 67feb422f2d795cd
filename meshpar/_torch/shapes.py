"""Shapes of results of operators for which torch has no kernel without values, or one for some dtypes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def grouped_mm_shape(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty result of a grouped product, of inputs of any dtype; torch's knows bfloat16 alone."""
    from torch._meta_registrations import meta_grouped_mm

    shaped = meta_grouped_mm(
        a.to(torch.bfloat16), b.to(torch.bfloat16), offs, None if bias is None else bias.to(torch.bfloat16)
    )
    return shaped.to(out_dtype or a.dtype)


class groups_of_any_dtype(TorchDispatchMode):
    """Let forwards without values multiply groups of any floating dtype, as devices do."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            return grouped_mm_shape(*args, **kwargs or {})
        return func(*args, **kwargs or {})
