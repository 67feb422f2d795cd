"""What all tests share."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
import torch

from meshpar.testing import PRELOAD
from tests.stores import Store, missing, served

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


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


STORE = os.environ.get("MESHPAR_STORE", "s3")
"""The object store of tests that choose none: ``MESHPAR_STORE=az`` runs a file's tests in Azurite, ``gs`` in fake-gcs-server."""


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Store]]:
    """Real object stores by scheme: each starts when it is first asked for, and runs as long as the tests of this worker."""
    pytest.importorskip("obstore", reason="the extra object-store is not installed")
    with ExitStack() as stack:
        yield cache(lambda scheme: stack.enter_context(served(scheme, tmp_path_factory.mktemp(scheme))))


@pytest.fixture
def store(request: pytest.FixtureRequest, servers: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> Store:
    """A real object store, with its environment set here; ranks call ``store.use()``. ``parametrize("store", ..., indirect=True)`` chooses."""
    scheme = getattr(request, "param", STORE)
    if missing(scheme):
        pytest.skip(missing(scheme))
    found = servers(scheme)
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def bucket(store: Store) -> str:
    """The URL of a bucket of this test's own."""
    return store.bucket(f"test-{uuid.uuid4().hex[:12]}")
