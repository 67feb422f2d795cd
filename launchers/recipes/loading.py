"""Read recipes: find the file, fill in what the file leaves out, and report every problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from meshpar.core import registry
from meshpar.core.errors import MeshError, RecipeError
from meshpar.core.mesh import MeshSpec, is_auto
from meshpar.core.patterns import suggestion
from meshpar.launchers.recipes.conflicts import calling_problems, conflicts
from meshpar.launchers.recipes.recipe import Classes, Recipe, make_importable, read_passes
from meshpar.launchers.recipes.schema import validate
from meshpar.launchers.recipes.yamlfile import Document, Place, apply_overrides, dotted, read_document
from meshpar.process.imports import expanded
from meshpar.process.secrets import REMEDY, secrets_in


class UnknownRecipeError(RecipeError):
    """Raised where a name is neither a file nor a recipe that comes with meshpar."""


def load_recipe(
    source: str | Path, overrides: Sequence[str] = (), *, disks: bool = True, trust: bool = False
) -> Recipe:
    """Read a recipe, with fields set from the command line.

    Args:
        source: a YAML file, or the name of a recipe that comes with meshpar (:func:`shipped`).
        overrides: ``training.steps=50``; values are YAML.
        disks: whether the folders of the model must exist here; False: the recipe is for a machine with other disks.
        trust: import the classes that the recipe names by import path, as a job does; False: import nothing, and leave
            what needs them unchecked.

    Raises:
        RecipeError: listing everything that is wrong.
    """
    path, recipes = Path(source), shipped()
    if not path.is_file() and str(source) not in recipes:
        raise UnknownRecipeError(
            f"no recipe file {source}, and none of that name comes with meshpar; {suggestion(str(source), recipes)}"
        )
    document = read_document(path if path.is_file() else recipes[str(source)])
    apply_overrides(document, overrides)
    return resolve(document, disks=disks, trust=trust)


def shipped() -> dict[str, Path]:
    folder = resources.files("meshpar.launchers.recipes")
    paths = sorted(Path(str(path)) for path in folder.iterdir())
    return {path.stem: path for path in paths if path.suffix == ".yaml"}


def resolve(document: Document, *, disks: bool = True, trust: bool = False) -> Recipe:
    """Return the recipe of a document; arguments as for :func:`load_recipe`. Raises RecipeError with every problem."""
    if secrets := list(secrets_in(document.data)):  # alone: other problems quote values
        names = ", ".join(map(dotted, secrets))
        raise RecipeError(
            f"{document.name}: {names}: this looks like a credential, and a recipe is kept in readable files; {REMEDY}"
        )
    data = dict(document.data)
    problems = []
    if foreign := [key for key in FOREIGN if key in data]:
        problems.append(
            f"{document.where((foreign[0],))}: this is a key of transformers' Trainer or of accelerate; write the "
            "recipe's keys, which docs/migrate.md lists beside theirs"
        )
    classes = Classes(dict(_import_paths(data)), trust, document)
    if classes.paths:
        data["code"] = data.get("code") or str(Path(document.name).absolute().parent)
    if classes.paths and trust:
        make_importable(expanded(Path(str(data["code"]))))
    _read_plan(data, classes, problems)
    if isinstance(data.get("teacher"), Mapping):
        data["teacher"] = dict(data["teacher"])
        data["teacher"].setdefault("mesh", data["mesh"])
        _read_plan(data["teacher"], classes, problems, ("teacher",))
    _take_from_weights(data)
    _name_kinds(data)
    data["name"] = data.get("name") or Path(document.name).stem
    data["output"] = data.get("output") or f"runs/{data['name']}"
    recipe = validate(Recipe, data, document)
    if isinstance(recipe, list):
        problems = recipe + problems
    else:
        recipe.read_from(classes)
        problems += calling_problems(recipe, document)
        problems += [f"{recipe.where(field)}: {text}" for field, text in conflicts(recipe, disks=disks)]
    if problems or isinstance(recipe, list):
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in this recipe"
        raise RecipeError("\n  ".join([count, *problems]))
    return recipe


FOREIGN = ("per_device_train_batch_size", "num_train_epochs", "learning_rate", "fsdp", "fsdp_config", "num_processes")
"""Keys by which the YAML of other trainers is known."""
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


_SECTIONS = (
    (("model",), registry.MODEL),
    (("teacher", "model"), registry.MODEL),
    (("optimizer",), registry.OPTIMIZER),
    (("data", "dataset"), registry.DATASET),
    (("data", "validation_dataset"), registry.DATASET),
)
"""The sections with a ``class``, and its kind."""


def _import_paths(data: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """Yield place and name of each class that a recipe names and that is no plugin."""

    def inside(*path: str) -> Any:
        value: Any = data
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    named: list[tuple[Place, registry.Kind, Any]] = [
        ((*at, "class"), kind, inside(*at, "class")) for at, kind in _SECTIONS
    ]
    for path in (("passes",), ("teacher", "passes")):
        for number, entry in enumerate(inside(*path) if isinstance(inside(*path), list) else ()):
            names = entry if isinstance(entry, Mapping) else (entry,)
            named += [((*path, number), registry.PASS, name) for name in names]
    named.append((("training", "objective"), registry.OBJECTIVE, inside("training", "objective")))
    for heading, kind in (("trackers", registry.TRACKER), ("evaluations", registry.EVALUATION)):
        entries = inside(heading)
        named += [((heading, name), kind, name) for name in (entries if isinstance(entries, Mapping) else ())]
    for at, kind, name in named:
        if isinstance(name, str) and not kind.has(OPTIMIZERS.get(name, name)):
            yield at, name


def _read_plan(data: dict[str, Any], classes: Classes, problems: list[str], at: Place = ()) -> None:
    """Put model, mesh and passes of a mapping in the form that the recipe has."""
    if isinstance(data.get("model"), Mapping):
        data["model"] = {"kind": "own" if "class" in data["model"] else "transformer", **data["model"]}
    data["mesh"] = data.get("mesh") or ""
    mesh = _read_mesh(data["mesh"], classes.document, problems, at)
    data["passes"] = read_passes(data.get("passes"), mesh, classes, problems, at)


def _take_from_weights(data: dict[str, Any]) -> None:
    """Take the config and the tokenizer that published weights come with, where the recipe names none."""
    model, section = data.get("model"), data.get("data") or {}
    if not isinstance(model, Mapping) or not isinstance(section, Mapping) or not isinstance(model.get("weights"), str):
        return
    folder = expanded(Path(model["weights"]))
    if model["kind"] == "huggingface":
        data["model"] = {"config": model["weights"], **model}
    text = section.get("source") != "tokens" and not section.get("dataset")
    if text and section.get("tokenizer") is None and (folder / "tokenizer.json").is_file():
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
