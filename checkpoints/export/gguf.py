"""Write a model as one GGUF file, tile by tile, with rows in the order of ``conversion/`` of llama.cpp (b9600)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, final

import torch

from meshpar.checkpoints.export.quantizing import fitting, is_high
from meshpar.checkpoints.export.safetensors import ExportOptions, open_model
from meshpar.checkpoints.export.target import free_target, make_on_disk
from meshpar.checkpoints.format.copying import ByteCount, Progress, StoredSource, check_piece, read_tiles
from meshpar.checkpoints.format.verify import Verify
from meshpar.checkpoints.storage.disk import ReadFile
from meshpar.checkpoints.storage.files import Shapes, memory_of, read_json, tiles, write_all
from meshpar.checkpoints.storage.place import Place, PlaceLike, fetched, place
from meshpar.core.errors import CheckpointError, brief
from meshpar.process.imports import need
from meshpar.weights import Permute, Transpose, TypedSource, Unstack, WeightMap
from meshpar.weights.rules import Rule

Kind = Literal["f16", "q8_0", "q4_0"]
KINDS: tuple[Kind, ...] = ("f16", "q8_0", "q4_0")
_TILE_BYTES = 2 << 20  # of float32 values; a multiple of every block
_NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # buffers of old transformers
_CONVERT = "for others, export plain safetensors and run llama.cpp's convert_hf_to_gguf.py on the folder"
_EXPERTS = ("num_experts", "num_local_experts")  # of checkpoints, and of transformers' own configs
# entries of the config that llama.cpp does not read, and what it computes
_COMPUTED = {
    "use_sliding_window": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# how a byte-level tokenizer cuts text, and llama.cpp's name for it
_REGEXES = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt-2",
    rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}": "llama-bpe",
    rf"{_WORDS}|\p{{N}}{_REST}": "qwen2",
}


def _llama_rules(config: Mapping[str, Any]) -> Sequence[Rule]:
    """Rotary pairs are neighbours in llama.cpp, and half a head apart in transformers."""
    names = [f"model.layers.*.self_attn.{letter}_proj.{kind}" for letter in "qk" for kind in ("weight", "bias")]
    return [Permute(name, name, outer=_head_dim(config) // 2, inner=2) for name in names]


def _gpt2_rules(config: Mapping[str, Any]) -> Sequence[Rule]:
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = [f"{prefix}h.*.{layer}.weight" for prefix in ("", "transformer.") for layer in layers]
    return [Transpose(name, name) for name in names]


def _expert_rules(config: Mapping[str, Any]) -> Sequence[Rule]:
    experts, numbers = "model.layers.*.mlp.experts", range(_size(config, *_EXPERTS))
    return [
        Unstack(f"{experts}.{layer}.weight", tuple(f"{experts}.{number}.{layer}.weight" for number in numbers))
        for layer in ("gate_proj", "up_proj", "down_proj")
    ]


@final
@dataclass(frozen=True, slots=True)
class Architecture:
    """llama.cpp's requirements of an architecture, whose ``name`` is llama.cpp's."""

    name: str
    # from transformers' tensors to those with llama.cpp's order of rows, by the config
    rules: Callable[[Mapping[str, Any]], Sequence[Rule]] = lambda _: ()
    norms: float = 0.0  # what is added to the norms' weights


# by `model_type`
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama_rules),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe", _expert_rules),
    "gemma": Architecture("gemma", norms=1.0),
    "gpt2": Architecture("gpt2", _gpt2_rules),
}


def export_gguf(
    src: PlaceLike | TypedSource,
    dst: PlaceLike,
    kind: Kind,
    tokenizer: PlaceLike | None = None,
    progress: Progress | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    weights: WeightMap | None = None,
    verify: Verify = "size",
    high: Sequence[str] = (),
    averaged: str = "trained",
    overwrite: bool = False,
) -> Place:
    """Export the model of a checkpoint to ``dst/model-KIND.gguf`` for llama.cpp. Requires ``meshpar[gguf]``.

    >>> export_gguf("run/checkpoints/latest", "run/gguf", "q8_0", "run/tokenizer")  # doctest: +SKIP

    Args:
        src: as for :func:`meshpar.checkpoints.export_safetensors`, as are the arguments that are not listed.
        dst: the folder to write; it appears once it is complete.
        kind: ``"f16"``; ``"q8_0"``, ``"q4_0"``: blocks of 32 values. Embeddings and heads are float16 in each, norms
            and routers float32.
        tokenizer: a folder with a byte-level BPE in ``tokenizer.json``; None: the file runs on token ids alone.
        high: patterns of modules, by transformers' names, whose weights are float16, too.

    Returns:
        ``dst``.

    Raises:
        CheckpointError: as for an export; an architecture, a rotary scaling or a tokenizer that is not supported.
        MeshparError: ``gguf`` is not installed.
    """
    options = ExportOptions(quantize=kind, tokenizer=tokenizer, config=config, weights=weights, high=high)
    options = replace(options, progress=progress, verify=verify, averaged=averaged, overwrite=overwrite)
    return write_gguf(src, dst, options)


def write_gguf(src: PlaceLike | TypedSource, dst: PlaceLike, options: ExportOptions) -> Place:
    """Export a model to the folder ``dst``, as :func:`export_gguf`; ``options.quantize`` is the kind."""
    library = need("gguf", extra="gguf")
    kind = options.quantize
    if kind not in KINDS:
        raise CheckpointError(f"the kind is {kind!r}; expected one of {', '.join(KINDS)}")
    target = free_target(dst, overwrite=options.overwrite)
    source, config = open_model(src, options)
    architecture = _architecture(config or {})
    assert config is not None
    laid_out = WeightMap(tuple(architecture.rules(config))).view(source)
    names = _names(library, architecture.name, config, laid_out.shapes())
    kinds = _kinds(library, names, laid_out.shapes(), kind, options.high)
    writer = library.GGUFWriter(None, architecture.name)
    _write_keys(library, writer, config, kind)
    tokenizer = None if options.tokenizer is None else fetched(options.tokenizer)
    _write_tokenizer(library, writer, tokenizer, config["vocab_size"])
    if options.verify != "none" and isinstance(source, StoredSource):
        for name in source.shapes():
            for piece in source.pieces(name):
                check_piece(piece)
    offsets = {name: architecture.norms for name in names if name.endswith("norm.weight")}
    with make_on_disk(target, overwrite=options.overwrite) as folder:
        path = folder / f"model-{kind}.gguf"
        _write_file(path, library, writer, laid_out, names, kinds, offsets, _rope_factors(config), options.progress)
    return place(dst)


def _architecture(config: Mapping[str, Any]) -> Architecture:
    """Return what llama.cpp wants of a model; raises CheckpointError for what it does not compute."""
    kind, rope = str(config.get("model_type")), _rope(config)
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"GGUF: the architecture is {kind!r}; this export knows {', '.join(ARCHITECTURES)}; {_CONVERT}"
        )
    if (scaling := rope.get("rope_type", rope.get("type", "default"))) not in ("default", "llama3", "linear"):
        raise CheckpointError(f"GGUF: the rotary scaling is {scaling!r}; this export knows default, linear and llama3")
    settings = {key: config.get(key, only) for key, only in _COMPUTED.items()}
    if wrong := [f"{key} = {value}" for key, value in settings.items() if value not in (_COMPUTED[key], None)]:
        raise CheckpointError(
            f"GGUF: the config has {', '.join(wrong)}, which llama.cpp's {ARCHITECTURES[kind].name} does not compute"
        )
    return ARCHITECTURES[kind]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling, parameters = (config.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    return {"rope_theta": config.get("rope_theta", 10_000.0), **scaling, **parameters}


def _size(config: Mapping[str, Any], *names: str) -> int:
    size = next((config[name] for name in names if config.get(name) is not None), None)
    if size is None:
        raise CheckpointError(f"GGUF: config.json has no {names[0]}; got {', '.join(sorted(config)) or 'nothing'}")
    return int(size)


def _head_dim(config: Mapping[str, Any]) -> int:
    width, heads = _size(config, "hidden_size", "n_embd"), _size(config, "num_attention_heads", "n_head")
    return config.get("head_dim") or width // heads


def _write_keys(library: ModuleType, writer: Any, config: Mapping[str, Any], kind: Kind) -> None:
    """Add the sizes of the model, by the config of any architecture."""
    width, heads = _size(config, "hidden_size", "n_embd"), _size(config, "num_attention_heads", "n_head")
    writer.add_type("model")
    writer.add_file_type(library.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(library.GGML_QUANT_VERSION)
    writer.add_vocab_size(_size(config, "vocab_size"))
    writer.add_block_count(_size(config, "num_hidden_layers", "n_layer"))
    writer.add_context_length(_size(config, "max_position_embeddings", "n_positions", "n_ctx"))
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(config.get("intermediate_size") or config.get("n_inner") or 4 * width)
    writer.add_head_count(heads)
    if config.get("layer_norm_epsilon") is not None:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    rope, head_dim = _rope(config), _head_dim(config)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type", rope.get("type")) == "linear":
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(_size(config, *_EXPERTS))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _names(library: ModuleType, architecture: str, config: Mapping[str, Any], shapes: Shapes) -> dict[str, str]:
    """Return llama.cpp's name of each tensor by transformers' name."""
    number = next(number for number, name in library.MODEL_ARCH_NAMES.items() if name == architecture)
    table = library.get_tensor_name_map(number, _size(config, "num_hidden_layers", "n_layer"))
    weights = [name for name in shapes if not name.endswith(_NOT_WEIGHTS)]
    new_names = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in weights}
    if lost := [name for name, new in new_names.items() if new is None]:
        raise CheckpointError(
            f"GGUF: llama.cpp's {architecture} has no place for {len(lost)} tensors: {', '.join(lost[:3])}"
        )
    return new_names


def _kinds(
    library: ModuleType, names: Mapping[str, str], shapes: Shapes, kind: Kind, high: Sequence[str]
) -> dict[str, Any]:
    """Return how to store each tensor."""
    types = library.GGMLQuantizationType
    quantized = types[kind.upper()]
    matrices = [name for name in names if name.endswith(".weight") and len(shapes[name]) > 1]
    layers = {name.removesuffix(".weight"): shapes[name] for name in matrices}
    chosen = set(fitting(high, layers))
    kinds: dict[str, Any] = {}
    for name in names:
        module = name.removesuffix(".weight")
        exact = module not in layers or module.endswith((".gate", "wpe")) or "norm" in module
        kinds[name] = types.F32 if exact else types.F16 if is_high(module) or module in chosen else quantized
    block, _ = library.GGML_QUANT_SIZES[quantized]
    if odd := [f"{name} {shapes[name]}" for name in names if kinds[name] == quantized and shapes[name][-1] % block]:
        raise CheckpointError(
            f"{kind}: blocks of {block} do not divide the rows of {len(odd)} weights: {', '.join(odd[:3])}; choose f16"
        )
    return kinds


def _write_file(
    path: Path,
    library: ModuleType,
    writer: Any,
    source: TypedSource,
    names: Mapping[str, str],
    kinds: Mapping[str, Any],
    offsets: Mapping[str, float],
    extra: torch.Tensor | None,
    progress: Progress | None,
) -> None:
    """Write the header and the tensors, with ``offsets`` added to some, and ``extra`` as divisors of frequencies."""
    numpy, shapes, sizes = need("numpy"), source.shapes(), dict[str, int]()
    for name in names:
        block, block_bytes = library.GGML_QUANT_SIZES[kinds[name]]
        sizes[name] = math.prod(shapes[name]) // block * block_bytes
    if extra is not None:
        writer.add_tensor_info("rope_freqs.weight", extra.shape, numpy.dtype(numpy.float32), extra.nbytes)
    for name, new in names.items():
        writer.add_tensor_info(new, shapes[name], numpy.dtype(numpy.float32), sizes[name], raw_dtype=kinds[name])
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    count = ByteCount(sum(sizes.values()), progress)
    with path.open("ab", buffering=0) as file:

        def pad(size: int) -> None:
            write_all(file.fileno(), memoryview(bytes(-size % writer.data_alignment)))

        pad(file.tell())
        if extra is not None:
            write_all(file.fileno(), memory_of(extra))
            pad(extra.nbytes)
        for name in names:
            for values in read_tiles(source, name, torch.float32, tiles(shapes[name], 4, _TILE_BYTES)):
                data = library.quants.quantize(values.add_(offsets.get(name, 0.0)).numpy(), kinds[name])
                if kinds[name] == library.GGMLQuantizationType.F16 and not numpy.isfinite(data).all():
                    raise CheckpointError(
                        f"{name} has values that float16 cannot hold; export it by transformers' formats, such as fp8"
                    )
                write_all(file.fileno(), memoryview(data).cast("B"))
                count.add(data.nbytes)
            pad(sizes[name])
        os.fsync(file.fileno())


def _rope_factors(config: Mapping[str, Any]) -> torch.Tensor | None:
    """Return llama.cpp's divisors of rotary frequencies for Llama 3 (``_compute_llama3_parameters``)."""
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    dim, positions, factor = _head_dim(config), rope["original_max_position_embeddings"], rope["factor"]
    length = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((positions / length - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _write_tokenizer(library: ModuleType, writer: Any, folder: Path | None, vocabulary: int) -> None:
    """Add a byte-level BPE, with special tokens and chat template; raises CheckpointError for another tokenizer."""
    if folder is None or not (Path(folder) / "tokenizer.json").is_file():
        writer.add_tokenizer_model("no_vocab")
        return
    path = Path(folder) / "tokenizer.json"
    try:
        data = read_json(ReadFile(path))
        added = {token["id"]: token for token in data["added_tokens"]}
        ids = {number: text for text, number in data["model"]["vocab"].items()}
        merges = data["model"].get("merges")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a tokenizer with a vocabulary: {brief(error)}") from error
    types = library.TokenType
    texts, kinds = [], []
    for number in range(vocabulary):
        if special := added.get(number):
            texts.append(special["content"])
            kinds.append(types.CONTROL if special["special"] else types.USER_DEFINED)
        else:
            texts.append(ids.get(number, f"[PAD{number}]"))
            kinds.append(types.NORMAL if number in ids else types.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(path, data, merges))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if not merges:
        # llama.cpp demands merges, and the package refuses an empty list; this one fits nothing
        writer.add_token_merges([""])
    library.SpecialVocab(Path(folder), load_merges=bool(merges), n_vocab=vocabulary).add_to_gguf(writer, quiet=True)


def _pre(path: Path, data: Mapping[str, Any], merges: object) -> str:
    """Return llama.cpp's name of how a byte-level tokenizer cuts text."""
    steps = data.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    by_bytes = [step for step in steps if step.get("type") == "ByteLevel"]
    cuts = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    cuts += [next(iter(_REGEXES)) for step in by_bytes if step.get("use_regex", True)]
    supported = len(steps) == len(by_bytes) + sum(step.get("type") == "Split" for step in steps) and len(by_bytes) == 1
    if supported and not by_bytes[0].get("add_prefix_space") and data["model"].get("type") == "BPE":
        if not cuts and not merges:
            return "gpt-2"  # single bytes: cutting changes nothing
        if len(cuts) == 1 and cuts[0] in _REGEXES:
            return _REGEXES[cuts[0]]
    raise CheckpointError(
        f"GGUF: {path} is a {data['model'].get('type')} that cuts text by {json.dumps(steps)[:160]}; this export "
        f"writes byte-level BPE with the cuts of {', '.join(_REGEXES.values())}; {_CONVERT}"
    )
