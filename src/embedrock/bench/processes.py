"""An object that lives in a process of its own and is called from here, one call at a time.

Not `multiprocessing`: a contender must start from a clean interpreter, with the thread pools' environment
variables set before any library loads, and must not run the caller's ``__main__`` again.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

_BOOT = "from embedrock.bench.processes import serve; serve()"
_LAST_WORDS = 300  # characters of a dead child's output that its obituary quotes


class ChildError(Exception):
    """A call in a child failed.

    Attributes:
        kind: name of the exception class there, or "Died" or "TimeoutError" when there was no answer.
        details: the child's traceback, or what it last wrote.
    """

    def __init__(self, kind: str, message: str, details: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details


class Child:
    """``factory(*args)`` in a fresh interpreter. Close it, or use it in a ``with`` statement.

    It ends when it is closed, and also when this process ends in whatever way: its standard input closes then.

    Args:
        factory: a class or function that can be imported by name (it is pickled).
        args: its arguments, picklable.
        environment: environment variables to set on top of this process's own.
        timeout_s: seconds that a call may take.

    Raises:
        ChildError: the factory failed.
    """

    def __init__(
        self, factory: Callable[..., object], *args: Any, environment: Mapping[str, str], timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()
        self._connection, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
            )
        finally:
            theirs.close()
        try:
            self.call("__init__", factory, *args)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object and wait for what it returns.

        Raises:
            ChildError: it raised, died, or took longer than the timeout (then it is killed).
        """
        try:
            self._connection.send((method, args))
            if not self._connection.poll(self._timeout_s):
                self.close()
                raise ChildError("TimeoutError", f"no answer within {self._timeout_s:g} s")
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._obituary() from error
        if not succeeded:
            raise ChildError(*value)
        return value

    def close(self) -> None:
        """End the process and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._connection.close()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _obituary(self) -> ChildError:
        status = self._process.wait()
        cause = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        self._log.seek(0)
        details = self._log.read().decode(errors="replace").strip()[-_LAST_WORDS:]
        return ChildError("Died", f"its process ended with {cause}{hint}", details)


def serve() -> None:
    """Be the child: make the object that the first message asks for, then call its methods."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends its children
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    target: object = None
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            method, args = pickle.loads(request)  # in here, so that a factory that does not import is an answer
            if method == "__init__":
                target, value = args[0](*args[1:]), None
            else:
                value = getattr(target, method)(*args)
        except Exception as error:
            connection.send((False, (type(error).__name__, str(error), traceback.format_exc())))
        else:
            connection.send((True, value))


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
