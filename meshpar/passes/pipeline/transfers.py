"""What a stage hands on: values in one message where their form is known, and a header that tells of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.passes.host_reads import beside
from meshpar.passes.pipeline.cuts import Result
from meshpar.passes.pipeline.messages import BACK, FAILED, FORTH, Header, StageMessages
from meshpar.passes.pipeline.portion import Portion, Turn


class FailedBeforeError(Exception):
    """Raised in a micro-batch that an error ended on an earlier stage, which tells of it at the end of the step."""


@final
class Transfers:
    """The values and gradients that this rank's stages exchange; ``fail`` gets errors that end an action."""

    def __init__(self, portion: Portion, doing: Callable[[], str], fail: Callable[[Exception], None]) -> None:
        self._chunks, self._carried, self._fail = portion.chunks, portion.carried, fail
        self.messages = StageMessages(portion.group, len(portion.chunks), doing)
        # ``late``: numbers behind values are read one micro-batch later, so that the host waits for no device; then
        # messages of a known form are exchanged whatever fails, with zeros in the place of values
        self.device, self.late, self.failed = torch.device("cpu"), False, False
        # Headers of the last values that came and went in each chunk for a micro-batch of one form.
        self._got, self._given = ([dict[object, Header]() for _ in portion.chunks] for _ in range(2))
        self._announced: Header | None = None  # whose values have yet to come
        self._unread = list[tuple[int, int, Callable[[], Tensor]]]()  # numbers behind values: micro-batch and stage
        # headers of what a simulated rank gets, by their results, as the stages before have filled them
        self.supposed: dict[Result | None, Header] | None = None

    def use(self, device: torch.device) -> None:
        """Exchange values of a device."""
        self.device, self.late = device, not runtime.over_hosts(device)

    def begin_step(self) -> None:
        """Begin a step or an evaluation, and forget what a failed one left."""
        if self.failed:
            self._unread.clear()
        self.failed = False

    def receive(self, turn: Turn) -> None:
        """Receive what the stage before hands on; its header comes behind values of a known form, or else before."""
        results, numbers = (None, *self._chunks[turn.chunk].takes), torch.Tensor()
        expected, header, values = self._got[turn.chunk].get(turn.form), self._announced, list[Tensor]()
        if self.supposed is not None:
            first = self.supposed[None]
            expected = replace(first, forms=tuple(self.supposed.get(result, first).forms[0] for result in results))
        if header is None:
            if expected is None:
                numbers = torch.empty(Header.size(len(results)), dtype=torch.int64, device=self.device)
                self.messages.receive(numbers, turn.stage - 1, FORTH)
            else:
                whole, values, numbers = expected.room(self.device)
                self.messages.receive(whole, turn.stage - 1, FORTH)
            if expected is not None and self.late:
                header = expected
                with beside(self.device) as to_host:
                    self._unread.append((turn.number, turn.stage - 1, to_host(numbers)))
            else:
                header = expected if self.supposed is not None and expected else Header.of_numbers(*numbers.tolist())
                if header.width == FAILED:
                    turn.takes, error = False, FailedBeforeError()
                    self._fail(error)
                    raise error
                if expected is None or header.forms != expected.forms:
                    # noted, so that no values are read as a header where there is no memory for them
                    self._announced = header
        if self._announced is not None:
            values = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in header.forms]
            for value in values:
                self.messages.receive(value, turn.stage - 1, FORTH)
        self._announced, turn.takes = None, False
        header.keep(self._got[turn.chunk], turn.form)
        self._carried.dtype, self._carried.width = header.forms[0][0], header.width
        turn.arrived = [value.requires_grad_() for value in values] if torch.is_grad_enabled() else values
        if self.late and header is expected:
            self._read(1)
        elif self.supposed is None and not self.failed:  # with what has come noted: its gradients go back
            header.check(turn.number, turn.stage - 1)

    def _read(self, most: int) -> None:
        """Read the numbers of what came, but for the last ``most``; raise FailedBeforeError where one says so."""
        while len(self._unread) > most:
            number, stage, read = self._unread.pop(0)
            numbers = read()
            if self.failed or self.supposed is not None:
                continue
            header = Header.of_numbers(*numbers.tolist())
            if header.width == FAILED:
                error = FailedBeforeError()
                self._fail(error)
                raise error
            header.check(number, stage)

    def send(self, turn: Turn, values: Sequence[Tensor] | None) -> None:
        """Send to the next stage the value of a block and what goes with it; None: an error came before them."""
        gives = self._chunks[turn.chunk].gives
        forms = tuple((value.dtype, tuple(value.shape)) for value in values or ())
        header = Header(FAILED if values is None else self._carried.width, turn.number, turn.stage, forms)
        expected = self._given[turn.chunk].get(turn.form)
        if self.supposed is not None:
            expected, pairs = header, zip((None, *gives), forms, strict=True)
            self.supposed |= {result: replace(header, forms=(form,)) for result, form in pairs}
        if self.late and expected is not None:
            self._send_known(expected, header, turn, values)
            return
        numbers = header.tensor(1 + len(gives), self.device)
        parts = [numbers, *(values or ())]
        if expected is not None:
            whole, rooms, behind = expected.room(self.device)
            behind.copy_(numbers)
            parts[0] = whole  # where the next stage takes another form, it learns behind it what follows
            if forms == expected.forms:
                for room, value in zip(rooms, values or (), strict=True):
                    room.copy_(value)
                parts = [whole]
        parts = [part.contiguous() for part in parts]
        if values is not None:  # behind all that needs memory: the next stage keeps what it has got
            header.keep(self._given[turn.chunk], turn.form)
        self.messages.send(parts, turn.stage + 1, FORTH)
        turn.sends = False

    def _send_known(self, expected: Header, header: Header, turn: Turn, values: Sequence[Tensor] | None) -> None:
        """Send values of a known form; after an error zeros, for which gradients come like for the others."""
        if values is not None and header.forms != expected.forms:
            shapes = (", ".join(str(shape) for _, shape in forms) for forms in (header.forms, expected.forms))
            raise MeshparError(
                "what stage {} hands on has the shapes {}, expected {} as for earlier inputs of the same shapes, which "
                "the next stage takes without a wait for its device; pad to shapes that follow from those of the "
                "inputs, or use a mesh without pp".format(turn.stage, *shapes)
            )
        whole, rooms, behind = expected.room(self.device)
        if values is None:
            whole.zero_()
            turn.left = [torch.zeros_like(room) for room in rooms]
        for room, value in zip(rooms, values or (), strict=values is not None):
            room.copy_(value)
        behind.copy_(header.tensor(len(rooms), self.device))
        self.messages.send([whole], turn.stage + 1, FORTH)
        turn.sends = False

    def receive_back(self, turn: Turn) -> list[Tensor]:
        """Receive the gradients of what was handed on."""
        grads = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in turn.left]
        for grad in grads:
            self.messages.receive(grad, turn.stage + 1, BACK)
        turn.takes = False
        return grads

    def send_back(self, turn: Turn) -> None:
        """Send the gradients of what had arrived; zeros where it has none."""
        back = [torch.zeros_like(value) if value.grad is None else value.grad for value in turn.arrived]
        self.messages.send([grad.contiguous() for grad in back], turn.stage - 1, BACK)
        turn.sends = False
