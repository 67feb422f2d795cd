"""Rows of `exact`: see `tests/remedies/rows.py`."""

from __future__ import annotations

from tests.remedies.rows import Tested

UNTRIED = 105

ROWS = [
    Tested(
        "a plain tensor met a parameter",
        "tests/exact/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact",
        {"place the plain one": "check_habits(mesh", "compute with the whole of the other": "check_habits(mesh"},
    ),
    Tested(
        "change the whole tensor on every rank, whole = par.whole(tensor)",
        "tests/exact/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact",
        {"change the whole tensor on every rank": "check_habits(mesh"},
    ),
    Tested(
        "compute with the whole of it, par.whole(tensor)",
        "tests/exact/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact",
        {"compute with the whole of it": "check_habits(mesh"},
    ),
    Tested(
        "gradients are averaged over data ranks already",
        "tests/exact/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact",
        {"leave the collective out": "check_habits(mesh", "take par.whole(tensor)": "check_habits(mesh"},
    ),
    Tested(
        "use par.whole(tensor).numpy() on every rank",
        "tests/exact/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact",
        {"use par.whole(tensor).numpy() on every rank": "check_habits(mesh"},
    ),
    Tested(
        "make such tensors under torch.no_grad()",
        "tests/exact/test_calls.py::test_a_cache_made_in_inference_mode_is_written_or_the_error_says_what_helps",
        {"make such tensors under torch.no_grad(), and call the module there": "par.module(x, writable)"},
    ),
    Tested(
        "ive collectives of your own in a loss or a hook group=par.data_group",
        "tests/exact/test_calls.py::test_values_gathered_over_the_data_group_are_exact_beside_tp",
        {
            "give collectives of your own in a loss or a hook group=par.data_group": "next_ones(features, par.data_group)"
        },
    ),
]
