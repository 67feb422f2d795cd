"""Float8: linear layers multiply in eight bits, through torchao."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Pass, Stage, block_problems, find_blocks
from meshpar.core.patterns import covers
from meshpar.passes.data.whole_parameters import set_product
from meshpar.step.inner_calls import installed
from meshpar.tensors.placements import local_tensor

log = logging.getLogger(__name__)

_CAPABILITY = (8, 9)
_MULTIPLE = 16
_NO_TORCHAO = "Float8 needs torchao, which is not installed; install it with: pip install 'meshpar[float8]'"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Float8(Pass):
    """Multiply in float8 in the linear layers of the blocks (arXiv 2209.05433), with torchao's casts and products.

    Weights, gradients and optimizer state keep their dtype: each product casts and scales its two operands. The layers
    keep their class and parameters, so that sharding, checkpoints and names do not change. FSDP2 gathers in
    ``param_dtype``. Add ``Compile``: without it float8 is slower than bfloat16.

    Each rank computes scales from its own data. With ``rowwise_with_gw_hp`` the result for a token does not depend on
    other tokens of the batch, so that every data-parallel mesh equals one process. The other recipes scale over the
    batch of a rank. Under tensor parallelism every recipe scales over the features of a rank. Both differ from one
    process by the rounding of float8.

    >>> from meshpar import Compile, Float8, FullyShard, Plan
    >>> print(Plan("dp_shard=8", [Float8(), Compile(), FullyShard()]))
    dp_shard=8 [Float8 -> Compile -> FullyShard]

    Args:
        recipe: a recipe of torchao: ``tensorwise`` (fastest), ``rowwise``, or ``rowwise_with_gw_hp`` (closest to full
            precision).
        skip: patterns of layers, or of modules around them, to leave out. Layers whose features (under tensor
            parallelism: the part of a rank) are not multiples of 16 are always left out.
        emulate: compute the same numbers in higher precision, on any hardware. This is slow; use it to try the pass.
        blocks: name patterns or class names of the modules that contain the layers. Defaults to the layout's blocks,
            without the head.
    """

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    skip: tuple[str, ...] = ()
    emulate: bool = False
    blocks: tuple[str, ...] | None = None

    name = "Float8"
    stage = Stage.PRECISION
    computes_in_parts = False

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        yield from block_problems(self.name, module, layout, self.blocks)
        if self.recipe not in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            yield f"Float8(recipe={self.recipe!r}) is not known; use 'tensorwise', 'rowwise' or 'rowwise_with_gw_hp'"
        if not self._layers(module, layout):
            yield (
                f"Float8 finds no linear layer in the blocks whose features are multiples of {_MULTIPLE}, apart from "
                "those in skip"
            )

    def machine_problems(self, device_type: str) -> Iterator[str]:
        """Yield what this machine lacks to compute in float8."""
        if importlib.util.find_spec("torchao") is None:
            yield _NO_TORCHAO
        if not self.emulate:
            remedy = "leave Float8 out, or try its arithmetic with emulate=True"
            if device_type != "cuda" or not torch.cuda.is_available():
                yield (
                    "Float8 needs an NVIDIA GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell), and there "
                    f"is none here; {remedy}"
                )
            elif torch.cuda.get_device_capability() < _CAPABILITY:
                got = ".".join(map(str, torch.cuda.get_device_capability()))
                yield (
                    f"Float8 needs compute capability 8.9 or newer; {torch.cuda.get_device_name()} has {got}; {remedy}"
                )

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> None:
        product = _product(self.recipe, self.emulate)
        for name, layer in self._layers(module, layout).items():
            changes = installed(layer)
            if changes is not None and changes.product is not None:
                continue
            part = tuple(local_tensor(layer.weight).shape)
            if any(size % _MULTIPLE for size in part):
                log.warning(
                    "Float8 leaves %s as it is: a rank's part of it is %s, not multiples of %d", name, part, _MULTIPLE
                )
            else:
                set_product(layer, product)

    def _layers(self, module: nn.Module, layout: ModelLayout) -> dict[str, nn.Linear]:
        """Return the layers by name that float8 can hold."""
        layers: dict[str, nn.Linear] = {}
        for path, block in find_blocks(module, layout, self.blocks):
            for name, child in block.named_modules():
                full = f"{path}.{name}"
                if not isinstance(child, nn.Linear) or any(covers(pattern, full) for pattern in self.skip):
                    continue
                if not (child.in_features % _MULTIPLE or child.out_features % _MULTIPLE):
                    layers[full] = child
        return layers


def _product(recipe: str, emulate: bool) -> Any:
    """Return ``(x, weight, bias) -> x @ weight.T + bias`` in float8."""
    if importlib.util.find_spec("torchao") is None:  # a forecast, which asks for no machine
        raise MeshparError(_NO_TORCHAO)
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    with torch.device("meta"):
        settings, padded = (
            Float8Linear(_MULTIPLE, _MULTIPLE, bias=False, config=replace(config, pad_inner_dim=pads)).linear_mm_config
            for pads in (False, True)
        )

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # tokens are what the weight's gradient sums over; padding copies
        whole = math.prod(x.shape[:-1]) % _MULTIPLE == 0
        y = matmul_with_hp_or_float8_args.apply(x, weight.t(), settings if whole else padded, config)
        return y if bias is None else y + bias.to(y.dtype)

    return product
