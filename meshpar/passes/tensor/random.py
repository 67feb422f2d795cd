"""Random state that follows the tensor-parallel axis: one to save, and for parts one derived from it at each use."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar, final

import torch
from torch import nn

from meshpar._torch.calls import eager
from meshpar._torch.in_parts import BEFORE_PART
from meshpar._torch.simulated_device import has_values
from meshpar._torch.tensors import Dropout
from meshpar.core import runtime
from meshpar.core.errors import MeshparError

R = TypeVar("R")

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


def mix(*numbers: int) -> int:
    """Return one 63-bit seed made of several numbers (the finalizer of splitmix64, Steele et al. 2014, folded)."""
    state = 0
    for number in numbers:
        state = (state + number + _GOLDEN) & ((1 << 64) - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        state ^= state >> 31
    return state & _MASK


def seed(device: torch.device, value: int) -> None:
    """Seed the default generators of the host and of ``device``; ``torch.manual_seed`` takes 2 ms without a GPU."""
    torch.default_generator.manual_seed(value)
    if not runtime.on_host(device):
        torch.get_device_module(device).manual_seed(value)


def is_dropout(module: nn.Module) -> bool:
    """Return whether a module is a dropout that draws random numbers in training."""
    return isinstance(module, Dropout) and module.p > 0.0


def draws_random(module: nn.Module) -> bool:
    """Return whether some dropout module draws random numbers."""
    return any(map(is_dropout, module.modules()))


def digest(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return a number for a generator's state, ``device``'s by default, 0-dim int64 there; waits for nothing."""
    return torch.tensor(zlib.crc32(bytes((generator or _generator(device)).get_state().tolist())), device=device)


def states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the default generators of the host and of ``device``; waits for nothing."""
    generators = [torch.default_generator, *([] if runtime.on_host(device) else [_generator(device)])]
    return [generator.get_state() for generator in generators]


def set_states(device: torch.device, values: list[torch.Tensor]) -> None:
    """Put back what :func:`states` returned."""
    torch.default_generator.set_state(values[0])
    for value in values[1:]:
        _generator(device).set_state(value)


def check_declared(device: torch.device, before: list[torch.Tensor], who: str) -> None:
    """Refuse random numbers that a forward has drawn since the states ``before``, which the model does not declare."""
    if not _equal(before, states(device)):
        raise MeshparError(
            "the forward draws random numbers, and the model has no dropout module that does; set "
            f"ModelLayout(dropout=True), with which {who} draws its own"
        )


def draw_seeds(device: torch.device, count: int) -> list[int]:
    """Return ``count`` seeds, as that many calls for one do; waits for nothing."""
    generator = _generator(device)
    if runtime.on_host(device):
        return torch.randint(_MASK, (count,), generator=generator).tolist()
    # Reading a number drawn on the device would wait for it; seed and offset are known on the host.
    offset = generator.get_offset()
    generator.set_offset(offset + 4 * count)
    return [mix(generator.initial_seed(), offset + 4 * number) for number in range(count)]


@final
class SplitState:
    """Tell random numbers for a rank's part of activations from those for what the axis's ranks share."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._shared: torch.Tensor | None = None
        # of each of several parts, and the number of the one that draws
        self._states, self._drawing = list[torch.Tensor](), 0

    @eager
    def part(self, device: torch.device, *coordinates: int) -> None:
        """Draw for parts from here on: ``device``'s default generator gets a state of each part's own."""
        if self._shared is None:
            self._device, generator = device, _generator(device)
            (drawn,) = draw_seeds(device, 1)
            self._shared = generator.get_state()
            if coordinates[1:]:
                self._drawing = 0
                self._states = [generator.manual_seed(mix(drawn, part + 1)).get_state() for part in coordinates]
                BEFORE_PART.set(self._begin_part)
            generator.manual_seed(mix(drawn, coordinates[0] + 1))

    def _begin_part(self, number: int) -> None:
        generator = _generator(self._device)
        self._states[self._drawing] = generator.get_state()
        generator.set_state(self._states[number])
        self._drawing = number

    @eager
    def join(self) -> None:
        """Draw what the ranks share from here on; of no effect where they do so already."""
        if self._shared is not None:
            _generator(self._device).set_state(self._shared)
            self._shared = None
            if self._states:
                self._states.clear()
                BEFORE_PART.set(None)


@final
class LossState:
    """Let ``loss`` draw the same random numbers on all stages of a pipeline, and the forward of each stage its own."""

    def __init__(self) -> None:
        self._begun = dict[int, list[torch.Tensor]]()  # micro-batch -> the states with which its loss began
        self._after: list[torch.Tensor] | None = None  # the states when the module returned
        self._outside: list[torch.Tensor] | None = None  # the states to which a later chunk's loss returns

    @eager
    def begin(self, device: torch.device, number: int, *, first: bool, last: bool) -> None:
        """Begin the loss of a micro-batch; each chunk of a rank begins it with the same states."""
        self._after = self._outside = None
        if first and not last:
            self._begun[number] = states(device)
        elif not first:
            self._outside = states(device)
            set_states(device, self._begun.pop(number) if last else self._begun[number])

    @eager
    def call(self, device: torch.device, stage: int | None, *, draws: bool, run: Callable[[], R]) -> R:
        """Run the forward of ``stage``, whose draws are its own (None: by sample); all states go on by one draw."""
        before, split = states(device), SplitState()
        try:
            if draws and stage is not None:
                split.part(device, stage)
            result = run()
        finally:
            split.join()
            self._after = states(device)
        if not draws and stage is not None:
            check_declared(device, before, "each stage of pp")
        return result

    @eager
    def end(self, device: torch.device, *, with_call: bool) -> None:
        """End the loss of a micro-batch, ``with_call``: by the module's call; refuse draws that come after it, which
        other stages do not make.
        """
        if not with_call and self._after is not None and not _equal(self._after, states(device)):
            raise MeshparError(
                "loss draws random numbers after it has called the module, on the last stage of pp alone; draw them "
                "before the call"
            )
        if self._outside is not None:
            set_states(device, self._outside)


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return whether states are the same; those of a simulation have no values, and nothing is drawn there."""
    return not all(map(has_values, one)) or all(map(torch.equal, one, other))


def _generator(device: torch.device) -> torch.Generator:
    if runtime.on_host(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[device.index if device.index is not None else module.current_device()]
