"""Scripts on accelerate's Accelerator: the same script on a mesh equals one process of plain accelerate."""

import itertools
import os
import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from meshpar import FullyShard, HybridShard, MeshparError, ModelLayout, Plan, Replicate, TensorParallel
from meshpar.integrations.accelerate import Accelerator
from meshpar.testing import on_ranks, whole
from tests.support.models_for_parity import VOCAB, huggingface
from tests.support.tiers import daily

MESHES = {
    "dp_shard=2": [FullyShard()],
    "dp_replicate=2": [Replicate()],
    "dp_replicate=2,dp_shard=2": [HybridShard()],
    "tp=2": [TensorParallel()],
    "dp_shard=2,tp=2": [TensorParallel(), FullyShard()],
}
SAMPLES = 8
"""In a batch of all ranks."""


class Rows(Dataset):
    def __init__(self, count=80, length=12):
        draw = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCAB, (count, length), generator=draw)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def model():
    torch.manual_seed(0)
    return huggingface("Llama")


def start(launched):
    """Forget accelerate's state of this process, and say in the environment what a launcher says."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = (dist.get_rank(), dist.get_rank(), dist.get_world_size(), dist.get_world_size()) if launched else ()
    for name in names:
        os.environ.pop(name, None)
    os.environ |= dict(zip(names, map(str, values)), OMP_NUM_THREADS="1")


def plain(**options):
    start(launched=False)
    return accelerate.Accelerator(cpu=True, **options)


def on_mesh(mesh, **options):
    start(launched=True)
    return Accelerator(plan=Plan(mesh, MESHES[mesh]), **options)


def train(accelerator, *, steps=10, accumulate=1, clip=0.5):
    """A script for accelerate, as it stands in its guide; the losses, norms and weights."""
    net = model()
    groups = [
        {"params": [p for n, p in net.named_parameters() if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in net.named_parameters() if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / accelerator.num_processes))
    loader = DataLoader(Rows(), batch_size=SAMPLES // accelerator.num_processes // accumulate, shuffle=False)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    losses, norms, total = [], [], 0.0
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            total += accelerator.gather(loss.detach()).mean().item() / accumulate
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(net.parameters(), clip).item())
                losses.append(total)
                total = 0.0
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if len(losses) == steps:
            break
    weights = {name: whole(tensor) for name, tensor in net.named_parameters()}
    return SimpleNamespace(losses=losses, norms=norms, weights=weights, lr=scheduler.get_last_lr())


def assert_equal(found, expected):
    assert found.lr == pytest.approx(expected.lr)
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)
    assert found.weights.keys() == expected.weights.keys()
    assert_same_weights(found.weights, expected.weights)


def assert_same_weights(found, expected):
    apart = {name: float((found[name] - tensor).abs().max()) for name, tensor in expected.items()}
    assert max(apart.values()) <= 1e-4, apart


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2,tp=2"))
@on_ranks("mesh")
def test_ten_steps_equal_one_process_of_plain_accelerate(mesh):
    expected = train(plain())
    assert len(expected.losses) == 10
    assert_equal(train(on_mesh(mesh)), expected)


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2"))
@on_ranks("mesh")
def test_accumulation_over_an_uneven_end_equals_one_process(mesh):
    """The last batch of the loader ends a step early, and `even_batches` fills it up on every side alike."""
    options = {"gradient_accumulation_steps": 2}
    expected = train(plain(**options), steps=10, accumulate=2)
    assert_equal(train(on_mesh(mesh, **options), steps=10, accumulate=2), expected)


def evaluate(accelerator, count):
    loader = accelerator.prepare(DataLoader(Rows(count), batch_size=SAMPLES // accelerator.num_processes))
    tensors = [accelerator.gather_for_metrics(batch["input_ids"]) for batch in loader]
    objects = [accelerator.gather_for_metrics([str(row.sum()) for row in batch["input_ids"]]) for batch in loader]
    # as programs do whose loss is that of a batch, and TRL's number of a batch
    repeated = [accelerator.gather_for_metrics(batch["input_ids"][0, 0].repeat(SAMPLES)).tolist() for batch in loader]
    number = [accelerator.gather_for_metrics(batch["input_ids"].float().mean()).mean().item() for batch in loader]
    return torch.cat(tensors), list(itertools.chain(*objects)), repeated, number


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2", "dp_shard=2,tp=2"))
@on_ranks("mesh")
def test_what_is_gathered_counts_each_sample_once_and_in_order(mesh):
    expected = evaluate(plain(), 21)
    accelerator = on_mesh(mesh)
    tensors, objects, repeated, number = evaluate(accelerator, 21)
    assert torch.equal(tensors, expected[0]) and torch.equal(tensors, Rows(21).ids) and objects == expected[1]
    if accelerator.num_processes == 1:
        assert (repeated, number) == expected[2:]
    index, size = accelerator.process_index, accelerator.num_processes
    here = torch.tensor([1.0 + index])
    assert accelerator.gather({"a": (here,)})["a"][0].tolist() == (
        [1.0, 2.0] if size == 2 else [1.0, 2.0, 3.0, 4.0][:size]
    )
    assert accelerator.reduce(here).item() == size * (size + 1) / 2
    assert accelerator.reduce(here, "mean").item() == (size + 1) / 2 and accelerator.reduce(here, "max").item() == size
    assert accelerator.pad_across_processes(torch.ones(1 + index)).shape == (size,)
    with accelerator.split_between_processes(list(range(size))) as part:
        assert part == [index]
    mains: list = [None] * dist.get_world_size()
    dist.all_gather_object(mains, accelerator.is_main_process)
    assert mains == [True] + [False] * (len(mains) - 1)
    assert not accelerator.check_trigger()
    if dist.get_rank() == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(Rows(20).ids)


@on_ranks(2)
def test_a_stream_is_read_by_data_rank():
    for mesh in ("dp_shard=2", "tp=2"):
        accelerator = on_mesh(mesh)
        batches = list(accelerator.prepare(DataLoader(Streamed(), batch_size=10 // accelerator.num_processes)))
        assert torch.equal(torch.cat([accelerator.gather(batch) for batch in batches]), Rows(20).ids)


class Counter:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def resume(accelerator, folder, first, last, *, load, save):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, accelerator.num_processes, gamma=0.7)
    loader = DataLoader(Rows(), batch_size=SAMPLES // accelerator.num_processes)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if load:
        accelerator.load_state(str(folder))
    assert counter.value == first
    losses = []
    for batch in accelerator.skip_first_batches(loader, first):
        if counter.value == last:
            break
        loss = net(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        counter.value += 1
    if save:
        accelerator.save_state(str(folder))
    return net, losses


@on_ranks(2)
def test_a_state_resumes_on_another_mesh(tmp_path):
    plain_net, expected = resume(plain(), tmp_path, 0, 6, load=False, save=False)
    _, first = resume(on_mesh("dp_shard=2"), tmp_path, 0, 3, load=False, save=True)
    net, rest = resume(on_mesh("tp=2"), tmp_path, 3, 6, load=True, save=False)
    assert first + rest == pytest.approx(expected, abs=1e-5)
    assert_same_weights(
        {name: whole(tensor) for name, tensor in net.named_parameters()}, dict(plain_net.named_parameters())
    )


@on_ranks(2)
def test_weights_come_out_whole(tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    for mesh in ("dp_shard=2", "tp=2"):
        accelerator, expected = on_mesh(mesh), model().state_dict()
        net = accelerator.prepare(model())
        state = accelerator.get_state_dict(net)
        assert state.keys() == (expected.keys() if accelerator.is_main_process else set())
        assert all(torch.equal(state[name], expected[name]) for name in state)
        folder = tmp_path / mesh
        if accelerator.is_main_process:
            folder.mkdir()
            (folder / "tokenizer.json").write_text("{}")
        accelerator.wait_for_everyone()
        accelerator.save_model(net, folder)
        accelerator.unwrap_model(net).save_pretrained(
            tmp_path / f"{mesh} pretrained", is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )
        accelerator.wait_for_everyone()
        exported = load_file(folder / "model.safetensors")
        assert all(torch.equal(exported[name], expected[name]) for name in exported)
        assert (folder / "tokenizer.json").exists()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"{mesh} pretrained").state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)

    def meshpar_layout(self):
        return ModelLayout(blocks=("blocks.*",), tensor={"blocks.*": "colwise_gather"})


def train_two(accelerator, *, joint):
    torch.manual_seed(0)
    nets = [Net(4), Net(6)]
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(24, 10, generator=draw)
    if joint:
        optimizers = [torch.optim.SGD(itertools.chain(*(net.parameters() for net in nets)), lr=0.1, momentum=0.9)]
    else:
        optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3) for net in nets]
    *nets, loader = accelerator.prepare(*nets, DataLoader(rows, batch_size=SAMPLES // accelerator.num_processes))
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    norms = []
    for batch in loader:
        with accelerator.accumulate(*nets):
            loss = (nets[0](batch[:, :4]) * nets[1](batch[:, 4:])).square().mean() * 10
            accelerator.backward(loss)
            norms.append(accelerator.clip_grad_norm_(itertools.chain(*(net.parameters() for net in nets)), 0.1).item())
            norms.append(accelerator.clip_grad_norm_(nets[0].head.parameters(), 0.05).item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return norms, {f"{i}.{n}": whole(p) for i, net in enumerate(nets) for n, p in net.named_parameters()}


@pytest.mark.parametrize("joint", [False, True], ids=["an optimizer each", "one optimizer"])
@on_ranks(2)
def test_two_models_with_plans_of_their_own_equal_one_process(joint):
    norms, weights = train_two(plain(), joint=joint)
    start(launched=True)
    plans = {"first": Plan("dp_shard=2", [FullyShard()]), "second": "dp_replicate=2"}
    found, tensors = train_two(Accelerator(plan=plans), joint=joint)
    assert found == pytest.approx(norms, rel=1e-4)
    assert_same_weights(tensors, weights)


@pytest.mark.parametrize("precision", daily(["bf16", "compiled"], "bf16"))
@on_ranks(2)
def test_options_of_accelerate_equal_one_process_with_them(precision):
    options = {"mixed_precision": "bf16"} if precision == "bf16" else {"dynamo_backend": "eager"}
    expected = train(plain(**options), steps=4)
    found = train(on_mesh("dp_shard=2", **options), steps=4)
    tolerance = 0.02 if precision == "bf16" else 1e-5
    assert found.losses == pytest.approx(expected.losses, abs=tolerance)
    assert train(on_mesh("tp=2", **options), steps=4).losses == pytest.approx(expected.losses, abs=tolerance)


class Noted(GeneralTracker):
    name, requires_logging_directory = "noted", False

    def __init__(self):
        super().__init__()
        self.values = []

    @property
    def tracker(self):
        return self.values

    def store_init_configuration(self, values):
        self.values.append(values)

    def log(self, values, step=None, **options):
        self.values.append((step, values))


@on_ranks(2)
def test_trackers_log_on_one_rank_and_memory_is_freed():
    tracker = Noted()
    accelerator = on_mesh("tp=2", log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 1})
    accelerator.log({"loss": 2}, step=1)
    expected = [{"lr": 1}, (1, {"loss": 2})] if accelerator.is_main_process else []
    assert tracker.values == expected
    accelerator.get_tracker("noted").log({"loss": 3}, step=2)
    assert len(tracker.values) == len(expected) + accelerator.is_main_process
    net = accelerator.prepare(model())
    (net,) = accelerator.free_memory(net)
    assert net is None and accelerator.prepare(model()) is not None


def changed():
    net = on_mesh("dp_shard=2").prepare(Net(4))
    net.head = nn.Linear(4, 2)
    net(torch.ones(2, 4))


def written():
    for parameter in on_mesh("dp_shard=2").prepare(Net(4)).parameters():
        parameter.data.mul_(torch.full(parameter.shape, 0.5))


def factored():
    net = Net(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.head.weight]["row"] = torch.ones(3)
    on_mesh("dp_shard=2").prepare(net, optimizer)


REFUSED = {
    "a model that changes": (changed, "after plan.apply: no pass places it"),
    "a write into .data": (written, "got mixed torch.Tensor and DTensor"),
    "a state of another shape": (factored, "SGD's 'row' of head.weight has shape (3,) and the parameter (1, 4)"),
    "an unknown argument": (
        lambda: on_mesh("tp=2", mixed_precison="bf16"),
        "Accelerator has no argument 'mixed_precison'; expected one such as mixed_precision",
    ),
    "weights that are pickled": (
        lambda: on_mesh("tp=2").save_model(Net(4), "weights", safe_serialization=False),
        "save_model got safe_serialization=False; expected True",
    ),
    "an unknown reduction": (
        lambda: on_mesh("tp=2").reduce(torch.ones(1), "product"),
        "reduction is 'product'; expected 'sum', 'mean', 'max' or 'none'",
    ),
}


@on_ranks(2)
def test_bad_input_is_refused_on_all_ranks():
    """What has a remedy to print is in tests/remedies/test_integrations_accelerate.py."""
    missed = {}
    for name, (meet, words) in REFUSED.items():
        try:
            meet()
            missed[name] = "accepted"
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if words not in text:
                missed[name] = f"{type(error).__name__}: {text}"
        dist.barrier()
    assert not missed, "\n".join(f"{name}: {text}" for name, text in missed.items())


@on_ranks(2)
def test_an_optimizer_with_state_moves_and_one_made_after_prepare_trains():
    def run(accelerator, make, *, after=False):
        torch.manual_seed(0)
        net = Net(4)
        optimizer = None if after else make(net.parameters())
        net = accelerator.prepare(net) if after else net
        optimizer = optimizer or make(net.parameters())
        net, optimizer = accelerator.prepare(net, optimizer)
        for step in range(3):
            x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step))
            accelerator.backward(net(x[accelerator.process_index :: accelerator.num_processes]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return {name: whole(tensor) for name, tensor in net.named_parameters()}

    def adagrad(parameters):
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.3)

    assert_same_weights(run(on_mesh("dp_shard=2"), adagrad), run(plain(), adagrad))
    assert_same_weights(run(on_mesh("dp_shard=2"), adagrad, after=True), run(plain(), adagrad))


@on_ranks(2)
def test_a_seed_of_accelerates_agrees_where_ranks_compute_one_sample():
    accelerator = on_mesh("tp=2")
    set_seed(3)
    net = accelerator.prepare(huggingface("Llama", attention_dropout=0.1).train())
    for batch in accelerator.prepare(DataLoader(Rows(16), batch_size=8, shuffle=True)):
        accelerator.backward(net(**batch).loss)


EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_on_mesh.py"


def shown(command):
    """The losses that the page shows under a command."""
    page = (EXAMPLE.parents[1] / "docs" / "integrations" / "accelerate.md").read_text(encoding="utf-8")
    text = page[page.index(f"$ {command}\n") :].partition("\n$ ")[0].partition("```")[0]
    return [float(number) for number in re.findall(r"loss ([\d.]+)", text)]


@on_ranks(2)
def test_the_example_prints_what_its_page_shows(tmp_path):
    main = runpy.run_path(str(EXAMPLE))["main"]
    torchrun = "torchrun --nproc-per-node 2 examples/accelerate_on_mesh.py"
    for mesh, *options in (["tp=2"], ["dp_shard=2", "resume"]):
        start(launched=True)
        losses = main(mesh, tmp_path, resume=bool(options))
        expected = shown(" ".join([torchrun, mesh, *options]))
        assert losses[9::10] == pytest.approx(expected, abs=2e-5)
    assert shown(f"{torchrun} tp=2") == shown("python examples/accelerate_on_mesh.py")


class Average:
    """An average that keeps whole tensors, as diffusers' EMAModel does."""

    def __init__(self, parameters):
        self.shadow_params = [parameter.clone().detach() for parameter in parameters]

    def step(self, parameters):
        for shadow, parameter in zip(self.shadow_params, parameters, strict=True):
            shadow.lerp_(parameter.detach(), 0.5)


def hooked(accelerator, folder, steps, *, load=False):
    """A script whose hooks save and load the model and an average that was made before prepare."""
    torch.manual_seed(0)
    net = Net(4)
    average = Average(net.parameters())
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3))
    average = accelerator.prepare(average)

    def save(models, weights, output):
        if accelerator.is_main_process:
            assert all(torch.equal(tensor, weights[0][name]) for name, tensor in models[0].state_dict().items())
            torch.save({"net": models[0].state_dict(), "average": average.shadow_params}, Path(output, "own.pt"))
            weights.pop()

    def restore(models, source):
        state = torch.load(Path(source, "own.pt"))
        models.pop().load_state_dict(state["net"])
        average.shadow_params = state["average"]

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(restore)
    if load:
        accelerator.load_state(str(folder))
    for step in steps:
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step))
        accelerator.backward(net(x[accelerator.process_index :: accelerator.num_processes]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        average.step(net.parameters())
    accelerator.save_state(str(folder))
    shadows = {str(number): whole(tensor) for number, tensor in enumerate(average.shadow_params)}
    return shadows | {name: whole(tensor) for name, tensor in net.named_parameters()}, type(net).__name__


@on_ranks(2)
def test_hooks_and_an_average_of_a_script_resume_on_another_mesh(tmp_path):
    expected, name = hooked(plain(), tmp_path / str(dist.get_rank()), range(4))
    hooked(on_mesh("dp_shard=2"), tmp_path / "mesh", range(2))
    found, name_there = hooked(on_mesh("tp=2"), tmp_path / "mesh", range(2, 4), load=True)
    assert_same_weights(found, expected)
    found, name_there = hooked(on_mesh("dp_shard=2"), tmp_path / "other", range(4))
    assert_same_weights(found, expected)
    assert name_there == name
    with pytest.raises(MeshparError, match="Average averages 1 tensors, and no model on the mesh has parameters"):
        on_mesh("dp_shard=2").prepare(Net(4), Average([torch.ones(3)]))


def test_one_import_has_the_names_of_accelerates():
    from meshpar.integrations import accelerate as on_a_mesh

    assert on_a_mesh.DistributedType is accelerate.DistributedType
    with pytest.raises(ImportError, match="no_such_name"):
        from meshpar.integrations.accelerate import no_such_name  # noqa: F401


def averaged(accelerator):
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    net = Net(4)
    ema = EMAModel(net.parameters(), decay=0.9)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3))
    ema = accelerator.prepare(ema)
    for step in range(4):
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step))
        accelerator.backward(net(x[accelerator.process_index :: accelerator.num_processes]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ema.step(net.parameters())
    ema.store(net.parameters())
    ema.copy_to(net.parameters())
    averages = {name: whole(tensor).clone() for name, tensor in net.named_parameters()}
    ema.restore(net.parameters())
    weights = {name: whole(tensor) for name, tensor in net.named_parameters()}
    return averages, weights


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers")
@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
@on_ranks("mesh")
def test_an_average_of_diffusers_that_is_made_after_prepare_equals_one_process(mesh):
    expected, found = averaged(plain()), averaged(on_mesh(mesh))
    for one, other in zip(found, expected, strict=True):
        assert_same_weights(one, other)
