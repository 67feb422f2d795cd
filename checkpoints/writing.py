"""Writing tensors in torch.distributed.checkpoint's own format, by its planner and its writer, with a checksum of every file."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from meshpar.checkpoints.dcp import METADATA_NAME
from meshpar.errors import CheckpointError
from meshpar.placements import held_by_this_rank, local_tensor

FileSums = dict[str, tuple[int, int]]
"""File name -> (size in bytes, CRC-32)."""


@final
class Write:
    """One rank's part of a save into ``folder``: all ranks ``plan``, rank 0 ``divide``s, all ``write``, rank 0 ``finish``es."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], *, is_main: bool) -> None:
        self._sums = _SummedFiles()
        self._writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self._writer.fs = self._sums
        self._writer.set_up_storage_writer(is_main)
        self._planner = _Planner()
        self._planner.set_up_planner(dict(tensors), is_coordinator=is_main)
        self._metadata: Metadata | None = None

    def plan(self) -> SavePlan:
        """Return what this rank could write."""
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def divide(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return what each rank shall write, so that everything is written once; raises where the plans leave a part out."""
        divided, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(divided)

    def write(self, plan: SavePlan) -> tuple[list[WriteResult], FileSums]:
        """Write and fsync this rank's file."""
        plan = self._planner.finish_plan(plan)
        results = self._writer.write_data(plan, self._planner).wait()
        if len(results) != len(plan.items):
            raise CheckpointError(f"{len(results)} tensors were written of {len(plan.items)} planned")
        return results, self._sums.sums

    def finish(self, results: list[list[WriteResult]]) -> FileSums:
        """Write and fsync the metadata; return its size and checksum."""
        assert self._metadata is not None, "divide was called"
        self._writer.finish(self._metadata, results)
        folder = Path(self._writer.path)
        data = (folder / METADATA_NAME).read_bytes()
        return {METADATA_NAME: (len(data), zlib.crc32(data))}


def planned_bytes(plans: list[SavePlan]) -> int:
    """Return how many bytes of tensors the plans write."""
    return sum(item.tensor_storage_size() or 0 for plan in plans for item in plan.items)


@final
class _Planner(DefaultSavePlanner):
    """DCP's planner over flat names. Local parts are placed by :mod:`meshpar.placements`; empty ones are not written."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, tensor in self.state_dict.items() for item in _items(name, tensor)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return local_tensor(self.state_dict[write_item.index.fqn]).contiguous()


def _items(name: str, tensor: Tensor) -> list[WriteItem]:
    local, held = local_tensor(tensor), held_by_this_rank(tensor)
    sizes = torch.Size(each.stop - each.start for each in held)
    if sizes != local.shape:
        raise CheckpointError(f"{name}: this rank should hold {tuple(sizes)} of {tuple(tensor.shape)}, but holds {tuple(local.shape)}")
    if local.numel() == 0 and tensor.numel() > 0:
        return []
    offsets = torch.Size(each.start for each in held)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes), properties=TensorProperties.create_from_tensor(local), size=tensor.shape
    )
    return [WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)]


@final
class _SummedFiles(FileSystem):
    """Files whose size and CRC-32 are known when they are written."""

    def __init__(self) -> None:
        self.sums: FileSums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with Path(path).open(cast(Any, mode)) as file:
            stream = _SummedStream(cast(BinaryIO, file))
            yield stream
        self.sums[Path(path).name] = (stream.written, stream.sum)


@final
class _SummedStream(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.written = 0
        self.sum = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.sum = zlib.crc32(data, self.sum)
        size = memoryview(data).nbytes
        self.written += size
        return size

    def tell(self) -> int:
        return self.written

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()
