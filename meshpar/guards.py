"""What a parallel module does not let happen in silence, and its errors told in the user's terms."""

from __future__ import annotations

import functools
import re
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshpar.errors import MeshparError, ParallelError
from meshpar.patterns import class_name

_SHAPES = (
    r"is invalid for input of size|cannot be reshaped|must match the size|mat1 and mat2 shapes cannot be multiplied|"
    r"sizes? .*(?:does|do) not match|"
    r"Expected size .* but got size|split_with_sizes expects",
    "the code counts on all heads or features where this rank holds its share of them",
    "take the count from the tensor: x.unflatten(-1, (-1, head_dim)) instead of x.view(batch, length, heads, head_dim)",
)
_CAUSES = (
    (
        r"mixed torch\.Tensor and DTensor",
        "a parameter that is split over the mesh is used outside its own module, together with a plain tensor",
        "call the module that owns the weight (x = self.head(x)) instead of using its weight directly, or take the module out of the "
        "tensor-parallel table: TensorParallel(styles={{'{module}': None}})",
    ),
    _SHAPES,
    (
        r"expected (?:m1 and m2|mat1 and mat2|self and mat2|.*) to have the same dtype|must have the same dtype",
        "mixed precision gathers parameters in another dtype than this input's",
        "cast the input to the parameter's dtype, keep cast_forward_inputs=True, or list the module in layout.fp32",
    ),
)


def guard(module: Any, plan_text: str, *, splits_features: bool) -> None:
    """Install the guards on a module to which a plan was applied.

    Args:
        module: the outermost module.
        plan_text: how messages call the plan.
        splits_features: ranks hold parts of features and heads, which explains errors about shapes.
    """
    causes = _CAUSES if splits_features else tuple(each for each in _CAUSES if each is not _SHAPES)
    _explain_errors(module, plan_text, causes)
    _refuse_before_materialize(module)
    module.register_forward_hook(_reshard_after_evaluation)
    module.__deepcopy__ = functools.partial(
        _refuse,
        "a parallel module cannot be copied, for the copy would run the original's weights; build another and apply a plan to it",
    )
    if hasattr(module, "save_pretrained"):
        module.save_pretrained = functools.partial(
            _refuse, "save_pretrained knows no shards; use meshpar.checkpoints: CheckpointManager(...).save, then export_safetensors"
        )


def reshard(module: nn.Module) -> None:
    """Let go of gathered parameters, so that the module's parameters are the shards, which are what is trained and saved."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def _reshard_after_evaluation(module: nn.Module, args: Any, output: Any) -> None:
    # Without a backward nothing reshards what stays gathered after forward, and an optimizer step would not reach it.
    if not torch.is_grad_enabled():
        reshard(module)


def _refuse_before_materialize(module: nn.Module) -> None:
    def look(module: nn.Module, args: Any) -> None:
        name = next((name for name, parameter in module.named_parameters() if parameter.is_meta), None)
        if name is not None:
            raise MeshparError(f"{name} has no values yet; call par.materialize(seed=...) or (weights=...) before the first forward")
        handle.remove()

    handle = module.register_forward_pre_hook(look, prepend=True)


def _refuse(message: str, *args: Any, **kwargs: Any) -> None:
    raise MeshparError(message)


def _explain_errors(module: nn.Module, plan_text: str, causes: tuple[tuple[str, str, str], ...]) -> None:
    """Let errors out of ``module``'s forward say which inner module raised, how it is placed, why, and what to do.

    Costs nothing while nothing is raised: the inner module is found in the traceback.
    """
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except MeshparError:
            raise
        except (RuntimeError, ValueError, AssertionError, IndexError, TypeError) as error:
            message = _told(error, module, plan_text, causes)
            if message is None:
                raise
            raise ParallelError(message) from error

    module.forward = functools.update_wrapper(forward, inner)
    module.forward.only_explains = True  # type: ignore[attr-defined]  # what looks for the model's own code may look behind it


def _told(error: Exception, root: nn.Module, plan_text: str, causes: tuple[tuple[str, str, str], ...]) -> str | None:
    text = str(error)
    found = next(((cause, remedy) for pattern, cause, remedy in causes if re.search(pattern, text)), None)
    if found is None:
        return None
    name, culprit, line = _innermost(error.__traceback__, root)
    cause, remedy = found
    return (
        f"{name or 'the outermost module'} ({class_name(culprit)}) failed under {plan_text}: {text.splitlines()[0]}\n"
        f"  at: {line}\n"
        f"  holds: {_placements(culprit)}\n"
        f"  likely cause: {cause}\n"
        f"  remedy: {remedy.format(module=name)}"
    )


def _innermost(trace: TracebackType | None, root: nn.Module) -> tuple[str, nn.Module, str]:
    """Return name, module and source line of the deepest frame whose ``self`` is a module of ``root`` outside torch and meshpar."""
    names = {id(child): name for name, child in root.named_modules()}
    best: tuple[str, nn.Module, str] = ("", root, "unknown")
    while trace is not None:
        frame = trace.tb_frame
        owner = frame.f_locals.get("self", frame.f_locals.get("module"))
        inside = frame.f_globals.get("__name__", "")
        if isinstance(owner, nn.Module) and id(owner) in names:
            own_code = not inside.startswith(("torch.", "meshpar.passes", "meshpar.guards"))
            where = f"{frame.f_code.co_filename}:{trace.tb_lineno}" if own_code else best[2]
            best = (names[id(owner)], owner, where)
        trace = trace.tb_next
    return best


def _placements(module: nn.Module) -> str:
    held = []
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
            held.append(f"{name} {tuple(parameter.shape)} as {', '.join(f'{axis}:{placement}' for axis, placement in axes)}")
        else:
            held.append(f"{name} {tuple(parameter.shape)} whole")
        if len(held) == 4:
            break
    return "; ".join(held) or "no parameters"
