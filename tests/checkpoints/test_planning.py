"""A save's plan: each part is written once, and a plan is made again when, and only when, tensors or ranks change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshpar
from benchmarks.save_planning import plan_saves
from meshpar.checkpoints import CheckpointManager, Manifest, read_manifest
from meshpar.checkpoints.format.verify import Verify, verify_files
from meshpar.checkpoints.format.writing import Ledger, TensorPart, layout_of, pack, write_parts
from meshpar.checkpoints.format.writing import whole as plain_groups
from meshpar.checkpoints.steps import saving
from meshpar.checkpoints.steps.planning import Alike, Described, alike, divide
from meshpar.checkpoints.storage.place import place
from meshpar.core.errors import CheckpointError
from meshpar.testing import on_ranks, whole
from tests.support.patience import patient
from tests.support.tiers import daily


@pytest.mark.parametrize(("ranks", "replicas"), daily([(1024, 1), (256, 32)], (256, 32)))
def test_later_saves_of_80_layers_on_many_ranks_plan_in_a_second_and_exchange_under_a_mebibyte(ranks, replicas):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        first, later = plan_saves(80, ranks, replicas)
    finally:
        dist.destroy_process_group()
    assert later["seconds"] < patient(1) and later["bytes"] < 1 << 20, later
    assert first["seconds"] < patient(10) and first["bytes"] < 64 << 20, first
    # once, and by all ranks alike
    assert first["written"] == first["held"] > 846e9 and first["most"] < 1.1 * first["held"] / ranks


def test_a_later_commit_exchanges_the_same_few_bytes_a_rank_for_a_model_of_any_size():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = 128
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        later = [plan_saves(layers, ranks, 1, commit=True)[1] for layers in (1, 4)]
    finally:
        dist.destroy_process_group()
    least, most = (figures["bytes"] + figures["commit_bytes"] for figures in later)
    # under a mebibyte at 1,024 ranks, checksums of all parts included
    assert abs(most - least) < ranks and most < 900 * ranks


def test_parts_that_ranks_describe_in_different_company_are_written_once():
    every = {name: torch.ones(4) for name in "abc"}
    without = {name: torch.ones(4) for name in "ac"}
    said = [alike(every), alike(without), alike({"b": torch.ones(4), "d": torch.ones(2, 2)})]
    groups, shares = divide(said)
    assert sorted(name for group in groups for name in group.names) == list("abcd")
    pairs = [pair for share, parts in zip(shares, said) for pair in zip(share, parts)]
    assert sorted(part.names[at] for positions, part in pairs for at in positions) == list("abcd")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": (3, 0)}, r"a part of 'weight' exceeds its shape"),
        ({"sizes": (1, 4)}, r"the parts of 'weight' have 12 elements of 16"),
        (
            {"shape": (5, 4)},
            r"weight differs between ranks: \(4, 4\), float32 on rank 0 and \(5, 4\), float32 on rank 1",
        ),
        (
            {"dtype": torch.float64},
            r"weight differs between ranks: \(4, 4\), float32 on rank 0 and \(4, 4\), float64 on rank 1",
        ),
    ],
    ids=["beyond", "a lack", "shape", "dtype"],
)
def test_parts_that_do_not_make_a_tensor_are_refused(change, message):
    parts = [Alike(pack(["weight"]), (4, 4), torch.float32, (2 * rank, 0), (2, 4)) for rank in range(2)]
    divide([[part] for part in parts])
    with pytest.raises(CheckpointError, match=message):
        divide([[parts[0]], [parts[1]._replace(**change)]])


class Plans:
    """Counts the plans of this process, and the records of files; use as a context."""

    def __enter__(self) -> Plans:
        self.made, self.records, self.patch = 0, 0, pytest.MonkeyPatch()

        def counted(said: Any) -> Any:
            self.made += 1
            return divide(said)

        def recorded(*given: Any) -> Ledger:
            self.records += 1
            return Ledger(*given)

        self.patch.setattr("meshpar.checkpoints.steps.planning.divide", counted)
        self.patch.setattr("meshpar.checkpoints.steps.planning.Ledger", recorded)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def begun(mesh: str, passes: list[Any]) -> tuple[meshpar.Parallelized, torch.optim.Optimizer]:
    par = meshpar.Plan(mesh, passes).apply(net())
    return par, torch.optim.AdamW(par.module.parameters(), lr=0.1, fused=True)


def step(par: meshpar.Parallelized, optimizer: torch.optim.Optimizer) -> None:
    par.module(torch.ones(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(par: meshpar.Parallelized, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {name: optimizer.state.get(parameter, {}) for name, parameter in par.module.named_parameters()}
    kept = {f"{name}.{key}": value for name, entries in state.items() for key, value in entries.items()}
    return {name: whole(parameter).clone() for name, parameter in (kept | dict(par.module.named_parameters())).items()}


@on_ranks(4)
def test_a_change_of_structure_mesh_or_of_one_ranks_plan_makes_all_ranks_plan_again(tmp_path):
    first = dist.get_rank() == 0
    number, saved = 0, {}
    par, optimizer = begun("dp_shard=4", [meshpar.FullyShard()])
    manager = CheckpointManager(tmp_path, keep=None, timeout_s=patient(60))

    def plans_of_a_save() -> int:
        nonlocal number
        number += 1
        saved[number] = values(par, optimizer)
        with Plans() as plans:
            manager.save(number, par, optimizer, rank_extra={"rank": dist.get_rank()})
        assert plans.records == plans.made, "files are laid out anew with a new plan, and only then"
        made = torch.tensor(plans.made)
        dist.broadcast(made, 0)
        return int(made)

    assert plans_of_a_save() == 1, "the first"
    step(par, optimizer)
    assert plans_of_a_save() == 1, "the optimizer has state now"
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    step(par, optimizer)
    torch.rand(3)
    assert plans_of_a_save() == 0, "other values, settings and random state are no other plan"
    par.module[0].requires_grad_(False)
    step(par, optimizer)
    assert plans_of_a_save() == 0, "frozen parameters have their state still"
    par.module[0].requires_grad_(True)
    optimizer = torch.optim.AdamW(par.module[2].parameters(), lr=0.1, fused=True)
    step(par, optimizer)
    assert plans_of_a_save() == 1, "frozen parameters have none"
    optimizer = torch.optim.AdamW(par.module.parameters(), lr=0.1, fused=True)
    step(par, optimizer)
    assert plans_of_a_save() == 1
    par, optimizer = begun("dp_shard=2,dp_replicate=2", [meshpar.HybridShard()])
    step(par, optimizer)
    assert plans_of_a_save() == 1, "another mesh"
    assert plans_of_a_save() == 0
    if dist.get_rank() == 2:
        manager._planning._token = "another"
    assert plans_of_a_save() == 1, "one rank has another plan: all plan again"
    assert plans_of_a_save() == 0
    if dist.get_rank() == 3:
        manager._planning._digest = ""
    assert plans_of_a_save() == 1, "one rank has none: all plan again"
    if first:
        manager._planning._agreed = None
    assert plans_of_a_save() == 1
    manager.close()
    again = CheckpointManager(tmp_path, keep=None)
    other, every = begun("dp_shard=2,dp_replicate=2", [meshpar.HybridShard()])
    for parameter_name, want in saved.items():
        fresh = torch.optim.AdamW(other.module[2].parameters(), lr=0.1, fused=True) if parameter_name == 5 else every
        restored = again.restore(other, fresh, step=parameter_name, verify="full")
        got = values(other, fresh)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want), parameter_name
        assert restored.rank_extra == ({"rank": dist.get_rank()} if parameter_name > 6 else None)


@on_ranks(2)
def test_another_rank_or_number_of_ranks_is_another_plan(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None, timeout_s=patient(60))
    par, optimizer = begun("dp_shard=2", [meshpar.FullyShard()])
    manager.save(1, par, optimizer)
    kept = manager._planning
    described = Described(alike=(), tied=(), optimizer=None, rank_extra=None)
    ranks = manager._ranks()
    kept.keep(("token", ()), described, ranks)
    assert kept._greet(described, ranks).token == "token"
    ranks.rank = 1 - ranks.rank
    assert kept._greet(described, ranks).token is None, "another rank"
    ranks.rank, ranks.size = 1 - ranks.rank, 3
    assert kept._greet(described, ranks).token is None, "more ranks"


@on_ranks(2)
def test_the_optimizers_settings_on_ranks_with_other_parameters_are_those_of_this_save(tmp_path):
    """Rank 1 alone trains a second tensor, whose options are its own."""
    from tests.checkpoints.test_commit import Job

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("ab"[dist.get_rank()], nn.Parameter(torch.ones(3)))

    job = Job(Stage())
    optimizer = torch.optim.SGD(job.module.parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(tmp_path, keep=None) as manager, Plans() as plans:
        for number in range(1, 4):
            for group in optimizer.param_groups:
                group["lr"] = number / 10 + dist.get_rank()
            manager.save(number, job, optimizer)
        assert plans.made == (1 if dist.get_rank() == 0 else 0)
        for number in range(1, 4):
            manager.restore(job, optimizer, step=number)
            assert optimizer.param_groups[0]["lr"] == number / 10 + dist.get_rank()


def test_a_later_save_is_checked_as_the_first_and_files_may_be_laid_out_in_another_way(tmp_path, monkeypatch):
    saved: dict[int, dict[str, torch.Tensor]] = {}
    from tests.checkpoints.test_commit import Job

    par = Job(net())
    optimizer = torch.optim.AdamW(par.module.parameters(), lr=0.1, fused=True)
    manager = CheckpointManager(tmp_path, keep=None)

    def records_of_a_save(number: int) -> int:
        step(par, optimizer)
        saved[number] = values(par, optimizer)
        with Plans() as plans:
            manager.save(number, par, optimizer)
        return plans.records

    step(par, optimizer)
    assert [records_of_a_save(number) for number in (1, 2)] == [1, 0]
    with monkeypatch.context() as patch:
        patch.setattr(
            saving, "write_parts", lambda folder, rank, parts, **given: write_parts(folder, rank, parts[1:], **given)
        )
        message = r"differ from the plan; save again:\n +model.0.weight at \(0, 0\) was not written"
        with pytest.raises(CheckpointError, match=message):
            records_of_a_save(3)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "verify_files", flipped)
        with pytest.raises(CheckpointError, match=r".metadata: expected the CRC-32 \w{8}, found"):
            records_of_a_save(3)
    assert records_of_a_save(3) == 0, "a save that failed leaves the record"
    manager._settings = replace(manager._settings, threads=3)
    assert [records_of_a_save(number) for number in (4, 5)] == [1, 0], "three files instead of two"
    manager._settings = replace(manager._settings, checksum="sha256")
    assert records_of_a_save(6) == 0, "other checksums are no other files"
    assert manager.steps() == list(saved) == [1, 2, 3, 4, 5, 6]
    for number, want in saved.items():
        other = Job(net())
        trained = torch.optim.AdamW(other.module.parameters(), lr=0.1, fused=True)
        manager.restore(other, trained, step=number, verify="full")
        got = values(other, trained)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want), number


def flipped(folder: Path, manifest: Manifest, level: Verify) -> None:
    """Verify files after a bit of torch's metadata changed on the disk."""
    data = bytearray((folder / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / ".metadata").write_bytes(data)
    verify_files(folder, manifest, level)


def test_a_ledger_is_of_these_files_alone_and_names_in_json_are_those_of_the_tensors(tmp_path):
    tensors = {name: torch.full((3,), float(at)) for at, name in enumerate(['a%d"b', "100%", "c\\d", "é%%"])}
    files = write_parts(
        place(tmp_path),
        0,
        [TensorPart(name, (0,), tensor) for name, tensor in tensors.items()],
        threads=2,
        checksum="crc32",
    )
    layout = layout_of(files)
    groups = plain_groups((name, (3,), torch.float32) for name in tensors)
    ledger = Ledger(groups, [layout], ())
    assert ledger.fits([layout.report(files)])
    other = [
        replace(file, parts=tuple((name, part._replace(length=part.length + 64)) for name, part in file.parts))
        for file in files
    ]
    assert not ledger.fits([layout_of(other).report(files)]), "another length"
    assert not ledger.fits([layout.report(files)] * 2), "another rank"
    manifest = ledger.write(
        place(tmp_path), [layout.report(files)], {"step": 1, "mesh": {}, "world_size": 1, "device": "cpu", "plan": ""}
    )
    (tmp_path / "meshpar.json").write_text(manifest.to_json())
    read = read_manifest(tmp_path)
    assert read.tensors == dict(manifest.tensors) and list(read.tensors) == list(tensors)
    written = {name: [[[0], [3], file.name, part.position, part.length]] for file in files for name, part in file.parts}
    assert {name: tensor["chunks"] for name, tensor in read.tensors.items()} == written
    verify_files(tmp_path, read, "full")
