"""The five jobs in their long form, each with its metric against a baseline: ``python benchmarks/jobs.py
gpt2|t5|bert|qwen3|hybrid ...``.

Runs lie in ``runs/`` and go on where they stopped, so that a second call only evaluates. docs/jobs.md holds what it
printed.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from meshpar.launchers import Recipe, export_run, load_recipe, train_recipe
from meshpar.launchers.jobs import datasets
from meshpar.training import ExampleFile, ExampleSplit, PackedTokens

SUMMARIES = 200
"""Held-out functions to summarise."""


def train(name: str, *overrides: str, **options: Any) -> Recipe:
    """Train a recipe on two processes and return it."""
    start = time.monotonic()
    code = train_recipe(name, overrides, quiet=True, **{"nproc": 2} | options)
    assert code == 0, code
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return load_recipe(name, overrides)


def last(recipe: Recipe, metric: str) -> float:
    """Return the last value of a metric."""
    records = map(json.loads, (recipe.folder / "metrics.jsonl").read_text().splitlines())
    return [record[metric] for record in records if record.get(metric) is not None][-1]


def unigram_loss(train_ids: Any, held_out: Any) -> float:
    """Return the cross entropy of held-out tokens under the training tokens' frequencies, with one added to each
    count.
    """
    counts, size = Counter(train_ids.tolist()), int(max(train_ids.max(), held_out.max())) + 1
    total = len(train_ids) + size
    seen = Counter(held_out.tolist())
    return -sum(n * math.log((counts[id_] + 1) / total) for id_, n in seen.items()) / len(held_out)


def rouge_l(written: Sequence[str], right: Sequence[str]) -> float:
    """Return the F-measure of the longest common subsequence of words (Lin, 2004)."""
    row = [0] * (len(right) + 1)
    for word in written:
        before = 0
        for place, other in enumerate(right, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return 2 * row[-1] / (len(written) + len(right)) if written and right else 0.0


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower().replace("_", " "))


def gpt2() -> None:
    """Pre-training, stopped and gone on with, exported."""
    train("gpt2_small", "training.steps=250", "schedule.steps=500")
    recipe = train("gpt2_small")
    tokens = datasets.prepare_data(recipe).tokens
    export = export_run(recipe.folder, recipe.folder / "export", best="val/loss", overwrite=True)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(export).eval()
    samples = PackedTokens(tokens.validation, recipe.data.sequence_length)
    total = count = 0.0
    with torch.no_grad():
        for start in range(0, min(len(samples), 256), 16):
            batch = samples.__getitems__(list(range(start, min(len(samples), start + 16))))
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits  # with a cache it would not look for documents
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            count += int((labels != -100).sum())
    unigram = unigram_loss(tokens.train.ids(), tokens.validation.ids())
    print(f"gpt2: held-out loss by transformers {total / count:.3f}, unigram model {unigram:.3f}")


def t5() -> None:
    """Summaries of functions, the best step by validation loss."""
    recipe = train("t5_summarisation")
    split = datasets.prepare_data(recipe).split
    assert isinstance(split, ExampleSplit) and split.validation is not None
    unigram = unigram_loss(split.train.column("output")[0], split.validation.column("output")[0])
    export = export_run(recipe.folder, recipe.folder / "best", best="val/loss", overwrite=True)
    records = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    best = min(record["val/loss"] for record in records if "val/loss" in record)
    written, named = summaries(export, split.validation, recipe)
    print(
        f"t5: held-out loss {best:.3f}, unigram model {unigram:.3f}; ROUGE-L {written:.3f}, the function's name "
        f"{named:.3f}"
    )


def summaries(export: Path, held_out: ExampleFile, recipe: Recipe) -> tuple[float, float]:
    """Return the mean ROUGE-L of greedy summaries and of the functions' names."""
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(export).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    scores, named = [], []
    for index in range(min(SUMMARIES, held_out.count)):
        ids = torch.tensor([held_out.row("input", index)[: recipe.data.sequence_length].tolist()])
        right = words(tokenizer.decode(held_out.row("output", index).tolist(), skip_special_tokens=True))
        with torch.no_grad():
            made = model.generate(input_ids=ids, max_new_tokens=recipe.data.target_length, do_sample=False)
        text = tokenizer.decode(made[0], skip_special_tokens=True)
        source = tokenizer.decode(ids[0], skip_special_tokens=True)
        name = re.search(r"def\s+(\w+)", source)
        scores.append(rouge_l(words(text), right))
        named.append(rouge_l(words(name[1]) if name else [], right))
        if index < 4:
            print(f"  {name[1] if name else '?'}: {text!r}")
    return sum(scores) / len(scores), sum(named) / len(named)


def bert() -> None:
    """Which module a line of code is from; stopped in mid-epoch and gone on with."""
    whole = load_recipe("bert_classification")
    steps = build_steps(whole)
    train("bert_classification", "training.epochs=null", f"training.steps={steps // 2 + 7}", f"schedule.steps={steps}")
    recipe = train("bert_classification")
    held_out = datasets.prepare_data(recipe).split.validation
    assert isinstance(held_out, ExampleFile)
    export = export_run(recipe.folder, recipe.folder / "best", best="+val/accuracy", overwrite=True)
    labels = held_out.column("output")[0].tolist()
    majority, share = Counter(labels).most_common(1)[0]
    print(f"bert: accuracy {accuracy(export, held_out, recipe, labels):.3f} on {len(labels)} held-out lines by "
        f"transformers; always {held_out.classes[majority]} {share / len(labels):.3f}")  # fmt: skip


def build_steps(recipe: Recipe) -> int:
    """Return how many steps a recipe's epochs have, on two data ranks."""
    count = datasets.prepare_data(recipe).split.train.count  # type: ignore[union-attr]
    return math.ceil(count / (recipe.data.micro_batch * recipe.data.accumulate * 2)) * (recipe.training.epochs or 1)


def accuracy(export: Path, held_out: ExampleFile, recipe: Recipe, labels: list[int]) -> float:
    import transformers

    from meshpar.training import LabelledExamples

    model = transformers.AutoModelForSequenceClassification.from_pretrained(export).eval()
    samples, right = LabelledExamples(held_out, length=recipe.data.sequence_length), 0
    with torch.no_grad():
        for start in range(0, len(labels), 128):
            batch = samples.__getitems__(list(range(start, min(len(labels), start + 128))))
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            right += int((logits.argmax(-1) == batch["labels"]).sum())
    return right / len(labels)


def qwen3() -> None:
    """A student with and without its teacher."""
    teacher = train("qwen3_moe_teacher")
    if not (teacher.folder / "export").is_dir():
        export_run(teacher.folder, teacher.folder / "export")
    student = train("qwen3_moe_distillation")
    options = ["training.objective_options={temperature: 2.0, weight: 0.0}", "output_dir=runs/qwen3_moe_alone"]
    alone = train("qwen3_moe_distillation", *options)
    tokens = datasets.prepare_data(student).tokens
    print(f"qwen3: held-out cross entropy of the student {last(student, 'val/cross_entropy'):.3f}, without its teacher "
          f"{last(alone, 'val/cross_entropy'):.3f}, of the teacher {last(teacher, 'val/loss'):.3f}, unigram model "
          f"{unigram_loss(tokens.train.ids(), tokens.validation.ids()):.3f}; KL to the teacher at temperature 2 "
          f"{last(student, 'val/kl'):.3f} and {last(alone, 'val/kl'):.3f}")  # fmt: skip


def hybrid() -> None:
    """Two nodes of two ranks, and the same on one process."""
    recipe = train("hybrid_two_nodes", nodes=2)
    alone = train(
        "hybrid_two_nodes", "mesh=''", "passes=auto", "data.micro_batch=16", "output=runs/hybrid_alone", nproc=1
    )
    tokens = datasets.prepare_data(recipe).tokens
    print(f"hybrid: held-out loss {last(recipe, 'val/loss'):.5f} on two nodes, {last(alone, 'val/loss'):.5f} on one "
        f"process, unigram model {unigram_loss(tokens.train.ids(), tokens.validation.ids()):.3f}")  # fmt: skip


JOBS: dict[str, Callable[[], None]] = {"gpt2": gpt2, "t5": t5, "bert": bert, "qwen3": qwen3, "hybrid": hybrid}

if __name__ == "__main__":
    for job in sys.argv[1:] or JOBS:
        JOBS[job]()
