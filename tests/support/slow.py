"""What only `make test-all` runs: parameters, beside a fast representative, and most of the random examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings

DEFAULT_EXAMPLES = 100  # of hypothesis


def slow(*values: Any) -> list[Any]:
    """Return the parameters, marked slow; a plain tuple has the values of several arguments."""
    sets = (value if type(value) is tuple else (value,) for value in values)
    return [pytest.param(*arguments, marks=pytest.mark.slow) for arguments in sets]


def slow_but(cases: Mapping[str, Any], *fast: str) -> list[Any]:
    """Return each case under its name, marked slow unless its name is given: those run every time."""
    assert set(fast) <= set(cases), fast
    return [pytest.param(case, id=name, marks=() if name in fast else pytest.mark.slow) for name, case in cases.items()]


def examples(many: int) -> int:
    """Return how many examples hypothesis draws for a test that draws `many` in `make test-all`: else a tenth."""
    return max(5, many * settings().max_examples // DEFAULT_EXAMPLES)
