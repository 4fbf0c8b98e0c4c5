"""Sizes in bytes: parsing ("512MiB") and printing."""

from __future__ import annotations

import operator
import re

from embedrock.errors import ArgumentError

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, subject: str = "memory") -> int:
    """Return a size in bytes from an int or a string such as ``"512MiB"``.

    Args:
        size: a positive number of bytes, or digits with a unit: B, KB, MB, GB, TB (powers of 1000),
            KiB, MiB, GiB, TiB (powers of 1024); upper or lower case.
        subject: name of the argument, for the error message.

    Raises:
        ArgumentError: the text is no size, or the size is not positive.

    Example:
        >>> parse_bytes("1.5KiB")
        1536
    """
    remedy = 'Pass a positive number of bytes or a string such as "512MiB" or "2GB".'
    if isinstance(size, bool) or not (isinstance(size, str) or hasattr(size, "__index__")):
        raise ArgumentError(f"`{subject}` must be an int or a str, got {type(size).__name__}. {remedy}")
    if not isinstance(size, str):
        count = operator.index(size)
    else:
        match = _SIZE.fullmatch(size)
        if match is None or match[2].upper() not in UNITS:
            raise ArgumentError(f"`{subject}` is not a size: got {size!r}. {remedy}")
        count = int(float(match[1]) * UNITS[match[2].upper()])
    if count <= 0:
        raise ArgumentError(f"`{subject}` must be positive: got {size!r}. {remedy}")
    return count


def parse_device_memory(size: int | str | None) -> int | None:
    """Return how much GPU memory a table may take: bytes, 0 for none, or None for a share of what is free.

    Raises:
        ArgumentError: it is no size.
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size == 0):
        return size
    return parse_bytes(size, "device_memory")


def format_bytes(count: float) -> str:
    """Return a size for people, in powers of 1024.

    Example:
        >>> format_bytes(1536)
        '1.5 KiB'
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
