"""The Triton kernels against the reference, and bit for bit against the CPU kernels."""

from __future__ import annotations

import itertools
import types
from typing import Any

import home_kernels
import numpy as np
import pytest
import torch
from gpu_device import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tensors import table, verdicts

import reference
from embedrock.initializers import Zeros
from embedrock.kernels import arguments, cpu, gpu
from embedrock.kernels.arguments import SGDStep
from embedrock.kernels.gpu import addresses as homes
from embedrock.kernels.gpu import rows
from embedrock.kernels.gpu.addresses import DeviceTables
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.optimizers import SGD, Adam, AdamW, Ftrl, Momentum, RMSprop, RowwiseAdagrad, Rule, StateColumn
from embedrock.spec.spec import STORAGES, Spec
from slow import slow
from suites import KernelSuite
from suites.kernels import DEFAULTS, DIMS, FORMS, Guarded, poison, step_numbers

PADDING = 3  # keys beyond count, which no kernel may look at
NOWHERE = 2**50  # a slot whose address crashes
NAMES = {words: name for name, words in STORAGES.items()}
ALL_RULES = [*DEFAULTS, *FORMS]
ROUNDED = arguments.RowwiseStep, arguments.DenseMomentumStep, arguments.DenseRMSpropStep, arguments.DenseAdamStep


class OnDevice:
    """Arrays as tensors on the device, for one call: what it writes comes back to the arrays."""

    def __init__(self) -> None:
        self._pairs: list[tuple[np.ndarray, torch.Tensor]] = []

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *_: Any) -> None:
        for array, tensor in self._pairs:
            if tensor.device.type != "cpu":
                array[...] = tensor.cpu().numpy()

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array).to(DEVICE)
        self._pairs.append((array, tensor))
        return tensor

    def keys(self, slots: np.ndarray) -> torch.Tensor:
        """Return slots as keys; what is beyond count is the slot of no memory."""
        return torch.from_numpy(np.append(slots, [NOWHERE] * PADDING)).to(DEVICE)

    def table(self, records: np.ndarray, form: RecordForm, where: np.ndarray | None = None, **of: Any) -> DeviceTables:
        """Return a table of records, by slot, all of them far."""
        memory = 0, self.tensor(owner(records)).data_ptr()
        return table(form, memory, None if where is None else self.tensor(where), **of)

    def numbers(self, numbers: Any) -> Any:
        parts = (torch.from_numpy(part).to(DEVICE) if isinstance(part, np.ndarray) else part for part in numbers)
        return type(numbers)(*parts)


def owner(records: np.ndarray) -> np.ndarray:
    """Return the contiguous float32 array (slots, record floats) that `records` is the start of."""
    stride, size = records.strides[0], records.itemsize
    return np.lib.stride_tricks.as_strided(records, (len(records), stride // size), (stride, size)).view(np.float32)


def one(value: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype, device=DEVICE)


def bounds() -> torch.Tensor:
    """Return the bounds of a table without a padding row."""
    return one(-1).repeat(3)


def form_of(words: np.ndarray, dim: int, state_start: int = 0, state_width: int = 0) -> RecordForm:
    return RecordForm(dim, NAMES[words.dtype], words.strides[0], state_start, state_width)


def gather(words, slots, positions, fresh, out, lo, hi):
    with OnDevice() as on:
        keys, form = on.keys(slots[positions[lo:hi]]), form_of(words, out.shape[1])
        args = one(hi - lo), on.table(words, form), on.tensor(out[lo:hi])
        gpu.rows.read(keys, *args, fresh=on.tensor(fresh))


def scatter(words, slots, values, lo, hi):
    with OnDevice() as on:
        keys, form = on.keys(slots[lo:hi]), form_of(words, values.shape[1])
        home_kernels.scatter(keys, on.tensor(values[lo:hi]), one(hi - lo), on.table(words, form))


def scatter_stochastic(words, slots, values, ids, seed, step, lo, hi):
    # Where weights are 0, a step of -1 makes them the gradients.
    dim = values.shape[1]
    words[slots[lo:hi], :dim] = 0
    run_step(words, slots[lo:hi], values[lo:hi], SGDStep(-1.0), form_of(words, dim), ids[lo:hi], seed, step)


def run_step(records, slots, values, numbers, form, ids, seed, step, clip=None, factor=1.0, live=1):
    with OnDevice() as on:
        of_rows = on.tensor(ids), one(len(slots)), bounds(), on.table(records, form, seed=seed), (0, 1)
        gradients = on.tensor(values), verdicts([live], factor), clip
        gpu.rows.step(on.keys(slots), *of_rows, *gradients, step, on.numbers(numbers))


def step(words, records, slots, state_start, state_width, values, numbers, scratch, ids, seed, step, lo, hi):
    form = form_of(words, values.shape[1], state_start, state_width)
    run_step(records, slots[lo:hi], values[lo:hi], numbers, form, ids[lo:hi], seed, step)


def refresh(weights, records, slots, state_start, scratch, numbers, lo, hi):
    form, fresh = form_of(records, weights.shape[1], state_start, scratch.shape[1]), weights[lo:hi][slots[lo:hi] < 0]
    with OnDevice() as on:
        args = on.keys(slots[lo:hi]), one(hi - lo), on.table(records, form), on.tensor(weights[lo:hi])
        gpu.rows.read(*args, fresh=on.tensor(fresh), stale=on.numbers(numbers))


class TestGPU(KernelSuite):
    backend: Any = types.SimpleNamespace(
        rows=types.SimpleNamespace(gather=gather, scatter=scatter, step=step, refresh=refresh)
    )
    splits = (0.0, 1.0)
    test_gather_and_scatter_packed: Any = None  # the CPU decodes such rows

    # The interpreter is slow; other widths are those of test_steps_are_those_of_the_cpu and test_rows_of_any_width.
    @pytest.mark.parametrize("dim", [3, *slow(1, 8, 17, 64)])
    @pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
    def test_step(self, rule: Rule, dim: int) -> None:
        super().test_step(rule, dim)

    # Directories are on the CPU; records begin whole (test_begin); sums have files of their own (test_gpu_sums.py).
    test_look_up: Any = None
    test_put: Any = None
    test_direct_directory: Any = None
    test_hashed_directory: Any = None
    test_sketch: Any = None
    test_touch: Any = None
    test_values_of_ids: Any = None
    test_reset_state: Any = None
    test_row_squares: Any = None


def make_records(rng: np.random.Generator, slots: int, rule: Rule | None, dim: int, dtype: str) -> tuple[Any, Spec]:
    spec = Spec(None, dim, dtype, rule, Zeros(), 0)
    return KernelSuite().records(rng, slots, spec.layout, dtype)[1], spec


def form_for(spec: Spec) -> RecordForm:
    return RecordForm(spec.dim, spec.dtype, *spec.layout[:3])


def words_of(records: np.ndarray, spec: Spec) -> np.ndarray:
    return records.view(spec.words)[:, : spec.dim]


DRAWN = [
    ("constant", 0.3, 0.0),
    ("uniform", -1e-7, 0.01),
    ("uniform", -3.0, 5.0),
    ("normal", 0.3, 0.7),
    ("truncated_normal", 0.3, 0.7, 0.02275),
]
SEED = -(2**63) + 12345


def first_values(drawn: tuple[Any, ...], ids: np.ndarray, dim: int) -> np.ndarray:
    """Return those of the CPU, not rounded."""
    (kind, *numbers), out = drawn, np.empty((len(ids), dim), np.float32)
    made = (ids, numbers[0]) if kind == "constant" else (ids, np.uint64(SEED % 2**64), *numbers)
    getattr(cpu.generator, f"{kind}_values")(*made, out, 0, len(ids))
    return out


def any_ids(rng: np.random.Generator) -> np.ndarray:
    return np.append(rng.integers(-(2**63), 2**63 - 1, 9), [0, -1, 2**63 - 1, -(2**63)])


BEGINNINGS = list(itertools.product(DRAWN, STORAGES))


def drawn_rows() -> list[Any]:
    """Return all widths, distributions and types, every third pair with one type. All others are slow."""
    pairs, dtypes = list(itertools.product([1, 37, 64, 1030], DRAWN)), list(STORAGES)
    cases = [(*pair, dtypes[(k + more) % len(dtypes)]) for more in range(len(dtypes)) for k, pair in enumerate(pairs)]
    return [*cases[: len(pairs) : 3], *slow(*(case for k, case in enumerate(cases) if k % 3 or k >= len(pairs)))]


@pytest.mark.parametrize(("dim", "drawn", "dtype"), drawn_rows(), ids=str)
def test_rows_without_a_record_have_the_first_values_of_the_cpu(dim: int, drawn: tuple[Any, ...], dtype: str) -> None:
    rng = np.random.default_rng(dim)
    ids, slots = any_ids(rng), 1 + rng.permutation(19)[:13]
    records, spec = make_records(rng, 20, None, dim, dtype)
    words, before = words_of(records, spec), records.copy()
    expected = reference.codec.decode(reference.codec.encode_nearest(first_values(drawn, ids, dim), words.dtype.type))
    where, has = np.full(20, homes.FAR, np.int32), np.arange(13) % 3 == 1
    where[0] = homes.ABSENT
    expected[has] = reference.codec.decode(words[slots[has]])
    got, each = Guarded((13, dim), np.float32), Guarded((29, dim), np.float32)
    with OnDevice() as on:
        first = rows.InitialRecord(drawn, on.tensor(np.zeros(1, np.float32)))
        of = on.table(records, form_for(spec), where, first=first, seed=SEED)
        keys, inverse = on.keys(np.where(has, slots, ids)), rng.integers(0, 13, 29).astype(np.int32)
        gpu.rows.read(keys, one(13), of, on.tensor(got.inside))
        gpu.rows.read(keys, one(29), of, on.tensor(each.inside), on.tensor(ids), of=on.tensor(inverse))
    np.testing.assert_array_equal(got.inside.view(np.int32), expected.view(np.int32))
    np.testing.assert_array_equal(each.inside.view(np.int32), expected[inverse].view(np.int32))
    np.testing.assert_array_equal(records.view(np.int32), before.view(np.int32))
    got.check()
    each.check()


# Any bits at all: every class of float32, with more weight on where formats end.
FLOATS = (
    st.integers(0, 2**32 - 1).map(lambda pattern: np.uint32(pattern).view(np.float32).item())
    | st.floats(2.0**-26, 2.0**-13, width=32)
    | st.floats(65000, 66000, width=32)
)


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float16")])
@given(data=st.data())
@settings(max_examples=6)
def test_rounding_of_any_value(dtype: str, data: st.DataObject) -> None:
    values = data.draw(arrays.arrays(np.float32, (2, 70), elements=FLOATS))
    words, ids, seed = np.zeros((2, 70), STORAGES[dtype]), np.array([-5, 2**40]), np.uint64(2**64 - 3)
    expected, slots = words.copy(), np.arange(2)
    scatter(words, slots, values, 0, 2)
    cpu.rows.scatter(expected, slots, values, 0, 2)
    same_words(words, expected)
    values += np.float32(0)  # a step makes no negative zeros of zeros
    scatter_stochastic(words, slots, values, ids, seed, 2**32 - 1, 0, 2)
    expected[:] = reference.codec.encode_stochastic(values, ids, seed, 2**32 - 1, STORAGES[dtype])
    same_words(words, expected)


def same_words(got: np.ndarray, expected: np.ndarray) -> None:
    """Compare bits, and NaN as NaN: a GPU's arithmetic keeps no sign of it."""
    is_nan = np.isnan(reference.codec.decode(expected))
    np.testing.assert_array_equal(np.isnan(reference.codec.decode(got)), is_nan)
    np.testing.assert_array_equal(got[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_word_decodes(dtype: str) -> None:
    words = np.arange(2**16, dtype=np.uint16).view(STORAGES[dtype]).reshape(16, 4096)
    got, expected = (np.empty((16, 4096), np.float32) for _ in range(2))
    args = words, np.arange(16), np.arange(16, dtype=np.int32), np.empty((0, 4096), np.float32)
    gather(*args, got, 0, 16)
    cpu.rows.gather(*args, expected, 0, 16)
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


BEGUN = list(itertools.product([None, Adam(dense=True)], [*DIMS, 1030], STORAGES))


@pytest.mark.parametrize(
    ("rule", "dim", "dtype"), [*BEGUN[::4], *slow(*(case for k, case in enumerate(BEGUN) if k % 4))], ids=str
)
def test_begin(rule: Rule | None, dim: int, dtype: str) -> None:
    check_begin(rule, dim, dtype, ("normal", 0.3, 0.7))


@pytest.mark.parametrize(
    ("drawn", "dtype"), [*BEGINNINGS[::4], *slow(*(case for k, case in enumerate(BEGINNINGS) if k % 4))], ids=str
)
def test_records_begin_with_the_first_values_of_the_cpu(drawn: tuple[Any, ...], dtype: str) -> None:
    check_begin(Adam(), 37, dtype, drawn)


def check_begin(rule: Rule | None, dim: int, dtype: str, drawn: tuple[Any, ...]) -> None:
    rng = np.random.default_rng(dim)
    records, spec = make_records(rng, 20, rule, dim, dtype)
    records[:] = poison(records.shape, np.float32)
    expected, ids, slots = records.copy(), any_ids(rng), rng.permutation(20)[:13]
    first, new = rng.random(spec.layout.state_width).astype(np.float32), rng.integers(0, 2, 13) != 0
    begun, there = slots[new], slots[~new]
    expected[begun] = 0
    cpu.rows.scatter(words_of(expected, spec), slots, first_values(drawn, ids, dim), 0, 13)
    expected[there] = records[there]
    cpu.rows.reset_state(expected, begun, spec.layout.state_start, first, 0, len(begun))
    words_of(records, spec)[there], words_of(expected, spec)[there] = 0, 0  # no NaN, whose bits a step may change
    where = np.full(20, homes.FAR, np.int32)
    where[begun] = homes.ABSENT
    for live, wanted in ((0, records.copy()), (1, expected)):
        with OnDevice() as on:
            grads, numbers = torch.zeros(13, dim, device=DEVICE), on.tensor(np.append(ids, [5] * PADDING))
            begins = rows.InitialRecord(drawn, on.tensor(first))
            of = on.table(records, form_for(spec), where, first=begins, seed=SEED)
            args = one(13), bounds(), of, (0, 1), grads, verdicts([live]), None, 1, SGDStep(1.0)
            gpu.rows.step(on.keys(slots), numbers, *args)
        np.testing.assert_array_equal(records.view(np.int32), wanted.view(np.int32))
    assert (where == homes.FAR).all()


def cpu_step(records: np.ndarray, spec: Spec, slots: np.ndarray, grads: np.ndarray, numbers: Any, *args: Any) -> None:
    """Do what `Records` of a table does."""
    scratch = None if spec.dtype == "float32" else np.empty((1, spec.dim), np.float32)
    where = slots, spec.layout.state_start, spec.layout.state_width
    cpu.rows.step(words_of(records, spec), records, *where, grads, numbers, scratch, *args, 0, len(slots))


def random_records(rng: np.random.Generator, slots: int, rule: Rule, dim: int, dtype: str, step: int) -> Any:
    """Return records that were last stepped before `step`, and their description."""
    records, spec = make_records(rng, slots, rule, dim, dtype)
    if StateColumn("last_step", per_row=True) in rule.state():
        last = rng.integers(0, step, slots).astype(np.int32)
        records[:, spec.layout.state_start + spec.layout.state_width - 1] = last.view(np.float32)
    return records, spec


@pytest.mark.parametrize("dtype", ["float32", *slow(*(name for name in STORAGES if name != "float32"))])
@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
def test_steps_are_those_of_the_cpu(rule: Rule, dtype: str) -> None:
    check_steps(rule, dtype, 17, 11)


WIDE = list(
    itertools.product(
        [SGD(), RowwiseAdagrad(), Adam(), Adam(dense=True)],
        [(1, "float32"), (2, "bfloat16"), (64, "float32"), (2500, "bfloat16")],
    )
)


@pytest.mark.parametrize(
    ("rule", "width"), [*WIDE[::3], *slow(*(case for k, case in enumerate(WIDE) if k % 3))], ids=str
)
def test_rows_of_any_width(rule: Rule, width: tuple[int, str]) -> None:
    dim, dtype = width
    check_steps(rule, dtype, dim, 3)


# Ftrl's kernels divide by the rate.
RESTING = Ftrl(lr=0), Ftrl(lr=0, dense=True), *(rule for rule in FORMS if isinstance(rule, Ftrl))


@pytest.mark.parametrize("rule", [*RESTING, *slow(*(r for r in ALL_RULES if r not in RESTING))], ids=repr)
def test_steps_with_a_rate_of_zero_are_those_of_the_cpu(rule: Rule) -> None:
    """Also after other steps, which count under dense rules."""
    check_steps(rule, "float32", 3, 5, zeros=2)


# They fade fast, so that what is left of a long absence is made at once.
FADING = [
    Momentum(momentum=0.5, nesterov=True, dense=True),
    RMSprop(alpha=0.5, dense=True),
    Adam(betas=(0.5, 0.9), dense=True),
    *slow(AdamW(lr=0.1, betas=(0.5, 0.9), dense=True)),
]


@pytest.mark.parametrize("rule", FADING, ids=repr)
def test_long_absences(rule: Rule) -> None:
    check_steps(rule, "float32", 5, 200)


def check_steps(rule: Rule, dtype: str, dim: int, step: int, zeros: int = 0) -> None:
    rng, numbers = np.random.default_rng(dim), step_numbers(rule, step, zeros)
    records, spec = random_records(rng, 20, rule, dim, dtype, step)
    expected, slots, ids = records.copy(), rng.permutation(20)[:7], rng.integers(-(2**63), 2**63 - 1, 7)
    grads = (rng.standard_normal((7, dim)) * 10.0 ** rng.integers(-9, 3, (7, dim))).astype(np.float32)
    cpu_step(expected, spec, slots, np.clip(grads * np.float32(0.3), -4, 4), numbers, ids, np.uint64(9), step)
    run_step(records, slots, grads, numbers, form_for(spec), ids, 9, step, 4.0, 0.3)
    if isinstance(numbers, ROUNDED):
        assert_close(records, expected, spec)
    else:
        np.testing.assert_array_equal(records.view(np.int32), expected.view(np.int32))


def assert_close(records: np.ndarray, expected: np.ndarray, spec: Spec) -> None:
    """Compare what may differ in the last place, which a rounded weight does seldom."""
    same = words_of(records, spec) == words_of(expected, spec)
    assert same.mean() > 0.97
    start = spec.layout.state_start
    np.testing.assert_allclose(records[:, start:], expected[:, start:], rtol=3e-7, atol=0)
    got, wanted = (reference.codec.decode(words_of(part, spec)) for part in (records, expected))
    np.testing.assert_allclose(got, wanted, rtol=3e-7 if spec.dtype == "float32" else 8e-3, atol=1e-7)


@pytest.mark.parametrize("rule", [SGD(), Adam(), Momentum(dense=True), Adam(dense=True)], ids=repr)
def test_rows_that_are_left_out(rule: Rule) -> None:
    rng = np.random.default_rng(0)
    records, spec = random_records(rng, 8, rule, 3, "float16", 5)
    before, grads, numbers = records.copy(), np.ones((4, 3), np.float32), step_numbers(rule, 6)
    slots = np.array([2, -1, -(2**62), 5])
    args = grads, numbers, form_for(spec), np.arange(4), 0, 6
    run_step(records, slots, *args, live=0)
    np.testing.assert_array_equal(records.view(np.int32), before.view(np.int32))
    run_step(records, slots, *args)
    scatter(words_of(before, spec), np.array([-1]), np.full((1, 3), np.nan, np.float32), 0, 1)
    stepped = np.flatnonzero((records.view(np.int32) != before.view(np.int32)).any(axis=1))
    assert stepped.tolist() == [2, 5]


def test_clipping_keeps_what_is_no_number() -> None:
    records = np.zeros((1, 4), np.float32)
    grads = np.array([[np.nan, np.inf, -np.inf, 0.5]], np.float32)
    run_step(
        records, np.zeros(1, int), grads, SGDStep(1.0), RecordForm(4, "float32", 16, 4, 0), np.zeros(1, int), 0, 1, 2.0
    )
    np.testing.assert_array_equal(records, [[np.nan, -2, 2, -0.5]])
