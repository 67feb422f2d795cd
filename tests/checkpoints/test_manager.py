"""CheckpointManager: what was saved on one mesh is restored on any, bit for bit, or refused as a whole."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshpar
from meshpar._torch.groups import flattened
from meshpar.checkpoints import CheckpointManager, DistributedCheckpoint, read_manifest, verify_files
from meshpar.checkpoints.format.archive import read_metadata
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import on_ranks
from tests.checkpoints.test_commit import Job

ROWS = (12, 10, 6, 5, 1, 0)


class Odd(nn.Module):
    """Every kind of tensor that a checkpoint has to hold; the forward pass is the sum of all of them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.rows = nn.ParameterList(torch.randn(rows, 4, generator=generator) for rows in ROWS)
        self.embed = nn.Embedding(16, 4, _weight=torch.randn(16, 4, generator=generator))
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(1, generator=generator))
        self.frozen = nn.Parameter(torch.randn(6, 2, generator=generator), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, 3, generator=generator))
        self.low = nn.Parameter(torch.randn(7, 2, generator=generator).bfloat16(), requires_grad=False)
        self.register_buffer("tiny", torch.randn(6, 3, generator=generator).to(torch.float8_e4m3fn))
        self.register_buffer("counter", torch.tensor(seed))
        self.register_buffer("mask", torch.rand(9, generator=generator) > 0.5)
        self.register_buffer("steps", torch.arange(5) + seed)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self) -> torch.Tensor:
        return sum(((row * self.scale) ** 2).sum() for row in self.rows) + (self.head.weight**3).sum()


def make(kind: str, seed: int) -> Job:
    """Shard the module the way the passes do: tensor-parallel parameters first, FSDP2 over what is left."""
    module = Odd(seed)
    if kind == "replicate":
        return Job(module, init_device_mesh("cpu", (world(),), mesh_dim_names=("dp_replicate",)))
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("dp_shard",))
        fully_shard(module, mesh=mesh, ignored_params={module.low})
        return Job(module, mesh)
    if kind in ("hsdp", "world"):
        mesh = init_device_mesh("cpu", (2, world() // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(module, mesh=flattened(mesh) if kind == "world" else mesh, ignored_params={module.low})
        return Job(module, mesh)
    if kind in ("fsdp_tp", "hsdp_tp", "tp"):
        tp = world() if kind == "tp" else 2
        names = ("dp_replicate", "dp_shard", "tp")
        sizes = (2, world() // tp // 2, tp) if kind == "hsdp_tp" else (world() // tp, tp)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])
        for index, dim in ((0, 0), (1, 1), (3, 0)):
            module.rows[index] = nn.Parameter(distribute_tensor(module.rows[index].detach(), mesh["tp"], [Shard(dim)]))
        if kind != "tp":
            whole = {p for p in module.parameters() if not isinstance(p, DTensor) or p is module.low}
            fully_shard(module, mesh=mesh[names[-len(sizes) : -1]], ignored_params=whole)
        return Job(module, mesh)
    raise AssertionError(kind)


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def train(job: Job, steps: int = 2) -> torch.optim.Optimizer:
    """Take steps; every rank's data is the same, so that the values do not depend on the mesh."""
    optimizer = optimizer_of(job)
    for _ in range(steps):
        # Gradients by hand: a forward pass over mixed placements is not what these tests are about.
        for index, parameter in enumerate(job.module.parameters()):
            if parameter.requires_grad and parameter is not job.module.unused:
                parameter.grad = torch.ones_like(parameter) * (index + 1)
        optimizer.step()
    return optimizer


def optimizer_of(job: Job) -> torch.optim.Optimizer:
    decayed = [p for p in job.module.parameters() if p.requires_grad and p.ndim == 2]
    others = [p for p in job.module.parameters() if p.requires_grad and p.ndim != 2]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.125, betas=(0.5, 0.75)
    )


def everything(job: Job, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    values = {name: full(tensor) for name, tensor in job.module.state_dict().items()}
    for name, parameter in job.module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            values[f"{name}/{key}"] = full(value)
    return values


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and one[name].shape == other[name].shape, name
        assert bits(one[name]) == bits(other[name]), name


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_torch_itself_loads_what_was_saved(tmp_path, one_process):
    job = make("replicate", seed=1)
    folder = CheckpointManager(tmp_path).save(1, job, train(job))
    stock = {name: torch.zeros_like(tensor) for name, tensor in job.module.state_dict().items()}
    dcp.load({"model": stock}, checkpoint_id=folder)
    assert_same(stock, dict(job.module.state_dict()))
    assert "head.weight" in stock, "a tied tensor is read under each of its names"
    verify_files(folder, read_manifest(folder), "full")


def test_its_metadata_has_the_five_tensor_properties_that_every_torch_reads(tmp_path, one_process, monkeypatch):
    five = TensorProperties.__getstate__
    monkeypatch.setattr(
        TensorProperties, "__getstate__", lambda properties: (*five(properties)[:5], (1,))
    )  # torch 2.15 adds strides
    job = make("replicate", seed=1)
    folder = CheckpointManager(tmp_path).save(1, job, train(job))
    entries = read_metadata((folder / ".metadata").read_bytes(), folder).state_dict_metadata
    assert {len(entry.properties.state) for entry in entries.values()} == {5}


@on_ranks(2)
def test_weights_come_from_any_distributed_checkpoint(tmp_path):
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=32, dim=16, layers=1, heads=4, hidden=24, tied=False)
    stranger = Transformer(config)
    dcp.save(stranger.state_dict(), checkpoint_id=tmp_path)
    with torch.device("meta"):
        module = Transformer(config)
    par = (
        meshpar.Plan("dp_shard=2", [meshpar.FullyShard()])
        .apply(module)
        .materialize(weights=DistributedCheckpoint(tmp_path))
    )
    assert_same({name: full(tensor) for name, tensor in par.module.state_dict().items()}, stranger.state_dict())


def parallelized(mesh: str, passes: list, seed: int) -> tuple[meshpar.Parallelized, torch.optim.Optimizer]:
    config = TransformerConfig(vocab_size=32, dim=16, layers=2, heads=4, hidden=24, tied=True, dropout=0.1)
    with torch.device("meta"):
        model = Transformer(config)
    par = meshpar.Plan(mesh, passes).apply(model).materialize(seed=seed)
    par.manual_seed(seed)
    return par, torch.optim.AdamW(par.module.parameters(), lr=1e-2, fused=True)


def go_on(par: meshpar.Parallelized, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = par.module(ids, labels=ids).loss
        loss.backward()
        par.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(4)
def test_training_with_dropout_resumes_bitwise_on_the_same_mesh_and_goes_on_on_another(tmp_path):
    hybrid = "dp_shard=2,tp=2", [meshpar.TensorParallel(), meshpar.FullyShard()]
    par, optimizer = parallelized(*hybrid, seed=1)
    go_on(par, optimizer)
    manager = CheckpointManager(tmp_path)
    manager.save(3, par, optimizer)
    want = go_on(par, optimizer)
    values = {name: full(tensor) for name, tensor in par.module.state_dict().items()}
    par, optimizer = parallelized(*hybrid, seed=2)
    assert manager.restore(par, optimizer).random == "restored"
    assert go_on(par, optimizer) == want
    assert_same(values, {name: full(tensor) for name, tensor in par.module.state_dict().items()})
    par, optimizer = parallelized("dp_replicate=2,dp_shard=2", [meshpar.HybridShard()], seed=3)
    assert manager.restore(par, optimizer).random == "derived"
    par.module.eval()
    par.check_replicas()
    go_on(par, optimizer)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@on_ranks(2)
def test_an_optimizer_steps_on_where_a_scalar_parameters_state_was_restored():
    def begun() -> tuple[meshpar.Parallelized, torch.optim.Optimizer]:
        torch.manual_seed(0)
        par = meshpar.Plan("dp_shard=2", [meshpar.FullyShard()]).apply(Scaled())
        return par, torch.optim.AdamW(par.module.parameters(), lr=0.1)

    def step(par: meshpar.Parallelized, optimizer: torch.optim.Optimizer) -> None:
        par.module(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    folder = [tempfile.mkdtemp(prefix="meshpar-scalar-")]
    dist.broadcast_object_list(folder)
    (par, optimizer), (other, restored) = begun(), begun()
    step(par, optimizer)
    with CheckpointManager(folder[0]) as manager:
        manager.save(1, par, optimizer)
        manager.restore(other, restored)
    for pair in ((par, optimizer), (other, restored)):
        step(*pair)
    assert_same({"scale": full(other.module.scale)}, {"scale": full(par.module.scale)})
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
