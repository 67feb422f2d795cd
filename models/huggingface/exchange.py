"""ContextParallel for transformers' models, through transformers' two interfaces, for masks and for attention.

Masks are made for this rank's rows of the whole sequence; attention exchanges positions around the model's own.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar.core.errors import MeshparError
from meshpar.core.layout import AttentionLayout
from meshpar.models.huggingface.tensor import HEAD_RATIO
from meshpar.passes.positions.attention import NO_POSITIONS, added, causal_mask, documents
from meshpar.passes.positions.parallel import Exchange
from meshpar.step.inner_calls import record

_SERVED = ("sdpa", "eager")
_OWN = ("indexer", "compressor", "prepare_dynamic_mask", "rel_logits_proj")
"""Names of what chooses keys, or adds a bias, among the positions of a whole row."""
_numbers = itertools.count()


def exchange_positions(model: Any, exchange: Exchange) -> None:
    """Let the attention of a transformers model exchange positions. ``AttentionLayout.exchange`` of such a model."""
    from transformers import AttentionInterface, AttentionMaskInterface

    alibi = getattr(model.config.get_text_config(), "alibi", False)  # which counts positions in the mask
    placed = bool(_takes_positions(model) or _places_in(model)) and not alibi
    sequence = _WholeSequence(exchange, model.config._attn_implementation, _counted_in(model), placed=placed)
    name = f"meshpar_positions_{next(_numbers)}"
    AttentionInterface.register(name, sequence.attend)
    AttentionMaskInterface.register(name, sequence.mask)
    # Copies, for another model may have been made from the same config.
    copies, before = dict[int, Any](), dict[int, tuple[Any, Any]]()
    for owner in model.modules():
        config: Any = getattr(owner, "config", None)
        if hasattr(config, "_attn_implementation"):
            owner.config = copied = copy.deepcopy(config, copies)
            before[id(copied)] = copied, copied._attn_implementation

    @contextmanager
    def as_written() -> Iterator[None]:
        for config, written in before.values():
            config._attn_implementation = written
        try:
            yield
        finally:
            for config, _ in before.values():
                config._attn_implementation = name

    with as_written():
        exchange.as_written.append(as_written)
    record(model).exchange = exchange
    for embedding in _places_in(model):
        embedding.register_forward_pre_hook(sequence.places, with_kwargs=True)
    model.generate = _refuse_generate
    model.register_forward_pre_hook(sequence.begin, with_kwargs=True)


def _refuse_generate(*args: object, **kwargs: object) -> None:
    raise MeshparError(
        "generate makes one position after another, and each rank has a part of them; generate on a mesh without cp"
    )


def attention_layout(model: Any) -> AttentionLayout:
    """Return what :class:`meshpar.ContextParallel` needs to know of a transformers model."""
    name, text = type(model).__name__, model.config.get_text_config()
    mixers_refusal = (
        f"{name} takes no position_ids, and ContextParallel gives each rank positions of its own; use "
        "a mesh without cp, or name what mixes positions, ContextParallel(mixers=(...)), for each rank to compute it "
        "on whole sequences"
    )
    chosen = next((field for field in ("index_topk", "keep_window_size") if getattr(text, field, None)), "")
    documents_refusal = (
        f"{name} chooses the keys that a query sees ({chosen}={getattr(text, chosen, None)}) among "
        "those of the whole row"
    )
    return AttentionLayout(
        mixers=_mixers(model),
        exchange=exchange_positions,
        counts_positions=_counts_positions(model),
        refusal=_refusal(model),
        mixers_refusal="" if _takes_positions(model) or _places_in(model) else mixers_refusal,
        documents_refusal=documents_refusal if chosen else "",
    )


def _refusal(model: Any) -> str:
    """Return why a model's positions cannot be split, as far as its config tells; empty where nothing does."""
    kind = type(model).__name__
    if model.config._attn_implementation not in _SERVED:
        return (
            f"{kind} attends by {model.config._attn_implementation!r}, and ContextParallel serves 'sdpa' and 'eager'; "
            "build the model with attn_implementation='sdpa'"
        )
    if model.config.is_encoder_decoder:
        return f"{kind} attends from one sequence to another, and ContextParallel splits one; use a mesh without cp"
    text = model.config.get_text_config()
    if getattr(text, "axial_pos_embds", False):
        return (
            f"{kind} has embeddings of places for one length alone (axial_pos_embds), and each rank has a part; use a "
            "mesh without cp"
        )
    ropes = [getattr(text, "rope_parameters", None), getattr(text, "rope_scaling", None)]
    ropes += [inner for rope in ropes if isinstance(rope, dict) for inner in rope.values()]
    for rope in ropes:
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            return (
                f"{kind} turns its positions by the longest that it sees (rope_type {rope['rope_type']!r}), and each "
                "rank sees others; use a mesh without cp"
            )
    return ""


def _mixers(model: Any) -> tuple[str, ...]:
    """Return the text's modules that mix positions in their own way: past the interface, recurrent, by whole rows."""
    modules, configs = dict(model.named_modules()), (id(model.config), id(model.config.get_text_config()))
    models = {f"{name}.": child for name, child in modules.items() if hasattr(child, "base_model")}
    towers = tuple(name for name, child in models.items() if id(child.config) not in configs)
    text = {name: child for name, child in modules.items() if not name.startswith(towers)}
    attending = {
        name: child for name, child in text.items() if "Attention" in type(child).__name__ and _projects(child)
    }
    names = [
        name
        for name, module in attending.items()
        if not _by_interface(type(module)) or any(hasattr(module, attribute) for attribute in _OWN)
    ]
    classes = vars(sys.modules[type(model).__module__]).items()
    if any(_by_interface(kind) for name, kind in classes if "Attention" in name and isinstance(kind, type)):
        lists = ((name, blocks) for name, blocks in text.items() if isinstance(blocks, nn.ModuleList))
        every = [(f"{name}.{number}", block) for name, blocks in lists for number, block in enumerate(blocks)]
        parts = ((f"{name}.{part}", child) for name, block in every for part, child in block.named_children())
        names += (name for name, part in parts if any(isinstance(inner, nn.Conv1d) for inner in part.modules()))
    outer = tuple(f"{name}." for name in names)
    return tuple(dict.fromkeys(name for name in names if not name.startswith(outer)))


def _projects(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D" for child in module.children())


def _by_interface(kind: type) -> bool:
    methods = [value for base in kind.__mro__ for value in vars(base).values() if hasattr(value, "__code__")]
    return any("ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names for method in methods)


def _counts_positions(model: Any) -> bool:
    """Return whether a model itself derives its tokens' positions if it gets none: from padding, or an embedding."""
    return _counted_in(model) is not None or not _takes_positions(model)


def _takes_positions(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


def _counted_in(model: nn.Module) -> Any:
    """Return the embedding of a model that counts its tokens from its padding: RoBERTa and its like."""
    return next((child for child in model.modules() if hasattr(child, "create_position_ids_from_input_ids")), None)


def _places_in(model: nn.Module) -> list[nn.Module]:
    """Return the embeddings of places of a model that takes no ``position_ids``: BART and its like."""
    if _takes_positions(model):
        return []
    embeddings = [child for child in model.modules() if isinstance(child, nn.Embedding)]
    return [embedding for embedding in embeddings if embedding.padding_idx is None and _takes_positions(embedding)]


@final
class _WholeSequence:
    """The sequence that one model computes now, as its masks need it."""

    def __init__(self, exchange: Exchange, inner: str, counting: Any, *, placed: bool) -> None:
        self._exchange, self._inner, self._counting, self._placed = exchange, inner, counting, placed
        self._ids = torch.empty(0)
        self._counted: Tensor | None = None
        self._ahead: dict[tuple[int, str], bool] = {}  # by what a mask is made of
        self._causal = True

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Learn where documents and padding are, at the start of the model's forward. Collective."""
        if self._exchange.alone:
            return args, kwargs
        self._causal = True
        ids = kwargs.get("position_ids")
        joined = ids is None and _counts_positions(model)  # where nobody says where documents begin, a row is one
        if joined:
            ids = self._counted_from(args[0] if args else kwargs.get("input_ids"))
            kwargs = {**kwargs, "position_ids": ids} if self._counting is not None else kwargs
        if ids is None:
            raise MeshparError(NO_POSITIONS)
        if ids.ndim != 2:
            raise MeshparError(f"position_ids must be (B, L) where positions are split, got shape {tuple(ids.shape)}")
        counting = kwargs.get("attention_mask")
        if counting is not None and not (isinstance(counting, Tensor) and counting.ndim == 2):
            shape = tuple(counting.shape) if isinstance(counting, Tensor) else type(counting).__name__
            raise MeshparError(
                f"attention_mask must be (B, L) where positions are split, got {shape}; par.split splits such a mask"
            )
        whole = self._exchange.values(ids, 1)
        # As in one process: documents are looked for where no mask says what counts.
        one_document = counting is not None or joined
        self._ids = torch.arange(whole.shape[1], device=whole.device)[None] if one_document else whole
        self._counted = None if counting is None else self._exchange.values(counting, 1).bool()
        # With a mask, transformers looks for no documents: a rank's positions jump where none begins.
        mask = torch.ones_like(ids) if counting is None else counting
        # A model without places counts them in its mask (ALiBi), for modules that compute the whole sequence.
        return args, {**kwargs, "attention_mask": mask if self._placed else self._exchange.values(mask, 1)}

    def _counted_from(self, input_ids: Tensor | None) -> Tensor:
        """Return this rank's positions, (B, L) int64, as the model counts them in the whole sequence. Collective."""
        if input_ids is None:
            raise MeshparError(
                "a model that counts its positions itself is split by its input_ids, got none; use a mesh without cp"
            )
        length = input_ids.shape[1] * self._exchange.size
        rows = self._exchange.rows(length, input_ids.device)
        if self._counting is None:
            return rows[None].expand(input_ids.shape[0], -1)
        whole = self._exchange.values(input_ids, 1)
        counted: Tensor = self._counting.create_position_ids_from_input_ids(whole, self._counting.padding_idx)
        return counted.index_select(1, rows)

    def places(self, embedding: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Tell an embedding of places which this rank has."""
        if self._exchange.alone:
            return args, kwargs
        return args, {**kwargs, "position_ids": self._exchange.rows(self._ids.shape[1], self._ids.device)}

    def mask(
        self, *, q_length: int, mask_function: Callable[..., Any], dtype: torch.dtype, device: torch.device, **rest: Any
    ) -> Tensor:
        """Return the mask of this rank's rows: what the model's own function allows, within a document."""
        ids, length = self._ids, self._ids.shape[1]
        same = causal_mask(documents(ids), self._exchange, causal=False)
        queries = slice(None) if self._exchange.transport == "heads" else self._exchange.rows(length, device)
        rows = torch.arange(len(ids), device=device)[:, None, None, None]
        made_of = _made_of(mask_function)
        # Masks follow positions in documents, as transformers asks for packed rows.
        if any(isinstance(value, Tensor) and value.ndim > 1 for value in made_of):
            raise MeshparError(
                "the model's mask looks at more than positions (kinds of tokens, blocks), of which a rank has a part; "
                "use a mesh without cp"
            )
        allowed = same & mask_function(rows, torch.zeros_like(rows), ids[:, None, queries, None], ids[:, None, None, :])
        self._causal = self._causal and not self._looks_ahead(mask_function, made_of, length, queries, device)
        if self._counted is not None:
            allowed = allowed & self._counted[:, None, None]
        mask = added(allowed, dtype)
        # Not -inf for a model's own softmax, which transformers never gives it.
        return mask if self._inner == "sdpa" else mask.clamp_(min=torch.finfo(dtype).min)

    def _looks_ahead(
        self, function: Callable[..., Any], made_of: tuple[Any, ...], length: int, queries: Any, device: torch.device
    ) -> bool:
        """Return whether a mask lets a query see a later position; once for each kind, for it waits for the device."""
        kind = (length, repr(made_of))
        varies = any(isinstance(value, Tensor) for value in made_of)
        if varies or kind not in self._ahead:
            places = torch.arange(length, device=device)
            zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
            seen = function(zero, zero, places[None, None, queries, None], places[None, None, None])
            self._ahead[kind] = bool((seen & (places[queries, None] < places)).any())
        return self._ahead.pop(kind) if varies else self._ahead[kind]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend as the model did before, over the positions of every rank; returns (B, L, H, C)."""
        from transformers import AttentionInterface

        def inner(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            function = _eager(module) if self._inner == "eager" else AttentionInterface()[self._inner]
            with _head_ratio(module, q.shape[1] // k.shape[1]):
                return function(module, q, k, v, mask, **options)[0].transpose(1, 2)

        if options.get("position_bias") is not None:
            raise MeshparError(
                f"{type(module).__name__} adds a bias of its own to its scores, of a rank's positions; use a mesh "
                "without cp"
            )
        causal = self._causal and bool(getattr(module, "is_causal", True))
        attended = self._exchange.attend(inner, query, key, value, attention_mask, causal=causal)
        return attended.transpose(1, 2).contiguous(), None


def _made_of(function: Any) -> tuple[Any, ...]:
    """Return the code and the values that a mask's function was made of."""
    if isinstance(function, tuple | list):
        return tuple(part for element in function for part in _made_of(element))
    if not hasattr(function, "__code__"):
        return (function,)
    return (function.__code__, *(part for cell in function.__closure__ or () for part in _made_of(cell.cell_contents)))


@contextmanager
def _head_ratio(module: nn.Module, ratio: int) -> Iterator[None]:
    """Let a module know how many of these queries' heads share a head of keys: a part of its heads may have fewer."""
    before = module.__dict__.get(HEAD_RATIO, ratio)
    try:
        if before != ratio:
            setattr(module, HEAD_RATIO, ratio)
        yield
    finally:
        if before != ratio:
            setattr(module, HEAD_RATIO, before)


def _eager(module: nn.Module) -> Any:
    """Return the model's own attention without a kernel, which stands beside its class."""
    files: Any = (sys.modules.get(base.__module__) for base in type(module).__mro__)
    return next(file for file in files if "eager_attention_forward" in vars(file)).eager_attention_forward
