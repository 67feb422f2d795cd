"""Every architecture of transformers under every plan, against one process: loss, gradients, export.

    python benchmarks/architectures.py                          the whole matrix, resumed from its JSON
    python benchmarks/architectures.py --only llama,qwen3_moe   some of it
    python benchmarks/architectures.py --family seq2seq         one family: causal, seq2seq, masked, classifier
    python benchmarks/architectures.py --table                  write docs/architectures.md from the JSON
    python benchmarks/architectures.py --streams                par.published() against the exported file, byte for byte

A tiny random model of each architecture (``tiny.py``) runs a forward and a backward in float32 on gloo ranks, on rows
that the data ranks share out, and in one process on all rows. Exact: the loss and every gradient agree to ``TOLERANCE``
of the tensor's largest value. Four processes serve all architectures; one that fails alone or hangs is killed with its
peers, which is recorded, and the next begin anew.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from tests.support.patience import patient  # noqa: E402

RESULTS = Path(tempfile.gettempdir()) / "meshpar-architectures.json"
TABLE = HERE.parent / "docs" / "architectures.md"
TOLERANCE = 1e-4
FLOOR = 1e-3  # of the model's largest gradient: what is zero by theory holds rounding noise only
TIMEOUT_S = 60.0

# name -> (mesh, ranks); the ranks 0 and 1 and the ranks 2 and 3 run a plan of two ranks each at the same time
PLANS: dict[str, tuple[str, int]] = {
    "FSDP 2": ("dp_shard=2", 2),
    "TP 2": ("tp=2", 2),
    "TP 4": ("tp=4", 4),
    "FSDP 2 x TP 2": ("dp_shard=2,tp=2", 4),
    "HSDP 2x2": ("dp_replicate=2,dp_shard=2", 4),
    "CP 2": ("dp_shard=1,cp=2", 2),
    "CP 2 by heads": ("dp_shard=1,cp=2", 2),
    "EP 2": ("dp_shard=1,ep=2", 2),
    "EP 2 x TP 2": ("dp_shard=1,ep=2,tp=2", 4),
    "documents": ("dp_shard=1", 1),
    "PP 2": ("pp=2", 2),
    "PP 2 x FSDP 2": ("pp=2,dp_shard=2", 4),
    "bits on FSDP 2": ("dp_shard=2", 2),
    "bits on TP 2": ("tp=2", 2),
}
BITS = ("bits on FSDP 2", "bits on TP 2")
PARTS = 4  # of features, of which each rank of tp has two
PAIRS = (("FSDP 2", "TP 2"), ("CP 2", "CP 2 by heads"), BITS)
ROUNDS = (
    *(((one, (0, 1)), (other, (2, 3))) for one, other in PAIRS),
    (("EP 2", (0, 1)), ("documents", (2,))),
    (("PP 2", (0, 1)),),
    *(((plan, (0, 1, 2, 3)),) for plan, (_, ranks) in PLANS.items() if ranks == 4),
)
EXPORTED, ELSE = "FSDP 2 x TP 2", "HSDP 2x2"  # the second where the first is refused
STREAMED = (
    (("FSDP 2", (0, 1)), ("TP 2", (2, 3))),
    (("EP 2", (0, 1)), ("CP 2", (2, 3))),
    (("FSDP 2 x TP 2", (0, 1, 2, 3)),),
)
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers",
    "meshpar",
    "meshpar.checkpoints",
]
ALONE = "one process"


def cases(family: str | None = None) -> list[tuple[str, str]]:
    """Return (model type, task) of everything that the installed transformers maps to a language model."""
    from transformers.models.auto import modeling_auto

    names = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "classifier": {
            "bert": "",
            "distilbert": "",
            "roberta": "",
            "deberta-v2": "",
            "llama": "",
            "qwen3": "",
            "t5": "",
            "gpt2": "",
        },
    }
    return [(name, task) for task, known in names.items() if family in (None, task) for name in sorted(known)]


# ------------------------------------------------------------------------------------------------------------ in a rank


def serve(connection: Any, unverified: bool) -> None:
    """Run what the parent asks for until it hangs up."""
    import logging
    import warnings

    import torch
    import transformers

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if unverified:
        from meshpar.models.huggingface import styles

        styles.VERIFIED = tuple(transformers.CONFIG_MAPPING.keys())
    state: dict[str, Any] = {}
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        began = time.monotonic()
        try:
            answer = _answer(state, command)
        except Exception as error:  # noqa: BLE001  what goes wrong is the result
            answer = {"verdict": "crashed", "why": _where(error), "trace": traceback.format_exc()[-3000:]}
        connection.send(answer | {"seconds": round(time.monotonic() - began, 2)})


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(frame.filename).name}:{frame.lineno})"


def _answer(state: dict[str, Any], command: dict[str, Any]) -> dict[str, Any]:
    if state.get("case") != command["case"]:
        state.clear()
        state["case"] = command["case"]
        _prepare(state, *command["case"], alone=not command.get("stream"))
    if command["plan"] == ALONE:
        return {
            "verdict": "exact",
            "parameters": state["parameters"],
            "tp_plan": state["tp_plan"],
            "class": state["class"],
        }
    return (_bits if command["plan"] in BITS else _under_plan)(state, command)


def _prepare(state: dict[str, Any], model_type: str, task: str, alone: bool) -> None:
    """Build the model, and run it in one process."""
    import copy

    import tiny

    model = tiny.tiny_model(model_type, task)
    state["batch"] = tiny.tiny_batch(task)
    state["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    if state["parameters"] > 4_000_000:
        raise ValueError(f"the tiny model has {state['parameters']} parameters; its config needs rules in tiny.py")
    state["tp_plan"] = bool(getattr(model, "tp_plan", None))
    state["class"] = type(model).__name__
    state["model"] = model
    if not alone:
        return
    one = copy.deepcopy(model)
    total, count = loss_sum(one, state["batch"], list(range(len(state["batch"]["input_ids"]))))
    (total / count).backward()
    state["loss"] = float(total.detach() / count)
    state["gradients"] = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
    if not any(bool(grad.abs().max() > 0) for grad in state["gradients"].values()):
        raise ValueError("every gradient is zero")


def loss_sum(model: Any, batch: dict[str, Any], rows: list[int], par: Any = None) -> tuple[Any, int]:
    """Return the summed cross entropy of the model's logits for those ``rows``, against labels that a row's number
    decides.
    """
    import torch

    from meshpar import token_loss

    inputs = {name: value[rows] for name, value in batch.items()}
    output = model(**(inputs if par is None else par.split(inputs)))
    logits = output.logits if hasattr(output, "logits") else output.prediction_logits
    per_row = logits.reshape(len(rows), -1, logits.shape[-1])
    parts = 1 if par is None else par.loss_size // par.data_size
    labels = []
    for row in rows:
        generator = torch.Generator().manual_seed(100 + row)
        label = torch.randint(logits.shape[-1], (per_row.shape[1] * parts,), generator=generator)
        if len(label) > 1:
            label[torch.arange(len(label)) % (row + 3) == 1] = -100  # so that rows count different numbers of tokens
        labels.append(label)
    stacked = torch.stack(labels) if par is None else par.split(torch.stack(labels))
    return token_loss(per_row, stacked, reduction="sum"), int((stacked != -100).sum())


def _under_plan(state: dict[str, Any], command: dict[str, Any]) -> dict[str, Any]:
    import copy

    from meshpar import MeshparError, PlanError

    with _group(command["store"], command["rank"], command["ranks"]):
        try:
            par = _plan(command["plan"], command["styles"]).apply(copy.deepcopy(state["model"]))
        except PlanError as error:
            return _refusal(error)
        if command["stream"]:
            return _streamed(par, Path(command["folder"]) / f"export {command['plan']}")
        try:
            compare = _documents if command["plan"] == "documents" else _stages if "PP" in command["plan"] else _compare
            found = compare(state, par)
        except MeshparError as error:  # the first forward's own test of the split, or ranks that disagree
            return _refusal(error)
        return found | (_exported(state, par, command["folder"]) if command["export"] else {})


@contextmanager
def _group(store: str, rank: int, ranks: int) -> Iterator[None]:
    from datetime import timedelta

    import torch.distributed as dist

    meeting, timeout = dist.FileStore(store, ranks), timedelta(seconds=patient(TIMEOUT_S) - 10)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks, timeout=timeout)
    try:
        dist.barrier()  # one that is refused at once would leave while others still connect
        yield
    finally:
        dist.destroy_process_group()


def _refusal(error: Exception) -> dict[str, Any]:
    problems = getattr(error, "problems", None)
    return {"verdict": "refused", "why": "; ".join(problems) if problems else " ".join(str(error).split())[:300]}


def _bits(state: dict[str, Any], command: dict[str, Any]) -> dict[str, Any]:
    """Compare a step under ``same_bits`` with that of one process bit by bit, each row a micro-batch."""
    import copy

    from meshpar import MeshparError
    from tests.support.comparison import differing_bits

    rank, ranks, results = command["rank"], command["ranks"], []
    for store, *place in ((f"{command['store']}-{rank}", 0, 1), (command["store"], rank, ranks)):
        with _group(store, *place):
            try:
                plan = _plan(command["plan"], command["styles"], alone=place == [0, 1])
                results.append(_step(plan.apply(copy.deepcopy(state["model"])), state["batch"]))
            except MeshparError as error:
                return _refusal(error)
    if wrong := differing_bits(*results):
        return {"verdict": "wrong", "why": f"{len(wrong)} of {len(results[0])} differ by a bit: {', '.join(wrong[:6])}"}
    return {"verdict": "exact", "worst": 0.0}


def _step(par: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the loss, the gradients, their norm and the weights after a step of AdamW."""
    import torch

    from meshpar.testing import whole

    rows = [torch.tensor([row]) for row in range(par.data_rank, len(batch["input_ids"]), par.data_size)]
    loss = par.backward(rows, lambda module, row: loss_sum(module, batch, row.tolist())[0] * par.loss_size)
    named = dict(par.module.named_parameters())
    found = {f"gradient of {name}": whole(one.grad) for name, one in named.items() if one.grad is not None}
    found |= {"loss": par.data_sum(loss) / par.loss_size, "norm": par.clip_grad_norm_(1.0)}
    torch.optim.AdamW(named.values(), lr=1e-2).step()
    return found | {name: whole(one) for name, one in named.items()}


def _plan(name: str, styles: dict[str, Any], *, alone: bool = False) -> Any:
    from meshpar import ContextParallel, ExpertParallel, FullyShard, HybridShard, PipelineParallel, Plan, TensorParallel

    mesh, bits = PLANS[name][0], {"parts": PARTS} if name in BITS else {}
    passes: list[Any] = [PipelineParallel()] if "pp=" in mesh else []
    passes += [ExpertParallel()] if ",ep=" in mesh else []
    passes += [TensorParallel(styles=styles, **bits)] if "tp" in mesh else []
    passes += [ContextParallel(transport="heads" if "heads" in name else "gather")] if "cp" in mesh else []
    passes += [HybridShard() if "dp_replicate" in mesh else FullyShard()] if "dp_shard" in mesh else []
    if alone:
        mesh, passes = "", [one for one in passes if isinstance(one, TensorParallel)]
    return Plan(mesh, passes, same_bits=bool(bits))


def _documents(state: dict[str, Any], par: Any) -> dict[str, Any]:
    """Compare rows of two documents each with their documents one by one: loss and gradients."""
    import torch

    from meshpar import token_loss
    from meshpar.training.documents import check_documents

    if state["case"][1] != "causal":
        return {"verdict": "refused", "why": "documents are packed for causal language models"}
    config = par.module.config
    for section in (config, config.get_text_config()):
        section.use_cache = False  # with a cache transformers does not look for documents
    ids = state["batch"]["input_ids"]
    length, first = ids.shape[1], ids.shape[1] // 3 + 1
    check_documents(par, par.module, int(ids.max()) + 1, length)
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(len(ids), -1)
    labels = ids.flip(1)

    def gradients(loss: Any) -> tuple[float, dict[str, Any]]:
        loss.backward()
        found = {
            name: parameter.grad.full_tensor().clone()
            for name, parameter in par.module.named_parameters()
            if parameter.grad is not None
        }
        par.module.zero_grad()
        return float(loss), found

    def of(ids: Any, labels: Any, **inputs: Any) -> Any:
        return token_loss(par.module(input_ids=ids, **inputs).logits, labels, reduction="sum")

    loss, found = gradients(of(ids, labels, position_ids=positions))
    pieces = [(ids[:, part], labels[:, part]) for part in (slice(first), slice(first, None))]
    alone, expected = gradients(sum(of(*piece) for piece in pieces))
    return _verdict(abs(loss - alone) / abs(alone), found, expected)


def _compare(state: dict[str, Any], par: Any) -> dict[str, Any]:
    from meshpar.testing import whole

    rows = [row for row in range(len(state["batch"]["input_ids"])) if row % par.data_size == par.data_rank]
    total, count = loss_sum(par.module, state["batch"], rows, par)
    scaled = total * par.token_scale(count)
    scaled.backward()
    loss = float(par.data_sum(scaled.detach().clone()) / par.loss_size)
    found = {
        name: whole(parameter.grad) for name, parameter in par.module.named_parameters() if parameter.grad is not None
    }
    return _verdict(abs(loss - state["loss"]) / max(abs(state["loss"]), 1e-6), found, state["gradients"])


def _stages(state: dict[str, Any], par: Any) -> dict[str, Any]:
    """Compare stages, each row a micro-batch: loss, and each gradient on the stages that have its parameter.

    Both sum the loss and scale the gradients: of a mean, one process alone gives gradients of recurrent decays, where
    large terms cancel, that are off by 2e-4.
    """
    import copy

    import torch
    import torch.distributed as dist

    from meshpar.testing import whole

    def loss(module: Any, rows: Any) -> Any:
        total, count = loss_sum(module, state["batch"], rows.tolist())
        return total, {"count": torch.tensor(float(count))}

    rows = [
        torch.tensor([row]) for row in range(len(state["batch"]["input_ids"])) if row % par.data_size == par.data_rank
    ]
    total, values = par.backward(rows, loss)
    scale = par.token_scale(values["count"])
    mean = float(par.data_sum(total * scale) / par.loss_size)
    held = dict(par.module.named_parameters())
    found = {name: whole(one.grad) * scale for name, one in held.items() if one.grad is not None}
    one = copy.deepcopy(state["model"])
    summed, count = loss_sum(one, state["batch"], list(range(len(state["batch"]["input_ids"]))))
    summed.backward()
    expected = {name: p.grad / count for name, p in one.named_parameters() if p.grad is not None}
    wanted = {name: grad for name, grad in expected.items() if name in held}
    off = abs(mean - state["loss"]) / max(abs(state["loss"]), 1e-6)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (_verdict(off, found, wanted, expected), list(held)))
    if lost := set(expected) - {name for _, names in every for name in names}:
        return {"verdict": "wrong", "why": f"no stage has {min(lost)}"}
    return max((verdict for verdict, _ in every), key=lambda verdict: (verdict["verdict"] == "wrong", verdict["worst"]))


def _verdict(
    worst: float, found: dict[str, Any], expected: dict[str, Any], model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return whether the gradients are the expected ones, given how far the loss is off; no gradient is zero.

    ``model``: the gradients of the whole model, where those are of a stage.
    """
    where, wrong = "loss", []
    typical = max(float(grad.abs().max()) for grad in (model or expected).values())
    for name in {**expected, **found}:
        got, want = found.get(name, 0), expected.get(name, 0)
        scale = max(float(abs(expected[name]).max()) if name in expected else 0.0, FLOOR * typical)
        off = float(abs(got - want).max()) / scale
        if not off <= TOLERANCE:
            wrong.append((off, name))
        if not off <= worst:
            worst, where = off, name
    if not worst <= TOLERANCE:
        names = ", ".join(f"{name} {off:.1e}" for off, name in sorted(wrong, reverse=True)[:6])
        return {
            "verdict": "wrong",
            "why": f"{where} off by {worst:.1e}; {len(wrong)} of {len(expected)}: {names}",
            "worst": worst,
        }
    return {"verdict": "exact", "worst": worst}


def _exported(state: dict[str, Any], par: Any, folder: str) -> dict[str, Any]:
    """Export the model, load the export with transformers and compare every tensor that its state dict has."""
    import torch
    import torch.distributed as dist

    from meshpar.checkpoints import export_module

    target = Path(folder) / "export"
    try:
        export_module(par, target)
        answer: dict[str, Any] = {"export": "exact"}
        if dist.get_rank() == 0:
            kind = type(state["model"])
            loaded, report = kind.from_pretrained(target, output_loading_info=True, dtype=torch.float32)
            problems = {key: sorted(value)[:4] for key, value in report.items() if value}
            want, have = dict(state["model"].named_parameters()), loaded.state_dict()
            differ = [name for name in want if name not in have or not torch.equal(want[name], have[name])]
            if differ or problems:
                answer = {"export": f"wrong: {len(differ)} tensors differ: {', '.join(differ[:4])} {problems or ''}"}
        dist.barrier()
    except Exception as error:  # noqa: BLE001  what goes wrong is the result
        answer = {"export": f"crashed: {_where(error)}", "trace": traceback.format_exc()[-3000:]}
    return answer


def _streamed(par: Any, target: Path) -> dict[str, Any]:
    """Compare the stream with the exported file: names, order, dtypes, shapes and bytes."""
    import torch
    import torch.distributed as dist

    from meshpar.checkpoints import export_module

    wrong, names = [], 0
    for dtype in (None, torch.bfloat16):
        to = target.with_name(f"{target.name} {dtype}")
        export_module(par, to, dtype)
        written = _in_file(to / "model.safetensors") if dist.get_rank() == 0 else {}
        names = 0
        for (name, tensor), expected in zip_longest(par.published(dtype, bucket="64KiB"), written.items()):
            if dist.get_rank() == 0:
                names += 1
                got = (name, str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8))
                wanted = None if expected is None else (expected[0], *expected[1])
                if wanted is None or got[:3] != wanted[:3] or not torch.equal(got[3], wanted[3]):
                    wrong.append(f"{name} in {dtype or 'its own dtype'}")
    if wrong or (dist.get_rank() == 0 and names == 0):
        return {"verdict": "wrong", "why": f"{len(wrong)} of {names} tensors differ: {', '.join(wrong[:6])}"}
    return {"verdict": "exact", "tensors": names}


def _in_file(path: Path) -> dict[str, tuple[str, tuple[int, ...], Any]]:
    """Return name -> (dtype, shape, bytes) of a safetensors file, in its order."""
    import torch
    from safetensors import safe_open

    data, found = path.read_bytes(), {}
    size = int.from_bytes(data[:8], "little")
    header = {name: entry for name, entry in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}
    with safe_open(path, "pt") as file:
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            tensor = file.get_tensor(name)
            found[name] = (str(tensor.dtype), tuple(tensor.shape), tensor.flatten().view(torch.uint8))
    return found


# ----------------------------------------------------------------------------------------------------------- the parent


class Pool:
    """Four processes that keep transformers loaded."""

    def __init__(self, unverified: bool) -> None:
        self._unverified = unverified
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._started: list[tuple[Any, Any]] = []

    def ask(self, commands: dict[int, dict[str, Any]], timeout_s: float) -> dict[int, dict[str, Any]]:
        """Send each process its command; return the answers, and begin anew with fresh processes where one does not
        answer.
        """
        self._start()
        for place, command in commands.items():
            self._started[place][1].send(command)
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + patient(timeout_s)
        while len(answers) < len(commands):
            waiting = {self._started[place][1]: place for place in commands if place not in answers}
            for connection in (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
                place = waiting[connection]  # type: ignore[index]
                try:
                    answers[place] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[place] = {"verdict": "crashed", "why": "the process ended"}
                if answers[place]["verdict"] == "crashed":
                    deadline = min(deadline, time.monotonic() + patient(2))  # its peers may wait for it
            if not ready:
                break
        if len(answers) < len(commands) or any(answer.get("why") == "the process ended" for answer in answers.values()):
            self.close()
        return answers

    def _start(self) -> None:
        if self._started:
            return
        for _ in range(4):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=serve, args=(theirs, self._unverified), daemon=True)
            process.start()
            theirs.close()
            self._started.append((process, ours))

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._started:
            process.kill()
            process.join()
            connection.close()
        self._started = []


def measure(
    pool: Pool, case: tuple[str, str], styles: dict[str, Any] | None = None, rounds: Any = ROUNDS, stream: bool = False
) -> dict[str, Any]:
    """Return plan -> result for one architecture; ``styles`` are laid over its tensor-parallel table. ``stream``:
    compare its streamed weights alone.
    """
    began = time.monotonic()
    command = {"case": case, "plan": ALONE, "stream": stream}
    alone = _joined(pool.ask({0: command}, TIMEOUT_S), 1)
    results: dict[str, Any] = {ALONE: alone}
    if alone["verdict"] == "exact":
        for together in rounds:
            export = [
                plan
                for plan, _ in together
                if plan == EXPORTED or (plan == ELSE and "export" not in results.get(EXPORTED, {}))
            ]
            results |= _round(pool, case, together, styles or {}, export, stream)
    return {"plans": results, "seconds": round(time.monotonic() - began, 1)}


def _round(
    pool: Pool, case: tuple[str, str], together: Any, styles: dict[str, Any], export: list[str], stream: bool
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="architectures-") as folder:
        commands = {}
        for plan, places in together:
            store = f"{folder}/{plan.replace(' ', '')}"
            for rank, place in enumerate(places):
                place_in_plan = {"plan": plan, "rank": rank, "ranks": len(places), "store": store, "styles": styles}
                what = {"export": plan in export, "stream": stream}
                commands[place] = {"case": case, **place_in_plan, "folder": folder, **what}
        answers = pool.ask(commands, TIMEOUT_S)
        return {
            plan: _joined({place: answers[place] for place in places if place in answers}, len(places))
            for plan, places in together
        }


def _joined(answers: dict[int, dict[str, Any]], count: int) -> dict[str, Any]:
    """Return the result of a plan from its ranks' answers: the leader's, or the first crash."""
    crash = next((answer for answer in answers.values() if answer["verdict"] == "crashed"), None)
    if crash is not None:
        return crash
    if len(answers) < count:
        return {
            "verdict": "hung",
            "why": f"{count - len(answers)} of {count} ranks gave no answer in {patient(TIMEOUT_S):.0f} s",
        }
    if len({answer["verdict"] == "refused" for answer in answers.values()}) > 1:
        return {"verdict": "wrong", "why": "some ranks refuse, others run"}
    return next(iter(answers.values()))


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types, comma separated")
    parser.add_argument("--family", choices=["causal", "seq2seq", "masked", "classifier"])
    parser.add_argument(
        "--plan", default="", help="plans whose names contain this; of an architecture in the JSON the others stay"
    )
    parser.add_argument("--again", action="store_true", help="measure again what is in the JSON")
    parser.add_argument("--failed", action="store_true", help="measure again what was wrong, crashed or hung")
    parser.add_argument(
        "--unverified", action="store_true", help="split all architectures without a tp_plan by structure"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--table", action="store_true", help="write the table from the JSON, and measure nothing")
    parser.add_argument("--streams", action="store_true", help="compare streamed weights with the exported file alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.json = options.json or RESULTS.with_stem(f"{RESULTS.stem}{'-streams' if options.streams else ''}")
    known: dict[str, Any] = (
        json.loads(options.json.read_text()) if options.json.exists() else {"versions": versions(), "cases": {}}
    )
    if not options.table:
        _measure_all(options, known)
    if options.streams:
        for row in _grid(["", *(plan for together in STREAMED for plan, _ in together)], list(_streams(known))):
            print(row)
    elif options.table or not (options.only or options.plan):
        write_table(known)


def _measure_all(options: argparse.Namespace, known: dict[str, Any]) -> None:
    only = set(filter(None, options.only.split(",")))
    todo = [case for case in cases(options.family) if not only or case[0] in only]
    pool, deadline = Pool(options.unverified), time.monotonic() + options.seconds
    options.json.parent.mkdir(parents=True, exist_ok=True)
    try:
        for name, task in todo:
            key = f"{name}/{task}"
            before = known["cases"].get(key)
            every = STREAMED if options.streams else ROUNDS
            rounds = [together for together in every if any(options.plan in plan for plan, _ in together)]
            plans = {plan for together in rounds for plan, _ in together}
            done = before and (plans <= before["plans"].keys() or before["plans"][ALONE]["verdict"] != "exact")
            if done and not options.again and not (options.failed and _failed(before)):
                continue
            if time.monotonic() > deadline:
                break
            found = measure(pool, (name, task), rounds=rounds, stream=options.streams)
            known["cases"][key] = {
                **found,
                "plans": {**(before["plans"] if before and options.plan else {}), **found["plans"]},
            }
            options.json.write_text(json.dumps(known, indent=1))
            _tell(key, known["cases"][key])
    finally:
        pool.close()


def _failed(result: dict[str, Any]) -> bool:
    results = result["plans"].values()
    return any(
        one_result["verdict"] in ("wrong", "crashed", "hung") or one_result.get("export", "exact") != "exact"
        for one_result in results
    )


def _tell(key: str, result: dict[str, Any]) -> None:
    print(f"{key} ({result['seconds']} s)", flush=True)
    for plan, verdict in result["plans"].items():
        export = "" if verdict.get("export", "exact") == "exact" else f" | export {verdict['export']}"
        print(f"    {plan}: {verdict['verdict']} {verdict.get('why', '')[:400]}{export}", flush=True)


def write_table(known: dict[str, Any]) -> None:
    """Write the table and its summary."""
    TABLE.write_text("\n".join(_table(known)) + "\n")
    print(f"wrote {TABLE}")


def _table(known: dict[str, Any]) -> list[str]:
    columns = (ALONE, *PLANS)
    runs = {
        key: case["plans"] for key, case in sorted(known["cases"].items()) if case["plans"][ALONE]["verdict"] == "exact"
    }
    absent = {key: case["plans"][ALONE]["why"] for key, case in sorted(known["cases"].items()) if key not in runs}
    lines = [HEAD.format(tolerance=TOLERANCE, floor=FLOOR, parts=PARTS, **known["versions"]), "## Counts", ""]
    lines += _grid(["", *columns[1:], "export"], list(_counts(runs)))
    lines += ["", "## By architecture", ""]
    rows = [[key, *(_cell(plans.get(plan)) for plan in columns[1:]), _export(plans)] for key, plans in runs.items()]
    lines += [*_grid(["architecture / task", *columns[1:], "export"], rows), "", "## Why refused", ""]
    reasons: dict[str, list[str]] = {}
    for key, plans in runs.items():
        for plan, verdict in plans.items():
            if verdict["verdict"] != "exact":
                reasons.setdefault(verdict["why"].split("; ")[0].replace("|", "\\|"), []).append(f"{key} ({plan})")
    lines += [f"- {', '.join(names)}: {why}" for why, names in _grouped(reasons).items()]
    lines += ["", "## Not run: the tiny model does not build or train on one process", ""]
    return lines + [f"- {key}: {why[:160]}".replace("[", "\\[") for key, why in absent.items()]


def _counts(runs: dict[str, Any]) -> Any:
    """Yield a row of verdicts for each group of architectures."""
    groups = {
        "causal language models": lambda key, plans: key.endswith("/causal"),
        "of these with a tp_plan": lambda key, plans: key.endswith("/causal") and plans[ALONE]["tp_plan"],
        "encoder-decoders": lambda key, plans: key.endswith("/seq2seq"),
        "masked language models": lambda key, plans: key.endswith("/masked"),
        "classifiers": lambda key, plans: key.endswith("/classifier"),
    }
    for title, belongs in groups.items():
        chosen = [plans for key, plans in runs.items() if belongs(key, plans)]
        verdicts = [Counter(plans[plan]["verdict"] for plans in chosen if plan in plans) for plan in PLANS]
        exports = Counter(_export(plans) for plans in chosen)
        cells = [", ".join(f"{n} {verdict}" for verdict, n in count.most_common()) for count in (*verdicts, exports)]
        yield [f"{len(chosen)} {title}", *cells]


def _streams(known: dict[str, Any]) -> Any:
    """Yield a row of verdicts on streams for each task."""
    for task in ("causal", "seq2seq", "masked", "classifier"):
        chosen = [case["plans"] for key, case in known["cases"].items() if key.endswith(f"/{task}")]
        chosen = [plans for plans in chosen if plans[ALONE]["verdict"] == "exact"]
        verdicts = [
            Counter(plans[plan]["verdict"] for plans in chosen if plan in plans)
            for together in STREAMED
            for plan, _ in together
        ]
        cells = [", ".join(f"{n} {verdict}" for verdict, n in count.most_common()) for count in verdicts]
        yield [f"{len(chosen)} {task}", *cells]


def _cell(result: dict[str, Any] | None) -> str:
    return result["verdict"] if result else "-"


def _export(plans: dict[str, Any]) -> str:
    exports = {plan["export"].partition(":")[0] for plan in plans.values() if "export" in plan}
    return "exact" if exports == {"exact"} else ", ".join(sorted(exports - {"exact"})) or "-"


def _grouped(reasons: dict[str, list[str]]) -> dict[str, list[str]]:
    """Join reasons that differ by the names of architecture and layer."""
    joined: dict[str, tuple[str, list[str]]] = {}
    for why, names in reasons.items():
        plain = re.sub(r"\b[A-Z][A-Za-z0-9_]+|\d+", "*", why)
        joined.setdefault(plain, (why, []))[1].extend(names)
    return {
        why: sorted(dict.fromkeys(name.rpartition(" (")[0] if "TP" in name else name for name in names))
        for why, names in joined.values()
    }


def _grid(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


HEAD = """# Architectures

Find an architecture of transformers {transformers} in [the table](#by-architecture): each plan is
compared with one process, for causal language models, encoder-decoders, masked language models and
some classifiers, in a tiny size. `python benchmarks/architectures.py` made this page, with torch
{torch}, gloo and float32.

- exact: the loss and every gradient agree with one process to {tolerance}, relative to the larger of
  the tensor's largest value and {floor} times the model's largest gradient (a gradient that is zero in
  theory has only rounding noise). The rows of a batch are split over the data ranks, and rows count
  different numbers of tokens.
- refused: meshpar refuses the plan before anything runs, or in the first forward, with a reason and
  a remedy.
- wrong, crashed, hung: bugs.
- CP 2: [context parallelism](context.md) by `gather`, and by `heads`. Models that mix positions in
  another way compute on whole sequences.
- EP 2: [whole experts are divided](experts.md). Models without experts are refused.
- PP 2: [layers are divided](pipeline.md); each row is a micro-batch.
- bits on FSDP 2, bits on TP 2: with [`same_bits`](same_bits.md) the loss, every gradient, the norm and
  the weights after a step of AdamW equal one process bit for bit; each row is a micro-batch, and `TP 2`
  computes in {parts} parts.
- documents: a [packed row](data.md#documents) gives the results of its documents one by one, and
  another first document does not change the results of the second, bit for bit.
- export: the parallel model is exported, and transformers loads it with every parameter equal.

Weights are random, with noise on weights that start at zero or one. Dropout is off. Models have half
as many heads of keys and values as of queries if the config allows it, so that pairs of ranks share a
head under `TP 4`. The models are small (32 features, 2 to 4 layers, one layer of every kind in the
architecture's own config), so the table shows correctness, not speed.

## How tensor parallelism splits these models

- The styles come from the model's `tp_plan`, each translated to meshpar's own style. Parameters are
  ordinary shards, so that FSDP and checkpoints can read them.
- Each rank gets whole experts if tp divides the number of experts. Otherwise each expert is split.
- If the model has fewer heads of keys and values than ranks, several ranks compute the same
  projection, and their gradients are summed.
- An architecture without a `tp_plan` is split by the names and shapes of its projections if this
  benchmark found the split exact (`VERIFIED` in `models/huggingface/styles.py`). Otherwise it is
  refused.
- A weight of the vocabulary stays whole if the model's code reads it outside of its module. A
  parameter that the plan does not name also stays whole; meshpar warns if much of the model stays
  whole. A parameter among split projections that no style covers is refused.

To leave a part whole over tp, use `TensorParallel(styles={{"model.layers.*.self_attn": None, ...}})`.
The layout's weight map reads and writes the names that transformers stores, if its rules can express
them.
"""


if __name__ == "__main__":
    main()
