"""The table of remedies against the source: what no row tries, two rows try, or matches nothing."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.remedies.messages import ROOT, messages

HERE = Path(__file__).parent

OUTSIDE = {
    r"(pip )?install|uninstall|update|upgrade|use (a newer )?torch\b": "packages: tests install and remove none",
    r"free (some )?space|mount|enlarge|write to another disk": "a machine's disks",
    r"start|launch|restart|.*\bsrun\b": "another start of the job, by a person or a scheduler",
    r"run `?wandb login": "an account",
    r"convert it (by its zero_to_fp32\.py|to Hugging Face's format)": "programs of DeepSpeed and Megatron, which are not installed",
    r"simulate in a process of its own": "another process, which has no group yet",
    r"correct what failed|check that the hosts": "a cause that the first error names, or a network",
}
"""Remedies that no test of this process can apply, and why; each begins as the pattern says."""
FACTS = {
    "states what was expected, or the choices": r"expected|must|needs?|requires?|there (is|are)|supports?|only|at most"
    r"|at least|one of|than|positive|neither|reads?|knows|excludes?|require",
    "reports what cannot be, or has not been done": r"cannot|can not|fail(s|ed)?|lost|lacks?|damaged|missing|no|not|none"
    r"|never|without|exceeds?|refuse[sd]?|differ(s|ent)?|changed|outside|ended|stopped|interrupted|gone|killed|invalid"
    r"|already|too|may use|more than|different|refers|lists|appeared|compressed|instead|shorter|ends|left|both",
    "names where the cause is told": r"see the|look at",
    "is a part of a longer message": r"^(it|its|another|values|the (parts|shard) of|what) .*|.*[;,:]\s+\{\}",
}
"""What a message without a remedy does, by its words. A message that does neither leaves its reader alone."""


ROWS = ("Row", "Loop", "TwoRanks", "Tested")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row as its file has it."""

    where: str
    message: str
    remedies: tuple[str, ...]
    test: str = ""
    pieces: tuple[str, ...] = ()


@cache
def entries() -> tuple[Entry, ...]:
    return tuple(entry for path in sorted(HERE.glob("test_*.py")) for entry in _read(path))


def _read(path: Path) -> Iterator[Entry]:
    """Yield the rows of a file: each is a chain of calls, Row(message).refuses(...).helps(words, ...)."""
    seen = set[ast.Call]()
    for node in ast.walk(ast.parse(path.read_text())):
        calls = _chain(node) if node not in seen else []
        seen |= set(calls)
        if calls:
            helps = [call.args for call in calls if _name(call) == "helps"]
            (test,) = [ast.literal_eval(call.args[0]) for call in calls if _name(call) == "by"] or [""]
            yield Entry(
                where=f"tests/remedies/{path.name}:{node.lineno}",
                message=ast.literal_eval(calls[0].args[0]),
                remedies=tuple(ast.literal_eval(words) for words, *_ in helps),
                test=test,
                pieces=tuple(ast.literal_eval(piece) for _, piece in helps) if test else (),
            )


def _chain(node: ast.AST) -> list[ast.Call]:
    """Return the calls of a row, or of a part of it, the first one first."""
    if not isinstance(node, ast.Call):
        return []
    if isinstance(node.func, ast.Attribute):
        before = _chain(node.func.value)
        return [*before, node] if before else []
    return [node] if _name(node) in ROWS else []


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@cache
def compare() -> tuple[list[str], list[str]]:
    """Return what no row tries, and what is wrong with the rows."""
    untried = list[str]()
    matched: dict[str, set[str]] = defaultdict(set)
    wrong = []
    for message in messages():
        rows = [entry for entry in entries() if entry.message in message.text]
        for remedy in message.remedies:
            trying = [(entry, words) for entry in rows for words in entry.remedies if remedy.startswith(words)]
            for entry, words in trying:
                matched[entry.where].add(words)
            if len(trying) > 1:
                wrong.append(f"{message}: two rows try {remedy!r}: {', '.join(entry.where for entry, _ in trying)}")
            if not trying and not any(re.match(kind, remedy) for kind in OUTSIDE):
                untried.append(f"{message}\n      remedy: {remedy!r}")
    for entry in entries():
        if not any(entry.message in message.text for message in messages()):
            wrong.append(f"{entry.where}: no message has the text {entry.message!r}")
        elif lost := set(entry.remedies) - matched[entry.where]:
            wrong.append(f"{entry.where}: no remedy of {entry.message!r} begins with {sorted(lost)}")
        wrong += _lost_tests(entry)
    return untried, wrong


def bare() -> list[str]:
    """Return the messages that are raised and say neither what to do nor what was expected."""
    kinds = re.compile("|".join(rf"\b(?:{words})(?!\w)" if words[0] != "^" else words for words in FACTS.values()))
    return [
        str(message)
        for message in messages()
        if message.raised and not message.remedies and len(message.text.split()) > 4 and not kinds.search(message.text)
    ]


def _lost_tests(entry: Entry) -> list[str]:
    if not entry.test:
        return []
    path, _, name = entry.test.partition("::")
    source = _functions(ROOT / path).get(name) if (ROOT / path).is_file() else None
    if source is None:
        return [f"{entry.where}: there is no test {entry.test}"]
    unescaped = source.replace("\\", "")
    names = [part for part in entry.message.split("{}") if part.strip()]
    return [
        f"{entry.where}: {entry.test} does not have {piece!r}"
        for piece in (*names, *entry.pieces)
        if piece.replace("\\", "") not in unescaped
    ]


@cache
def _functions(path: Path) -> dict[str, str]:
    """Return the source of each function of a file, with its decorators, and with the texts that lines divide joined."""
    text = path.read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            written = "\n".join(lines[first - 1 : node.end_lineno])
            found[node.name] = written + "\n" + ast.unparse(node)
    return found


if __name__ == "__main__":
    import sys

    sys.stdout.write("\n".join([*compare()[0], *compare()[1], ""]))
