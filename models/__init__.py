"""Reference models, the adapter for Hugging Face's transformers, and layouts of vision transformers."""

from meshpar.models.gpt2 import GPT2, GPT2Config
from meshpar.models.layers import ModelOutput
from meshpar.models.transformer import Transformer
from meshpar.models.transformer_config import PRESETS, RopeScaling, TransformerConfig
from meshpar.models.vision import vision_layout

__all__ = [
    "GPT2",
    "PRESETS",
    "GPT2Config",
    "ModelOutput",
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "vision_layout",
]
