"""Refuse parameters added, replaced or removed since the plan, and writes inside of a forward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter, is_not
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshpar._torch.autograd import in_backward
from meshpar._torch.tensors import BatchNorm
from meshpar.core.errors import MeshparError, ParallelError
from meshpar.core.patterns import class_name
from meshpar.exchange.ranks import Looks
from meshpar.passes.data.whole_parameters import WholeParameters, refuse_written
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.recompute import Recomputed
from meshpar.step.moment import Guard, Guarded

_TABLES = attrgetter("_parameters", "_modules")
REBUILD = (
    "to change a model that was trained, build it again with the change, apply a plan to it, and load "
    "par.state_dict(full=True, everywhere=True) of this one by load_state_dict(state, strict=False), without the "
    "tensors whose shapes changed"
)


@final
class PlacedParameters(Guard):
    """Compare a module's parameters with the plan's: each rank would train another one for itself."""

    def __init__(self, guarded: Guarded) -> None:
        self._module, self._units = guarded.module, guarded.units
        self._layers = guarded.facts.find(Layers)
        self.record()

    # In training on stages, the first micro-batch and the optimizer's step look soon enough.
    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._layers is None or not self._layers.goes_on or not torch.is_grad_enabled():
            self._check()

    def after_forward(self, output: object) -> None:
        if self._layers is None or not torch.is_grad_enabled():
            self._check()

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        if trains and not in_backward():  # whose recomputations read what is registered now
            self._check()

    def before_move(self) -> None:
        self._check()

    def after_move(self) -> None:
        self.record()

    def record(self) -> None:
        """Take the module's parameters as they are now for those of the plan."""
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet(self._module.modules())
        self._held = [(child, dict(child._parameters)) for child in self._module.modules()]
        self._kinds = [(child, type(child), class_name(child)) for child, _ in self._held]
        self._last = tuple(map(list, self._now()))
        self.parameters = tuple(self._module.parameters())
        self._names = {name: id(value) for name, value in self._module.named_parameters(remove_duplicate=False)}

    def _now(self) -> tuple[Iterable[Any], ...]:
        """Return the class, and the number, names and values of parameters and children, of each module."""
        children = [child for child, _ in self._held]
        tables = list(itertools.chain.from_iterable(map(_TABLES, children)))
        values = itertools.chain.from_iterable(map(dict.values, tables))
        return map(type, children), map(len, tables), itertools.chain.from_iterable(tables), values

    # Every forward comes here: no function of Python is called for a module.
    def _check(self) -> None:
        self._units.hide()
        kinds, counts, *names_and_values = self._now()
        last_kinds, last_counts, *last = self._last
        if (
            list(kinds) != last_kinds
            or list(counts) != last_counts
            or any(any(map(is_not, *pair)) for pair in zip(names_and_values, last))
        ):
            self._refuse_others()

    def _refuse_others(self) -> None:
        """Refuse parameters other than the plan's. Loading with ``assign=True`` hands units other ones."""
        now = dict(self._module.named_parameters(remove_duplicate=False))
        sharded = set(map(id, self._units.shards()))
        accepted = {*self._names.values(), *sharded, *self._assigned(now, sharded)}
        if names := [name for name, value in now.items() if id(value) not in accepted]:
            event = "was replaced by another tensor" if names[0] in self._names else "came into the module"
            new = self._new_modules(names)
            self._check_sizes(new)
            raise ParallelError(
                f"{', '.join(names[:6])} {event} after plan.apply: no pass places it or reduces its gradient. "
                + (
                    f"Put {', '.join(new)} into the model before plan.apply and materialize; {REBUILD}"
                    if new
                    else "Put a parameter into the model before plan.apply; copy values into the parameters that are "
                    "there (par.load_state_dict); register as a buffer what forward assigns. "
                    "torch.func.functional_call with other weights cannot work on a parallel module "
                    "(par.averaged(decay) evaluates averages)"
                )
            )
        last_names: dict[int, set[str]] = {}
        for name, value in now.items():
            last_names.setdefault(id(value), set()).add(name.rpartition(".")[2])
        gone = [
            name
            for name, number in self._names.items()
            if name.rpartition(".")[2] not in last_names.get(number, ()) and name not in now
        ]
        if gone := gone or _tied_since(self._names, now):
            raise ParallelError(
                f"{', '.join(gone[:6])} left the module after plan.apply, or became another's, and the ranks would "
                f"still gather and reduce it; leave it in the module and do not call it, or {REBUILD}"
            )
        if changed := next((name for child, kind, name in self._kinds if type(child) is not kind), None):
            raise ParallelError(
                f"the class of a {changed} in the module was replaced after plan.apply, whose passes have changed "
                "what a call of it does; give it its class before plan.apply, or replace its forward"
            )
        self.record()

    def _assigned(self, now: Mapping[str, nn.Parameter], sharded: Collection[int]) -> set[int]:
        """Return the parameters that ``load_state_dict(assign=True)`` put in place of the plan's, laid out alike."""
        parameter_of = {id(value): value for _, parameters in self._held for value in parameters.values()}
        places: dict[int, list[nn.Parameter | None]] = {}
        for name, number in self._names.items():
            places.setdefault(number, []).append(now.get(name))
        return {
            id(values[0])
            for number, values in places.items()
            if number not in sharded
            and len({id(value) for value in values}) == 1
            and _alike(parameter_of.get(number), values[0])
        }

    def _check_sizes(self, names: Iterable[str]) -> None:
        """Refuse new modules around a layer that were built for this rank's part of it, as peft builds them."""
        for outer in names:
            for inner, new in self._module.get_submodule(outer).named_modules(prefix=outer):
                if new in self.modules:
                    continue
                for leaf, layer in new.named_children():
                    sizes, part = _features(layer), _held_features(layer)
                    if layer in self.modules and part and part == _features(new) != sizes:
                        raise ParallelError(
                            f"{inner} was built for {part[1]} x {part[0]} features, this rank's part of the weight of "
                            f"{inner}.{leaf}, which has {sizes[1]} x {sizes[0]}; build it before plan.apply. For LoRA, "
                            "call layout = meshpar.training.add_adapters(model, meshpar.training.LoRA(...)) and "
                            "plan.apply(model, layout), which trains adapters on every mesh; where no pass splits "
                            "layers, peft.get_peft_model(model, config) before plan.apply is exact, too"
                        )

    def _new_modules(self, names: Iterable[str]) -> list[str]:
        """Return the outermost new modules in which parameters called ``names`` are, or were."""
        modules = dict(self._module.named_modules(remove_duplicate=False))
        outermost = dict[str, None]()
        for name in names:
            parts = name.split(".")
            around = (".".join(parts[:end]) for end in range(1, len(parts)))
            new = (path for path in around if path in modules and modules[path] not in self.modules)
            outermost.update(dict.fromkeys(itertools.islice(new, 1)))
        return list(outermost)


def _features(layer: object) -> tuple[object, object]:
    return getattr(layer, "out_features", None), getattr(layer, "in_features", None)


def _held_features(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of this rank's part of a linear layer's weight; () if it has the whole weight."""
    weight = layer._parameters.get("weight")
    return tuple(weight.to_local().shape) if isinstance(weight, DTensor) and weight.ndim == 2 else ()


def _alike(one: object, other: object) -> bool:
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return False
    laid_out = [(x.device_mesh, x.placements, x.shape, x.dtype, x.device, x.requires_grad) for x in (one, other)]
    return laid_out[0] == laid_out[1] and not one._backward_hooks and not one._post_accumulate_grad_hooks


def _tied_since(names: Mapping[str, int], now: Mapping[str, nn.Parameter]) -> list[str]:
    """Return names whose parameters were apart and are one now."""
    firsts: dict[int, str] = {}
    remaining = [(name, value) for name, value in now.items() if name in names]
    return [name for name, value in remaining if names[name] != names[firsts.setdefault(id(value), name)]]


@final
class WrittenInForward(Guard):
    """Compare whole parameters and recomputed buffers around a call, and gathered ones around a unit's forward."""

    def __init__(self, guarded: Guarded) -> None:
        self._units, self._whole = guarded.units, guarded.facts.find(WholeParameters)
        self._before: dict[str, Any] = {}
        recomputed = guarded.facts.find(Recomputed)
        children = [child for block in (recomputed.blocks if recomputed else ()) for child in block.modules()]
        # batch norm knows when it is recomputed
        self._recomputed = [child for child in children if child._buffers and not isinstance(child, BatchNorm)]
        self._buffers: list[tuple[nn.Module, str, Tensor, int]] = []
        self._looks = Looks()

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before = self._now()
        self._buffers = [
            (child, name, buffer, buffer._version)
            for child in (self._recomputed if torch.is_grad_enabled() else ())
            for name, buffer in child._buffers.items()
            if buffer is not None
        ]

    def after_forward(self, output: object) -> None:
        now = self._now()
        if now != self._before:
            refuse_written(next(name for name in now if now[name] != self._before[name]))
        buffers, self._buffers = self._buffers, []
        for child, name, buffer, version in buffers:
            if child._buffers[name] is not buffer or buffer._version != version:
                raise MeshparError(
                    f"{class_name(child)} changes its buffer {name!r} in forward, which recomputation would do twice; "
                    "leave such blocks out: ActivationCheckpoint(blocks=...)"
                )

    def _now(self) -> dict[str, Any]:
        return {} if self._whole is None else self._whole.versions()

    def unit_gathered(self, name: str, unit: nn.Module) -> None:
        self._units.writes.keep_gathered(unit)

    def after_unit(self, name: str, unit: nn.Module) -> None:
        if written := self._units.writes.written_in_forward(unit, look=self._looks.first(name)):
            refuse_written(written)
