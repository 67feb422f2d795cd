"""meshpar check refuses what train would refuse, without a traceback and with the place in the recipe."""

import gzip
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from meshpar import PlanError
from meshpar.launchers.cli import app
from meshpar.launchers.commands.inspecting import check_recipe
from meshpar.launchers.recipes import yamlfile
from meshpar.launchers.recipes.yamlfile import parse_document, to_yaml
from meshpar.models import Transformer, TransformerConfig

zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
LLAMA = (
    "model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
    "vocab_size: 320"
)
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


@pytest.mark.parametrize(("changes", "place", "message"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_broken_recipe_gets_one_error_with_its_place(folder, monkeypatch, changes, place, message) -> None:
    monkeypatch.chdir(folder)
    nproc = changes.pop("--nproc", None)
    text = broken(changes)
    Path("job.yaml").write_text(text)
    monkeypatch.setattr("meshpar.launchers.commands.train.launch_local", lambda *_: pytest.fail("a rank was started"))
    # What depends on the machine is checked where ranks would start.
    machine = nproc is not None or changes.get("device") == "cuda"
    command = (
        ["train", "job.yaml", *([] if nproc is None else ["--nproc", nproc])]
        if machine
        else ["check", "--trust", "job.yaml"]
    )
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    if not place:
        assert (done.exit_code, done.stderr) == (0, "")
        return
    lines = parse_document(text, "job.yaml").lines
    parts = tuple(int(part) if part.isdigit() else part for part in place.split("."))
    known = next((parts[:size] for size in range(len(parts), 0, -1) if parts[:size] in lines), None)
    where = "job.yaml" if known is None else f"job.yaml:{lines[known]}"
    assert (done.exit_code, done.stdout) == (78, "")
    assert f"{where}: {place}: " in done.stderr and message in done.stderr, done.stderr
    problems = [line for line in done.stderr.splitlines() if line.startswith("  ")]
    assert all(place in line for line in problems) and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("hidden_size: many", "transformers cannot use these values: StrictDataclassFieldValidationError"),
        ("num_attention_heads: 0", "transformers cannot use these values: "),
        ("attn_implementation: flesh", "transformers cannot use these values: "),
        ("num_layerz: 3", "transformers has no such field of llama: num_layerz (nearest: num_hidden_layers"),
    ],
)
def test_values_that_transformers_cannot_use_are_refused(folder, monkeypatch, change, message) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    Path("job.yaml").write_text(BASE)
    check_recipe("job.yaml", [f"model={{kind: huggingface, config: {{{LLAMA}, attn_implementation: flex_attention}}}}"])
    name = change.partition(":")[0]
    kept = ", ".join(part for part in LLAMA.split(", ") if not part.startswith(name))
    with pytest.raises(PlanError, match=re.escape(message)):
        check_recipe("job.yaml", [f"model={{kind: huggingface, config: {{{kept}, {change}}}}}"], trust=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights whole, with a file missing, with an old index, of torch.save, twice, of another shape."""
    made = tmp_path_factory.mktemp("weights")
    (made / "text.md").write_text("some text\n" * 200)
    (made / "job.yaml").write_text(BASE.replace("hidden: 32,", "hidden: 32, vocab_size: 260,"))
    config = TransformerConfig(dim=32, layers=1, heads=4, hidden=32, vocab_size=260, max_positions=32)
    tensors = Transformer(config).state_dict()
    names = list(tensors)
    halves = {f"model-{part:05}-of-00002.safetensors": names[part - 1 :: 2] for part in (1, 2)}
    for folder in ("whole", "missing", "stale", "old", "torn", "twice", "bin", "other", "fewer"):
        (made / folder).mkdir()
        if folder in ("bin", "other", "fewer"):
            continue
        for file, held in halves.items():
            save_file({name: tensors[name] for name in held}, made / folder / file)
        index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
        (made / folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (made / "missing/model-00002-of-00002.safetensors").unlink()
    for file in (made / "old").glob("*.safetensors"):
        file.unlink()
    save_file(tensors, made / "old/model.safetensors")
    save_file({names[0]: tensors[names[0]]}, made / "stale/model-00001-of-00002.safetensors")
    (made / "torn/model-00001-of-00002.safetensors").write_bytes(
        (made / "whole/model-00001-of-00002.safetensors").read_bytes()[:-4]
    )
    (made / "twice/model.safetensors.index.json").unlink()
    save_file(tensors, made / "twice/consolidated.safetensors")
    torch.save(tensors, made / "bin/pytorch_model.bin")
    save_file({**tensors, names[0]: torch.zeros(300, 32)}, made / "other/model.safetensors")
    save_file({name: tensors[name] for name in names[1:]}, made / "fewer/model.safetensors")
    return made


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("whole", ""),
        ("bin", ""),
        (
            "missing",
            "lists 2 files, and 1 of them are missing: model-00002-of-00002.safetensors; copy the folder again",
        ),
        (
            "old",
            "lists 2 files, and 2 of them are missing: model-00001-of-00002.safetensors, "
            "model-00002-of-00002.safetensors; copy the folder again from its source, or remove the "
            "index to read the files that are there",
        ),
        ("stale", "stale/model-00001-of-00002.safetensors lacks 5 tensors of the index"),
        ("torn", "torn/model-00001-of-00002.safetensors is not a complete safetensors file"),
        ("twice", "consolidated.safetensors and twice/model-00001-of-00002.safetensors both have"),
        ("other", "shape of embed.weight: expected (260, 32), got (300, 32)"),
        ("fewer", "missing: embed.weight (260, 32)"),
    ],
)
def test_check_opens_the_weights_that_the_ranks_will_open(weights, monkeypatch, folder, message) -> None:
    monkeypatch.chdir(weights)
    done = CliRunner().invoke(
        app, ["check", "job.yaml", f"model.weights={folder}", "data.tokenizer=bytes"], catch_exceptions=False
    )
    assert done.exit_code == (78 if message else 0) and message in done.stderr, done.stderr
    assert not message or ": model.weights: " in done.stderr, done.stderr
    if "remove the index" in message:
        Path(folder, "model.safetensors.index.json").unlink()
        check_recipe("job.yaml", [f"model.weights={folder}", "data.tokenizer=bytes"])
