"""Where a model is cut into stages: which modules run before, between and behind its blocks, and what crosses a cut."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor, nn

import meshpar._torch.operator_costs as operators
from meshpar._torch.simulated_device import (
    FAKE_LOG,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    groups_of_any_dtype,
)
from meshpar._torch.tensors import tensor_leaves, tree_map_only
from meshpar.core.errors import brief
from meshpar.core.layout import ModelLayout
from meshpar.core.passes import find_blocks
from meshpar.core.patterns import matches, shortest_patterns
from meshpar.passes.pipeline.stand_ins import BlockStandIn, Carried, IdleStandIn, put, stand_in, twin_of, with_result

_SAMPLE = (2, 8)  # sequences and positions of the forward that is looked at, where the layout has no example
_POSITIONS = 4096  # of a sequence for which blocks cost the same as the head
_INTENSITY = 200  # operations in which an accelerator moves a byte
_LOSS = 24  # bytes that a loss moves for each score: a third of those of its forward and backward


@final
@dataclass(frozen=True, slots=True)
class Result:
    """One of the values that a module returns, at a place in its tuple; 0 where it returns the value alone."""

    module: str
    place: int
    # in the forward that was looked at
    shape: tuple[int, ...] = field(compare=False)
    dtype: torch.dtype = field(compare=False)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The order in which a model calls its modules, by their names."""

    blocks: tuple[str, ...]
    # with parameters, that run before the first block, between two (-> the number of the second one, whose stage has
    # them), behind the last one, and not at all, such as a tower for images
    head: tuple[str, ...]
    between: Mapping[str, int]
    tail: tuple[str, ...]
    idle: tuple[str, ...]
    # Parameters that several places have or read -> the places: numbers of blocks, with what runs before each, and
    # behind the last one. Modules around the blocks and those that run in several places are in all places.
    shared: Mapping[str, frozenset[int]]
    # blocks that return another form of value than their first argument
    reshaping: frozenset[str]
    # of further values that a block returns; -1: it returns one alone
    width: int
    # those of ``head`` into whose results the model writes
    written: frozenset[str]
    # of each block, in operations, those of the bytes that it moves among them
    costs: tuple[int, ...]
    # of each block but the last, results that cross a cut behind it beside the value that it hands on
    carried: tuple[tuple[Result, ...], ...]


@final
class _Count(TorchDispatchMode):
    """Count what each block costs in a forward; ``attention``: as for a sequence that many times as long, causal."""

    def __init__(self, attention: int) -> None:
        super().__init__()
        self.costs, self.begun, self._attention = [0], 0, attention

    def begins(self) -> None:
        """Count what follows for the next block; what runs before the first one is the first one's."""
        self.begun += 1
        self.costs += [0] * (self.begun > 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shape = operators.matrix_shape(func, args, kwargs or {})
        flops = operators.floating_point(func, shape)
        if self._attention and operators.is_attention(func):
            flops = flops * self._attention // 2
        moved = 0 if shape else operators.moved_bytes(func, args, kwargs or {}, tensor_leaves(result))
        self.costs[-1] += flops + _INTENSITY * moved
        return result


def blocks_in_line(module: nn.Module, layout: ModelLayout) -> list[str]:
    """Return the names of the blocks that are in no other block, in the model's order."""
    blocks = {name for name, _ in find_blocks(module, layout)}
    outer = {name for name in blocks if not any(name.startswith(f"{other}.") for other in blocks)}
    return [name for name, _ in module.named_modules() if name in outer]


def examine(module: nn.Module, layout: ModelLayout) -> tuple[Anatomy | None, list[str]]:
    """Return the order in which a model calls its modules, and why it cannot be cut between its blocks. Pure."""
    names = blocks_in_line(module, layout)
    with _without_memory(), torch.enable_grad():
        try:
            return _examined(twin_of(module, None), names, layout)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return None, [f"its forward reads values of tensors on the host ({brief(error)}); use a mesh without pp"]
        except Exception as error:  # noqa: BLE001 - the code of a user
            what = "StagesLayout.example" if layout.stages.example is not None else f"integers {_SAMPLE}"
            return None, [
                f"a forward of {what} cannot be looked at ({brief(error)}); give the inputs of a forward as "
                "ModelLayout(stages=StagesLayout(example=...)), or use a mesh without pp"
            ]


def _run(twin: nn.Module, layout: ModelLayout) -> Any:
    """Return what a model without values returns for inputs in the form of the layout's example."""
    inputs = torch.zeros(_SAMPLE, dtype=torch.int64) if layout.stages.example is None else layout.stages.example
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    inputs = tree_map_only(Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), inputs)
    if isinstance(inputs, dict):
        return twin(**inputs)
    return twin(*inputs) if isinstance(inputs, list | tuple) else twin(inputs)


@contextmanager
def _without_memory() -> Iterator[None]:
    """Compute without values; torch logs nothing about operators that have no kernel for that."""
    before, FAKE_LOG.disabled = FAKE_LOG.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), groups_of_any_dtype():
            yield
    finally:
        FAKE_LOG.disabled = before


@final
class _Look:
    """A forward of a copy without values, and what its modules did: its blocks, and owners of parameters outside."""

    def __init__(self, twin: nn.Module, names: Sequence[str], layout: ModelLayout) -> None:
        self.carries = layout.stages.carries
        self.blocks = {name: twin.get_submodule(name) for name in names}
        outside = {
            name: child
            for name, child in twin.named_modules()
            if not any(name == block or name.startswith(f"{block}.") for block in names)
        }
        has_own = [name for name, child in outside.items() if any(True for _ in child.parameters(recurse=False))]
        self.owners = {name: outside[name] for name in has_own}
        long = layout.stages.example is None  # as sequences are
        self.counted = _Count(_POSITIONS // _SAMPLE[1] if long else 0)
        # names in the order of calls; names outside of blocks -> the numbers of blocks that began before they returned
        self.calls, self.ran = list[str](), dict[str, list[int]]()
        # of each call of a block: the first argument, what it returned first, the number of further values
        self.taken, self.carried, self.widths = list[Tensor | None](), list[Tensor](), list[int]()
        # values before the first block and carried results, with their versions then
        self.returned = list[tuple[str, Tensor, int]]()
        # nodes of the graph that made what owners returned -> the number of blocks that began before, and the owner
        self.beginnings = dict[Any, tuple[int, str]]()
        # edges of the graph -> the number of their block, -1 before the first one, and the result that may cross cuts
        self.results = dict[Any, tuple[int, Result]]()
        # modules that return tensors of other than floating dtypes
        self.numbers = dict[str, torch.dtype]()
        with ExitStack() as stack:
            for name, child in outside.items():
                stack.callback(child.register_forward_hook(partial(self._begin, name)).remove)
            for name, child in {**self.blocks, **self.owners}.items():
                stack.callback(child.register_forward_pre_hook(partial(self._call, name)).remove)
            for name, child in self.blocks.items():
                stack.callback(child.register_forward_hook(partial(self._hand_on, name)).remove)
            with self.counted:
                output = _run(twin, layout)
        # A result is known by its module: of one that runs several times, the calls are not told apart.
        once = {edge for edge, (_, result) in self.results.items() if len(self.ran.get(result.module, ())) < 2}
        self.results = {edge: self.results[edge] for edge in once}
        if hasattr(output, "__dict__") and not isinstance(output, Tensor | list | tuple | Mapping):
            output = vars(output)  # a class of the model's own
        # Of a cache of keys and values among them, no tensor.
        self.output = tensor_leaves(dict(output) if isinstance(output, Mapping) else output)

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
        begun = len(self.taken)
        self.ran.setdefault(name, []).append(begun)
        if name in self.owners:
            if not begun:
                output = tree_map_only(Tensor, _in_graph, output)
                self.returned.extend((name, leaf, leaf._version) for leaf in tensor_leaves(output))
            for leaf in tensor_leaves(output):
                self.beginnings.setdefault(leaf.grad_fn, (begun, name))
        self._keep(name, begun or -1, output)
        return output

    def _keep(self, name: str, at: int, output: Any) -> None:
        self.numbers.update((name, leaf.dtype) for leaf in tensor_leaves(output) if not leaf.is_floating_point())
        if any(matches(pattern, name) for pattern in self.carries):
            for place, leaf in enumerate(output if isinstance(output, tuple | list) else [output]):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    edge, result = (leaf.grad_fn, leaf.output_nr), Result(name, place, tuple(leaf.shape), leaf.dtype)
                    if name in self.blocks or edge not in self.results:  # what is inside of a module comes first
                        self.results[edge] = at, result
                        self.returned.append((name, leaf, leaf._version))

    @property
    def names(self) -> list[str]:
        """The blocks that were called."""
        return [name for name in self.calls if name in self.blocks]

    def gaps(self) -> dict[str, set[int]]:
        """Return the owners that were called -> the numbers of blocks that began before their calls."""
        begun_before, begun = dict[str, set[int]](), 0
        for name in self.calls:
            if name in self.blocks:
                begun += 1
            else:
                begun_before.setdefault(name, set()).add(begun)
        return begun_before


def _examined(twin: nn.Module, every: Sequence[str], layout: ModelLayout) -> tuple[Anatomy | None, list[str]]:
    look = _Look(twin, every, layout)
    names, gaps = look.names, look.gaps()
    if not names:
        return None, ["it calls none of its blocks; name those that a forward calls in ModelLayout(blocks=...)"]
    if len(set(names)) < len(names):
        again = next(name for place, name in enumerate(names) if name in names[:place])
        return None, [f"it calls {again} again, and stages run every block once; use a mesh without pp"]
    idle = [name for name in {**look.blocks, **look.owners} if name not in look.calls]
    used = {id(one) for name in look.calls for one in twin.get_submodule(name).parameters(recurse=name in look.blocks)}
    several = {
        *(name for name, begun in gaps.items() if len(begun) > 1),
        *(name for name in look.owners if not name or any(block.startswith(f"{name}.") for block in names)),
        # not called, but a part of it is, or another module with the same parameters
        *(name for name in idle if any(other.startswith(f"{name}.") for other in look.calls)),
        *(name for name in idle if any(id(one) in used for one in twin.get_submodule(name).parameters())),
    }
    idle = [name for name in idle if name not in several]
    places = {name: min(begun) for name, begun in gaps.items() if name not in several}
    stage_blocks = dict.fromkeys(idle, 0) | {name: min(begun, len(names) - 1) for name, begun in places.items()}
    stage_blocks |= {name: number for number, name in enumerate(names)}
    carried, read, problems = _crossings(twin, stage_blocks, several, look)
    problems += [
        f"{name} runs in several places, before, between or behind its blocks, and has buffers, which each stage would "
        "write; use a mesh without pp"
        for name, begun in gaps.items()
        if len(begun) > 1 and any(True for _ in twin.get_submodule(name).buffers(recurse=False))
    ]
    carriers = [*names, *(name for name, begun in look.ran.items() if begun[0] < len(names))]
    problems += [
        f"StagesLayout.carries={pattern!r} names no block, and no module that runs before the last one; leave it out"
        for pattern in layout.stages.carries
        if not any(matches(pattern, name) for name in carriers)
    ]
    for name in several:
        for one in twin.get_submodule(name).parameters(recurse=name in look.blocks):
            read[id(one)] = {*range(len(names))} if id(one) in read else set()
    scores = max((leaf.numel() for leaf in look.output), default=0)  # numbers that a loss reads
    several_widths = len(set(look.widths)) > 1
    forms = [[one is not None and (one.shape, one.dtype) for one in pair] for pair in zip(look.taken, look.carried)]
    reshaping = [name for name, (taken, returned) in zip(names, forms) if several_widths or taken != returned]
    problems += [
        f"{name} returns a tensor of {look.numbers[name]}, of which other stages have no values; return it from a "
        "module without parameters, or use a mesh without pp"
        for name in (*places, *reshaping)
        if name in look.numbers and places.get(name) != len(names)
    ]
    return Anatomy(
        blocks=tuple(names),
        head=tuple(name for name, begun in places.items() if not begun),
        between={name: begun for name, begun in places.items() if 0 < begun < len(names)},
        tail=tuple(name for name, begun in places.items() if begun == len(names)),
        idle=tuple(idle),
        shared={
            name: frozenset(found) for name, one in twin.named_parameters() if len(found := read.get(id(one), ())) > 1
        },
        reshaping=frozenset(reshaping),
        width=look.widths[0],
        written=frozenset(name for name, value, version in look.returned if value._version != version),
        costs=(*look.counted.costs[:-1], look.counted.costs[-1] + _INTENSITY * _LOSS * scores),
        carried=tuple(tuple(sorted(one, key=lambda result: (result.module, result.place))) for one in carried),
    ), problems


def _in_graph(tensor: Tensor) -> Tensor:
    """Return a value that was computed without gradients, such as fixed positions, so that the graph tells its uses."""
    return tensor if tensor.grad_fn is not None or not tensor.is_floating_point() else tensor.requires_grad_().clone()


def check_stages(module: nn.Module, layout: ModelLayout, anatomy: Anatomy, firsts: Sequence[int]) -> list[str]:
    """Return why the forward does not run on a stage, begun by ``firsts``, where other blocks are stand-ins."""
    form = Carried()
    form.width, form.device = anatomy.width, torch.device("cpu")
    for first, end in zip(firsts[1:], [*firsts[2:], len(anatomy.blocks)]):
        with _without_memory():
            twin = twin_of(module, None)
            for old in [twin.get_submodule(name) for name in anatomy.idle]:
                stand_in(IdleStandIn, old, (), form)
            for name in {*anatomy.blocks[:first], *anatomy.blocks[end:]} - anatomy.reshaping:
                put(twin, name, BlockStandIn(form, twin.get_submodule(name)))
            for result in anatomy.carried[first - 1]:
                twin.get_submodule(result.module).register_forward_hook(partial(_answers, result))
            try:
                _run(twin, layout)
            except Exception as error:  # noqa: BLE001 - the code of a user
                last = anatomy.blocks[first]
                return [
                    f"its forward needs more of the blocks before {last} than their result ({brief(error)}); use a "
                    "mesh without pp"
                ]
    return []


def _crossings(
    twin: nn.Module, places: Mapping[str, int], several: Collection[str], look: _Look
) -> tuple[list[dict[Result, None]], dict[int, set[int]], list[str]]:
    """Return which results cross the cut behind each block, the places of each parameter, and what cannot cross.

    Autograd's graph is walked from the output back: a node of a result is computed at its module's place, other nodes
    where what uses them is, and an edge to an earlier place crosses the cuts between.
    """
    last, ends = len(look.carried) - 1, [leaf for leaf in look.output if leaf.grad_fn is not None]
    if not ends:
        return [], {}, ["its forward returns no tensor that depends on its parameters; use a mesh without pp"]
    has, read, handed = dict[int, set[int]](), dict[int, set[int]](), dict[Any, list[int]]()
    owner = dict[int, str]()
    for name, place in places.items():
        for one in twin.get_submodule(name).parameters(recurse=name in look.blocks):
            has.setdefault(id(one), set()).add(place)
            owner |= {id(one): name} if name in look.blocks else {}
    for place, value in enumerate(look.carried):
        handed.setdefault((value.grad_fn, value.output_nr), []).append(place)
    carried, seen = [dict[Result, None]() for _ in range(last)], set[tuple[Any, int]]()
    lacking, kept = dict[str, None](), dict[str, None]()
    named = {result.module for _, result in look.results.values()}
    stack: list[tuple[Any, int, int]] = [(leaf.grad_fn, leaf.output_nr, last) for leaf in ends]
    while stack:
        node, number, came = stack.pop()
        if node is None:
            continue
        at, result = look.results.get((node, number), (came, None))
        begun, name = look.beginnings.get(node, (came, ""))
        if blocks := handed.get((node, number)):
            name, first, place = look.names[blocks[0]], blocks[-1] + 1, blocks[0]
        elif result is not None:
            first = place = min(max(at, 0), last)
        else:
            first = place = came if name in several else min(begun, last)
        for cut in range(first, came):
            if result is None:
                lacking[name] = None
            else:
                carried[cut][result] = None
        if (node, place) in seen:
            continue
        seen.add((node, place))
        if (variable := getattr(node, "variable", None)) is not None:
            read.setdefault(id(variable), set()).add(place)
            block = owner.get(id(variable), "")
            if block and place not in has[id(variable)]:
                (kept if block in named else lacking)[block] = None
        stack += [(following, number, place) for following, number in node.next_functions]
    for number, where in has.items():
        read[number] = where | read.get(number, where)
    return carried, read, _uncrossable(twin, carried, lacking, kept, look)


def _uncrossable(
    twin: nn.Module, carried: Sequence[Iterable[Result]], lacking: Collection[str], kept: Iterable[str], look: _Look
) -> list[str]:
    """Say what cannot cross: results of no cut (``lacking``), what blocks do not return (``kept``), and writes."""
    problems = [
        f"its output uses results of {name}, which runs several times, beside what each block hands to the next one; "
        "use a mesh without pp"
        for name in lacking
        if len(look.ran.get(name, ())) > 1
    ]
    if lacking and not problems:
        modules = [name for name, _ in twin.named_modules()]
        patterns = [*shortest_patterns([name for name in modules if name in lacking], modules)]
        problems.append(
            f"its output uses results of {', '.join(patterns)} beside what each block hands to the next one; write "
            f"ModelLayout(stages=StagesLayout(carries={(*look.carries, *patterns)})), so that they are sent to the "
            "stages that use them, or use a mesh without pp"
        )
    problems += [
        f"its output uses something of {name} beside what {name} hands to the next block, and does not return it; "
        f"return it from {name}, or use a mesh without pp"
        for name in kept
    ]
    written = {name for name, value, version in look.returned if value._version != version}
    problems += [
        f"the model writes into what {name} returns, which later blocks use, too; compute a new tensor, such as by "
        "x = x * scale, or use a mesh without pp"
        for name in dict.fromkeys(result.module for results in carried for result in results)
        if name in written
    ]
    return problems


def _answers(result: Result, module: nn.Module, args: object, output: Any) -> Any:
    return with_result(output, {result.place: torch.empty(result.shape, dtype=result.dtype)})


def even_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return the first block of each stage, such that the dearest stage costs least."""
    totals = [0.0, *accumulate(costs)]

    @cache
    def cut(count: int, end: int) -> tuple[float, list[int]]:
        """Return the cost of the dearest of ``count`` stages of the blocks before ``end``, and their first blocks."""
        if count == 1:
            return totals[end], [0]
        dearest = [max(cut(count - 1, begin)[0], totals[end] - totals[begin]) for begin in range(count - 1, end)]
        begin = count - 1 + dearest.index(min(dearest))
        return min(dearest), [*cut(count - 1, begin)[1], begin]

    return cut(stages, len(costs))[1]
