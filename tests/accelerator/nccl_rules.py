"""NCCL's rules without a device: a backend that carries real numbers by gloo and refuses what NCCL cannot do."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from meshpar.passes.data import instead_of_fsdp2
from tests.support.patience import patient

NAME = "rules"
DEVICE = "cpu"
"""The type of the device that stands for an accelerator."""

KNOWN = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}
"""ProcessGroupNCCL's ncclDataType; complex numbers, shorter and unsigned integers are not among them."""


class Broken(AssertionError):
    """A rule of NCCL does not hold."""


@dataclass
class Seen:
    """What this rank's groups were asked for: groups as made, calls and input bytes by (group, operation)."""

    made: list[Rules] = field(default_factory=list)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget the calls, and keep the groups."""
        self.calls.clear()
        self.bytes.clear()

    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return title and ranks of each group that has not ended, in the order in which they were made."""
        return [(group.title, group.ranks) for group in self.made if not group.closed]

    def peers(self) -> int:
        """Return to how many other ranks the groups of this one connect it, a rank counted in each group."""
        return sum(len(ranks) - 1 for _, ranks in self.groups())


SEEN = Seen()


class Done(Work):
    """The work of several collectives, and what follows them."""

    def __init__(self, works: Sequence[Work], then: Any = None) -> None:
        super().__init__()
        self._works, self._then = list(works), then

    def wait(self, *_: object) -> bool:
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()
        self._works, self._then = [], None
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        self.wait()
        future.set_result([])
        return future


class Queued(Work):
    """The work of a message."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__()
        self._future = future

    def wait(self, *_: object) -> bool:
        self._future.result()
        return True

    def is_completed(self) -> bool:
        return self._future.done()


class Rules(dist.ProcessGroup):
    """One group. Its ranks compare each call before it starts; a group of one rank has nothing to compare."""

    FIRST_S = 30.0

    def __init__(self, options: Any, _: object) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.ranks = tuple(options.global_ranks_in_group or range(options.group_size))
        self.title, self.closed, self._number = "", False, 0
        self._store, self._met, self._queued = dist.PrefixStore("met", options.store), set[str](), False
        self._stream = ThreadPoolExecutor(1)
        self._gloo, self._compares = (_gloo(options, name) for name in ("data", "rules"))
        self._register_backend(
            torch.device(DEVICE), dist.ProcessGroup.BackendType.CUSTOM, self._gloo._get_backend(torch.device("cpu"))
        )
        SEEN.made.append(self)

    def getBackendName(self) -> str:
        return NAME

    def _set_group_desc(self, text: str) -> None:
        super()._set_group_desc(text)
        self.title = text

    def shutdown(self) -> None:
        self.closed = True

    abort = shutdown

    def _begin(
        self, operation: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = (), more: object = ""
    ) -> None:
        """Check one call on this rank, then that all ranks of the group make the same."""
        if self.closed:
            raise Broken(f"{operation} on the group {self.title} after its end")
        for tensor in (*inputs, *outputs):
            if tensor.device.type != DEVICE:
                raise Broken(f"{operation} on {self.title}: a tensor is on {tensor.device}, expected {DEVICE}")
            if tensor.dtype not in KNOWN:
                raise Broken(f"{operation} on {self.title}: NCCL does not know {tensor.dtype}")
            if not tensor.is_contiguous():
                form = f"{tuple(tensor.shape)}, strides {tensor.stride()}"
                raise Broken(f"{operation} on {self.title}: a tensor of {form} is not contiguous")
        SEEN.calls[self.title, operation] += 1
        SEEN.bytes[self.title, operation] += sum(tensor.nbytes for tensor in inputs)
        sizes = [(operation != "alltoall" and tensor.numel(), str(tensor.dtype)) for tensor in inputs]
        self._number += 1
        self._compare(f"call {self._number}: {operation} {sizes} {more}")

    def _compare(self, text: str) -> None:
        if self.size() == 1:
            return
        if self._queued:  # behind the messages of this group
            self._stream.submit(lambda: None).result()
        digest = torch.frombuffer(bytearray(hashlib.blake2b(text.encode(), digest_size=8).digest()), dtype=torch.int64)
        every = [torch.empty_like(digest) for _ in range(self.size())]
        self._compares.allgather([every], [digest]).wait()
        if any(not torch.equal(other, digest) for other in every):
            raise Broken(f"ranks of {self.title} {self.ranks} make different calls at the same time; this one {text}")

    def _reduces(self, op: Any, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return gloo's operation for one of NCCL's, and what to do with its result."""
        kind, factor = op.__getstate__()
        if kind == dist.ReduceOp.AVG:
            return dist.ReduceOp.SUM, lambda: [tensor.div_(self.size()) for tensor in tensors]
        if kind == dist.ReduceOp.PREMUL_SUM:
            return dist.ReduceOp.SUM, lambda: [tensor.mul_(factor) for tensor in tensors]
        return kind, None

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        op, then = self._reduces(opts.reduceOp, tensors)
        self._begin("allreduce", tensors, more=op)
        return Done([self._gloo.allreduce([tensor], op) for tensor in tensors], then)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        self._begin("broadcast", tensors, more=opts.rootRank)
        return Done([self._gloo.broadcast(tensors, opts)])

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op, then = self._reduces(opts.reduceOp, tensors)
        self._begin("reduce", tensors, more=(op, opts.rootRank))
        return Done([self._gloo.reduce(tensors, opts.rootRank, op)], then)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        self._begin("allgather", inputs, outputs[0])
        return Done([self._gloo.allgather(outputs, inputs)])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        self._begin("all_gather", inputs, outputs)
        return Done([self._gloo.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        return self._reduce_scatter(outputs, [torch.cat([tensor.flatten() for tensor in inputs[0]])], opts, inputs[0])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._reduce_scatter(outputs, inputs, opts)

    def _reduce_scatter(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any, checked: Sequence[Tensor] = ()
    ) -> Work:
        op, scale = self._reduces((opts or dist.ReduceScatterOptions()).reduceOp, outputs)
        self._begin("reduce_scatter", checked or inputs, outputs, more=op)
        sums = [tensor.clone() for tensor in inputs]

        def then() -> None:
            for output, whole in zip(outputs, sums, strict=True):
                output.copy_(whole.flatten().chunk(self.size())[self.rank()].view_as(output))
            if scale is not None:
                scale()

        return Done([self._gloo.allreduce([total], op) for total in sums], then)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Work:
        self._begin("alltoall", [input], [output])
        return Done([self._gloo.all_to_all_single(output, input, received, sent)])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        self._begin("alltoall", inputs, outputs)
        return Done([self._gloo.alltoall(outputs, inputs)])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        self._begin("gather", inputs, [tensor for group in outputs for tensor in group], more=opts.rootRank)
        return Done([self._gloo.gather(outputs, inputs, opts)])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        self._begin("scatter", [], [*outputs, *(tensor for group in inputs for tensor in group)], more=opts.rootRank)
        return Done([self._gloo.scatter(outputs, inputs, opts)])

    def barrier(self, opts: Any = None) -> Work:
        self._begin("barrier", [])
        return Done([self._gloo.barrier()])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return self._message("send", tensors, to, f"{self.rank()}>{to}")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return self._message("recv", tensors, source, f"{source}>{self.rank()}")

    def _message(self, operation: str, tensors: list[Tensor], peer: int, pair: str) -> Work:
        """Queue a message behind the others of this group, whatever its tag; it ends with its counterpart."""
        self._alone(operation, tensors)
        self._queued = True
        if pair not in self._met:  # the first call of a pair returns when both ranks have called
            self._met.add(pair)
            self._store.add(pair, 1)
            until = time.monotonic() + patient(self.FIRST_S)
            while self._store.add(pair, 0) < 2:
                if time.monotonic() > until:
                    raise Broken(f"the first {operation} {pair} on {self.title}: the other rank does not call it")
                time.sleep(0.002)

        def run() -> None:
            ready = torch.zeros(1)
            if operation == "send":
                self._gloo.recv([ready], peer, 1).wait()
                self._gloo.send(tensors, peer, 0).wait()
            else:
                self._gloo.send([ready], peer, 1).wait()
                self._gloo.recv(tensors, peer, 0).wait()

        return Queued(self._stream.submit(run))

    def _alone(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """Check a call that two ranks make."""
        compare, self._compare = self._compare, lambda text: None  # type: ignore[method-assign]
        try:
            self._begin(operation, tensors)
        finally:
            self._number -= 1
            self._compare = compare  # type: ignore[method-assign]


def _gloo(options: Any, name: str) -> Any:
    """Return a group of the same ranks that gloo serves."""
    store = dist.PrefixStore(name, options.store)
    group: Any = dist.ProcessGroup(store, options.group_rank, options.group_size)
    backend = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


class _Operators:
    """The functional collectives; one of them asks a group's backend without the group, so its call is checked here."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather_into_tensor_out(self, input: Tensor, size: int, group: str, *, out: Tensor) -> Tensor:
        known: Any = dist.distributed_c10d._resolve_process_group(group)
        known._begin("all_gather", [input], [out])
        return self._inner.all_gather_into_tensor_out(input, size, group, out=out)


def check_order(groups: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Check that every two ranks made the groups that they share in the same order. Collective over the world."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(groups))
    for one, other in itertools.combinations(range(len(every)), 2):
        shared = [[group for group in every[rank] if {one, other} <= set(group[1])] for rank in (one, other)]
        if shared[0] != shared[1]:
            raise Broken(
                f"ranks {one} and {other} make the groups that they share in another order: {' against '.join(map(str, shared))}"
            )


@contextmanager
def rules() -> Iterator[Seen]:
    """Let the ranks of a test talk by :class:`Rules` instead of an accelerator's default group. Collective."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Rules, extended_api=True, devices=[DEVICE])
    was, store = dict(dist.Backend.default_device_backend_map), dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    timeout = dist.distributed_c10d._get_default_timeout(dist.Backend("gloo"))
    dist.barrier()
    dist.destroy_process_group()
    SEEN.made.clear()
    SEEN.clear()
    dist.Backend.default_device_backend_map[DEVICE] = NAME
    operators = instead_of_fsdp2.collective_ops
    instead_of_fsdp2.collective_ops = _Operators(operators)
    dist.init_process_group(NAME, store=dist.PrefixStore("rules", store), rank=rank, world_size=size, timeout=timeout)
    try:
        yield SEEN
        check_order([(group.title, group.ranks) for group in SEEN.made])
    finally:
        instead_of_fsdp2.collective_ops = operators
        dist.Backend.default_device_backend_map.clear()
        dist.Backend.default_device_backend_map.update(was)
