"""Export trained adapters: merged into the weights below them, or in peft's own format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from meshpar.checkpoints import DistributedCheckpoint, Safetensors, open_step
from meshpar.checkpoints.checkpointable import MODEL
from meshpar.checkpoints.export import apart, free_target, made_on_disk
from meshpar.checkpoints.storage import Place, fsync, on_disk
from meshpar.errors import CheckpointError
from meshpar.models.huggingface import from_config
from meshpar.registry import layout_for
from meshpar.training.lora import NAME, LoRA, PackedAdapter, adapted_layers, add_adapters, base_name, config_of
from meshpar.weights import TypedSource, WeightMap
from meshpar.weights.views import spans_of

_ADAPTERS = "adapter_model.safetensors"


@final
class Merged:
    """The weights of a model with its adapters added, read slice by slice: ``W + scale * left @ right``.

    Args:
        base: the frozen weights.
        factors: name of a weight (..., rows, columns) -> left (..., rows, rank) and right (..., rank, columns).
        scale: ``alpha / rank``.
    """

    def __init__(self, base: TypedSource, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scale: float) -> None:
        self.shapes, self.dtypes, self._base, self._factors, self._scale = base.shapes, base.dtypes, base, factors, scale

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out``."""
        if name not in self._factors:
            self._base.read(name, index, out)
            return
        *outer, rows, columns = (slice(*span) for span in spans_of(index, self.shapes()[name]))
        left, right = (each[tuple(outer)].float() for each in self._factors[name])
        whole = torch.empty(out.shape, dtype=torch.float32)
        self._base.read(name, index, whole)
        out.copy_(whole + left[..., rows, :] @ right[..., columns] * self._scale)


def merged(src: Place, settings: LoRA, base: Place) -> TypedSource:
    """Return the weights of the adapted model, to be exported tile by tile, with the result of peft's ``merge_and_unload``.

    Args:
        src: a step of adapters, or the folder of all steps (its newest).
        settings: settings of the adapters.
        base: the folder of the adapted weights.

    Raises:
        CheckpointError: the folder has other weights than those that were adapted.
    """
    adapters, packed, names = stored_adapters(src), dict[str, PackedAdapter](), WeightMap()
    if settings.parameters:  # files may store what the model packs one by one, and the model alone knows how
        model = from_config(on_disk(base, why="its config.json is read by transformers"))
        names = layout_for(model).weights
        add_adapters(model, settings)
        packed = {name: each for name, each in adapted_layers(model).items() if isinstance(each, PackedAdapter)}
    ours, factors = names.view(Safetensors(base)), {}
    for layer in sorted({name.rpartition(".lora_")[0] for name in adapters}):
        a, b, on = adapters[f"{layer}.lora_A.weight"], adapters[f"{layer}.lora_B.weight"], packed.get(layer)
        weight = f"{base_name(layer)}.{'weight' if on is None else on.leaf}"
        if weight not in ours.shapes():
            raise CheckpointError(f"the weights have no {weight}, to which an adapter belongs; give the folder of the adapted weights")
        if on is not None:
            factors[weight] = on.factors(a, b, ours.shapes()[weight][0])
        else:
            factors[weight] = (a.T, b.T) if _shape(adapters, layer) != ours.shapes()[weight] else (b, a)
    return names.publish(Merged(ours, factors, settings.alpha / settings.rank))


def export_adapters(src: Place, dst: Place, settings: LoRA, base: Place, *, overwrite: bool = False) -> Place:
    """Write the adapters in peft's format (``PeftModel.from_pretrained``).

    The folder appears, or replaces the old one, once it is complete.

    Args:
        src: a step of adapters, or the folder of all steps (exports the newest).
        dst: the folder to write.
        settings: settings of the adapters.
        base: the folder of the adapted weights.
        overwrite: replace an existing folder.
    """
    from safetensors.torch import save_file

    target = free_target(dst, overwrite=overwrite)
    apart(target, src)
    adapters = stored_adapters(src)
    source = Safetensors(base)
    layers = sorted({name.rpartition(".lora_")[0] for name in adapters})
    linear = [each for each in layers if f"{each}.weight" in source.shapes()]
    turned = any(tuple(source.shapes()[f"{each}.weight"]) != _shape(adapters, each) for each in linear[:1])
    config = config_of(settings, linear, base_model_name_or_path=str(base), fan_in_fan_out=turned, inference_mode=True)
    with made_on_disk(target, overwrite=overwrite) as folder:
        save_file({f"base_model.model.{name}": value.contiguous() for name, value in adapters.items()}, folder / _ADAPTERS)
        fsync(folder / _ADAPTERS)
        config.save_pretrained(str(folder))
    return dst


def stored_adapters(src: Place) -> dict[str, torch.Tensor]:
    """Return the adapters of a step by peft's names: ``layer.lora_A.weight``."""
    checkpoint = DistributedCheckpoint(open_step(src))
    found = {}
    for name, stored in checkpoint.tensors.items():
        if name.startswith(MODEL) and ".lora_" in name:
            value = torch.empty(stored.shape, dtype=stored.dtype)
            checkpoint.read(name, tuple(slice(0, size) for size in stored.shape), value)
            found[name.removeprefix(MODEL).replace(f".{NAME}.", ".")] = value
    if not found:
        raise CheckpointError(f"{src} has no adapters; export it with `meshpar export`")
    return found


def _shape(adapters: Mapping[str, torch.Tensor], layer: str) -> tuple[int, int]:
    """Return the shape of a linear layer's weight; GPT-2's Conv1D stores it transposed."""
    return adapters[f"{layer}.lora_B.weight"].shape[0], adapters[f"{layer}.lora_A.weight"].shape[1]
