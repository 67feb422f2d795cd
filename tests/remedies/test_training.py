"""Rows of `training`: see `tests/remedies/rows.py`."""

import importlib
import itertools
import json
import shutil
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from torch import nn

from meshpar import ContextParallel, ExpertsLayout, FullyShard, ModelLayout, Plan, TensorParallel
from meshpar.training.adamw_and_schedules import Schedule, check_elementwise
from meshpar.training.chat import ChatSource
from meshpar.training.data import Batches, LoaderSettings
from meshpar.training.evaluation import Samples
from meshpar.training.examples import RecordSource, prepare_examples
from meshpar.training.experts import balance_problems
from meshpar.training.lora import LoRA
from meshpar.training.objectives import teacher_problems
from meshpar.training.samples import MixedSamples, PackedTokens, tokenizers_problem
from meshpar.training.settings import TrainSettings
from meshpar.training.template import TEMPLATES, ChatTemplate, chat_template
from meshpar.training.text import Reading, TextSource, as_lines
from meshpar.training.tokenizer import TextTokenizer, byte_tokenizer, load_tokenizer, train_bpe
from meshpar.training.tokens import TokenFile, prepare_tokenizer, prepare_tokens, write_tokens
from tests.remedies.rows import Row, Tested, in_one_process
from tests.support.plans import transformer

pytest.importorskip("transformers")

ASKED, SAID = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}
GOOD = {"messages": [ASKED, SAID]}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}
TOOLS = [{"name": "add"}]
MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% "
    "endif %}"
)
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% "
    "endif %}"
)
THINKS = PLAIN.replace("{{ m.content }}", "{{ m.thinking or '' }}{{ m.content }}")
TWICE = [ASKED, {"role": "assistant", "content": "AB"}, ASKED, {"role": "assistant", "content": "CD"}]
BEHIND_LAST = f"{{% for m in messages %}}{{% if loop.last %}}{MARKED}{{% endif %}}{{% endfor %}}"
TRIMMED = f"{{% for m in messages %}}{{% filter trim %}}{MARKED}{{% endfilter %}}{{% endfor %}}"
ENDED = PLAIN.replace("\n", "<end>\n")
SHARDED, SPLIT = Plan("dp_shard=4", [FullyShard()]), Plan("dp_shard=2,tp=2", [TensorParallel(), FullyShard()])
TWO_BODIES = ({"text": "a", "body": "a"}, {"body": "b"})
SPACED = [ASKED, SAID | {"content": " A "}]
WIDE = "é".encode("latin-1")


@cache
def scratch() -> TemporaryDirectory:
    return TemporaryDirectory()


def file(name, content):
    """Write a file, and return its path."""
    path = Path(scratch().name) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def labels(*records, template=TEMPLATES["chatml"]):
    """How many turns of each record, or of each list of messages, are learned."""
    records = [{"messages": record} if isinstance(record, list) else record for record in records]
    template = ChatTemplate(text=template) if isinstance(template, str) else template
    source = ChatSource(inputs=(file("chat.jsonl", lines(*records)),), template=template)
    return [len(spans) for _, spans in source.conversations()]


def labelled(text, messages=GOOD["messages"], tools=None):
    """How many turns a template marks."""
    return len(ChatTemplate(text=text).conversation(messages, tools)[1])


def texts(name, content, **options):
    return list(TextSource(inputs=(file(name, content),), **options).documents())


def pairs(record, **options):
    options = {"kind": "pairs", "output_field": "target"} | options
    return list(RecordSource(inputs=(file("pairs.jsonl", lines(record)),), **options).records())


def bpe(folder, *, configured=True):
    """The folder of a trained tokenizer."""
    path = Path(scratch().name) / folder
    train_bpe(["some text"], 258).save(path)
    if not configured:
        (path / "tokenizer_config.json").unlink()
    return path


def of_transformers():
    from transformers import PreTrainedTokenizerFast

    path = Path(scratch().name) / "theirs"
    fast = train_bpe(["some text"], 258).fast
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|endoftext|>").save_pretrained(path)
    return path


def token_file(ids=(1, 2, 0), vocab_size=3, **fields):
    """A file of tokens, with what its description says otherwise."""
    path = Path(scratch().name) / "ids.bin"
    path.with_suffix(".marks").unlink(missing_ok=True)
    write_tokens(path, [list(ids)], vocab_size=max(vocab_size, *ids) + 1, eos_id=0)
    sidecar = path.with_suffix(".json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"vocab_size": vocab_size} | fields))
    return path


def marked_file(marks):
    path = token_file(marked=True)
    path.with_suffix(".marks").write_bytes(marks)
    return path


def classes(*records):
    source = RecordSource(inputs=(file("labels.jsonl", lines(*records)),), kind="labels", output_field="label")
    shutil.rmtree(Path(scratch().name) / "cache", ignore_errors=True)
    made = prepare_examples(source, byte_tokenizer(), Path(scratch().name) / "cache")
    return len(made.train.classes)


def checked(**options):
    found = TokenFile.open(token_file(**options))
    found.check_ids(found.ids())


def tokenized(text, **options):
    shutil.rmtree(Path(scratch().name) / "cache", ignore_errors=True)
    source = TextSource(inputs=(file("text.txt", text),))
    return prepare_tokens(source, byte_tokenizer(), Path(scratch().name) / "cache", **options).train.tokens > 1


def validated(*records):
    shutil.rmtree(Path(scratch().name) / "cache", ignore_errors=True)
    source = ChatSource(inputs=(file("chat.jsonl", lines(*records)),), template=ChatTemplate(text=PLAIN))
    prepared = prepare_tokens(source, byte_tokenizer(), Path(scratch().name) / "cache", validation_fraction=0.2)
    return prepared.validation.tokens > 1


def arrow_file(*, whole):
    import pyarrow as arrow

    path = Path(scratch().name) / "rows.arrow"
    table = arrow.table({"text": ["a", "b"]})
    with path.open("wb") as out, arrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
        size = out.tell()
    if not whole:
        path.write_bytes(path.read_bytes()[:size])
    return list(TextSource(inputs=(str(path),)).documents())


def packed(count=9, length=2, **fields):
    return PackedTokens(TokenFile.open(token_file(ids=range(count), vocab_size=count, **fields)), length)


def mixed(epochs):
    rows = Batches(MixedSamples({"one": packed(), "two": packed()}, [1, 1], [epochs, epochs]), micro_batch=2)
    return len(list(itertools.islice(rows, 6)))


def moved(**now):
    """Whether the position in some data is one in this data as well."""
    state = Batches(packed(), micro_batch=2, seed=1).state_dict()
    again = Batches(packed(now.get("count", 9), now.get("length", 2)), micro_batch=2, seed=now.get("seed", 1))
    again.load_state_dict(state)
    return again.state_dict() == state


def elementwise(kind, **options):
    check_elementwise(
        lambda module: kind(module if kind.__module__.startswith("meshpar") else module.parameters(), **options)
    )


class Routed(nn.Module):
    """A layer of two experts, and a router with a bias."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 2), nn.Module()
        self.experts.up = nn.Parameter(torch.zeros(2, 4, 4))
        self.register_buffer("offset", torch.zeros(2, dtype=dtype))


EXPERTS = ModelLayout(experts=("experts",))
BALANCED = ModelLayout(experts=ExpertsLayout(("experts",), routers=("router",), router_bias=("offset",)))


def balanced(rate=0.0, loss=0.0, layout=BALANCED, module=None):
    module = module or Routed()
    return list(balance_problems(module, layout or module.meshpar_layout(), rate, loss))


def printed_command():
    """Run the command that the message prints, and read the file that it writes."""
    path = Path(file("array.json", '[{"text": "a"}]'))
    subprocess.run(as_lines(path).partition("with: ")[2].replace("python", sys.executable, 1), shell=True, check=True)
    return list(TextSource(inputs=(str(path.with_suffix(".jsonl")),)).documents())


def packed_by_zstd(*, unpacked):
    zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    content = b'{"text": "a"}'
    with mock.patch("importlib.import_module", side_effect=ModuleNotFoundError):
        return texts("z.jsonl", content) if unpacked else texts("z.jsonl.zst", zstd.compress(content))


def shared(plan, student):
    return list(teacher_problems(plan, transformer(), student, 4))


ROWS = [
    Row("write one object a line with: python -c", result=["a"])
    .refuses(lambda: texts("array.json", '[{"text": "a"}]', suffixes=(".jsonl",)))
    .helps("write one object a line with: python", printed_command),
    Row("import json; [print(json.dumps(each))", result=["a"])
    .refuses(lambda: texts("array.json", '[{"text": "a"}]', suffixes=(".jsonl",)))
    .helps("import json", printed_command),
    Row("{} is packed by zstd", result=["a"])
    .refuses(lambda: packed_by_zstd(unpacked=False))
    .helps("unpack it", lambda: packed_by_zstd(unpacked=True)),
    Row("the data has no sample; give at least two tokens", result=1)
    .refuses(lambda: Batches(packed(1), micro_batch=1))
    .helps("give at least two tokens", lambda: len(Batches(packed(2, 1), micro_batch=1).samples)),
    Row("grow: expected places of at least 1 and sizes that are multiples of {} x {} data ranks", result=[4, 4])
    .refuses(lambda: Batches(packed(), micro_batch=2, data_size=2, grow={1: 6}))
    .helps(
        "use other sizes or a smaller micro_batch",
        lambda: [
            len(Batches(packed(), micro_batch=2, data_size=2, grow={1: 8}).samples),
            len(Batches(packed(), micro_batch=1, data_size=2, grow={1: 6}).samples),
        ],
    ),
    Row("the sources of the mix are used up after {} steps", result=6)
    .refuses(lambda: str(mixed(1)))
    .helps("raise their epochs", lambda: mixed(2)),
    Row("the data is a mix of sources, and samples of lost replicas cannot return to its order")
    .refuses(lambda: list(Batches(MixedSamples({"a": packed()}, [1], [None]), micro_batch=1).share_problems()))
    .helps("train on one source", lambda: list(Batches(packed(), micro_batch=1).share_problems())),
    Row("the batch grows, and replicas share steps of one size")
    .refuses(lambda: list(Batches(packed(), micro_batch=1, grow={2: 2}).share_problems()))
    .helps("leave data.grow out", lambda: list(Batches(packed(), micro_batch=1).share_problems())),
    Row("workers={} read ahead, and which samples come next depends on the replicas")
    .refuses(lambda: list(Batches(packed(), micro_batch=1, loader=LoaderSettings(workers=1)).share_problems()))
    .helps(
        "set workers=0",
        lambda: list(Batches(packed(), micro_batch=1, loader=LoaderSettings(workers=0)).share_problems()),
    ),
    Row("the saved position is one in other data ({})", result=True)
    .refuses(lambda: str(moved(seed=2)))
    .helps("resume with the same text, tokenizer, sequence length and seed", moved),
    Row("the optimizer {} cannot be tried on a few numbers, whole and as shards ({})", result=None)
    .refuses(lambda: elementwise(torch.optim.SparseAdam))
    .helps("use another, such as torch.optim.AdamW", lambda: elementwise(torch.optim.AdamW)),
    Row("balance_rate={} moves a bias (E,) beside each router, and {} has {} for {} layers of experts")
    .refuses(lambda: balanced(0.1, layout=EXPERTS))
    .helps(
        "use balance_loss, a model with such biases (TransformerConfig(shared_experts=1)",
        lambda: balanced(0.0, 0.1),
        lambda: balanced(0.1, layout=None, module=transformer(experts=4, qk_norm=True, shared_experts=1)),
    )
    .helps("name them in ExpertsLayout(router_bias=...)", lambda: balanced(0.1, layout=BALANCED)),
    Row("balance_rate={} needs biases of routers in float32, got {}")
    .refuses(lambda: balanced(0.1, module=Routed(torch.bfloat16)))
    .helps("keep them in float32", lambda: balanced(0.1, module=Routed(torch.float32))),
    Row("balance_rate={} changes biases of frozen experts, as with adapters")
    .refuses(lambda: balanced(0.1, module=Routed().requires_grad_(False)))
    .helps("set it to 0", lambda: balanced(0.0, module=Routed().requires_grad_(False))),
    Row("balance_loss={} needs the logits of each router, and the layout of {} names {} routers")
    .refuses(lambda: balanced(0.0, 0.1, EXPERTS))
    .helps("name the modules that return them in ExpertsLayout(routers=...)", lambda: balanced(0.0, 0.1))
    .helps("set balance_loss to 0", lambda: balanced(0.0, 0.0, EXPERTS)),
    Row("the student's mesh splits positions over {}, which the teacher would see as whole texts")
    .refuses(lambda: shared(SHARDED, Plan("dp_shard=2,cp=2", [ContextParallel(), FullyShard()])))
    .helps("leave the axis out", lambda: shared(SHARDED, SHARDED)),
    Row("the teacher's mesh {} lets ranks {} work on one batch, but the student's mesh {} gives them {} different ones")
    .refuses(lambda: shared(SPLIT, SHARDED))
    .helps("shard the teacher over data axes (dp_shard)", lambda: shared(SHARDED, SHARDED))
    .helps("give the student the same tp", lambda: shared(*[SPLIT] * 2)),
    Row("set the length of the training", result=[2, 2, 2])
    .refuses(lambda: TrainSettings())
    .helps(
        "set the length of the training: steps=, epochs= or both",
        lambda: [TrainSettings(steps=2).steps, TrainSettings(epochs=2).epochs, TrainSettings(steps=2, epochs=1).steps],
    ),
    Row("the prompt {} has no token", result=2)
    .refuses(lambda: Samples(byte_tokenizer(), prompts=["a", ""]))
    .helps("give each prompt a text", lambda: len(Samples(byte_tokenizer(), prompts=["a", "b"]).prompts)),
    Row("tokenizer 'bpe' is trained on text, and the input is tokens", result=258)
    .refuses(lambda: prepare_tokenizer("bpe", [], Path(scratch().name) / "cache"))
    .helps(
        "give the tokenizer's folder instead",
        lambda: prepare_tokenizer(str(bpe("given")), [], Path(scratch().name) / "cache").vocab_size,
    ),
    Row(
        "there are {}; expected messages, conversations, prompt and completion, or instruction and output",
        result=[1] * 4,
    )
    .refuses(lambda: labels({"ask": "Q", "reply": "A"}))
    .helps(
        "name them so",
        lambda: labels(
            GOOD,
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            {"prompt": "Q", "completion": "A"},
            {"instruction": "Q", "output": "A"},
        ),
    ),
    Row("{} is beside {}, where no template reads it", result=[1])
    .refuses(lambda: labels({"prompt": "Q", "completion": "A", "thinking": "T"}))
    .helps(
        "write it into a turn of the assistant (in messages)",
        lambda: labels([ASKED, SAID | {"thinking": "T"}], template=THINKS),
    )
    .helps("remove it", lambda: labels({"prompt": "Q", "completion": "A"})),
    Row("turn 1 is the system's, and there is also a system key", result=[1, 1])
    .refuses(lambda: labels({"messages": [SYSTEM, ASKED, SAID], "system": "S"}))
    .helps("keep one of the two", lambda: labels([SYSTEM, ASKED, SAID], {"messages": [ASKED, SAID], "system": "S"})),
    Row("the conversation is empty; expected at least one turn of the assistant", result=[1])
    .refuses(lambda: labels(GOOD, []))
    .helps("remove the line", lambda: labels(GOOD))
    .helps("write its turns", lambda: labels([ASKED, SAID])),
    Row("no turn is the assistant's (roles: {}), so nothing is learned from it", result=[1])
    .refuses(lambda: labels(GOOD, [ASKED, SAID | {"role": "narrator"}]))
    .helps("remove the line", lambda: labels(GOOD))
    .helps("name the assistant's turns role: assistant", lambda: labels([ASKED, SAID])),
    Row("turn {} has no role; it has {}", result=[1, 1])
    .refuses(lambda: labels([{"content": "Q"}, SAID]))
    .helps(
        "add role (or ShareGPT's from): user, assistant, system or tool",
        lambda: labels(
            [SYSTEM, ASKED, SAID, {"role": "tool", "content": "4"}], [{"from": "user", "content": "Q"}, SAID]
        ),
    ),
    Row("turn {} has role {}; write {}", result=[1])
    .refuses(lambda: labels([ASKED, SAID | {"role": "assitant"}]))
    .helps("write {}", lambda: labels([ASKED, SAID]))
    .helps(
        "a role of the template that is spelled otherwise", lambda: labels([ASKED, SAID, ASKED | {"role": "narrator"}])
    ),
    Row("turn {} ({}) has no content; it has {}", result=[1, 1])
    .refuses(lambda: labels([ASKED, {"role": "assistant"}]))
    .helps(
        "add content (or ShareGPT's value)", lambda: labels([ASKED, SAID], [ASKED, {"role": "assistant", "value": "A"}])
    )
    .helps("tool_calls", lambda: labels(*[[ASKED, CALL]] * 2)),
    Row("turn {} ({}) has the part {}; expected text, or parts of type text", result=[1])
    .refuses(
        lambda: labels(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "image_url"}]}, SAID]}
        )
    )
    .helps(
        "remove the others",
        lambda: labels({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, SAID]}),
    ),
    Row("{}:{} is not JSON: {}", result=["a"])
    .refuses(lambda: texts("a.jsonl", '{"text": "a"}\n{"text":\n "b"}\n'))
    .helps("write one object a line", lambda: texts("a.jsonl", '{"text": "a"}\n{"text": "b"}\n')[:1])
    .helps("remove the line", lambda: texts("a.jsonl", '{"text": "a"}\n')),
    Row("{}:{} has half of a surrogate pair ({}); remove it", result=["a"])
    .refuses(lambda: texts("a.jsonl", '{"text": "a\\ud83d"}\n'))
    .helps("remove it", lambda: texts("a.jsonl", '{"text": "a"}\n')),
    Row("{}:{} is nested too deeply; remove the line", result=["a"])
    .refuses(lambda: texts("a.jsonl", '{"text": "a"}\n' + "[" * 100_000 + "\n"))
    .helps("remove the line", lambda: texts("a.jsonl", '{"text": "a"}\n')),
    Row("{}:{} is not UTF-8 text (byte {} of the line: {}); convert it", result=["é"])
    .refuses(lambda: texts("a.jsonl", b'{"text": "' + WIDE + b'"}\n'))
    .helps("convert it", lambda: texts("a.jsonl", b'{"text": "' + WIDE.decode("latin-1").encode() + b'"}\n')),
    Row("{} is not UTF-8 text behind line {} ({}); convert it", result=["é"])
    .refuses(lambda: texts("a.csv", b"text\n" + WIDE + b"\n"))
    .helps("convert it", lambda: texts("a.csv", b"text\n" + WIDE.decode("latin-1").encode() + b"\n")),
    Row("{} ends without Arrow's end of a stream: it was cut, and rows are missing", result=["a", "b"])
    .refuses(lambda: arrow_file(whole=False))
    .helps("copy", lambda: arrow_file(whole=True))
    .helps("write it again", lambda: arrow_file(whole=True)),
    Row("{}:{} has no text under {}; it has {}: name the key with data.field", result=["a"])
    .refuses(lambda: texts("a.jsonl", lines(*TWO_BODIES)))
    .helps(
        "name the key with data.field, remove the record",
        lambda: [
            *texts("a.jsonl", lines(*TWO_BODIES), field="body")[:1],
            *texts("a.jsonl", lines({"text": "a", "body": "a"})),
        ][:1],
    )
    .helps(
        "skip such records with data.bad_rows: skip",
        lambda: texts("a.jsonl", lines(*TWO_BODIES), reading=Reading(skip=True)),
    ),
    Row("{} has no text under {}; it has {}; name the key with data.field", result=[["a", "b"]])
    .refuses(lambda: pairs({"body": "a", "target": "b"}))
    .helps("name the key with data.field", lambda: pairs({"body": "a", "target": "b"}, field="body")),
    Row("{} has no {} under {}; it has {}; name the key with data.{}", result=[["a", "b"]])
    .refuses(lambda: pairs({"text": "a", "sum": "b"}))
    .helps("name the key with data.{}", lambda: pairs({"text": "a", "sum": "b"}, output_field="sum")),
    Row("the chat template calls strftime_now with something else than a text", result="{{ '02 Jan 2026' }}")
    .refuses(lambda: ChatTemplate(text="{{ strftime_now(f) }}").on(datetime(2026, 1, 2)))
    .helps(
        "write the format into the call, strftime_now('{} %b %Y')",
        lambda: ChatTemplate(text="{{ strftime_now('%d %b %Y') }}").on(datetime(2026, 1, 2)).text,
    ),
    Row("the chat template leaves out the tools", result=1)
    .refuses(lambda: labelled(PLAIN, tools=TOOLS))
    .helps(
        "use a template that writes them (data.template: chatml)",
        lambda: labelled(TEMPLATES["chatml"].text, [SYSTEM, ASKED, SAID], TOOLS),
    )
    .helps("remove tools", lambda: labelled(PLAIN)),
    Row("the chat template leaves out the {} of turn {}, so the model would not learn it", result=1)
    .refuses(lambda: labelled(PLAIN, [ASKED, CALL]))
    .helps("use a template that writes it{}", lambda: labelled(TEMPLATES["chatml"].text, [ASKED, CALL]))
    .helps("remove it", lambda: labelled(PLAIN, [ASKED, SAID])),
    Row("the chat template writes {} answers of {}, so those of weight 0 cannot be identified", result=1)
    .refuses(lambda: labelled(BEHIND_LAST, [*TWICE[:1], TWICE[1] | {"weight": 0}, *TWICE[2:]]))
    .helps("remove weight", lambda: labelled(BEHIND_LAST, TWICE)),
    Row("no token of the conversation would count as a label, because the chat template writes nothing", result=[1])
    .refuses(lambda: labels(GOOD, [ASKED, SAID | {"content": ""}], template=PLAIN))
    .helps("remove the conversation", lambda: labels(GOOD, template=PLAIN)[:1])
    .helps("use another template", lambda: labels([ASKED, SAID | {"content": ""}])),
    Row("the tokenizer has no token {}, which the chat template writes", result=None)
    .refuses(lambda: TEMPLATES["llama3"].check("<|eot_id|>", byte_tokenizer().fast.token_to_id))
    .helps(
        "use the template of the tokenizer or a file",
        lambda: chat_template(
            file("own.jinja", PLAIN.replace("{{ m.content }}", "{{ m.content }}<|endoftext|>")), byte_tokenizer()
        ).check("<|endoftext|>", byte_tokenizer().fast.token_to_id),
    )
    .helps(
        "write tokenizer: bpe, which gets them",
        lambda: TEMPLATES["llama3"].check(
            "<|eot_id|>", train_bpe(["text"], 261, TEMPLATES["llama3"].special).fast.token_to_id
        ),
    ),
    Tested("block of the chat template ends before {}")
    .by("tests/training/test_chat.py::test_forms_of_conversations_and_tools_pass_through")
    .helps("write the token inside the block, in a template of your own", "<|endoftext|>{% endgeneration %}"),
    Row("the chat template writes no {} behind the assistant's text ({})", result=None)
    .refuses(lambda: ChatTemplate(text=ENDED).check("<|endoftext|>", None))
    .helps("set data.eos to the token that ends a turn", lambda: ChatTemplate(text=ENDED).check("<end>", None))
    .helps(
        "write {{ eos_token }} behind it in a template of your own",
        lambda: ChatTemplate(
            text=PLAIN.replace("\n", "{{ eos_token }}\n"), variables={"eos_token": "<|endoftext|>"}
        ).check("<|endoftext|>", None),
    ),
    Row("blocks of the chat template cannot be found in the text", result=1)
    .refuses(lambda: str(labelled(TRIMMED, SPACED)))
    .helps(
        "put the blocks outside of these",
        lambda: labelled(
            f"{{% for m in messages %}}{{% filter trim %}} {{% endfilter %}}{MARKED}{{% endfor %}}", SPACED
        ),
    ),
    Row("turn {}, the assistant's, cannot be found in the text, because the chat template {}", result=[2, 2])
    .refuses(lambda: labels(TWICE, template=PLAIN.partition("{% if add")[0]))
    .helps(
        "mark the assistant's text with {% generation %} in the template",
        lambda: labels(TWICE, TWICE, template=f"{{% for m in messages %}}<{{{{ m.role }}}}>{MARKED}{{% endfor %}}"),
    )
    .helps(
        "give data.template: chatml or llama3",
        lambda: labels(TWICE, template=TEMPLATES["chatml"]) + labels(TWICE, template=TEMPLATES["llama3"]),
    ),
    Row("the template llama3 has no tool", result=1)
    .refuses(lambda: labelled(TEMPLATES["llama3"].text, [ASKED, CALL]))
    .helps(
        "use the one of the tokenizer') }}", lambda: labelled(TEMPLATES["chatml"].text, [SYSTEM, ASKED, CALL], TOOLS)
    ),
    Row("data.template: {} is not UTF-8 text ({}); convert it", result="é")
    .refuses(lambda: chat_template(file("t.jinja", WIDE), None))
    .helps("convert it", lambda: chat_template(file("t.jinja", WIDE.decode("latin-1")), None).text),
    Row("the tokenizer has no chat template; write data.template: {}", result=[True, True])
    .refuses(lambda: chat_template(None, byte_tokenizer()))
    .helps(
        "write data.template: {}",
        lambda: [chat_template(name, byte_tokenizer()) is not None for name in ("chatml", "llama3")],
    )
    .helps("a file with one", lambda: [chat_template(file("t.jinja", PLAIN), byte_tokenizer()).text == PLAIN] * 2),
    Row("separator is empty; drop it to make each file one document", result=["a b"])
    .refuses(lambda: texts("a.txt", "a b", separator=""))
    .helps("drop it to make each file one document", lambda: texts("a.txt", "a b")),
    Row("; rename it, or write another source (files: text)", result=1)
    .refuses(lambda: texts("a.text", '{"text": "a"}', suffixes=(".jsonl",)))
    .helps("rename it", lambda: len(texts("a.jsonl", '{"text": "a"}', suffixes=(".jsonl",))))
    .helps("write another source (files: text)", lambda: len(texts("a.text", '{"text": "a"}'))),
    Row("{} is a folder of datasets with several splits ({}); name one of them", result=1)
    .refuses(lambda: TextSource(inputs=(str(Path(file("splits/dataset_dict.json", "{}")).parent),)).files())
    .helps(
        "name one of them: {}/train",
        lambda: len(TextSource(inputs=(str(Path(file("splits/train/a.txt", "a")).parent),)).files()),
    ),
    Row("{} is not UTF-8 text ({}); convert it or remove it from the inputs", result={"é"})
    .refuses(lambda: list(TextSource(inputs=(file("a.txt", "é"), file("b.txt", WIDE))).documents()))
    .helps("convert it", lambda: set(TextSource(inputs=(file("a.txt", "é"), file("b.txt", "é"))).documents()))
    .helps("remove it from the inputs", lambda: set(TextSource(inputs=(file("a.txt", "é"),)).documents())),
    Row("the tokenizer has no token {} to end a document with", result="a")
    .refuses(lambda: TextTokenizer(byte_tokenizer().fast, eos="</s>"))
    .helps("set data.eos to one of its tokens", lambda: TextTokenizer(byte_tokenizer().fast, eos="a").eos),
    Row("the text gives a vocabulary of {}; expected {}", result=True)
    .refuses(lambda: train_bpe(["ab"], 300))
    .helps("lower vocab_size", lambda: train_bpe(["ab"], 258).vocab_size >= 258)
    .helps(
        "give more text", lambda: train_bpe([" ".join(f"{place}" * 3 for place in range(99))], 300).vocab_size == 300
    ),
    Row("there is no tokenizer.json in {}", result=258)
    .refuses(lambda: load_tokenizer(scratch().name))
    .helps(
        "save a fast tokenizer there with transformers' save_pretrained",
        lambda: load_tokenizer(of_transformers()).vocab_size,
    )
    .helps("with meshpar", lambda: load_tokenizer(bpe("ours")).vocab_size),
    Row("tokenizer_config.json in {} has no eos_token", result="<|endoftext|>")
    .refuses(lambda: load_tokenizer(bpe("bare", configured=False)))
    .helps(
        "set data.eos to the token that ends a document",
        lambda: load_tokenizer(bpe("bare", configured=False), eos="<|endoftext|>").eos,
    ),
    Row("{} is missing or has not {} bytes, one for each id of {}; copy it", result=3)
    .refuses(lambda: TokenFile.open(token_file(marked=True)))
    .helps("copy it", lambda: TokenFile.open(marked_file(b"\1\1\1")).tokens),
    Row("{} has id {} and a vocab_size of {} in the .json beside it", result=None)
    .refuses(lambda: checked(ids=(7, 0)))
    .helps("correct it", lambda: checked(ids=(7, 0), vocab_size=8))
    .helps("write the tokens again with their own tokenizer", lambda: checked(ids=(2, 0))),
    Row("the text of {} has {} tokens; expected at least 2", result=True)
    .refuses(lambda: tokenized(" "))
    .helps("give more text{}", lambda: tokenized("some text")),
    Row("no token of {} counts as a label, so nothing would be learned from it", result=True)
    .refuses(lambda: validated({"prompt": "Q" * 99, "completion": "A"}))
    .helps("give more data", lambda: validated(*[{"prompt": "Q", "completion": "A" * 9}] * 20)),
    Row("{} tokens are too few to reserve {} of them for validation", result=True)
    .refuses(lambda: tokenized("ab", validation_fraction=0.5))
    .helps("give more text", lambda: tokenized("some text", validation_fraction=0.5)),
    Row("{} give {}; give some{}{}", result=2)
    .refuses(lambda: str(classes({"text": "a", "label": 1})))
    .helps("give some{}{}", lambda: classes({"text": "a", "label": 1}, {"text": "b", "label": 2})),
    Row("packing='best_fit' keeps documents whole, and documents='joined' makes one text of them", result=[1, 1])
    .refuses(lambda: PackedTokens(TokenFile.open(token_file()), 2, packing="best_fit", documents="joined"))
    .helps(
        "use one of the two",
        lambda: [
            len(PackedTokens(TokenFile.open(token_file()), 2, packing="best_fit")),
            len(PackedTokens(TokenFile.open(token_file()), 2, documents="joined")),
        ],
    ),
    Row("the sources of a mix are of different tokenizers: {}", result="")
    .refuses(lambda: tokenizers_problem({"a": (8, 0), "b": (9, 0)}))
    .helps("tokenize them with one", lambda: tokenizers_problem({"a": (8, 0), "b": (8, 0)})),
    Row(
        "a schedule without steps has no length of its own",
        result=lambda: Schedule(name="cosine", steps=2, warmup_steps=0).factor(1),
    )
    .refuses(lambda: Schedule(name="cosine").factor(1))
    .helps("set steps=", lambda: Schedule(name="cosine", steps=2, warmup_steps=0).factor(1))
    .helps("use schedule.over(steps)", lambda: Schedule(name="cosine", warmup_steps=0).over(2).factor(1)),
    Row("adapters on packed weights are added to the weights and see no input, got dropout {}", result=8)
    .refuses(lambda: LoRA(parameters=("experts.up",), dropout=0.1))
    .helps("set dropout to 0", lambda: LoRA(parameters=("experts.up",), dropout=0).rank)
    .helps("parameters to ()", lambda: LoRA(parameters=(), dropout=0.1).rank),
]


test_the_printed_remedy_helps = in_one_process(ROWS)
