"""Tensors without values, ranks without peers, modes that see each operator, and a device that is written in Python.

- ``FakeTensorMode`` and its errors, ``TorchDispatchMode``: used throughout torch's documentation, and private
  (pytorch/pytorch#75478).
- ``without_functions``: a subclass's ``__torch_function__`` is not asked; private without a public form.
- ``fake_store``: the store of the fake process group, which torch has for its own tests.
- ``grouped_mm_shape``, ``groups_of_any_dtype``: torch knows shapes of grouped products of bfloat16 alone.

The rest is called by the simulation's own process alone, but for :func:`hidden_propagation`:
- ``_setup_privateuseone_for_python_backend``: streams written in Python (pytorch/pytorch#155101), until it is public.
- ``FakeTensorMode.avoid_device_init``: ``torch.tensor(x, device=...)`` would be made on a device that does not exist.
- ``ShardingPropagator._propagate_tensor_meta_non_cached``: DTensor learns shapes from fake tensors of the global size,
  of which nothing is allocated.
- ``_chunk_with_empty``: FSDP2 makes a view of every rank's chunk and uses one: minutes with thousands of ranks.
- ``Tensor.pin_memory``: fake tensors know it on no device but CUDA.
- ``CollectiveOp``: the group of a collective, among its arguments; torch's own estimates of memory read it so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule as DeviceModule
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["DeviceModule", "fake_mode", "find_group", "hidden_propagation", "load_collectives", "register_device"]

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


def register_device(name: str, module: object) -> None:
    """Let torch know a simulated device, driven by ``module``, and the fake process group serve it; once."""
    _setup_privateuseone_for_python_backend(name, backend_module=module)
    fake_store()  # registers the backend
    dist.Backend.backend_capability["fake"].append(name)
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign, assignment]
    _outside_fake_mode(DeviceMesh, "__init__", "__getitem__", "_flatten", "_concatenate")
    _outside_fake_mode(device_mesh, "init_device_mesh")
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_param

    for users in (_fsdp_common, _fsdp_param, _fsdp_collectives):
        if hasattr(users, "_chunk_with_empty"):
            setattr(users, "_chunk_with_empty", _Chunks)  # noqa: B010
    pin = Tensor.pin_memory

    def pin_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return a tensor without memory as it is."""
        return tensor if isinstance(tensor, FakeTensor) else pin(tensor, *args, **kwargs)

    Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]


def fake_mode() -> FakeTensorMode:
    """Return the mode under which tensors have shapes, dtypes and devices but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def find_group(collective: Any, args: Any) -> dist.ProcessGroup:
    """Return the process group of a collective."""
    return load_collectives().get_process_group(collective, args)  # type: ignore[no-any-return]


def load_collectives() -> Any:
    """Load what knows the arguments of collectives, and with it Inductor: a second."""
    from torch.distributed._tools.fake_collectives import CollectiveOp

    return CollectiveOp


@contextmanager
def hidden_propagation(hide: Callable[[], Any]) -> Iterator[None]:
    """While DTensor works out shapes, be inside ``hide()``."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    inner = getattr(ShardingPropagator, name)

    def hidden(*args: Any, **kwargs: Any) -> Any:
        with hide():
            return inner(*args, **kwargs)

    setattr(ShardingPropagator, name, hidden)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, inner)


def _outside_fake_mode(owner: Any, *names: str) -> None:
    """Let methods that compute rank numbers with real tensors do so."""
    for name in names:
        inner = getattr(owner, name, None)
        if inner is None:
            continue

        def outside(*args: Any, _inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return _inner(*args, **kwargs)

        setattr(owner, name, outside)


@final
class _Chunks:
    """The chunks of ``_chunk_with_empty``, which it takes the place of, each made when it is read."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.ranks, self.dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.ranks:
            raise IndexError(index)
        size = self.tensor.size(self.dim)
        chunk = -(-size // self.ranks)
        start = min(chunk * index, size)
        return self.tensor.narrow(self.dim, start, min(chunk, size - start))
