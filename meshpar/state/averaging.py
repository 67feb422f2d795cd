"""Averaged: a moving average of a parallel module's parameters, exponential or over all steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar._torch.tensors import foreach_lerp_
from meshpar.core.errors import MeshparError
from meshpar.passes.pipeline.portion import tensors_elsewhere
from meshpar.process.waiting import reads_of
from meshpar.state.full import misfits
from meshpar.step.forward import run_of
from meshpar.tensors.placements import local_tensor, placed_like, whole_tensor


class Resharded(Protocol):
    """The part of :class:`meshpar.Parallelized` that an average uses."""

    @property
    def module(self) -> nn.Module: ...
    def reshard(self) -> None: ...


Decay = float | Callable[[int], float]
_MADE: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Averaged]] = weakref.WeakKeyDictionary()


def averages_of(module: nn.Module) -> list[Tensor]:
    """Return the tensors of all moving averages of a module's parameters."""
    return [tensor for average in _MADE.get(module, ()) for tensor in average._averages.values()]


@final
class Averaged:
    """Keep a moving average of the parameters, each rank of its own shards, without communication.

    Equals ``torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`` in one process: the
    first :meth:`update` copies, every later one computes ``average = decay * average + (1 - decay) * parameter``.

    >>> averaged = Averaged(par, decay=0.999)                     # doctest: +SKIP
    >>> optimizer.step(); averaged.update()                       # doctest: +SKIP
    >>> with averaged.swapped(): evaluate(par.module)             # doctest: +SKIP

    Buffers (statistics of batch norm) are not averaged, as by ``AveragedModel(use_buffers=False)``; integers never are.
    Checkpoint averages by ``CheckpointManager.save(averages={"ema": averaged})`` and ``restore``.

    Args:
        par: the parallel module, with values (after ``materialize``).
        decay: weight of the previous average, 0 to 1, or a function of the number of updates so far (1, 2, ...) that
            returns it. None: 0.999, or ``power``.
        power: update t has the decay ``(1 - 1/t) ** (power + 1)`` (Karras et al., arXiv 2312.02696, section 3.1), so
            the average covers a share of the run that does not depend on its length. 16.97 and 6.94 are their relative
            widths 0.05 and 0.10. 0 is the mean over all updates (Izmailov et al., arXiv 1803.05407).
        every: calls of :meth:`update` from one that averages to the next.
        after: number of first calls of :meth:`update` that do not average; until then it is the present values.
        device: where the average is kept: ``"cpu"`` is host memory; None: beside the parameters.
        dtype: dtype of the average; None: each parameter's own. bfloat16 rounds increments away for a decay near 1.
        buffers: average floating-point buffers too.
        from_start: start from the values at construction, so that the first :meth:`update` averages, too; a function
            as decay then gets 0 first. The default starts from the values at the first update.

    Attributes:
        updates: how often :meth:`update` averaged.
        calls: how often :meth:`update` was called.

    Raises:
        MeshparError: a parameter has no values, a decay outside of 0 to 1 or beside a power, a power or number of calls
            below 0, or a dtype that is not floating-point.
    """

    def __init__(
        self,
        par: Resharded,
        decay: Decay | None = None,
        *,
        power: float | None = None,
        every: int = 1,
        after: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        from_start: bool = False,
    ) -> None:
        if decay is not None and power is not None:
            raise MeshparError(f"an average got decay={decay!r} and power={power!r}; pass one of them")
        if (power or 0) < 0 or every < 1 or after < 0:
            got = f"power={power}, every={every}, after={after}"
            raise MeshparError(f"an average got {got}; expected 0 or more, 1 or more, 0 or more")
        if dtype is not None and not dtype.is_floating_point:
            raise MeshparError(f"the average's dtype is {dtype}; expected a floating-point dtype such as torch.float32")
        self._par, self._module = par, par.module
        reads_of(self._module).check("an average")
        self._decay: Decay = 0.999 if decay is None else decay
        if power is not None:
            self._decay = lambda updates: (updates / (updates + 1)) ** (power + 1)
        self._buffers, self._every, self._after = buffers, every, after
        self._swapped, self._copies_first = False, not from_start
        self.updates = self.calls = 0
        if not callable(self._decay):
            self._weight()
        tensors = self._tensors()
        if unmade := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise MeshparError(
                f"{unmade[0]} has no values yet; call par.materialize(seed=...) or (weights=...) before averaging"
            )
        with torch.no_grad():
            self._averages: dict[str, Tensor] = {}
            for name, tensor in tensors.items():
                stored = tensor.dtype if dtype is None or tensor.is_complex() else dtype
                self._averages[name] = tensor.detach().clone().to(device, stored)
        _MADE.setdefault(self._module, weakref.WeakSet()).add(self)

    @torch.no_grad()
    def update(self) -> None:
        """Average the present values, unless ``every`` or ``after`` leave this call out; call it after each step.

        Raises:
            MeshparError: inside of :meth:`swapped`, or for a decay outside of 0 to 1.
        """
        self._refuse_inside("update()")
        self.calls += 1
        if self.calls <= self._after or self.calls % self._every:
            return
        reads_of(self._module).wait("an average's update()")
        if not self._is_present():
            weight, alike = self._weight(), dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]]()
            for average, value in self._pairs():
                if (average.dtype, average.device) == (value.dtype, value.device):
                    alike.setdefault((average.device, average.dtype), []).append((average, value))
                else:
                    average.lerp_(value.to(average.device, average.dtype), weight)
            for pairs in alike.values():
                averages, values = zip(*pairs)
                foreach_lerp_(averages, values, weight)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the module the averaged values inside of the ``with`` block, and its own back afterwards, bit for bit.

        Raises:
            MeshparError: already inside of it; or, at its end, for parameters that were changed inside.
        """
        self._refuse_inside("swapped()")
        reads = reads_of(self._module)
        reads.wait("swapped()")
        self._is_present()
        self._swapped = True
        try:
            with ExitStack() as back:
                versions: dict[str, tuple[Tensor, int]] = {}
                for name, tensor in self._tensors().items():
                    back.callback(_exchanged(tensor, self._averages[name]))
                    # Of the tensor itself: what a DTensor's operators do to its local part does not count there.
                    versions[name] = tensor, tensor._version
                back.callback(self._par.reshard)
                back.callback(reads.wait, "the end of swapped()")
                yield
                changed = [name for name, (tensor, version) in versions.items() if tensor._version != version]
        finally:
            self._swapped = False
        if changed:
            raise MeshparError(
                f"{changed[0]} was changed inside of swapped(), and the change is lost; expected evaluation only: "
                "train after the block"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the average itself, placed and named as the parameters, and the numbers of updates and calls.

        ``torch.distributed.checkpoint.load`` reads into it on any mesh; then call :meth:`load_state_dict`.

        Raises:
            MeshparError: inside of :meth:`swapped`.
        """
        self._refuse_inside("state_dict()")
        reads_of(self._module).check("an average's state_dict()")
        self._is_present()
        counts = {"updates": torch.tensor(self.updates), "calls": torch.tensor(self.calls)}
        return {"averages": dict(self._averages), **counts}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned, or whole tensors. Collective where they are placed otherwise.

        Raises:
            MeshparError: before anything is changed, naming what is missing, unexpected or of another shape; or inside
                of :meth:`swapped`.
        """
        self._refuse_inside("load_state_dict()")
        elsewhere = tensors_elsewhere(run_of(self._module)).keys() - self._averages.keys()
        values = {name: tensor for name, tensor in state["averages"].items() if name not in elsewhere}
        if problems := misfits(self._averages, values):
            raise MeshparError("\n  ".join(["this average does not fit the module; nothing was changed:", *problems]))
        reads_of(self._module).wait("an average's load_state_dict()")
        for name, average in self._averages.items():
            value = values[name]
            value = placed_like(value, average, ()) if isinstance(average, DTensor) else whole_tensor(value)
            local_tensor(average).copy_(local_tensor(value))
        self.updates = int(state["updates"])
        self.calls = int(state.get("calls", self.updates))

    def _tensors(self) -> dict[str, Tensor]:
        """Return what is averaged, by name, tied tensors once."""
        self._par.reshard()
        tensors: dict[str, Tensor] = dict(self._module.named_parameters())
        if self._buffers:
            tensors |= dict(self._module.named_buffers())
        return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() or tensor.is_complex()}

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(local_tensor(self._averages[name]), local_tensor(tensor)) for name, tensor in self._tensors().items()]

    @torch.no_grad()
    def _is_present(self) -> bool:
        """Return whether nothing is averaged yet; the average is then the present values, which this copies."""
        if self.updates or not self._copies_first:
            return False
        for average, value in self._pairs():
            average.copy_(value)
        return True

    def _weight(self) -> float:
        """Return the share of the present values in the next average."""
        decay = float(self._decay(self.updates) if callable(self._decay) else self._decay)
        if not 0.0 <= decay <= 1.0:
            raise MeshparError(f"the decay is {decay}; expected a number from 0 to 1, such as 0.999")
        return 1.0 - decay

    def _refuse_inside(self, what: str) -> None:
        if self._swapped:
            raise MeshparError(
                f"{what} was called inside of swapped(), where the module holds the average; call it after the with "
                "block"
            )


@torch.no_grad()
def _exchanged(tensor: Tensor, average: Tensor) -> Callable[[], object]:
    """Write an average into a tensor, and return what gives it its values back; a copy of one tensor at a time."""
    before = local_tensor(tensor).clone()
    local_tensor(tensor).copy_(local_tensor(average))
    if average.dtype != tensor.dtype:
        return torch.no_grad()(lambda: local_tensor(tensor).copy_(before))
    local_tensor(average).copy_(before)
    return lambda: _exchanged(tensor, average)
