"""A pass of your own: freeze the parameters that a pattern names."""

from collections.abc import Iterator

from model import Model
from torch import nn

import meshpar
from meshpar import matches


class Freeze(meshpar.Pass):
    """Freeze every parameter whose name fits a pattern, before anything is sharded."""

    name = "Freeze"
    stage = meshpar.Stage.TENSOR

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def problems(self, module: nn.Module, layout: meshpar.ModelLayout, mesh: meshpar.MeshSpec) -> Iterator[str]:
        if not any(matches(self.pattern, name) for name, _ in module.named_parameters()):
            yield f"Freeze({self.pattern!r}) fits no parameter"

    def apply(self, module: nn.Module, layout: meshpar.ModelLayout, mesh: object) -> None:
        for name, parameter in module.named_parameters():
            if matches(self.pattern, name):
                parameter.requires_grad_(False)


def main() -> None:
    plan = meshpar.Plan("dp_shard=2", [Freeze("embed.wieght"), meshpar.FullyShard()])
    try:
        plan.check(Model(), world_size=2)
    except meshpar.PlanError as error:
        print(error)
    plan = meshpar.Plan("dp_shard=2", [Freeze("embed.*"), meshpar.FullyShard()])
    print(plan.check(Model(), world_size=2))


if __name__ == "__main__":
    main()
