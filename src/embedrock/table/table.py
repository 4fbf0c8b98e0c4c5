"""`Table`: rows that are looked up by id and stepped by a rule."""

from __future__ import annotations

import errno
import functools
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from embedrock import kernels
from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import check_ids, check_range
from embedrock.batch.plan import Plan, make_plan
from embedrock.errors import (
    ArgumentError,
    CacheTooSmallError,
    ClosedTableError,
    EmbedrockError,
    GradientError,
    MemoryBudgetError,
    NonFiniteGradientError,
    ReadOnlyTableError,
    UnknownArgumentError,
    UnsupportedError,
)
from embedrock.initializers import Initializer, Normal
from embedrock.machine.interrupts import held_back
from embedrock.machine.sizes import parse_device_memory
from embedrock.machine.vfs import OS_SYSTEM, System
from embedrock.rules import History, Rule, describe_rule, read_rule
from embedrock.spec import Spec
from embedrock.store.verify import Verdict, verify
from embedrock.table.description import check_same, describe_spec
from embedrock.table.files import Changes, Durability, Settings, open_files, open_or_make_files
from embedrock.table.prefetch import prefetch
from embedrock.table.saved import STATE_FORMAT, check_state, read_rows
from embedrock.tiers.commit import Commit
from embedrock.tiers.disk import Disk, Ticket, memory_for
from embedrock.tiers.memory import Memory, check_directory, choose
from embedrock.tiers.records import Records
from embedrock.tiers.side import Side
from embedrock.tiers.tier import Tier
from embedrock.tiers.turn import Turn

EXPORT_BATCH_ROWS = 65_536
ON_NONFINITE = ("raise", "skip")

P = ParamSpec("P")
T = TypeVar("T")

_named: weakref.WeakValueDictionary[str, Table] = weakref.WeakValueDictionary()


class _Refreshed(NamedTuple):
    """Rows of a plan that a read brought up to date, where the rule lets rows lag behind.

    The step of the same plan would compute the same again, to the bit: so it takes these.

    Attributes:
        plan: whose rows.
        changes: how many there had been of the table.
        had_record: bool (unique,), which rows had one.
        weights, state: float32 (unique, dim) and (unique, state_width).
    """

    plan: Plan
    changes: int
    had_record: np.ndarray
    weights: np.ndarray
    state: np.ndarray


def _exclusive(method: Callable[Concatenate[Table, P], T]) -> Callable[Concatenate[Table, P], T]:
    """Run a method alone: a table serves one call at a time, so that no reader sees half a step."""

    @functools.wraps(method)
    def locked(self: Table, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn.alone():
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

    Its rows live in RAM or, with `path`, on disk behind a cache in RAM; that changes no bit of any result.

    Args:
        rows: number of rows; ids lie in ``[0, rows)``. None: open ids, any int64.
        dim: weights in a row.
        rule: the sparse optimizer of `update`; None for a table that is only read, or gets its rule by `set_rule`.
        init: first values of rows; by default ``Normal(0, 1)``, as in `torch.nn.Embedding`.
        seed: of first values and of stochastic rounding, 64 bits.
        dtype: of the weights: "float32", "bfloat16" or "float16". The 16-bit ones are rounded stochastically, keyed by
            (seed, id, column, step). Optimizer state is always float32.
        path: a folder to keep the rows in. The table there is opened as of its last commit, or made.
        memory: the most RAM that records and directory may take, in bytes or as "512MiB". None: the machine's RAM, or
            half of it for a table on disk.
        directory: of a table in RAM: "direct" (slot = id; RAM follows `rows`), "hashed" (RAM follows the ids touched,
            and hot rows lie together), or "auto": direct for tables of up to 32 MiB, and for those that fit `memory`
            only so.
        on_nonfinite: what a step with NaN or Inf in its gradients does: "raise", or "skip" the step and count it.
        name: for error messages, and for pickling by reference.
        policy: of a table on disk: which rows leave the cache, "lfu" (the least frequently used), "lru" or "clock".
        keep: of a table on disk: newest commits that are kept; those with a name always are.
        lock: of a table on disk: refuse to open where the file system has no locks.
        mode: "w", or "r" for a snapshot of a table on disk that never moves.
        system: does the I/O of a table on disk (for tests).
        device_memory: the most GPU memory that its rows may take once a model that has it is on a GPU, in bytes or as
            "2GiB": all rows if they fit, else a cache of those in use. 0: none, rows are used where they are in RAM.
            None: half of what is free then.

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

    def __init__(
        self,
        rows: int | None,
        dim: int,
        *,
        rule: Rule | None = None,
        init: Initializer | None = None,
        seed: int = 0,
        dtype: str = "float32",
        path: str | os.PathLike[str] | None = None,
        memory: int | str | None = None,
        directory: str = "auto",
        on_nonfinite: str = "raise",
        name: str | None = None,
        policy: str = "lfu",
        keep: int = 2,
        lock: bool = True,
        mode: str = "w",
        system: System = OS_SYSTEM,
        device_memory: int | str | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(unknown)
        self.device_memory = parse_device_memory(device_memory)
        _check_kind("rule", rule, Rule, "er.Adam()")
        _check_kind("init", init, Initializer, "er.Normal(std=0.01)")
        self._begin(name, on_nonfinite, (memory, directory))
        spec = Spec(_index(rows), _index(dim), dtype, rule, init or Normal(), _index(seed))
        if path is None:
            of_disk = {"policy": policy, "keep": keep, "lock": lock, "mode": mode, "system": system}
            _refuse_options_of_disk(of_disk, self._subject)
            self._install(spec, self._new_tier(spec))
        else:
            settings = Settings(os.fspath(path), memory, policy, _index(keep), lock, mode, None, system).checked()
            given = describe_spec(spec) | ({"init": None} if init is None else {}) | {"rule": None}
            self._open(*open_or_make_files(settings, spec, given), rule)
        if name:
            _named[name] = self

    def _begin(self, name: str | None, on_nonfinite: str, memory: tuple[int | str | None, str]) -> None:
        """Set what is the same for all tables."""
        check_directory(memory[1])
        if on_nonfinite not in ON_NONFINITE:
            raise ArgumentError(f"`on_nonfinite` must be one of {', '.join(ON_NONFINITE)}: got {on_nonfinite!r}.")
        self.name = name
        self._subject = f"table {name!r}" if name else "the table"
        self._turn = Turn()
        self._memory_arguments = memory
        self._on_nonfinite = on_nonfinite
        self._durability: Durability | None = None
        self._place: Tier | None = None
        self._changes = Changes()
        self._kept: _Refreshed | None = None
        self._side: Side | None = None
        self._process = os.getpid()

    def _open(self, durability: Durability, spec: Spec, rule: Rule | None) -> None:
        """Go on from the last commit, by `rule` if one is given."""
        try:
            self._durability, self._subject = durability, f"table {self.name or durability.settings.path!r}"
            weakref.finalize(self, durability.abandon, self._changes, self._subject)
            self._resume(spec)
            if rule is None or durability.settings.mode == "r":
                return
            if spec.rule is not None and not rule.same_layout(spec.rule):
                asked = describe_spec(spec.with_rule(rule))
                check_same(asked, describe_spec(spec), durability.settings.path)
            self.set_rule(rule)
        except BaseException:
            self._place = None
            durability.close()
            raise

    def _resume(self, spec: Spec) -> None:
        """Take the state of the last commit."""
        durability = self._on_disk()
        self._install(spec, durability.tier(spec, self._turn, self._subject), durability.history(spec))
        manifest = durability.store.manifest
        self._steps, self._skipped_steps = manifest.steps, manifest.skipped_steps
        self._changes.commit()

    def _new_tier(self, spec: Spec) -> Memory:
        return Memory(spec, choose(spec, *self._memory_arguments, self._subject), self._subject)

    def _install(self, spec: Spec, tier: Tier, history: History | None = None) -> None:
        """Take over new records, whose rule has made no step but those in `history`."""
        self._spec, self._place = spec, tier
        self._history = history or (spec.rule.history() if spec.rule else None)
        self._changes.made += 1
        self._steps = self._skipped_steps = 0

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
    def options(self) -> dict[str, Any]:
        """What of the table's arguments is no part of `spec`: with the spec's, they make another table like it."""
        memory, directory = self._memory_arguments
        made_with = {"memory": memory, "directory": directory, "on_nonfinite": self._on_nonfinite, "name": self.name}
        made_with["device_memory"] = self.device_memory
        if self._durability is None:
            return made_with
        settings = self._durability.settings
        return {**made_with, "path": settings.path, "policy": settings.policy, "keep": settings.keep}

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
        if self.lags:
            return self._read(make_plan(checked), None)
        flat, tier = checked.reshape(-1), self._tier
        out = np.empty((flat.size, self.dim), np.float32)
        missing = tier.look_up(flat, _positions(flat.size), out) < 0
        if missing.any():
            absent = flat[missing]
            out[missing] = self._read(make_plan(absent), None) if tier.reaches_below else self._first_values(absent)
        return out.reshape(*checked.shape, self.dim)

    def plan(self, ids: npt.ArrayLike) -> Plan:
        """Return what a batch needs: unique rows, where each position finds its row, and where the records are."""
        with self._turn.lock:  # but not alone: the step before, which moves no record, may still be running
            return make_plan(self._checked_ids(ids), self._tier.find, self._tier.epoch)

    @_exclusive
    def read(self, plan: Plan, out: np.ndarray | None = None) -> np.ndarray:
        """Return the weights of a plan's rows: float32 of shape ``plan.shape + (dim,)``.

        Args:
            plan: made by this table.
            out: C-contiguous float32 of that shape, to write to.
        """
        self._check_out(out, (*plan.shape, self.dim))
        return self._read(plan, out)

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
        return self._unique_weights(plan.ids, self._brought(plan))

    def _read(self, plan: Plan, out: np.ndarray | None) -> np.ndarray:
        if out is None:
            out = np.empty((*plan.shape, self.dim), np.float32)
        flat, here = out.reshape(-1, self.dim), self._brought(plan)
        if here is not None and not self.lags:
            self._read_rows(self._tier.records, here.ids, here.slots, here.inverse, flat)
        else:
            rows = self._weights_of(plan.ids) if here is None else self._up_to_date(plan, here.slots)
            np.take(rows, plan.inverse, axis=0, out=flat, mode="clip")
        return out

    def _brought(self, plan: Plan) -> Plan | None:
        """Return a plan whose rows are in fast memory; None where they are too many for it."""
        try:
            return self._located(plan)
        except CacheTooSmallError:
            return None

    def _unique_weights(self, ids: np.ndarray, here: Plan | None) -> np.ndarray:
        return self._weights_of(ids) if here is None else self._weights_at(self._tier.records, ids, here.slots)

    def _weights_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the weights of rows, as many as there may be, wherever they are."""
        values, tier = np.empty((len(ids), self.dim), np.float32), self._tier
        if not isinstance(tier, Disk):
            return self._weights_at(tier.records, ids, tier.find(ids))
        for start in range(0, len(ids), EXPORT_BATCH_ROWS):
            part = ids[start : start + EXPORT_BATCH_ROWS]
            slots = np.full(len(part), -1, np.int64)
            known = np.flatnonzero(tier.existing(part))
            slots[known] = np.arange(len(known))
            values[start : start + EXPORT_BATCH_ROWS] = self._weights_at(tier.copies(part[known]), part, slots)
        return values

    def _up_to_date(self, plan: Plan, slots: np.ndarray) -> np.ndarray:
        """Return the weights of a plan's rows, and keep what brought them up to date for the step of the same plan."""
        values, state = self._refreshed_at(self._tier.records, plan.ids, slots)
        # Of a plan that nobody else has, there will be no step. Weights of 16 bits are rounded by the step itself.
        if state is not None and plan.epoch >= 0 and self._spec.dtype == "float32":
            self._kept = _Refreshed(plan, self._changes.made, slots >= 0, values, state)
        return values

    def _take_kept(self, plan: Plan, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return slots, weights and state of the rows that the last read brought up to date, if it was of this plan."""
        kept, self._kept = self._kept, None
        if kept is None or kept.plan is not plan or kept.changes != self._changes.made:
            return None
        here = kept.had_record
        return (slots, *kept[3:]) if here.all() else (slots[here], kept.weights[here], kept.state[here])

    def _weights_at(self, records: Records, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return self._refreshed_at(records, ids, slots)[0]

    def _refreshed_at(
        self, records: Records, ids: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return weights as of the last step, and the optimizer state that goes with them where they lag behind."""
        values = np.empty((len(ids), self.dim), np.float32)
        self._read_rows(records, ids, slots, _positions(len(ids)), values)
        if self._history is None or not self._history.moves_weights:
            return values, None
        return values, records.refresh(slots, values, self._history.numbers())

    @property
    def lags(self) -> bool:
        """Whether weights as records have them may be behind."""
        return self._history is not None and self._history.moves_weights

    @property
    def first_scale(self) -> float:
        """What first values have been multiplied by in rows without records: 1, but under dense AdamW and Ftrl."""
        return 1.0 if self._history is None else self._history.first_scale()

    def _read_rows(
        self, records: Records, ids: np.ndarray, slots: np.ndarray, positions: np.ndarray, out: np.ndarray
    ) -> None:
        """Write the weights of ``ids[positions]``, whose records are in ``slots[positions]``, to `out`."""
        missing, fresh = slots < 0, _no_rows(self.dim)
        if missing.any():
            fresh = self._first_values(ids[missing])
            slots = slots.copy()
            slots[missing] = -1 - np.arange(len(fresh))
        records.read(slots, positions, fresh, out)

    def _first_values(self, ids: np.ndarray) -> np.ndarray:
        values = np.empty((len(ids), self.dim), np.float32)
        self._spec.init.fill(ids, self._spec.key, values)
        return _rounded(values, self._spec)

    def _located(self, plan: Plan) -> Plan:
        """Return a plan whose slots are those of now."""
        # Slots never move within an epoch, so only rows that had none are looked for again.
        tier, slots = self._tier, plan.slots
        if plan.epoch != tier.epoch:
            check_range(plan.ids, self.rows, self._subject)
            slots = tier.find(plan.ids)
        elif plan.missing:
            slots, unknown = plan.slots.copy(), plan.slots < 0
            slots[unknown] = tier.find(plan.ids[unknown])
        return self._with_slots(plan, tier.bring(plan.ids, slots))

    def _with_slots(self, plan: Plan, slots: np.ndarray) -> Plan:
        if slots is plan.slots and plan.epoch == self._tier.epoch:
            return plan
        return replace(plan, slots=slots, missing=int(np.count_nonzero(slots < 0)), epoch=self._tier.epoch)

    def _checked_ids(self, ids: npt.ArrayLike) -> np.ndarray:
        return check_ids(ids, self.rows, self._subject)

    @property
    def _tier(self) -> Tier:
        if self._side is not None:
            self._side.check()
        return self.tier_beside()

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
        self._check_commit()
        self.step_by(self._rule_for_step(lr, changes), grads.scaled(scale, clip_value))

    @_whole
    def step_by(self, rule: Rule, grads: RowGradients) -> None:
        """Make the step of `step` with all hyperparameters as `rule` has them; its layout must be the table's."""
        tier = self._changeable
        if not rule.same_layout(self.rule):
            raise ArgumentError(f"`rule` must be laid out as the rule of {self._subject}, {self.rule}: got {rule}.")
        self._check_grads(grads)
        if not grads.is_finite:
            return self._refuse(grads)
        slots = self._admit(grads.plan)
        tier.changing(slots)
        refreshed = self._take_kept(grads.plan, slots)
        numbers = self._count_step(rule)
        args = grads.plan.ids, slots, grads.values, numbers, self._steps, refreshed
        self._turn.running = kernels.cpu.threads.start(tier.records.step, *args)

    @_exclusive
    def check_step(self, grads: RowGradients) -> None:
        """Raise what `step` would raise for these gradients, but for NaN and Inf. Nothing changes."""
        self._check_commit()
        self._check_grads(grads)
        self._check_room(grads.plan)

    def _check_room(self, plan: Plan) -> None:
        slots = self._roomy(plan).slots
        self.tier_beside().preserve(slots[slots >= 0])

    def _check_grads(self, grads: RowGradients) -> None:
        expected = len(grads.plan.ids), self.dim
        if grads.values.shape != expected or grads.values.dtype != np.float32:
            raise GradientError(
                f"gradients of rows of {self._subject} must be float32 {expected}: got {grads.values.dtype} "
                f"{grads.values.shape}. Were they summed for another table?"
            )

    def _count_change(self, steps: int = 0) -> None:
        self._steps += steps
        self._changes.made += 1

    def _count_step(self, rule: Rule) -> Any:
        """Count a step by `rule`, and return its kernel's arguments."""
        self._count_change(steps=1)
        if self._history is None:
            return rule.numbers(self._steps)
        self._history.append(rule)
        return self._history.numbers()

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

    @property
    def _changeable(self) -> Tier:
        """The tier, of a table that may be changed."""
        tier = self._tier
        if isinstance(tier, Disk):
            self._on_disk().check_writes(self._subject)
        return tier

    @_exclusive
    def _check_commit(self) -> None:
        """Raise what went wrong with a commit in the background."""
        if isinstance(tier := self._changeable, Disk):
            self._raise_commit_failure(tier)

    def _roomy(self, plan: Plan) -> Plan:
        """Return a plan with slots, for whose missing rows there is room."""
        plan = self._located(plan)
        return self._with_slots(plan, self._changeable.make_room(plan.ids, plan.slots))

    def _admit(self, plan: Plan) -> np.ndarray:
        """Make records for the rows of a plan that have none, and return all slots."""
        plan = self._roomy(plan)
        if not plan.missing:
            return plan.slots
        fresh = self._first_values(plan.ids[plan.slots < 0])
        return self._tier.admit(plan.ids, plan.slots, fresh, self._spec.first_state)

    @_whole
    def assign(self, ids: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Overwrite the weights of rows; their optimizer state stays.

        Args:
            ids: integers of any shape, without repeats.
            values: floats of shape ``ids.shape + (dim,)``; for 16-bit tables they are rounded to nearest.
        """
        self._check_commit()
        plan = self.plan(ids)
        if len(plan.ids) != plan.inverse.size:
            raise ArgumentError(
                f"`ids` of assign must not repeat: got {plan.inverse.size} ids, {len(plan.ids)} of them different."
            )
        checked = self._checked_values("values", values, plan.shape)
        if self.lags:
            kind = type(self.rule).__name__
            raise UnsupportedError(
                f"rows of {self._subject} cannot be assigned under {kind}(dense=True), where rows lag behind. "
                f"Assign them before the rule is set, or use {kind}()."
            )
        with np.errstate(over="ignore"):
            kept = _rounded(checked[plan.order], self._spec)
        if not np.isfinite(kept).all():
            raise GradientError(
                f"`values` of {self._subject} must be finite as {self._spec.dtype}: got NaN, Inf or a value too large."
            )
        slots = self._admit(plan)
        self._tier.changing(slots)
        self._tier.records.write(slots, kept)
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

    def _lay_out_files(self, spec: Spec, tier: Disk) -> None:
        durability = self._on_disk()
        durability.check_writes(self._subject)
        self._be_quiet(tier)
        made = durability.emptied(spec, self._turn, self._subject)
        try:
            self._laid_out(spec, made)
        except BaseException:
            made.store.give_up()
            raise
        durability.replace_store(made.store)
        self._install(spec, made)

    @_whole
    def set_rule(self, rule: Rule | None) -> None:
        """Give the table a rule. If its records must be laid out anew, weights stay and state and step begin anew."""
        _check_kind("rule", rule, Rule, "er.Adam()")
        spec, tier = self._spec.with_rule(rule), self._tier
        if rule == self.rule:
            return
        if rule is not None and rule.same_layout(self.rule):
            self._spec = spec
            return
        if self.first_scale != 1.0:
            raise UnsupportedError(
                f"the rule of {self._subject} cannot be replaced after {self._steps} steps by {self.rule}: that also "
                "moved rows without records, whose first values would come back. Look up the rows that you need, and "
                "assign them to a new table."
            )
        if isinstance(tier, Disk):
            self._lay_out_files(spec, tier)
        else:
            self._install(spec, self._laid_out(spec, self._new_tier(spec)))

    def _laid_out(self, spec: Spec, made: Tier) -> Tier:
        """Fill an empty tier with the same rows, in records of another layout, with their first optimizer state."""
        first_state = spec.first_state
        for ids in self._tier.id_batches(EXPORT_BATCH_ROWS):
            for start in range(0, len(ids), made.batch_rows):
                part = ids[start : start + made.batch_rows]
                slots = made.make_room(part, np.full(len(part), -1, np.int64))
                made.admit(part, slots, self._weights_of(part), first_state)
        return made

    # ---------------------------------------------------------------- rows in another memory

    def attach(self, side: Side | None) -> None:
        """Have rows in another memory, which may be newer than those here until `Side.finish`; None: no longer."""
        with self._turn.lock:
            before, self._side = self._side, side
            if before is not None and before is not side:
                before.close()

    @_exclusive
    def leave_side(self) -> None:
        """Have the rows here only."""
        self.attach(None)

    @property
    def side(self) -> Side | None:
        """The rows in another memory."""
        return self._side

    @property
    def turn(self) -> Turn:
        """Who has the table: for sides."""
        return self._turn

    @_exclusive
    def lay_out_direct(self) -> Memory | None:
        """Have the slot of a row be its id, where the table lives in RAM and fits its budget so; return its tier."""
        tier, (memory, directory) = self._tier, self._memory_arguments
        if not isinstance(tier, Memory) or tier.is_direct:
            return tier if isinstance(tier, Memory) else None
        if self.rows is None or directory == "hashed":
            return None
        try:
            made = Memory(self._spec, choose(self._spec, memory, "direct", self._subject), self._subject)
        except MemoryBudgetError:
            return None
        made.paste_records(*tier.snapshot())
        self._place = made
        self._count_change()
        return made

    def tier_beside(self) -> Tier:
        """The tier, as it is: a side may have newer rows."""
        if self._place is None:
            raise ClosedTableError(f"{self._subject} is closed. Make a new Table.")
        if self._process != os.getpid() and self._durability is not None:
            self._after_fork()
        if self._turn.failure is not None:
            raise EmbedrockError(
                f"step {self._steps} of {self._subject} failed, and some of its rows may have been stepped: "
                f"{self._turn.failure!r}. Make a new Table and load the last state that you saved."
            )
        return self._place

    def numbers_now(self) -> Any:
        """Return what brings rows up to date that lag behind; None where none do."""
        return self._history.numbers() if self.lags and self._history is not None else None

    def located(self, plan: Plan) -> Plan:
        """Return a plan with the slots of now, whose rows are in fast memory. The caller holds the turn."""
        return self._located(plan)

    def check_beside(self, plan: Plan) -> None:
        """Raise what `admitted` would raise. Nothing changes. The caller holds the turn."""
        if isinstance(self._changeable, Disk):
            self._check_commit()
        self._check_room(plan)

    def admitted(self, plan: Plan) -> np.ndarray:
        """Return the slots of a plan's rows, all of which have records, and are about to change beside it.

        The caller holds the turn.
        """
        slots = self._admit(plan)
        self.tier_beside().changing(slots)
        return slots

    def values_of(self, ids: np.ndarray, here: bool) -> np.ndarray:
        """Return float32 (n, dim): first values of rows without records, or (not `here`) weights wherever they are."""
        return self._first_values(ids) if here else self._weights_of(ids)

    def step_beside(self, rule: Rule) -> tuple[Any, int]:
        """Count a step that a side makes; return its kernel's arguments and its number. The caller holds the turn."""
        return self._count_step(rule), self._steps

    def skip_beside(self) -> None:
        """Count a step that a side leaves out for NaN or Inf. The caller holds the turn."""
        self._skipped_steps += 1

    def take_back(self, steps: int) -> None:
        """Uncount the last steps, which a side refused to make. The caller holds the turn."""
        self._steps -= steps
        if steps and self._history is not None:
            kept = {name: array[: len(array) - steps].copy() for name, array in self._history.state().items()}
            self._history.load(kept, self._steps)

    @property
    def changes(self) -> int:
        """How often it was changed."""
        return self._changes.made

    @property
    def subject(self) -> str:
        """What error messages call it."""
        return self._subject

    @property
    def on_nonfinite(self) -> str:
        """What a step with NaN or Inf in its gradients does."""
        return self._on_nonfinite

    # ---------------------------------------------------------------- whole tables

    @_exclusive
    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have records: ids int64 (n,), ascending, and weights float32 (n, dim).

        All other rows have their first values: ``table.lookup(np.arange(rows))`` gives every row.
        """
        count = self._tier.count
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
        batches, changes = self._id_batches(batch_rows), self._changes.made
        for ids in batches:
            yield ids, self._exported(ids, changes)

    @_exclusive
    def _id_batches(self, size: int) -> Iterator[np.ndarray]:
        return self._tier.id_batches(size)

    @_exclusive
    def _exported(self, ids: np.ndarray, changes: int) -> np.ndarray:
        if changes != self._changes.made:
            raise ArgumentError(f"{self._subject} was changed while it was being exported. Export it again.")
        return self._weights_of(ids)

    @_exclusive
    def state(self) -> dict[str, Any]:
        """Return all that `load_state` needs: arrays (where possible views, which later steps change) and scalars."""
        ids, records = self._in_ram("state").snapshot()
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
        self._in_ram("load_state")
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
        memory = self._new_tier(spec)
        memory.check_room(len(ids))
        memory.paste_records(ids, records)
        self._install(spec, memory, history)
        self._steps, self._skipped_steps = int(state["steps"]), int(state["skipped_steps"])
        if wanted is not None:
            self.set_rule(wanted)

    def _in_ram(self, verb: str) -> Memory:
        """The tier, of a table in RAM."""
        if not isinstance(tier := self._tier, Memory):
            raise UnsupportedError(
                f"{verb}() is for tables in RAM, and {self._subject} is on disk, where it may be larger than RAM. "
                "commit() saves it, er.open(path) opens it, rollback(commit) goes back."
            )
        return tier

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
            "rows_touched": tier.count,
            "dim": spec.dim,
            "record_bytes": spec.record_bytes,
            "table_bytes": -1 if spec.table_bytes is None else spec.table_bytes,
            "bytes_used": tier.bytes_used,
            "budget_bytes": tier.budget_bytes,
            "direct": int(tier.is_direct),
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            **tier.stats(),
            **({} if self._side is None else self._side.stats()),
            **({} if self._durability is None else self._durability.stats()),
        }

    def close(self) -> None:
        """Give the table's memory back. Further calls raise `ClosedTableError`; closing twice is allowed.

        A commit that runs in the background is waited for. Changes of a table on disk that no commit has are lost,
        with an `UncommittedWarning`.
        """
        with self._turn.lock:
            if self._place is None:
                return
            tier, self._place, self._kept = self._place, None, None
            try:
                self._turn.settle()
                self._close_files(tier)
            finally:
                tier.new_epoch()
                self.attach(None)

    def _close_files(self, tier: Tier) -> None:
        if self._durability is None or not isinstance(tier, Disk) or self._process != os.getpid():
            return
        try:
            self._be_quiet(tier)
        finally:
            self._durability.abandon(self._changes, self._subject)

    # ---------------------------------------------------------------- tables on disk

    def _on_disk(self) -> Durability:
        if self._durability is None:
            raise UnsupportedError(
                f"{self._subject} lives in RAM and has no commits. Make it with path=..., or save what state() returns."
            )
        return self._durability

    def _disk(self) -> tuple[Durability, Disk]:
        durability, tier = self._on_disk(), self._tier
        assert isinstance(tier, Disk)  # a table that has files has this tier
        return durability, tier

    @property
    def path(self) -> str | None:
        """The folder of a table on disk, absolute; None for a table in RAM."""
        return None if self._durability is None else self._durability.settings.path

    @property
    def is_on_disk(self) -> bool:
        """Whether its rows live on disk."""
        return self._durability is not None

    @property
    def mode(self) -> str:
        """ "w", or "r" for a snapshot."""
        return "w" if self._durability is None else self._durability.settings.mode

    @property
    def uuid(self) -> str:
        """What tells a table on disk from all others, wherever it is moved: 32 hexadecimal digits."""
        return self._on_disk().store.manifest.uuid

    @property
    def last_commit(self) -> int:
        """Number of the last commit that is durable."""
        return self._on_disk().store.manifest.commit

    @property
    def last_step(self) -> int | None:
        """The `step` that was given to the last commit."""
        return self._on_disk().store.manifest.step

    @property
    def uncommitted(self) -> bool:
        """Whether a table on disk has changes that no commit has."""
        return self._durability is not None and self._changes.pending

    @_whole
    def commit(self, step: int | None = None, name: str | None = None, wait: bool = True) -> int:
        """Make all changes so far durable, as one; return the commit's number.

        After a crash at any instant the table opens as of the last commit, or of one made since.

        Args:
            step: the caller's step number, to go on from.
            name: keeps the commit until `release`; others are dropped when `keep` newer ones are there.
            wait: return when it is durable. False: it is written in the background, with the values of now, while
                training goes on; what goes wrong is raised by the next call that changes, commits or closes the table.

        Raises:
            CommitError: it failed (disk full, I/O error). The last commit is whole, and so are the rows in RAM.
            ReadOnlyTableError: the table was opened with ``mode="r"``.
            UnsupportedError: the table lives in RAM.
        """
        durability, tier = self._disk()
        durability.check_writes(self._subject)
        step = _index(step)
        durability.check_name(step, name)
        self._end_commit(tier)
        commit = durability.begin(tier, self._commit_fields(step, name))
        self._changes.commit()
        if wait:
            commit.hurry()
        commit.start()
        if wait:
            commit.wait()
            self._take_end(tier, commit)
        return commit.number

    def _commit_fields(self, step: int | None, name: str | None) -> dict[str, Any]:
        history = {} if self._history is None else {key: array.copy() for key, array in self._history.state().items()}
        return {
            "step": step,
            "name": name,
            "spec": describe_spec(self._spec),
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            "history": history,
        }

    def _be_quiet(self, tier: Disk) -> None:
        """Wait for all that uses a tier whose rows are about to be dropped, and might write some of them."""
        self._turn.wait_for(tier.becomes_quiet)
        self._end_commit(tier)

    def _end_commit(self, tier: Disk) -> None:
        """Wait for the commit under way, and raise what went wrong with it."""
        while tier.commit is not None:  # another thread may begin one while this one waits
            tier.commit.wait()
            self._raise_commit_failure(tier)

    def _raise_commit_failure(self, tier: Disk) -> None:
        if tier.commit is not None and tier.commit.is_done:
            self._take_end(tier, tier.commit)

    def _take_end(self, tier: Disk, commit: Commit) -> None:
        """Raise what went wrong with a commit that has ended."""
        error = self._on_disk().error_of(commit)
        if tier.commit is commit:
            tier.commit = None
        if error is not None:
            self._changes.committed = -1
            raise error

    def commits(self) -> list[dict[str, Any]]:
        """Return the commits that there are, the oldest first: dicts of commit, step, name, time, rows and bytes."""
        return self._on_disk().commits()

    def release(self, name: str) -> None:
        """Let retention drop the commits called `name`. Nothing happens where there are none."""
        durability, _ = self._disk()
        durability.check_writes(self._subject)
        durability.release(name)

    @_whole
    def rollback(self, commit: int) -> int:
        """Go back to an earlier commit: its content becomes a new one, whose number is returned.

        Changes that no commit has are dropped. No earlier commit is lost.

        Raises:
            ArgumentError: there is no such commit.
        """
        durability, tier = self._disk()
        durability.check_writes(self._subject)
        self._be_quiet(tier)
        spec = durability.rollback(_index(commit), self._spec.init, self._subject)
        try:
            self._resume(spec)
        except BaseException:  # the records in RAM are not those of the files
            self._place = None
            durability.close()
            raise
        return self.last_commit

    def compact(self) -> int:
        """Fold the changes of past commits into the table's base, and commit that; return the last commit's number.

        Changes that no commit has are not in it. It happens by itself in the background after commits, as often as the
        disk's and the RAM's use ask for it.
        """
        durability, tier = self._disk()
        durability.check_writes(self._subject)
        with self._turn.lock:
            self._end_commit(tier)
        with tier.in_use():
            durability.compact(self.rows)
        return self._commit_base()

    @_whole
    def _commit_base(self) -> int:
        durability, tier = self._disk()
        self._end_commit(tier)
        durability.commit_base()
        return self.last_commit

    def verify(self) -> Verdict:
        """Read all files of all commits, and check every checksum: see `Verdict`."""
        store = self._on_disk().store
        return verify(store.system, store.folder)

    # ---------------------------------------------------------------- ahead of time

    def bring(self, ids: npt.ArrayLike) -> Ticket:
        """Bring rows up from disk that a later batch will use; they stay until the ticket is released.

        Any thread may call it: the disk is read while others go on with the table.

        Raises:
            IdError, IdTypeError: as for `lookup`.
            CacheTooSmallError: the rows do not fit the cache together with those in use.
        """
        checked = self._checked_ids(ids)
        wanted = make_plan(checked).ids if self.is_on_disk else checked
        with self._turn.lock:
            tier = self._tier
            if not isinstance(tier, Disk):
                return Ticket()
            tier.begin_bring()
        return tier.bring_ahead(wanted)

    def memory_for(self, rows: int) -> int:
        """Return a `memory` in bytes with which a table on disk holds so many rows of this kind in its cache."""
        return memory_for(self._spec, rows)

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

    def _after_fork(self) -> None:
        """In a child process: have a reader go on with locks and a cache of its own, and refuse to write."""
        durability = self._on_disk()
        if durability.writes:
            raise ReadOnlyTableError(
                errno.EROFS,
                f"{self._subject} is written by process {self._process}, and this is its child {os.getpid()}. Open it "
                'here with mode="r", or use it in the parent only',
                durability.settings.path,
            )
        self._process = os.getpid()
        self._turn = Turn()
        durability.after_fork()
        self._resume(self._spec)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        spec, name = self._spec, f"name={self.name!r}, " if self.name else ""
        state = "closed" if self._place is None else f"{self._place.count} rows touched"
        state = state if self._side is None else f"{state}, {self._side!r}"
        return f"Table({name}rows={spec.rows}, dim={spec.dim}, dtype={spec.dtype!r}, rule={spec.rule}, {state})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        self._in_ram("copy.deepcopy")
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
            device_memory=self.device_memory,
        )
        with self._turn.lock:  # the state has views of rows
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
    cpu, words, positions = kernels.cpu, np.empty(values.shape, spec.storage.words), _positions(len(values))
    slots = positions.astype(np.int64)
    cpu.launch(cpu.rows.scatter, words, slots, values)
    cpu.launch(cpu.rows.gather, words, slots, positions, values[:0], values)
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
        raise UnknownArgumentError(
            f"Table has no argument {name!r}: it takes rows, dim, rule, init, seed, dtype, path, memory, directory, "
            "on_nonfinite, name, policy, keep, lock, mode and device_memory."
        )


def _refuse_options_of_disk(options: dict[str, Any], subject: str) -> None:
    """Refuse those that were given: a default says nothing."""
    given = [f"{name}={value!r}" for name, value in options.items() if value != Settings._field_defaults[name]]
    if given:
        raise ArgumentError(
            f"{subject} has no `path`, and lives in RAM without the options of tables on disk: got {', '.join(given)}. "
            "Pass path= as well to keep its rows on disk, or leave these out."
        )


def open_table(
    path: str | os.PathLike[str],
    mode: str = "w",
    at: int | None = None,
    *,
    memory: int | str | None = None,
    init: Initializer | None = None,
    on_nonfinite: str = "raise",
    name: str | None = None,
    policy: str = "lfu",
    keep: int = 2,
    lock: bool = True,
    system: System = OS_SYSTEM,
    device_memory: int | str | None = None,
) -> Table:
    """Open a table on disk as of a commit.

    Args:
        path: its folder.
        mode: "w" to be its one writer, or "r" for a snapshot that never moves, whatever a writer does meanwhile.
        at: number of the commit, for a reader; None: the last one.
        memory, on_nonfinite, name, policy, keep, lock, system, device_memory: as in `Table`.
        init: for a table whose first values come from an array: that `er.FromArray`.

    Raises:
        TableFileError: there is no table, or `init` is missing or another one.
        TableLockedError: another writer has it open.
        CorruptTableError, NewerFormatError: its files are damaged, or of a newer release.
        ArgumentError: there is no commit `at`.

    Example:
        >>> import tempfile, embedrock as er
        >>> folder = tempfile.mkdtemp() + "/users.rock"
        >>> with er.Table(rows=10**9, dim=4, path=folder, rule=er.SGD(lr=0.5), init=er.Zeros()) as table:
        ...     table.update([7], np.ones((1, 4), np.float32))
        ...     table.commit(step=1)
        1
        >>> with er.open(folder, mode="r") as table:
        ...     table.lookup([7])
        array([[-0.5, -0.5, -0.5, -0.5]], dtype=float32)
    """
    settings = Settings(os.fspath(path), memory, policy, _index(keep), lock, mode, _index(at), system).checked()
    table = Table.__new__(Table)
    table.device_memory = parse_device_memory(device_memory)
    table._begin(name, on_nonfinite, (memory, "auto"))
    table._open(*open_files(settings, init), rule=None)
    if name:
        _named[name] = table
    return table
