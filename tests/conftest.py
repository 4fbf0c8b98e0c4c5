"""What every test gets: hypothesis profiles, and the real data folder."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent

# No deadline: the first example of a test may compile a kernel. In CI the examples are the same in every run,
# so that a red run is the change's fault.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
settings.register_profile("few", max_examples=10)  # a tenth of those of `make test-all`: see `slow.examples`

# For this process and those that tests start; the frameworks read them when they are imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"
# Kernels for GPUs run under Triton's interpreter, which only those who chose it before Triton was imported get.
# `TRITON_INTERPRET=0 pytest tests/gpu` runs them compiled, on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# torch's threads wait by spinning: where two busy processors were shared with TensorFlow's, a step of 2 ms took 30.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        settings.load_profile("few")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as where a shell started this in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    """Give the next test in this process as many threads as this one had, whatever this one set."""
    yield
    threads = sys.modules.get("embedrock.kernels.cpu.threads")
    if threads is not None and threads.get_threads() != threads._default_threads():
        threads.set_threads(threads._default_threads())


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Draw in each test what it draws in every run: a layer of Keras without a seed takes one from `random`."""
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def ctrl_c_as_before() -> Iterator[None]:
    """Let Ctrl-C do in the next test what it did in this one: a program that is interrupted ignores the next one.

    Processes inherit that, and would run on and on.
    """
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)


def pytest_collection_finish() -> None:
    """Step few rows as many are, in the background. Keep what imports made out of garbage collections.

    With TensorFlow's and torch's, each collection takes over a second.
    """
    stepping: Any = sys.modules.get("embedrock.table.stepping")
    if stepping is not None:
        stepping.STEP_HERE_BYTES = 0
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names of tests that hold an address: pytest's workers would call them differently."""
    named = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if named:
        raise pytest.UsageError(f"give these parameters ids=: {named}")


@pytest.fixture(scope="module")
def small_heap() -> None:
    """Keep what the tests before left alive out of the garbage collections of a file that has many."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have benchmarks run implementations in this process, with one thread each, and no cgroup."""
    from benchmarks import cgroups, processes
    from in_process import InProcess

    def no_cgroup(*_: Any) -> None:
        raise cgroups.NoCgroupError("the test has none")

    monkeypatch.setattr(processes, "Child", InProcess)
    monkeypatch.setattr(cgroups, "MemoryCgroup", no_cgroup)
    monkeypatch.setenv("EMBEDROCK_THREADS", "1")
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else None
    yield
    if torch is not None:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with the real interaction logs (`ml-100k.inter`, `video_games.txt`)."""
    folder = Path(os.environ.get("EMBEDROCK_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set EMBEDROCK_TEST_DATA to the folder that holds it")
    return folder
