"""Transformer: a decoder with RMSNorm, RoPE, grouped-query attention, and SwiGLU or experts.

Shape suffixes: B batch, L sequence, D model, H query heads, G key/value heads, C channels of a head, R rotations (C /
2), F hidden, V vocabulary. Under tensor parallelism H, G, F and V are this rank's part, read from the tensors.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar.core.layout import ExpertsLayout, ModelLayout, TensorLayout
from meshpar.models.layers import Embedding, Linear, Mixture, ModelOutput, next_token_loss, positions_of
from meshpar.models.transformer_config import RopeScaling, TransformerConfig, published_form
from meshpar.passes.positions.attention import Mask, attention, attention_mask
from meshpar.passes.tensor.parts import Parts


@final
class Transformer(nn.Module):
    """Build a decoder-only language model. It can be built on the meta device.

    >>> import torch
    >>> from meshpar.models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(vocab_size=64, dim=32, layers=2))
    >>> model(torch.zeros(1, 8, dtype=torch.int64)).logits.shape
    torch.Size([1, 8, 64])

    Args:
        config: the shape of the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> ModelOutput:
        """Predict each next token; return the logits, and the mean loss if ``labels`` are given.

        Args:
            input_ids: (B, L) int64.
            labels: (B, L) int64, aligned with ``input_ids``: the model shifts them by one. -100 is not counted.
            position_ids: (B, L) or (1, L) int64, which restart with each document of a row; None: 0 .. L-1.

        Raises:
            ValueError: the sequence is longer than ``config.max_positions``.
        """
        positions_BL = positions_of(input_ids, self.config.max_positions) if position_ids is None else position_ids
        x_BLD = self.embed(input_ids)
        mask = attention_mask(self, position_ids, dtype=x_BLD.dtype)
        for layer in self.layers:
            x_BLD = layer(x_BLD, positions_BL, mask)
        logits_BLV = self.head(self.norm(x_BLD))
        return ModelOutput(None if labels is None else next_token_loss(logits_BLV, labels), logits_BLV)

    def meshpar_layout(self) -> ModelLayout:
        """Describe the model to the passes."""
        config, keys = self.config, ("layers.*.attn.k", "layers.*.attn.v")
        heads = {"layers.*.attn.q": config.heads, **dict.fromkeys(keys, config.kv_groups)}
        weights, published = published_form(config)
        return ModelLayout(
            blocks=("layers.*",),
            tensor=TensorLayout(_table(config), heads=heads, copied_heads=keys),
            head="head",
            attention=("layers.*.attn",),
            tied=(("embed.weight", "head.weight"),) if config.tied else (),
            dropout=config.dropout > 0,
            ignored=(r"rotary_emb\.inv_freq$",),
            experts=_experts(config),
            weights=weights,
            config=published,
        )


def _experts(config: TransformerConfig) -> ExpertsLayout:
    if not config.experts:
        return ExpertsLayout()
    bias = ("layers.*.mlp.bias",) if config.shared_experts else ()
    return ExpertsLayout(("layers.*.mlp.experts",), routers=("layers.*.mlp.router",), router_bias=bias)


@final
class Layer(nn.Module):
    """Attention, then the feed-forward layer, each with a norm before and a residual connection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config, config.hidden) if not config.experts else _mixture(config)
        # Here and not in attn and mlp: the residual stream is replicated over the tensor axis, their insides are not.
        self.attn_drop = nn.Dropout(config.dropout)
        self.mlp_drop = nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor, positions_BL: Tensor, mask: Tensor | Mask | None) -> Tensor:
        """Return the residual stream (B, L, D) after this layer."""
        x_BLD = x_BLD + self.attn_drop(self.attn(self.attn_norm(x_BLD), positions_BL, mask))
        return x_BLD + self.mlp_drop(self.mlp(self.mlp_norm(x_BLD)))


@final
class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.channels, self.theta, self.scaling = config.channels, config.rope_theta, config.rope_scaling
        self.q = Linear(config.dim, config.heads * self.channels)
        self.k = Linear(config.dim, config.kv_groups * self.channels)
        self.v = Linear(config.dim, config.kv_groups * self.channels)
        self.o = Linear(config.heads * self.channels, config.dim, std=_residual_std(config))
        self.q_norm = nn.RMSNorm(self.channels, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.channels, eps=config.norm_eps) if config.qk_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor, positions_BL: Tensor, mask: Tensor | Mask | None) -> Tensor:
        """Return the update of the residual stream, (B, L, D)."""
        q_BLHC = self.q(x_BLD).unflatten(-1, (-1, self.channels))
        k_BLGC = self.k(x_BLD).unflatten(-1, (-1, self.channels))
        v_BLGC = self.v(x_BLD).unflatten(-1, (-1, self.channels))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHC, k_BLGC = self.q_norm(q_BLHC), self.k_norm(k_BLGC)
        # From integers in every layer: FSDP2 casts floating-point arguments, and bfloat16 has 256 for position 257.
        cos_BL1R, sin_BL1R = rotations(positions_BL, self.channels, self.theta, self.scaling)
        q_BHLC, k_BGLC = (rotate(x, cos_BL1R, sin_BL1R).transpose(1, 2) for x in (q_BLHC, k_BLGC))
        dropout = self.dropout.p if self.training else 0.0
        attended_BHLC = attention(self, q_BHLC, k_BGLC, v_BLGC.transpose(1, 2), mask, dropout=dropout)
        return self.o(attended_BHLC.transpose(1, 2).flatten(2))


@final
class SwiGLU(nn.Module):
    """The gated feed-forward layer (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: TransformerConfig, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(config.dim, hidden)
        self.up = Linear(config.dim, hidden)
        self.down = Linear(hidden, config.dim, std=_residual_std(config))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the update of the residual stream, (B, L, D)."""
        h_BLF = F.silu(self.gate(x_BLD)) * self.up(x_BLD)
        return self.down(h_BLF)


def rotations(
    positions_BL: Tensor, channels: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines (B, L, 1, R) of the rotary embedding, float32 (Su et al., "RoFormer", 2021)."""
    exponent_R = torch.arange(0, channels, 2, device=positions_BL.device, dtype=torch.float32) / channels
    frequency_R = 1.0 / theta**exponent_R
    if scaling is not None:
        frequency_R = _stretched(frequency_R, scaling)
    angle_BL1R = positions_BL[..., None, None].float() * frequency_R
    return angle_BL1R.cos(), angle_BL1R.sin()


def rotate(x_BLHC: Tensor, cos_BL1R: Tensor, sin_BL1R: Tensor) -> Tensor:
    """Rotate channel i with channel i + C/2 (the convention of transformers' Llama), in float32."""
    a_BLHR, b_BLHR = x_BLHC.float().chunk(2, dim=-1)
    turned = torch.cat((a_BLHR * cos_BL1R - b_BLHR * sin_BL1R, b_BLHR * cos_BL1R + a_BLHR * sin_BL1R), dim=-1)
    return turned.type_as(x_BLHC)


def _stretched(frequency_R: Tensor, scaling: RopeScaling) -> Tensor:
    """Reduce the low frequencies (transformers, modeling_rope_utils.py, ``_compute_llama3_parameters``)."""
    turns_R = scaling.original_positions * frequency_R / (2 * math.pi)
    smooth_R = ((turns_R - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)).clamp(0.0, 1.0)
    return (1 - smooth_R) * frequency_R / scaling.factor + smooth_R * frequency_R


def _mixture(config: TransformerConfig) -> Mixture:
    hidden = config.expert_hidden or config.hidden
    shared = SwiGLU(config, hidden * config.shared_experts) if config.shared_experts else None
    sizes = (config.dim, hidden, config.experts, config.experts_per_token)
    return Mixture(*sizes, _residual_std(config), shared, config.routed_scale)


def _table(config: TransformerConfig) -> dict[str, Any]:
    """Return the tensor-parallel table of the parts that the config has."""
    shared = _SHARED if config.experts and config.shared_experts else {}
    return (_MIXTURE | shared if config.experts else _TENSOR) | (_QK_NORM if config.qk_norm else {})


def _residual_std(config: TransformerConfig) -> float:
    # The sum of the 2 * layers additions to the residual stream starts at the size of one layer.
    return 0.02 / math.sqrt(2 * config.layers)


_TENSOR: dict[str, Any] = {
    "embed": "vocab",
    **dict.fromkeys(("layers.*.attn", "layers.*.mlp"), "region"),
    **dict.fromkeys((f"layers.*.{leaf}" for leaf in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")), "colwise"),
    **dict.fromkeys(("layers.*.attn.o", "layers.*.mlp.down"), "rowwise"),
    **dict.fromkeys(("layers.*.attn_norm", "layers.*.mlp_norm", "norm"), "sequence"),
    "head": "head",
}
# Each expert's features are split. Routers see whole sequences, so that nothing runs between regions on a part of one.
_MIXTURE: dict[str, Any] = {
    **{name: style for name, style in _TENSOR.items() if style != "sequence" and not name.startswith("layers.*.mlp")},
    "layers.*.mlp.experts": Parts(dims={"gate": (1, 1), "up": (1, 1), "down": (2, 1)}, sums=True),
}
_SHARED: dict[str, Any] = {
    f"layers.*.mlp.shared{part}": style
    for part, style in (("", "region"), (".gate", "colwise"), (".up", "colwise"), (".down", "rowwise"))
}
_QK_NORM: dict[str, Any] = {"layers.*.attn.q_norm": "grad_sum", "layers.*.attn.k_norm": "grad_sum"}
