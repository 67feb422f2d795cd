"""Operations on a whole parallel module that are refused."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import _torch
from meshpar.errors import MeshparError
from meshpar.state.full import guard_state


def refuse_copies(module: Any) -> None:
    """Refuse what would copy or write this rank's part as if it were the model."""
    module.__deepcopy__ = functools.partial(
        _refuse,
        "a parallel module cannot be copied, because the copy would run the original's weights; for averaged weights use "
        "par.averaged(decay), for a second model build another one and apply a plan to it",
    )
    if hasattr(module, "save_pretrained"):
        module.save_pretrained = functools.partial(
            _refuse,
            "save_pretrained does not support shards; use meshpar.checkpoints: CheckpointManager(...).save, then export_safetensors",
        )
    module._ddp_params_and_buffers_to_ignore = _NotForDDP()  # which DistributedDataParallel reads first
    guard_state(module)
    _torch.check_gradients_of(_refuse_reduced)
    _torch.check_norms_of(_refuse_several_meshes)
    _torch.refuse_parts_as_numbers(
        functools.partial(
            _refuse,
            "a DTensor whose ranks hold parts of it was read as a number (.item(), float()), which would give only this rank's part; use "
            "tensor.full_tensor().item() on every rank, or par.clip_grad_norm_(float('inf')) for the norm of all gradients",
        )
    )


class _NotForDDP:
    """Refuses to be read."""

    def __iter__(self) -> NoReturn:
        _refuse("DistributedDataParallel would average what the plan has averaged; call par.module without it")


def _refuse_reduced(wanted: Iterable[Tensor]) -> None:
    if any(_torch.is_shard(each) or "_meshpar_whole" in each.__dict__ for each in wanted):
        _refuse(
            "torch.autograd.grad and backward(inputs=...) find no gradients of parameters that data ranks share: those are reduced when a "
            "whole backward has run; use loss.backward() and read parameter.grad, or a mesh of tensor parallelism alone"
        )


def _refuse_several_meshes(gradients: Iterable[Tensor]) -> None:
    meshes = {each.device_mesh: ", ".join(each.device_mesh.mesh_dim_names or ()) for each in gradients if isinstance(each, DTensor)}
    if len(meshes) > 1:
        _refuse(
            f"torch.nn.utils.clip_grad_norm_ got gradients on several meshes ({' and '.join(f'({axes})' for axes in meshes.values())}), "
            "whose norms torch cannot add; call par.clip_grad_norm_(max_norm), which clips by one norm over all of them"
        )


def _refuse(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise MeshparError(message)
