"""Workloads: ids in range, by their law of popularity, the same in every process."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.workload import SCATTER, ManyTables, Workload
from embedrock.planner.demand import bounded_zipf

TINY = Workload(rows=1000, dim=8, batch=16, features=2, batches=3)


@pytest.mark.parametrize("zipf", [0.0, 1.0, 1.05, 3.0])
def test_ids_are_in_range_and_the_same_each_time(zipf: float):
    workload = Workload(rows=1000, batch=64, features=3, zipf=zipf, batches=4)
    batches = workload.ids()
    assert [ids.shape for ids in batches] == [(64, 3)] * 4
    assert all(ids.dtype == np.int64 and ids.min() >= 0 and ids.max() < 1000 for ids in batches)
    assert all(np.array_equal(a, b) for a, b in zip(batches, workload.ids(), strict=True))
    assert not np.array_equal(batches[0], batches[1])
    assert np.array_equal(workload.batch_at(7), workload.batch_at(7))
    assert not np.array_equal(workload.batch_at(0), workload.batch_at(10**9))


def test_zipf_follows_its_law():
    uniform = (np.arange(1_000_000) + 0.5) / 1_000_000
    for exponent in (0.0, 0.5, 1.0, 1.05, 2.0):
        counts = np.bincount(bounded_zipf(uniform, 50, exponent), minlength=50)
        edges = np.arange(1, 52, dtype=np.float64).clip(max=50)
        mass = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
        expected = np.diff(mass) / (mass[-1] - mass[0])
        np.testing.assert_allclose(counts / 1_000_000, expected, atol=2e-6)


def test_uniform_numbers_at_the_ends_stay_in_range():
    ends = np.array([0.0, np.nextafter(1.0, 0.0)])
    for exponent in (0.0, 1.0, 1.05):
        for ranks in (1, 2, 10**9):
            ids = bounded_zipf(ends, ranks, exponent)
            assert ids[0] == 0
            assert 0 <= ids[1] < ranks


def test_equal_ranks_give_equal_numbers_of_unique_ids_at_every_size():
    sizes = (1000, 100_000, SCATTER - 1)
    unique = {Workload(rows=rows, batch=2000, batches=2, ranks=1000).unique_ids() for rows in sizes}
    assert len(unique) == 1


@pytest.mark.parametrize("zipf", [0.0, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("slots", [0, 100, 4999, 10**6])
def test_expected_misses_are_those_of_the_most_popular_rows_kept(zipf: float, slots: int):
    workload = Workload(rows=5000, batch=100, features=2, zipf=zipf)
    kept = np.arange(min(slots, 5000)) * SCATTER % 5000
    batches = [np.unique(workload.batch_at(index)) for index in range(400)]
    measured = np.mean([np.count_nonzero(~np.isin(ids, kept)) for ids in batches])
    assert workload.expected_misses(slots) == pytest.approx(measured, rel=0.05, abs=0.05)


def test_a_gradient_has_the_shape_of_the_output_and_touched_rows_are_counted():
    assert (TINY.gradient().shape, TINY.gradient().dtype) == ((16, 2, 8), np.float32)
    assert TINY.touched_rows() == len({int(i) for ids in TINY.ids() for i in ids.ravel()})


def test_tables_of_mlperf_are_cut_and_their_ids_are_theirs():
    tables = ManyTables(max_rows=1000, max_bag=5, batch=4, batches=2, dim=8)
    assert len(tables.rows) == len(tables.bags) == 26
    assert (max(tables.rows), max(tables.bags), tables.lookups) == (1000, 5, 4 * sum(tables.bags))
    for batch in tables.ids():
        for ids, rows, bag in zip(batch, tables.rows, tables.bags, strict=True):
            assert ids.shape == (4, bag)
            assert 0 <= ids.min() <= ids.max() < rows
    assert tables.gradient().shape == (4, 26 * 8)
