"""`TableState`: the rows of a table, used by `Table` and by all executors. `Location`: where they live."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.admission.lifecycle import RowLifecycle
from embedrock.errors import ArgumentError, ClosedTableError, EmbedrockError, UnsupportedError, counted
from embedrock.initializers import Given
from embedrock.optimizers import Rule, StepHistory
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.storage.base_cache import BaseCache
from embedrock.storage.listeners import StaleExecutor
from embedrock.storage.ram_backend import RamBackend
from embedrock.storage.record_pools import RecordPools
from embedrock.storage.records import BEGINS_AS, SharedRow
from embedrock.storage.table_lock import TableLock
from embedrock.store.manifest import HistoryFile
from embedrock.system import forks
from embedrock.system.interrupts import held_back
from embedrock.system.log import caller
from embedrock.system.sizes import format_bytes
from embedrock.table.caught_up import CaughtUpReads
from embedrock.table.missing import Missing

NOBODY = np.empty(0, np.int64)
NEVER = 1 << 63  # more steps than any table makes


class ChangeCounter:
    """Counter of a table's changes, with its value at the last commit.

    Attributes:
        of_rows: number of changes that may have changed a row.
        committed: `now` at the last commit.
    """

    def __init__(self) -> None:
        self.now = self.committed = self._kept = 0
        self._begun = -1

    @property
    def of_rows(self) -> int:
        return self.now - self._kept

    def advance(self, keeps_rows: bool = False) -> None:
        """Count a change; `keeps_rows`: it changes no row."""
        self.now += 1
        self._kept += keeps_rows

    def commit(self) -> None:
        self.committed = self.now

    def begin(self) -> None:
        """Mark the state of a new table as committed: it can be made again."""
        self._begun = self.now

    @property
    def is_committed(self) -> bool:
        return self.now == self.committed

    @property
    def can_be_lost(self) -> bool:
        """Return whether there are changes that cannot be made again."""
        return not self.is_committed and self.now != self._begun


@dataclass
class ClosedMember:
    """A member that is not open: as the last commit has it, or as it was closed.

    Attributes:
        steps, skipped_steps: counts of made and skipped steps.
        files: history files in the last commit; None: the commit does not have them.
        history, lifecycle: step history and row lifecycle, if known.
    """

    tier: Backend
    spec: dict[str, Any]
    steps: int
    skipped_steps: int
    files: tuple[HistoryFile, ...] | None
    history: StepHistory | None = None
    lifecycle: RowLifecycle | None = None


class Location(ABC):
    """The place of a table alone, or of the members of a group: in RAM, or in a folder.

    It knows its tables by name, and has weak references to the rows of open ones.

    Attributes:
        pools: factory of the tables' backends.
        is_alone: it is of one table without a group.
        table_lock: the common lock of the tables.
        subject: name of the table or group in error messages.
        writes: whether its tables can change.
        prepared: the last step of the tables that was prepared, and not made yet.
        steps_to_look: steps of a table between calls of `look`.
        went_back_to: the commit whose content the last one has, if that was a rollback.
        listener: weak reference to a function that gets the names of closed members.
        missing: default of the tables' `missing`.
    """

    writes = True
    steps_to_look: int = NEVER
    went_back_to: int | None = None
    missing: Missing | None = None

    def __init__(self, pools: RecordPools, is_alone: bool, table_lock: TableLock, subject: str) -> None:
        self.pools, self.is_alone, self.table_lock, self.subject = pools, is_alone, table_lock, subject
        self.prepared: Any = None
        self._members: dict[str, weakref.ref[TableState] | ClosedMember] = {}
        self.listener: Callable[[], Callable[[str], None] | None] = lambda: None

    # ---------------------------------------------------------------- its tables

    def enter(self, name: str, rows: TableState) -> None:
        self._members[name] = weakref.ref(rows)

    def get(self, name: str) -> TableState | ClosedMember | None:
        found = self._members.get(name)
        return found() if isinstance(found, weakref.ref) else found

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def items(self) -> list[tuple[str, TableState | ClosedMember]]:
        return [(name, member) for name in self._members if (member := self.get(name)) is not None]

    def open_rows(self) -> list[TableState]:
        return [member for _, member in self.items() if isinstance(member, TableState)]

    def _tell_of(self, name: str) -> None:
        if (note := self.listener()) is not None:
            note(name)

    def drop(self, name: str) -> None:
        member = self.get(name)
        if isinstance(member, TableState):
            member.close()

    def rename(self, name: str, new: str) -> None:
        self._members = {new if each == name else each: member for each, member in self._members.items()}
        rows = self.get(new)
        if isinstance(rows, TableState):
            rows.name = new
            rows.name_by(f"table {new!r}")

    def close(self) -> None:
        for rows in self.open_rows():
            rows.close()

    @abstractmethod
    def close_table(self, name: str, tier: Backend) -> None:
        """Release the backend of a closed table. Only background work still uses it."""

    @abstractmethod
    def after_fork(self, subject: str) -> None:
        """Continue in a child process, or raise why a table cannot be used there."""

    # ---------------------------------------------------------------- for error messages

    @property
    @abstractmethod
    def where(self) -> str: ...

    @abstractmethod
    def reopening(self, name: str) -> str:
        """Return a sentence that says how to reopen a closed table."""

    def named_by(self, layer: str) -> str:
        """Return the name of a table whose rows a layer has."""
        return layer

    # ---------------------------------------------------------------- what only tables in folders have

    def wait_for_quiet(self) -> None:  # noqa: B027
        """Wait for background work on rows. The table lock may be released meanwhile."""

    @property
    def is_idle(self) -> bool:
        """Return whether `wait_for_quiet` need not wait."""
        return True

    def idle_pools(self) -> RecordPools:
        """Return `pools` after background work on rows, and compaction, have ended. Raise where nothing may change."""
        return self.pools

    def check_writable(self) -> None:  # noqa: B027
        """Raise `ReadOnlyTableError` where nothing may change."""

    def check_commit(self) -> None:  # noqa: B027
        """Raise `ReadOnlyTableError` where nothing may change, or the error of a background commit."""

    def bury(self, name: str, version: ChangeCounter, ids: np.ndarray, count: int) -> bool:
        """Record deleted ids, `count` of which had records; return whether the next commit must contain them."""
        return False

    def lifecycle_of(self, rows: TableState) -> RowLifecycle | None:
        """Return the row lifecycle of a table, with all of its rows."""
        return rows.lifecycle

    def look(self) -> None:  # noqa: B027
        """Start an automatic commit if it is due. Takes the table lock."""

    def commit_rest(self) -> None:  # noqa: B027
        """Commit the remaining changes if commits are automatic: the tables are about to be closed."""

    def stats(self) -> dict[str, float]:
        return {}

    def check_in_ram(self, verb: str, name: str) -> None:  # noqa: B027
        """Raise `UnsupportedError` if a table is saved by commits, and not by `verb`."""


class RamLocation(Location):
    """Tables that live in RAM, and are saved by `Table.state`."""

    @property
    def where(self) -> str:
        return "in RAM" if self.is_alone else "in RAM, in a group"

    def reopening(self, name: str) -> str:
        made = f"it anew by group.table({name!r}, ...)," if name else "a new Table, or a layer with one,"
        return f"Make {made} and load what state() or state_dict() returned before."

    def after_fork(self, subject: str) -> None:
        """Raise `EmbedrockError` in a child process unless its rows are a copy after a whole step."""
        if self.table_lock.is_torn:
            raise EmbedrockError(
                f"{subject} cannot be used in process {os.getpid()}: when that was forked, another thread of its "
                f"parent had been at work with the table for over {forks.PATIENCE:g} seconds, and the copy here may be "
                "half changed. Start processes before such calls, or wait for them."
            )

    def close_table(self, name: str, tier: Backend) -> None:
        with held_back():
            self.pools.release(tier)
            self._members.pop(name, None)
            self._tell_of(name)


class TableState:
    """The rows of a table: their backend, step counts, and initial values.

    Callers hold the table lock and pass ids that `check_ids` accepted.

    Args:
        on_nonfinite: reaction to a step with NaN or Inf in its gradients, "raise" or "skip".
        name: of the table in its location; "" of a table alone.

    Attributes:
        subject: its name in error messages.
        steps, skipped_steps: counts of made steps, and of steps skipped for NaN or Inf.
        due: steps at which its location has to `look`.
        history: the rule's memory of past steps.
        given_rule, is_rule_bound: origin of the rule: see `table.changes`.
        executor: of the rows in another memory.
        kept_options: of a member of a group on disk, options that commits keep beside its `spec`.
        owns: returns which ids have their rows here, if other processes have the others; None: all.
        backend: of the rows; None: the table is closed. `tier` checks more.
        process: number of the last process that used the rows: see `forks`.
        described: a generation of its lock, and what `reading.described` returned then.
        last_read: the batch that was read, and may still be stepped, the latest plan first: for each of its plans with
            rows of this table, a weak reference to the plan's ids, and the part of this table.
        lifecycle: admission and eviction of rows; None: rows get records when they are stepped.
        missing: choice of the values of rows that are not there; None: "first".
    """

    spec: Spec
    history: StepHistory | None
    lifecycle: RowLifecycle | None

    def __init__(self, location: Location, on_nonfinite: str, name: str = "") -> None:
        self.location, self.on_nonfinite, self.name = location, on_nonfinite, name
        self.subject = f"table {name!r}" if name else location.subject
        self.table_lock, self.version = location.table_lock, ChangeCounter()
        self.steps = self.skipped_steps = self.due = 0
        self.given_rule: Rule | None = None
        self.is_rule_bound = False
        self.executor: StaleExecutor | None = None
        self.kept_options: dict[str, Any] = {}
        self.owns: Callable[[np.ndarray], np.ndarray] | None = None
        self.backend: Backend | None = None
        self.last_read: tuple[tuple[weakref.ref[np.ndarray], slice], ...] = ()
        self._closed_at = ""
        self.reads = CaughtUpReads()
        self.described: tuple[int, np.ndarray] | None = None
        self.missing, self.process = location.missing, forks.process

    def install(
        self,
        spec: Spec,
        tier: Backend,
        history: StepHistory | None = None,
        steps: int = 0,
        skipped_steps: int = 0,
        keeps_rows: bool = False,
        lifecycle: RowLifecycle | None = None,
    ) -> None:
        """Replace the records. Without `history`, their rule has made no step. See `ChangeCounter.advance`."""
        before = getattr(self, "spec", spec).eviction
        if spec.eviction is not None and before is not None and not spec.eviction.has_mirror:
            spec = replace(spec, eviction=replace(spec.eviction, **before.mirrors))  # files do not have them
        self.spec, self.backend = spec, tier
        self.table_lock.generation += 1
        self.let(lifecycle)
        self.history = tier.history = history or (spec.rule.history() if spec.rule else None)
        self.version.advance(keeps_rows)
        self.steps, self.skipped_steps, self.due = steps, skipped_steps, steps + self.location.steps_to_look

    def let(self, lifecycle: RowLifecycle | None) -> None:
        """Set the row lifecycle, and make its default row if it needs one."""
        before, self.lifecycle = getattr(self, "lifecycle", None), lifecycle
        self.forget_batches()
        if lifecycle is not None:
            lifecycle.eviction = self.spec.eviction
            if before is not None and before is not lifecycle:
                lifecycle.follow(before)
        if lifecycle is not None and lifecycle.shares_row and lifecycle.shared is None:
            lifecycle.shared = SharedRow.begun(self.spec, self.first_values(np.array([BEGINS_AS]))[0])

    @property
    def shared(self) -> SharedRow | None:
        record = None if self.lifecycle is None else self.lifecycle.shared
        return None if record is None else SharedRow(self.spec, record)

    def name_by(self, layer: str) -> None:
        """Name the table in error messages by the layer that has its rows, such as "'user', Embedding(100, 4)"."""
        self.subject = self.location.named_by(layer)
        if self.backend is not None:
            self.backend.subject = self.subject

    @property
    def tier(self) -> Backend:
        """The backend; an executor may have newer rows.

        Raises:
            ClosedTableError: the table is closed.
            EmbedrockError: this is a child process that cannot use it; `ReadOnlyTableError` if the parent writes it.
        """
        if self.backend is None:
            raise ClosedTableError(f"{self.subject} is closed{self._closed_at}. {self.location.reopening(self.name)}")
        if self.process != forks.process:
            self.check_process()
            self.location.after_fork(self.subject)
            self.process = forks.process
        if self.table_lock.failure is not None:
            raise EmbedrockError(
                f"step {self.steps} of {self.subject} failed, and some of its rows may have been stepped: "
                f"{self.table_lock.failure!r}. Make a new Table and load the last state that you saved."
            )
        return self.backend

    def are_used_by(self, executor: StaleExecutor, tier: Backend, spec: Spec) -> bool:
        """Return whether an executor has the rows, in this backend, with the record layout of `spec`."""
        is_there = self.executor is executor and self.backend is tier
        return is_there and (self.spec is spec or self.spec.layout == spec.layout)

    def check_open(self) -> None:
        self.tier  # noqa: B018

    def check_process(self) -> None:
        """Raise `UnsupportedError` in a child process if an executor has rows."""
        if self.executor is not None and not self.is_of_this_process:
            raise UnsupportedError(
                f"rows of {self.subject} are on a GPU, in process {self.process}, and this is its child "
                f"{forks.process}: no GPU is of use after a fork. Look rows up in the parent, or start processes by "
                'multiprocessing.get_context("spawn").'
            )

    def check_owned(self, ids: np.ndarray) -> None:
        """Raise `ArgumentError` for rows of other processes."""
        flat = ids.reshape(-1)
        if self.owns is not None and not (here := self.owns(flat)).all():
            raise ArgumentError(
                f"rows of {self.subject} that other processes have cannot be reached here: got ids "
                f"{flat[~here][:4].tolist()}. Look them up by the layer, on all processes at once."
            )

    def check(self) -> None:
        """Raise the error of the executor's earlier calls, if any."""
        if self.executor is not None:
            self.executor.check()

    @property
    def is_of_this_process(self) -> bool:
        return self.process == forks.process

    @property
    def is_closed(self) -> bool:
        return self.backend is None

    def check_writable(self) -> None:
        """Raise `ReadOnlyTableError` if the table cannot change, or the errors of `tier`."""
        self.tier  # noqa: B018
        self.location.check_writable()

    def check_commit(self) -> None:
        self.tier  # noqa: B018
        self.location.check_commit()

    def drop(self) -> Backend | None:
        """Detach the backend and return it; None if the table was closed. Later uses raise `ClosedTableError`."""
        tier, self.backend = self.backend, None
        self.table_lock.generation += 1
        self.forget_batches()
        return tier

    def forget_batches(self) -> None:
        self.last_read, self.location.prepared = (), None
        self.reads.clear()

    @property
    def unfinished(self) -> np.ndarray:
        """Ids of the batch that was read, and may still be stepped."""
        self.location.prepared = None  # it refers to the ids of a refused step, and can be prepared again
        parts = [ids[own] for ref, own in self.last_read if (ids := ref()) is not None]
        return np.concatenate([NOBODY, *parts])

    def close(self) -> None:
        """Wait for background work, close open files, and release the memory."""
        is_usable = self.backend is not None and self.is_of_this_process and self.table_lock.failure is None
        if is_usable and self.location.is_alone:
            self.location.commit_rest()
        tier = self.drop()
        if tier is None:
            return
        self._closed_at = f", since {caller()}"
        if not self.is_of_this_process:  # background work and open files belong to the parent
            self.table_lock.running, self.executor = [], None  # `drop` began a generation
            return
        try:
            self.table_lock.wait_for_step()
            self.location.close_table(self.name, tier)
        finally:
            tier.new_epoch()
            self.attach(None)

    def __str__(self) -> str:
        if (tier := self.backend) is None:
            return "closed"
        used, budget = format_bytes(tier.bytes_used), format_bytes(tier.budget_bytes)
        state = f"{counted(tier.count, 'row')} touched, {self.location.where}, {used} of {budget}"
        return state if self.executor is None else f"{state}, {self.executor!r}"

    # ---------------------------------------------------------------- reading

    @property
    def lags(self) -> bool:
        """Return whether weights in records may be stale."""
        return self.history is not None and self.history.moves_weights

    def default_row(self) -> np.ndarray | None:
        """Return the value of all rows without a record, float32 (dim,); None: each has its initial value."""
        if self.lifecycle is not None and self.lifecycle.reads_zeros:
            return np.zeros(self.spec.dim, np.float32)
        return None if self.shared is None else self.shared.weights()

    @property
    def are_all_there(self) -> bool:
        """Return whether each row without a record is given by its initializer."""
        has_default = self.lifecycle is not None and (self.lifecycle.reads_zeros or self.lifecycle.shares_row)
        return isinstance(self.spec.init, Given) and not has_default

    def row_instead(self, missing: Missing) -> np.ndarray:
        """Return the row of a choice, float32 (dim,).

        Raises:
            ArgumentError: the table has no such row.
        """
        dim, values, shared = self.spec.dim, missing.values, self.shared
        if missing.choice == "shared":
            if shared is not None:
                return shared.weights()
            raise ArgumentError(
                f"`missing` of {self.subject} is 'shared', and it has no default row, which only "
                "admission=er.Admission(default='shared') trains. Give a row, missing=row, or missing='zeros'."
            )
        if missing.choice == "row" and len(values) != dim:
            raise ArgumentError(
                f"`missing` of {self.subject} must be a row of shape ({dim},): got one of shape ({len(values)},)."
            )
        return np.array(values or np.zeros(dim), np.float32)

    @property
    def base(self) -> BaseCache | None:
        """Return the cache of the published table that the rows start as; None: there is none."""
        return BaseCache.of(self.spec.init)

    def first_values(self, ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return float32 (n, dim), the weights of rows without records, not scaled by `StepHistory.first_scale`.

        `out`: memory for them.
        """
        values = np.empty((len(ids), self.spec.dim), np.float32) if out is None else out
        if not len(ids):
            return values
        (self.base or self.spec.init).fill(ids, self.spec.key, values)
        return values if self.spec.init.is_exact_in(self.spec.value_dtype) else rounded(values, self.spec)

    # ---------------------------------------------------------------- training

    def tell(self) -> None:
        if self.lifecycle is not None:
            self.lifecycle.tell()

    def draft(self, rule: Rule) -> Any:
        """Do all work of counting a step that can fail. Return the kernel's arguments, or the history's content."""
        if self.history is None:
            return rule.numbers(self.steps + 1)
        return self.history.draft(rule)

    def count(self, draft: Any) -> Any:
        """Count a drafted step, and return its kernel's arguments."""
        self.steps += 1
        self.version.now += 1
        if self.history is None:
            return draft
        self.history.append()
        return self.history.numbers()

    def undo_steps(self, steps: int) -> None:
        """Uncount the last steps, which an executor refused to make."""
        self.steps -= steps
        if steps and self.history is not None:
            kept = {name: array[: len(array) - steps].copy() for name, array in self.history.state().items()}
            self.history.load(kept, self.steps)

    # ---------------------------------------------------------------- other records

    def lay_out_in_ram(self, directory: str) -> RamBackend | None:
        """Return the backend of a table alone in RAM, "direct" (slots are ids) or "hashed".

        It is made if needed and possible; None: there is no memory for it.
        """
        made = self.location.pools.laid_out(self.tier, self.spec, directory, self.subject)
        if made is not None and made is not self.backend:
            made.history = self.history
            self.replace_tier(made)
        memory = None if made is None else made.pool
        return memory if isinstance(memory, RamBackend) else None

    def replace_tier(self, tier: Backend) -> None:
        self.backend = tier
        self.table_lock.generation += 1
        self.forget_batches()
        self.version.advance(keeps_rows=True)

    def grow(self, spec: Spec) -> None:
        """Grow to more rows, or to open ids: same records, as if the table had been made so."""
        tier = self.location.idle_pools().grown(self.tier, spec, self.subject)
        tier.history, self.spec = self.history, spec
        self.replace_tier(tier)

    def attach(self, executor: StaleExecutor | None) -> None:
        """Attach an executor whose rows may be newer than these until its `finish`. None detaches it."""
        before, self.executor = self.executor, executor
        self.table_lock.generation += 1
        if before is not None and before is not executor:
            before.close()

    def leave_side(self) -> None:
        """Detach the executor, so that only the backend has the rows. Takes the table lock."""
        with self.table_lock.alone():
            self.attach(None)


def rounded(values: np.ndarray, spec: Spec) -> np.ndarray:
    """Round float32 values to the table's dtype of floats, in place. In int8 and int4, only records are rounded."""
    if spec.value_dtype != "float32":
        kernels.cpu.launch(kernels.cpu.rows.to_nearest, values, np.empty(0, spec.words))
    return values
