"""The loss of a large vocabulary, by torch's cross entropy, by meshpar's and in chunks: peak memory, time and
gradients.

    python benchmarks/chunked_loss.py [--vocabulary 131072] [--tokens 4096] [--width 512] [--repeats 5] [--dtype
    float32]

One process. The part of a model that the vocabulary makes: the head's product, the loss and their backward, for hidden
states of ``tokens`` positions. The peak is that of live tensors beyond what is there before and stays after (weights
and the gradients), counted by the recorder of the forecast on a CPU and by the allocator on a GPU. Printed as a table
in Markdown.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar import chunked_token_loss, token_loss
from meshpar.forecasting.recorder import Recorder
from meshpar.losses.chunked import CHUNK

Loss = Callable[["Head", Tensor], Tensor]


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


def torchs(model: Head, labels: Tensor) -> Tensor:
    return F.cross_entropy(model().logits.flatten(0, 1).float(), labels.flatten())


def plain(model: Head, labels: Tensor) -> Tensor:
    return token_loss(model().logits, labels)


def seconds_of(model: Head, labels: Tensor, loss_of: Loss) -> float:
    wait(labels.device)
    start = time.perf_counter()
    loss_of(model, labels).backward()
    wait(labels.device)
    return time.perf_counter() - start


def peak_of(model: Head, labels: Tensor, loss_of: Loss) -> int:
    """Return the bytes of loss and backward at their peak, less the parameters' gradients, which stay."""
    model.zero_grad(set_to_none=True)
    if labels.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(model, labels).backward()
        return torch.cuda.max_memory_allocated() - before - kept(model)
    recorder = Recorder({})
    recorder.hold(iter([*model.parameters(), labels]), "parameters")
    with recorder:
        recorder.phase("step")
        loss_of(model, labels).backward()
        phases = recorder.finished()
    now = most = 0
    for event in (event for phase in phases for event in phase.events):
        now += sum(change for _, change in event.memory)
        most = max(most, now)
    return most - kept(model)


def kept(model: Head) -> int:
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)


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
    chunks = functools.partial(chunked_token_loss, inputs={}, chunk=options.chunk)
    ways: dict[str, Loss] = {
        "F.cross_entropy": torchs,
        "token_loss": plain,
        f"in chunks of {options.chunk}": lambda model, labels: chunks(model, labels_BL=labels),
    }
    peaks, grads = {}, {}
    for name, loss_of in ways.items():
        peaks[name] = peak_of(model, labels, loss_of)
        grads[name] = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, loss_of in ways.items():
            model.zero_grad(set_to_none=True)
            times[name].append(seconds_of(model, labels, loss_of))
    shape = f"vocabulary {options.vocabulary:,}, {options.tokens:,} positions of {options.width}"
    print(f"{shape}, {options.dtype}, {device}, torch {torch.__version__}")
    print("| | peak of loss and backward, MiB | of torch's | seconds | of torch's | gradients apart, of the largest |")
    print("|---|---:|---:|---:|---:|---:|")
    first = next(iter(ways))
    for name in ways:
        ratios = [mine / theirs for mine, theirs in zip(times[name], times[first])]
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads[name], grads[first]))
        print(
            f"| {name} | {peaks[name] / 2**20:,.0f} | {peaks[name] / peaks[first]:.3f} | "
            f"{statistics.median(times[name]):.2f} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) | {apart:.1e} |"
        )


if __name__ == "__main__":
    main()
