"""FullyShardedDataParallel (FSDP1), under torchrun."""

from functools import partial

import torch
import torch.distributed as dist
from model import Block, Model, batches
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.functional import cross_entropy


def main() -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Model(),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids, labels in batches(rank, ranks):
        loss = cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
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
