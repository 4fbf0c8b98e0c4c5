"""Counts on a command line."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9}


def count(text: str) -> int:
    """Read a positive whole number: 4000000, 4_000_000, 4M, 1e9.

    Example:
        >>> count("4M")
        4000000
    """
    digits = text.replace("_", "").lower()
    factor = SUFFIXES.get(digits[-1:], 1)
    try:
        value = float(digits[:-1] if factor > 1 else digits) * factor
    except ValueError:
        value = math.nan
    if not value.is_integer() or value < 1:
        raise ArgumentTypeError(f"must be a positive whole number, such as 8192, 4M or 1e9: got {text!r}")
    return int(value)
