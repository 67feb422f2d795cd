"""Conversations: messages rendered by a chat template, of which the assistant's tokens alone count as labels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from meshpar.errors import RecipeError, brief
from meshpar.extras import need
from meshpar.training.records import RecordSource
from meshpar.training.text import STDLIB, TextSource, is_table, records_of
from meshpar.training.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import numpy as np

    from meshpar.training.tokens import Piece

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
"""Begin and end, in characters, of what the assistant wrote."""

_FORMAT, _BATCH = 1, 256
_COLUMNS = ("messages", "conversations", "prompt", "completion", "system", "tools")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of roles; others stay as they are."""
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

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: bool) -> tuple[str, Any]:
        """Return the text of a conversation, and the spans of its ``{% generation %}`` blocks."""
        library = need("transformers.utils.chat_template_utils", extra="transformers")
        texts, spans = library.render_jinja_template([list(messages)], tools=tools, chat_template=self.text, **options, **self.variables)
        return texts[0], spans[0] if spans else []

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, Spans]:
        """Return the text of a conversation, and what of it the assistant wrote: from behind the generation prompt to the end of the turn.

        Raises:
            RecipeError: the template refuses the conversation, or has no ``{% generation %}`` and renders an earlier turn otherwise
                once a later one is there, so that no part of the text is known to be the assistant's.
        """
        try:
            if _GENERATION.search(self.text):
                text, found = self.render(messages, tools, return_assistant_tokens_mask=True)
                return text, [(begin, end) for begin, end in found]
            whole, _ = self.render(messages, tools)
            spans: Spans = []
            for place, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                before, _ = self.render(messages[:place], tools, add_generation_prompt=True)
                through, _ = self.render(messages[: place + 1], tools)
                if not whole.startswith(through) or not through.startswith(before):
                    rewrites = through.startswith(before)
                    why = "rewrites earlier turns when later ones follow" if rewrites else "begins it otherwise than it asks for it"
                    raise RecipeError(
                        f"turn {place + 1}, the assistant's, cannot be found in the text, because the chat template {why}; mark the "
                        "assistant's text with {% generation %} in the template, give data.template: chatml or llama3, or keep one answer "
                        "in each conversation"
                    )
                spans.append((len(before), len(through.rstrip())))
            return whole, spans
        except RecipeError:
            raise
        except Exception as error:  # a template's own
            raise RecipeError(f"the chat template does not render it: {brief(error)}") from error


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
    variables = {} if tokenizer is None else tokenizer.variables()
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name is not None:
        if not Path(name).expanduser().is_file():
            raise RecipeError(f"data.template is {name!r}; expected {', '.join(TEMPLATES)} or a file with a template in Jinja")
        return ChatTemplate(text=Path(name).expanduser().read_text(encoding="utf-8"), variables=variables)
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
        return TextSource(inputs=self.inputs).files()

    def fingerprint(self) -> str:
        """Return a hash of the files' names, sizes and times and of the template."""
        parts = (
            _FORMAT,
            self.template.text,
            sorted(self.template.variables.items()),
            QUESTION,
            TextSource(inputs=self.inputs).fingerprint(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def conversations(self) -> Iterator[tuple[str, Spans]]:
        """Yield the text of each conversation, and the spans of the assistant's turns.

        Raises:
            RecipeError: a record is no conversation, or the template refuses it: names the file, the line and the remedy.
        """
        if self.inputs == (STDLIB,):
            for code, sentence in RecordSource(inputs=(STDLIB,), kind="pairs").records():
                said = [{"role": "user", "content": QUESTION.format(code=code)}, {"role": "assistant", "content": sentence}]
                yield self.template.conversation(said)
            return
        for path in self.files():
            if not is_table(path):
                raise RecipeError(f"{path} has no records; expected JSON lines, Parquet or Arrow with one conversation a record")
            for number, record in records_of(path, _COLUMNS):
                try:
                    yield self.template.conversation(*messages_of(record))
                except RecipeError as error:
                    raise RecipeError(f"{path}:{number}: {error}") from error

    def documents(self) -> Iterator[str]:
        """Yield the text of each conversation, on which a tokenizer is trained."""
        return (text for text, _ in self.conversations())

    def token_pieces(self, tokenizer: TextTokenizer) -> Iterator[Piece]:
        """Yield the ids of each conversation, and which of them count as labels: those that begin in what the assistant wrote."""
        rest = self.conversations()
        while part := list(islice(rest, _BATCH)):
            for (_, spans), (ids, begins) in zip(part, tokenizer.encode_with_places([text for text, _ in part]), strict=True):
                yield ids, True, _inside(begins, spans)


def _inside(places: np.ndarray, spans: Spans) -> np.ndarray:
    """Return which of ``places`` are in a span, bool."""
    found = need("numpy").zeros(places.size, dtype=bool)
    for begin, end in spans:
        found |= (places >= begin) & (places < end)
    return found


def messages_of(record: Any) -> tuple[list[Message], Sequence[Any] | None]:  # noqa: ANN401 - of JSON
    """Return the messages of a record in OpenAI's form, and its tools.

    Raises:
        RecipeError: it is no conversation; says what it has, what was expected and what to do.
    """
    if not isinstance(record, Mapping):
        raise RecipeError(f"got a {type(record).__name__}; expected an object with messages, conversations, or prompt and completion")
    if record.get("messages") is not None:
        said = record["messages"]
    elif record.get("conversations") is not None:
        said = [*([{"role": "system", "content": record["system"]}] if record.get("system") else []), *_listed(record["conversations"])]
    elif record.get("prompt") is not None and record.get("completion") is not None:
        said = [each for name, role in (("prompt", "user"), ("completion", "assistant")) for each in _turns(record[name], role)]
    else:
        raise RecipeError(f"there are {sorted(record)}; expected messages, conversations, or prompt and completion: name them so")
    messages = [_message(each, place) for place, each in enumerate(_listed(said), 1)]
    if not messages:
        raise RecipeError("the conversation is empty; expected at least one turn of the assistant: remove the line, or write its turns")
    if all(each["role"] != "assistant" for each in messages):
        raise RecipeError(
            f"no turn is the assistant's (roles: {', '.join(str(each['role']) for each in messages)}), so nothing is learned from it; "
            "remove the line, or name the assistant's turns role: assistant"
        )
    return messages, record.get("tools") or None


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
    if content is None and not turn.get("tool_calls"):
        raise RecipeError(f"turn {place} ({role}) has no content; it has {sorted(turn)}: add content (or ShareGPT's value), or tool_calls")
    if content is not None and not isinstance(content, (str, list)):
        raise RecipeError(f"turn {place} ({role}) has content of type {type(content).__name__}; expected text")
    more = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    return {**more, "role": _ROLES.get(role, role), "content": content}
