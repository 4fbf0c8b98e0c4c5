"""`RowFetcher`: batches of programs that take rows as arguments, and return gradients of these rows.

A batch has each of its rows once, in a padded array of its table. A compiled program thus sees few different shapes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from embedrock.batch.ids import check_ids
from embedrock.errors import ArgumentError, GradientError, NonFiniteGradientError, counted
from embedrock.storage.backend import Pin
from embedrock.system import forks
from embedrock.system.buffers import buffers
from embedrock.table import batches, checks
from embedrock.table.batches import Batch, FeatureLayout
from embedrock.table.event_time import newest_event
from embedrock.table.missing import Missing
from embedrock.table.prefetch import bring, room_for
from embedrock.table.rows import TableState
from embedrock.table.stepping import StepRequest, refuse_nonfinite, step_all
from embedrock.table.table import Table, rows_of

LEAST_ROWS = 128  # of a padded array
_VERSION = attrgetter("version.now")


@dataclass(eq=False)
class FetchedRows:
    """A batch of a `RowFetcher`. Lists have an item for each table.

    Attributes:
        layouts: of the tables of each lock.
        shapes: of the arrays of ids.
        parts: the batch of each lock, and the batch of its rows, each once; none once it is read with `missing`.
        sizes: powers of two, of the padded arrays.
        rows: the padded arrays, float32 (size, dim): row k is that of unique id k, or zeros. The caller takes them.
        versions: of the tables when the rows were read: the number of their changes.
        is_stepped: the rows were stepped.
    """

    layouts: Sequence[FeatureLayout]
    shapes: list[list[tuple[int, ...]]]
    parts: list[tuple[Batch, Batch]]
    sizes: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    versions: Sequence[int] = ()
    is_stepped: bool = False

    @property
    def missing(self) -> Missing | None:
        return self.layouts[0].missing if self.layouts else None


class RowFetcher:
    """Plans, reads and steps batches of tables, which may have locks of their own. It is a `Prefetcher` of batches.

    One thread reads and steps. Another one may plan batches, and `bring` their rows, meanwhile.

    Args:
        tables: by name, each once.

    Attributes:
        tables: in their order.
        steps: number of steps it has made.
        sizes: of the padded arrays, one of each table: powers of two, which only grow.
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._names, self.tables, self.steps = list(tables), list(tables.values()), 0
        self._rows = list(map(rows_of, self.tables))
        for name, table, rows in zip(self._names, self.tables, self._rows, strict=True):
            if name and not rows.name and not table.name:
                rows.name_by(f"table {name!r}")
        self._counts, self._seen = Counter[str](), set[Any]()
        self.sizes, self._growing = [LEAST_ROWS] * len(self.tables), forks.lock(forks.LockRank.SECTION)
        self._layouts: dict[Missing | None, list[FeatureLayout]] = {}
        by_lock: dict[Any, list[int]] = {}
        for number, table in enumerate(self.tables):
            by_lock.setdefault(table.table_lock, []).append(number)
        self._by_lock = by_lock

    @property
    def subject(self) -> str:
        """The tables, for error messages."""
        return ", ".join(rows.subject for rows in self._rows[:4]) + ", ..." * (len(self._rows) > 4)

    # ---------------------------------------------------------------- plan and read

    def plan(self, ids: Sequence[Sequence[Any]], missing: Any = None) -> FetchedRows:
        """Return a batch whose rows are not read yet.

        Args:
            ids: for each table, one array or more of integers, of any shape.
            missing: the value of rows that are not there: see `Table.lookup`.

        Raises:
            IdError, IdTypeError: as for `Table.lookup`.
        """
        choice = Missing.of(missing, self.subject)
        layouts = self._layouts.get(choice)
        if layouts is None:
            of_locks = [(lock, [self.tables[k] for k in own]) for lock, own in self._by_lock.items()]
            layouts = [FeatureLayout(lock, tables, missing=choice) for lock, tables in of_locks]
            layouts = self._layouts.setdefault(choice, layouts)  # another thread may have made them
        flat = [own[0] if len(own) == 1 else _joined(own, table) for own, table in zip(ids, self.tables, strict=True)]
        each = zip(layouts, self._by_lock.values(), strict=True)
        planned = [batches.plan(layout, [flat[k] for k in numbers]) for layout, numbers in each]
        shapes = [[own.shape] for own in self._by_table([batch.ids for batch in planned])]
        shapes = [one if len(own) == 1 else list(map(np.shape, own)) for one, own in zip(shapes, ids, strict=True)]
        fetched = FetchedRows(layouts, shapes, [(batch, batches.each_once(batch)) for batch in planned])
        counts = [len(unique) for unique in self.unique(fetched)]
        grown = [1 << max(count - 1, 0).bit_length() for count in counts]
        with self._growing:
            fetched.sizes = self.sizes = list(map(max, self.sizes, grown))
        shapes = [(size, rows.spec.dim) for size, rows in zip(fetched.sizes, self._rows, strict=True)]
        fetched.rows = [buffers.empty(shape, np.float32) for shape in shapes]
        for count, rows in zip(counts, fetched.rows, strict=True):
            rows[count:] = 0.0  # sums over all rows are those over the batch's
        return fetched

    def unique(self, fetched: FetchedRows) -> list[np.ndarray]:
        """Return the unique ids of each table, int64 (n,), in the order of its rows."""
        return self._by_table([once.ids for _, once in fetched.parts])

    def positions(self, fetched: FetchedRows) -> list[list[np.ndarray]]:
        """Return the row of each id, int32 of the shapes of the ids, for each table."""
        found: list[list[np.ndarray]] = []
        for batch, _ in fetched.parts:
            own: dict[int, np.ndarray] = {}
            for part in batch.parts:
                for k, (number, start, stop) in enumerate(part.spans(part.positions.positions)):
                    first, rows = int(part.plan.rows[k]), part.plan.inverse[start:stop]
                    own[number] = rows - np.int32(first) if first else rows
            found.append([own[number] for number in range(len(own))])
        return [_cut(flat, shapes) for flat, shapes in zip(self._by_table(found), fetched.shapes, strict=True)]

    def _by_table(self, of_locks: Sequence[Sequence[Any]]) -> list[Any]:
        numbered = zip(self._by_lock.values(), of_locks, strict=True)
        found = {k: each for numbers, own in numbered for k, each in zip(numbers, own, strict=True)}
        return [found[k] for k in range(len(self.tables))]

    def fetch(self, fetched: FetchedRows) -> list[np.ndarray]:
        """Read the rows of a planned batch, and return their padded arrays, which nothing writes to any more."""
        self._read(fetched)
        signature = tuple(map(tuple, fetched.shapes)), tuple(fetched.sizes)
        if signature not in self._seen:
            self._counts["compilations_by_size" if signature[0] in self._seen else "compilations_by_shape"] += 1
            self._seen |= {signature, signature[0]}
        ids = sum([math.prod(shape) for shapes in fetched.shapes for shape in shapes])
        self._counts["bytes_to_devices"] += sum([rows.nbytes for rows in fetched.rows]) + 4 * ids
        rows, fetched.rows = fetched.rows, []
        if fetched.missing:  # it is only read: its rows may be forgotten
            fetched.parts = []
        return rows

    def _read(self, fetched: FetchedRows) -> None:
        unique = self.unique(fetched)
        outs = [rows[: len(own)] for rows, own in zip(fetched.rows, unique, strict=True)]
        fetched.versions = list(map(_VERSION, self._rows))
        fetched.parts = [
            batches.read_once(batch, [outs[k] for k in numbers])
            for numbers, (batch, _) in zip(self._by_lock.values(), fetched.parts, strict=True)
        ]

    # ---------------------------------------------------------------- ahead of time

    def bring(self, ids: Callable[[], FetchedRows]) -> Pin:
        """Load the rows of a batch from disk, where `fetch` then finds them. `ids` returns the planned batch."""
        fetched, pins = ids(), list[Pin]()
        try:
            for layout, (_, once) in zip(fetched.layouts, fetched.parts, strict=True):
                pins.append(bring(layout.table_lock, dict(zip(map(rows_of, layout.tables), once.ids, strict=True))))
        except BaseException:
            Pin(pins).release()
            raise
        return Pin(pins)

    def room_for(self, batches: Sequence[Callable[[], FetchedRows]]) -> tuple[int, int]:
        """Return the number of different rows in all batches, and the `memory` that holds them."""
        unique = [self.unique(planned()) for planned in batches]
        of_locks = ([{self._rows[k]: own[k] for k in numbers} for own in unique] for numbers in self._by_lock.values())
        found = list(map(room_for, of_locks))
        return sum(rows for rows, _ in found), max(memory for _, memory in found)

    # ---------------------------------------------------------------- sum and step

    def step(
        self,
        fetched: FetchedRows,
        values: Sequence[Any],
        grads: Sequence[Sequence[Any]],
        is_finite: bool = True,
        by_position: bool = False,
        lr: Sequence[Any] | None = None,
        time: Any = None,
    ) -> None:
        """Step all tables of a batch, or none of them.

        Args:
            fetched: the batch.
            values: the rows as they were read, in padded arrays of any framework. Used if a table has changed since.
            grads: for each table, floats (size, dim), one gradient for each row of its padded array; no array: the
                table is not stepped.
            is_finite: no gradient of the caller's step is NaN or Inf, those of dense weights included.
            by_position: gradients are those of each array of ids, ``ids.shape + (dim,)``, and are summed here.
            lr: learning rate of each table, or a function of its steps that returns it; None: its rule's.
            time: of the events: see `Table.update`.

        Raises:
            NonFiniteGradientError: `is_finite` is False, and a table has ``on_nonfinite="raise"``. Or it is True, and a
                gradient has NaN or Inf.
            ArgumentError: the batch is another fetcher's, or was stepped already; or rows have changed since they were
                read.
            GradientError, MemoryBudgetError: as for `Table.update`.
        """
        self._check(fetched, values)
        shapes = fetched.shapes if by_position else [[(size,)] for size in fetched.sizes]
        given = [_floats(*each) for each in zip(grads, shapes, self._rows, strict=True)]
        nbytes = sum([own.nbytes for own in given if own is not None])
        if not by_position:
            pairs = zip(given, self.unique(fetched), strict=True)
            given = [None if own is None else own[: len(unique)] for own, unique in pairs]
        of_rows = zip(self._rows, lr or [None] * len(given), strict=True)
        rates = [checks.rule_of_step(rows.spec, _rate(rate, rows.steps), {}, rows.subject) for rows, rate in of_rows]
        rules, newest = dict(zip(self.tables, rates, strict=True)), newest_event(time, self._rows, self.subject)
        due = {table for table, grad in zip(self.tables, given, strict=True) if grad is not None}
        requests = []
        for numbers, (batch, once) in zip(self._by_lock.values(), fetched.parts, strict=True):
            blocks = batches.sum_blocks(batch if by_position else once, [given[k] for k in numbers])
            blocks = [block for block in blocks if due.issuperset(block[0])]
            requests += batches.requests_of(blocks, rules, newest)
        _check_finite(requests, is_finite)
        if is_finite:
            step_all(requests)
            self.steps += 1
        self._counts["bytes_from_devices"] += nbytes
        fetched.is_stepped = True

    def _check(self, fetched: FetchedRows, values: Sequence[Any]) -> None:
        """Raise `ArgumentError` unless the rows of a batch are those from which its gradients follow."""
        if fetched.layouts is not self._layouts.get(fetched.missing):
            raise ArgumentError(
                f"a batch of {self.subject} must be fetched by the object that steps it: this one was fetched by "
                "another object, for these or for other tables. Nothing has changed. Fetch its ids again."
            )
        if fetched.missing:
            raise ArgumentError(
                f"a batch of {self.subject} that is stepped must have the rows themselves: this one was fetched with "
                f"missing={fetched.missing}. Fetch it without `missing`."
            )
        if fetched.is_stepped:
            raise ArgumentError(
                f"a batch of {self.subject} is stepped once: this one was stepped already. Nothing has changed. Fetch "
                "its ids again, and compute the gradients from these rows."
            )
        if fetched.versions != list(map(_VERSION, self._rows)):
            self._check_values(fetched, list(map(np.asarray, values)))

    def _check_values(self, fetched: FetchedRows, values: Sequence[np.ndarray]) -> None:
        """Raise `ArgumentError` unless the rows of a batch have the values that were read."""
        present = copy.copy(fetched)
        present.rows = [np.empty_like(each) for each in values]
        self._read(present)
        for rows, own, now, then in zip(self._rows, self.unique(fetched), present.rows, values, strict=True):
            changed = np.count_nonzero((now.view(np.int32) != then.view(np.int32))[: len(own)].any(axis=1))
            if changed:
                raise ArgumentError(
                    f"rows of {rows.subject} have changed since this batch was fetched, {changed} of {len(own)}: its "
                    "gradients are those of older rows. Nothing was stepped. Fetch a batch, or take it from prefetch, "
                    "after the step before it."
                )
        fetched.parts = present.parts  # rows may have been frozen since

    def stats(self) -> dict[str, float]:
        """Return statistics: bytes moved, the padded size of each table, and compilations of a step by their cause."""
        counted = "compilations_by_shape", "compilations_by_size", "bytes_to_devices", "bytes_from_devices"
        sizes = {f"{name}/size".lstrip("/"): size for name, size in zip(self._names, self.sizes, strict=True)}
        return {"steps": self.steps, **{name: self._counts[name] for name in counted}, **sizes}


def _joined(ids: Sequence[Any], table: Table) -> np.ndarray:
    """Return several arrays of ids of a table, flat. A check of each names positions in it."""
    checked = [check_ids(own, table.rows, table.subject).reshape(-1) for own in ids]
    return np.concatenate([*checked, np.empty(0, np.int64)])


def _cut(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the arrays of these shapes that lie one after the other."""
    if len(shapes) == 1:
        return [flat.reshape(shapes[0])]
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    return [flat[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


def _floats(grads: Sequence[Any], shapes: Sequence[tuple[int, ...]], rows: TableState) -> np.ndarray | None:
    """Return gradients of arrays of these shapes, float32 (n, dim); None without any."""
    if not grads:
        return None
    if len(grads) != len(shapes):
        raise GradientError(
            f"`grads` of {rows.subject} must have an array for each of its {counted(len(shapes), 'array')} of ids, or "
            f"none: got {len(grads)}. Pass zeros for ids without gradients."
        )
    of_ids = zip(grads, shapes, strict=True)
    checked = [checks.floats("grads", own, (*shape, rows.spec.dim), rows.subject) for own, shape in of_ids]
    return checked[0] if len(checked) == 1 else np.concatenate(checked)


def _rate(lr: Any, steps: int) -> Any:
    rate: Any = lr(steps) if callable(lr) else lr
    return float(rate) if getattr(rate, "ndim", 1) == 0 else rate  # scalars of frameworks, as schedules return them


def _check_finite(requests: Sequence[StepRequest], is_finite: bool) -> None:
    """Raise the error of a step that is not finite, or count it in tables that skip such steps."""
    if is_finite and all(each.grads.is_finite for each in requests):
        return
    alone = [own for each in requests for own in each.split()]
    strict = [each for each in alone if is_finite or each.tables[0].on_nonfinite == "raise"]
    wrong = [each for each in strict if not each.grads.is_finite]
    if is_finite:
        subject = wrong[0].tables[0].subject
        error = checks.nonfinite(wrong[0].grads, subject)
        raise NonFiniteGradientError(
            "gradients must all be finite, as this step said of them: got NaN or Inf in those of "
            f"{counted(error.count, 'row')} of {subject}, first ids {error.ids.tolist()}. No row has changed, but "
            "dense weights may have. Decide on the loss and on all gradients together, of rows and of dense weights.",
            error.count,
            error.ids,
        )
    if strict and not wrong:
        raise NonFiniteGradientError(
            "gradients must be finite: got NaN or Inf in those of dense weights or of other rows, or in the loss. "
            f"Those of rows of {strict[0].tables[0].subject} are finite. No row has changed. Lower the learning rate, "
            'clip or scale the gradients, or pass on_nonfinite="skip" to leave such steps out.',
            0,
            np.empty(0, np.int64),
        )
    refuse_nonfinite(wrong or alone)
