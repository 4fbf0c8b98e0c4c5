"""`KernelSuite`: a set of kernels against the NumPy reference, on poisoned memory and odd sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, cast

import numpy as np
import pytest

import reference
from embedrock.batch.plan import NO_DIRECT
from embedrock.initializers import Zeros
from embedrock.kernels.arguments import SGDStep
from embedrock.kernels.keys import PART_BITS
from embedrock.optimizers import (
    LAST_STEP,
    RULES,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Momentum,
    RMSprop,
    RowwiseAdagrad,
    RowwiseRMSprop,
    Rule,
)
from embedrock.spec.codecs import CODECS
from embedrock.spec.spec import STORAGES, RecordLayout, Spec
from embedrock.system.arena import reserve

DIMS = (1, 3, 8, 17, 64)
PACKED_DIMS = (*DIMS, 2, 31, 32, 33)  # groups of 32
DEFAULTS = tuple(kind() for kind in RULES)
DENSE = tuple(cast(Any, kind)(dense=True) for kind in RULES if hasattr(kind, "dense"))
FORMS = (  # of the rules, besides what they are by default: every step of `arguments.STEPS` is one's or the other's
    Momentum(lr_inside=True),
    Momentum(nesterov=True, dense=True),
    Momentum(lr_inside=True, dense=True),
    Adagrad(eps=0.1, eps_inside=True),
    RMSprop(eps=0.1, eps_inside=True),
    RMSprop(dense=True),
    Adam(dense=True),
    AdamW(eps_hat=True),
    AdamW(lr=0.1, dense=True),
    AdamW(lr=0.1, dense=True, eps_hat=True),
    Ftrl(l1=0.1, l2_shrinkage=0.1),
    Ftrl(lr=0.1, l1=0.1, dense=True),
)
NARROW, SEED = ("bfloat16", "float16"), np.uint64(7)
GUARD = 3  # rows of poison before and after whatever a kernel writes to


def poison(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return memory of a recognizable pattern: NaN as float32, and no valid id, slot or count."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(count, 0xFF, np.uint8).view(dtype).reshape(shape)


class Guarded:
    """Poisoned memory with guard rows on both sides; `inside` is what a kernel may write to."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self._whole = poison((shape[0] + 2 * GUARD, *shape[1:]), dtype)
        self.inside = self._whole[GUARD : GUARD + shape[0]]

    def check(self) -> None:
        """Fail where a guard row was written to."""
        for guard in (self._whole[:GUARD], self._whole[GUARD + len(self.inside) :]):
            assert (np.ascontiguousarray(guard).view(np.uint8) == 0xFF).all(), "a kernel wrote outside its output"


def as_launched(kernel: Any, *args: Any) -> list[Any]:
    """Return arguments as `launch` passes them: a kernel cannot write to the arrays that it only reads.

    With arrays that it could write to, Numba compiles it once more, for tests alone. That takes a second or more.
    """
    reads = kernel.launch.reads if hasattr(kernel, "launch") else ()
    return [_read_only(arg) if k in reads else arg for k, arg in enumerate(args)]


class AsLaunched:
    """The kernels of a module, which are called as `launch` calls them."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return (lambda *args: found(*as_launched(found, *args))) if hasattr(found, "launch") else found


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.setflags(write=False)
    return view


def make_layout(rule: Rule | None, dim: int, dtype: str) -> RecordLayout:
    """Return the layout of a table of `rule`."""
    return Spec(None, dim, dtype, rule, Zeros(), 0).layout


class KernelSuite:
    """Subclass it with the kernels to test: ``class TestCPU(KernelSuite): backend = kernels.cpu``."""

    backend: ClassVar[ModuleType]
    splits: ClassVar[tuple[float, ...]] = (0.0, 0.31, 0.77, 1.0)

    def call(self, function: Any, count: int, *args: Any) -> None:
        """Run a kernel over ``[0, count)``, in uneven parts."""
        bounds = [int(count * split) for split in self.splits]
        for lo, hi in itertools.pairwise(bounds):
            self.call_once(function, *args, lo, hi)

    def call_once(self, function: Any, *args: Any) -> Any:
        return function(*as_launched(function, *args))

    def records(self, rng: np.random.Generator, slots: int, layout: RecordLayout, dtype: str) -> tuple[np.ndarray, ...]:
        """Return random records as (storage words, float32), two views of the same memory, state >= 0."""
        records = poison((slots, layout.record_bytes // 4), np.float32)
        records[:, layout.state_start :] = rng.random((slots, records.shape[1] - layout.state_start))
        words = records.view(STORAGES[dtype])
        weights = words[:, : layout.state_start * 4 // words.itemsize]
        weights[:] = reference.codec.encode_nearest(
            rng.standard_normal(weights.shape).astype(np.float32), STORAGES[dtype]
        )
        return words, records

    @pytest.mark.parametrize("dtype", STORAGES)
    @pytest.mark.parametrize("dim", DIMS)
    def test_gather_and_scatter(self, dim: int, dtype: str) -> None:
        rng = np.random.default_rng(dim)
        words, _ = self.records(rng, 50, make_layout(Adam(), dim, dtype), dtype)
        slots = rng.integers(0, 50, 41)
        slots[::5] = -1 - np.arange(len(slots[::5]))
        fresh = rng.standard_normal((len(slots[::5]), dim)).astype(np.float32)
        positions = rng.integers(0, 41, 67).astype(np.int32)
        expected, got = np.empty((67, dim), np.float32), Guarded((67, dim), np.float32)
        reference.rows.gather(words, slots, positions, fresh, expected)
        self.call(self.backend.rows.gather, 67, words, slots, positions, fresh, got.inside)
        np.testing.assert_array_equal(got.inside, expected)
        got.check()

        where, other = rng.permutation(50)[:20], words.copy()
        values = (rng.standard_normal((20, dim)) * 100).astype(np.float32)
        reference.rows.scatter(words, where, values)
        self.call(self.backend.rows.scatter, 20, other, where, values)
        np.testing.assert_array_equal(other, words)

    @pytest.mark.parametrize("dtype", STORAGES)
    def test_look_up(self, dtype: str) -> None:
        rng, count, dim = np.random.default_rng(1), 1300, 5
        words, _ = self.records(rng, 100, make_layout(Adam(), dim, dtype), dtype)
        present, entries = np.zeros(13, np.uint8), np.zeros((256, 2), np.int64)
        direct = np.array([[present.ctypes.data, 100, 1]])
        for each in (direct, NO_DIRECT):
            new = np.arange(0, 100, 3), np.full(34, -1), 0, np.empty(34, np.int64)
            reference.directory.insert(each, entries, *new)
        ids, positions = rng.integers(0, 100, count), np.arange(count, dtype=np.int32)
        fresh = rng.standard_normal((1, dim)).astype(np.float32)
        for where in ((direct, entries[:0]), (NO_DIRECT, entries)):
            slots, expected = np.empty(count, np.int64), np.empty((count, dim), np.float32)
            reference.rows.look_up(*where, ids, slots, words, positions, fresh, expected)
            found, got = Guarded((count,), np.int64), Guarded((count, dim), np.float32)
            args = *where, ids, found.inside, words, positions, fresh, got.inside
            self.call(self.backend.rows.look_up, count, *args)
            np.testing.assert_array_equal(found.inside, slots)
            np.testing.assert_array_equal(got.inside, expected)
            found.check()
            got.check()

    @pytest.mark.parametrize("dtype", CODECS)
    @pytest.mark.parametrize("dim", PACKED_DIMS)
    def test_gather_and_scatter_packed(self, dim: int, dtype: str) -> None:
        rng, width = np.random.default_rng(dim), make_layout(None, dim, dtype).record_bytes
        records, where = [Guarded((50, width), np.uint8) for _ in range(2)], rng.permutation(50)[:30]
        values = rng.standard_normal((30, dim)).astype(np.float32)
        values[:20] *= np.exp(rng.uniform(-87, 80, (20, 1))).astype(np.float32)
        values[20:25], values[25], values[26] = values[20:25, :1] + np.float32(3e4), 0, 1e-45
        expected, got = (CODECS[dtype].rows_of(each.inside, dim) for each in records)
        reference.rows.scatter(expected, where, values)
        self.call(self.backend.rows.scatter, 30, got, where, values)
        np.testing.assert_array_equal(records[1].inside, records[0].inside)
        slots, positions = np.append(where, [-2, -1]), rng.integers(0, 32, 67).astype(np.int32)
        fresh, rows = rng.standard_normal((2, dim)).astype(np.float32), np.empty((67, dim), np.float32)
        reference.rows.gather(expected, slots, positions, fresh, rows)
        out = Guarded((67, dim), np.float32)
        self.call(self.backend.rows.gather, 67, got, slots, positions, fresh, out.inside)
        np.testing.assert_array_equal(out.inside.view(np.int32), rows.view(np.int32))
        for each in (*records, out):
            each.check()

    @pytest.mark.parametrize("dim", DIMS)
    def test_put(self, dim: int) -> None:
        rng = np.random.default_rng(dim)
        records, slots = rng.random((50, dim + 5)).astype(np.float32), rng.permutation(50)[:31]
        other, values = records.copy(), rng.random((31, dim)).astype(np.float32)
        reference.rows.put(records, slots, 3, values)
        self.call(self.backend.rows.put, 31, other, slots, 3, values)
        np.testing.assert_array_equal(other, records)

    @pytest.mark.parametrize("dim", DIMS)
    def test_reset_state(self, dim: int) -> None:
        rng, layout = np.random.default_rng(dim), make_layout(Adam(dense=True), dim, "float16")
        _, records = self.records(rng, 20, layout, "float16")
        other, slots = records.copy(), rng.permutation(20)[:9]
        first = rng.random(layout.state_width).astype(np.float32)
        reference.rows.reset_state(records, slots, layout.state_start, first)
        self.call(self.backend.rows.reset_state, 9, other, slots, layout.state_start, first)
        np.testing.assert_array_equal(other.view(np.int32), records.view(np.int32))

    @pytest.mark.parametrize("dim", DIMS)
    def test_row_squares(self, dim: int) -> None:
        values, squares = np.random.default_rng(dim).standard_normal((37, dim)).astype(np.float32), np.empty(37)
        reference.rows.row_squares(values, squares)
        got = Guarded((37,), np.float64)
        self.call(self.backend.rows.row_squares, 37, values, got.inside)
        np.testing.assert_allclose(got.inside, squares, rtol=1e-14)
        got.check()

    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize("kind", [RowwiseAdagrad, RowwiseRMSprop])
    def test_step_of_groups(self, kind: Any, dim: int) -> None:
        for groups in (n for n in (3, 4, 8, 17, 64) if dim % n == 0):
            self.test_step(kind(lr=0.1, weight_decay=0.5, groups=groups), dim)

    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize("rule", [*DEFAULTS, *FORMS], ids=repr)
    def test_step(self, rule: Rule, dim: int) -> None:
        rng, layout = np.random.default_rng(dim), make_layout(rule, dim, "float32")
        words, records = self.records(rng, 40, layout, "float32")
        if LAST_STEP in rule.state():
            records[:, layout.state_start + layout.state_width - 1] = (
                rng.integers(0, 6, 40).astype(np.int32).view(np.float32)
            )
        other, slots = records.copy(), rng.permutation(40)[:23]
        grads = rng.standard_normal((23, dim)).astype(np.float32)
        numbers = step_numbers(rule, 6)
        where = slots, layout.state_start, layout.state_width, grads, numbers, None, slots, SEED, 6
        reference.rows.step(words, records, *where)
        self.call(self.backend.rows.step, 23, other, other, *where)
        # Alike to the last place or two: the reference sums squares in another order, and decays step by step.
        # Poison between the columns is compared too.
        np.testing.assert_allclose(other, records, rtol=3e-7, atol=1e-7)
        if type(numbers) in reference.rules.REFRESHES:
            self._check_refresh(records, layout, rng, numbers)

    @pytest.mark.parametrize("dtype", NARROW)
    @pytest.mark.parametrize("dim", DIMS)
    def test_step_rounds(self, dim: int, dtype: str) -> None:
        rng, layout = np.random.default_rng(dim), make_layout(Adagrad(), dim, dtype)
        words, records = self.records(rng, 1500, layout, dtype)
        other, slots = records.copy(), rng.permutation(1500)[:1100]  # parts with rows of the scratch of their own
        grads = (rng.standard_normal((1100, dim)) * 100).astype(np.float32)
        where = slots, layout.state_start, layout.state_width, grads, step_numbers(Adagrad(), 1)
        key = rng.integers(-(2**62), 2**62, 1100), SEED, 12345
        reference.rows.step(words, records, *where, None, *key)
        scratch = Guarded((3, dim), np.float32)
        self.call(self.backend.rows.step, 1100, other.view(words.dtype), other, *where, scratch.inside, *key)
        np.testing.assert_array_equal(other.view(np.int32), records.view(np.int32))
        scratch.check()

    def _check_refresh(self, records: np.ndarray, layout: RecordLayout, rng: np.random.Generator, numbers: Any) -> None:
        slots = rng.integers(-1, len(records), 31)
        dim = layout.state_start
        rows = np.where(slots[:, None] >= 0, records[slots, :dim], np.float32(0.5))
        expected, got = rows.copy(), rows.copy()
        scratch = poison((31, layout.state_width), np.float32)
        reference.rows.refresh(expected, records, slots, dim, scratch.copy(), numbers)
        before = records.copy()
        self.call(self.backend.rows.refresh, 31, got, records, slots, dim, scratch, numbers)
        np.testing.assert_allclose(got, expected, rtol=3e-7, atol=1e-7)
        np.testing.assert_array_equal(records.view(np.int32), before.view(np.int32))

    @pytest.mark.parametrize("elements", [2**31 - 2**20, 2**31 + 2**20])
    def test_addresses_beyond_2_to_the_31(self, elements: int) -> None:
        dim = 256
        count = elements // dim
        weights = reserve(elements * 4, "a test").view(np.float32).reshape(count, dim)
        slots = np.array([count - 1, 0, count - 2, 2**31 // dim - 5000])
        values = np.random.default_rng(0).standard_normal((4, dim)).astype(np.float32)
        self.call(self.backend.rows.scatter, 4, weights, slots, values)
        np.testing.assert_array_equal(weights[slots], values)
        out = poison((4, dim), np.float32)
        self.call(self.backend.rows.gather, 4, weights, slots, np.arange(4, dtype=np.int32), values[:0], out)
        np.testing.assert_array_equal(out, values)
        self.call(
            self.backend.rows.step, 4, weights, weights, slots, dim, 0, values, SGDStep(0.5), None, slots, SEED, 1
        )
        np.testing.assert_array_equal(weights[slots], values - np.float32(0.5) * values)

    @pytest.mark.parametrize("bits", [1, 32])
    def test_direct_directory(self, bits: int) -> None:
        rng = np.random.default_rng(bits)
        memories = [Guarded((13,), np.uint8) if bits == 1 else Guarded((100,), np.int32) for _ in range(2)]
        number, count = (2, 104) if bits > 1 else (0, 100)  # the last 4 ones are hashed
        keys = rng.permutation(count)[:40]
        keys += number << PART_BITS
        entries, other = np.zeros((32, 2), np.int64), np.zeros((32, 2), np.int64)
        results = []
        for memory, table, directory, cache in (
            (memories[0], entries, reference.directory, reference.cache),
            (memories[1], other, self.backend.directory, self.backend.cache),
        ):
            memory.inside[:] = 0
            direct = np.zeros((number + 1, 3), np.int64)
            direct[number] = memory.inside.ctypes.data, 100, bits
            slots, names = np.full(40, -1), np.full(64, -1)
            counts = [*self.call_once(directory.insert, direct, table, keys, slots, 5, names)]
            if bits > 1:
                args = direct, table, keys[::2].copy(), slots[::2] + 50
                counts.append(self.call_once(directory.set_values, *args))
            counts.append(self.call_once(cache.erase, direct, table, keys[:7]))
            results.append((memory.inside.copy(), table, slots, names, counts, direct))
            memory.check()
        for expected, got in zip(results[0][:5], results[1][:5], strict=True):
            np.testing.assert_array_equal(got, expected)
        everything, found = np.arange(count) + (number << PART_BITS), Guarded((count,), np.int64)
        expected = np.empty(count, np.int64)
        reference.directory.find(results[0][5], entries, everything, expected)
        self.call(self.backend.directory.find, count, results[1][5], other, everything, found.inside)
        np.testing.assert_array_equal(found.inside, expected)
        assert (expected >= 0).sum() == 33
        found.check()

    @pytest.mark.parametrize("size", [1, 32, 64])
    def test_hashed_directory(self, size: int) -> None:
        rng = np.random.default_rng(size)
        edge = np.array([0, -1, 2**63 - 1, -(2**63), 2**31, 2**32, -(2**32)], np.int64)
        ids = np.concatenate([edge, rng.integers(-(2**62), 2**62, 13)])[: size // 2]
        entries, other = np.zeros((size, 2), np.int64), np.zeros((size, 2), np.int64)
        slots, got = np.full(len(ids), -1), np.full(len(ids), -1)
        names, names_got = np.empty(64, np.int64), Guarded((64,), np.int64)
        used, hashed = reference.directory.insert(NO_DIRECT, entries, ids, slots, 5, names)
        assert used == 5 + len(ids)
        args = NO_DIRECT, other, ids, got, 5, names_got.inside
        assert self.call_once(self.backend.directory.insert, *args) == (used, hashed)
        np.testing.assert_array_equal(other, entries)
        np.testing.assert_array_equal(got, slots)
        np.testing.assert_array_equal(names_got.inside[5:used], ids)
        names_got.check()
        larger, larger_got = np.zeros((4 * size, 2), np.int64), np.zeros((4 * size, 2), np.int64)
        hashed = reference.directory.rehash(entries, NO_DIRECT, larger)
        assert self.call_once(self.backend.directory.rehash, entries, NO_DIRECT, larger_got) == hashed == len(ids)
        np.testing.assert_array_equal(larger_got, larger)
        asked, found = np.concatenate([ids, [3, -77]]), Guarded((len(ids) + 2,), np.int64)
        self.call(self.backend.directory.find, len(asked), NO_DIRECT, larger, asked, found.inside)
        np.testing.assert_array_equal(found.inside, np.append(slots, [-1, -1]))
        found.check()

    @pytest.mark.parametrize("bits", [1, 2, 4, 8])
    def test_sketch(self, bits: int) -> None:
        rng, key = np.random.default_rng(bits), np.uint64(2**63 + 5)
        edge = np.array([0, -1, 2**63 - 1, -(2**63)], np.int64)
        ids = np.concatenate([edge, rng.integers(-(2**62), 2**62, 60)])
        firsts = 7 * rng.integers(0, 3, len(ids))
        lines, got = np.zeros((21, 64), np.uint8), Guarded((21, 64), np.uint8)
        changed, marked = np.zeros(21, np.uint8), Guarded((21,), np.uint8)
        got.inside[:] = marked.inside[:] = 0
        for round_ in range(1, 5):
            seen, own = ids[::round_], firsts[::round_].copy()
            before = lines.copy()
            changed[:] = marked.inside[:] = 0
            reference.residents.see(lines, changed, 7, bits, key, own, seen)
            self.call_once(self.backend.residents.see, got.inside, marked.inside, 7, bits, key, own, seen.copy())
            np.testing.assert_array_equal(got.inside, lines)
            for each in (changed, marked.inside):
                np.testing.assert_array_equal(each, (lines != before).any(axis=1))
            numbers, found = np.empty(len(seen), np.int64), Guarded((len(seen),), np.int64)
            reference.residents.lines_of(7, key, own, seen, numbers)
            self.call(self.backend.residents.lines_of, len(seen), 7, key, own, seen.copy(), found.inside)
            assert ((numbers >= own) & (numbers < own + 7)).all()
            np.testing.assert_array_equal(found.inside, numbers)
            assert set(np.flatnonzero(changed)) <= set(numbers)
            found.check()
        got.check()
        marked.check()
        expected, counts = np.empty(len(ids), np.int64), Guarded((len(ids),), np.int64)
        reference.residents.count_seen(lines, 7, bits, key, firsts, ids, expected)
        self.call(self.backend.residents.count_seen, len(ids), lines, 7, bits, key, firsts, ids, counts.inside)
        np.testing.assert_array_equal(counts.inside, expected)
        counts.check()
        often = np.array([1 + (k % 2 == 0) + (k % 3 == 0) + (k % 4 == 0) for k in range(len(ids))])
        assert (expected >= np.minimum(often, (1 << bits) - 1)).all()

    def test_touch(self) -> None:
        rng = np.random.default_rng(0)
        last, marks = rng.integers(0, 90, 50), rng.integers(0, 2**22, 50)
        numbers = rng.permutation(50)[:31]
        expected, got = (last.copy(), marks.copy()), (last.copy(), marks.copy())
        reference.residents.touch(*expected, numbers, 95, 7, 256, 2**22)
        self.call(self.backend.residents.touch, 31, *got, numbers, 95, 7, 256, 2**22)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_values_of_ids(self) -> None:
        ids, values = np.array([0, -1, 2**63 - 1, -(2**63), 77]), np.array([0, 5, 2**40, 1, 2])
        entries, other = np.zeros((16, 2), np.int64), np.zeros((16, 2), np.int64)
        for part in (slice(0, 3), slice(0, 5)):
            expected = reference.directory.set_values(NO_DIRECT, entries, ids[part], values[part] + 1)
            new = self.call_once(self.backend.directory.set_values, NO_DIRECT, other, ids[part], values[part] + 1)
            assert new == expected == part.stop - 3 * (part.stop > 3)
        np.testing.assert_array_equal(other, entries)
        found = np.empty(5, np.int64)
        self.call(self.backend.directory.find, 5, NO_DIRECT, other, ids, found)
        np.testing.assert_array_equal(found, values + 1)


def step_numbers(rule: Rule, step: int, zeros: int = 0) -> Any:
    """Return the numbers of a rule's step, after others of the same hyperparameters; the last `zeros` with lr=0."""
    history, still = rule.history(), rule.with_changes({"lr": 0.0})
    if history is None:
        return (still if zeros else rule).numbers(step)
    for left in range(step, 0, -1):
        history.draft(still if left <= zeros else rule)
        history.append()
    return history.numbers()
