"""The bytes of each rank, block by block."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from meshpar.core.layout import ModelLayout
from meshpar.core.passes import find_blocks
from meshpar.core.patterns import class_name
from meshpar.passes.data.instead_of_fsdp2 import ReplicaShards
from meshpar.state.drawing import table
from meshpar.step.forward import fact_of
from meshpar.tensors.placements import local_tensor, placements_text

ADAM_STATE_TENSORS = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Like parameters of one block or of ``blocks`` like ones (``layers.0..79``), and the bytes that a rank stores."""

    block: str
    blocks: int
    parameter: str
    shape: tuple[int, ...]
    placements: str
    dtype: torch.dtype
    rank_bytes: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The tensors of one rank, block by block, tied ones once; ``str()`` prints the table.

    ``optimizer_bytes`` are AdamW's two moments, None for another optimizer. ``shard_bytes`` are those of the shard kept
    for the replica where this rank stores a slice of it (``HybridShard(optimizer="world")``).
    """

    title: str
    rows: tuple[Row, ...]
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    buffer_bytes: int
    shard_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that live through the whole of training; activations and gathered units come on top."""
        trained = self.parameter_bytes + self.gradient_bytes + (self.optimizer_bytes or 0)
        return trained + self.buffer_bytes + self.shard_bytes

    def __str__(self) -> str:
        head = ("block", "parameter", "shape", "placement", "dtype", "bytes a rank")
        body = []
        for row in self.rows:
            times, each = (f" (x{row.blocks})", " each") if row.blocks > 1 else ("", "")
            shape, dtype = " x ".join(map(str, row.shape)) or "scalar", str(row.dtype).removeprefix("torch.")
            cells = (row.block + times, row.parameter, shape, row.placements, dtype, f"{row.rank_bytes:,}{each}")
            body.append(cells)
        lines, optimizer = table(head, body), "optimizer state of unknown size"
        if self.optimizer_bytes is not None:
            optimizer = f"{_size(self.optimizer_bytes)} of AdamW state"
        shards = f", {_size(self.shard_bytes)} of shards for its replica" if self.shard_bytes else ""
        totals = (
            f"{self.parameters:,} parameters; this rank stores "
            f"{_size(self.parameter_bytes)} of parameters, {_size(self.gradient_bytes)} of gradients, "
            f"{optimizer}{shards} and {_size(self.buffer_bytes)} of buffers: {_size(self.total_bytes)} in all, "
            "activations and gathered units aside"
        )
        return "\n".join([self.title, "", lines[0], "-" * len(lines[0]), *lines[1:], "", totals])


def describe(module: nn.Module, layout: ModelLayout, title: str) -> Description:
    """Return what this rank holds of ``module`` after its passes; like blocks share their rows."""
    blocks = sorted((name for name, _ in find_blocks(module, layout)), key=len, reverse=True)
    rows: dict[str, list[Row]] = {}
    parameters = list(module.parameters())
    for name, parameter in module.named_parameters():
        block = next((prefix for prefix in blocks if name.startswith(prefix + ".")), "")
        row = Row(
            block=block,
            blocks=1,
            parameter=name[len(block) + 1 :] if block else name,
            shape=tuple(parameter.shape),
            placements=placements_text(parameter),
            dtype=parameter.dtype,
            rank_bytes=local_tensor(parameter).nbytes,
        )
        rows.setdefault(block, []).append(row)
    trained = sum(local_tensor(parameter).nbytes for parameter in parameters if parameter.requires_grad)
    shards = fact_of(module, ReplicaShards)
    return Description(
        title=f"{class_name(module)} under {title}",
        rows=tuple(_fold(rows)),
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(local_tensor(parameter).nbytes for parameter in parameters),
        gradient_bytes=trained,
        optimizer_bytes=ADAM_STATE_TENSORS * trained,
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        shard_bytes=0 if shards is None else shards.nbytes,
    )


def _fold(rows: dict[str, list[Row]]) -> list[Row]:
    """Let like blocks, whose rows differ only by the block's number, share their rows."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for block, alike in rows.items():
        content = tuple((row.parameter, row.shape, row.placements, row.dtype, row.rank_bytes) for row in alike)
        kinds.setdefault((re.sub(r"\d+", "*", block), content), []).append(block)
    folded = []
    for names in kinds.values():
        title = names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]}"
        folded += [replace(row, block=title or "(outermost)", blocks=len(names)) for row in rows[names[0]]]
    return folded


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count} bytes"
