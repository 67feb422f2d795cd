"""The same gradients on every mesh: what an optimizer makes of them has to have the same bits."""

import functools
import zlib

import torch
from torch import nn

from meshpar import AttentionLayout, ModelLayout, Plan
from meshpar.checkpoints import CheckpointManager
from meshpar.tensors.placements import held_by_this_rank, part_like
from meshpar.testing import on_ranks, whole
from tests.support.comparison import on_one_rank
from tests.support.models_for_parity import on_meta


class Uneven(nn.Module):
    """Two layers whose rows and blocks of rows no mesh divides evenly."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(70, 522), nn.Linear(522, 70), nn.LayerNorm(70)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))

    def meshpar_layout(self):
        return ModelLayout(tensor={"up": "colwise", "down": "rowwise"}, attention=AttentionLayout(mixers=("down",)))


@functools.cache
def drawn(name, shape, step):
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=draw) * 10.0 ** (step % 3 - 2)


def give(module, step):
    """Set the gradients of a step, this rank's parts of them."""
    for name, parameter in module.named_parameters():
        part = drawn(name, parameter.shape, step)[held_by_this_rank(parameter)].to(parameter.dtype, copy=True)
        parameter.grad = part if type(parameter.data) is torch.Tensor else part_like(part, parameter)


def trained(module, make, steps, first=0):
    optimizer = make(module)
    advance(module, optimizer, range(first, first + steps))
    return optimizer


def advance(module, optimizer, steps):
    for step in steps:
        give(module, step)
        optimizer.step()


def bits(module, optimizer):
    """The whole weights and states, by name."""
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = whole(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
    return found


def alone(make, steps, build=Uneven):
    """What one process makes of the gradients."""
    with torch.random.fork_rng():
        module = initial(build)
    optimizer = trained(module, make, steps)
    return bits(module, optimizer)


def initial(build=Uneven):
    module = build()
    for name, parameter in module.named_parameters():
        parameter.data.copy_(drawn(name, parameter.shape, -1))
    return module


def on(mesh, passes, build=Uneven):
    """The module on a mesh, with the same weights."""
    par = Plan(mesh, passes).apply(on_meta(build)).materialize(seed=0)
    reset(par, build)
    return par


def reset(par, build=Uneven):
    par.load_state_dict(initial(build).state_dict())
    return par.module


def same(expected, got):
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def go_on_with_the_same_bits(worlds, folder, make, build=Uneven, half=3):
    """A checkpoint of any mesh of ``worlds``, number of ranks -> meshes, goes on on every other as one process does."""
    for ranks, meshes in worlds.items():
        on_ranks(ranks, timeout_s=400)(_save)(folder / f"{ranks}", make, meshes, build, half)
    saved = sorted(folder.glob("*/*"))
    assert len(saved) == sum(map(len, worlds.values()))
    for ranks, meshes in worlds.items():
        on_ranks(ranks, timeout_s=400)(_go_on)(saved, make, meshes, build, half)


def _save(folder, make, meshes, build, half):
    expected = on_one_rank(lambda: alone(make, 2 * half, build))
    for number, (mesh, passes) in enumerate(meshes):
        par = on(mesh, passes, build)
        optimizer = trained(par.module, make, half)
        with CheckpointManager(folder / f"{number}") as manager:
            manager.save(half, par, optimizer)
        advance(par.module, optimizer, range(half, 2 * half))
        same(expected, bits(par.module, optimizer))


def _go_on(folders, make, meshes, build, half):
    expected = on_one_rank(lambda: alone(make, 2 * half, build))
    for mesh, passes in meshes:
        par = on(mesh, passes, build)
        for folder in folders:
            optimizer = make(reset(par, build))
            with CheckpointManager(folder) as manager:
                manager.restore(par, optimizer)
            advance(par.module, optimizer, range(half, 2 * half))
            same(expected, bits(par.module, optimizer))
