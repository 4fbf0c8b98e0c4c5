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
from embedrock.batch.ids import check_ids
from embedrock.batch.plan import Plan
from embedrock.errors import ArgumentError, NonFiniteGradientError
from embedrock.initializers import FromArray
from embedrock.optimizers import Rule
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Pin
from embedrock.storage.listeners import StaleExecutor
from embedrock.storage.ram_layout import memory_for
from embedrock.system.interrupts import held_back
from embedrock.table import checks, growing, named, reading, saved
from embedrock.table.location import ChangeCounter
from embedrock.table.opening import check_rule, make_rows
from embedrock.table.options import TableOptions, index, shows, table_options
from embedrock.table.prefetch import bring, prefetch, room_for
from embedrock.table.reading import EXPORT_BATCH_ROWS
from embedrock.table.rows import TableState
from embedrock.table.rule_changes import first_scale, give_rule
from embedrock.table.stepping import make_step
from embedrock.table.storage import StorageManager
from embedrock.table.stored import StoredVerbs

F = TypeVar("F", bound="TableBase")
P = ParamSpec("P")
T = TypeVar("T")


class TableBase(StoredVerbs):
    """What is known of a table, whoever has its turn.

    Attributes:
        device_memory: the most GPU memory that its rows may take, in bytes or as "25%"; None for half of what is free.
        name: for error messages, and for pickling by reference.
    """

    device_memory: int | str | None
    name: str | None
    group: Any  # the `Group` that it is a member of; None for a table alone
    _rows: TableState
    _placing: dict[str, Any]  # of its options, those that a table in RAM and one on disk have

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
        """What of the table's arguments is no part of `spec`: with the spec's, they make another table like it."""
        made_with = {**self._placing, "on_nonfinite": self.on_nonfinite, "name": self.name}
        made_with["device_memory"] = self.device_memory
        if self.storage is None:
            return made_with
        opening = self.storage.opening
        names = "path", "policy", "keep", "commit_every"
        return made_with | {name: getattr(opening, name) for name in names}

    @property
    def subject(self) -> str:
        """What error messages call it."""
        return self._rows.subject

    @property
    def on_nonfinite(self) -> str:
        """What a step with NaN or Inf in its gradients does."""
        return self._rows.on_nonfinite

    @property
    def steps(self) -> int:
        """Steps applied so far."""
        return self._rows.steps

    @property
    def first_scale(self) -> float:
        """What first values have been multiplied by in rows without records: 1, but under dense AdamW and Ftrl."""
        return first_scale(self._rows)

    @property
    def executor(self) -> StaleExecutor | None:
        """The rows in another memory, a GPU's."""
        return self._rows.executor

    def _check_usable(self) -> None:
        self._checked_rows().check_open()

    def _versions(self) -> tuple[ChangeCounter]:
        return (self._rows.version,)

    def _checked_rows(self) -> TableState:
        """Return the rows, once the side has raised what went wrong in earlier calls."""
        self._rows.check()
        return self._rows

    # ---------------------------------------------------------------- tables on disk

    @property
    def is_open_here(self) -> bool:
        """Whether it is open, and by this process, not by one whose child this is."""
        return not self._rows.is_closed and self._rows.is_of_this_process

    def memory_for(self, rows: int) -> int:
        """Return a `memory` in bytes with which a table on disk holds so many rows of this kind in its cache."""
        return memory_for(self.spec, rows)


def exclusive(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Run a method alone: a table serves one call at a time, so that no reader sees half a step."""

    @functools.wraps(method)
    def locked(self: F, *args: P.args, **kwargs: P.kwargs) -> T:
        table_lock = self._rows.table_lock  # as `TableLock.alone`, without a generator
        table_lock.queue()
        with table_lock.lock:
            if table_lock.running is not None:
                table_lock.wait_for_step()
            return method(self, *args, **kwargs)

    return locked


def whole(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Run a method that changes the table alone and to its end: Ctrl-C waits."""
    alone = exclusive(method)

    @functools.wraps(method)
    def uninterrupted(self: F, *args: P.args, **kwargs: P.kwargs) -> T:
        with held_back():
            return alone(self, *args, **kwargs)

    return uninterrupted


class Table(TableBase):
    """An embedding table: rows of weights and optimizer state, made when an id is first stepped.

    Its rows live in RAM or, with `path`, on disk behind a cache in RAM; that changes no bit of any result.

    Args:
        rows: number of rows; ids lie in ``[0, rows)``. None: open ids, any int64.
        dim: weights in a row.
        rule: the sparse optimizer of `update`; None for a table that is only read, or gets its rule by `set_rule`.
        init: first values of rows; by default ``Normal(0, 1)``, as in `torch.nn.Embedding`.
        seed: of first values and of stochastic rounding, 64 bits. None: drawn from the operating system's entropy, so
            that no two tables start alike, and kept with the rows; a table that is there keeps its own.
        dtype: of the weights: "float32", "bfloat16" or "float16". The 16-bit ones are rounded stochastically, keyed by
            (seed, id, column, step). Optimizer state is always float32.
        path: a folder to keep the rows in. The table there is opened as of its last commit, or made.
        memory: the most RAM that records and directory may take, in bytes, "512MiB" or "25%"; "auto", on disk: what
            pays of what is left. None: all of it; half of it for all tables on disk that were not told, together.
        directory: of a table in RAM: "direct" (slot = id; RAM follows `rows`), "hashed" (RAM follows the ids touched,
            and hot rows lie together), or "auto": direct for tables of up to 32 MiB, and for those that fit `memory`
            only so.
        on_nonfinite: what a step with NaN or Inf in its gradients does: "raise", or "skip" the step and count it.
        name: for error messages, and for pickling by reference.
        policy: of a table on disk: which rows leave the cache, "lfu" (the least frequently used), "lru" or "clock".
        keep: of a table on disk: newest commits that are kept; those with a name always are.
        commit_every: a table on disk commits by itself, as by ``commit(step=table.steps, wait=False)``, after so many
            steps (1000), or after the first step when so much time is over since the last commit ("30s", "5min", a
            timedelta). What no commit has then is committed by `close`, and at the end of the program.
        lock: of a table on disk: refuse to open where the file system has no locks.
        mode: "w", or "r" for a snapshot of a table on disk, which moves when `refresh` is called only.
        system: does the I/O of a table on disk (for tests).
        device_memory: the most GPU memory for its rows once a model that has it is on a GPU, in bytes, "2GiB" or "25%":
            all rows if they fit, else a cache of those in use. 0: rows are used in RAM. None: half of what is free; of
            a table on disk 0.
        admission: which rows get a record, an `Admission`; None: those that are stepped.
        eviction: which rows lose it, an `Eviction`; None: none does.

    Raises:
        ArgumentError: a value that cannot work, or an option of tables on disk without `path`.
        MemoryBudgetError: the table cannot be made in `memory`.
        TableFileError: at `path` there is something else, or a table of another kind.
        TableLockedError: another writer has the table at `path` open.
        CorruptTableError: the files at `path` are damaged.

    Example:
        >>> import embedrock as er
        >>> table = er.Table(rows=10**9, dim=4, rule=er.SGD(lr=0.5), init=er.Zeros())
        >>> table.update([7, 7], np.ones((2, 4), np.float32))
        >>> table.lookup([7])
        array([[-1., -1., -1., -1.]], dtype=float32)
    """

    @shows(TableOptions)
    def __init__(self, rows: int | None, dim: int, **options: Unpack[TableOptions]) -> None:
        given = table_options(options)
        with held_back():  # or Ctrl-C may leave files open that no table has
            self._begin(*make_rows(rows, dim, given), given)

    @classmethod
    def over(
        cls, rows: TableState, storage: StorageManager | None, options: Mapping[str, Any], group: object | None = None
    ) -> Self:
        """Return a table of rows that were opened, with all `TableOptions` that are no part of its spec."""
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
            self._note()
        if self.name:
            named.register(self.name, self)

    # ---------------------------------------------------------------- reading

    @exclusive
    def lookup(self, ids: npt.ArrayLike, out: np.ndarray | None = None) -> np.ndarray:
        """Return the weights of rows: float32 of shape ``ids.shape + (dim,)``.

        Nothing is stored: a row that was never stepped has its first value, however often it is read.

        Args:
            ids: integers of any shape; repeats are allowed.
            out: C-contiguous float32 of that shape, to write to.

        Raises:
            IdError: an id lies outside the table.
            IdTypeError: ids are not integers.
        """
        rows = self._rows
        checked = check_ids(ids, rows.spec.rows, rows.subject)
        if out is not None:
            checks.check_out(out, (*checked.shape, rows.spec.dim), rows.subject)
        if rows.executor is not None:
            rows.check()
        return reading.look_up(rows, checked, out)

    def plan(self, ids: npt.ArrayLike) -> Plan:
        """Return what a batch needs: unique rows, where each position finds its row, and where the records are."""
        with self._rows.table_lock.lock:  # but not alone: the step before, which moves no record, may still be running
            return self._planned(ids)

    def _planned(self, ids: npt.ArrayLike) -> Plan:
        rows = self._rows
        checked = check_ids(ids, rows.spec.rows, rows.subject)
        if rows.executor is not None:
            rows.check()
        return rows.plan(checked)

    @exclusive
    def read(self, plan: Plan, out: np.ndarray | None = None) -> np.ndarray:
        """Return the weights of a plan's rows: float32 of shape ``plan.shape + (dim,)``.

        Args:
            plan: made by this table.
            out: C-contiguous float32 of that shape, to write to.
        """
        checks.check_out(out, (*plan.shape, self.dim), self.subject)
        return reading.read(self._checked_rows(), plan, out)

    @exclusive
    def read_rows(self, plan: Plan) -> np.ndarray:
        """Return the weights of a plan's unique rows: float32 (unique, dim)."""
        return reading.read_unique(self._checked_rows(), plan)

    # ---------------------------------------------------------------- training

    @exclusive
    def update(self, ids: npt.ArrayLike, grads: npt.ArrayLike, lr: float | None = None, **changes: Any) -> None:
        """Make one exact step of the rule: gradients of equal ids are summed, then each row is stepped once.

        Args:
            ids: integers of any shape; repeats are allowed.
            grads: floats of shape ``ids.shape + (dim,)``.
            lr: learning rate of this step; None: the rule's.
            changes: other hyperparameters of this step, by name (``betas=(0.8, 0.99)``).

        Raises:
            IdError, IdTypeError: as for `lookup`.
            GradientError: gradients of the wrong shape or dtype.
            NonFiniteGradientError: gradients with NaN or Inf, and ``on_nonfinite="raise"``.
            MemoryBudgetError: the new rows do not fit `memory`.
            UnknownArgumentError: the rule has no such hyperparameter.
        """
        self._apply(self._planned(ids), grads, lr, changes)

    @exclusive
    def apply(self, plan: Plan, grads: npt.ArrayLike, lr: float | None = None, **changes: Any) -> None:
        """Make the step of `update` for a batch that was planned."""
        self._rows.check()
        self._apply(plan, grads, lr, changes)

    def sum(self, plan: Plan, grads: npt.ArrayLike) -> RowGradients:
        """Return the gradients of a batch, floats of shape ``plan.shape + (dim,)``, summed to one for each row."""
        rows = self._rows
        return RowGradients.sum(plan, checks.floats("grads", grads, (*plan.shape, rows.spec.dim), rows.subject))

    @exclusive
    def step(
        self,
        grads: RowGradients,
        scale: float = 1.0,
        clip_value: float | None = None,
        lr: float | None = None,
        **changes: Any,
    ) -> None:
        """Make one exact step of the rule by summed gradients.

        The records are stepped in the background while the caller goes on; whatever reads them waits for that.

        Args:
            grads: from `sum`.
            scale: every gradient is multiplied by it first.
            clip_value: every scaled gradient is clamped to ``[-clip_value, clip_value]``.
            lr: learning rate of this step; None: the rule's.
            changes: other hyperparameters of this step, by name.
        """
        rows = self._checked_rows()
        rows.check_commit()
        rule = checks.rule_of_step(rows.spec.rule, lr, changes, rows.subject)
        grads = grads.scaled(scale, clip_value)
        checks.check_gradients(grads, rows.spec.dim, rows.subject)
        with held_back():
            make_step(rows, rule, grads)

    @whole
    def step_by(self, rule: Rule, grads: RowGradients) -> None:
        """Make the step of `step` with all hyperparameters as `rule` has them; its layout must be the table's."""
        rows = self._checked_rows()
        rows.check_writable()  # a failed commit is raised by the next check: a step that was checked goes on
        checks.check_layout(rule, rows.spec.rule, rows.subject)
        checks.check_gradients(grads, rows.spec.dim, rows.subject)
        make_step(rows, rule, grads)

    def _apply(self, plan: Plan, grads: npt.ArrayLike, lr: float | None, changes: dict[str, Any]) -> None:
        rows, summed = self._rows, self.sum(plan, grads)
        rows.check_commit()
        rule = checks.rule_of_step(rows.spec.rule, lr, changes, rows.subject)
        try:
            with held_back():
                make_step(rows, rule, summed)
        except NonFiniteGradientError as error:
            raise checks.nonfinite_in(error, plan, grads) from None

    @whole
    def check_step(self, grads: RowGradients) -> None:
        """Raise what `step` would raise for these gradients, but for NaN and Inf. Nothing changes.

        The step then finds everything prepared.
        """
        rows = self._checked_rows()
        rows.check_commit()
        checks.check_gradients(grads, self.dim, self.subject)
        rows.prepare(grads.plan)

    @whole
    def assign(self, ids: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Overwrite the weights of rows; their optimizer state stays.

        Args:
            ids: integers of any shape, without repeats.
            values: floats of shape ``ids.shape + (dim,)``; for 16-bit tables they are rounded to nearest.
        """
        rows = self._checked_rows()
        rows.check_commit()
        plan = self._planned(ids)
        kept = checks.assigned(plan, values, rows)
        slots = rows.begin(rows.prepare(plan, is_step=False))
        rows.tier.records.write(slots, kept)
        rows.version.advance()
        rows.tell()

    @whole
    def set_rule(self, rule: Rule | None, *, reset_state: bool = False) -> None:
        """Give the table a rule. If its records must be laid out anew, weights stay and state and step begin anew.

        State from steps is lost with ``reset_state=True`` only, else it is an `ArgumentError`. Layers of Keras keep it.
        """
        check_rule(rule)
        give_rule(self._checked_rows(), rule, reset_state)

    # ---------------------------------------------------------------- rows that come and go

    @whole
    def forget(self, ids: npt.ArrayLike) -> int:
        """Remove rows at once, with all that is known of their ids; return how many of them had records.

        They have their first values again, and their state begins anew when they are stepped. On disk that is durable
        with the next commit, and final: no earlier commit shows them from then on, nor brings them back. Once those
        are dropped, and `compact` was called, no byte of the rows is in any file. What a sketch has counted, it keeps.

        Args:
            ids: integers of any shape; repeats are allowed.

        Raises:
            IdError, IdTypeError: as for `lookup`.
            ArgumentError: a batch that was read, and is not stepped yet, has some of them.
            UnsupportedError: the rows are on a GPU, which plans its batches itself. Layers have a `forget` that brings
                them back.
            ReadOnlyTableError: the table was opened with ``mode="r"``.

        Example:
            >>> import embedrock as er
            >>> import numpy as np
            >>> table = er.Table(rows=None, dim=2, rule=er.SGD(lr=1.0), init=er.Zeros())
            >>> table.update([7, 8], np.ones((2, 2), np.float32))
            >>> table.forget([7, 9]), table.export()[0].tolist()
            (1, [8])
        """
        return growing.forget(self._rows, check_ids(ids, self.rows, self.subject))

    @whole
    def grow(self, rows: int | None, init: FromArray | None = None) -> None:
        """Become a table of more rows, or of open ids: the one that had been made so, and was trained the same.

        Rows keep their weights and state, and new ones have the first values that the table's seed, its init and their
        ids say; nothing is drawn for them, and no record is made. So an `init` whose numbers were computed from the
        count of rows stays as it was. Rows that a rule with ``dense=True`` moves without a gradient (`AdamW`, `Ftrl`)
        have moved with the others.

        On disk it is durable with the next commit. Commits from before open with the rows that there were, and
        `rollback` goes back to them. It costs what the rows in RAM do, at most; no file is written anew.

        Args:
            rows: how many there are to be; None: ids become open, any int64. As many as there are change nothing.
            init: where first values come from an array: one of the new shape, that begins with the rows of the old one.

        Raises:
            ArgumentError: fewer rows than there are, or `init` does not go with it.
            MemoryBudgetError: what finds the rows does not fit `memory`.
            UnsupportedError: the rows are on a GPU. Layers have a `grow` that brings them back.
            ReadOnlyTableError: the table was opened with ``mode="r"``.

        Example:
            >>> import embedrock as er
            >>> table = er.Table(rows=3, dim=2, init=er.Constant(0.5))
            >>> table.grow(10**9)
            >>> table.lookup([999_999_999])
            array([[0.5, 0.5]], dtype=float32)
        """
        growing.grow(self._rows, index(rows), init)

    # ---------------------------------------------------------------- whole tables

    @exclusive
    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have records: ids int64 (n,), ascending, and weights float32 (n, dim).

        All other rows have their first values: ``table.lookup(np.arange(rows))`` gives every row.
        """
        return saved.export(self._checked_rows(), EXPORT_BATCH_ROWS)

    def export_batches(self, batch_rows: int = EXPORT_BATCH_ROWS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Go through the rows that have records, in batches of (ids, weights) as `export` returns them, in any order.

        Takes RAM for one batch. The table must not be stepped while the iterator is in use.

        Args:
            batch_rows: rows in a batch, at most.
        """
        if index(batch_rows) < 1:
            raise ArgumentError(f"`batch_rows` must be at least 1: got {batch_rows!r}.")
        return saved.export_batches(self._rows, batch_rows)

    @exclusive
    def state(self) -> dict[str, Any]:
        """Return all that `load_state` needs: arrays, which later steps leave as they are, and scalars."""
        return saved.snapshot(self._checked_rows())

    def load_state(self, state: dict[str, Any] | Table) -> None:
        """Replace rows, optimizer state, steps and seed by what `state` returned, or by those of another table.

        Either table may be on disk, where the next commit makes it durable; rows go over a part at a time. A table
        without a rule gets that of the state.

        Raises:
            ArgumentError: the state is that of a table of another shape, dtype, initializer or rule.
        """
        saved.load_state(self._rows, state._rows if isinstance(state, Table) else state)

    def stats(self) -> dict[str, float]:
        """Return numbers about the table: rows, bytes and steps."""
        with self._rows.table_lock.lock:  # but no step is waited for, nor are rows fetched from elsewhere
            return _stats(self._checked_rows())

    def close(self) -> None:
        """Give the table's memory back. Further calls raise `ClosedTableError`; closing twice is allowed.

        A commit that runs in the background is waited for. Changes of a table on disk that no commit has are lost,
        with an `UncommittedWarning`; with `commit_every` they are committed first. Where that fails, the table stays
        open; closed again, it loses them.
        """
        with self._rows.table_lock.lock:
            self._rows.close()

    # ---------------------------------------------------------------- ahead of time

    def bring(self, ids: npt.ArrayLike) -> Pin:
        """Bring rows up from disk that a later batch will use; they stay until the ticket is released.

        Any thread may call it: the disk is read while others go on with the table.

        Raises:
            IdError, IdTypeError: as for `lookup`.
            CacheTooSmallError: the rows do not fit the cache together with those in use.
        """
        return bring(self._rows.table_lock, {self._checked_rows(): check_ids(ids, self.rows, self.subject)})

    def room_for(self, batches: Sequence[npt.ArrayLike]) -> tuple[int, int]:
        """Return how many different rows batches of ids have together, and a `memory` whose cache holds these."""
        return room_for([{self._rows: np.asarray(ids)} for ids in batches])

    def prefetch(self, batches: Iterable[Any], depth: int = 2) -> Iterator[Any]:
        """Go through batches of ids while the rows of the next `depth` ones are brought up from disk.

        That changes no bit of any result. See `embedrock.table.prefetch`.

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        rows, spec = self._checked_rows(), self.spec
        with rows.table_lock.alone():  # the state has views of rows
            state = saved.state(rows, "copy.deepcopy")
            own: dict[str, Any] = {**self.options, "name": None, "rule": spec.rule, "init": spec.init} | spec.policies
            made = Table(spec.rows, spec.dim, seed=spec.seed, dtype=spec.dtype, **own)
            made.load_state(state)
            made._rows.given_rule, made._rows.is_rule_bound = rows.given_rule, rows.is_rule_bound
        memo[id(self)] = made
        return made

    def __reduce__(self) -> tuple[Callable[..., Table], tuple[str, str | None]]:
        return named.reference_to(self, self.name, self.subject, reader_of(self) if self.is_on_disk else None)


def rows_of(table: Table) -> TableState:
    """Return what a table works on: for sides, for whoever saves its records, and for tests."""
    return table._rows


def _stats(rows: TableState) -> dict[str, float]:
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
        **({} if rows.lifecycle is None else rows.lifecycle.stats()),
        **({} if rows.executor is None else rows.executor.stats()),
        **rows.location.stats(),
    }


def reader_of(table: Table) -> str:
    """Return the expression that opens a table on disk for reading, in any process."""
    path = str(table.path)
    if os.path.exists(os.path.join(os.path.dirname(path), "SHARDED")):
        path = os.path.dirname(path)  # it is a part, beside others
    if table.group is not None:
        return f'er.open({path!r}, mode="r")[{table.name!r}]'
    given = [repr(path), 'mode="r"']
    given += ["init=er.FromArray(weights)"] * bool(table.spec.init.digest)  # which the files do not have
    given += [] if table.name is None else [f"name={table.name!r}"]
    return f"er.open({', '.join(given)})"
