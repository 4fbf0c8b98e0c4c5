"""`span`: a phase of the work on rows, as whoever looks at where the time goes sees it: profilers, and clocks.

A front end adds the profiler of its framework, once, when it is imported:

- **plan**: which rows a batch needs, and where they are;
- **disk**: reading records from files, or waiting for that;
- **gather**: copying rows to where a batch wants them;
- **wait**: for the last step, which runs in the background;
- **sum**: gradients by row;
- **rule**: stepping the rows;
- **spill**: appending rows that leave a cache;
- **commit**, **compaction**: in threads of their own.

Front ends show what they do around these: ``read`` and ``step``; with Keras ``lookup``, ``fetch`` and ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Tracer = Callable[[str], AbstractContextManager[Any] | None]

PREFIX = "embedrock."  # of the names that profilers show

P = ParamSpec("P")
T = TypeVar("T")

_NOTHING = nullcontext()
_tracers: tuple[tuple[Callable[[], bool], Tracer], ...] = ()  # each with what tells whether it may look


def trace_by(tracer: Tracer, is_looking: Callable[[], bool] = lambda: True) -> None:
    """Let a tracer see all phases from now on.

    Args:
        tracer: takes the name of a phase, and returns what is entered for as long as it lasts; None while nobody looks.
        is_looking: whether the tracer may return something. It is asked at each phase, by any thread, so it should be
            quick.

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
    """Show a tracer no phases any more."""
    global _tracers
    _tracers = tuple(each for each in _tracers if each[1] is not tracer)


def span(name: str) -> AbstractContextManager[Any]:
    """Return what is entered for as long as the phase `name` lasts: nothing, where nobody looks."""
    seen = None
    for _, tracer in _tracers:
        one = tracer(name)
        if one is not None:
            seen = one if seen is None else _both(seen, one)
    return _NOTHING if seen is None else seen


def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    both = ExitStack()
    for each in (one, other):
        both.enter_context(each)
    return both


def spanned(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of a function that is the phase `name`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def shown(*args: P.args, **kwargs: P.kwargs) -> T:
            for is_looking, _ in _tracers:
                if is_looking():  # as a rule not, and to ask `span` would take thrice as long
                    with span(name):
                        return function(*args, **kwargs)
            return function(*args, **kwargs)

        return shown

    return decorate
