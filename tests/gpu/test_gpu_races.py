"""Kernels whose programs run in any order and at once, on memory that had anything in it before."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import race_detector
import torch
import triton.language as tl
from gpu_device import INTERPRETED
from gpu_models import (
    ALL_NEAR,
    HASHED,
    HOSTED,
    NONE_NEAR,
    OPEN,
    ROWS,
    SOME_NEAR,
    Way,
    assert_same_table,
    batches,
    by_name,
    make,
    train,
)
from triton import jit
from triton.runtime.interpreter import interpreter_builder

import embedrock.torch as ert
from embedrock.kernels.gpu.runtime import launch
from slow import slow

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="compute-sanitizer looks for races on a GPU: see on_gpu.py")


def trained(way: Way | None, count: int, rule: str) -> Any:
    model = make(way, rule)
    ids = batches(2, seed=1) * count  # what was stepped comes back
    return train(model, ert.prefetch(ids, {model.rows: lambda ids: ids}))


OTHERS = [ALL_NEAR, NONE_NEAR, *SOME_NEAR, HOSTED[2], *HASHED[1:3], OPEN]


@pytest.mark.parametrize(
    ("way", "rule"),
    [
        (SOME_NEAR[1], "Adam"),
        *slow(
            *(
                (way, rule)
                for way in (ALL_NEAR, NONE_NEAR, *SOME_NEAR, HOSTED[2], *HASHED[1:3], OPEN)
                for rule in ("Adam", "SGD")
            )
        ),
        *slow(*((SOME_NEAR[1], rule) for rule in ("RowwiseAdagrad", "Ftrl", "RMSprop"))),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_no_program_depends_on_another_and_none_misses_a_barrier(
    way: Way, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(None, 2, rule).table
    detector = race_detector.install(monkeypatch)
    model = trained(way, 2, rule)
    model.weights()
    assert detector.found == set()
    assert "_step" in detector.launched
    assert "_insert" in detector.launched or not way.near_rows
    assert "_enter" in detector.launched or way is not OPEN
    rounding = 1e-6 if rule == "RowwiseAdagrad" else 0  # which sums squares in another order
    np.testing.assert_allclose(model.weights(), expected.lookup(np.arange(ROWS)), rtol=rounding, atol=0)


# ---------------------------------------------------------------- races that it is to find


@jit
def _write_one(out):
    tl.store(out, tl.program_id(0))


@jit
def _read_the_next(out):
    program = tl.program_id(0)
    tl.store(out + program, tl.load(out + program + 1))


@jit
def _shift(out, BARRIER: tl.constexpr):
    lane = tl.arange(0, 4)
    value = tl.load(out + lane + 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + lane, value)


@jit
def _add_and_write(out):
    if tl.program_id(0) == 0:
        tl.store(out, 0)
    tl.atomic_add(out, 1)


@jit
def _own(out):
    lane = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(out + lane, tl.load(out + lane) + 1)
    tl.atomic_add(out + 100, 1)


@jit
def _last_reads_all(out, BEFORE: tl.constexpr, AFTER: tl.constexpr, SEM: tl.constexpr):
    tl.store(out + 1 + tl.program_id(0), 1)
    if BEFORE:
        tl.debug_barrier()
    came = tl.atomic_add(out, 1, sem=SEM)
    if AFTER:
        tl.debug_barrier()
    if came == tl.num_programs(0) - 1:
        lane = tl.arange(0, 4)
        tl.store(out + 8, tl.sum(tl.load(out + 1 + lane, mask=lane < tl.num_programs(0), other=0)))


def last(before: bool = True, after: bool = True, sem: str = "acq_rel") -> dict[str, Any]:
    return {"BEFORE": before, "AFTER": after, "SEM": sem}


RACES: dict[str, tuple[Any, int, dict[str, Any], set[str]]] = {
    "one place": (_write_one, 2, {}, {"two programs write the same"}),
    "the next one's": (_read_the_next, 2, {}, {"a program reads what another one writes"}),
    "no barrier": (_shift, 1, {"BARRIER": False}, {"no barrier between what reads and what writes"}),
    "a barrier": (_shift, 1, {"BARRIER": True}, set()),
    "add and write": (_add_and_write, 2, {}, {"a program adds what another one writes"}),
    "each its own": (_own, 3, {}, set()),
    "the last reads": (_last_reads_all, 3, last(), set()),
    "the last reads, not told": (_last_reads_all, 3, last(before=False), {"a program reads what another one writes"}),
    "the last reads, not heard": (_last_reads_all, 3, last(after=False), {"a program reads what another one writes"}),
    "relaxed": (_last_reads_all, 3, last(sem="relaxed"), {"a program reads what another one writes"}),
}


@pytest.mark.parametrize("name", RACES)
def test_races_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, programs, options, wanted = RACES[name]
    detector = race_detector.install(monkeypatch)
    launch(kernel, programs, torch.zeros(128, dtype=torch.int32), **options)
    assert {what for _, what in detector.found} >= wanted
    assert bool(detector.found) == bool(wanted)


# ---------------------------------------------------------------- threads


def test_a_thread_that_launches_waits_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has one interpreter, which would be told of the programs, and of the end, of both."""
    builder, out, other = type(interpreter_builder), *torch.zeros(2, 128, dtype=torch.int32).unbind()
    begin, second = builder.set_grid_idx, threading.Thread(target=lambda: launch(_own, 3, other))

    def begin_beside(self: Any, x: int, y: int, z: int) -> None:
        begin(self, x, y, z)
        if second.ident is None:
            second.start()
            second.join(0.05)

    monkeypatch.setattr(builder, "set_grid_idx", begin_beside)
    launch(_own, 3, out)
    second.join()
    assert out[:12].tolist() == other[:12].tolist() == [1] * 12


# ---------------------------------------------------------------- memory that has anything in it


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("way", [SOME_NEAR[1], *slow(*OTHERS, HOSTED[0])], ids=by_name)
def test_what_nobody_wrote_is_not_read(way: Way) -> None:
    assert torch.empty(1).isnan().all()
    assert_same_table(trained(way, 2, "Adam").table, trained(None, 2, "Adam").table)
