"""Forks: other threads finish their work first, and a child never waits for a lock of a missing thread.

A forked child has all memory, but only the thread that forked. Work of other threads stays half done there, and their
locks are never released. So this module makes every lock that a child may meet. A fork acquires all of them first, and
both processes release them afterwards. So no step is half done, and the child finds the locks free.

Another thread may itself wait for the thread that forks. So a fork waits for a limited time. The child reinitializes
each lock that the fork could not acquire, and treats the data it protects as half changed.

Processes that start without a copy of this memory run none of this: `subprocess` without `preexec_fn`, "spawn",
"forkserver".
"""

from __future__ import annotations

import functools
import logging  # noqa: F401  # first: its hook before a fork then runs last, when all of our locks are held
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Set
from contextlib import ExitStack
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

from embedrock.system import interrupts

PATIENCE = 60.0  # seconds that a fork waits for other threads, at most
# After a slice, held locks are released and taken again: the owner of a missing lock may need one of them.
SLICE = 1.0

Lock: TypeAlias = Any  # a `threading.RLock`, which is a function for some type checkers
T = TypeVar("T")


class LockRank(IntEnum):
    """Lock order. A thread that holds a lock may take only locks of a higher rank."""

    QUEUE = 0  # the next owner of a table lock
    TABLE = 1
    SECTION = 2  # a short critical section
    WORKER = 3  # a thread that calls a kernel
    LOADING = 4  # loading of kernels
    COMPILER = 5  # Numba's
    VALUE = 6  # a property that is computed once


_ranks: weakref.WeakKeyDictionary[Lock, LockRank] = weakref.WeakKeyDictionary()
_adding = threading.Lock()  # protects `_ranks`
_forking = threading.RLock()  # held during a fork
process = os.getpid()  # read at every use of a table: the system call takes a microsecond on some machines
_held: list[dict[Lock, None]] = []  # per fork, as a hook of one fork may fork again
_in_child: list[Callable[[Set[Lock]], None]] = [lambda missed: interrupts.held_back.begin_child()]


def lock(rank: LockRank) -> Lock:
    """Return a new `threading.RLock` that every fork acquires first."""
    made = threading.RLock()
    hold(made, rank)
    return made


def hold(held: Lock, rank: LockRank) -> None:
    """Register a `threading.RLock` that every fork acquires first, as long as the lock exists."""
    with _adding:
        _ranks[held] = rank


def cached_property(function: Callable[[Any], T]) -> functools.cached_property[T]:
    """Return a `functools.cached_property`. Up to Python 3.11, all objects of its class share one lock."""
    made = functools.cached_property(function)
    shared = getattr(made, "lock", None)
    if shared is not None:
        hold(shared, LockRank.VALUE)
    return made


def in_child(function: Callable[[Set[Lock]], None]) -> Callable[[Set[Lock]], None]:
    """Register a function that every child calls right after its fork.

    Args:
        function: takes the locks that the fork could not acquire. Data that they protect may be half changed.
    """
    _in_child.append(function)
    return function


def is_under_way() -> bool:
    """Return whether this thread is forking. A forking thread holds all locks, and must wait for no other."""
    return bool(_forking._is_owned() and _held)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- hooks of a fork


def _before() -> None:
    with interrupts.held_back():  # an interrupt could leave locks held forever
        _forking.acquire()
        _held.append({})
        if not _hold_all(_held[-1]):
            warnings.warn(
                f"a process forked while other threads were at work with Embedrock for over {PATIENCE:g} seconds, or "
                "waited for the one that forked. The tables in RAM that they had cannot be used in the child.",
                RuntimeWarning,
                stacklevel=2,
            )


def _hold_all(held: dict[Lock, None]) -> bool:
    """Acquire all locks and return True. After `PATIENCE`, acquire the free ones and return False."""
    deadline = time.monotonic() + PATIENCE
    while (missing := _hold_in_order(held, SLICE)) is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            _hold_free(held)
            return False
        _free(held)
        if missing.acquire(timeout=left):
            held[missing] = None
    return True


def _hold_in_order(held: dict[Lock, None], seconds: float) -> Lock | None:
    """Acquire all locks in order of rank. Return the first lock that takes longer than `seconds`."""
    while missing := _missing(held):  # repeated: other threads may have made new locks
        for each in missing:
            if not each.acquire(timeout=seconds):
                return each
            held[each] = None
    return None


def _hold_free(held: dict[Lock, None]) -> None:
    for each in _missing(held):
        if each.acquire(blocking=False):
            held[each] = None


def _missing(held: dict[Lock, None]) -> list[Lock]:
    with _adding:
        ranks = list(_ranks.items())
    return [each for each, _ in sorted(ranks, key=lambda item: item[1]) if each not in held]


def _free(held: dict[Lock, None]) -> None:
    while held:
        held.popitem()[0].release()


def _after_in_parent() -> None:
    if is_under_way():  # False if Ctrl-C came before any lock was held
        _free(_held.pop())
        _forking.release()


def _after_in_child() -> None:
    global _adding, process
    process, _adding = os.getpid(), threading.Lock()
    if not is_under_way():  # a fork of another thread
        _forking._at_fork_reinit()  # type: ignore[attr-defined]
        _forking.acquire()
        _held[:] = [{}]
    _hold_free(_held[-1])  # locks that were made or released since
    missed = set(_missing(_held[-1]))
    for each in missed:
        each._at_fork_reinit()
    with ExitStack() as calls:  # all functions run, even if one raises; Python prints the error
        calls.callback(_after_in_parent)
        for function in reversed(_in_child):
            calls.callback(function, missed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
