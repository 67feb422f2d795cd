"""One GPU, bfloat16, compiled: what of its speed training keeps, beside a loop written by hand and accelerate's.

    python benchmarks/gpu.py [--case NAME ...] [--who NAME ...] [--budget 570] [--out docs/gpu.json]
    python benchmarks/gpu.py --smoke          # tiny shapes on a CPU, to see that it runs

GPT-2 124M, a Llama of 1B and one of 8B, each in a process of its own, with FSDP2's machinery on a mesh of one rank (so
with float32 masters and bfloat16 computation; the 8B keeps weights and AdamW's state in bfloat16 and recomputes, or it
would not fit). Measured: seconds of a step, MFU, peak memory allocated, the share of a step in which the device had
nothing to do (from torch's trace of three further steps), and meshpar's forecast of step and peak. MFU counts 6 FLOP
per weight of a matrix product and token, and attention's products, of which causal ones count half; not what is
recomputed. Whoever has no time left in the budget is reported as left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WHO = ("torch by hand", "meshpar", "accelerate")
WARM, LR, PROFILED = 5, 1e-4, 3


@dataclass(frozen=True)
class Case:
    """A shape, a batch, and how it fits."""

    model: dict[str, Any]
    length: int
    micro_batch: int
    steps: int
    gpt2: bool = False
    pure_bf16: bool = False
    recompute: str = ""


CASES = {
    "gpt2-124m": Case({}, 1024, 32, 20, gpt2=True),
    "llama-1b": Case(
        dict(vocab_size=128256, dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, max_positions=4096,
             rope_theta=5e5, tied=True),
        4096, 4, 12, recompute="selective",
    ),
    "llama-8b": Case(
        dict(vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, max_positions=8192,
             rope_theta=5e5),
        8192, 1, 6, pure_bf16=True, recompute="full",
    ),
}  # fmt: skip
TINY = Case(dict(vocab_size=512, dim=64, layers=2, heads=4, kv_heads=2, hidden=128, max_positions=64), 64, 2, 3)
SMOKE = {
    "gpt2-124m": replace(TINY, model=dict(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4), gpt2=True),
    "llama-1b": replace(TINY, recompute="selective"),
    "llama-8b": replace(TINY, pure_bf16=True, recompute="full"),
}


@dataclass
class Watch:
    """The data of a run, which times the steps made of it and then has three traced; the loop asks for the next when
    one is done.
    """

    case: Case
    data: Any
    device: Any
    seconds: list[float] = field(default_factory=list)
    idle: float = 0.0
    peak: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def __iter__(self) -> Iterator[Any]:
        from torch.profiler import ProfilerActivity, profile

        from meshpar.launchers.jobs.profile import times_of
        from meshpar.training import peak_memory

        batches = iter(self.data)
        for _ in range(WARM):
            yield next(batches)
        self._wait()
        start = time.perf_counter()
        for _ in range(self.case.steps):  # one span: to wait for every step would make gaps
            yield next(batches)
        self._wait()
        self.seconds.append((time.perf_counter() - start) / self.case.steps)
        self.peak = peak_memory(self.device)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        with profile(activities=kinds) as tracer:
            for _ in range(PROFILED):
                yield next(batches)
            self._wait()
        with TemporaryDirectory() as folder:
            tracer.export_chrome_trace(f"{folder}/trace.json")
            times = times_of(json.loads(Path(folder, "trace.json").read_text()), [""])
        self.idle = times.idle / times.total
        yield from batches

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()


def build(case: Case) -> Any:
    """Return the model on meta."""
    import torch

    from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig

    with torch.device("meta"):
        model = GPT2(GPT2Config(**case.model)) if case.gpt2 else Transformer(TransformerConfig(**case.model))
    return model.to(torch.bfloat16) if case.pure_bf16 else model


def batches_of(case: Case, model: Any, folder: Path, device: Any) -> Any:
    """Return batches of random tokens, read as a job reads them."""
    import numpy as np

    from meshpar.training import Batches, LoaderSettings, PackedTokens, write_tokens

    size = (WARM + case.steps + PROFILED + 2) * case.micro_batch * case.length + 1
    vocabulary = model.config.vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, size).astype(np.uint32 if vocabulary > 65535 else np.uint16)
    tokens = write_tokens(folder / "tokens.bin", [ids], vocab_size=vocabulary, eos_id=0)
    loader = LoaderSettings(pin_memory=device.type == "cuda")
    return Batches(PackedTokens(tokens, case.length), micro_batch=case.micro_batch, seed=None, loader=loader)


def plan_of(case: Case, backend: str) -> Any:
    import torch

    import meshpar

    passes: list[Any] = [meshpar.ActivationCheckpoint(mode=case.recompute)] if case.recompute else []
    mixed = {} if case.pure_bf16 else {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    return meshpar.Plan("dp_shard=1", [*passes, meshpar.Compile(backend=backend), meshpar.FullyShard(**mixed)])


def with_meshpar(case: Case, folder: Path, backend: str) -> tuple[Watch, Any]:
    import meshpar
    from meshpar.training import AdamWSettings, CausalLM, Schedule, Trainer, TrainSettings, build_adamw

    with meshpar.distributed() as device:
        par = plan_of(case, backend).apply(build(case)).materialize(seed=0)
        watch = Watch(case, batches_of(case, par.module, folder, device), device)
        steps = WARM + case.steps + PROFILED
        schedule = Schedule(name="constant", lr=LR, steps=steps)
        optimizer, settings = (
            build_adamw(par.module, AdamWSettings(lr=LR)),
            TrainSettings(steps=steps + 1, log_every=10),
        )
        trainer = Trainer(par, CausalLM(), watch, optimizer, schedule, settings)  # type: ignore[arg-type]
        outcome = trainer.run()
        return watch, outcome.values.get("train/loss")


def by_hand(case: Case, folder: Path, backend: str, accelerator: Any = None) -> tuple[Watch, Any]:
    """The same model, blocks compiled and sharded over the one rank, by a careful user of torch; or prepared by
    accelerate.
    """
    import torch
    import torch.nn.functional as F

    import meshpar

    with meshpar.distributed() as device:
        model = build(case)
        blocks = list(model.transformer.h if case.gpt2 else model.layers)
        _wrap(case, model, blocks, backend, device, shard=accelerator is None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        if accelerator is not None:
            accelerator = accelerator(mixed_precision="no" if case.pure_bf16 else "bf16", cpu=device.type == "cpu")
            model, optimizer = accelerator.prepare(model, optimizer)
        watch, loss = Watch(case, batches_of(case, model, folder, device), device), None
        for number, (batch,) in enumerate(watch):
            ids, labels = (batch[name].to(device, non_blocking=True) for name in ("input_ids", "labels"))
            loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1).float(), labels.flatten())
            (loss.backward if accelerator is None else lambda loss=loss: accelerator.backward(loss))()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if number % 10 == 9:
                loss.item()
            if number == WARM + case.steps + PROFILED:
                break
        return watch, None if loss is None else loss.item()


def _wrap(case: Case, model: Any, blocks: list[Any], backend: str, device: Any, *, shard: bool) -> None:
    import torch
    from torch.distributed._composable.checkpoint_activation import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from meshpar._torch.autograd import ignore_profiler_marks
    from meshpar.passes.recompute import _selective_contexts

    ignore_profiler_marks()
    for block in blocks:
        if case.recompute:
            checkpoint(block, **({"context_fn": _selective_contexts} if case.recompute == "selective" else {}))
        block.compile(backend=backend)
    if shard:
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
        policy = MixedPrecisionPolicy() if case.pure_bf16 else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device=device)
    torch.manual_seed(0)
    for child in model.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()


def with_accelerate(case: Case, folder: Path, backend: str) -> tuple[Watch, Any]:
    from accelerate import Accelerator

    return by_hand(case, folder, backend, Accelerator)


def flops_per_token(case: Case, model: Any) -> float:
    """Return 6 per weight of a product, and causal attention's 6 x layers x width x length; an embedding alone is
    looked up.
    """
    weights = {id(parameter): parameter.numel() for parameter in model.parameters() if parameter.ndim == 2}
    config = model.config
    looked_up = [] if getattr(config, "tied", case.gpt2) else [model.embed.weight]
    products = sum(weights.values()) - sum(embedding.numel() for embedding in looked_up)
    if case.gpt2:
        products -= model.transformer.wpe.weight.numel()
        return 6.0 * products + 6.0 * config.n_layer * config.n_embd * case.length
    return (
        6.0 * products
        + 6.0 * config.layers * config.heads * (config.head_dim or config.dim // config.heads) * case.length
    )


def forecast_of(case: Case, backend: str, hardware: str | None) -> dict[str, float]:
    """Return meshpar's forecast of the same step, empty for hardware without a profile."""
    import meshpar
    from meshpar.forecasting import Batch
    from meshpar.forecasting.step import ObjectiveLoss
    from meshpar.training import CausalLM

    if hardware is None:
        return {}
    batch = Batch(sequence=case.length, micro_batch=case.micro_batch)
    made = meshpar.forecast(
        plan_of(case, backend), build(case), batch, hardware=hardware, world_size=1, loss=ObjectiveLoss(CausalLM())
    )
    return {"seconds": made.cost.seconds, "peak": made.memory.peak}


def measure(name: str, who: str, smoke: bool) -> dict[str, Any]:
    """Run one case by one of those who train; in a process of its own."""
    import torch

    from meshpar.launchers.jobs.reports import profile_of
    from meshpar.training import peak_flops

    case = (SMOKE if smoke else CASES)[name]
    backend = "eager" if smoke else "inductor"
    torch.set_float32_matmul_precision("high")
    run = {"torch by hand": by_hand, "meshpar": with_meshpar, "accelerate": with_accelerate}[who]
    with TemporaryDirectory() as folder:
        watch, loss = run(case, Path(folder), backend)
    seconds, tokens = statistics.median(watch.seconds), case.length * case.micro_batch
    peak = peak_flops(watch.device)
    result = {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "memory": watch.peak,
        "idle": watch.idle,
        "loss": loss,
    }
    result["mfu"] = None if peak is None else flops_per_token(case, build(case)) * tokens / seconds / peak
    if who == "meshpar":
        hardware = profile_of(watch.device) if watch.device.type == "cuda" else ("h100" if smoke else None)
        result["forecast"] = forecast_of(case, backend, hardware)
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return result


def table(results: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield "| case | by | step, ms | tokens/s | MFU | peak GiB | gaps | forecast: step, ms; peak GiB |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for key, one in results.items():
        name, who = key.split(" / ")
        if "error" in one:
            yield f"| {name} | {who} | {one['error'].replace('|', '/')[:160]} | | | | | |"
            continue
        mfu = "" if one["mfu"] is None else f"{one['mfu']:.1%}"
        forecasted = one.get("forecast") or {}
        forecast = f"{forecasted['seconds'] * 1e3:,.0f}; {forecasted['peak'] / 2**30:.1f}" if forecasted else ""
        yield (
            f"| {name} | {who} | {one['seconds'] * 1e3:,.1f} | {one['tokens_per_second']:,.0f} | {mfu} | "
            f"{one['memory'] / 2**30:.2f} | {one['idle']:.1%} | {forecast} |"
        )


def in_a_process(name: str, who: str, smoke: bool, timeout: float) -> dict[str, Any]:
    """Return what :func:`measure` does, or what the process said as it failed."""
    command = [sys.executable, __file__, "--one", name, who, *(["--smoke"] if smoke else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within the {timeout:.0f} s that were left"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": said[-1] if said else f"ended with exit code {done.returncode}"}
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--who", action="append", choices=WHO)
    parser.add_argument("--budget", type=float, default=570.0, help="seconds in all")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "WHO"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, smoke=options.smoke)))
        return
    end, results = time.monotonic() + options.budget, {}
    # The 1B first by all, then the others by meshpar and by hand: what matters most is there if the time ends.
    cases = [case for case in ("llama-1b", "gpt2-124m", "llama-8b") if case in (options.case or CASES)]
    for who in options.who or WHO:
        for name in cases:
            left = end - time.monotonic()
            key = f"{name} / {who}"
            results[key] = (
                in_a_process(name, who, options.smoke, left) if left > 10 else {"error": "left out: the time was over"}
            )
            print(key, json.dumps(results[key]), flush=True)
            if options.out:
                versions = {package: importlib.metadata.version(package) for package in ("torch", "meshpar")}
                options.out.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
