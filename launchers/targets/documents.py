"""Job files in YAML: templates of this package, filled after parsing, so that no value can change the structure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

import yaml

from meshpar.launchers.targets.job import Template, template_text


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, so that scripts stay readable."""


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _write_text)


def fill_yaml(template: str, values: Mapping[str, object]) -> str:
    """Return the text of a YAML template with its ``@{name}`` replaced.

    A scalar that is ``@{name}`` alone becomes the value itself, and an empty value removes its key or list item. The comment at the top of
    the template is kept.
    """
    text = template_text(template)
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    documents = [_filled(each, values) for each in yaml.safe_load_all(text)]
    return Template(head).substitute(values) + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _filled(node: object, values: Mapping[str, object]) -> object:
    if isinstance(node, dict):
        found = {key: (each, _filled(each, values)) for key, each in node.items()}
        return {key: new for key, (old, new) in found.items() if old == new or new not in ("", None, {}, [])}
    if isinstance(node, list):
        return [_filled(each, values) for each in node]
    if not isinstance(node, str):
        return node
    alone = re.fullmatch(r"@\{(\w+)\}", node)
    return values[alone[1]] if alone else Template(node).substitute(values)
