"""The modules of a transformers model that hold experts, and those that choose them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from meshpar.core.layout import ExpertsLayout
from meshpar.models.huggingface.tensor import generic

# Verified to take rows in the order of experts.
_IN_ORDER = ("Llama4TextExperts", "JetMoeParallelExperts")


def experts_layout(model: Any) -> ExpertsLayout:
    """Return what :class:`meshpar.ExpertParallel` needs to know of a transformers model."""
    stacked = {name: module for name, module in model.named_modules() if _has_stacked_experts(module)}
    in_order = (name for name, module in stacked.items() if type(module).__name__ in _IN_ORDER)
    names = ("e_score_correction_bias", "expert_bias")  # buffers that choose experts and do not weigh them
    biases = (name for name, _ in model.named_buffers() if name.rpartition(".")[2] in names)
    balance_refusal = (
        f"{type(model).__name__} adds a balance loss of each rank's own tokens to its loss "
        "(config.output_router_logits), which is not that of all; set model.config.output_router_logits = False "
        "and training.balance_loss"
    )
    adds_loss = getattr(model.config.get_text_config(), "output_router_logits", False)
    return ExpertsLayout(
        _patterns(stacked),
        in_order=_patterns(in_order),
        routers=_routers(model),
        router_bias=_patterns(biases),
        refusal=_refusal(model, stacked),
        balance_refusal=balance_refusal if adds_loss else "",
    )


def _patterns(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(generic, names)))


def _refusal(model: nn.Module, stacked: Iterable[str]) -> str:
    """Return why a model's experts cannot be divided; empty where some can."""
    if adapted := next((name for name in stacked if name.endswith(".base_layer")), None):
        return (
            f"{adapted} is below peft's own adapters, which add to whole weights; add adapters that ranks can divide "
            "by meshpar.training.add_adapters(model, LoRA(parameters=...)), or use a mesh without ep"
        )
    if any(True for _ in stacked):
        return ""
    name = type(model).__name__
    for holder in model.modules():
        own = list(holder.named_parameters(recurse=False)) if "Expert" in type(holder).__name__ else []
        if shapes := ", ".join(f"{leaf} {tuple(parameter.shape)}" for leaf, parameter in own):
            return (
                f"{name} holds its experts as {shapes} in {type(holder).__name__}, and ExpertParallel divides "
                "parameters whose first dim counts experts, of the module that is called with (hidden states, chosen "
                "experts, weights); use a mesh without ep"
            )
    lists = (at for at, child in model.named_modules() if isinstance(child, nn.ModuleList | nn.ModuleDict))
    if listed := next((at for at in lists if at.endswith("experts")), None):
        return (
            f"{listed} is a list of modules, and each of their parameters is one expert's, of which a rank would hold "
            "all or nothing; stack them in one module that is called with (hidden states, chosen experts, weights), "
            "or use a mesh without ep"
        )
    return f"{name} has no experts to divide; drop ExpertParallel and ep from the mesh"


def _routers(model: Any) -> tuple[str, ...]:
    """Return the patterns of the modules whose first output transformers records as the routers' logits."""
    recorded = (getattr(holder, "_can_record_outputs", None) for holder in (model, model.base_model))
    recorder: Any = (next(filter(None, recorded), None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    if kind is None or recorder.index != 0:
        return ()
    return _patterns(name for name, module in model.named_modules() if isinstance(module, kind))


def _has_stacked_experts(module: nn.Module) -> bool:
    counts = {len(parameter) if parameter.ndim > 1 else 0 for parameter in module.parameters(recurse=False)}
    takes_experts = type(module).__name__ in _IN_ORDER or len(inspect.signature(module.forward).parameters) == 3
    return takes_experts and counts == {vars(module).get("num_experts")}
