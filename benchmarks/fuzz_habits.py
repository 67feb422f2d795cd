"""The fuzzer's training loops, as source: an ordinary loop with the habits that were drawn, each a few lines at named
points of it.

The same text trains one process and the mesh, so a habit's meaning in one process is what the mesh is held to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

Spec = dict[str, Any]


def _always(spec: Spec) -> bool:
    return True


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """Something that people do in a training loop.

    Attributes:
        at: point of the loop -> lines there. The points: ``built`` (before apply), ``applied``, ``step``, ``micro``,
            ``loss`` (before backward), ``left`` (after the last micro-batch), ``between`` (backward and step),
            ``stepped``, ``end``; ``backward`` replaces ``loss.backward()``.
        fits: whether a drawn case can have it.
        weight: how often it is drawn, compared with the others.
        refused: nothing in one process compares, so that only a refusal is right.
        alone: no other habit stands beside it.
    """

    at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fits: Callable[[Spec], bool] = _always
    weight: float = 1.0
    refused: bool = False
    alone: bool = False


def _splits_positions(spec: Spec) -> bool:
    """Tell whether ranks of tp hold different positions, and so rightly draw different numbers."""
    return any(pass_["knobs"].get("sequence_parallel") for pass_ in spec["passes"])


def _ranks(axis: str) -> Callable[[Spec], bool]:
    return lambda spec: spec["mesh"].get(axis, 1) > 1


def _data(spec: Spec) -> bool:
    return any(size > 1 for axis, size in spec["mesh"].items() if axis != "tp")


def _plain_blocks(spec: Spec) -> bool:
    return not spec["model"]["nested"]


def _inputs_are_floats(spec: Spec) -> bool:
    return spec["model"]["family"] != "tokens"


def _alike(spec: Spec) -> bool:
    """A forward of one batch on all ranks, in training, is one larger batch to batch normalisation."""
    return spec["model"]["norm"] != "batch"


def _freeze(trains: str) -> tuple[str, ...]:
    return (
        "for name, parameter in module.named_parameters():",
        '    if name.startswith("blocks.0."):',
        f"        parameter.requires_grad_({trains})",
    )


def _hook(register: str) -> tuple[str, ...]:
    return ("for parameter in module.parameters():", "    if parameter.requires_grad:", f"        parameter.{register}")


HABITS: dict[str, Habit] = {
    "metric_forward": Habit(
        at={"between": ('record[f"metric {step}"] = whole(module(EVAL).detach())',)}, fits=_alike, weight=2
    ),
    "no_grad_eval": Habit(
        at={
            "stepped": (
                "module.eval()",
                "with torch.no_grad():",
                '    record[f"eval {step}"] = whole(module(EVAL))',
                "module.train()",
            )
        },
        weight=2,
    ),
    "eval_first": Habit(
        at={"applied": ("with torch.no_grad():", '    record["first eval"] = whole(module(EVAL))')}, fits=_alike
    ),
    "inference_eval": Habit(
        at={"stepped": ("with torch.inference_mode():", '    record[f"eval {step}"] = whole(module(EVAL))')},
        fits=_alike,
    ),
    "inference_first": Habit(
        at={"applied": ("with torch.inference_mode():", '    record["first eval"] = whole(module(EVAL))')}, fits=_alike
    ),
    "grad_eval": Habit(at={"stepped": ('record[f"eval {step}"] = whole(module(EVAL).detach())',)}, fits=_alike),
    "two_forwards": Habit(
        at={"loss": ("loss = loss + loss_sum(module(x.roll(1, -1)), y) * par.data_size / tokens",)}, weight=2
    ),
    "freeze_between": Habit(at={"step": _freeze("step != 1")}),
    "freeze_first": Habit(at={"step": _freeze("step > 0")}),
    "l2_parameters": Habit(
        at={"loss": ("loss = loss + 1e-2 * sum(p.pow(2).sum() for p in module.parameters()) / len(parts)",)}
    ),
    "optimizer_before_apply": Habit(weight=0.5),
    "parameter_hook": Habit(at={"applied": _hook("register_hook(lambda grad: 0.5 * grad)")}),
    "accumulate_hook": Habit(
        at={
            "applied": (
                "def halve(parameter):",
                "    parameter.grad.mul_(0.5)",
                *_hook("register_post_accumulate_grad_hook(halve)"),
            )
        },
        fits=lambda spec: spec["loop"]["micro"] == 1,
    ),
    "forward_hook": Habit(
        at={"applied": ("module.blocks[0].register_forward_hook(lambda block, args, out: 0.5 * out)",)},
        fits=_plain_blocks,
    ),
    "pre_hook": Habit(
        at={"built": ("model.blocks[0].register_forward_pre_hook(lambda block, args: (0.5 * args[0],))",)},
        fits=_plain_blocks,
    ),
    "backward_hook": Habit(
        at={
            "applied": (
                "module.blocks[0].register_full_backward_hook(lambda block, into, out: (into[0] if into[0] is None "
                "else 0.5 * into[0],))",
            )
        },
        fits=lambda spec: _plain_blocks(spec) and spec["model"]["counter"] != "block",
    ),
    "functional_call": Habit(
        at={
            "built": (
                "plain = {name: 0.5 * value.detach() for name, value in [*model.named_parameters(), "
                "*model.named_buffers()]}",
            ),
            "stepped": (
                "with torch.no_grad():",
                '    record[f"average {step}"] = whole(torch.func.functional_call(module, plain, (EVAL,)))',
            ),
        },
        fits=_alike,
    ),
    "state_dict_round_trip": Habit(
        at={
            "stepped": (
                "if step < 2:",
                "    saved = {name: value.clone() for name, value in module.state_dict().items()}",
            ),
            "end": ("module.load_state_dict(saved)",),
        }
    ),
    "load_plain": Habit(
        at={"applied": ("module.load_state_dict({name: 0.5 * value for name, value in build().state_dict().items()})",)}
    ),
    "plain_copy": Habit(
        at={
            "end": (
                "copied = build()",
                "copied.load_state_dict(module.state_dict())",
                'record["copy"] = whole(copied(EVAL).detach())',
            )
        }
    ),
    "deepcopy": Habit(
        at={
            "applied": ("average = copy.deepcopy(module)",),
            "end": ('record["average"] = whole(average(EVAL).detach())',),
        },
        weight=0.5,
    ),
    "gradient_penalty": Habit(
        at={
            "micro": ("x = x.clone().requires_grad_()",),
            "loss": (
                "penalty, = torch.autograd.grad(loss_sum(module(x), y), x, create_graph=True)",
                "loss = loss + 0.1 * penalty.pow(2).sum() * par.data_size / tokens",
            ),
        },
        fits=lambda spec: _inputs_are_floats(spec) and spec["model"]["recompute"] != "reentrant",
        weight=2,
    ),
    "input_gradient": Habit(
        at={
            "micro": ("x = x.clone().requires_grad_()",),
            "between": (
                "grad = torch.zeros_like(x) if x.grad is None else x.grad",
                'record[f"input gradient {step}"] = par.data_sum(grad.abs().sum() / par.data_size)',
            ),
        },
        fits=_inputs_are_floats,
    ),
    "retain_graph": Habit(at={"backward": ("loss.backward(retain_graph=True)", "loss.backward()")}),
    "autograd_grad": Habit(
        at={
            "backward": (
                "wanted = [p for p in module.parameters() if p.requires_grad]",
                "for p, grad in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True)):",
                "    p.grad = grad if p.grad is None or grad is None else p.grad + grad",
            )
        },
        fits=lambda spec: spec["model"]["recompute"] != "reentrant",
        weight=0.5,
        alone=True,
    ),
    "other_method": Habit(
        at={"loss": ("loss = loss + 0.1 * module.features(x).pow(2).sum() * par.data_size / tokens",)}
    ),
    "block_alone": Habit(
        at={"applied": ("with torch.no_grad():", '    record["block"] = whole(module.blocks[0](HIDDEN))')},
        fits=lambda spec: _plain_blocks(spec) and spec["model"]["family"] == "tokens",
    ),
    "break_accumulate": Habit(
        at={
            "micro": ("if step == 0 and x is not parts[0][0]:", "    break"),
            "left": ("if step == 0:", "    module.zero_grad()", "    continue"),
        },
        fits=lambda spec: spec["loop"]["micro"] > 1,
    ),
    "caught_in_backward": Habit(
        at={
            "applied": (
                "class Fails(torch.autograd.Function):",
                "    @staticmethod",
                "    def forward(ctx, x):",
                "        return x.clone()",
                "    @staticmethod",
                "    def backward(ctx, grad):",
                "        raise MemoryError",
                "fails = []",
                "module.blocks[0].register_forward_hook(lambda block, args, out: Fails.apply(out) if fails else out)",
            ),
            "step": ("fails[:] = [step] if step == 0 else []",),
            "backward": ("try:", "    loss.backward()", "except MemoryError:", "    break"),
            "left": ("if fails:", "    module.zero_grad()", "    continue"),
        },
        fits=_plain_blocks,
        weight=2,
        alone=True,
    ),
    "module_zero_grad": Habit(at={"stepped": ("module.zero_grad()",)}),
    "grad_of_weights": Habit(
        at={
            "between": (
                "for parameter in module.parameters():",
                "    if parameter.grad is not None:",
                "        parameter.grad.mul_(0.5)",
            )
        }
    ),
    "decay_in_place": Habit(
        at={
            "stepped": (
                "with torch.no_grad():",
                "    for parameter in module.parameters():",
                "        parameter.mul_(0.9)",
            )
        }
    ),
    "norm_logged": Habit(
        at={"between": ('record[f"size {step}"] = whole(sum(p.detach().pow(2).sum() for p in module.parameters()))',)}
    ),
    "tp_batches": Habit(
        at={"micro": ("x = x.roll(dist.get_rank() if dist.is_initialized() else 0, -1)",)},
        fits=_ranks("tp"),
        weight=0.7,
        refused=True,
        alone=True,
    ),
    "tp_seeds": Habit(
        at={"applied": ("torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)",)},
        fits=lambda spec: (
            _ranks("tp")(spec)
            and bool(spec["model"]["ff"])
            and not spec["model"]["nested"]
            and not _splits_positions(spec)
        ),
        weight=0.7,
        refused=True,
        alone=True,
    ),
    "uneven_micro": Habit(
        at={"step": ("parts = parts + parts[:1] * (par.data_rank == 0)",)},
        fits=_data,
        weight=0.3,
        refused=True,
        alone=True,
    ),
}


OF_ONE_MESH = ("input_gradient", "l2_parameters", "norm_logged")
"""Habits that compute with the batches of a rank, or with its shards of parameters, in an order of their own."""


def source(spec: Spec) -> str:
    """Return the source of ``train(apply)``: the model, the loop and what it leaves."""
    loop = spec["loop"]

    def at(point: str, indent: int, *otherwise: str) -> list[str]:
        lines = [line for name in loop["habits"] for line in HABITS[name].at.get(point, ())]
        return [" " * indent + line for line in lines or otherwise]

    optimizer = [f"    {line}" for line in _optimizer(spec)]
    early = "optimizer_before_apply" in loop["habits"]
    before, after = _zero(loop)
    total = "par.total(losses)" if spec["same_bits"] else "par.data_sum(sum(losses))"
    lines = [
        "def train(apply):",
        "    record, model = {}, build()",
        *at("built", 4),
        *(["    module = model", *optimizer] if early else []),
        "    par = apply(model)",
        "    module = par.module",
        *([] if early else optimizer),
        *at("applied", 4),
        f"    for step in range({loop['steps']}):",
        f"        micros = [batch({loop['micro']} * step + micro) for micro in range({loop['micro']})]",
        "        tokens = sum(int((y != -100).sum()) for _, y in micros)",
        "        parts = micros[par.data_rank::par.data_size]"
        if spec["same_bits"]
        else "        parts = [(x[par.data_rank::par.data_size], y[par.data_rank::par.data_size]) for x, y in micros]",
        *(
            ["        scale = par.token_scale(sum(int((y != -100).sum()) for _, y in parts))"]
            if loop["scale"] == "token_scale"
            else []
        ),
        *before,
        *at("step", 8),
        "        losses = []",
        f"        for x, y in {_micro_batches(loop)}:",
        *at("micro", 12),
        "            loss = loss_sum(module(x), y) * "
        f"{'scale' if loop['scale'] == 'token_scale' else 'par.data_size / tokens'}",
        *at("loss", 12),
        *at("backward", 12, "loss.backward()"),
        "            losses.append(whole(loss).detach())",
        *at("left", 8),
        f'        record[f"loss {{step}}"] = {total} / par.data_size',
        '        record |= {f"gradient {step} of {name}": whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}',
        *at("between", 8),
        *[f"        {line}" for line in _clip(loop)],
        *[f"        {name}.step()" for name in _names(loop)],
        *after,
        *at("stepped", 8),
        *at("end", 4),
        '    return record | {f"weight {name}": whole(value) for name, value in module.state_dict().items()}',
    ]
    return "\n".join(lines)


def _micro_batches(loop: Spec) -> str:
    if loop["accumulate"] == "plain":
        return "parts"
    return "par.accumulate(parts, reduce_each=True)" if loop["accumulate"] == "each" else "par.accumulate(parts)"


def _names(loop: Spec) -> list[str]:
    return ["optimizer", "other"] if loop["groups"] == "optimizers" else ["optimizer"]


def _optimizer(spec: Spec) -> list[str]:
    loop = spec["loop"]
    knobs = "lr=1e-2, eps=1e-3" if loop["optimizer"] == "AdamW" else "lr=1e-2, momentum=0.9"
    knobs += f", {loop['kernel']}=True" if loop["kernel"] else ""
    make = f"torch.optim.{loop['optimizer']}"
    if loop["groups"] == "one":
        return [f"optimizer = {make}(module.parameters(), {knobs})"]
    sides = [
        "large = [p for p in module.parameters() if p.ndim > 1]",
        "small = [p for p in module.parameters() if p.ndim <= 1]",
    ]
    if loop["groups"] == "optimizers":
        return [*sides, f"optimizer, other = {make}(large, {knobs}), {make}(small, {knobs})"]
    return [
        *sides,
        f'optimizer = {make}([{{"params": large}}, {{"params": small, "lr": 3e-2, "weight_decay": 0.0}}], {knobs})',
    ]


def _zero(loop: Spec) -> tuple[list[str], list[str]]:
    lines = [f"        {name}.zero_grad({'' if loop['set_to_none'] else 'set_to_none=False'})" for name in _names(loop)]
    return (lines, []) if loop["zero"] == "before" else ([], lines)


def _clip(loop: Spec) -> list[str]:
    return {
        None: [],
        "par": ['record[f"norm {step}"] = par.clip_grad_norm_(0.1).double()'],
        "torch": ['record[f"norm {step}"] = whole(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))'],
        "value": ["torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)"],
    }[loop["clip"]]
