"""Layouts of transformers' models, read from the models themselves, without importing transformers."""

from meshpar.models.huggingface.adapter import check_attention, for_training, foreign_attention, from_config, layout_for

__all__ = ["check_attention", "for_training", "foreign_attention", "from_config", "layout_for"]
