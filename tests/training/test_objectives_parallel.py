"""Objectives under a plan equal one process, over uneven ranks and micro-batches; a teacher has a plan of its own."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshpar
from meshpar import FullyShard, HybridShard, MeshparError, Plan, Replicate, TensorParallel
from meshpar.testing import assert_parity, on_ranks, one_process, token_steps
from meshpar.training.objectives import (
    CausalLM,
    Distillation,
    Seq2Seq,
    SequenceClassification,
    divergence,
    freeze,
    teacher_problems,
)
from tests.support.models_for_parity import VOCAB, Given, huggingface, transformer
from tests.support.tiers import daily

PLANS: dict[str, tuple[str, list[Any]]] = {
    "fsdp": ("dp_shard=4", [FullyShard()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    "two": ("dp_shard=2", [FullyShard()]),
}
CLASSES, PARTS = 5, 4


def t5(**options: Any) -> nn.Module:
    import transformers

    sizes = dict(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, tie_word_embeddings=True, **options))


def bert() -> nn.Module:
    import transformers

    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    still = dict(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES, max_position_embeddings=64
    )
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **still))
    for name, parameter in model.named_parameters():  # its gradient is zero by theory, and what is left is rounding
        parameter.requires_grad_(not name.endswith("key.bias"))
    return model


def examples(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """A batch with rows of different lengths and some that do not count; lengths differ from part to part."""
    generator = torch.Generator().manual_seed(seed)
    rows, length, target = 2 + seed % 2, 6 + seed % 3, 4 + seed % 4
    ids = torch.randint(VOCAB, (rows, length), generator=generator)
    real = (torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=generator)).long()
    batch = {"input_ids": ids, "attention_mask": real}
    if kind == "labels":
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        labels[0] = -100 if seed % 3 == 0 else labels[0]
        return batch | {"labels": labels}
    labels = torch.randint(VOCAB, (rows, target), generator=generator)
    behind = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), labels[:, :-1]], dim=1)
    labels[torch.arange(target) >= torch.randint(1, target + 1, (rows, 1), generator=generator)] = -100
    return batch | {"decoder_input_ids": behind, "labels": labels}


def steps_of(kind: str, parts: int) -> list[list[list[dict[str, torch.Tensor]]]]:
    return [
        [[examples(kind, (step * 7 + micro) * 11 + part) for part in range(parts)] for micro in range(2)]
        for step in range(2)
    ]


def summed(objective: Any, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    loss, count, _ = objective.loss(model, batch)
    assert int(count) == objective.tokens(batch)
    return loss, int(count)


@pytest.mark.parametrize(("name", "ranks"), daily([("two", 2), ("fsdp", 4), ("hsdp", 4)], ("two", 2)))
@on_ranks("ranks")
def test_seq2seq_and_classification_equal_one_process(name: str, ranks: int) -> None:
    for build, objective, kind in ((t5, Seq2Seq(), "pairs"), (bert, SequenceClassification(), "labels")):
        mesh, passes = PLANS[name]
        steps = steps_of(kind, torch.distributed.get_world_size())
        assert_parity(build, mesh, passes, steps, loss_sum=functools.partial(summed, objective))


@on_ranks(2)
def test_z_loss_of_split_logits_and_of_chunks_equals_one_process() -> None:
    steps = token_steps(VOCAB, parts=1, steps=2)
    expected = one_process(transformer, steps, loss_sum=functools.partial(summed, CausalLM(z_loss=0.1, chunk=0)))
    for chunk, split in ((0, True), (3, True), (3, False)):
        loss_sum = functools.partial(summed, CausalLM(z_loss=0.1, chunk=chunk))
        passes = [TensorParallel(loss_parallel=split)]
        par = assert_parity(transformer, "tp=2", passes, steps, loss_sum=loss_sum, expected=expected)
    (batch, *_) = steps[0][0]
    total, _, more = CausalLM(z_loss=0.1).loss(par.module, batch)
    alone, _, nothing = CausalLM().loss(par.module, batch)
    torch.testing.assert_close(more["cross_entropy"], alone)
    par.module.eval()
    torch.testing.assert_close(CausalLM(z_loss=0.1).loss(par.module, batch)[0], alone)
    assert total > alone and not nothing


def teacher() -> nn.Module:
    return freeze(huggingface("Qwen3", tie_word_embeddings=False))


def student() -> nn.Module:
    return huggingface("Qwen3", tie_word_embeddings=True)


PAIRS = [("fsdp", "hsdp"), ("hsdp", "fsdp"), ("fsdp-tp", "fsdp-tp"), ("fsdp-tp", "fsdp")]
"""The plans of a student and of its teacher."""


@pytest.mark.parametrize(("name", "theirs"), daily(PAIRS, ("fsdp-tp", "fsdp")))
@on_ranks(4)
def test_distillation_equals_one_process_whatever_the_two_plans(name: str, theirs: str) -> None:
    steps = token_steps(VOCAB, parts=PARTS, micro_batches=2, steps=2)
    options = {"temperature": 1.5, "weight": 0.7, "hidden_weight": 0.3}
    torch.manual_seed(5)
    alone = teacher()
    weights = alone.state_dict()
    whole = Distillation(teacher=alone, **options)
    expected = one_process(student, steps, loss_sum=functools.partial(summed, whole))
    with torch.device("meta"):
        model = teacher()
    par = Plan(*PLANS[theirs]).apply(model).materialize(weights=Given(weights))
    objective = Distillation(teacher=par.module, **options)
    mesh, passes = PLANS[name]
    trained = assert_parity(
        student, mesh, passes, steps, loss_sum=functools.partial(summed, objective), expected=expected
    )
    assert all(parameter.grad is None for parameter in par.module.parameters())
    held = sum(meshpar.tensors.placements.local_tensor(parameter).numel() for parameter in par.module.parameters())
    assert held < 0.6 * sum(parameter.numel() for parameter in par.module.parameters()), "the teacher is not split"
    assert trained.data_size in (2, 4)


def test_a_teacher_that_would_mix_batches_is_refused() -> None:
    with torch.device("meta"):
        model = teacher()
    split = Plan("dp_shard=2,tp=2", [TensorParallel(), FullyShard()])
    (problem,) = teacher_problems(split, model, Plan("dp_shard=4", [FullyShard()]), 4)
    assert (
        "lets ranks [0, 1] work on one batch, but the student's mesh dp_shard=4 gives them 2 different ones" in problem
    )
    assert not list(teacher_problems(split, model, split, 4))
    assert not list(teacher_problems(Plan("dp_replicate=4", [Replicate()]), model, split, 4))


def test_a_teacher_that_is_not_frozen_is_refused() -> None:
    model = huggingface("Qwen3")
    message = r"teacher is not frozen: model\.embed_tokens\.weight requires a gradient; call freeze"
    with pytest.raises(MeshparError, match=message):
        Distillation(teacher=model)
    with pytest.raises(MeshparError, match="it is in training mode"):
        Distillation(teacher=freeze(model).train())


def test_the_divergence_is_torchs_and_zero_of_equals() -> None:
    student_logits, teacher_logits = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    counts = torch.tensor([[True, True, False], [True, False, False]])
    got = divergence(student_logits, teacher_logits, counts, 2.0)
    log_student, log_teacher = ((logits[counts] / 2).log_softmax(-1) for logits in (student_logits, teacher_logits))
    expected = nn.functional.kl_div(log_student, log_teacher, log_target=True, reduction="sum")
    torch.testing.assert_close(got, expected)
    assert float(divergence(student_logits, student_logits, counts, 2.0)) == pytest.approx(0.0, abs=1e-6)


class Small(nn.Module):
    def __init__(self, vocab: int = 11) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, *, input_ids: torch.Tensor, output_hidden_states: bool = False) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.table(input_ids))


def test_the_rank_that_has_no_example_joins_all_the_same() -> None:
    assert not dist.is_initialized()
    logits = torch.zeros(2, CLASSES, requires_grad=True)

    class Still(nn.Module):
        def forward(self, **_: Any) -> Any:
            from types import SimpleNamespace

            return SimpleNamespace(logits=logits)

    batch = {"input_ids": torch.zeros(2, 3), "attention_mask": torch.ones(2, 3), "labels": torch.tensor([-100, -100])}
    loss, count, more = SequenceClassification().loss(Still(), batch)
    loss.backward()
    assert (float(loss), int(count), int(more["accuracy"])) == (0.0, 0, 0)
    assert torch.equal(logits.grad, torch.zeros(2, CLASSES))
