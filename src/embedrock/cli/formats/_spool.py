"""`Spool`: vectors and ids in files of their own, packed into one at the end."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from embedrock.cli.formats._regions import Regions
from embedrock.cli.formats._sink import PART, Output, part_of, publish
from embedrock.cli.formats.npy import npy_region
from embedrock.process import platform


class Spool(Regions):
    """Vectors and ids in files of their own, from which a file that cannot be continued is made at the end."""

    def __init__(self, output: Output, done: int) -> None:
        super().__init__(output, done)
        path, rows = output.path, output.rows
        self.vectors = npy_region(path.with_name(f"{path.name}.vectors{PART}"), "<f4", (rows, output.dim))
        ids = path.with_name(f"{path.name}.ids{PART}")
        self.ids = npy_region(ids, "<i8", (rows,)) if output.has_ids else None

    def finish(self) -> list[Path]:
        for region in self._regions():
            region.end()
        part = part_of(self.output.path)
        self._pack(part)
        with open(part, "rb") as file:
            platform.sync(file.fileno())
        made = publish(part, self.output.path)
        for region in self._regions():
            region.path.unlink()
        return [made]

    @abstractmethod
    def _pack(self, path: Path) -> None: ...
