"""Extents of files: where rows lie, which reads cover them, and how their bytes get to rows in RAM."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from embedrock.kernels import cpu
from embedrock.system import platform
from slow import examples
from suites.kernels import AsLaunched, Guarded, poison

extents = AsLaunched(cpu.extents)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@settings(max_examples=examples(100))
@given(rows=SIZES, shared=st.integers(1, 5), nbytes=st.sampled_from([1, 2, 31, 320, 4099]), seed=st.integers(0, 9))
def test_place(rows: list[int], shared: int, nbytes: int, seed: int):
    draw, firsts = np.random.default_rng(seed), np.cumsum([0, *rows])
    starts, rows_each = draw.integers(0, 2**40, len(rows)), draw.integers(1, shared + 1, len(rows))
    ids = np.concatenate([draw.integers(0, firsts[-1], 50), firsts[:-1], firsts[1:] - 1])  # ends of shards
    expected, got = np.empty((2, len(ids)), np.int64), [Guarded((len(ids),), np.int64) for _ in range(2)]
    reference.extents.place(ids, firsts, starts, rows_each, nbytes, *expected)
    for lo, hi in ((0, 20), (20, len(ids))):
        extents.place(ids, firsts, starts, rows_each, nbytes, *(each.inside for each in got), lo, hi)
    for each, values in zip(got, expected, strict=True):
        np.testing.assert_array_equal(each.inside, values)
        each.check()


def test_place_by_hand():
    ids, firsts = np.array([0, 2, 3, 9]), np.array([0, 3, 10])
    numbers, offsets = np.empty((2, 4), np.int64)
    extents.place(ids, firsts, np.array([100, 8]), np.array([1, 4]), 16, numbers, offsets, 0, 4)
    assert numbers.tolist() == [0, 0, 1, 1]
    assert offsets.tolist() == [100, 132, 8, 24]  # rows 3 to 6 share 16 bytes, as do rows 7 to 9


LIMITS = st.tuples(
    st.sampled_from([1, 512, 4096]),
    st.sampled_from([0, 600, 1 << 14]),
    st.sampled_from([1, 8192, 1 << 18]),
    st.integers(0, 40_000),
)
PLACES = st.lists(st.tuples(st.integers(3, 5), st.integers(0, 60_000)), min_size=1, max_size=40)


@settings(max_examples=examples(300))
@given(places=PLACES, nbytes=st.sampled_from([1, 64, 320, 512, 5000]), limits=LIMITS, is_sorted=st.booleans())
def test_cover(places: list[tuple[int, int]], nbytes: int, limits: tuple[int, int, int, int], is_sorted: bool):
    files, offsets = np.array(sorted(places) if is_sorted else places).T.copy()
    block, _, longest, room = limits
    expected, starts = np.zeros((4, len(files)), np.int64), np.zeros(len(files), np.int64)
    requests, found = poison((4, len(files) + 3), np.int64), Guarded((len(files),), np.int64)
    count, made = cpu.extents.cover(files, offsets, nbytes, limits, requests, found.inside)
    assert (count, made) == reference.extents.cover(files, offsets, nbytes, limits, expected, starts)
    np.testing.assert_array_equal(requests[:, :made], expected[:, :made])
    np.testing.assert_array_equal(found.inside[:count], starts[:count])
    assert (requests[:, made:] == -1).all()
    found.check()
    # What it promises: whole blocks, one behind another in memory, each extent in the request of its file.
    file, begin, size, at = requests[:, :made]
    assert count >= 1
    assert not (begin % block).any()
    assert not (size % block).any()
    np.testing.assert_array_equal(at, np.cumsum(size) - size)
    assert made == 1 or size.sum() <= max(room, size[0])
    for i in range(count):
        owner = np.flatnonzero((at <= starts[i]) & (starts[i] + nbytes <= at + size))
        assert len(owner) == 1
        assert file[owner[0]] == files[i]
        assert starts[i] - at[owner[0]] == offsets[i] - begin[owner[0]]
    assert (size <= np.maximum(longest, -(-(nbytes + block - 1) // block) * block)).all()


def test_cover_by_hand():
    files, offsets = np.array([7, 7, 7, 8]), np.array([100, 500, 5000, 512])
    requests, starts = np.zeros((4, 4), np.int64), np.zeros(4, np.int64)
    assert cpu.extents.cover(files, offsets, 64, (512, 0, 1 << 18, 1 << 20), requests, starts) == (4, 3)
    assert requests[:, :3].T.tolist() == [[7, 0, 1024, 0], [7, 4608, 512, 1024], [8, 512, 512, 1536]]
    assert starts.tolist() == [100, 500, 1024 + 392, 1536]
    assert cpu.extents.cover(files, offsets, 64, (512, 0, 1 << 18, 1024), requests, starts) == (2, 1)


@settings(max_examples=examples(60))
@given(
    count=st.integers(0, 70), nbytes=st.sampled_from([1, 3, 64, 1000]), column=st.integers(0, 9), seed=st.integers(0, 9)
)
def test_copy(count: int, nbytes: int, column: int, seed: int):
    draw = np.random.default_rng(seed)
    source = draw.integers(0, 256, 20_000).astype(np.uint8)
    addresses = source.ctypes.data + draw.integers(0, len(source) - nbytes + 1, count)  # not aligned
    slots = draw.permutation(80)[:count]
    expected, got = poison((80, nbytes + 12), np.uint8), Guarded((80, nbytes + 12), np.uint8)
    reference.extents.copy(addresses, nbytes, expected, slots, column)
    for lo, hi in ((0, count // 3), (count // 3, count)):
        extents.copy(addresses, nbytes, got.inside, slots, column, lo, hi)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()


@pytest.mark.skipif(not platform.CAN_ASK, reason="this system cannot be asked for pages")
def test_ask_changes_nothing(tmp_path: Path):
    (tmp_path / "rows").write_bytes(bytes(100_000))
    fd = os.open(tmp_path / "rows", os.O_RDONLY)
    args = np.array([fd, fd, 10_000]), np.array([0, 90_000, 0]), np.array([4096, 1 << 20, 1])  # beyond the end; no file
    before = [each.copy() for each in args]
    cpu.extents.ask(*args)
    for each, same in zip(args, before, strict=True):
        np.testing.assert_array_equal(each, same)
    assert os.pread(fd, 3, 99_997) == bytes(3)
    os.close(fd)
