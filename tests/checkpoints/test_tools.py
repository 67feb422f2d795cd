"""What people do with checkpoints: list, show, verify, compare, pin, prune, import."""

import io
import json
import sys
import zlib

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn

import meshpar
from meshpar.checkpoints import (
    CheckpointManager,
    diff_steps,
    export_safetensors,
    import_safetensors,
    list_steps,
    pin_step,
    prune_steps,
    read_manifest,
    show_step,
    verify_step,
)
from meshpar.checkpoints.export.published import published_model
from meshpar.checkpoints.format.archive import find_tensor, write_tensor
from meshpar.checkpoints.steps.state import merged_tables
from meshpar.checkpoints.storage.checksums import combine_sums
from meshpar.checkpoints.storage.disk import ReadFile
from meshpar.checkpoints.storage.files import memory_of
from meshpar.core.errors import CheckpointError
from meshpar.launchers.export import names_of_ours
from meshpar.models import Transformer, TransformerConfig
from meshpar.weights import Rename, Split, Transpose, WeightMap
from tests.checkpoints.test_commit import Job, linear, stepped
from tests.support.models_for_parity import Given


@pytest.fixture
def run(tmp_path):
    manager = CheckpointManager(tmp_path / "run", keep=None)
    for step in (1, 2, 3):
        job = linear(step)
        manager.save(step, job, stepped(job), metrics={"loss": 1 / step})
    return manager


def test_ls_lists_the_steps_and_what_is_none(run):
    pin_step(run.root / "step-00000001")
    (run.root / "step-00000009").mkdir()
    (run.root / "step-00000002" / "meshpar.json").write_text("{}")
    lines = list_steps(run.root).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "1", "2", "3", "step-00000009:"]
    assert lines[1].endswith("pinned") and "damaged" in lines[2]
    assert lines[3].endswith("latest") and "loss 0.3333" in lines[3]


def test_show_tells_where_a_step_comes_from_and_what_is_in_it(run):
    text, name = show_step(run.root), "step-00000003"
    for piece in (name, "1 ranks, dp_shard=1, cpu", "8 elements in 2 tensors", "AdamW", "model.weight", "(2, 3)"):
        assert piece in text
    assert "step-00000001" in show_step(run.root / "step-00000001")


@pytest.mark.parametrize("checksum", ["crc32", "sha256"])
def test_verify_reads_every_byte(tmp_path, checksum):
    folder = CheckpointManager(tmp_path, checksum=checksum).save(1, linear())
    assert "is whole" in verify_step(tmp_path)
    files = read_manifest(folder).files
    parts = [name for name in files if name.endswith(".distcp")]
    assert all(("sha256" in files[name]) == (checksum == "sha256") for name in parts)
    name = parts[0]
    (folder / name).write_bytes((folder / name).read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=rf"{name}: .* at "):
        verify_step(tmp_path)


def test_diff_tells_what_differs_and_by_how_much(run):
    text = diff_steps(run.root / "step-00000001", run.root / "step-00000002")
    assert "step: 1 and 2" in text and "model.weight: 6 of 6 elements differ" in text
    assert diff_steps(run.root, run.root).endswith("tensors are the same")
    assert "differ" not in diff_steps(run.root, run.root)
    CheckpointManager(run.root.parent / "other").save(1, Job(nn.Linear(2, 2)))
    text = diff_steps(run.root, run.root.parent / "other")
    assert "model.weight: shape [2, 3] and [2, 2]" in text and "only in" in text


def test_pinned_steps_outlive_retention_and_replacement(run):
    pin_step(run.root / "step-00000001")
    assert prune_steps(run.root, 1) == "removed 2 and 0 leftovers; kept 1, 3"
    CheckpointManager(run.root, keep=1).save(1, linear(), replace=True)
    CheckpointManager(run.root, keep=1).save(5, linear())
    assert run.steps() == [1, 5]
    pin_step(run.root / "step-00000001", pinned=False)
    assert "kept 5" in prune_steps(run.root, 1)
    with pytest.raises(CheckpointError, match="at least 1"):
        prune_steps(run.root, 0)


def test_prune_keeps_the_best_when_told_by_what(run):
    assert prune_steps(run.root, 1, best="+loss").endswith("kept 1, 3")


def test_a_model_imported_for_ours_begins_a_run_of_transformers_too(tmp_path):
    config = TransformerConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, hidden=48)
    rules, shown = names_of_ours("llama"), Transformer(config)
    published = rules.publish(Given(shown.state_dict()))
    theirs = {name: torch.empty(shape) for name, shape in published.shapes().items()}
    for name, tensor in theirs.items():
        published.read(name, tuple(slice(0, size) for size in tensor.shape), tensor)
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(theirs, tmp_path / "hf" / "model.safetensors")
    import_safetensors(tmp_path / "hf", tmp_path / "run", weights=rules)
    source = published_model(tmp_path / "run")
    assert source.shapes() == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    with torch.device("meta"):
        ours = Transformer(config)
    with meshpar.distributed(device_type="cpu"):
        begun = meshpar.Plan("", []).apply(ours, device_type="cpu").materialize(weights=source)
    assert all(torch.equal(tensor, begun.module.state_dict()[name]) for name, tensor in shown.state_dict().items())


def test_an_imported_model_is_restored_and_exported_as_it_came(tmp_path):
    theirs = {
        "model.up.weight": torch.randn(6, 4), "model.down.weight": torch.randn(4, 6), "model.q": torch.randn(2, 4),
        "model.k": torch.randn(2, 4), "model.low": torch.randn(3).bfloat16(), "model.steps": torch.tensor(7),
    }  # fmt: skip
    changes = Transpose("down.weight", "down.weight"), Split("qk", ("q", "k"))
    rules = WeightMap((*changes, Rename("*", "model.*"), Rename("*.weight", "model.*.weight")))
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(theirs, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "x"}))
    calls: list[tuple[int, int]] = []
    step = import_safetensors(
        tmp_path / "hf", tmp_path / "run", weights=rules, progress=lambda *counts: calls.append(counts)
    )
    assert calls[-1][0] == calls[-1][1] and "is whole" in verify_step(step)
    module = nn.Module()
    for name, shape, dtype in zip(
        ("qk", "low", "steps"), ((4, 4), 3, ()), (torch.float32, torch.bfloat16, torch.int64)
    ):
        module.register_buffer(name, torch.zeros(shape, dtype=dtype))
    module.up, module.down = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    CheckpointManager(tmp_path / "run").restore(Job(module))
    assert torch.equal(module.down.weight, theirs["model.down.weight"].T) and module.steps == 7
    assert torch.equal(module.qk, torch.cat([theirs["model.q"], theirs["model.k"]]))
    again = export_safetensors(tmp_path / "run", tmp_path / "again", verify="full")
    found = safetensors.torch.load_file(again / "model.safetensors")
    assert found.keys() == theirs.keys() and all(torch.equal(found[name], theirs[name]) for name in theirs)
    assert json.loads((again / "config.json").read_text())["model_type"] == "x"
    low = import_safetensors(tmp_path / "hf", tmp_path / "low", weights=rules, dtype=torch.bfloat16)
    assert {entry["dtype"] for entry in read_manifest(low).tensors.values()} == {"bfloat16", "int64"}
    with pytest.raises(CheckpointError, match="is already saved"):
        import_safetensors(tmp_path / "hf", tmp_path / "run")


def test_an_import_of_damaged_files_leaves_nothing(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(9)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        import_safetensors(tmp_path / "model.safetensors", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_numpys_random_state_goes_on_where_it_was(tmp_path):
    assert "numpy" in sys.modules
    manager = CheckpointManager(tmp_path)
    numpy.random.seed(3)
    numpy.random.standard_normal()  # leaves one in hand
    manager.save(1, linear())
    want = numpy.random.standard_normal(3).tolist()
    manager.restore(linear(2))
    assert numpy.random.standard_normal(3).tolist() == want


def test_optimizer_tables_of_pipeline_stages_are_joined():
    first, second = (
        {"class": "SGD", "groups": [{"params": [name], "options": {"lr": 1}}], "state": {name: {"step": "tensor"}}}
        for name in "ab"
    )
    groups, state = [{"params": ["a", "b"], "options": {"lr": 1}}], {key: {"step": "tensor"} for key in "ab"}
    assert merged_tables([first, second]) == {"class": "SGD", "groups": groups, "state": state}


def test_groups_of_pipeline_stages_are_joined_by_their_options_in_any_order():
    def table(*groups):
        options = [{"params": [*names], "options": {"weight_decay": decay}} for decay, names in groups]
        return {"class": "AdamW", "groups": options, "state": {}}

    found = merged_tables([table((0.1, "ab"), (0.0, "c")), table((0.0, "d"), (0.1, "be"), (0.0, "f"))])
    assert found == table((0.1, "abe"), (0.0, "cd"), (0.0, "f"))


DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.int8,
    torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2), (), (0, 3), (1,), (2, 1, 70)])
def test_an_archive_is_what_torch_loads_and_what_is_found_again(tmp_path, dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    data = bytearray(b"before")
    length, crc32 = write_tensor(shape, dtype, [memory_of(tensor)] if tensor.numel() else [], data.extend)
    assert (length, crc32) == (len(data) - 6, zlib.crc32(data[6:]))
    loaded = torch.load(io.BytesIO(bytes(data[6:])), weights_only=True)
    (tmp_path / "file").write_bytes(data)
    box, payload = find_tensor(ReadFile(tmp_path / "file"), 6, length, shape)
    found = torch.empty(shape, dtype=dtype)
    box.read(tuple((0, size) for size in shape), found)
    for tensors in (loaded, found):
        assert tensors.dtype == dtype and tensors.shape == tensor.shape and torch.equal(tensors.float(), tensor.float())
    assert payload == zlib.crc32(memory_of(tensor) if tensor.numel() else b"") and (box.position - 6) % 64 == 0
    assert length % 64 == 0  # the next one in the file is aligned, too


def test_checksums_of_pieces_join():
    data = bytes(range(256)) * 40
    for cut in (0, 1, 255, 5000, len(data)):
        assert combine_sums(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), len(data) - cut) == zlib.crc32(data)
