"""Hash index of open ids in GPU memory, from ids to slots of records: see ``tests/reference/device.py``.

An 8-byte entry has 32 bits of its id's hash and the slot + 1, 0: empty. The other bits of the hash give its place. A
collision moves it to the next free place, mostly in the same line of 128 bytes. The order of insertion does not affect
searches, and slots are given by rank. So programs may claim places in any order.
"""

from typing import Any, NamedTuple

import triton.language as tl

from embedrock.kernels.gpu import gate
from embedrock.kernels.gpu.plan import sum_before
from embedrock.kernels.gpu.runtime import inlined, kernel, launch

LANES = 512
NEW, DROPPED = -1, -2  # instead of slots: of an id without one, and of a row without a step

_NEW, _DROPPED = tl.constexpr(NEW), tl.constexpr(DROPPED)
_LIVE = tl.constexpr(gate.LIVE)
_SLOTS = tl.constexpr((1 << 32) - 1)  # bits of an entry
_NO_ENTRY = tl.constexpr(-1)
_MIX_1, _MIX_2 = tl.constexpr(0xFF51AFD7ED558CCD), tl.constexpr(0xC4CEB9FE1A85EC53)


class HashIndexTensors(NamedTuple):
    """A hash index: tensors that stay from batch to batch.

    Attributes:
        table: int64 (size,), at least twice the number of slots.
        ids: int64 (slots,), in the order of their slots.
        seed: of the hash, 63 bits.
    """

    table: Any
    ids: Any
    seed: int


def blocks(n):
    """Return the number of counts for n rows."""
    return -(-n // LANES)


@inlined
def _mix(key):
    # The finalizer of MurmurHash3, as in tests/reference/directory.py.
    h = key
    h = (h ^ (h >> 33)) * _MIX_1
    h = (h ^ (h >> 33)) * _MIX_2
    return h ^ (h >> 33)


@inlined
def _home(key, seed, size):
    """Return the first place for an id's entry, and the hash bits of that entry."""
    h = _mix(key.to(tl.uint64) ^ seed)
    return (((h >> 32) * size.to(tl.uint64)) >> 32).to(tl.int64), (h << 32).to(tl.int64)


@inlined
def _after(place, size):
    return tl.where(place + 1 == size, 0, place + 1)


@inlined
def seek(key, here, table, ids, seed, size):
    """Return the slots of ids under the mask `here`, `NEW` for ids without one."""
    place, digest = _home(key, seed, size)
    slot = tl.zeros_like(key) + _NEW
    seeks = here
    while tl.max(seeks.to(tl.int32), 0) > 0:
        entry = tl.load(table + place, mask=seeks, other=0)
        at = (entry & _SLOTS) - 1
        alike = seeks & (entry != 0) & ((entry >> 32) == (digest >> 32))
        same = alike & (tl.load(ids + at, mask=alike, other=0) == key)
        slot = tl.where(same, at, slot)
        seeks = seeks & (entry != 0) & (same == 0)
        place = _after(place, size)
    return slot


@inlined
def claim(key, slot, new, table, seed, size):
    """Insert entries for ids without one."""
    place, digest = _home(key, seed, size)
    entry = digest | (slot + 1)
    claims = new
    while tl.max(claims.to(tl.int32), 0) > 0:
        # `atomic_cas` has no mask. Lanes that claim nothing compare with an impossible entry.
        free = tl.zeros_like(entry) + tl.where(claims, 0, _NO_ENTRY)
        was = tl.atomic_cas(table + place, free, entry, sem="relaxed")
        claims = claims & (was != 0)
        place = tl.where(claims, _after(place, size), place)


@kernel("size", "seed")
def _search(keys, count, known, slots, counts, table, ids, size, seed: tl.uint64, LANES: tl.constexpr):
    program = tl.program_id(0)
    u = program * LANES + tl.arange(0, LANES)
    here = u < tl.load(count)
    seeks = here
    if known is not None:
        seeks &= tl.load(known + u, mask=here, other=_DROPPED) != _DROPPED
    key = tl.load(keys + u, mask=here, other=0)
    slot = seek(key, seeks, table, ids, seed, size)
    tl.store(slots + u, tl.where(seeks, slot, _DROPPED), mask=here)
    tl.store(counts + program, tl.sum((seeks & (slot == _NEW)).to(tl.int32), axis=0))


def search(keys, count, known, entries, slots, counts):
    """Write the slots of ids, `NEW` for ids without one, and count the latter, for `enter`.

    Args:
        keys: int64 (n,), the ids.
        count: int32 (1,), number of ids.
        known: int64 (n,), `DROPPED` for rows without a step, copied to `slots`; None: all rows are stepped.
        entries: see `HashIndexTensors`.
        slots: int64 (n,), see above; unchanged beyond `count`.
        counts: int32, see `blocks`.
    """
    table, ids, seed = entries
    args = keys, count, known, slots, counts, table, ids, table.shape[0], seed
    launch(_search, blocks(len(keys)), *args, LANES=LANES)


@kernel("size", "seed", "turn", "parts")
def _enter(
    keys, count, slots, counts, parts, verdict, used, turn, table, ids, size, seed: tl.uint64, LANES: tl.constexpr
):
    program = tl.program_id(0)
    u = program * LANES + tl.arange(0, LANES)
    live = tl.load(verdict + _LIVE) != 0
    first = tl.load(used + turn)
    new = (u < tl.load(count)) & live
    new &= tl.load(slots + u, mask=new, other=_DROPPED) == _NEW
    key = tl.load(keys + u, mask=new, other=0)
    slot = first + sum_before(counts, program) + tl.cumsum(new.to(tl.int32), axis=0) - 1
    tl.store(slots + u, slot, mask=new)
    tl.store(ids + slot, key, mask=new)
    claim(key, slot, new, table, seed, size)
    if program == 0:
        tl.store(used + 1 - turn, first + tl.where(live, sum_before(counts, parts), 0))


def enter(keys, count, slots, counts, verdict, used, turn, entries):
    """Give the next slots to ids without one, in their order, and insert their entries.

    Args:
        keys, count, slots, counts: results of `search`; `slots` receives the new ones.
        verdict: int32 (LINE,) of `gate.judge`: without a step, no id gets a slot.
        used: int64 (2,): number of slots given, at `turn`; the other element receives the new number.
        turn: index 0 or 1 of the current number in `used`.
        entries: see `search`.
    """
    table, ids, seed = entries
    args = keys, count, slots, counts, counts.shape[0], verdict, used, turn, table, ids, table.shape[0], seed
    launch(_enter, counts.shape[0], *args, LANES=LANES)


@kernel("size", "seed", "turn")
def _file(used, turn, table, ids, size, seed: tl.uint64, LANES: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    new = slot < tl.load(used + turn)
    claim(tl.load(ids + slot, mask=new, other=0), slot, new, table, seed, size)


def file(used, turn, most, entries):
    """Insert entries for the ids in all given slots. None of them may have one yet.

    Args:
        used, turn: see `enter`.
        most: upper bound of the slots given.
        entries: see `search`.
    """
    table, ids, seed = entries
    launch(_file, blocks(most), used, turn, table, ids, table.shape[0], seed, LANES=LANES)
