"""Parts that torch has and has not made public, by subject: the one folder where its private modules are named.

Each file says why a part is needed, and when it goes.
"""

from __future__ import annotations

import torch

BEFORE_2_13 = tuple(int(digits) for digits in torch.__version__.split(".")[:2]) < (2, 13)
