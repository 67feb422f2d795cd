"""TRL's trainers on meshes, each against itself in one process: losses to 1e-5, weights to 1e-4."""

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForSequenceClassification

from meshpar import MeshparError, Plan, distributed, passes_for
from meshpar.integrations.transformers import on_mesh
from meshpar.testing import launch
from tests.support.tiers import daily
from tests.support.trainers import MESHES, WORDS, arguments, compare, llama, prepare_process, refused, tokenizer

pytest.importorskip("trl")

from datasets import Dataset as Table
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from tests.support.vllm_server import serving, without_vllm

PADDED = ("total_flos", "num_tokens")
"""What trainers count with padding and repeated rows, which depend on the rows of a rank."""


def table(columns, count=16):
    draw = random.Random(0)
    lengths = {"prompt": (3, 8), "completion": (3, 8), "chosen": (3, 8), "rejected": (3, 8), "text": (6, 20)}

    def words(name):
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(*lengths[name])))
        return text if name in ("prompt", "text") else f" {text}"

    return Table.from_list([{name: words(name) for name in columns} for _ in range(count)])


def aligned(make, kind, folder, mesh, config, columns, extra=(), **options):
    settings = dict(kind=config, bf16=False, gradient_checkpointing=False, batch=4, max_steps=2) | options
    rows = table(columns)
    trainer = make(
        kind,
        llama(LlamaForSequenceClassification, num_labels=1) if config is RewardConfig else llama(),
        args=arguments(folder, mesh, **settings), train_dataset=rows, processing_class=tokenizer(), **dict(extra),
    )  # fmt: skip
    trainer.train()
    return trainer, []


def supervised(make, folder, mesh, **options):
    return aligned(make, SFTTrainer, folder, mesh, SFTConfig, ["prompt", "completion"], max_length=32, **options)


def packed(make, folder, mesh):
    return aligned(
        make, SFTTrainer, folder, mesh, SFTConfig, ["text"], max_length=24, packing=True, packing_strategy="wrapped"
    )


def preferred(make, folder, mesh):
    reference = {"ref_model": llama(seed=3)}
    return aligned(
        make, DPOTrainer, folder, mesh, DPOConfig, ["prompt", "chosen", "rejected"], reference, max_length=32
    )


def rewarded(make, folder, mesh):
    return aligned(make, RewardTrainer, folder, mesh, RewardConfig, ["chosen", "rejected"], max_length=32)


def alternate(probabilities, num_samples):
    """Take the likeliest token in even rows, and the second in odd ones, which are other completions of a prompt."""
    order = torch.arange(len(probabilities)) % 2
    return probabilities.topk(2).indices.gather(1, order[:, None])


def variety(completions, **_):
    return [len(set(completion.split())) / 6 for completion in completions]


def policy(make, folder, mesh):
    """Completions end at other lengths, so that ranks wait for the longest one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", alternate)
        settings = dict(num_generations=2, max_completion_length=6, generation_kwargs={"suppress_tokens": [0]})
        reward = {"reward_funcs": variety}
        trainer, _ = aligned(make, GRPOTrainer, folder, mesh, GRPOConfig, ["prompt"], reward, **settings)
    steps = [entry for entry in trainer.state.log_history if "reward_std" in entry]
    assert len(steps) == 2 and all(entry["reward_std"] > 0 and entry["grad_norm"] > 0 for entry in steps)
    return trainer, []


def served(make, folder, mesh, urls, adapters=None, **options):
    """Completions come from a server, which gets the weights of each step; ``adapters`` are options of LoRA."""
    settings = dict(
        use_vllm=True, vllm_mode="server", vllm_server_base_url=urls[bool(mesh)], num_generations=2,
        max_completion_length=6, generation_kwargs={"suppress_tokens": [0]}, max_steps=3, batch=4, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    rows = dict(train_dataset=table(["prompt"]), processing_class=tokenizer(), reward_funcs=variety)
    adapted = LoraConfig(**{"target_modules": ["q_proj", "up_proj"], **(adapters or {})})
    model = llama() if adapters is None else get_peft_model(llama(), adapted)
    with without_vllm():
        trainer = make(GRPOTrainer, model, args=arguments(folder, mesh, GRPOConfig, **settings | options), **rows)
        trainer.train()
    return trainer, []


BY_RANK = (*PADDED, "clip_ratio", "sampling", "step_time", "entropy", "train_loss")
"""What GRPOTrainer averages over micro-batches, which it draws on each rank."""


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["dp_replicate=2", "dp_shard=2", "dp_replicate=2,dp_shard=2"])
def test_a_policy_equals_one_process(mesh, tmp_path):
    compare(policy, mesh, tmp_path, skip=BY_RANK)


@pytest.mark.nightly
@pytest.mark.parametrize("adapters", [None, {}], ids=["whole", "lora"])
@pytest.mark.parametrize("mesh", ["dp_replicate=2", "dp_shard=2", "dp_replicate=2,dp_shard=2"])
def test_a_policy_whose_completions_a_server_generates_equals_one_process(mesh, adapters, tmp_path):
    """The servers begin with other weights, and end with those before the last step."""
    with serving(llama(seed=8)) as one, serving(llama(seed=9)) as other:
        compare(served, mesh, tmp_path, skip=BY_RANK, urls=(one.url, other.url), adapters=adapters)
        update = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
        assert other.calls == one.calls == ["/init_weight_transfer_engine", *update * 3]
        for name, tensor in one.model.state_dict().items():
            torch.testing.assert_close(other.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", daily(MESHES, "tp=2"))
@pytest.mark.parametrize(
    "case", daily([supervised, packed, preferred, rewarded], supervised, ids=lambda case: case.__name__)
)
def test_a_trainer_of_trl_equals_one_process(case, mesh, tmp_path):
    compare(case, mesh, tmp_path, skip=PADDED)


def test_what_of_trl_a_mesh_would_change_is_refused(tmp_path):
    def make(**options):
        settings = arguments(tmp_path, kind=DPOConfig, bf16=False, **options)
        rows = dict(train_dataset=table(["prompt", "chosen", "rejected"], 8), processing_class=tokenizer())
        return on_mesh(DPOTrainer)(llama(), ref_model=llama(), args=settings, plan=Plan(), **rows)

    message = "drop it, because the reference model is frozen on the mesh"
    refused(lambda: make(sync_ref_model=True), message)
    prepare_process()
    with distributed("cpu"):
        make()
    message = "KTOTrainer has not been compared with one process; expected Trainer, SFTTrainer"
    refused(lambda: on_mesh(KTOTrainer), message)


def check_policies(folder):
    prepare_process()

    def make(mesh, **options):
        rows = dict(train_dataset=table(["prompt"], 8), processing_class=tokenizer(), reward_funcs=variety)
        settings = arguments(folder, kind=GRPOConfig, bf16=False, num_generations=2, **options)
        return on_mesh(GRPOTrainer)(llama(), args=settings, plan=Plan(mesh, passes_for(mesh)), **rows)

    with pytest.raises(MeshparError, match="set it, and start `vllm serve`, because no rank has whole weights"):
        make("dp_shard=2", use_vllm=True)
    with serving(llama()) as server, without_vllm():
        make("dp_shard=2", use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url)
    make("dp_shard=2")
    message = "axis 'tp' has ranks with the same prompts, whose completions GRPOTrainerOnMesh would count twice"
    with pytest.raises(MeshparError, match=message):
        make("tp=2")
    make("dp_replicate=2")


@pytest.mark.nightly
def test_what_of_policies_a_mesh_would_change_is_refused(tmp_path):
    launch(__name__, "check_policies", 2, (tmp_path,))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "adapters", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}], ids=str
)
def test_adapters_that_are_no_part_of_the_weights_that_are_sent_are_refused(adapters, tmp_path):
    def make(kind, *args, **settings):
        return on_mesh(kind)(*args, plan=Plan(), **settings)

    with serving(llama()) as server:
        message = "are no part of the weights that vLLM gets ("
        refused(lambda: served(make, tmp_path, "", (server.url,), adapters), message)
        prepare_process()
        with distributed("cpu"):
            served(make, tmp_path, "", (server.url,), {})
            served(make, tmp_path, "", (server.url,), adapters, use_vllm=False)
