"""The keys of Trainer and accelerate: each that the installed versions have is translated, told to have no effect,
or refused with a reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from meshpar import ActivationCheckpoint, Compile, FullyShard, HybridShard, RecipeError, Replicate, TensorParallel
from meshpar.launchers.commands.inspecting import convert_recipe
from meshpar.launchers.converters.tables import ACCELERATE, PARALLELISM, TRAINER
from meshpar.launchers.converters.translate import _KNOBS, ALIASES, HuggingFace, translate
from meshpar.launchers.recipes import named
from meshpar.launchers.recipes.loading import load_recipe, resolve
from meshpar.launchers.recipes.named import Translation, make_passes
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.yamlfile import Document, Place, parse_document

ROOT = Path(__file__).parents[2]
OURS = {"warmup_steps", "warmup_ratio", "bf16", "fp16"}
"""Names that a recipe has in common with Trainer."""
MODEL = "model: {dim: 32, layers: 2, heads: 2, hidden: 48}\ndata: {source: stdlib, validation_fraction: 0.1}\n"


def read(text: str) -> Recipe:
    return resolve(parse_document(MODEL + text, "run.yaml"))


def problems(text: str) -> str:
    with pytest.raises(RecipeError) as raised:
        read(text)
    return str(raised.value)


def test_every_key_of_training_arguments_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    keys = {field.name for field in dataclasses.fields(transformers.TrainingArguments)} - {
        "seed",
        "fsdp",
        "fsdp_config",
    }
    assert len(keys) > 100
    assert sorted(keys - {*TRAINER, *ACCELERATE}) == []


def test_every_documented_key_of_fsdp_config_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    text = transformers.TrainingArguments.__doc__
    listed = text[text.index("fsdp_config (`str` or `dict`") : text.index("deepspeed (`str`")]
    keys = re.findall(r"- (\w+) \(`", listed)
    assert len(keys) > 10
    for key in keys:
        assert known_to_the_pass(key), key


def known_to_the_pass(key: str) -> bool:
    """Whether the sharding pass translates, reports or refuses an old key, rather than taking it for one of its own."""
    found = translate("fsdp", {key: True})
    own = {field.name for field in dataclasses.fields(FullyShard)}
    return bool(found.notes or found.problems) and set(found.options) <= own


def test_every_key_of_accelerate_is_known() -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin

    keys = {field.name for field in dataclasses.fields(ClusterConfig)} - {"fsdp_config"}
    assert sorted(keys - set(ACCELERATE)) == []
    assert sorted({field.name for field in dataclasses.fields(ParallelismConfig)} - set(PARALLELISM)) == []
    for field in dataclasses.fields(FullyShardedDataParallelPlugin):
        assert known_to_the_pass(f"fsdp_{field.name.removeprefix('fsdp_')}"), field.name


def test_every_flag_of_accelerate_launch_about_sharding_is_known() -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import launch_command_parser

    flags = [
        option.removeprefix("--") for action in launch_command_parser()._actions for option in action.option_strings
    ]
    sharding = [flag for flag in flags if flag.startswith("fsdp_")]
    axes = [flag.removeprefix("parallelism_config_") for flag in flags if flag.startswith("parallelism_config_")]
    assert len(sharding) > 12 and len(axes) > 8
    assert [flag for flag in sharding if not known_to_the_pass(flag)] == []
    assert [name for name in axes if name not in PARALLELISM] == []


def harmless(key: str) -> Any:
    refused = TRAINER.refused if key in TRAINER.refused else ACCELERATE.refused
    return next(iter(refused[key][0]), None)


@pytest.mark.parametrize("key", sorted({*TRAINER.refused, *ACCELERATE.refused}))
def test_what_cannot_be_had_is_refused_with_a_reason_and_its_default_passes(key: str) -> None:
    found_problems = problems(f"name: a\ntraining: {{steps: 2}}\n{key}: something\n")
    assert re.search(rf"run.yaml:5: {key}: 'something' is refused: \w+.{{10}}", found_problems), found_problems
    import json

    recipe = read(f"name: a\ntraining: {{steps: 2}}\n{key}: {json.dumps(harmless(key))}\n")
    assert f"{key}: has no effect: this value is the default" in recipe.notes


@pytest.mark.parametrize("key", sorted({*TRAINER.no_effect, *ACCELERATE.no_effect}))
def test_what_needs_nothing_says_why(key: str) -> None:
    assert any(
        note.startswith(f"{key}: has no effect: ") and len(note) > 40
        for note in read(f"training: {{steps: 2}}\n{key}: 1\n").notes
    )


VALUES: dict[str, tuple[Any, str, Any]] = {
    "output_dir": ("out/x", "output", "out/x"),
    "per_device_train_batch_size": (3, "data.micro_batch", 3),
    "per_gpu_train_batch_size": (3, "data.micro_batch", 3),
    "gradient_accumulation_steps": (5, "data.accumulate", 5),
    "num_train_epochs": (2.0, "training.epochs", 2),
    "max_steps": (70, "training.steps", 70),
    "learning_rate": (1e-4, "optimizer.lr", 1e-4),
    "weight_decay": (0.2, "optimizer.weight_decay", 0.2),
    "adam_beta1": (0.8, "optimizer.betas", (0.8, 0.999)),
    "adam_beta2": (0.95, "optimizer.betas", (0.9, 0.95)),
    "adam_epsilon": (1e-6, "optimizer.eps", 1e-6),
    "max_grad_norm": (0, "training.clip", None),
    "lr_scheduler_type": ("cosine", "schedule.name", "cosine"),
    "lr_scheduler_kwargs": ("{min_lr_rate: 0.2}", "schedule.min_ratio", 0.2),
    "warmup_steps": (7, "schedule.warmup_steps", 7),
    "warmup_ratio": (0.03, "schedule.warmup_ratio", 0.03),
    "optim": ("adamw_torch", "optimizer.fused", False),
    "logging_steps": (9, "training.log_every", 9),
    "eval_strategy": ("epoch", "training.validate_every", "epoch"),
    "evaluation_strategy": ("epoch", "training.validate_every", "epoch"),
    "save_strategy": ("epoch", "checkpoint.every", "epoch"),
    "save_steps": (30, "checkpoint.every", 30),
    "save_total_limit": (2, "checkpoint.keep", 2),
    "load_best_model_at_end": ("true", "checkpoint.best", "val/loss"),
    "report_to": ("[wandb, trackio, tensorboard]", "trackers", {"trackio": {}, "wandb": {}}),
    "resume_from_checkpoint": ("true", "checkpoint.resume", "auto"),
    "run_name": ("mine", "name", "mine"),
    "dataloader_num_workers": (2, "data.workers", 2),
    "dataloader_pin_memory": ("false", "data.pin_memory", False),
    "dataloader_persistent_workers": ("false", "data.persistent_workers", False),
    "dataloader_prefetch_factor": (4, "data.prefetch", 4),
    "train_sampling_strategy": ("sequential", "data.shuffle", False),
    "no_cuda": ("true", "device", "cpu"),
}
PASSES: dict[str, list[Any]] = {
    "bf16: true": [Replicate(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)],
    "fp16: true": [Replicate(param_dtype=torch.float16, reduce_dtype=torch.float16)],
    "gradient_checkpointing: true": [ActivationCheckpoint(), Replicate()],
    "activation_checkpointing: true": [ActivationCheckpoint(), Replicate()],
    "torch_compile: true": [Compile(), Replicate()],
}


def field(recipe: Recipe, path: str) -> Any:
    value: Any = recipe
    for part in path.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("key", VALUES)
def test_a_trainers_key_sets_its_field(key: str) -> None:
    value, path, expected = VALUES[key]
    recipe = read(f"{key}: {value}\n")
    assert field(recipe, path) == expected
    assert any(note.startswith(f"{key}: ") for note in recipe.notes)
    assert recipe.mesh == "dp_replicate=-1" and recipe.passes == ({"Replicate": {}},)  # what Trainer does without fsdp


def test_warmup_steps_below_one_are_a_part_of_the_run() -> None:
    recipe = read("max_steps: 100\nwarmup_steps: 0.1\n")
    assert recipe.schedule.warmup_ratio == 0.1 and recipe.schedule.warmup_steps == 0
    assert "warmup_steps: 0.1 became schedule.warmup_ratio: 0.1" in recipe.notes
    recipe = read("max_steps: 100\nwarmup_ratio: 0.2\nwarmup_steps: 0.1\n")
    assert recipe.schedule.warmup_ratio == 0.1 and "warmup_ratio: has no effect: warmup_steps counts" in recipe.notes


def test_steps_of_an_event_follow_its_strategy_by_any_name() -> None:
    notes = read("evaluation_strategy: steps\neval_steps: 20\nsave_strategy: no\nsave_steps: 5\n").notes
    assert "eval_steps: 20 became training.validate_every: 20" in notes
    assert "save_steps: has no effect: save_strategy is no" in notes


def test_steps_of_a_strategy_and_passes_of_flags() -> None:
    recipe = read("eval_strategy: steps\neval_steps: 20\nsave_strategy: 'no'\nsave_steps: 5\n")
    assert (recipe.training.validate_every, recipe.checkpoint.every) == (20, None)
    for text, expected in PASSES.items():
        assert make_passes(read(text + "\n").passes) == expected
    covered = {*VALUES, "eval_steps", "model_name_or_path", *(text.partition(":")[0] for text in PASSES)}
    assert sorted(set(TRAINER.handlers) - covered) == []


def test_the_model_of_a_trainers_script_is_a_folder_of_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    text = f"model_name_or_path: {tmp_path}\nmax_steps: 2\ndata: {{source: stdlib, tokenizer: bytes}}\n"
    recipe = resolve(parse_document(text, "run.yaml"))
    assert (recipe.model.kind, recipe.model.weights, recipe.model.config) == ("huggingface", tmp_path, str(tmp_path))
    assert f"model_name_or_path: {tmp_path} became model: {{kind: huggingface, weights: {tmp_path}}}" in recipe.notes
    with pytest.raises(
        RecipeError, match=r"weights: some/name does not exist; expected a folder \(nothing is downloaded"
    ):
        resolve(parse_document(text.replace(str(tmp_path), "some/name"), "run.yaml"))


def test_a_whole_trainer_file_is_read_as_it_is() -> None:
    recipe = read(
        """\
output_dir: ./results
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
learning_rate: 2e-5
num_train_epochs: 3
warmup_ratio: 0.03
lr_scheduler_type: cosine
bf16: true
gradient_checkpointing: true
logging_steps: 10
eval_strategy: steps
eval_steps: 200
save_steps: 500
save_total_limit: 2
load_best_model_at_end: true
metric_for_best_model: accuracy
report_to: none
fsdp: full_shard auto_wrap
fsdp_config:
  fsdp_transformer_layer_cls_to_wrap: [Block]
  backward_prefetch: backward_pre
  limit_all_gathers: true
  use_orig_params: true
  sync_module_states: true
"""
    )
    half = torch.bfloat16
    assert make_passes(recipe.passes) == [
        ActivationCheckpoint(),
        FullyShard(blocks=("Block",), prefetch_backward=1, param_dtype=half, reduce_dtype=half),
    ]
    assert (recipe.mesh, recipe.data.micro_batch, recipe.data.accumulate, recipe.optimizer.betas) == (
        "dp_shard=-1",
        4,
        8,
        (0.9, 0.999),
    )
    assert (recipe.schedule.warmup_ratio, recipe.schedule.min_ratio, recipe.checkpoint.best) == (
        0.03,
        0.0,
        "+val/accuracy",
    )
    assert "learning_rate: 2e-05 became optimizer.lr: 2e-05" in recipe.notes
    assert "mesh: dp_shard=-1 (full sharding)" in recipe.notes
    assert any(
        note.startswith("Trainer's defaults: optimizer.betas: [0.9, 0.999], optimizer.weight_decay: 0.0")
        for note in recipe.notes
    )
    assert resolve(parse_document(recipe.to_yaml(), "again.yaml")).model_dump() == recipe.model_dump()


ACCELERATE_1 = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_POST
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_accelerates_file_is_read_as_it_is() -> None:
    recipe = read("training: {steps: 3}\n" + ACCELERATE_1)
    half = torch.bfloat16
    assert make_passes(recipe.passes) == [
        HybridShard(prefetch_backward=0, offload="cpu", param_dtype=half, reduce_dtype=half)
    ]
    assert recipe.mesh == "dp_replicate=2,dp_shard=8"
    output = " ".join(recipe.notes)
    for line in ACCELERATE_1.splitlines():
        key = line.partition(":")[0].strip().removeprefix("fsdp_")
        assert key == "config" or f"{key}: " in output, key


def test_fp8_of_accelerate_becomes_float8() -> None:
    fp8 = ACCELERATE_1.replace("mixed_precision: bf16", "mixed_precision: fp8\nfp8_config: {backend: AO}")
    recipe = read("training: {steps: 3}\n" + fp8 + "dynamo_config: {dynamo_backend: INDUCTOR}\n")
    assert [type(pass_).__name__ for pass_ in make_passes(recipe.passes)] == ["Float8", "Compile", "HybridShard"]
    assert make_passes(recipe.passes)[-1] == make_passes(read("training: {steps: 3}\n" + ACCELERATE_1).passes)[0]


def test_converting_writes_a_recipe_without_foreign_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(MODEL + "training: {steps: 3}\nlearning_rate: 1e-4\n" + ACCELERATE_1)
    text = convert_recipe(str(file))
    assert (
        "# learning_rate: 0.0001 became optimizer.lr: 0.0001\n" in text
        and "# fsdp.offload_params: True became offload=cpu\n" in text
    )
    again = resolve(parse_document(text, "run.yaml"))
    assert again == load_recipe(str(file)).noting(()) and again.notes == ()


def test_the_reader_of_recipes_knows_no_foreign_key() -> None:
    source = "".join(path.read_text() for path in (ROOT / "launchers/recipes").glob("*.py"))
    assert [
        key for key in {*TRAINER, *ACCELERATE, *_KNOBS, *ALIASES} - OURS if re.search(rf"[\"']{key}[\"']", source)
    ] == []


def test_a_stranger_converts_keys_and_options_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lightning:
        def keys(self, data: dict[str, Any], document: Document, problems: list[str], at: Place) -> list[str]:
            if data.pop("precision", None) == "half":
                problems.append(f"{document.where((*at, 'precision'))}: 'half' is refused")
            steps = data.pop("max_updates", None)
            data.setdefault("training", {"steps": steps})
            return [] if steps is None else [f"max_updates: {steps} became training.steps: {steps}"]

        def options(self, name: str, options: Mapping[str, Any]) -> Translation:
            return Translation(
                "fsdp" if name == "ddp_sharded" else name, dict(options), notes=["ddp_sharded: became fsdp"]
            )

    monkeypatch.setattr(named, "_installed", lambda: (Lightning(), HuggingFace()))
    recipe = read("mesh: dp_shard=2\nmax_updates: 7\npasses: [ddp_sharded: {cpu_offload: true}]\n")
    assert recipe.training.steps == 7 and make_passes(recipe.passes) == [FullyShard(offload="cpu")]
    assert recipe.notes[0] == "max_updates: 7 became training.steps: 7"
    assert recipe.notes[1:] == (
        "ddp_sharded.ddp_sharded: became fsdp",
        "ddp_sharded.cpu_offload: True became offload=cpu",
    )
    assert "run.yaml:3: precision: 'half' is refused" in problems("precision: half\n")


def test_accelerates_second_version_and_its_axes() -> None:
    text = """\
distributed_type: FSDP
mixed_precision: 'no'
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_auto_wrap_policy: NO_WRAP, fsdp_activation_checkpointing: true}
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 1
  parallelism_config_cp_comm_strategy: allgather
"""
    recipe = read("training: {steps: 3}\n" + text)
    assert recipe.mesh == "dp_replicate=2,dp_shard=2,tp=2"
    assert make_passes(recipe.passes) == [
        TensorParallel(),
        ActivationCheckpoint(),
        HybridShard(reshard_after_forward=False, blocks=()),
    ]
    assert (
        "cp_size: 4 is refused: accelerate's context parallelism is not translated; remove it and add cp=4"
        in problems("training: {steps: 3}\nparallelism_config: {cp_size: 4}\n")
    )


def test_other_engines_and_kinds_of_jobs() -> None:
    assert read("training: {steps: 3}\ndistributed_type: MULTI_GPU\nnum_processes: 4\n").mesh == "dp_replicate=4"
    assert read("training: {steps: 3}\ndistributed_type: 'NO'\n").mesh == ""
    assert read("training: {steps: 3}\nuse_cpu: true\n").device == "cpu"
    assert "DEEPSPEED is refused" in problems("training: {steps: 3}\ndistributed_type: DEEPSPEED\n")
    assert "the backend TE is refused: the pass Float8 computes with torchao" in problems(
        "training: {steps: 3}\nfp8_config: {backend: TE}\n"
    )
    assert "mixed precision needs a data-parallel pass" in problems(
        "training: {steps: 3}\ndistributed_type: 'NO'\nmixed_precision: bf16\n"
    )
    assert "the backend EAGER is refused" in problems("training: {steps: 3}\ndynamo_config: {dynamo_backend: EAGER}\n")
    compiled = read("training: {steps: 3}\nmesh: tp=2\ndynamo_config: {dynamo_backend: INDUCTOR}\n")
    assert make_passes(compiled.passes) == [TensorParallel(), Compile()]


def test_a_field_said_twice_is_a_conflict() -> None:
    assert "run.yaml:5: learning_rate: the recipe says optimizer.lr: 0.1 as well; keep one" in problems(
        "optimizer: {lr: 0.1}\ntraining: {steps: 3}\nlearning_rate: 1e-3\n"
    )


def test_a_key_is_refused_once_and_publishing_stops_no_training() -> None:
    assert problems("save_strategy: steps\nsave_steps: 0.1\n").count("0.1 is refused") == 1
    assert "push_to_hub: has no effect: training uploads nothing; publishing is a command of its own" in "\n".join(
        read("push_to_hub: true\n").notes
    )


def test_values_that_cannot_be_read() -> None:
    for text, reason in {
        "num_train_epochs: 1.5": "expected an integer from 1, got 1.5",
        "max_steps: .inf": "expected an integer from 1, got inf",
        "lr_scheduler_type: polynomial": "'polynomial' is refused: there are linear, cosine",
        "optim: adafactor": "'adafactor' is refused: the optimizer is AdamW",
        "save_steps: 0.1": "0.1 is refused: a part of the run",
        "eval_strategy: sometimes": "expected no, steps or epoch",
        "save_strategy: best": "'best' is refused",
        "train_sampling_strategy: group_by_length": "is refused",
        "lr_scheduler_kwargs: {power: 2}": "power is refused",
        "gradient_checkpointing: maybe": "expected true or false, got 'maybe'",
        "fsdp: half_shard": "'half_shard' is not known",
        "fsdp: true\nfsdp_config: {xla: true}": "TPUs are not supported",
        "fsdp: true\nfsdp_config: {ignored_modules: [lm_head]}": "FSDP2 reduces no gradients",
    }.items():
        assert reason in problems(text + "\n")


@pytest.mark.parametrize("key", sorted({*TRAINER.handlers, *ACCELERATE.handlers}))
def test_a_key_without_a_value_asks_for_nothing(key: str) -> None:
    recipe = read(f"training: {{steps: 3}}\n{key}:\n")
    assert f"{key}: has no effect: null is the default" in recipe.notes
    found_problems = (
        problems(f"training: {{steps: 3}}\n{key}: [[]]\n")
        if key not in ("run_name", "output_dir", "eval_steps", "report_to", "resume_from_checkpoint")
        else ""
    )
    assert key in found_problems or not found_problems


def test_a_file_of_fsdp_options(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"min_num_params": 100, "cpu_offload": true}')
    recipe = read(f"training: {{steps: 3}}\nfsdp: shard_grad_op\nfsdp_config: {tmp_path / 'fsdp.json'}\n")
    assert make_passes(recipe.passes) == [FullyShard(reshard_after_forward=False, min_params=100, offload="cpu")]
