"""`Journal`: how far an import or export has come, in a small file beside what it makes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from embedrock.cli.formats.base import FileError, fail
from embedrock.machine.vfs import OS_SYSTEM
from embedrock.process import platform

MAX_BYTES = 1 << 20
RESTART = "Begin anew: --restart."


class Journal:
    """A job that can be continued.

    Args:
        path: of the journal.
        job: what the job is; it must be the same when it is continued.
    """

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.path, self._job = path, json.loads(json.dumps(job))

    def load(self) -> dict[str, Any] | None:
        """Return what `save` saved last; None where there is no journal.

        Raises:
            FileError: the journal is that of another job, or no journal.
        """
        if not self.path.exists():
            return None
        try:
            kept = self._read()
            job, state = kept["job"], kept["state"]
            rows = state["rows"]
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            raise FileError(f"{self.path}: expected the journal of an earlier run; got {error!r}. {RESTART}") from error
        if type(rows) is not int or rows < 0:
            fail(self.path, "a number of rows", f"{rows!r}", RESTART)
        if job != self._job:
            self._refuse(job)
        return state

    def state(self) -> dict[str, Any] | None:
        """Return what `save` saved last, of whatever job; None where there is no journal, or none that can be read."""
        try:
            state = self._read()["state"]
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            return None
        return state if isinstance(state, dict) and type(state.get("commit", 0)) is int else None

    def _read(self) -> Any:
        with open(self.path, "rb") as file:
            return json.loads(file.read(MAX_BYTES))

    def _refuse(self, job: Any) -> None:
        keys = [key for key in self._job if not isinstance(job, dict) or job.get(key) != self._job[key]]
        before = {key: job.get(key) for key in keys} if isinstance(job, dict) else job
        now = {key: self._job[key] for key in keys}
        fail(self.path, f"to continue the earlier run, with {_listed(before)}", _listed(now), RESTART)

    def save(self, state: dict[str, Any]) -> None:
        """Keep how far the job has come, durably and as a whole. It has at least the number of ``rows``."""
        text = json.dumps({"job": self._job, "state": state}, indent=1) + "\n"
        new = self.path.with_name(self.path.name + ".new")
        with open(new, "w") as file:
            file.write(text)
            file.flush()
            platform.sync(file.fileno())
        os.replace(new, self.path)
        OS_SYSTEM.fsync_folder(str(self.path.parent))

    def remove(self) -> None:
        """The job is done, or forgotten."""
        self.path.unlink(missing_ok=True)


def _listed(values: Any) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items()) if isinstance(values, dict) else repr(values)
