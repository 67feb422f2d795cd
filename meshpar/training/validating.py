"""The validation and the evaluations of a run: an error on one rank ends the work on all ranks, and no training."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from meshpar._torch.calls import enter_by
from meshpar.core.errors import MeshparError, brief
from meshpar.parallelized import Parallelized
from meshpar.process.waiting import STOPPING, exit_code_of, put_back
from meshpar.step.inner_calls import evaluating
from meshpar.training.data import Batches, TensorBatch
from meshpar.training.evaluation import Evaluation, values_of
from meshpar.training.metrics import Reports, means
from meshpar.training.settings import TrainSettings
from meshpar.training.step import BatchLosses
from meshpar.training.stop import StopRequest

T = TypeVar("T")

_LOOK_S = 0.5
_ALONE_S = 60.0
"""How long a rank that failed inside of a forward waits for the others, which may wait for it in the same forward."""
_LAST_S = 10.0
"""Between an interrupt in user code and the end of the process."""
_VALIDATION = "val/"


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
class SideWork:
    """Run work beside the training, of which each rank hears how it goes on the others; ``failures``: a line a rank."""

    # ``in_step``: ranks meet before each call of ``module``; ``moved``: called while the work goes on; ``before_exit``:
    # called before this process ends in the middle of work that a stop request does not end.

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
        self.stop, self._module, self._in_step = stop, module, in_step
        self._moved, self._before_exit = moved, before_exit
        self._silent_s, self._grace_s = silent_s, grace_s
        self._called, self._inside, self._left, self._lost = 0.0, False, False, ""
        self.failures: list[str] = []

    def run(self, name: str, act: Callable[[], T], within: AbstractContextManager[object]) -> T | None:
        """Return the result of ``act``; None where it failed on a rank, or a stop request ended it. Collective."""
        # ``act`` may be interrupted anywhere, and what enters and leaves ``within`` is not.
        self._called, self._left, self.failures, self._lost = time.monotonic(), False, [], ""
        result: T | None = None
        error: BaseException | None = None
        over = threading.Event()
        watch = threading.Thread(target=self._attend, args=(name, over), name="meshpar-beside", daemon=True)
        watch.start()
        try:
            try:
                with _restored_process(), evaluating(self._module), within, self._met_before_calls():
                    self.stop.interrupts = True
                    try:
                        result = act()
                    finally:
                        self.stop.interrupts = False
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
        return None if self._left else result

    def goes_on(self) -> bool:
        """Return whether no rank failed or was asked to stop. Collective: every rank calls it before each batch."""
        self._called = time.monotonic()
        self._moved()
        if not self._in_step:
            self._left = self._left or self.stop.agreed()
        elif not self._left:
            self._meets("", works=True)
        return not self._left

    def _meets(self, failure: str, *, works: bool = False) -> bool:
        """Meet the other ranks; return whether one of them still works."""
        within_s = min(_ALONE_S, self._silent_s) if failure and self._inside else self._silent_s
        try:
            failures, going_on = self.stop.meet(failure, works=works, within_s=within_s)
        except TimeoutError as error:
            self._lost, self._left = str(error), True
            return False
        self.failures += failures
        self._left = bool(failures) or (self.stop.heard and going_on)
        return going_on

    @contextmanager
    def _met_before_calls(self) -> Iterator[None]:
        """Let ranks meet before each call of the module, where one that failed would make the others wait."""
        module: Any = self._module
        self._inside, inner = False, module._call_impl
        if self._in_step:
            enter_by(module, partial(self._enter, inner))
        try:
            yield
        finally:
            if self._in_step:
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
            asked_s = self.stop.asked_for_s()
            if asked_s > self._grace_s + _LAST_S:
                with suppress(Exception):
                    self._before_exit()
                sys.stderr.write(
                    f"{name} did not end within {asked_s:.0f} s of {self.stop.reason}; the run ends without it, after "
                    "its newest checkpoint\n"
                )
                sys.stderr.flush()
                os._exit(exit_code_of(self.stop.reason))
            elif asked_s > late_s:
                late_s = float("inf")
                self.stop.interrupt()


@final
class Validations:
    """Validate the model with each of ``weights``, evaluate it with the first ones, and publish the numbers."""

    # ``owes``: prefixes of numbers that the last step still has to get; ``moves``: signs of progress for a watchdog.

    def __init__(
        self,
        par: Parallelized,
        losses: BatchLosses,
        data: Batches | None,
        evaluations: Mapping[str, Evaluation],
        settings: TrainSettings,
        weights: Mapping[str, Callable[[], AbstractContextManager[object]]],
        alive: Callable[[], None],
    ) -> None:
        self._par, self._losses, self.data, self._settings = par, losses, data, settings
        self._weights = {f"val/{name}/": enter for name, enter in weights.items()}
        first = next(iter(self._weights))
        self._weights = {_VALIDATION if prefix == first else prefix: enter for prefix, enter in self._weights.items()}
        self._alive = alive
        self._evaluations = {f"eval/{name}/": (name, evaluation) for name, evaluation in evaluations.items()}
        self.owes, self.moves = list[str](), 0
        self.side_work: SideWork | None = None

    @property
    def all(self) -> list[str]:
        """The prefixes of all numbers that a validated step gets."""
        return [*([] if self.data is None else self._weights), *self._evaluations]

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. What ended the start that saved it and the one before is not made again."""
        owed = state.get("owes", [_VALIDATION] if state.get("owes_validation") else [])
        self.owes = [prefix for prefix in owed if prefix in self.all and not state.get("makes_up")]

    def move(self) -> None:
        """Note that a validation or an evaluation goes on."""
        self.moves += 1
        self._alive()

    def pay(self, step: int, reports: Reports) -> list[str]:
        """Make what is owed for ``step``, until a stop request, and return what failed, a line each. Collective."""
        work, errors = self.side_work, list[str]()
        assert work is not None
        for prefix in list(self.owes):
            called, _ = self._evaluations.get(prefix, ("", None))
            other = prefix.removeprefix(_VALIDATION).rstrip("/")  # of which weights, if not the first ones
            name = f"evaluation {called}" if called else f"the validation{f' of {other}' if other else ''}"
            weights = self._weights.get(prefix, self._weights[_VALIDATION])
            result = work.run(name, partial(self._result, prefix), weights())
            if result is None:
                self._par.reshard()
                if work.stop.heard or not work.failures:
                    break
            self.owes.remove(prefix)
            if result is None:
                errors.append(f"{name} failed after step {step}: {'; '.join(work.failures)}")
                continue
            numbers, texts = result
            if numbers:
                reports.publish({"step": step} | {prefix + key: value for key, value in numbers.items()})
            for key, value in numbers.items():
                if not math.isfinite(value):
                    reports.note(f"step {step}: {prefix}{key} is {value}")
            for key, text in texts.items():
                reports.note(f"step {step}, {called}: {key!r} -> {text!r}")
        return errors

    def _result(self, prefix: str) -> tuple[dict[str, float], dict[str, str]] | None:
        """Return the numbers and texts of an evaluation or the validation; None: a stop request ended it."""
        if prefix in self._evaluations:
            return values_of(self._evaluations[prefix][1](self._par))
        return (numbers, {}) if (numbers := self.validate()) else None

    def validate(self) -> dict[str, float]:
        """Return the means over the validation data, see :meth:`meshpar.training.Trainer.validate`."""
        assert self.data is not None
        par, data, tokens, stopped = self._par, self.data, 0, False
        data.restart()

        def until_stopped() -> Iterator[TensorBatch]:
            nonlocal tokens, stopped
            for batch in chain.from_iterable(islice(data.one_epoch(), self._settings.validate_steps)):
                if self.side_work is None:
                    self.move()
                elif stopped := not self.side_work.goes_on():
                    return
                batch = par.split(batch)
                tokens += self._losses.objective.tokens(batch)
                yield batch

        def losses(module: nn.Module, batch: TensorBatch) -> dict[str, torch.Tensor]:
            loss_sum, more = self._losses(module, batch, data.samples)
            return {name: value.float() for name, value in {"loss": loss_sum, **more}.items()}

        with evaluating(par.module), torch.no_grad():
            sums = par.forward(until_stopped(), losses) or [{}]
            if stopped:
                return {}
            counts = (torch.tensor([float(count)], device=par.device) for count in chain([tokens], repeat(0)))
            rows = [torch.cat([*map(torch.flatten, row.values()), count]) for row, count in zip(sums, counts)]
            *summed, counted = par.total(rows).tolist()
        return {"loss": math.nan} | means({name: total.numel() for name, total in sums[0].items()}, summed, counted)
