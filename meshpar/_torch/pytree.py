"""Nested values, as torch's own wrappers flatten them; public as ``torch.utils.pytree`` in no release so far
(pytorch/pytorch#112111).
"""

from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["tree_leaves", "tree_map", "tree_map_only"]
