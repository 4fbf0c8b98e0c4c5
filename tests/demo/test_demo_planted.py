"""The planted log: deterministic, bounded by nothing of the size of its tables, and learnable as promised."""

from __future__ import annotations

import numpy as np

from embedrock.bench.harness.workload import SCATTER
from embedrock.demo.data.planted import BIAS, ITEM_PULL, MATCH, RANK, USER_PULL, PlantedLog
from embedrock.demo.metrics import auc

LOG = PlantedLog(users=20_000_000, items=2_000_000, seed=0)


def test_same_seed_same_clicks():
    one, two = (PlantedLog(LOG.users, LOG.items, 0).clicks(np.random.default_rng(7), 1000) for _ in range(2))
    for name in ("users", "items", "labels", "planted"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_factors_depend_on_seed_and_id_only():
    users, items = np.array([5, 19_999_999, 5]), np.array([7, 0, 7])
    logits = LOG.planted(users, items)
    assert logits[0] == logits[2] != logits[1]
    np.testing.assert_array_equal(LOG.planted(users[::-1], items[::-1]), logits[::-1])
    assert (PlantedLog(LOG.users, LOG.items, 1).planted(users, items) != logits).all()


def test_ids_and_labels_are_in_range():
    clicks = LOG.clicks(np.random.default_rng(0), 50_000)
    assert clicks.users.min() >= 0
    assert clicks.users.max() < LOG.users
    assert clicks.items.max() < LOG.items
    assert set(np.unique(clicks.labels)) == {0.0, 1.0}


def test_popular_ids_are_scattered():
    clicks = LOG.clicks(np.random.default_rng(0), 200_000)
    ids, counts = np.unique(clicks.users, return_counts=True)
    top = ids[np.argsort(-counts)[:5]]
    assert set(top) == {rank * SCATTER % LOG.users for rank in range(5)}


def test_labels_follow_the_planted_chances():
    clicks = LOG.clicks(np.random.default_rng(1), 200_000)
    chances = 1 / (1 + np.exp(-clicks.planted))
    for low in np.arange(0, 1, 0.1):
        inside = (chances >= low) & (chances < low + 0.1)
        expected = chances[inside].mean()
        spread = np.sqrt(expected * (1 - expected) / inside.sum())
        assert abs(clicks.labels[inside].mean() - expected) < 5 * spread


def test_planted_logits_have_the_spread_of_the_formula():
    random = np.random.default_rng(2)
    logits = LOG.planted(random.integers(0, LOG.users, 100_000), random.integers(0, LOG.items, 100_000))
    # <p, q> / sqrt(RANK) of independent standard normals has variance 1, whatever RANK is.
    variance = USER_PULL**2 + ITEM_PULL**2 + MATCH**2
    assert RANK > 1
    assert abs(logits.mean() - BIAS) < 0.05
    assert abs(logits.var() / variance - 1) < 0.05


def test_the_planted_model_scores_best():
    clicks = LOG.clicks(np.random.default_rng(3), 100_000)
    best = auc(clicks.labels, clicks.planted)
    assert 0.85 < best < 0.89
    noise = np.random.default_rng(4).normal(0, 0.5, len(clicks.planted))
    assert auc(clicks.labels, clicks.planted + noise) < best
    assert abs(auc(np.random.default_rng(5).permutation(clicks.labels), clicks.planted) - 0.5) < 0.01


def test_nothing_of_the_size_of_the_tables_is_stored():
    log = PlantedLog(users=2_000_000_000, items=2_000_000_000, seed=0)
    log.clicks(np.random.default_rng(0), 1000)
    assert [table.stats()["rows_touched"] for table in log._tables] == [0, 0]
    assert all(table.stats()["bytes_used"] < 1 << 20 for table in log._tables)
