"""The documentation: its links lead somewhere; every public name has a docstring and a place in the reference."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import meshpar
from meshpar import passes

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
