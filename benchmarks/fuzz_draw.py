"""What the fuzzer draws from a seed: a model, a mesh with passes, a layout and a loop, as plain data."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from typing import Any

import fuzz_habits
import fuzz_models

Spec = dict[str, Any]

MESHES = (
    "dp_shard=2", "dp_shard=2", "dp_shard=3", "dp_shard=4", "dp_replicate=2", "dp_replicate=2", "dp_replicate=3",
    "dp_replicate=2,dp_shard=2", "dp_replicate=2,dp_shard=2", "dp_replicate=2,dp_shard=4", "dp_replicate=1,dp_shard=2",
    "tp=2", "tp=2", "tp=2", "tp=3", "tp=4", "dp_shard=1,tp=2", "dp_replicate=2,tp=2", "dp_replicate=2,tp=2",
    "dp_shard=2,tp=2", "dp_shard=2,tp=2", "dp_shard=2,tp=3", "dp_shard=2,tp=4", "dp_shard=3,tp=2",
    "dp_replicate=2,dp_shard=2,tp=2",
)  # fmt: skip
STYLES = (
    "region",
    "colwise",
    "colwise_gather",
    "rowwise",
    "rowwise_split",
    "vocab",
    "head",
    "sequence",
    "grad_sum",
    "packed_colwise:3",
)


def draw(seed: int, *, without: Collection[str] = (), batch_norm: bool = False, same_bits: bool = False) -> Spec:
    """Return the case of a seed.

    Args:
        seed: draws the same case every time, on every machine.
        without: habits and features to leave out; the rest of the case stays what it is.
        batch_norm: let models have batch normalisation.
        same_bits: the same case under ``Plan(same_bits=True)``, with the rows of a rank as a micro-batch.
    """
    rng = random.Random(seed)
    mesh = {axis: int(size) for axis, _, size in (part.partition("=") for part in rng.choice(MESHES).split(","))}
    parts = 1
    if same_bits:  # powers of two, but for a few
        mesh = {axis: 2 if size == 3 and _chance(rng, 0.8) else size for axis, size in mesh.items()}
        parts = mesh.get("tp", 1) * (rng.choice([1, 1, 2]) if "tp" in mesh else 1)
    model = _model(rng, {**mesh, "tp": parts} if "tp" in mesh and same_bits else mesh, batch_norm)
    data, layout = data_size(mesh), _layout(rng, mesh)
    spec: Spec = {
        "seed": seed,
        "mesh": mesh,
        "model": model,
        "passes": _passes(rng, mesh, model, layout),
        "rows": data * max(rng.choice([1, 2]), 2 if model["norm"] == "batch" else 1),
        "length": rng.choice([4, 6, 8, 12]) if mesh.get("tp", 1) != 3 else rng.choice([6, 12, 6, 8]),
        "same_bits": False,
        "empty": data if rng.random() < 0.06 else 0,
        "layout": layout,
        "loop": _loop(rng),
    }
    _slip(rng, spec)
    spec["loop"]["habits"] = _habits(rng, spec, (*without, *(fuzz_habits.OF_ONE_MESH if same_bits else ())))
    return _under_same_bits(spec, parts) if same_bits else spec


def _under_same_bits(spec: Spec, parts: int) -> Spec:
    """Return a case whose micro-batches are those of all data ranks, and whose features fit in equal parts."""
    data, model = data_size(spec["mesh"]), spec["model"]
    for pass_ in spec["passes"]:
        if pass_["name"] == "TensorParallel":
            pass_["knobs"]["parts"] = parts
    spec["loop"] |= {"micro": spec["loop"]["micro"] * data, "set_to_none": True}
    for knob, refused, instead in (("accumulate", "plain", "par"), ("kernel", "fused", "foreach")):
        if spec["loop"][knob] == refused:
            spec["loop"][knob] = instead
    model |= {"classes": model["classes"] + -model["classes"] % parts, "counter": None}  # ranks count their own calls
    if model["ff"]:
        model["ff"]["hidden"] += -model["ff"]["hidden"] % parts
    return {**spec, "same_bits": True, "rows": spec["rows"] // data, "length": spec["length"] + -spec["length"] % parts}


def data_size(mesh: Spec) -> int:
    """Return how many batches the ranks of a mesh see at a time."""
    return math.prod(size for axis, size in mesh.items() if axis != "tp")


def _chance(rng: random.Random, share: float) -> bool:
    return rng.random() < share


def _model(rng: random.Random, mesh: Spec, batch_norm: bool) -> Spec:
    tensor = "tp" in mesh
    family = rng.choice(["tokens"] * (8 if tensor else 5) + ["features"] * 2 + ["image"] * (0 if tensor else 2))
    tokens = family == "tokens"
    model: Spec = {
        "family": family,
        "classes": rng.choice([7, 11, 12, 16]),
        "inputs": 13,
        "layers": rng.choice([1, 2, 2, 3]),
        "bias": _chance(rng, 0.6),
        "linear": rng.choices(["plain", "subclass", "parametrized"], [20, 1, 1])[0],
        "norm": rng.choices(["layer", "rms", "none", "batch"], [3, 3, 1, 2 if batch_norm and not tokens else 0])[0],
        "positions": rng.choice(["rope", "learned", "none"]) if tokens else "none",
        "attention": None,
        "ff": _feed_forward(rng, tensor),
        "conv": family == "image" or (tokens and _chance(rng, 0.1)),
        "nested": tokens and _chance(rng, 0.12),
        "repeat": rng.choices([None, "twice", "listed"], [12, 1, 1])[0],
        "recompute": rng.choices([None, "reentrant", "non_reentrant"], [14, 1, 1])[0],
        "tied": rng.choices(["no", "shared", "functional"], [8, 3, 1])[0] if tokens else "no",
        "scalar": _chance(rng, 0.12),
        "unused": _chance(rng, 0.1),
        "gain": rng.choices(["none", "block", "parent"], [10, 2, 1])[0],
        "counter": rng.choices([None, "root", "block"], [10, 2, 1])[0],
        "frozen": rng.choices([None, "stem", "block", "biases"], [12, 1, 1, 1])[0],
        "dropout": rng.choices([None, 0.0], [8, 1])[0],
    }
    model["dim"] = (
        rng.choice([8, 12, 16])
        if tokens
        else rng.choice([10, 12, 14])
        if family == "image"
        else rng.choice([9, 12, 13])
    )
    if tokens and (_chance(rng, 0.85) or not model["ff"]):
        model["attention"] = _attention(rng, mesh.get("tp", 1), rotary=model["positions"] == "rope")
    else:
        model["positions"] = "none"
        model["ff"] = model["ff"] or {"kind": "plain", "hidden": 10, "experts": 3}
    if model["nested"]:
        model |= {"conv": False, "gain": "none", "repeat": None, "recompute": None, "dropout": None}
        model["counter"] = None if model["counter"] == "block" else model["counter"]
    return model


def _attention(rng: random.Random, tensor: int, *, rotary: bool) -> Spec:
    heads = rng.choice([1, 2, 3, 4]) * (tensor if _chance(rng, 0.95) else 1)
    packed = _chance(rng, 0.35)
    fits = [kv for kv in range(1, heads + 1) if heads % kv == 0 and (kv % tensor == 0 or tensor % kv == 0)]
    kv = heads if packed or _chance(rng, 0.5) else rng.choice(fits)
    counts = rng.choices(["tensor", "view", "split"], [14, 1 if kv == heads else 0, 1 if packed else 0])[0]
    return {
        "heads": heads,
        "kv": kv,
        "width": rng.choice([2, 4] if rotary else [2, 3, 4]),
        "packed": packed,
        "counts": counts,
        "norm": rng.choices([None, "heads", "features"], [7, 3, 1])[0],
        "temperature": _chance(rng, 0.08),
        "persistent": _chance(rng, 0.3),
    }


def _feed_forward(rng: random.Random, tensor: bool) -> Spec | None:
    kind = rng.choices([None, "plain", "gated", "soft", "topk", "listed"], [1, 5, 4, 2, 2, 1])[0]
    return (
        None
        if kind is None
        else {
            "kind": kind,
            "hidden": rng.choice([8, 12, 16, 10] if tensor else [7, 10, 14]),
            "experts": rng.choice([3, 4]),
        }
    )


def _passes(rng: random.Random, mesh: Spec, model: Spec, layout: Spec) -> list[Spec]:
    passes: list[Spec] = []
    if "tp" in mesh:
        knobs = {"sequence_parallel": True} if model["family"] == "tokens" and _chance(rng, 0.4) else {}
        head = model["family"] == "tokens" and model["tied"] != "functional" and layout["split"]
        knobs |= {"loss_parallel": True} if _chance(rng, 0.15) and head else {}
        passes.append({"name": "TensorParallel", "knobs": knobs})
    if _chance(rng, 0.25):
        passes.append({"name": "ActivationCheckpoint", "knobs": _drawn(rng, mode=["full", "selective"], every=[1, 2])})
    if _chance(rng, 0.02):
        passes.append({"name": "Compile", "knobs": {"backend": rng.choice(["eager", "aot_eager"])}})
    name = sharding(mesh)
    if name == "Replicate":
        passes.append({"name": name, "knobs": {}})
    elif name is not None:
        shards = mesh["dp_shard"]
        parts = [size for size in range(2, shards) if shards % size == 0]
        knobs = _drawn(rng, reshard_after_forward=[True, False, *parts], prefetch_forward=[0, 0, 1, 2],
                       prefetch_backward=[1, 1, 0, 2], min_params=[0, 0, 0, 300, 10**6],
                       offload=[None] * 12 + ["cpu"])  # fmt: skip
        if _chance(rng, 0.12) and not model["nested"]:
            knobs["blocks"] = rng.choice(
                [("Block",), ("blocks.0",), ("blocks.*.ff",) if model["ff"] else ("blocks.*",), ()]
            )
        passes.append({"name": name, "knobs": knobs})
    return passes


def sharding(mesh: Spec) -> str | None:
    """Return the pass that the data axes of a mesh take, by name."""
    if "dp_shard" not in mesh:
        return "Replicate" if "dp_replicate" in mesh else None
    return "HybridShard" if "dp_replicate" in mesh else "FullyShard"


def _drawn(rng: random.Random, **choices: list[Any]) -> Spec:
    """Draw each knob, and leave out those that came out as the first, the default."""
    found = {name: rng.choice(values) for name, values in choices.items()}
    return {name: value for name, value in found.items() if value is not choices[name][0]}


def _layout(rng: random.Random, mesh: Spec) -> Spec:
    tensor = "tp" in mesh
    return {
        "blocks": tensor or _chance(rng, 0.3),
        "regions": _chance(rng, 0.4),
        "split": _chance(rng, 0.85),
        "mistake": None,
    }


def _slip(rng: random.Random, spec: Spec) -> None:
    """Make a mistake in the tensor-parallel table, now and then: a style forgotten, a wrong one, or one where none
    belongs.
    """
    if "tp" not in spec["mesh"] or not _chance(rng, 0.25):
        return
    styles = fuzz_models.table(spec["model"], spec["layout"])
    others = [
        "",
        "norm",
        "head",
        "blocks.*",
        "blocks.*.mix",
        "blocks.*.ff",
        "blocks.*.norm1",
        "blocks.*.conv",
        "embed",
        "place",
    ]
    pattern = rng.choice([*styles, *styles, *others])
    spec["layout"]["mistake"] = {
        "pattern": pattern,
        "style": rng.choice([None, *STYLES]) if pattern in styles else rng.choice(STYLES),
    }


def _loop(rng: random.Random) -> Spec:
    kernels = {"AdamW": [None, None, "foreach", "fused"], "SGD": [None, None, "foreach"]}
    optimizer = rng.choice(["AdamW", "AdamW", "SGD"])
    return {
        "steps": rng.choice([2, 2, 3]),
        "micro": rng.choice([1, 1, 2, 3]),
        "accumulate": rng.choices(["par", "each", "plain"], [6, 1, 1])[0],
        "scale": rng.choices(["plain", "token_scale"], [5, 1])[0],
        "optimizer": optimizer,
        "kernel": rng.choice(kernels[optimizer]),
        "groups": rng.choices(["one", "groups", "optimizers"], [4, 1, 1])[0],
        "clip": rng.choices([None, "par", "torch", "value"], [4, 4, 1, 1])[0],
        "zero": rng.choice(["after", "after", "before"]),
        "set_to_none": rng.random() < 0.75,
        "habits": [],
    }


def _habits(rng: random.Random, spec: Spec, without: Collection[str]) -> list[str]:
    chosen: list[str] = []
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])):
        weights = {name: habit.weight for name, habit in fuzz_habits.HABITS.items()}
        name = rng.choices(list(weights), list(weights.values()))[0]
        habit = fuzz_habits.HABITS[name]
        clash = "backward" in habit.at and any("backward" in fuzz_habits.HABITS[earlier].at for earlier in chosen)
        if name in chosen or clash or (habit.alone and chosen) or not habit.fits(spec) or name in without:
            continue
        chosen.append(name)
        if name == "tp_seeds":
            spec["model"]["dropout"] = 0.3
        if habit.alone:
            break
    return chosen
