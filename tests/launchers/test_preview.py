"""``meshpar data preview``: samples as a person reads them, with the trained tokens between « and »."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshpar.launchers.cli import app

RECIPE = """\
name: job
device: cpu
model: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 512, dropout: 0.0}
data: {source: files, paths: [text.txt], cache: cache, tokenizer: bytes, sequence_length: 24, micro_batch: 1, shuffle: false}
training: {steps: 1}
"""
CHAT = (
    "data.source=chat", "data.paths=[chat.jsonl]", "data.template=chatml", "data.tokenizer=bpe", "data.vocab_size=280",
    "data.sequence_length=512",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(RECIPE)
    Path("text.txt").write_text("The first text, and no other.")
    turns = (("user", "2 + 2?", 1), ("assistant", "4", 1), ("user", "Sure?", 1), ("assistant", "Yes", 0))
    chat = [{"role": role, "content": content, "weight": weight} for role, content, weight in turns]
    records = [{"messages": chat}, {"prompt": "Sky?", "completion": "Blue"}]
    Path("chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def preview(*words: str) -> str:
    done = CliRunner().invoke(app, ["data", "preview", "job.yaml", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_packed_text_is_trained_but_for_its_first_token() -> None:
    assert preview() == (
        "30 tokens\n\nsample 1: 1 document, 24 of 24 positions trained, 0 empty\nT«he first text, and no ot»\n"
        "\nsample 2: 1 document, 5 of 24 positions trained, 19 empty\nt«her.<|endoftext|>»\n"
    )


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_only_answers_that_count_are_marked_in_conversations(packing: str) -> None:
    shown = preview(*CHAT, f"data.packing={packing}")
    assert "sample 1: 2 documents of " in shown
    for text in ("2 + 2?<|im_end|>\n", "«4<|im_end|>»", "assistant\nYes<|im_end|>", "«Blue<|im_end|>»"):
        assert text in shown
    assert shown.count("«") == 2


def test_each_source_of_a_mixture_is_named() -> None:
    parts = "[{source: files, paths: [text.txt]}, {source: chat, paths: [chat.jsonl], template: chatml}]"
    shown = preview("data.source=mix", f"data.mix={parts}", *CHAT[3:5], "data.paths=[]", "data.sequence_length=64")
    assert "sample 1 of files0: " in shown and "sample 2 of chat1: " in shown


def test_pairs_and_classes_show_what_is_to_be_said() -> None:
    rows = [{"text": f"a{number}", "target": f"b{number}", "label": ["even", "odd"][number % 2]} for number in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("data.source=jsonl", "data.paths=[rows.jsonl]", "--samples", "1")
    model = "model={kind: huggingface, config: {model_type: %s}}"
    pairs = preview(*more, model % "t5", "training.objective=seq2seq")
    assert "sample 1: 3 tokens, 3 of the target\na0<|endoftext|>\n«b0<|endoftext|>»\n" in pairs
    assert "\n«even»\n" in preview(*more, model % "bert", "training.objective=sequence_classification")


def test_tokens_without_a_tokenizer_are_ids_and_own_samples_shapes() -> None:
    import numpy

    numpy.arange(1, 9, dtype=numpy.uint16).tofile("text.bin")
    Path("text.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 99, "eos_id": 0}))
    more = ("data.source=tokens", "data.paths=[text.bin]", "data.tokenizer=null", "data.sequence_length=7")
    assert preview(*more).endswith("1«2 3 4 5 6 7 8»\n")


def test_a_recipe_without_validation_has_no_samples_of_it() -> None:
    done = CliRunner().invoke(app, ["data", "preview", "job.yaml", "--validation"])
    assert done.exit_code == 78 and "no sample is held out for a validation; " in done.stderr
    assert "30 tokens" in preview("data.shuffle=true")
    Path("more.jsonl").write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(9)))
    more = ("data.source=jsonl", "data.paths=[more.jsonl]", "data.validation_fraction=0.5")
    assert "t«ext 0<|endoftext|>»" in preview("--validation", *more)
