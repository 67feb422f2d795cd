"""litgpt's pretraining program, as published, on meshes under Fabric: ten steps equal those of one process."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import Fabric

from meshpar import MeshSpec, ModelLayout, Plan, passes_for
from meshpar.integrations.lightning import MeshparFabricStrategy
from meshpar.testing import launch
from tests.integrations.test_lightning import Ranks

LENGTH, BATCH, STEPS, WORDS = 32, 8, 10, 128
LAYOUT = ModelLayout(
    blocks=("transformer.h.*",),
    tensor={
        "transformer.h.*.mlp.fc_1": "colwise",
        "transformer.h.*.mlp.fc_2": "colwise",
        "transformer.h.*.mlp.proj": "rowwise",
    },
)


class Rows:
    """The parts of litgpt's DataModule that the program calls."""

    def connect(self, tokenizer, batch_size, max_seq_length):
        self.batch_size, self.length = batch_size, max_seq_length

    def prepare_data(self):
        pass

    def setup(self):
        pass

    def train_dataloader(self):
        rows = torch.randint(WORDS, (STEPS * BATCH, self.length + 1), generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(rows, self.batch_size)

    val_dataloader = train_dataloader


def pretrain_on(mesh, folder):
    """Run the program's main with another strategy, and write its losses and weights."""
    from litgpt import pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config

    strategy = MeshparFabricStrategy(Plan(mesh, passes_for(mesh)), LAYOUT)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size(), plugins=[Ranks()])
    fabric.launch()
    data_ranks = 2 if mesh == "dp_shard=2" else 1
    losses, backward = [], fabric.backward

    def note_loss(loss, **options):
        [par] = strategy.parallelized.values()
        losses.append(float(par.data_sum(loss.detach().clone())) / data_ranks)
        backward(loss, **options)

    fabric.backward, fabric.log_dict = note_loss, lambda *_, **__: None
    sizes = dict(block_size=LENGTH, vocab_size=WORDS, padded_vocab_size=WORDS, n_layer=2, n_head=4, n_query_groups=2)
    kinds = dict(norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", parallel_residual=False, bias=False)
    config = Config(name="tiny", n_embd=32, intermediate_size=64, rotary_percentage=1.0, **sizes, **kinds)
    # the program counts every rank's tokens
    tokens = STEPS * BATCH * LENGTH * fabric.world_size // data_ranks
    micro = dict(global_batch_size=BATCH, micro_batch_size=BATCH // data_ranks // 2, max_tokens=tokens)
    rates = dict(max_norm=0.5, min_lr=1e-4, lr_warmup_steps=2, tie_embeddings=False, save_interval=None, log_interval=1)
    with mock.patch.object(torch, "compile", lambda module: module), mock.patch.object(pretrain, "save_checkpoint"):
        pretrain.main(
            fabric=fabric, devices=data_ranks, seed=3, initial_checkpoint_dir=None, resume=False, config=config, data=Rows(),
            out_dir=folder, tokenizer_dir=None, tokenizer=None, train=TrainArgs(**micro, **rates),
            eval=EvalArgs(interval=1000, max_iters=2, final_validation=False),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2, "eps": 1e-3}},
        )  # fmt: skip
    [par] = strategy.parallelized.values()
    weights = {name: par.whole(tensor.detach()).clone() for name, tensor in par.module.named_parameters()}
    if fabric.global_rank == 0:
        torch.save((losses, weights), folder / "result.pt")


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_litgpts_pretraining_equals_one_process(mesh, tmp_path):
    """It asks for an older huggingface_hub: ``pip install --no-deps litgpt jsonargparse docstring_parser typeshed_client``."""
    pytest.importorskip("litgpt.pretrain")
    results = []
    for name in ("", mesh):
        folder: Path = tmp_path / (name or "one")
        folder.mkdir()
        launch(__name__, "pretrain_on", MeshSpec(name).size if name else 1, (name, folder), fresh="litgpt's settings")
        results.append(torch.load(folder / "result.pt"))
    (expected, weights), (found, weights_on_mesh) = results
    assert len(found) == 2 * STEPS and found == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        assert torch.allclose(weights_on_mesh[name], weight, atol=1e-4), name
