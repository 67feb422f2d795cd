"""A pass from another package: it repeats the same data over an axis of its own, and averages gradients there."""

import torch.distributed as dist

from meshpar import Pass, Role


class ExpertCopies(Pass):
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
