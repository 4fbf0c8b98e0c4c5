"""`RowLifecycle`: which rows of a table have a record. A table without admission and eviction has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from embedrock.admission.clock import Reading
from embedrock.admission.copy_on_write import Arrays, Columns, damaged, merged, own_arrays
from embedrock.admission.frequency import CountMinSketch, ExactCounter, FrequencyCounter
from embedrock.admission.usage import UsageTracker
from embedrock.errors import ArgumentError, counted

if TYPE_CHECKING:
    from embedrock.spec.spec import Spec

PREFIX = "residents_"  # prefix of its array names, in the saved arrays of a table
COUNTS = ("admitted", "evicted", "forgotten", "gradients_dropped")
UNTOLD = ("left", "back")  # arrays of ids that the mirror has not received yet
NOBODY = np.empty(0, np.int64)
PARTS = tuple(f"{PREFIX}{name}_" for name in ("now", "before", "uses"))  # prefixes of parts that save changes only


class AdmissionDecision(NamedTuple):
    """Decision about a batch before its step, without effect until `note`.

    Attributes:
        step: number of the step.
        rows: bool (n,), the rows of the batch that the step updates. None: all.
        turned_away: ids of the rows that are not admitted.
        ids: ids of the rows that the step updates.
        new: ids among them that have no record yet.
        excess: number of rows to evict from each segment, int64 (k,).
        counts: whether this is a step of the rule, so that ids are counted.
        now: time of the step; None without eviction.
    """

    step: int
    rows: np.ndarray | None
    turned_away: np.ndarray
    ids: np.ndarray
    new: np.ndarray
    excess: np.ndarray
    counts: bool
    now: Reading | None


class RowLifecycle:
    """Admission and eviction of a table's rows, by the policies of its `Spec`.

    Attributes:
        steps: number of steps so far, of any rule.
        counts: events so far, by the names in `COUNTS`.
        usage: rows that have records, and how they are used. None without eviction: they are not tracked.
        shared: record of the default row, uint8 (record_bytes,). None: not created yet.
    """

    def __init__(self, spec: Spec, subject: str) -> None:
        self.admission, self.eviction, self.subject, self._key = spec.admission, spec.eviction, subject, spec.key
        self._segments = spec.segments
        self.change_layout(spec)
        self.usage = None if self.eviction is None else UsageTracker(self.eviction, spec.segments, spec.frozen)
        # Of this period and of the one before; none without admission.
        self._period, self._counters = 0, [self._new_counter() for _ in range(2 if self.admission else 0)]
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.steps = 0
        self._left, self._back, self._has_mirror = list[np.ndarray](), NOBODY, False
        self.shared: np.ndarray | None = None
        self._is_saved = False

    @classmethod
    def of(cls, spec: Spec, subject: str) -> RowLifecycle | None:
        """Return the lifecycle of a new table. Return None if every updated row gets a record and keeps it."""
        return None if spec.admission is None and spec.eviction is None else cls(spec, subject)

    def _new_counter(self) -> FrequencyCounter:
        assert self.admission is not None  # callers check it
        if self.admission.sketch is None:
            return ExactCounter()
        return CountMinSketch(self.admission, self._key, self._segments)

    @property
    def reads_zeros(self) -> bool:
        """Return whether rows without a record read as zeros."""
        return self.admission is not None and self.admission.default == "zeros"

    @property
    def shares_row(self) -> bool:
        """Return whether rows without a record read as the default row."""
        return self.admission is not None and self.admission.default == "shared"

    # ---------------------------------------------------------------- a step

    def vote(self, ids: np.ndarray, missing: np.ndarray, counts: bool, time: float | None = None) -> AdmissionDecision:
        """Decide which rows of a batch are updated, and how many other rows to evict.

        Args:
            ids: ids of the batch, without repeats.
            missing: bool (n,), the rows without a record.
            counts: whether this is a step of the rule. If not, all ids get a record.
            time: of the newest event of the step, in seconds since 1970; None: it is not known.

        Raises:
            ArgumentError: the batch has more rows than the table may have, or it lacks a time.
        """
        rows, new, nobody, step = None, ids[missing], ids[:0], self.steps + int(counts)
        turned_away = nobody
        if counts:  # also without new ids: all ranks that share a table begin a period in the same step
            self.begin_period(step)
        if counts and len(new) and (enough := self._reach_min_count(new)) is not None and not enough.all():
            rows = np.ones(len(ids), bool)
            rows[missing] = enough
            ids, new, turned_away = ids[rows], new[enough], new[~enough]
        if self._most is not None and self._segments == 1 and len(ids) > self._most:
            raise ArgumentError(
                f"{self.subject} may have {counted(self._most, 'row')} ({self.eviction}), and this batch needs "
                f"{len(ids)} at once. Raise max_rows= or max_bytes= to that at least, or use smaller batches."
            )
        excess, now = nobody, None
        if self.usage is not None:
            excess = self.usage.excess(new, self._most)
            now = (clock := self.usage.clock).read
            if counts and (time is not None or len(ids) > 0 or not now.counts_events):
                now = clock.after(time, self.subject)
        return AdmissionDecision(step, rows, turned_away, ids, new, excess, counts, now)

    def _reach_min_count(self, ids: np.ndarray) -> np.ndarray | None:
        """Return which ids reach `min_count` in a step, bool (n,). None: all ids."""
        if self.admission is None or self.admission.min_count == 1:
            return None
        now, before = self._counters
        return now.of(ids) + before.of(ids) + 1 >= self.admission.min_count

    def begin_period(self, step: int) -> None:
        """Drop counts of periods before that of a step. Only the step's number matters: an early call does no harm."""
        if not (self.admission and self.admission.period):
            return
        period = (step - 1) // self.admission.period
        if period != self._period:
            now, old = self._counters
            before = now if period == self._period + 1 else self._new_counter()
            before.unsaved()
            self._period, self._counters = period, [old.emptied() or self._new_counter(), before]

    def victims(self, decision: AdmissionDecision) -> np.ndarray:
        """Return the ids of the rows to evict for a batch, without any change.

        Raises:
            ArgumentError: the rows to keep leave no room for the batch.
        """
        if self.usage is None or decision.now is None:
            return decision.ids[:0]
        self.usage.make_room(decision.new)
        chosen = self.usage.victims(decision.ids, decision.excess, decision.step, decision.now)
        if self._segments == 1 and len(chosen) < decision.excess[0]:  # one of many may exceed its share for a step
            raise ArgumentError(
                f"{self.subject} may have {counted(self._most or 0, 'row')} ({self.eviction}), and this batch needs "
                f"{len(decision.ids)} at once beside those to `keep`. Raise max_rows= or max_bytes=, or keep fewer."
            )
        return chosen

    def note(self, decision: AdmissionDecision, left: np.ndarray) -> None:
        """Record the step of a batch. `left` are the ids of evicted rows."""
        counts, self.steps = self.counts, decision.step
        self.leave(left)
        if self.usage is not None and decision.now is not None:
            self.usage.pass_by(decision.excess, left, decision.now)
            self.usage.use(decision.ids, decision.step, decision.now)
        if decision.counts:
            for seen in self._counters[:1]:
                seen.see(decision.turned_away)
            for seen in self._counters:
                seen.drop(decision.new)
        counts["admitted"] += len(decision.new)
        counts["evicted"] += len(left)
        counts["gradients_dropped"] += len(decision.turned_away)

    # ---------------------------------------------------------------- mirrors: listeners for evicted rows

    @property
    def is_mirrored(self) -> bool:
        """Return whether a mirror in this or another process follows evicted rows."""
        return self._has_mirror or (self.eviction is not None and self.eviction.has_mirror)

    @property
    def is_untold(self) -> bool:
        """Return whether the mirror of another process has not received some changes."""
        return bool(self._left) or len(self._back) > 0

    def leave(self, ids: np.ndarray) -> None:
        """Record evicted rows for the mirror."""
        if len(ids) and self.is_mirrored:
            self._left.append(ids)

    def tell(self) -> None:
        """Notify the mirror of evicted and returned rows. Without a mirror in this process, keep them."""
        eviction = self.eviction
        if not (self._left or len(self._back)) or eviction is None or not eviction.has_mirror:
            return
        left, back = self._undelivered()
        self._left, self._back = [left] if len(left) else [], back  # kept for a retry if a call fails
        _notify(eviction.evicted, left)
        self._left = []
        _notify(eviction.returned, back)
        self._back = NOBODY

    def _undelivered(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of rows that left and of rows that are back. Rows that changed again since are left out."""
        assert self.usage is not None  # a mirror needs an eviction
        left = np.concatenate([NOBODY, *self._left])
        return left[~self.usage.are_known(left)], self._back[self.usage.are_known(self._back)]

    def follow(self, before: RowLifecycle) -> None:
        """Replace another lifecycle whose mirror goes on. Collect the differences that the mirror has not received."""
        self._has_mirror |= before._has_mirror
        if not (self.is_mirrored and self.usage is not None and before.usage is not None):
            return
        left, back = before._undelivered()
        known, own = np.union1d(np.setdiff1d(before.usage.ids, back), left), self.usage.ids
        left = np.setdiff1d(known, own)
        self._left, self._back = [left] if len(left) else [], np.setdiff1d(own, known)

    def end_mirror(self) -> None:
        self._left, self._back, self._has_mirror = [], NOBODY, False

    # ---------------------------------------------------------------- deleted rows

    def forget(self, ids: np.ndarray, removed: np.ndarray) -> None:
        """Discard the counts and usage of ids. `removed` are the ids among them that had records."""
        if self.usage is not None:
            self.usage.remove(removed)
        for seen in self._counters:
            seen.drop(ids)
        self.counts["forgotten"] += len(removed)
        self.unsaved()  # files that the next commit names still have the ids

    # ---------------------------------------------------------------- saving and statistics

    @property
    def has_counts(self) -> bool:
        """Return whether some ids were counted and not admitted."""
        return self.counts["gradients_dropped"] > 0

    def state(self, is_copy: bool = True) -> dict[str, np.ndarray]:
        """Return the arrays that `load` needs, as private copies. Those of no copy are for `resume`."""
        made = self._arrays({name: part.state() for name, part in self._parts.items()}, is_copy)
        return {name: np.asarray(array) for name, array in made.items()}

    def whole(self) -> Columns:
        """Return the arrays of `state` as columns. A commit may write them while the lifecycle changes."""
        return self._arrays({name: part.whole() for name, part in self._parts.items()})

    @property
    def _parts(self) -> dict[str, FrequencyCounter | UsageTracker]:
        counters = self._counters if self.admission and self.admission.period else self._counters[:1]
        return dict(zip(("now", "before"), counters, strict=False)) | ({"uses": self.usage} if self.usage else {})

    def changes(self, most: int) -> Columns | None:
        """Return the changes since `saved`, for `merged`. Return None if not saved, or above `most` bytes."""
        if not self._is_saved or sum(part.changed_bytes for part in self._parts.values()) > most:
            return None
        changed = {name: (part, part.changes()) for name, part in self._parts.items()}
        return self._arrays({name: part.whole() if own is None else own for name, (part, own) in changed.items()})

    def saved(self) -> None:
        """Mark the state as saved in a file of the next commit. Later commits need only the changes."""
        self._is_saved = True
        for part in self._parts.values():
            part.saved()

    def unsaved(self) -> None:
        """Mark the state as not saved, so that the next commit writes all of it."""
        self._is_saved = False

    def _arrays(self, parts: Mapping[str, Columns], is_copy: bool = False) -> Columns:
        arrays = {f"{name}_{key}": array for name, part in parts.items() for key, array in part.items()}
        numbers = np.array([self.steps, self._period, *(self.counts[name] for name in COUNTS)], np.int64)
        if self.shared is not None:
            arrays["shared"] = self.shared.view(np.float32).copy()
        if self.is_mirrored and not is_copy:  # a copy has mirrors of its own
            arrays |= dict(zip(UNTOLD, self._undelivered(), strict=True))
        return {f"{PREFIX}{name}": array for name, array in {"numbers": numbers, **arrays}.items()}

    def take_over(self, other: RowLifecycle, keeps_counts: bool) -> None:
        """Restore the state of another lifecycle of the same rows, under the policies of this one."""
        arrays = other.state()
        of_counts = f"{PREFIX}now_", f"{PREFIX}before_"
        self.load({name: array for name, array in arrays.items() if keeps_counts or not name.startswith(of_counts)})

    def resume(self, saved: Sequence[Arrays]) -> None:
        """Restore an empty lifecycle from a commit's arrays: a `state`, then `changes`.

        Raises:
            ArgumentError: the arrays are damaged.
        """
        arrays = merged(saved, PARTS)
        self.load(arrays)
        left, back = (arrays.get(f"{PREFIX}{name}") for name in UNTOLD)
        if left is not None and back is not None and self.usage is not None:
            if not left.dtype == back.dtype == np.int64 or not left.ndim == back.ndim == 1:
                raise damaged("`left` and `back` as int64 (n,)")
            self._has_mirror, self._left, self._back = True, [left] if len(left) else [], back
        self.saved()

    def load(self, arrays: Arrays) -> None:
        """Restore an empty lifecycle from the arrays of `state`.

        Raises:
            ArgumentError: the arrays are damaged.
        """
        numbers = np.asarray(arrays.get(f"{PREFIX}numbers", np.empty(0)))
        if numbers.dtype != np.int64 or numbers.shape != (2 + len(COUNTS),) or (numbers < 0).any():
            raise damaged(f"`numbers` as int64 ({2 + len(COUNTS)},), none below 0")
        self.steps, self._period, *counts = numbers.tolist()
        self.counts = dict(zip(COUNTS, counts, strict=True))
        for name, seen in zip(("now", "before"), self._counters, strict=False):
            if own := own_arrays(arrays, f"{PREFIX}{name}_"):
                seen.load(own)
        if self.usage is not None:
            self.usage.load(own_arrays(arrays, f"{PREFIX}uses_"), self.steps)
        shared = arrays.get(f"{PREFIX}shared") if self.shares_row else None
        if shared is not None:
            if shared.dtype != np.float32 or shared.shape != (self._record_bytes // 4,):
                raise damaged(f"`shared` as float32 ({self._record_bytes // 4},)")
            self.shared = shared.copy().view(np.uint8)

    def change_layout(self, spec: Spec) -> None:
        """Adapt the limits to another record layout of the same rows."""
        self._most = None if self.eviction is None else self.eviction.most_rows(spec.record_bytes)
        self._record_bytes = spec.record_bytes

    def stats(self) -> dict[str, float]:
        """Return the entries for a table's `stats()`."""
        made: dict[str, float] = {**self.counts}
        if self.shares_row:
            made |= {"gradients_dropped": 0, "gradients_shared": self.counts["gradients_dropped"]}
        made["residents_bytes"] = sum(part.nbytes for part in (*self._counters, self.usage) if part is not None)
        if self.admission is not None:
            now, needed = self._counters[0], self.admission.min_count - 1
            made["pending"] = now.pending
            made["sketch_error"] = now.share_of(needed) if needed else 0.0
        return made


def _notify(listener: Callable[[np.ndarray], object] | str | os.PathLike[str] | None, ids: np.ndarray) -> None:
    if listener is None or not len(ids):
        return
    if callable(listener):
        listener(ids)
        return
    with open(os.fspath(listener), "ab") as file:
        file.write(np.ascontiguousarray(ids, "<i8").tobytes())
