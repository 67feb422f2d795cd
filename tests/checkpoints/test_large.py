"""Tensors and files of over 4 GiB, past an archive's 32 bits, as sparse files."""

import os
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshpar.checkpoints import export_safetensors, read_manifest, verify_step
from meshpar.checkpoints.format.archive import find_tensor
from meshpar.checkpoints.format.dcp import DistributedCheckpoint
from meshpar.checkpoints.format.writing import TensorPart, make_manifest, whole, write_file
from meshpar.checkpoints.steps.steps import Steps
from meshpar.checkpoints.storage.checksums import crc32
from meshpar.checkpoints.storage.disk import ReadFile
from meshpar.checkpoints.storage.files import memory_of
from meshpar.core.errors import CheckpointError

BLOCK = memoryview(bytes(64 << 20))
COUNT = 65
HUGE = COUNT * len(BLOCK) + 3  # bytes of the first tensor: over 4 GiB


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A step with a tensor of over 4 GiB, zero but for its last bytes, and one behind it in the same file."""
    steps = Steps(tmp_path_factory.mktemp("large"))
    folder = steps.begin(1, replace=False)
    small = torch.arange(12.0).reshape(3, 4)
    items = [
        (
            TensorPart("model.huge", (0,), torch.empty(HUGE, dtype=torch.uint8, device="meta")),
            [*[BLOCK] * COUNT, memoryview(b"end")],
        ),
        (TensorPart("model.small", (0, 0), small), [memory_of(small)]),
    ]

    def write(descriptor: int, data: memoryview) -> None:
        if len(data) > 4096:  # zeros: a hole
            os.lseek(descriptor, len(data), os.SEEK_CUR)
        else:
            os.write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshpar.checkpoints.storage.disk.write_all", write)
        file = write_file(folder / "__0_0.distcp", items, "crc32")
    parts = {"model.huge": ((HUGE,), torch.uint8), "model.small": ((3, 4), torch.float32)}
    groups = whole((name, shape, dtype) for name, (shape, dtype) in parts.items())
    about = {"step": 1, "mesh": {}, "world_size": 1, "device": "cpu", "plan": ""}
    return steps.commit(folder, make_manifest(folder, groups, [file], about))


def test_a_large_tensor_and_what_lies_behind_it_are_found_and_read(step):
    assert os.stat(step / "__0_0.distcp").st_blocks * 512 < 1 << 20, "the file is sparse"
    source = DistributedCheckpoint(step)
    end, small = torch.empty(7, dtype=torch.uint8), torch.empty(3, 4)
    source.read("model.huge", (slice(HUGE - 7, HUGE),), end)
    assert bytes(end.tolist()) == b"\0\0\0\0end"
    source.read("model.small", (), small)
    assert torch.equal(small, torch.arange(12.0).reshape(3, 4))
    chunk = source.tensors["model.small"].chunks[0]
    assert chunk.position > HUGE > 1 << 32
    expected = 0
    for block in (*[BLOCK] * COUNT, b"end"):
        expected = crc32(block, expected)
    huge = source.tensors["model.huge"].chunks[0]
    assert find_tensor(ReadFile(step / "__0_0.distcp"), huge.position, huge.length, (HUGE,))[1] == expected


def test_torch_and_zipfile_read_the_large_archive(step):
    stock = {"model.small": torch.zeros(3, 4)}
    dcp.load(stock, checkpoint_id=step, no_dist=True)
    assert torch.equal(stock["model.small"], torch.arange(12.0).reshape(3, 4))
    huge = DistributedCheckpoint(step).tensors["model.huge"].chunks[0]
    path = step.parent / "alone"
    with (step / "__0_0.distcp").open("rb") as file, path.open("wb") as alone:
        alone.write(file.read(4096))
        file.seek(huge.length - 4096)
        alone.seek(huge.length - 4096)
        alone.write(file.read(4096))
    mapped = torch.load(path, mmap=True, weights_only=True)
    assert mapped.shape == (HUGE,) and bytes(mapped[-3:].tolist()) == b"end"
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == HUGE
        assert archive.read("archive/version") == b"3\n"


def test_the_large_files_size_is_checked(step):
    assert read_manifest(step).files["__0_0.distcp"]["size"] > 1 << 32
    whole = (step / "__0_0.distcp").stat().st_size
    lost = 2 * 4 + 1  # the checksums, and a byte of the part before them
    with (step / "__0_0.distcp").open("rb") as file:
        file.seek(whole - lost)
        end = file.read()
    os.truncate(step / "__0_0.distcp", whole - lost)
    message = r"__0_0\.distcp: expected 43\d+ bytes, found 43\d+; lost: \(parts of\) model\.small"
    with pytest.raises(CheckpointError, match=message):
        verify_step(step)
    with (step / "__0_0.distcp").open("ab") as file:
        file.write(end)


@pytest.mark.long
def test_every_byte_of_the_large_file_is_checked_and_exported(step, tmp_path):
    assert "is whole" in verify_step(step)
    exported = export_safetensors(step, tmp_path / "hf", verify="full") / "model.safetensors"
    assert exported.stat().st_size > HUGE
    with (step / "__0_0.distcp").open("r+b") as file:
        file.seek((1 << 32) + 5)
        file.write(b"\1")
    with pytest.raises(CheckpointError, match=r"model\.huge at \(0,\), bytes 0 to 43\d+: expected the CRC-32"):
        verify_step(step)
