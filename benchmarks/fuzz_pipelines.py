"""Loops over stages (``pp``), drawn by seed, against one process.

    python benchmarks/fuzz_pipelines.py --seeds 0:1000 --log fuzz.jsonl     goes on where the log ends
    python benchmarks/fuzz_pipelines.py --seeds 17 --print                  the seed's script, without running it
    python benchmarks/fuzz_pipelines.py --seeds 17                          what goes wrong, as the smallest script that shows it

A seed draws stages, their schedule and passes inside of them, a model, and one to four habits (``pipeline_habits.py``).
Verdicts are those of ``fuzz_after_apply.py``. Exits with 1 on a fault.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fuzz_after_apply
import fuzz_pool
import fuzz_script
import pipeline_habits

Spec = dict[str, Any]

PLANS = {
    "pp=2": "",
    "pp=3": "",
    "pp=4": "",
    "pp=2,dp_shard=2": "FullyShard()",
    "pp=2,dp_replicate=2": "Replicate()",
    "pp=2,tp=2": "TensorParallel()",
}
STEPS = 4
MODEL = """
import random

import numpy

from meshpar import MeshparError, PipelineParallel, StagesLayout

NOW, SEEN, FAILED, DRAW = [0], [], [], torch.Generator()
KINDS, BLOCKS = @kinds, @blocks


def first_of(output):
    return output[0] if isinstance(output, tuple) else output


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x, skip=None):
        y = x + self.down(torch.tanh(self.up(self.norm(x))))
        @block
        y = y if skip is None else y + 0.1 * skip
        return (y, None) if "tuples" in KINDS else y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8) if "features" in KINDS else nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias="tied" not in KINDS)
        if "tied" in KINDS:
            self.head.weight = self.embed.weight
        if "root" in KINDS:
            self.token, self.gains = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.ones(BLOCKS))
        if "between" in KINDS:
            self.middle = nn.Linear(8, 8)

    def forward(self, x):
        @enter
        h = skip = self.embed(x)
        if "root" in KINDS:
            h = torch.cat([self.token.expand(len(h), -1, -1), h], 1)
        for number, block in enumerate(self.blocks):
            @around
            h = first_of(block(h, skip) if "skips" in KINDS else block(h))
            if "root" in KINDS:
                h = h * self.gains[number]
            if "between" in KINDS and number == 0:
                h = self.middle(h)
        return self.head(self.norm(h[:, 1:] if "root" in KINDS else h))


def build():
    torch.manual_seed(0)
    return Net()


def batches(step, par):
    draw, found = torch.Generator().manual_seed(100 + step), []
    for _ in range(@micro):
        x = torch.randn(4, 4, 6, generator=draw) if "features" in KINDS else torch.randint(11, (4, 4), generator=draw)
        rows = slice(par.data_rank, None, par.data_size)
        found.append((x[rows], torch.randint(11, (4, 4), generator=draw)[rows]))
    return found


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def criterion(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten()) / @micro


LAYOUT = ModelLayout(
    blocks=("blocks.*",),
    tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} | ({} if "tied" in KINDS or not "@head" else {"head": "@head"}),
    stages=StagesLayout(
        carries=("embed",) if "skips" in KINDS else (),
        example=torch.zeros(2, 4, 6) if "features" in KINDS else None,
    ),
)
PLAN = Plan("@mesh", [PipelineParallel(@options), @passes])
TOLERANCE, FLOOR, REFUSED, MAY_FAIL = @tolerance, 1e-3, False, True


def apply(model):
    par = PLAN.apply(model, LAYOUT)
    par.rank = lambda: dist.get_rank()
    return par


def make(module):
    return @optimizer
"""
ALONE = """
    def backward(self, micro, loss):
        total, sums = torch.zeros((), dtype=torch.float32), {}
        for one in micro:
            value = loss(self.module, one)
            value, values = value if isinstance(value, tuple) else (value, {})
            value.backward()
            total, sums = total + value.detach(), {name: sums.get(name, 0) + one for name, one in values.items()}
        return (total, sums) if sums else total

    @torch.no_grad()
    def forward(self, micro, function):
        return [function(self.module, one) for one in micro]

    def whole(self, tensor):
        return tensor.detach()

    def rank(self):
        return 0
"""
LOOP = """
def train(apply):
    record, mine, model, NOW[0] = {}, {}, build(), -1
    SEEN.clear(), FAILED.clear()
    DRAW.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    @built
    par = apply(model)
    module = par.module
    torch.manual_seed(7)

    def mean(value):
        return par.data_sum(full(value).detach().clone()) / par.data_size

    def loss(module, batch):
        x, y = batch
        @before
        out = module(x)
        @behind
        value = criterion(out, y)
        @value
        return value

    optimizer = make(module)
    @start
    for step in range(@steps):
        NOW[0], micro = step, batches(step, par)
        @step
        @backward
        record[f"loss {step}"] = mean(total).double()
        mine |= {f"gradient {step} of {n}": whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        @between
        @update
        @stepped
    @end
    mine |= {f"weight {name}": whole(p.detach()).clone() for name, p in module.named_parameters()}
    every = [mine]
    if isinstance(par, Alone):
        return record | mine
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return record | {name: value for each in every for name, value in each.items()}
"""
PLAIN = {"backward": ("total = par.backward(micro, loss)",), "update": ("optimizer.step()", "optimizer.zero_grad()")}
LOOPING = ("step", "before", "behind", "value", "backward", "between", "update", "stepped")
CLASHES = ("tied features", "skips root", "tied tp")


def draw(seed: int) -> Spec:
    """Return the case of a seed: the same one every time, on every machine."""
    rng = random.Random(seed)
    mesh = list(PLANS)[seed % len(PLANS)]
    stages = int(mesh[3]) * rng.choice([1, 1, 2] if mesh[3] == "2" else [1])
    kinds = [kind for kind in ("tied", "root", "features", "tuples", "skips", "between") if rng.random() < 0.25]
    for clash in CLASHES:
        if all(part in [*kinds, "tp" * ("tp" in mesh)] for part in clash.split()):
            kinds.remove(clash.split()[0])
    spec: Spec = {
        "seed": seed, "mesh": mesh, "virtual": stages // int(mesh[3]), "schedule": rng.choice(["1f1b", "1f1b", "gpipe"]),
        "blocks": max(stages, 2) + rng.choice([0, 1, 2]), "micro": rng.choice([1, 2, 3, 4, 5]), "kinds": kinds,
        "head": rng.choice(["colwise_gather", ""]), "optimizer": rng.choice(fuzz_after_apply.OPTIMIZERS),
        "habits": [],
    }  # fmt: skip
    names = [name for name, _ in _parameters(spec)]
    groups = sorted({habit.group for habit in pipeline_habits.HABITS.values()})
    if "dp" in mesh:  # data ranks draw for their own rows
        groups.remove("drawn")
    for _ in range(rng.choice([1, 2, 2, 3, 4])):
        group = rng.choice(groups)
        name = rng.choice([name for name, habit in pipeline_habits.HABITS.items() if habit.group == group])
        habit = pipeline_habits.HABITS[name]
        replaced = {point for one in spec["habits"] for point in pipeline_habits.HABITS[one["name"]].at}
        drawn = {"name": name, "when": rng.choice(habit.when), "k": rng.randrange(STEPS - 1), "p": rng.choice(names)}
        if {"backward", "update"} & set(habit.at) & replaced or any(one["name"] == name for one in spec["habits"]):
            continue
        spec["habits"].append({**drawn, "m": "head"})
    return spec


def _parameters(spec: Spec) -> Iterator[tuple[str, str]]:
    kinds = spec["kinds"]
    yield from {"embed.weight": "", "head.weight": "", "norm.weight": "", "blocks.0.up.weight": ""}.items()
    yield from {"blocks.1.down.bias": "", f"blocks.{spec['blocks'] - 1}.norm.weight": ""}.items()
    yield from {name: kind for name, kind in (("token", "root"), ("gains", "root")) if kind in kinds}.items()


def source(spec: Spec, title: str = "") -> str:
    """Return the script: ``train(Alone)`` is one process, ``train(apply)`` the plan."""
    parts = [fuzz_script.HEAD, MODEL, fuzz_script.ALONE, ALONE, LOOP, fuzz_script.COMPARE, fuzz_script.MAIN]
    text = "\n\n".join([f'"""{title or "A drawn case."}"""', *parts]).replace("{ranks}", str(ranks(spec)))
    names = {habit["name"] for habit in spec["habits"]}
    for word, value in {
        "@kinds": repr(spec["kinds"]), "@blocks": spec["blocks"], "@micro": spec["micro"], "@mesh": spec["mesh"],
        "@options": f"schedule={spec['schedule']!r}, virtual={spec['virtual']}", "@passes": PLANS[spec["mesh"]],
        "@optimizer": spec["optimizer"], "@steps": STEPS, "@head": spec["head"],
        # meshpar takes norms and totals in float32
        "@tolerance": "1e-4" if names & {"clip", "clip_twice", "scaled_by_the_last"} else "1e-6",
    }.items():  # fmt: skip
        text = text.replace(word, str(value))
    return fuzz_after_apply.fill(text, spec["habits"], pipeline_habits.HABITS, PLAIN, LOOPING)


def ranks(spec: Spec) -> int:
    """Return how many ranks the case runs on."""
    return 4 if "," in spec["mesh"] else int(spec["mesh"][3])


def run(spec: Spec, pool: fuzz_pool.Pool) -> fuzz_pool.Outcome:
    """Run one case."""
    return pool.run(source(spec), ranks(spec))


def shrink(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """Return the case without the habits, kinds of model, passes and stages that it does not need to fail."""
    spec = fuzz_after_apply.shrink(spec, fails)
    smaller: list[Spec] = [{"kinds": [kind for kind in spec["kinds"] if kind != one]} for one in spec["kinds"]]
    smaller += [{"mesh": "pp=2", "blocks": 2 * spec["virtual"]}, {"schedule": "1f1b"}, {"virtual": 1}, {"micro": 2}]
    for change in smaller:
        kinds = [kind for kind in spec["kinds"] if kind in change.get("kinds", spec["kinds"])]
        simpler = {**spec, **change, "kinds": kinds}
        spec = simpler if simpler != spec and fails(simpler) else spec
    return spec


def about(spec: Spec) -> str:
    """Return a case in a line."""
    habits = " + ".join(
        f"{one['name']}({one['when'].replace('@k', str(one['k']))}, {one['k']}, {one['p']})" for one in spec["habits"]
    )
    return (
        f"{spec['mesh']} {spec['schedule']} virtual={spec['virtual']} blocks={spec['blocks']} micro={spec['micro']} "
        f"{'/'.join(spec['kinds'])} {habits}"
    )


if __name__ == "__main__":
    sys.exit(fuzz_after_apply.main(sys.modules[__name__]))
