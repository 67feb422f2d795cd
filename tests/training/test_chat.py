"""Conversations: templates, which tokens count, and what is refused; packing that cuts none; tables by columns."""

import json
import os
import random
import re
from datetime import datetime

import numpy as np
import pytest

from meshpar.core.errors import RecipeError
from meshpar.training.chat import ChatSource, _overlap, messages_of
from meshpar.training.data import FILLER
from meshpar.training.samples import PackedTokens
from meshpar.training.template import TEMPLATES, ChatTemplate, chat_template
from meshpar.training.text import Reading, TextSource
from meshpar.training.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from meshpar.training.tokens import prepare_tokens, write_tokens

pytest.importorskip("transformers")

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 "
    "%}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if "
    "message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}{{ message['content'] + eos_token + ' ' }}{% else %}{{ raise_exception('Only user and assistant "
    "roles are supported!') }}{% endif %}{% endfor %}"
)
REWRITES = (  # as templates of models that think: earlier thoughts are left out
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content.split('</think>')[-1] "
    "}}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As Qwen3's: thoughts of turns before the last question are left out."""
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% "
    "endif %}"
)
BLOCK = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% "
    "endif %}"
)
SAID = [("user", "Hé, 2+2?"), ("assistant", " 4 \n"), ("user", "And 中?"), ("assistant", "A <b>letter</b>.")]


def messages(said=SAID):
    return [{"role": role, "content": text} for role, text in said]


def of_chatml(role, text):
    return [(f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>", role == "assistant"), ("\n", False)]


def of_llama3(role, text):
    header = f"<|start_header_id|>{role}<|end_header_id|>\n\n"
    return [(header, False), (f"{text.strip()}<|eot_id|>", role == "assistant")]


def of_mistral(role, text):
    return [(f"[INST] {text} [/INST]", False)] if role == "user" else [(f"{text}</s>", True), (" ", False)]


@pytest.mark.parametrize(
    "template,begin,turn",
    [
        (ChatTemplate(text=CHATML), "", of_chatml),
        (TEMPLATES["chatml"], "", of_chatml),
        (ChatTemplate(text=LLAMA3, variables={"bos_token": "<|begin_of_text|>"}), "<|begin_of_text|>", of_llama3),
        (TEMPLATES["llama3"], "<|begin_of_text|>", of_llama3),
        (ChatTemplate(text=MISTRAL, variables={"bos_token": "<s>", "eos_token": "</s>"}), "<s>", of_mistral),
    ],
    ids=["chatml", "our chatml", "llama 3", "our llama 3", "mistral"],
)
def test_the_assistants_tokens_alone_count_turn_by_turn(template, begin, turn, tmp_path):
    said = [("system", "Be brief."), *SAID] if turn is not of_mistral else SAID
    records = ({"messages": messages(said)}, {"messages": messages()})
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    parts = [[(begin, False), *(part for message in written for part in turn(*message))] for written in (said, SAID)]
    want = [np.concatenate([np.full(len(text.encode()), counts) for text, counts in part]) for part in parts]
    source = ChatSource(inputs=(str(tmp_path / "chat.jsonl"),), template=template)
    pieces = list(source.token_pieces(byte_tokenizer()))
    texts = ["".join(text for text, _ in part) for part in parts]
    assert [bytes(ids.tolist()).decode() for ids, _, _ in pieces] == texts
    for (_, _, counted), expected in zip(pieces, want, strict=True):
        np.testing.assert_array_equal(counted, expected)
    file = prepare_tokens(source, byte_tokenizer(), tmp_path / "cache").train
    batch = PackedTokens(file, 4096).__getitems__([0, FILLER])
    labels = batch["labels"][0][batch["labels"][0] != -100].tolist()
    assert bytes(labels).decode() == "".join(text for part in parts for text, counts in part if counts)
    second = int((batch["position_ids"][0] == 0).nonzero()[1])
    assert second == len(want[0]), "each conversation is a document"


def test_a_trained_tokenizer_has_the_templates_tokens_whole(tmp_path):
    template = TEMPLATES["chatml"]
    text = template.conversation(messages())[0]
    train_bpe([text * 40], 290, template.special).save(tmp_path)
    tokenizer = load_tokenizer(tmp_path, eos=template.end, template=template.text)
    (ids, places), *_ = tokenizer.encode_with_places([text])
    begins = places[ids == tokenizer.encode("<|im_start|>")[0], 0]
    assert ids.tolist().count(tokenizer.eos_id) == 4 and [text[at : at + 12] for at in begins] == ["<|im_start|>"] * 4
    tokenizer.save(tmp_path / "saved")
    theirs = __import__("transformers").AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.apply_chat_template(messages(), tokenize=False) == text and theirs.eos_token == "<|im_end|>"
    assert chat_template(None, load_tokenizer(tmp_path / "saved")).text == template.text


THOUGHT = [("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "<think>y</think>d")]


def answers(template, said, path):
    """The documents of one conversation: the text before each answer that counts, and the answer."""
    path.write_text(json.dumps({"messages": said}) + "\n")
    source = ChatSource(inputs=(str(path),), template=template)
    parts = [[(text[:begin], text[begin:end]) for begin, end in spans] for text, spans in source.conversations()]
    return parts, [*source.reading.notes()]


def test_each_answer_is_a_document_where_the_template_rewrites_earlier_turns(tmp_path):
    start = "<|im_start|>assistant\n"
    begin, end = f"<|im_start|>user\na<|im_end|>\n{start}", f"<|im_end|>\n<|im_start|>user\nc<|im_end|>\n{start}"
    written = {  # of the thoughts x and y
        REWRITES: ("<think>x</think>b<|im_end|>", "<think>y</think>d<|im_end|>"),
        QWEN3: ("<think>\nx\n</think>\n\nb<|im_end|>", "<think>\ny\n</think>\n\nd<|im_end|>"),
    }
    for text, (first, second) in written.items():
        template = ChatTemplate(text=text)
        expected = [[(begin, first)], [(f"{begin}b{end}", second)]]
        found, (note,) = answers(template, messages(THOUGHT), tmp_path / "chat.jsonl")
        assert found == expected, "an earlier answer stands there as the model reads it when it is asked again"
        assert note == (
            "the chat template rewrites earlier turns, as it leaves out earlier thoughts, in 1 conversations: each of "
            "their 2 answers is a document, with the turns before it"
        )
        quiet = [message | ({"weight": 0} if number == 1 else {}) for number, message in enumerate(messages(THOUGHT))]
        assert answers(template, quiet, tmp_path / "chat.jsonl") == ([expected[1]], []), "one answer, one document"
        once = messages(THOUGHT[:2])
        assert answers(template, once, tmp_path / "chat.jsonl") == ([[(begin, first)]], [])
    fields = [
        {"role": role, "content": text[-1]} | ({"reasoning_content": text[7]} if role == "assistant" else {})
        for role, text in THOUGHT
    ]
    found, notes = answers(ChatTemplate(text=QWEN3), fields, tmp_path / "chat.jsonl")
    assert found == expected and len(notes) == 1, "thoughts in a field of their own are read, and none is unread"


def test_tools_and_thoughts_of_several_steps_are_answers_of_their_own(tmp_path):
    call = {"name": "add", "arguments": {"a": 1}}
    said = [*messages(THOUGHT[:1]), {"role": "assistant", "content": "", "tool_calls": [call]}]
    said += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "d", "reasoning_content": "y"}]
    found, _ = answers(ChatTemplate(text=QWEN3), said, tmp_path / "chat.jsonl")
    assert [answer for ((_, answer),) in found] == [
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\ny\n</think>\n\nd<|im_end|>",
    ]


def test_what_a_template_does_not_render_is_refused():
    with pytest.raises(RecipeError, match=r"does not render it: .*Conversation roles must alternate"):
        mistral = ChatTemplate(text=MISTRAL, variables={"bos_token": "", "eos_token": ""})
        mistral.conversation(messages([("system", "x")]))


LLAMA32 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
"""Llama 3.2's, without its tools."""


def test_a_template_that_writes_the_date_writes_that_of_the_data(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages()}) + "\n")
    dated = ChatTemplate(text=LLAMA32, variables={"bos_token": "<|begin_of_text|>"})
    source = ChatSource(inputs=(str(file),), template=dated)
    found = {}
    for day in ("2024-07-26", "2025-01-02"):
        seconds = datetime.fromisoformat(f"{day}T12:00+00:00").timestamp()
        os.utime(file, (seconds, seconds))
        found[source.fingerprint()] = next(iter(source.conversations()))
    for (text, spans), date in zip(found.values(), ("26 Jul 2024", "02 Jan 2025"), strict=True):
        assert f"Today Date: {date}\n\n<|eot_id|>" in text
        assert [text[begin:end] for begin, end in spans] == ["4<|eot_id|>", "A <b>letter</b>.<|eot_id|>"]
    message = r"calls strftime_now with something else than a text, .*; write the format into the call"
    with pytest.raises(RecipeError, match=message):
        wrong = ChatTemplate(text="{{ strftime_now(f) }}" + PLAIN)
        list(ChatSource(inputs=(str(file),), template=wrong).conversations())


def test_the_first_word_counts_behind_a_prompt_that_ends_in_a_space():
    said = messages([("user", "Is 2 even?"), ("assistant", "Yes")])
    turns = "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: "
    for answer in ("{% generation %}{{ m.content }}{% endgeneration %}", "{{ m.content }}"):
        end = "\n{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
        template = ChatTemplate(text=turns + answer + end)
        text, spans = template.conversation(said)
        tokenizer = train_bpe([text * 40], 275)
        (ids, places), *_ = tokenizer.encode_with_places([text])
        assert tokenizer.decode(ids[_overlap(places, spans)]) == " Yes", "the token begins with the space of the prompt"


@pytest.mark.parametrize(
    "text,message",
    [
        (
            f"{{% macro turn(m) %}}<{{{{ m.role }}}}>{BLOCK}\n{{% endmacro %}}{{% for m in messages %}}{{{{ turn(m) "
            "}}{% endfor %}",
            None,
        ),
        (
            f"{{% for m in messages %}}{{% set x %}}<{{{{ m.role }}}}>{BLOCK}{{% endset %}}{{{{ x }}}}{{% endfor %}}",
            None,
        ),
        ("{# {% generation %} #}" + PLAIN, None),
        (f"{{% for m in messages %}}{{% filter trim %}}{BLOCK}{{% endfilter %}}{{% endfor %}}", "cannot be found"),
        (
            f"{{% for m in messages %}}{{% if m.role == 'model' %}}{BLOCK}{{% endif %}}{{% endfor %}}",
            "writes nothing of an assistant's turn",
        ),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "has no generation prompt"),
    ],
    ids=["macro", "set", "comment", "filter", "none", "no prompt"],
)
def test_generation_blocks_are_found_wherever_they_are_or_refused(text, message):
    if message is not None:
        with pytest.raises(RecipeError, match=message):
            ChatTemplate(text=text).conversation(messages())
        return
    found, spans = ChatTemplate(text=text).conversation(messages())
    assert [found[begin:end].strip() for begin, end in spans] == ["4", "A <b>letter</b>."]


def test_forms_of_conversations_and_tools_pass_through():
    assert messages_of({"messages": messages()})[0] == messages()
    shared = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in SAID]
    assert messages_of({"conversations": shared, "system": "S"})[0] == [{"role": "system", "content": "S"}, *messages()]
    assert messages_of({"prompt": "Q", "completion": "A"})[0] == messages([("user", "Q"), ("assistant", "A")])
    parts = {"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "text", "text": "?"}]}
    asked = {"prompt": [parts, *messages(SAID[1:3])], "completion": messages(SAID[3:]), "system": "S"}
    text, spans = TEMPLATES["chatml"].conversation(*messages_of(asked))
    assert "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ?<|im_end|>" in text
    # the prompt's answers are no labels
    assert [text[begin:end] for begin, end in spans] == ["A <b>letter</b>.<|im_end|>"]
    assert messages_of({"messages": messages(), "system": "S"})[0][0] == {"role": "system", "content": "S"}
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    said = [*messages([("system", "S"), ("user", "2+2")]), {"role": "assistant", "content": None, "tool_calls": [call]}]
    said += messages([("tool", "4"), ("assistant", "It is 4.")])
    text, spans = TEMPLATES["chatml"].conversation(*messages_of({"messages": said, "tools": [{"name": "add"}]}))
    assert '<tools>\n{"name": "add"}\n</tools>' in text and "<|im_start|>tool\n4<|im_end|>" in text
    called = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert [text[begin:end] for begin, end in spans] == [called, "It is 4.<|im_end|>"]
    TEMPLATES["chatml"].check("<|im_end|>", None)
    for template, message in (
        (TEMPLATES["llama3"], "no token <|begin_of_text|>"),
        (ChatTemplate(text=PLAIN), "no <|endoftext|> behind"),
    ):
        with pytest.raises(RecipeError, match=re.escape(message)):
            template.check("<|endoftext|>", byte_tokenizer().fast.token_to_id)
    outside = ChatTemplate(text="{% for m in messages %}" + BLOCK + "<|endoftext|>{% endfor %}")
    message = r"block of the chat template ends before <\|endoftext\|> .* write the token inside the block"
    with pytest.raises(RecipeError, match=message):
        outside.check("<|endoftext|>", None)
    inside = outside.text.replace("{% endgeneration %}", "<|endoftext|>{% endgeneration %}")
    ChatTemplate(text=inside).check("<|endoftext|>", None)
    with pytest.raises(RecipeError, match="llama3 has no tool calls"):
        TEMPLATES["llama3"].conversation(said)
    for tools in ([{"name": "add"}], '[{"name": "add"}]'):
        with pytest.raises(RecipeError, match="leaves out the tools; use a template that writes them"):
            ChatTemplate(text=PLAIN).conversation(*messages_of({"messages": messages(), "tools": tools}))
    for tools, message in (
        ("add", "tools is a text that is not JSON"),
        ({"name": "add"}, "tools is {'name': 'add'}; expected a list of objects"),
    ):
        with pytest.raises(RecipeError, match=message):
            messages_of({"messages": messages(), "tools": tools})
    with pytest.raises(RecipeError, match=r"leaves out the tool_calls of turn 3, so .*; use a template that writes it"):
        ChatTemplate(text=PLAIN).conversation(said)


def test_alpacas_records_and_lists_as_texts_of_json_are_conversations():
    want = messages([("user", "Sum up\nA text."), ("assistant", "Text.")])
    assert messages_of({"instruction": "Sum up", "input": "A text.", "output": "Text."}) == (want, None)
    want = messages([("user", "Hi"), ("assistant", "Yo")])
    assert messages_of({"instruction": "Hi", "input": "", "output": "Yo"})[0] == want
    for key in ("messages", "conversations"):
        assert messages_of({key: json.dumps(messages()), "tools": '[{"name": "f"}]'}) == (messages(), [{"name": "f"}])
    calls = [{"name": "f", "arguments": {"x": 1}}]
    said = [*messages(SAID[:1]), {"role": "assistant", "content": "", "tool_calls": json.dumps(calls)}]
    assert messages_of({"messages": said})[0][1]["tool_calls"] == calls
    with pytest.raises(RecipeError, match=r"input is a list; expected a text"):
        messages_of({"instruction": "Hi", "input": [1], "output": "Yo"})


THINKS = CHATML.replace(
    "message['content'] +",
    "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '') + message['content'] +",
)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "refusal", "function_call"])
def test_what_the_assistant_says_is_written_by_the_template_or_refused(name, tmp_path):
    thought = [*messages(SAID[:1]), {"role": "assistant", "content": "4", name: "2 and 2"}]
    file = tmp_path / "chat.jsonl"

    def texts(said, template, reading):
        file.write_text(json.dumps(said) + "\n" + json.dumps({"messages": messages()}) + "\n")
        return [text for text, _ in ChatSource(inputs=(str(file),), template=template, reading=reading).conversations()]

    message = rf"chat\.jsonl:1: the chat template leaves out the {name} of turn 2, so the model would not learn it; use a template that writes it"
    with pytest.raises(RecipeError, match=message):
        texts({"messages": thought}, TEMPLATES["chatml"], Reading())
    if name == "reasoning_content":
        assert (
            "<think>2 and 2</think>4<|im_end|>" in texts({"messages": thought}, ChatTemplate(text=THINKS), Reading())[0]
        )
        inside = [*messages(SAID[:1]), {"role": "assistant", "content": "<think>2 and 2</think>4"}]
        # as the error says
        assert "<think>2 and 2</think>4<|im_end|>" in texts({"messages": inside}, TEMPLATES["chatml"], Reading())[0]
        uncounted = [*thought[:1], {**thought[1], "weight": 0}, *messages(SAID[2:])]
        assert texts({"messages": uncounted}, TEMPLATES["chatml"], Reading()), "its tokens are not learned"
    message = rf"{name} is beside prompt, where no template reads it; write it into a turn of the assistant"
    with pytest.raises(RecipeError, match=message):
        texts({"prompt": "Q", "completion": "A", name: "T"}, TEMPLATES["chatml"], Reading())
    reading = Reading(skip=True)
    assert len(texts({"messages": thought}, TEMPLATES["chatml"], reading)) == 1
    assert next(reading.notes()).startswith("skipped 1 of 2 rows of the data")


def test_fields_that_no_template_reads_are_named_once(tmp_path):
    rows = [
        {
            "id": 1,
            "messages": [{**turn_, "name": "Ann", "time": 5} for turn_ in messages()],
            "source": "web",
            "empty": None,
        }
    ] * 3
    for name, template, unused in (
        ("all", CHATML, "id, name, source, time"),
        ("some", "{{ messages[0].name }}" + CHATML, "id, source, time"),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = ChatSource(inputs=(str(tmp_path / f"{name}.jsonl"),), template=ChatTemplate(text=template))
        assert len(list(source.conversations())) == 3
        message = (
            f"nothing reads these fields of the data, so they are not trained on: {unused} (first in "
            f"{tmp_path / name}.jsonl:1)"
        )
        assert list(source.reading.notes()) == [message]
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = ChatSource(inputs=(str(tmp_path / "a.parquet"),), template=ChatTemplate(text=CHATML))
    assert len(list(source.conversations())) == 3
    assert "not trained on: empty, id, name, source, time" in next(source.reading.notes())


@pytest.mark.parametrize(
    "line,message",
    [
        ('{"messages": [', "is not JSON"),
        ('{"messages": [{"role": "assistant"}]}', r"turn 1 \(assistant\) has no content; .*: add content"),
        ('{"messages": "x"}', "messages is a text that is not JSON .*; expected a list of objects"),
        (
            '{"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]}',
            "turn 1 .* has the part .*image_url.*remove the others",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}',
            "no token of the conversation would count .*another template",
        ),
        ('{"messages": [{"role": "assitant", "content": "x"}]}', "turn 1 has role 'assitant'; write assistant"),
        (
            '{"system": "S", "messages": [{"role": "system", "content": "T"}]}',
            "turn 1 is the system's, .*; keep one of the two",
        ),
        (
            '{"text": "x"}',
            "there are .*'text'.*; expected messages, conversations, prompt and completion, or instruction and output",
        ),
        ("[1]", "got a list; expected an object"),
    ],
)
def test_what_is_no_conversation_is_told_with_file_and_line(line, message, tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages()}) + "\n" + line + "\n")
    with pytest.raises(RecipeError, match=rf"chat\.jsonl:2:? {message}"):
        list(ChatSource(inputs=(str(file),), template=TEMPLATES["chatml"]).conversations())


def test_best_fit_cuts_no_document_that_fits(tmp_path):
    chance = random.Random(0)
    for case in range(30):
        length, count = chance.randint(1, 40), chance.randint(1, 60)
        written = [[chance.randint(1, 99) for _ in range(chance.randint(0, 2 * length))] + [0] for _ in range(count)]
        file = write_tokens(tmp_path / f"{case}.bin", written, vocab_size=100, eos_id=0)
        if file.tokens == file.documents:
            continue  # of empty documents alone there is nothing to predict
        samples = PackedTokens(file, length, packing="best_fit")
        batch = samples.__getitems__(range(len(samples)))
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        positions = (
            batch["position_ids"].numpy() if "position_ids" in batch else np.broadcast_to(np.arange(length), ids.shape)
        )
        found, whole = [], []
        for row in range(len(samples)):
            (used,) = np.nonzero(labels[row] != -100)
            starts = [at for at in used.tolist() if at == 0 or positions[row, at] == 0]
            for at, to in zip(starts, [*starts[1:], len(used)]):
                part = [int(ids[row, at]), *labels[row, at:to].tolist()]
                found += part[1:]
                whole += [tuple(part)] if to - at < length else []
        assert sorted(found) == sorted(id_ for message in written for id_ in message[1:])
        # a document that fits was cut
        assert not {tuple(message) for message in written if 1 < len(message) <= length} - set(whole)
        assert samples.padding == pytest.approx(float((labels == -100).mean()))
        assert f"{samples.padding:.1%} padding" in str(samples)
    small = write_tokens(tmp_path / "small.bin", [[1] * size + [0] for size in (6, 4, 3, 3)], vocab_size=100, eos_id=0)
    samples = PackedTokens(small, 8, packing="best_fit")
    assert (len(samples), samples.padding) == (3, pytest.approx(1 / 3))


def test_parquet_and_arrow_are_read_by_columns_as_a_stream(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"{place} " + "x" * 2000 for place in range(4000)]
    table = arrow.table({"text": texts, "label": list(range(4000)), "more": ["y" * 4000] * 4000})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=500, compression="none")
    (tmp_path / "saved").mkdir()
    with (
        arrow.OSFile(str(tmp_path / "saved/data-00000-of-00001.arrow"), "wb") as file,
        arrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=500)
    (tmp_path / "saved/cache-1.arrow").write_bytes(b"what datasets keeps")
    (tmp_path / "saved/state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    with arrow.OSFile(str(tmp_path / "b.arrow"), "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "saved", "b.arrow"):
        most, before = 0, arrow.total_allocated_bytes()
        for document, want in zip(TextSource(inputs=(str(tmp_path / name),)).documents(), texts, strict=True):
            assert document == want
            most = max(most, arrow.total_allocated_bytes() - before)
        assert most < 4 << 20, f"{name}: {most} bytes were held at once"
    (tmp_path / "b.txt").write_text("not a table")
    assert TextSource(inputs=(str(tmp_path),), suffixes=(".parquet",)).files() == [tmp_path / "a.parquet"]
    with pytest.raises(RecipeError, match=r"b.txt does not end in .parquet; rename it"):
        TextSource(inputs=(f"{tmp_path}/b.t*",), suffixes=(".parquet",)).files()
    sizes = []
    with (tmp_path / "cut.arrow").open("wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        for place in range(3):
            writer.write_table(table.slice(place, 1))
            file.flush()
            sizes.append(file.tell())
    assert len(list(TextSource(inputs=(str(tmp_path / "cut.arrow"),)).documents())) == 3
    for size, message in ((sizes[1], "it was cut, and rows are missing"), (sizes[1] - 40, "it is damaged")):
        (tmp_path / "cut.arrow").write_bytes((tmp_path / "cut.arrow").read_bytes()[:size])
        with pytest.raises(RecipeError, match=rf"cut.arrow .*{message}"):
            list(TextSource(inputs=(str(tmp_path / "cut.arrow"),)).documents())
    with pytest.raises(RecipeError, match=r"a.parquet:1: there are \['label', 'more', 'text'\]; expected messages"):
        list(ChatSource(inputs=(str(tmp_path / "a.parquet"),), template=TEMPLATES["chatml"]).conversations())
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(RecipeError, match=r"broken.parquet cannot be read as parquet"):
        list(TextSource(inputs=(str(tmp_path / "broken.parquet"),)).documents())
    calls = [{"role": "assistant", "tool_calls": [{"name": name, "arguments": {name: 1}}]} for name in ("f", "g")]
    rows = [
        {"messages": messages(), "noise": 1},
        *({"messages": [*messages(SAID[:1]), call], "noise": 2} for call in calls),
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines, table = (
        list(ChatSource(inputs=(str(tmp_path / name),), template=TEMPLATES["chatml"]).conversations())
        for name in ("chat.jsonl", "chat.parquet")
    )
    # a table adds the keys of other rows
    assert table == lines and '{"name": "f", "arguments": {"f": 1}}' in lines[1][0]
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    (tmp_path / "saved/train").mkdir()
    with pytest.raises(RecipeError, match=r"several splits \(train\); name one of them"):
        TextSource(inputs=(str(tmp_path / "saved"),)).files()
