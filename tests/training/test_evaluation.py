"""Evaluations in the job: multiple choice, samples, the harness; and the loop that makes them."""

import copy
import json
from importlib.util import find_spec

import pytest
import torch

from meshpar import FullyShard, Plan, TensorParallel
from meshpar.core.errors import RecipeError
from meshpar.testing import on_ranks
from meshpar.training import Harness, MultipleChoice, Samples
from tests.support.models_for_parity import VOCAB, huggingface, transformer


class Letters:
    """A tokenizer of small letters and blanks."""

    eos_id = 0

    def encode(self, text):
        return [1 + (ord(letter) - 32) % (VOCAB - 1) for letter in text]

    def decode(self, ids):
        return "".join(chr(31 + token) for token in ids)


QUESTIONS = [
    {"question": "one and two", "choices": ["three", "four", "a"], "answer": 0},
    {"question": "red", "choices": ["blue", "x"], "answer": 1},
    {"question": "to be or", "choices": ["not", "to", "be", "or"], "answer": 2},
]


def written(folder, rows=QUESTIONS):
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@on_ranks(2)
def test_multiple_choice_is_the_same_on_every_mesh(tmp_path):
    torch.manual_seed(5)
    whole = transformer()
    letters, found = Letters(), []
    for mesh, passes in (("dp_shard=2", [FullyShard()]), ("tp=2", [TensorParallel()])):
        par = Plan(mesh, passes).apply(copy.deepcopy(whole))
        path = tmp_path / f"{mesh}-{torch.distributed.get_rank()}"
        path.mkdir()
        found.append(MultipleChoice(letters, path=written(path), batch=2)(par))
    right = 0
    for row in QUESTIONS:
        sums = []
        for choice in row["choices"]:
            ids = letters.encode(row["question"] + " " + choice)
            logits = whole(torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(float(logits[n - 1, ids[n]]) for n in range(len(row["question"]), len(ids))))
        right += sums.index(max(sums)) == row["answer"]
    assert found[0] == found[1]
    assert found[0]["accuracy"] == right / len(QUESTIONS)
    texts = Samples(letters, prompts=["one", "a longer text"], tokens=4)(par)
    assert set(texts) == {"one", "a longer text"} and all(len(text) <= 4 for text in texts.values())


def test_a_line_that_is_no_question_is_named(tmp_path):
    path = written(tmp_path, [QUESTIONS[0], {"question": "x", "choices": ["a"], "answer": 1}])
    with pytest.raises(RecipeError, match=r"questions\.jsonl:2 is no question"):
        MultipleChoice(Letters(), path=path)
    with pytest.raises(RecipeError, match="cannot be read"):
        MultipleChoice(Letters(), path=str(tmp_path / "none"))


TASK = """
task: letters_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{how}
"""
CHOICE = """doc_to_choice: choices
doc_to_target: answer
output_type: multiple_choice
metric_list: [{metric: acc}, {metric: acc_norm}]"""
ROLLING = """doc_to_target: "{{question}} {{choices[0]}}"
output_type: loglikelihood_rolling
metric_list: [{metric: bits_per_byte}]"""
WRITING = """doc_to_target: "{{choices[0]}}"
output_type: generate_until
generation_kwargs: {until: ["."], max_gen_toks: 6}
metric_list: [{metric: exact_match}]"""


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="the harness is not installed")
@on_ranks(2, fresh="loads the harness, which sets seeds and caches of the process")
def test_the_harness_finds_on_the_live_model_what_it_finds_on_the_export(tmp_path, monkeypatch):
    import os

    import lm_eval as harness
    import torch.distributed as dist
    import transformers
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from meshpar.training.tokenizer import byte_tokenizer

    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    os.environ |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    path = written(folder)
    for kind, how in {"choice": CHOICE, "rolling": ROLLING, "writing": WRITING}.items():
        (folder / f"{kind}.yaml").write_text(TASK.format(kind=kind, data=path, how=how))
    tasks = ["letters_choice", "letters_rolling", "letters_writing"]
    torch.manual_seed(5)
    tokenizer = byte_tokenizer()
    model = huggingface("Llama", vocab_size=tokenizer.vocab_size)
    par = Plan("dp_shard=2", [FullyShard()]).apply(copy.deepcopy(model))
    live = Harness(tokenizer, tasks=tasks, include=str(folder), batch=2)(par)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.fast, eos_token=tokenizer.eos)
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    export = HFLM(pretrained=model, tokenizer=theirs, batch_size=1, device="cpu", dtype="float32")
    found = harness.simple_evaluate(
        model=export, tasks=tasks, task_manager=TaskManager(include_path=str(folder)), bootstrap_iters=0
    )["results"]
    assert live["letters_choice/acc"] == found["letters_choice"]["acc,none"]
    assert live["letters_choice/acc_norm"] == found["letters_choice"]["acc_norm,none"]
    assert live["letters_rolling/bits_per_byte"] == pytest.approx(
        found["letters_rolling"]["bits_per_byte,none"], rel=1e-5
    )
    assert live["letters_writing/exact_match"] == found["letters_writing"]["exact_match,none"]
