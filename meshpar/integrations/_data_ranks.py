"""accelerate on the ranks with different samples: what its counts, loaders, schedules and exchanges are over."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from accelerate.accelerator import Accelerator as PlainAccelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import recursively_apply, reduce
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from meshpar import MeshparError, Plan, Role
from meshpar.core.passes import axes_of
from meshpar.integrations._shared import number_samples


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """The ranks with different samples: how many, this one's index, their group on this place of other axes, and the
    first rank of all with the samples of each."""

    size: int
    rank: int
    group: dist.ProcessGroup | None
    first_ranks: list[int] = field(default_factory=list)

    @staticmethod
    def of(plans: list[Plan], timeout: timedelta) -> DataRanks:
        """Return the ranks that get different samples under every plan. Collective."""
        for plan in plans:
            for role, what in ((Role.LAYERS, "layers"), (Role.POSITIONS, "positions of a sequence")):
                if (axis := find_axis(plan, role)) is not None:
                    raise MeshparError(
                        f"the plan {plan} divides {what} over {axis}, and a script for accelerate calls its model with "
                        "whole sequences and every layer; use dp_replicate, dp_shard, ep or tp"
                    )
        numbers, *more_numbers = map(number_samples, plans)
        if any(other != numbers for other in more_numbers):
            sizes = " and ".join(str(max(ranks) + 1) for ranks in (numbers, *more_numbers))
            raise MeshparError(
                f"plan= divides samples over {sizes} ranks, and one loader feeds all models; use meshes whose data "
                "axes have the same sizes"
            )
        size = max(numbers) + 1
        group: Any = dist.group.WORLD
        if size < len(numbers):
            spec = plans[0].resolve(len(numbers))
            samples = axes_of(plans[0].passes, spec, Role.SAMPLES)
            group, _ = dist.new_subgroups_by_enumeration(list(map(list, spec.groups(*samples))), timeout=timeout)
        first_ranks = [numbers.index(number) for number in range(size)]
        return DataRanks(size=size, rank=numbers[dist.get_rank()], group=group, first_ranks=first_ranks)

    def gather(self, tensor: Tensor) -> Tensor:
        """Join the ranks' tensors along dim 0."""
        if self.size == 1:
            return tensor
        part = (tensor[None] if tensor.ndim == 0 else tensor).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts)

    def gather_objects(self, values: Any) -> Any:
        """Join the ranks' lists."""
        if self.size == 1:
            return values
        lists: list[Any] = [None] * self.size
        dist.all_gather_object(lists, values, group=self.group)
        return [value for part in lists for value in part]

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """Return the sum, mean or largest value over the ranks."""
        reduced = tensor.clone()
        if reduction != "none" and self.size > 1:
            dist.all_reduce(reduced, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=self.group)
        return reduced / self.size if reduction == "mean" else reduced


def find_axis(plan: Plan, role: Role) -> str | None:
    """Return the first axis with several ranks and this role."""
    spec = plan.resolve(dist.get_world_size())
    return next((axis for axis in axes_of(plan.passes, spec, role) if spec.axes[axis] > 1), None)


class DataRankAccelerator(PlainAccelerator):
    """The part of an Accelerator that counts and exchanges, over the ranks with different samples."""

    _data: DataRanks
    flag_tensor: Tensor | None
    _schedules: dict[LRScheduler, None]

    @property
    def num_processes(self) -> int:
        """Number of ranks with different samples, by which a script multiplies its batch size."""
        return self._data.size

    @property
    def process_index(self) -> int:
        """Index of this rank among those with different samples; ranks of one sample have the same index."""
        return self._data.rank

    @property
    def is_last_process(self) -> bool:
        """True on the last rank of all."""
        return bool(self.state.is_last_process)

    @contextmanager
    def _as_data_ranks(self) -> Iterator[None]:
        """Let accelerate's own functions count ranks with different samples in the block."""
        state = PartialState()
        before = state.num_processes, state.process_index
        state.num_processes, state.process_index = self._data.size, self._data.rank
        try:
            yield
        finally:
            state.num_processes, state.process_index = before
            AcceleratorState()  # which copies the numbers of the other when it is looked up

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Split inputs as accelerate does, over the ranks with different samples."""
        with ExitStack() as stack:
            with self._as_data_ranks():
                part = stack.enter_context(super().split_between_processes(inputs, apply_padding))
            yield part

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Let a schedule advance by ``num_processes`` in a step, as accelerate does."""
        prepared: Any = super().prepare_scheduler(scheduler)
        if prepared is not scheduler:
            self._schedules[scheduler] = None
            step = prepared.step

            def step_by_data_ranks(*args: Any, **kwargs: Any) -> None:
                with self._as_data_ranks():
                    step(*args, **kwargs)

            prepared.step = step_by_data_ranks
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Join tensors of the ranks with different samples along dim 0. Collective: every rank calls it."""
        return recursively_apply(self._data.gather, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop the samples that filled up the last batch. Collective: every rank calls it."""
        try:
            gathered = self._data.gather_objects(input_data) if use_gather_object else self.gather(input_data)
        except TypeError:
            gathered, use_gather_object = self._data.gather_objects(input_data), True
        remainder = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if remainder <= 0:
            return gathered
        if use_gather_object:
            return gathered[:remainder]
        return recursively_apply(lambda part: part[:remainder] if part.ndim else part, gathered)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over the ranks with different samples: "sum", "mean", "max", "none". Collective."""
        if reduction not in ("sum", "mean", "max", "none"):
            raise MeshparError(f"reduction is {reduction!r}; expected 'sum', 'mean', 'max' or 'none'")
        return recursively_apply(lambda part: self._data.reduce(part, reduction), tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Return whether any rank has called ``set_trigger``, and take it back. Collective: every rank calls it."""
        flag = torch.zeros((), dtype=torch.int64, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = torch.zeros_like(flag)
        largest: Any = reduce(flag, "max")
        return bool(largest >= 1)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker; on a rank that has none, one that takes every call and logs nothing."""
        return super().get_tracker(name, unwrap) if self.trackers else _NoTracker()

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refuse: a rank without a batch would not gather its part of the weights for the others."""
        raise MeshparError(
            "join_uneven_inputs lets ranks run other numbers of batches, and each batch needs every rank's weights; "
            "expected even batches, as accelerate makes them by itself: leave join_uneven_inputs out"
        )

    def end_training(self) -> None:
        """Finish trackers, wait for the other ranks and close the process group. Collective."""
        gc.collect()
        self.wait_for_everyone()
        super().end_training()


@final
class _NoTracker:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None
