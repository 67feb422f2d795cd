"""A job as data, the protocol of targets that render it, and the templates of this package that they fill."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
import string
import subprocess
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, NewType, Protocol, final

import yaml

from meshpar.core.errors import LaunchError
from meshpar.core.mesh import MeshSpec
from meshpar.core.patterns import suggestion
from meshpar.process.imports import expanded
from meshpar.process.secrets import secrets_in
from meshpar.training.settings import Bound, bound_problems

Port = Annotated[int, Bound(ge=1, le=65535)]
Shell = NewType("Shell", str)
"""The type of an option with lines of shell; every other option of a target is one line."""

RECIPE, MESH, COMMAND = "recipe.resolved.yaml", "mesh.json", "command.txt"
"""Files that are written beside the job file."""

ANSWER_S = 60
"""Seconds within which an engine's command must answer."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job to render: a recipe with its mesh, or a script, on nodes.

    Attributes:
        name: the run's name.
        run: the run's folder, an absolute path.
        folder: this launch's own folder in ``run``, into which all files are written.
        recipe: text of the resolved recipe; empty for a script.
        script: a script or ``-m MODULE`` and its arguments, as ``meshpar run`` takes them; empty for a recipe.
        mesh: the resolved mesh of a recipe, with ranks in the order of the nodes; None for a script, which makes its
            own.
        nodes: number of nodes.
        gpus_per_node: accelerators per node; 0: the job runs on CPUs.
        ranks_per_node: ranks per node.
        elastic: ``"nodes"``: the job continues with fewer nodes when some are lost; ``"replicas"``: each replica is a
            job of its own; empty: neither.
        command: the ``meshpar launch`` command that renders this job.
    """

    name: str
    run: Path
    folder: Path
    recipe: str = ""
    script: tuple[str, ...] = ()
    mesh: MeshSpec | None = None
    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    elastic: str
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("folder", str(self.folder))):
            if not text.isprintable():
                raise LaunchError(f"the run's {what} is {text!r}; expected one line without control characters")

    @property
    def shape(self) -> str:
        """The mesh, or the number of ranks on each node."""
        return str(self.mesh or f"{self.nodes} x {self.ranks_per_node} ranks")

    def values(self) -> dict[str, object]:
        """Return what the templates of all targets say of a job."""
        return {"name": self.label, "command": self.made_by, "shape": self.shape, "nodes": self.nodes}

    def work(self, recipe: str) -> list[str]:
        """Return what ``meshpar run`` runs: the script and its arguments, or the path ``recipe``."""
        return list(self.script) or [recipe]

    @property
    def label(self) -> str:
        """A name of this launch alone that Kubernetes accepts, with what it appends for pods: at most 44 characters."""
        return f"{dns_label(self.name)[:40].rstrip('-')}-{self.folder.name}"

    @property
    def made_by(self) -> str:
        """The command as one line of shell."""
        return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in self.command)

    def mesh_json(self, mesh: MeshSpec) -> str:
        """Return the mesh as JSON: its axes, and the node, local rank and coordinates of each rank."""
        places = [divmod(rank, self.ranks_per_node) for rank in range(mesh.size)]
        ranks = [
            {"rank": rank, "node": node, "local_rank": local_rank, **mesh.coordinates(rank)}
            for rank, (node, local_rank) in enumerate(places)
        ]
        rows = ",\n  ".join(map(json.dumps, ranks))
        head = {"mesh": str(mesh), "axes": dict(mesh.axes), "nodes": self.nodes, "ranks_per_node": self.ranks_per_node}
        return f'{json.dumps(head)[:-1]}, "ranks": [\n  {rows}\n]}}\n'

    def files(self) -> dict[str, str]:
        """Return the files that every target writes beside its job file: name -> text."""
        recipe = {} if self.mesh is None else {RECIPE: self.recipe, MESH: self.mesh_json(self.mesh)}
        return {**recipe, COMMAND: self.made_by + "\n"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A rendered job.

    Attributes:
        folder: the launch's own folder, an absolute path.
        file: path of the job file.
        label: name of the launch, as the job file has it.
        submitted: the engine's answer to the submission; empty: it was not submitted by ``meshpar launch``.
    """

    folder: Path
    file: Path
    label: str
    submitted: str


class Target(Protocol):
    """A plugin of the group ``meshpar.launchers``: a dataclass whose fields are the target's options.

    An option is ``str``, ``int``, ``bool``, or ``tuple[str, ...]`` if it can be given several times. Bounds of numbers
    are annotations of the fields (:class:`meshpar.training.settings.Bound`).

    Attributes:
        shares_disks: whether the job sees the files of the machine that launches it. If not, the job checks them when
            it starts.
    """

    shares_disks: ClassVar[bool] = True

    def problems(self) -> Iterable[str]:
        """Return what is wrong with the options together, one line each."""
        return ()

    def notes(self, job: Job) -> Iterable[str]:
        """Return what the launch should say about the job, one line each."""
        return ()

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the files to write, name -> text; the first is the job file."""
        ...

    def submit(self, path: Path) -> Sequence[str]:
        """Return the command that submits the job file."""
        ...

    def states(self, jobs: Sequence[Launched]) -> Sequence[tuple[str, str]]:
        """Return each job's number or name in the engine, and its state in the engine's words; empty: not known."""
        raise self._no_commands()

    def status(self, job: Launched) -> str:
        """Return the engine's own description of the job."""
        raise self._no_commands()

    def logs(self, job: Launched, *, follow: bool) -> Sequence[str]:
        """Return the command that prints the job's output."""
        raise self._no_commands()

    def cancel(self, job: Launched) -> str:
        """End the job and return the engine's answer."""
        raise self._no_commands()

    def _no_commands(self) -> LaunchError:
        return LaunchError(f"{type(self).__name__} has no `meshpar jobs`; use the commands of its engine")


def ask(command: Sequence[str], limit_s: float = ANSWER_S) -> str:
    """Run an engine's command and return its output; raises LaunchError if it is missing, fails or is too slow."""
    shown = shlex.join(command)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit_s, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not installed here; on a machine that has it, run: {shown}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{command[0]} did not answer within {limit_s:.0f} s; check that its server runs, then repeat: {shown}"
        ) from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        said = dict.fromkeys(line for line in lines if not re.match(r"[EWI]\d{4} ", line))  # kubectl's log
        why = "\n".join(list(said)[-5:])
        raise LaunchError(f"{shown} ended with {done.returncode}: {why}")
    return done.stdout.strip()


_MOST_OPTIONS = 500


def make_target(name: str, cls: type, options: Sequence[str]) -> Target:
    """Return the target with its options (``partition=gpu``) set; raises LaunchError with every problem."""
    if len(options) > _MOST_OPTIONS:
        raise LaunchError(f"{len(options):,} options of {name}; expected at most {_MOST_OPTIONS}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    problems = []
    for text in options:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in fields:
            other = "; for other fields of the job file write -o patch=FILE" if "patch" in fields else ""
            if "sbatch" in fields:
                other = f"; for an option of sbatch's own write -o sbatch=--{text.lstrip('-').replace('_', '-')}"
            listed = suggestion(key, fields)
            problems.append(f"{text!r}: {name} has no such option, written as KEY=VALUE; {listed}{other}")
            continue
        try:
            if hints[key] == tuple[str, ...]:
                values[key] = (*values.get(key, ()), _read(str, value))
            elif key in values and hints[key] is Shell:
                values[key] = Shell(f"{values[key]}\n{value}")
            elif key in values:
                problems.append(f"{text!r}: {key} is given twice; give it once")
            else:
                values[key] = _read(hints[key], value)
        except ValueError as error:
            problems.append(f"{text!r}: {error}")
    target: Target = cls(**values)
    problems += [*bound_problems(target), *target.problems()]
    if problems:
        raise LaunchError("\n  ".join(["unknown or invalid options:", *problems]))
    return target


def _read(hint: object, text: str) -> object:
    if hint is not Shell and not text.isprintable():
        raise ValueError("expected one line without control characters")
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("expected true or false")
        return text.lower() == "true"
    if hint is int:
        if not text.isdigit():
            raise ValueError("expected an integer")
        return int(text)
    return text


def _escaped(word: str) -> str:
    return "$'" + "".join(c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08x}" for c in word) + "'"


class Template(string.Template):
    """Text with ``@{name}``: the dollars are the shell's."""

    delimiter = "@"


def template_text(name: str) -> str:
    return (resources.files("meshpar.launchers.targets") / name).read_text(encoding="utf-8")


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return the text of a template of this package, without lines whose only content is an empty value."""
    lines = template_text(template).splitlines()
    alone = {line: match[1] for line in lines if (match := re.fullmatch(r"\s*@\{(\w+)\}\s*", line))}
    filled = [line for line in lines if line not in alone or str(values[alone[line]])]
    return Template("\n".join(filled)).substitute(values) + "\n"


def dns_label(name: str) -> str:
    """Return a Kubernetes name, also for a Service: at most 50 characters, a letter first."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (label if label[:1].isalpha() else f"job-{label}")[:50].rstrip("-")  # pods add an index


class _JobFileDumper(yaml.SafeDumper):
    """Text of several lines as a block, for scripts; no aliases, which readers of job files refuse."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_STR = "tag:yaml.org,2002:str"
_JobFileDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_STR, text, "|" if "\n" in text else None)
)


def fill_yaml(
    template: str,
    values: Mapping[str, object],
    patches: Sequence[str] = (),
    kept: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
) -> str:
    """Return a filled YAML template, without keys of empty values, with what ``patches`` add to ``kept`` documents."""
    text = template_text(template)
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    filled: list[Any] = [_filled(document, values) for document in yaml.safe_load_all(text)]
    documents: list[Any] = kept(filled)
    for name in patches:
        for patch in _patches(name):
            kinds = {document.get("kind", ""): document for document in documents}
            kind = patch.get("kind", documents[-1].get("kind", ""))
            if kind not in kinds:
                expected = f"expected one of {', '.join(kinds)}, or no kind for {list(kinds)[-1]}"
                raise LaunchError(f"{name} is a patch of a {kind}; {expected}")
            _add(kinds[kind], patch, kind, name)
    return Template(head).substitute(values) + yaml.dump_all(
        documents, Dumper=_JobFileDumper, sort_keys=False, allow_unicode=True, width=1000
    )


def _filled(node: object, values: Mapping[str, object]) -> object:
    if isinstance(node, dict):
        pairs = {key: (value, _filled(value, values)) for key, value in node.items()}
        return {key: new for key, (old, new) in pairs.items() if old == new or new not in ("", None, {}, [])}
    if isinstance(node, list):
        return [_filled(value, values) for value in node]
    if not isinstance(node, str):
        return node
    alone = re.fullmatch(r"@\{(\w+)\}", node)
    return values[alone[1]] if alone else Template(node).substitute(values)


def _patches(name: str) -> list[dict[str, Any]]:
    try:
        patches = list(yaml.safe_load_all(expanded(Path(name)).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"cannot read patch {name}: {error}") from error
    if not all(isinstance(patch, dict) for patch in patches):
        raise LaunchError(f"patch {name} is not a mapping; expected fields of the job file, such as spec: ...")
    if places := [".".join(map(str, path)) for patch in patches for path in secrets_in(patch)]:
        raise LaunchError(
            f"patch {name}: {', '.join(places)}: this looks like a credential, and the job file is a readable file; "
            "name a secret of the cluster instead, such as valueFrom: {secretKeyRef: {name: tracker, key: password}}"
        )
    return patches


def _add(into: dict[str, Any], patch: dict[str, Any], place: str, name: str) -> None:
    """Add a patch's values: lists are joined, items of one name merged; values that meshpar writes stay."""
    for key, value in patch.items():
        here, old = f"{place}.{key}".lstrip("."), into.get(key)
        if key not in into:
            into[key] = value
        elif isinstance(old, dict) and isinstance(value, dict):
            _add(old, value, here, name)
        elif (
            isinstance(old, list) and isinstance(value, list) and all(isinstance(item, dict) for item in (*old, *value))
        ):
            named = {entry["name"]: entry for entry in old if "name" in entry and "mountPath" not in entry}
            for item in value:
                if item.get("name") in named:
                    _add(named[item["name"]], item, f"{here}.{item['name']}", name)
                else:
                    old.append(item)
        elif old != value:
            raise LaunchError(
                f"patch {name} sets {here} to {value!r}, and meshpar writes {old!r}; use an option (-o), or edit the "
                "job file"
            )
