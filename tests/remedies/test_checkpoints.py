"""Rows of `checkpoints`: see `tests/remedies/rows.py`."""

from __future__ import annotations

UNTRIED = 86
