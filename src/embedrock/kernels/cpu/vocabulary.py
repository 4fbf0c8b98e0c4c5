"""Blocks of strings, and lookups of strings by hash: see ``tests/reference/vocabulary.py`` for the specification."""

import numpy as np

from embedrock.kernels.constants import ENTRY_WORDS
from embedrock.kernels.cpu.prefetch import prefetch
from embedrock.kernels.cpu.runtime import inlined, kernel

TAG_SHIFT = 31
MALFORMED = -2
AHEAD = 8


@kernel(reads=("sizes", "keys"))
def plan_blocks(sizes, keys, width, page_words, blocks):
    count, used, room, first = 0, 0, 0, 0
    while first < keys.shape[0]:
        last, need = first, 0
        while last < keys.shape[0] and keys[last] == keys[first]:
            need += 4 * width + sizes[last]
            last += 1
        if used == 0 or used + need > room:
            pages = (4 + need + 4 * page_words - 1) // (4 * page_words)
            blocks[count, 0], blocks[count, 1] = first, pages
            used, room = 4, 4 * page_words * pages
            count += 1
        used += need
        first = last
    return count


@kernel(over="rows", reads=("blocks", "columns", "starts", "data", "rows"), grain=32)
def write_blocks(blocks, columns, starts, data, rows, out, lo, hi):
    texts, width = out.view(np.uint8).reshape(-1), columns.shape[1]
    words, page_words = out.reshape(-1), out.shape[1]
    for b in range(lo, min(hi, rows.shape[0] - 1)):
        at, end = rows[b] * page_words, rows[b + 1] * page_words
        words[at] = blocks[b + 1] - blocks[b]
        at += 1
        used = np.uint32(0)
        for i in range(blocks[b], blocks[b + 1]):
            used += columns[i, width - 1]
            for k in range(width - 1):
                words[at + k] = columns[i, k]
            words[at + width - 1] = used
            at += width
        to = 4 * at
        for i in range(blocks[b], blocks[b + 1]):
            source = starts[i]
            for k in range(columns[i, width - 1]):
                texts[to] = data[source + k]
                to += 1
        while to < 4 * end:
            texts[to] = 0
            to += 1


@kernel(over="good", reads=("pages", "rows", "firsts"), grain=32)
def list_entries(pages, rows, firsts, columns, starts, good, lo, hi):
    words, page_words, width = pages.reshape(-1), pages.shape[1], columns.shape[1]
    for b in range(lo, hi):
        first, end, count = rows[b] * page_words, rows[b + 1] * page_words, firsts[b + 1] - firsts[b]
        good[b] = 0
        if np.int64(words[first]) != count or 1 + width * count > end - first:
            continue
        at, before, is_good = 4 * (first + 1 + width * count), np.int64(0), True
        for k in range(count):
            i, entry = firsts[b] + k, first + 1 + width * k
            stop = np.int64(words[entry + width - 1])
            is_good &= before <= stop <= 4 * end - at
            for j in range(width - 1):
                columns[i, j] = words[entry + j]
            columns[i, width - 1] = np.uint32((stop - before) & 0xFFFFFFFF)
            starts[i] = at + before
            before = stop
        good[b] = is_good


@inlined
def _same(a, at, b, start, size):
    k = 0
    while k < size and a[at + k] == b[start + k]:
        k += 1
    return k == size


@inlined
def _first_at_least(words, first, count, tag):
    # Index of the first of n entries from a word on whose tag is not less.
    lo, hi = 0, count
    while lo < hi:
        middle = (lo + hi) >> 1
        if np.int64(words[first + ENTRY_WORDS * middle]) < tag:
            lo = middle + 1
        else:
            hi = middle
    return lo


@kernel(over="out", reads=("pages", "rows", "ends", "hashes", "data", "starts", "stops"), grain=256)
def find_in_blocks(pages, rows, ends, hashes, data, starts, stops, out, lo, hi):
    words, texts, page_words = pages.reshape(-1), pages.view(np.uint8).reshape(-1), pages.shape[1]
    for i in range(lo, hi):
        first, end = rows[i] * page_words, ends[i] * page_words
        count, size, tag = np.int64(words[first]), stops[i] - starts[i], hashes[i] >> TAG_SHIFT
        out[i] = MALFORMED
        if 1 + ENTRY_WORDS * count > end - first:
            continue
        out[i] = -1
        first += 1
        at = 4 * (first + ENTRY_WORDS * count)
        k = _first_at_least(words, first, count, tag)
        while out[i] == -1 and k < count and np.int64(words[first + ENTRY_WORDS * k]) == tag:
            start = np.int64(words[first + ENTRY_WORDS * k - 1]) if k > 0 else np.int64(0)
            stop = np.int64(words[first + ENTRY_WORDS * k + 2])
            if start > stop or stop > 4 * end - at:
                out[i] = MALFORMED
            elif stop - start == size and _same(texts, at + start, data, starts[i], size):
                out[i] = np.int64(words[first + ENTRY_WORDS * k + 1])
            k += 1


@inlined
def _bucket(tag, buckets):
    return tag * buckets >> 32


@kernel(reads=("columns", "starts", "data", "codes", "widths"))
def pack_entries(columns, starts, data, codes, widths, limit, state, firsts, words):
    at, begun, last = state[0], state[1], state[2]
    size_bits, id_bits, code_bits = widths[0], widths[1], widths[2]
    buckets, room = firsts.shape[0] - 1, 64 * (words.shape[0] - 1)
    # Bits collect in a word of their own: with a store for each, each would wait for the one before.
    word, waiting = at >> 6, words[at >> 6]
    for i in range(columns.shape[0]):
        tag, number, size = np.int64(columns[i, 0]), np.int64(columns[i, 1]), np.int64(columns[i, 2])
        need = size_bits + id_bits + size * code_bits
        if tag < last or size >> size_bits != 0 or number >= limit or at + need > room:
            return False
        last, bucket = tag, _bucket(tag, buckets)
        while begun <= bucket:
            firsts[begun] = at
            begun += 1
        for k in range(-2, size):
            value, bits = np.int64(codes[data[starts[i] + k]]) if k >= 0 else number, code_bits if k >= 0 else id_bits
            if k == -2:
                value, bits = size, size_bits
            if value < 0:
                return False
            shift = at & 63
            waiting |= np.uint64(value) << np.uint64(shift)
            if shift + bits >= 64:
                words[word] = waiting
                word += 1
                waiting = np.uint64(value) >> np.uint64(64 - shift) if shift > 0 else np.uint64(0)
            at += bits
    words[word] = waiting
    state[0], state[1], state[2] = at, begun, last
    return True


@inlined
def _taken(words, at, bits):
    shift = at & 63
    found = words[at >> 6] >> np.uint64(shift)
    if shift + bits > 64:
        found |= words[(at >> 6) + 1] << np.uint64(64 - shift)
    return np.int64(found & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)))


@kernel(over="out", reads=("firsts", "words", "codes", "widths", "hashes", "data", "starts", "stops"), grain=256)
def find_packed(firsts, words, codes, widths, hashes, data, starts, stops, out, lo, hi):
    size_bits, id_bits, code_bits = widths[0], widths[1], widths[2]
    for i in range(lo, hi):
        bucket, size = _bucket(hashes[i] >> TAG_SHIFT, firsts.shape[0] - 1), stops[i] - starts[i]
        at, end = firsts[bucket], firsts[bucket + 1]
        out[i] = -1
        while at < end and out[i] == -1:
            found, text = _taken(words, at, size_bits), at + size_bits + id_bits
            if found == size:
                k = 0
                while k < size and _taken(words, text + k * code_bits, code_bits) == codes[data[starts[i] + k]]:
                    k += 1
                if k == size:
                    out[i] = _taken(words, at + size_bits, id_bits)
            at = text + found * code_bits


@inlined
def _place(table, known, bounds, memory, hashed, data, start, size):
    at = hashed & (table.shape[0] - 1)
    while table[at] != 0:
        number = table[at] - 1
        if (
            known[number] == hashed
            and bounds[number + 1] - bounds[number] == size
            and _same(memory, bounds[number], data, start, size)
        ):
            break
        at = (at + 1) & (table.shape[0] - 1)
    return at


@kernel(over="out", reads=("table", "known", "bounds", "memory", "hashes", "data", "starts", "stops"))
def find_in_memory(table, known, bounds, memory, hashes, data, starts, stops, out, lo, hi):
    for i in range(lo, hi):
        if i + AHEAD < hi:
            prefetch(table, hashes[i + AHEAD] & (table.shape[0] - 1), 8)
        at = _place(table, known, bounds, memory, hashes[i], data, starts[i], stops[i] - starts[i])
        out[i] = table[at] - 1


@kernel(reads=("hashes", "data", "starts", "stops"))
def insert_in_memory(table, known, bounds, memory, count, hashes, data, starts, stops, out):
    for i in range(out.shape[0]):
        if i + AHEAD < out.shape[0]:
            prefetch(table, hashes[i + AHEAD] & (table.shape[0] - 1), 8)
        if out[i] != -1:
            continue
        size = stops[i] - starts[i]
        at = _place(table, known, bounds, memory, hashes[i], data, starts[i], size)
        if table[at] == 0:
            for k in range(size):
                memory[bounds[count] + k] = data[starts[i] + k]
            bounds[count + 1] = bounds[count] + size
            known[count] = hashes[i]
            count += 1
            table[at] = count
        out[i] = table[at] - 1
    return count


@kernel(reads=("known",))
def index_in_memory(table, known, count):
    for number in range(count):
        at = known[number] & (table.shape[0] - 1)
        while table[at] != 0:
            at = (at + 1) & (table.shape[0] - 1)
        table[at] = number + 1


@kernel(over="starts", reads=("data", "starts", "bounds"))
def copy_strings(data, starts, bounds, out, lo, hi):
    for k in range(lo, hi):
        for j in range(bounds[k + 1] - bounds[k]):
            out[bounds[k] + j] = data[starts[k] + j]
