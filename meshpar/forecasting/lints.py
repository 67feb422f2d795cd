"""Costs of a plan that can be avoided, each with its size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from meshpar.forecasting.cost import Cost, placement, sending_time
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.trace import Collective, Trace

_SMALLEST = 0.005
"""Part of the step, or of the device's memory, below which nothing is said."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """One finding.

    Attributes:
        name: of the rule.
        text: what it is, and what would help.
        seconds: of the step that it costs.
        size: bytes at its largest that it costs.
    """

    name: str
    text: str
    seconds: float = 0.0
    size: int = 0


def lints(trace: Trace, timed: Cost, hardware: Hardware) -> tuple[Lint, ...]:
    """Return the findings that matter, the dearest first."""
    found = [
        *_float32(trace, timed, hardware),
        *_tensor_parallel(trace, hardware),
        *_padding(trace, hardware),
        *_logits(trace),
        *_attention(trace, hardware),
        *_masks(trace),
        *_exposed(timed),
        *_spanning(trace, hardware),
    ]
    matter = [
        lint for lint in found if lint.seconds > _SMALLEST * timed.seconds or lint.size > _SMALLEST * hardware.memory
    ]
    return tuple(sorted(matter, key=lambda lint: (-lint.seconds, -lint.size)))


def _float32(trace: Trace, timed: Cost, hardware: Hardware) -> Iterator[Lint]:
    """Matrix products in float32, which every accelerator computes several times as fast in bfloat16."""
    single, half = hardware.flops("float32"), hardware.flops("bfloat16")
    done = sum(event.flops for _, event in trace.events())
    share = sum(event.flops for _, event in trace.events() if event.dtype == "float32") / max(1, done)
    seconds = share * (timed.computing.get("matmul", 0.0) + timed.computing.get("attention", 0.0)) * (1 - single / half)
    if share and half > single:
        yield Lint(
            name="float32",
            text=f"{share:.0%} of the operations are in float32, which {hardware.name} computes at "
            f"1/{half / single:.0f} of the speed of bfloat16: set param_dtype=bfloat16 in the pass that shards or "
            "replicates; parameters and optimizer state stay float32",
            seconds=seconds,
        )


def _tensor_parallel(trace: Trace, hardware: Hardware) -> Iterator[Lint]:
    """More than one preparation of a region's input: projections that gather or reduce each for themselves."""
    forward = [
        event
        for phase in trace.phases
        if phase.name == "forward"
        for event in phase.events
        if event.collective is not None and event.collective.axis == "tp" and event.scope
    ]
    gathers = [
        event.collective for event in forward if event.collective is not None and event.collective.kind == "all_gather"
    ]
    passes = sum(phase.name == "forward" for phase in trace.phases)
    wanted = 2 * trace.depth * passes
    if len(gathers) > wanted:
        extra = len(gathers) - wanted
        seconds_of_one = sending_time(gathers[0], hardware)
        yield Lint(
            name="redundant tensor-parallel collectives",
            text=f"{len(gathers) // (trace.depth * passes)} all-gathers a block forward where 2 would do (and as many "
            "more reductions in backward): give attention and feed-forward layer the style 'region', so that "
            "their projections share one",
            seconds=2 * extra * seconds_of_one,
        )


def _padding(trace: Trace, hardware: Hardware) -> Iterator[Lint]:
    """The padding that FSDP gathers, because dim 0 does not divide by the ranks."""
    shards = trace.axes.get("dp_shard", 1)
    gathers = [
        sent
        for phase, sent in trace.collectives()
        if phase == "forward" and sent.axis == "dp_shard" and sent.kind == "all_gather"
    ]
    passes = sum(phase.name == "forward" for phase in trace.phases)
    if not gathers or shards == 1:
        return
    size = _width(gathers[0].dtype)
    held = trace.exact["parameters"] / 4 * shards * size
    real = trace.parameters / trace.axes.get("tp", 1) * size
    waste = held / real - 1
    if waste > 0.01:
        seconds = sum(sending_time(gather, hardware) for gather in gathers) / passes * waste / (1 + waste)
        yield Lint(
            name="padding",
            text=f"{waste:.0%} of what dp_shard={shards} gathers is padding, because parameters' first dims do not "
            "divide by it: fewer shards with replicas beside them (HybridShard), or more tensor parallelism",
            seconds=seconds,
            size=int(trace.exact["parameters"] * waste / (1 + waste)),
        )


def _width(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float64": 8}.get(dtype, 4)


def _logits(trace: Trace) -> Iterator[Lint]:
    gathered = [
        event.collective
        for phase, event in trace.events()
        if phase == "forward" and event.collective is not None and event.collective.axis == "tp" and not event.scope
    ]
    ranks = trace.axes.get("tp", 1)
    # The embedding's reduction comes first and is as large as the hidden states, which sequence parallelism gathers for
    # the head.
    whole = [gather for gather in gathered[1:] if gather.kind == "all_gather" and gather.size > gathered[0].size]
    if ranks > 1 and whole:
        largest = max(gather.size for gather in whole)
        saved = trace.memory().held.get("logits and loss", 0) * (ranks - 1) // ranks
        if saved:
            yield Lint(
                name="replicated logits",
                text=f"every rank of tp holds all logits ({largest / 2**30:.2f} GiB gathered): "
                "TensorParallel(loss_parallel=True) keeps them split over the vocabulary",
                size=saved,
            )


def _attention(trace: Trace, hardware: Hardware) -> Iterator[Lint]:
    slow = {
        "_scaled_dot_product_efficient_attention": "the memory-efficient kernel (float32, or a mask)",
        "_softmax": "plain attention, which holds the scores (float32 with grouped heads)",
    }
    for name, what in slow.items():
        calls = [
            event for phase, event in trace.events() if event.name == name and event.scope and not event.recomputed
        ]
        if calls:
            size = max(sum(change for _, change in call.memory if change > 0) for call in calls)
            seconds = sum(call.moved for call in calls) * 3 / (hardware.memory_bandwidth * hardware.memory_fraction)
            yield Lint(
                name="attention is not flash",
                text=f"{len(calls)} calls run {what}: compute in bfloat16 (param_dtype) with is_causal and no mask",
                seconds=seconds,
                size=size * (trace.depth if name == "_softmax" else 1),
            )


def _masks(trace: Trace) -> Iterator[Lint]:
    products = {event.shape[1:3] for _, event in trace.events() if "attention" in event.name and event.shape}
    names = {"tril", "where", "bitwise_and", "expand", "masked_fill", "le", "ge", "lt"}
    for queries, keys in products:
        made = [
            sum(change for _, change in event.memory if change > 0)
            for _, event in trace.events()
            if event.name in names and queries * keys <= sum(change for _, change in event.memory if change > 0)
        ]
        if made and queries > 1:
            yield Lint(
                name="materialised mask",
                text=f"a mask of {queries} x {keys} is built in memory: leave the attention mask out, or say is_causal",
                size=max(made),
            )


def _exposed(timed: Cost) -> Iterator[Lint]:
    for axis, seconds in timed.exposed.items():
        help_ = {
            "tp": "fewer ranks on tp, or a larger micro-batch",
            "dp_shard": (
                "a larger micro-batch, prefetch_forward=1, or shards inside a node with replicas across (HybridShard)"
            ),
            "dp_replicate": "more accumulation, or fewer replicas",
            "pp": "more micro-batches, virtual=2, or other cuts (stages=)",
        }.get(axis, "a larger micro-batch")
        yield Lint(
            name="exposed communication",
            text=f"compute waits for {axis} {seconds / timed.seconds:.0%} of the step: {help_}",
            seconds=seconds,
        )


def _spanning(trace: Trace, hardware: Hardware) -> Iterator[Lint]:
    sent: list[Collective] = [
        collective
        for _, collective in trace.collectives()
        if collective.axis == "tp" and placement(collective, hardware)[1] > 1
    ]
    if sent:
        yield Lint(
            name="tensor parallelism across nodes",
            text=f"tp={trace.axes['tp']} spans nodes of {hardware.node}: keep it within one",
            seconds=sum(sending_time(collective, hardware) for collective in sent),
        )
