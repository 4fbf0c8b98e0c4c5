"""`FaultFS`: a file system in memory that fails and loses power on demand, and remembers what was synced.

What survives a crash is decided as pessimistically as POSIX allows. Bytes survive once `fdatasync` of their file
has succeeded, names once `fsync_folder` of their folder has; of everything else any part may be there. A failed
`fdatasync` loses what it should have written for good, although it can still be read: a later one that succeeds does
not bring it back (as Linux does, which marks the pages clean).
"""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from embedrock.io.vfs import System, read_fully

SECTOR, PAGE = 512, 4096
SHORT = "short"  # a fault: the call does a part of what it should, and says so
CHANGES = frozenset({"create", "pwrite", "fdatasync", "fsync_folder", "mkdir", "rmdir", "link", "unlink", "lock"})
NEED_SPACE = frozenset({"create", "pwrite", "fdatasync", "fsync_folder", "mkdir", "link", "lock"})
INTERRUPTIBLE = frozenset({"open", "create", "pread", "pwrite", "fdatasync", "fsync_folder", "lock"})

Fault = int | str


class _Node:
    """A file: what is read from it now, what a crash leaves of it, and the writes between the two."""

    def __init__(self, data: bytes = b"") -> None:
        self.data, self.durable = bytearray(data), bytearray(data)
        self.pending: list[tuple[int, bytes]] = []
        self.lost: list[tuple[int, bytes]] = []  # a sync of them failed

    def write(self, offset: int, data: bytes) -> None:
        _put(self.data, offset, data)
        self.pending.append((offset, data))

    def sync(self) -> None:
        for offset, data in self.pending:
            _put(self.durable, offset, data)
        self.pending.clear()

    def fail_sync(self) -> None:
        self.lost += self.pending
        self.pending.clear()

    @property
    def unsynced(self) -> list[tuple[int, bytes]]:
        return self.lost + self.pending


class _Folder:
    """Names: those that are found now, those that a crash leaves, and the changes between the two."""

    def __init__(self, entries: dict[str, _Node | _Folder] | None = None) -> None:
        self.entries, self.durable = dict(entries or {}), dict(entries or {})
        self.pending: list[Change] = []

    def put(self, name: str, what: _Node | _Folder | None) -> None:
        _enter(self.entries, name, what)
        self.pending.append((name, what))

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()


# A name of a folder, and what it stands for now; None: it is gone.
Change = tuple[str, _Node | _Folder | None]


def _put(target: bytearray, offset: int, data: bytes) -> None:
    target.extend(bytes(max(0, offset + len(data) - len(target))))
    target[offset : offset + len(data)] = data


def _enter(entries: dict[str, _Node | _Folder], name: str, what: _Node | _Folder | None) -> None:
    if what is None:
        entries.pop(name, None)
    else:
        entries[name] = what


class FaultFS(System):
    """A file system in memory. Threads may share it; one call is made at a time.

    Attributes:
        ops: calls made so far; the next one is number `ops`.
        journal: what each was, such as ``"pwrite /t/delta/1.dlt"``.
        capacity: bytes that fit; a write beyond raises ENOSPC. None for no limit.
        before: called with the name and path of each call before it is made, by the thread that makes it; it may
            sleep, or raise in place of the call.
        after: called likewise after each call that changed something, with all other threads stopped.
        kind: of a crash clone, for messages.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.ops = 0
        self.journal: list[str] = []
        self.capacity = capacity
        self.before: Callable[[str, str], None] | None = None
        self.after: Callable[[str, str], None] | None = None
        self.kind = ""
        self._root = _Folder()
        self._faults: dict[int, tuple[Fault, bool]] = {}
        self._files: dict[int, tuple[str, _Node]] = {}
        self._locked: dict[int, _Node] = {}
        self._next_fd = 1000
        self._lock = threading.RLock()

    # ---------------------------------------------------------------- what tests do

    def fail(self, op: int, fault: Fault, late: bool = False) -> None:
        """Make call number `op` fail.

        Args:
            op: counted from the first call, 0.
            fault: a number of `errno`, or "short": reads and writes do a half of what they should.
            late: do what the call should do, and fail only then (as when a reply of a file server is lost).
        """
        self._faults[op] = fault, late

    def mend(self) -> None:
        """Fail no more, and have space for everything."""
        self._faults.clear()
        self.capacity = None

    def files(self) -> dict[str, bytes]:
        """Return all files, by path."""
        return {path: bytes(node.data) for path, node in self._walk(self._root, "") if isinstance(node, _Node)}

    def open_files(self) -> list[str]:
        """Return the paths of the descriptors that are open."""
        return [path for path, _ in self._files.values()]

    def write_file(self, path: str, data: bytes | None) -> None:
        """Replace what a file holds, durably and uncounted, as damage from outside would; None removes it."""
        folder, name = self._parent(path)
        for entries in (folder.entries, folder.durable):
            _enter(entries, name, None if data is None else _Node(data))

    def crash_clones(self, rng: np.random.Generator) -> Iterator[FaultFS]:
        """Yield what may be found after a loss of power now, in every way, each a file system of its own."""
        every, none = _All(), _None()
        yield self.crashed("everything kept", every, every)
        yield self.crashed("unsynced data and names lost", none, none)
        yield self.crashed("unsynced data lost, names kept", none, every)
        yield self.crashed("unsynced names lost, data kept", every, none)
        yield self.crashed("sectors torn", _Torn(rng, SECTOR), _Some(rng))
        yield self.crashed("pages torn", _Torn(rng, PAGE), _Some(rng))
        yield self.crashed("pages torn, names kept", _Torn(rng, PAGE), every)
        yield self.crashed("files reordered", _Some(rng), _Some(rng))
        yield self.crashed("prefixes kept", _Prefixes(rng), _Some(rng))

    def crashed(self, kind: str, data: _Survival, names: _Survival) -> FaultFS:
        """Return one way to lose power: `data` and `names` choose what survives of what was not synced."""
        with self._lock:
            clone = FaultFS()
            clone.kind = kind
            clone._root = self._survivor(self._root, data, names, {})
            return clone

    def _survivor(self, folder: _Folder, data: _Survival, names: _Survival, made: dict[_Node, _Node]) -> _Folder:
        entries = dict(folder.durable)
        for name, what in names.entries(folder.pending):
            _enter(entries, name, what)
        for name, what in entries.items():
            if isinstance(what, _Folder):
                entries[name] = self._survivor(what, data, names, made)
            else:
                if what not in made:  # a file of two names stays one
                    made[what] = _Node(data.content(what))
                entries[name] = made[what]
        return _Folder(entries)

    # ---------------------------------------------------------------- calls

    def check_usable(self, subject: str) -> None:
        pass

    def open(self, path: str, flags: int) -> int:
        creates = bool(flags & os.O_CREAT)
        with self._call("create" if creates else "open", path):
            folder, name = self._parent(path)
            node = folder.entries.get(name)
            if isinstance(node, _Folder):
                raise _error(errno.EISDIR, path)
            if node is None:
                if not creates:
                    raise _error(errno.ENOENT, path)
                node = _Node()
                folder.put(name, node)
            elif creates and flags & os.O_EXCL:
                raise _error(errno.EEXIST, path)
        return self._descriptor(path, node)

    def close(self, fd: int) -> None:
        path, _ = self._file(fd)
        try:
            with self._call("close", path):
                pass
        finally:  # the descriptor is gone, even after an error
            self._files.pop(fd, None)
            self._locked.pop(fd, None)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        path, node = self._file(fd)
        with self._call("pread", path) as short:
            return bytes(node.data[offset : offset + (-(-size // 2) if short else size)])

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        path, node = self._file(fd)
        with self._call("pwrite", path) as short:
            count = -(-len(data) // 2) if short else len(data)
            count = min(count, self._room(node, offset))
            if len(data) and not count:
                raise _error(errno.ENOSPC, path)
            node.write(offset, bytes(data[:count]))
            return count

    def fdatasync(self, fd: int) -> None:
        path, node = self._file(fd)
        try:
            with self._call("fdatasync", path):
                node.sync()
        except InterruptedError:
            raise
        except OSError:
            node.fail_sync()
            raise

    def map(self, fd: int) -> np.ndarray:
        path, node = self._file(fd)
        with self._call("map", path):
            return np.frombuffer(bytes(node.data), np.uint8)

    def size(self, fd: int) -> int:
        path, node = self._file(fd)
        with self._call("size", path):
            return len(node.data)

    def fsync_folder(self, path: str) -> None:
        with self._call("fsync_folder", path):
            self._folder(path).sync()

    def mkdir(self, path: str) -> None:
        with self._call("mkdir", path):
            self._take_name(path, _Folder())

    def rmdir(self, path: str) -> None:
        with self._call("rmdir", path):
            folder, name = self._parent(path)
            if self._folder(path).entries:
                raise _error(errno.ENOTEMPTY, path)
            folder.put(name, None)

    def link(self, source: str, target: str) -> None:
        with self._call("link", target):
            self._take_name(target, self._node(source))

    def unlink(self, path: str) -> None:
        with self._call("unlink", path):
            folder, name = self._parent(path)
            self._node(path)
            folder.put(name, None)

    def listdir(self, path: str) -> list[str]:
        with self._call("listdir", path):
            return sorted(self._folder(path).entries)

    def exists(self, path: str) -> bool:
        with self._call("exists", path):
            try:
                folder, name = self._parent(path)
            except OSError:
                return False
            return name == "" or name in folder.entries

    def free_bytes(self, path: str) -> int:
        with self._call("free_bytes", path):
            return 1 << 40 if self.capacity is None else max(0, self.capacity - self._used())

    def is_at(self, fd: int, path: str) -> bool:
        return True

    def read_many(
        self, fds: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, out: np.ndarray, starts: np.ndarray
    ) -> None:
        for fd, offset, size, start in zip(*(each.tolist() for each in (fds, offsets, sizes, starts)), strict=True):
            data = read_fully(self, fd, size, offset)
            out.data[start : start + len(data)] = data
            out[start + len(data) : start + size] = 0

    def is_direct(self, fd: int) -> bool:
        return False

    def behind(self, fd: int, start: int, end: int) -> None:
        pass

    def drop(self, fd: int) -> None:
        pass

    def lock(self, path: str, text: str) -> int:
        with self._call("lock", path):
            folder, name = self._parent(path)
            node = folder.entries.get(name)
            if isinstance(node, _Folder):
                raise _error(errno.EISDIR, path)
            if any(node is held for held in self._locked.values()):
                raise _error(errno.EWOULDBLOCK, path)
            if node is None:
                node = _Node()
                folder.put(name, node)
            node.write(0, text.encode())
        fd = self._descriptor(path, node)  # not where it failed late: nobody could close it
        self._locked[fd] = node
        return fd

    # ---------------------------------------------------------------- inside

    @contextmanager
    def _call(self, name: str, path: str) -> Iterator[bool]:
        """Count a call, and have it fail if it should. Yields whether it is to do only a half of its work."""
        if self.before is not None:
            self.before(name, path)
        with self._lock:
            fault, late = self._faults.get(self.ops, (None, False))
            self.journal.append(f"{name} {path}")
            self.ops += 1
            error = _error(fault, path) if isinstance(fault, int) and _applies(fault, name) else None
            if error is not None and not late:
                raise error
            yield fault == SHORT
            if self.after is not None and name in CHANGES:
                with _nothing_collected():
                    self.after(name, path)
            if error is not None:
                raise error

    def _descriptor(self, path: str, node: _Node) -> int:
        with self._lock:
            self._next_fd += 1  # never used again, so that a descriptor used after its end is noticed
            self._files[self._next_fd] = path, node
            return self._next_fd

    def _file(self, fd: int) -> tuple[str, _Node]:
        with self._lock:
            if fd not in self._files:
                raise _error(errno.EBADF, f"descriptor {fd}")
            return self._files[fd]

    def _parent(self, path: str) -> tuple[_Folder, str]:
        parts = [part for part in path.split("/") if part]
        return self._descend(parts[:-1], path), parts[-1] if parts else ""

    def _folder(self, path: str) -> _Folder:
        return self._descend([part for part in path.split("/") if part], path)

    def _descend(self, parts: Iterable[str], path: str) -> _Folder:
        at: _Node | _Folder | None = self._root
        for part in parts:
            at = at.entries.get(part) if isinstance(at, _Folder) else at
            if not isinstance(at, _Folder):
                raise _error(errno.ENOENT if at is None else errno.ENOTDIR, path)
        assert isinstance(at, _Folder)
        return at

    def _node(self, path: str) -> _Node:
        folder, name = self._parent(path)
        node = folder.entries.get(name)
        if not isinstance(node, _Node):
            raise _error(errno.ENOENT if node is None else errno.EISDIR, path)
        return node

    def _take_name(self, path: str, what: _Node | _Folder) -> None:
        folder, name = self._parent(path)
        if not name or name in folder.entries:
            raise _error(errno.EEXIST, path)
        folder.put(name, what)

    def _room(self, node: _Node, offset: int) -> int:
        """Return how many bytes can be written there."""
        if self.capacity is None:
            return 1 << 62
        return max(0, len(node.data) - offset) + max(0, self.capacity - self._used())

    def _used(self) -> int:
        nodes = {node for _, node in self._walk(self._root, "")}
        return sum(len(node.data) for node in nodes if isinstance(node, _Node))

    def _walk(self, folder: _Folder, path: str) -> Iterator[tuple[str, _Node | _Folder]]:
        for name, what in folder.entries.items():
            yield f"{path}/{name}", what
            if isinstance(what, _Folder):
                yield from self._walk(what, f"{path}/{name}")


def _applies(fault: Fault | None, name: str) -> bool:
    """Return whether a call can fail like that."""
    if fault == SHORT:
        return name in ("pread", "pwrite")
    if fault in (errno.ENOSPC, errno.EDQUOT):
        return name in NEED_SPACE
    if fault == errno.EINTR:
        return name in INTERRUPTIBLE
    return fault is not None


def applies(fault: Fault, journalled: str) -> bool:
    """Return whether a call of a `FaultFS.journal` can fail in that way: a full disk, say, fails no read."""
    return _applies(fault, journalled.partition(" ")[0])


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Let no thread collect a file of a system that lets nobody in.

    To close it, the thread would wait for whoever is in there, who may wait for the thread.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


class _Survival:
    """What survives of data and names that were not synced."""

    def content(self, node: _Node) -> bytes:
        """Return what a file holds after the crash."""
        raise NotImplementedError

    def entries(self, pending: list[Change]) -> Iterable[Change]:
        """Return the changes of a folder that are there after the crash."""
        raise NotImplementedError


class _All(_Survival):
    def content(self, node: _Node) -> bytes:
        return bytes(node.data)

    def entries(self, pending: list[Change]) -> Iterable[Change]:
        return pending


class _None(_Survival):
    def content(self, node: _Node) -> bytes:
        return bytes(node.durable)

    def entries(self, pending: list[Change]) -> Iterable[Change]:
        return ()


class _Some(_Survival):
    """All or nothing of a file; of the changes of each name, which keep their order, any first part."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def content(self, node: _Node) -> bytes:
        return bytes(node.data if self._rng.random() < 0.5 else node.durable)

    def entries(self, pending: list[Change]) -> Iterable[Change]:
        ended: set[str] = set()
        for name, what in pending:
            if name not in ended and self._rng.random() < 0.5:
                yield name, what
            else:
                ended.add(name)


class _Torn(_Some):
    """Any of the blocks that were written. The others hold zeros or what lay on the disk before."""

    def __init__(self, rng: np.random.Generator, block: int) -> None:
        super().__init__(rng)
        self._block = block

    def content(self, node: _Node) -> bytes:
        if not node.unsynced:
            return bytes(node.durable)
        content, share = bytearray(node.durable), self._rng.choice([0.1, 0.5, 0.9])
        if self._rng.random() < 0.5:  # the size of the file went to the disk before its bytes
            missing = len(node.data) - len(content)
            content += bytes(missing) if self._rng.random() < 0.5 else self._rng.bytes(missing)
        for offset, data in node.unsynced:
            for lo, hi in _blocks(offset, offset + len(data), self._block):
                if self._rng.random() < share:
                    _put(content, lo, data[lo - offset : hi - offset])
        return bytes(content)


class _Prefixes(_Some):
    """Of each file, all that was written up to some byte."""

    def content(self, node: _Node) -> bytes:
        first = len(node.durable)
        return bytes(node.durable) + bytes(node.data[first : self._rng.integers(first, len(node.data) + 1)])


def _blocks(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    while start < end:
        stop = min(end, start - start % size + size)
        yield start, stop
        start = stop
