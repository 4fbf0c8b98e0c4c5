"""Values on a command line: counts, numbers, sizes, files. Each reader is a ``type=`` of argparse."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from pathlib import Path

from embedrock.errors import ArgumentError
from embedrock.machine.paths import local_path
from embedrock.machine.sizes import parse_bytes

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9}


def count(text: str) -> int:
    """Read a positive whole number: 4000000, 4_000_000, 4M, 1e9.

    Example:
        >>> count("4M")
        4000000
    """
    digits = text.replace("_", "").lower()
    factor = SUFFIXES.get(digits[-1:], 1)
    try:
        value = float(digits[:-1] if factor > 1 else digits) * factor
    except ValueError:
        value = math.nan
    if not value.is_integer() or value < 1:
        raise ArgumentTypeError(f"must be a positive whole number, such as 8192, 4M or 1e9: got {text!r}")
    return int(value)


def number(text: str, least: float = 0.0) -> float:
    """Read a finite number of at least `least`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise ArgumentTypeError(f"must be a number of at least {least:g}: got {text!r}")
    return value


def size(text: str) -> int:
    """Read a number of bytes: 512MiB, 1GB, 2G, 25% of the RAM."""
    try:
        return parse_bytes(text)
    except ArgumentError:
        raise ArgumentTypeError(f'must be a size such as "512MiB": got {text!r}') from None


def place(text: str, kind: str = "folder") -> str:
    """Read the name of a file or folder on this machine, whether it is there or not."""
    try:
        return local_path(text, "it", kind)
    except ArgumentError as error:
        raise ArgumentTypeError(str(error)) from None


def file(text: str) -> str:
    """Read the name of a file on this machine, whether it is there or not."""
    return place(text, "file")


def folder(text: str) -> Path:
    """Read the name of a folder that exists."""
    path = Path(text)
    if not path.is_dir():
        raise ArgumentTypeError(f"must be a folder that exists: got {text!r}")
    return path


def writable_file(text: str) -> Path:
    """Read the name of a file for results, and check now that it can be there, not after minutes of work."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentTypeError(f"must be a file in a folder that exists: got {text!r}")
    return path
