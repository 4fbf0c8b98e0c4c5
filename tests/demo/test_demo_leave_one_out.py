"""What is held out, and that negatives are items which the user never touched."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedrock.demo.data.interactions import Interactions
from embedrock.demo.data.leave_one_out import CANDIDATES, NEGATIVES, NOTHING, Unseen, leave_one_out


def log_of(
    pairs: list[tuple[int, int]], times: list[float] | None = None, users: int = 0, items: int = 0
) -> Interactions:
    array = np.array(pairs, np.int64).reshape(-1, 2)
    stamps = None if times is None else np.array(times, np.float64)
    counts = (max(users, array[:, 0].max() + 1), max(items, array[:, 1].max() + 1))
    return Interactions(array[:, 0].copy(), array[:, 1].copy(), stamps, int(counts[0]), int(counts[1]), "", [])


@st.composite
def logs(draw: st.DrawFn) -> Interactions:
    users, items = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    pair = st.tuples(st.integers(0, users - 1), st.integers(0, items - 1))
    pairs = draw(st.lists(pair, min_size=1, max_size=40))
    stamp = st.integers(0, 5).map(float)
    times = draw(st.none() | st.lists(stamp, min_size=len(pairs), max_size=len(pairs)))
    return log_of(pairs, times, users, items)


def touched(log: Interactions) -> dict[int, set[int]]:
    sets: dict[int, set[int]] = defaultdict(set)
    for user, item in zip(log.users.tolist(), log.items.tolist(), strict=True):
        sets[user].add(item)
    return sets


def expected_order(log: Interactions, user: int) -> list[int]:
    """The user's items by time, ties in the order of the file, each once: the slow way."""
    times = np.zeros(len(log.users)) if log.times is None else log.times
    rows = sorted((time, row) for row, time in enumerate(times) if log.users[row] == user)
    return list(dict.fromkeys(int(log.items[row]) for _, row in rows))


@given(logs())
def test_the_last_item_is_held_out_and_the_rest_trained(log: Interactions):
    split, sets = leave_one_out(log, seed=0), touched(log)
    tested = dict(zip(split.test_users.tolist(), split.candidates[:, 0].tolist(), strict=True))
    trained = defaultdict(list)
    for user, item in zip(split.users.tolist(), split.items.tolist(), strict=True):
        trained[user].append(item)
    for user in sets:
        order = expected_order(log, user)
        is_tested = len(order) > 1 and len(order) < log.num_items
        assert (user in tested) == is_tested
        assert trained[user] == (order[:-1] if is_tested else order)
        assert not is_tested or tested[user] == order[-1]
    assert split.repeats == len(log.users) - sum(len(items) for items in sets.values())


@given(logs(), st.integers(0, 3))
def test_negatives_are_never_items_of_the_user(log: Interactions, seed: int):
    split, sets = leave_one_out(log, seed), touched(log)
    for number in range(2):
        epoch = split.epoch(seed, number)
        negative = epoch.labels == 0
        for user, item in zip(epoch.users[negative].tolist(), epoch.items[negative].tolist(), strict=True):
            assert item not in sets[user]
            assert 0 <= item < log.num_items
        positives = sorted(zip(epoch.users[~negative].tolist(), epoch.items[~negative].tolist(), strict=True))
        assert positives == sorted(zip(split.users.tolist(), split.items.tolist(), strict=True))
        able = [user for user in split.users.tolist() if len(sets[user]) < log.num_items]
        assert np.count_nonzero(negative) == NEGATIVES * len(able)


@given(logs())
def test_candidates_are_different_items_that_the_user_never_touched(log: Interactions):
    split, sets = leave_one_out(log, seed=1), touched(log)
    for user, (_, *negatives) in zip(split.test_users.tolist(), split.candidates.tolist(), strict=True):
        real = [item for item in negatives if item != NOTHING]
        assert len(set(real)) == len(real) == min(CANDIDATES, log.num_items - len(sets[user]))
        assert not set(real) & sets[user]


def test_candidates_of_a_large_catalog_are_uniform():
    users = 3000
    log = log_of([(user, user % 2) for user in range(users)] + [(user, 150) for user in range(users)], items=151)
    negatives = leave_one_out(log, seed=3).candidates[:, 1:]
    assert (negatives != NOTHING).all()
    assert all(len(set(row)) == CANDIDATES for row in negatives.tolist())
    # Each of 149 unseen items is among the 100 candidates of a user with chance 100/149: 6 standard deviations.
    counts = np.bincount(negatives.ravel(), minlength=151)[2:150]
    chance = 100 / 149
    assert np.abs(counts - users * chance).max() < 6 * np.sqrt(users * chance * (1 - chance))


def test_unseen_picks_every_unseen_item_once():
    random = np.random.default_rng(0)
    seen = random.random((20, 30)) < random.random((20, 1))
    users, items = np.nonzero(seen)
    unseen = Unseen(users, items, 20, 30)
    assert unseen.counts.tolist() == (~seen).sum(axis=1).tolist()
    everyone = np.repeat(np.arange(20), unseen.counts)
    ranks = np.concatenate([np.arange(count) for count in unseen.counts])
    expected_users, expected_items = np.nonzero(~seen)
    np.testing.assert_array_equal(everyone, expected_users)
    np.testing.assert_array_equal(unseen.pick(everyone, ranks), expected_items)


def test_split_and_epochs_are_deterministic_and_epochs_differ():
    random = np.random.default_rng(0)
    pairs = [(int(user), int(item)) for user, item in random.integers(0, 40, (500, 2))]
    one, two, other = (leave_one_out(log_of(pairs, items=400), seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.candidates, two.candidates)
    assert (one.candidates[:, 1:] != other.candidates[:, 1:]).any()
    first, again, second = one.epoch(5, 1), two.epoch(5, 1), one.epoch(5, 2)
    np.testing.assert_array_equal(first.items, again.items)
    np.testing.assert_array_equal(first.users, again.users)
    negatives = [sorted(epoch.items[epoch.labels == 0].tolist()) for epoch in (first, second)]
    assert negatives[0] != negatives[1]


def test_users_with_one_interaction_are_trained_and_never_tested():
    split = leave_one_out(log_of([(0, 1), (1, 2), (1, 3)], items=9), seed=0)
    assert split.test_users.tolist() == [1]
    assert sorted(zip(split.users.tolist(), split.items.tolist(), strict=True)) == [(0, 1), (1, 2)]


def test_a_repeated_last_item_is_not_trained_on():
    split = leave_one_out(log_of([(0, 1), (0, 2), (0, 3), (0, 1)], items=9), seed=0)
    assert split.candidates[0, 0] == 3
    assert split.items.tolist() == [1, 2]
    assert split.repeats == 1


@pytest.mark.parametrize("size", [1, 3, 10, 100])
def test_batches_are_the_epoch_in_order(size: int):
    epoch = leave_one_out(log_of([(0, 1), (0, 2), (1, 3), (1, 4)], items=9), seed=0).epoch(0, 0)
    parts = [epoch.batch(number, size) for number in range(epoch.batches(size))]
    assert [len(part.users) for part in parts[:-1]] == [size] * (len(parts) - 1)
    np.testing.assert_array_equal(np.concatenate([part.items for part in parts]), epoch.items)
    np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), epoch.labels)
