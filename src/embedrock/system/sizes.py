"""Sizes in bytes: parsing ("512MiB", "25%") and printing."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from datetime import timedelta
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.system.ram import memory_limit

Size: TypeAlias = int | float | str  # size as users pass it

UNITS = {"": 1, "B": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", 1)
    for end, base in (("B", 1000), ("", 1024), ("IB", 1024))
}
AUTO = "auto"  # for tables on disk: measured while they train
MAP = "map"  # for readers: no cache of their own
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([A-Za-z]*|%)\s*")


def parse_bytes(size: Size, subject: str = "memory", whole: Callable[[], int] = memory_limit) -> int:
    """Return a size in bytes.

    Args:
        size: a positive whole number of bytes, 1e9 too, or text. Text has digits and a unit in any case. B, KB, MB,
            GB, TB are powers of 1000. K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024. ``"25%"`` is a share of the
            `whole`.
        subject: name of the argument, for the error message.
        whole: returns the bytes of 100 %. The default is the RAM that this process may use.

    Raises:
        ArgumentError: the size is malformed, not positive, or more than the whole.

    Example:
        >>> parse_bytes("1.5KiB"), parse_bytes("2G"), parse_bytes(1e9)
        (1536, 2147483648, 1000000000)
    """
    if isinstance(size, bool) or not (isinstance(size, str | Real) or hasattr(size, "__index__")):
        raise ArgumentError(f"`{subject}` must be a number or a str, got {type(size).__name__}. {REMEDY}")
    if size == MAP:
        raise ArgumentError(f'`{subject}="map"` is for readers: er.open(path, mode="r", memory="map"). {REMEDY}')
    if size == AUTO:
        raise ArgumentError(f'`{subject}="auto"` is for tables and groups on disk, with path=. {REMEDY}')
    number, unit = _parts(size, subject)
    if not number > 0:
        raise ArgumentError(f"`{subject}` must be positive: got {size!r}. {REMEDY}")
    if unit != "%":
        return max(1, int(number * UNITS[unit]))
    if number > 100:
        raise ArgumentError(f"`{subject}` must be at most 100%: got {size!r}. {REMEDY}")
    return max(1, int(whole() * number / 100))


REMEDY = 'Pass bytes, such as 1e9, a size such as "512MiB", "2GB" or "2G" (GiB), or a share such as "25%".'


def _parts(size: Size, subject: str) -> tuple[float, str]:
    """Return the number of a size, as an int if it is whole, and its unit."""
    if not isinstance(size, str):
        if not isinstance(size, float) and hasattr(size, "__index__"):
            return operator.index(size), ""
        if math.isfinite(size) and float(size).is_integer():
            return int(size), ""
    elif (match := _SIZE.fullmatch(size)) is not None and (match[2] == "%" or match[2].upper() in UNITS):
        return float(match[1].replace("_", "")) if not match[1].isdigit() else int(match[1]), match[2].upper()
    raise ArgumentError(f"`{subject}` is not a size: got {size!r}. {REMEDY}")


def parse_device_memory(size: Size | None) -> int | str | None:
    """Return the GPU memory that a table may take, in bytes.

    Return 0 for none, None for a share of the free memory, and a percentage such as "25%" as given.

    Raises:
        ArgumentError: the size is malformed.
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size == 0):
        return size
    nbytes = parse_bytes(size, "device_memory")  # raises on errors
    return size.strip() if isinstance(size, str) and "%" in size else nbytes  # the GPU is known later


def format_bytes(count: float) -> str:
    """Return a size in powers of 1024, for people to read.

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


def format_at_least(count: float) -> str:
    """Return a readable size that is at least `count`, for users to pass as an argument.

    Example:
        >>> format_at_least(2_113_000)
        '2.1 MiB'
    """
    text = format_bytes(count)
    number, unit = text.split()
    return text if parse_bytes(text) >= count else f"{float(number) + 0.1:.1f} {unit}"


SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # by the first letter of a unit
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|seconds?|m|min|minutes?|h|hours?|d|days?)\s*")


def duration(time: Any) -> Any:
    """Return a `timedelta`, NumPy's too, as text for `parse_seconds`; other values as they are.

    Example:
        >>> duration(timedelta(minutes=1.5)), duration(np.timedelta64(2, "h")), duration("30d"), duration(7)
        ('90.0s', '7200.0s', '30d', 7)
    """
    if isinstance(time, np.timedelta64):
        return f"{time / np.timedelta64(1, 's')}s"
    return f"{time.total_seconds()}s" if isinstance(time, timedelta) else time


def parse_seconds(text: str) -> float | None:
    """Return the seconds of a duration, or None if it is malformed or zero.

    Example:
        >>> parse_seconds("30s"), parse_seconds("1.5 min"), parse_seconds("2 days"), parse_seconds("soon")
        (30.0, 90.0, 172800.0, None)
    """
    found = _DURATION.fullmatch(text)
    return float(found[1]) * SECONDS[found[2][0]] or None if found is not None else None


def to_seconds(time: float | str, subject: str) -> float:
    """Return the seconds of a time, a number of them or a duration such as "10min".

    Raises:
        ArgumentError: it is neither. The message names `subject`.
    """
    seconds = parse_seconds(time) if isinstance(time, str) else time
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= 0:
        raise ArgumentError(f'{subject} must be seconds, or a time such as "5min": got {time!r}.')
    return seconds
