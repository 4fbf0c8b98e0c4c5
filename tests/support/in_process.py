"""A stand-in for `Child`, whose object lives in this process: for tests of implementations, not of processes."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.processes import ChildError


class InProcess:
    """``factory(*args)`` in this process, which has imported all it needs; what comes and goes is pickled too."""

    def __init__(
        self,
        factory: Callable[..., object],
        *args: Any,
        environment: Mapping[str, str],
        timeout_s: float,
        cleanup: Callable[[], object] | None = None,
    ) -> None:
        self._target: object = None
        self.call("__init__", factory, *args)

    def call(self, method: str, *args: Any) -> Any:
        """Do what a child does."""
        method, args = pickle.loads(pickle.dumps((method, args)))
        try:
            if method == "__init__":
                self._target, value = args[0](*args[1:]), None
            else:
                value = getattr(self._target, method)(*args)
        except Exception as error:
            raise ChildError(type(error).__name__, str(error), traceback.format_exc()) from error
        return pickle.loads(pickle.dumps(value))

    def close(self) -> None:
        """Let go of the object."""
        self._target = None

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
