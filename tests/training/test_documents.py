"""Documents of a packed row do not see each other, and a model that lets them is refused before the first step."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import meshpar
from meshpar import TensorParallel
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.plan import Plan
from meshpar.testing import on_ranks
from meshpar.training import (
    AdamWSettings,
    Batches,
    Distillation,
    PackedTokens,
    Schedule,
    Trainer,
    TrainSettings,
    build_adamw,
    freeze,
)
from meshpar.training.documents import check_documents
from meshpar.training.objectives import CausalLM
from meshpar.training.samples import MappedSamples
from meshpar.training.text import TextSource
from meshpar.training.tokenizer import byte_tokenizer
from meshpar.training.tokens import prepare_tokens, write_tokens
from tests.support.models_for_parity import VOCAB, Masked, gpt2, huggingface, transformer

END = VOCAB - 1
MODELS = {
    "transformer": transformer,
    "gpt2": gpt2,
    "llama": lambda: huggingface("Llama"),
    "qwen3": lambda: huggingface("Qwen3"),
}


def documents(*lengths, seed=0):
    chance = np.random.default_rng(seed)
    return [[*chance.integers(0, END, length - 1).tolist(), END] for length in lengths]


def packed(folder, written, length, **options):
    folder.mkdir(exist_ok=True)
    return PackedTokens(write_tokens(folder / "tokens.bin", written, vocab_size=VOCAB, eos_id=END), length, **options)


def loss_and_gradients(model, batches):
    model.zero_grad()
    for batch in batches:
        loss = CausalLM().loss(model, batch)[0]
        loss.backward()
    total = sum(CausalLM().loss(model, batch)[0].item() for batch in batches)
    return total, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_has_the_loss_and_gradients_of_its_documents(name, tmp_path):
    torch.manual_seed(0)
    model, written = MODELS[name]().eval(), documents(9, 1, 14, 8)
    row = packed(tmp_path, written, 31).__getitems__([0])
    alone = [
        {"input_ids": torch.tensor([document[:-1]]), "labels": torch.tensor([document[1:]])}
        for document in written
        if len(document) > 1
    ]
    loss, gradients = loss_and_gradients(model, [row])
    want, wanted = loss_and_gradients(model, alone)
    assert loss == pytest.approx(want, rel=1e-5)
    for have, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(have, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    other = {**row, "labels": row["labels"].clone(), "input_ids": row["input_ids"].clone()}
    row["labels"][:, :10] = other["labels"][:, :10] = -100
    other["input_ids"][:, :8] = (other["input_ids"][:, :8] + 1) % END
    # a document changed the loss of another one
    assert CausalLM().loss(model, row)[0].equal(CausalLM().loss(model, other)[0])
    joined = (
        {key: value for key, value in row.items() if key != "position_ids"},
        {k: v for k, v in other.items() if k != "position_ids"},
    )
    assert not CausalLM().loss(model, joined[0])[0].equal(CausalLM().loss(model, joined[1])[0])


def test_documents_are_counted_in_the_ids(tmp_path):
    (tmp_path / "a.txt").write_text("one story<|endoftext|>two<|endoftext|>three")
    file = prepare_tokens(TextSource(inputs=(str(tmp_path / "a.txt"),)), byte_tokenizer(), tmp_path / "cache").train
    assert (file.documents, PackedTokens(file, 64).separates) == (3, True)
    counted = PackedTokens(replace(file, documents=1), 64)
    assert counted.separates and "position_ids" in counted.__getitems__([0]), "a .json of someone else may count files"
    other = PackedTokens(replace(file, eos_id=ord("o")), 64)
    assert other.fingerprint != counted.fingerprint
    assert other.fingerprint_of("joined") == counted.fingerprint_of("joined")
    (tmp_path / "a.txt").write_text("one story")
    source = TextSource(inputs=(str(tmp_path / "a.txt"),))
    assert not PackedTokens(prepare_tokens(source, byte_tokenizer(), tmp_path).train, 64).separates


def test_every_token_but_the_first_of_a_document_is_a_label_once(tmp_path):
    written = documents(5, 1, 12, 3, 2, 1, 7)
    separate, joined = packed(tmp_path, written, 6), packed(tmp_path, written, 6, documents="joined")
    batch = separate.__getitems__(range(len(separate)))
    assert batch["labels"][batch["labels"] != -100].tolist() == [id_ for document in written for id_ in document[1:]]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0]
    assert batch["position_ids"][2].tolist() == [0, 1, 2, 3, 4, 5]
    assert "position_ids" not in separate.__getitems__([1]), "a sample of one document needs no mask"
    whole = joined.__getitems__(range(len(joined)))
    assert whole["labels"][whole["labels"] != -100].tolist() == [id_ for document in written for id_ in document][1:]
    assert separate.fingerprint != joined.fingerprint and "position_ids" not in whole


def test_looking_for_documents_maps_no_file(tmp_path, monkeypatch):
    file = write_tokens(tmp_path / "tokens.bin", documents(9, 1, 14, 8), vocab_size=VOCAB, eos_id=END)
    monkeypatch.setattr(np, "memmap", None)  # whose pages, once they are read, count as memory of this process
    monkeypatch.setattr("meshpar.training.tokens._SCANNED", 5)
    assert file.document_ends().tolist() == [9, 10, 24, 32] and PackedTokens(file, 16, packing="best_fit").separates


class Carried(nn.Module):
    """A model that takes position_ids and does with them what ``kind`` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.places, self.layers = nn.Embedding(64, 16), nn.ModuleList([nn.GRU(16, 16, batch_first=True)])

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        if self.kind == "recurrent":
            x = x + self.layers[0](x)[0]
        elif self.kind == "one before":
            x = x + x.roll(1, 1) * (torch.arange(x.shape[1]) > 0)[:, None]
        elif self.kind == "counts":
            x = x + self.places(torch.arange(x.shape[1]))
        else:
            x = x + self.places(position_ids)
        return SimpleNamespace(logits=self.head(x))

    def meshpar_layout(self):
        return ModelLayout(blocks=("layers.*",))


@on_ranks(1)
def test_a_model_that_lets_documents_see_each_other_is_refused_by_name():
    import transformers

    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, conv_kernel=3, expand=2, time_step_rank=4
    )
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, use_cache=False))
    for model, message in (
        (
            Carried("recurrent"),
            "Carried does not keep the documents of a packed row separate: .*data.documents: joined",
        ),
        (Carried("one before"), "Carried does not keep the documents of a packed row separate"),
        (Carried("counts"), "Carried counts positions itself"),
        (Masked(), "Masked takes no position_ids"),
        (mamba, "MambaForCausalLM does not keep the documents of a packed row separate"),
    ):
        with pytest.raises(MeshparError, match=message):
            check_documents(Plan("", []).apply(model), model, VOCAB, 64)
    for model in (Carried("none"), *(model() for model in MODELS.values())):
        par = Plan("", []).apply(model)
        model.train()
        check_documents(par, model, VOCAB, 64)
        assert model.training


@on_ranks(1)
def test_a_trainer_tries_its_model_and_its_teacher(tmp_path):
    one, samples = packed(tmp_path / "one", documents(40), 16), packed(tmp_path, documents(9, 1, 14, 8), 16)
    unlabelled = MappedSamples([{"input_ids": torch.arange(8), "labels": torch.full((8,), -100)}] * 4, "unlabelled")
    for model, objective, data, message in (
        (Carried("recurrent"), CausalLM(), samples, "Carried does not keep the documents"),
        (Carried("recurrent"), CausalLM(), one, "Carried does not keep the documents"),
        (transformer(), CausalLM(), unlabelled, "no label of the first 2 steps counted"),
        (
            transformer(),
            Distillation(teacher=freeze(Carried("recurrent"))),
            samples,
            "Carried does not keep the documents",
        ),
        (transformer(), Distillation(teacher=freeze(transformer())), samples, None),
    ):
        par = Plan("", []).apply(model)
        batches, optimizer = Batches(data, micro_batch=2), build_adamw(model, AdamWSettings(lr=1e-3))
        held = None if data is not one else Batches(samples, micro_batch=2)
        trainer = Trainer(
            par, objective, batches, optimizer, Schedule(lr=1e-3, steps=2), TrainSettings(steps=2), validation=held
        )
        with nullcontext() if message is None else pytest.raises(MeshparError, match=message):
            trainer.run()
    row = samples.__getitems__([0])
    other = {**row, "input_ids": row["input_ids"].clone()}
    other["input_ids"][:, :8] = (row["input_ids"][:, :8] + 1) % END
    row["labels"][:, :9] = other["labels"][:, :9] = -100
    model.eval()
    # a teacher or a student saw another document
    assert objective.loss(model, row)[0].equal(objective.loss(model, other)[0])


@pytest.mark.parametrize(
    "mesh,passes",
    [
        ("dp_shard=2", [meshpar.FullyShard(param_dtype=torch.bfloat16)]),
        ("tp=2", [meshpar.TensorParallel(loss_parallel=True)]),
        ("dp_shard=1,cp=2", [meshpar.ContextParallel(), meshpar.ActivationCheckpoint(), meshpar.FullyShard()]),
    ],
    ids=str,
)
@on_ranks(2)
def test_the_try_runs_on_every_mesh(mesh, passes):
    par = Plan(mesh, passes).apply(transformer())
    check_documents(par, par.module, VOCAB, 64)
    if "cp" not in mesh:
        par.module.forward = lambda input_ids, position_ids, forward=par.module.forward: forward(input_ids)
        with pytest.raises(MeshparError, match="Transformer does not keep the documents of a packed row separate"):
            check_documents(par, par.module, VOCAB, 64)


@on_ranks(2)
def test_documents_under_sequence_parallel_are_refused_with_a_remedy_that_works():
    torch.manual_seed(0)
    model = huggingface("Llama").eval()
    ids = torch.randint(0, VOCAB, (2, 16))
    batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(6), torch.arange(10)]).expand(2, -1)}
    expected = model(**batch).logits
    for sequence_parallel in (True, False):
        split = TensorParallel(sequence_parallel=sequence_parallel)
        par = Plan("tp=2", [split]).apply(copy.deepcopy(model))
        if sequence_parallel:
            with pytest.raises(MeshparError, match=r"packed documents(.|\n)*TensorParallel\(sequence_parallel=False\)"):
                par.module(**batch)
        else:
            torch.testing.assert_close(par.module(**batch).logits, expected)
