"""What collectives of tp, cp and ep cost a step that waits for them at once, on two devices.

    python benchmarks/exposed.py [--axis tp ...] [--steps 12]
    python benchmarks/exposed.py --smoke          # tiny shapes on CPUs, to see that it runs

For each axis two ranks train a model of 1B (for ep: 8 experts) by ``meshpar train`` with ``profile``, in bfloat16, and
the rows of the profile's page say how long collectives ran, and how much of it no computation hid. The exposed share
is the most that starting collectives early could gain.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PASSES = {
    "tp": ("tp=2", [{"TensorParallel": {"sequence_parallel": True, "loss_parallel": True}}]),
    "cp": ("dp_shard=1,cp=2", ["ContextParallel", {"FullyShard": {"param_dtype": "bfloat16"}}]),
    "ep": ("dp_shard=1,ep=2", ["ExpertParallel", {"FullyShard": {"param_dtype": "bfloat16"}}]),
}
LARGE = {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192}
TINY = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}
SHOWN = ("| compute", "| exposed communication", "| gaps", "Collectives of")


def recipe_of(axis: str, folder: Path, *, smoke: bool, steps: int) -> dict[str, object]:
    """Return a recipe whose job writes a profile."""
    mesh, passes = PASSES[axis]
    shape = TINY if smoke else LARGE
    experts = {"experts": 8, "hidden": shape["hidden"] // 8, "qk_norm": True} if axis == "ep" else {}
    length = 64 if smoke else 4096
    return {
        "name": axis,
        "device": "cpu" if smoke else "auto",
        "mesh": mesh,
        "passes": passes,
        "dtype": "bfloat16" if axis == "tp" and not smoke else "float32",
        "model": shape | {"max_positions": length} | experts,
        "data": {
            "source": "files",
            "paths": [str(folder / "text.txt")],
            "tokenizer": "bytes",
            "sequence_length": length,
            "micro_batch": 1,
            "cache": str(folder / "cache"),
        },
        "training": {"steps": steps, "tensorboard": False},
        "profile": True,
        "output": str(folder / axis),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", nargs="*", choices=PASSES, default=list(PASSES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on CPUs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "text.txt").write_text("a plain text that a model reads again and again\n" * 20000)
        for axis in options.axis:
            file = folder / f"{axis}.yaml"  # JSON is YAML
            file.write_text(json.dumps(recipe_of(axis, folder, smoke=options.smoke, steps=options.steps)))
            subprocess.run(
                [sys.executable, "-m", "meshpar.launchers", "train", str(file), "--quiet"],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=None if options.smoke else subprocess.DEVNULL,
            )
            (page,) = (folder / axis).glob("**/summary.md")
            print(f"{axis}:")
            print("\n".join(line for line in page.read_text().splitlines() if line.startswith(SHOWN)), flush=True)


if __name__ == "__main__":
    main()
