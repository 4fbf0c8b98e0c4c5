"""`keep_stats`: what tables on disk do, written once a second to a file beside each, for other programs to read.

The file is a ring of samples, of a fixed size. Each is written by one call, with its number at both ends, so that who
reads it can tell one that is half written; nobody takes a lock. What a sample needs of a table is read while others use
it: counts that only grow, which may be some microseconds apart.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, EmbedrockError
from embedrock.process.spans import forget, trace_by
from embedrock.table import opened
from embedrock.table.table import Table, rows_of
from embedrock.tiers.disk import Disk

SUFFIX = ".stats"  # of the file beside a table's folder
FORMAT = 1
HEADER = 1024  # bytes: JSON, and spaces
SAMPLES = 4096  # in a ring
PHASES = ("plan", "disk", "gather", "wait", "sum", "rule", "spill", "commit", "compaction")
COUNTS = ("steps", "hits", "misses", "evictions", "spilled", "reads", "bytes_read", "bytes_written", "commit")
SIZES = ("rows", "cache_rows", "cache_slots", "ram_bytes", "budget_bytes", "disk_bytes", "committed")
TIMED = "timed"  # seconds in which phases were timed
FIELDS = ("number", "time", *COUNTS, *SIZES, TIMED, *map("{}_s".format, PHASES), "again")
RECORD = 8 * len(FIELDS)
TIMED_SHARE = 1 / 8  # of the time, phases are timed


class StatsWarning(RuntimeWarning):
    """Numbers of a table cannot be written any more."""


class Clock:
    """Adds up the seconds of phases, without those of the phases inside of them, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.seconds: dict[str, float] = defaultdict(float)  # threads may lose one of another now and then
        self.threads = threading.local()

    def __call__(self, name: str) -> AbstractContextManager[Any] | None:
        """Return what times a phase; None while it is off."""
        return _Timed(self, name) if self.is_on else None


class _Timed:
    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name, self.inside = clock, name, 0.0

    def __enter__(self) -> None:
        threads = self._clock.threads
        self._around = getattr(threads, "current", None)
        threads.current, self._start = self, time.perf_counter()

    def __exit__(self, *error: object) -> None:
        taken = time.perf_counter() - self._start
        self._clock.seconds[self._name] += taken - self.inside
        self._clock.threads.current = self._around
        if self._around is not None:
            self._around.inside += taken


class Ring:
    """The file of a table's samples, which is written anew from its beginning where it is another's.

    Args:
        table: whose numbers.
    """

    def __init__(self, table: Table) -> None:
        self._told = {
            "format": FORMAT, "fields": FIELDS, "samples": SAMPLES, "table": table.path, "pid": os.getpid(),
            "uuid": table.uuid, "record_bytes": table.spec.record_bytes,
        }  # fmt: skip
        self.path = f"{table.path}{SUFFIX}"
        self.number = _last_number(self.path, table.uuid)
        self._file: IO[bytes] = open(self.path, "r+b" if self.number else "w+b", buffering=0)  # noqa: SIM115
        weakref.finalize(table, self._file.close)
        self._file.write(json.dumps(self._told).encode().ljust(HEADER))

    def add(self, values: dict[str, float]) -> None:
        """Write a sample."""
        self.number += 1
        record = [float(values.get(name, 0.0)) for name in FIELDS]
        record[0] = record[-1] = self.number
        self._file.seek(HEADER + (self.number - 1) % SAMPLES * RECORD)
        self._file.write(np.array(record).tobytes())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _last_number(path: str, uuid: str) -> int:
    """Return the number of the last sample of a table's file; 0 where there is none."""
    try:
        found = History.read(path)
    except (OSError, ValueError):
        return 0
    return int(found.samples["number"][-1]) if found.told["uuid"] == uuid and len(found.samples["number"]) else 0


class History(NamedTuple):
    """What a file has of a table.

    Attributes:
        told: of the table and the process.
        samples: by name, one array each, in order; ``time`` is in seconds since 1970.
    """

    told: dict[str, Any]
    samples: dict[str, np.ndarray]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> History:
        """Read a file, which a process may be writing.

        Raises:
            ValueError: it is something else.
        """
        data = Path(path).read_bytes()
        told: dict[str, Any] = {}
        with contextlib.suppress(ValueError, TypeError):
            told = dict(json.loads(data[:HEADER]))
        if (told.get("format"), told.get("fields")) != (FORMAT, list(FIELDS)):
            raise ValueError(f"{os.fspath(path)!r} has no numbers of a table, as er.keep_stats writes them.")
        whole = (len(data) - HEADER) // RECORD
        records = np.frombuffer(data, np.float64, whole * len(FIELDS), HEADER).reshape(whole, len(FIELDS))
        records = records[(records[:, 0] == records[:, -1]) & (records[:, 0] > 0)]
        records = records[np.argsort(records[:, 0])]
        return cls(told, {name: records[:, k] for k, name in enumerate(FIELDS)})


class _Recorder:
    """The thread that writes, once in so many seconds, for all tables on disk that this process writes."""

    def __init__(self, every: float) -> None:
        self.every, self._clock, self._stops = every, Clock(), threading.Event()
        self._rings: weakref.WeakKeyDictionary[Table, Ring] = weakref.WeakKeyDictionary()
        self._lost: weakref.WeakSet[Table] = weakref.WeakSet()
        self._timed, self.pid = 0.0, os.getpid()
        trace_by(self._clock)
        self._thread = threading.Thread(target=self._run, name="embedrock-stats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return once it has ended."""
        self._stops.set()
        if self.pid == os.getpid():
            self._thread.join()
        forget(self._clock)
        for ring in self._rings.values():
            ring.close()

    def _run(self) -> None:
        while not self._stops.is_set():
            self._clock.is_on, start = True, time.perf_counter()
            self._stops.wait(self.every * TIMED_SHARE)
            self._clock.is_on = False
            self._timed += time.perf_counter() - start
            self._stops.wait(self.every * (1 - TIMED_SHARE))
            self.sample()

    def sample(self) -> None:
        """Write a sample of each table."""
        for table in opened.all_opened():
            if table in self._lost or not isinstance(table, Table):  # groups have no file of their own yet
                continue
            try:
                ring = self._rings.get(table)
                if ring is None:
                    ring = self._rings[table] = Ring(table)
                ring.add(self._numbers(table))
            except EmbedrockError:  # it was closed meanwhile
                continue
            except OSError as error:
                self._lost.add(table)
                warnings.warn(f"numbers of {table.subject} are written no more: {error}", StatsWarning, stacklevel=1)

    def _numbers(self, table: Table) -> dict[str, float]:
        rows = rows_of(table)
        tier = rows.tier
        assert isinstance(tier, Disk)
        sizes = {"rows": tier.count, "ram_bytes": tier.bytes_used, "budget_bytes": tier.budget_bytes}
        phases = {f"{name}_s": self._clock.seconds.get(name, 0.0) for name in PHASES}
        now = {"time": time.time(), "steps": rows.steps, "committed": _seconds(tier.store.volume.manifest.time)}
        return {**tier.counters(), **sizes, **phases, **now, TIMED: self._timed}


def _seconds(told: str) -> float:
    return datetime.fromisoformat(told).timestamp()


_lock = threading.Lock()
_recorder: _Recorder | None = None


def keep_stats(every: float | None = 1.0) -> None:
    """Write numbers about each table on disk that this process writes to a file beside its folder, ``<folder>.stats``.

    ``embedrock top`` and ``embedrock report`` show them, while the process runs and afterwards. A thread does it, for
    tables that are open already and those to come; no step waits for it. A file keeps the last 4096 samples, 0.9 MB.

    Args:
        every: seconds from one sample to the next; None: no longer.

    Raises:
        ArgumentError: `every` is no number of seconds from 0.01 on.

    Example:
        >>> import embedrock as er
        >>> er.keep_stats(every=5)
        >>> er.keep_stats(None)
    """
    global _recorder
    if every is not None and (isinstance(every, bool) or not isinstance(every, int | float) or not 0.01 <= every < 1e9):
        raise ArgumentError(f"`every` of er.keep_stats must be seconds, 0.01 or more, or None: got {every!r}.")
    with _lock:
        before, _recorder = _recorder, None
        if before is not None:
            before.stop()
        if every is not None:
            _recorder = _Recorder(every)


@atexit.register
def _stop() -> None:
    """End the thread before Python does."""
    keep_stats(None)


def files_in(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Go through the files of numbers of a table's folder, or of all tables in a folder."""
    path = Path(folder)
    own = path.with_name(path.name + SUFFIX)
    yield from [own] if own.is_file() else sorted(path.glob("*" + SUFFIX))
