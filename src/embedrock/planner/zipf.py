"""Popularity by Zipf's law, as of the ids of many logs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def bounded_zipf(uniform: npt.NDArray[np.float64], ranks: int, exponent: float) -> npt.NDArray[np.int64]:
    """Turn uniform numbers into ranks in [0, ranks), rank k about as likely as (k + 1) ** -exponent.

    The continuous power law on [1, ranks], by its inverse distribution function, rounded down.
    """
    if exponent == 1:
        value = float(ranks) ** uniform
    else:
        power = 1 - exponent
        value = ((float(ranks) ** power - 1) * uniform + 1) ** (1 / power)
    return np.minimum(value.astype(np.int64) - 1, ranks - 1)
