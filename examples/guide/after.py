"""meshpar: the same loop on any mesh: ``python after.py``, ``torchrun --nproc-per-node 2 after.py dp_shard=2``."""

import sys

import torch
from model import Model, batches
from torch.nn.functional import cross_entropy

import meshpar

PASSES = {
    "": [],  # one process
    "dp_replicate=2": [meshpar.Replicate()],  # what DDP does
    "dp_shard=2": [meshpar.FullyShard()],  # what FSDP does
}


def main(mesh: str = "") -> list[float]:
    with meshpar.distributed("cpu"):
        torch.manual_seed(0)
        par = meshpar.Plan(mesh, PASSES[mesh]).apply(Model())
        optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2)
        losses = []
        for ids, labels in batches(par.data_rank, par.data_size):
            loss = cross_entropy(par.module(ids).flatten(0, 1), labels.flatten())
            loss.backward()
            par.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(par.data_sum(loss.detach().clone()).item() / par.data_size)
            if torch.distributed.get_rank() == 0:
                print(f"loss {losses[-1]:.5f}")
        return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
