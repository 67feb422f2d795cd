"""Rows of `forecasting`: see `tests/remedies/rows.py`."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from torch import nn

from meshpar import ContextParallel, FullyShard, ModelLayout, Plan, TensorParallel
from meshpar.core.mesh import MeshSpec
from meshpar.forecasting import Batch, Hardware, Trace, cost, forecast
from meshpar.forecasting.lints import lints
from meshpar.forecasting.search import search
from meshpar.forecasting.simulate import Simulation, simulate
from meshpar.forecasting.trace import Event, Phase
from tests.remedies.rows import Row, Tested, in_one_process
from tests.support.models_for_parity import Masked, MaskedAttention
from tests.support.plans import transformer

H100 = replace(Hardware.load("h100"), memory=2e7)
"""A card on which what small models do matters."""
BF16 = FullyShard(param_dtype=torch.bfloat16)


class CausalAttention(MaskedAttention):
    """Attends without a mask: causally, or to all positions."""

    causal = True

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(found.transpose(1, 2).flatten(2))


class FullAttention(CausalAttention):
    causal = False


class Attends(Masked):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(kind(32, 4) for _ in range(2))


class TwoLists(nn.Module):
    """Blocks in two lists."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleList([nn.Linear(32, 32)]) for _ in range(2))

    def forward(self, x):
        return self.second[0](self.first[0](x))


def summed(model, batch):
    return model(batch["input_ids"][..., None].float().expand(-1, -1, 32)).sum()


LISTS = ModelLayout(blocks=("first.*", "second.*"))


def job(mesh, passes, model=None, sequence=64, **options):
    return Simulation(
        plan=Plan(MeshSpec(mesh), passes),
        model=transformer(dim=64, hidden=96) if model is None else model.to("meta"),
        batch=Batch(sequence=sequence),
        world_size=MeshSpec(mesh).size,
        **options,
    )


SEQUENCE = TensorParallel(sequence_parallel=True)
NO_REGIONS = TensorParallel(sequence_parallel=True, styles={"layers.*.attn": None, "layers.*.mlp": None})


@cache
def traces():
    """Every simulation of these rows, in one pool of workers."""
    jobs = {
        "float32": job("dp_shard=2", [FullyShard()]),
        "bfloat16": job("dp_shard=2", [BF16]),
        "alone": job("tp=2", [NO_REGIONS]),
        "regions": job("tp=2", [SEQUENCE]),
        "masked": job("dp_shard=2", [BF16], Masked(), 2048),
        "no mask": job("dp_shard=2", [BF16], Attends(FullAttention), 2048),
        "causal": job("dp_shard=2", [BF16], Attends(CausalAttention), 2048),
    }
    return dict(zip(jobs, simulate(list(jobs.values()), workers=2)))


def said(name, rule, hardware=H100):
    """What the rule says of a simulation."""
    found = lints(traces()[name], cost(traces()[name], hardware), hardware)
    return [lint.text for lint in found if lint.name == rule]


def products(dtype, hardware):
    """Whether products of a dtype cost time."""
    event = Event(kind="compute", name="mm", flops=10**12, shape=(1, 64, 64, 64), dtype=dtype)
    trace = Trace(
        axes={}, depth=1, tokens=64, data_size=1, held={}, exact={}, parameters=1,
        phases=(Phase(name="forward", events=(event,)),),
    )  # fmt: skip
    return cost(trace, hardware).seconds > 0


def with_float8():
    """A profile with another peak, written as a file."""
    known = Hardware.load("a100")
    peaks = "".join(f"\n  {name}: {value:.1f}e+0" for name, value in {**known.peak, "float8": 1e15}.items())
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mine.yaml"
        text = (Path(forecast.__code__.co_filename).parent / "profiles" / "a100.yaml").read_text()
        path.write_text(re.sub(r"(?m)^peak:.*$", f"peak:{peaks}", text))
        return Hardware.load(path)


class Simulates(Exception):
    """What a search would simulate."""


def searched(mesh):
    """The sizes of cp that a search begins to simulate."""
    model = transformer(layers=6)
    with mock.patch("meshpar.forecasting.search.simulate", side_effect=lambda jobs, **_: raise_(Simulates(jobs))):
        try:
            search(
                model,
                model.meshpar_layout(),
                Batch(sequence=16),
                Hardware.load("h100"),
                8,
                plan=Plan(mesh, [ContextParallel()]),
            )
        except Simulates as found:
            return {simulation.plan.mesh.axes["cp"] for simulation in found.args[0]}
    raise AssertionError("the search simulates nothing")


def raise_(error):
    raise error


def locally_defined():
    class Local(nn.Linear):
        """A class that no other process can import."""

    return job("dp_shard=2", [FullyShard()], Local(4, 4))


ROWS = [
    Tested("up after {} of {} steps to simulate")
    .by("tests/forecasting/test_forecast.py::test_a_search_whose_time_is_up_ranks_what_it_has_simulated")
    .helps("give it more: --seconds", "seconds=400.0"),
    Tested("no setting fits of {} of {} steps")
    .by("tests/forecasting/test_forecast.py::test_a_search_whose_time_is_up_ranks_what_it_has_simulated")
    .helps("give the search more: --seconds", "seconds=400.0"),
    Tested("has aliases (*name); write the values out")
    .by("tests/launchers/test_trust.py::test_a_file_without_its_aliases_is_read")
    .helps("write the values out", "replace('*speed', 'speed')"),
    Tested("does not say how many ranks there are; give world_size=")
    .by("tests/forecasting/test_forecast.py::test_an_automatic_mesh_is_forecast_on_nodes_of_the_hardware")
    .helps("give world_size=", "world_size=16"),
    Tested('put what it does under if __name__ == "__main__"')
    .by("tests/forecasting/test_forecast.py::test_a_script_that_forecasts_when_it_is_imported_is_told")
    .helps('put what it does under if __name__ == "__main__"', """SCRIPT + 'if __name__ == "__main__":"""),
    Tested("ranks are one replica, in nodes of")
    .by("tests/jobs/test_replicas.py::test_a_search_keeps_replicas_that_may_be_lost_inside_of_nodes_and_whole")
    .helps("use more nodes", "node, 6, top=1"),
    Row("forecast its plans one by one", result="all")
    .refuses(lambda: search(TwoLists().to("meta"), LISTS, Batch(sequence=8), Hardware.load("h100"), 8))
    .helps(
        "forecast its plans one by one",
        lambda: (
            forecast(
                Plan("dp_shard=2", [FullyShard()]),
                TwoLists().to("meta"),
                Batch(sequence=8),
                hardware="h100",
                layout=LISTS,
                loss=summed,
            ).replayed
        ),
    ),
    Row("the search keeps {}, which must be sizes that divide {} ranks", result={2})
    .refuses(lambda: searched("dp_shard=1,cp=3"))
    .helps("write them in the mesh", lambda: searched("dp_shard=2,cp=2")),
    Row("Batch(examples={}) is not known", result=["tokens", "pairs", "labels"])
    .refuses(lambda: Batch(sequence=8, examples="pictures"))
    .helps(
        "use one of {}", lambda: [Batch(sequence=8, examples=kind).examples for kind in ("tokens", "pairs", "labels")]
    ),
    Row(
        "the forecast runs in a process of its own, to which this plan or model cannot be sent",
        result=lambda: sum(parameter.numel() for parameter in Attends(CausalAttention).parameters()),
    )
    .refuses(lambda: simulate([locally_defined()]))
    .helps("define classes and functions at the top of a module", lambda: traces()["causal"].parameters),
    Row("{} has no speed for float8 (its peak has {})", result=True)
    .refuses(lambda: products("float8", Hardware.load("a100")))
    .helps("leave Float8 out", lambda: products("bfloat16", Hardware.load("a100")))
    .helps("add peak.float8 to it", lambda: products("float8", with_float8())),
    Row("{} of the operations are in float32, which {} computes at 1/{} of the speed of bfloat16", result=[])
    .refuses(lambda: said("float32", "float32"))
    .helps("set param_dtype=bfloat16 in the pass that shards", lambda: said("bfloat16", "float32")),
    Row("{} calls run {}: compute in bfloat16 (param_dtype) with is_causal and no mask", result=[])
    .refuses(lambda: said("float32", "attention is not flash"))
    .helps("compute in bfloat16 (param_dtype) with is_causal", lambda: said("bfloat16", "attention is not flash")),
    Row("{} all-gathers a block forward where 2 would do", result=[])
    .refuses(lambda: said("alone", "redundant tensor-parallel collectives"))
    .helps(
        "give attention and feed-forward layer the style 'region'",
        lambda: said("regions", "redundant tensor-parallel collectives"),
    ),
    Row("a mask of {} x {} is built in memory", result=[])
    .refuses(lambda: said("masked", "materialised mask"))
    .helps("leave the attention mask out", lambda: said("no mask", "materialised mask"))
    .helps("say is_causal", lambda: said("causal", "materialised mask")),
    Row("tp={} spans nodes of {}: keep it within one", result=[])
    .refuses(lambda: said("regions", "tensor parallelism across nodes", replace(H100, node=1)))
    .helps("keep it within one", lambda: said("regions", "tensor parallelism across nodes", replace(H100, node=2))),
]


test_the_printed_remedy_helps = in_one_process(ROWS)
