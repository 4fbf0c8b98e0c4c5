"""Tables of int8 and int4: filled from tables of floats, read everywhere, never trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.spec.codecs import CODECS
from embedrock.spec.spec import Spec
from embedrock.storage.records import Records, encode

EVERY = pytest.mark.parametrize("dtype", CODECS)
ON_DISK = pytest.mark.parametrize("on_disk", [False, True], ids=["ram", "disk"])
ROWS, DIM, ALL = 300, 33, np.arange(300)
HELD = np.arange(0, 300, 3)


def trained(**given: Any) -> er.Table:
    """Return a table of floats, of which every third row has a record."""
    options: dict[str, Any] = {"rule": er.Adam(), "seed": 3, **given}
    table = er.Table(ROWS, DIM, **options)
    rng = np.random.default_rng(0)
    for ids in (HELD[::2], HELD):
        table.update(ids, rng.standard_normal((len(ids), DIM)).astype(np.float32))
    return table


def packed(dtype: str, source: er.Table, **options: Any) -> er.Table:
    made = er.Table(source.rows, DIM, dtype=dtype, seed=source.spec.seed, init=source.spec.init, **options)
    made.load_state(source)
    return made


def expected_of(dtype: str, source: er.Table) -> np.ndarray:
    """Return all rows: those with a record after a round trip, and the others as they are."""
    rows, (ids, values) = source.lookup(ALL), source.export()
    spec = Spec(None, DIM, dtype, None, er.Zeros(), 0)
    records, slots = Records(spec, encode(spec, ids, values).reshape(-1)), np.arange(len(ids))
    records.read(slots, slots.astype(np.int32), values[:0], values)
    rows[ids] = values
    return rows


@EVERY
@ON_DISK
@pytest.mark.parametrize("source_dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_table_it_was_filled_from(dtype: str, on_disk: bool, source_dtype: str, tmp_path: Path):
    source = trained(dtype=source_dtype, **({"path": tmp_path / "source"} if on_disk else {}))
    if on_disk:
        source.commit()
    made = packed(dtype, source, **({"path": tmp_path / "made"} if on_disk else {}))
    # First values are not rounded: they are those of float32.
    first = er.Table(ROWS, DIM, seed=3).lookup(ALL)
    expected = np.where(np.isin(ALL, HELD)[:, None], expected_of(dtype, source), first)
    np.testing.assert_array_equal(made.lookup(ALL), expected)
    assert (made.stats()["rows_touched"], made.rule, made.steps) == (len(HELD), None, 0)
    np.testing.assert_array_equal(made.read(made.plan(ALL[::-1])), expected[::-1])
    ids, values = made.export()
    np.testing.assert_array_equal(ids, HELD)
    np.testing.assert_array_equal(values, expected[HELD])
    if on_disk:
        made.commit()
        made.close()
        with er.open(tmp_path / "made", mode="r", memory="8KiB") as read:  # a cache of some rows
            np.testing.assert_array_equal(read.lookup(ALL), expected)
        made = er.open(tmp_path / "made")
    np.testing.assert_array_equal(packed(dtype, made).lookup(ALL), expected)
    source.close()
    made.close()


@EVERY
@ON_DISK
def test_forgotten_and_grown(dtype: str, on_disk: bool, tmp_path: Path):
    source, where = trained(), {"path": tmp_path / "made"} if on_disk else {}
    made, first = packed(dtype, source, **where), er.Table(ROWS, DIM, seed=3)
    expected = expected_of(dtype, source)
    assert made.forget([0, 1, 3]) == 2
    made.grow(400)
    expected[[0, 3]] = first.lookup([0, 3])
    np.testing.assert_array_equal(made.lookup(ALL), expected)
    if on_disk:
        made.commit()
        made.compact()
        made.commit()
        made.close()
        with er.open(tmp_path / "made") as made:
            np.testing.assert_array_equal(made.lookup(ALL), expected)


@ON_DISK
def test_members_of_a_group(on_disk: bool, tmp_path: Path):
    source, path = trained(), tmp_path / "group"
    made: er.Group = er.Group(path=path) if on_disk else er.Group()
    kinds = {"a": "int8", "b": "int8", "c": "int4", "d": "float32"}
    for name, dtype in kinds.items():
        made.table(name, ROWS, DIM, dtype=dtype, seed=3).load_state(source)
    expected = {dtype: expected_of(dtype, source) for dtype in CODECS} | {"float32": source.lookup(ALL)}
    if on_disk:
        made.commit()
        made.close()
        made = er.open(path, mode="r", kind=er.Group)
    for name, rows in made.lookup(dict.fromkeys(kinds, ALL)).items():
        np.testing.assert_array_equal(rows, expected[kinds[name]])
    made.close()


TRAINING: dict[str, Callable[[er.Table], object]] = {
    "got a step": lambda table: table.update([3], np.ones((1, DIM), np.float32)),
    "got values to assign": lambda table: table.assign([3], np.ones((1, DIM), np.float32)),
    "got rule=SGD(lr=0.01)": lambda table: table.set_rule(er.SGD()),
}


@EVERY
@pytest.mark.parametrize("told", TRAINING)
def test_training_is_refused(dtype: str, told: str):
    made = packed(dtype, trained())
    before, version = made.lookup(ALL), made.state()
    with pytest.raises(er.UnsupportedError) as refused:
        TRAINING[told](made)
    text = str(refused.value)
    assert text.startswith(made.subject)
    assert f"with rows of {dtype} must be only read: {told}. Nothing has changed." in text
    assert f"write a copy as {dtype}: embedrock export TABLE COPY --dtype {dtype}." in text
    np.testing.assert_array_equal(made.lookup(ALL), before)
    np.testing.assert_array_equal(made.state()["records"], version["records"])


@pytest.mark.parametrize(
    "options",
    [{"rule": er.SGD()}, {"admission": er.Admission(2)}, {"eviction": er.Eviction(max_rows=9)}],
    ids=lambda options: next(iter(options)),
)
def test_what_is_for_training_is_refused_when_a_table_is_made(options: dict[str, Any], tmp_path: Path):
    with pytest.raises(er.UnsupportedError, match="a table with rows of int8 must be only read: got "):
        er.Table(ROWS, DIM, dtype="int8", path=tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


@EVERY
@ON_DISK
def test_rows_that_are_not_finite_change_nothing(dtype: str, on_disk: bool, tmp_path: Path):
    source = trained(rule=er.SGD(lr=1.0), name="clicks")
    made = packed(dtype, source, **({"path": tmp_path / "made"} if on_disk else {}))
    before = made.lookup(ALL)
    source.update([6, 9], np.full((2, DIM), -3e38, np.float32))
    source.update([6, 9], np.full((2, DIM), -3e38, np.float32))
    assert np.isinf(source.lookup([6, 9])).all()
    text = rf"rows of table 'clicks' must be finite as {dtype}.*first ids \[6, 9\]"
    with pytest.raises(er.GradientError, match=text):
        made.load_state(source)
    np.testing.assert_array_equal(made.lookup(ALL), before)
    if on_disk:
        made.commit()
    made.close()


def test_rows_without_a_record_must_have_their_first_values():
    made = er.Table(ROWS, DIM, dtype="int8", seed=3)
    made.load_state(trained(admission=er.Admission(2)))
    for source in (trained(admission=er.Admission(2, default="zeros")), trained(rule=er.AdamW(dense=True))):
        with pytest.raises(er.UnsupportedError, match="must have the first values of"):
            made.load_state(source)
    with pytest.raises(er.ArgumentError, match=f"must have rows {ROWS}: got 100"):
        made.load_state(er.Table(100, DIM, seed=3))
    assert made.stats()["rows_touched"] == len(HELD[::2])


def test_a_forged_manifest_gives_a_packed_table_no_rule():
    from embedrock.spec.description import describe_spec, read_spec

    described = describe_spec(Spec(None, 4, "int8", None, er.Zeros(), 0))
    assert read_spec(described, None, "/t").dtype == "int8"
    rule = describe_spec(Spec(None, 4, "float32", er.SGD(), er.Zeros(), 0))["rule"]
    with pytest.raises(er.CorruptTableError, match="the manifest of /t must describe a table"):
        read_spec({**described, "rule": rule}, None, "/t")
