"""Export trained adapters: merged into the weights below them, or in peft's own format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch

from meshpar.checkpoints import DistributedCheckpoint, Safetensors, open_step
from meshpar.checkpoints.checkpointable import MODEL
from meshpar.checkpoints.export import apart, free_target, made_whole
from meshpar.checkpoints.storage import Place, fsync, on_disk
from meshpar.errors import CheckpointError
from meshpar.training.lora import NAME, LoRA
from meshpar.weights import TypedSource
from meshpar.weights.views import spans_of

_ADAPTERS = "adapter_model.safetensors"


@final
class Merged:
    """The weights of a model with its adapters added, read slice by slice: ``W + alpha / rank * B @ A``.

    Args:
        base: the frozen weights.
        adapters: ``layer.lora_A.weight`` and ``layer.lora_B.weight`` of every adapted layer.
        scale: ``alpha / rank``.
    """

    def __init__(self, base: TypedSource, adapters: Mapping[str, torch.Tensor], scale: float) -> None:
        self.shapes, self.dtypes, self._base, self._scale = base.shapes, base.dtypes, base, scale
        layers = sorted({name.rpartition(".lora_")[0] for name in adapters})
        if lost := [layer for layer in layers if f"{layer}.weight" not in base.shapes()]:
            raise CheckpointError(
                f"the weights have no {lost[0]}.weight, and an adapter belongs to it; give the folder of weights that was adapted"
            )
        self._pairs = {f"{each}.weight": (adapters[f"{each}.lora_A.weight"], adapters[f"{each}.lora_B.weight"]) for each in layers}

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out``."""
        if name not in self._pairs:
            self._base.read(name, index, out)
            return
        shape = self.shapes()[name]
        (top, bottom), (left, right) = spans_of(index, shape)
        a, b = (each.float() for each in self._pairs[name])
        transposed = (b.shape[0], a.shape[1]) != shape
        rows, columns = (slice(left, right), slice(top, bottom)) if transposed else (slice(top, bottom), slice(left, right))
        delta = b[rows] @ a[:, columns] * self._scale
        whole = torch.empty(out.shape, dtype=torch.float32)
        self._base.read(name, index, whole)
        out.copy_(whole + (delta.T if transposed else delta))


def merged(src: Place, settings: LoRA, base: Place) -> Merged:
    """Return the weights of the adapted model, to be exported tile by tile, with the result of peft's ``merge_and_unload``.

    Args:
        src: a step of adapters, or the folder of all steps (its newest).
        settings: settings of the adapters.
        base: the folder of the adapted weights.
    """
    return Merged(Safetensors(base), stored_adapters(src), settings.alpha / settings.rank)


def export_adapters(src: Place, dst: Path, settings: LoRA, base: Place, *, overwrite: bool = False) -> Path:
    """Write the adapters in peft's format (``PeftModel.from_pretrained``).

    The folder appears, or replaces the old one, once it is complete.

    Args:
        src: a step of adapters, or the folder of all steps (exports the newest).
        dst: the folder to write.
        settings: settings of the adapters.
        base: the folder of the adapted weights.
        overwrite: replace an existing folder.
    """
    import peft
    from safetensors.torch import save_file

    target = free_target(on_disk(dst, why="peft writes its files itself"), overwrite=overwrite)
    apart(target, src)
    adapters = stored_adapters(src)
    layers = sorted({name.rpartition(".lora_")[0] for name in adapters})
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType] - peft takes any number
        lora_dropout=settings.dropout,
        target_modules=layers,
        base_model_name_or_path=str(base),
        fan_in_fan_out=_transposed(adapters, Safetensors(base)),
        inference_mode=True,
    )
    with made_whole(target, overwrite=overwrite) as folder:
        assert isinstance(folder, Path)
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


def _transposed(adapters: Mapping[str, torch.Tensor], base: TypedSource) -> bool:
    """Return whether the adapted layers store their weights transposed, as GPT-2's Conv1D does."""
    name, a = next((name, value) for name, value in adapters.items() if ".lora_A." in name)
    layer = name.rpartition(".lora_")[0]
    b = adapters[f"{layer}.lora_B.weight"]
    return tuple(base.shapes()[f"{layer}.weight"]) != (b.shape[0], a.shape[1])
