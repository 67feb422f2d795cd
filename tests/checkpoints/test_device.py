"""Saves and restores of tensors on an accelerator, without one: copies, waits, pinned memory, order."""

import gc
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshpar.checkpoints import CheckpointManager
from meshpar.checkpoints.format.writing import TensorPart, _Room
from meshpar.checkpoints.steps import background
from meshpar.checkpoints.steps import saving as saves
from meshpar.checkpoints.steps.background import PartSamples, Stager
from meshpar.checkpoints.steps.planning import Planning
from meshpar.checkpoints.steps.ranks import SavingRanks
from meshpar.checkpoints.steps.saving import Noted, Saving
from meshpar.checkpoints.storage import files
from meshpar.checkpoints.storage.checksums import crc32
from meshpar.checkpoints.storage.disk import ReadFile
from meshpar.checkpoints.storage.files import Box, Turns
from meshpar.checkpoints.storage.place import place
from meshpar.core import runtime
from meshpar.state.offloading import Slab
from tests.checkpoints.test_commit import Job

DEVICE = torch.device("meta")
"""Stands for an accelerator: whoever reads a value of its tensors on the host is refused by torch."""


class Copies(TorchDispatchMode):
    """Notes copies from the device to the host, which bring no values: (to, from, whether the host goes on)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[0].is_cpu and args[1].device == DEVICE:
            self.seen.append((args[0], args[1], args[2] if len(args) > 2 else False))
            return args[0]
        return function(*args, **(kwargs or {}))


def parts_on_the_device() -> list[TensorPart]:
    parts = [
        TensorPart(str(at), (), torch.empty(shape, device=DEVICE))
        for at, shape in enumerate([(64, 32), (129,), (), (3, 5, 7)])
    ]
    parts.append(TensorPart("strided", (), torch.empty(16, 16, device=DEVICE).t()[::2]))
    return [*parts, TensorPart("on the host", (), torch.ones(100))]


def test_samples_are_taken_without_a_wait_and_compared_on_the_host():
    parts, stager = parts_on_the_device(), Stager()
    samples = PartSamples(parts)
    assert [part.tensor.device for part in samples.parts] == [DEVICE, torch.device("cpu")]
    with Copies() as copies:
        staged = stager.stage([*parts, *samples.parts], DEVICE)
    assert [source.shape for _, source, _ in copies.seen] == [
        part.tensor.shape for part in (*parts[:-1], samples.parts[0])
    ]
    assert all(goes_on for *_, goes_on in copies.seen), "the host waits once, at the end"
    assert torch.equal(staged[-1].tensor, samples.parts[1].tensor) and torch.equal(staged[5].tensor, parts[5].tensor)
    pinned, plain = (stager._slabs[pin].memory for pin in (True, False))
    assert pinned.nbytes == sum(-(-source.nbytes // 64) * 64 for _, source, _ in copies.seen)
    assert plain.nbytes == 448 + -(-samples.parts[1].tensor.nbytes // 64) * 64
    assert {to.untyped_storage().data_ptr() for to, *_ in copies.seen} == {pinned.data_ptr()}


def test_a_thread_that_pins_memory_does_so_on_this_ranks_device(monkeypatch):
    """A thread begins on the first device, where pinning memory would open a context for each rank of the machine."""
    current: dict[str, list[torch.device]] = {}
    monkeypatch.setattr(
        runtime, "make_current", lambda device: current.setdefault(threading.current_thread().name, []).append(device)
    )
    monkeypatch.setattr(torch, "Stream", lambda device: nullcontext())

    def pinned(nbytes, *, pin):
        assert not pin or not nbytes or current[threading.current_thread().name]
        return Slab(nbytes, pin=False)

    monkeypatch.setattr(background, "Slab", pinned)
    parts = parts_on_the_device()

    def work():
        with Copies():
            Stager().stage(parts, DEVICE)

    def write():
        with Copies(), suppress(AttributeError):  # the stream that stands for the device's has nothing to wait for
            next(_Room().blocks(parts[0].tensor))

    def read():
        with suppress(RuntimeError):  # of torch.Event, which DEVICE has not
            Turns(DEVICE).tile(torch.empty(2))

    for act in (work, write, read):
        thread = threading.Thread(target=act, name=act.__name__)
        thread.start()
        thread.join()
    assert current == {"work": [DEVICE], "write": [DEVICE], "read": [DEVICE]}


def test_a_tensor_that_is_written_after_its_sample_is_named():
    parts = [TensorPart(name, (), torch.arange(300.0).reshape(20, 15)) for name in "abc"]
    samples = PartSamples(parts)
    assert samples.written(samples.parts, samples.of(parts), parts) == []
    parts[1].tensor.data.mul_(2)
    assert samples.written(samples.parts, samples.of(parts), parts) == ["b"]


def test_a_save_takes_nothing_from_the_device_before_it_returns(tmp_path):
    """Its plan has names, shapes and samples; values are copied beside training."""
    job = Job(nn.Linear(30, 20, device=DEVICE), device=DEVICE)
    saving = Saving(SavingRanks(1), place(tmp_path), Noted(step=1, extra={}, metrics={}), Planning())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_meta", False)
        patch.setattr(saves, "random_state", lambda *_: {})
        saving.plan(job, torch.optim.SGD(job.module.parameters(), lr=0.1), later=True)
    assert [part.tensor.device for part in saving._samples.parts] == [DEVICE]


def test_a_pinned_slab_has_the_bytes_that_it_is_asked_for_and_is_given_back(monkeypatch):
    calls: list[tuple[str, int, int]] = []
    cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaHostRegister=lambda at, size, flags: calls.append(("pin", at, size)) or 0,
        cudaHostUnregister=lambda at: calls.append(("unpin", at, 0)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: result)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    slab = Slab(5000, pin=True)
    memory = slab.memory
    assert memory.nbytes == 5000 and memory.data_ptr() % 4096 == 0 and calls == [("pin", memory.data_ptr(), 5000)]
    view = memory[64:].view(torch.uint8).fill_(3)
    del slab
    gc.collect()
    assert calls[1:] == [("unpin", memory.data_ptr(), 0)]
    assert view.sum() == 3 * len(view), "memory that is still used stays"
    Slab(0, pin=True)
    assert len(calls) == 2


class LateDevice(TorchDispatchMode):
    """A device that copies only when the host waits for it."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__()
        self.out, self.values, self.blocking = (
            out,
            torch.zeros(out.untyped_storage().nbytes() // out.itemsize, dtype=out.dtype),
            0,
        )
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        device = self

        class Event:
            def __init__(self, where: torch.device) -> None:
                assert where == DEVICE
                self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

            def record(self) -> None:
                self.copies, device.pending = device.pending, []

            def synchronize(self) -> None:
                for to, tile in self.copies:
                    device.values.as_strided(to.shape, to.stride(), to.storage_offset()).copy_(tile)
                self.copies = []

        self.event = Event

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[0].device == DEVICE:
            self.blocking += not args[2]
            self.pending.append((args[0], args[1]))
            return args[0]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("spans", "dtype"),
    [
        (((0, 100), (0, 60)), torch.float32),
        (((0, 100), (0, 60)), torch.float64),
        (((7, 90), (0, 60)), torch.float32),
        (((7, 90), (13, 60)), torch.bfloat16),
        (((99, 100), (59, 60)), torch.float32),
    ],
    ids=["whole", "cast", "rows", "columns cast", "one"],
)
def test_a_restore_to_a_device_fills_a_tile_after_its_last_copy_has_ended(tmp_path, monkeypatch, spans, dtype):
    whole = torch.randn(100, 60)
    (tmp_path / "file").write_bytes(bytes(64) + whole.numpy().tobytes())
    box = Box(ReadFile(tmp_path / "file"), 64, (100, 60), torch.float32, "whole", crc32(whole.numpy().tobytes()))
    monkeypatch.setattr(files, "TILE_BYTES", 1000)
    want = whole[tuple(slice(*span) for span in spans)].to(dtype)
    out = torch.empty(3, *want.shape[::-1], dtype=dtype, device=DEVICE)[
        1
    ].mT  # other strides, in the middle of other memory
    device = LateDevice(out)
    monkeypatch.setattr(torch, "Event", device.event)
    with device:
        box.read(spans, out)
    got = device.values.as_strided(out.shape, out.stride(), out.storage_offset())
    assert torch.equal(got, want) and not device.blocking and not device.pending
    assert device.values.count_nonzero() == want.count_nonzero(), "nothing else was written"


@pytest.mark.gpu
def test_a_background_save_and_a_restore_on_a_gpu(tmp_path):
    device = torch.device("cuda")
    torch.manual_seed(0)
    job = Job(nn.Sequential(nn.Linear(3000, 2000), nn.Linear(2000, 100)).to(device), device=device)
    optimizer = torch.optim.AdamW(job.module.parameters(), lr=0.1)
    job.module(torch.ones(1, 3000, device=device)).sum().backward()
    optimizer.step()
    want = {name: value.clone() for name, value in job.module.state_dict().items()}
    with CheckpointManager(tmp_path, async_=True) as manager:
        for number in (1, 2):
            manager.save(number, job, optimizer)
            job.module(torch.ones(1, 3000, device=device)).sum().backward()
            optimizer.step()
            manager.wait()
            slab = manager._stager._slabs[True].memory
            assert slab.is_pinned() and slab.nbytes < 1.01 * 3 * sum(tensor.nbytes for tensor in want.values())
        manager.restore(job, step=1, verify="full")
    assert all(torch.equal(value, want[name]) for name, value in job.module.state_dict().items())
