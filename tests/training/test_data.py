"""Text to batches: tokenizers, token files, and every token once an epoch on any mesh."""

import argparse
import gzip
import inspect
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshpar.core.errors import MeshparError, RecipeError
from meshpar.losses.token_loss import IGNORE_INDEX
from meshpar.process.imports import need
from meshpar.process.leftovers import build_once
from meshpar.training import text
from meshpar.training.data import FILLER, Batches, LoaderSettings
from meshpar.training.examples import RecordSource, prepare_examples
from meshpar.training.order import permute
from meshpar.training.samples import PackedTokens
from meshpar.training.text import Reading, TextSource
from meshpar.training.tokenizer import END_OF_TEXT, byte_tokenizer, load_tokenizer, train_bpe
from meshpar.training.tokens import TokenFile, prepare_tokenizer, prepare_tokens, split_tokens, write_tokens
from tests.support.patience import patient
from tests.support.tiers import daily

SAMPLE = "def f(x):\n    return 'héllo' + x  # 中\n"


def token_file(folder: Path, tokens: int) -> TokenFile:
    """Write a file of one document whose id at place i is i; nothing in it ends a document."""
    return write_tokens(folder / f"count-{tokens}.bin", [np.arange(tokens)], vocab_size=1 << 16, eos_id=60_000)


def counted(steps: list[list[dict[str, torch.Tensor]]]) -> list[int]:
    """Return the labels that count, which in ``token_file`` are their places."""
    labels = (label for step in steps for batch in step for label in batch["labels"].flatten().tolist())
    return [label for label in labels if label != IGNORE_INDEX]


def documents_of(*inputs: object, **options: Any) -> list[str]:
    return list(TextSource(inputs=tuple(map(str, inputs)), **options).documents())


# tokenizers


def test_byte_tokenizer_ids_are_the_bytes() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(SAMPLE) == list(SAMPLE.encode())
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (256, 257)


def test_bpe_is_deterministic_and_lossless() -> None:
    documents = [SAMPLE * 20, "for i in range(10):\n    total += i\n" * 20]
    first, second = train_bpe(documents, 290), train_bpe(documents, 290)
    assert first.fingerprint() == second.fingerprint()
    assert first.vocab_size == 290
    assert first.decode(first.encode(SAMPLE)) == SAMPLE
    assert len(first.encode(SAMPLE)) < len(SAMPLE.encode())
    assert first.encode_batch(documents) == [first.encode(document) for document in documents]


GPT4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


@pytest.mark.parametrize("kind", daily(["GPT-2", "GPT-4", "GPT-NeoX"], "GPT-4"))
def test_a_text_that_is_tokenized_in_pieces_has_the_ids_of_the_whole(kind: str, tmp_path: Path) -> None:
    """By GPT-4's way of dividing text into words, and with GPT-NeoX's tokens of several spaces, too."""
    text = inspect.getsource(argparse) + "\n\n\n   \n\t x\r\n\r\n  y\n" + "a b " * 30000 + inspect.getsource(json)
    text += "    'name':          'value',\n" * 2000 + "".join(map(chr, range(0x4E00, 0x9000)))
    (tmp_path / "text.txt").write_bytes(text.encode())
    tokenizer, source = train_bpe([text], 1000), TextSource(inputs=(str(tmp_path / "text.txt"),))
    if kind == "GPT-4":
        before = need("tokenizers").pre_tokenizers
        words = before.Split(need("tokenizers").Regex(GPT4), behavior="isolated")
        as_bytes = before.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.fast.pre_tokenizer = before.Sequence([words, as_bytes])
    if kind == "GPT-NeoX":
        tokenizer.fast.add_tokens([" " * count for count in range(24, 1, -1)])
        tokenizer.vocab_size += 23
    whole = next(iter(source.documents()))
    assert len(whole) > 20 * 8192 and tokenizer.splits_between_words == (kind != "GPT-NeoX")
    found = prepare_tokens(source, tokenizer, tmp_path / "cache").train.ids().tolist()
    assert found == [*tokenizer.encode(whole), tokenizer.eos_id]


def test_bpe_refuses_a_vocabulary_that_cannot_be() -> None:
    with pytest.raises(RecipeError, match="at least 257"):
        train_bpe([SAMPLE], 100)
    with pytest.raises(RecipeError, match="expected 5000: lower vocab_size"):
        train_bpe([SAMPLE], 5000)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_transformers_loads_a_saved_tokenizer(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_tokenizer() if kind == "bytes" else train_bpe([SAMPLE * 30], 280)
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs(SAMPLE)["input_ids"] == tokenizer.encode(SAMPLE)
    assert theirs.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == (END_OF_TEXT, tokenizer.eos_id, tokenizer.vocab_size)


def test_a_loaded_tokenizer_is_saved_with_its_own_files(tmp_path: Path) -> None:
    train_bpe([SAMPLE * 30], 280).save(tmp_path / "one")
    config = json.loads((tmp_path / "one/tokenizer_config.json").read_text()) | {"model_max_length": 77}
    (tmp_path / "one/tokenizer_config.json").write_text(json.dumps(config))
    load_tokenizer(tmp_path / "one").save(tmp_path / "two")
    assert json.loads((tmp_path / "two/tokenizer_config.json").read_text()) == config
    plain = load_tokenizer(tmp_path / "one")
    assert load_tokenizer(tmp_path / "two").fingerprint() == plain.fingerprint()
    saved = json.loads((tmp_path / "one/tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    saved["padding"]["pad_to_multiple_of"] = None
    (tmp_path / "one/tokenizer.json").write_text(json.dumps(saved))
    assert load_tokenizer(tmp_path / "one").encode_batch([SAMPLE, "x"]) == plain.encode_batch([SAMPLE, "x"])


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    train_bpe([SAMPLE * 30], 280).save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(RecipeError, match="has no eos_token"):
        load_tokenizer(tmp_path)
    with pytest.raises(RecipeError, match=r"no token '</s>'"):
        load_tokenizer(tmp_path, eos="</s>")
    with pytest.raises(RecipeError, match="neither 'bytes', 'bpe' nor a folder"):
        prepare_tokenizer("bepe", (), tmp_path)


# text


def test_inputs_are_files_globs_and_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.py", "picture.png"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in TextSource(inputs=(str(tmp_path),)).files()] == ["a.txt", "b.txt", "c.py"]
    files = TextSource(inputs=(f"{tmp_path}/*.txt", f"{tmp_path}/b.txt")).files()
    assert [path.name for path in files] == ["a.txt", "b.txt"]
    assert documents_of(f"{tmp_path}/**/*.py") == ["sub/c.py"]
    with pytest.raises(RecipeError, match="matches no file"):
        TextSource(inputs=(f"{tmp_path}/*.md",)).files()


def test_json_lines_give_a_document_a_line(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"body": "one"}\n\n{"body": "two\\nlines"}\n')
    assert documents_of(file, field="body") == ["one", "two\nlines"]
    file.write_text("{oops\n")
    with pytest.raises(RecipeError, match=r"lines.jsonl:1 is not JSON"):
        documents_of(file)


def test_csv_and_compressed_files_are_read_by_name(tmp_path: Path) -> None:
    rows = 'text,label\n"two\nlines",1\n"said ""yes""",0\n' + f'"{"long " * 40_000}",1\n'
    (tmp_path / "a.csv").write_text(rows)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(rows.encode("utf-8-sig")))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed", "label": 3}\n'))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"plain"))
    zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    frames = (b'{"text": "first", "label": 3}\n', b'{"text": "frames", "label": 4}\n')
    (tmp_path / "e.jsonl.zst").write_bytes(b"".join(map(zstd.compress, frames)))
    texts = ["two\nlines", 'said "yes"', "long " * 40_000]
    assert documents_of(tmp_path) == [*texts, *texts, "packed", "plain", "first", "frames"]
    found = list(RecordSource(inputs=(str(tmp_path / "*[vl].gz"),), kind="labels", output_field="label").records())
    assert [label for _, label in found] == ["1", "0", "1", "3"]


def test_damaged_and_unknown_tables_are_named(tmp_path: Path) -> None:
    def message_of(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecipeError) as caught:
            documents_of(tmp_path / name)
        return str(caught.value)

    packed = gzip.compress(b"text\n" + random.Random(0).randbytes(4000).hex().encode() + b"\n")
    assert "a.csv:3 has another number of cells than the first line" in message_of("a.csv", b"text,label\none,1\ntwo\n")
    assert "c.csv.gz cannot be unpacked" in message_of("c.csv.gz", packed[: len(packed) // 2])
    assert "d.txt.gz cannot be unpacked" in message_of("d.txt.gz", b"plain")
    assert "e.jsonl.zst cannot be unpacked" in message_of("e.jsonl.zst", b"text")
    assert "unpack it first (bunzip2 e.jsonl.bz2)" in message_of("e.jsonl.bz2", b"")
    assert "f.csv is not UTF-8 text" in message_of("f.csv", "text\ncafé\n".encode("latin-1"))
    assert "i.jsonl:2 is nested too deeply" in message_of("i.jsonl", b'{"text": "\\ud83d\\ude00"}\n' + b"[" * 100_000)
    for name, content in (("j.jsonl", '{"text": "x"}'), ("k.txt", "x")):
        (tmp_path / name).write_text("\ufeff" + content)
        assert documents_of(tmp_path / name) == ["x"], "a mark of byte order is no text"
    assert "g.csv:2 is not CSV" in message_of("g.csv", b'text\n"one" two\n')


def test_a_separator_divides_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n---\ntwo\n---\n\n")
    assert documents_of(tmp_path / "a.txt", separator="---\n") == ["one\n", "two\n"]


def test_stdlib_is_python_source_of_ten_megabytes() -> None:
    files = TextSource(inputs=("stdlib",)).files()
    assert files == sorted(files)
    assert sum(path.stat().st_size for path in files) > 8e6
    assert not any({"test", "site-packages"} & set(path.parts[-3:-1]) for path in files)


# token files


def test_tokens_are_prepared_once_and_anew_when_the_text_changes(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("world!")
    source = TextSource(inputs=(str(tmp_path / "*.txt"),))
    first = prepare_tokens(source, byte_tokenizer(), tmp_path / "cache").train
    assert list(first.ids()) == [*b"hello", 256, *b"world!", 256]
    assert (first.dtype, first.documents, first.tokens) == ("uint16", 2, 13)
    with monkeypatch.context() as patch:
        patch.setattr(text.TextSource, "documents", lambda self: pytest.fail("read again"))
        assert prepare_tokens(source, byte_tokenizer(), tmp_path / "cache").train == first
    (tmp_path / "b.txt").write_text("worlds")
    again = prepare_tokens(TextSource(inputs=source.inputs), byte_tokenizer(), tmp_path / "cache").train
    assert again.path != first.path
    assert list(again.ids())[-3:] == [*b"ds", 256]


def test_a_long_document_is_tokenized_in_pieces_to_the_same_ids(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text(SAMPLE * 30 + "\n\n   \nx = 1\n" * 9 + SAMPLE)
    source = TextSource(inputs=(str(tmp_path / "a.txt"),))
    tokenizer = train_bpe([SAMPLE * 30], 280)
    whole = prepare_tokens(source, tokenizer, tmp_path / "one").train
    monkeypatch.setattr("meshpar.training.tokens._PIECE", 64)
    assert prepare_tokens(source, tokenizer, tmp_path / "two").train.fingerprint == whole.fingerprint


def test_the_split_is_by_document_and_seed(tmp_path: Path) -> None:
    documents = [[i + 1] * (i % 5 + 1) + [0] for i in range(50)]
    whole = write_tokens(tmp_path / "all.bin", documents, vocab_size=100, eos_id=0)
    seeds = {"a": 1, "b": 1, "c": 2}
    one, same, other = (split_tokens(whole, tmp_path / name, fraction=0.2, seed=seeds[name]) for name in seeds)
    assert one.validation is not None and same.validation is not None and other.validation is not None
    assert one.validation.documents == 10 and one.train.documents == 40
    assert one.validation.fingerprint == same.validation.fingerprint != other.validation.fingerprint
    train, held = set(one.train.ids().tolist()) - {0}, set(one.validation.ids().tolist()) - {0}
    assert not train & held and train | held == set(range(1, 51))
    assert one.train.tokens + one.validation.tokens == whole.tokens


def test_a_single_document_is_cut_for_validation(tmp_path: Path) -> None:
    split = split_tokens(token_file(tmp_path, 100), tmp_path / "cache", fraction=0.1)
    assert split.validation is not None
    assert list(split.validation.ids()) == list(range(90, 100))
    assert split.train.tokens == 90


def test_token_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"or the \.json beside it is missing"):
        TokenFile.open(tmp_path / "none.bin")
    with pytest.raises(RecipeError, match="id 7; expected ids of 0 to 4"):
        write_tokens(tmp_path / "a.bin", [[7]], vocab_size=5, eos_id=0)
    with pytest.raises(RecipeError, match="id -1; expected ids of 0 to 4"):
        write_tokens(tmp_path / "a.bin", [[1, -1]], vocab_size=5, eos_id=0)
    file = token_file(tmp_path, 10)
    assert TokenFile.open(file.path) == file
    file.path.write_bytes(file.path.read_bytes()[:-2])
    with pytest.raises(RecipeError, match="has 18 bytes, which is not 10 tokens of uint16"):
        TokenFile.open(file.path)


def test_a_file_of_someone_else_needs_only_the_necessary(tmp_path: Path) -> None:
    np.arange(70_000, dtype="<u4").tofile(tmp_path / "big.bin")
    (tmp_path / "big.json").write_text(json.dumps({"dtype": "uint32", "vocab_size": 70_000, "eos_id": 0}))
    file = TokenFile.open(tmp_path / "big.bin")
    assert file.tokens == 70_000
    assert PackedTokens(file, 10)[6999]["labels"].tolist() == [*range(69_991, 70_000), IGNORE_INDEX]


def _build_slowly(folder: str, log: str) -> None:
    def build(target: Path) -> None:
        with Path(log).open("a") as file:
            file.write("built\n")
        (target / "data").write_text("x")

    build_once(Path(folder), build)


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    paths = (str(tmp_path / "made"), str(tmp_path / "log"))
    workers = [context.Process(target=_build_slowly, args=paths) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (tmp_path / "log").read_text() == "built\n"
    assert (tmp_path / "made/data").read_text() == "x"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(target: Path) -> None:
        (target / "half").write_text("x")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        build_once(tmp_path / "made", build)
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]


def test_what_a_dead_process_left_is_deleted_by_the_next_build(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=build_once, args=(tmp_path / "one", lambda _: os.kill(os.getpid(), signal.SIGKILL)))
    killed.start()
    killed.join()
    own = tmp_path / "two.tmp-not-ours"
    own.mkdir()
    assert len(list(tmp_path.glob("one.tmp-*"))) == 1
    build_once(tmp_path / "three", lambda made: (made / "data").write_text("x"))
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == ["three", "two.tmp-not-ours"]


def test_who_waits_for_a_build_says_for_whom_and_not_for_ever(tmp_path, monkeypatch, capfd) -> None:
    context = multiprocessing.get_context("fork")
    begins = context.Event()

    def stops(_: Path) -> None:
        begins.set()
        os.kill(os.getpid(), signal.SIGSTOP)

    builder = context.Process(target=build_once, args=(tmp_path / "made", stops))
    builder.start()
    assert begins.wait(patient(60))
    failures: list[Exception] = []

    def waits() -> None:
        try:
            build_once(tmp_path / "made", lambda made: None)
        except RecipeError as error:
            failures.append(error)

    monkeypatch.setattr("meshpar.process.leftovers._SILENT_S", 0.3, raising=False)
    monkeypatch.setattr("meshpar.process.waiting.EVERY_S", 0.0, raising=False)
    waiter = threading.Thread(target=waits)
    waiter.start()
    waiter.join(patient(10))
    ended = not waiter.is_alive()
    os.kill(builder.pid or 0, signal.SIGKILL)
    builder.join()
    waiter.join()
    who = f"process {builder.pid} on {socket.gethostname()}, which builds {tmp_path / 'made'}"
    assert ended and f"waiting for {who}, " in capfd.readouterr().err
    silence = "has given no sign of life for 0 s; end that process, or name another folder, in a recipe by data.cache"
    assert f"{who}, {silence}" == str(failures[0])
    for name in ("another", "made"):  # who has died holds nothing up
        assert build_once(tmp_path / name, lambda made: None).is_dir()


def test_a_builder_that_lives_is_waited_for_beyond_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshpar.process.leftovers.EVERY_S", 0.02)
    begins = threading.Event()

    def slow(made: Path) -> None:
        begins.set()
        time.sleep(patient(0.5))

    builder = threading.Thread(target=build_once, args=(tmp_path / "made", slow))
    builder.start()
    begins.wait()
    monkeypatch.setattr("meshpar.process.leftovers._SILENT_S", patient(0.3))
    assert build_once(tmp_path / "made", slow).is_dir()
    builder.join()


def test_a_full_disk_is_told_with_the_remedy_and_leaves_nothing(tmp_path: Path) -> None:
    def build(_: Path) -> None:
        with Path("/dev/full").open("w") as file:
            file.write("x" * 100_000)

    message = r"cannot write to .* MB free\): OSError: .*No space left.*free some space.*data\.cache"
    with pytest.raises(RecipeError, match=message):
        build_once(tmp_path / "made", build)
    with pytest.raises(RecipeError, match=r"FileExistsError.*another folder"):
        build_once(tmp_path / "made.lock" / "inside", build)
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]


def test_a_missing_library_names_the_extra() -> None:
    with pytest.raises(MeshparError, match=r"needs 'no_such_library'.*meshpar\[train\]"):
        need("no_such_library.part")


# order


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1025])
def test_the_order_is_a_permutation(count: int) -> None:
    for key in (0, 1, 2**63 + 5):
        assert sorted(permute(np.arange(count), count, key)) == list(range(count))


def test_the_order_is_pinned_and_looks_random() -> None:
    assert permute(np.arange(10), 10, 1).tolist() == [4, 3, 0, 5, 1, 2, 9, 7, 8, 6]
    order = permute(np.arange(10_000), 10_000, 7)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


# batches


def test_labels_are_the_next_tokens_and_the_last_sample_is_padded(tmp_path: Path) -> None:
    samples = PackedTokens(token_file(tmp_path, 12), 4)
    batch = samples.__getitems__([0, 2, FILLER])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [8, 9, 10, 60_000], [60_000] * 4]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [9, 10, 11, IGNORE_INDEX], [IGNORE_INDEX] * 4]
    assert batch["labels"].dtype == torch.int64
    assert len(samples) == 3


@pytest.mark.parametrize("tokens,length", [(2, 4), (5, 4), (6, 4), (9, 4), (10, 4)])
def test_every_token_but_the_first_is_predicted_once(tokens: int, length: int, tmp_path: Path) -> None:
    batches = Batches(PackedTokens(token_file(tmp_path, tokens), length), micro_batch=2)
    assert sorted(counted(list(batches.one_epoch()))) == list(range(1, tokens))


def test_an_epoch_is_whole_on_every_mesh_and_across_changes_of_mesh(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(60):
        tokens, length = chance.randint(2, 400), chance.randint(1, 9)
        samples, seen, position = PackedTokens(token_file(tmp_path, tokens), length), [], None
        while position is None or position["epoch"] == 0:
            data_size, micro_batch, accumulate = chance.randint(1, 4), chance.randint(1, 3), chance.randint(1, 3)
            stop, positions = chance.randint(1, 6), []
            for rank in range(data_size):
                place = {"data_rank": rank, "data_size": data_size}
                batches = Batches(samples, micro_batch=micro_batch, accumulate=accumulate, seed=5, **place)
                if position is not None:
                    batches.load_state_dict(position)
                steps = list(itertools.islice(batches.one_epoch(), stop))
                assert {(len(step), *step[0]["labels"].shape) for step in steps} <= {(accumulate, micro_batch, length)}
                seen += counted(steps)
                positions.append(batches.state_dict())
            assert all(place == positions[0] for place in positions)
            position = positions[0]
        assert sorted(seen) == list(range(1, tokens)), (tokens, length)
        assert position["epoch"] == 1 and position["samples"] == 0


def test_a_global_batch_does_not_depend_on_the_mesh(tmp_path: Path) -> None:
    samples = PackedTokens(token_file(tmp_path, 500), 5)

    def rows(data_size: int, micro_batch: int, accumulate: int) -> list[list[int]]:
        sizes = {"micro_batch": micro_batch, "accumulate": accumulate, "data_size": data_size}
        ranks = [Batches(samples, data_rank=rank, **sizes) for rank in range(data_size)]
        return [sorted(counted(list(together))) for together in zip(*(b.one_epoch() for b in ranks))]

    assert rows(1, 12, 1) == rows(4, 3, 1) == rows(2, 2, 3) == rows(1, 1, 12)


@pytest.mark.parametrize("stops", [1, 4, 10])
def test_a_growing_batch_has_the_same_samples_on_any_ranks_after_a_resume(tmp_path: Path, stops: int) -> None:
    """Steps of 4, then of 8 and 16 of 50 samples; two epochs."""
    samples, grow = PackedTokens(token_file(tmp_path, 50 * 4 + 1), 4), {12: 8, 40: 16}

    def steps(size: int, state: Any, most: int) -> tuple[list[list[int]], Any]:
        sizes: dict[str, Any] = {"micro_batch": 4 // size, "data_size": size, "grow": grow}
        ranks = [Batches(samples, data_rank=rank, **sizes) for rank in range(size)]
        for one in ranks:
            one.load_state_dict(state or one.state_dict())
        assert ranks[0].steps_until(2) == 12 - (stops if state else 0)
        taken = itertools.islice(zip(*ranks, strict=True), most)
        return [sorted(counted(list(together))) for together in taken], ranks[0].state_dict()

    expected, _ = steps(1, None, 12)
    assert [len(step) // 4 for step in expected] == [4, 4, 4, 8, 8, 8, 8, 6, 16, 16, 16, 2]
    first, state = steps(2, None, stops)
    assert first + steps(4, state, 12 - stops)[0] == expected
    with pytest.raises(RecipeError, match="multiples of 2 x 3 data ranks"):
        Batches(samples, micro_batch=2, data_size=3, grow=grow)


def test_epochs_differ_in_order_and_seeds_too(tmp_path: Path) -> None:
    samples = PackedTokens(token_file(tmp_path, 200), 4)
    batches = Batches(samples, micro_batch=5)
    first, second = counted(list(batches.one_epoch())), counted(list(batches.one_epoch()))
    assert first != second and sorted(first) == sorted(second)
    assert counted(list(Batches(samples, micro_batch=5, seed=1).one_epoch())) != first
    assert counted(list(Batches(samples, micro_batch=5, seed=None).one_epoch())) == sorted(first)
    assert batches.epoch == 2 and batches.steps_per_epoch == 10


def test_workers_change_nothing(tmp_path: Path) -> None:
    samples = PackedTokens(token_file(tmp_path, 300), 4)
    plain = Batches(samples, micro_batch=3, accumulate=2)
    working = Batches(samples, micro_batch=3, accumulate=2, loader=LoaderSettings(workers=2, prefetch=3))
    state = torch.random.get_rng_state()
    theirs = iter(working)
    steps = [next(theirs) for _ in range(20)]
    assert torch.equal(torch.random.get_rng_state(), state)
    ours = iter(plain)
    assert counted(steps) == counted([next(ours) for _ in range(20)])
    assert working.position() == plain.position() == {"epoch": 1, "samples": 42}
    resumed = Batches(samples, micro_batch=3, accumulate=2)
    resumed.load_state_dict(working.state_dict())
    assert counted([next(iter(resumed))]) == counted([next(ours)])
    # leave the epoch in the middle and start it again with the same workers
    working.load_state_dict(plain.state_dict())
    assert counted(list(working.one_epoch())) == counted(list(plain.one_epoch()))


def test_a_position_in_other_data_is_refused(tmp_path: Path) -> None:
    saved = Batches(PackedTokens(token_file(tmp_path, 100), 4), micro_batch=2).state_dict()
    with pytest.raises(RecipeError, match="seed: saved 0, now 3"):
        Batches(PackedTokens(token_file(tmp_path, 100), 4), micro_batch=2, seed=3).load_state_dict(saved)


def test_sizes_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="micro_batch=0"):
        Batches(PackedTokens(token_file(tmp_path, 100), 4), micro_batch=0)
    with pytest.raises(RecipeError, match="no sample"):
        Batches(PackedTokens(token_file(tmp_path, 1), 4), micro_batch=1)


PEOPLE = [{"text": f"line {place}", "id": place, "url": "x"} for place in range(40)]


def test_rows_that_cannot_be_used_are_skipped_and_counted_only_if_told_and_unused_fields_are_named(tmp_path, caplog):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = "".join(json.dumps(row) + "\n" for row in PEOPLE)
    (tmp_path / "a.jsonl").write_text(rows + '{"text": null}\n{"text": "cut\n"just text"\n')
    rows = "".join(f"line {place},{place},x\n" for place in range(40))
    (tmp_path / "a.csv").write_text(f"text,id,url\n{rows}short\n")
    parquet.write_table(arrow.Table.from_pylist([*PEOPLE, {"text": None, "id": 1, "url": "x"}]), tmp_path / "a.parquet")
    for name, skipped in (("a.jsonl", 3), ("a.csv", 1), ("a.parquet", 1)):
        source = TextSource(inputs=(str(tmp_path / name),))
        with pytest.raises(RecipeError, match=rf"{name}:4\d? (has|is)"):
            list(source.documents())
        skipping = TextSource(inputs=source.inputs, reading=Reading(skip=True))
        assert skipping.fingerprint() != source.fingerprint(), "the tokens are others"
        for _ in range(2):  # the second start finds the tokens in the cache
            caplog.clear()
            file = prepare_tokens(skipping, byte_tokenizer(), tmp_path / "cache").train
            assert file.documents == 40
            unused, counted = (record.getMessage() for record in caplog.records)
            fields = "nothing reads these fields of the data, so they are not trained on: id, url (first in"
            assert unused.startswith(f"{fields} {tmp_path / name}")
            skips = f"skipped {skipped} of {40 + skipped} rows of the data (data.bad_rows=skip); the first:"
            assert counted.startswith(f"{skips} {tmp_path / name}:4")
    lines = (str(tmp_path / "a.jsonl"),)
    pairs = RecordSource(inputs=lines, kind="pairs", output_field="url", reading=Reading(skip=True))
    caplog.clear()
    assert prepare_examples(pairs, byte_tokenizer(), tmp_path / "cache").train.count == 40
    heard = [record.getMessage().partition(" (")[0].rpartition(": ")[2] for record in caplog.records]
    assert heard == ["id", "skipped 3 of 43 rows of the data"]
    message = r"has 0 tokens; expected at least 2: give more text; skipped 43 of 43 rows .*has no text under 'body'"
    with pytest.raises(RecipeError, match=message):
        bodies = TextSource(inputs=lines, field="body", reading=Reading(skip=True))
        prepare_tokens(bodies, byte_tokenizer(), tmp_path / "cache")


def test_files_that_begin_with_a_byte_order_mark_may_be_joined(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n\xef\xbb\xbf{"text": "c"}\n')
    assert documents_of(tmp_path / "a.jsonl") == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_refused_with_the_command_that_converts_it(tmp_path, name, indent):
    rows = [{"text": "é 'a'\n"}, {"text": "b"}]
    (tmp_path / name).write_text("\ufeff" + json.dumps(rows, indent=indent), encoding="utf-8")
    for path, reading in ((tmp_path / name, Reading(skip=True)), (tmp_path, Reading())):
        message = "it is one JSON array: write one object a line with: python -c"
        with pytest.raises(RecipeError, match=message) as raised:
            documents_of(path, suffixes=(".jsonl",), reading=reading)
    command = str(raised.value).partition("with: ")[2].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True)
    made = next(path for path in tmp_path.glob("*.jsonl") if path.name != name)
    assert documents_of(made) == [row["text"] for row in rows]
    (tmp_path / "lines.json").write_text('{"text": "a"}\n')
    message = r"lines.json does not end in .jsonl; if it has one object a line, rename it to lines.jsonl"
    with pytest.raises(RecipeError, match=message):
        TextSource(inputs=(str(tmp_path / "lines.json"),), suffixes=(".jsonl",)).files()
