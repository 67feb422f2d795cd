"""Conversations: records of several forms, rendered by a chat template; the assistant's tokens alone are labels."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from meshpar.core.errors import RecipeError
from meshpar.process.imports import need
from meshpar.training.examples import RecordSource
from meshpar.training.template import SAID, ChatTemplate, Message, Spans
from meshpar.training.text import STDLIB, TABLES, UNPLAIN, Reading, TextSource, kind_of, records_of
from meshpar.training.tokenizer import Piece, TextTokenizer, batch_items

if TYPE_CHECKING:
    import numpy as np

_FORMAT, _BATCH = 2, 256
_FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output", "input"))
"""Keys of a conversation's record; the last one of Alpaca's may be missing."""
_BESIDE = ("system", "tools")
_KEYS = {"role", "content", "weight"}
_TRIED = 100  # records in which a key of a turn changes nothing, after which nothing reads it
_COLUMNS = (*(name for form in _FORMS for name in form), *_BESIDE, *SAID)
_ROLES = {"human": "user", "observation": "tool", "function_response": "tool"}
_ROLES |= dict.fromkeys(("gpt", "function_call"), "assistant")
"""ShareGPT's names of roles; others stay as they are."""
_KNOWN = ("system", "developer", "user", "assistant", "tool", "function")
QUESTION = "What does this function do?\n\n{code}"
"""The user's turn of a conversation about a function of the standard library."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSource:
    """Conversations, in the same order on every rank; of ``stdlib``, a question about each documented function."""

    inputs: tuple[str, ...]
    template: ChatTemplate
    reading: Reading = field(default_factory=Reading, compare=False)

    def files(self) -> list[Path]:
        """Return the files; raises RecipeError if an input matches no file."""
        return TextSource(inputs=self.inputs, suffixes=TABLES).files()

    def fingerprint(self) -> str:
        """Return a hash of the files' names, sizes and times and of the template."""
        template = self._template().text, sorted(self.template.variables.items())
        files = TextSource(inputs=self.inputs, suffixes=TABLES).fingerprint()
        parts = (_FORMAT, *template, QUESTION, files, *(["skip"] if self.reading.skip else []))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _template(self) -> ChatTemplate:
        """Return the template; a date that it writes is the day on which the newest file was written, in UTC."""
        if not self.template.dated:
            return self.template
        newest = max((path.stat().st_mtime for path in self.files()), default=0.0)
        return self.template.on(datetime.fromtimestamp(newest, UTC))

    def conversations(self) -> Iterator[tuple[str, Spans]]:
        """Yield the text of each conversation, or answer, and the spans of the assistant's turns."""
        template = self._template()
        self.reading.begin()
        if self.inputs == (STDLIB,):
            for code, sentence in RecordSource(inputs=(STDLIB,), kind="pairs").records():
                question, answer = {"content": QUESTION.format(code=code)}, {"content": sentence}
                yield template.conversation([{"role": "user", **question}, {"role": "assistant", **answer}])
            return
        tried = Counter[str]()
        for path in self.files():
            for number, record in records_of(path, _COLUMNS, self.reading):
                if kind_of(path) in UNPLAIN:  # an empty row: other columns were not read, and are named in the error
                    record = _drop_nulls(record) or dict.fromkeys(next(records_of(path))[1])
                try:
                    messages, tools = messages_of(record)
                    rendered = template.conversations(messages, tools)
                except RecipeError as error:
                    self.reading.refuse(RecipeError(f"{path}:{number}: {error}"))
                    continue
                if len(rendered) > 1 or rendered[0][0] is not messages:
                    self.reading.divided += 1
                    self.reading.answers += len(rendered)
                names = {name for message in messages for name in message if tried[name] < _TRIED} - _KEYS
                unread = names.intersection(*(template.unread(text, said, tools, names) for said, text, _ in rendered))
                tried.update(unread)
                for name in names - unread:
                    tried[name] = _TRIED
                    self.reading.unused.pop(name, None)
                used = (*(_form(record) or ()), *_BESIDE)
                # nulls and empty values say nothing
                filled = {name for name, value in record.items() if value not in (None, "", [], {})}
                self.reading.leave(sorted(unread | filled.difference(used)), f"{path}:{number}")
                yield from ((text, spans) for _, text, spans in rendered)

    def documents(self) -> Iterator[str]:
        """Yield the text of each conversation, on which a tokenizer is trained."""
        return (text for text, _ in self.conversations())

    def token_pieces(self, tokenizer: TextTokenizer) -> Iterator[Piece]:
        """Yield the ids of each conversation, and which count as labels: those that overlap the assistant's text."""
        for part in batch_items(self.conversations(), _BATCH):
            encoded = tokenizer.encode_with_places([text for text, _ in part])
            for (_, spans), (ids, places) in zip(part, encoded, strict=True):
                yield ids, True, _overlap(places, spans)


def _overlap(places: np.ndarray, spans: Spans) -> np.ndarray:
    """Return which tokens overlap a span, bool; ``places`` (N, 2): begins and ends, at least a character."""
    numpy = need("numpy")
    begins, ends = places[:, 0], numpy.maximum(places[:, 1], places[:, 0] + 1)
    overlaps = numpy.zeros(begins.size, dtype=bool)
    for begin, end in spans:
        overlaps |= (begins < end) & (ends > begin)
    return overlaps


def _drop_nulls(value: Any) -> Any:  # noqa: ANN401 - of a table
    """Return a value of a table's row without null keys: columns have the keys of all rows."""
    if isinstance(value, dict):
        return {name: _drop_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def messages_of(record: Any) -> tuple[list[Message], Sequence[Any] | None]:  # noqa: ANN401 - of JSON
    """Return a record's messages in OpenAI's form and its tools; assistant's turns that do not count have weight 0."""
    if not isinstance(record, Mapping):
        raise RecipeError(
            f"got a {type(record).__name__}; expected an object with messages, conversations, or prompt and completion"
        )
    form = _form(record)
    if form is None:
        raise RecipeError(
            f"there are {sorted(record)}; expected messages, conversations, prompt and completion, or instruction and "
            "output: name them so"
        )
    if unread := [name for name in SAID if record.get(name)]:
        raise RecipeError(
            f"{unread[0]} is beside {form[0]}, where no template reads it; write it into a turn of the assistant (in "
            "messages), or remove it"
        )
    if form[0] == "prompt":
        said = [*_turns(record["prompt"], "user")]
        for number, message in enumerate(said):
            if isinstance(message, Mapping) and message.get("role") == "assistant":
                said[number] = {**message, "weight": 0}
        said += _turns(record["completion"], "assistant")
    elif form[0] == "instruction":
        if odd := [name for name in form if not isinstance(record.get(name, ""), str | None)]:
            raise RecipeError(f"{odd[0]} is a {type(record[odd[0]]).__name__}; expected a text")
        question = "\n".join(record[name] for name in ("instruction", "input") if record.get(name))
        said = [*_turns(question, "user"), *_turns(record["output"], "assistant")]
    else:
        said = _check_list(_parse_list(record[form[0]], form[0]))
    messages = [_message(message, number) for number, message in enumerate(said, 1)]
    if record.get("system"):
        if messages and messages[0]["role"] == "system":
            raise RecipeError("turn 1 is the system's, and there is also a system key; keep one of the two")
        messages.insert(0, _message({"role": "system", "content": record["system"]}, 0))
    if not messages:
        raise RecipeError(
            "the conversation is empty; expected at least one turn of the assistant: remove the line, or write its "
            "turns"
        )
    if all(message["role"] != "assistant" for message in messages):
        raise RecipeError(
            f"no turn is the assistant's (roles: {', '.join(str(message['role']) for message in messages)}), so "
            "nothing is learned from it; remove the line, or name the assistant's turns role: assistant"
        )
    tools = _parse_list(record.get("tools"), "tools")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RecipeError(f"tools is {tools!r:.80}; expected a list of objects, one for each tool")
    return messages, tools or None


def _form(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the keys of the form that a record has; None for none."""
    return next((form for form in _FORMS if all(record.get(name) is not None for name in form[:2])), None)


def _parse_list(value: Any, name: str) -> Any:  # noqa: ANN401 - of JSON
    """Return a list that some data sets write as a text of JSON."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RecipeError(f"{name} is a text that is not JSON ({error}); expected a list of objects") from error


def _check_list(value: Any) -> list[Any]:  # noqa: ANN401 - of JSON
    if not isinstance(value, list):
        raise RecipeError(f"the conversation is a {type(value).__name__}; expected a list of turns")
    return value


def _turns(value: Any, role: str) -> list[Any]:  # noqa: ANN401 - of JSON
    return [{"role": role, "content": value}] if isinstance(value, str) else _check_list(value)


def _message(turn: Any, place: int) -> Message:  # noqa: ANN401 - of JSON
    """Return a turn in OpenAI's form, with whatever else it has."""
    if not isinstance(turn, Mapping):
        raise RecipeError(f"turn {place} is a {type(turn).__name__}; expected an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not role:
        raise RecipeError(
            f"turn {place} has no role; it has {sorted(turn)}: add role (or ShareGPT's from): user, assistant, system "
            "or tool"
        )
    role = _ROLES.get(role, role)
    if role not in _KNOWN and (meant := get_close_matches(role.lower(), _KNOWN, n=1, cutoff=0.75)):
        raise RecipeError(
            f"turn {place} has role {role!r}; write {meant[0]}, or a role of the template that is spelled otherwise"
        )
    if content is None and not turn.get("tool_calls"):
        raise RecipeError(
            f"turn {place} ({role}) has no content; it has {sorted(turn)}: add content (or ShareGPT's value), or "
            "tool_calls"
        )
    if isinstance(content, list):
        kinds = [(part.get("type"), type(part.get("text"))) if isinstance(part, Mapping) else None for part in content]
        if other := [part for part, kind in zip(content, kinds) if kind != ("text", str)]:
            raise RecipeError(
                f"turn {place} ({role}) has the part {other[0]!r:.80}; expected text, or parts of type text: remove "
                "the others"
            )
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise RecipeError(f"turn {place} ({role}) has content of type {type(content).__name__}; expected text")
    if turn.get("weight") not in (None, 0, 1):
        problem = f"turn {place} ({role}) has weight {turn['weight']!r}; expected 0 (its tokens do not count) or 1"
        raise RecipeError(problem)
    more = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    if isinstance(calls := _parse_list(more.get("tool_calls"), f"tool_calls of turn {place}"), list):
        more["tool_calls"] = [_call(call) for call in calls]
    return {**more, "role": role, "content": content or ""}


def _call(call: Any) -> Any:  # noqa: ANN401 - of JSON
    """Return a tool call with its arguments as an object, which OpenAI writes as a text of JSON."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"])}
    try:
        return {**call, "arguments": json.loads(call["arguments"])} if isinstance(call.get("arguments"), str) else call
    except ValueError:
        return call
