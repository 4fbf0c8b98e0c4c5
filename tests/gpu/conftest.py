"""No test here without PyTorch, Triton, and a device that its kernels run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_device import INTERPRETED, IS_SLOW

try:
    import torch

    from embedrock.kernels.gpu import runtime
except ImportError:  # an extra is not installed
    collect_ignore_glob = ["*"]
else:
    assert runtime.is_interpreted() == INTERPRETED, "Triton was imported before tests/conftest.py"
    if not (INTERPRETED or torch.cuda.is_available()):
        collect_ignore_glob = ["*"]
    if IS_SLOW:
        import quick_interpreter

        quick_interpreter.install()


@pytest.fixture(scope="session", autouse=True)
def launches_compile(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail launches that the interpreter accepts, and the compiler refuses: beside the slow tests, as it takes minutes.

    `test_every_kernel_compiles` compiles one of each every time.
    """
    if not INTERPRETED or "not slow" in request.config.option.markexpr:
        yield
        return
    import compile_launched

    with compile_launched.compiling():
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have PyTorch fill what it does not initialize with NaN, and the largest integers."""
    import torch

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
