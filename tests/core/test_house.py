"""Rules of the house, read from the source."""

import ast
import dataclasses
import gc
import importlib
import re
import subprocess
import sys

import pytest

from meshpar import passes
from tests.remedies.table import bare, compare
from tests.support.house import COUNTS, FOLDERS, ROOT, constants, forget, imports, nodes, sources

FLOORS = [
    set(parts.split())
    for parts in (
        "process.secrets",
        "core.errors core.patterns",
        "process",
        "core.mesh weights losses.token_loss same_bits.trees _torch core.runtime",
        "core.layout",
        "core.passes",
        "core.resolved core.registry",
        "core.checks",
        "tensors",
        "exchange",
        "step",
        "passes same_bits",
        "state",
        "guards trials",
        "losses parallelized",
        "plan",
        "testing forecasting training optim",
        "models checkpoints",
        "integrations",
        "launchers",
    )
]
"""Lowest first. A part imports from its own floor only what is in no cycle, and from the floors below it."""
STAIRS = {
    "checkpoints": ["storage", "format", "steps", "export"],
    "launchers": ["recipes", "agent", "doctor", "jobs", "export", "targets", "commands", "cli", "__main__"],
}
"""The floors inside a room, lowest first."""
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}
PUBLIC = (
    "meshpar", "meshpar.passes", "meshpar.models", "meshpar.checkpoints", "meshpar.training", "meshpar.optim",
    "meshpar.forecasting", "meshpar.testing", "meshpar.launchers", "meshpar.integrations.transformers",
    "meshpar.integrations.accelerate", "meshpar.integrations.lightning",
)  # fmt: skip
"""What users import from; public is what `__all__` names there."""
MEASURED = {
    file: {f"meshpar.{module}" for module in modules.split()}
    for file, modules in {
        "architectures.py": "models.huggingface training.documents",
        "checkpoint.py": "checkpoints.storage.disk checkpoints.storage.files tensors.placements",
        "chunked_loss.py": "losses.chunked forecasting.recorder",
        "exchanges.py": "_torch.groups passes.data.instead_of_fsdp2 passes.tensor.collectives exchange.ranks",
        "forecast_accuracy.py": "forecasting.api forecasting.extrapolate forecasting.simulate",
        "fuzz_hostile.py": "launchers.cli launchers.commands.publishing launchers.commands.train training.evaluation "
        "launchers.targets.kubernetes launchers.targets.launching launchers.targets.skypilot launchers.targets.slurm",
        "gpu.py": "_torch.autograd forecasting.step launchers.jobs.reports passes.recompute launchers.jobs.profile",
        "jobs.py": "launchers.jobs",
        "log_probs.py": "losses.chunked",
        "peer_ranks.py": "models.huggingface",
        "save_planning.py": "checkpoints.format.manifest checkpoints.format.writing checkpoints.steps.planning "
        "checkpoints.steps.saving checkpoints.storage.place exchange.host_messages tensors.placements",
        "scale.py": "_torch.groups forecasting.simulate core.runtime exchange.host_messages",
        "stages.py": "forecasting.api forecasting.extrapolate forecasting.search forecasting.simulate "
        "forecasting.staged",
        "tokenizing.py": "training.text training.tokenizer training.tokens",
    }.items()
}
"""What benchmarks import although it is not public: parts that they measure alone. The list only gets shorter."""
EXTRAS = {
    "accelerate", "gguf", "numpy", "obstore", "peft", "pyarrow", "pydantic", "yaml", "rich", "typer", "tensorboard",
    "tokenizers", "torchdata", "safetensors", "transformers",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def look_for_no_garbage_in_what_is_parsed():
    gc.disable()
    yield
    gc.enable()
    forget()


def part_of(module):
    """The part of the house that a module belongs to, None for the package itself and what is not ours."""
    package, *pieces = module.split(".")
    parts = ".".join(pieces[:2]), "".join(pieces[:1])  # a file of the core stands alone
    return next((part for part in parts if package == "meshpar" and part in FLOOR), None)


def test_tests_lie_in_the_folder_of_what_they_test():
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path.parent.name != "stranger"]
    lost = [path.name for path in files if path.name.startswith("test_") and path.parent.name in ("tests", "support")]
    assert not lost, "move it into the folder of what it tests"
    stems = {path.stem for path in files}
    flat = [f"{path.name}: {name}" for path in files for name in imports(path) if name.partition(".")[0] in stems]
    assert not flat, "import it as tests.folder.name"


def test_a_checkout_is_one_whole_package():
    """Import path and disk path agree, so that tools that read files see every module."""
    for folder, package in FOLDERS.items():
        assert (ROOT / package.replace(".", "/")).resolve() == ROOT / folder


def test_every_module_has_a_floor():
    homeless = [name for _, name in sources() if name not in ("meshpar", "meshpar.core") and part_of(name) is None]
    assert not homeless


def test_imports_point_down():
    upward = []
    for path, name in sources():
        here = part_of(name)
        for target in imports(path):
            there = part_of(target)
            if here is None or there is None or here == there:
                continue
            if FLOOR[there] > FLOOR[here] or {here, there} == {"models", "checkpoints"}:
                upward.append(f"{name} imports {target}")
    assert not upward


@pytest.mark.parametrize("room", STAIRS)
def test_imports_inside_a_room_point_down(room):
    upward, inside, stairs = [], f"meshpar.{room}.", STAIRS[room]
    for path, name in sources():
        if not name.startswith(inside):
            continue
        here = stairs.index(name.split(".")[2])
        there = {target.split(".")[2] for target in imports(path) if target.startswith(inside)}
        upward += [f"{name} imports {part}" for part in there if stairs.index(part) > here]
    assert not upward


def test_one_file_asks_what_kind_of_storage_a_place_is():
    """Disks and object stores have the same verbs; what differs by more is chosen once, by `either`."""
    kinds = re.compile(r"\b(ObjectPath|DiskPath)\b")
    askers = {
        str(path.relative_to(ROOT))
        for path, _ in sources()
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and kinds.search(ast.unparse(node.args[1]))
    }
    assert askers == {"checkpoints/storage/place.py"}


def test_there_are_no_cycles():
    graph = {}
    modules = {name for _, name in sources()}
    for path, name in sources():
        graph[name] = {target for target in imports(path) if target in modules and target != name}
    done, active = set(), []

    def visit(name):
        if name in done:
            return
        assert name not in active, f"cycle: {' -> '.join([*active[active.index(name) :], name])}"
        active.append(name)
        for target in sorted(graph[name]):
            # A package's __init__ gathers its modules; they may name each other but not it.
            visit(target)
        active.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)


def test_no_function_changes_a_global():
    found = [name for path, name in sources() if any(isinstance(node, ast.Global) for node in nodes(path))]
    assert not found


OUTER = ("models", "checkpoints", "integrations", "launchers")
PASSES = {*passes.__all__} - {"Pass", "Role", "Stage", "Style"}


def test_the_core_knows_no_pass_by_name():
    """Nothing above passes/ compares a pass's name, or asks an object for a member that it may lack."""
    found = []
    for path, name in sources():
        if not name.startswith("meshpar.") or part_of(name) in {"passes", *OUTER}:
            continue
        loops = [
            node
            for node in nodes(path)
            if isinstance(node, ast.For | ast.comprehension) and "passes" in ast.unparse(node.iter)
        ]
        loop_names = {target.id for loop in loops for target in ast.walk(loop.target) if isinstance(target, ast.Name)}
        for node in nodes(path):
            if isinstance(node, ast.Compare) and any(
                isinstance(side, ast.Constant) and side.value in PASSES for side in node.comparators
            ):
                found.append(f"{name} compares {ast.unparse(node)}")
            asked = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            )
            if asked and isinstance(node.args[0], ast.Name) and node.args[0].id in loop_names:
                found.append(f"{name} asks {ast.unparse(node)}")
    assert not found


CORE = sorted((ROOT / "meshpar/core").glob("*.py"))
BELOW_THE_CORE = {"_torch", "weights", "process.secrets"}
"""Torch's private parts, and a layout's map of published names, which knows errors and patterns alone."""
TECHNIQUES = PASSES | {"Muon", "Replicas", "transformers", "elastic", "torchft"}


def test_the_core_imports_no_technique():
    """Nor states, guards, models, checkpoints, jobs: what the core needs of them is handed in or registered."""
    found = {
        (path.name, part)
        for path in CORE
        for target in imports(path)
        if (part := part_of(target)) and not part.startswith("core.") and part not in BELOW_THE_CORE
    }
    assert found == set()


def test_the_core_names_no_technique_and_no_axis():
    """Remedies ask the registry which pass is installed; the names of axes are the mesh's vocabulary."""
    axes = {"pp", "dp_replicate", "dp_shard", "cp", "ep", "tp"}
    words = re.compile(r"\w+")
    found = set()
    for path in CORE:
        known = TECHNIQUES if path.name == "mesh.py" else TECHNIQUES | axes
        tree = ast.parse(path.read_text())
        names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        texts = [value for value in constants(path) if isinstance(value, str)]
        said = {word for text in [*names, *texts] for word in words.findall(text)}
        found |= {(path.name, word) for word in said & known}
    assert found == set()


def test_the_core_fits_in_the_head():
    lines = {path.name: len(path.read_text().splitlines()) for path in CORE}
    assert sum(lines.values()) <= 2500 and max(lines.values()) <= 400, lines


HOST_WORDS = re.compile(r"(self\.offload|nproc|recipe\.device|target)")
"""What a person wrote, or whose kernels the forecast stands for: no device that is there."""


def test_one_place_asks_what_kind_of_device_it_is():
    """Others ask meshpar.core.runtime for what matters: whether memory is the host's, whether work is queued."""
    askers = []
    for path, name in sources():
        for node in nodes(path):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            asks = any(
                isinstance(inner, ast.Constant) and inner.value == "cpu" for side in sides for inner in ast.walk(side)
            )
            if asks and not HOST_WORDS.fullmatch(ast.unparse(node.left)):
                askers.append(f"{name} asks {ast.unparse(node)}")
    assert [asker for asker in askers if not asker.startswith("meshpar.core.runtime ")] == []


def test_the_core_needs_torch_alone():
    foreign = []
    for path, name in sources():
        if name.startswith("meshpar.") and part_of(name) in {*OUTER, "training", "forecasting"}:
            continue
        foreign += [f"{name} imports {target}" for target in imports(path) if target.split(".")[0] in EXTRAS]
    assert not foreign


def test_the_environment_has_one_reader_in_the_core_and_one_in_the_launchers():
    readers = [
        str(path.relative_to(ROOT))
        for path, name in sources()
        if "os.environ" in path.read_text() or "os.getenv" in path.read_text()
    ]
    assert sorted(readers) == ["launchers/agent/terms.py", "meshpar/core/runtime.py"]


def test_home_folders_are_looked_up_in_one_place():
    users = {
        str(path.relative_to(ROOT))
        for path, _ in sources()
        if re.search(r"expanduser\(\)|Path\.home|getuser", path.read_text())
    }
    assert users == {"meshpar/process/imports.py"}, (
        "a container may run as a user without a home folder: meshpar.process.imports.expanded"
    )


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_imports(package):
    module = importlib.import_module(package)
    assert len(module.__all__) == len(set(module.__all__))
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing
    assert set(module.__all__) <= set(dir(module))


def private_imports(code):
    """The modules of ours that ``code`` imports from, or names, although they are not public."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if alias.name.startswith("meshpar") and alias.name not in PUBLIC
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshpar":
            if node.module not in PUBLIC:
                yield node.module
                continue
            public = importlib.import_module(node.module).__all__
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public)


def test_examples_and_docs_use_public_names_alone():
    files = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(path): set(private_imports(path.read_text())) for path in files}
    for page in pages:
        lines = re.findall(
            r"(?m)^ *((?:from|import) [\w., ]+)$", page.read_text()
        )  # of blocks that may show a part of a file
        found[str(page)] = {
            name for line in lines if "meshpar" in line and " import" in f" {line}" for name in private_imports(line)
        }
    assert len(files) > 5 and any("import" in path.read_text() for path in files)
    assert {path: names for path, names in found.items() if names} == {}


def test_benchmarks_use_public_names_but_for_what_they_measure_alone():
    found = {path.name: set(private_imports(path.read_text())) for path in (ROOT / "benchmarks").rglob("*.py")}
    assert {name: modules for name, modules in found.items() if modules} == MEASURED


STARTS = [
    ("meshpar.launchers.jobs.worker", ("torch", "numpy")),  # what each rank of a script starts with
    ("meshpar.launchers.agent.local", ("torch.distributed.tensor", "transformers")),
    ("meshpar.launchers.jobs.job", ("torch._dynamo", "transformers")),
    ("meshpar, meshpar.models, meshpar.checkpoints", ("transformers",)),
    ("meshpar.models.huggingface", ("transformers",)),
]
"""What one new interpreter imports in this order -> what none of it up to there may load."""


def test_imports_do_nothing_and_a_start_loads_no_more_than_it_needs():
    code = f"""
import sys
for modules, unneeded in {STARTS!r}:
    exec(f"import {{modules}}")
    loaded = [name for name in unneeded if name in sys.modules]
    assert not loaded, f"importing {{modules}} loads {{loaded}}"
import torch
assert not torch.distributed.is_initialized()
assert meshpar.models.huggingface.layout_for(torch.nn.Linear(2, 2)) is None
assert not any(name.startswith("transformers") for name in sys.modules)
print("quiet")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("quiet\n", "")


def begins(value, text):
    return isinstance(value, str) and value.startswith(text)


FACTS = {
    "the label that is not counted": ("meshpar/losses/token_loss.py", lambda value: value == -100),
    "the name of a step's folder": ("checkpoints/format/manifest.py", lambda value: begins(value, "step-")),
    "the prefix of a model's tensors": ("checkpoints/format/manifest.py", lambda value: value == "model."),
    "the peak speed of an accelerator": (
        "meshpar/process/devices.py",
        lambda value: value in (312e12, 989e12, 2250e12),
    ),
    "the mesh that the nodes decide": ("meshpar/core/mesh.py", lambda value: begins(value, "auto(")),
}
"""What may be written in one file alone, and how a constant that writes it looks."""


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_has_one_home(fact):
    home, states = FACTS[fact]
    assert {str(path.relative_to(ROOT)) for path, _ in sources() if any(map(states, constants(path)))} == {home}


def test_profiles_repeat_no_peak():
    assert all("bfloat16" not in path.read_text() for path in (ROOT / "meshpar/forecasting/profiles").glob("*.yaml"))


def test_a_setting_has_one_dataclass():
    """The sections of a recipe repeat no field of the settings that they are made from."""
    from meshpar.launchers.recipes.sections import OptimizerSection, ScheduleSection, TrainingSection
    from meshpar.training.adamw_and_schedules import AdamWSettings, Schedule
    from meshpar.training.settings import TrainSettings

    for section, settings in (
        (OptimizerSection, AdamWSettings),
        (ScheduleSection, Schedule),
        (TrainingSection, TrainSettings),
    ):
        names = {field.name for field in dataclasses.fields(settings)}
        own = set(section.__annotations__) & names
        assert own <= {"steps"}, own  # a schedule's length is the run's unless a recipe gives one
        defaults = {field.name: field.default for field in dataclasses.fields(settings)}
        assert {
            name: field.default for name, field in section.model_fields.items() if name in names - {"steps"}
        }.items() <= defaults.items()


MOST = {
    "classes over 300 lines": 0,
    "classes over 15 attributes": 2,
    "classes over 10 constructor arguments": 1,
    "class names with several meanings": 0,
    "files that read a record on the module": 0,
    "files that ask whether ranks are simulated": 0,
    "imports by text": 0,
    "private names of others outside their room": 27,
    "code wrapped around a trailing comment": 0,
    "variables without a noun": 44,
    "files loose in meshpar": 2,
}
"""How many there are. A number only falls: whoever makes one smaller writes the new one here."""


@pytest.mark.parametrize("count", COUNTS)
def test_a_count_of_the_house_only_falls(count):
    found = COUNTS[count]()
    assert len(found) <= MOST[count], "\n".join(found)
    assert len(found) == MOST[count], f'write "{count}": {len(found)}'


def test_each_printed_remedy_is_in_the_table_of_remedies():
    """`tests/remedies/rows.py` says how to add a row."""
    untried = compare()[0]
    assert not untried, f"{len(untried)} remedies are untried:\n" + "\n".join(untried)


def test_each_row_of_the_table_of_remedies_has_its_message():
    assert not compare()[1], "\n".join(compare()[1])


def test_a_message_says_what_to_do_or_what_was_expected():
    assert not bare(), "\n".join(bare())
