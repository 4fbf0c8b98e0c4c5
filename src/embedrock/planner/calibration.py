"""Steps of small tables: by what they take, the constants of the model of cost are found."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from embedrock.initializers import Zeros
from embedrock.planner.cost import Runs, Taken, Work, run_bytes
from embedrock.planner.peak import grown
from embedrock.planner.trial import QUIET, Batch, Trial, touch_memory
from embedrock.planner.zipf import bounded_zipf, expected_misses, scattered
from embedrock.rules import Adam
from embedrock.spec import Spec
from embedrock.store.runs import CRC_BYTES
from embedrock.table.table import Table
from embedrock.tiers.placing import memory_for

Say = Callable[[str], None]

ROUNDS, SECONDS = 60, 0.25  # of a run, at most
TRIES, PATIENCE_S = 3, 10  # of a run, while other programs use the machine; for so long in all
TOGETHER_IDS = 30_000  # of a round, about
BEGINNING = 16  # steps of new tables before those that count
FILLING = 1000  # steps until a cache is full, at most
FILL_BYTES = 8 << 20  # of records that are made at once
CACHED_BYTES, LARGE_BYTES = 20 << 20, 48 << 20  # of tables whose files are in the page cache, and of larger ones
LONG_BYTES = 48 << 20  # of a log that is not
SMALL_BYTES = 6 << 20  # of records of a small table
NEW_ROWS = 1 << 20  # of a new table, or of several
TOUCHED_BYTES = 512 << 20  # before the first run: as much as the largest one needs
COUNTS = "rows_touched", "reads", "spilled"
HELD = 2.3  # batches that a small cache holds


class Run(NamedTuple):
    """Tables to step.

    Attributes:
        kind: "RAM": they are there, all rows were trained before. "new": they are there, and begin;
            "small": so do these, whose slots are their ids. "roomy": on disk,
            begin, and no row has to leave. "mixed": on disk, begin, with small caches and a log that the page cache
            has; "long": the same, but it has grown larger. "cached" and "direct": on disk, all rows were trained
            before, and the page cache has the files, of a base, or has not the one, of a log.
        dim: of rows.
        batch: ids.
        zipf: exponent of their popularity.
        tables: alike.
    """

    kind: str
    dim: int
    batch: int
    zipf: float = 0.0
    tables: int = 1

    @property
    def text(self) -> str:
        """What it is, for people."""
        return f"steps of {self.tables} x {self.batch} ids of {self.dim}, {self.kind}"

    @property
    def begins(self) -> bool:
        """Whether the tables are new."""
        return self.kind in ("new", "small", "roomy", "mixed", "long")

    @property
    def rows(self) -> int:
        """Rows of each table."""
        if self.kind == "small":
            return SMALL_BYTES // (3 * 4 * self.dim)
        if self.begins:
            return NEW_ROWS // self.tables
        nbytes = CACHED_BYTES if self.kind == "cached" else LARGE_BYTES
        return nbytes // (3 * 4 * self.dim * self.tables)


RUNS = (
    Run("RAM", 16, 8192, 1.05),
    Run("RAM", 16, 65_536, 0.9),
    Run("RAM", 64, 32_768, 1.2),
    Run("RAM", 256, 512, 1.05),
    Run("RAM", 256, 8192, 0.9),
    Run("RAM", 256, 2048, 1.2),
    Run("RAM", 32, 1024, 1.2),
    Run("RAM", 16, 1024, 1.05, tables=26),
    Run("RAM", 32, 16_384, 1.2, tables=12),
    Run("RAM", 128, 1024, 0.9, tables=12),
    Run("new", 16, 1024, 1.2),
    Run("new", 16, 2048, 1.0),
    Run("new", 16, 8192, 1.2),
    Run("new", 32, 16_384, 1.1),
    Run("new", 64, 4096, 0.9),
    Run("new", 256, 2048, 1.2),
    Run("new", 256, 4096, 1.1),
    Run("new", 64, 512, 1.2),
    Run("new", 32, 2048, 1.1, tables=12),
    Run("new", 128, 512, 1.2, tables=12),
    Run("small", 16, 4096, 0.9, tables=26),
    Run("small", 128, 512, 1.0, tables=12),
    Run("small", 128, 1024, 0.9, tables=26),
    Run("small", 256, 1024, 1.1, tables=12),
    Run("small", 64, 2048, 1.0),
    Run("roomy", 16, 1024, 1.0),
    Run("roomy", 64, 512, 1.2),
    Run("roomy", 32, 8192, 1.2),
    Run("roomy", 128, 1024, 1.2),
    Run("roomy", 16, 512, 1.0, tables=26),
    Run("roomy", 64, 2048, 1.2, tables=12),
    Run("mixed", 16, 1024, 1.05),
    Run("mixed", 16, 8192, 0.9),
    Run("mixed", 32, 16_384, 1.2),
    Run("mixed", 64, 1024, 1.2),
    Run("mixed", 128, 1024, 1.1),
    Run("mixed", 256, 512, 1.2),
    Run("mixed", 16, 2048, 1.1, tables=26),
    Run("mixed", 32, 4096, 1.2, tables=12),
    Run("mixed", 128, 1024, 1.2, tables=12),
    Run("mixed", 256, 512, 1.1, tables=26),
    Run("long", 64, 16_384, 1.1),
    Run("long", 128, 1024, 1.1),
    Run("long", 256, 1024, 1.0),
    Run("long", 128, 16_384, 0.9),
    Run("cached", 64, 256, 1.2),
    Run("cached", 16, 256, 1.2),
    Run("cached", 16, 1024, 1.05),
    Run("cached", 16, 16_384, 0.9),
    Run("cached", 64, 2048, 1.05),
    Run("cached", 16, 512, 1.05, tables=12),
    Run("cached", 64, 256, 0.9, tables=12),
    Run("direct", 64, 1024, 1.05),
    Run("direct", 128, 4096, 0.9),
    Run("direct", 256, 512, 0.8),
)


class Found(NamedTuple):
    """What was measured of a run.

    Attributes:
        others: cores that other programs used.
        work: the mean work of a step for a table.
        taken: seconds of that.
    """

    others: float
    work: Work
    taken: Taken


def calibrate(folder: Path, say: Say) -> Runs:
    """Return what steps had to do, with the seconds that they took."""
    touch_memory(TOUCHED_BYTES)
    found, end = list[tuple[Work, Taken]](), time.perf_counter() + PATIENCE_S
    for run in RUNS:
        say(run.text)
        one = _quietest(run, folder, TRIES if time.perf_counter() < end else 1)
        found.append((one.work, one.taken))
    return found


def _quietest(run: Run, folder: Path, most: int) -> Found:
    """Measure again where other programs used the machine meanwhile, and return the run with the fewest of them."""
    tries = list[Found]()
    while len(tries) < most and (not tries or tries[-1].others > QUIET):
        tries.append(measure(run, folder))
    return min(tries, key=lambda one: one.others)


def measure(run: Run, scratch: Path) -> Found:
    """Return what a run takes; its files are gone then."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        return _measured(run, Path(folder))


def _measured(run: Run, folder: Path) -> Found:
    together = max(2, min(16, TOGETHER_IDS // (run.batch * run.tables)))
    with ExitStack() as stack:
        tables = [stack.enter_context(_table(run, folder / f"{k}.rock", k)) for k in range(run.tables)]
        trial = Trial(tables, _batches(run))
        trial.train(BEGINNING if run.begins else 2 * together)
        if not run.begins:
            trial.fill(FILLING)
        if run.kind == "long":
            while _logged(tables) < LONG_BYTES:
                trial.train(together)
        before, logged = [table.stats()["rows"] for table in tables], _logged(tables)
        rounds, rate = ROUNDS, logged / BEGINNING
        if run.kind == "mixed":
            rounds = int(np.clip((CACHED_BYTES - logged) / max(rate * together, 1), 3, ROUNDS))
        timing = trial.timed(rounds, together, SECONDS)
        seen = float(np.mean([*before, *(table.stats()["rows"] for table in tables)]))
        stats = tables[0].stats()
        memory = int(stats["budget_bytes"]) if tables[0].is_on_disk else None
        for table in tables:
            if table.is_on_disk:
                table.commit()
    counts = {name: float(np.mean([each.get(name, 0.0) for each in timing.counts])) for name in COUNTS}
    some = [ids for _, batch in zip(range(4), _batches(run), strict=False) for ids in batch]
    rows, spec, new = float(np.mean([len(np.unique(ids)) for ids in some])), tables[0].spec, counts["rows_touched"]
    stored = max(1.0, logged / run.tables) if run.begins else float(run.rows * (spec.record_bytes + CRC_BYTES))
    work = Work(
        positions=run.batch,
        rows=rows,
        dim=spec.dim,
        record_bytes=spec.record_bytes,
        new=new,
        on_disk=tables[0].is_on_disk,
        reads=counts["reads"],
        spilled=counts["spilled"],
        file_bytes=stored,
        run_bytes=run_bytes(run.rows, spec.record_bytes) if run.kind == "cached" else stored,
        is_written=run.begins,
        grown_bytes=grown(spec, memory, seen, new, counts["spilled"]),
        tables=run.tables,
        batch_bytes=run.tables * run.batch * run.dim * 4,
        slots=int(stats.get("cache_slots", 0)),
    )
    return Found(timing.others, work, Taken(*(part / run.tables for part in timing.taken)))


def _logged(tables: list[Table]) -> float:
    """Return the bytes of rows that have left the caches of tables."""
    return sum(table.stats().get("spilled", 0.0) * (table.spec.record_bytes + CRC_BYTES) for table in tables)


def _table(run: Run, path: Path, seed: int) -> Table:
    rule, rows = Adam(), run.rows
    if run.kind in ("RAM", "new", "small"):
        table = Table(rows, run.dim, rule=rule, seed=seed)
        if run.kind == "RAM":
            _fill(table)
        return table
    spec = Spec(rows, run.dim, "float32", rule, Zeros(), 0)
    if run.begins:
        used = expected_misses(rows, run.zipf, run.batch, 0)
        memory = memory_for(spec, rows // 2 if run.kind == "roomy" else int(HELD * used))
        return Table(rows, run.dim, rule=rule, seed=seed, path=path, memory=memory)
    with Table(rows, run.dim, rule=rule, seed=seed, path=path) as table:
        _fill(table)
        table.commit()
        if run.kind == "cached":
            table.compact()
    least = max(memory_for(spec, 3 * run.batch), memory_for(spec, rows // 8))
    return Table(rows, run.dim, path=path, memory=least)


def _fill(table: Table) -> None:
    ids = np.arange(table.rows or 0)
    for part in np.array_split(ids, max(1, len(ids) * table.spec.record_bytes // FILL_BYTES)):
        table.update(part, np.ones((len(part), table.dim), np.float32))


def _batches(run: Run) -> Iterator[Batch]:
    random = np.random.default_rng(0)
    while True:
        yield [
            scattered(bounded_zipf(random.random(run.batch), run.rows, run.zipf), run.rows) for _ in range(run.tables)
        ]
