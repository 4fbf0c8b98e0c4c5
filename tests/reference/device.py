"""What GPU kernels do that CPU kernels do otherwise: the specification of ``kernels/gpu/``: ``plan.py``, ``cache.py``,
``directory.py`` and others.

A batch's plan has room for n unique keys; `count`, int32 (1,), says how many there are. What lies beyond is neither
read nor written.

Rows are cached in near slots, in the memory of the GPU; far slots, one for each row, are in that of the host. Slots,
times and memories are the tuples of ``kernels/gpu/addresses.py``, of arrays. A row whose last batch is not
finished stays where it is. Where there is no victim for a row it is used where it is, far: the policy decides how fast
a batch is, and nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from embedrock.kernels.gpu.addresses import BatchTime, CacheSlots

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]

LAST = 127  # the bin of slots that may not be taken
AGES = (1 << 22) - 1
OUT_OF_RANGE, BAD_OFFSETS = 1, 4  # codes of faults
CHANGED = 1 << 30  # of a word of `where`: see `settle_rows`
NEW, DROPPED = -1, -2  # in the place of slots: of an id that has none, and of a row that is not stepped


class RecordMemory(NamedTuple):
    """Addresses of slot 0 on device and on host, and the bytes of a record."""

    near: int
    far: int
    record_bytes: int


# ---------------------------------------------------------------- the plan


def check(keys: Int64Array, limit: int, fault: Int64Array) -> None:
    """Note a key outside ``[0, limit)`` in `fault`, int64 (4,), unless one is there: a code, and as third word the key.

    The keys, (n,), are sorted; int32 or int64.
    """
    bad = keys[[0, -1]][[keys[0] < 0, keys[-1] >= limit]]
    if bad.size and not fault[0]:
        fault[[0, 2]] = OUT_OF_RANGE, bad[0]


def collect(
    keys: Int64Array,
    nobody: int,
    order: Int64Array,
    unique: Int64Array,
    starts: Int32Array,
    inverse: Int32Array,
    count: Int32Array,
    tables: np.ndarray | None = None,
) -> None:
    """Write the plan of sorted keys.

    Args:
        keys: (n,), see `check`.
        nobody: what fills `unique`.
        order: int64 (n,), their positions.
        unique: int64 (n,), ascending.
        starts: int32 (n + 1,); segment k is ``order[starts[k] : starts[k + 1]]``.
        inverse: int32 (n,), for each position the index of its key.
        count: int32 (1,).
        tables: (n,), of the keys, which are sorted by it first; None: they are of one. Equal keys of different tables
            are different ones.
    """
    begins = np.ones(keys.size, bool)
    begins[1:] = keys[1:] != keys[:-1]
    if tables is not None:
        begins[1:] |= tables[1:] != tables[:-1]
    first = np.flatnonzero(begins)
    count[0] = first.size
    unique[: first.size], unique[first.size :] = keys[first], nobody
    starts[: first.size + 1] = np.append(first, keys.size)
    inverse[order] = np.cumsum(begins) - 1


# ---------------------------------------------------------------- words


def _logarithm(worth: np.ndarray, fineness: int) -> np.ndarray:
    """The logarithm to base 2, times `fineness` (a power of two), as the bits of a float32 have it: linear between."""
    bits_below = 24 - fineness.bit_length()
    return (worth.view(np.int32) - np.int32(127 << 23)) >> bits_below


def _word(absent: np.ndarray | int, stamp: np.ndarray | int, worth: np.ndarray) -> np.ndarray:
    code = np.minimum(_logarithm(worth, 16), 255)
    return -1 - ((code << 23) | (np.int32(stamp) << 1) | absent)


def _read_word(word: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    u = -1 - word
    worth = (np.int32(127 << 23) + ((u >> 23 & 255) << 19)).view(np.float32)
    return u & 1, (u >> 1) & AGES, worth


def _fade(worth: np.ndarray, age: np.ndarray, fading: float) -> np.ndarray:
    return worth * np.exp2(-np.minimum(age.astype(np.float32) * np.float32(fading), np.float32(24)))


def _rows(keys: Int64Array, count: Int32Array, limit: int) -> Int64Array:
    some = keys[: count[0]]
    return np.flatnonzero((some >= 0) & (some < limit) & (np.diff(some, prepend=-1) != 0))


def _missing(words: np.ndarray, stamp: int, span: int) -> np.ndarray:
    absent, last, _ = _read_word(words)
    return (words < 0) & (absent == 0) & ((stamp - last) & AGES > span)


# ---------------------------------------------------------------- the cache


def touch(slots: CacheSlots, time: BatchTime, keys: Int64Array, count: Int32Array, limit: int) -> None:
    """Note that a batch uses rows.

    A row is worth the number of its uses, each of which fades by half in ``1 / time.fading`` batches. Rows to fetch
    (far, and used by no batch that is not finished) are left to `insert`.

    Args:
        slots: what is known about records.
        time: the batch's place in time.
        keys, count: of the batch; equal ones are neighbours, and count once. Those outside ``[0, limit)`` are left
            alone.
        limit: number of far slots.
    """
    stamp, span, fading, _ = time
    key = keys[_rows(keys, count, limit)]
    words = slots.where[key]
    slot = words[words >= 0]
    slots.worth[slot] = _fade(slots.worth[slot], (stamp - slots.used[slot]) & AGES, fading) + np.float32(1)
    slots.used[slot] = stamp
    stays = (words < 0) & ~_missing(words, stamp, span)
    absent, last, worth = _read_word(words[stays])
    slots.where[key[stays]] = _word(absent, stamp, _fade(worth, (stamp - last) & AGES, fading) + np.float32(1))
    absent = (words < 0) & (_read_word(words)[0] == 1)
    slots.tallies[:3] += slot.size, key.size - slot.size - absent.sum(), absent.sum()


def victims(slots: CacheSlots, time: BatchTime, v: Int64Array, wanted: int) -> Int64Array:
    """Return those of some near slots that are worth least, at most `wanted`, in the order of `v`.

    Free slots are in bin 0, those in use by a batch that is not finished in bin `LAST`, others between by what they are
    worth now. Slots of the last bin are not taken, and the first ones of others are taken first.
    """
    stamp, span, fading, _ = time
    age = (stamp - slots.used[v]) & AGES
    bins = np.clip(_logarithm(_fade(slots.worth[v], age, fading), 8) + 33, 1, LAST - 1)
    bins = np.where(slots.owner[v] < 0, 0, np.where(age > span, bins, LAST))
    return v[np.sort(np.argsort(bins, kind="stable")[: min(wanted, int((bins < LAST).sum()))])]


def insert(
    slots: CacheSlots,
    time: BatchTime,
    keys: Int64Array,
    count: Int32Array,
    limit: int,
    memory: RecordMemory,
    moves: Int64Array,
    dealt: tuple[int, int],
) -> None:
    """Give the slots of victims to the rows to fetch, in order; rows that get none stay far, and are used there.

    The near slots from ``time.hand`` on, two for each position and at most once around, are the window. Its slots, and
    the positions, are dealt to programs in turns. Each program takes its own victims for its own rows.

    Args:
        slots, time, keys, count, limit: as in `touch`.
        memory: where records lie.
        moves: int64 (len(keys), 3) receives addresses that `exchange` moves records between: the near slot's, or -1:
            nothing; that of the far slot that its record is written back to, or -1; that of the record which takes its
            place.
        dealt: positions of a program at most, and how many neighbours it is dealt at once.
    """
    moves[:, 0] = -1
    n, near = len(keys), slots.owner.size
    window = (time.hand + np.arange(min(near, 2 * n))) % near
    missing = _rows(keys, count, limit)
    missing = missing[_missing(slots.where[keys[missing]], *time[:2])]
    block, group = dealt
    parts = -(-n // block)
    for part in range(parts):
        own = missing[missing // group % parts == part]
        searched = window[np.arange(window.size) // group % parts == part]
        _insert_part(slots, time, keys, own, victims(slots, time, searched, own.size), memory, moves)


def _insert_part(
    slots: CacheSlots,
    time: BatchTime,
    keys: Int64Array,
    missing: Int64Array,
    slot: Int64Array,
    memory: RecordMemory,
    moves: Int64Array,
) -> None:
    stamp, _, fading, _ = time
    key = keys[missing]
    _, last, worth = _read_word(slots.where[key])
    worth = _fade(worth, (stamp - last) & AGES, fading) + np.float32(1)
    slots.where[key] = _word(0, stamp, worth)

    key, worth, old = key[: slot.size], worth[: slot.size], slots.owner[slot]
    owned = old >= 0
    slots.where[old[owned]] = _word(0, slots.used[slot[owned]], slots.worth[slot[owned]])
    back = owned & (slots.dirty[slot] != 0)
    near, far, size = memory
    location = np.where(back, far + old * size, -1)
    moves[missing[: slot.size]] = np.stack([near + slot * size, location, far + key * size], axis=1)
    slots.where[key], slots.owner[slot], slots.dirty[slot] = slot, key, 0
    slots.worth[slot], slots.used[slot] = worth, stamp
    slots.tallies[3:6] += slot.size, owned.sum(), back.sum()


def forget(slots: CacheSlots, keys: Int64Array) -> None:
    """Forget that rows are near, of which others will have the far slots `keys`, without repeats."""
    words = slots.where[keys]
    slots.owner[words[words >= 0]] = -1
    slots.where[keys] = _word(0, 0, np.ones(len(keys), np.float32))


# ---------------------------------------------------------------- records


def exchange(moves: Int64Array, record_bytes: int) -> None:
    """Move records as `insert` decided: out of near slots and into them."""
    for near, location, far in moves[moves[:, 0] >= 0].tolist():
        if location >= 0:
            ctypes.memmove(location, near, record_bytes)
        ctypes.memmove(near, far, record_bytes)


def copy_records(sources: Int64Array, targets: Int64Array, record_bytes: int) -> None:
    """Copy records from addresses to addresses, int64 (n,); where one is negative, nothing."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if source >= 0 and target >= 0:
            ctypes.memmove(target, source, record_bytes)


class RecordAddresses(NamedTuple):
    """Where the records of a table are.

    Attributes:
        where, dirty: see `CacheSlots`; dirty None: without a cache.
        is_identity: all records are on device, in slot = key.
        limit: keys outside ``[0, limit)`` are of no row.
        memory: addresses of the slots.
    """

    where: Any
    dirty: Any
    is_identity: bool
    limit: int
    memory: RecordMemory


def locate(keys: Int64Array, count: Int32Array, homes: RecordAddresses, places: Int64Array) -> None:
    """Write the address of each record, or ``-1 - u`` where there is none: `find` of ``kernels/gpu/cache.py``."""
    where, limit, (near, far, size) = homes.where, homes.limit, homes.memory
    places[: count[0]] = -1 - np.arange(count[0])
    for u in _rows(keys, count, limit):
        word = -1 if where is None else int(where[keys[u]])
        if word >= 0:
            places[u] = near + (word & (CHANGED - 1)) * size
        elif (-1 - word) & 1 == 0:
            places[u] = far + keys[u] * size


def settle_rows(
    keys: Int64Array, count: Int32Array, live: Int32Array, homes: RecordAddresses, places: Int64Array, new: UInt8Array
) -> None:
    """Before rows are stepped: give those without a record a place, and note which near records will be newer.

    Args:
        keys, count: of the batch.
        live: int32 (1,); where it is 0 no row is stepped: all places are -1, and nothing else happens.
        homes: where records are.
        places: int64 (n,) receives addresses, -1 for keys of no row.
        new: uint8 (n,) receives 1 where the record is yet to be written.
    """
    places[: count[0]], new[: count[0]] = -1, 0
    if not live[0]:
        return
    for u in _rows(keys, count, homes.limit):
        word = int(homes.where[keys[u]])
        new[u] = word < 0 and (-1 - word) & 1
        if homes.is_identity:
            homes.where[keys[u]] = keys[u] | CHANGED
        elif new[u]:
            homes.where[keys[u]] = word + 1
    locate(keys, count, homes, places)
    places[: count[0]] = np.maximum(places[: count[0]], -1)
    if homes.dirty is not None:
        words = homes.where[keys[_rows(keys, count, homes.limit)]]
        homes.dirty[words[words >= 0]] = 1


def judge(
    numbers: np.ndarray,
    faults: np.ndarray,
    factors: np.ndarray,
    live: np.ndarray,
    finite: np.ndarray,
    number: int,
) -> None:
    """Decide for all tables of a step whether it is made: all of them step, or none.

    Args:
        numbers: float32 (2, k): what stands for the gradients of each table now, and what was shown for them.
        faults: int64 (k, 4): code (1: a bad id, 2: not finite, 3: another table's fault, 4: bad offsets), address
            of the flag, a value, and the number of the first refused step. Written where a step is refused.
        factors, live, finite: float32, int32, int32 (k,).
        number: of the step, >= 1.
    """
    (now, shown), codes = numbers, faults[:, 0].copy()
    with np.errstate(all="ignore"):
        untouched = np.where(now == 0, np.float32(1), now)
        factors[:] = np.where(shown != 0, now / np.where(shown != 0, shown, np.float32(1)), untouched)
        is_dropped = (now == 0) & (shown != 0)
        finite[:] = np.isfinite(shown * factors) | is_dropped
    is_made = bool(finite.all()) and not codes.any()
    live[:] = is_made & ~is_dropped
    if not is_made:
        faults[codes == 0, 0] = np.where(finite[codes == 0], 3, 2)
        faults[faults[:, 3] == 0, 3] = number


def norm(values: np.ndarray, count: Int32Array, norms: np.ndarray) -> None:
    """Write the norm of the first `count` rows, infinity where it is not finite, 0, and it again: float32 (3,)."""
    with np.errstate(over="ignore", invalid="ignore"):
        root = np.sqrt(np.square(values[: count[0]], dtype=np.float64).sum()).astype(np.float32)
    root = np.inf if np.isnan(root) else root
    norms[:] = root, 0, root


# ---------------------------------------------------------------- open ids


def search(keys: Int64Array, count: Int32Array, ids: Int64Array, used: int) -> Int64Array:
    """Return the slots of ids, `NEW` where there is none.

    Args:
        keys: (n,), the ids, none of them twice.
        count: int32 (1,), how many there are.
        ids: of the slots, in their order.
        used: how many slots were given.
    """
    slots = {key: slot for slot, key in enumerate(ids[:used].tolist())}
    return np.array([slots.get(key, NEW) for key in keys[: count[0]].tolist()], np.int64)


def enter(keys: Int64Array, slots: Int64Array, is_live: bool, ids: Int64Array, used: int) -> int:
    """Give the next slots to ids that have none, in their order, and return how many are given then.

    Args:
        keys, ids, used: see `search`; `ids` receives the new ones.
        slots: as `search` returned them; it receives the new ones.
        is_live: whether a step is made; if not, nothing happens.
    """
    new = np.flatnonzero(slots == NEW) if is_live else slots[:0]
    slots[new] = used + np.arange(len(new))
    ids[slots[new]] = keys[new]
    return used + len(new)


# ---------------------------------------------------------------- several tables


def join(
    ids: Int64Array, cuts: Int64Array, tables: Sequence[int], firsts: Int64Array, rows: Sequence[int], keys: Int32Array
) -> None:
    """Write the keys of ids of features, one after the other, where several tables share a space of keys.

    Args:
        ids: (n,); of feature f, those from ``cuts[f]`` to ``cuts[f + 1]``.
        cuts: see above.
        tables: which table each feature is of.
        firsts: the key of each table's first row. The one before is of ids that are less than 0, and the one after the
            last row of those that are too large.
        rows: of each table.
        keys: see above.
    """
    for feature, table in enumerate(tables):
        own = slice(cuts[feature], cuts[feature + 1])
        keys[own] = firsts[table] + np.clip(ids[own], -1, rows[table])


def bounds(
    firsts: Int64Array,
    rows: Sequence[int],
    unique: Int64Array,
    ids: Int64Array,
    paddings: Sequence[int],
    bounds: Int32Array,
    faults: Int64Array,
) -> None:
    """Write which of unique keys are of each table, and note in its fault an id that is outside of it.

    Args:
        firsts, rows: see `join`.
        unique: sorted.
        ids: of which the keys were made.
        paddings: an id of each table, or less than 0.
        bounds: int32 (2 * k + 1,) receives where the keys of each table begin, and the last ones end; and the place of
            the key of each one's padding, -1 for none.
        faults: int64 (k, 4): see `check`.
    """
    bounds[: len(firsts)] = np.searchsorted(unique, firsts - 1)
    for table, first in enumerate(firsts[:-1]):
        place = np.flatnonzero(unique == first + paddings[table]) if paddings[table] >= 0 else []
        bounds[len(firsts) + table] = place[0] if len(place) else -1
        own = slice(bounds[table], bounds[table + 1])
        bad = ids[own][(unique[own] < first) | (unique[own] >= first + rows[table])]
        if bad.size and not faults[table, 0]:
            faults[table, [0, 2]] = OUT_OF_RANGE, bad[0]


class BagsOf(NamedTuple):
    """The bags of a feature.

    Attributes:
        table: which one it is of.
        n: ids in all bags.
        starts: where each begins among them.
        is_mean: whether they are averaged, or added up.
    """

    table: int
    n: int
    starts: Sequence[int]
    is_mean: bool


def bags(
    features: Sequence[BagsOf],
    skips: Int32Array,
    offsets: Int32Array,
    bags: Int32Array,
    words: Int32Array,
    faults: Int64Array,
) -> None:
    """Write where the bags of features are, one after the other; note starts that are wrong in their table's fault.

    Args:
        features: see above.
        skips: of each table, the row that does not count in bags, -1 for none.
        offsets: int32 (bags + 1,) receives where the positions of each bag begin, and the last ones end.
        bags: int32 (n,) receives the bag of each position.
        words: int32 (bags,) receives twice the row that does not count in a bag, and 1 more for a mean.
        faults: int64 (k, 4): see `check`.
    """
    position = bag = 0
    for feature in features:
        starts, end = np.asarray(feature.starts, np.int64), position + feature.n
        bounds, own = np.append(starts, feature.n), slice(bag, bag + len(starts))
        if (len(starts) and starts[0] != 0) or (np.diff(bounds) < 0).any():
            faults[feature.table, 0] = faults[feature.table, 0] or BAD_OFFSETS
        else:
            bags[position:end] = bag + np.repeat(np.arange(len(starts)), np.diff(bounds))
        offsets[own] = position + np.clip(starts, 0, feature.n)
        words[own] = 2 * skips[feature.table] + feature.is_mean
        position, bag = end, own.stop
    offsets[bag] = position


def norms(
    firsts: Int64Array,
    paddings: Sequence[int],
    unique: Int64Array,
    bounds: Int32Array,
    squares: npt.NDArray[np.float64],
    norms: npt.NDArray[np.float32],
) -> None:
    """Write the root of the sum of the squares of each table's rows, 0, and the root again: float32 (3 * k,).

    The squares of the row whose id is the table's padding do not count.
    """
    k = len(paddings)
    for table, padding in enumerate(paddings):
        own = slice(bounds[table], bounds[table + 1])
        total = np.sqrt(squares[own][unique[own] != firsts[table] + padding].sum())
        total = total if total == total else np.inf
        norms[table::k] = total, 0, total


# ---------------------------------------------------------------- several tables of open ids


class OpenTable(NamedTuple):
    """A table of open ids, which shares a space of keys with others.

    Attributes:
        first: the key of its first slot. The one before is that of rows without a slot.
        ids: of the slots, in their order.
        used: how many slots were given.
        padding: an id that never gets a slot, None for none.
    """

    first: int
    ids: Int64Array
    used: int
    padding: int | None


def tables(order: Int64Array, cuts: Int64Array, found: np.ndarray) -> None:
    """Write the table of each position of `order` to `found`, integers (n,).

    Args:
        order: (n,), positions of ids of tables, one after the other.
        cuts: where the positions of each table begin, and the last ones end.
        found: see above.
    """
    found[:] = np.searchsorted(cuts, order, side="right") - 1


def search_tables(
    ids: Int64Array,
    of: np.ndarray,
    tables: Sequence[OpenTable],
    keys: Int64Array,
    news: Int32Array,
    bounds: Int32Array,
) -> None:
    """Write the keys of rows of several tables, and which rows are of each table.

    Args:
        ids: (n,), of the rows, none of them twice in a table.
        of: (n,), ascending, the table of each.
        tables: see above.
        keys: (n,), see `OpenTable`.
        news: (k,) receives how many rows of each table have no slot and are not its padding.
        bounds: see `bounds`.
    """
    bounds[: len(tables) + 1] = np.searchsorted(of, np.arange(len(tables) + 1))
    for number, table in enumerate(tables):
        own = slice(bounds[number], bounds[number + 1])
        slots = search(ids[own], np.array([len(ids[own])], np.int32), table.ids, table.used)
        padding = np.flatnonzero(_are_padding(ids[own], table))
        keys[own] = table.first + slots
        news[number] = np.count_nonzero(np.delete(slots, padding) == NEW)
        bounds[len(tables) + 1 + number] = own.start + padding[0] if len(padding) else -1


def enter_tables(
    ids: Int64Array,
    keys: Int64Array,
    tables: Sequence[OpenTable],
    bounds: Int32Array,
    begin: int,
    live: Sequence[bool],
) -> list[int]:
    """Give the next slots to rows of some tables that have none; return how many are given then of each.

    Args:
        ids, keys, tables, bounds: as `search_tables` had and left them; `keys` and the tables' `ids` receive new ones.
        begin: the first of those tables.
        live: of them, see `enter`.
    """
    given = []
    for number, is_live in enumerate(live, begin):
        table, own = tables[number], slice(bounds[number], bounds[number + 1])
        slots = np.where(_are_padding(ids[own], table), DROPPED, keys[own] - table.first)
        given.append(enter(ids[own], slots, is_live, table.ids, table.used))
        keys[own] = np.where(slots == DROPPED, keys[own], table.first + slots)
    return given


def _are_padding(ids: Int64Array, table: OpenTable) -> npt.NDArray[np.bool_]:
    return ids == table.padding if table.padding is not None else np.zeros(len(ids), bool)
