"""The parameters that a plan placed on a module, and the ones that somebody added, replaced or removed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

from torch import Tensor, nn

from meshpar.errors import ParallelError
from meshpar.patterns import class_name


@final
class Placed:
    """Compare a module's parameters with those that its plan placed.

    A parameter that a plan did not place is trained by each rank for itself: no pass reduces its gradient or shards it.

    Args:
        module: the outermost module, as the plan left it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.record()

    def record(self) -> None:
        """Take the module's parameters as they are now for those of the plan."""
        self._held = [(child, dict(child._parameters), tuple(child._modules.values())) for child in self._module.modules()]
        self._kinds = [(child, type(child), class_name(child)) for child, _, _ in self._held]
        self._names = {name: id(value) for name, value in self._module.named_parameters(remove_duplicate=False)}

    def check(self, shards: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Refuse parameters other than those of the plan.

        Args:
            shards: returns the parameters that units shard now; loading with ``assign=True`` hands them others.

        Raises:
            ParallelError: names the parameters that are new, replaced or gone.
        """
        if all(_same(child, parameters, children) for child, parameters, children in self._held):
            self._check_kinds()
            return
        now, known = dict(self._module.named_parameters(remove_duplicate=False)), {*self._names.values(), *map(id, shards())}
        if names := [name for name, value in now.items() if id(value) not in known]:
            replaced = names[0] in self._names
            raise ParallelError(
                f"{', '.join(names[:6])} {'was replaced by another tensor' if replaced else 'came into the module'} after plan.apply: no "
                "pass places it or reduces its gradient. Put a new head, probe, adapter or parametrization into the module before "
                "plan.apply; copy values into the parameters that are there (par.load_state_dict); register as a buffer what forward "
                "assigns. torch.func.functional_call with other weights cannot work on a parallel module (par.averaged(decay) evaluates "
                "averages)"
            )
        held: dict[int, set[str]] = {}
        for name, value in now.items():
            held.setdefault(id(value), set()).add(name.rpartition(".")[2])
        gone = [name for name, number in self._names.items() if name.rpartition(".")[2] not in held.get(number, ()) and name not in now]
        if gone := gone or _tied_since(self._names, now):
            raise ParallelError(
                f"{', '.join(gone[:6])} left the module after plan.apply, and the ranks would still gather and reduce it; take "
                "modules out, and tie parameters, before plan.apply"
            )
        self._check_kinds()
        self.record()  # modules without parameters, the same parameters in other modules, or others that units have taken

    def _check_kinds(self) -> None:
        if changed := next((name for child, kind, name in self._kinds if type(child) is not kind), None):
            raise ParallelError(
                f"the class of a {changed} in the module was replaced after plan.apply, whose passes have changed what a call of it does; "
                "give it its class before plan.apply, or replace its forward"
            )


def _tied_since(names: Mapping[str, int], now: Mapping[str, nn.Parameter]) -> list[str]:
    """Return names whose parameters were apart and are one now."""
    firsts: dict[int, str] = {}
    kept = [(name, value) for name, value in now.items() if name in names]
    return [name for name, value in kept if names[name] != names[firsts.setdefault(id(value), name)]]


def _same(child: nn.Module, parameters: Mapping[str, Tensor | None], children: tuple[object, ...]) -> bool:
    now, inside = child._parameters, child._modules
    return (
        len(now) == len(parameters)
        and len(inside) == len(children)
        and all(value is now.get(name) for name, value in parameters.items())
        and all(one is other for one, other in zip(inside.values(), children))
    )
