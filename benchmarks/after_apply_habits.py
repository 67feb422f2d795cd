"""What a user's loop does with a module after ``plan.apply``, each habit a few lines at named points of a model and a loop.

The same lines run in one process and on the ranks of a plan. In them ``@k`` is a step, ``@p`` a parameter's name and ``@m`` that of a
linear layer; ``full(t)`` is ``t.full_tensor()`` of a DTensor, and ``mean(t)`` the mean over data ranks of what each has of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

ONCE, FROM, ALWAYS = "step == @k", "step >= @k", "True"
"""When lines at a point inside of the loop run: in one step, from a step on, in every step."""


@final
@dataclass(frozen=True, slots=True)
class Habit:
    """Something that people do with a module.

    Attributes:
        group: its kind; kinds are drawn alike, then the habits in one.
        at: point -> lines there, in the class of blocks (``block_init``, ``inner`` between the split layers, ``block``), in that of the
            model (``init``, ``enter``, ``forward``, ``out``), and in the loop: ``built`` (before apply), ``applied``, ``start`` (with an
            optimizer), ``step``, ``loss`` (before the backward), ``between`` (backward and step), ``stepped``, ``end``. ``call``,
            ``backward`` and ``update`` replace the forward, the backward and the optimizer's step.
        when: the conditions under which lines inside of the loop may run; one is drawn.
    """

    group: str
    at: Mapping[str, tuple[str, ...]]
    when: tuple[str, ...] = (ONCE, FROM, ALWAYS)

    def replaces(self) -> set[str]:
        """Return the lines of the plain loop in whose place this habit's stand."""
        return {"call", "backward", "update"} & set(self.at)


def _written(line: str, *points: str) -> Habit:
    """A write into a parameter under ``no_grad``, after a step where no other point is given."""
    lines = ('p = module.get_parameter("@p")', "with torch.no_grad():", f"    {line}")
    return Habit("writes", dict.fromkeys(points or ("stepped",), lines))


def _added(*lines: str) -> Habit:
    return Habit("adds", {"step": lines}, (ONCE,))


def _read(*lines: str) -> Habit:
    return Habit("reads", {"loss": ('p = module.get_parameter("@p")', *lines)})


def _odd(init: str, use: str = "") -> Habit:
    return Habit("odd", {"init": (init,), **({"forward": (use,)} if use else {})})


OPTIMIZER = "optimizer = make(module)"
EVALUATE = 'record[f"eval {step}"] = full(module(EVAL)).detach().clone()'

HABITS: dict[str, Habit] = {
    # Adds and replaces
    "new_head": _added("torch.manual_seed(5)", "module.head = nn.Linear(8, 3)", OPTIMIZER),
    "new_buffer": _added('module.register_buffer("late", torch.ones(8))'),
    "new_parameter": _added('module.register_parameter("late", nn.Parameter(torch.ones(8)))'),
    "new_module_without_parameters": _added("module.head.drop = nn.Dropout(0.0)"),
    "new_forward": Habit(
        "replaces", {"step": ("inner = module.blocks[0].forward", "module.blocks[0].forward = lambda x: 0.5 * inner(x)")}, (ONCE,)
    ),
    "new_values": Habit(
        "replaces", {"step": ('owner, _, leaf = "@p".rpartition(".")', 'p = module.get_parameter("@p")',
                              "setattr(module.get_submodule(owner), leaf, nn.Parameter(0.5 * full(p.detach())))", OPTIMIZER)}, (ONCE,)
    ),
    "no_bias": Habit("removes", {"step": ('module.get_submodule("@m").bias = None', OPTIMIZER)}, (ONCE,)),
    # Writes
    "scaled": _written("p.mul_(0.9)"),
    "scaled_data": _written("p.data.mul_(0.9)"),
    "new_data": _written("p.data = 0.9 * p.data"),
    "reset": _written("nn.init.zeros_(p)"),
    "written_in_forward": Habit("writes", {"forward": ("with torch.no_grad():", "    self.head.weight.mul_(0.9)")}),
    # Trains some
    "frozen_later": Habit("freezes", {"step": ('module.get_parameter("@p").requires_grad_(step < @k)',)}, (ALWAYS,)),
    # Reads weights in a loss
    "penalty": _read("loss = loss + 0.1 * full(p).pow(2).sum()"),
    # Keeps attributes
    "kept_output": Habit("keeps", {"block": ("self.last = y",), "loss": ("loss = loss + 0.1 * module.blocks[0].last.pow(2).mean()",)}),
    # Uses outputs twice
    "retained": Habit("outputs", {"backward": ("loss.backward(retain_graph=True)", "loss.backward()")}),
    # Evaluates
    "evaluated": Habit("evaluates", {"stepped": ("with torch.no_grad():", f"    {EVALUATE}")}),
    # Catches
    "forward_fails": Habit(
        "catches",
        {
            "block": ("if NOW == [@k]:", "    raise ValueError"),
            "step": ("NOW[0] = step", "if step == @k:", "    try:", "        module(x)", "    except ValueError:", "        NOW[0] = -1"),
        },
        (ALWAYS,),
    ),
}  # fmt: skip
