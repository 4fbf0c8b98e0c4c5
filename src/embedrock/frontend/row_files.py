"""The rows of a table in RAM as files in a folder. They are written and read in batches, with little RAM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.errors import CorruptTableError, counted
from embedrock.frontend.growing import grows
from embedrock.spec.description import rule_of
from embedrock.spec.spec import Spec
from embedrock.table import saved
from embedrock.table.table import Table, rows_of

BATCH_BYTES = 16 << 20
SCALARS, IDS, RECORDS, HISTORY = "table.json", "ids.bin", "records.bin", "history_{}.npy"


def are_in(folder: str | None) -> bool:
    """Return whether a folder has rows."""
    return folder is not None and Path(folder, SCALARS).exists()


def size_of_rows(table: Table) -> int:
    """Return the bytes that `write_rows` writes, without some hundreds."""
    return int(table.stats()["rows_touched"]) * (8 + table.spec.record_bytes)


def write_rows(table: Table, folder: str) -> None:
    """Write the arrays of `Table.state` to a folder, created if it is missing."""
    Path(folder).mkdir(exist_ok=True)
    rows = rows_of(table)
    with rows.table_lock.alone():
        whole = saved.save(rows, _batch_rows(table.spec))
        with open(Path(folder, IDS), "wb") as ids_file, open(Path(folder, RECORDS), "wb") as records_file:
            for ids, records in whole.batches:
                ids_file.write(np.ascontiguousarray(ids, "<i8").data)
                records_file.write(records.data)
        for name, array in whole.history.items():
            np.save(Path(folder, HISTORY.format(name)), array, allow_pickle=False)
    content = {**whole.header, "history": sorted(whole.history)}
    Path(folder, SCALARS).write_text(json.dumps(content, default=lambda number: number.item()))


def check_rows(table: Table, folder: str) -> tuple[dict[str, Any], Spec]:
    """Return the description of the rows in a folder, and their spec. Raise an error unless a table can load them."""
    content, rows = _content(Path(folder)), rows_of(table)
    spec = replace(table.spec, rule=rule_of(content["rule"]))
    ids = (ids for ids, _ in _batches(Path(folder), spec, content["count"]))
    saved.check_header(content, rows, ids, grows())
    rows.check_commit()
    return content, spec


def read_rows(table: Table, folder: str) -> None:
    """Load the files of `write_rows`, as `Table.load_state` does. For another rule, only the weights are loaded."""
    (content, spec), rows = check_rows(table, folder), rows_of(table)
    names = content["history"] if spec.rule is not None else []
    history = {name: _array(Path(folder, HISTORY.format(name))) for name in names}
    repeated = CorruptTableError(f"{folder}/{IDS} is damaged: ids of rows for {table.subject} repeat.")
    batches = _batches(Path(folder), spec, content["count"])
    with rows.table_lock.whole():
        rows.check()
        rows.check_commit()
        saved.load(rows, saved.SavedState(content, history, batches), lambda ids: repeated)


def _content(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / SCALARS).read_text())
        if content["count"] is None or not all(name.isidentifier() for name in content["history"]):
            raise ValueError("names of arrays are no names")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptTableError(
            f"{folder}/{SCALARS} is damaged: it must describe a table's rows: {error!r:.200}"
        ) from error
    return content


def _array(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise CorruptTableError(f"{path} is damaged: it must hold an array: {error!r:.200}") from error


def _batch_rows(spec: Spec) -> int:
    return max(1, BATCH_BYTES // spec.record_bytes)


def _batches(folder: Path, spec: Spec, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    size, width = _batch_rows(spec), spec.record_bytes
    with open(folder / IDS, "rb") as ids_file, open(folder / RECORDS, "rb") as records_file:
        for start in range(0, count, size):
            rows = min(size, count - start)
            ids, records = ids_file.read(rows * 8), records_file.read(rows * width)
            if len(ids) != rows * 8 or len(records) != rows * width:
                raise CorruptTableError(
                    f"{folder}/{RECORDS} is damaged: it must hold {counted(count, 'record')} of {width} bytes."
                )
            yield np.frombuffer(ids, "<i8").astype(np.int64), np.frombuffer(records, np.uint8).reshape(rows, width)
