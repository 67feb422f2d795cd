"""A script for accelerate on any mesh: torchrun --nproc-per-node 2 examples/accelerate_on_mesh.py dp_shard=2

Only the import of Accelerator and its argument `plan=` differ from a script for accelerate. Another mesh is another
argument: dp_replicate=2  tp=2  dp_shard=2,tp=2 (on 4 processes). The losses stay the same. A second run with another
mesh and `resume` goes on from the state that the first one saved.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from meshpar.integrations.accelerate import Accelerator
from meshpar.models import Transformer, TransformerConfig

LENGTH, BATCH, STEPS = 64, 16, 20


def main(mesh: str, folder: Path, resume: bool = False) -> list[float]:
    """Train for 20 steps and save the state, or go on from it; return the losses."""
    accelerator = Accelerator(plan=mesh, gradient_accumulation_steps=2)
    text = torch.tensor(list(Path(sysconfig.get_paths()["stdlib"], "typing.py").read_bytes()))
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=256, dim=64, layers=2, heads=4, hidden=128, max_positions=LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40 * accelerator.num_processes)
    loader = DataLoader(rows, batch_size=BATCH // accelerator.num_processes // accelerator.gradient_accumulation_steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume:
        accelerator.load_state(str(folder / "state"))
        loader = accelerator.skip_first_batches(loader, STEPS * accelerator.gradient_accumulation_steps)
    losses: list[float] = []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(accelerator.gather(loss.detach()).mean().item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and len(losses) % 10 == 0:
            accelerator.print(f"step {len(losses)}: loss {losses[-1]:.5f}, gradient norm {norm:.4f}")
        if len(losses) == STEPS:
            break
    accelerator.save_state(str(folder / "state"))
    accelerator.save_model(model, folder / "export")
    return losses


if __name__ == "__main__":
    mesh, *options = [*sys.argv[1:], ""]
    main(mesh, Path("runs/accelerate"), resume="resume" in options)
