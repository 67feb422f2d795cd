"""A simulated accelerator: streams and events that remember what waits for what, and kernels that have shapes alone.

FSDP2 runs its real program on it. :func:`install` changes torch for the process, so only the simulation's calls it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshpar._torch.simulated_device import DeviceModule, grouped_mm_shape, register_device

NAME = "simgpu"
_HALF = (torch.bfloat16, torch.float16)
_FSDP = ("gather-copy", "gather", "reduce", "replicate")
_FLASH_CHANNELS = range(8, 257, 8)


@final
class Stream:
    """A queue of work. ``last`` is the index of the last event issued on it, -1 before any in this step.

    Code that names a ``device`` gets a stream called "beside"; FSDP2 names none, and gets its four in their order.
    """

    everyone: ClassVar[list[Stream]] = []
    current: ClassVar[Stream]
    recorder: ClassVar[Any] = None
    # FSDP2 names the stream that reads gradients to the allocator by these (torch 2.15); nothing here allocates.
    stream_id = device_index = device_type = 0

    def __init__(self, *device: object, name: str = "", **__: object) -> None:
        # FSDP2 makes its streams in this order (FSDPCommContext.lazy_init), four a model, and names no device.
        count = sum(stream.name in _FSDP for stream in Stream.everyone)
        self.name: str = name or ("beside" if device else _FSDP[count % len(_FSDP)])
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
            Stream.recorder.wait(self.name, target)

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


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    before, Stream.current = Stream.current, stream or Stream.current
    try:
        yield
    finally:
        Stream.current = before


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


class _SimulatedGPU(DeviceModule):
    """The module ``torch.simgpu``."""

    Stream = Stream
    Event = StreamEvent
    stream = staticmethod(_on_stream)
    device = staticmethod(nullcontext)
    default_generators: ClassVar[tuple[_Generator, ...]] = (_Generator(),)
    kernels: Any

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


_COMPUTE = Stream(name="compute")
Stream.current = _COMPUTE


def install() -> None:
    """Register the device with torch, and let the fake process group serve it; once, for the life of the process."""
    module = _SimulatedGPU()
    register_device(NAME, module)
    setattr(torch.accelerator, "current_stream", module.current_stream)  # noqa: B010 - which FSDP2 asks, too
    module.kernels = define()  # they live as long as the device


def begin(recorder: object) -> None:
    """Start a step whose events ``recorder`` takes (None: nobody does); the work of earlier steps counts as done."""
    Stream.recorder, Stream.current = recorder, _COMPUTE
    for stream in Stream.everyone:
        stream.last = -1


@contextmanager
def kernels_of(target: str, *, documents: bool = False) -> Iterator[None]:
    """Run the attention and RMS norm kernels of ``target``; ``documents``: transformers masks by ``position_ids``."""
    # Not a TorchFunctionMode: torch 2.13's autograd threads of a device written in Python abort under one.
    attention, norm = F.scaled_dot_product_attention, F.rms_norm
    masks = sys.modules.get("transformers.masking_utils")  # whose models are in the job, if it is there
    packed = None if documents else getattr(masks, "find_packed_sequence_indices", None)
    F.scaled_dot_product_attention = partial(_attend, target)
    if target == "cuda":
        F.rms_norm = partial(_normalise, norm)
    if packed is not None:
        # Where it cannot read position_ids it supposes packed samples, whose mask flash attention cannot take.
        setattr(masks, packed.__name__, lambda position_ids: None)
    try:
        yield
    finally:
        if packed is not None:
            setattr(masks, packed.__name__, packed)
        F.scaled_dot_product_attention, F.rms_norm = attention, norm


def _attend(
    target: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    aten, mask, channels = torch.ops.aten, attn_mask, query.shape[-1]
    if target == "cpu" and not dropout_p:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
    if target == "cuda" and query.dtype in _HALF and mask is None and channels in _FLASH_CHANNELS:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if target == "cuda" and query.shape[1] == key.shape[1]:
        bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    # Step by step, as torch's math kernel.
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (1.0 / math.sqrt(channels) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


def _normalise(
    plain: Any, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Take the fused kernel where CUDA has it: one dim, one dtype."""
    if len(normalized_shape) == 1 and weight is not None and weight.dtype == x.dtype:
        return _RMSNorm.apply(x, weight)
    return plain(x, normalized_shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """One kernel forward, which keeps its input and one number a row, and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y, scale = torch.ops.meshpar_forecast.rms_norm(x, weight)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.meshpar_forecast.rms_norm_backward(grads[0], *ctx.saved_tensors)


_ONE_KERNEL = ("silu_backward", "mish_backward")
"""Operators that are one kernel on every real device and would be taken apart on an unknown one."""


def define() -> list[Any]:
    """Define the kernels of real devices as operators that have shapes only; the result keeps them alive."""
    whole = torch.library.Library("aten", "IMPL")
    for name in _ONE_KERNEL:
        whole.impl(name, lambda grad, x: torch.empty_like(x), "PrivateUse1")
    whole.impl("_grouped_mm", grouped_mm_shape, "Meta", allow_override=True)  # torch 2.11 has a shape of its own
    library = torch.library.Library("meshpar_forecast", "DEF")
    library.define("rms_norm(Tensor x, Tensor weight) -> (Tensor, Tensor)")
    library.define("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)")

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)

    def backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(weight)

    library.impl("rms_norm", forward, "Meta")
    library.impl("rms_norm_backward", backward, "Meta")
    return [whole, library]
