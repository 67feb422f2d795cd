"""Evaluations of the live, sharded model: multiple choice, samples, EleutherAI's harness; tokens that it writes and
scores: prompts are divided over the data ranks, weights stay where they are.

A plugin (entry-point group ``meshpar.evaluations``) is called with the run's tokenizer and its options. An optional
member ``requires`` is the package that it needs and meshpar's extra that installs it.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from meshpar.core import runtime
from meshpar.core.errors import MeshparError, RecipeError
from meshpar.core.passes import Role
from meshpar.parallelized import Parallelized
from meshpar.passes.tensor.random import mix
from meshpar.process.imports import expanded, need
from meshpar.step.inner_calls import evaluating
from meshpar.training.objectives import whole_logits

T = TypeVar("T")
R = TypeVar("R")
Tokens = Sequence[int]


class Tokenizer(Protocol):
    """The part of a tokenizer that evaluations use."""

    @property
    def eos_id(self) -> int: ...
    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


class Evaluation(Protocol):
    """An evaluation, as a protocol."""

    def __call__(self, par: Parallelized, /) -> Mapping[str, float | str]:
        """Return numbers, which are reported, and texts, which are printed, by name, alike on all ranks. Collective."""
        ...


def values_of(found: object) -> tuple[dict[str, float], dict[str, str]]:
    """Return the numbers and the texts of an evaluation's result; raises MeshparError for a result of another kind."""
    if not isinstance(found, Mapping):
        raise MeshparError(f"it returned a {type(found).__name__}; expected a mapping of names to numbers and texts")
    numbers, texts = dict[str, float](), dict[str, str]()
    for name, value in found.items():
        try:
            if isinstance(value, str):
                texts[str(name)] = value
            else:
                numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = f"its value {name!r} is a {type(value).__name__}; expected a number or a text"
            raise MeshparError(problem) from error
    return numbers, texts


@final
class MultipleChoice:
    """Choose among answers by their log-likelihood after the question: ``accuracy``, and ``accuracy_norm``, by byte.

    >>> MultipleChoice(tokenizer, path="questions.jsonl")(par)  # doctest: +SKIP
    {'accuracy': 0.5, 'accuracy_norm': 0.5}

    Args:
        tokenizer: of the model.
        path: JSON lines with ``question``, ``choices``, and ``answer``, the place of the right one from 0.
        delimiter: text between a question and an answer.
        batch: answers of a data rank at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, path: str, delimiter: str = " ", batch: int = 8) -> None:
        self._encode, self._batch = tokenizer.encode, batch
        self._asked: list[tuple[str, list[str], int]] = []
        line_of = path
        try:
            for number, line in enumerate(expanded(Path(path)).read_text(encoding="utf-8").splitlines(), 1):
                line_of, record = f"{path}:{number}", json.loads(line)
                text, right = record["question"], record["answer"]
                answers = [delimiter + str(choice) for choice in record["choices"]]
                if not (text and 0 <= right < len(answers)):
                    problem = f"answer {right!r} is no place in {len(answers)} choices, or the question is empty"
                    raise ValueError(problem)
                self._asked.append((text, answers, right))
        except OSError as error:
            raise RecipeError(f"{path} cannot be read: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise RecipeError(f"{line_of} is no question: {error!r}; expected question, choices and answer") from error
        if not self._asked:
            raise RecipeError(f"{path} has no line; expected a question in each line")

    def __call__(self, par: Parallelized) -> dict[str, float | str]:
        """Return both accuracies. Collective."""
        pairs = [  # the tokens of a question, and those that an answer adds to them
            (before := self._encode(text), self._encode(text + choice)[len(before) :])
            for text, choices, _ in self._asked
            for choice in choices
        ]
        scores = iter(log_likelihoods(par, pairs, batch=self._batch))
        right = normed = 0
        for _, choices, answer in self._asked:
            sums = [next(scores)[0] for _ in choices]
            rates = [value / len(choice.encode()) for value, choice in zip(sums, choices, strict=True)]
            right += sums.index(max(sums)) == answer
            normed += rates.index(max(rates)) == answer
        return {"accuracy": right / len(self._asked), "accuracy_norm": normed / len(self._asked)}


@final
@dataclass(frozen=True, slots=True)
class Samples:
    """Print how the model continues texts, ``prompts``; the other arguments are those of :func:`generate`."""

    tokenizer: Tokenizer
    _: KW_ONLY
    prompts: Sequence[str]
    tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if empty := [text for text in self.prompts if not self.tokenizer.encode(text)]:
            raise RecipeError(f"the prompt {empty[0]!r} has no token; give each prompt a text")

    def __call__(self, par: Parallelized) -> dict[str, float | str]:
        """Return the text after each prompt, by prompt. Collective."""
        asked, ends = [self.tokenizer.encode(text) for text in self.prompts], [self.tokenizer.eos_id]
        how: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        answers = generate(par, asked, tokens=self.tokens, ends=ends, **how)
        return {text: self.tokenizer.decode(answer) for text, answer in zip(self.prompts, answers, strict=True)}


@final
@dataclass(frozen=True, slots=True)
class Harness:
    """Run tasks of EleutherAI's lm-evaluation-harness on the live model.

    Args:
        tokenizer: of the model.
        tasks: names of tasks.
        limit: questions of each task; None: all.
        shots: solved examples before a question; None: as the task says.
        include: folder of further tasks' files.
        length: the most tokens of a text, whose beginning is cut; None: as the model's config says, or 2048.
        batch: texts of a data rank at once.
    """

    requires: ClassVar[tuple[str, str]] = ("lm_eval", "lm-eval")

    tokenizer: Tokenizer
    _: KW_ONLY
    tasks: Sequence[str]
    limit: int | None = None
    shots: int | None = None
    include: str | None = None
    length: int | None = None
    batch: int = 8

    def __post_init__(self) -> None:
        available = self._manager().all_tasks
        if missing := [task for task in self.tasks if task not in available]:
            raise MeshparError(f"the harness has no task {', '.join(missing)}; `lm_eval ls tasks` lists its tasks")

    def _manager(self) -> Any:  # noqa: ANN401 - of the harness
        return need("lm_eval.tasks", extra="lm-eval").TaskManager(include_path=self.include)

    def __call__(self, par: Parallelized) -> dict[str, float | str]:
        """Return every metric as ``task/metric``. Collective."""
        harness = need("lm_eval", extra="lm-eval")
        config = getattr(par.module, "config", None)
        lengths = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
        length = self.length or next((number for number in lengths if number), 2048)
        # the training's own random state stays
        how = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
        how |= {"tasks": list(self.tasks), "task_manager": self._manager(), "bootstrap_iters": 0}
        model = _live(par, self.tokenizer, length, self.batch)
        results = harness.simple_evaluate(model=model, limit=self.limit, num_fewshot=self.shots, **how)
        return {
            f"{task}/{name.partition(',')[0]}": float(value)
            for task, values in results["results"].items()
            for name, value in values.items()
            if isinstance(value, int | float) and "stderr" not in name and name != "sample_len"
        }


def cut_pair(before: list[int], more: list[int], length: int) -> tuple[list[int], list[int]]:
    """Return the ends of a context and of what follows: the model reads ``length`` tokens, all but the last one."""
    more = more[-length:]
    return before[len(before) - min(len(before), length + 1 - len(more)) :], more


def cut_prompt(ids: list[int], most: int, length: int) -> tuple[list[int], int]:
    """Return the end of a prompt, and at most ``most`` tokens after it, so that both fit into ``length``."""
    room = length - most if most < length else max(1, length // 2)
    ids = ids[-room:]
    return ids, min(most, max(1, length - len(ids)))


def _live(par: Parallelized, tokenizer: Tokenizer, length: int, batch: int) -> Any:  # noqa: ANN401 - of the harness
    """Return the live model in the harness's terms."""
    base, utils = need("lm_eval.api.model", extra="lm-eval").TemplateLM, need("lm_eval.utils", extra="lm-eval")

    class HarnessModel(base):  # type: ignore[misc, valid-type]
        eot_token_id = tokenizer.eos_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            return tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:  # noqa: ANN401
            return log_likelihoods(par, [cut_pair(before, more, length) for _, before, more in requests], batch=batch)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:  # noqa: ANN401
            cut = partial(utils.get_rolling_token_windows, max_seq_len=length, context_len=1)
            texts = (cut(tokenizer.encode(request.args[0]), self.prefix_token_id) for request in requests)
            windows = [[*map(utils.make_disjoint_window, text)] for text in texts]
            scores = iter(log_likelihoods(par, [window for text in windows for window in text], batch=batch))
            return [sum(next(scores)[0] for _ in text) for text in windows]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:  # noqa: ANN401
            answers = []
            for request in requests:
                text, how = request.args
                limit, until = int(how.get("max_gen_toks", 256)), how.get("until") or []
                drawn = float(how.get("temperature") or 0.0) if how.get("do_sample") else 0.0
                ids, limit = cut_prompt(tokenizer.encode(text) or [tokenizer.eos_id], limit, length)
                (continuation,) = generate(par, [ids], tokens=limit, ends=[tokenizer.eos_id], temperature=drawn)
                answer = tokenizer.decode(continuation)
                ends = [answer.find(stop) for stop in ([until] if isinstance(until, str) else until) if stop]
                answers.append(answer[: min((end for end in ends if end >= 0), default=len(answer))])
            return answers

    return HarnessModel()


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
            last = _choose(step(last), drawn, temperature, top_p)
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
            inputs = {"input_ids": _pad([[*context, *more[:-1]] for context, more in rows], par.device)}
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
    ids, mask = (_pad(lines, par.device, left=left) for lines in (rows, [[1] * len(row) for row in rows]))
    return {"input_ids": ids, "attention_mask": mask}


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
    softmax_BV = (logits_BV.double() / temperature).softmax(-1)
    probabilities_BV, order_BV = softmax_BV.sort(dim=-1, descending=True, stable=True)
    kept_BV = probabilities_BV * (probabilities_BV.cumsum(-1) - probabilities_BV < top_p)
    draws = torch.stack([torch.rand((), generator=state, dtype=torch.float64) for state in drawn]).to(logits_BV.device)
    place_B1 = (kept_BV.cumsum(-1) < (draws * kept_BV.sum(-1))[:, None]).sum(-1, keepdim=True)
    return order_BV.gather(-1, place_B1.clamp(max=order_BV.shape[-1] - 1))[:, 0]
