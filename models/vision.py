"""Layouts of vision transformers: timm's, and the towers of open_clip. Neither package is imported."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from meshpar.core.layout import ModelLayout, TensorLayout

_LISTS = ("blocks", "resblocks")
_COUNTS = ("num_heads", "attn_dim")
_FEED_FORWARDS = (("fc1", "fc2"), ("c_fc", "c_proj"))


def layout_for(module: nn.Module) -> ModelLayout | None:
    """Return the layout of a model of timm or open_clip with blocks of attention and feed-forward, else None."""
    packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    layout = vision_layout(module) if packages & {"timm", "open_clip"} else None
    return layout if layout is not None and layout.tensor.styles else None


def vision_layout(model: nn.Module) -> ModelLayout:
    """Describe a model whose blocks are named as in timm's vision transformers or in the towers of open_clip.

    >>> from torch import nn
    >>> block = nn.ModuleDict({"mlp": nn.ModuleDict({"fc1": nn.Linear(8, 32), "fc2": nn.Linear(32, 8)})})
    >>> vision_layout(nn.ModuleDict({"blocks": nn.Sequential(block)})).tensor.styles
    {'blocks.*.mlp.fc1': 'colwise', 'blocks.*.mlp.fc2': 'rowwise'}

    Blocks are the lists ``blocks`` and ``resblocks``. ``tp`` splits their feed-forward layers, and the heads of an
    attention with one projection ``qkv``, whose counts of heads and features each rank sets to its own. Attention by
    ``nn.MultiheadAttention`` (open_clip's), with a norm over all heads, or without ``attn_dim`` (older timm)
    stays whole.
    """
    lists = [
        name
        for name, child in model.named_modules()
        if name.rpartition(".")[2] in _LISTS and len(list(child.children()))
    ]
    styles, heads = dict[str, str](), dict[str, int]()
    for name in lists:
        blocks = list(model.get_submodule(name).children())
        for part, table in (("attn", _attention), ("mlp", _feed_forward)):
            tables = [dict(table(getattr(block, part, None))) for block in blocks]
            if all(entries == tables[0] for entries in tables):
                styles |= {f"{name}.*.{part}{leaf}": style for leaf, style in tables[0].items()}
                if ".qkv" in tables[0]:
                    heads[f"{name}.*.attn.qkv"] = vars(blocks[0].get_submodule("attn"))["num_heads"]
    return ModelLayout(blocks=tuple(f"{name}.*" for name in lists), tensor=TensorLayout(styles, heads=heads))


def _attention(attention: nn.Module | None) -> Iterator[tuple[str, str]]:
    """Yield the styles of timm's attention, by what follows its name."""
    children = _with_parameters(attention)
    if attention is None or not {"qkv", "proj"} <= children <= {"qkv", "proj", "q_norm", "k_norm", "gate"}:
        return
    if all(isinstance(vars(attention).get(count), int) for count in _COUNTS):
        yield "", f"region:{','.join(_COUNTS)}"
        styles = {"qkv": "packed_colwise:3", "proj": "rowwise", "gate": "colwise"}
        yield from ((f".{child}", styles.get(child, "grad_sum")) for child in sorted(children))


def _feed_forward(module: nn.Module | None) -> Iterator[tuple[str, str]]:
    """Yield the styles of two linear layers with an activation between them."""
    for first, last in _FEED_FORWARDS:
        if _with_parameters(module) == {first, last}:
            yield from ((f".{first}", "colwise"), (f".{last}", "rowwise"))


def _with_parameters(module: nn.Module | None) -> set[str]:
    """Return the children of a module that hold its parameters; none where it holds some itself."""
    names = [] if module is None else [name.partition(".") for name, _ in module.named_parameters()]
    return {child for child, dot, _ in names if dot} if all(dot for _, dot, _ in names) else set()
