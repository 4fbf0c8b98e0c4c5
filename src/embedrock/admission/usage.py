"""`UsageTracker`: which rows have records, how they were used, and which of them leave."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable

import numpy as np

from embedrock import kernels
from embedrock.admission.copy_on_write import Arrays, Columns, LastCopy, copied, damaged, int64
from embedrock.spec.eviction import Eviction
from embedrock.system.arena import reserve, returned

FIRST_ENTRIES = 1024
FULLEST = 0.625  # share of entries in use at which the hash table doubles
ENTRY_BYTES = 16


class IdNumbers:
    """A hash table id -> number from 0 on. Ids are int64 arrays without repeats.

    Attributes:
        count: how many ids it has.

    Example:
        >>> pairs = IdNumbers()
        >>> pairs.put(np.array([7, -3]), np.array([1, 2]))
        >>> pairs.find(np.array([-3, 8])).tolist()
        [2, -1]
    """

    def __init__(self) -> None:
        self.count, self._entries = 0, _entries(FIRST_ENTRIES)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that it takes."""
        return self._entries.nbytes

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each id, int64; -1 where it has none."""
        numbers = np.empty(len(ids), np.int64)
        kernels.cpu.launch(kernels.cpu.directory.find_hashed, self._entries, ids, numbers)
        return numbers

    def put(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Give ids that have none numbers."""
        self.make_room(len(ids))
        self.set(ids, numbers)
        self.count += len(ids)

    def make_room(self, more: int) -> None:
        """See to it that so many more ids fit."""
        entries = len(self._entries)
        while self.count + more > FULLEST * entries:
            entries *= 2
        if entries > len(self._entries):
            larger = _entries(entries)
            kernels.cpu.directory.rehash(self._entries, larger)
            self._entries = larger

    def set(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Give ids that have a number another one."""
        kernels.cpu.launch(kernels.cpu.residents.set_values, self._entries, ids, numbers)

    def remove(self, ids: np.ndarray) -> None:
        """Forget ids that have a number."""
        kernels.cpu.launch(kernels.cpu.cache.erase, self._entries, ids)
        self.count -= len(ids)

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids, ascending, and their numbers."""
        there = self._entries[self._entries[:, 1] != 0]
        there = there[np.argsort(there[:, 0])]
        return there[:, 0].copy(), there[:, 1] - 1


def _entries(count: int) -> np.ndarray:
    return reserve(count * ENTRY_BYTES, "an index of ids").view(np.int64).reshape(-1, 2)


ONE_USE = 256  # as a count that fades, which is halved
MOST_USES = 1 << 22
SAMPLED = 4  # rows looked at for each that has to leave
ROUNDS = 8  # of the hand, while a row is idle for so long as it may be
LEAST_LOOK = 64  # rows that the hand passes in a step, where rows may be idle
STEPS_OF_A_ROUND = 256  # of the hand, where that is a time
TICKS = 64  # notes of the time, while a row is idle for so long as it may be
PAUSE_S, LONGER = 60.0, 16  # a gap between two steps counts up to that, or so many times the gap before it
LAST_BITS = 41
FIRST_ROWS = 1024


class UsageTracker:
    """The rows that have records, in an order that depends on the steps that were made and on nothing else.

    Args:
        eviction: says what is to be known of them.
        clock: returns the time in seconds, from any moment on; only gaps between steps are taken from it.

    Attributes:
        count: of the rows.
    """

    def __init__(self, eviction: Eviction, clock: Callable[[], float] = time.monotonic) -> None:
        self._eviction, self._clock, self.count, self._hand = eviction, clock, 0, 0
        self._numbers, self._kept = IdNumbers(), eviction.kept()
        self._ids, self._last, self._marks = (np.empty(FIRST_ROWS, np.int64) for _ in range(3))
        self._stays = np.empty(FIRST_ROWS, bool)  # of the ids to keep
        self._changed, self._is_saved = np.zeros(FIRST_ROWS, bool), False  # places with another row, or use of it
        self._still = LastCopy()
        # The ids of a batch, which is unfinished as long as somebody has them, and their numbers.
        self._known: tuple[weakref.ref[np.ndarray], np.ndarray] | None = None
        self._busy = np.zeros(FIRST_ROWS, bool)  # of a batch, while its victims are looked for
        self._ticks = np.empty((0, 2), np.int64)  # (step, seconds of training): no later step was made by then
        self._trained, self._gap = 0.0, 0.0  # seconds of training; those of them that the last gap counted
        self._stepped_at: float | None = None  # by the clock; None: no step since this process began

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that it takes."""
        arrays = self._ids, self._last, self._marks, self._stays, self._busy, self._changed
        return self._numbers.nbytes + sum(array.nbytes for array in arrays) + self._still.nbytes

    @property
    def ids(self) -> np.ndarray:
        """The ids that have records, in no order that means anything to others."""
        return self._ids[: self.count]

    def are_known(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids have records, bool (n,)."""
        return self._numbers.find(ids) >= 0

    # ---------------------------------------------------------------- rows that come and are used

    def use(self, ids: np.ndarray, step: int) -> None:
        """Note that a step uses rows, without repeats; those that have no record yet get one in it, in their order."""
        numbers = self._numbers_of(ids)
        new = numbers < 0
        if new.any():
            self._touch(numbers[~new], step)
            self._add(ids[new], step)
        else:
            self._touch(numbers, step)
        self._tick(step)

    def _touch(self, numbers: np.ndarray, step: int) -> None:
        self._note(numbers)
        if self._eviction.by != "use":
            self._last[numbers] = step
            return
        numbers_of_step = step, self._eviction.half_life, ONE_USE, MOST_USES
        kernels.cpu.launch(kernels.cpu.residents.touch, self._last, self._marks, numbers, *numbers_of_step)

    def _note(self, places: np.ndarray) -> None:
        """Note that there will be another row, or use of it."""
        if self._is_saved:
            self._changed[places] = True
        if (still := self._still.now) is not None:
            still.keep(places)

    def _faded(self, numbers: np.ndarray, step: int) -> np.ndarray:
        """Return how often rows were used, each use counted as `ONE_USE` or what has become of it."""
        half_life = self._eviction.half_life
        halvings = step // half_life - self._last[numbers] // half_life
        return self._marks[numbers] >> np.minimum(halvings, 62)

    def _add(self, ids: np.ndarray, step: int) -> None:
        self.make_room(len(ids))
        new = slice(self.count, self.count + len(ids))
        places = np.arange(new.start, new.stop)
        self._note(places)
        self._numbers.put(ids, places)
        self._ids[new], self._last[new] = ids, step
        self._marks[new] = step if self._eviction.by == "age" else ONE_USE
        self._stays[new] = np.isin(ids, self._kept) if len(self._kept) else False
        self.count += len(ids)

    def make_room(self, more: int) -> None:
        """See to it that `use` cannot fail for so many new rows."""
        self._numbers.make_room(more)
        size = len(self._ids)
        if self.count + more > size:
            size = max(self.count + more, size + size // 2)
            for name in ("_ids", "_last", "_marks", "_stays", "_changed", "_busy"):
                setattr(self, name, _larger(getattr(self, name)[: self.count], size))

    def _tick(self, step: int) -> None:
        seconds = self._eviction.idle_seconds()
        if not seconds:
            return
        now, ticks = self._advance(min(PAUSE_S, seconds / TICKS)), self._ticks
        if len(ticks) > 1 and now - ticks[-2, 1] < seconds / TICKS:
            ticks = ticks[:-1]  # the last one is of the newest step, as nobody knows how long the next one is away
        expired = np.flatnonzero(ticks[:, 1] <= now - seconds)
        first = int(expired[-1]) if expired.size else 0
        self._ticks = np.concatenate([ticks[first:], np.array([[step, math.ceil(now)]], np.int64)])

    def _advance(self, pause: float) -> float:
        """Return the seconds of training, with those since the last step; a pause of training counts up to `pause`.

        A gap counts whole where steps come so rarely as a rule: up to `LONGER` times the gap before it.
        """
        now = self._clock()
        gap = 0.0 if self._stepped_at is None else max(0.0, now - self._stepped_at)
        self._stepped_at, self._gap = now, min(gap, max(pause, LONGER * self._gap))
        self._trained += self._gap
        return self._trained

    # ---------------------------------------------------------------- rows that leave

    def victims(self, busy_ids: np.ndarray, excess: int, step: int) -> np.ndarray:
        """Return the ids of the rows that leave in a step; nothing changes.

        Args:
            busy_ids: those of the batch, which stay.
            excess: how many must leave.
            step: its number.

        Returns:
            int64 (n,): at least `excess`, or fewer where no more may leave.
        """
        excess, self._known = max(0, excess), None
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
        self._known = weakref.ref(busy_ids), found
        return self._ids[chosen]

    def _chosen(self, excess: int, look: int, step: int) -> np.ndarray:
        while True:
            window = (self._hand + np.arange(look)) % self.count
            window = window[~(self._busy[window] | self._stays[window])]
            is_idle = self._last[window] < self._idle_before(step)
            idle, rest = window[is_idle], window[~is_idle]
            missing = excess - len(idle)
            if missing <= 0:
                return idle
            if missing <= len(rest) or look == self.count:
                return np.concatenate([idle, rest[self._least(rest, missing, step)]])
            look = min(self.count, 2 * look)

    def _least(self, numbers: np.ndarray, count: int, step: int) -> np.ndarray:
        """Return which of some rows are worth least; of equal ones, the first."""
        if count >= len(numbers):
            return np.arange(len(numbers))
        last = self._last[numbers]
        worth = last
        if self._eviction.by != "recency":
            marks = self._marks[numbers] if self._eviction.by == "age" else self._faded(numbers, step)
            worth = marks if self._eviction.by == "age" else (marks << LAST_BITS) | np.minimum(last, (1 << 41) - 1)
        limit = np.partition(worth, count - 1)[count - 1]
        below, equal = np.flatnonzero(worth < limit), np.flatnonzero(worth == limit)
        return np.concatenate([below, equal[: count - len(below)]])

    def _look(self) -> int:
        """Return how many rows the hand passes in a step, where rows may be idle."""
        idle = self._eviction.idle
        if idle is None:
            return 0
        steps = STEPS_OF_A_ROUND if isinstance(idle, str) else max(1, idle // ROUNDS)
        return max(LEAST_LOOK, -(-self.count // steps))

    def _idle_before(self, step: int) -> int:
        """Return the step before which rows were used last that have been idle for too long."""
        idle = self._eviction.idle
        if idle is None:
            return -1
        if not isinstance(idle, str):
            return step - idle
        expired = np.flatnonzero(self._ticks[:, 1] <= self._trained - self._eviction.idle_seconds())
        return int(self._ticks[expired[-1], 0]) + 1 if expired.size else -1

    def pass_by(self, excess: int, removed: np.ndarray) -> None:
        """Forget rows that leave in a step, and let the hand go on."""
        look = min(self.count, max(SAMPLED * max(0, excess), self._look()))
        self.remove(removed)
        self._hand = (self._hand + look) % self.count if self.count else 0

    def remove(self, ids: np.ndarray) -> None:
        """Forget rows, without repeats, that have records; the last ones take their places."""
        if not len(ids):
            return
        numbers, known = self._numbers.find(ids), self._known
        count = self.count - len(numbers)
        left = np.ones(len(numbers), bool)  # of the places from `count` on, whose rows are to move
        left[numbers[numbers >= count] - count] = False
        holes, moved = numbers[numbers < count], count + np.flatnonzero(left)
        self._numbers.remove(ids)
        self._note(holes)
        for array in (self._ids, self._last, self._marks, self._stays):
            array[holes] = array[moved]
        self._numbers.set(self._ids[holes], holes)
        self.count = count
        self._hand = self._hand % count if count else 0
        if known is not None:  # those of the batch are not among them, but may have moved
            places = np.full(len(left), -1)
            places[moved - count] = holes
            late = known[1] >= count
            known[1][late] = places[known[1][late] - count]

    def _numbers_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each id, -1 for none; those of the batch whose victims were looked for are known."""
        known, self._known = self._known, None
        return known[1] if known is not None and known[0]() is ids else self._numbers.find(ids)

    # ---------------------------------------------------------------- saved

    def state(self) -> dict[str, np.ndarray]:
        """Return what `load` needs, as arrays of int64 of their own."""
        now = slice(0, self.count)
        return {name: copied(array, now) for name, array in self._of_rows.items()} | self._small()

    @property
    def _of_rows(self) -> dict[str, np.ndarray]:
        """What is saved of each row, by name."""
        return {"ids": self._ids, "last": self._last, "marks": self._marks}

    def _small(self) -> dict[str, np.ndarray]:
        return {"hand": np.array([self._hand]), "ticks": self._ticks.reshape(-1).copy()}

    def whole(self) -> Columns:
        """Return what `state` does, to be written while it changes."""
        still = self._still.made(self._of_rows, np.ones(self.count, bool))
        return {name: still.column(name) for name in self._of_rows} | self._small()

    def changes(self) -> Columns | None:
        """Return what has changed since `saved`, for `changes.merged`; None: that is not known, or it is most of it."""
        changed = self._changed[: self.count]
        if not self._is_saved or 4 * np.count_nonzero(changed) > 3 * self.count:
            return None
        still = self._still.made(self._of_rows, copied(changed))
        columns = {f"changed_{name}": still.column(name) for name in self._of_rows}
        return {"changed_at": still.column(""), **columns, "count": np.array([self.count]), **self._small()}

    @property
    def changed_bytes(self) -> int:
        """How large `changes` would be, or `state` where that is to be saved, about."""
        changed = 32 * int(np.count_nonzero(self._changed[: self.count]))
        return min(changed, 24 * self.count) if self._is_saved else 24 * self.count

    def saved(self) -> None:
        """Note that what it is now is saved."""
        self._changed[:], self._is_saved = False, True

    def load(self, arrays: Arrays, step: int) -> None:
        """Take over what `state` returned, into one that is empty; `step` is the number of steps made.

        Raises:
            ArgumentError: it cannot be.
        """
        ids, last, marks, hand, ticks = (int64(arrays, name) for name in ("ids", "last", "marks", "hand", "ticks"))
        fits = len(ids) == len(last) == len(marks) and len(hand) <= 1 and len(ticks) % 2 == 0
        hand_now = int(hand[0]) if len(hand) else 0
        if not (fits and 0 <= hand_now < max(1, len(ids)) and _are_uses(ids, last, marks, step)):
            raise damaged("ids that do not repeat, each with the step that used it last and a count")
        self._add(ids, 0)
        self._last[: len(ids)], self._marks[: len(ids)], self._hand = last, marks, hand_now
        self._ticks = ticks.reshape(-1, 2).copy()
        self._trained = float(ticks[-1]) if len(ticks) else 0.0

    def adopt(self, ids: np.ndarray, step: int) -> None:
        """Begin with rows that have records already, as if the last step had used them."""
        self._add(np.sort(ids), step)


def _are_uses(ids: np.ndarray, last: np.ndarray, marks: np.ndarray, step: int) -> bool:
    in_range = (last >= 0) & (last <= step) & (marks >= 0)
    return bool(in_range.all()) and len(np.unique(ids)) == len(ids)


def _larger(array: np.ndarray, size: int) -> np.ndarray:
    made = returned(size, array.dtype, "what is known of rows that have records")
    made[: len(array)] = array
    return made
