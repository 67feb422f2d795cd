"""Passes and layouts from other packages come in by entry point, through the door that the project's own use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from models_for_parity import VOCAB, transformer

from meshpar import FullyShard, MeshparError, Pass, Plan, PlanError, registry
from meshpar.testing import assert_parity, on_ranks, token_steps

STRANGER = Path(__file__).parent / "stranger"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The stranger's package, built and installed by pip into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "stranger.py"):
        (source / name).write_text((STRANGER / name).read_text())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run(command, check=True)
    return target


@pytest.fixture
def stranger(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    registry._found.cache_clear()
    yield
    registry._found.cache_clear()


@pytest.fixture
def fresh_registry():
    registry._found.cache_clear()
    yield
    registry._found.cache_clear()


def test_it_is_short():
    assert len((STRANGER / "stranger.py").read_text().splitlines()) < 30


def test_it_is_found_beside_the_projects_own(stranger):
    assert {"ExpertCopies", "FullyShard", "TensorParallel"} <= set(registry.names("meshpar.passes"))
    assert isinstance(registry.plugin("meshpar.passes", "ExpertCopies")(), Pass)


def test_it_takes_part_in_order_and_checks(stranger):
    copies = registry.plugin("meshpar.passes", "ExpertCopies")()
    with pytest.raises(PlanError) as caught:
        Plan("ep=5,dp_shard=2", [FullyShard(), copies]).check(transformer(), world_size=10)
    assert len(caught.value.problems) == 2
    assert "write ExpertCopies -> FullyShard" in str(caught.value) and "at most ep=4, got 5" in str(caught.value)
    with pytest.raises(PlanError, match=r"axis 'ep' .size 2. is claimed by no pass"):
        Plan("ep=2,dp_shard=2", [FullyShard()]).check(transformer(), world_size=4)
    with pytest.raises(PlanError, match="ExpertCopies needs axis 'ep', which the mesh"):
        Plan("dp_shard=4", [copies, FullyShard()]).check(transformer(), world_size=4)


def test_it_runs(stranger):
    run_it()


@on_ranks(2)
def run_it():
    registry._found.cache_clear()
    assert_parity(transformer, "ep=2", [registry.plugin("meshpar.passes", "ExpertCopies")()], token_steps(VOCAB, parts=2))


def test_an_unknown_name_is_answered_with_the_nearest(fresh_registry):
    with pytest.raises(MeshparError, match=r"no plugin 'FullShard' in meshpar.passes; nearest: \['FullyShard'"):
        registry.plugin("meshpar.passes", "FullShard")


def offer(folder, package, value):
    """A package's metadata, as an installer leaves it."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[meshpar.passes]\nTwice = {value}\n")


def test_a_clash_names_both_packages(tmp_path, monkeypatch, fresh_registry):
    offer(tmp_path, "first", "one:Twice")
    offer(tmp_path, "second", "two:Twice")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MeshparError, match=r"'Twice' of meshpar.passes is offered twice: .*package (first|second).*package (first|second)"):
        registry.names("meshpar.passes")


def test_a_plugin_that_cannot_be_imported_says_whose_it_is(tmp_path, monkeypatch, fresh_registry):
    offer(tmp_path, "broken", "nowhere_at_all:Twice")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MeshparError, match=r"'Twice' of meshpar.passes \(nowhere_at_all:Twice, package broken\) cannot be imported"):
        registry.plugin("meshpar.passes", "Twice")
