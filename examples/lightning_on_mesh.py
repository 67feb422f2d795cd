"""A LightningModule on any mesh: torchrun --nproc-per-node 2 examples/lightning_on_mesh.py dp_shard=2

Without a mesh it trains in one process. The losses stay the same. tp=2 and dp_shard=2,tp=2 are other meshes. A second
argument is a checkpoint of the first epoch, of any mesh, which a second epoch follows.
"""

import logging
import sys
import sysconfig
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

import meshpar
from meshpar.integrations.lightning import MeshparStrategy
from meshpar.models import Transformer, TransformerConfig

LENGTH, GLOBAL_BATCH, STEPS = 64, 8, 20


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Transformer(
            TransformerConfig(vocab_size=256, dim=64, layers=2, heads=4, hidden=192, max_positions=LENGTH)
        )

    def training_step(self, batch, number):
        (tokens,) = batch
        loss = self.model(tokens, labels=tokens).loss
        self.log("loss", loss, sync_dist=True)
        if self.global_step % 5 == 4:
            self.print(f"step {self.global_step + 1}: loss {self.trainer.strategy.reduce(loss.detach().clone()):.5f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(mesh: str, resume: str | None) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(0)
    text = torch.tensor(list(Path(sysconfig.get_paths()["stdlib"], "typing.py").read_bytes()))
    rows = text[: STEPS * GLOBAL_BATCH * LENGTH].view(-1, LENGTH)
    plan = meshpar.Plan(mesh, meshpar.passes_for(mesh))
    axes = meshpar.MeshSpec(mesh).axes
    batch = GLOBAL_BATCH // (axes.get("dp_shard", 1) * axes.get("dp_replicate", 1))  # of each data rank
    trainer = Trainer(
        accelerator="cpu",
        devices=meshpar.MeshSpec(mesh).size,
        strategy=MeshparStrategy(plan),
        gradient_clip_val=1.0,
        max_epochs=1 if resume is None else 2,
        default_root_dir="runs/lightning",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Language(), DataLoader(TensorDataset(rows), batch), ckpt_path=resume)
    if trainer.is_global_zero and trainer.checkpoint_callback is not None:
        print("saved", Path(trainer.checkpoint_callback.best_model_path).name)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2] if len(sys.argv) > 2 else None)
