"""TransformerConfig: shapes of a :class:`meshpar.models.Transformer`, and their published forms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from meshpar.models.layers import published
from meshpar.weights import Rename, Unstack, WeightMap


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scale RoPE for contexts beyond ``original_positions``, as Llama 3 does.

    Attributes:
        factor: divisor of the low frequencies.
        low_frequency, high_frequency: rotations over ``original_positions`` up to which a frequency is divided by
            ``factor``, and from which it is unchanged; those between are interpolated.
        original_positions: longest sequence of the pre-training in tokens.
    """

    factor: float = 8.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_positions: int = 8192


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Set the shape of a :class:`Transformer`. The defaults are a tiny model for tests.

    >>> from meshpar.models import TransformerConfig
    >>> TransformerConfig.preset("llama-8b", layers=2).dim
    4096

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        dim: width of the model.
        layers: number of layers.
        heads: number of query heads.
        kv_heads: number of key/value heads; None: ``heads``.
        head_dim: channels of a head; None: ``dim / heads``.
        hidden: width of the SwiGLU layer.
        experts: number of experts that replace each SwiGLU layer; 0: none.
        experts_per_token: number of experts that compute each token.
        expert_hidden: width of an expert; None: ``hidden``.
        shared_experts: number of experts that compute every token in addition to the chosen ones. The router then uses
            sigmoid scores and has a bias for each expert, which balances their load (``training.balance_rate``).
        routed_scale: factor of the chosen experts' sum, before the shared experts are added.
        max_positions: longest sequence in tokens.
        rope_theta: base of the rotary embedding's frequencies.
        rope_scaling: scaling of the rotary embedding; None: none.
        norm_eps: epsilon of the norms.
        qk_norm: whether to normalise each head's queries and keys, as Qwen3 does.
        tied: whether the head shares the embedding's weight.
        dropout: probability of dropout on attention weights and on the updates of the residual stream.

    Raises:
        ValueError: a size is not positive, heads, kv_heads and dim do not divide, or a mixture of experts cannot be
            exported.
    """

    vocab_size: int = 512
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int = 384
    experts: int = 0
    experts_per_token: int = 2
    expert_hidden: int | None = None
    shared_experts: int = 0
    routed_scale: float = 1.0
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "layers", "heads", "hidden", "max_positions")
        few = (name for name in sizes if getattr(self, name) < 1)
        problems = [f"{name} is {getattr(self, name)}, expected at least 1" for name in few]
        if not problems and self.head_dim is None and self.dim % self.heads:
            problems.append(f"heads ({self.heads}) does not divide dim ({self.dim}); set head_dim, or change heads")
        if not problems and (self.kv_groups < 1 or self.heads % self.kv_groups):
            problems.append(f"kv_heads ({self.kv_heads}) does not divide heads ({self.heads}); choose a divisor")
        if not problems and self.channels % 2:
            problems.append(f"a head has {self.channels} channels; expected an even number, because RoPE rotates pairs")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, expected at least 0 and less than 1")
        if self.experts and not self.qk_norm:
            problems.append(
                f"experts is {self.experts} and qk_norm is False; set qk_norm=True, as the forms of an export have it"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            problems.append(f"experts_per_token is {self.experts_per_token}, expected 1 to experts ({self.experts})")
        if min(self.experts, self.shared_experts) < 0 or (self.expert_hidden is not None and self.expert_hidden < 1):
            got = f"experts is {self.experts}, shared_experts {self.shared_experts}"
            problems.append(
                f"{got} and expert_hidden {self.expert_hidden}; expected 0 or more, 0 or more, and at least 1"
            )
        if self.routed_scale != 1.0 and not (self.shared_experts and self.routed_scale > 0.0):
            problems.append(
                f"routed_scale is {self.routed_scale}, expected above 0, and 1 without shared_experts, as Qwen3-MoE "
                "has none"
            )
        if problems:
            raise ValueError("TransformerConfig: " + "; ".join(problems))

    @property
    def kv_groups(self) -> int:
        """Number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def channels(self) -> int:
        """Number of channels of a head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TransformerConfig:
        """Return the shape ``name`` of :data:`PRESETS`, with ``changes``; raises ValueError for another name."""
        if name not in PRESETS:
            raise ValueError(f"no Transformer shape is called {name!r}; there are {', '.join(PRESETS)}")
        return replace(PRESETS[name], **changes)


_LLAMA3 = TransformerConfig(vocab_size=128_256, rope_theta=500_000.0, max_positions=8192, kv_heads=8, heads=32)
_QWEN3 = TransformerConfig(vocab_size=151_936, max_positions=40_960, rope_theta=1e6, norm_eps=1e-6, qk_norm=True)
_A3B: dict[str, Any] = {"head_dim": 128, "experts": 128, "experts_per_token": 8, "expert_hidden": 768}
_LLAMA31 = replace(_LLAMA3, max_positions=131_072, rope_scaling=RopeScaling(factor=8.0))

PRESETS: dict[str, TransformerConfig] = {
    "tiny": TransformerConfig(),
    # GPT-2's smallest in this architecture; its 50257 tokens rounded up so that every usual tensor axis divides them.
    "124m": TransformerConfig(vocab_size=50_304, dim=768, layers=12, heads=12, hidden=2048, tied=True),
    "llama-1b": replace(_LLAMA31, dim=2048, layers=16, hidden=8192, tied=True, rope_scaling=RopeScaling(factor=32.0)),
    "llama-8b": replace(_LLAMA3, dim=4096, layers=32, hidden=14_336),
    "llama-70b": replace(_LLAMA3, dim=8192, layers=80, heads=64, hidden=28_672),
    "llama-405b": replace(_LLAMA31, dim=16_384, layers=126, heads=128, hidden=53_248),
    "qwen3-30b-a3b": replace(_QWEN3, dim=2048, layers=48, heads=32, kv_heads=4, hidden=6144, **_A3B),
}
"""Name of a shape -> its configuration; `meshpar describe NAME` prints what each rank would hold."""


_SWIGLU = ("gate", "up", "down")


def published_form(config: TransformerConfig) -> tuple[WeightMap, dict[str, Any]]:
    """Return the map of weights and the config of the published form."""
    names = (Rename(ours, theirs) for ours, theirs in _published_names(config))
    return WeightMap((*names, *_published_experts(config))), _published_config(config)


def _published_names(config: TransformerConfig) -> list[tuple[str, str]]:
    inner, theirs = "layers.*.mlp", "model.layers.*.mlp"
    modules = {
        "embed": "model.embed_tokens",
        **{f"layers.*.attn.{part}": f"model.layers.*.self_attn.{part}_proj" for part in "qkvo"},
        "layers.*.attn_norm": "model.layers.*.input_layernorm",
        "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
        "norm": "model.norm",
        "head": "lm_head",
    }
    shared = bool(config.experts and config.shared_experts)
    if config.experts:
        modules[f"{inner}.router"] = f"{theirs}.gate"
        inner, theirs = f"{inner}.shared", f"{theirs}.shared_experts"
    if shared or not config.experts:
        modules |= {f"{inner}.{part}": f"{theirs}.{part}_proj" for part in _SWIGLU}
    if config.qk_norm:
        modules |= {f"layers.*.attn.{norm}": f"model.layers.*.self_attn.{norm}" for norm in ("q_norm", "k_norm")}
    bias = [("layers.*.mlp.bias", "model.layers.*.mlp.gate.e_score_correction_bias")] if shared else []
    return [(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in modules.items()] + bias


def _published_experts(config: TransformerConfig) -> list[Unstack]:
    rules = []
    for part in _SWIGLU if config.experts else ():
        theirs = (f"model.layers.*.mlp.experts.{number}.{part}_proj.weight" for number in range(config.experts))
        rules.append(Unstack(f"layers.*.mlp.experts.{part}", tuple(theirs)))
    return rules


def _published_config(config: TransformerConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        rope |= {"rope_type": "llama3", "factor": scaling.factor}
        rope |= {"low_freq_factor": scaling.low_frequency, "high_freq_factor": scaling.high_frequency}
        rope["original_max_position_embeddings"] = scaling.original_positions
    more: dict[str, Any] = {}
    kind, name = ("qwen3", "Qwen3") if config.qk_norm else ("llama", "Llama")
    if config.experts:
        kind, name, more = _published_mixture(config)
        rope |= {"partial_rotary_factor": 1.0} if config.shared_experts else {}
    more |= {"vocab_size": config.vocab_size, "hidden_size": config.dim, "intermediate_size": config.hidden}
    more |= {"num_hidden_layers": config.layers, "max_position_embeddings": config.max_positions}
    more |= {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_groups, "head_dim": config.channels}
    more |= {"attention_bias": False, "attention_dropout": config.dropout, "hidden_act": "silu"}
    more |= {"rms_norm_eps": config.norm_eps, "rope_parameters": rope}
    return published(kind, f"{name}ForCausalLM", tied=config.tied) | more


def _published_mixture(config: TransformerConfig) -> tuple[str, str, dict[str, Any]]:
    """Return type, name and settings of the published form: Qwen3-MoE, or GLM4-MoE with shared experts and a bias."""
    common = {"num_experts_per_tok": config.experts_per_token, "norm_topk_prob": True}
    common["moe_intermediate_size"] = config.expert_hidden or config.hidden
    if not config.shared_experts:
        experts = {"num_experts": config.experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return "qwen3_moe", "Qwen3Moe", common | experts
    counts = {"n_routed_experts": config.experts, "n_shared_experts": config.shared_experts}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    rest = {"routed_scaling_factor": config.routed_scale, "use_qk_norm": True}
    return "glm4_moe", "Glm4Moe", common | counts | groups | rest
