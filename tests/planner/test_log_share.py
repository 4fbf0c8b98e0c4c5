"""Which rows are read from the log that is left as logs are folded, beside a count of them, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from embedrock.planner.logs import LogThen, log_then
from embedrock.planner.machine import EXAMPLE
from embedrock.planner.proposal import plan
from embedrock.planner.zipf import bounded_zipf, expected_misses

ROWS, BATCH, ZIPF, HELD, FIRST = 30_000, 1000, 1.0, 4, 30


def seen(batches: float) -> float:
    return expected_misses(ROWS, ZIPF, round(batches * BATCH), 0)


def counted(steps: int) -> tuple[int, int]:
    """Return the rows read around a step, and those from the log: of a cache that has what was used in HELD batches."""
    random, used, reads, logged = np.random.default_rng(0), np.full(ROWS, -ROWS), 0, 0
    for step in range(steps + 5):
        ids = np.unique(bounded_zipf(random.random(BATCH), ROWS, ZIPF))
        if step >= steps - 5:
            last = used[ids][(used[ids] >= 0) & (used[ids] < step - HELD)]
            reads, logged = reads + len(last), logged + int(np.count_nonzero(last + HELD >= FIRST))
        used[ids] = step
    return reads, logged


def told(steps: int, reads: float) -> LogThen:
    slots = int(seen(HELD))
    return log_then(seen, steps, slots, seen(FIRST) - slots / 2, reads)


@pytest.mark.parametrize("steps", [36, 45, 58])
def test_rows_that_left_since_the_fold_are_read_from_the_log(steps: int):
    reads, logged = counted(steps)
    found = told(steps, reads / 10)
    assert (found.steps, found.is_written) == (steps - FIRST, True)
    assert found.share == pytest.approx(logged / reads, abs=0.05)
    assert 0.2 < logged / reads < 0.9
    assert found.base_reads == pytest.approx((steps - FIRST) * (reads - logged) / 10, rel=0.2)


def test_there_is_no_such_log_before_the_fold_and_long_after():
    assert told(FIRST, 100.0).share == 0 == told(3 * FIRST, 100.0).share
    full, folding = told(2 * FIRST, 100.0), told(2 * FIRST + FIRST // 2, 100.0)
    assert (full.is_written, folding.is_written, folding.steps) == (True, False, FIRST)
    assert folding.share == full.share / 2
    assert told(45, 0.0).share == 0


@pytest.mark.parametrize("has_log", [False, True])
def test_a_plan_tells_of_reads_past_the_page_cache_and_through_it_while_logs_are_folded(has_log: bool):
    random, steps = np.random.default_rng(0), (60, 170)
    log = {"t": bounded_zipf(random.random(180 * 1536), 300_000, 0.9)} if has_log else {}
    table = {"t": {"rows": 300_000, "dim": 128, "zipf": 0.9, "memory": "5MiB"}}
    young, folded = (plan(table, 1536, steps=each, log=log, machine=EXAMPLE).tables[0] for each in steps)
    assert young.fold_bytes[1] == 0 < folded.fold_bytes[1]
    assert min(young.seconds["disk_read"], folded.seconds["disk_read"]) > 0  # a log of 60,000 rows of 1,540 bytes
    assert young.seconds["cached_request"] == 0 < folded.seconds["cached_request"]
