"""Steps saved under one torch load bit for bit under those of ``MESHPAR_TORCHES``, also by ``dcp.load``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from meshpar import FullyShard, HybridShard, Parallelized, Plan, TensorParallel
from meshpar.checkpoints import CheckpointManager
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import launch, random_tokens, token_loss_sum, whole

OTHERS = [part for part in os.environ.get("MESHPAR_TORCHES", "").split(os.pathsep) if part]
PLANS = {
    "fsdp": ("dp_shard=4", [FullyShard()]),
    "fsdp-bf16": ("dp_shard=4", [FullyShard(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)]),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
    "tp": ("tp=4", [TensorParallel()]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
}


def parallel(mesh: str, passes: list, seed: int) -> tuple[Parallelized, torch.optim.Optimizer]:
    """Return a parallel model and its optimizer after two steps."""
    torch.manual_seed(seed)
    par = Plan(mesh, passes).apply(
        Transformer(TransformerConfig(vocab_size=33, dim=16, layers=2, heads=4, hidden=24, tied=True))
    )
    optimizer = torch.optim.AdamW(par.module.parameters(), lr=0.1)
    for step in range(2):
        token_loss_sum(par.module, random_tokens(33, 2, 8, seed=step))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return par, optimizer


def values(par: Parallelized, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all that a step holds, whole, under the names in its files."""
    found = {f"model.{name}": whole(value) for name, value in par.module.state_dict().items()}
    for name, parameter in par.module.named_parameters():
        found |= {f"optimizer.{name}.{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return found


def save(root: str) -> None:
    for name, (mesh, passes) in PLANS.items():
        par, optimizer = parallel(mesh, passes, seed=1)
        with CheckpointManager(f"{root}/{name}") as manager:
            manager.save(1, par, optimizer)
        with CheckpointManager(f"{root}/{name}-async", async_=True) as manager:
            manager.save(1, par, optimizer)
        held = values(par, optimizer)
        if dist.get_rank() == 0:
            torch.save(held, f"{root}/{name}.pt")
            torch.save(held, f"{root}/{name}-async.pt")


def restore(root: str) -> None:
    par, optimizer = parallel("dp_shard=2", [FullyShard()], seed=2)
    for name in saved(root):
        CheckpointManager(f"{root}/{name}").restore(par, optimizer, verify="full")
        assert_same(values(par, optimizer), torch.load(f"{root}/{name}.pt"), f"meshpar, {name}")


def load(root: str) -> None:
    """Load every step by torch alone, and by meshpar on another mesh."""
    for name in saved(root):
        expected = torch.load(f"{root}/{name}.pt")
        folder = f"{root}/{name}/step-00000001"
        names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        assert {saved_name for saved_name in names if not saved_name.startswith("random.")} == expected.keys()
        found = {key: torch.full_like(value, 7) for key, value in expected.items()}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        assert_same(found, expected, f"dcp.load, {name}")
    launch("tests.test_torches", "restore", 2, (root,), timeout_s=300)


def saved(root: str) -> list[str]:
    return [path.stem for path in sorted(Path(root).glob("*.pt"))]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str) -> None:
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), f"{where}: {name}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not OTHERS, reason="MESHPAR_TORCHES names no interpreter with another torch")
def test_a_step_of_any_torch_loads_under_all_of_them(tmp_path):
    pythons = [sys.executable, *OTHERS]
    for number, python in enumerate(pythons):
        (tmp_path / str(number)).mkdir()
        run(python, "save", tmp_path / str(number))
    for python in pythons:
        for number in range(len(pythons)):
            run(python, "load", tmp_path / str(number))


def run(python: str, what: str, folder: Path) -> None:
    command = [python, "-m", "tests.test_torches", what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


if __name__ == "__main__":
    if sys.argv[1] == "save":
        launch("tests.test_torches", "save", 4, (sys.argv[2],), timeout_s=300)
    else:
        load(sys.argv[2])
