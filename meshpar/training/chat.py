"""Conversations: messages rendered by a chat template, of which the assistant's tokens alone count as labels."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from meshpar.errors import RecipeError, brief
from meshpar.homes import expanded
from meshpar.imports import need
from meshpar.training.records import RecordSource
from meshpar.training.text import STDLIB, TABLES, UNPLAIN, TextSource, kind_of, records_of
from meshpar.training.tokenizer import END_OF_TEXT, TextTokenizer, batched

if TYPE_CHECKING:
    import numpy as np

    from meshpar.training.tokens import Piece

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
"""Begin and end, in characters, of what the assistant wrote."""

_FORMAT, _BATCH = 2, 256
_COLUMNS = ("messages", "conversations", "prompt", "completion", "system", "tools")
_GENERATION = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")
_DATE = re.compile(r"strftime_now\(\s*(?:(['\"])(.*?)\1\s*\))?")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Stand where a block begins and ends: code points that no text has (Unicode's noncharacters)."""
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of roles; others stay as they are."""
_KNOWN = ("system", "developer", "user", "assistant", "tool", "function")
QUESTION = "What does this function do?\n\n{code}"
"""The user's turn of a conversation about a function of the standard library."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A chat template in Jinja, as tokenizers of transformers have them.

    Attributes:
        text: the template. Where it has ``{% generation %}`` blocks, they are what the assistant wrote; otherwise each turn of the
            assistant is found by rendering the conversation up to it and with it.
        special: the tokens that the template writes, which a tokenizer that is trained here gets whole.
        end: the token that ends a turn; None: the tokenizer's own end of text.
        variables: what the template reads beside messages and tools: ``bos_token``, ``eos_token``.
    """

    text: str
    special: tuple[str, ...] = ()
    end: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def on(self, day: datetime) -> ChatTemplate:
        """Return the template that writes ``day`` where it calls ``strftime_now``, so that each run on the data has the same text.

        Raises:
            RecipeError: it calls ``strftime_now`` with something else than a text.
        """

        def written(call: re.Match[str]) -> str:
            if call[1] is None:
                raise RecipeError(
                    "the chat template calls strftime_now with something else than a text, so its date would change from run to run; write "
                    "the format into the call, strftime_now('%d %b %Y')"
                )
            return repr(day.strftime(call[2]))

        return replace(self, text=_DATE.sub(written, self.text))

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, text: str | None = None, **options: bool) -> str:
        """Return the text of a conversation; ``text``: of this template in place of its own."""
        library = need("transformers.utils.chat_template_utils", extra="transformers")
        texts, _ = library.render_jinja_template(
            [list(messages)], tools=tools, chat_template=text or self.text, **options, **self.variables
        )
        return texts[0]

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, Spans]:
        """Return the text of a conversation, and what of it the assistant wrote: from behind the generation prompt to the end of the turn.

        Raises:
            RecipeError: the template refuses the conversation, leaves out its tools or tool calls, writes nothing of the assistant's, or
                has no ``{% generation %}`` and renders an earlier turn otherwise once a later one is there, so that no part of the text
                is known to be the assistant's.
        """
        try:
            whole = self.render(messages, tools)
            if tools and self._writes(whole, messages, None):
                raise RecipeError(
                    "the chat template leaves out the tools; use a template that writes them (data.template: chatml), or remove tools"
                )
            for place, message in enumerate(messages):
                bare = {name: value for name, value in message.items() if name != "tool_calls"}
                if message.get("tool_calls") and self._writes(whole, [*messages[:place], bare, *messages[place + 1 :]], tools):
                    raise RecipeError(
                        f"the chat template leaves out the tool_calls of turn {place + 1}; use a template that writes them (data.template: "
                        "chatml), or remove them"
                    )
            marked = _GENERATION.search(_COMMENT.sub("", self.text))
            spans = self._generated(whole, messages, tools) if marked else self._answers(whole, messages, tools)
        except RecipeError:
            raise
        except Exception as error:  # a template's own
            raise RecipeError(f"the chat template does not render it: {brief(error)}") from error
        said = [message for message in messages if message["role"] == "assistant"]
        if any(message.get("weight") == 0 for message in said):
            if len(said) != len(spans):
                raise RecipeError(
                    f"the chat template writes {len(spans)} answers of {len(said)}, so those of weight 0 cannot be identified; remove "
                    "weight"
                )
            spans = [span for span, message in zip(spans, said, strict=True) if message.get("weight") != 0]
        if not any(begin < end for begin, end in spans):
            raise RecipeError(
                "no token of the conversation would count as a label, because the chat template writes nothing of an assistant's turn "
                "(of a weight other than 0); remove the conversation, or use another template"
            )
        return whole, spans

    def check(self, eos: str, known: Callable[[str], object | None] | None) -> None:
        """Check that a tokenizer can write what the template writes, and that an answer ends with its end of text.

        Args:
            eos: the token that ends a text.
            known: the id of a token, or None; None: every token of the template will be one.

        Raises:
            RecipeError: a token of the template is none of the tokenizer, or ``eos`` never follows an answer.
        """
        missing = [] if known is None else [token for token in self.special if known(token) is None]
        if missing:
            raise RecipeError(
                f"the tokenizer has no token {', '.join(missing)}, which the chat template writes; use the template of the tokenizer or a "
                "file, or write tokenizer: bpe, which gets them"
            )
        said = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            text, spans = self.conversation(said)
        except RecipeError:
            return  # told with the data, where they are refused
        if eos not in text[spans[-1][0] :]:
            raise RecipeError(
                f"the chat template writes no {eos} behind the assistant's text ({text[spans[-1][0] :]!r}), so the model would never learn "
                "to stop; set data.eos to the token that ends a turn, or write {{ eos_token }} behind it in a template of your own"
            )

    def _writes(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        try:
            return self.render(messages, tools) == text
        except Exception:  # noqa: BLE001 - a template's own: it looks at what is not there
            return False

    def _generated(self, whole: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> Spans:
        """Return the spans of the ``{% generation %}`` blocks, wherever they are: in a macro as well."""
        text = _GENERATION.sub(lambda tag: f"{tag[1]} print '{_END if tag[2] else _BEGIN}' {tag[3]}", self.text)
        plain, spans, begin = "", Spans(), 0
        for part in re.split(f"([{_BEGIN}{_END}])", self.render(messages, tools, text=text)):
            if part == _BEGIN:
                begin = len(plain)
            elif part == _END:
                spans.append((begin, len(plain)))
            else:
                plain += part
        if plain != whole:
            raise RecipeError(
                "the {% generation %} blocks of the chat template cannot be found in the text, because the template changes what they "
                "write (a filter or a set block around one), or reads behind one what was set in it; put the blocks outside of these"
            )
        return spans

    def _answers(self, whole: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> Spans:
        """Return the spans of the assistant's turns, each found by rendering the conversation up to it and with it."""
        spans: Spans = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:place], tools, add_generation_prompt=True)
            through = self.render(messages[: place + 1], tools)
            why = ""
            if not through.startswith(before):
                why = "begins it otherwise than it asks for it"
            elif not whole.startswith(through):
                why = "rewrites earlier turns when later ones follow"
            elif "add_generation_prompt" not in self.text and not through[len(before) :].lstrip().startswith(
                (message["content"] or "").strip()
            ):
                why = "has no generation prompt (add_generation_prompt) and begins it with other text"
            if why:
                raise RecipeError(
                    f"turn {place + 1}, the assistant's, cannot be found in the text, because the chat template {why}; mark the "
                    "assistant's text with {% generation %} in the template, give data.template: chatml or llama3, or keep one answer "
                    "in each conversation"
                )
            spans.append((len(before), len(through.rstrip())))
        return spans


_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if loop.first and tools %}
{%- if message['role'] != 'system' %}{{ raise_exception('tools need a system turn, in which they are listed') }}{% endif %}
{{- message['content'] + '\\n\\n<tools>\\n' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '</tools><|im_end|>\\n' }}
{%- elif message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>\\n' + ((call['function'] or call) | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- if tools %}{{ raise_exception('the template llama3 has no tools; use the one of the tokenizer') }}{% endif %}
{%- for message in messages %}
{%- if message['tool_calls'] %}{{ raise_exception('the template llama3 has no tool calls; use the one of the tokenizer') }}{% endif %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
TEMPLATES = {
    "chatml": ChatTemplate(text=_CHATML, special=("<|im_start|>", "<|im_end|>"), end="<|im_end|>"),
    "llama3": ChatTemplate(
        text=_LLAMA3,
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
    ),
}
"""Templates that come with meshpar: OpenAI's ChatML, with Hermes's tool calls, and Llama 3's."""


def chat_template(name: str | None, tokenizer: TextTokenizer | None) -> ChatTemplate:
    """Return a chat template.

    Args:
        name: of :data:`TEMPLATES`, or a file; None: the tokenizer's own.
        tokenizer: from a folder; None: one that is still to be made.

    Raises:
        RecipeError: there is no such template.
    """
    variables = {"eos_token": END_OF_TEXT} if tokenizer is None else tokenizer.variables()
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name is not None:
        if not expanded(Path(name)).is_file():
            raise RecipeError(f"data.template is {name!r}; expected {', '.join(TEMPLATES)} or a file with a template in Jinja")
        try:
            return ChatTemplate(text=expanded(Path(name)).read_text(encoding="utf-8"), variables=variables)
        except UnicodeDecodeError as error:
            raise RecipeError(f"data.template: {name} is not UTF-8 text ({error.reason}); convert it") from error
    own = None if tokenizer is None else tokenizer.chat_template()
    if own is None:
        raise RecipeError(f"the tokenizer has no chat template; write data.template: {' or '.join(TEMPLATES)}, or a file with one")
    return ChatTemplate(text=own, variables=variables)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSource:
    """Conversations, in the same order on every rank.

    A record has ``messages`` (OpenAI's form: role, content, tool_calls), ``conversations`` (ShareGPT's: from, value), or ``prompt`` and
    ``completion`` (texts, or messages). ``tools`` beside them go to the template.

    Attributes:
        inputs: tables (JSON lines, Parquet, Arrow), folders and globs; or ``stdlib`` alone: a question about every documented function of
            the standard library, with the first sentence of its docstring as the answer.
        template: renders them.
    """

    inputs: tuple[str, ...]
    template: ChatTemplate

    def files(self) -> list[Path]:
        """Return the files; raises RecipeError if an input matches no file."""
        return TextSource(inputs=self.inputs, suffixes=TABLES).files()

    def fingerprint(self) -> str:
        """Return a hash of the files' names, sizes and times and of the template."""
        parts = (
            _FORMAT,
            self._template().text,
            sorted(self.template.variables.items()),
            QUESTION,
            TextSource(inputs=self.inputs, suffixes=TABLES).fingerprint(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _template(self) -> ChatTemplate:
        """Return the template; a date that it writes is the day on which the newest file was written, in UTC."""
        if _DATE.search(self.template.text) is None:
            return self.template
        newest = max((path.stat().st_mtime for path in self.files()), default=0.0)
        return self.template.on(datetime.fromtimestamp(newest, UTC))

    def conversations(self) -> Iterator[tuple[str, Spans]]:
        """Yield the text of each conversation, and the spans of the assistant's turns.

        Raises:
            RecipeError: a record is no conversation, or the template refuses it: names the file, the line and the remedy.
        """
        template = self._template()
        if self.inputs == (STDLIB,):
            for code, sentence in RecordSource(inputs=(STDLIB,), kind="pairs").records():
                said = [{"role": "user", "content": QUESTION.format(code=code)}, {"role": "assistant", "content": sentence}]
                yield template.conversation(said)
            return
        for path in self.files():
            for number, record in records_of(path, _COLUMNS):
                if kind_of(path) in UNPLAIN:  # an empty row: other columns were not read, and are named in the error
                    record = _without_nulls(record) or dict.fromkeys(next(records_of(path))[1])
                try:
                    yield template.conversation(*messages_of(record))
                except RecipeError as error:
                    raise RecipeError(f"{path}:{number}: {error}") from error

    def documents(self) -> Iterator[str]:
        """Yield the text of each conversation, on which a tokenizer is trained."""
        return (text for text, _ in self.conversations())

    def token_pieces(self, tokenizer: TextTokenizer) -> Iterator[Piece]:
        """Yield the ids of each conversation, and which of them count as labels: those that have a part of what the assistant wrote.

        A token may begin before it, with the space that ends the generation prompt.
        """
        for part in batched(self.conversations(), _BATCH):
            for (_, spans), (ids, places) in zip(part, tokenizer.encode_with_places([text for text, _ in part]), strict=True):
                yield ids, True, _overlap(places, spans)


def _overlap(places: np.ndarray, spans: Spans) -> np.ndarray:
    """Return which tokens overlap a span, bool; ``places`` (N, 2): where each begins and ends. One without a character counts as one."""
    numpy = need("numpy")
    begins, ends = places[:, 0], numpy.maximum(places[:, 1], places[:, 0] + 1)
    found = numpy.zeros(begins.size, dtype=bool)
    for begin, end in spans:
        found |= (begins < end) & (ends > begin)
    return found


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - of a table
    """Return a value of a table's row without null keys: its columns have the keys of all rows, of which most rows lack some."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def messages_of(record: Any) -> tuple[list[Message], Sequence[Any] | None]:  # noqa: ANN401 - of JSON
    """Return the messages of a record in OpenAI's form, and its tools. The assistant's turns that do not count have weight 0.

    Raises:
        RecipeError: it is no conversation; says what it has, what was expected and what to do.
    """
    if not isinstance(record, Mapping):
        raise RecipeError(f"got a {type(record).__name__}; expected an object with messages, conversations, or prompt and completion")
    if record.get("messages") is not None:
        said = _listed(record["messages"])
    elif record.get("conversations") is not None:
        said = _listed(record["conversations"])
    elif record.get("prompt") is not None and record.get("completion") is not None:
        asked = _turns(record["prompt"], "user")
        said = [
            *({**each, "weight": 0} if isinstance(each, Mapping) and each.get("role") == "assistant" else each for each in asked),
            *_turns(record["completion"], "assistant"),
        ]
    else:
        raise RecipeError(f"there are {sorted(record)}; expected messages, conversations, or prompt and completion: name them so")
    messages = [_message(each, place) for place, each in enumerate(said, 1)]
    if record.get("system"):
        if messages and messages[0]["role"] == "system":
            raise RecipeError("turn 1 is the system's, and there is also a system key; keep one of the two")
        messages.insert(0, _message({"role": "system", "content": record["system"]}, 0))
    if not messages:
        raise RecipeError("the conversation is empty; expected at least one turn of the assistant: remove the line, or write its turns")
    if all(each["role"] != "assistant" for each in messages):
        raise RecipeError(
            f"no turn is the assistant's (roles: {', '.join(str(each['role']) for each in messages)}), so nothing is learned from it; "
            "remove the line, or name the assistant's turns role: assistant"
        )
    return messages, _tools(record.get("tools"))


def _tools(value: Any) -> Sequence[Any] | None:  # noqa: ANN401 - of JSON
    """Return the tools of a record, which some data sets write as a text of JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RecipeError(f"tools is a text that is not JSON ({error}); expected a list of objects") from error
    if value and not (isinstance(value, list) and all(isinstance(each, Mapping) for each in value)):
        raise RecipeError(f"tools is {value!r:.80}; expected a list of objects, one for each tool")
    return value or None


def _listed(value: Any) -> list[Any]:  # noqa: ANN401 - of JSON
    if not isinstance(value, list):
        raise RecipeError(f"the conversation is a {type(value).__name__}; expected a list of turns")
    return value


def _turns(value: Any, role: str) -> list[Any]:  # noqa: ANN401 - of JSON
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value)


def _message(turn: Any, place: int) -> Message:  # noqa: ANN401 - of JSON
    """Return a turn in OpenAI's form, with whatever else it has."""
    if not isinstance(turn, Mapping):
        raise RecipeError(f"turn {place} is a {type(turn).__name__}; expected an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not role:
        raise RecipeError(
            f"turn {place} has no role; it has {sorted(turn)}: add role (or ShareGPT's from): user, assistant, system or tool"
        )
    role = _ROLES.get(role, role)
    if role not in _KNOWN and (meant := get_close_matches(role.lower(), _KNOWN, n=1, cutoff=0.75)):
        raise RecipeError(f"turn {place} has role {role!r}; write {meant[0]}, or a role of the template that is spelled otherwise")
    if content is None and not turn.get("tool_calls"):
        raise RecipeError(f"turn {place} ({role}) has no content; it has {sorted(turn)}: add content (or ShareGPT's value), or tool_calls")
    if isinstance(content, list):
        other = [
            each for each in content if not isinstance(each, Mapping) or each.get("type") != "text" or not isinstance(each.get("text"), str)
        ]
        if other:
            raise RecipeError(
                f"turn {place} ({role}) has the part {other[0]!r:.80}; expected text, or parts of type text: remove the others"
            )
        content = "".join(each["text"] for each in content)
    if content is not None and not isinstance(content, str):
        raise RecipeError(f"turn {place} ({role}) has content of type {type(content).__name__}; expected text")
    if turn.get("weight") not in (None, 0, 1):
        raise RecipeError(f"turn {place} ({role}) has weight {turn['weight']!r}; expected 0 (its tokens do not count) or 1")
    more = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    if isinstance(calls := more.get("tool_calls"), list):
        more["tool_calls"] = [_call(each) for each in calls]
    return {**more, "role": role, "content": content or ""}


def _call(call: Any) -> Any:  # noqa: ANN401 - of JSON
    """Return a tool call whose arguments, where OpenAI writes them as a text of JSON, are an object, as templates expect them."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"])}
    try:
        return {**call, "arguments": json.loads(call["arguments"])} if isinstance(call.get("arguments"), str) else call
    except ValueError:
        return call
