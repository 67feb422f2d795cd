"""What all tests share."""

from __future__ import annotations

from meshpar.testing import PRELOAD

# Ranks are forked from a server; what it has loaded, no rank loads again.
PRELOAD += [
    "meshpar.models",
    "meshpar.checkpoints",
    "transformers",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]
