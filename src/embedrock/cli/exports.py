"""``embedrock export``: writes rows of a table to a file. The same command continues an interrupted export."""

from __future__ import annotations

import contextlib
import glob
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.cli.formats import Format, format_to_write
from embedrock.cli.formats.base import CHECKED_ROWS, PART, Output, Sink, fail, part_of, rows_at_once
from embedrock.cli.formats.files import check_plain_text
from embedrock.cli.imports import RESTART, Journal, words_of
from embedrock.cli.places import opened, place_of
from embedrock.cli.terminal.tables import format_count, progress
from embedrock.io.vfs import full_disk, is_full

SYNC_BYTES = 256 << 20  # of vectors, between two entries in the journal

Rows = tuple[np.ndarray, np.ndarray]  # ids int64 (n,), vectors float32 (n, dim)


@dataclass(frozen=True)
class ExportJob:
    """One export.

    Attributes:
        table: source of the rows, a snapshot.
        format: of the file.
        output: the output files.
        journal: progress so far.
    """

    table: er.Table
    format: Format
    output: Output
    journal: Journal


def run_export(arguments: Namespace) -> dict[str, Any]:
    """Export, and return a summary."""
    path = Path(arguments.file).absolute()
    kind = format_to_write(path, arguments.format)
    if path.exists():
        fail(path, "a file that is not there yet", "one that is", "Move it away, or choose another name.")
    with opened(arguments.table, mode="r", at=arguments.at, memory=arguments.memory) as table:
        job = _job(table, kind, path, arguments)
        kept = None if arguments.restart else job.journal.load()
        _check_part(job, kept, arguments.restart)
        start = 0 if kept is None else kept["rows"]
        made = _write(job, start)
        job.journal.remove()
        return {
            "table": str(table.path),
            "commit": table.last_commit,
            "files": [str(one) for one in made],
            "format": kind.name,
            "rows": job.output.rows,
            "continued_at": start,
            "dim": table.dim,
            "all": not job.output.has_ids,
            "words": None if job.output.words is None else str(job.output.words),
        }


def _job(table: er.Table, kind: Format, path: Path, arguments: Namespace) -> ExportJob:
    count = int(table.stats()["rows_touched"])
    if arguments.all and table.rows is None:
        fail(Path(arguments.table), "a table with a number of rows", "one of open ids", "Leave --all out.")
    whole = arguments.all or count == table.rows
    rows = table.rows if whole and table.rows is not None else count
    if not rows:
        remedy = "Pass --all to write first values too." if table.rows is not None else "Train it first."
        fail(Path(arguments.table), "rows that were stepped or assigned", "none", remedy)
    words = _words(Path(arguments.table), kind, arguments.words)
    described = {
        "table": "#".join(filter(None, (table.uuid, place_of(arguments.table).member))),
        "commit": table.last_commit,
        "format": kind.name,
        "rows": rows,
        "dim": table.dim,
        "all": whole,
        "words": None if words is None else str(words),
    }
    journal = Journal(path.with_name(f"{path.name}{PART}.json"), described)
    return ExportJob(table, kind, Output(path, rows, table.dim, not whole, words), journal)


def _words(table: Path, kind: Format, given: str | None) -> Path | None:
    """Return the user's file of words, or else the one beside the table, if the format has words."""
    if given:
        if not kind.has_words:
            fail(Path(given), "a format with words: glove or word2vec", kind.name, "Leave --words out.")
        check_plain_text(Path(given), "words in UTF-8, one in each line")
        return Path(given).absolute()
    default = words_of(table.absolute())
    return default if kind.has_words and given is None and default.exists() else None


def _check_part(job: ExportJob, kept: dict[str, Any] | None, restart: bool) -> None:
    part = part_of(job.output.path)
    if kept is None:
        if part.exists() and not job.journal.path.exists() and not restart:
            fail(part, "no such file", "one that this command did not begin", "Move it away.")
        job.journal.save({"rows": 0})
    elif kept["rows"] > job.output.rows:
        fail(job.journal.path, f"at most {format_count(job.output.rows, 'row')}", f"{kept['rows']}", RESTART)


def _write(job: ExportJob, start: int) -> list[Path]:
    assert job.format.sink is not None  # a writable format
    sink = job.format.sink(job.output, start)
    sync_rows = max(1, SYNC_BYTES // (4 * job.output.dim))
    saved = start
    try:
        with progress(f"export {job.output.path.name}", job.output.rows, start) as advance:
            for ids, vectors in _rest(job, sink, start):
                sink.write(ids, vectors)
                advance(len(ids))
                if sink.done - saved >= sync_rows:
                    sink.sync()
                    saved = sink.done
                    job.journal.save({"rows": saved})
        if sink.done != job.output.rows:
            expected = format_count(job.output.rows, "row")
            fail(job.output.path, expected, f"{sink.done}", "This is a bug: please report it.")
        sink.sync()
        job.journal.save({"rows": sink.done})
        return sink.finish()
    except OSError as error:
        if not is_full(error):
            raise
        raise _full_disk(job, sink.done) from error
    finally:
        with contextlib.suppress(OSError):  # its error was reported
            sink.close()


def _full_disk(job: ExportJob, done: int) -> OSError:
    """Return the error of a full disk. The parts stay: the next run continues from them."""
    output = job.output
    parts = output.path.parent.glob(f"{glob.escape(output.path.name)}*{PART}")
    written = sum(part.stat().st_size for part in parts)
    row_bytes = max(4 * output.dim + 8 * output.has_ids, written / done if done else 0)  # text takes more
    what = f"{format_count(output.rows, 'row')} of table {str(job.table.path)!r} could not be exported"
    remedy = "Free some space and run the same command again: it continues. No file has this name until it is whole."
    return full_disk(str(output.path), what, max(0, int(row_bytes * output.rows) - written), remedy)


def _rest(job: ExportJob, sink: Sink, start: int) -> Iterator[Rows]:
    """Iterate over the rows from number `start` on, after a check that the file ends with the rows before."""
    first = max(0, start - CHECKED_ROWS)
    before: list[Rows] = []
    for ids, vectors in _rows_from(job, first):
        known = max(0, min(len(ids), start - first))
        first += len(ids)
        if known:
            before.append((ids[:known], vectors[:known]))
        if before and first >= start:
            if not sink.holds(*(np.concatenate(parts) for parts in zip(*before, strict=True))):
                expected = f"the table's rows up to number {sink.done}, as an earlier run wrote them"
                fail(part_of(job.output.path), expected, "something else", RESTART)
            before = []
        if known < len(ids):
            yield ids[known:], vectors[known:]


def _rows_from(job: ExportJob, first: int) -> Iterator[Rows]:
    """Iterate over the rows in output order, which is the same for each export of a commit."""
    table, at_once = job.table, rows_at_once(job.table.dim)
    if not job.output.has_ids:
        for start in range(first, job.output.rows, at_once):
            ids = np.arange(start, min(job.output.rows, start + at_once))
            yield ids, table.lookup(ids)
        return
    for ids, vectors in table.export_batches(at_once):
        skipped = min(first, len(ids))
        first -= skipped
        if skipped < len(ids):
            yield ids[skipped:], vectors[skipped:]
