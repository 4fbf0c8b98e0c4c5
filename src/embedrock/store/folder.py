"""Folders of tables, groups and vocabularies: their files, the writer's lock, and orphans."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, Self

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
from embedrock.store.manifest import TABLE, Manifest
from embedrock.store.publishing import AManifest, FolderKind
from embedrock.store.reading import check_table, table_around, what_is_at
from embedrock.store.segments import HEADER_BYTES, owner_of, read_start
from embedrock.system import forks
from embedrock.system.scopes import on_failure

LOCK = "LOCK"
LOCK_BYTES = 4096
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def join(folder: str, name: str) -> str:
    """Return the path of a file in a folder. Names have forward slashes."""
    return f"{folder}/{name}"


def make(system: System, folder: str, kind: FolderKind[Any] = TABLE) -> None:
    """Create the folder of a new table, group or vocabulary. Remains of an earlier attempt are reused.

    Raises:
        TableFileError: the path has other content.
    """
    parent = os.path.dirname(folder) or "."
    if not system.exists(parent):
        raise TableFileError(errno.ENOENT, f"a {kind.noun} needs a folder to lie in. Make this one first", parent)
    if (outer := table_around(system, folder)) is not None:
        raise TableFileError(errno.EEXIST, f"this is inside of the table at {outer!r}. Choose another path", folder)
    with _refused(f"a {kind.noun} cannot be made where this process may not write. Choose another path", folder):
        if not system.exists(folder):
            retried(system.mkdir, folder)
    retried(system.fsync_folder, parent)  # also if an earlier attempt failed between the two calls
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
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_ALLOWED:
            raise
        raise ReadOnlyTableError(error.errno, f"{error.strerror}: {text}", folder) from error


def make_folders(system: System, folder: str, kind: FolderKind[Any] = TABLE) -> None:
    """Create missing folders inside. Many tools that copy tables drop empty folders."""
    for name in kind.folders:
        _check_own(system, folder, name, kind)
        if not system.exists(join(folder, name)):
            retried(system.mkdir, join(folder, name))
    retried(system.fsync_folder, folder)
    # The last writer may have ended before its last commit was known to be durable. From here on it is.
    retried(system.fsync_folder, join(folder, kind.inside))


def _check_own(system: System, folder: str, name: str, kind: FolderKind[Any]) -> None:
    """Raise `TableFileError` if a folder inside is no folder, or leads into another table."""
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


def lock(system: System, folder: str, locked: bool, kind: FolderKind[Any] = TABLE) -> int:
    """Lock a folder as its only writer, and return the lock's descriptor.

    Args:
        locked: raise an error if the file system has no locks.
        kind: the kind of folder.

    Raises:
        TableLockedError: another writer holds the lock, or the file system has none.
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
def locked_by(system: System, folder: str, locked: bool, kind: FolderKind[Any] = TABLE) -> Iterator[int]:
    """Context manager that locks a folder as `lock` does. An error in its body releases the lock."""
    held = lock(system, folder, locked, kind)
    with on_failure(lambda: unlock(system, held)):
        yield held


UNLOCKED = -1  # stands for a descriptor if the user waives the lock


def unlock(system: System, fd: int) -> None:
    """Release a lock."""
    if fd != UNLOCKED:
        with contextlib.suppress(OSError):  # the lock is released all the same
            system.close(fd)


def _holder(path: str) -> str:
    try:
        with open(path) as file:
            holder = json.loads(file.read(LOCK_BYTES))
        if (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname()):
            return "this process, which has not closed it yet"
        return f"process {int(holder['pid'])} on host {str(holder['host'])[:80]}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "an unknown process"


# ---------------------------------------------------------------- commits


def newest(system: System, folder: str) -> Manifest:
    """Return the manifest of the last commit.

    Raises:
        CorruptTableError: the manifest is damaged. The error names the newest good commit, which is never used
            silently.
    """
    numbers = manifests.numbers(system, folder)
    if not numbers:
        check_table(system, folder)
    return manifest_at(system, folder, numbers[-1])


def manifest_at(system: System, folder: str, commit: int) -> Manifest:
    """Return the manifest of a commit."""
    numbers = manifests.numbers(system, folder)
    if commit not in numbers:
        raise ArgumentError(
            f"{folder} has no commit {commit}: it has {', '.join(map(str, numbers)) or 'none'}. Older ones are dropped "
            "unless keep= retains them or they have a name."
        )
    try:
        return manifests.read(system, folder, commit)
    except MissingFileError:
        raise  # the writer removed it meanwhile; readers try again
    except CorruptTableError as error:
        good = next((n for n in reversed(numbers) if n != commit and readable(system, folder, n) is not None), None)
        hint = (
            "no other commit is whole"
            if good is None
            else f'the newest whole commit is {good}. To read it: er.open({folder!r}, mode="r", at={good}). To go on '
            f"from it: `embedrock rollback {shlex.quote(folder)} {good}`"
        )
        raise CorruptTableError(f"{error} ({hint}.)") from error


def manifests_of(system: System, folder: str, kind: FolderKind[Any] = TABLE) -> list[Any]:
    """Return the manifests of all readable commits, the oldest first."""
    found = (readable(system, folder, number, kind) for number in kind.numbers(system, folder))
    return [each for each in found if each is not None]


def newest_readable(system: System, folder: str) -> Manifest:
    """Return the manifest of the newest readable commit."""
    found = (readable(system, folder, number) for number in reversed(manifests.numbers(system, folder)))
    return next((one for one in found if one is not None), None) or newest(system, folder)


def readable(system: System, folder: str, commit: int, kind: FolderKind[Any] = TABLE) -> Any:
    """Return the manifest of a commit. Return None if it is damaged, or was dropped meanwhile."""
    try:
        return kind.read(system, folder, commit)
    except (EmbedrockError, OSError):
        return None


# ---------------------------------------------------------------- retention


def named_files(system: System, folder: str, kind: FolderKind[Any] = TABLE) -> set[str]:
    """Return the names of the files that commits need.

    Raises:
        EmbedrockError, OSError: a commit is not readable, so its files are unknown.
    """
    numbers = kind.numbers(system, folder)
    return {name for number in numbers for name in kind.read(system, folder, number).files}


def remove(system: System, folder: str, name: str) -> None:
    """Remove a file. After the last file of a compaction, remove its folder too."""
    system.unlink(join(folder, name))
    parent = os.path.dirname(join(folder, name))
    if name.startswith("base/") and not system.listdir(parent):
        system.rmdir(parent)


def release(system: System, folder: str, name: str) -> None:
    """Release a tag, so that retention may drop its commits.

    An empty file beside the immutable manifest marks the release.
    """
    for manifest in manifests_of(system, folder):
        if name_of(system, folder, manifest) == name:
            write_whole(system, _released(folder, manifest.commit), [])


def name_of(system: System, folder: str, manifest: Manifest) -> str | None:
    """Return the tag of a commit. None: no tag, or it was released."""
    return None if manifest.name is None or system.exists(_released(folder, manifest.commit)) else manifest.name


def _released(folder: str, number: int) -> str:
    return manifests.path_of(folder, number).removesuffix(".json") + ".released"


def copied(folder: str, number: int) -> str:
    """Return the path of the empty file that marks a commit as a copy from another folder."""
    return manifests.path_of(folder, number).removesuffix(".json") + ".copied"


# ---------------------------------------------------------------- orphans

# All names that writers create, and no others. Release 0.1 has no digits of the uuid.
_FILES = re.compile(
    r"(?:delta|history|base|runs|dense)/\d{10}-(?:([0-9a-f]{8})-)?\d+"
    r"(?:\.dlt|\.his|\.voc|\.safetensors|/c[0-9a-f]{1,16}\.rows)",
    re.ASCII,
)
_COMPACTION = re.compile(r"base/\d{10}-(?:[0-9a-f]{8}-)?\d+", re.ASCII)
_MARK = re.compile(r"(\d{10})\.(?:released|copied)", re.ASCII)


def remove_orphans(system: System, folder: str, uuid: str, kind: FolderKind[Any]) -> None:
    """Remove orphans of earlier writers. Callers hold the writer's lock.

    Orphans are files that no commit names, and that were provably created for this folder. A failure costs only disk
    space.
    """
    for name in _unnamed(system, folder, kind):
        if _is_own(system, folder, name, uuid):
            with contextlib.suppress(OSError):
                remove(system, folder, name)
    with contextlib.suppress(OSError):
        for path in filter(_COMPACTION.fullmatch, names_in(system, folder, kind)):
            if not _listed(system, join(folder, path)):
                with contextlib.suppress(OSError):
                    system.rmdir(join(folder, path))
        there, inside = set(kind.numbers(system, folder)), join(folder, kind.inside)
        for name in _listed(system, inside):
            found = _MARK.fullmatch(name)
            if (found and int(found[1]) not in there) or publishing.UNPUBLISHED.fullmatch(name):
                system.unlink(join(inside, name))


def strange_files(system: System, folder: str) -> list[str]:
    """Return the names of unknown files. No commit names them, and no writer removes them: users may own them."""
    try:
        uuid = newest(system, folder).uuid
    except (EmbedrockError, OSError):
        return []
    found = [name for name in _unnamed(system, folder) if not _is_own(system, folder, name, uuid)]
    return [name for name in found if system.exists(join(folder, name))]  # a writer may be active


def _is_own(system: System, folder: str, name: str, uuid: str) -> bool:
    """Return whether a file was created for this table under this name. Without a commit, it has no use.

    The first page has the table's uuid and the name. After a crash that tore the page, the digits of the uuid in its
    name count. An empty file counts too.
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


def _unnamed(system: System, folder: str, kind: FolderKind[Any] = TABLE) -> list[str]:
    try:
        named = named_files(system, folder, kind)
        return [name for name in _names(system, folder, kind) if name not in named]
    except (EmbedrockError, OSError):
        return []  # the files of a damaged commit are unknown


def _names(system: System, folder: str, kind: FolderKind[Any]) -> Iterator[str]:
    for path in names_in(system, folder, kind):
        inside = _listed(system, join(folder, path)) if _COMPACTION.fullmatch(path) else None
        yield from (path,) if inside is None else (f"{path}/{chunk}" for chunk in inside)


def names_in(system: System, folder: str, kind: FolderKind[Any]) -> list[str]:
    """Return the names of files and folders of data."""
    return [f"{part}/{name}" for part in kind.data for name in _listed(system, join(folder, part))]


def _listed(system: System, folder: str) -> list[str]:
    try:
        return sorted(system.listdir(folder))
    except NotADirectoryError:  # a file of a user
        return []


# ---------------------------------------------------------------- open folders


class Folder(Generic[AManifest]):
    """Folder that this process has open. Any thread may call it.

    Args:
        held: descriptor of the held lock. None for a reader.

    Attributes:
        folder_kind: the kind of folder.
        lock: lock of all attributes, also of the folder's stores.
        manifest: the last commit.
        collections_failed: number of failed removals of unneeded files.
    """

    folder_kind: ClassVar[FolderKind[Any]] = TABLE

    def __init__(self, system: System, folder: str, manifest: AManifest, held: int | None) -> None:
        self.system, self.folder, self.manifest, self._held = system, folder, manifest, held
        self.lock = forks.lock(forks.LockRank.SECTION)
        self.collections_failed = self._serial = 0

    @classmethod
    def create(cls, system: System, folder: str, manifest: Any, locked: bool) -> Self:
        """Create an empty folder, and publish its manifest as commit 0. `locked`: see `lock`.

        Raises:
            FileExistsError: another process was faster.
        """
        make(system, folder, cls.folder_kind)
        with locked_by(system, folder, locked, cls.folder_kind) as held:
            cls.folder_kind.publish(system, folder, manifest)
            return cls(system, folder, manifest, held)

    @classmethod
    def open_to_write(cls, system: System, folder: str, locked: bool) -> Self:
        """Open the last commit as the only writer. `locked`: see `lock`."""
        with locked_by(system, folder, locked, cls.folder_kind) as held:
            opened = cls(system, folder, cls.newest_of(system, folder), held)
            opened.prepare_to_write()
            return opened

    @classmethod
    def newest_of(cls, system: System, folder: str) -> Any:
        return cls.folder_kind.read(system, folder, cls.folder_kind.numbers(system, folder)[-1])

    def prepare_to_write(self) -> None:
        """Create missing folders, and remove orphans of earlier writers."""
        make_folders(self.system, self.folder, self.folder_kind)
        self.tidy()

    def tidy(self) -> None:
        """Remove orphans of earlier writers."""
        remove_orphans(self.system, self.folder, self.manifest.uuid, self.folder_kind)

    def needed(self) -> set[str]:
        """Return the names of the files that this process reads or writes."""
        raise NotImplementedError

    def check_commits(self) -> None:
        """Raise `CommitError` if commits are refused, or would go to another folder."""
        raise NotImplementedError

    @property
    def is_moved(self) -> bool:
        """Return whether the writer's lock no longer belongs to the folder's path."""
        held = UNLOCKED if self._held is None else self._held
        return held != UNLOCKED and not self.system.is_at(held, join(self.folder, LOCK))

    def is_published(self, number: int) -> bool:
        return number in self.folder_kind.numbers(self.system, self.folder)

    def free_name(self, stem: str, suffix: str = "") -> str:
        """Return an unused file name. No other call returns the same name."""
        while True:
            with self.lock:
                self._serial += 1
                serial = self._serial
            # Digits of the uuid identify the folder of a file after a crash has torn its first page.
            name = f"{stem}-{self.manifest.uuid[:8]}-{serial}{suffix}"
            if not self.system.exists(join(self.folder, name)):
                return name

    def unlink(self, paths: Iterable[str], may_be_named: Callable[[], bool] = lambda: True) -> None:
        """Remove the files that no commit names. A failure costs only disk space.

        Args:
            paths: paths relative to the folder.
            may_be_named: returns whether a commit may name one of the files.
        """
        paths = list(paths)
        try:
            named = named_files(self.system, self.folder, self.folder_kind) if paths and may_be_named() else set()
        except (EmbedrockError, OSError):  # the files of a damaged commit are unknown, so nothing is removed
            self._count_failure()
            return
        for path in paths:
            if path in named:
                continue
            try:
                self.system.unlink(join(self.folder, path))
            except OSError:
                self._count_failure()

    def collect(self, keep: float) -> None:
        """Drop all commits except the newest `keep` and tags, and the files that only they need.

        A failure costs only disk space, which the next writer frees.
        """
        try:
            self._collect(keep)
        except OSError:
            self._count_failure()

    def divided(self, keep: Any) -> tuple[dict[int, Any], list[Any]]:
        """Return the manifests to drop by number, and those whose files stay. None: it is not readable."""
        system, folder, kind = self.system, self.folder, self.folder_kind
        numbers = kind.numbers(system, folder)
        found = {manifest.commit: manifest for manifest in manifests_of(system, folder, kind)}
        if len(found) < len(numbers):
            return {}, []  # the files of a damaged commit are unknown, so nothing is removed
        retained = {n for n in numbers if name_of(system, folder, found[n]) is not None} | set(numbers[-keep:])
        return {n: found[n] for n in numbers if n not in retained}, [found[n] for n in retained]

    def _collect(self, keep: float) -> None:
        system, folder, kind = self.system, self.folder, self.folder_kind
        dropped, retained = self.divided(keep)
        if not dropped:
            return
        for number in dropped:
            system.unlink(kind.path_of(folder, number))
            if system.exists(_released(folder, number)):
                system.unlink(_released(folder, number))
        # A crash could otherwise leave commits without their files.
        retried(system.fsync_folder, join(folder, kind.inside))
        kept = self.needed().union(*(one.files for one in retained if one is not None))
        for name in sorted({name for one in dropped.values() if one is not None for name in one.files} - kept):
            remove(system, folder, name)

    def _count_failure(self) -> None:
        with self.lock:
            self.collections_failed += 1

    def unlock(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            unlock(self.system, held)
