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
from meshpar.passes.pipeline.messages import BACK, FAILED, FORTH, Header, Messages
from meshpar.passes.pipeline.portion import Portion, Turn


class FailedBeforeError(Exception):
    """Raised in a micro-batch that an error ended on an earlier stage, which tells of it at the end of the step."""


@final
class Transfers:
    """The values and gradients that this rank's stages exchange with others.

    Args:
        portion: of the model, on this rank.
        doing: see :class:`Messages`.
        fail: is called with an error that ends an action.

    Attributes:
        messages: of this rank.
        device: on which the stages compute.
        failed: an error has ended an action of this step.
        supposed: headers of what a simulated rank gets, by their results, as the stages before have filled them.
    """

    def __init__(self, portion: Portion, doing: Callable[[], str], fail: Callable[[Exception], None]) -> None:
        self._chunks, self._carried, self._fail = portion.chunks, portion.carried, fail
        self.messages = Messages(portion.group, len(portion.chunks), doing)
        self.device, self.failed = torch.device("cpu"), False
        # Headers of the last values that came and went in each chunk for a micro-batch of one form.
        self._got, self._given = ([dict[object, Header]() for _ in portion.chunks] for _ in range(2))
        self._come: Header | None = None  # whose values have yet to
        self._unread = list[tuple[int, int, Callable[[], Tensor]]]()  # numbers behind values: micro-batch and stage
        self.supposed: dict[Result | None, Header] | None = None

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

    def receive(self, turn: Turn) -> None:
        """Receive what the stage before hands on; its header comes behind values of a known form, or else before."""
        results, numbers = (None, *self._chunks[turn.chunk].takes), torch.Tensor()
        known, header, found = self._got[turn.chunk].get(turn.form), self._come, list[Tensor]()
        if self.supposed is not None:
            one = self.supposed[None]
            known = replace(one, forms=tuple(self.supposed.get(result, one).forms[0] for result in results))
        if known is not None and header is None and self.late:
            header, found = known, self._receive_known(known, turn)
        if header is None:
            if known is None:
                numbers = torch.empty(Header.size(len(results)), dtype=torch.int64, device=self.device)
                self.messages.receive(numbers, turn.stage - 1, FORTH)
            else:
                whole, found, numbers = known.room(self.device)
                self.messages.receive(whole, turn.stage - 1, FORTH)
            header = known if self.supposed is not None and known else Header.of_numbers(numbers.tolist())
            if header.width == FAILED:
                turn.takes, error = False, FailedBeforeError()
                self._fail(error)
                raise error
            if known is None or header.forms != known.forms:
                self._come = header  # noted, so that no values are read as a header where there is no memory for them
        if self._come is not None:
            found = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in header.forms]
            for value in found:
                self.messages.receive(value, turn.stage - 1, FORTH)
        self._come, turn.takes = None, False
        header.keep(self._got[turn.chunk], turn.form)
        self._carried.dtype, self._carried.width = header.forms[0][0], header.width
        turn.arrived = [value.requires_grad_() for value in found] if torch.is_grad_enabled() else found
        if self.late and header is known:
            self._read(1)
        elif self.supposed is None and not self.failed:  # with what has come noted: its gradients go back
            header.check(turn.number, turn.stage - 1)

    def _receive_known(self, known: Header, turn: Turn) -> list[Tensor]:
        """Receive values of a known form, and begin to read the numbers behind them."""
        whole, found, numbers = known.room(self.device)
        self.messages.receive(whole, turn.stage - 1, FORTH)
        with beside(self.device) as to_host:
            self._unread.append((turn.number, turn.stage - 1, to_host(numbers)))
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

    def send(self, turn: Turn, values: Sequence[Tensor] | None) -> None:
        """Send to the next stage the value of a block and what goes with it; None: an error came before them."""
        gives = self._chunks[turn.chunk].gives
        forms = tuple((value.dtype, tuple(value.shape)) for value in values or ())
        header = Header(FAILED if values is None else self._carried.width, turn.number, turn.stage, forms)
        known = self._given[turn.chunk].get(turn.form)
        if self.supposed is not None:
            known, pairs = header, zip((None, *gives), forms, strict=True)
            self.supposed |= {result: replace(header, forms=(form,)) for result, form in pairs}
        if self.late and known is not None:
            self._send_known(known, header, turn, values)
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
            header.keep(self._given[turn.chunk], turn.form)
        self.messages.send(parts, turn.stage + 1, FORTH)
        turn.sends = False

    def _send_known(self, known: Header, header: Header, turn: Turn, values: Sequence[Tensor] | None) -> None:
        """Send values of a known form; after an error zeros, for which gradients come like for the others.

        Raises:
            MeshparError: they have another form.
        """
        if values is not None and header.forms != known.forms:
            shapes = (", ".join(str(shape) for _, shape in forms) for forms in (header.forms, known.forms))
            raise MeshparError(
                "what stage {} hands on has the shapes {}, expected {} as for earlier inputs of the same shapes, which "
                "the next stage takes without a wait for its device; pad to shapes that follow from those of the "
                "inputs, or use a mesh without pp".format(turn.stage, *shapes)
            )
        whole, rooms, behind = known.room(self.device)
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
