"""The edges of a stage inside of the model's own forward: what it takes from the stage before and hands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from meshpar._torch.calls import eager, enter_by
from meshpar._torch.tensors import tensor_leaves
from meshpar.core.errors import MeshparError, first_line
from meshpar.passes.pipeline.cuts import Result
from meshpar.passes.pipeline.messages import FORTH, FailedBeforeError, Transfers
from meshpar.passes.pipeline.portion import Portion, Rule, Turn
from meshpar.passes.pipeline.stand_ins import StandIn, tell_hooks_of, with_result
from meshpar.passes.tensor.random import LossState
from meshpar.step.inner_calls import items_in, refill, set_forward
from meshpar.tensors.digests import FACTOR, digest

_WRITES = (
    "the model writes into what a block returns, which is on its way to the next stage; let it compute a new tensor "
    "there, such as by hidden = hidden * scale"
)
_WRITTEN = ("a leaf Variable that requires grad", "the written-to tensor")
"""Words of torch's errors for writes into a received value, and into the zeros of a stand-in."""


_EVERY_MODULES = frozenset({*vars(nn.Module()), *vars(nn.Module)})
"""Attributes and methods that every module has; in the place of a method stands what intercepts its calls."""
_State: TypeAlias = list[dict[str, tuple[Any, list[Any]]]]
"""Of each module its attributes, and what is in those that are containers."""


def state_of(modules: Iterable[nn.Module]) -> _State:
    """Return what the user's code keeps on modules."""
    return [
        {name: (value, items_in(value)) for name, value in vars(module).items() if name not in _EVERY_MODULES}
        for module in modules
    ]


class StageEndsError(BaseException):
    """Unwind out of the loss function after this stage has sent its activations. Not an error; do not catch it."""


@final
class Attributes:
    """Attributes that the user's code keeps on modules which run in each chunk: a forward of a micro-batch begins with
    those with which the first one began, so that a model that counts its calls counts micro-batches.
    """

    def __init__(self, portion: Portion) -> None:
        rules = portion.rules.items()
        in_one_chunk = tuple(f"{name}." for name, rule in rules if (rule.only, rule.number) != (None, None))
        self._modules = [
            child
            for name, child in portion.module.named_modules()
            if len(portion.chunks) > 1
            if not isinstance(child, StandIn) and not f"{name}.".startswith(in_one_chunk)
        ]
        self._begun = dict[int, _State]()
        self._later: _State | None = None  # those of a micro-batch that has begun since
        self._newest = 0

    def begin(self, number: int, *, first: bool, last: bool) -> None:
        """Begin a forward of a micro-batch."""
        self._later = None
        if first:
            self._newest, self._begun[number] = number, state_of(self._modules)
            return
        if number != self._newest:
            self._later = state_of(self._modules)
        self._set(self._begun.pop(number) if last else self._begun[number])

    def end(self) -> None:
        """End a forward."""
        if self._later is not None:
            self._set(self._later)

    def _set(self, states: _State) -> None:
        for module, state in zip(self._modules, states, strict=True):
            attributes = vars(module)
            for name in attributes.keys() - _EVERY_MODULES - state.keys():
                del attributes[name]
            for name, (value, items) in state.items():
                attributes[name] = value
                refill(value, items)


@final
class Edges:
    """The edges of this rank's stages, of which one runs at a time."""

    def __init__(self, portion: Portion, doing: Callable[[], str], fail: Callable[[Exception], None]) -> None:
        self.portion, self.transfers, self._fail = portion, Transfers(portion, doing, fail), fail
        # ``calls`` of the module in the forward that runs; ``behind``: the loss runs behind the module's call
        self.turn, self.calls, self.runs, self.reverses, self.behind = Turn(), 0, False, False, False
        # called where the user's code goes on: a loss begins, a step has ended
        self.hands_back: Callable[[], object] = bool
        # called where a block is, and no call of the module runs in a step
        self.outside: Callable[[nn.Module], object] = bool
        # digests of what ``loss`` has given the module in this step, for each chunk, on the device
        self.inputs: list[list[Tensor | int]] = [[] for _ in portion.chunks]
        self._next = 0  # the number of the block that the forward has to call
        # a forward draws random numbers by the number of its micro-batch and the names of its blocks
        self._state, self.by_sample = LossState(), False
        self._attributes = Attributes(portion)

    def _turn(self, chunk: int, number: int, **options: Any) -> Turn:
        stage = chunk * self.portion.ranks + self.portion.rank
        return Turn(chunk=chunk, number=number, stage=stage, **options)

    def begin(self, chunk: int, number: int, form: object, agreed: Mapping[int, tuple[int, int]]) -> None:
        """Begin a forward of a micro-batch that has tensors of these shapes, those that are ``agreed`` among them."""
        self.turn = turn = self._turn(chunk, number, form=form, agreed=agreed)
        turn.takes, turn.sends = turn.stage > 0, turn.stage < self.portion.last
        self.calls, self._next = 0, 0

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: object) -> Any:
        """Return what a function of the module and a micro-batch returns; None where it ends with the stage."""
        device, carried, turn = self.transfers.device, self.portion.carried, self.turn
        self.runs, carried.device, carried.scores = True, device, turn.stage == self.portion.last
        last = len(self.portion.chunks) - 1
        self._state.begin(device, turn.number, first=not turn.chunk, last=turn.chunk == last)
        self._attributes.begin(turn.number, first=not turn.chunk, last=turn.chunk == last)
        self.hands_back()
        try:
            value = function(self.portion.module, batch)
            self._state.end(device, with_call=False)
            return value
        except StageEndsError:
            self._state.end(device, with_call=True)
            if any(value._version != version for value, version in zip(turn.left, turn.versions, strict=True)):
                raise MeshparError(_WRITES) from None
            return None
        except RuntimeError as error:
            if turn.stage and any(text in str(error) for text in _WRITTEN):
                raise MeshparError(f"{_WRITES}. torch says: {first_line(error)}") from error
            raise
        finally:
            self._attributes.end()
            self.runs, self.behind, carried.device, carried.scores = False, False, None, False

    def pass_forth(self) -> None:
        """Exchange what a forward that an error has ended has yet to."""
        if self.turn.takes:
            with suppress(FailedBeforeError):
                self.transfers.receive(self.turn)
        if self.turn.sends:
            self.transfers.send(self.turn, None)

    def begin_back(self, chunk: int, number: int, arrived: list[Tensor], left: list[Tensor]) -> None:
        """Begin a backward of what a forward took and handed on: nothing in a micro-batch that failed."""
        self.turn = turn = self._turn(chunk, number, arrived=arrived, left=left)
        turn.takes, turn.sends = bool(left) and turn.stage < self.portion.last, bool(arrived)

    def backward(self) -> None:
        """Run a backward."""
        turn, grads = self.turn, list[Tensor | None]([None] * len(self.turn.left))
        if turn.takes:
            grads = [*self.transfers.receive_back(turn)]
            self.transfers.messages.settle_first(FORTH)  # the value came there, and those before it
        if trained := [(value, grad) for value, grad in zip(turn.left, grads, strict=True) if value.requires_grad]:
            self.reverses = True
            try:
                torch.autograd.backward([value for value, _ in trained], [grad for _, grad in trained])
            finally:
                self.reverses = False
        if turn.arrived and turn.arrived[0].grad is None:
            raise MeshparError(
                f"what {self.portion.line[self.portion.chunks[turn.chunk].first - 1]} returns did not reach the loss, "
                "or was detached; one process would leave the blocks before it without gradients. "
                "Use torch.utils.checkpoint with use_reentrant=False. A model that drops what a block returns needs a "
                "mesh without pp, or other cuts by PipelineParallel(stages=...)"
            )
        self.pass_back()

    def pass_back(self) -> None:
        """Exchange what a backward has yet to."""
        if self.turn.takes:
            self.transfers.receive_back(self.turn)
        if self.turn.sends:
            self.transfers.send_back(self.turn)
        self.turn.arrived, self.turn.left = [], []

    def end_early(self) -> None:
        """Let the model's forward return where it fails behind the value that it handed on, as a loss inside does."""
        forward = self.portion.module.forward

        def until_handed_on(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except MeshparError:  # of an order that is not the plan's
                raise
            except Exception:
                turn = self.turn
                if not self.runs or turn.stage == self.portion.last or not turn.left or self.transfers.failed:
                    raise
                return turn.left[0].detach()

        set_forward(self.portion.module, until_handed_on)

    def install(self) -> None:
        """Put the exchange around what the passes behind this one, and the guards, have put on the module."""
        module: Any = self.portion.module
        enter_by(module, partial(self._call_module, module._call_impl))
        for name, rule in self.portion.rules.items():
            child, ran = module.get_submodule(name), list[bool]()
            if rule.has_blocks:
                child.register_forward_hook(lambda *_, ran=ran: ran.append(True), prepend=True)
            inner = child._compiled_call_impl or child._call_impl
            child._compiled_call_impl = None
            enter_by(child, partial(self._call, child, rule, inner, ran))

    def _call_module(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of the outermost module, which ends the loss but on the last stage."""
        if not self.runs:
            raise MeshparError(
                "the module is called, and this rank has a part of its layers; run a step by "
                "par.backward(micro_batches, loss) and an evaluation by par.forward(micro_batches, function)"
            )
        self.calls += 1
        if self.calls > 1:
            raise MeshparError(
                "the module is called twice for one micro-batch, and stages hand on one value of each; join the "
                "inputs of both calls along the samples"
            )
        turn, portion, device = self.turn, self.portion, self.transfers.device
        portion.carried.scores = False
        if torch.is_grad_enabled():  # an evaluation compares none
            self.inputs[turn.chunk].append(self._digest_of_inputs(tensor_leaves(*args, *kwargs.values())))
        if turn.stage:
            self.transfers.receive(turn)
        draws = portion.draws_random and portion.module.training
        stage = None if self.by_sample else turn.stage
        output = self._state.call(device, stage, draws=draws, run=lambda: inner(*args, **kwargs))
        if self._next <= portion.chunks[turn.chunk].end:
            raise MeshparError(
                f"the forward returned before it called {portion.line[self._next]}: stages of pp run every block in "
                "each micro-batch. A model that leaves out blocks, or ends early, needs a mesh without pp"
            )
        if turn.stage < portion.last:
            raise StageEndsError
        self.behind = portion.carried.scores = True
        return output

    @eager
    def _digest_of_inputs(self, leaves: Sequence[Tensor]) -> Tensor | int:
        """Return a number of what the module gets; tensors of the micro-batch itself are the same on all stages."""
        agreed = [self.turn.agreed.get(id(leaf)) for leaf in leaves]
        if all(form is not None and leaf._version == form[1] for leaf, form in zip(leaves, agreed, strict=True)):
            return hash(tuple(agreed))
        return digest_of(leaves, self.transfers.device)

    def _call(
        self, child: nn.Module, rule: Rule, inner: Callable[..., Any], ran: list[bool], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a module's call ``inner`` by its rule; ``ran`` is filled when hooks of a module around blocks run."""
        if not self.runs or not self.calls or self.behind:
            self.outside(child)
        if not self.runs:
            return inner(*args, **kwargs)
        if rule.number is not None:
            self._expect(rule.number)
        if ran:
            ran.clear()
        try:
            runs_here = rule.only is None or rule.only == self.turn.chunk
            output = inner(*args, **kwargs) if runs_here else self._answer(child, rule.otherwise, args, kwargs)
        except Exception as error:
            if ran:  # an error of hooks, which would look like one of what runs on stand-ins
                self._fail(error)
            raise
        crosses = rule.takes is not None or rule.results or rule.number == self.portion.chunks[self.turn.chunk].end
        return self._return(child, rule, output) if crosses else output

    @eager
    def _expect(self, number: int) -> None:
        """Refuse a call of a block out of its order."""
        line = self.portion.line
        if number != self._next:
            expected = line[self._next] if self._next < len(line) else "the end"
            raise MeshparError(
                f"the forward calls {line[number]}, and {expected} was to follow: stages of pp run every block "
                "once, in the order of the plan. A model that leaves out, repeats or reorders blocks while it trains "
                "needs a mesh without pp"
            )
        self._next += 1

    @staticmethod
    def _answer(child: nn.Module, stand_in: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Let a stand-in answer a call in forwards of other chunks; nothing gathers the module's weights then."""
        output = stand_in.forward(*args, **kwargs)
        if stand_in is not child:  # the hooks of a stand-in for a module behind the blocks run on the last stage
            tell_hooks_of(child, args, kwargs, output)
        return output

    @eager
    def _return(self, child: nn.Module, rule: Rule, output: Any) -> Any:
        """Return what a module's call returns on this stage; send what the last of its blocks does."""
        turn, chunk = self.turn, self.portion.chunks[self.turn.chunk]
        if rule.takes == turn.chunk:
            output = with_result(output, {0: turn.arrived[0]})
        received, values = dict[int, Tensor](), output if isinstance(output, tuple | list) else [output]
        for result in rule.results:
            if result in chunk.takes:
                value = turn.results[result] = turn.arrived[1 + chunk.takes.index(result)]
                received[result.place] = value.clone() if getattr(child, "written", False) else value
            elif result in chunk.gives and result.place < len(values) and isinstance(values[result.place], Tensor):
                turn.results[result] = values[result.place]
        output = with_result(output, received) if received else output
        if rule.number == chunk.end and turn.stage < self.portion.last:
            self._hand_on(output, chunk.gives)
        return output

    def _hand_on(self, output: Any, gives: Sequence[Result]) -> None:
        if lacking := [result for result in gives if result not in self.turn.results]:
            raise MeshparError(
                f"{lacking[0].module} has not returned what StagesLayout.carries says, a tensor that later blocks use, "
                "in this micro-batch; use a mesh without pp for it"
            )
        several = isinstance(output, tuple | list)
        self.portion.carried.width = len(output) - 1 if several else -1
        self.turn.left = [output[0] if several else output, *(self.turn.results[result] for result in gives)]
        self.turn.versions = [value._version for value in self.turn.left]
        self.transfers.send(self.turn, [value.detach() for value in self.turn.left])


def digest_of(values: object, device: torch.device) -> Tensor:
    """Return a number for the tensors in ``values``, 0-dim int64 on ``device``."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in tensor_leaves(values):
        total = total * FACTOR + digest(leaf.detach()).to(device)
    return total
