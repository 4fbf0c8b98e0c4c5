"""`UsageTracker`: which rows have records, how they were used, and which rows to evict."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.admission.clock import Clock, Reading
from embedrock.admission.copy_on_write import Arrays, Columns, LastCopy, copied, damaged, int64
from embedrock.admission.hash_segments import HashSegments, counting_each, nth_of_equals
from embedrock.batch.id_table import IdNumbers
from embedrock.spec.eviction import Eviction
from embedrock.spec.frozen import FrozenRows
from embedrock.system.arena import returned

ONE_USE = 256  # one use, as a fixed-point count that halves with time
MOST_USES = 1 << 22
SAMPLED = 4  # rows sampled per evicted row
ROUNDS = 8  # rounds of the clock hand within the allowed idle time
LEAST_LOOK = 64  # rows that all hands of a table pass per step, at least, if rows may be idle
LAST_BITS = 41
FIRST_ROWS = 1024
OF_ROWS = ("_ids", "_last", "_marks", "_is_kept", "_changed", "_busy")


class UsageTracker:
    """Rows that have records, with their usage. The order of rows depends only on the steps.

    Each segment of the table has rows and a clock hand of its own. A row's *place* is its position in its segment, plus
    the room of all segments with lower numbers.

    It is saved by the methods of `ExactCounter`.

    Args:
        eviction: the policy, which decides what the tracker records.
        segments: number of segments of the table.
        clock: returns the time in seconds. Only gaps between steps matter.
        frozen: rows that stay, beside those that the policy keeps.

    Attributes:
        clock: the time by which rows are idle.
    """

    def __init__(
        self,
        eviction: Eviction,
        segments: int = 1,
        frozen: FrozenRows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._eviction, self.clock = eviction, Clock(eviction.idle_seconds(), clock)
        self._segments, self._room = HashSegments(segments), FIRST_ROWS if segments == 1 else FIRST_ROWS // 64
        self._counts, self._hands = (np.zeros(int(segments == 1), np.int64) for _ in range(2))  # by segment
        self._numbers, self._kept, self._frozen = IdNumbers(), eviction.kept(), frozen
        size = self._room * len(self._counts)
        self._ids, self._last, self._marks = (np.empty(size, np.int64) for _ in range(3))
        self._is_kept = np.empty(size, bool)  # rows that `keep` protects
        self._changed, self._is_saved = np.zeros(size, bool), False  # places changed since the save
        self._snapshot = LastCopy()
        # The ids of a batch, and their places. The weak reference ends with the batch.
        self._batch_places: tuple[weakref.ref[np.ndarray], np.ndarray] | None = None
        self._busy = np.zeros(size, bool)  # rows of the batch, while victims are chosen

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return self._numbers.count

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes + sum(getattr(self, name).nbytes for name in OF_ROWS) + self._snapshot.nbytes

    @property
    def ids(self) -> np.ndarray:
        """Return the ids that have records, in internal order."""
        return self._ids[self._places]

    @property
    def _places(self) -> Any:
        """Return the places of all rows, ascending, as an index."""
        if self._segments.is_one:
            return slice(0, self.count)
        return np.flatnonzero((np.arange(self._room) < self._counts[:, None]).reshape(-1))

    def are_known(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids have records, bool (n,)."""
        return self._numbers.find(ids) >= 0

    # ---------------------------------------------------------------- insertion and usage

    def use(self, ids: np.ndarray, step: int, now: Reading | None = None) -> None:
        """Record the rows of a step, without repeats, and its time. New rows are added in their order."""
        places = self._places_of(ids)
        new = places < 0
        if new.any():
            self._touch(places[~new], step)
            # The order of ids in a batch depends on the number of ranks.
            self._add(ids[new] if self._segments.is_one else np.sort(ids[new]), step)
        else:
            self._touch(places, step)
        self.clock.set(step, self.clock.after(None, "a table") if now is None else now)

    def _touch(self, places: np.ndarray, step: int) -> None:
        self._mark_changed(places)
        if self._eviction.by != "use":
            self._last[places] = step
            return
        numbers_of_step = step, self._eviction.half_life, ONE_USE, MOST_USES
        kernels.cpu.launch(kernels.cpu.residents.touch, self._last, self._marks, places, *numbers_of_step)

    def _mark_changed(self, places: np.ndarray) -> None:
        """Mark places as changed. Call before the change."""
        if self._is_saved:
            self._changed[places] = True
        if (snapshot := self._snapshot.now) is not None:
            snapshot.keep(places)

    def _add(self, ids: np.ndarray, step: int) -> None:
        numbers = self.make_room(ids)
        places = numbers * self._room + self._counts[numbers] + nth_of_equals(numbers)
        self._mark_changed(places)
        self._numbers.put(ids, places)
        self._ids[places], self._last[places] = ids, step
        self._marks[places] = step if self._eviction.by == "age" else ONE_USE
        self._is_kept[places] = np.isin(ids, self._kept) if len(self._kept) else False
        if self._frozen:
            self._is_kept[places] |= self._frozen.has(ids)
        self._counts += np.bincount(numbers, minlength=len(self._counts))

    def make_room(self, ids: np.ndarray) -> np.ndarray:
        """Grow the arrays for new rows, so that `use` cannot fail. Return the number of each row's segment."""
        numbers = self._numbers_of_segments(ids)
        self._numbers.make_room(len(ids))
        most = int((self._counts + np.bincount(numbers, minlength=len(self._counts))).max(initial=0))
        room = self._room if most <= self._room else max(most, self._room + self._room // 2)
        if room * len(self._counts) > len(self._ids):
            self._lay_out(room)
        return numbers

    def _numbers_of_segments(self, ids: np.ndarray) -> np.ndarray:
        numbers = self._segments.numbers_of(ids)
        if more := len(self._segments.known) - len(self._counts):
            self._counts, self._hands = (
                np.append(old, np.zeros(more, np.int64)) for old in (self._counts, self._hands)
            )
        return numbers

    def _lay_out(self, room: int) -> None:
        """Give each segment room for `room` rows."""
        places, size = self._places, room * len(self._counts)
        moved = places if isinstance(places, slice) else places // self._room * room + places % self._room
        for name in OF_ROWS:
            before = getattr(self, name)[places]
            made = returned(size, before.dtype, "what is known of rows that have records")
            made[moved] = before
            setattr(self, name, made)
        if not isinstance(moved, slice) and room != self._room:
            self._numbers.set(self._ids[moved], moved)
            self._batch_places = None
        self._room = room

    # ---------------------------------------------------------------- eviction

    def excess(self, new_ids: np.ndarray, most: int | None) -> np.ndarray:
        """Return by how many rows each segment exceeds its share of `most` with these new rows, int64 (k,)."""
        numbers = self._numbers_of_segments(new_ids)
        if most is None:
            return np.zeros(len(self._counts), np.int64)
        counts = self._counts + np.bincount(numbers, minlength=len(self._counts))
        return np.maximum(0, counts - self._segments.shares(most))

    def victims(self, busy_ids: np.ndarray, excess: np.ndarray, step: int, now: Reading) -> np.ndarray:
        """Return the ids of the rows to evict in a step, without any change.

        Args:
            busy_ids: ids of the batch, which stay.
            excess: number of rows to evict from each segment, int64 (k,).
            step: number of the step.
            now: time of the step.

        Returns:
            int64 (n,): at least `excess` ids, or fewer if no more rows may leave.
        """
        self._batch_places = None
        looks = self._looks(excess, now)
        if not looks.any():
            return np.empty(0, np.int64)
        found = self._numbers.find(busy_ids)
        places = found[found >= 0]
        self._busy[places] = True
        try:
            chosen = self._chosen(excess, looks, step, now)
        finally:
            self._busy[places] = False
        self._batch_places = weakref.ref(busy_ids), found
        return self._ids[chosen]

    def _chosen(self, excess: np.ndarray, looks: np.ndarray, step: int, now: Reading) -> np.ndarray:
        idle_before, count = self._idle_before(step, now), len(looks)
        while True:
            numbers, nth = np.repeat(np.arange(count), looks), counting_each(looks)
            window = numbers * self._room + (self._hands[numbers] + nth) % self._counts[numbers]
            may_leave = ~(self._busy[window] | self._is_kept[window])
            window, numbers = window[may_leave], numbers[may_leave]
            leaves = self._last[window] < idle_before
            missing = excess - np.bincount(numbers[leaves], minlength=count)
            rest = np.flatnonzero(~leaves)
            is_short = (missing > np.bincount(numbers[rest], minlength=count)) & (looks < self._counts)
            if not is_short.any():
                break
            looks = np.where(is_short, np.minimum(self._counts, 2 * looks), looks)
        if (missing > 0).any():
            leaves[rest[self._least(window[rest], numbers[rest], missing, step)]] = True
        return self._with_idle_movers(window[leaves], window, idle_before)

    def _with_idle_movers(self, chosen: np.ndarray, seen: np.ndarray, idle_before: int) -> np.ndarray:
        """Return the chosen places, and those of idle rows that would move into them, where a hand has passed by."""
        while chosen.size and idle_before > 0:
            tail, _ = self._tails(np.bincount(chosen // self._room, minlength=len(self._counts)))
            tail = tail[np.isin(tail, seen, assume_unique=True, invert=True)]
            idle = tail[(self._last[tail] < idle_before) & ~(self._busy[tail] | self._is_kept[tail])]
            if not idle.size:
                break
            chosen, seen = np.concatenate([chosen, idle]), np.concatenate([seen, tail])
        return chosen

    def _tails(self, lost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places that end if segments lose so many rows, int64 (sum,), and the counts of rows then."""
        counts = self._counts - lost
        return np.repeat(np.arange(len(counts)) * self._room + counts, lost) + counting_each(lost), counts

    def _least(self, places: np.ndarray, numbers: np.ndarray, missing: np.ndarray, step: int) -> np.ndarray:
        """Return the positions of the rows with the lowest scores, `missing` of each segment. `numbers` ascend.

        Among equal scores, the first positions count.
        """
        last, marks, half_life = self._last[places], self._marks[places], self._eviction.half_life
        worth = last if self._eviction.by == "recency" else marks
        if self._eviction.by == "use":
            uses = marks >> np.minimum(step // half_life - last // half_life, 62)  # faded, in units of 1 / `ONE_USE`
            worth = (uses << LAST_BITS) | np.minimum(last, (1 << LAST_BITS) - 1)
        order = np.lexsort((worth, numbers))
        return order[nth_of_equals(numbers) < missing[numbers]]

    def _looks(self, excess: np.ndarray, now: Reading) -> np.ndarray:
        """Return the number of rows that each hand passes in a step."""
        return np.minimum(self._counts, np.maximum(SAMPLED * excess, self._idle_looks(now)))

    def _idle_looks(self, now: Reading) -> Any:
        """Return the number of rows that each hand passes in a step to find idle rows. By a clock, it follows it."""
        idle = self._eviction.idle
        if idle is None:
            return 0
        share = 1 / max(1, idle // ROUNDS) if isinstance(idle, int) else ROUNDS * self.clock.moved(now)
        looks = np.ceil(self._counts * min(1.0, share)).astype(np.int64)
        return np.maximum(max(1, LEAST_LOOK // self._segments.count), looks)

    def _idle_before(self, step: int, now: Reading) -> int:
        """Return the first step whose rows are not idle yet. Rows used before it have expired."""
        idle = self._eviction.idle
        if idle is None:
            return -1
        return step - idle if isinstance(idle, int) else self.clock.idle_before(now)

    def pass_by(self, excess: np.ndarray, removed: np.ndarray, now: Reading) -> None:
        """Remove the rows evicted in a step, and advance the clock hands."""
        excess = np.append(excess, np.zeros(len(self._counts) - len(excess), np.int64))  # of segments numbered since
        self._hands = (self._hands + self._looks(excess, now)) % np.maximum(1, self._counts)
        self.remove(removed)

    def remove(self, ids: np.ndarray) -> None:
        """Remove rows that have records, without repeats. The last rows of their segments take their places."""
        if not len(ids):
            return
        places, known, room = self._numbers.find(ids), self._batch_places, self._room
        numbers = places // room
        tail, self._counts = self._tails(np.bincount(numbers, minlength=len(self._counts)))
        is_hole = places - numbers * room < self._counts[numbers]
        holes = places[is_hole]
        holes = holes[np.argsort(numbers[is_hole], kind="stable")]
        moved = tail[np.isin(tail, places[~is_hole], assume_unique=True, invert=True)]
        self._numbers.remove(ids)
        self._mark_changed(holes)
        for array in (self._ids, self._last, self._marks, self._is_kept):
            array[holes] = array[moved]
        self._numbers.set(self._ids[holes], holes)
        self._hands = np.where(self._hands < self._counts, self._hands, 0)  # the rows after it are gone
        if known is not None and len(moved):  # none of the batch was removed, but some may have moved
            at = np.minimum(np.searchsorted(moved, known[1]), len(moved) - 1)
            has_moved = moved[at] == known[1]
            known[1][has_moved] = holes[at[has_moved]]

    def _places_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the place of each id, or -1. Reuse the places that `victims` found for this batch."""
        known, self._batch_places = self._batch_places, None
        return known[1] if known is not None and known[0]() is ids else self._numbers.find(ids)

    # ---------------------------------------------------------------- saving

    def state(self) -> dict[str, np.ndarray]:
        now = self._places
        return {name: copied(array, now) for name, array in self._of_rows.items()} | self._small(is_whole=True)

    @property
    def _of_rows(self) -> dict[str, np.ndarray]:
        return {"ids": self._ids, "last": self._last, "marks": self._marks}

    def _small(self, is_whole: bool) -> dict[str, np.ndarray]:
        made = {"hand": self._hands, "ticks": self.clock.ticks.reshape(-1).copy()}
        if self.clock.read.counts_events:
            made["events"] = np.ones(1, np.int64)
        if not self._segments.is_one:
            made |= {"segments": self._segments.known, "room": np.array([self._room])}
        if not (is_whole and self._segments.is_one):
            made["count"] = self._counts
        return {name: array.copy() for name, array in made.items()}

    def whole(self) -> Columns:
        chosen = np.zeros(len(self._ids), bool)
        chosen[self._places] = True
        snapshot = self._snapshot.made(self._of_rows, chosen)
        return {name: snapshot.column(name) for name in self._of_rows} | self._small(is_whole=True)

    @property
    def _changed_places(self) -> np.ndarray:
        """Return the places of rows that have changed since the save, as a mask, bool (places,)."""
        chosen = np.zeros(len(self._ids), bool)
        chosen[self._places] = self._changed[self._places]
        return chosen

    def changes(self) -> Columns | None:
        changed = self._changed_places
        if not self._is_saved or 4 * np.count_nonzero(changed) > 3 * self.count:
            return None
        snapshot = self._snapshot.made(self._of_rows, changed)
        columns = {f"changed_{name}": snapshot.column(name) for name in self._of_rows}
        return {"changed_at": snapshot.column(""), **columns, **self._small(is_whole=False)}

    @property
    def changed_bytes(self) -> int:
        changed = 32 * int(np.count_nonzero(self._changed_places)) if self._is_saved else 24 * self.count
        return min(changed, 24 * self.count)

    def saved(self) -> None:
        self._changed[:], self._is_saved = False, True

    def load(self, arrays: Arrays, step: int) -> None:
        """Restore an empty tracker from the arrays of `state`. `step` is the number of steps so far.

        Raises:
            ArgumentError: the arrays are damaged.
        """
        ids, last, marks, hands, ticks = (int64(arrays, name) for name in ("ids", "last", "marks", "hand", "ticks"))
        fits = len(ids) == len(last) == len(marks) and len(ticks) % 2 == 0 and len(np.unique(ids)) == len(ids)
        if not fits or not ((last >= 0) & (last <= step) & (marks >= 0)).all():
            raise damaged("ids that do not repeat, each with the step that used it last and a count")
        if not self._segments.is_one:
            self._segments.load(int64(arrays, "segments"))
        self._add(ids, 0)
        counts = self._counts if self._segments.is_one else int64(arrays, "count")
        if not np.array_equal(counts, self._counts) or not np.array_equal(self._ids[self._places], ids):
            raise damaged("the rows of each segment, one segment after the other")
        if (
            len(hands) not in (0, len(counts))
            or not ((hands >= 0) & (hands < np.maximum(1, counts[: len(hands)]))).all()
        ):
            raise damaged("a hand for each segment, at one of its rows")
        self._last[self._places], self._marks[self._places], self._hands[: len(hands)] = last, marks, hands
        self.clock.load(ticks.reshape(-1, 2), len(int64(arrays, "events")) > 0)

    def adopt(self, ids: np.ndarray, step: int) -> None:
        """Register existing records, as if the last step had used them."""
        self._add(np.sort(ids), step)
