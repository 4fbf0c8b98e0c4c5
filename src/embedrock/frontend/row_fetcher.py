"""`RowFetcher`: batches of programs that take rows as arguments, and return gradients of these rows.

A batch has each of its rows once, in a padded array of its table. A compiled program thus sees few different shapes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embedrock.batch.ids import check_ids
from embedrock.batch.plan import make_plan
from embedrock.errors import ArgumentError, NonFiniteGradientError
from embedrock.storage.backend import Pin
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
KNOWN_STEPS = 16  # newest steps whose rows are known


@dataclass(eq=False)
class FetchedRows:
    """A batch of a `RowFetcher`. Lists have an item for each table.

    Attributes:
        layouts: of the tables of each lock.
        ids: int64 of any shape, as they were given.
        parts: the batch of each lock, and the batch of its rows, each once.
        sizes: powers of two, of the padded arrays.
        rows: the padded arrays, float32 (size, dim): row k is that of unique id k, or zeros. The caller takes them.
        step: number of steps of the fetcher when the rows were read; -1: they are not read yet.
        others: number of changes of each table by others than the fetcher, when the rows were read.
        is_stepped: the rows were stepped.
    """

    layouts: Sequence[FeatureLayout]
    ids: Sequence[np.ndarray]
    parts: list[tuple[Batch, Batch]]
    sizes: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    step: int = -1
    others: Sequence[int] = ()
    is_stepped: bool = False

    @property
    def missing(self) -> Missing | None:
        return self.layouts[0].missing if self.layouts else None


class _PinnedRows(Pin):
    """Pins of rows that were read already. So prefetching does not expect a lookup of them."""

    def looked_up(self) -> None:
        return None


class RowFetcher:
    """Plans, reads and steps batches of tables, which may have locks of their own. It is a `Prefetcher` of batches.

    One thread plans and steps. Another one may `bring` planned batches meanwhile.

    Args:
        tables: each once.

    Attributes:
        steps: number of steps it has made.
        sizes: of the padded arrays, one of each table: powers of two, which only grow.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables, self.steps = tuple(tables), 0
        self._rows = [rows_of(table) for table in tables]
        self.sizes = [LEAST_ROWS] * len(self.tables)
        self._stepped = deque[list[np.ndarray]](maxlen=KNOWN_STEPS)
        self._steps_of = [0] * len(self.tables)  # steps of each table by this fetcher
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

    def plan(self, ids: Sequence[Any], missing: Any = None) -> FetchedRows:
        """Return a batch of ids of each table, whose rows are not read yet.

        Args:
            ids: for each table, integers of any shape.
            missing: the value of rows that are not there: see `Table.lookup`.

        Raises:
            IdError, IdTypeError: as for `Table.lookup`.
        """
        choice = Missing.of(missing, self.subject)
        layouts = self._layouts.get(choice)
        if layouts is None:
            of_locks = [(lock, [self.tables[k] for k in own]) for lock, own in self._by_lock.items()]
            layouts = [FeatureLayout(lock, tables, missing=choice) for lock, tables in of_locks]
            self._layouts[choice] = layouts
        checked = [check_ids(own, table.rows, table.subject) for own, table in zip(ids, self.tables, strict=True)]
        parts = []
        for layout, numbers in zip(layouts, self._by_lock.values(), strict=True):
            batch = batches.plan(layout, [checked[k] for k in numbers])
            parts.append((batch, batches.each_once(batch)))
        fetched = FetchedRows(layouts, checked, parts)
        counts = [len(unique) for unique in self.unique(fetched)]
        grown = [1 << max(count - 1, 0).bit_length() for count in counts]
        fetched.sizes = self.sizes = list(map(max, self.sizes, grown))
        shapes = [(size, table.dim) for size, table in zip(fetched.sizes, self.tables, strict=True)]
        fetched.rows = [buffers.empty(shape, np.float32) for shape in shapes]
        for count, rows in zip(counts, fetched.rows, strict=True):
            rows[count:] = 0.0  # sums over all rows are those over the batch's
        return fetched

    def unique(self, fetched: FetchedRows) -> list[np.ndarray]:
        """Return the unique ids of each table, int64 (n,), in the order of its rows."""
        return self._by_table([once.ids for _, once in fetched.parts])

    def positions(self, fetched: FetchedRows) -> list[np.ndarray]:
        """Return the row of each id, int32 of the shape of the ids, for each table."""
        found: list[list[np.ndarray]] = []
        for batch, _ in fetched.parts:
            own: dict[int, np.ndarray] = {}
            for part in batch.parts:
                for k, (number, start, stop) in enumerate(part.spans(part.positions.positions)):
                    first, rows = int(part.plan.rows[k]), part.plan.inverse[start:stop]
                    own[number] = (rows - np.int32(first) if first else rows).reshape(batch.ids[number].shape)
            found.append([own[number] for number in range(len(own))])
        return self._by_table(found)

    def _by_table(self, of_locks: Sequence[Sequence[Any]]) -> list[Any]:
        numbered = zip(self._by_lock.values(), of_locks, strict=True)
        found = {k: each for numbers, own in numbered for k, each in zip(numbers, own, strict=True)}
        return [found[k] for k in range(len(self.tables))]

    def read(self, fetched: FetchedRows) -> None:
        """Read the rows of a planned batch."""
        unique = self.unique(fetched)
        outs = [rows[: len(own)] for rows, own in zip(fetched.rows, unique, strict=True)]
        self._note(fetched)
        fetched.parts = [
            batches.read_once(batch, [outs[k] for k in numbers])
            for numbers, (batch, _) in zip(self._by_lock.values(), fetched.parts, strict=True)
        ]

    def _note(self, fetched: FetchedRows) -> None:
        fetched.step, fetched.others = self.steps, self._changes_by_others()

    def _changes_by_others(self) -> list[int]:
        return [rows.version.now - own for rows, own in zip(self._rows, self._steps_of, strict=True)]

    # ---------------------------------------------------------------- ahead of time

    def bring(self, ids: FetchedRows) -> Pin:
        """Load the rows of a planned batch from disk, and read them. Any thread may call it.

        `take` makes the rows current.
        """
        fetched, pins = ids, list[Pin]()
        try:
            for layout, (_, once) in zip(fetched.layouts, fetched.parts, strict=True):
                pins.append(bring(layout.table_lock, dict(zip(map(rows_of, layout.tables), once.ids, strict=True))))
            self._note(fetched)  # a step meanwhile counts as one after the read
            for numbers, (_, once) in zip(self._by_lock.values(), fetched.parts, strict=True):
                with once.layout.table_lock.alone():
                    for k, rows in zip(numbers, batches.look_up(once.layout, once.ids), strict=True):
                        fetched.rows[k][: len(rows)] = rows
        except BaseException:
            Pin(pins).release()
            raise
        return _PinnedRows(pins)

    def room_for(self, batches: Sequence[FetchedRows]) -> tuple[int, int]:
        """Return the number of different rows in all batches, and the `memory` that holds them."""
        unique = list(map(self.unique, batches))
        of_locks = ([{self._rows[k]: own[k] for k in numbers} for own in unique] for numbers in self._by_lock.values())
        found = list(map(room_for, of_locks))
        return sum(rows for rows, _ in found), max(memory for _, memory in found)

    def take(self, fetched: FetchedRows) -> None:
        """Make a batch current that `bring` has read: read rows again that may have changed since."""
        made = self.steps - fetched.step
        if fetched.step < 0 or made > KNOWN_STEPS or (made and any(map(_moves_others, self._rows))):
            return self.read(fetched)
        stale, unique = self._stepped_since(fetched), self.unique(fetched)
        for numbers, (_, once) in zip(self._by_lock.values(), fetched.parts, strict=True):
            with once.layout.table_lock.alone():
                if self._changes_by_others() == fetched.others:  # here, as another thread may change them until now
                    batches.locate(once)
                    ids = [unique[k][stale[k]] for k in numbers]
                    for k, rows in zip(numbers, batches.look_up(once.layout, ids), strict=True):
                        fetched.rows[k][stale[k]] = rows
                    continue
            return self.read(fetched)
        fetched.step = self.steps

    def _stepped_since(self, fetched: FetchedRows) -> list[np.ndarray]:
        """Return the rows of each table that the known steps since a read have stepped."""
        since = list(self._stepped)[max(0, len(self._stepped) - self.steps + fetched.step) :]
        return [_in_any(own, [ids[k] for ids in since]) for k, own in enumerate(self.unique(fetched))]

    # ---------------------------------------------------------------- sum and step

    def step(
        self,
        fetched: FetchedRows,
        grads: Sequence[np.ndarray | None],
        is_finite: bool = True,
        by_position: bool = False,
        lr: Sequence[float | None] | None = None,
        time: Any = None,
    ) -> None:
        """Step all tables of a batch, or none of them.

        Args:
            fetched: the batch.
            grads: for each table, one gradient for each row of its padded array, float32 (size, dim); None: the table
                is not stepped.
            is_finite: no gradient of the caller's step is NaN or Inf, those of dense weights included.
            by_position: gradients are of ids instead, ``ids.shape + (dim,)``, and are summed here.
            lr: learning rate of each table; None: its rule's.
            time: of the events: see `Table.update`.

        Raises:
            NonFiniteGradientError: `is_finite` is False, and a table has ``on_nonfinite="raise"``. Or it is True, and a
                gradient has NaN or Inf.
            ArgumentError: the batch was stepped already, or some of its rows were, after it was read.
            GradientError, MemoryBudgetError: as for `Table.update`.
        """
        self._check(fetched)
        shapes = [(*own.shape, table.dim) for own, table in zip(fetched.ids, self.tables, strict=True)]
        given: list[np.ndarray | None] = []
        for k, (own, rows, grad) in enumerate(zip(self.unique(fetched), self._rows, grads, strict=True)):
            shape = shapes[k] if by_position else (fetched.sizes[k], shapes[k][-1])
            checked = None if grad is None else checks.floats("grads", grad, shape, rows.subject)
            given.append(checked if by_position or checked is None else checked[: len(own)])
        of_rows = zip(self._rows, lr or [None] * len(given), strict=True)
        rates = [checks.rule_of_step(rows.spec, rate, {}, rows.subject) for rows, rate in of_rows]
        rules, newest = dict(zip(self.tables, rates, strict=True)), newest_event(time, self._rows, self.subject)
        due = {table for table, grad in zip(self.tables, given, strict=True) if grad is not None}
        requests = []
        for numbers, (batch, once) in zip(self._by_lock.values(), fetched.parts, strict=True):
            blocks = batches.sum_blocks(batch if by_position else once, [given[k] for k in numbers])
            blocks = [block for block in blocks if due.issuperset(block[0])]
            requests += batches.requests_of(blocks, rules, newest)
        _check_finite(requests, is_finite)
        if is_finite:
            # Counted before the step. So what `bring` reads meanwhile has a change by others less, and is read again.
            before, of_before = self.steps, self._steps_of
            self._steps_of = [own + (table in due) for own, table in zip(of_before, self.tables, strict=True)]
            self.steps += 1
            try:
                step_all(requests)
            except BaseException:
                self.steps, self._steps_of = before, of_before
                raise
            of_tables = zip(self.unique(fetched), given, strict=True)
            self._stepped.append([own[:0] if grad is None else own for own, grad in of_tables])
        fetched.is_stepped = True

    def _check(self, fetched: FetchedRows) -> None:
        """Raise `ArgumentError` unless the rows of a batch are those from which its gradients follow."""
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
        made = self.steps - fetched.step
        if not made:
            return
        for rows, stale in zip(self._rows, self._stepped_since(fetched), strict=True):
            if len(stale) or made > KNOWN_STEPS or _moves_others(rows):
                raise ArgumentError(
                    f"rows of {rows.subject} were stepped since this batch was fetched, {made} steps ago: its "
                    "gradients are those of older rows. Nothing has changed. Fetch a batch after the step before it; "
                    "prefetch reads ahead and keeps rows current."
                )


def _moves_others(rows: TableState) -> bool:
    """Return whether a step changes rows that are not in its batch."""
    return rows.lifecycle is not None or (rows.history is not None and rows.history.moves_weights)


def _in_any(ids: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Return the positions of those `ids`, all different, that are in one of the other arrays."""
    if not others:
        return np.empty(0, np.int64)
    plan = make_plan(np.concatenate([ids, *others]))
    is_there = np.zeros(len(plan.ids), bool)
    is_there[plan.inverse[len(ids) :]] = True
    return np.flatnonzero(is_there[plan.inverse[: len(ids)]])


def _check_finite(requests: Sequence[StepRequest], is_finite: bool) -> None:
    """Raise the error of a step that is not finite, or count it in tables that skip such steps."""
    if is_finite and all(each.grads.is_finite for each in requests):
        return
    alone = [own for each in requests for own in each.split()]
    strict = [each for each in alone if is_finite or each.tables[0].on_nonfinite == "raise"]
    wrong = [each for each in strict if not each.grads.is_finite]
    if is_finite:
        error = checks.nonfinite(wrong[0].grads, wrong[0].tables[0].subject)
        raise NonFiniteGradientError(
            f"{error} The caller said that all gradients are finite, so dense weights may have changed: decide on the "
            "gradients of rows and of dense weights together.",
            error.count,
            error.ids,
        )
    if strict and not wrong:
        raise NonFiniteGradientError(
            f"gradients must be finite: got NaN or Inf in those of dense weights, or in the loss. Those of rows of "
            f"{strict[0].tables[0].subject} are finite. No row has changed. Lower the learning rate, clip or scale the "
            'gradients, or pass on_nonfinite="skip" to leave such steps out.',
            0,
            np.empty(0, np.int64),
        )
    refuse_nonfinite(wrong or alone)
