"""Rows in 8 and 4 bits: how far weights are off, and views of other forms than a table's records."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import reference
from embedrock.initializers import Zeros
from embedrock.initializers.published import CODES
from embedrock.kernels import cpu
from embedrock.kernels.packed import PackedRows
from embedrock.spec.codecs import CODECS
from embedrock.spec.spec import Spec

EVERY = pytest.mark.parametrize("dtype", CODECS)
EDGES = [0.0, -0.0, 1e-45, -1e-45, 1.2e-38, -1e-37, 3e-36, 1.0, -1.0, 3e38, -3e38, 3.4e38, 1.00390625, 2.0**-117]
WEIGHTS = st.floats(-1, 1, width=32) | st.floats(width=32, allow_nan=False, allow_infinity=False)
# One sign below 1e38: int4 takes no group that is wider than float32.
LARGE = st.sampled_from(EDGES) | st.floats(-2, 2, width=32) | st.floats(0, 2.0**126, width=32)


def scales_of(rows: PackedRows, dim: int) -> np.ndarray:
    """Return the stored scale of each weight: float64 (slots, dim)."""
    group = np.arange(dim) // rows.group
    return reference.codec.decode(rows.scales)[:, rows.scale_start + group].astype(np.float64)


def check_bound(got: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    """Fail unless each weight is off by at most half its scale, and by the rounding of a float32 product and sum."""
    wide, values = got.astype(np.float64), values.astype(np.float64)
    rounding = (np.abs(values) + 16 * scales) * 2.0**-23
    np.testing.assert_array_less(np.abs(wide - values), scales / 2 + rounding + 1e-300)


def packed(dtype: str, values: np.ndarray) -> PackedRows:
    spec = Spec(None, values.shape[1], dtype, None, Zeros(), 0)
    rows = CODECS[dtype].rows_of(np.zeros((len(values), spec.record_bytes), np.uint8), spec.dim)
    cpu.launch(cpu.rows.scatter, rows, np.arange(len(values)), values)
    return rows


def unpacked(rows: PackedRows, count: int, dim: int) -> np.ndarray:
    out, slots = np.full((count, dim), np.nan, np.float32), np.arange(count)
    cpu.launch(cpu.rows.gather, rows, slots, slots.astype(np.int32), out[:0], out)
    return out


@EVERY
@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 70)), elements=LARGE))
def test_a_weight_is_off_by_half_a_stored_scale(dtype: str, values: np.ndarray):
    wide = values.max(1).astype(np.float64) - values.min(1).astype(np.float64) > 3.3e38
    values[wide if dtype == "int4" else []] = 1
    rows = packed(dtype, values)
    check_bound(unpacked(rows, *values.shape), values, scales_of(rows, values.shape[1]))


@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 70)), elements=WEIGHTS))
def test_int8_takes_every_finite_row(values: np.ndarray):
    rows = packed("int8", values)
    got = unpacked(rows, *values.shape)
    check_bound(got, values, scales_of(rows, values.shape[1]))
    assert not got[values == 0].any()  # zero is exact


@EVERY
@pytest.mark.parametrize("dim", [1, 31, 32, 33])
def test_rows_of_edge_values(dtype: str, dim: int):
    values = np.array([[a] * (dim // 2) + [b] * (dim - dim // 2) for a, b in itertools.product(EDGES, EDGES)], "f4")
    if dtype == "int4":
        values = values[np.ptp(values.astype(np.float64), axis=1) < 3.3e38]
    rows = packed(dtype, values)
    check_bound(unpacked(rows, *values.shape), values, scales_of(rows, dim))


@EVERY
def test_the_bound_notices_a_code_that_is_not_the_nearest(dtype: str):
    values = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    rows = packed(dtype, values)
    rows.codes[2, 7] ^= 3
    with pytest.raises(AssertionError):
        check_bound(unpacked(rows, *values.shape), values, scales_of(rows, 40))


@EVERY
def test_subnormal_weights_become_zero_of_the_same_code(dtype: str):
    tiny = np.array([[1e-45, -1e-39, 0, 1e-38]], np.float32)
    np.testing.assert_array_equal(packed(dtype, tiny).codes, packed(dtype, np.zeros_like(tiny)).codes)


@pytest.mark.parametrize("with_offsets", [False, True])
@pytest.mark.parametrize("scale_words", [np.float32, np.uint16, np.int16])
@pytest.mark.parametrize(("code_words", "group"), [(np.int8, 32), (np.int8, 5), (np.uint8, 32), (np.uint8, 128)])
def test_views_of_regions(code_words: type, group: int, scale_words: type, with_offsets: bool):
    """Other forms have codes, scales and offsets apart, in words of any kind, or side by side in blocks."""
    rng, dim, count = np.random.default_rng(group), 70, 9
    codes = rng.integers(0, 256, (count, 200)).astype(np.uint8).view(code_words)
    words = reference.codec.encode_nearest(rng.standard_normal((count, 40)).astype(np.float32), scale_words)
    start = 3 if with_offsets else -1
    apart = PackedRows(codes, words, words[:, 7:30].copy(), 2, start, group)
    beside = PackedRows(codes[:, ::2], words[:, 1:], words[:, 7:], 1, start, group)
    for rows in (apart, beside) if scale_words is np.float32 else (apart,):
        np.testing.assert_array_equal(unpacked(rows, count, dim), reference.packed.unpack(rows, np.arange(count), dim))


def test_a_form_is_decoded_by_hand():
    codes, scales = np.array([[0x21, 0x83, 0x0F]], np.uint8), np.array([[0.5, 2]], np.float32)
    rows = PackedRows(codes, scales, np.array([[9, -1, 10]], np.float32), 0, 1, 4)
    assert unpacked(rows, 1, 5).tolist() == [[-0.5, 0.0, 0.5, 3.0, 40.0]]
    signed = PackedRows(np.array([[-127, 0, 2]], np.int8), scales, scales, 1, -1, 3)
    assert unpacked(signed, 1, 3).tolist() == [[-254.0, 0.0, 4.0]]


@pytest.mark.parametrize(
    ("dtype", "dim", "nbytes"),
    [
        *(("int8", 64, 68), ("int8", 16, 20), ("int8", 1, 8), ("int8", 33, 40)),
        *(("int4", 64, 40), ("int4", 1, 8), ("int4", 33, 28), ("int4", 31, 20)),
    ],
)
def test_bytes_of_a_record(dtype: str, dim: int, nbytes: int):
    assert Spec(None, dim, dtype, None, Zeros(), 0).record_bytes == nbytes


# ---------------------------------------------------------------- forms of published tables


@pytest.mark.parametrize("scale_words", [np.float32, np.uint16, np.int16, np.uint8])
@pytest.mark.parametrize("group", [1, 5, 32, 128])
def test_listed_values_and_powers_of_two(group: int, scale_words: type):
    rng, dim, count = np.random.default_rng(group), 70, 9
    codes = rng.integers(0, 256, (count, 77)).astype(np.uint8)
    values = rng.standard_normal(256).astype(np.float32)
    words = rng.integers(0, 256, (count, 160)).astype(np.uint8)
    if scale_words is not np.uint8:
        words = reference.codec.encode_nearest(rng.standard_normal((count, 160)).astype(np.float32), scale_words)
    for listed, start in ((values, -1), (values, 80), (None, -1)):
        own = codes if listed is not None else codes.view(np.int8)
        rows = PackedRows(own, words, words, 3, start, group, listed)
        with np.errstate(over="ignore"):
            expected = reference.packed.unpack(rows, np.arange(count), dim)
        np.testing.assert_array_equal(unpacked(rows, count, dim), expected)


def test_powers_of_two_are_those_of_the_format():
    powers = np.arange(256, dtype=np.uint8)[:, None]
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float().numpy()[:, None]
    np.testing.assert_array_equal(reference.codec.decode(powers), expected)
    rows = PackedRows(np.ones((256, 1), np.int8), powers, powers, 0, -1, 1)
    np.testing.assert_array_equal(unpacked(rows, 256, 1), expected)
    assert np.isnan(expected[255])
    assert expected[[0, 127, 254], 0].tolist() == [2.0**-127, 1.0, 2.0**127]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_values_of_8_bit_floats_are_those_of_torch(dtype: str):
    values = CODES["F8_E4M3" if "e4m3" in dtype else "F8_E5M2"]
    expected = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    assert values is not None
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values[expected == 0]), np.signbit(expected[expected == 0]))
