"""Which logs become one: few are left, and each row is written a few times only."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from embedrock.store import folding


def life(sizes: Sequence[int], distinct: int) -> tuple[int, int]:
    """Commit logs of these sizes and fold what is due; return the most logs there were, and the bytes folded.

    Args:
        sizes: of the commits.
        distinct: bytes of all rows, so that a log of several has no more.
    """
    logs, most, folded = list[int](), 0, 0
    for size in sizes:
        logs.append(min(size, distinct))
        most = max(most, len(logs))
        if count := folding.due(logs):
            logs[-count:] = [min(sum(logs[-count:]), distinct)]
            folded += logs[-1]
    return most, folded


@pytest.mark.parametrize("largest", [5000, 60_000, 3_000_000])
@pytest.mark.parametrize("distinct", [50_000, 1 << 40])
def test_there_are_few_logs_and_rows_are_written_a_few_times(largest: int, distinct: int):
    draw = random.Random(largest)
    kinds = [lambda: largest, lambda: int(draw.random() * largest), lambda: int(draw.random() ** 8 * largest)]
    for kind in (*kinds, lambda: draw.choice(kinds)()):
        sizes = [4096 + kind() for _ in range(3000)]
        most, folded = life(sizes, distinct)
        levels = 1 + folding._level(min(distinct, sum(sizes)))
        assert most <= folding.FAN * levels + (folding.MORE if levels > folding.LARGE else 0)
        assert folded <= 1.2 * levels * sum(sizes)


def test_commits_of_one_row_cost_no_more_than_their_first_pages():
    most, folded = life([4200] * 4096, 1 << 40)
    assert most <= 3 * folding.FAN
    assert folded <= 2 * 4096 * 4200


def test_no_larger_log_is_in_between():
    assert folding.due([]) == 0
    assert folding.due([1] * 15 + [10**9]) == 0
    assert folding.due([10**9] + [1] * 16) == 16
    assert folding.due([1] * 40 + [10**9] + [1] * 3) == 0
