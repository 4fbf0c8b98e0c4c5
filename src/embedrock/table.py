"""`Table`: rows that are looked up by id and stepped by a rule."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from embedrock import kernels
from embedrock.errors import (
    ArgumentError,
    ClosedTableError,
    EmbedrockError,
    GradientError,
    NonFiniteGradientError,
    UnknownArgumentError,
    UnsupportedError,
)
from embedrock.gradients import RowGradients
from embedrock.ids import check_ids, check_range
from embedrock.initializers import Initializer, Normal
from embedrock.interrupts import held_back
from embedrock.plan import Plan, make_plan
from embedrock.rules import History, Rule, describe_rule, read_rule
from embedrock.spec import Spec
from embedrock.states import STATE_FORMAT, check_state, read_rows
from embedrock.tiers.memory import Memory, choose

EXPORT_BATCH_ROWS = 65_536
ON_NONFINITE = ("raise", "skip")

if TYPE_CHECKING:
    from embedrock.kernels.cpu.runtime import Call

P = ParamSpec("P")
T = TypeVar("T")

# Never twice the same, so that a plan's slots are not taken for those of another table.
_epochs = itertools.count(1)
_named: weakref.WeakValueDictionary[str, Table] = weakref.WeakValueDictionary()


def _exclusive(method: Callable[Concatenate[Table, P], T]) -> Callable[Concatenate[Table, P], T]:
    """Run a method alone: a table serves one call at a time, so that no reader sees half a step."""

    @functools.wraps(method)
    def locked(self: Table, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            self._finish_step()
            return method(self, *args, **kwargs)

    return locked


def _whole(method: Callable[Concatenate[Table, P], T]) -> Callable[Concatenate[Table, P], T]:
    """Run a method that changes the table alone and to its end: Ctrl-C waits."""
    exclusive = _exclusive(method)

    @functools.wraps(method)
    def uninterrupted(self: Table, *args: P.args, **kwargs: P.kwargs) -> T:
        with held_back():
            return exclusive(self, *args, **kwargs)

    return uninterrupted


class Table:
    """An embedding table: rows of weights and optimizer state, made when an id is first stepped.

    Args:
        rows: number of rows; ids lie in ``[0, rows)``. None: open ids, any int64.
        dim: weights in a row.
        rule: the sparse optimizer of `update`; None for a table that is only read, or gets its rule by `set_rule`.
        init: first values of rows; by default ``Normal(0, 1)``, as in `torch.nn.Embedding`.
        seed: of first values and of stochastic rounding, 64 bits.
        dtype: of the weights: "float32", "bfloat16" or "float16". The 16-bit ones are rounded stochastically, keyed by
            (seed, id, column, step). Optimizer state is always float32.
        memory: the most RAM that records and directory may take, in bytes or as "512MiB". None: the machine's RAM.
        directory: "direct" (slot = id; RAM follows `rows`), "hashed" (RAM follows the ids touched, and hot rows lie
            together), or "auto": direct for tables of up to 32 MiB, and for those that fit `memory` only so.
        on_nonfinite: what a step with NaN or Inf in its gradients does: "raise", or "skip" the step and count it.
        name: for error messages, and for pickling by reference.

    Raises:
        ArgumentError: a value that cannot work.
        MemoryBudgetError: the table cannot be made in `memory`.

    Example:
        >>> import embedrock as er
        >>> table = er.Table(rows=10**9, dim=4, rule=er.SGD(lr=0.5), init=er.Zeros())
        >>> table.update([7, 7], np.ones((2, 4), np.float32))
        >>> table.lookup([7])
        array([[-1., -1., -1., -1.]], dtype=float32)
    """

    def __init__(
        self,
        rows: int | None,
        dim: int,
        *,
        rule: Rule | None = None,
        init: Initializer | None = None,
        seed: int = 0,
        dtype: str = "float32",
        memory: int | str | None = None,
        directory: str = "auto",
        on_nonfinite: str = "raise",
        name: str | None = None,
        **unknown: Any,
    ) -> None:
        self._subject = f"table {name!r}" if name else "the table"
        _refuse_unknown(unknown)
        _check_kind("rule", rule, Rule, "er.Adam()")
        _check_kind("init", init, Initializer, "er.Normal(std=0.01)")
        if on_nonfinite not in ON_NONFINITE:
            raise ArgumentError(f"`on_nonfinite` must be one of {', '.join(ON_NONFINITE)}: got {on_nonfinite!r}.")
        spec = Spec(_index(rows), _index(dim), dtype, rule, init or Normal(), _index(seed))
        self.name = name
        self._lock = threading.RLock()
        self._memory_arguments = memory, directory
        self._on_nonfinite = on_nonfinite
        self._memory: Memory | None = None
        self._running: Call | None = None
        self._failure: BaseException | None = None
        self._changes = 0  # seen by exports that are under way
        self._install(spec, self._new_memory(spec))
        if name:
            _named[name] = self

    def _new_memory(self, spec: Spec) -> Memory:
        return Memory(spec, choose(spec, *self._memory_arguments, self._subject), self._subject)

    def _install(self, spec: Spec, memory: Memory, history: History | None = None) -> None:
        """Take over new records, whose rule has made no step but those in `history`."""
        self._spec, self._memory = spec, memory
        self._history = history or (spec.rule.history() if spec.rule else None)
        self._changes += 1
        self._steps = self._skipped_steps = 0
        self._epoch = next(_epochs)

    # ---------------------------------------------------------------- reading

    @property
    def spec(self) -> Spec:
        """The table's frozen description."""
        return self._spec

    @property
    def rows(self) -> int | None:
        """Number of rows, or None for open ids."""
        return self._spec.rows

    @property
    def dim(self) -> int:
        """Weights in a row."""
        return self._spec.dim

    @property
    def rule(self) -> Rule | None:
        """The sparse optimizer of `update`."""
        return self._spec.rule

    @property
    def steps(self) -> int:
        """Steps applied so far."""
        return self._steps

    @_exclusive
    def lookup(self, ids: npt.ArrayLike) -> np.ndarray:
        """Return the weights of rows: float32 of shape ``ids.shape + (dim,)``.

        Nothing is stored: a row that was never stepped has its first value, however often it is read.

        Args:
            ids: integers of any shape; repeats are allowed.

        Raises:
            IdError: an id lies outside the table.
            IdTypeError: ids are not integers.
        """
        checked = self._checked_ids(ids)
        if self._history is not None:
            return self._read(self._located(make_plan(checked)), None)
        flat = checked.reshape(-1)
        out = np.empty((flat.size, self.dim), np.float32)
        missing = self._tier.look_up(flat, _positions(flat.size), out) < 0
        if missing.any():
            out[missing] = self._first_values(flat[missing])
        return out.reshape(*checked.shape, self.dim)

    def plan(self, ids: npt.ArrayLike) -> Plan:
        """Return what a batch needs: unique rows, where each position finds its row, and where the records are."""
        with self._lock:  # but not alone: the step before, which moves no record, may still be running
            return make_plan(self._checked_ids(ids), self._tier.directory.find, self._epoch)

    @_exclusive
    def read(self, plan: Plan, out: np.ndarray | None = None) -> np.ndarray:
        """Return the weights of a plan's rows: float32 of shape ``plan.shape + (dim,)``.

        Args:
            plan: made by this table.
            out: C-contiguous float32 of that shape, to write to.
        """
        self._check_out(out, (*plan.shape, self.dim))
        return self._read(self._located(plan), out)

    def _check_out(self, out: Any, shape: tuple[int, ...]) -> None:
        if out is None:
            return
        fits = isinstance(out, np.ndarray) and out.dtype == np.float32 and out.shape == shape
        if not (fits and out.flags.c_contiguous and out.flags.writeable):
            got = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
            raise ArgumentError(
                f"`out` for {self._subject} must be a C-contiguous, writeable float32 array of shape {shape}: "
                f"got {got}. Pass np.empty({shape}, np.float32), or leave it out."
            )

    @_exclusive
    def read_rows(self, plan: Plan) -> np.ndarray:
        """Return the weights of a plan's unique rows: float32 (unique, dim)."""
        return self._read_unique(self._located(plan))

    def _read(self, plan: Plan, out: np.ndarray | None) -> np.ndarray:
        if out is None:
            out = np.empty((*plan.shape, self.dim), np.float32)
        flat = out.reshape(-1, self.dim)
        if self._history is None:
            self._read_rows(plan.ids, plan.slots, plan.inverse, flat)
        else:
            np.take(self._read_unique(plan), plan.inverse, axis=0, out=flat, mode="clip")
        return out

    def _read_unique(self, plan: Plan) -> np.ndarray:
        return self._weights_at(plan.ids, plan.slots)

    def _read_rows(self, ids: np.ndarray, slots: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        """Write the weights of ``ids[positions]``, whose records are in ``slots[positions]``, to `out`."""
        missing, fresh = slots < 0, _no_rows(self.dim)
        if missing.any():
            fresh = self._first_values(ids[missing])
            slots = slots.copy()
            slots[missing] = -1 - np.arange(len(fresh))
        self._tier.read(slots, positions, fresh, out)

    def _first_values(self, ids: np.ndarray) -> np.ndarray:
        values = np.empty((len(ids), self.dim), np.float32)
        self._spec.init.fill(ids, self._spec.key, values)
        return _rounded(values, self._spec)

    def _located(self, plan: Plan) -> Plan:
        # Slots never move within an epoch, so only rows that had none are looked for again.
        if plan.epoch != self._epoch:
            check_range(plan.ids, self.rows, self._subject)
            slots = self._tier.directory.find(plan.ids)
        elif plan.missing:
            slots, unknown = plan.slots.copy(), plan.slots < 0
            slots[unknown] = self._tier.directory.find(plan.ids[unknown])
        else:
            return plan
        return replace(plan, slots=slots, missing=int(np.count_nonzero(slots < 0)), epoch=self._epoch)

    def _checked_ids(self, ids: npt.ArrayLike) -> np.ndarray:
        return check_ids(ids, self.rows, self._subject)

    @property
    def _tier(self) -> Memory:
        if self._memory is None:
            raise ClosedTableError(f"{self._subject} is closed. Make a new Table.")
        if self._failure is not None:
            raise EmbedrockError(
                f"step {self._steps} of {self._subject} failed, and some of its rows may have been stepped: "
                f"{self._failure!r}. Make a new Table and load the last state that you saved."
            )
        return self._memory

    # ---------------------------------------------------------------- training

    @_exclusive
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
        self.apply(self.plan(ids), grads, lr, **changes)

    @_exclusive
    def apply(self, plan: Plan, grads: npt.ArrayLike, lr: float | None = None, **changes: Any) -> None:
        """Make the step of `update` for a batch that was planned."""
        self.step(self.sum(plan, grads), lr=lr, **changes)

    def sum(self, plan: Plan, grads: npt.ArrayLike) -> RowGradients:
        """Return the gradients of a batch, floats of shape ``plan.shape + (dim,)``, summed to one for each row."""
        return RowGradients.sum(plan, self._checked_values("grads", grads, plan.shape))

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
        self.step_by(self._rule_for_step(lr, changes), grads.scaled(scale, clip_value))

    @_whole
    def step_by(self, rule: Rule, grads: RowGradients) -> None:
        """Make the step of `step` with all hyperparameters as `rule` has them; its layout must be the table's."""
        tier = self._tier
        if not rule.same_layout(self.rule):
            raise ArgumentError(f"`rule` must be laid out as the rule of {self._subject}, {self.rule}: got {rule}.")
        self._check_grads(grads)
        if not grads.is_finite:
            return self._refuse(grads)
        plan = self._located(grads.plan)
        slots = self._admit(plan)
        self._count_change(steps=1)
        if self._history is not None:
            self._history.append(rule)
        numbers = self._history.numbers() if self._history is not None else rule.numbers(self._steps)
        args = plan.ids, slots, grads.values, numbers, self._steps
        self._running = kernels.cpu.runtime.start(tier.step, *args)

    @_exclusive
    def check_step(self, grads: RowGradients) -> None:
        """Raise what `step` would raise for these gradients, but for NaN and Inf. Nothing changes."""
        self._check_grads(grads)
        self._tier.check_room(self._located(grads.plan).missing)

    def _check_grads(self, grads: RowGradients) -> None:
        expected = len(grads.plan.ids), self.dim
        if grads.values.shape != expected or grads.values.dtype != np.float32:
            raise GradientError(
                f"gradients of rows of {self._subject} must be float32 {expected}: got {grads.values.dtype} "
                f"{grads.values.shape}. Were they summed for another table?"
            )

    def _count_change(self, steps: int = 0) -> None:
        self._steps += steps
        self._changes += 1

    def _finish_step(self) -> None:
        running = self._running
        if running is None:
            return
        with held_back():
            try:
                running.finish()
            except BaseException as error:
                self._failure = error
                raise
            finally:
                self._running = None

    def _rule_for_step(self, lr: float | None, changes: dict[str, Any]) -> Rule:
        if self.rule is None:
            raise ArgumentError(
                f"{self._subject} has no rule to step by. Pass rule=er.Adam(lr=1e-3) when you make it, or call "
                "set_rule; in PyTorch, make an optimizer: ert.Adam(model)."
            )
        return self.rule.with_changes({"lr": lr, **changes})

    def _refuse(self, grads: RowGradients) -> None:
        if self._on_nonfinite == "skip":
            self._skipped_steps += 1
            return
        bad = grads.nonfinite_ids()
        raise NonFiniteGradientError(
            f"gradients of {self._subject} must be finite: got NaN or Inf in {len(bad)} of {len(grads.values)} rows, "
            f"first ids {bad[:8].tolist()}. The step was refused, nothing has changed. Lower the learning rate, clip "
            'or scale the gradients, or pass on_nonfinite="skip" to leave such steps out.',
            len(bad),
            bad[:8],
        )

    def _admit(self, plan: Plan) -> np.ndarray:
        """Make records for the rows of a plan that have none, and return all slots."""
        if not plan.missing:
            return plan.slots
        self._tier.check_room(plan.missing)
        fresh = self._first_values(plan.ids[plan.slots < 0])
        return self._tier.admit(plan.ids, plan.slots, fresh, self._spec.first_state)

    @_whole
    def assign(self, ids: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Overwrite the weights of rows; their optimizer state stays.

        Args:
            ids: integers of any shape, without repeats.
            values: floats of shape ``ids.shape + (dim,)``; for 16-bit tables they are rounded to nearest.
        """
        plan = self.plan(ids)
        if len(plan.ids) != plan.inverse.size:
            raise ArgumentError(
                f"`ids` of assign must not repeat: got {plan.inverse.size} ids, {len(plan.ids)} of them different."
            )
        checked = self._checked_values("values", values, plan.shape)
        if self._history is not None:
            raise UnsupportedError(
                f"rows of {self._subject} cannot be assigned under Adam(dense=True), where rows lag behind. "
                "Assign them before the rule is set, or use Adam()."
            )
        with np.errstate(over="ignore"):
            kept = _rounded(checked[plan.order], self._spec)
        if not np.isfinite(kept).all():
            raise GradientError(
                f"`values` of {self._subject} must be finite as {self._spec.dtype}: got NaN, Inf or a value too large."
            )
        self._tier.write(self._admit(plan), kept)
        self._count_change()

    def _checked_values(self, name: str, values: npt.ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
        array, expected = np.asarray(values), (*shape, self.dim)
        if array.dtype.kind != "f":
            raise GradientError(f"`{name}` of {self._subject} must be floats: got dtype {array.dtype}.")
        if array.shape != expected:
            raise GradientError(
                f"`{name}` of {self._subject} must have shape {expected}, that of the ids and `dim`: got {array.shape}."
            )
        if array.dtype == np.float32:
            return np.ascontiguousarray(array.reshape(-1, self.dim))
        with np.errstate(over="ignore"):  # a float64 too large becomes Inf, which the step refuses
            return np.ascontiguousarray(array.reshape(-1, self.dim), np.float32)

    @_whole
    def set_rule(self, rule: Rule | None) -> None:
        """Give the table a rule. If its records must be laid out anew, weights stay and state and step begin anew."""
        _check_kind("rule", rule, Rule, "er.Adam()")
        if rule is not None and rule.same_layout(self.rule):
            self._spec = self._spec.with_rule(rule)
            return
        self._install(self._spec.with_rule(rule), self._laid_out(self._spec.with_rule(rule)))

    def _laid_out(self, spec: Spec) -> Memory:
        """Return the same rows in records of another layout, with their first optimizer state."""
        memory = self._new_memory(spec)
        first_state = spec.first_state
        for ids, slots in self._tier.batches(EXPORT_BATCH_ROWS):
            memory.check_room(len(ids))
            memory.admit(ids, np.full(len(ids), -1, np.int64), self._weights_at(ids, slots), first_state)
        return memory

    # ---------------------------------------------------------------- whole tables

    @_exclusive
    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have records: ids int64 (n,), ascending, and weights float32 (n, dim).

        All other rows have their first values: ``table.lookup(np.arange(rows))`` gives every row.
        """
        count = self._tier.directory.count
        ids, weights = np.empty(count, np.int64), np.empty((count, self.dim), np.float32)
        done = 0
        for part, values in self.export_batches():
            ids[done : done + len(part)], weights[done : done + len(part)] = part, values
            done += len(part)
        order = np.argsort(ids)
        return ids[order], weights[order]

    def export_batches(self, batch_rows: int = EXPORT_BATCH_ROWS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Go through the rows that have records, in batches of (ids, weights) as `export` returns them, in any order.

        Takes RAM for one batch. The table must not be stepped while the iterator is in use.

        Args:
            batch_rows: rows in a batch, at most.
        """
        if _index(batch_rows) < 1:
            raise ArgumentError(f"`batch_rows` must be at least 1: got {batch_rows!r}.")
        changes, epoch = self._changes, self._epoch
        for ids, slots in self._open_tier().batches(batch_rows):
            if (changes, epoch) != (self._changes, self._epoch):
                raise ArgumentError(f"{self._subject} was changed while it was being exported. Export it again.")
            yield ids, self._weights_at(ids, slots)

    @_exclusive
    def _open_tier(self) -> Memory:
        return self._tier

    @_exclusive
    def _weights_at(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        values = np.empty((len(ids), self.dim), np.float32)
        self._read_rows(ids, slots, _positions(len(ids)), values)
        if self._history is not None:
            self._tier.refresh(slots, values, self._history.numbers())
        return values

    @_exclusive
    def state(self) -> dict[str, Any]:
        """Return all that `load_state` needs: arrays (where possible views, which later steps change) and scalars."""
        ids, records = self._tier.snapshot()
        history = self._history.state() if self._history is not None else {}
        return {
            **self._description(),
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            "ids": ids,
            "records": records,
            **{f"history_{name}": array for name, array in history.items()},
        }

    @_whole
    def load_state(self, state: dict[str, Any]) -> None:
        """Replace rows, optimizer state, steps and seed by what `state` returned.

        A table without a rule gets that of the state.

        Raises:
            ArgumentError: the state is that of a table of another shape, dtype, initializer or rule.
        """
        self._tier.check_room(0)  # open
        wanted = self.rule
        check_state(state, self._description(), self._subject)
        rule = read_rule(state["rule"])
        if rule is not None and wanted is not None and not wanted.same_layout(rule):
            raise ArgumentError(
                f"a state for {self._subject} must be that of its rule {wanted}: got one of {rule}. "
                "Call set_rule(None) first to take the state's rule."
            )
        spec = replace(self._spec, rule=rule, seed=int(state["seed"]))
        ids, records, history = read_rows(state, spec, self._subject)
        memory = self._new_memory(spec)
        memory.check_room(len(ids))
        memory.paste_records(ids, records)
        self._install(spec, memory, history)
        self._steps, self._skipped_steps = int(state["steps"]), int(state["skipped_steps"])
        if wanted is not None:
            self.set_rule(wanted)

    def _description(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "format": STATE_FORMAT,
            "rows": spec.rows,
            "dim": spec.dim,
            "dtype": spec.dtype,
            "seed": spec.seed,
            "init": repr(spec.init),
            "rule": describe_rule(spec.rule),
        }

    @_exclusive
    def stats(self) -> dict[str, float]:
        """Return numbers about the table: rows, bytes and steps."""
        spec, tier = self._spec, self._tier
        return {
            "rows": -1 if spec.rows is None else spec.rows,
            "rows_touched": tier.directory.count,
            "dim": spec.dim,
            "record_bytes": spec.record_bytes,
            "table_bytes": -1 if spec.table_bytes is None else spec.table_bytes,
            "bytes_used": tier.bytes_used,
            "budget_bytes": tier.budget_bytes,
            "direct": int(tier.is_direct),
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
        }

    def close(self) -> None:
        """Give the table's memory back. Further calls raise `ClosedTableError`; closing twice is allowed."""
        with self._lock:
            self._finish_step()
            self._memory = None
            self._epoch = next(_epochs)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        spec, name = self._spec, f"name={self.name!r}, " if self.name else ""
        state = "closed" if self._memory is None else f"{self._memory.directory.count} rows touched"
        return f"Table({name}rows={spec.rows}, dim={spec.dim}, dtype={spec.dtype!r}, rule={spec.rule}, {state})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        spec, (memory, directory) = self._spec, self._memory_arguments
        made = Table(
            spec.rows,
            spec.dim,
            rule=spec.rule,
            init=spec.init,
            seed=spec.seed,
            dtype=spec.dtype,
            memory=memory,
            directory=directory,
            on_nonfinite=self._on_nonfinite,
        )
        with self._lock:  # the state has views of rows
            made.load_state(self.state())
        memo[id(self)] = made
        return made

    def __reduce__(self) -> tuple[Callable[[str], Table], tuple[str]]:
        if self.name is None or _named.get(self.name) is not self:
            raise UnsupportedError(
                f"{self._subject} cannot be pickled: rows may be larger than memory. Give it a name (name='users') to "
                "pickle it by reference inside this process, or save its rows: table.state(), in PyTorch "
                "model.state_dict()."
            )
        return named_table, (self.name,)


def named_table(name: str) -> Table:
    """Return the open table of that name in this process (what unpickling a table does)."""
    table = _named.get(name)
    if table is None:
        raise ArgumentError(
            f"no table named {name!r} is open in this process, and tables are pickled by reference. Make it first: "
            f"er.Table(..., name={name!r})."
        )
    return table


def _positions(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def _no_rows(dim: int) -> np.ndarray:
    return np.empty((0, dim), np.float32)


def _rounded(values: np.ndarray, spec: Spec) -> np.ndarray:
    """Return float32 values as they are after a stay in the table's storage."""
    if spec.dtype == "float32":
        return values
    runtime, rows = kernels.cpu.runtime, kernels.cpu.rows
    words, positions = np.empty(values.shape, spec.storage.words), runtime.read_only(_positions(len(values)))
    slots = runtime.read_only(positions.astype(np.int64))
    runtime.run(rows.scatter, len(values), words, slots, values)
    runtime.run(rows.gather, len(values), words, slots, positions, values[:0], values)
    return values


def _index(value: Any) -> Any:
    """Return whole numbers of any kind as int, and all else as it is, for `Spec` to refuse."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def _check_kind(name: str, value: object, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        hint = f"Pass an instance: {example}." if isinstance(value, type) else f"For example {example}."
        raise ArgumentError(f"`{name}` must be a {kind.__name__} or None: got {value!r}. {hint}")


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    for name in unknown:
        if name == "path":
            raise UnsupportedError("`path`: tables on disk are not in this release, only tables in RAM. Leave it out.")
        raise UnknownArgumentError(
            f"Table has no argument {name!r}: it takes rows, dim, rule, init, seed, dtype, memory, directory, "
            "on_nonfinite and name."
        )
