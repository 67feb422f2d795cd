"""Optimizers whose step is the same on every mesh, a file each.

A new one is a ``torch.optim.Optimizer``, with ``takes_module = True`` if it is made of the parallel module instead of
its parameters, and a short name for recipes in ``launchers/recipes/loading.py``. Its step of one parameter may depend
on no other: over ``pp``, ``guards/optimizers.py`` takes that of this folder for granted.

>>> from meshpar.optim import Muon
>>> optimizer = Muon(par, lr=0.02, adamw={"lr": 3e-4})      # doctest: +SKIP
"""

from meshpar.optim.muon import MatrixRule, Muon
from meshpar.optim.small_adamw import SmallAdamW

__all__ = ["MatrixRule", "Muon", "SmallAdamW"]
