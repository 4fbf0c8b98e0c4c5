"""First values: the published definition, bit-equality of the kernels, and the distributions themselves."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import embedrock as er
import reference
from embedrock.kernels import cpu
from suites.kernels import AsLaunched

CPU = AsLaunched(cpu.generator)
DEFINITION = (Path(__file__).resolve().parents[2] / "docs" / "first-values.md").read_text()
IDS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(
    [edge + offset for edge in (0, 2**31, 2**32, -(2**31), -(2**32)) for offset in (-1, 0, 1)]
)
SEEDS = st.integers(0, 2**64 - 1)
BEYOND = er.TruncatedNormal().beyond
PARAMETERS = {
    "uniform_values": (-0.3, 0.7),
    "normal_values": (0.1, 0.02),
    "truncated_normal_values": (0.1, 0.02, BEYOND),
    "constant_values": (0.25,),
}


def table(header: str) -> list[list[str]]:
    """The cells of the table in the definition whose header row begins with `header`, without code marks."""
    match = re.search(rf"^\| {re.escape(header)}.*\n\| ---.*\n((?:\|.*\n)+)", DEFINITION, re.MULTILINE)
    assert match, f"docs/first-values.md has no table {header!r}"
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in match[1].splitlines()]


def bits(values: Any) -> np.ndarray:
    return values.view(np.uint32)


def by_reference(name: str, ids: Any, seed: int, dim: int, *parameters: Any, dtype: Any = np.float32) -> np.ndarray:
    out = np.empty((len(ids), dim), dtype)
    arguments = parameters if name == "constant_values" else (seed, *parameters)
    getattr(reference.generator, name)(np.asarray(ids, np.int64), *arguments, out)
    return out


def by_cpu(name: str, ids: Any, seed: int, dim: int, *parameters: Any, dtype: Any = np.float32) -> np.ndarray:
    out = np.empty((len(ids), dim), dtype)
    arguments = parameters if name == "constant_values" else (np.uint64(seed), *parameters)
    getattr(CPU, name)(np.asarray(ids, np.int64), *arguments, out, 0, len(ids))
    return out


BACKENDS = pytest.mark.parametrize("draw", [by_reference, by_cpu])


@pytest.mark.parametrize(("counter", "key", "output"), table("counter |"))
def test_known_answers_of_random123(counter: str, key: str, output: str):
    counter_words, key_words, expected = (
        np.array([int(word, 16) for word in text.split()], np.uint32) for text in (counter, key, output)
    )
    assert reference.generator.philox(counter_words, key_words).tolist() == expected.tolist()
    assert list(cpu.generator.philox(*counter_words, *key_words)) == expected.tolist()


@BACKENDS
@pytest.mark.parametrize("row", table("id | seed | column | word | uniform"), ids=" ".join)
def test_published_first_values(draw: Callable[..., np.ndarray], row: list[str]):
    row_id, seed, column, (_, uniform, normal) = int(row[0]), int(row[1]) % 2**64, int(row[2]), row[3:6]
    assert bits(draw("uniform_values", [row_id], seed, column + 1, -1.0, 1.0))[0, column] == int(uniform, 16)
    assert bits(draw("normal_values", [row_id], seed, column + 1, 0.0, 1.0))[0, column] == int(normal, 16)


@BACKENDS
@pytest.mark.parametrize("row", table("id | seed | column | step"), ids=" ".join)
def test_published_rounding_words(draw: Callable[..., np.ndarray], row: list[str]):
    row_id, seed, column, step = (int(cell) for cell in row[:4])
    words = draw("rounding_words", [row_id], seed, column + 1, step, dtype=np.uint32)
    assert words[0, column] == int(row[4], 16)


@pytest.mark.parametrize(("word", "z", "_rounded"), table("word | z |"))
def test_published_normal_quantiles(word: str, z: str, _rounded: str):
    drawn = np.uint32(int(word, 16))
    assert bits(reference.generator.standard_normal(np.array([drawn]))).tolist() == [int(z, 16)]
    assert bits(np.float32(cpu.generator.standard_normal(drawn))) == int(z, 16)


@pytest.mark.parametrize(("word", "z", "_rounded"), table("word | z of cut 2 |"))
def test_published_truncated_quantiles(word: str, z: str, _rounded: str):
    drawn, cut = np.uint32(int(word, 16)), np.float32(BEYOND)
    assert bits(reference.generator.truncated_normal(np.array([drawn]), BEYOND)).tolist() == [int(z, 16)]
    inside = np.float32(1) - np.float32(2) * cut
    assert bits(np.float32(cpu.generator.truncated_normal(drawn, cut, inside))) == int(z, 16)


def test_published_coefficients():
    rows = table("power | L | N | D")
    for column, ours in enumerate(("LOG_SERIES", "NUMERATOR", "DENOMINATOR"), start=1):
        published = [float.fromhex(row[column]) for row in rows if row[column]]
        assert [float(value) for value in getattr(reference.generator, ours)] == published


@pytest.fixture(scope="session")
def c_program(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The C program of the definition, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) on the path")
    source = re.search(r"^```c\n(.*?)^```", DEFINITION, re.MULTILINE | re.DOTALL)
    assert source
    folder = tmp_path_factory.mktemp("definition")
    (folder / "first_values.c").write_text(source[1])
    options = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "first_values.c", "-o", "first_values.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "first_values.so"))
    u32, f32 = ctypes.c_uint32, ctypes.c_float
    library.word_of.argtypes, library.word_of.restype = [ctypes.c_uint64, ctypes.c_int64, u32, u32, u32], u32
    library.uniform_of.argtypes, library.uniform_of.restype = [u32, f32, f32], f32
    library.standard_normal_of.argtypes, library.standard_normal_of.restype = [u32], f32
    library.truncated_normal_of.argtypes, library.truncated_normal_of.restype = [u32, f32], f32
    return library


def test_the_c_program_gives_the_same_first_values(c_program: ctypes.CDLL):
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500)
    seed, column = 2**63 + 11, 6
    words = [c_program.word_of(seed, row_id, column, 0, 0) for row_id in ids.tolist()]
    uniform = by_cpu("uniform_values", ids, seed, 7, -0.3, 0.7)[:, column]
    normal = by_cpu("normal_values", ids, seed, 7, 0.0, 1.0)[:, column]
    assert uniform.tolist() == [c_program.uniform_of(word, -0.3, 0.7) for word in words]
    assert normal.tolist() == [c_program.standard_normal_of(word) for word in words]
    truncated = by_cpu("truncated_normal_values", ids, seed, 7, 0.0, 1.0, BEYOND)[:, column]
    assert truncated.tolist() == [c_program.truncated_normal_of(word, BEYOND) for word in words]
    rounding = by_cpu("rounding_words", ids, seed, 7, 5, dtype=np.uint32)[:, column]
    assert rounding.tolist() == [c_program.word_of(seed, row_id, column, 1, 5) for row_id in ids.tolist()]


@given(st.lists(IDS, min_size=1, max_size=9), SEEDS, st.integers(1, 150), st.integers(0, 2**32))
def test_kernels_agree_bit_for_bit(ids: list[int], seed: int, dim: int, step: int):
    for name, parameters in PARAMETERS.items():
        ours, theirs = (draw(name, ids, seed, dim, *parameters) for draw in (by_cpu, by_reference))
        np.testing.assert_array_equal(bits(ours), bits(theirs), err_msg=name)
    ours, theirs = (draw("rounding_words", ids, seed, dim, step, dtype=np.uint32) for draw in (by_cpu, by_reference))
    np.testing.assert_array_equal(ours, theirs)


def test_kernels_agree_on_every_kind_of_word():
    words = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32)
    words[:64] = [(1 << shift) - delta & 0xFFFFFFFF for shift in range(1, 33) for delta in (0, 1)]
    ours = np.array([cpu.generator.standard_normal(word) for word in words], np.float32)
    np.testing.assert_array_equal(bits(ours), bits(reference.generator.standard_normal(words)))


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("dim", [1, 3, 4, 50, 64, 65])
def test_a_call_writes_its_part_and_nothing_else(name: str, dim: int):
    ids = np.arange(11) * 1_000_003 - 5
    whole = by_cpu(name, ids, 9, dim, *PARAMETERS[name])
    seed = () if name == "constant_values" else (np.uint64(9),)
    for lo, hi in ((0, 4), (4, 11), (3, 3), (10, 11)):
        memory = np.full((len(ids) + 2, dim), np.nan, np.float32)
        getattr(CPU, name)(ids, *seed, *PARAMETERS[name], memory[1:-1], lo, hi)
        np.testing.assert_array_equal(memory[1 + lo : 1 + hi], whole[lo:hi])
        assert np.isnan(memory[: 1 + lo]).all()
        assert np.isnan(memory[1 + hi :]).all()


@pytest.mark.parametrize("name", ["uniform_values", "normal_values"])
def test_a_value_depends_on_seed_id_and_column_only(name: str):
    ids = np.array([2**33, -7, 5, 2**31, 5])
    values = by_cpu(name, ids, 3, 64, 0.0, 1.0)
    np.testing.assert_array_equal(by_cpu(name, ids[::-1], 3, 64, 0.0, 1.0)[::-1], values)
    np.testing.assert_array_equal(by_cpu(name, ids, 3, 17, 0.0, 1.0), values[:, :17])
    np.testing.assert_array_equal(values[2], values[4])
    assert len(np.unique(values[:4])) > 250
    assert (by_cpu(name, ids, 4, 64, 0.0, 1.0) != values).mean() > 0.99


def test_the_seed_may_be_signed():
    ids = np.array([5])
    out = np.empty((1, 8), np.float32)
    CPU.normal_values(ids, np.int64(-2), 0.0, 1.0, out, 0, 1)
    np.testing.assert_array_equal(out, by_cpu("normal_values", ids, 2**64 - 2, 8, 0.0, 1.0))
    np.testing.assert_array_equal(out, by_reference("normal_values", ids, -2, 8, 0.0, 1.0))


def test_the_normal_quantile_is_accurate_from_the_middle_to_the_tail():
    # Cells at every scale: the first 2**16 (the tail), the last 2**16 (the middle), and a sieve in between.
    k = np.concatenate([np.arange(2**16), 2**31 - 1 - np.arange(2**16), np.arange(2**16, 2**31, 10_007)])
    z = reference.generator.standard_normal((k << 1).astype(np.uint32)).astype(np.float64)
    exact = stats.norm.isf((k + 0.5) * 2.0**-32)
    assert np.max(np.abs(z - exact) / exact) < 3.8e-7
    assert np.max(np.abs(z - exact)[exact <= 4]) < 1.34e-6
    mirrored = reference.generator.standard_normal((k << 1 | 1).astype(np.uint32))
    np.testing.assert_array_equal(mirrored, -z)


@pytest.mark.parametrize("cut", [0.1, 0.5, 2.0, 3.0, 6.0])
def test_the_truncated_quantile_is_accurate_and_ends_at_the_cut(cut: float):
    beyond = er.TruncatedNormal(cut=cut).beyond
    k = np.concatenate([np.arange(2**12), 2**31 - 1 - np.arange(2**12), np.arange(2**12, 2**31, 100_003)])
    z = reference.generator.truncated_normal((k << 1).astype(np.uint32), beyond).astype(np.float64)
    exact = stats.norm.isf(beyond + (1 - 2 * beyond) * (k + 0.5) * 2.0**-32)
    assert np.max(np.abs(z - exact) / exact) < 2e-6
    assert z.max() <= cut * (1 + 2e-6)
    assert beyond == pytest.approx(stats.norm.sf(cut), rel=1e-7)
    nothing = reference.generator.truncated_normal((k << 1).astype(np.uint32), 0.0)  # is cut off
    np.testing.assert_array_equal(nothing, reference.generator.standard_normal((k << 1).astype(np.uint32)))


@pytest.fixture(scope="module")
def normal_million() -> np.ndarray:
    """2**20 + 2**16 standard normal values of consecutive ids (17408, 64), float64."""
    return by_cpu("normal_values", np.arange(17_408), 0, 64, 0.0, 1.0).astype(np.float64)


def test_normal_values_are_normal(normal_million: np.ndarray):
    # Each statistic in standard errors of its own: 4.5 of them is a chance of 7 in a million per assertion.
    values, n = normal_million.ravel(), normal_million.size
    assert abs(values.mean()) * np.sqrt(n) < 4.5
    assert abs(values.var() - 1) * np.sqrt(n / 2) < 4.5
    assert abs(stats.skew(values)) * np.sqrt(n / 6) < 4.5
    assert abs(stats.kurtosis(values)) * np.sqrt(n / 24) < 4.5
    assert stats.kstest(values, "norm").pvalue > 1e-4


def test_uniform_values_are_uniform():
    values = by_cpu("uniform_values", np.arange(17_408), 0, 64, 0.0, 1.0).astype(np.float64).ravel()
    assert 0 <= values.min() < 1e-5
    assert 1 - 1e-5 < values.max() < 1
    assert abs(values.mean() - 0.5) * np.sqrt(12 * values.size) < 4.5
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    counts = np.bincount((values * 256).astype(np.int64), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_neighbors_are_uncorrelated(normal_million: np.ndarray):
    other = by_cpu("normal_values", np.arange(len(normal_million)), 1, 64, 0.0, 1.0)
    distant = by_cpu("normal_values", np.arange(len(normal_million)) + 2**32, 0, 64, 0.0, 1.0)
    pairs = {
        "ids": (normal_million[1:], normal_million[:-1]),
        "columns": (normal_million[:, 1:], normal_million[:, :-1]),
        "columns, 4 apart": (normal_million[:, 4:], normal_million[:, :-4]),
        "seeds": (normal_million, other),
        "ids 2**32 apart": (normal_million, distant),
        "squares": (normal_million[1:] ** 2 - 1, normal_million[:-1] ** 2 - 1),
    }
    for name, (a, b) in pairs.items():
        standardized = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum() / a.size)
        assert abs(standardized) < 4.5, name
