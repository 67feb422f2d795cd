"""Export: what was trained on a mesh is what safetensors and transformers load."""

import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import meshpar
from meshpar.checkpoints import (
    CheckpointManager,
    DistributedCheckpoint,
    Safetensors,
    export_module,
    export_safetensors,
    read_manifest,
)
from meshpar.checkpoints.format.manifest import MANIFEST_NAME
from meshpar.core.errors import CheckpointError
from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig
from meshpar.models.huggingface import from_config
from meshpar.process.leftovers import LEASE_S, on_the_way
from meshpar.testing import on_ranks
from meshpar.weights import Fuse, Permute, Rename, Split, Transpose, WeightMap

MODELS = {
    "llama": lambda: Transformer(
        TransformerConfig(vocab_size=32, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, tied=False)
    ),
    "llama_tied": lambda: Transformer(
        TransformerConfig(vocab_size=32, dim=16, layers=2, heads=4, hidden=24, tied=True)
    ),
    "qwen3": lambda: Transformer(
        TransformerConfig(vocab_size=32, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, qk_norm=True)
    ),
    "gpt2": lambda: GPT2(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=4)),
}
PASSES = {
    "dp_replicate=2,dp_shard=1,tp=2": [meshpar.TensorParallel(), meshpar.HybridShard()],
    "dp_shard=1": [meshpar.FullyShard()],
}


def build(name, mesh):
    with torch.device("meta"):
        model = MODELS[name]()
    return meshpar.Plan(mesh, PASSES[mesh]).apply(model)


@on_ranks(4)
def save_all(root: str) -> None:
    for name in MODELS:
        par = build(name, "dp_replicate=2,dp_shard=1,tp=2").materialize(seed=3)
        CheckpointManager(Path(root) / name).save(1, par)
        if name == "llama":
            export_module(par, Path(root) / "live")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    save_all(str(root))
    return root


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_shard_size", [5 << 30, 4096])
def test_transformers_loads_the_export_with_equal_logits(runs, tmp_path, one_process, name, max_shard_size):
    transformers = pytest.importorskip("transformers")
    calls = []
    export_safetensors(
        runs / name / "latest",
        tmp_path / "hf",
        max_shard_size=max_shard_size,
        progress=lambda *counts: calls.append(counts),
    )
    assert calls[-1][0] == calls[-1][1] and sorted(calls) == calls
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (max_shard_size == 4096)
    theirs, problems = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(problems.values()), problems
    restored, imported = build(name, "dp_shard=1").materialize(seed=0), build(name, "dp_shard=1")
    CheckpointManager(runs / name).restore(restored)
    imported.materialize(weights=Safetensors(tmp_path / "hf"))
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        want = theirs(ids).logits
        for ours in (restored, imported):
            torch.testing.assert_close(ours.module(ids).logits, want, rtol=1e-5, atol=1e-5)
    for (key, one), (_, other) in zip(
        restored.module.state_dict().items(), imported.module.state_dict().items(), strict=True
    ):
        assert torch.equal(one.full_tensor(), other.full_tensor()), key


def test_tied_weights_are_exported_once_and_config_tells_dtype(runs, tmp_path):
    export_safetensors(runs / "llama_tied", tmp_path / "hf", dtype=torch.bfloat16)
    loaded = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight" not in loaded and "model.embed_tokens.weight" in loaded
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_live_module_exports_as_its_checkpoint_does(runs, tmp_path):
    export_safetensors(runs / "llama" / "latest", tmp_path / "hf")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (runs / "live" / name).read_bytes()
    assert not list(runs.glob(".*"))


@pytest.mark.parametrize("published", [None, True, False])
def test_an_export_keeps_the_published_use_cache(tmp_path, one_process, published):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    written = {"model_type": "llama", **sizes, **({} if published is None else {"use_cache": published})}
    model = from_config(written)
    assert model.config.use_cache is False, "a cache has no use in training"
    export_module(meshpar.Plan("dp_shard=1", [meshpar.FullyShard()]).apply(model).materialize(seed=0), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.config.use_cache is (published is not False)
    made = theirs.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert (made.past_key_values is not None) == theirs.config.use_cache


def test_a_live_module_does_not_replace_what_is_there_and_removes_what_a_killed_export_left(tmp_path, one_process):
    par = build("llama", "dp_shard=1").materialize(seed=0)
    dead = left(tmp_path, "tmp")
    export_module(par, tmp_path / "hf")
    assert not dead.exists() and [path.name for path in tmp_path.iterdir()] == ["hf"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "hf").iterdir()}
    with pytest.raises(CheckpointError, match="overwrite=True"):
        export_module(par, tmp_path / "hf")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "hf").iterdir()}
    export_module(par, tmp_path / "hf", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_tokenizer_files_come_along_and_its_weights_do_not(runs, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "config.json", "old.safetensors"):
        (tokenizer / name).write_text("{}")
    made = export_safetensors(runs / "llama", tmp_path / "hf", tokenizer=tokenizer)
    assert sorted(path.name for path in made.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((made / "config.json").read_text())["model_type"] == "llama"


def test_an_existing_folder_is_kept_unless_told_otherwise(runs, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("work")
    with pytest.raises(CheckpointError, match="already exists and is not empty"):
        export_safetensors(runs / "llama", tmp_path / "hf")
    export_safetensors(runs / "llama", tmp_path / "hf", overwrite=True)
    assert not (tmp_path / "hf" / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_folder_one_stands_in_is_replaced_and_a_link_is_followed(runs, tmp_path, monkeypatch):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("work")
    monkeypatch.chdir(tmp_path / "hf")
    assert export_safetensors(runs / "llama", ".", overwrite=True) == Path()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and (tmp_path / "hf" / "model.safetensors").is_file()
    (tmp_path / "link").symlink_to("hf")
    export_safetensors(runs / "qwen3", tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "qwen3"
    with pytest.raises(CheckpointError, match=r"an export cannot replace .*; choose a folder inside it"):
        export_safetensors(runs / "llama", "/", overwrite=True)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_appears_at_the_target_during_an_export_is_kept(runs, tmp_path, kind):
    target = tmp_path / "hf"

    def appear(done: int, total: int) -> None:
        if not target.exists():
            target.mkdir() if kind == "folder" else target.write_text("precious")
            (target / "precious").write_text("precious") if kind == "folder" else None

    message = r"hf appeared during the export: it already exists and is not empty; delete it"
    with pytest.raises(CheckpointError, match=message):
        export_safetensors(runs / "llama", target, progress=appear)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (target / "precious" if kind == "folder" else target).read_text() == "precious"


def test_an_export_that_another_host_is_writing_is_not_run_over(runs, tmp_path):
    theirs = left(tmp_path, "tmp", "elsewhere")
    message = r"another export to .*hf is running: process \d+ on elsewhere; .* 120 s after"
    with pytest.raises(CheckpointError, match=message):
        export_safetensors(runs / "llama", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == [theirs.name]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_export_to_one_target_is_told_who_writes_it(runs, tmp_path, overwrite):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        theirs = tmp_path / on_the_way(tmp_path / ".hf", "tmp", process=other.pid).name
        theirs.mkdir()
        with pytest.raises(CheckpointError, match=rf"another export to .*hf is running.*: process {other.pid} on "):
            export_safetensors(runs / "llama", tmp_path / "hf", overwrite=overwrite)
        assert [path.name for path in tmp_path.iterdir()] == [theirs.name]
        if overwrite:
            other.kill()
        other.communicate(b"\n")
    export_safetensors(runs / "llama", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_dtype_that_needs_scales_is_refused(runs, tmp_path, dtype):
    with pytest.raises(CheckpointError, match=r"expected a floating-point dtype of 16 bits or more"):
        export_safetensors(runs / "llama", tmp_path / "hf", dtype=dtype)


def test_a_step_that_is_deleted_during_its_export_is_named_with_the_remedy(runs, tmp_path):
    step = shutil.copytree((runs / "llama" / "latest").resolve(), tmp_path / "steps" / "step-00000001")
    message = r"cannot open .*its folder does not exist: retention .* \(meshpar checkpoints pin\)"
    with pytest.raises(CheckpointError, match=message):
        export_safetensors(
            step, tmp_path / "hf", max_shard_size=1, progress=lambda *_: shutil.rmtree(step, ignore_errors=True)
        )


def test_a_file_is_exported_over_when_told(runs, tmp_path):
    (tmp_path / "hf").write_text("work")
    export_safetensors(runs / "llama", tmp_path / "hf", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and (tmp_path / "hf" / "config.json").is_file()


def left(folder: Path, kind: str, host: str = socket.gethostname(), process: int = 2**22 + 1) -> Path:
    """A folder that a process which is no more, or runs elsewhere, has left beside an export."""
    made = folder / f".hf.{kind}-{host}-{process}-abcdef01"
    made.mkdir()
    (made / "mine").write_text("work")
    return made


def test_what_a_killed_export_left_is_removed_or_comes_back(runs, tmp_path):
    left(tmp_path, "tmp")
    left(tmp_path, "old")
    elsewhere = left(tmp_path, "tmp", "elsewhere")
    for path in (elsewhere, elsewhere / "mine"):
        os.utime(path, (time.time() - 2 * LEASE_S,) * 2)
    file = tmp_path / ".hf.old-elsewhere-1-abcdef01"  # which an export took the place of
    file.write_text("work")
    with pytest.raises(CheckpointError, match="already exists and is not empty"):
        export_safetensors(runs / "llama", tmp_path / "hf")
    # set aside by an export that was killed before its own took the place
    assert (tmp_path / "hf" / "mine").read_text() == "work"
    left(tmp_path, "old")
    export_safetensors(runs / "llama", tmp_path / "hf", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", elsewhere.name, file.name}
    assert not (tmp_path / "hf" / "mine").exists()


def test_what_stood_there_stays_where_the_export_cannot_take_its_place(runs, tmp_path, monkeypatch):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("work")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if ".tmp-" in path.name:
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match=r"exporting to .*hf failed: .*Permission denied"):
        export_safetensors(runs / "llama", tmp_path / "hf", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and (tmp_path / "hf" / "mine").exists()


def test_a_failed_export_leaves_nothing(runs, tmp_path):
    with pytest.raises(CheckpointError, match="expected a folder with tokenizer files"):
        export_safetensors(runs / "llama", tmp_path / "hf", tokenizer=tmp_path / "absent")
    assert not any(tmp_path.iterdir())


def test_a_step_that_was_never_committed_is_refused(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match=r"meshpar\.json, so it was never committed"):
        export_safetensors(tmp_path / "step-00000001", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        export_safetensors(tmp_path, tmp_path / "hf")


KINDS = {
    "big": torch.randn(70, 30), "flat": torch.randn(5), "zero_dim": torch.tensor(1.5), "empty": torch.zeros(0, 3),
    "whole": torch.arange(6).reshape(2, 3), "truth": torch.tensor([True, False, True]),
    "half": torch.randn(4, 2).bfloat16(), "tiny": torch.randn(4, 4).to(torch.float8_e4m3fn),
}  # fmt: skip


def test_every_dtype_and_shape_is_written_tile_by_tile(tmp_path, monkeypatch):
    monkeypatch.setattr("meshpar.checkpoints.export.safetensors.TILE_BYTES", 64)
    monkeypatch.setattr("meshpar.checkpoints.storage.files.TILE_BYTES", 48)
    safetensors.torch.save_file(KINDS, tmp_path / "in.safetensors")
    export_safetensors(Safetensors(tmp_path / "in.safetensors"), tmp_path / "out", max_shard_size=300)
    names = {
        name: file
        for file in sorted((tmp_path / "out").glob("*.safetensors"))
        for name in safetensors.torch.load_file(file)
    }
    assert len(set(names.values())) > 2
    for name, tensor in KINDS.items():
        found = safetensors.torch.load_file(names[name])[name]
        assert found.dtype == tensor.dtype and torch.equal(found.float(), tensor.float()), name


def test_rules_are_applied_while_streaming(tmp_path, monkeypatch):
    monkeypatch.setattr("meshpar.checkpoints.export.safetensors.TILE_BYTES", 64)
    ours = {"a": torch.randn(8, 6), "b": torch.randn(4, 6), "c": torch.randn(9, 5), "d": torch.randn(12, 3)}
    rules = WeightMap(
        (Fuse(("a", "b"), "ab", parts=(2, 1)), Transpose("c", "c"), Permute("d", "d", 3, 2), Split("d", ("d1", "d2")))
    )
    safetensors.torch.save_file(ours, tmp_path / "in.safetensors")
    export_safetensors(rules.publish(Safetensors(tmp_path / "in.safetensors")), tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    permuted = ours["d"].view(2, 3, 2, 3).transpose(1, 2).reshape(12, 3)
    want = {"ab": torch.cat([ours["a"], ours["b"]]), "c": ours["c"].T, "d1": permuted[:6], "d2": permuted[6:]}
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "its tensors end at byte"),
        (lambda data: data + b"x", "its tensors end at byte"),
        (lambda data: data[:5], "is not a complete safetensors file"),
        (lambda data: b"\xff" * 8 + data[8:], "its header has a length of"),
        (lambda data: data[:9] + b"}" + data[10:], "is not a complete safetensors file"),
        (lambda data: data.replace(b'"F32"', b'"F99"'), "has the dtype 'F99'"),
    ],
)
def test_a_damaged_safetensors_file_is_named(tmp_path, damage, message):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3)}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        Safetensors(path)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(0, 8), (4, 12)], "'b' begins at byte .*; expected .*, where the tensor before it ends"),
        ([(0, 8), (0, 8)], "'b' begins at byte"),
        ([(0, 8), (12, 20)], "'b' begins at byte"),
        ([(4, 12), (12, 20)], "'a' begins at byte"),
        ([(8, 16), (0, 8)], "its tensors end at byte"),
    ],
)
def test_tensors_that_overlap_or_leave_holes_are_refused(tmp_path, places, message):
    entries = {name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in zip("ab", places)}
    header = json.dumps(entries | {"c": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}}).encode()
    data = bytes(max(stop for _, stop in places) + (places[0][0] == 8) * 4)
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    with pytest.raises(CheckpointError, match=message):
        Safetensors(tmp_path / "x.safetensors")


def test_tensors_may_lie_in_any_order_and_be_empty(tmp_path):
    header = json.dumps(
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "c": {"dtype": "F32", "shape": [0, 2], "data_offsets": [4, 4]},
        }
    )
    (tmp_path / "x.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header.encode() + struct.pack("<ff", 1.0, 2.0)
    )
    found = Safetensors(tmp_path / "x.safetensors")
    values = {name: torch.empty(1) for name in "ab"}
    for name, value in values.items():
        found.read(name, (), value)
    assert {name: float(value) for name, value in values.items()} == {"a": 2.0, "b": 1.0}
    assert found.shapes()["c"] == (0, 2)


def test_missing_files_and_names_are_named(tmp_path):
    safetensors.torch.save_file({"layers.0.up": torch.ones(3)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="nearest: "):
        Safetensors(tmp_path).read("layers.0.ups", (), torch.empty(3))
    index = tmp_path / "model.safetensors.index.json"
    for places, message in (
        ({"a": "x.safetensors"}, "lacks 1 tensors of the index: a"),
        ({"a": "y.safetensors"}, r"1 of them are missing: y\.safetensors"),
        ({"a": "../x.safetensors"}, "expected the name of a file in the same folder"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match=message):
            Safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="there is no file or folder"):
        Safetensors(tmp_path / "absent")


def test_an_export_does_not_load_torch_distributed_checkpoint(runs, tmp_path):
    code = f"""
import sys, torch
before = set(sys.modules)
from meshpar.checkpoints import export_safetensors
export_safetensors({str(runs / "llama")!r}, {str(tmp_path / "hf")!r})
slow = ("torch.distributed.checkpoint", "torch.distributed.tensor", "numpy", "safetensors")
loaded = [name for name in set(sys.modules) - before if name.startswith(slow)]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def published_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 16}))
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja", "old.safetensors"):
        (path / name).write_text(json.dumps({"name": name}))
    return path


def command(*arguments: object):
    from typer.testing import CliRunner

    from meshpar.launchers.cli import app

    return CliRunner().invoke(app, [*map(str, arguments)])


def export_command(*arguments: object):
    return command("export", *arguments)


def test_the_command_takes_names_config_and_files_that_it_is_given(runs, tmp_path):
    given, rules = published_folder(tmp_path / "given"), tmp_path / "rules.json"
    rules.write_text(json.dumps(WeightMap((Rename("layers.*.mlp.up.weight", "blocks.*.up"),)).to_json()))
    options = ("--dtype", "bfloat16", "--max-shard-size", "4KB", "--verify", "full", "--config", given)
    done = export_command(runs / "llama", tmp_path / "own", "--layout", "own", *options)
    assert done.exit_code == 0, done.output
    made = tmp_path / "own"
    found = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    with torch.device("meta"):
        assert set(found) == set(MODELS["llama"]().state_dict())
    assert json.loads((made / "config.json").read_text()) == {
        "model_type": "llama",
        "hidden_size": 16,
        "dtype": "bfloat16",
    }
    others = (
        {path.name for path in made.iterdir()} - set(found.values()) - {"config.json", "model.safetensors.index.json"}
    )
    assert others == {"generation_config.json", "tokenizer.json", "chat_template.jinja"}
    for layout, file in ((rules, "by-rules"), ("llama", "llama"), (None, "as-saved")):
        done = export_command(runs / "llama", tmp_path / file, *(() if layout is None else ("--layout", layout)))
        assert done.exit_code == 0, done.output
    assert (tmp_path / "llama" / "model.safetensors").read_bytes() == (
        tmp_path / "as-saved" / "model.safetensors"
    ).read_bytes()
    names = safetensors.torch.load_file(tmp_path / "by-rules" / "model.safetensors")
    assert set(found) ^ set(names) == {
        f"{kind}.{n}.{end}" for n in (0, 1) for kind, end in (("layers", "mlp.up.weight"), ("blocks", "up"))
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layout", "falcon"), "--layout must be own, llama, qwen3, gpt2 or a file"),
        (("--layout", "absent.json"), "absent.json has no rules"),
        (("--config", "absent"), "--config: expected a folder with config.json"),
        (("--verify", "some"), "expected 'none', 'size' or 'full'"),
        (("--max-shard-size", "1.2.3GB"), "the size is '1.2.3GB'"),
        (("--max-shard-size", "."), "the size is '.'"),
    ],
)
def test_the_command_says_what_an_option_takes(runs, tmp_path, options, message):
    done = export_command(runs / "llama", tmp_path / "hf", *options)
    assert done.exit_code == 1 and message in done.stderr and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "expected a JSON object, got list")]
)
@pytest.mark.parametrize("model", ["ours", "transformers"])
def test_an_import_names_the_config_that_is_damaged(tmp_path, text, message, model):
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    done = command("import", tmp_path, tmp_path / "run", "--model", model)
    assert done.exit_code == 1 and message in done.stderr and not (tmp_path / "run").exists()


def test_a_run_of_published_weights_exports_their_generation_config(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "llama", run / "checkpoints", symlinks=True)
    recipe = {
        "name": "x",
        "model": {"kind": "huggingface", "config": str(published_folder(tmp_path / "base"))},
        "training": {"steps": 1},
    }
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    assert export_command(run, tmp_path / "hf").exit_code == 0
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == {"name": "generation_config.json"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 32


def test_a_run_is_exported_where_the_weights_it_started_from_are_not(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "llama", run / "checkpoints", symlinks=True)
    recipe = {
        "name": "x",
        "model": {"kind": "huggingface", "weights": "gone"},
        "data": {"tokenizer": "bytes"},
        "training": {"steps": 1},
    }
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    done = export_command(run, tmp_path / "hf")
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}
    (run / "recipe.yaml").write_text(json.dumps({**recipe, "lora": {"rank": 2}}))
    done = export_command(run, tmp_path / "merged")
    assert done.exit_code == 1
    assert "holds adapters of the weights in gone, and that folder does not exist here; an export" in done.stderr


def test_a_checked_export_names_the_damage_that_sizes_do_not_show(runs, tmp_path):
    step = shutil.copytree(runs / "qwen3" / "latest", tmp_path / "step-00000001")
    source = DistributedCheckpoint(step)
    name, chunk = next(
        (name, tensor.chunks[0]) for name, tensor in source.tensors.items() if name.endswith("up.weight")
    )
    box = source.box(name, chunk)
    data = bytearray(box.file.path.read_bytes())
    data[box.position + 5] ^= 1
    box.file.path.write_bytes(data)
    assert export_command(step, tmp_path / "hf", "--verify", "none").exit_code == 0
    for level in ("size", "full"):
        done = export_command(step, tmp_path / "checked", "--verify", level)
        assert done.exit_code == 1 and f"{name}, bytes" in done.stderr and chunk.file in done.stderr
        assert not (tmp_path / "checked").exists()


@pytest.mark.parametrize("level", ["size", "full"])
def test_an_export_of_a_step_whose_index_lacks_a_tensor_is_refused(runs, tmp_path, level):
    step = shutil.copytree(runs / "qwen3" / "latest", tmp_path / "step-00000001")
    index = step / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    del metadata.state_dict_metadata["model.norm.weight"]
    index.write_bytes(pickle.dumps(metadata))
    manifest = read_manifest(step)
    fitted = {"size": index.stat().st_size, "crc32": zlib.crc32(index.read_bytes())}
    (step / MANIFEST_NAME).write_text(replace(manifest, files={**manifest.files, ".metadata": fitted}).to_json())
    with pytest.raises(CheckpointError, match=r"\.metadata: only the manifest has model\.norm\.weight"):
        export_safetensors(step, tmp_path / "hf", verify=level)
