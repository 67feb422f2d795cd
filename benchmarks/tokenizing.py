"""Measure tokenisation and packing of a large file of JSON lines: memory beside the tokenizer, and speed against
`tokenizers` alone.

    python benchmarks/tokenizing.py --megabytes 1000 --runs 1

The file holds the sources of Python's standard library as documents, repeated in another order each time. Each figure
comes from a process of its own. Memory is the peak of resident bytes above those of the process that has loaded the
tokenizer. Speed compares reading the file, preparing the tokens and packing them by best fit with the seconds in
``encode_batch_fast`` alone, on the same documents in batches of a MiB, in pieces of 8 KiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

from meshpar.training import PackedTokens
from meshpar.training.text import TextSource
from meshpar.training.tokenizer import load_tokenizer
from meshpar.training.tokens import prepare_tokenizer, prepare_tokens


def peak() -> float:
    """Return the peak of resident MiB; getrusage would begin with that of the process that started this one."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measured(what: str, folder: Path) -> dict[str, float]:
    """Run one side in this process."""
    text = folder / "text.jsonl"
    tokenizer = load_tokenizer(folder / "tokenizer")
    tokenizer.encode("warm")
    before, start = peak(), time.perf_counter()
    if what == "meshpar":
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            file = prepare_tokens(TextSource(inputs=(str(text),)), tokenizer, cache).train
            tokens, packed = file.tokens - file.documents, PackedTokens(file, 2048, packing="best_fit")
            print(f"{file.documents:,} documents, {packed}", file=sys.stderr)
        seconds = time.perf_counter() - start
    else:
        seconds, tokens, pieces = 0.0, 0, list[str]()
        with text.open("rb") as lines:
            for line in chain(lines, [b""]):
                document = json.loads(line)["text"] if line else ""
                pieces += [document[at : at + (1 << 13)] for at in range(0, len(document), 1 << 13)]
                if sum(map(len, pieces)) >= 1 << 20 or not line:
                    start = time.perf_counter()
                    tokens += sum(
                        len(encoding) for encoding in tokenizer.fast.encode_batch_fast(pieces, add_special_tokens=False)
                    )
                    seconds += time.perf_counter() - start
                    pieces = []
    return {"seconds": seconds, "cpu": time.process_time(), "mib": peak() - before, "tokens": tokens}


def main() -> None:
    """Make the text, run both sides in turn, and print medians."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--megabytes", type=int, default=1000)
    options.add_argument("--runs", type=int, default=1)
    options.add_argument(
        "--folder", default=None, help="where the file is made; the system's folder for temporary files by default"
    )
    options.add_argument("--side", nargs=2, default=None, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.side:
        print(json.dumps(measured(given.side[0], Path(given.side[1]))))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        library = TextSource(inputs=("stdlib",))
        prepare_tokenizer("bpe", [library], folder / "cache", vocab_size=8192).save(folder / "tokenizer")
        documents, drawn, size = list(library.documents()), random.Random(0), 0
        with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
            while size < given.megabytes * 1_000_000:
                document = drawn.choice(documents)
                size += file.write(json.dumps({"text": document}) + "\n")
        found: dict[str, list[dict[str, float]]] = {"meshpar": [], "tokenizers": []}
        for _ in range(given.runs):
            for side, runs in found.items():
                command = [sys.executable, __file__, "--side", side, name]
                runs.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
        size = (folder / "text.jsonl").stat().st_size / 1e6
    seconds = {side: statistics.median(run["seconds"] for run in runs) for side, runs in found.items()}
    memory = statistics.median(result["mib"] for result in found["meshpar"])
    print(f"{size:.0f} MB of JSON lines, {os.cpu_count()} cores, median of {given.runs}")
    print(
        f"meshpar {size / seconds['meshpar']:.2f} MB/s, tokenizers alone {size / seconds['tokenizers']:.2f} MB/s: ",
        end="",
    )
    print(f"{seconds['tokenizers'] / seconds['meshpar']:.2f} of its speed; {memory:.0f} MiB beside the tokenizer")
    print(
        "CPU seconds: "
        + ", ".join(f"{side} {statistics.median(run['cpu'] for run in runs):.1f}" for side, runs in found.items())
    )


if __name__ == "__main__":
    main()
