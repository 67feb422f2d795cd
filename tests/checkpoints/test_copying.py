"""Copies from file to file: the same bytes in every way, checked, and the cheapest way is found."""

import ctypes
import errno
import mmap
import os
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from meshpar.checkpoints.format.copying import TURN_BYTES, WAYS, Copier, Pace, Way
from meshpar.checkpoints.storage import disk, files
from meshpar.checkpoints.storage.checksums import crc32
from meshpar.checkpoints.storage.disk import ReadFile, WrittenBehind
from meshpar.checkpoints.storage.files import Box, memory_of
from meshpar.core.errors import CheckpointError

CASTS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.bfloat16),
]


def stored(path, tensor, start=192):
    """Write a tensor at a byte of a file, and return where it lies with its checksum."""
    path.write_bytes(b"x" * start + bytes(memory_of(tensor)) + b"y" * 5)
    return Box(ReadFile(path), start, tuple(tensor.shape), tensor.dtype, "w", crc32(memory_of(tensor)))


def copied(box, dtype, position, ways, monkeypatch):
    monkeypatch.setattr("meshpar.checkpoints.format.copying.Pace", lambda: Pace(ways))
    out, advances = bytearray(), []
    Copier(out.extend, advances.append).copy(box, dtype, position)
    assert sum(advances) == len(out)
    return bytes(out)


@pytest.mark.parametrize("ways", [*((way,) for way in WAYS), WAYS], ids=str)
@pytest.mark.parametrize(("own", "dtype"), CASTS)
@pytest.mark.parametrize("start", [192, 193])
def test_every_way_writes_the_same_bytes(tmp_path, monkeypatch, ways, own, dtype, start):
    tensor = torch.randn(1111, 2503).to(own)  # several turns, the last one in part
    expected = tensor.to(dtype)
    assert copied(stored(tmp_path / "file", tensor, start), dtype, 328, ways, monkeypatch) == bytes(memory_of(expected))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flipped_bit_is_found_in_every_way(tmp_path, monkeypatch, way, dtype):
    box = stored(tmp_path / "file", torch.randn(600, 2000))
    with (tmp_path / "file").open("r+b") as file:
        file.seek(192 + 4_000_001)
        file.write(b"\x5a\x5b")
    with pytest.raises(CheckpointError, match=r"is damaged: w, .*expected the CRC-32"):
        copied(box, dtype, 328, (way,), monkeypatch)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("summed", [True, False])
def test_a_file_that_is_written_during_the_copy_is_an_error_although_its_sum_may_be_right(
    tmp_path, monkeypatch, way, summed
):
    monkeypatch.setattr("meshpar.checkpoints.format.copying.Pace", lambda: Pace((way,)))
    tensor, path, out = torch.randn(600, 2000), tmp_path / "file", bytearray()
    box = stored(path, tensor)
    os.utime(path, (1e9, 1e9))
    box = replace(box, file=ReadFile(path), crc32=box.crc32 if summed else None)

    def overwritten(data: memoryview) -> None:
        """Write other bytes in place, and the right ones again before they are summed."""
        if not out:
            right = path.read_bytes()
            for kept in (bytes(len(right)), right):
                with path.open("r+b") as file:
                    file.write(kept)
                if kept is not right:
                    out.extend(data)
        else:
            out.extend(data)

    message = r"file was written while it was read; .* when no other process writes it"
    with pytest.raises(CheckpointError, match=message):
        Copier(overwritten, lambda _: None).copy(box, torch.float32, 328)
    assert (bytes(out) != bytes(memory_of(tensor))) == way.mapped, "a buffer keeps what was read"
    again = bytearray()
    Copier(again.extend, lambda _: None).copy(replace(box, file=ReadFile(path)), torch.float32, 328)
    assert bytes(again) == bytes(memory_of(tensor))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_file_that_became_shorter_is_an_error_and_no_signal(tmp_path, monkeypatch, way):
    box = stored(tmp_path / "file", torch.randn(600, 2000))
    os.truncate(tmp_path / "file", 4_000_000)
    with pytest.raises(CheckpointError, match="is truncated"):
        copied(box, torch.float32, 328, (way,), monkeypatch)


def test_without_pages_to_map_blocks_are_read(tmp_path, monkeypatch):
    tensor = torch.randn(600, 2000)
    box = stored(tmp_path / "file", tensor)
    monkeypatch.setattr(disk, "_POPULATE_READ", -1)  # as a kernel that does not know it
    assert box.file.mapped(192, 4096) is None
    assert copied(box, torch.float32, 328, WAYS[:1], monkeypatch) == bytes(memory_of(tensor))


def test_mapped_pages_are_those_of_the_file_and_writing_there_changes_nothing(tmp_path):
    tensor = torch.arange(5000)
    file = stored(tmp_path / "file", tensor).file
    view = file.mapped(195, mmap.PAGESIZE + 7)
    assert view is not None and bytes(view) == file.bytes(195, mmap.PAGESIZE + 7)
    view[0] = 255 - view[0]
    assert file.bytes(192, tensor.nbytes) == bytes(memory_of(tensor))
    assert file.mapped(195, 0) is None


class Machine:
    """A clock that moves by what a way costs, in seconds a turn."""

    def __init__(self, costs):
        self.costs, self.now = costs, 0.0

    def runs(self, pace, turns, count=TURN_BYTES):
        used = []
        for _ in range(turns):
            with pace.turn(count) as way:
                self.now += self.costs[way]
            used.append(way)
        return used


def test_each_way_is_tried_and_the_cheapest_is_used():
    large, small = Way(512, mapped=True), Way(64, mapped=True)
    machine = Machine({large: 2.0, small: 1.0})
    pace = Pace((large, small), clock=lambda: machine.now)
    used = machine.runs(pace, 100)
    assert used[:2] == [large, small]
    assert used.count(small) > 95


def test_a_way_that_becomes_cheaper_is_found_again():
    large, small = Way(512, mapped=True), Way(64, mapped=True)
    machine = Machine({large: 3.0, small: 1.0})
    pace = Pace((large, small), clock=lambda: machine.now)
    machine.runs(pace, 20)
    machine.costs[large] = 0.5
    assert machine.runs(pace, 800).count(large) > 300
    machine.costs[large] = 3.0
    assert machine.runs(pace, 20)[1:] == [small] * 19


def test_small_pieces_do_not_choose():
    large, small = Way(512, mapped=True), Way(64, mapped=True)
    machine = Machine({large: 2.0, small: 1.0})
    pace = Pace((large, small), clock=lambda: machine.now)
    assert machine.runs(pace, 5, count=4096) == [large] * 5
    assert machine.runs(pace, 3) == [large, small, small]


def written(path, data, expected):
    with path.open("wb", buffering=0) as file:
        behind = WrittenBehind(file.fileno(), expected)
        for start in range(0, len(data), 1000):
            behind.write(data[start : start + 1000])
        behind.finish()
    return path.read_bytes()


@pytest.mark.parametrize("expected", [0, 30_000, 40_000, 90_000])
def test_what_is_written_behind_is_all_there_and_begun_once_by_pages(tmp_path, monkeypatch, expected):
    begun = []
    monkeypatch.setattr(disk, "begin_write_back", lambda _, start, count: begun.append((start, count)))
    monkeypatch.setattr(disk, "_BEHIND_BYTES", 3 * files.PAGE_BYTES)
    data = os.urandom(40_000)
    assert written(tmp_path / "file", data, expected) == data
    assert begun[0][0] == 0 and all(a + n == b for (a, n), (b, _) in pairwise(begun))
    assert len(begun) == 3 and all(count % files.PAGE_BYTES == 0 for _, count in begun)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
def test_the_kernel_does_as_it_is_asked(tmp_path, monkeypatch):
    answers, begin = [], disk._of_linux("sync_file_range")
    monkeypatch.setattr(disk, "_of_linux", lambda _: lambda *given: answers.append(begin(*given)))
    monkeypatch.setattr(disk, "_BEHIND_BYTES", files.PAGE_BYTES)
    data = os.urandom(1 << 16)
    assert written(tmp_path / "file", data, 0) == data
    assert len(answers) > 5 and not any(answers)


def refusing(number):
    def fallocate(*_):
        ctypes.set_errno(number)
        return -1

    return lambda _: fallocate


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_is_written_all_the_same(tmp_path, monkeypatch, number):
    monkeypatch.setattr(disk, "_of_linux", refusing(number))
    assert written(tmp_path / "file", b"abc", 10) == b"abc"


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_of_linux", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        written(tmp_path / "file", b"abc", 10)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("expected", [0, 4, 50])
def test_other_systems_write_without_hints(tmp_path, monkeypatch, expected):
    monkeypatch.setattr(disk, "_of_linux", lambda _: None)
    assert written(tmp_path / "file", b"0123456789", expected) == b"0123456789"
