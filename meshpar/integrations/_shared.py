"""Shared by several trainers: plans, parameters that optimizers and averages follow to the mesh, and checkpoints."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from meshpar import MeshparError, ModelLayout, Parallelized, Plan, Role, passes_for
from meshpar.checkpoints import CheckpointManager, export_module
from meshpar.core.passes import axes_of
from meshpar.process.preview import PlannedModel
from meshpar.state.full import place_optimizer_state

AnyPlan = Plan | str | Mapping[str, Plan | str]
AnyLayout = ModelLayout | Mapping[str, ModelLayout] | None

_DEPTH = 4
"""How deep an optimizer's attributes are searched for parameters that it keeps outside of its groups."""


class _Replaced(NamedTuple):
    """The module of a parameter, and its name there, which passes keep."""

    module: nn.Module
    name: str


@final
class Plans:
    """The arguments ``plan`` and ``layout``: of every model, or of each by name."""

    def __init__(self, plan: AnyPlan, layout: AnyLayout) -> None:
        by_name = plan if isinstance(plan, Mapping) else {"": plan}
        self.by_name = {name: as_plan(value) for name, value in by_name.items()}
        self.of_every, self._layout = by_name is not plan, layout

    @property
    def all(self) -> list[Plan]:
        return list(self.by_name.values())

    def named(self, name: str, module: nn.Module) -> PlannedModel:
        """Return the plan of a model by its name."""
        layout = self._layout.get(name) if isinstance(self._layout, Mapping) else self._layout
        return PlannedModel(name=name, plan=self.by_name["" if self.of_every else name], module=module, layout=layout)

    def numbered(self, number: int, module: nn.Module) -> PlannedModel:
        """Return the plan of the model that is prepared after ``number`` others."""
        if self.of_every:
            return self.named(f"model_{number}" if number else "model", module)
        if number >= len(self.by_name):
            raise MeshparError(
                f"{type(module).__name__} is model {number + 1}, and plan= has {len(self.by_name)}: "
                f"{', '.join(self.by_name)}; give plan= a name and a plan for each model, in the order of the script"
            )
        return self.named(list(self.by_name)[number], module)


def as_plan(plan: object) -> Plan:
    """Return a plan, or that of a mesh's text with the passes that it usually wants."""
    if isinstance(plan, str):
        return Plan(plan, passes_for(plan))
    if not isinstance(plan, Plan):
        raise MeshparError(
            f'plan is {plan!r}; expected a Plan or the text of a mesh: pass "dp_shard=2", or '
            'meshpar.Plan("dp_shard=2", [meshpar.FullyShard()])'
        )
    return plan


def number_samples(plan: Plan) -> list[int]:
    """Return the index of each rank's samples, in the order of the ranks; ranks of ``tp`` have the same."""
    spec = plan.resolve(dist.get_world_size())
    axes = axes_of(plan.passes, spec, Role.SAMPLES)
    samples = [tuple(spec.coordinates(rank)[axis] for axis in axes) for rank in range(spec.size)]
    order = {sample: number for number, sample in enumerate(dict.fromkeys(samples))}
    return [order[sample] for sample in samples]


@final
class ReplacedParameters:
    """The parameters that plans replaced, by which optimizers find those that took their places."""

    def __init__(self) -> None:
        self._places: MutableMapping[Tensor, _Replaced] = WeakTensorKeyDictionary()

    def note(self, module: nn.Module) -> None:
        """Remember the parameters of ``module``, to which a plan is about to be applied."""
        for name, parameter in module.named_parameters():
            self._places[parameter] = _Replaced(module, name)

    @contextmanager
    def moving(self, optimizers: Sequence[Optimizer], placed: Iterable[nn.Module]) -> Iterator[None]:
        """Apply plans in the block; then give the optimizers' groups and state the new parameters, in place.

        The groups are empty in the block, so that no optimizer keeps whole parameters in memory. Call :meth:`note`
        first for each module; ``placed``: the modules on the mesh, those of the block among them.

        Raises:
            MeshparError: an optimizer holds parameters of no module, or keeps parameters or state that cannot be moved.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        entries = [[self._places.get(parameter, parameter) for parameter in group["params"]] for group in groups]
        states = [self._take_state(optimizer) for optimizer in optimizers]
        for group in groups:
            group["params"] = []
        try:
            yield
        finally:
            for group, members in zip(groups, entries, strict=True):
                group["params"] = [_parameter_now(entry) for entry in members]
        current = {id(parameter) for module in placed for parameter in module.parameters()}
        for optimizer, state in zip(optimizers, states, strict=True):
            kind = type(optimizer).__name__
            parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if strangers := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in current]:
                raise MeshparError(
                    f"{kind} holds {len(strangers)} of {len(parameters)} parameters that no model on the mesh has, of "
                    f"shapes {strangers[:3]}, and no pass would reduce their gradients; expected parameters of the "
                    "models on the mesh alone: make them parameters of a model before a plan is applied to it"
                )
            for entry, values in state:
                _check_state(kind, entry, values)
                optimizer.state[_parameter_now(entry)] = values
            place_optimizer_state(optimizer)
            if (attribute := self._kept_outside(optimizer)) is not None:
                raise MeshparError(
                    f"{kind} keeps parameters of before in its attribute {attribute!r}, which cannot be moved to the "
                    "mesh; expected them in its parameter groups alone: put the model on the mesh first, and "
                    "build the optimizer from its parameters"
                )

    def _take_state(self, optimizer: Optimizer) -> list[tuple[_Replaced, Any]]:
        """Take the state of replaced parameters out of an optimizer."""
        noted = [key for key in optimizer.state if isinstance(key, Tensor) and key in self._places]
        return [(self._places[key], optimizer.state.pop(key)) for key in noted]

    def _kept_outside(self, optimizer: Optimizer) -> str | None:
        """Return the attribute in which an optimizer still keeps a parameter of before."""

        def has_replaced(value: object, depth: int) -> bool:
            if isinstance(value, Tensor):
                return value in self._places and _parameter_now(self._places[value]) is not value
            if depth == 0:
                return False
            if isinstance(value, Mapping):
                parts = [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple, set)):
                parts = list(value)
            else:
                parts = list(vars(value).values()) if isinstance(value, Optimizer) else []
            return any(has_replaced(part, depth - 1) for part in parts)

        return next((name for name, value in vars(optimizer).items() if has_replaced(value, _DEPTH)), None)


def _parameter_now(entry: _Replaced | Tensor) -> Tensor:
    return entry.module.get_parameter(entry.name) if isinstance(entry, _Replaced) else entry


def _check_state(kind: str, entry: _Replaced, values: Mapping[str, Any]) -> None:
    """Refuse state of one parameter that has another shape, and so no part for each rank."""
    shape = tuple(_parameter_now(entry).shape)
    for key, value in values.items():
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != shape:
            raise MeshparError(
                f"{kind}'s {key!r} of {entry.name} has shape {tuple(value.shape)} and the parameter {shape}, so the "
                "state cannot be moved to the mesh; expected one value for each element: put the optimizer on the mesh "
                "before its first step"
            )


@contextmanager
def whole_states(pars: Sequence[Parallelized]) -> Iterator[list[dict[str, Any]]]:
    """Let ``state_dict()`` of modules and their parts give whole tensors, on rank 0, in the block. Collective."""
    states = [par.state_dict(full=True) for par in pars]
    with ExitStack() as stack:
        stack.callback(states.clear)
        for par, state in zip(pars, states, strict=True):
            stack.callback(_WHOLE.discard, par.module)
            _WHOLE.add(par.module)
            for name, module in par.module.named_modules():
                prefix = f"{name}." if name else ""
                part = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
                attributes = vars(module)
                stack.callback(attributes.update, {key: attributes[key] for key in ["state_dict"] if key in attributes})
                stack.callback(attributes.pop, "state_dict")
                attributes["state_dict"] = lambda *_, part=part, **__: part
        yield states


_WHOLE = weakref.WeakSet[nn.Module]()
"""Modules that give whole tensors now."""


def save_whole(par: Parallelized) -> None:
    """Let ``save_pretrained`` of transformers, diffusers and peft write whole tensors. It becomes collective."""
    module: Any = par.module
    save = getattr(module, "save_pretrained", None)
    if save is None:
        return

    def save_pretrained(*args: Any, **options: Any) -> None:
        # in a script's hook, which rank 0 may run alone, the module is whole
        with nullcontext([module.state_dict()]) if module in _WHOLE else whole_states([par]) as states:
            save(*args, **{**options, "state_dict": states[0]})

    module.save_pretrained = save_pretrained


def apply_plan(model: PlannedModel, device: torch.device) -> Parallelized:
    """Apply a plan; the class, which FSDP2 replaces, keeps the name that libraries ask for and write into exports."""
    before = type(model.module)
    par: Parallelized = model.plan.apply(model.module, model.layout, device_type=device.type)
    if (now := type(model.module)) is not before:
        now.__name__, now.__qualname__, now.__module__ = before.__name__, before.__qualname__, before.__module__
    return par


def find_managers(
    folder: Path, pars: Mapping[str, Parallelized], optimizers: Mapping[str, Optimizer]
) -> Iterator[tuple[CheckpointManager, Parallelized, dict[str, Optimizer] | None]]:
    """Yield the manager of each module's folder, the module, and its optimizers by name."""
    by_module: dict[str, dict[str, Optimizer]] = {name: {} for name in pars}
    weights = {name: {id(tensor) for tensor in par.module.parameters()} for name, par in pars.items()}
    for key, optimizer in optimizers.items():
        trained = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        owner = next((name for name, ids in weights.items() if trained <= ids), None)
        if owner is None:
            raise MeshparError(
                f"optimizer {key!r} ({type(optimizer).__name__}) trains no module of this checkpoint alone, and a "
                "checkpoint keeps a module with its optimizers; save its module, too, or make an optimizer for each "
                "module"
            )
        by_module[owner][key] = optimizer
    for name, par in pars.items():
        with CheckpointManager(folder / name, keep=1) as manager:
            yield manager, par, by_module[name] or None


def export_into(par: Parallelized, folder: Path, **options: Any) -> None:
    """Export weights to a folder, whose other files stay, without gathering the model. Collective."""
    exported = folder / ".export"
    export_module(par, exported, overwrite=True, **options)
    if dist.get_rank() == 0:
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
        for file in exported.iterdir():
            file.replace(folder / file.name)
        exported.rmdir()
    dist.barrier()


def place(par: Parallelized, parameter: Tensor, value: Any) -> Any:
    """Place a whole tensor of the parameter's shape as the parameter is; return anything else as it is."""
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
    return par.like(parameter, value) if is_whole else value


def place_average(average: Any, pars: Sequence[Parallelized]) -> None:
    """Place ``shadow_params``, an average of a model's parameters, as the parameters are."""
    par = _averaged_by(average, pars)
    pairs = zip(par.module.parameters(), average.shadow_params, strict=True)
    average.shadow_params = [place(par, parameter, shadow) for parameter, shadow in pairs]


def _averaged_by(average: Any, pars: Sequence[Parallelized]) -> Parallelized:
    shapes = [tensor.shape for tensor in average.shadow_params]
    for par in pars:
        if [parameter.shape for parameter in par.module.parameters()] == shapes:
            return par
    raise MeshparError(
        f"{type(average).__name__} averages {len(shapes)} tensors, and no model on the mesh has parameters of their "
        "shapes; expected an average of all parameters of a model: pass the model to prepare first"
    )


@contextmanager
def whole_averages(averages: Sequence[Any], pars: Sequence[Parallelized]) -> Iterator[None]:
    """Let averages have whole tensors on rank 0 in the block, and place what they have afterwards. Collective."""
    for average in averages:
        par = _averaged_by(average, pars)
        wholes = (par.whole(shadow) for shadow in average.shadow_params)
        if dist.get_rank() == 0:
            average.shadow_params = [tensor.cpu() for tensor in wholes]
        else:
            collections.deque(wholes, 0)
    try:
        yield
    finally:
        for average in averages:
            place_average(average, pars)
