"""The load of experts: counted on the device, reported, and balanced by a bias or by a loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.autograd import in_backward
from meshpar._torch.calls import eager
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.patterns import class_name, find_modules, matches
from meshpar.parallelized import Parallelized
from meshpar.passes.experts.routing import rows_in_order
from meshpar.passes.pipeline.running import Layers


@final
class ExpertLoad:
    """Count the tokens of each expert over all ranks in training, and balance them. Recomputation is not counted twice.

    >>> load = ExpertLoad(par, balance_rate=1e-3, balance_loss=0.01)  # doctest: +SKIP
    >>> ((loss_sum + load.loss(tokens)) * scale).backward()  # each micro-batch # doctest: +SKIP
    >>> optimizer.step(); load.step()  # doctest: +SKIP
    """

    def __init__(self, par: Parallelized, *, balance_rate: float = 0.0, balance_loss: float = 0.0) -> None:
        """Hook experts and routers of the layout; the other arguments are as in :class:`TrainSettings`."""
        self._layers = par.run.find(Layers)
        if self._layers is not None and balance_loss:
            raise MeshparError(
                f"balance_loss={balance_loss} needs the logits of all routers on the rank of the loss, and the plan "
                "divides layers over ranks; use balance_rate, or a mesh without that axis"
            )
        problems = balance_problems(par.module, par.layout, balance_rate, balance_loss)
        if self._layers is None and (text := "; ".join(problems)):
            raise MeshparError(text)
        self._par, self._rate, self._coefficient, self._steps = par, balance_rate, balance_loss, 0
        experts = _modules(par.module, par.layout.experts.modules)
        self._sizes = [len(next(child.parameters(recurse=False))) for child in experts]
        self._micro = torch.zeros(sum(self._sizes), dtype=torch.int64, device=par.device)
        self._step, self._seen = torch.zeros_like(self._micro), torch.zeros_like(self._micro)
        self._choices = torch.zeros((), dtype=torch.int64, device=par.device)
        self._entropy = torch.zeros(2, device=par.device)  # a sum over tokens and layers, and their number
        self._logits: dict[int, list[Tensor]] = {}
        in_order = _modules(par.module, par.layout.experts.in_order)
        for module, counts in zip(experts, self._micro.split(self._sizes)):
            count = partial(self._count, counts, module in in_order)
            module.register_forward_pre_hook(count, with_kwargs=True, prepend=True)
        for number, module in enumerate(_modules(par.module, par.layout.experts.routers)):
            module.register_forward_hook(partial(self._route, number))

    @eager
    def _count(
        self, counts: Tensor, in_order: bool, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if not module.training or in_backward():
            return
        if in_order:
            rows, chosen = rows_in_order(dict(enumerate((*args, *kwargs.values()))), len(counts))
            weights = rows.ne(0).any(1)
            self._choices += weights.sum()
        else:
            tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
            chosen = next(tensor for tensor in tensors if not tensor.is_floating_point())
            floats = (tensor for tensor in tensors if tensor.is_floating_point() and tensor.shape == chosen.shape)
            weights = next(floats, torch.ones_like(chosen))
            self._choices += chosen.numel()
        # what is no expert, the exchange refuses on all ranks
        valid = (weights != 0) & (chosen >= 0) & (chosen < len(counts))
        counts.index_add_(0, chosen.flatten().clamp(0, len(counts) - 1), valid.flatten().to(counts.dtype))

    @eager
    # whatever a router returns
    def _route(self, place: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        if not module.training or in_backward():
            return
        logits_NE = (output if isinstance(output, Tensor) else output[0]).flatten(0, -2)
        largest = math.log(max(2, logits_NE.shape[-1]))
        entropy = torch.special.entr(logits_NE.detach().softmax(-1, dtype=torch.float32)).sum() / largest
        self._entropy += torch.stack([entropy, entropy.new_full((), len(logits_NE))])
        if self._coefficient:  # nothing is computed of them here, which a recomputation would have to repeat
            self._logits.setdefault(place, []).append(logits_NE)

    def loss(self, tokens: int) -> Tensor:
        """Return the term that balances experts, for the summed loss of a micro-batch: 0-dim float32.

        It is the number of counted tokens of all ranks, times ``balance_loss``, times the mean over layers of E x sum
        of f_i P_i (Switch Transformer, arXiv 2101.03961, equations 4 to 6): expert i's share of the micro-batch's
        choices and the mean of its probability, over the tokens of all ranks.

        Args:
            tokens: number of this rank's tokens that count in the loss of the micro-batch.

        Raises:
            MeshparError: the forward gave no gradient to the routers' logits.

        Collective: every rank calls it, after each forward that trains.
        """
        logits, self._logits = [torch.cat(self._logits[number]) for number in sorted(self._logits)], {}
        if not logits or not logits[0].requires_grad:
            raise MeshparError(
                "balance_loss got no logits of routers with a gradient from the forward; call loss() after each "
                "forward that trains, and recompute blocks by ActivationCheckpoint, not by a re-entrant checkpoint"
            )
        numbers = [self._micro.new_full((1,), count) for count in (*map(len, logits), tokens)]
        summed = self._par.data_sum(torch.cat([self._micro, *numbers]))
        counts, rows, total = summed.split([len(self._micro), len(logits), 1])
        self._fold()
        losses = []
        for scores, count, row in zip(logits, counts.split(self._sizes), rows, strict=True):
            sums = scores.softmax(-1, dtype=torch.float32).sum(0)
            losses.append(len(count) * (count / count.sum().clamp(min=1) * sums / row.clamp(min=1)).sum())
        return self._coefficient * total[0] * torch.stack(losses).mean()

    def _fold(self) -> None:
        self._step += self._micro
        self._micro.zero_()

    @torch.no_grad()
    def step(self, *, moved: bool = True) -> None:
        """Count an optimizer step; if it ``moved`` the weights, move biases by ``balance_rate``: collective."""
        if not self._sizes and self._layers is None:
            return
        self._fold()
        if self._rate and moved:
            counts = self._par.data_sum(self._step.clone()).split(self._sizes)
            for bias, count in zip(_biases(self._par.module, self._par.layout), counts, strict=True):
                bias.add_(torch.sign(count.sum() - count * len(count)), alpha=self._rate)
        self._seen += self._step
        self._step.zero_()
        self._steps += 1

    def take(self) -> dict[str, Tensor]:
        """Return the loads of experts since the last call, empty without experts. Collective.

        ``experts/least`` and ``experts/most``: tokens of the least and most used expert of any layer, in a step;
        ``experts/balance``: entropy of the shares of a layer's experts over that of equal shares, mean of layers;
        ``experts/dropped``: share of choices with weight zero, which are not counted; ``experts/entropy``: entropy of
        the softmax of a router's logits over that of equal ones, mean of tokens and layers.
        """
        if not self._steps:
            return {}
        dtype = torch.float32 if self._par.device.type == "mps" else torch.float64
        counters, sizes = (self._seen, self._choices, self._entropy), self._sizes
        flat = self._par.data_sum(torch.cat([counter.to(dtype).reshape(-1) for counter in counters]))
        if self._layers is not None:
            every = self._layers.gather((flat.cpu(), sizes))
            sizes = [size for _, sizes_of_stage in every for size in sizes_of_stage]
            sums = torch.stack([part[-3:] for part, _ in every]).sum(0)
            flat = torch.cat([*(part[:-3] for part, _ in every), sums]).to(flat.device)
        self._steps, steps = 0, self._steps
        if not sizes:
            return {}
        seen, (choices, entropy, tokens) = flat[:-3], flat[-3:]
        shares = [part / part.sum().clamp(min=1.0) for part in seen.split(sizes)]
        balances = [torch.special.entr(share).sum() / math.log(max(2, len(share))) for share in shares]
        report = {"least": seen.min() / steps, "most": seen.max() / steps, "balance": torch.stack(balances).mean()}
        report["dropped"] = 1 - seen.sum() / choices.clamp(min=1)
        if self._par.layout.experts.routers:
            report["entropy"] = entropy / tokens.clamp(min=1)
        for counter in counters:
            counter.zero_()
        return {f"experts/{name}": value for name, value in report.items()}


def balance_problems(module: nn.Module, layout: ModelLayout, balance_rate: float, balance_loss: float) -> Iterator[str]:
    """Yield why the routers of a model cannot be balanced as asked."""
    name, experts = class_name(module), _modules(module, layout.experts.modules)
    if layout.experts.balance_refusal:
        yield layout.experts.balance_refusal
    trained = any(parameter.requires_grad for module in experts for parameter in module.parameters())
    if balance_rate and experts and not trained:
        yield f"balance_rate={balance_rate} changes biases of frozen experts, as with adapters; set it to 0"
    elif balance_rate:
        biases = _biases(module, layout)
        shapes = [next(child.parameters(recurse=False)).shape[:1] for child in experts]
        if not experts or [bias.shape for bias in biases] != shapes:
            yield (
                f"balance_rate={balance_rate} moves a bias (E,) beside each router, and {name} has {len(biases)} for "
                f"{len(experts)} layers of experts; use balance_loss, a model with such biases "
                "(TransformerConfig(shared_experts=1), DeepSeek-V3, GLM4-MoE), or name them in "
                "ExpertsLayout(router_bias=...)"
            )
        elif (wrong := next((bias for bias in biases if bias.dtype.itemsize < 4), None)) is not None:
            yield (
                f"balance_rate={balance_rate} needs biases of routers in float32, got {wrong.dtype}; keep them in "
                "float32"
            )
    routers = _modules(module, layout.experts.routers)
    if balance_loss and (not routers or len(routers) != len(experts)):
        yield (
            f"balance_loss={balance_loss} needs the logits of each router, and the layout of {name} names "
            f"{len(routers)} routers for {len(experts)} layers of experts; name the modules that return them in "
            "ExpertsLayout(routers=...), or set balance_loss to 0"
        )


def _modules(module: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    return [child for pattern in patterns for _, child in find_modules(module, pattern)]


def _biases(module: nn.Module, layout: ModelLayout) -> list[Tensor]:
    named = dict(module.named_buffers())
    return [bias for pattern in layout.experts.router_bias for name, bias in named.items() if matches(pattern, name)]
