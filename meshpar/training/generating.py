"""Generate and score tokens with the live, sharded model: prompts are divided over the data ranks, weights stay where
they are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.passes import Role
from meshpar.parallelized import Parallelized
from meshpar.passes.tensor.random import mix
from meshpar.step.forwards import evaluating
from meshpar.training.objectives import whole_logits

T = TypeVar("T")
R = TypeVar("R")
Tokens = Sequence[int]


def generate(
    par: Parallelized,
    prompts: Sequence[Tokens],
    *,
    tokens: int = 64,
    ends: Collection[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch: int = 8,
) -> list[list[int]]:
    """Return the tokens after each prompt, the same on every mesh and every rank.

    Models of transformers use their key/value cache; others compute the whole text for each token. An encoder-decoder
    reads the prompt and writes another text.

    >>> generate(par, [[1, 5, 7], [2]], tokens=32, ends=[0])  # doctest: +SKIP

    Args:
        par: the parallel module; its mesh may not divide positions or layers.
        prompts: token ids, at least one each; all prompts of all ranks.
        tokens: largest number of new tokens.
        ends: token ids that end a text; they are not returned.
        temperature: 0: the most likely token; otherwise logits are divided by it, and a token is drawn.
        top_p: draw from the fewest tokens whose probabilities reach this sum.
        seed: of the draws, together with the place of the prompt in ``prompts``.
        batch: prompts of a data rank at once.

    Collective: every rank calls it, with the same arguments.
    """
    if not all(prompts):
        raise MeshparError(f"prompt {[*map(bool, prompts)].index(False)} has no token; give it at least one")

    def answer_rows(places: list[int], rows: list[Tokens]) -> list[list[int]]:
        drawn = [torch.Generator().manual_seed(mix(seed, number)) for number in places]
        step, answers = _continue_rows(par, rows), [list[int]() for _ in rows]
        open_rows = [number >= 0 for number in places]
        last = None
        for _ in range(tokens):
            logits = step(last)
            last = _choose(logits, drawn, temperature, top_p)
            for row, token in enumerate(last.tolist()):
                open_rows[row] = open_rows[row] and token not in ends
                answers[row] += [token] if open_rows[row] else []
            if not par.data_sum(torch.tensor(float(any(open_rows)), device=par.device)):
                break  # only where every rank is done: a rank that left would make the others wait
        return answers

    return _divide_rows(par, prompts, answer_rows, batch)


def log_likelihoods(
    par: Parallelized, pairs: Sequence[tuple[Tokens, Tokens]], *, batch: int = 8
) -> list[tuple[float, bool]]:
    """Return the log-probability of each pair's second text after its first, and whether a greedy model writes it.

    Args:
        par: the parallel module, as for :func:`generate`; an encoder-decoder reads the first text.
        pairs: token ids of a context, at least one, and of what follows.
        batch: pairs of a data rank at once.

    Collective: every rank calls it, with the same arguments.
    """
    if not all(context for context, _ in pairs):
        raise MeshparError("a context has no token; begin it with the token that begins a text")

    start = _start(par.module)

    def score_rows(places: list[int], rows: list[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        if start is None:
            read = [[*context, *more[:-1]] for context, more in rows]
            inputs = {"input_ids": _pad(read, par.device)}
        else:
            inputs = _encode(par, [context for context, _ in rows])
            inputs["decoder_input_ids"] = _pad([[start, *more[:-1]] for _, more in rows], par.device)
        logits, scores = _logits(par.module(**inputs)), list[tuple[float, bool]]()
        for row, (context, more) in enumerate(rows):
            begin = len(context) - 1 if start is None else 0
            there = logits[row, begin : begin + len(more)].float().log_softmax(-1)
            target = torch.tensor(more, dtype=torch.int64, device=there.device)
            sum_ = float(there.gather(-1, target[:, None]).sum())
            scores.append((sum_, bool((there.argmax(-1) == target).all())))
        return scores

    return _divide_rows(par, pairs, score_rows, batch)


def check_whole(par: Parallelized) -> None:
    """Raise MeshparError if the mesh divides positions or layers."""
    for role in (Role.POSITIONS, Role.LAYERS):
        if axes := par.resolved.divided(role):
            raise MeshparError(
                f"generating and scoring need whole sequences and every layer on a rank, and {axes[0]} divides them; "
                "evaluate on a mesh without it"
            )


def _divide_rows(
    par: Parallelized, rows: Sequence[T], function: Callable[[list[int], list[T]], list[R]], batch: int
) -> list[R]:
    """Return a result for each of ``rows``, of which every data rank computes its part, in as many batches."""
    check_whole(par)
    numbers, results = list(range(par.data_rank, len(rows), par.data_size)), dict[int, R]()
    with evaluating(par.module), torch.no_grad():
        for start in range(0, math.ceil(len(rows) / par.data_size), batch):
            places = numbers[start : start + batch]
            # a rank without rows computes one as well, whose values do not count
            results.update(zip(places, function(places or [-1], [rows[number] for number in places] or [rows[0]])))
    every = [results] * dist.get_world_size()
    dist.all_gather_object(every, results, group=runtime.hosts())
    gathered = {number: result for part in every for number, result in part.items()}
    return [gathered[number] for number in range(len(rows))]


def _logits(output: Any) -> Tensor:  # noqa: ANN401 - of any model
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise MeshparError(f"the model returned a {type(output).__name__}; expected logits, or an output with .logits")
    return whole_logits(logits)


def _pad(rows: Sequence[Tokens], device: torch.device, *, left: bool = False) -> Tensor:
    """Return rows as one tensor, with zeros behind the short ones, or before them."""
    lines = [torch.tensor(row, dtype=torch.int64, device=device) for row in rows]
    return pad_sequence(lines, batch_first=True, padding_side="left" if left else "right")


def _encode(par: Parallelized, rows: Sequence[Tokens], *, left: bool = False) -> dict[str, Tensor]:
    return {
        "input_ids": _pad(rows, par.device, left=left),
        "attention_mask": _pad([[1] * len(row) for row in rows], par.device, left=left),
    }


def _start(module: nn.Module) -> int | None:
    """Return the first token of an encoder-decoder's own text; None of any other model."""
    config: Any = getattr(module, "config", None)
    return int(config.decoder_start_token_id) if getattr(config, "is_encoder_decoder", False) else None


def _continue_rows(par: Parallelized, rows: Sequence[Tokens]) -> Callable[[Tensor | None], Tensor]:
    """Return a function from the tokens chosen last, (B,), None at first, to the logits of the next, (B, V)."""
    module: Any = par.module
    start, named = _start(module), inspect.signature(type(module).forward).parameters
    if "past_key_values" not in named or not hasattr(module, "config"):
        texts = [list(row) for row in rows]

        def whole(last: Tensor | None) -> Tensor:
            for text, token in zip(texts, [] if last is None else last.tolist(), strict=False):
                text.append(token)
            ends = torch.tensor([len(text) - 1 for text in texts])
            return _logits(module(input_ids=_pad(texts, par.device)))[torch.arange(len(texts)), ends]

        return whole
    inputs: dict[str, Any] = {"use_cache": True, "return_dict": True, **_encode(par, rows, left=start is None)}
    if start is not None:
        inputs["decoder_input_ids"] = torch.full((len(rows), 1), start, device=par.device)

    def cached(last: Tensor | None) -> Tensor:
        if last is not None:
            inputs["input_ids" if start is None else "decoder_input_ids"] = last[:, None]
            if start is None:
                inputs["attention_mask"] = nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        if "position_ids" in named and start is None:
            places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            inputs["position_ids"] = places[:, -inputs["input_ids"].shape[1] :]
        output = module(**inputs)
        inputs["past_key_values"] = output.past_key_values
        if start is not None:  # the encoder has run
            inputs.pop("input_ids", None)
            inputs["encoder_outputs"] = (output.encoder_last_hidden_state,)
        return _logits(output)[:, -1]

    return cached


def _choose(logits_BV: Tensor, drawn: Sequence[torch.Generator], temperature: float, top_p: float) -> Tensor:
    """Return the next token of each row, (B,)."""
    if temperature <= 0:
        return logits_BV.argmax(-1)
    probabilities_BV, order_BV = (
        (logits_BV.double() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    )
    sums_BV = probabilities_BV.cumsum(-1)
    kept_BV = probabilities_BV * (sums_BV - probabilities_BV < top_p)
    draws = torch.stack([torch.rand((), generator=state, dtype=torch.float64) for state in drawn])
    draws = draws.to(logits_BV.device)
    place_B1 = (kept_BV.cumsum(-1) < (draws * kept_BV.sum(-1))[:, None]).sum(-1, keepdim=True)
    return order_BV.gather(-1, place_B1.clamp(max=order_BV.shape[-1] - 1))[:, 0]
