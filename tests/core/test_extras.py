"""Without the packages of an extra: the core imports whole, and what needs one of them names the extra."""

import subprocess
import sys

import pytest

from tests.support.tiers import daily

LACKING = """
import sys
from importlib.machinery import PathFinder

class Lacking:
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {packages!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking()
"""
TRAIN = ("numpy", "pydantic", "rich", "safetensors", "tensorboard", "tokenizers", "torchdata", "typer", "yaml")


def run(code: str, *packages: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process that cannot import ``packages``."""
    return subprocess.run(
        [sys.executable, "-c", LACKING.format(packages=packages) + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_every_public_name_of_the_core_imports_with_torch_alone_and_a_hardware_profile_without_yaml_names_the_extra() -> (
    None
):
    code = """
from meshpar import *
assert forecast and Plan and __version__
from meshpar.forecasting import Hardware
print("imported", flush=True)
Hardware.load("h100")
"""
    done = run(code, *TRAIN, "transformers", "torchao", "peft")
    assert done.stdout == "imported\n", done.stderr
    assert "MeshparError: this needs 'yaml', which is not installed: pip install 'meshpar[train]'" in done.stderr


@pytest.mark.parametrize(
    ("missing", "command"),
    daily([("typer", "--help"), ("pydantic", "check quickstart"), ("yaml", "describe gpt2")], ("typer", "--help")),
)
def test_the_command_line_without_its_extra_is_one_message(missing: str, command: str) -> None:
    done = run(f"from meshpar.launchers.__main__ import main; sys.argv = 'meshpar {command}'.split(); main()", missing)
    assert done.returncode == 1
    assert done.stdout == ""
    assert (
        done.stderr
        == f"meshpar: the command line needs '{missing}', which is not installed: pip install 'meshpar[train]'\n"
    )
