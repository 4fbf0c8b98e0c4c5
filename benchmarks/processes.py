"""An object that lives in a process of its own and is called from here, one call at a time.

Not `multiprocessing`: an implementation must start from a clean interpreter, with the thread pools' environment
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
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

_BOOT = "from benchmarks.processes import serve; serve()"
_LAST_OUTPUT = 300  # characters of a dead child's output that the error quotes


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

    The process ends when it is closed, and when this process ends in whatever way: its standard input closes then.

    Args:
        factory: a class or function that can be imported by name (it is pickled).
        args: its arguments, picklable.
        environment: environment variables to set on top of this process's own.
        timeout_s: seconds that a call may take.
        cleanup: called once the process is gone.

    Raises:
        ChildError: the factory failed.
    """

    def __init__(
        self,
        factory: Callable[..., object],
        *args: Any,
        environment: Mapping[str, str],
        timeout_s: float,
        cleanup: Callable[[], object] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        with ExitStack() as undo:
            undo.callback(cleanup or bool)
            self._log = undo.enter_context(tempfile.TemporaryFile())
            self._connection, theirs = map(undo.enter_context, Pipe())
            self._process = undo.enter_context(_start(theirs, self._log, environment))
            undo.callback(self._process.kill)
            theirs.close()
            self.call("__init__", factory, *args)
            self._resources = undo.pop_all()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object and wait for what it returns.

        Raises:
            ChildError: it raised, died, or did not answer in time. After the last two, close it.
        """
        try:
            self._connection.send((method, args))
            if not self._connection.poll(self._timeout_s):
                raise ChildError("TimeoutError", f"no answer within {self._timeout_s:g} s")
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._death() from error
        if not succeeded:
            raise ChildError(*value)
        return value

    def close(self) -> None:
        self._resources.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _death(self) -> ChildError:
        status = self._process.wait()
        cause = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        self._log.seek(0)
        details = self._log.read().decode(errors="replace").strip()[-_LAST_OUTPUT:]
        return ChildError("Died", f"its process ended with {cause}{hint}", details)


def _start(connection: Connection, log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    number = connection.fileno()
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, str(number)],
        pass_fds=(number,),
        env={**child_environment(), **environment},
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
    )


def child_environment() -> dict[str, str]:
    """Return this process's environment variables, with which a fresh interpreter finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def serve() -> None:
    """Make the object of the first message, then call its methods, as the child of `Child`."""
    # Ctrl-C reaches every process of the terminal; the parent ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    target: object = None
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            # Unpickled here, so that a factory that does not import is an answer like any other.
            method, args = pickle.loads(request)
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
