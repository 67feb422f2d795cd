"""A tensor-parallel table for architectures to which transformers gives no ``tp_plan``, from the names and shapes of their projections."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from meshpar.models.huggingface_styles import Heads
from meshpar.passes.local import features_of
from meshpar.passes.tensor.parts import FeatureTable

_QUERIES = ("q", "query", "q_proj", "q_lin")
_KEYS = ("k", "key", "k_proj", "k_lin")
_VALUES = ("v", "value", "v_proj", "v_lin")
_OUTPUTS = ("o", "o_proj", "out_proj", "out_lin", "output", "dense")
# Names of the projections into and out of a feed-forward layer, relative to the module that holds both.
_FEED_FORWARDS = (
    (("fc1",), "fc2"),
    (("wi",), "wo"),
    (("wi_0", "wi_1"), "wo"),
    (("lin1",), "lin2"),
    (("intermediate.dense",), "output.dense"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
)

# fmt: off
VERIFIED: tuple[str, ...] = (
    "bart", "bert", "bert-generation", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom", "camembert", "codegen",
    "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "encoder-decoder", "ernie", "falcon", "fnet",
    "fuyu", "git", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "gptj", "gte", "jina_embeddings_v3", "layoutlm",
    "longt5", "m2m_100", "marian", "mbart", "megatron-bert", "mobilebert", "modernvbert", "mra", "mt5", "nllb-moe", "nomic_bert",
    "openai-gpt", "opt", "pegasus", "persimmon", "plbart", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "tapas", "umt5", "whisper", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xmod", "yoso", "zamba", "zamba2",
)
# fmt: on
"""Architectures whose table from here was exact under every plan of ``benchmarks/architectures.py``."""


def structural_table(model: Any) -> dict[str, Any]:
    """Return module name -> style for a verified architecture's attentions and feed-forward layers, else nothing."""
    if model.config.model_type not in VERIFIED:
        return {}
    table: dict[str, Any] = {}
    for name, module in model.named_modules():
        table |= dict(_attention(model, name, module))
        table |= dict(_feed_forward(name, module))
    return table


def _attention(model: nn.Module, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    children = dict(module.named_children())
    chosen = [next((each for each in names if each in children), None) for names in (_QUERIES, _KEYS, _VALUES)]
    if None in chosen or any(features_of(children[each]) is None for each in chosen if each):
        return
    width = (features_of(children[str(chosen[0])]) or (0, 0))[1]
    output = next((each for each in _OUTPUTS if (features_of(children.get(each, module)) or (0, 0))[0] == width), None)
    tables = [each for each, child in children.items() if isinstance(child, nn.Embedding) and child.embedding_dim == _heads(module)]
    known = {*chosen, *tables, output}
    if any(inner.partition(".")[0] not in known for inner, _ in module.named_parameters()):
        return  # a norm or a residual of its own inside (ALBERT's): its input is not only the projections'
    parent = name.rpartition(".")[0]
    outer = f"{parent}.output.dense" if parent else "output.dense"
    if output is not None:
        yield f"{name}.{output}", "rowwise"
    elif (features_of(_module(model, outer)) or (0, 0))[0] == width:
        yield outer, "rowwise"
    else:
        return
    yield name, Heads(("position_bias",))
    yield from ((f"{name}.{each}", "colwise") for each in chosen)
    yield from ((f"{name}.{each}", FeatureTable(gather=False)) for each in tables)


def _feed_forward(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    for inward, outward in _FEED_FORWARDS:
        ends = [features_of(_module(module, each)) for each in (*inward, outward)]
        *first, last = ends
        if last is not None and all(each == (last[1], last[0]) for each in first) and last[0] != last[1]:
            yield from ((f"{prefix}{each}", "colwise") for each in inward)
            yield f"{prefix}{outward}", "rowwise"
            only = {inner.rpartition(".")[0] for inner, _ in module.named_parameters()} == {*inward, outward}
            # A second input may be a residual (BLOOM's), which is added to what is whole again.
            if name and only and len(inspect.signature(module.forward).parameters) == 1:
                yield name, "region"  # what is drawn inside (dropout) differs from rank to rank


def _heads(attention: nn.Module) -> int | None:
    known: Mapping[str, Any] = vars(attention)
    return next((known[each] for each in ("n_heads", "num_heads", "num_attention_heads") if isinstance(known.get(each), int)), None)


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return nn.Identity()
