"""`Table`: rows that are looked up by id and stepped by a rule."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import are_ids, check_ids
from embedrock.batch.plan import Plan
from embedrock.errors import ArgumentError, NonFiniteGradientError
from embedrock.initializers import FromArray
from embedrock.optimizers import Rule
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Pin
from embedrock.storage.listeners import StaleExecutor
from embedrock.storage.ram_layout import memory_for
from embedrock.system.buffers import buffers
from embedrock.system.interrupts import held_back
from embedrock.system.notebook import html_table
from embedrock.table import changes, checks, opened, reading, saved
from embedrock.table.changed_rows import RowChanges
from embedrock.table.changes import first_scale, give_rule
from embedrock.table.event_time import newest_event
from embedrock.table.missing import Missing
from embedrock.table.opening import check_rule, make_rows
from embedrock.table.options import TableOptions, index, shows, table_options
from embedrock.table.prefetch import bring, prefetch, room_for
from embedrock.table.reading import EXPORT_BATCH_ROWS
from embedrock.table.rows import ChangeCounter, TableState
from embedrock.table.stepping import StepRequest, prepare, step_checked
from embedrock.table.storage import StorageManager
from embedrock.table.stored import StoredVerbs

F = TypeVar("F", bound="Table")
P = ParamSpec("P")
T = TypeVar("T")


def exclusive(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Make a method run exclusively: a table serves one call at a time. So no reader sees half a step."""

    @functools.wraps(method)
    def locked(self: F, *args: P.args, **kwargs: P.kwargs) -> T:
        table_lock = self._rows.table_lock  # as `TableLock.alone`, without a generator
        table_lock.queue()
        with table_lock.lock:
            if table_lock.running:
                table_lock.wait_for_step()
            return method(self, *args, **kwargs)

    return locked


def whole(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Make a method that changes the table run exclusively and to its end: Ctrl-C waits."""
    alone = exclusive(method)

    @functools.wraps(method)
    def uninterrupted(self: F, *args: P.args, **kwargs: P.kwargs) -> T:
        with held_back():
            return alone(self, *args, **kwargs)

    return uninterrupted


class Table(StoredVerbs):
    """An embedding table: rows of weights and optimizer state, made when an id is first stepped.

    Rows live in RAM or, with `path`, on disk behind a cache in RAM. That changes no bit of any result.

    Args:
        rows: number of rows; ids are in ``[0, rows)``. None: open ids, any int64.
        dim: weights in a row.
        rule: the sparse optimizer of `update`; None for a table that is only read, or gets its rule by `set_rule`.
        init: initial values of rows; by default ``Normal(0, 1)``, as in `torch.nn.Embedding`.
        seed: of initial values and of stochastic rounding, 64 bits. None: drawn from the operating system's entropy and
            kept with the rows, so that no two tables start alike. An existing table keeps its own.
        dtype: of the weights: "float32", "bfloat16" or "float16". The 16-bit ones are rounded stochastically, keyed by
            (seed, id, column, step). Optimizer state is always float32. "int8" and "int4" are for tables that are only
            read: `load_state` fills them from a table of floats.
        path: a folder to keep the rows in. The table there is opened as of its last commit, or made.
        memory: the most RAM of records and index, in bytes, "512MiB" or "25%". "auto", on disk: as much of the free RAM
            as pays. None: no limit in RAM; on disk a share of half of the RAM. All such tables share that half.
        directory: index of a table in RAM. "direct": slot = id; RAM follows `rows`. "hashed": RAM follows the ids
            touched, and hot rows lie together. "auto": direct for tables of up to 32 MiB, and for those that fit
            `memory` only so.
        on_nonfinite: reaction to a step with NaN or Inf in its gradients: "raise", or "skip" the step and count it.
        name: for error messages, and for pickling by reference.
        policy: of a table on disk: eviction from the cache, "lfu" (the least frequently used), "lru" or "clock".
        keep: of a table on disk: number of newest commits to keep. Commits with a name always stay.
        commit_every: automatic commits of a table on disk, as by ``commit(step=table.steps, wait=False)``. A number,
            such as 1000: after that many steps. A time ("30s", "5min", a timedelta): after the first step that ends so
            long after the last commit. `close`, and the end of the program, commit the rest.
        lock: of a table on disk: refuse to open if the file system has no locks.
        mode: "w", or "r" for a snapshot of a table on disk, which moves only when `refresh` is called.
        missing: of a snapshot, the default of the same argument of `lookup`.
        device_memory: the most GPU memory for rows of a table in a model on a GPU, in bytes, "2GiB" or "25%". It holds
            all rows if they fit, otherwise a cache of the rows in use. 0: rows are used in RAM. None: half of the free
            memory; of a table on disk 0.
        admission: admission of rows to records, an `Admission`; None: rows get records when they are stepped.
        eviction: eviction of rows from the table, an `Eviction`; None: no eviction.
        frozen: rows that stay as they are: an id, a range, an array of ids, or a list of ids and ranges. No step, no
            decay and no eviction changes them. `assign` does. An existing table keeps its own (None), or gets others,
            or none: ``frozen=[]``.
        segments: of a new table with admission or eviction that processes will share (``sharded=`` of layers): the
            number of parts of its ids that decide for themselves, 1, or 256, 512, 1024, 2048 or 4096. None: as layers
            choose.

    Attributes:
        device_memory, name: see above.
        group: the `Group` of a member; None for a table alone.

    Raises:
        ArgumentError: an invalid value, or an option of tables on disk without `path`.
        MemoryBudgetError: the table does not fit `memory`.
        TableFileError: `path` has something else, or a table of another kind.
        TableLockedError: another writer has the table at `path` open.
        CorruptTableError: the files at `path` are damaged.

    Example:
        >>> import embedrock as er
        >>> table = er.Table(rows=10**9, dim=4, rule=er.SGD(lr=0.5), init=er.Zeros())
        >>> table.update([7, 7], np.ones((2, 4), np.float32))
        >>> table.lookup([7])
        array([[-1., -1., -1., -1.]], dtype=float32)
    """

    device_memory: int | str | None
    name: str | None
    group: Any
    _rows: TableState
    _placing: dict[str, Any]  # options of tables in RAM and on disk
    _unlisted = "check_step executor over read_parts read_rows"

    @shows(TableOptions)
    def __init__(self, rows: int | None, dim: int, **options: Unpack[TableOptions]) -> None:
        given = table_options(options)
        with held_back():  # or Ctrl-C may leave files open without a table
            self._begin(*make_rows(rows, dim, given), given)

    @classmethod
    def over(
        cls, rows: TableState, storage: StorageManager | None, options: Mapping[str, Any], group: object | None = None
    ) -> Self:
        """Return a table of opened rows, with all `TableOptions` that are not in its spec."""
        made = cls.__new__(cls)
        made._begin(rows, storage, options, group)
        return made

    def _begin(
        self, rows: TableState, storage: StorageManager | None, options: Mapping[str, Any], group: object | None = None
    ) -> None:
        self._rows, self.storage, self.group, self.table_lock = rows, storage, group, rows.table_lock
        self.name, self.device_memory = options["name"], options["device_memory"]
        self._placing = {name: options[name] for name in ("memory", "directory")}
        if group is None:
            if storage is not None:
                weakref.finalize(self, storage.abandon, is_forgotten=True)
            weakref.finalize(self, setattr, rows.location, "prepared", None).atexit = False  # it refers to `rows`
            self._note()
        if self.name:
            opened.register(self.name, self)

    # ---------------------------------------------------------------- what it is

    @property
    def spec(self) -> Spec:
        """The table's frozen description."""
        return self._rows.spec

    @property
    def rows(self) -> int | None:
        """Number of rows, or None for open ids."""
        return self.spec.rows

    @property
    def dim(self) -> int:
        """Weights in a row."""
        return self.spec.dim

    @property
    def rule(self) -> Rule | None:
        """The sparse optimizer of `update`."""
        return self.spec.rule

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the table that are not in `spec`. With those of `spec`, they make another table like it."""
        made_with = {**self._placing, "on_nonfinite": self.on_nonfinite, "name": self.name}
        made_with["device_memory"] = self.device_memory
        if self.storage is None:
            return made_with
        opening = self.storage.opening
        names = "path", "policy", "keep", "commit_every", "missing"
        return made_with | {name: getattr(opening, name) for name in names}

    @property
    def subject(self) -> str:
        return self._rows.subject

    @property
    def on_nonfinite(self) -> str:
        """Reaction to a step with NaN or Inf in its gradients: "raise" or "skip"."""
        return self._rows.on_nonfinite

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._rows.steps

    @property
    def first_scale(self) -> float:
        """Factor of initial values in rows without records: 1, except under dense AdamW and Ftrl."""
        return first_scale(self._rows)

    @property
    def executor(self) -> StaleExecutor | None:
        """The executor of rows in another memory, such as a GPU's."""
        return self._rows.executor

    def _check_usable(self) -> None:
        self._checked_rows().check_open()

    def _versions(self) -> tuple[ChangeCounter]:
        return (self._rows.version,)

    def _checked_rows(self) -> TableState:
        self._rows.check()
        return self._rows

    @property
    def is_open_here(self) -> bool:
        return not self._rows.is_closed and self._rows.is_of_this_process

    def memory_for(self, rows: int) -> int:
        """Return a `memory` in bytes with which a table on disk holds rows of this kind in its cache.

        Args:
            rows: number of rows.
        """
        return memory_for(self.spec, rows)

    # ---------------------------------------------------------------- reading

    @exclusive
    def lookup(self, ids: npt.ArrayLike, out: np.ndarray | None = None, missing: Any = None) -> np.ndarray:
        """Return the weights of rows: float32 of shape ``ids.shape + (dim,)``.

        Nothing is stored: a row that was never stepped has its initial value, however often it is read.

        Args:
            ids: integers of any shape; repeats are allowed.
            out: C-contiguous float32 of that shape, for the result.
            missing: the value of rows that are not there, see `contains`: "first", their initial value; "zeros";
                "shared", the default row of the admission; "raise", an `IdError`; or a row (dim,). None: that of
                `er.open`, or else "first".

        Raises:
            IdError: an id lies outside the table, or has no row and ``missing="raise"``.
            ArgumentError: `missing` is no choice, or no row of this table.
            IdTypeError: ids are not integers.
        """
        rows = self._rows
        checked = check_ids(ids, rows.spec.rows, rows.subject)
        if out is not None:
            checks.check_out(out, (*checked.shape, rows.spec.dim), rows.subject)
        if rows.executor is not None:
            rows.check()
        choice = rows.missing if missing is None else Missing.of(missing, rows.subject)
        is_apart = choice is not None and choice.choice == "raise"  # `out` stays as it is then
        found = buffers.empty((*checked.shape, rows.spec.dim), np.float32) if out is None or is_apart else out
        choices = reading.choices_of((rows,), choice)
        reading.look_up((rows,), [checked.reshape(-1)], found.reshape(-1, rows.spec.dim), choices)
        if out is not None and is_apart:
            out[...] = found
        return found if out is None else out

    @exclusive
    def contains(self, ids: npt.ArrayLike) -> np.ndarray:
        """Return which ids have a row that is there: bool of the shape of `ids`.

        A row is there if it has a record, committed or not. Or the table's initial values are an array, which has the
        row. Rows that were forgotten, evicted or not admitted are not there.

        Args:
            ids: integers of any shape; repeats are allowed.

        Raises:
            IdError, IdTypeError: as for `lookup`.

        Example:
            >>> import embedrock as er
            >>> table = er.Table(rows=10**9, dim=2)
            >>> table.assign([7], [[1.0, 2.0]])
            >>> table.contains([7, 8]).tolist(), 7 in table, len(table)
            ([True, False], True, 1)
            >>> table.lookup([7, 8], missing="zeros").tolist()
            [[1.0, 2.0], [0.0, 0.0]]
        """
        rows = self._checked_rows()
        checked = check_ids(ids, rows.spec.rows, rows.subject)
        return reading.are_there(rows, checked.reshape(-1)).reshape(checked.shape)

    def __contains__(self, row_id: Any) -> bool:
        """Return whether an id has a row: see `contains`."""
        return bool(self.contains(row_id))

    @exclusive
    def __len__(self) -> int:
        """Return the number of rows that are there: see `contains`."""
        rows = self._checked_rows()
        count = rows.tier.count  # an error if it is closed
        return count if rows.spec.rows is None or not rows.are_all_there else rows.spec.rows

    def __bool__(self) -> bool:
        return True  # without rows, too: `er.opened(path) or er.Table(rows, dim, path=path)`

    def plan(self, ids: npt.ArrayLike) -> Plan:
        """Return the plan of a batch: unique rows, the row of each position, and the slots of the records.

        Args:
            ids: integers of any shape; repeats are allowed.

        Raises:
            IdError, IdTypeError: as for `lookup`.
        """
        with self._rows.table_lock.lock:  # not exclusively: the last step may still run, and moves no record
            return self._planned(ids)

    def _planned(self, ids: npt.ArrayLike) -> Plan:
        rows = self._rows
        if not are_ids(ids):
            ids = check_ids(ids, rows.spec.rows, rows.subject)
        if rows.executor is not None:
            rows.check()
        return reading.planned((rows,), [ids])

    @exclusive
    def read(self, plan: Plan, out: np.ndarray | None = None) -> np.ndarray:
        """Return the weights of a plan's rows: float32 of shape ``plan.shape + (dim,)``.

        Args:
            plan: made by this table.
            out: C-contiguous float32 of that shape, for the result.
        """
        checks.check_out(out, (*plan.shape, self.dim), self.subject)
        return reading.read(self._checked_rows(), plan, out)

    @exclusive
    def read_parts(self, plan: Plan, outs: Sequence[np.ndarray]) -> None:
        """Write the weights of a plan's positions to several arrays, one after the other: float32 (n, dim)."""
        (source, _), at = reading.source_of((self._checked_rows(),), plan), 0
        for out in outs:
            reading.gather(source, plan.inverse[at : at + len(out)], out)
            at += len(out)

    @exclusive
    def read_rows(self, plan: Plan) -> np.ndarray:
        """Return the weights of a plan's unique rows: float32 (unique, dim)."""
        return reading.source_of((self._checked_rows(),), plan, is_copy=True)[0].words

    # ---------------------------------------------------------------- training

    @exclusive
    def update(
        self, ids: npt.ArrayLike, grads: npt.ArrayLike, lr: float | None = None, time: Any = None, **changes: Any
    ) -> None:
        """Make one exact step of the rule: gradients of equal ids are summed, then each row is stepped once.

        Args:
            ids: integers of any shape; repeats are allowed.
            grads: floats of shape ``ids.shape + (dim,)``.
            lr: learning rate of this step; None: the rule's.
            time: times of the batch's events, one or any array of them: seconds since 1970, `datetime64` or `datetime`,
                in UTC. Their newest one moves the clock of ``Eviction(idle="30d")``, which never goes back. Once a step
                has a time, all later ones must. Other tables check it, and do not use it. None: `idle` is time of
                training.
            changes: other hyperparameters of this step, by name (``betas=(0.8, 0.99)``).

        Raises:
            IdError, IdTypeError: as for `lookup`.
            GradientError: gradients of the wrong shape or dtype.
            NonFiniteGradientError: gradients with NaN or Inf, and ``on_nonfinite="raise"``.
            MemoryBudgetError: the new rows do not fit `memory`.
            UnknownArgumentError: the rule has no such hyperparameter.
            ArgumentError: a time more than a day after the machine's clock, or more than `idle` after the median of its
                batch. One such time would make all rows idle.

        Example:
            >>> import embedrock as er
            >>> import numpy as np
            >>> table = er.Table(rows=None, dim=1, rule=er.SGD(lr=1.0), eviction=er.Eviction(idle="30 days"))
            >>> for id, day in ((7, "2025-01-01"), (8, "2025-01-30"), (9, "2025-02-08")):  # a log, as fast as it goes
            ...     table.update([id], np.ones((1, 1), np.float32), time=np.datetime64(day))
            >>> table.export()[0].tolist()
            [8, 9]
        """
        self._apply(self._planned(ids), grads, lr, time, changes)

    @exclusive
    def apply(
        self, plan: Plan, grads: npt.ArrayLike, lr: float | None = None, time: Any = None, **changes: Any
    ) -> None:
        """Make the step of `update` for a planned batch.

        Args:
            plan: made by this table.
            grads: floats of shape ``plan.shape + (dim,)``.
            lr, time, changes: as for `update`.

        Raises:
            GradientError, NonFiniteGradientError, MemoryBudgetError, UnknownArgumentError: as for `update`.
        """
        self._rows.check()
        self._apply(plan, grads, lr, time, changes)

    def sum(self, plan: Plan, grads: npt.ArrayLike) -> RowGradients:
        """Sum gradients of a batch to one for each row that is not frozen.

        Args:
            plan: made by this table.
            grads: floats of shape ``plan.shape + (dim,)``.

        Raises:
            GradientError: gradients of the wrong shape or dtype.
        """
        rows = self._rows
        summed = RowGradients.sum(plan, checks.floats("grads", grads, (*plan.shape, rows.spec.dim), rows.subject))
        return summed.kept(rows.spec.are_trained(plan.ids)) if rows.spec.frozen else summed

    @exclusive
    def step(
        self,
        grads: RowGradients,
        scale: float = 1.0,
        clip_value: float | None = None,
        lr: float | None = None,
        time: Any = None,
        **changes: Any,
    ) -> None:
        """Make one exact step of the rule by summed gradients.

        The records are stepped in the background. Later calls that read them wait for the step.

        Args:
            grads: from `sum`.
            scale: factor of every gradient, applied first.
            clip_value: every scaled gradient is clamped to ``[-clip_value, clip_value]``.
            lr: learning rate of this step; None: the rule's.
            time: of the events, as in `update`.
            changes: other hyperparameters of this step, by name.
        """
        rows = self._rows
        newest = newest_event(time, (rows,), rows.subject)
        rule = checks.rule_of_step(rows.spec, lr, changes, rows.subject)
        if rows.spec.frozen:  # sums may be made elsewhere
            grads = grads.kept(rows.spec.are_trained(grads.plan.ids))
        step_checked([StepRequest((rows,), rule, grads.scaled(scale, clip_value), time=newest)])

    def _apply(self, plan: Plan, grads: npt.ArrayLike, lr: float | None, time: Any, changes: dict[str, Any]) -> None:
        rows, summed = self._rows, self.sum(plan, grads)
        newest = None if time is None else newest_event(time, (rows,), rows.subject)
        rule = checks.rule_of_step(rows.spec, lr, changes, rows.subject)
        try:
            step_checked([StepRequest((rows,), rule, summed, time=newest)])
        except NonFiniteGradientError as error:
            raise checks.nonfinite_in(error, plan, grads) from None

    @whole
    def check_step(self, grads: RowGradients, time: Any = None) -> None:
        """Raise the errors of `step` for these arguments, except for NaN and Inf. Nothing changes.

        The step then finds everything prepared.
        """
        rows = self._checked_rows()
        rows.check_commit()
        if not grads.has_width(rows.spec.dim):
            raise checks.wrong_width(grads, rows.spec.dim, rows.subject)
        prepare(rows, grads.plan, time=newest_event(time, (rows,), rows.subject))

    @whole
    def assign(self, ids: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Overwrite the weights of rows; their optimizer state stays.

        Args:
            ids: integers of any shape, without repeats.
            values: floats of shape ``ids.shape + (dim,)``, rounded to nearest in 16-bit tables.
        """
        rows = self._checked_rows()
        rows.check_commit()
        plan = self._planned(ids)
        kept = checks.assigned(plan, values, rows)
        slots = prepare(rows, plan, is_step=False).begin()
        rows.tier.records.write(slots, kept)
        rows.version.advance()
        rows.tell()

    @whole
    def set_rule(self, rule: Rule | None, *, reset_state: bool = False) -> None:
        """Give the table a rule. If its record layout differs, weights stay, and state and steps begin anew.

        Args:
            rule: the new rule; None: the table is only read.
            reset_state: lose state from steps, if the new rule has another layout.

        Raises:
            ArgumentError: state would be lost, without `reset_state`.
        """
        check_rule(rule)
        give_rule(self._checked_rows(), rule, reset_state)

    # ---------------------------------------------------------------- deleting and growing

    @whole
    def forget(self, ids: npt.ArrayLike) -> int:
        """Delete rows for good, with all that is known of their ids; return how many of them had records.

        They have their initial values again, and their state begins anew when they are stepped. On disk, the deletion
        is durable with the next commit, and final. From then on, no earlier commit shows or restores them. Once earlier
        commits are deleted, and `compact` was called, no file has a byte of the rows. Counts in a sketch stay.

        Args:
            ids: integers of any shape; repeats are allowed.

        Raises:
            IdError, IdTypeError: as for `lookup`.
            ArgumentError: a batch that was read, and is not stepped yet, has some of them.
            UnsupportedError: the rows are on a GPU, which plans its batches itself. The `forget` of layers moves them
                back first.
            ReadOnlyTableError: the table was opened with ``mode="r"``.

        Example:
            >>> import embedrock as er
            >>> import numpy as np
            >>> table = er.Table(rows=None, dim=2, rule=er.SGD(lr=1.0), init=er.Zeros())
            >>> table.update([7, 8], np.ones((2, 2), np.float32))
            >>> table.forget([7, 9]), table.export()[0].tolist()
            (1, [8])
        """
        return changes.forget(self._rows, check_ids(ids, self.rows, self.subject))

    @whole
    def grow(self, rows: int | None, init: FromArray | None = None) -> None:
        """Grow to more rows, or to open ids: as if the table had been made and trained so.

        Rows keep their weights and state. New ones have the initial values of the table's seed, its init and their ids;
        no record is made. An `init` computed from the number of rows stays as it was. Rows that a rule with
        ``dense=True`` moves without a gradient (`AdamW`, `Ftrl`) have moved with the others.

        On disk it is durable with the next commit. Earlier commits open with the earlier rows, and `rollback` goes back
        to them. The cost is at most that of the rows in RAM; no file is rewritten.

        Args:
            rows: new number of rows; None: open ids, any int64. The present number changes nothing.
            init: for initial values from an array: one of the new shape that begins with the old rows.

        Raises:
            ArgumentError: fewer rows than the table has, or an `init` that does not fit.
            MemoryBudgetError: the index of the rows does not fit `memory`.
            UnsupportedError: the rows are on a GPU. The `grow` of layers moves them back first.
            ReadOnlyTableError: the table was opened with ``mode="r"``.

        Example:
            >>> import embedrock as er
            >>> table = er.Table(rows=3, dim=2, init=er.Constant(0.5))
            >>> table.grow(10**9)
            >>> table.lookup([999_999_999])
            array([[0.5, 0.5]], dtype=float32)
        """
        changes.grow(self._rows, index(rows), init)

    @whole
    def shrink(self, rows: int) -> int:
        """Delete all rows outside of ``[0, rows)``, with their state; return how many of them had records.

        The table then equals one made and trained with these rows only. On disk, the next commit makes that durable. It
        writes all rows anew. Earlier commits keep their rows, and `rollback` goes back to them.

        Args:
            rows: new number of rows.

        Raises:
            ArgumentError: more rows than the table has, or rows of a published table.
            UnsupportedError, ReadOnlyTableError: as for `grow`.

        Example:
            >>> import embedrock as er
            >>> table = er.Table(rows=10, dim=2)
            >>> table.assign([3, 9], np.ones((2, 2)))
            >>> table.shrink(8), table.rows, table.export()[0].tolist()
            (1, 8, [3])
        """
        return changes.shrink(self._rows, index(rows))

    # ---------------------------------------------------------------- saving and loading

    @exclusive
    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have records: ids int64 (n,), ascending, and weights float32 (n, dim).

        All other rows have their initial values: ``table.lookup(np.arange(rows))`` gives every row.
        """
        return saved.export(self._checked_rows(), EXPORT_BATCH_ROWS)

    def export_batches(self, batch_rows: int = EXPORT_BATCH_ROWS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over the rows that have records, in batches of (ids, weights) as in `export`, in any order.

        Takes RAM for one batch. The table must not be stepped while the iterator is in use.

        Args:
            batch_rows: most rows in a batch.

        Raises:
            ArgumentError: `batch_rows` is less than 1.
        """
        if index(batch_rows) < 1:
            raise ArgumentError(f"`batch_rows` must be at least 1: got {batch_rows!r}.")
        return saved.export_batches(self._rows, batch_rows)

    def changes(self, since: int | None) -> RowChanges:
        """Return the rows that changed since a commit, as of the last one: an iterable of `ChangedRows`.

        Its cost follows the number of changed rows. Uncommitted rows are not in it, and training goes on meanwhile.

        Args:
            since: number of the commit. None: all rows with a record.

        Raises:
            HistoryDroppedError: nothing says any more what changed since. The error's `oldest` is a commit that works.
            ArgumentError: there was no such commit.
            UnsupportedError: it lives in RAM, or its rule moves rows without a gradient (``dense=True``).

        Example:
            ``for ids, rows, gone in table.changes(since): index.add(ids, rows); index.remove(gone)``
        """
        self._check_usable()
        return self._on_disk().changes(index(since), [self._checked_rows().name])[self._checked_rows().name]

    def _own(self, changes: dict[str, RowChanges]) -> RowChanges:
        return changes[self._checked_rows().name]

    @exclusive
    def state(self) -> dict[str, Any]:
        """Return the input of `load_state`: scalars, and arrays that later steps do not change."""
        return saved.snapshot(self._checked_rows())

    def load_state(self, state: dict[str, Any] | Table, grow: bool = False) -> None:
        """Replace rows, optimizer state, steps and seed by a result of `state`, or by those of another table.

        Either table may be on disk, where the next commit makes it durable. Rows are copied part by part. A table
        without a rule gets that of the state. A table of dtype "int8" or "int4" takes the weights of one of floats.

        Args:
            state: a result of `state`, or a table.
            grow: allow the table to have more rows than were saved. These are as after `grow` of the saved table.

        Raises:
            ArgumentError: the state is that of a table of another shape, dtype, initializer or rule.
            GradientError: NaN or Inf, where weights become "int8" or "int4".
        """
        saved.load_state(self._rows, state._rows if isinstance(state, Table) else state, grow)

    def stats(self) -> dict[str, float]:
        """Return statistics of the table: rows, bytes, steps and more. ``docs/api/statistics.md`` lists the keys."""
        with self._rows.table_lock.lock:  # waits for no step, and moves no rows
            rows = self._checked_rows()
            spec, tier = rows.spec, rows.tier
            return {
                "rows": -1 if spec.rows is None else spec.rows,
                "rows_touched": tier.count,
                "dim": spec.dim,
                "record_bytes": spec.record_bytes,
                "table_bytes": -1 if spec.table_bytes is None else spec.table_bytes,
                "bytes_used": tier.bytes_used,
                "budget_bytes": tier.budget_bytes,
                "direct": int(tier.is_direct),
                "steps": rows.steps,
                "skipped_steps": rows.skipped_steps,
                **tier.stats(),
                **({} if (base := rows.base) is None else base.stats()),
                **({} if rows.lifecycle is None else rows.lifecycle.stats()),
                **({} if rows.executor is None else rows.executor.stats()),
                **rows.location.stats(),
            }

    def close(self) -> None:
        """Release the table's memory. Further calls raise `ClosedTableError`; closing twice is allowed.

        It waits for a running commit. Uncommitted changes of a table on disk are lost, with an `UncommittedWarning`.
        With `commit_every` they are committed first. If that fails, the table stays open, and a second `close` loses
        them.
        """
        with self._rows.table_lock.lock:
            self._rows.close()

    # ---------------------------------------------------------------- ahead of time

    def bring(self, ids: npt.ArrayLike) -> Pin:
        """Load rows of a later batch from disk. They stay in the cache until the pin is released.

        Any thread may call it: the disk is read while other threads use the table.

        Args:
            ids: integers of any shape; repeats are allowed.

        Raises:
            IdError, IdTypeError: as for `lookup`.
            CacheTooSmallError: the rows do not fit the cache together with the rows in use.
        """
        return bring(self._rows.table_lock, {self._checked_rows(): check_ids(ids, self.rows, self.subject)})

    def room_for(self, batches: Sequence[npt.ArrayLike]) -> tuple[int, int]:
        """Return the number of different rows in batches, and a `memory` whose cache holds them.

        Args:
            batches: integers of any shape, for each batch.
        """
        return room_for([{self._rows: np.asarray(ids)} for ids in batches])

    def prefetch(self, batches: Iterable[Any], depth: int = 2) -> Iterator[Any]:
        """Iterate over batches of ids while the rows of the next `depth` ones are loaded from disk.

        It changes no bit of any result.

        Args:
            batches: integers of any shape, for each batch.
            depth: number of batches to load ahead.

        Example:
            >>> import embedrock as er
            >>> table = er.Table(rows=100, dim=4)
            >>> [table.lookup(ids).shape for ids in table.prefetch([[1, 2], [3]], depth=1)]
            [(2, 4), (1, 4)]
        """
        return prefetch(batches, {self: lambda ids: ids}, depth)

    def __repr__(self) -> str:
        spec, name = self.spec, f"name={self.name!r}, " if self.name else ""
        of = f"{name}rows={spec.rows}, dim={spec.dim}, dtype={spec.dtype!r}, seed={spec.seed}, rule={spec.rule}"
        return f"Table({of}, {self._rows})"

    def _html(self) -> str:
        spec = self.spec
        facts = {
            "rows": "open ids" if spec.rows is None else f"{spec.rows:,}",
            "dim, dtype, rule": f"{spec.dim}, {spec.dtype}, {spec.rule}",
            "steps": f"{self.steps:,}",
            "now": f"{self._rows}{self._committed(self.stats())}",
        }
        return html_table(f"Table {self.name or ''}".strip(), facts.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        rows, spec = self._checked_rows(), self.spec
        with rows.table_lock.alone():  # the state may have views of rows
            state = saved.state(rows, "copy.deepcopy")
            own: dict[str, Any] = {**self.options, "name": None, "rule": spec.rule, "init": spec.init} | spec.policies
            made = Table(spec.rows, spec.dim, seed=spec.seed, dtype=spec.dtype, segments=spec.segments, **own)
            made.load_state(state)
            made._rows.given_rule, made._rows.is_rule_bound = rows.given_rule, rows.is_rule_bound
        memo[id(self)] = made
        return made

    def __reduce__(self) -> tuple[Callable[..., Table], tuple[str, str | None]]:
        return opened.reference_to(self, self.name, self.subject, reader_of(self) if self.is_on_disk else None)


def rows_of(table: Table) -> TableState:
    """Return the state of a table: for executors, for saving, and for tests."""
    return table._rows


def reader_of(table: Table) -> str:
    """Return the expression that opens a table on disk for reading, in any process."""
    path = str(table.path)
    if os.path.exists(os.path.join(os.path.dirname(path), "SHARDED")):
        path = os.path.dirname(path)  # it is one shard of several
    if table.group is not None:
        return f'er.open({path!r}, mode="r")[{table.name!r}]'
    given = [repr(path), 'mode="r"']
    given += ["init=er.FromArray(weights)"] * isinstance(table.spec.init, FromArray)  # the files do not have the array
    given += [] if table.name is None else [f"name={table.name!r}"]
    return f"er.open({', '.join(given)})"
