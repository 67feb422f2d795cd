"""Rows of `core`: see `tests/remedies/rows.py`."""

import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import meshpar
from meshpar import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    FullyShard,
    HybridShard,
    MeshSpec,
    ModelLayout,
    Pass,
    Plan,
    Role,
    Stage,
    TensorParallel,
)
from meshpar.core import registry, runtime
from meshpar.core.passes import held_mesh
from tests.remedies.rows import Row, Tested, alone
from tests.support.plans import TwoLayers, problems, shard, transformer


@dataclass
class Halves(Pass):
    """A pass of a stranger, on an axis that no installed pass works on."""

    name, stage, roles = "Halves", Stage.TENSOR, {"halves": Role.FEATURES}

    def apply(self, module, layout, mesh):
        pass


class Positions(Pass):
    name, stage, roles = "Positions", Stage.TENSOR, {"cp": Role.POSITIONS}

    def apply(self, module, layout, mesh):
        pass


def applied(module, hook=None):
    """The module after a plan on two simulated ranks; a hook is set on its parameters then."""
    with runtime.simulated(2):
        par = Plan("dp_shard=2", [FullyShard()]).apply(module)
        if hook is not None:
            for parameter in par.module.parameters():
                hook(parameter)
        return par.module


def hooked(module):
    module.layers[0].weight.register_hook(lambda gradient: gradient)
    return module


def embedding(**options):
    return nn.Sequential(nn.Embedding(8, 4, **options))


def scaled_rows(*, sharded):
    """Rows of an embedding after a step, none longer than 1: torch's own writes in the forward, or the remedy's."""
    torch.manual_seed(0)
    layer = nn.Embedding(8, 4, max_norm=None if sharded else 1.0)
    module = nn.Sequential(layer)
    if sharded:
        with meshpar.distributed("cpu"):
            weight = Plan("", []).apply(module).module[0].weight
            max_norm = 1.0
            with torch.no_grad():
                weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1))
            return weight.detach().clone()
    layer(torch.arange(8))
    return layer.weight.detach().clone()


def lazy(*, forward):
    module = nn.Sequential(nn.LazyLinear(4))
    if forward:
        module(torch.zeros(2, 8))
    return module


def experts(**options):
    return transformer(experts=4, experts_per_token=2, expert_hidden=16, qk_norm=True, **options)


def beside_the_recipe(source):
    """Import a class from a file in a folder that is on the path, as that of a recipe is while it trains."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
        (Path(folder) / "module_of_a_row.py").write_text(source)
        return registry.imported("module_of_a_row.Plan").__name__


def device_of(*, rank, devices):
    with (
        mock.patch.dict(os.environ, LOCAL_RANK=str(rank)),
        mock.patch("torch.accelerator.device_count", lambda: devices),
    ):
        return runtime.device("cuda")


def wrapped(job):
    with meshpar.distributed("cpu"):
        return job()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def with_environment(variables):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    with mock.patch.dict(os.environ):
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(variables)
        return wrapped(lambda: torch.distributed.get_world_size())


def spec(text, **options):
    return MeshSpec(text, **options).size


TIED = ModelLayout(blocks=("layers.*",), tied=(("layers.0.weight", "head.weight"),))
UNTIED = ModelLayout(blocks=("layers.*",))
LARGE = 1 << 20


ROWS = [
    Tested(
        "still reads; read it to its end, or close it, before",
        "tests/state/test_offloading.py::test_an_open_stream_of_weights_holds_off_who_changes_them",
        {"read it to its end": "for _ in stream:", "close it, before": "stream.close()"},
    ),
    Tested(
        "set the variable on the machines of the job, and remove the value here",
        "tests/launchers/test_secrets.py::test_the_environment_gives_the_uri_that_a_recipe_may_not_have",
        {"set the variable on the machines": 'monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)'},
    ),
    Row(
        "a plan's passes are {}; expected a list of passes",
        lambda: problems("dp_shard=2", FullyShard()),
        {"write Plan(": lambda: shard()},
    ),
    Row(
        "the layout is {} of type {}; expected a ModelLayout",
        lambda: shard(layout={}),
        {"write ModelLayout(": lambda: shard(layout=ModelLayout(blocks=("layers.*",)))},
    ),
    Row(
        "{} is a class, not a pass; expected an object",
        lambda: problems("dp_shard=2", [FullyShard]),
        {"write {}()": lambda: shard()},
    ),
    Row(
        "{} is not a pass: {} does not inherit meshpar.Pass",
        lambda: problems("dp_shard=2", ["fsdp"]),
        {"write an object of a pass, such as": lambda: shard()},
    ),
    Row(
        "passes are out of order ({}); write {}",
        lambda: problems("dp_shard=2,tp=2", [FullyShard(), Compile(), ActivationCheckpoint(), TensorParallel()]),
        {
            "write {}": lambda: problems(
                "dp_shard=2,tp=2", [TensorParallel(), ActivationCheckpoint(), Compile(), FullyShard()]
            )
        },
    ),
    Row(
        "{} needs axis {}, which the mesh ({}) lacks",
        lambda: problems("dp_shard=2", [TensorParallel(), FullyShard()]),
        {
            "add {}=... to the mesh": lambda: problems("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
            "drop {}": lambda: shard(),
        },
    ),
    Row(
        "axis {} is claimed by {} and by {}",
        lambda: problems("dp_replicate=2,dp_shard=2", [FullyShard(), HybridShard()]),
        {"keep one of them": lambda: problems("dp_replicate=2,dp_shard=2", [HybridShard()])},
    ),
    Row(
        "nothing averages gradients over {}; add {} to the passes and {}=1 to the mesh",
        lambda: problems("cp=2", [ContextParallel()]),
        {"add {} to the passes and": lambda: problems("dp_shard=1,cp=2", [ContextParallel(), FullyShard()])},
    ),
    Row(
        "add {}() or drop {} from the mesh",
        lambda: problems("dp_shard=2,tp=2", [FullyShard()]),
        {"add {}()": lambda: problems("dp_shard=2,tp=2", [TensorParallel(), FullyShard()])},
    ),
    Row(
        "no installed pass works on {}",
        lambda: problems("halves=2,dp_shard=2", [FullyShard()]),
        {
            "drop it": lambda: shard(),
            "write a pass for it": lambda: problems("halves=2,dp_shard=2", [Halves(), FullyShard()]),
        },
    ),
    Row(
        "the module is already parallelized ({} is a DTensor)",
        lambda: shard(applied(transformer())),
        {"apply a plan once, to a module as it was built": lambda: shard(transformer())},
    ),
    Row(
        "{} has a hook on its gradient, which the shards that replace it would not have",
        lambda: shard(hooked(TwoLayers())),
        {
            "register hooks after plan.apply, on the parameters of par.module": lambda: len(
                list(
                    applied(TwoLayers(), lambda parameter: parameter.register_hook(lambda gradient: gradient)).modules()
                )
            )
        },
        result=5,
    ),
    Row(
        "layout.tied says that {} are one tensor, but the model has separate tensors",
        lambda: shard(TwoLayers(), TIED, blocks=()),
        {
            "tie them": lambda: shard(TwoLayers(tied=True), TIED, blocks=()),
            "drop the entry": lambda: shard(TwoLayers(), UNTIED, blocks=()),
        },
    ),
    Row(
        "{} is a {} without a shape yet",
        lambda: shard(lazy(forward=False)),
        {
            "run one forward on a CPU before plan.apply": lambda: shard(lazy(forward=True)),
            "write the module with its sizes": lambda: shard(nn.Sequential(nn.Linear(8, 4))),
        },
    ),
    Row(
        "{} is a TorchScript module",
        lambda: shard(nn.Sequential(torch.jit.script(nn.Linear(4, 4)))),
        {"use the Python module from which it was scripted": lambda: shard(nn.Sequential(nn.Linear(4, 4)))},
    ),
    Row(
        "{} has sparse gradients, which no pass reduces",
        lambda: shard(embedding(sparse=True)),
        {"build it with sparse=False": lambda: shard(embedding(sparse=False))},
    ),
    Row(
        "{} has max_norm={}, which writes into its weight in each forward",
        lambda: shard(embedding(max_norm=1.0)),
        {"build it with max_norm=None and, after each step, scale the rows": lambda: scaled_rows(sharded=True)},
        result=lambda: scaled_rows(sharded=False),
    ),
    Row(
        "{} divides {} over {}, and {} keeps it whole",
        lambda: problems(
            "dp_shard=2,ep=2", [meshpar.ExpertParallel(), FullyShard(whole=("layers.*.mlp.experts",))], experts()
        ),
        {
            "use {} with {}, and leave it out": lambda: problems(
                "dp_shard=2,ep=2", [meshpar.ExpertParallel(), FullyShard()], experts()
            )
        },
    ),
    Row(
        "{} ({}, {} MiB) is split by no pass",
        lambda: problems("tp=2", [TensorParallel(styles={"embed": None})], transformer(vocab_size=LARGE)),
        {
            "give its module a style": lambda: problems(
                "tp=2", [TensorParallel(styles={"embed": "vocab"})], transformer(vocab_size=LARGE)
            ),
            "add {}": lambda: problems(
                "dp_shard=2,tp=2", [TensorParallel(styles={"embed": None}), FullyShard()], transformer(vocab_size=LARGE)
            ),
        },
    ),
    Row(
        "guards={} is not known; expected one of {}",
        lambda: Plan("", [], guards="sometimes"),
        {"write guards='first'": lambda: Plan("", [], guards="first").guards},
        result="first",
    ),
    Row(
        "a mesh is given as text or as keywords, got both {} and {}",
        lambda: MeshSpec("tp=2", tp=2),
        {"keep one": lambda: [MeshSpec("tp=2"), MeshSpec(tp=2)]},
        result=lambda: [MeshSpec({"tp": 2})] * 2,
    ),
    Row(
        "a MeshSpec does not change",
        lambda: setattr(MeshSpec("tp=2"), "axes", {"tp": 4}),
        {"make a new one instead of setting {}": lambda: dict(MeshSpec(tp=4).axes)},
        result={"tp": 4},
    ),
    Row(
        "cannot read mesh {}; write 'auto'",
        lambda: MeshSpec.auto(8, 4, "auto:tp=4"),
        {
            "write 'auto', 'auto,tp=4' or sizes like": lambda: [
                str(MeshSpec.placed(text, 8, 4)) for text in ("auto", "auto,tp=4", "dp_replicate=2,dp_shard=-1")
            ]
        },
        result=["dp_replicate=2,dp_shard=4", "dp_replicate=2,dp_shard=1,tp=4", "dp_replicate=2,dp_shard=4"],
    ),
    Row(
        "{} ranks do not fill nodes of {}; use whole nodes, or write the mesh out",
        lambda: MeshSpec.auto(6, 4),
        {
            "use whole nodes": lambda: MeshSpec.auto(8, 4).size,
            "write the mesh out": lambda: MeshSpec.placed("dp_replicate=4,dp_shard=2", 8, 3).size,
        },
        result=8,
    ),
    Row(
        "use {}={}{}{}",
        lambda: MeshSpec.auto(8, 4, "auto,tp=3"),
        {"use {}={}{}{}": lambda: [str(MeshSpec.auto(8, 4, f"auto,tp={size}")) for size in (2, 4)]},
        result=["dp_replicate=2,dp_shard=2,tp=2", "dp_replicate=2,dp_shard=1,tp=4"],
    ),
    Row(
        "drop {} from the mesh",
        lambda: MeshSpec.auto(2, 1, "auto,tp=3"),
        {"drop {} from the mesh": lambda: str(MeshSpec.auto(2, 1, "auto"))},
        result="dp_replicate=2,dp_shard=1",
    ),
    Row(
        "mesh {} infers {}, but {} ranks cannot be divided by the {} of the other axes",
        lambda: MeshSpec("dp_shard=-1,tp=4").resolve(6),
        {"change one of them": lambda: str(MeshSpec("dp_shard=-1,tp=2").resolve(6))},
        result="dp_shard=3,tp=2",
    ),
    Row(
        "mesh {} needs {} ranks, got {}",
        lambda: MeshSpec("dp_shard=2,tp=2").resolve(8),
        {
            "change one axis": lambda: MeshSpec("dp_shard=4,tp=2").resolve(8).size,
            "set it to -1": lambda: MeshSpec("dp_shard=-1,tp=2").resolve(8).size,
        },
        result=8,
    ),
    Row(
        "mesh {} infers the size of an axis that is not a data axis",
        lambda: MeshSpec("dp_shard=2,tp=-1").shrunk(4),
        {"give its size": lambda: str(MeshSpec("dp_shard=2,tp=2").shrunk(4))},
        result="dp_shard=2,tp=2",
    ),
    Row(
        "mesh {} has {} apart from {}, whose ranks they divide further",
        lambda: MeshSpec("rows=2,dp_shard=2").folded("dp_shard", ["rows"]),
        {"name them 'cp'": lambda: str(MeshSpec("cp=2,dp_shard=2").folded("dp_shard", ["cp"]))},
        result="dp_shard=4",
    ),
    Row(
        "a plan's mesh is {} of type {}; expected text such as",
        lambda: Plan({"dp_shard": 2}, [FullyShard()]),
        {
            "write Plan('dp_shard=2', [...]) or Plan(MeshSpec(dp_shard=2)": lambda: [
                *shard(),
                *problems(MeshSpec(dp_shard=2), [FullyShard()]),
            ]
        },
    ),
    Row(
        "cannot read {} in mesh {}",
        lambda: MeshSpec("tp:4"),
        {"write it like 'dp_replicate=2,dp_shard=-1,tp=4'": lambda: str(MeshSpec("dp_replicate=2,dp_shard=-1,tp=4"))},
        result="dp_replicate=2,dp_shard=-1,tp=4",
    ),
    Row(
        "axis {} appears twice in mesh {}", lambda: MeshSpec("tp=2,tp=4"), {"keep one": lambda: spec("tp=4")}, result=4
    ),
    Row(
        "axis name {} is not an identifier",
        lambda: MeshSpec({"tensor-parallel": 2}),
        {"use letters, digits and '_'": lambda: spec({"tensor_parallel2": 2})},
        result=2,
    ),
    Row(
        "only one axis may be -1, got {}",
        lambda: MeshSpec("dp_shard=-1,tp=-1"),
        {"give the sizes of the others": lambda: str(MeshSpec("dp_shard=-1,tp=2").resolve(8))},
        result="dp_shard=4,tp=2",
    ),
    Row(
        "a mesh has at most {} axes, got {}",
        lambda: MeshSpec({f"axis_{number}": 1 for number in range(9)}),
        {"drop those of size 1": lambda: spec({"dp_shard": 2})},
        result=2,
    ),
    Row(
        "local rank {} has no {} device of its own: this node has {}",
        lambda: device_of(rank=2, devices=2),
        {"let each rank see one device alone": lambda: device_of(rank=2, devices=1).index},
        result=0,
    ),
    Row(
        "no process group is open; wrap the job in",
        lambda: Plan("", []).apply(TwoLayers()),
        {
            "wrap the job in `with meshpar.distributed():`": lambda: wrapped(
                lambda: Plan("", []).apply(TwoLayers()).data_size
            )
        },
        result=1,
    ),
    Row(
        "RANK and WORLD_SIZE are set but {} are not",
        lambda: with_environment({"RANK": "0", "WORLD_SIZE": "1"}),
        {
            "set them": lambda: with_environment(
                {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            )
        },
        result=1,
    ),
    Row(
        "nothing averages gradients over {}; add a pass that holds parameters there",
        lambda: held_mesh([Positions()], MeshSpec("cp=2")),
        {
            "add a pass that holds parameters there": lambda: str(
                held_mesh([Positions(), FullyShard()], MeshSpec("dp_shard=1,cp=2"))
            )
        },
        result="dp_shard=2",
    ),
    Row(
        "matches {}, a {}, which is never called",
        lambda: shard(TwoLayers(), blocks=("l*",)),
        {"name the modules in it": lambda: shard(TwoLayers(), blocks=("layers.*",))},
    ),
    Row(
        "{} works block by block, but the layout names no blocks",
        lambda: problems("dp_shard=2", [Compile(), FullyShard()], nn.Linear(2, 2)),
        {
            "give ModelLayout(blocks=...) or {}(blocks=...)": lambda: [
                *problems(
                    "dp_shard=2", [Compile(), FullyShard()], nn.Sequential(nn.Linear(2, 2)), ModelLayout(blocks=("0",))
                ),
                *problems("dp_shard=2", [Compile(blocks=("0",)), FullyShard()], nn.Sequential(nn.Linear(2, 2))),
            ]
        },
    ),
    Row(
        "{} matches no module; use a name of the model",
        lambda: shard(TwoLayers(), ModelLayout(blocks=("layer.*",))),
        {"use a name of the model": lambda: shard(TwoLayers(), UNTIED)},
    ),
    Row(
        "there is no module {}; put it next to the recipe",
        lambda: registry.imported("meshpar.core.plans.Plan"),
        {
            "put it next to the recipe, install its package": lambda: beside_the_recipe("class Plan: pass"),
            "correct the import path": lambda: registry.imported("meshpar.plan.Plan").__name__,
        },
        result="Plan",
    ),
]


@pytest.mark.parametrize("row", alone(ROWS))
def test_the_printed_remedy_helps(row):
    row.run()
