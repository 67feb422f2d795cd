"""Try whether a model keeps the documents of a packed row apart: neither its names nor its signature tell."""

from __future__ import annotations

import inspect
from contextlib import ExitStack, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.passes import find_blocks
from meshpar.core.patterns import class_name
from meshpar.core.registry import layout_for
from meshpar.parallelized import Parallelized
from meshpar.trials.copies import CannotCopy, copied_state
from meshpar.trials.engine import as_evaluated, is_narrow

_LENGTH = 64
_PART, _NARROW_PART = 1e-3, 0.5
"""How much of what it sees of a joined text a document may see of a separate one: rounding, which is a larger part
of 16 and 8 bits.
"""
REMEDY = (
    "write data.documents: joined (PackedTokens(..., documents='joined')), or use a model whose attention follows "
    "position_ids"
)


def takes_positions(module: nn.Module) -> bool:
    """Return whether a model's forward takes ``position_ids``, by name or among any keywords."""
    parameters = inspect.signature(module.forward).parameters
    return "position_ids" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def untaken(module: nn.Module) -> str:
    """Return why a model that takes no ``position_ids`` cannot keep documents apart."""
    return (
        f"{class_name(module)} takes no position_ids, so the documents of a packed row would attend to each other; "
        f"{REMEDY}"
    )


@torch.no_grad()
def check_documents(par: Parallelized, module: nn.Module, vocab_size: int, length: int) -> None:
    """Raise MeshparError if documents of a row see each other, or one is computed otherwise than alone. Collective."""
    # How far another first document moves the output of the second is measured against a row that is one text.
    if not takes_positions(module):
        raise MeshparError(untaken(module))
    layout = par.layout if module is par.module else layout_for(module)
    if reason := layout.attention.documents_refusal:
        raise MeshparError(f"{reason}; {REMEDY}")
    length = min(length, _LENGTH) // 2 * 2
    if length < 4 or vocab_size < 2:
        return
    cut = length * 5 // 8  # documents of unequal lengths
    whole_row = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    first, second = whole_row.split([cut, length - cut])
    other = (first + 1) % vocab_size
    rows = [(first, second), (other, second), (second, first), (first, second), (other, second)]
    orders = ((cut, length - cut), (length - cut, cut), (length,))
    apart, swapped, joined = (torch.cat([torch.arange(part) for part in parts]) for parts in orders)
    batch: dict[str, Tensor] = {
        "input_ids": torch.stack([torch.cat(row) for row in rows]),
        "position_ids": torch.stack([apart, apart, swapped, joined, joined]),
        "second": (joined >= cut).expand(len(rows), -1),
    }
    part = par.split({name: tensor.to(par.device) for name, tensor in batch.items()})
    mask = part.pop("second")[0]

    def logits_of(module: nn.Module, part: dict[str, Tensor]) -> Tensor | None:
        logits = getattr(module(**part), "logits", None)
        logits = logits.to_local() if isinstance(logits, DTensor) else logits
        return logits.float() if isinstance(logits, Tensor) else None

    blocks = [block for _, block in find_blocks(par.module, par.layout)] if module is par.module else []
    with par.run.without_trials(), as_evaluated(module, blocks) as dtypes, ExitStack() as stack:
        # a module that cannot be copied runs as in a forward of the user's own
        with suppress(CannotCopy):
            stack.enter_context(copied_state(module, None))
        logits = par.forward([part], logits_of)[0] if module is par.module else logits_of(module, part)
    if logits is None:
        return  # told by the objective
    differences = (logits[[0, 3]] - logits[[1, 4]])[:, mask].abs().flatten(1)
    moved, control = differences.amax(1) if mask.any() else logits.new_zeros(2)
    # where ranks split positions, the test of what mixes positions sees that a model counts them itself
    whole = len(mask) == length
    again = torch.cat([logits[2, length - cut :], logits[2, : length - cut]])
    misplaced = (logits[0] - again).abs().max() if whole else logits.new_zeros(())
    sizes = torch.stack([moved, misplaced, control]).cpu()
    dist.all_reduce(sizes, dist.ReduceOp.MAX, runtime.hosts())
    moved, misplaced, control = sizes.tolist()
    allowed = control * (_NARROW_PART if is_narrow(dtypes) else _PART)
    if moved > allowed:
        raise MeshparError(
            f"{class_name(module)} does not keep the documents of a packed row separate: another first document "
            f"changed the output of the second by {moved:.1e} ({control:.1e} in one text); {REMEDY}"
        )
    if misplaced > allowed:
        raise MeshparError(
            f"{class_name(module)} counts positions itself: a document of a packed row gives other results than alone "
            f"(off by {misplaced:.1e}); {REMEDY}"
        )
