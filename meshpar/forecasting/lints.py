"""Costs of a plan that can be avoided, each with its size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from meshpar.forecasting.cost import Cost, placement, sending_time
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.trace import Collective, Event, Trace

_SMALLEST = 0.005  # part of the step, or of the device's memory, below which nothing is said


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """One finding: the rule, what it is and what would help, the seconds of a step and the bytes that it costs."""

    name: str
    text: str
    seconds: float = 0.0
    size: int = 0


def lints(trace: Trace, timed: Cost, hardware: Hardware) -> tuple[Lint, ...]:
    """Return the findings that matter, the dearest first."""
    rules = (_float32, _tensor_parallel, _padding, _logits, _attention, _masks, _exposed, _spanning)
    every = [lint for rule in rules for lint in rule(trace, timed, hardware)]
    least, smallest = _SMALLEST * timed.seconds, _SMALLEST * hardware.memory
    matter = [lint for lint in every if lint.seconds > least or lint.size > smallest]
    return tuple(sorted(matter, key=lambda lint: (-lint.seconds, -lint.size)))


def _float32(trace: Trace, timed: Cost, hardware: Hardware) -> Iterator[Lint]:
    """Matrix products in float32, which every accelerator computes several times as fast in bfloat16."""
    single, half = hardware.flops("float32"), hardware.flops("bfloat16")
    flops = sum(event.flops for _, event in trace.events() if event.dtype == "float32")
    share = flops / max(1, trace.flops())
    seconds = share * (timed.computing.get("matmul", 0.0) + timed.computing.get("attention", 0.0)) * (1 - single / half)
    if share and half > single:
        text = (
            f"{share:.0%} of the operations are in float32, which {hardware.name} computes at 1/{half / single:.0f} of "
            "the speed of bfloat16: set param_dtype=bfloat16 in the pass that shards or replicates; parameters and "
            "optimizer state stay float32"
        )
        yield Lint(name="float32", text=text, seconds=seconds)


def _tensor_parallel(trace: Trace, timed: Cost, hardware: Hardware) -> Iterator[Lint]:
    """More than one preparation of a region's input: projections that gather or reduce each for themselves."""
    gathers = _sent(trace, "forward", "tp", "all_gather", in_blocks=True)
    calls = trace.depth * sum(phase.name == "forward" for phase in trace.phases)
    if len(gathers) > 2 * calls:
        text = (
            f"{len(gathers) // calls} all-gathers a block forward where 2 would do (and as many more reductions in "
            "backward): give attention and feed-forward layer the style 'region', so that their projections share one"
        )
        seconds = 2 * (len(gathers) - 2 * calls) * sending_time(gathers[0], hardware)
        yield Lint(name="redundant tensor-parallel collectives", text=text, seconds=seconds)


def _sent(trace: Trace, phase: str, axis: str, kind: str, *, in_blocks: bool | None = None) -> list[Collective]:
    """Return the collectives of one kind; ``in_blocks``: inside of blocks, or outside of them; None: both."""
    return [
        event.collective
        for name, event in trace.events()
        if event.collective is not None
        and (name, event.collective.axis) == (phase, axis)
        and kind in ("", event.collective.kind)
        and in_blocks in (None, bool(event.scope))
    ]


def _padding(trace: Trace, timed: Cost, hardware: Hardware) -> Iterator[Lint]:
    """The padding that FSDP gathers, because dim 0 does not divide by the ranks."""
    shards = trace.axes.get("dp_shard", 1)
    gathers = _sent(trace, "forward", "dp_shard", "all_gather")
    passes = sum(phase.name == "forward" for phase in trace.phases)
    if not gathers or shards == 1:
        return
    waste = trace.exact["parameters"] / 4 * shards / (trace.parameters / trace.axes.get("tp", 1)) - 1
    if waste > 0.01:
        seconds = sum(sending_time(gather, hardware) for gather in gathers) / passes * waste / (1 + waste)
        text = (
            f"{waste:.0%} of what dp_shard={shards} gathers is padding, because parameters' first dims do not divide "
            "by it: fewer shards with replicas beside them (HybridShard), or more tensor parallelism"
        )
        yield Lint(
            name="padding", text=text, seconds=seconds, size=int(trace.exact["parameters"] * waste / (1 + waste))
        )


def _logits(trace: Trace, timed: Cost, hardware: Hardware) -> Iterator[Lint]:
    gathered, ranks = _sent(trace, "forward", "tp", "", in_blocks=False), trace.axes.get("tp", 1)
    # The embedding's reduction comes first, as large as the hidden states that sequence parallelism gathers.
    whole = [gather.size for gather in gathered[1:] if gather.kind == "all_gather" and gather.size > gathered[0].size]
    saved = trace.memory().held.get("logits and loss", 0) * (ranks - 1) // ranks
    if whole and saved:
        yield Lint(
            name="replicated logits",
            text=f"every rank of tp holds all logits ({max(whole) / 2**30:.2f} GiB gathered): "
            "TensorParallel(loss_parallel=True) keeps them split over the vocabulary",
            size=saved,
        )


def _attention(trace: Trace, timed: Cost, hardware: Hardware) -> Iterator[Lint]:
    slow = {
        "_scaled_dot_product_efficient_attention": "the memory-efficient kernel (float32, or a mask)",
        "_softmax": "plain attention, which holds the scores (float32 with grouped heads)",
    }
    for name, what in slow.items():
        every = [event for _, event in trace.events() if event.name == name]
        if calls := [event for event in every if event.scope and not event.recomputed]:
            seconds = sum(call.moved for call in calls) * 3 / (hardware.memory_bandwidth * hardware.memory_fraction)
            text = f"{len(calls)} calls run {what}: compute in bfloat16 (param_dtype) with is_causal and no mask"
            size = max(map(_count_allocated, calls)) * (trace.depth if name == "_softmax" else 1)
            yield Lint(name="attention is not flash", text=text, seconds=seconds, size=size)


def _count_allocated(event: Event) -> int:
    return sum(change for _, change in event.memory if change > 0)


def _masks(trace: Trace, timed: Cost, hardware: Hardware) -> Iterator[Lint]:
    products = {event.shape[1:3] for _, event in trace.events() if "attention" in event.name and event.shape}
    names = {"tril", "where", "bitwise_and", "expand", "masked_fill", "le", "ge", "lt"}
    sizes = [_count_allocated(event) for _, event in trace.events() if event.name in names]
    for queries, keys in products:
        if queries > 1 and (masks := [size for size in sizes if size >= queries * keys]):
            text = f"a mask of {queries} x {keys} is built in memory: leave the attention mask out, or say is_causal"
            yield Lint(name="materialised mask", text=text, size=max(masks))


def _exposed(trace: Trace, timed: Cost, hardware: Hardware) -> Iterator[Lint]:
    for axis, seconds in timed.exposed.items():
        help_ = {
            "tp": "fewer ranks on tp, or a larger micro-batch",
            "dp_shard": "a larger micro-batch, prefetch_forward=1, or shards inside a node with replicas across "
            "(HybridShard)",
            "dp_replicate": "more accumulation, or fewer replicas",
            "pp": "more micro-batches, virtual=2, or other cuts (stages=)",
        }.get(axis, "a larger micro-batch")
        text = f"compute waits for {axis} {seconds / timed.seconds:.0%} of the step: {help_}"
        yield Lint(name="exposed communication", text=text, seconds=seconds)


def _spanning(trace: Trace, timed: Cost, hardware: Hardware) -> Iterator[Lint]:
    sent = [sent for _, sent in trace.collectives() if sent.axis == "tp" and placement(sent, hardware)[1] > 1]
    if sent:
        text = f"tp={trace.axes['tp']} spans nodes of {hardware.node}: keep it within one"
        seconds = sum(sending_time(message, hardware) for message in sent)
        yield Lint(name="tensor parallelism across nodes", text=text, seconds=seconds)
