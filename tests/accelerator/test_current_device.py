"""The device that a rank computes on is the current one before anything is allocated there."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshpar.forecasting.device as device
from meshpar import FullyShard, Plan, TensorParallel
from meshpar.core import runtime
from tests.accelerator.simulated import allocate, alone, install, simulated, without_guards
from tests.support.models_for_parity import on_meta, transformer


class Allocations(TorchDispatchMode):
    """Collect the devices on which tensors are made."""

    def __init__(self) -> None:
        super().__init__()
        self.devices = set[torch.device]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.devices.update(
            leaf.device for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.device.type == device.NAME
        )
        return result


@pytest.mark.parametrize("passes", ["shards", "splits"])
@alone
def test_everything_is_on_this_ranks_device_also_where_the_process_group_is_somebody_elses(passes):
    module, here = install(), [0]
    module.device_count, module.current_device = lambda: 4, lambda: here[0]
    module.set_device = lambda device: here.__setitem__(0, device.index)
    torch.accelerator.device_count = module.device_count
    runtime.number = {"LOCAL_RANK": 2}.get
    model = on_meta(transformer)
    plan = Plan("dp_shard=4", [FullyShard()]) if passes == "shards" else Plan("tp=4", [TensorParallel()])
    with simulated(4, as_rank=2), Allocations() as made:
        par = without_guards(allocate(plan.apply(model, device_type=device.NAME)))
        par.module(torch.ones(2, 16, dtype=torch.int64, device=device.NAME)).logits.sum().backward()
    assert made.devices == {torch.device(device.NAME, 2)}, made.devices
