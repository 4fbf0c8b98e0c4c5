"""Blocks of strings, and strings found by their hash: see ``kernels/reference/vocabulary.py`` for what each does."""

import numpy as np

from embedrock.kernels.cpu.prefetch import prefetch
from embedrock.kernels.cpu.runtime import inlined, kernel

WIDTH = 3
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
    # Which of so many entries from a word on is the first whose tag is not less.
    lo, hi = 0, count
    while lo < hi:
        middle = (lo + hi) >> 1
        if np.int64(words[first + WIDTH * middle]) < tag:
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
        if 1 + WIDTH * count > end - first:
            continue
        out[i] = -1
        first += 1
        at = 4 * (first + WIDTH * count)
        k = _first_at_least(words, first, count, tag)
        while out[i] == -1 and k < count and np.int64(words[first + WIDTH * k]) == tag:
            start = np.int64(words[first + WIDTH * k - 1]) if k > 0 else np.int64(0)
            stop = np.int64(words[first + WIDTH * k + 2])
            if start > stop or stop > 4 * end - at:
                out[i] = MALFORMED
            elif stop - start == size and _same(texts, at + start, data, starts[i], size):
                out[i] = np.int64(words[first + WIDTH * k + 1])
            k += 1


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
