"""Where a model is cut into stages: which modules run before, between and behind its blocks, and what crosses a cut."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import meshpar._torch.operator_costs as operators
from meshpar._torch.shapes import groups_of_any_dtype
from meshpar.core.errors import brief
from meshpar.core.layout import ModelLayout
from meshpar.core.passes import find_blocks
from meshpar.passes.pipeline.stand_ins import BlockStandIn, Carried, IdleStandIn, put, stand_in

_SAMPLE = (2, 8)  # sequences and positions of the forward that is looked at
_POSITIONS = 4096  # of a sequence for which blocks cost the same as the head
_INTENSITY = 200  # operations in which an accelerator moves a byte
_LOSS = 24  # bytes that a loss moves for each score: a third of those of its forward and backward


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The order in which a model calls its modules.

    Attributes:
        blocks: names of the blocks, in the order of their calls.
        head: names of the modules with parameters that run before the first block.
        tail: names of those that run behind the last one.
        idle: names of those that do not run, such as a tower for images, and the blocks in them.
        width: number of further values that a block returns beside the one that it hands on; -1: it returns that alone.
        written: names of those of ``head`` into whose results the model writes.
        costs: of each block, in operations: those of a token, and the bytes that it moves. What runs before the first
            block and behind the last one, the loss included, is in theirs.
    """

    blocks: tuple[str, ...]
    head: tuple[str, ...]
    tail: tuple[str, ...]
    idle: tuple[str, ...]
    width: int
    written: frozenset[str]
    costs: tuple[int, ...]


@final
class _Count(TorchDispatchMode):
    """Count what each block costs in a forward, by the operators that the forecast knows, too."""

    def __init__(self) -> None:
        super().__init__()
        self.costs, self.begun = [0], 0

    def begins(self) -> None:
        """Count what follows for the next block; what runs before the first one is the first one's."""
        self.begun += 1
        self.costs += [0] * (self.begun > 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        shape = operators.matrix_shape(func, args, kwargs or {})
        flops = operators.floating_point(func, shape)
        if operators.is_attention(func):
            flops = flops * _POSITIONS // (2 * _SAMPLE[1])  # causal
        moved = 0 if shape else operators.moved_bytes(func, args, kwargs or {}, outputs)
        self.costs[-1] += flops + _INTENSITY * moved
        return result


def blocks_in_line(module: nn.Module, layout: ModelLayout) -> list[str]:
    """Return the names of the blocks that are in no other block, in the model's order."""
    found = {name for name, _ in find_blocks(module, layout)}
    outer = {name for name in found if not any(name.startswith(f"{other}.") for other in found)}
    return [name for name, _ in module.named_modules() if name in outer]


def examine(module: nn.Module, layout: ModelLayout) -> tuple[Anatomy | None, list[str]]:
    """Return the order in which a model calls its modules, and why it cannot be cut between its blocks.

    Pure: a copy without values computes a forward of integers, as a language model gets them.
    """
    names = blocks_in_line(module, layout)
    with _without_memory(), torch.enable_grad():
        try:
            return _examined(without_values(module), names)
        except Exception as error:  # noqa: BLE001 - the code of a user
            return None, [f"a forward of integers {_SAMPLE} cannot be looked at ({brief(error)})"]


@contextmanager
def _without_memory() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), groups_of_any_dtype(), _quietly():
        yield


def _examined(twin: nn.Module, names: Sequence[str]) -> tuple[Anatomy | None, list[str]]:
    calls, carried, taken = list[str](), list[Tensor](), list[Tensor | None]()
    widths = list[int]()  # of what blocks return
    beginnings = set[Any]()  # nodes that make what embeddings return
    returned = list[tuple[str, Tensor, int]]()  # by them, and its version then
    blocks = {name: twin.get_submodule(name) for name in names}
    owners = {
        name: child
        for name, child in twin.named_modules()
        if not any(name == block or name.startswith(f"{block}.") for block in names)
        and any(True for _ in child.parameters(recurse=False))
        and name
    }

    def before(name: str, child: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        calls.append(name)
        if name in blocks:
            counted.begins()
            taken.append(args[0] if args and isinstance(args[0], Tensor) else None)

    def after(name: str, child: nn.Module, args: object, output: Any) -> None:
        widths.append(len(output) - 1 if isinstance(output, tuple | list) else -1)
        value = output[0] if isinstance(output, tuple | list) and output else output
        carried.append(value if isinstance(value, Tensor) else torch.empty(0))

    def begins(name: str, child: nn.Module, args: object, output: Any) -> Any:
        if taken:
            return output
        output = tree_map_only(Tensor, _in_graph, output)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        beginnings.update(leaf.grad_fn for leaf in leaves)
        returned.extend((name, leaf, leaf._version) for leaf in leaves)
        return output

    with ExitStack() as stack:
        for name, child in owners.items():
            stack.callback(child.register_forward_hook(partial(begins, name)).remove)
        for name, child in {**blocks, **owners}.items():
            stack.callback(child.register_forward_pre_hook(partial(before, name), with_kwargs=True).remove)
        for name, child in blocks.items():
            stack.callback(child.register_forward_hook(partial(after, name)).remove)
        ids = torch.zeros(_SAMPLE, dtype=torch.int64)
        with (counted := _Count()):
            output = twin(ids)
    order = [name for name in calls if name in blocks]
    problems, names = [], [name for name in names if name in order]
    if not names:
        return None, ["it calls none of its blocks"]
    if order != names:
        problems.append(f"it calls its blocks in the order {_some(order)}, and they stand in the order {_some(names)}")
    if any(value is None for value in taken):
        problems.append("its blocks do not get the value that passes from block to block as their first argument")
    if problems:
        return None, problems
    first, last = calls.index(names[0]), calls.index(names[-1])
    head = list(dict.fromkeys(calls[:first]))
    tail = [name for name in dict.fromkeys(calls[last + 1 :]) if name not in blocks]
    between = [name for name in dict.fromkeys(calls[first : last + 1]) if name not in blocks]
    if between:
        problems.append(f"{between[0]} runs between its blocks")
    if both := sorted(set(head) & set(tail)):
        problems.append(f"{both[0]} runs before and behind its blocks")
    idle = [name for name in {**blocks, **owners} if name not in calls]
    if needed := [name for name in idle if _is_used(twin, name, calls)]:
        problems.append(f"{needed[0]} has parameters that other modules use, and is not called")
    if any(True for _ in twin.parameters(recurse=False)):
        problems.append("the outermost module has parameters of its own")
    if around := [name for name in (*head, *tail) if any(block.startswith(f"{name}.") for block in names)]:
        problems.append(f"{around[0]}, which has its blocks inside, has parameters of its own")
    problems += _crossings(twin, names, idle, beginnings, carried, output)
    return Anatomy(
        blocks=tuple(names),
        head=tuple(head),
        tail=tuple(tail),
        idle=tuple(idle),
        width=widths[0],
        written=frozenset(name for name, tensor, version in returned if tensor._version != version),
        costs=(*counted.costs[:-1], counted.costs[-1] + _INTENSITY * _LOSS * _scores(output)),
    ), problems


def _in_graph(tensor: Tensor) -> Tensor:
    """Return a value that was computed without gradients, such as fixed positions, so that the graph tells its uses."""
    return tensor if tensor.grad_fn is not None or not tensor.is_floating_point() else tensor.requires_grad_().clone()


def _is_used(twin: nn.Module, name: str, calls: Collection[str]) -> bool:
    """Tell whether a module that is not called has parts that are, or parameters that a called one has, too."""
    if any(other.startswith(f"{name}.") for other in calls):
        return True
    called = {id(parameter) for other in calls for parameter in twin.get_submodule(other).parameters()}
    return any(id(parameter) in called for parameter in twin.get_submodule(name).parameters())


@contextmanager
def _quietly() -> Iterator[None]:
    """Let torch log nothing about operators that have no kernel without values."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def without_values(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors have shapes and no values; called in a ``FakeTensorMode``."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        kind = parameter.dtype
        trains = kind.is_floating_point or kind.is_complex  # frozen ones, too: the graph tells what crosses a cut
        memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=kind), requires_grad=trains)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(module, memo)


def check_stages(module: nn.Module, anatomy: Anatomy, firsts: Sequence[int]) -> list[str]:
    """Return why the forward does not run on one of the stages behind the first, where other blocks are stand-ins.

    Args:
        module: the model.
        anatomy: what :func:`examine` returned of it.
        firsts: the first block of each stage.
    """
    form = Carried()
    form.width = anatomy.width
    for first, end in zip(firsts[1:], [*firsts[2:], len(anatomy.blocks)]):
        with _without_memory():
            twin = without_values(module)
            for old in [twin.get_submodule(name) for name in anatomy.idle]:
                stand_in(IdleStandIn, old, ())
            for name in (*anatomy.blocks[:first], *anatomy.blocks[end:]):
                put(twin, name, BlockStandIn(form, twin.get_submodule(name)))
            try:
                twin(torch.zeros(_SAMPLE, dtype=torch.int64))
            except Exception as error:  # noqa: BLE001 - the code of a user
                last = anatomy.blocks[first]
                return [f"its forward needs more of the blocks before {last} than their result ({brief(error)})"]
    return []


def _crossings(
    twin: nn.Module,
    names: Sequence[str],
    idle: Sequence[str],
    beginnings: Collection[Any],
    carried: Sequence[Tensor],
    output: object,
) -> list[str]:
    """Return what leads from the first blocks to the output otherwise than by the value that the cut carries."""
    leaves = [leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    owner: dict[int, tuple[int, str]] = {}
    for place, name in [*enumerate(names), *((-1, name) for name in idle)]:
        owner.update({id(parameter): (place, name) for parameter in twin.get_submodule(name).parameters()})
    for place in range(len(names) - 1):
        seen, stack = {carried[place].grad_fn}, [leaf.grad_fn for leaf in leaves]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in beginnings:
                return ["its output uses what its blocks begin with beside what they hand on"]
            at = owner.get(id(getattr(node, "variable", None)))
            if at is not None and at[0] <= place:
                return [f"its output uses something of {at[1]} beside what {at[1]} hands to the next block"]
            stack += [further for further, _ in node.next_functions]
    return []


def _scores(output: object) -> int:
    """Return how many numbers of a forward's output a loss reads."""
    return max((leaf.numel() for leaf in tree_leaves(_plain(output)) if isinstance(leaf, Tensor)), default=0)


def _plain(output: object) -> object:
    return dict(output) if isinstance(output, Mapping) else output


def even_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return the first block of each stage, such that the dearest stage costs least.

    Args:
        costs: of each block, in one unit.
        stages: number of stages, at most the number of blocks.
    """
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for begin in range(stage - 1, end):
                value = max(best[stage - 1][begin], total[end] - total[begin])
                if value < best[stage][end]:
                    best[stage][end], cut[stage][end] = value, begin
    firsts, end = list[int](), count
    for stage in range(stages, 0, -1):
        end = cut[stage][end]
        firsts.append(end)
    return firsts[::-1]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
