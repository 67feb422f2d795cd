"""Rows of `loose`: see `tests/remedies/rows.py`."""

from __future__ import annotations

UNTRIED = 30
