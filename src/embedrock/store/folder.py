"""The folder of a table: which files lie where, who may write, what is left over."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import socket
from collections.abc import Iterator
from typing import NamedTuple

from embedrock.errors import (
    ArgumentError,
    CorruptTableError,
    EmbedrockError,
    MissingFileError,
    ReadOnlyTableError,
    TableFileError,
    TableLockedError,
)
from embedrock.machine import space
from embedrock.machine.vfs import System, retried, write_whole
from embedrock.store import manifest as manifests
from embedrock.store.manifest import AnyManifest, files_of
from embedrock.store.nearby import check_table, table_around, what_is_at


class Kind(NamedTuple):
    """What lies in a folder that has one writer.

    Attributes:
        noun: what messages call it.
        reading: how to open it for reading.
        folders: inside of it; the first one has the commits.
    """

    noun: str
    reading: str
    folders: tuple[str, ...]


TABLE = Kind("table", 'er.open(path, mode="r")', ("manifest", "base", "delta", "history"))
LOCK = "LOCK"
LOCK_BYTES = 4096
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def join(folder: str, name: str) -> str:
    """Return the path of a file of the table; names have forward slashes."""
    return f"{folder}/{name}"


def make(system: System, folder: str, kind: Kind = TABLE) -> None:
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


def make_folders(system: System, folder: str, kind: Kind = TABLE) -> None:
    """Make the folders inside that are missing: many ways of copying a table drop those that are empty."""
    for name in kind.folders:
        _check_own(system, folder, name, kind)
        if not system.exists(join(folder, name)):
            retried(system.mkdir, join(folder, name))
    retried(system.fsync_folder, folder)
    # The last writer may have ended before it knew that its last commit is durable. From here on it is taken for that.
    retried(system.fsync_folder, join(folder, kind.folders[0]))


def _check_own(system: System, folder: str, name: str, kind: Kind) -> None:
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


def lock(system: System, folder: str, locked: bool, kind: Kind = TABLE) -> int:
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
        if error.errno in space.NO_SPACE:
            missing = f"{error.strerror}: to lock it, {space.told(len(text), system.free_bytes, path)}"
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


def manifests_of(system: System, folder: str) -> list[AnyManifest]:
    """Return all commits that can be read, the oldest first."""
    return [found for n in manifests.numbers(system, folder) if (found := _readable(system, folder, n)) is not None]


def newest_readable(system: System, folder: str) -> AnyManifest:
    """Return the newest commit that can be read."""
    found = (_readable(system, folder, number) for number in reversed(manifests.numbers(system, folder)))
    return next((one for one in found if one is not None), None) or newest(system, folder)


def _readable(system: System, folder: str, commit: int) -> AnyManifest | None:
    """Return a commit; None if it is damaged, or was dropped meanwhile."""
    try:
        return manifests.read(system, folder, commit)
    except (EmbedrockError, OSError):
        return None


# ---------------------------------------------------------------- files that nothing needs


def named_files(system: System, folder: str) -> set[str]:
    """Return the names of the files that commits need.

    Raises:
        EmbedrockError, OSError: a commit cannot be read, so that what it needs is not known.
    """
    return {name for n in manifests.numbers(system, folder) for name in files_of(manifests.read(system, folder, n))}


def collect(system: System, folder: str, keep: int, needed: set[str]) -> None:
    """Drop all commits but the newest `keep` and those with a name; remove files that neither they nor anyone needs."""
    numbers = manifests.numbers(system, folder)
    found = {manifest.commit: manifest for manifest in manifests_of(system, folder)}
    if len(found) < len(numbers):
        return  # what a damaged commit needs is not known, so nothing is removed
    retained = {n for n in numbers if name_of(system, folder, found[n]) is not None} | set(numbers[-keep:])
    dropped = [n for n in numbers if n not in retained]
    if not dropped:
        return
    for number in dropped:
        system.unlink(manifests.path_of(folder, number))
        if system.exists(_released(folder, number)):
            system.unlink(_released(folder, number))
    retried(system.fsync_folder, join(folder, "manifest"))  # or a crash might leave commits without their files
    kept = needed.union(*(files_of(found[n]) for n in retained))
    for name in sorted({name for n in dropped for name in files_of(found[n])} - kept):
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
