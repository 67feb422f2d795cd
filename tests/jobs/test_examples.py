"""The examples run as the README shows them, and say the same on every mesh."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar.checkpoints import export_safetensors
from meshpar.core.errors import CheckpointError
from tests.support.tiers import daily

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m", "tests.support.script"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MESHPAR_RUN = [sys.executable, "-m", "meshpar.launchers", "run", "--nproc", "2"]


def run(command, example, *arguments, folder):
    """Run an example in one process or on two ranks, and return what it prints."""
    command = [*command, str(ROOT / "examples" / example), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    folder = ROOT if command[: len(PYTHON)] == PYTHON else folder
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("start", daily([MESHPAR_RUN, TORCHRUN], MESHPAR_RUN, ids=lambda command: command[2]))
def test_a_loop_of_ones_own_on_one_process_and_on_a_mesh(tmp_path, start):
    """In one folder, as the README runs them: the second run replaces the first one's checkpoint and export."""
    alone, together = (
        [(float(loss), float(norm)) for loss, norm in re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", printed)]
        for printed in (
            run(PYTHON, "own_loop.py", "", tmp_path, folder=tmp_path),
            run(start, "own_loop.py", "tp=2", tmp_path, folder=tmp_path),
        )
    )
    assert len(alone) == 3 and alone[-1][0] < alone[0][0]
    for (loss, norm), (same_loss, same_norm) in zip(alone, together, strict=True):
        assert (loss, norm) == (pytest.approx(same_loss, abs=2e-5), pytest.approx(same_norm, abs=2e-4))
    assert {"model.safetensors", "config.json"} <= {path.name for path in (tmp_path / "export").iterdir()}


@pytest.mark.parametrize("mesh", daily(["tp=2", "dp_shard=2"], "tp=2"))
def test_research_loops_print_the_same_on_one_process_and_on_a_mesh(tmp_path, mesh):
    alone, together = (
        {name: float(value) for name, value in re.findall(r"(\w+): ([\d.]+)", printed)}
        for printed in (
            run(PYTHON, "research_loop.py", folder=tmp_path),
            run(MESHPAR_RUN, "research_loop.py", mesh, folder=tmp_path),
        )
    )
    assert alone.keys() == {"judge", "generator", "student", "teacher"}
    assert together == pytest.approx(alone, abs=2e-5)


def test_the_reward_of_a_policy_rises(tmp_path):
    printed = run(MESHPAR_RUN, "policy_gradient.py", 100, folder=tmp_path)
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", printed)]
    assert len(rewards) == 3 and rewards[-1] > rewards[0] + 0.15, rewards


def test_weights_come_by_files_whole_checked_and_never_an_older_version(tmp_path, capsys):
    root = tmp_path / "weights"
    run(MESHPAR_RUN, "weights_by_files.py", "train", root, 3, folder=tmp_path)
    example = runpy.run_path(str(ROOT / "examples" / "weights_by_files.py"))
    example["train"](str(root), 2)  # another job goes on after the last number
    example["serve"](str(root), 5)
    printed = capsys.readouterr().out
    assert re.findall(r"published version (\d)", printed) == ["4", "5"]
    assert re.findall(r"serving version (\d), weights [1-9]", printed) == ["5"]
    take, engine = example["take"], str(tmp_path / "engine")
    assert (take(str(root), 4, engine), take(str(root), 5, engine), take(str(root), 6, engine)) == (5, 0, 0)
    expected = export_safetensors(root / "step-00000005", tmp_path / "whole") / "model.safetensors"
    assert (tmp_path / "engine" / "model.safetensors").read_bytes() == expected.read_bytes()
    (part, *_) = sorted((root / "step-00000005").glob("*.distcp"))
    data = bytearray(part.read_bytes())
    for place in range(len(data) // 4, 3 * len(data) // 4, 97):
        data[place] ^= 1
    part.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"checksum|damaged"):
        take(str(root), 4, engine)
    assert (tmp_path / "engine" / "model.safetensors").read_bytes() == expected.read_bytes()
