"""A save that runs in the background: one at a time; the next step, save or close raises its errors."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any, final

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshpar.core.errors import CheckpointError
from meshpar.core.waiting import loads_wait, reads_of

_log = logging.getLogger("meshpar.checkpoints")


@final
class Background:
    """One save in flight, on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._staged = threading.Event()
        self._lock, self._after = threading.RLock(), list[Callable[[], object]]()
        self._writes = False
        self._failure: BaseException | None = None
        self._loads = list[Any]()  # hooks of the module that is saved
        self._hook: Any = None  # of every optimizer: one that the save did not receive may train the same parameters

    def start(
        self, stage: Callable[[], None], finish: Callable[[], object], *, trains: bool, module: nn.Module, what: str
    ) -> None:
        """Run ``stage``, then ``finish``. The next step of any optimizer, and whoever moves or loads parameters of
        ``module`` and its parts, waits for ``stage``; without an optimizer (``trains``) this call waits.
        """
        self.wait()
        read = reads_of(module).begin(what, beside=True)
        self._loads = loads_wait(module)
        self._staged.clear()
        self._after, self._writes = [], True
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.before_step())
            atexit.register(self._told_at_exit)

        def work() -> None:
            try:
                stage()
                read()
                self._staged.set()
                finish()
                with self._lock:
                    while self._after:
                        self._after.pop(0)()
                    self._writes = False
            # raised again on the main thread by before_step, wait or close
            except BaseException as error:  # noqa: BLE001
                self._failure = error
            finally:
                read()
                self._staged.set()
                self._writes = False

        self._thread = threading.Thread(target=work, name="meshpar-save")
        self._thread.start()
        if not trains:
            self._staged.wait()

    def before_step(self) -> None:
        """Wait until the save in flight has copied its tensors; raise the error of a save that has failed."""
        if self._thread is None:
            return
        self._staged.wait()
        if not self._thread.is_alive() or self._failure is not None:
            self.wait()

    def then(self, act: Callable[[], object]) -> None:
        """Run ``act`` once the save in flight is committed, on its thread; now where none is in flight, and never after
        one that failed.
        """
        with self._lock:
            if self._writes:
                self._after.append(act)
            elif self._failure is None:
                act()

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            while self._loads:
                self._loads.pop().remove()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"a save in the background failed: {failure}") from failure

    def close(self) -> None:
        """Wait for the save in flight, and remove the hook."""
        try:
            self.wait()
        finally:
            if self._hook is not None:
                self._hook.remove()
                atexit.unregister(self._told_at_exit)
            self._hook = None

    def _told_at_exit(self) -> None:
        """Log the error that nothing raised: a save whose program has ended fails without threads."""
        if self._failure is not None:
            _log.error(
                "the last save in the background is lost: %s; call close() of the CheckpointManager at the end",
                self._failure,
            )
