"""Kernels of stored records: the CPU's against the reference on poisoned memory, and the reference against zlib."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit

import reference
from embedrock import kernels
from embedrock.kernels.cpu import crc
from suites.kernels import AsLaunched, Guarded, poison

CPU, REFERENCE = AsLaunched(kernels.cpu.storage), reference.storage
EDGES = [0, -1, 1, 2**63 - 1, -(2**63), 2**31, 2**32, -(2**32)]
SALT = np.uint64(0xF1E2D3C4B5A69788)
SIZES = (4, 8, 12, 16, 20, 48, 260, 768)


def in_parts(function: Any, count: int, *args: Any) -> None:
    bounds = [int(count * split) for split in (0.0, 0.31, 0.77, 1.0)]
    for lo, hi in itertools.pairwise(bounds):
        function(*args, lo, hi)


def some_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.concatenate([EDGES, rng.integers(-(2**63), 2**63 - 1, count)])[:count].astype(np.int64)


def sealed_records(size: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    records, ids = rng.integers(0, 256, (count, size), np.uint8), some_ids(rng, count)
    out = poison((count, size + 4), np.uint8)
    REFERENCE.seal(records, np.arange(count), ids, out)
    return records, ids, out


def test_constants_are_the_same():
    names = "RUN_SHIFT", "BLOCK", "MARK_STEP", "FULL", "BITS", "LISTED"
    assert [getattr(CPU, name) for name in names] == [getattr(REFERENCE, name) for name in names]


@pytest.mark.parametrize("size", SIZES)
def test_seal(size: int):
    rng = np.random.default_rng(size)
    records, ids = rng.integers(0, 256, (50, size), np.uint8), some_ids(rng, 37)
    slots = rng.integers(0, 50, 37)
    expected, got = poison((37, size + 4), np.uint8), Guarded((37, size + 4), np.uint8)
    REFERENCE.seal(records, slots, ids, expected)
    in_parts(CPU.seal, 37, records, slots, ids, got.inside)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
    crc = zlib.crc32(ids[0].astype("<i8").tobytes() + records[slots[0]].tobytes())
    assert expected[0].tobytes() == records[slots[0]].tobytes() + crc.to_bytes(4, "little")


@pytest.mark.parametrize("size", SIZES)
def test_unseal(size: int):
    rng = np.random.default_rng(size)
    records, ids, sealed = sealed_records(size, 33)
    starts = np.cumsum(rng.integers(0, 3, 33) * 4 + size + 4) - size - 4
    buffer = poison((int(starts[-1]) + size + 4,), np.uint8)
    for start, stored in zip(starts, sealed, strict=True):
        buffer[start : start + size + 4] = stored
    order, slots = rng.permutation(33), rng.permutation(40)[:33]
    where, good = Guarded((40, size), np.uint8), Guarded((33,), np.uint8)
    marks = rng.integers(0, 2**32, 33, np.uint32)
    seals = (starts + size)[order][:, None] + np.arange(4)
    buffer[seals] ^= marks.view(np.uint8).reshape(33, 4)
    args = buffer, starts[order], ids[order], marks, where.inside, slots, good.inside
    in_parts(CPU.unseal, 33, *args)
    assert good.inside.tolist() == [1] * 33
    np.testing.assert_array_equal(where.inside[slots], records[order])
    assert (np.delete(where.inside, slots, axis=0) == 0xFF).all()
    where.check()
    good.check()
    expected = poison((33,), np.uint8)
    REFERENCE.unseal(*args[:4], poison((40, size), np.uint8), slots, expected)
    assert expected.tolist() == [1] * 33


@pytest.mark.parametrize("size", [4, 20])
def test_unseal_sees_every_flipped_bit_a_wrong_id_and_a_wrong_mark(size: int):
    _, ids, sealed = sealed_records(size, 1)
    bits = (size + 4) * 8
    buffer = np.repeat(sealed, bits + 64 + 32, axis=0)
    for bit in range(bits):
        buffer[bit, bit // 8] ^= 1 << bit % 8
    count = len(buffer)
    named, marks = np.repeat(ids, count), np.zeros(count, np.uint32)
    named[bits:-32] ^= np.left_shift(np.int64(1), np.arange(64))
    marks[-32:] = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
    args = buffer.reshape(-1), np.arange(count) * (size + 4), named, marks
    for function, bounds in ((REFERENCE.unseal, ()), (CPU.unseal, (0, count))):
        good = np.ones(count, np.uint8)
        function(*args, np.empty((1, size), np.uint8), np.zeros(count, np.int64), good, *bounds)
        assert not good.any()


@pytest.mark.parametrize("first", [0, 1, 2**32 - 3, 2**40 - 50])
@pytest.mark.parametrize("salt", [0, 1, 2**31, 2**32 - 1])
def test_stamp(salt: int, first: int):
    got, (_, _, expected) = Guarded((40, 24), np.uint8), sealed_records(20, 40)
    got.inside[:], plain = expected, expected.copy()
    REFERENCE.stamp(expected, salt, first)
    in_parts(CPU.stamp, 40, got.inside, salt, first)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
    np.testing.assert_array_equal(expected[:, :-4], plain[:, :-4])
    marks = np.bitwise_xor(expected[:, -4:], plain[:, -4:]).copy().view("<u4")[:, 0]
    assert marks.tolist() == [(salt + 0x9E3779B1 * place) % 2**32 for place in range(first, first + 40)]
    numbers, salts = np.array([5]), np.array([salt], np.uint32)
    for function in (REFERENCE.mark, CPU.mark):
        again = poison((40,), np.uint32)
        steps = np.array([REFERENCE.MARK_STEP], np.uint32)
        function((5 << 40) + np.arange(first, first + 40), numbers, salts, steps, again)
        np.testing.assert_array_equal(again, marks)


def test_mark():
    rng = np.random.default_rng(0)
    numbers = np.array([0, 3, 4, 2**23 - 1])
    salts, steps = rng.integers(0, 2**32, 4, np.uint32), np.array([REFERENCE.MARK_STEP, 0, 1, 2**32 - 1], np.uint32)
    salts[1] = 0  # a run of format 1: no marks
    locations = np.sort(rng.choice(numbers, 90) << 40 | rng.integers(0, 2**40, 90))
    expected, got = poison((90,), np.uint32), Guarded((90,), np.uint32)
    REFERENCE.mark(locations, numbers, salts, steps, expected)
    CPU.mark(locations, numbers, salts, steps, got.inside)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
    assert not expected[locations >> 40 == 3].any()
    for number, mark in zip((locations >> 40).tolist(), expected.tolist(), strict=True):
        assert number == 3 or mark


def test_nothing_is_not_a_record():
    # What lies behind the end of a file reads as zeros.
    for size, row in itertools.product((4, 16, 768), (0, -1, 5)):
        good = np.ones(1, np.uint8)
        place = np.zeros(1, np.int64)
        args = np.zeros(size + 4, np.uint8), place, np.array([row]), np.zeros(1, np.uint32)
        CPU.unseal(*args, np.empty((1, size), np.uint8), place, good, 0, 1)
        assert not good.any()


# ---------------------------------------------------------------- CRC

LENGTHS = (*range(131), 191, 192, 193, 1000, 1023, 1024, 4097, 20_001)  # in words
needs_products = pytest.mark.skipif(not crc.has_products(), reason="the processor does not multiply without carries")


def compiled(copy: Any) -> Any:
    """Return what calls a copy as kernels do, with the words of an id."""

    @njit(error_model="numpy")
    def call(source: Any, target: Any, names: Any) -> Any:
        return copy(source, target, names[0], names[1])

    return call


@pytest.mark.parametrize(
    "copy", [crc.copy_by_tables, pytest.param(crc.copy_by_products, marks=needs_products)], ids=["tables", "products"]
)
def test_crc(copy: Any):
    call, rng = compiled(copy), np.random.default_rng(0)
    for count, fill in itertools.product(LENGTHS, ("random", "zeros", "ones")):
        row = rng.choice(np.array([*EDGES, *rng.integers(-(2**63), 0, 8)], np.int64), 1)
        words = rng.integers(0, 2**32, count, np.uint32)
        words[:] = {"random": words, "zeros": 0, "ones": 0xFFFFFFFF}[fill]
        source, target = Guarded((count,), np.uint32), Guarded((count,), np.uint32)  # behind them lies poison
        source.inside[:] = words
        assert int(call(source.inside, target.inside, row.view(np.uint32))) == zlib.crc32(
            row.astype("<i8").tobytes() + words.tobytes()
        )
        np.testing.assert_array_equal(target.inside, words)
        np.testing.assert_array_equal(source.inside, words)
        target.check()


@pytest.mark.parametrize(
    "copy", [crc.copy_by_tables, pytest.param(crc.copy_by_products, marks=needs_products)], ids=["tables", "products"]
)
def test_crc_at_any_address(copy: Any):
    # A lane has 16 bytes, and records are aligned to 4: a load that wants more would end the process.
    call, words = compiled(copy), np.random.default_rng(1).integers(0, 2**32, 100, np.uint32)
    row = np.array([-1], np.int64)
    for first, to in itertools.product(range(5), range(5)):
        target = poison((100,), np.uint32)
        count = 95 - max(first, to)
        found = int(call(words[first : first + count], target[to : to + count], row.view(np.uint32)))
        assert found == zlib.crc32(row.tobytes() + words[first : first + count].tobytes())
        np.testing.assert_array_equal(target[to : to + count], words[first : first + count])
        assert (np.delete(target, np.s_[to : to + count]) == 0xFFFFFFFF).all()


def test_a_processor_without_products_seals_the_same_bytes(tmp_path: Path):
    _, ids, expected = sealed_records(260, 9)
    program = """
import sys, numpy as np
from embedrock.kernels.cpu import crc, storage
assert not crc.has_products() and crc.copy is crc.copy_by_tables
sealed = np.frombuffer(sys.stdin.buffer.read(), np.uint8).reshape(9, 264 + 8)
records, ids = sealed[:, :260].copy(), sealed[:, 264:].copy().view(np.int64).reshape(-1)
out = np.full((9, 264), 255, np.uint8)
storage.seal(records, np.arange(9), ids, out, 0, 9)
sys.stdout.buffer.write(out.tobytes())
"""
    given = np.concatenate([expected, ids.view(np.uint8).reshape(9, 8)], axis=1).tobytes()
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    environment.pop("NUMBA_CPU_FEATURES", None)
    done = subprocess.run(
        [sys.executable, "-c", program], input=given, stdout=subprocess.PIPE, check=True, timeout=300, env=environment
    )
    assert done.stdout == expected.tobytes()


# ---------------------------------------------------------------- where records are


def test_unmix():
    for row in some_ids(np.random.default_rng(0), 100).tolist():
        key = reference.directory.mix(row)
        assert REFERENCE.unmix(key) == int(CPU.unmix(np.uint64(key))) == row % 2**64


class Pair:
    """An overlay's entries, kept by the reference and by the kernels under test."""

    def __init__(self, total: int) -> None:
        self.expected, self.got = np.zeros((total, 2), np.uint64), Guarded((total, 2), np.uint64)
        self.got.inside[:] = 0
        self.count = 0
        self.homes = 0
        self.rebuild(total)

    def rebuild(self, total: int) -> None:
        self.homes = REFERENCE.rebuild_overlay(self.expected, total, self.count)
        assert CPU.rebuild_overlay(self.got.inside, total, self.count) == self.homes
        self.compare(total)

    def remove(self, ids: np.ndarray, locations: np.ndarray) -> int:
        args = self.homes, SALT, ids, locations
        removed = REFERENCE.remove_overlay(self.expected, *args)
        assert CPU.remove_overlay(self.got.inside, *args) == removed
        self.count -= removed
        self.compare(len(self.expected))
        return removed

    def insert(self, ids: np.ndarray, locations: np.ndarray, most: int) -> int:
        args = self.homes, SALT, self.count, most, ids, locations, 0
        done, self.count = REFERENCE.insert_overlay(self.expected, *args)
        assert CPU.insert_overlay(self.got.inside, *args) == (done, self.count)
        self.compare(len(self.expected))
        return done

    def compare(self, total: int) -> None:
        # The key of an empty entry is left over from anything.
        for k in range(total):
            assert self.got.inside[k, 1] == self.expected[k, 1]
            assert self.got.inside[k, 1] == 0 or self.got.inside[k, 0] == self.expected[k, 0]
        assert self.got.inside[total - 1, 1] == 0
        self.got.check()


def hash_of(row: int) -> int:
    return reference.directory.mix((row ^ int(SALT)) % 2**64)


def hashed_to(keys: range) -> np.ndarray:
    """The ids of these hashes."""
    return (np.array([REFERENCE.unmix(key) for key in keys], np.uint64) ^ SALT).view(np.int64)


@pytest.mark.parametrize("kind", ["random", "sequential", "highest hashes", "lowest hashes"])
def test_overlay(kind: str):
    rng, total = np.random.default_rng(1), 96
    ids = {
        "random": some_ids(rng, 90),
        "sequential": np.arange(90),
        "highest hashes": hashed_to(range(2**64 - 1, 2**64 - 91, -1)),
        "lowest hashes": hashed_to(range(90)),
    }[kind]
    locations = rng.integers(0, 8, 90) << 40 | rng.integers(0, 2**40, 90)
    locations[0] = (2**23 - 1 << 40) + 2**40 - 2
    pair, done = Pair(total), 0
    while (done := done + pair.insert(ids[done:], locations[done:], 81)) < 81:
        pair.rebuild(total)
    assert done == pair.count == 81
    assert pair.insert(ids[81:], locations[81:], 81) == 0
    locations[:20] = 7 << 40
    assert pair.insert(ids[:20], locations[:20], 81) == 20
    asked = np.append(ids, [123, -456])
    expected, got = np.empty(92, np.int64), Guarded((92,), np.int64)
    REFERENCE.find_overlay(pair.expected, pair.homes, SALT, asked, expected)
    in_parts(CPU.find_overlay, 92, pair.got.inside, pair.homes, SALT, asked, got.inside)
    assert got.inside.tolist() == expected.tolist() == [*locations[:81].tolist(), *([-1] * 11)]
    got.check()
    for row in asked[:81:7].tolist():
        behind = REFERENCE.behind_overlay(pair.expected, pair.homes, SALT, row)
        assert CPU.behind_overlay(pair.got.inside, pair.homes, SALT, row) == behind
        hashes = [hash_of(each) for each in ids[:81].tolist()]
        assert np.count_nonzero(pair.expected[behind:, 1]) == sum(key > hash_of(row) for key in hashes)
    gone = locations[:81] >> 40 < 6
    wrong = ids[:81][~gone]
    assert pair.remove(np.append(wrong, [123, -456]), np.zeros(len(wrong) + 2, np.int64)) == 0
    assert pair.remove(ids[:81][gone], locations[:81][gone]) == np.count_nonzero(gone)
    in_parts(CPU.find_overlay, 92, pair.got.inside, pair.homes, SALT, asked, got.inside)
    assert got.inside.tolist() == [*np.where(gone, -1, locations[:81]).tolist(), *([-1] * 11)]
    pair.rebuild(48)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_list_overlay(size: int):
    pair, ids = Pair(64), some_ids(np.random.default_rng(0), 40)
    assert pair.insert(ids, np.arange(40), 50) == 40
    position, found = 0, {}
    while position < 64:
        expected, got = [poison((size,), np.int64) for _ in "ab"], [Guarded((size,), np.int64) for _ in "ab"]
        answer = REFERENCE.list_overlay(pair.expected, SALT, position, *expected)
        assert CPU.list_overlay(pair.got.inside, SALT, position, *(part.inside for part in got)) == answer
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_array_equal(a, b.inside)
            b.check()
        position, count = answer
        found.update(zip(expected[0][:count].tolist(), expected[1][:count].tolist(), strict=True))
    assert found == dict(zip(ids.tolist(), range(40), strict=True))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.97, 1.0])
def test_bits(share: float):
    rng = np.random.default_rng(3)
    bits = rng.random((5, 512)) < share
    blocks = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
    expected, got = poison((5,), np.uint32), Guarded((5,), np.uint32)
    count = REFERENCE.rank_blocks(blocks, expected)
    assert CPU.rank_blocks(blocks, got.inside) == count == bits.sum()
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
    for before, length in ((0, count), (count // 3, count // 2), (count, 0)):
        names, names_got = poison((length,), np.int64), Guarded((length,), np.int64)
        REFERENCE.list_bits(blocks.reshape(-1), before, -1000, names)
        CPU.list_bits(blocks.reshape(-1), before, -1000, names_got.inside)
        np.testing.assert_array_equal(names_got.inside, names)
        np.testing.assert_array_equal(names, np.flatnonzero(bits)[before : before + length] - 1000)
        names_got.check()


def test_find_base():
    rng = np.random.default_rng(5)
    bits = rng.random((3, 512)) < 0.3
    blocks = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
    ranks = np.empty(3, np.uint32)
    REFERENCE.rank_blocks(blocks[:1], ranks[:1])
    REFERENCE.rank_blocks(blocks[1:], ranks[1:])
    listed = np.array([2000, 2003, 2**63 - 1], np.int64)
    chunks = np.array(
        [
            (-(2**63), REFERENCE.FULL, 9, 0, 10),
            (-100, REFERENCE.BITS, 2, 0, bits[0].sum()),
            (600, REFERENCE.BITS, 2**23 - 1, 1, bits[1:].sum()),
            (1999, REFERENCE.LISTED, 0, 1, 2),
            (2**62, REFERENCE.LISTED, 7, 2, 1),
        ],
        np.int64,
    )
    listed = np.concatenate([[-5], listed]).astype(np.int64)  # a chunk need not begin at 0
    chunks[4, 3] = 3
    lasts = np.array([-(2**63) + 9, 411, 600 + 999, 2100, 2**63 - 1], np.int64)
    asked = np.concatenate([EDGES, np.arange(-300, 2500), -(2**63) + np.arange(20), 2**63 - 1 - np.arange(5)])
    asked = rng.permutation(asked.astype(np.int64))
    args = chunks[:, 0].copy(), lasts, chunks, listed, blocks, ranks, asked
    known = rng.random(len(asked)) < 0.1  # in the overlay
    expected, got = np.where(known, rng.integers(0, 2**62, len(asked)), -1), Guarded((len(asked),), np.int64)
    got.inside[:] = expected
    REFERENCE.find_base(*args, expected)
    in_parts(CPU.find_base, len(asked), *args, got.inside)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
    assert set(expected[(asked == 2**63 - 1) & ~known].tolist()) == {7 << 40}
    assert np.count_nonzero(expected >= 0) > 300
