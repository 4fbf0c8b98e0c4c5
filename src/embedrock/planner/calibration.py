"""Steps of small tables: by what they take, the constants of the model of cost are found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from embedrock.initializers import Zeros
from embedrock.planner.cost import Taken, Work
from embedrock.planner.trial import QUIET, Batch, Pace, Trial
from embedrock.planner.zipf import bounded_zipf, scattered
from embedrock.rules import Adam
from embedrock.spec import Spec
from embedrock.store.runs import CRC_BYTES
from embedrock.table.table import Table
from embedrock.tiers.placing import memory_for

Say = Callable[[str], None]

ROUNDS, SECONDS = 12, 0.6  # of a run, at most
TRIES, PATIENCE_S = 3, 20  # of a run, while other programs use the machine; for so long in all
TOGETHER_IDS = 30_000  # of a round, about
FILLING = 300  # steps until a cache is full, at most
FILL_BYTES = 8 << 20  # of records that are made at once
CACHED_BYTES, DIRECT_BYTES = 20 << 20, 80 << 20  # of tables whose files are in the page cache, and are not
MANY_ROWS = 10**9  # of a table none of whose rows comes twice


class Run(NamedTuple):
    """Tables to step.

    Attributes:
        kind: where they are: "RAM"; "direct" and "cached", on disk, all rows trained before; "mixed": on disk, some
            new; "new": on disk, all new, as "new in RAM".
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
    def rows(self) -> int:
        """Rows of each table."""
        if self.kind.startswith("new"):
            return MANY_ROWS
        nbytes = CACHED_BYTES if self.kind == "cached" else DIRECT_BYTES
        return nbytes // (3 * 4 * self.dim * self.tables)


RUNS = (
    Run("RAM", 16, 512, 1.05),
    Run("RAM", 16, 8192, 1.05),
    Run("RAM", 16, 65_536, 0.9),
    Run("RAM", 64, 4096),
    Run("RAM", 64, 32_768, 1.2),
    Run("RAM", 256, 512, 1.05),
    Run("RAM", 256, 8192, 0.9),
    Run("RAM", 16, 1024, 1.05, tables=26),
    Run("new in RAM", 16, 8192),
    Run("new in RAM", 128, 2048),
    Run("direct", 16, 1024, 1.05),
    Run("direct", 16, 16_384, 0.9),
    Run("direct", 128, 1024),
    Run("direct", 128, 8192, 0.9),
    Run("cached", 16, 1024, 1.05),
    Run("cached", 16, 16_384, 0.9),
    Run("cached", 64, 2048, 1.05),
    Run("cached", 16, 512, 1.05, tables=26),
    Run("mixed", 16, 1024, 1.05),
    Run("mixed", 64, 4096, 1.1),
    Run("mixed", 128, 8192, 1.0),
    Run("mixed", 16, 1024, 1.1, tables=26),
    Run("new", 16, 4096),
    Run("new", 128, 2048),
)


def calibrate(folder: Path, say: Say) -> tuple[list[tuple[Work, Taken]], float]:
    """Return what steps had to do, with the seconds that they took, and the machine's `Pace` meanwhile."""
    found, pace, paces, end = [], Pace(), [], time.perf_counter() + PATIENCE_S
    for number, run in enumerate(RUNS):
        say(run.text)
        found.append(_quietest(run, folder / str(number), TRIES if time.perf_counter() < end else 1))
        paces.append(pace.seconds())
    return found, float(np.median(paces))


def _quietest(run: Run, folder: Path, most: int) -> tuple[Work, Taken]:
    """Measure again where other programs used the machine meanwhile, and return the run with the fewest of them."""
    tries = []
    while len(tries) < most and (not tries or tries[-1][0] > QUIET):
        tries.append(measure(run, folder / str(len(tries))))
    return min(tries)[1:]


def measure(run: Run, folder: Path) -> tuple[float, Work, Taken]:
    """Return the cores that others used, the mean work of a step for a table, and the seconds of that for one table."""
    folder.mkdir(parents=True)
    together = max(2, min(16, TOGETHER_IDS // (run.batch * run.tables)))
    with ExitStack() as stack:
        tables = [stack.enter_context(_table(run, folder / f"{k}.rock", k)) for k in range(run.tables)]
        trial = Trial(tables, _batches(run))
        trial.train(2 * together)
        trial.fill(FILLING)
        timing = trial.timed(ROUNDS, together, SECONDS)
        for table in tables:
            if table.is_on_disk:
                table.commit()
    counts = {name: float(np.mean([each[name] for each in timing.counts])) for name in timing.counts[0]}
    some = [ids for _, batch in zip(range(4), _batches(run), strict=False) for ids in batch]
    rows, spec = float(np.mean([len(np.unique(ids)) for ids in some])), tables[0].spec
    work = Work(
        positions=run.batch,
        rows=rows,
        dim=spec.dim,
        record_bytes=spec.record_bytes,
        new=counts["rows_touched"],
        on_disk=tables[0].is_on_disk,
        reads=counts.get("reads", 0.0),
        spilled=counts.get("spilled", 0.0),
        file_bytes=_file_bytes(run, counts.get("spilled", 0.0), timing.steps, spec.record_bytes + CRC_BYTES),
    )
    return timing.others, work, Taken(*(part / run.tables for part in timing.taken))


def _file_bytes(run: Run, spilled: float, steps: int, stride: int) -> float:
    """Return the bytes of the files that rows are read from: half of a log that grows, or the whole table."""
    return max(1.0, spilled * steps / 2 * stride) if run.kind in ("mixed", "new") else float(run.rows * stride)


def _table(run: Run, path: Path, seed: int) -> Table:
    rule, rows = Adam(), run.rows
    if run.kind in ("RAM", "direct", "cached"):
        table = Table(rows, run.dim, rule=rule, seed=seed, path=None if run.kind == "RAM" else path)
        _fill(table)
        if run.kind == "RAM":
            return table
        least = max(table.memory_for(3 * run.batch), table.memory_for(rows // 8))
        table.commit()
        table.compact()
        table.close()
        return Table(rows, run.dim, path=path, memory=least)
    if run.kind == "mixed":
        memory = memory_for(Spec(rows, run.dim, "float32", rule, Zeros(), 0), int(2.5 * run.batch))
        return Table(rows, run.dim, rule=rule, seed=seed, path=path, memory=memory)
    if run.kind == "new in RAM":
        return Table(rows, run.dim, rule=rule, seed=seed)
    return Table(rows, run.dim, rule=rule, seed=seed, path=path, memory="24MiB")


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
