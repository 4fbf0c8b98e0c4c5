"""The system calls that a table makes, recorded on a real folder, and what a loss of power may leave of them.

This shares nothing with `FaultFS`, which keeps a model of a disk up to date while calls are made. Here nothing is
modelled while they are made: a crash leaves a part of the recorded calls, and the disk is what that part gives when it
is made on an empty one. Which parts there are says a *law*: `weakest`, `ordered` or `torn`.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from embedrock.io.vfs import System

SECTOR, PAGE = 512, 4096
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)  # of what was not synced, that survives
ROOT = 0  # the folder that the table's folder lies in. Folders have numbers below 1, files have others


class Write(NamedTuple):
    """Bytes of a file."""

    file: int
    offset: int
    data: bytes


class Name(NamedTuple):
    """A name of a folder stands for a file or folder from now on, or for none."""

    folder: int
    name: str
    what: int | None


class Sync(NamedTuple):
    """All that was done to a file or folder before would survive."""

    what: int


Call = Write | Name | Sync
Law = Callable[[Sequence[Call], random.Random], Iterator[Call]]
Disk = dict[str, bytes | None]  # by path below the root; None: a folder


class Recorder(System):
    """The real system, whose calls that change something are recorded in the order in which they were made.

    Args:
        root: the folder below which it records.
        found: what is there already, as durable as can be.

    Attributes:
        calls: so far.
    """

    def __init__(self, root: Path, found: Disk | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._root, self._numbers, self._fds = str(root), {str(root): ROOT}, dict[int, int]()
        self._lock = threading.Lock()
        for path, data in (found or {}).items():
            self._note_new(f"{root}/{path}", is_folder=data is None)
            if data:
                self.calls.append(Write(self._numbers[f"{root}/{path}"], 0, data))
        self.calls += [Sync(number) for number in self._numbers.values()]

    def _note_new(self, path: str, is_folder: bool = False) -> None:
        number = len(self.calls) + 1  # which no other has
        self._note_name(path, -number if is_folder else number)

    def _note_name(self, path: str, what: int | None) -> None:
        folder, _, name = path.rpartition("/")
        if what is None:
            del self._numbers[path]
        else:
            self._numbers[path] = what
        self.calls.append(Name(self._numbers[folder], name, what))

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            fd = super().open(path, flags)
            if flags & os.O_CREAT and path not in self._numbers:
                self._note_new(path)
            self._fds[fd] = self._numbers[path]
            return fd

    def lock(self, path: str, text: str) -> int:
        with self._lock:
            fd = super().lock(path, text)
            if path not in self._numbers:
                self._note_new(path)
            self.calls.append(Write(self._numbers[path], 0, text.encode()))
            return fd

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            done = super().pwrite(fd, data, offset)
            self.calls.append(Write(self._fds[fd], offset, bytes(data[:done])))
            return done

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            super().fdatasync(fd)
            self.calls.append(Sync(self._fds[fd]))

    def fsync_folder(self, path: str) -> None:
        with self._lock:
            super().fsync_folder(path)
            self.calls.append(Sync(self._numbers[path]))

    def mkdir(self, path: str) -> None:
        with self._lock:
            super().mkdir(path)
            self._note_new(path, is_folder=True)

    def rmdir(self, path: str) -> None:
        with self._lock:
            super().rmdir(path)
            self._note_name(path, None)

    def link(self, source: str, target: str) -> None:
        with self._lock:
            super().link(source, target)
            self._note_name(target, self._numbers[source])

    def unlink(self, path: str) -> None:
        with self._lock:
            super().unlink(path)
            self._note_name(path, None)


# ---------------------------------------------------------------- what a crash leaves


def _ends_of_sync(calls: Sequence[Call]) -> dict[int | None, int]:
    """Return, for each file or folder that was synced, the position of its last sync."""
    return {call.what: position for position, call in enumerate(calls) if isinstance(call, Sync)}


def weakest(calls: Sequence[Call], rng: random.Random) -> Iterator[Call]:
    """POSIX: what was synced survives. Of all else, any names of any folder, and any sectors of any file."""
    names, sectors, synced = rng.choice(SHARES), rng.choice(SHARES), _ends_of_sync(calls)
    for position, call in enumerate(calls):
        if isinstance(call, Sync):
            continue
        if position < synced.get(call[0], -1):
            yield call
        elif isinstance(call, Write):
            yield from (part for part in _cut(call, SECTOR) if rng.random() < sectors)
        elif rng.random() < names:
            yield call


def ordered(calls: Sequence[Call], rng: random.Random) -> Iterator[Call]:
    """ext4: a journal keeps the order of names and sizes, and bytes are on the disk before the size that has them.

    A sync of a file or folder brings the journal up to its last change. Sizes grow a page at a time.
    """
    synced = _ends_of_sync(calls)
    sure = _last_in_journal(calls, synced)
    cut, written = rng.choice((sure, len(calls), rng.randint(sure, len(calls)))), dict[int, int | None]()
    for position, call in enumerate(calls):
        if isinstance(call, Name):
            if position < cut:
                yield call
        elif isinstance(call, Write) and position < synced.get(call.file, -1):
            yield call
        elif isinstance(call, Write) and position < cut:
            if call.file not in written:  # how far its pages were written back, None for all of them
                written[call.file] = rng.choice((0, None, PAGE * rng.randint(0, 8)))
            end = written[call.file]
            data = call.data if end is None else call.data[: max(0, end - call.offset)]
            if data:
                yield call._replace(data=data)


def _last_in_journal(calls: Sequence[Call], synced: dict[int | None, int]) -> int:
    """Return up to which call, exclusively, names are on the disk for certain."""
    last = 0
    for position, call in enumerate(calls):
        if isinstance(call, Name) and position < max(synced.get(call.folder, -1), synced.get(call.what, -1)):
            last = position + 1
    return last


def torn(calls: Sequence[Call], rng: random.Random) -> Iterator[Call]:
    """Appends that end anywhere, with what lay on the disk before up to the size that the file should have."""
    names, synced = rng.choice(SHARES), _ends_of_sync(calls)
    sizes, ends = _sizes(calls), dict[int, int]()
    for position, call in enumerate(calls):
        if isinstance(call, Sync):
            continue
        if position < synced.get(call[0], -1):
            yield call
        elif isinstance(call, Name):
            if rng.random() < names:
                yield call
        else:
            if call.file not in ends:
                ends[call.file] = rng.randint(call.offset, sizes[call.file])
                yield _filling(call, sizes[call.file], rng)
            if data := call.data[: max(0, ends[call.file] - call.offset)]:
                yield call._replace(data=data)


def _filling(call: Write, size: int, rng: random.Random) -> Write:
    """Return what an extent holds that was given to a file, and not written: zeros, anything, or there is none."""
    length = rng.randint(0, max(0, size - call.offset)) if rng.random() < 0.7 else 0
    return call._replace(data=bytes(length) if rng.random() < 0.5 else rng.randbytes(length))


def _sizes(calls: Sequence[Call]) -> dict[int, int]:
    sizes = dict[int, int]()
    for call in calls:
        if isinstance(call, Write):
            sizes[call.file] = max(sizes.get(call.file, 0), call.offset + len(call.data))
    return sizes


def _cut(call: Write, size: int) -> Iterator[Write]:
    start = call.offset - call.offset % size
    for at in range(start, call.offset + len(call.data), size):
        lo = max(at, call.offset)
        yield Write(call.file, lo, call.data[lo - call.offset : at + size - call.offset])


LAWS: dict[str, Law] = {"weakest": weakest, "ordered": ordered, "torn": torn}


def made(calls: Iterator[Call] | Sequence[Call]) -> Disk:
    """Make calls on an empty disk."""
    files, folders = dict[int, bytearray](), dict[int, dict[str, int]]({ROOT: {}})
    for call in calls:
        if isinstance(call, Write):
            data, end = files.setdefault(call.file, bytearray()), call.offset + len(call.data)
            data.extend(bytes(max(0, end - len(data))))
            data[call.offset : end] = call.data
        elif isinstance(call, Name):
            names = folders.setdefault(call.folder, {})
            if call.what is None:
                names.pop(call.name, None)
            else:
                names[call.name] = call.what
    return dict(_walk(ROOT, "", files, folders))


def _walk(
    number: int, path: str, files: dict[int, bytearray], folders: dict[int, dict[str, int]]
) -> Iterator[tuple[str, bytes | None]]:
    for name, what in sorted(folders.get(number, {}).items()):
        yield path + name, None if what <= ROOT else bytes(files.get(what, b""))
        yield from _walk(what, f"{path}{name}/", files, folders)


def put(disk: Disk, root: Path) -> None:
    """Write files and folders below a real folder."""
    for path, data in disk.items():
        if data is None:
            os.mkdir(root / path)
        else:
            with open(root / path, "wb", buffering=0) as file:
                file.write(data)
