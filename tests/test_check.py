"""meshpar check refuses what train would refuse, without a traceback and with the place in the recipe."""

from __future__ import annotations

import gzip
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from meshpar import PlanError, RecipeError
from meshpar.launchers.cli import app
from meshpar.launchers.commands.inspecting import check_recipe
from meshpar.launchers.recipes import yamlfile
from meshpar.launchers.recipes.yamlfile import parse_document, to_yaml
from meshpar.training.samples import PackedTokens
from meshpar.training.tokens import TokenFile

zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
LLAMA = "model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 320"
BASE = """\
name: job
device: cpu
mesh: dp_shard=2
model: {dim: 32, layers: 1, heads: 4, hidden: 32, max_positions: 32, dropout: 0.0}
data:
  source: files
  paths: [text.md]
  sequence_length: 32
  micro_batch: 2
optimizer: {lr: 1e-3}
training:
  steps: 5
"""
CASES = yaml.load((Path(__file__).parent / "broken_recipes.yaml").read_text(), Loader=yamlfile._Loader)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("broken")
    lines = b'{"text": "one two three"}\n' * 200
    files = {
        "text.md": b"some text\n" * 200,
        "empty.txt": b"",
        "latin.txt": "caf\xe9 au lait".encode("latin-1") * 20,
        "damaged.txt.gz": gzip.compress(random.Random(0).randbytes(4000).hex().encode())[:2000],
        "text.bz2": b"",
        "lines.jsonl": lines,
        "lines.jsonl.zst": zstd.compress(lines),
        "latin.jsonl": '{"text": "a"}\n{"text": "\xe9"}\n'.encode("latin-1"),
        "broken.jsonl": b'{"text": "a"}\n{"text"\n',
        "cells.csv": b"text,label\none,1\ntwo\n",
        "alone.bin": b"ab",
        "high.bin": b"\xff\xff" * 80,
        "few.bin": b"\x01\x00" * 26,
        "odd.bin": b"abc",
        "torn.bin": b"abcd",
        "torn.json": b"{",
        **{f"{name}.json": b'{"dtype": "uint16", "vocab_size": 300, "eos_id": 0}' for name in ("high", "few", "odd")},
        "torn/tokenizer.json": b"{",
        "torn/tokenizer_config.json": b'{"eos_token": "<end>"}',
        "torn/config.json": b"{",
    }
    (made / "torn").mkdir()
    for name, content in files.items():
        (made / name).write_bytes(content)
    return made


def broken(changes: dict[str, object]) -> str:
    """Return the text of the recipe with some fields changed."""
    document = parse_document(BASE, "job.yaml")
    for path, value in changes.items():
        *above, last = path.split(".")
        inside = document.data
        for part in above:
            inside = inside.setdefault(part, {})
        if value == "-":
            del inside[last]
        else:
            inside[last] = value
    return to_yaml(document.data)


@pytest.mark.parametrize(("changes", "place", "told"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_broken_recipe_gets_one_error_with_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], place: str, told: str
) -> None:
    monkeypatch.chdir(folder)
    nproc = changes.pop("--nproc", None)
    text = broken(changes)
    Path("job.yaml").write_text(text)
    monkeypatch.setattr("meshpar.launchers.commands.train.launch_local", lambda *_: pytest.fail("a rank was started"))
    # What depends on the machine is checked where ranks would start.
    machine = nproc is not None or changes.get("device") == "cuda"
    command = ["train", "job.yaml", *([] if nproc is None else ["--nproc", nproc])] if machine else ["check", "job.yaml"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    if not place:
        assert (done.exit_code, done.stderr) == (0, "")
        return
    lines = parse_document(text, "job.yaml").lines
    parts = tuple(int(each) if each.isdigit() else each for each in place.split("."))
    known = next((parts[:size] for size in range(len(parts), 0, -1) if parts[:size] in lines), None)
    where = "job.yaml" if known is None else f"job.yaml:{lines[known]}"
    assert (done.exit_code, done.stdout) == (78, "")
    assert f"{where}: {place}: " in done.stderr and told in done.stderr, done.stderr
    problems = [line for line in done.stderr.splitlines() if line.startswith("  ")]
    assert all(place in line for line in problems) and "Traceback" not in done.stderr, done.stderr


def test_there_are_a_hundred_broken_recipes() -> None:
    assert sum(bool(place) for _, place, _ in CASES) >= 100


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("hidden_size: many", "transformers cannot use these values: StrictDataclassFieldValidationError"),
        ("num_attention_heads: 0", "transformers cannot use these values: "),
        ("attn_implementation: flesh", "transformers cannot use these values: "),
        ("num_layerz: 3", "transformers has no such field of llama: num_layerz (nearest: num_hidden_layers"),
    ],
)
def test_values_that_transformers_cannot_use_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, change: str, told: str) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    Path("job.yaml").write_text(BASE)
    check_recipe("job.yaml", [f"model={{kind: huggingface, config: {{{LLAMA}, attn_implementation: flex_attention}}}}"])
    name = change.partition(":")[0]
    kept = ", ".join(each for each in LLAMA.split(", ") if not each.startswith(name))
    with pytest.raises(PlanError, match=re.escape(told)):
        check_recipe("job.yaml", [f"model={{kind: huggingface, config: {{{kept}, {change}}}}}"])


def test_an_id_outside_the_vocabulary_is_refused_when_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(RecipeError, match="has id 65535 and a vocab_size of 300"):
        PackedTokens(TokenFile.open("high.bin"), 8)[1]
