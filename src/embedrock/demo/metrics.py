"""How good scores are: AUC, hit rate and NDCG. NumPy only."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the chance that a positive scores above a negative, a tie counting one half.

    The Mann-Whitney U statistic over the number of pairs.

    Args:
        labels: (n,), 1 for positives, 0 for negatives.
        scores: (n,), finite.

    Raises:
        ValueError: a score is not finite, or one of the two classes is missing.

    Example:
        >>> auc(np.array([1, 0, 1, 0]), np.array([3.0, 1.0, 2.0, 2.0]))
        0.875
    """
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite: got NaN or Inf, which have no order.")
    values, inverse = np.unique(scores, return_inverse=True)
    positives = np.bincount(inverse, weights=labels > 0, minlength=len(values))
    negatives = np.bincount(inverse, minlength=len(values)) - positives
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        raise ValueError("labels must have positives and negatives: got only one of them.")
    below = np.cumsum(negatives) - negatives
    return float(positives @ (below + negatives / 2) / pairs)


def ranks_of_first(scores: np.ndarray) -> np.ndarray:
    """Return how many candidates are ranked above the first one: int64 (m,).

    A candidate that ties with the first is ranked above it, and so is one whose comparison involves a NaN: a
    model that gives the same score to all gets no credit.

    Args:
        scores: (m, n), a row for each user; column 0 is the held-out item.

    Example:
        >>> ranks_of_first(np.array([[2.0, 1.0, 3.0], [2.0, 2.0, 2.0]]))
        array([1, 2])
    """
    return np.count_nonzero(~(scores[:, 1:] < scores[:, :1]), axis=1)


def hit_rate(ranks: np.ndarray, size: int = 10) -> float:
    """Return the share of held-out items among the first `size` (HR@size); `ranks` from 0."""
    return float(np.mean(ranks < size))


def ndcg(ranks: np.ndarray, size: int = 10) -> float:
    """Return the mean of ``1 / log2(rank + 2)``, 0 for a rank beyond the first `size` (NDCG@size)."""
    return float(np.mean(np.where(ranks < size, 1 / np.log2(ranks + 2), 0)))
