"""Chat templates: render a conversation, find what of it the assistant wrote, refuse what a template leaves out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, final

from meshpar.core.errors import RecipeError, brief
from meshpar.process.imports import expanded, need
from meshpar.training.tokenizer import END_OF_TEXT, TextTokenizer

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
"""Begin and end, in characters, of what the assistant wrote."""
Conversation = tuple[Sequence[Message], str, Spans]
"""Messages, their text, and the spans of the answers that count."""

_THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "thinking",
    "thinking_blocks",
    "thought",
    "thoughts",
)
SAID = (*_THOUGHTS, "chain_of_thought", "tool_calls", "function_call", "refusal", "history")
"""Keys by which data sets and interfaces name what an assistant says beside ``content``."""
_GENERATION = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")
_DATE = re.compile(r"strftime_now\(\s*(?:(['\"])(.*?)\1\s*\))?")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Stand where a block begins and ends: code points that no text has (Unicode's noncharacters)."""


class RewrittenError(RecipeError):
    """Raised where a template writes an earlier turn otherwise once later ones follow, such as without its thoughts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A chat template in Jinja; an answer is a ``{% generation %}`` block, or without any is found by rendering."""

    # ``special``: tokens that it writes; ``end``: the one that ends a turn; ``variables``: ``bos_token`` and the like.

    text: str
    special: tuple[str, ...] = ()
    end: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def dated(self) -> bool:
        """True for a template that writes the day on which it is used."""
        return _DATE.search(self.text) is not None

    def on(self, day: datetime) -> ChatTemplate:
        """Return the template that writes ``day`` where it calls ``strftime_now``: each run has the same text."""

        def written(call: re.Match[str]) -> str:
            if call[1] is None:
                raise RecipeError(
                    "the chat template calls strftime_now with something else than a text, so its date would change "
                    "from run to run; write the format into the call, strftime_now('%d %b %Y')"
                )
            return repr(day.strftime(call[2]))

        return replace(self, text=_DATE.sub(written, self.text))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, text: str | None = None, **options: bool
    ) -> str:
        """Return the text of a conversation; ``text``: of this template in place of its own."""
        library = need("transformers.utils.chat_template_utils", extra="transformers")
        texts, _ = library.render_jinja_template(
            [list(messages)], tools=tools, chat_template=text or self.text, **options, **self.variables
        )
        return texts[0]

    def conversations(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Conversation]:
        """Return a conversation; where the template rewrites earlier turns, each answer that counts as one of its own.

        A conversation of an answer ends with it, as the model had to go on when it was asked.
        """
        try:
            return [(messages, *self.conversation(messages, tools))]
        except RewrittenError:
            quiet = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in messages]
            until = [
                [*quiet[:turn], message]
                for turn, message in enumerate(messages)
                if message["role"] == "assistant" and message.get("weight") != 0
            ]
            return [(said, *self.conversation(said, tools)) for said in until]

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, Spans]:
        """Return a conversation's text, and the spans that the assistant wrote; RecipeError if these are unknown."""
        try:
            whole = self.render(messages, tools)
            if tools and self._writes(whole, messages, None):
                raise RecipeError(
                    "the chat template leaves out the tools; use a template that writes them (data.template: chatml), "
                    "or remove tools"
                )
            for turn, message in enumerate(messages):
                # calls of tools, or thoughts that count
                counts = message["role"] == "assistant" and message.get("weight") != 0
                for name in (key for key in SAID if message.get(key) and (key == "tool_calls" or counts)):
                    bare = _drop_keys([message], {name})
                    if self._writes(whole, [*messages[:turn], *bare, *messages[turn + 1 :]], tools):
                        before = messages[:turn]
                        through = self.render([*before, message], tools)
                        lost = counts and not self._writes(through, [*before, *bare], tools)
                        raise (RewrittenError if lost else RecipeError)(
                            f"the chat template leaves out the {name} of turn {turn + 1}, so the model would not "
                            f"learn it; use a template that writes it{_REMEDIES.get(name, _INTO_CONTENT)}, or remove "
                            "it"
                        )
            marked = _GENERATION.search(_COMMENT.sub("", self.text))
            find = self._find_generated if marked else self._find_answers
            spans = find(whole, messages, tools)
            said = [message for message in messages if message["role"] == "assistant"]
            if marked and any(message.get("weight") == 0 for message in said):
                if len(said) != len(spans):
                    raise RecipeError(
                        f"the chat template writes {len(spans)} answers of {len(said)}, so those of weight 0 cannot "
                        "be identified; remove weight"
                    )
                spans = [span for span, message in zip(spans, said, strict=True) if message.get("weight") != 0]
        except RecipeError:
            raise
        except Exception as error:  # a template's own
            raise RecipeError(f"the chat template does not render it: {brief(error)}") from error
        if not any(begin < end for begin, end in spans):
            raise RecipeError(
                "no token of the conversation would count as a label, because the chat template writes nothing of an "
                "assistant's turn (of a weight other than 0); remove the conversation, or use another template"
            )
        return whole, spans

    def unread(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, names: set[str]) -> set[str]:
        """Return which of the turns' keys ``names`` do not change the text that the template writes."""
        if not names or self._writes(text, _drop_keys(messages, names), tools):
            return names
        return {name for name in names if len(names) > 1 and self._writes(text, _drop_keys(messages, {name}), tools)}

    def check(self, eos: str, known: Callable[[str], object | None] | None) -> None:
        """Raise RecipeError if a tokenizer lacks a token of the template, or no answer ends with ``eos``."""
        missing = [] if known is None else [token for token in self.special if known(token) is None]
        if missing:
            raise RecipeError(
                f"the tokenizer has no token {', '.join(missing)}, which the chat template writes; use the template "
                "of the tokenizer or a file, or write tokenizer: bpe, which gets them"
            )
        said = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            text, spans = self.conversation(said)
        except RecipeError:
            return  # told with the data, where they are refused
        begin, end = spans[-1]
        if eos in text[begin:] and eos not in text[begin:end]:
            raise RecipeError(
                f"the {{% generation %}} block of the chat template ends before {eos} ({text[begin:]!r}), so the "
                "model would never learn to stop; write the token inside the block, in a template of your own"
            )
        if eos not in text[begin:]:
            raise RecipeError(
                f"the chat template writes no {eos} behind the assistant's text ({text[begin:]!r}), so the model "
                "would never learn to stop; set data.eos to the token that ends a turn, or write {{ eos_token }} "
                "behind it in a template of your own"
            )

    def _writes(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        try:
            return self.render(messages, tools) == text
        except Exception:  # noqa: BLE001 - a template's own: it looks at what is not there
            return False

    def _find_generated(self, whole: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> Spans:
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
                "the {% generation %} blocks of the chat template cannot be found in the text, because the template "
                "changes what they write (a filter or a set block around one), or reads behind one what was set in "
                "it; put the blocks outside of these"
            )
        return spans

    def _find_answers(self, whole: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> Spans:
        """Return the spans of the assistant's turns, each found by rendering the conversation up to it and with it."""
        spans: Spans = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            before = self.render(messages[:turn], tools, add_generation_prompt=True)
            through = self.render(messages[: turn + 1], tools)
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
                raise (RewrittenError if "rewrites" in why else RecipeError)(
                    f"turn {turn + 1}, the assistant's, cannot be found in the text, because the chat template "
                    f"{why}; mark the assistant's text with {{% generation %}} in the template, or give data.template: "
                    "chatml or llama3"
                )
            spans.append((len(before), len(through.rstrip())))
        return spans


def _drop_keys(messages: Sequence[Message], names: set[str]) -> list[Message]:
    return [{name: value for name, value in message.items() if name not in names} for message in messages]


_REMEDIES = {"tool_calls": " (data.template: chatml)", "function_call": " (as tool_calls: data.template: chatml)"}
_INTO_CONTENT = ", write it into content (<think>...</think>)"
_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if loop.first and tools %}
{%- if message['role'] != 'system' %}
{{- raise_exception('tools need a system turn, in which they are listed') }}
{%- endif %}
{{- message['content'] + '\\n\\n<tools>\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
{{- '</tools><|im_end|>\\n' }}
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
{%- if message['tool_calls'] %}
{{- raise_exception('the template llama3 has no tool calls; use the one of the tokenizer') }}
{%- endif %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
_LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TEMPLATES = {
    "chatml": ChatTemplate(text=_CHATML, special=("<|im_start|>", "<|im_end|>"), end="<|im_end|>"),
    "llama3": ChatTemplate(text=_LLAMA3, special=_LLAMA3_TOKENS, end="<|eot_id|>"),
}
"""Templates that come with meshpar: OpenAI's ChatML, with Hermes's tool calls, and Llama 3's."""


def chat_template(name: str | None, tokenizer: TextTokenizer | None) -> ChatTemplate:
    """Return the template ``name``: of :data:`TEMPLATES`, a file, or (None) the tokenizer's own."""
    variables = {"eos_token": END_OF_TEXT} if tokenizer is None else tokenizer.variables()
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name is not None:
        if not expanded(Path(name)).is_file():
            problem = f"data.template is {name!r}; expected {', '.join(TEMPLATES)} or a file with a template in Jinja"
            raise RecipeError(problem)
        try:
            return ChatTemplate(text=expanded(Path(name)).read_text(encoding="utf-8"), variables=variables)
        except UnicodeDecodeError as error:
            raise RecipeError(f"data.template: {name} is not UTF-8 text ({error.reason}); convert it") from error
    text = None if tokenizer is None else tokenizer.chat_template()
    if text is None:
        raise RecipeError(
            f"the tokenizer has no chat template; write data.template: {' or '.join(TEMPLATES)}, or a file with one"
        )
    return ChatTemplate(text=text, variables=variables)
