"""A training loop of your own on any mesh: torchrun --nproc-per-node 2 examples/own_loop.py dp_shard=2

Another mesh is another argument: dp_replicate=2  tp=2  dp_shard=2,tp=2 (on 4 processes). The losses stay the same.
"""

import sys
import sysconfig
from pathlib import Path

import torch

import meshpar
from meshpar.checkpoints import CheckpointManager, export_safetensors
from meshpar.models import Transformer, TransformerConfig

PASSES = {
    "dp_shard=2": [meshpar.FullyShard()],
    "dp_replicate=2": [meshpar.Replicate()],
    "tp=2": [meshpar.TensorParallel(loss_parallel=True)],
    "dp_shard=2,tp=2": [meshpar.TensorParallel(), meshpar.ActivationCheckpoint(), meshpar.FullyShard()],
}
LENGTH, GLOBAL_BATCH, STEPS = 128, 8, 30


def batch(text: torch.Tensor, step: int, rank: int, size: int) -> torch.Tensor:
    """This data rank's part of a global batch that is the same on every mesh: (GLOBAL_BATCH / size, LENGTH)."""
    starts = torch.randint(len(text) - LENGTH, (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()[rank::size]])


def main(mesh: str, run: Path) -> None:
    text = torch.tensor(list(Path(sysconfig.get_paths()["stdlib"], "typing.py").read_bytes()))
    with meshpar.distributed("cpu"):  # torchrun's environment, or one process
        config = TransformerConfig(vocab_size=256, dim=128, layers=4, heads=4, hidden=384, max_positions=LENGTH)
        with torch.device("meta"):
            model = Transformer(config)
        par = meshpar.Plan(mesh, PASSES.get(mesh, [])).apply(model).materialize(seed=0)
        optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-3)
        checkpoints = CheckpointManager(run / "checkpoints", keep=2)
        for step in range(1, STEPS + 1):
            tokens = batch(text, step, par.data_rank, par.data_size)
            loss = par.module(tokens, labels=tokens).loss
            loss.backward()
            norm = par.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                mean = par.data_sum(loss.detach()) / par.data_size
                if meshpar.core.runtime.is_main():
                    print(f"step {step}: loss {mean:.5f}, gradient norm {norm:.4f}")
        checkpoints.save(STEPS, par, optimizer, replace=True)  # a second run replaces the first one's step
        checkpoints.close()
        if meshpar.core.runtime.is_main():
            print("exported to", export_safetensors(run / "checkpoints", run / "export", overwrite=True))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", Path(sys.argv[2] if len(sys.argv) > 2 else "runs/own_loop"))
