"""Errors out of a parallel module, told in the user's terms: which module, how it is placed, why, and what to do."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Iterator
from typing import Any, final

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshpar.core.errors import MeshparError, ParallelError, first_line
from meshpar.core.patterns import class_name
from meshpar.passes.tensor.context import Context
from meshpar.tensors.placements import placements_text

_Cause = tuple[str, str, str]
"""(pattern of the message, likely cause, remedy)"""

_SHAPES: _Cause = (
    r"(?i)\b(sizes?|shapes?|dimensions?|normalized_shape)\b|not enough values to unpack|too many values to unpack"
    r"|out of range",
    "the code assumes all heads or features, but this rank holds its share of them",
    "take the count from the tensor: x.unflatten(-1, (-1, head_dim)) instead of x.view(batch, length, heads, "
    "head_dim), x.chunk(3, dim=-1) instead of x.split(width, dim=-1)",
)
_POSITIONS: _Cause = (
    r"(?i)\bsizes?\b",
    "under sequence_parallel a rank's hidden states between layers are its part of the positions, and the model made "
    "something for that part, such as a mask of padding or of packed documents, which meets all positions here",
    "use TensorParallel(sequence_parallel=False), or batches without attention_mask and without packed documents",
)
_WHOLE: _Cause = (
    r"mat1 and mat2 shapes cannot be multiplied",
    "it has no style, so its weight is whole, but its input is this rank's part, the output of a 'colwise' layer",
    "give it the style 'rowwise' in the tensor-parallel table ('{module}': 'rowwise'), or leave the layer before it "
    "whole",
)
_OUTSIDE: _Cause = (
    r"mixed torch\.Tensor and DTensor",
    "a parameter that is split over the mesh is used outside its own module, together with a plain tensor",
    "call the module that owns the weight (x = self.head(x)) instead of using its weight directly, or take that "
    "module out of the tensor-parallel table: TensorParallel(styles={{NAME: None}})",
)
_OUTSIDE_BLOCK: _Cause = (
    r"mixed torch\.Tensor and DTensor",
    "a parameter is used where its weights are not gathered: outside of its block, or of a call of the outermost "
    "module",
    "call the block that owns it (x = self.block(x)) in the model's forward, or call par.module from outside; let a "
    "method of the model's own enter by par.register_method(name)",
)
_GATHERED = r"mixed torch\.Tensor and DTensor|setStorage|storage of size 0|must be 2-D|size mismatch"
_DTYPES: _Cause = (
    r"expected (?:m1 and m2|mat1 and mat2|self and mat2|.*) to have the same dtype|must have the same dtype",
    "mixed precision gathers parameters in another dtype than this input's",
    "cast the input to the parameter's dtype, or keep cast_forward_inputs=True, or list the module in layout.fp32",
)


_COMPILED: _Cause = (
    r"no rule registered for HigherOrderOperator",
    "selective recomputation cannot look into a compiled block that changes buffers, as a batch norm does in training",
    "use ActivationCheckpoint(mode='full'), or leave such blocks out: Compile(blocks=...)",
)


_IN_PLACE: _Cause = (
    r"is a view and is being modified inplace",
    "it changes its input in place, and the plan passes that input as a view, whose gradient torch cannot track",
    "write x = x + y instead of x += y, and F.relu(x) instead of F.relu(x, inplace=True), where x is the input of a "
    "block",
)
_ASSIGNED: _Cause = (
    r"cannot assign .* as parameter|Cannot assign non-leaf Tensor to parameter",
    "code in a forward assigns a weight, or what it computed from one, to a parameter's name; in a forward weights "
    "are gathered tensors",
    "put such code on the module before plan.apply (torch.nn.utils.parametrizations); keep what a loss reads in a "
    "list or a dict",
)
_INFERENCE: _Cause = (
    r"Inplace update to inference tensor",
    "a call that gathers weights runs under torch.no_grad() in the place of inference mode, in which tensors (a cache) "
    "were made that it writes into",
    "make such tensors under torch.no_grad(), and call the module there",
)
_GONE: _Cause = (
    r"[Cc]onnection (?:closed|reset)|[Tt]imed out|timeout",
    "another rank left its loop, or its job, or runs another number of forwards and backwards",
    "run the same number of steps on every rank, and look at the first error of all ranks' logs; cut the data to the "
    "same length, DistributedSampler(..., drop_last=True)",
)
_TRANSFORMS: _Cause = (
    r"functorch transforms|forward AD",
    "torch.func (jvp, vmap, grad) and forward-mode derivatives do not go through the exchanges of tensor parallelism",
    "use a mesh without tp, on which they equal one process's (FullyShard(), Replicate()); torch.autograd.grad works "
    "under tp, also with create_graph=True",
)
_UNORDERED: _Cause = (
    r"does not have a deterministic implementation",
    "same_bits allows deterministic kernels alone, and torch has none for this operator on this device",
    "write it by other operators (torch.use_deterministic_algorithms lists those that have one), or drop same_bits "
    "from the plan",
)
_SHARE: _Cause = (
    "",
    "not known; under this plan each rank computes with its share of the heads or features, which an operation may "
    "refuse",
    "run the model without the plan: if it fails in the same way, the model is at fault; otherwise correct the styles "
    "{inside} in the tensor-parallel table, or keep the layers there whole (the style None)",
)
"""For an error of torch's own that no other cause fits. A :class:`ParallelError` is a RuntimeError, too."""

_OF_CODE = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)
_NEVER_AT_FAULT = tuple(
    f"{room}." for room in ("torch", "meshpar.passes", "meshpar.step", "meshpar.tensors", "meshpar.exchange")
)
"""Modules whose lines no message names as the place of an error."""


@final
class Explanation:
    """The possible causes of an error under one plan, by the styles that split ``features`` and the units' pass."""

    def __init__(self, module: nn.Module, plan_text: str, *, features: Context | None, unit_pass: str | None) -> None:
        self._module, self._plan_text, self._unit_pass = module, plan_text, unit_pass
        self._features = features
        shares = (_OUTSIDE_BLOCK,) if features is None else (_TRANSFORMS, _OUTSIDE, _SHAPES)
        self._causes = (*shares, _IN_PLACE, _DTYPES, _COMPILED, _ASSIGNED, _INFERENCE, _UNORDERED, _GONE)

    def explained(self, error: Exception) -> Exception:
        """Return a ParallelError that names the inner module, or ``error`` itself where its cause is not known."""
        if isinstance(error, MeshparError) or not isinstance(error, _OF_CODE):
            return error
        message = self._message(error)
        return error if message is None else ParallelError(message)

    def _message(self, error: Exception) -> str | None:
        text = str(error)
        frames = list(_frames(error))
        name, culprit, line = self._innermost(frames)
        split = self._features
        causes = (*self._causes, _SHARE) if split is not None and type(error) is RuntimeError else self._causes
        if isinstance(culprit, nn.Linear) and split is not None and name not in split.styles:
            causes = (_WHOLE, *causes)
        if split is not None and split.sequence_parallel and _is_part(text, split.parts):
            causes = (_POSITIONS, *causes)
        cause = self._outside_of_its_block(text, name, frames) or next(
            ((why, remedy) for pattern, why, remedy in causes if re.search(pattern, text)), None
        )
        if cause is None:
            return None
        why, remedy = cause
        parameters = itertools.islice(culprit.named_parameters(), 4)
        placed = [f"{inner} {tuple(tensor.shape)} {placements_text(tensor)}" for inner, tensor in parameters]
        return (
            f"{name or 'the outermost module'} ({class_name(culprit)}) failed under {self._plan_text}: "
            f"{first_line(error)}\n"
            f"  at: {line}\n"
            f"  holds: {'; '.join(placed) or 'no parameters'}\n"
            f"  likely cause: {why}\n"
            f"  remedy: {remedy.format(module=name, inside=f'of the layers in {name}' if name else 'of its layers')}"
        )

    def _outside_of_its_block(self, text: str, name: str, frames: list[tuple[Any, str]]) -> tuple[str, str] | None:
        """Return cause and remedy for a module that was called without its block, which gathers its weights."""
        if self._unit_pass is None or not re.search(_GATHERED, text):
            return None
        running = {id(owner) for owner, _ in frames}
        parts = name.split(".")
        for count in range(len(parts) - 1, 0, -1):
            around = ".".join(parts[:count])
            unit = self._module.get_submodule(around)
            if isinstance(unit, FSDPModule):
                if id(unit) in running:
                    return None
                called = next(path for path, child in unit.named_modules(prefix=around) if id(child) in running)
                return (
                    f"{called} is called from outside of {around}, and its weights are gathered with that block alone",
                    f"make it a block of its own too, {self._unit_pass}(blocks=(..., '{called}')), beside the "
                    f"layout's blocks; or {self._unit_pass}(blocks=()), which gathers the whole model at once",
                )
        return None

    def _innermost(self, frames: list[tuple[Any, str]]) -> tuple[str, nn.Module, str]:
        """Return name, module and source line of the deepest frame of a module outside torch and meshpar."""
        names = {id(child): name for name, child in self._module.named_modules()}
        best: tuple[str, nn.Module, str] = ("", self._module, "unknown")
        for owner, where in frames:
            if isinstance(owner, nn.Module) and id(owner) in names:
                best = (names[id(owner)], owner, where or best[2])
        return best


def _is_part(text: str, ranks: int) -> bool:
    """Return whether an error is about two sizes of which one is a rank's part of the other."""
    sizes = re.search(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", text)
    if sizes is None:
        return False
    smaller, larger = sorted(map(int, sizes.groups()))
    return smaller * ranks == larger


def _frames(error: Exception) -> Iterator[tuple[Any, str]]:
    """Yield (self, source line or '' in code of torch's and ours) of every frame, outermost first."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        frame_module = frame.f_globals.get("__name__", "")
        own_code = not frame_module.startswith(_NEVER_AT_FAULT) and frame_module != __name__
        where = f"{frame.f_code.co_filename}:{number}" if own_code else ""
        yield frame.f_locals.get("self", frame.f_locals.get("module")), where
