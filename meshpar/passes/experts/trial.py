"""Try whether ranks compute what a module of experts does: each by its own experts, on rows of noise."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.calls import without_modes
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, ParallelError, first_line
from meshpar.core.patterns import class_name
from meshpar.passes.experts.calls import IN_ORDER, Chosen, InOrder, by_all_ranks
from meshpar.passes.experts.routing import INTERFACE, Inner
from meshpar.passes.host_reads import unrecorded
from meshpar.passes.tensor.collectives import gather_values
from meshpar.passes.tensor.random import forked
from meshpar.passes.untouched import CannotKeep, untouched

log = logging.getLogger(__name__)

TOLERANCE, HALF_TOLERANCE = 1e-3, 0.1
"""How far divided experts may be off in the first forward, relative to the largest value; the second in 16 bits on
an accelerator.
"""
LARGEST = 1 << 27
"""Parameters of all ranks' experts that the first forward draws at most, of one module at a time: 512 MiB in
float32.
"""
_TOKENS = 64  # of each rank in a test of divided experts

Noise = Callable[[int, Sequence[int], torch.dtype], Tensor]
"""``(seed, shape, dtype) -> random numbers``."""


@final
@dataclass(frozen=True, slots=True)
class _Drawn:
    """Noise for the experts of all ranks, for those of this one, and for what comes to them.

    Attributes:
        held: number of experts of each rank.
        every: parameters of all ranks' experts, by name.
        mine: parameters of this rank's.
        inputs: hidden states, chosen experts and weights of this rank.
    """

    held: int
    every: Mapping[str, Tensor]
    mine: Mapping[str, Tensor]
    inputs: tuple[Tensor, Tensor, Tensor]


def try_experts(
    call: Chosen,
    bound: inspect.BoundArguments,
    own: Mapping[str, Tensor],
    like: Tensor,
    dtype: torch.dtype,
    slots: int,
    group: Any,
    *,
    training: bool,
) -> None:
    """Compare what a module computes by all experts with what the ranks compute by theirs.

    Tokens, weights and parameters are noise, so that no zero hides anything; of very large modules it has fewer
    experts. Outputs are compared, and the gradients of hidden states and weights: in float32, but on an accelerator in
    the dtypes that came. In training a module that draws random numbers is not compared.

    Args:
        call: the module.
        bound: a call of it.
        own: parameters of this rank's experts, by name.
        like: hidden states (N, D) of that call.
        dtype: of its weights.
        slots: number of experts that a token chooses.
        group: the ranks that divide the experts.
        training: whether the module trains.

    Raises:
        ParallelError: on every rank of ``group``.

    Collective: every rank of ``group`` calls it.
    """
    device = like.device
    # Each run replaces the tensors, which may be of a long context.
    given = {
        key: argument.new_empty(0) if isinstance(argument, Tensor) else argument
        for key, argument in bound.arguments.items()
    }
    bound = inspect.BoundArguments(bound.signature, OrderedDict(given))
    widened = not runtime.queues(device)
    noise = partial(_noise, device, widened)
    drawn = _drawn(call, own, like, dtype, slots, group, noise)
    with ExitStack() as stack:
        if not _keeps_state(call, bound, device, group, stack):
            return
        stack.enter_context(_by_itself(call.module, training, device, noise))
        if widened:
            stack.enter_context(torch.autocast(device.type, enabled=False))
        results = _results(call, bound, drawn, group, training=training)
    if results is None:
        return
    off = torch.stack(
        [(one - other).abs().max() / one.abs().max().clamp(min=1e-30) for one, other in zip(*results, strict=True)]
    )
    worst = float(gather_values(off.max().nan_to_num(torch.inf, torch.inf)[None], group).max())
    hidden, _, weights = drawn.inputs
    narrow = not widened and (
        torch.is_autocast_enabled(device.type)
        or any(torch.finfo(tensor.dtype).bits < 32 for tensor in (hidden, weights, *drawn.mine.values()))
    )
    if worst > (HALF_TOLERANCE if narrow else TOLERANCE):
        raise ParallelError(
            f"{call.name} ({class_name(call.module)}) gives other results with the experts of each rank of ep than "
            f"with all experts (off by {worst:.1e}{', in training' if training else ''}), expected for each token the "
            "sum over its chosen experts, each by its own row, weight and parameters alone; move computations over "
            "all experts of a token (a normalisation of weights, a residual, a capacity) to the module around it, or "
            "use a mesh without ep; Plan(..., verify=False) skips this test"
        )


def _drawn(
    call: Chosen, own: Mapping[str, Tensor], like: Tensor, dtype: torch.dtype, slots: int, group: Any, noise: Noise
) -> _Drawn:
    size, rank = group.size(), group.rank()
    held = max(1, min(call.count // size, LARGEST // (size * sum(value[:1].numel() for value in own.values()))))
    every = {
        leaf: noise(place, (held * size, *value.shape[1:]), value.dtype)
        for place, (leaf, value) in enumerate(own.items())
    }
    mine = {leaf: value[rank * held : (rank + 1) * held].clone() for leaf, value in every.items()}
    hidden = noise(100 + rank, (_TOKENS, like.shape[-1]), like.dtype)
    if call.dense:
        hidden[::4] = 0
    weights = noise(100 + size + rank, (_TOKENS, slots), dtype).abs()
    return _Drawn(held, every, mine, (hidden, _choices(held * size, slots, rank).to(like.device), weights))


def _keeps_state(
    call: Chosen, bound: inspect.BoundArguments, device: torch.device, group: Any, stack: ExitStack
) -> bool:
    """Restore module state when ``stack`` closes. Return False on every rank if any rank cannot."""
    why = ""
    try:
        stack.enter_context(untouched(call.module, call.inner, bound.arguments))
    except CannotKeep as error:
        why = str(error)
    if gather_values(torch.tensor([[bool(why)]], device=device), group).any():
        log.warning(
            "%s (%s) is not compared: %s",
            call.name,
            class_name(call.module),
            why or "another rank cannot put back what it does",
        )
        return False
    return True


def _results(
    call: Chosen, bound: inspect.BoundArguments, drawn: _Drawn, group: Any, *, training: bool
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return outputs and gradients by all experts and by each rank's; None where a module's own are not comparable.
    Collective.

    Raises:
        ParallelError: the module does not run on noise.
    """
    hidden, chosen, weights = drawn.inputs
    try:
        want, *again = (
            _with_gradients(partial(call.compute, bound, drawn.every), hidden, chosen, weights)
            for _ in range(1 + training)
        )
        random = any(not torch.equal(one, other) for outputs in again for one, other in zip(want, outputs))
        endless = not all(bool(tensor.isfinite().all()) for tensor in want)
        either = torch.tensor([[random, endless]], device=hidden.device)
        random, endless = gather_values(either, group).any(0).tolist()
        if endless:
            log.warning(
                "%s (%s) returns no finite values for random inputs and is not compared",
                call.name,
                class_name(call.module),
            )
        if random or endless:
            return None
        divided = by_all_ranks(partial(call.compute, bound, drawn.mine), call, drawn.held * group.size(), group)
        return want, _with_gradients(divided, hidden, chosen, weights)
    except MeshparError:
        raise
    except Exception as error:
        raise ParallelError(_does_not_run(call, drawn.held, error)) from error


def _does_not_run(call: Chosen, held: int, error: Exception) -> str:
    expected = IN_ORDER if isinstance(call, InOrder) else INTERFACE
    return (
        f"{call.name} ({class_name(call.module)}) does not run with {held} of its experts on rows of noise "
        f"({type(error).__name__}: {first_line(error)}), expected {expected} and its number of experts read from its "
        "parameters or an attribute such as num_experts; use a mesh without ep"
    )


def _noise(device: torch.device, widened: bool, seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    drawn = drawn / shape[-1] ** 0.5 if len(shape) > 2 else drawn
    return drawn.to(device, torch.promote_types(dtype, torch.float32) if widened else dtype)


def _choices(count: int, slots: int, seed: int) -> Tensor:
    """Return (tokens, ``slots``) of ``count`` experts, some of which get far more tokens than others."""
    chosen = torch.rand(_TOKENS, count, generator=torch.Generator().manual_seed(seed)).argsort(1)
    chosen[: _TOKENS // 2] = chosen[0]
    return chosen.repeat(1, -(-slots // count))[:, :slots].contiguous()


@contextmanager
def _by_itself(module: nn.Module, training: bool, device: torch.device, noise: Noise) -> Iterator[None]:
    """Run a module in a mode on copies of buffers, noise for parameters, and without FSDP2's hooks."""
    kept = [
        (child, child.training, dict(child._buffers), dict(child._parameters), _hooks(child))
        for child in module.modules()
    ]
    # Hooks of its own keep what is saved here out of a recomputation's.
    alone = (
        without_modes(),
        unrecorded(),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
        forked(device),
    )
    with ExitStack() as stack:
        for one in alone:
            stack.enter_context(one)  # type: ignore[arg-type]
        try:
            for place, (child, _, buffers, parameters, _) in enumerate(kept):
                child.training = training
                child._buffers.update(
                    {name: None if value is None else _copied(value) for name, value in buffers.items()}
                )
                if child is not module:
                    drawn = {
                        name: None if value is None else noise(place, value.shape, value.dtype)
                        for name, value in parameters.items()
                    }
                    child._parameters.update(drawn)  # type: ignore[arg-type]
                    child.__dict__.update(_forward_pre_hooks=OrderedDict(), _forward_hooks=OrderedDict())
            yield
        finally:
            for child, was, buffers, parameters, hooks in kept:
                child.training = was
                child._buffers.update(buffers)
                child._parameters.update(parameters)
                child.__dict__.update(hooks)


def _hooks(module: nn.Module) -> dict[str, Any]:
    return {name: module.__dict__[name] for name in ("_forward_pre_hooks", "_forward_hooks")}


def _copied(buffer: Tensor) -> Tensor:
    return (
        buffer.to(torch.promote_types(buffer.dtype, torch.float32), copy=True)
        if buffer.is_floating_point()
        else buffer.clone()
    )


def _same(x: Tensor) -> Tensor:
    return x


def _with_gradients(compute: Inner, hidden: Tensor, chosen: Tensor, weights: Tensor) -> list[Tensor]:
    """Return outputs and gradients for noise from above, in float64; a missing gradient is zero."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weights)]
    output = compute(leaves[0], chosen, leaves[1])
    up = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    grads = torch.autograd.grad(output, leaves, up, allow_unused=True) if output.requires_grad else (None, None)
    return [
        output.detach().double(),
        *((torch.zeros_like(leaf) if grad is None else grad).double() for leaf, grad in zip(leaves, grads)),
    ]
