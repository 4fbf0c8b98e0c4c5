"""Context managers: undo what a failed block has begun, give a variable a value for a block, or close at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Self, TypeVar

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


class ClosedAtEnd:
    """Base of tables and others that the end of a ``with`` block closes."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
