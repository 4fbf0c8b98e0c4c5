"""Records of float32 rows: those of each dtype, and rows that no record can hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.spec.codecs import CODECS
from embedrock.spec.spec import STORAGES, Spec
from embedrock.storage.records import Records, encode

EVERY = pytest.mark.parametrize("dtype", [*STORAGES, *CODECS])


def spec_of(dtype: str, dim: int = 5, rule: Any = None) -> Spec:
    return Spec(None, dim, dtype, rule, er.Zeros(), 0)


@EVERY
def test_records_are_those_of_a_table(dtype: str):
    rule = None if dtype in CODECS else er.Adagrad(initial_accumulator_value=0.5)
    spec, ids, values = spec_of(dtype, rule=rule), np.arange(10, 17), np.linspace(-1, 1, 35, dtype="f4").reshape(7, 5)
    records = encode(spec, ids, values)
    assert (records.dtype, records.shape) == (np.uint8, (7, spec.record_bytes))
    got, slots = np.empty((7, 5), np.float32), np.arange(7)
    Records(spec, records.reshape(-1)).read(slots, slots.astype(np.int32), got[:0], got)
    np.testing.assert_allclose(got, values, atol=2 / 15 / 2 + 1e-6 if dtype == "int4" else 0.005)
    if dtype in STORAGES:
        table = er.Table(None, 5, dtype=dtype, rule=rule, init=er.Zeros(), seed=0)
        table.assign(ids, values)
        state = table.state()
        np.testing.assert_array_equal(state["records"][np.argsort(state["ids"])], records)
    assert encode(spec, ids[:0], values[:0]).shape == (0, spec.record_bytes)


@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused_by_id(dtype: str, bad: float):
    values = np.ones((20, 5), np.float32)
    values[[3, 11], [0, 4]] = bad
    with pytest.raises(er.GradientError) as refused:
        encode(spec_of(dtype), np.arange(20) * 10**12, values, "table 'users'")
    expected = (
        f"rows of table 'users' must be finite as {dtype}: got NaN, Inf or values too large in 2 rows, first ids "
    )
    assert str(refused.value).startswith(expected + "[3000000000000, 11000000000000]. Nothing has changed.")


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_values_too_large_for_a_dtype_are_refused(dtype: str):
    values = np.array([[1, 2], [3e38, -3e38], [3, 4]], np.float32)
    with pytest.raises(er.GradientError, match=r"values too large in 1 row, first ids \[8\]"):
        encode(spec_of(dtype, 2), np.array([7, 8, 9]), values)
    encode(spec_of("int8", 2), np.array([7, 8, 9]), values)
