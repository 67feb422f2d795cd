"""The load of experts: balanced by a bias or by a loss as in one process on every mesh, and what a run says of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshpar import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    MeshparError,
    Plan,
    PlanError,
    TensorParallel,
    distributed,
)
from meshpar.checkpoints import export_module
from meshpar.testing import launch, on_ranks, whole
from meshpar.training import (
    AdamWSettings,
    Batches,
    CausalLM,
    ExpertLoad,
    PackedTokens,
    Schedule,
    Trainer,
    TrainSettings,
    build_adamw,
)
from meshpar.training.metrics import JsonLines
from meshpar.training.tokens import write_tokens
from tests.support.models_for_parity import VOCAB, huggingface, transformer
from tests.support.tiers import daily

SIZES = dict(moe_intermediate_size=16, num_experts_per_tok=2, norm_topk_prob=True)


def with_shared():
    return transformer(experts=8, expert_hidden=16, shared_experts=1, routed_scale=2.0, qk_norm=True)


def without_shared():
    return transformer(experts=8, expert_hidden=16, qk_norm=True)


def glm():
    return huggingface("Glm4Moe", n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, **SIZES)


def qwen(**options):
    return huggingface("Qwen3Moe", num_experts=8, decoder_sparse_step=1, **SIZES | options)


BUILDS = {
    "with_shared": (with_shared, dict(balance_rate=0.02)),
    "without_shared": (without_shared, dict(balance_loss=0.5)),
    "glm": (glm, dict(balance_rate=0.02, balance_loss=0.5)),
    "qwen": (qwen, dict(balance_loss=0.5)),
}
MESHES = {
    2: [("dp_shard=2", [Compile(backend="eager"), FullyShard()], ["without_shared"])],
    4: [
        ("dp_shard=1,ep=2,tp=2", [ExpertParallel(), TensorParallel(), FullyShard()], ["with_shared", "glm"]),
        ("dp_shard=1,cp=2,ep=2", [ExpertParallel(), ContextParallel(), ActivationCheckpoint(), FullyShard()], ["qwen"]),
    ],
}


def trains(root, mesh, passes, name):
    """Train three steps of two micro-batches on any mesh; keep weights, biases and records on rank 0."""
    build, balance = BUILDS[name]
    with torch.device("meta"):
        module = build()
    par = Plan(mesh, passes).apply(module, device_type="cpu").materialize(seed=0)
    file = Path(root) / f"{name}-{mesh}-{dist.get_rank()}"
    ids = np.random.default_rng(0).zipf(1.3, 24 * 16 + 1) % VOCAB  # skewed, and more so for one half of the batch
    tokens = PackedTokens(
        write_tokens(file.with_suffix(".bin"), [ids], vocab_size=VOCAB, eos_id=VOCAB - 1), 16, documents="joined"
    )
    data = Batches(
        tokens, micro_batch=4 // par.data_size, accumulate=2, data_rank=par.data_rank, data_size=par.data_size
    )
    settings = TrainSettings(steps=3, log_every=1, **balance)
    records = JsonLines(file.with_suffix(".jsonl"))
    optimizer = build_adamw(module, AdamWSettings(lr=1e-2, eps=1e-3))
    Trainer(par, CausalLM(), data, optimizer, Schedule(lr=1e-2, steps=3), settings, reporters=[records]).run()
    state = {key: whole(tensor) for key, tensor in module.state_dict().items()}
    if dist.get_rank() == 0:
        lines = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
        torch.save((state, lines), file.with_suffix(".pt"))


def train_all(root, ranks, name):
    for mesh, passes, names in [("", [], BUILDS)] if ranks == 1 else MESHES[ranks]:
        if name in names:
            trains(root, mesh, passes, name)


@pytest.mark.parametrize("name", daily(BUILDS, "with_shared"))
def test_balance_by_bias_and_by_loss_equals_one_process(tmp_path, name):
    (many,) = (ranks for ranks, meshes in MESHES.items() for _, _, names in meshes if name in names)
    for ranks in (1, many):
        launch(__name__, "train_all", ranks, (str(tmp_path), ranks, name))
    for mesh, _, names in MESHES[many]:
        if name in names:
            (want, expected), (have, got) = (torch.load(tmp_path / f"{name}-{part}-0.pt") for part in ("", mesh))
            for key, value in want.items():
                torch.testing.assert_close(
                    have[key], value, rtol=0, atol=1e-5 * float(value.abs().max()), msg=f"{name} on {mesh}: {key}"
                )
            assert any(tensor.abs().max() > 0.01 for key, tensor in want.items() if key.endswith("bias")) == (
                "balance_rate" in BUILDS[name][1]
            )
            reported = [key for key in expected[0] if key.startswith(("experts/", "train/", "grad"))]
            assert {"experts/entropy", "experts/dropped", "train/loss"} <= {*reported}
            for one, other in zip(expected, got, strict=True):
                assert {key: other[key] for key in reported} == pytest.approx(
                    {key: one[key] for key in reported}, rel=2e-5
                ), f"{name} on {mesh}"


def test_the_balance_loss_is_switch_s_and_the_bias_deepseek_s():
    """Against transformers' own formula for one layer, and against counts that a hook of the test's takes."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    torch.manual_seed(0)
    seen = []
    with distributed("cpu"):
        par = Plan().apply(qwen(num_hidden_layers=1).train())
        load = ExpertLoad(par, balance_loss=0.25)
        par.module.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        for ids in torch.randint(VOCAB, (2, 3, 7)):  # one loss of two forwards' tokens
            par.module(ids)
        loss = load.loss(42)
        want = (
            load_balancing_loss_func((torch.cat(seen),), 8, 2) / 2
        )  # which is 2, the experts of a token, where all are alike
        torch.testing.assert_close(loss, 0.25 * 42 * want)
        (gate,) = torch.autograd.grad(loss, [par.module.model.layers[0].mlp.gate.weight])
        assert gate.abs().max() > 0
        with pytest.raises(MeshparError, match="got no logits of routers"):
            load.loss(42)

        par = Plan().apply(with_shared().train())
        load, chosen = ExpertLoad(par, balance_rate=0.125), []
        mixture = par.module.layers[1].mlp
        mixture.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
        par.module(torch.randint(VOCAB, (3, 7)))
        load.step()
        counts = torch.cat(chosen).flatten().bincount(minlength=8).float()
        assert len(set(counts.tolist())) > 2
        assert torch.equal(mixture.bias, 0.125 * torch.sign(counts.mean() - counts))
        par.module(torch.randint(VOCAB, (3, 7)))
        before = mixture.bias.clone()
        load.step(moved=False)
        par.module.eval()(torch.randint(VOCAB, (3, 7)))
        reported = load.take()
        assert torch.equal(mixture.bias, before)
        assert reported["experts/dropped"] == 0.0
        assert 0.9 < reported["experts/entropy"] <= 1.0
        # a token chooses an expert once, and the evaluation is not counted
        assert float(reported["experts/most"]) <= 21.0
        ids, weights = torch.zeros(4, 2, dtype=torch.int64), torch.tensor([[1.0, 0.0]]).expand(4, 2)
        mixture.experts(torch.randn(4, 32), ids, weights)
        mixture.experts.train()(torch.randn(4, 32), ids, weights)
        load.step(moved=False)
        assert load.take()["experts/dropped"] == 0.5


def test_an_export_with_shared_experts_is_glm4_moe(tmp_path):
    import transformers

    torch.manual_seed(0)
    model, ids = with_shared(), torch.randint(VOCAB, (2, 9))
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            parameter.add_(0.2 * torch.randn_like(parameter))
    with distributed("cpu"):
        export_module(Plan().apply(model), tmp_path / "hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded).__name__ == "Glm4MoeForCausalLM"
    torch.testing.assert_close(model(ids).logits, loaded(ids).logits, rtol=1e-5, atol=1e-5)
    for layer in model.layers:
        layer.mlp.bias.zero_()
    assert (model(ids).logits - loaded(ids).logits).abs().max() > 0.01


@on_ranks(2)
def test_balance_that_a_model_does_not_have_is_refused():
    def problem(module, **balance):
        with torch.device("meta"):
            par = Plan("dp_shard=2", [FullyShard()]).apply(module())
        with pytest.raises(MeshparError) as caught:
            ExpertLoad(par, **balance)
        return str(caught.value)

    assert "has 0 for 2 layers of experts; use balance_loss, a model with such biases" in problem(
        without_shared, balance_rate=0.1
    )
    assert "names 0 routers for 0 layers" in problem(transformer, balance_loss=0.1)
    message = r"own tokens to its loss \(config.output_router_logits\).*training.balance_loss"
    with pytest.raises(PlanError, match=message):
        Plan("dp_shard=2", [FullyShard()]).apply(qwen(output_router_logits=True))
