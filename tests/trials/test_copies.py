"""Copies of blocks have all that a forward writes to themselves; what cannot be copied is named before."""

import functools
import itertools
import queue
import random
import threading
import weakref
from collections import deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from meshpar.step.inner_calls import in_place_of
from meshpar.trials.copies import CannotCopy, copied_state, copy_block, undisturbed
from meshpar.trials.engine import as_evaluated

Pair = namedtuple("Pair", "left right")
LOSSES, CALLS = [], 0


@dataclass
class Holder:
    x: torch.Tensor


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor


class Iterates:
    def __init__(self):
        self.left = 3

    def __next__(self):
        self.left -= 1


def zeros():
    return torch.zeros(2)


def counter():
    calls, seen = 0, [zeros()]

    def count():
        nonlocal calls
        calls += 1
        seen[0].add_(1)
        return calls

    return count, lambda: (calls, seen[0].tolist())


class Writes(nn.Module):
    """Writes tensors, arrays and generators in all kinds of places."""

    called = 0

    def __init__(self):
        super().__init__()
        self.linear, self.pair, self.holder, self.slots = nn.Linear(2, 2), Pair(zeros(), zeros()), Holder(zeros()), None
        self.slots, self.keys, self.partial = Slotted(zeros()), {"a": [zeros()]}, functools.partial(Holder, zeros())
        self.register_buffer("mean", zeros())
        self.dice, self.array, self.generator = np.random.default_rng(0), (np.zeros(2),), torch.Generator()
        self.iterates, self.numbers, (self.count, self.counted) = Iterates(), itertools.count(), counter()
        self.seen, self.latest, self.random = set(), deque(maxlen=3), random.Random(0)
        self.itself, self.plain = weakref.ref(self), self.linear.forward
        self.linear.forward = lambda x: 2 * self.itself().plain(x)

    def tensors(self):
        return [*self.pair, self.holder.x, self.slots.x, *self.keys["a"], self.partial().x, self.mean]

    def left(self):
        state = self.dice.bit_generator.state["state"]["state"]
        plain = [self.array[0].tolist(), state, self.iterates.left, repr(self.numbers), self.counted()]
        plain += [self.called, list(LOSSES), CALLS, self.generator.get_state().tolist()]
        plain += [set(self.seen), list(self.latest), self.random.getstate()]
        return [*plain, *((tensor.tolist(), tensor._version, id(tensor)) for tensor in self.tensors())]

    def forward(self, x, pair):
        global CALLS
        for tensor in (x, *pair, *self.tensors()):
            tensor.add_(1)
        self.array[0][0] = self.dice.random() + torch.rand((), generator=self.generator).item()
        next(self.iterates), next(self.numbers), self.count()
        self.seen.add(len(self.seen)), self.latest.append(self.random.random())
        type(self).called += 1
        LOSSES.append(torch.rand(()))
        CALLS += 1
        return self.linear(x)


def test_what_a_forward_writes_is_the_copys():
    module, x, pair = Writes(), zeros(), Pair(zeros(), zeros())
    module.holder.x = nn.Linear(2, 2)(x).detach()
    module.losses = [(module.linear.weight * 1).sum()]  # of autograd's graph
    before, drawn = module.left(), torch.get_rng_state()
    module.register_forward_hook(lambda *_: pytest.fail("a user's hook"))
    weight, bias = torch.full((2, 2), 3.0), torch.zeros(2)
    replaced = {module.linear.weight: weight, module.linear.bias: bias}
    copied, (given, others) = copy_block(module, replaced, (x, pair))
    with undisturbed(module.modules()):
        assert copied(given, others).tolist() == [12, 12], "twice, with the copy's weights"
    assert copied.counted() == (1, [1, 1]) and copied.itself() is copied and copied.mean.tolist() == [1, 1]
    assert not copied.training and module.training and copied.linear.weight is weight
    assert module.left() == before and torch.equal(torch.get_rng_state(), drawn)
    with copied_state(module, (x, pair)) as (given, others):
        module(given, others)
        assert module.counted() == (1, [1, 1]) and given.tolist() == others.left.tolist() == [1, 1]
    assert module.left() == before and torch.equal(torch.get_rng_state(), drawn)
    assert x.tolist() == pair.left.tolist() == pair.right.tolist() == [0, 0]
    with pytest.raises(ValueError, match="left early"), copied_state(module, None):
        module.left_early = True
        raise ValueError("left early")
    assert not hasattr(module, "left_early")


def test_modules_outside_of_a_block_are_shared():
    outer, around = nn.Linear(2, 2), {}
    block = nn.Sequential(nn.Linear(2, 2))
    block.model, around["block"] = [outer], block
    block.around, block.cached = around, functools.lru_cache(lambda: around)
    copied, _ = copy_block(block, {}, None)
    assert copied.model[0] is outer and copied.cached()["block"] is copied and copied[0] is not block[0]
    assert copied[0].weight is block[0].weight


def test_a_forward_that_computes_for_one_call_is_in_no_copy():
    module, lock = nn.Linear(2, 2), threading.Lock()
    x, plain = torch.ones(2), module.forward
    for own in (None, lambda x: 2 * plain(x)):
        if own is not None:
            module.forward = own
        expected = module(x)
        with in_place_of(module, lambda x: lock):
            copied, _ = copy_block(module, {}, None)
            assert copied.forward(x).equal(expected) and module(x) is lock
            with copied_state(module, None):
                assert module(x).equal(expected)
            assert module(x) is lock
        assert module(x).equal(expected)


class Locked:
    def __init__(self):
        self.lock, self.seen = threading.Lock(), []


def test_what_cannot_be_copied_is_named_and_left_alone():
    with ThreadPoolExecutor(1) as pool, open(__file__) as file:
        filled = queue.Queue()
        filled.put(1)
        batches, numbers = iter(DataLoader(range(2))), (number for number in range(2))
        shared = [filled, queue.SimpleQueue(), threading.Event(), threading.Thread(), pool, file, Locked(), numbers]
        for value in (*shared, batches):
            module = nn.Linear(2, 2)
            module.held = (value,)
            with pytest.raises(CannotCopy, match="it cannot be copied: "), copied_state(module, None):
                raise AssertionError
            with pytest.raises(CannotCopy, match="it cannot be copied: "):
                copy_block(module, {}, None)
        assert filled.get_nowait() == 1 and len(list(numbers)) == len(list(batches)) == 2


def test_an_attribute_that_appears_in_a_run_is_the_copys():
    class Cached(nn.Linear):
        @functools.cached_property
        def doubled(self):
            return 2

    module = Cached(2, 2)
    with copied_state(module, None):
        assert module.doubled == 2
    assert "doubled" not in vars(module)


class Merges(nn.Linear):
    """A layer as libraries of adapters write it: its mode decides what its weight is."""

    def train(self, mode=True):
        raise AssertionError("a trial calls train()")


def test_a_trial_evaluates_modules_without_a_call_of_their_train():
    module = nn.Sequential(Merges(2, 2))
    with as_evaluated(module, []):
        assert not module[0].training and not module.training
    assert module[0].training and module.training
