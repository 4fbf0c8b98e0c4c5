"""Records on their way to and from files: the specification of ``kernels/cpu/storage.py``.

A stored record is its bytes and then its seal, little-endian: the CRC-32 of its id (int64) and them, XOR its *mark*,
which says where it belongs: ``(salt of its run + step * its index in the run) mod 2^32`` (``docs/format.md``).
A location is ``run number << 40 | index of the record in the run``, or -1 for none.
"""

from __future__ import annotations

import zlib

import numpy as np

from embedrock.kernels.constants import CRC_BYTES, MARK_STEP, RUN_SHIFT
from reference.directory import mix

BLOCK = 4096  # bytes: what disks read
FULL, BITS, LISTED = 0, 1, 2  # how a chunk of the base tells which ids it has
_MASK = (1 << 64) - 1
_WORD = (1 << 32) - 1


def _crc(row: int, record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(row.to_bytes(8, "little", signed=True)))


def seal(records: np.ndarray, slots: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Copy the records of slots to ``out`` (n, record_bytes + 4), each with the CRC of its id and itself.

    Where they will stand is not known yet: their mark is 0. Record bytes are a multiple of 4.
    """
    for i, (slot, row) in enumerate(zip(slots.tolist(), ids.tolist(), strict=True)):
        record = records[slot].tobytes()
        out[i] = np.frombuffer(record + _crc(row, record).to_bytes(CRC_BYTES, "little"), np.uint8)


def stamp(sealed: np.ndarray, salt: int, first: int) -> None:
    """Put their marks into the seals of ``sealed`` (n, record_bytes + 4), records ``first``, ... of a run."""
    seals = sealed[:, -CRC_BYTES:]
    for i in range(len(sealed)):
        seal = int.from_bytes(seals[i].tobytes(), "little") ^ (salt + MARK_STEP * (first + i)) & _WORD
        seals[i] = np.frombuffer(seal.to_bytes(CRC_BYTES, "little"), np.uint8)


def mark(locations: np.ndarray, numbers: np.ndarray, salts: np.ndarray, steps: np.ndarray, marks: np.ndarray) -> None:
    """Write the marks, uint32, of records at locations.

    ``numbers`` ascend and have all their runs, ``salts`` and ``steps`` (uint32) are those of these runs.
    """
    places = {number: k for k, number in enumerate(numbers.tolist())}
    for i, location in enumerate(locations.tolist()):
        k, index = places[location >> RUN_SHIFT], location & ((1 << RUN_SHIFT) - 1)
        marks[i] = (int(salts[k]) + int(steps[k]) * index) & _WORD


def unseal(
    buffer: np.ndarray,
    starts: np.ndarray,
    ids: np.ndarray,
    marks: np.ndarray,
    records: np.ndarray,
    slots: np.ndarray,
    good: np.ndarray,
) -> None:
    """Copy stored records from ``buffer[starts]`` to slots, and write 1 to ``good`` where the seal fits, else 0.

    Starts are multiples of 4. A record whose seal does not fit is copied too.
    """
    size = records.shape[1]
    for i, (start, row) in enumerate(zip(starts.tolist(), ids.tolist(), strict=True)):
        records[slots[i]] = buffer[start : start + size]
        found = buffer[start + size : start + size + CRC_BYTES].tobytes()
        good[i] = int.from_bytes(found, "little") == _crc(row, records[slots[i]].tobytes()) ^ int(marks[i])


def unmix(h: int) -> int:
    """Return what ``directory.mix`` made ``h`` of, in [0, 2**64)."""
    h = ((h ^ (h >> 33)) * pow(0xC4CEB9FE1A85EC53, -1, 1 << 64)) & _MASK
    h = ((h ^ (h >> 33)) * pow(0xFF51AFD7ED558CCD, -1, 1 << 64)) & _MASK
    return h ^ (h >> 33)


# An overlay is a hash table whose entries (hash, location + 1), uint64, ascend by hash, with gaps (second word 0): a
# search ends at the first greater hash, and a larger table is made by one pass in place. The home of a hash is
# its share of `homes`; an entry lies there or, where others came before it, behind. The last entry is always empty.
# The hash is of the id and a salt, for ids often come in the order of another table's hashes: they would fill one
# part of this one at a time, were it the same hash.


def _key(row: int, salt: int | np.uint64) -> int:
    return mix(row ^ int(salt))


def _home(key: int, homes: int) -> int:
    return ((key >> 32) * homes) >> 32


def _position(entries: np.ndarray, homes: int, key: int) -> int:
    position = _home(key, homes)
    while entries[position, 1] != 0 and entries[position, 0] < key:
        position += 1
    return position


def find_overlay(entries: np.ndarray, homes: int, salt: np.uint64, ids: np.ndarray, locations: np.ndarray) -> None:
    """Write the location of each id, or -1."""
    for i, row in enumerate(ids.tolist()):
        key, value = entries[_position(entries, homes, _key(row, salt))].tolist()
        locations[i] = value - 1 if key == _key(row, salt) else -1


def insert_overlay(
    entries: np.ndarray,
    homes: int,
    salt: np.uint64,
    count: int,
    most: int,
    ids: np.ndarray,
    locations: np.ndarray,
    start: int,
) -> tuple[int, int]:
    """Set the locations of ids from ``start`` on: of equal ids, the last one's.

    Returns how many ids are done, and how many the overlay has then. It stops before there are more than ``most``, or
    when the end of the table is reached: it has to be rebuilt then.
    """
    for i in range(start, len(ids)):
        key, value = _key(int(ids[i]), salt), int(locations[i]) + 1
        position = _position(entries, homes, key)
        if entries[position, 1] == 0 or entries[position, 0] != key:
            end = position + int(np.argmin(entries[position:, 1] != 0))
            if count == most or end == len(entries) - 1:
                return i, count
            entries[position + 1 : end + 1] = entries[position:end].copy()
            count += 1
        entries[position] = key, value
    return len(ids), count


def remove_overlay(entries: np.ndarray, homes: int, salt: np.uint64, ids: np.ndarray, locations: np.ndarray) -> int:
    """Remove the ids whose locations are these, and return how many. Those behind them move towards their homes."""
    removed = 0
    for row, location in zip(ids.tolist(), locations.tolist(), strict=True):
        position = _position(entries, homes, _key(row, salt))
        if entries[position].tolist() == [_key(row, salt), location + 1]:
            while entries[position + 1, 1] != 0 and _home(int(entries[position + 1, 0]), homes) <= position:
                entries[position] = entries[position + 1]
                position += 1
            entries[position, 1] = 0
            removed += 1
    return removed


def _places(keys: list[int], homes: int) -> list[int]:
    places, empty = [], 0
    for key in keys:
        places.append(max(_home(key, homes), empty))
        empty = places[-1] + 1
    return places


def rebuild_overlay(entries: np.ndarray, total: int, expected: int) -> int:
    """Spread the entries over ``entries[:total]``, and return the new number of homes; -1 where they are damaged.

    Homes are fewer than entries, so that those of the last homes have room behind them: fewer still where hashes are
    not spread evenly.

    Args:
        entries: uint64 (n, 2), of which those in use are `expected`, and ascend.
        total: how many there are to be.
        expected: how many are in use.
    """
    kept = entries[entries[:, 1] != 0]
    if len(kept) != expected or (kept[1:, 0] < kept[:-1, 0]).any():
        return -1
    tail = max(min(total // 16, 4096), 4)
    homes = total - tail
    while (places := _places(kept[:, 0].tolist(), homes)) and places[-1] + tail // 2 >= total:
        homes = max(homes - tail, 1)
    entries[:, 1] = 0
    entries[places] = kept
    return homes


def list_overlay(
    entries: np.ndarray, salt: np.uint64, start: int, ids: np.ndarray, locations: np.ndarray
) -> tuple[int, int]:
    """Fill ``ids`` and ``locations`` with the entries from position ``start`` on.

    Returns the position to go on from, and how many were written: less than fits only at the end.
    """
    count = 0
    while start < len(entries) and count < len(ids):
        if entries[start, 1] != 0:
            ids[count] = (np.uint64(unmix(int(entries[start, 0]))) ^ salt).view(np.int64)
            locations[count] = int(entries[start, 1]) - 1
            count += 1
        start += 1
    return start, count


def behind_overlay(entries: np.ndarray, homes: int, salt: np.uint64, row: int) -> int:
    """Return the position from which on lie all entries whose hash is greater than a row's, and no others."""
    key = _key(row, salt)
    return _position(entries, homes, key + 1) if key < _MASK else len(entries)


def rank_blocks(blocks: np.ndarray, ranks: np.ndarray) -> int:
    """Write how many bits are set before each block (n, 8) of uint64 words, and return how many in all."""
    ones = np.bitwise_count(blocks).sum(axis=1, dtype=np.int64)
    ranks[:] = np.cumsum(ones) - ones
    return int(ones.sum())


def _chunk_ids(chunk: np.ndarray, last: int, listed: np.ndarray, blocks: np.ndarray) -> list[int]:
    low, kind, _, start, count = chunk.tolist()
    if kind == FULL:
        return list(range(low, last + 1))
    if kind == LISTED:
        return listed[start : start + count].tolist()
    bits = np.unpackbits(blocks[start:].reshape(-1).view(np.uint8), bitorder="little", count=last + 1 - low)
    return (np.flatnonzero(bits) + low).tolist()


def find_base(
    lows: np.ndarray,
    lasts: np.ndarray,
    chunks: np.ndarray,
    listed: np.ndarray,
    blocks: np.ndarray,
    ranks: np.ndarray,
    ids: np.ndarray,
    locations: np.ndarray,
) -> None:
    """Write the location of each id whose location is -1, or leave it.

    ``chunks`` (n, 5) hold (low, kind, run number, start, count) and ids from ``lows`` to ``lasts``, ascending and
    disjoint: all of them (FULL), those in ``listed[start : start + count]`` (LISTED), or those whose bits are set from
    ``blocks[start]`` on (BITS), where ``ranks`` tell how many bits of the chunk are set before a block.
    """
    where: dict[int, int] = {}
    for chunk, last in zip(chunks, lasts.tolist(), strict=True):
        location = int(chunk[2]) << RUN_SHIFT
        for index, row in enumerate(_chunk_ids(chunk, last, listed, blocks)):
            where[row] = location + index
    unknown = locations == -1
    locations[unknown] = [where.get(row, -1) for row in ids[unknown].tolist()]


def list_bits(words: np.ndarray, ones_before: int, low: int, ids: np.ndarray) -> None:
    """Fill ``ids`` with those whose bits are set in uint64 words, the first bit's id being ``low``.

    The first ``ones_before`` of them are left out.
    """
    set_bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    ids[:] = set_bits[ones_before : ones_before + len(ids)] + low
