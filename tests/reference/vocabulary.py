"""Blocks of strings, and strings found by their hash: the specification of ``kernels/cpu/vocabulary.py``.

A *block* is some words uint32, little-endian: the number of its entries; for each entry `width` words, of which the
last says where its string ends among those of the block; then the strings end to end, then zeros. A block of width 1
has strings in order of their ids. One of width 3 has entries in order of their hashes, which are below 2^63: (the upper
32 of its 63 bits, the id, the end). docs/format.md has the rest.

*Packed* strings are found in RAM: a stream of bits, the lowest of a word first, of entries in order of their hashes. An
entry is a size, an id, and a code for each byte of the string, in so many bits each. Where buckets of entries begin, by
their hash, is a list beside it.
"""

from __future__ import annotations

import numpy as np

from embedrock.kernels.constants import ENTRY_WORDS

TAG_SHIFT = 31  # of a hash, for its upper 32 bits
MALFORMED = -2  # in place of what was asked for: the block is none


def plan_blocks(sizes: np.ndarray, keys: np.ndarray, width: int, page_words: int, blocks: np.ndarray) -> int:
    """Cut entries into blocks of whole pages: of one, unless entries of one key do not fit it, which stay together.

    Args:
        sizes: int64 (n,), bytes of strings.
        keys: int64 (n,), ascending.
        width: words of an entry.
        page_words: words of a page.
        blocks: int64 (n, 2) receives, for each block, its first entry and its pages.

    Returns:
        How many blocks there are.
    """
    count = used = room = 0
    first = 0
    while first < len(keys):
        last = first + int(np.searchsorted(keys[first:], keys[first], "right"))
        need = 4 * width * (last - first) + int(sizes[first:last].sum())
        if used == 0 or used + need > room:
            pages = -(-(4 + need) // (4 * page_words))
            blocks[count] = first, pages
            used, room, count = 4, 4 * page_words * pages, count + 1
        used, first = used + need, last
    return count


def write_blocks(
    blocks: np.ndarray,
    columns: np.ndarray,
    starts: np.ndarray,
    data: np.ndarray,
    rows: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write blocks.

    Args:
        blocks: int64 (m + 1,), the first entry of each, and the number of all.
        columns: uint32 (n, width), the words of entries, but with the size of the string in the place of its end.
        starts: int64 (n,), where the strings begin in ...
        data: ... uint8.
        rows: int64 (m + 1,), the first page of each block in `out`, and the number of all.
        out: uint32 (pages, page_words).
    """
    for b in range(len(blocks) - 1):
        entries = slice(blocks[b], blocks[b + 1])
        at, sizes = starts[entries].tolist(), columns[entries, -1].tolist()
        texts = b"".join(data[start : start + size].tobytes() for start, size in zip(at, sizes, strict=True))
        words = columns[entries].copy()
        words[:, -1] = np.cumsum(sizes)
        body = len(sizes).to_bytes(4, "little") + words.tobytes() + texts
        block = out[rows[b] : rows[b + 1]]
        block[:] = np.frombuffer(body.ljust(block.nbytes, b"\0"), "<u4").reshape(block.shape)


def list_entries(
    pages: np.ndarray,
    rows: np.ndarray,
    firsts: np.ndarray,
    columns: np.ndarray,
    starts: np.ndarray,
    good: np.ndarray,
) -> None:
    """Read the entries of blocks.

    Args:
        pages: uint32 (p, page_words).
        rows: int64 (m + 1,), the first page of each block, and the end of the last.
        firsts: int64 (m + 1,): entries of block b go to ``firsts[b]`` up to ``firsts[b + 1]``. That it has as many is
            checked.
        columns: uint32 (n, width), with sizes in the place of ends.
        starts: int64 (n,), where the strings begin in the bytes of `pages`.
        good: uint8 (m,) receives 1, or 0 for a block that is malformed, of which what is written has no meaning.
    """
    page_bytes, width = 4 * pages.shape[1], columns.shape[1]
    for b in range(len(good)):
        words, count = pages[rows[b] : rows[b + 1]].reshape(-1), int(firsts[b + 1] - firsts[b])
        good[b] = 0
        if words[0] != count or 1 + width * count > len(words):
            continue
        found = words[1 : 1 + width * count].reshape(count, width)
        sizes = np.diff(found[:, -1].astype(np.int64), prepend=0)
        if np.any(sizes < 0) or sizes.sum() > 4 * (len(words) - 1 - width * count):
            continue
        good[b] = 1
        columns[firsts[b] : firsts[b + 1]] = found
        columns[firsts[b] : firsts[b + 1], -1] = sizes
        starts[firsts[b] : firsts[b + 1]] = np.cumsum(sizes) - sizes + rows[b] * page_bytes + 4 * (1 + width * count)


def find_in_blocks(
    pages: np.ndarray,
    rows: np.ndarray,
    ends: np.ndarray,
    hashes: np.ndarray,
    data: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    out: np.ndarray,
) -> None:
    """Find the ids of strings in blocks of width 3, which compares their bytes.

    Args:
        pages: uint32 (p, page_words).
        rows, ends: int64 (n,), the pages of the block where string i must be if it is there.
        hashes: int64 (n,), of the strings.
        data, starts, stops: the strings, see `strings.py`.
        out: int64 (n,) receives the id, -1 where there is none, or `MALFORMED` where that shows. (What has no seal to
            prove it is nowhere read outside of the block.)
    """
    for i in range(len(out)):
        words = pages[rows[i] : ends[i]].reshape(-1)
        count, text, tag = int(words[0]), data[starts[i] : stops[i]].tobytes(), int(hashes[i]) >> TAG_SHIFT
        out[i] = MALFORMED
        if 1 + ENTRY_WORDS * count > len(words):
            continue
        entries = words[1 : 1 + ENTRY_WORDS * count].reshape(count, ENTRY_WORDS)
        texts = words[1 + ENTRY_WORDS * count :].tobytes()
        out[i] = -1
        for k in range(int(np.searchsorted(entries[:, 0], tag)), count):
            if entries[k, 0] != tag:
                break
            start, end = int(entries[k - 1, 2]) if k else 0, int(entries[k, 2])
            if not start <= end <= len(texts):
                out[i] = MALFORMED
                break
            if texts[start:end] == text:
                out[i] = entries[k, 1]
                break


def bucket_of(tag: int, buckets: int) -> int:
    """Return in which of so many buckets the entries of a tag are: all tags alike often, in their order."""
    return tag * buckets >> 32


def pack_entries(
    columns: np.ndarray,
    starts: np.ndarray,
    data: np.ndarray,
    codes: np.ndarray,
    widths: np.ndarray,
    limit: int,
    state: np.ndarray,
    firsts: np.ndarray,
    words: np.ndarray,
) -> bool:
    """Pack entries behind others.

    Args:
        columns: uint32 (n, 3), tags, which ascend, ids and sizes.
        starts: int64 (n,), where their strings begin in ...
        data: ... uint8.
        codes: int16 (256,) of each byte; -1: no string has it.
        widths: int64 (3,), bits of a size, of an id, and of a code.
        limit: all ids are less.
        state: int64 (3,): bits that are written, buckets that have begun, the last tag; at first zeros.
        firsts: int64 (buckets + 1,) receives the first bit of each bucket that begins.
        words: uint64, zeros behind what is written; the last one stays 0.

    Returns:
        Whether entries are in order and fit. What was written has no meaning if not.
    """
    at, begun, last = state.tolist()
    for (tag, number, size), start in zip(columns.tolist(), starts.tolist(), strict=True):
        need = int(widths[0] + widths[1] + size * widths[2])
        if tag < last or size >> int(widths[0]) or number >= limit or at + need > 64 * (len(words) - 1):
            return False
        text = codes[data[start : start + size]].tolist()
        if -1 in text:
            return False
        last, bucket = tag, bucket_of(tag, len(firsts) - 1)
        firsts[begun : bucket + 1] = at
        begun = max(begun, bucket + 1)
        for value, bits in ((size, widths[0]), (number, widths[1]), *((code, widths[2]) for code in text)):
            shifted = value << (at % 64)
            words[at // 64] |= np.uint64(shifted % 2**64)
            words[at // 64 + 1] |= np.uint64(shifted >> 64)
            at += int(bits)
    state[:] = at, begun, last
    return True


def find_packed(
    firsts: np.ndarray,
    words: np.ndarray,
    codes: np.ndarray,
    widths: np.ndarray,
    hashes: np.ndarray,
    data: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    out: np.ndarray,
) -> None:
    """Find the ids of strings that `pack_entries` has packed, which compares all of their codes.

    Args:
        firsts: int64 (buckets + 1,), the first bit of each bucket, and the end of the last.
        words, codes, widths: as there.
        hashes, data, starts, stops: of the strings that are looked for.
        out: int64 receives the id, or -1.
    """
    stream = int.from_bytes(words.tobytes(), "little")

    def taken(at: int, bits: int) -> int:
        return stream >> at & (1 << bits) - 1

    size_bits, id_bits, code_bits = widths.tolist()
    for i in range(len(out)):
        wanted = codes[data[starts[i] : stops[i]]].tolist()
        bucket = bucket_of(int(hashes[i]) >> TAG_SHIFT, len(firsts) - 1)
        at, end = firsts[bucket : bucket + 2].tolist()
        out[i] = -1
        while at < end and out[i] == -1:
            size, text = taken(at, size_bits), at + size_bits + id_bits
            if wanted == [taken(text + k * code_bits, code_bits) for k in range(size)]:
                out[i] = taken(at + size_bits, id_bits)
            at = text + size * code_bits


def find_in_memory(
    table: np.ndarray,
    known: np.ndarray,
    bounds: np.ndarray,
    memory: np.ndarray,
    hashes: np.ndarray,
    data: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    out: np.ndarray,
) -> None:
    """Find the numbers of strings that are in memory.

    Args:
        table: int64 (a power of two,), open addressing: the number of a string + 1, or 0. The home of a hash is its
            remainder; who comes later lies behind.
        known: int64 (n,), hashes by number.
        bounds: int64 (n + 1,), string k is ``memory[bounds[k] : bounds[k + 1]]``.
        memory: uint8.
        hashes, data, starts, stops: of the strings that are looked for.
        out: int64 receives the number, or -1.
    """
    for i in range(len(out)):
        at = _place(table, known, bounds, memory, int(hashes[i]), data[starts[i] : stops[i]].tobytes())
        out[i] = int(table[at]) - 1


def insert_in_memory(
    table: np.ndarray,
    known: np.ndarray,
    bounds: np.ndarray,
    memory: np.ndarray,
    count: int,
    hashes: np.ndarray,
    data: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    out: np.ndarray,
) -> int:
    """Give the strings whose `out` is -1 a number: that which they have, or the next one, in order of occurrence.

    Args:
        count: strings that are there before. `known`, `bounds` and `memory` have room for the new ones.
        out: int64 (n,); numbers replace -1. All else as in `find_in_memory`.

    Returns:
        How many strings are there then.
    """
    for i in range(len(out)):
        if out[i] != -1:
            continue
        text = data[starts[i] : stops[i]].tobytes()
        at = _place(table, known, bounds, memory, int(hashes[i]), text)
        if table[at] == 0:
            bounds[count + 1] = bounds[count] + len(text)
            memory[bounds[count] : bounds[count + 1]] = np.frombuffer(text, np.uint8)
            known[count] = hashes[i]
            count += 1
            table[at] = count
        out[i] = table[at] - 1
    return count


def _place(
    table: np.ndarray, known: np.ndarray, bounds: np.ndarray, memory: np.ndarray, hashed: int, text: bytes
) -> int:
    at = hashed & (len(table) - 1)
    while (number := int(table[at]) - 1) >= 0:
        if known[number] == hashed and memory[bounds[number] : bounds[number + 1]].tobytes() == text:
            break
        at = (at + 1) & (len(table) - 1)
    return at


def index_in_memory(table: np.ndarray, known: np.ndarray, count: int) -> None:
    """Fill a table of zeros with the first `count` strings, all of which differ; see `find_in_memory`."""
    for number in range(count):
        at = int(known[number]) & (len(table) - 1)
        while table[at]:
            at = (at + 1) & (len(table) - 1)
        table[at] = number + 1


def copy_strings(data: np.ndarray, starts: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> None:
    """Copy strings end to end: string k from ``data[starts[k]:]`` to ``out[bounds[k] : bounds[k + 1]]``.

    Args:
        bounds: int64 (n + 1,).
    """
    for k in range(len(starts)):
        size = bounds[k + 1] - bounds[k]
        out[bounds[k] : bounds[k + 1]] = data[starts[k] : starts[k] + size]
