"""What `meshpar plan` replays of a recipe is what its job does: objectives, adapters, teachers, reductions, experts."""

import functools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from typer.testing import CliRunner

import meshpar.forecasting.search as search_module
from meshpar.core.errors import RecipeError
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.step import ObjectiveLoss, record_step
from meshpar.forecasting.trace import Trace
from meshpar.launchers.cli import app
from meshpar.launchers.commands.inspecting import describe_recipe
from meshpar.launchers.jobs import build
from meshpar.launchers.jobs.build import batch_of, forecast_job
from meshpar.launchers.jobs.job import run_job
from meshpar.launchers.recipes.loading import load_recipe, shipped
from meshpar.testing import launch
from meshpar.training.adamw_and_schedules import AdamWSettings, build_adamw

pytest.importorskip("transformers")

MOE = ("model.config.num_hidden_layers=2", "data.sequence_length=32", "data.micro_batch=2")
CASES = {
    "seq2seq": ("t5_summarisation", ("data.micro_batch=2", "data.sequence_length=16", "data.target_length=8")),
    "classification": ("bert_classification", ("data.micro_batch=2", "data.sequence_length=16")),
    "experts": ("qwen3_moe_teacher", MOE),
    "reduced each": ("qwen3_moe_teacher", (*MOE, "data.accumulate=3", "training.reduce_each=true")),
    "bfloat16, whole loss": (
        "quickstart",
        (
            "dtype=bfloat16",
            "data.tokenizer=bytes",
            "data.micro_batch=1",
            "data.accumulate=2",
            "training.objective_options.chunk=0",
        ),
    ),
    "distillation": (
        "qwen3_moe_distillation",
        (
            "data.sequence_length=32",
            "per_device_train_batch_size=2",
            "teacher.model.weights=null",
            "teacher.model.config={config}",
        ),
    ),
    "documents": ("sft", ("data.tokenizer=bytes", "data.sequence_length=128", "data.micro_batch=2")),
    "adapters": ("qwen3_moe_teacher", (*MOE, "lora.targets=[q_proj, v_proj]", "lora.rank=4", "model.weights={config}")),
}


@functools.cache
def folder_with_a_model():
    """A published model's folder: the MoE's of the shipped recipe."""
    import tempfile

    import transformers

    folder = Path(tempfile.mkdtemp(prefix="meshpar-planned-"))
    config = load_recipe("qwen3_moe_teacher").model.config
    kind = transformers.AutoConfig.for_model(**config)
    transformers.AutoModelForCausalLM.from_config(kind).save_pretrained(folder)
    return folder


def recipe_of(case, folder):
    name, overrides = CASES[case]
    return load_recipe(name, [override.replace("{config}", str(folder)) for override in overrides])


def real_step(case, folder, expected):
    recipe = recipe_of(case, folder)
    model = build.build_shape(recipe)
    par = build.plan_of(recipe).apply(model, build.layout_of(recipe, model), device_type="cpu").materialize(seed=0)
    teacher = None
    if recipe.teacher is not None:
        teacher = (
            build.teacher_plan_of(recipe)
            .apply(build.teacher_shape(recipe), device_type="cpu")
            .materialize(seed=0)
            .module
        )
    objective = build.objective_of(recipe, teacher)
    optimizer = build_adamw(par.module, AdamWSettings(fused=True))
    batch = batch_of(recipe, build.plan_of(recipe), dist.get_world_size())
    batches = [
        {name: tensor.zero_() for name, tensor in batch.tensors(par.device).items()} for _ in range(batch.accumulate)
    ]
    options = {
        "loss": ObjectiveLoss(objective),
        "reduce_each": batch.reduce_each,
        "beside": [] if teacher is None else [teacher],
    }
    for _ in range(2):  # the first steps make the optimizer's state and compare more
        for micro in par.accumulate(map(par.split, batches), reduce_each=batch.reduce_each):
            options["loss"](par.module, micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    fact = record_step(par, optimizer, batches, **options)
    if dist.get_rank() == 0:
        plan = Trace.from_json(expected)
        assert plan.collectives() == fact.collectives()
        assert plan.exact == fact.exact
        assert plan.flops() == fact.flops()
        want, got = plan.memory().peak, fact.memory().peak
        assert want == pytest.approx(got, rel=0.1), f"planned {want}, measured {got}"


COVERED = ("experts", "classification", "reduced each", "bfloat16, whole loss", "seq2seq")
"""What other cases hold, too: in the long form."""
DAILY = ("documents",)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long if case in COVERED else [] if case in DAILY else pytest.mark.nightly)
        for case in CASES
    ],
)
def test_the_planned_step_of_a_recipe_is_its_jobs(case):
    folder = folder_with_a_model()
    made = forecast_job(recipe_of(case, folder), "h100", 2, depth="all", device="cpu")
    launch(__name__, "real_step", 2, (case, folder, made.trace.to_json()))


PLANNED = sorted(
    set(shipped()) - {"qwen3_moe_distillation", "gpt2", "gpt2_small", "sft", "hybrid_two_nodes", "hsdp_tp"}
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks={"quickstart": [], "moe": pytest.mark.nightly}.get(name, pytest.mark.long))
        for name in PLANNED
    ],
)
def test_a_shipped_recipe_is_planned_by_name(name):
    assert forecast_job(load_recipe(name), "h100", 2).cost.seconds > 0


@pytest.mark.long
def test_a_loss_of_whole_logits_is_planned_with_all_of_them():
    large = ["data.vocab_size=50304", "model.vocab_size=50304", "data.micro_batch=16"]
    peaks = [
        forecast_job(load_recipe("quickstart", [*large, f"training.objective_options.chunk={chunk}"]), "h100", 2)
        for chunk in (0, "null")
    ]
    whole, chunked = (peak.memory.peak for peak in peaks)
    assert whole - chunked > 1.5 * 16 * 256 * 50304 * 4, "logits and their gradient, but for a chunk's"


def test_parameters_in_bfloat16_are_trained_with_their_state_in_it(tmp_path):
    short = [
        "dtype=bfloat16", "mesh=", "model.layers=1", "data.sequence_length=32", "data.tokenizer=bytes", "training.steps=2", "training.validate_every=null",
        "schedule.warmup_steps=1", "data.source=files", f"data.paths=[{__file__}]",
    ]  # fmt: skip
    recipe = load_recipe("quickstart", [*short, f"output={tmp_path}", f"data.cache={tmp_path}"])
    assert run_job(recipe).steps == 2
    state = (
        torch.distributed.checkpoint.FileSystemReader(tmp_path / "checkpoints" / "latest")
        .read_metadata()
        .state_dict_metadata
    )
    kinds = {
        name: value.properties.dtype
        for name, value in state.items()
        if hasattr(value, "properties") and value.size.numel() > 1
    }
    assert any("exp_avg" in name for name in kinds)
    assert {dtype for name, dtype in kinds.items() if "layers" in name} == {torch.bfloat16}


def test_a_recipe_with_adapters_is_described_with_them():
    name, overrides = CASES["adapters"]
    folder = str(folder_with_a_model())
    with_adapters = describe_recipe(
        name, [override.replace("{config}", folder) for override in overrides], world_size=2
    )
    without = describe_recipe(name, MOE, world_size=2)
    kib = [
        float(re.search(r"([\d.]+) (KiB|MiB) of AdamW state", text)[1]) * {"KiB": 1, "MiB": 1024}[unit(text)]
        for text in (with_adapters, without)
    ]
    assert kib[0] < kib[1] / 20, "only adapters have moments"


def unit(text):
    return re.search(r"[\d.]+ (KiB|MiB) of AdamW state", text)[1]


def test_a_teacher_that_is_not_there_is_named():
    recipe = load_recipe(
        "qwen3_moe_distillation", ["teacher.model.config=nowhere/export", "teacher.model.weights=nowhere/export"]
    )
    with pytest.raises(RecipeError, match=r"teacher.model.*nowhere/export.*train and export the teacher first"):
        forecast_job(recipe, "h100", 2)


SEARCHED = """\
name: job
mesh: dp_shard=2
model: {dim: 32, layers: 6, heads: 2, hidden: 48, vocab_size: 257}
data: {source: stdlib, sequence_length: 32, micro_batch: 1}
training: {steps: 5}
"""


def plan_command(folder, *options):
    (folder / "job.yaml").write_text(SEARCHED)
    return CliRunner().invoke(app, ["plan", str(folder / "job.yaml"), *options])


@pytest.mark.long
def test_where_no_setting_fits_more_nodes_do(tmp_path, monkeypatch):
    few = partial(search_module.search, stages=(), micro_batches=(1,), recompute=("none",), workers=1)
    monkeypatch.setattr(search_module, "search", few)
    tiny = replace(Hardware.load("h100"), node=2, memory=4e5, reserved=0.0)
    monkeypatch.setattr(Hardware, "load", lambda source: tiny)
    done = plan_command(tmp_path, "--search", "--nodes", "1", "--seconds", "600")
    assert done.exit_code and "no setting fits 2 x h100; nearest: " in done.stderr and "; use more nodes" in done.stderr
    done = plan_command(tmp_path, "--search", "--nodes", "4", "--seconds", "600")
    assert done.exit_code == 0 and "on 8 x h100" in done.stdout, done.output


@pytest.mark.long
def test_a_recipe_that_no_search_is_for_is_forecast_without(tmp_path):
    own = ("optimizer={class: torch.optim.SGD, lr: 0.1}", "--trust")
    done = plan_command(tmp_path, *own, "--search")
    assert done.exit_code and "--search trains a whole model on packed text with AdamW" in done.stderr
    done = plan_command(tmp_path, *own)
    assert done.exit_code == 0 and "on 2 x h100" in done.stdout, done.output
