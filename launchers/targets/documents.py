"""Job files in YAML: templates of this package, filled after parsing, so that no value can change the structure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshpar.core.errors import LaunchError
from meshpar.launchers.targets.job import Template, template_text
from meshpar.process.homes import expanded
from meshpar.process.secrets import secrets_in


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, for scripts; no aliases, which readers of job files refuse."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _write_text)


def fill_yaml(
    template: str,
    values: Mapping[str, object],
    patches: Sequence[str] = (),
    kept: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
) -> str:
    """Return the text of a YAML template with its ``@{name}`` replaced, and with what the files ``patches`` add.

    A scalar that is ``@{name}`` alone becomes the value itself, and an empty value removes its key or list item. The
    comment at the top of the template is kept. ``kept`` returns the documents that the file has, the job last.

    Raises:
        LaunchError: a patch cannot be read, or changes a value of the template.
    """
    text = template_text(template)
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    filled: list[Any] = [_filled(document, values) for document in yaml.safe_load_all(text)]
    documents: list[Any] = kept(filled)
    for name in patches:
        for patch in _patches(name):
            kinds = {document.get("kind", ""): document for document in documents}
            kind = patch.get("kind", documents[-1].get("kind", ""))
            if kind not in kinds:
                raise LaunchError(
                    f"{name} is a patch of a {kind}; expected one of {', '.join(kinds)}, or no kind for "
                    f"{list(kinds)[-1]}"
                )
            _add(kinds[kind], patch, kind, name)
    return Template(head).substitute(values) + yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000
    )


def _filled(node: object, values: Mapping[str, object]) -> object:
    if isinstance(node, dict):
        found = {key: (value, _filled(value, values)) for key, value in node.items()}
        return {key: new for key, (old, new) in found.items() if old == new or new not in ("", None, {}, [])}
    if isinstance(node, list):
        return [_filled(value, values) for value in node]
    if not isinstance(node, str):
        return node
    alone = re.fullmatch(r"@\{(\w+)\}", node)
    return values[alone[1]] if alone else Template(node).substitute(values)


def _patches(name: str) -> list[dict[str, Any]]:
    try:
        found = list(yaml.safe_load_all(expanded(Path(name)).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"cannot read patch {name}: {error}") from error
    if not all(isinstance(patch, dict) for patch in found):
        raise LaunchError(f"patch {name} is not a mapping; expected fields of the job file, such as spec: ...")
    if places := [".".join(map(str, place)) for patch in found for place in secrets_in(patch)]:
        raise LaunchError(
            f"patch {name}: {', '.join(places)}: this looks like a credential, and the job file is a readable file; "
            "name a secret of the cluster instead, such as valueFrom: {secretKeyRef: {name: tracker, key: password}}"
        )
    return found


def _add(into: dict[str, Any], patch: dict[str, Any], place: str, name: str) -> None:
    """Add a patch's values: lists are joined, items of one name merged; values that meshpar writes stay."""
    for key, value in patch.items():
        here, old = f"{place}.{key}".lstrip("."), into.get(key)
        if key not in into:
            into[key] = value
        elif isinstance(old, dict) and isinstance(value, dict):
            _add(old, value, here, name)
        elif (
            isinstance(old, list)
            and isinstance(value, list)
            and all(isinstance(entry, dict) for entry in (*old, *value))
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
