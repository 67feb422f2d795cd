"""Published programs on accelerate, with one changed import and one argument, equal plain accelerate.

Each program is pinned by commit and digest. It is read below ``MESHPAR_PROGRAMS`` (``OWNER/NAME/PATH``), or downloaded;
without either its test is skipped. Packages that programs import may lie in this folder, too.
"""

import contextlib
import importlib.machinery
import io
import json
import os
import re
import sys
import types
from pathlib import Path
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist

from meshpar.testing import launch, whole
from tests.integrations.programs.assets import write_images, write_language
from tests.integrations.programs.published import PLAIN, PROGRAMS
from tests.integrations.test_accelerate import start
from tests.nightly.strangers import vision_operators
from tests.support.tiers import daily


def has_torchvision() -> bool:
    folders = [*sys.path, os.environ.get("MESHPAR_PROGRAMS", "")]
    return importlib.machinery.PathFinder.find_spec("torchvision", folders) is not None


PAGE = Path(__file__).parents[3] / "docs/integrations/accelerate.md"


class Accuracy:
    """The part of `evaluate` that the programs use, whose metrics come from the Hub."""

    def __init__(self) -> None:
        self.hits: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.hits += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        hits, self.hits = self.hits, []
        assert len(hits) in (21, 41), "each sample counts once"
        return {"accuracy": sum(hits) / len(hits)}


def run(text: str, arguments: list[str], assets: Path, result: Path, mesh: str | None) -> None:
    """Run a program in this rank, and write its losses, weights and printed metrics; without a mesh plain accelerate."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(assets / "cache"), "HF_HOME": str(assets / "home"),
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    os.chdir(assets)
    sys.path.append(os.environ.get("MESHPAR_PROGRAMS", ""))
    vision_operators.declared()
    torch.manual_seed(0)  # some programs take no seed
    # plain accelerate takes a process without these for the only one
    start(launched=mesh is not None or dist.get_world_size() > 1)
    weights: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    backward, end_training = accelerate.Accelerator.backward, accelerate.Accelerator.end_training

    def note_weights(self: accelerate.Accelerator) -> None:
        model = getattr(self._models[0], "module", self._models[0])
        weights.update({name: whole(tensor) for name, tensor in model.named_parameters()})
        with mock.patch.object(dist, "destroy_process_group"):  # which is the test's
            end_training(self)

    def note_loss(self: accelerate.Accelerator, loss: torch.Tensor, **options: object) -> None:
        losses.append(self.gather(loss.detach()).mean().item())
        backward(self, loss, **options)

    stub = types.ModuleType("evaluate")
    stub.load = lambda *names: Accuracy()  # type: ignore[attr-defined]
    sys.modules["evaluate"] = stub  # these processes end with the test
    printed = io.StringIO()
    with (
        mock.patch.object(accelerate.Accelerator, "end_training", note_weights),
        mock.patch.object(accelerate.Accelerator, "backward", note_loss),
        mock.patch.object(sys, "argv", ["program.py", *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        exec(compile(text, "program.py", "exec"), {"__name__": "__main__", "__file__": "program.py"})
    if dist.get_rank() == 0:
        found = re.findall(r"(accuracy'|loss|grad norm): ([\d.e-]+)", printed.getvalue())
        metrics = {f"{name} {place}": float(number) for place, (name, number) in enumerate(found)}
        torch.save({"losses": losses, "weights": weights, "metrics": metrics}, result)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    write_language(folder)
    if has_torchvision():
        write_images(folder)
    return folder


def numbers(out: Path) -> dict[str, float]:
    file = out / "all_results.json"
    return json.loads(file.read_text()) if file.exists() else {}


def exported(out: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a program exported: of its model, of the average, of adapters."""
    from safetensors.torch import load_file

    files = [*out.glob("*.safetensors"), *out.glob("unet/*.safetensors")]
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def largest_difference(found: dict[str, float | torch.Tensor], expected: dict[str, float | torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    apart = (torch.as_tensor(found[name]) - torch.as_tensor(value) for name, value in expected.items())
    return max((float(part.abs().max()) for part in apart), default=0.0)


RANKS = {
    "": 1, "tp=2": 2, "dp_shard=2": 2, "dp_replicate=2": 2,
    "dp_shard=2,tp=2": 4, "dp_replicate=2,dp_shard=2": 4, "dp_shard=4": 4,
}  # fmt: skip
RESUMED_ON = {
    "tp=2": "", "dp_shard=2": "dp_replicate=2", "dp_shard=2,tp=2": "dp_shard=2", "dp_replicate=2,dp_shard=2": "dp_shard=4"
}  # fmt: skip
"""Mesh -> one with as many data ranks, on which a program resumes."""


def launched(name: str, mesh: str | None, data_ranks: int, assets: Path, folder: Path, resume: bool = False):
    """Run a program on the ranks of a mesh, or on as many processes of plain accelerate; return what it found."""
    program, out = PROGRAMS.get(name, PLAIN), folder / "out"
    text = program.read()
    ranks, text = (data_ranks, program.repaired(text)) if mesh is None else (RANKS[mesh], program.on_mesh(text, mesh))
    arguments = f"{program.arguments} {program.resume if resume else ''}"
    arguments = arguments.replace("BATCH", str(program.batch // data_ranks)).replace("OUT", str(out)).split()
    launch(
        __name__, "run", ranks, (text, arguments, assets, folder / "result.pt", mesh), timeout_s=300, fresh="datasets"
    )
    found = torch.load(folder / "result.pt")
    return found | {"exported": exported(out), "metrics": found["metrics"] | numbers(out)}


@pytest.fixture(scope="module")
def plain(assets, tmp_path_factory):
    """Return a look-up of what a program does on some processes of plain accelerate, and does when resumed."""
    known = {}

    def look_up(name, processes, resume):
        if (name, processes, resume) not in known:
            folder = tmp_path_factory.getbasetemp() / f"{name}-{processes}"
            folder.mkdir(exist_ok=True)
            known[name, processes, resume] = launched(name, None, processes, assets, folder, resume)
        return known[name, processes, resume]

    return look_up


def read_row(name: str) -> dict[str, str]:
    """Return what the page's table says of a program, by column."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heading = next(line for line in lines if line.startswith("| program |"))
    row = next(line for line in lines if line.startswith(f"| `{name}.py`"))
    columns, cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in (heading, row))
    return dict(zip(columns, cells, strict=True))


def compare(found, expected, measured):
    """Hold what a program did on a mesh against plain accelerate; note the largest differences."""
    assert len(found["losses"]) == len(expected["losses"])
    for what in ("losses", "metrics", "weights", "exported"):
        one, other = (dict(enumerate(run[what])) if what == "losses" else run[what] for run in (found, expected))
        scale = max([1.0, *map(abs, other.values())]) if what in ("losses", "metrics") else 1.0
        apart = largest_difference(one, other) / scale
        assert apart <= (1e-4 if what in ("weights", "exported") else 1e-5), (
            what,
            apart,
            found["losses"],
            expected["losses"],
        )
        measured[what] = max(measured.get(what, 0.0), apart)


@pytest.mark.parametrize("mesh", daily(PLAIN.meshes, "dp_shard=2"))
def test_a_program_of_plain_accelerate_equals_itself_with_meshpar_under_it(mesh, tmp_path, plain):
    """And resumes on another mesh; the nightly tier runs published ones, too."""
    assert PLAIN.lines_changed(PLAIN.read()) == 2
    expected, data_ranks = plain("plain", PLAIN.meshes[mesh], False), PLAIN.meshes[mesh]
    found = launched("plain", mesh, data_ranks, tmp_path, tmp_path)
    assert len(found["losses"]) >= 20
    compare(found, expected, {})
    resumed = launched("plain", RESUMED_ON[mesh], data_ranks, tmp_path, tmp_path, True)
    compare(resumed, plain("plain", data_ranks, True), {})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "mesh"), [(name, mesh) for name, program in PROGRAMS.items() for mesh in program.meshes]
)
@pytest.mark.timeout(900)
def test_a_published_program_equals_plain_accelerate(name, mesh, assets, plain, tmp_path):
    pytest.importorskip("datasets")
    program = PROGRAMS[name]
    if "images" in program.arguments:
        has_torchvision() or pytest.skip("needs torchvision; install the extra strangers-vision")
    try:
        text = program.read()
    except OSError as error:
        pytest.skip(f"{program.path} cannot be had ({error}); MESHPAR_PROGRAMS names a folder that has it")
    shown = read_row(name)
    assert str(program.lines_changed(text)) == shown["lines changed"] <= "5"
    assert f"`{mesh}`" in shown["meshes"]
    data_ranks, measured = program.meshes[mesh], {}
    expected = plain(name, data_ranks, False)
    assert len(expected["losses"]) >= 10
    compare(launched(name, mesh, data_ranks, assets, tmp_path), expected, measured)
    if program.resume:
        resumed = launched(name, RESUMED_ON[mesh], data_ranks, assets, tmp_path, True)
        assert len(resumed["losses"]) == len(expected["losses"]) // 2
        compare(resumed, plain(name, data_ranks, True), measured)
    largest = max(measured["losses"], measured["metrics"]), max(measured["weights"], measured["exported"])
    assert largest[0] <= float(shown["losses"]) and largest[1] <= float(shown["weights"]), largest
