"""Log-probabilities of tokens: memory at a large vocabulary, and what bfloat16 does to them.

    python benchmarks/log_probs.py [--vocabulary 131072] [--tokens 1024] [--steps 150]

One process. First the peak of values, entropies and gradients in chunks beside that of whole logits. Then a small Llama
is trained on this project's pages, byte by byte, and the log-probabilities of the same tokens by the same weights are
computed in several ways, each compared with float32: as a trainer does (whole rows at once), in rows alone and behind
padding, and as an engine does (token by token, with a cache).
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from meshpar import chunked_token_loss
from meshpar.losses.chunked import token_log_probs

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
from chunked_loss import Head, peak_of  # noqa: E402

ROWS, LENGTH, LEFT = 16, 256, 37


def in_chunks(model: nn.Module, labels: Tensor) -> Tensor:
    found = token_log_probs(model, {"labels": labels})
    return -found.log_probs.sum() + 0.1 * found.entropy.sum()


def whole(model: nn.Module, labels: Tensor) -> Tensor:
    logs = model().logits.log_softmax(-1)
    return -logs.gather(-1, labels[..., None]).sum() - 0.1 * (logs.exp() * logs).sum()


def memory(vocabulary: int, tokens: int) -> None:
    torch.manual_seed(0)
    model, labels = Head(tokens, 256, vocabulary, torch.float32), torch.randint(0, vocabulary, (1, tokens))
    peaks = [peak_of(model, labels, way) for way in (in_chunks, whole)]
    logits = tokens * vocabulary * 4
    print(f"vocabulary {vocabulary:,}, {tokens:,} positions, float32: whole logits are {logits / 2**20:,.0f} MiB")
    print(f"in chunks {peaks[0] / 2**20:,.0f} MiB, {peaks[0] / logits:.3f} of whole logits")
    print(f"through whole logits {peaks[1] / 2**20:,.0f} MiB\n")


def trained(steps: int) -> tuple[nn.Module, Tensor]:
    """Return a model that has learnt bytes of the pages, and rows that it has not seen."""
    pages = b"\n".join(page.read_bytes() for page in sorted((HERE.parent / "docs").glob("*.md")))
    text = torch.frombuffer(bytearray(pages), dtype=torch.uint8).long()
    held, text = text[: ROWS * (LENGTH + 1)].view(ROWS, -1), text[ROWS * (LENGTH + 1) :]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (ROWS, 1))
        rows = text[starts + torch.arange(LENGTH + 1)]
        loss = chunked_token_loss(model, {"input_ids": rows[:, :-1]}, rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"\rstep {step + 1} of {steps}, loss {loss.item():.2f}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return model.requires_grad_(False).eval(), held


def rows_at_once(model: nn.Module, ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return token_log_probs(model, {"input_ids": ids, "labels": labels, "use_cache": False} | more).log_probs


def rows_alone(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return torch.cat([rows_at_once(model, *row) for row in zip(ids.split(1), labels.split(1))])


def behind_padding(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    pad = functools.partial(nn.functional.pad, pad=(LEFT, 0))
    positions = pad(torch.arange(LENGTH)).expand(len(ids), -1)
    mask = pad(torch.ones_like(ids))
    found = rows_at_once(model, pad(ids), pad(labels, value=-100), attention_mask=mask, position_ids=positions)
    return found[:, LEFT:]


def token_by_token(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    cache, found = transformers.DynamicCache(config=model.config), []
    for at in range(LENGTH):
        logits = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits[:, 0].float()
        found.append(logits.log_softmax(-1).gather(-1, labels[:, at : at + 1]))
    return torch.cat(found, 1)


def differences(model: nn.Module, rows: Tensor) -> None:
    ids, labels = rows[:, :-1], rows[:, 1:]
    ways = {
        "rows at once (a trainer)": rows_at_once,
        "rows alone": rows_alone,
        f"behind {LEFT} positions of padding": behind_padding,
        "token by token, with a cache (an engine)": token_by_token,
    }
    exact = rows_at_once(model.bfloat16().double(), ids, labels)
    print(f"{ROWS} rows of {LENGTH} tokens, the same weights (rounded to bfloat16)")
    print(f"mean log-probability {exact.mean():.2f}\n")
    print("| computed in | way | from float64: median | 99% | largest | from a trainer: largest |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        trainer = None
        for name, way in ways.items():
            found = way(model, ids, labels).double()
            trainer = found if trainer is None else trainer
            apart = (found - exact).abs().flatten()
            shown = [apart.median(), apart.quantile(0.99), apart.max(), (found - trainer).abs().max()]
            print(f"| {str(dtype)[6:]} | {name} | " + " | ".join(f"{float(value):.1e}" for value in shown) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    memory(options.vocabulary, options.tokens)
    with torch.no_grad():
        with torch.enable_grad():
            model, rows = trained(options.steps)
        differences(model, rows)


if __name__ == "__main__":
    main()
