"""Forks: what other threads are in the middle of ends first, and a child waits for nothing that it does not have.

A forked child has all memory but, of all threads, only the one that forked. What another one was in the middle of stays
half done there for ever, and a lock that it held is never released. So every lock that a child may meet is made here,
and whoever forks holds all of them from before the fork until it is over, in both processes: no step is half made,
none begins, and the child finds the locks free.

A thread may itself wait for the one that forks, so that is not waited for without end. A lock that was not to be had is
made anew in the child, and what it protects counts as half changed there.

Processes that start without a copy of this one's memory (`subprocess` without `preexec_fn`, "spawn", "forkserver") run
none of this.
"""

from __future__ import annotations

import functools
import logging  # noqa: F401  # first, as hooks before a fork run in reverse: it takes its lock when all here are held
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
# Then those that are held already are let go, and taken again: who has the missing one may wait for one of them.
SLICE = 1.0

Lock: TypeAlias = Any  # a `threading.RLock`, which is a function for some type checkers
T = TypeVar("T")


class LockRank(IntEnum):
    """The order in which locks are taken: who holds one may need those after it before letting it go."""

    QUEUE = 0  # who is the next to have a table
    TABLE = 1
    SECTION = 2  # a short one
    WORKER = 3  # a thread that makes a call of a kernel
    LOADING = 4  # of kernels
    COMPILER = 5  # Numba's
    VALUE = 6  # a property that is computed once


_ranks: weakref.WeakKeyDictionary[Lock, LockRank] = weakref.WeakKeyDictionary()
_adding = threading.Lock()  # to them, or going through them
_forking = threading.RLock()  # held by who forks
process = os.getpid()  # this one; asked at every use of a table, which takes the system a microsecond on some machines
_held: list[dict[Lock, None]] = []  # by fork, as one may come inside of a hook of another
_in_child: list[Callable[[Set[Lock]], None]] = [lambda missed: interrupts.held_back.begin_child()]


def lock(rank: LockRank) -> Lock:
    """Return a new `threading.RLock` that whoever forks holds, so that no other thread has it in a child."""
    made = threading.RLock()
    hold(made, rank)
    return made


def hold(held: Lock, rank: LockRank) -> None:
    """Let whoever forks hold a `threading.RLock`, as long as there is somebody who has it."""
    with _adding:
        _ranks[held] = rank


def cached_property(function: Callable[[Any], T]) -> functools.cached_property[T]:
    """Make a `functools.cached_property`. Up to Python 3.11 all objects of its class share one lock."""
    made = functools.cached_property(function)
    shared = getattr(made, "lock", None)
    if shared is not None:
        hold(shared, LockRank.VALUE)
    return made


def in_child(function: Callable[[Set[Lock]], None]) -> Callable[[Set[Lock]], None]:
    """Register a function that every child calls when it has just been forked.

    Args:
        function: is given the locks that could not be held: another thread may have been in the middle of what they
            protect.
    """
    _in_child.append(function)
    return function


def is_under_way() -> bool:
    """Return whether this thread is forking: it holds all locks, and must wait for no other thread."""
    return bool(_forking._is_owned() and _held)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- what is done at a fork


def _before() -> None:
    with interrupts.held_back():  # or locks might stay held for ever
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
    """Hold all locks, or what is to be had of them in time; return which of the two."""
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
    """Hold all locks; return the first one that was not to be had in so many seconds."""
    while missing := _missing(held):  # again: those that were waited for may have made others
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
    """Return the locks that are not held, in the order of their ranks."""
    with _adding:
        ranks = list(_ranks.items())
    return [each for each, _ in sorted(ranks, key=lambda item: item[1]) if each not in held]


def _free(held: dict[Lock, None]) -> None:
    while held:
        held.popitem()[0].release()


def _after_in_parent() -> None:
    if is_under_way():  # not where Ctrl-C came before anything was held
        _free(_held.pop())
        _forking.release()


def _after_in_child() -> None:
    global _adding, process
    process, _adding = os.getpid(), threading.Lock()
    if not is_under_way():
        _begin_anew()
    _hold_free(_held[-1])  # which were made, or let go, since
    missed = set(_missing(_held[-1]))
    for each in missed:
        each._at_fork_reinit()
    with ExitStack() as calls:  # which makes all of them, whatever one raises; Python prints that
        calls.callback(_after_in_parent)
        for function in reversed(_in_child):
            calls.callback(function, missed)


def _begin_anew() -> None:
    """Forget forks of other threads."""
    _forking._at_fork_reinit()  # type: ignore[attr-defined]
    _forking.acquire()
    _held[:] = [{}]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
