"""Checkpoints of other programs: read as weights, or refused by the format's name."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import meshpar
from meshpar import CheckpointError, MeshparError, Plan
from meshpar.checkpoints import (
    CheckpointManager,
    DistributedCheckpoint,
    Safetensors,
    TorchWeights,
    import_safetensors,
    read_manifest,
)
from meshpar.testing import on_ranks
from meshpar.weights import WeightSource


def linear(weights: WeightSource | None = None) -> meshpar.Parallelized:
    with meshpar.distributed("cpu"):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(3, 2))
        par = Plan("", []).apply(module)
        return par.materialize(weights=weights) if weights is not None else par.materialize(seed=0)


VALUES = {"0.weight": torch.arange(6.0).view(2, 3), "0.bias": torch.ones(2)}


def equal(par: meshpar.Parallelized) -> bool:
    return all(torch.equal(tensor, VALUES[name]) for name, tensor in par.module.state_dict().items())


def test_a_nested_distributed_checkpoint_is_read_by_its_prefix_which_the_error_names(tmp_path: Path) -> None:
    dcp.save({"model": VALUES, "step": torch.tensor(3)}, checkpoint_id=tmp_path, no_dist=True)
    message = r"missing: 0\.weight[\s\S]*DistributedCheckpoint and TorchWeights take prefix='model\.'"
    with pytest.raises(MeshparError, match=message):
        linear(DistributedCheckpoint(tmp_path))
    assert equal(linear(DistributedCheckpoint(tmp_path, prefix="model.")))


@pytest.mark.parametrize("old", [False, True])
def test_a_file_of_torch_save_is_read_without_running_it(tmp_path: Path, old: bool) -> None:
    torch.save({"model": VALUES, "step": 3}, tmp_path / "model.pt", _use_new_zipfile_serialization=not old)
    assert equal(linear(TorchWeights(tmp_path / "model.pt", prefix="model.")))
    torch.save(VALUES, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    assert equal(linear(TorchWeights(tmp_path)))
    import_safetensors(tmp_path / "pytorch_model.bin", tmp_path / "steps")
    par = linear(TorchWeights(tmp_path))
    nn.init.zeros_(par.module.get_parameter("0.weight"))
    CheckpointManager(tmp_path / "steps").restore(par)
    assert equal(par)


class Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("ran",)


def test_a_file_of_torch_save_that_would_run_code_is_refused_and_not_run(tmp_path, capsys) -> None:
    torch.save({"a": torch.ones(1), "b": Runs()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt contains other objects than tensors and plain data"):
        TorchWeights(tmp_path / "model.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cut\.pt "):
        TorchWeights(tmp_path / "cut.pt")
    assert "ran" not in capsys.readouterr().out


def test_safetensors_in_a_distributed_checkpoint_are_named(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(dict(VALUES), storage_writer=writer, no_dist=True)
    source = DistributedCheckpoint(tmp_path)
    message = r"saved with SerializationFormat\.SAFETENSORS, which is not read: save it as TORCH_SAVE"
    with pytest.raises(CheckpointError, match=message):
        source.read("0.weight", (), torch.empty(2, 3))
    writer = FileSystemWriter(tmp_path / "again", serialization_format=SerializationFormat.TORCH_SAVE)
    dcp.save(dict(VALUES), storage_writer=writer, no_dist=True)
    assert equal(linear(DistributedCheckpoint(tmp_path / "again")))


def test_a_checkpoint_of_trainers_fsdp_is_read_and_imported_as_the_error_says(tmp_path, monkeypatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model
    from typer.testing import CliRunner

    from meshpar.launchers.cli import app

    folder, base, root = tmp_path / "checkpoint-20", tmp_path / "base", tmp_path / "steps"
    module = nn.Sequential(nn.Linear(3, 2))
    module.load_state_dict(VALUES)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    monkeypatch.setattr("accelerate.utils.fsdp_utils.logger", logging.getLogger("accelerate"))
    save_fsdp_model(plugin, SimpleNamespace(process_index=0, num_processes=1), module, str(folder))
    torch.save({"last_epoch": 20}, folder / "scheduler.pt")
    torch.save({"seed": torch.ones(1)}, folder / "training_args.bin")
    for read in (Safetensors, TorchWeights, DistributedCheckpoint):
        message = r"DistributedCheckpoint\(folder / 'pytorch_model_fsdp_0', prefix='model\.'\), or .*--config"
        with pytest.raises(CheckpointError, match=message):
            read(folder)
    assert equal(linear(DistributedCheckpoint(folder / "pytorch_model_fsdp_0", prefix="model.")))
    with pytest.raises(CheckpointError, match=r"has no tensors whose names begin with 'net\.'"):
        DistributedCheckpoint(folder / "pytorch_model_fsdp_0", prefix="net.")
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "own"}')
    command = ["import", str(folder), str(root)]
    named, config = ["--model", "transformers"], ["--config", str(tmp_path)]
    remedies = "pass --config FOLDER", "pass --config FOLDER", "correct --config"
    for more, message in zip(([], named, [*named, *config]), remedies):
        done = CliRunner().invoke(app, [*command, *more])
        assert done.exit_code == 1 and message in done.stderr and not root.exists()
    assert CliRunner().invoke(app, [*command, "--model", "transformers", "--config", str(base)]).exit_code == 0
    par = linear()
    CheckpointManager(root).restore(par)
    assert equal(par) and read_manifest(root / "step-00000000").config == {"model_type": "own"}


@pytest.mark.parametrize(
    ("file", "message"),
    [("zero_to_fp32.py", r"DeepSpeed checkpoint: convert it by its zero_to_fp32\.py"),
     ("global_step5/mp_rank_00_model_states.pt", "DeepSpeed"),
     ("latest_checkpointed_iteration.txt", "Megatron checkpoint: convert it to Hugging Face's format"),
     ("mp_rank_00/model_optim_rng.pt", "Megatron"),
     ("pytorch_model_fsdp_0_rank0.bin", "save it with the state_dict_type SHARDED_STATE_DICT")],
)  # fmt: skip
def test_formats_that_are_not_read_are_named_with_their_converter(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    torch.save(VALUES, tmp_path / file)
    for read in (
        lambda: Safetensors(tmp_path),
        lambda: TorchWeights(tmp_path),
        lambda: DistributedCheckpoint(tmp_path),
        lambda: import_safetensors(tmp_path, tmp_path / "steps"),
        lambda: CheckpointManager(tmp_path).restore(linear()),
    ):
        with pytest.raises(CheckpointError, match=message):
            read()


@on_ranks(2)
def save_shards(root: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(value, mesh, [Shard(value.ndim - 1)]) for name, value in VALUES.items()}
    writer = HuggingFaceStorageWriter(root, save_distributed=True)
    dcp.save(state, storage_writer=writer)


def test_the_shards_of_torchs_hugging_face_writer_are_read_and_imported(tmp_path: Path) -> None:
    save_shards(str(tmp_path / "hf"))
    folder = next((tmp_path / "hf").rglob("*.safetensors")).parent
    assert len(list(folder.glob("*.safetensors"))) == 2
    assert equal(linear(Safetensors(folder)))
    import_safetensors(folder, tmp_path / "steps")
    par = linear(Safetensors(folder))
    nn.init.zeros_(par.module.get_parameter("0.weight"))
    CheckpointManager(tmp_path / "steps").restore(par)
    assert equal(par)
    min(folder.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"the parts of '0\.\w+' have \d elements of \d"):
        Safetensors(folder)
