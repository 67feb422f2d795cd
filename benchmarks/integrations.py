"""What a library's trainer costs: a step with meshpar under it, over the same plan in a loop of one's own.

    python benchmarks/integrations.py [accelerate | trainer ...] [--mesh dp_shard=2] [--steps 30]

Each way trains in two gloo processes of its own on this machine, and the ways take turns, step by step. Printed: the
medians, and the median of the ratios of neighbours. ``ddp`` is Trainer alone: accelerate has no FSDP2 on CPUs, and
trains by DistributedDataParallel there, whatever ``fsdp=`` says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from meshpar import FullyShard, Pass, Plan, Replicate, TensorParallel

LENGTH, BATCH, WARMUP, RANKS, SEED = 128, 4, 5, 2, 0
MESHES: dict[str, list[Pass]] = {
    "dp_shard=2": [FullyShard()], "dp_replicate=2": [Replicate()], "tp=2": [TensorParallel()],
}  # fmt: skip


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.ids = torch.randint(4096, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Turns:
    """Lets one way at a time run a step, and notes how long each took."""

    def __init__(self, way: int, ways: int, port: int) -> None:
        self._way, self._ways, self._number = way, ways, 0
        self._store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(minutes=10), wait_for_workers=False)
        self._begin = 0.0
        self.seconds: list[float] = []

    def next(self) -> None:
        """End a step, and wait for the turn of the next one."""
        if self._number:
            dist.barrier()
            self.seconds.append(time.perf_counter() - self._begin)
            if dist.get_rank() == 0:
                following = divmod((self._number - 1) * self._ways + self._way + 1, self._ways)
                self._store.set(f"{following[0]}-{following[1]}", "")
        self._store.wait([f"{self._number}-{self._way}"])
        self._number += 1
        dist.barrier()
        self._begin = time.perf_counter()

    def leave(self) -> None:
        """Let the other ways go on without this one."""
        if dist.get_rank() == 0:
            number, way = divmod(self._number * self._ways - self._ways + self._way + 1, self._ways)
            self._store.set(f"{number}-{way}", "")


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))


def train_alone(mesh: str, steps: int, turn: Callable[[], None]) -> None:
    """Train in a loop of one's own, with what Trainer does by default: a schedule, a norm, tokens that count once."""
    par = Plan(mesh, MESHES[mesh]).apply(model())
    optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    tokens = Tokens(steps * BATCH * par.data_size)
    sampler = DistributedSampler(tokens, par.data_size, par.data_rank)
    total = torch.zeros(())
    turn()
    for batch in DataLoader(tokens, BATCH, sampler=sampler):
        count = par.data_sum((batch["labels"][:, 1:] != -100).sum())
        loss = par.module(**batch, num_items_in_batch=count).loss * par.data_size
        loss.backward()
        norm = par.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        assert torch.isfinite(norm)
        turn()


def train_by_accelerate(mesh: str, steps: int, turn: Callable[[], None]) -> None:
    from meshpar.integrations.accelerate import Accelerator

    accelerator = Accelerator(plan=Plan(mesh, MESHES[mesh]))
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    loader: Any = DataLoader(Tokens(steps * BATCH * accelerator.num_processes), BATCH, shuffle=True)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    turn()
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch).loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        turn()


def train_by_trainer(mesh: str, steps: int, turn: Callable[[], None], **options: Any) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from meshpar.integrations.transformers import on_mesh

    class Turn(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turn()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turn()

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=1e-3,
        logging_strategy="no", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    tokens = Tokens(steps * BATCH * (1 if mesh == "tp=2" else RANKS))
    plan = {} if options else {"plan": Plan(mesh, MESHES[mesh])}
    kind = Trainer if options else on_mesh(Trainer)
    kind(model(), arguments, train_dataset=tokens, callbacks=[Turn()], **plan).train()


def train_by_ddp(mesh: str, steps: int, turn: Callable[[], None]) -> None:
    train_by_trainer(mesh, steps, turn, ddp_find_unused_parameters=True)


WAYS = {"loop": train_alone, "accelerate": train_by_accelerate, "trainer": train_by_trainer, "ddp": train_by_ddp}


def run(index: int, ways: list[str], mesh: str, steps: int, port: int, folder: str) -> None:
    """Train one of the ways on one of its ranks."""
    way, rank = divmod(index, RANKS)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{way}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    turns = Turns(way, len(ways), port)
    WAYS[ways[way]](mesh, WARMUP + steps, turns.next)
    if rank == 0:
        torch.save(turns.seconds, f"{folder}/{way}.pt")
    turns.leave()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", choices=[*WAYS, []], default=["trainer", "ddp"])
    parser.add_argument("--mesh", choices=MESHES, default="dp_shard=2")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    ways = ["loop", *(way for way in options.ways if way != "loop")]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("0-0", "")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ways, options.mesh, options.steps, server.port, folder)
        processes.spawn(run, arguments, nprocs=len(ways) * RANKS)
        seconds = {way: torch.load(f"{folder}/{number}.pt")[WARMUP:] for number, way in enumerate(ways)}
    for way in ways:
        print(f"{way} on {options.mesh}: {statistics.median(seconds[way]) * 1e3:.1f} ms a step")
    pairs = [("loop", way) for way in ways[1:]] + [("ddp", "trainer")] * ({"ddp", "trainer"} <= {*ways})
    for base, way in pairs:
        ratio = statistics.median(one / other for one, other in zip(seconds[way], seconds[base]))
        print(f"{way} over {base}: {ratio:.3f} (median of {len(seconds[way])} pairs)")


if __name__ == "__main__":
    main()
