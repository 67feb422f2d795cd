"""Rows of `passes`: see `tests/remedies/rows.py`."""

from dataclasses import replace

import torch
from torch import nn

from meshpar import (
    ActivationCheckpoint,
    ContextParallel,
    ExpertParallel,
    Float8,
    FullyShard,
    HybridShard,
    MeshSpec,
    ModelLayout,
    PipelineParallel,
    Plan,
    Replicate,
    StagesLayout,
    TensorParallel,
    attention,
)
from meshpar.passes import Style
from meshpar.passes.pipeline.schedule import SCHEDULES
from meshpar.passes.positions.parallel import positions, with_positions
from meshpar.passes.tensor.parts import Parts, Shared
from meshpar.testing import on_ranks
from tests.passes.experts.test_parallel import OWN, Buffered, Dense, Own, OwnMixture, Tied
from tests.passes.pipeline.test_parallel import Skips
from tests.passes.pipeline.test_stage_habits import Model as LanguageModel
from tests.passes.pipeline.test_stage_models import (
    DiT,
    Flat,
    Keeps,
    Numbered,
    Reads,
    Towered,
    Twice,
    UNet,
    ViT,
    Written,
)
from tests.remedies.rows import Row, Tested, heard_from, in_one_process, run_together
from tests.support.plans import TwoLayers, problems, shard, transformer, warned

EP = [ExpertParallel(), FullyShard()]
EP_MESH = "dp_shard=1,ep=2"


class Projections(nn.Module):
    """Two projections and what else a test puts beside them."""

    def __init__(self, up=None, down=None, **others):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mlp = nn.Module()
        self.mlp.up, self.mlp.down = up or nn.Linear(8, 16), down or nn.Linear(16, 8)
        for name, value in others.items():
            setattr(self.mlp, name, value)


TABLE = {"embed": "vocab", "mlp.up": "colwise", "mlp.down": "rowwise"}


def split(module=None, *, mesh="tp=2", passes=None, **entries):
    """The problems of tensor parallelism over two projections with further, or other, entries of the table."""
    layout = ModelLayout(tensor={**TABLE, **{name.replace("__", "."): style for name, style in entries.items()}})
    return problems(mesh, passes or [TensorParallel()], module or Projections(), layout)


def kept(*names, module=None):
    return split(module, passes=[TensorParallel(styles=dict.fromkeys(names))])


BOTH = ("mlp.up", "mlp.down")


class OwnLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Marked(Style):
    """A style of one's own."""

    splits = False

    def problems(self, name, module, size):
        return iter(())


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


class Attention(nn.Module):
    def forward(self, q, k, v, mask):
        return attention(self, q, k, v, mask)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


def lazy_norm(*, forward):
    module = nn.Sequential(nn.LazyBatchNorm1d())
    if forward:
        module(torch.zeros(2, 8))
    return module


def tied(*, blocks):
    return shard(TwoLayers(tied=True), blocks=blocks)


def mixed(*, cast, blocks=("layers.*",)):
    return shard(
        nn.ModuleDict(
            {
                "layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(2)),
                "head": nn.Linear(8, 8, dtype=torch.float32 if cast else torch.bfloat16),
                "last": nn.Linear(8, 8),
            }
        ),
        blocks=blocks,
    )


def hooked_block(*, inside):
    module = transformer()
    hooked(module.layers[0].mlp if inside else module.layers[0])
    return problems("dp_shard=2", [ActivationCheckpoint(), FullyShard()], module)


def own(kind=Own, layout=OWN, *, mesh=EP_MESH, passes=EP):
    return problems(mesh, passes, OwnMixture(kind), layout)


def without_ep(kind=Own):
    return own(kind, mesh="dp_shard=2", passes=[FullyShard()])


class Counted(Own):
    def __init__(self):
        super().__init__()
        self.n_experts = 8


class Scale(Own):
    """Its scale is a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 8))


def pipeline(mesh="pp=2", **options):
    return problems(mesh, [PipelineParallel(**options)], transformer())


def cut(module, layout=None, **options):
    return problems("pp=2", [PipelineParallel(**options)], module, layout)


def whole(module):
    return shard(module)


def again():
    module = LanguageModel()
    module.order = (0, 1, 2, 3, 0)
    return module


def counting():
    module = Flat()
    module.norm = nn.BatchNorm2d(module.norm.num_channels)
    return module


def chooses():
    module = Skips()
    module.skips, module.needs = "", True
    return module


def tied_blocks():
    module = ViT()
    module.blocks[0].norm1.weight = module.blocks[1].norm1.weight
    return module


class Frozen(ViT):
    def forward(self, images):
        with torch.no_grad():
            return super().forward(images)


def trained(plan, layout=None):
    """Train a step on inputs that some stage calls a tower for; return the shares of gradients that are none."""
    torch.manual_seed(0)
    par = plan.apply(Towered(), layout)
    par.backward([Towered().inputs(sides=True)] * 2, lambda module, batch: module(*batch).square().mean())
    held = [one for name, one in par.module.named_parameters() if "unused" not in name]
    return [float(sum(one.grad is None for one in held))]


def replicas(**options):
    return problems("dp_replicate=2,dp_shard=4", [HybridShard(**options)])


ROWS = [
    # Batches
    Row("{} has no number of features yet; run one forward")
    .refuses(lambda: shard(lazy_norm(forward=False)))
    .helps("run one forward before the plan is applied", lambda: shard(lazy_norm(forward=True)))
    .helps("build it with its num_features", lambda: shard(nn.Sequential(nn.BatchNorm1d(8)))),
    Row("{} is a batch norm with a forward of its own")
    .refuses(lambda: shard(nn.Sequential(OwnNorm(8))))
    .helps(
        "use torch's BatchNorm and move the rest of that forward",
        lambda: shard(nn.Sequential(nn.BatchNorm1d(8), nn.Identity())),
    )
    .helps("use a norm that does not work across the batch", lambda: shard(nn.Sequential(nn.LayerNorm(8)))),
    Row("split requires tensors of one length along dim {}", result=[1, 1])
    .refuses(lambda: with_positions({"x": torch.zeros(1, 4), "y": torch.zeros(1, 6)}, 1))
    .helps("split each length alone", lambda: [len(with_positions({"x": torch.zeros(1, size)}, 1)) for size in (4, 6)]),
    Row("{}={} does not divide {} positions", result=4)
    .refuses(lambda: positions(ContextParallel(), 7, "cp", 2, 0))
    .helps("pad the batch to a multiple of {}", lambda: positions(ContextParallel(), 8, "cp", 2, 0).numel()),
    # Sharding
    Row("{}({}={}) is not a floating dtype")
    .refuses(lambda: shard(param_dtype=torch.int8))
    .helps("use one of {}", lambda: shard(param_dtype=torch.bfloat16)),
    Row("{}(reshard_after_forward={}) must be a divisor of dp_shard={}")
    .refuses(lambda: problems("dp_shard=8", [FullyShard(reshard_after_forward=5)]))
    .helps(
        "use {}",
        lambda: problems("dp_shard=8", [FullyShard(reshard_after_forward=2)]),
        lambda: problems("dp_shard=8", [FullyShard(reshard_after_forward=4)]),
    ),
    Row("{}(offload={}) is not known")
    .refuses(lambda: shard(offload="disk"))
    .helps("use 'cpu' or None", lambda: shard(offload="cpu"), lambda: shard(offload=None)),
    Row("{}(optimizer={}) is not known; use 'replica' or 'world'")
    .refuses(lambda: replicas(optimizer="all"))
    .helps("use 'replica' or 'world'", lambda: replicas(optimizer="replica"), lambda: replicas(optimizer="world")),
    Row("{}(optimizer='world', reshard_after_forward={}) reshards to parts of a replica")
    .refuses(lambda: replicas(optimizer="world", reshard_after_forward=2))
    .helps(
        "use reshard_after_forward=True or False",
        lambda: replicas(optimizer="world", reshard_after_forward=True),
        lambda: replicas(optimizer="world", reshard_after_forward=False),
    ),
    Row("unit {} mixes dtypes")
    .refuses(lambda: mixed(cast=False))
    .helps("cast the model", lambda: mixed(cast=True))
    .helps("give the odd ones a unit", lambda: mixed(cast=False, blocks=("layers.*", "head"))),
    Row("tied parameters would land in two units")
    .refuses(lambda: tied(blocks=("layers.*",)))
    .helps("take both out of the blocks", lambda: tied(blocks=("layers.1",))),
    Row("Replicate keeps whole replicas and cannot be combined with dp_shard")
    .refuses(lambda: problems("dp_replicate=2,dp_shard=4", [Replicate(), FullyShard()]))
    .helps(
        "use HybridShard() for replicas of a sharded model",
        lambda: problems("dp_replicate=2,dp_shard=4", [HybridShard()]),
    ),
    # Recomputation, compilation, eight bits
    Row("ActivationCheckpoint(mode={}) is not known")
    .refuses(lambda: problems("dp_shard=2", [ActivationCheckpoint(mode="half"), FullyShard()]))
    .helps(
        "use 'full' or 'selective'",
        lambda: problems("dp_shard=2", [ActivationCheckpoint(mode="full"), FullyShard()]),
        lambda: problems("dp_shard=2", [ActivationCheckpoint(mode="selective"), FullyShard()]),
    )
    .helps(
        "give a policy",
        lambda: problems("dp_shard=2", [ActivationCheckpoint(mode="selective", policy=lambda *_: None), FullyShard()]),
    ),
    Row("{} has forward hooks, which recomputation would run a second time")
    .refuses(lambda: hooked_block(inside=False))
    .helps("register them on a module around or in it", lambda: hooked_block(inside=True)),
    Row("Float8(recipe={}) is not known")
    .refuses(lambda: problems("dp_shard=2", [Float8(recipe="blocks"), FullyShard()]))
    .helps(
        "use 'tensorwise', 'rowwise' or 'rowwise_with_gw_hp'",
        lambda: [
            problem
            for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
            for problem in problems("dp_shard=2", [Float8(recipe=recipe), FullyShard()])
        ],
    ),
    Row("leave Float8 out, or try its arithmetic with emulate=True", result=[])
    .refuses(lambda: list(Float8().machine_problems("cpu")))
    .helps("leave Float8 out", lambda: list(FullyShard().machine_problems("cpu")))
    .helps("try its arithmetic with emulate=True", lambda: list(Float8(emulate=True).machine_problems("cpu"))),
    # Positions
    Row("the layout does not name the attention of {}")
    .refuses(lambda: problems("dp_shard=1,cp=2", [ContextParallel(), FullyShard()], TwoLayers()))
    .helps(
        "call meshpar.attention(self, q, k, v, mask) in it",
        lambda: problems(
            "dp_shard=1,cp=2",
            [ContextParallel(), FullyShard()],
            nn.ModuleDict({"attn": Attention(), "head": nn.Linear(8, 8)}),
            ModelLayout(attention=("attn",)),
        ),
    )
    .helps("drop ContextParallel", lambda: shard(TwoLayers())),
    # Experts
    Row("ExpertParallel has nothing to divide: the layout of {} names no experts")
    .refuses(lambda: problems(EP_MESH, EP))
    .helps("give ModelLayout(experts=", lambda: own())
    .helps("drop ExpertParallel and ep from the mesh", lambda: problems("dp_shard=1", [FullyShard()])),
    Row("ExpertParallel(skew={}) is expected to be from 1")
    .refuses(lambda: own(passes=[ExpertParallel(skew=3.0), FullyShard()]))
    .helps("change it", lambda: own(passes=[ExpertParallel(skew=2.0), FullyShard()])),
    Row("{} are one parameter, which ExpertParallel would divide separately")
    .refuses(lambda: problems(EP_MESH, EP, Tied(), OWN))
    .helps(
        "use one experts module for both layers, untie them",
        lambda: problems(EP_MESH, EP, shared_experts(), OWN),
        lambda: own(),
    )
    .helps("use a mesh without ep", lambda: shard(Tied(), OWN)),
    Row("{} is a list of {} modules, expected one module with their parameters stacked")
    .refuses(lambda: problems(EP_MESH, EP, OwnMixture(), ModelLayout(experts=("layers",))))
    .helps("stack them", lambda: own())
    .helps("use a mesh without ep", lambda: shard(OwnMixture(), ModelLayout(experts=("layers",)))),
    Row("{} must hold parameters whose first dim counts its experts")
    .refuses(lambda: problems(EP_MESH, EP, OwnMixture(), ModelLayout(experts=("layers.*.experts", "layers.0"))))
    .helps("take it out of ModelLayout.experts", lambda: own()),
    Row("make it a parameter of the module's own, or use a mesh without ep")
    .refuses(lambda: own(Buffered))
    .helps("make it a parameter of the module's own", lambda: own(Scale))
    .helps("use a mesh without ep", lambda: without_ep(Buffered)),
    Row("{} stores its number of experts as {}").refuses(lambda: own(Counted)).helps("keep one", lambda: own()),
    Row("take it out of ModelLayout.experts, or use a mesh without ep")
    .refuses(lambda: own(Dense))
    .helps("take it out of ModelLayout.experts", lambda: shard(OwnMixture(Dense), ModelLayout()))
    .helps("use a mesh without ep", lambda: without_ep(Dense)),
    Row("axis 'ep' (size {}) spans nodes of {} ranks", result=[])
    .refuses(lambda: warned(MeshSpec("dp_shard=1,ep=2", ranks_per_node=1), EP, OwnMixture().to("meta"), layout=OWN))
    .helps(
        "keep ep x tp within a node, and use dp_shard across nodes",
        lambda: heard(MeshSpec("dp_shard=2,ep=2", ranks_per_node=2), EP, OwnMixture().to("meta"), layout=OWN),
    ),
    # Stages
    Row("PipelineParallel(schedule={}) is not known")
    .refuses(lambda: pipeline(schedule="2f2b"))
    .helps("use one of {}", lambda: pipeline(schedule=SCHEDULES[-1])),
    Row("pp={} has more stages than the model has blocks")
    .refuses(lambda: pipeline("pp=4"))
    .helps("use pp={} or fewer", lambda: pipeline("pp=2")),
    Row("PipelineParallel(virtual={}) makes {} stages of {} blocks")
    .refuses(lambda: pipeline(virtual=3))
    .helps("use virtual={} or fewer", lambda: pipeline(virtual=1)),
    Row("PipelineParallel(stages={}) must be {} numbers of blocks")
    .refuses(lambda: pipeline(stages=(2, 1)))
    .helps("leave it out for an even cut", lambda: pipeline()),
    Row("a forward of {} cannot be looked at")
    .refuses(lambda: cut(ViT(), ModelLayout(blocks=("blocks.*",))))
    .helps("give the inputs of a forward as ModelLayout(stages=StagesLayout(example=...))", lambda: cut(ViT()))
    .helps("use a mesh without pp", lambda: whole(ViT())),
    Row("its forward reads values of tensors on the host")
    .refuses(lambda: cut(Reads()))
    .helps("use a mesh without pp", lambda: whole(Reads())),
    Row("it calls none of its blocks")
    .refuses(lambda: cut(Towered(), ModelLayout(blocks=("towers.*",), stages=StagesLayout(example=Towered().inputs()))))
    .helps(
        "name those that a forward calls in ModelLayout(blocks=...)",
        lambda: cut(Towered(), ModelLayout(blocks=("blocks.*",), stages=StagesLayout(example=Towered().inputs()))),
    ),
    Row("it calls {} again").refuses(lambda: cut(again())).helps("use a mesh without pp", lambda: whole(again())),
    Row("{} runs in several places, before, between or behind its blocks")
    .refuses(lambda: cut(counting()))
    .helps("use a mesh without pp", lambda: whole(counting())),
    Row("StagesLayout.carries={} names no block, and no module that runs before the last one")
    .refuses(lambda: cut(DiT(("t_embedder", "y_*", "final_layer"))))
    .helps("leave it out", lambda: cut(DiT(("t_embedder", "y_*")))),
    Row("its forward needs more of the blocks before {} than their result")
    .refuses(lambda: cut(chooses(), ModelLayout(blocks=("layers.*",))))
    .helps("use a mesh without pp", lambda: whole(chooses())),
    Row("its forward returns no tensor that depends on its parameters")
    .refuses(lambda: cut(Frozen()))
    .helps("use a mesh without pp", lambda: whole(Frozen())),
    Row("its output uses results of {} beside what each block hands to the next one")
    .refuses(lambda: cut(UNet(("time",))))
    .helps("write ModelLayout(stages=StagesLayout(carries={}))", lambda: cut(UNet(("time", "conv_in", "downs.*"))))
    .helps("use a mesh without pp", lambda: whole(UNet(("time",)))),
    Row("its output uses results of {}, which runs several times")
    .refuses(lambda: cut(Twice(("t_embedder",))))
    .helps("use a mesh without pp", lambda: whole(Twice(("t_embedder",)))),
    Row("its output uses something of {} beside what {} hands to the next block, and does not return it")
    .refuses(lambda: cut(Keeps()))
    .helps("use a mesh without pp", lambda: whole(Keeps())),
    Row("{} returns a tensor of {}, of which other stages have no values")
    .refuses(lambda: cut(Numbered()))
    .helps("use a mesh without pp", lambda: whole(Numbered())),
    Row("the model writes into what {} returns, which later blocks use, too")
    .refuses(lambda: cut(Written()))
    .helps("compute a new tensor", lambda: cut(DiT()))
    .helps("use a mesh without pp", lambda: whole(Written())),
    Row("a parameter of {} ({}) is tied to one of another stage")
    .refuses(lambda: cut(tied_blocks(), stages=(1, 3)))
    .helps("put both on one stage by PipelineParallel(stages=...)", lambda: cut(tied_blocks(), stages=(2, 2))),
    Row("PipelineParallel cut the model by a forward that does not call {}", result=[0.0], ranks=2)
    .refuses(lambda: Plan("pp=2", [PipelineParallel()]).apply(Towered()).module.towers[0](torch.zeros(2, 8)))
    .helps(
        "give such inputs as ModelLayout(stages=StagesLayout(example=...))",
        lambda: trained(
            Plan("pp=2", [PipelineParallel()]),
            replace(Towered().meshpar_layout(), stages=StagesLayout(example=Towered().inputs(sides=True))),
        ),
    )
    .helps("use a mesh without pp", lambda: trained(Plan("dp_replicate=2", [Replicate()]))),
    # Tensor parallelism
    Row("leave it whole: {}, or give it a style of your own")
    .refuses(lambda: split(Projections(up=OwnLinear(8, 16))))
    .helps("leave it whole: {}", lambda: kept(*BOTH, module=Projections(up=OwnLinear(8, 16))))
    .helps("give it a style of your own", lambda: split(Projections(up=OwnLinear(8, 16)), mlp__up=Marked())),
    Row("{} has hooks, which would see a rank's part of what they expect")
    .refuses(lambda: split(Projections(up=hooked(nn.Linear(8, 16)))))
    .helps(
        "register them on a module around it",
        lambda: split(Projections(up=hooked(Around(nn.Linear(8, 16)))), mlp__up=None, mlp__up__inner="colwise"),
    ),
    Row("TensorParallel has nothing to do: the layout has no table")
    .refuses(lambda: problems("tp=2", [TensorParallel()], Projections(), ModelLayout()))
    .helps("give ModelLayout(tensor=", lambda: split()),
    Row("sequence_parallel needs the layout to say which modules run between regions")
    .refuses(lambda: split(passes=[TensorParallel(sequence_parallel=True)]))
    .helps("leave it off", lambda: split(passes=[TensorParallel(sequence_parallel=False)])),
    Row("sequence_parallel needs an embedding in the layout's tensor-parallel table")
    .refuses(lambda: split(normed(), norm="sequence", embed=None, passes=[TensorParallel(sequence_parallel=True)]))
    .helps(
        "name it",
        lambda: split(normed(), norm="sequence", embed="vocab", passes=[TensorParallel(sequence_parallel=True)]),
    )
    .helps(
        "leave sequence_parallel off",
        lambda: split(normed(), norm="sequence", embed=None, passes=[TensorParallel(sequence_parallel=False)]),
    ),
    Row("loss_parallel needs a 'head' in the layout's tensor-parallel table")
    .refuses(lambda: split(passes=[TensorParallel(loss_parallel=True)]))
    .helps("leave it off", lambda: split(passes=[TensorParallel(loss_parallel=False)])),
    Row("axis 'tp' (size {}) spans nodes of {} ranks", result=[])
    .refuses(lambda: warned(MeshSpec("tp=2", ranks_per_node=1), [TensorParallel()]))
    .helps(
        "keep tp within a node",
        lambda: heard(MeshSpec("dp_shard=2,tp=2", ranks_per_node=2), [TensorParallel(), FullyShard()]),
    ),
    Row("tensor parallelism leaves {} of the parameters whole on every rank of tp")
    .refuses(lambda: large())
    .helps("give linear layers and embeddings among them a style", lambda: heard_of(large(embed="vocab")))
    .helps("None to what is meant to stay whole", lambda: heard_of(large(embed=None)))
    .helps("use data axes instead of tp", lambda: shard(Projections())),
    Row("{} is tied to {}, and only {} is split over tp")
    .refuses(lambda: tied_split("vocab", None))
    .helps("give both a style", lambda: tied_split("vocab", "head"))
    .helps("neither", lambda: tied_split(None, None)),
    Row("{} {} has no style among projections split by heads or features", result=[])
    .refuses(lambda: split(scaled()))
    .helps(
        "give '{}' 'per_head' where its first dim counts them",
        lambda: [problem for style in ("per_head", "grad_sum", None) for problem in split(scaled(), mlp__scale=style)],
    )
    .helps("leave its projections whole", lambda: kept(*BOTH, module=scaled())),
    Row("{} sums its gradient over tp, but nothing in {} is split")
    .refuses(lambda: split(scaled(), mlp__up=None, mlp__down=None, embed="vocab", mlp__norm="grad_sum"))
    .helps(
        "leave {} whole, too",
        lambda: problems(
            "tp=2",
            [TensorParallel(styles={"mlp.norm": None})],
            scaled(),
            ModelLayout(tensor={"embed": "vocab", "mlp.norm": "grad_sum"}),
        ),
    ),
    Row("{} {} in region {} has no style, so its gradient would be incomplete", result=[])
    .refuses(lambda: split(scaled(), mlp="region", mlp__scale=None))
    .helps(
        "give {} 'grad_sum' where each rank's heads use it whole",
        lambda: [
            problem
            for style in ("grad_sum", None)
            for problem in split(
                scaled(), mlp="region", mlp__scale=None, mlp__norm__weight=style, mlp__norm__bias=style
            )
        ],
    ),
    Row("{} is a {}, and no Embedding to split by rows")
    .refuses(lambda: split(mlp__down="vocab"))
    .helps("leave it out of the table", lambda: kept(*BOTH)),
    Row("{} is a {}, and no linear layer to split by output features")
    .refuses(lambda: split(embed="colwise"))
    .helps("leave it out of the table", lambda: split()),
    Row("{} is a {}, and no linear layer to split by input features")
    .refuses(lambda: split(embed="rowwise"))
    .helps("leave it out of the table", lambda: split()),
    Row("{} uses max_norm, sparse or scale_grad_by_freq, which rows on several ranks cannot")
    .refuses(lambda: split(counted_embedding(True), embed="vocab"))
    .helps("turn them off", lambda: split(counted_embedding(False), embed="vocab")),
    Tested("divides it; expected a whole number")
    .by("tests/models/test_vision.py::test_a_layout_names_counts_that_the_module_has")
    .helps("name attributes that count heads or features", 'problems("num_heads,attn_dim")'),
    Row("{} is no tensor-parallel style")
    .refuses(lambda: split(mlp__up=3))
    .helps("write a style's name", lambda: split(mlp__up="colwise"))
    .helps("an object whose class inherits Style", lambda: split(mlp__up=Marked(), mlp__down=None)),
    Row("{} is a {}, and no Embedding to split by features")
    .refuses(lambda: split(mlp__down="features"))
    .helps("leave it out of the table", lambda: kept(*BOTH)),
    Row("{} has parameters, whose gradients a share would scale")
    .refuses(lambda: split(mlp__down=Shared()))
    .helps("leave it out of the table", lambda: kept(*BOTH)),
    Row("{}.{} has no rule for the split over tp")
    .refuses(lambda: split(embed=Parts(dims={}, sums=True)))
    .helps("leave {} whole", lambda: kept("embed")),
    Tested("remove one of the two")
    .by("tests/step/test_cycle.py::test_the_models_own_recomputation_counts_batches_as_in_one_process")
    .helps("remove one of the two", "torch.testing.assert_close(got[name], expected, msg=name)"),
    Tested("another stage of pp failed")
    .by("tests/passes/pipeline/test_parallel.py::assert_an_error_is_told")
    .helps(
        "Correct what failed there; gradients are incomplete", "assert torch.equal(grad, expected[name]), (place, name)"
    ),
    Tested("the rank of another stage of pp has ended")
    .by("tests/passes/pipeline/test_parallel.py::test_a_stage_that_has_ended_is_told")
    .helps("correct what the first error of all ranks says", 'launch(__name__, "ended_stage", 2, (tmp_path / "said of'),
    Tested("hands on has the shapes")
    .by("tests/accelerator/test_stages.py::test_shapes_that_follow_from_values_are_refused_beside_a_device_alone")
    .helps("pad to shapes that follow", "run(True, padded=True)")
    .helps("use a mesh without pp", "without_pp()"),
    Tested("would get another number")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_numbers_of_several_parameters_are_refused_and_the_remedy_is_exact"
    )
    .helps("Call par.clip_grad_norm_(max_norm)", "par.clip_grad_norm_(0.3)"),
    Tested("would get another number")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_a_penalty_over_all_parameters_in_loss_is_refused_on_all_stages"
    )
    .helps("use the optimizer's weight_decay for a penalty", "weight_decay=2.0"),
    Tested("loss runs a backward or torch.autograd.grad after the module's call")
    .by("tests/passes/pipeline/test_stage_habits.py::test_a_backward_in_loss_is_refused_and_par_backward_runs_it")
    .helps("leave the backward of the loss to par.backward", "assert_equal(on_stages(plain_loss)")
    .helps("use a mesh without pp for a gradient of a gradient", "par.backward([batch], of_gradients)"),
    Tested("torch.func.functional_call puts weights into layers of which this stage")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_functional_calls_are_refused_and_loaded_or_averaged_weights_are_exact"
    )
    .helps("load them by par.load_state_dict(weights)", "par.load_state_dict(weights)")
    .helps("evaluate averages", "average.swapped()"),
    Tested("this optimizer's state is of {} parameters")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_one_process_s_states_load_whole_and_a_stage_s_own_are_not_pickled"
    )
    .helps("save and restore it by meshpar.checkpoints.CheckpointManager", "checkpoints.restore(par, optimizer)"),
    Tested("the forward writes into the buffers {}, which each stage of pp")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::"
        "test_a_buffer_that_stages_would_fill_differently_is_refused_and_the_remedies_are_exact"
    )
    .helps("put the buffer into a module with parameters behind", '"of the head"')
    .helps("register it with persistent=False", '"not persistent"'),
    Tested("did not reach the loss, or was detached")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::"
        "test_recomputation_by_the_model_with_reentrant_backwards_is_refused_and_without_is_exact"
    )
    .helps("Use torch.utils.checkpoint with use_reentrant=False", "make(Recomputing)"),
    Tested("did not reach the loss, or was detached")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::"
        "test_an_output_that_is_dropped_before_a_cut_is_refused_and_other_cuts_are_exact"
    )
    .helps("other cuts by PipelineParallel(stages=...)", "stages=(1, 3)"),
    Tested("an optimizer steps in a hook")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::"
        "test_optimizers_that_step_in_hooks_are_refused_where_gradients_are_parts_and_the_remedy_is_exact"
    )
    .helps("call optimizer.step() after par.backward", "on_stages(plain_loss)"),
    Tested("would get a part of its gradient")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_gradient_hooks_of_shared_weights_are_refused_and_the_remedy_is_exact"
    )
    .helps("change parameter.grad after par.backward", "lambda par: normed(par.module)"),
    Tested("loss reads or writes gradients")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::"
        "test_gradients_that_loss_clears_are_refused_on_all_stages_and_the_remedies_are_exact"
    )
    .helps("call optimizer.zero_grad() before par.backward", 'place == "before"')
    .helps("after the step", 'place == "after"'),
    Tested("draws random numbers for parameters or gradients")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_numbers_drawn_for_parameters_are_refused_and_the_remedies_are_exact"
    )
    .helps("draw them before plan.apply", "apply(early)")
    .helps("load whole values by par.load_state_dict", "late.load_state_dict(net.state_dict())")
    .helps("draw by a generator that is seeded for each name", "noised_by_name(late.module)"),
    Tested("the block is on another stage of pp")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_a_part_of_another_stage_s_block_is_refused_by_name_and_the_remedies_find_it"
    )
    .helps("ask hasattr(block, ", 'hasattr(block, "up")')
    .helps("iterate over module.named_parameters()", "par.module.named_parameters()")
    .helps("read its values by par.state_dict(", "par.state_dict(full=True, everywhere=True)"),
    Tested("a parameter that another stage of pp has, in the loss")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::"
        "test_a_penalty_over_a_parameter_of_another_stage_is_refused_and_the_remedies_are_exact"
    )
    .helps("use the optimizer's weight_decay", "weight_decay")
    .helps("add the penalty's gradient to its own", "add_penalty(par.module)"),
    Tested("{} gets no parameters")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::"
        "test_an_optimizer_of_parameters_of_other_stages_is_refused_and_a_group_of_them_is_exact"
    )
    .helps("pass them as a group", '[{"params": par.module.head.parameters()}]'),
    Tested("loss writes parameters")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::"
        "test_parameters_that_loss_writes_are_refused_and_written_after_the_backward_they_are_exact"
    )
    .helps("write after par.backward", "lambda par: shrink(par.module)"),
    Tested("looks for infinite gradients in this stage of pp alone")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_a_grad_scaler_is_refused_and_a_loss_scaler_skips_on_all_stages"
    )
    .helps("scale by meshpar.training.LossScaler", "own.update("),
    Tested("each stage of pp has the parameters of its own layers; use")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_an_optimizer_whose_parameters_depend_on_each_other_is_refused"
    )
    .helps("use an optimizer such as AdamW", "torch.optim.AdamW("),
    Tested("other inputs on rank {} of pp than on rank 0")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_random_states_that_differ_and_draws_behind_the_call_are_refused"
    )
    .helps("call par.manual_seed(seed) before the step", "par.manual_seed(7)"),
    Tested("the model has no dropout module that does")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_random_states_that_differ_and_draws_behind_the_call_are_refused"
    )
    .helps("set ModelLayout(dropout=True)", "dropout=True)"),
    Tested("draws random numbers after it has called the module")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_random_states_that_differ_and_draws_behind_the_call_are_refused"
    )
    .helps("draw them before the call", "par.backward(micro_batches(0), masked_loss)"),
    Tested("a value that a hook has kept of a block")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::"
        "test_a_look_at_a_model_runs_no_hook_and_hooks_get_values_where_they_are_computed"
    )
    .helps("keep values of the last stage's blocks alone", "distils([2, 3])"),
]


def shared_experts():
    module = OwnMixture()
    module.layers[1]["experts"] = module.layers[0]["experts"]
    return module


def normed():
    module = Projections()
    module.norm = nn.LayerNorm(8)
    return module


def scaled():
    return Projections(scale=nn.Parameter(torch.ones(8)), norm=nn.LayerNorm(8))


def counted_embedding(counted):
    module = Projections()
    module.embed = nn.Embedding(16, 8, scale_grad_by_freq=counted)
    return module


def tied_split(embed, head):
    module = Projections()
    module.head = nn.Linear(8, 16, bias=False)
    module.head.weight = module.embed.weight
    styles = {"embed": embed, "head": head}
    layout = ModelLayout(
        tensor={name: style for name, style in {**TABLE, **styles}.items() if style},
        tied=(("embed.weight", "head.weight"),),
    )
    return problems("tp=2", [TensorParallel()], module, layout)


def heard(mesh, passes, module=None, **options):
    return heard_from(lambda: warned(mesh, passes, module, **options))


def large(**entries):
    module = Projections()
    module.embed = nn.Embedding(1024, 8)
    table = {name: TABLE[name] for name in BOTH}
    layout = ModelLayout(tensor={**table, **entries})
    return list(TensorParallel().warnings(module, layout, MeshSpec("tp=2")))


def heard_of(warnings):
    return tuple(warnings)


test_the_printed_remedy_helps = in_one_process(ROWS)


@on_ranks(2)
def test_the_printed_remedy_helps_on_two_ranks():
    run_together(ROWS, 2)
