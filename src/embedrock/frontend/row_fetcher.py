"""`RowFetcher`: batches of programs that take rows as arguments, and return gradients of these rows.

A batch has each of its rows once, in a padded array of its table. A compiled program thus sees few different shapes.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from embedrock.batch.ids import check_ids
from embedrock.errors import ArgumentError, GradientError, NonFiniteGradientError, OutdatedBatchError, counted
from embedrock.optimizers import Rule
from embedrock.storage.backend import Pin
from embedrock.system import forks
from embedrock.system.buffers import buffers
from embedrock.system.scopes import on_failure
from embedrock.table import batches, checks
from embedrock.table.batches import Batch, FeatureLayout
from embedrock.table.event_time import newest_event
from embedrock.table.missing import Missing
from embedrock.table.prefetch import bring, room_for
from embedrock.table.rows import TableState
from embedrock.table.stepping import StepRequest, refuse_nonfinite, step_all
from embedrock.table.table import Table, rows_of

LEAST_ROWS, MOST_LAYOUTS = 128, 8  # of a padded array; of values of `missing`
_VERSION = attrgetter("version.now")


@dataclass(eq=False)
class FetchedRows:
    """A batch of a `RowFetcher`. Lists have an item for each table."""

    fetcher: RowFetcher
    missing: Missing | None  # the value of rows that are not there
    shapes: list[list[tuple[int, ...]]]  # of the arrays of ids
    # The batch of each lock, and the batch of its rows, each once; none once it is read with `missing`.
    parts: list[tuple[Batch, Batch]]
    unique: list[np.ndarray]  # ids of the rows, int64 (n,)
    sizes: list[int] = field(default_factory=list)  # powers of two, of the padded arrays
    # The padded arrays, float32 (size, dim): row k is that of unique id k, or zeros. The caller takes them.
    rows: list[np.ndarray] = field(default_factory=list)
    versions: Sequence[int] = ()  # of the tables when the rows were read: the number of their changes
    is_stepped: bool = False


class RowFetcher:
    """Plans, reads and steps batches of tables, which may have locks of their own. It is a `Prefetcher` of batches.

    One thread reads and steps. Another one may plan batches, and `bring` their rows, meanwhile.

    Args:
        tables: by name, each once.

    Attributes:
        tables: in their order.
        sizes: of the padded arrays, one of each table: powers of two, which only grow.
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._names, self.tables = list(tables), list(tables.values())
        self._rows = list(map(rows_of, self.tables))
        for name, table, rows in zip(self._names, self.tables, self._rows, strict=True):
            if name and not rows.name and not table.name:
                rows.name_by(f"table {name!r}")
        self._counts, self._seen = Counter[str](), set[Any]()
        self.sizes, self._growing = [LEAST_ROWS] * len(self.tables), forks.lock(forks.LockRank.SECTION)
        by_lock: dict[Any, list[int]] = {}
        for number, table in enumerate(self.tables):
            by_lock.setdefault(table.table_lock, []).append(number)
        self._numbers = list(by_lock.values())  # of the tables of each lock
        made = [functools.partial(FeatureLayout, lock, [self.tables[k] for k in own]) for lock, own in by_lock.items()]
        self._layouts = functools.lru_cache(MOST_LAYOUTS)(lambda missing: [make(missing=missing) for make in made])

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
        flat = [own[0] if len(own) == 1 else _joined(own, table) for own, table in zip(ids, self.tables, strict=True)]
        each = zip(self._layouts(choice), self._numbers, strict=True)
        planned = [batches.plan(layout, [flat[k] for k in numbers]) for layout, numbers in each]
        parts = [(batch, batches.each_once(batch)) for batch in planned]
        shapes, unique = [list(map(np.shape, own)) for own in ids], self._by_table([once.ids for _, once in parts])
        fetched, counts = FetchedRows(self, choice, shapes, parts, unique), list(map(len, unique))
        grown = [1 << max(count - 1, 0).bit_length() for count in counts]
        with self._growing:
            fetched.sizes = self.sizes = list(map(max, self.sizes, grown))
        each = zip(fetched.sizes, self._rows, strict=True)
        fetched.rows = [buffers.empty((size, rows.spec.dim), np.float32) for size, rows in each]
        for count, rows in zip(counts, fetched.rows, strict=True):
            rows[count:] = 0.0  # sums over all rows are those over the batch's
        return fetched

    def positions(self, fetched: FetchedRows) -> list[list[np.ndarray]]:
        """Return the row of each id, int32 of the shapes of the ids, for each table."""
        found = self._by_table([batches.rows_of_ids(batch) for batch, _ in fetched.parts])
        return [_cut(flat, shapes) for flat, shapes in zip(found, fetched.shapes, strict=True)]

    def _by_table(self, of_locks: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        pairs = zip(self._numbers, of_locks, strict=True)
        found = {k: own for numbers, each in pairs for k, own in zip(numbers, each, strict=True)}
        return [found[k] for k in range(len(found))]

    def read(self, fetched: FetchedRows) -> list[np.ndarray]:
        """Read the rows of a planned batch, and return their padded arrays, which nothing writes to any more."""
        self._read_rows(fetched)
        signature = tuple(map(tuple, fetched.shapes)), tuple(fetched.sizes)
        if signature not in self._seen:
            self._counts["compilations_by_size" if signature[0] in self._seen else "compilations_by_shape"] += 1
            self._seen |= {signature, signature[0]}
        ids = sum([math.prod(shape) for shapes in fetched.shapes for shape in shapes])
        self._counts["bytes_to_devices"] += sum([rows.nbytes for rows in fetched.rows]) + 4 * ids
        rows, fetched.rows = fetched.rows, []
        if fetched.missing:  # it is only read: its rows may be forgotten
            fetched.parts, fetched.unique = [], []
        return rows

    def _read_rows(self, fetched: FetchedRows) -> None:
        outs = [rows[: len(own)] for rows, own in zip(fetched.rows, fetched.unique, strict=True)]
        fetched.versions = list(map(_VERSION, self._rows))
        fetched.parts = [
            batches.read_once(*part, [outs[k] for k in numbers])
            for numbers, part in zip(self._numbers, fetched.parts, strict=True)
        ]

    # ---------------------------------------------------------------- ahead of time

    def bring(self, ids: Callable[[], FetchedRows]) -> Pin:
        """Load the rows of a batch from disk, where `read` then finds them. `ids` returns the planned batch."""
        fetched, pins = ids(), list[Pin]()
        with on_failure(lambda: Pin(pins).release()):
            for numbers, (batch, once) in zip(self._numbers, fetched.parts, strict=True):
                wanted = dict(zip([self._rows[k] for k in numbers], once.ids, strict=True))
                pins.append(bring(batch.layout.table_lock, wanted))
        return Pin(pins)

    def room_for(self, batches: Sequence[Callable[[], FetchedRows]]) -> tuple[int, int]:
        """Return the number of different rows in all batches, and the `memory` that holds them."""
        unique = [planned().unique for planned in batches]
        of_locks = ([{self._rows[k]: own[k] for k in numbers} for own in unique] for numbers in self._numbers)
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
            ArgumentError: the batch is another fetcher's, or was stepped already.
            OutdatedBatchError: rows have changed since they were read.
            GradientError, MemoryBudgetError: as for `Table.update`.
        """
        self._check(fetched, values)
        shapes = fetched.shapes if by_position else [[(size,)] for size in fetched.sizes]
        given = [_floats(*each) for each in zip(grads, shapes, self._rows, strict=True)]
        nbytes = sum([own.nbytes for own in given if own is not None])
        if not by_position:
            pairs = zip(given, fetched.unique, strict=True)
            given = [None if own is None else own[: len(unique)] for own, unique in pairs]
        rules, requests = dict[Table, Rule](), list[StepRequest]()
        for table, rows, rate, own in zip(self.tables, self._rows, lr or [None] * len(given), given, strict=True):
            if own is not None:
                rules[table] = checks.rule_of_step(rows.spec, _rate(rate, rows.steps), {}, rows.subject)
        newest = newest_event(time, map(rows_of, rules), self.subject)
        for numbers, (batch, once) in zip(self._numbers, fetched.parts, strict=True):
            blocks = batches.sum_blocks(batch if by_position else once, [given[k] for k in numbers])
            requests += batches.requests_of([each for each in blocks if rules.keys() >= set(each[0])], rules, newest)
        _check_finite(requests, is_finite)
        if is_finite:
            step_all(requests)
            self._counts["steps"] += 1
        self._counts["bytes_from_devices"] += nbytes
        fetched.is_stepped = True

    def _check(self, fetched: FetchedRows, values: Sequence[Any]) -> None:
        """Raise `ArgumentError` unless the rows of a batch are those from which its gradients follow."""
        if fetched.fetcher is not self:
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
        """Raise `OutdatedBatchError` unless the rows of a batch have the values that were read."""
        present = copy.copy(fetched)
        present.rows = [np.empty(each.shape, np.float32) for each in values]
        self._read_rows(present)
        for rows, own, now, then in zip(self._rows, fetched.unique, present.rows, values, strict=True):
            changed = np.count_nonzero((now.view(np.int32) != then.view(np.int32))[: len(own)].any(axis=1))
            if changed:
                raise OutdatedBatchError(
                    f"rows of {rows.subject} have changed since this batch was fetched, {changed} of {len(own)}: its "
                    "gradients are those of older rows. Nothing was stepped. Fetch a batch, or take it from prefetch, "
                    "after the step before it."
                )
        fetched.parts = present.parts  # rows may have been frozen since

    def stats(self) -> dict[str, float]:
        """Return statistics: bytes moved, the padded size of each table, and compilations of a step by their cause."""
        counted = "steps", "compilations_by_shape", "compilations_by_size", "bytes_to_devices", "bytes_from_devices"
        sizes = {f"{name}/size".lstrip("/"): size for name, size in zip(self._names, self.sizes, strict=True)}
        return {**{name: self._counts[name] for name in counted}, **sizes}


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
