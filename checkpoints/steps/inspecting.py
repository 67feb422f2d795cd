"""List, show, verify, compare, prune and pin checkpoints, as text: the commands ``meshpar checkpoints ...``."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from meshpar.checkpoints.format.copying import read_tiles
from meshpar.checkpoints.format.dcp import DistributedCheckpoint
from meshpar.checkpoints.format.manifest import MODEL, RANDOM, Manifest, in_order, read_manifest
from meshpar.checkpoints.format.verify import Sums, verify_files
from meshpar.checkpoints.steps.steps import Steps, best_of, checkpoints_in, open_step
from meshpar.checkpoints.storage.files import TILE_BYTES, memory_of, tiles
from meshpar.checkpoints.storage.place import Place, PlaceLike, place
from meshpar.core.errors import CheckpointError
from meshpar.state.drawing import table


def list_steps(root: PlaceLike, best: str = "val/loss") -> str:
    """Return a table of the committed steps, followed by other folders and the reason why they are not steps.

    Args:
        root: a run's folder, or the folder of its steps.
        best: the metric of which the best step is marked, as for :class:`CheckpointManager`.
    """
    steps = Steps(checkpoints_in(root))
    committed, pinned = steps.committed(), steps.pinned()
    if not committed and not steps.ignored():
        raise _no_steps(root)
    rows = list[tuple[str, ...]]()
    manifests, damaged = dict[int, Manifest](), dict[int, str]()
    for step in committed:
        try:
            manifests[step] = read_manifest(steps.folder(step))
        except CheckpointError as error:
            damaged[step] = str(error)
    lowest = best_of({step: manifest.metrics for step, manifest in manifests.items()}, best)
    for step in committed:
        if step in damaged:
            rows.append((str(step), "damaged", "", "", "", damaged[step]))
        else:
            manifest = manifests[step]
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items() if value is not None)
            facts = {"latest": step == committed[-1], f"best {best}": step == lowest, "pinned": step in pinned}
            marks = ", ".join(mark for mark, holds in facts.items() if holds)
            if steps.folder(step) != steps.path(step):
                marks += f" (in {steps.folder(step).name}: its replacement is running or did not finish)"
            saved_at, size = manifest.saved_at[:19].replace("T", " "), _size(_bytes(manifest))
            rows.append((str(step), saved_at, size, _mesh(manifest), metrics, marks))
    head = ("step", "saved at (UTC)", "size", "mesh", "metrics", "")
    return "\n".join([*table(head, rows), *(f"{path.name}: {reason}" for path, reason in steps.ignored().items())])


def show_step(path: PlaceLike) -> str:
    """Return a description of one step: its origin, size and tensors."""
    folder = open_step(path)
    manifest = read_manifest(folder)
    model = {name: entry for name, entry in manifest.tensors.items() if name.startswith(MODEL)}
    count = sum(math.prod(entry["shape"]) for entry in model.values())
    kinds = "none" if manifest.optimizer is None else manifest.optimizer["class"]
    optimizer = kinds if isinstance(kinds, str) else ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
    by = f"{manifest.world_size} ranks, {_mesh(manifest)}, {manifest.device}, torch {manifest.versions.get('torch')}"
    facts = [
        ("step", str(manifest.step)),
        ("saved at", manifest.saved_at),
        ("saved by", by),
        ("plan", manifest.plan),
        ("size", f"{_size(_bytes(manifest))} in {len(manifest.files)} files"),
        ("model", f"{count:,} elements in {len(model)} tensors"),
        ("optimizer", optimizer),
        *(("tied", " = ".join(group)) for group in manifest.tied),
        *((f"metric {name}", f"{value:.6g}") for name, value in manifest.metrics.items()),
    ]
    rows = [
        (name, entry["dtype"], str(tuple(entry["shape"])), str(len(entry["chunks"])))
        for name, entry in sorted(manifest.tensors.items())
    ]
    tensors = table(("tensor", "dtype", "shape", "parts"), rows)
    return "\n".join([str(folder), *table(facts[0], facts[1:]), "", *tensors])


def verify_step(path: PlaceLike) -> str:
    """Verify every byte of a step and return a line of text; raises CheckpointError that names every damaged part."""
    folder = open_step(path)
    manifest = read_manifest(folder)
    began = time.monotonic()
    verify_files(folder, manifest, "full")
    rate = _bytes(manifest) / max(1e-9, time.monotonic() - began)
    return f"{folder} is whole: {_size(_bytes(manifest))} in {len(manifest.files)} files, {_size(rate)}/s"


def diff_steps(one: PlaceLike, other: PlaceLike) -> str:
    """Return the differences between two steps: tensors, shapes, dtypes, values (by how much), plain data."""
    folders = open_step(one), open_step(other)
    first, second = (read_manifest(folder) for folder in folders)
    lines = [f"only in {folders[0]}: {name}" for name in first.tensors if name not in second.tensors]
    lines += [f"only in {folders[1]}: {name}" for name in second.tensors if name not in first.tensors]
    lines += [
        f"{name}: {getattr(first, name)} and {getattr(second, name)}"
        for name in ("step", "mesh", "world_size", "plan", "extra", "metrics", "versions")
        if getattr(first, name) != getattr(second, name)
    ]
    different = _differences(folders, (first, second))
    lines += [f"{name}: {difference}" for name, difference in different.items() if difference]
    return "\n".join([*lines, f"{list(different.values()).count(None)} of {len(first.tensors)} tensors are the same"])


def first_difference(one: PlaceLike, other: PlaceLike) -> str:
    """Return the first step, of those that two runs have saved, whose tensors differ, and the first such tensor."""
    roots = [Steps(checkpoints_in(run)) for run in (one, other)]
    steps = sorted(set(roots[0].committed()) & set(roots[1].committed()))
    if not steps:
        raise CheckpointError(
            f"{one} and {other} have saved no step in common; expected two runs with the same checkpoint.every"
        )
    for step in steps:
        folders = [root.folder(step) for root in roots]
        manifests = [read_manifest(folder) for folder in folders]
        texts = _differences(folders, manifests)
        texts |= dict.fromkeys(manifests[0].tensors.keys() ^ manifests[1].tensors, "only one of the runs has it")
        different = in_order(name for name, text in texts.items() if text and not name.startswith(RANDOM))
        weights = [name for name in different if name.startswith(MODEL)]
        if different:
            first = (weights or different)[0]
            parts = f"{len(weights)} tensors of the model and {len(different) - len(weights)} of the optimizer"
            before = "the first that both have saved" if step == steps[0] else "and not before"
            return f"checkpoints differ at step {step}, {before}, in {parts}; the first is {first}: {texts[first]}"
    return f"checkpoints do not differ: every tensor of {', '.join(map(str, steps))} is the same in every bit"


def prune_steps(root: PlaceLike, keep: int, *, best: str | None = None) -> str:
    """Delete leftovers of dead processes, and all steps but the newest, the pinned and the best; return a summary.

    Args:
        root: a run's folder, or the folder of its steps.
        keep: number of newest steps to keep.
        best: as for :class:`CheckpointManager`; None: do not keep a best step.
    """
    if keep < 1:
        raise CheckpointError(f"keep is {keep}; expected at least 1")
    steps = Steps(checkpoints_in(root))
    if not steps.committed():
        raise _no_steps(root)
    leftovers = len(steps.ignored())
    steps.reap()
    gone = steps.retain(keep, steps.best_or_unknown(best) if best else ())
    removed = f"removed {', '.join(map(str, gone)) or 'no step'} and {leftovers - len(steps.ignored())} leftovers"
    return f"{removed}; kept {', '.join(map(str, steps.committed()))}"


def pin_step(path: PlaceLike, *, pinned: bool = True) -> str:
    """Protect a step from deletion, or end the protection; return a line of text."""
    folder = open_step(path)
    step = read_manifest(folder).step
    Steps(folder.parent).pin(step, pinned=pinned)
    state = "pinned: it stays until it is unpinned" if pinned else "not pinned any more"
    return f"step {step} in {folder.parent} is {state}"


def remove_step(path: PlaceLike) -> str:
    """Delete a step and return a line of text; raises CheckpointError if it is pinned, or ``path`` is no step."""
    folder = open_step(path)
    if folder.name != place(path).resolve().name:
        raise CheckpointError(f"{path} does not name one step; give its folder, such as {folder}")
    step, steps = read_manifest(folder).step, Steps(folder.parent)
    if step in steps.pinned():
        raise CheckpointError(
            f"step {step} in {folder.parent} is pinned; unpin it first (meshpar checkpoints pin --unpin)"
        )
    steps.delete(step)
    return f"removed step {step} from {folder.parent}; left: {', '.join(map(str, steps.committed())) or 'none'}"


def _no_steps(root: PlaceLike) -> CheckpointError:
    return CheckpointError(f"{root} has no checkpoints; give a run's folder, or its folder of checkpoints")


def _differences(folders: Sequence[Place], manifests: Sequence[Manifest]) -> dict[str, str | None]:
    """Return how each tensor that two steps have differs; None: not at all."""
    pairs = zip(manifests, folders)
    sources = [DistributedCheckpoint(manifest.files_in(at), sums=Sums(manifest)) for manifest, at in pairs]
    names = (name for name in manifests[0].tensors if name in manifests[1].tensors)
    return {name: _difference(name, manifests, sources) for name in names}


def _difference(name: str, manifests: Sequence[Manifest], sources: Sequence[DistributedCheckpoint]) -> str | None:
    first, second = (manifest.tensors[name] for manifest in manifests)
    for key in ("dtype", "shape"):
        if first[key] != second[key]:
            return f"{key} {first[key]} and {second[key]}"
    parts = [
        [(chunk.offsets, chunk.shape, chunk.length, source.sum_of(chunk)) for chunk in source.tensors[name].chunks]
        for source in sources
    ]
    if parts[0] and parts[0] == parts[1]:
        return None  # the same parts with the same checksums
    dtype, differ, largest = sources[0].dtypes()[name], 0, 0.0
    boxes = list(tiles(tuple(first["shape"]), dtype.itemsize, TILE_BYTES))
    for one_tile, other_tile in zip(*(read_tiles(source, name, dtype, boxes) for source in sources)):
        if memory_of(one_tile) != memory_of(other_tile):
            apart = (one_tile.double() - other_tile.double()).abs()
            differ, largest = differ + int((apart != 0).sum()), max(largest, float(apart.max()))
    return f"{differ:,} of {math.prod(first['shape']):,} elements differ, by up to {largest:.3g}" if differ else None


def _bytes(manifest: Manifest) -> int:
    return sum(file["size"] for file in manifest.files.values())


def _mesh(manifest: Manifest) -> str:
    return ",".join(f"{axis}={size}" for axis, size in manifest.mesh.items()) or "no mesh"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
