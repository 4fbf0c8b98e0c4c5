"""``embedrock export``: writes rows of a table to a file, of float32 or 16 bits, or to a table of int8 or int4.

The same command continues an interrupted export to a file.
"""

from __future__ import annotations

import contextlib
import glob
import io
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock import kernels
from embedrock.cli.formats import NAMES, Format, format_to_write
from embedrock.cli.formats.base import CHECKED_ROWS, FLOATS, PART, Output, Sink, fail, part_of, publish, rows_at_once
from embedrock.cli.formats.files import opened_text
from embedrock.cli.imports import RESTART, Journal, words_of
from embedrock.cli.places import opened, place_of
from embedrock.cli.terminal.tables import format_count, progress
from embedrock.distributed.messages import decoded
from embedrock.initializers import FromSafetensors, Initializer
from embedrock.io.vfs import explained_if_full, full_disk
from embedrock.spec.codecs import CODECS
from embedrock.spec.spec import STORAGES
from embedrock.system.scopes import on_failure

SYNC_BYTES = 256 << 20  # of vectors, between two entries in the journal

HALVES = {"float16": ("npy", "npz", "raw", "safetensors"), "bfloat16": ("raw", "safetensors")}  # formats with them

Rows = tuple[np.ndarray, np.ndarray]  # ids int64 (n,), vectors (n, dim)


def run_export(arguments: Namespace) -> dict[str, Any]:
    """Export, and return a summary."""
    path = Path(arguments.file).absolute()
    kind = None if arguments.dtype in CODECS else format_to_write(path, arguments.format)
    if kind is not None and kind.name not in (formats := HALVES.get(arguments.dtype, NAMES)):
        expected = f"a format that has {arguments.dtype}: {', '.join(formats)}"
        fail(path, expected, kind.name, "Choose one of these, or leave --dtype out.")
    if path.exists():
        fail(path, "a file that is not there yet", "one that is", "Move it away, or choose another name.")
    if kind is None:
        return _export_table(path, arguments)
    with opened(arguments.table, mode="r", at=arguments.at, memory=arguments.memory) as table:
        output = _output(table, kind, path, arguments)
        words = None if output.words is None else str(output.words)
        described = {
            "table": "#".join(filter(None, (table.uuid, place_of(arguments.table).member))),
            "commit": table.last_commit,
            "format": kind.name,
            "rows": output.rows,
            "dim": table.dim,
            "dtype": output.dtype,
            "all": not output.has_ids,
            "words": words,
        }
        journal = Journal(path.with_name(f"{path.name}{PART}.json"), described)
        kept = None if arguments.restart else journal.load()
        _check_part(output, journal, kept, arguments.restart)
        start = 0 if kept is None else kept["rows"]
        assert kind.sink is not None  # a writable format
        sink = kind.sink(output, start)
        with explained_if_full(lambda: _full_disk(table, sink)):
            made = _write(table, sink, journal)
        journal.path.unlink()
        result = described | {"table": str(table.path), "files": [str(one) for one in made], "continued_at": start}
        order = "table", "commit", "files", "format", "rows", "continued_at", "dim", "dtype", "all", "words"
        return {key: result[key] for key in order}


def _export_table(path: Path, arguments: Namespace) -> dict[str, Any]:
    """Write a table of another dtype. Its folder gets its name when it is complete."""
    if arguments.all or arguments.format or arguments.words:
        remedy = "Leave --all, --format and --words out: the rows without a record keep their first values."
        fail(path, "a table, as --dtype is given", "an option of files", remedy)
    if path.suffix in [one.suffix for one in NAMES.values()]:
        remedy = "Call it otherwise, as NAME.rock; or pass --dtype bfloat16 for a file of 16 bits."
        fail(path, f"the name of a table's folder, as --dtype is {arguments.dtype}", "the name of a file", remedy)
    part = part_of(path)
    if part.exists() and not arguments.restart:
        fail(part, "no such folder", "one, perhaps of an export that was cut off", RESTART)
    shutil.rmtree(part, ignore_errors=True)
    with opened(arguments.table, mode="r", at=arguments.at, memory=arguments.memory) as table:
        spec = table.spec
        own: dict[str, Any] = {"dtype": arguments.dtype, "init": spec.init, "seed": spec.seed}
        undone = on_failure(lambda: shutil.rmtree(part, ignore_errors=True))
        with undone, er.Table(spec.rows, spec.dim, path=part, **own) as made:
            made.load_state(table)
            made.commit(step=table.last_step)
        files = [str(publish(part, path))]
        found = {"table": str(table.path), "commit": table.last_commit, "files": files, "format": arguments.dtype}
        return found | {"rows": int(table.stats()["rows_touched"]), "continued_at": 0, "dim": spec.dim, "all": False}


def _output(table: er.Table, kind: Format, path: Path, arguments: Namespace) -> Output:
    count = int(table.stats()["rows_touched"])
    if arguments.all and table.rows is None:
        fail(Path(arguments.table), "a table with a number of rows", "one of open ids", "Leave --all out.")
    whole = arguments.all or count == table.rows
    rows = table.rows if whole and table.rows is not None else count
    if not rows:
        remedy = "Pass --all to write first values too." if table.rows is not None else "Train it first."
        fail(Path(arguments.table), "rows that were stepped or assigned", "none", remedy)
    words = _words(Path(arguments.table), kind, arguments.words)
    return Output(path, rows, table.dim, not whole, words, arguments.dtype or "float32", _about(table.spec.init))


def _about(init: Initializer) -> dict[str, str]:
    """Return what a file says of the published table that its rows belong to."""
    if not isinstance(init, FromSafetensors):
        return {}
    rows, dim = init.shape
    return {"base": init.tensor, "base_digest": init.digest, "base_rows": f"{rows}", "base_dim": f"{dim}"}


def _words(table: Path, kind: Format, given: str | None) -> Path | None:
    """Return the user's file of words, or else the one beside the table, if the format has words."""
    if given:
        if not kind.has_words:
            fail(Path(given), "a format with words: glove or word2vec", kind.name, "Leave --words out.")
        expected = "words in UTF-8, one in each line"
        with opened_text(Path(given), expected) as file:
            if not isinstance(getattr(file, "raw", None), io.FileIO):  # it is unpacked, or converted
                got = "a text that is compressed, or of another encoding"
                fail(Path(given), expected, got, "Save it in UTF-8.")
        return Path(given).absolute()
    default = words_of(table.absolute())
    return default if kind.has_words and given is None and default.exists() else None


def _check_part(output: Output, journal: Journal, kept: dict[str, Any] | None, restart: bool) -> None:
    part = part_of(output.path)
    if kept is None:
        if part.exists() and not journal.path.exists() and not restart:
            fail(part, "no such file", "one that this command did not begin", "Move it away.")
        journal.save({"rows": 0})
    elif kept["rows"] > output.rows:
        fail(journal.path, f"at most {format_count(output.rows, 'row')}", f"{kept['rows']}", RESTART)


def _write(table: er.Table, sink: Sink, journal: Journal) -> list[Path]:
    output, start = sink.output, sink.done
    sync_rows, saved = max(1, SYNC_BYTES // (4 * output.dim)), start
    try:
        with progress(f"export {output.path.name}", output.rows, start) as advance:
            for ids, vectors in _rest(table, sink):
                sink.write(ids, vectors)
                advance(len(ids))
                if sink.done - saved >= sync_rows:
                    sink.sync()
                    saved = sink.done
                    journal.save({"rows": saved})
        if sink.done != output.rows:
            expected = format_count(output.rows, "row")
            fail(output.path, expected, f"{sink.done}", "This is a bug: please report it.")
        sink.sync()
        journal.save({"rows": sink.done})
        return sink.finish()
    finally:
        with contextlib.suppress(OSError):  # its error was reported
            sink.close()


def _full_disk(table: er.Table, sink: Sink) -> OSError:
    """Return the error of a full disk. The parts stay: the next run continues from them."""
    output, done = sink.output, sink.done
    parts = output.path.parent.glob(f"{glob.escape(output.path.name)}*{PART}")
    written = sum(part.stat().st_size for part in parts)
    least = np.dtype(FLOATS[output.dtype]).itemsize * output.dim + 8 * output.has_ids
    row_bytes = max(least, written / done if done else 0)  # text takes more
    what = f"{format_count(output.rows, 'row')} of table {str(table.path)!r} could not be exported"
    remedy = "Free some space and run the same command again: it continues. No file has this name until it is whole."
    return full_disk(str(output.path), what, max(0, int(row_bytes * output.rows) - written), remedy)


def _rest(table: er.Table, sink: Sink) -> Iterator[Rows]:
    """Iterate over the rows that `sink` lacks, after a check that the file ends with the rows before."""
    start = sink.done
    first = max(0, start - CHECKED_ROWS)
    before: list[Rows] = []
    for ids, numbers in _rows_from(table, sink.output, first):
        vectors = encoded(ids, numbers, sink.output)
        known = max(0, min(len(ids), start - first))
        first += len(ids)
        if known:
            before.append((ids[:known], vectors[:known]))
        if before and first >= start:
            if not sink.holds(*(np.concatenate(parts) for parts in zip(*before, strict=True))):
                expected = f"the table's rows up to number {sink.done}, as an earlier run wrote them"
                fail(part_of(sink.output.path), expected, "something else", RESTART)
            before = []
        if known < len(ids):
            yield ids[known:], vectors[known:]


def _rows_from(table: er.Table, output: Output, first: int) -> Iterator[Rows]:
    """Iterate over the rows in output order, which is the same for each export of a commit."""
    at_once = rows_at_once(table.dim)
    if not output.has_ids:
        for start in range(first, output.rows, at_once):
            ids = np.arange(start, min(output.rows, start + at_once))
            yield ids, table.lookup(ids)
        return
    for ids, vectors in table.export_batches(at_once):
        skipped = min(first, len(ids))
        first -= skipped
        if skipped < len(ids):
            yield ids[skipped:], vectors[skipped:]


def encoded(ids: np.ndarray, values: np.ndarray, output: Output) -> np.ndarray:
    """Return float32 values in the output's dtype, rounded to nearest as in a table. bfloat16 is uint16, its bits.

    Raises:
        FileError: a finite number is too large for it.
    """
    if output.dtype == "float32":
        return values
    words: np.ndarray = np.empty(values.shape, STORAGES[output.dtype])
    kernels.cpu.launch(kernels.cpu.rows.scatter, words, np.arange(len(ids)), values)
    lost = np.isfinite(values) & ~np.isfinite(decoded(words, output.dtype))
    if lost.any():
        row, column = np.argwhere(lost)[0]
        got, where = f"{values[row, column]}", f"row with id {ids[row]}"
        fail(output.path, f"numbers that {output.dtype} can have", got, "Write them with --dtype float32.", where)
    return words.view(FLOATS[output.dtype])
