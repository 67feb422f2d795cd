"""What dividing experts costs: a step of a Qwen3-MoE under FSDP alone, under ``ExpertParallel``, and under
transformers' own.

    python benchmarks/experts.py [--ranks 2,4] [--rounds 20]

All train the same model of transformers on the same tokens, in float32 on gloo; every rank gets samples of its own. The
same processes train all of them, a step of each in turn, so that what else the machine does meets them alike. All ranks
share its cores, so their seconds are those of all the work. A step is a forward, a backward and SGD. Printed are the
median of the rounds, and the median and the middle half of the ratios to meshpar's step of the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import meshpar

KINDS = {"FSDP alone": "dp_shard=-1", "meshpar, ep": "dp_shard=1,ep=-1", "transformers, ep": ""}
BATCH, LENGTH, VOCAB = 4, 256, 512


def config() -> object:
    import transformers

    sizes = dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
    )
    mixture = dict(
        moe_intermediate_size=256, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, decoder_sparse_step=1
    )
    return transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, max_position_embeddings=LENGTH, use_cache=False, **sizes, **mixture
    )


def built(kind: str, folder: str) -> torch.nn.Module:
    """Return the model as ``kind`` divides it, with the weights of ``folder``."""
    import transformers

    if not KINDS[kind]:
        from transformers.distributed import DistributedConfig

        size = dist.get_world_size()
        divided = DistributedConfig(fsdp_size=size, ep_size=size)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=divided, dtype=torch.float32
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    passes: list[meshpar.Pass] = [meshpar.ExpertParallel()] if "ep" in KINDS[kind] else []
    return meshpar.Plan(KINDS[kind], [*passes, meshpar.FullyShard()]).apply(model).module


def rank(folder: str, rounds: int) -> None:
    """Train each kind on one rank, a step of each in turn, and print the table's rows from rank 0."""
    torch.set_num_threads(1)
    with meshpar.distributed("cpu"):
        models = {kind: built(kind, folder).train() for kind in KINDS}
        optimizers = {
            kind: torch.optim.SGD(model.parameters(), lr=0.01, foreach=False) for kind, model in models.items()
        }
        ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        losses: dict[str, torch.Tensor] = {}
        for number in range(rounds + 2):
            for kind in KINDS if number % 2 else reversed(KINDS):
                dist.barrier()
                began = time.perf_counter()
                losses[kind] = torch.nn.functional.cross_entropy(
                    models[kind](input_ids=ids).logits.flatten(0, 1), ids.flatten()
                )
                losses[kind].backward()
                optimizers[kind].step()
                optimizers[kind].zero_grad()
                seconds[kind].append(time.perf_counter() - began)
        for kind, loss in losses.items():
            mean = loss.detach()
            dist.all_reduce(mean)
            took = seconds[kind][2:]
            low, ratio, high = statistics.quantiles(
                [mine / ours for mine, ours in zip(took, seconds["meshpar, ep"][2:])], n=4
            )
            row = [
                f"{statistics.median(took):.3f}",
                f"{ratio:.2f} ({low:.2f} to {high:.2f})",
                f"{float(mean) / dist.get_world_size():.5f}",
            ]
            if dist.get_rank() == 0:
                print(f"| {dist.get_world_size()} | {kind} | {' | '.join(row)} |")


def measured(ranks: int, folder: str, rounds: int) -> str:
    """Return the rows of the table for so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    done = subprocess.run(
        [*command, "--folder", folder, "--rounds", str(rounds)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{ranks} ranks failed:\n{done.stderr[-3000:]}")
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith("| "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of processes, comma separated")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        rank(options.folder, options.rounds)
        return
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(folder)
        print("| ranks | | step, s | of meshpar's | loss of the last step |")
        print("| --- | --- | --- | --- | --- |")
        for ranks in map(int, options.ranks.split(",")):
            print(measured(ranks, folder, options.rounds), flush=True)


if __name__ == "__main__":
    main()
