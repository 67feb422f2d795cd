"""Rows of `core`: see `tests/remedies/rows.py`."""

import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

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
from tests.remedies.rows import Row, Tested, in_one_process
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
    Tested("still reads; read it to its end, or close it, before")
    .by("tests/state/test_offloading.py::test_an_open_stream_of_weights_holds_off_who_changes_them")
    .helps("read it to its end", "for _ in stream:")
    .helps("close it, before", "stream.close()"),
    Tested("set the variable on the machines of the job, and remove the value here")
    .by("tests/launchers/test_secrets.py::test_the_environment_gives_the_uri_that_a_recipe_may_not_have")
    .helps("set the variable on the machines", 'monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)'),
    Row("a plan's passes are {}; expected a list of passes")
    .refuses(lambda: problems("dp_shard=2", FullyShard()))
    .helps("write Plan(", lambda: shard()),
    Row("the layout is {} of type {}; expected a ModelLayout")
    .refuses(lambda: shard(layout={}))
    .helps("write ModelLayout(", lambda: shard(layout=ModelLayout(blocks=("layers.*",)))),
    Row("{} is a class, not a pass; expected an object")
    .refuses(lambda: problems("dp_shard=2", [FullyShard]))
    .helps("write {}()", lambda: shard()),
    Row("{} is not a pass: {} does not inherit meshpar.Pass")
    .refuses(lambda: problems("dp_shard=2", ["fsdp"]))
    .helps("write an object of a pass, such as", lambda: shard()),
    Row("passes are out of order ({}); write {}")
    .refuses(lambda: problems("dp_shard=2,tp=2", [FullyShard(), Compile(), ActivationCheckpoint(), TensorParallel()]))
    .helps(
        "write {}",
        lambda: problems("dp_shard=2,tp=2", [TensorParallel(), ActivationCheckpoint(), Compile(), FullyShard()]),
    ),
    Row("{} needs axis {}, which the mesh ({}) lacks")
    .refuses(lambda: problems("dp_shard=2", [TensorParallel(), FullyShard()]))
    .helps("add {}=... to the mesh", lambda: problems("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]))
    .helps("drop {}", lambda: shard()),
    Row("axis {} is claimed by {} and by {}")
    .refuses(lambda: problems("dp_replicate=2,dp_shard=2", [FullyShard(), HybridShard()]))
    .helps("keep one of them", lambda: problems("dp_replicate=2,dp_shard=2", [HybridShard()])),
    Row("nothing averages gradients over {}; add {} to the passes and {}=1 to the mesh")
    .refuses(lambda: problems("cp=2", [ContextParallel()]))
    .helps("add {} to the passes and", lambda: problems("dp_shard=1,cp=2", [ContextParallel(), FullyShard()])),
    Row("add {}() or drop {} from the mesh")
    .refuses(lambda: problems("dp_shard=2,tp=2", [FullyShard()]))
    .helps("add {}()", lambda: problems("dp_shard=2,tp=2", [TensorParallel(), FullyShard()])),
    Row("no installed pass works on {}")
    .refuses(lambda: problems("halves=2,dp_shard=2", [FullyShard()]))
    .helps("drop it", lambda: shard())
    .helps("write a pass for it", lambda: problems("halves=2,dp_shard=2", [Halves(), FullyShard()])),
    Row("the module is already parallelized ({} is a DTensor)")
    .refuses(lambda: shard(applied(transformer())))
    .helps("apply a plan once, to a module as it was built", lambda: shard(transformer())),
    Row("{} has a hook on its gradient, which the shards that replace it would not have", result=5)
    .refuses(lambda: shard(hooked(TwoLayers())))
    .helps(
        "register hooks after plan.apply, on the parameters of par.module",
        lambda: len(
            list(applied(TwoLayers(), lambda parameter: parameter.register_hook(lambda gradient: gradient)).modules())
        ),
    ),
    Row("layout.tied says that {} are one tensor, but the model has separate tensors")
    .refuses(lambda: shard(TwoLayers(), TIED, blocks=()))
    .helps("tie them", lambda: shard(TwoLayers(tied=True), TIED, blocks=()))
    .helps("drop the entry", lambda: shard(TwoLayers(), UNTIED, blocks=())),
    Row("{} is a {} without a shape yet")
    .refuses(lambda: shard(lazy(forward=False)))
    .helps("run one forward on a CPU before plan.apply", lambda: shard(lazy(forward=True)))
    .helps("write the module with its sizes", lambda: shard(nn.Sequential(nn.Linear(8, 4)))),
    Row("{} is a TorchScript module")
    .refuses(lambda: shard(nn.Sequential(torch.jit.script(nn.Linear(4, 4)))))
    .helps("use the Python module from which it was scripted", lambda: shard(nn.Sequential(nn.Linear(4, 4)))),
    Row("{} has sparse gradients, which no pass reduces")
    .refuses(lambda: shard(embedding(sparse=True)))
    .helps("build it with sparse=False", lambda: shard(embedding(sparse=False))),
    Row("{} has max_norm={}, which writes into its weight in each forward", result=lambda: scaled_rows(sharded=False))
    .refuses(lambda: shard(embedding(max_norm=1.0)))
    .helps("build it with max_norm=None and, after each step, scale the rows", lambda: scaled_rows(sharded=True)),
    Row("{} divides {} over {}, and {} keeps it whole")
    .refuses(
        lambda: problems(
            "dp_shard=2,ep=2", [meshpar.ExpertParallel(), FullyShard(whole=("layers.*.mlp.experts",))], experts()
        )
    )
    .helps(
        "use {} with {}, and leave it out",
        lambda: problems("dp_shard=2,ep=2", [meshpar.ExpertParallel(), FullyShard()], experts()),
    ),
    Row("{} ({}, {} MiB) is split by no pass")
    .refuses(lambda: problems("tp=2", [TensorParallel(styles={"embed": None})], transformer(vocab_size=LARGE)))
    .helps(
        "give its module a style",
        lambda: problems("tp=2", [TensorParallel(styles={"embed": "vocab"})], transformer(vocab_size=LARGE)),
    )
    .helps(
        "add {}",
        lambda: problems(
            "dp_shard=2,tp=2", [TensorParallel(styles={"embed": None}), FullyShard()], transformer(vocab_size=LARGE)
        ),
    ),
    Row("guards={} is not known; expected one of {}", result="first")
    .refuses(lambda: Plan("", [], guards="sometimes"))
    .helps("write guards='first'", lambda: Plan("", [], guards="first").guards),
    Row("a mesh is given as text or as keywords, got both {} and {}", result=lambda: [MeshSpec({"tp": 2})] * 2)
    .refuses(lambda: MeshSpec("tp=2", tp=2))
    .helps("keep one", lambda: [MeshSpec("tp=2"), MeshSpec(tp=2)]),
    Row("a MeshSpec does not change", result={"tp": 4})
    .refuses(lambda: setattr(MeshSpec("tp=2"), "axes", {"tp": 4}))
    .helps("make a new one instead of setting {}", lambda: dict(MeshSpec(tp=4).axes)),
    Row(
        "cannot read mesh {}; write 'auto'",
        result=["dp_replicate=2,dp_shard=4", "dp_replicate=2,dp_shard=1,tp=4", "dp_replicate=2,dp_shard=4"],
    )
    .refuses(lambda: MeshSpec.auto(8, 4, "auto:tp=4"))
    .helps(
        "write 'auto', 'auto,tp=4' or sizes like",
        lambda: [str(MeshSpec.placed(text, 8, 4)) for text in ("auto", "auto,tp=4", "dp_replicate=2,dp_shard=-1")],
    ),
    Row("{} ranks do not fill nodes of {}; use whole nodes, or write the mesh out", result=8)
    .refuses(lambda: MeshSpec.auto(6, 4))
    .helps("use whole nodes", lambda: MeshSpec.auto(8, 4).size)
    .helps("write the mesh out", lambda: MeshSpec.placed("dp_replicate=4,dp_shard=2", 8, 3).size),
    Row("use {}={}{}{}", result=["dp_replicate=2,dp_shard=2,tp=2", "dp_replicate=2,dp_shard=1,tp=4"])
    .refuses(lambda: MeshSpec.auto(8, 4, "auto,tp=3"))
    .helps("use {}={}{}{}", lambda: [str(MeshSpec.auto(8, 4, f"auto,tp={size}")) for size in (2, 4)]),
    Row("drop {} from the mesh", result="dp_replicate=2,dp_shard=1")
    .refuses(lambda: MeshSpec.auto(2, 1, "auto,tp=3"))
    .helps("drop {} from the mesh", lambda: str(MeshSpec.auto(2, 1, "auto"))),
    Row("mesh {} infers {}, but {} ranks cannot be divided by the {} of the other axes", result="dp_shard=3,tp=2")
    .refuses(lambda: MeshSpec("dp_shard=-1,tp=4").resolve(6))
    .helps("change one of them", lambda: str(MeshSpec("dp_shard=-1,tp=2").resolve(6))),
    Row("mesh {} needs {} ranks, got {}", result=8)
    .refuses(lambda: MeshSpec("dp_shard=2,tp=2").resolve(8))
    .helps("change one axis", lambda: MeshSpec("dp_shard=4,tp=2").resolve(8).size)
    .helps("set it to -1", lambda: MeshSpec("dp_shard=-1,tp=2").resolve(8).size),
    Row("mesh {} infers the size of an axis that is not a data axis", result="dp_shard=2,tp=2")
    .refuses(lambda: MeshSpec("dp_shard=2,tp=-1").shrunk(4))
    .helps("give its size", lambda: str(MeshSpec("dp_shard=2,tp=2").shrunk(4))),
    Row("mesh {} has {} apart from {}, whose ranks they divide further", result="dp_shard=4")
    .refuses(lambda: MeshSpec("rows=2,dp_shard=2").folded("dp_shard", ["rows"]))
    .helps("name them 'cp'", lambda: str(MeshSpec("cp=2,dp_shard=2").folded("dp_shard", ["cp"]))),
    Row("a plan's mesh is {} of type {}; expected text such as")
    .refuses(lambda: Plan({"dp_shard": 2}, [FullyShard()]))
    .helps(
        "write Plan('dp_shard=2', [...]) or Plan(MeshSpec(dp_shard=2)",
        lambda: shard(),
        lambda: problems(MeshSpec(dp_shard=2), [FullyShard()]),
    ),
    Row("cannot read {} in mesh {}", result="dp_replicate=2,dp_shard=-1,tp=4")
    .refuses(lambda: MeshSpec("tp:4"))
    .helps("write it like 'dp_replicate=2,dp_shard=-1,tp=4'", lambda: str(MeshSpec("dp_replicate=2,dp_shard=-1,tp=4"))),
    Row("axis {} appears twice in mesh {}", result=4)
    .refuses(lambda: MeshSpec("tp=2,tp=4"))
    .helps("keep one", lambda: spec("tp=4")),
    Row("axis name {} is not an identifier", result=2)
    .refuses(lambda: MeshSpec({"tensor-parallel": 2}))
    .helps("use letters, digits and '_'", lambda: spec({"tensor_parallel2": 2})),
    Row("only one axis may be -1, got {}", result="dp_shard=4,tp=2")
    .refuses(lambda: MeshSpec("dp_shard=-1,tp=-1"))
    .helps("give the sizes of the others", lambda: str(MeshSpec("dp_shard=-1,tp=2").resolve(8))),
    Row("a mesh has at most {} axes, got {}", result=2)
    .refuses(lambda: MeshSpec({f"axis_{number}": 1 for number in range(9)}))
    .helps("drop those of size 1", lambda: spec({"dp_shard": 2})),
    Row("local rank {} has no {} device of its own: this node has {}", result=0)
    .refuses(lambda: device_of(rank=2, devices=2))
    .helps("let each rank see one device alone", lambda: device_of(rank=2, devices=1).index),
    Row("no process group is open; wrap the job in", result=1)
    .refuses(lambda: Plan("", []).apply(TwoLayers()))
    .helps(
        "wrap the job in `with meshpar.distributed():`",
        lambda: wrapped(lambda: Plan("", []).apply(TwoLayers()).data_size),
    ),
    Row("RANK and WORLD_SIZE are set but {} are not", result=1)
    .refuses(lambda: with_environment({"RANK": "0", "WORLD_SIZE": "1"}))
    .helps(
        "set them",
        lambda: with_environment(
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ),
    ),
    Row("nothing averages gradients over {}; add a pass that holds parameters there", result="dp_shard=2")
    .refuses(lambda: held_mesh([Positions()], MeshSpec("cp=2")))
    .helps(
        "add a pass that holds parameters there",
        lambda: str(held_mesh([Positions(), FullyShard()], MeshSpec("dp_shard=1,cp=2"))),
    ),
    Row("matches {}, a {}, which is never called")
    .refuses(lambda: shard(TwoLayers(), blocks=("l*",)))
    .helps("name the modules in it", lambda: shard(TwoLayers(), blocks=("layers.*",))),
    Row("{} works block by block, but the layout names no blocks")
    .refuses(lambda: problems("dp_shard=2", [Compile(), FullyShard()], nn.Linear(2, 2)))
    .helps(
        "give ModelLayout(blocks=...) or {}(blocks=...)",
        lambda: problems(
            "dp_shard=2", [Compile(), FullyShard()], nn.Sequential(nn.Linear(2, 2)), ModelLayout(blocks=("0",))
        ),
        lambda: problems("dp_shard=2", [Compile(blocks=("0",)), FullyShard()], nn.Sequential(nn.Linear(2, 2))),
    ),
    Row("{} matches no module; use a name of the model")
    .refuses(lambda: shard(TwoLayers(), ModelLayout(blocks=("layer.*",))))
    .helps("use a name of the model", lambda: shard(TwoLayers(), UNTIED)),
    Row("there is no module {}; put it next to the recipe", result="Plan")
    .refuses(lambda: registry.imported("meshpar.core.plans.Plan"))
    .helps("put it next to the recipe, install its package", lambda: beside_the_recipe("class Plan: pass"))
    .helps("correct the import path", lambda: registry.imported("meshpar.plan.Plan").__name__),
]


test_the_printed_remedy_helps = in_one_process(ROWS)
