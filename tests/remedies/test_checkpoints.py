"""Rows of `checkpoints`: see `tests/remedies/rows.py`."""

from __future__ import annotations

from tests.remedies.rows import Tested

UNTRIED = 84

ROWS = [
    Tested(
        "already exists and is not empty",
        "tests/checkpoints/test_export.py::test_an_existing_folder_is_kept_unless_told_otherwise",
        {"replace it (--overwrite, in Python overwrite=True)": "overwrite=True"},
    ),
    Tested(
        "an export cannot replace {}; choose a folder inside it",
        "tests/checkpoints/test_export.py::test_the_folder_one_stands_in_is_replaced_and_a_link_is_followed",
        {"choose a folder inside it": 'export_safetensors(runs / "qwen3", tmp_path / "link", overwrite=True)'},
    ),
]
