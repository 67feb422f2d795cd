"""Rows of `forecasting`: see `tests/remedies/rows.py`."""

from __future__ import annotations

from tests.remedies.rows import Tested

UNTRIED = 27

ROWS = [
    Tested(
        "has aliases (*name); write the values out",
        "tests/launchers/test_trust.py::test_a_file_without_its_aliases_is_read",
        {"write the values out": "replace('*speed', 'speed')"},
    )
]
