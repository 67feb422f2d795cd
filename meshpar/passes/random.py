"""Random state that follows the tensor-parallel axis.

Where activations are replicated, every rank of the axis must draw the same dropout mask; where they are shards, each
rank must draw its own. The second state is derived from the first at the moment of use, so there is one state to save,
to restore and to replay under recomputation (Megatron-LM keeps a second tracked state instead).
"""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import nn

from meshpar._torch.calls import eager
from meshpar.core import runtime

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


def mix(*numbers: int) -> int:
    """Return one 63-bit seed made of several numbers (the finalizer of splitmix64, Steele et al. 2014, folded over
    them).
    """
    state = 0
    for number in numbers:
        state = (state + number + _GOLDEN) & ((1 << 64) - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        state ^= state >> 31
    return state & _MASK


def seed(device: torch.device, value: int) -> None:
    """Seed the default generators of the host and of ``device``.

    ``torch.manual_seed`` seeds every kind of device, and on a machine without one keeps each call with its stack for
    later: 2 ms a call.
    """
    torch.default_generator.manual_seed(value)
    if not runtime.on_host(device):
        torch.get_device_module(device).manual_seed(value)


def forked(device: torch.device) -> AbstractContextManager[None]:
    """Put the states of the default generators of the host and of ``device`` back at the end of the ``with`` block."""
    devices, kind = ([], "cuda") if runtime.on_host(device) else ([device], device.type)
    return torch.random.fork_rng(devices, device_type=kind)


def is_dropout(module: nn.Module) -> bool:
    """Tell whether a module is a dropout that draws random numbers in training."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0


def draws_random(module: nn.Module) -> bool:
    """Tell whether some dropout module draws random numbers."""
    return any(map(is_dropout, module.modules()))


def digest(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return a number for the state of a generator, ``device``'s default one, as a 0-dim int64 tensor there; waits
    for nothing.
    """
    return torch.tensor(zlib.crc32(bytes((generator or _generator(device)).get_state().tolist())), device=device)


@final
class SplitState:
    """Tell random numbers for a rank's part of activations from those for what the axis's ranks share."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._shared: torch.Tensor | None = None

    @eager
    def part(self, device: torch.device, coordinate: int) -> None:
        """Draw for a part from here on: switch ``device``'s default generator to a state of this ``coordinate``'s
        own.
        """
        if self._shared is None:
            self._device = device
            self._shared = _fork(device, coordinate)

    @eager
    def join(self) -> None:
        """Draw what the ranks share from here on; of no effect where they do so already."""
        if self._shared is not None:
            _generator(self._device).set_state(self._shared)
            self._shared = None


def _fork(device: torch.device, coordinate: int) -> torch.Tensor:
    """Switch ``device``'s default generator to a state of this ``coordinate``'s own, and return the state that the
    axis shares.
    """
    generator = _generator(device)
    if runtime.on_host(device):
        drawn = int(torch.randint(_MASK, (), generator=generator))
        shared = generator.get_state()
    else:
        # Reading a number drawn on the device would wait for it; seed and offset are known on the host.
        offset = generator.get_offset()
        drawn = mix(generator.initial_seed(), offset)
        generator.set_offset(offset + 4)
        shared = generator.get_state()
    generator.manual_seed(mix(drawn, coordinate + 1))
    return shared


def _generator(device: torch.device) -> torch.Generator:
    if runtime.on_host(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[device.index if device.index is not None else module.current_device()]
