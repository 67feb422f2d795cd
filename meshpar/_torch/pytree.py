"""Nested values, as torch's own wrappers flatten them; public as ``torch.utils.pytree`` in no release so far
(pytorch/pytorch#112111).
"""

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["tensor_leaves", "tree_leaves", "tree_map", "tree_map_only"]


def tensor_leaves(values: object) -> list[Tensor]:
    """Return the tensors in nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
