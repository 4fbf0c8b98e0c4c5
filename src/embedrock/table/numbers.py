"""`keep_stats`: samples of the statistics of tables and groups, written once a second to a file of each.

Other programs read the file. It lies beside a table's folder. That of a table in RAM is in the user's runtime
directory. It begins with the present facts and a checksum. A ring of samples of a fixed size follows, each with its
number at both ends. So a reader recognizes half-written data, and no lock is needed. A sample reads counters while
other threads use the table. They only grow, and may be some microseconds apart.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import tempfile
import threading
import time
import warnings
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from embedrock.errors import ArgumentError, EmbedrockError
from embedrock.storage.backend import Backend
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.ram_layout import memory_for
from embedrock.system import platform
from embedrock.system.spans import forget, trace_by
from embedrock.table import opened
from embedrock.table.group import Group
from embedrock.table.table import Table, rows_of

SUFFIX = ".stats"  # of a file
FORMAT = 2
HEADER = 1 << 16  # bytes of the present facts, JSON
SAMPLES = 4096  # in a ring
SAMPLES_IN_RAM = 512  # of a file in the runtime directory, which is in RAM on most machines
FORGOTTEN_S = 86_400.0  # age at which an unused file in the runtime directory is removed
TRIES = 5  # attempts to read a file while it is written
Thing: TypeAlias = Table | Group
PHASES = ("plan", "disk", "gather", "wait", "sum", "rule", "spill", "commit", "compaction")
RARE = ("commit", "compaction")  # always timed
COUNTS = ("steps", "hits", "misses", "evictions", "spilled", "reads", "bytes_read", "bytes_written", "commit")
SIZES = ("rows", "cache_rows", "cache_slots", "ram_bytes", "budget_bytes", "disk_bytes", "committed")
TIMED = "timed"  # seconds in which phases were timed, except rare ones
FIELDS = ("number", "time", *COUNTS, *SIZES, TIMED, *map("{}_s".format, PHASES), "again")
RECORD = 8 * len(FIELDS)
TIMED_SHARE = 1 / 8  # share of the time in which phases are timed


class StatsWarning(RuntimeWarning):
    """A warning that the statistics of a table cannot be written any more."""


class PhaseClock:
    """A clock of the seconds of each phase, without phases nested in it. It times while it is on, and rare phases
    always.

    Rare phases last long. So their seconds count while they run.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.seconds: dict[str, float] = defaultdict(float)  # a rare lost update between threads is allowed
        self.threads = threading.local()
        self.rare: set[_Rare] = set()  # not yet added to `seconds`

    def __call__(self, name: str) -> AbstractContextManager[Any] | None:
        """Return a context that times a phase; None while the clock is off."""
        if name in RARE:
            return _Rare(self, name)
        return _Timed(self, name) if self.is_on else None

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase so far. Only one thread may call it."""
        for rare in list(self.rare):
            if rare.end:
                self.seconds[rare.name] += rare.seconds
                self.rare.remove(rare)
        read = {name: self.seconds.get(name, 0.0) for name in PHASES}
        for rare in list(self.rare):
            read[rare.name] += rare.seconds
        return read


class _Rare:
    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock, self.name, self.end = clock, name, 0.0

    @property
    def seconds(self) -> float:
        return (self.end or time.perf_counter()) - self._start

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._clock.rare.add(self)

    def __exit__(self, *error: object) -> None:
        self.end = time.perf_counter()


class _Timed:
    def __init__(self, clock: PhaseClock, name: str) -> None:
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


class StatsRing:
    """The statistics file of a table or group. A file of another table is overwritten.

    Args:
        path: of the file; None: beside the folder of the table or group.
        samples: number of samples in the ring.
    """

    def __init__(self, table: Thing, path: str | None = None, samples: int | None = None) -> None:
        uuid = table.uuid if table.path else secrets.token_hex(16)
        self._told = {
            "format": FORMAT,
            "fields": FIELDS,
            "samples": samples or SAMPLES,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "uuid": uuid,
        }
        if isinstance(table, Table):
            spec = table.spec
            self._told["spec"] = {"rows": spec.rows, "dim": spec.dim, "dtype": spec.dtype, "rule": str(spec.rule)}
        self.path = path or f"{table.path}{SUFFIX}"
        kind = "table" if isinstance(table, Table) else "group"
        self._told["table"] = table.path or f"{getattr(table, 'name', None) or kind} in RAM, {Path(self.path).stem}"
        self.number = 0
        with contextlib.suppress(OSError, ValueError):
            found = StatsFile.read(self.path)
            if found.told["uuid"] == uuid and len(found.samples["number"]):
                self.number = int(found.samples["number"][-1])
        self._file: IO[bytes] = open(self.path, "r+b" if self.number else "w+b", buffering=0)  # noqa: SIM115
        weakref.finalize(table, self.close).atexit = False  # at exit, the recorder closes it first
        if not self.number:
            self._file.truncate(HEADER)
        self._tell({})

    def add(self, values: Mapping[str, float], told: Mapping[str, Any] | None = None) -> None:
        self.number += 1
        record = [float(values.get(name, 0.0)) for name in FIELDS]
        record[0] = record[-1] = self.number
        self._file.seek(HEADER + (self.number - 1) % self._told["samples"] * RECORD)
        self._file.write(np.array(record).tobytes())
        if told:
            self._tell(told)

    def _tell(self, told: Mapping[str, Any]) -> None:
        self._told |= told
        members = self._told.get("members", [])
        for kept in (members, [{**one, "curve": []} for one in members], []):  # a group may have very many tables
            text = json.dumps({**self._told, "members": kept}).encode()
            if len(text) <= HEADER - 16:
                break
        self._file.seek(0)
        self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))

    def close(self, steps: int = 0) -> None:
        """Close the file. Note that the run ended, now and after `steps`, or after the steps of the last sample.

        A forked child notes nothing.
        """
        if self._told["pid"] == os.getpid() and not self._file.closed:
            with contextlib.suppress(OSError):
                self._tell({"ended": time.time(), "steps": steps})
        self._file.close()


class StatsFile(NamedTuple):
    """The content of the statistics file of a table or group.

    Attributes:
        told: facts about it and the process, as of the last sample: see `facts`.
        samples: by name, one array each, in order; ``time`` is in seconds since 1970.
    """

    told: dict[str, Any]
    samples: dict[str, np.ndarray]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> StatsFile:
        """Read a file, possibly while a process writes it.

        Raises:
            ValueError: it is not a statistics file.
        """
        for _ in range(TRIES):
            data = Path(path).read_bytes()
            if (told := _read_told(data)) is not None:
                break
            time.sleep(0.01)
        else:
            raise ValueError(f"{os.fspath(path)!r} has no numbers of a table, as er.keep_stats writes them.")
        whole = (len(data) - HEADER) // RECORD
        records = np.frombuffer(data, np.float64, whole * len(FIELDS), HEADER).reshape(whole, len(FIELDS))
        records = records[(records[:, 0] == records[:, -1]) & (records[:, 0] > 0)]
        records = records[np.argsort(records[:, 0])]
        return cls(told, {name: records[:, k] for k, name in enumerate(FIELDS)})


def _read_told(data: bytes) -> dict[str, Any] | None:
    """Return the facts at the beginning of a file; None if they are half written, or of another format."""
    crc, _, rest = data[:HEADER].partition(b"\n")[0].partition(b" ")
    with contextlib.suppress(ValueError, TypeError):
        if int(crc, 16) == zlib.crc32(rest):
            told = dict(json.loads(rest))
            return told if (told.get("format"), told.get("fields")) == (FORMAT, list(FIELDS)) else None
    return None


class _Recorder:
    """The thread that writes a sample every few seconds, for all tables and groups that this process writes."""

    def __init__(self, every: float) -> None:
        self.every, self._clock, self._stops = every, (clock := PhaseClock()), threading.Event()
        self._rings: weakref.WeakKeyDictionary[Thing, StatsRing] = weakref.WeakKeyDictionary()
        self._lost: weakref.WeakSet[Thing] = weakref.WeakSet()
        self._timed, self.pid, self._in_ram = 0.0, os.getpid(), 0
        trace_by(clock, lambda: clock.is_on)
        self._thread = threading.Thread(target=self._run, name="embedrock-stats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stops.set()
        if self.pid == os.getpid():
            self._thread.join()
            self.sample()  # the last steps
        forget(self._clock)
        for ring in self._rings.values():
            ring.close()

    def _run(self) -> None:
        while not self._stops.is_set():
            self._clock.is_on, start = True, time.perf_counter()
            self._stops.wait(self.every * TIMED_SHARE)
            self._clock.is_on = False
            self._timed += time.perf_counter() - start
            if not self._stops.wait(self.every * (1 - TIMED_SHARE)):
                self.sample()

    def sample(self) -> None:
        there = opened.all_open()
        for thing, ring in list(self._rings.items()):
            if thing not in there:
                ring.close(thing.steps if isinstance(thing, Table) else 0)
                del self._rings[thing]
        for thing in there:
            assert isinstance(thing, Table | Group)  # nothing else is registered
            if thing in self._lost:
                continue
            try:
                ring = self._rings[thing] = self._rings.get(thing) or self._ring(thing)
                ring.add(self._numbers(thing), {**facts(thing), "every": self.every})
            except EmbedrockError:  # closed meanwhile
                continue
            except OSError as error:
                self._lost.add(thing)
                told = f"numbers of {thing.subject} are written no more: {error}"
                warnings.warn(told, StatsWarning, stacklevel=1)

    def _ring(self, thing: Thing) -> StatsRing:
        if thing.path is not None:
            return StatsRing(thing)
        self._in_ram += 1
        folder = runtime_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.glob("*" + SUFFIX):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > FORGOTTEN_S:
                    path.unlink()
        return StatsRing(thing, str(folder / f"{self.pid}-{self._in_ram}{SUFFIX}"), SAMPLES_IN_RAM)

    def _numbers(self, thing: Thing) -> dict[str, float]:
        phases = {f"{name}_s": seconds for name, seconds in self._clock.read().items()}
        return {**numbers(thing), **phases, "time": time.time(), TIMED: self._timed}


def numbers(thing: Thing) -> dict[str, float]:
    """Return the values of a sample of a table or group, without the time."""
    tiers = _tiers(thing)
    counted = [tier.counters() for tier in tiers if isinstance(tier, DiskBackend)]
    found = {name: sum(each.get(name, 0.0) for each in counted) for name in (*COUNTS, *SIZES)}
    found |= {
        "rows": sum(tier.count for tier in tiers),
        "ram_bytes": sum(tier.bytes_used for tier in tiers),
        "budget_bytes": tiers[0].budget_bytes if isinstance(thing, Table) else thing.pools.budget_bytes,
        "steps": max((one.steps for one in ([thing] if isinstance(thing, Table) else thing.open_tables())), default=0),
    }
    if counted:
        last = next(tier.store.table_folder.manifest for tier in tiers if isinstance(tier, DiskBackend))
        found |= {"commit": last.commit, "committed": datetime.fromisoformat(last.time).timestamp()}
    return found


def facts(thing: Thing) -> dict[str, Any]:
    """Return the present facts about a table or group: its pools with their curves, and its members.

    A member has ``curve``: lists of its pool's ``memory=`` and the member's misses per step with it, if known. A pool
    has ``curve``: lists of ``memory=``, misses per step with it, and the error bound of these. A pool also has ``rows``
    per step, and ``new`` rows per step. New rows have no record, so that nothing is read for them.
    """
    if isinstance(thing, Table):
        return {"kind": "table", "pools": [_pool(tier) for tier in _tiers(thing)]}
    curves = {tier: _curves_of_parts(tier) for tier in _tiers(thing)}
    members = []
    for table in thing.open_tables():
        row = rows_of(table)
        if not row.is_closed:
            part = row.tier
            curve = curves.get(part.pool, {}).get(part.number, [])
            members.append({"name": table.name, "rows": part.count, "steps": row.steps, "curve": curve})
    return {"kind": "group", "pools": [_pool(tier) for tier in _tiers(thing)], "members": members}


def _curves_of_parts(tier: Backend) -> dict[int, list[list[float]]]:
    if not isinstance(tier, DiskBackend) or (curve := tier.watch.curve()) is None:
        return {}
    sizes = [memory_for(tier.spec, round(slots)) for slots in curve.slots.tolist()]
    parts = tier.watch.curves_of_parts()
    return {number: [list(point) for point in zip(sizes, missed, strict=False)] for number, missed in parts.items()}


def _pool(tier: Backend) -> dict[str, Any]:
    told = {"record_bytes": tier.spec.record_bytes, "budget_bytes": tier.budget_bytes, "curve": []}
    if not isinstance(tier, DiskBackend) or (curve := tier.watch.curve()) is None:
        return told
    points = np.array([curve.slots, curve.misses, curve.errors]).T.tolist()
    here, missed = tier.placement.slots, tier.watch.missed
    points = sorted([*(point for point in points if point[0] != here), [here, missed, 0.0]])
    told["curve"] = [[memory_for(tier.spec, round(slots)), *rest] for slots, *rest in points]
    return {**told, "rows": curve.rows, "new": curve.new, "missed": missed}


def _tiers(thing: Thing) -> list[Backend]:
    return [rows_of(thing).tier] if isinstance(thing, Table) else list(thing.pools.tiers)


_lock = threading.Lock()
_recorder: _Recorder | None = None


def keep_stats(every: float | None = 1.0) -> None:
    """Write statistics of each table and group that this process writes to a file.

    It is ``<folder>.stats`` beside the folder of a table on disk. For a table in RAM it is in the user's runtime
    directory. ``embedrock top`` and ``embedrock report`` show them, while the process runs and afterwards. A thread
    writes them, for existing tables and for later ones; no step waits for it. A file keeps the last 4096 samples, 1.1
    MB; in the runtime directory 512. It notes when the table closes, the program ends or `every` is None.

    Args:
        every: seconds between samples; None: stop.

    Raises:
        ArgumentError: `every` is not a number of seconds from 0.01 on.

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


weakref.finalize(keep_stats, int)  # at exit, the last function is called first: the numbers end before tables close
atexit.register(keep_stats, None)


def runtime_folder() -> Path:
    """Return the folder of statistics files of tables in RAM: one for this user, on this machine."""
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(given) / "embedrock"
    return Path(tempfile.gettempdir()) / f"embedrock-{platform.user()}"


def files_in(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Iterate over the statistics files of a table's folder, or of all tables in a folder."""
    path = Path(folder)
    own = Path(os.path.abspath(folder) + SUFFIX)  # beside it; "." has no name of its own
    yield from [own] if own.is_file() else sorted(path.glob("*" + SUFFIX))
