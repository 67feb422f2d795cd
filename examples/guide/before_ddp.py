"""DistributedDataParallel, under torchrun."""

import torch
import torch.distributed as dist
from model import Model, batches
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids, labels in batches(rank, ranks):
        loss = cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0:
            print(f"loss {losses[-1]:.5f}")
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
