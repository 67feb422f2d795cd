"""A simulated accelerator on a torch without one: streams and events that only remember what waits for what.

FSDP2 drives its own all-gather, reduce-scatter and all-reduce streams through ``torch.<device>``; with this device in their place its
real program runs, and the recorder sees which stream each operator was issued on. :func:`install` changes torch for the whole
process: only the simulation's own process calls it.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch

NAME = "simgpu"


@final
class Stream:
    """A queue of work. ``last`` is the index of the last event issued on it, -1 before any in this step."""

    everyone: ClassVar[list[Stream]] = []
    current: ClassVar[Stream]
    recorder: ClassVar[Any] = None
    # FSDP2 names the stream that reads gradients to the allocator by these (torch 2.15); nothing here allocates.
    stream_id = device_index = device_type = 0

    def __init__(self, *_: object, name: str = "", **__: object) -> None:
        # FSDP2 makes its streams in this order (FSDPCommContext.lazy_init), four a model.
        self.name = name or ("gather-copy", "gather", "reduce", "replicate")[(len(Stream.everyone) - 1) % 4]
        self.last = -1
        Stream.everyone.append(self)

    def wait_stream(self, other: Stream) -> None:
        """Go on after what ``other`` has been given so far."""
        self._wait(other.last)

    def wait_event(self, event: StreamEvent) -> None:
        """Go on after ``event``."""
        self._wait(event.at)

    def record_event(self, event: StreamEvent | None = None) -> StreamEvent:
        """Return an event after what this stream has been given so far."""
        event = event or StreamEvent()
        event.at = self.last
        return event

    def _wait(self, target: int) -> None:
        if Stream.recorder is not None and target >= 0:
            Stream.recorder.wait(self, target)

    def synchronize(self) -> None:
        """The host runs ahead in any case: the step's time is that of its streams."""

    def query(self) -> bool:
        return True


@final
class StreamEvent:
    """A point in a stream: the index of the last event issued on it by then."""

    def __init__(self, *_: object, **__: object) -> None:
        self.at = -1

    def record(self, stream: Stream | None = None) -> None:
        self.at = (stream or Stream.current).last

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.current).wait_event(self)

    def synchronize(self) -> None:
        """See :meth:`Stream.synchronize`."""

    def query(self) -> bool:
        return True


@final
class _On:
    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = Stream.current
        Stream.current = self.stream or Stream.current

    def __exit__(self, *_: object) -> None:
        Stream.current = self.before


@final
class _Nothing:
    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@final
class _Generator:
    """A random state that is never drawn from: operators have shapes here, no values."""

    def get_state(self) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def set_state(self, state: torch.Tensor) -> None: ...

    def initial_seed(self) -> int:
        return 0

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None: ...

    def manual_seed(self, seed: int) -> None: ...


def _module() -> Any:
    """Return the object that becomes ``torch.simgpu``."""
    from torch.utils.backend_registration import _DummyBackendModule

    class Module(_DummyBackendModule):
        Stream = Stream
        Event = StreamEvent
        stream = staticmethod(_On)
        device = staticmethod(_Nothing)
        default_generators: ClassVar[tuple[_Generator, ...]] = (_Generator(),)

        def current_stream(self, device: object = None) -> Any:
            return Stream.current

        def default_stream(self, device: object = None) -> Any:
            return _COMPUTE

        def set_device(self, device: object) -> None: ...

        def synchronize(self, device: object = None) -> None: ...

        def get_rng_state(self, device: object = None) -> torch.Tensor:
            return torch.empty(16, dtype=torch.uint8, device="cpu")

        def set_rng_state(self, state: torch.Tensor, device: object = None) -> None: ...

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    return Module()


_COMPUTE = Stream(name="compute")
Stream.current = _COMPUTE


def install() -> None:
    """Register the device with torch, and let the fake process group serve it. Once a process; changes torch for good."""
    import meshpar.forecasting.kernels as kernels
    import meshpar.forecasting.private as private

    module = _module()
    private.register_device(NAME, module)
    module.kernels = kernels.define()  # they live as long as the device


def begin(recorder: object) -> None:
    """Start a step whose events ``recorder`` takes; None: leave waits unheard. The work of earlier steps counts as done."""
    Stream.recorder, Stream.current = recorder, _COMPUTE
    for stream in Stream.everyone:
        stream.last = -1
