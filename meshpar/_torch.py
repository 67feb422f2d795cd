"""What torch has and has not made public: the one place where its private modules are named.

- ``replicate`` on FSDP2's machinery: private while torch settles whether it replaces DistributedDataParallel's composable form
  (pytorch/pytorch#159107). It goes when ``torch.distributed.fsdp`` exports it.
- ``checkpoint`` (composable recomputation): private, with no public form that keeps parameter names (pytorch/pytorch#122129).
"""

from __future__ import annotations

from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate

__all__ = ["checkpoint", "replicate"]
