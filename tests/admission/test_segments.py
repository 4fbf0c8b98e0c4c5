"""Segments: parts of a table decide alike, however many there are, and go on as those of more or fewer parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.admission.copy_on_write import merged
from embedrock.admission.lifecycle import COUNTS, PARTS, RowLifecycle
from embedrock.admission.moving import moved
from embedrock.batch.ids import owners
from embedrock.spec.spec import Spec
from slow import examples

SEGMENTS = 256
POLICIES: dict[str, dict[str, Any]] = {
    "use": {"eviction": er.Eviction(max_rows=300, half_life=9)},
    "recency": {"eviction": er.Eviction(max_rows=300, by="recency", keep=[3, 5])},
    "age and idle": {"eviction": er.Eviction(max_rows=400, by="age", idle=7)},
    "exact": {"admission": er.Admission(2, within=8), "eviction": er.Eviction(idle=20)},
    "sketch": {"admission": er.Admission(3, within=12, sketch="64KiB"), "eviction": er.Eviction(max_rows=300)},
    "small sketch": {"admission": er.Admission(4, sketch=SEGMENTS * 64), "eviction": er.Eviction(max_rows=300)},
    "days": {"eviction": er.Eviction(idle="9d", max_rows=500)},
}


def spec_of(policies: dict[str, Any]) -> Spec:
    return Spec(None, 2, "float32", er.SGD(lr=1.0), er.Zeros(), 0, segments=SEGMENTS, **policies)


class Part:
    """The rows of some segments, without values: a dict of those that have a record."""

    def __init__(self, lifecycle: RowLifecycle, rows: set[int]) -> None:
        self.lifecycle, self.rows, self.saved = lifecycle, rows, [lifecycle.state()]
        lifecycle.saved()

    def step(self, ids: np.ndarray, time: float | None) -> None:
        missing = np.array([row not in self.rows for row in ids.tolist()], bool)
        decision = self.lifecycle.vote(ids, missing, True, time)
        left = self.lifecycle.victims(decision)
        assert not set(left.tolist()) & set(ids.tolist())
        self.lifecycle.note(decision, left)
        self.rows = (self.rows - set(left.tolist())) | set(decision.new.tolist())

    def save(self) -> None:
        """Save the changes, and resume from all that was saved."""
        changed = self.lifecycle.changes(1 << 40)
        columns = self.lifecycle.whole() if changed is None else changed
        arrays = {
            name: column
            if isinstance(column, np.ndarray)
            else np.concatenate([NOTHING, *(piece.reshape(-1) for piece in column.pieces())])
            for name, column in columns.items()
        }
        self.saved = [arrays] if changed is None else [*self.saved, arrays]
        self.lifecycle.saved()
        resumed = RowLifecycle(SPECS[self.lifecycle.subject], self.lifecycle.subject)
        resumed.resume(self.saved)
        self.lifecycle, self.saved = resumed, [merged(self.saved, PARTS)]


NOTHING = np.empty(0, np.int64)
SPECS = {name: spec_of(policies) for name, policies in POLICIES.items()}


def owned(rank: int, ranks: int) -> np.ndarray:
    return np.arange(SEGMENTS) * ranks // SEGMENTS == rank


def shared_out(name: str, parts: Sequence[Part], ranks: int) -> list[Part]:
    """Return the rows of some parts in other parts."""
    sources = [(int(np.argmax(owned(rank, len(parts)))), part.lifecycle) for rank, part in enumerate(parts)]
    rows = np.array(sorted(set[int]().union(*(part.rows for part in parts))), np.int64)
    found = []
    for rank in range(ranks):
        here = owned(rank, ranks)
        found.append(Part(moved(SPECS[name], name, sources, here), set(rows[here[owners(rows, SEGMENTS)]].tolist())))
    return found


def totals(parts: Sequence[Part]) -> dict[str, float]:
    """Return the sums of all parts' statistics."""
    each = [part.lifecycle.stats() for part in parts]
    return {key: sum(stats[key] for stats in each) for key in each[0] if key in COUNTS}


def program(name: str, seed: int, changes: Sequence[int], steps: int = 40) -> None:
    """Step a table of one part beside one whose parts change in number, and compare all that they know."""
    rng, time = np.random.default_rng(seed), 1.7e9
    whole = Part(RowLifecycle(SPECS[name], name), set())
    parts = [Part(RowLifecycle(SPECS[name], name), set())]
    for number in range(steps):
        if number % 9 == 0:
            parts = shared_out(name, parts, changes[number // 9 % len(changes)])
        ids = np.unique((rng.zipf(1.3, 60) % 5000) * 7919)
        rng.shuffle(ids)
        time += float(rng.integers(0, 86400)) if name == "days" else 0
        newest = time if name == "days" else None
        whole.step(ids, newest)
        for rank, part in enumerate(parts):
            own = ids[owned(rank, len(parts))[owners(ids, SEGMENTS)]]
            part.step(rng.permutation(own), newest)
            if rng.random() < 0.3:
                part.save()
        assert set[int]().union(*(part.rows for part in parts)) == whole.rows
    assert totals(parts) == totals([whole])
    assert whole.lifecycle.counts["admitted"] > 30


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(examples(20)))
def test_parts_decide_as_one(name: str, seed: int):
    program(name, seed, np.random.default_rng(seed).integers(1, 6, 6).tolist())


def test_segments_fill_up_to_their_shares():
    part = Part(RowLifecycle(SPECS["recency"], "recency"), set())
    for number in range(40):
        part.step(np.arange(number * 50, number * 50 + 50), None)
    assert 250 < len(part.rows) <= 350  # the last batch may exceed the shares of its segments


def test_one_segment_is_a_table_as_before():
    """A row of the batch never leaves a table that no ranks share, so its limit is exact."""
    table = er.Table(None, 2, rule=er.SGD(lr=1.0), eviction=er.Eviction(max_rows=300, by="recency"))
    for number in range(40):
        table.update(np.arange(number * 50, number * 50 + 50), np.ones((50, 2), np.float32))
    assert table.stats()["rows_touched"] == 300


@pytest.mark.parametrize(
    ("policies", "segments"),
    [
        ({"eviction": er.Eviction(max_rows=256)}, 256),
        ({"eviction": er.Eviction(max_rows=2441 * 1024 - 1)}, 512),
        ({"eviction": er.Eviction(max_rows=2441 * 1024)}, 1024),
        ({"eviction": er.Eviction(idle=9)}, 4096),
        ({"admission": er.Admission(2)}, 4096),
        ({"admission": er.Admission(2, sketch="64KiB")}, 1024),
        ({"admission": er.Admission(2, sketch="1KiB")}, 256),
        ({"admission": er.Admission(2, sketch="1GiB"), "eviction": er.Eviction(max_rows=10**6)}, 256),
        ({}, 1),
    ],
)
def test_ranks_share_tables_of_as_many_segments_as_rows_and_lines_suffice_for(policies: Any, segments: int):
    spec = Spec(None, 2, "float32", None, er.Zeros(), 0, **policies).for_ranks
    assert spec.segments == spec.for_ranks.segments == segments


def test_a_table_of_fewer_rows_than_segments_is_refused():
    with pytest.raises(
        er.ArgumentError, match=r"`max_rows` of a table with segments, .* at least their number, 256: got 255"
    ):
        _ = Spec(None, 2, "float32", None, er.Zeros(), 0, eviction=er.Eviction(max_rows=255)).for_ranks


def test_a_decision_holds_after_another_batch_has_numbered_segments():
    lifecycle = RowLifecycle(SPECS["recency"], "recency")
    decision = lifecycle.vote(np.arange(3), np.ones(3, bool), True)
    left = lifecycle.victims(decision)
    lifecycle.victims(lifecycle.vote(np.arange(50, 90), np.ones(40, bool), True))  # a check of another step
    lifecycle.note(decision, left)
    assert lifecycle.usage is not None
    assert sorted(lifecycle.usage.ids.tolist()) == [0, 1, 2]
