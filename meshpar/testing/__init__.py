"""For tests of passes: run a test on several ranks, and assert that a plan equals one process.

>>> @on_ranks(4)
... def test_my_pass_matches_one_process():
...     assert_parity(MyModel, "dp_shard=2,tp=2", [TensorParallel(), MyPass(), FullyShard()], token_steps(VOCAB))
"""

from meshpar.testing.memory import Memory, measure_memory
from meshpar.testing.parity import (
    Record,
    assert_parity,
    assert_records_match,
    one_process,
    random_tokens,
    token_loss_sum,
    token_steps,
    train_steps,
    whole,
)
from meshpar.testing.ranks import PRELOAD, RankFailure, launch, on_ranks

__all__ = [
    "PRELOAD", "Memory", "RankFailure", "Record", "assert_parity", "assert_records_match", "launch",
    "measure_memory", "on_ranks", "one_process", "random_tokens", "token_loss_sum", "token_steps", "train_steps",
    "whole",
]  # fmt: skip
