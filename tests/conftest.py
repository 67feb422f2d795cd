"""What all tests share."""

import gc
import multiprocessing
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
import typer.main
import typer.testing

import meshpar
from meshpar.testing import PRELOAD, ranks
from tests.support.patience import patient
from tests.support.stores import Store, missing, served
from tests.support.warm import start_warm

# Ranks are forked from a server; what it has loaded, no rank loads again.
PRELOAD += [
    "meshpar.models",
    "meshpar.checkpoints",
    "transformers",
    "transformers.conversion_mapping",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    # what is compiled first loads these
    "functorch.compile",
    "torch._dynamo.backends.debugging",
    "torch._dynamo.repro.after_aot",
    "torch._inductor.pattern_matcher",
    "peft",
]

FIRST = (
    "test_slurm.py",  # mostly waits for processes of its own
    *("test_main_job.py", "test_replicas.py", "test_run.py", "test_launch.py", "test_object_store.py"),
    *("test_architectures.py", "test_watchdog.py", "test_strangers.py"),
    *("test_forecast.py", "test_parity.py", "positions/test_parallel.py", "experts/test_parallel.py", "test_passes.py"),
    *("test_cycle.py", "test_instead_of_fsdp2.py", "pipeline/test_parallel.py", "test_loops.py"),
    *("test_memory.py", "test_traps.py", "remedies/test_exact.py", "test_training.py", "test_nccl.py", "test_split.py"),
    *("test_lora.py", "test_muon.py", "test_batch_norm.py", "test_published.py", "test_own.py", "test_hostile.py"),
    *("test_plugins.py", "test_planned.py", "test_guide.py", "test_house.py", "test_extras.py", "test_offloading.py"),
    *("test_small_adamw.py", "test_adafactor.py", "test_objectives_parallel.py", "test_huggingface.py"),
    *("test_averaging.py", "test_speed.py", "test_waits.py", "test_export.py", "test_damage.py"),
    *("test_async.py", "test_after_apply.py", "test_quantize.py", "test_check.py", "test_generating.py"),
    *("test_jobs.py", "test_profile.py", "test_quickstart.py", "test_faults.py", "test_examples.py", "test_crash.py"),
)
"""The longest files come first, so that no worker is left alone at the end."""


COMMANDS = [
    *PRELOAD,
    "meshpar.launchers.cli",
    "meshpar.launchers.jobs.job",
    "meshpar.training",
    "meshpar.forecasting",
    "torch.distributed.launcher.api",
    "torch.distributed._tools.fake_collectives",  # every simulation needs it
    "tensorboard",
    "torchdata.stateful_dataloader",
]
"""What a command loads sooner or later."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cold", action="store_true", help="start each command in a new interpreter, which takes seconds to load torch"
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # as a rank has: sums in the same order, and no thread waits for a core
    typer.testing._get_command = cache(typer.main.get_command)  # the command line is built once and not for each call
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # as of a terminal, also where a shell's job or nohup ignores them
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        PRELOAD
    )  # also where a data worker is the first to be forked
    if not config.getoption("--cold"):
        start_warm(COMMANDS)


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give each test, its ranks and the commands that it waits for as much longer as this machine is slower now."""
    marker = item.get_closest_marker("timeout")
    item.add_marker(
        pytest.mark.timeout(patient(marker.args[0] if marker else float(item.config.getini("timeout")))), append=False
    )
    started, ran = ranks.RankProcesses.__init__, ranks.RankProcesses.run
    waited, communicated = subprocess.Popen.wait, subprocess.Popen.communicate

    def start(group: ranks.RankProcesses, count: int, timeout_s: float, keep: bool) -> None:
        started(group, count, (3 if keep else 1) * patient(timeout_s), keep)  # kept: this machine may be busy later

    def run(group: ranks.RankProcesses, module: str, name: str, args: Any, kwargs: Any, timeout_s: float) -> None:
        ran(group, module, name, args, kwargs, patient(timeout_s))

    def wait(process: subprocess.Popen[Any], timeout: float | None = None) -> int:
        return waited(process, timeout and patient(timeout))

    def communicate(process: subprocess.Popen[Any], input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        return communicated(process, input, timeout and patient(timeout))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.RankProcesses, "__init__", start)
        patch.setattr(ranks.RankProcesses, "run", run)
        patch.setattr(subprocess.Popen, "wait", wait)
        patch.setattr(subprocess.Popen, "communicate", communicate)
        return (yield)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is loaded and collected is no garbage in any test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = cache(lambda path: next((number for number, name in enumerate(FIRST) if path.match(name)), len(FIRST)))
    items.sort(key=lambda item: place(item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


STORE = os.environ.get("MESHPAR_STORE", "s3")
"""The scheme for tests that choose none: ``MESHPAR_STORE=az`` is Azurite, ``gs`` fake-gcs-server."""


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    with meshpar.distributed("cpu"):
        yield


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Store]]:
    """Object stores by scheme; each starts when it is first asked for and runs until the worker ends."""
    pytest.importorskip("obstore", reason="the extra object-store is not installed")
    with ExitStack() as stack:
        yield cache(lambda scheme: stack.enter_context(served(scheme, tmp_path_factory.mktemp(scheme))))


@pytest.fixture
def store(request: pytest.FixtureRequest, servers: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> Store:
    """An object store, with its environment set here; ranks call ``store.use()``."""
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
