"""16-bit weights: torch and the published definition as oracles, and stochastic rounding that is unbiased."""

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
from hypothesis.extra import numpy as arrays

import reference
from embedrock.kernels import cpu
from embedrock.kernels.cpu.codec import store_row
from embedrock.kernels.cpu.runtime import inlined

DEFINITION = (Path(__file__).resolve().parents[2] / "docs" / "first-values.md").read_text()
BFLOAT16, FLOAT16 = np.uint16, np.int16
STORAGES = pytest.mark.parametrize("storage", [BFLOAT16, FLOAT16, np.float32], ids=["bf16", "f16", "f32"])
NARROW = pytest.mark.parametrize("storage", [BFLOAT16, FLOAT16], ids=["bf16", "f16"])
# Any bits at all: every class of float32, NaN with payload included, with more weight on where formats end.
FLOATS = (
    st.floats(width=32)
    | st.integers(0, 2**32 - 1).map(lambda pattern: np.uint32(pattern).view(np.float32).item())
    | st.floats(2.0**-26, 2.0**-13, width=32)
    | st.floats(65000, 66000, width=32)
)
ONE = np.zeros(1, np.int64)  # the slot of the only row
ROWS = arrays.arrays(np.float32, st.integers(1, 70), elements=FLOATS)


@inlined
def rounded(words, values, row_id, seed, step):
    store_row(words, values, row_id, seed, step)


def call(backend: Any, kernel: str, *args: Any) -> None:
    function = getattr(backend.rows, kernel)
    cpu.launch(function, *args) if backend is cpu else function(*args)


def loaded(backend: Any, words: np.ndarray) -> np.ndarray:
    out = np.full(words.shape, np.nan, np.float32)
    call(backend, "gather", words[None], ONE, ONE, np.empty((0, len(words)), np.float32), out[None])
    return out


def nearest(backend: Any, values: np.ndarray, storage: Any) -> np.ndarray:
    words = np.full(values.shape, 77, storage)
    call(backend, "scatter", words[None], ONE, values[None])
    return words


def stochastic(backend: Any, values: np.ndarray, row_id: int, seed: int, step: int, storage: Any) -> np.ndarray:
    if backend is reference:
        return reference.codec.encode_stochastic(values[None], np.array([row_id]), seed, step, storage)[0]
    words = np.full(values.shape, 77, storage)
    rounded(words, values, row_id, np.uint64(seed), step)
    return words


def every_word(storage: Any) -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(storage)


def published_rounding() -> list[list[str]]:
    match = re.search(r"^\| step \| word r .*\n\| ---.*\n((?:\|.*\n)+)", DEFINITION, re.MULTILINE)
    assert match
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in match[1].splitlines()]


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("row", published_rounding(), ids=" ".join)
def test_published_rounding(backend: Any, row: list[str]):
    step, value = int(row[0]), np.array([int(row[2], 16)], np.uint32).view(np.float32)
    for storage, cells in ((BFLOAT16, row[4:6]), (FLOAT16, row[6:8])):
        words = [nearest(backend, value, storage), stochastic(backend, value, 12, 0, step, storage)]
        assert [f"{word.view(np.uint16)[0]:04x}" for word in words] == cells


@NARROW
def test_every_word_decodes_as_in_torch(storage: Any):
    torch = pytest.importorskip("torch")
    words = every_word(storage)
    expected = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16 if storage == BFLOAT16 else torch.float16)
    for backend in (reference, cpu):
        values = loaded(backend, words)
        np.testing.assert_array_equal(values, expected.float().numpy())
        np.testing.assert_array_equal(np.signbit(values), words.view(np.uint16) >= 0x8000)


@NARROW
def test_every_word_survives_both_roundings(storage: Any):
    words = every_word(storage)
    not_nan = ~np.isnan(loaded(cpu, words))
    for backend in (reference, cpu):
        values = loaded(backend, words)
        for again in (
            nearest(backend, values, storage),
            *(stochastic(backend, values, 3, 5, step, storage) for step in range(3)),
        ):
            np.testing.assert_array_equal(again[not_nan], words[not_nan])
            assert np.isnan(loaded(backend, again)[~not_nan]).all()


def assert_nearest_as_torch(values: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    for storage, dtype in ((BFLOAT16, torch.bfloat16), (FLOAT16, torch.float16)):
        expected = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
        number = ~np.isnan(values)
        for backend in (reference, cpu):
            words = nearest(backend, values, storage).view(np.uint16)
            np.testing.assert_array_equal(words[number], expected[number])
            assert np.isnan(loaded(backend, words.view(storage))[~number]).all()


@given(ROWS)
def test_nearest_is_torchs_rounding(values: np.ndarray):
    assert_nearest_as_torch(values)


@NARROW
def test_nearest_is_torchs_rounding_at_every_tie_and_beside_it(storage: Any):
    words = every_word(storage)[: 0x7F80 if storage == BFLOAT16 else 0x7C00]
    lower = loaded(cpu, words).astype(np.float64)
    ties = ((lower[:-1] + lower[1:]) / 2).astype(np.float32)
    for values in (ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))):
        assert_nearest_as_torch(values)
        assert_nearest_as_torch(-values)


@STORAGES
@given(
    values=ROWS,
    row_id=st.integers(-(2**63), 2**63 - 1),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**33),
)
def test_kernels_agree_bit_for_bit(storage: Any, values: np.ndarray, row_id: int, seed: int, step: int):
    ours, theirs = (stochastic(backend, values, row_id, seed, step, storage) for backend in (cpu, reference))
    np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))
    ours, theirs = (nearest(backend, values, storage) for backend in (cpu, reference))
    np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))
    np.testing.assert_array_equal(loaded(cpu, ours), loaded(reference, ours))


@given(values=ROWS)
def test_float32_rows_are_copied(values: np.ndarray):
    for copy in (nearest(cpu, values, np.float32), stochastic(cpu, values, 1, 2, 3, np.float32)):
        np.testing.assert_array_equal(copy.view(np.uint32), values.view(np.uint32))


@NARROW
@given(values=ROWS, step=st.integers(0, 2**32 - 1))
def test_stochastic_rounding_ends_at_a_neighbor(storage: Any, values: np.ndarray, step: int):
    rounded = loaded(cpu, stochastic(cpu, values, 9, 1, step, storage)).astype(np.float64)
    largest = loaded(cpu, np.array([0x7F7F if storage == BFLOAT16 else 0x7BFF], storage))[0].astype(np.float64)
    for value, result in zip(values.astype(np.float64), rounded, strict=True):
        if np.isnan(value) or np.isinf(value):
            np.testing.assert_equal(result, value)
        elif abs(value) >= largest:
            assert result == np.copysign(largest, value)
        else:
            assert abs(result - value) < spacing(abs(value), storage)
            assert np.signbit(result) == np.signbit(value)


def spacing(magnitude: float, storage: Any) -> float:
    """The distance between the two words around `magnitude`, from the definition of the formats."""
    fraction_bits, smallest_exponent = (7, -126) if storage == BFLOAT16 else (10, -14)
    exponent = max(int(np.floor(np.log2(magnitude))) if magnitude else smallest_exponent, smallest_exponent)
    return 2.0 ** (exponent - fraction_bits)


# --- unbiased: the mean over many steps is the value, for values at every position between their neighbors

ROUNDS = 4096


def values_between_words(storage: Any) -> np.ndarray:
    random = np.random.default_rng(7)
    values = random.normal(size=64) * 2.0 ** random.integers(-8, 8, 64)
    values[:8] = 1 + np.array([1, 2, 3, 5, 8, 250, 254, 255]) / 256 * spacing(1.0, storage)
    values[8:12] = np.array([0.05, 0.3, 0.9, 1.7]) * 2.0 ** (-133 if storage == BFLOAT16 else -24)  # subnormals
    return values.astype(np.float32)


def bias_in_standard_errors(encode: Callable[[np.ndarray, int], np.ndarray], storage: Any) -> np.ndarray:
    """How far the mean of `ROUNDS` encodings of each value lies from the value, in standard errors."""
    values = values_between_words(storage)
    exact = values.astype(np.float64)
    below = np.floor(np.abs(exact) / (unit := np.array([spacing(v, storage) for v in np.abs(exact)]))) * unit
    position = (np.abs(exact) - below) / unit
    mean = np.mean([loaded(cpu, encode(values, step)).astype(np.float64) for step in range(ROUNDS)], axis=0)
    return np.abs(mean - exact) / (unit * np.sqrt(position * (1 - position) / ROUNDS))


@NARROW
def test_stochastic_rounding_is_unbiased_over_steps(storage: Any):
    errors = bias_in_standard_errors(lambda values, step: stochastic(cpu, values, 5, 3, step, storage), storage)
    assert errors.max() < 4.5
    assert 0.7 < np.sqrt(np.mean(errors**2)) < 1.3  # neither too wide nor too good: independent steps


@NARROW
def test_stochastic_rounding_is_unbiased_over_ids(storage: Any):
    errors = bias_in_standard_errors(lambda values, row_id: stochastic(cpu, values, row_id, 3, 8, storage), storage)
    assert errors.max() < 4.5


@NARROW
def test_the_test_of_bias_notices_other_roundings(storage: Any):
    def truncated(values: np.ndarray, _step: int) -> np.ndarray:
        words = nearest(reference, np.abs(values), storage)
        words -= loaded(cpu, words) > np.abs(values)
        return nearest(reference, np.copysign(loaded(cpu, words), values), storage)

    def alternating(values: np.ndarray, step: int) -> np.ndarray:
        return truncated(values, step) if step % 2 else nearest(cpu, values, storage)

    for wrong in (truncated, lambda values, _step: nearest(cpu, values, storage), alternating):
        assert bias_in_standard_errors(wrong, storage).max() > 6


@NARROW
def test_small_steps_accumulate(storage: Any):
    # The point of it all: a thousand steps of a tenth of a spacing. Rounding to nearest stays at 1 forever.
    row = np.ones(64, np.float32)
    step_size = np.float32(0.1 * spacing(1.0, storage))
    stuck = row.copy()
    for step in range(1000):
        row = loaded(cpu, stochastic(cpu, row + step_size, 4, 0, step, storage))
        stuck = loaded(cpu, nearest(cpu, stuck + step_size, storage))
    assert (stuck == 1).all()
    standard_error = spacing(1.0, storage) * np.sqrt(1000 * 0.1 * 0.9 / 64)
    assert abs(row.mean(dtype=np.float64) - (1 + 1000 * np.float64(step_size))) < 4.5 * standard_error


@NARROW
def test_rounding_is_keyed_by_seed_id_column_and_step(storage: Any):
    values = np.full(64, 1 + spacing(1.0, storage) / 2, np.float32)
    key = {"row_id": 3, "seed": 5, "step": 7}
    words = stochastic(cpu, values, **key, storage=storage)
    np.testing.assert_array_equal(stochastic(cpu, values, **key, storage=storage), words)
    np.testing.assert_array_equal(stochastic(cpu, values[:13], **key, storage=storage), words[:13])
    assert 10 < (words != words[0]).sum() < 54
    for name in key:
        changed = stochastic(cpu, values, **{**key, name: key[name] + 2**32 * (name != "step") + 1}, storage=storage)
        assert 10 < (changed != words).sum() < 54, name


@NARROW
def test_rows_are_rounded_alike_in_a_batch_in_any_order(storage: Any):
    ids = np.array([7, -3, 2**31, 2**32, 2**31 - 1], np.int64)
    values = np.random.default_rng(2).normal(size=(5, 19)).astype(np.float32)
    batch = reference.codec.encode_stochastic(values, ids, 11, 6, storage)
    backwards = reference.codec.encode_stochastic(values[::-1], ids[::-1], 11, 6, storage)[::-1]
    rows = np.array([stochastic(cpu, row, int(i), 11, 6, storage) for row, i in zip(values, ids, strict=True)])
    np.testing.assert_array_equal(backwards, batch)
    np.testing.assert_array_equal(rows, batch)


@STORAGES
@pytest.mark.parametrize("dim", [1, 3, 4, 63, 64, 65])
def test_a_row_is_written_and_nothing_else(storage: Any, dim: int):
    values = np.linspace(-2, 2, dim, dtype=np.float32)
    for write in (
        lambda words: rounded(words[0], values, 1, np.uint64(2), 3),
        lambda words: call(cpu, "scatter", words, ONE, values[None]),
    ):
        memory = np.full(dim + 2, 123, storage)
        write(memory[None, 1:-1])
        assert memory[[0, -1]].tolist() == [123, 123]
        assert (memory[1:-1] != 123).all()
    out = np.full(dim + 2, np.nan, np.float32)
    call(cpu, "gather", memory[None, 1:-1], ONE, ONE, np.empty((0, dim), np.float32), out[None, 1:-1])
    assert np.isnan(out).tolist() == [True, *[False] * dim, True]


def test_the_c_program_rounds_the_same(c_rounding: Callable[..., list[int]]):
    random = np.random.default_rng(0)
    values = random.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    values[:2000] = random.normal(size=2000) * 2.0 ** random.integers(-30, 16, 2000)
    draws = np.empty((1, 4000), np.uint32)
    reference.generator.rounding_words(np.array([8]), 9, 10, draws)
    for name, storage in (("bfloat16_of", BFLOAT16), ("float16_of", FLOAT16)):
        words = stochastic(cpu, values, 8, 9, 10, storage).view(np.uint16)
        assert words.tolist() == c_rounding(name, values.tolist(), draws[0].tolist())


@pytest.fixture(scope="module")
def c_rounding(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[int]]:
    """The rounding functions of the C program in the definition, compiled: (name, values, draws) -> words."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) on the path")
    source = re.search(r"^```c\n(.*?)^```", DEFINITION, re.MULTILINE | re.DOTALL)
    assert source
    folder = tmp_path_factory.mktemp("definition")
    (folder / "rounding.c").write_text(source[1])
    options = ["-std=c99", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "rounding.c", "-o", "rounding.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "rounding.so"))

    def rounded(name: str, values: list[float], draws: list[int]) -> list[int]:
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_float, ctypes.c_uint32], ctypes.c_uint16
        return [function(value, draw) for value, draw in zip(values, draws, strict=True)]

    return rounded
