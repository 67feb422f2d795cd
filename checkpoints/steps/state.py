"""The content of a checkpoint, plain data and tensors: ``model.<name>``, ``optimizer.<parameter>.<key>``,
``random.rank-<n>.<generator>``. Torch's ``get_optimizer_state_dict`` runs a fake step, and requires state of all.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshpar.checkpoints.format.dcp import Stored
from meshpar.checkpoints.format.manifest import AVERAGES, MODEL, RANDOM
from meshpar.core import runtime
from meshpar.core.errors import CheckpointError
from meshpar.core.layout import ModelLayout
from meshpar.state.averaging import Averaged
from meshpar.state.full import BLOCKS, place_optimizer_state
from meshpar.tensors.placements import local_tensor, placed_like, replicated_like, sharded_axes

NamedOptimizers = Mapping[str, torch.optim.Optimizer]  # of different parameters
Optimizers = torch.optim.Optimizer | NamedOptimizers
OptimizerGroup = tuple[str, str, int]  # the name and the class of the optimizer, and the group's position there
# How a step is computed, not what is computed: the running optimizer keeps its own.
_IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}
_TEXT_BYTES = 8192  # more than a Mersenne Twister's 624 words of at most 12 characters


class Checkpointable(Protocol):
    """A module on a mesh: a :class:`meshpar.Parallelized`."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def mesh(self) -> DeviceMesh: ...
    @property
    def plan(self) -> object: ...
    @property
    def layout(self) -> ModelLayout: ...
    @property
    def device(self) -> torch.device: ...
    def manual_seed(self, seed: int) -> object: ...


def mesh_axes(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape))


@final
@dataclass(frozen=True, slots=True)
class ModelState:
    """A module's tensors by their first name, and all names of each."""

    tensors: Mapping[str, Tensor]
    names: Mapping[str, tuple[str, ...]]

    def first(self, name: str) -> str:
        """Return the first name of the tensor that has ``name``."""
        if name in self.names:
            return name
        return next((first for first, group in self.names.items() if name in group), name)

    @property
    def tied(self) -> list[list[str]]:
        """The groups of names that are one tensor."""
        return [list(names) for names in self.names.values() if len(names) > 1]


def model_state(module: nn.Module, owners: Collection[str] = ()) -> ModelState:
    """Collect parameters and persistent buffers; a tied one by its name in ``owners``, or its first."""
    state = module.state_dict(keep_vars=True)
    if odd := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"these entries of the state_dict are not tensors: {', '.join(odd)}; pass them to save(extra=) instead"
        )
    _check_plain(state)
    groups: dict[int, list[str]] = {}
    for name, value in state.items():
        groups.setdefault(id(value), []).append(name)
    names = [sorted(group, key=lambda name: name not in owners) for group in groups.values()]
    return ModelState({first: state[first] for first, *_ in names}, {group[0]: tuple(group) for group in names})


def check_have_memory(tensors: Mapping[str, Tensor], verb: str) -> None:
    """Raise CheckpointError for tensors on the meta device, which ``verb`` cannot read or write."""
    if unmade := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise CheckpointError(
            f"{len(unmade)} tensors have no memory yet ({unmade[0]}, ...); call par.materialize() before {verb}"
        )


@final
@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer's tensors by checkpoint name, and the rest as plain data: groups with options, parameters' keys."""

    tensors: Mapping[str, Tensor]
    table: Mapping[str, Any]


def optimizers_of(given: Optimizers) -> dict[str, torch.optim.Optimizer]:
    """Return optimizers by name; a single one is called ``""``. Raises CheckpointError for anything else."""
    if isinstance(given, torch.optim.Optimizer):
        return {"": given}
    named = dict(given) if isinstance(given, Mapping) else {}
    fits = [isinstance(name, str) and isinstance(value, torch.optim.Optimizer) for name, value in named.items()]
    if not fits or not all(fits):
        raise CheckpointError(
            f"optimizer is a {type(given).__name__}; expected a torch.optim.Optimizer, or several by name: "
            '{"muon": muon, "adamw": adamw}'
        )
    return named


def optimizer_state(given: Optimizers, model: ModelState) -> OptimizerState:
    """Collect the state of the optimizers by parameter name; raises CheckpointError for what is no plain data."""
    names = {id(tensor): name for name, tensor in model.tensors.items()}
    optimizers, tensors = optimizers_of(given), {}
    for optimizer in optimizers.values():
        place_optimizer_state(optimizer)
    state: dict[str, dict[str, Any]] = {}
    for optimizer, parameter in parameters_of(optimizers, names):
        name = names[id(parameter)]
        entry = state[name] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                _check_plain({f"the optimizer's {key!r} of {name}": value})
                if value.numel() > 1 and not isinstance(value, DTensor) and (axes := sharded_axes(parameter)):
                    raise CheckpointError(
                        f"the optimizer keeps {key!r} of {name} as a plain tensor of shape {tuple(value.shape)}, "
                        f"although the parameter is sharded over {axes}, so no rank has all of it; expected a DTensor"
                    )
                tensors[optimizer_key(name, key)] = value
                entry[key] = "tensor"
            else:
                entry[key] = {"value": plain(value, f"the optimizer's {key!r} of {name}")}
    groups = [
        {
            "params": [names[id(p)] for p in group["params"]],
            "options": {k: _option(k, v) for k, v in group.items() if k not in _IMPLEMENTATION},
        }
        | ({"optimizer": called} if called else {})
        for called, optimizer in optimizers.items()
        for group in optimizer.param_groups
    ]
    classes = {called: type(optimizer).__name__ for called, optimizer in optimizers.items()}
    state = {name: entry for name, entry in state.items() if entry}
    return OptimizerState(tensors, {"class": classes.get("", classes), "groups": groups, "state": state})


def optimizer_key(parameter: str, key: str) -> str:
    """Return the checkpoint name of one tensor of the optimizer."""
    return f"optimizer.{parameter}.{key}"


def averaged_tensors(averages: Mapping[str, Averaged], name_of: Callable[[str], str]) -> dict[str, Tensor]:
    """Return the tensors of averages by their checkpoint names; ``name_of`` returns that of a parameter."""
    if odd := [called for called in averages if not called or "." in called or called in ("trained", "averaged")]:
        raise CheckpointError(
            f"an average is called {odd[0]!r}; expected a name without dots, and neither trained nor averaged, such "
            "as ema"
        )
    return {
        f"{AVERAGES}{called}.{name_of(name)}": tensor.detach()
        for called, average in averages.items()
        for name, tensor in average.state_dict()["averages"].items()
    }


def parameters_of(optimizers: NamedOptimizers, names: Mapping[int, str]) -> list[tuple[torch.optim.Optimizer, Tensor]]:
    """Return each parameter with its optimizer; raises CheckpointError if one is not in ``names``, or has two."""
    parameters = [
        (optimizer, parameter)
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    if strange := [tuple(parameter.shape) for _, parameter in parameters if id(parameter) not in names]:
        raise CheckpointError(
            f"the optimizer trains {len(strange)} of {len(parameters)} parameters that the module does not have "
            f"(shapes {strange[:5]}); build it after plan.apply, from par.module.parameters()"
        )
    counts = Counter(id(parameter) for _, parameter in parameters)
    if twice := [names[key] for key, count in counts.items() if count > 1]:
        raise CheckpointError(f"two optimizers train {', '.join(twice[:5])}; expected one optimizer for each parameter")
    return parameters


def _check_plain(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for tensors whose type, layout or scales a checkpoint would lose."""
    odd = []
    for name, local in ((name, local_tensor(tensor)) for name, tensor in tensors.items()):
        # a wrapper around other tensors has no memory of its own; torch has no types for this
        if type(local).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # pyright: ignore[reportAttributeAccessIssue]
            odd.append(f"{name} ({type(local).__name__})")
        elif local.layout != torch.strided:
            odd.append(f"{name} (layout {str(local.layout).removeprefix('torch.')})")
        elif local.is_quantized:
            odd.append(f"{name} (quantized, {str(local.dtype).removeprefix('torch.')})")
    if odd:
        raise CheckpointError(
            f"a checkpoint stores dense tensors; got {', '.join(odd)}; dequantize these tensors (or make them dense) "
            "before the plan is applied, or exclude them from checkpoints: register_buffer(..., persistent=False)"
        )


def _option(key: str, value: object) -> Any:  # noqa: ANN401 - plain data
    return plain(value.item() if isinstance(value, Tensor) else value, f"the optimizer's option {key!r}")


def plain(value: object, what: str) -> Any:  # noqa: ANN401 - plain data
    """Return ``value`` as a manifest returns it (tuples become lists); raises CheckpointError if it cannot store it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(element, what) for element in value]
    kinds = {str if isinstance(key, str) else type(key) for key in value} if isinstance(value, Mapping) else set()
    if isinstance(value, Mapping) and (kinds <= {str} or kinds == {int}):
        return (Counter if kinds == {int} and isinstance(value, Counter) else dict)(
            {key: plain(element, f"{what}.{key}") for key, element in value.items()}
        )
    got = f"a dict with keys of {', '.join(sorted(kind.__name__ for kind in kinds))}" if kinds else type(value).__name__
    raise CheckpointError(
        f"{what} must be plain data (None, bool, int, float, str, lists of these, and dicts of these with keys that "
        f"are all str or all int), got {got}"
    )


def restore_optimizer(
    given: Optimizers,
    model: ModelState,
    table: Mapping[str, Any],
    renamed: Mapping[str, str],
    stored: Mapping[str, Stored],
) -> list[tuple[str, Tensor]]:
    """Set the options of optimizers from a checkpoint's table; return its names with the tensor to read each into."""
    # parameters without state in the checkpoint, or with state of another class of optimizer, have none afterwards
    names = {id(tensor): name for name, tensor in model.tensors.items()}
    wanted: list[tuple[str, Tensor]] = []
    options, classes = options_by_parameter(table), class_by_parameter(table)
    for optimizer, group in ((owner, group) for owner in optimizers_of(given).values() for group in owner.param_groups):
        ours = [names[id(parameter)] for parameter in group["params"]]
        saved_names = [renamed.get(name, name) for name in ours]
        same_class = [name for name in saved_names if classes.get(name) == type(optimizer).__name__]
        # a group has one set of options, and takes those of its first parameter that the checkpoint has
        for key, value in options[same_class[0]].items() if same_class else ():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value
        for parameter, saved in zip(group["params"], saved_names):
            old = dict(optimizer.state.pop(parameter, {}))
            new: dict[str, Any] = {}
            for key, kind in table["state"].get(saved, {}).items() if saved in same_class else ():
                if kind == "tensor":
                    name = optimizer_key(saved, key)
                    new[key] = _room(stored[name], stored[MODEL + saved].dtype, key, parameter, group, old.get(key))
                    wanted.append((name, new[key]))
                else:
                    new[key] = kind["value"]
            if new:
                optimizer.state[parameter] = new
    return wanted


def _room(
    stored: Stored, trained: torch.dtype, key: str, parameter: Tensor, group: Mapping[str, Any], now: object
) -> Tensor:
    """Return a tensor for one entry of the optimizer's state: the present one if it fits, or one like the parameter."""
    # the count of steps is a scalar, also of a parameter that is one
    like = stored.shape == tuple(parameter.shape) and (stored.shape != () or key != "step")
    # What was kept in the parameter's dtype (``trained``) is cast with it: moments, and Adafactor's factors of other
    # shapes. A scalar keeps its own.
    dtype = parameter.dtype if (like or stored.shape != ()) and stored.dtype == trained else stored.dtype
    # state of one process, which has just been loaded, is whole where the parameter is divided
    undivided = like and isinstance(parameter, DTensor) and not isinstance(now, DTensor)
    if isinstance(now, Tensor) and not undivided and tuple(now.shape) == stored.shape and now.dtype == dtype:
        return now
    if like:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    room = torch.zeros(stored.shape, dtype=dtype, device="cpu" if on_host else parameter.device)
    if isinstance(parameter, DTensor) and room.ndim == parameter.ndim > 0:
        reduced = {dim for dim, size in enumerate(stored.shape) if size != parameter.shape[dim]}
        if key.endswith(BLOCKS):
            return placed_like(room, parameter, {room.ndim - 1})
        if all(stored.shape[dim] == 1 for dim in reduced):  # a factor of rows or columns
            return placed_like(room, parameter, reduced)
    if isinstance(parameter, DTensor) and room.numel() > 1:
        return replicated_like(room, parameter)  # whole on every rank: of a rule of one's own for matrices
    return room


def random_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's generators: torch's on the CPU and ``device``, Python's, a loaded numpy's."""
    state = {"cpu": torch.get_rng_state(), "python": _text(random.getstate())}
    if not runtime.on_host(device):
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        name, words, *rest = numpy.random.get_state()
        state["numpy"] = _text([name, words.tolist(), *rest])
    return {f"{RANDOM}rank-{rank}.{kind}": value for kind, value in state.items()}


def set_random_state(rank: int, device: torch.device, state: Mapping[str, Tensor]) -> None:
    """Set this rank's generators to a state from :func:`random_state`."""
    kinds = {name.removeprefix(f"{RANDOM}rank-{rank}."): value for name, value in state.items()}
    torch.set_rng_state(kinds["cpu"])
    version, words, gauss = json.loads(bytes(kinds["python"].tolist()))
    random.setstate((version, tuple(words), gauss))
    if device.type in kinds and not runtime.on_host(device):
        torch.get_device_module(device).set_rng_state(kinds[device.type], device)
    if "numpy" in kinds and importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.set_state(tuple(json.loads(bytes(kinds["numpy"].tolist()))))


def _text(value: object) -> Tensor:
    """Return JSON, padded to one length: drawing from a generator does not change the plan of a save."""
    text = json.dumps(value).encode()
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // _TEXT_BYTES) * _TEXT_BYTES)), dtype=torch.uint8)


def options_by_parameter(table: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the options that a checkpoint's optimizer had for each parameter, by its name."""
    return {name: group["options"] for group in table["groups"] for name in group["params"]}


def class_by_parameter(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of the optimizer that trained each parameter, by its name."""
    kinds = table["class"]  # several optimizers have a table of classes
    return {
        name: kinds if isinstance(kinds, str) else kinds[group["optimizer"]]
        for group in table["groups"]
        for name in group["params"]
    }


def merged_tables(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the optimizer tables of ranks that may have other parameters, as stages do; equal groups become one."""
    # The groups of one rank stay apart, also those with equal options: the nth of them is the nth of other ranks.
    groups: dict[tuple[str | None, str, int], dict[str, Any]] = {}
    for table in tables:
        seen: Counter[tuple[str | None, str]] = Counter()
        for group in table["groups"]:
            kind = group.get("optimizer"), repr(sorted(group["options"].items()))
            into = groups.setdefault((*kind, seen[kind]), {**group, "params": []})
            seen[kind] += 1
            into["params"] = list(dict.fromkeys([*into["params"], *group["params"]]))
    kinds = [table["class"] for table in tables]
    several = {name: kind for by_name in kinds if not isinstance(by_name, str) for name, kind in by_name.items()}
    return {
        "class": kinds[0] if isinstance(kinds[0], str) else several,
        "groups": list(groups.values()),
        # where several ranks have a parameter, the first one speaks for it
        "state": {k: v for table in reversed(tables) for k, v in table["state"].items()},
    }
