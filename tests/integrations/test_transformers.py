"""transformers' Trainer on meshes, each against itself in one process: losses to 1e-5, weights to 1e-4."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    LlamaForSequenceClassification,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from meshpar import ContextParallel, FullyShard, MeshparError, PipelineParallel, Plan, TensorParallel, distributed
from meshpar.integrations.transformers import on_mesh
from meshpar.testing import launch
from tests.support.tiers import daily
from tests.support.trainers import (
    MESHES,
    Classes,
    Rows,
    arguments,
    compare,
    llama,
    on_mesh_of,
    prepare_process,
    refused,
    run,
    tokenizer,
)

RESUMED = ("train_loss",)  # a resumed run says that of its own steps alone


def accuracy(prediction):
    logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    counted = labels[:, 1:] != -100
    hits = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & counted
    return {"hits": int(hits.sum()), "counted": int(counted.sum()), "rows": len(labels)}


def plain(make, folder, mesh, **options):
    settings = dict(include_num_input_tokens_seen="all") | options
    trainer = make(Trainer, llama(), arguments(folder, mesh, **settings), train_dataset=Rows())
    trainer.train()
    return trainer, []


def evaluated(make, folder, mesh, **options):
    settings = dict(eval_strategy="steps", eval_steps=2, label_smoothing_factor=0.1) | options
    rows = dict(train_dataset=Rows(), eval_dataset=Rows(19, seed=6), compute_metrics=accuracy)
    trainer = make(Trainer, llama(), arguments(folder, mesh, **settings), **rows)
    before = trainer.evaluate()
    trainer.train()
    prediction = trainer.predict(Rows(11, seed=7))
    return trainer, [before, prediction.metrics, prediction.predictions, prediction.label_ids]


def uneven(make, folder, mesh, **options):
    """21 rows: the last batch of an epoch has 5, so that data ranks get 4 and 1, or repeat rows."""
    settings = dict(max_steps=-1, num_train_epochs=3, eval_strategy="epoch", max_grad_norm=0.0) | options
    trainer = make(
        Trainer, llama(), arguments(folder, mesh, **settings), train_dataset=Rows(21), eval_dataset=Rows(9, seed=6)
    )
    trainer.train()
    return trainer, []


def classified(make, folder, mesh):
    settings = dict(max_steps=-1, num_train_epochs=1, eval_strategy="epoch")
    model = llama(LlamaForSequenceClassification, num_labels=2)
    rows = dict(train_dataset=Classes(21), eval_dataset=Classes(9, seed=6), compute_loss_func=classes_over_items)
    trainer = make(Trainer, model, arguments(folder, mesh, **settings), **rows)
    trainer.train()
    return trainer, [trainer.predict(Classes(7, seed=8)).predictions]


class Stop(TrainerCallback):
    """Stop training, and count calls."""

    def __init__(self):
        self.calls = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.calls += 1
        control.should_training_stop = state.global_step == 3


def stopped(make, folder, mesh):
    stop = Stop()
    trainer = make(Trainer, llama(), arguments(folder, mesh), train_dataset=Rows(), callbacks=[stop])
    trainer.train()
    return trainer, [stop.calls]


def early(make, folder, mesh):
    """A learning rate that soon spoils the model: the best is an early one."""
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", save_total_limit=1, save_strategy="steps")
    settings = dict(learning_rate=0.3, max_steps=12, eval_strategy="steps", eval_steps=1, save_steps=1) | best
    rows = dict(train_dataset=Rows(), eval_dataset=Rows(8, seed=6))
    stop = [EarlyStoppingCallback(early_stopping_patience=2)]
    trainer = make(Trainer, llama(), arguments(folder, mesh, **settings), **rows, callbacks=stop)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    # all ranks have come to the evaluation, behind what rank 0 deletes
    kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return trainer, [trainer.state.best_global_step, loss, len(kept)]


def again(make, folder, mesh):
    """Trained once more, when ranks draw numbers of their own."""
    trainer, _ = plain(make, folder, mesh)
    trainer.train()
    return trainer, []


def fresh():
    return llama()


def from_init(make, folder, mesh):
    trainer = make(Trainer, model_init=fresh, args=arguments(folder, mesh), train_dataset=Rows())
    trainer.train()
    return trainer, []


def adapted(make, folder, mesh, resume=None, **options):
    settings = dict(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, r=4) | options
    model = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", **settings))
    trainer = make(Trainer, model, arguments(folder, mesh, save_strategy="steps", save_steps=2), train_dataset=Rows())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(Path(folder) / "adapters")
    return trainer, []


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_replicate=2"))
def test_training_equals_one_process(mesh, tmp_path):
    compare(plain, mesh, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp_shard=2", "pp=2,tp=2"])
@pytest.mark.parametrize("case", [plain, evaluated, uneven])
def test_stages_equal_one_process(case, mesh, tmp_path):
    compare(case, mesh, tmp_path, skip=["total_flos"] if case is uneven else ())


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2"))
def test_evaluations_and_predictions_are_those_of_one_process(mesh, tmp_path):
    compare(evaluated, mesh, tmp_path)


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2"))
@pytest.mark.parametrize(
    "case", daily([uneven, classified, stopped, early, again, from_init], uneven, ids=lambda case: case.__name__)
)
def test_a_way_to_train_equals_one_process(case, mesh, tmp_path):
    compare(case, mesh, tmp_path, skip=["total_flos"] if case in (uneven, classified) else ())


OPTIONS = {
    "sgd": dict(optim="sgd"),
    "adagrad": dict(optim="adagrad"),
    "rmsprop": dict(optim="rmsprop", learning_rate=1e-3),
    "adamw": dict(optim="adamw_torch", weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=2),
    "recomputed": dict(gradient_checkpointing=True),
}


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_autocast_equals_one_process_to_rounding(mesh, tmp_path):
    compare(evaluated, mesh, tmp_path, skip=["eval_hits"], within=2e-2, bf16=True)


def noisy(make, folder, mesh):
    """Noise on embeddings, drawn alike where ranks have the same samples, which guards compare."""
    trainer, _ = plain(make, folder, mesh, neftune_noise_alpha=20.0)
    quiet, _ = plain(make, folder, mesh)
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (trainer, quiet)]
    assert abs(losses[0][0] - losses[1][0]) > 1e-3
    return quiet, []


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_noise_on_embeddings_reaches_every_rank(mesh, tmp_path):
    compare(noisy, mesh, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_argument_of_trainer_equals_one_process(name, mesh, tmp_path):
    compare(plain, mesh, tmp_path, **OPTIONS[name])


@pytest.mark.nightly
def test_a_compiled_model_equals_one_process(tmp_path):
    compare(plain, "dp_shard=2", tmp_path, torch_compile=True, torch_compile_backend="aot_eager")


ADAPTERS = {"lora": {}, "dora": dict(use_dora=True), "saved": dict(modules_to_save=["lm_head"])}


@pytest.mark.parametrize("mesh", daily(["dp_shard=2", "dp_replicate=2", "dp_replicate=2,dp_shard=2"], "dp_shard=2"))
@pytest.mark.parametrize("name", daily(ADAPTERS, "lora"))
def test_adapters_of_peft_equal_one_process_and_load(name, mesh, tmp_path):
    compare(adapted, mesh, tmp_path, **ADAPTERS[name])
    own, other = (PeftModel.from_pretrained(llama(), tmp_path / at / "adapters") for at in ("one", "mesh"))
    state = other.state_dict()
    for name, tensor in own.state_dict().items():
        assert torch.allclose(state[name], tensor, atol=1e-4), name


def saving(make, folder, mesh, resume=None, source=None, **options):
    settings = dict(save_strategy="steps", save_steps=2, max_steps=4) | options
    trainer = make(
        Trainer, llama(), arguments(folder, mesh, **settings), train_dataset=Rows(), processing_class=tokenizer()
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(Path(folder) / "export")
    return trainer, []


@pytest.mark.parametrize(
    ("first", "second"),
    daily(
        [
            ("dp_shard=2", "tp=2"),
            ("tp=2", "dp_shard=2"),
            ("dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2"),
            ("", "tp=2"),
        ],
        ("dp_shard=2", "tp=2"),
        ids=">".join,
    ),
)
def test_training_resumes_on_another_mesh_and_exports(first, second, tmp_path):
    expected = run(saving, tmp_path / "one")
    source = tmp_path / ("first" if first else "one")
    if first:
        on_mesh_of(first, saving, source, expected)
    resume = str(source / "checkpoint-2")
    on_mesh_of(second, saving, tmp_path / "second", expected, skip=RESUMED, resume=resume)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "export")
    for name, tensor in loaded.named_parameters():
        assert torch.allclose(tensor, expected.weights[name], atol=1e-4), name
    assert (tmp_path / "second" / "export" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("setting", "message", "instead"),
    [
        ({"fsdp": "full_shard"}, "drop it, and let the plan's passes divide the model", {}),
        ({"optim": "adafactor"}, "use one of them: their step on a shard is that on the whole tensor", {"optim": "sgd"}),
        ({"optim_target_modules": "all-linear"}, "drop it, because its optimizers factor whole matrices", {}),
        ({"average_tokens_across_devices": False}, "set it, so that each token counts once on any mesh", {"average_tokens_across_devices": True}),
        ({"fp16": True}, "set bf16=True instead", {"bf16": True}),
        ({"bf16_full_eval": True}, "use bf16=True, which rounds no weight", {"bf16": True}),
        ({"use_liger_kernel": True}, "drop it, because it replaces modules that passes have divided", {}),
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size: one rank alone may lack memory", {"per_device_train_batch_size": 4}),
        ({"train_sampling_strategy": "group_by_length"}, "use one of these", {"train_sampling_strategy": "sequential"}),
        ({"accelerator_config": {"split_batches": True}}, "set per_device_train_batch_size to a data rank's samples", {"per_device_train_batch_size": 4}),
        ({"predict_with_generate": True}, "drop it, and generate after training", {}),
        ({"push_to_hub": True}, "call save_model, and upload the folder", {}),
        ({"save_on_each_node": True}, "write output_dir to a file system that all nodes share", {}),
        ({"enable_jit_checkpoint": True}, "drop it, because its signal reaches ranks in different steps", {}),
        ({"debug": "underflow_overflow"}, "drop it, because it reads parameters, of which a rank has a part", {}),
        ({"ddp_find_unused_parameters": False}, "drop it, because no module is wrapped in DistributedDataParallel", {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_a_mesh_would_change_is_refused(setting, message, instead, tmp_path):
    def make(**options):
        kind = Seq2SeqTrainingArguments if "predict_with_generate" in options else TrainingArguments
        return on_mesh(Trainer)(llama(), arguments(tmp_path, kind=kind, **options), train_dataset=Rows(8), plan=Plan())

    refused(lambda: make(**setting), message)
    prepare_process()
    with distributed("cpu"):
        make(**instead).save_model(tmp_path / "saved")


def test_what_is_no_trainer_or_no_plan_is_refused(tmp_path):
    refused(lambda: on_mesh(llama()), "expected transformers.Trainer, or a class that inherits it")
    refused(lambda: on_mesh(Trainer)(llama(), arguments(tmp_path), plan=2), "expected a Plan or the text of a mesh")
    message = "no process group is open; wrap the script in `with meshpar.distributed():`"
    with pytest.raises(MeshparError, match=re.escape(message)):
        on_mesh(Trainer)(llama(), arguments(tmp_path), plan=Plan())
    with distributed("cpu"):
        on_mesh(Trainer)(llama(), arguments(tmp_path), plan=Plan())
        on_mesh(Trainer)(llama(), arguments(tmp_path), plan="")


def check_refusals(folder):
    prepare_process()

    def refused_on_ranks(make, message):
        with pytest.raises(MeshparError, match=re.escape(message)):
            make()

    def trainer(kind=Trainer, plan=None, model=None, rows=None, options=(), **given):
        plan = plan or Plan("dp_shard=2", [FullyShard()])
        settings = arguments(folder, "dp_shard=2", **dict(options))
        return on_mesh(kind)(model or llama(), settings, train_dataset=rows or Rows(), plan=plan, **given)

    cp = Plan("cp=2", [ContextParallel(), FullyShard()])
    refused_on_ranks(
        lambda: trainer(plan=cp),
        "axis 'cp' divides sequences, and Trainer's batches and losses are of whole ones; expected axes of "
        "samples, features and layers: use a mesh without cp, or a loop of your own with par.split",
    )
    pp = Plan("pp=2", [PipelineParallel()])
    refused_on_ranks(
        lambda: trainer(OwnLoss, pp),
        "axis 'pp' divides layers, and OwnLossOnMesh computes a loss and metrics of its own on every rank, which has "
        "some of the layers; expected a loss of Trainer's: use compute_loss_func= with Trainer, or a mesh without pp",
    )
    model = llama()
    refused_on_ranks(
        lambda: trainer(model=model, optimizers=(torch.optim.SGD(model.parameters()), None)),
        "optimizers has an optimizer or a schedule of the whole model's parameters; expected none: choose them by "
        "optim= and lr_scheduler_type=, pass optimizer_cls_and_kwargs=, or override create_optimizer",
    )
    trainer(plan=pp, compute_loss_func=sum_over_items, options={"max_steps": 1}).train()
    trainer(optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}), options={"max_steps": 1}).train()
    trainer(OwnOptimizer, options={"max_steps": 1}).train()
    refused_on_ranks(
        lambda: trainer().hyperparameter_search(),
        "hyperparameter_search draws the settings on one rank; expected the same on every rank: start one job for "
        "each setting",
    )
    refused_on_ranks(
        lambda: trainer(OwnMean, rows=Rows(21)).train(),
        "Training: 21 samples do not fill batches of 4 on 2 data ranks, and OwnMeanOnMesh averages over the samples "
        "of a rank, repeated ones too; expected a multiple of 8, or dataloader_drop_last=True",
    )
    trainer(OwnMean, rows=Rows(21), options={"dataloader_drop_last": True, "max_steps": 1}).train()
    refused_on_ranks(
        lambda: trainer(rows=Streamed()).train(),
        "Training: the dataset has no length, so that 2 data ranks cannot share its last samples as one process would "
        "use them; expected a length: load it without streaming, or use a mesh of tp alone",
    )
    trainer(rows=Rows(8), options={"max_steps": 1}).train()
    trainer(plan=Plan("tp=2", [TensorParallel()]), rows=Streamed(), options={"max_steps": 1}).train()
    refused_on_ranks(
        lambda: trainer(rows=Rows(21), data_collator=flat, options={"max_steps": 2}).train(),
        "the last batch of an epoch repeats samples, and the collator joined 8 samples of all ranks into 1 rows on "
        "each; expected a row for each sample: set dataloader_drop_last=True",
    )
    whole_batches = {"max_steps": 2, "dataloader_drop_last": True}
    trainer(rows=Rows(21), data_collator=flat, options=whole_batches).train()
    message = (
        "averages its loss over the labels of a rank, because it gets no number of the labels on all ranks, or does "
        "not divide by it; expected labels of tokens, and a forward with **kwargs that hands num_items_in_batch to its "
        "loss: pass compute_loss_func="
    )
    classes = llama(LlamaForSequenceClassification, num_labels=2)
    refused_on_ranks(lambda: trainer(model=classes, rows=Classes(16)).train(), message)
    split = Plan("tp=2", [TensorParallel()])
    refused_on_ranks(
        lambda: trainer(plan=split, options={"torch_compile": True}),
        "torch_compile is True, and axis 'tp' splits layers by features, whose exchanges are not traced through a whole "
        "model; expected False on this mesh: drop torch_compile",
    )
    regression = llama(LlamaForSequenceClassification, num_labels=1)
    refused_on_ranks(lambda: trainer(model=regression, rows=Scores(16)).train(), message)
    regression = llama(LlamaForSequenceClassification, num_labels=1)
    trainer(model=regression, rows=Scores(16), compute_loss_func=squares_over_items, options={"max_steps": 1}).train()
    adapted = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    refused_on_ranks(
        lambda: trainer(model=adapted, plan=Plan("tp=2", [TensorParallel()])),
        "axis 'tp' splits layers by features, and peft's adapters add to whole layers; expected axes of samples: use a "
        "mesh without tp, or add adapters by meshpar.training.add_adapters in a loop",
    )
    trainer(model=get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])))
    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    refused_on_ranks(lambda: trainer(model=model), "expected adapters inside of layers, such as LoRA")


def sum_over_items(outputs, labels, num_items_in_batch):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def flat(rows):
    return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Rows(8)[index] for index in range(8))


class Scores(Rows):
    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.trained[index] / 24}


def classes_over_items(outputs, labels, num_items_in_batch):
    return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def squares_over_items(outputs, labels, num_items_in_batch):
    return (outputs.logits[:, 0] - labels).square().sum() / num_items_in_batch


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class OwnMean(OwnLoss):
    loss_is_scaled_for_ga = False


class OwnOptimizer(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


def check_adapters_of_one_process(folder):
    prepare_process()
    model = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    plan, settings = Plan("dp_shard=2", [FullyShard()]), arguments(folder / "mesh", "dp_shard=2", max_steps=1)
    trainer = on_mesh(Trainer)(model, settings, train_dataset=Rows(), plan=plan)
    message = "has adapters of one process; expected a checkpoint of a trainer on a mesh: load them by "
    with pytest.raises(MeshparError, match=message):
        trainer.train(resume_from_checkpoint=str(folder / "one/checkpoint-2"))
    model = PeftModel.from_pretrained(llama(), folder / "one/checkpoint-2", is_trainable=True)
    on_mesh(Trainer)(model, settings, train_dataset=Rows(), plan=plan).train()


@pytest.mark.nightly
def test_adapters_of_one_process_are_refused_where_training_resumes(tmp_path):
    run(adapted, tmp_path / "one")
    launch(__name__, "check_adapters_of_one_process", 2, (tmp_path,))


def check_example(mesh, folder):
    prepare_process()
    EXAMPLE["main"](mesh, folder)


EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/trainer_on_mesh.py"))


def test_the_example_prints_the_same_on_one_process_and_on_a_mesh(tmp_path):
    check_example("", tmp_path / "one")
    launch(__name__, "check_example", 2, ("tp=2", tmp_path / "mesh"))
    alone, together = (
        json.loads((tmp_path / at / "checkpoint-20/trainer_state.json").read_text()) for at in ("one", "mesh")
    )
    losses = [[entry["loss"] for entry in state["log_history"] if "loss" in entry] for state in (alone, together)]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    AutoModelForCausalLM.from_pretrained(tmp_path / "mesh/export")


def test_what_ranks_cannot_train_as_one_process_is_refused(tmp_path):
    launch(__name__, "check_refusals", 2, (tmp_path,))
