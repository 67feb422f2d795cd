"""Operators on lists of tensors, in few kernels; torch's optimizers use them, with no public form
(pytorch/pytorch#58833).
"""

from torch import _foreach_add_ as add_
from torch import _foreach_copy_ as copy_
from torch import _foreach_lerp_ as lerp_
from torch import _foreach_mul_ as mul_
from torch import _foreach_norm as norm

__all__ = ["add_", "copy_", "lerp_", "mul_", "norm"]
