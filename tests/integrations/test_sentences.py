"""sentence-transformers' trainer on meshes, against itself in one process: losses to 1e-5, weights to 1e-4."""

import random
import re

import pytest
import torch

from meshpar import FullyShard, MeshparError, Plan, TensorParallel
from meshpar.integrations.transformers import on_mesh
from meshpar.testing import launch
from tests.nightly.strangers.models import WORDS, bert_folder
from tests.support.tiers import daily
from tests.support.trainers import arguments, compare, on_mesh_of, prepare_process, run

pytest.importorskip("sentence_transformers")

from datasets import Dataset as Table
from datasets import DatasetDict, concatenate_datasets
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoderTrainer,
)
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CoSENTLoss,
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

MESHES = ("dp_shard=2", "dp_replicate=2", "dp_replicate=2,dp_shard=2")


def encoder():
    torch.manual_seed(0)
    body = Transformer(bert_folder())
    for parameter in body.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return SentenceTransformer(modules=[body, Pooling(32), Dense(32, 16)], device="cpu")


def texts(count, columns, seed=0):
    draw = random.Random(seed)

    def value(column):
        if column == "score":
            return draw.random()
        return " ".join(draw.choice(WORDS[5:]) for _ in range(draw.randint(3, 8)))

    return Table.from_list([{column: value(column) for column in columns.split()} for _ in range(count)])


PAIRS, SCORED = "anchor positive", "one other score"


def trainer_of(make, folder, mesh, loss=MultipleNegativesRankingLoss, columns=PAIRS, rows=None, given=(), **options):
    model = encoder()
    gathers = {"gather_across_devices": True} if loss is MultipleNegativesRankingLoss else {}
    settings = arguments(folder, mesh, SentenceTransformerTrainingArguments, **options)
    rows = texts(64, columns) if rows is None else rows
    return make(
        SentenceTransformerTrainer, model, settings, train_dataset=rows, loss=loss(model, **gathers), **dict(given)
    )


def contrasted(make, folder, mesh, columns=PAIRS, **options):
    """Texts among those of the whole batch; the last texts do not fill it."""
    rows = texts(45, columns)
    settings = dict(dataloader_drop_last=True, max_steps=-1, num_train_epochs=2) | options
    trainer = trainer_of(make, folder, mesh, rows=rows, **settings)
    trainer.train()
    return trainer, []


def scored(make, folder, mesh):
    """With an evaluator, which encodes texts of its own."""
    rows = texts(21, SCORED, seed=3)
    evaluator = EmbeddingSimilarityEvaluator(rows["one"], rows["other"], rows["score"], name="pairs", batch_size=4)
    given = dict(eval_dataset=texts(16, SCORED, seed=2), evaluator=evaluator)
    settings = dict(eval_strategy="steps", eval_steps=2)
    trainer = trainer_of(make, folder, mesh, CosineSimilarityLoss, SCORED, given=given, **settings)
    before = trainer.evaluate()
    trainer.train()
    return trainer, [before]


def saved(make, folder, mesh, resume=None):
    trainer = trainer_of(make, folder, mesh, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "export"))
    return trainer, []


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2"))
@pytest.mark.parametrize("columns", daily([PAIRS, f"{PAIRS} negative"], PAIRS))
def test_negatives_are_those_of_the_whole_batch(columns, mesh, tmp_path):
    compare(contrasted, mesh, tmp_path, columns=columns)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
def test_scores_and_evaluators_equal_one_process(mesh, tmp_path):
    compare(scored, mesh, tmp_path)


@pytest.mark.nightly
def test_an_encoder_resumes_on_another_mesh_and_exports(tmp_path):
    expected = run(saved, tmp_path / "one")
    on_mesh_of("dp_shard=2", saved, tmp_path / "first", expected)
    resume = str(tmp_path / "first/checkpoint-2")
    on_mesh_of("dp_replicate=2", saved, tmp_path / "second", expected, skip=["train_loss"], resume=resume)
    encodings = [
        SentenceTransformer(str(tmp_path / at / "export"), device="cpu").encode(texts(5, PAIRS)["anchor"])
        for at in ("one", "second")
    ]
    assert encodings[0] == pytest.approx(encodings[1], abs=1e-4)


def check_refusals(folder):
    prepare_process()

    def train(plan=None, **options):
        plan = plan or Plan("dp_shard=2", [FullyShard()])
        trainer_of(
            lambda kind, *args, **more: on_mesh(kind)(*args, plan=plan, **more),
            folder,
            "dp_shard=2",
            max_steps=1,
            **options,
        ).train(options.pop("resume", None))

    def refused(message, **options):
        with pytest.raises(MeshparError, match=re.escape(message)):
            train(**options)

    refused(
        "loss is CoSENTLoss, which has not been compared with one process; expected MultipleNegativesRankingLoss or "
        "CosineSimilarityLoss: pass one of them, or train in a loop of your own with par.gather",
        loss=CoSENTLoss, columns=SCORED,
    )  # fmt: skip
    train(loss=CosineSimilarityLoss, columns=SCORED)
    refused(
        "MultipleNegativesRankingLoss has gather_across_devices=False, with which a text is compared with those of its "
        "rank alone; expected all of the batch: pass gather_across_devices=True",
        loss=lambda model: MultipleNegativesRankingLoss(model),
    )
    train(loss=lambda model: MultipleNegativesRankingLoss(model, gather_across_devices=True))
    refused(
        "axis 'tp' has ranks with the same texts, whose features SentenceTransformerTrainerOnMesh would count twice",
        plan=Plan("tp=2", [TensorParallel()]),
    )
    several = {"first": texts(16, PAIRS), "second": texts(16, PAIRS, seed=1)}
    refused(
        "train: 2 data ranks would draw a step's batches from several of the datasets first, second, and one process "
        "draws them from one; expected one dataset: join them by datasets.concatenate_datasets",
        rows=DatasetDict(several),
    )
    train(rows=concatenate_datasets(list(several.values())))
    message = "drop it, because others choose among the samples of one rank"
    refused(message, batch_sampler="no_duplicates")


def test_what_ranks_cannot_train_as_one_process_is_refused(tmp_path):
    message = "SparseEncoderTrainer has not been compared with one process; expected Trainer, SFTTrainer"
    with pytest.raises(MeshparError, match=message):
        on_mesh(SparseEncoderTrainer)
    launch(__name__, "check_refusals", 2, (tmp_path,))


def check_weights_of_one_process(folder):
    prepare_process()
    plan = Plan("dp_shard=2", [FullyShard()])

    def make(kind, model, *args, **more):
        return on_mesh(kind)(model, *args, plan=plan, **more)

    trainer = trainer_of(make, folder / "mesh", "dp_shard=2", max_steps=1)
    message = "has weights of one process; expected a checkpoint of a trainer on a mesh: load them by "
    with pytest.raises(MeshparError, match=message):
        trainer.train(resume_from_checkpoint=str(folder / "one/checkpoint-2"))
    model = SentenceTransformer(str(folder / "one/checkpoint-2"), device="cpu")
    loss = MultipleNegativesRankingLoss(model, gather_across_devices=True)
    make(SentenceTransformerTrainer, model, trainer.args, train_dataset=texts(64, PAIRS), loss=loss).train()


@pytest.mark.nightly
def test_weights_of_one_process_are_refused_where_training_resumes(tmp_path):
    run(saved, tmp_path / "one")
    launch(__name__, "check_weights_of_one_process", 2, (tmp_path,))
