"""Rows that come: against a table written down in ten lines, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.admission.frequency import CountMinSketch
from embedrock.store.history import PiecewiseArray
from embedrock.table.table import rows_of

DIM = 2


class Readable:
    """A table stepped by SGD(lr=1) whose rows come by exact counts: the reference."""

    def __init__(self, min_count: int, period: int = 0) -> None:
        self.rows: dict[int, np.ndarray] = {}
        self._seen: list[dict[int, int]] = [{}, {}]
        self._min_count, self._period, self._steps = min_count, period, 0
        self.dropped = 0

    def update(self, ids: np.ndarray, grads: np.ndarray) -> None:
        period = self._steps // self._period if self._period else 0
        if self._period and self._steps % self._period == 0 and period:
            self._seen = [{}, self._seen[0]]
        self._steps += 1
        for row in dict.fromkeys(ids.tolist()):
            if row not in self.rows:
                count = 1 + sum(seen.get(row, 0) for seen in self._seen)
                if count < self._min_count:
                    self._seen[0][row] = self._seen[0].get(row, 0) + 1
                    self.dropped += 1
                    continue
                for seen in self._seen:
                    seen.pop(row, None)
                self.rows[row] = np.full(DIM, 0.5, np.float32)
            self.rows[row] = self.rows[row] - grads[ids == row].sum(axis=0)


def made(**options: Any) -> er.Table:
    return er.Table(None, DIM, rule=er.SGD(lr=1.0), init=er.Constant(0.5), seed=0, **options)


def batches(count: int, seed: int = 0, ids: int = 60) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    drawn = (rng.zipf(1.3, 12) % ids * 7919 - 50_000 for _ in range(count))
    return [(row, rng.integers(-3, 4, (12, DIM)).astype(np.float32)) for row in drawn]  # sums of these are exact


@pytest.mark.parametrize("within", [None, 6, 11])
@pytest.mark.parametrize("min_count", [1, 2, 4])
def test_rows_come_when_they_were_seen_often_enough(min_count: int, within: int | None):
    reference = Readable(min_count, (within or 0) // 2)
    table = made(admission=er.Admission(min_count, within))
    for ids, grads in batches(50):
        table.update(ids, grads)
        reference.update(ids, grads)
    found, weights = table.export()
    assert found.tolist() == sorted(reference.rows)
    np.testing.assert_array_equal(weights, [reference.rows[row] for row in found.tolist()])
    stats = table.stats()
    assert (stats["admitted"], stats["gradients_dropped"]) == (len(reference.rows), reference.dropped)


def test_a_sketch_with_room_counts_as_well_as_exact_counts_do():
    exact, sketched = (made(admission=er.Admission(3, within=20, sketch=sketch)) for sketch in (None, "64KiB"))
    for ids, grads in batches(60):
        for table in (exact, sketched):
            table.update(ids, grads)
    for got, wanted in zip(sketched.export(), exact.export(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_an_old_sketch_counts_anew_in_its_memory_unless_a_commit_still_writes_it():
    sketch, ids = CountMinSketch(er.Admission(2, sketch="1KiB"), np.uint64(0)), np.arange(20)
    sketch.see(ids)
    written, expected = sketch.whole()["sketch"], sketch.state()["sketch"]
    assert sketch.emptied() is None
    assert isinstance(written, PiecewiseArray)
    np.testing.assert_array_equal(np.concatenate(list(written.pieces())).reshape(-1), expected)
    assert sketch.emptied() is sketch
    assert not sketch.of(ids).any()
    assert sketch.changes() is None  # what is saved of it has other counts


def test_a_sketch_errs_as_rarely_as_was_asked_for_and_never_for_too_few():
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 100_000)
    for min_count in (2, 3, 5):
        admission = er.Admission(min_count, sketch=er.Admission.sketch_bytes(80_000, min_count, error=0.01))
        table = made(admission=admission)
        for _ in range(min_count - 1):
            table.update(ids[:80_000], np.ones((80_000, DIM), np.float32))
        early = table.stats()["admitted"]
        assert early < 0.01 * 80_000
        table.update(ids, np.ones((100_000, DIM), np.float32))  # a fifth of them for the first time
        admitted = table.stats()["admitted"]
        assert 80_000 <= admitted <= 80_000 + 0.01 * 20_000
        assert 0.0 < table.stats()["sketch_error"] < 0.02


def test_rows_without_a_record_may_be_read_as_zeros():
    table = made(admission=er.Admission(2, default="zeros"))
    np.testing.assert_array_equal(table.lookup([3]), [[0, 0]])
    table.update([3], np.ones((1, DIM), np.float32))
    np.testing.assert_array_equal(table.lookup([3]), [[0, 0]])
    table.update([3], np.ones((1, DIM), np.float32))
    np.testing.assert_array_equal(table.lookup([3]), [[-0.5, -0.5]])  # from its first value on


RULES = (er.SGD(lr=1.0), er.Adam(lr=0.1), er.RowwiseAdagrad(lr=0.1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_shared_row_trains_as_a_row_that_has_the_ids_of_those_without_one(rule: er.Rule, dtype: str, tmp_path: Path):
    admission = er.Admission(3, default="shared")
    options: dict[str, Any] = {"rule": rule, "dtype": dtype, "seed": 3}
    table = er.Table(None, DIM, admission=admission, **options)
    on_disk = er.Table(None, DIM, admission=admission, path=tmp_path / "t", memory="1MiB", **options)
    reference, seen = er.Table(None, DIM, **options), dict[int, int]()
    for step, (ids, grads) in enumerate(batches(40)):
        for row in set(ids.tolist()):
            seen[row] = seen.get(row, 0) + 1
        reference.update([row if seen[row] >= 3 else 0 for row in ids.tolist()], grads)
        for each in (table, on_disk):
            each.update(ids, grads)
        if step == 20:
            on_disk.commit()
            on_disk.close()
            on_disk, table = er.open(tmp_path / "t", memory="1MiB"), copy.deepcopy(table)
    known, shared = [row for row in seen if seen[row] >= 3], reference.lookup([0])
    for each in (table, on_disk):
        np.testing.assert_array_equal(each.lookup(known), reference.lookup(known))
        np.testing.assert_array_equal(each.lookup([99, 98]), shared[[0, 0]])
        stats = each.stats()
        assert 0 not in each.export()[0]
        assert stats["gradients_dropped"] == 0 < stats["gradients_shared"]
    table.set_rule(er.Momentum(lr=0.1), reset_state=True)  # records of another layout
    np.testing.assert_array_equal(table.lookup([99]), shared)
    on_disk.commit()
    on_disk.close()


def test_a_shared_row_stays_finite_and_a_rollback_brings_it_back(tmp_path: Path):
    table = made(admission=er.Admission(2, default="shared"), path=tmp_path / "t", memory="1MiB")
    first = table.commit()
    table.update([5, 6, 7], np.full((3, DIM), 3e38, np.float32))  # each is finite, and their sum is not
    assert np.isfinite(table.lookup([99])).all()
    assert (table.lookup([99]) < -3e38).all()
    table.rollback(first)
    np.testing.assert_array_equal(table.lookup([99]), [[0.5, 0.5]])
    table.close()


def test_lookups_and_steps_that_are_left_out_are_no_sightings():
    table = made(admission=er.Admission(2), on_nonfinite="skip")
    for _ in range(3):
        table.lookup([3])
        table.update([3], np.full((1, DIM), np.nan))
    table.update([3, 3], np.ones((2, DIM), np.float32))  # one, however often the batch has it
    assert table.stats()["rows_touched"] == 0
    table.assign([4], np.ones((1, DIM), np.float32))
    assert table.stats()["rows_touched"] == 1  # at once
    table.update([3], np.ones((1, DIM), np.float32))
    assert table.stats()["rows_touched"] == 2


@pytest.mark.parametrize("sketch", [None, 1024])
def test_a_state_a_copy_and_a_commit_have_the_counts(sketch: int | None, tmp_path: Path):
    admission, steps = er.Admission(3, within=30, sketch=sketch), batches(40)
    whole, first = made(admission=admission), made(admission=admission)
    on_disk = made(admission=admission, path=tmp_path / "t", memory="1MiB")
    for ids, grads in steps:
        whole.update(ids, grads)
    for ids, grads in steps[:20]:
        first.update(ids, grads)
        on_disk.update(ids, grads)
    on_disk.commit()
    on_disk.update(*steps[0])  # which no commit has
    with pytest.warns(er.UncommittedWarning):
        on_disk.close()
    loaded = made(admission=admission)
    loaded.load_state(first.state())
    again = [copy.deepcopy(first), loaded, er.open(tmp_path / "t", memory="1MiB")]
    for table in again:
        for ids, grads in steps[20:]:
            table.update(ids, grads)
        for got, wanted in zip(table.export(), whole.export(), strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert table.spec.admission == admission
    again[-1].commit()
    again[-1].close()
    with er.open(tmp_path / "t", mode="r") as reader:
        assert reader.stats()["admitted"] == whole.stats()["admitted"]


def test_what_cannot_be_is_refused(tmp_path: Path):
    for wrong, told in {
        "min_count": ({"min_count": 0}, "`min_count` of an Admission must be a whole number of at least 1: got 0"),
        "within": ({"min_count": 2, "within": 1}, "`within` of an Admission, in steps, must be .* at least 2: got 1"),
        "never": (
            {"min_count": 5, "within": 5},
            "`within` .* at least 6 steps, as an id is seen once .*: got 5",
        ),
        "sketch": ({"min_count": 2, "sketch": "25%"}, "`sketch` of an Admission must be a number of bytes: got '25%'"),
        "size": ({"min_count": 2, "sketch": 10}, "must have at least 64 bytes: got 10"),
        "cells": ({"min_count": 257, "sketch": "1MiB"}, "must be at most 256: got 257. Leave sketch= out"),
        "default": ({"min_count": 2, "default": "ones"}, "`default` must be one of first, zeros, shared: got 'ones'"),
    }.values():
        with pytest.raises(er.ArgumentError, match=told):
            er.Admission(**wrong)
    for numbers, told in (((0, 2), "`ids` of sketch_bytes must be .* at least 1"), ((9, 2, 0), "`error` of .* got 0")):
        with pytest.raises(er.ArgumentError, match=told):
            er.Admission.sketch_bytes(*numbers)
    with pytest.raises(er.ArgumentError, match=r"`admission` must be an Admission or None: got 2. For example er\."):
        made(admission=2)
    told = r"rows cannot come and go under Adam.* Leave dense=True out \(under an .* in the layer, rule=er.Adam\(\)\)"
    with pytest.raises(er.UnsupportedError, match=told):
        er.Table(None, DIM, rule=er.Adam(dense=True), admission=er.Admission(2))
    table = made(admission=er.Admission(2))
    with pytest.raises(er.UnsupportedError, match="rows cannot come and go under Adam"):
        table.set_rule(er.Adam(dense=True))
    assert table.rule == er.SGD(lr=1.0)
    state = table.state()
    for other in (None, er.Admission(3)):
        with pytest.raises(er.ArgumentError, match=r"must have counts of its admission, .*: got those of .*min_count"):
            made(admission=other).load_state(state)
    on_disk = made(admission=er.Admission(2), path=tmp_path / "t")
    on_disk.update([1], np.ones((1, DIM), np.float32))
    on_disk.commit()
    on_disk.close()
    with pytest.raises(er.ReadOnlyTableError, match=r'is for training, and .* was opened with mode="r"'):
        made(admission=er.Admission(2), path=tmp_path / "t", mode="r")
    for other in (er.Admission(3), er.Admission(2, within=8), er.Admission(2, sketch="1KiB")):
        with pytest.raises(er.ArgumentError, match=r"must be that by which it has counted ids, Admission.min_count=2"):
            made(admission=other, path=tmp_path / "t")
    again = made(admission=er.Admission(2), path=tmp_path / "t")
    again.update([1], np.ones((1, DIM), np.float32))
    assert again.stats()["admitted"] == 1  # all of its counts are there
    again.commit()
    again.close()


def test_a_table_without_them_has_nothing_of_it():
    table = made()
    assert rows_of(table).lifecycle is None
    assert "admitted" not in table.stats()
    assert "admission" not in table.state()
