"""Where a model is cut into stages: which modules run before, between and behind its blocks, and what crosses a cut."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import meshpar._torch.operator_costs as operators
from meshpar._torch.shapes import groups_of_any_dtype
from meshpar.core.errors import brief
from meshpar.core.layout import ModelLayout
from meshpar.core.passes import find_blocks
from meshpar.core.patterns import matches
from meshpar.passes.pipeline.stand_ins import (
    BlockStandIn,
    Carried,
    IdleStandIn,
    put,
    stand_in,
    tensors,
    twin_of,
    with_result,
)

_CARRIES = ", and ModelLayout.carries does not name it"
_SAMPLE = (2, 8)  # sequences and positions of the forward that is looked at
_POSITIONS = 4096  # of a sequence for which blocks cost the same as the head
_INTENSITY = 200  # operations in which an accelerator moves a byte
_LOSS = 24  # bytes that a loss moves for each score: a third of those of its forward and backward


@final
@dataclass(frozen=True, slots=True)
class Result:
    """One of the values that a module returns.

    Attributes:
        module: its name.
        place: of the value in the tuple that the module returns; 0 where it returns the value alone.
        shape: in the forward that was looked at.
        dtype: there.
    """

    module: str
    place: int
    shape: tuple[int, ...] = field(compare=False)
    dtype: torch.dtype = field(compare=False)


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
        carried: of each block but the last, what crosses a cut behind it beside the value that it hands on: results of
            modules that ``ModelLayout.carries`` names.
    """

    blocks: tuple[str, ...]
    head: tuple[str, ...]
    tail: tuple[str, ...]
    idle: tuple[str, ...]
    width: int
    written: frozenset[str]
    costs: tuple[int, ...]
    carried: tuple[tuple[Result, ...], ...]


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
        shape = operators.matrix_shape(func, args, kwargs or {})
        flops = operators.floating_point(func, shape)
        if operators.is_attention(func):
            flops = flops * _POSITIONS // (2 * _SAMPLE[1])  # causal
        moved = 0 if shape else operators.moved_bytes(func, args, kwargs or {}, tensors(result))
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
            return _examined(twin_of(module, None), names, layout.carries)
        except Exception as error:  # noqa: BLE001 - the code of a user
            return None, [f"a forward of integers {_SAMPLE} cannot be looked at ({brief(error)})"]


@contextmanager
def _without_memory() -> Iterator[None]:
    """Compute without values; torch logs nothing about operators that have no kernel for that."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), groups_of_any_dtype():
            yield
    finally:
        log.disabled = before


@final
class _Look:
    """A forward of a copy without values, and what its modules did.

    Attributes:
        blocks: all of the model, by name.
        owners: modules outside of blocks that have parameters of their own.
        calls: names of both, in the order of their calls.
        taken: the first argument of each call of a block; None: it is no tensor.
        carried: what it returned first.
        widths: numbers of further values that it returned; -1: it returned one value alone.
        returned: values that owners returned before the first block, with the owner's name and the value's version
            then.
        beginnings: nodes of the graph that made them, with the owner's name.
        results: edges of the graph -> the number of their block, -1 before the first one, and the result that may
            cross cuts.
        counted: costs of the blocks.
        output: tensors that the model returned.
    """

    def __init__(self, twin: nn.Module, names: Sequence[str], carries: Sequence[str]) -> None:
        self._carries = carries
        self.blocks = {name: twin.get_submodule(name) for name in names}
        self.owners = {
            name: child
            for name, child in twin.named_modules()
            if not any(name == block or name.startswith(f"{block}.") for block in names)
            and any(True for _ in child.parameters(recurse=False))
            and name
        }
        self.calls, self.widths, self.counted = list[str](), list[int](), _Count()
        self.taken, self.carried = list[Tensor | None](), list[Tensor]()
        self.returned, self.beginnings = list[tuple[str, Tensor, int]](), dict[Any, str]()
        self.results = dict[Any, tuple[int, Result]]()
        with ExitStack() as stack:
            for name, child in self.owners.items():
                stack.callback(child.register_forward_hook(partial(self._begin, name)).remove)
            for name, child in {**self.blocks, **self.owners}.items():
                stack.callback(child.register_forward_pre_hook(partial(self._call, name)).remove)
            for name, child in self.blocks.items():
                stack.callback(child.register_forward_hook(partial(self._hand_on, name)).remove)
            ids = torch.zeros(_SAMPLE, dtype=torch.int64)
            with self.counted:
                output = twin(ids)
        if hasattr(output, "__dict__") and not isinstance(output, Tensor | list | tuple | Mapping):
            output = vars(output)  # a class of the model's own
        # Of a cache of keys and values among them, no tensor.
        self.output = tensors(dict(output) if isinstance(output, Mapping) else output)

    def _call(self, name: str, child: nn.Module, args: tuple[Any, ...]) -> None:
        self.calls.append(name)
        if name in self.blocks:
            self.counted.begins()
            self.taken.append(args[0] if args and isinstance(args[0], Tensor) else None)

    def _hand_on(self, name: str, child: nn.Module, args: object, output: Any) -> None:
        self._keep(name, len(self.carried), output)
        self.widths.append(len(output) - 1 if isinstance(output, tuple | list) else -1)
        value = output[0] if isinstance(output, tuple | list) and output else output
        self.carried.append(value if isinstance(value, Tensor) else torch.empty(0))

    def _begin(self, name: str, child: nn.Module, args: object, output: Any) -> Any:
        if not self.taken:
            output = tree_map_only(Tensor, _in_graph, output)
            self.beginnings.update((leaf.grad_fn, name) for leaf in tensors(output))
            self.returned.extend((name, leaf, leaf._version) for leaf in tensors(output))
            self._keep(name, -1, output)
        return output

    def _keep(self, name: str, at: int, output: Any) -> None:
        if any(matches(pattern, name) for pattern in self._carries):
            for place, leaf in enumerate(output if isinstance(output, tuple | list) else [output]):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    result = Result(name, place, tuple(leaf.shape), leaf.dtype)
                    self.results[leaf.grad_fn, leaf.output_nr] = at, result


def _examined(twin: nn.Module, every: Sequence[str], carries: Sequence[str]) -> tuple[Anatomy | None, list[str]]:
    look = _Look(twin, every, carries)
    blocks, calls = look.blocks, look.calls
    order = [name for name in calls if name in blocks]
    names = [name for name in every if name in order]
    if not names:
        return None, ["it calls none of its blocks"]
    problems = list[str]()
    if order != names:
        place = next((at for at, (one, two) in enumerate(zip(order, names)) if one != two), len(names))
        again = order[place] in order[:place]
        how = " again" if again else f", and {names[place]} is the next one in the model"
        problems.append(f"it calls {order[place]}{how}; stages run every block once, in the order of the model")
    if any(value is None for value in look.taken):
        problems.append("its blocks do not get the value that passes from block to block as their first argument")
    if problems:
        return None, problems
    first, last = calls.index(names[0]), calls.index(names[-1])
    head = tuple(dict.fromkeys(calls[:first]))
    tail = tuple(name for name in dict.fromkeys(calls[last + 1 :]) if name not in blocks)
    idle = tuple(name for name in {**blocks, **look.owners} if name not in calls)
    if between := [name for name in calls[first : last + 1] if name not in blocks]:
        problems.append(f"{between[0]} runs between its blocks")
    if both := sorted(set(head) & set(tail)):
        problems.append(f"{both[0]} runs before and behind its blocks")
    if needed := [name for name in idle if _is_used(twin, name, calls)]:
        problems.append(f"{needed[0]} has parameters that other modules use, and is not called")
    if any(True for _ in twin.parameters(recurse=False)):
        problems.append("the outermost module has parameters of its own")
    if around := [name for name in (*head, *tail) if any(block.startswith(f"{name}.") for block in names)]:
        problems.append(f"{around[0]}, which has its blocks inside, has parameters of its own")
    for pattern in carries:
        if not any(matches(pattern, name) for name in (*names, *head)):
            problems.append(f"ModelLayout.carries={pattern!r} names no block and no module with parameters before them")
    carried, crossings = _crossings(twin, names, idle, look)
    problems += crossings
    scores = max((leaf.numel() for leaf in look.output), default=0)  # numbers that a loss reads
    return Anatomy(
        blocks=tuple(names),
        head=head,
        tail=tail,
        idle=idle,
        width=look.widths[0],
        written=frozenset(name for name, value, version in look.returned if value._version != version),
        costs=(*look.counted.costs[:-1], look.counted.costs[-1] + _INTENSITY * _LOSS * scores),
        carried=carried,
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
            twin = twin_of(module, None)
            for old in [twin.get_submodule(name) for name in anatomy.idle]:
                stand_in(IdleStandIn, old, ())
            for name in (*anatomy.blocks[:first], *anatomy.blocks[end:]):
                put(twin, name, BlockStandIn(form, twin.get_submodule(name)))
            for result in anatomy.carried[first - 1]:
                twin.get_submodule(result.module).register_forward_hook(partial(_answers, result))
            try:
                twin(torch.zeros(_SAMPLE, dtype=torch.int64))
            except Exception as error:  # noqa: BLE001 - the code of a user
                last = anatomy.blocks[first]
                return [f"its forward needs more of the blocks before {last} than their result ({brief(error)})"]
    return []


def _crossings(
    twin: nn.Module, names: Sequence[str], idle: Sequence[str], look: _Look
) -> tuple[tuple[tuple[Result, ...], ...], list[str]]:
    """Return of each block but the last which results the output needs from before its end, and what leads from there
    to the output otherwise than by them and by the value that the block hands on.
    """
    edges = [(leaf.grad_fn, leaf.output_nr) for leaf in look.output if leaf.grad_fn is not None]
    if not edges:
        return (), ["its forward returns no tensor that depends on its parameters"]
    owner: dict[int, tuple[int, str]] = {}
    for place, name in [*enumerate(names), *((-1, name) for name in idle)]:
        owner.update({id(parameter): (place, name) for parameter in twin.get_submodule(name).parameters()})
    named, carried = {result.module for _, result in look.results.values()}, list[tuple[Result, ...]]()
    for place in range(len(names) - 1):
        needed = dict[Result, None]()
        seen, stack = {look.carried[place].grad_fn}, list[Any](edges)
        while stack:
            node, number = stack.pop()
            at, result = look.results.get((node, number), (place + 1, None))
            if result is not None and at <= place and (at, result.place) != (place, 0):
                needed[result] = None
                continue
            if node is None or node in seen:
                continue
            seen.add(node)
            if begins := look.beginnings.get(node):
                return (), [f"its output uses what {begins} returns beside what its blocks hand on{_CARRIES}"]
            at, name = owner.get(id(getattr(node, "variable", None)), (place + 1, ""))
            if at <= place:
                why = ", and does not return it" if name in named else _CARRIES
                return (), [f"its output uses something of {name} beside what {name} hands to the next block{why}"]
            stack += node.next_functions
        carried.append(tuple(sorted(needed, key=lambda result: (result.module, result.place))))
    return tuple(carried), []


def _answers(result: Result, module: nn.Module, args: object, output: Any) -> Any:
    return with_result(output, {result.place: torch.empty(result.shape, dtype=result.dtype)})


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
