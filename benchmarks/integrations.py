"""What a library's trainer costs: a step with meshpar under it, over the same plan in a loop of one's own.

    python benchmarks/integrations.py [accelerate | trainer ...] [--mesh dp_shard=2] [--steps 30]

Each way trains in two gloo processes of its own on this machine, and the ways take turns, step by step. Printed: the
medians of a step's time and of the processor time of its ranks, and the median of the ratios of neighbours. ``trainer``
is ``on_mesh(Trainer)``. The others are Trainer without meshpar: ``ddp``, ``fsdp2`` by accelerate, and ``loaded``, by
transformers' ``DistributedConfig``, which divides a model when it is loaded. All four must end with the same loss.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from meshpar import FullyShard, Pass, Plan, Replicate, TensorParallel

LENGTH, BATCH, WARMUP, RANKS, SEED = 128, 4, 5, 2, 0
KINDS = ("time", "processor time")
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
        self._begin, self._begin_processor = 0.0, 0.0
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []

    def next(self) -> None:
        """End a step, and wait for the turn of the next one."""
        if self._number:
            self.processor_seconds.append(time.process_time() - self._begin_processor)
            dist.barrier()
            self.seconds.append(time.perf_counter() - self._begin)
            if dist.get_rank() == 0:
                following = divmod((self._number - 1) * self._ways + self._way + 1, self._ways)
                self._store.set(f"{following[0]}-{following[1]}", "")
        self._store.wait([f"{self._number}-{self._way}"])
        self._number += 1
        dist.barrier()
        self._begin, self._begin_processor = time.perf_counter(), time.process_time()

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


def train_by_trainer(
    mesh: str, steps: int, turn: Callable[[], None], kind: Any = None, module: Any = None, *, by_fsdp2: bool = False,
    **options: Any,
) -> float:  # fmt: skip
    """Train by on_mesh(Trainer), or by a Trainer of another kind; return the mean loss."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from meshpar.integrations.transformers import on_mesh

    class Turn(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            assert not by_fsdp2 or all(isinstance(part, FSDPModule) for part in trainer.model.model.layers)
            turn()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turn()

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=1e-3,
        logging_strategy="no", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    tokens = Tokens(steps * BATCH * (1 if mesh == "tp=2" else RANKS))
    kind = kind or partial(on_mesh(Trainer), plan=Plan(mesh, MESHES[mesh]))
    trainer: Any = kind(module or model(), arguments, train_dataset=tokens, callbacks=[Turn()])
    return float(trainer.train().training_loss)


def train_by_ddp(mesh: str, steps: int, turn: Callable[[], None]) -> float:
    from transformers import Trainer

    return train_by_trainer(mesh, steps, turn, Trainer)


def train_by_accelerates_fsdp2(mesh: str, steps: int, turn: Callable[[], None]) -> float:
    """Train with ``fsdp=True``: accelerate takes FSDP for accelerators alone, until it is told the type of the job."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import Trainer

    class Fsdp2Trainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            state: Any = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    layers = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    return train_by_trainer(mesh, steps, turn, Fsdp2Trainer, by_fsdp2=True, fsdp=True, fsdp_config=layers)


def train_loaded_in_parts(mesh: str, steps: int, turn: Callable[[], None]) -> float:
    """Train a model that transformers divided by FSDP2 when it loaded it."""
    from transformers import LlamaForCausalLM, Trainer
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp()]
    if dist.get_rank() == 0:
        model().save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    divided = LlamaForCausalLM.from_pretrained(folder[0], distributed_config=DistributedConfig(fsdp_size=RANKS))
    return train_by_trainer(mesh, steps, turn, Trainer, divided, by_fsdp2=True)


WAYS: dict[str, Callable[..., float | None]] = {
    "loop": train_alone, "accelerate": train_by_accelerate, "trainer": train_by_trainer, "ddp": train_by_ddp,
    "fsdp2": train_by_accelerates_fsdp2, "loaded": train_loaded_in_parts,
}  # fmt: skip


def run(index: int, ways: list[str], mesh: str, steps: int, port: int, folder: str) -> None:
    """Train one of the ways on one of its ranks."""
    way, rank = divmod(index, RANKS)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{way}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    turns = Turns(way, len(ways), port)
    loss = WAYS[ways[way]](mesh, WARMUP + steps, turns.next)
    result = {"loss": loss, "time": turns.seconds, "processor time": turns.processor_seconds}
    torch.save(result, f"{folder}/{way}-{rank}.pt")
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
        results = {
            way: [torch.load(f"{folder}/{number}-{rank}.pt") for rank in range(RANKS)]
            for number, way in enumerate(ways)
        }
    for way, (first, *_) in results.items():
        loss = "" if first["loss"] is None else f", mean loss {first['loss']:.5f}"
        medians = (f"{statistics.median(steps_of(results[way], kind)) * 1e3:.1f} ms of {kind}" for kind in KINDS)
        print(f"{way} on {options.mesh}: {' and '.join(medians)} a step{loss}")
    pairs = [("loop", way) for way in ways[1:]]
    pairs += [(way, "trainer") for way in ("ddp", "fsdp2", "loaded") if {way, "trainer"} <= {*ways}]
    for base, way in pairs:
        ratios = {kind: map(truediv, *(steps_of(results[name], kind) for name in (way, base))) for kind in KINDS}
        medians = (f"{statistics.median(ratio):.3f} in {kind}" for kind, ratio in ratios.items())
        print(f"{way} over {base}: {', '.join(medians)} (medians of {options.steps} pairs)")
    losses = {way: first["loss"] for way, (first, *_) in results.items() if first["loss"] is not None}
    assert all(abs(loss - next(iter(losses.values()))) < 1e-3 for loss in losses.values()), losses


def steps_of(ranks: list[dict[str, Any]], kind: str) -> list[float]:
    """Return the seconds of each step: rank 0's time, or the processor time of all ranks."""
    series = [rank[kind][WARMUP:] for rank in (ranks[:1] if kind == "time" else ranks)]
    return [sum(step) for step in zip(*series)]


if __name__ == "__main__":
    main()
