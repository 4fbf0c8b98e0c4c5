"""``embedrock curve``: rows per batch that a table would read from disk, by memory, from a log of ids."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat, takewhile
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.cli.columns import IDS, TextColumn
from embedrock.cli.formats import fail
from embedrock.cli.imports import OPEN, rows_or_open
from embedrock.cli.terminal.arguments import add_command, count, number, size
from embedrock.cli.terminal.tables import (
    Field,
    format_count,
    format_facts,
    format_lines,
    format_number,
    format_whole,
    progress,
)
from embedrock.initializers import Zeros
from embedrock.planner.demand import RULE_NAMES, cut
from embedrock.spec.spec import STORAGES, Spec
from embedrock.storage.cache import POLICIES
from embedrock.storage.miss_ratio_curve import CurveSampler, MissRatioCurve
from embedrock.storage.ram_layout import memory_for, most_for, place
from embedrock.system.sizes import format_bytes

BATCH_SIZE = 4096
WARM_UP = 0.5
SUBJECT = "the table"
FIELDS = (
    Field("memory=", "memory", format_bytes),
    Field("rows in RAM", "slots", format_whole),
    Field("rows missed", "misses", format_number),
    Field("+-", "error", format_number),
    Field("of those used", "share", lambda share: f"{share:.1%}"),
    Field("bytes read", "bytes_read", format_bytes),
)


def add_parser(subparsers: Any) -> None:
    """Add the command to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    text = "how many rows of a batch are read from disk, by memory=, told from a log of ids"
    parser = add_command(subparsers, "curve", _run, text, json_text="")
    files = "Parquet, Arrow, CSV, TSV or .txt, in order"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=files)
    parser.add_argument("--column", required=True, metavar="NAME", help="of ids: integers or strings")
    rows = f"rows of the table, or '{OPEN}' (default)"
    parser.add_argument("--rows", type=rows_or_open, default=OPEN, metavar="N", help=rows)
    parser.add_argument("--dim", type=count, default=64, metavar="N", help="numbers in a row (default: 64)")
    parser.add_argument("--dtype", choices=STORAGES, default="float32", help="of the weights (default: float32)")
    parser.add_argument("--rule", choices=RULE_NAMES, default="adam", help="(default: adam)")
    batch = f"ids of a batch (default: {BATCH_SIZE})"
    parser.add_argument("--batch-size", type=count, default=BATCH_SIZE, metavar="N", help=batch)
    parser.add_argument("--memory", type=size, nargs="+", metavar="SIZE", help="(default: powers of two)")
    parser.add_argument("--policy", choices=POLICIES, default="lfu", help="which rows leave (default: lfu)")
    warm_up = f"part of the log that fills the caches and is not counted (default: {WARM_UP})"
    parser.add_argument(
        "--warm-up", type=lambda text: min(number(text), 1.0), default=WARM_UP, metavar="X", help=warm_up
    )
    parser.add_argument("--skip-nulls", action="store_true", help="leave out what is missing (default: an error)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: Namespace) -> int:
    began = time.perf_counter()
    columns = [TextColumn(path, arguments.column, IDS) for path in arguments.files]
    ids = ids_in(columns)
    if arguments.rows != OPEN:
        remedy = f"Make ids of them by er.hash_ids, or pass --rows {OPEN}"
        refuse_strings(columns, arguments.rows, arguments.column, remedy)
    rows = None if arguments.rows == OPEN else arguments.rows
    spec = Spec(rows, arguments.dim, arguments.dtype, RULE_NAMES[arguments.rule](), Zeros(), 0)
    slots = {memory: place(spec, memory, SUBJECT).slots for memory in _memories(arguments, spec, ids)}
    sampler = CurveSampler(list(slots.values()), arguments.policy)
    with progress("ids", ids, 0, " ids") as advance:
        _sample_all(sampler, batches(columns, arguments), int(ids * arguments.warm_up), advance)
    info = _info(arguments, spec, slots, sampler.curve())
    info["ids"], info["seconds"] = ids, time.perf_counter() - began
    print(json.dumps(info) if arguments.json else _text(info))
    return 0


def _memories(arguments: Namespace, spec: Spec, ids: int) -> Sequence[int]:
    """Return the requested sizes, or powers of two from two batches to all ids of the log."""
    if arguments.memory:
        return sorted(set(arguments.memory))
    least = 1 << (memory_for(spec, 2 * arguments.batch_size) - 1).bit_length()
    most = min(most_for(spec), memory_for(spec, ids)) * 2
    return [*takewhile(lambda memory: memory < most, accumulate(repeat(2), int.__mul__, initial=least))] or [least]


def ids_in(columns: Sequence[TextColumn]) -> int:
    """Count the ids in columns, and refuse columns without any, whose type is unknown."""
    ids = sum(column.rows for column in columns)
    if not ids:
        fail(columns[0].path, "ids", "none", "Check that it is the right file.")
    return ids


def refuse_strings(columns: Sequence[TextColumn], rows: int, name: str, remedy: str) -> None:
    """Refuse columns of strings as ids of a table with `rows` rows."""
    for column in columns:
        if not column.is_integer:
            fail(column.path, f"ids of {name!r} from 0 to {rows - 1:,}", "strings", f"{remedy}, and it is done here.")


def batches(columns: Sequence[TextColumn], arguments: Namespace) -> Iterator[np.ndarray]:
    """Iterate over the log's ids in batches of `batch_size`; the last may be smaller."""
    parts = (
        _as_ids(values.drop_null() if arguments.skip_nulls else column.checked(values, start), column, start, arguments)
        for column in columns
        for start, values in column.batches()
    )
    return cut(parts, arguments.batch_size, rest=True)


def _as_ids(values: Any, column: TextColumn, start: int, arguments: Namespace) -> np.ndarray:
    if not column.is_integer:
        return er.hash_ids(values)
    ids = values.to_numpy(zero_copy_only=False).astype(np.int64)
    rows = arguments.rows
    if rows != OPEN and len(ids) and not (ids.min() >= 0 and ids.max() < rows):
        wrong = int(np.argmax((ids < 0) | (ids >= rows)))
        expected = f"ids from 0 to {rows - 1:,}"
        fail(column.path, expected, f"{ids[wrong]}", f"Pass --rows {OPEN}.", f"row {start + wrong}")
    return ids


def _sample_all(sampler: CurveSampler, batches: Iterator[np.ndarray], warm_up: int, advance: Any) -> None:
    seen, is_warm = 0, not warm_up
    for batch in batches:
        if not is_warm and seen >= warm_up:
            sampler.forget_counts()
            is_warm = True
        sampler.see(np.unique(batch))
        seen += len(batch)
        advance(len(batch))


def _info(arguments: Namespace, spec: Spec, slots: dict[int, int], curve: MissRatioCurve) -> dict[str, Any]:
    points = []
    for memory, room in slots.items():
        at = int(np.searchsorted(curve.slots, room))
        misses, error = float(curve.misses[at]), float(curve.errors[at])
        point = {"memory": memory, "slots": room, "misses": misses, "error": error, "share": misses / curve.rows}
        points.append(point | {"bytes_read": int(misses * spec.record_bytes)})
        if not arguments.memory and room >= curve.distinct:
            break  # more has no effect
    return {
        "column": arguments.column,
        "files": [str(path) for path in arguments.files],
        "batch_size": arguments.batch_size,
        "batches": curve.batches,
        "rows_used": curve.rows,
        "rows_new": curve.new,
        "distinct": curve.distinct,
        "record_bytes": spec.record_bytes,
        "points": points,
    }


def _text(info: dict[str, Any]) -> str:
    head = f"{info['column']} of {', '.join(info['files'])}: {format_count(info['ids'], 'id')}"
    facts = {
        "batches": f"{info['batches']:,} of {format_count(info['batch_size'], 'id')}; those before warm up",
        "rows": f"{info['rows_used']:,.0f} a batch, {format_number(info['rows_new'])} of them for the first time; "
        f"{info['distinct']:,.0f} in all",
        "a row": f"{format_bytes(info['record_bytes'])} with the state of its rule",
    }
    note = (
        "A row that is missed is read from disk, if the table has a record of it: it was stepped or assigned.\n"
        "+- is how far off a number may be, 19 of 20 times, as only a sample of the ids is looked at."
    )
    return f"{head}\n{format_facts(facts)}\n\nof a batch, on average\n{format_lines(FIELDS, info['points'])}\n\n{note}"
