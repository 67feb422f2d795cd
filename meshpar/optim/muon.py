"""Muon: momentum whose update a rule makes of each whole matrix on one rank, whatever the mesh."""

from __future__ import annotations

import abc
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar.core.errors import MeshparError
from meshpar.optim.matrices import Matrices, OwnedMatrix, Owners, Place, Round, matrices_of, shares
from meshpar.parallelized import Parallelized
from meshpar.passes.pipeline.portion import first_covering
from meshpar.step.forward import layout_of
from meshpar.tensors.placements import held_by_this_rank, local_gradient, local_tensor, replicated_like

_ROUND_BYTES = 64 << 20  # that an owner gets in one exchange; a single matrix may be larger
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_SHAPES = ("stacked", "dim", "parts")  # of Matrices
_KNOWN = {"rule", "lr", "weight_decay", "momentum", "nesterov", "ns_steps", "betas", "eps", *_SHAPES}
_Options = Mapping[str, Any]


class MatrixRule(abc.ABC):
    """A rule of one's own for whole matrices: ``Muon(update=...)``.

    One rank computes the update of a matrix, and every rank has its state afterwards.

    >>> class Sign(MatrixRule):
    ...     def update(self, matrix, state, group):
    ...         return matrix.sign()
    """

    def state(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of what the rule keeps of a matrix, in float32. It begins with zeros; none by default.

        Every rank keeps all of it, and a checkpoint has it once, for any mesh: keep vectors of rows or columns.
        """
        return {}

    @abc.abstractmethod
    def update(self, matrix: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        """Return the update of one matrix, which replaces its momentum.

        Args:
            matrix: gradient after momentum, (rows, columns) in ``ns_dtype``. The rule may write into it.
            state: tensors of :meth:`state`, which the rule changes in place.
            group: the options of the parameter's group.
        """

    def apply(self, weight: Tensor, update: Tensor, factor: float, group: Mapping[str, Any]) -> None:
        """Step the same part of a weight and of its update in place: each element alone. Decays as AdamW by default.

        Args:
            weight: part of the matrix that this rank holds.
            update: the same part of what :meth:`update` returned.
            factor: of ``adjust_lr_fn``, from the whole matrix's rows and columns.
            group: the options of the parameter's group, with ``lr`` and ``weight_decay``.
        """
        lr = float(group["lr"])
        weight.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * factor)


@final
class _Orthogonal(MatrixRule):
    """Replace the momentum by about the nearest semi-orthogonal matrix, as torch.optim.Muon does."""

    def update(self, matrix: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        return orthogonal(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


class _Work(NamedTuple):
    """The matrices of a step that each rank computes, and its parts of their parameters' state by the rule."""

    # the last has the dtype and device of the exchange
    rounds: list[tuple[Owners, Round, Tensor]]
    # the numbers of parameters whose matrices these ranks divide
    members: list[tuple[Owners, list[int], Tensor]]
    # of each parameter: name -> elements
    sizes: list[Counter[str]]
    # of each matrix, by its id: name -> elements and shape
    spans: dict[int, dict[str, tuple[slice, tuple[int, ...]]]]


@final
class Muon(torch.optim.Optimizer):
    """Train matrices by Muon and the rest by AdamW, with the numbers of one process on every mesh.

    The rule, its defaults and ``adjust_lr_fn`` are those of ``torch.optim.Muon`` (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon). In a step, each matrix goes whole to one of the ranks that hold its
    parts, which orthogonalises it, and the parts of the result go back; replicas divide the matrices. AdamW trains
    embeddings, the layer that makes logits, norms, biases, vectors and scalars. The layout says what a matrix is: a
    fused projection is several, each expert is one, a convolution is flattened to (output channels, rest).

    >>> from torch import nn
    >>> from meshpar.optim import Muon
    >>> optimizer = Muon(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), lr=0.02, adamw={"lr": 3e-4})
    >>> {group["rule"]: (len(group["params"]), group["lr"]) for group in optimizer.param_groups}
    {'muon': (1, 0.02), 'adamw': (3, 0.0003)}

    Args:
        module: the parallel module or its ``Parallelized``; build the optimizer after ``plan.apply``.
        lr: learning rate of matrices.
        weight_decay: decoupled decay of matrices, and of what AdamW trains with two dims or more.
        momentum: as in ``torch.optim.Muon``.
        nesterov: as in ``torch.optim.Muon``.
        ns_coefficients: as in ``torch.optim.Muon``.
        eps: as in ``torch.optim.Muon``.
        ns_steps: as in ``torch.optim.Muon``.
        adjust_lr_fn: factor of ``lr`` from rows and columns of a matrix: ``"original"`` (None) or
            ``"match_rms_adamw"``, with which learning rate and decay of AdamW fit.
        ns_dtype: dtype of the iterations, and of what ranks exchange. ``"bfloat16"`` is torch's; it amplifies the last
            bit of a gradient, so runs on two meshes drift apart. ``"float32"`` equals one process to rounding.
        update: a rule of one's own in place of the iterations; it gets ``ns_dtype``, and ``adjust_lr_fn`` applies.
        per_head: each head of a projection in the layout's ``heads`` is a matrix.
        adamw: ``lr``, ``betas``, ``eps`` and ``weight_decay`` of AdamW, where they differ from ``lr``, (0.9, 0.95),
            1e-8 and ``weight_decay``.
        groups: pattern of parameters, or of modules for all of theirs -> own options, by the first pattern: ``rule``
            (``"muon"`` or ``"adamw"``), ``lr``, ``weight_decay``; ``stacked`` (each index of the first dim has its own
            matrices), and ``parts`` along ``dim`` (0 or 1) of a matrix: a number of equal ones, or relative sizes
            (``(4, 1, 1)``: queries of four heads, keys and values of one).

    Raises:
        MeshparError: an option is not known, a pattern matches nothing, or nothing says what the matrices of a
            parameter are.

    Collective where a parameter is split over several axes.
    """

    takes_module = True

    def __init__(
        self,
        module: nn.Module | Parallelized,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        ns_dtype: Literal["bfloat16", "float32"] = "bfloat16",
        update: MatrixRule | None = None,
        per_head: bool = False,
        adamw: Mapping[str, Any] | None = None,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        module = module if isinstance(module, nn.Module) else module.module
        common = {"lr_scale": 1.0, **asdict(Matrices())}
        rates = {"lr": lr, "weight_decay": weight_decay}
        muon = {"rule": "muon", **rates, "momentum": momentum, "nesterov": nesterov}
        muon |= {"ns_coefficients": tuple(ns_coefficients), "eps": eps, "ns_steps": ns_steps}
        muon |= {"adjust_lr_fn": adjust_lr_fn, "ns_dtype": ns_dtype}
        rest = {"rule": "adamw", **rates, "betas": (0.9, 0.95), "eps": 1e-8}
        rest |= {key: tuple(value) if key == "betas" else value for key, value in (adamw or {}).items()}
        self._rule = _Orthogonal() if update is None else update
        _check(muon, adamw or {}, groups or {}, self._rule)
        groups_of_both = _sort_groups(module, common | muon, common | rest, groups or {}, per_head=per_head)
        # which holds its parameters: the number of one that is gone may be another's
        self._planned: tuple[list[Tensor], _Work] = ([], _Work([], [], [], {}))
        super().__init__(groups_of_both, {})
        self._shares = functools.cache(shares)  # of a layout, of which many parameters have the same
        for group in self.param_groups:
            for parameter in group["params"] if group["rule"] == "muon" else ():
                self._owners(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step, after ``closure``, if given. Collective over the ranks that hold a parameter."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        matrices: list[tuple[Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["rule"] == "muon":
                matrices += [(parameter, group) for parameter in trained]
            else:
                self._step_adamw(trained, group)
        self._step_muon(matrices)
        return loss

    def _step_adamw(self, trained: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Step as torch.optim.AdamW does, operation by operation, on this rank's parts."""
        for parameter in trained:
            state = self.state[parameter]
            if "exp_avg" not in state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            state["step"] += 1
            lr, (beta1, beta2), step = float(group["lr"]), group["betas"], state["step"]
            local, grad = local_tensor(parameter), local_gradient(parameter)
            first, second = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
            local.mul_(1 - lr * group["weight_decay"])
            first.lerp_(grad, 1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
            local.addcdiv_(first, root, value=-lr / (1 - beta1**step))

    def _step_muon(self, matrices: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        work = self._plan(matrices)
        weights, grads, momenta, states = [], [], [], []
        for number, (parameter, group) in enumerate(matrices):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            weights.append(local_tensor(parameter))
            grads.append(local_gradient(parameter))
            momenta.append(local_tensor(state["momentum_buffer"]))
            momenta[-1].lerp_(grads[-1], 1 - group["momentum"])
            for name, size in work.sizes[number].items():
                if name not in state:
                    zeros = torch.zeros(size, device=weights[-1].device)
                    state[name] = replicated_like(zeros, parameter) if isinstance(parameter, DTensor) else zeros
            states.append({name: local_tensor(state[name]) for name in work.sizes[number]})
        # what the rule makes of the states of this rank's matrices; zero for those of other ranks
        computed = [{name: torch.zeros_like(value) for name, value in state.items()} for state in states]

        def part_of(piece: OwnedMatrix, place: Place) -> Tensor:
            group = matrices[piece.parameter][1]
            momentum, grad = momenta[piece.parameter][place], grads[piece.parameter][place]
            return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

        def compute(piece: OwnedMatrix, matrix: Tensor) -> Tensor:
            number, state = piece.parameter, dict[str, Tensor]()
            for name, (span, shape) in work.spans[id(piece)].items():
                state[name] = states[number][name][span].to(matrix.device, copy=True).view(shape)
            update = self._rule.update(matrix, state, matrices[number][1])
            for name, (span, _) in work.spans[id(piece)].items():
                computed[number][name][span] = state[name].flatten()
            return update

        def put(piece: OwnedMatrix, place: Place, update: Tensor) -> None:
            group, part = matrices[piece.parameter][1], weights[piece.parameter][place]
            rows, columns = piece.shape  # the factors of the learning rate are torch.optim.Muon's
            by_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
            factor = 0.2 * math.sqrt(max(rows, columns)) if by_adamw else math.sqrt(max(1, rows / columns))
            self._rule.apply(part, update.to(part.device), factor, group)

        for owners, one_round, like in work.rounds:
            owners.run(one_round, part_of, compute, put, like)
        for owners, numbers, like in work.members:
            values = [value for number in numbers for value in computed[number].values()]
            sums = owners.add(torch.cat(values).to(like.device)) if values else torch.empty(0)
            for number in numbers:
                for value in states[number].values():
                    value.copy_(sums[: len(value)])
                    sums = sums[len(value) :]

    def _owners(self, parameter: Tensor) -> tuple[Owners, list[Place]]:
        if not isinstance(parameter, DTensor):
            return Owners((0,), None, None), [held_by_this_rank(parameter)]
        return self._shares(parameter.shape, parameter.device_mesh, parameter.placements)

    def _plan(self, matrices: Sequence[tuple[Tensor, dict[str, Any]]]) -> _Work:
        """Return who computes what, kept while the same parameters are trained."""
        trained = [parameter for parameter, _ in matrices]
        if [*map(id, self._planned[0])] == [*map(id, trained)]:
            return self._planned[1]
        sets: dict[tuple[Any, ...], tuple[Owners, list[OwnedMatrix], list[int], Tensor]] = {}
        work = _Work([], [], [Counter() for _ in trained], {})
        for number, (parameter, group) in enumerate(matrices):
            owners, parts = self._owners(parameter)
            kind = Matrices(**{name: group[name] for name in _SHAPES})
            like = torch.empty(0, device=_device(parameter), dtype=_DTYPES[group["ns_dtype"]])
            alike = owners.ranks, owners.replicas, like.device, like.dtype
            _, pieces, numbers, _ = sets.setdefault(alike, (owners, [], [], like))
            numbers.append(number)
            for span in kind.of(parameter.shape):
                piece = OwnedMatrix(parameter=number, place=span, shape=kind.shape_of(span), parts=parts)
                pieces.append(piece)
                spans = work.spans[id(piece)] = {}
                for name, shape in self._rule.state(*piece.shape).items():
                    start = work.sizes[number][name]
                    work.sizes[number][name] += math.prod(shape)
                    spans[name] = slice(start, work.sizes[number][name]), shape
        for owners, pieces, numbers, like in sets.values():
            rounds = owners.rounds(pieces, _ROUND_BYTES // like.element_size())
            work.rounds.extend((owners, one_round, like) for one_round in rounds)
            work.members.append((owners, numbers, like))
        self._planned = trained, work
        return work


def orthogonal(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return about the nearest semi-orthogonal matrix, in place, by the operations of torch.optim.Muon (same bits)."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if tall else matrix
    wide.div_(wide.norm().clamp(min=eps))
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


def _device(parameter: Tensor) -> torch.device:
    """Return where ranks exchange: parameters in host memory are exchanged on their mesh's device."""
    here = local_tensor(parameter).device
    kind = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else here.type
    return here if here.type in (kind, "meta") else torch.device(kind)


def _sort_groups(
    module: nn.Module, muon: _Options, rest: _Options, own: Mapping[str, _Options], *, per_head: bool
) -> list[dict[str, Any]]:
    """Return the parameters that require a gradient in groups of equal options, matrices first."""
    layout = layout_of(module)
    names: dict[nn.Parameter, list[str]] = {}
    for name, trained in module.named_parameters(remove_duplicate=False):
        if trained.requires_grad:
            names.setdefault(trained, []).append(name)
    chosen = first_covering([*own], module, "groups pattern")
    groups: dict[str, dict[str, Any]] = {}
    for parameter, every in names.items():
        options = own[chosen[id(parameter)]] if id(parameter) in chosen else {}
        said: Matrices | None = Matrices(**{key: options[key] for key in _SHAPES if key in options})
        if options.get("rule") == "adamw":
            said = None
        elif not options.keys() & {"rule", *_SHAPES} or parameter.ndim < 2:
            described = [matrices_of(name, parameter, module, layout, per_head=per_head) for name in every]
            said = None if None in described else described[0]
        if said is not None and (problem := said.problem(parameter.shape)):
            raise MeshparError(f"{every[0]}, of shape {tuple(parameter.shape)}, {problem}")
        group = dict(rest) if said is None else {**muon, **asdict(said)}
        if parameter.ndim < 2:
            group["weight_decay"] = 0.0
        group |= {key: value for key, value in options.items() if key not in ("rule", *_SHAPES)}
        group["lr_scale"] = group["lr"] / muon["lr"] if muon["lr"] else 1.0
        groups.setdefault(repr(group), {**group, "params": []})["params"].append(parameter)
    if not groups:
        raise MeshparError("no parameter of the model requires a gradient; there is nothing to train")
    return sorted(groups.values(), key=lambda group: group["rule"] != "muon")


def _check(muon: _Options, adamw: _Options, groups: Mapping[str, _Options], rule: object) -> None:
    wanted = [(name, muon[name] >= 0, "0 or more") for name in ("lr", "weight_decay", "momentum")]
    wanted.append(("ns_steps", 0 < muon["ns_steps"] < 100, "from 1 to 99"))
    for name, words in (("adjust_lr_fn", (None, "original", "match_rms_adamw")), ("ns_dtype", _DTYPES)):
        wanted.append((name, muon[name] in words, f"one of {', '.join(map(str, words))}"))
    problems = [f"{name} must be {what}, got {muon[name]!r}" for name, fits, what in wanted if not fits]
    for what, allowed, keys in (
        ("adamw has", ("betas", "eps", "lr", "weight_decay"), adamw),
        ("groups have", sorted(_KNOWN), itertools.chain.from_iterable(groups.values())),
    ):
        problems += [f"{what} no option {key!r}; there are {', '.join(allowed)}" for key in keys if key not in allowed]
    if not isinstance(rule, MatrixRule):
        problems.append(f"update is {rule!r}; expected an object of a class that inherits meshpar.optim.MatrixRule")
    if problems:
        raise MeshparError("Muon: " + "; ".join(problems))
