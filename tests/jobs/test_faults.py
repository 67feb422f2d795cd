"""After each fault beside training the last step that was due is restored bitwise."""

import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshpar.launchers.agent.failures import failed_at
from meshpar.launchers.jobs import job
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.process.leftovers import write_durably
from meshpar.training.tokenizer import byte_tokenizer
from tests.support import faults
from tests.support.patience import patient
from tests.support.tiers import daily

ROOT = Path(__file__).parents[2]
DAILY = (
    "evaluation sleeps after SIGTERM", "evaluation is killed", "one rank raises before a forward",
    "tracker raises SystemExit", "write 3 finds a full disk", "SIGKILL at write 11",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("name", daily([name for name in faults.FAULTS if name != "none"], *DAILY))
def test_the_last_step_that_was_due_is_restored_bitwise(folder: Path, name: str) -> None:
    command = [sys.executable, "-m", "tests.support.script", str(ROOT / "tests/support/faults.py"), str(folder), name]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(120))
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"


@pytest.mark.parametrize("kind", ["recipe", "tokenizer", "failed at", "marker"])
def test_a_disk_that_takes_no_byte_leaves_the_file_that_was_to_be_replaced(tmp_path: Path, kind: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {dim: 8, layers: 1, heads: 1, hidden: 8}\ntraining: {steps: 1}\n")
    run = load_recipe(recipe, [f"output={tmp_path / 'run'}"])
    write: Callable[[], object] = {
        "recipe": lambda: job._begin_folder(run, SimpleNamespace(tokenizer=None)),
        "tokenizer": lambda: byte_tokenizer().save(tmp_path / "tokenizer"),
        "failed at": lambda: failed_at(tmp_path, 3),
        "marker": lambda: write_durably(tmp_path / "marker.json", "{}"),
    }[kind]
    write()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    bounds = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, bounds[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, bounds)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


WRITTEN_IN_PLACE = {
    "launchers/agent/failures.py": "a file of a name of its own, which is renamed",
    "launchers/agent/replicas.py": "in a new folder", "launchers/agent/terms.py": "in a new folder",
    "launchers/cli.py": "the file that the user names",
    "launchers/commands/launch.py": "the file that the user names", "launchers/doctor/examine.py": "probes",
    "launchers/commands/inspecting.py": "the file that the user names",
    "launchers/commands/publishing.py": "in a new folder", "launchers/targets/launching.py": "in a new folder",
    "meshpar/training/examples.py": "in a new folder", "meshpar/training/tokens.py": "in a new folder",
    "checkpoints/storage/disk.py": "in a new folder",
}  # fmt: skip


def test_files_that_exist_are_replaced_and_not_truncated() -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ("launchers", "checkpoints", "meshpar/training")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"\.write_(text|bytes)\(|open\([^)\n]*[\"']w", path.read_text())
    }
    assert found == set(WRITTEN_IN_PLACE), "write a file that may exist by meshpar.process.leftovers.write_durably"
