"""Spans of what a layer and an optimizer do, for `torch.profiler`: plan, wait, read, sum, step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from embedrock.torch.training.side import RowSide

_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a span ``embedrock.<name>`` of the profiler that runs, and nothing where none does."""
    return profiler.record_function(f"embedrock.{name}") if profiler._is_profiler_enabled else _NOTHING


def waited(side: RowSide) -> None:
    """Let a profiler see the wait for steps by itself, before rows are read. (Reading waits for them anyway.)"""
    if profiler._is_profiler_enabled:
        with span("wait"):
            side.wait()
