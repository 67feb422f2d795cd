"""Published programs on accelerate, with one changed import and one argument, equal plain accelerate.

Each program is pinned by commit and digest. It is read below ``MESHPAR_PROGRAMS`` (``OWNER/NAME/PATH``), or downloaded;
without either its test is skipped. Its model and data are small ones of our own, in folders of the names that it asks
for.
"""

import contextlib
import difflib
import hashlib
import io
import json
import os
import re
import sys
import types
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist

from meshpar.integrations.accelerate import Accelerator
from meshpar.testing import on_ranks, whole
from tests.integrations.test_accelerate import assert_same_weights, start

IMPORT = "from accelerate import Accelerator, DistributedType\n"
IMPORTS = """\
from accelerate import DistributedType
from meshpar.integrations.accelerate import Accelerator
"""
MESHES = ("dp_shard=2", "tp=2")


@dataclass(frozen=True, slots=True)
class Program:
    """A program of another repository, and how it is run.

    Attributes:
        repository: owner and name.
        commit: of the version.
        path: inside the repository.
        sha256: of its text.
        call: where it makes its Accelerator, up to the first argument.
        losses: a pattern of what it prints.
        by_rank: the arguments for one process, and for each of two data ranks.
    """

    repository: str
    commit: str
    path: str
    sha256: str
    call: str
    losses: str
    by_rank: tuple[tuple[str, ...], tuple[str, ...]]

    def text(self) -> str:
        """Return the program as published; skip the test where it cannot be had."""
        local = Path(os.environ.get("MESHPAR_PROGRAMS", "")) / self.repository / self.path
        if "MESHPAR_PROGRAMS" in os.environ and local.is_file():
            content = local.read_bytes()
        else:
            url = f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"
            try:
                with urllib.request.urlopen(url, timeout=20) as response:
                    content = response.read()
            except OSError as error:
                pytest.skip(
                    f"no network for {url} ({error}), and MESHPAR_PROGRAMS has no {self.repository}/{self.path}"
                )
        assert hashlib.sha256(content).hexdigest() == self.sha256, "another version of the program"
        return content.decode()

    def on_mesh(self, text: str, mesh: str) -> str:
        """Return the program with meshpar under it."""
        assert text.count(IMPORT) == 1 and self.call in text
        return text.replace(IMPORT, IMPORTS).replace(self.call, f'{self.call}plan="{mesh}", ')


ACCELERATE = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
PROGRAMS = {
    "gradient accumulation": Program(
        *ACCELERATE,
        "examples/by_feature/gradient_accumulation_for_autoregressive_models.py",
        "61a8680c477a1f015ffb69c4d4169b50208449aea159eb97bddf1ea97ed08133",
        call="accelerator = Accelerator(\n            ",
        losses=r"grad norm: ([\d.e-]+) ::train loss: ([\d.e-]+)",
        by_rank=(
            ("--cpu", "--gradient_accumulation_steps=2", "--per_device_batch_size=4"),
            ("--cpu", "--gradient_accumulation_steps=2", "--per_device_batch_size=2"),
        ),
    ),
    "text classification": Program(
        *ACCELERATE,
        "examples/nlp_example.py",
        "199f1d6d2b38bf2bb5b6904fa6f93418d0dce715bb9be53ecb8f90699160f0d9",
        call="accelerator = Accelerator(",
        losses=r"epoch \d: \{'accuracy': ([\d.]+)\}",
        by_rank=(("--cpu",), ("--cpu",)),
    ),
}
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "more", "dog", "run", "by", "with", "red", "hats"]


def sentences(count: int, seed: int) -> list[str]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (count,), generator=draw).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=draw).tolist()) for n in lengths]


def write_dataset(folder: Path, name: str, splits: dict[str, list[dict[str, object]]]) -> None:
    folder.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_assets(folder: Path) -> None:
    """Write models and data under the names that the programs ask the Hub for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    special = ["[UNK]", "[EOS]", "[PAD]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]", pad_token="[PAD]", model_max_length=64
    )
    sizes = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    causal = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=1))
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    classifier = BertForSequenceClassification(BertConfig(**sizes, **no_dropout, num_labels=2))
    for name, model in (("HuggingFaceTB/SmolLM-360M", causal), ("bert-base-cased", classifier)):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    # 80 texts among empty ones, which the program leaves out: it takes the first 500 rows
    texts = [{"text": text} for text in sentences(80, 1)] + [{"text": ""} for _ in range(440)]
    write_dataset(folder / "Salesforce/wikitext", "wikitext-2-v1", {"train": texts, "validation": texts[:32]})
    pairs = [
        {"sentence1": first, "sentence2": second, "label": int(len(first) > len(second)), "idx": number}
        for number, (first, second) in enumerate(zip(sentences(96, 2), sentences(96, 3)))
    ]
    write_dataset(folder / "nyu-mll/glue", "mrpc", {"train": pairs, "validation": pairs[:41]})


class Accuracy:
    """The part of `evaluate` that the programs use, whose metrics come from the Hub."""

    def __init__(self) -> None:
        self.hits: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.hits += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        hits, self.hits = self.hits, []
        assert len(hits) == 41, "each sample counts once"
        return {"accuracy": sum(hits) / len(hits)}


def run(program: Program, text: str, arguments: tuple[str, ...], kind: type) -> tuple[list[tuple[float, ...]], dict]:
    """Run a program in this rank; return the numbers that it printed, and its weights."""
    weights: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    backward = accelerate.Accelerator.backward

    def keep(self: accelerate.Accelerator) -> None:
        model = getattr(self._models[0], "module", self._models[0])
        weights.update({name: whole(tensor) for name, tensor in model.named_parameters()})

    def note(self: accelerate.Accelerator, loss: torch.Tensor, **options: object) -> None:
        losses.append(self.gather(loss.detach()).mean().item())
        backward(self, loss, **options)

    stub = types.ModuleType("evaluate")
    stub.load = lambda *names: Accuracy()  # type: ignore[attr-defined]
    sys.modules["evaluate"] = stub  # these processes end with the test
    printed = io.StringIO()
    with (
        mock.patch.object(kind, "end_training", keep),
        mock.patch.object(accelerate.Accelerator, "backward", note),
        mock.patch.object(sys, "argv", ["program.py", *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        exec(compile(text, "program.py", "exec"), {"__name__": "__main__", "__file__": "program.py"})
    rows = re.finditer(program.losses, printed.getvalue())
    numbers = [tuple(map(float, row.groups())) for row in rows]
    return [*numbers, *((loss,) for loss in losses)], weights


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.timeout(600)
def test_a_published_program_equals_plain_accelerate(name, mesh, tmp_path):
    pytest.importorskip("datasets")
    program = PROGRAMS[name]
    text = program.text()
    changed = program.on_mesh(text, mesh)
    lines = [line for line in difflib.ndiff(text.splitlines(), changed.splitlines()) if line[0] == "+"]
    assert len(lines) <= 5, lines
    write_assets(tmp_path)
    compared(name, mesh, text, changed, tmp_path)


@on_ranks("mesh", timeout_s=500, fresh="loads datasets with an environment of its own")
def compared(name, mesh, text, changed, folder):
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "home")}
    os.chdir(folder)
    program, (alone, by_rank) = PROGRAMS[name], PROGRAMS[name].by_rank
    # a shuffled loader draws its order otherwise in one process than in several
    several = mesh.startswith("dp") and "shuffle=True" in text
    start(launched=several)
    arguments = by_rank if several else alone
    numbers, weights = run(program, text, arguments, accelerate.Accelerator)
    start(launched=True)
    found, tensors = run(program, changed, by_rank if mesh.startswith("dp") else alone, Accelerator)
    assert (len(numbers) >= 10 and len(found) == len(numbers)) or dist.get_rank() > 0
    if dist.get_rank() == 0:
        apart = [abs(one - other) for row, same in zip(found, numbers) for one, other in zip(row, same)]
        assert max(apart) <= 1e-5 * max(1.0, *(abs(value) for row in numbers for value in row)), (found, numbers)
    assert_same_weights(tensors, weights)
