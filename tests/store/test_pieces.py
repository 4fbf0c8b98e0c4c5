"""Which pieces are folded: enough of them, no more than that, and each row is written a few times only."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embedrock as er
from chunks import Chunk, base_of
from embedrock.store.pieces import CompactionGoal, KeyRange, ages, bounds, choose, cut, mean_age
from embedrock.store.segments import piece_rows
from slow import examples
from table_files import files_of

counts = st.integers(0, 50)
some_pieces = st.lists(st.tuples(st.integers(1, 50), counts, counts), max_size=12)
goals = st.builds(CompactionGoal, st.integers(0, 200), st.integers(0, 60))


def pieces_of(drawn: list[tuple[int, int, int]]) -> list[KeyRange]:
    return [KeyRange(lo, lo + 1, records, waiting, age) for lo, (records, waiting, age) in enumerate(drawn)]


def is_reached(pieces: list[KeyRange], chosen: list[KeyRange], goal: CompactionGoal) -> bool:
    """The goal in words: few rows are left, records are young on average, and none that can be folded is very old."""
    left = [piece for piece in pieces if piece not in chosen]
    old = sum(piece.records * piece.age for piece in left)
    return (
        sum(piece.waiting for piece in left) <= goal.rows
        and old <= goal.age * sum(piece.records for piece in pieces)
        and all(piece.age <= 2 * goal.age for piece in left if piece.waiting)
    )


@given(some_pieces, goals)
def test_as_many_pieces_as_it_takes(drawn: list[tuple[int, int, int]], goal: CompactionGoal):
    pieces = pieces_of(drawn)
    chosen = choose(pieces, goal)
    assert all(piece.waiting for piece in chosen)
    assert is_reached(pieces, chosen, goal) or len(chosen) == sum(piece.waiting > 0 for piece in pieces)
    assert not chosen or not is_reached(pieces, chosen[:-1], goal)


def chunk(lo: int, hi: int, count: int, folded_below: int) -> Chunk:
    return Chunk(lo, hi, "ids", 0, count, np.arange(lo, lo + count), folded_below)


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(counts, st.integers(1, 30), st.integers(0, 9)), max_size=6), st.lists(counts, max_size=8))
def test_ages_against_a_look_at_every_record(drawn: list[tuple[int, int, int]], sizes: list[int]):
    chunks, end = list[Chunk](), -5
    for gap, count, folded_below in drawn:
        chunks.append(chunk(end + gap, end + gap + 2 * count, count, folded_below))
        end = chunks[-1].hi
    base, logs = base_of(chunks), list(enumerate(sizes, 1))
    of_records = [
        [size for number, size in logs if number >= each.folded_below] for each in chunks for _ in range(each.count)
    ]
    of_records += [sizes] * 7  # of rows in no chunk
    assert mean_age(base, logs, len(of_records)) == pytest.approx(np.mean([sum(each) for each in of_records]))
    cuts = bounds(base, -5, end + 3)
    assert (cuts[0], cuts[-1]) == (-5, end + 3)
    assert {each.lo for each in chunks} | {each.hi for each in chunks} <= set(cuts)
    pieces = cut(base, cuts, np.arange(len(cuts) - 1), logs)
    assert [(piece.lo, piece.hi) for piece in pieces] == list(pairwise(cuts))
    known = dict(zip(((each.lo, each.hi) for each in chunks), ages(base, logs)[0], strict=True))
    assert [piece.age for piece in pieces] == [known.get((piece.lo, piece.hi), sum(sizes)) for piece in pieces]


def test_no_bound_is_drawn_where_there_is_nothing():
    assert bounds(base_of([]), -(2**63), 2**63) == [-(2**63), 2**63]
    last = Chunk(0, 2**63, "ids", 0, 1, np.array([5]))
    assert bounds(base_of([last]), -(2**63), 2**63) == [-(2**63), 0, 2**63]


# ---------------------------------------------------------------- a long life, on paper


def life(pieces: int, room: int, shares: np.ndarray, part: float = 1 / 16) -> tuple[float, float]:
    """Change rows of a table of 40 records a piece, and fold pieces where the overlay is full.

    Args:
        pieces: of the table.
        room: rows that the overlay holds.
        shares: of the changes, that each piece gets.
        part: of the room, that is made free each time.

    Returns:
        Records that are folded for each one that is logged, and the most logs there were, over the records of the base.
    """
    rng, size = np.random.default_rng(0), 40
    waiting = [set[int]() for _ in range(pieces)]
    since, now, folded, most = [0] * pieces, 0, 0, 0
    for number in range(200):
        for piece, row in zip(rng.choice(pieces, 100, p=shares), rng.integers(0, size, 100), strict=True):
            waiting[piece].add(int(row))
        now += 100
        if sum(map(len, waiting)) > room:
            asked = [KeyRange(k, k + 1, size, len(waiting[k]), now - since[k]) for k in range(pieces)]
            for piece in choose(asked, CompactionGoal(int(room * (1 - part)), 3 * pieces * size // 4)):
                waiting[piece.lo], since[piece.lo] = set(), now
                folded += size * (number >= 100)
        most = max(most, now - min(since))
    return folded / (100 * 100), most / (pieces * size)


def test_pieces_fold_twice_as_many_rows_as_all_at_once():
    even = np.full(100, 1 / 100)
    whole, _ = life(100, 800, even, part=1.0)
    in_pieces, _ = life(100, 800, even)
    assert 4.0 < whole < 5.0  # 4000 records for some 900 changes of 800 rows
    assert in_pieces < 0.55 * whole


def test_pieces_that_get_few_rows_wait_longer_but_not_for_ever():
    even, skewed = np.full(100, 1 / 100), np.array([0.09] * 10 + [0.1 / 90] * 90)
    (alike, _), (uneven, logs) = life(100, 800, even), life(100, 800, skewed)
    assert uneven < 0.8 * alike
    assert logs < 2.0


@pytest.mark.parametrize(("memory", "nbytes"), [("4GiB", 4 << 20), ("96MiB", 3 << 19), ("1MiB", 512 << 10)])
def test_pieces_are_as_large_as_the_budget_has_buffers_for(memory: str, nbytes: int, tmp_path: Path) -> None:
    with er.Table(None, 64, path=tmp_path / "t", memory=memory) as table:
        (store,) = files_of(table).table_folder.stores
        assert store.piece_rows(6 << 20) == piece_rows(table.spec.record_bytes, nbytes)
        assert store.piece_rows(1 << 10) == 4  # never more than asked for
