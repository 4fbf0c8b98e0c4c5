"""Input and output of tables on disk: system calls that tests can replace, and append-only files.

`System` has the primitive calls, one method each. `FaultFS` in ``tests/suites`` replaces them by a file system in
memory that fails and crashes on demand.

All other code uses `File`, `write_whole` and `read_whole`. These repeat short and interrupted calls, and never sync
a file again after an error. Errors name the file and the number of missing bytes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Set
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from embedrock.errors import CorruptTableError, TableFileError
from embedrock.io import readers
from embedrock.system import forks, platform
from embedrock.system.arena import ThreadMemory
from embedrock.system.platform import O_DIRECT, O_NOFOLLOW, O_NONBLOCK
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import format_bytes

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def told(needed: int, free_bytes: Callable[[str], int], path: str) -> str:
    """Return the needed and the free space, as part of a sentence.

    Args:
        needed: bytes, or 0 if unknown.
        free_bytes: returns the free bytes of a folder's file system, or raises `OSError`.
        path: path of the file that had no room.
    """
    wanted = f"{format_bytes(needed)} ({needed} bytes) more are needed" if needed else "more is needed"
    try:
        free = free_bytes(os.path.dirname(path) or ".")
    except OSError:
        return wanted
    return f"{wanted}, and {format_bytes(free)} ({free} bytes) are free"


def is_full(error: BaseException | None) -> bool:
    """Return whether an error means a full disk, or was caused by one. Some libraries only have it in the text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return True
        if any(os.strerror(code) in str(error) for code in NO_SPACE):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def explained_if_full(explain: Callable[[], OSError]) -> Iterator[None]:
    """Raise the error that `explain` returns in place of one of a full disk."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise explain() from error


def full_disk(path: str, what: str, needed: int, remedy: str) -> OSError:
    """Return the error of a full disk, with the missing space and a remedy.

    Args:
        path: path of the file that had no room.
        what: the operation that failed.
        needed: bytes that the operation needs.
        remedy: sentences about the remedy and what is left.

    Example:
        >>> print(full_disk("/dev/shm/rows.npy", "rows of table 'users' could not be exported", 1 << 40, "Free some."))
        [Errno 28] No space left on device: rows of table 'users' could not be exported: 1.0 TiB ...
    """
    missing = told(needed, platform.free_bytes, path)
    text = f"{os.strerror(errno.ENOSPC)}: {what}: {missing}. {remedy} No room was found for"  # Python appends the path
    return OSError(errno.ENOSPC, text, path)


DIRECT_BYTES = 32 << 20  # larger files are read past the page cache
BLOCK = 4096  # alignment of offsets, sizes and addresses of direct reads
DIRECT_WRITE_BYTES = 256 << 10  # bytes of a write past the page cache, at least ...
BOUNCE_BYTES = 4 << 20  # ... and at most
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)

Data = bytes | bytearray | memoryview
Int64 = npt.NDArray[np.int64]
P = ParamSpec("P")
R = TypeVar("R")


def retried(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return ``call(...)``, repeated as long as a signal interrupts it (EINTR)."""
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue


def opened(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return ``call(...)``, which opens a file. If too many are open, the error explains the remedies."""
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
    """Return whether an error means too many open files. Some libraries only have it in the text."""
    return getattr(error, "errno", None) in TOO_MANY_FILES or os.strerror(errno.EMFILE) in str(error)


def no_lock_file(path: str) -> TableFileError:
    """Return the error of a lock that is a link or no file. Writing to it would destroy its target."""
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFREG: "another name of a file"}
    kind = kinds.get(stat.S_IFMT(os.lstat(path).st_mode), "no file")
    text = f"the lock must be a file with one name: it is {kind}. If no process has this open, move it away: it is made"
    return TableFileError(errno.EINVAL, f"{text} anew", path)


def read_fully(system: System, fd: int, size: int, offset: int) -> bytes:
    """Return `size` bytes, or fewer at the end of the file."""
    pieces: list[bytes] = []
    while size > 0 and (piece := retried(system.pread, fd, size, offset)):
        pieces.append(piece)
        size -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class File:
    """Append-only file, made by `create` or `open_file`. One thread at a time may append.

    Attributes:
        fd: a descriptor for `System.read_many`.
        size: bytes in the file.
    """

    def __init__(self, system: System, path: str, fd: int, size: int) -> None:
        self.path, self.fd, self.size = path, fd, size
        self._system = system
        self._writing_fd = fd
        self._failure: OSError | None = None

    def append(self, data: Data) -> int:
        """Write `data` at the end, and return its offset. After an error, the size is unchanged."""
        start, view = self.size, memoryview(data).cast("B")
        end, at = start + len(view), start
        while at < end:
            try:
                at += retried(self._system.pwrite, self._writing_fd, view[at - start :], at)
            except OSError as error:
                raise self._named(error, end - at) from error
        self.size = end
        if end >= DIRECT_BYTES and self.fd == self._writing_fd:  # read past the page cache from now on, if possible
            with contextlib.suppress(OSError):
                self.fd = retried(self._system.open, self.path, os.O_RDONLY | O_DIRECT)
        return start

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes.

        Raises:
            CorruptTableError: the file ends before that.
        """
        try:
            data = read_fully(self._system, self.fd, size, offset)
        except OSError as error:
            raise self._named(error) from error
        if len(data) < size:
            raise CorruptTableError(
                f"{self.path} is truncated: {size} bytes were expected at {offset}, and {len(data)} are there. "
                "Restore the file, or open an older commit."
            )
        return data

    @forks.cached_property
    def mapped(self) -> npt.NDArray[np.uint8]:
        """Bytes of a file that does not grow, mapped into memory for reading: uint8 (size,)."""
        return self._system.map(self.fd)

    def sync(self) -> None:
        """Make all appended bytes durable.

        After an error, every further call raises it again. The system may have dropped bytes that it could not write,
        and would then report success.
        """
        if self._failure is not None:
            raise self._failure
        try:
            retried(self._system.fdatasync, self._writing_fd)
        except OSError as error:
            self._failure = self._named(error)
            raise self._failure from error

    def behind(self, start: int) -> None:
        """Start to write back the bytes appended from `start` on. Every later `sync` raises its error again."""
        try:
            self._system.behind(self._writing_fd, start, self.size)
        except OSError as error:
            self._failure = self._named(error)
            raise self._failure from error

    def close(self) -> None:
        """Close the file, and take it out of memory. A second call does nothing."""
        vars(self).pop("mapped", None)  # it has a descriptor of its own
        fds, self.fd, self._writing_fd = {self.fd, self._writing_fd}, -1, -1
        for fd in fds - {-1}:
            # The descriptor is gone even after an error. A sync has reported all write errors before.
            with contextlib.suppress(OSError):
                self._system.close(fd)

    def __del__(self) -> None:
        # A merged or dropped segment stays open until its last reader is done.
        self.close()

    def _named(self, error: OSError, needed: int = 0) -> OSError:
        """Return the error with the path, and with the missing space on a full disk."""
        text = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in NO_SPACE:
            text += f": {told(needed, self._system.free_bytes, self.path)}. Free some space, and do it again"
        return OSError(error.errno, text, self.path)


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."


def create(system: System, path: str) -> File:
    """Create an empty file.

    Raises:
        FileExistsError: the name is taken.
    """
    return File(system, path, retried(system.open, path, os.O_RDWR | os.O_CREAT | os.O_EXCL), 0)


def open_file(system: System, path: str, direct: bool = False) -> File:
    """Open a file for reading.

    Args:
        direct: read past the page cache where the file system can. For random reads of files larger than RAM.
    """
    fd = retried(system.open, path, os.O_RDONLY | (O_DIRECT if direct else 0))
    with on_failure(lambda: system.close(fd)):
        return File(system, path, fd, retried(system.size, fd))


def write_whole(
    system: System, path: str, parts: Iterable[Data], link_to: str | None = None, sync_name: bool = True
) -> None:
    """Write a file atomically: complete or not at all, even after a crash.

    Args:
        path: its name. With `link_to`, a temporary name in the same folder, where an older attempt may have left a
            file.
        parts: its bytes, concatenated.
        link_to: the name that it gets once its bytes are durable.
        sync_name: False where a crash may take the file away.

    Raises:
        FileExistsError: the name is taken. Nothing has changed.
        OSError: any other error. The file `link_to` may exist, complete, if only making its name durable failed.
    """
    if link_to is not None and system.exists(path):
        system.unlink(path)
    file = create(system, path)
    try:
        for data in parts:
            file.append(data)
        file.sync()
        file.close()
        if link_to is None:
            if sync_name:
                retried(system.fsync_folder, _folder_of(path))
            return
        system.link(path, link_to)
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):
            system.unlink(path)
        raise
    retried(system.fsync_folder, _folder_of(path))
    with contextlib.suppress(OSError):  # the file is durable under its name; the next attempt removes this one
        system.unlink(path)


def read_whole(system: System, path: str, limit_bytes: int) -> bytes:
    """Return all bytes of a small file.

    Raises:
        CorruptTableError: the file is larger than `limit_bytes`, and was not read.
    """
    with contextlib.closing(open_file(system, path)) as file:
        if file.size > limit_bytes:
            raise CorruptTableError(
                f"{path} is too large: at most {limit_bytes} bytes were expected, and it has {file.size}. "
                "Restore the file, or open an older commit."
            )
        return file.read(0, file.size)


LOCK_HEAD = 7  # bytes that identify our lock files
WRITE_BEHIND_BYTES = 4 << 20  # bytes appended between two starts of write-back ...
DIRTY_BYTES = 32 << 20  # ... and an append waits while more bytes have not reached the disk
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


class _UnsyncedTail:
    """State of write-back in a growing file. Bytes [done, started) are on their way, later ones are not."""

    __slots__ = ("done", "failure", "started")

    def __init__(self, start: int) -> None:
        self.done = self.started = start
        self.failure: OSError | None = None


class System:
    """System calls that tables need. Each raises `OSError` as the system does, and may be interrupted.

    Tests replace all of them.
    """

    def __init__(self) -> None:
        self._direct: set[int] = set()
        self._writers: dict[int, int] = {}  # descriptor -> second descriptor of the file, for direct writes; -1: none
        self._bounce = ThreadMemory("writing files")  # aligned for direct writes
        self._paths: dict[int, str] = {}
        self._tails: dict[int, _UnsyncedTail] = {}
        self._sync_file_range = platform.find_sync_file_range()

    def check_usable(self, subject: str) -> None:
        """Raise `UnsupportedError` if the system lacks these calls. The error says that `subject` cannot be on disk."""
        platform.check_files(subject)

    def open(self, path: str, flags: int) -> int:
        """Open a file as `os.open` does, and return its descriptor. O_DIRECT is dropped if refused."""
        flags |= O_NONBLOCK  # opening a pipe would block forever; files ignore the flag
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
        """Close a descriptor of any kind."""
        self._direct.discard(fd)
        self._give_up_writer(fd)
        self._writers.pop(fd, None)
        self._tails.pop(fd, None)
        self._paths.pop(fd, None)
        if fd in _locks:
            _locks.discard(fd)  # another file may soon get its number
            with contextlib.suppress(OSError):
                platform.unlock(fd)  # a child that was just forked may still have the descriptor
        os.close(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Return at most `size` bytes at `offset`. Fewer bytes need not mean the end of the file."""
        if fd not in self._direct:
            return os.pread(fd, size, offset)
        skipped = offset % BLOCK
        with platform.private_memory(max(-(-(skipped + size) // BLOCK), 1) * BLOCK) as memory:
            got = self._read_again(fd, memoryview(memory), offset - skipped)
            return memory[skipped : min(got, skipped + size)]

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of `data` at `offset`, and return the number of bytes written."""
        if len(data) < DIRECT_WRITE_BYTES or not O_DIRECT:
            return os.pwrite(fd, data, offset)
        if offset % BLOCK:  # a short write, up to the next offset that can be direct
            return os.pwrite(fd, data[: -offset % BLOCK], offset)
        try:
            return self._write_directly(fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._give_up_writer(fd)  # some file systems accept O_DIRECT at open, and refuse writes
            return os.pwrite(fd, data, offset)

    def _write_directly(self, fd: int, data: memoryview, offset: int) -> int:
        """Write past the page cache, in a tenth of the CPU time and without dirty pages."""
        if fd not in self._writers:
            self._writers[fd] = self._open_writer(fd)
        writer = self._writers[fd]
        if writer < 0:
            return os.pwrite(fd, data, offset)
        size = len(data) // BLOCK * BLOCK
        if np.frombuffer(data, np.uint8).ctypes.data % BLOCK == 0:
            return os.pwrite(writer, data[:size], offset)
        memory = self._bounce.take(BOUNCE_BYTES)[: min(size, BOUNCE_BYTES)]
        memory[:] = data[: len(memory)]
        return os.pwrite(writer, memory.data, offset)

    def _open_writer(self, fd: int) -> int:
        """Return a second descriptor of the file for direct writes, or -1."""
        with contextlib.suppress(OSError, KeyError):
            writer = os.open(self._paths[fd], os.O_WRONLY | O_DIRECT | O_NONBLOCK)
            platform.allow_more_files_than(writer)
            if os.path.samestat(os.fstat(fd), os.fstat(writer)):
                return writer
            os.close(writer)  # the file was moved, and another one has its name
        return -1

    def _give_up_writer(self, fd: int) -> None:
        writer = self._writers.get(fd, -1)
        if writer >= 0:
            self._writers[fd] = -1
            with contextlib.suppress(OSError):  # a sync reports all write errors
                os.close(writer)

    def fdatasync(self, fd: int) -> None:
        """Make all written bytes of a file durable. Do not call it again after an error."""
        tail = self._tails.pop(fd, None)
        if tail is not None and tail.failure is not None:
            self._tails[fd] = tail
            raise tail.failure
        platform.sync(fd)

    def map(self, fd: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a file, mapped into memory for reading, uint8 (size,)."""
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        platform.allow_more_files_than(fd)  # the memory has a descriptor of its own
        return np.frombuffer(memory, np.uint8)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def fsync_folder(self, path: str) -> None:
        opened(platform.sync_folder, path)

    def mkdir(self, path: str) -> None:
        """Create a folder in an existing one."""
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, which publishes a manifest. FileExistsError: the name is taken."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Remove one name of a file."""
        os.unlink(path)

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder, in any order."""
        return opened(os.listdir, path)

    def exists(self, path: str) -> bool:
        """Return whether a file or folder has that name."""
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):  # other errors, such as a missing permission, are raised
            return False
        return True

    def free_bytes(self, path: str) -> int:
        return platform.free_bytes(path)

    def lock(self, path: str, text: str) -> int:
        """Lock a file until the returned descriptor is closed, and write `text` to it.

        Raises:
            BlockingIOError: this process or another one holds the lock.
            OSError: ENOLCK or EOPNOTSUPP, if the file system has no locks.
        """
        if os.path.islink(path) or os.path.isdir(path):
            raise no_lock_file(path)
        fd = opened(os.open, path, os.O_RDWR | os.O_CREAT | O_NONBLOCK | O_NOFOLLOW, 0o666)
        with on_failure(lambda: os.close(fd)):
            found = os.fstat(fd)
            is_ours = stat.S_ISREG(found.st_mode) and os.pread(fd, LOCK_HEAD, 0) == text.encode()[:LOCK_HEAD]
            if not stat.S_ISREG(found.st_mode) or (found.st_nlink > 1 and not is_ours):
                raise no_lock_file(path)
            platform.lock(fd, wait=False)
            if found.st_nlink > 1:  # a copy was made by hard links (cp -al): each copy gets its own lock
                os.unlink(path)
            # Write before truncation: a table on a full disk can be opened, because the lock's old bytes are reused.
            if is_there := self.is_at(fd, path):
                os.ftruncate(fd, os.pwrite(fd, text.encode(), 0))
        if not is_there:  # this or another writer removed the name
            os.close(fd)
            return self.lock(path, text)
        _locks.add(fd)
        return fd

    def is_at(self, fd: int, path: str) -> bool:
        """Return whether `path` still names an open file."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            return False

    def read_many(self, fds: Int64, offsets: Int64, sizes: Int64, out: npt.NDArray[np.uint8], starts: Int64) -> None:
        """Read pieces of files: piece i goes to ``out[starts[i]:starts[i] + sizes[i]]``.

        Args:
            fds: descriptors of the pieces, int64 (n,), as are the next three. Descriptors may repeat.
            offsets: offset of each piece in its file, a multiple of `BLOCK` if the file `is_direct`.
            sizes: bytes of each piece, likewise.
            out: flat memory at an address that is a multiple of `BLOCK`.
            starts: position of each piece in `out`, likewise. Bytes behind the end of a file are zeroed.
        """
        got = np.empty(len(fds), np.int64)
        readers.READERS.read((fds, offsets, sizes, out, starts, got), self._direct)
        for i in np.flatnonzero(got != sizes).tolist():
            start, end = int(starts[i]), int(starts[i] + sizes[i])
            found = self._read_again(int(fds[i]), out.data[start:end], int(offsets[i]))
            out[start + found : end] = 0

    def is_direct(self, fd: int) -> bool:
        """Return whether a file is read past the page cache, in whole blocks."""
        return fd in self._direct

    def _read_again(self, fd: int, memory: memoryview, offset: int) -> int:
        """Fill `memory` from a file up to its end, and return the number of bytes. Errors name the path."""
        done, is_refused = 0, False
        while done < len(memory):
            try:
                found = done + platform.read_into(fd, memory[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and not is_refused:
                    is_refused = True  # some file systems accept O_DIRECT at open, and refuse reads
                    platform.give_up_direct(fd)
                    self._direct.discard(fd)
                    continue
                raise OSError(error.errno, os.strerror(error.errno or 0), self._paths.get(fd)) from error
            if found == done or offset + found >= os.fstat(fd).st_size:
                return found
            # The file has grown since: direct reads continue at a whole block.
            done = found // BLOCK * BLOCK if fd in self._direct else found
        return done

    def behind(self, fd: int, start: int, end: int) -> None:
        """Start to write back appended bytes, which bounds dirty memory and shortens a later sync."""
        tail = self._tails.setdefault(fd, _UnsyncedTail(start))
        try:
            if end - tail.started >= WRITE_BEHIND_BYTES:
                if self._sync_file_range is not None:
                    self._sync_file_range(fd, tail.started, end, _WRITE)
                tail.started = end
            if end - tail.done >= DIRTY_BYTES:
                self._finish_writing(fd, tail, end - DIRTY_BYTES // 2)
        except OSError as error:
            tail.failure = error
            raise

    def _finish_writing(self, fd: int, tail: _UnsyncedTail, end: int) -> None:
        if self._sync_file_range is not None:
            self._sync_file_range(fd, tail.done, end, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
        else:
            platform.sync(fd)
        platform.forget_pages(fd, tail.done, end)
        tail.done = end

    def drop(self, fd: int) -> None:
        """Advise the system to discard a file's pages from its page cache."""
        self._give_up_writer(fd)
        platform.forget_pages(fd, 0, 0)


_locks: set[int] = set()


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    """Release the parent's locks. A child that keeps them would stop the parent from opening its table after a crash.

    The descriptors stay valid, because other code in the child may close them.
    """
    for fd in _locks:
        os.close(fd)  # first, as there may be no free descriptor
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != fd:
                os.dup2(nothing, fd, inheritable=False)
                os.close(nothing)
    _locks.clear()


OS_SYSTEM = System()

# System calls of all that is opened from now on: tests replace them.
SYSTEM: ContextVar[System] = ContextVar("SYSTEM", default=OS_SYSTEM)
