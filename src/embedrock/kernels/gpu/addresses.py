"""Addresses of rows' records, and the marking of rows that a batch uses: see ``tests/reference/device.py``.

Each row has a word in `CacheSlots.where`: its device slot or, on host, its last use and score.

Kernels take one or more tables. Device memory has `WORDS` words about each of them. Rows of all tables share a space of
keys, and each table has a range of it. The words are in the order of keys, so nearly every program handles the rows of
a single table. The keys of one table alone may be its slots.
"""

from typing import Any, NamedTuple

import triton.language as tl

from embedrock.kernels.gpu.runtime import inlined

CHANGED = 1 << 30  # flag in words of `where` if all rows are on device: newer than the host record
ABSENT, FAR = -2, -1  # words of `where` for unused rows: without a record, and with one
AGES = (1 << 22) - 1
WORDS = 24  # about a table
SHARE_WORDS = 4
TIME_WORDS = 12  # int32; numbers of a CUDA graph are at multiples of 16 bytes
TOUCHING_WARPS = 8  # fewer would take too many registers for a loop over tables

_WORDS, _SHARE, _TIME = tl.constexpr(WORDS), tl.constexpr(SHARE_WORDS), tl.constexpr(TIME_WORDS)
_NOBODY = tl.constexpr(2**62)  # above all keys
_CHANGED = tl.constexpr(CHANGED)
_SLOTS = tl.constexpr(CHANGED - 1)
_AGES = tl.constexpr(AGES)
_CODES = tl.constexpr(255)
_ONE = tl.constexpr(127 << 23)  # the bits of 1.0; the upper bits above these approximate a logarithm
_TO_CODE = tl.constexpr(19)  # leaves 16 codes to a doubling of the score
_FADED = tl.constexpr(24.0)  # half-lives; more make no difference


class CacheSlots(NamedTuple):
    """State of a device cache: tensors that stay from batch to batch.

    Attributes:
        where: int32 (host slots,): the device slot of a record or, < 0, ``-1 - u``. Bit 0 of u: no record exists. Bits
            1 to 22: the stamp of the last batch that used the row. Bits 23 to 30: its score then, coded.
        owner: int64 (device slots,): the host slot of the record, -1: free.
        worth: float32 (device slots,): score, a fading count of the row's uses, as of the last batch that used it.
        used: int32 (device slots,): the stamp of the last batch that used it.
        dirty: uint8 (device slots,): 1 if the record is newer than the one on host.
        tallies: int64 (8,): counts of rows used on device, on host, and without a record. Counts of records loaded,
            evicted, and written back.
    """

    where: Any
    owner: Any
    worth: Any
    used: Any
    dirty: Any
    tallies: Any


class BatchTime(NamedTuple):
    """A table's batch's place in time and in a search. In a CUDA graph, all but `fading` are int32 ().

    Attributes:
        stamp: the lower 22 bits (`AGES`) of the batch's number: one more than of the batch before.
        span: number of unfinished batches before this one.
        fading: 1 / half-life of scores, in batches.
        hand: the first device slot of the search window.
    """

    stamp: Any
    span: Any
    fading: float
    hand: Any = 0


# ---------------------------------------------------------------- words


@inlined
def far_word(absent, stamp, worth):
    # A used row has a score of at least 1, so no code is negative.
    code = tl.minimum((worth.to(tl.int32, bitcast=True) - _ONE) >> _TO_CODE, _CODES)
    return -1 - ((code << 23) | (stamp << 1) | absent)


@inlined
def read_word(word):
    u = -1 - word
    worth = _ONE + (((u >> 23) & _CODES) << _TO_CODE)
    return u & 1, (u >> 1) & _AGES, worth.to(tl.float32, bitcast=True)


@inlined
def fade(worth, age, fading):
    return worth * tl.exp2(-tl.minimum(age.to(tl.float32) * fading, _FADED))


# ---------------------------------------------------------------- tables


class TableEntryWords(NamedTuple):
    """Words about a table for kernels.

    Attributes:
        first: the key of id 0; keys from ``first - 1`` to ``first + rows`` are the table's.
        rows: keys outside ``[first, first + rows)`` are of no row.
        where, near, far: addresses of `CacheSlots.where`, and of slot 0 on device and on host.
        seed: 64 bits.
        state, fault: addresses of the initial state, float32, and of the error, int64 (4,). State 0: the host creates
            records.
        numbers: of the generator of initial values: the bits of three float32.
        padding: the id that gets no gradient, -2 for none.
        slots: addresses of `owner`, `worth`, `used`, `dirty` and `tallies`, see `CacheSlots`, and the number
            of device slots. Zeros without a cache.
        directory: of a table of open ids, see `directory`; else zeros.
    """

    first: int
    rows: int
    where: int
    near: int
    far: int
    seed: int
    state: int
    fault: int
    numbers: tuple[int, int, int]
    padding: int
    slots: tuple[int, ...] = (0,) * 6
    directory: tuple[int, ...] = (0,) * 6

    def uncounted(self, tallies):
        """Return the same with other tallies."""
        *most, _, capacity = self.slots
        return self._replace(slots=(*most, tallies.data_ptr(), capacity))

    @property
    def words(self):
        """The words for kernels: int64 (WORDS,)."""
        *most, numbers, padding, slots, directory = self
        return *(word - 2**64 if word >= 2**63 else word for word in most), *numbers, padding, *slots, *directory


class DeviceTables(NamedTuple):
    """Tables of one family on a device.

    Attributes:
        entries: int64 (k, WORDS).
        kind: of the record addresses, a constexpr. "recorded": each row has a record, in its host slot. Otherwise
            `CacheSlots.where` tells the addresses, and the kind is the mode of a `DeviceLayout`: "device" (all records
            are in slot = key; steps set `CHANGED`), "cached" (some are in a device cache), "host".
        draw: name of the generator of initial values, see `generator.DRAWS`; None: the host creates records.
        form: layout of the records.
    """

    entries: Any
    kind: Any
    draw: str | None
    form: Any


@inlined
def last_begun(begins, count, place, STRIDE: tl.constexpr):
    """Return the last item that begins at or before a place; `begins` has one number in `STRIDE`."""
    low, high = count * 0, count
    while high - low > 1:
        middle = (low + high) // 2
        begun = tl.load(begins + middle * STRIDE) <= place
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


@inlined
def span_of(entries, tables, key, here, ALONE=False):
    """Return the first and the last table of keys; `ALONE`: there is one table."""
    first, last = tables * 0, tables * 0
    if not ALONE:
        first, last = tl.min(tl.where(here, key, _NOBODY), axis=0), tl.max(tl.where(here, key, -1), axis=0)
        # The keys of a table begin one before its first row.
        first, last = last_begun(entries, tables, first + 1, _WORDS), last_begun(entries, tables, last + 1, _WORDS)
    return first, last


@inlined
def slots_of(entry):
    """Return the cache state of a table, in the order of `CacheSlots`."""
    return (
        tl.load(entry + 2).to(tl.pointer_type(tl.int32)),
        tl.load(entry + 12).to(tl.pointer_type(tl.int64)),
        tl.load(entry + 13).to(tl.pointer_type(tl.float32)),
        tl.load(entry + 14).to(tl.pointer_type(tl.int32)),
        tl.load(entry + 15).to(tl.pointer_type(tl.uint8)),
        tl.load(entry + 16).to(tl.pointer_type(tl.int64)),
    )


@inlined
def number_of(entry, PLACE: tl.constexpr):
    """Return one of the numbers of a table's generator of initial values."""
    return tl.load(entry + 8 + PLACE).to(tl.int32).to(tl.float32, bitcast=True)


# ---------------------------------------------------------------- keys of a batch with caches


@inlined
def time_of(table, shares, times):
    """Return the `BatchTime` of a table's batch, see `cache.VictimSearch`."""
    own = times + table * _TIME
    fading = tl.load(shares + table * _SHARE).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.load(own), tl.load(own + 4), fading, tl.load(own + 8)


@inlined
def rows_of(key, heads, entry):
    """Return the rows of a table among keys, and a mask of them."""
    row = key - tl.load(entry)
    return row, heads & (row >= 0) & (row < tl.load(entry + 1))


@inlined
def used_on_host(word, known, time):
    """Return masks of rows without a record, of rows on host, and of those to load; and the scores with this use.

    Rows are loaded if no unfinished batch uses them.
    """
    stamp, span, fading, _ = time
    absent, last, worth = read_word(word)
    age = (stamp - last) & _AGES
    far = known & (word < 0)
    absent, far = far & (absent == 1), far & (absent == 0)
    return absent, far, far & (age > span), fade(worth, age, fading) + 1.0


@inlined
def touch_keys(key, heads, entries, tables, shares, times):
    """Mark the rows of a program's keys as used by a batch: see `cache.touch`."""
    table, last = span_of(entries, tables, key, heads)
    while table <= last:
        entry, own = entries + table * _WORDS, time_of(table, shares, times)
        stamp, _, fading, _ = own
        where, _, worth, used, _, tallies = slots_of(entry)
        row, known = rows_of(key, heads, entry)
        word = tl.load(where + row, mask=known, other=0)
        near = known & (word >= 0)
        age = (stamp - tl.load(used + word, mask=near, other=0)) & _AGES
        now = fade(tl.load(worth + word, mask=near, other=1.0), age, fading) + 1.0
        absent, far, missing, then = used_on_host(word, known, own)
        stays = (absent | far) & (missing == 0)
        tl.debug_barrier()  # the stores overwrite the words read above
        tl.store(worth + word, now, mask=near)
        tl.store(used + word, tl.zeros_like(word) + stamp, mask=near)
        tl.store(where + row, far_word(absent.to(tl.int32), stamp, then), mask=stays)
        tl.atomic_add(tallies, tl.sum(near.to(tl.int64), axis=0), sem="relaxed")
        tl.atomic_add(tallies + 1, tl.sum(far.to(tl.int64), axis=0), sem="relaxed")
        tl.atomic_add(tallies + 2, tl.sum(absent.to(tl.int64), axis=0), sem="relaxed")
        table += 1


# ---------------------------------------------------------------- record of a row


@inlined
def find(key, here, entry, KIND: tl.constexpr, BYTES: tl.constexpr):
    """Return the addresses of a table's records, masks of valid keys and of existing records, and the words.

    A row without a record has an invalid address.
    """
    known = here & (key >= 0) & (key < tl.load(entry + 1))
    place, has, word = tl.load(entry + 4) + key * BYTES, known, (key * 0).to(tl.int32)
    if KIND != "recorded":
        near, where = tl.load(entry + 3), tl.load(entry + 2).to(tl.pointer_type(tl.int32))
        word = tl.load(where + key, mask=known, other=0)
        has = known & ((word >= 0) | (((-1 - word) & 1) == 0))
        if KIND == "device":  # needs no word
            place = near + key * BYTES
        else:
            place = tl.where(word >= 0, near + (word & _SLOTS).to(tl.int64) * BYTES, place)
    return place, known, has, word


@inlined
def settle(key, known, has, word, entry, KIND: tl.constexpr):
    """Mark rows as having records, and device records as dirty, before a step at the addresses of `find`."""
    if KIND != "recorded":
        moves, record = known & (has == 0), word + 1  # the old word without the bit
        if KIND == "device":
            moves, record = known, key.to(tl.int32) | _CHANGED
        if KIND == "cached":
            dirty = tl.load(entry + 15).to(tl.pointer_type(tl.uint8))
            tl.store(dirty + word, tl.full(word.shape, 1, tl.uint8), mask=known & (word >= 0))
        where = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
        tl.debug_barrier()  # the stores overwrite the words read above
        tl.store(where + key, record, mask=moves)
