"""``meshpar data preview``: samples of a recipe as text, with the trained tokens marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from meshpar.core.errors import RecipeError
from meshpar.launchers.jobs import datasets
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.losses.token_loss import IGNORE_INDEX
from meshpar.training.data import Batches
from meshpar.training.examples import ExampleFile
from meshpar.training.tokenizer import TextTokenizer

Token = tuple[int, bool]
"""An id, and whether it is trained."""


def preview_data(
    source: str, overrides: Sequence[str], count: int, *, validation: bool = False, trust: bool = False
) -> Iterator[str]:
    """Yield a text for the data, and one for each of the first ``count`` samples in the order of the training."""
    recipe = datasets.with_local_data(load_recipe(source, overrides, trust=trust))
    data = datasets.prepare_data(recipe)
    samples = datasets.sample_sets(recipe, data)[validation]
    if samples is None:
        text = "no sample is held out for a validation; set data.validation_fraction, or leave out --validation"
        raise RecipeError(text)
    yield "\n".join([str(samples), *(f"note: {note}" for note in getattr(data.split.train, "notes", ()))])
    seed = recipe.seed if validation or recipe.data.shuffle else None
    batches = Batches(samples, micro_batch=1, accumulate=min(count, len(samples)), seed=seed)
    for number, batch in enumerate(next(iter(batches)), 1):
        row = {name: tensor[0] for name, tensor in batch.items()}
        sources = [*getattr(samples, "sources", ())]
        name = f" of {sources[int(row['source'])]}" if sources else ""
        yield f"\nsample {number}{name}: {_sample_text(row, data.tokenizer, data.split.train)}"


def _sample_text(row: Mapping[str, Tensor], tokenizer: TextTokenizer | None, file: object) -> str:
    """Return a line of numbers about a sample, and its text."""
    inputs, labels = row.get("input_ids"), row["labels"]
    if inputs is None or inputs.is_floating_point() or inputs.dim() != 1:
        shapes = (f"{name} {tuple(value.shape)} of {value.dtype}" for name, value in row.items())
        return f"{', '.join(shapes)}; {int((labels != IGNORE_INDEX).sum())} labels count"
    if "attention_mask" in row:
        tokens = [(int(token), False) for token in inputs[row["attention_mask"] > 0]]
        label = f"class {int(labels)}" if labels.dim() == 0 else ""
        if isinstance(file, ExampleFile) and file.classes:
            label = f"«{file.classes[int(labels)]}»"
        target = [(int(token), True) for token in labels.reshape(-1) if token != IGNORE_INDEX and labels.dim()]
        head = f"{len(tokens)} tokens" + (f", {len(target)} of the target" if target else "")
        return f"{head}\n{_text(tokens, tokenizer)}\n{label or _text(target, tokenizer)}"
    tokens, lengths = _packed_tokens(inputs, labels, row.get("position_ids"))
    shown = f"{len(lengths)} documents of {', '.join(map(str, lengths))} tokens" if len(lengths) > 1 else "1 document"
    trained = int((labels != IGNORE_INDEX).sum())
    empty = len(inputs) - sum(lengths)
    return f"{shown}, {trained} of {len(inputs)} positions trained, {empty} empty\n{_text(tokens, tokenizer)}"


def _packed_tokens(inputs: Tensor, labels: Tensor, positions: Tensor | None) -> tuple[list[Token], list[int]]:
    """Return the tokens of packed documents, and how many inputs each has: a label is the token after its input."""
    counted = (labels != IGNORE_INDEX).nonzero().reshape(-1).tolist()
    begins = [0] if positions is None else (positions == 0).nonzero().reshape(-1).tolist()
    ends = [*begins[1:], len(inputs)]
    if counted:  # what follows is filled up, where it is one token again and again
        rest = inputs[counted[-1] + 1 :]
        if len(rest) > 1 and bool((rest == rest[-1]).all()):
            begins = [begin for begin in begins if begin <= counted[-1]]
            ends = [*begins[1:], counted[-1] + 1]
    tokens: list[Token] = []
    for begin, end in zip(begins, ends):
        document: list[Token] = [(int(inputs[begin]), False)]
        for index in range(begin, end):
            label = int(labels[index])
            if label != IGNORE_INDEX:
                document.append((label, True))
            elif index + 1 < end:
                document.append((int(inputs[index + 1]), False))
        tokens += document
    return tokens, [end - begin for begin, end in zip(begins, ends)]


def _text(tokens: Sequence[Token], tokenizer: TextTokenizer | None) -> str:
    """Return tokens as text, the trained ones between « and »; ids where there is no tokenizer."""
    runs: list[tuple[list[int], bool]] = []
    for token, trained in tokens:
        if not runs or runs[-1][1] != trained:
            runs.append(([], trained))
        runs[-1][0].append(token)
    texts = (
        (" ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, special=True), trained)
        for ids, trained in runs
    )
    return "".join(f"«{text}»" if trained else text for text, trained in texts)
