"""Durations: parsing ("30d", "5min")."""

from __future__ import annotations

import re

SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|m|h|d)\s*")


def parse_seconds(text: str) -> float | None:
    """Return the seconds of a duration; None where it is none, or nothing.

    Example:
        >>> parse_seconds("30s"), parse_seconds("1.5 min"), parse_seconds("soon")
        (30.0, 90.0, None)
    """
    found = _DURATION.fullmatch(text)
    return float(found[1]) * SECONDS[found[2]] or None if found is not None else None
