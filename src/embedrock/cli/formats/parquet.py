"""Parquet: a column of ids and one of vectors (lists of floats). Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embedrock.cli.formats._columns import Columns, ColumnsSink

READ_BYTES = 1 << 20


class Parquet(Columns):
    """Rows of a Parquet file."""

    kind, part = "Parquet", "parquet"

    def _open(self) -> Any:
        # Pages are read as they come: a row group may be as large as the file.
        return self._arrow.parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=READ_BYTES)

    def _schema(self) -> Any:
        with self._open() as file:
            return file.schema_arrow

    def _count(self) -> int:
        with self._open() as file:
            return file.metadata.num_rows

    def _parts(self, names: list[str], start: int, rows: int) -> Iterator[Any]:
        with self._open() as file:
            groups, skipped = _groups_from(file.metadata, start)
            for table in file.iter_batches(rows, row_groups=groups, columns=names, use_threads=False):
                part = table.slice(max(0, start - skipped))
                skipped += table.num_rows
                if part.num_rows:
                    yield part


def _groups_from(metadata: Any, start: int) -> tuple[list[int], int]:
    """Return the row groups that have rows from `start` on, and the number of their first row."""
    first = group = 0
    while group < metadata.num_row_groups and first + metadata.row_group(group).num_rows <= start:
        first += metadata.row_group(group).num_rows
        group += 1
    return list(range(group, metadata.num_row_groups)), first


class ParquetSink(ColumnsSink):
    """Writes a Parquet file, not compressed."""

    kind, part = "Parquet", "parquet"

    def _writer(self, path: Path, schema: Any) -> Any:
        return self._arrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False)
