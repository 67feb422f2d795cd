"""Rows of `exact`: see `tests/remedies/rows.py`."""

from __future__ import annotations

UNTRIED = 105
