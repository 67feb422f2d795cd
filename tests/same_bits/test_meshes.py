"""The same bits on every mesh: losses, gradients, norms, weights and optimizer state equal one process by torch.equal."""

import functools

import pytest
import torch

from meshpar import FullyShard, HybridShard, Plan, Replicate
from meshpar.testing import on_ranks, random_tokens, token_loss_sum, whole
from tests.support.models_for_parity import VOCAB, transformer

MICRO_BATCHES = 8


def micro_batch(step, number):
    return random_tokens(VOCAB, 2, 16, seed=step * 101 + number, ignored=0.25 * (number % 3))


def scaled_loss(scale, module, batch):
    return token_loss_sum(module, batch)[0] * scale


def train(mesh, passes, *, build=transformer, steps=3, optimizer=None, by_hand=False, micro_batches=MICRO_BATCHES):
    """Return everything that must have the same bits, by name."""
    with torch.device("meta"):
        module = build()
    par = Plan(mesh, passes, same_bits=True).apply(module).materialize(seed=0)
    optimizer = (optimizer or functools.partial(torch.optim.AdamW, lr=1e-2))(par.module.parameters())
    results, names = {}, {id(parameter): name for name, parameter in par.module.named_parameters()}
    for step in range(steps):
        numbers = range(par.data_rank, micro_batches, par.data_size)
        batches = [micro_batch(step, number) for number in numbers]
        scale = par.token_scale(sum(int((batch["labels"] != -100).sum()) for batch in batches))
        loss = functools.partial(scaled_loss, scale)
        if by_hand:
            losses = []
            for batch in par.accumulate(batches):
                losses.append(loss(par.module, batch))
                losses[-1].backward()
        else:
            results[f"loss {step}"] = par.data_sum(par.backward(batches, loss)) / par.loss_size
        results |= {f"gradient {step} {name}": whole(one.grad) for name, one in par.module.named_parameters()}
        results[f"norm {step}"] = par.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    results |= {f"weight {name}": whole(one) for name, one in par.module.named_parameters()}
    for parameter, state in optimizer.state.items():
        results |= {f"{key} {names[id(parameter)]}": whole(value) for key, value in state.items()}
    return results


def differing(one, other):
    """Return the names of what differs by a bit."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    return [name for name in one if one[name].cpu().numpy().tobytes() != other[name].cpu().numpy().tobytes()]


PLANS = {
    "fsdp-2": ("dp_shard=2", [FullyShard()]),
    "fsdp-4": ("dp_shard=4", [FullyShard()]),
    "replicate-2": ("dp_replicate=2", [Replicate()]),
    "replicate-4": ("dp_replicate=4", [Replicate()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
}


@on_ranks(1)
def save(path, passes=(), **options):
    torch.save(train("", list(passes), **options), path)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return the file with the results of one process; each is trained once."""
    folder, files = tmp_path_factory.mktemp("alone"), {}

    def path_of(**options):
        key = repr(sorted(options.items()))
        if key not in files:
            save(folder / str(len(files)), **options)
            files[key] = folder / str(len(files))
        return files[key]

    return path_of


@on_ranks("mesh")
def assert_same_bits(mesh, passes, path, options):
    wrong = differing(torch.load(path), train(mesh, passes, **options))
    assert not wrong, f"{len(wrong)} differ: {wrong[:8]}"


@pytest.mark.parametrize("plan", PLANS)
def test_a_transformer_has_the_same_bits_on_every_mesh(plan, one_process):
    assert_same_bits(*PLANS[plan], one_process(), {})


def test_a_loop_over_accumulate_has_the_same_bits_as_backward(one_process):
    assert_same_bits("dp_shard=2", [FullyShard()], one_process(by_hand=True), {"by_hand": True})
