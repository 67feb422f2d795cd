"""The trial of experts: ranks compute by their own experts what all experts compute, on noise, which hides nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.calls import eager, without_modes
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, ParallelError, first_line
from meshpar.core.layout import ModelLayout
from meshpar.core.passes import Facts
from meshpar.core.patterns import class_name, kind_of
from meshpar.passes.experts.routing import (
    IN_ORDER,
    INTERFACE,
    Chosen,
    DividedModules,
    Inner,
    InOrder,
    Routing,
    by_all_ranks,
    calling,
    refuse_shapes,
)
from meshpar.passes.host_reads import unrecorded
from meshpar.passes.tensor.collectives import gather_values
from meshpar.passes.tensor.parts import local_parameters
from meshpar.step.inner_calls import own_forward
from meshpar.trials.copies import CannotCopy, copy_block, free, largest, undisturbed, widen
from meshpar.trials.engine import TOLERANCE, is_narrow, measure, noise

log = logging.getLogger(__name__)

HALF_TOLERANCE = 0.1
"""How far divided experts may be off in 16 bits on an accelerator."""
LARGEST = 1 << 27
"""Parameters of all ranks' experts that are drawn at most, of one module at a time: 512 MiB in float32."""
_TOKENS = 64  # of each rank
_EVERY_MODULES = {*dir(nn.Module), *vars(nn.Module())}
_SETTINGS = (bool, int, float, str, type(None))


def watch_experts(module: nn.Module, layout: ModelLayout, facts: Facts) -> None:
    """Try one module of experts of each kind, before its first call in evaluation and its first one in training."""
    divided, routing = facts.find(DividedModules), facts.find(Routing)
    if divided is None or routing is None:
        return
    names = {child: name for name, child in module.named_modules()}
    kinds = {_kind(child, number): child for number, child in reversed([*enumerate(divided.meshes)])}
    for child in kinds.values():
        call = calling(names[child], layout)(names[child], child, routing)
        ExpertsTest(call, divided.meshes[child]["ep"].get_group())


def _kind(module: nn.Module, place: int) -> Hashable:
    """Return what experts of one kind have in common; ``place`` is a number that a module may know itself by."""
    objects = dict[str, object]()
    for inner, child in module.named_modules():
        attributes = vars(child).keys() - _EVERY_MODULES
        names = sorted(name for name in attributes if not name.startswith(("_meshpar", "__")))
        identities = [(name, id(value)) for name in names if not isinstance(value := vars(child)[name], _SETTINGS)]
        objects[inner] = type(child), own_forward(child), identities
    return kind_of(module, place, objects)


@final
class ExpertsTest:
    """Tries one module of experts, which the ranks of a group divide, by a hook before its calls."""

    def __init__(self, call: Chosen, group: Any) -> None:
        self._call, self._group, self._untried = call, group, {False, True}
        self._handle = call.module.register_forward_pre_hook(self._before_call, with_kwargs=True)

    @eager
    def _before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare all experts with each rank's, before the first call of each mode. Every rank calls it."""
        modes = sorted(self._untried & {False, module.training})
        if not modes:
            return
        parameters = local_parameters(module)
        bound, hidden, chosen, weights = self._call.read(*args, **kwargs)
        refuse_shapes(hidden, chosen, weights)
        # Each run replaces the tensors, which may be of a long context.
        for key, argument in bound.arguments.items():
            bound.arguments[key] = argument.new_empty(0) if isinstance(argument, Tensor) else argument
        for training in modes:
            self._untried.discard(training)
            draws = _Draws(self._call, parameters, hidden, weights, chosen.shape[-1], self._group)
            self._try(draws, bound, training=training)
        if not self._untried:
            self._handle.remove()

    def _try(self, draws: _Draws, bound: inspect.BoundArguments, *, training: bool) -> None:
        call, device = self._call, draws.device
        why, copied = "", None
        try:
            copied, arguments = copy_block(call.module, draws.replaced(call.module), bound.arguments)
            bound = inspect.BoundArguments(bound.signature, arguments)
        except CannotCopy as error:
            why = str(error)
        if largest(bool(why), device, self._group):
            self._skip(f"is not compared: {why or 'it cannot be copied on another rank'}")
            return
        assert copied is not None
        copied.train(training)
        with ExitStack() as stack:
            stack.callback(free, copied)
            # Hooks of its own keep what is saved here out of a recomputation's.
            saved = torch.autograd.graph.saved_tensors_hooks(*[lambda tensor: tensor] * 2)
            for context in (without_modes(), unrecorded(), torch.enable_grad(), saved, undisturbed(copied.modules())):
                stack.enter_context(context)
            if draws.widened:
                stack.enter_context(torch.autocast(device.type, enabled=False))
            results = self._results(call.on(copied), bound, draws, training=training)
        if results is None:
            return
        worst = max(measure(want, have) for want, have in zip(*results, strict=True))
        worst = largest(worst, device, self._group)
        narrow = not draws.widened and (torch.is_autocast_enabled(device.type) or is_narrow(draws.dtypes))
        if worst > (HALF_TOLERANCE if narrow else TOLERANCE):
            raise ParallelError(
                f"{call.name} ({class_name(call.module)}) gives other results with the experts of each rank of ep than "
                f"with all experts (off by {worst:.1e}{', in training' if training else ''}), expected for each token "
                "the sum over its chosen experts, each by its own row, weight and parameters alone; move computations "
                "over all experts of a token (a normalisation of weights, a residual, a capacity) to the module around "
                "it, or use a mesh without ep; Plan(..., verify=False) skips this test"
            )

    def _skip(self, why: str) -> None:
        log.warning("%s (%s) %s", self._call.name, class_name(self._call.module), why)

    def _results(
        self, call: Chosen, bound: inspect.BoundArguments, draws: _Draws, *, training: bool
    ) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return outputs and gradients by all experts and by each rank's; None where a module's are not comparable."""
        compute = partial(call.compute, bound)
        try:
            want, *again = (draws.run(partial(compute, draws.parameters)) for _ in range(1 + training))
            random = any(not torch.equal(value, other) for outputs in again for value, other in zip(want, outputs))
            endless = not all(bool(tensor.isfinite().all()) for tensor in want)
            either = torch.tensor([[random, endless]], device=draws.device)
            random, endless = gather_values(either, self._group).any(0).tolist()
            if endless:
                self._skip("returns no finite values for random inputs and is not compared")
            if random or endless:
                return None
            count = draws.count * self._group.size()
            return want, draws.run(by_all_ranks(partial(compute, draws.part), call, count, self._group))
        except MeshparError:
            raise
        except Exception as error:
            expected = IN_ORDER if isinstance(call, InOrder) else INTERFACE
            raise ParallelError(
                f"{call.name} ({class_name(call.module)}) does not run with {draws.count} of its experts on rows of "
                f"noise ({type(error).__name__}: {first_line(error)}), expected {expected} and its number of experts "
                "read from its parameters or an attribute such as num_experts; use a mesh without ep"
            ) from error


@final
class _Draws:
    """Noise in the shapes of a call, whose tokens choose ``slots`` of ``count`` experts of each rank."""

    def __init__(
        self, call: Chosen, parameters: Mapping[str, Tensor], hidden: Tensor, weights: Tensor, slots: int, group: Any
    ) -> None:
        size, rank, self.device = group.size(), group.rank(), hidden.device
        self.widened = not runtime.queues(self.device)
        numbers = sum(value[:1].numel() for value in parameters.values())
        self.count = max(1, min(call.count // size, LARGEST // (size * numbers)))
        self.parameters = {
            leaf: self._draw(number, (self.count * size, *value.shape[1:]), value.dtype)
            for number, (leaf, value) in enumerate(parameters.items())
        }
        rows = slice(rank * self.count, (rank + 1) * self.count)
        self.part = {leaf: value[rows].clone() for leaf, value in self.parameters.items()}
        self._hidden = self._draw(100 + rank, (_TOKENS, hidden.shape[-1]), hidden.dtype)
        if call.dense:
            self._hidden[::4] = 0
        self._weights = self._draw(100 + size + rank, (_TOKENS, slots), weights.dtype).abs()
        self.dtypes = {tensor.dtype for tensor in (self._hidden, self._weights, *self.part.values())}
        # some experts get far more tokens than others
        order = torch.rand(_TOKENS, self.count * size, generator=torch.Generator().manual_seed(rank)).argsort(1)
        order[: _TOKENS // 2] = order[0]
        self._chosen = order.repeat(1, -(-slots // order.shape[1]))[:, :slots].contiguous().to(self.device)

    def _draw(self, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = noise(shape, seed)
        values = values / shape[-1] ** 0.5 if len(shape) > 2 else values
        return values.to(self.device, torch.promote_types(dtype, torch.float32) if self.widened else dtype)

    def replaced(self, module: nn.Module) -> dict[Tensor, Tensor]:
        """Return what a copy of the module has in the place of its buffers and of its children's parameters."""
        replaced: dict[Tensor, Tensor] = {buffer: widen(buffer.detach()).clone() for buffer in module.buffers()}
        for number, child in enumerate(module.modules()):
            for parameter in child.parameters(recurse=False) if number else ():
                replaced[parameter] = self._draw(number, tuple(parameter.shape), parameter.dtype)
        return replaced

    def run(self, compute: Inner) -> list[Tensor]:
        """Return outputs and gradients for noise from above, in float64; a missing gradient is zero."""
        hidden, weights = (tensor.detach().clone().requires_grad_() for tensor in (self._hidden, self._weights))
        output = compute(hidden, self._chosen, weights)
        gradients: Any = (None, None)
        if output.requires_grad:
            cotangent = noise(output.shape, 0).to(output)
            gradients = torch.autograd.grad(output, (hidden, weights), cotangent, allow_unused=True)
        missing = zip((hidden, weights), gradients)
        gradients = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in missing]
        return [output.detach().double(), *(gradient.double() for gradient in gradients)]
