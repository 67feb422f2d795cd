"""What dividing experts costs: a step of a Qwen3-MoE under FSDP alone, under ``ExpertParallel``, and under transformers' own.

    python benchmarks/experts.py [--ranks 2,4] [--rounds 9]

All train the same model of transformers on the same tokens, in float32 on gloo; every rank gets samples of its own. All ranks share this
machine's cores, so their seconds are those of all the work. A step is a forward, a backward and SGD; the median of the rounds is printed.
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

KINDS = {
    "FSDP alone": "dp_shard=-1",
    "meshpar, ep": "dp_shard=1,ep=-1",
    "transformers, ep": "",
}
BATCH, LENGTH, VOCAB = 4, 256, 512


def config() -> object:
    import transformers

    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    mixture = dict(moe_intermediate_size=256, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, decoder_sparse_step=1)
    return transformers.Qwen3MoeConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, use_cache=False, **sizes, **mixture)


def built(kind: str, folder: str) -> torch.nn.Module:
    """Return the model as ``kind`` divides it, with the weights of ``folder``."""
    import transformers

    if not KINDS[kind]:
        from transformers.distributed import DistributedConfig

        size = dist.get_world_size()
        divided = DistributedConfig(fsdp_size=size, ep_size=size)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=divided, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    passes: list[meshpar.Pass] = [meshpar.ExpertParallel()] if "ep" in KINDS[kind] else []
    return meshpar.Plan(KINDS[kind], [*passes, meshpar.FullyShard()]).apply(model).module


def rank(kind: str, folder: str, rounds: int) -> None:
    """Train on one rank, and print figures from rank 0."""
    torch.set_num_threads(1)
    with meshpar.distributed("cpu"):
        model = built(kind, folder)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
        seconds, losses = [], []
        for _ in range(rounds + 2):
            dist.barrier()
            began = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
            losses.append(loss.detach())
        last = losses[-1]
        dist.all_reduce(last)
        if dist.get_rank() == 0:
            print(f"RESULT {statistics.median(seconds[2:]):.3f} {min(seconds[2:]):.3f} {float(last) / dist.get_world_size():.5f}")


def measured(kind: str, ranks: int, folder: str, rounds: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["--rank", kind, "--folder", folder, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not found:
        raise SystemExit(f"{kind} on {ranks} ranks failed:\n{done.stderr[-3000:]}")
    return found[0].split()[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of processes, comma separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.folder, options.rounds)
        return
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(folder)
        print("| ranks | | step, s | least, s | loss of the last step |")
        print("| --- | --- | --- | --- | --- |")
        for ranks in map(int, options.ranks.split(",")):
            for kind in KINDS:
                print(f"| {ranks} | {kind} | {' | '.join(measured(kind, ranks, folder, options.rounds))} |", flush=True)


if __name__ == "__main__":
    main()
