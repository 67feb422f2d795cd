"""Every message of the source that prints a remedy, read by ``ast``: nothing is imported."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.support.house import ROOT, parsed, sources

VERBS = """add aggregate allow append apply ask assign await book bring build call cast change check choose clear clip
close combine compute configure confirm connect convert copy correct cut declare define delete dequantize describe
disable divide download draw drop edit enable enlarge evaluate exclude export fix forecast free freeze generate give hand import increase
install iterate join keep launch leave let limit list load lower make mark merge mount move multiply name omit open pack
pad pass pin pip place point prefix print publish pull push put quantize quote raise read rebuild reduce register
remove rename repeat replace replay rerun reset restart restore resume run save scale select send set shard shorten simulate
skip sort specify split stack start step stop submit sum switch take tie tokenize train try turn uninstall unpin unset untie
update upgrade use verify wait wrap write"""
"""The verbs that a remedy begins with. To read ("see", "look at") mends nothing."""

_NO_VERB = r"[=(]|(?<=forecast): |(?<=forecast) \{|(?<=step)[:,]|(?<=turn|step) (?:\d|\{)| (?:is|are|has|waits|requires|makes one|as written)\b"
_VERB = rf"(?:{'|'.join(VERBS.split())})\b(?!{_NO_VERB})"
_SENTENCE = rf"(?:{'|'.join(VERBS.title().split())})\b(?![=(])"
_LEAD = r"(?:(?:also|otherwise|instead|then|please|either)\s+|(?:for|in|under|on|to|where|with) (?:(?! is | are )[^,;:.]){1,40}?,? )?"
_START = re.compile(rf"(?:(?:^|[;:] |\n\s*|, or |, and )({_LEAD}{_VERB})|(?:\.\s+|\n\s*)({_LEAD}{_SENTENCE}))")
_NEXT = re.compile(rf", or (?:else )?|; or |; (?={_LEAD}{_VERB})| or (?={_VERB})|(?<=[^.])\.\s+(?=[A-Z])|\n")
_SILENT = {"info", "debug", "print", "print_title", "echo", "secho", "Option", "Argument", "Typer", "command",
           "add_argument", "Field"}  # fmt: skip
"""What calls with these names say is no refusal: help, progress, documents."""
_CODE = re.compile(r"import \w+\n")
"""A text in Python, which speaks to no reader."""
_MUTE_KEYWORDS = {"help", "description", "short_help", "epilog", "title", "pattern"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message as the source has it.

    Attributes:
        file: path from the root of the project.
        line: where the text begins.
        text: the text, ``{}`` for what is filled in.
        raised: whether a ``raise`` has it in its own arguments.
    """

    file: str
    line: int
    text: str
    raised: bool

    @property
    def remedies(self) -> tuple[str, ...]:
        """What the message tells the reader to do: one text for each alternative, in order."""
        return tuple(_alternatives(f"\n{self.text}" if self.raised else self.text))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text!r}"


def _alternatives(text: str) -> Iterator[str]:
    start = _START.search(text)
    if start is None:
        return
    remedy = text[max(start.start(1), start.start(2)) :]
    cuts = [0, *(match.end() for match in _NEXT.finditer(remedy))]
    ends = [*(match.start() for match in _NEXT.finditer(remedy)), len(remedy)]
    first = True
    for begin, end in zip(cuts, ends, strict=True):
        part = remedy[begin:end].strip()
        sentence = begin > 0 and re.search(r"[.\n]\s*$", remedy[:begin]) is not None
        if part.strip("{}") and (first or not sentence or re.match(rf"{_LEAD}(?:{_VERB}|{_SENTENCE})", part)):
            yield part
        first = False


def template(node: ast.AST) -> str | None:
    """Return a text of the source with ``{}`` for what is filled in; None for what is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"(?<!\{)\{\w*\}(?!\})|%[sdr]", "{}", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = template(node.left), template(node.right)
        return None if sides == (None, None) else "".join("{}" if side is None else side for side in sides)
    return None


def _holes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a template has ``{}`` for."""
    if isinstance(node, ast.JoinedStr):
        yield from (part.value for part in node.values if isinstance(part, ast.FormattedValue))
    elif isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            yield from [side] if template(side) is None else _holes(side)


def _texts(node: ast.AST, raised: bool) -> Iterator[tuple[int, str, bool]]:
    text = template(node)
    if text is not None:
        yield node.lineno, text, raised
        for hole in _holes(node):
            yield from _texts(hole, raised)
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].lstrip("_") in _SILENT:
        return
    for inner in ast.iter_child_nodes(node):
        documents = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
            continue  # a docstring
        if isinstance(inner, ast.keyword) and inner.arg in _MUTE_KEYWORDS:
            continue
        yield from _texts(inner, (raised and not documents) or isinstance(inner, ast.Raise))


@cache
def messages() -> tuple[Message, ...]:
    """Return every text of the source that may be a message: of two words or more, in no docstring."""
    return tuple(
        Message(file=str(path.relative_to(ROOT)), line=line, text=text, raised=raised)
        for path, _ in sources()
        for line, text, raised in _texts(parsed(path), False)
        if " " in text.strip() and not _CODE.match(text)
    )
