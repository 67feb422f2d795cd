"""Trainers of other libraries in one process and on a mesh, and all that both do compared."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments

from meshpar import MeshparError, MeshSpec, Plan, distributed, passes_for
from meshpar.integrations.transformers import on_mesh
from meshpar.testing import launch

MESHES = ("dp_shard=2", "tp=2", "dp_replicate=2", "dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2")
BATCH = 8
"""Samples of a micro-batch, on all data ranks together."""
TIMES = ("runtime", "per_second", "preparation_time", "mfu", "completions/mean_length")


class Rows(Dataset):
    """Tokens, of which each row trains another number."""

    def __init__(self, count=64, seed=5):
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(2, 128, (count, 24), generator=draw)
        self.trained = torch.randint(4, 24, (count,), generator=draw)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        labels[self.trained[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Ragged(Rows):
    """Rows of different lengths, which :func:`padded` joins."""

    def __getitem__(self, index):
        return {name: row[: 6 + int(self.trained[index]) // 2] for name, row in super().__getitem__(index).items()}


def padded(rows):
    """Join rows of different lengths, as collators do."""

    def join(name, filler):
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=filler)

    mask = [{"mask": torch.ones_like(row["labels"])} for row in rows]
    masks = torch.nn.utils.rnn.pad_sequence([row["mask"] for row in mask], batch_first=True)
    return {"input_ids": join("input_ids", 0), "labels": join("labels", -100), "attention_mask": masks}


class Classes(Rows):
    """Tokens of two classes."""

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.trained[index] % 2}


def llama(kind=LlamaForCausalLM, seed=0, **options):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
    return kind(LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=1, **options))


def plan_of(mesh):
    return Plan(mesh, passes_for(mesh))


def data_ranks(mesh):
    return int(np.prod([size for axis, size in MeshSpec(mesh).axes.items() if axis.startswith("dp")]))


def arguments(folder, mesh="", kind=TrainingArguments, **options):
    """Return arguments whose batches are the same on every mesh."""
    batch = options.pop("batch", BATCH) // data_ranks(mesh)
    settings = dict(
        per_device_train_batch_size=batch, per_device_eval_batch_size=batch, gradient_accumulation_steps=2,
        max_steps=4, learning_rate=1e-2, adam_epsilon=1e-3, max_grad_norm=0.5, lr_scheduler_type="linear", seed=1,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return kind(output_dir=str(folder), **(settings | options))


def prepare_process():
    """Let accelerate see the ranks of this process as a launcher's; it keeps what it saw first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="localhost")
        os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_PORT": "29511"})


def record(trainer, values=()):
    """Return what a run logged, its weights, and other values of it, the same on every rank."""
    model, par = trainer.model, getattr(trainer, "_par", None)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    if par is not None:
        weights = {name: par.whole(one) for name, one in weights.items()}
    return SimpleNamespace(
        logs=[dict(entry) for entry in trainer.state.log_history],
        weights={name: one.clone() for name, one in weights.items()},
        values=[timeless(value) for value in values],
    )


def timeless(value):
    """Return a value without durations."""
    kept = value.items() if isinstance(value, dict) else ()
    return {name: one for name, one in kept if not name.endswith(TIMES)} if isinstance(value, dict) else value


def assert_equal(found, expected, skip=(), within=1e-5):
    """Compare all that two runs logged to 1e-5, and their weights to 1e-4, of what is largest."""
    assert [entry["step"] for entry in found.logs] == [entry["step"] for entry in expected.logs]
    for entry, other in zip(found.logs, expected.logs, strict=True):
        assert entry.keys() == other.keys()
        for name in entry:
            if not name.endswith(TIMES) and not name.startswith(tuple(skip)):
                assert entry[name] == pytest.approx(other[name], rel=within, abs=within), (name, entry, other)
    for value, other in zip(found.values, expected.values, strict=True):
        assert value == pytest.approx(other, rel=within, abs=within)
    assert found.weights.keys() <= expected.weights.keys() and found.weights  # a stage has some
    for name, weight in found.weights.items():
        largest = float(expected.weights[name].abs().max())
        assert float((weight - expected.weights[name]).abs().max()) <= 10 * within * max(largest, 1.0), name


WORDS = [f"w{number}" for number in range(120)]


def tokenizer():
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def run(case, folder, mesh="", **options):
    """Train a case ``(make, folder, mesh, ...) -> trainer, values``, and return what it did."""
    prepare_process()

    def make(kind, *args, **settings):
        return on_mesh(kind)(*args, plan=plan_of(mesh), **settings) if mesh else kind(*args, **settings)

    trainer, values = case(make, folder, mesh, **options)
    return record(trainer, values)


def check_case(case, mesh, folder, expected, skip, within, options):
    assert_equal(run(case, folder, mesh, **options), expected, skip, within)


def on_mesh_of(mesh, case, folder, expected, skip=(), within=1e-5, **options):
    """Train a case on the ranks of a mesh, each of which compares all that it did."""
    launch(__name__, "check_case", MeshSpec(mesh).size, (case, mesh, folder, expected, skip, within, options))


def compare(case, mesh, folder, skip=(), within=1e-5, **options):
    """Train a case in this process and on the ranks of a mesh."""
    on_mesh_of(mesh, case, folder / "mesh", run(case, folder / "one", **options), skip, within, **options)


def refused(make, message):
    """Check what ``make`` says when it refuses; a world of this one process does."""
    prepare_process()
    with distributed("cpu"), pytest.raises(MeshparError, match=re.escape(message)):
        make()
