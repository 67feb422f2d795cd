"""Mixtures: each source has its share, in one order on any number of ranks and across stops."""

import dataclasses
import itertools
import json
import math
import random

import numpy as np
import pytest
import torch

import meshpar
from meshpar.core.errors import RecipeError
from meshpar.launchers.jobs.datasets import changes, same_but_documents
from meshpar.plan import Plan
from meshpar.testing import on_ranks
from meshpar.training import (
    AdamWSettings,
    Batches,
    CausalLM,
    PackedTokens,
    Schedule,
    Trainer,
    TrainSettings,
    build_adamw,
)
from meshpar.training.metrics import JsonLines
from meshpar.training.samples import MixedSamples
from meshpar.training.tokens import write_tokens
from tests.support.models_for_parity import VOCAB, transformer
from tests.support.tiers import daily

LENGTH = 4


def source(folder, name, samples, base):
    """Samples whose labels are unlike those of any other."""
    ids = base + np.arange(samples * LENGTH + 1)
    return PackedTokens(write_tokens(folder / f"{name}.bin", [ids], vocab_size=1 << 16, eos_id=60_000), LENGTH)


def rows(step, samples):
    """The source and the first label of each row of a step."""
    names = list(samples.sources)
    found = [
        (names[batch["source"][row]], int(batch["labels"][row, 0]))
        for batch in step
        for row in range(len(batch["source"]))
    ]
    return [pair for pair in found if pair[1] >= 0]


@pytest.mark.parametrize("cases", daily([range(4), range(4, 40)], range(4), ids=str))
def test_a_mix_is_one_order_on_any_ranks_and_across_stops(tmp_path, cases):
    for case in cases:
        chance = random.Random(case)
        sizes, capped = [chance.randint(1, 30) for _ in range(chance.randint(1, 4))], chance.random() < 0.5
        weights = [chance.choice([0.1, 0.7, 1.0, 3.0, chance.uniform(0.01, 5)]) for _ in sizes]
        epochs = [chance.randint(1, 3) if capped or chance.random() < 0.3 else None for _ in sizes]
        parts = {
            f"s{place}": source(tmp_path, f"{case}-{place}", size, place * 1000) for place, size in enumerate(sizes)
        }
        samples = MixedSamples(parts, weights, epochs)
        total = samples.mix.total or 4 * sum(sizes)
        alone = [
            row
            for step in itertools.islice(Batches(samples, micro_batch=1, seed=case).one_epoch(), total)
            for row in rows(step, samples)
        ]
        assert len(alone) == total
        seen, position = [], None
        while len(seen) < total:
            ranks, micro, accumulate, stop = (
                chance.randint(1, 4), chance.randint(1, 3), chance.randint(1, 2), chance.randint(1, 5),
            )  # fmt: skip
            steps, positions = [], []
            for rank in range(ranks):
                batches = Batches(
                    samples, micro_batch=micro, accumulate=accumulate, data_rank=rank, data_size=ranks, seed=case
                )
                if position is not None:
                    batches.load_state_dict(position)
                taken = itertools.islice(batches.one_epoch(), stop)
                steps.append([[rows([micro], samples) for micro in step] for step in taken])
                positions.append(json.loads(json.dumps(batches.state_dict())))
            assert all(place == positions[0] for place in positions)
            position = positions[0]
            micros = [micro for together in zip(*steps, strict=True) for micro in zip(*together, strict=True)]
            seen += [row for micro in micros for rank in micro for row in rank]
        assert seen[:total] == alone, (sizes, weights, epochs)
        for place, (name, size, most) in enumerate(zip(parts, sizes, epochs)):
            mine = [label for whose, label in alone if whose == name]
            assert all(
                len(set(mine[at : at + size])) == len(mine[at : at + size]) for at in range(0, len(mine), size)
            ), "repeated in an epoch"
            assert most is None or len(mine) <= most * size
            assert not capped or len(mine) == most * size
            if not any(epochs):
                assert abs(len(mine) - total * weights[place] / sum(weights)) <= (len(sizes) + 1) / 2


def test_wrong_mixes_are_refused(tmp_path):
    one, two = source(tmp_path, "one", 3, 0), source(tmp_path, "two", 5, 1000)
    for weight in (0.0, math.nan, math.inf, 1e-99):
        with pytest.raises(RecipeError, match="expected weights above 0 and finite"):
            MixedSamples({"one": one, "two": two}, [1.0, weight], [None, None])
    for more in ({"eos_id": 7}, {"vocab_size": 61_000}):
        other = PackedTokens(dataclasses.replace(two.tokens, **more), LENGTH)
        message = r"different tokenizers: one has vocab_size 65536 and eos_id 60000, two has .*with one"
        with pytest.raises(RecipeError, match=message):
            MixedSamples({"one": one, "two": other}, [1, 1], [None, None])
    with pytest.raises(RecipeError, match="expected one length"):
        MixedSamples({"one": one, "two": PackedTokens(two.tokens, 8)}, [1, 1], [None, None])
    state = Batches(MixedSamples({"one": one, "two": two}, [1, 1], [None, None]), micro_batch=1).state_dict()
    with pytest.raises(RecipeError, match="position is one in other data"):
        Batches(MixedSamples({"one": one, "two": two}, [1, 2], [None, None]), micro_batch=1).load_state_dict(state)


def test_a_resume_may_change_documents_and_nothing_else(tmp_path):
    tokens = source(tmp_path, "one", 3, 0).tokens
    joined, apart, fitted = (
        PackedTokens(tokens, LENGTH, **more)
        for more in ({"documents": "joined"}, {}, {"documents": "separate", "packing": "best_fit"})
    )
    for wrap in (lambda samples: samples, lambda samples: MixedSamples({"one": samples}, [1], [None])):
        assert same_but_documents(wrap(joined).fingerprint, wrap(apart))
        assert same_but_documents(wrap(apart).fingerprint, wrap(joined))
        assert not same_but_documents(wrap(joined).fingerprint, wrap(fitted))
    before = {"settings": {}, "files": {}}
    now = {"settings": {"data.packing": "best_fit", "data.mix": [{}], "data.template": None}, "files": {}}
    assert changes(before, now) == ["data.packing was 'cut' and is 'best_fit'", "data.mix was [] and is [{}]"]


@pytest.mark.parametrize(
    "mesh,split,chunk", [("dp_shard=2,cp=2", [meshpar.ContextParallel()], 0), ("dp_shard=4", [], 3)], ids=str
)
@on_ranks(4)
def test_the_loss_of_each_source_is_reported(mesh, split, chunk, tmp_path):
    chance = np.random.default_rng(0)
    parts = {}
    for name, most in (("low", 8), ("wide", VOCAB - 1)):
        ids = chance.integers(0, most, 16 * 8 + 1)
        file = tmp_path / f"{name}-{torch.distributed.get_rank()}.bin"
        parts[name] = PackedTokens(write_tokens(file, [ids], vocab_size=VOCAB, eos_id=VOCAB - 1), 8)
    samples = MixedSamples(parts, [1, 3], [None, None])
    par = Plan(mesh, [*split, meshpar.FullyShard()]).apply(transformer())
    data = Batches(samples, micro_batch=4, data_rank=par.data_rank, data_size=par.data_size)
    records = JsonLines(tmp_path / f"{torch.distributed.get_rank()}.jsonl")
    optimizer = build_adamw(par.module, AdamWSettings(lr=1e-9))
    settings = TrainSettings(steps=1, log_every=1)
    held = Batches(MixedSamples(parts, [1, 1], [1, 1]), micro_batch=4, data_rank=par.data_rank, data_size=par.data_size)
    trainer = Trainer(
        par,
        CausalLM(chunk=chunk),
        data,
        optimizer,
        Schedule(lr=1e-9, steps=1),
        settings,
        validation=held,
        reporters=[records],
    )
    trainer.run()
    found = [json.loads(line) for line in (tmp_path / f"{torch.distributed.get_rank()}.jsonl").read_text().splitlines()]
    first, last = found[0], found[-1]
    expected = 0.25 * first["train/loss/low"] + 0.75 * first["train/loss/wide"]
    assert first["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert last["val/loss"] == pytest.approx((last["val/loss/low"] + last["val/loss/wide"]) / 2, rel=1e-5)
    for name, part in parts.items():
        whole = part.__getitems__(range(len(part)))
        alone = transformer()
        alone.load_state_dict({key: value.full_tensor() for key, value in par.module.state_dict().items()})
        want = CausalLM().loss(alone, whole)[0].item() / whole["labels"].numel()
        assert last[f"val/loss/{name}"] == pytest.approx(want, rel=1e-4)
