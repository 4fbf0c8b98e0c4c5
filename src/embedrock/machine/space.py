"""Full disks: what their errors say."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from embedrock.machine.sizes import format_bytes
from embedrock.process import platform

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
