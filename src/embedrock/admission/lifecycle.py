"""`RowLifecycle`: who has a record in a table. It is asked at one place of a step; a table without it pays nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from embedrock.admission.copy_on_write import Arrays, Columns, damaged, merged, own_arrays
from embedrock.admission.frequency import FrequencyCounter, counter
from embedrock.admission.usage import UsageTracker
from embedrock.errors import ArgumentError, counted

if TYPE_CHECKING:
    from embedrock.spec.spec import Spec

PREFIX = "residents_"  # of its arrays, among those of a rule's history
COUNTS = ("admitted", "evicted", "forgotten", "gradients_dropped")
UNTOLD = ("left", "back")  # ids that a mirror has not heard of yet
NOBODY = np.empty(0, np.int64)
PARTS = tuple(f"{PREFIX}{name}_" for name in ("now", "before", "uses"))  # of which changes may be saved


class AdmissionDecision(NamedTuple):
    """What is decided of a batch before its step. Nothing has changed yet.

    Attributes:
        step: number of the step.
        rows: bool (n,), which of the batch's rows are stepped; None: all.
        turned_away: ids of the others.
        ids: of the rows that are stepped.
        new: ids of those that have no record yet.
        excess: how many rows must leave.
        counts: it is a step, whose ids are seen.
    """

    step: int
    rows: np.ndarray | None
    turned_away: np.ndarray
    ids: np.ndarray
    new: np.ndarray
    excess: int
    counts: bool


class RowLifecycle:
    """Who has a record, by the policies of a table's `Spec`.

    Args:
        spec: of the table.
        subject: the table, for error messages.

    Attributes:
        steps: that it has seen, of whatever rule.
        counts: what happened so far, by the names in `COUNTS`.
        shared: the record of the row that trains for those without one, uint8 (record_bytes,); None: not begun yet.
    """

    def __init__(self, spec: Spec, subject: str) -> None:
        self.admission, self.eviction, self.subject, self._key = spec.admission, spec.eviction, subject, spec.key
        self._most = None if self.eviction is None else self.eviction.most_rows(spec.record_bytes)
        self._uses = None if self.eviction is None else UsageTracker(self.eviction)
        self._period, self._now, self._before = 0, self._nothing_seen(), self._nothing_seen()
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.steps = 0
        self._left, self._back, self._has_mirror = list[np.ndarray](), NOBODY, False
        self.shared: np.ndarray | None = None
        self._record_bytes, self._is_saved = spec.record_bytes, False

    @classmethod
    def of(cls, spec: Spec, subject: str) -> RowLifecycle | None:
        """Return those of a new table; None where every row that is stepped has a record, and keeps it."""
        return None if spec.admission is None and spec.eviction is None else cls(spec, subject)

    def _nothing_seen(self) -> FrequencyCounter | None:
        return None if self.admission is None else counter(self.admission, self._key)

    @property
    def reads_zeros(self) -> bool:
        """Whether rows without a record are read as zeros."""
        return self.admission is not None and self.admission.default == "zeros"

    @property
    def shares_row(self) -> bool:
        """Whether rows without a record are read as one that trains for them."""
        return self.admission is not None and self.admission.default == "shared"

    # ---------------------------------------------------------------- a step

    def vote(self, ids: np.ndarray, missing: np.ndarray, count: int, counts: bool) -> AdmissionDecision:
        """Decide which rows of a batch are stepped, and how many others have to leave for it.

        Args:
            ids: of the batch, without repeats.
            missing: bool (n,), which have no record.
            count: how many rows of the table have one.
            counts: whether it is a step of the rule; else all ids get a record.

        Raises:
            ArgumentError: the batch has more rows than the table may have.
        """
        rows, new, nobody, step = None, ids[missing], ids[:0], self.steps + int(counts)
        turned_away = nobody
        if counts and len(new) and (enough := self._seen_enough(new, step)) is not None and not enough.all():
            rows = np.ones(len(ids), bool)
            rows[missing] = enough
            ids, new, turned_away = ids[rows], new[enough], new[~enough]
        excess = 0
        if self._most is not None:
            excess = count + len(new) - self._most
            self._check_room(len(ids))
        return AdmissionDecision(step, rows, turned_away, ids, new, max(0, excess), counts)

    def _check_room(self, batch_rows: int) -> None:
        if self._most is not None and batch_rows > self._most:
            raise ArgumentError(
                f"{self.subject} may have {counted(self._most, 'row')} ({self.eviction}), and this batch needs "
                f"{batch_rows} at once. Raise max_rows= or max_bytes= to that at least, or use smaller batches."
            )

    def _seen_enough(self, ids: np.ndarray, step: int) -> np.ndarray | None:
        """Return which ids this step sees for the last time that is needed, bool (n,)."""
        if self.admission is None or self._now is None or self._before is None or self.admission.min_count == 1:
            return None
        self._begin_period(step)
        return self._now.of(ids) + self._before.of(ids) + 1 >= self.admission.min_count

    def _begin_period(self, step: int) -> None:
        """Drop counts that are too old. It depends on the number of the step only, so it may be done early."""
        length = 0 if self.admission is None else self.admission.period
        period = (step - 1) // length if length else 0
        if period != self._period:
            old = self._before
            self._before = self._now if period == self._period + 1 else self._nothing_seen()
            if self._before is not None:
                self._before.unsaved()
            self._now = (None if old is None else old.emptied()) or self._nothing_seen()
            self._period = period

    def victims(self, decision: AdmissionDecision) -> np.ndarray:
        """Return the ids of the rows that leave for a batch. Nothing changes.

        Raises:
            ArgumentError: the rows to keep leave no room for the batch.
        """
        if self._uses is None:
            return decision.ids[:0]
        self._uses.make_room(len(decision.new))
        chosen = self._uses.victims(decision.ids, decision.excess, decision.step)
        if len(chosen) < decision.excess:
            raise ArgumentError(
                f"{self.subject} may have {counted(self._most or 0, 'row')} ({self.eviction}), and this batch needs "
                f"{len(decision.ids)} at once beside those to `keep`. Raise max_rows= or max_bytes=, or keep fewer."
            )
        return chosen

    def note(self, decision: AdmissionDecision, left: np.ndarray) -> None:
        """Note what has been done for a batch: rows `left`, and others came or were used."""
        counts, self.steps = self.counts, decision.step
        self.leave(left)
        if self._uses is not None:
            self._uses.pass_by(decision.excess, left)
            self._uses.use(decision.ids, decision.step)
        if decision.counts and self._now is not None and self._before is not None:
            self._now.see(decision.turned_away)
            for seen in (self._now, self._before):
                seen.drop(decision.new)
        counts["admitted"] += len(decision.new)
        counts["evicted"] += len(left)
        counts["gradients_dropped"] += len(decision.turned_away)

    # ---------------------------------------------------------------- mirrors, who want to know of rows that left

    @property
    def is_mirrored(self) -> bool:
        """Whether somebody wants to know of rows that left, here or in another process."""
        return self._has_mirror or (self.eviction is not None and self.eviction.has_mirror)

    @property
    def is_untold(self) -> bool:
        """Whether there are rows that a mirror elsewhere has to be told of."""
        return bool(self._left) or len(self._back) > 0

    def leave(self, ids: np.ndarray) -> None:
        """Note rows that left, for a mirror to be told."""
        if len(ids) and self.is_mirrored:
            self._left.append(ids)

    def tell(self) -> None:
        """Call who wants to know of rows that have left, or are back; what nobody here wants to know, is kept."""
        eviction = self.eviction
        if not (self._left or len(self._back)) or eviction is None or not eviction.has_mirror:
            return
        left, back = self._untold()
        self._left, self._back = [left] if len(left) else [], back  # for the next time, where it fails
        _tell(eviction.evicted, left)
        self._left = []
        _tell(eviction.returned, back)
        self._back = NOBODY

    def _untold(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of rows that left, and that are back, as far as they still have, and have not, left."""
        assert self._uses is not None  # only with an eviction there is a mirror
        left = np.concatenate([NOBODY, *self._left])
        return left[~self._uses.are_known(left)], self._back[self._uses.are_known(self._back)]

    def follow(self, before: RowLifecycle) -> None:
        """Go on in the place of another one, of which a mirror knows: of its rows, but for what it was not told."""
        self._has_mirror |= before._has_mirror
        if not (self.is_mirrored and self._uses is not None and before._uses is not None):
            return
        left, back = before._untold()
        known, own = np.union1d(np.setdiff1d(before._uses.ids, back), left), self._uses.ids
        left = np.setdiff1d(known, own)
        self._left, self._back = [left] if len(left) else [], np.setdiff1d(own, known)

    def end_mirror(self) -> None:
        """Note that nobody wants to know any more of rows that left."""
        self._left, self._back, self._has_mirror = [], NOBODY, False

    # ---------------------------------------------------------------- rows that are forgotten

    def forget(self, ids: np.ndarray, removed: np.ndarray) -> None:
        """Forget all that is known of ids, `removed` of which had records."""
        if self._uses is not None:
            self._uses.remove(removed)
        for seen in (self._now, self._before):
            if seen is not None:
                seen.drop(ids)
        self.counts["forgotten"] += len(removed)
        self.unsaved()  # or files that the next commit names would have the ids still

    # ---------------------------------------------------------------- saved, and shown

    @property
    def has_counts(self) -> bool:
        """Whether ids were seen that have no record yet."""
        return self.counts["gradients_dropped"] > 0

    def state(self) -> dict[str, np.ndarray]:
        """Return what `load` needs, as arrays of int64 of their own."""
        made = self._arrays({name: part.state() for name, part in self._parts.items()}, is_copy=True)
        return {name: np.asarray(array) for name, array in made.items()}

    def whole(self) -> Columns:
        """Return what `state` does, for a commit to write while it changes."""
        return self._arrays({name: part.whole() for name, part in self._parts.items()})

    @property
    def _parts(self) -> dict[str, FrequencyCounter | UsageTracker]:
        before = self._before if self.admission and self.admission.period else None
        parts: dict[str, FrequencyCounter | UsageTracker | None] = {
            "now": self._now,
            "before": before,
            "uses": self._uses,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def changes(self, most: int) -> Columns | None:
        """Return what has changed since `saved`, as arrays for `merged`; None: not saved, or more than `most` bytes."""
        if not self._is_saved or sum(part.changed_bytes for part in self._parts.values()) > most:
            return None
        changed = {name: (part, part.changes()) for name, part in self._parts.items()}
        return self._arrays({name: part.whole() if own is None else own for name, (part, own) in changed.items()})

    def saved(self) -> None:
        """Note that a file has what it is now, which the next commit will name: the one after it needs changes only."""
        self._is_saved = True
        for part in self._parts.values():
            part.saved()

    def unsaved(self) -> None:
        """Note that no file may have it."""
        self._is_saved = False

    def _arrays(self, parts: Mapping[str, Columns], is_copy: bool = False) -> Columns:
        arrays = {f"{name}_{key}": array for name, part in parts.items() for key, array in part.items()}
        numbers = np.array([self.steps, self._period, *(self.counts[name] for name in COUNTS)], np.int64)
        if self.shared is not None:
            arrays["shared"] = self.shared.view(np.float32).copy()
        if self.is_mirrored and not is_copy:  # which has mirrors of its own
            arrays |= dict(zip(UNTOLD, self._untold(), strict=True))
        return {f"{PREFIX}{name}": array for name, array in {"numbers": numbers, **arrays}.items()}

    def take_over(self, other: RowLifecycle, keeps_counts: bool) -> None:
        """Go on from another one of the same rows, by the policies of this one."""
        arrays = other.state()
        kept = {name: array for name, array in arrays.items() if keeps_counts or not _is_of_counts(name)}
        self.load(kept)

    def resume(self, saved: Sequence[Arrays]) -> None:
        """Go on, in one that is empty, from what a commit's files have: `state` first, and then `changes`.

        Raises:
            ArgumentError: they cannot be.
        """
        arrays = merged(saved, PARTS)
        self.load(arrays)
        left, back = (arrays.get(f"{PREFIX}{name}") for name in UNTOLD)
        if left is not None and back is not None and self._uses is not None:
            if not left.dtype == back.dtype == np.int64 or not left.ndim == back.ndim == 1:
                raise damaged("`left` and `back` as int64 (n,)")
            self._has_mirror, self._left, self._back = True, [left] if len(left) else [], back
        self.saved()

    def load(self, arrays: Arrays) -> None:
        """Take over what `state` returned, into one that is empty.

        Raises:
            ArgumentError: it cannot be.
        """
        numbers = np.asarray(arrays.get(f"{PREFIX}numbers", np.empty(0)))
        if numbers.dtype != np.int64 or numbers.shape != (2 + len(COUNTS),) or (numbers < 0).any():
            raise damaged(f"`numbers` as int64 ({2 + len(COUNTS)},), none below 0")
        self.steps, self._period, *counts = numbers.tolist()
        self.counts = dict(zip(COUNTS, counts, strict=True))
        for name, part in (("now", self._now), ("before", self._before)):
            own = own_arrays(arrays, f"{PREFIX}{name}_")
            if part is not None and own:
                part.load(own)
        if self._uses is not None:
            self._uses.load(own_arrays(arrays, f"{PREFIX}uses_"), self.steps)
        shared = arrays.get(f"{PREFIX}shared") if self.shares_row else None
        if shared is not None:
            if shared.dtype != np.float32 or shared.shape != (self._record_bytes // 4,):
                raise damaged(f"`shared` as float32 ({self._record_bytes // 4},)")
            self.shared = shared.copy().view(np.uint8)

    @property
    def knows_rows(self) -> bool:
        """Whether it knows which rows have records: it need not, where none ever leaves."""
        return self._uses is not None

    @property
    def row_count(self) -> int:
        """How many rows it knows to have records."""
        return 0 if self._uses is None else self._uses.count

    def are_known(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids it knows to have records, bool (n,)."""
        assert self._uses is not None  # the caller has asked
        return self._uses.are_known(ids)

    def adopt(self, ids: np.ndarray) -> None:
        """Begin with rows that have records already, as if the last step had used them."""
        if self._uses is not None:
            self._uses.adopt(ids, self.steps)

    def change_layout(self, spec: Spec) -> None:
        """Go on with the same rows in records of another layout."""
        self._most = None if self.eviction is None else self.eviction.most_rows(spec.record_bytes)
        self._record_bytes = spec.record_bytes

    def stats(self) -> dict[str, float]:
        """Return numbers about it."""
        made: dict[str, float] = {**self.counts}
        if self.shares_row:
            made |= {"gradients_dropped": 0, "gradients_shared": self.counts["gradients_dropped"]}
        parts = [part for part in (self._now, self._before, self._uses) if part is not None]
        made["residents_bytes"] = sum(part.nbytes for part in parts)
        if self.admission is not None and self._now is not None:
            made["pending"] = self._now.pending
            needed = self.admission.min_count - 1
            made["sketch_error"] = self._now.share_of(needed) if needed else 0.0
        return made


def _tell(told: Callable[[np.ndarray], object] | str | os.PathLike[str] | None, ids: np.ndarray) -> None:
    if told is None or not len(ids):
        return
    if callable(told):
        told(ids)
        return
    with open(os.fspath(told), "ab") as file:
        file.write(np.ascontiguousarray(ids, "<i8").tobytes())


def _is_of_counts(name: str) -> bool:
    return name.startswith((f"{PREFIX}now_", f"{PREFIX}before_"))
