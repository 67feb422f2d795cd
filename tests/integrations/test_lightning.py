"""Lightning's Trainer and Fabric on a mesh equal themselves in one process."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning import Callback, Fabric, LightningModule, Trainer
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import SumMetric

from meshpar import FullyShard, MeshparError, ModelLayout, PipelineParallel, Plan, passes_for
from meshpar.integrations.lightning import AveragedWeights, MeshparFabricStrategy, MeshparStrategy
from meshpar.testing import on_ranks
from tests.support.models_for_parity import VOCAB, transformer
from tests.support.tiers import daily

# Lightning's imports wrap it; ranks run other tests, too
torch.compile = getattr(torch.compile, "__wrapped__", torch.compile)

MESHES = ["dp_shard=2", "tp=2", "dp_replicate=2,dp_shard=2"]
BATCH, STEPS = 8, 10
QUIET = dict(
    accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=True,
)  # fmt: skip


class Ranks(ClusterEnvironment):
    """The ranks of a test, which have met already."""

    creates_processes_externally = True
    main_address, main_port = "", 0

    def detect():
        return False

    def world_size(self):
        return dist.get_world_size()

    def global_rank(self):
        return dist.get_rank()

    local_rank = global_rank

    def node_rank(self):
        return 0

    def set_world_size(self, size):
        pass

    set_global_rank = set_world_size


class Language(LightningModule):
    """A language model of the usual form."""

    def __init__(self, on_meta=False):
        super().__init__()
        torch.manual_seed(0)
        self.on_meta, self.seen = on_meta, SumMetric()
        if not on_meta:
            self.model = transformer()

    def configure_model(self):
        if self.on_meta and not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = transformer()

    def forward(self, tokens):
        return self.model(tokens, labels=tokens).loss

    def training_step(self, batch, number):
        loss = self(batch[0])
        self.log("loss", loss, sync_dist=True)
        self.seen(float(len(batch[0])))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", self(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Whole(LightningModule):
    """Layers of its own, which the steps use one by one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 6)

    def training_step(self, batch, number):
        features = self.down(self.up(batch[0]).relu())
        joined = self.all_gather(features, sync_grads=True)
        joined = joined.flatten(0, 1) if joined.ndim == 3 else joined
        return {"loss": cross_entropy(joined @ joined.T, torch.arange(len(joined)))}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Gan(LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, number):
        noise, real = batch
        of_generator, of_critic = self.optimizers()
        ones = torch.ones(len(noise), 1)
        self.toggle_optimizer(of_generator)
        loss = binary_cross_entropy_with_logits(self.critic(self.generator(noise)), ones)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_critic)
        judged = self.critic(real), self.critic(self.generator(noise).detach())
        losses = [binary_cross_entropy_with_logits(score, target) for score, target in zip(judged, (ones, 0 * ones))]
        self.manual_backward(sum(losses))
        self.clip_gradients(of_critic, gradient_clip_val=0.5)
        of_critic.step()
        of_critic.zero_grad()
        self.untoggle_optimizer(of_critic)
        return loss

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.critic)]


class Losses(Callback):
    """The mean loss of each batch over all samples."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        loss = outputs["loss"].detach().clone() if isinstance(outputs, dict) else outputs.detach().clone()
        self.values.append(float(trainer.strategy.reduce(loss)))


def tokens(count=BATCH * STEPS * 2):
    return TensorDataset(torch.randint(VOCAB, (count, 16), generator=torch.Generator().manual_seed(1)))


def pairs(count=BATCH * STEPS):
    drawn = torch.randn(count, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(drawn[:, :4], drawn[:, 4:])


def strategy_of(mesh, layout=None, names=(), **options):
    plan = Plan(mesh, passes_for(mesh))
    return MeshparStrategy(dict.fromkeys(names, plan) if names else plan, layout, **options)


def fit(
    module, data, mesh="", layout=None, names=(), callbacks=(), ckpt_path=None, strategy=None, validation=None, **how
):
    """Train, on a mesh or in one process; return the losses, the trainer and the whole weights."""
    size = 1
    if mesh:
        strategy = strategy or strategy_of(mesh, layout, names)
        how = dict(strategy=strategy, devices=dist.get_world_size(), plugins=[Ranks()]) | how
        size = Plan(mesh, passes_for(mesh)).resolve(dist.get_world_size())
        size = size.axes.get("dp_shard", 1) * size.axes.get("dp_replicate", 1)
    else:
        how |= dict(devices=1)
    losses = Losses()
    trainer = Trainer(**QUIET | dict(max_epochs=1, enable_checkpointing=False) | how, callbacks=[losses, *callbacks])
    # on several ranks Lightning shuffles what is trained
    sampler = None if mesh else DistributedSampler(data, 1, 0)
    loaders = [DataLoader(data, BATCH // size, sampler=sampler)]
    if validation is not None:
        loaders.append(DataLoader(validation, BATCH // size))
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    state = module.state_dict()
    if mesh:
        par = next(iter(strategy.parallelized.values()))
        state = {name: par.whole(value.detach()) for name, value in state.items()}
    return losses.values, trainer, {name: value.clone() for name, value in state.items()}


def assert_same(found, expected, tolerance=1e-4):
    assert found[0] == pytest.approx(expected[0], abs=1e-5), (found[0], expected[0])
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2"))
@on_ranks("mesh")
def test_training_equals_one_process(mesh):
    """Accumulation, clipping, a schedule, metrics over all samples, validation."""
    how = dict(accumulate_grad_batches=2, gradient_clip_val=0.5, validation=tokens(16))
    expected, found = (fit(Language(), tokens(), **how, mesh=name) for name in ("", mesh))
    assert len(expected[0]) == 2 * STEPS
    assert_same(found, expected)
    metrics = [
        {name: float(value) for name, value in trainer.callback_metrics.items()} for _, trainer, _ in (expected, found)
    ]
    for name in ("loss", "val_loss"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], abs=1e-5), (name, metrics)
    assert metrics[1]["seen"] == len(tokens())


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@on_ranks(2)
def test_precisions_equal_one_process(precision):
    how = dict(precision=precision, max_steps=4, accumulate_grad_batches=2)
    expected, found = (fit(Language(), tokens(), **how, mesh=mesh) for mesh in ("", "dp_shard=2"))
    assert found[0] == pytest.approx(expected[0], abs=1e-5 if precision == "64-true" else 2e-2)


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2"))
@on_ranks("mesh")
def test_steps_of_the_module_itself_gather_with_gradients(mesh):
    layout = ModelLayout(blocks=("up", "down"), tensor={"up": "colwise", "down": "rowwise"})
    expected, found = (fit(Whole(), pairs(), name, layout) for name in ("", mesh))
    assert_same(found, expected)


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2"))
@on_ranks("mesh")
def test_a_gan_with_two_optimizers_equals_one_process(mesh):
    layout = ModelLayout(blocks=("0", "2"), tensor={"0": "colwise", "2": "rowwise"})
    layouts = {"generator": layout, "critic": layout}
    expected, found = (fit(Gan(), pairs(), name, layouts, names=layouts) for name in ("", mesh))
    assert_same(found, expected)


@pytest.mark.parametrize("whole", [False, True])
@on_ranks(2)
def test_a_run_resumes_on_another_mesh(whole, tmp_path):
    """From a folder of shards, or a file as of one process, with the average of the weights."""
    data, how = tokens(4 * BATCH), dict(max_epochs=2)
    expected = fit(Language(), data, callbacks=[EMAWeightAveraging(decay=0.5)], **how)
    keeping = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    first, second = (strategy_of(mesh, save_distributed_checkpoint=not whole) for mesh in ("dp_shard=2", "tp=2"))
    fit(
        Language(),
        data,
        "dp_shard=2",
        strategy=first,
        callbacks=[AveragedWeights(0.5), keeping],
        enable_checkpointing=True,
    )
    path = tmp_path / "epoch=0.ckpt"
    assert path.is_file() == whole
    found = fit(Language(), data, "tp=2", strategy=second, callbacks=[AveragedWeights(0.5)], ckpt_path=path, **how)
    assert_same(found, (expected[0][4:], None, expected[2]))
    if whole:  # Lightning alone reads the file
        fit(Language(), data, ckpt_path=path, **how)


@on_ranks(2)
def test_an_average_is_validated_and_ends_training():
    callback, reference = AveragedWeights(0.9), EMAWeightAveraging(decay=0.9)
    expected = fit(Language(), tokens(), callbacks=[reference], validation=tokens(16))
    found = fit(Language(), tokens(), "dp_shard=2", callbacks=[callback], validation=tokens(16))
    assert_same(found, expected)
    assert float(found[1].callback_metrics["val_loss"]) == pytest.approx(
        float(expected[1].callback_metrics["val_loss"]), abs=1e-5
    )


@on_ranks(2)
def test_a_model_on_the_meta_device_is_drawn_by_the_seed_and_tested_after_training():
    drawn = [fit(Language(on_meta=True), tokens(), mesh, max_steps=2) for mesh in ("dp_shard=2", "tp=2")]
    assert drawn[0][0] == pytest.approx(drawn[1][0], abs=1e-5)
    module = Language()
    _, trainer, _ = fit(module, tokens(), "dp_shard=2", max_steps=2)
    assert trainer.validate(module, DataLoader(tokens(16), 4), verbose=False)[0]["val_loss"] > 0


@on_ranks(2)
def test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works():
    both = ["generator", "critic"]
    refused_by = {
        "no plan averages the gradients of critic.0.weight; name its module in plan=, too": dict(names=["generator"]),
        "manual optimization steps inside of training_step, which is a call": dict(names=[""]),
        "plan= names 'actor', which the LightningModule has not; name one of its modules": dict(names=[*both, "actor"]),
        "batch norms see the whole batch on every mesh; drop sync_batchnorm=True": dict(
            names=both, sync_batchnorm=True
        ),
        "precision is '16-mixed'; expected one of 32-true": dict(
            names=both, plugins=[Ranks(), MixedPrecision("16-mixed", "cpu")]
        ),
        "copies the module, which a mesh does not allow; use AveragedWeights": dict(
            names=both, callbacks=[EMAWeightAveraging()]
        ),
    }
    for message, how in refused_by.items():
        with pytest.raises(MeshparError) as refused:
            fit(Gan(), pairs(), "dp_shard=2", **how)
        assert message in str(refused.value)
    fit(Gan(), pairs(), "dp_shard=2", names=both, callbacks=[AveragedWeights()], sync_batchnorm=False, max_steps=2)
    with pytest.raises(MeshparError, match=r"replaced, as torch\.compile does; pass it as it is"):
        fit(torch.compile(Language()), tokens(), "dp_shard=2")
    with pytest.raises(
        MeshparError, match="the plan divides layers over pp, and Lightning's steps call the whole module"
    ):
        MeshparStrategy(Plan("pp=2", [PipelineParallel()]))
    another_axis = MeshparStrategy(Plan("dp_shard=2", [FullyShard()]))
    with pytest.raises(MeshparError, match="plan is 2; expected a Plan or the text of a mesh"):
        MeshparStrategy(2)
    assert MeshparStrategy("dp_shard=2").distributed_sampler_kwargs["num_replicas"] == 2
    _, trainer, _ = fit(Language(), tokens(), "dp_shard=2", strategy=another_axis, max_steps=1)
    with pytest.raises(
        MeshparError, match="a folder of shards takes no storage_options; drop them from save_checkpoint"
    ):
        trainer.save_checkpoint("state.ckpt", storage_options={})
    with pytest.raises(MeshparError, match="reduce_op is 'product'; expected 'mean', 'sum', 'max' or 'min'"):
        another_axis.reduce(torch.ones(()), reduce_op="product")
    rank = torch.tensor(float(dist.get_rank()))
    assert [float(another_axis.reduce(rank.clone(), reduce_op=name)) for name in ("mean", "sum", "max", "min")] == [
        0.5,
        1,
        1,
        0,
    ]


def run_fabric(mesh="", path=None, load=None, steps=STEPS, distributed=True, before=True):
    """A loop of Fabric, on a mesh or in one process."""
    how, size = {}, 1
    if mesh:
        strategy = MeshparFabricStrategy(Plan(mesh, passes_for(mesh)), save_distributed_checkpoint=distributed)
        how = dict(strategy=strategy, devices=dist.get_world_size(), plugins=[Ranks()])
    fabric = Fabric(accelerator="cpu", **how or dict(devices=1))
    fabric.launch()
    torch.manual_seed(0)
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    if mesh:
        size = strategy.parallelized[model.module].data_size
    loader = fabric.setup_dataloaders(DataLoader(tokens(), BATCH // size))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if load:
        fabric.load(load, state)
    losses = []
    batches = list(loader)
    for step in range(state["step"], steps):
        for number, batch in enumerate(batches[2 * step : 2 * step + 2]):
            with fabric.no_backward_sync(model, enabled=number == 0) if mesh else torch.enable_grad():
                loss = model(batch[0], labels=batch[0]).loss
                fabric.backward(loss / 2)
            losses.append(float(fabric.all_reduce(loss.detach())))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    if path:
        fabric.save(path, state | {"step": steps})
    weights = model.module.state_dict()
    if mesh:
        weights = strategy.parallelized[model.module].state_dict(full=True, everywhere=True)
    return losses, None, copy.deepcopy(weights)


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2"))
@on_ranks("mesh")
def test_a_loop_of_fabric_equals_one_process(mesh):
    assert_same(run_fabric(mesh), run_fabric())


@pytest.mark.parametrize("distributed", [True, False])
@on_ranks(2)
def test_a_loop_of_fabric_resumes_on_another_mesh(distributed, tmp_path):
    path, expected = f"{tmp_path}/state.ckpt", run_fabric()
    run_fabric("dp_shard=2", path, steps=4, distributed=distributed)
    found = run_fabric("tp=2", load=path)
    assert_same(found, (expected[0][8:], None, expected[2]))


@on_ranks(2)
def test_what_a_folder_of_fabric_cannot_have_is_refused_and_what_the_message_says_works(tmp_path):
    plan = Plan("dp_shard=2", [FullyShard()])
    for distributed in (True, False):
        strategy = MeshparFabricStrategy(plan, save_distributed_checkpoint=distributed)
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, plugins=[Ranks()])
        fabric.launch()
        module = transformer()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters()))
        how = {"filter": {"model": lambda name, value: "norm" in name}}
        if distributed:
            with pytest.raises(
                MeshparError, match="no storage_options and no filter; pass save_distributed_checkpoint=False"
            ):
                fabric.save(f"{tmp_path}/part", {"model": model}, **how)
            with pytest.raises(
                MeshparError, match=r"optimizer 'optimizer' .* trains no module of this checkpoint alone"
            ):
                fabric.save(f"{tmp_path}/alone", {"optimizer": optimizer})
            fabric.save(f"{tmp_path}/both", {"model": model, "optimizer": optimizer})
            with pytest.raises(KeyError, match="a key 'step' that does not exist"):
                fabric.load(f"{tmp_path}/both", {"model": model, "step": 0})
            fabric.load(f"{tmp_path}/both", {"model": model, "step": 0}, strict=False)
            with pytest.raises(MeshparError, match="parameters that no model on the mesh has"):
                fabric.setup(transformer(), torch.optim.SGD(transformer().parameters()))
            stepped = transformer()
            optimizer = torch.optim.SGD(stepped.parameters(), momentum=0.9)
            first = next(stepped.parameters())
            optimizer.state[first] = {"momentum_buffer": first.detach().clone()}
            _, optimizer = fabric.setup(stepped, optimizer)
            ((parameter, values),) = optimizer.optimizer.state.items()
            assert parameter is next(stepped.parameters()) is not first
            torch.testing.assert_close(values["momentum_buffer"].full_tensor(), parameter.detach().full_tensor())
            later = fabric.setup_module(transformer())
            fabric.setup_optimizers(torch.optim.Adam(later.parameters()))
        else:
            fabric.save(f"{tmp_path}/part", {"model": model}, **how)
            assert all("norm" in name for name in torch.load(f"{tmp_path}/part")["model"])


@on_ranks(2)
def test_models_of_fabric_get_their_plans_in_order():
    strategy = MeshparFabricStrategy({"teacher": "dp_replicate=2", "student": Plan("dp_shard=2", [FullyShard()])})
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, plugins=[Ranks()])
    fabric.launch()
    models = [fabric.setup_module(transformer()).module for _ in range(2)]
    assert [str(strategy.parallelized[model].spec) for model in models] == ["dp_replicate=2", "dp_shard=2"]
    with pytest.raises(MeshparError, match="is model 3, and plan= has 2: teacher, student; give plan= a name"):
        fabric.setup_module(transformer())


@pytest.mark.parametrize("runs", daily([["dp_shard=2"], ["", "dp_shard=2", "tp=2"]], ["dp_shard=2"]))
def test_the_example_prints_what_its_page_says(runs, tmp_path):
    """The last mesh of several resumes from the first one's checkpoint."""
    root = Path(__file__).parents[2]
    page = (root / "docs/integrations/lightning.md").read_text()
    for mesh in runs:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if mesh else []
        resume = ["runs/lightning/checkpoints/epoch=0-step=20.ckpt"] if mesh == "tp=2" else []
        command = [sys.executable, *launch, str(root / "examples/lightning_on_mesh.py"), mesh, *resume]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        losses = re.findall(r"step \d+: loss [\d.]+", done.stdout)
        assert len(losses) == 4
        for line in losses:
            step, loss = line.split(": loss ")
            (shown,) = set(re.findall(rf"(?m)^{step}: loss ([\d.]+)$", page))
            assert float(loss) == pytest.approx(float(shown), abs=2e-5)
