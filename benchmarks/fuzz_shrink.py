"""From a failing case to the smallest that still fails the same way: features, habits, passes and ranks are taken
out one by one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import fuzz_draw
import fuzz_habits

Spec = dict[str, Any]

PLAIN: dict[str, Any] = {
    "layout.mistake": None, "empty": 0, "loop.micro": 1, "loop.steps": 1, "loop.clip": None, "loop.groups": "one",
    "loop.kernel": None, "loop.accumulate": "par", "loop.scale": "plain", "loop.zero": "after",
    "loop.set_to_none": True, "loop.optimizer": "SGD", "model.attention": None, "model.ff": None, "model.conv": False,
    "model.nested": False, "model.repeat": None, "model.recompute": None, "model.tied": "no", "model.scalar": False,
    "model.unused": False, "model.gain": "none", "model.counter": None, "model.frozen": None, "model.dropout": None,
    "model.linear": "plain", "model.positions": "none", "model.norm": "none", "model.layers": 1, "model.bias": False,
    "model.attention.packed": False, "model.attention.counts": "tensor", "model.attention.norm": None,
    "model.attention.temperature": False, "model.attention.persistent": False, "model.ff.kind": "plain",
    "layout.regions": False, "layout.split": False, "length": 4,
}  # fmt: skip
"""Path -> the plainest value, in the order in which they are tried."""


def get(spec: Spec, path: str) -> Any:
    """Return the value at a dotted path; KeyError where an optional part is absent."""
    for part in path.split("."):
        if not isinstance(spec, dict):
            raise KeyError(path)
        spec = spec[part]
    return spec


def put(spec: Spec, path: str, value: Any) -> Spec:
    """Return a copy with another value at a dotted path."""
    changed = copy.deepcopy(spec)
    *outer, last = path.split(".")
    inner = changed
    for part in outer:
        inner = inner[part]
    inner[last] = value
    return changed


def shrink(spec: Spec, fails: Callable[[Spec], bool], most: int = 120) -> Spec:
    """Return the smallest case found that still ``fails``, after at most so many runs."""
    runs, again = 0, True
    while again:
        again = False
        for simpler in simplifications(spec):
            if runs >= most:
                return spec
            if simpler == spec or not coherent(simpler):
                continue
            runs += 1
            if fails(simpler):
                spec, again = simpler, True
                break
    return spec


def simplifications(spec: Spec) -> Iterator[Spec]:
    """Yield every case that has one thing less, the largest things first."""
    for habit in spec["loop"]["habits"]:
        yield put(spec, "loop.habits", [other for other in spec["loop"]["habits"] if other != habit])
    for place, pass_ in enumerate(spec["passes"]):
        others = spec["passes"][:place] + spec["passes"][place + 1 :]
        if pass_["name"] in ("ActivationCheckpoint", "Compile"):
            yield put(spec, "passes", others)
        for knob in pass_["knobs"]:
            fewer = {name: value for name, value in pass_["knobs"].items() if name != knob}
            yield put(
                spec, "passes", [*spec["passes"][:place], {**pass_, "knobs": fewer}, *spec["passes"][place + 1 :]]
            )
    yield from _meshes(spec)
    for path, value in PLAIN.items():
        try:
            if get(spec, path) != value:
                yield put(spec, path, value)
        except KeyError:
            continue
    if spec["model"]["attention"]:
        yield put(spec, "model.attention.kv", spec["model"]["attention"]["heads"])
    data = fuzz_draw.data_size(spec["mesh"])
    least = data * (2 if spec["model"]["norm"] == "batch" else 1)
    if spec["rows"] > least:
        yield put(spec, "rows", least)


def _meshes(spec: Spec) -> Iterator[Spec]:
    for axis, size in spec["mesh"].items():
        rest = {name: value for name, value in spec["mesh"].items() if name != axis}
        if rest:
            yield _on(spec, rest)
        if size > 2:
            yield _on(spec, {**spec["mesh"], axis: 2})


def _on(spec: Spec, mesh: Spec) -> Spec:
    """Return the case on another mesh, with the data pass that it takes."""
    changed, name = put(spec, "mesh", mesh), fuzz_draw.sharding(mesh)
    kept = [
        pass_
        for pass_ in spec["passes"]
        if pass_["name"] in ("ActivationCheckpoint", "Compile") or (pass_["name"] == "TensorParallel" and "tp" in mesh)
    ]
    old = next((pass_ for pass_ in spec["passes"] if pass_["name"] in ("FullyShard", "HybridShard")), {"knobs": {}})
    knobs = (
        {}
        if name == "Replicate"
        else {
            key: value
            for key, value in old["knobs"].items()
            if key != "reshard_after_forward" or isinstance(value, bool)
        }
    )
    changed["passes"] = kept + ([{"name": name, "knobs": knobs}] if name else [])
    changed["empty"] = fuzz_draw.data_size(mesh) if spec["empty"] else 0
    return changed


def without_names(text: str) -> str:
    """Return a problem of a plan without the numbers and the names of modules in it."""
    return re.sub(r"\d+", "0", re.sub(r"[\w*']+(\.[\w*']+)+", "NAME", text.strip()))[:140]


def coherent(spec: Spec) -> bool:
    """Tell whether the case is one that the fuzzer could have drawn."""
    model, loop = spec["model"], spec["loop"]
    if model["nested"] and not (model["attention"] or model["ff"]):
        return False
    if model["positions"] != "none" and not model["attention"]:
        return False
    if model["attention"] and model["attention"]["packed"] and model["attention"]["kv"] != model["attention"]["heads"]:
        return False
    return all(fuzz_habits.HABITS[name].fits(spec) for name in loop["habits"])
