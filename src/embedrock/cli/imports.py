"""``embedrock import``: writes rows of a file to a table. The same command continues an interrupted import."""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from argparse import Namespace
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.cli.formats import Format, base, format_to_read
from embedrock.cli.formats.base import FileError, LineFile, ReadOptions, RowBatch, VectorSource, fail, part_of
from embedrock.cli.places import opened, place_of
from embedrock.cli.terminal.arguments import count
from embedrock.cli.terminal.tables import format_count, format_number, progress
from embedrock.distributed.resharding import prefetched
from embedrock.io.vfs import OS_SYSTEM
from embedrock.planner.demand import RULE_NAMES
from embedrock.spec.description import as_arguments
from embedrock.system import platform

MAX_BYTES = 1 << 20
RESTART = "Begin anew: --restart."


class Journal:
    """The record of a job's progress, for a continuation, which must have the same `job`."""

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.path, self._job = path, json.loads(json.dumps(job))

    def load(self) -> dict[str, Any] | None:
        """Return the last saved state; None without a journal. One of another job is a `FileError`."""
        if not self.path.exists():
            return None
        try:
            kept = self._read()
            job, state = kept["job"], kept["state"]
            rows = state["rows"]
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            raise FileError(f"{self.path}: expected the journal of an earlier run; got {error!r}. {RESTART}") from error
        if type(rows) is not int or rows < 0:
            fail(self.path, "a number of rows", f"{rows!r}", RESTART)
        before = job if isinstance(job, dict) else {}
        if keys := [key for key in {**self._job, **before} if before.get(key) != self._job.get(key)]:
            found = as_arguments({key: before.get(key) for key in keys}) if isinstance(job, dict) else repr(job)
            now = as_arguments({key: self._job.get(key) for key in keys})
            fail(self.path, f"to continue the earlier run, with {found}", now, RESTART)
        return state

    def state(self) -> dict[str, Any] | None:
        """Return the last saved state of any job; None without a readable journal."""
        try:
            state = self._read()["state"]
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            return None
        return state if isinstance(state, dict) and type(state.get("commit", 0)) is int else None

    def _read(self) -> Any:
        with open(self.path, "rb") as file:
            return json.loads(file.read(MAX_BYTES))

    def save(self, state: dict[str, Any]) -> None:
        """Save the progress of the job, durably and atomically. It has at least the number of ``rows``."""
        text = json.dumps({"job": self._job, "state": state}, indent=1) + "\n"
        new = self.path.with_name(self.path.name + ".new")
        with open(new, "w") as file:
            file.write(text)
            file.flush()
            platform.sync(file.fileno())
        os.replace(new, self.path)
        OS_SYSTEM.fsync_folder(str(self.path.parent))


PART_WORDS = 1 << 16  # read or written at a time
COMMIT_BYTES = 256 << 20  # of vectors, between commits
NEW_OR_INTO = "Import to another path; or pass --into, which writes over rows of this one."
CHANGED = "Somebody has changed it since. Import to another path."
OPEN = "open"  # as a number of rows: ids are any int64
READ_OPTIONS = tuple(field.name for field in fields(ReadOptions))
NEW_TABLE = ("rows", "rule", "std", "table_dtype", "seed", "vocabulary")  # options that describe a new table


def rows_or_open(text: str) -> int | str:
    """Parse the number of rows of a table, or open ids."""
    return text if text == OPEN else count(text)


@dataclass(frozen=True)
class ImportJob:
    """One import."""

    arguments: Namespace
    source: VectorSource
    table: Path
    journal: Journal
    rows: int  # number of rows to read
    vocabulary: Path | None  # gives the words their ids; None: rows have no words
    needed: int  # number of rows that the table must have, unless rows have ids
    first: int  # id of the first row, if rows are numbered

    @property
    def words(self) -> Path:
        """Path of the file of words."""
        return words_of(self.table)


def words_of(table: Path) -> Path:
    """Return the file with the words of a table's rows: ``users.rock.words.txt`` beside ``users.rock``."""
    return table.with_name(table.name + ".words.txt")


def run_import(arguments: Namespace) -> dict[str, Any]:
    """Import, and return a summary."""
    began, path = time.perf_counter(), Path(arguments.source).absolute()
    kind = format_to_read(path, arguments.format)
    job = _job(arguments, path, kind)
    kept = None if arguments.restart else job.journal.load()
    _check_table(job, kept)
    _clear(job, kept)
    with _opened(job) as table:
        _check_fit(job, table)
        start = _start(job, table, kept)
        repeated = _fill(job, table, start, 0 if kept is None else kept.get("repeated", 0))
        job.journal.path.unlink(missing_ok=True)
        return {
            "table": str(job.table),
            "source": str(path),
            "format": kind.name,
            "rows": job.rows,
            "continued_at": start,
            "repeated": repeated,
            "dim": job.source.dim,
            "commit": table.last_commit,
            "words": str(job.words) if job.source.has_words and not arguments.into else None,
            "vocabulary": str(job.vocabulary) if job.vocabulary is not None else None,
            "found": int(table.stats()["rows_touched"]) if arguments.only_words and not arguments.into else None,
            "strings": table.rows if arguments.only_words and not arguments.into else None,
            "bytes": path.stat().st_size * job.rows // job.source.rows,
            "seconds": time.perf_counter() - began,
        }


def _job(arguments: Namespace, path: Path, kind: Format) -> ImportJob:
    options = ReadOptions(**{name: getattr(arguments, name) for name in READ_OPTIONS})
    source, table = kind.read(path, options), Path(arguments.table).absolute()
    if arguments.dim not in (None, source.dim):
        expected = f"vectors of {format_count(arguments.dim, 'number')}, as --dim says"
        fail(path, expected, f"{source.dim}", "Leave --dim out.")
    only, rows = arguments.only_words, min(source.rows, arguments.limit or source.rows)
    named = only or arguments.vocabulary or (f"{table}.vocabulary" if source.has_words else None)
    vocabulary = None if named is None else Path(named).absolute()
    if vocabulary is not None and not source.has_words:
        option = "only-words" if only else "vocabulary"
        fail(path, "rows with words", f"{kind.name}, with ids or none", f"Leave --{option} out.")
    if source.has_words and arguments.into and only is None:
        remedy = f"Pass --only-words FOLDER, the vocabulary whose ids rows have; or --ids {base.ROW_NUMBERS}."
        fail(path, "rows with ids or numbers, as --into is given", "words", remedy)
    first = arguments.first_row
    if first is not None and (source.has_ids or source.has_words):
        got = "ids" if source.has_ids else "words, whose ids are those of a vocabulary"
        fail(path, "rows without ids, as --first-row is given", got, "Leave --first-row out.")
    needed, status = (first or 0) + rows, path.stat()
    if only is not None:
        with er.Vocabulary(only, mode="r") as words:
            needed = len(words)
    described = asdict(options) | {
        "source": str(path),
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "format": kind.name,
        "dim": source.dim,
        "into": arguments.into,
        "first_row": first,
        "limit": arguments.limit,
        "only_words": only is not None,
        "vocabulary": None if vocabulary is None else str(vocabulary),
    }
    journal = Journal(table.with_name(table.name + ".import.json"), described)
    return ImportJob(arguments, source, table, journal, rows, vocabulary, needed, first or 0)


def _clear(job: ImportJob, kept: dict[str, Any] | None) -> None:
    """Remove the remains of an earlier import if this one starts anew, and record the start."""
    if job.arguments.into:
        return
    if job.arguments.restart and job.table.is_dir() and any(job.table.iterdir()):
        if _is_unfinished(job):
            _unmake(job)
        else:
            with er.open(job.table, mode="r") as table:
                if table.steps:
                    fail(job.table, "a table as an earlier import left it", "one that was trained", CHANGED)
    if kept is None:
        if job.vocabulary is not None and not job.arguments.only_words and job.vocabulary.exists():
            remedy = "Move it away, or choose another path: --vocabulary FOLDER."
            fail(job.vocabulary, "a vocabulary that is not there yet", "one that is", remedy)
        job.journal.save({"rows": 0, "table": None, "vocabulary": str(job.vocabulary)})


def _check_table(job: ImportJob, kept: dict[str, Any] | None) -> None:
    restart, place = job.arguments.restart, place_of(job.table)
    if not job.arguments.into:
        if place.member is not None and os.path.isdir(place.folder):
            remedy = "Pass --into; if the group has none of that name, make it by er.Group(path=...).table(...) before."
            fail(job.table, "the path of a new folder", f"a table of the group {place.folder}", remedy)
        if job.table.is_file():
            fail(job.table, "the path of a new folder", "a file", "Choose another path: a table is a folder.")
        if kept is None and not (restart and job.journal.path.exists()) and job.table.exists():
            fail(job.table, "a table that is not there yet", "one that is", NEW_OR_INTO)
    if kept is None and not restart and job.source.has_words and not job.arguments.into and job.words.exists():
        fail(job.words, "no words of rows yet", "this file", "Move it away.")


@contextmanager
def _opened(job: ImportJob) -> Iterator[er.Table]:
    into = job.arguments.into
    with opened(job.table, memory=job.arguments.memory) if into else _made(job, job.arguments) as table:
        try:
            yield table
        except BaseException as error:
            # A table without any rows of the file would only block a repaired file, or other options.
            is_useless = not into and isinstance(error, FileError) and not table.last_commit
            close_uncommitted(table)
            if is_useless:
                _unmake(job)
            raise


def _is_unfinished(job: ImportJob) -> bool:
    """Return whether a table is as an earlier import left it, without later changes."""
    state = job.journal.state()
    if state is None:
        return False
    with er.open(job.table) as table:  # as a writer, which excludes others
        return _is_as_left(table, state)


def _is_as_left(table: er.Table, state: dict[str, Any]) -> bool:
    """Return whether a table is as the import with this saved `state` left it."""
    if state.get("table") is None:
        return table.last_commit <= 1 and not table.steps
    # The journal is written after the commit: a table that is one commit ahead gets rows twice, which changes nothing.
    same = state.get("table") == table.uuid and state.get("steps") == table.steps
    return same and table.last_commit in (state.get("commit"), state.get("commit", 0) + 1)


def _unmake(job: ImportJob) -> None:
    """Remove a table with imported rows only, and its journal."""
    shutil.rmtree(job.table)
    part_of(job.words).unlink(missing_ok=True)
    state = job.journal.state() or {}
    made = None if job.arguments.only_words else job.vocabulary
    if made is not None and state.get("vocabulary") == str(made) and made.exists():
        shutil.rmtree(made)
    job.journal.path.unlink(missing_ok=True)


def _made(job: ImportJob, arguments: Namespace) -> er.Table:
    """Return the table of this import, new or from an earlier run."""
    rows = arguments.rows or (OPEN if job.source.has_ids else job.needed)
    std = arguments.std or 0.0
    return er.Table(
        None if rows == OPEN else rows,
        job.source.dim,
        path=job.table,
        rule=RULE_NAMES[arguments.rule]() if arguments.rule else None,
        init=er.Normal(std=std) if std else er.Zeros(),
        seed=arguments.seed,
        dtype=arguments.table_dtype or "float32",
        memory=arguments.memory,
    )


def close_uncommitted(table: er.Table | er.Vocabulary) -> None:
    """Close a table or vocabulary without a commit: the next run imports the last rows again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        table.close()


def _check_fit(job: ImportJob, table: er.Table) -> None:
    source, rows = job.source, table.rows
    if source.dim != table.dim:
        remedy = f"Choose another table than {job.table}."
        fail(source.path, f"vectors of {format_count(table.dim, 'number')}, as the table has", f"{source.dim}", remedy)
    if rows is not None and not source.has_ids and job.needed > rows:
        remedy = f"Choose a larger --rows, or another table than {job.table}."
        got = f"{job.needed - job.first}" + (f" from row {job.first} on" if job.first else "")
        fail(source.path, f"at most {format_count(rows, 'row')}, as the table has", got, remedy)


def _start(job: ImportJob, table: er.Table, kept: dict[str, Any] | None) -> int:
    """Return the number of source rows that the table has."""
    if kept is None:
        return 0
    if not _is_as_left(table, kept):
        fail(
            job.table,
            f"the table as the earlier import left it, at commit {kept.get('commit')}",
            f"commit {table.last_commit}, after {format_count(table.steps, 'step')}",
            CHANGED,
        )
    return min(kept["rows"], job.rows) if kept.get("table") else 0


def _fill(job: ImportJob, table: er.Table, start: int, repeated: int) -> int:
    """Assign rows from number `start` on. Return the number of repeated ids in a batch, or of repeated words in all."""
    if job.vocabulary is None:
        return _assign(job, table, None, start, repeated)
    vocabulary = er.Vocabulary(job.vocabulary, mode="r" if job.arguments.only_words else "w")
    try:
        repeated = _assign(job, table, vocabulary, start, repeated)
        if not job.arguments.into:
            _write_words(job.words, vocabulary)
        return repeated if job.arguments.only_words else job.rows - len(vocabulary)
    finally:
        close_uncommitted(vocabulary)


def _write_words(path: Path, vocabulary: er.Vocabulary) -> None:
    """Write the words of a vocabulary, one a line."""
    with closing(LineFile(part_of(path), 0)) as words:
        for first in range(0, len(vocabulary), PART_WORDS):
            ids = np.arange(first, min(first + PART_WORDS, len(vocabulary)))
            words.write(vocabulary.strings(ids, bytes).tolist())
        words.sync()
    os.replace(part_of(path), path)
    OS_SYSTEM.fsync_folder(str(path.parent))


def _assign(job: ImportJob, table: er.Table, words: er.Vocabulary | None, start: int, repeated: int) -> int:
    source, done, began = job.source, start, time.perf_counter()
    commit_rows = job.arguments.commit_every or max(1, COMMIT_BYTES // (4 * source.dim))
    row_megabytes, saved = source.path.stat().st_size / source.rows / 1e6, start
    with progress(f"import {source.path.name}", job.rows, start) as advance, ahead(source.batches(start)) as batches:
        while done < job.rows and (batch := next(batches, None)) is not None:
            batch = batch.head(job.rows - done)
            repeated += _assign_batch(job, table, words, batch, done)
            done += len(batch.ids)
            megabytes = row_megabytes * (done - start)
            advance(len(batch.ids), f"{format_number(megabytes / (time.perf_counter() - began))} MB/s")
            if done - saved >= commit_rows:
                _save(job, table, words, done, repeated)
                saved = done
    _save(job, table, words, done, repeated)
    return repeated


def _assign_batch(job: ImportJob, table: er.Table, words: er.Vocabulary | None, batch: RowBatch, done: int) -> int:
    if words is not None:
        ids = words.lookup(batch.words) if job.arguments.only_words else words.add(batch.words)
        batch = RowBatch(ids[ids >= 0], batch.vectors[ids >= 0])
    if job.first:
        batch = batch._replace(ids=batch.ids + job.first)
    ids, vectors = batch.ids, batch.vectors
    if job.source.has_ids or job.vocabulary is not None:
        ids, last = np.unique(batch.ids[::-1], return_index=True)
        vectors = batch.vectors[::-1][last]
    _check_range(job, table, batch, done)
    table.assign(ids, vectors)
    return len(batch.ids) - len(ids)


def _save(job: ImportJob, table: er.Table, words: er.Vocabulary | None, rows: int, repeated: int) -> None:
    """Make the imported rows durable: words first, so that each row has its word."""
    if words is not None and not job.arguments.only_words:
        words.commit(step=table.last_step)
    commit = table.commit(step=table.last_step)
    state = {"rows": rows, "table": table.uuid, "steps": table.steps, "commit": commit, "repeated": repeated}
    job.journal.save(state | {"vocabulary": str(job.vocabulary)})


@contextmanager
def ahead(items: Generator[Any]) -> Iterator[Iterator[Any]]:
    """Iterate over `items`, none of which is None, while a thread makes the next one."""
    with closing(items), ThreadPoolExecutor(1) as maker:
        yield prefetched(maker, items)


def _check_range(job: ImportJob, table: er.Table, batch: RowBatch, done: int) -> None:
    if table.rows is None:
        return
    outside = (batch.ids < 0) | (batch.ids >= table.rows)
    if outside.any():
        row = int(np.argmax(outside))
        place = job.source.place(done + row)
        fail(job.source.path, f"ids in [0, {table.rows})", f"{batch.ids[row]}", "Pass a larger --rows.", place)
