"""Rows of `state`: see `tests/remedies/rows.py`."""

from __future__ import annotations

UNTRIED = 26
