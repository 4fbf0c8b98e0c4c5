"""What the initializers of frameworks come to: distributions of some variance; and what is said of others."""

from __future__ import annotations

import math

from embedrock.initializers import Initializer, Normal, TruncatedNormal, Uniform

TRUNCATED_STD = 0.87962566103423978  # of a normal distribution that was cut off at two standard deviations
OTHERS = (
    "What is no formula of each weight by itself is passed as an array: init=er.FromArray(array) of an er.Table, or "
    "from_pretrained(array) of the layer"
)


def scaled(distribution: str, variance: float) -> Initializer:
    """Return first values of mean 0 and some variance.

    Args:
        distribution: "uniform", "normal", or "truncated_normal", cut off at two standard deviations.
        variance: of the values.

    Example:
        >>> scaled("uniform", 3.0)
        Uniform(low=-3.0, high=3.0)
    """
    if distribution == "uniform":
        return Uniform(-math.sqrt(3 * variance), math.sqrt(3 * variance))
    if distribution == "normal":
        return Normal(0.0, math.sqrt(variance))
    return TruncatedNormal(0.0, math.sqrt(variance) / TRUNCATED_STD)


def needs_rows(argument: str, given: object) -> str:
    """Return what to say of an initializer whose numbers follow from the count of rows, where ids are open."""
    return (
        f"{argument} {given!r} follows from the number of rows, and open ids (None) have none. Pass its numbers: "
        "er.Uniform(low, high), er.Normal(std=0.05) or er.TruncatedNormal(std=0.05)."
    )
