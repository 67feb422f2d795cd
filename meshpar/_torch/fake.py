"""Tensors without values, ranks without peers, and modes that see each operator.

- ``FakeTensorMode`` and its errors, ``TorchDispatchMode``: used throughout torch's documentation, and private
  (pytorch/pytorch#75478).
- ``without_functions``: a subclass's ``__torch_function__`` is not asked; private without a public form.
- ``fake_store``: the store of the fake process group, which torch has for its own tests.
- ``grouped_mm_shape``, ``groups_of_any_dtype``: torch knows shapes of grouped products of bfloat16 alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as without_functions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FAKE_LOG",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "fake_store",
    "grouped_mm_shape",
    "groups_of_any_dtype",
    "has_values",
    "unset_fake_temporarily",
    "without_functions",
]

FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""Where torch warns of operators that have no kernel without values."""


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has memory: it is neither on the meta device nor a simulated rank's."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def fake_store() -> Any:
    """Return what a fake process group begins with."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which registers the backend

    return FakeStore()


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
