"""The same bits on every mesh: ``Plan(..., same_bits=True)``.

Kernels get the same shapes on every mesh, because a micro-batch is one unit of shape. The order of sums over
micro-batches follows one tree over their numbers (``trees.py``): over ranks in the passes' collectives, over a rank's
own micro-batches in ``gradients.py``. The norm of gradients is a sum of whole numbers (``meshpar/tensors``).
"""
