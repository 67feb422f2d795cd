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
    Tested(
        "inside of par.offloaded(), where its parameters have no memory; call it after the block",
        "tests/passes/test_offloaded.py::test_what_would_use_lent_memory_is_refused",
        {"call it after the block": "CheckpointManager(tmp_path).save(1, par, optimizer)"},
    ),
    Tested(
        "after par.offloaded() had failed to take memory back",
        "tests/passes/test_offloaded.py::test_a_return_that_fails_keeps_the_only_copy_and_can_be_tried_again",
        {"free the device's memory, then run `with par.offloaded(): pass`": "with par.offloaded():"},
    ),
    Tested(
        "par.offloaded() cannot take its memory back, and {} bytes stay in host memory ({}); free the device's memory",
        "tests/passes/test_offloaded.py::test_a_return_that_fails_keeps_the_only_copy_and_can_be_tried_again",
        {"free the device's memory, then run `with par.offloaded(): pass`": "with par.offloaded():"},
    ),
]
