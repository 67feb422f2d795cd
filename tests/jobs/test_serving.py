"""Weights reach an engine as whole versions, whoever is lost on the way."""

from __future__ import annotations

import multiprocessing
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

import meshpar
from meshpar.serving import receive, send
from meshpar.testing import on_ranks
from tests.support.models_for_parity import transformer
from tests.support.object_store import free_ports
from tests.support.patience import patient

SHAPES = [(64, 1000), (100_000,), (0,), (3,)]


class Same:
    """Tensors that all hold the number of their version."""

    to = 0

    def __init__(self, version):
        self.version = version

    def metadata(self):
        return [(f"t{number}", torch.float32, shape) for number, shape in enumerate(SHAPES)]

    def __iter__(self):
        for name, dtype, shape in self.metadata():
            yield name, torch.full(shape, float(self.version), dtype=dtype)


def sending(address, first, stop):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for version in range(first, stop):
        while not (sent := send(Same(version), address, timeout_s=patient(5))).acknowledged:
            assert sent.problem
            time.sleep(0.01)
        time.sleep(0.02)  # so that kills find it at work
    os._exit(0)


def receiving(address, log):
    with receive(address, timeout_s=patient(5)) as receiver, open(log, "a") as file:
        seen = 0
        while seen < STOP - 1:
            weights = receiver.newest
            if weights is None or weights.version == seen:
                time.sleep(0.002)
                continue
            seen = weights.version
            values = {float(value) for tensor in weights.tensors.values() for value in tensor.unique()}
            file.write(f"{seen} {sorted(values) == [float(seen)]}\n")
            file.flush()
    os._exit(0)


STOP = 101


@pytest.mark.parametrize("kills", [6, pytest.param(30, marks=pytest.mark.long)])
def test_each_version_that_is_served_is_whole_whoever_is_killed(tmp_path, kills):
    address = f"127.0.0.1:{free_ports(1)[0]}"  # which no system hands to another while the receiver is killed
    fork, log, draws = multiprocessing.get_context("fork"), tmp_path / "log", random.Random(0)

    def newest():
        lines = log.read_text().splitlines() if log.exists() else []
        return int(lines[-1].split()[0]) if lines else 0

    def start(which):
        args = (address, max(1, newest()), STOP) if which == "sender" else (address, str(log))
        process = fork.Process(target=sending if which == "sender" else receiving, args=args)
        process.start()
        return process

    running = {which: start(which) for which in ("receiver", "sender")}
    for _ in range(kills):
        time.sleep(draws.uniform(0.01, 0.2))
        which = draws.choice(list(running))
        running[which].kill()
        running[which].join()
        running[which] = start(which)
    deadline = time.monotonic() + patient(120)
    while newest() < STOP - 1 and time.monotonic() < deadline:
        for which, process in running.items():
            if process.exitcode not in (None, 0):
                running[which] = start(which)
        time.sleep(0.05)
    for process in running.values():
        process.kill()
        process.join()
    lines = log.read_text().splitlines()
    assert newest() == STOP - 1 and all(line.endswith("True") for line in lines)


@on_ranks(2)
def test_a_parallel_models_weights_come_as_they_are_streamed() -> None:
    par = meshpar.Plan("dp_shard=2", [meshpar.FullyShard()]).apply(transformer())
    stream = par.published(dtype=torch.bfloat16)
    nobody = send(stream, "127.0.0.1:9", timeout_s=1)
    assert not nobody.acknowledged and "127.0.0.1:9" in nobody.problem
    receiver = receive() if dist.get_rank() == 0 else None
    address = [receiver.address if receiver else ""]
    dist.broadcast_object_list(address)
    sent = send(stream, address[0], version=7)
    assert sent.acknowledged and sent.version == 7, sent
    expected = dict(stream)
    if receiver:
        weights = receiver.wait(7, patient(5))
        assert weights.digest == sent.digest and list(weights.tensors) == list(expected)
        assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in expected.items())
        with pytest.raises(meshpar.MeshparError, match="version 8 did not come"):
            receiver.wait(8, 0.1)
        receiver.close()


def test_an_address_without_a_port_is_refused():
    with pytest.raises(meshpar.MeshparError, match="expected host:port"):
        receive("localhost")
