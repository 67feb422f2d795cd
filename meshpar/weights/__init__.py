"""Where weights come from: rules between a model's names and published ones, and tensors read piece by piece."""

from meshpar.weights.maps import Mapped, TypedSource, WeightMap, WeightSource, average_called, dtypes_of
from meshpar.weights.rules import Fuse, Permute, Rename, Split, Transpose, Unstack

__all__ = [
    "Fuse", "Mapped", "Permute", "Rename", "Split", "Transpose", "TypedSource", "Unstack", "WeightMap", "WeightSource",
    "average_called", "dtypes_of",
]  # fmt: skip
