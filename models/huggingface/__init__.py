"""What transformers' models need: their layout, read from the models themselves. Importing it does not import
transformers.
"""

from meshpar.models.huggingface.adapter import check_attention, for_training, foreign_attention, from_config, layout_for

__all__ = ["check_attention", "for_training", "foreign_attention", "from_config", "layout_for"]
