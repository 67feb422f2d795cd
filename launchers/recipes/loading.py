"""Read recipes: find the file, put foreign keys in meshpar's terms, fill in what the file leaves out, and report
every problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from meshpar.core.errors import MeshError, RecipeError
from meshpar.core.mesh import MeshSpec, is_auto
from meshpar.core.patterns import suggestion
from meshpar.homes import expanded
from meshpar.launchers.recipes.conflicts import calling_problems, conflicts
from meshpar.launchers.recipes.named import convert_keys, make_importable, read_passes
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.schema import validate
from meshpar.launchers.recipes.yamlfile import Document, Place, apply_overrides, read_document


class UnknownRecipeError(RecipeError):
    """Raised where a name is neither a file nor a recipe that comes with meshpar."""


def load_recipe(source: str | Path, overrides: Sequence[str] = (), *, disks: bool = True) -> Recipe:
    """Read a recipe, with fields set from the command line.

    Args:
        source: a YAML file, or the name of a recipe that comes with meshpar (:func:`shipped`).
        overrides: ``training.steps=50``; values are YAML.
        disks: whether the folders of the model must exist here; False: the recipe is for a machine with other disks.

    Raises:
        RecipeError: listing everything that is wrong.
    """
    document = _find(source)
    apply_overrides(document, overrides)
    return resolve(document, disks=disks)


def shipped() -> dict[str, Path]:
    """Return the recipes that come with meshpar."""
    folder = resources.files("meshpar.launchers.recipes")
    return {
        Path(path.name).stem: Path(str(path))
        for path in sorted(folder.iterdir(), key=lambda one: one.name)
        if path.name.endswith(".yaml")
    }


def resolve(document: Document, *, disks: bool = True) -> Recipe:
    """Return the recipe of a document, or raise RecipeError with every problem."""
    data = dict(document.data)
    problems: list[str] = []
    _find_own_code(data, document)
    notes = _read_plan(data, document, problems)
    if isinstance(data.get("teacher"), Mapping):
        data["teacher"] = dict(data["teacher"])
        data["teacher"].setdefault("mesh", data["mesh"])
        notes += [f"teacher.{note}" for note in _read_plan(data["teacher"], document, problems, ("teacher",))]
    _take_from_weights(data)
    _name_kinds(data)
    data["name"] = data.get("name") or Path(document.name).stem
    data["output"] = data.get("output") or f"runs/{data['name']}"
    found = validate(Recipe, data, document)
    if isinstance(found, list):
        problems = found + problems
    else:
        problems += calling_problems(found, document)
        problems += [f"{document.where(place)}: {text}" for place, text in conflicts(found, disks=disks)]
    if problems or isinstance(found, list):
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in this recipe"
        raise RecipeError("\n  ".join([count, *problems]))
    return found.read_from(document).noting(notes)


OPTIMIZERS = {"muon": "meshpar.optim.Muon", "small_adamw": "meshpar.optim.SmallAdamW"}
"""Short names of meshpar's optimizers, as ``class``."""


def _name_kinds(data: dict[str, Any]) -> None:
    """Write which kind of optimizer and of data a section is."""
    optimizer, section = data.get("optimizer"), data.get("data")
    if isinstance(optimizer, Mapping):
        data["optimizer"] = {"name": "own" if "class" in optimizer else "adamw", **optimizer}
        if optimizer.get("class") in OPTIMIZERS:
            data["optimizer"]["class"] = OPTIMIZERS[optimizer["class"]]
    if isinstance(section, Mapping) and section.get("dataset") is not None:
        data["data"] = {"source": "dataset", **section}
    elif isinstance(section, Mapping) and section.get("mix"):
        data["data"] = {"source": "mix", **section}


def _find_own_code(data: dict[str, Any], document: Document) -> None:
    """Make the recipe's folder importable if the recipe names something by import path, and write the folder into
    the recipe.
    """

    def inside(*path: str) -> Any:
        found: Any = data
        for part in path:
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    sections = (("model",), ("teacher", "model"), ("optimizer",), ("data", "dataset"), ("data", "validation_dataset"))
    passes = [
        entry
        for place in (("passes",), ("teacher", "passes"))
        for entry in (inside(*place) or ())
        if isinstance(inside(*place), list)
    ]
    names = [name for pass_ in passes for name in (pass_ if isinstance(pass_, Mapping) else (pass_,))]
    names += [inside("training", "objective"), *(inside("trackers") or ()), *(inside("evaluations") or ())]
    if any(inside(*place, "class") for place in sections) or any("." in str(name) for name in names):
        data["code"] = inside("code") or str(Path(document.name).absolute().parent)
        make_importable(expanded(Path(str(data["code"]))))


def _find(source: str | Path) -> Document:
    known = shipped()
    if str(source) in known and not Path(source).is_file():
        return read_document(known[str(source)])
    if not Path(source).is_file():
        raise UnknownRecipeError(
            f"no recipe file {source}, and none of that name comes with meshpar; {suggestion(str(source), known)}"
        )
    return read_document(Path(source))


def _read_plan(data: dict[str, Any], document: Document, problems: list[str], at: Place = ()) -> list[str]:
    """Put model, mesh and passes of a mapping in the form that the recipe has, and return what is to be told about
    old names.
    """
    if isinstance(data.get("model"), Mapping):
        data["model"] = {"kind": "own" if "class" in data["model"] else "transformer", **data["model"]}
    notes = convert_keys(data, document, problems, at)
    data["mesh"] = data.get("mesh") or ""
    mesh = _read_mesh(data["mesh"], document, problems, at)
    data["passes"], more = read_passes(data.get("passes"), mesh, document, problems, at)
    return [*notes, *more]


def _take_from_weights(data: dict[str, Any]) -> None:
    """Take the config and the tokenizer that published weights come with, where the recipe names none."""
    model, section = data.get("model"), data.get("data") or {}
    if not isinstance(model, Mapping) or not isinstance(section, Mapping) or not isinstance(model.get("weights"), str):
        return
    folder = expanded(Path(model["weights"]))
    if model["kind"] == "huggingface":
        data["model"] = {"config": model["weights"], **model}
    if (
        section.get("tokenizer") is None
        and section.get("source") != "tokens"
        and not section.get("dataset")
        and (folder / "tokenizer.json").is_file()
    ):
        data["data"] = {**section, "tokenizer": model["weights"]}


def _read_mesh(text: object, document: Document, problems: list[str], at: Place) -> MeshSpec | str | None:
    if not isinstance(text, str):
        return None  # the section's own type says what is wrong
    if is_auto(text):
        return text.strip()
    try:
        return MeshSpec(text)
    except MeshError as error:
        problems.append(f"{document.where((*at, 'mesh'))}: {error}")
        return None
