"""Tensors without values, ranks without peers, and modes that see each operator.

- ``FakeTensorMode`` and its errors, ``TorchDispatchMode``: used throughout torch's documentation, and private
  (pytorch/pytorch#75478).
- ``without_functions``: a subclass's ``__torch_function__`` is not asked; private without a public form.
- ``fake_store``: the store of the fake process group, which torch has for its own tests.
- ``grouped_mm_shape``, ``groups_of_any_dtype``: torch knows shapes of grouped products of bfloat16 alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

without_functions = torch._C.DisableTorchFunctionSubclass

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

    bias = None if bias is None else bias.to(torch.bfloat16)
    shaped = meta_grouped_mm(a.to(torch.bfloat16), b.to(torch.bfloat16), offs, bias)
    return shaped.to(out_dtype or a.dtype)


class groups_of_any_dtype(TorchDispatchMode):
    """Let forwards without values multiply groups of any floating dtype, as devices do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        multiply = grouped_mm_shape if func is torch.ops.aten._grouped_mm.default else func
        return multiply(*args, **kwargs or {})
