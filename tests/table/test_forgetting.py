"""Rows that are forgotten: at once, on disk with the next commit, and without a trace after compaction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.system.interrupts import held_back
from embedrock.table import batches
from embedrock.table.stepping import StepRequest, step_all
from embedrock.table.table import rows_of
from format_reader import read_table
from same_tables import check_same
from support import features as features_of
from support.features import BatchFeature

DIM = 4
SECRET = 0x0123456789ABCDEF  # an id ...
MARK = np.array([[1.2345678e-5, -7.654321e7, 3.1415927, 2.7182818e-3]], np.float32)  # ... and weights as no other


def made(**options: Any) -> er.Table:
    return er.Table(None, DIM, rule=er.Adam(lr=0.1), init=er.Constant(0.5), seed=0, **options)


def step(table: er.Table, ids: Any) -> None:
    table.update(ids, np.ones((len(ids), DIM), np.float32))


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_are_forgotten_at_once(on_disk: bool, tmp_path: Path):
    table, never = made(**({"path": tmp_path / "t", "memory": "1MiB"} if on_disk else {})), made()
    step(table, [1, 2, 3])
    assert table.forget([[2, 2], [7, 3]]) == 2
    assert table.export()[0].tolist() == [1]
    np.testing.assert_array_equal(table.lookup([2]), np.full((1, DIM), 0.5))
    step(table, [2])
    for _ in range(2):
        step(never, [2] if never.steps else [9])
    np.testing.assert_array_equal(table.lookup([2]), never.lookup([2]))  # with no state of its first life
    assert table.forget(np.empty(0, np.int64)) == 0
    with pytest.warns(er.UncommittedWarning) if on_disk else held_back():
        table.close()


def test_no_byte_is_left_in_ram():
    table = made()
    table.assign([SECRET], MARK)
    records = rows_of(table).tier.records.bytes
    assert MARK.tobytes() in records[:4].tobytes()
    table.forget([SECRET])
    assert not records[:4].any()


def has_trace(folder: Path) -> bool:
    traces = MARK.tobytes(), SECRET.to_bytes(8, "little")
    return any(trace in path.read_bytes() for path in folder.rglob("*") if path.is_file() for trace in traces)


@pytest.mark.parametrize("compacted", [False, True])
def test_no_byte_is_left_in_files(compacted: bool, tmp_path: Path):
    table = made(path=tmp_path / "t", keep=1, memory="1MiB")
    table.assign([SECRET], MARK)
    step(table, range(100))
    table.commit()
    if compacted:
        table.compact()  # the row is in the base
    assert has_trace(tmp_path / "t")
    table.forget([SECRET])
    table.commit()
    _, rows = read_table(tmp_path / "t")
    assert sorted(rows) == list(range(100))
    table.close()
    table = er.open(tmp_path / "t", keep=1)
    assert table.stats()["rows_touched"] == 100
    assert table.forget([SECRET]) == 0
    table.compact()
    assert not has_trace(tmp_path / "t")
    assert table.verify().problems == []
    assert table.export()[0].tolist() == list(range(100))
    table.close()


@pytest.mark.parametrize("times", [1, 2], ids=["counted", "with a record"])
def test_no_file_names_it_that_says_who_has_a_record(times: int, tmp_path: Path):
    table = made(path=tmp_path / "t", keep=1, admission=er.Admission(2), eviction=er.Eviction(max_rows=500))
    for number in range(3):
        step(table, [*range(100), *([SECRET] if number < times else [])])
        table.commit()  # of which the later ones have changes only
    assert has_trace(tmp_path / "t")
    assert table.forget([SECRET]) == times - 1
    table.commit()
    table.compact()
    assert not has_trace(tmp_path / "t")
    table.close()
    with er.open(tmp_path / "t") as again:
        assert again.export()[0].tolist() == list(range(100))


def test_a_commit_that_is_kept_does_not_show_it(tmp_path: Path):
    with made(path=tmp_path / "t", keep=1) as table:
        step(table, [1, 2])
        table.commit(name="before")
        table.forget([1])
        number = table.commit()
        for at in (1, number):
            with er.open(tmp_path / "t", mode="r", at=at) as reader:
                assert reader.export()[0].tolist() == [2]
                assert reader.stats()["rows_touched"] == 1
                assert reader.stats()["rows_withheld"] == (at == 1)
        table.rollback(1)
        assert table.export()[0].tolist() == [2]


def test_a_commit_under_way_has_the_row_and_the_next_one_has_not(tmp_path: Path):
    table = made(path=tmp_path / "t", keep=9)
    step(table, range(50))
    first = table.commit(wait=False)
    table.forget(range(0, 50, 2))
    second = table.commit()
    table.close()
    for number, withheld in ((first, 25), (second, 0)):
        with er.open(tmp_path / "t", mode="r", at=number) as reader:
            assert reader.export()[0].tolist() == list(range(1, 50, 2))
            assert reader.stats()["rows_withheld"] == withheld


def test_rows_that_a_later_batch_has_brought_up_are_forgotten_all_the_same(tmp_path: Path):
    table, ram = made(path=tmp_path / "t", memory="1MiB"), made()
    for each in (table, ram):
        step(each, range(40))
    table.commit()
    for number, ids in enumerate(table.prefetch([range(k, k + 4) for k in range(0, 40, 4)], depth=3)):
        if number == 3:
            assert table.forget(range(16, 24)) == ram.forget(range(16, 24)) == 8
        for each in (table, ram):
            step(each, list(ids))
    for got, wanted in zip(table.export(), ram.export(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    table.commit()
    table.close()


def test_counts_of_an_id_are_forgotten_too():
    table = made(admission=er.Admission(2), eviction=er.Eviction(max_rows=5))
    step(table, [1, 2])
    step(table, [2])
    assert table.forget([1, 2]) == 1
    step(table, [1, 2])
    assert table.stats()["rows_touched"] == 0  # they were seen once
    assert table.stats()["forgotten"] == 1


def test_members_of_groups_forget():
    group = er.Group()
    tables = [group.table(name, None, DIM, rule=er.SGD(lr=1.0)) for name in ("a", "b")]
    shared = [group.table(name, 100, DIM, rule=er.SGD(lr=1.0)) for name in ("c", "d")]
    for table in (*tables, *shared):
        step(table, [1, 2, 3])
    for table in (tables[0], shared[0]):
        assert table.forget([2, 50]) == 1
        assert table.export()[0].tolist() == [1, 3]
    for table in (tables[1], shared[1]):
        assert table.export()[0].tolist() == [1, 2, 3]


def test_what_cannot_be_is_refused(tmp_path: Path):
    with made(path=tmp_path / "t") as table:
        step(table, [1])
        table.commit()
    with (
        er.open(tmp_path / "t", mode="r") as reader,
        pytest.raises(er.ReadOnlyTableError, match='opened with mode="r"'),
    ):
        reader.forget([1])
    with pytest.raises(er.IdTypeError):
        made().forget([1.5])


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_of_an_unfinished_batch_of_a_group_are_not_forgotten(on_disk: bool, tmp_path: Path):
    with er.Group(**({"path": tmp_path / "g", "memory": "8MiB"} if on_disk else {})) as group:
        tables = {name: group.table(name, rows=None, dim=4, rule=er.Adam(lr=0.1)) for name in ("a", "b")}
        ids, ones = {"a": np.array([1, 2, 3]), "b": np.array([3, 4, 5])}, np.ones((3, 4), np.float32)
        group.update(ids, dict.fromkeys(ids, ones))
        reading = features_of.read([BatchFeature(table, ids[name]) for name, table in tables.items()])
        grads = features_of.sum_gradients(reading, [ones, ones])
        with pytest.raises(er.ArgumentError, match=r"not stepped yet: got 1 row, first ids \[5\]"):
            tables["b"].forget([1, 5])
        assert tables["a"].forget([5]) == 0
        step_all([StepRequest((rows_of(table),), er.Adam(lr=0.1), own) for table, own in grads])
        assert tables["b"].forget([1, 5]) == 1
        features_of.read([BatchFeature(tables["a"], ids["a"])])  # nobody has its plan
        assert tables["a"].forget([1]) == 1
        if on_disk:
            group.commit()


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_of_an_unfinished_batch_are_not_forgotten(on_disk: bool, tmp_path: Path):
    place = {"path": tmp_path / "t"} if on_disk else {}
    with made(**place) as table:
        step(table, [1, 2, 3])
        before = table.export()
        plan = table.plan([2, 3, 4])
        grads = table.sum(plan, table.read(plan))
        with pytest.raises(
            er.ArgumentError, match=r"read and is not stepped yet: got 1 row, first ids \[3\]\. Step the"
        ):
            table.forget([1, 3])
        for got, wanted in zip(table.export(), before, strict=True):
            np.testing.assert_array_equal(got, wanted)
        table.step(grads)
        assert table.forget([1, 3]) == 2
        table.read(table.plan([2]))  # nobody has its plan
        assert table.forget([2]) == 1
        if on_disk:
            table.commit()


def test_all_rows_of_an_unfinished_batch_with_rows_and_bags_stay():
    group = er.Group()
    table = group.table("a", None, DIM, rule=er.SGD(lr=0.1), init=er.Zeros(), seed=0)
    step(table, [1, 2, 3, 4])
    features = [BatchFeature(table, np.array([1])), BatchFeature(table, np.array([2]), padding=7)]
    features.append(BatchFeature(table, np.array([[3]]), mode="sum"))
    found = features_of.read(features)
    for unfinished in (1, 2, 3):
        with pytest.raises(er.ArgumentError, match="read and is not stepped yet: got 1 row"):
            table.forget([unfinished, 4])
    ((_, grads),) = features_of.sum_gradients(found, [np.ones_like(out) for out in found.outputs])
    table.step(grads)
    assert table.forget([1, 2, 3, 4]) == 4


def test_rows_of_added_up_gradients_of_several_tables_stay():
    group = er.Group()
    tables = [group.table(name, 40, DIM, rule=er.SGD(lr=0.1), seed=0) for name in "ab"]
    for table in tables:
        step(table, [1, 2])
    found = features_of.read([BatchFeature(table, np.array([1, 2])) for table in tables])
    ((_, summed),) = batches.sum_blocks(found, [np.ones_like(out) for out in found.outputs])
    merged = [summed.of(table).merge(summed.of(table)) for table in range(2)]
    del found, summed
    for table in tables:
        with pytest.raises(er.ArgumentError, match="read and is not stepped yet: got 2 rows"):
            table.forget([1, 2])
    for table, grads in zip(tables, merged, strict=True):
        table.step(grads)
        assert table.forget([1, 2]) == 2


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_batch_whose_step_was_refused_is_unfinished_while_somebody_has_it(
    on_disk: bool, is_dropped: bool, tmp_path: Path
):
    rule, ones = er.Adam(lr=0.1), np.ones((3, DIM), np.float32)
    with made(**({"path": tmp_path / "t"} if on_disk else {})) as table, made() as twin, made() as other:
        for each in (table, twin):
            step(each, [1, 2, 3])
        plan = table.plan([2, 3, 4])
        grads = table.sum(plan, table.read(plan))
        broken = other.sum(other.plan([7, 8, 9]), ones * np.nan)
        with pytest.raises(er.NonFiniteGradientError):
            step_all([StepRequest((rows_of(table),), rule, grads), StepRequest((rows_of(other),), rule, broken)])
        with pytest.raises(er.ArgumentError, match=r"not stepped yet: got 1 row, first ids \[3\]"):
            table.forget([1, 3])
        if is_dropped:
            del plan, grads
            assert table.forget([1, 3]) == twin.forget([1, 3]) == 2
        else:
            table.step(grads)
            plan = twin.plan([2, 3, 4])
            twin.step(twin.sum(plan, twin.read(plan)))
        check_same(table, twin)
        if on_disk:
            table.commit()
