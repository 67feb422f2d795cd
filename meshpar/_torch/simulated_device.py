"""A device that is written in Python, and what torch runs too often or too early on it.

Only the simulation's own process calls these, but for :func:`hidden_propagation`.

- ``_setup_privateuseone_for_python_backend``: a device whose streams are written in Python (pytorch/pytorch#155101). It
  goes when torch offers simulated devices, or a public form of this.
- ``FakeTensorMode.avoid_device_init``: otherwise ``torch.tensor(x, device=...)`` would be made on the device that does
  not exist.
- ``ShardingPropagator._propagate_tensor_meta_non_cached``: DTensor runs operators on fake tensors of the global size to
  learn shapes; nothing of that is allocated, so the recorder must not see it.
- ``_chunk_with_empty``: FSDP2 makes a view for every rank's chunk and uses one; with thousands of ranks that takes
  minutes.
- ``Tensor.pin_memory``: fake tensors know it on no device but CUDA.
- ``CollectiveOp``: the group of a collective, among its arguments; torch's own estimates of memory read it so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.backend_registration import _DummyBackendModule as DeviceModule
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from meshpar._torch.fake import FakeTensor, FakeTensorMode, fake_store, unset_fake_temporarily

__all__ = ["DeviceModule", "fake_mode", "find_group", "hidden_propagation", "load_collectives", "register_device"]


def register_device(name: str, module: object) -> None:
    """Let torch know the simulated device ``name``, driven by ``module``, and the fake process group serve it; once
    a process.
    """
    _setup_privateuseone_for_python_backend(name, backend_module=module)
    fake_store()  # registers the backend
    dist.Backend.backend_capability["fake"].append(name)
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign, assignment]
    _outside_fake_mode(DeviceMesh, "__init__", "__getitem__", "_flatten", "_concatenate")
    _outside_fake_mode(device_mesh, "init_device_mesh")
    _make_chunks_lazy()
    _pin_nothing()


def fake_mode() -> FakeTensorMode:
    """Return the mode under which tensors have shapes, dtypes and devices but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def find_group(collective: Any, args: Any) -> dist.ProcessGroup:
    """Return the process group of a collective."""
    group: dist.ProcessGroup = load_collectives().get_process_group(collective, args)
    return group


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
class _Chunks(Sequence[Tensor]):
    """The chunks of ``_chunk_with_empty``, each made when it is read."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self.tensor, self.ranks, self.dim = tensor, count, dim

    def __len__(self) -> int:
        return self.ranks

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(self.ranks))]
        if not 0 <= index < self.ranks:
            raise IndexError(index)
        size = self.tensor.size(self.dim)
        chunk = -(-size // self.ranks)
        start = min(chunk * index, size)
        return self.tensor.narrow(self.dim, start, min(chunk, size - start))


def _make_chunks_lazy() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_param

    def lazily(tensor: Tensor, num_chunks: int, dim: int) -> _Chunks:
        return _Chunks(tensor, num_chunks, dim)

    for module in (_fsdp_common, _fsdp_param, _fsdp_collectives):
        if hasattr(module, "_chunk_with_empty"):
            setattr(module, "_chunk_with_empty", lazily)  # noqa: B010


def _pin_nothing() -> None:
    """Let tensors without memory be pinned as they are."""
    pin = Tensor.pin_memory

    def pin_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else pin(tensor, *args, **kwargs)

    Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
