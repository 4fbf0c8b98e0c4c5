"""Leave-one-out: what is trained on, what is held out, and the items that a user never touched.

The protocol of He et al., "Neural Collaborative Filtering", WWW 2017: the last item of each user is held out
and ranked among 100 items that the user never touched; training draws 4 such items for each interaction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embedrock.demo.data.examples import Pairs
from embedrock.demo.data.interactions import Interactions

CANDIDATES = 100  # items that the held-out one is ranked among
NEGATIVES = 4  # drawn for each interaction, in every epoch
NOTHING = -1  # fills up the candidates of a user with fewer unseen items than that

# What a random stream is for, so that no two share their numbers.
_CANDIDATE_STREAM, _EPOCH_STREAM = 0, 1


class Unseen:
    """The items that each user never touched, without listing them.

    Args:
        users, items: int64 (n,), pairs without repeats, sorted by user and item.
        num_users, num_items: how many there are.

    Example:
        >>> unseen = Unseen(np.array([0, 0]), np.array([1, 3]), num_users=1, num_items=5)
        >>> unseen.counts
        array([3])
        >>> unseen.pick(np.array([0, 0, 0]), np.array([0, 1, 2]))
        array([0, 2, 4])
    """

    def __init__(self, users: np.ndarray, items: np.ndarray, num_users: int, num_items: int) -> None:
        seen = np.bincount(users, minlength=num_users)
        self._num_items = num_items
        self._starts = np.cumsum(seen) - seen
        # Before the j-th item of a user (from 0), there are item - j unseen ones.
        unseen_before = items - (np.arange(len(users)) - self._starts[users])
        self._keys = users * num_items + unseen_before
        self.counts = num_items - seen

    def pick(self, users: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Return, for each user, the unseen item of that rank: 0 is the least, counts[user] - 1 the last."""
        seen_below = np.searchsorted(self._keys, users * self._num_items + ranks, side="right")
        return ranks + seen_below - self._starts[users]


@dataclass(frozen=True)
class Split:
    """Interactions to train on, and one of each user to test on.

    Attributes:
        num_users, num_items: how many there are; ids lie below.
        users, items: int64 (n,), interactions to train on.
        test_users: int64 (m,), users with something held out.
        candidates: int64 (m, 1 + 100), the held-out item and items that the user never touched, without
            repeats; `NOTHING` in place of those that there are not.
        repeats: interactions left out because the user had touched the item before.
        unseen: items that each user never touched, neither in training nor in the test.
    """

    num_users: int
    num_items: int
    users: np.ndarray
    items: np.ndarray
    test_users: np.ndarray
    candidates: np.ndarray
    repeats: int
    unseen: Unseen

    def epoch(self, seed: int, number: int) -> Pairs:
        """Return the interactions with fresh negatives, shuffled: the same for the same seed and epoch.

        Users who touched everything have no negatives.
        """
        random = np.random.default_rng((seed, _EPOCH_STREAM, number))
        negative_users = np.repeat(self.users, NEGATIVES)
        negative_users = negative_users[self.unseen.counts[negative_users] > 0]
        # The product may round up to the count itself, which is no rank.
        counts = self.unseen.counts[negative_users]
        ranks = np.minimum((random.random(len(counts)) * counts).astype(np.int64), counts - 1)
        users = np.concatenate([self.users, negative_users])
        items = np.concatenate([self.items, self.unseen.pick(negative_users, ranks)])
        labels = np.zeros(len(users), np.float32)
        labels[: len(self.users)] = 1
        order = random.permutation(len(users))
        return Pairs(users[order], items[order], labels[order])


def leave_one_out(log: Interactions, seed: int) -> Split:
    """Hold out the last item of each user with more than one.

    "Last" is by timestamp, and by the order of the file where there are none or they are equal. Only the
    first interaction of a user with an item counts. Users who touched everything leave nothing to rank among
    and are not tested.
    """
    users, items = _in_order(log)
    lasts = np.flatnonzero(np.append(users[1:] != users[:-1], True))
    by_item = np.lexsort((items, users))
    unseen = Unseen(users[by_item], items[by_item], log.num_users, log.num_items)
    touched = np.bincount(users, minlength=log.num_users)[users[lasts]]
    held_out = lasts[(touched > 1) & (unseen.counts[users[lasts]] > 0)]
    trained = np.ones(len(users), bool)
    trained[held_out] = False
    negatives = _candidates(unseen, users[held_out], np.random.default_rng((seed, _CANDIDATE_STREAM)))
    return Split(
        log.num_users,
        log.num_items,
        users[trained],
        items[trained],
        users[held_out],
        np.column_stack([items[held_out], negatives]),
        len(log.users) - len(users),
        unseen,
    )


def _in_order(log: Interactions) -> tuple[np.ndarray, np.ndarray]:
    """Return users and items by user and time, each pair once."""
    times = np.zeros(len(log.users)) if log.times is None else log.times
    order = np.lexsort((times, log.users))  # stable: equal times stay in the order of the file
    users, items = log.users[order], log.items[order]
    _, firsts = np.unique(users * log.num_items + items, return_index=True)
    firsts.sort()
    return users[firsts], items[firsts]


def _candidates(unseen: Unseen, users: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw different unseen items for each user, all if there are not enough: int64 (n, CANDIDATES)."""
    counts = unseen.counts[users]
    ranks = np.empty((len(users), CANDIDATES), np.int64)
    # Floyd's algorithm: each draw is from one more rank than the last; one drawn twice becomes the new one.
    for draw in range(CANDIDATES):
        newest = counts - CANDIDATES + draw
        rank = random.integers(0, np.maximum(newest, 0) + 1)
        taken = (ranks[:, :draw] == rank[:, None]).any(axis=1)
        ranks[:, draw] = np.where(taken, newest, rank)
    few = counts < CANDIDATES
    ranks[few] = np.arange(CANDIDATES)
    missing = ranks >= counts[:, None]
    items = unseen.pick(np.repeat(users, CANDIDATES), np.where(missing, 0, ranks).ravel())
    return np.where(missing, NOTHING, items.reshape(ranks.shape))
