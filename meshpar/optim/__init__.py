"""Optimizers whose step is the same on every mesh, a file each.

Recipes know them by the short names of ``launchers/recipes/loading.py``.

>>> from meshpar.optim import Muon
>>> optimizer = Muon(par, lr=0.02, adamw={"lr": 3e-4})      # doctest: +SKIP
"""

from meshpar.optim.muon import MatrixRule, Muon
from meshpar.optim.small_adamw import SmallAdamW

__all__ = ["MatrixRule", "Muon", "SmallAdamW"]
