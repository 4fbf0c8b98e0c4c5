"""Base indexes against a dict, and what they take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunks import Chunk, base_of
from embedrock.store.base import Base

LOWEST, BEYOND = -(2**63), 2**63


def bitmap(ids: list[int], lo: int, hi: int) -> np.ndarray:
    words = np.zeros(-(-(hi - lo) // 64), np.uint64)
    for row in ids:
        words[(row - lo) // 64] |= np.uint64(1 << (row - lo) % 64)
    return words


def chunk_of(kind: str, ids: list[int], lo: int, hi: int, run: int) -> Chunk:
    if kind == "full":
        return Chunk(lo, hi, kind, run, hi - lo, None)
    index = bitmap(ids, lo, hi) if kind == "bits" else np.array(ids, np.int64)
    return Chunk(lo, hi, kind, run, len(ids), index)


@st.composite
def chunk_lists(draw: st.DrawFn) -> tuple[list[Chunk], list[list[int]]]:
    chunks, all_ids = [], []
    lo = draw(st.sampled_from([LOWEST, -70, 0, BEYOND - 4000]))
    for run in draw(st.permutations(range(draw(st.integers(0, 5))))):
        lo += draw(st.integers(0, 80))
        hi = min(lo + draw(st.integers(1, 1300)), BEYOND)
        if lo >= hi:
            break
        kind = draw(st.sampled_from(["full", "bits", "ids"]))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        chosen = rng.random(hi - lo) < draw(st.sampled_from([0.01, 0.2, 0.9, 1.0]))
        ids = [lo + k for k in range(hi - lo) if kind == "full" or chosen[k]]
        chunks.append(chunk_of(kind, ids, lo, hi, run))
        all_ids.append(ids)
        lo = hi
    return chunks, all_ids


@given(chunk_lists(), st.data())
def test_base(made: tuple[list[Chunk], list[list[int]]], data: st.DataObject):
    chunks, all_ids = made
    base = base_of(chunks)
    where = {
        row: (chunk.number << 40) + index
        for chunk, ids in zip(chunks, all_ids, strict=True)
        for index, row in enumerate(ids)
    }
    assert base.count == len(where)
    asked = [row for row in (*where, 0, 5, 10**9) for row in (row - 1, row, row + 1) if LOWEST <= row < BEYOND]
    asked += [LOWEST, BEYOND - 1]
    assert base.find(np.array(asked, np.int64)).tolist() == [where.get(row, -1) for row in asked]

    bounds = st.one_of(st.sampled_from([LOWEST, BEYOND]), st.sampled_from(asked), st.integers(-100, 2000))
    lo, hi = data.draw(bounds), data.draw(bounds)
    ids, locations = base.within(lo, hi)
    assert ids.tolist() == [row for row in where if lo <= row < hi]
    assert locations.tolist() == [where[row] for row in ids.tolist()]
    assert ids.dtype == locations.dtype == np.int64
    for number, (chunk, rows) in enumerate(zip(chunks, all_ids, strict=True)):
        assert base.ids_of(number).tolist() == rows
        start, stop = data.draw(st.integers(0, chunk.count)), data.draw(st.integers(0, chunk.count + 5))
        assert base.ids_of(number, start, stop).tolist() == rows[start:stop]

    again = Base(base.runs)  # what is kept of the indexes is as good as they were
    assert again.find(np.array(asked, np.int64)).tolist() == base.find(np.array(asked, np.int64)).tolist()


def test_nothing():
    base = Base([])
    assert base.find(np.array([0, LOWEST, BEYOND - 1])).tolist() == [-1, -1, -1]
    assert [part.tolist() for part in base.within(LOWEST, BEYOND)] == [[], []]
    assert (base.count, base.nbytes) == (0, 0)


def test_whole_range_of_ids():
    ends = np.array([LOWEST, 0, BEYOND - 1], np.int64)
    base = base_of([Chunk(LOWEST, BEYOND, "ids", 1, 3, ends)])
    assert base.find(ends).tolist() == [(1 << 40) + k for k in range(3)]
    assert base.find(ends + np.array([1, 1, -1])).tolist() == [-1, -1, -1]
    assert base.within(LOWEST, BEYOND)[0].tolist() == ends.tolist()


@pytest.mark.parametrize(("kind", "bits_a_row"), [("full", 0), ("bits", 1.0625), ("ids", 64)])
def test_size(kind: str, bits_a_row: float):
    rows = 1 << 16
    chunks = [chunk_of(kind, list(range(k * rows, (k + 1) * rows)), k * rows, (k + 1) * rows, k) for k in range(3)]
    assert base_of(chunks).nbytes <= 3 * rows * bits_a_row / 8 + 3 * 64


def test_it_keeps_copies():
    ids = np.arange(0, 20, 2)
    base = base_of([Chunk(0, 20, "ids", 0, 10, ids)])
    ids[:] = -1
    assert base.find(np.array([4])).tolist() == [2]


def test_many_ids_run_in_parts():
    words = np.full(1000, 0x5555555555555555, np.uint64)
    base, ids = base_of([Chunk(0, 64_000, "bits", 3, 32_000, words)]), np.arange(64_000)
    expected = np.where(ids % 2 == 0, (3 << 40) + ids // 2, -1)
    np.testing.assert_array_equal(base.find(ids), expected)


@pytest.mark.parametrize("share", [0.001, 0.5, 1.0])
def test_parts_of_a_large_bitmap(share: float):
    bits = np.random.default_rng(0).random(40_000) < share
    ids, words = np.flatnonzero(bits) - 500, np.packbits(bits, bitorder="little").view(np.uint64)
    base = base_of([Chunk(-500, 39_500, "bits", 3, len(ids), words)])
    for start in range(0, len(ids), max(1, len(ids) // 7)):
        np.testing.assert_array_equal(base.ids_of(0, start, start + 1000), ids[start : start + 1000])
        found, locations = base.within(int(ids[start]), 30_000)
        np.testing.assert_array_equal(found, ids[start:][ids[start:] < 30_000])
        np.testing.assert_array_equal(locations, (3 << 40) + start + np.arange(len(found)))
