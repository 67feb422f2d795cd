"""The process group of a script: closed where its block ends, or with the process; what leaves it says what helps."""

import gc
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import meshpar
from tests.support.tiers import daily


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


INIT = """
import sys
import meshpar, torch
device = meshpar.init("cpu", timeout_s=60)
assert meshpar.init("cpu") == device
torch.manual_seed(0)
par = meshpar.Plan("dp_shard=2", meshpar.passes_for("dp_shard=2")).apply(torch.nn.Linear(2, 2), meshpar.ModelLayout())
par.module(torch.ones(1, 2)).sum().backward()
meshpar.print0("done", meshpar.is_main())
if sys.argv[1:]:
    raise ValueError("on every rank") if sys.argv[1] == "error" else SystemExit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("end", daily(["", "error", "3"], ""))
def test_a_script_without_a_main_opens_a_group_that_ends_with_it(end, tmp_path):
    (tmp_path / "script.py").write_text(INIT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py", *end.split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600)
    assert (ended.returncode != 0) == bool(end), ended.stderr[-3000:]
    assert ended.stdout == "done True\n", ended.stderr
    assert ("ValueError: on every rank" in ended.stderr) == (end == "error")
    assert "terminate called" not in ended.stderr and "destroy_process_group" not in ended.stderr


def test_one_process_opens_a_group_until_its_end():
    script = "import meshpar; print(meshpar.init('cpu')); meshpar.print0('rank 0'); assert meshpar.is_main()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "cpu\nrank 0\n", "")
