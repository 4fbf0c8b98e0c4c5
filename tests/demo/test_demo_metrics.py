"""AUC, hit rate and NDCG against their definitions, spelled out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from embedrock.demo.metrics import auc, hit_rate, ndcg, ranks_of_first

few_values = st.integers(-3, 3).map(float)  # so that there are ties


def auc_of_all_pairs(labels: np.ndarray, scores: np.ndarray) -> float:
    pairs = [(p, n) for p in scores[labels == 1] for n in scores[labels == 0]]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


@given(st.data(), st.integers(2, 40))
def test_auc_is_the_share_of_pairs_in_order(data: st.DataObject, count: int):
    labels = data.draw(arrays(np.float32, count, elements=st.sampled_from([0.0, 1.0])))
    labels[:2] = 0, 1
    scores = data.draw(arrays(np.float32, count, elements=few_values))
    assert auc(labels, scores) == pytest.approx(auc_of_all_pairs(labels, scores), abs=1e-12)


def test_auc_knows_the_ends():
    labels = np.array([1, 0, 1, 0])
    assert auc(labels, np.array([2.0, 1.0, 3.0, 0.0])) == 1
    assert auc(labels, np.array([0.0, 2.0, 1.0, 3.0])) == 0
    assert auc(labels, np.ones(4)) == 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_auc_refuses_scores_without_order(bad: float):
    with pytest.raises(ValueError, match="finite"):
        auc(np.array([1, 0]), np.array([bad, 1.0]))


@pytest.mark.parametrize("label", [0, 1])
def test_auc_refuses_one_class(label: int):
    with pytest.raises(ValueError, match="positives and negatives"):
        auc(np.full(3, label), np.arange(3.0))


def rank_the_slow_way(row: np.ndarray) -> int:
    """Sort by score, the held-out item behind all that tie with it."""
    order = sorted(range(len(row)), key=lambda column: (-row[column], column == 0))
    return order.index(0)


@given(arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 12)), elements=few_values))
def test_ranks_hits_and_ndcg(scores: np.ndarray):
    ranks = ranks_of_first(scores)
    expected = [rank_the_slow_way(row) for row in scores]
    assert ranks.tolist() == expected
    assert hit_rate(ranks, 3) == pytest.approx(sum(rank < 3 for rank in expected) / len(expected))
    gains = [math.log(2) / math.log(rank + 2) if rank < 3 else 0.0 for rank in expected]
    assert ndcg(ranks, 3) == pytest.approx(sum(gains) / len(gains))


def test_a_model_that_does_not_tell_items_apart_gets_no_credit():
    assert hit_rate(ranks_of_first(np.zeros((5, 101)))) == 0
    assert hit_rate(ranks_of_first(np.full((5, 101), np.nan))) == 0


def test_nothing_in_place_of_a_candidate_ranks_below():
    assert ranks_of_first(np.array([[-5.0, -np.inf, -6.0]])).tolist() == [0]
