"""One case of the fuzzer as a script of its own: the model, the plan and the loop that were drawn, and what is
compared.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import fuzz_habits
import fuzz_models

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support import comparison

Spec = dict[str, Any]

HEAD = """
import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshpar import ActivationCheckpoint, Compile, FullyShard, HybridShard, ModelLayout, Plan, Replicate, TensorLayout, TensorParallel, token_loss
from meshpar.testing import launch, whole

FILE = Path(__file__).with_suffix(".alone")
torch.set_default_dtype(torch.float64)
"""
ALONE = '''
class Alone:
    """What a loop asks of a plan, in one process."""

    data_rank, data_size = 0, 1

    def __init__(self, module):
        self.module = module

    def accumulate(self, parts, reduce_each=False):
        return parts

    def clip_grad_norm_(self, norm):
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def data_sum(self, value):
        return value

    def token_scale(self, count):
        return 1 / count
'''
ALONE_ON_A_MESH = """
def Alone(model):
    return Plan("", [{passes}], same_bits=True).apply(model, LAYOUT)
"""
COMPARE = "\n".join(
    map(inspect.getsource, (comparison.in_bytes, comparison.distance, comparison.apart, comparison.differences))
)
MAIN = """
def alone():
    torch.save({} if REFUSED else train(Alone), FILE)


def main():
    expected, got = torch.load(FILE), train(apply)
    found = [] if REFUSED else list(differences(expected, got, TOLERANCE, FLOOR))
    if dist.get_rank() == 0:
        print("was not refused" if REFUSED else "\\n".join(found) or "equals one process")


if __name__ == "__main__":
    launch(Path(__file__).stem, "alone", 1)
    launch(Path(__file__).stem, "main", {ranks})
"""


def source(spec: Spec, title: str = "") -> str:
    """Return the script: ``train(Alone)`` is one process, ``train(apply)`` the mesh."""
    parts = [
        f'"""{title or "A drawn case."}"""\n',
        HEAD,
        fuzz_models.source(spec["model"], method="other_method" in spec["loop"]["habits"]),
        _build(spec["model"]),
        _data(spec),
        _plan(spec),
        ALONE_ON_A_MESH.format(passes=_passes(spec, alone=True)) if spec["same_bits"] else ALONE,
        fuzz_habits.source(spec),
        COMPARE,
        MAIN.replace("{ranks}", str(ranks(spec))),
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def ranks(spec: Spec) -> int:
    """Return how many ranks the case runs on."""
    count = 1
    for size in spec["mesh"].values():
        count *= size
    return count


def expects_refusal(spec: Spec) -> bool:
    """Tell whether nothing but a refusal is right."""
    return any(fuzz_habits.HABITS[name].refused for name in spec["loop"]["habits"])


def _build(model: Spec) -> str:
    lines = [
        "def build():",
        "    torch.manual_seed(0)",
        "    model = Model()",
        "    for parameter in model.parameters():",
        "        parameter.data += 0.1 * torch.randn_like(parameter)  # so that no gain is one and no bias zero",
    ]
    frozen = {
        None: [],
        "stem": [f"    model.{'embed' if model['family'] == 'tokens' else 'stem'}.requires_grad_(False)"],
        "block": ["    model.blocks[0].requires_grad_(False)"],
        "biases": [
            "    for name, parameter in model.named_parameters():",
            '        parameter.requires_grad_(not name.endswith("bias"))',
        ],
    }[model["frozen"]]
    return "\n".join([*lines, *frozen, "    return model"])


def _data(spec: Spec) -> str:
    model, rows = spec["model"], spec["rows"]
    tokens = model["family"] == "tokens"
    inputs = {
        "tokens": f"{rows}, {spec['length']}",
        "features": f"{rows}, {model['inputs']}",
        "image": f"{rows}, 3, 6, 6",
    }[model["family"]]
    draw = (
        f"torch.randint({model['classes']}, ({inputs}), generator=draw)"
        if tokens
        else f"torch.randn({inputs}, generator=draw)"
    )
    labels = f"torch.randint({model['classes']}, ({inputs if tokens else f'{rows},'}), generator=draw)"
    cut = (
        ["    for row in range(len(y)):", "        y[row, : row % 3] = -100  # rows count different numbers of tokens"]
        if tokens
        else []
    )
    rows = f"::{spec['empty']}" if not spec["same_bits"] else f": 0 if number % {spec['empty']} else len(y)"
    empty = [f"    y[{rows}] = -100  # the first data rank counts nothing"] if spec["empty"] > 1 else []
    split = _loss_parallel(spec)
    loss = (
        'token_loss(logits, labels, reduction="sum")'
        if split
        else 'F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")'
    )
    size = f"1, {spec['length']}, {model['dim']}"
    return "\n".join([
        "def batch(number):", "    draw = torch.Generator().manual_seed(number)", f"    x = {draw}", f"    y = {labels}", *cut, *empty,
        "    return x, y",
        "", "", "def loss_sum(logits, labels):", f"    return {loss}",
        "", "", "EVAL = batch(99)[0]", f"HIDDEN = torch.randn({size}, generator=torch.Generator().manual_seed(7))",
        f"TOLERANCE, FLOOR = {_tolerance(spec)}", f"REFUSED, SAME_BITS = {expects_refusal(spec)}, {spec['same_bits']}",
    ])  # fmt: skip


def _loss_parallel(spec: Spec) -> bool:
    return any(pass_["knobs"].get("loss_parallel") for pass_ in spec["passes"])


def _tolerance(spec: Spec) -> str:
    if spec["same_bits"]:
        return "0.0, 0.0"
    # meshpar takes norms, token counts and the token loss in float32 whatever the model's dtype.
    single = _loss_parallel(spec) or spec["loop"]["clip"] == "par" or spec["loop"]["scale"] == "token_scale"
    return "1e-4, 1e-2" if single else "1e-9, 1e-6"


def _plan(spec: Spec) -> str:
    mesh = ",".join(f"{axis}={size}" for axis, size in spec["mesh"].items())
    layout, bits = _layout(spec), ", same_bits=True" * spec["same_bits"]
    return "\n".join([
        f'PLAN = Plan("{mesh}", [{_passes(spec)}]{bits})', f"LAYOUT = {layout}",
        "", "", "def apply(model):", "    return PLAN.apply(model, LAYOUT)",
    ])  # fmt: skip


def _passes(spec: Spec, *, alone: bool = False) -> str:
    return ", ".join(
        f"{pass_['name']}({', '.join(f'{name}={value!r}' for name, value in pass_['knobs'].items())})"
        for pass_ in spec["passes"]
        if not (alone and pass_["name"] in ("FullyShard", "HybridShard", "Replicate"))
    )


def table(spec: Spec) -> dict[str, str]:
    """Return the case's tensor-parallel table, with its mistake."""
    found, slip = fuzz_models.table(spec["model"], spec["layout"]), spec["layout"]["mistake"]
    if slip is not None:
        found = {pattern: style for pattern, style in found.items() if pattern != slip["pattern"]}
        found |= {slip["pattern"]: slip["style"]} if slip["style"] else {}
    return found


def _layout(spec: Spec) -> str:
    model, tensor = spec["model"], "tp" in spec["mesh"]
    if not tensor and not spec["layout"]["blocks"]:
        return "None"
    fields = [f"blocks={fuzz_models.block_patterns(model)!r}"] if spec["layout"]["blocks"] else []
    if tensor:
        counts, copied = fuzz_models.heads(model)
        styles = "".join(f"\n    {pattern!r}: {style!r}," for pattern, style in table(spec).items())
        heads = f", heads={counts}, copied_heads={copied}" if counts else ""
        fields.append(f"tensor=TensorLayout({{{styles}\n}}{heads})")
    fields += ['tied=(("embed.weight", "head.weight"),)'] if model["tied"] == "shared" else []
    return f"ModelLayout({', '.join(fields)})"
