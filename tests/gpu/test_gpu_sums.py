"""Sums over segments on the GPU against the reference: bit for bit where segments are short."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import race_detector
import torch
from gpu_device import INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import DEVICE, Poisoned, one, same, tensor

import reference
from embedrock.kernels.gpu import sums
from embedrock.kernels.gpu.sums import NO_SHARE
from reference import device
from slow import examples, slow

DIMS = 1, 3, 17, 64
SHORT = [1, 2, 5, 64, 3, 63, 1, 1]
LONG = [[65], [1, 64, 65, 1], [3, 128, 129, 2], [700], [1, 63, 66, 70, 64, 300, 1, 193, 2]]


class Plan(NamedTuple):
    """A batch's plan, as arrays."""

    starts: np.ndarray
    order: np.ndarray
    inverse: np.ndarray
    rows: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The plan on the device; what is beyond count is poison."""
        starts = Poisoned((len(self.order) + 1,), torch.int32).inside
        starts[: self.rows + 1] = tensor(self.starts[: self.rows + 1])
        return starts, tensor(self.order), tensor(self.inverse), one(self.rows)


def plan_of(sizes: list[int], seed: int = 0) -> Plan:
    """Return the plan of ids that occur so often, in random order."""
    keys = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    n, order = len(keys), np.argsort(keys, kind="stable")
    starts, inverse, count = np.empty(n + 1, np.int32), np.empty(n, np.int32), np.empty(1, np.int32)
    device.collect(keys[order], -1, order, np.empty(n, np.int64), starts, inverse, count)
    return Plan(starts, order, inverse, int(count[0]))


def expected_sums(grads: np.ndarray, plan: Plan, skip: int) -> np.ndarray:
    values, squares = np.zeros((plan.rows, grads.shape[1]), np.float32), np.zeros(plan.rows)
    reference.rows.sum_segments(grads, plan.starts, plan.order, values, squares)
    if skip >= 0:
        values[skip] = 0
    return values


class Room:
    """Poisoned memory for the sums of some tables, and zeroed counters."""

    def __init__(self, n: int, dim: int, tables: int = 1) -> None:
        later, squares = sums.partial_rows(n, tables), sums.square_sums(n, dim, tables)
        self.values, self.norms = Poisoned((n, dim), torch.float32), Poisoned((3 * tables,), torch.float32)
        self.tickets = Poisoned((tables + later,), torch.int32)
        self.tickets.inside.zero_()
        self._scratch = Poisoned((later, dim), torch.float32), Poisoned((squares,), torch.float64)

    @property
    def arguments(self) -> tuple[Any, ...]:
        partial, squares = self._scratch
        scratch = partial.inside, squares.inside, self.tickets.inside
        return scratch, self.values.inside, self.norms.inside

    def check(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Fail if anything else was written to; return the sums and the norms."""
        for part in self._scratch:
            part.check(len(part.inside))
        assert not self.tickets.check(len(self.tickets.inside)).any()  # they may be drawn again
        return self.values.check(rows), self.norms.check(len(self.norms.inside))


def layout_of(*cuts: int, dim: int) -> tuple[torch.Tensor, int]:
    """Return the words about tables with positions up to these cuts, and the last one."""
    words = sums.layout_of((0, *cuts), dim)
    return tensor(np.array(words)), words[-1]


def run(call: Any, plan: Plan, dim: int, skip: int) -> np.ndarray:
    """Call a kernel that sums over a plan, on poisoned memory; return its sums. Their norm must fit them."""
    room = Room(len(plan.order), dim)
    call(plan.tensors, one(skip), *room.arguments, *layout_of(len(plan.order), dim=dim))
    (got, norms), expected = room.check(plan.rows), np.empty(3, np.float32)
    device.norm(got, np.array([plan.rows], np.int32), expected)
    np.testing.assert_allclose(norms, expected, rtol=2e-7)
    return got


def summed(grads: torch.Tensor, plan: Plan, skip: int) -> np.ndarray:
    given = sums.PLAIN, grads, NO_SHARE
    return run(lambda plan, *rest: sums.sum_shares(*given, plan, *rest), plan, grads.shape[1], skip)


def close(got: np.ndarray, grads: np.ndarray, plan: Plan, expected: np.ndarray) -> None:
    """Compare sums that were added up in another order: within what rounding can do, and a wrong row cannot."""
    bound = np.zeros_like(expected, np.float64)
    np.add.at(bound, plan.inverse, np.abs(grads))
    sizes = np.diff(plan.starts[: plan.rows + 1])[:, None]
    assert (np.abs(got - expected.astype(np.float64)) <= bound * (sizes * 2.0**-24)).all()
    short = sizes[:, 0] <= sums.CHUNK
    same(got[short], expected[short])


DTYPES = torch.float32, torch.bfloat16, torch.float16
KINDS = [(dim, dtype) for dim in DIMS for dtype in DTYPES]


@pytest.mark.parametrize(("dim", "dtype"), [*KINDS[::4], *slow(*(kind for k, kind in enumerate(KINDS) if k % 4))])
def test_short_segments(dim: int, dtype: torch.dtype) -> None:
    plan, rng = plan_of(SHORT), np.random.default_rng(dim)
    grads = tensor(rng.standard_normal((140, dim + 3)).astype(np.float32)).to(dtype)[:, :dim]  # rows with a stride
    grads[tensor(plan.order[: plan.starts[2]])] = -0.0  # the sums of two segments, of one row and of two, are -0.0 too
    expected = expected_sums(grads.float().cpu().numpy(), plan, -1)
    same(summed(grads, plan, -1), expected)


LONGEST = [(LONG[-1], None), (LONG[-1], max), (LONG[1], min)]
OTHERS = [(sizes, skipped) for sizes in LONG for skipped in (None, min, max) if (sizes, skipped) not in LONGEST]


@pytest.mark.parametrize(("sizes", "skipped"), [*LONGEST, *slow(*OTHERS)], ids=str)
def test_long_segments(skipped: Any, sizes: list[int]) -> None:
    plan, dim = plan_of(sizes), 5
    skip = -1 if skipped is None else sizes.index(skipped(sizes))
    array = np.random.default_rng(dim).standard_normal((sum(sizes), dim)).astype(np.float32)
    close(summed(tensor(array), plan, skip), array, plan, expected_sums(array, plan, skip))


def test_rows_in_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows of more than 1024 columns are summed."""
    monkeypatch.setattr(sums, "COLUMNS", 8)
    for sizes in ([1, 5, 3], [2, 150, 1]):
        plan, dim = plan_of(sizes), 19
        array = np.random.default_rng(dim).standard_normal((sum(sizes), dim)).astype(np.float32)
        values = summed(tensor(array), plan, -1)
        close(values, array, plan, expected_sums(array, plan, -1))
        check_norm(values, len(sizes), rtol=2e-7)


def test_the_same_bits_again() -> None:
    plan, grads = plan_of(LONG[2]), torch.randn(sum(LONG[2]), 8, device=DEVICE)
    first, again = (summed(grads, plan, -1) for _ in range(2))
    same(first, again)


# ---------------------------------------------------------------- several tables


def of_tables(plans: list[Plan], skips: list[int], grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of tables, each with a plan, and their norms: (3, tables)."""
    k, dim = len(plans), grads.shape[1]
    cuts = np.cumsum([0, *(len(plan.order) for plan in plans)])
    bounds = np.cumsum([0, *(plan.rows for plan in plans)])
    starts = [plan.starts[: plan.rows] + cut for plan, cut in zip(plans, cuts, strict=False)]
    order = [plan.order + cut for plan, cut in zip(plans, cuts, strict=False)]
    inverse = [plan.inverse + bound for plan, bound in zip(plans, bounds, strict=False)]
    arrays = [np.concatenate(parts) for parts in ([*starts, cuts[-1:]], order, inverse)]
    whole = Plan(arrays[0].astype(np.int32), arrays[1], arrays[2].astype(np.int32), int(bounds[-1]))
    skip = [row + bound if row >= 0 else -1 for row, bound in zip(skips, bounds, strict=False)]
    room, ends = Room(len(grads), dim, k), tensor(np.append(bounds[1:], skip).astype(np.int32))
    plan = *whole.tensors[:3], ends[:k]
    given: Any = ends[k:], *room.arguments, *layout_of(*cuts[1:].tolist(), dim=dim)
    sums.sum_shares(sums.PLAIN, tensor(grads), NO_SHARE, plan, *given)
    values, norms = room.check(whole.rows)
    return values, norms.reshape(3, k)


def check_tables(tables: list[list[int]], dim: int, seed: int = 0) -> None:
    """Sum tables with so many positions of each row; each one's sums and norm must have the bits of it alone."""
    rng, plans = np.random.default_rng(seed), [plan_of(sizes, seed + k) for k, sizes in enumerate(tables)]
    skips = [int(rng.integers(-1, plan.rows)) for plan in plans]
    grads = rng.standard_normal((sum(map(sum, tables)), dim)).astype(np.float32)
    values, norms = of_tables(plans, skips, grads)
    begin = position = 0
    squares, unique, firsts = [], [], [0]
    for plan, skip, found in zip(plans, skips, norms.T, strict=True):
        end, own = begin + plan.rows, grads[position : position + len(plan.order)]
        alone = Room(len(own), dim)
        args: Any = plan.tensors, one(skip), *alone.arguments, *layout_of(len(own), dim=dim)
        sums.sum_shares(sums.PLAIN, tensor(own), NO_SHARE, *args)
        expected, norm = alone.check(plan.rows)
        same(values[begin:end], expected)
        same(found, norm)
        close(expected, own, plan, expected_sums(own, plan, skip))
        squares.append(np.square(expected, dtype=np.float64).sum(axis=1))
        unique.append(firsts[-1] + np.arange(plan.rows))
        firsts.append(firsts[-1] + plan.rows)
        begin, position = end, position + len(own)
    wanted, bounds = np.empty(3 * len(tables), np.float32), np.array(firsts, np.int32)
    every = np.concatenate(unique), bounds, np.concatenate(squares)
    device.norms(np.array(firsts), skips, *every, wanted)
    np.testing.assert_allclose(norms.reshape(-1), wanted, rtol=2e-7)


SEGMENTS = st.lists(st.sampled_from([1, 1, 2, 3, 63, 64, 65, 128, 129, 200]), max_size=3)


@settings(max_examples=examples(40), deadline=None)
@given(tables=st.lists(SEGMENTS, min_size=1, max_size=4).filter(any), dim=st.sampled_from([1, 5, 64, 300]))
def test_each_of_several_tables_has_the_bits_of_it_alone(tables: list[list[int]], dim: int) -> None:
    check_tables(tables, dim)


@pytest.mark.parametrize("k", [1, 2, 10, *slow(100)])
def test_many_tables(k: int) -> None:
    check_tables([[3, 64, 66][: number % 4] + [150] * (number % 7 == 1) for number in range(1, k + 1)], 3, k)


@pytest.mark.skipif(not INTERPRETED, reason="compute-sanitizer looks for races on a GPU: see on_gpu.py")
def test_no_program_depends_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = race_detector.install(monkeypatch)
    check_tables([[3, 66], [], [1, 130], [1]], 300)
    assert "_sum" in detector.launched
    assert detector.found == set()


def check_norm(values: np.ndarray, count: int, rtol: float = 0.0) -> None:
    """Compare the norm of the first rows with the reference; what is beyond is poison."""
    poisoned, norms = Poisoned((len(values) + 3, values.shape[1]), torch.float32), Poisoned((3,), torch.float32)
    poisoned.inside[: len(values)] = tensor(values)
    squares, tickets = Poisoned((sums.square_sums(*poisoned.inside.shape),), torch.float64), one(0)
    sums.norm(poisoned.inside, one(count), squares.inside, tickets, norms.inside)
    squares.check(len(squares.inside))
    expected = np.empty(3, np.float32)
    device.norm(values, np.array([count], np.int32), expected)
    np.testing.assert_allclose(norms.check(3), expected, rtol=rtol)
    assert tickets.item() == 0


@pytest.mark.parametrize("dim", [17, *slow(1, 3, 64)])
def test_norm_of_many_rows(dim: int) -> None:
    check_norm(np.random.default_rng(dim).standard_normal((2100, dim)).astype(np.float32), 2090, rtol=2e-7)


@pytest.mark.parametrize("value", [0.0, 1.5, 1e-30, 1e35, 3e38, float("inf"), float("nan")])
def test_norm(value: float) -> None:
    check_norm(np.full((1, 2), value, np.float32), 1)


def test_no_positions() -> None:
    nothing, none, norms = tensor(np.empty((0, 4), np.float32)), tensor(np.empty(0, np.int64)), torch.ones(3)
    scratch = nothing, none, none
    args = (none, none, none, one(0)), one(-1), scratch, nothing, norms, *layout_of(0, dim=4)
    sums.sum_shares(sums.PLAIN, nothing, NO_SHARE, *args)
    assert norms.tolist() == [0, 0, 0]
    norms += 1
    sums.norm(nothing, one(0), none, none, norms)
    assert norms.tolist() == [0, 0, 0]


def test_addresses_beyond_2_to_the_31() -> None:
    dim, far = 256, 2**31 // 256 + 5
    grads = torch.empty(far + 1, dim, device=DEVICE)  # little of it is ever touched
    rows = np.array([far, 3, far - 7])
    grads[tensor(rows)] = torch.arange(3 * dim, dtype=torch.float32, device=DEVICE).view(3, dim)
    plan = plan_of([2, 1])
    values = summed(grads, plan._replace(order=rows[plan.order]), -1)
    same(values, expected_sums(grads[tensor(rows)].cpu().numpy(), plan, -1))
