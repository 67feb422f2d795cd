"""What runs in ``untouched`` leaves no trace, wherever a module holds what it writes; what nobody can put back is
refused before.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from meshpar.passes.untouched import CannotKeep, untouched

Pair = namedtuple("Pair", "left right")


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


KEPT = Holder(zeros())


def of_default(x=zeros()):  # noqa: B008
    return x


class Writes(nn.Module):
    """Writes tensors, arrays and generators in all kinds of places."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.seen = [zeros()]
        self.pair, self.most, self.holder, self.slots = (
            Pair(zeros(), zeros()),
            torch.arange(3.0).max(0),
            Holder(zeros()),
            Slotted(zeros()),
        )
        self.partial, self.default = functools.partial(Holder, zeros()), of_default
        self.bag, self.frozen, self.keys = {zeros()}, frozenset([zeros()]), {zeros(): 1}
        self.dice, self.array, self.owner = np.random.default_rng(0), (np.zeros(2),), weakref.ref(KEPT)
        self.iterates, self.numbers = Iterates(), itertools.count()

    def tensors(self):
        sets = [*self.bag, *self.frozen, *self.keys]
        attributes = [self.holder.x, self.slots.x, self.owner().x, self.partial().x, self.default()]
        return [*self.weight.seen, *self.pair, self.most.values, *sets, *attributes]

    def left(self):
        plain = [
            self.array[0].tolist(),
            self.dice.bit_generator.state["state"]["state"],
            self.iterates.left,
            repr(self.numbers),
        ]
        return [*plain, *((tensor.tolist(), tensor._version, id(tensor)) for tensor in self.tensors())]

    def forward(self, x, pair):
        for tensor in (x, *pair, *self.tensors()):
            tensor.add_(1)
        x.unsqueeze_(0)
        self.array[0][0] = self.dice.random()
        next(self.iterates)
        next(self.numbers)


def test_what_a_forward_writes_is_put_back_wherever_it_stands():
    module, x, pair = Writes(), zeros(), Pair(zeros(), zeros())
    before = module.left()
    saved = (torch.ones(2, requires_grad=True) * x).sum()  # autograd keeps x, and sees whether somebody wrote it
    with untouched(module, x, pair):
        module(x, pair)
        assert x.tolist() == [[1, 1]] and pair.left.tolist() == [1, 1]
        assert all(tensor.tolist() in ([1, 1], 3.0) for tensor in module.tensors())
    assert module.left() == before
    assert x.tolist() == pair.left.tolist() == pair.right.tolist() == [0, 0]
    saved.backward()


class Locked:
    def __init__(self):
        self.lock, self.seen = threading.Lock(), []


def test_what_other_threads_may_use_is_refused_and_left_alone():
    with ThreadPoolExecutor(1) as pool, open(__file__) as file:
        filled = queue.Queue()
        filled.put(1)
        shared = [filled, queue.SimpleQueue(), threading.Event(), threading.Thread(), pool, file, Locked()]
        for value in shared:
            module = nn.Linear(2, 2)
            module.held = (value,)
            with (
                pytest.raises(CannotKeep, match=rf"it reaches a {type(value).__name__}, which other threads"),
                untouched(module),
            ):
                raise AssertionError
        assert filled.get_nowait() == 1
    batches = iter(DataLoader(range(2)))
    for iterator in (batches, zip([1], [2]), (number for number in range(2)), iter({1})):
        module = nn.Linear(2, 2)
        module.held = [iterator]
        with pytest.raises(CannotKeep, match=r"it reaches an iterator \("), untouched(module):
            raise AssertionError
        assert len(list(iterator)) >= 1


def test_a_lock_that_a_cached_property_holds_is_no_objects_own():
    class Cached(nn.Linear):
        @functools.cached_property
        def doubled(self):
            return 2

    module = Cached(2, 2)
    with untouched(module):
        assert module.doubled == 2
    assert "doubled" not in vars(module)
