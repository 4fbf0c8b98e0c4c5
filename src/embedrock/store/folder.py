"""Folders of tables, groups and vocabularies: which files lie where, who may write, what is left over."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, NamedTuple

from embedrock.errors import (
    ArgumentError,
    CorruptTableError,
    EmbedrockError,
    MissingFileError,
    ReadOnlyTableError,
    TableFileError,
    TableLockedError,
)
from embedrock.io import vfs
from embedrock.io.vfs import System, retried, write_whole
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from embedrock.store.manifest import TABLES, AnyManifest
from embedrock.store.publishing import AManifest, Manifests
from embedrock.store.reading import check_table, table_around, what_is_at
from embedrock.store.segments import HEADER_BYTES, owner_of, read_start
from embedrock.system import forks


class FolderKind(NamedTuple):
    """What lies in a folder that has one writer.

    Attributes:
        noun: what messages call it.
        reading: how to open it for reading.
        manifests: of its commits.
        data: folders of its other files.
    """

    noun: str
    reading: str
    manifests: Manifests[Any]
    data: tuple[str, ...]

    @property
    def folders(self) -> tuple[str, ...]:
        """Names of the folders inside of it."""
        return (self.manifests.inside, *self.data)


TABLE = FolderKind("table", 'er.open(path, mode="r")', TABLES, ("base", "delta", "history"))
LOCK = "LOCK"
LOCK_BYTES = 4096
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def join(folder: str, name: str) -> str:
    """Return the path of a file of the table; names have forward slashes."""
    return f"{folder}/{name}"


def make(system: System, folder: str, kind: FolderKind = TABLE) -> None:
    """Make the folder of a new table, or of what else. What an earlier attempt left there is taken over.

    Raises:
        TableFileError: something else is there.
    """
    parent = os.path.dirname(folder) or "."
    if not system.exists(parent):
        raise TableFileError(errno.ENOENT, f"a {kind.noun} needs a folder to lie in. Make this one first", parent)
    if (outer := table_around(system, folder)) is not None:
        raise TableFileError(errno.EEXIST, f"this is inside of the table at {outer!r}. Choose another path", folder)
    with _refused(f"a {kind.noun} cannot be made where this process may not write. Choose another path", folder):
        if not system.exists(folder):
            retried(system.mkdir, folder)
    retried(system.fsync_folder, parent)  # also where an earlier attempt failed between the two
    try:
        strange = sorted(set(system.listdir(folder)) - {*kind.folders, LOCK})
    except NotADirectoryError as error:
        raise TableFileError(
            errno.ENOTDIR, f"a {kind.noun} is a folder, and this is a file. Choose another path", folder
        ) from error
    if strange:
        held = what_is_at(system, folder)
        raise TableFileError(
            errno.EEXIST,
            f"the folder of a new {kind.noun} must be empty, and has {strange[0]!r}. "
            f"{held and f'{held}. '}For a new {kind.noun} choose another path",
            folder,
        )
    with _refused("this process may not write to the folder. Choose another path", folder):
        make_folders(system, folder, kind)


@contextlib.contextmanager
def _refused(text: str, folder: str) -> Iterator[None]:
    """Say more of an error that this process may not do something."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_ALLOWED:
            raise
        raise ReadOnlyTableError(error.errno, f"{error.strerror}: {text}", folder) from error


def make_folders(system: System, folder: str, kind: FolderKind = TABLE) -> None:
    """Make the folders inside that are missing: many ways of copying a table drop those that are empty."""
    for name in kind.folders:
        _check_own(system, folder, name, kind)
        if not system.exists(join(folder, name)):
            retried(system.mkdir, join(folder, name))
    retried(system.fsync_folder, folder)
    # The last writer may have ended before it knew that its last commit is durable. From here on it is taken for that.
    retried(system.fsync_folder, join(folder, kind.manifests.inside))


def _check_own(system: System, folder: str, name: str, kind: FolderKind) -> None:
    """Raise `TableFileError` where a writer would put files into another table, or could not put them anywhere."""
    path, real = join(folder, name), os.path.realpath(join(folder, name))
    is_moved = real != os.path.join(os.path.realpath(folder), name)
    if is_moved and (other := table_around(system, real)) is not None:
        what = f"a symbolic link into the table at {other!r}"
    elif is_moved and not system.exists(path):
        what = f"a symbolic link to {real!r}, which is not there"
    elif os.path.lexists(path) and not os.path.isdir(path):
        what = "a file"
    else:
        return
    text = f"{name!r} in the folder of a {kind.noun} must be a folder: it is {what}. Put its own back, from a copy"
    raise TableFileError(errno.EEXIST, text, folder)


def lock(system: System, folder: str, locked: bool, kind: FolderKind = TABLE) -> int:
    """Become the only writer, and return the descriptor that means it.

    Args:
        system: does the I/O.
        folder: of the table, or of what else.
        locked: raise an error where the file system has no locks.
        kind: what it is.

    Raises:
        TableLockedError: there is another writer, or no lock.
        ReadOnlyTableError: this process may not write to the folder.
    """
    path, text = join(folder, LOCK), json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"
    to_read = f"this process may not write to the folder. Open it for reading: {kind.reading}"
    try:
        with _refused(to_read, folder):
            return retried(system.lock, path, text)
    except ReadOnlyTableError:
        raise
    except BlockingIOError as error:
        raise TableLockedError(
            errno.EWOULDBLOCK,
            f"another writer has the {kind.noun} open: {_holder(path)}. Close it there, or open it for reading: "
            f"{kind.reading}",
            folder,
        ) from error
    except OSError as error:
        if error.errno in vfs.NO_SPACE:
            missing = f"{error.strerror}: to lock it, {vfs.told(len(text), system.free_bytes, path)}"
            remedy = f"Free some. A {kind.noun} that is there can still be read: {kind.reading}"
            raise OSError(error.errno, f"{missing}. {remedy}", folder) from error
        if error.errno not in NO_LOCKS:
            raise
        if locked:
            raise TableLockedError(
                error.errno,
                "the file system gives no locks (NFS?), so that a second writer would not be noticed. Pass lock=False "
                "if you are sure that there is none",
                folder,
            ) from error
        return UNLOCKED


@contextlib.contextmanager
def locked_by(system: System, folder: str, locked: bool, kind: FolderKind = TABLE) -> Iterator[int]:
    """Lock a folder for an object that is made meanwhile: see `lock`. Where making it fails, others are let in."""
    held = lock(system, folder, locked, kind)
    try:
        yield held
    except BaseException:
        unlock(system, held)
        raise


UNLOCKED = -1  # in place of a descriptor, where the user knows better


def unlock(system: System, fd: int) -> None:
    """Let other writers in."""
    if fd != UNLOCKED:
        with contextlib.suppress(OSError):  # it is unlocked all the same
            system.close(fd)


def is_held(system: System, folder: str, fd: int) -> bool:
    """Return whether a lock is that of the folder: not if somebody moved the table away, and another one is there."""
    return fd == UNLOCKED or system.is_at(fd, join(folder, LOCK))


def _holder(path: str) -> str:
    try:
        with open(path) as file:
            told = json.loads(file.read(LOCK_BYTES))
        if (told["pid"], told["host"]) == (os.getpid(), socket.gethostname()):
            return "this process, which has not closed it yet"
        return f"process {int(told['pid'])} on host {str(told['host'])[:80]}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "an unknown process"


# ---------------------------------------------------------------- commits


def newest(system: System, folder: str) -> AnyManifest:
    """Return the last commit.

    Raises:
        CorruptTableError: it is damaged; the newest good one is named, never taken silently.
    """
    numbers = manifests.numbers(system, folder)
    if not numbers:
        check_table(system, folder)
    return manifest_at(system, folder, numbers[-1])


def manifest_at(system: System, folder: str, commit: int) -> AnyManifest:
    """Return a commit by its number."""
    numbers = manifests.numbers(system, folder)
    if commit not in numbers:
        raise ArgumentError(
            f"{folder} has no commit {commit}: it has {', '.join(map(str, numbers)) or 'none'}. Older ones are dropped "
            "unless keep= retains them or they have a name."
        )
    try:
        return manifests.read(system, folder, commit)
    except MissingFileError:
        raise  # removed meanwhile by a writer, for a reader to try again
    except CorruptTableError as error:
        good = next((n for n in reversed(numbers) if n != commit and _readable(system, folder, n) is not None), None)
        hint = (
            "no other commit is whole"
            if good is None
            else f'the newest whole commit is {good}. To read it: er.open({folder!r}, mode="r", at={good}). To go on '
            f"from it: `embedrock rollback {shlex.quote(folder)} {good}`"
        )
        raise CorruptTableError(f"{error} ({hint}.)") from error


def manifests_of(system: System, folder: str, kind: FolderKind = TABLE) -> list[Any]:
    """Return all commits that can be read, the oldest first."""
    found = (_readable(system, folder, number, kind) for number in kind.manifests.numbers(system, folder))
    return [each for each in found if each is not None]


def newest_readable(system: System, folder: str) -> AnyManifest:
    """Return the newest commit that can be read."""
    found = (_readable(system, folder, number) for number in reversed(manifests.numbers(system, folder)))
    return next((one for one in found if one is not None), None) or newest(system, folder)


def _readable(system: System, folder: str, commit: int, kind: FolderKind = TABLE) -> Any:
    """Return a commit; None if it is damaged, or was dropped meanwhile."""
    try:
        return kind.manifests.read(system, folder, commit)
    except (EmbedrockError, OSError):
        return None


# ---------------------------------------------------------------- files that nothing needs


def named_files(system: System, folder: str, kind: FolderKind = TABLE) -> set[str]:
    """Return the names of the files that commits need.

    Raises:
        EmbedrockError, OSError: a commit cannot be read, so that what it needs is not known.
    """
    numbers = kind.manifests.numbers(system, folder)
    return {name for number in numbers for name in kind.manifests.read(system, folder, number).files}


def collect(system: System, folder: str, keep: int, needed: set[str], kind: FolderKind = TABLE) -> None:
    """Drop all commits but the newest `keep` and those with a name; remove files that neither they nor anyone needs."""
    numbers = kind.manifests.numbers(system, folder)
    found = {manifest.commit: manifest for manifest in manifests_of(system, folder, kind)}
    if len(found) < len(numbers):
        return  # what a damaged commit needs is not known, so nothing is removed
    retained = {n for n in numbers if name_of(system, folder, found[n]) is not None} | set(numbers[-keep:])
    dropped = [n for n in numbers if n not in retained]
    if not dropped:
        return
    for number in dropped:
        system.unlink(kind.manifests.path_of(folder, number))
        if kind is TABLE and system.exists(_released(folder, number)):
            system.unlink(_released(folder, number))
    # Or a crash might leave commits without their files.
    retried(system.fsync_folder, join(folder, kind.manifests.inside))
    kept = needed.union(*(found[n].files for n in retained))
    for name in sorted({name for n in dropped for name in found[n].files} - kept):
        remove(system, folder, name)


def remove(system: System, folder: str, name: str) -> None:
    """Remove a file, and the folder of a compaction with its last one."""
    system.unlink(join(folder, name))
    parent = os.path.dirname(join(folder, name))
    if name.startswith("base/") and not system.listdir(parent):
        system.rmdir(parent)


def release(system: System, folder: str, name: str) -> None:
    """Let retention drop the commits called `name`, by an empty file beside their manifests, which never change."""
    for manifest in manifests_of(system, folder):
        if name_of(system, folder, manifest) == name:
            write_whole(system, _released(folder, manifest.commit), b"")


def name_of(system: System, folder: str, manifest: AnyManifest) -> str | None:
    """Return the name of a commit, None where it has none or was released."""
    return None if manifest.name is None or system.exists(_released(folder, manifest.commit)) else manifest.name


def _released(folder: str, number: int) -> str:
    return manifests.path_of(folder, number).removesuffix(".json") + ".released"


# ---------------------------------------------------------------- files that no commit names

# The names that are given (by 0.1, without the uuid's first digits), and no others.
_FILES = re.compile(
    r"(?:delta|history|base|runs)/\d{10}-(?:([0-9a-f]{8})-)?\d+(?:\.dlt|\.his|\.voc|/c[0-9a-f]{1,16}\.rows)", re.ASCII
)
_COMPACTION = re.compile(r"base/\d{10}-(?:[0-9a-f]{8}-)?\d+", re.ASCII)
_RELEASED = re.compile(r"(\d{10})\.released", re.ASCII)


def remove_orphans(system: System, folder: str, uuid: str, kind: FolderKind = TABLE) -> int:
    """Remove what a writer that did not live to commit left behind; return how many files. Only a writer may.

    That are files that no commit names, and that were provably begun for this folder. A failure costs disk space only.
    """
    removed = 0
    for name in _unnamed(system, folder, kind):
        if _is_own(system, folder, name, uuid):
            with contextlib.suppress(OSError):
                remove(system, folder, name)
                removed += 1
    with contextlib.suppress(OSError):
        _remove_empty(system, folder, kind)
        _remove_remains(system, folder, kind)
    return removed


def strange_files(system: System, folder: str) -> list[str]:
    """Return the names of files that no commit names, and that no writer removes, as they may be somebody's."""
    try:
        uuid = newest(system, folder).uuid
    except (EmbedrockError, OSError):
        return []
    found = [name for name in _unnamed(system, folder) if not _is_own(system, folder, name, uuid)]
    return [name for name in found if system.exists(join(folder, name))]  # a writer may be at work


def _is_own(system: System, folder: str, name: str, uuid: str) -> bool:
    """Return whether a file was begun for this table under this name, so that without a commit it is worth nothing.

    Its first page says so. Where a crash has left that torn, its name does, which has the uuid's first digits; or it is
    empty.
    """
    found = _FILES.fullmatch(name)
    if found is None:
        return False
    try:
        page = read_start(system, join(folder, name), HEADER_BYTES)
    except OSError:
        return False
    owner = owner_of(page, name)
    return owner == uuid if owner is not None else not page or found[1] == uuid[:8]


def _unnamed(system: System, folder: str, kind: FolderKind = TABLE) -> list[str]:
    try:
        named = named_files(system, folder, kind)
        return [name for name in _names(system, folder, kind) if name not in named]
    except (EmbedrockError, OSError):
        return []  # what a damaged commit names is not known


def _names(system: System, folder: str, kind: FolderKind) -> Iterator[str]:
    for path in _names_in(system, folder, kind):
        inside = _listed(system, join(folder, path)) if _COMPACTION.fullmatch(path) else None
        yield from (path,) if inside is None else (f"{path}/{chunk}" for chunk in inside)


def _names_in(system: System, folder: str, kind: FolderKind) -> list[str]:
    return [f"{part}/{name}" for part in kind.data for name in _listed(system, join(folder, part))]


def _listed(system: System, folder: str) -> list[str]:
    try:
        return sorted(system.listdir(folder))
    except NotADirectoryError:  # somebody else's file
        return []


def _remove_empty(system: System, folder: str, kind: FolderKind) -> None:
    for path in filter(_COMPACTION.fullmatch, _names_in(system, folder, kind)):
        if not _listed(system, join(folder, path)):
            with contextlib.suppress(OSError):
                system.rmdir(join(folder, path))


def _remove_remains(system: System, folder: str, kind: FolderKind) -> None:
    there, inside = set(kind.manifests.numbers(system, folder)), join(folder, kind.manifests.inside)
    for name in _listed(system, inside):
        found = _RELEASED.fullmatch(name)
        if (found and int(found[1]) not in there) or publishing.is_unpublished(name):
            system.unlink(join(inside, name))


# ---------------------------------------------------------------- who has a folder open


class Folder(Generic[AManifest]):
    """A folder that this process has open. Any thread may call it.

    Args:
        system: does the I/O.
        folder: its path.
        manifest: the commit to start from.
        held: descriptor of the lock that is held; None for a reader.

    Attributes:
        folder_kind: what lies in it.
        lock: held wherever its attributes change, or those of its stores.
        manifest: the last commit.
        collections_failed: how often files that nothing needs could not be removed.
    """

    folder_kind: ClassVar[FolderKind] = TABLE

    def __init__(self, system: System, folder: str, manifest: AManifest, held: int | None) -> None:
        self.system, self.folder, self.manifest, self._held = system, folder, manifest, held
        self.lock = forks.lock(forks.LockRank.SECTION)
        self.collections_failed = self._serial = 0

    def needed(self) -> set[str]:
        """Return the names of the files that this process reads or writes."""
        raise NotImplementedError

    def check_commits(self) -> None:
        """Raise `CommitError` if commits are no longer taken, or would go to another folder."""
        raise NotImplementedError

    @property
    def is_moved(self) -> bool:
        """Whether a writer's lock is no longer that of the folder at its path."""
        return self._held is not None and not is_held(self.system, self.folder, self._held)

    def is_published(self, number: int) -> bool:
        """Return whether there is a commit of that number."""
        return number in self.folder_kind.manifests.numbers(self.system, self.folder)

    def free_name(self, stem: str, suffix: str = "") -> str:
        """Return the name of a file that is not there, and that no other call returns."""
        while True:
            with self.lock:
                self._serial += 1
                serial = self._serial
            # With some of the uuid, so that a file whose first page a crash has torn is known for this folder's.
            name = f"{stem}-{self.manifest.uuid[:8]}-{serial}{suffix}"
            if not self.system.exists(join(self.folder, name)):
                return name

    def unlink(self, paths: Iterable[str], may_be_named: Callable[[], bool] = lambda: True) -> None:
        """Remove those files that no commit names. A failure costs disk space only.

        Args:
            paths: of the files, relative to the folder.
            may_be_named: asked whether a commit could name one of them.
        """
        paths = list(paths)
        try:
            named = named_files(self.system, self.folder, self.folder_kind) if paths and may_be_named() else set()
        except (EmbedrockError, OSError):  # what a damaged commit needs is not known, so nothing is removed
            self._count_failure()
            return
        for path in paths:
            if path in named:
                continue
            try:
                self.system.unlink(join(self.folder, path))
            except OSError:
                self._count_failure()

    def collect(self, keep: int) -> None:
        """Drop all commits but the newest `keep` and those with a name, and the files that only they need.

        A failure costs disk space only, which the next writer gives back.
        """
        try:
            collect(self.system, self.folder, keep, self.needed(), self.folder_kind)
        except OSError:
            self._count_failure()

    def _count_failure(self) -> None:
        with self.lock:
            self.collections_failed += 1

    def unlock(self) -> None:
        """Let another writer in."""
        held, self._held = self._held, None
        if held is not None:
            unlock(self.system, held)
