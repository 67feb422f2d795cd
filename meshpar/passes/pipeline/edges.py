"""The edges of a stage inside of the model's own forward: what comes from the stage before, in the place of the last of
its blocks, and what goes to the stage behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.calls import eager, enter_by
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, first_line
from meshpar.passes.host_reads import beside
from meshpar.passes.pipeline.cuts import Result
from meshpar.passes.pipeline.messages import BACK, FAILED, FORTH, Header, Messages
from meshpar.passes.pipeline.stand_ins import Carried, TailStandIn, tell_hooks_of, tensors, with_result
from meshpar.passes.tensor.random import LossState
from meshpar.step.forwards import set_forward
from meshpar.tensors.digests import FACTOR, digest

_WRITES = (
    "the model writes into what a block returns, which is on its way to the next stage; let it compute a new tensor "
    "there, such as by hidden = hidden * scale"
)
_WRITTEN = ("a leaf Variable that requires grad", "the written-to tensor")
"""Words of torch's errors for writes into a received value, and into the zeros of a stand-in."""


class StageEndsError(BaseException):
    """Leave a loss function whose module has handed its value to the next stage; no error, and nothing to catch."""


class FailedBeforeError(Exception):
    """Raised in a micro-batch that an error ended on an earlier stage, which tells of it at the end of the step."""


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks of one rank that follow one another.

    Attributes:
        blocks: modules, in the order of their calls.
        before: the stand-in of the block before the first of them, in whose place the value comes that another stage
            hands on: what the model computes between two blocks is then computed by the second one's stage.
        takes: what comes beside that value.
        gives: what goes to the next stage beside the value of the last block.
        end: number of the last block in the model's order.
    """

    blocks: tuple[nn.Module, ...]
    before: nn.Module | None
    takes: tuple[Result, ...]
    gives: tuple[Result, ...]
    end: int


@final
@dataclass(frozen=True, slots=True)
class Portion:
    """The layers of a model that one rank has.

    Attributes:
        module: the outermost module.
        chunks: of this rank's blocks: stage ``chunk * ranks + rank`` of the model.
        only: modules of this rank that compute in one of its stages -> the number of this one, and what answers their
            calls in its other stages.
        group: the ranks that have the stages.
        carried: the form of the value that passes from block to block, which the stand-ins return.
        line: names of all blocks of the model, in the order of their calls.
        draws: the model draws random numbers.
    """

    module: nn.Module
    chunks: tuple[Chunk, ...]
    only: tuple[tuple[int, nn.Module, nn.Module], ...]
    group: dist.ProcessGroup
    carried: Carried
    line: tuple[str, ...]
    draws: bool


@final
class Edges:
    """The edges of this rank's stages.

    Args:
        portion: of the model, on this rank.
        doing: see :class:`Messages`.
        fail: is called with an error that ends an action.

    Attributes:
        device: on which the stages compute.
        chunk: that runs.
        number: of the micro-batch that runs.
        arrived: the value that the stage before has handed on, and what came beside it.
        left: likewise to the next stage; the loss on the last one.
        calls: of the module in the forward that runs.
        runs: a forward of a step or of an evaluation does.
        reverses: a backward does.
        behind: the function of the module and a micro-batch runs behind the module's call.
        takes: the action that runs has something to receive.
        sends: it has something to send.
        failed: an error has ended an action of this step.
        inputs: digests of what ``loss`` has given the module in this step, for each chunk, on the device.
        supposed: headers of what a simulated rank gets, by their results, as the stages before have filled them.
    """

    def __init__(self, portion: Portion, doing: Callable[[], str], fail: Callable[[Exception], None]) -> None:
        self._module, self._chunks, self._only = portion.module, portion.chunks, portion.only
        self._carried, self._fail, group = portion.carried, fail, portion.group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.messages = Messages(group, len(self._chunks), doing)
        self.device, self.chunk, self.number = torch.device("cpu"), 0, 0
        self.arrived, self.left = list[Tensor](), list[Tensor]()
        self.calls, self.runs, self.takes, self.sends, self.failed = 0, False, False, False, False
        self.behind = self.reverses = False
        self._results = dict[Result, Tensor]()  # of the forward that runs, which later stages need
        self._form: object = None  # of the micro-batch
        # Headers of the last values that came and went in each chunk for a micro-batch of one form.
        self._got, self._given = ([dict[object, Header]() for _ in self._chunks] for _ in range(2))
        self._come: Header | None = None  # whose values have yet to
        self._unread = list[tuple[int, int, Callable[[], Tensor]]]()  # numbers behind values: micro-batch and stage
        self._versions = list[int]()  # of what it has handed on
        # The number of the block that the forward has to call next.
        self._draws, self._line, self._next = portion.draws, portion.line, 0
        self._state = LossState()
        self.inputs: list[list[Tensor]] = [[] for _ in self._chunks]
        self.supposed: dict[Result | None, Header] | None = None

    @property
    def stage(self) -> int:
        """The stage that runs: the number of stages before it."""
        return self.chunk * self.ranks + self.rank

    @property
    def last(self) -> int:
        """The stage with the last blocks, which has the loss."""
        return self.ranks * len(self._chunks) - 1

    @property
    def late(self) -> bool:
        """True where numbers behind values are read one micro-batch later, so that the host waits for no device.

        Then messages of a known form are exchanged whatever fails, with zeros in the place of values.
        """
        return not runtime.over_hosts(self.device)

    def begin_step(self) -> None:
        """Begin a step, or an evaluation; what an earlier one that failed left is forgotten."""
        if self.failed:
            self._unread.clear()
        self.failed = False

    def begin(self, chunk: int, number: int, form: object) -> None:
        """Begin a forward of a micro-batch that has tensors of these shapes."""
        self.chunk, self.number, self._form = chunk, number, form
        self.arrived, self.left, self._results, self.calls, self._next = [], [], {}, 0, 0
        self.takes, self.sends = self.stage > 0, self.stage < self.last

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: object) -> Any:
        """Return what a function of the module and a micro-batch returns; None where it ends with the stage."""
        self.runs, self._carried.device, last = True, self.device, len(self._chunks) - 1
        self._carried.scores = self.stage == self.last
        self._state.begin(self.device, self.number, first=not self.chunk, last=self.chunk == last)
        try:
            value = function(self._module, batch)
            self._state.end(self.device)
            return value
        except StageEndsError:
            self._state.end(self.device)
            if any(value._version != version for value, version in zip(self.left, self._versions, strict=True)):
                raise MeshparError(_WRITES) from None
            return None
        except RuntimeError as error:
            if self.stage and any(text in str(error) for text in _WRITTEN):
                raise MeshparError(f"{_WRITES}. torch says: {first_line(error)}") from error
            raise
        finally:
            self.runs, self.behind, self._carried.device, self._carried.scores = False, False, None, False

    def pass_forth(self) -> None:
        """Exchange what a forward that an error has ended has yet to."""
        if self.takes:
            with suppress(FailedBeforeError):
                self._receive()
        if self.sends:
            self._send(None)

    def begin_back(self, chunk: int, number: int, arrived: list[Tensor], left: list[Tensor]) -> None:
        """Begin a backward of what a forward took and handed on; a micro-batch that failed has handed on nothing, for
        which no gradient comes.
        """
        self.chunk, self.number, self.arrived, self.left = chunk, number, arrived, left
        self.takes, self.sends = bool(left) and self.stage < self.last, bool(arrived)

    def backward(self) -> None:
        """Run a backward."""
        grads: Sequence[Tensor | None] = [None] * len(self.left)
        if self.takes:
            grads = self._gradients()
            self.messages.settle_first(FORTH)  # the value came there, and those before it
        if trained := [(value, grad) for value, grad in zip(self.left, grads, strict=True) if value.requires_grad]:
            self.reverses = True
            try:
                torch.autograd.backward([value for value, _ in trained], [grad for _, grad in trained])
            finally:
                self.reverses = False
        if self.arrived and self.arrived[0].grad is None:
            raise MeshparError(
                f"what {self._line[self._chunks[self.chunk].end - len(self._chunks[self.chunk].blocks)]} returns did "
                "not reach the loss, or was detached; one process would leave the blocks before it without gradients. "
                "Use torch.utils.checkpoint with use_reentrant=False. A model that drops what a block returns needs a "
                "mesh without pp, or other cuts by PipelineParallel(stages=...)"
            )
        self.pass_back()

    def pass_back(self) -> None:
        """Exchange what a backward has yet to."""
        if self.takes:
            self._gradients()
        if self.sends:
            back = [torch.zeros_like(value) if value.grad is None else value.grad for value in self.arrived]
            self.messages.send([grad.contiguous() for grad in back], self.stage - 1, BACK)
            self.sends = False
        self.arrived, self.left = [], []

    def _gradients(self) -> list[Tensor]:
        grads = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in self.left]
        for grad in grads:
            self.messages.receive(grad, self.stage + 1, BACK)
        self.takes = False
        return grads

    def end_early(self) -> None:
        """Let the model fail where it computes with stand-ins behind the value that is handed on: a loss inside it
        finds no logits there. Other passes see the forward return.
        """
        forward = self._module.forward

        def until_handed_on(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except MeshparError:  # of an order that is not the plan's
                raise
            except Exception:
                if not self.runs or self.stage == self.last or not self.left or self.failed:
                    raise
                return self.left[0].detach()

        set_forward(self._module, until_handed_on)

    def install(self) -> None:
        """Put the exchange around what the passes behind this one, and the guards, have put on the module."""
        module: Any = self._module
        inner = module._call_impl

        def enter(*args: Any, **kwargs: Any) -> Any:
            if not self.runs:
                raise refused()
            self.calls += 1
            if self.calls > 1:
                raise MeshparError(
                    "the module is called twice for one micro-batch, and stages hand on one value of each; join the "
                    "inputs of both calls along the samples"
                )
            self._carried.scores = False
            self.inputs[self.chunk].append(digest_of((args, kwargs), self.device))
            if self.stage:
                self._receive()
            output = self._state.call(
                self.device, self.stage, draws=self._draws and module.training, run=lambda: inner(*args, **kwargs)
            )
            self._check_line(self._chunks[self.chunk])
            if self.stage < self.last:
                raise StageEndsError
            self.behind = self._carried.scores = True
            return output

        enter_by(module, enter)
        blocks = {block for chunk in self._chunks for block in chunk.blocks}
        for child in module.modules():
            if child is not module and child not in blocks and blocks.intersection(child.modules()):
                self._tells_of_hooks(child)
        for place, chunk in enumerate(self._chunks):
            if chunk.before is not None:
                chunk.before.register_forward_hook(partial(self._take, place))
        for place, child, otherwise in self._only:
            self._only_in(place, child, otherwise)
        crossing = dict.fromkeys(result for chunk in self._chunks for result in (*chunk.takes, *chunk.gives))
        for name in dict.fromkeys(result.module for result in crossing):
            self._carries(module.get_submodule(name), [result for result in crossing if result.module == name])
        for number, name in enumerate(self._line):
            self._calls_in_line(number, module.get_submodule(name))
        for child in self._module.modules():
            if isinstance(child, TailStandIn):  # its hooks run on the last stage, which tells of their errors
                self._only_in(-1, child, child)

    def _tells_of_hooks(self, parent: nn.Module) -> None:
        """Remember an error of a module's forward hooks, which would look like one of what runs on stand-ins."""
        inner, ran = _calls_of(parent), list[bool]()
        parent.register_forward_hook(lambda *_: ran.append(True), prepend=True)

        def enter(*args: Any, **kwargs: Any) -> Any:
            ran.clear()
            try:
                return inner(*args, **kwargs)
            except Exception as error:
                if self.runs and ran:
                    self._fail(error)
                raise

        enter_by(parent, enter)

    def _carries(self, child: nn.Module, results: Sequence[Result]) -> None:
        """Keep results of a module for later stages, or return those that earlier ones have sent."""
        inner, writes = _calls_of(child), getattr(child, "written", False)

        @eager
        def carried(output: Any) -> Any:
            chunk, came = self._chunks[self.chunk], dict[int, Tensor]()
            values = output if isinstance(output, tuple | list) else [output]
            for result in results:
                if result in chunk.takes:
                    value = self._results[result] = self.arrived[1 + chunk.takes.index(result)]
                    came[result.place] = value.clone() if writes else value
                elif result in chunk.gives and result.place < len(values) and isinstance(values[result.place], Tensor):
                    self._results[result] = values[result.place]
            return with_result(output, came)

        def enter(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            return carried(output) if self.runs else output

        enter_by(child, enter)

    def _calls_in_line(self, number: int, block: nn.Module) -> None:
        """Check that the forward calls a block in its place, and send what the last of a stage returns."""
        inner = _calls_of(block)

        def enter(*args: Any, **kwargs: Any) -> Any:
            if not self.runs:
                return inner(*args, **kwargs)
            self._expect(number)
            output = inner(*args, **kwargs)
            if self.stage < self.last and block is self._chunks[self.chunk].blocks[-1]:
                self._hand_on(output)
            return output

        enter_by(block, enter)

    @eager
    def _expect(self, number: int) -> None:
        """Refuse a call of a block out of its order."""
        if number != self._next:
            expected = self._line[self._next] if self._next < len(self._line) else "the end"
            raise MeshparError(
                f"the forward calls {self._line[number]}, and {expected} was to follow: stages of pp run every block "
                "once, in the order of the plan. A model that leaves out, repeats or reorders blocks while it trains "
                "needs a mesh without pp"
            )
        self._next += 1

    def _check_line(self, chunk: Chunk) -> None:
        """Refuse a forward that has not called all blocks of a chunk."""
        if self._next <= chunk.end:
            raise MeshparError(
                f"the forward returned before it called {self._line[self._next]}: stages of pp run every block in each "
                "micro-batch. A model that leaves out blocks, or ends early, needs a mesh without pp"
            )

    def _only_in(self, chunk: int, child: nn.Module, otherwise: nn.Module) -> None:
        """Let a stand-in answer a module's calls in forwards of other chunks; nothing gathers its weights then."""
        inner = _calls_of(child)

        def enter(*args: Any, **kwargs: Any) -> Any:
            if not self.runs or self.chunk == chunk:
                return inner(*args, **kwargs)
            output = otherwise.forward(*args, **kwargs)
            if otherwise is not child:
                tell_hooks_of(child, args, kwargs, output)
            return output

        enter_by(child, enter)

    def _receive(self) -> None:
        """Receive what the stage before hands on; its header comes behind values of a known form, or else before."""
        results, numbers = (None, *self._chunks[self.chunk].takes), torch.Tensor()
        known, header, found = self._got[self.chunk].get(self._form), self._come, list[Tensor]()
        if self.supposed is not None:
            one = self.supposed[None]
            known = replace(one, forms=tuple(self.supposed.get(result, one).forms[0] for result in results))
        if known is not None and header is None and self.late:
            header, found = known, self._receive_known(known)
        if header is None:
            if known is None:
                numbers = torch.empty(Header.size(len(results)), dtype=torch.int64, device=self.device)
                self.messages.receive(numbers, self.stage - 1, FORTH)
            else:
                whole, found, numbers = known.room(self.device)
                self.messages.receive(whole, self.stage - 1, FORTH)
            header = known if self.supposed is not None and known else Header.of_numbers(numbers.tolist())
            if header.width == FAILED:
                self.takes, error = False, FailedBeforeError()
                self._fail(error)
                raise error
            if known is None or header.forms != known.forms:
                self._come = header  # noted, so that no values are read as a header where there is no memory for them
        if self._come is not None:
            found = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in header.forms]
            for value in found:
                self.messages.receive(value, self.stage - 1, FORTH)
        self._come, self.takes = None, False
        header.keep(self._got[self.chunk], self._form)
        self._carried.dtype, self._carried.width = header.forms[0][0], header.width
        self.arrived = [value.requires_grad_() for value in found] if torch.is_grad_enabled() else found
        if self.late and header is known:
            self._read(1)
        elif self.supposed is None and not self.failed:  # with what has come noted: its gradients go back
            header.check(self.number, self.stage - 1)

    def _receive_known(self, known: Header) -> list[Tensor]:
        """Receive values of a known form, and begin to read the numbers behind them."""
        whole, found, numbers = known.room(self.device)
        self.messages.receive(whole, self.stage - 1, FORTH)
        with beside(self.device) as to_host:
            self._unread.append((self.number, self.stage - 1, to_host(numbers)))
        return found

    def _read(self, most: int) -> None:
        """Read the numbers of what came, but for ``most`` of the last ones.

        Raises:
            FailedBeforeError: an error came before the values.
        """
        while len(self._unread) > most:
            number, stage, read = self._unread.pop(0)
            numbers = read()
            if self.failed or self.supposed is not None:
                continue
            header = Header.of_numbers(numbers.tolist())
            if header.width == FAILED:
                error = FailedBeforeError()
                self._fail(error)
                raise error
            header.check(number, stage)

    @eager
    def _take(self, chunk: int, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return what the stage before has handed on, as the stand-in of its last block returns it."""
        if not self.runs or self.chunk != chunk:
            return output
        return with_result(output, {0: self.arrived[0]})

    @eager
    def _hand_on(self, output: Any) -> None:
        value = output[0] if isinstance(output, tuple | list) else output
        gives = self._chunks[self.chunk].gives
        if lacking := [result for result in gives if result not in self._results]:
            raise MeshparError(
                f"{lacking[0].module} has not returned what StagesLayout.carries says, a tensor that later blocks use, "
                "in this micro-batch; use a mesh without pp for it"
            )
        self.left, self._carried.width = [value], len(output) - 1 if isinstance(output, tuple | list) else -1
        self.left += [self._results[result] for result in gives]
        self._versions = [one._version for one in self.left]
        self._send([one.detach() for one in self.left])

    def _send(self, values: Sequence[Tensor] | None) -> None:
        """Send to the next stage the value of a block and what goes with it; None: an error came before them."""
        gives = self._chunks[self.chunk].gives
        forms = tuple((value.dtype, tuple(value.shape)) for value in values or ())
        header = Header(FAILED if values is None else self._carried.width, self.number, self.stage, forms)
        known = self._given[self.chunk].get(self._form)
        if self.supposed is not None:
            known, pairs = header, zip((None, *gives), forms, strict=True)
            self.supposed |= {result: replace(header, forms=(form,)) for result, form in pairs}
        if self.late and known is not None:
            self._send_known(known, header, values)
            return
        numbers = header.tensor(1 + len(gives), self.device)
        parts = [numbers, *(values or ())]
        if known is not None:
            whole, rooms, behind = known.room(self.device)
            behind.copy_(numbers)
            parts[0] = whole  # where the next stage takes another form, it learns behind it what follows
            if forms == known.forms:
                for room, value in zip(rooms, values or (), strict=True):
                    room.copy_(value)
                parts = [whole]
        parts = [part.contiguous() for part in parts]
        if values is not None:  # behind all that needs memory: the next stage keeps what it has got
            header.keep(self._given[self.chunk], self._form)
        self.messages.send(parts, self.stage + 1, FORTH)
        self.sends = False

    def _send_known(self, known: Header, header: Header, values: Sequence[Tensor] | None) -> None:
        """Send values of a known form; after an error zeros, for which gradients come like for the others.

        Raises:
            MeshparError: they have another form.
        """
        if values is not None and header.forms != known.forms:
            shapes = (", ".join(str(shape) for _, shape in forms) for forms in (header.forms, known.forms))
            raise MeshparError(
                "what stage {} hands on has the shapes {}, expected {} as for earlier inputs of the same shapes, which "
                "the next stage takes without a wait for its device; pad to shapes that follow from those of the "
                "inputs, or use a mesh without pp".format(self.stage, *shapes)
            )
        whole, rooms, behind = known.room(self.device)
        if values is None:
            whole.zero_()
            self.left = [torch.zeros_like(room) for room in rooms]
        for room, value in zip(rooms, values or (), strict=values is not None):
            room.copy_(value)
        behind.copy_(header.tensor(len(rooms), self.device))
        self.messages.send([whole], self.stage + 1, FORTH)
        self.sends = False


def _calls_of(module: Any) -> Callable[..., Any]:
    """Return what runs a module's calls, to be put into another call."""
    inner: Callable[..., Any] = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = None
    return inner


def digest_of(values: object, device: torch.device) -> Tensor:
    """Return a number for the tensors in ``values``, 0-dim int64 on ``device``."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in tensors(values):
        total = total * FACTOR + digest(leaf.detach()).to(device)
    return total


def refused() -> MeshparError:
    """Return the error for a call of the module that no stage can run alone."""
    return MeshparError(
        "the module is called, and this rank has a part of its layers; run a step by par.backward(micro_batches, loss) "
        "and an evaluation by par.forward(micro_batches, function)"
    )
