"""Measure tokenisation of one large file: memory beside the tokenizer's own, and speed against `tokenizers` alone.

    python benchmarks/tokenizing.py --megabytes 100 --runs 3

Each figure comes from a process of its own. Memory is the peak of resident bytes above those of the process that has loaded the
tokenizer. Speed compares preparing the token file with ``encode_batch_fast`` alone, on the same text in batches of pieces of 8 KiB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshpar.training.text import TextSource
from meshpar.training.tokenizer import load_tokenizer
from meshpar.training.tokens import prepare_tokenizer, prepare_tokens


def peak() -> float:
    """Return the peak of resident MiB; getrusage would begin with that of the process that started this one."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measured(what: str, folder: Path) -> dict[str, float]:
    """Run one side in this process."""
    text = folder / "text.txt"
    tokenizer = load_tokenizer(folder / "tokenizer")
    tokenizer.encode("warm")
    before, start = peak(), time.perf_counter()
    if what == "meshpar":
        with tempfile.TemporaryDirectory() as cache:
            tokens = prepare_tokens(TextSource(inputs=(str(text),)), tokenizer, cache).train.tokens
    else:
        whole = text.read_text(encoding="utf-8")
        start, tokens = time.perf_counter(), 0
        for at in range(0, len(whole), 1 << 20):
            part = whole[at : at + (1 << 20)]
            found = tokenizer.fast.encode_batch_fast(
                [part[each : each + (1 << 13)] for each in range(0, len(part), 1 << 13)], add_special_tokens=False
            )
            tokens += sum(len(each) for each in found)
    return {"seconds": time.perf_counter() - start, "mib": peak() - before, "tokens": tokens}


def main() -> None:
    """Make the text, run both sides in turn, and print medians."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--megabytes", type=int, default=100)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--side", nargs=2, default=None, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.side:
        print(json.dumps(measured(given.side[0], Path(given.side[1]))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = TextSource(inputs=("stdlib",))
        prepare_tokenizer("bpe", [library], folder / "cache", vocab_size=8192).save(folder / "tokenizer")
        documents = "\n".join(library.documents())
        with (folder / "text.txt").open("w", encoding="utf-8") as file:
            for number in range(given.megabytes * 1_000_000 // len(documents) + 1):
                file.write(f"# {number}\n{documents}")
        found: dict[str, list[dict[str, float]]] = {"meshpar": [], "tokenizers": []}
        for _ in range(given.runs):
            for side, runs in found.items():
                command = [sys.executable, __file__, "--side", side, name]
                runs.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        size = (folder / "text.txt").stat().st_size / 1e6
    seconds = {side: statistics.median(each["seconds"] for each in runs) for side, runs in found.items()}
    memory = statistics.median(each["mib"] for each in found["meshpar"])
    print(f"{size:.0f} MB of text, {os.cpu_count()} cores, median of {given.runs}")
    print(f"meshpar {size / seconds['meshpar']:.2f} MB/s, tokenizers alone {size / seconds['tokenizers']:.2f} MB/s: ", end="")
    print(f"{seconds['tokenizers'] / seconds['meshpar']:.2f} of its speed; {memory:.0f} MiB beside the tokenizer")


if __name__ == "__main__":
    main()
