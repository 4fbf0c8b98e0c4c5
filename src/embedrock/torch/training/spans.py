"""What `torch.profiler` sees: the phases of `embedrock.process.spans`. Under `emit_nvtx` they are NVTX ranges."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

from embedrock.process.spans import PREFIX, trace_by


def record(name: str) -> AbstractContextManager[Any] | None:
    """Return a phase as the profiler that runs records it; None where none does."""
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else None


trace_by(record, functools.partial(getattr, profiler, "_is_profiler_enabled"))
