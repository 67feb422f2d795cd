"""What any mesh of 2, 4 or 8 ranks saves, any mesh and one process restore, bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshpar.checkpoints import CheckpointManager, export_safetensors, import_safetensors
from meshpar.testing import launch
from tests.checkpoints.test_manager import assert_same, everything, make, optimizer_of, train, world
from tests.support.stores import Store

KINDS = {
    2: ("fsdp", "hsdp", "fsdp_tp"),
    4: ("fsdp", "hsdp", "fsdp_tp", "hsdp_tp", "tp", "replicate", "world"),
    8: ("fsdp", "hsdp", "fsdp_tp", "hsdp_tp", "world"),
}
SAVED = [f"{kind}-{ranks}" for ranks, kinds in KINDS.items() for kind in kinds]


def save_all(root: str, home: str, store: Store | None) -> None:
    use(store)
    for kind in KINDS[world()]:
        name = f"{kind}-{world()}"
        job = make(kind, seed=1)
        optimizer = train(job)
        CheckpointManager(f"{home}/{name}").save(
            7, job, optimizer, extra={"position": [1, 2]}, rank_extra={"rank": dist.get_rank()}
        )
        values = everything(job, optimizer)
        if dist.get_rank() == 0:
            torch.save(values, Path(root) / f"{name}.pt")
    dist.barrier()


def restore_all(root: str, home: str, store: Store | None, every: bool) -> None:
    use(store)
    kinds = KINDS[world()]
    for number, saved in enumerate(SAVED):
        for kind in kinds if every else kinds[number % len(kinds) :][:1]:
            check_restored(kind, saved, Path(root), home)


def check_restored(kind: str, saved: str, root: Path, home: str) -> None:
    job = make(kind, seed=2)
    optimizer = train(job, steps=1) if kind == "hsdp" else optimizer_of(job)
    found = CheckpointManager(f"{home}/{saved}").restore(job, optimizer)
    assert_same(everything(job, optimizer), torch.load(root / f"{saved}.pt"))
    assert job.module.head.weight is job.module.embed.weight
    assert optimizer.param_groups[0]["lr"] == 0.125 and optimizer.param_groups[1]["betas"] == (0.5, 0.75)
    assert (found.step, found.extra, found.skipped) == (7, {"position": [1, 2]}, ())
    same = saved == f"{kind}-{world()}"
    assert (found.same_mesh, found.random, job.seed is None) == (same, "restored" if same else "derived", same)
    assert found.rank_extra == ({"rank": dist.get_rank()} if same else None)
    optimizer.step()


def use(store: Store | None) -> None:
    if store is not None:
        store.use()


def check_matrix(root: Path, home: str, store: Store | None = None, *, every: bool) -> None:
    for ranks in KINDS:
        launch(__name__, "save_all", ranks, (str(root), home, store), timeout_s=300)
    for ranks in KINDS:
        launch(__name__, "restore_all", ranks, (str(root), home, store, every), timeout_s=900)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for saved in SAVED:
            check_alone(saved, root, home)
    finally:
        dist.destroy_process_group()


def check_alone(saved: str, root: Path, home: str) -> None:
    """Restore on one process, then export, import again and restore that."""
    check_restored("replicate", saved, root, home)
    exported = export_safetensors(f"{home}/{saved}", f"{home}/{saved}-hf", verify="full")
    imported = import_safetensors(exported, f"{home}/{saved}-in")
    job = make("replicate", seed=3)
    CheckpointManager(imported.parent).restore(job, verify="full")
    values = torch.load(root / f"{saved}.pt")
    assert_same(job.module.state_dict(), {name: value for name, value in values.items() if "/" not in name})


@pytest.mark.parametrize("storage", ["disk", pytest.param("store", marks=(pytest.mark.long, pytest.mark.timeout(900)))])
def test_what_each_mesh_saves_meshes_of_2_4_8_ranks_and_one_process_restore_bitwise(tmp_path, storage, request):
    home = (
        (str(tmp_path),) if storage == "disk" else (request.getfixturevalue("bucket"), request.getfixturevalue("store"))
    )
    check_matrix(tmp_path, *home, every=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_each_mesh_saves_every_mesh_restores_bitwise(tmp_path):
    check_matrix(tmp_path, str(tmp_path), every=True)
