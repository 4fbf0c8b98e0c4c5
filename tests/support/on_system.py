"""`on`: tables and others on system calls that a test replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import embedrock as er
from embedrock.io.vfs import SYSTEM, System
from embedrock.system.scopes import set_within

P = ParamSpec("P")
T = TypeVar("T")


class on:  # it reads as a verb: on(system).open(path), on(system)(make, path)
    """Functions of `embedrock`, and any others by a call, whose files are opened by other system calls."""

    def __init__(self, system: System) -> None:
        self._system = system

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with set_within(SYSTEM, self._system):
            return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self, getattr(er, name))
