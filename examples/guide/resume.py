"""meshpar: a loop that evaluates, saves and resumes, on any mesh: ``python resume.py "" runs/resume 3``, then
another mesh and ``6``.
"""

import sys

import torch
from after import PASSES
from model import BATCH, VOCAB, Model
from torch import Tensor
from torch.nn.functional import cross_entropy

import meshpar
from meshpar.checkpoints import CheckpointManager

VALIDATION = 1000  # the seed of the batch that no step trains on


def part(par: meshpar.Parallelized, seed: int) -> tuple[Tensor, Tensor]:
    """Return this data rank's rows of the batch of a seed: inputs and the tokens after them."""
    ids = torch.randint(VOCAB, (BATCH, 17), generator=torch.Generator().manual_seed(seed))[
        par.data_rank :: par.data_size
    ]
    return ids[:, :-1], ids[:, 1:]


def loss_of(par: meshpar.Parallelized, seed: int) -> Tensor:
    ids, labels = part(par, seed)
    return cross_entropy(par.module(ids).flatten(0, 1), labels.flatten())


def evaluate(par: meshpar.Parallelized) -> float:
    """Return the validation loss over all data ranks. Every rank calls it, with as many batches."""
    par.module.eval()
    with torch.no_grad():
        loss = par.data_sum(loss_of(par, VALIDATION)) / par.data_size
    par.module.train()
    return loss.item()


def main(mesh: str, folder: str, until: int) -> list[float]:
    with meshpar.distributed("cpu"), CheckpointManager(folder, keep=2) as checkpoints:
        torch.manual_seed(0)
        par = meshpar.Plan(mesh, PASSES[mesh]).apply(Model())
        optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        step = 0
        if checkpoints.latest() is not None:
            state = checkpoints.restore(par, optimizer)  # weights, optimizer, random state
            schedule.load_state_dict(state.extra["schedule"])
            step = state.step
        losses = []
        while step < until:
            loss_of(par, step).backward()
            par.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            losses.append(evaluate(par))
            if meshpar.core.runtime.is_main():
                print(f"step {step}: validation loss {losses[-1]:.5f}, next lr {schedule.get_last_lr()[0]:.2e}")
        checkpoints.save(
            step, par, optimizer, extra={"schedule": schedule.state_dict()}, metrics={"validation": evaluate(par)}
        )
        return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
