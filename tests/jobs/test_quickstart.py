"""The quickstart, short: every step of it really happens, and what it prints is true."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshpar.launchers.cli import app

SMALL = ["model.dim=32", "model.layers=2", "model.heads=2", "model.hidden=64"]
SMALL += ["data.vocab_size=300", "data.sequence_length=64"]


def source(folder: Path) -> str:
    path = folder / "source.py"
    path.write_text("".join(f"def function_{n}(value):\n    return value + {n % 7}\n\n\n" for n in range(3000)))
    return f"data.paths=[{path}]"


def test_the_quickstart_trains_resumes_elsewhere_exports_and_completes(tmp_path: Path) -> None:
    out = tmp_path / "quick"
    command = [sys.executable, "-m", "meshpar.launchers", "quickstart", "--mesh", "hsdp"]
    command += ["--out", str(out), "--minutes", "0.1"]
    small = [*SMALL, "data.source=files", source(tmp_path), "data.separator='\\n\\n\\n'"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert "1  Train on dp_replicate=2,dp_shard=1: 18 steps" in output
    assert "2  Resume from the checkpoint on another mesh, tp=2, to step 20" in output
    assert "step-00000018, saved on another mesh" in done.stderr
    fell = re.search(r"the training loss fell from ([\d.]+) to ([\d.]+)", output)
    assert fell is not None and float(fell[2]) < float(fell[1])
    differ = re.search(r"loaded as LlamaForCausalLM; .* by at most (\S+)\n", output)
    assert differ is not None and float(differ[1]) < 1e-4
    assert len(re.findall(r"(?m)^  .+ ».*$", output)) == 4
    assert f"tensorboard --logdir {out / 'tensorboard'}" in output
    for name in (
        "checkpoints/latest", "tokenizer/tokenizer.json", "export/model.safetensors", "export/tokenizer.json",
        "recipe.yaml",
    ):  # fmt: skip
        assert (out / name).exists(), name
    assert list((out / "tensorboard").iterdir())
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 20


def test_an_unknown_mesh_is_refused_at_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["quickstart", "--mesh", "tp", "--out", str(tmp_path)])
    assert done.exit_code == 78
    assert "--mesh is 'tp'; expected fsdp or hsdp" in done.stderr


def test_without_transformers_it_says_so_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "pip install 'meshpar[transformers]'" in done.stderr
    assert not list(tmp_path.iterdir())
