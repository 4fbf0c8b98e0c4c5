"""`UsageTracker`: which rows have records, how they were used, and which rows to evict."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable

import numpy as np

from embedrock import kernels
from embedrock.admission.copy_on_write import Arrays, Columns, LastCopy, copied, damaged, int64
from embedrock.batch.id_table import IdNumbers
from embedrock.spec.eviction import Eviction
from embedrock.spec.frozen import FrozenRows
from embedrock.system.arena import returned

ONE_USE = 256  # one use, as a fixed-point count that halves with time
MOST_USES = 1 << 22
SAMPLED = 4  # rows sampled per evicted row
ROUNDS = 8  # rounds of the clock hand within the allowed idle time
LEAST_LOOK = 64  # rows that the hand passes per step, at least, if rows may be idle
STEPS_OF_A_ROUND = 256  # steps per round of the hand, if the idle limit is a time
TICKS = 64  # recorded times within the allowed idle time
PAUSE_S, LONGER = 60.0, 16  # a gap between steps counts at most this, or `LONGER` times the gap before
LAST_BITS = 41
FIRST_ROWS = 1024


class UsageTracker:
    """Rows that have records, with their usage. The order of rows depends only on the steps.

    It is saved by the methods of `ExactCounter`.

    Args:
        eviction: the policy, which decides what the tracker records.
        clock: returns the time in seconds. Only gaps between steps matter.
        frozen: rows that stay, beside those that the policy keeps.

    Attributes:
        count: number of rows.
    """

    def __init__(
        self, eviction: Eviction, clock: Callable[[], float] = time.monotonic, frozen: FrozenRows | None = None
    ) -> None:
        self._eviction, self._clock, self.count, self._hand = eviction, clock, 0, 0
        self._numbers, self._kept, self._frozen = IdNumbers(), eviction.kept(), frozen
        self._ids, self._last, self._marks = (np.empty(FIRST_ROWS, np.int64) for _ in range(3))
        self._is_kept = np.empty(FIRST_ROWS, bool)  # rows that `keep` protects
        self._changed, self._is_saved = np.zeros(FIRST_ROWS, bool), False  # places changed since the save
        self._snapshot = LastCopy()
        # The ids of a batch, and their numbers. The weak reference ends with the batch.
        self._batch_numbers: tuple[weakref.ref[np.ndarray], np.ndarray] | None = None
        self._busy = np.zeros(FIRST_ROWS, bool)  # rows of the batch, while victims are chosen
        self._ticks = np.empty((0, 2), np.int64)  # (step, seconds of training): that step was the newest one then
        self._trained, self._gap = 0.0, 0.0  # seconds of training, and how many of them the last gap added
        self._stepped_at: float | None = None  # time of the last step in this process, or None

    @property
    def nbytes(self) -> int:
        arrays = self._ids, self._last, self._marks, self._is_kept, self._busy, self._changed
        return self._numbers.nbytes + sum(array.nbytes for array in arrays) + self._snapshot.nbytes

    @property
    def ids(self) -> np.ndarray:
        """Return the ids that have records, in internal order."""
        return self._ids[: self.count]

    def are_known(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids have records, bool (n,)."""
        return self._numbers.find(ids) >= 0

    # ---------------------------------------------------------------- insertion and usage

    def use(self, ids: np.ndarray, step: int) -> None:
        """Record the rows of a step, without repeats. New rows are added in their order."""
        numbers = self._numbers_of(ids)
        new = numbers < 0
        if new.any():
            self._touch(numbers[~new], step)
            self._add(ids[new], step)
        else:
            self._touch(numbers, step)
        self._tick(step)

    def _touch(self, numbers: np.ndarray, step: int) -> None:
        self._mark_changed(numbers)
        if self._eviction.by != "use":
            self._last[numbers] = step
            return
        numbers_of_step = step, self._eviction.half_life, ONE_USE, MOST_USES
        kernels.cpu.launch(kernels.cpu.residents.touch, self._last, self._marks, numbers, *numbers_of_step)

    def _mark_changed(self, places: np.ndarray) -> None:
        """Mark places as changed. Call before the change."""
        if self._is_saved:
            self._changed[places] = True
        if (snapshot := self._snapshot.now) is not None:
            snapshot.keep(places)

    def _add(self, ids: np.ndarray, step: int) -> None:
        self.make_room(len(ids))
        new = slice(self.count, self.count + len(ids))
        places = np.arange(new.start, new.stop)
        self._mark_changed(places)
        self._numbers.put(ids, places)
        self._ids[new], self._last[new] = ids, step
        self._marks[new] = step if self._eviction.by == "age" else ONE_USE
        self._is_kept[new] = np.isin(ids, self._kept) if len(self._kept) else False
        if self._frozen:
            self._is_kept[new] |= self._frozen.has(ids)
        self.count += len(ids)

    def make_room(self, more: int) -> None:
        """Grow the arrays for `more` new rows, so that `use` cannot fail."""
        self._numbers.make_room(more)
        size = len(self._ids)
        if self.count + more > size:
            size = max(self.count + more, size + size // 2)
            for name in ("_ids", "_last", "_marks", "_is_kept", "_changed", "_busy"):
                before = getattr(self, name)[: self.count]
                made = returned(size, before.dtype, "what is known of rows that have records")
                made[: self.count] = before
                setattr(self, name, made)

    def _tick(self, step: int) -> None:
        seconds = self._eviction.idle_seconds()
        if not seconds:
            return
        now, ticks = self._advance(min(PAUSE_S, seconds / TICKS)), self._ticks
        if len(ticks) > 1 and now - ticks[-2, 1] < seconds / TICKS:
            ticks = ticks[:-1]  # drop the last one: it is of the newest step, and the time of the next step is unknown
        expired = np.flatnonzero(ticks[:, 1] <= now - seconds)
        first = int(expired[-1]) if expired.size else 0
        self._ticks = np.concatenate([ticks[first:], np.array([[step, math.ceil(now)]], np.int64)])

    def _advance(self, pause: float) -> float:
        """Return the seconds of training, with those since the last step. A pause counts at most `pause` seconds.

        A gap counts in full if steps are regularly rare: up to `LONGER` times the gap before.
        """
        now = self._clock()
        gap = 0.0 if self._stepped_at is None else max(0.0, now - self._stepped_at)
        self._stepped_at, self._gap = now, min(gap, max(pause, LONGER * self._gap))
        self._trained += self._gap
        return self._trained

    # ---------------------------------------------------------------- eviction

    def victims(self, busy_ids: np.ndarray, excess: int, step: int) -> np.ndarray:
        """Return the ids of the rows to evict in a step, without any change.

        Args:
            busy_ids: ids of the batch, which stay.
            excess: number of rows to evict.
            step: number of the step.

        Returns:
            int64 (n,): at least `excess` ids, or fewer if no more rows may leave.
        """
        excess, self._batch_numbers = max(0, excess), None
        look = min(self.count, max(SAMPLED * excess, self._look()))
        if not look:
            return np.empty(0, np.int64)
        found = self._numbers.find(busy_ids)
        numbers = found[found >= 0]
        self._busy[numbers] = True
        try:
            chosen = self._chosen(excess, look, step)
        finally:
            self._busy[numbers] = False
        self._batch_numbers = weakref.ref(busy_ids), found
        return self._ids[chosen]

    def _chosen(self, excess: int, look: int, step: int) -> np.ndarray:
        while True:
            window = (self._hand + np.arange(look)) % self.count
            window = window[~(self._busy[window] | self._is_kept[window])]
            is_idle = self._last[window] < self._idle_before(step)
            idle, rest = window[is_idle], window[~is_idle]
            missing = excess - len(idle)
            if missing <= 0:
                return idle
            if missing <= len(rest) or look == self.count:
                return np.concatenate([idle, rest[self._least(rest, missing, step)]])
            look = min(self.count, 2 * look)

    def _least(self, numbers: np.ndarray, count: int, step: int) -> np.ndarray:
        """Return the positions of the rows with the lowest scores. Among equal scores, the first positions count."""
        if count >= len(numbers):
            return np.arange(len(numbers))
        last, marks, half_life = self._last[numbers], self._marks[numbers], self._eviction.half_life
        worth = last if self._eviction.by == "recency" else marks
        if self._eviction.by == "use":
            uses = marks >> np.minimum(step // half_life - last // half_life, 62)  # faded, in units of 1 / `ONE_USE`
            worth = (uses << LAST_BITS) | np.minimum(last, (1 << LAST_BITS) - 1)
        limit = np.partition(worth, count - 1)[count - 1]
        below, equal = np.flatnonzero(worth < limit), np.flatnonzero(worth == limit)
        return np.concatenate([below, equal[: count - len(below)]])

    def _look(self) -> int:
        """Return the number of rows that the hand passes in a step, to find idle rows."""
        idle = self._eviction.idle
        if idle is None:
            return 0
        steps = STEPS_OF_A_ROUND if isinstance(idle, str) else max(1, idle // ROUNDS)
        return max(LEAST_LOOK, -(-self.count // steps))

    def _idle_before(self, step: int) -> int:
        """Return the first step whose rows are not idle yet. Rows used before it have expired."""
        idle = self._eviction.idle
        if idle is None:
            return -1
        if not isinstance(idle, str):
            return step - idle
        expired = np.flatnonzero(self._ticks[:, 1] <= self._trained - self._eviction.idle_seconds())
        return int(self._ticks[expired[-1], 0]) + 1 if expired.size else -1

    def pass_by(self, excess: int, removed: np.ndarray) -> None:
        """Remove the rows evicted in a step, and advance the clock hand."""
        look = min(self.count, max(SAMPLED * max(0, excess), self._look()))
        self.remove(removed)
        self._hand = (self._hand + look) % self.count if self.count else 0

    def remove(self, ids: np.ndarray) -> None:
        """Remove rows that have records, without repeats. The last rows take their places."""
        if not len(ids):
            return
        numbers, known = self._numbers.find(ids), self._batch_numbers
        count = self.count - len(numbers)
        left = np.ones(len(numbers), bool)  # of the places from `count` on: rows that move
        left[numbers[numbers >= count] - count] = False
        holes, moved = numbers[numbers < count], count + np.flatnonzero(left)
        self._numbers.remove(ids)
        self._mark_changed(holes)
        for array in (self._ids, self._last, self._marks, self._is_kept):
            array[holes] = array[moved]
        self._numbers.set(self._ids[holes], holes)
        self.count = count
        self._hand = self._hand % count if count else 0
        if known is not None:  # none of the batch was removed, but some may have moved
            places = np.full(len(left), -1)
            places[moved - count] = holes
            late = known[1] >= count
            known[1][late] = places[known[1][late] - count]

    def _numbers_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each id, or -1. Reuse the numbers that `victims` found for this batch."""
        known, self._batch_numbers = self._batch_numbers, None
        return known[1] if known is not None and known[0]() is ids else self._numbers.find(ids)

    # ---------------------------------------------------------------- saving

    def state(self) -> dict[str, np.ndarray]:
        now = slice(0, self.count)
        return {name: copied(array, now) for name, array in self._of_rows.items()} | self._small()

    @property
    def _of_rows(self) -> dict[str, np.ndarray]:
        return {"ids": self._ids, "last": self._last, "marks": self._marks}

    def _small(self) -> dict[str, np.ndarray]:
        return {"hand": np.array([self._hand]), "ticks": self._ticks.reshape(-1).copy()}

    def whole(self) -> Columns:
        snapshot = self._snapshot.made(self._of_rows, np.ones(self.count, bool))
        return {name: snapshot.column(name) for name in self._of_rows} | self._small()

    def changes(self) -> Columns | None:
        changed = self._changed[: self.count]
        if not self._is_saved or 4 * np.count_nonzero(changed) > 3 * self.count:
            return None
        snapshot = self._snapshot.made(self._of_rows, copied(changed))
        columns = {f"changed_{name}": snapshot.column(name) for name in self._of_rows}
        return {"changed_at": snapshot.column(""), **columns, "count": np.array([self.count]), **self._small()}

    @property
    def changed_bytes(self) -> int:
        changed = 32 * int(np.count_nonzero(self._changed[: self.count]))
        return min(changed, 24 * self.count) if self._is_saved else 24 * self.count

    def saved(self) -> None:
        self._changed[:], self._is_saved = False, True

    def load(self, arrays: Arrays, step: int) -> None:
        """Restore an empty tracker from the arrays of `state`. `step` is the number of steps so far.

        Raises:
            ArgumentError: the arrays are damaged.
        """
        ids, last, marks, hand, ticks = (int64(arrays, name) for name in ("ids", "last", "marks", "hand", "ticks"))
        fits = len(ids) == len(last) == len(marks) and len(hand) <= 1 and len(ticks) % 2 == 0
        hand_now = int(hand[0]) if len(hand) else 0
        fits = fits and 0 <= hand_now < max(1, len(ids)) and len(np.unique(ids)) == len(ids)
        if not fits or not ((last >= 0) & (last <= step) & (marks >= 0)).all():
            raise damaged("ids that do not repeat, each with the step that used it last and a count")
        self._add(ids, 0)
        self._last[: len(ids)], self._marks[: len(ids)], self._hand = last, marks, hand_now
        self._ticks = ticks.reshape(-1, 2).copy()
        self._trained = float(ticks[-1]) if len(ticks) else 0.0

    def adopt(self, ids: np.ndarray, step: int) -> None:
        """Register existing records, as if the last step had used them."""
        self._add(np.sort(ids), step)
