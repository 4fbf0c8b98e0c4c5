"""The rows of a table in RAM as files in a folder: written and read in batches, so that it takes no RAM to speak of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.batch.ids import check_ids
from embedrock.batch.plan import make_plan
from embedrock.errors import CorruptTableError
from embedrock.machine.interrupts import held_back
from embedrock.rules import Rule, read_rule
from embedrock.spec import Spec
from embedrock.table.saved import check_state
from embedrock.table.table import Table

BATCH_BYTES = 16 << 20
SCALARS, IDS, RECORDS, HISTORY = "table.json", "ids.bin", "records.bin", "history_{}.npy"


def are_in(folder: str | None) -> bool:
    """Return whether there are rows in a folder."""
    return folder is not None and Path(folder, SCALARS).exists()


def write_rows(table: Table, folder: str) -> None:
    """Write what `Table.state` returns."""
    with table._turn.alone():
        memory, history = table._in_ram("save"), {} if table._history is None else table._history.state()
        with open(Path(folder, IDS), "wb") as ids_file, open(Path(folder, RECORDS), "wb") as records_file:
            for ids, slots in memory.directory.batches(_batch_rows(table.spec)):
                ids_file.write(np.ascontiguousarray(ids, "<i8").data)
                records_file.write(memory.records.bytes[slots].data)
        for name, array in history.items():
            np.save(Path(folder, HISTORY.format(name)), array, allow_pickle=False)
        numbers = {"steps": table.steps, "skipped_steps": int(table.stats()["skipped_steps"]), "count": memory.count}
        content = {**table._description(), **numbers, "history": sorted(history)}
    Path(folder, SCALARS).write_text(json.dumps(content, default=lambda number: number.item()))


def read_rows(table: Table, folder: str) -> None:
    """Do what `Table.load_state` does, with what `write_rows` wrote. Of another rule, only the weights are taken."""
    content = json.loads(Path(folder, SCALARS).read_text())
    wanted, subject, rule = table.rule, table._subject, rule_of(content["rule"])
    check_state({**content, "ids": None, "records": None}, table._description(), subject)
    spec = replace(table.spec, rule=rule, seed=int(content["seed"]))
    history = None if rule is None else rule.history()
    if history is not None:
        arrays = {name: np.load(Path(folder, HISTORY.format(name)), allow_pickle=False) for name in content["history"]}
        history.load(arrays, int(content["steps"]))
    with table._turn.alone(), held_back():
        memory = table._new_tier(spec)
        memory.check_room(content["count"])
        for ids, records in _batches(Path(folder), spec, content["count"]):
            check_ids(ids, spec.rows, subject)
            if len(make_plan(ids).ids) != len(ids) or (memory.find(ids) >= 0).any():
                raise CorruptTableError(f"{folder}/{IDS} is damaged: ids of rows for {subject} repeat.")
            memory.paste_records(ids, records)
        table._install(spec, memory, history)
        table._steps, table._skipped_steps = int(content["steps"]), int(content["skipped_steps"])
    if wanted is not None:
        table.set_rule(wanted)


def rule_of(description: dict[str, Any] | None) -> Rule | None:
    """Return the rule that JSON describes, which knows no tuples."""
    if description is None:
        return None
    return read_rule({name: tuple(value) if isinstance(value, list) else value for name, value in description.items()})


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
                    f"{folder}/{RECORDS} is damaged: it must hold {count} records of {width} bytes."
                )
            yield np.frombuffer(ids, "<i8").astype(np.int64), np.frombuffer(records, np.uint8).reshape(rows, width)
