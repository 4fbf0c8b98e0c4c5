"""All input and output of tables on disk: the system calls that tests can replace, and files that only grow.

`System` is the seam: the primitive calls, one method each. `OS_SYSTEM` is the real one; `FaultFS` in ``tests/suites``
is one in memory, which fails and crashes on demand. Everything above uses `File`, `write_whole` and `read_whole`,
which do what every caller would otherwise have to remember: repeat short and interrupted calls, never sync a file
again after an error, and say which file it was and how many bytes were missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Set
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from embedrock.errors import CorruptTableError, TableFileError
from embedrock.io import readers
from embedrock.system import forks, platform
from embedrock.system.arena import returned
from embedrock.system.platform import O_DIRECT, O_NOFOLLOW, O_NONBLOCK
from embedrock.system.sizes import format_bytes

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def told(needed: int, free_bytes: Callable[[str], int], path: str) -> str:
    """Return how much space is missing, as part of a sentence.

    Args:
        needed: bytes; 0 where that is not known.
        free_bytes: of the file system that a folder lies in, which may raise `OSError`.
        path: of the file that had no room.
    """
    wanted = f"{format_bytes(needed)} ({needed} bytes) more are needed" if needed else "more is needed"
    try:
        free = free_bytes(os.path.dirname(path) or ".")
    except OSError:
        return wanted
    return f"{wanted}, and {format_bytes(free)} ({free} bytes) are free"


def is_full(error: BaseException | None) -> bool:
    """Return whether an error is that of a full disk, or came of one: some libraries only say so in their words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return True
        if any(os.strerror(code) in str(error) for code in NO_SPACE):
            return True
        error = error.__cause__ or error.__context__
    return False


def full_disk(path: str, what: str, needed: int, remedy: str) -> OSError:
    """Return the error of a full disk, with all that its reader has to know.

    Args:
        path: of the file that had no room.
        what: what could not be done.
        needed: how many bytes it takes.
        remedy: what to do, and what is left: sentences.

    Example:
        >>> print(full_disk("/dev/shm/rows.npy", "rows of table 'users' could not be exported", 1 << 40, "Free some."))
        [Errno 28] No space left on device: rows of table 'users' could not be exported: 1.0 TiB ...
    """
    missing = told(needed, platform.free_bytes, path)
    text = f"{os.strerror(errno.ENOSPC)}: {what}: {missing}. {remedy} No room was found for"  # what Python appends
    return OSError(errno.ENOSPC, text, path)


DIRECT_BYTES = 32 << 20  # a file that has grown to this is read past the page cache
BLOCK = 4096  # what offsets, sizes and addresses of direct reads are multiples of
DIRECT_WRITE_BYTES = 256 << 10  # what is written at once past the page cache, at least ...
BOUNCE_BYTES = 4 << 20  # ... and at most
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)

Data = bytes | bytearray | memoryview
Int64 = npt.NDArray[np.int64]
P = ParamSpec("P")
R = TypeVar("R")


def retried(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return ``call(...)``, made again for as long as a signal interrupts it (EINTR)."""
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue


def opened(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return ``call(...)``, which opens a file; where too many are open, the error says how to have fewer, or more."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if not lacks_files(error):
            raise
        code, where = getattr(error, "errno", errno.EMFILE), getattr(error, "filename", None)
        limit = None if code == errno.ENFILE else platform.open_file_limit()
        whose = "the machine" if limit is None else f"this process, of {limit},"
        told = (
            f"{os.strerror(code)}: {whose} has no more left. A table on disk holds a few dozen, and one for each "
            "128 MiB of its rows. Raise the limit (`ulimit -n 65536` before Python starts; LimitNOFILE= of a service), "
            "or close tables and files that are not in use"
        )
        raise OSError(code, told, where) from error


def lacks_files(error: BaseException) -> bool:
    """Return whether an error says that too many files are open; some libraries say so in words only."""
    return getattr(error, "errno", None) in TOO_MANY_FILES or os.strerror(errno.EMFILE) in str(error)


def no_lock_file(path: str) -> TableFileError:
    """Return the error of a lock that is no file of its own: what it leads to would be written over."""
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFREG: "another name of a file"}
    kind = kinds.get(stat.S_IFMT(os.lstat(path).st_mode), "no file")
    text = f"the lock must be a file with one name: it is {kind}. If no process has this open, move it away: it is made"
    return TableFileError(errno.EINVAL, f"{text} anew", path)


class System(ABC):
    """The system calls that tables need. Each raises `OSError` as the system does, and may be interrupted."""

    def check_usable(self, subject: str) -> None:
        """Raise `UnsupportedError` where there are no such calls, saying that `subject` cannot be on disk."""
        return None

    @abstractmethod
    def open(self, path: str, flags: int) -> int:
        """Open a file as `os.open` does, and return its descriptor. O_DIRECT is a wish, dropped where refused."""

    @abstractmethod
    def close(self, fd: int) -> None:
        """Close a descriptor, whatever it was opened for."""

    @abstractmethod
    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Return at most `size` bytes at `offset`; fewer at the end of the file, or for no reason."""

    @abstractmethod
    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of `data` at `offset`; return how many bytes."""

    @abstractmethod
    def fdatasync(self, fd: int) -> None:
        """Return once all that was written to the file would survive a loss of power. Call it once per error."""

    @abstractmethod
    def size(self, fd: int) -> int:
        """Return the size of an open file in bytes."""

    @abstractmethod
    def fsync_folder(self, path: str) -> None:
        """Return once the entries of a folder would survive a loss of power."""

    @abstractmethod
    def mkdir(self, path: str) -> None:
        """Make a folder in an existing one."""

    @abstractmethod
    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""

    @abstractmethod
    def link(self, source: str, target: str) -> None:
        """Give a file a second name. FileExistsError where the name is taken: this is what publishes a manifest."""

    @abstractmethod
    def unlink(self, path: str) -> None:
        """Remove a name of a file."""

    @abstractmethod
    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder, in any order."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder of that name."""

    @abstractmethod
    def free_bytes(self, path: str) -> int:
        """Return how many bytes can still be written to the file system that `path` lies in."""

    @abstractmethod
    def lock(self, path: str, text: str) -> int:
        """Lock a file for as long as the descriptor returned is open, and write `text` to it.

        Raises:
            BlockingIOError: it is locked, by this process or another.
            OSError: ENOLCK or EOPNOTSUPP, where the file system has no locks.
        """

    def is_at(self, fd: int, path: str) -> bool:
        """Return whether an open file is the one that is found at `path` now."""
        return True

    def read_many(self, fds: Int64, offsets: Int64, sizes: Int64, out: npt.NDArray[np.uint8], starts: Int64) -> None:
        """Read pieces of files: piece i goes to ``out[starts[i]:starts[i] + sizes[i]]``.

        Args:
            fds: descriptors of the pieces, (n,) int64, as are the next three; they may repeat.
            offsets: where each begins in its file, a multiple of `BLOCK` where that `is_direct`.
            sizes: bytes of each, likewise.
            out: flat memory whose address is a multiple of `BLOCK`.
            starts: where each goes, likewise; what lies behind the end of a file is zeroed.
        """
        memory, columns = out.data, (fds, offsets, sizes, starts)
        for fd, offset, size, start in zip(*(column.tolist() for column in columns), strict=True):
            data = _read_fully(self, fd, size, offset)
            memory[start : start + len(data)] = data
            out[start + len(data) : start + size] = 0

    def is_direct(self, fd: int) -> bool:
        """Return whether a file is read past the page cache, in whole blocks."""
        return False

    def behind(self, fd: int, start: int, end: int) -> None:
        """Start to write bytes that were appended, so that dirty memory is bounded and a later sync short."""
        return None

    def drop(self, fd: int) -> None:
        """Say that what the system keeps of a file in its page cache is not worth keeping."""
        return None


def _read_fully(system: System, fd: int, size: int, offset: int) -> bytes:
    """Return `size` bytes, or what there is up to the end of the file."""
    pieces: list[bytes] = []
    while size > 0 and (piece := retried(system.pread, fd, size, offset)):
        pieces.append(piece)
        size -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class File:
    """A file that only grows. `create` and `open_file` make it; one thread at a time may append.

    Attributes:
        path: its name.
        fd: a descriptor for `System.read_many`.
        size: bytes that were written or found.
    """

    def __init__(self, system: System, path: str, fd: int, size: int) -> None:
        self.path, self.fd, self.size = path, fd, size
        self._system = system
        self._writing_fd = fd
        self._failure: OSError | None = None

    def append(self, data: Data) -> int:
        """Write `data` at the end; return where it begins. When it fails, the file has the size that it had."""
        start, view = self.size, memoryview(data).cast("B")
        end, at = start + len(view), start
        while at < end:
            try:
                at += retried(self._system.pwrite, self._writing_fd, view[at - start :], at)
            except OSError as error:
                raise self._named(error, end - at) from error
        self.size = end
        if end >= DIRECT_BYTES and self.fd == self._writing_fd:
            self._read_directly()
        return start

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes.

        Raises:
            CorruptTableError: the file ends before.
        """
        try:
            data = _read_fully(self._system, self.fd, size, offset)
        except OSError as error:
            raise self._named(error) from error
        if len(data) < size:
            raise CorruptTableError(
                f"{self.path} is truncated: {size} bytes were expected at {offset}, and {len(data)} are there. "
                "Restore the file, or open an older commit."
            )
        return data

    def sync(self) -> None:
        """Return once all that was appended would survive a loss of power.

        After an error, every further call raises it again: the system may have dropped what it could not write, and
        would then report success.
        """
        if self._failure is not None:
            raise self._failure
        try:
            retried(self._system.fdatasync, self._writing_fd)
        except OSError as error:
            self._failure = self._named(error)
            raise self._failure from error

    def behind(self, start: int) -> None:
        """Start to write what was appended from `start` on. An error is one of every later `sync` too."""
        try:
            self._system.behind(self._writing_fd, start, self.size)
        except OSError as error:
            self._failure = self._named(error)
            raise self._failure from error

    def close(self) -> None:
        """Close the file; nothing happens when it is closed already."""
        fds, self.fd, self._writing_fd = {self.fd, self._writing_fd}, -1, -1
        for fd in fds - {-1}:
            # The descriptor is gone even after an error, which says nothing that a sync did not.
            with contextlib.suppress(OSError):
                self._system.close(fd)

    def __del__(self) -> None:
        # A run that was folded or dropped is read until the last thread that found it there has done so.
        self.close()

    def _read_directly(self) -> None:
        """Read `fd` past the page cache from now on, where the file system can; appending goes on as before."""
        with contextlib.suppress(OSError):
            self.fd = retried(self._system.open, self.path, os.O_RDONLY | O_DIRECT)

    def _named(self, error: OSError, needed: int = 0) -> OSError:
        """Return the error with the path, and with what is missing on a full disk."""
        text = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in NO_SPACE:
            text += f": {told(needed, self._system.free_bytes, self.path)}. Free some space, and do it again"
        return OSError(error.errno, text, self.path)


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."


def aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return memory that can be written to disk without a copy."""
    return returned(nbytes, np.uint8, "a copy of records")


def create(system: System, path: str) -> File:
    """Make an empty file.

    Raises:
        FileExistsError: there is one of that name.
    """
    return File(system, path, retried(system.open, path, os.O_RDWR | os.O_CREAT | os.O_EXCL), 0)


def open_file(system: System, path: str, direct: bool = False) -> File:
    """Open a file to be read.

    Args:
        system: where it lies.
        path: its name.
        direct: have it read past the page cache where the file system can: for random pieces of files larger than RAM.
    """
    fd = retried(system.open, path, os.O_RDONLY | (O_DIRECT if direct else 0))
    try:
        return File(system, path, fd, retried(system.size, fd))
    except BaseException:
        system.close(fd)
        raise


def write_whole(system: System, path: str, *parts: Data, link_to: str | None = None) -> None:
    """Write a small file that is there as a whole, after a crash too, or not at all.

    Args:
        system: where it goes.
        path: its name; with `link_to`, a temporary one in the same folder, which an older attempt may have left.
        parts: all its bytes, one after the other.
        link_to: the name that it gets once its bytes are safe.

    Raises:
        FileExistsError: the name is taken. Nothing has changed.
        OSError: anything else. Where making the name `link_to` durable failed, that file may be there, and whole.
    """
    write_pieces(system, path, parts, link_to)


def write_pieces(system: System, path: str, parts: Iterable[Data], link_to: str | None = None) -> None:
    """Write a file as `write_whole` does, of parts that are made one after the other."""
    if link_to is not None and system.exists(path):
        system.unlink(path)
    file = create(system, path)
    try:
        for data in parts:
            file.append(data)
        file.sync()
        file.close()
        if link_to is None:
            retried(system.fsync_folder, _folder_of(path))
            return
        system.link(path, link_to)
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            system.unlink(path)
        raise
    retried(system.fsync_folder, _folder_of(path))
    with contextlib.suppress(OSError):  # the file is safe under its name; the next attempt removes this one
        system.unlink(path)


def read_whole(system: System, path: str, limit_bytes: int) -> bytes:
    """Return all bytes of a small file.

    Raises:
        CorruptTableError: it is larger than `limit_bytes`. It was not read.
    """
    file = open_file(system, path)
    try:
        if file.size > limit_bytes:
            raise CorruptTableError(
                f"{path} is too large: at most {limit_bytes} bytes were expected, and it has {file.size}. "
                "Restore the file, or open an older commit."
            )
        return file.read(0, file.size)
    finally:
        file.close()


LOCK_HEAD = 7  # bytes by which a lock of ours is told from another file
WRITE_BEHIND_BYTES = 4 << 20  # write-back begins whenever so many bytes were appended ...
DIRTY_BYTES = 32 << 20  # ... and an append waits when so many have not reached the disk
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


class _UnsyncedTail:
    """What of a growing file has not been written back yet: [done, started) is on its way, [started, ...) is not."""

    __slots__ = ("done", "failure", "started")

    def __init__(self, start: int) -> None:
        self.done = self.started = start
        self.failure: OSError | None = None


class _AlignedBuffer(threading.local):
    """Memory of a thread, aligned as direct writes need it."""

    @forks.cached_property
    def memory(self) -> memoryview:
        return memoryview(platform.private_memory(BOUNCE_BYTES))


class OSSystem(System):
    """The real system calls."""

    def __init__(self) -> None:
        self._direct: set[int] = set()
        self._writers: dict[int, int] = {}  # for descriptors that are written: others of the same files, for O_DIRECT
        self._bounce = _AlignedBuffer()
        self._paths: dict[int, str] = {}
        self._tails: dict[int, _UnsyncedTail] = {}
        self._sync_file_range = platform.find_sync_file_range()

    def check_usable(self, subject: str) -> None:
        platform.check_files(subject)

    def open(self, path: str, flags: int) -> int:
        flags |= O_NONBLOCK  # a pipe in the place of a file would block for ever; files do not care
        try:
            fd = opened(os.open, path, flags, 0o666)
        except OSError as error:
            if not flags & O_DIRECT or error.errno != errno.EINVAL:
                raise
            fd = opened(os.open, path, flags & ~O_DIRECT, 0o666)
        self._paths[fd] = path
        platform.allow_more_files_than(fd)
        if platform.is_direct(fd):
            self._direct.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._direct.discard(fd)
        self._give_up_writer(fd)
        self._writers.pop(fd, None)
        self._tails.pop(fd, None)
        self._paths.pop(fd, None)
        if fd in _locks:
            _locks.discard(fd)  # its number is soon that of another file
            with contextlib.suppress(OSError):
                platform.unlock(fd)  # a child that was just forked may have the descriptor still
        os.close(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        if fd not in self._direct:
            return os.pread(fd, size, offset)
        skipped = offset % BLOCK
        with platform.private_memory(max(-(-(skipped + size) // BLOCK), 1) * BLOCK) as memory:
            got = self._read_again(fd, memoryview(memory), offset - skipped)
            return memory[skipped : min(got, skipped + size)]

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if len(data) < DIRECT_WRITE_BYTES or not O_DIRECT:
            return os.pwrite(fd, data, offset)
        if offset % BLOCK:  # a short write, up to where the next can be direct
            return os.pwrite(fd, data[: -offset % BLOCK], offset)
        try:
            return self._write_directly(fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._give_up_writer(fd)  # some file systems take O_DIRECT at open, and refuse to write
            return os.pwrite(fd, data, offset)

    def _write_directly(self, fd: int, data: memoryview, offset: int) -> int:
        """Write past the page cache: that takes a tenth of the CPU time, and leaves no pages to be written back."""
        if fd not in self._writers:
            self._writers[fd] = self._open_writer(fd)
        writer = self._writers[fd]
        if writer < 0:
            return os.pwrite(fd, data, offset)
        size = len(data) // BLOCK * BLOCK
        if np.frombuffer(data, np.uint8).ctypes.data % BLOCK == 0:
            return os.pwrite(writer, data[:size], offset)
        memory = self._bounce.memory[: min(size, BOUNCE_BYTES)]
        memory[:] = data[: len(memory)]
        return os.pwrite(writer, memory, offset)

    def _open_writer(self, fd: int) -> int:
        """Return another descriptor of the same file, which writes directly, or -1."""
        with contextlib.suppress(OSError, KeyError):
            writer = os.open(self._paths[fd], os.O_WRONLY | O_DIRECT | O_NONBLOCK)
            platform.allow_more_files_than(writer)
            if os.path.samestat(os.fstat(fd), os.fstat(writer)):
                return writer
            os.close(writer)  # the file was moved, and another is in its place
        return -1

    def _give_up_writer(self, fd: int) -> None:
        writer = self._writers.get(fd, -1)
        if writer >= 0:
            self._writers[fd] = -1
            with contextlib.suppress(OSError):  # it says nothing that a sync does not
                os.close(writer)

    def fdatasync(self, fd: int) -> None:
        tail = self._tails.pop(fd, None)
        if tail is not None and tail.failure is not None:
            self._tails[fd] = tail
            raise tail.failure
        platform.sync(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def fsync_folder(self, path: str) -> None:
        opened(platform.sync_folder, path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def listdir(self, path: str) -> list[str]:
        return opened(os.listdir, path)

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):  # and nothing else: no permission is no answer
            return False
        return True

    def free_bytes(self, path: str) -> int:
        return platform.free_bytes(path)

    def lock(self, path: str, text: str) -> int:
        if os.path.islink(path) or os.path.isdir(path):
            raise no_lock_file(path)
        fd = opened(os.open, path, os.O_RDWR | os.O_CREAT | O_NONBLOCK | O_NOFOLLOW, 0o666)
        try:
            found = os.fstat(fd)
            is_ours = stat.S_ISREG(found.st_mode) and os.pread(fd, LOCK_HEAD, 0) == text.encode()[:LOCK_HEAD]
            if not stat.S_ISREG(found.st_mode) or (found.st_nlink > 1 and not is_ours):
                raise no_lock_file(path)
            platform.lock(fd, wait=False)
            if found.st_nlink > 1:  # a copy was made by hard links (cp -al): each gets a lock of its own
                os.unlink(path)
            # In this order it needs no space where an older lock left as much: a table on a full disk can be opened.
            if is_there := self.is_at(fd, path):
                os.ftruncate(fd, os.pwrite(fd, text.encode(), 0))
        except BaseException:
            os.close(fd)
            raise
        if not is_there:  # this writer, or another one, took the name away
            os.close(fd)
            return self.lock(path, text)
        _locks.add(fd)
        return fd

    def is_at(self, fd: int, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            return False

    def read_many(self, fds: Int64, offsets: Int64, sizes: Int64, out: npt.NDArray[np.uint8], starts: Int64) -> None:
        got = np.empty(len(fds), np.int64)
        readers.read((fds, offsets, sizes, out, starts, got), self._direct)
        for i in np.flatnonzero(got != sizes).tolist():
            start, end = int(starts[i]), int(starts[i] + sizes[i])
            found = self._read_again(int(fds[i]), out.data[start:end], int(offsets[i]))
            out[start + found : end] = 0

    def is_direct(self, fd: int) -> bool:
        return fd in self._direct

    def _read_again(self, fd: int, memory: memoryview, offset: int) -> int:
        """Fill `memory` from a file up to its end, and return how far; errors carry their number and the path."""
        done, is_refused = 0, False
        while done < len(memory):
            try:
                found = done + platform.read_into(fd, memory[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and not is_refused:
                    is_refused = True
                    self._give_up_direct(fd)
                    continue
                raise OSError(error.errno, os.strerror(error.errno or 0), self._paths.get(fd)) from error
            if found == done or offset + found >= os.fstat(fd).st_size:
                return found
            # A file that has grown since: direct reads go on from a whole block.
            done = found // BLOCK * BLOCK if fd in self._direct else found
        return done

    def _give_up_direct(self, fd: int) -> None:
        """Go on through the page cache: some file systems take O_DIRECT at open, and refuse to read."""
        platform.give_up_direct(fd)
        self._direct.discard(fd)

    def behind(self, fd: int, start: int, end: int) -> None:
        tail = self._tails.setdefault(fd, _UnsyncedTail(start))
        try:
            if end - tail.started >= WRITE_BEHIND_BYTES:
                self._start_writing(fd, tail, end)
            if end - tail.done >= DIRTY_BYTES:
                self._finish_writing(fd, tail, end - DIRTY_BYTES // 2)
        except OSError as error:
            tail.failure = error
            raise

    def _start_writing(self, fd: int, tail: _UnsyncedTail, end: int) -> None:
        if self._sync_file_range is not None:
            self._sync_file_range(fd, tail.started, end, _WRITE)
        tail.started = end

    def _finish_writing(self, fd: int, tail: _UnsyncedTail, end: int) -> None:
        if self._sync_file_range is not None:
            self._sync_file_range(fd, tail.done, end, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
        else:
            platform.sync(fd)
        platform.forget_pages(fd, tail.done, end)
        tail.done = end

    def drop(self, fd: int) -> None:
        self._give_up_writer(fd)
        platform.forget_pages(fd, 0, 0)


_locks: set[int] = set()


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    """Let the parent's locks go, which could otherwise not open the table again after a crash.

    The descriptors stay valid, as somebody in the child may close them.
    """
    for fd in _locks:
        os.close(fd)  # first, or there might be no descriptor left
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != fd:
                os.dup2(nothing, fd, inheritable=False)
                os.close(nothing)
    _locks.clear()


OS_SYSTEM = OSSystem()
