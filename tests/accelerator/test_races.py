"""Streams of a train step access one memory in an order that events or waits keep."""

import torch
import torch.distributed as dist
from torch import nn

import meshpar.forecasting.device as device
from meshpar import FullyShard, ModelLayout, Plan
from meshpar._torch.groups import collective_ops
from meshpar.passes.host_reads import beside
from tests.accelerator.races import Races
from tests.accelerator.simulated import allocate, alone, install, simulated, without_guards
from tests.accelerator.waits import Waits
from tests.support.models_for_parity import on_meta


def races(run):
    """What is found while ``run`` works on a tensor of the device."""
    tensor = torch.ones(4, device=device.NAME)
    with Races() as seen:
        run(tensor)
    return sorted(race.replace(" in elsewhere", "") for race in seen.found)


@alone
def test_accesses_that_nothing_orders_are_found():
    """The control: of each kind of order, with it and without it."""
    module = install()

    def other(tensor, wait):
        stream = module.Stream(module)
        tensor.add_(1)
        if wait:
            stream.wait_stream(module.current_stream())
        with module.stream(stream):
            tensor.mul_(2)
            done = stream.record_event()
        if wait:
            module.current_stream().wait_event(done)
        tensor.sum()

    def collective(tensor, wait):
        made = collective_ops.all_gather_into_tensor(tensor, 2, dist.group.WORLD.group_name)
        (collective_ops.wait_tensor(made) if wait else made).sum()

    def work(tensor, wait):
        pending = dist.all_reduce(tensor, async_op=True)
        if wait:
            pending.wait()
        tensor.sum()

    def hosts(tensor, wait):
        there = torch.ones(4, device="cpu")
        pending = dist.all_reduce(there, async_op=True)
        if wait:
            pending.wait()
        there.add(1)

    def copy(tensor, wait):
        with beside(tensor.device) as to_host:
            read = to_host(tensor)
        there = (
            read()
            if wait
            else next(cell.cell_contents for cell in read.__closure__ if isinstance(cell.cell_contents, torch.Tensor))
        )
        there.add(1)

    with simulated(2):
        for run in (other, collective, work, hosts, copy):
            assert races(lambda tensor, run=run: run(tensor, True)) == [], run
            assert races(lambda tensor, run=run: run(tensor, False)), run


@alone
def test_a_step_whose_streams_do_not_wait_races():
    """The control: what FSDP2 gathers and reduces on streams of its own is used before it is there."""

    class Deaf(Races):
        """As if streams never waited in one way."""

        def __init__(self, left_out):
            super().__init__()
            self.left_out = left_out

        def _around(self, owner, name, before):
            if name != self.left_out:
                super()._around(owner, name, before)

    install()
    model = on_meta(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with simulated(2):
        plan = Plan("dp_shard=2", [FullyShard()])
        par = without_guards(allocate(plan.apply(model, ModelLayout(blocks=("*",)), device_type=device.NAME)))
        found = {}
        for left_out in ("", "", "wait_event", "wait_stream"):  # the first forward tries out more
            with Waits(), Deaf(left_out) as seen:
                par.module(torch.ones(2, 8, device=device.NAME)).sum().backward()
            found[left_out] = "; ".join(sorted(seen.found))
    assert not found[""]
    assert "foreach_all_gather_copy_out races with c10d::_allgather_base_" in found["wait_event"]
    assert "_reduce_scatter_base_ in _fsdp_collectives.DefaultReduceScatter.__call__ races with" in found["wait_stream"]
