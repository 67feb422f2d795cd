"""meshpar check refuses what train would refuse, without a traceback and with the place in the recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshpar import MeshparError, PlanError, RecipeError
from meshpar.launchers.commands.inspecting import check_recipe
from meshpar.training.data import PackedTokens
from meshpar.training.tokens import TokenFile


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(
        "device: cpu\nmodel: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 32, dropout: 0.0}\n"
        "data:\n  paths: [text.md]\n  source: files\n  sequence_length: 32\ntraining: {steps: 3}\n"
    )
    (tmp_path / "text.md").write_text("text")
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "latin.jsonl").write_bytes('{"text": "a"}\n{"text": "é"}\n'.encode("latin-1"))
    (tmp_path / "alone.bin").write_bytes(b"ab")
    (tmp_path / "high.bin").write_bytes(b"\xff\xff" * 40)
    (tmp_path / "high.json").write_text('{"dtype": "uint16", "vocab_size": 300, "eos_id": 0}')
    return tmp_path


LLAMA = "model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 320"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.tokenizer=nowhere"], "data.tokenizer: there is no tokenizer.json in nowhere"),
        (["data.source=tokens", "data.paths=[alone.bin]"], "data.paths: alone.bin or the .json beside it is missing"),
        (["data.source=tokens", "data.paths=[high.bin]"], "high.bin has id 65535 and a vocab_size of 300"),
        (["data.source=jsonl", "data.paths=[latin.jsonl]"], "latin.jsonl:2 is not UTF-8 text"),
        (["optimizer.betas=[1.5, 0.9]"], "optimizer.betas.0: must be less than 1, got 1.5"),
        (["output=file/run"], "file is a file; expected a folder"),
        (["data.cache=file"], "data.cache: "),
    ],
)
def test_what_train_refuses_check_refuses_with_its_place(job: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(MeshparError, match=re.escape(told)) as raised:
        check_recipe("job.yaml", overrides)
    assert f"override {overrides[-1]!r}" in str(raised.value)


def test_a_field_of_the_file_is_named_with_its_line(job: Path) -> None:
    (job / "text.md").unlink()
    with pytest.raises(PlanError, match=r"job\.yaml:4: data\.paths: input 'text\.md' matches no file"):
        check_recipe("job.yaml", [])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("hidden_size: many", "transformers cannot use these values: StrictDataclassFieldValidationError"),
        ("num_attention_heads: 0", "transformers cannot use these values: "),
        ("num_layerz: 3", "transformers has no such field of llama: num_layerz (nearest: num_hidden_layers"),
    ],
)
def test_values_that_transformers_cannot_use_are_refused(job: Path, change: str, told: str) -> None:
    pytest.importorskip("transformers")
    check_recipe("job.yaml", [f"model={{kind: huggingface, config: {{{LLAMA}}}}}"])
    name = change.partition(":")[0]
    kept = ", ".join(each for each in LLAMA.split(", ") if not each.startswith(name))
    with pytest.raises(PlanError, match=re.escape(told)):
        check_recipe("job.yaml", [f"model={{kind: huggingface, config: {{{kept}, {change}}}}}"])


def test_an_id_outside_the_vocabulary_is_refused_when_it_is_read(job: Path) -> None:
    with pytest.raises(RecipeError, match="has id 65535 and a vocab_size of 300"):
        PackedTokens(TokenFile.open("high.bin"), 8)[1]
