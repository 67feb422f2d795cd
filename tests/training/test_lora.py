"""Adapters under a plan equal one process; they alone are trained and saved; the merged export is peft's own merge."""

import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshpar import (
    ActivationCheckpoint,
    CheckpointError,
    ExpertParallel,
    FullyShard,
    HybridShard,
    MeshparError,
    Parallelized,
    Plan,
    RecipeError,
    TensorParallel,
)
from meshpar.checkpoints import CheckpointManager, DistributedCheckpoint, Safetensors, export_safetensors
from meshpar.launchers.export import export_adapters, merge_adapters
from meshpar.tensors.placements import local_tensor
from meshpar.testing import Memory, on_ranks, token_steps, whole
from meshpar.testing.parity import Record, assert_records_match, in_this_process, train_steps
from meshpar.training.adamw_and_schedules import AdamWSettings, build_adamw
from meshpar.training.experts import ExpertLoad
from meshpar.training.lora import Adapters, LoRA, WithAdapters, add_adapters
from tests.support.models_for_parity import VOCAB, huggingface, huggingface_gpt2
from tests.support.tiers import daily

pytest.importorskip("peft")

SEQUENCE = TensorParallel(sequence_parallel=True, loss_parallel=True)
PLANS: dict[str, tuple[str, list[Any]]] = {
    "fsdp": ("dp_shard=4", [FullyShard()]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    "fsdp-tp-sequence": ("dp_shard=2,tp=2", [SEQUENCE, FullyShard()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "experts": ("dp_shard=2,ep=2", [ExpertParallel(), FullyShard()]),
    "experts-tp": ("dp_shard=1,ep=2,tp=2", [ExpertParallel(), TensorParallel(), ActivationCheckpoint(), FullyShard()]),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
    "frozen": ("dp_shard=4", [FullyShard(whole="frozen")]),
    "frozen-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard(whole="frozen")]),
    "frozen-hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard(whole="frozen")]),
    "frozen-experts": ("dp_shard=2,ep=2", [ExpertParallel(), FullyShard(whole="frozen")]),
    "frozen-world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world", whole="frozen")]),
}
SETTINGS = LoRA(targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), rank=4, alpha=8.0)
GPT2_SETTINGS = LoRA(targets=("c_attn", "c_proj", "c_fc"), rank=4)


def qwen3() -> nn.Module:
    return huggingface("Qwen3", tie_word_embeddings=False)


def alone(model: nn.Module, settings: LoRA, folder: Path) -> Parallelized:
    """The model with adapters in this one process."""
    par = in_this_process(model, add_adapters(model, settings))
    return par.materialize(weights=WithAdapters(Safetensors(folder), model, seed=3))


def on_mesh(model: nn.Module, settings: LoRA, plan: str, folder: Path) -> Parallelized:
    mesh, passes = PLANS[plan]
    par = Plan(mesh, passes).apply(model, add_adapters(model, settings))
    return par.materialize(weights=WithAdapters(Safetensors(folder), model, seed=3))


def shared_folder() -> Path:
    folder = [tempfile.mkdtemp(prefix="meshpar-lora-")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def check(build: Any, settings: LoRA, folder: Path, plans: tuple[str, ...], make: Any = None) -> Parallelized:
    base = folder / "base"
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        build().save_pretrained(base)
    dist.barrier()
    parts = 2 if all("tp" in plan for plan in plans) else 4  # a batch for each data rank
    steps = token_steps(VOCAB, parts=parts, micro_batches=2)
    expected = Record()
    if dist.get_rank() == 0:
        with torch.device("meta"):
            model = build()
        par = alone(model, settings, base)
        expected = train_steps(par, steps, optimizer=make and make(par))
    for name in plans:
        with torch.device("meta"):
            model = build()
        par = on_mesh(model, settings, name, base)
        got = train_steps(par, steps, optimizer=make and make(par))
        if dist.get_rank() == 0:
            assert_records_match(expected, got)
            assert {gradient for gradient in got.gradients if ".lora_" not in gradient} == set()
            assert float(max(value.abs().max() for key, value in got.weights.items() if ".lora_B." in key)) > 0
        dist.barrier()
    return par


def peft_model(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def seeded() -> nn.Module:
    torch.manual_seed(1)
    return qwen3().double()


def two_steps(net: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD([parameter for parameter in net.parameters() if parameter.requires_grad], 0.1)
    for _ in range(2):
        net(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter.detach()) for parameter in net.parameters() if parameter.requires_grad]


@on_ranks(2)
def test_adapters_that_peft_builds_after_apply_are_refused_and_what_the_message_says_is_exact() -> None:
    ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(0))
    for mesh, make in (("dp_shard=2", FullyShard), ("tp=2", TensorParallel)):
        par = Plan(mesh, [make()]).apply(seeded())
        peft_model(par.module)
        with pytest.raises(MeshparError, match=r"self_attn\.q_proj was built for .*add_adapters\(model"):
            par.module(ids)
    expected = two_steps(peft_model(seeded()).double(), ids)
    par = Plan("dp_shard=2", [FullyShard()]).apply(peft_model(seeded()).double())
    for got, value in zip(two_steps(par.module, ids.chunk(2)[par.data_rank]), expected, strict=True):
        torch.testing.assert_close(got, value, atol=1e-9, rtol=0)
    settings = LoRA(targets=("q_proj", "down_proj"), rank=2)
    for mesh, make in (("dp_shard=2", FullyShard), ("tp=2", TensorParallel)):
        alone, model = seeded(), seeded()
        torch.manual_seed(5)
        add_adapters(alone, settings)
        torch.manual_seed(5)
        par = Plan(mesh, [make()]).apply(model, add_adapters(model, settings))
        trained = two_steps(par.module, ids.chunk(par.data_size)[par.data_rank])
        for got, value in zip(trained, two_steps(alone, ids), strict=True):
            torch.testing.assert_close(got, value, atol=1e-6, rtol=0)


NIGHTLY = ("frozen-tp", "fsdp", "hsdp", "fsdp-tp-sequence", "world", "frozen", "frozen-hsdp", "frozen-world")


@pytest.mark.parametrize("plans", [("fsdp-tp",), pytest.param(NIGHTLY, marks=pytest.mark.nightly)])
@on_ranks(4)
def test_adapters_train_as_in_one_process_and_are_merged_as_peft_does(plans: tuple[str, ...]) -> None:
    folder = shared_folder()
    par = check(qwen3, SETTINGS, folder, plans)
    saved_and_exported(par, qwen3, SETTINGS, "fsdp", folder)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def saved_and_exported(par: Parallelized, build: Any, settings: LoRA, other: str, folder: Path) -> None:
    """Save and restore on another mesh, and export as peft would."""
    optimizer = build_adamw(par.module, AdamWSettings())
    with CheckpointManager(folder / "checkpoints") as manager:
        manager.save(3, Adapters(par), optimizer)
        trained = {name: whole(parameter) for name, parameter in par.module.named_parameters()}
        with torch.device("meta"):
            model = build()
        fresh = on_mesh(model, settings, other, folder / "base")
        manager.restore(Adapters(fresh), build_adamw(fresh.module, AdamWSettings()))
    restored = {name: whole(parameter) for name, parameter in fresh.module.named_parameters()}
    assert all(torch.equal(trained[name], restored[name]) for name in trained)
    if dist.get_rank() == 0:
        compare_exports(folder, trained, settings)


@on_ranks(2)
def test_a_frozen_part_stays_whole_beside_what_is_sharded() -> None:
    """Nothing gathers it; its bytes are described and held; clipping, the stream and merging are those of one process."""
    ends = []
    for shard in (FullyShard(), FullyShard(whole="frozen")):
        torch.manual_seed(0)
        model = qwen3()
        layout = add_adapters(model, SETTINGS)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        memory = Memory()
        par = Plan("dp_shard=2", [shard]).apply(model, layout)
        trained = [parameter for parameter in par.module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
        par.module(input_ids=ids, labels=ids).loss.backward()
        norm = par.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        memory.check(par, "a step", optimizer)
        ends.append((norm, dict(par.published())))
        parts = 2 if shard.whole == () else 1
        frozen = [parameter for parameter in par.module.parameters() if not parameter.requires_grad]
        assert all(local_tensor(parameter).numel() * parts == parameter.numel() for parameter in frozen)
        del trained, optimizer, frozen, par, model
    (norm, one), (other_norm, other) = ends
    torch.testing.assert_close(norm, other_norm, rtol=1e-5, atol=0)
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert tensor.is_meta or (tensor - other[name]).abs().max() <= 1e-5 * tensor.abs().max(), name


def qwen3_moe() -> nn.Module:
    return huggingface("Qwen3Moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)


ON_EXPERTS = LoRA(targets=("q_proj",), parameters=("experts.gate_up_proj", "experts.down_proj"), rank=4, alpha=8.0)


@pytest.mark.parametrize("plan", daily(["experts", "experts-tp", "frozen-experts"]))
@on_ranks(4)
def test_adapters_on_divided_experts_train_as_in_one_process_and_are_merged_as_peft_does(plan: str) -> None:
    import peft

    folder = shared_folder()
    par = check(qwen3_moe, ON_EXPERTS, folder, (plan,))
    with pytest.raises(MeshparError, match=r"balance_rate=0.1 changes biases of frozen experts"):
        ExpertLoad(par, balance_rate=0.1)
    saved_and_exported(par, qwen3_moe, ON_EXPERTS, "fsdp-tp", folder)
    theirs = peft.LoraConfig(target_parameters=["mlp.experts.gate_up_proj"])
    on_experts = peft.get_peft_model(qwen3_moe(), theirs).base_model.model
    with pytest.raises(MeshparError, match=r"experts.base_layer is below peft's own adapters.*LoRA\(parameters="):
        Plan(*PLANS["experts"]).check(on_experts)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def compare_exports(folder: Path, trained: dict[str, torch.Tensor], settings: LoRA) -> None:
    import peft
    import transformers

    stored = names_in(folder / "checkpoints" / "latest")
    assert stored and all(".lora_" in name for name in stored)
    export_adapters(folder / "checkpoints", folder / "adapters", settings, folder / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    theirs = peft.PeftModel.from_pretrained(base, folder / "adapters")
    held = {name.removeprefix("base_model.model."): value for name, value in theirs.state_dict().items()}
    assert all(torch.equal(held[name], value) for name, value in trained.items())
    want = theirs.merge_and_unload()
    with pytest.raises(CheckpointError, match="already exists and is not empty"):
        export_adapters(folder / "checkpoints", folder / "adapters", settings, folder / "base")
    weights = merge_adapters(folder / "checkpoints", settings, folder / "base")
    config = json.loads((folder / "base" / "config.json").read_text())
    export_safetensors(weights, folder / "merged", max_shard_size=20_000, config=config)
    assert len(list((folder / "merged").glob("*.safetensors"))) > 1
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
    for name, value in want.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, want(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


def names_in(step: Path) -> list[str]:
    return [name for name in DistributedCheckpoint(step).tensors if name.startswith("model.")]


@pytest.mark.parametrize("plan", daily(["fsdp", "fsdp-tp"]))
@on_ranks(4)
def test_adapters_on_fused_and_transposed_projections(plan: str) -> None:
    folder = shared_folder()
    check(huggingface_gpt2, GPT2_SETTINGS, folder, (plan,))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def test_adapters_on_experts_that_are_stored_transposed_compute_as_pefts_own() -> None:
    import copy

    import peft

    torch.manual_seed(0)
    model = huggingface("GptOss", num_local_experts=4, num_experts_per_tok=2)
    theirs = copy.deepcopy(model)
    settings = LoRA(targets=(), parameters=("experts.gate_up_proj", "experts.down_proj"), rank=2)
    add_adapters(model, settings)
    config = peft.LoraConfig(r=2, lora_alpha=16, target_modules=[], target_parameters=list(settings.parameters))
    peft.inject_adapter_in_model(config, theirs)
    values = {
        name: torch.randn_like(parameter) if ".lora_" in name else parameter.detach()
        for name, parameter in model.named_parameters()
    }
    for network in (model, theirs):
        network.load_state_dict(values, strict=False)
    assert {name for name, parameter in theirs.named_parameters() if parameter.requires_grad} == {
        name for name in values if ".lora_" in name
    }
    ids = torch.arange(12)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_a_layout_with_adapters_can_be_sent_to_a_forecasts_process() -> None:
    with torch.device("meta"):
        model = qwen3()
    model, layout = pickle.loads(pickle.dumps((model, add_adapters(model, SETTINGS))))
    modules = model.to_empty(device="cpu").named_modules()
    layer = next(child for name, child in modules if name.endswith("q_proj.lora_B.default"))
    layout.init(layer)
    assert not layer.weight.any(), "its modules are those of the model that was sent with it"


def test_a_seed_gives_adapters_that_change_nothing_yet() -> None:
    import meshpar

    with torch.device("meta"):
        model = qwen3()
    with meshpar.distributed("cpu"):
        par = Plan().apply(model, add_adapters(model, SETTINGS)).materialize(seed=0)
    values = dict(par.module.named_parameters())
    assert all(not value.any() for name, value in values.items() if ".lora_B." in name)
    assert all(float(value.detach().std()) > 0.01 for name, value in values.items() if ".lora_A." in name)
    assert {name for name, value in values.items() if value.requires_grad} == {
        name for name in values if ".lora_" in name
    }


def test_what_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = qwen3()
    with pytest.raises(RecipeError, match=r"lora: Target modules .*nothing"):
        add_adapters(model, LoRA(targets=("nothing",)))
    with pytest.raises(RecipeError, match="rank of at least 1"):
        LoRA(rank=0)
    for settings, message in [
        (LoRA(targets=("experts",)), "lora: Target module Qwen3MoeExperts"),
        (
            LoRA(targets=("q_proj", "gate_proj", "up_proj")),
            "reach model.layers.1.mlp.experts.gate_up_proj, expected linear layers",
        ),
        (
            LoRA(parameters=("gate.weight",)),
            r"names model.layers.0.mlp.gate.weight \(8, 32\), .* has experts.down_proj, experts.gate_up_proj",
        ),
    ]:
        with torch.device("meta"), pytest.raises(RecipeError, match=message):
            add_adapters(qwen3_moe(), settings)
    with pytest.raises(RecipeError, match=r"added to the weights and see no input, got dropout 0\.1"):
        LoRA(parameters=("experts.down_proj",), dropout=0.1)
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MeshparError, match=r"pip install 'meshpar\[lora\]'"):
        add_adapters(model, LoRA())


def test_a_recipe_trains_adapters_goes_on_and_exports_them_merged(tmp_path, capfd) -> None:
    from meshpar.launchers.commands.train import launch as train
    from meshpar.launchers.export import export_run
    from meshpar.launchers.recipes.loading import load_recipe

    torch.manual_seed(0)
    base = huggingface("Llama", tie_word_embeddings=True)
    base.resize_token_embeddings(320)
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("a line of text\n" * 400)
    given = [
        f"model={{kind: huggingface, config: {tmp_path / 'base'}, weights: {tmp_path / 'base'}}}",
        f"data={{source: files, paths: [{tmp_path / 'text.txt'}], tokenizer: bytes, sequence_length: 16, micro_batch: "
        f"2, cache: {tmp_path / 'cache'}}}",
        "lora={targets: [q_proj, down_proj], rank: 2}", "mesh=''", "training.tensorboard=false", "training.validate_every=null", "schedule.warmup_steps=0",
    ]  # fmt: skip
    for steps in (2, 4):
        recipe = load_recipe(
            "quickstart", [*given, f"output={tmp_path / 'run'}", f"training.steps={steps}", "training.log_every=1"]
        )
        assert train(recipe, 1, quiet=True) == 0
    trained = (
        2 * 2 * (base.config.hidden_size * 3 + base.config.intermediate_size)
    )  # two layers; rank 2 beside two matrices of each
    assert f" parameters, {trained:,} of them trained, on one process" in capfd.readouterr().err
    stored = names_in(tmp_path / "run" / "checkpoints" / "latest")
    assert len(stored) == 2 * 2 * 2 and all(".lora_" in name for name in stored)
    import transformers

    merged = transformers.AutoModelForCausalLM.from_pretrained(
        export_run(tmp_path / "run", tmp_path / "merged")
    ).state_dict()
    changed = {name for name, value in base.state_dict().items() if not torch.equal(value, merged[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"} and len(changed) == 4
    with pytest.raises(RecipeError, match="adapters need a model of transformers"):
        load_recipe("quickstart", ["lora={rank: 2}"])


def test_adapters_on_an_embedding_are_refused() -> None:
    message = r"lora.targets name model.embed_tokens, a Embedding; adapters require linear layers"
    with pytest.raises(RecipeError, match=message):
        add_adapters(qwen3(), LoRA(targets=("embed_tokens",)))
