"""Paths of files and folders on this machine, as users pass them."""

from __future__ import annotations

import os
import re
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from embedrock.errors import ArgumentError

AnyPath: TypeAlias = str | os.PathLike[str]

# At least two letters: one letter is a drive of Windows. `pathlib` replaces two slashes by one.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")
_STORES = {"s3", "s3a", "s3n", "gs", "gcs", "hdfs", "abfs", "abfss", "wasb", "wasbs", "az", "azure", "oss", "cos", "r2"}


def local_path(path: Any, what: str = "`path`", kind: str = "folder") -> str:
    """Return a path of this machine as a string.

    Args:
        path: a string, or an `os.PathLike` of one.
        what: its name in error messages.
        kind: "folder" or "file", for error messages.

    Raises:
        ArgumentError: the path is an address (``s3://...``), begins with ``~``, or is no path. Of an address, the
            system would make a folder ``s3:``.

    Example:
        >>> local_path("users.rock")
        'users.rock'
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"{what} must be the name of a {kind}: got {path!r}.")
    if text.startswith("~") and not os.path.exists(text.split("/")[0]) and os.path.expanduser(text) != text:
        raise ArgumentError(
            f"{what} must be the name of a {kind} as the system knows it: got {text!r}, whose ~ only shells replace. "
            f"Pass {os.path.expanduser(text)!r}, which os.path.expanduser makes of it."
        )
    found = _ADDRESS.match(text)
    if found and (found[2] or not os.path.exists(f"{found[1]}:")):
        raise ArgumentError(
            f"{what} must be a {kind} on a disk of this machine: got {text!r}, {_advice(found[1], text)}"
        )
    return text


def _advice(scheme: str, text: str) -> str:
    if scheme.lower() == "file" and urlsplit(text).netloc in ("", "localhost"):
        own = unquote(urlsplit(text).path)
        return f"the address of a local path. Pass the path itself: {own!r}."
    kind = "in a remote store" if scheme.lower() in _STORES else "of another machine or service"
    return f"an address {kind}. Copy it to a local disk, or mount the store ({scheme}), and pass that path."
