"""Time of the event where processes share a table: one clock, that of the newest event on any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks

import embedrock as er
import embedrock.torch as ert
from embedrock.table.table import rows_of

DAY = 86_400


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def day_of(layer: ert.Embedding) -> float:
    lifecycle = rows_of(layer.table).lifecycle
    assert lifecycle is not None
    assert lifecycle.usage is not None
    return lifecycle.usage.clock.read.now / DAY


def batch_of(step: int, part: int) -> tuple[torch.Tensor, Any]:
    """Return ids and times of a rank's batch: in some steps of one rank only, or without a time on the other."""
    rng = np.random.default_rng([step, part])
    ids, days = rng.integers(4 * step, 4 * step + 30, 12), 4 * step + 3 * rng.random(12)
    if step % 5 == 3 and part == 1:
        return torch.empty(0, dtype=torch.int64), None
    return torch.from_numpy(ids), torch.from_numpy(days * DAY)


def trained(rank: int, parts: Sequence[int] | None = None, ends_at: Sequence[int] = (30, 30)) -> Any:
    """Train with the batches of a rank, or with those of several `parts` of one after the other."""
    layer = ert.Embedding(None, 4, seed=0, eviction=er.Eviction(idle="30d"))
    rows, count, days = ert.Adam(layer, lr=0.1), 1 if parts is None else len(parts), []

    def step_at(step: int, blocks: Sequence[int]) -> None:
        for micro in (0, 1):
            for part in blocks:
                ids, times = batch_of(step + micro, part)
                (layer(ids, time=times).square().sum() / count).backward()
        rows.step()
        rows.zero_grad()
        days.append(day_of(layer))

    if parts is not None:
        for step in range(0, max(ends_at), 2):
            step_at(step, [part for part in parts if step < ends_at[part]])
    else:
        with ert.uneven(layer):
            for step in range(0, ends_at[rank], 2):
                step_at(step, [rank])
        layer(torch.tensor([0]))  # waits for the steps of others
    return [each.tolist() for each in layer.table.export()], layer.table.stats()["evicted"], day_of(layer), days


@pytest.mark.parametrize("ends_at", [(30, 30), (30, 12)])
def test_replicas_evict_by_one_clock_as_one_process_does(pair: Ranks, ends_at: Sequence[int]) -> None:
    expected = trained(0, [0, 1], ends_at)
    assert expected[1] > 30
    found = pair.run(trained, None, ends_at)
    assert [one[:3] for one in found] == [expected[:3]] * 2
    assert all(one[3] == expected[3][: len(one[3])] for one in found)


def refused(rank: int) -> tuple[str, list[int]]:
    layer = ert.Embedding(None, 4, seed=0, sharded=True)
    rows = ert.SGD(layer, lr=0.1)
    for day in (1, 2):
        layer(torch.tensor([rank, 7]), time=day * DAY).sum().backward()
    rows.step()
    try:
        layer(torch.tensor([3]), time=DAY if rank else DAY * 10**9)
    except er.EmbedrockError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    return said, layer.table.export()[0].tolist()


def test_an_absurd_time_on_one_rank_is_refused_on_all(pair: Ranks) -> None:
    (ours, one), (theirs, other) = pair.run(refused)
    assert ours.startswith("ArgumentError: `time` of Embedding(None, 4) must be seconds since 1970")
    assert theirs.startswith("OtherRankError: rank 0 refused a lookup in Embedding(None, 4)")
    assert "must be seconds since 1970" in theirs
    assert sorted(one + other) == [0, 1, 7]
