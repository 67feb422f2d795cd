"""The loss of a large vocabulary, in chunks and in one piece: peak memory, time and gradients.

    python benchmarks/chunked_loss.py [--vocabulary 131072] [--tokens 4096] [--width 512] [--repeats 5] [--dtype float32]

One process. The part of a model that the vocabulary makes: the head's product, the loss and their backward, for hidden states of
``tokens`` positions. The peak is that of live tensors beyond what is there before and stays after (weights and the gradients), counted by
the recorder of the forecast on a CPU and by the allocator on a GPU. Printed as a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from meshpar.chunked import CHUNK, chunked_token_loss
from meshpar.forecasting.recorder import Recorder
from meshpar.loss import token_loss


class Head(nn.Module):
    """Hidden states that are trained, and a head."""

    def __init__(self, tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(1, tokens, width, dtype=dtype))
        self.lm_head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.hidden))


def loss_of(model: Head, labels: Tensor, chunk: int) -> Tensor:
    if chunk:
        return chunked_token_loss(model, {}, labels, chunk=chunk)
    return token_loss(model().logits, labels)


def seconds_of(model: Head, labels: Tensor, chunk: int) -> float:
    wait(labels.device)
    start = time.perf_counter()
    loss_of(model, labels, chunk).backward()
    wait(labels.device)
    return time.perf_counter() - start


def peak_of(model: Head, labels: Tensor, chunk: int) -> int:
    """Return the bytes of loss and backward at their peak, less the parameters' gradients, which stay."""
    model.zero_grad(set_to_none=True)
    if labels.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(model, labels, chunk).backward()
        return torch.cuda.max_memory_allocated() - before - kept(model)
    recorder = Recorder({})
    recorder.hold(iter([*model.parameters(), labels]), "parameters")
    with recorder:
        recorder.phase("step")
        loss_of(model, labels, chunk).backward()
        phases = recorder.finished()
    now = most = 0
    for event in (event for phase in phases for event in phase.events):
        now += sum(change for _, change in event.memory)
        most = max(most, now)
    return most - kept(model)


def kept(model: Head) -> int:
    return sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = Head(options.tokens, options.width, options.vocabulary, getattr(torch, options.dtype))
        labels = torch.randint(0, options.vocabulary, (1, options.tokens))
    chunks = {"in one piece": 0, f"chunks of {options.chunk}": options.chunk}
    peaks, grads = {}, {}
    for name, chunk in chunks.items():
        peaks[name] = peak_of(model, labels, chunk)
        grads[name] = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    times: dict[str, list[float]] = {name: [] for name in chunks}
    for _ in range(options.repeats):
        for name, chunk in chunks.items():
            model.zero_grad(set_to_none=True)
            times[name].append(seconds_of(model, labels, chunk))
    plain, chunked = chunks
    apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads[chunked], grads[plain]))
    ratios = [mine / theirs for mine, theirs in zip(times[chunked], times[plain])]
    shape = f"vocabulary {options.vocabulary:,}, {options.tokens:,} positions of {options.width}"
    print(f"{shape}, {options.dtype}, {device}, torch {torch.__version__}")
    print("| | peak of loss and backward, MiB | seconds |")
    print("|---|---:|---:|")
    for name in chunks:
        print(f"| {name} | {peaks[name] / 2**20:,.0f} | {statistics.median(times[name]):.2f} |")
    print(f"| ratio | {peaks[chunked] / peaks[plain]:.3f} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")
    print(f"gradients differ by at most {apart:.1e} of the largest")


if __name__ == "__main__":
    main()
