"""Passes from another package."""

import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_gather_tensor_autograd
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshpar import Installed, Moment, Pass, Role, Stage, attention_mask


class ExpertCopies(Pass):
    """Repeat the same data over an axis of its own, and average gradients there."""

    name, stage, roles = "ExpertCopies", 1, {"ep": Role.FEATURES}

    def __init__(self, limit=4):
        self.limit = limit

    def problems(self, module, layout, mesh):
        if mesh.axes["ep"] > self.limit:
            yield f"ExpertCopies takes at most ep={self.limit}, got {mesh.axes['ep']}"

    def apply(self, module, layout, mesh):
        group = mesh.get_group("ep")
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: self.average(grad, group))

    def average(self, grad, group):
        total = grad.clone()
        dist.all_reduce(total, group=group)
        return total / group.size()


class HalveGradients(Moment):
    """Halve the gradients of every step."""

    def __init__(self, module):
        self.module = module

    def after_backward(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class HalfGradients(Pass):
    """Install a moment, which comes in every step."""

    name, stage = "HalfGradients", Stage.RECOMPUTE

    def apply(self, module, layout, mesh):
        return Installed(moments=[HalveGradients(module)])


class SplitFeedForward(Pass):
    """Split the feed-forward layers by torch's own styles."""

    name, stage, roles = "SplitFeedForward", Stage.TENSOR, {"tp": Role.FEATURES}

    def __init__(self):
        self.styles = {"gate": ColwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}

    def shards(self, module, layout):
        return {
            f"{name}.{part}.weight"
            for name, _ in module.named_modules()
            if name.endswith(".mlp")
            for part in self.styles
        }

    def apply(self, module, layout, mesh):
        for name, child in module.named_modules():
            if name.endswith(".mlp"):
                parallelize_module(child, mesh["tp"], {part: style() for part, style in self.styles.items()})


class HostShard(Pass):
    """Shard blocks over data ranks and keep the shards in host memory."""

    name, stage, roles = "HostShard", Stage.DATA, {"dp_shard": Role.SAMPLES}
    keeps_on_host = True

    def shards(self, module, layout):
        return {name for name, _ in module.named_parameters(remove_duplicate=False)}

    def apply(self, module, layout, mesh):
        for child in [*module.layers, module]:
            fully_shard(child, mesh=mesh["dp_shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))


class SplitPositions(Pass):
    """Give each rank a part of the sequence, and gather the whole sequence around attention."""

    name, stage, roles = "SplitPositions", Stage.POSITIONS, {"cp": Role.POSITIONS}

    def problems(self, module, layout, mesh):
        if not any(name.endswith(".attn") for name, _ in module.named_modules()):
            yield "SplitPositions gathers around modules named 'attn', and the model has none"

    def apply(self, module, layout, mesh):
        group = mesh.get_group("cp")
        for name, child in module.named_modules():
            if name.endswith(".attn"):
                child.register_forward_pre_hook(lambda module, args: self.whole(module, args, group))
                child.register_forward_hook(lambda module, args, output: output.chunk(group.size(), 1)[group.rank()])

    def whole(self, attn, args, group):
        x, positions = (self.gathered(argument, group) for argument in args[:2])
        return x, positions, attention_mask(attn, positions)

    def gathered(self, part, group):
        if part.is_floating_point():
            return all_gather_tensor_autograd(part.contiguous(), 1, group)
        return all_gather_tensor(part.contiguous(), 1, group)
