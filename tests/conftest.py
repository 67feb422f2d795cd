"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from meshpar.testing import PRELOAD

# Ranks are forked from a server; what it has loaded, no rank loads again.
PRELOAD += [
    "meshpar.models",
    "meshpar.checkpoints",
    "transformers",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]

WAITING = ("test_slurm.py", "test_watchdog.py", "test_main_job.py", "test_jobs.py", "test_profile.py", "test_quickstart.py")
"""Files whose few long tests mostly wait for processes of their own: they come first, so that no worker is left with them at the end."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch in this process, as its ranks have: sums in the same order give the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: WAITING.index(item.path.name) if item.path.name in WAITING else len(WAITING))
