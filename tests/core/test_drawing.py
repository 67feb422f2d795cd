"""Drawings of meshes."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from meshpar import MeshError, MeshSpec
from meshpar.launchers.cli import app
from meshpar.state.drawing import mesh_svg, mesh_text


def test_the_text_shows_ranks_groups_and_what_they_cross() -> None:
    assert mesh_text(MeshSpec("dp_replicate=2,dp_shard=2,tp=2"), 4) == (
        "dp_replicate=2,dp_shard=2,tp=2: 8 ranks on 2 nodes of 4\n\n"
        "node 0  rank          0 1 2 3\n"
        "        dp_replicate  0 0 0 0\n"
        "        dp_shard      0 0 1 1\n"
        "        tp            0 1 0 1\n\n"
        "node 1  rank          4 5 6 7\n"
        "        dp_replicate  1 1 1 1\n"
        "        dp_shard      0 0 1 1\n"
        "        tp            0 1 0 1\n\n"
        "dp_replicate=2  4 groups of 2; each crosses the network between 2 nodes\n"
        "                {0 4}  {1 5}  {2 6}  {3 7}\n"
        "dp_shard=2      4 groups of 2; each stays inside one node\n"
        "                {0 2}  {1 3}  {4 6}  {5 7}\n"
        "tp=2            4 groups of 2; each stays inside one node\n"
        "                {0 1}  {2 3}  {4 5}  {6 7}"
    )


def test_groups_are_those_of_the_device_mesh() -> None:
    spec = MeshSpec("dp_replicate=2,dp_shard=3,tp=2")
    for axis in spec.axes:
        groups = spec.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(12))
        for group in groups:
            places = [spec.coordinates(rank) for rank in group]
            assert [place[axis] for place in places] == list(range(spec.axes[axis]))
            assert len({tuple(value for name, value in place.items() if name != axis) for place in places}) == 1


def test_the_svg_is_whole_and_marks_what_crosses() -> None:
    root = ElementTree.fromstring(mesh_svg(MeshSpec("dp_replicate=2,dp_shard=4"), 4))
    lines = [element.attrib for element in root.iter() if element.tag.endswith("polyline")]
    assert len([line for line in lines if "stroke-dasharray" in line]) == 4, "four groups of replicas cross"
    assert len(lines) == 6
    numbers = [int(one.text) for one in root.iter() if one.tag.endswith("text") and (one.text or "").isdigit()]
    assert sorted(numbers) == sorted([*range(8), *range(8)]), "every rank, in each of two panels"


def test_the_command_draws_and_writes(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["mesh", "dp_replicate=2,dp_shard=4,tp=2", "--nodes", "2", "--svg", str(tmp_path / "mesh.svg")]
    )
    assert done.exit_code == 0 and "16 ranks on 2 nodes of 8" in done.output
    ElementTree.parse(tmp_path / "mesh.svg")


def test_many_nodes_are_drawn_in_part() -> None:
    text = mesh_text(MeshSpec("dp_replicate=64,dp_shard=8"), 8)
    assert "... and 56 nodes more" in text and "... 2 more" in text
    assert mesh_svg(MeshSpec("dp_replicate=64,dp_shard=8"), 8).count(">node ") == 16
    with pytest.raises(MeshError, match="do not fill nodes of 5"):
        mesh_text(MeshSpec("dp_shard=8"), 5)
