"""Rows of `state`: see `tests/remedies/rows.py`."""

from __future__ import annotations

from tests.remedies.rows import Tested

UNTRIED = 26

ROWS = [
    Tested(
        "TensorParallel has nothing to do",
        "tests/passes/test_traps.py::test_a_model_of_peft_under_tp_names_add_adapters",
        {"for LoRA meshpar.training.add_adapters(model, LoRA(...))": "add_adapters(model, LoRA("},
    ),
    Tested(
        "iterate over par.accumulate(micro_batches)",
        "tests/passes/test_traps.py::test_no_sync_names_accumulate_which_is_exact",
        {"iterate over par.accumulate(micro_batches)": "par.accumulate)"},
    ),
    Tested(
        "call it before plan.apply",
        "tests/passes/test_traps.py::test_a_vocabulary_is_resized_before_apply",
        {"call it before plan.apply": "model.resize_token_embeddings(longer)"},
    ),
    Tested(
        "save_pretrained does not support shards",
        "tests/passes/test_traps.py::test_save_pretrained_takes_a_whole_state_on_every_mesh",
        {"hand in whole tensors": "state_dict=par.state_dict(full=True))"},
    ),
]
