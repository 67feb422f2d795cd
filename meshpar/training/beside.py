"""Work beside the training: validations and evaluations. An error on one rank ends the work on all ranks, and no
training; a stop request ends it within a batch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from meshpar._torch.calls import enter_by
from meshpar.core.errors import MeshparError, brief
from meshpar.process.signals import STOPPING, exit_code_of, put_back
from meshpar.step.forwards import evaluating
from meshpar.training.stop import StopRequest

T = TypeVar("T")

_LOOK_S = 0.5
_ALONE_S = 60.0
"""How long a rank that failed inside of a forward waits for the others, which may wait for it in the same forward."""
_LAST_S = 10.0
"""Between an interrupt in user code and the end of the process."""


class _LeftError(MeshparError):
    """Raised inside of work that is left on all ranks."""


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restore the working directory, autograd's mode and the handlers of stop signals at the end."""
    folder, grad = "", torch.is_grad_enabled()
    with suppress(OSError):  # the directory may be deleted
        folder = os.getcwd()
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        if threading.current_thread() is threading.main_thread():
            put_back({number: before for number, before in handlers.items() if signal.getsignal(number) != before})
        with suppress(OSError):
            if folder:
                os.chdir(folder)


@final
class Beside:
    """Run work beside the training of which each rank hears how it goes on the others.

    Args:
        stop: the stop requests of the run.
        module: the module.
        in_step: whether ranks meet before each of its calls; stages of a pipeline run ahead of one another.
        moved: called before each batch, and every half second while the work may be silent.
        before_exit: called before this process ends in the middle of work that a stop request does not end.
        silent_s: seconds for which work may call no module before the watchdog counts it as no progress.
        grace_s: seconds after a stop request in which work of the user's has to end.

    Attributes:
        failures: what failed in the last piece of work, a line for each rank.
    """

    def __init__(
        self,
        stop: StopRequest,
        module: nn.Module,
        *,
        in_step: bool,
        moved: Callable[[], None],
        before_exit: Callable[[], object],
        silent_s: float,
        grace_s: float,
    ) -> None:
        self._stop, self._module, self._in_step = stop, module, in_step
        self._moved, self._before_exit = moved, before_exit
        self._silent_s, self._grace_s = silent_s, grace_s
        self._called, self._inside, self._left, self._lost = 0.0, False, False, ""
        self.failures: list[str] = []

    def run(self, name: str, act: Callable[[], T], within: AbstractContextManager[object]) -> T | None:
        """Return the result of ``act``; None where it failed on a rank, or where a stop request ended it.

        Collective. ``act`` may be interrupted anywhere, and what enters and leaves ``within`` is not. At the end the
        modes of the module's parts, the working directory, autograd's mode and the handlers of stop signals are as
        before.

        Raises:
            MeshparError: this rank failed, and the others do not come, because they wait for it in an exchange.
        """
        self._called, self._left, self.failures, self._lost = time.monotonic(), False, [], ""
        found: T | None = None
        error: BaseException | None = None
        over = threading.Event()
        watch = threading.Thread(target=self._attend, args=(name, over), name="meshpar-beside", daemon=True)
        watch.start()
        try:
            try:
                with _restored_process(), evaluating(self._module), within, self._met_before_calls():
                    self._stop.interrupts = True
                    try:
                        found = act()
                    finally:
                        self._stop.interrupts = False
            except KeyboardInterrupt:
                raise
            except BaseException as caught:  # noqa: BLE001 - the ranks share it, and it is told by name
                error = caught
            failure = "" if error is None else f"rank {dist.get_rank()}: {brief(error)}"
            while not self._left and self._meets(failure):
                continue
        finally:
            over.set()
            watch.join()
        if self._lost:
            raise MeshparError(
                f"{name}{f' failed on {failure}, and' if failure else ':'} the other ranks did not come to its end "
                f"({self._lost}), see their logs; start the job again: the run resumes from its newest checkpoint"
            ) from (error or TimeoutError(self._lost))
        return None if self._left else found

    def goes_on(self) -> bool:
        """Return whether the work goes on: no rank failed, and none was asked to stop. Collective: every rank calls it
        before each batch.
        """
        self._called = time.monotonic()
        self._moved()
        if not self._in_step:
            self._left = self._left or self._stop.agreed()
        elif not self._left:
            self._meets("", works=True)
        return not self._left

    def _meets(self, failure: str, *, works: bool = False) -> bool:
        """Meet the other ranks; return whether one of them still works."""
        within_s = min(_ALONE_S, self._silent_s) if failure and self._inside else self._silent_s
        try:
            failures, going_on = self._stop.meet(failure, works=works, within_s=within_s)
        except TimeoutError as error:
            self._lost, self._left = str(error), True
            return False
        self.failures += failures
        self._left = bool(failures) or (self._stop.heard and going_on)
        return going_on

    @contextmanager
    def _met_before_calls(self) -> Iterator[None]:
        """Let ranks meet before each call of the module, where one that failed would make the others wait."""
        module: Any = self._module
        self._inside = False
        if not self._in_step:
            yield
            return
        inner = module._call_impl
        enter_by(module, partial(self._enter, inner))
        try:
            yield
        finally:
            module._call_impl = inner

    def _enter(self, inner: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if not self._inside and not self.goes_on():
            raise _LeftError("the work is left: another rank failed, or a stop was asked for")
        nested, self._inside = self._inside, True
        result = inner(*args, **kwargs)
        self._inside = nested  # stays set after an error: the other ranks may be in the same call
        return result

    def _attend(self, name: str, over: threading.Event) -> None:
        """Report progress for as long as the work may be silent, and end it some time after a stop request."""
        late_s = self._grace_s
        while not over.wait(_LOOK_S):
            if time.monotonic() - self._called < self._silent_s:
                self._moved()
            asked_s = self._stop.asked_for_s()
            if asked_s > self._grace_s + _LAST_S:
                with suppress(Exception):
                    self._before_exit()
                sys.stderr.write(
                    f"{name} did not end within {asked_s:.0f} s of {self._stop.reason}; the run ends without it, after "
                    "its newest checkpoint\n"
                )
                sys.stderr.flush()
                os._exit(exit_code_of(self._stop.reason))
            elif asked_s > late_s:
                late_s = float("inf")
                self._stop.interrupt()
