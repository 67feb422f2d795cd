"""The guide: its examples run, before and after print the same, and its errors are in the source."""

import contextlib
import dataclasses
import importlib
import io
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from meshpar.launchers.commands.inspecting import check_recipe
from meshpar.passes.tensor.styles import PARAMETER_STYLES, STYLES
from meshpar.testing import on_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "guide"


def page(name):
    """The text of a page, with the code in its lists set to the left."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    return re.sub(r"(?ms)^( +)```.*?^\1```", lambda code: re.sub(f"(?m)^{code[1]}", "", code[0]), text)


def example(name):
    sys.path.insert(0, str(EXAMPLES))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def shown_after(command, name):
    """The losses that a page shows under a command."""
    text = page(name)
    text = text[text.index(f"$ {command}\n") :].partition("\n$ ")[0].partition("```")[0]
    return [float(number) for number in re.findall(r"loss ([\d.]+)", text)]


@on_ranks(2)
def test_before_and_after_say_the_same_on_two_ranks():
    for before, mesh in (("before_ddp", "dp_replicate=2"), ("before_fsdp1", "dp_shard=2")):
        expected = shown_after(f"torchrun --nproc-per-node 2 {before}.py", "migrate")
        assert len(expected) == 3
        assert example(before).main() == pytest.approx(expected, abs=2e-5)
        assert example("after").main(mesh) == pytest.approx(expected, abs=2e-5)
        assert shown_after(f"torchrun --nproc-per-node 2 after.py {mesh}", "migrate") == expected


def test_before_and_after_say_the_same_in_one_process():
    expected = shown_after("python before_one.py", "own_loop")
    assert (
        expected
        == shown_after("python after.py", "own_loop")
        == shown_after("torchrun --nproc-per-node 2 after.py dp_shard=2", "own_loop")
    )
    assert example("before_one").main() == pytest.approx(expected, abs=2e-5)
    assert example("after").main() == pytest.approx(expected, abs=2e-5)


@on_ranks(2)
def test_the_guides_loop_is_resumed_on_another_mesh(tmp_path):
    commands = ("torchrun --nproc-per-node 2 resume.py dp_shard=2 runs/resume 3", 'python resume.py "" runs/resume 6')
    first, second = (shown_after(command, "resume") for command in commands)
    assert (len(first), len(second)) == (3, 3)
    assert shown_after('python resume.py "" runs/unbroken 6', "resume") == first + second
    assert example("resume").main("dp_shard=2", str(tmp_path), 3) == pytest.approx(first, abs=2e-5)
    assert example("resume").main("dp_replicate=2", str(tmp_path), 6) == pytest.approx(second, abs=2e-5)


def test_the_guides_loop_in_one_process(tmp_path):
    expected = shown_after('python resume.py "" runs/unbroken 6', "resume")
    assert example("resume").main("", str(tmp_path / "unbroken"), 6) == pytest.approx(expected, abs=2e-5)
    example("resume").main("", str(tmp_path / "broken"), 3)
    assert example("resume").main("", str(tmp_path / "broken"), 6) == pytest.approx(expected[3:], abs=2e-5)


@pytest.mark.parametrize("name", ["evaluate", "resume"])
def test_the_guide_shows_the_code_of_its_loop(name):
    source = (EXAMPLES / "resume.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.+?)```", page(name), re.DOTALL)
    blocks = [shown for shown in blocks if "from meshpar.training import" not in shown]  # needs a tokenizer
    assert blocks
    for shown in blocks:
        assert textwrap.indent(shown, " " * 8 if name == "resume" else "") in source


@on_ranks(4)
def test_the_layout_of_the_guide_proves_itself():
    example("layout").check()


@on_ranks(2)
def test_the_styles_of_the_guide_prove_themselves():
    example("styles").check()


def test_every_style_has_a_section_with_a_picture_and_an_example():
    sections = dict(re.findall(r"^## (\w+)\n(.+?)(?=^## )", page("styles"), re.DOTALL | re.MULTILINE))
    used = [
        line.strip()
        for name in ("layout", "styles")
        for line in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    ]
    for style in {*STYLES, *PARAMETER_STYLES, "packed_colwise"}:
        assert f"![{style}](styles/{style}.svg)" in sections[style]
        (shown,) = re.findall(r"```python\n(.+?)```", sections[style], re.DOTALL)
        assert all(line.strip() in used for line in shown.splitlines())
        assert f': "{style}' in shown


def test_the_pictures_of_the_styles_are_as_drawn():
    drawing = runpy.run_path(str(ROOT / "docs" / "draw_styles.py"))
    for style in drawing["PICTURES"]:
        assert (ROOT / "docs" / "styles" / f"{style}.svg").read_text(encoding="utf-8") == drawing["draw"](style)


def test_the_pass_of_the_guide(capsys):
    example("own_pass").main()
    output = capsys.readouterr().out
    assert output.strip() in page("own_pass")


def test_the_recipe_of_the_guide_fits_as_it_shows(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    assert check_recipe("from_trainer.yaml", world_size=2) in page("migrate")
    _, *recipe = Path("from_trainer.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    assert "".join(recipe) in page("migrate")


def listed_keys(heading):
    """Return the words in the first columns of the tables under a heading of the guide."""
    section = page("migrate").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.partition(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    return {key for row in rows for key in re.findall(r"`([\w.]+)`", row)}


def test_the_guide_lists_every_key_of_training_arguments():
    transformers = pytest.importorskip("transformers")
    keys = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert len(keys) > 100
    assert sorted(keys - listed_keys("From Trainer") - listed_keys("From accelerate")) == []


def test_the_guide_lists_every_key_of_accelerates_file():
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig

    keys = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert sorted(keys - listed_keys("From Trainer") - listed_keys("From accelerate")) == []


def test_the_keys_that_the_guide_translates_to_are_a_recipes():
    """``data.micro_batch`` and the like, in the second columns of the tables."""
    section = page("migrate").partition("## From Trainer\n")[2].partition("\n## From an earlier")[0]
    rows = [line.partition(" | ")[2] for line in section.splitlines() if line.startswith("| ")]
    sections = "model|data|optimizer|schedule|training|checkpoint|teacher|validation"
    known = page("recipe_keys")
    for leaf in {leaf for row in rows for leaf in re.findall(rf"`(?:{sections})\.(\w+)", row)}:
        assert f"| `{leaf}` |" in known, leaf


def test_the_errors_of_the_guide_are_in_the_source():
    paths = [
        path for folder in ("meshpar", "models", "checkpoints", "launchers") for path in (ROOT / folder).rglob("*.py")
    ]
    # adjacent pieces of one text, joined
    source = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in paths)
    rows = re.findall(r"^\| `(.+?)` \|", page("errors"), re.MULTILINE)
    assert len(rows) > 25
    missing = [piece.strip() for row in rows for piece in row.split("…") if piece.strip() not in source]
    assert missing == []
