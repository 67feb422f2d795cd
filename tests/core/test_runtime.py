"""The process group of a script: closed where its block ends, or with the process; what leaves it says what helps."""

import gc
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import meshpar


def test_a_group_outlives_the_object_that_opened_it():
    """A script without a main() may reuse the name."""
    context = meshpar.distributed("cpu")
    context.__enter__()
    del context
    gc.collect()
    assert dist.is_initialized()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    context = meshpar.distributed("cpu")
    context.__enter__()
    context.__exit__(None, None, None)
    assert not dist.is_initialized()


@pytest.mark.nightly
def test_a_script_that_leaves_its_group_open_ends_well():
    script = """
import meshpar, torch
device = meshpar.distributed("cpu").__enter__()
par = meshpar.Plan("dp_shard=1", [meshpar.FullyShard()]).apply(torch.nn.Linear(2, 2), meshpar.ModelLayout())
par.module(torch.ones(1, 2)).sum().backward()
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_an_error_of_torchs_that_leaves_the_job_says_what_helps():
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor") as caught:
        with meshpar.distributed("cpu"):
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
            distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]) * torch.ones(4, 2)
    assert "place the plain one (a mask, noise, a value) by par.like(tensor, values)" in caught.value.__notes__[0]
