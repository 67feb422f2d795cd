"""A sample of architectures under every plan; ``benchmarks/architectures.py`` runs them all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshpar import FullyShard, Guard, Plan, TensorParallel
from meshpar.checkpoints import Safetensors, export_module
from meshpar.core.registry import layout_for
from meshpar.guards.agreement import differing_gradients
from meshpar.testing import assert_parity, on_ranks, token_steps
from tests.support.models_for_parity import VOCAB, transformer

pytest.importorskip("transformers")
import architectures
import tiny

EVERYWHERE = (
    ("qwen3_moe", "causal"),  # whole experts, norms of heads
    ("deepseek_v3", "causal"),  # latent attention, shared experts, a dense first layer
    ("gpt_oss", "causal"),  # experts with biases and interleaved gates
    ("llama4_text", "causal"),  # experts that take rows in their order, and are split inside
    ("apertus", "causal"),  # an activation with parameters
    ("qwen3_next", "causal"),  # linear attention beside gated attention
    ("gpt2", "causal"),  # a fused projection, tied ends
    ("t5", "seq2seq"),  # tied ends three times, a position bias that layers share
    ("bert", "masked"),  # a tied bias
    ("roberta", "causal"),  # positions counted from padding
    ("bart", "causal"),  # positions counted in an embedding
)
WHOLE_OVER_TP = (("mamba", "causal"), ("doge", "causal"))
DATA_PLANS = ("one process", "FSDP 2", "HSDP 2x2")
POSITIONS = ("CP 2", "CP 2 by heads")
EXPERTS = ("EP 2", "EP 2 x TP 2")
DOCUMENTS = ("documents",)
STAGES = ("PP 2", "PP 2 x FSDP 2")  # exact, or refused where more than one value passes from block to block
MAY_REFUSE = (*STAGES, *architectures.BITS)
UNSPLIT = {
    "qwen3_next": DOCUMENTS,
    "t5": (*POSITIONS, *EXPERTS, *DOCUMENTS),
    "gpt_oss": ("CP 2 by heads", *DOCUMENTS),
    **dict.fromkeys(("apertus", "gpt2"), EXPERTS),
    **dict.fromkeys(("bert", "roberta", "bart"), (*EXPERTS, *DOCUMENTS)),
}
"""Positions that cannot be split: two sequences, sinks of a head's own. Experts: none, or not by a chosen number.
Documents that see each other: linear attention, positions of the model's own; packing is for causal models."""


@pytest.fixture(scope="module")
def pool():
    made = architectures.Pool(unverified=False)
    yield made
    made.close()


@pytest.mark.parametrize("case", EVERYWHERE, ids="-".join)
def test_every_plan_equals_one_process(pool, case):
    plans = architectures.measure(pool, case)["plans"]
    assert {plans.pop(plan)["verdict"] for plan in MAY_REFUSE} <= {"exact", "refused"}
    expected = {
        plan: "refused" if plan in UNSPLIT.get(case[0], ()) else "exact"
        for plan in ("one process", *architectures.PLANS)
        if plan not in MAY_REFUSE
    }
    assert {plan: result["verdict"] for plan, result in plans.items()} == expected, plans
    assert {plan.get("export", "exact") for plan in plans.values()} == {"exact"}


@pytest.mark.parametrize("case", EVERYWHERE, ids="-".join)
def test_every_plan_streams_the_bytes_that_it_exports(pool, case):
    plans = architectures.measure(pool, case, rounds=architectures.STREAMED, stream=True)["plans"]
    verdicts = {plan: result["verdict"] for plan, result in plans.items()}
    assert verdicts == {plan: "refused" if plan in UNSPLIT.get(case[0], ()) else "exact" for plan in plans}, plans


@pytest.mark.parametrize("case", WHOLE_OVER_TP, ids="-".join)
def test_what_has_no_exact_split_is_refused_and_shards_over_data(pool, case):
    plans = architectures.measure(pool, case)["plans"]
    verdicts = {plan: result["verdict"] for plan, result in plans.items() if plan not in MAY_REFUSE}
    exact = (
        (*DATA_PLANS, *POSITIONS) if case == ("doge", "causal") else DATA_PLANS
    )  # a recurrence without attention is refused over cp
    assert verdicts == {
        plan: "exact" if plan in exact else "refused"
        for plan in ("one process", *architectures.PLANS)
        if plan not in MAY_REFUSE
    }, plans
    why = {plan: result["why"] for plan, result in plans.items() if result["verdict"] == "refused"}
    said = dict.fromkeys(POSITIONS, "position") | dict.fromkeys(EXPERTS, "experts") | {"documents": "document"}
    said |= dict.fromkeys(STAGES, "PipelineParallel")
    assert all(said.get(plan, "TensorParallel") in text for plan, text in why.items()), why


def test_a_missing_gradient_sum_is_found(pool):
    """What a layout forgets is refused: the norms of heads, each rank with the gradient of its own heads."""
    attention = "model.layers.*.self_attn"
    styles = dict.fromkeys((attention, f"{attention}.q_norm", f"{attention}.k_norm"))
    plans = architectures.measure(pool, ("qwen3", "causal"), styles)["plans"]
    assert plans["FSDP 2"]["verdict"] == "exact"
    assert plans["TP 2"]["verdict"] == "refused", "by the first forward's own test"
    assert "q_norm.weight" in plans["TP 2"]["why"]


@pytest.mark.parametrize(
    ("name", "task"),
    [("falcon_h1", "causal"), ("openai-gpt", "causal"), ("apertus", "causal"), ("data2vec-text", "masked")],
)
def test_tensors_that_only_a_constructor_or_an_outer_model_fills_are_initialised(name, task):
    with torch.device("meta"):
        model = tiny.tiny_model(name, task)
    init = layout_for(model).init
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan")) if tensor.is_floating_point() else None
    for module in reversed(list(model.modules())):
        init(module)
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))


class Side(nn.Module):
    """Attention and feed-forward side by side in lists of lists, and two layers that share a weight; no layout."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.ModuleList(
            [nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))]) for _ in range(2)]
        )
        self.tied = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.tied[2].weight = self.tied[0].weight


def test_a_model_that_nobody_describes_gets_units_that_are_called_and_untied():
    model = Side()
    assert layout_for(model).blocks == ("pairs.*.*", "tied.1", "tied.3")
    Plan("dp_shard=2", [FullyShard()]).check(model, world_size=2)


@on_ranks(2)
def test_ranks_notice_where_a_sum_over_the_axis_is_missing():
    attention = "model.layers.*.self_attn"
    forgotten = dict.fromkeys((attention, f"{attention}.q_norm"))
    batch = tiny.tiny_batch("causal")
    for styles, differ in (
        ({}, []),
        (forgotten, [f"model.layers.{place}.self_attn.q_norm.weight" for place in (0, 1)]),
    ):
        plan = Plan("dp_shard=1,tp=2", [TensorParallel(styles=styles), FullyShard()], verify=False)
        par = plan.apply(tiny.tiny_model("qwen3", "causal"))
        par.run.moments = [moment for moment in par.run.moments if not isinstance(moment, Guard)]
        total, count = architectures.loss_sum(par.module, batch, [0, 1])
        (total / count).backward()
        assert differing_gradients(par.module, "tp", par.mesh.get_group("tp"), "cpu") == differ


@on_ranks(4)
def test_ranks_share_key_and_value_heads():
    """Two heads of keys and values on four ranks: pairs of ranks compute one head, and its gradient is summed."""
    for passes in ([TensorParallel()], [TensorParallel(sequence_parallel=True, loss_parallel=True)]):
        assert_parity(transformer, "tp=4", passes, token_steps(VOCAB, steps=2, parts=1))


PUBLISHED = dict.fromkeys(("llama", "gpt2", "gpt_oss", "mamba", "qwen3_moe", "mixtral"), "causal")
PUBLISHED |= {"t5": "seq2seq", "marian": "seq2seq", "bert": "classifier"}


@on_ranks(4, timeout_s=170)
def load_and_export_all(root: str) -> None:
    """Load what save_pretrained wrote, each rank its part, and export the models again."""
    for name, task in PUBLISHED.items():
        with torch.device("meta"):
            model = tiny.tiny_model(name, task)
        split: list[Any] = [] if name == "mamba" else [TensorParallel()]
        par = Plan("dp_shard=2,tp=2" if split else "dp_shard=4", [*split, FullyShard()]).apply(model)
        par.materialize(weights=Safetensors(Path(root) / name / "theirs"))
        export_module(par, Path(root) / name / "ours")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    for name, task in PUBLISHED.items():
        tiny.tiny_model(name, task).save_pretrained(root / name / "theirs")
    load_and_export_all(str(root))
    return root


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_are_loaded_and_exported_as_they_were(published, name):
    task = PUBLISHED[name]
    model = tiny.tiny_model(name, task).eval()
    exported, report = type(model).from_pretrained(published / name / "ours", output_loading_info=True)
    assert not any(report.values()), report
    theirs, ours = (Safetensors(published / name / side).shapes() for side in ("theirs", "ours"))
    assert theirs.items() <= ours.items(), "Marian's positions are computed, and not stored by transformers"
    batch = tiny.tiny_batch(task)
    with torch.no_grad():
        assert torch.equal(exported.eval()(**batch).logits, model(**batch).logits)
        if task != "classifier":
            prompt = {"input_ids": batch["input_ids"][:1], "do_sample": False, "max_new_tokens": 8, "use_cache": False}
            assert torch.equal(exported.generate(**prompt), model.generate(**prompt))
