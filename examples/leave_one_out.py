"""Leave-one-out: rank the last item of each user among 100 items that the user never touched.

The protocol of He et al., "Neural Collaborative Filtering", WWW 2017. Training draws 4 such items for each interaction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from interactions import Interactions

CANDIDATES = 100  # items beside the one held out
NEGATIVES = 4  # drawn for each interaction, in every epoch
NOTHING = -1  # fills up the candidates of a user with fewer unseen items
RANKING, EPOCHS = 0, 1  # random streams


class Unseen:
    """The items that each user never touched, without a list of them.

    Args:
        users, items: int64 (n,), pairs without repeats, sorted by user and item.
        num_users, num_items: numbers of different ones.

    Example:
        >>> unseen = Unseen(np.array([0, 0]), np.array([1, 3]), num_users=1, num_items=5)
        >>> unseen.pick(np.array([0, 0, 0]), np.array([0, 1, 2]))
        array([0, 2, 4])
    """

    def __init__(self, users: np.ndarray, items: np.ndarray, num_users: int, num_items: int) -> None:
        seen = np.bincount(users, minlength=num_users)
        self._num_items, self._starts = num_items, np.cumsum(seen) - seen
        # Before the j-th item of a user (from 0), there are item - j unseen ones.
        self._keys = users * num_items + items - (np.arange(len(users)) - self._starts[users])
        self.counts = num_items - seen

    def pick(self, users: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Return, for each user, the unseen item of a rank from 0."""
        return ranks + np.searchsorted(self._keys, users * self._num_items + ranks, side="right") - self._starts[users]


@dataclass(frozen=True)
class Split:
    """Interactions to train on, and one of each user to test on.

    Attributes:
        users, items: int64 (n,), interactions to train on.
        test_users: int64 (m,).
        candidates: int64 (m, 1 + 100), the item held out and unseen ones, or `NOTHING`.
        unseen: items that each user never touched.
    """

    users: np.ndarray
    items: np.ndarray
    test_users: np.ndarray
    candidates: np.ndarray
    unseen: Unseen

    def epoch(self, seed: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return users, items and labels of an epoch: its interactions with fresh negatives, shuffled."""
        random = np.random.default_rng((seed, EPOCHS, number))
        others = np.repeat(self.users, NEGATIVES)
        others = others[self.unseen.counts[others] > 0]
        counts = self.unseen.counts[others]
        ranks = np.minimum((random.random(len(counts)) * counts).astype(np.int64), counts - 1)  # a product rounds up
        users = np.concatenate([self.users, others])
        items = np.concatenate([self.items, self.unseen.pick(others, ranks)])
        labels = np.concatenate([np.ones(len(self.users), np.float32), np.zeros(len(others), np.float32)])
        order = random.permutation(len(users))
        return users[order], items[order], labels[order]


def leave_one_out(log: Interactions, seed: int) -> Split:
    """Hold out the last item of each user with several: by time, or by the order of the file.

    Only the first interaction of a user with an item counts. Users without unseen items are not tested.
    """
    users, items = _in_order(log)
    lasts = np.flatnonzero(np.append(users[1:] != users[:-1], True))
    by_item = np.lexsort((items, users))
    unseen = Unseen(users[by_item], items[by_item], log.num_users, log.num_items)
    touched = np.bincount(users, minlength=log.num_users)[users[lasts]]
    held_out = lasts[(touched > 1) & (unseen.counts[users[lasts]] > 0)]
    trained = np.ones(len(users), bool)
    trained[held_out] = False
    others = _candidates(unseen, users[held_out], np.random.default_rng((seed, RANKING)))
    candidates = np.column_stack([items[held_out], others])
    return Split(users[trained], items[trained], users[held_out], candidates, unseen)


def _in_order(log: Interactions) -> tuple[np.ndarray, np.ndarray]:
    """Return users and items by user and time, each pair once."""
    times = np.zeros(len(log.users)) if log.times is None else log.times
    order = np.lexsort((times, log.users))  # stable: equal times stay in the order of the file
    users, items = log.users[order], log.items[order]
    _, firsts = np.unique(users * log.num_items + items, return_index=True)
    firsts.sort()
    return users[firsts], items[firsts]


def _candidates(unseen: Unseen, users: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw different unseen items for each user, or all of them: int64 (n, CANDIDATES)."""
    counts = unseen.counts[users]
    ranks = np.empty((len(users), CANDIDATES), np.int64)
    # Floyd's algorithm: each draw is from one more rank than the last; one drawn twice becomes the new one.
    for draw in range(CANDIDATES):
        newest = counts - CANDIDATES + draw
        rank = random.integers(0, np.maximum(newest, 0) + 1)
        taken = (ranks[:, :draw] == rank[:, None]).any(axis=1)
        ranks[:, draw] = np.where(taken, newest, rank)
    ranks[counts < CANDIDATES] = np.arange(CANDIDATES)
    missing = ranks >= counts[:, None]
    items = unseen.pick(np.repeat(users, CANDIDATES), np.where(missing, 0, ranks).ravel())
    return np.where(missing, NOTHING, items.reshape(ranks.shape))
