"""The documentation: its links lead somewhere; every public name has a docstring and a place in the reference."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

import meshpar
from meshpar import RecipeError, passes
from meshpar.launchers.recipes.loading import resolve
from meshpar.launchers.recipes.yamlfile import parse_document

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TRIED = [path for path in PAGES if ">>> " in path.read_text(encoding="utf-8")]
API = sorted((ROOT / "docs" / "api").glob("*.md"))
PUBLIC = [
    "meshpar", "meshpar.passes", "meshpar.models", "meshpar.checkpoints", "meshpar.training", "meshpar.optim",
    "meshpar.forecasting", "meshpar.testing", "meshpar.launchers", "meshpar.integrations.accelerate",
    "meshpar.integrations.transformers",
]  # fmt: skip


def prose(path):
    """A page without its blocks of code."""
    return re.sub(r"(?ms)^( *)```.*?^\1```", "", path.read_text(encoding="utf-8"))


def anchors(path):
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(path):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", prose(path))):
        target, _, anchor = link.partition("#")
        if ":" in target:
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def test_every_page_is_listed_for_readers():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.name not in ("README.md", "index.md")]
    assert [name for name in names if f"]({name})" not in index] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == meshpar.__version__ and cited["license"] == "Apache-2.0"
    assert {"cff-version", "title", "message", "authors"} <= cited.keys()


def without_comments(code):
    return [line.partition("  #")[0].strip() for line in code.splitlines()]


def test_the_front_pages_say_whether_anything_ran_on_an_accelerator_as_its_page_does() -> None:
    nothing = "| one accelerator | nothing" in (ROOT / "docs/accelerators.md").read_text(encoding="utf-8")
    for name in ("README.md", "docs/index.md", "docs/quickstart.md"):
        page = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert ("meshpar has not run on an accelerator yet" in page) == nothing, name
        assert re.search(
            r"without one.{0,3}\]\([a-z/]*accelerators\.md\)|\]\([a-z/]*accelerators\.md\) lists what", page
        ), name
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/own_loop.md"])
def test_the_loop_that_is_shown_is_the_examples(page):
    source = [without_comments(path.read_text(encoding="utf-8")) for path in (ROOT / "examples").rglob("*.py")]
    blocks = re.findall(r"```python\n(.+?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        assert any(set(without_comments(block)) <= set(lines) for lines in source)


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_a_docstring_and_a_place_in_the_reference(package):
    listed = re.findall(r"^::: ([\w.]+)\.(\w+)$", "\n".join(path.read_text() for path in API), re.MULTILINE)
    shown = {id(getattr(importlib.import_module(home), name)) for home, name in listed}
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    assert [name for name, value in public.items() if id(value) not in shown] == []
    assert [name for name, value in public.items() if not documented(module, name, value)] == []


@pytest.mark.parametrize("name", [name for name in passes.__all__ if issubclass(getattr(passes, name), meshpar.Pass)])
def test_the_example_of_every_pass_runs(name):
    kind = getattr(meshpar, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(
        kind, name, globs={"Pass": meshpar.Pass, "Stage": meshpar.Stage}
    )
    assert example.examples, "help() shows an example"
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("package", PUBLIC)
def test_the_examples_of_public_names_run(package):
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in module.__all__}
    kinds = {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isroutine(value)}
    failed = []
    for name, value in kinds.items():
        for example in doctest.DocTestFinder(recurse=False).find(value, name, globs=dict(values)):
            failed += [name] * doctest.DocTestRunner(verbose=False).run(example).failed
    assert failed == []


@pytest.mark.parametrize("path", TRIED, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_page_run(path):
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    page = "\n".join(re.findall(r"(?ms)^```python\n(>>> .+?)^```", path.read_text(encoding="utf-8")))
    assert runner.run(parser.get_doctest(page, {}, path.name, str(path), 0)).attempted
    assert runner.failures == 0


def test_every_name_of_the_reference_has_a_line_for_readers_of_the_file():
    assert set(API) <= set(TRIED)
    absent = {}
    for path in API:
        words, *listed = re.split(r"(?m)^::: meshpar\.(?:[\w.]+\.)?(?=\w+$)", path.read_text(encoding="utf-8"))
        absent[path.stem] = [
            name
            for name, *_options in map(str.split, listed)
            if not re.search(rf"^\| .*`(?:\w+\.)?{name}`.*\| ", words, re.MULTILINE)
        ]
    assert not any(absent.values()), absent


def documented(module, name, value):
    """Whether a class or function has a docstring of its own, or a text stands below a constant."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return bool(value.__doc__) and not value.__doc__.startswith(f"{name}(")  # which dataclasses write by themselves
    tree = ast.parse(inspect.getsource(module))
    homes = [
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names)
    ]
    body = ast.parse(inspect.getsource(importlib.import_module(homes[0]))).body if homes else tree.body
    defined = [
        place
        for place, node in enumerate(body)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in ast.unparse(node).split("=")[0]
    ]
    after = body[defined[0] + 1]
    return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)


def blocks(path, *kinds):
    """The texts of a page's blocks of code of some kinds, set to the left."""
    found = re.findall(r"(?ms)^( *)```(\w*)\n(.*?)^\1```", path.read_text(encoding="utf-8"))
    return [re.sub(f"(?m)^{indent}", "", code) for indent, kind, code in found if kind in kinds]


PUBLIC_NAMES = {
    name: getattr(importlib.import_module(home), name)
    for home in PUBLIC
    for name in importlib.import_module(home).__all__
}
MEMBERS = {"par": meshpar.Parallelized, "plan": meshpar.Plan, "checkpoints": meshpar.checkpoints.CheckpointManager}
"""What snippets call the objects of these classes."""


def meant(node, others):
    """The object that a name or an attribute of a snippet means, None for what is not meshpar's or set by instances."""
    if isinstance(node, ast.Name):
        known = None if node.id in others else MEMBERS.get(node.id, PUBLIC_NAMES.get(node.id))
        return meshpar if node.id == "meshpar" else known
    if not isinstance(node, ast.Attribute) or (owner := meant(node.value, others)) is None:
        return None
    if inspect.ismodule(owner) and not hasattr(owner, node.attr):
        return importlib.import_module(f"{owner.__name__}.{node.attr}")
    if inspect.isclass(owner) and not hasattr(owner, node.attr):
        ours = [base for base in owner.__mro__ if base.__module__.startswith("meshpar")]
        fields = {
            name
            for base in ours
            for name in re.findall(r"(?:self\.|^    )(\w+)\b", inspect.getsource(base), re.MULTILINE)
        }
        assert node.attr in fields, ast.unparse(node)
        return None
    return getattr(owner, node.attr) if inspect.ismodule(owner) or inspect.isclass(owner) else None


def refused(call, others):
    """The keywords of a call that a function of meshpar does not take."""
    target = meant(call.func, others)
    try:
        known = inspect.signature(target).parameters.values() if callable(target) else None
    except ValueError:  # an error's
        known = None
    if known is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
        return []
    names = {None, *(parameter.name for parameter in known)}
    return [f"{ast.unparse(call.func)}({key.arg}=)" for key in call.keywords if key.arg not in names]


SNIPPETS = [path for path in PAGES if any(">>> " not in code for code in blocks(path, "python"))]


@pytest.mark.parametrize("path", SNIPPETS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_snippet_imports_calls_and_passes_is_there(path):
    codes = [code for code in blocks(path, "python") if ">>> " not in code and not code.startswith(" ")]
    nodes = [node for code in codes for node in ast.walk(ast.parse(code))]
    others, wrong = set(), []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if "meshpar" in ast.unparse(node):
                exec(ast.unparse(node), {})
            else:
                others |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            others.add(node.name)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            meant(node, others)
        elif isinstance(node, ast.Call):
            wrong += refused(node, others)
    assert wrong == []


FRAGMENTS = [
    (path, number)
    for path in PAGES
    for number, code in enumerate(blocks(path, "yaml"))
    if re.search(r"(?m)^[a-z_]+:", code)
]
NO_RECIPES = ("name: x86-64-measured", "spec:", "output_dir:", "name: bad")
"""How blocks begin that are profiles, patches of job files, or recipes that the page shows as refused."""


@pytest.mark.parametrize("path,number", FRAGMENTS, ids=lambda value: getattr(value, "stem", value))
def test_the_yaml_of_a_page_has_keys_of_a_recipe(path, number, tmp_path, monkeypatch):
    code = blocks(path, "yaml")[number]
    if code.startswith(NO_RECIPES):
        return
    lines = [code] if len(re.findall(r"(?m)^data:", code)) < 2 else code.splitlines()
    for text in lines:
        document = parse_document(text, path.name)
        base = {"model": {"kind": "gpt2"}, "training": {"steps": 10}}
        document.data = {**base, **document.data}
        document.data["training"] = {**base["training"], **document.data["training"]}
        try:
            resolve(document)
        except RecipeError as error:
            assert not re.search("unknown key|, got ", str(error)), error
