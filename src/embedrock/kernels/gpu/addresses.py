"""Where the records of rows are, and which rows a batch uses: see ``tests/reference/device.py`` for what is done.

A row has a word in `CacheSlots.where`: its near slot, or when and how often it was used when it is far.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from embedrock.kernels.gpu.binding import FixedArguments
from embedrock.kernels.gpu.numbers import loaded
from embedrock.kernels.gpu.runtime import inlined

CHANGED = 1 << 30  # of a word of `where` where all rows are near: the record is newer than the far one
ABSENT, FAR = -2, -1  # words of `where` for rows that no batch has used: without a record, and with one
AGES = (1 << 22) - 1

_CHANGED = tl.constexpr(CHANGED)
_SLOTS = tl.constexpr(CHANGED - 1)
_AGES = tl.constexpr(AGES)
_CODES = tl.constexpr(255)
_ONE = tl.constexpr(127 << 23)  # the bits of 1.0: the upper ones, counted from there, are a logarithm, near enough
_TO_CODE = tl.constexpr(19)  # leaves 16 codes to a doubling of worth
_FADED = tl.constexpr(24.0)  # more half-lives make no difference


class CacheSlots(NamedTuple):
    """What is known about records: tensors that stay from batch to batch.

    Attributes:
        where: int32 (far slots,): the near slot of a record, or, < 0, ``-1 - u`` with bit 0 of u: there is no record;
            bits 1 to 22: the stamp of the last batch that used the row; bits 23 to 30: its worth then, coded.
        owner: int64 (near slots,): the far slot of the record, -1: free.
        worth: float32 (near slots,): how often the row was used, as of the last batch that used it; uses fade.
        used: int32 (near slots,): the stamp of the last batch that used it.
        dirty: uint8 (near slots,): 1 where the record is newer than the far one.
        tallies: int64 (8,): rows that were near; far; without a record. Records fetched; put out; of those, written
            back.
    """

    where: Any
    owner: Any
    worth: Any
    used: Any
    dirty: Any
    tallies: Any


class BatchTime(NamedTuple):
    """A batch's place in time.

    Attributes:
        stamp: of the batch: one more than the batch before.
        oldest: the stamp of the oldest batch that is not finished, this one counted in.
        half_life: the number of batches in which past uses of a row lose half of their weight.
    """

    stamp: int
    oldest: int
    half_life: float

    def numbers(self):
        """Return the numbers as kernels take them: stamps fit into 22 bits."""
        return self.stamp & AGES, self.stamp - self.oldest, 1.0 / self.half_life


class TimeInMemory(NamedTuple):
    """The same of a batch that a CUDA graph plans again and again.

    Attributes:
        stamp: where the batch's stamp is, of which 22 bits: int32 ().
        span: where it is told how many batches before it are not finished: int32 ().
        half_life: see `BatchTime`.
    """

    stamp: Any
    span: Any
    half_life: float

    def numbers(self):
        """Return the numbers as kernels take them."""
        return self.stamp, self.span, 1.0 / self.half_life


class RecordMemory(NamedTuple):
    """Where records lie: the addresses of the near and the far slot 0, and the bytes of a record."""

    near: int
    far: int
    record_bytes: int


# ---------------------------------------------------------------- words


@inlined
def far_word(absent, stamp, worth):
    # A row that was used is worth 1 or more: no code is negative.
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


# ---------------------------------------------------------------- a batch's rows


@inlined
def touch_rows(key, known, where, worth, used, tallies, stamp, span, fading):
    """Note that a batch uses rows; return how many are to be fetched: far, and used by no unfinished batch."""
    stamp, span = loaded(stamp), loaded(span)
    word = tl.load(where + key, mask=known, other=0)
    near = known & (word >= 0)
    age = (stamp - tl.load(used + word, mask=near, other=0)) & _AGES
    now = fade(tl.load(worth + word, mask=near, other=1.0), age, fading) + 1.0
    tl.debug_barrier()  # what was read is overwritten
    tl.store(worth + word, now, mask=near)
    tl.store(used + word, tl.zeros_like(word) + stamp, mask=near)

    absent, last, then = read_word(word)
    absent = absent & (known & (word < 0)).to(tl.int32)
    age = (stamp - last) & _AGES
    far = known & (word < 0) & (absent == 0)
    missing = far & (age > span)
    stays = known & (word < 0) & ~missing
    tl.store(where + key, far_word(absent, stamp, fade(then, age, fading) + 1.0), mask=stays)
    tl.atomic_add(tallies, tl.sum(near.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(tallies + 1, tl.sum(far.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(tallies + 2, tl.sum(absent.to(tl.int64), axis=0), sem="relaxed")
    return tl.sum(missing.to(tl.int32), axis=0)


# ---------------------------------------------------------------- a row's record


@dataclass(frozen=True, eq=False)
class RecordAddresses:
    """Where the records of a table are, for kernels that read or step them.

    Attributes:
        where: int32 (far slots,), see `CacheSlots`; None: each has a record, in its far slot.
        dirty: uint8 (near slots,), see `CacheSlots`; None for a table without a cache.
        is_identity: all records are near, in slot = key, and `CHANGED` is set where they are stepped.
        limit: keys outside ``[0, limit)`` are of no row.
        memory: where records lie.
    """

    where: Any
    dirty: Any
    is_identity: bool
    limit: int
    memory: RecordMemory

    @functools.cached_property
    def arguments(self):
        """What kernels take of it."""
        return FixedArguments(self.where, self.dirty, self.limit, *self.memory[:2])

    @functools.cached_property
    def kind(self):
        """How records are found, for kernels that read them."""
        return AddressKind(self.where is not None, self.is_identity, False)

    @functools.cached_property
    def kind_to_step(self):
        """How records are found and noted, for kernels that write them."""
        return AddressKind(self.where is not None, self.is_identity, self.dirty is not None)


class AddressKind(NamedTuple):
    """What `RecordAddresses` are, for kernels: a constexpr, so each kind is compiled for itself."""

    is_mapped: bool
    is_identity: bool
    is_cached: bool


@inlined
def find(key, here, homes, KIND: tl.constexpr, BYTES: tl.constexpr):
    """Find records: their addresses, which of the keys are of rows, which of those have a record, and their words.

    Nothing may be read at the address of a row that has none. `homes` is what `RecordAddresses.arguments` has, as a
    tuple.
    """
    where, _, limit, near, far = homes
    known = here & (key >= 0) & (key < limit)
    place, has, word = far + key * BYTES, known, (key * 0).to(tl.int32)
    if KIND.is_mapped:
        word = tl.load(where + key, mask=known, other=0)
        has = known & ((word >= 0) | (((-1 - word) & 1) == 0))
        if KIND.is_identity:  # nothing has to wait for the word
            place = near + key * BYTES
        else:
            place = tl.where(word >= 0, near + (word & _SLOTS).to(tl.int64) * BYTES, place)
    return place, known, has, word


@inlined
def settle(key, known, has, word, homes, KIND: tl.constexpr):
    """Before rows are stepped where `find` says: note that those have a record, and which near ones will be newer."""
    where, dirty, _, _, _ = homes
    if KIND.is_mapped:
        moves, record = known & (has == 0), word + 1  # as it was, but for the bit
        if KIND.is_identity:
            moves, record = known, key.to(tl.int32) | _CHANGED
        if KIND.is_cached:
            tl.store(dirty + word, tl.full(word.shape, 1, tl.uint8), mask=known & (word >= 0))
        tl.debug_barrier()  # what was read is overwritten
        tl.store(where + key, record, mask=moves)
