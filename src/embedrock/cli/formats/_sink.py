"""`Sink`: a file of vectors in the making, which can be continued."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from embedrock.cli.formats._source import fail
from embedrock.machine.vfs import OS_SYSTEM

PART = ".part"
CHECKED_ROWS = 64  # the last ones of a part, compared with the table before it is continued


class Output(NamedTuple):
    """What is to be written.

    Attributes:
        path: of the file.
        rows, dim: of the vectors.
        has_ids: they are not the numbers of the rows, from 0.
        words: file with a word per line, that of id 0 first; None: ids are the words.
    """

    path: Path
    rows: int
    dim: int
    has_ids: bool
    words: Path | None = None


class Sink(ABC):
    """A file of vectors, written to files with `PART` at the end of their names until it is whole.

    Args:
        output: what is to be written.
        done: rows that are in the parts already, and durable.
    """

    def __init__(self, output: Output, done: int) -> None:
        self.output, self.done = output, done

    @abstractmethod
    def write(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Write the next rows."""

    @abstractmethod
    def holds(self, ids: np.ndarray, vectors: np.ndarray) -> bool:
        """Return whether these are the last of the rows that are done."""

    @abstractmethod
    def sync(self) -> None:
        """Make durable what was written."""

    @abstractmethod
    def finish(self) -> list[Path]:
        """Make the whole file of the parts; return what there is now."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the parts."""


def part_of(path: Path) -> Path:
    """Return where a file is while it is written."""
    return path.with_name(path.name + PART)


def publish(part: Path, path: Path) -> Path:
    """Give a part, which is durable, its name."""
    if path.exists():
        fail(path, "no file of this name yet", "one", "Move it away, and run the command again.")
    os.rename(part, path)
    OS_SYSTEM.fsync_folder(str(path.parent))
    return path
