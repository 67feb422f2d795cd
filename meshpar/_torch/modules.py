"""``BatchNorm``: what all batch norms inherit from, also those of other packages; ``nn.SyncBatchNorm`` looks for it."""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

__all__ = ["BatchNorm"]
