"""Values on a command line that more than one command takes."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from embedrock.errors import ArgumentError
from embedrock.machine.sizes import parse_bytes


def size(text: str) -> int:
    """Read a number of bytes: 512MiB, 1GB."""
    try:
        return parse_bytes(text)
    except ArgumentError:
        raise ArgumentTypeError(f'must be a size such as "512MiB": got {text!r}') from None


def writable_file(text: str) -> Path:
    """Read the name of a file for results, and check now that it can be there, not after minutes of work."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentTypeError(f"must be a file in a folder that exists: got {text!r}")
    return path
