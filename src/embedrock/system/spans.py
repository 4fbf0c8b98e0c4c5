"""`span`: a phase of the work on rows, as profilers and clocks show it.

A front end adds the profiler of its framework, once, when it is imported:

- **plan**: find the unique rows of a batch, and where they are.
- **disk**: read records from files, or wait for that.
- **gather**: copy rows into a batch's order.
- **wait**: wait for the last step, which runs in the background.
- **sum**: sum gradients by row.
- **rule**: step the rows.
- **spill**: append evicted rows to a log.
- **commit**, **compaction**: work in background threads.

Front ends add phases around these: ``read`` and ``step``; with Keras ``lookup``, ``fetch`` and ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Tracer = Callable[[str], AbstractContextManager[Any] | None]

PREFIX = "embedrock."  # prefix of phases in profilers

P = ParamSpec("P")
T = TypeVar("T")

_NOTHING = nullcontext()
_tracers: tuple[tuple[Callable[[], bool], Tracer], ...] = ()  # each with its `is_looking`


def trace_by(tracer: Tracer, is_looking: Callable[[], bool] = lambda: True) -> None:
    """Register a tracer of all phases.

    Args:
        tracer: takes the name of a phase, and returns a context manager that spans the phase. None: not tracing now.
        is_looking: returns whether the tracer may trace now. Any thread calls it at each phase, so it should be fast.

    Example:
        >>> trace_by(tracer := lambda name: print(f"{name} begins"))
        >>> with span("sum"):
        ...     print("at work")
        sum begins
        at work
        >>> forget(tracer)
    """
    global _tracers
    _tracers = (*_tracers, (is_looking, tracer))


def forget(tracer: Tracer) -> None:
    """Remove a tracer."""
    global _tracers
    _tracers = tuple(each for each in _tracers if each[1] is not tracer)


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that spans the phase `name`. Without a tracer it does nothing."""
    seen: list[AbstractContextManager[Any]] = []
    for is_looking, tracer in _tracers:
        if is_looking() and (one := tracer(name)) is not None:
            seen.append(one)
    if len(seen) < 2:
        return seen[0] if seen else _NOTHING
    together = ExitStack()
    for one in seen:
        together.enter_context(one)
    return together


def spanned(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that makes a function the phase `name`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def shown(*args: P.args, **kwargs: P.kwargs) -> T:
            for is_looking, _ in _tracers:
                if is_looking():  # rarely: calling `span` each time would take three times as long
                    with span(name):
                        return function(*args, **kwargs)
            return function(*args, **kwargs)

        return shown

    return decorate
