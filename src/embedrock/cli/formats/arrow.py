"""Arrow's own files (IPC; Feather is the same), also as a stream: columns of ids and of vectors. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedrock.cli.formats._columns import Columns, ColumnsSink

FILE_MAGIC = b"ARROW1"  # a stream has none


class Arrow(Columns):
    """Rows of an Arrow file or stream."""

    kind, part = "Arrow", "ipc"

    @contextmanager
    def _opened(self, names: list[str] | None = None) -> Iterator[Any]:
        """Open it, to read the columns of these names only."""
        columns = None if names is None else [self._places[name] for name in names]
        options = self._arrow.ipc.IpcReadOptions(included_fields=columns)
        # Mapped: a record batch may be as large as the file, and one that is not compressed then takes no RAM.
        with self._arrow.memory_map(str(self.path)) as file:
            is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
            file.seek(0)
            opener = self._arrow.ipc.open_file if is_file else self._arrow.ipc.open_stream
            with opener(file, options=options) as reader:
                yield reader

    def _schema(self) -> Any:
        with self._opened() as reader:
            schema = reader.schema
        self._places = {name: place for place, name in enumerate(schema.names)}
        return schema

    def _count(self) -> int:
        return sum(part.num_rows for part in self._records([self._ids or self._vectors]))

    def _records(self, names: list[str]) -> Iterator[Any]:
        with self._opened(names) as reader:
            if hasattr(reader, "get_batch"):
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                yield from reader

    def _parts(self, names: list[str], start: int, rows: int) -> Iterator[Any]:
        skipped = 0
        for records in self._records(names):
            for first in range(max(0, start - skipped), records.num_rows, rows):
                yield records.slice(first, rows)
            skipped += records.num_rows


class ArrowSink(ColumnsSink):
    """Writes an Arrow file, not compressed."""

    kind, part = "Arrow", "ipc"

    def _writer(self, path: Path, schema: Any) -> Any:
        return self._arrow.ipc.new_file(str(path), schema)
