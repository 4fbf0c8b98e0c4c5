"""The CPU kernels against the NumPy reference."""

from __future__ import annotations

from embedrock import kernels
from suites import KernelSuite


class TestCPU(KernelSuite):
    backend = kernels.cpu
