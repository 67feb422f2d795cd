"""ExpertParallel: each rank of an axis holds whole experts, and tokens travel to the experts that they chose and back.

Expert parallelism of GShard (arXiv 2006.16668, section 3) without a capacity: the ranks send one another as many rows
as were chosen (arXiv 2211.15841), so that nothing is dropped and the result is that of one process.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshpar._torch.calls import eager, without_modes
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, ParallelError, first_line
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, sizes_text
from meshpar.core.passes import Pass, Role, Stage, unmatched
from meshpar.core.patterns import OWN_NUMBER, class_name, covers, find_modules, matches
from meshpar.passes.applied import Applied, applied
from meshpar.passes.installed import set_forward
from meshpar.passes.local import local, part_of
from meshpar.passes.random import forked
from meshpar.passes.reads import unrecorded
from meshpar.passes.routing import INTERFACE, Inner, Mean, Routing, by_experts, refuse_shapes
from meshpar.passes.tensor.collectives import gather_values
from meshpar.passes.tensor.parts import with_own
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
_COUNTS = re.compile(r"_?(moe_)?(n|num)_(local_|routed_|total_)?experts")
_TORCHS = {"parameters", "buffers", "modules", "non_persistent_buffers_set", "meshpar"}
_IN_ORDER = "(rows (R, D) in the order of experts) or (such rows, the number of each expert's)"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel(Pass):
    """Divide whole experts over ``ep``, whose ranks get different samples; each token is sent to the ranks of its
    experts.

    All other parameters are sharded over ``dp_shard`` and ``ep`` together, the experts of a rank over ``dp_shard``
    alone. No token is dropped. ``tp`` then splits the features of each expert.

    Attributes:
        skew: rows of the busiest rank of ``ep`` relative to equal routing. The forecast assumes them for this rank;
            training ignores the value.

    >>> from meshpar import ExpertParallel, FullyShard, Plan
    >>> print(Plan("dp_shard=2,ep=4", [ExpertParallel(), FullyShard()]))
    dp_shard=2,ep=4 [ExpertParallel -> FullyShard]
    """

    name = "ExpertParallel"
    stage = Stage.EXPERTS
    roles = MappingProxyType({"ep": Role.SAMPLES})

    skew: float = 1.0

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if "ep" in layout.refusals:
            yield layout.refusals["ep"]
        elif not layout.experts:
            yield (
                f"ExpertParallel has nothing to divide: the layout of {type(module).__name__} names no experts; give "
                "ModelLayout(experts=('layers.*.moe.experts',)), or drop ExpertParallel and ep from the mesh"
            )
        size, owners = mesh.axes["ep"], dict[nn.Parameter, list[str]]()
        if not 1 <= self.skew <= size:
            yield (
                f"ExpertParallel(skew={self.skew}) is expected to be from 1, equal routing, to ep={size}, all rows to "
                "one rank; change it"
            )
        for name, child in module.named_modules():
            for leaf, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
                owners.setdefault(parameter, []).append(f"{name}.{leaf}")
        divided, tied = self.shards(module, layout), [names for names in owners.values() if len(names) > 1]
        for names in (group for group in tied if not divided.isdisjoint(group)):
            yield (
                f"{' and '.join(names)} are one parameter, which ExpertParallel would divide separately for each "
                "module; use one experts module for both layers, untie them, or use a mesh without ep"
            )
        for pattern in layout.experts:
            found = list(find_modules(module, pattern))
            if not found:
                yield unmatched(f"layout experts {pattern!r}", pattern, module)
            for name, child in found:
                counts = {
                    leaf: len(parameter) if parameter.ndim else 0
                    for leaf, parameter in child.named_parameters(recurse=False)
                }
                if isinstance(child, nn.ModuleList):
                    yield (
                        f"{name} is a list of {len(child)} modules, expected one module with their parameters "
                        f"stacked, and {INTERFACE} into its forward; stack them, or use a mesh without ep"
                    )
                elif len(set(counts.values())) != 1:
                    held = ", ".join(f"{leaf} {tuple(getattr(child, leaf).shape)}" for leaf in counts) or "no parameter"
                    yield (
                        f"{name} must hold parameters whose first dim counts its experts, got {held}; take it out of "
                        "ModelLayout.experts"
                    )
                else:
                    count = next(iter(counts.values()))
                    if count % size:
                        yield f"{name} has {count} experts, which ep={size} does not divide; {sizes_text('ep', count)}"
                    yield from _undivided_problems(name, child, count, _is_in_order(name, layout))

    def warnings(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if mesh.spans_nodes("ep"):
            yield (
                f"axis 'ep' (size {mesh.axes['ep']}) spans nodes of {mesh.ranks_per_node} ranks: every layer of "
                "experts then sends its tokens between nodes four times a step; keep ep x tp within a node, and use "
                "dp_shard across nodes"
            )

    def late_problems(
        self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec, came: Collection[str]
    ) -> Iterator[str]:
        late = [name for name in came for pattern in layout.experts if covers(pattern, name)]
        if mesh.axes["ep"] > 1 and late:
            yield (
                f"{late[0]} holds experts, which ExpertParallel divides in plan.apply alone; put it into the model "
                "before plan.apply"
            )

    def shards(self, module: nn.Module, layout: ModelLayout) -> set[str]:
        found = [pair for pattern in layout.experts for pair in find_modules(module, pattern)]
        return {f"{name}.{leaf}" for name, child in found for leaf, _ in child.named_parameters(recurse=False)}

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> None:
        axis, names = mesh["ep"], mesh.mesh_dim_names or ()
        if axis.size() == 1 or applied(module).divided:
            return
        record, inside = applied(module), mesh[names[names.index("ep") :]]
        record.routing = Routing(self.skew)
        placements = [Shard(0), *[Replicate()] * (inside.ndim - 1)]
        placed: dict[int, nn.Parameter] = {}
        found = {child: name for pattern in layout.experts for name, child in find_modules(module, pattern)}
        untried = (
            {_kind(child, place): child for place, child in reversed([*enumerate(found)])} if record.verify else {}
        )
        for child, name in found.items():
            for leaf, parameter in child.named_parameters(recurse=False):
                if id(parameter) not in placed:
                    mine = parameter.detach().chunk(axis.size())[axis.get_local_rank()]
                    placed[id(parameter)] = part_of(parameter, mine.clone(), inside, placements)
                child._parameters[leaf] = placed[id(parameter)]
            kind = _InOrder if _is_in_order(name, layout) else _Chosen
            _install(kind(name, child, record), axis.get_group(), tried=child not in untried.values())
            record.divided[child] = mesh


def _is_in_order(name: str, layout: ModelLayout) -> bool:
    return any(matches(pattern, name) for pattern in layout.experts_in_order)


def _undivided_problems(name: str, module: nn.Module, count: int, in_order: bool) -> Iterator[str]:
    """Yield what a module of ``count`` experts has beside its own parameters that a rank would have to divide, too."""
    remedy = "make it a parameter of the module's own, or use a mesh without ep"
    kept = [
        *module.named_buffers(),
        *((leaf, parameter) for leaf, parameter in module.named_parameters() if "." in leaf),
    ]
    for leaf, tensor in kept:
        if tensor.ndim and len(tensor) == count:
            kind = "parameter of a child module" if isinstance(tensor, nn.Parameter) else "buffer"
            yield (
                f"{name}.{leaf} {tuple(tensor.shape)} is a {kind} whose first dim counts experts, and it would stay "
                f"whole; {remedy}"
            )
    if len(numbers := _numbers(module, count)) > 1:
        yield (
            f"{name} stores its number of experts as {' and as '.join(numbers)}, expected one attribute, such as "
            "num_experts; keep one"
        )
    given = list(inspect.signature(module.forward).parameters.values())
    if (len(given) not in (1, 2) if in_order else len(given) < 3) or any(
        argument.kind == argument.VAR_POSITIONAL for argument in given
    ):
        got, want = ", ".join(map(str, given)), _IN_ORDER if in_order else INTERFACE
        remedy = "take it out of ModelLayout.experts, or use a mesh without ep"
        yield f"{name} has forward({got}), expected {want}; {remedy}"


def _numbers(module: nn.Module, count: int) -> list[str]:
    """Return the attributes by which a module counts its experts."""
    return [
        name
        for name, value in vars(module).items()
        if _COUNTS.fullmatch(name) and type(value) is int and value == count
    ]


def _kind(module: nn.Module, place: int) -> Any:
    """Return what experts of one kind have in common; ``place`` is a number that a module may know itself by."""
    facts = []
    for inner, child in module.named_modules():
        plain = {
            key: value
            for key, value in vars(child).items()
            if key.strip("_") not in _TORCHS and key not in dir(nn.Module)
        }
        settings = {
            key: value if isinstance(value, bool | float | str | None) else id(value) for key, value in plain.items()
        }
        numbers = {key: value for key, value in plain.items() if type(value) is int}
        settings |= {
            key: None if value == place and OWN_NUMBER.search(key) else value for key, value in numbers.items()
        }
        shapes = tuple((leaf, tuple(parameter.shape)) for leaf, parameter in child.named_parameters(recurse=False))
        forward = getattr(child.forward, "__func__", child.forward)
        facts.append((inner, type(child), forward, shapes, tuple(sorted(settings.items(), key=str))))
    return tuple(facts)


class _Chosen:
    """How a module of experts is called: with hidden states, chosen experts and weights."""

    dense = False

    def __init__(self, name: str, module: nn.Module, record: Applied) -> None:
        self.name, self.module, self.inner, self.record = name, module, module.forward, record
        self.count = len(next(module.parameters(recurse=False)))
        self.names, self._signature = _numbers(module, self.count), inspect.signature(module.forward)

    def read(self, *args: Any, **kwargs: Any) -> tuple[inspect.BoundArguments, Tensor, Tensor, Tensor]:
        """Return the call with its hidden states, chosen experts and weights."""
        bound = self._signature.bind(*args, **kwargs)
        hidden, chosen, weights = (bound.arguments[key] for key in _inputs(self.name, self.module, bound.arguments))
        return bound, hidden, chosen, weights

    def compute(self, bound: inspect.BoundArguments, own: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        """Return what experts with the parameters ``own`` make of such inputs, chosen from theirs."""
        bound.arguments.update(zip(_inputs(self.name, self.module, bound.arguments), inputs))
        return self.called(bound, own, inputs[0])

    def called(self, bound: inspect.BoundArguments, own: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Call the module with other parameters; see that it returns a row for each of ``hidden``."""
        held = dict.fromkeys(self.names, len(next(iter(own.values()))))
        output = with_own(self.module, own, lambda: self.inner(*bound.args, **bound.kwargs), held)
        if isinstance(output, Tensor) and output.shape[:-1] == hidden.shape[:-1]:
            return output
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ParallelError(
            f"{self.name} ({class_name(self.module)}) returned {got}, expected one tensor (N, D) for hidden states "
            f"{tuple(hidden.shape)}; return what else it computes from the module around it, or use a mesh without ep"
        )


@final
class _InOrder(_Chosen):
    """How experts are called with rows in their order: the number of each expert's, or equally many, most of them
    zeros.
    """

    def __init__(self, name: str, module: nn.Module, record: Applied) -> None:
        super().__init__(name, module, record)
        self.dense = len(self._signature.parameters) == 1

    def read(self, *args: Any, **kwargs: Any) -> tuple[inspect.BoundArguments, Tensor, Tensor, Tensor]:
        bound = self._signature.bind(*args, **kwargs)
        rows, chosen = rows_in_order(bound.arguments, self.count)
        return bound, rows, chosen[:, None], rows.new_ones(len(rows), 1)

    def compute(self, bound: inspect.BoundArguments, own: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        rows, chosen, weights = inputs
        held, order = len(next(iter(own.values()))), chosen[:, 0].argsort(stable=True)
        sizes = self.record.routing.sizes(chosen[:, 0], held)
        given, places = rows[order], torch.arange(len(rows), device=rows.device)
        if self.dense:  # as many rows for each as for the one with most
            places = torch.cat([places[:size] + number * max(sizes) for number, size in enumerate(sizes)])
            given = rows.new_zeros(held * max(sizes), rows.shape[-1]).index_copy(0, places, given)
        came = list(bound.arguments.values())[-1]
        counts = (
            torch.tensor(sizes, dtype=came.dtype, device=came.device)
            if isinstance(came, Tensor) and not self.dense
            else sizes
        )
        bound.arguments.update(zip(list(bound.arguments), (given, counts)))
        output = self.called(bound, own, given)[places]
        return (
            output[torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))] * weights
        )


def rows_in_order(arguments: Mapping[Any, Any], count: int) -> tuple[Tensor, Tensor]:
    """Return the rows (R, D) of a call of ``count`` experts with rows in their order, and each row's expert (R,)."""
    rows, *sizes = arguments.values()
    numbers = torch.arange(count, device=rows.device)
    if not sizes:
        return rows, numbers.repeat_interleave(len(rows) // count, output_size=len(rows))
    return rows, numbers.repeat_interleave(torch.as_tensor(sizes[0], device=rows.device), output_size=len(rows))


def _by_all_ranks(compute: Inner, call: _Chosen, count: int, group: Any) -> Inner:
    """Return ``compute``, which has the experts of this rank, for rows that chose from the ``count`` experts of all
    ranks.
    """
    routing = call.record.routing

    def divided(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return by_experts(compute, rows, chosen, weights, count, group, routing)

    def passing(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Send no rows of zeros, which give zeros."""
        some = routing.filled(rows, call.count)
        computed = divided(rows[some], chosen[some], weights[some])
        return computed.new_zeros(len(rows), computed.shape[-1]).index_copy(0, some, computed)

    return passing if call.dense else divided


def _install(call: _Chosen, group: Any, *, tried: bool) -> None:
    """Let a module of experts compute with those of this rank, on the rows of all ranks that chose them."""
    module, untried = call.module, set() if tried else {False, True}

    @eager
    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {
            leaf: local(parameter) if isinstance(parameter, DTensor) else parameter
            for leaf, parameter in module._parameters.items()
            if parameter is not None
        }
        if len(next(iter(own.values()))) == call.count:  # all of them, in a test against the unsplit module
            return with_own(module, own, lambda: call.inner(*args, **kwargs))
        bound, hidden, chosen, weights = call.read(*args, **kwargs)
        refuse_shapes(hidden, chosen, weights)
        for training in sorted(untried & {False, module.training}):
            untried.discard(training)
            _try(call, bound, own, hidden, weights.dtype, chosen.shape[-1], group, training=training)
        own = {leaf: Mean.apply(parameter, group.size()) for leaf, parameter in own.items()}
        return _by_all_ranks(partial(call.compute, bound, own), call, call.count, group)(hidden, chosen, weights)

    set_forward(module, forward, reads_parameters=True)


def _inputs(name: str, module: nn.Module, given: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return under which names a call got hidden states, chosen experts and weights.

    Raises:
        ParallelError: a call of another interface; on all ranks alike, as they run the same code.
    """
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    floats = [key for key, tensor in tensors.items() if tensor.is_floating_point()]
    numbers = [key for key, tensor in tensors.items() if not tensor.is_floating_point() and tensor.dtype != torch.bool]
    if len(tensors) == 3 and len(floats) == 2 and len(numbers) == 1 and floats[0] == next(iter(given)):
        return floats[0], numbers[0], floats[1]
    got = ", ".join(
        f"{key} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for key, tensor in tensors.items()
    )
    raise ParallelError(
        f"{name} ({class_name(module)}) got the tensors ({got}), expected {INTERFACE} and no other tensor, which "
        "would not travel with its tokens; compute with others outside of the module, or use a mesh without ep"
    )


def _try(
    call: _Chosen,
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

    Raises:
        ParallelError: on every rank of ``group``.

    Collective: every rank of ``group`` calls it.
    """
    size, rank, device = group.size(), group.rank(), like.device
    # Each run replaces the tensors, which may be of a long context.
    given = {
        key: argument.new_empty(0) if isinstance(argument, Tensor) else argument
        for key, argument in bound.arguments.items()
    }
    bound = inspect.BoundArguments(bound.signature, OrderedDict(given))
    widened = not runtime.queues(device)
    noise = partial(_noise, device, widened)
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
    chosen = _choices(held * size, slots, rank).to(device)
    with ExitStack() as stack:
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
            return
        stack.enter_context(_by_itself(call.module, training, device, noise))
        if widened:
            stack.enter_context(torch.autocast(device.type, enabled=False))
        try:
            want, *again = (
                _with_gradients(partial(call.compute, bound, every), hidden, chosen, weights)
                for _ in range(1 + training)
            )
            random = any(not torch.equal(one, other) for outputs in again for one, other in zip(want, outputs))
            endless = not all(bool(tensor.isfinite().all()) for tensor in want)
            random, endless = gather_values(torch.tensor([[random, endless]], device=device), group).any(0).tolist()
            if endless:
                log.warning(
                    "%s (%s) returns no finite values for random inputs and is not compared",
                    call.name,
                    class_name(call.module),
                )
            if random or endless:
                return
            divided = _by_all_ranks(partial(call.compute, bound, mine), call, held * size, group)
            have = _with_gradients(divided, hidden, chosen, weights)
        except MeshparError:
            raise
        except Exception as error:
            raise ParallelError(_does_not_run(call, held, error)) from error
    off = torch.stack(
        [(one - other).abs().max() / one.abs().max().clamp(min=1e-30) for one, other in zip(want, have, strict=True)]
    )
    worst = float(gather_values(off.max().nan_to_num(torch.inf, torch.inf)[None], group).max())
    narrow = not widened and (
        torch.is_autocast_enabled(device.type)
        or any(torch.finfo(tensor.dtype).bits < 32 for tensor in (hidden, weights, *mine.values()))
    )
    if worst > (HALF_TOLERANCE if narrow else TOLERANCE):
        raise ParallelError(
            f"{call.name} ({class_name(call.module)}) gives other results with the experts of each rank of ep than "
            f"with all experts (off by {worst:.1e}{', in training' if training else ''}), expected for each token the "
            "sum over its chosen experts, each by its own row, weight and parameters alone; move computations over "
            "all experts of a token (a normalisation of weights, a residual, a capacity) to the module around it, or "
            "use a mesh without ep; Plan(..., verify=False) skips this test"
        )


def _does_not_run(call: _Chosen, held: int, error: Exception) -> str:
    expected = _IN_ORDER if isinstance(call, _InOrder) else INTERFACE
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
def _by_itself(
    module: nn.Module, training: bool, device: torch.device, noise: Callable[[int, Sequence[int], torch.dtype], Tensor]
) -> Iterator[None]:
    """Let a module run in a mode, on copies of buffers, with noise for the parameters inside of it, without the
    hooks of FSDP2.
    """
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
    """Return what is computed, and its gradients where noise comes from above, in float64; a gradient that there is
    not is zero.
    """
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weights)]
    output = compute(leaves[0], chosen, leaves[1])
    up = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    grads = torch.autograd.grad(output, leaves, up, allow_unused=True) if output.requires_grad else (None, None)
    return [
        output.detach().double(),
        *((torch.zeros_like(leaf) if grad is None else grad).double() for leaf, grad in zip(leaves, grads)),
    ]
