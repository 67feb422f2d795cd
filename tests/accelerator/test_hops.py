"""Hosts of thousands of ranks exchange small things in a few hops, whatever their number."""

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshpar._torch.groups import collective_counts, default_store
from meshpar.checkpoints.steps import ranks as saving_ranks
from meshpar.checkpoints.steps.ranks import SavingRanks
from meshpar.core.errors import CheckpointError
from meshpar.exchange import host_messages
from meshpar.exchange.host_messages import FAN_OUT, branch_of, hops
from meshpar.exchange.ranks import Largest
from meshpar.testing import on_ranks
from tests.support.patience import patient
from tests.support.tiers import daily


def test_the_largest_of_1024_and_8192_ranks_is_known_after_three_and_four_hops():
    for ranks, count in ((1024, 3), (8192, 4)):
        distances = hops(ranks)
        assert len(distances) == count and all(len(hop) < FAN_OUT for hop in distances)
        assert sum(map(len, distances)) <= 36, "messages that a rank sends"
    assert [len(hops(ranks, 2)) for ranks in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 3, 3, 4]


def test_every_rank_hears_of_every_other_whatever_their_number():
    for most in (2, 3, FAN_OUT):
        for ranks in range(1, 301):
            knows = torch.eye(ranks, dtype=torch.bool)  # whom each rank has heard of
            for distances in hops(ranks, most):
                knows = torch.stack([knows, *(knows.roll(far, 0) for far in distances)]).any(0)
            assert knows.all(), (ranks, most)


class Network:
    """Messages of ranks that are threads; the sender waits for nobody."""

    def __init__(self):
        self.boxes, self.sent = defaultdict(queue.SimpleQueue), defaultdict(int)
        self.peers = defaultdict(set)

    def messages(self, name, group):
        return At(self, group.rank(), group.size())

    def of_threads(self, size):
        """What opens messages in threads whose names are their ranks."""
        return lambda name, timeout_s: At(self, int(threading.current_thread().name), size)


class At:
    def __init__(self, network, rank, size):
        self.network, self.rank, self.size = network, rank, size

    def send(self, tensor, to, tag=0):
        assert to != self.rank
        self.network.sent[self.rank] += 1
        self.network.peers[self.rank].add(to)
        self.network.boxes[self.rank, to, tag].put(tensor.clone())
        return Done()

    def receive(self, into, source, tag=0):
        return Done(lambda: into.copy_(self.network.boxes[source, self.rank, tag].get(timeout=100)))


class Done:
    def __init__(self, act=lambda: None):
        self.wait = lambda timeout=None: act()


class Group:
    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.parametrize("ranks", [17, 100, 257, 300])
def test_threads_in_the_place_of_many_ranks_get_the_largest(monkeypatch, ranks):
    network = Network()
    monkeypatch.setattr(host_messages, "Messages", network.messages)
    groups = [Group(rank, ranks) for rank in range(ranks)]
    numbers = torch.randint(-(1 << 62), 1 << 62, (3, ranks, 5), generator=torch.Generator().manual_seed(ranks))

    def begun(rank):
        return [Largest(mine[rank], groups[rank]) for mine in numbers]

    with ThreadPoolExecutor(8) as pool:
        exchanges = list(pool.map(begun, range(ranks)))
    for rank in range(ranks):
        assert all(map(torch.equal, [one.read() for one in exchanges[rank]], numbers.amax(1))), rank
    assert set(network.sent.values()) == {3 * sum(map(len, hops(ranks)))}


@pytest.mark.parametrize(("ranks", "most"), daily([(3, 2), (4, 2), (5, 2), (5, 3)], (4, 2)))
@on_ranks("ranks")
def test_ranks_get_the_largest_by_hops(ranks, most):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group, one_hop = dist.new_group(), Largest.ONE_HOP
    Largest.ONE_HOP = most
    try:
        if rank == 1:
            default_store().wait([f"begun by rank 0 of {ranks}, {most}"])  # whose exchange goes on beside it
        begun = [Largest(torch.tensor([rank, -rank, number * (rank == 2)]), group) for number in range(5)]
        default_store().set(f"begun by rank {rank} of {ranks}, {most}", "")
        dist.barrier(group)  # collectives of the same ranks beside it
        for number, one in reversed(list(enumerate(begun))):
            assert one.read().tolist() == one.read().tolist() == [ranks - 1, 0, number * (ranks > 2)]
        assert {count for title, count in collective_counts().items() if title.startswith("messages of ")} >= {5}
        floats = Largest(torch.tensor([float("nan") if rank == 1 else 1.0, 0.5 * rank]), group).read()
        assert floats.isnan().tolist() == [True, False] and floats[1] == 0.5 * (ranks - 1)
    finally:
        Largest.ONE_HOP = one_hop


@on_ranks(3, fresh="ends a rank")
def test_a_rank_that_does_not_come_is_an_error_in_the_time_of_the_group():
    Largest.ONE_HOP, host_messages.shared_timeout = 2, lambda: timedelta(seconds=2)
    if dist.get_rank() < 2:
        with pytest.raises(RuntimeError):
            Largest(torch.ones(3), dist.group.WORLD).read()


@pytest.mark.parametrize("ranks", [1, 2, 16, 17, 18, 273, 1024, 8192])
def test_a_tree_of_ranks_is_as_low_as_its_branches_allow(ranks):
    depth, above = [0] * ranks, 0
    for rank in range(ranks):
        branch = branch_of(rank, ranks)
        if branch.parent is not None:
            depth[rank] = depth[branch.parent] + 1
            assert rank in [child for child, _ in branch_of(branch.parent, ranks).children]
        assert len(branch.children) <= FAN_OUT
        below = [one for child, end in branch.children for one in range(child, end)]
        assert below == list(range(rank + 1, branch.end))
        above += len(branch.children)
    assert above == ranks - 1 and max(depth) == {1: 0, 2: 1, 16: 1, 17: 1, 18: 2, 273: 2, 1024: 3, 8192: 4}[ranks]


def test_rank_0_of_1024_saves_with_16_sockets_and_96_messages(monkeypatch):
    """The three exchanges of a save whose plan is known: sizes and values of each are two messages."""
    network, ranks, said = Network(), 1024, {}
    monkeypatch.setattr(saving_ranks, "Messages", network.of_threads(ranks))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)

    def save():
        mine = SavingRanks(100.0)
        folder = mine.share("beginning", lambda: "folder")
        plan = mine.agree("planning", lambda: mine.rank, sum)
        place = mine.agree("writing", lambda: mine.rank**2, lambda reports: reports[-1])
        said[mine.rank] = folder, plan, place
        said["sent", mine.rank] = network.sent[mine.rank]
        said["spread", mine.rank] = mine.spread("dividing", lambda: [-rank for rank in range(ranks)])
        with pytest.raises(CheckpointError, match=r"planning failed on 2 of 1024 ranks:\n  rank 7: .*\n  rank 900: "):
            mine.agree("planning", lambda: 1 / (mine.rank not in (7, 900)), sum)
        with pytest.raises(CheckpointError, match="committing failed on 1 of 1024 ranks:\n  rank 0: "):
            mine.agree("writing", lambda: 1, lambda found: 1 / 0, deciding="committing")
        said["end", mine.rank] = True

    in_threads(save, ranks)
    assert {said[rank] for rank in range(ranks)} == {("folder", sum(range(ranks)), 1023**2)}
    assert [said["spread", rank] for rank in range(ranks)] == [-rank for rank in range(ranks)]
    assert all(said["end", rank] for rank in range(ranks))
    assert len(network.peers[0]) == FAN_OUT and said["sent", 0] == 3 * 2 * FAN_OUT


def in_threads(act, ranks):
    """Run a function in a thread for each rank."""
    size = threading.stack_size(256 << 10)
    threads = [threading.Thread(target=act, name=str(rank), daemon=True) for rank in range(ranks)]
    threading.stack_size(size)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(100))
