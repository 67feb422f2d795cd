"""A generator of the simulated device that is drawn from, and a dispatch mode that records each draw."""

from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.accelerator.simulated import install


@final
class Generator:
    """A seed and an offset, as CUDA's generator has them."""

    def __init__(self) -> None:
        self.seed, self.offset = 0, 0

    def now(self) -> tuple[int, int]:
        return self.seed, self.offset

    def get_state(self) -> Tensor:
        with unset_fake_temporarily():
            return torch.tensor([self.seed, self.offset], device="cpu").view(torch.uint8)

    def set_state(self, state: Tensor) -> None:
        with unset_fake_temporarily():
            self.seed, self.offset = state.view(torch.int64).tolist()

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def install_generator() -> Generator:
    """Give the simulated device a generator that is drawn from."""
    generator, module = Generator(), install()
    module.default_generators = (generator,)
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module._initialized = True  # as CUDA is once something was computed there
    return generator


class Draws(TorchDispatchMode):
    """Record the seed and the offset at which each operator draws random numbers on the device."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator, self.drawn = generator, list[tuple[int, int]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor) and leaf.device.type != "cpu"]
        # The backward of attention has the tag, too, and takes the state that its forward drew from.
        if torch.Tag.nondeterministic_seeded in func.tags and made and "backward" not in func._schema.name:
            self.drawn.append(self.generator.now())
            self.generator.offset += 4
        return result

    def take(self) -> list[tuple[int, int]]:
        """Return the draws since the last call."""
        drawn, self.drawn = self.drawn, []
        return drawn
