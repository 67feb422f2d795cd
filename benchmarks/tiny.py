"""Tiny random models of transformers' architectures: configs made small by their fields' names, and inputs that fit.

One table of rules serves every architecture; what a family needs beyond it stands in ``FAMILIES``, each with its cause.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch

VOCAB, HIDDEN, HEADS, HEAD_DIM, KV_HEADS, LAYERS, LENGTH = 96, 32, 4, 8, 2, 2, 16

# The first pattern that fits a field's name gives its value; an unset field (None) stays unset, for the config derives
# it.
RULES: tuple[tuple[str, Any], ...] = (
    (
        r"(vocab_size|decoder_vocab_size|audio_vocab_size|vocab_size_per_layer_input|ngram_vocab_size_base|codebook_size)",
        VOCAB,
    ),
    (r"(encoder_hash_byte_group_vocab|pronunciation_vocab_size|shape_vocab_size)", VOCAB),
    (r"pad_token_id", 0),
    (r"(bos|decoder_start|forced_bos|cls)_token_id", 1),
    (r"(eos|forced_eos|eod|sep)_token_id", 2),
    (
        r"(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|hidden_size_global|attention_hidden_size)",
        HIDDEN,
    ),
    (
        r"(backbone_hidden_size|cross_attention_hidden_size|lru_width|out_hidden_size|input_embedding_size|output_embedding_size)",
        HIDDEN,
    ),
    (
        r"(mm_embed_dim|output_proj_dims|projection_dim|vision_output_dim|adapter_out_dim|adapter_in_dim|adapter_input_size)",
        HIDDEN,
    ),
    (
        r"(pronunciation_embed_dim|shape_embed_dim|audio_embed_dim|projector_(input|output)_dim|depth_hidden_size)",
        HIDDEN,
    ),
    (
        r"(kv_channels|head_dim|swa_head_dim|mamba_head_dim|mamba_d_head|linear_(key|value)_head_dim|linear_head_dim|v_head_dim)",
        HEAD_DIM,
    ),
    (
        r"(qk_nope_head_dim|index_head_dim|indexer_head_dim|d_kv|dim_head|attention_head_size|global_head_dim|swa_v_head_dim)",
        HEAD_DIM,
    ),
    (r"(qk_rope_head_dim|rotary_dim)", 4),
    (r"(qk_head_dim)", 12),
    (
        r"(kv_lora_rank|q_lora_rank|o_lora_rank|laurel_rank|hidden_size_per_layer_input|gated_norm_rank|hc_lowrank|low_rank.*|d_rel)",
        16,
    ),
    (
        r"(moe_)?(\w*shared_)?(\w*)intermediate_size(_mlp)?|ffn_dim|\w+_ffn_dim|d_ff|dff|dim_ff|n_inner|feed_forward_size|mlp_dim",
        48,
    ),
    (r"(expert_)?ffn_hidden_size|moe_latent_size|moe_ffn_dim|prompt_mid_dim|mamba_d_ssm", 48),
    (
        r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_(encoder|decoder)_layers|depth|num_blocks)",
        LAYERS,
    ),
    (r"(num_global_layers|conf_num_hidden_layers|num_decoder_layers|num_layers_per_stack|encoder_num_layers)", LAYERS),
    (
        r"(num_key_value_heads|num_kv_heads|swa_num_key_value_heads|global_num_key_value_heads|num_global_key_value_heads)",
        KV_HEADS,
    ),
    (r"(linear_num_key_heads|indexer_kv_heads)", 2),
    (
        r"(num_attention_heads|n_heads?|num_heads|attention_heads|\w+_attention_heads|swa_num_attention_heads|index_n_heads)",
        HEADS,
    ),
    (
        r"(linear_num_value_heads|linear_num_heads|mamba_n_heads|mamba_num_heads|indexer_n_heads|conf_num_attention_heads)",
        HEADS,
    ),
    (
        r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|\w*max_position_embeddings|max_target_positions)",
        64,
    ),
    (r"(max_source_positions|rel_extent|log_scaling_n_floor)", 64),
    (
        r"(sliding_window|sliding_window_size|attention_window_size|local_attention|attention_chunk_size|keep_window_size)",
        8,
    ),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|n_routed_experts)", 4),
    (r"(num_experts_per_tok|moe_topk|moe_k|moe_top_k|top_k_experts|num_selected_experts|moe_topk)", 2),
    (
        r"(n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts|first_k_dense_replace|num_dense_layers)",
        1,
    ),
    (r"(zero_expert_num)", 2),
    (r"(mamba_d_state|state_size|ssm_state_size)", 8),
    (r"(mamba_n_groups|n_groups|mamba_ngroups)", 2),
    (r"(chunk_size|mamba_chunk_size|chunk_length)", 8),
    (r"(index_topk|indexer_budget)", 8),
    (r"(index_block_size)", 4),
    (r"(image_size|crop_size)", 32),
    (r"(window_size)", 4),
    (r"(patch_size)", 8),
    (r"(num_position_embeddings|position_embedding_size|mm_posemb_size)", 64),
    (r"(num_mel_bins|feature_size|input_feat_size)", 16),
    (r"(num_mtp_layers|num_nextn_predict_layers)", 0),
    (r"(dropout|\w*dropout\w*|\w*pdrop|layerdrop|\w*layerdrop|moe_jitter_eps|router_jitter_noise|jitter_noise)", 0.0),
    (r"(\w+_token_(id|index)|image_token_index)", 5),
    (r"(max_window_layers)", 1),
)

# Fields that a config derives from others where they are unset, and that should be small and uneven all the same.
FORCED = re.compile("head_dim|num_key_value_heads|n_routed_experts|moe_topk")

_SWA = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 12,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

_QWEN4 = {
    "ple_embed_dim": HIDDEN,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}

# What a family's own constraints ask for, by model type; nested dicts reach into sub-configs.
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": True},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "dots3_note_text": {f"swa_{key}": value for key, value in _SWA.items()},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "global_head_dim": 16}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8},
    "moshi": {"audio_encoder_config": {"codebook_size": 64}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ("local", "lsh"),
    },
    "t5": {"decoder_start_token_id": 0},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 4, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": HEADS},
    "flaubert": {"emb_dim": HIDDEN},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "fsmt": {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "langs": ["en", "de"]},
    "xlm": {"emb_dim": HIDDEN},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "xmod": {"default_language": "en_XX"},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return a small config of ``model_type``; ``changes`` are laid over it."""
    from transformers import CONFIG_MAPPING

    return _shrink(CONFIG_MAPPING[model_type], FAMILIES.get(model_type, {}) | changes)


def _shrink(kind: type, changes: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        small = _small(field.name, field.default)
        if small is not dataclasses.MISSING:
            values[field.name] = small
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = HEADS  # latent attention makes keys and values for every head
    for name in getattr(kind, "sub_configs", {}):
        nested, sub = changes.get(name, {}), _sub_config(kind, name)
        if sub is not None and isinstance(nested, dict):
            values[name] = _shrink(sub, nested)
    values |= {name: value for name, value in _layer_kinds(kind).items() if name not in changes}
    return kind(
        **values | {name: value for name, value in changes.items() if not isinstance(value, dict) or name not in values}
    )


def _sub_config(kind: Any, name: str) -> type | None:
    """Return the class of a sub-config; some configs name it by a model type."""
    from transformers import CONFIG_MAPPING, AutoConfig

    sub = kind.sub_configs[name]
    model_type = getattr(sub, "model_type", None)
    sub = getattr(sub, "config_class", sub)
    if sub is AutoConfig or not dataclasses.is_dataclass(sub):
        spec = getattr(kind, "sub_configs_defaults", {}).get(name)
        model_type = model_type or getattr(spec, "model_type", None)
        sub = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401  its get is not lazy
    return sub if dataclasses.is_dataclass(sub) else None  # type: ignore[return-value]


def _layer_kinds(kind: Any) -> dict[str, Any]:
    """Return the fields that give each layer its kind, one layer for every combination that the config's defaults
    have.
    """
    try:
        whole = kind()
    except Exception:  # noqa: BLE001  some configs cannot be built from nothing; their family says what they need
        return {}
    count = vars(whole).get("num_hidden_layers")
    lists = {}
    for field in dataclasses.fields(kind):
        value = vars(whole).get(field.name)
        if isinstance(value, list | tuple) and len(value) == count and count:
            differs = (
                1 < len(set(map(str, value))) < count
            )  # what some layers have and others not: sparsity, no rotary positions
            if differs or re.search("layer_type|layers_block_type|block_types", field.name):
                lists[field.name] = list(value)
    if not lists:
        return {}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True)))[:4]
    kinds = kinds * 2 if len(kinds) == 1 else kinds
    layers = {name: [layer_kinds[place] for layer_kinds in kinds] for place, name in enumerate(lists)}
    number = next(
        (
            field.name
            for field in dataclasses.fields(kind)
            if field.name in ("num_hidden_layers", "n_layer", "num_layers")
        ),
        None,
    )
    return layers | ({number: len(kinds)} if number else {})


def _small(name: str, default: Any) -> Any:
    """Return a field's small value, or MISSING where its default stays."""
    if isinstance(default, bool | str | tuple | list | dict):
        return dataclasses.MISSING
    value = next((value for pattern, value in RULES if re.fullmatch(pattern, name)), None)
    if value is None or (default in (None, dataclasses.MISSING) and not FORCED.fullmatch(name)):
        return dataclasses.MISSING
    if isinstance(default, int) and not isinstance(value, float):
        return min(value, default) if default > 0 else default if default < 0 else value
    return type(default)(value) if isinstance(default, int) else value


def set_dropout(model: torch.nn.Module) -> None:
    """Turn every dropout off: what is compared must not be drawn."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0


def tiny_model(model_type: str, task: str) -> Any:
    """Return a small model with random weights in float32, in training mode, without dropout and without a cache.

    Args:
        model_type: transformers' name of the architecture.
        task: ``causal``, ``seq2seq``, ``masked``, ``classifier``.
    """
    import transformers

    auto = {
        "causal": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "masked": transformers.AutoModelForMaskedLM,
        "classifier": transformers.AutoModelForSequenceClassification,
    }[task]
    config = tiny_config(
        model_type, **({"is_decoder": False} if task in ("masked", "classifier") and model_type == "bert" else {})
    )
    config.use_cache = False
    if task == "classifier":
        config.pad_token_id = 0  # the last token that is no padding is what some classify
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32).train()
    set_dropout(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # What is zero or one at the start (biases, norms, sinks) would hide a part that is wrong.
            if parameter.requires_grad and parameter.is_floating_point() and not parameter.is_meta:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def tiny_batch(task: str, rows: int = 4, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return ``rows`` of inputs for a model of :func:`tiny_model`."""
    generator = torch.Generator().manual_seed(2)
    batch = {"input_ids": torch.randint(10, 90, (rows, length), generator=generator)}
    if task == "classifier":
        batch["input_ids"][:, -1] = 1  # the end of the text is what T5 classifies
    if task == "seq2seq":
        batch["decoder_input_ids"] = torch.randint(10, 90, (rows, length // 2), generator=generator)
    return batch
