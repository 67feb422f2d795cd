"""GPT2: the 124M model of Radford et al. (2019), whose state dict is that of transformers' ``GPT2LMHeadModel``.

Shape suffixes: B batch, L sequence, D model, H heads, C channels of a head, F hidden, V vocabulary. Under tensor
parallelism H, F and V are this rank's part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar.core.layout import ModelLayout, TensorLayout
from meshpar.models.layers import Embedding, Linear, ModelOutput, next_token_loss, positions_of, published
from meshpar.passes.positions.attention import Mask, attention, attention_mask


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """Set the shape of a :class:`GPT2`, with transformers' field names; by default the 124M model without dropout.

    >>> from meshpar.models import GPT2Config
    >>> GPT2Config(n_layer=2, n_embd=64, n_head=4).vocab_size
    50257

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        n_positions: longest sequence in tokens.
        n_embd: width of the model.
        n_layer: number of layers.
        n_head: number of attention heads, a divisor of ``n_embd``.
        n_inner: width of the feed-forward layer; None: ``4 * n_embd``.
        layer_norm_epsilon: epsilon of the norms.
        dropout: probability of dropout on attention weights, embeddings and the updates of the residual stream.
        tied: whether the head shares the token embedding's weight.

    Raises:
        ValueError: a size is not positive, or ``n_head`` does not divide ``n_embd``.
    """

    vocab_size: int = 50_257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
        problems = [
            f"{name} is {getattr(self, name)}, expected at least 1" for name in sizes if getattr(self, name) < 1
        ]
        if not problems and self.n_embd % self.n_head:
            problems.append(
                f"n_head ({self.n_head}) does not divide n_embd ({self.n_embd}); choose n_embd as a multiple of n_head"
            )
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, expected at least 0 and less than 1")
        if problems:
            raise ValueError("GPT2Config: " + "; ".join(problems))

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner


@final
class GPT2(nn.Module):
    """Build the GPT-2 language model. It has no buffers and can be built on the meta device.

    >>> import torch
    >>> from meshpar.models import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocab_size=64, n_layer=2, n_embd=32, n_head=4))
    >>> model(torch.zeros(1, 8, dtype=torch.int64)).logits.shape
    torch.Size([1, 8, 64])

    Args:
        config: the shape of the model.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = Decoder(config)
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> ModelOutput:
        """As :meth:`Transformer.forward`; ValueError: the sequence is longer than ``config.n_positions``."""
        positions_BL = positions_of(input_ids, self.config.n_positions) if position_ids is None else position_ids
        logits_BLV = self.lm_head(self.transformer(input_ids, positions_BL, position_ids))
        return ModelOutput(None if labels is None else next_token_loss(logits_BLV, labels), logits_BLV)

    def meshpar_layout(self) -> ModelLayout:
        """Describe the model to the passes."""
        config = self.config
        return ModelLayout(
            blocks=("transformer.h.*",),
            tensor=TensorLayout(_TENSOR, heads={"transformer.h.*.attn.c_attn": config.n_head}),
            head="lm_head",
            attention=("transformer", "transformer.h.*.attn"),
            tied=(("transformer.wte.weight", "lm_head.weight"),) if config.tied else (),
            dropout=config.dropout > 0,
            ignored=(r"\.attn\.(masked_)?bias$",),  # causal masks, which transformers stored once
            config=_published_config(config),
        )


@final
class Decoder(nn.Module):
    """Embeddings, blocks and the last norm (``GPT2Model`` in transformers)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, ids_BL: Tensor, positions_BL: Tensor, documents_BL: Tensor | None) -> Tensor:
        """Return the hidden states (B, L, D); ``documents_BL`` are positions that restart with each document."""
        # Under sequence parallelism wte returns this rank's positions, to which the style of wpe cuts its output.
        x_BLD = self.drop(self.wte(ids_BL) + self.wpe(positions_BL))
        mask = attention_mask(self, documents_BL, dtype=x_BLD.dtype)
        for block in self.h:
            x_BLD = block(x_BLD, mask)
        return self.ln_f(x_BLD)


@final
class Block(nn.Module):
    """Attention, then the feed-forward layer, each with a norm before and a residual connection."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)
        # Here and not in attn and mlp: the residual stream is replicated over the tensor axis, their insides are not.
        self.attn_drop = nn.Dropout(config.dropout)
        self.mlp_drop = nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor, mask: Tensor | Mask | None) -> Tensor:
        """Return the residual stream (B, L, D) after this block."""
        x_BLD = x_BLD + self.attn_drop(self.attn(self.ln_1(x_BLD), mask))
        return x_BLD + self.mlp_drop(self.mlp(self.ln_2(x_BLD)))


@final
class GPT2Attention(nn.Module):
    """Causal attention with one fused input projection."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.channels = config.n_embd // config.n_head
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd, std=_residual_std(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor, mask: Tensor | Mask | None) -> Tensor:
        """Return the update of the residual stream, (B, L, D)."""
        parts = self.c_attn(x_BLD).chunk(3, dim=-1)
        q_BHLC, k_BHLC, v_BHLC = (part.unflatten(-1, (-1, self.channels)).transpose(1, 2) for part in parts)
        attended_BHLC = attention(self, q_BHLC, k_BHLC, v_BHLC, mask, dropout=self.dropout.p if self.training else 0.0)
        return self.c_proj(attended_BHLC.transpose(1, 2).flatten(2))


@final
class MLP(nn.Module):
    """The feed-forward layer with the tanh approximation of GELU."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.hidden)
        self.c_proj = Conv1D(config.hidden, config.n_embd, std=_residual_std(config))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the update of the residual stream, (B, L, D)."""
        return self.c_proj(F.gelu(self.c_fc(x_BLD), approximate="tanh"))


@final
class Conv1D(nn.Module):
    """A linear layer whose weight is stored as (in, out), as in OpenAI's and every published GPT-2."""

    def __init__(self, in_features: int, out_features: int, *, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight + bias``."""
        return F.linear(x, self.weight.t(), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[0]}, out_features={self.weight.shape[1]}"


def _residual_std(config: GPT2Config) -> float:
    # Radford et al., 2019, section 2.3: residual layers start smaller by the square root of their number.
    return 0.02 / math.sqrt(2 * config.n_layer)


_TENSOR: dict[str, Any] = {
    "transformer.wte": "vocab",
    **dict.fromkeys(("transformer.wpe", "transformer.h.*.ln_1", "transformer.h.*.ln_2"), "sequence"),
    **dict.fromkeys(("transformer.h.*.attn", "transformer.h.*.mlp"), "region"),
    "transformer.h.*.attn.c_attn": "packed_colwise:3",
    "transformer.h.*.mlp.c_fc": "colwise",
    **dict.fromkeys(("transformer.h.*.attn.c_proj", "transformer.h.*.mlp.c_proj"), "rowwise"),
    "transformer.ln_f": "sequence",
    "lm_head": "head",
}


def _published_config(config: GPT2Config) -> dict[str, Any]:
    same = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "layer_norm_epsilon")
    return {
        **published("gpt2", "GPT2LMHeadModel", tied=config.tied),
        **{name: getattr(config, name) for name in same},
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    }
