"""Loops that do to a parallel module what users do after ``plan.apply``, drawn by seed, against one process.

    python benchmarks/fuzz_after_apply.py --seeds 0:1000 --log fuzz.jsonl     goes on where the log ends
    python benchmarks/fuzz_after_apply.py --seeds 17 --print                  the seed's script, without running it
    python benchmarks/fuzz_after_apply.py --seeds 17                          what goes wrong, as the smallest script that shows it

A seed draws a plan and one to four habits (``after_apply_habits.py``) at places of a loop of five steps, which become a
script. The script's loop runs in one process on whole batches and on ranks on their parts, in float64. Verdicts: exact
(losses, gradients and weights are equal), refused (by meshpar, with a remedy), torch (by torch, which says that plain
tensors and DTensors do not mix), alike (it fails in one process, and on ranks), and three faults: wrong, raw (another
error) and hang. Exits with 1 on a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import after_apply_habits as habits
import fuzz_pool
import fuzz_script

Spec = dict[str, Any]

PLANS = {
    "dp_shard=2": "FullyShard()",
    "dp_replicate=2,dp_shard=2": "HybridShard()",
    "dp_replicate=2": "Replicate()",
    "tp=2": "TensorParallel()",
    "dp_shard=2,tp=2": "TensorParallel(), FullyShard()",
}
STEPS = 5
PARAMETERS = (
    *("embed.weight", "table.weight", "head.weight", "head.bias"),
    *("blocks.0.up.weight", "blocks.1.down.weight", "blocks.0.norm.weight", "blocks.1.up.bias"),
)
LAYERS = ("head", "blocks.0.up", "blocks.1.down", "embed")
FAULTS = ("wrong", "raw", "hang")

MODEL = """
import importlib

NOW, SEEN = [0], []


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        @block_init

    def forward(self, x):
        h = torch.tanh(self.up(self.norm(x)))
        @inner
        y = x + self.down(h)
        @block
        return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.table = nn.Linear(6, 8), nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)
        @init

    def forward(self, x):
        @enter
        h = self.embed(x) + self.table((3 * x[:, 0].abs()).long() % 7)
        for block in self.blocks:
            h = block(h)
        @forward
        out = self.head(h)
        @out
        return out


def build():
    torch.manual_seed(0)
    return Net()


def batch(number):
    draw = torch.Generator().manual_seed(100 + number)
    return torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


EVAL, HIDDEN = batch(99)[0][:5], torch.ones(2, 8)  # of other sizes than a batch's part
LAYOUT = ModelLayout(blocks=("blocks.*",), tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
PLAN = Plan("@mesh", [@passes])
TOLERANCE, FLOOR, REFUSED, MAY_FAIL = @tolerance, 1e-3, False, True


def apply(model):
    return PLAN.apply(model, LAYOUT)


def make(module):
    return @optimizer
"""
LOOP = """
def train(apply):
    record, model, NOW[0] = {}, build(), 0
    SEEN.clear()
    @built
    par = apply(model)
    module = par.module

    def mean(value):
        return par.data_sum(full(value).detach().clone()) / par.data_size

    @applied
    optimizer = make(module)
    @start
    for step in range(@steps):
        x, y = (each[par.data_rank :: par.data_size] for each in batch(step))
        @step
        @call
        loss = F.mse_loss(out, y)
        @loss
        record[f"loss {step}"] = mean(loss)
        @backward
        record |= {f"gradient {step} of {name}": whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
        @between
        @update
        @stepped
    @end
    return record | {f"weight {name}": whole(p.detach()).clone() for name, p in module.named_parameters()}
"""
PLAIN = {
    "call": ("out = module(x)",),
    "backward": ("loss.backward()",),
    "update": ("optimizer.step()", "optimizer.zero_grad()"),
}
LOOPING = ("step", "call", "loss", "backward", "between", "update", "stepped")
OPTIMIZERS = (
    "torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)",
    "torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)",
)


def draw(seed: int) -> Spec:
    """Return the case of a seed: the same one every time, on every machine."""
    rng = random.Random(seed)
    spec: Spec = {
        "seed": seed,
        "mesh": list(PLANS)[seed % len(PLANS)],
        "optimizer": rng.choice(OPTIMIZERS),
        "habits": [],
    }
    groups = sorted({one_habit.group for one_habit in habits.HABITS.values()})
    replaced: set[str] = set()
    for _ in range(rng.choice([1, 2, 2, 3, 4])):
        group = rng.choice(groups)
        name = rng.choice([name for name, one_habit in habits.HABITS.items() if one_habit.group == group])
        habit = habits.HABITS[name]
        places = {"k": rng.randrange(STEPS - 1), "p": rng.choice(PARAMETERS), "m": rng.choice(LAYERS)}
        drawn = {"name": name, "when": rng.choice(habit.when), **places}
        if habit.replaces() & replaced or any(chosen["name"] == name for chosen in spec["habits"]):
            continue
        replaced |= habit.replaces()
        spec["habits"].append(drawn)
    return spec


def source(spec: Spec, title: str = "") -> str:
    """Return the script: ``train(Alone)`` is one process, ``train(apply)`` the plan."""
    text = "\n\n".join(
        [
            f'"""{title or "A drawn case."}"""',
            fuzz_script.HEAD,
            MODEL,
            fuzz_script.ALONE,
            ALONE,
            LOOP,
            fuzz_script.COMPARE,
        ]
    )
    text = (
        text.replace("@mesh", spec["mesh"])
        .replace("@passes", PLANS[spec["mesh"]])
        .replace("@optimizer", spec["optimizer"])
    )
    text = text.replace("@steps", str(STEPS)).replace(
        "@tolerance", "1e-4" if "par.clip" in str(_lines(spec)) else "1e-9"
    )
    text += fuzz_script.MAIN.replace("{ranks}", str(ranks(spec)))
    return fill(text, spec["habits"], habits.HABITS, PLAIN, LOOPING)


def fill(
    text: str,
    chosen: list[Spec],
    table: Mapping[str, habits.Habit],
    plain: Mapping[str, tuple[str, ...]],
    looping: Collection[str],
) -> str:
    """Return a script with the lines of habits at its points, which are lines such as ``@step``.

    Args:
        text: the script.
        chosen: the habits that were drawn.
        table: all habits by name.
        plain: point -> lines there where no habit replaces them.
        looping: points inside of the loop, where a habit's condition holds.
    """
    points = {point for habit in table.values() for point in habit.at} | set(plain) | set(looping) | {"applied"}
    lines = []
    for line in text.splitlines():
        point = line.strip()
        if point.startswith("@") and point[1:] in points:
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + statement for statement in _at(point[1:], chosen, table, plain, looping)]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


ALONE = """
    def load_state_dict(self, state):
        self.module.load_state_dict(state)

    def state_dict(self, **_):
        return self.module.state_dict()
"""


def _lines(spec: Spec) -> list[str]:
    return [line for drawn in spec["habits"] for lines in habits.HABITS[drawn["name"]].at.values() for line in lines]


def _at(
    point: str,
    chosen: list[Spec],
    table: Mapping[str, habits.Habit],
    plain: Mapping[str, tuple[str, ...]],
    looping: Collection[str],
) -> list[str]:
    lines: list[str] = []
    otherwise = plain.get(point, ())
    for drawn in chosen:
        statements = [_filled(line, drawn) for line in table[drawn["name"]].at.get(point, ())]
        when = _filled(drawn["when"], drawn)
        if statements and point in looping and when != habits.ALWAYS:
            statements = [f"if {when}:", *(f"    {line}" for line in statements)]
            statements += ["else:", *(f"    {line}" for line in otherwise)] if otherwise else []
        lines += statements
    return lines or list(otherwise)


def _filled(line: str, drawn: Spec) -> str:
    return line.replace("@k", str(drawn["k"])).replace("@p", drawn["p"]).replace("@m", drawn["m"])


def ranks(spec: Spec) -> int:
    """Return how many ranks the case runs on."""
    return 4 if "," in spec["mesh"] else 2


def run(spec: Spec, pool: fuzz_pool.Pool) -> fuzz_pool.Outcome:
    """Run one case."""
    return pool.run(source(spec), ranks(spec))


def shrink(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """Return the case without each habit that it does not need to fail."""
    for habit in list(spec["habits"]):
        fewer = {**spec, "habits": [other for other in spec["habits"] if other is not habit]}
        if fails(fewer):
            spec = fewer
    return spec


def about(spec: Spec) -> str:
    """Return a case in a line."""
    drawn = (
        f"{habit['name']}({habit['when'].replace('@k', str(habit['k']))}, {habit['p']}, {habit['m']})"
        for habit in spec["habits"]
    )
    return f"{spec['mesh']} {' + '.join(drawn)}"


def main(fuzzer: Any = None) -> int:
    """Run the seeds of a fuzzer, a module with the functions of this one, and print what became of them."""
    fuzzer = fuzzer or sys.modules[__name__]
    parser = argparse.ArgumentParser(description=fuzzer.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="FIRST:END, or seeds with commas")
    parser.add_argument("--log", type=Path, help="a line of JSON for each seed; seeds that it has are not run again")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds after which no more seed begins")
    parser.add_argument("--timeout", type=float, default=40.0, help="seconds after which a case hangs")
    parser.add_argument("--print", action="store_true", help="print the scripts and run nothing")
    args = parser.parse_args()
    first, colon, end = args.seeds.partition(":")
    seeds = list(range(int(first), int(end))) if colon else [int(part) for part in args.seeds.split(",")]
    if args.print:
        print(*(fuzzer.source(spec, fuzzer.about(spec)) for spec in map(fuzzer.draw, seeds)), sep="\n")
        return 0
    results = [json.loads(line) for line in args.log.read_text().splitlines()] if args.log and args.log.exists() else []
    known, began = {result["seed"] for result in results}, time.monotonic()
    pool = fuzz_pool.Pool(size=4, timeout_s=args.timeout)
    try:
        for seed in seeds:
            if seed in known or time.monotonic() - began > args.limit:
                continue
            results.append(_result(fuzzer, fuzzer.draw(seed), pool))
            if args.log:
                with args.log.open("a") as log:
                    log.write(json.dumps(results[-1]) + "\n")
    finally:
        pool.close()
    print(summary(results, fuzzer.PLANS))
    return int(any(result["kind"] in FAULTS for result in results))


def _result(fuzzer: Any, spec: Spec, pool: fuzz_pool.Pool) -> dict[str, Any]:
    outcome = fuzzer.run(spec, pool)
    kind = "torch" if outcome.text.startswith("torch refuses") else outcome.kind
    if outcome.kind in FAULTS:
        small = fuzzer.shrink(spec, lambda smaller: fuzzer.run(smaller, pool).kind == outcome.kind)
        print(
            f"\n# seed {spec['seed']}, {outcome.kind}: {fuzzer.about(small)}\n# "
            f"{outcome.text[:1500]}\n{outcome.trace[-2500:]}",
            flush=True,
        )
        spec = small
    return {
        "seed": spec["seed"], "kind": kind, "mesh": spec["mesh"], "seconds": round(outcome.seconds, 2),
        "about": fuzzer.about(spec), "together": outcome.together, "text": outcome.text[:600],
    }  # fmt: skip


def summary(results: list[dict[str, Any]], plans: Iterable[str]) -> str:
    """Return a table of verdicts by plan."""
    kinds = ("exact", "refused", "torch", "alike", "wrong", "raw", "hang", "broken")
    rows = [f"{'':28}" + "".join(f"{kind:>9}" for kind in kinds)]
    for mesh in [*plans, ""]:
        counts = Counter(result["kind"] for result in results if mesh in ("", result["mesh"]))
        rows.append(f"{mesh or f'{len(results)} draws':28}" + "".join(f"{counts[kind]:9}" for kind in kinds))
    apart = sum(result["kind"] == "refused" and not result.get("together", True) for result in results)
    return "\n".join([*rows, f"refused on some ranks first: {apart}"])


if __name__ == "__main__":
    sys.exit(main())
