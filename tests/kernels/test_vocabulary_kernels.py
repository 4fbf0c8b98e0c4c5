"""Kernels of blocks of strings against the reference, on poisoned memory, and on blocks that are none."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import reference
from embedrock.kernels import cpu
from embedrock.vocabulary import runs as vocabulary_runs
from suites.kernels import AsLaunched, Guarded, poison

CPU, REFERENCE = AsLaunched(cpu.vocabulary), reference.vocabulary
COUNT, PAGE_WORDS = 203, 31


def in_parts(kernel: Any, count: int, *arguments: Any) -> None:
    for lo, hi in itertools.pairwise([0, count // 5, count // 5 + 1, count // 2, count]):
        kernel(*arguments, lo, hi)


def some_strings(rng: np.random.Generator, count: int = COUNT) -> tuple[np.ndarray, ...]:
    """Return hashes that ascend, some of them equal, and strings of few bytes, which differ."""
    hashes = np.sort(rng.choice([*rng.integers(0, 2**63 - 1, count), 0, 2**31, 2**31 + 1, 2**63 - 2], count))
    sizes = rng.choice([1, 2, 3, 7, 20, 150], count)
    data = rng.integers(0, 256, int(sizes.sum()), np.uint8)
    starts = np.cumsum(sizes) - sizes
    data[starts] = np.arange(count)  # so no two are equal
    return hashes, data, starts, starts + sizes


def planned(hashes: np.ndarray, sizes: np.ndarray, width: int) -> np.ndarray:
    expected, got = np.full((COUNT, 2), -1), Guarded((COUNT, 2), np.int64)
    count = REFERENCE.plan_blocks(sizes, hashes, width, PAGE_WORDS, expected)
    assert CPU.plan_blocks(sizes, hashes, width, PAGE_WORDS, got.inside) == count
    np.testing.assert_array_equal(got.inside[:count], expected[:count])
    got.check()
    return expected[:count]


def blocks_of(seed: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Return pages, the first one of each block, the first entry of each, and what was written."""
    rng = np.random.default_rng(seed)
    strings = hashes, data, starts, stops = some_strings(rng)
    plan = planned(hashes, stops - starts, width)
    rows, firsts = np.concatenate([[0], np.cumsum(plan[:, 1])]), np.append(plan[:, 0], COUNT)
    columns = np.stack([hashes >> REFERENCE.TAG_SHIFT, rng.permutation(COUNT), stops - starts], 1).astype(np.uint32)
    columns = np.ascontiguousarray(columns[:, 3 - width :])
    expected, got = poison((int(rows[-1]), PAGE_WORDS), np.uint32), Guarded((int(rows[-1]), PAGE_WORDS), np.uint32)
    REFERENCE.write_blocks(firsts, columns, starts, data, rows, expected)
    in_parts(CPU.write_blocks, len(rows), firsts, columns, starts, data, rows, got.inside)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
    return expected, rows, firsts, (*strings, columns)


def test_constants_are_the_same():
    for name in ("TAG_SHIFT", "MALFORMED"):
        assert getattr(CPU, name) == getattr(REFERENCE, name)
    assert vocabulary_runs.TAG_SHIFT == REFERENCE.TAG_SHIFT


@pytest.mark.parametrize("width", [1, 3])
def test_blocks_keep_what_was_written(width: int):
    pages, rows, firsts, (_, data, starts, stops, columns) = blocks_of(width, width)
    results = []
    for kernel in (REFERENCE.list_entries, CPU.list_entries):
        words, at, good = (
            Guarded((COUNT, width), np.uint32),
            Guarded((COUNT,), np.int64),
            Guarded((len(rows) - 1,), "u1"),
        )
        args = pages, rows, firsts, words.inside, at.inside, good.inside
        kernel(*args) if kernel is REFERENCE.list_entries else in_parts(kernel, len(rows) - 1, *args)
        for one in (words, at, good):
            one.check()
        results.append((words.inside, at.inside, good.inside))
    for expected, got in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)
    (words, at, good), texts = results[0], pages.view(np.uint8).reshape(-1)
    assert good.all()
    assert np.array_equal(words, columns)
    for k in range(COUNT):
        assert np.array_equal(texts[at[k] : at[k] + columns[k, -1]], data[starts[k] : stops[k]])


def found(pages: np.ndarray, rows: np.ndarray, at: np.ndarray, wanted: tuple[np.ndarray, ...]) -> np.ndarray:
    expected, got = np.empty(len(at), np.int64), Guarded((len(at),), np.int64)
    REFERENCE.find_in_blocks(pages, rows[at], rows[at + 1], *wanted, expected)
    in_parts(CPU.find_in_blocks, len(at), pages, rows[at], rows[at + 1], *wanted, got.inside)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
    return expected


def test_strings_are_found_in_blocks():
    pages, rows, firsts, (hashes, data, starts, stops, columns) = blocks_of(7, 3)
    at = np.repeat(np.arange(len(rows) - 1), np.diff(firsts))
    assert np.array_equal(found(pages, rows, at, (hashes, data, starts, stops)), columns[:, 1])
    assert (found(pages, rows, at, (hashes ^ 1 << 40, data, starts, stops)) == -1).all()
    assert (found(pages, rows, at, (hashes, data ^ np.uint8(255), starts, stops)) == -1).all()


@pytest.mark.parametrize("seed", range(5))
def test_no_block_leads_outside_of_itself(seed: int):
    rng = np.random.default_rng(seed)
    pages, rows, firsts, (hashes, data, starts, stops, _) = blocks_of(7, 3)
    at = np.repeat(np.arange(len(rows) - 1), np.diff(firsts))
    for _ in range(20):
        page, word = rng.integers(0, len(pages)), rng.integers(0, PAGE_WORDS)
        forged = pages.copy()
        forged[page, word] = rng.choice([0, 1, 31, 2**31, 2**32 - 1, rng.integers(0, 2**32)])
        found(forged, rows, at, (hashes, data, starts, stops))
        flags = []
        for kernel in (REFERENCE.list_entries, CPU.list_entries):
            words, where = np.zeros((COUNT, 3), np.uint32), np.zeros(COUNT, np.int64)
            flags.append(np.zeros(len(rows) - 1, np.uint8))
            args = forged, rows, firsts, words, where, flags[-1]
            kernel(*args) if kernel is REFERENCE.list_entries else kernel(*args, 0, len(rows) - 1)
            there = np.repeat(flags[-1], np.diff(firsts)) == 1
            assert (where[there] + words[there, 2] <= forged.nbytes).all()
        np.testing.assert_array_equal(*flags)


def packing(data: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of bytes, and the bits of sizes, ids and codes."""
    seen = np.isin(np.arange(256), data)
    bits = [max(1, int(most).bit_length()) for most in (longest, COUNT - 1, seen.sum() - 1)]
    return np.where(seen, np.cumsum(seen) - 1, -1).astype(np.int16), np.array(bits)


@pytest.mark.parametrize("symbols", [256, 10, 1])
def test_packed_strings_are_found(symbols: int):
    rng = np.random.default_rng(symbols)
    hashes, data, starts, stops = some_strings(rng)
    data = (data.astype(np.int64) % symbols).astype(np.uint8)
    columns = np.stack([hashes >> REFERENCE.TAG_SHIFT, rng.permutation(COUNT), stops - starts], 1).astype(np.uint32)
    codes, widths = packing(data, 150)
    need = int(columns[:, 2].sum() * widths[2] + COUNT * widths[:2].sum())
    results = []
    for kernels in (REFERENCE, CPU):
        firsts, words = Guarded((18,), np.int64), Guarded((need // 64 + 2,), np.uint64)
        state = np.zeros(3, np.int64)
        firsts.inside[:], words.inside[:] = 0, 0
        for part in (slice(0, 77), slice(77, 77), slice(77, COUNT)):
            args = columns[part], starts[part], data, codes, widths, COUNT, state, firsts.inside, words.inside
            assert kernels.pack_entries(*args)
        firsts.check()
        words.check()
        firsts.inside[state[1] :] = state[0]
        results.append((state, firsts.inside, words.inside))
    for expected, got in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)
    state, firsts, words = results[0]
    assert state[0] == need
    for wanted in (
        (hashes, data),
        (hashes ^ 1 << 60, data),
        (hashes, np.where(data == data[0], 255, data).astype("u1")),
    ):
        expected, got = np.empty(COUNT, np.int64), Guarded((COUNT,), np.int64)
        args = firsts, words, codes, widths, *wanted, starts, stops
        REFERENCE.find_packed(*args, expected)
        in_parts(CPU.find_packed, COUNT, *args, got.inside)
        np.testing.assert_array_equal(got.inside, expected)
        got.check()
        if wanted[0] is hashes and wanted[1] is data and symbols == 256:
            np.testing.assert_array_equal(expected, columns[:, 1])


@pytest.mark.parametrize("change", ["order", "size", "id", "byte", "room"])
def test_what_does_not_fit_is_not_packed(change: str):
    hashes, data, starts, stops = some_strings(np.random.default_rng(2))
    columns = np.stack([hashes >> REFERENCE.TAG_SHIFT, np.arange(COUNT), stops - starts], 1).astype(np.uint32)
    codes, widths = packing(data, 150)
    room = int(columns[:, 2].sum() * widths[2] + COUNT * widths[:2].sum()) // 64 + 2
    if change == "order":
        columns[7, 0] = columns[:7, 0].max() - 1
    elif change == "size":
        widths[0] -= 1
    elif change == "id":
        columns[7, 1] = COUNT
    elif change == "byte":
        codes[data[-1]] = -1
    else:
        room -= 1
    for kernels in (REFERENCE, CPU):
        firsts, words = np.zeros(18, np.int64), np.zeros(room, np.uint64)
        args = columns, starts, data, codes, widths, COUNT, np.zeros(3, np.int64), firsts, words
        assert not kernels.pack_entries(*args)


def test_strings_in_memory():
    rng = np.random.default_rng(3)
    strings = hashes, data, starts, stops = some_strings(rng)
    twice = np.concatenate([rng.permutation(COUNT), rng.permutation(COUNT)])
    wanted = hashes[twice], data, starts[twice], stops[twice]
    results = []
    for kernels in (REFERENCE, CPU):
        table, known, bounds = np.zeros(512, np.int64), np.empty(COUNT, np.int64), np.zeros(COUNT + 1, np.int64)
        memory, out = Guarded((len(data),), np.uint8), np.full(2 * COUNT, -1)
        out[5] = 77  # is known from elsewhere
        count = kernels.insert_in_memory(table, known, bounds, memory.inside, 0, *wanted, out)
        memory.check()
        again, lookup = np.zeros(1024, np.int64), np.empty(COUNT, np.int64)
        kernels.index_in_memory(again, known, count)
        args = again, known, bounds, memory.inside, *strings, lookup
        kernels.find_in_memory(*args) if kernels is REFERENCE else in_parts(kernels.find_in_memory, COUNT, *args)
        results.append((np.array(count), out, table, known[:count], bounds[: count + 1], memory.inside, lookup))
    for expected, got in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert results[0][0] == COUNT
    numbers = dict(zip(twice.tolist(), results[0][1].tolist(), strict=True))
    assert [numbers[k] for k in range(COUNT)] == results[0][-1].tolist()


def test_copies_of_strings():
    _, data, starts, stops = some_strings(np.random.default_rng(4))
    order = np.random.default_rng(5).permutation(COUNT)
    bounds = np.concatenate([[0], np.cumsum((stops - starts)[order])])
    expected, got = np.empty(bounds[-1], np.uint8), Guarded((int(bounds[-1]),), np.uint8)
    REFERENCE.copy_strings(data, starts[order], bounds, expected)
    in_parts(CPU.copy_strings, COUNT, data, starts[order], bounds, got.inside)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
