"""Context managers: undo what a failed block has begun, or give a context variable a value for a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises an error, which is raised then."""
    try:
        yield
    except BaseException:
        undo()
        raise


@contextmanager
def set_within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value for the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
