"""Rows of `training` about what trains: loops, objectives, adapters, groups of parameters (`tests/remedies/rows.py`)."""

import copy
import gzip
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from meshpar import (
    ActivationCheckpoint,
    ContextParallel,
    FullyShard,
    ModelLayout,
    PipelineParallel,
    Plan,
    TensorParallel,
    distributed,
    token_loss,
)
from meshpar.optim import Muon, SmallAdamW
from meshpar.testing import on_ranks
from meshpar.testing.parity import in_this_process
from meshpar.training import CausalLM, Distillation, ExpertLoad, SequenceClassification, build_adamw, freeze
from meshpar.training.adamw_and_schedules import AdamWSettings, Schedule, check_elementwise, scale_rates
from meshpar.training.elastic import Replicas
from meshpar.training.evaluation import generate
from meshpar.training.lighthouse import Lighthouse
from meshpar.training.lora import LoRA, add_adapters
from meshpar.training.samples import MappedSamples
from meshpar.training.trackers import WandB
from tests.core.test_optimizer_groups import told_rates
from tests.remedies.rows import Loop, Row, TwoRanks, alone, run_together
from tests.remedies.sides import difference
from tests.remedies.test_training import scratch, texts
from tests.support.loop_sides import train
from tests.support.models_for_parity import VOCAB, gpt2, huggingface, transformer
from tests.training.test_documents import Carried, documents
from tests.training.test_documents import packed as packed_documents
from tests.training.test_lora import qwen3, qwen3_moe
from tests.training.test_objectives_parallel import Small
from tests.training.test_training import Kept, Spiked, packed, parallel, resumed, trainer

PROMPTS = [[5, 6, 7], [3]]
BATCH = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "labels": torch.zeros(1, 4, dtype=torch.int64)}
LABELLED = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
PP = "pp=2", [PipelineParallel()]
SHARDED = "dp_shard=2", [FullyShard()]


def steps(par=None, samples=None, *, saved=None, lr=1e-2, warmup=0, **options):
    """Train, and return the number of steps."""
    samples = samples or packed(Path(scratch().name) / "loop")
    make = trainer if saved is None else lambda par, *args, **more: resumed(par, saved, *args, **more)
    run = make(par or parallel(), samples, accumulate=1, **options)
    run.course._schedule = Schedule(name="constant", lr=lr, steps=max(99, warmup), warmup_steps=warmup)
    return run.run().steps


def after_two_steps():
    kept = Kept()
    steps(steps=2, checkpointer=kept, checkpoint_every=2)
    return kept.steps[2]


def on_documents(model, **options):
    samples = packed_documents(Path(scratch().name) / "documents", documents(9, 1, 14, 8), 16, **options)
    return steps(Plan("", []).apply(model), samples, steps=2)


def unlabelled(labels):
    return steps(
        Plan("", []).apply(transformer()), MappedSamples([LABELLED | {"labels": labels}] * 4, "labels"), steps=2
    )


def optimized(*, after):
    """Train with an optimizer that was built after or before the parameters were replaced."""
    module = transformer()
    early = build_adamw(module, AdamWSettings())
    par = Plan("dp_shard=1", [FullyShard()]).apply(module)
    run = trainer(par, MappedSamples([LABELLED] * 4, "labels"), steps=2, accumulate=1)
    again = type(run)(
        par, CausalLM(), run.data, build_adamw(par.module, AdamWSettings()) if after else early, run.course.planned,
        run.settings,
    )  # fmt: skip
    return again.run().steps


def replicas(address):
    """Meet the others of a job of one replica, and return the number of them."""
    par = Plan("", []).apply(parallel().module)
    run = trainer(par, packed(Path(scratch().name) / "loop"))
    with (
        mock.patch.dict(os.environ, {"TORCHFT_LIGHTHOUSE": address}),
        Replicas(par, run.optimizer, run.data, name="0", replicas=1) as members,
    ):
        return len(list(members.begin()))


def with_lighthouse():
    lighthouse = Lighthouse(patience_s=1.0)
    try:
        return replicas(f"http://127.0.0.1:{lighthouse.port}")
    finally:
        lighthouse.close()


def routed(passes=(), *, early=False):
    """The balance loss of a forward, and the same for a loss that comes before the forward."""
    torch.manual_seed(0)
    par = Plan("", list(passes)).apply(transformer(experts=4, expert_hidden=16, qk_norm=True).train())
    load = ExpertLoad(par, balance_loss=0.5)
    if not early:
        par.module(torch.arange(14).view(2, 7))
    return load.loss(14)


def distilled(student, teacher=None, **options):
    """The number of tokens in the loss of a student."""
    torch.manual_seed(0)
    objective = Distillation(teacher=teacher or freeze(huggingface("Qwen3")), **options)
    return int(objective.loss(student, BATCH)[1])


def adapted(settings, make=qwen3_moe):
    """The layers with adapters."""
    with torch.device("meta"):
        model = make()
    add_adapters(model, settings)
    return sum(".lora_A." in name for name, _ in model.named_parameters())


def adapters_under_tp(*targets):
    with torch.device("meta"):
        model = qwen3()
    Plan("tp=2", [TensorParallel()]).check(model, add_adapters(model, LoRA(targets=targets)), 2)


def rates(module=None, *, factors=None, **options):
    module = module or torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scale_rates(optimizer, module, factors, **options)
    return [group["lr"] for group in optimizer.param_groups]


class Described(torch.nn.Sequential):
    def meshpar_layout(self):
        return ModelLayout(blocks=("*",))


def logged(mode):
    """The mode of a run that is logged to W&B, with a stand-in for its client without a key."""
    client = mock.MagicMock()
    client.setup.return_value.settings.mode = "online"
    client.login.return_value = False
    run = SimpleNamespace(folder=Path(scratch().name), id="1", name="run", facts={}, step=0)
    with mock.patch.dict("sys.modules", {"wandb": client}):
        WandB(run, mode=mode)
    return client.init.call_args.kwargs["mode"]


def packed_table(content):
    return texts("table.jsonl.gz", gzip.compress(content.encode()))


def same_rates(mesh, passes, tied):
    """Whether the parameters of a rank have the rates of one process."""
    torch.manual_seed(0)
    whole = gpt2(tied=tied)
    expected = told_rates(whole, build_adamw(whole, AdamWSettings(lr=1e-2)))
    module = Plan(mesh, passes).apply(copy.deepcopy(whole)).module
    found = told_rates(module, build_adamw(module, AdamWSettings(lr=1e-2)))
    return found == {name: expected[name] for name in found}


class Normed(torch.optim.SGD):
    """Divides a gradient by its norm."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()
        super().step(closure)


def shards_differ(*kinds):
    """What differs most between an optimizer's training of shards and that of one process."""

    def loop(side):
        for kind in kinds:
            net = side.apply(side.net())
            optimizer = kind(net if kind.__module__.startswith("meshpar") else net.parameters(), lr=0.1)
            train(side, net, optimizer)

    return difference("FSDP", loop)


def in_one_process(module):
    return in_this_process(module, module.meshpar_layout())


def balanced(mesh, passes, **options):
    """Whether experts are balanced on a mesh as in one process: by the biases of this rank, or by the loss."""
    found = []
    for apply in (in_one_process, Plan(mesh, passes).apply):
        torch.manual_seed(0)
        par = apply(transformer(experts=4, expert_hidden=16, shared_experts=1, qk_norm=True).train())
        load, terms = ExpertLoad(par, **options), [torch.zeros(())]

        def loss(module, ids):
            total = token_loss(module(ids).logits, ids, reduction="sum")
            if "balance_loss" in options:
                terms.append(load.loss(ids.numel()).detach())  # noqa: B023
            return total

        par.backward([torch.arange(14).view(2, 7)], loss)
        load.step()
        biases = {name: value.clone() for name, value in par.module.named_buffers() if name.endswith("bias")}
        found.append((biases, terms[-1]))
    (whole, total), (part, one) = found
    return all(torch.equal(whole[name], value) for name, value in part.items()) and torch.allclose(one, total)


def greedy():
    """Two tokens behind each prompt, by the model alone."""
    torch.manual_seed(0)
    model, answers = transformer().eval(), []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(2):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def generated(mesh, passes, prompts=PROMPTS):
    torch.manual_seed(0)
    return generate(Plan(mesh, passes).apply(transformer()), prompts, tokens=2)


def classified(mesh, passes, objective):
    torch.manual_seed(0)
    par = Plan(mesh, passes).apply(transformer())
    return steps(par, MappedSamples([LABELLED] * 4, "labels"), objective=objective, steps=1, micro=1)


ROWS = [
    Row("write data.documents: joined", result=2)
    .refuses(lambda: on_documents(Carried("recurrent")))
    .helps("write data.documents: joined", lambda: on_documents(Carried("recurrent"), documents="joined"))
    .helps("use a model whose attention follows position_ids", lambda: on_documents(transformer())),
    Row("or set TORCHFT_LIGHTHOUSE=http://HOST:PORT", result=2)
    .refuses(lambda: replicas(""))
    .helps("set TORCHFT_LIGHTHOUSE=http://HOST:PORT", with_lighthouse),
    Row("balance_loss got no logits of routers with a gradient from the forward", result=routed)
    .refuses(lambda: routed(early=True))
    .helps("call loss() after each forward that trains", lambda: routed([ActivationCheckpoint()])),
    Row("prompt {} has no token; give it at least one", result=greedy)
    .refuses(lambda: generated("", [], [PROMPTS[0], []]))
    .helps("give it at least one", lambda: generated("", [], [PROMPTS[0], [3]])),
    Row("the optimizer holds parameters that the module no longer has", result=2)
    .refuses(lambda: optimized(after=False))
    .helps("build it after plan.apply and materialize", lambda: optimized(after=True)),
    Row("lower the learning rate, or raise training.skip_spikes", result=60)
    .refuses(lambda: str(steps(steps=60, lr=1e38, nonfinite="skip")))
    .helps("lower the learning rate", lambda: steps(steps=60, lr=1e-2, nonfinite="skip")),
    Row("{} steps in a row, up to step {}, had a gradient that is not finite, or a spike", result=80)
    .refuses(lambda: str(steps(steps=80, objective=Spiked(*range(22, 81)), skip_spikes=10.0)))
    .helps("raise training.skip_spikes", lambda: steps(steps=80, objective=Spiked(*range(22, 81)), skip_spikes=1e5)),
    Row("the gradient norm of step {} is not finite, and the weights after it are worthless", result=6)
    .refuses(lambda: steps(saved=after_two_steps(), lr=1e38))
    .helps(
        "resume from the last checkpoint with a lower learning rate or a longer warm-up",
        lambda: steps(saved=after_two_steps(), lr=1e-2) and steps(saved=after_two_steps(), lr=1e38, warmup=10**40),
    )
    .helps("set training.nonfinite=skip to skip such steps", lambda: steps(saved=after_two_steps(), nonfinite="skip")),
    Row("no label of the first {} steps counted (all are -100), so nothing was learned", result=2)
    .refuses(lambda: unlabelled(torch.full((8,), -100)))
    .helps("give data whose labels count", lambda: unlabelled(torch.arange(8))),
    Row("lora.targets {} reach {}, expected linear layers", result=4)
    .refuses(lambda: adapted(LoRA(targets=("q_proj", "gate_proj", "up_proj"))))
    .helps(
        "give lora.targets a list of names without it, and name packed weights in lora.parameters",
        lambda: adapted(LoRA(targets=("q_proj",), parameters=("experts.gate_up_proj",))),
    ),
    Row("adapters on {}, whose style is {}, cannot be split; leave it out of lora.targets", result=None)
    .refuses(lambda: adapters_under_tp("q_proj", "lm_head"))
    .helps("leave it out of lora.targets", lambda: adapters_under_tp("q_proj")),
    Row("the teacher is not frozen: {}; call freeze(teacher) before plan.apply", result=4)
    .refuses(lambda: distilled(huggingface("Qwen3"), huggingface("Qwen3")))
    .helps(
        "call freeze(teacher) before plan.apply",
        lambda: distilled(huggingface("Qwen3"), Plan("", []).apply(freeze(huggingface("Qwen3"))).module),
    ),
    Row("the teacher's logits have shape {} and the student's {}; use one vocabulary", result=4)
    .refuses(lambda: distilled(Small()))
    .helps("use one vocabulary", lambda: distilled(Small(VOCAB))),
    Row("hidden_weight requires a model that returns hidden_states; {} does not", result=4)
    .refuses(lambda: distilled(Small(VOCAB), hidden_weight=1.0))
    .helps("set hidden_weight to 0", lambda: distilled(Small(VOCAB), hidden_weight=0.0)),
    Row("hidden states of student and teacher have shapes {}, at {} tokens", result=4)
    .refuses(lambda: distilled(huggingface("Qwen3", hidden_size=16), hidden_weight=1.0))
    .helps("set it to 0", lambda: distilled(huggingface("Qwen3", hidden_size=16), hidden_weight=0.0)),
    Row("layer_decay: the model's layout names no blocks", result=[0.25, 0.5])
    .refuses(lambda: rates(layer_decay=0.5))
    .helps(
        "give ModelLayout(blocks=...)",
        lambda: rates(Described(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), layer_decay=0.5),
    )
    .helps("use rates", lambda: rates(factors={"first": 0.25, "second": 0.5})),
    Row("it is a JSON array: write one object a line", result=["a"])
    .refuses(lambda: packed_table('[{"text": "a"}]'))
    .helps("write one object a line", lambda: packed_table('{"text": "a"}\n')),
    Row("W&B has no API key; run `wandb login`", result="offline")
    .refuses(lambda: logged(None))
    .helps("set mode: offline", lambda: logged("offline")),
    # What ranks meet together
    Loop("the step of {} on a whole tensor differs from its step on two parts of the tensor")
    .refuses(lambda: check_elementwise(lambda module: Normed(module.parameters(), lr=0.1)))
    .helps(
        "use a rule for each element alone, torch.optim.Adafactor",
        lambda: shards_differ(torch.optim.SGD, torch.optim.Adafactor),
    )
    .helps("meshpar.optim (class: muon, small_adamw)", lambda: shards_differ(Muon, SmallAdamW)),
    Row("generating and scoring need whole sequences and every layer on a rank", result=greedy, ranks=2)
    .refuses(lambda: generated("dp_shard=1,cp=2", [ContextParallel(), FullyShard()]))
    .helps("evaluate on a mesh without it", lambda: generated(*SHARDED)),
    Row("{} trains on {}, and its loss is not a sum over positions, but the plan splits positions", result=1, ranks=2)
    .refuses(lambda: classified("dp_shard=1,cp=2", [ContextParallel(), FullyShard()], SequenceClassification()))
    .helps("use CausalLM()", lambda: classified("dp_shard=1,cp=2", [ContextParallel(), FullyShard()], CausalLM()))
    .helps("a mesh without that axis", lambda: classified(*SHARDED, FirstLogits())),
    TwoRanks("balance_loss={} needs the logits of all routers on the rank of the loss, and the plan divides layers")
    .refuses(lambda: balanced(*PP, balance_loss=0.5))
    .helps("use balance_rate", lambda: balanced(*PP, balance_rate=0.5))
    .helps("a mesh without that axis", lambda: balanced("tp=2", [TensorParallel()], balance_loss=0.5)),
    TwoRanks("scale_rates: embedding and head are tied over stages of pp")
    .refuses(lambda: same_rates(*PP, True))
    .helps("use a mesh without pp", lambda: same_rates(*SHARDED, True))
    .helps("a model whose weights are not tied", lambda: same_rates(*PP, False)),
]


class FirstLogits:
    """Classify by the logits of a text's first position."""

    examples, unit = "labels", "examples"

    def tokens(self, batch):
        return len(batch["labels"])

    def loss(self, model, batch):
        logits = model(batch["input_ids"]).logits[:, 0]
        return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 0], reduction="sum"), len(logits), {}


@pytest.mark.parametrize("row", alone(ROWS))
def test_the_printed_remedy_helps(row):
    with distributed("cpu"):
        row.run()


@on_ranks(2)
def test_the_printed_remedies_help_on_two_ranks():
    run_together(ROWS, 2)
