"""Pairs and labels: read from JSON lines and from the standard library, prepared once, padded into batches."""

import json
from pathlib import Path

import pytest
import torch

from meshpar import RecipeError
from meshpar.losses.token_loss import IGNORE_INDEX
from meshpar.training import examples as examples_module
from meshpar.training.data import FILLER, Batches
from meshpar.training.examples import ExampleFile, RecordSource, first_sentence, prepare_examples
from meshpar.training.samples import LabelledExamples, PairedExamples
from meshpar.training.tokenizer import byte_tokenizer, load_tokenizer

ROWS = [
    {"text": f"input {number}", "target": "out" * (number % 3 + 1), "label": number % 2 == 0} for number in range(10)
]


def lines(folder: Path, rows: list[dict[str, object]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def source(folder: Path, kind: str = "pairs", **options: str) -> RecordSource:
    field = "target" if kind == "pairs" else "label"
    return RecordSource(inputs=(lines(folder, ROWS),), kind=kind, output_field=field, **options)  # type: ignore[arg-type]


def test_records_come_once_and_in_order(tmp_path: Path) -> None:
    again = RecordSource(inputs=(lines(tmp_path, [*ROWS, ROWS[0], {"text": " ", "target": "x"}]),), kind="pairs")
    assert list(again.records()) == [(row["text"], row["target"]) for row in ROWS]
    assert list(again.documents())[:2] == ["input 0", "out"]
    assert {label for _, label in source(tmp_path, "labels").records()} == {"True", "False"}


def test_a_field_that_is_no_text_is_named(tmp_path: Path) -> None:
    row = {"text": "x", "target": 3}
    with pytest.raises(RecipeError, match=r"rows.jsonl:1 has no text under 'target'"):
        list(RecordSource(inputs=(lines(tmp_path, [row]),), kind="pairs").records())


def test_a_label_may_be_a_number_and_nothing_else(tmp_path: Path) -> None:
    labelled = RecordSource(inputs=(lines(tmp_path, [{"text": "x", "label": 3}]),), kind="labels", output_field="label")
    assert list(labelled.records()) == [("x", "3")]
    with pytest.raises(RecipeError, match=r"has no label under 'label'.*data\.label_field"):
        half = lines(tmp_path, [{"text": "x", "label": 0.5}])
        list(RecordSource(inputs=(half,), kind="labels", output_field="label").records())
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(RecipeError, match=r"bad.jsonl:1 is not JSON"):
        list(RecordSource(inputs=(str(tmp_path / "bad.jsonl"),), kind="pairs").records())


def test_functions_of_the_standard_library_lose_their_docstrings(monkeypatch, tmp_path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "class A:\n    def put(self, item):\n        '''Put an item\n        into the queue.  More.\n\n        "
        "Rest.\n        '''\n"
        "        self.items.append(item)\n        return 1\n\n    def bare(self):\n        return 2\n\n    def "
        "short(self):\n"
        "        '''Nothing.'''\n        return 3\n\ndef one(x): 'Return one of them.'; return 1\n"
    )
    monkeypatch.setattr(examples_module, "standard_library", lambda: [path])
    found = list(examples_module.documented_functions())
    assert ("def put(self, item):\n    self.items.append(item)\n    return 1", "Put an item into the queue.") in found
    assert len(found) == 2 and all("Rest" not in text for text, _ in found)


def test_the_first_sentence() -> None:
    assert first_sentence("Return this one! And that.") == "Return this one!"
    assert first_sentence("Close the\n  file\n\nLater.") == "Close the file"
    assert first_sentence("Too short") == first_sentence(" ".join(["word"] * 40)) == ""


def test_lines_tell_their_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "a.py").write_text(
        "value = compute_the_value(1)\nshared = the_same_line_here()\n# a comment that is long enough\n"
    )
    (tmp_path / "small.py").write_text("other = compute_another(2)\nshared = the_same_line_here()\nx = 1\n")
    monkeypatch.setattr(examples_module, "standard_library", lambda: [tmp_path / "big" / "a.py", tmp_path / "small.py"])
    monkeypatch.setattr(examples_module, "standard_library_root", lambda: tmp_path)
    found = [("value = compute_the_value(1)", "big"), ("other = compute_another(2)", "small")]
    assert list(examples_module.lines_of_modules()) == found


def test_examples_are_prepared_once_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = source(tmp_path)
    split = prepare_examples(rows, byte_tokenizer(), tmp_path / "cache", validation_fraction=0.3, seed=1)
    assert split.validation is not None
    assert (split.train.count, split.validation.count) == (7, 3)
    texts = [
        bytes(file.row("input", index)[:-1].tolist()).decode()
        for file in (split.train, split.validation)
        for index in range(file.count)
    ]
    assert sorted(texts) == [f"input {number}" for number in range(10)]
    monkeypatch.setattr(RecordSource, "records", lambda self: pytest.fail("read again"))
    assert prepare_examples(rows, byte_tokenizer(), tmp_path / "cache", validation_fraction=0.3, seed=1) == split


def test_labels_get_numbers_and_the_validation_data_theirs(tmp_path: Path) -> None:
    held = RecordSource(
        inputs=(lines(tmp_path, [{"text": "new", "label": "True"}], "held.jsonl"),), kind="labels", output_field="label"
    )
    split = prepare_examples(source(tmp_path, "labels"), byte_tokenizer(), tmp_path / "cache", validation=held)
    assert split.train.classes == ("False", "True") and split.validation is not None
    assert split.train.column("output")[0].tolist() == [1, 0] * 5
    assert split.train.row("input", 0)[0] == byte_tokenizer().eos_id  # the position that a classifier reads
    strange = RecordSource(
        inputs=(lines(tmp_path, [{"text": "new", "label": "other"}], "strange.jsonl"),),
        kind="labels",
        output_field="label",
    )
    with pytest.raises(RecipeError, match="labels that the training data lacks: other"):
        prepare_examples(source(tmp_path, "labels"), byte_tokenizer(), tmp_path / "cache", validation=strange)
    one = RecordSource(inputs=(lines(tmp_path, ROWS[:1], "one.jsonl"),), kind="labels", output_field="label")
    with pytest.raises(RecipeError, match="1 records of 1 classes; give some, of two classes at least"):
        prepare_examples(one, byte_tokenizer(), tmp_path / "cache")


def pairs(tmp_path: Path, **lengths: int) -> PairedExamples:
    split = prepare_examples(source(tmp_path), byte_tokenizer(), tmp_path / "cache")
    return PairedExamples(split.train, start_id=7, **{"length": 64, "target_length": 64} | lengths)


def test_pairs_are_padded_to_the_longest_of_the_batch(tmp_path: Path) -> None:
    batch = pairs(tmp_path).__getitems__([0, 2])
    eos = byte_tokenizer().eos_id
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (2, 8), "attention_mask": (2, 8), "decoder_input_ids": (2, 16), "labels": (2, 16)
    }  # fmt: skip
    assert batch["labels"][0].tolist() == [*b"out", eos] + [IGNORE_INDEX] * 12
    assert batch["decoder_input_ids"][0].tolist() == [7, *b"out", eos] + [eos] * 11
    assert batch["decoder_input_ids"][1, 1:10].tolist() == batch["labels"][1, :9].tolist()
    assert batch["attention_mask"].sum(1).tolist() == [8, 8]


def test_long_texts_are_cut(tmp_path: Path) -> None:
    batch = pairs(tmp_path, length=5, target_length=2).__getitems__([0, 2])
    assert batch["input_ids"].tolist() == [[*b"input"]] * 2 and batch["labels"].tolist() == [[*b"ou"]] * 2


def test_a_filler_counts_nothing_and_shows_one_position(tmp_path: Path) -> None:
    batch = pairs(tmp_path).__getitems__([FILLER, 0])
    assert (batch["labels"][0] == IGNORE_INDEX).all()
    assert batch["attention_mask"][0].tolist() == [1] + [0] * 7
    split = prepare_examples(source(tmp_path, "labels"), byte_tokenizer(), tmp_path / "cache")
    assert LabelledExamples(split.train, length=9).__getitems__([1, FILLER])["labels"].tolist() == [0, IGNORE_INDEX]


def test_every_example_comes_once_an_epoch_over_the_ranks(tmp_path: Path) -> None:
    split = prepare_examples(source(tmp_path, "labels"), byte_tokenizer(), tmp_path / "cache")
    samples = LabelledExamples(split.train, length=32)
    seen = []
    for rank in range(2):
        for step in Batches(samples, micro_batch=2, accumulate=2, data_rank=rank, data_size=2, seed=3).one_epoch():
            for batch in step:
                kept = batch["labels"] != IGNORE_INDEX
                seen += [bytes(row[row < 256].tolist()) for row in batch["input_ids"][kept]]
    assert sorted(seen) == sorted(str(row["text"]).encode() for row in ROWS)
    assert str(samples) == "10 examples of 2 classes"


def test_a_tokenizers_own_special_tokens_are_used(tmp_path: Path) -> None:
    import tokenizers

    fast = byte_tokenizer().fast
    fast.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    ids = [(name, fast.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    fast.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "[SEP]", "pad_token": {"content": "[PAD]"}})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_inputs(["a"], begin=True) == [[ids[0][1], ord("a"), ids[1][1]]]
    assert tokenizer.pad_id == fast.token_to_id("[PAD]")
    assert byte_tokenizer().pad_id == byte_tokenizer().eos_id


def test_rows_of_the_file_are_those_that_were_written(tmp_path: Path) -> None:
    split = prepare_examples(source(tmp_path), byte_tokenizer(), tmp_path / "cache")
    again = ExampleFile.open(split.train.folder)
    assert again == split.train
    assert torch.equal(
        torch.tensor(again.row("output", 1).tolist()), torch.tensor([*b"outout", byte_tokenizer().eos_id])
    )
