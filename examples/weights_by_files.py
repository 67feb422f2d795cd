"""Hand the weights of a running job to an inference engine through a folder, or an object store.

    torchrun --nproc-per-node 2 examples/weights_by_files.py train /shared/weights [versions]
    python examples/weights_by_files.py serve /shared/weights [versions]

Run both at the same time, on any two machines that reach the folder, or a URL: `s3://bucket/weights`. Nothing listens:
who may write and read is decided by the folder's permissions or the store's credentials.

A version is a step of a CheckpointManager. It appears whole, and every part has a checksum. One job owns the folder,
and no number is written twice. The engine takes the newest version, checks every byte, and never an older one than it
has.
"""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import transformers

import meshpar
from meshpar.checkpoints import CheckpointManager, export_safetensors, open_step, read_manifest
from meshpar.models import Transformer, TransformerConfig


def train(root: str, versions: int) -> None:
    """Every rank: train, and publish the weights after each step. The next step trains while files are written."""
    with meshpar.distributed("cpu"), CheckpointManager(root, keep=2, async_=True) as published:
        published.own()  # refused while another job lives; a job that lost the folder can commit nothing more
        config = TransformerConfig(vocab_size=64, dim=32, layers=2, heads=4, hidden=64, max_positions=16)
        with torch.device("meta"):
            model = Transformer(config)
        par = meshpar.Plan("dp_shard=-1", [meshpar.FullyShard()]).apply(model).materialize(seed=0)
        optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2)
        ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(par.data_rank))
        first = (published.latest() or 0) + 1
        for version in range(first, first + versions):
            par.module(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            published.save(version, par)
            if dist.get_rank() == 0:
                print(f"published version {version}", flush=True)


def take(root: str, after: int, folder: str) -> int:
    """Write the newest version to a folder as published weights; return its number, 0 if there is none after ``after``.

    Every byte is compared with its checksum. CheckpointError: there is no version yet, it is damaged, or it was deleted
    because two newer ones are there.
    """
    step = open_step(root)
    version = read_manifest(step).step
    if version <= after:
        return 0
    export_safetensors(step, folder, dtype=torch.float32, verify="full", overwrite=True)
    return version


def serve(root: str, versions: int, patience_s: float = 600.0) -> None:
    """Follow the newest version until one with the number ``versions`` or a later one has come."""
    version, deadline = 0, time.monotonic() + patience_s
    with tempfile.TemporaryDirectory() as folder:
        while version < versions:
            try:
                taken, problem = take(root, version, folder), "no newer version has come"
            except meshpar.CheckpointError as error:
                taken, problem = 0, str(error)
            if taken:
                engine = transformers.AutoModelForCausalLM.from_pretrained(folder)
                version, deadline = taken, time.monotonic() + patience_s
                total = sum(float(weight.detach().double().abs().sum()) for weight in engine.parameters())
                print(f"serving version {version}, weights {total:.6f}", flush=True)
            elif time.monotonic() > deadline:
                raise TimeoutError(f"waited {patience_s:.0f} s after version {version}: {problem}")
            else:
                time.sleep(0.05)


if __name__ == "__main__":
    {"train": train, "serve": serve}[sys.argv[1]](sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 5)
