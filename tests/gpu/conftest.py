"""No test here without PyTorch, Triton, and a device that its kernels run on."""

from __future__ import annotations

from gpu_device import INTERPRETED

try:
    import torch

    from embedrock.kernels.gpu import runtime
except ImportError:  # an extra is not installed
    collect_ignore_glob = ["*"]
else:
    assert runtime.is_interpreted() == INTERPRETED, "Triton was imported before tests/conftest.py"
    if not (INTERPRETED or torch.cuda.is_available()):
        collect_ignore_glob = ["*"]
    if INTERPRETED:
        import quick_interpreter

        quick_interpreter.install()
