"""Evaluations of the live, sharded model beside the validation loss: multiple choice, samples, EleutherAI's harness.

A plugin (entry-point group ``meshpar.evaluations``) is called with the run's tokenizer and its options. An optional
member ``requires`` is the package that it needs and meshpar's extra that installs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, final

from meshpar.core.errors import MeshparError, RecipeError
from meshpar.parallelized import Parallelized
from meshpar.process.homes import expanded
from meshpar.process.imports import need
from meshpar.training.generating import generate, log_likelihoods


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
            raise MeshparError(
                f"its value {name!r} is a {type(value).__name__}; expected a number or a text"
            ) from error
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
                    raise ValueError(
                        f"answer {right!r} is no place in {len(answers)} choices, or the question is empty"
                    )
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
